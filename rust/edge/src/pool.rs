//! Connections that wait for their next request. A pool belongs to one upstream and dies with it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;

use crate::body::Upload;

pub type Sender = SendRequest<Upload>;

const MAX_IDLE: usize = 256;
const MAX_AGE: Duration = Duration::from_secs(60);

/// Idle connections by port, bounded in number and age.
#[derive(Debug, Default)]
pub struct Pool {
    idle: Mutex<Idle>,
}

#[derive(Debug, Default)]
struct Idle {
    ports: HashMap<u16, Vec<Waiting>>,
    closed: bool,
}

#[derive(Debug)]
struct Waiting {
    sender: Sender,
    since: Instant,
}

impl Pool {
    /// The connection used last that is usable and has waited no longer than `oldest`.
    pub fn take(&self, port: u16, oldest: Duration) -> Option<Sender> {
        let mut idle = self.idle.lock();
        let waiting = idle.ports.get_mut(&port)?;
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

    pub fn put(&self, port: u16, sender: Sender) {
        let mut idle = self.idle.lock();
        if idle.closed || sender.is_closed() {
            return;
        }
        let waiting = idle.ports.entry(port).or_default();
        if waiting.len() < MAX_IDLE {
            let since = Instant::now();
            waiting.push(Waiting { sender, since });
        }
    }

    /// Drops connections that were closed meanwhile or waited too long.
    pub fn sweep(&self) {
        self.idle.lock().ports.retain(|_, waiting| {
            waiting.retain(|w| !w.sender.is_closed() && w.since.elapsed() < MAX_AGE);
            !waiting.is_empty()
        });
    }

    pub fn close(&self) {
        let mut idle = self.idle.lock();
        idle.closed = true;
        idle.ports.clear();
    }
}
