//! Two daemons on one pair of tiers. The first freezes in the middle of its work, as a process does
//! on a machine that stalls; the second takes over; the first wakes up and believes for a moment
//! that nothing has happened. Nothing it still does may undo what its successor has done.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::daemon::{Config, Daemon};
use support::deployment::Pair;
use support::owner::{Habits, Traffic};
use support::position::Positions;
use support::truth::Truth;
use support::{seed, until};

const CONFIG: Config = Config { keep: "12s", batch_documents: 30, ..Config::DEFAULT };

/// How often a daemon freezes and is taken over.
fn takeovers() -> usize {
    std::env::var("HALOCLINE_TAKEOVERS").map_or(3, |count| count.parse().unwrap())
}

#[tokio::test]
async fn a_daemon_that_wakes_up_after_its_successor_has_begun_does_no_harm() {
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    let pair = Pair::start(1).await;
    let truth = Arc::new(Truth::default());
    let year = (0..300).map(|i| 30.0 + f64::from(i) * 105_120.0);
    let around_now = (0..400).map(|i| 12.0 - f64::from(i) / 5.0);
    pair.seed(&truth, 4, year.chain(around_now)).await;

    let mut leader = Daemon::start(&pair, &CONFIG).await;
    let mut standby = Daemon::prepare(&pair, &CONFIG);
    let habits = Habits { recent: 6.0, ..Habits::THROUGH_FAULTS };
    let traffic = Traffic::start(&[&leader, &standby], &truth, habits, seed).await;
    for _ in 0..takeovers() {
        standby.launch(&pair);
        traffic.proceed(5).await;
        tokio::time::sleep(Duration::from_millis(random.random_range(0..1000))).await;
        leader.pause();
        standby.wait_ready().await;
        truth.audit(&pair).await;
        // The successor mirrors, evicts and faults in, while the other's work is still half done.
        tokio::time::sleep(Duration::from_millis(random.random_range(0..1500))).await;
        leader.resume();
        let status = leader.wait_exit().await;
        assert_eq!(status.code(), Some(1), "superseded: {status}");
        traffic.proceed(10).await;
        truth.audit(&pair).await;
        truth.assert_kept();
        std::mem::swap(&mut leader, &mut standby);
    }
    traffic.stop().await;
    leader.drained().await;
    truth.compare(&pair).await;
    Positions::default().check(&pair, &truth).await;
    truth.assert_kept();
    until("a drain to leave nothing", async || {
        let pending = leader.status().await["feeder"]["pending_keys"].as_u64().unwrap();
        (pending == 0).then_some(())
    })
    .await;
    leader.terminate();
    assert!(leader.wait_exit().await.success());
}
