//! Applier: reads current documents from the fast tier and writes them to the archive, one lane's
//! batch at a time (protocol rules 2 to 5, 7). What it copies is state, so a batch may be repeated.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{
    Actor, ActorContext, ActorFutureExt, Context, Handler, Message, ResponseActFuture, WrapFuture,
};
use bson::raw::{CStr, RawDocument, RawDocumentBuf, cstr};
use bson::{RawArrayBuf, Timestamp, rawdoc};
use halocline_cluster::lanes::{LaneError, LaneSet};
use halocline_cluster::{ClusterError, Reply};
use halocline_tiering::key::Key;
use halocline_tiering::pending::{AbsentVerdict, CollectionId, Flushed, Ticket};
use halocline_tiering::time::ClusterTime;
use metrics::{Counter, Histogram, counter, histogram};

use crate::context::ThreadContext;
use crate::fetch::find_all;
use crate::panic_injection::checkpoint;
use crate::shared::Collection;
use crate::supervisor::Drain;

/// A write command to the archive carries at most about this many bytes of documents: well under
/// MongoDB's 48,000,000 a message, and small enough that one slow batch does not hold its lane for long.
const BATCH_BYTES: usize = 12 << 20;

/// First and longest pause before a key that the archive refused is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(100);

/// Mirrors one batch of a lane.
pub struct Apply {
    /// The lane; nobody else writes on it meanwhile.
    pub lane: usize,
    /// The tiered collection.
    pub collection: CollectionId,
    /// Keys taken from the pending set.
    pub keys: Arc<[Key]>,
    /// Under which they were taken.
    pub ticket: Ticket,
    /// Fast-tier reads must be no older than this (rule 5).
    pub no_older_than: ClusterTime,
    /// The archive's fenced sessions.
    pub lanes: Arc<LaneSet>,
}

impl Message for Apply {
    type Result = Result<Applied, ApplyError>;
}

/// What a batch came to.
#[derive(Debug, Default, Clone)]
pub struct Applied {
    /// Documents written.
    pub upserts: usize,
    /// Documents deleted.
    pub deletes: usize,
    /// Keys that left the pending set.
    pub settled: usize,
    /// Keys the archive refused, with its reason; they are queued again.
    pub refused: Vec<(Key, String)>,
}

/// Why a batch did not go through. Its keys are to be queued again.
#[derive(Debug, Clone)]
pub enum ApplyError {
    /// Another feeder has taken the lanes: this one must stop at once.
    Superseded,
    /// A tier did not answer; the message is for the log.
    Unavailable(String),
}

impl From<ClusterError> for ApplyError {
    fn from(error: ClusterError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

impl From<LaneError> for ApplyError {
    fn from(error: LaneError) -> Self {
        match error {
            LaneError::Superseded => Self::Superseded,
            other => Self::Unavailable(other.to_string()),
        }
    }
}

/// See the module's description.
pub struct Applier {
    context: Rc<ThreadContext>,
    meters: Rc<Meters>,
}

struct Meters {
    upserts: Counter,
    deletes: Counter,
    flush: Histogram,
}

impl Applier {
    /// An applier on the calling thread.
    #[must_use]
    pub fn new(context: Rc<ThreadContext>) -> Self {
        let meters = Rc::new(Meters {
            upserts: counter!("halocline_feeder_writes_total", "op" => "upsert"),
            deletes: counter!("halocline_feeder_writes_total", "op" => "delete"),
            flush: histogram!("halocline_feeder_flush_seconds"),
        });
        Self { context, meters }
    }
}

impl Actor for Applier {
    type Context = Context<Self>;
}

impl Handler<Drain> for Applier {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Handler<Apply> for Applier {
    type Result = ResponseActFuture<Self, Result<Applied, ApplyError>>;

    fn handle(&mut self, batch: Apply, _: &mut Self::Context) -> Self::Result {
        let (context, meters) = (self.context.clone(), self.meters.clone());
        let work = async move {
            checkpoint("applier");
            let begun = Instant::now();
            let applied = apply(&context, &batch).await;
            if let Ok(applied) = &applied {
                meters.upserts.increment(applied.upserts as u64);
                meters.deletes.increment(applied.deletes as u64);
                meters.flush.record(begun.elapsed().as_secs_f64());
            }
            applied
        };
        Box::pin(work.into_actor(self).map(|result, _, _| result))
    }
}

/// The state of a batch's keys on the fast tier.
struct CurrentStates {
    present: Vec<(Key, RawDocumentBuf)>,
    absent: Vec<Key>,
    /// The time of the read that found them so.
    read_at: ClusterTime,
}

async fn apply(context: &ThreadContext, batch: &Apply) -> Result<Applied, ApplyError> {
    let shared = &context.shared;
    let Some(collection) = shared.collections.get(batch.collection) else {
        return Ok(Applied::default());
    };
    let pending = shared.progress.pending();
    let states = read_fast(context, collection, batch).await?;
    let mut applied = Applied::default();
    let settle = |key: &Key, how: Flushed| {
        usize::from(pending.flushed(batch.collection, key, batch.ticket, how, Instant::now()))
    };

    let mut writes = Writes::new(context, collection, batch);
    for (key, document) in states.present {
        writes.upsert(key, document).await?;
    }
    if !states.absent.is_empty() {
        // Rule 4: what an absence means is only known once every event up to that read is in.
        shared.progress.wait_ingested(states.read_at).await;
    }
    for key in states.absent {
        match pending.absent(batch.collection, &key, batch.ticket) {
            AbsentVerdict::Delete => writes.delete(key).await?,
            AbsentVerdict::Evicted => applied.settled += settle(&key, Flushed::Done),
            AbsentVerdict::FlushAgain => {
                settle(&key, Flushed::Retry(None));
            }
        }
    }
    let written = writes.finish().await?;
    checkpoint("applier/written");
    applied.upserts = written.upserts;
    applied.deletes = written.deletes;
    for key in &written.acknowledged {
        applied.settled += settle(key, Flushed::Done);
    }
    for (key, reason) in written.refused {
        settle(&key, Flushed::Retry(Some(Instant::now() + RETRY_FIRST)));
        applied.refused.push((key, reason));
    }
    Ok(applied)
}

async fn read_fast(
    context: &ThreadContext,
    collection: &Collection,
    batch: &Apply,
) -> Result<CurrentStates, ApplyError> {
    let mut ids = RawArrayBuf::new();
    for key in batch.keys.iter() {
        ids.push(key.value());
    }
    let after: Timestamp = batch.no_older_than.into();
    let find = rawdoc! {
        "find": collection.ns.coll(),
        "filter": { "_id": { "$in": ids } },
        "hint": { "_id": 1 },
        "readConcern": { "level": "majority", "afterClusterTime": after },
    };
    let mut connection = context.fast.primary().await?;
    let (documents, reply) = find_all(&mut connection, collection.ns.db(), &find).await?;
    let read_at = reply.cluster_time().map(ClusterTime::from).ok_or_else(|| {
        ApplyError::Unavailable("a reply of the fast tier carries no $clusterTime".into())
    })?;
    let mut found: HashMap<Key, RawDocumentBuf> = HashMap::with_capacity(documents.len());
    for document in documents {
        if let Ok(key) = Key::of(&document) {
            found.insert(key, document);
        }
    }
    let mut states = CurrentStates { present: Vec::new(), absent: Vec::new(), read_at };
    for key in batch.keys.iter() {
        match found.remove(key) {
            Some(document) => states.present.push((key.clone(), document)),
            None => states.absent.push(key.clone()),
        }
    }
    Ok(states)
}

/// Statements on their way to the archive, sent whenever enough bytes have come together.
struct Writes<'a> {
    context: &'a ThreadContext,
    collection: &'a Collection,
    batch: &'a Apply,
    upserts: Vec<(Key, RawDocumentBuf)>,
    upsert_bytes: usize,
    deletes: Vec<(Key, RawDocumentBuf)>,
    written: Written,
}

#[derive(Default)]
struct Written {
    upserts: usize,
    deletes: usize,
    acknowledged: Vec<Key>,
    refused: Vec<(Key, String)>,
}

impl<'a> Writes<'a> {
    fn new(context: &'a ThreadContext, collection: &'a Collection, batch: &'a Apply) -> Self {
        Self {
            context,
            collection,
            batch,
            upserts: Vec::new(),
            upsert_bytes: 0,
            deletes: Vec::new(),
            written: Written::default(),
        }
    }

    /// Rule 3: the archive gets the whole document, byte for byte whatever its field names.
    async fn upsert(&mut self, key: Key, document: RawDocumentBuf) -> Result<(), ApplyError> {
        let bytes = document.as_bytes().len();
        if self.upsert_bytes + bytes > BATCH_BYTES && !self.upserts.is_empty() {
            self.send_upserts().await?;
        }
        self.upsert_bytes += bytes;
        let statement = rawdoc! {
            "q": Key::of(&document).unwrap_or_else(|_| key.clone()).filter(),
            "u": [{ "$replaceWith": { "$literal": document } }],
            "upsert": true,
        };
        self.upserts.push((key, statement));
        Ok(())
    }

    async fn delete(&mut self, key: Key) -> Result<(), ApplyError> {
        let statement = rawdoc! { "q": key.filter(), "limit": 1 };
        self.deletes.push((key, statement));
        Ok(())
    }

    async fn send_upserts(&mut self) -> Result<(), ApplyError> {
        self.upsert_bytes = 0;
        let statements = std::mem::take(&mut self.upserts);
        if statements.is_empty() {
            return Ok(());
        }
        let reply = self.send(cstr!("update"), "updates", &statements).await?;
        let outcome = Outcome::of(&reply, statements);
        self.written.upserts += outcome.acknowledged.len();
        self.written.acknowledged.extend(outcome.acknowledged);
        for (key, statement, refusal) in outcome.refused {
            if refusal.code == IMMUTABLE_FIELD {
                self.replace_identity(key, &statement).await?;
            } else {
                self.written.refused.push((key, refusal.message));
            }
        }
        Ok(())
    }

    async fn send_deletes(&mut self) -> Result<(), ApplyError> {
        let statements = std::mem::take(&mut self.deletes);
        if statements.is_empty() {
            return Ok(());
        }
        let reply = self.send(cstr!("delete"), "deletes", &statements).await?;
        let outcome = Outcome::of(&reply, statements);
        self.written.deletes += outcome.acknowledged.len();
        self.written.acknowledged.extend(outcome.acknowledged);
        for (key, _, refusal) in outcome.refused {
            self.written.refused.push((key, refusal.message));
        }
        Ok(())
    }

    /// Rule 33: one key, other bytes (1 became 1.0): the archive's copy is deleted and inserted.
    async fn replace_identity(
        &mut self,
        key: Key,
        statement: &RawDocument,
    ) -> Result<(), ApplyError> {
        let delete = rawdoc! { "q": key.filter(), "limit": 1 };
        self.send(cstr!("delete"), "deletes", &[(key.clone(), delete)]).await?;
        let again = vec![(key, statement.to_owned())];
        let reply = self.send(cstr!("update"), "updates", &again).await?;
        let outcome = Outcome::of(&reply, again);
        self.written.upserts += outcome.acknowledged.len();
        self.written.acknowledged.extend(outcome.acknowledged);
        for (key, _, refusal) in outcome.refused {
            self.written.refused.push((key, refusal.message));
        }
        Ok(())
    }

    async fn send(
        &self,
        command: &'static CStr,
        sequence: &str,
        statements: &[(Key, RawDocumentBuf)],
    ) -> Result<Reply, ApplyError> {
        let mut body = rawdoc! { command: self.collection.ns.coll(), "ordered": false };
        if let Some(uuid) = self.collection.archive_uuid.load().as_deref() {
            body.append(cstr!("collectionUUID"), bson::Binary::from(*uuid));
        }
        let documents: Vec<&RawDocument> = statements.iter().map(|(_, s)| s.as_ref()).collect();
        let reply = self
            .batch
            .lanes
            .write(
                self.batch.lane,
                &self.context.archive,
                self.collection.ns.db(),
                body,
                &[(sequence, &documents)],
            )
            .await?;
        if let Some(at) = reply.operation_time() {
            self.context.shared.progress.archive_acknowledged(at.into());
        }
        Ok(reply)
    }

    async fn finish(mut self) -> Result<Written, ApplyError> {
        self.send_upserts().await?;
        self.send_deletes().await?;
        Ok(self.written)
    }
}

/// 66 `ImmutableField`: the stored `_id` is equal but not the same bytes.
const IMMUTABLE_FIELD: i32 = 66;

struct Refusal {
    code: i32,
    message: String,
}

/// A write reply, statement by statement.
struct Outcome {
    acknowledged: Vec<Key>,
    refused: Vec<(Key, RawDocumentBuf, Refusal)>,
}

impl Outcome {
    fn of(reply: &Reply, statements: Vec<(Key, RawDocumentBuf)>) -> Self {
        let mut errors: HashMap<usize, Refusal> = reply
            .write_errors()
            .into_iter()
            .map(|e| (e.index, Refusal { code: e.error.code, message: e.error.message }))
            .collect();
        let mut outcome = Self { acknowledged: Vec::new(), refused: Vec::new() };
        for (index, (key, statement)) in statements.into_iter().enumerate() {
            match errors.remove(&index) {
                Some(refusal) => outcome.refused.push((key, statement, refusal)),
                None => outcome.acknowledged.push(key),
            }
        }
        outcome
    }
}
