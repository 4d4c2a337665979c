//! A pack: chunks in one object, read by range. It lists what it holds, so that an index of chunks
//! can be made again from packs alone, and each chunk verified.
//!
//! ```text
//!  0   8  magic "AENVPACK"
//!  8   8  version, 1
//! 16   …  chunks as stored, back to back
//!      48 × N  directory: id, stored bytes, blocks, codec; offset in the pack
//!      48  footer: N (8), offset of the directory (8), BLAKE3 of the directory (32)
//! ```
//!
//! A pack's id is BLAKE3 of all its bytes.

use std::io::{self, Write};

use crate::bytes::Fields;
use crate::chunk::{self, Entry};
use crate::{Damaged, Id};

const MAGIC: &[u8; 8] = b"AENVPACK";
const VERSION: u64 = 1;
const HEAD: u64 = 16;
const LINE: usize = chunk::ENTRY + 8;
/// Bytes at the end that say where the directory is.
pub const FOOTER: usize = 48;
const MAX_CHUNKS: u64 = 1 << 26;

/// Writes a pack.
pub struct Writer<W> {
    out: W,
    hasher: blake3::Hasher,
    position: u64,
    directory: Vec<u8>,
}

impl<W: Write> Writer<W> {
    pub fn new(out: W) -> io::Result<Self> {
        let (hasher, position, directory) = (blake3::Hasher::new(), 0, Vec::new());
        let mut writer = Self {
            out,
            hasher,
            position,
            directory,
        };
        writer.put(MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        Ok(writer)
    }

    /// Takes a chunk; its offset.
    pub fn add(&mut self, entry: &Entry, stored: &[u8]) -> io::Result<u64> {
        let at = self.position;
        entry.put(&mut self.directory);
        self.directory.extend_from_slice(&at.to_le_bytes());
        self.put(stored)?;
        Ok(at)
    }

    pub fn is_empty(&self) -> bool {
        self.directory.is_empty()
    }

    /// Ends the pack; its id and length.
    pub fn finish(mut self) -> io::Result<(Id, u64)> {
        let directory = std::mem::take(&mut self.directory);
        let at = self.position;
        self.put(&directory)?;
        self.put(&((directory.len() / LINE) as u64).to_le_bytes())?;
        self.put(&at.to_le_bytes())?;
        self.put(&Id::of(&directory).0)?;
        self.out.flush()?;
        Ok((Id(*self.hasher.finalize().as_bytes()), self.position))
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.position += bytes.len() as u64;
        self.out.write_all(bytes)
    }
}

/// Where a pack's directory lies: offset and length.
pub fn directory_range(size: u64, footer: &[u8]) -> Result<(u64, u64), Damaged> {
    let mut fields = Fields(footer);
    let (count, at) = (fields.u64()?, fields.u64()?);
    let length = count.saturating_mul(LINE as u64);
    let end = at
        .checked_add(length)
        .and_then(|end| end.checked_add(FOOTER as u64));
    if count > MAX_CHUNKS || at < HEAD || end != Some(size) {
        return Err(Damaged("a pack's footer does not fit it"));
    }
    Ok((at, length))
}

/// The chunks of a pack with their offsets, in order.
pub fn directory(footer: &[u8], bytes: &[u8]) -> Result<Vec<(Entry, u64)>, Damaged> {
    let mut fields = Fields(footer);
    let (_, end) = (fields.u64()?, fields.u64()?);
    if fields.id()? != Id::of(bytes) {
        return Err(Damaged("a pack's directory has another checksum"));
    }
    let mut lines = Fields(bytes);
    let mut found = Vec::with_capacity(bytes.len() / LINE);
    let mut behind = HEAD;
    while !lines.0.is_empty() {
        let (entry, at) = (Entry::get(&mut lines)?, lines.u64()?);
        let stop = at
            .checked_add(entry.stored.into())
            .filter(|stop| *stop <= end);
        let stop = stop
            .filter(|_| at >= behind)
            .ok_or(Damaged("a pack's chunks overlap"))?;
        behind = stop;
        found.push((entry, at));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BLOCK;

    fn sample() -> (Vec<u8>, Vec<(Entry, u64)>, Id) {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes).unwrap();
        let mut added = Vec::new();
        for number in 0..5u8 {
            let plain = vec![number; (1 + usize::from(number)) * BLOCK];
            let (entry, stored) = chunk::encode(Id::of(&plain), &plain);
            added.push((entry, writer.add(&entry, &stored).unwrap()));
        }
        let (id, size) = writer.finish().unwrap();
        assert_eq!(size, bytes.len() as u64);
        (bytes, added, id)
    }

    fn read(bytes: &[u8]) -> Result<Vec<(Entry, u64)>, Damaged> {
        let footer = &bytes[bytes.len() - FOOTER..];
        let (at, length) = directory_range(bytes.len() as u64, footer)?;
        directory(footer, &bytes[at as usize..(at + length) as usize])
    }

    #[test]
    fn it_reads_back() {
        let (bytes, added, id) = sample();
        assert_eq!(read(&bytes).unwrap(), added);
        assert_eq!(Id::of(&bytes), id);
        for (entry, at) in added {
            let stored = &bytes[at as usize..][..entry.stored as usize];
            chunk::decode(&entry, stored, &mut vec![0; entry.bytes()]).unwrap();
        }
    }

    #[test]
    fn damage_of_the_directory_is_found() {
        let (bytes, added, _) = sample();
        let from = added
            .last()
            .map(|(entry, at)| at + u64::from(entry.stored))
            .unwrap();
        for at in from as usize..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert!(read(&damaged).is_err(), "byte {at}");
        }
    }
}
