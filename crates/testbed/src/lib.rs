//! Finds or fetches a mongod and runs replica sets on loopback for tests, demo and bench.

mod builder;
mod certificates;
mod companion;
mod compare;
mod error;
mod fault_proxy;
mod files;
mod member;
mod mongod;
mod port;
mod process;
mod replica_set;

pub use builder::{Auth, ReplicaSetBuilder, Tls};
pub use certificates::Certificates;
pub use companion::Companion;
pub use compare::{Difference, MOST_DIFFERENCES, compare_collections};
pub use error::TestbedError;
pub use fault_proxy::{Direction, FaultProxy, LostReply};
pub use mongod::mongod;
pub use replica_set::{Backup, ReplicaSet};
