//! The writable disk below the root, held still while the host copies it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::sys;

const FIFREEZE: libc::c_ulong = 0xC004_5877;
const FITHAW: libc::c_ulong = 0xC004_5878;

/// Hold back every write from now on, then write out those before (FIFREEZE does both). Overlayfs
/// cannot be frozen itself: the file system below it is, which its writes have to pass.
pub fn freeze(disk: &File) -> io::Result<()> {
    unless(libc::EBUSY, ask(disk, FIFREEZE))
}

pub fn thaw(disk: &File) -> io::Result<()> {
    unless(libc::EINVAL, ask(disk, FITHAW))
}

fn ask(disk: &File, request: libc::c_ulong) -> io::Result<()> {
    sys::ioctl(disk.as_raw_fd(), request, &mut 0_i32)
}

/// `so_already` is how the kernel says that it is in the wanted state.
fn unless(so_already: libc::c_int, result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(so_already) => Ok(()),
        other => other,
    }
}
