//! Programs started without a copy of this one: until its exec the child borrows our memory while we
//! wait, as posix_spawn(3) has it, which knows neither identities nor terminals. A fork costs page
//! faults on both sides, in gVisor half of what a short command takes (decision 011).

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::ptr;

use super::{checked, set_file_limit, FILES_HARD, FILES_SOFT};

/// Enough for some system calls, each with a frame or two.
const STACK: usize = 64 << 10;
const SHELL: &CStr = c"/bin/sh";
/// What this program handles or ignores: the standard library, and its runtime for children.
const HANDLED: [libc::c_int; 4] = [libc::SIGPIPE, libc::SIGSEGV, libc::SIGBUS, libc::SIGCHLD];

/// A program to start. Of `paths` the first that can be executed is taken.
pub struct Program {
    pub paths: Vec<CString>,
    pub words: Vec<CString>,
    pub env: Vec<CString>,
    pub streams: [OwnedFd; 3],
    /// Its standard input becomes the terminal of its session.
    pub terminal: bool,
    /// An open `cgroup.procs`.
    pub group: Option<OwnedFd>,
    pub umask: Option<libc::mode_t>,
    pub identity: Identity,
}

pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub cwd: CString,
}

/// What the child finds in our memory, where it leaves why it failed.
struct Task<'a> {
    program: &'a Program,
    /// NULL-terminated; before the words is room for one more, which a script without `#!` needs.
    words: &'a mut [*const libc::c_char],
    env: &'a [*const libc::c_char],
    errno: libc::c_int,
}

impl Program {
    /// Its pid; it is ours to be waited for.
    pub fn start(&self) -> io::Result<libc::pid_t> {
        let mut words: Vec<_> = [ptr::null()]
            .into_iter()
            .chain(pointers(&self.words))
            .collect();
        let env: Vec<_> = pointers(&self.env).collect();
        let mut task = Task {
            program: self,
            words: &mut words,
            env: &env,
            errno: 0,
        };
        let mut stack = Vec::<u8>::with_capacity(STACK);
        let before = block_signals();
        // SAFETY: the stack grows down from an aligned place in room of our own; `task` and all that
        // it refers to live until the call returns, which is when the child has left our memory
        // (CLONE_VFORK). The child makes system calls only. No handler of ours runs in it: signals
        // are blocked until it has none any more.
        let pid = unsafe {
            let top = stack.as_mut_ptr().add(STACK);
            let top = top.sub(top as usize % 16).cast();
            let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
            libc::clone(enter, top, flags, ptr::from_mut(&mut task).cast())
        };
        let pid = checked(pid);
        restore_signals(&before);
        let pid = pid?;
        // SAFETY: the child is gone from our memory; it wrote there behind the compiler's back.
        match unsafe { ptr::read_volatile(&task.errno) } {
            0 => Ok(pid),
            errno => {
                wait(pid)?;
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }
}

/// How the child ends.
pub fn wait(pid: libc::pid_t) -> io::Result<ExitStatus> {
    loop {
        match ended(pid, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(Option::unwrap_or_default),
        }
    }
}

/// How the child ended, if it has.
pub fn try_wait(pid: libc::pid_t) -> io::Result<Option<ExitStatus>> {
    ended(pid, libc::WNOHANG)
}

fn ended(pid: libc::pid_t, flags: libc::c_int) -> io::Result<Option<ExitStatus>> {
    let mut status = 0;
    // SAFETY: `status` is ours to be filled.
    let found = checked(unsafe { libc::waitpid(pid, &mut status, flags) })?;
    Ok((found != 0).then(|| ExitStatus::from_raw(status)))
}

fn pointers(words: &[CString]) -> impl Iterator<Item = *const libc::c_char> + '_ {
    words.iter().map(|word| word.as_ptr()).chain([ptr::null()])
}

extern "C" fn enter(task: *mut libc::c_void) -> libc::c_int {
    // SAFETY: it is `start`'s, which waits.
    let task = unsafe { &mut *task.cast::<Task>() };
    let failure = prepare(task.program).err().unwrap_or_else(|| execute(task));
    let errno = failure.raw_os_error().unwrap_or(libc::EINVAL);
    // SAFETY: as above; `start` reads it when we are gone, which is now.
    unsafe {
        ptr::write_volatile(&mut task.errno, errno);
        libc::_exit(127)
    }
}

fn prepare(program: &Program) -> io::Result<()> {
    // SAFETY: numbers alone.
    unsafe { libc::setsid() };
    for (number, stream) in (0..).zip(&program.streams) {
        // SAFETY: both are numbers; ours are above these, which a Rust program always has open.
        checked(unsafe { libc::dup2(stream.as_raw_fd(), number) })?;
    }
    if let Some(group) = &program.group {
        // SAFETY: the descriptor is open, pointer and length describe one static byte.
        checked(unsafe { libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1) } as libc::c_int)?;
    }
    if let Some(umask) = program.umask {
        // SAFETY: a number.
        unsafe { libc::umask(umask) };
    }
    default_signals(HANDLED);
    become_user(&program.identity)?;
    if program.terminal {
        // SAFETY: TIOCSCTTY takes a number.
        checked(unsafe { libc::ioctl(0, libc::TIOCSCTTY as _, 0) })?;
    }
    Ok(())
}

/// As execvp(3) does it: on to the next path if there is none here; what is no program is a script.
fn execute(task: &mut Task) -> io::Error {
    let mut reason = libc::ENOENT;
    for path in &task.program.paths {
        // SAFETY: both lists end with NULL and hold NUL-terminated words that live.
        unsafe { libc::execve(path.as_ptr(), task.words.as_ptr().add(1), task.env.as_ptr()) };
        match io::Error::last_os_error().raw_os_error().unwrap_or(0) {
            libc::ENOENT | libc::ENOTDIR => {}
            libc::EACCES => reason = libc::EACCES,
            libc::ENOEXEC => {
                if let [shell, script, ..] = &mut *task.words {
                    (*shell, *script) = (SHELL.as_ptr(), path.as_ptr());
                }
                // SAFETY: as above.
                unsafe { libc::execve(SHELL.as_ptr(), task.words.as_ptr(), task.env.as_ptr()) };
                return io::Error::last_os_error();
            }
            other => return io::Error::from_raw_os_error(other),
        }
    }
    io::Error::from_raw_os_error(reason)
}

/// What a child does before exec: limits, identity, folder. Async-signal-safe, for this thread alone:
/// glibc's own setuid(2) would have all threads follow. With the identity the kernel takes from the
/// new user what would let it trace our memory (`suid_dumpable`).
fn become_user(identity: &Identity) -> io::Result<()> {
    let _ = set_file_limit(FILES_SOFT, FILES_HARD);
    // SAFETY: only system calls, on data that was made before the child.
    unsafe {
        let score = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        if score >= 0 {
            libc::write(score, c"0".as_ptr().cast(), 1);
            libc::close(score);
        }
        if libc::geteuid() == 0 {
            let groups = &identity.groups;
            called(libc::syscall(
                libc::SYS_setgroups,
                groups.len(),
                groups.as_ptr(),
            ))?;
            called(libc::syscall(libc::SYS_setgid, identity.gid))?;
            called(libc::syscall(libc::SYS_setuid, identity.uid))?;
        }
        checked(libc::chdir(identity.cwd.as_ptr())).map(drop)
    }
}

fn called(result: libc::c_long) -> io::Result<()> {
    checked(result as libc::c_int).map(drop)
}

/// Drop what a parent had ignored, which our children would ignore as well. Before threads start.
pub fn ignore_nothing() {
    default_signals((1..=libc::SIGRTMAX()).filter(|number| !HANDLED.contains(number)));
}

/// Of `numbers` none is handled or ignored, and no signal is blocked. Async-signal-safe.
fn default_signals(numbers: impl IntoIterator<Item = libc::c_int>) {
    // SAFETY: only system calls with numbers and valid sets; all zeroes is the default action.
    unsafe {
        let action = std::mem::zeroed::<libc::sigaction>(); // SIG_DFL is zero
        for number in numbers {
            libc::sigaction(number, &action, ptr::null_mut());
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
    }
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: valid sets of our own.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: a valid set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, ptr::null_mut()) };
}
