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
mod tests {
    use super::*;

    fn noise(seed: u64, blocks: usize) -> Vec<u8> {
        let parts = (0..).map(|n: u64| Id::of(&(seed << 32 | n).to_le_bytes()).0);
        parts.flatten().take(blocks * BLOCK).collect()
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn whole(blocks: usize) -> [Span; 1] {
        [Span {
            first: 0,
            count: blocks as u32,
            offset: Some(0),
        }]
    }

    fn nothing_known(ids: &[Id]) -> io::Result<Vec<Known>> {
        Ok(vec![None; ids.len()])
    }

    fn write_all(bytes: &[u8], cut: Cut) -> (Written, Vec<u8>) {
        let mut pack = Vec::new();
        let blocks = bytes.len() / BLOCK;
        let spans = whole(blocks);
        let written = write(
            &file(bytes),
            blocks as u32,
            &spans,
            cut,
            nothing_known,
            &mut pack,
        )
        .unwrap();
        (written, pack)
    }

    /// The flat content of a layer whose chunks all lie in one pack.
    fn read(layer: &Layer, pack: &[u8]) -> Vec<u8> {
        let mut flat = vec![0; layer.blocks() as usize * BLOCK];
        for number in 0..layer.chunk_count() {
            let entry = layer.entry(number);
            let at = layer.place(number).offset as usize;
            let mut plain = vec![0; entry.bytes()];
            chunk::decode(entry, &pack[at..at + entry.stored as usize], &mut plain).unwrap();
            let mut rest = &plain[..];
            for (first, count) in layer.runs(layer.begin(number), entry.blocks.into()) {
                let (part, more) = rest.split_at(count as usize * BLOCK);
                flat[first as usize * BLOCK..][..part.len()].copy_from_slice(part);
                rest = more;
            }
        }
        flat
    }

    #[test]
    fn content_reads_back_however_cut() {
        let mut bytes = noise(1, 300);
        bytes[10 * BLOCK..150 * BLOCK].fill(0);
        bytes[200 * BLOCK..201 * BLOCK].fill(0);
        for cut in [Cut::Content, Cut::Fixed(16), Cut::Fixed(1)] {
            let (written, pack) = write_all(&bytes, cut);
            assert_eq!(read(&written.layer, &pack), bytes, "{cut:?}");
            assert_eq!(written.layer.data_blocks(), 159);
            assert_eq!(written.fresh, 159 * BLOCK as u64);
        }
    }

    #[test]
    fn equal_input_gives_equal_bytes() {
        let bytes = noise(2, 500);
        let (one, two) = (
            write_all(&bytes, Cut::Content),
            write_all(&bytes, Cut::Content),
        );
        assert_eq!(one.0.layer, two.0.layer);
        assert_eq!(one.1, two.1);
    }

    #[test]
    fn what_repeats_is_stored_once() {
        let part = noise(3, 200);
        let bytes = [&part[..], &part[..]].concat();
        let (written, pack) = write_all(&bytes, Cut::Content);
        assert_eq!(read(&written.layer, &pack), bytes);
        assert!(written.fresh < 300 * BLOCK as u64, "{}", written.fresh);
    }

    #[test]
    fn shifted_content_is_mostly_known() {
        let part = noise(4, 2000);
        let (first, _) = write_all(&part, Cut::Content);
        let bytes = [&noise(5, 3)[..], &part[..]].concat();
        let blocks = bytes.len() / BLOCK;
        let known = |ids: &[Id]| {
            let layer = &first.layer;
            let chunk = |id: &Id| (0..layer.chunk_count()).find(|n| layer.entry(*n).id == *id);
            Ok(ids
                .iter()
                .map(|id| chunk(id).map(|n| (*layer.entry(n), layer.place(n))))
                .collect())
        };
        let mut pack = Vec::new();
        let spans = whole(blocks);
        let second = write(
            &file(&bytes),
            blocks as u32,
            &spans,
            Cut::Content,
            known,
            &mut pack,
        )
        .unwrap();
        assert!(second.fresh < 100 * BLOCK as u64, "{}", second.fresh);
        assert_eq!(second.layer.packs().len(), 2);
    }

    #[test]
    fn fixed_chunks_keep_their_places_whatever_is_between() {
        let bytes = noise(6, 64);
        let (full, _) = write_all(&bytes, Cut::Fixed(16));
        let mut holed = bytes.clone();
        holed[20 * BLOCK..22 * BLOCK].fill(0);
        let (less, _) = write_all(&holed, Cut::Fixed(16));
        let ids = |w: &Written| (0..4).map(|n| w.layer.entry(n).id).collect::<Vec<_>>();
        let (full, less) = (ids(&full), ids(&less));
        assert_eq!((full[0], full[2], full[3]), (less[0], less[2], less[3]));
        assert_ne!(full[1], less[1]);
    }

    #[test]
    fn spans_come_from_anywhere() {
        let bytes = noise(7, 20);
        let spans = [
            Span {
                first: 5,
                count: 4,
                offset: Some(10 * BLOCK as u64),
            },
            Span {
                first: 100,
                count: 2,
                offset: Some(0),
            },
        ];
        let mut pack = Vec::new();
        let written = write(
            &file(&bytes),
            200,
            &spans,
            Cut::Fixed(16),
            nothing_known,
            &mut pack,
        )
        .unwrap();
        let flat = read(&written.layer, &pack);
        assert_eq!(flat[5 * BLOCK..9 * BLOCK], bytes[10 * BLOCK..14 * BLOCK]);
        assert_eq!(flat[100 * BLOCK..102 * BLOCK], bytes[..2 * BLOCK]);
        let (short, spans) = (
            file(&bytes),
            [Span {
                first: 0,
                count: 21,
                offset: Some(0),
            }],
        );
        assert!(write(
            &short,
            200,
            &spans,
            Cut::Fixed(16),
            nothing_known,
            Vec::new()
        )
        .is_err());
    }

    #[test]
    fn zeroes_need_no_source() {
        let spans = [
            Span {
                first: 3,
                count: 2,
                offset: None,
            },
            Span {
                first: 5,
                count: 1,
                offset: Some(0),
            },
        ];
        let cut = Cut::Fixed(16);
        let source = file(&noise(8, 1));
        let written = write(&source, 9, &spans, cut, nothing_known, Vec::new()).unwrap();
        let found: Vec<_> = written
            .layer
            .extents()
            .iter()
            .map(|e| (e.first, e.count, e.zero))
            .collect();
        assert_eq!(found, [(3, 2, true), (5, 1, false)]);
    }

    #[test]
    fn nothing_is_a_layer_too() {
        let (written, _) = write_all(&vec![0; 50 * BLOCK], Cut::Content);
        assert!(written.pack.is_none());
        assert_eq!(written.layer.blocks(), 50);
        assert_eq!(
            Layer::decode(&written.layer.encode()).unwrap(),
            written.layer
        );
    }
}
