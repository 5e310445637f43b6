//! One description of a running daemon: what `/status`, `halocline status` and the status page show.
//! Filled by the daemon from the actors' shared state; this module only names the fields.

use serde::{Deserialize, Serialize};

/// A whole daemon at one moment. Times are seconds since the Unix epoch unless a name says otherwise.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Status {
    /// `CARGO_PKG_VERSION` of the daemon.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_seconds: u64,
    /// Where clients connect, as a MongoDB connection string.
    pub connection_string: String,
    /// `starting`, `serving`, `draining`, `history_lost` or `failed`.
    pub state: String,
    /// What is wrong and what to do, one sentence each; empty when all is well.
    pub problems: Vec<String>,
    /// The fast tier.
    pub fast: TierStatus,
    /// The archive.
    pub archive: TierStatus,
    /// The feeder.
    pub feeder: FeederStatus,
    /// One entry a tiered collection.
    pub collections: Vec<CollectionStatus>,
    /// Requests since start.
    pub requests: RequestStatus,
    /// Open client connections.
    pub client_connections: u64,
    /// Open client cursors.
    pub cursors_open: u64,
    /// One entry an actor kind.
    pub actors: Vec<ActorStatus>,
}

/// One replica set as the daemon sees it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TierStatus {
    /// Replica set name.
    pub set_name: String,
    /// Whether a primary is known.
    pub up: bool,
    /// `host:port` of the primary.
    pub primary: Option<String>,
    /// Every member seen.
    pub members: Vec<MemberStatus>,
    /// Server version, such as `6.0.5`.
    pub version: String,
    /// Feature compatibility version.
    pub fcv: String,
    /// Changes of primary since start.
    pub elections: u64,
    /// Operations clients had answered by this tier.
    pub operations: u64,
}

/// One member of a replica set.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct MemberStatus {
    /// `host:port`.
    pub address: String,
    /// `primary`, `secondary`, `arbiter`, `unknown`.
    pub kind: String,
    /// Round-trip time, milliseconds.
    pub rtt_ms: Option<f64>,
}

/// The feeder at one moment.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct FeederStatus {
    /// `starting`, `running`, `paused`, `superseded`, `history_lost`.
    pub state: String,
    /// Age of the oldest pending change.
    pub lag_seconds: f64,
    /// Age of the newest event read from the change stream.
    pub ingest_lag_seconds: f64,
    /// Keys changed on the fast tier and not yet written to the archive.
    pub pending_keys: u64,
    /// Keys written to the archive (upserts and deletes) since start.
    pub mirrored: u64,
    /// Client events read since start.
    pub events: u64,
    /// Changes that needed no write of their own because a later one covered them.
    pub coalesced: u64,
    /// Age of the persisted resume token.
    pub token_age_seconds: f64,
    /// Length of the fast tier's oplog.
    pub oplog_window_seconds: Option<f64>,
    /// Keys set aside because the archive refuses them.
    pub quarantined_keys: u64,
}

/// One tiered collection at one moment.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CollectionStatus {
    /// `database.collection`.
    pub ns: String,
    /// Date field, and its kind.
    pub date_field: String,
    /// `date`, `objectid`, `epoch-seconds` or `epoch-millis`.
    pub date_kind: String,
    /// Configured age, seconds.
    pub keep_seconds: u64,
    /// Start of the window now.
    pub window_start: f64,
    /// `complete_from`: the fast tier holds every document from here on. `None`: nothing is complete yet.
    pub boundary: Option<f64>,
    /// Whether the boundary has reached the window.
    pub warm: bool,
    /// 0 to 1.
    pub warm_progress: f64,
    /// Seconds until the boundary reaches the window at the present rate.
    pub warm_eta_seconds: Option<f64>,
    /// Documents copied archive to fast tier since start.
    pub warmed: u64,
    /// Documents evicted since start.
    pub evicted: u64,
    /// Documents faulted in since start.
    pub faulted_in: u64,
    /// Documents on the fast tier that the window does not cover because their date is missing or of another type.
    pub undated: u64,
    /// Documents on the fast tier (estimated).
    pub fast_documents: u64,
    /// Seconds by which eviction is overdue.
    pub eviction_overdue_seconds: f64,
}

/// Requests answered since start.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RequestStatus {
    /// All.
    pub total: u64,
    /// Answered by the fast tier alone.
    pub fast: u64,
    /// That needed the archive.
    pub archive: u64,
    /// Answered by the daemon itself (handshakes, refusals).
    pub local: u64,
    /// Error replies made by the daemon.
    pub errors: u64,
    /// By reason label of the read table and the write paths.
    pub by_reason: Vec<(String, u64)>,
}

/// Actors of one kind.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ActorStatus {
    /// `feeder`, `applier`, `evictor`, `warmer`, `router`, `connection_handler`.
    pub actor: String,
    /// How many run now.
    pub up: u64,
    /// Restarts since start.
    pub restarts: u64,
    /// Panics since start.
    pub panics: u64,
}
