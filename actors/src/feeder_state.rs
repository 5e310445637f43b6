//! What the feeder tells the rest of the daemon: its state, its counts, its lag. And the switch that
//! pauses it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use halocline_tiering::time::ClusterTime;
use metrics::{Gauge, gauge};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Where a feeder stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeederState {
    /// Closing lanes, reading its position, replaying.
    Starting,
    /// Following the stream.
    Running,
    /// Another daemon has its lanes.
    Superseded,
    /// Its position has left the fast tier's oplog.
    HistoryLost,
}

impl FeederState {
    /// All states, for the one-hot metric.
    const ALL: [Self; 4] = [Self::Starting, Self::Running, Self::Superseded, Self::HistoryLost];

    /// Metric and status label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Superseded => "superseded",
            Self::HistoryLost => "history_lost",
        }
    }
}

/// See the module's description.
#[derive(Debug)]
pub struct FeederShared {
    state: Mutex<FeederState>,
    paused: watch::Sender<bool>,
    failed: watch::Sender<Option<String>>,
    applied: AtomicU64,
    events: AtomicU64,
    coalesced: AtomicU64,
    mirrored: AtomicU64,
    pending_keys: AtomicU64,
    /// Seconds; 0: not known yet.
    oplog_window: AtomicU64,
    times: Mutex<Times>,
    meters: Meters,
}

#[derive(Debug)]
struct Times {
    lag: Duration,
    ingested: ClusterTime,
    ingested_at: Instant,
    token_saved: Instant,
    trouble: Option<(Instant, String)>,
}

#[derive(Debug)]
struct Meters {
    lag: Gauge,
    keys: Gauge,
    bytes: Gauge,
    states: Vec<(FeederState, Gauge)>,
}

impl Default for FeederShared {
    fn default() -> Self {
        let now = Instant::now();
        let states = FeederState::ALL
            .map(|s| (s, gauge!("halocline_feeder_state", "state" => s.label())))
            .to_vec();
        Self {
            state: Mutex::new(FeederState::Starting),
            paused: watch::channel(false).0,
            failed: watch::channel(None).0,
            applied: AtomicU64::new(0),
            events: AtomicU64::new(0),
            coalesced: AtomicU64::new(0),
            mirrored: AtomicU64::new(0),
            pending_keys: AtomicU64::new(0),
            oplog_window: AtomicU64::new(0),
            times: Mutex::new(Times {
                lag: Duration::ZERO,
                ingested: ClusterTime::ZERO,
                ingested_at: now,
                token_saved: now,
                trouble: None,
            }),
            meters: Meters {
                lag: gauge!("halocline_feeder_lag_seconds"),
                keys: gauge!("halocline_feeder_pending_keys"),
                bytes: gauge!("halocline_feeder_pending_bytes"),
                states,
            },
        }
    }
}

impl FeederShared {
    /// The state now.
    #[must_use]
    pub fn get(&self) -> FeederState {
        *self.state.lock()
    }

    /// Changes the state.
    pub fn set(&self, state: FeederState) {
        *self.state.lock() = state;
        for (other, gauge) in &self.meters.states {
            gauge.set(if *other == state { 1.0 } else { 0.0 });
        }
    }

    /// Whether the feeder is to hold its flushes back; it keeps reading the stream.
    #[must_use]
    pub fn paused(&self) -> watch::Receiver<bool> {
        self.paused.subscribe()
    }

    /// Holds flushes back, or lets them go again.
    pub fn pause(&self, paused: bool) {
        self.paused.send_replace(paused);
    }

    /// The daemon cannot go on: it must drain and exit.
    pub fn fail(&self, why: &str) {
        self.failed.send_replace(Some(why.to_owned()));
    }

    /// Why the daemon cannot go on.
    #[must_use]
    pub fn failed(&self) -> watch::Receiver<Option<String>> {
        self.failed.subscribe()
    }

    /// Everything up to here, in every collection, is on the archive.
    #[must_use]
    pub fn applied(&self) -> ClusterTime {
        ClusterTime(self.applied.load(Ordering::SeqCst))
    }

    pub(crate) fn set_applied(&self, applied: ClusterTime) {
        self.applied.store(applied.0, Ordering::SeqCst);
    }

    pub(crate) fn set_ingested(&self, ingested: ClusterTime, now: Instant) {
        let mut times = self.times.lock();
        times.ingested = ingested;
        times.ingested_at = now;
    }

    pub(crate) fn set_pending(&self, keys: usize, bytes: usize, lag: Duration) {
        self.pending_keys.store(keys as u64, Ordering::Relaxed);
        self.times.lock().lag = lag;
        #[allow(clippy::cast_precision_loss)]
        {
            self.meters.keys.set(keys as f64);
            self.meters.bytes.set(bytes as f64);
        }
        self.meters.lag.set(lag.as_secs_f64());
    }

    pub(crate) fn set_oplog_window(&self, seconds: u64) {
        self.oplog_window.store(seconds, Ordering::Relaxed);
    }

    pub(crate) fn token_saved(&self) {
        self.times.lock().token_saved = Instant::now();
    }

    pub(crate) fn note_trouble(&self, message: &str) {
        self.times.lock().trouble = Some((Instant::now(), message.to_owned()));
    }

    pub(crate) fn count_event(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_coalesced(&self) {
        self.coalesced.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_mirrored(&self, documents: u64) {
        self.mirrored.fetch_add(documents, Ordering::Relaxed);
    }

    /// A picture for `/status`.
    #[must_use]
    pub fn snapshot(&self) -> FeederSnapshot {
        let times = self.times.lock();
        FeederSnapshot {
            state: if *self.paused.borrow() { "paused" } else { self.get().label() },
            lag: times.lag,
            ingested_ago: times.ingested_at.elapsed(),
            token_age: times.token_saved.elapsed(),
            pending_keys: self.pending_keys.load(Ordering::Relaxed),
            oplog_window: match self.oplog_window.load(Ordering::Relaxed) {
                0 => None,
                seconds => Some(Duration::from_secs(seconds)),
            },
            events: self.events.load(Ordering::Relaxed),
            coalesced: self.coalesced.load(Ordering::Relaxed),
            mirrored: self.mirrored.load(Ordering::Relaxed),
            trouble: times
                .trouble
                .as_ref()
                .filter(|(at, _)| at.elapsed() < Duration::from_secs(10))
                .map(|(_, message)| message.clone()),
        }
    }
}

/// The feeder at one moment.
#[derive(Debug, Clone)]
pub struct FeederSnapshot {
    /// State label, `paused` included.
    pub state: &'static str,
    /// Age of the oldest pending change.
    pub lag: Duration,
    /// Since the stream last said anything.
    pub ingested_ago: Duration,
    /// Since the position was last persisted.
    pub token_age: Duration,
    /// Keys changed on the fast tier and not yet written to the archive.
    pub pending_keys: u64,
    /// Length of the fast tier's oplog: how long the feeder may be away.
    pub oplog_window: Option<Duration>,
    /// Client events read.
    pub events: u64,
    /// Changes that needed no write of their own.
    pub coalesced: u64,
    /// Documents written to or deleted from the archive.
    pub mirrored: u64,
    /// What went wrong in the last seconds, if anything.
    pub trouble: Option<String>,
}
