//! kill -9 of the daemon, at moments that nobody chose, under traffic, again and again. Nothing that
//! was acknowledged is lost, nothing that was deleted comes back, and the position that a restart
//! begins from never passes a change that the archive does not have.
//!
//! More moments: `HALOCLINE_CRASHES=50 cargo test --test crashes`; the same choices again:
//! `HALOCLINE_SEED=...` as printed.

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
use support::seed;
use support::truth::Truth;

const OWNERS: i32 = 4;
const CONFIG: Config = Config { keep: "12s", batch_documents: 30, ..Config::DEFAULT };

/// How often the daemon is killed.
fn crashes() -> usize {
    std::env::var("HALOCLINE_CRASHES").map_or(8, |count| count.parse().unwrap())
}

#[tokio::test]
async fn killed_at_random_moments_it_loses_nothing_and_revives_nothing() {
    let seed = seed();
    let mut random = StdRng::seed_from_u64(seed);
    let pair = Pair::start(1).await;
    let truth = Arc::new(Truth::default());
    let year = (0..400).map(|i| 30.0 + f64::from(i) * 78_840.0);
    let around_now = (0..400).map(|i| 12.0 - f64::from(i) / 5.0);
    pair.seed(&truth, OWNERS, year.chain(around_now)).await;

    let mut daemon = Daemon::start(&pair, &CONFIG).await;
    let habits = Habits { owners: OWNERS, recent: 6.0, impatient: 2, ..Habits::THROUGH_FAULTS };
    let traffic = Traffic::start(&[&daemon], &truth, habits, seed).await;
    let mut positions = Positions::default();
    let crashes = crashes();
    for crash in 1..=crashes {
        // Most while clients are served, some on the way there: waiting for the dead one's lease,
        // closing lanes, reading the position, replaying.
        let starting = crash > 1 && random.random_bool(0.25);
        if !starting {
            daemon.wait_ready().await;
            traffic.proceed(1).await;
        }
        let most = if starting { 4500 } else { 1500 };
        tokio::time::sleep(Duration::from_millis(random.random_range(0..most))).await;
        let ready = matches!(daemon.get("/readyz").await, Ok((200, _)));
        daemon.kill9();

        let (mirrored, ahead) = positions.check(&pair, &truth).await;
        let audited = truth.audit(&pair).await;
        println!(
            "crash {crash} of {crashes}, ready: {ready}; changed documents before the position \
             {mirrored}, after it {ahead}; looked at {audited}"
        );
        truth.assert_kept();
        daemon.launch(&pair);
    }
    daemon.wait_ready().await;
    traffic.proceed(50).await;
    traffic.stop().await;

    daemon.drained().await;
    println!("{:#}", daemon.collection().await);
    let (on_fast, on_archive) = truth.compare(&pair).await;
    truth.assert_kept();
    println!("{on_fast} documents on the fast tier, {on_archive} on the archive");
    daemon.terminate();
    assert!(daemon.wait_exit().await.success());
}
