//! Reads of a store on this machine, by the thread that was asked: changing threads takes longer
//! than decompressing a chunk.
//!
//! A directory may hang (a network's file system). So only a few threads do this at a time, and a
//! read that takes long is given to those who wait (`wait`): they are patient, tell of it, and can
//! be killed.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentenv_blocks::BLOCK;
use agentenv_fuse::ReadReply;
use parking_lot::Mutex;

use crate::cache::file::{buffer, Buffer};
use crate::fetch::Fetcher;
use crate::open::OpenStack;
use crate::wait::{self, Range};

/// Threads at this at once, of the four that answer the kernel.
const PLACES: usize = 2;
/// Chunks read here for one answer: of more, several threads make less.
const MOST: usize = 2;
const LONG: Duration = Duration::from_millis(100);

struct Reading {
    since: Instant,
    stack: Arc<OpenStack>,
    range: Range,
    /// None when it was given away.
    reply: Option<ReadReply>,
}

/// The reads under way.
#[derive(Default)]
pub struct Near([Mutex<Option<Reading>>; PLACES]);

impl Near {
    /// Answers a read of chunks that are only in the store, or gives it back.
    pub fn read(
        &self,
        stack: &Arc<OpenStack>,
        fetcher: &Arc<Fetcher>,
        range: Range,
        reply: ReadReply,
    ) -> Option<ReadReply> {
        let (first, count, _) = range.blocks();
        let missing = if fetcher.near() {
            stack.missing(first, count)
        } else {
            Vec::new()
        };
        let fresh = |(layer, chunk): &(usize, u32)| !stack.files[*layer].may_have(*chunk);
        let alone = |&(layer, chunk): &(usize, u32)| !stack.goes_on(layer, chunk);
        // Who reads on is served by those who fetch ahead.
        if missing.len() > MOST || !missing.iter().all(fresh) || !missing.first().is_some_and(alone)
        {
            return Some(reply);
        }
        let mut reading = Some(Reading {
            since: Instant::now(),
            stack: Arc::clone(stack),
            range,
            reply: Some(reply),
        });
        let place = self.0.iter().find(|place| {
            let free = place.try_lock().filter(|held| held.is_none());
            free.map(|mut held| *held = reading.take()).is_some()
        });
        let Some(place) = place else {
            return reading?.reply;
        };
        let parts = missing.chunk_by(|a, b| a.0 == b.0);
        parts.for_each(|part| wait::ask_ahead(stack, fetcher, part));
        fetch(stack, fetcher, range, &missing, || {
            place.lock().take()?.reply
        })
    }

    /// Gives reads that take long to those who wait.
    pub async fn watch(self: Arc<Self>, fetcher: Arc<Fetcher>, patience: Duration) {
        let mut tick = tokio::time::interval(LONG);
        loop {
            tick.tick().await;
            for place in &self.0 {
                let mut held = place.lock();
                let Some(reading) = held.as_mut().filter(|one| one.since.elapsed() > LONG) else {
                    continue;
                };
                if let Some(reply) = reading.reply.take() {
                    let (stack, fetcher) = (Arc::clone(&reading.stack), Arc::clone(&fetcher));
                    tokio::spawn(wait::read(stack, fetcher, reading.range, patience, reply));
                }
            }
        }
    }
}

thread_local! {
    /// Chunks and the answer made of them, in memory that need not be asked for each time.
    static BYTES: RefCell<(Vec<Vec<u8>>, Buffer)> = RefCell::new((Vec::new(), buffer(0)));
}

/// Fetches, then answers with the reply if it is still there; gives it back on trouble.
fn fetch(
    stack: &Arc<OpenStack>,
    fetcher: &Arc<Fetcher>,
    range: Range,
    missing: &[(usize, u32)],
    reply: impl FnOnce() -> Option<ReadReply>,
) -> Option<ReadReply> {
    BYTES.with_borrow_mut(|(plains, answer)| {
        plains.resize_with(plains.len().max(missing.len()), Vec::new);
        let mut came = Vec::new();
        for ((layer, chunk), plain) in missing.iter().zip(&mut *plains) {
            let file = &stack.files[*layer];
            plain.resize(file.layer().entry(*chunk).bytes(), 0);
            came.push(fetcher.fetch_here(file, *chunk, plain));
        }
        let (first, count, skip) = range.blocks();
        answer.resize(count as usize * BLOCK, 0);
        let found = |layer, chunk| {
            let at = missing.iter().position(|one| *one == (layer, chunk))?;
            came[at].as_ref().map(|_| &plains[at][..])
        };
        let whole = came.iter().all(Option::is_some) && stack.assemble(first, answer, found);
        let left = match reply() {
            Some(reply) if whole => {
                reply.data(&answer[skip..skip + range.size as usize]);
                std::thread::yield_now(); // the reader may have been woken on this CPU
                None
            }
            left => left,
        };
        for (((layer, _), here), plain) in missing.iter().zip(came).zip(&*plains) {
            if let Some(here) = here {
                fetcher.landed_here(&stack.files[*layer], here, plain);
            }
        }
        left
    })
}
