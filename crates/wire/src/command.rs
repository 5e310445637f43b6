//! A view of one command: what the daemon needs of its envelope, found in one pass over the body's
//! top-level fields, nothing copied. What the fields mean for routing is decided elsewhere.

use std::collections::HashSet;
use std::ops::Range;

use bson::Timestamp;
use bson::raw::{RawBsonRef, RawDocument, RawIter};
use bytes::Bytes;

use crate::error::WireError;
use crate::message::{OpMsg, Sequence, SequenceDocuments, SequenceSpan, Sequences, document_at};
use crate::query::LegacyQuery;
use crate::scan::{self, Field, Fields};

/// Up to this many fields, duplicates are found without a set.
const SMALL_COMMAND_FIELDS: usize = 64;

/// A command, borrowed from its message.
#[derive(Debug, Clone)]
pub struct Command<'a> {
    bytes: &'a Bytes,
    body: &'a RawDocument,
    body_at: usize,
    sequences: &'a [SequenceSpan],
    name: &'a str,
    envelope: Envelope<'a>,
}

/// The fields every command may have.
#[derive(Debug, Clone, Default)]
struct Envelope<'a> {
    db: Option<&'a str>,
    target: Option<&'a str>,
    collection_field: Option<&'a str>,
    cursor_id: Option<i64>,
    lsid: Option<&'a RawDocument>,
    txn_number: Option<i64>,
    start_transaction: Option<bool>,
    autocommit: Option<bool>,
    read_preference: Option<&'a RawDocument>,
    read_concern: Option<&'a RawDocument>,
    write_concern: Option<&'a RawDocument>,
    max_time_ms: Option<i64>,
    cluster_time: Option<&'a RawDocument>,
    has_comment: bool,
}

impl<'a> Command<'a> {
    /// Reads the command of an OP_MSG. Refuses a missing `$db`, any top-level field given twice (in
    /// the body, or in the body and as a document sequence) and envelope fields of a wrong type.
    pub fn parse(msg: &'a OpMsg) -> Result<Command<'a>, WireError> {
        let mut command = Command::read(msg.bytes(), msg.body_range(), &msg.sections.sequences)?;
        command.envelope.db = command.envelope.db.filter(|db| !db.is_empty());
        match command.envelope.db {
            Some(_) => Ok(command),
            None => Err(WireError::MissingDatabase),
        }
    }

    /// Reads the command of an OP_QUERY; the database stands in its collection name.
    pub fn parse_query(query: &'a LegacyQuery) -> Result<Command<'a>, WireError> {
        let mut command = Command::read(query.bytes(), query.command_range(), &[])?;
        if command.envelope.db.is_some() {
            return Err(WireError::DuplicateField("$db".to_owned()));
        }
        command.envelope.db = query.command_db();
        match command.envelope.db {
            Some(_) => Ok(command),
            None => Err(WireError::MissingDatabase),
        }
    }

    fn read(
        bytes: &'a Bytes,
        range: Range<usize>,
        sequences: &'a [SequenceSpan],
    ) -> Result<Command<'a>, WireError> {
        let body = document_at(bytes, &range);
        let mut envelope = Envelope::default();
        let mut seen = Seen::new(body);
        let mut name = None;
        for field in Fields::of(body) {
            let field = field?;
            if seen.is_repeated(&field) {
                return Err(WireError::DuplicateField(field.name_lossy()));
            }
            if sequences.iter().any(|s| bytes.get(s.identifier.clone()) == Some(field.name)) {
                return Err(WireError::DuplicateSequence(field.name_lossy()));
            }
            // So that `get` and `raw_fields` can show every field there is.
            if !scan::is_representable(&field) {
                return Err(WireError::InvalidUtf8("a top-level value"));
            }
            if name.is_none() {
                let text = std::str::from_utf8(field.name)
                    .map_err(|_| WireError::InvalidUtf8("a field name"))?;
                name = Some(text);
                envelope.target = field.as_str();
                if text == "getMore" {
                    envelope.cursor_id = Some(expect(&field, "long", field.as_i64())?);
                }
            }
            envelope.note(&field)?;
        }
        let name = name.ok_or(WireError::EmptyCommand)?;
        Ok(Command { bytes, body, body_at: range.start, sequences, name, envelope })
    }

    /// The command's name: its first field.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The value of the first field.
    pub fn target(&self) -> RawBsonRef<'a> {
        match self.body.iter().next() {
            Some(Ok((_, value))) => value,
            _ => RawBsonRef::Null,
        }
    }

    /// The database.
    pub fn db(&self) -> &'a str {
        self.envelope.db.unwrap_or_default()
    }

    /// The collection: the first field if that is a string, the field `collection` of a `getMore`.
    /// A few administrative commands have a string there that names something else.
    pub fn collection(&self) -> Option<&'a str> {
        match self.name {
            "getMore" => self.envelope.collection_field,
            _ => self.envelope.target,
        }
    }

    /// Database and collection.
    pub fn namespace(&self) -> Option<(&'a str, &'a str)> {
        Some((self.db(), self.collection()?))
    }

    /// The whole body.
    pub fn body(&self) -> &'a RawDocument {
        self.body
    }

    /// One top-level field of the body.
    pub fn get(&self, name: &str) -> Option<RawBsonRef<'a>> {
        self.body.get(name).ok().flatten()
    }

    /// The session.
    pub fn lsid(&self) -> Option<&'a RawDocument> {
        self.envelope.lsid
    }

    /// The number of the transaction or retryable write within its session.
    pub fn txn_number(&self) -> Option<i64> {
        self.envelope.txn_number
    }

    /// Whether this is the first statement of a transaction.
    pub fn start_transaction(&self) -> bool {
        self.envelope.start_transaction.unwrap_or(false)
    }

    /// `Some(false)` in every statement of a transaction.
    pub fn autocommit(&self) -> Option<bool> {
        self.envelope.autocommit
    }

    /// Whether the command is a statement of a multi-document transaction.
    pub fn in_transaction(&self) -> bool {
        self.envelope.autocommit == Some(false)
    }

    /// `$readPreference`.
    pub fn read_preference(&self) -> Option<&'a RawDocument> {
        self.envelope.read_preference
    }

    /// `readConcern`.
    pub fn read_concern(&self) -> Option<&'a RawDocument> {
        self.envelope.read_concern
    }

    /// `readConcern.afterClusterTime`.
    pub fn after_cluster_time(&self) -> Option<Timestamp> {
        self.envelope.read_concern?.get_timestamp("afterClusterTime").ok()
    }

    /// `writeConcern`.
    pub fn write_concern(&self) -> Option<&'a RawDocument> {
        self.envelope.write_concern
    }

    /// `maxTimeMS`; 0 means without limit.
    pub fn max_time_ms(&self) -> Option<i64> {
        self.envelope.max_time_ms
    }

    /// `comment`, of any type.
    pub fn comment(&self) -> Option<RawBsonRef<'a>> {
        self.envelope.has_comment.then(|| self.get("comment")).flatten()
    }

    /// `$clusterTime`, the whole signed document.
    pub fn cluster_time(&self) -> Option<&'a RawDocument> {
        self.envelope.cluster_time
    }

    /// The cursor a `getMore` reads on.
    pub fn cursor_id(&self) -> Option<i64> {
        self.envelope.cursor_id
    }

    /// The top-level fields with their places in the message.
    pub fn raw_fields(&self) -> RawFields<'a> {
        RawFields { inner: self.body.iter_elements(), at: self.body_at + 4 }
    }

    /// One top-level field with its place in the message.
    pub fn raw_field(&self, name: &str) -> Option<RawField<'a>> {
        self.raw_fields().find(|field| field.name == name)
    }

    /// The document sequences.
    pub fn sequences(&self) -> Sequences<'a> {
        Sequences::new(self.bytes, self.sequences)
    }

    /// One document sequence.
    pub fn sequence(&self, name: &str) -> Option<Sequence<'a>> {
        self.sequences().find(|sequence| sequence.identifier() == name)
    }

    /// The documents a command carries under `name` (`documents`, `updates`, `deletes`, `ops`),
    /// be they an array of the body or a document sequence.
    pub fn documents(&self, name: &str) -> Result<Documents<'a>, WireError> {
        if let Some(sequence) = self.sequence(name) {
            return Ok(Documents(Source::Sequence(sequence.documents())));
        }
        for field in Fields::of(self.body) {
            let field = field?;
            if field.name == name.as_bytes() {
                return Documents::of_array(&field);
            }
        }
        Err(WireError::MissingField(name.to_owned()))
    }

    /// How many documents `documents` gives.
    pub fn documents_len(&self, name: &str) -> Result<usize, WireError> {
        self.documents(name).map(|documents| documents.len())
    }
}

fn expect<T>(field: &Field<'_>, expected: &'static str, value: Option<T>) -> Result<T, WireError> {
    value.ok_or_else(|| WireError::WrongType { field: field.name_lossy(), expected })
}

impl<'a> Envelope<'a> {
    fn note(&mut self, field: &Field<'a>) -> Result<(), WireError> {
        let document = || expect(field, "object", field.as_document()).map(Some);
        let boolean = || expect(field, "bool", field.as_bool()).map(Some);
        match field.name {
            // A server takes null in these as absent.
            b"lsid" | b"txnNumber" | b"startTransaction" | b"autocommit" | b"$readPreference"
            | b"readConcern" | b"writeConcern" | b"maxTimeMS" | b"$clusterTime" | b"collection"
                if field.is_nullish() => {}
            b"$db" => self.db = expect(field, "string", field.as_str()).map(Some)?,
            b"lsid" => self.lsid = document()?,
            b"txnNumber" => self.txn_number = expect(field, "long", field.as_i64()).map(Some)?,
            b"startTransaction" => self.start_transaction = boolean()?,
            b"autocommit" => self.autocommit = boolean()?,
            b"$readPreference" => self.read_preference = document()?,
            b"readConcern" => self.read_concern = document()?,
            b"writeConcern" => self.write_concern = document()?,
            b"maxTimeMS" => {
                self.max_time_ms = expect(field, "number", field.as_number()).map(Some)?;
            }
            b"$clusterTime" => self.cluster_time = document()?,
            // Other commands may use the name for something else.
            b"collection" => self.collection_field = field.as_str(),
            b"comment" => self.has_comment = true,
            _ => {}
        }
        Ok(())
    }
}

/// Finds repeated names: a bit mask for the usual command, a second look at the fields before when
/// two names share a bit, a set for commands with very many fields.
struct Seen<'a> {
    body: &'a RawDocument,
    mask: u64,
    count: usize,
    names: HashSet<&'a [u8]>,
}

impl<'a> Seen<'a> {
    fn new(body: &'a RawDocument) -> Self {
        // An empty set does not allocate.
        Seen { body, mask: 0, count: 0, names: HashSet::new() }
    }

    fn earlier(&self, before: usize) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        Fields::of(self.body)
            .map_while(Result::ok)
            .take_while(move |field| field.start < before)
            .map(|field| field.name)
    }

    fn is_repeated(&mut self, field: &Field<'a>) -> bool {
        self.count += 1;
        if self.count > SMALL_COMMAND_FIELDS {
            if self.names.is_empty() {
                self.names = self.earlier(field.start).collect();
            }
            return !self.names.insert(field.name);
        }
        let bit = 1 << slot(field.name);
        let maybe = self.mask & bit != 0;
        self.mask |= bit;
        maybe && self.earlier(field.start).any(|name| name == field.name)
    }
}

/// One of 64 slots for a name. Only speed depends on it.
fn slot(name: &[u8]) -> u32 {
    let byte = |at: usize| u32::from(name.get(at).copied().unwrap_or(0));
    let sum = (name.len() as u32)
        .wrapping_mul(11)
        .wrapping_add(byte(0).wrapping_mul(7))
        .wrapping_add(byte(1).wrapping_mul(31))
        .wrapping_add(byte(name.len() / 2).wrapping_mul(13))
        .wrapping_add(byte(name.len().wrapping_sub(1)));
    sum & 63
}

/// One top-level field of a command and where it stands in `OpMsg::bytes`.
#[derive(Debug, Clone)]
pub struct RawField<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its value.
    pub value: RawBsonRef<'a>,
    /// The whole element: type byte, name, value.
    pub span: Range<usize>,
    /// The value alone.
    pub value_span: Range<usize>,
}

/// The top-level fields of a command.
pub struct RawFields<'a> {
    inner: RawIter<'a>,
    at: usize,
}

impl<'a> Iterator for RawFields<'a> {
    type Item = RawField<'a>;

    fn next(&mut self) -> Option<RawField<'a>> {
        // `Command::read` has been over all of them.
        let element = self.inner.next()?.ok()?;
        let name = element.key().as_str();
        let start = self.at;
        let value_at = start + 1 + name.len() + 1;
        let end = value_at + element.size();
        self.at = end;
        Some(RawField {
            name,
            value: element.value().ok()?,
            span: start..end,
            value_span: value_at..end,
        })
    }
}

/// The documents of a command, see `Command::documents`. Each borrows from the message, so
/// `msg.bytes().slice_ref(document.as_bytes())` shares it without a copy.
#[derive(Clone)]
pub struct Documents<'a>(Source<'a>);

#[derive(Clone)]
enum Source<'a> {
    Sequence(SequenceDocuments<'a>),
    Array { fields: Fields<'a>, left: usize },
}

impl<'a> Documents<'a> {
    fn of_array(array: &Field<'a>) -> Result<Documents<'a>, WireError> {
        let elements = (array.kind == scan::ARRAY).then(|| array.as_document_or_array()).flatten();
        let elements = expect(array, "array", elements)?;
        let mut left = 0;
        for element in Fields::of(elements) {
            let element = element?;
            if element.as_document().is_none() {
                let field =
                    format!("{}.{}", array.name_lossy(), String::from_utf8_lossy(element.name));
                return Err(WireError::WrongType { field, expected: "object" });
            }
            left += 1;
        }
        Ok(Documents(Source::Array { fields: Fields::of(elements), left }))
    }
}

impl<'a> Iterator for Documents<'a> {
    type Item = &'a RawDocument;

    fn next(&mut self) -> Option<&'a RawDocument> {
        match &mut self.0 {
            Source::Sequence(documents) => documents.next(),
            Source::Array { fields, left } => {
                let document = fields.next()?.ok()?.as_document()?;
                *left = left.saturating_sub(1);
                Some(document)
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = match &self.0 {
            Source::Sequence(documents) => documents.len(),
            Source::Array { left, .. } => *left,
        };
        (left, Some(left))
    }
}

impl ExactSizeIterator for Documents<'_> {}
