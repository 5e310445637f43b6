//! The daemon's actors and the data path they drive: what happens between a client's message and
//! the two tiers. The wire protocol, the pure rules and the replica sets live in their own crates.

pub mod options;
pub mod status;
