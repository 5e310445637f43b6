//! The rules of tiering against a real mongod: what it compares as equal, what its filters match,
//! how it sorts. One server for the whole binary; every case asks it about a batch of documents.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test stops at what it did not expect"
)]

mod coverage;
mod key;
mod route;
mod server;
mod upsert;
mod values;
mod window;
