//! The host's control face: JSON lines on the virtio-serial port, or on a TCP port that the host
//! alone may use (or, for tests, on a unix socket).

mod disk;
mod generation;
mod identity;
mod network;
mod operations;
mod sockets;
mod tcp;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use agentenv_wire::{Fault, Outcome, Reply, Request, MAX_LINE};

pub use disk::thaw;
pub use operations::stats;

use crate::init::Key;
use crate::state::Agent;
use crate::sys;

const PORT_NAME: &str = "agentenv.control";

/// Where the host speaks to us.
#[derive(Clone)]
pub enum Port {
    /// The virtio-serial port of that name.
    Serial,
    /// The TCP port `tcp::PORT`.
    Tcp(Key),
    /// A socket we listen on.
    Socket(PathBuf),
}

impl Port {
    pub fn from_option(path: Option<PathBuf>) -> Option<Self> {
        path.map(Self::Socket)
    }
}

/// Serve the port until the process ends; blocking, in a thread of its own.
pub fn serve(port: &Port, agent: &Arc<Agent>) {
    let result = match port {
        Port::Serial => serve_serial(agent),
        Port::Tcp(key) => tcp::serve(key, agent),
        Port::Socket(path) => serve_socket(path, agent),
    };
    if let Err(error) = result {
        println!("agentenv-agent: the control port failed: {error}");
    }
}

fn serve_socket(path: &PathBuf, agent: &Arc<Agent>) -> io::Result<()> {
    let _ = fs::remove_file(path);
    for connection in UnixListener::bind(path)?.incoming() {
        let connection = connection?;
        let _ = converse(&connection, &connection, agent);
    }
    Ok(())
}

/// While no host is there reads give 0 at once; the kernel signals when one comes (SIGIO), so we
/// sleep until then instead of asking again and again.
fn serve_serial(agent: &Arc<Agent>) -> io::Result<()> {
    // The host waits for the answers while a sandbox is stopped or starts; busy processes do not.
    // One that lacks this priority is only slower.
    let _ = sys::run_first();
    let port = OpenOptions::new()
        .read(true)
        .write(true)
        .open(find_port()?)?;
    sys::signal_on_change(port.as_raw_fd())?;
    loop {
        converse(&port, &port, agent)?;
        sys::wait_sigio();
    }
}

fn find_port() -> io::Result<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports")? {
        let entry = entry?;
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT_NAME {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("no virtio port {PORT_NAME}"),
    ))
}

/// Answer requests until the other side goes away.
fn converse(from: impl Read, mut to: impl Write, agent: &Arc<Agent>) -> io::Result<()> {
    let mut lines = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut lines)
            .take(MAX_LINE as u64)
            .read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let mut answer = serde_json::to_vec(&answer(&line, agent))?;
        answer.push(b'\n');
        to.write_all(&answer)?;
    }
}

fn answer(line: &[u8], agent: &Arc<Agent>) -> Reply {
    match serde_json::from_slice::<Request>(line) {
        Ok(Request { id, op }) => Reply {
            id: Some(id),
            result: operations::perform(op, agent).map_or_else(Outcome::Error, Outcome::Ok),
        },
        Err(error) => Reply {
            id: serde_json::from_slice::<serde_json::Value>(line)
                .ok()
                .and_then(|value| value.get("id")?.as_u64()),
            result: Outcome::Error(Fault {
                code: "bad_request",
                message: error.to_string(),
            }),
        },
    }
}

fn fault(code: &'static str) -> impl Fn(io::Error) -> Fault {
    move |error| Fault {
        code,
        message: error.to_string(),
    }
}

fn now_ns() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as i64)
}

/// What we were told before our death.
pub fn recall(memory: &mut File) -> Option<agentenv_wire::Init> {
    use std::io::Seek;
    memory.rewind().ok()?;
    serde_json::from_reader(memory).ok()
}
