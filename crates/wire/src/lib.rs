//! MongoDB wire protocol: framing, messages, compression, command view, SCRAM.
//! Pure functions over bytes: no I/O, no policy, no clock.

pub mod codes;
mod command;
mod compression;
mod encode;
mod error;
mod frame;
mod message;
pub mod patch;
mod query;
mod scan;
pub mod scram;

pub use command::{Command, Documents, RawField, RawFields};
pub use compression::{Compressor, compress, may_compress};
pub use encode::{encode_msg, error_document};
pub use error::WireError;
pub use frame::{
    Frame, HEADER_BYTES, Header, MAX_MESSAGE_BYTES, MAX_UNAUTHENTICATED_BYTES, OP_COMPRESSED,
    OP_MSG, OP_QUERY, OP_REPLY, frame_length, take_frame,
};
pub use message::{
    DEFAULT_MAX_DEPTH, Decoded, Limits, MAX_SEQUENCES, Message, MsgFlags, OpMsg, Sequence,
    SequenceDocuments, Sequences, Validation, decode,
};
pub use query::{LegacyQuery, encode_query_failure, encode_query_reply};
