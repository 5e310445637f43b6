//! A replica set's logical clock as one ordered number, and gates that wait for it.
//! Nothing here reads a clock: values come from servers' replies.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use bson::Timestamp;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// A cluster time: seconds in the high half, increment in the low half, ordered as MongoDB orders them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ClusterTime(pub u64);

impl ClusterTime {
    /// Before every time a server gives out.
    pub const ZERO: Self = Self(0);

    /// The latest time before this one.
    #[must_use]
    pub fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// Whole seconds since the Unix epoch.
    #[must_use]
    pub fn seconds(self) -> u32 {
        u32::try_from(self.0 >> 32).unwrap_or(u32::MAX)
    }
}

impl From<Timestamp> for ClusterTime {
    fn from(t: Timestamp) -> Self {
        Self((u64::from(t.time) << 32) | u64::from(t.increment))
    }
}

impl From<ClusterTime> for Timestamp {
    fn from(t: ClusterTime) -> Self {
        // The low half is taken on purpose: it is the increment.
        #[allow(clippy::cast_possible_truncation)]
        Timestamp { time: t.seconds(), increment: t.0 as u32 }
    }
}

impl fmt::Display for ClusterTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 >> 32, self.0 & 0xffff_ffff)
    }
}

/// A cluster time that rises, and those who wait for it to reach a point.
///
/// Reading it is one atomic load; only waiting takes a lock.
#[derive(Debug, Default)]
pub struct Gate {
    value: AtomicU64,
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    next: u64,
    by_time: BTreeMap<(u64, u64), oneshot::Sender<()>>,
}

impl Gate {
    /// The present value.
    #[must_use]
    pub fn get(&self) -> ClusterTime {
        ClusterTime(self.value.load(Ordering::SeqCst))
    }

    /// Whether anyone waits.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        !self.waiters.lock().by_time.is_empty()
    }

    /// Raises the value and wakes those who waited for it. A lower value changes nothing.
    pub fn advance(&self, to: ClusterTime) {
        if self.value.fetch_max(to.0, Ordering::SeqCst) >= to.0 {
            return;
        }
        let mut waiters = self.waiters.lock();
        while let Some(first) = waiters.by_time.first_entry() {
            if first.key().0 > to.0 {
                break;
            }
            // A waiter that has gone away needs no wake-up.
            let _ = first.remove().send(());
        }
    }

    /// Back to the beginning. Waiters stay and wait for the value to be reached anew.
    pub fn reset(&self) {
        self.value.store(0, Ordering::SeqCst);
    }

    /// Waits until the value has reached `at`.
    pub async fn reached(&self, at: ClusterTime) {
        self.reached_telling(at, || ()).await;
    }

    /// [`reached`](Self::reached), and calls `waiting` once [`is_awaited`](Self::is_awaited) shows
    /// this wait: told before, somebody else could look, see nobody and go to sleep.
    pub async fn reached_telling(&self, at: ClusterTime, waiting: impl Fn()) {
        while self.get() < at {
            let (id, receiver) = {
                let mut waiters = self.waiters.lock();
                // Under the lock: `advance` stores before it locks, so a store that this load
                // misses will find the waiter.
                if self.get() >= at {
                    return;
                }
                let (sender, receiver) = oneshot::channel();
                let id = waiters.next;
                waiters.next += 1;
                waiters.by_time.insert((at.0, id), sender);
                (id, receiver)
            };
            let _leave = LeaveOnDrop { gate: self, place: (at.0, id) };
            waiting();
            let _ = receiver.await;
        }
    }
}

/// Takes a waiter that was cancelled out of the queue, so that timeouts under a stopped archive do not pile up.
struct LeaveOnDrop<'a> {
    gate: &'a Gate,
    place: (u64, u64),
}

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        self.gate.waiters.lock().by_time.remove(&self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_like_mongodb_and_round_trips() {
        let t = Timestamp { time: 7, increment: u32::MAX };
        let later = Timestamp { time: 8, increment: 0 };
        assert!(ClusterTime::from(t) < ClusterTime::from(later));
        assert_eq!(Timestamp::from(ClusterTime::from(t)), t);
        assert_eq!(ClusterTime::from(later).before(), ClusterTime::from(t));
    }

    #[tokio::test]
    async fn wakes_those_whose_time_has_come_and_no_others() {
        let gate = std::sync::Arc::new(Gate::default());
        let early = tokio::spawn({
            let gate = gate.clone();
            async move { gate.reached(ClusterTime(5)).await }
        });
        let late = tokio::spawn({
            let gate = gate.clone();
            async move { gate.reached(ClusterTime(9)).await }
        });
        while gate.waiters.lock().by_time.len() < 2 {
            tokio::task::yield_now().await;
        }
        gate.advance(ClusterTime(6));
        early.await.unwrap();
        assert!(!late.is_finished());
        assert!(gate.is_awaited());
        gate.advance(ClusterTime(9));
        late.await.unwrap();
        assert!(!gate.is_awaited());
    }

    /// Rule 35: whoever writes heartbeats is woken by a wait, looks whether anyone waits, and must
    /// find it.
    #[tokio::test]
    async fn a_wait_is_told_of_when_it_can_be_seen() {
        let gate = Gate::default();
        let told = std::cell::Cell::new(false);
        let wait = gate.reached_telling(ClusterTime(5), || {
            assert!(gate.is_awaited());
            told.set(true);
        });
        tokio::select! { biased; () = wait => unreachable!(), () = std::future::ready(()) => {} }
        assert!(told.get());
    }

    #[tokio::test]
    async fn a_cancelled_waiter_leaves_the_queue() {
        let gate = Gate::default();
        let wait = gate.reached(ClusterTime(5));
        tokio::select! { biased; () = wait => unreachable!(), () = std::future::ready(()) => {} }
        assert!(!gate.is_awaited());
    }
}
