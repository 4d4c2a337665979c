//! From blocks of a file to a layer and a pack of the chunks that are new.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use rayon::prelude::*;

use crate::chunk::{self, Entry};
use crate::cut::{Cut, Cutter};
use crate::layer::{Layer, Place};
use crate::pack;
use crate::{Id, BLOCK};

/// Chunks in work at once: bounds memory to some 8 MiB, keeps all cores busy.
const BATCH: usize = 64;
const READ: usize = 1 << 20;
const ZERO: [u8; BLOCK] = [0; BLOCK];

/// Blocks of a layer and where their bytes are in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first: u32,
    pub count: u32,
    /// Byte offset in the source; None: they are zeroes.
    pub offset: Option<u64>,
}

/// A layer and what writing it took.
#[derive(Debug)]
pub struct Written {
    pub layer: Layer,
    /// The pack of new chunks with its length; None if all were known.
    pub pack: Option<(Id, u64)>,
    /// Plain bytes of the chunks in the pack.
    pub fresh: u64,
    /// The chunks in the pack.
    pub chunks: Vec<(Entry, u64)>,
}

/// Where the store has a chunk already.
pub type Known = Option<(Entry, Place)>;

/// Writes a layer of `blocks` blocks that holds `spans` of `source` (in order, apart); what of them
/// is zero is kept as such, and takes nothing. The pack goes to `out`.
///
/// `known` answers for each chunk of a batch; its error ends the work.
pub fn write<W: Write, K: FnMut(&[Id]) -> io::Result<Vec<Known>>>(
    source: &File,
    blocks: u32,
    spans: &[Span],
    cut: Cut,
    known: K,
    out: W,
) -> io::Result<Written> {
    let mut work = Work::new(known, out)?;
    let mut shape = Shape {
        cutter: Cutter::new(cut),
        extents: Vec::new(),
        plain: Vec::new(),
    };
    let mut buffer = vec![0; READ];
    for span in spans {
        let Some(offset) = span.offset else {
            shape.zeroes(span.first, span.count);
            continue;
        };
        let mut done = 0;
        while done < span.count {
            let count = (span.count - done).min((READ / BLOCK) as u32);
            let bytes = &mut buffer[..count as usize * BLOCK];
            source.read_exact_at(bytes, offset + u64::from(done) * BLOCK as u64)?;
            for (number, block) in bytes.chunks_exact(BLOCK).enumerate() {
                shape.take(span.first + done + number as u32, block, &mut work)?;
            }
            done += count;
        }
    }
    shape.end(&mut work)?;
    work.finish(blocks, shape.extents)
}

/// Tells zeroes from data and data into chunks.
struct Shape {
    cutter: Cutter,
    extents: Vec<(u32, u32, bool)>,
    plain: Vec<u8>,
}

impl Shape {
    fn zeroes(&mut self, first: u32, count: u32) {
        self.extend(first, count, true);
    }

    fn extend(&mut self, at: u32, more: u32, zero: bool) {
        match self.extents.last_mut() {
            Some((first, count, was)) if *was == zero && *first + *count == at => *count += more,
            _ => self.extents.push((at, more, zero)),
        }
    }

    fn take(&mut self, at: u32, block: &[u8], work: &mut impl Sink) -> io::Result<()> {
        let zero = block == ZERO;
        self.extend(at, 1, zero);
        if zero {
            return Ok(());
        }
        if self.cutter.ends_before(at) {
            self.end(work)?;
        }
        self.plain.extend_from_slice(block);
        if self.cutter.ends_behind(at, block) {
            self.end(work)?;
        }
        Ok(())
    }

    fn end(&mut self, work: &mut impl Sink) -> io::Result<()> {
        self.cutter.begin();
        if self.plain.is_empty() {
            return Ok(());
        }
        let capacity = self.plain.len();
        work.chunk(std::mem::replace(
            &mut self.plain,
            Vec::with_capacity(capacity),
        ))
    }
}

/// Takes chunks in order.
trait Sink {
    fn chunk(&mut self, plain: Vec<u8>) -> io::Result<()>;
}

/// Names, looks up, compresses and stores chunks, a batch at a time.
struct Work<W, K> {
    known: K,
    pack: pack::Writer<W>,
    batch: Vec<Vec<u8>>,
    /// Those whose place is not known lie in the pack being written, at this offset.
    chunks: Vec<(Entry, Result<Place, u64>)>,
    fresh: Vec<(Entry, u64)>,
    mine: HashMap<Id, (Entry, u64)>,
}

impl<W: Write, K: FnMut(&[Id]) -> io::Result<Vec<Known>>> Sink for Work<W, K> {
    fn chunk(&mut self, plain: Vec<u8>) -> io::Result<()> {
        self.batch.push(plain);
        if self.batch.len() < BATCH {
            return Ok(());
        }
        self.flush()
    }
}

impl<W: Write, K: FnMut(&[Id]) -> io::Result<Vec<Known>>> Work<W, K> {
    fn new(known: K, out: W) -> io::Result<Self> {
        Ok(Self {
            known,
            pack: pack::Writer::new(out)?,
            batch: Vec::with_capacity(BATCH),
            chunks: Vec::new(),
            fresh: Vec::new(),
            mine: HashMap::new(),
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        let batch = std::mem::take(&mut self.batch);
        let ids: Vec<Id> = batch.par_iter().map(|plain| Id::of(plain)).collect();
        let found = (self.known)(&ids)?;
        if found.len() != ids.len() {
            return Err(io::Error::other("the index answered for other chunks"));
        }
        let mut wanted = HashMap::new();
        for (number, (id, known)) in ids.iter().zip(&found).enumerate() {
            if known.is_none() && !self.mine.contains_key(id) {
                wanted.entry(*id).or_insert(number);
            }
        }
        let mut numbers: Vec<(usize, Id)> = wanted.into_iter().map(|(id, n)| (n, id)).collect();
        numbers.sort_unstable();
        let encode = |(number, id): &(usize, Id)| chunk::encode(*id, &batch[*number]);
        let encoded: Vec<(Entry, Vec<u8>)> = numbers.par_iter().map(encode).collect();
        for (entry, stored) in encoded {
            let at = self.pack.add(&entry, &stored)?;
            self.fresh.push((entry, at));
            self.mine.insert(entry.id, (entry, at));
        }
        for (id, known) in ids.iter().zip(found) {
            self.chunks.push(match (known, self.mine.get(id)) {
                (Some((entry, place)), _) => (entry, Ok(place)),
                (None, Some((entry, at))) => (*entry, Err(*at)),
                (None, None) => return Err(io::Error::other("a chunk got lost")),
            });
        }
        Ok(())
    }

    fn finish(mut self, blocks: u32, extents: Vec<(u32, u32, bool)>) -> io::Result<Written> {
        self.flush()?;
        let empty = self.pack.is_empty();
        let (id, size) = self.pack.finish()?;
        let chunks: Vec<(Entry, Place)> = self
            .chunks
            .into_iter()
            .map(|(entry, place)| {
                (
                    entry,
                    place.unwrap_or_else(|offset| Place { pack: id, offset }),
                )
            })
            .collect();
        let layer = Layer::new(blocks, extents, &chunks)
            .map_err(|fault| io::Error::new(io::ErrorKind::InvalidInput, fault))?;
        let fresh = self
            .fresh
            .iter()
            .map(|(entry, _)| entry.bytes() as u64)
            .sum();
        let pack = (!empty).then_some((id, size));
        Ok(Written {
            layer,
            pack,
            fresh,
            chunks: self.fresh,
        })
    }
}

#[cfg(test)]
#[path = "write_test.rs"]
mod tests;
