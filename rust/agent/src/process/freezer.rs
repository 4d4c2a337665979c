//! Stopping all processes of users, and letting them go on: the cgroup freezer, else signals.
//!
//! A process stops before it runs its own code again, wherever it is; one that sleeps in the kernel
//! and cannot be woken counts as running until it comes back, and stops then.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::group::{members_of, PARENT, ROOT, ROUNDS};
use super::halt::Halted;
use crate::sys;

/// For those that root in the guest took out of every group.
const STRAYS: &str = "/sys/fs/cgroup/agentenv/strays";
const INIT: libc::pid_t = 1;
/// The kernel tells of changes at most every 10 ms, which is longer than most of them take.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

#[derive(Default)]
pub struct Freezer {
    suspended: watch::Sender<bool>,
    /// In a sandbox whose kernel has no freezer.
    halted: Option<Mutex<Halted>>,
}

/// What a suspension came to.
#[derive(Debug, PartialEq, Eq)]
pub struct Suspended {
    /// False: some are still on their way, or there is no way to stop them.
    pub all: bool,
    pub processes: usize,
}

impl Freezer {
    /// One that signals every process there is; some may be stopped by an earlier agent.
    pub fn by_signals() -> Self {
        Self {
            halted: Some(Mutex::new(Halted::found())),
            ..Self::default()
        }
    }

    pub fn is_suspended(&self) -> bool {
        *self.suspended.borrow()
    }

    /// Whether no process of a user runs its own code: suspended, and there is a freezer.
    pub fn holds(&self) -> bool {
        self.is_suspended() && (self.halted.is_some() || Path::new(PARENT).exists())
    }

    /// Do `start`, which starts a process, as soon as processes may run: one that was started in a
    /// frozen group would keep us waiting for its exec.
    pub async fn awake<T>(&self, start: impl FnOnce() -> T) -> T {
        let mut suspended = self.suspended.subscribe();
        loop {
            {
                // Held meanwhile: whoever suspends waits until it has happened.
                let held = self.suspended.borrow();
                if !*held {
                    return start();
                }
            }
            let _ = suspended.changed().await; // fails only when we are gone
        }
    }

    /// Stop them all, waiting `patience` for the last. Blocking.
    pub fn suspend(&self, patience: Duration) -> io::Result<Suspended> {
        self.suspended.send_replace(true);
        let deadline = Instant::now() + patience;
        if let Some(halted) = &self.halted {
            let mut halted = halted.lock().expect("no holder panics");
            halted.stop()?;
            return Ok(Suspended {
                all: halted.wait(deadline),
                processes: halted.count(),
            });
        }
        if !Path::new(PARENT).exists() {
            return Ok(Suspended {
                all: false,
                processes: 0,
            });
        }
        gather_strays();
        let groups = groups();
        for group in &groups {
            freeze(group, true)?;
        }
        let mut all = true;
        for group in &groups {
            all &= wait_frozen(group, deadline)?;
        }
        Ok(Suspended {
            all,
            processes: count(&groups),
        })
    }

    /// End them all, and let others be started: what a boot leaves of them. Blocking.
    pub fn end(&self) -> io::Result<()> {
        let Some(halted) = &self.halted else {
            return Err(io::ErrorKind::Unsupported.into()); // a machine is booted instead
        };
        halted.lock().expect("no holder panics").end()?;
        self.suspended.send_replace(false);
        Ok(())
    }

    /// Let them go on; how many there are. Also right if none was stopped.
    pub fn release(&self) -> io::Result<usize> {
        if let Some(halted) = &self.halted {
            let mut halted = halted.lock().expect("no holder panics");
            let processes = halted.count();
            halted.go_on()?;
            self.suspended.send_replace(false);
            return Ok(processes);
        }
        let groups = groups();
        let processes = count(&groups);
        for group in &groups {
            freeze(group, false)?;
        }
        self.suspended.send_replace(false);
        Ok(processes)
    }
}

/// Ours, and what container engines in the guest make beside it. The root group, which cannot be
/// frozen, has only init, us and the kernel's threads.
fn groups() -> Vec<PathBuf> {
    let ours = Path::new(PARENT).exists();
    let entries = ours.then(|| fs::read_dir(ROOT)).into_iter().flatten();
    let entries = entries.flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

fn count(groups: &[PathBuf]) -> usize {
    groups.iter().map(|group| members_of(group).len()).sum()
}

fn freeze(group: &Path, wanted: bool) -> io::Result<()> {
    let written = fs::write(group.join("cgroup.freeze"), if wanted { "1" } else { "0" });
    unless_gone(written, ())
}

/// A group that was removed meanwhile had nobody in it.
fn unless_gone<T>(result: io::Result<T>, then: T) -> io::Result<T> {
    match result {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(then),
        other => other,
    }
}

fn wait_frozen(group: &Path, deadline: Instant) -> io::Result<bool> {
    let watched = || {
        let mut events = File::open(group.join("cgroup.events"))?;
        loop {
            let mut text = String::new();
            events.rewind()?;
            events.read_to_string(&mut text)?;
            if text.lines().any(|line| line == "frozen 1") {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            sys::wait_for_change(&events, LOOK_AGAIN)?;
        }
    };
    unless_gone(watched(), true)
}

/// Move user processes of the root group into one that can be frozen.
fn gather_strays() {
    for _ in 0..ROUNDS {
        let found = strays();
        if found.is_empty() || fs::create_dir_all(STRAYS).is_err() {
            return;
        }
        for pid in found {
            // One that has ended meanwhile needs no group.
            let _ = fs::write(Path::new(STRAYS).join("cgroup.procs"), pid.to_string());
        }
    }
}

fn strays() -> Vec<libc::pid_t> {
    let us = std::process::id() as libc::pid_t;
    let text = fs::read_to_string(Path::new(ROOT).join("cgroup.procs")).unwrap_or_default();
    let pids = text.lines().filter_map(|line| line.parse().ok());
    pids.filter(|pid| *pid != INIT && *pid != us && is_user_process(*pid))
        .collect()
}

/// The kernel's own threads run no file.
fn is_user_process(pid: libc::pid_t) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::Arc;

    use super::*;

    #[test]
    fn what_starts_processes_waits_while_they_are_suspended() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let freezer = Arc::new(Freezer::default());
        let started = Arc::new(AtomicBool::new(false));
        freezer.suspended.send_replace(true);
        runtime.block_on(async {
            let (inner, seen) = (Arc::clone(&freezer), Arc::clone(&started));
            let waiting = tokio::spawn(async move {
                inner.awake(|| seen.store(true, Ordering::SeqCst)).await;
            });
            tokio::task::yield_now().await;
            assert!(!started.load(Ordering::SeqCst));
            freezer.suspended.send_replace(false);
            waiting.await.unwrap();
        });
        assert!(started.load(Ordering::SeqCst));
    }

    #[test]
    fn kernel_threads_are_not_taken_for_processes() {
        assert!(is_user_process(std::process::id() as libc::pid_t));
        assert!(!is_user_process(0));
    }
}
