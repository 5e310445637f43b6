//! The stored boundary against a real fast tier: no move may make it speak untrue, whatever the
//! order in which evictor, warmer and a leader that has lost its lease come to it (protocol rules
//! 27, 28, 30, 32).

#![allow(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use halocline_actors::boundary::{self, Effect, Stored};
use halocline_actors::context::ThreadContext;
use halocline_actors::options::{ActorOptions, FeederOptions, LimitOptions, MoveOptions, Options};
use halocline_actors::shared::{Collection, Shared};
use halocline_cluster::moves::{Move, ensure_anchor};
use halocline_cluster::{Cluster, ClusterOptions, Tier};
use halocline_testbed::ReplicaSet;
use halocline_tiering::date::{DateField, DateKind};
use halocline_tiering::{DatePoint, Namespace};

const MINUTE: Duration = Duration::from_secs(60);

/// One daemon's view of the collection. The boundary lives on the fast tier alone, so one replica
/// set is enough.
struct Daemon {
    context: Rc<ThreadContext>,
    collection: Collection,
}

impl Daemon {
    async fn new(set: &ReplicaSet) -> Self {
        let tier = |tier| ClusterOptions::new(tier, set.uri());
        let fast = Cluster::connect(tier(Tier::Fast)).await.unwrap();
        let archive = Cluster::connect(tier(Tier::Archive)).await.unwrap();
        let shared = Arc::new(Shared::new(options(set), fast, archive, Vec::new(), 1));
        let date = DateField::new("date", DateKind::Date).unwrap();
        let collection = Collection::new(0, Namespace::new("db", "c").unwrap(), date, MINUTE);
        Self { context: ThreadContext::current(&shared), collection }
    }

    async fn claim(&self) -> Stored {
        boundary::claim(&self.context, &self.collection).await.unwrap()
    }

    async fn stored(&self) -> Stored {
        boundary::load(&self.context, &self.collection).await.unwrap()
    }

    async fn raise(&self, to: i64) -> Stored {
        boundary::raise(&self.context, &self.collection, DatePoint(to)).await.unwrap()
    }

    /// A move that began when the boundary was as `stored` says. Whether it may commit; it does then.
    async fn moves(&self, stored: Stored, effect: Effect) -> bool {
        let context = &self.context;
        let mut moving = Move::open(&context.fast, &context.moves).await.unwrap();
        let allowed = boundary::write_in(context, &mut moving, &self.collection, stored, effect)
            .await
            .unwrap();
        if allowed {
            moving.commit().await.unwrap();
        } else {
            moving.abort().await;
        }
        allowed
    }
}

fn options(set: &ReplicaSet) -> Options {
    Options {
        listen: Vec::new(),
        fast: ClusterOptions::new(Tier::Fast, set.uri()),
        archive: ClusterOptions::new(Tier::Archive, set.uri()),
        collections: Vec::new(),
        actors: ActorOptions {
            connection_threads: 1,
            appliers: 1,
            evictors: 1,
            warmers: 1,
            failure_limit: 1,
            failure_window: MINUTE,
        },
        feeder: FeederOptions {
            coalesce: Duration::ZERO,
            batch_keys: 1,
            token_interval: MINUTE,
            max_pending_keys: 1,
            max_lag: MINUTE,
        },
        moves: MoveOptions {
            batch_documents: 1,
            batch_pause: Duration::ZERO,
            evict_interval: MINUTE,
            evict_grace: MINUTE,
            residency: MINUTE,
        },
        limits: LimitOptions { max_connections: 1, cursor_idle: MINUTE, operation_wait: MINUTE },
        drain_deadline: MINUTE,
    }
}

fn evicts(below: i64) -> Effect {
    Effect::Evicts(Some(DatePoint(below)))
}

fn lowers(to: i64) -> Effect {
    Effect::Lowers(DatePoint(to))
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

#[test]
fn no_move_makes_the_boundary_speak_untrue() {
    run(async {
        let set = ReplicaSet::builder().name("fast").start().await.unwrap();
        let daemon = Daemon::new(&set).await;
        ensure_anchor(&daemon.context.fast).await.unwrap();
        let fresh = daemon.claim().await;
        assert_eq!(fresh.complete_from, None);
        assert!(daemon.moves(fresh, lowers(100)).await);

        // The evictor's round begins; before its move the warmer lowers the boundary below its horizon.
        let round = daemon.stored().await;
        assert!(daemon.moves(round, lowers(50)).await);
        assert!(!daemon.moves(round, evicts(80)).await, "covered documents would go");
        assert!(daemon.moves(round, evicts(50)).await);

        // The archive is asked what to copy; documents of that range are evicted; then it is to be
        // declared complete.
        let listing = daemon.stored().await;
        assert!(daemon.moves(listing, evicts(40)).await);
        assert!(!daemon.moves(listing, lowers(30)).await, "evicted documents would be missing");
        assert!(
            daemon.moves(daemon.stored().await, lowers(30)).await,
            "asked again, all is copied"
        );

        // Evictions below the range do not disturb the warmer.
        let listing = daemon.raise(90).await;
        assert!(daemon.moves(listing, evicts(40)).await);
        assert!(daemon.moves(listing, lowers(60)).await, "what has gone lies below");

        // A move that began before a raise.
        let before = daemon.stored().await;
        let raised = daemon.raise(100).await;
        assert_eq!(raised.complete_from, Some(DatePoint(100)));
        for effect in [Effect::Copies, evicts(20), Effect::Evicts(None), lowers(95)] {
            assert!(!daemon.moves(before, effect).await, "{effect:?}");
            assert!(daemon.moves(raised, effect).await, "{effect:?}");
        }
    });
}

/// A leader that was paused and does not know yet that another leads: it would evict what the other
/// takes for covered.
#[test]
fn a_former_leader_neither_raises_nor_moves() {
    run(async {
        let set = ReplicaSet::builder().name("fast").start().await.unwrap();
        let former = Daemon::new(&set).await;
        ensure_anchor(&former.context.fast).await.unwrap();
        let claimed = former.claim().await;
        assert!(former.moves(claimed, lowers(50)).await);
        let round = former.stored().await;
        // Its snapshot opens before the other leads, and its commit comes after.
        let (context, collection) = (&former.context, &former.collection);
        let mut open = Move::open(&context.fast, &context.moves).await.unwrap();

        let leader = Daemon::new(&set).await;
        assert_eq!(leader.claim().await.complete_from, Some(DatePoint(50)));
        let late = boundary::write_in(context, &mut open, collection, round, evicts(40)).await;
        assert!(late.is_err_and(|error| error.is_write_conflict()));
        open.abort().await;
        assert_eq!(former.raise(80).await.complete_from, Some(DatePoint(50)), "not raised");
        for effect in [Effect::Copies, lowers(10), evicts(40), Effect::Evicts(None)] {
            assert!(!former.moves(former.stored().await, effect).await, "{effect:?}");
        }
        assert_eq!(leader.raise(80).await.complete_from, Some(DatePoint(80)));
        assert!(leader.moves(leader.stored().await, evicts(80)).await);
    });
}
