//! PID 1: brings the machine up, keeps the agent alive, reaps orphans. Single-threaded throughout.

pub mod container;
mod modules;
mod mounts;

use std::io;
use std::time::{Duration, Instant};

use crate::{control, state, sys};

pub use container::Key;

/// An agent that ends sooner than this after its start has crashed at its start.
const QUICK_DEATH: Duration = Duration::from_secs(2);
/// Quick deaths in a row after which the sandbox is given up.
const MAX_QUICK_DEATHS: u32 = 5;

/// Never returns: a fatal error is said on the console and ends the machine.
pub fn run() -> ! {
    let (port, layers) = match bring_up() {
        Ok(ready) => ready,
        Err(message) => give_up(&message),
    };
    keep_agent(&port, layers)
}

/// Where the host speaks to us, and what the root of a machine of our own consists of.
fn bring_up() -> Result<(control::Port, Option<state::Layers>), String> {
    if let Some(key) = Key::given() {
        container::bring_up()?;
        return Ok((control::Port::Tcp(key), None));
    }
    mounts::early()?;
    modules::load_all()?;
    let layers = mounts::root()?;
    mounts::system();
    Ok((control::Port::Serial, Some(layers)))
}

/// Run the agent as a child, anew whenever it dies.
fn keep_agent(port: &control::Port, layers: Option<state::Layers>) -> ! {
    let memory = match sys::memfd("agentenv-init") {
        Ok(memory) => memory.into(),
        Err(error) => give_up(&format!("no memory for the agent's state: {error}")),
    };
    let kept = state::Kept { memory, layers };
    let mut quick_deaths = 0;
    loop {
        let begun = Instant::now();
        match sys::fork() {
            Ok(None) => agent(port, &kept),
            Ok(Some(pid)) => {
                if reap_until(pid) == Some(sys::POWERED_OFF) {
                    sys::power_off();
                }
            }
            Err(error) => give_up(&format!("the agent cannot be started: {error}")),
        }
        quick_deaths = if begun.elapsed() < QUICK_DEATH {
            quick_deaths + 1
        } else {
            0
        };
        if quick_deaths >= MAX_QUICK_DEATHS {
            give_up("the agent dies at every start");
        }
        println!("agentenv-init: the agent ended; starting it anew");
    }
}

fn agent(port: &control::Port, kept: &state::Kept) -> ! {
    // The guest's memory killer must take a task's processes, not the way to reach them.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let listen = std::net::SocketAddr::from(([0, 0, 0, 0], state::PORT));
    match copy(kept) {
        Ok(kept) => state::serve(listen, Some(port.clone()), Some(kept)),
        Err(error) => println!("agentenv-agent: what init keeps cannot be had: {error}"),
    }
    std::process::exit(1)
}

fn copy(kept: &state::Kept) -> io::Result<state::Kept> {
    let layers = kept.layers.as_ref().map(state::Layers::try_clone);
    Ok(state::Kept {
        memory: kept.memory.try_clone()?,
        layers: layers.transpose()?,
    })
}

/// The agent's exit code; None: a signal ended it.
fn reap_until(agent: libc::pid_t) -> Option<libc::c_int> {
    loop {
        match sys::wait_any() {
            Ok((pid, sys::Turn::Ended(code))) if pid == agent => return code,
            // Somebody's `kill -STOP -1`, which nobody could take back without us.
            Ok((pid, sys::Turn::Stopped)) if pid == agent => {
                let _ = sys::kill(agent, libc::SIGCONT);
            }
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}

fn give_up(message: &str) -> ! {
    println!("agentenv-init: fatal: {message}");
    sys::power_off()
}
