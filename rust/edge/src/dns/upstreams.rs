//! The resolvers behind a forwarder, asked in turn until one answers.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::message::{self, Query};

/// For one upstream. Guests try again after 5 s, so two that are dead leave time for a third.
const ANSWER: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Upstreams {
    addresses: Vec<SocketAddr>,
    /// The one that answered last is asked first, so that a dead one costs its time only once.
    preferred: AtomicUsize,
    queries: Arc<AtomicU64>,
}

impl Upstreams {
    pub fn new(addresses: Vec<SocketAddr>, queries: Arc<AtomicU64>) -> Self {
        Self {
            addresses,
            preferred: AtomicUsize::new(0),
            queries,
        }
    }

    /// The first useful answer, under the query's own id; else a refusal, else SERVFAIL.
    pub async fn resolve<F>(
        &self,
        query: &Query<'_>,
        ask: impl Fn(SocketAddr, Vec<u8>) -> F,
    ) -> Vec<u8>
    where
        F: Future<Output = std::io::Result<Vec<u8>>>,
    {
        self.queries.fetch_add(1, Relaxed);
        let start = self.preferred.load(Relaxed);
        let mut declined = None;
        for turn in 0..self.addresses.len() {
            let index = (start + turn) % self.addresses.len();
            let id: [u8; 2] = rand::random();
            let asked = timeout(ANSWER, ask(self.addresses[index], query.with_id(id))).await;
            let Ok(Ok(mut reply)) = asked else { continue };
            if !query.is_answered_by(id, &reply) {
                continue;
            }
            reply[..2].copy_from_slice(&query.id());
            if !message::declines(&reply) {
                self.preferred.store(index, Relaxed);
                return reply;
            }
            declined = declined.or(Some(reply));
        }
        declined.unwrap_or_else(|| query.servfail())
    }
}
