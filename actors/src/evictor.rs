//! Evictor: takes documents that have left the window off the fast tier, once the archive provably
//! holds them (protocol rules 20, 26, 28, 30). One a tiered collection.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use bson::raw::{RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf};
use bson::{Timestamp, rawdoc};
use halocline_cluster::ClusterError;
use halocline_cluster::moves::{Find, Move};
use halocline_tiering::DatePoint;
use halocline_tiering::key::Key;
use halocline_tiering::time::ClusterTime;
use halocline_tiering::window::Place;
use metrics::{Counter, counter};
use tokio::sync::{Semaphore, watch};
use tracing::warn;

use crate::boundary::{self, Effect, Stored};
use crate::context::ThreadContext;
use crate::feeder_state::{FeederShared, FeederState};
use crate::fetch::find_all;
use crate::panic_injection::checkpoint;
use crate::shared::Collection;
use crate::supervisor::Drain;

/// How long a batch waits for the archive to catch up with its keys. The transaction is open
/// meanwhile, so it is short; keys that are late are left for the next round.
const BARRIER_WAIT: Duration = Duration::from_secs(2);

/// Pause before a round that failed is tried again.
const TROUBLE_PAUSE: Duration = Duration::from_secs(1);

/// A move carries at most this many bytes of documents, so that its transaction stays short.
pub(crate) const MOVE_BYTES: usize = 8 << 20;

/// See the module's description.
pub struct Evictor {
    context: Rc<ThreadContext>,
    collection: Arc<Collection>,
    feeder: Arc<FeederShared>,
    /// `actors.evictors` at work at once.
    turns: Arc<Semaphore>,
    paused: watch::Receiver<bool>,
}

impl Evictor {
    /// An evictor of one collection on the calling thread.
    #[must_use]
    pub fn new(
        context: Rc<ThreadContext>,
        collection: Arc<Collection>,
        feeder: Arc<FeederShared>,
        turns: Arc<Semaphore>,
        paused: watch::Receiver<bool>,
    ) -> Self {
        Self { context, collection, feeder, turns, paused }
    }
}

impl Actor for Evictor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let rounds = Rounds {
            blocked: Blocked::new(&self.collection.name),
            documents: counter!("halocline_evictor_documents_total", "ns" => self.collection.name.clone()),
            context: self.context.clone(),
            collection: self.collection.clone(),
            feeder: self.feeder.clone(),
        };
        let work = run(rounds, self.turns.clone(), self.paused.clone());
        ctx.spawn(work.into_actor(self).map(|(), _, ctx| ctx.stop()));
    }
}

impl Handler<Drain> for Evictor {
    type Result = ();

    /// A move under way is aborted: it changes nothing.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

async fn run(mut rounds: Rounds, turns: Arc<Semaphore>, mut paused: watch::Receiver<bool>) {
    let interval = rounds.context.shared.options.moves.evict_interval;
    loop {
        tokio::time::sleep(interval).await;
        checkpoint("evictor");
        if paused.wait_for(|paused| !paused).await.is_err() {
            return;
        }
        if rounds.feeder.get() != FeederState::Running || !rounds.context.shared.residency_known() {
            continue;
        }
        let Ok(_turn) = turns.acquire().await else { return };
        if let Err(error) = rounds.round().await {
            warn!(ns = %rounds.collection.name, %error, "eviction could not go on; trying again");
            tokio::time::sleep(TROUBLE_PAUSE).await;
        }
    }
}

/// Why documents that are old enough stay.
struct Blocked {
    resident: Counter,
    late: Counter,
    differs: Counter,
    missing: Counter,
    held: Counter,
    conflict: Counter,
}

impl Blocked {
    fn new(ns: &str) -> Self {
        let reason = |reason: &'static str| counter!("halocline_evictor_blocked_total", "ns" => ns.to_owned(), "reason" => reason);
        Self {
            resident: reason("changed_lately"),
            late: reason("not_mirrored"),
            differs: reason("differs"),
            missing: reason("missing_on_archive"),
            held: reason("boundary_in_use"),
            conflict: reason("conflict"),
        }
    }
}

struct Rounds {
    context: Rc<ThreadContext>,
    collection: Arc<Collection>,
    feeder: Arc<FeederShared>,
    blocked: Blocked,
    documents: Counter,
}

/// What one batch came to.
struct Batch {
    looked_at: usize,
    /// There may be others after these.
    more: bool,
    /// Everything older than this was looked at.
    reached: Option<DatePoint>,
    evicted: usize,
    /// The date of the oldest document that should go and stays. One that a client changed lately
    /// should not go.
    overdue: Option<DatePoint>,
}

/// What came of looking at a batch.
#[derive(Default)]
struct Proved {
    /// These may go.
    keys: Vec<Key>,
    /// See [`Batch::overdue`].
    overdue: Option<DatePoint>,
    /// Some were left for another move, this one being large enough.
    full: bool,
    /// The date of the first of them.
    full_at: Option<DatePoint>,
}

impl Proved {
    /// A document of that date should go and stays.
    fn stays(&mut self, at: Option<DatePoint>) {
        self.overdue = match (self.overdue, at) {
            (Some(oldest), Some(at)) => Some(oldest.min(at)),
            (oldest, at) => oldest.or(at),
        };
    }
}

impl Rounds {
    /// Evicts everything that may go now.
    async fn round(&mut self) -> Result<(), ClusterError> {
        let options = &self.context.shared.options.moves;
        let now = SystemTime::now();
        let kind = self.collection.date.kind();
        let age = self.collection.keep + options.evict_grace;
        let horizon = kind.before(kind.point_of_system_time(now), age);
        if !self.any_candidate(horizon).await? {
            self.collection.moves.overdue_seconds.store(0, Ordering::Relaxed);
            return Ok(());
        }
        let stored = self.raise(horizon).await?;
        // Rule 30: what somebody relies on under an older boundary stays until they have ended.
        let held = self.collection.boundary.held_below(horizon);
        if held.is_some() {
            self.blocked.held.increment(1);
        }
        let horizon = held.unwrap_or(horizon);
        self.evict_dated(stored, horizon).await?;
        self.evict_undated(stored, horizon).await?;
        Ok(())
    }

    async fn any_candidate(&self, horizon: DatePoint) -> Result<bool, ClusterError> {
        for filter in [
            self.collection.date.evictable_dated(None, horizon),
            self.collection.date.evictable_undated(),
        ] {
            let find = rawdoc! {
                "find": self.collection.ns.coll(),
                "filter": filter,
                "projection": { "_id": 1 },
                "limit": 1,
                "singleBatch": true,
            };
            let mut connection = self.context.fast.primary().await?;
            let (found, _) = find_all(&mut connection, self.collection.ns.db(), &find).await?;
            if !found.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Rule 30: the boundary rises before anything below it goes.
    async fn raise(&self, horizon: DatePoint) -> Result<Stored, ClusterError> {
        let mut stored = boundary::load(&self.context, &self.collection).await?;
        if stored.complete_from.is_some_and(|from| from < horizon) {
            stored = boundary::raise(&self.context, &self.collection, horizon).await?;
        }
        self.collection.boundary.publish(stored.raise_epoch, stored.complete_from);
        Ok(stored)
    }

    async fn evict_dated(
        &mut self,
        stored: Stored,
        horizon: DatePoint,
    ) -> Result<(), ClusterError> {
        // Whatever the index's direction: a batch in which everything stays is looked past by date.
        let sort = self.collection.date.oldest_first();
        let mut from = None;
        let mut overdue: Option<DatePoint> = None;
        let mut limit = self.context.shared.options.moves.batch_documents;
        loop {
            let filter = self.collection.date.evictable_dated(from, horizon);
            let effect = Effect::Evicts(Some(horizon));
            let batch = self.batch(stored, effect, &filter, Some(&sort), limit).await?;
            let Some(batch) = batch else { return Ok(()) };
            overdue = overdue.or(batch.overdue);
            if !batch.more {
                self.note_overdue(overdue, horizon);
                return Ok(());
            }
            // The rest comes after what has just been evicted.
            let rest = batch.reached.filter(|_| batch.evicted > 0);
            self.note_overdue(overdue.or(rest), horizon);
            if batch.reached.is_some() && batch.reached != from {
                from = batch.reached;
            } else if batch.evicted == 0 {
                // More documents of one date than a batch, and all stay: look further.
                limit *= 2;
            }
            tokio::time::sleep(self.context.shared.options.moves.batch_pause).await;
        }
    }

    async fn evict_undated(
        &mut self,
        stored: Stored,
        _horizon: DatePoint,
    ) -> Result<(), ClusterError> {
        let limit = self.context.shared.options.moves.batch_documents;
        let filter = self.collection.date.evictable_undated();
        loop {
            let effect = Effect::Evicts(None);
            let batch = self.batch(stored, effect, &filter, None, limit).await?;
            let Some(batch) = batch else { return Ok(()) };
            let left = batch.looked_at - batch.evicted;
            self.collection.moves.undated.store(left as u64, Ordering::Relaxed);
            if !batch.more || batch.evicted == 0 {
                return Ok(());
            }
            tokio::time::sleep(self.context.shared.options.moves.batch_pause).await;
        }
    }

    fn note_overdue(&self, oldest: Option<DatePoint>, horizon: DatePoint) {
        let units = oldest.map_or(0, |at| horizon.0.saturating_sub(at.0).max(0));
        let a_second = self.collection.date.kind().units(Duration::from_secs(1)).max(1);
        let seconds = u64::try_from(units / a_second).unwrap_or(0);
        self.collection.moves.overdue_seconds.store(seconds, Ordering::Relaxed);
    }

    /// One move. `None`: a conflict with somebody's work; the rest waits for the next round.
    async fn batch(
        &mut self,
        stored: Stored,
        effect: Effect,
        filter: &RawDocumentBuf,
        sort: Option<&RawDocument>,
        limit: usize,
    ) -> Result<Option<Batch>, ClusterError> {
        let collection = self.collection.clone();
        let Some(uuid) = collection.fast_uuid.load_full() else { return Ok(None) };
        let mut moving = Move::open(&self.context.fast, &self.context.moves).await?;
        let snapshot = ClusterTime::from(moving.snapshot_time());
        let query = Find { sort, limit: i64::try_from(limit).ok(), ..Find::new(filter) };
        let found = moving.find(collection.ns.db(), collection.ns.coll(), query).await?;
        let looked_at = found.len();
        let newest = found.iter().filter_map(|document| self.date_of(document)).max();
        let Proved { keys: proved, overdue, full, full_at } = self.proved(found, snapshot).await?;
        let mut batch = Batch {
            looked_at,
            more: looked_at >= limit || full,
            reached: full_at.or(newest),
            evicted: 0,
            overdue,
        };
        // A writer that relies on a key has pinned it by now, or waits until this move has ended.
        let recent = &self.context.shared.recent;
        let _leaving = recent.announce(collection.id, &proved);
        let now = Instant::now();
        let proved: Vec<Key> =
            proved.into_iter().filter(|key| !recent.contains(collection.id, key, now)).collect();
        if proved.is_empty() {
            moving.abort().await;
            return Ok(Some(batch));
        }
        let ids: Vec<RawBson> = proved.iter().map(|key| RawBson::from(key.value())).collect();
        let outcome = async {
            let context = &self.context;
            if !boundary::write_in(context, &mut moving, &collection, stored, effect).await? {
                return Ok(None);
            }
            moving.delete_ids(collection.ns.db(), collection.ns.coll(), *uuid, ids).await.map(Some)
        };
        match outcome.await {
            Ok(Some(_)) => {}
            Ok(None) => {
                moving.abort().await;
                return Ok(None);
            }
            Err(error) if error.is_write_conflict() || error.is_transient_transaction() => {
                self.blocked.conflict.increment(1);
                moving.abort().await;
                return Ok(None);
            }
            Err(error) => {
                moving.abort().await;
                return Err(error);
            }
        }
        checkpoint("evictor/deleted");
        match moving.commit().await {
            Ok(()) => {}
            Err(error) if error.is_write_conflict() || error.is_transient_transaction() => {
                self.blocked.conflict.increment(1);
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        batch.evicted = proved.len();
        self.documents.increment(batch.evicted as u64);
        collection.moves.evicted.fetch_add(batch.evicted as u64, Ordering::Relaxed);
        Ok(Some(batch))
    }

    /// The keys that may go: not changed lately, nothing pending as of the snapshot, and the
    /// archive's majority copy equal byte by byte.
    async fn proved(
        &self,
        found: Vec<RawDocumentBuf>,
        snapshot: ClusterTime,
    ) -> Result<Proved, ClusterError> {
        let shared = &self.context.shared;
        let mut proved = Proved::default();
        let until = Instant::now() + BARRIER_WAIT;
        let caught_up =
            tokio::time::timeout_at(until.into(), shared.progress.wait_ingested(snapshot)).await;
        if caught_up.is_err() {
            self.blocked.late.increment(found.len() as u64);
            proved.overdue = found.iter().filter_map(|document| self.date_of(document)).min();
            return Ok(proved);
        }
        let mut ours = HashMap::new();
        let mut bytes = 0;
        for document in found {
            let Ok(key) = Key::of(&document) else { continue };
            // Asked after the snapshot's events are in: a change before it is known by now, one
            // after it conflicts.
            if shared.recent.contains(self.collection.id, &key, Instant::now()) {
                self.blocked.resident.increment(1);
                continue;
            }
            let barrier = shared.progress.point_barrier(self.collection.id, &key, snapshot);
            if tokio::time::timeout_at(until.into(), barrier).await.is_err() {
                self.blocked.late.increment(1);
                proved.stays(self.date_of(&document));
                continue;
            }
            bytes += document.as_bytes().len();
            if bytes > MOVE_BYTES && !ours.is_empty() {
                proved.full = true;
                proved.full_at = self.date_of(&document);
                break;
            }
            ours.insert(key, document);
        }
        if ours.is_empty() {
            return Ok(proved);
        }
        let theirs = self.archive_copies(ours.keys()).await?;
        for (key, document) in ours {
            match theirs.get(&key) {
                Some(copy) if copy.as_bytes() == document.as_bytes() => proved.keys.push(key),
                // Changed after the snapshot, and the archive has the change by now.
                _ if shared.recent.contains(self.collection.id, &key, Instant::now()) => {
                    self.blocked.resident.increment(1);
                }
                Some(_) => {
                    proved.stays(self.date_of(&document));
                    self.blocked.differs.increment(1);
                    self.collection.moves.mismatches.fetch_add(1, Ordering::Relaxed);
                    warn!(ns = %self.collection.name, ?key, "the tiers differ, so the document stays on the fast tier; compare both copies and mend the archive's");
                }
                // Removed by the archive's own TTL index, or by somebody who wrote past Halocline.
                None => {
                    proved.stays(self.date_of(&document));
                    self.blocked.missing.increment(1);
                }
            }
        }
        Ok(proved)
    }

    fn date_of(&self, document: &RawDocument) -> Option<DatePoint> {
        match self.collection.date.place(document) {
            Some(Place::At(at)) => Some(at),
            _ => None,
        }
    }

    async fn archive_copies<'k>(
        &self,
        keys: impl Iterator<Item = &'k Key>,
    ) -> Result<HashMap<Key, RawDocumentBuf>, ClusterError> {
        let mut ids = RawArrayBuf::new();
        for key in keys {
            ids.push(key.value());
        }
        let after: Timestamp = self.context.shared.progress.archive_time().into();
        let mut concern = rawdoc! { "level": "majority" };
        if after.time > 0 {
            concern.append(bson::cstr!("afterClusterTime"), RawBsonRef::Timestamp(after));
        }
        let find = rawdoc! {
            "find": self.collection.ns.coll(),
            "filter": { "_id": { "$in": ids } },
            "hint": { "_id": 1 },
            "readConcern": concern,
        };
        let mut connection = self.context.archive.primary().await?;
        let (found, _) = find_all(&mut connection, self.collection.ns.db(), &find).await?;
        Ok(found.into_iter().filter_map(|d| Some((Key::of(&d).ok()?, d))).collect())
    }
}
