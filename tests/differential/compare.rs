//! What of two replies must be equal: everything but the envelope, the words of errors, and the order
//! of rows where MongoDB promises none.

use std::collections::{BTreeMap, HashMap};

use bson::oid::ObjectId;
use bson::{Bson, Document, RawDocumentBuf, doc};

use super::client::encoded;
use super::step::Order;

/// Fields that say something about a server, not about data.
const ENVELOPE: [&str; 8] = [
    "$clusterTime",
    "operationTime",
    "opTime",
    "electionId",
    "recoveryToken",
    "topologyVersion",
    // Whether a statement was answered from the record is the server's affair.
    "retriedStmtIds",
    "retriedStmtId",
];

/// A reply, and the rows of its cursor's further batches.
#[derive(Debug, Clone)]
pub struct Reply {
    pub body: RawDocumentBuf,
    /// Rows of all batches.
    pub rows: Vec<RawDocumentBuf>,
    /// How many rows each batch had, and whether the cursor was open after it.
    pub batches: Vec<(usize, bool)>,
}

impl Reply {
    /// Its document. Field order is kept; repeated fields are not, which no reply has.
    pub fn document(&self) -> Document {
        Document::try_from(&*self.body).unwrap_or_else(|e| doc! { "unreadable": e.to_string() })
    }

    /// The error's code, if the command failed.
    pub fn error_code(&self) -> Option<i32> {
        let body = self.document();
        (number(&body, "ok") != Some(1)).then(|| code(&body))
    }

    pub fn has_label(&self, label: &str) -> bool {
        self.document()
            .get_array("errorLabels")
            .is_ok_and(|labels| labels.iter().any(|l| l.as_str() == Some(label)))
    }

    /// `n`, or that of `lastErrorObject`.
    pub fn matched(&self) -> i64 {
        let body = self.document();
        let inner = body.get_document("lastErrorObject").ok().and_then(|last| number(last, "n"));
        number(&body, "n").or(inner).unwrap_or(0)
    }

    /// The `_id`s of documents that were born without one, by statement.
    pub fn generated(&self) -> Vec<(i64, ObjectId)> {
        let body = self.document();
        if let Ok(last) = body.get_document("lastErrorObject") {
            return last.get_object_id("upserted").map(|id| vec![(0, id)]).unwrap_or_default();
        }
        let Ok(upserted) = body.get_array("upserted") else { return Vec::new() };
        upserted
            .iter()
            .filter_map(Bson::as_document)
            .filter_map(|entry| Some((number(entry, "index")?, entry.get_object_id("_id").ok()?)))
            .collect()
    }
}

pub fn number(document: &Document, name: &str) -> Option<i64> {
    match document.get(name)? {
        Bson::Int32(n) => Some((*n).into()),
        Bson::Int64(n) => Some(*n),
        #[allow(clippy::cast_possible_truncation)]
        Bson::Double(n) => Some(*n as i64),
        _ => None,
    }
}

fn code(error: &Document) -> i32 {
    number(error, "code").and_then(|code| i32::try_from(code).ok()).unwrap_or(-1)
}

/// What is compared of a reply: names and bytes.
pub type Essence = BTreeMap<String, Vec<u8>>;

/// `renamed`: `_id`s that the plain set made, and those that Halocline's tiers made in their place.
pub fn essence(reply: &Reply, order: Order, renamed: &HashMap<ObjectId, ObjectId>) -> Essence {
    let body = reply.document();
    let mut essence = Essence::new();
    if reply.error_code().is_some() {
        put(&mut essence, "error", error_essence(&body).into());
        return essence;
    }
    for (name, value) in body {
        if ENVELOPE.contains(&name.as_str()) {
            continue;
        }
        let value = match (name.as_str(), value) {
            // Rows are looked at by themselves.
            ("cursor", Bson::Document(cursor)) => cursor.get("ns").cloned().unwrap_or(Bson::Null),
            ("writeErrors", Bson::Array(errors)) => errors
                .iter()
                .filter_map(Bson::as_document)
                .map(|error| Bson::Document(error_essence(error)))
                .collect(),
            ("values", Bson::Array(values)) if order == Order::Any => sorted(values),
            ("cursorsKilled" | "cursorsNotFound" | "cursorsAlive", Bson::Array(ids)) => {
                Bson::Int32(i32::try_from(ids.len()).unwrap_or(-1))
            }
            (_, value) => value,
        };
        put(&mut essence, &name, with_names(value, renamed));
    }
    essence
}

/// Rows as they are compared.
pub fn rows(reply: &Reply, order: Order, renamed: &HashMap<ObjectId, ObjectId>) -> Vec<Vec<u8>> {
    let mut rows: Vec<Vec<u8>> = reply
        .rows
        .iter()
        .map(|row| match (renamed.is_empty(), Document::try_from(&**row)) {
            (false, Ok(document)) => {
                let Bson::Document(document) = with_names(document.into(), renamed) else {
                    unreachable!()
                };
                encoded(&document)
            }
            _ => row.as_bytes().to_vec(),
        })
        .collect();
    if order != Order::Total {
        rows.sort();
    }
    rows
}

fn put(essence: &mut Essence, name: &str, value: Bson) {
    essence.insert(name.to_owned(), encoded(&doc! { "": value }));
}

fn error_essence(error: &Document) -> Document {
    let mut essence = doc! { "code": code(error) };
    for name in ["index", "codeName", "keyPattern", "keyValue"] {
        if let Some(value) = error.get(name) {
            let value = match (name, value) {
                ("index", value) => number(error, "index").map_or(value.clone(), Bson::Int64),
                _ => value.clone(),
            };
            essence.insert(name, value);
        }
    }
    let mut labels: Vec<&str> = error
        .get_array("errorLabels")
        .map(|labels| labels.iter().filter_map(Bson::as_str).collect())
        .unwrap_or_default();
    labels.sort_unstable();
    essence.insert("labels", labels.join(","));
    essence
}

fn sorted(values: Vec<Bson>) -> Bson {
    let mut values: Vec<(Vec<u8>, Bson)> =
        values.into_iter().map(|value| (encoded(&doc! { "": &value }), value)).collect();
    values.sort_by(|a, b| a.0.cmp(&b.0));
    values.into_iter().map(|(_, value)| value).collect()
}

fn with_names(value: Bson, renamed: &HashMap<ObjectId, ObjectId>) -> Bson {
    match value {
        Bson::ObjectId(id) => Bson::ObjectId(*renamed.get(&id).unwrap_or(&id)),
        Bson::Document(inner) => Bson::Document(
            inner.into_iter().map(|(name, value)| (name, with_names(value, renamed))).collect(),
        ),
        Bson::Array(items) => items.into_iter().map(|item| with_names(item, renamed)).collect(),
        value => value,
    }
}

/// What two replies differ in, for people; `None`: nothing that matters.
pub fn difference(
    halocline: &Reply,
    plain: &Reply,
    order: Order,
    batches_matter: bool,
    renamed: &HashMap<ObjectId, ObjectId>,
) -> Option<String> {
    let (ours, theirs) =
        (essence(halocline, order, &HashMap::new()), essence(plain, order, renamed));
    if ours != theirs {
        let parts: Vec<&str> = ours
            .keys()
            .chain(theirs.keys())
            .filter(|name| ours.get(*name) != theirs.get(*name))
            .map(String::as_str)
            .collect();
        return Some(format!(
            "differ in {parts:?}\n    Halocline: {}\n    plain:     {}",
            brief(&halocline.document()),
            brief(&plain.document())
        ));
    }
    let (our_rows, their_rows) =
        (rows(halocline, order, &HashMap::new()), rows(plain, order, renamed));
    if order == Order::Some {
        return (our_rows.len() != their_rows.len()).then(|| {
            format!("{} rows, and {} on the plain set", our_rows.len(), their_rows.len())
        });
    }
    if our_rows != their_rows {
        let missing: Vec<String> =
            their_rows.iter().filter(|row| !our_rows.contains(row)).map(|row| shown(row)).collect();
        let strange: Vec<String> =
            our_rows.iter().filter(|row| !their_rows.contains(row)).map(|row| shown(row)).collect();
        return Some(format!(
            "{} rows, and {} on the plain set\n    missing: {}\n    strange: {}{}",
            our_rows.len(),
            their_rows.len(),
            missing.join("\n             "),
            strange.join("\n             "),
            if missing.is_empty() && strange.is_empty() {
                "\n    (their order or number)"
            } else {
                ""
            },
        ));
    }
    (batches_matter && halocline.batches != plain.batches)
        .then(|| format!("batches (rows, open) {:?} and {:?}", halocline.batches, plain.batches))
}

/// A row for people.
pub fn shown(row: &[u8]) -> String {
    let document = Document::from_reader(row);
    document.map_or_else(|e| e.to_string(), |document| brief(&document))
}

/// A document without its bulk and without the envelope.
pub fn brief(document: &Document) -> String {
    let kept = document.iter().filter(|(name, _)| !ENVELOPE.contains(&name.as_str()));
    let kept: Document = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    let mut text = super::step::shown_document(&kept).to_string();
    const SHOWN: usize = 1200;
    if text.len() > SHOWN {
        let end = (0..=SHOWN).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}
