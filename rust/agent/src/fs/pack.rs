//! Trees of files as GNU tar: modes, owners, times, links, devices, holes.
//!
//! A file may change while it is packed. Its entry has the size that its header says, whatever
//! comes of it: else its content would be read as headers.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};

use crate::sys;

/// Where a file has data: offset and length.
type Extent = (u64, u64);

/// Write the tree at `path`; its entries are named from the path's last component on.
pub fn pack(path: &Path, out: impl Write) -> io::Result<()> {
    let mut packer = Packer {
        tar: Builder::new(out),
        linked: HashMap::new(),
    };
    let name = path.file_name().map_or_else(|| ".".into(), PathBuf::from);
    packer.tree(path, &name)?;
    packer.tar.into_inner()?.flush()
}

struct Packer<W: Write> {
    tar: Builder<W>,
    /// The name under which a file with several links went in first.
    linked: HashMap<(u64, u64), PathBuf>,
}

impl<W: Write> Packer<W> {
    fn tree(&mut self, path: &Path, name: &Path) -> io::Result<()> {
        match fs::symlink_metadata(path) {
            Ok(meta) if meta.is_dir() => {
                let mut header = header(&meta, EntryType::Directory);
                self.tar.append_data(&mut header, name, io::empty())?;
                for child in children(path)? {
                    self.tree(&path.join(&child), &name.join(&child))?;
                }
                Ok(())
            }
            Ok(meta) => self.leaf(path, name, &meta),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()), // gone meanwhile
            Err(error) => Err(error),
        }
    }

    fn leaf(&mut self, path: &Path, name: &Path, meta: &Metadata) -> io::Result<()> {
        if let Some(first) = self.earlier_link(meta, name) {
            let mut header = header(meta, EntryType::Link);
            return self.tar.append_link(&mut header, name, first);
        }
        let kind = meta.file_type();
        if kind.is_symlink() {
            let mut header = header(meta, EntryType::Symlink);
            self.tar
                .append_link(&mut header, name, fs::read_link(path)?)
        } else if kind.is_file() {
            self.file(path, name, meta)
        } else if kind.is_socket() {
            Ok(()) // means nothing without its process
        } else {
            self.special(meta, name)
        }
    }

    fn earlier_link(&mut self, meta: &Metadata, name: &Path) -> Option<PathBuf> {
        if meta.nlink() < 2 {
            return None;
        }
        let file = (meta.dev(), meta.ino());
        let first = self.linked.get(&file).cloned();
        if first.is_none() {
            self.linked.insert(file, name.to_owned());
        }
        first
    }

    fn file(&mut self, path: &Path, name: &Path, meta: &Metadata) -> io::Result<()> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)?;
        let extents = extents(&file, meta.len());
        let mut header = header(meta, EntryType::Regular);
        let mut before = Vec::new();
        if extents != [(0, meta.len())] {
            before = describe_holes(&mut header, &extents, meta.len());
        }
        header.set_size(extents.iter().map(|(_, length)| length).sum());
        let content = Cursor::new(before).chain(Content::new(file, extents));
        self.tar.append_data(&mut header, name, content)
    }

    fn special(&mut self, meta: &Metadata, name: &Path) -> io::Result<()> {
        let mut header = header(
            meta,
            match meta.mode() & libc::S_IFMT {
                libc::S_IFCHR => EntryType::Char,
                libc::S_IFBLK => EntryType::Block,
                _ => EntryType::Fifo,
            },
        );
        header.set_device_major(libc::major(meta.rdev()))?;
        header.set_device_minor(libc::minor(meta.rdev()))?;
        self.tar.append_data(&mut header, name, io::empty())
    }
}

fn header(meta: &Metadata, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_metadata(meta);
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0)); // before 1970: as 1970
    header.set_entry_type(kind);
    header.set_size(0);
    header
}

fn children(path: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    let mut names: Vec<_> = fs::read_dir(path)?
        .map(|child| child.map(|child| child.file_name()))
        .collect::<io::Result<_>>()?;
    names.sort();
    Ok(names)
}

/// The file's data; all of it where its file system knows no holes.
fn extents(file: &File, size: u64) -> Vec<Extent> {
    let (mut found, mut at) = (Vec::new(), 0);
    while at < size {
        match sys::next_data(file.as_raw_fd(), at) {
            Ok(Some((begin, end))) if begin < size => {
                let end = end.min(size);
                found.push((begin, end - begin));
                at = end;
            }
            Ok(_) => break,
            Err(_) => return vec![(0, size)],
        }
    }
    if size == 0 {
        found.push((0, 0));
    }
    found
}

/// Make it a sparse entry: four extents in the header, 21 in each block that follows, the last one
/// empty at the file's end. Answers these blocks.
fn describe_holes(header: &mut Header, extents: &[Extent], size: u64) -> Vec<u8> {
    let mut pairs = extents.to_vec();
    pairs.push((size, 0));
    header.set_entry_type(EntryType::GNUSparse);
    let gnu = header.as_gnu_mut().expect("made as one");
    let (first, rest) = pairs.split_at(pairs.len().min(gnu.sparse.len()));
    put_pairs(&mut gnu.sparse, first);
    gnu.set_is_extended(!rest.is_empty());
    gnu.set_real_size(size);
    let room = GnuExtSparseHeader::new().sparse.len();
    let count = rest.len().div_ceil(room);
    let mut blocks = Vec::new();
    for (number, chunk) in rest.chunks(room).enumerate() {
        let mut block = GnuExtSparseHeader::new();
        put_pairs(&mut block.sparse, chunk);
        block.set_is_extended(number + 1 < count);
        blocks.extend_from_slice(block.as_bytes());
    }
    blocks
}

fn put_pairs(places: &mut [GnuSparseHeader], pairs: &[Extent]) {
    for (place, (offset, length)) in places.iter_mut().zip(pairs) {
        place.set_offset(*offset);
        place.set_length(*length);
    }
}

/// Exactly the bytes of the extents; what the file has lost meanwhile is zeroes.
struct Content {
    file: File,
    extents: std::vec::IntoIter<Extent>,
    left: u64,
}

impl Content {
    fn new(file: File, extents: Vec<Extent>) -> Self {
        let extents = extents.into_iter();
        Self {
            file,
            extents,
            left: 0,
        }
    }
}

impl Read for Content {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.left == 0 {
            let Some((offset, length)) = self.extents.next() else {
                return Ok(0);
            };
            self.file.seek(SeekFrom::Start(offset))?;
            self.left = length;
        }
        let most = buffer
            .len()
            .min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let mut read = self.file.read(&mut buffer[..most])?;
        if read == 0 {
            buffer[..most].fill(0);
            read = most;
        }
        self.left -= read as u64;
        Ok(read)
    }
}
