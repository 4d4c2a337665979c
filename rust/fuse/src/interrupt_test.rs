use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::*;

const GONE: u32 = u32::MAX; // no thread has this id, so it counts as killed

fn counting() -> (Arc<AtomicU32>, Hook) {
    let count = Arc::new(AtomicU32::new(0));
    let counted = count.clone();
    let hook = move || {
        counted.fetch_add(1, Ordering::SeqCst);
    };
    (count, Box::new(hook))
}

#[test]
fn a_killed_reader_cancels_once_and_a_late_hook_runs_at_once() {
    let waitings = Waitings::default();
    let waiting = waitings.add(8, GONE);
    let (count, hook) = counting();
    waiting.on_cancel(hook);
    waitings.interrupt(8);
    waitings.interrupt(8);
    assert!(waiting.cancelled());
    assert_eq!(count.load(Ordering::SeqCst), 1);
    let (late, hook) = counting();
    waiting.on_cancel(hook);
    assert_eq!(late.load(Ordering::SeqCst), 1);
}

#[test]
fn a_reader_that_lives_is_not_cancelled() {
    let waitings = Waitings::default();
    let waiting = waitings.add(8, std::process::id());
    let foreign = waitings.add(10, 0);
    waitings.interrupt(8);
    waitings.interrupt(10);
    assert!(!waiting.cancelled() && !foreign.cancelled());
    assert_eq!(waitings.doubts.lock().list.len(), 2);
}

#[test]
fn an_interrupt_ahead_of_its_request_is_found_later_and_one_for_nobody_is_forgotten() {
    let waitings = Arc::new(Waitings::default());
    let watched = waitings.clone();
    let watcher = thread::spawn(move || watched.watch());
    waitings.interrupt(8);
    waitings.interrupt(12);
    let waiting = waitings.add(8, GONE);
    while !waiting.cancelled() || !waitings.doubts.lock().list.is_empty() {
        thread::sleep(Duration::from_millis(5));
    }
    waitings.close();
    watcher.join().unwrap();
}

#[test]
fn an_answer_drops_the_hook_and_a_hook_may_panic() {
    let waitings = Waitings::default();
    let held = Arc::new(());
    let owner = held.clone();
    let waiting = waitings.add(1 << 63 | 8, GONE);
    waiting.on_cancel(Box::new(move || drop(owner)));
    waitings.remove(1 << 63 | 8);
    assert_eq!(Arc::strong_count(&held), 1);
    let second = waitings.add(16, GONE);
    second.on_cancel(Box::new(|| panic!("the server's fault")));
    waitings.interrupt(16);
    assert!(second.cancelled());
}

#[test]
fn only_a_pending_kill_counts() {
    assert!(kill_pending("Name:\tx\nSigPnd:\t0000000000000100\n"));
    assert!(kill_pending("ShdPnd:\t0000000000000900\n"));
    assert!(!kill_pending(
        "SigPnd:\t0000000000000200\nShdPnd:\t0000000000004002\n"
    ));
    assert!(!kill_pending("SigPnd:\tgarbage\n"));
}
