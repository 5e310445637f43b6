//! Keys that clients changed lately: the evictor leaves them alone (protocol rule 20), which keeps
//! the gap between a proof of absence and its insert safe, and hot old documents in place.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ahash::AHashSet;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::key::Key;
use crate::pending::CollectionId;

const SLICES: u32 = 10;

/// A sliding set of key hashes. Two keys that share a hash keep each other resident, which is
/// harmless; no key is forgotten before its time.
#[derive(Debug)]
pub struct RecentKeys {
    residency: Duration,
    slices: Mutex<VecDeque<Slice>>,
    /// Keys that an eviction is about to take, once it has found them not recent.
    leaving: Mutex<AHashSet<u64>>,
    left: Notify,
}

#[derive(Debug)]
struct Slice {
    begun: Instant,
    /// When its last key was touched.
    ended: Instant,
    hashes: AHashSet<u64>,
}

impl RecentKeys {
    /// Keys stay for at least `residency` after their last change.
    #[must_use]
    pub fn new(residency: Duration) -> Self {
        Self {
            residency,
            slices: Mutex::new(VecDeque::new()),
            leaving: Mutex::default(),
            left: Notify::new(),
        }
    }

    /// How long a key stays.
    #[must_use]
    pub fn residency(&self) -> Duration {
        self.residency
    }

    /// A client changed the key (or is about to: a fault-in for a write counts).
    pub fn touch(&self, collection: CollectionId, key: &Key, now: Instant) {
        let mut slices = self.slices.lock();
        let length = self.residency / SLICES;
        if slices.back().is_none_or(|slice| now.saturating_duration_since(slice.begun) > length) {
            // A slice is dropped only when even its last key is old enough.
            while slices
                .front()
                .is_some_and(|first| now.saturating_duration_since(first.ended) > self.residency)
            {
                slices.pop_front();
            }
            slices.push_back(Slice { begun: now, ended: now, hashes: AHashSet::new() });
        }
        if let Some(slice) = slices.back_mut() {
            slice.ended = now;
            slice.hashes.insert(Self::place(collection, key));
        }
    }

    /// Whether the key may not be evicted yet.
    #[must_use]
    pub fn contains(&self, collection: CollectionId, key: &Key, now: Instant) -> bool {
        let place = Self::place(collection, key);
        self.slices.lock().iter().any(|slice| {
            now.saturating_duration_since(slice.ended) <= self.residency
                && slice.hashes.contains(&place)
        })
    }

    /// Keeps the key where it is: afterwards, and for the residency, no eviction takes it that had
    /// not ended before. Whoever relies on a key being on the fast tier pins it first and looks then.
    pub async fn pin(&self, collection: CollectionId, key: &Key, now: Instant) {
        // In this order: an eviction announces its keys and then asks which are recent, so either
        // it finds this one, or it is found here and waited for.
        self.touch(collection, key, now);
        let place = Self::place(collection, key);
        loop {
            let left = self.left.notified();
            tokio::pin!(left);
            // Registered before the look, so that a departure in between is not missed.
            left.as_mut().enable();
            if !self.leaving.lock().contains(&place) {
                return;
            }
            left.await;
        }
    }

    /// Announces an eviction of these keys, to be followed by a last look at which of them are
    /// recent. Those stay; the others are leaving until the returned value is dropped.
    #[must_use]
    pub fn announce(&self, collection: CollectionId, keys: &[Key]) -> Leaving<'_> {
        let places: Vec<u64> = keys.iter().map(|key| Self::place(collection, key)).collect();
        self.leaving.lock().extend(places.iter().copied());
        Leaving { recent: self, places }
    }

    fn place(collection: CollectionId, key: &Key) -> u64 {
        // Collections share the set; the multiplier keeps their keys apart.
        key.hash64() ^ (collection as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// An eviction under way; see [`RecentKeys::announce`]. One eviction of a collection runs at a time.
#[derive(Debug)]
pub struct Leaving<'a> {
    recent: &'a RecentKeys,
    places: Vec<u64>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut leaving = self.recent.leaving.lock();
        for place in &self.places {
            leaving.remove(place);
        }
        drop(leaving);
        self.recent.left.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::raw::RawBsonRef;

    /// Rule 20: never forgotten early, forgotten in the end.
    #[test]
    fn a_key_stays_for_the_residency_and_not_much_longer() {
        let recent = RecentKeys::new(Duration::from_secs(600));
        let key = |n| Key::new(RawBsonRef::Int32(n)).unwrap();
        let start = Instant::now();
        let after = |s| start + Duration::from_secs(s);
        recent.touch(0, &key(1), start);
        assert!(recent.contains(0, &key(1), after(600)));
        assert!(!recent.contains(1, &key(1), after(0)));
        for s in (10..1400).step_by(10) {
            recent.touch(0, &key(2), after(s));
        }
        assert!(recent.contains(0, &key(2), after(1400)));
        assert!(!recent.contains(0, &key(1), after(1400)));
        assert!(recent.slices.lock().len() <= SLICES as usize + 2);
        assert!(recent.contains(0, &key(2), after(1990)));
        assert!(!recent.contains(0, &key(2), after(2100)));
    }

    /// Rules 19 and 20: a writer that saw a key on the fast tier must not lose it to an eviction
    /// that was past its last look when the writer came.
    #[tokio::test]
    async fn a_pin_waits_for_an_eviction_past_its_last_look_and_stops_a_later_one() {
        let recent = std::sync::Arc::new(RecentKeys::new(Duration::from_secs(600)));
        let key = Key::new(RawBsonRef::Int32(1)).unwrap();
        let now = Instant::now();
        let eviction = recent.announce(0, std::slice::from_ref(&key));
        assert!(!recent.contains(0, &key, now), "the eviction goes ahead");
        let writer = tokio::spawn({
            let (recent, key) = (recent.clone(), key.clone());
            async move { recent.pin(0, &key, now).await }
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(!writer.is_finished(), "the writer waits until the eviction has ended");
        drop(eviction);
        writer.await.unwrap();
        let later = recent.announce(0, std::slice::from_ref(&key));
        assert!(recent.contains(0, &key, now), "a later eviction finds it recent");
        drop(later);
    }
}
