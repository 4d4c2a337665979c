//! One chunk: a run of blocks, stored compressed, named by the digest of its plain bytes.

use std::cell::RefCell;

use crate::bytes::Fields;
use crate::{Damaged, Id, BLOCK};

/// The longest chunk a reader accepts: bounds what one costs in memory.
pub const MAX_BLOCKS: u16 = 256;
/// Bytes of an `Entry` in a table.
pub const ENTRY: usize = 32 + 4 + 2 + 2;
/// zstd's level: 2.7-3.2 times smaller at 150-290 MB/s a core (DESIGN.md, measured).
const LEVEL: i32 = 3;

/// How the stored bytes become plain ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    Plain = 0,
    Zstd = 1,
}

/// What is known of a chunk wherever it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub id: Id,
    /// Bytes as stored.
    pub stored: u32,
    /// Blocks when plain: 1 to `MAX_BLOCKS`.
    pub blocks: u16,
    pub codec: Codec,
}

impl Entry {
    /// Bytes when plain.
    pub fn bytes(&self) -> usize {
        usize::from(self.blocks) * BLOCK
    }

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.0);
        out.extend_from_slice(&self.stored.to_le_bytes());
        out.extend_from_slice(&self.blocks.to_le_bytes());
        out.extend_from_slice(&(self.codec as u16).to_le_bytes());
    }

    pub(crate) fn get(fields: &mut Fields<'_>) -> Result<Self, Damaged> {
        let (id, stored) = (fields.id()?, fields.u32()?);
        let (blocks, codec) = (fields.u16()?, fields.u16()?);
        Self::new(id, stored, blocks, codec)
    }

    /// Refuses what no writer makes: a stored chunk is never longer than a plain one.
    pub fn new(id: Id, stored: u32, blocks: u16, codec: u16) -> Result<Self, Damaged> {
        let codec = match codec {
            0 => Codec::Plain,
            1 => Codec::Zstd,
            _ => return Err(Damaged("a chunk is stored in an unknown way")),
        };
        let entry = Self {
            id,
            stored,
            blocks,
            codec,
        };
        let fits = match codec {
            Codec::Plain => stored as usize == entry.bytes(),
            Codec::Zstd => stored > 0 && (stored as usize) < entry.bytes(),
        };
        if blocks == 0 || blocks > MAX_BLOCKS || !fits {
            return Err(Damaged("a chunk has an impossible length"));
        }
        Ok(entry)
    }
}

thread_local! {
    // A context is some 100 KB to 1 MB: made once a thread, not once a chunk.
    static COMPRESSOR: RefCell<Option<zstd::bulk::Compressor<'static>>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The stored form of plain bytes, which are a whole number of blocks.
pub fn encode(id: Id, plain: &[u8]) -> (Entry, Vec<u8>) {
    debug_assert!(plain.len() % BLOCK == 0 && plain.len() / BLOCK <= MAX_BLOCKS.into());
    let blocks = (plain.len() / BLOCK) as u16;
    let packed = compress(plain).filter(|packed| packed.len() < plain.len());
    let (codec, bytes) = match packed {
        Some(packed) => (Codec::Zstd, packed),
        None => (Codec::Plain, plain.to_vec()),
    };
    let stored = bytes.len() as u32;
    let entry = Entry {
        id,
        stored,
        blocks,
        codec,
    };
    (entry, bytes)
}

fn compress(plain: &[u8]) -> Option<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = zstd::bulk::Compressor::new(LEVEL).ok();
        }
        slot.as_mut()?.compress(plain).ok()
    })
}

/// Writes the plain bytes of a chunk into `out`, which has their length, and verifies them.
pub fn decode(entry: &Entry, stored: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
    if stored.len() != entry.stored as usize || out.len() != entry.bytes() {
        return Err(Damaged("a chunk has not its length"));
    }
    match entry.codec {
        Codec::Plain => out.copy_from_slice(stored),
        Codec::Zstd => decompress(stored, out)?,
    }
    verify(&entry.id, out)
}

fn decompress(stored: &[u8], out: &mut [u8]) -> Result<(), Damaged> {
    const FAULT: Damaged = Damaged("a chunk cannot be decompressed");
    let done = DECOMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = zstd::bulk::Decompressor::new().ok();
        }
        let decompressor = slot.as_mut().ok_or(FAULT)?;
        decompressor
            .decompress_to_buffer(stored, out)
            .map_err(|_| FAULT)
    })?;
    (done == out.len()).then_some(()).ok_or(FAULT)
}

/// Whether these plain bytes are the chunk of this name.
pub fn verify(id: &Id, plain: &[u8]) -> Result<(), Damaged> {
    if Id::of(plain) != *id {
        return Err(Damaged("a chunk's content is not the one its name says"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(plain: &[u8]) -> Codec {
        let (entry, stored) = encode(Id::of(plain), plain);
        let mut out = vec![0; plain.len()];
        decode(&entry, &stored, &mut out).unwrap();
        assert_eq!(out, plain);
        entry.codec
    }

    #[test]
    fn both_codecs_read_back() {
        assert_eq!(round(&[7; 3 * BLOCK]), Codec::Zstd);
        let noise: Vec<u8> = (0..BLOCK as u64)
            .flat_map(|n| Id::of(&n.to_le_bytes()).0)
            .take(4 * BLOCK)
            .collect();
        assert_eq!(round(&noise), Codec::Plain);
    }

    #[test]
    fn another_content_is_refused() {
        let plain = vec![1; BLOCK];
        let (mut entry, mut stored) = encode(Id::of(&plain), &plain);
        let mut out = vec![0; BLOCK];
        entry.id = Id::of(b"other");
        assert!(decode(&entry, &stored, &mut out).is_err());
        stored.truncate(stored.len() - 1);
        assert!(decode(&entry, &stored, &mut out).is_err());
    }

    #[test]
    fn a_bomb_does_not_fit() {
        let (_, stored) = encode(Id([0; 32]), &vec![0; 256 * BLOCK]);
        let entry = Entry::new(Id([0; 32]), stored.len() as u32, 1, 1).unwrap();
        assert!(decode(&entry, &stored, &mut vec![0; BLOCK]).is_err());
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let id = Id([0; 32]);
        assert!(Entry::new(id, 4096, 0, 0).is_err());
        assert!(Entry::new(id, 4096, 1, 1).is_err());
        assert!(Entry::new(id, 4095, 1, 0).is_err());
        assert!(Entry::new(id, 1, 257, 1).is_err());
        assert!(Entry::new(id, 0, 1, 1).is_err());
        assert!(Entry::new(id, 1, 1, 2).is_err());
    }
}
