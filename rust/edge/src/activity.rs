//! What one sandbox (or the API server, or all together) did: counters without locks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Counters of one sandbox; they go on when its route changes generation.
#[derive(Debug, Default)]
pub struct Activity {
    requests: AtomicU64,
    active: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    last: AtomicU64,
}

/// `bytes_in` is towards the guest, bodies and upgraded streams only; `last_activity` is Unix
/// seconds, 0 for never.
#[derive(Debug, Default, Clone, Serialize, PartialEq, Eq)]
pub struct Figures {
    pub requests: u64,
    pub active: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub last_activity: u64,
}

impl Activity {
    pub fn begin(&self) {
        self.requests.fetch_add(1, Relaxed);
        self.active.fetch_add(1, Relaxed);
        self.touch();
    }

    pub fn end(&self) {
        self.active.fetch_sub(1, Relaxed);
        self.touch();
    }

    pub fn sent_in(&self, bytes: usize) {
        self.bytes_in.fetch_add(bytes as u64, Relaxed);
        self.touch();
    }

    pub fn sent_out(&self, bytes: usize) {
        self.bytes_out.fetch_add(bytes as u64, Relaxed);
        self.touch();
    }

    pub fn figures(&self) -> Figures {
        Figures {
            requests: self.requests.load(Relaxed),
            active: self.active.load(Relaxed),
            bytes_in: self.bytes_in.load(Relaxed),
            bytes_out: self.bytes_out.load(Relaxed),
            last_activity: self.last.load(Relaxed),
        }
    }

    fn touch(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.last.store(now.map_or(0, |d| d.as_secs()), Relaxed);
    }
}
