//! Feeder: follows the fast tier's change stream, fills the pending set, hands keys to the
//! appliers, persists the resume token (protocol rules 1, 5 to 9, 14, 35).
//!
//! One life of a feeder is an *incarnation*: a new epoch, every lane closed to earlier epochs,
//! the token read back from the archive, then the stream. Any unexpected end begins a new one.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use halocline_cluster::feed::{ChangeFeed, FeedBatch, FeedError, FeedOp, FeedStart, ResumeToken};
use halocline_cluster::lanes::{LaneError, LaneSet};
use halocline_cluster::{ClusterError, Tier};
use halocline_tiering::key::Key;
use halocline_tiering::pending::{Change, Flushed, Ticket};
use halocline_tiering::time::ClusterTime;
use metrics::{Counter, Gauge, counter, gauge};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::applier::{Applied, Applier, Apply, ApplyError};
use crate::context::ThreadContext;
use crate::feeder_state::{FeederShared, FeederState};
use crate::fetch::find_all;
use crate::lane_use::LaneUse;
use crate::leader;
use crate::mark::Mark;
use crate::panic_injection::checkpoint;
use crate::shared::Shared;
use crate::supervisor::{Child, Drain};

/// How long a `getMore` on the change stream waits for an event. Short, so that the token moves
/// while the fast tier is idle; a barrier does not wait for it, its heartbeat wakes the stream.
const FEED_WAIT: Duration = Duration::from_millis(500);

/// Batches read ahead of the pending set. The stream itself is the buffer behind it.
const BATCHES_AHEAD: usize = 4;

/// Pause before a new incarnation, doubled up to the longest.
const RESTART_PAUSE: Duration = Duration::from_millis(100);
const RESTART_PAUSE_LONGEST: Duration = Duration::from_secs(2);

/// A barrier that has waited this long on an idle fast tier gets a heartbeat write (rule 35).
const HEARTBEAT_PAUSE: Duration = Duration::from_millis(2);

/// Lanes are written at least this often: a server forgets a session after 30 idle minutes (rule 32).
const LANE_REFRESH: Duration = Duration::from_secs(60);

/// See the module's description.
pub struct Feeder {
    context: Rc<ThreadContext>,
    state: Arc<FeederShared>,
    appliers: Rc<[Child<Applier>]>,
    draining: watch::Sender<bool>,
}

impl Feeder {
    /// A feeder on the calling thread, handing work to the given appliers.
    #[must_use]
    pub fn new(
        context: Rc<ThreadContext>,
        state: Arc<FeederShared>,
        appliers: Vec<Child<Applier>>,
    ) -> Self {
        Self { context, state, appliers: appliers.into(), draining: watch::Sender::new(false) }
    }
}

impl Actor for Feeder {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let (context, state) = (self.context.clone(), self.state.clone());
        ctx.spawn(heartbeat(context.clone()).into_actor(self));
        let life = Life {
            context,
            state,
            appliers: self.appliers.clone(),
            draining: self.draining.subscribe(),
        };
        ctx.spawn(life.live().into_actor(self).map(|(), _, ctx| ctx.stop()));
    }
}

impl Handler<Drain> for Feeder {
    type Result = ();

    /// The position is persisted once more; what is pending then is read again after the next start.
    fn handle(&mut self, _: Drain, _: &mut Self::Context) {
        self.draining.send_replace(true);
    }
}

/// What a feeder keeps over all its incarnations.
struct Life {
    context: Rc<ThreadContext>,
    state: Arc<FeederShared>,
    appliers: Rc<[Child<Applier>]>,
    draining: watch::Receiver<bool>,
}

/// Why an incarnation ended.
#[derive(Debug)]
enum End {
    /// A newer feeder has the lanes. This one never writes again.
    Superseded,
    /// The resume position has left the fast tier's oplog.
    HistoryLost(String),
    /// A tier did not answer, or the stream broke: begin anew.
    Interrupted(String),
    /// The daemon drains and the position is persisted.
    Drained,
}

impl From<ClusterError> for End {
    fn from(error: ClusterError) -> Self {
        Self::Interrupted(error.to_string())
    }
}

impl From<LaneError> for End {
    fn from(error: LaneError) -> Self {
        match error {
            LaneError::Superseded => Self::Superseded,
            other => Self::Interrupted(other.to_string()),
        }
    }
}

impl From<FeedError> for End {
    fn from(error: FeedError) -> Self {
        match error {
            FeedError::HistoryLost(message) => Self::HistoryLost(message),
            other => Self::Interrupted(other.to_string()),
        }
    }
}

impl Life {
    async fn live(self) {
        let mut pause = RESTART_PAUSE;
        loop {
            self.state.set(FeederState::Starting);
            self.context.shared.forget_history();
            let begun = Instant::now();
            let mut draining = self.draining.clone();
            let work =
                incarnation(&self.context, &self.state, &self.appliers, self.draining.clone());
            let end = match work.await {
                Ok(never) => match never {},
                Err(end) => end,
            };
            match end {
                End::Drained => return,
                End::Superseded => {
                    self.state.set(FeederState::Superseded);
                    self.state
                        .fail("another daemon has taken over the feeder's lanes on the archive");
                    return;
                }
                End::HistoryLost(message) => {
                    warn!(%message, "the feeder's position has left the fast tier's oplog; eviction stops and nothing is covered any more");
                    self.state.set(FeederState::HistoryLost);
                    // Nothing this process does by itself brings the history back.
                    let _ = draining.wait_for(|draining| *draining).await;
                    return;
                }
                End::Interrupted(message) => {
                    warn!(%message, "the feeder begins anew from its persisted position");
                }
            }
            if *self.draining.borrow() {
                return;
            }
            if begun.elapsed() > RESTART_PAUSE_LONGEST * 4 {
                pause = RESTART_PAUSE;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RESTART_PAUSE_LONGEST);
        }
    }
}

/// Rule 8, in its order, then the stream until something breaks.
async fn incarnation(
    context: &Rc<ThreadContext>,
    state: &Arc<FeederShared>,
    appliers: &[Child<Applier>],
    draining: watch::Receiver<bool>,
) -> Result<std::convert::Infallible, End> {
    let shared = &context.shared;
    let epoch = leader::next_epoch(context).await?;
    let count = shared.progress.pending().lanes();
    let lanes = LaneSet::open(&context.archive, shared.fast.set_name(), count, epoch).await?;
    let lanes = Arc::new(lanes);
    // Rule 15: nor may what an earlier feeder wrote be missed by a read of the archive.
    if let Some(at) = lanes.close_earlier_epochs(&context.archive).await? {
        shared.progress.archive_acknowledged(at.into());
    }
    // Only now may the fast tier be read for a flush.
    let started_at = write_heartbeat(context).await?;
    let mark = Mark::load(context, started_at).await?;
    shared.progress.begin_incarnation();

    let origin = Origin::find(context, &mark, started_at).await?;
    let namespaces: Vec<(String, String)> =
        shared.collections.iter().map(|c| (c.ns.db().to_owned(), c.ns.coll().to_owned())).collect();
    info!(epoch, position = %mark.time, replay_from = %origin.stream_from, "the feeder starts");

    let (sender, batches) = mpsc::channel(BATCHES_AHEAD);
    let reader = read_feed(context.clone(), origin.stream_from, namespaces, sender);
    let mut mirror = Mirror {
        context: context.clone(),
        state: state.clone(),
        lanes,
        no_older_than: started_at,
        position: mark.time,
        known_at: origin.known_at,
        started_at,
        tokens: VecDeque::new(),
        persisted: mark.time,
        idle: (0..appliers.len()).collect(),
        // Closing them to earlier epochs has just written on each.
        lane_use: LaneUse::new(count, Instant::now()),
        meters: Meters::new(),
        arrivals: VecDeque::new(),
    };
    tokio::select! {
        end = reader => Err(end),
        end = mirror.run(batches, appliers, draining) => Err(end),
    }
}

/// Where the change stream is read from: at the persisted position, or further back as far as the
/// residency record needs (rule 20).
struct Origin {
    stream_from: ClusterTime,
    /// From this moment on the residency record is whole, once the replay has caught up.
    known_at: Instant,
}

impl Origin {
    async fn find(context: &ThreadContext, mark: &Mark, now: ClusterTime) -> Result<Self, End> {
        let residency = context.shared.recent.residency();
        let first = oldest_in_oplog(context).await?;
        if mark.time < first {
            return Err(End::HistoryLost(format!(
                "the feeder had come to {}, the fast tier's oplog begins at {first}",
                mark.time
            )));
        }
        let back = u64::from(now.seconds()).saturating_sub(residency.as_secs().saturating_add(1));
        let wanted = ClusterTime(back << 32);
        let stream_from = mark.time.min(wanted.max(first));
        // How much of the period before now the oplog does not show.
        let missing = stream_from.seconds().saturating_sub(wanted.seconds());
        let known_at = Instant::now() + Duration::from_secs(u64::from(missing));
        Ok(Self { stream_from, known_at })
    }
}

/// The time of the oldest entry of the fast tier's oplog.
pub(crate) async fn oldest_in_oplog(context: &ThreadContext) -> Result<ClusterTime, ClusterError> {
    let find = bson::rawdoc! {
        "find": "oplog.rs", "sort": { "$natural": 1 }, "limit": 1, "singleBatch": true,
        "projection": { "ts": 1 },
    };
    let mut connection = context.fast.primary().await?;
    let (entries, _) = find_all(&mut connection, "local", &find).await?;
    let first = entries.first().and_then(|entry| entry.get_timestamp("ts").ok());
    first.map(ClusterTime::from).ok_or_else(|| ClusterError::Aborted {
        tier: Tier::Fast,
        message: "the oplog is empty".into(),
    })
}

/// Reads the stream into the channel; resumes by itself where the stream allows it. After an
/// election it is read at the new primary: the old one would serve it on, late by its replication.
async fn read_feed(
    context: Rc<ThreadContext>,
    from: ClusterTime,
    namespaces: Vec<(String, String)>,
    sender: mpsc::Sender<FeedBatch>,
) -> End {
    let names: Vec<(&str, &str)> =
        namespaces.iter().map(|(db, coll)| (db.as_str(), coll.as_str())).collect();
    let topology = context.fast.cluster().topology();
    let mut start = FeedStart::At(from.into());
    let mut pause = RESTART_PAUSE;
    loop {
        let opened_under = topology.borrow().generation;
        let mut feed = match ChangeFeed::open(&context.fast, start.clone(), &names).await {
            Ok(feed) => feed,
            Err(FeedError::Resumable(error)) => {
                warn!(%error, "the change stream could not be opened; trying again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RESTART_PAUSE_LONGEST);
                continue;
            }
            Err(error) => return error.into(),
        };
        pause = RESTART_PAUSE;
        loop {
            match feed.next_batch(FEED_WAIT).await {
                Ok(batch) => {
                    start = FeedStart::Resume(batch.token.clone());
                    if sender.send(batch).await.is_err() {
                        return End::Interrupted("the feeder's other half has ended".into());
                    }
                    if topology.borrow().generation != opened_under {
                        info!("the fast tier has another primary; the change stream moves there");
                        break;
                    }
                }
                Err(FeedError::Resumable(error)) => {
                    info!(%error, "the change stream broke; resuming");
                    break;
                }
                Err(error) => return error.into(),
            }
        }
    }
}

/// A client operation's position in the stream, kept until everything before it is on the archive.
struct TokenAt {
    /// Every event before this time precedes the token, so it may be persisted once `applied` has
    /// reached it.
    time: ClusterTime,
    token: ResumeToken,
}

struct Meters {
    inserts: Counter,
    updates: Counter,
    deletes: Counter,
    ddl: Counter,
    coalesced: Counter,
    busy: Gauge,
}

impl Meters {
    fn new() -> Self {
        let events = |op: &'static str| counter!("halocline_feeder_events_total", "op" => op);
        Self {
            inserts: events("insert"),
            updates: events("update"),
            deletes: events("delete"),
            ddl: events("ddl"),
            coalesced: counter!("halocline_feeder_coalesced_total"),
            busy: gauge!("halocline_feeder_appliers_busy"),
        }
    }
}

/// The half of an incarnation that owns the pending set.
struct Mirror {
    context: Rc<ThreadContext>,
    state: Arc<FeederShared>,
    lanes: Arc<LaneSet>,
    no_older_than: ClusterTime,
    /// The persisted position this incarnation began at: earlier events are on the archive already.
    position: ClusterTime,
    known_at: Instant,
    started_at: ClusterTime,
    tokens: VecDeque<TokenAt>,
    persisted: ClusterTime,
    idle: Vec<usize>,
    lane_use: LaneUse,
    meters: Meters,
    /// When what was ingested came in, for the lag.
    arrivals: VecDeque<(ClusterTime, Instant)>,
}

/// A batch on its way through an applier.
struct Flight {
    applier: usize,
    lane: usize,
    collection: usize,
    keys: Arc<[Key]>,
    ticket: Ticket,
    result: Result<Applied, ApplyError>,
}

impl Mirror {
    async fn run(
        &mut self,
        mut batches: mpsc::Receiver<FeedBatch>,
        appliers: &[Child<Applier>],
        mut draining: watch::Receiver<bool>,
    ) -> End {
        let shared = self.context.shared.clone();
        let mut flights: Flights = FuturesUnordered::new();
        // Chores run beside the loop: with the archive stopped, ingesting must go on.
        let mut persisting: Chore<ClusterTime> = None;
        let mut refreshing: Chore<Vec<usize>> = None;
        let mut persist_due = Instant::now() + shared.options.feeder.token_interval;
        let mut lanes_due = Instant::now() + LANE_REFRESH;
        let mut paused = self.state.paused();
        loop {
            checkpoint("feeder");
            let held = *paused.borrow_and_update();
            let wake = if held { None } else { self.dispatch(&shared, appliers, &mut flights) };
            let timer = wake.map_or(persist_due, |wake| wake.min(persist_due));
            let ended = tokio::select! {
                batch = batches.recv() => match batch {
                    Some(batch) => {
                        self.ingest(&shared, batch);
                        while let Ok(batch) = batches.try_recv() {
                            self.ingest(&shared, batch);
                        }
                        checkpoint("feeder/ingested");
                        Ok(())
                    }
                    None => Err(End::Interrupted("the change stream's reader has ended".into())),
                },
                Some(flight) = flights.next(), if !flights.is_empty() => self.landed(&shared, flight),
                saved = finish(&mut persisting) => saved.map(|time| self.persisted = time),
                refreshed = finish(&mut refreshing) => refreshed.map(|lanes| {
                    let now = Instant::now();
                    lanes.iter().for_each(|&lane| self.lane_use.end(lane, true, now));
                }),
                () = shared.progress.hurry_requested() => Ok(()),
                _ = paused.changed() => Ok(()),
                _ = draining.wait_for(|draining| *draining) => {
                    self.refresh(&shared);
                    return self.last_words().await;
                }
                () = tokio::time::sleep_until(timer.into()) => Ok(()),
            };
            if let Err(end) = ended {
                return end;
            }
            self.refresh(&shared);
            let now = Instant::now();
            if now >= persist_due {
                persist_due = now + shared.options.feeder.token_interval;
                if persisting.is_none() {
                    persisting = self.persist();
                }
            }
            if now >= lanes_due && refreshing.is_none() {
                lanes_due = now + LANE_REFRESH / 2;
                refreshing = self.refresh_lanes(now);
            }
        }
    }

    /// The position, persisted for the last time.
    async fn last_words(&mut self) -> End {
        if let Some(persisting) = self.persist()
            && let Err(end) = persisting.await
        {
            return end;
        }
        End::Drained
    }

    /// Lanes that have carried nothing for long get a write of their own, so that the server keeps
    /// their sessions. Until it is done they carry nothing else. Returns the lanes.
    fn refresh_lanes(&mut self, now: Instant) -> Chore<Vec<usize>> {
        let idle = self.lane_use.begin_idle(LANE_REFRESH / 2, now);
        if idle.is_empty() {
            return None;
        }
        let (context, lanes) = (self.context.clone(), self.lanes.clone());
        Some(Box::pin(async move {
            lanes.refresh(&context.archive, &idle).await?;
            Ok(idle)
        }))
    }

    /// Rule 1: a key enters the pending set before `ingested` advances.
    fn ingest(&mut self, shared: &Shared, batch: FeedBatch) {
        let now = Instant::now();
        for event in batch.events {
            let Some(collection) = shared.collection(&event.db, &event.coll) else { continue };
            let at = ClusterTime::from(event.time);
            let change = match event.op {
                FeedOp::Insert => Change::Upsert,
                FeedOp::Update | FeedOp::Replace => Change::Upsert,
                FeedOp::Delete => Change::Delete,
                // Replayed: seen by an earlier incarnation, or made before the first one began.
                FeedOp::Ddl(_) if at < self.position => continue,
                FeedOp::Ddl(ref kind) => {
                    self.meters.ddl.increment(1);
                    warn!(ns = %collection.name, ?kind, "a definition of a tiered collection changed on the fast tier");
                    continue;
                }
                FeedOp::Invalidate => continue,
            };
            // Rule 9: a move changes which tier holds a document, never the document.
            if event.is_move {
                continue;
            }
            match event.op {
                FeedOp::Insert => self.meters.inserts.increment(1),
                FeedOp::Delete => self.meters.deletes.increment(1),
                _ => self.meters.updates.increment(1),
            }
            self.state.count_event();
            let Ok(key) = Key::new(event.key.as_raw_bson_ref()) else {
                warn!(ns = %collection.name, "an event without a usable _id was passed over");
                continue;
            };
            shared.recent.touch(collection.id, &key, now);
            if at < self.position {
                continue;
            }
            let pending = shared.progress.pending();
            if pending.ingest(collection.id, key, change, at, event.bytes, now) {
                self.meters.coalesced.increment(1);
                self.state.count_coalesced();
            }
        }
        let through = ClusterTime::from(batch.through);
        let token_time = ClusterTime(through.0.saturating_add(1));
        if self.tokens.back().is_none_or(|last| last.time < token_time) {
            self.tokens.push_back(TokenAt { time: token_time, token: batch.token });
        }
        self.arrivals.push_back((through, now));
        shared.progress.advance_ingested(through);
        self.state.set_ingested(through, now);
        if through >= self.started_at && self.state.get() == FeederState::Starting {
            // The replay has caught up with this incarnation's start: nothing recent is unknown.
            shared.set_history_known(self.known_at);
            self.state.set(FeederState::Running);
        }
    }

    /// Gives due keys to idle appliers. Returns when the next key becomes due.
    fn dispatch(
        &mut self,
        shared: &Shared,
        appliers: &[Child<Applier>],
        flights: &mut Flights,
    ) -> Option<Instant> {
        let pending = shared.progress.pending();
        let now = Instant::now();
        let options = &shared.options.feeder;
        let mut wake: Option<Instant> = None;
        for collection in &shared.collections {
            let coalesce = if shared.progress.is_hurried(collection.id) {
                Duration::ZERO
            } else {
                options.coalesce
            };
            for lane in 0..pending.lanes() {
                if !self.lane_use.is_free(lane) {
                    continue;
                }
                let Some(due) = pending.next_due(lane, collection.id) else { continue };
                let due = due + coalesce;
                if due > now {
                    wake = Some(wake.map_or(due, |w| w.min(due)));
                    continue;
                }
                let Some(applier) = self.idle.pop() else { return wake };
                let queued_before = now.checked_sub(coalesce).unwrap_or(now);
                let mut keys = Vec::new();
                let ticket = pending.take(
                    lane,
                    collection.id,
                    options.batch_keys,
                    queued_before,
                    now,
                    &mut keys,
                );
                if keys.is_empty() {
                    self.idle.push(applier);
                    continue;
                }
                let Some(slot) = appliers.get(applier) else { continue };
                self.lane_use.begin(lane);
                let apply = Apply {
                    lane,
                    collection: collection.id,
                    keys: keys.into(),
                    ticket,
                    no_older_than: self.no_older_than.max(shared.progress.ingested()),
                    lanes: self.lanes.clone(),
                };
                flights.push(Box::pin(fly(slot.clone(), applier, apply)));
            }
        }
        #[allow(clippy::cast_precision_loss)]
        self.meters.busy.set((appliers.len() - self.idle.len()) as f64);
        wake
    }

    fn landed(&mut self, shared: &Shared, flight: Flight) -> Result<(), End> {
        self.idle.push(flight.applier);
        let written = match &flight.result {
            Ok(applied) => applied.upserts + applied.deletes,
            Err(_) => 0,
        };
        self.lane_use.end(flight.lane, written > 0, Instant::now());
        match flight.result {
            Ok(applied) => {
                self.state.count_mirrored(written as u64);
                shared.admission.drained(applied.settled);
                for (key, reason) in &applied.refused {
                    warn!(lane = flight.lane, key = ?key, %reason, "the archive refused a document; it will be tried again");
                }
                Ok(())
            }
            Err(ApplyError::Superseded) => Err(End::Superseded),
            Err(ApplyError::Unavailable(error)) => {
                // Unknown outcome: the lane goes on with a higher number, from the fast tier's state.
                let due = Instant::now() + RESTART_PAUSE;
                for key in flight.keys.iter() {
                    shared.progress.pending().flushed(
                        flight.collection,
                        key,
                        flight.ticket,
                        Flushed::Retry(Some(due)),
                        Instant::now(),
                    );
                }
                self.state.note_trouble(&error);
                Ok(())
            }
        }
    }

    fn refresh(&mut self, shared: &Shared) {
        let mut applied = shared.progress.ingested();
        for collection in &shared.collections {
            applied = applied.min(shared.progress.refresh_applied(collection.id));
        }
        self.state.set_applied(applied);
        let pending = shared.progress.pending().len();
        while self.arrivals.front().is_some_and(|(through, _)| *through <= applied) {
            self.arrivals.pop_front();
        }
        let lag = match self.arrivals.front() {
            Some((_, arrived)) if pending > 0 => arrived.elapsed(),
            _ => Duration::ZERO,
        };
        self.state.set_pending(pending, shared.progress.pending().bytes(), lag);
        let options = &shared.options.feeder;
        if pending > options.max_pending_keys || lag > options.max_lag {
            shared.admission.limit();
        } else if pending < options.max_pending_keys / 5 * 4 && lag < options.max_lag / 5 * 4 {
            shared.admission.lift();
        }
    }

    /// Rule 6: the persisted token never passes what is applied.
    fn persist(&mut self) -> Chore<ClusterTime> {
        let applied = self.state.applied();
        let mut newest = None;
        while self.tokens.front().is_some_and(|t| t.time <= applied) {
            newest = self.tokens.pop_front();
        }
        let TokenAt { time, token } = newest?;
        if time <= self.persisted {
            return None;
        }
        let (context, state) = (self.context.clone(), self.state.clone());
        let mark = Mark { time, token: Some(token) };
        let epoch = self.lanes.epoch();
        Some(Box::pin(async move {
            mark.save(&context, epoch).await?;
            state.token_saved();
            Ok(time)
        }))
    }
}

type Flights = FuturesUnordered<LocalBoxFuture<'static, Flight>>;
type Chore<T> = Option<LocalBoxFuture<'static, Result<T, End>>>;

/// Resolves when the chore has ended; never, when there is none.
async fn finish<T>(chore: &mut Chore<T>) -> Result<T, End> {
    let Some(running) = chore else { return std::future::pending().await };
    let result = running.await;
    *chore = None;
    result
}

/// Sends a batch to an applier, waiting for a new one if it is being restarted.
async fn fly(slot: Child<Applier>, applier: usize, apply: Apply) -> Flight {
    let (lane, collection, keys, ticket) =
        (apply.lane, apply.collection, apply.keys.clone(), apply.ticket);
    let result = match slot.send(apply).await {
        Ok(result) => result,
        Err(error) => Err(ApplyError::Unavailable(error.to_string())),
    };
    Flight { applier, lane, collection, keys, ticket, result }
}

/// Rule 35: an idle fast tier does not advance by itself, so whoever waits for its events gets
/// a write that they can come in behind.
async fn heartbeat(context: Rc<ThreadContext>) {
    let progress = &context.shared.progress;
    loop {
        progress.awaited().await;
        tokio::time::sleep(HEARTBEAT_PAUSE).await;
        while progress.is_awaited() {
            if let Err(error) = write_heartbeat(&context).await {
                warn!(%error, "the heartbeat on the fast tier failed");
                tokio::time::sleep(RESTART_PAUSE).await;
            }
            tokio::time::sleep(HEARTBEAT_PAUSE).await;
        }
    }
}

/// Writes the feeder's first position down, if there never was one. To be done before a client is
/// served: a change that precedes the first position never reaches the archive.
///
/// # Errors
/// When a tier does not answer.
pub async fn ensure_position(context: &ThreadContext) -> Result<(), ClusterError> {
    let now = write_heartbeat(context).await?;
    Mark::load(context, now).await.map(drop)
}

/// One majority write on the fast tier; its time is no older than anything acknowledged before it.
async fn write_heartbeat(context: &ThreadContext) -> Result<ClusterTime, ClusterError> {
    let update = bson::rawdoc! {
        "update": "heartbeat",
        "updates": [{ "q": { "_id": "feeder" }, "u": { "$inc": { "n": 1_i64 } }, "upsert": true }],
        "writeConcern": { "w": "majority" },
    };
    let mut connection = context.fast.primary().await?;
    let reply = connection.run("halocline", &update).await?;
    reply.cluster_time().map(ClusterTime::from).ok_or_else(|| ClusterError::Aborted {
        tier: Tier::Fast,
        message: "a reply carries no $clusterTime; is it a replica set?".into(),
    })
}
