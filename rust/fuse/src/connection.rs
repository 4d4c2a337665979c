//! The descriptor: messages in, answers and notifications out, backing files.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::{poll, PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use crate::interrupt::Waitings;
use crate::protocol::{
    flag, out_header, BackingMap, Packed, IOC_BACKING_CLOSE, IOC_BACKING_OPEN, NOTIFY_INVAL_ENTRY,
    NOTIFY_INVAL_INODE, NOTIFY_RESEND, ROOT,
};
use crate::reply::gather;
use crate::Errno;

/// What INIT agreed on. Store it: a server that adopts the connection sees no INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiated {
    pub minor: u32,
    /// FUSE_* init flags that both sides have (flags2 in the upper half).
    pub flags: u64,
    pub max_write: u32,
}

impl Negotiated {
    /// The kernel can read backing files itself (Linux 6.9, CONFIG_FUSE_PASSTHROUGH).
    pub fn passthrough(&self) -> bool {
        self.flags & flag::PASSTHROUGH != 0
    }

    /// The kernel can deliver requests in flight again (Linux 6.9).
    pub fn resend(&self) -> bool {
        self.flags & flag::HAS_RESEND != 0
    }
}

/// One mounted `/dev/fuse` descriptor. Dropping it closes only our copy of the descriptor.
pub struct Connection {
    fd: OwnedFd,
    negotiated: Mutex<Option<Negotiated>>,
    waitings: Waitings,
}

impl Connection {
    pub fn new(fd: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            fd,
            negotiated: Mutex::default(),
            waitings: Waitings::default(),
        })
    }

    /// None until INIT was answered or given by `Start::Adopted`.
    pub fn negotiated(&self) -> Option<Negotiated> {
        *self.negotiated.lock()
    }

    /// Have every request delivered again that was read from the descriptor and not answered.
    /// Only for a server whose predecessor is dead; `Start::Adopted` does it. EINVAL before Linux 6.9.
    pub fn resend(&self) -> io::Result<()> {
        self.notify(NOTIFY_RESEND, &[])
    }

    /// Register a file that the kernel may read in our place; needs CAP_SYS_ADMIN. ELOOP if the
    /// file lies on a stacked file system (overlayfs). The id is the connection's: it outlives this
    /// process, so store it.
    pub fn backing_open(&self, file: &File) -> io::Result<i32> {
        let map = BackingMap {
            fd: file.as_raw_fd(),
            flags: 0,
            padding: 0,
        };
        // SAFETY: fd is an open descriptor that self owns. The request reads exactly one
        // fuse_backing_map from the pointer; `map` has that layout (repr(C), 16 bytes) and lives
        // across the call. The kernel takes its own reference of `file` and keeps no pointer.
        let id = unsafe { libc::ioctl(self.fd.as_raw_fd(), IOC_BACKING_OPEN as _, &raw const map) };
        if id < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(id)
    }

    /// Drop a registration; files that are open through it go on. ENOENT for an unknown id.
    pub fn backing_close(&self, id: i32) -> io::Result<()> {
        let id = id as u32;
        // SAFETY: fd is an open descriptor that self owns. The request reads exactly one u32 from
        // the pointer, which points to a local that lives across the call.
        let done =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), IOC_BACKING_CLOSE as _, &raw const id) };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Drop a file's cached pages and attributes. Waits for its reads in flight: not to be called
    /// by whoever must answer them.
    pub fn invalidate(&self, node: u64) -> io::Result<()> {
        let payload = Packed::default().u64(node).zeroes(16);
        unless_absent(self.notify(NOTIFY_INVAL_INODE, &[&payload.0]))
    }

    /// Whether the kernel knows the file: it is open, or mapped, or its name is remembered. Its
    /// attributes are asked for again; its pages stay.
    pub fn knows(&self, node: u64) -> io::Result<bool> {
        let payload = Packed::default().u64(node).u64(u64::MAX).u64(0); // at -1: no pages
        match self.notify(NOTIFY_INVAL_INODE, &[&payload.0]) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Make the kernel ask again for this name. Waits for look-ups in flight: not to be called
    /// inside `Files::lookup` or `Files::list`.
    pub fn forget_name(&self, name: &[u8]) -> io::Result<()> {
        let head = Packed::default().u64(ROOT).u32(name.len() as u32).u32(0);
        unless_absent(self.notify(NOTIFY_INVAL_ENTRY, &[&head.0, name, b"\0"]))
    }

    pub(crate) fn set_negotiated(&self, with: Option<Negotiated>) {
        *self.negotiated.lock() = with;
    }

    pub(crate) fn waitings(&self) -> &Waitings {
        &self.waitings
    }

    /// The next message's length; None when the mount is gone.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&self.fd, &mut *buffer) {
                Ok(length) => return Ok(Some(length)),
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
                // ENOENT: the request was withdrawn while it was handed over.
                Err(Errno::INTR | Errno::NOENT | Errno::NOMEM) => {}
                Err(Errno::AGAIN) => self.readable()?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn readable(&self) -> io::Result<()> {
        match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn send(&self, unique: u64, pieces: &[&[u8]]) {
        let total = pieces.iter().map(|piece| piece.len()).sum();
        if self.write(&out_header(total, 0, unique), pieces).is_err() {
            // Not taken (out of memory, a wrong length): whoever waits must not do so for ever.
            self.send_error(unique, Errno::IO);
        }
    }

    pub(crate) fn send_error(&self, unique: u64, error: Errno) {
        // ENOENT (the request is gone) and ENODEV (the mount is) leave nobody to tell.
        let _ = self.write(&out_header(0, -error.raw_os_error(), unique), &[]);
    }

    fn notify(&self, code: i32, pieces: &[&[u8]]) -> io::Result<()> {
        let total = pieces.iter().map(|piece| piece.len()).sum();
        Ok(self.write(&out_header(total, code, 0), pieces)?)
    }

    fn write(&self, header: &[u8], pieces: &[&[u8]]) -> Result<(), Errno> {
        loop {
            match rustix::io::writev(self.fd.as_fd(), &gather(header, pieces)) {
                Err(Errno::INTR) => {}
                other => return other.map(drop),
            }
        }
    }
}

fn unless_absent(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
