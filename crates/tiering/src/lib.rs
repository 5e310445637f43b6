//! The pure rules of tiering: window, boundary, coverage, routes, pending set, admission.

pub mod coverage;
pub mod date;
pub mod key;
pub mod namespace;
mod number;
pub mod pipeline;
pub mod route;
pub mod window;
