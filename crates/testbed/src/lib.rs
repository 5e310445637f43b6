//! Finds or fetches a mongod and runs replica sets on loopback for tests, demo and bench.

mod builder;
mod certificates;
mod error;
mod files;
mod member;
mod mongod;
mod port;
mod process;
mod replica_set;

pub use builder::{Auth, ReplicaSetBuilder, Tls};
pub use certificates::Certificates;
pub use error::TestbedError;
pub use mongod::mongod;
pub use replica_set::ReplicaSet;
