//! A server's answer to a command, kept as the bytes that came, and the few fields of it that
//! callers here need.

use std::sync::LazyLock;

use bson::Timestamp;
use bson::raw::{RawBsonRef, RawDocument, RawDocumentBuf};
use bytes::Bytes;

use crate::error::{ClusterError, ServerError};

/// Header, flags and the kind byte of the first section: where the body of a reply begins.
const BODY_AT: usize = 16 + 4 + 1;

/// One OP_MSG reply.
#[derive(Debug, Clone)]
pub struct Reply {
    message: Bytes,
    body_end: usize,
}

impl Reply {
    /// Takes a whole reply message; `None` if it is not an OP_MSG with one document.
    pub fn from_message(message: Bytes) -> Option<Reply> {
        const OP_MSG: [u8; 4] = 2013_i32.to_le_bytes();
        if message.get(12..16)? != OP_MSG || *message.get(BODY_AT - 1)? != 0 {
            return None;
        }
        let length = i32::from_le_bytes(*message.get(BODY_AT..)?.first_chunk()?);
        let body_end = BODY_AT.checked_add(usize::try_from(length).ok()?)?;
        RawDocument::from_bytes(message.get(BODY_AT..body_end)?).ok()?;
        Some(Reply { message, body_end })
    }

    /// The document.
    pub fn body(&self) -> &RawDocument {
        // Checked when it was made; the empty document stands in for what cannot happen.
        static EMPTY: LazyLock<RawDocumentBuf> = LazyLock::new(RawDocumentBuf::new);
        self.message
            .get(BODY_AT..self.body_end)
            .and_then(|bytes| RawDocument::from_bytes(bytes).ok())
            .unwrap_or_else(|| &EMPTY)
    }

    /// The whole message, header included.
    pub fn message(&self) -> &Bytes {
        &self.message
    }

    /// A field of the body.
    pub fn get(&self, name: &str) -> Option<RawBsonRef<'_>> {
        self.body().get(name).ok().flatten()
    }

    /// A number of the body, of whatever numeric type.
    pub fn get_number(&self, name: &str) -> Option<i64> {
        number(self.get(name)?)
    }

    /// `$clusterTime.clusterTime`: the time by which everything in this answer had happened.
    pub fn cluster_time(&self) -> Option<Timestamp> {
        self.get("$clusterTime")?.as_document()?.get("clusterTime").ok()??.as_timestamp()
    }

    /// `operationTime`, which can be older than the answer itself; see [`Self::cluster_time`].
    pub fn operation_time(&self) -> Option<Timestamp> {
        self.get("operationTime")?.as_timestamp()
    }

    /// Whether the command as a whole succeeded. Write errors and write concern errors may still
    /// be inside.
    pub fn is_ok(&self) -> bool {
        matches!(self.get("ok"), Some(ok) if number(ok) == Some(1) || ok.as_bool() == Some(true))
    }

    /// The error of a reply that is not [ok](Self::is_ok).
    pub fn error(&self) -> ServerError {
        ServerError::from_document(self.body())
    }

    /// The `writeErrors`, in the order the server gave them.
    pub fn write_errors(&self) -> Vec<WriteError> {
        let Some(RawBsonRef::Array(errors)) = self.get("writeErrors") else { return Vec::new() };
        errors
            .into_iter()
            .map_while(Result::ok)
            .filter_map(|error| {
                let error = error.as_document()?;
                let index = number(error.get("index").ok()??)?;
                let index = usize::try_from(index).ok()?;
                Some(WriteError { index, error: ServerError::from_document(error) })
            })
            .collect()
    }

    /// Makes an error of a write command's reply in which a statement failed or the write concern
    /// was not reached.
    pub fn require_acknowledged(&self) -> Result<(), ClusterError> {
        let error = match self.write_errors().into_iter().next() {
            Some(failed) => Some(failed.error),
            None => self.write_concern_error(),
        };
        error.map_or(Ok(()), |error| Err(ClusterError::Server(Box::new(error))))
    }

    /// The `writeConcernError`: the write stands on the primary, its durability is not assured.
    pub fn write_concern_error(&self) -> Option<ServerError> {
        let mut error = ServerError::from_document(self.get("writeConcernError")?.as_document()?);
        if error.labels.is_empty() {
            error.labels = self.error().labels;
        }
        Some(error)
    }
}

/// The failure of one statement of a write command.
#[derive(Debug, Clone)]
pub struct WriteError {
    /// Which statement.
    pub index: usize,
    /// Why.
    pub error: ServerError,
}

/// A BSON number as an integer.
pub(crate) fn number(value: RawBsonRef<'_>) -> Option<i64> {
    match value {
        RawBsonRef::Int32(n) => Some(n.into()),
        RawBsonRef::Int64(n) => Some(n),
        RawBsonRef::Double(n) if n.fract() == 0.0 => Some(n as i64),
        _ => None,
    }
}
