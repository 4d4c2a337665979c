//! Trees of files from tar; no entry reaches anything outside the folder they are unpacked into.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::lchown;
use std::path::{Component, Path, PathBuf};

use tar::{Archive, Entry, EntryType, Header};

use super::operations;
use crate::sys;
use crate::users::User;

/// Folders one below the other: the library looks at all of them for each entry.
const MAX_DEPTH: usize = 256;
const BLOCK: usize = 512;

/// Unpack below `folder`, which is made as `maker`'s; entries that lead out of it are refused, and
/// so is an archive without its end. Owners are the archive's, or all `owner`. Answers the number
/// of entries.
pub fn unpack(
    folder: &Path,
    maker: &User,
    owner: Option<(u32, u32)>,
    from: impl Read,
) -> io::Result<u64> {
    operations::make_parents(folder, maker)?;
    let mut archive = Archive::new(Tail { from, zeroes: 0 });
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(owner.is_none());
    archive.set_preserve_mtime(true);
    archive.set_unpack_xattrs(true);
    let (mut count, mut folders) = (0, Vec::new());
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_pax_global_extensions() {
            continue; // a comment, as of `git archive`
        }
        let place = folder.join(inner(&entry.path()?)?);
        put(&mut entry, folder, &place, owner)?;
        if entry.header().entry_type().is_dir() {
            folders.push((place, entry.header().mtime()?));
        }
        count += 1;
    }
    if archive.into_inner().zeroes < BLOCK {
        return Err(io::Error::other("it ends before its end"));
    }
    // What was put into them has changed their times.
    for (place, mtime) in folders {
        sys::set_mtime(&place, mtime)?;
    }
    Ok(count)
}

/// The entry's path below the folder.
fn inner(path: &Path) -> io::Result<PathBuf> {
    let mut found = PathBuf::new();
    for (depth, part) in path.components().enumerate() {
        match part {
            Component::Normal(name) if depth < MAX_DEPTH => found.push(name),
            Component::CurDir => {}
            Component::Normal(_) => {
                let message = format!("folders lie deeper than {MAX_DEPTH} in one another");
                return Err(io::Error::other(message));
            }
            _ => return Err(leads_out(path)),
        }
    }
    Ok(found)
}

fn leads_out(path: &Path) -> io::Error {
    io::Error::other(format!("'{}' leads out of the folder", path.display()))
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
            entry.unpack_in(folder)
        }
        outcome => outcome,
    };
    if !inside.map_err(|error| with_cause(&error))? {
        return Err(leads_out(place));
    }
    make_special(entry.header(), place)?;
    match owner {
        Some((uid, gid)) => lchown(place, Some(uid), Some(gid)),
        None => Ok(()),
    }
}

/// The library's errors name the file and leave out why.
fn with_cause(error: &io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|inner| inner.source());
    let cause = cause.map_or(String::new(), |cause| format!(": {cause}"));
    io::Error::new(error.kind(), format!("{error}{cause}"))
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
    let mode = kind | header.mode()? & 0o7777;
    sys::make_node(place, mode, device.unwrap_or((0, 0)))?;
    lchown(place, Some(id(header.uid()?)?), Some(id(header.gid()?)?))?;
    sys::set_mtime(place, header.mtime()?)
}

fn id(number: u64) -> io::Result<u32> {
    u32::try_from(number).map_err(io::Error::other)
}

/// Counts the zeroes that it ended with: an archive's last block is one of them.
struct Tail<R> {
    from: R,
    zeroes: usize,
}

impl<R: Read> Read for Tail<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        let data = &buffer[..read];
        match data.iter().rposition(|byte| *byte != 0) {
            Some(last) => self.zeroes = read - last - 1,
            None => self.zeroes += read,
        }
        Ok(read)
    }
}
