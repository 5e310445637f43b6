//! The legacy opcodes, as far as old drivers' handshakes need them: OP_QUERY in, OP_REPLY out.

use std::ops::Range;

use bson::raw::{RawDocument, RawDocumentBuf, cstr};
use bytes::{BufMut, Bytes, BytesMut};

use crate::error::WireError;
use crate::frame::{Frame, HEADER_BYTES, Header, OP_QUERY, OP_REPLY};
use crate::message::{Limits, document_at};
use crate::scan;

/// OP_REPLY flag: the query failed, the one document says why.
const QUERY_FAILURE: i32 = 1 << 1;
/// OP_REPLY flag that every server since 1.6 sets.
const AWAIT_CAPABLE: i32 = 1 << 3;
/// Bytes of an OP_REPLY before its document.
const REPLY_HEAD_BYTES: usize = HEADER_BYTES + 4 + 8 + 4 + 4;

/// An OP_QUERY.
#[derive(Debug, Clone)]
pub struct LegacyQuery {
    bytes: Bytes,
    namespace: Range<usize>,
    query: Range<usize>,
    command: Range<usize>,
}

impl LegacyQuery {
    /// Reads an uncompressed OP_QUERY frame.
    pub fn parse(frame: Frame, limits: &Limits) -> Result<LegacyQuery, WireError> {
        let Frame { header, bytes } = frame;
        if header.op_code != OP_QUERY {
            return Err(WireError::UnsupportedOpcode(header.op_code));
        }
        if header.length != bytes.len() {
            return Err(WireError::LengthMismatch { declared: header.length, actual: bytes.len() });
        }
        let namespace_at = HEADER_BYTES + 4;
        let rest = bytes.get(namespace_at..).ok_or(WireError::Truncated("the OP_QUERY flags"))?;
        let namespace_len = rest
            .iter()
            .position(|byte| *byte == 0)
            .ok_or(WireError::Truncated("the OP_QUERY collection name"))?;
        let namespace = namespace_at..namespace_at + namespace_len;
        if bytes.get(namespace.clone()).is_none_or(|name| std::str::from_utf8(name).is_err()) {
            return Err(WireError::InvalidUtf8("the OP_QUERY collection name"));
        }
        // numberToSkip and numberToReturn follow the name.
        let query_at = namespace.end + 1 + 8;
        let rest = bytes.get(query_at..).ok_or(WireError::Truncated("OP_QUERY"))?;
        let query = scan::leading_document(rest)?.as_bytes();
        limits.check_document(query)?;
        let rest = rest.get(query.len()..).unwrap_or_default();
        if !rest.is_empty() {
            let selector = scan::leading_document(rest)?.as_bytes();
            limits.check_document(selector)?;
            let trailing = rest.len() - selector.len();
            if trailing != 0 {
                return Err(WireError::TrailingBytes(trailing));
            }
        }
        let command = match scan::Fields::new(query)?.next() {
            Some(Ok(first))
                if first.as_document().is_some()
                    && [b"$query".as_slice(), b"query"].contains(&first.name) =>
            {
                query_at + first.value_at..query_at + first.end()
            }
            _ => query_at..query_at + query.len(),
        };
        let query = query_at..query_at + query.len();
        Ok(LegacyQuery { bytes, namespace, query, command })
    }

    /// The whole message, header included.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The full collection name, `admin.$cmd` for instance.
    pub fn namespace(&self) -> &str {
        let name = self.bytes.get(self.namespace.clone()).unwrap_or_default();
        // Checked when the message was read.
        std::str::from_utf8(name).unwrap_or_default()
    }

    /// The database a command is for; `None` if this is a query of a collection.
    pub fn command_db(&self) -> Option<&str> {
        self.namespace().strip_suffix(".$cmd").filter(|db| !db.is_empty())
    }

    /// The query as sent.
    pub fn query(&self) -> &RawDocument {
        document_at(&self.bytes, &self.query)
    }

    /// The command: the query itself, or what a `$query` (or `query`) wrapper holds.
    pub fn command(&self) -> &RawDocument {
        document_at(&self.bytes, &self.command)
    }

    pub(crate) fn command_range(&self) -> Range<usize> {
        self.command.clone()
    }

    /// Whether this is the handshake that servers still answer over OP_QUERY.
    pub fn is_handshake(&self) -> bool {
        let first = scan::Fields::of(self.command()).next();
        self.command_db().is_some()
            && matches!(first, Some(Ok(first))
                if [b"ismaster".as_slice(), b"isMaster", b"hello"].contains(&first.name))
    }
}

fn encode_reply(
    request_id: i32,
    response_to: i32,
    flags: i32,
    document: &RawDocument,
    out: &mut BytesMut,
) {
    let length = REPLY_HEAD_BYTES + document.as_bytes().len();
    out.reserve(length);
    out.put_slice(&Header { length, request_id, response_to, op_code: OP_REPLY }.encode());
    out.put_i32_le(flags);
    // No cursor, from the start, one document.
    out.put_i64_le(0);
    out.put_i32_le(0);
    out.put_i32_le(1);
    out.put_slice(document.as_bytes());
}

/// Writes the OP_REPLY that answers a command sent by OP_QUERY, a handshake.
pub fn encode_query_reply(
    request_id: i32,
    response_to: i32,
    document: &RawDocument,
    out: &mut BytesMut,
) {
    encode_reply(request_id, response_to, AWAIT_CAPABLE, document, out);
}

/// Writes the OP_REPLY that refuses a legacy opcode.
pub fn encode_query_failure(
    request_id: i32,
    response_to: i32,
    code: i32,
    message: &str,
    out: &mut BytesMut,
) {
    let mut document = RawDocumentBuf::new();
    document.append(cstr!("$err"), message);
    document.append(cstr!("code"), code);
    document.append(cstr!("ok"), 0.0);
    encode_reply(request_id, response_to, AWAIT_CAPABLE | QUERY_FAILURE, &document, out);
}
