//! Writing messages: OP_MSG from a body and sequences, and MongoDB's error documents.

use bson::raw::{RawArrayBuf, RawDocument, RawDocumentBuf, cstr};
use bytes::{BufMut, BytesMut};

use crate::frame::{Header, OP_MSG, wire_length};
use crate::message::{MsgFlags, SECTIONS_AT};

/// Appends one OP_MSG to `out`. With `MsgFlags::CHECKSUM_PRESENT` its CRC-32C is computed and
/// appended. The caller keeps the whole within the receiver's `maxMessageSizeBytes`.
pub fn encode_msg(
    request_id: i32,
    response_to: i32,
    flags: MsgFlags,
    body: &RawDocument,
    sequences: &[(&str, &[&RawDocument])],
    out: &mut BytesMut,
) {
    let documents: usize =
        sequences.iter().flat_map(|(_, docs)| *docs).map(|doc| doc.as_bytes().len()).sum();
    let sequence_heads: usize = sequences.iter().map(|(name, _)| 1 + 4 + name.len() + 1).sum();
    out.reserve(SECTIONS_AT + 1 + body.as_bytes().len() + sequence_heads + documents + 4);

    let start = begin_msg(request_id, response_to, flags, out);
    out.put_u8(0);
    out.put_slice(body.as_bytes());
    for (name, docs) in sequences {
        let bytes: usize = docs.iter().map(|doc| doc.as_bytes().len()).sum();
        // A zero byte would end the name early; MongoDB's field names have none.
        let name = name.split('\0').next().unwrap_or_default();
        out.put_u8(1);
        out.put_i32_le(wire_length(4 + name.len() + 1 + bytes));
        out.put_slice(name.as_bytes());
        out.put_u8(0);
        for doc in *docs {
            out.put_slice(doc.as_bytes());
        }
    }
    finish_msg(start, flags, out);
}

/// Appends header and flags; returns where the message begins in `out`.
pub(crate) fn begin_msg(
    request_id: i32,
    response_to: i32,
    flags: MsgFlags,
    out: &mut BytesMut,
) -> usize {
    let start = out.len();
    out.put_slice(&Header { length: 0, request_id, response_to, op_code: OP_MSG }.encode());
    out.put_u32_le(flags.0);
    start
}

/// Fills in the length of the message that began at `start`, and its checksum if flagged.
pub(crate) fn finish_msg(start: usize, flags: MsgFlags, out: &mut BytesMut) {
    let checksum = flags.contains(MsgFlags::CHECKSUM_PRESENT);
    let length = out.len() - start + if checksum { 4 } else { 0 };
    if let Some(slot) = out.get_mut(start..start + 4) {
        slot.copy_from_slice(&wire_length(length).to_le_bytes());
    }
    if checksum {
        let sum = crc32c::crc32c(out.get(start..).unwrap_or_default());
        out.put_u32_le(sum);
    }
}

/// The reply of a command that failed: `{ok: 0, errmsg, code, codeName, errorLabels?}`.
pub fn error_document(
    code: i32,
    code_name: &str,
    message: &str,
    labels: &[&str],
) -> RawDocumentBuf {
    let mut document = RawDocumentBuf::new();
    document.append(cstr!("ok"), 0.0);
    document.append(cstr!("errmsg"), message);
    document.append(cstr!("code"), code);
    document.append(cstr!("codeName"), code_name);
    if !labels.is_empty() {
        let mut array = RawArrayBuf::new();
        for label in labels {
            array.push(*label);
        }
        document.append(cstr!("errorLabels"), array);
    }
    document
}
