//! From a wish for chunks to chunks in the cache: what is here already, then peers, then the store.

mod here;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use agentenv_blocks::chunk;
use agentenv_blocks::layer::{Layer, MAX_TABLE};
use agentenv_blocks::Id;
use agentenv_objects::{Error, Fault, Objects};
use serde::Serialize;
use tokio::sync::{watch, AcquireError, Notify, Semaphore, SemaphorePermit};
use tokio::task::spawn_blocking;

use crate::cache::file::{buffer, LayerFile};
use crate::cache::Cache;
use crate::flight::{Duty, Flights, Plain, Progress, Trouble, Urgency};
use crate::group::{end_of, groups};
use crate::log;
use crate::peers::Peers;

/// Plain KiB on their way at once, of what somebody waits for and of what may be wanted.
const ROOM_KIB: usize = 64 << 10;
const AHEAD_ROOM_KIB: usize = 8 << 10;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// So many failures in a row make a trouble a lasting one, if it is of that kind.
const SURE: u32 = 3;

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

pub struct Fetcher {
    objects: Arc<dyn Objects>,
    peers: Peers,
    cache: Arc<Cache>,
    pub flights: Arc<Flights>,
    room: Semaphore,
    ahead_room: Semaphore,
    pub counters: Counters,
    /// The store is on this machine.
    near: bool,
}

pub struct Wanted {
    pub chunk: u32,
    duty: Duty,
}

impl Fetcher {
    pub fn new(objects: Arc<dyn Objects>, peers: Peers, cache: Arc<Cache>) -> Arc<Self> {
        Arc::new(Self {
            near: objects.is_here(),
            objects,
            peers,
            cache,
            flights: Arc::default(),
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
                _ => log::line(format_args!("the table of layer {id} here is damaged")),
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
            log::line(format_args!("the table of layer {id} is not kept: {error}"));
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
            let (id, place) = (file.layer().entry(chunk).id, (Arc::clone(file), chunk));
            let seat = self.flights.board(id, Some(place), urgency);
            match seat.duty {
                Some(duty) => wanted.push(Wanted { chunk, duty }),
                None => self.keep_if_ready(file, chunk, &seat.progress),
            }
            seats.push((chunk, seat.progress));
        }
        for group in groups(&file.places(), wanted) {
            tokio::spawn(Arc::clone(self).fetch(Arc::clone(file), group, urgency));
        }
        seats
    }

    /// Another layer's wish brought this chunk just now: it is kept for this layer as well.
    fn keep_if_ready(
        self: &Arc<Self>,
        file: &Arc<LayerFile>,
        chunk: u32,
        progress: &watch::Receiver<Progress>,
    ) {
        let Progress::Ready(plain) = progress.borrow().clone() else {
            return;
        };
        if !file.has(chunk) {
            let (this, file) = (Arc::clone(self), Arc::clone(file));
            tokio::spawn(async move { this.keep(&file, chunk, plain).await });
        }
    }

    async fn fetch(
        self: Arc<Self>,
        file: Arc<LayerFile>,
        mut group: Vec<Wanted>,
        mut urgency: Urgency,
    ) {
        let bell = Arc::new(Notify::new());
        group.iter().for_each(|wanted| wanted.duty.hang(&bell));
        self.try_here(&file, &mut group).await;
        let (mut pause, mut failures) = (FIRST_PAUSE, 0);
        while !group.is_empty() {
            let trouble = {
                // Not held in a pause: one layer's trouble must not keep others from fetching.
                let _room = self.room(&file, &group, urgency, &bell).await;
                self.attempt(&file, &mut group).await
            };
            let Some(mut trouble) = trouble else {
                continue;
            };
            failures += 1;
            trouble.lasting &= failures >= SURE;
            group.iter().for_each(|wanted| wanted.duty.tell(&trouble));
            group.retain(|wanted| !wanted.duty.abandon());
            urgency = Urgency::Waited; // by those who are left
            if !group.is_empty() {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    /// Waits for its turn. Who is waited for does not stand in the line of what may be wanted.
    async fn room(
        &self,
        file: &LayerFile,
        group: &[Wanted],
        urgency: Urgency,
        bell: &Notify,
    ) -> Result<SemaphorePermit<'_>, AcquireError> {
        let bytes = group.iter().map(|w| file.layer().entry(w.chunk).bytes());
        let kib = bytes.sum::<usize>() >> 10;
        let waited = self.room.acquire_many(kib.min(ROOM_KIB) as u32);
        if urgency == Urgency::Waited {
            return waited.await;
        }
        let ahead = self.ahead_room.acquire_many(kib.min(AHEAD_ROOM_KIB) as u32);
        tokio::select! {
            permit = ahead => permit,
            () = bell.notified() => waited.await,
        }
    }

    /// Tries peers, then the store; what could not be had is left in the group, to be tried again
    /// at once if there is no trouble.
    async fn attempt(&self, file: &Arc<LayerFile>, group: &mut Vec<Wanted>) -> Option<Trouble> {
        self.try_peers(file, group).await;
        let mut trouble = None;
        let places = file.places();
        for part in groups(&places, std::mem::take(group)) {
            let (left, fault) = self.try_store(file, &places, part).await;
            group.extend(left);
            trouble = fault.or(trouble);
        }
        trouble
    }

    /// What an earlier process left, and nobody verified since.
    async fn try_here(&self, file: &Arc<LayerFile>, group: &mut Vec<Wanted>) {
        if !group.iter().any(|wanted| file.may_have(wanted.chunk)) {
            return;
        }
        let mut left = Vec::new();
        for wanted in group.drain(..) {
            let chunk = wanted.chunk;
            if !file.may_have(chunk) {
                left.push(wanted);
                continue;
            }
            let held = Arc::clone(file);
            match spawn_blocking(move || held.load(chunk)).await {
                Ok(Some(plain)) => self.landed(file, chunk, &Arc::new(plain)).await,
                _ => {
                    self.counters.damaged_chunks.fetch_add(1, Ordering::Relaxed);
                    file.discard(chunk);
                    left.push(wanted);
                }
            }
        }
        let held = Arc::clone(file);
        let _ = spawn_blocking(move || settle(&held)).await;
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
        places: &Layer,
        part: Vec<Wanted>,
    ) -> (Vec<Wanted>, Option<Trouble>) {
        let Some(first) = part.first() else {
            return (part, None);
        };
        let pack = places.place(first.chunk).pack;
        let begin = places.place(first.chunk).offset;
        let end = part.iter().map(|w| end_of(places, w.chunk)).max();
        let end = end.unwrap_or(begin);
        let key = format!("pack/{pack}");
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        let bytes = match self.objects.get_range(&key, begin..end).await {
            Ok(bytes) => bytes,
            Err(error) => return (part, self.explain(file, &pack, error).await),
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
        self.landed(file, chunk, &plain).await;
        self.keep(file, chunk, plain).await;
    }

    /// Those who wait go on; where else the chunk belongs it is kept as well.
    async fn landed(&self, file: &Arc<LayerFile>, chunk: u32, plain: &Plain) {
        let places = self.flights.land(file.layer().entry(chunk).id, plain);
        for (other, number) in places {
            let same = Arc::ptr_eq(&other, file) && number == chunk;
            if !same && !other.has(number) {
                self.keep(&other, number, Arc::clone(plain)).await;
            }
        }
    }

    async fn keep(&self, file: &Arc<LayerFile>, chunk: u32, plain: Plain) {
        let (cache, file) = (Arc::clone(&self.cache), Arc::clone(file));
        let done = spawn_blocking(move || {
            cache.store(&file, chunk, &plain);
            settle(&file);
        });
        let _ = done.await;
    }

    /// A pack that is gone may have been rewritten: then the layer's table says where to, and there
    /// is no trouble.
    async fn explain(&self, file: &Arc<LayerFile>, pack: &Id, error: Error) -> Option<Trouble> {
        if matches!(error, Error::NotFound(_)) {
            if let Ok(layer) = self.layer_from_store(file.layer().id()).await {
                if !layer.packs().contains(pack) && file.moved(layer) {
                    return None;
                }
            }
        }
        Some(Trouble {
            message: error.to_string().into(),
            lasting: !error.retryable(),
        })
    }
}

/// Says on disk that a layer is whole here, if it is.
fn settle(file: &LayerFile) {
    if let Err(error) = file.settle() {
        let id = file.layer().id();
        log::line(format_args!(
            "layer {id} is whole, which cannot be said: {error}"
        ));
    }
}
