//! The tiering protocol as an explicit-state model, under the names the code uses. Scenarios keep
//! it small; in each, every promise must hold in every state. And for every rule there is one in
//! which leaving the rule out breaks a promise. `docs/protocol.md` says what is covered.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::needless_range_loop,
    reason = "a test stops at what it did not expect"
)]
#![allow(missing_docs, reason = "nobody uses a test from outside")]

mod barrier;
mod client;
mod feeder;
mod movers;
mod promises;
mod rules;
mod runs;
mod scenario;
mod scenarios;
mod state;
