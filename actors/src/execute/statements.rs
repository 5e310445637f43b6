//! The statements of a write command, taken apart and put together again: each runs where it must,
//! and the client reads one reply with its own indexes.

use std::sync::Arc;
use std::time::Instant;

use bson::raw::{RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf};
use bson::rawdoc;
use bytes::{Bytes, BytesMut};
use halocline_tiering::DatePoint;
use halocline_tiering::key::Key;
use halocline_tiering::route::{WriteTarget, route_write_filter};
use halocline_tiering::upsert::{UpsertId, upsert_id};
use halocline_wire::patch::{Edit, edited};
use halocline_wire::{Command, MsgFlags, codes, encode_msg};
use smallvec::SmallVec;

use crate::execute::commands::Write;
use crate::execute::faultin::settle;
use crate::execute::forward::{Repeat, TierReply, repeat_of};
use crate::execute::read::view_of;
use crate::execute::refusal::Refusal;
use crate::execute::{Answer, Engine, Request, document_reply};
use crate::shared::Collection;
use crate::stats::Answered;

/// One statement of an `update`, `delete` or `findAndModify`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Statement<'a> {
    /// The statement as it came: an element of `updates` or `deletes`, or the command's body.
    pub(crate) document: &'a RawDocument,
    pub(crate) filter: &'a RawDocument,
    pub(crate) collation: Option<&'a RawDocument>,
    /// `let` of the command.
    pub(crate) variables: Option<&'a RawDocument>,
    pub(crate) sort: Option<&'a RawDocument>,
    /// `u`, or `update`.
    pub(crate) update: Option<RawBsonRef<'a>>,
    /// Whether at most one document is meant.
    pub(crate) single: bool,
    pub(crate) upsert: bool,
    /// The name of the field that holds the filter: `q` or `query`.
    pub(crate) filter_field: &'static str,
}

impl<'a> Statement<'a> {
    /// `None`: it is not what the server accepts either.
    fn of(document: &'a RawDocument, kind: Write, command: &Command<'a>) -> Option<Self> {
        let filter = document.get_document("q").ok()?;
        let single = match kind {
            Write::Delete => number(document, "limit") == Some(1),
            _ => !truth(document, "multi"),
        };
        Some(Self {
            document,
            filter,
            collation: document.get_document("collation").ok(),
            variables: command.get("let").and_then(RawBsonRef::as_document),
            sort: document.get_document("sort").ok(),
            update: document.get("u").ok().flatten(),
            single,
            upsert: truth(document, "upsert"),
            filter_field: "q",
        })
    }

    /// The one statement that a `findAndModify` is.
    pub(crate) fn of_find_and_modify(command: &Command<'a>) -> Result<Self, Refusal> {
        static EMPTY: [u8; 5] = [5, 0, 0, 0, 0];
        let body = command.body();
        let filter = match command.get("query") {
            Some(RawBsonRef::Document(filter)) => filter,
            None | Some(RawBsonRef::Null) => RawDocument::from_bytes(&EMPTY)
                .map_err(|e| Refusal::new(codes::INTERNAL_ERROR, e.to_string()))?,
            Some(_) => {
                return Err(Refusal::new(codes::TYPE_MISMATCH, "`query` must be a document"));
            }
        };
        Ok(Self {
            document: body,
            filter,
            collation: body.get_document("collation").ok(),
            variables: body.get_document("let").ok(),
            sort: body.get_document("sort").ok().filter(|sort| sort.iter().next().is_some()),
            update: command.get("update"),
            single: true,
            upsert: truth(body, "upsert"),
            filter_field: "query",
        })
    }

    /// Whether the order of candidates matters.
    pub(crate) fn sorts(&self) -> bool {
        self.sort.is_some()
    }

    /// Whether the update itself may say what a new document's `_id` is.
    pub(crate) fn update_may_set_id(&self) -> bool {
        let Some(RawBsonRef::Document(update)) = self.update else { return self.update.is_some() };
        update.iter().map_while(Result::ok).any(|(name, value)| match value {
            _ if name.as_str() == "_id" => true,
            RawBsonRef::Document(fields) if name.as_str().starts_with('$') => {
                !matches!(fields.get("_id"), Ok(None))
            }
            _ => false,
        })
    }

    /// The key that an upsert of this statement would give a new document; `None` if it is no
    /// upsert, or the server makes a new ObjectId.
    pub(crate) fn upserted_key(&self) -> Result<Option<Key>, Refusal> {
        let Some(update) = self.update.filter(|_| self.upsert) else { return Ok(None) };
        match upsert_id(self.filter, update) {
            UpsertId::Known(id) => {
                Key::new(id).map(Some).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))
            }
            UpsertId::Generated => Ok(None),
            UpsertId::Unclear => Err(Refusal::unsupported(
                "Halocline cannot tell which _id this upsert would give a new document, so it cannot prove that the archive has none; name the _id by equality in the filter or in $setOnInsert",
            )),
        }
    }
}

/// The statements of an `update` or `delete`. `None`: they are malformed, and the server will say so.
pub(crate) fn statements_of<'a>(
    command: &Command<'a>,
    kind: Write,
) -> Option<SmallVec<[Statement<'a>; 1]>> {
    let documents = command.documents(sequence_name(kind)).ok()?;
    documents.map(|document| Statement::of(document, kind, command)).collect()
}

fn sequence_name(kind: Write) -> &'static str {
    match kind {
        Write::Insert => "documents",
        Write::Delete => "deletes",
        Write::Update | Write::FindAndModify => "updates",
    }
}

fn truth(document: &RawDocument, name: &str) -> bool {
    match document.get(name) {
        Ok(Some(RawBsonRef::Boolean(b))) => b,
        Ok(Some(RawBsonRef::Int32(n))) => n != 0,
        Ok(Some(RawBsonRef::Int64(n))) => n != 0,
        Ok(Some(RawBsonRef::Double(n))) => n != 0.0,
        _ => false,
    }
}

#[allow(clippy::cast_possible_truncation)]
fn number(document: &RawDocument, name: &str) -> Option<i64> {
    match document.get(name).ok()?? {
        RawBsonRef::Int32(n) => Some(n.into()),
        RawBsonRef::Int64(n) => Some(n),
        RawBsonRef::Double(n) => Some(n as i64),
        _ => None,
    }
}

impl Engine {
    /// A command of several statements (or none): each on its own path, in order.
    pub(crate) async fn many_statements(
        &self,
        request: &Request<'_>,
        kind: Write,
        collection: &Arc<Collection>,
        statements: &[Statement<'_>],
    ) -> Result<Answer, Refusal> {
        let ordered = request.command.get("ordered").is_none_or(|o| o.as_bool() != Some(false));
        let whole = self.all_at_once(request, collection, statements, ordered).await?;
        if let Some(answer) = whole {
            return Ok(answer);
        }
        let mut merged = Merged::default();
        for (index, statement) in statements.iter().enumerate() {
            let bytes = self.one_statement(request, kind, index, statement.document)?;
            match self.statement(request, collection, statement, &bytes).await {
                Ok(reply) => {
                    let Some(body) = reply.body() else { continue };
                    if !reply.view.ok {
                        // The command itself failed, as it would have at this statement.
                        return Ok(self.written(request, reply, "write"));
                    }
                    merged.add(index, body);
                }
                Err(refusal) if merged.is_empty() && index == 0 => return Err(refusal),
                Err(refusal) if refusal.labels.is_empty() => merged.refused(index, &refusal),
                // What was done is on record: the driver repeats the whole command and the server
                // runs only the rest.
                Err(refusal) => return Err(refusal),
            }
            if ordered && merged.has_errors() {
                break;
            }
        }
        Ok(Answer {
            bytes: document_reply(&merged.finish(kind), request.id),
            answered: Answered::Fast,
            reason: "write_batch",
        })
    }

    /// A batch by `_id` that is on record can be sent whole. Where the order matters, every document
    /// is brought to the fast tier first: a statement that is done late could fail when those after it
    /// are done already. Otherwise the batch is tried: if every statement matched, that is the answer;
    /// if not, each is sent again by itself, and those done answer from the server's record.
    async fn all_at_once(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        statements: &[Statement<'_>],
        ordered: bool,
    ) -> Result<Option<Answer>, Refusal> {
        let repeat = repeat_of(request.command, false);
        if repeat != Repeat::ByRecord || statements.is_empty() {
            return Ok(None);
        }
        let hold = collection.boundary.hold();
        let Some(keys) = keys_named(collection, hold.complete_from, statements)? else {
            return Ok(None);
        };
        let proved = Instant::now();
        if ordered {
            settle(self.context(), collection, &keys, &request.deadline).await?;
            if proved.elapsed() >= self.context().shared.proof_age() {
                return Ok(None);
            }
        }
        let bytes = self.bytes_for_fast(request)?;
        let reply = self.send_write(request, &bytes, repeat).await?;
        drop(hold);
        let all = i64::try_from(statements.len()).unwrap_or(i64::MAX);
        let complete = reply.view.n == Some(all) && !reply.view.has_write_errors;
        if !reply.view.ok || ordered || complete {
            return Ok(Some(self.written(request, reply, "write_batch")));
        }
        Ok(None)
    }

    /// The client's command with one of its statements alone, under that statement's own id.
    fn one_statement(
        &self,
        request: &Request<'_>,
        kind: Write,
        index: usize,
        statement: &RawDocument,
    ) -> Result<Bytes, Refusal> {
        let command = request.command;
        let name = sequence_name(kind);
        let mut ids = RawArrayBuf::new();
        ids.push(statement_id(command, index));
        let mut edits: SmallVec<[Edit<'_>; 4]> = SmallVec::new();
        edits.push(Edit::Drop(name));
        edits.push(Edit::Drop("stmtId"));
        if command.txn_number().is_some() {
            edits.push(Edit::Set("stmtIds", RawBsonRef::Array(&ids)));
        }
        let body = edited(command.body(), &edits)
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))?;
        let mut out = BytesMut::new();
        let id = self.context().request_id();
        encode_msg(id, 0, MsgFlags::NONE, &body, &[(name, &[statement])], &mut out);
        Ok(out.freeze())
    }
}

/// The keys of statements each of which means one document by its `_id` and inserts none; `None` if
/// one of them is another kind.
fn keys_named(
    collection: &Collection,
    boundary: Option<DatePoint>,
    statements: &[Statement<'_>],
) -> Result<Option<Vec<Key>>, Refusal> {
    let definitions = collection.definitions.load();
    let view = view_of(collection, &definitions, boundary);
    let mut keys = Vec::with_capacity(statements.len());
    for statement in statements {
        let target = route_write_filter(statement.filter, statement.collation, &view);
        match target {
            WriteTarget::Id { id, .. } if statement.single && !statement.upsert => {
                keys.push(Key::new(id).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))?)
            }
            _ => return Ok(None),
        }
    }
    Ok(Some(keys))
}

/// The id under which the server records a statement: given by the client, or its place.
pub(crate) fn statement_id(command: &Command<'_>, index: usize) -> i32 {
    let given = match command.get("stmtIds") {
        Some(RawBsonRef::Array(ids)) => {
            ids.into_iter().map_while(Result::ok).nth(index).and_then(|id| id.as_i32())
        }
        _ => None,
    };
    let first = command.get("stmtId").and_then(|id| id.as_i32()).unwrap_or(0);
    given.unwrap_or_else(|| first.saturating_add(i32::try_from(index).unwrap_or(i32::MAX)))
}

/// One reply made of several.
#[derive(Default)]
pub(crate) struct Merged {
    n: i64,
    n_modified: i64,
    upserted: Vec<RawDocumentBuf>,
    write_errors: Vec<RawDocumentBuf>,
    write_concern_error: Option<RawDocumentBuf>,
    /// `$clusterTime`, `operationTime`, `opTime`, `electionId` of the last reply.
    envelope: RawDocumentBuf,
    replies: usize,
}

impl Merged {
    fn is_empty(&self) -> bool {
        self.replies == 0
    }

    pub(crate) fn has_errors(&self) -> bool {
        !self.write_errors.is_empty()
    }

    /// Takes in the reply of the statement at `index`.
    pub(crate) fn add(&mut self, index: usize, body: &RawDocument) {
        self.replies += 1;
        self.n += number(body, "n").unwrap_or(0);
        self.n_modified += number(body, "nModified").unwrap_or(0);
        let index = i32::try_from(index).unwrap_or(i32::MAX);
        for (name, into) in
            [("upserted", &mut self.upserted), ("writeErrors", &mut self.write_errors)]
        {
            let Ok(array) = body.get_array(name) else { continue };
            for entry in array.into_iter().map_while(Result::ok) {
                let Some(entry) = entry.as_document() else { continue };
                if let Ok(entry) = edited(entry, &[Edit::Set("index", RawBsonRef::Int32(index))]) {
                    into.push(entry);
                }
            }
        }
        self.keep_write_concern_error(body);
        self.envelope = envelope_of(body);
    }

    /// A write concern that was not met for one document was not met for the statement.
    pub(crate) fn note_write_concern(&mut self, reply: &TierReply) {
        if reply.view.has_write_concern_error
            && let Some(body) = reply.body()
        {
            self.keep_write_concern_error(body);
        }
    }

    fn keep_write_concern_error(&mut self, body: &RawDocument) {
        if let Ok(error) = body.get_document("writeConcernError") {
            self.write_concern_error = Some(error.to_owned());
        }
    }

    /// Counts documents that a statement reached one by one.
    pub(crate) fn count(&mut self, n: i64, n_modified: i64) {
        self.n += n;
        self.n_modified += n_modified;
    }

    /// A statement that the daemon itself refused.
    pub(crate) fn refused(&mut self, index: usize, refusal: &Refusal) {
        let index = i32::try_from(index).unwrap_or(i32::MAX);
        self.write_errors.push(rawdoc! {
            "index": index,
            "code": refusal.code,
            "errmsg": refusal.message.as_str(),
        });
    }

    /// The merged reply.
    pub(crate) fn finish(self, kind: Write) -> RawDocumentBuf {
        let n = |n: i64| i32::try_from(n).unwrap_or(i32::MAX);
        let mut reply = rawdoc! { "n": n(self.n) };
        if !self.upserted.is_empty() {
            reply.append(bson::cstr!("upserted"), array(self.upserted));
        }
        if kind == Write::Update {
            reply.append(bson::cstr!("nModified"), n(self.n_modified));
        }
        if !self.write_errors.is_empty() {
            reply.append(bson::cstr!("writeErrors"), array(self.write_errors));
        }
        if let Some(error) = self.write_concern_error {
            reply.append(bson::cstr!("writeConcernError"), error);
        }
        reply.append(bson::cstr!("ok"), 1.0);
        for (name, value) in self.envelope.iter().map_while(Result::ok) {
            reply.append(name, value);
        }
        reply
    }
}

/// The fields of a write reply that are neither counts nor errors.
pub(crate) fn envelope_of(body: &RawDocument) -> RawDocumentBuf {
    let mut envelope = RawDocumentBuf::new();
    for name in [
        bson::cstr!("opTime"),
        bson::cstr!("electionId"),
        bson::cstr!("$clusterTime"),
        bson::cstr!("operationTime"),
    ] {
        if let Ok(Some(value)) = body.get(name.as_str()) {
            envelope.append(name, value);
        }
    }
    envelope
}

fn array(documents: Vec<RawDocumentBuf>) -> RawArrayBuf {
    let mut array = RawArrayBuf::new();
    for document in documents {
        array.push(document);
    }
    array
}

/// A statement's reply, as a tier's reply would be.
pub(crate) fn as_tier_reply(like: &TierReply, document: &RawDocument) -> TierReply {
    let message = document_reply(document, 0);
    let view = halocline_wire::patch::ReplyView::parse(&message).unwrap_or_default();
    TierReply { message, view, server: like.server.clone(), tier: like.tier }
}
