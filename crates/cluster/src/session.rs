//! The server sessions this process makes for itself, told from clients' by their ids. A client's
//! command that carries such an id must be refused: the change feed and the lanes rely on it.

use bson::raw::{RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use bson::spec::BinarySubtype;
use bson::{Binary, rawdoc};

/// How every reserved session id begins.
pub const RESERVED_SESSION_PREFIX: [u8; 8] = *b"haloclin";

/// Bytes of a session id (a UUID).
pub(crate) const ID_BYTES: usize = 16;

/// A session id.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionId(pub(crate) [u8; ID_BYTES]);

impl SessionId {
    /// A reserved id that ends in these bytes.
    pub(crate) fn reserved(end: [u8; 8]) -> Self {
        let mut id = [0; ID_BYTES];
        let (head, tail) = id.split_at_mut(8);
        head.copy_from_slice(&RESERVED_SESSION_PREFIX);
        tail.copy_from_slice(&end);
        SessionId(id)
    }

    /// The `lsid` of a command.
    pub(crate) fn lsid(self) -> RawDocumentBuf {
        rawdoc! { "id": Binary { subtype: BinarySubtype::Uuid, bytes: self.0.to_vec() } }
    }

    /// Puts a command on this session under a transaction number.
    pub(crate) fn sign(self, command: &mut RawDocumentBuf, txn_number: i64) {
        command.append(cstr!("lsid"), self.lsid());
        command.append(cstr!("txnNumber"), txn_number);
    }
}

/// Whether an `lsid` is one of this process's own.
pub fn is_reserved(lsid: &RawDocument) -> bool {
    // Of several fields of one name the server takes the last, so any of them counts.
    lsid.into_iter().map_while(Result::ok).any(|(key, value)| match value {
        RawBsonRef::Binary(id) => {
            key.as_str() == "id" && id.bytes.starts_with(&RESERVED_SESSION_PREFIX)
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_sessions_are_recognised_and_clients_are_not() {
        assert!(is_reserved(&SessionId::reserved([7; 8]).lsid()));
        let uuid = |bytes: [u8; 16]| {
            rawdoc! { "id": Binary { subtype: BinarySubtype::Uuid, bytes: bytes.to_vec() } }
        };
        assert!(!is_reserved(&uuid([7; 16])));
        assert!(!is_reserved(&uuid(*b"aloclin\0\0\0\0\0\0\0\0\0")));
        assert!(!is_reserved(&rawdoc! { "id": "haloclin" }));
        assert!(!is_reserved(&rawdoc! {}));
    }

    #[test]
    fn a_second_id_field_does_not_hide_a_reserved_one() {
        let mut lsid = rawdoc! { "id": 1 };
        lsid.append(
            cstr!("id"),
            Binary { subtype: BinarySubtype::Uuid, bytes: b"haloclin01234567".to_vec() },
        );
        assert!(is_reserved(&lsid));
    }
}
