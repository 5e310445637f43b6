//! How far the feeder has come, and the barriers that wait for it (protocol rules 12, 14, 15, 35).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::Notify;

use crate::key::Key;
use crate::pending::{CollectionId, Lookup, PendingSet};
use crate::time::{ClusterTime, Gate};

/// What connection threads see of the feeder. Shared; reading it takes no lock.
#[derive(Debug)]
pub struct Progress {
    /// Every client change up to here is on the archive or in the pending set.
    ingested: Gate,
    /// One a collection: every change of it up to here is on the archive.
    applied: Box<[Gate]>,
    /// Range barriers waiting, one count a collection: the feeder flushes these at once.
    hurried: Box<[AtomicUsize]>,
    /// Changes whenever a feeder begins anew.
    incarnation: AtomicU64,
    /// The archive's own time of the newest acknowledged flush.
    archive_time: AtomicU64,
    /// Wakes whoever advances an idle fast tier.
    stuck: Notify,
    /// Wakes the feeder to look at hurried collections.
    hurry: Notify,
    pending: PendingSet,
}

impl Progress {
    /// For the given numbers of lanes and tiered collections.
    #[must_use]
    pub fn new(lanes: usize, collections: usize) -> Self {
        Self {
            ingested: Gate::default(),
            applied: (0..collections).map(|_| Gate::default()).collect(),
            hurried: (0..collections).map(|_| AtomicUsize::new(0)).collect(),
            incarnation: AtomicU64::new(0),
            archive_time: AtomicU64::new(0),
            stuck: Notify::new(),
            hurry: Notify::new(),
            pending: PendingSet::new(lanes, collections),
        }
    }

    /// The pending set.
    #[must_use]
    pub fn pending(&self) -> &PendingSet {
        &self.pending
    }

    /// Every change up to here is in.
    #[must_use]
    pub fn ingested(&self) -> ClusterTime {
        self.ingested.get()
    }

    /// Every change of the collection up to here is on the archive.
    #[must_use]
    pub fn applied(&self, collection: CollectionId) -> ClusterTime {
        self.applied.get(collection).map_or(ClusterTime::ZERO, Gate::get)
    }

    /// Archive reads after a barrier must be no older than this (the archive's own clock).
    #[must_use]
    pub fn archive_time(&self) -> ClusterTime {
        ClusterTime(self.archive_time.load(Ordering::SeqCst))
    }

    /// A feeder begins anew: nothing it said before counts any more. The order matters: a barrier
    /// reads incarnation, ingested, pending, incarnation, so whatever it saw of the old feeder
    /// comes with a changed incarnation.
    pub fn begin_incarnation(&self) {
        self.ingested.reset();
        self.incarnation.fetch_add(1, Ordering::SeqCst);
        self.pending.clear();
    }

    /// The feeder has every event up to `to` in the pending set.
    pub fn advance_ingested(&self, to: ClusterTime) {
        self.ingested.advance(to);
    }

    /// Recomputes what is applied from the pending set. `ingested` is read first, so a change
    /// that arrives in between only makes the answer more cautious.
    pub fn refresh_applied(&self, collection: CollectionId) -> ClusterTime {
        let ingested = self.ingested.get();
        let applied = match self.pending.oldest(collection) {
            Some(oldest) => oldest.before().min(ingested),
            None => ingested,
        };
        if let Some(gate) = self.applied.get(collection) {
            gate.advance(applied);
        }
        applied
    }

    /// The archive acknowledged a flush at its own time `at`.
    pub fn archive_acknowledged(&self, at: ClusterTime) {
        self.archive_time.fetch_max(at.0, Ordering::SeqCst);
    }

    /// Whether someone waits for events of the fast tier to come in.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.ingested.is_awaited()
    }

    /// Resolves when someone begins to wait for events.
    pub async fn awaited(&self) {
        self.stuck.notified().await;
    }

    /// Whether a range barrier waits for the collection.
    #[must_use]
    pub fn is_hurried(&self, collection: CollectionId) -> bool {
        self.hurried.get(collection).is_some_and(|n| n.load(Ordering::SeqCst) > 0)
    }

    /// Resolves when a range barrier or a point barrier begins to wait for flushes.
    pub async fn hurry_requested(&self) {
        self.hurry.notified().await;
    }

    /// Waits until every event up to `at` is in.
    pub async fn wait_ingested(&self, at: ClusterTime) {
        self.ingested.reached_telling(at, || self.stuck.notify_one()).await;
    }

    /// Point barrier (rule 12): afterwards the archive's answer for the key, read at or after
    /// [`archive_time`](Self::archive_time), reflects every change of it up to `at`.
    pub async fn point_barrier(&self, collection: CollectionId, key: &Key, at: ClusterTime) {
        loop {
            if self.applied(collection) >= at {
                return;
            }
            let incarnation = self.incarnation.load(Ordering::SeqCst);
            self.wait_ingested(at).await;
            // In this order: ingested first, pending second.
            match self.pending.lookup(collection, key, at) {
                Lookup::Settled => {
                    if self.incarnation.load(Ordering::SeqCst) == incarnation {
                        return;
                    }
                }
                Lookup::Wait(changed) => {
                    let _hurry = self.hurry_collection(collection);
                    let _ = changed.await;
                }
            }
        }
    }

    /// Range barrier (rule 14): afterwards the archive reflects every change of the collection up to `at`.
    pub async fn range_barrier(&self, collection: CollectionId, at: ClusterTime) {
        let Some(gate) = self.applied.get(collection) else { return };
        if gate.get() >= at {
            return;
        }
        let _hurry = self.hurry_collection(collection);
        self.wait_ingested(at).await;
        gate.reached(at).await;
    }

    fn hurry_collection(&self, collection: CollectionId) -> Hurry<'_> {
        let count = self.hurried.get(collection);
        if let Some(count) = count {
            count.fetch_add(1, Ordering::SeqCst);
        }
        self.hurry.notify_one();
        Hurry { count }
    }
}

/// Someone waits for a collection's flushes; dropped when the wait ends or is given up.
struct Hurry<'a> {
    count: Option<&'a AtomicUsize>,
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.count {
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}
