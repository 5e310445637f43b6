//! Counts and times of requests: Prometheus handles made once and kept per thread, and plain
//! totals for `/status`. Nothing on the request path locks what another thread locks.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ahash::AHashMap;
use metrics::{Counter, Histogram, counter, histogram};
use parking_lot::Mutex;

/// Who answered a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answered {
    /// The fast tier alone.
    Fast,
    /// The archive was needed.
    Archive,
    /// The daemon itself.
    Local,
}

impl Answered {
    /// Metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Archive => "archive",
            Self::Local => "halocline",
        }
    }
}

/// Totals of all threads.
#[derive(Debug, Default)]
pub struct Stats {
    threads: Mutex<Vec<Arc<Totals>>>,
    /// Error replies made by the daemon itself.
    pub errors: AtomicU64,
    /// Client connections open now.
    pub connections: AtomicU64,
}

#[derive(Debug, Default)]
struct Totals {
    fast: AtomicU64,
    archive: AtomicU64,
    local: AtomicU64,
    /// Locked by its own thread a request, by `/status` once a second.
    by_reason: Mutex<AHashMap<&'static str, u64>>,
}

/// Sums for `/status`.
#[derive(Debug, Default)]
pub struct RequestTotals {
    /// Answered by the fast tier alone.
    pub fast: u64,
    /// That needed the archive.
    pub archive: u64,
    /// Answered by the daemon itself.
    pub local: u64,
    /// By reason label.
    pub by_reason: BTreeMap<&'static str, u64>,
}

impl Stats {
    /// Nothing counted yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The calling thread's recorder.
    #[must_use]
    pub fn recorder(&self) -> Recorder {
        let totals = Arc::new(Totals::default());
        self.threads.lock().push(totals.clone());
        Recorder {
            totals,
            handles: RefCell::default(),
            backend: [Answered::Fast, Answered::Archive, Answered::Local]
                .map(|tier| histogram!("halocline_backend_seconds", "tier" => tier.label())),
            point_barrier: histogram!("halocline_barrier_seconds", "kind" => "point"),
            range_barrier: histogram!("halocline_barrier_seconds", "kind" => "range"),
            admission: histogram!("halocline_admission_wait_seconds"),
            faultin: histogram!("halocline_faultin_seconds"),
        }
    }

    /// Sums over all threads.
    #[must_use]
    pub fn totals(&self) -> RequestTotals {
        let mut sum = RequestTotals::default();
        for totals in self.threads.lock().iter() {
            sum.fast += totals.fast.load(Ordering::Relaxed);
            sum.archive += totals.archive.load(Ordering::Relaxed);
            sum.local += totals.local.load(Ordering::Relaxed);
            for (reason, n) in totals.by_reason.lock().iter() {
                *sum.by_reason.entry(reason).or_insert(0) += n;
            }
        }
        sum
    }
}

/// One thread's handles.
#[derive(Debug)]
pub struct Recorder {
    totals: Arc<Totals>,
    handles: RefCell<AHashMap<(&'static str, Answered, &'static str), Handles>>,
    backend: [Histogram; 3],
    /// Waits of point barriers.
    pub point_barrier: Histogram,
    /// Waits of range barriers.
    pub range_barrier: Histogram,
    /// Waits of client writes for admission.
    pub admission: Histogram,
    /// Fault-ins, from the miss to the commit.
    pub faultin: Histogram,
}

#[derive(Debug)]
struct Handles {
    requests: Counter,
    seconds: Histogram,
}

impl Recorder {
    /// Counts one request. `command` must come from a closed list: it becomes a label.
    pub fn request(
        &self,
        command: &'static str,
        answered: Answered,
        reason: &'static str,
        took: Duration,
    ) {
        let mut handles = self.handles.borrow_mut();
        let handle = handles.entry((command, answered, reason)).or_insert_with(|| Handles {
            requests: counter!("halocline_requests_total",
                "command" => command, "tier" => answered.label(), "reason" => reason),
            seconds: histogram!("halocline_request_seconds",
                "command" => command, "tier" => answered.label()),
        });
        handle.requests.increment(1);
        handle.seconds.record(took.as_secs_f64());
        let total = match answered {
            Answered::Fast => &self.totals.fast,
            Answered::Archive => &self.totals.archive,
            Answered::Local => &self.totals.local,
        };
        total.fetch_add(1, Ordering::Relaxed);
        *self.totals.by_reason.lock().entry(reason).or_insert(0) += 1;
    }

    /// Time one tier took for one exchange.
    pub fn backend(&self, tier: Answered, took: Duration) {
        let [fast, archive, local] = &self.backend;
        let histogram = match tier {
            Answered::Fast => fast,
            Answered::Archive => archive,
            Answered::Local => local,
        };
        histogram.record(took.as_secs_f64());
    }
}
