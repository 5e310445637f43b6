//! Framing: the 16 byte header and the cut of a byte stream into whole messages.
//! What is inside a message is read in `message`.

use bytes::{Buf, Bytes, BytesMut};

use crate::error::WireError;
use crate::message::MsgFlags;

/// Largest message of the protocol, as MongoDB announces it in `maxMessageSizeBytes`.
pub const MAX_MESSAGE_BYTES: usize = 48_000_000;
/// Largest message accepted before authentication, when authentication is on: handshakes and SASL
/// payloads are far smaller, and a stranger must not make the daemon hold 48 MB.
pub const MAX_UNAUTHENTICATED_BYTES: usize = 16 * 1024;
/// Size of a message header.
pub const HEADER_BYTES: usize = 16;
/// At least this much room is made for a message that is still on its way.
const RESERVE_STEP_BYTES: usize = 64 * 1024;

/// Opcode of OP_REPLY, the answer to OP_QUERY.
pub const OP_REPLY: i32 = 1;
/// Opcode of OP_QUERY, legacy handshakes only.
pub const OP_QUERY: i32 = 2004;
/// Opcode of OP_COMPRESSED.
pub const OP_COMPRESSED: i32 = 2012;
/// Opcode of OP_MSG.
pub const OP_MSG: i32 = 2013;

/// A message header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Length of the whole message, header included.
    pub length: usize,
    /// The sender's number for this message.
    pub request_id: i32,
    /// The `request_id` this message answers, 0 in requests.
    pub response_to: i32,
    /// What follows the header.
    pub op_code: i32,
}

impl Header {
    /// Reads a header and checks its length; `None` if fewer than 16 bytes are there.
    pub fn parse(bytes: &[u8], max: usize) -> Result<Option<Header>, WireError> {
        let Some(mut head) = bytes.get(..HEADER_BYTES) else {
            // A length that cannot be is refused as soon as its four bytes are here.
            return match bytes.first_chunk::<4>() {
                Some(length) => check_length(i32::from_le_bytes(*length), max).map(|_| None),
                None => Ok(None),
            };
        };
        let length = check_length(head.get_i32_le(), max)?;
        Ok(Some(Header {
            length,
            request_id: head.get_i32_le(),
            response_to: head.get_i32_le(),
            op_code: head.get_i32_le(),
        }))
    }

    /// The header as it goes over the wire, for vectored writes that replace only the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let fields = [wire_length(self.length), self.request_id, self.response_to, self.op_code];
        for (slot, field) in out.chunks_exact_mut(4).zip(fields) {
            slot.copy_from_slice(&field.to_le_bytes());
        }
        out
    }
}

/// A length as the protocol writes it. Nothing that fits in memory here passes `i32::MAX`; a
/// receiver would refuse the saturated value.
pub(crate) fn wire_length(length: usize) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

fn check_length(length: i32, max: usize) -> Result<usize, WireError> {
    match usize::try_from(length) {
        Ok(bytes) if bytes > max => Err(WireError::LengthTooLarge { length, max }),
        Ok(bytes) if bytes >= HEADER_BYTES => Ok(bytes),
        _ => Err(WireError::LengthTooSmall { length }),
    }
}

/// One whole message.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Its header, checked.
    pub header: Header,
    /// The whole message, header included.
    pub bytes: Bytes,
}

impl Frame {
    /// Takes bytes that are one whole message.
    pub fn from_bytes(bytes: Bytes, max: usize) -> Result<Frame, WireError> {
        let header = Header::parse(&bytes, max)?.ok_or(WireError::Truncated("the header"))?;
        if header.length != bytes.len() {
            return Err(WireError::LengthMismatch { declared: header.length, actual: bytes.len() });
        }
        Ok(Frame { header, bytes })
    }

    /// The flags of an uncompressed OP_MSG, before anything else of it is known to be sound. Who
    /// answers a message that `decode` refuses looks here first: a message with `MORE_TO_COME`
    /// must not be answered, and of a compressed one (`None`) that is not known.
    pub fn msg_flags(&self) -> Option<MsgFlags> {
        let flags = self.bytes.get(HEADER_BYTES..)?.first_chunk()?;
        (self.header.op_code == OP_MSG).then(|| MsgFlags(u32::from_le_bytes(*flags)))
    }
}

/// How many bytes the message at the start of `buf` has, if its header is there. The length is
/// checked against `max`, so a reader may reserve it.
pub fn frame_length(buf: &[u8], max: usize) -> Result<Option<usize>, WireError> {
    Ok(Header::parse(buf, max)?.map(|header| header.length))
}

/// Takes one whole message off `buf`, or `None` if more bytes are needed. Then room for more is
/// made: at most doubling what has really arrived, so a peer that declares 48 MB and sends nothing
/// costs 64 KiB.
pub fn take_frame(buf: &mut BytesMut, max: usize) -> Result<Option<Frame>, WireError> {
    let Some(header) = Header::parse(buf, max)? else {
        return Ok(None);
    };
    if let Some(missing) = header.length.checked_sub(buf.len()).filter(|missing| *missing > 0) {
        buf.reserve(missing.min(buf.len().max(RESERVE_STEP_BYTES)));
        return Ok(None);
    }
    let bytes = buf.split_to(header.length).freeze();
    Ok(Some(Frame { header, bytes }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header_bytes(length: i32) -> Vec<u8> {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 12]);
        bytes
    }

    #[test]
    fn forged_lengths_are_refused_before_anything_is_reserved() {
        for length in [0, 1, 15, -1, i32::MIN, i32::MAX, 48_000_001] {
            for cut in 4..=16 {
                let bytes = header_bytes(length);
                let mut buf = BytesMut::from(&bytes[..cut]);
                let before = buf.capacity();
                let error = take_frame(&mut buf, MAX_MESSAGE_BYTES).unwrap_err();
                assert!(["length_too_small", "length_too_large"].contains(&error.kind()));
                assert_eq!(buf.capacity(), before);
            }
        }
    }

    #[test]
    fn a_declared_length_reserves_no_more_than_a_step() {
        let mut buf = BytesMut::from(&header_bytes(MAX_MESSAGE_BYTES as i32)[..]);
        assert!(take_frame(&mut buf, MAX_MESSAGE_BYTES).unwrap().is_none());
        assert!(buf.capacity() < 4 * RESERVE_STEP_BYTES, "{}", buf.capacity());
    }

    #[test]
    fn frames_are_cut_where_they_end() {
        let mut buf = BytesMut::new();
        for extra in [0usize, 3, 1] {
            let mut bytes = header_bytes((HEADER_BYTES + extra) as i32);
            bytes.extend(std::iter::repeat_n(7, extra));
            buf.extend_from_slice(&bytes);
        }
        let lengths: Vec<usize> = std::iter::from_fn(|| take_frame(&mut buf, 64).unwrap())
            .map(|f| f.bytes.len())
            .collect();
        assert_eq!(lengths, [16, 19, 17]);
        assert!(buf.is_empty());
    }

    #[test]
    fn headers_round_trip() {
        let header = Header { length: 77, request_id: -5, response_to: i32::MAX, op_code: OP_MSG };
        assert_eq!(Header::parse(&header.encode(), 100).unwrap(), Some(header));
    }
}
