//! Commands that run on the archive as they came: everything that concerns no tiered collection,
//! and reads of tiered ones that only the archive can answer (behind a barrier).

use bson::raw::{RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use bson::{Timestamp, rawdoc};
use halocline_cluster::Tier;
use halocline_tiering::time::ClusterTime;
use halocline_wire::patch::Edit;

use crate::execute::faultin::{query, range_barrier};
use crate::execute::forward::{
    CursorTerms, exchange, is_not_primary, repeat_of, request_for, stepped_down, to_client,
    unreachable,
};
use crate::execute::refusal::Refusal;
use crate::execute::{Answer, Engine, Request, document_reply};
use crate::shared::Collection;
use crate::stats::Answered;

/// Stages whose operand names another collection, directly or in a field.
const FOREIGN_STAGES: [&str; 5] = ["$lookup", "$unionWith", "$graphLookup", "$out", "$merge"];

/// How deep a pipeline is searched for names; MongoDB itself stops at 100 levels of nesting.
const PIPELINE_DEPTH: usize = 128;

impl Engine {
    /// Passes a command to the archive's primary, unchanged but for the clock.
    pub(crate) async fn archive(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        self.on_archive(request, "untiered", None, &[]).await
    }

    /// An untiered read, unless something in it names a tiered collection.
    pub(crate) async fn read_untiered(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let mut named = self.tiered_in_pipeline(request);
        self.add_behind_view(request, &mut named);
        if named.is_empty() {
            return self.archive(request).await;
        }
        if let Some(target) = writes_into(request, &named) {
            return Err(refuse_output(target));
        }
        Box::pin(self.behind_range_barriers(request, &named, "not_covered")).await
    }

    /// Tiered collections behind the view that a read names, if it names one.
    fn add_behind_view<'s>(&'s self, request: &Request<'_>, named: &mut Vec<&'s Collection>) {
        let shared = &self.context.shared;
        let views = shared.views.load();
        if views.is_empty() {
            return;
        }
        let Some((db, coll)) = request.command.namespace() else { return };
        let Some(behind) = views.get(&format!("{db}.{coll}")) else { return };
        for id in behind {
            if let Some(collection) = shared.collections.get(*id)
                && !named.iter().any(|known| known.id == collection.id)
            {
                named.push(collection);
            }
        }
    }

    /// Runs a read on the archive once it reflects every change acknowledged so far of the named
    /// collections (protocol rule 14).
    pub(crate) async fn behind_range_barriers(
        &self,
        request: &Request<'_>,
        collections: &[&Collection],
        reason: &'static str,
    ) -> Result<Answer, Refusal> {
        let now = self.fast_time().await?;
        for collection in collections {
            range_barrier(&self.context, collection, now, &request.deadline).await?;
        }
        self.on_archive_after_barrier(request, reason, collections.first().copied()).await
    }

    /// Runs a read on the archive after some barrier has been passed (rule 15).
    pub(crate) async fn on_archive_after_barrier(
        &self,
        request: &Request<'_>,
        reason: &'static str,
        collection: Option<&Collection>,
    ) -> Result<Answer, Refusal> {
        let at = self.context.shared.progress.archive_time();
        let level = request.command.read_concern().and_then(|c| c.get_str("level").ok());
        let fits = matches!(level, None | Some("local" | "majority" | "snapshot"));
        let mut edits: smallvec::SmallVec<[Edit<'_>; 3]> = smallvec::SmallVec::new();
        let time: Timestamp = at.into();
        if at != ClusterTime::ZERO && fits {
            edits.push(Edit::SetIn("readConcern", "afterClusterTime", RawBsonRef::Timestamp(time)));
        }
        if level == Some("available") {
            edits.push(Edit::SetIn("readConcern", "level", RawBsonRef::String("local")));
        }
        if let Some(left) = request.deadline.max_time_ms_left() {
            edits.push(Edit::Set("maxTimeMS", RawBsonRef::Int64(left)));
        }
        self.on_archive(request, reason, collection, &edits).await
    }

    async fn on_archive(
        &self,
        request: &Request<'_>,
        reason: &'static str,
        collection: Option<&Collection>,
        edits: &[Edit<'_>],
    ) -> Result<Answer, Refusal> {
        let command = request.command;
        self.know_client_clock().await?;
        let bytes = request_for(Tier::Archive, request.message, command, edits)
            .map_err(|e| Refusal::new(halocline_wire::codes::FAILED_TO_PARSE, e.to_string()))?;
        let repeat = repeat_of(command, request.entry.is_some_and(|entry| entry.reads_only));
        let reply = exchange(&self.context, Tier::Archive, &bytes, repeat)
            .await
            .map_err(|error| unreachable(Tier::Archive, &error, command))?;
        if !reply.view.ok && is_not_primary(&reply) {
            return Err(stepped_down(Tier::Archive, command));
        }
        let terms = CursorTerms { tiered: collection.is_some(), reason, hold: None, command };
        Ok(Answer {
            bytes: to_client(&self.context, reply, request.id, Some(terms)),
            answered: Answered::Archive,
            reason,
        })
    }

    /// The fast tier's time now: no older than any write acknowledged before this call.
    pub(crate) async fn fast_time(&self) -> Result<ClusterTime, Refusal> {
        let ping = rawdoc! { "ping": 1 };
        let bytes = self.own_command("admin", &ping);
        let reply =
            exchange(&self.context, Tier::Fast, &bytes, crate::execute::forward::Repeat::Freely)
                .await
                .map_err(|error| Refusal::unreachable(Tier::Fast, &error))?;
        reply.time()
    }

    /// Asks the fast tier for its clock, before a client needs it.
    pub async fn learn_client_clock(&self) {
        if let Err(refusal) = self.fast_time().await {
            tracing::debug!(message = %refusal.message, "the fast tier's clock is not known yet");
        }
    }

    async fn know_client_clock(&self) -> Result<(), Refusal> {
        if !self.context.knows_client_clock() {
            Box::pin(self.fast_time()).await?;
        }
        Ok(())
    }

    /// A command of the daemon's own as a whole message.
    pub(crate) fn own_command(&self, db: &str, body: &RawDocument) -> bytes::Bytes {
        let mut body = body.to_owned();
        body.append(bson::cstr!("$db"), db);
        let mut out = bytes::BytesMut::new();
        let id = self.context.request_id();
        halocline_wire::encode_msg(id, 0, halocline_wire::MsgFlags::NONE, &body, &[], &mut out);
        out.freeze()
    }

    /// Tiered collections that an aggregation on another collection reads or writes.
    pub(crate) fn tiered_in_pipeline(&self, request: &Request<'_>) -> Vec<&Collection> {
        let command = request.command;
        let mut found = Vec::new();
        let Some(RawBsonRef::Array(pipeline)) = command.get("pipeline") else { return found };
        if self.context.shared.collections.is_empty() {
            return found;
        }
        let mut visit = |db: &str, coll: &str| {
            if let Some(collection) = self.context.shared.collection(db, coll)
                && !found.iter().any(|c: &&Collection| c.id == collection.id)
            {
                found.push(collection);
            }
        };
        for stage in pipeline.into_iter().map_while(Result::ok) {
            if let Some(stage) = stage.as_document() {
                foreign_names(stage, command.db(), PIPELINE_DEPTH, &mut visit);
            }
        }
        found
    }

    /// Definitions: read on the archive, changed there unless a tiered collection is concerned.
    pub(crate) async fn definition(
        &self,
        request: &Request<'_>,
        names_tiered: bool,
        why: &'static str,
    ) -> Result<Answer, Refusal> {
        let command = request.command;
        let shared = &self.context.shared;
        let whole = matches!(command.name(), "dropDatabase") && shared.has_tiered(command.db());
        let renames = command.name() == "renameCollection" && {
            let names = |field: &str| {
                command
                    .get(field)
                    .and_then(RawBsonRef::as_str)
                    .and_then(|ns| ns.split_once('.'))
                    .is_some_and(|(db, coll)| shared.collection(db, coll).is_some())
            };
            names("renameCollection") || names("to")
        };
        let into = matches!(command.name(), "mapReduce" | "mapreduce")
            && command.get("out").is_some_and(|out| {
                let coll = match out {
                    RawBsonRef::String(coll) => Some(coll),
                    RawBsonRef::Document(out) => {
                        ["replace", "merge", "reduce"].iter().find_map(|k| out.get_str(*k).ok())
                    }
                    _ => None,
                };
                coll.is_some_and(|coll| shared.collection(command.db(), coll).is_some())
            });
        if names_tiered || whole || renames || into {
            return Err(Refusal::unsupported(format!(
                "{} is refused because a tiered collection is concerned: {why}",
                command.name()
            )));
        }
        let answer = self.archive(request).await?;
        // A view that shows tiered documents may have come or changed.
        if shared.has_tiered(command.db())
            && let Err(error) = crate::views::refresh(&self.context).await
        {
            tracing::warn!(%error, "the archive's views could not be looked at; trying again within a minute");
        }
        Ok(answer)
    }

    /// Explains on the tier that would answer, and says why there.
    pub(crate) async fn explain(&self, request: &Request<'_>) -> Result<Answer, Refusal> {
        let command = request.command;
        let Some(RawBsonRef::Document(inner)) = command.get("explain") else {
            return self.archive(request).await;
        };
        let Some(Ok((_, RawBsonRef::String(coll)))) =
            inner.iter().next().map(|f| f.map(|(k, v)| (k.to_owned(), v)))
        else {
            return self.archive(request).await;
        };
        let Some(collection) = self.context.shared.collection(command.db(), coll) else {
            return self.archive(request).await;
        };
        let route = self.explain_route(inner, collection);
        let bytes = request_for(route.tier, request.message, command, &[])
            .map_err(|e| Refusal::new(halocline_wire::codes::FAILED_TO_PARSE, e.to_string()))?;
        let reply =
            exchange(&self.context, route.tier, &bytes, crate::execute::forward::Repeat::Freely)
                .await
                .map_err(|error| unreachable(route.tier, &error, command))?;
        let mut explained: RawDocumentBuf = reply.body().map(ToOwned::to_owned).unwrap_or_default();
        if reply.view.ok {
            let mut ours = rawdoc! {
                "tier": route.tier.label(),
                "reason": route.reason,
                "barrier": route.barrier,
            };
            if let Some(boundary) = collection.boundary.complete_from() {
                ours.append(bson::cstr!("boundary"), collection.date.kind().to_bson(boundary));
            }
            explained.append(bson::cstr!("halocline"), ours);
        }
        Ok(Answer {
            bytes: document_reply(&explained, request.id),
            answered: match route.tier {
                Tier::Fast => Answered::Fast,
                Tier::Archive => Answered::Archive,
            },
            reason: "explain",
        })
    }

    /// Documents that match on the archive, for the daemon's own purposes.
    pub(crate) async fn archive_query(
        &self,
        db: &str,
        command: RawDocumentBuf,
    ) -> Result<Vec<RawDocumentBuf>, Refusal> {
        query(&self.context, Tier::Archive, db, command).await.map(|(documents, _)| documents)
    }
}

/// Where an explained command would run.
pub(crate) struct ExplainedRoute {
    pub(crate) tier: Tier,
    pub(crate) reason: &'static str,
    /// `none`, `point` (on a miss) or `range`.
    pub(crate) barrier: &'static str,
}

/// A pipeline cannot write into a tiered collection.
pub(crate) fn refuse_output(target: &str) -> Refusal {
    Refusal::new(
        halocline_wire::codes::ILLEGAL_OPERATION,
        format!(
            "$out and $merge into {target} are not possible: it is tiered, and only inserts, updates and deletes reach both tiers; write into another collection"
        ),
    )
}

/// The tiered collection a pipeline ends in, if its last stage writes.
pub(crate) fn writes_into<'c>(request: &Request<'_>, named: &[&'c Collection]) -> Option<&'c str> {
    let Some(RawBsonRef::Array(pipeline)) = request.command.get("pipeline") else { return None };
    let last = pipeline.into_iter().map_while(Result::ok).last()?;
    let stage = last.as_document()?;
    let mut target = None;
    for name in [cstr!("$out"), cstr!("$merge")] {
        if let Ok(Some(operand)) = stage.get(name.as_str()) {
            let mut only = RawDocumentBuf::new();
            only.append(name, operand);
            foreign_names(&only, request.command.db(), 4, &mut |db, coll| {
                target = named
                    .iter()
                    .find(|c| c.ns.db() == db && c.ns.coll() == coll)
                    .map(|c| c.name.as_str());
            });
        }
    }
    target
}

/// Calls `visit` with every collection that a stage names.
pub(crate) fn named_in_stage(stage: &RawDocument, db: &str, visit: &mut dyn FnMut(&str, &str)) {
    foreign_names(stage, db, PIPELINE_DEPTH, visit);
}

/// Calls `visit` with every collection that stages inside name.
fn foreign_names(
    document: &RawDocument,
    db: &str,
    depth: usize,
    visit: &mut dyn FnMut(&str, &str),
) {
    let Some(depth) = depth.checked_sub(1) else { return };
    for (name, value) in document.iter().map_while(Result::ok) {
        let foreign = FOREIGN_STAGES.contains(&name.as_str());
        match value {
            RawBsonRef::String(coll) if foreign => visit(db, coll),
            RawBsonRef::Document(inner) => {
                if foreign {
                    let named =
                        ["from", "coll", "into"].iter().find_map(|f| inner.get(*f).ok().flatten());
                    match named {
                        Some(RawBsonRef::String(coll)) => {
                            visit(inner.get_str("db").unwrap_or(db), coll);
                        }
                        Some(RawBsonRef::Document(into)) => {
                            if let Ok(coll) = into.get_str("coll") {
                                visit(into.get_str("db").unwrap_or(db), coll);
                            }
                        }
                        _ => {
                            if let (Ok(other), Ok(coll)) =
                                (inner.get_str("db"), inner.get_str("coll"))
                            {
                                visit(other, coll);
                            }
                        }
                    }
                }
                foreign_names(inner, db, depth, visit);
            }
            RawBsonRef::Array(items) => {
                for item in items.into_iter().map_while(Result::ok) {
                    if let Some(inner) = item.as_document() {
                        foreign_names(inner, db, depth, visit);
                    }
                }
            }
            _ => {}
        }
    }
}
