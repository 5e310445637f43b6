//! Finds or fetches a mongod and runs replica sets on loopback for tests, demo and bench. What is
//! under test does not live here, nor does anything a running daemon needs.
//!
//! ```no_run
//! # async fn example() -> Result<(), halocline_testbed::TestbedError> {
//! use halocline_testbed::ReplicaSet;
//!
//! let archive = ReplicaSet::builder().name("archive").members(3).start().await?;
//! let client = archive.client().await?;
//! archive.kill9(archive.wait_primary().await?);
//! archive.wait_primary().await?;
//! # Ok(())
//! # }
//! ```
//!
//! Each start of a mongod costs about 0.7 s of processor time before it listens, 0.6 of which its
//! storage engine spends on measuring the processor's clock. Tests that only need *a* set can share
//! one in a static: what is never dropped is cleaned up when the process ends, however it does.

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
