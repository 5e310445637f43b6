//! What every thread of the daemon shares: the two tiers, the tiered collections with their
//! boundaries, and how far the feeder has come. Read-mostly; nothing here is locked for a read
//! that one tier answers.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use halocline_cluster::Cluster;
use halocline_cluster::lease::Lease;
use halocline_tiering::admission::Admission;
use halocline_tiering::pending::CollectionId;
use halocline_tiering::progress::Progress;
use halocline_tiering::recent::RecentKeys;
use halocline_tiering::route::IndexDefinition;
use halocline_tiering::{DateField, DatePoint, Namespace};
use parking_lot::Mutex;

use crate::execute::cursors::CursorTable;
use crate::execute::faultin::FaultIns;
use crate::execute::sessions::Transactions;
use crate::options::Options;
use crate::stats::Stats;
use crate::views::Views;

/// Longest time a proof of absence is used (protocol rule 19).
const PROOF_AGE: Duration = Duration::from_secs(30);

/// A freshly made ObjectId is one made within this time (protocol rule 20).
pub const FRESH_OBJECT_ID: Duration = Duration::from_secs(300);

/// See the module's description.
#[derive(Debug)]
pub struct Shared {
    /// What the daemon was told to do.
    pub options: Options,
    /// The fast tier.
    pub fast: Arc<Cluster>,
    /// The archive.
    pub archive: Arc<Cluster>,
    /// Tiered collections; a collection's place is its [`CollectionId`].
    pub collections: Vec<Arc<Collection>>,
    /// The feeder's progress and the pending set.
    pub progress: Arc<Progress>,
    /// Keys clients changed lately.
    pub recent: RecentKeys,
    /// Holds client writes back when the feeder cannot keep up.
    pub admission: Admission,
    /// Cursors given to clients.
    pub cursors: CursorTable,
    /// Views of the archive that show tiered documents.
    pub views: ArcSwap<Views>,
    /// Transactions under way.
    pub transactions: Transactions,
    /// Fault-ins under way, shared by those who wait for the same document.
    pub faultins: FaultIns,
    /// Counts and times.
    pub stats: Stats,
    /// From when on the residency record is whole: before it the evictor waits and fresh ObjectIds
    /// still need a proof of absence.
    history: HistoryKnown,
    /// The leader lease, renewed by the leader, given new epochs by the feeder.
    pub lease: tokio::sync::Mutex<Option<Lease>>,
    /// Monotonic end of the leader lease, nanoseconds after `started`; 0 before the first.
    lease_until: AtomicI64,
    /// When this process assembled the shared state.
    pub started: Instant,
    /// Tells this process from every other.
    pub instance: bson::Uuid,
    /// Set once when draining begins.
    pub draining: AtomicBool,
}

impl Shared {
    /// Puts the parts together. The collections must be in the order of `options.collections`.
    #[must_use]
    pub fn new(
        options: Options,
        fast: Arc<Cluster>,
        archive: Arc<Cluster>,
        collections: Vec<Arc<Collection>>,
        lanes: usize,
    ) -> Self {
        Self {
            progress: Arc::new(Progress::new(lanes, collections.len())),
            recent: RecentKeys::new(options.moves.residency),
            admission: Admission::default(),
            cursors: CursorTable::default(),
            views: ArcSwap::default(),
            transactions: Transactions::default(),
            faultins: FaultIns::default(),
            stats: Stats::new(),
            history: HistoryKnown::default(),
            lease: tokio::sync::Mutex::new(None),
            lease_until: AtomicI64::new(0),
            started: Instant::now(),
            instance: bson::Uuid::new(),
            draining: AtomicBool::new(false),
            options,
            fast,
            archive,
            collections,
        }
    }

    /// The tiered collection of that name, if there is one.
    #[must_use]
    pub fn collection(&self, db: &str, coll: &str) -> Option<&Arc<Collection>> {
        // A handful at most: comparing beats hashing.
        self.collections.iter().find(|c| c.ns.coll() == coll && c.ns.db() == db)
    }

    /// Whether a database has tiered collections.
    #[must_use]
    pub fn has_tiered(&self, db: &str) -> bool {
        self.collections.iter().any(|c| c.ns.db() == db)
    }

    /// How long a proof of absence holds: well inside the residency that protects it.
    #[must_use]
    pub fn proof_age(&self) -> Duration {
        PROOF_AGE.min(self.options.moves.residency / 2)
    }

    /// Whether every client change of the last residency period is known.
    #[must_use]
    pub fn residency_known(&self) -> bool {
        self.history.is_known(Instant::now())
    }

    /// The feeder has caught up, and its residency record is whole from that moment on.
    pub fn set_history_known(&self, from: Instant) {
        *self.history.from.lock() = Some(from);
    }

    /// The feeder begins anew: its residency record has a hole until it has caught up.
    pub fn forget_history(&self) {
        *self.history.from.lock() = None;
    }

    /// The leader lease holds until then, by this process's monotonic clock.
    pub fn set_lease_until(&self, until: Instant) {
        let nanos = until.saturating_duration_since(self.started).as_nanos();
        self.lease_until.store(i64::try_from(nanos).unwrap_or(i64::MAX), Ordering::SeqCst);
    }

    /// Whether this daemon may still answer clients (protocol rule 32). One clock read and one load.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        let now = i64::try_from(self.started.elapsed().as_nanos()).unwrap_or(i64::MAX);
        now < self.lease_until.load(Ordering::SeqCst)
    }
}

/// From when on every client change is in [`RecentKeys`].
#[derive(Debug, Default)]
struct HistoryKnown {
    /// The residency record is whole from this moment on.
    from: Mutex<Option<Instant>>,
}

impl HistoryKnown {
    fn is_known(&self, now: Instant) -> bool {
        self.from.lock().is_some_and(|from| now >= from)
    }
}

/// A tiered collection while the daemon runs.
#[derive(Debug)]
pub struct Collection {
    /// Its place in [`Shared::collections`].
    pub id: CollectionId,
    /// Its name.
    pub ns: Namespace,
    /// `database.collection`, ready for messages and metric labels.
    pub name: String,
    /// The date field.
    pub date: DateField,
    /// Configured age.
    pub keep: Duration,
    /// `complete_from` and its holders.
    pub boundary: BoundaryCell,
    /// Collection UUID on the fast tier.
    pub fast_uuid: ArcSwapOption<bson::Uuid>,
    /// Collection UUID on the archive.
    pub archive_uuid: ArcSwapOption<bson::Uuid>,
    /// Definitions that decide routes.
    pub definitions: ArcSwap<Definitions>,
    /// Warm-up, eviction and fault-in counts.
    pub moves: MoveCounts,
}

/// Indexes of a tiered collection, as far as routing needs them.
#[derive(Debug, Default)]
pub struct Definitions {
    /// The fast tier's indexes.
    pub indexes: Vec<IndexDefinition>,
}

impl Collection {
    /// A collection whose boundary is not known yet: nothing is covered.
    #[must_use]
    pub fn new(id: CollectionId, ns: Namespace, date: DateField, keep: Duration) -> Self {
        Self {
            id,
            name: ns.to_string(),
            ns,
            date,
            keep,
            boundary: BoundaryCell::default(),
            fast_uuid: ArcSwapOption::empty(),
            archive_uuid: ArcSwapOption::empty(),
            definitions: ArcSwap::default(),
            moves: MoveCounts::default(),
        }
    }
}

/// What the movers have done with one collection since start.
#[derive(Debug, Default)]
pub struct MoveCounts {
    /// Documents copied archive to fast tier by the warmer.
    pub warmed: AtomicU64,
    /// Documents evicted.
    pub evicted: AtomicU64,
    /// Documents faulted in.
    pub faulted_in: AtomicU64,
    /// Documents whose date is missing or of another type, on the fast tier now.
    pub undated: AtomicU64,
    /// Seconds by which eviction is overdue.
    pub overdue_seconds: AtomicU64,
    /// Documents on the fast tier, estimated.
    pub fast_documents: AtomicU64,
    /// Milliseconds until the boundary reaches the window at the present rate; 0: unknown.
    pub warm_eta_millis: AtomicU64,
    /// Warm progress in thousandths.
    pub warm_permille: AtomicU64,
    /// Documents found to differ between the tiers.
    pub mismatches: AtomicU64,
}

/// One version of a collection's boundary. Whoever relies on it (a covered operation, an open
/// covered cursor) holds the `Arc`; the evictor waits for holders of older versions.
#[derive(Debug, Default)]
pub struct Boundary {
    /// The fast tier holds every live document from here on; `None`: nothing is complete.
    pub complete_from: Option<DatePoint>,
    /// The stored boundary's raise epoch this was read or committed under.
    raise_epoch: i64,
}

/// The current boundary, and the older ones somebody still relies on (protocol rule 30).
#[derive(Debug, Default)]
pub struct BoundaryCell {
    current: ArcSwap<Boundary>,
    older: Mutex<Vec<Weak<Boundary>>>,
}

impl BoundaryCell {
    /// The boundary to rely on from now until the returned value is dropped.
    #[must_use]
    pub fn hold(&self) -> Arc<Boundary> {
        self.current.load_full()
    }

    /// Where completeness begins now.
    #[must_use]
    pub fn complete_from(&self) -> Option<DatePoint> {
        self.current.load().complete_from
    }

    /// Publishes what was stored under a raise epoch. News that is older than what is known is
    /// passed over: a warm-up's commit may be heard of after the raise that followed it. Under one
    /// epoch the boundary only falls.
    pub fn publish(&self, raise_epoch: i64, complete_from: Option<DatePoint>) {
        let mut older = self.older.lock();
        let known = self.current.load();
        let lower = match (known.complete_from, complete_from) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(known), Some(new)) => new < known,
        };
        if raise_epoch < known.raise_epoch || (raise_epoch == known.raise_epoch && !lower) {
            return;
        }
        drop(known);
        let old = self.current.swap(Arc::new(Boundary { complete_from, raise_epoch }));
        older.retain(|b| b.strong_count() > 0);
        older.push(Arc::downgrade(&old));
    }

    /// The lowest boundary below `complete_from` that somebody still relies on. What is older than
    /// that may go.
    #[must_use]
    pub fn held_below(&self, complete_from: DatePoint) -> Option<DatePoint> {
        let mut older = self.older.lock();
        older.retain(|b| b.strong_count() > 0);
        let held = older.iter().filter_map(Weak::upgrade).filter_map(|b| b.complete_from);
        held.filter(|held| *held < complete_from).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rule 30: an operation that began under an old boundary keeps its documents.
    #[test]
    fn an_old_boundary_is_held_until_its_last_reader_ends() {
        let cell = BoundaryCell::default();
        cell.publish(1, Some(DatePoint(10)));
        let reader = cell.hold();
        assert_eq!(cell.held_below(DatePoint(20)), None);
        cell.publish(2, Some(DatePoint(20)));
        assert_eq!(cell.held_below(DatePoint(20)), Some(DatePoint(10)));
        let second = reader.clone();
        drop(reader);
        assert_eq!(cell.held_below(DatePoint(20)), Some(DatePoint(10)));
        drop(second);
        assert_eq!(cell.held_below(DatePoint(20)), None);
    }

    /// Readers who come and go all the time must not keep the evictor from ever working: what the
    /// oldest of them does not rely on may go.
    #[test]
    fn with_a_reader_at_every_moment_the_held_boundary_still_rises() {
        let cell = BoundaryCell::default();
        cell.publish(1, Some(DatePoint(0)));
        let mut reader = cell.hold();
        for round in 1..10 {
            cell.publish(1 + round, Some(DatePoint(round)));
            assert_eq!(cell.held_below(DatePoint(round)), Some(DatePoint(round - 1)));
            reader = cell.hold();
        }
        drop(reader);
    }

    /// Rule 28: a warm-up whose commit is heard of late must not undo the raise that followed it.
    #[test]
    fn late_news_of_a_lower_boundary_does_not_undo_a_raise() {
        let cell = BoundaryCell::default();
        cell.publish(1, Some(DatePoint(30)));
        cell.publish(2, Some(DatePoint(40)));
        cell.publish(1, Some(DatePoint(10)));
        assert_eq!(cell.complete_from(), Some(DatePoint(40)));
        cell.publish(2, Some(DatePoint(35)));
        assert_eq!(cell.complete_from(), Some(DatePoint(35)));
        cell.publish(2, None);
        assert_eq!(cell.complete_from(), Some(DatePoint(35)));
        cell.publish(3, None);
        assert_eq!(cell.complete_from(), None);
    }
}
