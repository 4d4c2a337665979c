//! What comes through a unix socket beside bytes: descriptors, and who sent them.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::checked;

/// Three descriptors and the user who sent them with one byte: as the sender said and the kernel
/// checked (SCM_CREDENTIALS), since gVisor of 2024 answers SO_PEERCRED with our own.
pub fn receive_streams(stream: &UnixStream) -> io::Result<([OwnedFd; 3], u32)> {
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open, `on` is as long as it is said to be.
    checked(unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PASSCRED,
            (&raw const on).cast(),
            std::mem::size_of_val(&on) as libc::socklen_t,
        )
    })?;
    let mut byte = [0u8];
    let mut control = [0u64; 16]; // aligned as a cmsghdr must be
    let (mut found, mut sender) = (Vec::new(), None);
    // SAFETY: all pointers are to locals that outlive the call; what is walked is what the kernel
    // filled in, within the length it gave; each descriptor in it is new and ours alone.
    unsafe {
        let mut part = libc::iovec {
            iov_base: byte.as_mut_ptr().cast(),
            iov_len: 1,
        };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = std::mem::size_of_val(&control) as _;
        let flags = libc::MSG_CMSG_CLOEXEC;
        checked(libc::recvmsg(stream.as_raw_fd(), &mut message, flags) as libc::c_int)?;
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    for at in 0..bytes / std::mem::size_of::<libc::c_int>() {
                        let fd = data.cast::<libc::c_int>().add(at).read_unaligned();
                        found.push(OwnedFd::from_raw_fd(fd));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                    sender = Some(data.cast::<libc::ucred>().read_unaligned().uid);
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    let streams = <[OwnedFd; 3]>::try_from(found).ok();
    streams
        .zip(sender)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}
