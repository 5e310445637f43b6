//! Move transactions: change which tier holds a document, guarded by the server's own conflict
//! detection (protocol rules 9, 10, 18, 26, 27). What is moved, and when, is decided elsewhere.
//!
//! A move opens its snapshot by reading an anchor document in a collection of its own, so that
//! the tiered collection is not locked while the archive is read. Any write to a key between that
//! moment and the move's own write to it is a conflict, also one that left no trace.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bson::raw::{RawBson, RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use bson::spec::ElementType;
use bson::{Binary, RawArrayBuf, Timestamp, Uuid, rawdoc};

use crate::error::{ClusterError, ServerError};
use crate::options::Tier;
use crate::pool::Pool;
use crate::reply::Reply;
use crate::session::SessionId;
pub use crate::session::{RESERVED_SESSION_PREFIX, is_reserved};

const DATABASE: &str = "halocline";
const ANCHOR: &str = "anchor";

/// Longest time one operation of a move may take. The server ends a transaction after
/// `transactionLifetimeLimitSeconds`, 60 by default; nothing is worth waiting for after that.
const OPERATION_LIMIT: Duration = Duration::from_secs(60);

/// Longest time until the outcome of a commit is known: an election, or a restart of the only
/// member, must fit in.
const COMMIT_LIMIT: Duration = Duration::from_secs(60);

/// `wtimeout` of one attempt to commit; the attempt is repeated when it passes.
const COMMIT_WTIMEOUT_MS: i32 = 10_000;

/// Pause between attempts to commit.
const COMMIT_PAUSE: Duration = Duration::from_millis(50);

/// How often opening is tried; nothing has happened yet, so that a broken connection is no reason
/// to fail.
const OPEN_ATTEMPTS: usize = 3;

/// One insert command carries at most so many bytes of documents: under the server's 48,000,000 a
/// message with ample room for the command around them.
const INSERT_BYTES: usize = 32_000_000;

/// `maxWriteBatchSize` of every server.
const INSERT_DOCUMENTS: usize = 100_000;

/// Idle sessions kept by one thread.
const KEPT_SESSIONS: usize = 64;

/// One thread's sessions for transactions of its own. A session is used by one transaction at a
/// time, with ever-rising transaction numbers, and is thrown away when it is not known how its
/// last transaction ended. Cheap to clone; all clones are the same list.
#[derive(Clone, Default)]
pub struct MoveSessions {
    free: Rc<RefCell<Vec<Session>>>,
    visible: bool,
}

struct Session {
    id: SessionId,
    txn_number: i64,
}

impl MoveSessions {
    /// Sessions for transactions that change data on a client's behalf: they have ordinary ids,
    /// so that the feed shows their changes as a client's (rule 24).
    pub fn visible() -> Self {
        Self { free: Rc::default(), visible: true }
    }

    fn take(&self) -> Session {
        let free = self.free.borrow_mut().pop();
        let mut session = free.unwrap_or_else(|| Session {
            id: if self.visible {
                SessionId(Uuid::new().bytes())
            } else {
                SessionId::reserved(rand::random())
            },
            txn_number: 0,
        });
        session.txn_number += 1;
        session
    }

    fn give_back(&self, session: Session) {
        let mut free = self.free.borrow_mut();
        if free.len() < KEPT_SESSIONS {
            free.push(session);
        }
    }
}

impl fmt::Debug for MoveSessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoveSessions").field("free", &self.free.borrow().len()).finish()
    }
}

/// Creates the anchor document if it is not there.
pub async fn ensure_anchor(pool: &Pool) -> Result<(), ClusterError> {
    let update = rawdoc! {
        "update": ANCHOR,
        "updates": [{
            "q": { "_id": ANCHOR },
            "u": { "$setOnInsert": { "purpose": "opens the snapshots of halocline's moves" } },
            "upsert": true,
        }],
        "writeConcern": { "w": "majority" },
    };
    let reply = pool.run_idempotent(DATABASE, &update).await?;
    match reply.require_acknowledged() {
        // Somebody else was faster.
        Err(error) if error.is_duplicate_key() => Ok(()),
        result => result,
    }
}

/// What a move knows about its transaction on the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Under way; the next operation may follow.
    Open,
    /// An operation failed or was cancelled; the server may still hold the transaction.
    Broken,
    /// It is over, one way or the other, and the server knows.
    Over,
}

/// A transaction on the fast tier. Dropped without [`Move::commit`] it is aborted in the
/// background.
pub struct Move {
    pool: Pool,
    sessions: MoveSessions,
    session: Option<Session>,
    snapshot: Timestamp,
    state: State,
}

/// A query inside a move.
#[derive(Debug, Clone, Copy)]
pub struct Find<'a> {
    /// What to find.
    pub filter: &'a RawDocument,
    /// Which fields; all when absent.
    pub projection: Option<&'a RawDocument>,
    /// In which order.
    pub sort: Option<&'a RawDocument>,
    /// How many at most.
    pub limit: Option<i64>,
    /// By which index: a key pattern or a name.
    pub hint: Option<RawBsonRef<'a>>,
}

impl<'a> Find<'a> {
    /// Everything that matches.
    pub fn new(filter: &'a RawDocument) -> Self {
        Find { filter, projection: None, sort: None, limit: None, hint: None }
    }
}

impl Move {
    /// Opens the snapshot.
    pub async fn open(pool: &Pool, sessions: &MoveSessions) -> Result<Move, ClusterError> {
        let mut attempt = 1;
        loop {
            let error = match Self::try_open(pool, sessions).await {
                Ok(Some(opened)) => return Ok(opened),
                Ok(None) => {
                    ensure_anchor(pool).await?;
                    ClusterError::Aborted {
                        tier: pool.tier(),
                        message: format!("{DATABASE}.{ANCHOR} keeps disappearing"),
                    }
                }
                Err(error) => error,
            };
            let again = error.is_network()
                || error.is_not_primary()
                || error.is_transient_transaction()
                || matches!(error, ClusterError::Aborted { .. });
            if !again || attempt == OPEN_ATTEMPTS {
                return Err(error);
            }
            attempt += 1;
        }
    }

    /// `None` if the anchor is not there.
    async fn try_open(pool: &Pool, sessions: &MoveSessions) -> Result<Option<Move>, ClusterError> {
        let session = sessions.take();
        let mut find = rawdoc! {
            "find": ANCHOR,
            "filter": { "_id": ANCHOR },
            "limit": 1,
            "singleBatch": true,
            "readConcern": { "level": "snapshot" },
            "startTransaction": true,
            "autocommit": false,
        };
        session.id.sign(&mut find, session.txn_number);
        let mut opened = Move {
            pool: pool.clone(),
            sessions: sessions.clone(),
            session: Some(session),
            snapshot: Timestamp { time: 0, increment: 0 },
            // Until the answer is here: cancelled or failed, it must be aborted.
            state: State::Broken,
        };
        let reply = opened.attempt(DATABASE, &find, &[]).await?;
        let mut anchor = Vec::new();
        take_batch(&reply, "firstBatch", &mut anchor);
        if anchor.is_empty() {
            return Ok(None);
        }
        opened.snapshot = reply.cluster_time().ok_or_else(|| ClusterError::Aborted {
            tier: pool.tier(),
            message: "the server's answer has no $clusterTime, so it cannot be told when the \
                      snapshot was taken"
                .into(),
        })?;
        opened.state = State::Open;
        Ok(Some(opened))
    }

    /// A time no older than the snapshot: everything the snapshot shows had happened by then.
    pub fn snapshot_time(&self) -> Timestamp {
        self.snapshot
    }

    /// All documents of a query, as the snapshot has them.
    pub async fn find(
        &mut self,
        db: &str,
        coll: &str,
        query: Find<'_>,
    ) -> Result<Vec<RawDocumentBuf>, ClusterError> {
        let mut find = rawdoc! { "find": coll, "filter": query.filter.to_owned() };
        if let Some(projection) = query.projection {
            find.append(cstr!("projection"), projection);
        }
        if let Some(sort) = query.sort {
            find.append(cstr!("sort"), sort);
        }
        if let Some(limit) = query.limit {
            find.append(cstr!("limit"), limit);
        }
        if let Some(hint) = query.hint {
            find.append(cstr!("hint"), hint);
        }
        let mut documents = Vec::new();
        let reply = self.run(db, find, &[]).await?;
        let mut cursor = take_batch(&reply, "firstBatch", &mut documents);
        while let Some(id) = cursor {
            let reply = self.run(db, rawdoc! { "getMore": id, "collection": coll }, &[]).await?;
            cursor = take_batch(&reply, "nextBatch", &mut documents);
        }
        Ok(documents)
    }

    /// Inserts documents. The collection is named by its UUID too, so that one dropped meanwhile
    /// is an error instead of being created again (rule 10).
    ///
    /// A write conflict means that somebody wrote, or wrote and deleted, one of the keys after
    /// the snapshot; a duplicate key, that it was there at the snapshot. Either way nothing of
    /// the move takes effect.
    pub async fn insert<D: AsRef<RawDocument>>(
        &mut self,
        db: &str,
        coll: &str,
        uuid: Uuid,
        documents: &[D],
    ) -> Result<(), ClusterError> {
        let mut batch: Vec<&RawDocument> = Vec::new();
        let mut bytes = 0;
        for document in documents {
            let document = document.as_ref();
            if has_empty_timestamp(document) {
                self.insert_literally(db, coll, uuid, document).await?;
                continue;
            }
            let size = document.as_bytes().len();
            if !batch.is_empty() && (bytes + size > INSERT_BYTES || batch.len() == INSERT_DOCUMENTS)
            {
                self.insert_batch(db, coll, uuid, &batch).await?;
                batch.clear();
                bytes = 0;
            }
            bytes += size;
            batch.push(document);
        }
        if batch.is_empty() { Ok(()) } else { self.insert_batch(db, coll, uuid, &batch).await }
    }

    async fn insert_batch(
        &mut self,
        db: &str,
        coll: &str,
        uuid: Uuid,
        batch: &[&RawDocument],
    ) -> Result<(), ClusterError> {
        let insert = rawdoc! { "insert": coll, "collectionUUID": Binary::from(uuid) };
        self.run(db, insert, &[("documents", batch)]).await.map(drop)
    }

    /// Inserts a document whose bytes an insert would change: as an upsert that never matches, from
    /// a pipeline that leaves values alone. Errors are those of an insert.
    async fn insert_literally(
        &mut self,
        db: &str,
        coll: &str,
        uuid: Uuid,
        document: &RawDocument,
    ) -> Result<(), ClusterError> {
        let id = document.get("_id").ok().flatten().map_or(RawBson::Null, RawBson::from);
        let update = rawdoc! {
            "update": coll,
            "collectionUUID": Binary::from(uuid),
            "updates": [{
                "q": { "_id": { "$eq": id }, "$alwaysFalse": 1 },
                "u": [{ "$replaceWith": { "$literal": document.to_owned() } }],
                "upsert": true,
            }],
        };
        self.run(db, update, &[]).await.map(drop)
    }

    /// Deletes the documents with these `_id`s and returns how many there were.
    pub async fn delete_ids<I: Into<RawBson>>(
        &mut self,
        db: &str,
        coll: &str,
        uuid: Uuid,
        ids: impl IntoIterator<Item = I>,
    ) -> Result<u64, ClusterError> {
        let mut list = RawArrayBuf::new();
        for id in ids {
            list.push(id.into());
        }
        if list.is_empty() {
            return Ok(0);
        }
        let delete = rawdoc! {
            "delete": coll,
            "collectionUUID": Binary::from(uuid),
            "deletes": [{ "q": { "_id": { "$in": list } }, "limit": 0, "hint": { "_id": 1 } }],
        };
        let reply = self.run(db, delete, &[]).await?;
        Ok(reply.get_number("n").and_then(|n| u64::try_from(n).ok()).unwrap_or(0))
    }

    /// Updates (or, with `upsert`, creates) one document and returns how many matched or were
    /// created.
    pub async fn update_one(
        &mut self,
        db: &str,
        coll: &str,
        query: &RawDocument,
        update: &RawDocument,
        upsert: bool,
    ) -> Result<u64, ClusterError> {
        let update = rawdoc! {
            "update": coll,
            "updates": [{ "q": query.to_owned(), "u": update.to_owned(), "upsert": upsert }],
        };
        let reply = self.run(db, update, &[]).await?;
        Ok(reply.get_number("n").and_then(|n| u64::try_from(n).ok()).unwrap_or(0))
    }

    /// Runs any command (given without `$db`) inside the transaction. A failed statement is an
    /// error, because the server has ended the transaction over it.
    pub async fn run(
        &mut self,
        db: &str,
        mut command: RawDocumentBuf,
        sequences: &[(&str, &[&RawDocument])],
    ) -> Result<Reply, ClusterError> {
        let session = match (&self.session, self.state) {
            (Some(session), State::Open) => session,
            _ => {
                return Err(ClusterError::Aborted {
                    tier: self.tier(),
                    message: "the transaction is over: an earlier operation of it failed".into(),
                });
            }
        };
        session.id.sign(&mut command, session.txn_number);
        command.append(cstr!("autocommit"), false);
        self.state = State::Broken;
        let reply = self.attempt(db, &command, sequences).await?;
        reply.require_acknowledged()?;
        self.state = State::Open;
        Ok(reply)
    }

    /// Makes it so. On `Ok` the transaction is committed and majority-acknowledged; on an error
    /// for which [`ClusterError::outcome_unknown`] is true, it may have been; on any other it was
    /// not.
    pub async fn commit(mut self) -> Result<(), ClusterError> {
        let (Some(session), State::Open) = (&self.session, self.state) else {
            return Err(ClusterError::Aborted {
                tier: self.tier(),
                message: "the transaction cannot be committed: an operation of it failed".into(),
            });
        };
        let mut commit = rawdoc! {
            "commitTransaction": 1,
            "autocommit": false,
            "writeConcern": { "w": "majority", "wtimeout": COMMIT_WTIMEOUT_MS },
        };
        session.id.sign(&mut commit, session.txn_number);
        // Cancelled from here on, the abort in the background settles it either way.
        self.state = State::Broken;
        let deadline = Instant::now() + COMMIT_LIMIT;
        loop {
            let error = match self.attempt("admin", &commit, &[]).await {
                Ok(reply) => match reply.write_concern_error() {
                    None => {
                        self.state = State::Over;
                        return Ok(());
                    }
                    // Committed on this primary; not yet sure to outlive it.
                    Some(error) => ClusterError::server_error(error),
                },
                Err(error) if is_settled(&error) => return Err(error),
                Err(error) => error,
            };
            if Instant::now() >= deadline {
                tracing::warn!(tier = self.tier().label(), %error, "outcome of a move unknown");
                return Err(ClusterError::TimedOut {
                    tier: self.tier(),
                    what: "the commit of a move transaction",
                    limit: COMMIT_LIMIT,
                });
            }
            tracing::debug!(tier = self.tier().label(), %error, "committing again");
            tokio::time::sleep(COMMIT_PAUSE).await;
        }
    }

    /// Undoes it and waits until the server has. Dropping a move does the same without waiting.
    pub async fn abort(mut self) {
        if let Some(undo) = self.undo() {
            undo.await;
        }
    }

    fn tier(&self) -> Tier {
        self.pool.tier()
    }

    /// Sends one command of the transaction. Notes when the server has ended it.
    async fn attempt(
        &mut self,
        db: &str,
        command: &RawDocument,
        sequences: &[(&str, &[&RawDocument])],
    ) -> Result<Reply, ClusterError> {
        let pool = self.pool.clone();
        let work = async {
            let mut conn = pool.primary().await?;
            let result = conn.run_with(db, command, sequences).await;
            if let Err(error) = &result
                && error.is_not_primary()
            {
                pool.note_not_primary(conn.address());
            }
            result
        };
        let result = match tokio::time::timeout(OPERATION_LIMIT, work).await {
            Ok(result) => result,
            Err(_) => Err(ClusterError::TimedOut {
                tier: self.tier(),
                what: "an operation of a move transaction",
                limit: OPERATION_LIMIT,
            }),
        };
        if let Err(error) = &result
            && error.server().is_some_and(has_ended)
        {
            self.state = State::Over;
        }
        result
    }

    /// What remains to be done on the server when the move is given up; gives the session back
    /// when it is known to be free.
    fn undo(&mut self) -> Option<impl Future<Output = ()> + use<>> {
        let session = self.session.take()?;
        let sessions = self.sessions.clone();
        if self.state == State::Over {
            sessions.give_back(session);
            return None;
        }
        self.state = State::Over;
        let pool = self.pool.clone();
        Some(async move {
            let mut abort = rawdoc! { "abortTransaction": 1, "autocommit": false };
            session.id.sign(&mut abort, session.txn_number);
            match tokio::time::timeout(OPERATION_LIMIT, pool.run_once("admin", &abort)).await {
                Ok(Ok(_)) => sessions.give_back(session),
                Ok(Err(error)) => match error.server() {
                    Some(e) if e.is_no_such_transaction() || e.is_transaction_committed() => {
                        sessions.give_back(session);
                    }
                    // The server forgets it after transactionLifetimeLimitSeconds.
                    _ => tracing::debug!(tier = pool.tier().label(), %error, "abort not answered"),
                },
                Err(_) => {}
            }
        })
    }
}

/// Whether after this error the server surely holds no such transaction any more.
fn has_ended(error: &ServerError) -> bool {
    // "No such transaction" counts only if a majority agrees: the member that says so may not
    // know yet that another committed it.
    let durable = !matches!(error.document.get("writeConcernError"), Ok(Some(_)));
    durable && (error.is_write_conflict() || error.is_no_such_transaction())
}

/// Whether this answer to a commit means that nothing was, or will be, committed.
fn is_settled(error: &ClusterError) -> bool {
    match error {
        ClusterError::Server(error) => {
            has_ended(error)
                || !(error.outcome_unknown()
                    || error.is_no_such_transaction()
                    || error.has_label("RetryableWriteError"))
        }
        ClusterError::Network(_)
        | ClusterError::CheckoutTimeout { .. }
        | ClusterError::NoPrimary { .. }
        | ClusterError::TimedOut { .. }
        | ClusterError::Protocol { .. } => false,
        _ => true,
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        if let Some(undo) = self.undo() {
            self.pool.spawn(undo);
        }
    }
}

impl fmt::Debug for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Move")
            .field("snapshot", &self.snapshot)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// Whether an insert would replace one of the document's values by the current time, as the server
/// does with `Timestamp(0, 0)` at the top level.
fn has_empty_timestamp(document: &RawDocument) -> bool {
    const EMPTY: Timestamp = Timestamp { time: 0, increment: 0 };
    document.iter_elements().map_while(Result::ok).any(|element| {
        element.element_type() == ElementType::Timestamp
            && element.value().is_ok_and(|value| value.as_timestamp() == Some(EMPTY))
    })
}

/// Appends a reply's batch and returns the cursor if there is more.
fn take_batch(reply: &Reply, batch: &str, documents: &mut Vec<RawDocumentBuf>) -> Option<i64> {
    let cursor = reply.get("cursor")?.as_document()?;
    if let Ok(Some(RawBsonRef::Array(array))) = cursor.get(batch) {
        let batch = array.into_iter().map_while(Result::ok);
        documents.extend(batch.filter_map(|value| value.as_document().map(RawDocument::to_owned)));
    }
    cursor.get_i64("id").ok().filter(|id| *id != 0)
}
