//! One thread's connections to one tier: bounded in number, handed out in order of asking, checked
//! before use, and closed when the server they lead to was lost or is no longer primary. Which
//! server that is, the topology says.
//!
//! Everything here belongs to one thread (`Rc`): handing out a free connection takes no lock.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bson::raw::RawDocument;
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use mongodb::options::ServerAddress;
use tokio::sync::{mpsc, oneshot};

use crate::cluster::Cluster;
use crate::error::{ClusterError, Phase};
use crate::handshake;
use crate::options::Tier;
use crate::reply::Reply;
use crate::socket::{Interrupt, Socket};

/// How often idle connections are reaped and figures published; also the unit of idle time.
const TICK: Duration = Duration::from_secs(1);

/// Pause before the primary is dialled again after a refusal the monitors have not reported (yet).
const REDIAL_PAUSE: Duration = Duration::from_millis(50);

/// Longest time [`Pool::run_idempotent`] waits for one answer.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// One thread's pool of connections to one tier. Cheap to clone; all clones are the same pool.
#[derive(Clone)]
pub struct Pool {
    inner: Rc<Inner>,
}

struct Inner {
    cluster: Arc<Cluster>,
    /// [`crate::Topology::version`] that `servers` and `primary` reflect.
    seen: Cell<u64>,
    primary: RefCell<Option<Rc<Server>>>,
    servers: RefCell<Vec<Rc<Server>>>,
    closed: Cell<bool>,
    /// Seconds, more or less, since the pool was made: measures idleness without reading a clock.
    tick: Rc<Cell<u32>>,
    figures: Rc<Figures>,
    tasks: Tasks,
}

/// Starts tasks of the pool. Goes through a channel, because the wish to start one can come up in
/// a `drop`, where there may be no `LocalSet` (any more) to spawn on.
#[derive(Clone)]
struct Tasks(mpsc::UnboundedSender<LocalBoxFuture<'static, ()>>);

impl Tasks {
    fn start() -> Self {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        tokio::task::spawn_local(async move {
            while let Some(task) = receiver.recv().await {
                tokio::task::spawn_local(task);
            }
        });
        Tasks(sender)
    }

    /// Whether it will be run: not when the thread's tasks are gone, and then so is whoever would
    /// profit.
    fn spawn(&self, task: impl Future<Output = ()> + 'static) -> bool {
        self.0.send(Box::pin(task)).is_ok()
    }
}

/// Counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Connections open and free.
    pub idle: usize,
    /// Connections handed out.
    pub in_use: usize,
    /// Connections being opened.
    pub opening: usize,
    /// Requests waiting for a connection.
    pub waiting: usize,
}

impl Pool {
    /// A pool for this thread. Must be called inside a `LocalSet` (every actix arbiter is one).
    pub fn new(cluster: Arc<Cluster>) -> Pool {
        let inner = Rc::new(Inner {
            figures: Rc::new(Figures::new(cluster.tier())),
            cluster,
            seen: Cell::new(0),
            primary: RefCell::default(),
            servers: RefCell::default(),
            closed: Cell::new(false),
            tick: Rc::default(),
            tasks: Tasks::start(),
        });
        inner.follow_topology();
        tokio::task::spawn_local(maintain(Rc::downgrade(&inner)));
        Pool { inner }
    }

    /// The replica set this pool leads to.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.inner.cluster
    }

    /// Which tier it leads to.
    pub fn tier(&self) -> Tier {
        self.inner.cluster.tier()
    }

    /// A connection to the primary.
    ///
    /// A free one is handed out at once. Otherwise the caller waits: for a primary to be known at
    /// most the server selection timeout, for a connection to it at most the checkout timeout. A
    /// primary that cannot be reached counts as none.
    pub async fn primary(&self) -> Result<Conn, ClusterError> {
        if let Some(conn) = self.try_primary() {
            return Ok(conn);
        }
        Box::pin(self.wait_for_primary()).await
    }

    /// A connection to the primary, if one is free right now.
    pub fn try_primary(&self) -> Option<Conn> {
        let inner = &*self.inner;
        if inner.seen.get() != inner.cluster.keeper().version() {
            inner.follow_topology();
        }
        let conn = inner.primary.borrow().as_ref()?.take_idle()?;
        inner.figures.handed_out();
        Some(conn)
    }

    /// A connection to a certain member.
    pub async fn server(&self, address: &ServerAddress) -> Result<Conn, ClusterError> {
        let inner = &*self.inner;
        inner.follow_topology();
        if let Some(conn) = inner.server(address).and_then(|server| server.take_idle()) {
            inner.figures.handed_out();
            return Ok(conn);
        }
        let started = Instant::now();
        loop {
            let Some(server) = inner.server(address) else {
                inner.figures.waited(started, false);
                let (tier, address) = (self.tier(), address.clone());
                return Err(ClusterError::UnknownServer { tier, address });
            };
            match server.wait(started).await {
                // Its role changed while we stood in its queue: it may still be a member.
                Err(ClusterError::UnknownServer { .. }) => inner.follow_topology(),
                result => {
                    inner.figures.waited(started, result.is_ok());
                    return result;
                }
            }
        }
    }

    /// Says that a server believed to be primary answered that it is not (see
    /// [`crate::ServerError::is_not_primary`]). Until the monitors have found the new primary, or
    /// a check made at once shows that it is primary after all, callers of [`Self::primary`] wait.
    pub fn note_not_primary(&self, address: &ServerAddress) {
        self.inner.cluster.note_not_primary(address);
    }

    /// Runs a command of the daemon's own on the primary, again if the connection broke or the
    /// primary changed, until the server selection timeout. Only for short commands that may be
    /// executed twice.
    pub async fn run_idempotent(
        &self,
        db: &str,
        body: &RawDocument,
    ) -> Result<Reply, ClusterError> {
        let deadline = Instant::now() + self.inner.cluster.server_selection_timeout();
        loop {
            let error = match tokio::time::timeout(COMMAND_LIMIT, self.run_once(db, body)).await {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) => error,
                Err(_) => {
                    return Err(ClusterError::TimedOut {
                        tier: self.tier(),
                        what: "a command",
                        limit: COMMAND_LIMIT,
                    });
                }
            };
            let again = error.is_network() || error.is_not_primary();
            if !again || Instant::now() >= deadline {
                return Err(error);
            }
            tracing::debug!(tier = self.tier().label(), %error, "running a command again");
            // The topology says when there is something to run it on; this is against a server
            // that accepts connections only to close them.
            tokio::time::sleep(REDIAL_PAUSE).await;
        }
    }

    /// Runs a command of the daemon's own on the primary, and reports a primary that denies being
    /// one.
    pub async fn run_once(&self, db: &str, body: &RawDocument) -> Result<Reply, ClusterError> {
        let mut conn = self.primary().await?;
        let result = conn.run(db, body).await;
        if let Err(error) = &result
            && error.is_not_primary()
        {
            self.note_not_primary(conn.address());
        }
        result
    }

    /// Runs something on this thread after the caller is gone.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.inner.tasks.spawn(task);
    }

    /// What the pool holds now.
    pub fn stats(&self) -> PoolStats {
        let mut stats = PoolStats::default();
        for server in self.inner.servers.borrow().iter() {
            let idle = server.idle.borrow().len();
            stats.idle += idle;
            stats.in_use += server.open.get().saturating_sub(idle);
            stats.opening += server.opening.get();
            stats.waiting +=
                server.waiters.borrow().iter().filter(|waiter| !waiter.is_closed()).count();
        }
        stats
    }

    /// Hands out nothing any more and closes what is idle; what is in use closes when it comes
    /// back.
    pub fn close(&self) {
        self.inner.close();
    }

    async fn wait_for_primary(&self) -> Result<Conn, ClusterError> {
        let inner = &*self.inner;
        let started = Instant::now();
        let result = self.find_primary(started).await;
        inner.figures.waited(started, result.is_ok());
        result
    }

    async fn find_primary(&self, started: Instant) -> Result<Conn, ClusterError> {
        let inner = &*self.inner;
        let cluster = &inner.cluster;
        let selection_deadline = started + cluster.server_selection_timeout();
        let mut topology = cluster.topology();
        loop {
            if inner.closed.get() {
                return Err(ClusterError::Closed { tier: self.tier() });
            }
            topology.mark_unchanged();
            inner.follow_topology();
            let primary = inner.primary.borrow().clone();
            let refused = match primary {
                None => None,
                Some(server) => match server.wait(Instant::now()).await {
                    // The server ceased to be primary while we stood in its queue.
                    Err(ClusterError::UnknownServer { .. }) => continue,
                    Err(ClusterError::Network(error)) if error.phase == Phase::Connect => {
                        Some(ClusterError::Network(error))
                    }
                    result => return result,
                },
            };
            let pause = match refused {
                None => selection_deadline,
                Some(_) => selection_deadline.min(Instant::now() + REDIAL_PAUSE),
            };
            let changed = tokio::time::timeout_at(pause.into(), topology.changed()).await;
            if !matches!(changed, Ok(Ok(()))) && Instant::now() >= selection_deadline {
                return Err(refused.unwrap_or_else(|| cluster.no_primary(started)));
            }
        }
    }
}

impl Inner {
    fn server(&self, address: &ServerAddress) -> Option<Rc<Server>> {
        self.servers.borrow().iter().find(|server| server.address == *address).cloned()
    }

    /// Brings `servers` and `primary` in line with the published topology.
    fn follow_topology(&self) {
        let topology = self.cluster.keeper().current();
        if self.closed.get() || topology.version == self.seen.replace(topology.version) {
            return;
        }
        let mut gone = Vec::new();
        {
            let mut servers = self.servers.borrow_mut();
            servers.retain(|server| {
                let known = topology.server(&server.address).is_some();
                if !known {
                    gone.push(server.clone());
                }
                known
            });
            for seen in &topology.servers {
                if !servers.iter().any(|server| server.address == seen.address) {
                    servers.push(Rc::new_cyclic(|this| {
                        Server::new(this.clone(), self, seen.address.clone())
                    }));
                }
            }
        }
        for server in gone {
            server.abandon();
            server.retire(u64::MAX);
        }
        let primary = topology.primary.as_ref().and_then(|address| self.server(address));
        let former = self.primary.replace(primary.clone());
        for server in self.servers.borrow().clone() {
            let Some(seen) = topology.server(&server.address) else { continue };
            if seen.generation != server.generation.get() {
                server.retire(seen.generation);
            }
            if seen.abandoned != server.abandoned.replace(seen.abandoned) {
                server.abandon();
            }
        }
        if let Some(former) = former
            && primary.is_none_or(|primary| !Rc::ptr_eq(&former, &primary))
        {
            former.send_waiters_away();
        }
    }

    fn close(&self) {
        self.closed.set(true);
        self.primary.replace(None);
        for server in self.servers.take() {
            server.send_waiters_away();
            server.retire(u64::MAX);
        }
        self.figures.publish(PoolStats::default());
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

/// Follows the topology, reaps idle connections, keeps the wanted number open, publishes figures.
async fn maintain(pool: Weak<Inner>) {
    let Some(mut topology) = pool.upgrade().map(|pool| pool.cluster.topology()) else { return };
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let ticked = tokio::select! {
            changed = topology.changed() => {
                if changed.is_err() {
                    return;
                }
                false
            }
            _ = tick.tick() => true,
        };
        let Some(inner) = pool.upgrade() else { return };
        if inner.closed.get() {
            return;
        }
        inner.follow_topology();
        if ticked {
            inner.tick.set(inner.tick.get().wrapping_add(1));
            let options = inner.cluster.pool_options();
            let primary = inner.primary.borrow().clone();
            for server in inner.servers.borrow().clone() {
                let is_primary = primary.as_ref().is_some_and(|p| Rc::ptr_eq(p, &server));
                let keep = if is_primary { options.min_idle } else { 0 };
                server.reap(options.idle_timeout.as_secs(), keep);
                if is_primary {
                    server.fill(keep);
                }
            }
            let figures = inner.figures.clone();
            figures.publish(Pool { inner }.stats());
        }
    }
}

/// The connections to one server.
struct Server {
    this: Weak<Server>,
    cluster: Arc<Cluster>,
    address: ServerAddress,
    tick: Rc<Cell<u32>>,
    tasks: Tasks,
    /// Free connections, the one used last on top, so that surplus ones fall idle.
    #[allow(clippy::vec_box, reason = "the box moves on into the connection handed out")]
    idle: RefCell<Vec<Box<Pooled>>>,
    /// Open connections, free and in use.
    open: Cell<usize>,
    opening: Cell<usize>,
    waiters: RefCell<VecDeque<oneshot::Sender<Result<Conn, ClusterError>>>>,
    /// Connections of an earlier generation are closed instead of reused.
    generation: Cell<u64>,
    abandoned: Cell<u64>,
    /// Wakes whoever waits for an answer on one of the open connections.
    interrupts: RefCell<Vec<Arc<Interrupt>>>,
}

struct Pooled {
    socket: Socket,
    generation: u64,
    /// Pool tick of the last use.
    used: u32,
}

impl Server {
    fn new(this: Weak<Server>, pool: &Inner, address: ServerAddress) -> Self {
        Self {
            this,
            cluster: pool.cluster.clone(),
            address,
            tick: pool.tick.clone(),
            tasks: pool.tasks.clone(),
            idle: RefCell::default(),
            open: Cell::new(0),
            opening: Cell::new(0),
            waiters: RefCell::default(),
            generation: Cell::new(0),
            abandoned: Cell::new(0),
            interrupts: RefCell::default(),
        }
    }

    fn take_idle(&self) -> Option<Conn> {
        loop {
            // The borrow ends with this statement: closing a dead one needs it again.
            let taken = self.idle.borrow_mut().pop();
            let mut pooled = taken?;
            if pooled.socket.is_dead() {
                self.discard(pooled);
                continue;
            }
            return self.lend(pooled);
        }
    }

    fn lend(&self, pooled: Box<Pooled>) -> Option<Conn> {
        Some(Conn { pooled: Some(pooled), server: self.this.upgrade()? })
    }

    /// Waits in the queue for a connection, opening one if there is room.
    async fn wait(&self, started: Instant) -> Result<Conn, ClusterError> {
        if let Some(conn) = self.take_idle() {
            return Ok(conn);
        }
        let (sender, receiver) = oneshot::channel();
        {
            let mut waiters = self.waiters.borrow_mut();
            while waiters.front().is_some_and(oneshot::Sender::is_closed) {
                waiters.pop_front();
            }
            waiters.push_back(sender);
        }
        self.open_for_waiters();
        let options = self.cluster.pool_options();
        let deadline = started + options.checkout_timeout;
        match tokio::time::timeout_at(deadline.into(), receiver).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(ClusterError::UnknownServer {
                tier: self.cluster.tier(),
                address: self.address.clone(),
            }),
            Err(_) => Err(ClusterError::CheckoutTimeout {
                tier: self.cluster.tier(),
                address: self.address.clone(),
                waited: started.elapsed(),
                max_size: options.max_size,
            }),
        }
    }

    fn open_for_waiters(&self) {
        let waiting = self.waiters.borrow().iter().filter(|waiter| !waiter.is_closed()).count();
        self.open_up_to(waiting);
    }

    /// Opens connections until `wanted` are on their way, within the bounds.
    fn open_up_to(&self, wanted: usize) {
        let options = self.cluster.pool_options();
        while self.opening.get() < wanted.min(options.max_opening.max(1))
            && self.open.get() + self.opening.get() < options.max_size
        {
            let Some(server) = self.this.upgrade() else { return };
            let opening = Opening::begin(server);
            if !self.tasks.spawn(opening.run()) {
                return;
            }
        }
    }

    /// Keeps a number of connections ready.
    fn fill(&self, keep: usize) {
        let idle = self.idle.borrow().len();
        if idle < keep {
            self.open_up_to(keep - idle);
        }
    }

    /// Closes what has been idle for too long, except the `keep` most recently used.
    fn reap(&self, idle_timeout: u64, keep: usize) {
        loop {
            let stale = {
                let mut idle = self.idle.borrow_mut();
                let now = self.tick.get();
                let stale = idle.len() > keep
                    && idle
                        .first()
                        .is_some_and(|p| u64::from(now.wrapping_sub(p.used)) > idle_timeout);
                if stale { Some(idle.remove(0)) } else { None }
            };
            match stale {
                Some(pooled) => self.discard(pooled),
                None => return,
            }
        }
    }

    /// Takes back a connection, free or not fit to be used again.
    fn check_in(&self, mut pooled: Box<Pooled>) {
        if !pooled.socket.is_clean() || pooled.generation != self.generation.get() {
            return self.discard(pooled);
        }
        pooled.used = self.tick.get();
        loop {
            let Some(waiter) = self.waiters.borrow_mut().pop_front() else { break };
            if waiter.is_closed() {
                continue;
            }
            let Some(conn) = self.lend(pooled) else { return };
            match waiter.send(Ok(conn)) {
                Ok(()) => return,
                Err(Ok(mut conn)) => match conn.pooled.take() {
                    Some(back) => pooled = back,
                    None => return,
                },
                Err(Err(_)) => return,
            }
        }
        self.idle.borrow_mut().push(pooled);
    }

    /// Closes a connection and lets the room be used.
    fn discard(&self, pooled: Box<Pooled>) {
        self.interrupts
            .borrow_mut()
            .retain(|interrupt| !Arc::ptr_eq(interrupt, &pooled.socket.interrupt));
        drop(pooled);
        self.open.set(self.open.get() - 1);
        self.open_for_waiters();
    }

    /// Begins a new generation: connections of earlier ones are not used again.
    fn retire(&self, generation: u64) {
        self.generation.set(generation);
        let idle = self.idle.take();
        for pooled in idle {
            self.discard(pooled);
        }
    }

    /// Wakes every request waiting for an answer of this server.
    fn abandon(&self) {
        for interrupt in self.interrupts.borrow().iter() {
            interrupt.raise();
        }
        self.send_waiters_away();
    }

    /// Lets those waiting here look for another server.
    fn send_waiters_away(&self) {
        self.waiters.take();
    }
}

/// A connection being opened; counted until it is open or has failed, also when cancelled.
struct Opening {
    server: Rc<Server>,
    generation: u64,
}

impl Opening {
    fn begin(server: Rc<Server>) -> Self {
        server.opening.set(server.opening.get() + 1);
        Self { generation: server.generation.get(), server }
    }

    async fn run(self) {
        let server = self.server.clone();
        let dialled = server.cluster.dialer().dial(&server.address).await;
        let generation = self.generation;
        drop(self);
        match dialled {
            Ok(socket) => {
                server.open.set(server.open.get() + 1);
                server.interrupts.borrow_mut().push(socket.interrupt.clone());
                server.check_in(Box::new(Pooled { socket, generation, used: 0 }));
            }
            Err(error) => {
                let tier = server.cluster.tier().label();
                tracing::debug!(tier, address = %server.address, %error, "cannot connect");
                loop {
                    let Some(waiter) = server.waiters.borrow_mut().pop_front() else { return };
                    if !waiter.is_closed() {
                        let _ = waiter.send(Err(error));
                        break;
                    }
                }
                server.open_for_waiters();
            }
        }
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.server.opening.set(self.server.opening.get() - 1);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("tier", &self.tier()).field("stats", &self.stats()).finish()
    }
}

/// A connection handed out. Dropped with no answer due it goes back to the pool; dropped in the
/// middle of an exchange it is closed, and with it whatever the server would still have sent.
pub struct Conn {
    pooled: Option<Box<Pooled>>,
    server: Rc<Server>,
}

impl Conn {
    /// Sends one whole message and receives the one answer to it.
    pub async fn exchange(&mut self, request: &[u8]) -> Result<Bytes, ClusterError> {
        self.socket()?.exchange(request).await
    }

    /// [`Self::exchange`] of a message given in pieces.
    pub async fn exchange_vectored(&mut self, parts: &[&[u8]]) -> Result<Bytes, ClusterError> {
        let socket = self.socket()?;
        socket.send_vectored(parts).await?;
        socket.receive().await
    }

    /// Sends one whole message. One with `moreToCome` gets no answer; for any other the answer
    /// must be [received](Self::receive).
    pub async fn send(&mut self, message: &[u8]) -> Result<(), ClusterError> {
        self.socket()?.send(message).await
    }

    /// Receives the next message due: the answer to what was sent, or, after an answer with
    /// `moreToCome`, the one that follows it.
    pub async fn receive(&mut self) -> Result<Bytes, ClusterError> {
        self.socket()?.receive().await
    }

    /// Runs a command (given without `$db`); `ok: 0` is an error.
    pub async fn run(&mut self, db: &str, body: &RawDocument) -> Result<Reply, ClusterError> {
        self.run_with(db, body, &[]).await
    }

    /// [`Self::run`] with document sequences.
    pub async fn run_with(
        &mut self,
        db: &str,
        body: &RawDocument,
        sequences: &[(&str, &[&RawDocument])],
    ) -> Result<Reply, ClusterError> {
        handshake::run(self.socket()?, db, body, sequences).await
    }

    /// The server this connection leads to.
    pub fn address(&self) -> &ServerAddress {
        &self.server.address
    }

    /// Closes the connection instead of giving it back.
    pub fn discard(mut self) {
        if let Some(pooled) = self.pooled.take() {
            self.server.discard(pooled);
        }
    }

    fn socket(&mut self) -> Result<&mut Socket, ClusterError> {
        match &mut self.pooled {
            Some(pooled) => Ok(&mut pooled.socket),
            None => Err(ClusterError::Closed { tier: self.server.cluster.tier() }),
        }
    }
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn").field("address", self.address()).finish_non_exhaustive()
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        if let Some(pooled) = self.pooled.take() {
            self.server.check_in(pooled);
        }
    }
}

/// The pool's metrics. Other threads' pools of the same tier add to the same gauges, so each adds
/// its differences. Checkouts are counted here and handed over once a tick; those that found a free
/// connection waited for nothing and are not in the histogram, which costs a clock and a queue
/// entry for each value.
struct Figures {
    checkouts: Cell<u64>,
    checkouts_total: metrics::Counter,
    checkout: metrics::Histogram,
    failed: metrics::Counter,
    idle: metrics::Gauge,
    in_use: metrics::Gauge,
    opening: metrics::Gauge,
    published: Cell<PoolStats>,
}

impl Figures {
    fn new(tier: Tier) -> Self {
        let tier = tier.label();
        let connections = |state: &'static str| metrics::gauge!("halocline_pool_connections", "tier" => tier, "state" => state);
        Self {
            checkouts: Cell::new(0),
            checkouts_total: metrics::counter!("halocline_pool_checkouts_total", "tier" => tier),
            checkout: metrics::histogram!("halocline_pool_checkout_seconds", "tier" => tier),
            failed: metrics::counter!("halocline_pool_checkout_failed_total", "tier" => tier),
            idle: connections("idle"),
            in_use: connections("in_use"),
            opening: connections("opening"),
            published: Cell::default(),
        }
    }

    fn handed_out(&self) {
        self.checkouts.set(self.checkouts.get() + 1);
    }

    fn waited(&self, started: Instant, ok: bool) {
        self.checkout.record(started.elapsed().as_secs_f64());
        if ok {
            self.handed_out();
        } else {
            self.failed.increment(1);
        }
    }

    fn publish(&self, now: PoolStats) {
        self.checkouts_total.increment(self.checkouts.take());
        let before = self.published.replace(now);
        let publish = |gauge: &metrics::Gauge, before: usize, now: usize| {
            if now > before {
                gauge.increment((now - before) as f64);
            } else if before > now {
                gauge.decrement((before - now) as f64);
            }
        };
        publish(&self.idle, before.idle, now.idle);
        publish(&self.in_use, before.in_use, now.in_use);
        publish(&self.opening, before.opening, now.opening);
    }
}
