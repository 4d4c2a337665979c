//! The guest agent: init of the sandbox, and the in-guest API on TCP 49983.
//!
//! - `init`     PID 1: mounts, modules, switch of root; keeps the agent alive, reaps orphans
//! - `control`  the host's face on virtio-serial or TCP: identity, clock, entropy, network, shutdown
//! - `http`     E2B's in-guest protocol: routing, authentication, files, Connect envelopes
//! - `process`  processes and their streams
//! - `fs`       metadata and operations on files
//! - `sudo`     root for those who may, where the kernel ignores set-user-id bits
//! - `stillness`  the runtime kept out of epoll while gVisor saves it
//! - `state`, `users`, `sys`  what they share

mod control;
mod fs;
mod http;
mod init;
mod process;
mod state;
mod stillness;
mod sudo;
mod sys;
mod users;

use std::net::SocketAddr;
use std::path::PathBuf;

/// How the agent runs as an ordinary program, without a machine of its own (for tests).
struct Options {
    listen: SocketAddr,
    control: Option<PathBuf>,
}

const USAGE: &str = "usage: agentenv-agent --listen ADDR:PORT [--control unix:PATH]";

fn options() -> Result<Options, String> {
    let (mut listen, mut control) = (None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words
            .next()
            .ok_or_else(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--listen" => listen = Some(value.parse().map_err(|e| format!("{value}: {e}"))?),
            "--control" => {
                let path = value
                    .strip_prefix("unix:")
                    .ok_or("--control takes unix:PATH")?;
                control = Some(PathBuf::from(path));
            }
            _ => return Err(format!("unknown option {word}")),
        }
    }
    Ok(Options {
        listen: listen.ok_or(USAGE)?,
        control,
    })
}

fn main() {
    if std::process::id() == 1 {
        init::run();
    }
    match options() {
        Ok(given) => state::serve(
            given.listen,
            control::Port::from_option(given.control),
            None,
        ),
        Err(message) => {
            eprintln!("agentenv-agent: {message}");
            std::process::exit(2);
        }
    }
}
