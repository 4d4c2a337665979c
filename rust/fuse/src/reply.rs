//! The answer of one read.

use std::io::IoSlice;
use std::sync::Arc;

use crate::interrupt::Waiting;
use crate::{Connection, Errno};

/// The answer that one read waits for. Give exactly one, from any thread; dropped, it is EIO.
pub struct ReadReply {
    connection: Arc<Connection>,
    waiting: Arc<Waiting>,
    unique: u64,
    size: u32,
    answered: bool,
}

/// What one writev takes (IOV_MAX), less the header.
const MOST_SLICES: usize = 1023;

impl ReadReply {
    pub(crate) fn new(connection: Arc<Connection>, unique: u64, pid: u32, size: u32) -> Self {
        let waiting = connection.waitings().add(unique, pid);
        Self {
            connection,
            waiting,
            unique,
            size,
            answered: false,
        }
    }

    /// Answer with the bytes asked for, all of them.
    pub fn data(self, bytes: &[u8]) {
        self.slices(&[bytes]);
    }

    /// Answer with the bytes asked for, in pieces; they are written without a copy.
    pub fn slices(mut self, pieces: &[&[u8]]) {
        let total: usize = pieces.iter().map(|piece| piece.len()).sum();
        if total != self.size as usize {
            return self.error(Errno::IO);
        }
        self.finish();
        if pieces.len() > MOST_SLICES {
            self.connection.send(self.unique, &[&pieces.concat()]);
        } else {
            self.connection.send(self.unique, pieces);
        }
    }

    pub fn error(mut self, error: Errno) {
        self.finish();
        self.connection.send_error(self.unique, error);
    }

    /// The reader is being killed: answer (EINTR, or what is there) and it goes away at once.
    ///
    /// Readers that came through the kernel's read-ahead go away without asking us; their reads
    /// are never cancelled and their answers fill the page cache.
    pub fn cancelled(&self) -> bool {
        self.waiting.cancelled()
    }

    /// Have `hook` called when the reader is being killed; now, if it is already. It runs on a
    /// thread of the connection and must not block. One hook: a later one replaces it. It is
    /// dropped with the answer, so it may own what owns this reply.
    pub fn on_cancel(&self, hook: Box<dyn FnOnce() + Send>) {
        self.waiting.on_cancel(hook);
    }

    fn finish(&mut self) {
        self.answered = true;
        self.connection.waitings().remove(self.unique);
    }
}

impl Drop for ReadReply {
    fn drop(&mut self) {
        if !self.answered {
            self.finish();
            self.connection.send_error(self.unique, Errno::IO);
        }
    }
}

/// Header and pieces for one writev.
pub(crate) fn gather<'a>(header: &'a [u8], pieces: &[&'a [u8]]) -> Vec<IoSlice<'a>> {
    let mut slices = Vec::with_capacity(1 + pieces.len());
    slices.push(IoSlice::new(header));
    slices.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
    slices
}
