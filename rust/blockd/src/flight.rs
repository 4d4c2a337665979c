//! Chunks on their way: each is fetched once, however many wait for it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{watch, Notify};

use agentenv_blocks::Id;

use crate::cache::file::{Buffer, LayerFile};

/// How urgent a wish is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    Waited,
    Ahead,
}

/// A chunk's bytes, verified.
pub type Plain = Arc<Buffer>;

/// Why a chunk is not here yet.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub message: Arc<str>,
    /// Trying again will hardly help.
    pub lasting: bool,
}

#[derive(Clone, Debug)]
pub enum Progress {
    Waiting(Option<Trouble>),
    Ready(Plain),
}

/// Another layer, or another place in the same one, that holds a chunk as well.
pub type Place = (Arc<LayerFile>, u32);

/// A chunk on its way.
pub struct Flight {
    progress: watch::Sender<Progress>,
    aboard: Mutex<Aboard>,
}

#[derive(Default)]
struct Aboard {
    places: Vec<Place>,
    /// Somebody waits for a chunk that was asked for ahead.
    hurried: bool,
    bell: Option<Arc<Notify>>,
}

/// Held by who fetches a chunk. Dropped before it landed, whoever waits is told that it will not.
pub struct Duty {
    flights: Arc<Flights>,
    id: Id,
    flight: Arc<Flight>,
}

impl Duty {
    pub fn tell(&self, trouble: &Trouble) {
        let told = Progress::Waiting(Some(trouble.clone()));
        self.flight.progress.send_replace(told);
    }

    /// Has `bell` rung when somebody waits for this chunk, now if somebody does already.
    pub fn hang(&self, bell: &Arc<Notify>) {
        let mut aboard = self.flight.aboard.lock();
        if aboard.hurried {
            bell.notify_one();
        }
        aboard.bell = Some(Arc::clone(bell));
    }

    /// Gives the chunk up if nobody waits for it; whether it was, or has landed.
    pub fn abandon(&self) -> bool {
        let mut state = self.flights.0.lock();
        let alone = self.flight.progress.receiver_count() == 0;
        if alone && state.flies(&self.id, &self.flight) {
            state.under_way.remove(&self.id);
        }
        alone || !state.flies(&self.id, &self.flight)
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        let mut state = self.flights.0.lock();
        if state.flies(&self.id, &self.flight) {
            state.under_way.remove(&self.id);
        }
    }
}

/// What who asks for a chunk gets.
pub struct Seat {
    pub progress: watch::Receiver<Progress>,
    /// Given to the one who has to fetch it.
    pub duty: Option<Duty>,
}

/// Bytes of chunks that are remembered for a while, because they may not be in the cache yet or
/// found no room there.
const REMEMBERED: usize = 32 << 20;

#[derive(Default)]
pub struct Flights(Mutex<State>);

#[derive(Default)]
struct State {
    under_way: HashMap<Id, Arc<Flight>>,
    recent: HashMap<Id, Plain>,
    order: VecDeque<Id>,
    bytes: usize,
}

impl State {
    fn flies(&self, id: &Id, flight: &Arc<Flight>) -> bool {
        let found = self.under_way.get(id);
        found.is_some_and(|found| Arc::ptr_eq(found, flight))
    }
}

impl Flights {
    /// Waits for a chunk with all others that do. Of one that is on its way already, `place` is
    /// returned when it lands; one that has landed is Ready, and its place the caller's business.
    pub fn board(self: &Arc<Self>, id: Id, place: Option<Place>, urgency: Urgency) -> Seat {
        let mut state = self.0.lock();
        if let Some(plain) = state.recent.get(&id) {
            let (_, progress) = watch::channel(Progress::Ready(Arc::clone(plain)));
            return Seat {
                progress,
                duty: None,
            };
        }
        if let Some(flight) = state.under_way.get(&id) {
            let mut aboard = flight.aboard.lock();
            aboard.places.extend(place);
            if urgency == Urgency::Waited {
                aboard.hurried = true;
                aboard.bell.iter().for_each(|bell| bell.notify_one());
            }
            return Seat {
                progress: flight.progress.subscribe(),
                duty: None,
            };
        }
        let (sender, progress) = watch::channel(Progress::Waiting(None));
        let flight = Arc::new(Flight {
            progress: sender,
            aboard: Mutex::default(),
        });
        state.under_way.insert(id, Arc::clone(&flight));
        let duty = Some(Duty {
            flights: Arc::clone(self),
            id,
            flight,
        });
        Seat { progress, duty }
    }

    /// The chunk is here; where else it belongs.
    pub fn land(&self, id: Id, plain: &Plain) -> Vec<Place> {
        let mut state = self.0.lock();
        let flight = state.under_way.remove(&id);
        if state.recent.insert(id, Arc::clone(plain)).is_none() {
            state.order.push_back(id);
            state.bytes += plain.len();
        }
        while state.bytes > REMEMBERED {
            let Some(oldest) = state.order.pop_front() else {
                break;
            };
            if let Some(gone) = state.recent.remove(&oldest) {
                state.bytes -= gone.len();
            }
        }
        drop(state);
        let Some(flight) = flight else {
            return Vec::new();
        };
        flight
            .progress
            .send_replace(Progress::Ready(Arc::clone(plain)));
        let places = std::mem::take(&mut flight.aboard.lock().places);
        places
    }

    pub fn count(&self) -> usize {
        self.0.lock().under_way.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::file::buffer;

    fn id(number: u8) -> Id {
        Id([number; 32])
    }

    fn board(flights: &Arc<Flights>, number: u8) -> Seat {
        flights.board(id(number), None, Urgency::Waited)
    }

    #[test]
    fn one_fetches_and_all_get_it() {
        let flights = Arc::new(Flights::default());
        let first = board(&flights, 1);
        let second = board(&flights, 1);
        assert!(first.duty.is_some() && second.duty.is_none());
        flights.land(id(1), &Arc::new(buffer(4096)));
        for seat in [first, second, board(&flights, 1)] {
            assert!(matches!(*seat.progress.borrow(), Progress::Ready(_)));
        }
    }

    #[test]
    fn it_is_given_up_only_when_nobody_waits() {
        let flights = Arc::new(Flights::default());
        let Seat { progress, duty } = board(&flights, 1);
        let duty = duty.expect("the first");
        assert!(!duty.abandon());
        drop(progress);
        assert!(duty.abandon());
        let next = board(&flights, 1);
        assert!(next.duty.is_some());
        drop(duty); // of the first: the second flies on
        assert!(board(&flights, 1).duty.is_none());
    }

    #[tokio::test]
    async fn who_waits_is_told_when_the_fetch_ends_without_it() {
        let flights = Arc::new(Flights::default());
        let Seat { mut progress, duty } = board(&flights, 1);
        drop(duty); // as a panic does
        assert!(progress.changed().await.is_err());
        assert_eq!(flights.count(), 0);
    }

    #[tokio::test]
    async fn who_waits_hurries_what_was_asked_ahead() {
        for hurried_first in [false, true] {
            let flights = Arc::new(Flights::default());
            let seat = flights.board(id(1), None, Urgency::Ahead);
            let (duty, bell) = (seat.duty.expect("the first"), Arc::new(Notify::new()));
            if hurried_first {
                board(&flights, 1);
            }
            duty.hang(&bell);
            flights.board(id(1), None, Urgency::Ahead);
            if !hurried_first {
                board(&flights, 1);
            }
            bell.notified().await;
        }
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let flights = Arc::new(Flights::default());
        for number in 0..40 {
            let seat = board(&flights, number);
            flights.land(id(number), &Arc::new(buffer(1 << 20)));
            drop(seat);
        }
        assert!(board(&flights, 0).duty.is_some());
        assert!(board(&flights, 39).duty.is_none());
    }
}
