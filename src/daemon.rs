//! A running daemon, put together: both tiers, the shared state, every actor, the admin server;
//! and taken apart again in order when it drains. What each part does is in its own module.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use actix_rt::ArbiterHandle;
use anyhow::{Context as _, bail};
use halocline_actors::acceptor::{Acceptor, Clients, Listeners};
use halocline_actors::applier::Applier;
use halocline_actors::boundary;
use halocline_actors::connection::{ConnectionSettings, ConnectionThread};
use halocline_actors::context::ThreadContext;
use halocline_actors::definitions::synchronise;
use halocline_actors::evictor::Evictor;
use halocline_actors::feeder::{Feeder, ensure_position};
use halocline_actors::feeder_state::FeederShared;
use halocline_actors::hello::{HelloFacts, HelloState};
use halocline_actors::housekeeper::Housekeeper;
use halocline_actors::leader::{Leader, lead, resign};
use halocline_actors::options::Options;
use halocline_actors::router::{Routed, Router};
use halocline_actors::shared::{Collection, Shared};
use halocline_actors::supervisor::{
    ChildSpec, DrainStage, RestartPolicy, Supervisor, SupervisorHandle, SupervisorOptions,
};
use halocline_actors::views;
use halocline_actors::warmer::Warmer;
use halocline_cluster::abandoned::abort_abandoned_moves;
use halocline_cluster::lanes::LaneRecord;
use halocline_cluster::moves::ensure_anchor;
use halocline_cluster::{Cluster, Facts, Pool};
use halocline_wire::Compressor;
use tokio::sync::{Semaphore, watch};
use tracing::{error, info};

use crate::admin::{Admin, Readiness, Sources, metrics};
use crate::check;
use crate::config::Config;
use crate::snapshot;

/// Lanes of a fast tier that was never mirrored before (protocol rule 7).
const LANES: usize = 64;

/// The switches an operator has while the daemon runs.
#[derive(Debug, Clone)]
pub struct Switches {
    /// Pauses eviction.
    pub evictors: watch::Sender<bool>,
    /// Pauses warm-up.
    pub warmers: watch::Sender<bool>,
}

/// Everything that `/status` and `/readyz` are made from.
pub struct Running {
    /// What all threads share.
    pub shared: Arc<Shared>,
    /// The feeder's state.
    pub feeder: Arc<FeederShared>,
    /// The actors.
    pub supervisor: SupervisorHandle,
    /// Server versions and limits.
    pub facts: (Facts, Facts),
    /// Client connections.
    pub clients: Arc<Clients>,
    /// Where clients connect; empty until this daemon leads.
    pub listening: parking_lot::RwLock<Vec<SocketAddr>>,
    /// What may be paused.
    pub switches: Switches,
}

/// Runs until SIGTERM, SIGINT or a failure, then drains. `Ok(true)`: drained after a signal,
/// within the deadline.
///
/// # Errors
/// Why the daemon could not start; the message says what to do.
pub async fn run(config: Config) -> anyhow::Result<bool> {
    let Config { options, admin, .. } = config;
    let recorded = metrics::install().context("the metrics recorder could not be installed")?;
    let mut signals = Signals::new()?;
    let (fast, archive) = tokio::try_join!(
        Cluster::connect(options.fast.clone()),
        Cluster::connect(options.archive.clone())
    )?;
    refuse_what_cannot_be_tiered(&options, &fast, &archive).await?;
    let facts = tokio::try_join!(fast.facts(), archive.facts())?;

    let running = Arc::new(assemble(options, fast, archive, facts).await?);
    let deadline = running.shared.options.drain_deadline;
    let admin_server = Admin::start(admin.listen, sources(&running, recorded))?;
    info!(address = %admin_server.address, "status page and metrics");

    let context = ThreadContext::current(&running.shared);
    let holder = format!("{}:{}", hostname(), std::process::id());
    tokio::select! {
        led = lead(&context, &holder) => led?,
        () = signals.any() => {
            info!("stopped while waiting to lead");
            admin_server.stop().await;
            return Ok(true);
        }
    }
    prepare(&context).await?;
    let hello = Arc::new(HelloState::new(hello_facts(&running.facts)));
    let listeners = start_actors(&running, &hello)?;
    for address in listeners.addresses() {
        info!(%address, "serving clients");
    }
    *running.listening.write() = listeners.addresses().to_vec();

    let clean = wait_for_the_end(&running, &mut signals).await;
    running.shared.draining.store(true, std::sync::atomic::Ordering::Relaxed);
    hello.begin_draining(Instant::now() + deadline);
    info!(?deadline, "draining");
    let report = running.supervisor.drain(deadline).await;
    if !report.is_clean() {
        error!(unfinished = ?report.unfinished, "the drain did not finish within its deadline");
    }
    resign(&context).await;
    admin_server.stop().await;
    info!("drained");
    Ok(clean && report.is_clean())
}

async fn refuse_what_cannot_be_tiered(
    options: &Options,
    fast: &Arc<Cluster>,
    archive: &Arc<Cluster>,
) -> anyhow::Result<()> {
    let looked = check::Context::connected(options, fast.clone(), archive.clone())
        .await
        .map_err(anyhow::Error::msg)?;
    let refusals = check::refusals(&looked).await;
    if refusals.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = refusals
        .iter()
        .map(|finding| format!("{} {}\n    {}", finding.subject, finding.what, finding.remedy))
        .collect();
    bail!("this configuration cannot be run:\n  {}", list.join("\n  "));
}

async fn assemble(
    options: Options,
    fast: Arc<Cluster>,
    archive: Arc<Cluster>,
    facts: (Facts, Facts),
) -> anyhow::Result<Running> {
    let collections = options
        .collections
        .iter()
        .enumerate()
        .map(|(id, c)| Arc::new(Collection::new(id, c.ns.clone(), c.date.clone(), c.keep)))
        .collect();
    let lanes =
        LaneRecord::find_or_fix(&Pool::new(archive.clone()), fast.set_name(), LANES).await?;
    let supervisor = Supervisor::start(SupervisorOptions::new(
        options.actors.failure_limit,
        options.actors.failure_window,
    ));
    let clients = Clients::new(options.limits.max_connections);
    Ok(Running {
        shared: Arc::new(Shared::new(options, fast, archive, collections, lanes.lanes)),
        feeder: Arc::new(FeederShared::default()),
        supervisor,
        facts,
        clients,
        listening: parking_lot::RwLock::default(),
        switches: Switches {
            evictors: watch::Sender::new(false),
            warmers: watch::Sender::new(false),
        },
    })
}

/// What must stand before the first actor runs and the first client is served: the anchor, the
/// feeder's position, the collections on both tiers, the boundaries. And what must not: moves that
/// a dead daemon has left open.
async fn prepare(context: &ThreadContext) -> anyhow::Result<()> {
    ensure_anchor(&context.fast).await?;
    let abandoned = abort_abandoned_moves(&context.fast).await?;
    if abandoned > 0 {
        info!(abandoned, "ended the moves that another daemon has left open");
    }
    for collection in &context.shared.collections {
        synchronise(context, collection)
            .await
            .with_context(|| format!("{} could not be prepared on both tiers", collection.name))?;
        let stored = boundary::claim(context, collection).await?;
        collection.boundary.publish(stored.raise_epoch, stored.complete_from);
    }
    // After the definitions, so that what was made here is no news to the feeder.
    ensure_position(context).await?;
    views::refresh(context).await?;
    Ok(())
}

fn hello_facts((fast, archive): &(Facts, Facts)) -> HelloFacts {
    HelloFacts {
        min_wire_version: fast.min_wire_version.max(archive.min_wire_version),
        max_wire_version: fast.max_wire_version.min(archive.max_wire_version),
        max_bson_object_size: fast.max_bson_object_size.min(archive.max_bson_object_size),
        max_message_size: fast.max_message_size.min(archive.max_message_size),
        max_write_batch_size: fast.max_write_batch.min(archive.max_write_batch),
        compressors: vec![Compressor::Snappy, Compressor::Zlib, Compressor::Zstd],
        sasl_mechanisms: Vec::new(),
    }
}

/// A child that runs as long as the daemon.
fn worker(name: impl Into<String>, kind: &'static str, arbiter: &ArbiterHandle) -> ChildSpec {
    ChildSpec {
        name: name.into(),
        kind,
        policy: RestartPolicy::Always,
        stage: DrainStage::Workers,
        arbiter: arbiter.clone(),
    }
}

fn start_actors(running: &Arc<Running>, hello: &Arc<HelloState>) -> anyhow::Result<Listeners> {
    let (supervisor, shared) = (&running.supervisor, &running.shared);
    let listeners = Listeners::bind(&shared.options.listen)?;
    let background = supervisor.arbiter("background")?;

    let (s, f) = (shared.clone(), running.feeder.clone());
    supervisor.supervise(worker("leader", "leader", &background), move |_| {
        Leader::new(ThreadContext::current(&s), f.clone())
    });
    start_mirroring(running, &background);
    start_movers(running, &background);
    let (s, f) = (shared.clone(), running.feeder.clone());
    supervisor.supervise(worker("housekeeper", "housekeeper", &background), move |_| {
        Housekeeper::new(ThreadContext::current(&s), f.clone())
    });

    let settings = Arc::new(ConnectionSettings::new(hello.clone()));
    let mut threads = Vec::new();
    for number in 0..shared.options.actors.connection_threads.max(1) {
        let name = format!("connections-{number}");
        let arbiter = supervisor.arbiter(&name)?;
        let s = shared.clone();
        supervisor.supervise(worker(format!("router-{number}"), "router", &arbiter), move |_| {
            Router::new(&s)
        });
        threads.push(ConnectionThread::supervise(
            supervisor,
            &name,
            arbiter,
            settings.clone(),
            |_| std::rc::Rc::new(Routed),
        ));
    }
    let acceptor = supervisor.arbiter("acceptor")?;
    Acceptor::supervise(supervisor, acceptor, listeners.clone(), threads, running.clients.clone());
    Ok(listeners)
}

fn start_mirroring(running: &Arc<Running>, background: &ArbiterHandle) {
    let (supervisor, shared) = (&running.supervisor, &running.shared);
    let appliers: Vec<_> = (0..shared.options.actors.appliers.max(1))
        .map(|number| {
            let s = shared.clone();
            supervisor
                .supervise(worker(format!("applier-{number}"), "applier", background), move |_| {
                    Applier::new(ThreadContext::current(&s))
                })
        })
        .collect();
    let (s, f) = (shared.clone(), running.feeder.clone());
    supervisor.supervise(worker("feeder", "feeder", background), move |_| {
        Feeder::new(ThreadContext::current(&s), f.clone(), appliers.clone())
    });
}

fn start_movers(running: &Arc<Running>, background: &ArbiterHandle) {
    let (supervisor, shared) = (&running.supervisor, &running.shared);
    let evicting = Arc::new(Semaphore::new(shared.options.actors.evictors.max(1)));
    let warming = Arc::new(Semaphore::new(shared.options.actors.warmers.max(1)));
    for collection in &shared.collections {
        let (s, c, f) = (shared.clone(), collection.clone(), running.feeder.clone());
        let (turns, paused) = (evicting.clone(), running.switches.evictors.subscribe());
        let name = format!("evictor-{}", collection.name);
        supervisor.supervise(worker(name, "evictor", background), move |_| {
            let context = ThreadContext::current(&s);
            Evictor::new(context, c.clone(), f.clone(), turns.clone(), paused.clone())
        });
        let (s, c) = (shared.clone(), collection.clone());
        let (turns, paused) = (warming.clone(), running.switches.warmers.subscribe());
        let name = format!("warmer-{}", collection.name);
        supervisor.supervise(worker(name, "warmer", background), move |_| {
            Warmer::new(ThreadContext::current(&s), c.clone(), turns.clone(), paused.clone())
        });
    }
}

fn sources(
    running: &Arc<Running>,
    recorded: metrics_exporter_prometheus::PrometheusHandle,
) -> Sources {
    let (for_status, for_readiness) = (running.clone(), running.clone());
    Sources {
        status: Arc::new(move || snapshot::status(&for_status)),
        readiness: Arc::new(move || -> Readiness { snapshot::readiness(&for_readiness) }),
        metrics: recorded,
    }
}

/// Waits for a signal (`true`) or a failure (`false`).
async fn wait_for_the_end(running: &Running, signals: &mut Signals) -> bool {
    let mut supervisor_failed = running.supervisor.failed();
    let mut feeder_failed = running.feeder.failed();
    tokio::select! {
        () = signals.any() => true,
        reason = supervisor_failed.wait_for(Option::is_some) => {
            error!(reason = ?reason.ok().as_deref(), "the daemon has failed and stops");
            false
        }
        reason = feeder_failed.wait_for(Option::is_some) => {
            error!(reason = ?reason.ok().as_deref(), "the daemon must stop");
            false
        }
    }
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn any(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "halocline".into(), |name| name.trim().to_owned())
}
