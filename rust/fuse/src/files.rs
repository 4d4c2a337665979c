//! What a server implements.

use crate::{Errno, Negotiated, ReadReply};

/// A regular file: mode 0444, of root. Its content and size never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// From 2 up to `i64::MAX - 1`; 1 is the folder. Never used for another file as long as the
    /// mount lives, restarts of the server included: the kernel's page cache goes by it.
    pub node: u64,
    pub size: u64,
}

/// How an open file is read.
///
/// While a file is open, every further open of it must be answered the same way and with the same
/// backing id, also by a server that adopted the mount; the kernel fails others with EIO.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// From [`Connection::backing_open`](crate::Connection::backing_open): the kernel reads that
    /// file itself. None: reads come to [`Files::read`], pages stay cached between opens.
    pub passthrough: Option<i32>,
}

/// The folder. Called by several threads at once; a panic is answered with EIO.
///
/// All but `read` should answer at once: they occupy one of the threads that serve everybody.
pub trait Files: Send + Sync + 'static {
    /// The file of this name; None is not cached by the kernel.
    fn lookup(&self, name: &[u8]) -> Option<Attr>;

    fn attr(&self, node: u64) -> Option<Attr>;

    /// Every file, in any order. Names that are empty, longer than 255 or hold `/` or NUL are left out.
    fn list(&self) -> Vec<(Vec<u8>, Attr)>;

    /// Opened for reading (writers were refused already).
    fn open(&self, node: u64) -> Result<Opened, Errno>;

    /// Once for each answered `open`, also of opens that an earlier server answered.
    fn release(&self, node: u64);

    /// Read `size` > 0 bytes at `offset`, all inside the file. The answer may be given by any
    /// thread at any time and holds exactly `size` bytes; another length is turned into EIO, since
    /// the kernel would take a shorter one for the end of the file and cache zeroes.
    fn read(&self, node: u64, offset: u64, size: u32, reply: ReadReply);

    /// Called before the kernel is told, so that it can be stored for a server that adopts.
    fn negotiated(&self, _with: &Negotiated) {}
}
