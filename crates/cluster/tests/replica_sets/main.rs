//! The crate against real replica sets.

mod pool;
mod support;
