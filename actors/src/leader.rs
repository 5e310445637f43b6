//! Leader: holds the lease on the fast tier while this daemon serves (protocol rule 32). Answers to
//! clients stop before the lease can have expired; a standby waits for it to end.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, WrapFuture};
use halocline_cluster::lanes::LaneRecord;
use halocline_cluster::lease::{Lease, acquire};
use halocline_cluster::{ClusterError, Tier};
use tracing::{info, warn};

use crate::context::ThreadContext;
use crate::feeder_state::FeederShared;
use crate::panic_injection::checkpoint;
use crate::shared::Shared;
use crate::supervisor::Drain;

/// How long a lease lasts without being renewed: a standby takes over this long after a leader died.
pub const LEASE: Duration = Duration::from_secs(3);

/// Renewals in one lease: one may fail without consequence.
const RENEWALS: u32 = 4;

/// What clients are answered under ends this long before the lease does: an answer may still be on
/// its way when the check has passed.
const MARGIN: Duration = Duration::from_millis(300);

/// Waits until this daemon is the leader.
///
/// # Errors
/// When the fast tier does not answer.
pub async fn lead(context: &ThreadContext, holder: &str) -> Result<(), ClusterError> {
    let lease = acquire(&context.fast, holder, LEASE).await?;
    info!(epoch = lease.epoch(), "leading");
    let shared = &context.shared;
    publish(shared, &lease);
    *shared.lease.lock().await = Some(lease);
    Ok(())
}

fn publish(shared: &Shared, lease: &Lease) {
    let until = lease.valid_until();
    shared.set_lease_until(until.checked_sub(MARGIN).unwrap_or(until));
}

/// A new epoch for a feeder that begins, above every epoch that has written to the archive.
///
/// # Errors
/// When this daemon does not lead (any more) or a tier does not answer.
pub async fn next_epoch(context: &ThreadContext) -> Result<i64, ClusterError> {
    let shared = &context.shared;
    let lanes = shared.progress.pending().lanes();
    let record = LaneRecord::find_or_fix(&context.archive, shared.fast.set_name(), lanes).await?;
    let mut held = shared.lease.lock().await;
    let Some(lease) = held.as_mut() else {
        return Err(ClusterError::Superseded {
            tier: Tier::Fast,
            message: "this daemon holds no lease".into(),
        });
    };
    let epoch = lease.next_epoch(&context.fast, record.highest_epoch).await?;
    publish(shared, lease);
    Ok(epoch)
}

/// Gives the lease up after a drain, so that a standby need not wait for it to end.
pub async fn resign(context: &ThreadContext) {
    let lease = context.shared.lease.lock().await.take();
    context.shared.set_lease_until(context.shared.started);
    if let Some(lease) = lease
        && let Err(error) = lease.release(&context.fast).await
    {
        warn!(%error, "the lease could not be given up; it ends by itself");
    }
}

/// See the module's description.
pub struct Leader {
    context: Rc<ThreadContext>,
    feeder: Arc<FeederShared>,
}

impl Leader {
    /// Keeps the lease that [`lead`] has taken.
    #[must_use]
    pub fn new(context: Rc<ThreadContext>, feeder: Arc<FeederShared>) -> Self {
        Self { context, feeder }
    }
}

impl Actor for Leader {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let work = renew(self.context.clone(), self.feeder.clone());
        ctx.spawn(work.into_actor(self).map(|(), _, ctx| ctx.stop()));
    }
}

impl Handler<Drain> for Leader {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

async fn renew(context: Rc<ThreadContext>, feeder: Arc<FeederShared>) {
    loop {
        tokio::time::sleep(LEASE / RENEWALS).await;
        checkpoint("leader");
        let mut held = context.shared.lease.lock().await;
        let Some(lease) = held.as_mut() else { return };
        match lease.renew(&context.fast).await {
            Ok(()) => publish(&context.shared, lease),
            Err(error) if error.is_superseded() => {
                context.shared.set_lease_until(context.shared.started);
                feeder.fail("another daemon holds the lease now");
                return;
            }
            Err(error) => {
                warn!(%error, "the lease could not be renewed; clients are not answered once it ends");
            }
        }
    }
}
