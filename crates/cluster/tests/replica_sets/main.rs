//! The crate against real replica sets.

// The lints' own exemption for tests does not reach the functions tests share.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod abandoned;
mod feed;
mod lanes;
mod lease;
mod moves;
mod network;
mod pool;
mod secure;
mod support;
