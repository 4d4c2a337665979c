//! `sudo` in a sandbox whose kernel ignores set-user-id bits: ours stands before the image's own in
//! PATH and asks us; we run the image's as root for users who need no password for anything.

use std::ffi::CString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use agentenv_wire::sudo::{Call, ADDRESS, MAX_CALL, REAL};

use crate::sys;
use crate::sys::child::{Identity, Program};
use crate::users::Database;

const OURS: &str = "/usr/local/bin/sudo";
/// Where the host put it; it goes when the sandbox starts.
const PLACE: &str = "/.agentenv-sudo";
static PROGRAM: OnceLock<Vec<u8>> = OnceLock::new();

/// Take the program from where the host put it.
pub fn take() {
    if let Ok(program) = fs::read(PLACE) {
        let _ = PROGRAM.set(program);
        let _ = fs::remove_file(PLACE);
    }
}

/// Have ours before the image's, once there is one; an image may have its own way in that place.
pub fn place() {
    let Some(program) = PROGRAM.get() else { return };
    if !Path::new(REAL).exists() || fs::symlink_metadata(OURS).is_ok() {
        return;
    }
    let fresh = format!("{OURS}.{}", std::process::id());
    let placed = fs::create_dir_all("/usr/local/bin")
        .and_then(|()| fs::write(&fresh, program))
        .and_then(|()| fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)))
        .and_then(|()| fs::rename(&fresh, OURS));
    if let Err(error) = placed {
        println!("agentenv-agent: sudo is not usable: {error}");
    }
}

/// Answer for as long as we run.
pub fn serve() {
    let listener = SocketAddr::from_abstract_name(ADDRESS)
        .and_then(|address| UnixListener::bind_addr(&address));
    match listener {
        Ok(listener) => {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || answer(stream));
            }
        }
        Err(error) => println!("agentenv-agent: sudo is not answered: {error}"),
    }
}

fn answer(mut stream: UnixStream) {
    let code = run(&stream).unwrap_or_else(|error| {
        println!("agentenv-agent: a call of sudo failed: {error}");
        1
    });
    let _ = stream.write_all(&code.to_le_bytes());
    // Both threads hold it: whoever asked must see the end.
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

fn run(stream: &UnixStream) -> io::Result<i32> {
    let ([input, output, errors], uid) = sys::receive_streams(stream)?;
    let call = receive(stream)?;
    let said = fs::File::from(errors.try_clone()?);
    if !needs_no_password(&Database::load().user_name(uid)) {
        let why = "this sandbox (gVisor) has it for users who need no password for anything";
        let _ = writeln!(&said, "sudo: a password is required: {why}");
        return Ok(1);
    }
    let leader = match start(call, [input, output, errors]) {
        Ok(leader) => leader,
        Err(error) => {
            let _ = writeln!(&said, "sudo: {error}");
            return Ok(1);
        }
    };
    let (watched, ended) = (stream.try_clone()?, Arc::new(AtomicBool::new(false)));
    let over = Arc::clone(&ended);
    std::thread::spawn(move || pass_on(&watched, leader, &over));
    let status = sys::child::wait(leader);
    ended.store(true, Ordering::SeqCst);
    status.map(code_of)
}

fn receive(mut stream: &UnixStream) -> io::Result<Call> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_CALL {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut data = vec![0; length];
    stream.read_exact(&mut data)?;
    Call::decode(&data).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// By the image's own rules.
fn needs_no_password(user: &str) -> bool {
    let listed = Command::new(REAL).args(["-n", "-l", "-U", user]).output();
    listed.is_ok_and(|listed| allows_all(&String::from_utf8_lossy(&listed.stdout)))
}

fn allows_all(listed: &str) -> bool {
    listed
        .lines()
        .any(|line| line.trim_end().ends_with("NOPASSWD: ALL"))
}

fn start(call: Call, streams: [OwnedFd; 3]) -> io::Result<libc::pid_t> {
    let text = |bytes: Vec<u8>| CString::new(bytes).map_err(|_| io::ErrorKind::InvalidInput);
    let words = std::iter::once(REAL.as_bytes().to_vec()).chain(call.arguments);
    let environment = call.environment.into_iter().filter(|pair| names(pair));
    Program {
        paths: vec![text(REAL.into())?],
        words: words.map(text).collect::<Result<_, _>>()?,
        env: environment.map(text).collect::<Result<_, _>>()?,
        streams,
        terminal: false,
        group: None,
        umask: Some(call.umask),
        identity: Identity {
            uid: 0,
            gid: 0,
            groups: vec![0],
            cwd: text(call.folder)?,
        },
    }
    .start()
}

/// Whether it is a variable, which has a name.
fn names(pair: &[u8]) -> bool {
    pair.iter().position(|byte| *byte == b'=') > Some(0)
}

/// The caller's signals to the command's group; one who is gone hangs up. What the command leaves
/// when it has ended is nobody's to signal.
fn pass_on(mut caller: &UnixStream, leader: libc::pid_t, ended: &AtomicBool) {
    let mut byte = [0];
    let signal = |number| {
        if !ended.load(Ordering::SeqCst) {
            let _ = sys::kill(-leader, number);
        }
    };
    while caller.read_exact(&mut byte).is_ok() {
        signal(libc::c_int::from(byte[0]));
    }
    signal(libc::SIGHUP);
}

fn code_of(status: ExitStatus) -> i32 {
    let by_signal = || 128 + status.signal().unwrap_or(0);
    status.code().unwrap_or_else(by_signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_as_sudo_lists_them() {
        let listed =
            "User user may run the following commands on sbx:\n    (ALL : ALL) NOPASSWD: ALL\n";
        assert!(allows_all(listed));
        assert!(!allows_all("    (ALL : ALL) ALL\n"));
        assert!(!allows_all("    (ALL) NOPASSWD: /bin/ls\n"));
        assert!(!allows_all(
            "User user is not allowed to run sudo on sbx.\n"
        ));
    }

    #[test]
    fn a_variable_has_a_name() {
        assert!(names(b"A=b=c"));
        assert!(!names(b"=x"));
        assert!(!names(b"x"));
    }
}
