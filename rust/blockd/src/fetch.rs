//! From a wish for chunks to chunks in the cache: what is here already, then peers, then the store.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use agentenv_blocks::chunk;
use agentenv_blocks::layer::{Layer, MAX_TABLE};
use agentenv_blocks::Id;
use agentenv_objects::{Error, Fault, Objects};
use serde::Serialize;
use tokio::sync::{watch, Semaphore};
use tokio::task::spawn_blocking;

use crate::cache::file::{buffer, LayerFile};
use crate::cache::Cache;
use crate::flight::{Flights, Plain, Progress, Teller, Trouble};
use crate::peers::Peers;

/// Stored bytes asked for at once: more is asked for side by side.
const MOST_AT_ONCE: u64 = 2 << 20;
/// Bytes nobody asked for that are fetched rather than asking twice.
const GAP: u64 = 64 << 10;
/// Plain KiB on their way at once, of what somebody waits for and of what may be wanted.
const ROOM_KIB: usize = 64 << 10;
const AHEAD_ROOM_KIB: usize = 16 << 10;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

#[derive(Default, Serialize)]
pub struct Counters {
    /// Stored bytes that came from the store.
    pub fetched_bytes: AtomicU64,
    pub fetched_chunks: AtomicU64,
    pub requests: AtomicU64,
    /// Plain bytes that came from peers.
    pub peer_bytes: AtomicU64,
    /// Chunks whose content was not theirs, wherever they came from.
    pub damaged_chunks: AtomicU64,
}

/// How urgent a wish is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    Waited,
    Ahead,
}

pub struct Fetcher {
    objects: Arc<dyn Objects>,
    peers: Peers,
    cache: Arc<Cache>,
    pub flights: Flights,
    room: Semaphore,
    ahead_room: Semaphore,
    pub counters: Counters,
    near: bool,
}

struct Wanted {
    chunk: u32,
    teller: Teller,
}

/// A chunk that `fetch_here` brought.
pub struct Here(Wanted);

impl Fetcher {
    pub fn new(objects: Arc<dyn Objects>, peers: Peers, cache: Arc<Cache>) -> Arc<Self> {
        Arc::new(Self {
            near: objects.is_here(),
            objects,
            peers,
            cache,
            flights: Flights::default(),
            room: Semaphore::new(ROOM_KIB),
            ahead_room: Semaphore::new(AHEAD_ROOM_KIB),
            counters: Counters::default(),
        })
    }

    /// A layer's table from the cache or the store.
    pub async fn layer(&self, id: Id) -> Result<Layer, Error> {
        if let Some(bytes) = self.cache.table(&id) {
            match Layer::decode(&bytes) {
                Ok(layer) if layer.id() == id => return Ok(layer),
                _ => crate::log::line(format_args!("the table of layer {id} here is damaged")),
            }
        }
        self.layer_from_store(id).await
    }

    async fn layer_from_store(&self, id: Id) -> Result<Layer, Error> {
        let key = format!("layer/{id}");
        let bytes = self.objects.get(&key, MAX_TABLE).await?;
        let layer = Layer::decode(&bytes).ok().filter(|layer| layer.id() == id);
        let layer = layer.ok_or_else(|| {
            let (store, cause) = (String::from("store"), "it is no table of this layer".into());
            Error::Damaged(Fault { store, key, cause })
        })?;
        if let Err(error) = self.cache.keep_table(&id, &bytes) {
            crate::log::line(format_args!("the table of layer {id} is not kept: {error}"));
        }
        Ok(layer)
    }

    /// Has chunks of a layer fetched that are not here; where to wait for each. Those whose
    /// receiver is dropped are fetched if that works at once.
    pub fn request(
        self: &Arc<Self>,
        file: &Arc<LayerFile>,
        chunks: impl IntoIterator<Item = u32>,
        urgency: Urgency,
    ) -> Vec<(u32, watch::Receiver<Progress>)> {
        let mut seats = Vec::new();
        let mut wanted = Vec::new();
        for chunk in chunks {
            let seat = self.flights.board(file.layer().entry(chunk).id);
            match seat.duty {
                Some(teller) => wanted.push(Wanted { chunk, teller }),
                None => self.keep_when_ready(file, chunk, seat.progress.clone()),
            }
            seats.push((chunk, seat.progress));
        }
        for group in groups(&file.places(), wanted) {
            tokio::spawn(Arc::clone(self).fetch(Arc::clone(file), group, urgency));
        }
        seats
    }

    /// Whether a chunk is best fetched by the thread that needs it: from a file of the store here.
    pub fn near(&self) -> bool {
        self.near && self.peers.none()
    }

    /// Fetches a chunk by this thread into `plain`, which has its length; who waits for it is told by
    /// `landed_here`. None if it is on its way or held up: then it is to be requested.
    pub fn fetch_here(
        self: &Arc<Self>,
        file: &Arc<LayerFile>,
        chunk: u32,
        plain: &mut [u8],
    ) -> Option<Here> {
        let teller = self.flights.board(file.layer().entry(chunk).id).duty?;
        let wanted = Wanted { chunk, teller };
        if self.read_here(&file.places(), chunk, plain) {
            return Some(Here(wanted));
        }
        let group = vec![wanted];
        tokio::spawn(Arc::clone(self).fetch(Arc::clone(file), group, Urgency::Waited));
        None
    }

    fn read_here(&self, places: &Layer, chunk: u32, plain: &mut [u8]) -> bool {
        thread_local! {
            static STORED: RefCell<Vec<u8>> = RefCell::default();
        }
        let (entry, place) = (places.entry(chunk), places.place(chunk));
        STORED.with_borrow_mut(|stored| {
            stored.resize(entry.stored as usize, 0);
            let key = format!("pack/{}", place.pack);
            let came = self.objects.read_here(&key, place.offset, stored)
                && chunk::decode(entry, stored, plain).is_ok();
            if came {
                let counters = &self.counters;
                counters.requests.fetch_add(1, Ordering::Relaxed);
                counters
                    .fetched_bytes
                    .fetch_add(stored.len() as u64, Ordering::Relaxed);
                counters.fetched_chunks.fetch_add(1, Ordering::Relaxed);
            }
            came
        })
    }

    /// Shares and keeps what `fetch_here` brought.
    pub fn landed_here(self: &Arc<Self>, file: &Arc<LayerFile>, here: &Here, plain: &[u8]) {
        let mut kept = buffer(plain.len());
        kept.copy_from_slice(plain);
        let (this, file, chunk) = (Arc::clone(self), Arc::clone(file), here.0.chunk);
        let plain = Arc::new(kept);
        self.flights.land(file.layer().entry(chunk).id, &plain);
        tokio::spawn(async move { this.keep(&file, chunk, plain).await });
    }

    /// Another layer's wish brings this chunk: it is kept for this layer as well.
    fn keep_when_ready(
        self: &Arc<Self>,
        file: &Arc<LayerFile>,
        chunk: u32,
        mut progress: watch::Receiver<Progress>,
    ) {
        let (this, file) = (Arc::clone(self), Arc::clone(file));
        tokio::spawn(async move {
            let ready = |progress: &Progress| matches!(progress, Progress::Ready(_));
            let found = progress
                .wait_for(ready)
                .await
                .map(|progress| progress.clone());
            let Ok(Progress::Ready(plain)) = found else {
                return;
            };
            if !file.has(chunk) {
                this.keep(&file, chunk, plain).await;
            }
        });
    }

    async fn fetch(
        self: Arc<Self>,
        file: Arc<LayerFile>,
        mut group: Vec<Wanted>,
        urgency: Urgency,
    ) {
        let kib: usize = group
            .iter()
            .map(|w| file.layer().entry(w.chunk).bytes() >> 10)
            .sum();
        let (room, most) = match urgency {
            Urgency::Waited => (&self.room, ROOM_KIB),
            Urgency::Ahead => (&self.ahead_room, AHEAD_ROOM_KIB),
        };
        let _permit = room.acquire_many(kib.min(most) as u32).await;
        let mut pause = FIRST_PAUSE;
        loop {
            let trouble = self.attempt(&file, &mut group).await;
            let Some(trouble) = trouble.filter(|_| !group.is_empty()) else {
                return;
            };
            for wanted in &group {
                wanted
                    .teller
                    .send_replace(Progress::Waiting(Some(trouble.clone())));
            }
            group.retain(|w| !self.flights.abandon(file.layer().entry(w.chunk).id));
            if group.is_empty() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Tries each source once; what could not be had is left in the group.
    async fn attempt(&self, file: &Arc<LayerFile>, group: &mut Vec<Wanted>) -> Option<Trouble> {
        self.try_here(file, group).await;
        if group.is_empty() {
            return None;
        }
        self.try_peers(file, group).await;
        let mut trouble = None;
        for part in groups(&file.places(), std::mem::take(group)) {
            match self.try_store(file, part).await {
                (left, Some(fault)) => {
                    group.extend(left);
                    trouble = Some(fault);
                }
                (left, None) => group.extend(left),
            }
        }
        trouble
    }

    /// What an earlier process left, and nobody verified since.
    async fn try_here(&self, file: &Arc<LayerFile>, group: &mut Vec<Wanted>) {
        let mut left = Vec::new();
        for wanted in group.drain(..) {
            let chunk = wanted.chunk;
            if !file.may_have(chunk) {
                left.push(wanted);
                continue;
            }
            let held = Arc::clone(file);
            match spawn_blocking(move || held.load(chunk)).await {
                Ok(Some(plain)) => self
                    .flights
                    .land(file.layer().entry(chunk).id, &Arc::new(plain)),
                _ => {
                    self.counters.damaged_chunks.fetch_add(1, Ordering::Relaxed);
                    file.discard(chunk);
                    left.push(wanted);
                }
            }
        }
        *group = left;
    }

    async fn try_peers(&self, file: &Arc<LayerFile>, group: &mut Vec<Wanted>) {
        let chunks: Vec<u32> = group.iter().map(|wanted| wanted.chunk).collect();
        for (chunk, plain) in self.peers.fetch(file.layer(), &chunks).await {
            let entry = file.layer().entry(chunk);
            if chunk::verify(&entry.id, &plain).is_err() {
                self.counters.damaged_chunks.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            self.counters
                .peer_bytes
                .fetch_add(plain.len() as u64, Ordering::Relaxed);
            self.arrived(file, chunk, Arc::new(plain)).await;
            group.retain(|wanted| wanted.chunk != chunk);
        }
    }

    /// Fetches chunks that lie close together in one pack; what is left of them, and why.
    async fn try_store(
        &self,
        file: &Arc<LayerFile>,
        part: Vec<Wanted>,
    ) -> (Vec<Wanted>, Option<Trouble>) {
        let places = file.places();
        let (Some(first), Some(last)) = (part.first(), part.last()) else {
            return (part, None);
        };
        let pack = places.place(first.chunk).pack;
        let begin = places.place(first.chunk).offset;
        let end = places.place(last.chunk).offset + u64::from(places.entry(last.chunk).stored);
        let key = format!("pack/{pack}");
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        let bytes = match self.objects.get_range(&key, begin..end).await {
            Ok(bytes) => bytes,
            Err(error) => return (part, Some(self.explain(file, error).await)),
        };
        self.counters
            .fetched_bytes
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let (mut left, mut trouble) = (Vec::new(), None);
        for wanted in part {
            let entry = *places.entry(wanted.chunk);
            let at = (places.place(wanted.chunk).offset - begin) as usize;
            let stored = bytes.slice(at..at + entry.stored as usize);
            let mut plain = buffer(entry.bytes());
            if let Err(fault) = chunk::decode(&entry, &stored, &mut plain) {
                self.counters.damaged_chunks.fetch_add(1, Ordering::Relaxed);
                let message = format!("{key} at {}: {fault}", begin + at as u64).into();
                trouble = Some(Trouble {
                    message,
                    lasting: true,
                });
                left.push(wanted);
                continue;
            }
            self.counters.fetched_chunks.fetch_add(1, Ordering::Relaxed);
            self.arrived(file, wanted.chunk, Arc::new(plain)).await;
        }
        (left, trouble)
    }

    async fn arrived(&self, file: &Arc<LayerFile>, chunk: u32, plain: Plain) {
        self.flights.land(file.layer().entry(chunk).id, &plain);
        self.keep(file, chunk, plain).await;
    }

    async fn keep(&self, file: &Arc<LayerFile>, chunk: u32, plain: Plain) {
        let (cache, file) = (Arc::clone(&self.cache), Arc::clone(file));
        let done = spawn_blocking(move || {
            cache.store(&file, chunk, &plain);
            if file.complete() {
                let _ = file.settle();
            }
        });
        let _ = done.await;
    }

    /// A pack that is gone may have been rewritten: then the layer's table says where to.
    async fn explain(&self, file: &Arc<LayerFile>, error: Error) -> Trouble {
        let lasting = !error.retryable();
        if matches!(error, Error::NotFound(_)) {
            if let Ok(layer) = self.layer_from_store(file.layer().id()).await {
                let before = file.places();
                if before.packs() != layer.packs() && file.moved(layer) {
                    let message = "its chunks have been moved".into();
                    return Trouble {
                        message,
                        lasting: false,
                    };
                }
            }
        }
        Trouble {
            message: error.to_string().into(),
            lasting,
        }
    }
}

/// Parts that one request each can fetch: of one pack, near each other, in order.
fn groups(places: &Layer, wanted: Vec<Wanted>) -> Vec<Vec<Wanted>> {
    let mut by_pack: HashMap<Id, Vec<Wanted>> = HashMap::new();
    for one in wanted {
        by_pack
            .entry(places.place(one.chunk).pack)
            .or_default()
            .push(one);
    }
    let mut groups: Vec<Vec<Wanted>> = Vec::new();
    for mut of_pack in by_pack.into_values() {
        of_pack.sort_by_key(|one| places.place(one.chunk).offset);
        let (mut begin, mut behind) = (0, None);
        for one in of_pack {
            let at = places.place(one.chunk).offset;
            let end = at + u64::from(places.entry(one.chunk).stored);
            let near =
                behind.is_some_and(|behind| at <= behind + GAP && end - begin <= MOST_AT_ONCE);
            match groups.last_mut().filter(|_| near) {
                Some(group) => group.push(one),
                None => {
                    begin = at;
                    groups.push(vec![one]);
                }
            }
            behind = Some(behind.unwrap_or(0).max(end));
        }
    }
    groups
}
