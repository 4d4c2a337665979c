//! System calls that the standard library has no face for, each in a safe function.

mod attributes;
pub mod child;
pub mod epoll;
mod netlink;
mod rights;

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

pub use attributes::{attribute, attributes, attributes_of, remove_attribute, set_attribute};
pub use netlink::Netlink;
pub use rights::receive_streams;

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

pub fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// mount(2); an empty `kind` or `data` is passed as such.
pub fn mount(source: &str, target: &str, kind: &str, flags: u64, data: &str) -> io::Result<()> {
    let [source, target, kind, data] =
        [source, target, kind, data].map(|text| c_string(OsStr::new(text)));
    let (source, target, kind, data) = (source?, target?, kind?, data?);
    // SAFETY: all four are NUL-terminated strings that live until the call returns.
    checked(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags as libc::c_ulong,
            data.as_ptr().cast(),
        )
    })
    .map(drop)
}

pub fn chroot(path: &str) -> io::Result<()> {
    let path = c_string(OsStr::new(path))?;
    // SAFETY: `path` is a NUL-terminated string.
    checked(unsafe { libc::chroot(path.as_ptr()) }).map(drop)
}

/// finit_module(2) without parameters.
pub fn load_module(file: &std::fs::File) -> io::Result<()> {
    // SAFETY: the descriptor is open, the parameter string is static and NUL-terminated.
    let result =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    checked(result as libc::c_int).map(drop)
}

pub fn memfd(name: &str) -> io::Result<OwnedFd> {
    let name = c_string(OsStr::new(name))?;
    // SAFETY: `name` is NUL-terminated; the result is a new descriptor that nobody else owns.
    let fd = checked(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// fork(2); None in the child. Only PID 1 calls it, and PID 1 starts no thread.
pub fn fork() -> io::Result<Option<libc::pid_t>> {
    // SAFETY: the caller is single-threaded, so the child has a whole, consistent process.
    let pid = checked(unsafe { libc::fork() })?;
    Ok((pid != 0).then_some(pid))
}

/// What became of a child.
pub enum Turn {
    Stopped,
    /// Its exit code; None if a signal ended it.
    Ended(Option<libc::c_int>),
}

/// Wait for any child to end or to be stopped.
pub fn wait_any() -> io::Result<(libc::pid_t, Turn)> {
    let mut status = 0;
    // SAFETY: `status` is ours to be filled.
    let pid = checked(unsafe { libc::waitpid(-1, &mut status, libc::WUNTRACED) })?;
    let turn = if libc::WIFSTOPPED(status) {
        Turn::Stopped
    } else {
        Turn::Ended(libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)))
    };
    Ok((pid, turn))
}

/// Become the program at `path` with these words and our environment; returns only to say why not.
pub fn run_as(path: &Path, words: &[&str]) -> io::Error {
    use std::os::unix::process::CommandExt;
    std::process::Command::new(path)
        .args(words.iter().skip(1))
        .exec()
}

/// Detach what is mounted at `path`.
pub fn unmount(path: &str) -> io::Result<()> {
    let path = c_string(OsStr::new(path))?;
    // SAFETY: `path` is NUL-terminated.
    checked(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }).map(drop)
}

pub fn kill(pid: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
    // SAFETY: kill takes plain numbers.
    checked(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// How the agent tells init to end the machine where it cannot do that itself.
pub const POWERED_OFF: libc::c_int = 77;

/// sync, then restart the machine; QEMU runs with -no-reboot, so it ends. A sandbox that is no
/// machine ends with its first process.
pub fn power_off() -> ! {
    let first = std::process::id() == 1;
    // SAFETY: both take no pointers; reboot does not return on success.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_AUTOBOOT);
    }
    std::process::exit(if first { 0 } else { POWERED_OFF })
}

pub fn sync() {
    // SAFETY: sync takes nothing and cannot fail.
    unsafe { libc::sync() }
}

pub fn set_clock(time_ns: i64) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: time_ns.div_euclid(1_000_000_000),
        tv_nsec: time_ns.rem_euclid(1_000_000_000),
    };
    // SAFETY: `time` is a valid timespec.
    checked(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) }).map(drop)
}

pub fn set_hostname(name: &str) -> io::Result<()> {
    // SAFETY: pointer and length describe `name`.
    checked(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }).map(drop)
}

/// ioctl with one pointer argument that the kernel reads (or fills) as a `T`.
pub fn ioctl<T>(fd: RawFd, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: callers pair a request with the structure the kernel documents for it.
    checked(unsafe { libc::ioctl(fd, request as _, argument as *mut T) }).map(drop)
}

/// chown of an open file.
pub fn fchown(file: &std::fs::File, uid: u32, gid: u32) -> io::Result<()> {
    std::os::unix::fs::fchown(file, Some(uid), Some(gid))
}

/// Have room for `size` bytes of the file, its length unchanged; a file system that cannot promise
/// it is no fault.
pub fn reserve(file: &std::fs::File, size: u64) -> io::Result<()> {
    let size = libc::off_t::try_from(size).map_err(io::Error::other)?;
    // SAFETY: takes numbers.
    let done = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, size) };
    match checked(done).map_err(|error| (error.raw_os_error(), error)) {
        Ok(_) | Err((Some(libc::EOPNOTSUPP | libc::ENOSYS), _)) => Ok(()),
        Err((_, error)) => Err(error),
    }
}

/// Set the modification time of `path`, a link's own, to `seconds` since 1970.
pub fn set_mtime(path: &Path, seconds: u64) -> io::Result<()> {
    let path = c_string(path.as_os_str())?;
    let seconds = libc::time_t::try_from(seconds).map_err(io::Error::other)?;
    let at = |tv_nsec| libc::timespec {
        tv_sec: seconds,
        tv_nsec,
    };
    let times = [at(libc::UTIME_OMIT), at(0)];
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: `path` is NUL-terminated, `times` holds the two that the call reads.
    checked(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), flags) })
        .map(drop)
}

/// A pipe or device of exactly that mode; `device` is major and minor.
pub fn make_node(path: &Path, mode: u32, device: (u32, u32)) -> io::Result<()> {
    let name = c_string(path.as_os_str())?;
    // SAFETY: `name` is NUL-terminated.
    checked(unsafe { libc::mknod(name.as_ptr(), mode, libc::makedev(device.0, device.1)) })?;
    // SAFETY: as above; mknod obeyed our umask.
    checked(unsafe { libc::chmod(name.as_ptr(), mode & 0o7777) }).map(drop)
}

/// The next stretch of data in a file at or behind `at`, as (begin, end); None: there is none.
pub fn next_data(fd: RawFd, at: u64) -> io::Result<Option<(u64, u64)>> {
    let seek = |from: libc::off_t, what| {
        // SAFETY: takes numbers.
        let found = unsafe { libc::lseek(fd, from, what) };
        u64::try_from(found).map_err(|_| io::Error::last_os_error())
    };
    let offset = |place: u64| libc::off_t::try_from(place).map_err(io::Error::other);
    match seek(offset(at)?, libc::SEEK_DATA) {
        Ok(begin) => Ok(Some((begin, seek(offset(begin)?, libc::SEEK_HOLE)?))),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Size and free space of the file system at `path`, in bytes.
pub fn disk_space(path: &Path) -> io::Result<(u64, u64)> {
    let path = c_string(path.as_os_str())?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is NUL-terminated, `stat` has room for the result.
    checked(unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so it filled `stat`.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize))
}

/// A pipe as (read end, write end), both closed on exec.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for two; on success both are ours alone.
    checked(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: as above.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// What can be read at once.
pub fn read(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the descriptor is open; the buffer is as long as it is said to be.
    let read = unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// A pseudo terminal as (our end, non-blocking; the process's end), both closed on exec.
pub fn open_terminal() -> io::Result<(OwnedFd, OwnedFd)> {
    let own = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the path is static and NUL-terminated; the result is a new descriptor.
    let ours = checked(unsafe { libc::open(c"/dev/ptmx".as_ptr(), own | libc::O_NONBLOCK) })?;
    // SAFETY: as above.
    let ours = unsafe { OwnedFd::from_raw_fd(ours) };
    let mut unlocked: libc::c_int = 0;
    ioctl(ours.as_raw_fd(), libc::TIOCSPTLCK, &mut unlocked)?;
    // SAFETY: TIOCGPTPEER takes open flags and gives a new descriptor.
    let theirs = checked(unsafe { libc::ioctl(ours.as_raw_fd(), libc::TIOCGPTPEER as _, own) });
    let theirs = match theirs {
        // SAFETY: as above.
        Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
        // gVisor knows it by its name alone.
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            let mut number: libc::c_uint = 0;
            ioctl(ours.as_raw_fd(), libc::TIOCGPTN, &mut number)?;
            let mut named = std::fs::OpenOptions::new();
            named.read(true).write(true).custom_flags(libc::O_NOCTTY);
            named.open(format!("/dev/pts/{number}"))?.into()
        }
        Err(error) => return Err(error),
    };
    Ok((ours, theirs))
}

/// The key that ends input of a terminal that reads by lines; None: it takes every byte as it is.
pub fn end_of_file_key(terminal: RawFd) -> io::Result<Option<u8>> {
    let mut modes = std::mem::MaybeUninit::<libc::termios>::uninit();
    // SAFETY: the descriptor is open, `modes` has room for the result.
    checked(unsafe { libc::tcgetattr(terminal, modes.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so it filled `modes`.
    let modes = unsafe { modes.assume_init() };
    let by_lines = modes.c_lflag & libc::ICANON != 0;
    Ok(by_lines.then_some(modes.c_cc[libc::VEOF]))
}

/// A new inotify instance, non-blocking and closed on exec.
pub fn inotify() -> io::Result<OwnedFd> {
    // SAFETY: takes flags; the result is a new descriptor that nobody else owns.
    let fd = checked(unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) })?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Watch `path` for the events in `mask`; the watch's descriptor.
pub fn add_watch(inotify: RawFd, path: &Path, mask: u32) -> io::Result<i32> {
    let path = c_string(path.as_os_str())?;
    // SAFETY: `path` is NUL-terminated.
    checked(unsafe { libc::inotify_add_watch(inotify, path.as_ptr(), mask) })
}

/// End a watch; one that ended by itself is no fault.
pub fn remove_watch(inotify: RawFd, descriptor: i32) {
    // SAFETY: takes numbers.
    unsafe { libc::inotify_rm_watch(inotify, descriptor) };
}

/// The magic number of the file system at `path` (statfs(2)).
pub fn file_system_kind(path: &Path) -> io::Result<i64> {
    let path = c_string(path.as_os_str())?;
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `path` is NUL-terminated, `stat` has room for the result.
    checked(unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so it filled `stat`.
    Ok(unsafe { stat.assume_init() }.f_type)
}

/// Sleep until a file of the kernel's says that it changed since it was read, or for `patience`.
pub fn wait_for_change(file: &std::fs::File, patience: Duration) -> io::Result<()> {
    let mut asked = libc::pollfd {
        fd: file.as_raw_fd(),
        events: libc::POLLPRI,
        revents: 0,
    };
    let milliseconds = libc::c_int::try_from(patience.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: `asked` is the one entry that the call reads and fills.
    match checked(unsafe { libc::poll(&mut asked, 1, milliseconds) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        result => result.map(drop),
    }
}

/// Have this thread run before everything that is not as urgent, whatever else wants the CPU.
pub fn run_first() -> io::Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: 0 is the calling thread; `priority` is a valid parameter of that policy.
    checked(unsafe { libc::sched_setscheduler(0, policy, &priority) }).map(drop)
}

/// Block SIGIO in this thread and those it starts.
pub fn block_sigio() {
    // SAFETY: the set is initialised by sigemptyset before use.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGIO);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}

/// Have the kernel send this process SIGIO when the state of `fd` changes.
pub fn signal_on_change(fd: RawFd) -> io::Result<()> {
    // SAFETY: fcntl with numbers only.
    unsafe {
        checked(libc::fcntl(fd, libc::F_SETOWN, libc::getpid()))?;
        let flags = checked(libc::fcntl(fd, libc::F_GETFL))?;
        checked(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC)).map(drop)
    }
}

/// Sleep until a (blocked) SIGIO is pending, and take it.
pub fn wait_sigio() {
    // SAFETY: the set is initialised; a null info pointer is allowed.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGIO);
        libc::sigwaitinfo(&set, std::ptr::null_mut());
    }
}

/// As many descriptors as we may have: deep trees are removed with one open folder a level.
/// Processes of users get the usual `soft` limit back, see `child`.
pub fn raise_file_limit() {
    if set_file_limit(FILES_HARD, FILES_HARD).is_err() {
        let mut limit = std::mem::MaybeUninit::<libc::rlimit>::zeroed();
        // SAFETY: `limit` has room for the result; all zeroes is a valid rlimit.
        let limit = unsafe {
            libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr());
            limit.assume_init()
        };
        let _ = set_file_limit(limit.rlim_max, limit.rlim_max); // it stays as it is
    }
}

/// The kernel's default of fs.nr_open, and what programs that use select() can take.
const FILES_HARD: libc::rlim_t = 1 << 20;
const FILES_SOFT: libc::rlim_t = 1024;

fn set_file_limit(soft: libc::rlim_t, hard: libc::rlim_t) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: `limit` is a valid rlimit; the call is async-signal-safe.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }).map(drop)
}
