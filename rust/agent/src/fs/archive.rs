//! Trees of files to and from tar: modes, owners, times, links, devices, holes.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{lchown, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use tar::{Archive, Builder, Entry, EntryType, Header};

use super::operations;
use crate::sys;
use crate::users::User;

/// Write the tree at `path`; its entries are named from the path's last component on.
pub fn pack(path: &Path, out: impl Write) -> io::Result<()> {
    let mut packer = Packer {
        tar: Builder::new(out),
        linked: HashMap::new(),
    };
    packer.tar.follow_symlinks(false);
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
        let meta = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()), // gone meanwhile
            found => found?,
        };
        if meta.file_type().is_socket() {
            return Ok(()); // means nothing without its process
        }
        if let Some(first) = self.earlier_link(&meta, name) {
            return self.hard_link(&meta, name, &first);
        }
        let kind = meta.file_type();
        if kind.is_char_device() || kind.is_block_device() || kind.is_fifo() {
            return self.special(&meta, name); // the library opens them
        }
        self.tar.append_path_with_name(path, name)?;
        if meta.is_dir() {
            let mut children: Vec<_> = fs::read_dir(path)?
                .map(|child| child.map(|child| child.file_name()))
                .collect::<io::Result<_>>()?;
            children.sort();
            for child in children {
                self.tree(&path.join(&child), &name.join(&child))?;
            }
        }
        Ok(())
    }

    fn earlier_link(&mut self, meta: &Metadata, name: &Path) -> Option<PathBuf> {
        if meta.is_dir() || meta.nlink() < 2 {
            return None;
        }
        let file = (meta.dev(), meta.ino());
        let first = self.linked.get(&file).cloned();
        if first.is_none() {
            self.linked.insert(file, name.to_owned());
        }
        first
    }

    fn special(&mut self, meta: &Metadata, name: &Path) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_metadata(meta);
        header.set_entry_type(match meta.mode() & libc::S_IFMT {
            libc::S_IFCHR => EntryType::Char,
            libc::S_IFBLK => EntryType::Block,
            _ => EntryType::Fifo,
        });
        header.set_size(0);
        header.set_device_major(libc::major(meta.rdev()))?;
        header.set_device_minor(libc::minor(meta.rdev()))?;
        self.tar.append_data(&mut header, name, io::empty())
    }

    fn hard_link(&mut self, meta: &Metadata, name: &Path, first: &Path) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_metadata(meta);
        header.set_entry_type(EntryType::Link);
        header.set_size(0);
        self.tar.append_link(&mut header, name, first)
    }
}

/// Unpack below `folder`, which is made as `maker`'s; entries that lead out of it are refused.
/// Owners are the archive's, or all `owner`. Answers the number of entries.
pub fn unpack(
    folder: &Path,
    maker: &User,
    owner: Option<(u32, u32)>,
    from: impl Read,
) -> io::Result<u64> {
    operations::make_parents(folder, maker)?;
    let mut archive = Archive::new(from);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(owner.is_none());
    archive.set_preserve_mtime(true);
    archive.set_unpack_xattrs(true);
    let (mut count, mut folders) = (0, Vec::new());
    for entry in archive.entries()? {
        let mut entry = entry?;
        count += 1;
        let place = folder.join(entry.path()?);
        put(&mut entry, folder, &place, owner)?;
        if entry.header().entry_type().is_dir() {
            folders.push((place, entry.header().mtime()?));
        }
    }
    // What was put into them has changed their times.
    for (place, mtime) in folders {
        sys::set_mtime(&place, mtime)?;
    }
    Ok(count)
}

fn put<R: Read>(
    entry: &mut Entry<'_, R>,
    folder: &Path,
    place: &Path,
    owner: Option<(u32, u32)>,
) -> io::Result<()> {
    let inside = match entry.unpack_in(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(place)?; // a link does not replace by itself
            entry.unpack_in(folder)?
        }
        outcome => outcome?,
    };
    if !inside {
        let message = format!("the entry for {} leads out of the folder", place.display());
        return Err(io::Error::other(message));
    }
    make_special(entry.header(), place)?;
    match owner {
        Some((uid, gid)) => lchown(place, Some(uid), Some(gid)),
        None => Ok(()),
    }
}

/// Pipes and devices, of which the library has made empty files.
fn make_special(header: &Header, place: &Path) -> io::Result<()> {
    let kind = match header.entry_type() {
        EntryType::Fifo => libc::S_IFIFO,
        EntryType::Char => libc::S_IFCHR,
        EntryType::Block => libc::S_IFBLK,
        _ => return Ok(()),
    };
    let device = match kind {
        libc::S_IFIFO => None, // its device fields may be blank
        _ => header.device_major()?.zip(header.device_minor()?),
    };
    fs::remove_file(place)?;
    sys::make_node(
        place,
        kind | header.mode()? & 0o7777,
        device.unwrap_or((0, 0)),
    )?;
    lchown(place, Some(id(header.uid()?)?), Some(id(header.gid()?)?))?;
    sys::set_mtime(place, header.mtime()?)
}

fn id(number: u64) -> io::Result<u32> {
    u32::try_from(number).map_err(io::Error::other)
}
