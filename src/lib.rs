//! The daemon and its command line: configuration, checks of both replica sets, HTTP for operators,
//! and one module a verb. What happens to a client's message is in `halocline-actors`.

pub mod admin;
pub mod check;
pub mod cli;
pub mod config;
pub mod daemon;
mod demo;
pub mod logging;
pub mod snapshot;
