//! One replica set as the daemon sees it: topology, connection pools, move transactions, change
//! feed, lease and lanes. What the tiers mean to each other is decided elsewhere.
//!
//! The `mongodb` driver is the control plane: its monitors say which server is primary, its client
//! does DDL and scans. Client requests never pass through it; they go as raw BSON over the
//! connections pooled here.

pub mod abandoned;
mod cluster;
mod error;
pub mod feed;
mod handshake;
pub mod lanes;
pub mod lease;
pub mod moves;
mod options;
mod pool;
mod reply;
mod session;
mod socket;
mod topology;

pub use cluster::{Cluster, Facts};
pub use error::{ClusterError, NetworkError, Phase, ServerError};
pub use mongodb::options::ServerAddress;
pub use options::{ClusterOptions, Credentials, PoolOptions, Tier, TlsOptions};
pub use pool::{Conn, Pool, PoolStats};
pub use reply::{Reply, WriteError};
pub use topology::{Server, ServerKind, Topology};
