//! The identity of a document: its `_id` as MongoDB's unique index on `_id` sees it, which is not
//! the bytes (1, 1.0 and decimal 1 are one key). What is known about a key lives elsewhere.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use bson::Regex;
use bson::raw::{
    CStr, CString, RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf, cstr,
};
use bson::spec::ElementType;
use siphasher::sip::SipHasher13;
use smallvec::SmallVec;

use crate::number::Number;

/// Deepest nesting of an `_id`: MongoDB stores no document deeper than 180 levels.
const MAX_DEPTH: usize = 200;

/// Room for `{_id: <UUID>}`, the largest of the usual kinds of `_id`: none of them allocates.
const INLINE_BYTES: usize = 31;

/// Bytes that `{_id: v}` takes besides those of `v`: length, type, `_id`, two NULs.
const ENVELOPE_BYTES: usize = 4 + 1 + 4 + 1;

/// The `_id` of a document. Two keys are equal when MongoDB holds the values for the same `_id`
/// under simple collation; the bytes it was made from are kept for use in queries. Cloning copies
/// at most a pointer and 32 bytes.
#[derive(Clone)]
pub struct Key {
    hash: u64,
    document: Stored,
}

/// The bytes of the document `{_id: v}`.
#[derive(Clone)]
enum Stored {
    Inline([u8; INLINE_BYTES]),
    Shared(Arc<[u8]>),
}

/// Why a value is not a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The document has no `_id`.
    #[error("the document has no _id")]
    Missing,
    /// The bytes are not valid BSON, or hold a text that is not UTF-8.
    #[error("the _id is not valid BSON: {0}")]
    Malformed(String),
    /// Deeper than any document MongoDB stores.
    #[error("the _id is nested more than {MAX_DEPTH} levels deep")]
    TooDeep,
}

impl Key {
    /// The key of an `_id` value.
    pub fn new(id: RawBsonRef<'_>) -> Result<Self, KeyError> {
        let mut hasher = SipHasher13::new();
        canonical(id, MAX_DEPTH, &mut |bytes| hasher.write(bytes))?;
        Ok(Self { hash: hasher.finish(), document: Stored::new(id) })
    }

    /// The key of a whole document, or of any document with an `_id` (such as a `documentKey`).
    pub fn of(document: &RawDocument) -> Result<Self, KeyError> {
        match document.get("_id") {
            Ok(Some(id)) => Self::new(id),
            Ok(None) => Err(KeyError::Missing),
            Err(error) => Err(KeyError::Malformed(error.to_string())),
        }
    }

    /// `{_id: v}` with the very value this key was made from.
    pub fn as_document(&self) -> &RawDocument {
        #[allow(clippy::expect_used, reason = "`Stored::new` built these bytes as a document")]
        RawDocument::from_bytes(self.document.bytes()).expect("a key holds a document")
    }

    /// The `_id`, as the value this key was made from.
    pub fn value(&self) -> RawBsonRef<'_> {
        #[allow(clippy::expect_used, reason = "`Key::new` has walked this very value")]
        self.as_document().get("_id").ok().flatten().expect("a key holds an _id")
    }

    /// Adds the `_id` to a document under `name`.
    pub fn append_to(&self, document: &mut RawDocumentBuf, name: impl AsRef<CStr>) {
        document.append(name, self.value());
    }

    /// A filter that matches this document and no other. An `_id` that could be read as an
    /// operator is wrapped in `$eq`; all others stay in the form that mongod's fast path takes.
    pub fn filter(&self) -> RawDocumentBuf {
        let looks_like_operator = match self.value() {
            RawBsonRef::Document(id) => first_name(id).is_some_and(|name| name.starts_with('$')),
            RawBsonRef::RegularExpression(_) => true,
            _ => false,
        };
        if !looks_like_operator {
            return self.as_document().to_owned();
        }
        let mut equality = RawDocumentBuf::new();
        self.append_to(&mut equality, cstr!("$eq"));
        let mut filter = RawDocumentBuf::new();
        filter.append(cstr!("_id"), equality);
        filter
    }

    /// The same as [`filter`](Self::filter), for a command with a collation: that may take other texts
    /// for equal, so texts are told apart by regular expressions, which follow no collation. `None`:
    /// there is text where no path reaches a single value.
    pub fn filter_under_collation(&self) -> Option<RawDocumentBuf> {
        let mut texts = RawDocumentBuf::new();
        match self.value() {
            RawBsonRef::String(text) | RawBsonRef::Symbol(text) => {
                texts.append(cstr!("_id"), exactly(text)?);
                return Some(texts);
            }
            value => tell_texts_apart(value, "_id", MAX_DEPTH, &mut texts)?,
        }
        if texts.is_empty() {
            return Some(self.filter());
        }
        let mut both = RawArrayBuf::new();
        both.push(self.filter());
        both.push(texts);
        let mut filter = RawDocumentBuf::new();
        filter.append(cstr!("$and"), both);
        Some(filter)
    }

    /// Whether both came from the same bytes; equal keys may not have (1 and 1.0).
    pub fn same_bytes(&self, other: &Self) -> bool {
        self.document.bytes() == other.document.bytes()
    }

    /// A hash that equal keys share, the same in every process and release: lanes are stored in
    /// the archive and outlive the daemon.
    pub fn hash64(&self) -> u64 {
        self.hash
    }

    /// Which of `lanes` lanes this key belongs to. No lanes at all count as one.
    pub fn lane(&self, lanes: usize) -> usize {
        // Multiply and shift keeps the distribution even for any number of lanes.
        let lanes = u128::try_from(lanes.max(1)).unwrap_or(1);
        usize::try_from((u128::from(self.hash) * lanes) >> 64).unwrap_or(0)
    }

    /// Bytes this key occupies, for the accounting of memory.
    pub fn memory(&self) -> usize {
        size_of::<Self>()
            + match &self.document {
                Stored::Inline(_) => 0,
                Stored::Shared(bytes) => bytes.len() + 2 * size_of::<usize>(),
            }
    }

    fn canonical_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        // The walk has succeeded when the key was made.
        let _ = canonical(self.value(), MAX_DEPTH, &mut |part| bytes.extend_from_slice(part));
        bytes
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        // Equal hashes with different bytes are rare: equal numbers of different types.
        self.hash == other.hash
            && (self.same_bytes(other) || self.canonical_bytes() == other.canonical_bytes())
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.value(), f)
    }
}

impl fmt::Display for Key {
    /// A short readable form, for messages and logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match bson::Bson::try_from(self.value()) {
            Ok(value) => write!(f, "{value}"),
            Err(_) => fmt::Debug::fmt(&self.value(), f),
        }
    }
}

impl TryFrom<RawBsonRef<'_>> for Key {
    type Error = KeyError;

    fn try_from(id: RawBsonRef<'_>) -> Result<Self, Self::Error> {
        Self::new(id)
    }
}

impl Stored {
    fn new(id: RawBsonRef<'_>) -> Self {
        match id {
            RawBsonRef::ObjectId(id) => Self::inline(ElementType::ObjectId, &[&id.bytes()]),
            RawBsonRef::Int32(n) => Self::inline(ElementType::Int32, &[&n.to_le_bytes()]),
            RawBsonRef::Int64(n) => Self::inline(ElementType::Int64, &[&n.to_le_bytes()]),
            RawBsonRef::Double(n) => Self::inline(ElementType::Double, &[&n.to_le_bytes()]),
            RawBsonRef::DateTime(date) => {
                Self::inline(ElementType::DateTime, &[&date.timestamp_millis().to_le_bytes()])
            }
            RawBsonRef::String(text) => match i32::try_from(text.len() + 1) {
                Ok(length) => Self::inline(
                    ElementType::String,
                    &[&length.to_le_bytes(), text.as_bytes(), &[0]],
                ),
                Err(_) => None,
            },
            RawBsonRef::Binary(binary) if u8::from(binary.subtype) != 2 => {
                match i32::try_from(binary.bytes.len()) {
                    Ok(length) => Self::inline(
                        ElementType::Binary,
                        &[&length.to_le_bytes(), &[u8::from(binary.subtype)], binary.bytes],
                    ),
                    Err(_) => None,
                }
            }
            _ => None,
        }
        .unwrap_or_else(|| {
            let mut document = RawDocumentBuf::new();
            document.append(cstr!("_id"), id);
            let bytes = document.as_bytes();
            Self::from_parts(&[bytes]).unwrap_or_else(|| Self::Shared(bytes.into()))
        })
    }

    /// `{_id: v}` from the type and the encoded parts of `v`, if it is short enough.
    fn inline(kind: ElementType, value: &[&[u8]]) -> Option<Self> {
        let length: usize = ENVELOPE_BYTES + value.iter().map(|part| part.len()).sum::<usize>();
        let length_bytes = i32::try_from(length).ok()?.to_le_bytes();
        let kind = [kind as u8];
        let mut parts: SmallVec<[&[u8]; 8]> = SmallVec::new();
        parts.extend([&length_bytes[..], &kind, b"_id\0"]);
        parts.extend(value.iter().copied());
        parts.push(&[0]);
        Self::from_parts(&parts)
    }

    fn from_parts(parts: &[&[u8]]) -> Option<Self> {
        let mut bytes = [0; INLINE_BYTES];
        let mut rest = &mut bytes[..];
        for part in parts {
            let (head, tail) = rest.split_at_mut_checked(part.len())?;
            head.copy_from_slice(part);
            rest = tail;
        }
        Some(Self::Inline(bytes))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Shared(bytes) => bytes,
            Self::Inline(bytes) => {
                // A document begins with its own length.
                let [a, b, c, d, ..] = *bytes;
                let length = usize::try_from(i32::from_le_bytes([a, b, c, d])).unwrap_or(0);
                bytes.get(..length).unwrap_or_default()
            }
        }
    }
}

fn first_name(document: &RawDocument) -> Option<&str> {
    document.iter_elements().next()?.ok().map(|element| element.key().as_str())
}

/// Adds a condition for every text inside a value at `path`.
fn tell_texts_apart(
    value: RawBsonRef<'_>,
    path: &str,
    depth: usize,
    conditions: &mut RawDocumentBuf,
) -> Option<()> {
    let depth = depth.checked_sub(1)?;
    match value {
        RawBsonRef::String(text) | RawBsonRef::Symbol(text) => {
            conditions.append(CString::try_from(path.to_owned()).ok()?, exactly(text)?);
        }
        RawBsonRef::Document(document) => {
            for field in document {
                let (name, value) = field.ok()?;
                let name = name.as_str();
                if has_text(value, depth) && (name.is_empty() || name.contains(['.', '$'])) {
                    return None;
                }
                tell_texts_apart(value, &format!("{path}.{name}"), depth, conditions)?;
            }
        }
        value => (!has_text(value, depth)).then_some(())?,
    }
    Some(())
}

/// Matches this text and no other.
fn exactly(text: &str) -> Option<RawBson> {
    let mut pattern = String::from("^");
    for c in text.chars() {
        if c.is_ascii_alphanumeric() || !c.is_ascii() {
            pattern.push(c);
        } else {
            pattern.push_str(&format!("\\x{:02x}", u32::from(c)));
        }
    }
    pattern.push_str("\\z");
    let pattern = CString::try_from(pattern).ok()?;
    Some(RawBson::RegularExpression(Regex { pattern, options: cstr!("").to_owned() }))
}

/// Whether a value holds text anywhere, which a collation might compare otherwise.
pub(crate) fn has_text(value: RawBsonRef<'_>, depth: usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else {
        return true;
    };
    match value {
        RawBsonRef::String(_) | RawBsonRef::Symbol(_) => true,
        RawBsonRef::Document(document) => document
            .into_iter()
            .any(|field| field.map_or(true, |(_, value)| has_text(value, depth))),
        RawBsonRef::Array(values) => {
            values.into_iter().any(|value| value.map_or(true, |value| has_text(value, depth)))
        }
        RawBsonRef::JavaScriptCodeWithScope(code) => {
            has_text(RawBsonRef::Document(code.scope), depth)
        }
        _ => false,
    }
}

/// Writes a value in a form that is the same for all values MongoDB's unique index on `_id` holds
/// for equal, and different for all others. Every part is tagged or carries its length, so no two
/// values run into each other. The form feeds a stored hash: it must never change.
fn canonical(
    value: RawBsonRef<'_>,
    depth: usize,
    out: &mut impl FnMut(&[u8]),
) -> Result<(), KeyError> {
    let depth = depth.checked_sub(1).ok_or(KeyError::TooDeep)?;
    if let Some(number) = Number::new(value) {
        canonical_number(number, out);
        return Ok(());
    }
    match value {
        // Numbers are done above; the arm keeps the match complete.
        RawBsonRef::Int32(_)
        | RawBsonRef::Int64(_)
        | RawBsonRef::Double(_)
        | RawBsonRef::Decimal128(_) => {}
        RawBsonRef::MinKey => out(&[tag::MIN_KEY]),
        RawBsonRef::Undefined => out(&[tag::UNDEFINED]),
        RawBsonRef::Null => out(&[tag::NULL]),
        // A symbol is a string to MongoDB's comparison.
        RawBsonRef::String(text) | RawBsonRef::Symbol(text) => {
            out(&[tag::STRING]);
            with_length(text.as_bytes(), out);
        }
        RawBsonRef::Document(document) => {
            out(&[tag::DOCUMENT]);
            for field in document.iter() {
                let (name, value) = field.map_err(malformed)?;
                out(&[tag::MORE]);
                with_length(name.as_str().as_bytes(), out);
                canonical(value, depth, out)?;
            }
            out(&[tag::END]);
        }
        RawBsonRef::Array(array) => {
            out(&[tag::ARRAY]);
            for value in array {
                out(&[tag::MORE]);
                canonical(value.map_err(malformed)?, depth, out)?;
            }
            out(&[tag::END]);
        }
        RawBsonRef::Binary(binary) => {
            out(&[tag::BINARY, binary.subtype.into()]);
            with_length(binary.bytes, out);
        }
        RawBsonRef::ObjectId(id) => {
            out(&[tag::OBJECT_ID]);
            out(&id.bytes());
        }
        RawBsonRef::Boolean(value) => out(&[tag::BOOLEAN, u8::from(value)]),
        RawBsonRef::DateTime(date) => {
            out(&[tag::DATE]);
            out(&date.timestamp_millis().to_le_bytes());
        }
        RawBsonRef::Timestamp(timestamp) => {
            out(&[tag::TIMESTAMP]);
            out(&timestamp.time.to_le_bytes());
            out(&timestamp.increment.to_le_bytes());
        }
        RawBsonRef::RegularExpression(regex) => {
            out(&[tag::REGEX]);
            with_length(regex.pattern.as_str().as_bytes(), out);
            with_length(regex.options.as_str().as_bytes(), out);
        }
        // Its fields are private to the bson crate, its encoding is not.
        RawBsonRef::DbPointer(_) => {
            let mut document = RawDocumentBuf::new();
            document.append(cstr!(""), value);
            out(&[tag::DB_POINTER]);
            with_length(document.as_bytes(), out);
        }
        RawBsonRef::JavaScriptCode(code) => {
            out(&[tag::CODE]);
            with_length(code.as_bytes(), out);
        }
        RawBsonRef::JavaScriptCodeWithScope(code) => {
            out(&[tag::CODE_WITH_SCOPE]);
            with_length(code.code.as_bytes(), out);
            canonical(RawBsonRef::Document(code.scope), depth, out)?;
        }
        RawBsonRef::MaxKey => out(&[tag::MAX_KEY]),
    }
    Ok(())
}

fn canonical_number(number: Number, out: &mut impl FnMut(&[u8])) {
    match number {
        Number::NaN => out(&[tag::NUMBER, 0]),
        Number::Infinite { negative } => out(&[tag::NUMBER, 1, u8::from(negative)]),
        Number::Decimal { negative, coefficient, exponent } => {
            out(&[tag::NUMBER, 2, u8::from(negative)]);
            out(&exponent.to_le_bytes());
            out(&coefficient.to_le_bytes());
        }
        Number::Double(n) => {
            out(&[tag::NUMBER, 3]);
            out(&n.to_le_bytes());
        }
    }
}

fn with_length(bytes: &[u8], out: &mut impl FnMut(&[u8])) {
    // Messages are below 48 MB: a length always fits.
    out(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
    out(bytes);
}

fn malformed(error: bson::error::Error) -> KeyError {
    KeyError::Malformed(error.to_string())
}

/// First bytes of the canonical form; values are MongoDB's canonical type order where it has one.
mod tag {
    pub(super) const END: u8 = 0xfe;
    pub(super) const MORE: u8 = 0xfd;
    pub(super) const MIN_KEY: u8 = 0xff;
    pub(super) const UNDEFINED: u8 = 0;
    pub(super) const NULL: u8 = 5;
    pub(super) const NUMBER: u8 = 10;
    pub(super) const STRING: u8 = 15;
    pub(super) const DOCUMENT: u8 = 20;
    pub(super) const ARRAY: u8 = 25;
    pub(super) const BINARY: u8 = 30;
    pub(super) const OBJECT_ID: u8 = 35;
    pub(super) const BOOLEAN: u8 = 40;
    pub(super) const DATE: u8 = 45;
    pub(super) const TIMESTAMP: u8 = 47;
    pub(super) const REGEX: u8 = 50;
    pub(super) const DB_POINTER: u8 = 55;
    pub(super) const CODE: u8 = 60;
    pub(super) const CODE_WITH_SCOPE: u8 = 65;
    pub(super) const MAX_KEY: u8 = 127;
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::{Bson, doc, rawdoc};

    fn key(value: impl Into<Bson>) -> Key {
        let document = RawDocumentBuf::try_from(doc! { "_id": value.into() }).unwrap();
        Key::of(&document).unwrap()
    }

    fn decimal(text: &str) -> Bson {
        Bson::Decimal128(text.parse().unwrap())
    }

    #[test]
    fn equal_numbers_are_one_key_with_their_own_bytes() {
        let keys = [key(1), key(1_i64), key(1.0), key(decimal("1")), key(decimal("1.00"))];
        for pair in keys.windows(2) {
            assert_eq!(pair[0], pair[1]);
            assert_eq!(pair[0].hash64(), pair[1].hash64());
            assert!(!pair[0].same_bytes(&pair[1]));
        }
        assert_eq!(key(doc! { "x": [1, { "y": 0.0 }] }), key(doc! { "x": [1.0, { "y": -0.0 }] }));
        assert_ne!(key((1_i64 << 53) + 1), key((1_i64 << 53) as f64));
    }

    #[test]
    fn what_mongod_tells_apart_is_apart() {
        let keys = [
            key(doc! { "x": 1, "y": 2 }),
            key(doc! { "y": 2, "x": 1 }),
            key(doc! { "x": 1 }),
            key(doc! {}),
            key(Bson::Null),
            key("1"),
            key(1),
            key(true),
            key(doc! { "x": "" }),
            key(doc! { "x": { "": "" } }),
            key(bson::DateTime::from_millis(1)),
        ];
        for (i, a) in keys.iter().enumerate() {
            for (j, b) in keys.iter().enumerate() {
                assert_eq!(a == b, i == j, "{a} {b}");
            }
        }
    }

    #[test]
    fn the_value_survives_byte_for_byte() {
        for document in [
            rawdoc! { "_id": bson::oid::ObjectId::from_bytes([7; 12]) },
            rawdoc! { "_id": bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![9; 16] } },
            rawdoc! { "_id": bson::Binary { subtype: bson::spec::BinarySubtype::BinaryOld, bytes: vec![9; 5] } },
            rawdoc! { "_id": "" },
            rawdoc! { "_id": "sixteen letters." },
            rawdoc! { "_id": "seventeen letters" },
            rawdoc! { "_id": { "a": [1, 2.5, null] } },
            rawdoc! { "_id": bson::RawBson::MinKey },
        ] {
            let key = Key::of(&document).unwrap();
            assert_eq!(key.as_document(), &*document);
            assert_eq!(Some(key.value()), document.get("_id").unwrap());
        }
    }

    #[test]
    fn usual_ids_need_no_allocation() {
        assert_eq!(size_of::<Key>(), 40);
        assert_eq!(key(bson::oid::ObjectId::new()).memory(), 40);
        assert_eq!(key("sixteen letters.").memory(), 40);
        assert!(key("seventeen letters").memory() > 40);
    }

    /// Lanes are stored in the archive: a changed hash would let two feeders write one key.
    #[test]
    fn the_hash_never_changes() {
        assert_eq!(key(1).hash64(), HASH_OF_ONE);
        assert_eq!(key(doc! { "a": "b" }).hash64(), HASH_OF_DOCUMENT);
    }

    const HASH_OF_ONE: u64 = 10_118_976_619_094_230_588;
    const HASH_OF_DOCUMENT: u64 = 2_690_892_844_042_124_090;

    #[test]
    fn lanes_are_even_for_any_number() {
        for lanes in [1, 3, 64] {
            let mut counts = vec![0_usize; lanes];
            (0..6400).for_each(|n| counts[key(n).lane(lanes)] += 1);
            assert!(counts.iter().all(|n| *n > 6400 / lanes / 2), "{counts:?}");
        }
        assert_eq!(key(1).lane(0), 0);
    }

    #[test]
    fn a_key_is_a_filter() {
        assert_eq!(key(5).filter(), rawdoc! { "_id": 5 });
        assert_eq!(
            key(doc! { "$ref": "c" }).filter(),
            rawdoc! { "_id": { "$eq": { "$ref": "c" } } }
        );
    }

    #[test]
    fn malformed_and_bottomless_ids_are_refused() {
        let mut deep = rawdoc! {};
        for _ in 0..MAX_DEPTH {
            deep = rawdoc! { "a": deep };
        }
        assert_eq!(Key::new(RawBsonRef::Document(&deep)), Err(KeyError::TooDeep));
        let broken = RawDocument::from_bytes(b"\x08\0\0\0\x63a\0\0").unwrap();
        assert!(matches!(Key::new(RawBsonRef::Document(broken)), Err(KeyError::Malformed(_))));
        assert_eq!(Key::of(&rawdoc! { "a": 1 }), Err(KeyError::Missing));
    }

    /// A collation may take `abc` and `ABC` for one.
    #[test]
    fn a_filter_under_a_collation_names_texts_exactly() {
        let filter = |id: RawBsonRef<'_>| Key::new(id).unwrap().filter_under_collation();
        let text = filter(RawBsonRef::String("a.B\0é")).unwrap();
        let RawBsonRef::RegularExpression(regex) = text.get("_id").unwrap().unwrap() else {
            panic!("{text:?}")
        };
        assert_eq!(regex.pattern.as_str(), r"^a\x2eB\x00é\z");
        assert_eq!(filter(RawBsonRef::Int32(5)).unwrap(), rawdoc! { "_id": 5 });
        let inside = rawdoc! { "n": 1, "x": { "y": "a" } };
        let both = filter(RawBsonRef::Document(&inside)).unwrap();
        let conditions = both.get_array("$and").unwrap();
        let second = conditions.get_document(1).unwrap();
        assert!(second.get("_id.x.y").unwrap().is_some(), "{second:?}");
        for unreachable in [rawdoc! { "x": ["a"] }, rawdoc! { "a.b": "x" }, rawdoc! { "": "x" }] {
            assert_eq!(filter(RawBsonRef::Document(&unreachable)), None);
        }
    }
}
