//! The daemon's actors and the data path they drive: what happens between a client's message and
//! the two tiers. The wire protocol, the pure rules and the replica sets live in their own crates.

pub mod acceptor;
pub mod applier;
pub mod boundary;
pub mod connection;
pub mod context;
pub mod definitions;
pub mod evictor;
pub mod execute;
pub mod feeder;
pub mod feeder_state;
mod fetch;
pub mod hello;
pub mod housekeeper;
mod lane_use;
pub mod leader;
pub mod mark;
pub mod options;
pub mod panic_injection;
pub mod router;
pub mod shared;
pub mod stats;
pub mod status;
pub mod supervisor;
pub mod views;
pub mod warmer;
