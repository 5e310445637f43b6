//! Everything that can go wrong between this process and a replica set, and what each server error
//! means. The bare error codes of MongoDB appear here and nowhere else: call sites ask a predicate.

use std::fmt;
use std::io;
use std::time::Duration;

use bson::raw::{RawBsonRef, RawDocument, RawDocumentBuf};
use mongodb::options::ServerAddress;

use crate::options::Tier;

/// A failure between this process and a replica set.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The settings of a tier cannot work.
    #[error("{tier}: {message}")]
    Config {
        /// Which tier.
        tier: Tier,
        /// What is wrong and what to do.
        message: String,
    },
    /// The server answered with an error.
    #[error("{0}")]
    Server(Box<ServerError>),
    /// A connection could not be opened or broke.
    #[error("{0}")]
    Network(Box<NetworkError>),
    /// No connection became free in time.
    #[error(
        "{tier}: no connection to {address} became free within {waited:?} (limit {max_size} a \
         thread); raise the pool size, or find out why the server answers slowly"
    )]
    CheckoutTimeout {
        /// Which tier.
        tier: Tier,
        /// The server whose connections were all in use.
        address: ServerAddress,
        /// How long the wait was.
        waited: Duration,
        /// Connections the pool may hold.
        max_size: usize,
    },
    /// No primary was known in time.
    #[error("{tier}: no primary for {waited:?}: {topology}")]
    NoPrimary {
        /// Which tier.
        tier: Tier,
        /// How long the wait was.
        waited: Duration,
        /// The members and what was last known of them.
        topology: String,
    },
    /// The server is not (or no longer) a member of the replica set.
    #[error("{tier}: {address} is not a known member of the replica set")]
    UnknownServer {
        /// Which tier.
        tier: Tier,
        /// The server that was asked for.
        address: ServerAddress,
    },
    /// Authentication failed, or could not be attempted.
    #[error("{tier}: cannot authenticate to {address}: {message}")]
    Authentication {
        /// Which tier.
        tier: Tier,
        /// The server.
        address: ServerAddress,
        /// What the server or the exchange said.
        message: String,
    },
    /// The server sent bytes that are no answer to what was asked.
    #[error("{tier}: {address} broke the protocol: {message}")]
    Protocol {
        /// Which tier.
        tier: Tier,
        /// The server.
        address: ServerAddress,
        /// What was wrong with the bytes.
        message: String,
    },
    /// A step took longer than it is allowed to.
    #[error("{tier}: {what} took longer than {limit:?}")]
    TimedOut {
        /// Which tier.
        tier: Tier,
        /// The step.
        what: &'static str,
        /// Its limit.
        limit: Duration,
    },
    /// A move transaction cannot go on; nothing of it took effect.
    #[error("{tier}: {message}")]
    Aborted {
        /// Which tier.
        tier: Tier,
        /// Why.
        message: String,
    },
    /// Another holder has taken over; whoever sees this must stop at once.
    #[error("{tier}: superseded by another holder: {message}")]
    Superseded {
        /// Which tier.
        tier: Tier,
        /// What showed it.
        message: String,
    },
    /// The pool was closed.
    #[error("{tier}: the connection pool is closed")]
    Closed {
        /// Which tier.
        tier: Tier,
    },
    /// The driver, which is the control plane, reported a failure.
    #[error("{tier}: {source}")]
    Driver {
        /// Which tier.
        tier: Tier,
        /// The driver's error.
        #[source]
        source: Box<mongodb::error::Error>,
    },
}

impl ClusterError {
    pub(crate) fn server_error(error: ServerError) -> Self {
        ClusterError::Server(Box::new(error))
    }

    pub(crate) fn driver(tier: Tier, source: mongodb::error::Error) -> Self {
        ClusterError::Driver { tier, source: Box::new(source) }
    }

    /// The server's error, if it is one.
    pub fn server(&self) -> Option<&ServerError> {
        match self {
            ClusterError::Server(error) => Some(error),
            _ => None,
        }
    }

    /// The connection failed or broke.
    pub fn is_network(&self) -> bool {
        matches!(self, ClusterError::Network(_))
    }

    /// Something took longer than it may: a checkout, a server selection, a step.
    pub fn is_timeout(&self) -> bool {
        match self {
            ClusterError::CheckoutTimeout { .. }
            | ClusterError::NoPrimary { .. }
            | ClusterError::TimedOut { .. } => true,
            ClusterError::Network(error) => error.source.kind() == io::ErrorKind::TimedOut,
            _ => false,
        }
    }

    /// Another holder has taken over.
    pub fn is_superseded(&self) -> bool {
        matches!(self, ClusterError::Superseded { .. })
    }

    /// Whether the request may have been executed although no answer came. When false, it was
    /// certainly not executed (or was executed and refused), and sending it again is safe.
    pub fn outcome_unknown(&self) -> bool {
        match self {
            ClusterError::Network(error) => error.phase == Phase::Receive,
            ClusterError::TimedOut { .. } | ClusterError::Protocol { .. } => true,
            ClusterError::Server(error) => error.outcome_unknown(),
            _ => false,
        }
    }

    /// Trying again (on another connection, or after a pause) can succeed.
    pub fn is_retryable(&self) -> bool {
        match self {
            ClusterError::Network(_)
            | ClusterError::CheckoutTimeout { .. }
            | ClusterError::NoPrimary { .. }
            | ClusterError::TimedOut { .. }
            | ClusterError::Protocol { .. }
            | ClusterError::UnknownServer { .. } => true,
            ClusterError::Server(error) => error.is_retryable(),
            _ => false,
        }
    }

    /// See [`ServerError::is_write_conflict`].
    pub fn is_write_conflict(&self) -> bool {
        self.server().is_some_and(ServerError::is_write_conflict)
    }

    /// See [`ServerError::is_duplicate_key`].
    pub fn is_duplicate_key(&self) -> bool {
        self.server().is_some_and(ServerError::is_duplicate_key)
    }

    /// See [`ServerError::is_not_primary`].
    pub fn is_not_primary(&self) -> bool {
        self.server().is_some_and(ServerError::is_not_primary)
    }

    /// See [`ServerError::is_collection_uuid_mismatch`].
    pub fn is_collection_uuid_mismatch(&self) -> bool {
        self.server().is_some_and(ServerError::is_collection_uuid_mismatch)
    }

    /// See [`ServerError::is_transient_transaction`].
    pub fn is_transient_transaction(&self) -> bool {
        self.server().is_some_and(ServerError::is_transient_transaction)
    }

    /// See [`ServerError::is_history_lost`].
    pub fn is_history_lost(&self) -> bool {
        self.server().is_some_and(ServerError::is_history_lost)
    }
}

/// How far a request had come when the connection broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// No connection was made: nothing was sent.
    Connect,
    /// The request was not sent whole: the server cannot have executed it.
    Send,
    /// The request was sent, the answer did not come: it may have been executed.
    Receive,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Connect => "connecting to",
            Phase::Send => "sending to",
            Phase::Receive => "waiting for an answer from",
        })
    }
}

/// A connection that could not be opened or broke.
#[derive(Debug, thiserror::Error)]
#[error("{tier}: {phase} {address}: {source}")]
pub struct NetworkError {
    /// Which tier.
    pub tier: Tier,
    /// The server.
    pub address: ServerAddress,
    /// How far the request had come.
    pub phase: Phase,
    /// What the operating system said.
    #[source]
    pub source: io::Error,
}

// Names from MongoDB's error_codes.yml.
const HOST_UNREACHABLE: i32 = 6;
const HOST_NOT_FOUND: i32 = 7;
const UNAUTHORIZED: i32 = 13;
const AUTHENTICATION_FAILED: i32 = 18;
const LOCK_TIMEOUT: i32 = 24;
const NAMESPACE_NOT_FOUND: i32 = 26;
const CURSOR_NOT_FOUND: i32 = 43;
const NAMESPACE_EXISTS: i32 = 48;
const MAX_TIME_MS_EXPIRED: i32 = 50;
const WRITE_CONCERN_FAILED: i32 = 64;
const NETWORK_TIMEOUT: i32 = 89;
const SHUTDOWN_IN_PROGRESS: i32 = 91;
const WRITE_CONFLICT: i32 = 112;
const PRIMARY_STEPPED_DOWN: i32 = 189;
const INCOMPLETE_TRANSACTION_HISTORY: i32 = 217;
const TRANSACTION_TOO_OLD: i32 = 225;
const CURSOR_KILLED: i32 = 237;
const SNAPSHOT_TOO_OLD: i32 = 239;
const SNAPSHOT_UNAVAILABLE: i32 = 246;
const NO_SUCH_TRANSACTION: i32 = 251;
const TRANSACTION_COMMITTED: i32 = 256;
const INVALID_RESUME_TOKEN: i32 = 260;
const EXCEEDED_TIME_LIMIT: i32 = 262;
const CHANGE_STREAM_FATAL_ERROR: i32 = 280;
const CHANGE_STREAM_HISTORY_LOST: i32 = 286;
const COLLECTION_UUID_MISMATCH: i32 = 361;
const CAPPED_POSITION_LOST: i32 = 136;
const OPLOG_QUERY_MIN_TS_MISSING: i32 = 326;
const INTERRUPTED: i32 = 11601;
const SOCKET_EXCEPTION: i32 = 9001;
const LEGACY_NOT_PRIMARY: i32 = 10058;
const NOT_WRITABLE_PRIMARY: i32 = 10107;
const DUPLICATE_KEY: i32 = 11000;
const DUPLICATE_KEY_UPDATE: i32 = 11001;
const INTERRUPTED_AT_SHUTDOWN: i32 = 11600;
const INTERRUPTED_DUE_TO_REPL_STATE_CHANGE: i32 = 11602;
const NOT_PRIMARY_NO_SECONDARY_OK: i32 = 13435;
const NOT_PRIMARY_OR_SECONDARY: i32 = 13436;

/// An error answer of a server, from the reply itself, its `writeErrors` or its
/// `writeConcernError`.
#[derive(Debug, Clone)]
pub struct ServerError {
    /// MongoDB's error code; 0 if the answer had none.
    pub code: i32,
    /// Its name, as the server gave it.
    pub code_name: String,
    /// The server's message.
    pub message: String,
    /// `errorLabels` of the reply.
    pub labels: Vec<String>,
    /// The document that held the error, with whatever detail the server put beside it
    /// (`keyPattern`, `keyValue`, ...).
    pub document: RawDocumentBuf,
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.code_name.is_empty() { "error" } else { &self.code_name };
        write!(f, "{} ({}): {}", name, self.code, self.message)
    }
}

impl std::error::Error for ServerError {}

impl ServerError {
    /// Reads the error out of a reply with `ok: 0`, an element of `writeErrors`, or a
    /// `writeConcernError`.
    pub fn from_document(document: &RawDocument) -> Self {
        let mut error = ServerError {
            code: 0,
            code_name: String::new(),
            message: String::new(),
            labels: Vec::new(),
            document: document.to_owned(),
        };
        for element in document.iter() {
            // A server cannot be trusted to be well-formed just because it failed: keep what can
            // be read.
            let Ok((key, value)) = element else { break };
            match (key.as_str(), value) {
                ("code", RawBsonRef::Int32(code)) => error.code = code,
                ("code", RawBsonRef::Int64(code)) => error.code = i32::try_from(code).unwrap_or(0),
                ("code", RawBsonRef::Double(code)) => error.code = code as i32,
                ("codeName", RawBsonRef::String(name)) => error.code_name = name.to_owned(),
                ("errmsg", RawBsonRef::String(message)) => error.message = message.to_owned(),
                ("errorLabels", RawBsonRef::Array(labels)) => {
                    error.labels = labels
                        .into_iter()
                        .map_while(Result::ok)
                        .filter_map(|label| label.as_str().map(str::to_owned))
                        .collect();
                }
                _ => {}
            }
        }
        error
    }

    /// Whether the answer carries this error label.
    pub fn has_label(&self, label: &str) -> bool {
        self.labels.iter().any(|own| own == label)
    }

    /// Another write to the same key came first; the transaction is gone.
    pub fn is_write_conflict(&self) -> bool {
        self.code == WRITE_CONFLICT
    }

    /// A unique index (that of `_id` too) already holds the value.
    pub fn is_duplicate_key(&self) -> bool {
        matches!(self.code, DUPLICATE_KEY | DUPLICATE_KEY_UPDATE)
    }

    /// The server is not, or is ceasing to be, the primary.
    pub fn is_not_primary(&self) -> bool {
        matches!(
            self.code,
            NOT_WRITABLE_PRIMARY
                | NOT_PRIMARY_NO_SECONDARY_OK
                | LEGACY_NOT_PRIMARY
                | NOT_PRIMARY_OR_SECONDARY
                | PRIMARY_STEPPED_DOWN
                | INTERRUPTED_DUE_TO_REPL_STATE_CHANGE
        ) || self.is_shutdown()
    }

    /// The server is shutting down.
    pub fn is_shutdown(&self) -> bool {
        matches!(self.code, SHUTDOWN_IN_PROGRESS | INTERRUPTED_AT_SHUTDOWN)
    }

    /// The session has already seen a higher transaction number: on a lane, another feeder has
    /// taken over.
    pub fn is_transaction_too_old(&self) -> bool {
        self.code == TRANSACTION_TOO_OLD
    }

    /// The server knows no such transaction: it was aborted, or never reached this primary.
    pub fn is_no_such_transaction(&self) -> bool {
        self.code == NO_SUCH_TRANSACTION
    }

    /// An abort came after the commit.
    pub fn is_transaction_committed(&self) -> bool {
        self.code == TRANSACTION_COMMITTED
    }

    /// The server has forgotten whether this write was executed.
    pub fn is_incomplete_transaction_history(&self) -> bool {
        self.code == INCOMPLETE_TRANSACTION_HISTORY
    }

    /// The oplog no longer reaches back to where the change stream was to begin.
    pub fn is_history_lost(&self) -> bool {
        matches!(
            self.code,
            CHANGE_STREAM_HISTORY_LOST | CAPPED_POSITION_LOST | OPLOG_QUERY_MIN_TS_MISSING
        )
    }

    /// The resume token cannot be used, now or later.
    pub fn is_invalid_resume_token(&self) -> bool {
        matches!(self.code, INVALID_RESUME_TOKEN | CHANGE_STREAM_FATAL_ERROR)
    }

    /// The collection was dropped, recreated or renamed since its UUID was read.
    pub fn is_collection_uuid_mismatch(&self) -> bool {
        self.code == COLLECTION_UUID_MISMATCH
    }

    /// The snapshot a transaction reads from cannot be used any more (DDL, or too old).
    pub fn is_snapshot_unavailable(&self) -> bool {
        matches!(self.code, SNAPSHOT_UNAVAILABLE | SNAPSHOT_TOO_OLD)
    }

    /// The cursor is gone.
    pub fn is_cursor_not_found(&self) -> bool {
        matches!(self.code, CURSOR_NOT_FOUND | CURSOR_KILLED)
    }

    /// No such collection or database.
    pub fn is_namespace_not_found(&self) -> bool {
        self.code == NAMESPACE_NOT_FOUND
    }

    /// The collection exists already.
    pub fn is_namespace_exists(&self) -> bool {
        self.code == NAMESPACE_EXISTS
    }

    /// The user lacks a privilege.
    pub fn is_unauthorized(&self) -> bool {
        self.code == UNAUTHORIZED
    }

    /// Wrong user or password, or the mechanism is off.
    pub fn is_authentication_failed(&self) -> bool {
        self.code == AUTHENTICATION_FAILED
    }

    /// The operation's own time limit, or a lock's, was reached.
    pub fn is_time_limit(&self) -> bool {
        matches!(self.code, MAX_TIME_MS_EXPIRED | EXCEEDED_TIME_LIMIT | LOCK_TIMEOUT)
    }

    /// The write concern was not reached in time; the write itself stands.
    pub fn is_write_concern_failed(&self) -> bool {
        self.code == WRITE_CONCERN_FAILED
    }

    /// The whole transaction may be run again.
    pub fn is_transient_transaction(&self) -> bool {
        self.has_label("TransientTransactionError")
    }

    /// A commit whose outcome is not known; sending it again is right.
    pub fn is_unknown_commit(&self) -> bool {
        self.has_label("UnknownTransactionCommitResult")
    }

    /// A server-side network failure.
    pub fn is_network(&self) -> bool {
        matches!(self.code, HOST_UNREACHABLE | HOST_NOT_FOUND | NETWORK_TIMEOUT | SOCKET_EXCEPTION)
    }

    /// The operation was killed.
    pub fn is_interrupted(&self) -> bool {
        self.code == INTERRUPTED
    }

    /// Whether the operation may have been executed although this error was the answer: the
    /// server was interrupted between executing and acknowledging.
    pub fn outcome_unknown(&self) -> bool {
        self.is_not_primary()
            || self.is_network()
            || self.is_time_limit()
            || self.is_write_concern_failed()
            || self.is_unknown_commit()
            || self.is_interrupted()
    }

    /// The same request may succeed when sent again to whichever server is primary then.
    pub fn is_retryable(&self) -> bool {
        self.is_not_primary()
            || self.is_network()
            || self.is_time_limit()
            || self.is_write_conflict()
            || self.is_snapshot_unavailable()
            || self.is_cursor_not_found()
            || self.is_no_such_transaction()
            || self.has_label("RetryableWriteError")
            || self.has_label("ResumableChangeStreamError")
            || self.is_transient_transaction()
            || self.is_unknown_commit()
    }
}
