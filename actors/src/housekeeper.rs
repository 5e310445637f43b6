//! Housekeeper: what must be done now and then and belongs to no request: idle cursors are killed,
//! forgotten transactions let go, definitions compared, gauges set.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use bson::rawdoc;
use halocline_cluster::Tier;
use metrics::{counter, gauge};
use tracing::warn;

use crate::context::ThreadContext;
use crate::definitions::synchronise;
use crate::execute::Engine;
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
}

impl Housekeeper {
    /// A housekeeper on the calling thread.
    #[must_use]
    pub fn new(context: Rc<ThreadContext>) -> Self {
        Self { context }
    }
}

impl Actor for Housekeeper {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let work = keep(self.context.clone());
        ctx.spawn(work.into_actor(self).map(|(), _, ctx| ctx.stop()));
    }
}

impl Handler<Drain> for Housekeeper {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

async fn keep(context: Rc<ThreadContext>) {
    let engine = Engine::new(context.clone());
    let shared = &context.shared;
    let reaped = counter!("halocline_cursors_reaped_total");
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
        for tier in [Tier::Fast, Tier::Archive] {
            #[allow(clippy::cast_precision_loss)]
            {
                gauge!("halocline_cursors_open", "tier" => tier.label())
                    .set(shared.cursors.open(tier) as f64);
                gauge!("halocline_transactions_open", "tier" => tier.label())
                    .set(shared.transactions.open(tier) as f64);
            }
        }
        if now >= counts_due {
            counts_due = now + COUNTS;
            count_documents(&context).await;
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
