//! Admission of client writes: free while the feeder keeps up; beyond its bounds one write enters
//! for each key that leaves the pending set, in arrival order.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

/// Writes that may enter at once right after the bound is lifted or reached, so that a drain
/// rate measured in bursts does not leave the archive idle.
const BURST: usize = 64;

/// See the module's description. The drain rate needs no estimate: each finished flush admits the next write.
#[derive(Debug)]
pub struct Admission {
    limited: AtomicBool,
    turns: Semaphore,
}

impl Default for Admission {
    fn default() -> Self {
        Self { limited: AtomicBool::new(false), turns: Semaphore::new(0) }
    }
}

impl Admission {
    /// Whether writes are being held back.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.limited.load(Ordering::SeqCst)
    }

    /// Waits for `writes` turns (statements of one command). Returns at once while admission is free.
    /// Cancelling the wait gives up the place in the queue.
    pub async fn enter(&self, writes: usize) {
        if !self.is_limited() {
            return;
        }
        let writes = u32::try_from(writes.clamp(1, BURST)).unwrap_or(1);
        if let Ok(turns) = self.turns.acquire_many(writes).await
            && self.is_limited()
        {
            turns.forget();
        }
    }

    /// The feeder is near its bounds: from now on writes enter at the rate it drains.
    pub fn limit(&self) {
        if !self.limited.swap(true, Ordering::SeqCst) {
            self.turns.forget_permits(usize::MAX >> 4);
        }
    }

    /// Keys left the pending set.
    pub fn drained(&self, keys: usize) {
        if self.is_limited() {
            let room = BURST.saturating_sub(self.turns.available_permits());
            self.turns.add_permits(keys.min(room));
        }
    }

    /// The feeder has caught up: everyone enters.
    pub fn lift(&self) {
        if self.limited.swap(false, Ordering::SeqCst) {
            // Waiters take a turn each and, no longer limited, give it back for the next in line.
            self.turns.add_permits(BURST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[tokio::test]
    async fn holds_writes_back_to_the_drain_rate_and_lets_all_go_when_lifted() {
        let admission = Arc::new(Admission::default());
        admission.enter(10).await;
        admission.limit();
        let writers: Vec<_> = (0..200)
            .map(|_| {
                let admission = admission.clone();
                tokio::spawn(async move { admission.enter(1).await })
            })
            .collect();
        let finished = || writers.iter().filter(|w| w.is_finished()).count();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        assert_eq!(finished(), 0);
        admission.drained(3);
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        assert_eq!(finished(), 3);
        admission.lift();
        for writer in writers {
            writer.await.unwrap();
        }
    }
}
