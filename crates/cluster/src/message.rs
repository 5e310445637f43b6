//! Builds the OP_MSG of a command of our own, straight into a connection's buffer.

use bson::raw::RawDocument;
use bytes::{BufMut, BytesMut};

const OP_MSG: i32 = 2013;
const STRING: u8 = 0x02;

/// Writes the command `body`, with `$db` added, and its document sequences.
pub(crate) fn encode_command(
    request_id: i32,
    db: &str,
    body: &RawDocument,
    sequences: &[(&str, &[&RawDocument])],
    out: &mut BytesMut,
) {
    out.clear();
    out.put_i32_le(0);
    out.put_i32_le(request_id);
    out.put_i32_le(0);
    out.put_i32_le(OP_MSG);
    out.put_u32_le(0);

    out.put_u8(0);
    let fields = body.as_bytes();
    let fields = fields.get(4..fields.len() - 1).unwrap_or_default();
    let document_at = out.len();
    out.put_i32_le(0);
    out.put_slice(fields);
    out.put_u8(STRING);
    out.put_slice(b"$db\0");
    out.put_i32_le(db.len() as i32 + 1);
    out.put_slice(db.as_bytes());
    out.put_slice(b"\0\0");
    fill_length(out, document_at);

    for (identifier, documents) in sequences {
        out.put_u8(1);
        let section_at = out.len();
        out.put_i32_le(0);
        out.put_slice(identifier.as_bytes());
        out.put_u8(0);
        for document in *documents {
            out.put_slice(document.as_bytes());
        }
        fill_length(out, section_at);
    }
    fill_length(out, 0);
}

/// Writes the number of bytes from `at` to the end at `at`.
fn fill_length(out: &mut BytesMut, at: usize) {
    let length = (out.len() - at) as i32;
    if let Some(place) = out.get_mut(at..at + 4) {
        place.copy_from_slice(&length.to_le_bytes());
    }
}
