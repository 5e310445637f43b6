//! What the network does to connections: nothing hangs, and what was not sent is known not to have
//! been (case 13).

use std::time::{Duration, Instant};

use bson::{Document, doc, rawdoc};
use halocline_cluster::{ClusterOptions, Phase, Pool, Tier};
use halocline_testbed::{Direction, FaultProxy, ReplicaSet};

use crate::support::{connect, options, run, soon, until};

fn insert(id: i32) -> bson::RawDocumentBuf {
    rawdoc! { "insert": "c", "documents": [{ "_id": id }] }
}

async fn proxied() -> ReplicaSet {
    ReplicaSet::builder().name("fast").proxied().start().await.unwrap()
}

#[test]
fn a_connection_that_was_reset_while_idle_is_not_handed_out() {
    run(async {
        let set = proxied().await;
        let pool = Pool::new(connect(options(&set)).await);
        for id in 0..20 {
            pool.run_once("db", &insert(id)).await.unwrap();
            set.proxy(0).unwrap().cut();
            // The next request comes at once, or after the reactor has seen the reset: both must
            // find a connection that works, or fail before anything was sent.
            if id % 2 == 0 {
                tokio::task::yield_now().await;
            }
            let ping = soon("a ping", pool.run_idempotent("admin", &rawdoc! { "ping": 1 })).await;
            ping.unwrap();
        }
    });
}

#[test]
fn a_lost_reply_is_an_unknown_outcome_and_a_refused_connection_is_not() {
    run(async {
        let set = proxied().await;
        let mut options = options(&set);
        options.server_selection_timeout = Duration::from_millis(500);
        let pool = Pool::new(connect(options).await);
        let proxy = set.proxy(0).unwrap();
        let lost = proxy.lose_reply_to(|bytes| bytes.windows(7).any(|w| w == b"insert\0"));
        let error = pool.run_once("db", &insert(1)).await.unwrap_err();
        assert!(lost.has_happened());
        assert!(error.is_network() && error.outcome_unknown() && error.is_retryable(), "{error}");
        let client = set.direct_client(0).await.unwrap();
        let coll = client.database("db").collection::<Document>("c");
        assert_eq!(coll.count_documents(doc! {}).await.unwrap(), 1);

        proxy.refuse();
        let error = soon("an error", async {
            loop {
                match pool.run_once("db", &insert(2)).await {
                    Err(error) if !error.outcome_unknown() => return error,
                    // What was open is still used before the reset is seen.
                    Err(_) => {}
                    Ok(_) => panic!("through a proxy that refuses"),
                }
            }
        })
        .await;
        assert!(error.is_network() || error.is_timeout(), "{error}");
        assert_eq!(coll.count_documents(doc! {}).await.unwrap(), 1);
        proxy.heal();
        until("the primary is back", || pool.cluster().topology().borrow().primary.is_some()).await;
        soon("a write", pool.run_idempotent("db", &insert(3))).await.unwrap();
    });
}

#[test]
fn a_network_that_swallows_everything_fails_requests_instead_of_holding_them() {
    run(async {
        let set = proxied().await;
        let mut options = options(&set);
        options.pool.connect_timeout = Duration::from_millis(500);
        options.server_selection_timeout = Duration::from_millis(500);
        options.pool.checkout_timeout = Duration::from_millis(500);
        let pool = Pool::new(connect(options).await);
        pool.run_once("db", &insert(1)).await.unwrap();
        let proxy = set.proxy(0).unwrap();
        proxy.blackhole(Direction::ToClient);
        let began = Instant::now();
        // The first takes a connection that looks alive, the others open new ones.
        let tasks: Vec<_> = (2..10)
            .map(|id| {
                let pool = pool.clone();
                tokio::task::spawn_local(async move { pool.run_once("db", &insert(id)).await })
            })
            .collect();
        for task in tasks {
            let error = soon("a request", task).await.unwrap().unwrap_err();
            assert!(error.is_network() || error.is_timeout(), "{error}");
        }
        println!("all had failed after {:?}", began.elapsed());
        proxy.heal();
        until("the primary is back", || pool.cluster().topology().borrow().primary.is_some()).await;
        soon("a write", pool.run_idempotent("db", &insert(100))).await.unwrap();
    });
}

#[test]
fn a_connection_being_opened_is_bounded_too() {
    run(async {
        let set = ReplicaSet::builder().name("fast").start().await.unwrap();
        let proxy = FaultProxy::start(set.address(0)).unwrap();
        let uri = format!("mongodb://{}/?directConnection=true", proxy.address());
        let mut options = ClusterOptions::new(Tier::Archive, uri);
        options.pool.connect_timeout = Duration::from_millis(300);
        options.server_selection_timeout = Duration::from_millis(300);
        options.heartbeat = Duration::from_secs(600);
        let pool = Pool::new(connect(options).await);
        proxy.pause(Direction::ToServer);
        let address = pool.cluster().topology().borrow().primary.clone().unwrap();
        let error = soon("connecting", pool.server(&address)).await.unwrap_err();
        match &error {
            halocline_cluster::ClusterError::Network(network) => {
                assert_eq!(network.phase, Phase::Connect);
            }
            _ => panic!("{error}"),
        }
        assert!(error.is_timeout() && !error.outcome_unknown(), "{error}");
        let error = soon("connecting", pool.primary()).await.unwrap_err();
        assert!(!error.outcome_unknown(), "{error}");
        proxy.heal();
        soon("connecting", pool.primary()).await.unwrap();
    });
}
