//! A panic in each kind of actor, at the places where it hurts most, under traffic: the actor is
//! back, the daemon has counted it, and nothing is lost. Too many panics end the daemon in order.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mongodb::Client;
use mongodb::bson::{RawDocumentBuf, doc};
use support::daemon::{ActorCounts, Config, Daemon, connection_string};
use support::deployment::{COLL, DB, Pair, date};
use support::owner::{Habits, Traffic};
use support::truth::{Truth, changed, fresh_document};
use support::{PATIENCE, seed, until};
use tokio::net::TcpStream;

/// A window that documents enter and leave, warmed so slowly that it can be disturbed.
const CONFIG: Config =
    Config { keep: "15s", batch_documents: 20, batch_pause: "100ms", ..Config::DEFAULT };

/// Checkpoints of the daemon, in an order that finds each of them passed: warming is over soon.
const CHECKPOINTS: [&str; 16] = [
    "warmer/copied",
    "warmer",
    "feeder",
    "feeder/ingested",
    "applier",
    "applier/written",
    "evictor",
    "evictor/deleted",
    "router",
    "connection_thread",
    "connection_handler",
    "connection_handler/faulted_in",
    "connection_handler/executed",
    "leader",
    "housekeeper",
    "acceptor",
];

#[tokio::test]
async fn every_actor_comes_back_from_a_panic_and_nothing_is_lost() {
    let seed = seed();
    let pair = Pair::start(1).await;
    let truth = Arc::new(Truth::default());
    let year = (0..400).map(|i| 30.0 + f64::from(i) * 78_840.0);
    let around_now = (0..800).map(|i| 15.0 - f64::from(i) / 10.0);
    pair.seed(&truth, 4, year.chain(around_now)).await;
    let mut daemon = Daemon::start(&pair, &CONFIG).await;
    let habits = Habits { recent: 7.0, ..Habits::THROUGH_FAULTS };
    let traffic = Traffic::start(&[&daemon], &truth, habits, seed).await;

    // Says nothing while a panic is awaited, so that it is never the one who meets it; its commands
    // are not repeated by its driver, so that it would notice.
    let uri = connection_string(&[&daemon], PATIENCE) + "&maxPoolSize=1";
    let bystander = Client::with_uri_str(uri).await.unwrap().database("elsewhere");
    let greet = || bystander.run_command(doc! { "ping": 1 });
    greet().await.unwrap();

    let mut panics = BTreeMap::<&str, u64>::new();
    for checkpoint in CHECKPOINTS {
        let kind = checkpoint.split('/').next().unwrap();
        let before = daemon.actor(kind).await;
        daemon.arm(checkpoint, 1).await;
        until(&format!("a panic at {checkpoint}"), async || {
            // Somebody new, for the actors that only newcomers meet.
            drop(TcpStream::connect(daemon.address()).await);
            (daemon.actor(kind).await.panics > before.panics).then_some(())
        })
        .await;
        let panicked = Instant::now();
        // A connection is not restarted: its client makes another.
        let restarts = before.restarts + u64::from(kind != "connection_handler");
        let all_back = |now: ActorCounts| now.restarts == restarts && now.up >= before.up;
        until(&format!("every {kind} to be back"), async || {
            let now = daemon.actor(kind).await;
            (all_back(now) || (kind == "connection_handler" && now.up > 0)).then_some(())
        })
        .await;
        println!(
            "{checkpoint}: back {:.2} s after the panic was seen",
            panicked.elapsed().as_secs_f64()
        );
        greet().await.expect("nobody else's connection notices");
        traffic.proceed(2).await;
        daemon.assert_running();
        *panics.entry(kind).or_default() += 1;
    }
    for (kind, panics) in panics {
        let counts = daemon.actor(kind).await;
        let restarts = if kind == "connection_handler" { 0 } else { panics };
        assert_eq!((counts.panics, counts.restarts), (panics, restarts), "{kind}");
        for (series, expected) in
            [("halocline_actor_panics_total", panics), ("halocline_actor_restarts_total", restarts)]
        {
            let series = format!("{series}{{actor=\"{kind}\"}}");
            #[allow(clippy::cast_precision_loss)]
            let expected = expected as f64;
            assert!((daemon.metric(&series).await - expected).abs() < 0.5, "{series}");
        }
    }
    let collection = daemon.collection().await;
    for moved in ["warmed", "evicted", "faulted_in"] {
        assert!(collection[moved].as_u64().unwrap() > 0, "{moved}");
    }
    traffic.proceed(50).await;
    traffic.stop().await;
    daemon.drained().await;
    truth.compare(&pair).await;
    truth.assert_kept();

    daemon.terminate();
    assert!(daemon.wait_exit().await.success());
    too_many_panics_end_the_daemon_in_order(&pair, &truth).await;
}

/// At the limit `/readyz` sends clients away, what is under way is finished, the exit code tells that
/// something was wrong; and the next start finds everything.
async fn too_many_panics_end_the_daemon_in_order(pair: &Pair, truth: &Truth) {
    const LIMIT: u32 = 3;
    let mut daemon = Daemon::start(pair, &Config { failure_limit: LIMIT, ..CONFIG }).await;
    let orders = daemon.client().await.database(DB).collection::<RawDocumentBuf>(COLL);
    let n = truth.new_number(0);
    let document = fresh_document(n, &truth.id(n), 0, date(0.0));
    orders.insert_one(&document).await.unwrap();

    let held = pair.hold(&["update"], Duration::from_secs(3)).await;
    let query = doc! { "_id": truth.id(n) };
    let update =
        tokio::spawn(
            async move { orders.update_one(query, doc! { "$set": { "v": 1_i64 } }).await },
        );
    held.wait_for(1).await;
    daemon.arm("feeder", LIMIT).await;
    until("/readyz to tell that the daemon has failed", async || {
        let (code, body) = daemon.get("/readyz").await.expect("the daemon still finishes a write");
        (code == 503 && body.contains("failed") && body.contains("feeder")).then_some(())
    })
    .await;
    let updated = update.await.unwrap().unwrap();
    assert_eq!(updated.matched_count, 1, "the write under way was finished");
    truth.known(n, Some(changed(&document, doc! { "v": 1_i64 })));
    let status = daemon.wait_exit().await;
    assert_eq!(status.code(), Some(1), "{status}");
    held.end().await;

    daemon.restart(pair).await;
    daemon.drained().await;
    truth.compare(pair).await;
    truth.assert_kept();
}
