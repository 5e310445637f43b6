//! What the end-to-end tests share: a pair of replica sets, a running daemon, clients that know what
//! every document must be, and the comparison of both tiers with what they know. No test is here.

#![allow(dead_code, reason = "every test binary uses its own part")]

pub mod daemon;
pub mod deployment;
pub mod owner;
pub mod position;
pub mod truth;

use std::time::{Duration, Instant};

/// How long anything is waited for before a test gives up: many times what it takes, because the
/// machine may be compiling meanwhile. No test asserts a time.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Between two looks at a condition that cannot be awaited.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Waits until `look` says something; panics with `what` after [`PATIENCE`].
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(began.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// What random choices begin from: `HALOCLINE_SEED`, or a new one; printed, so that a failure can be
/// tried again. (Which of two racing things comes first, it does not decide.)
pub fn seed() -> u64 {
    let seed = match std::env::var("HALOCLINE_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => rand::random_range(0..1_000_000),
    };
    println!("HALOCLINE_SEED={seed}");
    seed
}
