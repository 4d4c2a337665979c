//! PID 1: brings the machine up, keeps the agent alive, reaps orphans. Single-threaded throughout.

mod modules;
mod mounts;

use std::io;
use std::time::{Duration, Instant};

use crate::{control, state, sys};

/// An agent that ends sooner than this after its start has crashed at its start.
const QUICK_DEATH: Duration = Duration::from_secs(2);
/// Quick deaths in a row after which the sandbox is given up.
const MAX_QUICK_DEATHS: u32 = 5;

/// Never returns: a fatal error is said on the console and ends the machine.
pub fn run() -> ! {
    match bring_up() {
        Ok(root) => keep_agent(root),
        Err(message) => give_up(&message),
    }
}

/// What the root of a machine that is ready consists of.
fn bring_up() -> Result<mounts::Root, String> {
    mounts::early()?;
    modules::load_all()?;
    let root = mounts::root()?;
    mounts::system();
    Ok(root)
}

/// Run the agent as a child, anew whenever it dies.
fn keep_agent(root: mounts::Root) -> ! {
    let memory = match sys::memfd("agentenv-init") {
        Ok(memory) => memory.into(),
        Err(error) => give_up(&format!("no memory for the agent's state: {error}")),
    };
    let mounts::Root { disk, image } = root;
    let kept = state::Kept {
        memory,
        disk,
        image,
    };
    let mut quick_deaths = 0;
    loop {
        let begun = Instant::now();
        match sys::fork() {
            Ok(None) => agent(&kept),
            Ok(Some(pid)) => reap_until(pid),
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

fn agent(kept: &state::Kept) -> ! {
    // The guest's memory killer must take a task's processes, not the way to reach them.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let listen = std::net::SocketAddr::from(([0, 0, 0, 0], state::PORT));
    match copy(kept) {
        Ok(kept) => state::serve(listen, Some(control::Port::Serial), Some(kept)),
        Err(error) => println!("agentenv-agent: what init keeps cannot be had: {error}"),
    }
    std::process::exit(1)
}

fn copy(kept: &state::Kept) -> io::Result<state::Kept> {
    Ok(state::Kept {
        memory: kept.memory.try_clone()?,
        disk: kept.disk.try_clone()?,
        image: kept.image.try_clone()?,
    })
}

fn reap_until(agent: libc::pid_t) {
    while let Ok(pid) = sys::wait_any() {
        if pid == agent {
            return;
        }
    }
}

fn give_up(message: &str) -> ! {
    println!("agentenv-init: fatal: {message}");
    sys::power_off()
}
