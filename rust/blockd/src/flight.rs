//! Chunks on their way: each is fetched once, however many wait for it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use agentenv_blocks::Id;

use crate::cache::file::Buffer;

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

/// Tells those who wait for a chunk.
pub type Teller = Arc<watch::Sender<Progress>>;

/// A place in the queue for a chunk.
pub struct Seat {
    pub progress: watch::Receiver<Progress>,
    /// Given to the one who has to fetch it.
    pub duty: Option<Teller>,
}

/// Bytes of chunks that are remembered for a while, because they may not be in the cache yet or
/// found no room there.
const REMEMBERED: usize = 32 << 20;

#[derive(Default)]
pub struct Flights(Mutex<State>);

#[derive(Default)]
struct State {
    under_way: HashMap<Id, Teller>,
    recent: HashMap<Id, Plain>,
    order: VecDeque<Id>,
    bytes: usize,
}

impl Flights {
    /// Waits for a chunk with all others that do.
    pub fn board(&self, id: Id) -> Seat {
        let mut state = self.0.lock();
        if let Some(plain) = state.recent.get(&id) {
            let (_, progress) = watch::channel(Progress::Ready(Arc::clone(plain)));
            return Seat {
                progress,
                duty: None,
            };
        }
        if let Some(teller) = state.under_way.get(&id) {
            return Seat {
                progress: teller.subscribe(),
                duty: None,
            };
        }
        let (teller, progress) = watch::channel(Progress::Waiting(None));
        let teller = Arc::new(teller);
        state.under_way.insert(id, Arc::clone(&teller));
        Seat {
            progress,
            duty: Some(teller),
        }
    }

    /// The chunk is here.
    pub fn land(&self, id: Id, plain: &Plain) {
        let mut state = self.0.lock();
        let teller = state.under_way.remove(&id);
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
        if let Some(teller) = teller {
            teller.send_replace(Progress::Ready(Arc::clone(plain)));
        }
    }

    /// Gives a chunk up if nobody waits for it; whether it was.
    pub fn abandon(&self, id: Id) -> bool {
        let mut state = self.0.lock();
        let alone = state
            .under_way
            .get(&id)
            .is_none_or(|teller| teller.receiver_count() == 0);
        if alone {
            state.under_way.remove(&id);
        }
        alone
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

    #[test]
    fn one_fetches_and_all_get_it() {
        let flights = Flights::default();
        let first = flights.board(id(1));
        let second = flights.board(id(1));
        assert!(first.duty.is_some() && second.duty.is_none());
        flights.land(id(1), &Arc::new(buffer(4096)));
        for seat in [first, second, flights.board(id(1))] {
            assert!(matches!(*seat.progress.borrow(), Progress::Ready(_)));
        }
    }

    #[test]
    fn it_is_given_up_only_when_nobody_waits() {
        let flights = Flights::default();
        let Seat { progress, duty } = flights.board(id(1));
        assert!(!flights.abandon(id(1)));
        drop(progress);
        assert!(flights.abandon(id(1)));
        drop(duty);
        assert!(flights.board(id(1)).duty.is_some());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let flights = Flights::default();
        for number in 0..40 {
            flights.board(id(number));
            flights.land(id(number), &Arc::new(buffer(1 << 20)));
        }
        assert!(flights.board(id(0)).duty.is_some());
        assert!(flights.board(id(39)).duty.is_none());
    }
}
