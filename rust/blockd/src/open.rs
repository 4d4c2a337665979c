//! An open stack: its reads, what holds them up, what they touched first.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agentenv_blocks::stack::{Piece, Stack};
use agentenv_blocks::{Id, BLOCK};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::cache::file::LayerFile;

/// What becomes of reads that cannot be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// They fail when patience is over; whoever reads stops and goes on when told.
    Disk,
    /// They wait as long as somebody holds the stack: an error would end who maps the file, or be
    /// told to a guest whose host has it mounted.
    Memory,
}

/// Why reads of a stack do not come through.
#[derive(Clone, Debug, Serialize)]
pub struct Fault {
    pub cause: Arc<str>,
    /// Unix seconds.
    pub since: u64,
    /// Reads were answered with an error, not just held up.
    pub failed: bool,
}

impl Fault {
    /// From now on.
    pub fn new(cause: Arc<str>, failed: bool) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let since = since.unwrap_or(Duration::ZERO).as_secs();
        Self {
            cause,
            since,
            failed,
        }
    }
}

/// Reads remembered for the next node: the chunks a start needs.
const FIRST_USE: usize = 1 << 12;
/// Chunks read ahead of someone who reads one after another: at first, at most.
const AHEAD: (u32, u32) = (2, 16);

pub struct OpenStack {
    pub id: Id,
    pub node: u64,
    waits: AtomicBool,
    held: AtomicBool,
    pub stack: Stack,
    /// As the stack's layers.
    pub files: Vec<Arc<LayerFile>>,
    pub fault: Mutex<Option<Fault>>,
    /// Moves with every change of a fault, of any stack.
    pub changes: Arc<watch::Sender<u64>>,
    pub probing: AtomicBool,
    /// Reads that wait.
    waiting: AtomicUsize,
    recording: AtomicBool,
    first_use: Mutex<FirstUse>,
    streams: Vec<Mutex<Stream>>,
}

#[derive(Default)]
struct FirstUse {
    seen: HashSet<(u32, u32)>,
    order: Vec<(u32, u32)>,
}

#[derive(Default)]
struct Stream {
    /// Where the next read begins if it goes on: behind what was read, in what was fetched ahead,
    /// or just behind that.
    reach: Range<u32>,
    ahead: u32,
}

impl OpenStack {
    pub fn new(
        id: Id,
        node: u64,
        kind: Kind,
        stack: Stack,
        files: Vec<Arc<LayerFile>>,
        changes: Arc<watch::Sender<u64>>,
    ) -> Self {
        Self {
            id,
            node,
            waits: AtomicBool::new(kind == Kind::Memory),
            held: AtomicBool::new(true),
            streams: stack.layers().iter().map(|_| Mutex::default()).collect(),
            stack,
            files,
            fault: Mutex::default(),
            changes,
            probing: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            recording: AtomicBool::new(true),
            first_use: Mutex::default(),
        }
    }

    pub fn kind(&self) -> Kind {
        match self.waits.load(Ordering::Acquire) {
            true => Kind::Memory,
            false => Kind::Disk,
        }
    }

    pub fn set_kind(&self, kind: Kind) {
        self.waits.store(kind == Kind::Memory, Ordering::Release);
    }

    /// Whether reads wait for as long as it takes. Whoever unmounts a stack that nobody holds any
    /// more waits for the reads that are under way.
    pub fn patient(&self) -> bool {
        self.held() && self.kind() == Kind::Memory
    }

    pub fn held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    pub fn set_held(&self, held: bool) {
        self.held.store(held, Ordering::Release);
    }

    /// Bytes of the flat file.
    pub fn size(&self) -> u64 {
        u64::from(self.stack.blocks()) * BLOCK as u64
    }

    /// Fills `out`, a whole number of blocks, from what is here; false if something is not.
    pub fn read_now(&self, first: u32, out: &mut [u8]) -> bool {
        let count = (out.len() / BLOCK) as u32;
        let mut rest = out;
        for piece in self.stack.pieces(first, count) {
            let (part, more) = rest.split_at_mut(piece.count() as usize * BLOCK);
            rest = more;
            match piece {
                Piece::Zeroes { .. } => part.fill(0),
                Piece::Data {
                    layer,
                    block,
                    data,
                    count,
                } => {
                    if !self.files[layer].read(block, data, part) {
                        return false;
                    }
                    self.record(layer, data, count);
                }
            }
        }
        rest.fill(0); // behind the end
        true
    }

    /// As `read_now`, where a chunk that `arrived` knows need not be here.
    pub fn assemble<P: AsRef<[u8]>>(
        &self,
        first: u32,
        out: &mut [u8],
        arrived: impl Fn(usize, u32) -> Option<P>,
    ) -> bool {
        let count = (out.len() / BLOCK) as u32;
        let mut rest = out;
        for piece in self.stack.pieces(first, count) {
            let (mut part, more) = rest.split_at_mut(piece.count() as usize * BLOCK);
            rest = more;
            let Piece::Data {
                layer,
                mut block,
                mut data,
                count,
            } = piece
            else {
                part.fill(0);
                continue;
            };
            let table = self.files[layer].layer();
            for chunk in self.chunks(layer, data, count) {
                let begin = table.begin(chunk);
                let left = begin + u32::from(table.entry(chunk).blocks) - data;
                let (now, later) = part.split_at_mut(part.len().min(left as usize * BLOCK));
                match arrived(layer, chunk) {
                    Some(plain) => {
                        let at = (data - begin) as usize * BLOCK;
                        now.copy_from_slice(&plain.as_ref()[at..at + now.len()]);
                    }
                    None if !self.files[layer].read(block, data, now) => return false,
                    None => {}
                }
                let blocks = (now.len() / BLOCK) as u32;
                (block, data, part) = (block + blocks, data + blocks, later);
            }
        }
        rest.fill(0);
        true
    }

    /// The chunks of a range that cannot be read here: layer and chunk, in order.
    pub fn missing(&self, first: u32, count: u32) -> Vec<(usize, u32)> {
        let mut found = Vec::new();
        for piece in self.stack.pieces(first, count) {
            let Piece::Data {
                layer, data, count, ..
            } = piece
            else {
                continue;
            };
            self.record(layer, data, count);
            let file = &self.files[layer];
            found.extend(
                self.chunks(layer, data, count)
                    .filter(|c| !file.has(*c))
                    .map(|c| (layer, c)),
            );
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    fn chunks(&self, layer: usize, data: u32, count: u32) -> impl Iterator<Item = u32> + '_ {
        let table = self.files[layer].layer();
        table.chunk_at(data)..=table.chunk_at(data + count - 1)
    }

    /// Whether a read that begins in this chunk goes on where an earlier one ended.
    pub fn goes_on(&self, layer: usize, chunk: u32) -> bool {
        chunk > 0 && self.streams[layer].lock().reach.contains(&chunk)
    }

    /// Chunks worth fetching behind those of a read, `first` to `last`, that are fetched now: more
    /// and more as long as each read goes on where an earlier one ended.
    pub fn ahead(&self, layer: usize, first: u32, last: u32) -> Range<u32> {
        let mut stream = self.streams[layer].lock();
        let steady = first > 0 && stream.reach.contains(&first);
        let fetched = if steady { stream.reach.end - 1 } else { 0 };
        if fetched > last + 1 + stream.ahead / 2 {
            stream.reach.start = last + 1;
            return fetched..fetched; // enough is on its way: few requests, not one for each chunk
        }
        stream.ahead = match (steady, stream.ahead) {
            (false, _) => 0,
            (true, 0) => AHEAD.0,
            (true, ahead) => (ahead * 2).min(AHEAD.1),
        };
        let count = self.files[layer].layer().chunk_count();
        let end = (last + 1 + stream.ahead).min(count);
        stream.reach = last + 1..end + 1;
        (last + 1).max(fetched).min(end)..end
    }

    fn record(&self, layer: usize, data: u32, count: u32) {
        if !self.recording.load(Ordering::Relaxed) {
            return;
        }
        let mut record = self.first_use.lock();
        for chunk in self.chunks(layer, data, count) {
            let one = (layer as u32, chunk);
            if record.seen.insert(one) {
                record.order.push(one);
            }
        }
        if record.order.len() >= FIRST_USE {
            self.recording.store(false, Ordering::Relaxed);
            record.seen = HashSet::new();
        }
    }

    /// Ends the recording; the chunks touched so far in their order (layer, chunk).
    pub fn first_use(&self) -> Vec<(u32, u32)> {
        self.recording.store(false, Ordering::Relaxed);
        let mut record = self.first_use.lock();
        record.seen = HashSet::new();
        std::mem::take(&mut record.order)
    }

    /// Says why reads wait or failed. A failure is not overwritten by a mere wait.
    pub fn set_fault(&self, cause: &Arc<str>, failed: bool) {
        let mut fault = self.fault.lock();
        if fault.as_ref().is_some_and(|known| known.failed || !failed) {
            return;
        }
        *fault = Some(Fault::new(Arc::clone(cause), failed));
        self.changes.send_modify(|version| *version += 1);
    }

    /// A read begins to wait.
    pub fn wait(self: &Arc<Self>) -> Wait {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        Wait(Arc::clone(self))
    }

    /// Reads come through. What was told of failures is not cleared by mere waits that ended.
    pub fn clear_fault(&self, failed: bool) {
        let mut fault = self.fault.lock();
        if fault.as_ref().is_some_and(|known| !known.failed || failed) {
            *fault = None;
            self.changes.send_modify(|version| *version += 1);
        }
    }
}

/// A read that waits: the last one of a stack to end takes away what said that reads wait.
pub struct Wait(Arc<OpenStack>);

impl Drop for Wait {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.clear_fault(false);
        }
    }
}

#[cfg(test)]
#[path = "open_test.rs"]
mod tests;
