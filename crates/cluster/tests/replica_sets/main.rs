//! The crate against real replica sets.

mod feed;
mod lanes;
mod lease;
mod moves;
mod network;
mod pool;
mod secure;
mod support;
