//! The crate against real replica sets.

mod feed;
mod moves;
mod pool;
mod support;
