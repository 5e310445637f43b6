//! What the daemon is told to do, already parsed and checked. The configuration file's own shape
//! (names, defaults, messages) lives in the `halocline` package; nothing here reads a file.

use std::net::SocketAddr;
use std::time::Duration;

use halocline_cluster::ClusterOptions;
use halocline_tiering::{DateField, Namespace};

/// Everything the actors need to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where clients connect.
    pub listen: Vec<SocketAddr>,
    /// The fast tier.
    pub fast: ClusterOptions,
    /// The archive.
    pub archive: ClusterOptions,
    /// Tiered collections.
    pub collections: Vec<CollectionOptions>,
    /// Actor counts.
    pub actors: ActorOptions,
    /// The feeder.
    pub feeder: FeederOptions,
    /// Eviction and warm-up.
    pub moves: MoveOptions,
    /// Limits on clients.
    pub limits: LimitOptions,
    /// How long SIGTERM waits for operations in flight.
    pub drain_deadline: Duration,
}

/// One `[[collection]]` entry.
#[derive(Debug, Clone)]
pub struct CollectionOptions {
    /// The namespace.
    pub ns: Namespace,
    /// The field whose value is a document's date.
    pub date: DateField,
    /// Documents younger than this stay on the fast tier.
    pub keep: Duration,
}

/// Actor counts, `[actors]`.
#[derive(Debug, Clone)]
pub struct ActorOptions {
    /// Arbiters (threads) that serve clients.
    pub connection_threads: usize,
    /// Lanes written at once.
    pub appliers: usize,
    /// Collections evicted at once.
    pub evictors: usize,
    /// Collections warmed at once.
    pub warmers: usize,
    /// Panics of one actor within `failure_window` after which the daemon drains and exits.
    pub failure_limit: u32,
    /// See `failure_limit`.
    pub failure_window: Duration,
}

/// `[feeder]`.
#[derive(Debug, Clone)]
pub struct FeederOptions {
    /// How long a change may wait for others of the same lane. At most 100 ms unless configured.
    pub coalesce: Duration,
    /// Keys a write command to the archive carries at most.
    pub batch_keys: usize,
    /// How often the resume token is persisted.
    pub token_interval: Duration,
    /// Pending keys at which client writes are admitted at the drain rate only.
    pub max_pending_keys: usize,
    /// Lag at which client writes are admitted at the drain rate only.
    pub max_lag: Duration,
}

/// `[moves]`.
#[derive(Debug, Clone)]
pub struct MoveOptions {
    /// Documents a warm or evict transaction moves at most.
    pub batch_documents: usize,
    /// Pause between batches.
    pub batch_pause: Duration,
    /// How often the evictor looks for documents that have left the window.
    pub evict_interval: Duration,
    /// How far below the window a document must lie to be evicted.
    pub evict_grace: Duration,
    /// A key a client changed within this time is never evicted (protocol rule 20). 10 minutes unless
    /// a test shortens it.
    pub residency: Duration,
}

/// `[limits]`.
#[derive(Debug, Clone)]
pub struct LimitOptions {
    /// Client connections.
    pub max_connections: usize,
    /// Idle time after which a cursor is killed.
    pub cursor_idle: Duration,
    /// Longest wait of an operation without `maxTimeMS` for the other tier or the feeder.
    pub operation_wait: Duration,
}
