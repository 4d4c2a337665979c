//! Stopping all processes by signals, where the sandbox's kernel has no freezer.
//!
//! A process cannot be told from its parent that it was stopped: parents are stopped before their
//! children, and go on after them. One that handles SIGCONT sees it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::time::{Duration, Instant};

use super::group::{Kin, ROUNDS};
use crate::sys;

const INIT: libc::pid_t = 1;
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// A process that is killed frees its memory first.
const ENDING: Duration = Duration::from_secs(10);

/// Those that we stopped, parents first.
#[derive(Debug, Default)]
pub struct Halted(Vec<libc::pid_t>);

impl Halted {
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Stop every process but init and us; whoever was stopped before is not ours to let go on.
    pub fn stop(&mut self) -> io::Result<()> {
        let known: HashSet<_> = Kin::all()
            .filter(Kin::is_stopped)
            .map(|kin| kin.pid)
            .collect();
        let mut told: HashSet<_> = self.0.iter().copied().collect();
        for _ in 0..ROUNDS {
            let found = parents_first(Kin::all().filter(is_others).collect());
            let fresh: Vec<_> = found
                .into_iter()
                .filter(|pid| !known.contains(pid) && told.insert(*pid))
                .collect();
            if fresh.is_empty() {
                return Ok(());
            }
            for pid in fresh {
                if signal(pid, libc::SIGSTOP)? {
                    self.0.push(pid);
                }
            }
        }
        Ok(())
    }

    /// Whether all of them are stopped at the deadline.
    pub fn wait(&self, deadline: Instant) -> bool {
        let ours: HashSet<_> = self.0.iter().copied().collect();
        let on_their_way = || Kin::all().any(|kin| ours.contains(&kin.pid) && !kin.is_stopped());
        while on_their_way() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        true
    }

    /// Let them go on.
    pub fn go_on(&mut self) -> io::Result<()> {
        for pid in self.0.drain(..).rev() {
            signal(pid, libc::SIGCONT)?;
        }
        Ok(())
    }

    /// End every process but init and us. Blocking.
    pub fn end(&mut self) -> io::Result<()> {
        self.0.clear();
        let deadline = Instant::now() + ENDING;
        loop {
            let left: Vec<_> = Kin::all().filter(is_others).collect();
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            for kin in left {
                signal(kin.pid, libc::SIGKILL)?;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Those that an earlier agent stopped, as far as that can be told.
    pub fn found() -> Self {
        Self(parents_first(
            Kin::all()
                .filter(is_others)
                .filter(Kin::is_stopped)
                .collect(),
        ))
    }
}

fn is_others(kin: &Kin) -> bool {
    kin.pid != INIT && kin.pid != std::process::id() as libc::pid_t && !kin.is_dead()
}

/// False: it has ended meanwhile.
fn signal(pid: libc::pid_t, number: libc::c_int) -> io::Result<bool> {
    match sys::kill(pid, number) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        result => result.map(|()| true),
    }
}

/// Pids ordered so that each comes after its parent, if that is among them.
fn parents_first(all: Vec<Kin>) -> Vec<libc::pid_t> {
    let parents: HashMap<_, _> = all.iter().map(|kin| (kin.pid, kin.parent)).collect();
    let depth = |pid: libc::pid_t| {
        let line = std::iter::successors(Some(pid), |pid| parents.get(pid).copied());
        line.take(parents.len() + 1).count()
    };
    let mut pids: Vec<_> = all.iter().map(|kin| kin.pid).collect();
    pids.sort_by_cached_key(|pid| depth(*pid));
    pids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kin(pid: libc::pid_t, parent: libc::pid_t) -> Kin {
        Kin::parse(&format!("{pid} (x) S {parent} 1 1")).unwrap()
    }

    #[test]
    fn parents_come_first_whatever_the_numbers() {
        let all = vec![kin(5, 9), kin(9, 1), kin(3, 5), kin(7, 1)];
        assert_eq!(parents_first(all), [9, 7, 5, 3]);
    }

    #[test]
    fn a_child_is_stopped_and_goes_on() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = child.id() as libc::pid_t;
        let mut halted = Halted(vec![pid]);
        assert!(signal(pid, libc::SIGSTOP).unwrap());
        assert!(halted.wait(Instant::now() + Duration::from_secs(10)));
        halted.go_on().unwrap();
        assert_eq!(halted.count(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!signal(pid, libc::SIGCONT).unwrap());
    }
}
