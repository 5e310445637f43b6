//! Elections on either tier, by a step-down and by the death of the primary, under traffic: reads
//! and writes go on without a restart of the daemon, and what was acknowledged stays.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::sync::Arc;

use futures_util::TryStreamExt;
use halocline_testbed::ReplicaSet;
use mongodb::bson::doc;
use support::daemon::{Config, Daemon};
use support::deployment::Pair;
use support::owner::{Habits, Traffic};
use support::truth::Truth;
use support::{seed, until};

const CONFIG: Config = Config { keep: "15s", batch_documents: 30, ..Config::DEFAULT };

#[tokio::test]
async fn traffic_goes_on_through_elections_on_either_tier() {
    let seed = seed();
    let pair = Pair::start(3).await;
    let truth = Arc::new(Truth::default());
    let year = (0..300).map(|i| 30.0 + f64::from(i) * 105_120.0);
    let around_now = (0..400).map(|i| 15.0 - f64::from(i) / 5.0);
    pair.seed(&truth, 4, year.chain(around_now)).await;
    let mut daemon = Daemon::start(&pair, &CONFIG).await;
    let habits = Habits { recent: 7.0, ..Habits::THROUGH_FAULTS };
    let traffic = Traffic::start(&[&daemon], &truth, habits, seed).await;

    for (tier, set) in [("fast", &pair.fast), ("archive", &pair.archive)] {
        traffic.proceed(10).await;
        let killed = set.wait_primary().await.unwrap();
        set.kill9(killed);
        let next = set.wait_primary().await.unwrap();
        assert_ne!(next, killed);
        goes_on(&mut daemon, &traffic, tier, set, next).await;
        truth.audit(&pair).await;
        set.restart(killed).await.unwrap();

        let next = set.step_down().await.unwrap();
        goes_on(&mut daemon, &traffic, tier, set, next).await;
        truth.audit(&pair).await;
    }
    traffic.proceed(20).await;
    traffic.stop().await;
    daemon.drained().await;
    let (on_fast, on_archive) = truth.compare(&pair).await;
    truth.assert_kept();
    println!("{on_fast} documents on the fast tier, {on_archive} on the archive");
    daemon.terminate();
    assert!(daemon.wait_exit().await.success());
}

/// The daemon, the same process, has found the new primary, and every owner gets on.
async fn goes_on(
    daemon: &mut Daemon,
    traffic: &Traffic,
    tier: &str,
    set: &ReplicaSet,
    primary: usize,
) {
    let began = std::time::Instant::now();
    until("the daemon to find the new primary", async || {
        let status = daemon.status().await;
        (status[tier]["primary"] == set.host(primary)).then_some(())
    })
    .await;
    if tier == "fast" {
        // The old primary, a secondary now, would serve it on, as late as it replicates.
        let admin = set.direct_client(primary).await.unwrap().database("admin");
        until("the change stream to be read at the new primary", async || {
            let cursors = admin.aggregate([
                doc! { "$currentOp": { "allUsers": true, "idleCursors": true } },
                doc! { "$match": { "$or": [
                    { "command.pipeline.0.$changeStream": { "$exists": true } },
                    { "cursor.originatingCommand.pipeline.0.$changeStream": { "$exists": true } },
                ] } },
            ]);
            cursors.await.unwrap().try_next().await.unwrap()
        })
        .await;
    }
    traffic.proceed(10).await;
    daemon.assert_running();
    let status = daemon.status().await;
    println!(
        "{tier}: member {primary} leads; {:.1} s later every owner has got on; elections seen: {}",
        began.elapsed().as_secs_f64(),
        status[tier]["elections"]
    );
    assert!(status[tier]["elections"].as_u64().unwrap() > 0);
}
