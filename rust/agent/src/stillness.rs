//! The runtime kept still across a snapshot, by a kernel that restores too many of its events.
//!
//! gVisor marks every epoll registration that it restores as ready, some that were deleted as well
//! (decision 071). tokio's events carry the address of what is freed when they are deleted. So its
//! thread waits elsewhere meanwhile, and what the kernel tells first of all is read away.

use std::io;
use std::sync::mpsc::{channel, Sender};
use std::sync::Mutex;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::sys;

/// A runtime that lives comes to a task in microseconds, whatever else the sandbox has to do.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether ``runtime`` comes to a task now, which then does ``work``. Blocking; from elsewhere.
pub fn comes(runtime: &Handle, work: impl FnOnce() + Send + 'static) -> bool {
    let (here, is_here) = channel();
    runtime.spawn(async move {
        let _ = here.send(());
        work();
    });
    is_here.recv_timeout(PATIENCE).is_ok()
}

#[derive(Default)]
pub struct Stillness(Mutex<Option<Sender<()>>>);

impl Stillness {
    /// The thread of ``runtime``, which has no other, waits for `go_on`. Blocking; from elsewhere.
    pub fn keep(&self, runtime: &Handle) -> io::Result<()> {
        let mut kept = self.0.lock().expect("no holder panics");
        if kept.is_some() {
            return Ok(());
        }
        let (go, going) = channel();
        // The wait ends when the other end is dropped.
        let wait = move || {
            let _ = going.recv();
        };
        if !comes(runtime, wait) {
            let why = "the runtime does not come";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        *kept = Some(go);
        Ok(())
    }

    /// In a copy, before anything that it is to hear of happens.
    pub fn forget_events(&self) -> io::Result<()> {
        match *self.0.lock().expect("no holder panics") {
            Some(_) => sys::epoll::discard().map(drop),
            None => Ok(()),
        }
    }

    pub fn go_on(&self) {
        self.0.lock().expect("no holder panics").take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_runs_until_it_goes_on() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let handle = runtime.handle().clone();
        let (done, is_done) = channel::<()>();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || runtime.block_on(ended));
        let stillness = Stillness::default();
        stillness.keep(&handle).unwrap();
        stillness.keep(&handle).unwrap();
        handle.spawn(async move { done.send(()) });
        assert!(is_done.recv_timeout(Duration::from_millis(50)).is_err());
        stillness.forget_events().unwrap();
        stillness.go_on();
        is_done.recv_timeout(Duration::from_secs(20)).unwrap();
        end.send(()).unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn a_runtime_that_does_not_come_is_told() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let fault = Stillness::default().keep(runtime.handle()).unwrap_err();
        assert_eq!(fault.kind(), io::ErrorKind::TimedOut);
    }
}
