//! Connections: bounded, in order, never handed out dead, never waited for beyond the limits.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bson::{doc, rawdoc};
use halocline_cluster::{
    Cluster, ClusterError, ClusterOptions, Conn, Pool, Reply, ServerKind, Tier,
};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{connect, one_member, op_msg, options, pool, run, soon, three_members, until};

fn ping() -> bson::RawDocumentBuf {
    rawdoc! { "ping": 1 }
}

/// A command that the server answers only after ten minutes, or when it changes its role.
async fn late_hello(conn: &mut Conn) -> bson::RawDocumentBuf {
    let hello = conn.run("admin", &rawdoc! { "hello": 1 }).await.unwrap();
    let version = hello.get("topologyVersion").unwrap().as_document().unwrap().to_owned();
    rawdoc! { "hello": 1, "topologyVersion": version, "maxAwaitTimeMS": 600_000_i64 }
}

#[test]
fn a_raw_message_goes_through_unchanged_and_the_reply_comes_back_raw() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut conn = pool.primary().await.unwrap();
        let hello = rawdoc! { "hello": 1, "$db": "admin", "comment": "as it was sent" };
        let reply = conn.exchange(&op_msg(4711, &hello)).await.unwrap();
        let reply = Reply::from_message(reply).unwrap();
        assert!(reply.is_ok());
        assert!(reply.cluster_time().is_some() && reply.operation_time().is_some());
        let message = op_msg(4712, &hello);
        let again = conn.exchange_vectored(&[&message[..7], &message[7..]]).await.unwrap();
        assert!(Reply::from_message(again).unwrap().is_ok());

        let error = conn.run("admin", &rawdoc! { "noSuchCommand": 1 }).await.unwrap_err();
        assert_eq!(error.server().unwrap().code, 59, "{error}");
        assert!(!error.is_retryable() && !error.is_network());
        conn.run("admin", &ping()).await.unwrap();

        let facts = pool.cluster().facts().await.unwrap();
        assert_eq!(facts.set_name, "fast");
        assert_eq!(pool.cluster().set_name(), "fast");
        assert!(facts.set_id.is_some() && facts.fcv.is_some() && facts.max_wire_version > 8);
    });
}

#[test]
fn never_more_connections_than_allowed_and_everybody_is_served_in_order() {
    run(async {
        let set = one_member().await;
        let mut options = options(&set);
        options.pool.max_size = 3;
        let pool = Pool::new(connect(options).await);
        let most = Rc::new(Cell::new(0));
        let order = Rc::new(RefCell::new(Vec::new()));
        let tasks: Vec<_> = (0..60)
            .map(|number| {
                let (pool, most, order) = (pool.clone(), most.clone(), order.clone());
                tokio::task::spawn_local(async move {
                    let mut conn = pool.primary().await.unwrap();
                    order.borrow_mut().push(number);
                    let stats = pool.stats();
                    most.set(most.get().max(stats.idle + stats.in_use + stats.opening));
                    conn.run("admin", &ping()).await.unwrap();
                })
            })
            .collect();
        for task in tasks {
            soon("a task with a connection", task).await.unwrap();
        }
        assert!(most.get() <= 3, "{} connections at once", most.get());
        assert!(order.borrow().is_sorted(), "{:?}", order.borrow());
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.waiting), (0, 0));
        assert!(stats.idle <= 3);
    });
}

#[test]
fn waiting_for_a_connection_ends_at_the_limit() {
    run(async {
        let set = one_member().await;
        let mut options = options(&set);
        options.pool.max_size = 1;
        options.pool.checkout_timeout = Duration::from_millis(100);
        let pool = Pool::new(connect(options).await);
        let held = pool.primary().await.unwrap();
        for _ in 0..3 {
            let error = soon("a checkout", pool.primary()).await.unwrap_err();
            assert!(matches!(error, ClusterError::CheckoutTimeout { max_size: 1, .. }), "{error}");
            assert!(error.is_timeout() && !error.outcome_unknown());
        }
        assert_eq!(pool.stats().waiting, 0);
        drop(held);
        pool.primary().await.unwrap().run("admin", &ping()).await.unwrap();
    });
}

#[test]
fn a_cancelled_wait_loses_no_connection() {
    run(async {
        let set = one_member().await;
        let mut options = options(&set);
        options.pool.max_size = 1;
        let pool = Pool::new(connect(options).await);
        for _ in 0..20 {
            let held = pool.primary().await.unwrap();
            let waiting = tokio::task::spawn_local({
                let pool = pool.clone();
                async move { pool.primary().await.map(drop) }
            });
            until("somebody waits", || pool.stats().waiting == 1).await;
            // Handed over and cancelled in the same moment.
            drop(held);
            waiting.abort();
            assert!(waiting.await.is_err());
        }
        soon("a checkout", pool.primary()).await.unwrap();
    });
}

#[test]
fn a_request_given_up_closes_its_connection_and_frees_the_place() {
    run(async {
        let set = one_member().await;
        let mut options = options(&set);
        options.pool.max_size = 1;
        let pool = Pool::new(connect(options).await);
        let late = late_hello(&mut pool.primary().await.unwrap()).await;
        let slow = tokio::task::spawn_local({
            let pool = pool.clone();
            async move { pool.primary().await.unwrap().run("admin", &late).await.map(drop) }
        });
        until("the connection is in use", || pool.stats().in_use == 1).await;
        slow.abort();
        assert!(slow.await.is_err());
        let mut conn = soon("a checkout", pool.primary()).await.unwrap();
        conn.run("admin", &ping()).await.unwrap();
        assert_eq!(pool.stats().in_use, 1);
    });
}

#[test]
fn connections_of_a_server_that_was_killed_and_came_back_are_not_handed_out() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut topology = pool.cluster().topology();
        let before = topology.borrow().generation;
        {
            let mut held = Vec::new();
            for _ in 0..5 {
                held.push(pool.primary().await.unwrap());
            }
        }
        assert!(pool.stats().idle >= 5);
        set.kill9(0);
        set.restart(0).await.unwrap();
        // Whether or not the monitors have seen it by now: what is handed out works.
        let mut conn = soon("a checkout", pool.primary()).await.unwrap();
        conn.run("admin", &ping()).await.unwrap();
        soon("a new generation", topology.wait_for(|now| now.generation > before)).await.unwrap();
    });
}

#[test]
fn a_primary_that_is_gone_is_waited_for_and_then_named() {
    run(async {
        let set = one_member().await;
        let mut options = options(&set);
        options.server_selection_timeout = Duration::from_millis(700);
        let pool = Pool::new(connect(options).await);
        set.kill9(0);
        until("the monitors see it", || pool.cluster().topology().borrow().primary.is_none()).await;
        let error = soon("a checkout", pool.primary()).await.unwrap_err();
        assert!(matches!(error, ClusterError::NoPrimary { .. }), "{error}");
        assert!(error.to_string().contains(&set.port(0).to_string()), "{error}");
        set.restart(0).await.unwrap();
        until("it is primary again", || pool.cluster().topology().borrow().primary.is_some()).await;
        pool.primary().await.unwrap().run("admin", &ping()).await.unwrap();
    });
}

/// Answers every greeting as a server of another kind would.
async fn impostor(hello: bson::RawDocumentBuf) -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::task::spawn_local(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let hello = hello.clone();
            tokio::task::spawn_local(async move {
                let mut buffer = bytes::BytesMut::new();
                while stream.read_buf(&mut buffer).await.is_ok_and(|read| read > 0) {
                    let frame = halocline_wire::take_frame(&mut buffer, 48_000_000).unwrap();
                    let Some(frame) = frame else { continue };
                    let id = frame.header.request_id;
                    let mut reply = bytes::BytesMut::new();
                    match halocline_wire::decode(frame, &Default::default()).unwrap().message {
                        halocline_wire::Message::Msg(_) => halocline_wire::encode_msg(
                            1,
                            id,
                            halocline_wire::MsgFlags::default(),
                            &hello,
                            &[],
                            &mut reply,
                        ),
                        halocline_wire::Message::Query(_) => {
                            halocline_wire::encode_query_reply(1, id, &hello, &mut reply);
                        }
                    }
                    stream.write_all(&reply).await.unwrap();
                }
            });
        }
    });
    address
}

#[test]
fn a_server_that_is_no_replica_set_member_is_refused_with_the_reason() {
    run(async {
        let standalone = rawdoc! {
            "ismaster": true, "isWritablePrimary": true, "helloOk": true,
            "minWireVersion": 0, "maxWireVersion": 17, "maxBsonObjectSize": 16_777_216,
            "maxMessageSizeBytes": 48_000_000, "maxWriteBatchSize": 100_000, "ok": 1,
        };
        let mut router = standalone.clone();
        router.append(bson::raw::cstr!("msg"), "isdbgrid");
        for hello in [standalone, router] {
            let uri = format!("mongodb://{}", impostor(hello).await);
            let options = ClusterOptions::new(Tier::Archive, uri);
            let error = soon("the refusal", Cluster::connect(options)).await.unwrap_err();
            assert!(matches!(error, ClusterError::Config { .. }), "{error}");
            assert!(error.to_string().contains("must be a replica set"), "{error}");
        }
    });
}

#[test]
fn an_election_costs_waiting_and_no_unexplained_error() {
    run(async {
        let set = three_members().await;
        let pool = pool(&set).await;
        let mut topology = pool.cluster().topology();
        let before = topology.borrow_and_update().clone();
        let insert = |n: i32| {
            rawdoc! {
                "insert": "c", "documents": [{ "n": n }],
                "writeConcern": { "w": "majority" },
            }
        };
        pool.run_once("test", &insert(0)).await.unwrap();
        let stop = Rc::new(Cell::new(false));
        let load = tokio::task::spawn_local({
            let (pool, stop) = (pool.clone(), stop.clone());
            async move {
                let (mut n, mut longest, mut last) = (0, Duration::ZERO, Instant::now());
                let mut errors = Vec::new();
                while !stop.get() {
                    n += 1;
                    match pool.run_once("test", &insert(n)).await {
                        Ok(_) => {
                            longest = longest.max(last.elapsed());
                            last = Instant::now();
                        }
                        Err(error) => errors.push(error),
                    }
                }
                (n, longest, errors)
            }
        });
        soon("stepping down", set.step_down()).await.unwrap();
        let new = soon(
            "another primary",
            topology.wait_for(|now| now.primary.is_some() && now.primary != before.primary),
        )
        .await
        .unwrap()
        .clone();
        assert!(new.generation > before.generation);
        soon("a write on the new primary", pool.run_once("test", &insert(-1))).await.unwrap();
        stop.set(true);
        let (n, longest, errors) = soon("the load", load).await.unwrap();
        println!("{n} writes, longest gap {longest:?}, errors: {errors:?}");
        for error in &errors {
            assert!(error.is_not_primary() || error.is_network(), "{error}");
        }
        // The old primary stays a member that can be asked by name.
        let old = before.primary.clone().unwrap();
        until("the old primary is a secondary", || {
            let now = pool.cluster().topology().borrow().clone();
            now.server(&old).is_some_and(|server| server.kind == ServerKind::Secondary)
        })
        .await;
        let mut secondary = pool.server(&old).await.unwrap();
        assert_eq!(secondary.address(), &old);
        secondary.run("admin", &ping()).await.unwrap();
    });
}

#[test]
fn a_frozen_primary_holds_nobody_beyond_the_limits() {
    run(async {
        let set = three_members().await;
        let mut options = options(&set);
        options.pool.connect_timeout = Duration::from_secs(1);
        options.pool.max_size = 4;
        let pool = Pool::new(connect(options).await);
        let mut topology = pool.cluster().topology();
        let before = topology.borrow_and_update().clone();
        let primary = set.primary_index().await.unwrap();
        // One request under way that the server answers late, one connection free, room for more.
        let mut busy = pool.primary().await.unwrap();
        drop(pool.primary().await.unwrap());
        let late = late_hello(&mut busy).await;
        let stuck = tokio::task::spawn_local(async move { busy.run("admin", &late).await });
        set.pause(primary).unwrap();
        let insert = rawdoc! {
            "insert": "c", "documents": [{}], "writeConcern": { "w": "majority" },
        };
        // Several at once: they take what is free, open more and queue, all on a server that
        // does not answer.
        let tasks: Vec<_> = (0..10)
            .map(|_| {
                let (pool, insert) = (pool.clone(), insert.clone());
                tokio::task::spawn_local(async move {
                    loop {
                        match pool.run_once("test", &insert).await {
                            Ok(_) => return,
                            Err(error) => assert!(
                                error.is_network() || error.is_timeout() || error.is_not_primary(),
                                "{error}"
                            ),
                        }
                    }
                })
            })
            .collect();
        let error = soon("the stuck request", stuck).await.unwrap().unwrap_err();
        assert!(error.is_network() && error.outcome_unknown(), "{error}");
        for task in tasks {
            soon("a write", task).await.unwrap();
        }
        let now = topology.borrow_and_update().clone();
        assert_ne!(now.primary, before.primary);
        set.resume(primary).unwrap();
        // The old primary does not become a second one in our eyes.
        until("the old primary is back as a secondary", || {
            let now = pool.cluster().topology().borrow().clone();
            now.primary.is_some()
                && now
                    .server(before.primary.as_ref().unwrap())
                    .is_some_and(|server| server.kind == ServerKind::Secondary)
        })
        .await;
        pool.run_once("test", &insert).await.unwrap();
    });
}

#[test]
fn a_primary_that_denies_being_one_gets_no_requests_until_it_is_settled() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut topology = pool.cluster().topology();
        let address = pool.primary().await.unwrap().address().clone();
        let before = topology.borrow_and_update().generation;
        // A false alarm: the check made at once finds it in order.
        pool.note_not_primary(&address);
        assert_eq!(topology.borrow_and_update().primary, None);
        assert!(pool.try_primary().is_none());
        let mut conn = soon("a checkout", pool.primary()).await.unwrap();
        conn.run("admin", &ping()).await.unwrap();
        assert!(topology.borrow_and_update().generation > before);

        // A true one: the server steps down and is elected again.
        let client = set.client().await.unwrap();
        let admin = client.database("admin");
        let command = doc! { "replSetStepDown": 2, "force": true, "secondaryCatchUpPeriodSecs": 0 };
        admin.run_command(command).await.unwrap();
        let insert = rawdoc! { "insert": "c", "documents": [{}] };
        let mut denials = 0;
        soon("a write after the election", async {
            while let Err(error) = pool.run_once("test", &insert).await {
                assert!(error.is_not_primary() || error.is_network(), "{error}");
                denials += 1;
            }
        })
        .await;
        assert!(denials <= 3, "{denials} requests were sent to a server that denied being primary");
    });
}

#[test]
fn idle_connections_are_closed_and_a_few_are_kept() {
    run(async {
        let set = one_member().await;
        let mut options = options(&set);
        options.pool.idle_timeout = Duration::from_secs(1);
        options.pool.min_idle = 2;
        let pool = Pool::new(connect(options).await);
        {
            let mut held = Vec::new();
            for _ in 0..6 {
                held.push(pool.primary().await.unwrap());
            }
        }
        assert_eq!(pool.stats().idle, 6);
        until("surplus connections are closed", || pool.stats().idle == 2).await;
        pool.close();
        assert!(matches!(pool.primary().await, Err(ClusterError::Closed { .. })));
        assert_eq!(pool.stats().idle, 0);
    });
}

#[test]
fn what_the_pools_of_several_threads_hold_adds_up_in_the_metrics() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let scraped = move |line: &str| handle.render().lines().any(|scraped| scraped == line);
    metrics::with_local_recorder(&recorder, || {
        run(async {
            let set = one_member().await;
            let cluster = connect(options(&set)).await;
            cluster.facts().await.unwrap();
            let pools = [Pool::new(cluster.clone()), Pool::new(cluster)];
            let mut held = Vec::new();
            for pool in &pools {
                held.push(pool.primary().await.unwrap());
                held.push(pool.primary().await.unwrap());
                drop(pool.primary().await.unwrap());
            }
            let connections = r#"halocline_pool_connections{tier="fast",state="#;
            until("four in use", || scraped(&format!(r#"{connections}"in_use"}} 4"#))).await;
            until("two idle", || scraped(&format!(r#"{connections}"idle"}} 2"#))).await;
            drop(held);
            until("none in use", || scraped(&format!(r#"{connections}"in_use"}} 0"#))).await;
            until("six idle", || scraped(&format!(r#"{connections}"idle"}} 6"#))).await;
            assert!(scraped(r#"halocline_pool_checkouts_total{tier="fast"} 6"#));
            assert!(scraped(r#"halocline_tier_up{tier="fast"} 1"#));

            let [one, other] = pools;
            drop(one);
            until("three idle", || scraped(&format!(r#"{connections}"idle"}} 3"#))).await;
            other.close();
            assert!(scraped(&format!(r#"{connections}"idle"}} 0"#)));
            assert!(other.primary().await.is_err());
            assert!(scraped(r#"halocline_pool_checkout_failed_total{tier="fast"} 1"#));
        });
    });
}
