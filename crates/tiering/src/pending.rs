//! The pending set: keys changed on the fast tier and not yet written to the archive (protocol
//! rules 1, 2, 4, 6). Changes of one key coalesce. Sharded by lane, so that looking a key up
//! takes one short lock that only that lane's feeder work also takes.

use std::collections::{BTreeMap, VecDeque, hash_map};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ahash::AHashMap;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::key::Key;
use crate::time::ClusterTime;

/// A tiered collection's place in the configuration.
pub type CollectionId = usize;

/// What the last client operation on a key left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// An insert, update or replacement.
    Upsert,
    /// A delete.
    Delete,
}

/// What the fast tier said of a key when a flush read it, once every event up to that read is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbsentVerdict {
    /// A client deleted it: delete it on the archive.
    Delete,
    /// It was evicted after the change, so the archive already has it: nothing to write.
    Evicted,
    /// It changed while the flush was under way: flush again.
    FlushAgain,
}

/// Names one flush, so that a flush begun before the feeder restarted cannot end a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket(u64);

/// How one key's flush ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushed {
    /// The archive acknowledged the state (or already had it).
    Done,
    /// Nothing is known to have been written: the key goes back, not before the given moment.
    Retry(Option<Instant>),
}

#[derive(Debug)]
struct Entry {
    last: Change,
    /// The oldest change not yet on the archive.
    oldest: ClusterTime,
    /// The first change since the flush under way began.
    dirty: Option<ClusterTime>,
    /// The flush under way. One key has one flush at a time; a ticket of an earlier feeder is void.
    flight: Option<Ticket>,
    bytes: usize,
    waiters: Vec<(ClusterTime, oneshot::Sender<()>)>,
}

#[derive(Debug, Default)]
struct Queue {
    ready: VecDeque<(Instant, Key)>,
    delayed: BTreeMap<(Instant, u64), Key>,
    delayed_seq: u64,
    /// How many keys have each `oldest`.
    oldest: BTreeMap<ClusterTime, usize>,
}

impl Queue {
    fn count(&mut self, at: ClusterTime) {
        *self.oldest.entry(at).or_insert(0) += 1;
    }

    fn uncount(&mut self, at: ClusterTime) {
        if let Some(n) = self.oldest.get_mut(&at) {
            *n = n.saturating_sub(1);
            if *n == 0 {
                self.oldest.remove(&at);
            }
        }
    }
}

#[derive(Debug, Default)]
struct Shard {
    entries: AHashMap<(CollectionId, Key), Entry>,
    queues: Vec<Queue>,
    bytes: usize,
}

/// See the module's description.
#[derive(Debug)]
pub struct PendingSet {
    shards: Box<[Mutex<Shard>]>,
    tickets: AtomicU64,
}

/// Whether a point read of the archive may go ahead for a key.
#[derive(Debug)]
pub enum Lookup {
    /// Every change of the key up to the asked time is on the archive.
    Settled,
    /// Ask again when this resolves (or is dropped: the feeder began anew).
    Wait(oneshot::Receiver<()>),
}

impl PendingSet {
    /// One shard a lane, one queue a tiered collection in each.
    #[must_use]
    pub fn new(lanes: usize, collections: usize) -> Self {
        let shard = || {
            let queues = (0..collections).map(|_| Queue::default()).collect();
            Mutex::new(Shard { queues, ..Shard::default() })
        };
        Self { shards: (0..lanes.max(1)).map(|_| shard()).collect(), tickets: AtomicU64::new(0) }
    }

    /// Number of lanes.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.shards.len()
    }

    /// The lane a key belongs to.
    #[must_use]
    pub fn lane(&self, key: &Key) -> usize {
        key.lane(self.shards.len())
    }

    fn shard(&self, key: &Key) -> Option<&Mutex<Shard>> {
        self.shards.get(self.lane(key))
    }

    /// Takes in a client's change, in the order of the change stream. Returns whether it coalesced
    /// with one already pending.
    pub fn ingest(
        &self,
        collection: CollectionId,
        key: Key,
        change: Change,
        at: ClusterTime,
        bytes: usize,
        now: Instant,
    ) -> bool {
        let Some(shard) = self.shard(&key) else { return false };
        let mut guard = shard.lock();
        let Shard { entries, queues, bytes: total } = &mut *guard;
        let Some(queue) = queues.get_mut(collection) else { return false };
        match entries.entry((collection, key)) {
            hash_map::Entry::Occupied(mut slot) => {
                let entry = slot.get_mut();
                entry.last = change;
                if entry.flight.is_some() && entry.dirty.is_none() {
                    entry.dirty = Some(at);
                }
                true
            }
            hash_map::Entry::Vacant(slot) => {
                let key = slot.key().1.clone();
                queue.count(at);
                queue.ready.push_back((now, key));
                *total += bytes;
                slot.insert(Entry {
                    last: change,
                    oldest: at,
                    dirty: None,
                    flight: None,
                    bytes,
                    waiters: Vec::new(),
                });
                false
            }
        }
    }

    /// Takes up to `limit` keys of one collection off a lane for a flush: those queued before
    /// `queued_before`, or every one when the collection is hurried. Clears their dirty flag.
    pub fn take(
        &self,
        lane: usize,
        collection: CollectionId,
        limit: usize,
        queued_before: Instant,
        now: Instant,
        into: &mut Vec<Key>,
    ) -> Ticket {
        let ticket = Ticket(self.tickets.fetch_add(1, Ordering::Relaxed));
        let Some(shard) = self.shards.get(lane) else { return ticket };
        let mut guard = shard.lock();
        let Shard { entries, queues, .. } = &mut *guard;
        let Some(queue) = queues.get_mut(collection) else { return ticket };
        while let Some(first) = queue.delayed.first_entry() {
            if first.key().0 > now {
                break;
            }
            let key = first.remove();
            queue.ready.push_front((queued_before.min(now), key));
        }
        while into.len() < limit {
            match queue.ready.front() {
                Some((queued, _)) if *queued <= queued_before => {}
                _ => break,
            }
            let Some((_, key)) = queue.ready.pop_front() else { break };
            let place = (collection, key);
            let Some(entry) = entries.get_mut(&place) else { continue };
            entry.flight = Some(ticket);
            entry.dirty = None;
            into.push(place.1);
        }
        ticket
    }

    /// When the lane's next key of the collection becomes due: `None` if it has none.
    #[must_use]
    pub fn next_due(&self, lane: usize, collection: CollectionId) -> Option<Instant> {
        let guard = self.shards.get(lane)?.lock();
        let queue = guard.queues.get(collection)?;
        let ready = queue.ready.front().map(|(queued, _)| *queued);
        let delayed = queue.delayed.first_key_value().map(|((due, _), _)| *due);
        match (ready, delayed) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Rule 4, for a key a flush found absent, once `ingested` has reached the time of that read.
    #[must_use]
    pub fn absent(&self, collection: CollectionId, key: &Key, ticket: Ticket) -> AbsentVerdict {
        let Some(shard) = self.shard(key) else { return AbsentVerdict::FlushAgain };
        let guard = shard.lock();
        match guard.entries.get(&(collection, key.clone())) {
            Some(entry) if entry.dirty.is_some() || entry.flight != Some(ticket) => {
                AbsentVerdict::FlushAgain
            }
            Some(Entry { last: Change::Delete, .. }) => AbsentVerdict::Delete,
            _ => AbsentVerdict::Evicted,
        }
    }

    /// Ends a key's flush. Returns whether the key left the pending set. A void ticket changes nothing.
    pub fn flushed(
        &self,
        collection: CollectionId,
        key: &Key,
        ticket: Ticket,
        how: Flushed,
        now: Instant,
    ) -> bool {
        let Some(shard) = self.shard(key) else { return false };
        let mut guard = shard.lock();
        let Shard { entries, queues, bytes: total } = &mut *guard;
        let Some(queue) = queues.get_mut(collection) else { return false };
        let hash_map::Entry::Occupied(mut slot) = entries.entry((collection, key.clone())) else {
            return false;
        };
        let entry = slot.get_mut();
        if entry.flight != Some(ticket) {
            return false;
        }
        entry.flight = None;
        match (how, entry.dirty.take()) {
            (Flushed::Done, None) => {
                queue.uncount(entry.oldest);
                *total = total.saturating_sub(entry.bytes);
                // Dropping the entry wakes its waiters.
                slot.remove();
                true
            }
            (Flushed::Done, Some(dirty)) => {
                queue.uncount(entry.oldest);
                entry.oldest = dirty;
                queue.count(dirty);
                entry.waiters.retain(|(at, _)| *at >= dirty);
                queue.ready.push_back((now, key.clone()));
                false
            }
            (Flushed::Retry(None), _) => {
                queue.ready.push_back((now, key.clone()));
                false
            }
            (Flushed::Retry(Some(due)), _) => {
                queue.delayed_seq += 1;
                queue.delayed.insert((due, queue.delayed_seq), key.clone());
                false
            }
        }
    }

    /// Rule 12's second half: to be asked only after `ingested >= at` was seen.
    #[must_use]
    pub fn lookup(&self, collection: CollectionId, key: &Key, at: ClusterTime) -> Lookup {
        let Some(shard) = self.shard(key) else { return Lookup::Settled };
        let mut guard = shard.lock();
        match guard.entries.get_mut(&(collection, key.clone())) {
            Some(entry) if entry.oldest <= at => {
                let (sender, receiver) = oneshot::channel();
                entry.waiters.retain(|(_, waiter)| !waiter.is_closed());
                entry.waiters.push((at, sender));
                Lookup::Wait(receiver)
            }
            _ => Lookup::Settled,
        }
    }

    /// Whether the key is pending at all (eviction asks this).
    #[must_use]
    pub fn contains(&self, collection: CollectionId, key: &Key) -> bool {
        self.shard(key)
            .is_some_and(|shard| shard.lock().entries.contains_key(&(collection, key.clone())))
    }

    /// The oldest change of a collection that is not on the archive yet.
    #[must_use]
    pub fn oldest(&self, collection: CollectionId) -> Option<ClusterTime> {
        self.shards
            .iter()
            .filter_map(|shard| {
                let guard = shard.lock();
                let queue = guard.queues.get(collection)?;
                queue.oldest.first_key_value().map(|(at, _)| *at)
            })
            .min()
    }

    /// Pending keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().entries.len()).sum()
    }

    /// Whether no key is pending.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().entries.is_empty())
    }

    /// Bytes of the change events behind the pending keys: an estimate of what is unmirrored.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().bytes).sum()
    }

    /// Forgets everything: a feeder begins anew from its persisted token. Waiters are told to ask again.
    pub fn clear(&self) {
        for shard in &self.shards {
            let mut guard = shard.lock();
            guard.entries.clear();
            guard.bytes = 0;
            for queue in &mut guard.queues {
                *queue = Queue::default();
            }
        }
    }

    /// Forgets a dropped collection's keys.
    pub fn discard(&self, collection: CollectionId) {
        for shard in &self.shards {
            let mut guard = shard.lock();
            let Shard { entries, queues, bytes } = &mut *guard;
            entries.retain(|(id, _), entry| {
                let keep = *id != collection;
                if !keep {
                    *bytes = bytes.saturating_sub(entry.bytes);
                }
                keep
            });
            if let Some(queue) = queues.get_mut(collection) {
                *queue = Queue::default();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::raw::RawBsonRef;

    fn key(n: i32) -> Key {
        Key::new(RawBsonRef::Int32(n)).unwrap()
    }

    fn take_all(set: &PendingSet, lane: usize) -> (Vec<Key>, Ticket) {
        let now = Instant::now();
        let mut keys = Vec::new();
        let ticket = set.take(lane, 0, 100, now, now, &mut keys);
        (keys, ticket)
    }

    fn at(n: u64) -> ClusterTime {
        ClusterTime(n)
    }

    /// Rule 2, dirty: a change made while its key is in flight is not lost.
    #[test]
    fn a_change_during_a_flush_keeps_the_key_pending_from_that_change_on() {
        let set = PendingSet::new(1, 1);
        let now = Instant::now();
        set.ingest(0, key(1), Change::Upsert, at(5), 10, now);
        let (keys, ticket) = take_all(&set, 0);
        assert_eq!(keys.len(), 1);
        set.ingest(0, key(1), Change::Upsert, at(7), 10, now);
        set.ingest(0, key(1), Change::Delete, at(9), 10, now);
        assert!(!set.flushed(0, &key(1), ticket, Flushed::Done, now));
        assert_eq!(set.oldest(0), Some(at(7)));
        let (keys, ticket) = take_all(&set, 0);
        assert_eq!(keys.len(), 1);
        assert_eq!(set.absent(0, &key(1), ticket), AbsentVerdict::Delete);
        assert!(set.flushed(0, &key(1), ticket, Flushed::Done, now));
        assert!(set.is_empty());
        assert_eq!(set.bytes(), 0);
    }

    /// A flush of a feeder that has been replaced must not end its successor's work.
    #[test]
    fn a_flush_begun_before_a_restart_ends_nothing_after_it() {
        let set = PendingSet::new(1, 1);
        let now = Instant::now();
        set.ingest(0, key(1), Change::Upsert, at(5), 10, now);
        let (_, old) = take_all(&set, 0);
        set.clear();
        set.ingest(0, key(1), Change::Upsert, at(6), 10, now);
        let (_, new) = take_all(&set, 0);
        assert!(!set.flushed(0, &key(1), old, Flushed::Done, now));
        assert_eq!(set.absent(0, &key(1), old), AbsentVerdict::FlushAgain);
        assert!(set.contains(0, &key(1)));
        assert!(set.flushed(0, &key(1), new, Flushed::Done, now));
    }

    /// Rule 12: a waiter is woken as soon as the changes it asked about are on the archive, even
    /// if the key has changed again since.
    #[test]
    fn a_waiter_does_not_wait_for_later_changes() {
        let set = PendingSet::new(1, 1);
        let now = Instant::now();
        set.ingest(0, key(1), Change::Upsert, at(5), 10, now);
        let Lookup::Wait(mut waiter) = set.lookup(0, &key(1), at(6)) else { panic!("pending") };
        let (_, ticket) = take_all(&set, 0);
        set.ingest(0, key(1), Change::Upsert, at(8), 10, now);
        assert!(waiter.try_recv().is_err_and(|e| e == oneshot::error::TryRecvError::Empty));
        set.flushed(0, &key(1), ticket, Flushed::Done, now);
        assert!(waiter.try_recv().is_err_and(|e| e == oneshot::error::TryRecvError::Closed));
        assert!(matches!(set.lookup(0, &key(1), at(6)), Lookup::Settled));
        assert!(matches!(set.lookup(0, &key(1), at(8)), Lookup::Wait(_)));
    }

    #[test]
    fn a_retried_key_keeps_its_place_in_what_is_unapplied() {
        let set = PendingSet::new(1, 1);
        let now = Instant::now();
        set.ingest(0, key(1), Change::Upsert, at(5), 10, now);
        let (_, ticket) = take_all(&set, 0);
        let due = now + std::time::Duration::from_secs(60);
        set.flushed(0, &key(1), ticket, Flushed::Retry(Some(due)), now);
        assert_eq!(set.oldest(0), Some(at(5)));
        assert_eq!(set.next_due(0, 0), Some(due));
        assert!(take_all(&set, 0).0.is_empty());
    }
}
