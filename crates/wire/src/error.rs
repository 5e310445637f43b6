//! What can be wrong with bytes that claim to be a MongoDB message: one variant a malformed shape.
//! Answers of servers ("the command failed") are not errors here, see `patch::ReplyView`.

use crate::codes;

/// A malformed, oversized or unsupported message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The header's length is smaller than the header.
    #[error("message length {length} is smaller than the 16 byte header")]
    LengthTooSmall {
        /// As declared.
        length: i32,
    },
    /// The header's length is beyond what may be received now.
    #[error("message length {length} is beyond the limit of {max} bytes")]
    LengthTooLarge {
        /// As declared.
        length: i32,
        /// The limit in force.
        max: usize,
    },
    /// A frame whose bytes are not as many as its header says.
    #[error("message header says {declared} bytes, the message has {actual}")]
    LengthMismatch {
        /// As declared.
        declared: usize,
        /// As received.
        actual: usize,
    },
    /// An opcode other than OP_MSG, OP_QUERY and OP_COMPRESSED.
    #[error("opcode {0} is not supported; use a driver that speaks OP_MSG (MongoDB 3.6 or later)")]
    UnsupportedOpcode(i32),
    /// The message ends inside a part that every message of its kind has.
    #[error("message ends inside {0}")]
    Truncated(&'static str),
    /// Bytes after the last part of the message.
    #[error("{0} bytes follow the end of the message's last part")]
    TrailingBytes(usize),
    /// OP_MSG: a flag among the sixteen that a receiver must know.
    #[error("OP_MSG carries unknown required flags {0:#06x}")]
    UnknownFlags(u32),
    /// OP_MSG: the checksum does not fit the bytes.
    #[error("OP_MSG checksum is {declared:#010x}, the bytes give {actual:#010x}")]
    ChecksumMismatch {
        /// As received.
        declared: u32,
        /// As computed.
        actual: u32,
    },
    /// OP_MSG: a section kind other than 0 and 1.
    #[error("OP_MSG section kind {0} is unknown")]
    UnknownSection(u8),
    /// OP_MSG: no body section.
    #[error("OP_MSG has no body section")]
    MissingBody,
    /// OP_MSG: two body sections.
    #[error("OP_MSG has more than one body section")]
    SecondBody,
    /// OP_MSG: more document sequences than any command uses.
    #[error("OP_MSG has more than {0} document sequences")]
    TooManySequences(usize),
    /// OP_MSG: a document sequence whose size does not fit the message, or whose documents do not
    /// fill it exactly.
    #[error("OP_MSG document sequence has a wrong size: {0}")]
    MalformedSequence(&'static str),
    /// OP_MSG: two document sequences of one name, or one that repeats a field of the body.
    #[error("document sequence '{0}' is given twice, or repeats a field of the body")]
    DuplicateSequence(String),
    /// A document that breaks the BSON rules.
    #[error("malformed BSON: {0}")]
    MalformedDocument(&'static str),
    /// A name, or a top-level string, that is not UTF-8.
    #[error("malformed BSON: {0} is not valid UTF-8")]
    InvalidUtf8(&'static str),
    /// Documents nested deeper than the limit.
    #[error("BSON is nested deeper than {limit} levels")]
    TooDeep {
        /// The limit in force.
        limit: usize,
    },
    /// OP_COMPRESSED: a compressor id nobody assigned.
    #[error("compressor id {0} is unknown; noop, snappy, zlib and zstd are supported")]
    UnknownCompressor(u8),
    /// OP_COMPRESSED inside OP_COMPRESSED.
    #[error("a compressed message may not hold another compressed message")]
    NestedCompression,
    /// OP_COMPRESSED: the declared size is negative, or beyond what may be received now.
    #[error("declared uncompressed size {declared} is outside 0..={max}")]
    DeclaredSize {
        /// As declared.
        declared: i32,
        /// The limit in force.
        max: usize,
    },
    /// OP_COMPRESSED: the data is not as long as declared.
    #[error("uncompressed data does not have the declared {declared} bytes")]
    SizeMismatch {
        /// As declared.
        declared: usize,
    },
    /// OP_COMPRESSED: the compressed stream is corrupt, cut short or followed by garbage.
    #[error("corrupt {0} data")]
    CorruptCompression(&'static str),
    /// A compressor that failed on our own data.
    #[error("{0} compression failed")]
    CompressionFailed(&'static str),
    /// A command without any field.
    #[error("the command is an empty document")]
    EmptyCommand,
    /// A command without `$db`.
    #[error("OP_MSG requests require a $db argument")]
    MissingDatabase,
    /// A top-level field given twice: the two tiers might each believe another one.
    #[error("BSON field '{0}' is a duplicate field")]
    DuplicateField(String),
    /// A field the command cannot do without.
    #[error("BSON field '{0}' is missing but a required field")]
    MissingField(String),
    /// A field of the wrong BSON type.
    #[error("BSON field '{field}' is the wrong type, expected {expected}")]
    WrongType {
        /// Its name.
        field: String,
        /// What it must be.
        expected: &'static str,
    },
    /// A byte range that is not inside the message it is to be patched in.
    #[error("the place to patch is not in this message")]
    PatchOutOfRange,
}

impl WireError {
    /// A stable, short label, one a variant; for metrics and logs.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::LengthTooSmall { .. } => "length_too_small",
            Self::LengthTooLarge { .. } => "length_too_large",
            Self::LengthMismatch { .. } => "length_mismatch",
            Self::UnsupportedOpcode(_) => "unsupported_opcode",
            Self::Truncated(_) => "truncated",
            Self::TrailingBytes(_) => "trailing_bytes",
            Self::UnknownFlags(_) => "unknown_flags",
            Self::ChecksumMismatch { .. } => "checksum_mismatch",
            Self::UnknownSection(_) => "unknown_section",
            Self::MissingBody => "missing_body",
            Self::SecondBody => "second_body",
            Self::TooManySequences(_) => "too_many_sequences",
            Self::MalformedSequence(_) => "malformed_sequence",
            Self::DuplicateSequence(_) => "duplicate_sequence",
            Self::MalformedDocument(_) => "malformed_document",
            Self::InvalidUtf8(_) => "invalid_utf8",
            Self::TooDeep { .. } => "too_deep",
            Self::UnknownCompressor(_) => "unknown_compressor",
            Self::NestedCompression => "nested_compression",
            Self::DeclaredSize { .. } => "declared_size",
            Self::SizeMismatch { .. } => "size_mismatch",
            Self::CorruptCompression(_) => "corrupt_compression",
            Self::CompressionFailed(_) => "compression_failed",
            Self::EmptyCommand => "empty_command",
            Self::MissingDatabase => "missing_database",
            Self::DuplicateField(_) => "duplicate_field",
            Self::MissingField(_) => "missing_field",
            Self::WrongType { .. } => "wrong_type",
            Self::PatchOutOfRange => "patch_out_of_range",
        }
    }

    /// The code to answer with when the fault lies in one command's content, so that the message
    /// boundaries still hold and the connection can go on. `None`: the peer and we may disagree
    /// about where messages begin, so the connection must end.
    pub fn answer_code(&self) -> Option<i32> {
        match self {
            Self::MalformedDocument(_) | Self::InvalidUtf8(_) => Some(codes::INVALID_BSON),
            Self::TooDeep { .. } => Some(codes::OVERFLOW),
            Self::EmptyCommand => Some(codes::FAILED_TO_PARSE),
            Self::MissingDatabase => Some(codes::MISSING_DB_ARGUMENT),
            Self::DuplicateField(_) => Some(codes::IDL_DUPLICATE_FIELD),
            Self::DuplicateSequence(_) => Some(codes::IDL_DUPLICATE_FIELD),
            Self::MissingField(_) => Some(codes::IDL_MISSING_FIELD),
            Self::WrongType { .. } => Some(codes::TYPE_MISMATCH),
            _ => None,
        }
    }
}
