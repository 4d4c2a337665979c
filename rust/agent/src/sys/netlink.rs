//! A netlink socket to the kernel (netlink(7)).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};

use super::checked;

/// Sent messages go to the kernel; each read gives one datagram of answers.
pub struct Netlink(File);

impl Netlink {
    pub fn open(protocol: libc::c_int) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: takes numbers; the result is a new descriptor that nobody else owns.
        let fd = checked(unsafe { libc::socket(libc::AF_NETLINK, kind, protocol) })?;
        // SAFETY: as above.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }.into()))
    }

    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.0.write_all(message)
    }

    /// The next answers; how many bytes of `buffer` they fill.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}
