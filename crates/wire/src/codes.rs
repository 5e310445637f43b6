//! MongoDB's error codes, the ones this daemon answers with or reasons about, and their names.
//! What a code *means* to the daemon is decided in the cluster crate, one predicate a meaning.

macro_rules! codes {
    ($($(#[$doc:meta])* $constant:ident = $code:literal, $name:literal;)*) => {
        $($(#[$doc])* pub const $constant: i32 = $code;)*

        /// The name MongoDB gives a code; `UnknownError` for one that is not in the table.
        pub fn code_name(code: i32) -> &'static str {
            match code {
                $($code => $name,)*
                _ => "UnknownError",
            }
        }

        #[cfg(test)]
        const ALL: &[(i32, &str)] = &[$(($code, $name)),*];
    };
}

codes! {
    /// Something broke inside.
    INTERNAL_ERROR = 1, "InternalError";
    /// A value that cannot be.
    BAD_VALUE = 2, "BadValue";
    /// A host cannot be reached.
    HOST_UNREACHABLE = 6, "HostUnreachable";
    /// A host name cannot be resolved.
    HOST_NOT_FOUND = 7, "HostNotFound";
    /// A command that cannot be parsed.
    FAILED_TO_PARSE = 9, "FailedToParse";
    /// No such user.
    USER_NOT_FOUND = 11, "UserNotFound";
    /// Not authenticated, or not allowed.
    UNAUTHORIZED = 13, "Unauthorized";
    /// A field of the wrong type.
    TYPE_MISMATCH = 14, "TypeMismatch";
    /// Beyond a limit, nesting depth among them.
    OVERFLOW = 15, "Overflow";
    /// A length that cannot be.
    INVALID_LENGTH = 16, "InvalidLength";
    /// The peer breaks the protocol.
    PROTOCOL_ERROR = 17, "ProtocolError";
    /// Wrong user or password.
    AUTHENTICATION_FAILED = 18, "AuthenticationFailed";
    /// Not allowed in this place.
    ILLEGAL_OPERATION = 20, "IllegalOperation";
    /// Malformed BSON.
    INVALID_BSON = 22, "InvalidBSON";
    /// A lock was not free in time.
    LOCK_TIMEOUT = 24, "LockTimeout";
    /// No such collection.
    NAMESPACE_NOT_FOUND = 26, "NamespaceNotFound";
    /// No such index.
    INDEX_NOT_FOUND = 27, "IndexNotFound";
    /// No such role.
    ROLE_NOT_FOUND = 31, "RoleNotFound";
    /// No such cursor, or it is idle for too long.
    CURSOR_NOT_FOUND = 43, "CursorNotFound";
    /// The collection exists.
    NAMESPACE_EXISTS = 48, "NamespaceExists";
    /// `maxTimeMS` has passed.
    MAX_TIME_MS_EXPIRED = 50, "MaxTimeMSExpired";
    /// A field name that starts with a dollar sign.
    DOLLAR_PREFIXED_FIELD_NAME = 52, "DollarPrefixedFieldName";
    /// An `_id` of a type it may not have.
    INVALID_ID_FIELD = 53, "InvalidIdField";
    /// No such command.
    COMMAND_NOT_FOUND = 59, "CommandNotFound";
    /// The write concern was not reached in time.
    WRITE_CONCERN_TIMEOUT = 64, "WriteConcernTimeout";
    /// `_id` cannot change.
    IMMUTABLE_FIELD = 66, "ImmutableField";
    /// The index cannot be built.
    CANNOT_CREATE_INDEX = 67, "CannotCreateIndex";
    /// The index exists.
    INDEX_ALREADY_EXISTS = 68, "IndexAlreadyExists";
    /// Options that contradict each other or the operation.
    INVALID_OPTIONS = 72, "InvalidOptions";
    /// A namespace that cannot be.
    INVALID_NAMESPACE = 73, "InvalidNamespace";
    /// No such replica set member.
    NODE_NOT_FOUND = 74, "NodeNotFound";
    /// A write concern name the deployment does not define.
    UNKNOWN_REPL_WRITE_CONCERN = 79, "UnknownReplWriteConcern";
    /// An index of that name with other options exists.
    INDEX_OPTIONS_CONFLICT = 85, "IndexOptionsConflict";
    /// An index of that name with other keys exists.
    INDEX_KEY_SPECS_CONFLICT = 86, "IndexKeySpecsConflict";
    /// A peer did not answer in time.
    NETWORK_TIMEOUT = 89, "NetworkTimeout";
    /// The server is going away.
    SHUTDOWN_IN_PROGRESS = 91, "ShutdownInProgress";
    /// The replica set is not there yet.
    NOT_YET_INITIALIZED = 94, "NotYetInitialized";
    /// The operation failed.
    OPERATION_FAILED = 96, "OperationFailed";
    /// More members asked for than there are.
    UNSATISFIABLE_WRITE_CONCERN = 100, "UnsatisfiableWriteConcern";
    /// Two writers met.
    WRITE_CONFLICT = 112, "WriteConflict";
    /// The command is not available here.
    COMMAND_NOT_SUPPORTED = 115, "CommandNotSupported";
    /// An operation that excludes this one is running.
    CONFLICTING_OPERATION_IN_PROGRESS = 117, "ConflictingOperationInProgress";
    /// The collection's validator refuses the document.
    DOCUMENT_VALIDATION_FAILURE = 121, "DocumentValidationFailure";
    /// No server fits the read preference.
    FAILED_TO_SATISFY_READ_PREFERENCE = 133, "FailedToSatisfyReadPreference";
    /// Majority reads are not ready yet.
    READ_CONCERN_MAJORITY_NOT_AVAILABLE_YET = 134, "ReadConcernMajorityNotAvailableYet";
    /// A capped collection has overwritten the position.
    CAPPED_POSITION_LOST = 136, "CappedPositionLost";
    /// Another `getMore` on the cursor is running.
    CURSOR_IN_USE = 143, "CursorInUse";
    /// Too much memory.
    EXCEEDED_MEMORY_LIMIT = 146, "ExceededMemoryLimit";
    /// Not on a view.
    COMMAND_NOT_SUPPORTED_ON_VIEW = 166, "CommandNotSupportedOnView";
    /// A plan was killed, by a drop for one.
    QUERY_PLAN_KILLED = 175, "QueryPlanKilled";
    /// `hello` client metadata beyond its limit.
    CLIENT_METADATA_DOCUMENT_TOO_LARGE = 185, "ClientMetadataDocumentTooLarge";
    /// The primary stepped down.
    PRIMARY_STEPPED_DOWN = 189, "PrimarySteppedDown";
    /// An index specification with an unknown option.
    INVALID_INDEX_SPECIFICATION_OPTION = 197, "InvalidIndexSpecificationOption";
    /// A peer of the server did not answer in time.
    NETWORK_INTERFACE_EXCEEDED_TIME_LIMIT = 202, "NetworkInterfaceExceededTimeLimit";
    /// A cluster time with a wrong signature.
    TIME_PROOF_MISMATCH = 204, "TimeProofMismatch";
    /// A cluster time too far ahead.
    CLUSTER_TIME_FAILS_RATE_LIMITER = 205, "ClusterTimeFailsRateLimiter";
    /// No such session.
    NO_SUCH_SESSION = 206, "NoSuchSession";
    /// A cluster time that cannot be signed or checked.
    CANNOT_VERIFY_AND_SIGN_LOGICAL_TIME = 210, "CannotVerifyAndSignLogicalTime";
    /// A signing key is missing.
    KEY_NOT_FOUND = 211, "KeyNotFound";
    /// The database is being dropped.
    DATABASE_DROP_PENDING = 215, "DatabaseDropPending";
    /// An OP_MSG flag nobody knows.
    ILLEGAL_OP_MSG_FLAG = 223, "IllegalOpMsgFlag";
    /// A transaction number older than the session's newest.
    TRANSACTION_TOO_OLD = 225, "TransactionTooOld";
    /// More document sequences than a command has.
    TOO_MANY_DOCUMENT_SEQUENCES = 233, "TooManyDocumentSequences";
    /// The cursor was killed.
    CURSOR_KILLED = 237, "CursorKilled";
    /// Not built.
    NOT_IMPLEMENTED = 238, "NotImplemented";
    /// The snapshot is no longer kept.
    SNAPSHOT_TOO_OLD = 239, "SnapshotTooOld";
    /// The snapshot cannot serve this collection.
    SNAPSHOT_UNAVAILABLE = 246, "SnapshotUnavailable";
    /// No such transaction, or it is aborted.
    NO_SUCH_TRANSACTION = 251, "NoSuchTransaction";
    /// The transaction is committed already.
    TRANSACTION_COMMITTED = 256, "TransactionCommitted";
    /// The transaction holds too much.
    TRANSACTION_TOO_LARGE = 257, "TransactionTooLarge";
    /// A resume token that cannot be used.
    INVALID_RESUME_TOKEN = 260, "InvalidResumeToken";
    /// More sessions than are kept.
    TOO_MANY_LOGICAL_SESSIONS = 261, "TooManyLogicalSessions";
    /// A time limit of the server has passed.
    EXCEEDED_TIME_LIMIT = 262, "ExceededTimeLimit";
    /// Not inside a transaction.
    OPERATION_NOT_SUPPORTED_IN_TRANSACTION = 263, "OperationNotSupportedInTransaction";
    /// A prepared transaction excludes this.
    PREPARED_TRANSACTION_IN_PROGRESS = 267, "PreparedTransactionInProgress";
    /// The client went away.
    CLIENT_DISCONNECT = 279, "ClientDisconnect";
    /// A change stream that cannot go on.
    CHANGE_STREAM_FATAL_ERROR = 280, "ChangeStreamFatalError";
    /// The oplog no longer holds the resume point.
    CHANGE_STREAM_HISTORY_LOST = 286, "ChangeStreamHistoryLost";
    /// An OP_MSG checksum that does not fit.
    CHECKSUM_MISMATCH = 288, "ChecksumMismatch";
    /// The transaction lived too long.
    TRANSACTION_EXCEEDED_LIFETIME_LIMIT_SECONDS = 290, "TransactionExceededLifetimeLimitSeconds";
    /// No plan for the query.
    NO_QUERY_EXECUTION_PLANS = 291, "NoQueryExecutionPlans";
    /// A query needs the disk and may not use it.
    QUERY_EXCEEDED_MEMORY_LIMIT_NO_DISK_USE_ALLOWED = 292, "QueryExceededMemoryLimitNoDiskUseAllowed";
    /// An unknown or unsupported API version.
    API_VERSION_ERROR = 322, "APIVersionError";
    /// Not part of the strict API.
    API_STRICT_ERROR = 323, "APIStrictError";
    /// An authentication mechanism that is not available.
    MECHANISM_UNAVAILABLE = 334, "MechanismUnavailable";
    /// A command sent by OP_QUERY that may not be.
    UNSUPPORTED_OP_QUERY_COMMAND = 352, "UnsupportedOpQueryCommand";
    /// The server does not accept load balancer mode.
    LOAD_BALANCER_SUPPORT_MISMATCH = 354, "LoadBalancerSupportMismatch";
    /// An index that cannot become unique.
    CANNOT_CONVERT_INDEX_TO_UNIQUE = 359, "CannotConvertIndexToUnique";
    /// The collection is not the one that was named.
    COLLECTION_UUID_MISMATCH = 361, "CollectionUUIDMismatch";
    /// Try again later.
    TEMPORARILY_UNAVAILABLE = 365, "TemporarilyUnavailable";
    /// User writes are blocked.
    USER_WRITES_BLOCKED = 371, "UserWritesBlocked";
    /// Authentication has expired.
    REAUTHENTICATION_REQUIRED = 391, "ReauthenticationRequired";
    /// Something is used up.
    RESOURCE_EXHAUSTED = 402, "ResourceExhausted";
    /// A socket error, as old servers name it.
    SOCKET_EXCEPTION = 9001, "SocketException";
    /// Not the primary.
    NOT_WRITABLE_PRIMARY = 10107, "NotWritablePrimary";
    /// A document beyond 16 MiB.
    BSON_OBJECT_TOO_LARGE = 10334, "BSONObjectTooLarge";
    /// A unique key is taken.
    DUPLICATE_KEY = 11000, "DuplicateKey";
    /// The server is shutting down.
    INTERRUPTED_AT_SHUTDOWN = 11600, "InterruptedAtShutdown";
    /// Killed by an operator.
    INTERRUPTED = 11601, "Interrupted";
    /// An election happened.
    INTERRUPTED_DUE_TO_REPL_STATE_CHANGE = 11602, "InterruptedDueToReplStateChange";
    /// Background operation in progress.
    BACKGROUND_OPERATION_IN_PROGRESS_FOR_NAMESPACE = 12587, "BackgroundOperationInProgressForNamespace";
    /// Not the primary, and reads of secondaries were not asked for.
    NOT_PRIMARY_NO_SECONDARY_OK = 13435, "NotPrimaryNoSecondaryOk";
    /// Neither primary nor secondary.
    NOT_PRIMARY_OR_SECONDARY = 13436, "NotPrimaryOrSecondary";
    /// A field given twice in one command.
    IDL_DUPLICATE_FIELD = 40413, "Location40413";
    /// A field that a command needs.
    IDL_MISSING_FIELD = 40414, "Location40414";
    /// A field that a command does not know.
    IDL_UNKNOWN_FIELD = 40415, "Location40415";
    /// OP_MSG without `$db`.
    MISSING_DB_ARGUMENT = 40571, "Location40571";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_name_and_every_name_is_used_once() {
        for (code, name) in ALL {
            assert_eq!(code_name(*code), *name);
            assert_eq!(ALL.iter().filter(|(_, other)| other == name).count(), 1, "{name}");
        }
        assert_eq!(code_name(-1), "UnknownError");
    }
}
