//! Numbers and layouts of include/uapi/linux/fuse.h, protocol 7.40 (Linux 6.9), native byte order.
//! A kernel of another minor version speaks the lower of the two.

use crate::Errno;

pub const MAJOR: u32 = 7;
pub const MINOR: u32 = 40;
/// MAX_PAGES came with it (Linux 4.20); every layout used here is the same since.
pub const OLDEST_MINOR: u32 = 28;
pub const ROOT: u64 = 1;
pub const NAME_MAX: usize = 255;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const SETXATTR: u32 = 21;
    pub const REMOVEXATTR: u32 = 24;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const RENAME2: u32 = 45;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
}

pub mod flag {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const HAS_RESEND: u64 = 1 << 39;
}

pub const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// Else closing asks the server, and the exit of a process hangs on it, beyond the reach of SIGKILL,
/// while no server runs.
pub const FOPEN_NOFLUSH: u32 = 1 << 5;
pub const FOPEN_PASSTHROUGH: u32 = 1 << 7;

pub const NOTIFY_INVAL_INODE: i32 = 2;
pub const NOTIFY_INVAL_ENTRY: i32 = 3;
pub const NOTIFY_RESEND: i32 = 7;

/// `struct fuse_backing_map`.
#[repr(C)]
pub struct BackingMap {
    pub fd: i32,
    pub flags: u32,
    pub padding: u64,
}

/// `_IOW(229, 1, struct fuse_backing_map)` and `_IOW(229, 2, uint32_t)`, asm-generic encoding.
pub const IOC_BACKING_OPEN: u32 = 1 << 30 | 16 << 16 | 229 << 8 | 1;
pub const IOC_BACKING_CLOSE: u32 = 1 << 30 | 4 << 16 | 229 << 8 | 2;

/// `struct fuse_in_header`, as far as it is used:
/// len u32 @0, opcode u32 @4, unique u64 @8, nodeid u64 @16, pid u32 @32.
///
/// `unique` has bit 63 (FUSE_UNIQUE_RESEND) set in a request that is delivered again. The kernel
/// looks the answer up, and names the request in INTERRUPT, by the whole number, so the bit is kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Header {
    pub opcode: u32,
    pub unique: u64,
    pub node: u64,
    pub pid: u32,
}

pub const HEADER_LEN: usize = 40;

impl Header {
    /// None if the message is too short to say what it is; its answer could not be addressed.
    pub fn parse(message: &[u8]) -> Option<(Self, Body<'_>)> {
        let head = Body(message.get(..HEADER_LEN)?);
        let header = Self {
            opcode: head.u32(4).ok()?,
            unique: head.u64(8).ok()?,
            node: head.u64(16).ok()?,
            pid: head.u32(32).ok()?,
        };
        Some((header, Body(&message[HEADER_LEN..])))
    }
}

/// What follows the header. Reading past its end is EINVAL.
#[derive(Clone, Copy)]
pub struct Body<'a>(pub &'a [u8]);

impl<'a> Body<'a> {
    fn array<const N: usize>(self, at: usize) -> Result<[u8; N], Errno> {
        let bytes = self.0.get(at..at + N).ok_or(Errno::INVAL)?;
        bytes.try_into().map_err(|_| Errno::INVAL)
    }

    pub fn u32(self, at: usize) -> Result<u32, Errno> {
        self.array(at).map(u32::from_ne_bytes)
    }

    pub fn u64(self, at: usize) -> Result<u64, Errno> {
        self.array(at).map(u64::from_ne_bytes)
    }

    /// A name, which ends with NUL.
    pub fn name(self) -> Result<&'a [u8], Errno> {
        let end = self.0.iter().position(|byte| *byte == 0);
        end.map(|end| &self.0[..end]).ok_or(Errno::INVAL)
    }
}

/// Fields appended one after the other.
#[derive(Default)]
pub struct Packed(pub Vec<u8>);

impl Packed {
    pub fn u16(mut self, value: u16) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub fn bytes(mut self, value: &[u8]) -> Self {
        self.0.extend_from_slice(value);
        self
    }

    pub fn zeroes(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }
}

pub const OUT_HEADER_LEN: usize = 16;

/// `struct fuse_out_header`: len u32, error i32 (negative errno, or a notification's code), unique u64.
pub fn out_header(payload: usize, error: i32, unique: u64) -> [u8; OUT_HEADER_LEN] {
    let mut bytes = [0; OUT_HEADER_LEN];
    let len = u32::try_from(OUT_HEADER_LEN + payload).unwrap_or(u32::MAX);
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..8].copy_from_slice(&error.to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}
