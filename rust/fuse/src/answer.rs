//! From a request to its reply, for everything but READ and INTERRUPT, which may take their time.

use crate::protocol::{
    flag, opcode, Body, Header, Packed, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH, MAJOR,
    MINOR, NAME_MAX, OLDEST_MINOR, ROOT,
};
use crate::{Attr, Errno, Files, Negotiated};

/// None: the kernel expects no answer.
pub type Answer = Result<Option<Packed>, Errno>;

const DAY: u64 = 86_400;
const DIRECTORY: u32 = 0o040_555;
const REGULAR: u32 = 0o100_444;
const BLOCK: u32 = 4096;
const DT_DIR: u32 = 4;
const DT_REG: u32 = 8;

/// Not ASYNC_DIO: its direct reads wait where no signal reaches them.
const WANTED: u64 = flag::ASYNC_READ
    | flag::PARALLEL_DIROPS
    | flag::MAX_PAGES
    | flag::INIT_EXT
    | flag::PASSTHROUGH
    | flag::HAS_RESEND;
/// No write ever comes; the least the kernel takes keeps the buffers of the threads small.
pub const MAX_WRITE: u32 = 4096;
const MAX_PAGES: u16 = 256;
/// Read-ahead of all files shares this: a few stalled files must not stop the others.
const MAX_BACKGROUND: u16 = 4096;
/// Backing files may lie on a plain file system, and an overlay may lie on our mount.
const MAX_STACK_DEPTH: u32 = 1;

pub fn answer(files: &dyn Files, header: &Header, body: Body<'_>) -> Answer {
    match header.opcode {
        opcode::FORGET | opcode::BATCH_FORGET | opcode::NOTIFY_REPLY => Ok(None),
        opcode::LOOKUP => lookup(files, header.node, body),
        opcode::GETATTR => getattr(files, header.node),
        opcode::OPEN => open(files, header.node, body),
        opcode::RELEASE => {
            files.release(header.node);
            empty()
        }
        opcode::OPENDIR => Ok(Some(Packed::default().zeroes(16))),
        opcode::READDIR => readdir(files, body),
        opcode::RELEASEDIR | opcode::DESTROY => empty(),
        opcode::STATFS => Ok(Some(statfs(files.list().len() as u64))),
        other if changes(other) => Err(Errno::ROFS),
        _ => Err(Errno::NOSYS),
    }
}

fn empty() -> Answer {
    Ok(Some(Packed::default()))
}

fn changes(opcode: u32) -> bool {
    matches!(
        opcode,
        opcode::SETATTR
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::LINK
            | opcode::WRITE
            | opcode::SETXATTR
            | opcode::REMOVEXATTR
            | opcode::CREATE
            | opcode::FALLOCATE
            | opcode::COPY_FILE_RANGE
            | opcode::TMPFILE
    )
}

/// `struct fuse_init_in` (major, minor, max_readahead, flags, flags2) to `struct fuse_init_out`.
pub fn init(body: Body<'_>) -> Result<(Negotiated, Packed), Errno> {
    let (major, minor, flags) = (body.u32(0)?, body.u32(4)?, body.u32(12)?);
    if major < MAJOR || (major == MAJOR && minor < OLDEST_MINOR) {
        return Err(Errno::PROTO);
    }
    let mut offered = u64::from(flags);
    if offered & flag::INIT_EXT != 0 {
        offered |= u64::from(body.u32(16)?) << 32;
    }
    let agreed = offered & WANTED;
    let with = Negotiated {
        minor: minor.min(MINOR),
        flags: agreed,
        max_write: MAX_WRITE,
    };
    let out = Packed::default()
        .u32(MAJOR)
        .u32(MINOR)
        .u32(u32::MAX) // max_readahead: the kernel's own limit, raised in sysfs, decides
        .u32(agreed as u32)
        .u16(MAX_BACKGROUND)
        .u16(MAX_BACKGROUND / 4 * 3)
        .u32(MAX_WRITE)
        .u32(1) // time_gran
        .u16(MAX_PAGES)
        .u16(0) // map_alignment
        .u32((agreed >> 32) as u32)
        .u32(MAX_STACK_DEPTH)
        .zeroes(24);
    Ok((with, out))
}

fn lookup(files: &dyn Files, parent: u64, body: Body<'_>) -> Answer {
    if parent != ROOT {
        return Err(Errno::NOTDIR);
    }
    let found = files.lookup(body.name()?).ok_or(Errno::NOENT)?;
    let entry = Packed::default()
        .u64(found.node)
        .u64(0) // generation
        .u64(DAY) // of the name
        .u64(DAY) // of the attributes
        .zeroes(8);
    Ok(Some(attr(entry, found.node, found.size, REGULAR)))
}

fn getattr(files: &dyn Files, node: u64) -> Answer {
    let out = Packed::default().u64(DAY).zeroes(8);
    if node == ROOT {
        return Ok(Some(attr(out, ROOT, 0, DIRECTORY)));
    }
    let found = files.attr(node).ok_or(Errno::STALE)?;
    Ok(Some(attr(out, node, found.size, REGULAR)))
}

/// `struct fuse_attr`: ino, size, blocks, three times, their nanoseconds, mode, nlink, uid, gid,
/// rdev, blksize, flags.
fn attr(to: Packed, node: u64, size: u64, mode: u32) -> Packed {
    to.u64(node)
        .u64(size)
        .u64(size.div_ceil(512))
        .zeroes(24 + 12)
        .u32(mode)
        .u32(if mode == DIRECTORY { 2 } else { 1 })
        .zeroes(12)
        .u32(BLOCK)
        .u32(0)
}

/// `struct fuse_open_in` (flags) to `struct fuse_open_out`: fh u64, open_flags u32, backing_id i32.
fn open(files: &dyn Files, node: u64, body: Body<'_>) -> Answer {
    let writes = (libc::O_ACCMODE | libc::O_TRUNC) as u32;
    if body.u32(0)? & writes != libc::O_RDONLY as u32 {
        return Err(Errno::ROFS);
    }
    let (flags, backing) = match files.open(node)?.passthrough {
        Some(backing) => (FOPEN_PASSTHROUGH, backing),
        None => (FOPEN_KEEP_CACHE, 0),
    };
    let out = Packed::default()
        .u64(0)
        .u32(flags | FOPEN_NOFLUSH)
        .u32(backing as u32);
    Ok(Some(out))
}

/// `struct fuse_read_in`: offset u64 @8, size u32 @16. A file's position is its node, so that a
/// listing goes on in the right place when files come and go, or the server is another one.
fn readdir(files: &dyn Files, body: Body<'_>) -> Answer {
    let (after, room) = (body.u64(8)?, body.u32(16)? as usize);
    let dots = [(&b"."[..], ROOT, 1, DT_DIR), (b"..", ROOT, 2, DT_DIR)];
    let mut listed = files.list();
    listed.retain(|(name, found)| speakable(name) && found.node > ROOT);
    listed.sort_unstable_by_key(|(_, found)| found.node);
    let names = listed
        .iter()
        .map(|(name, Attr { node, .. })| (&name[..], *node, node + 1, DT_REG));
    let mut out = Packed::default();
    for (name, node, position, kind) in dots.into_iter().chain(names) {
        let padded = name.len().next_multiple_of(8);
        if position <= after {
            continue;
        }
        if out.0.len() + 24 + padded > room {
            break;
        }
        out = out
            .u64(node)
            .u64(position)
            .u32(name.len() as u32)
            .u32(kind)
            .bytes(name)
            .zeroes(padded - name.len());
    }
    Ok(Some(out))
}

fn speakable(name: &[u8]) -> bool {
    let forbidden = name.iter().any(|byte| matches!(byte, b'/' | 0));
    !name.is_empty() && name.len() <= NAME_MAX && !forbidden
}

/// `struct fuse_kstatfs`: blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, spare.
fn statfs(count: u64) -> Packed {
    Packed::default()
        .zeroes(24)
        .u64(count)
        .u64(0)
        .u32(BLOCK)
        .u32(NAME_MAX as u32)
        .u32(BLOCK)
        .zeroes(28)
}

/// The part of a READ that lies inside the file: (offset, size); size 0 at or past the end.
pub fn read_range(files: &dyn Files, node: u64, body: Body<'_>) -> Result<(u64, u32), Errno> {
    let (offset, size) = (body.u64(8)?, body.u32(16)?);
    let left = files.attr(node).ok_or(Errno::STALE)?.size;
    let left = left.saturating_sub(offset).min(u64::from(size));
    Ok((offset, left as u32))
}

#[cfg(test)]
#[path = "answer_test.rs"]
mod tests;
