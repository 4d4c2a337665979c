//! Which reads wait for an answer, and whose reader is being killed.
//!
//! The kernel sends INTERRUPT once for a waiting request, on any signal. Only a killed reader may be
//! answered EINTR: in a page fault of a process that merely handles a signal it would be SIGBUS. So
//! an interrupted read whose reader lives is looked at again until it is answered.

use std::collections::HashMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

const SHARDS: usize = 16;
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// An INTERRUPT may overtake its request on its way through another thread, hardly by seconds.
const LOOKS_FOR_UNKNOWN: u32 = 40;
const SIGKILL_BIT: u64 = 1 << (9 - 1);

pub type Hook = Box<dyn FnOnce() + Send>;

/// One read that is not answered yet.
pub struct Waiting {
    pid: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    cancelled: bool,
    hook: Option<Hook>,
}

impl Waiting {
    pub fn cancelled(&self) -> bool {
        self.state.lock().cancelled
    }

    /// Keep the hook for the cancellation, or run it now if that has been.
    pub fn on_cancel(&self, hook: Hook) {
        let mut state = self.state.lock();
        if !state.cancelled {
            state.hook = Some(hook);
            return;
        }
        drop(state);
        hook();
    }

    fn cancel(&self) {
        let mut state = self.state.lock();
        state.cancelled = true;
        let hook = state.hook.take();
        drop(state);
        if let Some(hook) = hook {
            // The server's code: its panic must not end the thread that serves everybody.
            let _ = catch_unwind(AssertUnwindSafe(hook));
        }
    }
}

/// An INTERRUPT that could not be acted on yet.
struct Doubt {
    unique: u64,
    unknown: u32,
}

enum Verdict {
    Unknown,
    Lives,
    Cancelled,
}

#[derive(Default)]
struct Doubts {
    list: Vec<Doubt>,
    closed: bool,
}

#[derive(Default)]
pub struct Waitings {
    shards: [Mutex<HashMap<u64, Arc<Waiting>>>; SHARDS],
    doubts: Mutex<Doubts>,
    changed: Condvar,
}

impl Waitings {
    pub fn add(&self, unique: u64, pid: u32) -> Arc<Waiting> {
        let waiting = Arc::new(Waiting {
            pid,
            state: Mutex::default(),
        });
        self.shard(unique).lock().insert(unique, waiting.clone());
        waiting
    }

    /// The read is answered; its hook goes too, since it may own what owns the reply.
    pub fn remove(&self, unique: u64) {
        let gone = self.shard(unique).lock().remove(&unique);
        if let Some(waiting) = gone {
            let hook = waiting.state.lock().hook.take();
            drop(hook);
        }
    }

    pub fn interrupt(&self, unique: u64) {
        if !matches!(self.judge(unique), Verdict::Cancelled) {
            self.doubts.lock().list.push(Doubt { unique, unknown: 0 });
            self.changed.notify_one();
        }
    }

    /// Look again at what was doubtful, until `close`. A thread of its own runs this.
    pub fn watch(&self) {
        let mut doubts = self.doubts.lock();
        while !doubts.closed {
            if doubts.list.is_empty() {
                self.changed.wait(&mut doubts);
                continue;
            }
            self.changed.wait_for(&mut doubts, LOOK_AGAIN);
            let mut list = std::mem::take(&mut doubts.list);
            drop(doubts);
            list.retain_mut(|doubt| self.still_doubtful(doubt));
            doubts = self.doubts.lock();
            doubts.list.append(&mut list);
        }
    }

    pub fn close(&self) {
        self.doubts.lock().closed = true;
        self.changed.notify_all();
    }

    fn still_doubtful(&self, doubt: &mut Doubt) -> bool {
        match self.judge(doubt.unique) {
            Verdict::Cancelled => false,
            Verdict::Lives => true,
            Verdict::Unknown => {
                doubt.unknown += 1;
                doubt.unknown < LOOKS_FOR_UNKNOWN
            }
        }
    }

    fn judge(&self, unique: u64) -> Verdict {
        let found = self.shard(unique).lock().get(&unique).cloned();
        match found {
            None => Verdict::Unknown,
            Some(waiting) if killed(waiting.pid) => {
                waiting.cancel();
                Verdict::Cancelled
            }
            Some(_) => Verdict::Lives,
        }
    }

    fn shard(&self, unique: u64) -> &Mutex<HashMap<u64, Arc<Waiting>>> {
        &self.shards[(unique >> 1) as usize % SHARDS]
    }
}

/// Whether this thread has SIGKILL pending, as every thread has whose process got a fatal signal.
/// 0 stands for a process of a foreign pid namespace: it cannot be seen, so it waits.
fn killed(pid: u32) -> bool {
    pid != 0
        && std::fs::read_to_string(format!("/proc/{pid}/status"))
            .map_or(true, |status| kill_pending(&status))
}

fn kill_pending(status: &str) -> bool {
    status
        .lines()
        .filter_map(|line| {
            let mask = line.strip_prefix("SigPnd:");
            mask.or_else(|| line.strip_prefix("ShdPnd:"))
        })
        .any(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & SIGKILL_BIT != 0))
}

#[cfg(test)]
#[path = "interrupt_test.rs"]
mod tests;
