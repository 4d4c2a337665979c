//! Name resolution for guests: one forwarder for each slot.
//!
//! It listens inside the slot's router namespace and asks upstreams from the host's, because
//! the resolvers of a cloud are often link-local addresses that a guest may not reach.

mod message;
mod tcp;
mod udp;
mod upstreams;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use serde::Deserialize;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::netns::NetNs;
use upstreams::Upstreams;

/// A forwarder as the control client states it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SlotSpec {
    pub slot: String,
    pub netns: PathBuf,
    pub listen: SocketAddr,
    pub upstreams: Vec<SocketAddr>,
}

/// All forwarders, by slot.
#[derive(Debug, Default)]
pub struct Resolvers {
    slots: Mutex<HashMap<String, Forwarder>>,
    queries: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Forwarder {
    spec: SlotSpec,
    loops: JoinSet<()>,
}

impl Resolvers {
    /// Queries taken from guests since the start.
    pub fn queries(&self) -> u64 {
        self.queries.load(Relaxed)
    }

    /// Starts a slot's forwarder, or restarts it if anything about it has changed.
    pub async fn up(&self, spec: SlotSpec) -> io::Result<()> {
        let mut slots = self.slots.lock().await;
        if slots
            .get(&spec.slot)
            .is_some_and(|known| known.spec == spec)
        {
            return Ok(());
        }
        if let Some(old) = slots.remove(&spec.slot) {
            old.stop().await; // its sockets hold the address
        }
        let forwarder = Forwarder::start(spec.clone(), &self.queries)?;
        slots.insert(spec.slot, forwarder);
        Ok(())
    }

    /// True if there was such a forwarder; its sockets are closed on return.
    pub async fn down(&self, slot: &str) -> bool {
        let mut slots = self.slots.lock().await;
        let Some(old) = slots.remove(slot) else {
            return false;
        };
        old.stop().await;
        true
    }

    /// Makes `specs` the whole truth. Answers those that could not be started, with the reason.
    pub async fn sync(&self, specs: Vec<SlotSpec>) -> Vec<(String, io::Error)> {
        let wanted: HashSet<&String> = specs.iter().map(|spec| &spec.slot).collect();
        let known: Vec<String> = self.slots.lock().await.keys().cloned().collect();
        for slot in known.iter().filter(|slot| !wanted.contains(slot)) {
            self.down(slot).await;
        }
        let mut failed = Vec::new();
        for spec in specs {
            let slot = spec.slot.clone();
            if let Err(error) = self.up(spec).await {
                failed.push((slot, error));
            }
        }
        failed
    }
}

impl Forwarder {
    fn start(spec: SlotSpec, queries: &Arc<AtomicU64>) -> io::Result<Self> {
        if spec.upstreams.is_empty() {
            let why = "a forwarder needs at least one upstream";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let netns = NetNs::open(&spec.netns)
            .map_err(|error| told(&error, &spec.netns.display().to_string()))?;
        let whom = |error: io::Error| told(&error, &spec.listen.to_string());
        let datagrams = udp::bind(&netns, spec.listen).map_err(whom)?;
        let streams = tcp::bind(&netns, spec.listen).map_err(whom)?;
        let upstreams = Arc::new(Upstreams::new(spec.upstreams.clone(), Arc::clone(queries)));
        let mut loops = JoinSet::new();
        loops.spawn(udp::serve(datagrams, Arc::clone(&upstreams)));
        loops.spawn(tcp::serve(streams, upstreams));
        Ok(Self { spec, loops })
    }

    /// Ends the loops and all they started, and waits until their sockets are closed.
    async fn stop(mut self) {
        self.loops.shutdown().await;
    }
}

fn told(error: &io::Error, whom: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{whom}: {error}"))
}
