//! Reads of tiered collections: the read table of the manual, executed. What goes where is decided
//! by `halocline_tiering::route`; here the tiers are asked and their answers checked.

use std::sync::Arc;

use bson::raw::{RawArrayBuf, RawBsonRef, RawDocument, RawDocumentBuf};
use bson::rawdoc;
use bson::spec::BinarySubtype;
use halocline_cluster::Tier;
use halocline_cluster::moves::RESERVED_SESSION_PREFIX;
use halocline_tiering::DatePoint;
use halocline_tiering::key::Key;
use halocline_tiering::route::{CollectionView, ReadQuery, ReadRoute, Reason, keys_of, route_read};
use halocline_wire::codes;
use halocline_wire::patch::Edit;

use crate::execute::archive::ExplainedRoute;
use crate::execute::commands::Read;
use crate::execute::cursor_commands::kill;
use crate::execute::cursors::Cursor;
use crate::execute::faultin::point_barrier;
use crate::execute::forward::{
    CursorTerms, Repeat, TierReply, exchange, is_not_primary, request_for, stepped_down, to_client,
    unreachable,
};
use crate::execute::look::{Look, Seen};
use crate::execute::refusal::Refusal;
use crate::execute::sessions::TransactionRoute;
use crate::execute::{Answer, Engine, Request, document_reply};
use crate::shared::{Boundary, Collection, Definitions};
use crate::stats::Answered;

/// The newest documents are taken from the fast tier up to this many: their reply is built anew.
const NEWEST_AT_MOST: i64 = 1000;

/// A collection as routing sees it at one moment.
pub(crate) fn view_of<'a>(
    collection: &'a Collection,
    definitions: &'a Definitions,
    boundary: Option<DatePoint>,
) -> CollectionView<'a> {
    CollectionView { field: &collection.date, boundary, indexes: &definitions.indexes }
}

impl Engine {
    /// One read of a tiered collection.
    pub(crate) async fn read(
        &self,
        request: &Request<'_>,
        kind: Read,
        collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        let Some(query) = ReadQuery::parse(request.command.body()) else {
            return Err(Refusal::new(codes::FAILED_TO_PARSE, "the command is not valid BSON"));
        };
        let hold = collection.boundary.hold();
        let definitions = collection.definitions.load();
        let route = route_read(&query, &view_of(collection, &definitions, hold.complete_from));
        match route {
            ReadRoute::Point { id, only_id, rows_prove: true } => {
                drop(hold);
                self.point(request, kind, collection, id, only_id).await
            }
            ReadRoute::Points { ids, only_id: true, .. } if kind == Read::Find => {
                drop(hold);
                Box::pin(self.points(request, collection, ids)).await
            }
            ReadRoute::Unique { rows_prove: true, .. } => {
                drop(hold);
                Box::pin(self.unique(request, kind, collection)).await
            }
            ReadRoute::Covered => {
                let reply = self.ask_fast(request).await?;
                self.still_leading(request).await?;
                Ok(self.answer_of_fast(request, reply, Reason::Covered, Some(hold)))
            }
            ReadRoute::NewestN { n, .. } if kind == Read::Find => {
                Box::pin(self.newest(request, collection, &query, n, hold)).await
            }
            ReadRoute::Archive(reason) => {
                drop(hold);
                let sources = self.sources(request, collection);
                Box::pin(self.behind_range_barriers(request, &sources, reason.label())).await
            }
            ReadRoute::Point { .. }
            | ReadRoute::Points { .. }
            | ReadRoute::Unique { .. }
            | ReadRoute::NewestN { .. } => {
                drop(hold);
                Box::pin(self.behind_range_barriers(
                    request,
                    &[collection],
                    Reason::NotCovered.label(),
                ))
                .await
            }
            ReadRoute::Output(target) => {
                let _ = target;
                drop(hold);
                Box::pin(self.writing_elsewhere(request, collection)).await
            }
            ReadRoute::Statistics => self.archive(request).await,
            ReadRoute::ChangeStream => Box::pin(self.change_stream(request, collection)).await,
        }
    }

    /// Sends the client's command to the fast tier as it came.
    async fn ask_fast(&self, request: &Request<'_>) -> Result<TierReply, Refusal> {
        let bytes = self.bytes_for_fast(request)?;
        self.ask_fast_with(request, &bytes).await
    }

    async fn ask_fast_with(
        &self,
        request: &Request<'_>,
        bytes: &[u8],
    ) -> Result<TierReply, Refusal> {
        let reply = exchange(&self.context, Tier::Fast, bytes, Repeat::Freely)
            .await
            .map_err(|error| unreachable(Tier::Fast, &error, request.command))?;
        if !reply.view.ok && is_not_primary(&reply) {
            return Err(stepped_down(Tier::Fast, request.command));
        }
        Ok(reply)
    }

    fn answer_of_fast(
        &self,
        request: &Request<'_>,
        reply: TierReply,
        reason: Reason,
        hold: Option<Arc<Boundary>>,
    ) -> Answer {
        let terms =
            CursorTerms { tiered: true, reason: reason.label(), hold, command: request.command };
        Answer {
            bytes: to_client(&self.context, reply, request.id, Some(terms)),
            answered: Answered::Fast,
            reason: reason.label(),
        }
    }

    /// By `_id` (protocol rule 16): a hit is the answer; after a miss the archive answers once it
    /// reflects the fast tier as of that miss.
    async fn point(
        &self,
        request: &Request<'_>,
        kind: Read,
        collection: &Collection,
        id: RawBsonRef<'_>,
        only_id: bool,
    ) -> Result<Answer, Refusal> {
        let reply = self.ask_fast(request).await?;
        if !reply.view.ok || has_rows(&reply, kind) {
            return Ok(self.answer_of_fast(request, reply, Reason::PointHit, None));
        }
        Box::pin(self.point_miss(request, collection, id, only_id, reply)).await
    }

    async fn point_miss(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        id: RawBsonRef<'_>,
        only_id: bool,
        reply: TierReply,
    ) -> Result<Answer, Refusal> {
        let key = Key::new(id).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))?;
        let mut missed_at = reply.time()?;
        if !only_id {
            let filter = ReadQuery::parse(request.command.body()).and_then(|query| query.filter);
            let look = match filter {
                Some(filter) => Look {
                    filter,
                    collation: request.command.get("collation").and_then(|c| c.as_document()),
                    variables: request.command.get("let").and_then(|v| v.as_document()),
                },
                // A pipeline: the archive answers it, whatever the fast tier has.
                None => return self.point_on_archive(request, collection, &key).await,
            };
            match self.look_once(collection, &key, &look).await? {
                // A key that is there and fails the other conditions is a complete empty answer.
                (Seen::ThereAndFails, _) => {
                    return Ok(self.answer_of_fast(request, reply, Reason::PointHit, None));
                }
                // Written in between, or empty for another reason, such as a skip.
                (Seen::ThereAndHolds, _) => {
                    return self.point_on_archive(request, collection, &key).await;
                }
                (Seen::NotThere, at) => missed_at = at,
            }
        }
        point_barrier(&self.context, collection, &key, missed_at, &request.deadline).await?;
        self.on_archive_after_barrier(request, Reason::PointMiss.label(), Some(collection)).await
    }

    /// The archive's answer for a key, once it reflects everything acknowledged so far.
    async fn point_on_archive(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        key: &Key,
    ) -> Result<Answer, Refusal> {
        let now = self.fast_time().await?;
        point_barrier(&self.context, collection, key, now, &request.deadline).await?;
        self.on_archive_after_barrier(request, Reason::PointMiss.label(), Some(collection)).await
    }

    /// By several `_id`s: all on the fast tier, or all asked of the archive.
    async fn points(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        ids: &bson::raw::RawArray,
    ) -> Result<Answer, Refusal> {
        let keys = keys_of(ids).map_err(|e| Refusal::new(codes::BAD_VALUE, e.to_string()))?;
        let reply = self.ask_fast(request).await?;
        if !reply.view.ok {
            return Ok(self.answer_of_fast(request, reply, Reason::PointsHit, None));
        }
        let rows = reply.rows().count();
        let open = reply.view.cursor.as_ref().map_or(0, |cursor| cursor.id);
        if rows == keys.len() && open == 0 {
            return Ok(self.answer_of_fast(request, reply, Reason::PointsHit, None));
        }
        let missed_at = reply.time()?;
        if open != 0 {
            self.drop_cursor(&reply, collection, open).await;
        }
        for key in &keys {
            point_barrier(&self.context, collection, key, missed_at, &request.deadline).await?;
        }
        self.on_archive_after_barrier(request, Reason::PointsMerged.label(), Some(collection)).await
    }

    /// By a unique value: a row on the fast tier is the one there is.
    async fn unique(
        &self,
        request: &Request<'_>,
        kind: Read,
        collection: &Collection,
    ) -> Result<Answer, Refusal> {
        let reply = self.ask_fast(request).await?;
        if !reply.view.ok || has_rows(&reply, kind) {
            return Ok(self.answer_of_fast(request, reply, Reason::UniqueHit, None));
        }
        self.behind_range_barriers(request, &[collection], Reason::UniqueMiss.label()).await
    }

    /// The `n` newest: good if there are `n` inside the covered part and the next has another date.
    async fn newest(
        &self,
        request: &Request<'_>,
        collection: &Collection,
        query: &ReadQuery<'_>,
        n: i64,
        hold: Arc<Boundary>,
    ) -> Result<Answer, Refusal> {
        let Some(boundary) = hold.complete_from else {
            return self
                .behind_range_barriers(request, &[collection], Reason::NotCovered.label())
                .await;
        };
        let batch = request.command.get("batchSize").is_none();
        if n > NEWEST_AT_MOST || query.projection.is_some() || !batch {
            return self
                .behind_range_barriers(request, &[collection], Reason::NotCovered.label())
                .await;
        }
        let empty = RawDocumentBuf::new();
        let filter = query.filter.unwrap_or(&empty);
        let narrowed = rawdoc! { "$and": [filter.to_owned(), collection.date.held(boundary)] };
        let edits = [
            Edit::Set("filter", RawBsonRef::Document(&narrowed)),
            Edit::Set("limit", RawBsonRef::Int64(n + 1)),
            Edit::Set("batchSize", RawBsonRef::Int64(n + 2)),
        ];
        let bytes = request_for(Tier::Fast, request.message, request.command, &edits)
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))?;
        let reply = self.ask_fast_with(request, &bytes).await?;
        let rows: Vec<&RawDocument> = reply.rows().collect();
        let open = reply.view.cursor.as_ref().map_or(0, |cursor| cursor.id);
        let wanted = usize::try_from(n).unwrap_or(usize::MAX);
        let place = |row: Option<&&RawDocument>| row.and_then(|row| collection.date.place(row));
        let last = place(rows.get(wanted.wrapping_sub(1)));
        let good = reply.view.ok
            && open == 0
            && rows.len() >= wanted
            && last.is_some_and(|place| place.is_held(boundary))
            && (rows.len() == wanted || place(rows.get(wanted)) != last);
        if good {
            self.still_leading(request).await?;
            let document = first_rows(&reply, &rows, wanted);
            return Ok(Answer {
                bytes: document_reply(&document, request.id),
                answered: Answered::Fast,
                reason: Reason::NewestN.label(),
            });
        }
        if open != 0 {
            self.drop_cursor(&reply, collection, open).await;
        }
        drop(hold);
        self.behind_range_barriers(request, &[collection], Reason::NotCovered.label()).await
    }

    async fn drop_cursor(&self, reply: &TierReply, collection: &Collection, id: i64) {
        let Some(server) = reply.server.clone() else { return };
        let cursor = Cursor {
            tier: reply.tier,
            server,
            id,
            ns: collection.name.clone(),
            tiered: true,
            reason: Reason::NotCovered.label(),
            hold: None,
            lsid: None,
            immortal: false,
        };
        kill(self, &cursor).await;
    }

    /// Every tiered collection that a read on this one reads: `$lookup` and its kin name others.
    fn sources<'s>(
        &'s self,
        request: &Request<'_>,
        collection: &'s Collection,
    ) -> Vec<&'s Collection> {
        let mut sources = self.tiered_in_pipeline(request);
        if !sources.iter().any(|known| known.id == collection.id) {
            sources.push(collection);
        }
        sources
    }

    /// A pipeline that writes its result: fine into an untiered collection, on the archive.
    async fn writing_elsewhere(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        let named = self.tiered_in_pipeline(request);
        if let Some(target) = crate::execute::archive::writes_into(request, &named) {
            return Err(crate::execute::archive::refuse_output(target));
        }
        let sources = self.sources(request, collection);
        self.behind_range_barriers(request, &sources, Reason::UnsupportedShape.label()).await
    }

    /// A change stream on a tiered collection: opened on the fast tier, where its changes happen,
    /// with a leading stage that drops moves, so that applications see their own changes only.
    async fn change_stream(
        &self,
        request: &Request<'_>,
        _collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        let Some(RawBsonRef::Array(pipeline)) = request.command.get("pipeline") else {
            return Err(Refusal::new(codes::FAILED_TO_PARSE, "a change stream needs a pipeline"));
        };
        let mut stages = RawArrayBuf::new();
        for (index, stage) in pipeline.into_iter().map_while(Result::ok).enumerate() {
            stages.push(stage);
            if index == 0 {
                stages.push(without_moves());
            }
        }
        let edits = [Edit::Set("pipeline", RawBsonRef::Array(&stages))];
        let bytes = request_for(Tier::Fast, request.message, request.command, &edits)
            .map_err(|e| Refusal::new(codes::FAILED_TO_PARSE, e.to_string()))?;
        let reply = self.ask_fast_with(request, &bytes).await?;
        let terms = CursorTerms {
            tiered: true,
            reason: "change_stream",
            hold: None,
            command: request.command,
        };
        Ok(Answer {
            bytes: to_client(&self.context, reply, request.id, Some(terms)),
            answered: Answered::Fast,
            reason: "change_stream",
        })
    }

    /// Where a read inside a transaction can be answered, under the boundary it holds.
    pub(crate) fn transaction_route(
        &self,
        body: &RawDocument,
        collection: &Collection,
        hold: &Boundary,
    ) -> TransactionRoute {
        let definitions = collection.definitions.load();
        let Some(query) = ReadQuery::parse(body) else { return TransactionRoute::NotCovered };
        match route_read(&query, &view_of(collection, &definitions, hold.complete_from)) {
            ReadRoute::Point { id, .. } => Key::new(id)
                .map_or(TransactionRoute::NotCovered, |key| TransactionRoute::Points(vec![key])),
            ReadRoute::Points { ids, .. } => {
                keys_of(ids).map_or(TransactionRoute::NotCovered, TransactionRoute::Points)
            }
            ReadRoute::Covered => TransactionRoute::Covered,
            _ => TransactionRoute::NotCovered,
        }
    }

    /// What `explain` says of a command on a tiered collection.
    pub(crate) fn explain_route(
        &self,
        inner: &RawDocument,
        collection: &Collection,
    ) -> ExplainedRoute {
        let definitions = collection.definitions.load();
        let boundary = collection.boundary.complete_from();
        let Some(query) = ReadQuery::parse(inner) else {
            return ExplainedRoute { tier: Tier::Fast, reason: "write", barrier: "point" };
        };
        let route = route_read(&query, &view_of(collection, &definitions, boundary));
        let (tier, barrier) = match &route {
            ReadRoute::Point { .. } | ReadRoute::Points { .. } => (Tier::Fast, "point"),
            ReadRoute::Unique { .. } => (Tier::Fast, "range"),
            ReadRoute::Covered | ReadRoute::NewestN { .. } | ReadRoute::ChangeStream => {
                (Tier::Fast, "none")
            }
            ReadRoute::Archive(_) | ReadRoute::Output(_) => (Tier::Archive, "range"),
            ReadRoute::Statistics => (Tier::Archive, "none"),
        };
        ExplainedRoute { tier, reason: route.reason().label(), barrier }
    }
}

/// A stage that drops the events of moves: they change which tier holds a document, not the document.
fn without_moves() -> RawDocumentBuf {
    let bound = |fill: u8| {
        let mut bytes = RESERVED_SESSION_PREFIX.to_vec();
        bytes.resize(16, fill);
        bson::Binary { subtype: BinarySubtype::Uuid, bytes }
    };
    rawdoc! { "$match": { "lsid.id": { "$not": { "$gte": bound(0), "$lte": bound(0xff) } } } }
}

/// Whether a read's reply shows that something matched.
fn has_rows(reply: &TierReply, kind: Read) -> bool {
    match kind {
        Read::Find | Read::Aggregate => {
            reply.view.cursor.as_ref().is_some_and(|cursor| !cursor.is_empty)
        }
        Read::Count => reply.view.n.is_some_and(|n| n > 0),
        Read::Distinct => reply
            .body()
            .and_then(|body| body.get_array("values").ok())
            .is_some_and(|values| !values.is_empty()),
    }
}

/// The reply with its first rows only.
fn first_rows(reply: &TierReply, rows: &[&RawDocument], wanted: usize) -> RawDocumentBuf {
    let mut batch = RawArrayBuf::new();
    for row in rows.iter().take(wanted) {
        batch.push((*row).to_owned());
    }
    let body = reply.body();
    let ns = body
        .and_then(|body| body.get_document("cursor").ok())
        .and_then(|cursor| cursor.get_str("ns").ok())
        .unwrap_or_default();
    let mut document =
        rawdoc! { "cursor": { "firstBatch": batch, "id": 0_i64, "ns": ns }, "ok": 1.0 };
    for name in ["$clusterTime", "operationTime"] {
        if let Some(Ok(Some(value))) = body.map(|body| body.get(name))
            && let Ok(name) = bson::raw::CString::try_from(name)
        {
            document.append(name, value);
        }
    }
    document
}
