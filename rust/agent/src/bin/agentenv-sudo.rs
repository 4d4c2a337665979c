//! `sudo` where the kernel ignores set-user-id bits: the agent runs the real one, as root, with our
//! streams, folder and environment, for those who need no password.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::mem::{size_of, size_of_val};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::Command;

use agentenv_wire::sudo::{Call, ADDRESS, REAL};

/// Passed on to the command: what a terminal or `kill` sends.
const SIGNALS: [libc::c_int; 6] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

fn main() {
    // SAFETY: takes nothing.
    if unsafe { libc::geteuid() } == 0 {
        let error = Command::new(REAL).args(std::env::args_os().skip(1)).exec();
        fail(&error);
    }
    match ask() {
        Ok(code) => std::process::exit(code),
        Err(error) => fail(&error),
    }
}

fn fail(error: &io::Error) -> ! {
    eprintln!("sudo: {error}");
    std::process::exit(1)
}

fn ask() -> io::Result<i32> {
    let mut agent = UnixStream::connect_addr(&SocketAddr::from_abstract_name(ADDRESS)?)?;
    let signals = block_signals();
    send_streams(&agent)?;
    let call = call().encode();
    agent.write_all(&(call.len() as u32).to_le_bytes())?;
    agent.write_all(&call)?;
    let mut told = agent.try_clone()?;
    std::thread::spawn(move || while told.write_all(&[next_signal(&signals)]).is_ok() {});
    let mut code = [0; 4];
    agent.read_exact(&mut code)?;
    Ok(i32::from_le_bytes(code))
}

fn call() -> Call {
    let pair =
        |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    // SAFETY: takes a number; we make no file.
    let umask = unsafe { libc::umask(0o77) };
    Call {
        folder: std::env::current_dir()
            .map_or_else(|_| b"/".to_vec(), |path| path.into_os_string().into_vec()),
        umask,
        arguments: std::env::args_os()
            .skip(1)
            .map(OsString::into_vec)
            .collect(),
        environment: std::env::vars_os().map(pair).collect(),
    }
}

/// Of this thread and those it starts; the set.
fn block_signals() -> libc::sigset_t {
    // SAFETY: the set is initialised by sigemptyset before use.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in SIGNALS {
            libc::sigaddset(&mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        set
    }
}

fn next_signal(set: &libc::sigset_t) -> u8 {
    // SAFETY: the set is initialised; a null info pointer is allowed.
    unsafe { libc::sigwaitinfo(set, std::ptr::null_mut()) as u8 }
}

/// One byte, and with it standard input, output and error, and who we are.
fn send_streams(agent: &UnixStream) -> io::Result<()> {
    let streams: [libc::c_int; 3] = [0, 1, 2];
    // SAFETY: take nothing.
    let who = unsafe {
        libc::ucred {
            pid: libc::getpid(),
            uid: libc::getuid(),
            gid: libc::getgid(),
        }
    };
    let mut byte = [0u8];
    // Aligned as a cmsghdr must be.
    let mut control = [0u64; 16];
    // SAFETY: all pointers are to locals that outlive the call; `control` has room for both headers
    // with what follows them, and is all zeroes, as CMSG_NXTHDR wants it.
    let sent = unsafe {
        let mut part = libc::iovec {
            iov_base: byte.as_mut_ptr().cast(),
            iov_len: 1,
        };
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        let room = libc::CMSG_SPACE(size_of_val(&streams) as u32)
            + libc::CMSG_SPACE(size_of_val(&who) as u32);
        message.msg_controllen = room as _;
        let first = libc::CMSG_FIRSTHDR(&message);
        fill(first, libc::SCM_RIGHTS, &streams);
        fill(
            libc::CMSG_NXTHDR(&message, first),
            libc::SCM_CREDENTIALS,
            &who,
        );
        libc::sendmsg(agent.as_raw_fd(), &message, 0)
    };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// # Safety
/// `header` points to room for itself and `value`.
unsafe fn fill<T>(header: *mut libc::cmsghdr, kind: libc::c_int, value: &T) {
    let size = size_of::<T>() as u32;
    // SAFETY: as the caller promises.
    unsafe {
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = libc::CMSG_LEN(size) as _;
        let place = libc::CMSG_DATA(header);
        std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), place, size as usize);
    }
}
