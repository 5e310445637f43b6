//! Writes whose filter the fast tier cannot decide alone: the archive names the documents, each is
//! brought to the fast tier, and the statement is applied there with its filter kept (rule 25).

use std::sync::Arc;

use bson::raw::{RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf};
use bson::rawdoc;
use bytes::{Bytes, BytesMut};
use halocline_tiering::key::Key;
use halocline_tiering::route::is_simple;
use halocline_wire::patch::{Edit, edited};
use halocline_wire::{MsgFlags, codes, encode_msg};

use crate::execute::commands::Write;
use crate::execute::faultin::{
    Residence, archive_read_concern, fault_in, is_on_fast, range_barrier,
};
use crate::execute::forward::{Repeat, TierReply, repeat_of};
use crate::execute::look::{Look, Seen};
use crate::execute::refusal::Refusal;
use crate::execute::statements::{Merged, Statement, as_tier_reply, envelope_of};
use crate::execute::write::matched_nothing;
use crate::execute::{Engine, Request};
use crate::shared::Collection;

/// mongod's answer to a `findAndModify` that is no upsert under a number whose record is an insert.
const RECORDED_AS_UPSERT: i32 = 40608;

impl Engine {
    /// One statement by a filter that is neither a key nor covered.
    pub(crate) async fn by_candidates(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
        statement: &Statement<'_>,
        bytes: &Bytes,
    ) -> Result<TierReply, Refusal> {
        if statement.single {
            self.one_of_candidates(request, collection, statement, bytes).await
        } else {
            self.all_candidates(request, collection, statement, bytes).await
        }
    }

    /// At most one document is meant. Without a sort any match will do, so one on the fast tier
    /// is taken; with a sort the archive, which knows them all, names the first.
    async fn one_of_candidates(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
        statement: &Statement<'_>,
        bytes: &Bytes,
    ) -> Result<TierReply, Refusal> {
        let repeat = repeat_of(request.command, false);
        // A retry of a command that has been applied must answer from the server's record, which
        // it does whatever the filter matches by now; a first try of an upsert must not insert
        // before the archive has been asked. With a sort nothing may match yet.
        let probe = match (statement.sorts(), statement.upsert) {
            (true, _) => self.matching_nothing(request, statement)?,
            (false, true) => self.without_upsert(request, statement)?,
            (false, false) => bytes.clone(),
        };
        loop {
            let reply = self.send_write(request, &probe, repeat).await?;
            if statement.upsert && reply.view.code == Some(RECORDED_AS_UPSERT) {
                return self.send_write(request, bytes, repeat).await;
            }
            if !matched_nothing(&reply) {
                return Ok(reply);
            }
            let now = reply.time()?;
            range_barrier(&self.context, collection, now, &request.deadline).await?;
            let Some(key) = self.first_on_archive(collection, statement).await? else {
                self.settle_upserted_id(request, collection, statement).await?;
                return self.send_write(request, bytes, repeat).await;
            };
            if !is_on_fast(&self.context, collection, &key).await?.0
                && fault_in(&self.context, collection, &key, &request.deadline).await?
                    == Residence::Nowhere
            {
                continue;
            }
            if statement.sorts() {
                let narrowed = self.narrowed(request, statement, &key)?;
                let reply = self.send_write(request, &narrowed, repeat).await?;
                if !matched_nothing(&reply) {
                    return Ok(reply);
                }
            }
            if request.deadline.has_passed() {
                return Err(Refusal::timed_out("a matching document to stay in place"));
            }
        }
    }

    /// Every document that matched when the archive was asked, each once.
    async fn all_candidates(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
        statement: &Statement<'_>,
        bytes: &Bytes,
    ) -> Result<TierReply, Refusal> {
        let reply = self.refused_by_fast(request, statement).await?;
        if !matched_nothing(&reply) {
            return Ok(reply);
        }
        range_barrier(&self.context, collection, reply.time()?, &request.deadline).await?;
        let keys = self.all_on_archive(collection, statement).await?;
        if keys.is_empty() {
            self.settle_upserted_id(request, collection, statement).await?;
        }
        self.each_key(request, collection, statement, &keys, bytes).await
    }

    /// What the server has to say against a statement whatever it matches: the statements that are
    /// made of it for single documents would no longer show a replacement of many, an unknown index
    /// or an odd `limit`. Matches nothing if there is nothing against it.
    pub(crate) async fn refused_by_fast(
        &self,
        request: &Request<'_>,
        statement: &Statement<'_>,
    ) -> Result<TierReply, Refusal> {
        let probe = self.matching_nothing(request, statement)?;
        self.send_write(request, &probe, repeat_of(request.command, false)).await
    }

    /// Applies a statement to each of the keys once, its filter kept.
    pub(crate) async fn each_key(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
        statement: &Statement<'_>,
        keys: &[Key],
        bytes: &Bytes,
    ) -> Result<TierReply, Refusal> {
        let mut session = OwnSession::new();
        let mut merged = Merged::default();
        let mut last = None;
        for key in keys {
            let narrowed = self.narrowed_in(request, statement, key, &mut session)?;
            loop {
                let reply = self.send_write(request, &narrowed, Repeat::ByRecord).await?;
                merged.note_write_concern(&reply);
                if !matched_nothing(&reply) {
                    if !reply.view.ok || reply.view.has_write_errors {
                        return Ok(reply);
                    }
                    merged.count(reply.view.n.unwrap_or(0), reply.view.n_modified.unwrap_or(0));
                    last = Some(reply);
                    break;
                }
                let look = Look {
                    filter: statement.filter,
                    collation: statement.collation,
                    variables: statement.variables,
                };
                match self.look_once(collection, key, &look).await?.0 {
                    // The filter fails by now: not ours any more.
                    Seen::ThereAndFails => {
                        last = Some(reply);
                        break;
                    }
                    Seen::ThereAndHolds => {}
                    Seen::NotThere => {
                        if fault_in(&self.context, collection, key, &request.deadline).await?
                            == Residence::Nowhere
                        {
                            last = Some(reply);
                            break;
                        }
                    }
                }
                if request.deadline.has_passed() {
                    return Err(Refusal::timed_out("the matching documents"));
                }
            }
        }
        let Some(last) = last else {
            return self.send_write(request, bytes, Repeat::Never).await;
        };
        let kind = if statement.update.is_some() { Write::Update } else { Write::Delete };
        let envelope = last.body().map(envelope_of).unwrap_or_default();
        merged.add(0, &envelope);
        Ok(as_tier_reply(&last, &merged.finish(kind)))
    }

    async fn first_on_archive(
        &self,
        collection: &Collection,
        statement: &Statement<'_>,
    ) -> Result<Option<Key>, Refusal> {
        let mut find = self.ids_query(collection, statement);
        find.append(bson::cstr!("limit"), 1);
        find.append(bson::cstr!("singleBatch"), true);
        if let Some(sort) = statement.sort {
            find.append(bson::cstr!("sort"), sort.to_owned());
        }
        let found = self.archive_query(collection.ns.db(), find).await?;
        Ok(found.first().and_then(|document| Key::of(document).ok()))
    }

    async fn all_on_archive(
        &self,
        collection: &Collection,
        statement: &Statement<'_>,
    ) -> Result<Vec<Key>, Refusal> {
        let find = self.ids_query(collection, statement);
        let found = self.archive_query(collection.ns.db(), find).await?;
        Ok(found.iter().filter_map(|document| Key::of(document).ok()).collect())
    }

    fn ids_query(&self, collection: &Collection, statement: &Statement<'_>) -> RawDocumentBuf {
        let mut find = rawdoc! {
            "find": collection.ns.coll(),
            "filter": statement.filter.to_owned(),
            "projection": { "_id": 1 },
            "readConcern": archive_read_concern(&self.context),
        };
        if let Some(collation) = statement.collation {
            find.append(bson::cstr!("collation"), collation.to_owned());
        }
        if let Some(variables) = statement.variables {
            find.append(bson::cstr!("let"), variables.to_owned());
        }
        find
    }

    /// The client's command with the statement's upsert taken out.
    fn without_upsert(
        &self,
        request: &Request<'_>,
        statement: &Statement<'_>,
    ) -> Result<Bytes, Refusal> {
        self.rebuilt(request, statement, &[Edit::Drop("upsert")], &[])
    }

    /// The client's command with a filter that holds for no document.
    fn matching_nothing(
        &self,
        request: &Request<'_>,
        statement: &Statement<'_>,
    ) -> Result<Bytes, Refusal> {
        let filter = rawdoc! { "$and": [statement.filter.to_owned(), { "_id": { "$in": [] } }] };
        let edits = [
            Edit::Set(statement.filter_field, RawBsonRef::Document(&filter)),
            Edit::Drop("upsert"),
        ];
        self.rebuilt(request, statement, &edits, &[])
    }

    /// The client's command, narrowed to one document by its `_id`, under the client's own session.
    fn narrowed(
        &self,
        request: &Request<'_>,
        statement: &Statement<'_>,
        key: &Key,
    ) -> Result<Bytes, Refusal> {
        let filter = with_id(statement, key)?;
        let edits = [
            Edit::Set(statement.filter_field, RawBsonRef::Document(&filter)),
            Edit::Drop("upsert"),
            Edit::Drop("hint"),
        ];
        self.rebuilt(request, statement, &edits, &[])
    }

    /// The same as a write of one document under a session of the daemon's own, so that a broken
    /// connection cannot make it run twice.
    fn narrowed_in(
        &self,
        request: &Request<'_>,
        statement: &Statement<'_>,
        key: &Key,
        session: &mut OwnSession,
    ) -> Result<Bytes, Refusal> {
        let filter = with_id(statement, key)?;
        let edits = [
            Edit::Set(statement.filter_field, RawBsonRef::Document(&filter)),
            Edit::Drop("upsert"),
            Edit::Drop("hint"),
            match statement.update {
                Some(_) => Edit::Set("multi", RawBsonRef::Boolean(false)),
                None => Edit::Set("limit", RawBsonRef::Int32(1)),
            },
        ];
        let lsid = session.lsid.clone();
        session.number += 1;
        let command = [
            Edit::Set("lsid", RawBsonRef::Document(&lsid)),
            Edit::Set("txnNumber", RawBsonRef::Int64(session.number)),
        ];
        self.rebuilt(request, statement, &edits, &command)
    }

    /// The client's command with this statement alone, both edited.
    fn rebuilt(
        &self,
        request: &Request<'_>,
        statement: &Statement<'_>,
        on_statement: &[Edit<'_>],
        on_command: &[Edit<'_>],
    ) -> Result<Bytes, Refusal> {
        let failed =
            |e: halocline_wire::WireError| Refusal::new(codes::FAILED_TO_PARSE, e.to_string());
        let command = request.command;
        let mut out = BytesMut::new();
        let id = self.context.request_id();
        if statement.filter_field == "query" {
            let mut edits = on_statement.to_vec();
            edits.extend_from_slice(on_command);
            let body = edited(command.body(), &edits).map_err(failed)?;
            encode_msg(id, 0, MsgFlags::NONE, &body, &[], &mut out);
            return Ok(out.freeze());
        }
        let document = edited(statement.document, on_statement).map_err(failed)?;
        let name = if statement.update.is_some() { "updates" } else { "deletes" };
        let mut edits = vec![Edit::Drop(name)];
        edits.extend_from_slice(on_command);
        let mut ids = RawArrayBuf::new();
        if let Some(id) = self.statement_id_of(request, statement, name)
            && command.txn_number().is_some()
            && on_command.is_empty()
        {
            ids.push(id);
            edits.push(Edit::Drop("stmtId"));
            edits.push(Edit::Set("stmtIds", RawBsonRef::Array(&ids)));
        } else {
            edits.push(Edit::Drop("stmtId"));
            edits.push(Edit::Drop("stmtIds"));
        }
        let body = edited(command.body(), &edits).map_err(failed)?;
        let documents: [&RawDocument; 1] = [&document];
        encode_msg(id, 0, MsgFlags::NONE, &body, &[(name, &documents)], &mut out);
        Ok(out.freeze())
    }

    /// The statement's own id in the client's command, by its place in the message.
    fn statement_id_of(
        &self,
        request: &Request<'_>,
        statement: &Statement<'_>,
        name: &str,
    ) -> Option<i32> {
        let documents = request.command.documents(name).ok()?;
        let mut documents = documents;
        let index = documents.position(|document| {
            std::ptr::eq(document.as_bytes(), statement.document.as_bytes())
        })?;
        Some(crate::execute::statements::statement_id(request.command, index))
    }
}

/// A session of the daemon's own, not reserved: the feeder must see what runs in it.
struct OwnSession {
    lsid: RawDocumentBuf,
    number: i64,
}

impl OwnSession {
    fn new() -> Self {
        Self { lsid: rawdoc! { "id": bson::Binary::from(bson::Uuid::new()) }, number: 0 }
    }
}

/// The statement's filter and the key together. The `_id` joins the filter's own fields where it can,
/// so that positional operators mean the same as before.
fn with_id(statement: &Statement<'_>, key: &Key) -> Result<RawDocumentBuf, Refusal> {
    let only = only_this(key, statement.collation)?;
    let filter = statement.filter;
    if matches!(filter.get("_id"), Ok(None)) {
        let mut joined = filter.to_owned();
        for (name, value) in only.iter().map_while(Result::ok) {
            joined.append(name, value);
        }
        return Ok(joined);
    }
    Ok(rawdoc! { "$and": [only, filter.to_owned()] })
}

/// A filter for one document by its `_id`, in a command with that collation.
pub(crate) fn only_this(
    key: &Key,
    collation: Option<&RawDocument>,
) -> Result<RawDocumentBuf, Refusal> {
    if is_simple(collation) {
        return Ok(key.filter());
    }
    key.filter_under_collation().ok_or_else(|| {
        Refusal::unsupported(
            "this write has a collation and matches a document whose _id holds text in an array or under an unusual name; Halocline cannot tell it from others there: write without a collation, or name the documents in another way",
        )
    })
}
