//! Connections that wait for their next request. A pool belongs to one upstream and dies with it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::sender::{Protocol, Sender};

/// A port of the upstream, and what is spoken there.
pub type Place = (u16, Protocol);

const MAX_IDLE: usize = 256;
const MAX_AGE: Duration = Duration::from_secs(60);

/// Idle connections by place, bounded in number and age.
#[derive(Debug, Default)]
pub struct Pool {
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    places: HashMap<Place, Vec<Waiting>>,
    closed: bool,
}

#[derive(Debug)]
struct Waiting {
    sender: Sender,
    since: Instant,
}

impl Pool {
    /// The connection used last that is usable and has waited no longer than `oldest`.
    pub fn take(&self, place: Place, oldest: Duration) -> Option<Sender> {
        let mut idle = self.idle.lock();
        let waiting = idle.places.get_mut(&place)?;
        while let Some(next) = waiting.pop() {
            if next.since.elapsed() > oldest {
                waiting.push(next); // younger ones there are none: they lie on top
                return None;
            }
            if next.sender.is_ready() {
                return Some(next.sender);
            }
        }
        None
    }

    pub fn put(&self, place: Place, sender: Sender) {
        let mut idle = self.idle.lock();
        if idle.closed || sender.is_closed() {
            return;
        }
        let waiting = idle.places.entry(place).or_default();
        if waiting.len() < MAX_IDLE {
            let since = Instant::now();
            waiting.push(Waiting { sender, since });
        }
    }

    /// Drops connections that were closed meanwhile or waited too long.
    pub fn sweep(&self) {
        self.idle.lock().places.retain(|_, waiting| {
            waiting.retain(|w| !w.sender.is_closed() && w.since.elapsed() < MAX_AGE);
            !waiting.is_empty()
        });
    }

    pub fn close(&self) {
        let mut idle = self.idle.lock();
        idle.closed = true;
        idle.places.clear();
    }
}
