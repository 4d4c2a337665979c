//! The table of a layer: which blocks it holds, in which chunks, in which packs.
//!
//! ```text
//!  0   8  magic "AENVLAYR"
//!  8   2  version, 1: any other is refused
//! 10   2  log2 of the block size, 12
//! 12   4  E: extents     <= 2^26
//! 16   4  C: chunks      <= 2^26
//! 20   4  P: packs       <= 2^20
//! 24   4  blocks: the layer's logical length
//! 28  32  the layer's id
//!     32 × P  ids of packs
//!      8 × E  extents: first block; count, with bit 31 set for zeroes
//!     52 × C  chunks: id, stored bytes, blocks, codec; index of the pack, offset in it
//!     32  BLAKE3 of all before
//! ```
//!
//! All numbers are little-endian. Extents are in order and do not touch what another holds. The
//! blocks of those that are no zeroes, one after another, are the layer's data; the chunks, one
//! after another, are the same data. So a block's chunk is found by counting.
//!
//! The id is BLAKE3 over the logical length, the extents and the chunks' ids and lengths: it vouches
//! for every byte of the content, but not for where chunks lie or how they are compressed, which may
//! change.

use std::collections::HashMap;

use crate::bytes::{seal, unseal, Fields};
use crate::chunk::{self, Entry};
use crate::{Damaged, Id};

const MAGIC: &[u8; 8] = b"AENVLAYR";
const VERSION: u16 = 1;
const BLOCK_SHIFT: u16 = 12;
const MAX_EXTENTS: u32 = 1 << 26;
const MAX_CHUNKS: u32 = 1 << 26;
const MAX_PACKS: u32 = 1 << 20;
const ZEROES: u32 = 1 << 31;
const ID_CONTEXT: &str = "agentenv 2026-12 block layer 1";
/// No table is longer; a reader need not fetch more.
pub const MAX_TABLE: u64 = 60
    + 32 * (MAX_PACKS as u64)
    + 8 * (MAX_EXTENTS as u64)
    + ((chunk::ENTRY + 12) as u64) * (MAX_CHUNKS as u64)
    + 32;

/// Consecutive blocks of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub first: u32,
    pub count: u32,
    /// Where their data begins in the layer's data, or would begin.
    pub data: u32,
    /// They are zeroes, have no data, and hide what lies below.
    pub zero: bool,
}

impl Extent {
    fn data_end(&self) -> u32 {
        self.data + if self.zero { 0 } else { self.count }
    }
}

/// Where a chunk is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub pack: Id,
    pub offset: u64,
}

/// A chunk of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    entry: Entry,
    pack: u32,
    offset: u64,
}

/// A layer's table, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    id: Id,
    blocks: u32,
    extents: Vec<Extent>,
    packs: Vec<Id>,
    chunks: Vec<Held>,
    /// Where each chunk begins in the data, and at the end its length, in blocks.
    begins: Vec<u32>,
}

impl Layer {
    /// A layer of so many blocks. Refuses extents or chunks that do not fit each other.
    pub fn new(
        blocks: u32,
        extents: Vec<(u32, u32, bool)>,
        chunks: &[(Entry, Place)],
    ) -> Result<Self, Damaged> {
        let mut packs = Vec::new();
        let mut numbers = HashMap::new();
        let held = chunks.iter().map(|(entry, place)| {
            let pack = *numbers.entry(place.pack).or_insert_with(|| {
                packs.push(place.pack);
                packs.len() as u32 - 1
            });
            let (entry, offset) = (*entry, place.offset);
            Held {
                entry,
                pack,
                offset,
            }
        });
        let chunks = held.collect();
        Self::checked(None, blocks, extents, packs, chunks)
    }

    fn checked(
        id: Option<Id>,
        blocks: u32,
        extents: Vec<(u32, u32, bool)>,
        packs: Vec<Id>,
        chunks: Vec<Held>,
    ) -> Result<Self, Damaged> {
        let (extents, data) = place_extents(blocks, extents)?;
        let mut begins = Vec::with_capacity(chunks.len() + 1);
        begins.push(0u32);
        let mut end = 0u32;
        for held in &chunks {
            end = end
                .checked_add(held.entry.blocks.into())
                .ok_or(NOT_FITTING)?;
            begins.push(end);
            let ends = held.offset.checked_add(held.entry.stored.into());
            if held.pack as usize >= packs.len() || ends.is_none() {
                return Err(Damaged("a chunk lies in no pack"));
            }
        }
        if end != data {
            return Err(NOT_FITTING);
        }
        let found = name(blocks, &extents, &chunks);
        if id.is_some_and(|id| id != found) {
            return Err(Damaged("its content is not the one its name says"));
        }
        let id = found;
        Ok(Self {
            id,
            blocks,
            extents,
            packs,
            chunks,
            begins,
        })
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields(unseal(bytes)?);
        if fields.take(8)? != MAGIC {
            return Err(Damaged("it is no layer"));
        }
        if fields.u16()? != VERSION {
            return Err(Damaged("it is of another version"));
        }
        if fields.u16()? != BLOCK_SHIFT {
            return Err(Damaged("its blocks have another size"));
        }
        let (extents, chunks, packs) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if extents > MAX_EXTENTS || chunks > MAX_CHUNKS || packs > MAX_PACKS {
            return Err(Damaged("it has too many parts"));
        }
        let (blocks, id) = (fields.u32()?, fields.id()?);
        let wanted =
            32 * packs as usize + 8 * extents as usize + (chunk::ENTRY + 12) * chunks as usize;
        if fields.0.len() != wanted {
            return Err(Damaged("it has another length than it says")); // before memory is taken
        }
        let packs = (0..packs).map(|_| fields.id()).collect::<Result<_, _>>()?;
        let extents = (0..extents)
            .map(|_| {
                let (first, count) = (fields.u32()?, fields.u32()?);
                Ok((first, count & !ZEROES, count & ZEROES != 0))
            })
            .collect::<Result<_, _>>()?;
        let chunks = (0..chunks)
            .map(|_| {
                let entry = Entry::get(&mut fields)?;
                let (pack, offset) = (fields.u32()?, fields.u64()?);
                Ok(Held {
                    entry,
                    pack,
                    offset,
                })
            })
            .collect::<Result<_, _>>()?;
        Self::checked(Some(id), blocks, extents, packs, chunks)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&BLOCK_SHIFT.to_le_bytes());
        for count in [self.extents.len(), self.chunks.len(), self.packs.len()] {
            out.extend_from_slice(&(count as u32).to_le_bytes());
        }
        out.extend_from_slice(&self.blocks.to_le_bytes());
        out.extend_from_slice(&self.id.0);
        self.packs
            .iter()
            .for_each(|pack| out.extend_from_slice(&pack.0));
        self.extents
            .iter()
            .for_each(|extent| put_extent(extent, &mut out));
        for held in &self.chunks {
            held.entry.put(&mut out);
            out.extend_from_slice(&held.pack.to_le_bytes());
            out.extend_from_slice(&held.offset.to_le_bytes());
        }
        seal(out)
    }

    pub fn id(&self) -> Id {
        self.id
    }

    /// The logical length in blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Blocks of data: those that are neither holes nor zeroes.
    pub fn data_blocks(&self) -> u32 {
        self.begins.last().copied().unwrap_or(0)
    }

    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    pub fn packs(&self) -> &[Id] {
        &self.packs
    }

    pub fn chunk_count(&self) -> u32 {
        self.chunks.len() as u32
    }

    pub fn entry(&self, chunk: u32) -> &Entry {
        &self.chunks[chunk as usize].entry
    }

    pub fn place(&self, chunk: u32) -> Place {
        let held = &self.chunks[chunk as usize];
        let pack = self.packs[held.pack as usize];
        Place {
            pack,
            offset: held.offset,
        }
    }

    /// First data block of a chunk.
    pub fn begin(&self, chunk: u32) -> u32 {
        self.begins[chunk as usize]
    }

    /// The chunk that holds a data block, which must be below `data_blocks`.
    pub fn chunk_at(&self, data: u32) -> u32 {
        self.begins.partition_point(|begin| *begin <= data) as u32 - 1
    }

    /// The logical runs (first block, count) that a range of data fills, in order.
    pub fn runs(&self, data: u32, count: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let end = data + count;
        let from = self
            .extents
            .partition_point(|extent| extent.data_end() <= data);
        self.extents[from..]
            .iter()
            .take_while(move |extent| extent.data < end)
            .filter(|extent| !extent.zero)
            .map(move |extent| {
                let skip = data.saturating_sub(extent.data);
                let stop = extent.data_end().min(end);
                (extent.first + skip, stop - (extent.data + skip))
            })
    }
}

const NOT_FITTING: Damaged = Damaged("its chunks are not as long as its extents");

/// Gives extents their place in the data; with the length of the data.
fn place_extents(
    blocks: u32,
    extents: Vec<(u32, u32, bool)>,
) -> Result<(Vec<Extent>, u32), Damaged> {
    let mut placed = Vec::with_capacity(extents.len());
    let (mut behind, mut data) = (0u32, 0u32);
    for (first, count, zero) in extents {
        let end = first.checked_add(count).ok_or(OUT_OF_ORDER)?;
        if count == 0 || count >= ZEROES || first < behind || end > blocks {
            return Err(OUT_OF_ORDER);
        }
        placed.push(Extent {
            first,
            count,
            data,
            zero,
        });
        behind = end;
        data += if zero { 0 } else { count }; // no more than `end`, which did not overflow
    }
    Ok((placed, data))
}

const OUT_OF_ORDER: Damaged = Damaged("its extents are out of order or beyond its end");

fn put_extent(extent: &Extent, out: &mut Vec<u8>) {
    let count = extent.count | if extent.zero { ZEROES } else { 0 };
    out.extend_from_slice(&extent.first.to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
}

fn name(blocks: u32, extents: &[Extent], chunks: &[Held]) -> Id {
    let mut hasher = blake3::Hasher::new_derive_key(ID_CONTEXT);
    let mut part = Vec::new();
    part.extend_from_slice(&blocks.to_le_bytes());
    part.extend_from_slice(&(extents.len() as u32).to_le_bytes());
    extents
        .iter()
        .for_each(|extent| put_extent(extent, &mut part));
    for Held { entry, .. } in chunks {
        part.extend_from_slice(&entry.id.0);
        part.extend_from_slice(&entry.blocks.to_le_bytes());
        if part.len() > 1 << 16 {
            hasher.update(&part);
            part.clear();
        }
    }
    hasher.update(&part);
    Id(*hasher.finalize().as_bytes())
}

#[cfg(test)]
#[path = "layer_test.rs"]
mod tests;
