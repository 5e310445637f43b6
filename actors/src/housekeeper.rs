//! Housekeeper: what must be done now and then and belongs to no request: idle cursors are killed,
//! forgotten transactions let go, definitions compared, gauges set.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use bson::rawdoc;
use halocline_cluster::Tier;
use metrics::{Gauge, counter, gauge};
use tracing::warn;

use crate::context::ThreadContext;
use crate::definitions::synchronise;
use crate::execute::Engine;
use crate::feeder::oldest_in_oplog;
use crate::feeder_state::FeederShared;
use crate::panic_injection::checkpoint;
use crate::supervisor::Drain;
use crate::views;

/// Between two rounds.
const ROUND: Duration = Duration::from_secs(1);

/// Definitions of both tiers are compared this often.
const DEFINITIONS: Duration = Duration::from_secs(60);

/// Documents on the fast tier are estimated this often.
const COUNTS: Duration = Duration::from_secs(5);

/// See the module's description.
pub struct Housekeeper {
    context: Rc<ThreadContext>,
    feeder: Arc<FeederShared>,
}

impl Housekeeper {
    /// A housekeeper on the calling thread.
    #[must_use]
    pub fn new(context: Rc<ThreadContext>, feeder: Arc<FeederShared>) -> Self {
        Self { context, feeder }
    }
}

impl Actor for Housekeeper {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let work = keep(self.context.clone(), self.feeder.clone());
        ctx.spawn(work.into_actor(self).map(|(), _, ctx| ctx.stop()));
    }
}

impl Handler<Drain> for Housekeeper {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

async fn keep(context: Rc<ThreadContext>, feeder: Arc<FeederShared>) {
    let engine = Engine::new(context.clone());
    let shared = &context.shared;
    let reaped = counter!("halocline_cursors_reaped_total");
    let gauges = Gauges::new(&context);
    let mut definitions_due = Instant::now() + DEFINITIONS;
    let mut counts_due = Instant::now();
    loop {
        tokio::time::sleep(ROUND).await;
        checkpoint("housekeeper");
        let now = Instant::now();
        for cursor in shared.cursors.reap(shared.options.limits.cursor_idle, now) {
            reaped.increment(1);
            engine.kill_cursor(&cursor).await;
        }
        shared.transactions.reap();
        gauges.set(&context, &feeder);
        if now >= counts_due {
            counts_due = now + COUNTS;
            count_documents(&context).await;
            measure_oplog(&context, &feeder).await;
        }
        if now >= definitions_due {
            definitions_due = now + DEFINITIONS;
            if let Err(error) = views::refresh(&context).await {
                warn!(%error, "the archive's views could not be looked at");
            }
            for collection in &shared.collections {
                if let Err(error) = synchronise(&context, collection).await {
                    warn!(ns = %collection.name, %error, "definitions could not be compared");
                }
            }
        }
    }
}

/// Gauges that nobody sets as a matter of course.
struct Gauges {
    cursors: [(Tier, Gauge); 2],
    transactions: [(Tier, Gauge); 2],
    ingest_lag: Gauge,
    token_age: Gauge,
    collections: Vec<CollectionGauges>,
}

struct CollectionGauges {
    overdue: Gauge,
    undated: Gauge,
}

impl Gauges {
    fn new(context: &ThreadContext) -> Self {
        let both = |name: &'static str| {
            [Tier::Fast, Tier::Archive].map(|tier| (tier, gauge!(name, "tier" => tier.label())))
        };
        let collections = context.shared.collections.iter().map(|c| CollectionGauges {
            overdue: gauge!("halocline_evictor_overdue_seconds", "ns" => c.name.clone()),
            undated: gauge!("halocline_evictor_undated_documents", "ns" => c.name.clone()),
        });
        gauge!("halocline_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
        Self {
            cursors: both("halocline_cursors_open"),
            transactions: both("halocline_transactions_open"),
            ingest_lag: gauge!("halocline_feeder_ingest_lag_seconds"),
            token_age: gauge!("halocline_feeder_token_age_seconds"),
            collections: collections.collect(),
        }
    }

    #[allow(clippy::cast_precision_loss)]
    fn set(&self, context: &ThreadContext, feeder: &FeederShared) {
        let shared = &context.shared;
        for (tier, gauge) in &self.cursors {
            gauge.set(shared.cursors.open(*tier) as f64);
        }
        for (tier, gauge) in &self.transactions {
            gauge.set(shared.transactions.open(*tier) as f64);
        }
        let now = feeder.snapshot();
        self.ingest_lag.set(now.ingested_ago.as_secs_f64());
        self.token_age.set(now.token_age.as_secs_f64());
        for (collection, gauges) in shared.collections.iter().zip(&self.collections) {
            let count = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed) as f64;
            gauges.overdue.set(count(&collection.moves.overdue_seconds));
            gauges.undated.set(count(&collection.moves.undated));
        }
    }
}

/// How long the feeder may be away before its position leaves the fast tier's oplog.
async fn measure_oplog(context: &ThreadContext, feeder: &FeederShared) {
    match oldest_in_oplog(context).await {
        Ok(oldest) => {
            let newest = context.shared.progress.ingested().seconds();
            let seconds = newest.saturating_sub(oldest.seconds());
            feeder.set_oplog_window(u64::from(seconds));
            gauge!("halocline_feeder_oplog_window_seconds").set(f64::from(seconds));
        }
        Err(error) => tracing::debug!(%error, "the oplog's length could not be measured"),
    }
}

async fn count_documents(context: &ThreadContext) {
    for collection in &context.shared.collections {
        let count = rawdoc! { "count": collection.ns.coll() };
        let reply = async {
            let mut connection = context.fast.primary().await?;
            connection.run(collection.ns.db(), &count).await
        };
        match reply.await {
            Ok(reply) => {
                let n = reply.get_number("n").and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
                collection.moves.fast_documents.store(n, Ordering::Relaxed);
                #[allow(clippy::cast_precision_loss)]
                gauge!("halocline_fast_documents", "ns" => collection.name.clone()).set(n as f64);
            }
            Err(error) => tracing::debug!(%error, "documents could not be counted"),
        }
    }
}
