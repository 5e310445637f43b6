//! Warmer: copies the window from the archive to the fast tier, newest first, and lowers the
//! boundary with every batch in the same transaction (protocol rules 27 to 29). One a tiered
//! collection.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use bson::raw::{RawArrayBuf, RawDocumentBuf};
use bson::rawdoc;
use halocline_cluster::ClusterError;
use halocline_cluster::moves::{Find, Move};
use halocline_tiering::key::Key;
use halocline_tiering::time::ClusterTime;
use halocline_tiering::window::Place;
use halocline_tiering::{DateField, DatePoint};
use metrics::{Counter, Gauge, counter, gauge};
use tokio::sync::{Semaphore, watch};
use tracing::{info, warn};

use crate::boundary::{self, Effect, Stored};
use crate::context::ThreadContext;
use crate::evictor::MOVE_BYTES;
use crate::execute::faultin::archive_read_concern;
use crate::fetch::find_all;
use crate::panic_injection::checkpoint;
use crate::shared::Collection;
use crate::supervisor::Drain;

/// How often a warm collection is looked at again: a longer `keep` lowers the target.
const IDLE_PAUSE: Duration = Duration::from_secs(2);

/// Pause before a batch that failed is tried again.
const TROUBLE_PAUSE: Duration = Duration::from_millis(500);

/// How long a batch waits for the archive to catch up with keys the fast tier lacks.
const BARRIER_WAIT: Duration = Duration::from_secs(10);

/// Weight of the newest batch in the speed behind the ETA.
const SPEED_WEIGHT: f64 = 0.2;

/// See the module's description.
pub struct Warmer {
    context: Rc<ThreadContext>,
    collection: Arc<Collection>,
    /// `actors.warmers` at work at once.
    turns: Arc<Semaphore>,
    paused: watch::Receiver<bool>,
}

impl Warmer {
    /// A warmer of one collection on the calling thread.
    #[must_use]
    pub fn new(
        context: Rc<ThreadContext>,
        collection: Arc<Collection>,
        turns: Arc<Semaphore>,
        paused: watch::Receiver<bool>,
    ) -> Self {
        Self { context, collection, turns, paused }
    }
}

impl Actor for Warmer {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let ns = self.collection.name.clone();
        let work = Work {
            context: self.context.clone(),
            collection: self.collection.clone(),
            documents: counter!("halocline_warmer_documents_total", "ns" => ns.clone()),
            conflicts: counter!("halocline_warmer_conflicts_total", "ns" => ns.clone()),
            progress: gauge!("halocline_warmer_progress_ratio", "ns" => ns.clone()),
            boundary: gauge!("halocline_boundary_timestamp_seconds", "ns" => ns),
            above_done: false,
            batch_size: None,
            speed: None,
        };
        let work = run(work, self.turns.clone(), self.paused.clone());
        ctx.spawn(work.into_actor(self).map(|(), _, ctx| ctx.stop()));
    }
}

impl Handler<Drain> for Warmer {
    type Result = ();

    /// A move under way is aborted: it changes nothing.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

async fn run(mut work: Work, turns: Arc<Semaphore>, mut paused: watch::Receiver<bool>) {
    let mut warm = false;
    loop {
        checkpoint("warmer");
        if paused.wait_for(|paused| !paused).await.is_err() {
            return;
        }
        let step = {
            let Ok(_turn) = turns.acquire().await else { return };
            work.step().await
        };
        match step {
            Ok(Step::Copied) => {
                warm = false;
                tokio::time::sleep(work.context.shared.options.moves.batch_pause).await;
            }
            Ok(Step::Warm) => {
                if !warm {
                    warm = true;
                    info!(ns = %work.collection.name, "warm: the fast tier holds the whole window");
                }
                tokio::time::sleep(IDLE_PAUSE).await;
            }
            Err(error) => {
                warn!(ns = %work.collection.name, %error, "warm-up could not go on; trying again");
                tokio::time::sleep(TROUBLE_PAUSE).await;
            }
        }
    }
}

enum Step {
    /// A batch has been copied; there may be more.
    Copied,
    /// The boundary has reached the window.
    Warm,
}

struct Work {
    context: Rc<ThreadContext>,
    collection: Arc<Collection>,
    documents: Counter,
    conflicts: Counter,
    progress: Gauge,
    boundary: Gauge,
    /// What sorts above the date's type has been copied.
    above_done: bool,
    /// Documents a batch, from their average size.
    batch_size: Option<usize>,
    /// Units of the date a second.
    speed: Option<f64>,
}

impl Work {
    async fn step(&mut self) -> Result<Step, ClusterError> {
        let collection = self.collection.clone();
        let field = &collection.date;
        let stored = boundary::load(&self.context, &collection).await?;
        collection.boundary.publish(stored.raise_epoch, stored.complete_from);
        let now = field.kind().point_of_system_time(SystemTime::now());
        let target = field.kind().before(now, collection.keep);
        self.report(stored.complete_from, target, now);
        if stored.complete_from.is_some_and(|from| from <= target) {
            return Ok(Step::Warm);
        }
        if stored.complete_from.is_none() && !self.above_done {
            self.copy_all(stored, &field.above_type()).await?;
            self.above_done = true;
            return Ok(Step::Copied);
        }
        let begun = Instant::now();
        let filter = field.warmable(target, stored.complete_from);
        let size = self.batch_size().await;
        let keys = self.newest(&filter, size).await?;
        let reached = match keys.last() {
            Some((_, at)) if keys.len() >= size => {
                // More may follow at the last date: only what is newer is finished.
                let finished = DatePoint(at.0.saturating_add(1));
                let progress = keys.first().is_some_and(|(_, first)| *first >= finished);
                if !progress {
                    return self.copy_one_date(stored, field, *at).await;
                }
                finished
            }
            _ => target,
        };
        let keys: Vec<Key> =
            keys.into_iter().filter(|(_, at)| *at >= reached).map(|(key, _)| key).collect();
        self.move_keys(stored, &keys, Some(reached)).await?;
        self.note_speed(stored.complete_from.unwrap_or(now), reached, begun);
        Ok(Step::Copied)
    }

    /// Keys and dates of the newest documents that match, on the archive.
    async fn newest(
        &self,
        filter: &RawDocumentBuf,
        limit: usize,
    ) -> Result<Vec<(Key, DatePoint)>, ClusterError> {
        let field = &self.collection.date;
        let mut projection = field.oldest_first();
        if field.path() != "_id" {
            projection.append(bson::cstr!("_id"), 1);
        }
        let find = rawdoc! {
            "find": self.collection.ns.coll(),
            "filter": filter.clone(),
            "sort": field.newest_first(),
            "projection": projection,
            "limit": i64::try_from(limit).unwrap_or(i64::MAX),
            "readConcern": { "level": "majority" },
        };
        let mut connection = self.context.archive.primary().await?;
        let (found, _) = find_all(&mut connection, self.collection.ns.db(), &find).await?;
        let dated = found.iter().filter_map(|document| {
            let Some(Place::At(at)) = field.place(document) else { return None };
            Some((Key::of(document).ok()?, at))
        });
        Ok(dated.collect())
    }

    /// A date shared by more documents than a batch: they are copied by several moves, and the
    /// boundary passes it with the last.
    async fn copy_one_date(
        &mut self,
        stored: Stored,
        field: &DateField,
        at: DatePoint,
    ) -> Result<Step, ClusterError> {
        let filter = field.warmable(at, Some(DatePoint(at.0.saturating_add(1))));
        self.copy_all(stored, &filter).await?;
        self.move_keys(stored, &[], Some(at)).await?;
        Ok(Step::Copied)
    }

    /// Copies everything on the archive that matches, without moving the boundary. A document that
    /// changes meanwhile changes on the fast tier, so it is there already.
    async fn copy_all(
        &mut self,
        stored: Stored,
        filter: &RawDocumentBuf,
    ) -> Result<(), ClusterError> {
        let find = rawdoc! {
            "find": self.collection.ns.coll(),
            "filter": filter.clone(),
            "projection": { "_id": 1 },
            "readConcern": { "level": "majority" },
        };
        let mut connection = self.context.archive.primary().await?;
        let (found, _) = find_all(&mut connection, self.collection.ns.db(), &find).await?;
        drop(connection);
        let keys: Vec<Key> = found.iter().filter_map(|d| Key::of(d).ok()).collect();
        let size = self.batch_size().await;
        for keys in keys.chunks(size) {
            self.move_keys(stored, keys, None).await?;
            tokio::time::sleep(self.context.shared.options.moves.batch_pause).await;
        }
        Ok(())
    }

    /// Moves that copy the keys and, with the last, lower the boundary. A conflict means that a
    /// client works on one of the keys; then all is looked at again.
    async fn move_keys(
        &mut self,
        stored: Stored,
        keys: &[Key],
        lower_to: Option<DatePoint>,
    ) -> Result<(), ClusterError> {
        loop {
            match self.try_move(stored, keys, lower_to).await {
                Ok(copied) => {
                    self.documents.increment(copied as u64);
                    self.collection.moves.warmed.fetch_add(copied as u64, Ordering::Relaxed);
                    if let Some(from) = lower_to {
                        self.collection.boundary.publish(stored.raise_epoch, Some(from));
                    }
                    return Ok(());
                }
                Err(error)
                    if error.is_write_conflict()
                        || error.is_duplicate_key()
                        || error.is_transient_transaction() =>
                {
                    self.conflicts.increment(1);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn try_move(
        &self,
        stored: Stored,
        keys: &[Key],
        lower_to: Option<DatePoint>,
    ) -> Result<usize, ClusterError> {
        let collection = &self.collection;
        let Some(uuid) = collection.fast_uuid.load_full() else {
            return Err(self.not_ready("the collection is not on the fast tier yet"));
        };
        let mut moving = Move::open(&self.context.fast, &self.context.moves).await?;
        let outcome = async {
            let absent = self.absent_in(&mut moving, keys).await?;
            let snapshot = ClusterTime::from(moving.snapshot_time());
            let progress = &self.context.shared.progress;
            for key in &absent {
                let barrier = progress.point_barrier(collection.id, key, snapshot);
                if tokio::time::timeout(BARRIER_WAIT, barrier).await.is_err() {
                    return Err(self.not_ready("the archive is too far behind the fast tier"));
                }
            }
            let documents = self.archive_documents(&absent).await?;
            if !documents.is_empty() {
                moving.insert(collection.ns.db(), collection.ns.coll(), *uuid, &documents).await?;
            }
            let effect = lower_to.map_or(Effect::Copies, Effect::Lowers);
            let context = &self.context;
            if !boundary::write_in(context, &mut moving, collection, stored, effect).await? {
                return Err(
                    self.not_ready("the boundary was raised, or documents evicted, meanwhile")
                );
            }
            Ok(documents.len())
        };
        match outcome.await {
            Ok(copied) => {
                checkpoint("warmer/copied");
                moving.commit().await.map(|()| copied)
            }
            Err(error) => {
                moving.abort().await;
                Err(error)
            }
        }
    }

    fn not_ready(&self, why: &str) -> ClusterError {
        ClusterError::Aborted {
            tier: halocline_cluster::Tier::Fast,
            message: format!("{}: {why}", self.collection.name),
        }
    }

    async fn absent_in(&self, moving: &mut Move, keys: &[Key]) -> Result<Vec<Key>, ClusterError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let filter = rawdoc! { "_id": { "$in": ids(keys) } };
        let only_id = rawdoc! { "_id": 1 };
        let query = Find { projection: Some(&only_id), ..Find::new(&filter) };
        let ns = &self.collection.ns;
        let present: std::collections::HashSet<Key> = moving
            .find(ns.db(), ns.coll(), query)
            .await?
            .iter()
            .filter_map(|d| Key::of(d).ok())
            .collect();
        Ok(keys.iter().filter(|key| !present.contains(*key)).cloned().collect())
    }

    async fn archive_documents(&self, keys: &[Key]) -> Result<Vec<RawDocumentBuf>, ClusterError> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let find = rawdoc! {
            "find": self.collection.ns.coll(),
            "filter": { "_id": { "$in": ids(keys) } },
            "hint": { "_id": 1 },
            "readConcern": archive_read_concern(&self.context),
        };
        let mut connection = self.context.archive.primary().await?;
        let (found, _) = find_all(&mut connection, self.collection.ns.db(), &find).await?;
        Ok(found)
    }

    /// Documents a batch: bounded in number, and in bytes by the collection's average size.
    async fn batch_size(&mut self) -> usize {
        if let Some(size) = self.batch_size {
            return size;
        }
        let most = self.context.shared.options.moves.batch_documents.max(1);
        let stats = rawdoc! { "collStats": self.collection.ns.coll() };
        let average = async {
            let mut connection = self.context.archive.primary().await?;
            connection.run(self.collection.ns.db(), &stats).await
        };
        let average = match average.await {
            Ok(reply) => reply.get_number("avgObjSize").and_then(|n| usize::try_from(n).ok()),
            Err(error) => {
                warn!(ns = %self.collection.name, %error, "the average document size is not known; small batches");
                Some(MOVE_BYTES / 64)
            }
        };
        let size = (MOVE_BYTES / average.unwrap_or(1024).max(1)).clamp(1, most);
        self.batch_size = Some(size);
        size
    }

    #[allow(clippy::cast_precision_loss)]
    fn note_speed(&mut self, before: DatePoint, after: DatePoint, begun: Instant) {
        let units = before.0.saturating_sub(after.0).max(0) as f64;
        let speed = units / begun.elapsed().as_secs_f64().max(0.001);
        self.speed = Some(match self.speed {
            Some(known) => known + SPEED_WEIGHT * (speed - known),
            None => speed,
        });
    }

    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn report(&self, boundary: Option<DatePoint>, target: DatePoint, now: DatePoint) {
        let moves = &self.collection.moves;
        let whole = (now.0 - target.0).max(1) as f64;
        let left = boundary.map_or(whole, |from| (from.0.min(now.0) - target.0).max(0) as f64);
        let ratio = (1.0 - left / whole).clamp(0.0, 1.0);
        self.progress.set(ratio);
        moves.warm_permille.store((ratio * 1000.0) as u64, Ordering::Relaxed);
        let eta = self.speed.filter(|speed| *speed > 0.0).map_or(0.0, |speed| left / speed);
        moves.warm_eta_millis.store((eta * 1000.0) as u64, Ordering::Relaxed);
        let a_second = self.collection.date.kind().units(Duration::from_secs(1)).max(1) as f64;
        if let Some(from) = boundary {
            self.boundary.set(from.0 as f64 / a_second);
        }
    }
}

fn ids(keys: &[Key]) -> RawArrayBuf {
    let mut ids = RawArrayBuf::new();
    for key in keys {
        ids.push(key.value());
    }
    ids
}
