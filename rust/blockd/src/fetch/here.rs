//! A chunk from a store on this machine, by the thread that needs it (`near`).

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use agentenv_blocks::chunk;
use agentenv_blocks::layer::Layer;

use super::{Fetcher, Wanted};
use crate::cache::file::{buffer, LayerFile};
use crate::flight::Urgency;

/// A chunk that `fetch_here` brought.
pub struct Here {
    wanted: Wanted,
    kib: usize,
}

impl Fetcher {
    /// Whether a chunk is best fetched by the thread that needs it: from a file of the store here.
    pub fn near(&self) -> bool {
        self.near && self.peers.none()
    }

    /// Fetches a chunk by this thread into `plain`, which has its length; what then has to be done
    /// by `landed_here`. None if it is on its way, held up or has no room: then it is to be requested.
    pub fn fetch_here(
        self: &Arc<Self>,
        file: &Arc<LayerFile>,
        chunk: u32,
        plain: &mut [u8],
    ) -> Option<Here> {
        let kib = plain.len() >> 10;
        let room = self.room.try_acquire_many(kib as u32).ok()?;
        let (id, place) = (file.layer().entry(chunk).id, (Arc::clone(file), chunk));
        let duty = self.flights.board(id, Some(place), Urgency::Waited).duty?;
        let wanted = Wanted { chunk, duty };
        if self.read_here(&file.places(), chunk, plain) {
            room.forget(); // until it is kept
            return Some(Here { wanted, kib });
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
    pub fn landed_here(self: &Arc<Self>, file: &Arc<LayerFile>, here: Here, plain: &[u8]) {
        let mut kept = buffer(plain.len());
        kept.copy_from_slice(plain);
        let (this, kept, chunk) = (Arc::clone(self), Arc::new(kept), here.wanted.chunk);
        let mut places = self.flights.land(file.layer().entry(chunk).id, &kept);
        places.push((Arc::clone(file), chunk));
        tokio::spawn(async move {
            for (file, chunk) in places {
                if !file.has(chunk) {
                    this.keep(&file, chunk, Arc::clone(&kept)).await;
                }
            }
            this.room.add_permits(here.kib);
        });
    }
}
