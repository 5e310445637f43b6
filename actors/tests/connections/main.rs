//! Client connections from the outside: raw bytes against the real acceptor, connection actors and
//! supervisor around a small executor. Real drivers are in `drivers`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod drivers;
mod echo;
mod handshake;
mod lifecycle;
mod malformed;
mod metrics;
mod raw;
mod replies;
