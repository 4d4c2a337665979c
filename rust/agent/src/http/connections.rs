//! Connections to the in-guest API. They end with the life they were made in: a restored guest must
//! not go on talking to whom it talked to before the snapshot.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

const LOOK_AGAIN: Duration = Duration::from_millis(1);

#[derive(Default)]
pub struct Connections {
    open: AtomicUsize,
    /// Counts the times that all were dropped.
    life: watch::Sender<u64>,
    /// None is carried now.
    shut: AtomicBool,
}

struct Open<'a>(&'a AtomicUsize);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connections {
    /// Carry a connection, which belongs to this life from now on, to its end or to `drop_all`.
    pub fn carry<'a, W>(&'a self, work: W) -> impl Future<Output = ()> + use<'a, W>
    where
        W: Future<Output = ()> + 'a,
    {
        let mut life = self.life.subscribe();
        self.open.fetch_add(1, Ordering::Relaxed);
        let open = Open(&self.open);
        async move {
            let _open = open;
            // Asked after it belongs to a life: whoever shuts us out later ends that.
            if self.shut.load(Ordering::SeqCst) {
                return;
            }
            tokio::select! {
                biased;
                _ = life.changed() => {}
                () = work => {}
            }
        }
    }

    /// Wait until all are closed, but no longer than `patience`. Blocking.
    pub fn wait_closed(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        while self.open.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Close all, and those to come at once, until `let_in`.
    pub fn shut_out(&self) {
        self.shut.store(true, Ordering::SeqCst);
        self.drop_all();
    }

    pub fn let_in(&self) {
        self.shut.store(false, Ordering::SeqCst);
    }

    /// Close all; how many there were.
    pub fn drop_all(&self) -> usize {
        let open = self.open.load(Ordering::Relaxed);
        self.life.send_modify(|life| *life += 1);
        open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_an_earlier_life_end_and_are_counted() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let connections = Connections::default();
        runtime.block_on(async {
            connections.carry(async {}).await;
            let first = connections.carry(std::future::pending());
            let second = connections.carry(std::future::pending());
            assert_eq!(connections.drop_all(), 2);
            tokio::join!(first, second);
            assert_eq!(connections.drop_all(), 0);
            let later = connections.carry(async {});
            later.await;
        });
    }

    #[test]
    fn none_is_carried_while_all_are_shut_out() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let connections = Connections::default();
        let carried = AtomicBool::new(false);
        let work = || async { carried.store(true, Ordering::SeqCst) };
        runtime.block_on(async {
            let accepted = connections.carry(work()); // but not looked at yet
            connections.shut_out();
            accepted.await;
            connections.carry(work()).await;
            assert!(!carried.load(Ordering::SeqCst));
            connections.wait_closed(Duration::from_secs(10));
            assert_eq!(connections.drop_all(), 0);
            connections.let_in();
            connections.carry(work()).await;
            assert!(carried.load(Ordering::SeqCst));
        });
    }
}
