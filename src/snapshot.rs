//! The daemon at one moment, for `/status` and `/readyz`: read from shared state, never asked of an
//! actor, so that it answers even when an actor does not.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use halocline_actors::feeder_state::FeederState;
use halocline_actors::shared::Collection;
use halocline_actors::status::{
    CollectionStatus, FeederStatus, MemberStatus, RequestStatus, Status, TierStatus,
};
use halocline_cluster::{Cluster, Facts, Tier};
use halocline_tiering::{DateKind, DatePoint};

use crate::admin::Readiness;
use crate::daemon::Running;

/// Lag beyond which the status page says so in words.
const LAG_WORTH_A_WORD: Duration = Duration::from_secs(10);

/// Everything.
#[must_use]
pub fn status(running: &Running) -> Status {
    let shared = &running.shared;
    let totals = shared.stats.totals();
    let requests = RequestStatus {
        total: totals.fast + totals.archive + totals.local,
        fast: totals.fast,
        archive: totals.archive,
        local: totals.local,
        errors: shared.stats.errors.load(Ordering::Relaxed),
        by_reason: totals.by_reason.iter().map(|(r, n)| ((*r).to_owned(), *n)).collect(),
    };
    let (fast, archive) = &running.facts;
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_seconds: shared.started.elapsed().as_secs(),
        connection_string: connection_string(running),
        state: state(running).to_owned(),
        problems: problems(running),
        fast: tier(&shared.fast, fast, requests.fast),
        archive: tier(&shared.archive, archive, requests.archive),
        feeder: feeder(running),
        collections: shared.collections.iter().map(|c| collection(c)).collect(),
        client_connections: running.clients.open() as u64,
        cursors_open: (shared.cursors.open(Tier::Fast) + shared.cursors.open(Tier::Archive)) as u64,
        actors: running.supervisor.counts(),
        requests,
    }
}

/// Whether clients should be sent here.
#[must_use]
pub fn readiness(running: &Running) -> Readiness {
    let mut reasons = blocking(running);
    if reasons.is_empty() && running.listening.read().is_empty() {
        reasons.push("starting, or waiting for another daemon's lease to end".into());
    }
    Readiness { ready: reasons.is_empty(), reasons }
}

fn connection_string(running: &Running) -> String {
    let addresses: Vec<String> = running.listening.read().iter().map(ToString::to_string).collect();
    if addresses.is_empty() { String::new() } else { format!("mongodb://{}/", addresses.join(",")) }
}

fn state(running: &Running) -> &'static str {
    if running.supervisor.failed().borrow().is_some() || running.feeder.failed().borrow().is_some()
    {
        "failed"
    } else if running.supervisor.is_draining() {
        "draining"
    } else if running.feeder.get() == FeederState::HistoryLost {
        "history_lost"
    } else if running.listening.read().is_empty() {
        "starting"
    } else {
        "serving"
    }
}

/// What keeps clients away, with what to do.
fn blocking(running: &Running) -> Vec<String> {
    let mut reasons = Vec::new();
    for failed in [running.supervisor.failed(), running.feeder.failed()] {
        if let Some(reason) = failed.borrow().as_ref() {
            reasons.push(format!(
                "the daemon has failed and stops: {reason}; look at its log, then start it again"
            ));
        }
    }
    if running.supervisor.is_draining() {
        reasons.push("the daemon is draining; connect to another one".into());
    }
    match running.feeder.get() {
        FeederState::HistoryLost => reasons.push(
            "the feeder's position has left the fast tier's oplog, so changes may be missing on the archive; nothing is evicted. Compare both tiers before going on".into(),
        ),
        FeederState::Superseded => {
            reasons.push("another daemon has taken over; stop this one".into());
        }
        FeederState::Starting | FeederState::Running => {}
    }
    if !running.listening.read().is_empty() && !running.shared.is_leader() {
        reasons.push(
            "the leader lease could not be renewed; is the fast tier's primary reachable?".into(),
        );
    }
    reasons
}

fn problems(running: &Running) -> Vec<String> {
    let mut problems = blocking(running);
    for (cluster, tier) in
        [(&running.shared.fast, Tier::Fast), (&running.shared.archive, Tier::Archive)]
    {
        if cluster.topology().borrow().primary.is_none() {
            problems.push(format!(
                "the {tier} has no primary; is an election going on, or are its members down?"
            ));
        }
    }
    let feeder = running.feeder.snapshot();
    if feeder.lag > LAG_WORTH_A_WORD {
        problems.push(format!(
            "the archive is {:.0} s behind the fast tier; if this grows, give the archive more disk reads or the daemon more appliers",
            feeder.lag.as_secs_f64()
        ));
    }
    if let Some(trouble) = feeder.trouble {
        problems
            .push(format!("the archive did not take a batch, it is being tried again: {trouble}"));
    }
    if running.shared.admission.is_limited() {
        problems
            .push("client writes are held back to the rate at which the archive takes them".into());
    }
    for collection in &running.shared.collections {
        let differing = collection.moves.mismatches.load(Ordering::Relaxed);
        if differing > 0 {
            problems.push(format!(
                "{}: {differing} documents differ between the tiers and were not evicted; look into the log and repair the archive's copies",
                collection.name
            ));
        }
    }
    problems
}

fn tier(cluster: &Cluster, facts: &Facts, operations: u64) -> TierStatus {
    let topology = cluster.topology().borrow().clone();
    let members = topology.servers.iter().map(|server| MemberStatus {
        address: server.address.to_string(),
        kind: server.kind.label().to_owned(),
        rtt_ms: server.rtt.map(|rtt| rtt.as_secs_f64() * 1000.0),
    });
    TierStatus {
        set_name: cluster.set_name().to_owned(),
        up: topology.primary.is_some(),
        primary: topology.primary.as_ref().map(ToString::to_string),
        members: members.collect(),
        version: facts.version.clone(),
        fcv: facts.fcv.clone().unwrap_or_default(),
        elections: topology.generation.saturating_sub(1),
        operations,
    }
}

fn feeder(running: &Running) -> FeederStatus {
    let now = running.feeder.snapshot();
    FeederStatus {
        state: now.state.to_owned(),
        lag_seconds: now.lag.as_secs_f64(),
        ingest_lag_seconds: now.ingested_ago.as_secs_f64(),
        pending_keys: now.pending_keys,
        mirrored: now.mirrored,
        events: now.events,
        coalesced: now.coalesced,
        token_age_seconds: now.token_age.as_secs_f64(),
        oplog_window_seconds: now.oplog_window.map(|window| window.as_secs_f64()),
        quarantined_keys: 0,
    }
}

fn collection(collection: &Collection) -> CollectionStatus {
    let kind = collection.date.kind();
    let now = kind.point_of_system_time(SystemTime::now());
    let seconds = |point: DatePoint| -> f64 {
        #[allow(clippy::cast_precision_loss)]
        let units = kind.units(Duration::from_secs(1)).max(1) as f64;
        #[allow(clippy::cast_precision_loss)]
        let point = point.0 as f64;
        point / units
    };
    let window = kind.before(now, collection.keep);
    let boundary = collection.boundary.complete_from();
    let moves = &collection.moves;
    let count = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
    let eta = count(&moves.warm_eta_millis);
    #[allow(clippy::cast_precision_loss)]
    CollectionStatus {
        ns: collection.name.clone(),
        date_field: collection.date.path().to_owned(),
        date_kind: match kind {
            DateKind::Date => "date",
            DateKind::ObjectId => "objectid",
            DateKind::EpochSeconds => "epoch-seconds",
            DateKind::EpochMillis => "epoch-millis",
        }
        .to_owned(),
        keep_seconds: collection.keep.as_secs(),
        window_start: seconds(window),
        boundary: boundary.map(seconds),
        warm: boundary.is_some_and(|from| from <= window) || count(&moves.warm_permille) >= 1000,
        warm_progress: count(&moves.warm_permille) as f64 / 1000.0,
        warm_eta_seconds: (eta > 0).then(|| eta as f64 / 1000.0),
        warmed: count(&moves.warmed),
        evicted: count(&moves.evicted),
        faulted_in: count(&moves.faulted_in),
        undated: count(&moves.undated),
        fast_documents: count(&moves.fast_documents),
        eviction_overdue_seconds: count(&moves.overdue_seconds) as f64,
    }
}
