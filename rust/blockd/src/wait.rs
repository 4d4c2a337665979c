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
use crate::fetch::Fetcher;
use crate::flight::{Plain, Progress, Trouble, Urgency};
use crate::open::OpenStack;
use crate::registry::Registry;

/// A wait so long is worth telling.
const NOTICED: Duration = Duration::from_secs(1);
/// Before asking again for what somebody else was to fetch and did not.
const AGAIN: Duration = Duration::from_millis(100);

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
    let end = Instant::now() + patience;
    let _wait = stack.wait();
    let (first, count, skip) = range.blocks();
    let mut bytes = buffer(count as usize * BLOCK);
    let all = skip..skip + range.size as usize;
    // Again when something was evicted before it was read, or given up by who was to fetch it.
    while !block_in_place(|| stack.read_now(first, &mut bytes)) {
        let waited = tokio::select! {
            waited = fill(&stack, &fetcher, first, &mut bytes, end) => waited,
            () = cancelled.notified() => Err(Errno::INTR),
        };
        match waited {
            Ok(true) => break,
            Ok(false) => {}
            Err(error) => return reply.error(error),
        }
    }
    reply.data(&bytes[all]);
}

/// Answers a read of a stack that a restarted server could not open yet, when it is open.
pub async fn read_lost(
    registry: Arc<Registry>,
    node: u64,
    fetcher: Arc<Fetcher>,
    range: Range,
    patience: Duration,
    reply: ReadReply,
) {
    let stack = loop {
        if let Some(stack) = registry.by_node(node) {
            break stack;
        }
        if reply.cancelled() {
            return reply.error(Errno::INTR);
        }
        if !registry.lost.has(node) && registry.by_node(node).is_none() {
            return reply.error(Errno::STALE);
        }
        sleep(AGAIN).await;
    };
    read(stack, fetcher, range, patience, reply).await;
}

/// Waits for what a range lacks and lays it into `bytes`; false if the rest must be read again.
async fn fill(
    stack: &Arc<OpenStack>,
    fetcher: &Arc<Fetcher>,
    first: u32,
    bytes: &mut [u8],
    end: Instant,
) -> Result<bool, Errno> {
    let count = (bytes.len() / BLOCK) as u32;
    let missing = stack.missing(first, count);
    let mut plains = std::collections::HashMap::new();
    for (layer, chunk, progress) in ask(stack, fetcher, &missing) {
        match arrival(stack, progress.clone(), end).await {
            Ok(Some(plain)) => drop(plains.insert((layer, chunk), plain)),
            Ok(None) => {
                sleep(AGAIN).await;
                return Ok(false);
            }
            Err(trouble) => {
                give_up(stack, progress, &trouble);
                return Err(Errno::IO);
            }
        }
    }
    let arrived = |layer, chunk| plains.get(&(layer, chunk)).map(|plain: &Plain| &plain[..]);
    Ok(block_in_place(|| stack.assemble(first, bytes, arrived)))
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
        ask_ahead(stack, fetcher, part);
    }
    waits
}

/// Has what follows chunks of one layer fetched, if they are read one after another.
pub fn ask_ahead(stack: &OpenStack, fetcher: &Arc<Fetcher>, part: &[(usize, u32)]) {
    let (Some((layer, first)), Some((_, last))) = (part.first(), part.last()) else {
        return;
    };
    let file = &stack.files[*layer];
    let ahead = stack.ahead(*layer, *first, *last);
    let ahead = ahead.filter(|chunk| !file.may_have(*chunk));
    drop(fetcher.request(file, ahead, Urgency::Ahead));
}

/// The chunk when it is here, None when nobody fetches it any more; the trouble when patience ends.
async fn arrival(
    stack: &OpenStack,
    mut progress: watch::Receiver<Progress>,
    end: Instant,
) -> Result<Option<Plain>, Trouble> {
    let begun = Instant::now();
    loop {
        let trouble = match &*progress.borrow_and_update() {
            Progress::Ready(plain) => return Ok(Some(Arc::clone(plain))),
            Progress::Waiting(trouble) => trouble.clone(),
        };
        let slow = || Trouble {
            message: "the store does not answer".into(),
            lasting: false,
        };
        let patient = stack.patient();
        let hopeless = trouble.as_ref().is_some_and(|t| t.lasting || !stack.held());
        if !patient && (hopeless || Instant::now() >= end) {
            return Err(trouble.unwrap_or_else(slow));
        }
        if trouble.is_some() || begun.elapsed() >= NOTICED {
            stack.set_fault(&trouble.unwrap_or_else(slow).message, false);
        }
        let left = end.saturating_duration_since(Instant::now());
        let look = if patient { NOTICED } else { left.min(NOTICED) };
        tokio::select! {
            changed = progress.changed() => if changed.is_err() {
                return Ok(None);
            },
            () = sleep(look) => {}
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
        loop {
            tokio::select! {
                _ = progress.wait_for(|p| matches!(p, Progress::Ready(_))) => break,
                () = sleep(NOTICED) => if stack.strong_count() == 0 {
                    return; // nobody will read
                },
            }
        }
        if let Some(stack) = stack.upgrade() {
            stack.probing.store(false, Ordering::Release);
            stack.clear_fault(true);
        }
    });
}
