//! The pure rules of tiering: window, boundary, coverage, routes, pending set, admission.

pub mod admission;
pub mod coverage;
pub mod date;
pub mod key;
pub mod namespace;
mod number;
pub mod pending;
pub mod pipeline;
pub mod progress;
pub mod recent;
pub mod route;
pub mod time;
pub mod upsert;
pub mod window;

pub use date::{DateField, DateKind, DatePoint};
pub use namespace::Namespace;
