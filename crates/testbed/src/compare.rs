//! Compares a collection in two deployments, document by document and byte for byte. Reads only,
//! and holds two batches of documents at a time, whatever the collection's size.

use std::fmt;

use bson::raw::{RawBson, RawBsonRef, RawDocument};
use bson::rawdoc;
use bson::spec::ElementType;
use mongodb::{Client, Cursor, Database};

use crate::error::TestbedError;

/// Comparing stops after this many differences: what is broken shows in the first, and the list
/// must not grow with the collection.
pub const MOST_DIFFERENCES: usize = 1000;
/// How much of a differing value is shown.
const SHOWN_CHARACTERS: usize = 120;

/// One way in which two collections are not the same.
#[derive(Clone, Debug, PartialEq)]
pub enum Difference {
    /// The second deployment lacks the document.
    OnlyInFirst {
        /// Its `_id`.
        id: RawBson,
    },
    /// The first deployment lacks the document.
    OnlyInSecond {
        /// Its `_id`.
        id: RawBson,
    },
    /// Both have it, with different bytes.
    Unequal {
        /// Its `_id`, as the first deployment has it.
        id: RawBson,
        /// Where the documents part, and what each has there.
        place: String,
    },
    /// There were more than [`MOST_DIFFERENCES`]; always the last.
    More,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnlyInFirst { id } => write!(f, "{} is only in the first", shown(id)),
            Self::OnlyInSecond { id } => write!(f, "{} is only in the second", shown(id)),
            Self::Unequal { id, place } => write!(f, "{} differs: {place}", shown(id)),
            Self::More => write!(f, "there are more than {MOST_DIFFERENCES} differences"),
        }
    }
}

/// Every difference between the documents of `db.coll` in two deployments, in `_id` order, up to
/// [`MOST_DIFFERENCES`]. Both are read at the primary as they are now, so nothing should write
/// meanwhile. Numbers in `_id` that MongoDB takes for equal (`1` and `1.0`) are one document with
/// unequal bytes.
pub async fn compare_collections(
    a: &Client,
    b: &Client,
    db: &str,
    coll: &str,
) -> Result<Vec<Difference>, TestbedError> {
    let mut first = Side::open(a, db, coll).await?;
    let mut second = Side::open(b, db, coll).await?;
    let mut differences = Vec::new();
    loop {
        if differences.len() >= MOST_DIFFERENCES {
            differences.push(Difference::More);
            return Ok(differences);
        }
        // The servers sorted; which of two unlike heads comes first, only they can say.
        let (take_first, take_second, difference) = match (first.head()?, second.head()?) {
            (None, None) => return Ok(differences),
            (Some(one), None) => (true, false, Some(Difference::OnlyInFirst { id: one.id() })),
            (None, Some(two)) => (false, true, Some(Difference::OnlyInSecond { id: two.id() })),
            (Some(one), Some(two)) if one.id.identical(&two.id) => {
                (true, true, unequal(&one, &two))
            }
            (Some(one), Some(two)) => match second.look_up(&one.id, &two).await? {
                Found::Nowhere => (true, false, Some(Difference::OnlyInFirst { id: one.id() })),
                // One key to MongoDB, though not the same bytes.
                Found::AtHead => (true, true, unequal(&one, &two)),
                // The first's head comes later in the second.
                Found::Elsewhere => {
                    let difference = match first.look_up(&two.id, &one).await? {
                        Found::Nowhere => Difference::OnlyInSecond { id: two.id() },
                        Found::AtHead | Found::Elsewhere => Difference::Unequal {
                            id: two.id(),
                            place: "it was written while the collections were compared".into(),
                        },
                    };
                    (false, true, Some(difference))
                }
            },
        };
        differences.extend(difference);
        if take_first {
            first.advance().await?;
        }
        if take_second {
            second.advance().await?;
        }
    }
}

/// One deployment's documents in `_id` order.
struct Side {
    database: Database,
    collection: String,
    cursor: Cursor<bson::Document>,
    more: bool,
}

/// The document at a side's head, with its `_id` found.
struct Head<'a> {
    document: &'a RawDocument,
    id: Field<'a>,
}

impl Head<'_> {
    fn id(&self) -> RawBson {
        self.id.value.into()
    }
}

/// A field with its own bytes: bson's types do not keep all of them (the order of a regular
/// expression's options) or do not call equal what is identical (NaN).
#[derive(Clone, Copy)]
struct Field<'a> {
    name: &'a str,
    kind: ElementType,
    bytes: &'a [u8],
    value: RawBsonRef<'a>,
}

impl Field<'_> {
    fn identical(&self, other: &Field<'_>) -> bool {
        self.kind == other.kind && self.bytes == other.bytes
    }
}

fn fields(document: &RawDocument) -> impl Iterator<Item = bson::error::Result<Field<'_>>> {
    // After the document's own length.
    let mut position = 4;
    document.iter_elements().map(move |element| {
        let element = element?;
        // A byte of type, the name and its terminator.
        let start = position + 1 + element.key().as_str().len() + 1;
        position = start + element.size();
        Ok(Field {
            name: element.key().as_str(),
            kind: element.element_type(),
            bytes: document.as_bytes().get(start..position).unwrap_or_default(),
            value: element.value()?,
        })
    })
}

impl Side {
    async fn open(client: &Client, db: &str, coll: &str) -> Result<Self, TestbedError> {
        let database = client.database(db);
        // The collection's own collation would sort strings of `_id` in another order.
        let find = rawdoc! {
            "find": coll,
            "sort": {"_id": 1},
            "collation": {"locale": "simple"},
            "allowDiskUse": true,
        };
        let cursor = database.run_raw_cursor_command(find).await.map_err(failed(coll))?;
        let mut side = Self { database, collection: coll.to_owned(), cursor, more: true };
        side.advance().await?;
        Ok(side)
    }

    async fn advance(&mut self) -> Result<(), TestbedError> {
        self.more = self.cursor.advance().await.map_err(failed(&self.collection))?;
        Ok(())
    }

    fn head(&self) -> Result<Option<Head<'_>>, TestbedError> {
        if !self.more {
            return Ok(None);
        }
        self.head_of(self.cursor.current()).map(Some)
    }

    fn head_of<'a>(&self, document: &'a RawDocument) -> Result<Head<'a>, TestbedError> {
        for field in fields(document) {
            let id = field.map_err(|error| self.malformed(&error.to_string()))?;
            if id.name == "_id" {
                return Ok(Head { document, id });
            }
        }
        Err(self.malformed("it has no _id"))
    }

    fn malformed(&self, why: &str) -> TestbedError {
        TestbedError::Option(format!("a document of {} cannot be read: {why}", self.collection))
    }

    /// Whether this side has the document that MongoDB identifies by that `_id`, and whether it is
    /// the one at this side's head.
    async fn look_up(&self, id: &Field<'_>, head: &Head<'_>) -> Result<Found, TestbedError> {
        let find = rawdoc! {
            "find": self.collection.as_str(),
            "filter": {"_id": {"$eq": RawBson::from(id.value)}},
            "projection": {"_id": 1},
            "collation": {"locale": "simple"},
            "limit": 1,
            "singleBatch": true,
        };
        let failed = failed(&self.collection);
        let mut cursor = self.database.run_raw_cursor_command(find).await.map_err(&failed)?;
        if !cursor.advance().await.map_err(&failed)? {
            return Ok(Found::Nowhere);
        }
        let found = self.head_of(cursor.current())?;
        Ok(if found.id.identical(&head.id) { Found::AtHead } else { Found::Elsewhere })
    }
}

enum Found {
    Nowhere,
    AtHead,
    Elsewhere,
}

fn failed(collection: &str) -> impl Fn(mongodb::error::Error) -> TestbedError {
    move |error| TestbedError::driver(format!("comparing {collection}"), error)
}

fn unequal(one: &Head<'_>, two: &Head<'_>) -> Option<Difference> {
    if one.document.as_bytes() == two.document.as_bytes() {
        return None;
    }
    Some(Difference::Unequal { id: one.id(), place: parting(one.document, two.document) })
}

/// Where two documents part, as a dotted path, and what each has there.
fn parting(one: &RawDocument, two: &RawDocument) -> String {
    let mut path = String::new();
    let (mut one, mut two) = (one, two);
    loop {
        let (mut left, mut right) = (fields(one), fields(two));
        let (l, r) = loop {
            match (left.next(), right.next()) {
                (None, None) => return format!("{path}(the same fields in other bytes)"),
                (Some(Err(error)), _) | (_, Some(Err(error))) => {
                    return format!("{path}(malformed: {error})");
                }
                (Some(Ok(l)), None) => {
                    let l_shown = shown(&l.value.into());
                    return format!(
                        "{path}{} is {l_shown} in the first, absent in the second",
                        l.name
                    );
                }
                (None, Some(Ok(r))) => {
                    let r_shown = shown(&r.value.into());
                    return format!(
                        "{path}{} is absent in the first, {r_shown} in the second",
                        r.name
                    );
                }
                (Some(Ok(l)), Some(Ok(r))) if l.name != r.name => {
                    return format!(
                        "{path}{} stands in the first where {path}{} stands in the second",
                        l.name, r.name
                    );
                }
                (Some(Ok(l)), Some(Ok(r))) if l.identical(&r) => {}
                (Some(Ok(l)), Some(Ok(r))) => break (l, r),
            }
        };
        path += l.name;
        match (inner(&l), inner(&r)) {
            (Some(l), Some(r)) if l.1 == r.1 => {
                path.push('.');
                (one, two) = (l.0, r.0);
            }
            _ => {
                let (l, r) = (shown(&l.value.into()), shown(&r.value.into()));
                return format!("{path} is {l} in the first, {r} in the second");
            }
        }
    }
}

/// The document or array that a field holds, and which of the two it is.
fn inner<'a>(field: &Field<'a>) -> Option<(&'a RawDocument, ElementType)> {
    match field.kind {
        ElementType::EmbeddedDocument | ElementType::Array => {
            Some((RawDocument::from_bytes(field.bytes).ok()?, field.kind))
        }
        _ => None,
    }
}

/// A value with its type, cut to a readable length.
fn shown(value: &RawBson) -> String {
    let text = format!("{value:?}");
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        None => text,
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
    }
}
