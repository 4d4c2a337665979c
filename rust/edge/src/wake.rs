//! Requests for sandboxes that sleep: held here, told to the server, let go when it has decided.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{sleep_until, timeout_at, Instant};
use tokio_util::sync::CancellationToken;

use crate::activity::Activity;
use crate::answer::Answer;
use crate::route::SandboxId;

/// A sandbox without a machine, until its route says something else.
#[derive(Debug)]
pub struct Sleep {
    pub id: SandboxId,
    /// Whether a request wakes it.
    pub wakes: bool,
    pub activity: Arc<Activity>,
    over: CancellationToken,
}

impl Sleep {
    pub fn new(id: SandboxId, wakes: bool, activity: Arc<Activity>) -> Self {
        Self {
            id,
            wakes,
            activity,
            over: CancellationToken::new(),
        }
    }

    /// The route is another one now, or none: whoever is held looks again.
    pub fn end(&self) {
        self.over.cancel();
    }
}

/// One waking: begun by the first request that is held, shared by those that follow.
#[derive(Debug)]
struct Attempt {
    /// Grows from attempt to attempt, of all sandboxes.
    number: u64,
    sleep: Arc<Sleep>,
    failed: CancellationToken,
    why: OnceLock<String>,
}

impl Attempt {
    async fn failure(&self) -> Answer {
        self.failed.cancelled().await;
        Answer::WakeFailed {
            id: self.sleep.id.as_str().to_owned(),
            why: self.why.get().cloned().unwrap_or_default(),
        }
    }
}

#[derive(Debug)]
struct Waiting {
    attempt: Arc<Attempt>,
    requests: usize,
}

#[derive(Debug)]
struct State {
    /// The number of the last attempt.
    version: u64,
    waiting: HashMap<SandboxId, Waiting>,
}

/// All that are held now.
#[derive(Debug)]
pub struct Wakes {
    wait: Duration,
    draining: CancellationToken,
    state: Mutex<State>,
    begun: Notify,
}

impl Wakes {
    /// Requests are held for `wait` at most, and not once the edge drains.
    pub fn new(wait: Duration, draining: CancellationToken) -> Self {
        let state = State {
            version: first_version(),
            waiting: HashMap::new(),
        };
        Self {
            wait,
            draining,
            state: Mutex::new(state),
            begun: Notify::new(),
        }
    }

    /// Until when a request that comes now is held.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.wait
    }

    /// Returns when the route may have changed; Err if the sandbox will not be awake in time.
    pub async fn hold(&self, sleep: &Arc<Sleep>, deadline: Instant) -> Result<(), Answer> {
        let Some(held) = self.enter(sleep) else {
            return Ok(());
        };
        tokio::select! {
            biased;
            () = sleep.over.cancelled() => Ok(()),
            failure = held.attempt.failure() => Err(failure),
            () = self.draining.cancelled() => Err(Answer::Draining),
            () = sleep_until(deadline) => Err(Answer::WakeTimeout {
                id: sleep.id.as_str().to_owned(),
                seconds: self.wait.as_secs(),
            }),
        }
    }

    /// None: the sleep is over already.
    fn enter(&self, sleep: &Arc<Sleep>) -> Option<Held<'_>> {
        let mut state = self.state.lock();
        if sleep.over.is_cancelled() {
            return None;
        }
        if let Some(waiting) = state.waiting.get_mut(&sleep.id) {
            if Arc::ptr_eq(&waiting.attempt.sleep, sleep) {
                waiting.requests += 1;
                let attempt = Arc::clone(&waiting.attempt);
                return Some(Held { of: self, attempt });
            }
        }
        state.version += 1;
        let attempt = Arc::new(Attempt {
            number: state.version,
            sleep: Arc::clone(sleep),
            failed: CancellationToken::new(),
            why: OnceLock::new(),
        });
        let waiting = Waiting {
            attempt: Arc::clone(&attempt),
            requests: 1,
        };
        state.waiting.insert(sleep.id, waiting);
        drop(state);
        self.begun.notify_waiters();
        Some(Held { of: self, attempt })
    }

    fn leave(&self, attempt: &Arc<Attempt>) {
        let mut state = self.state.lock();
        let id = attempt.sleep.id;
        let Some(waiting) = state.waiting.get_mut(&id) else {
            return;
        };
        if Arc::ptr_eq(&waiting.attempt, attempt) {
            waiting.requests -= 1;
            if waiting.requests == 0 {
                state.waiting.remove(&id);
            }
        }
    }

    /// Answers those held for a sandbox; a request that comes later begins anew. False: nobody was.
    pub fn fail(&self, id: &SandboxId, why: String) -> bool {
        let removed = self.state.lock().waiting.remove(id);
        if let Some(Waiting { attempt, .. }) = &removed {
            attempt.why.get_or_init(|| why);
            attempt.failed.cancel();
        }
        removed.is_some()
    }

    /// The sandboxes held for since version `after`, and the version now; waits while there are none.
    pub async fn since(&self, after: i64, wait: Duration) -> (u64, Vec<SandboxId>) {
        let deadline = Instant::now() + wait;
        loop {
            let begun = self.begun.notified(); // before looking: else one could slip in between
            let (version, ids) = self.held(after);
            if !ids.is_empty() || timeout_at(deadline, begun).await.is_err() {
                return (version, ids);
            }
        }
    }

    fn held(&self, after: i64) -> (u64, Vec<SandboxId>) {
        let state = self.state.lock();
        // A version that is not ours says nothing about what its owner has seen.
        let after = u64::try_from(after).ok().filter(|n| *n <= state.version);
        let attempts = state.waiting.values().map(|waiting| &waiting.attempt);
        let ids = attempts
            .filter(|attempt| attempt.number > after.unwrap_or(0))
            .filter(|attempt| !attempt.sleep.over.is_cancelled())
            .map(|attempt| attempt.sleep.id);
        (state.version, ids.collect())
    }
}

/// One request's place among those held.
struct Held<'a> {
    of: &'a Wakes,
    attempt: Arc<Attempt>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.of.leave(&self.attempt);
    }
}

/// Above all versions of an edge that ran before, whose client may ask on; exact in any JSON.
fn first_version() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::JoinSet;

    const AGES: Duration = Duration::from_secs(3600);

    fn id(letter: &str) -> SandboxId {
        SandboxId::parse(&letter.repeat(20)).expect("a legal id")
    }

    fn sleeper(letter: &str) -> Arc<Sleep> {
        Arc::new(Sleep::new(id(letter), true, Arc::default()))
    }

    fn wakes(wait: Duration) -> Arc<Wakes> {
        Arc::new(Wakes::new(wait, CancellationToken::new()))
    }

    type Outcomes = JoinSet<Result<(), Answer>>;

    /// Requests that are held once this returns.
    async fn hold(wakes: &Arc<Wakes>, sleep: &Arc<Sleep>, count: usize) -> Outcomes {
        let mut held = JoinSet::new();
        let before = requests(wakes, sleep);
        for _ in 0..count {
            let (wakes, sleep) = (Arc::clone(wakes), Arc::clone(sleep));
            held.spawn(async move { wakes.hold(&sleep, wakes.deadline()).await });
        }
        while requests(wakes, sleep) < before + count {
            tokio::task::yield_now().await;
        }
        held
    }

    fn requests(wakes: &Wakes, sleep: &Sleep) -> usize {
        let state = wakes.state.lock();
        state.waiting.get(&sleep.id).map_or(0, |w| w.requests)
    }

    fn is_empty(wakes: &Wakes) -> bool {
        wakes.state.lock().waiting.is_empty()
    }

    #[tokio::test]
    async fn many_requests_are_one_waking_and_all_go_on() {
        let (wakes, sleep) = (wakes(AGES), sleeper("a"));
        let held = hold(&wakes, &sleep, 10).await;
        let (version, ids) = wakes.since(-1, AGES).await;
        assert_eq!(ids, [id("a")]);
        assert_eq!(
            wakes
                .since(i64::try_from(version).unwrap_or(0), Duration::ZERO)
                .await
                .1,
            []
        );
        sleep.end();
        assert_eq!(
            wakes.since(-1, Duration::ZERO).await.1,
            [],
            "not told of once it is over"
        );
        assert_eq!(held.join_all().await, vec![Ok(()); 10]);
        assert!(is_empty(&wakes));
        assert_eq!(wakes.hold(&sleep, wakes.deadline()).await, Ok(()));
    }

    #[tokio::test]
    async fn who_waits_for_news_is_told_of_what_begins() {
        let wakes = wakes(AGES);
        let first = hold(&wakes, &sleeper("a"), 1).await;
        let (version, _) = wakes.since(-1, AGES).await;
        let waiter = Arc::clone(&wakes);
        let after = i64::try_from(version).unwrap_or(0);
        let news = tokio::spawn(async move { waiter.since(after, AGES).await });
        let second = hold(&wakes, &sleeper("b"), 1).await;
        assert_eq!(news.await.ok(), Some((version + 1, vec![id("b")])));
        let mut all = wakes.since(-1, AGES).await.1;
        all.sort();
        assert_eq!(all, [id("a"), id("b")], "who begins anew learns of all");
        let ahead = i64::try_from(version + 100).unwrap_or(0);
        assert_eq!(
            wakes.since(ahead, AGES).await.1.len(),
            2,
            "another edge's version"
        );
        drop((first, second));
    }

    #[tokio::test]
    async fn a_failure_answers_who_is_held_and_the_next_begins_anew() {
        let (wakes, sleep) = (wakes(AGES), sleeper("a"));
        let held = hold(&wakes, &sleep, 2).await;
        let (version, _) = wakes.since(-1, AGES).await;
        assert!(wakes.fail(&sleep.id, "no room".to_owned()));
        assert!(!wakes.fail(&sleep.id, "twice".to_owned()));
        let next = hold(&wakes, &sleep, 1).await; // the first two may not have left yet
        assert_eq!(wakes.since(-1, AGES).await, (version + 1, vec![id("a")]));
        let failed = Answer::WakeFailed {
            id: "a".repeat(20),
            why: "no room".to_owned(),
        };
        assert_eq!(held.join_all().await, vec![Err(failed); 2].to_vec());
        assert_eq!(
            requests(&wakes, &sleep),
            1,
            "who left was of another waking"
        );
        sleep.end();
        assert_eq!(next.join_all().await, [Ok(())]);
        assert!(is_empty(&wakes));
    }

    #[tokio::test]
    async fn nobody_is_held_for_ever() {
        let (wakes, sleep) = (wakes(Duration::ZERO), sleeper("a"));
        let late = wakes.hold(&sleep, wakes.deadline()).await;
        assert!(matches!(late, Err(Answer::WakeTimeout { .. })));
        assert!(is_empty(&wakes));
    }

    #[tokio::test]
    async fn a_drain_lets_all_go() {
        let draining = CancellationToken::new();
        let (wakes, sleep) = (Arc::new(Wakes::new(AGES, draining.clone())), sleeper("a"));
        let held = hold(&wakes, &sleep, 1).await;
        draining.cancel();
        assert_eq!(held.join_all().await, [Err(Answer::Draining)]);
    }

    #[tokio::test]
    async fn a_request_that_is_given_up_is_forgotten() {
        let (wakes, sleep) = (wakes(AGES), sleeper("a"));
        let mut held = hold(&wakes, &sleep, 3).await;
        held.shutdown().await;
        assert!(is_empty(&wakes));
    }
}
