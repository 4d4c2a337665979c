//! Reads of what is not here: they wait for its chunks, within their stack's patience.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentenv_blocks::BLOCK;
use agentenv_fuse::{Errno, ReadReply};
use tokio::sync::{watch, Notify};
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::cache::file::buffer;
use crate::fetch::{Fetcher, Urgency};
use crate::flight::{Plain, Progress, Trouble};
use crate::open::{Kind, OpenStack};

/// A wait so long is worth telling.
const NOTICED: Duration = Duration::from_secs(1);
/// A chunk may be evicted between its arrival and the read, under pressure even again.
const TRIES: usize = 100;

/// A range of bytes asked for.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub offset: u64,
    pub size: u32,
}

impl Range {
    /// First block, number of blocks, and where the range begins in the first.
    pub fn blocks(&self) -> (u32, u32, usize) {
        let first = self.offset / BLOCK as u64;
        let skip = (self.offset % BLOCK as u64) as usize;
        let count = (skip + self.size as usize).div_ceil(BLOCK);
        (first as u32, count as u32, skip)
    }
}

/// Answers a read, however long it takes.
pub async fn read(
    stack: Arc<OpenStack>,
    fetcher: Arc<Fetcher>,
    range: Range,
    patience: Duration,
    reply: ReadReply,
) {
    let cancelled = Arc::new(Notify::new());
    let tell = Arc::clone(&cancelled);
    reply.on_cancel(Box::new(move || tell.notify_one()));
    let (first, count, skip) = range.blocks();
    let mut bytes = buffer(count as usize * BLOCK);
    for _ in 0..TRIES {
        match block_in_place(|| stack.read_now(first, &mut bytes)) {
            Ok(true) => return reply.data(&bytes[skip..skip + range.size as usize]),
            Ok(false) => {}
            Err(error) => {
                stack.set_fault(&format!("the cache cannot be read: {error}").into(), true);
                return reply.error(Errno::IO);
            }
        }
        let waited = tokio::select! {
            waited = fill(&stack, &fetcher, first, &mut bytes, patience) => waited,
            () = cancelled.notified() => Err(Errno::INTR),
        };
        match waited {
            Ok(true) => return reply.data(&bytes[skip..skip + range.size as usize]),
            Ok(false) => {}
            Err(error) => return reply.error(error),
        }
    }
    reply.error(Errno::IO);
}

/// Waits for what a range lacks and lays it into `bytes`; false if the rest must be read again.
async fn fill(
    stack: &Arc<OpenStack>,
    fetcher: &Arc<Fetcher>,
    first: u32,
    bytes: &mut [u8],
    patience: Duration,
) -> Result<bool, Errno> {
    let count = (bytes.len() / BLOCK) as u32;
    let missing = stack.missing(first, count);
    let waits = ask(stack, fetcher, &missing);
    let deadline = (stack.kind == Kind::Disk).then(|| Instant::now() + patience);
    let mut plains = std::collections::HashMap::new();
    for (layer, chunk, progress) in waits {
        let plain = arrival(stack, progress.clone(), deadline)
            .await
            .map_err(|trouble| {
                give_up(stack, progress, &trouble);
                Errno::IO
            })?;
        plains.insert((layer, chunk), plain);
    }
    stack.clear_fault(false);
    let arrived = |layer, chunk| plains.get(&(layer, chunk)).map(|plain: &Plain| &plain[..]);
    block_in_place(|| stack.assemble(first, bytes, arrived)).map_err(|_| Errno::IO)
}

type Wait = (usize, u32, watch::Receiver<Progress>);

/// Has everything that is missing fetched, and a little of what follows.
fn ask(stack: &Arc<OpenStack>, fetcher: &Arc<Fetcher>, missing: &[(usize, u32)]) -> Vec<Wait> {
    let mut waits = Vec::new();
    for part in missing.chunk_by(|a, b| a.0 == b.0) {
        let layer = part[0].0;
        let file = &stack.files[layer];
        let chunks = part.iter().map(|(_, chunk)| *chunk);
        let asked = fetcher.request(file, chunks, Urgency::Waited);
        waits.extend(
            asked
                .into_iter()
                .map(|(chunk, progress)| (layer, chunk, progress)),
        );
        for (_, chunk) in part {
            let ahead = stack
                .ahead(layer, *chunk)
                .filter(|chunk| !file.may_have(*chunk));
            let ahead: Vec<u32> = ahead.collect();
            drop(fetcher.request(file, ahead, Urgency::Ahead));
        }
    }
    waits
}

/// The chunk when it is here; the trouble when patience is over.
async fn arrival(
    stack: &OpenStack,
    mut progress: watch::Receiver<Progress>,
    deadline: Option<Instant>,
) -> Result<Plain, Trouble> {
    let begun = Instant::now();
    loop {
        let trouble = match &*progress.borrow_and_update() {
            Progress::Ready(plain) => return Ok(Arc::clone(plain)),
            Progress::Waiting(trouble) => trouble.clone(),
        };
        let slow = || Trouble {
            message: "the store does not answer".into(),
            lasting: false,
        };
        let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let hopeless = deadline.is_some() && trouble.as_ref().is_some_and(|t| t.lasting);
        if over || hopeless {
            return Err(trouble.unwrap_or_else(slow));
        }
        if trouble.is_some() || begun.elapsed() >= NOTICED {
            stack.set_fault(&trouble.unwrap_or_else(slow).message, false);
        }
        tokio::select! {
            changed = progress.changed() => if changed.is_err() {
                return Err(Trouble { message: "its fetch was given up".into(), lasting: false });
            },
            () = sleep(NOTICED) => {}
        }
    }
}

/// Tells of the failure, and waits on until reads would come through again.
fn give_up(stack: &Arc<OpenStack>, mut progress: watch::Receiver<Progress>, trouble: &Trouble) {
    stack.set_fault(&trouble.message, true);
    if stack.probing.swap(true, Ordering::AcqRel) {
        return;
    }
    let stack = Arc::downgrade(stack);
    tokio::spawn(async move {
        let _ = progress.wait_for(|p| matches!(p, Progress::Ready(_))).await;
        if let Some(stack) = stack.upgrade() {
            stack.probing.store(false, Ordering::Release);
            stack.clear_fault(true);
        }
    });
}
