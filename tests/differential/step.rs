//! What a generated case consists of: documents, and steps that are the same in every run. Dates are
//! written relative to the boundary and names as places to fill in; both become real when a case is
//! run, because the boundary moves with the clock and every run has collections of its own.

use std::fmt;

use bson::oid::ObjectId;
use bson::{Bson, DateTime, Document, doc};
use halocline_tiering::DateKind;

/// The place of the tiered collection's name.
pub const TIERED: &str = "@tiered";
/// The place of an untiered collection's name.
pub const OTHER: &str = "@other";
/// The place of the name of an untiered collection that pipelines write into.
pub const OUTPUT: &str = "@output";

/// Stands for the boundary in dates: 2100-01-01.
const BOUNDARY: i64 = 4_102_444_800_000;
/// Dates this near to [`BOUNDARY`] are relative to it, milliseconds.
const REACH: i64 = 60 * 86_400_000;

/// The date so many milliseconds after the boundary (before it, if negative).
pub fn date(offset: i64) -> Bson {
    Bson::DateTime(DateTime::from_millis(BOUNDARY + offset))
}

/// Everything of one client on one collection.
#[derive(Debug, Clone)]
pub struct Case {
    pub kind: DateKind,
    pub unique: bool,
    /// What both deployments hold at first.
    pub documents: Vec<Document>,
    pub steps: Vec<Step>,
}

/// One step.
#[derive(Debug, Clone)]
pub enum Step {
    /// One command; if its reply opens a cursor, that is read to its end.
    One(Call),
    /// A cursor read in small batches while other reads run.
    Cursor(CursorStep),
    /// A transaction.
    Transaction(Transaction),
    /// Waits until the evictor has taken what it may.
    LetEvict,
}

/// See [`Step::Cursor`].
#[derive(Debug, Clone)]
pub struct CursorStep {
    pub open: Call,
    /// `batchSize` of each `getMore` in turn; the last one is repeated.
    pub batches: Vec<i32>,
    /// Reads between the batches.
    pub between: Vec<Call>,
    /// Wait for the evictor after the first batch.
    pub let_evict: bool,
    /// Kill it after so many batches.
    pub kill_after: Option<usize>,
}

/// See [`Step::Transaction`].
#[derive(Debug, Clone)]
pub struct Transaction {
    pub session: u8,
    /// The first attempt's number.
    pub number: i64,
    pub read_concern: Option<&'static str>,
    pub calls: Vec<Call>,
    pub commit: bool,
}

/// One command and what may be expected of its reply.
#[derive(Debug, Clone)]
pub struct Call {
    pub body: Document,
    /// `documents`, `updates` or `deletes` in a section of their own.
    pub sequence: Option<(String, Vec<Document>)>,
    pub order: Order,
    pub refusal: MayRefuse,
    /// A write of one document by a filter that several may match: which one is Halocline's choice,
    /// and the plain set is made to follow it.
    pub follow: bool,
    /// Inserted documents have no `_id`; they carry this in their field `tag`.
    pub tag: Option<i32>,
    /// Not acknowledged.
    pub silent: bool,
    /// `readConcern.afterClusterTime`: the time of each deployment's own last reply.
    pub causal: bool,
    pub session: Option<u8>,
    pub number: Option<i64>,
    /// Which of the two connections.
    pub connection: usize,
}

/// What MongoDB promises about the order of a reply's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The sort is total.
    Total,
    /// None: the same rows in any order.
    Any,
    /// None, and a limit or skip: as many rows, each from the whole result.
    Some,
}

/// Whether Halocline may refuse by design.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MayRefuse {
    /// It must answer.
    Never,
    /// It may, with this code.
    With(i32),
    /// It must, with this code; the plain set is not asked.
    Always(i32),
}

impl Call {
    /// A command on the connection, with nothing special about it.
    pub fn new(body: Document) -> Self {
        Self {
            body,
            sequence: None,
            order: Order::Any,
            refusal: MayRefuse::Never,
            follow: false,
            tag: None,
            silent: false,
            causal: false,
            session: None,
            number: None,
            connection: 0,
        }
    }

    /// The command's name.
    pub fn name(&self) -> &str {
        self.body.keys().next().map_or("", String::as_str)
    }

    /// With another promise of order.
    pub fn ordered(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// A write's own statement, if it has one only.
    pub fn statement(&self) -> Option<(&Document, &'static str)> {
        if self.name() == "findAndModify" {
            return Some((&self.body, "query"));
        }
        match &self.sequence {
            Some((_, statements)) => match statements.as_slice() {
                [only] => Some((only, "q")),
                _ => None,
            },
            None => None,
        }
    }
}

/// What places and relative dates become in one run.
#[derive(Debug, Clone)]
pub struct Reality {
    pub kind: DateKind,
    /// The boundary, milliseconds since 1970.
    pub boundary: i64,
    pub tiered: String,
    pub other: String,
    pub output: String,
}

impl Reality {
    /// A document with everything filled in.
    pub fn document(&self, document: &Document) -> Document {
        document.iter().map(|(name, value)| (name.clone(), self.value(value))).collect()
    }

    fn value(&self, value: &Bson) -> Bson {
        match value {
            Bson::String(place) if place == TIERED => self.tiered.clone().into(),
            Bson::String(place) if place == OTHER => self.other.clone().into(),
            Bson::String(place) if place == OUTPUT => self.output.clone().into(),
            Bson::DateTime(date) => match relative(*date) {
                Some(offset) => self.date(self.boundary + offset),
                None => value.clone(),
            },
            Bson::Document(inner) => Bson::Document(self.document(inner)),
            Bson::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            _ => value.clone(),
        }
    }

    fn date(&self, millis: i64) -> Bson {
        let seconds = millis.div_euclid(1000);
        match self.kind {
            DateKind::Date => Bson::DateTime(DateTime::from_millis(millis)),
            DateKind::EpochSeconds if millis % 3 == 0 =>
            {
                #[allow(clippy::cast_precision_loss)]
                Bson::Double(millis as f64 / 1000.0)
            }
            DateKind::EpochSeconds => Bson::Int64(seconds),
            #[allow(clippy::cast_precision_loss)]
            DateKind::EpochMillis if millis % 3 == 0 => Bson::Double(millis as f64),
            DateKind::EpochMillis => Bson::Int64(millis),
            DateKind::ObjectId => {
                let [a, b, c, d] = u32::try_from(seconds).unwrap_or(0).to_be_bytes();
                let [e, f] = u16::try_from(millis.rem_euclid(1000)).unwrap_or(0).to_be_bytes();
                Bson::ObjectId(ObjectId::from_bytes([a, b, c, d, e, f, 0, 0, 0, 0, 0, 1]))
            }
        }
    }
}

fn relative(date: DateTime) -> Option<i64> {
    let offset = date.timestamp_millis() - BOUNDARY;
    (offset.abs() < REACH).then_some(offset)
}

/// Relative dates in words.
fn shown(value: &Bson) -> Bson {
    match value {
        Bson::DateTime(date) => match relative(*date) {
            Some(offset) => Bson::String(format!("boundary{offset:+}ms")),
            None => value.clone(),
        },
        Bson::String(long) if long.len() > 100 => Bson::String(format!("({} bytes)", long.len())),
        Bson::Document(inner) => Bson::Document(shown_document(inner)),
        Bson::Array(items) => items.iter().map(shown).collect(),
        _ => value.clone(),
    }
}

/// A document for people: relative dates in words, long texts left out.
pub fn shown_document(document: &Document) -> Document {
    document.iter().map(|(name, value)| (name.clone(), shown(value))).collect()
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut body = shown_document(&self.body);
        if let Some((name, documents)) = &self.sequence {
            let documents: Vec<Bson> =
                documents.iter().map(|d| Bson::Document(shown_document(d))).collect();
            body.insert(name.clone(), documents);
        }
        if let Some(session) = self.session {
            body.insert("lsid", format!("session {session}"));
        }
        if let Some(number) = self.number {
            body.insert("txnNumber", number);
        }
        write!(f, "{body}")?;
        let marks = [
            (self.follow, "one of several"),
            (self.silent, "not acknowledged"),
            (self.causal, "causal"),
            (self.connection == 1, "second connection"),
        ];
        for (_, mark) in marks.iter().filter(|(is, _)| *is) {
            write!(f, "  [{mark}]")?;
        }
        Ok(())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(call) => call.fmt(f),
            Self::LetEvict => f.write_str("(wait until the evictor has taken what it may)"),
            Self::Cursor(step) => {
                write!(f, "cursor of {} in batches {:?}", step.open, step.batches)?;
                if step.let_evict {
                    f.write_str(", waiting for the evictor")?;
                }
                if let Some(batches) = step.kill_after {
                    write!(f, ", killed after {batches}")?;
                }
                step.between.iter().try_for_each(|call| write!(f, "\n      between: {call}"))
            }
            Self::Transaction(transaction) => {
                let end = if transaction.commit { "committed" } else { "aborted" };
                write!(
                    f,
                    "transaction {} of session {}, {end}",
                    transaction.number, transaction.session
                )?;
                transaction.calls.iter().try_for_each(|call| write!(f, "\n      {call}"))
            }
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "dates are {}; documents at first:", self.kind)?;
        for document in &self.documents {
            writeln!(f, "    {}", shown_document(document))?;
        }
        writeln!(f, "steps:")?;
        for (number, step) in self.steps.iter().enumerate() {
            writeln!(f, "  {number}. {step}")?;
        }
        Ok(())
    }
}

/// `lsid` of one of a client's sessions.
pub fn lsid(client: &str, session: u8) -> Document {
    let mut bytes = [0x5a; 16];
    for (to, from) in bytes.iter_mut().zip(client.bytes()) {
        *to = from;
    }
    bytes[15] = session;
    doc! { "id": Bson::Binary(bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: bytes.to_vec() }) }
}
