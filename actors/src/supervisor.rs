//! Supervision: builds actors from factories, watches their tasks, restarts them with jittered
//! backoff up to a failure limit, publishes their addresses and drains the daemon in order.
//! What an actor does lives in its own file; client connections are counted here but never
//! restarted, see `connection`.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actix::dev::{MessageResult, ToEnvelope};
use actix::{
    Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, MailboxError, Message, WrapFuture,
};
use actix_rt::{Arbiter, ArbiterHandle};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinError;
use tokio::time::{sleep, timeout_at};

use crate::status::ActorStatus;

/// A drain ends at its deadline; its report may take this much longer to arrive.
const REPORT_GRACE: Duration = Duration::from_millis(200);

/// How a child that ends is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Runs until the daemon drains: a panic and a stop both lead to a restart.
    Always,
    /// A panic leads to a restart, a stop means that the work is done.
    OnPanic,
    /// Never started again.
    Never,
}

/// When a child stops during a drain. The order of the variants is the order of the drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DrainStage {
    /// Takes new work from outside; stops first.
    Acceptor,
    /// Finishes what clients have asked for.
    Connections,
    /// Everything the connections rely on; stops last.
    Workers,
}

impl DrainStage {
    const ALL: [Self; 3] = [Self::Acceptor, Self::Connections, Self::Workers];

    /// The part of the whole deadline that is over when this stage must be. A stuck stage may not
    /// eat the time of those after it: the feeder still has to persist its token.
    fn share(self) -> f64 {
        match self {
            Self::Acceptor => 0.1,
            Self::Connections => 0.75,
            Self::Workers => 0.95,
        }
    }
}

/// When restarts happen and when they are given up.
#[derive(Debug, Clone)]
pub struct SupervisorOptions {
    /// Panics of one child within `failure_window` that mark the daemon failed; at least 1.
    pub failure_limit: u32,
    /// See `failure_limit`.
    pub failure_window: Duration,
    /// Wait before the first restart, before jitter.
    pub backoff_first: Duration,
    /// Longest wait before a restart, before jitter.
    pub backoff_max: Duration,
}

impl SupervisorOptions {
    /// The usual backoff with this failure limit.
    #[must_use]
    pub fn new(failure_limit: u32, failure_window: Duration) -> Self {
        Self {
            failure_limit: failure_limit.max(1),
            failure_window,
            // Long enough not to starve the thread, short enough that users barely wait.
            backoff_first: Duration::from_millis(50),
            backoff_max: Duration::from_secs(10),
        }
    }

    /// The wait before a restart when the child has ended `ends` times within the window, this end
    /// included. Doubles with every end, and stays small enough that a child which always panics
    /// reaches the failure limit inside the window.
    fn backoff(&self, ends: usize, jitter: f64) -> Duration {
        let limit = self.failure_limit.max(1);
        let ceiling = self.backoff_max.min(self.failure_window / (2 * limit));
        let doublings = u32::try_from(ends.saturating_sub(1)).unwrap_or(u32::MAX).min(20);
        self.backoff_first.saturating_mul(1 << doublings).min(ceiling).mul_f64(jitter)
    }
}

/// Tells a child, or the supervisor itself, to finish what it has begun, take nothing new and stop.
/// A child that is still there at `until` is cut off.
#[derive(Debug, Clone, Copy)]
pub struct Drain {
    /// When the child must be gone.
    pub until: Instant,
}

impl Message for Drain {
    type Result = ();
}

/// What a child is: everything but its factory.
#[derive(Debug, Clone)]
pub struct ChildSpec {
    /// Which child this is, such as `applier-3`; for logs and messages.
    pub name: String,
    /// The `actor` label of metrics and status, such as `applier`.
    pub kind: &'static str,
    /// What follows its end.
    pub policy: RestartPolicy,
    /// When it stops in a drain.
    pub stage: DrainStage,
    /// The thread it runs on.
    pub arbiter: ArbiterHandle,
}

/// What a factory may use to build a fresh actor.
#[derive(Debug, Clone)]
pub struct ChildContext {
    /// See [`ChildSpec::name`].
    pub name: String,
    /// See [`ChildSpec::kind`].
    pub kind: &'static str,
    /// 1 for the first actor of this child, one more after every restart.
    pub incarnation: u64,
    /// The supervisor.
    pub supervisor: SupervisorHandle,
}

/// Why a message did not get its answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChildError {
    /// The child has ended for good: drained, or given up.
    #[error("{0} has ended and will not come back")]
    Gone(Arc<str>),
    /// The actor ended while it had the message: whether it acted on it is unknown.
    #[error("{0} was restarted while it worked on this; whether it took effect is unknown")]
    Interrupted(Arc<str>),
}

/// A supervised actor as its users see it: an address that changes with every restart.
pub struct Child<A: Actor> {
    name: Arc<str>,
    addresses: watch::Receiver<Option<Addr<A>>>,
}

impl<A: Actor> Clone for Child<A> {
    fn clone(&self) -> Self {
        Self { name: self.name.clone(), addresses: self.addresses.clone() }
    }
}

impl<A: Actor> fmt::Debug for Child<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Child").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<A: Actor> Child<A> {
    /// The child's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address, if the actor runs now.
    #[must_use]
    pub fn current(&self) -> Option<Addr<A>> {
        self.addresses.borrow().clone().filter(Addr::connected)
    }

    /// The address; during a gap, waits for the next actor.
    pub async fn addr(&self) -> Result<Addr<A>, ChildError> {
        let mut addresses = self.addresses.clone();
        loop {
            let published = addresses.borrow_and_update().clone();
            if let Some(addr) = published.filter(Addr::connected) {
                return Ok(addr);
            }
            if addresses.changed().await.is_err() {
                return Err(ChildError::Gone(self.name.clone()));
            }
        }
    }

    /// Sends a message, waiting out a gap, and waits for the answer.
    pub async fn send<M>(&self, message: M) -> Result<M::Result, ChildError>
    where
        M: Message + Send + 'static,
        M::Result: Send,
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
    {
        let answer = self.addr().await?.send(message).await;
        answer.map_err(|_: MailboxError| ChildError::Interrupted(self.name.clone()))
    }
}

/// Counts of one kind of actor, the same numbers in metrics and in status.
#[derive(Debug)]
pub struct KindCounts {
    kind: &'static str,
    up: AtomicU64,
    restarts: AtomicU64,
    panics: AtomicU64,
}

impl KindCounts {
    fn new(kind: &'static str) -> Self {
        // Series that exist from the start: a rate over a counter that appears with its first
        // event misses that event.
        metrics::counter!("halocline_actor_restarts_total", "actor" => kind).increment(0);
        metrics::counter!("halocline_actor_panics_total", "actor" => kind).increment(0);
        metrics::gauge!("halocline_actor_up", "actor" => kind).set(0.0);
        Self { kind, up: AtomicU64::new(0), restarts: AtomicU64::new(0), panics: AtomicU64::new(0) }
    }

    /// One more actor of this kind runs, until the guard goes.
    #[must_use]
    pub fn up(self: &Arc<Self>) -> UpGuard {
        self.up.fetch_add(1, Ordering::Relaxed);
        metrics::gauge!("halocline_actor_up", "actor" => self.kind).increment(1.0);
        UpGuard { counts: self.clone() }
    }

    /// An actor of this kind panicked.
    pub fn panicked(&self) {
        self.panics.fetch_add(1, Ordering::Relaxed);
        metrics::counter!("halocline_actor_panics_total", "actor" => self.kind).increment(1);
    }

    fn restarted(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
        metrics::counter!("halocline_actor_restarts_total", "actor" => self.kind).increment(1);
    }

    fn status(&self) -> ActorStatus {
        ActorStatus {
            actor: self.kind.to_owned(),
            up: self.up.load(Ordering::Relaxed),
            restarts: self.restarts.load(Ordering::Relaxed),
            panics: self.panics.load(Ordering::Relaxed),
        }
    }
}

/// An actor that runs, for [`KindCounts::up`].
#[derive(Debug)]
pub struct UpGuard {
    counts: Arc<KindCounts>,
}

impl Drop for UpGuard {
    fn drop(&mut self) {
        self.counts.up.fetch_sub(1, Ordering::Relaxed);
        metrics::gauge!("halocline_actor_up", "actor" => self.counts.kind).decrement(1.0);
    }
}

/// How a drain went.
#[derive(Debug, Clone, Default)]
pub struct DrainReport {
    /// Children that were still there when their stage's time was up.
    pub unfinished: Vec<String>,
    /// Threads that had not ended at the deadline.
    pub stuck_arbiters: Vec<String>,
}

impl DrainReport {
    /// Whether everything finished inside the deadline.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.unfinished.is_empty() && self.stuck_arbiters.is_empty()
    }
}

/// Gives orders to the supervisor and reads its state, from any thread.
#[derive(Clone)]
pub struct SupervisorHandle {
    shared: Arc<HandleShared>,
    addr: Addr<Supervisor>,
}

struct HandleShared {
    next_child: AtomicU64,
    kinds: Mutex<BTreeMap<&'static str, Arc<KindCounts>>>,
    failed: watch::Sender<Option<String>>,
    draining: AtomicBool,
    report: watch::Sender<Option<DrainReport>>,
}

impl fmt::Debug for SupervisorHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SupervisorHandle").finish_non_exhaustive()
    }
}

impl SupervisorHandle {
    /// One entry a kind of actor, by name.
    #[must_use]
    pub fn counts(&self) -> Vec<ActorStatus> {
        self.shared.kinds.lock().values().map(|counts| counts.status()).collect()
    }

    /// The counts of one kind, made when first asked for.
    #[must_use]
    pub fn kind(&self, kind: &'static str) -> Arc<KindCounts> {
        let mut kinds = self.shared.kinds.lock();
        kinds.entry(kind).or_insert_with(|| Arc::new(KindCounts::new(kind))).clone()
    }

    /// Holds the reason once the daemon has failed: it must drain and exit non-zero.
    #[must_use]
    pub fn failed(&self) -> watch::Receiver<Option<String>> {
        self.shared.failed.subscribe()
    }

    /// Marks the daemon failed. The first reason stays.
    pub fn fail(&self, reason: String) {
        self.shared.fail(reason);
    }

    /// False once the daemon has failed or drains.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.is_draining() && self.shared.failed.borrow().is_none()
    }

    /// Whether a drain has begun.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// A new thread for actors, joined at the end of a drain. Must be called where an actix system
    /// runs; blocks for the moment that a thread takes to start.
    pub fn arbiter(&self, name: &str) -> io::Result<ArbiterHandle> {
        let arbiter = Arbiter::try_new()?;
        let handle = arbiter.handle();
        self.addr.do_send(OwnArbiter { name: name.to_owned(), arbiter });
        Ok(handle)
    }

    /// Starts a child on its arbiter and keeps it running. The factory runs on that arbiter, once
    /// an incarnation; a panic in it counts as the actor's.
    pub fn supervise<A, F>(&self, spec: ChildSpec, factory: F) -> Child<A>
    where
        A: Actor<Context = Context<A>> + Handler<Drain>,
        F: Fn(&ChildContext) -> A + Send + 'static,
    {
        let (publish, addresses) = watch::channel(None);
        let (drain, drains) = watch::channel(None);
        let (alive, ended) = oneshot::channel();
        let name: Arc<str> = spec.name.as_str().into();
        let id = ChildId(self.shared.next_child.fetch_add(1, Ordering::Relaxed));
        let runner = Runner {
            id,
            name: name.clone(),
            kind: spec.kind,
            counts: self.kind(spec.kind),
            handle: self.clone(),
            drains,
            _alive: alive,
        };
        self.addr.do_send(Adopt {
            id,
            name: name.clone(),
            kind: spec.kind,
            policy: spec.policy,
            stage: spec.stage,
            drain,
            ended,
        });
        let sent = spec.arbiter.spawn_fn(move || {
            actix_rt::spawn(runner.run(factory, publish));
        });
        if !sent {
            self.fail(format!("{name} cannot be started: its thread has ended"));
        }
        Child { name, addresses }
    }

    /// What every child is doing, in the order they were started.
    pub async fn children(&self) -> Vec<ChildStatus> {
        self.addr.send(Status).await.unwrap_or_default()
    }

    /// Drains the daemon in order: acceptors stop, connections finish their operations, workers
    /// stop, threads join. Returns within `deadline`. A second call waits for the same drain.
    pub async fn drain(&self, deadline: Duration) -> DrainReport {
        let until = Instant::now() + deadline;
        let mut reports = self.shared.report.subscribe();
        if self.addr.send(Drain { until }).await.is_err() {
            return DrainReport { unfinished: vec!["supervisor".to_owned()], ..Default::default() };
        }
        // A drain that was under way may have been given more time than this caller has.
        let until = until + REPORT_GRACE;
        match timeout_at(until.into(), reports.wait_for(Option::is_some)).await {
            Ok(Ok(report)) => report.clone().unwrap_or_default(),
            Ok(Err(_)) | Err(_) => {
                DrainReport { unfinished: vec!["supervisor".to_owned()], ..Default::default() }
            }
        }
    }
}

impl HandleShared {
    fn fail(&self, reason: String) {
        self.failed.send_if_modified(|failed| {
            if failed.is_some() {
                return false;
            }
            tracing::error!(%reason, "the daemon has failed; draining");
            *failed = Some(reason);
            true
        });
    }
}

/// How an actor's task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Stopped,
    Panicked(String),
}

/// In the order the children were started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ChildId(u64);

/// A child's actor began.
struct Started {
    id: ChildId,
    incarnation: u64,
}

impl Message for Started {
    type Result = ();
}

/// A child's actor ended; answered with what to do.
struct Failed {
    id: ChildId,
    end: End,
}

impl Message for Failed {
    type Result = Verdict;
}

#[derive(Debug, Clone, Copy)]
enum Verdict {
    RestartAfter(Duration),
    Final,
}

/// Asks for one [`ChildStatus`] a child.
#[derive(Debug, Clone, Copy)]
pub struct Status;

impl Message for Status {
    type Result = Vec<ChildStatus>;
}

/// A child at one moment.
#[derive(Debug, Clone)]
pub struct ChildStatus {
    /// See [`ChildSpec::name`].
    pub name: String,
    /// See [`ChildSpec::kind`].
    pub kind: &'static str,
    /// Whether an actor runs now.
    pub up: bool,
    /// How many actors this child has had.
    pub incarnation: u64,
    /// How the last actor ended, if one has.
    pub last_end: Option<String>,
}

struct Adopt {
    id: ChildId,
    name: Arc<str>,
    kind: &'static str,
    policy: RestartPolicy,
    stage: DrainStage,
    drain: watch::Sender<Option<Drain>>,
    ended: oneshot::Receiver<()>,
}

impl Message for Adopt {
    type Result = ();
}

struct OwnArbiter {
    name: String,
    arbiter: Arbiter,
}

impl Message for OwnArbiter {
    type Result = ();
}

/// Decides over restarts and runs the drain. The tasks that watch the children ask it by message;
/// everybody else goes through a [`SupervisorHandle`].
pub struct Supervisor {
    options: SupervisorOptions,
    shared: Arc<HandleShared>,
    children: BTreeMap<ChildId, ChildEntry>,
    arbiters: Vec<(String, Arbiter)>,
    drain: Option<Drain>,
}

struct ChildEntry {
    status: ChildStatus,
    policy: RestartPolicy,
    stage: DrainStage,
    /// When its actors ended within the failure window, and whether by a panic.
    ends: VecDeque<(Instant, bool)>,
    drain: watch::Sender<Option<Drain>>,
    /// Resolves when the child has ended for good; taken by the drain.
    ended: Option<oneshot::Receiver<()>>,
}

impl fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor")
            .field("options", &self.options)
            .field("children", &self.children.len())
            .finish_non_exhaustive()
    }
}

impl Supervisor {
    /// Starts the supervisor on the current thread's arbiter. A panic of the supervisor itself
    /// marks the daemon failed.
    #[must_use]
    pub fn start(options: SupervisorOptions) -> SupervisorHandle {
        let shared = Arc::new(HandleShared {
            next_child: AtomicU64::new(0),
            kinds: Mutex::default(),
            failed: watch::Sender::new(None),
            draining: AtomicBool::new(false),
            report: watch::Sender::new(None),
        });
        let context = Context::new();
        let addr = context.address();
        let supervisor = Self {
            options,
            shared: shared.clone(),
            children: BTreeMap::new(),
            arbiters: Vec::new(),
            drain: None,
        };
        let task = actix_rt::spawn(context.into_future(supervisor));
        let watched = shared.clone();
        actix_rt::spawn(async move {
            if let End::Panicked(why) = task_end(task).await {
                watched.fail(format!("the supervisor itself panicked: {why}"));
            }
        });
        SupervisorHandle { shared, addr }
    }
}

impl Actor for Supervisor {
    type Context = Context<Self>;
}

impl Handler<Adopt> for Supervisor {
    type Result = ();

    fn handle(&mut self, child: Adopt, _: &mut Self::Context) {
        // Started while the daemon drains: told at once, so that it does not come up.
        child.drain.send_replace(self.drain);
        let status = ChildStatus {
            name: child.name.to_string(),
            kind: child.kind,
            up: false,
            incarnation: 0,
            last_end: None,
        };
        let entry = ChildEntry {
            status,
            policy: child.policy,
            stage: child.stage,
            ends: VecDeque::new(),
            drain: child.drain,
            ended: Some(child.ended),
        };
        self.children.insert(child.id, entry);
    }
}

impl Handler<OwnArbiter> for Supervisor {
    type Result = ();

    fn handle(&mut self, owned: OwnArbiter, _: &mut Self::Context) {
        self.arbiters.push((owned.name, owned.arbiter));
    }
}

impl Handler<Started> for Supervisor {
    type Result = ();

    fn handle(&mut self, started: Started, _: &mut Self::Context) {
        let Some(child) = self.children.get_mut(&started.id) else { return };
        child.status.up = true;
        child.status.incarnation = started.incarnation;
        if started.incarnation > 1 {
            tracing::info!(
                actor = child.status.name,
                incarnation = started.incarnation,
                "restarted an actor"
            );
        }
    }
}

impl Handler<Failed> for Supervisor {
    type Result = MessageResult<Failed>;

    fn handle(&mut self, failed: Failed, _: &mut Self::Context) -> Self::Result {
        let options = &self.options;
        let draining = self.drain.is_some();
        let Some(child) = self.children.get_mut(&failed.id) else {
            return MessageResult(Verdict::Final);
        };
        child.status.up = false;
        let panicked = matches!(failed.end, End::Panicked(_));
        child.status.last_end = Some(match &failed.end {
            End::Stopped => "stopped".to_owned(),
            End::Panicked(why) => format!("panicked: {why}"),
        });
        let final_end = match child.policy {
            RestartPolicy::Always => false,
            RestartPolicy::OnPanic => !panicked,
            RestartPolicy::Never => true,
        };

        let now = Instant::now();
        child.ends.push_back((now, panicked));
        child.ends.retain(|(at, _)| now.duration_since(*at) <= options.failure_window);
        let panics = child.ends.iter().filter(|(_, panicked)| *panicked).count();
        if let End::Panicked(why) = &failed.end {
            tracing::error!(actor = child.status.name, panics, why, "an actor panicked");
        }
        if draining || final_end {
            return MessageResult(Verdict::Final);
        }
        if panicked && panics >= options.failure_limit as usize {
            let reason = format!(
                "{} panicked {panics} times within {:?}; last: {}",
                child.status.name,
                options.failure_window,
                child.status.last_end.as_deref().unwrap_or_default()
            );
            self.shared.fail(reason);
            return MessageResult(Verdict::Final);
        }
        let after = options.backoff(child.ends.len(), rand::random_range(0.5..1.5));
        tracing::warn!(actor = child.status.name, ?after, panicked, "restarting an actor");
        MessageResult(Verdict::RestartAfter(after))
    }
}

impl Handler<Status> for Supervisor {
    type Result = MessageResult<Status>;

    fn handle(&mut self, _: Status, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.children.values().map(|child| child.status.clone()).collect())
    }
}

impl Handler<Drain> for Supervisor {
    type Result = ();

    fn handle(&mut self, drain: Drain, ctx: &mut Self::Context) {
        if self.drain.is_some() {
            return;
        }
        self.drain = Some(drain);
        self.shared.draining.store(true, Ordering::Release);
        let mut stages = Vec::new();
        for stage in DrainStage::ALL {
            let children: Vec<Draining> = self
                .children
                .values_mut()
                .filter(|child| child.stage == stage)
                .filter_map(|child| {
                    Some(Draining {
                        name: child.status.name.clone(),
                        drain: child.drain.clone(),
                        ended: child.ended.take()?,
                    })
                })
                .collect();
            stages.push((stage, children));
        }
        let arbiters = std::mem::take(&mut self.arbiters);
        ctx.spawn(drain_in_order(drain.until, stages, arbiters).into_actor(self).map(
            |report, supervisor, _| {
                supervisor.shared.report.send_replace(Some(report));
            },
        ));
    }
}

struct Draining {
    name: String,
    drain: watch::Sender<Option<Drain>>,
    ended: oneshot::Receiver<()>,
}

async fn drain_in_order(
    until: Instant,
    stages: Vec<(DrainStage, Vec<Draining>)>,
    arbiters: Vec<(String, Arbiter)>,
) -> DrainReport {
    let began = Instant::now();
    let whole = until.saturating_duration_since(began);
    let mut report = DrainReport::default();
    for (stage, children) in stages {
        let stage_until = began + whole.mul_f64(stage.share());
        for child in &children {
            child.drain.send_replace(Some(Drain { until: stage_until }));
        }
        for child in children {
            // An error means that the other end is gone, which is what is waited for.
            if timeout_at(stage_until.into(), child.ended).await.is_err() {
                tracing::warn!(
                    actor = child.name,
                    ?stage,
                    "an actor did not drain in time and is cut off"
                );
                report.unfinished.push(child.name);
            }
        }
    }
    report.stuck_arbiters = join_arbiters(until, arbiters).await;
    tracing::info!(
        seconds = began.elapsed().as_secs_f64(),
        unfinished = ?report.unfinished,
        stuck_arbiters = ?report.stuck_arbiters,
        "drained"
    );
    report
}

/// Stops the threads and waits for them; returns the names of those that did not end in time.
async fn join_arbiters(until: Instant, arbiters: Vec<(String, Arbiter)>) -> Vec<String> {
    let mut joins = Vec::new();
    for (name, arbiter) in arbiters {
        arbiter.stop();
        let (done, joined) = oneshot::channel();
        // A plain thread: the runtime would wait at its end for a blocking task that never ends.
        let joiner = std::thread::Builder::new().name("join".to_owned()).spawn(move || {
            let _ = done.send(arbiter.join().is_ok());
        });
        if let Err(error) = joiner {
            tracing::warn!(arbiter = name, %error, "cannot wait for a thread to end");
        }
        joins.push((name, joined));
    }
    let mut stuck = Vec::new();
    for (name, joined) in joins {
        match timeout_at(until.into(), joined).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) | Ok(Err(_)) | Err(_) => stuck.push(name),
        }
    }
    stuck
}

/// Keeps one child running, on the child's own arbiter.
struct Runner {
    id: ChildId,
    name: Arc<str>,
    kind: &'static str,
    counts: Arc<KindCounts>,
    handle: SupervisorHandle,
    drains: watch::Receiver<Option<Drain>>,
    /// Dropped when the child has ended for good, however that came.
    _alive: oneshot::Sender<()>,
}

impl Runner {
    async fn run<A, F>(mut self, factory: F, publish: watch::Sender<Option<Addr<A>>>)
    where
        A: Actor<Context = Context<A>> + Handler<Drain>,
        F: Fn(&ChildContext) -> A,
    {
        let mut incarnation = 0;
        while self.drains.borrow().is_none() {
            incarnation += 1;
            let context = ChildContext {
                name: self.name.to_string(),
                kind: self.kind,
                incarnation,
                supervisor: self.handle.clone(),
            };
            if incarnation > 1 {
                self.counts.restarted();
            }
            let end = match catch_unwind(AssertUnwindSafe(|| factory(&context))) {
                Ok(actor) => self.run_once(actor, incarnation, &publish).await,
                Err(panic) => End::Panicked(panic_text(panic.as_ref())),
            };
            if matches!(end, End::Panicked(_)) {
                self.counts.panicked();
            }
            let failed = Failed { id: self.id, end };
            match self.handle.addr.send(failed).await {
                Ok(Verdict::RestartAfter(wait)) => {
                    let _ = unless_draining(&mut self.drains, sleep(wait)).await;
                }
                Ok(Verdict::Final) | Err(_) => return,
            }
        }
    }

    async fn run_once<A>(
        &mut self,
        actor: A,
        incarnation: u64,
        publish: &watch::Sender<Option<Addr<A>>>,
    ) -> End
    where
        A: Actor<Context = Context<A>> + Handler<Drain>,
    {
        let context = Context::new();
        let addr = context.address();
        let mut task = actix_rt::spawn(context.into_future(actor));
        let up = self.counts.up();
        publish.send_replace(Some(addr.clone()));
        self.handle.addr.do_send(Started { id: self.id, incarnation });

        let end = match unless_draining(&mut self.drains, task_end(&mut task)).await {
            Ok(end) => end,
            Err(drain) => {
                addr.do_send(drain);
                task_end(&mut task).await
            }
        };
        publish.send_replace(None);
        drop(up);
        end
    }
}

/// The future's output, or the drain that came before it.
async fn unless_draining<F: Future>(
    drains: &mut watch::Receiver<Option<Drain>>,
    future: F,
) -> Result<F::Output, Drain> {
    tokio::select! {
        output = future => Ok(output),
        drain = next_drain(drains) => Err(drain),
    }
}

async fn next_drain(drains: &mut watch::Receiver<Option<Drain>>) -> Drain {
    if let Ok(drain) = drains.wait_for(Option::is_some).await
        && let Some(drain) = *drain
    {
        return drain;
    }
    // The supervisor is gone: nobody is left to drain the child.
    std::future::pending().await
}

async fn task_end(task: impl Future<Output = Result<(), JoinError>>) -> End {
    match task.await {
        Err(error) if error.is_panic() => End::Panicked(panic_text(error.into_panic().as_ref())),
        // Cancelled: the arbiter stops.
        Ok(()) | Err(_) => End::Stopped,
    }
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(limit: u32, window: u64) -> SupervisorOptions {
        SupervisorOptions::new(limit, Duration::from_secs(window))
    }

    #[test]
    fn the_first_restart_is_fast_and_the_wait_doubles_up_to_a_ceiling() {
        let options = options(5, 600);
        assert!(options.backoff(1, 1.5) < Duration::from_millis(100));
        assert_eq!(options.backoff(2, 1.0), 2 * options.backoff(1, 1.0));
        assert_eq!(options.backoff(3, 1.0), 4 * options.backoff(1, 1.0));
        assert_eq!(options.backoff(60, 1.0), Duration::from_secs(10));
        assert_eq!(options.backoff(usize::MAX, 1.0), Duration::from_secs(10));
    }

    #[test]
    fn an_actor_that_always_panics_reaches_the_limit_inside_the_window() {
        for (limit, window) in [(1, 1), (3, 1), (5, 60), (20, 10), (100, 600)] {
            let options = options(limit, window);
            let waits: Duration = (1..limit as usize).map(|ends| options.backoff(ends, 1.5)).sum();
            assert!(waits < options.failure_window, "limit {limit} in {window} s waits {waits:?}");
        }
    }

    #[test]
    fn drain_stages_are_in_order_and_leave_time_for_the_threads() {
        let mut last = 0.0;
        for stage in DrainStage::ALL {
            assert!(stage.share() > last);
            last = stage.share();
        }
        assert!(last < 1.0);
    }

    #[test]
    fn a_panic_is_told_in_its_own_words() {
        let text = |panic: Box<dyn Any + Send>| panic_text(panic.as_ref());
        assert_eq!(text(Box::new("static")), "static");
        assert_eq!(text(Box::new("owned".to_owned())), "owned");
        assert_eq!(text(Box::new(7)), "a panic without a message");
    }
}
