//! The change feed: which keys changed on the fast tier, in order, from one change stream over the
//! whole deployment. Parses events and says how far they are complete; what a change means is the
//! feeder's affair.

use std::time::Duration;

use bson::raw::{RawBson, RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use bson::{DateTime, RawArrayBuf, Timestamp, rawdoc};

use crate::error::ClusterError;
use crate::options::Tier;
use crate::pool::{Conn, Pool};
use crate::reply::Reply;
use crate::session::is_reserved;

/// Database and collection of the document that is written to make an idle fast tier advance.
pub const HEARTBEAT: (&str, &str) = ("halocline", "heartbeat");

/// Longest time a server may take beyond the `maxTimeMS` it was given. That time limits only the
/// wait for new events; a stream that begins far back, in an oplog full of other collections'
/// changes, reads through all of them before it answers, and giving up would begin it anew. A
/// server that is gone is noticed by the monitors much earlier.
const GRACE: Duration = Duration::from_secs(600);

/// Where a feed begins.
#[derive(Debug, Clone)]
pub enum FeedStart {
    /// After the position of a token.
    Resume(ResumeToken),
    /// With the first event at or after a time.
    At(Timestamp),
}

/// A position in the change stream.
#[derive(Debug, Clone, PartialEq)]
pub struct ResumeToken(RawDocumentBuf);

impl ResumeToken {
    /// A token that was kept.
    pub fn new(token: RawDocumentBuf) -> Self {
        ResumeToken(token)
    }

    /// The token as the server gave it, to be kept.
    pub fn as_raw(&self) -> &RawDocument {
        &self.0
    }

    /// The time of the event after which the token stands. Other events of the same time (a
    /// transaction's events share one) may still follow it.
    pub fn time(&self) -> Option<Timestamp> {
        // `_data` is the hexadecimal form of an order-preserving encoding whose first value is
        // the time: one byte 0x82 for the type, then eight bytes in big endian.
        let data = self.0.get("_data").ok()??.as_str()?;
        let time = data.strip_prefix("82")?.get(..16)?;
        let time = u64::from_str_radix(time, 16).ok()?;
        Some(timestamp(time))
    }

    /// Up to when every event is surely in what came before this token.
    fn through(&self) -> Option<Timestamp> {
        let time = self.time()?;
        let time = u64::from(time.time) << 32 | u64::from(time.increment);
        Some(timestamp(time.saturating_sub(1)))
    }
}

fn timestamp(value: u64) -> Timestamp {
    Timestamp { time: (value >> 32) as u32, increment: value as u32 }
}

/// What kind of change an event tells of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeedOp {
    /// A document was inserted.
    Insert,
    /// A document was changed in part.
    Update,
    /// A document was replaced.
    Replace,
    /// A document was deleted.
    Delete,
    /// A collection, an index or a database was created, changed or removed.
    Ddl(Definition),
    /// The stream ended itself.
    Invalidate,
}

/// A change of definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Definition {
    /// A collection was created.
    Create,
    /// Indexes were created.
    CreateIndexes,
    /// Indexes were dropped.
    DropIndexes,
    /// `collMod`.
    Modify,
    /// The collection was dropped.
    Drop,
    /// The database was dropped.
    DropDatabase,
    /// The collection was renamed to this database and collection. One that had the name before
    /// is gone; no event of its own tells so.
    Rename {
        /// Database of the new name.
        db: String,
        /// Collection of the new name.
        coll: String,
    },
    /// Something else, by its `operationType`.
    Other(String),
}

/// One change.
#[derive(Debug, Clone)]
pub struct FeedEvent {
    /// What happened.
    pub op: FeedOp,
    /// Database.
    pub db: String,
    /// Collection; empty for events of a whole database.
    pub coll: String,
    /// `_id` of the document. `Undefined`, which no document can have, for changes of definition.
    pub key: RawBson,
    /// When it happened (`clusterTime`). Events of one transaction share it.
    pub time: Timestamp,
    /// The same by the primary's wall clock.
    pub wall_time: Option<DateTime>,
    /// A move did it: it changed which tier holds the document, not the document.
    pub is_move: bool,
    /// What a definition was changed to (`operationDescription`).
    pub description: Option<RawDocumentBuf>,
    /// The position after this event.
    pub token: ResumeToken,
    /// Size of the event as received.
    pub bytes: usize,
}

/// What one look at the feed brought.
#[derive(Debug, Clone)]
pub struct FeedBatch {
    /// Changes, in order.
    pub events: Vec<FeedEvent>,
    /// Where to resume after this batch.
    pub token: ResumeToken,
    /// Every change up to and including this time is in this batch or an earlier one.
    pub through: Timestamp,
}

/// Why the feed broke.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    /// The oplog no longer reaches back to the position: changes are lost to the feed.
    #[error("{0}")]
    HistoryLost(String),
    /// The feed can be opened again at its last token.
    #[error("{0}")]
    Resumable(ClusterError),
    /// Opening it again would fail the same way.
    #[error("{0}")]
    Fatal(ClusterError),
}

impl FeedError {
    fn of(error: ClusterError) -> Self {
        match &error {
            ClusterError::Server(server) => {
                if server.is_history_lost() {
                    FeedError::HistoryLost(error.to_string())
                } else if server.is_invalid_resume_token() {
                    FeedError::Fatal(error)
                } else if server.is_retryable() || server.is_interrupted() {
                    FeedError::Resumable(error)
                } else {
                    FeedError::Fatal(error)
                }
            }
            ClusterError::Network(_)
            | ClusterError::CheckoutTimeout { .. }
            | ClusterError::NoPrimary { .. }
            | ClusterError::TimedOut { .. }
            | ClusterError::UnknownServer { .. } => FeedError::Resumable(error),
            _ => FeedError::Fatal(error),
        }
    }
}

/// An open change stream. It keeps one connection of the pool for itself.
#[derive(Debug)]
pub struct ChangeFeed {
    pool: Pool,
    /// `None` once broken.
    conn: Option<Conn>,
    cursor: i64,
    batch_size: i32,
    /// The first batch, which came with the opening.
    first: Option<FeedBatch>,
}

impl ChangeFeed {
    /// Opens the feed for these databases and collections.
    pub async fn open(
        pool: &Pool,
        start: FeedStart,
        namespaces: &[(&str, &str)],
    ) -> Result<ChangeFeed, FeedError> {
        Self::open_with(pool, start, namespaces, DEFAULT_BATCH).await
    }

    /// [`Self::open`] with a limit for the events of one batch.
    pub async fn open_with(
        pool: &Pool,
        start: FeedStart,
        namespaces: &[(&str, &str)],
        batch_size: i32,
    ) -> Result<ChangeFeed, FeedError> {
        let open = async {
            let mut conn = pool.primary().await?;
            let command = aggregate(&start, namespaces, batch_size);
            let reply = match conn.run("admin", &command).await {
                Ok(reply) => reply,
                Err(error) => {
                    if error.is_not_primary() {
                        pool.note_not_primary(conn.address());
                    }
                    return Err(error);
                }
            };
            let cursor = cursor_id(&reply, pool.tier(), &conn)?;
            let first = parse_batch(&reply, "firstBatch", pool.tier(), &conn)?;
            Ok((conn, cursor, first))
        };
        let (conn, cursor, first) =
            limited(pool.tier(), GRACE, open).await.map_err(FeedError::of)?;
        Ok(ChangeFeed {
            pool: pool.clone(),
            conn: Some(conn),
            cursor,
            batch_size,
            first: Some(first),
        })
    }

    /// The next batch; an empty one if nothing happened within `max_time`, with the position moved
    /// on all the same.
    ///
    /// Not to be cancelled: a batch under way would be lost, and the feed with it. After an error
    /// the feed is over; open another at the last token.
    pub async fn next_batch(&mut self, max_time: Duration) -> Result<FeedBatch, FeedError> {
        if let Some(first) = self.first.take() {
            return Ok(first);
        }
        let tier = self.pool.tier();
        // Taken out, so that whatever ends this future early also ends the feed.
        let Some(mut conn) = self.conn.take() else {
            return Err(FeedError::Resumable(ClusterError::Closed { tier }));
        };
        let command = rawdoc! {
            "getMore": self.cursor,
            "collection": "$cmd.aggregate",
            "batchSize": self.batch_size,
            "maxTimeMS": i64::try_from(max_time.as_millis()).unwrap_or(i64::MAX),
        };
        let result = limited(tier, max_time + GRACE, conn.run("admin", &command)).await;
        match result.and_then(|reply| {
            let batch = parse_batch(&reply, "nextBatch", tier, &conn)?;
            Ok((cursor_id(&reply, tier, &conn)?, batch))
        }) {
            Ok((cursor, batch)) => {
                self.cursor = cursor;
                self.conn = Some(conn);
                Ok(batch)
            }
            Err(error) => {
                if error.is_not_primary() {
                    self.pool.note_not_primary(conn.address());
                }
                Err(FeedError::of(error))
            }
        }
    }
}

impl Drop for ChangeFeed {
    fn drop(&mut self) {
        // The server would keep the cursor for ten minutes.
        if let Some(mut conn) = self.conn.take() {
            let cursor = self.cursor;
            self.pool.spawn(async move {
                let mut cursors = RawArrayBuf::new();
                cursors.push(cursor);
                let kill = rawdoc! { "killCursors": "$cmd.aggregate", "cursors": cursors };
                if let Err(error) = conn.run("admin", &kill).await {
                    tracing::debug!(%error, "a change stream's cursor was left to time out");
                }
            });
        }
    }
}

/// Events of one batch: enough that the round trip does not count, few enough that a batch is
/// processed in a moment.
const DEFAULT_BATCH: i32 = 1000;

async fn limited<T>(
    tier: Tier,
    limit: Duration,
    work: impl Future<Output = Result<T, ClusterError>>,
) -> Result<T, ClusterError> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => Err(ClusterError::TimedOut { tier, what: "reading the change stream", limit }),
    }
}

fn aggregate(start: &FeedStart, namespaces: &[(&str, &str)], batch_size: i32) -> RawDocumentBuf {
    let mut stream = rawdoc! { "allChangesForCluster": true, "showExpandedEvents": true };
    match start {
        // Not `resumeAfter`, which refuses the token of an `invalidate`.
        FeedStart::Resume(token) => stream.append(cstr!("startAfter"), token.0.clone()),
        FeedStart::At(time) => stream.append(cstr!("startAtOperationTime"), *time),
    }
    let mut pipeline = RawArrayBuf::new();
    pipeline.push(rawdoc! { "$changeStream": stream });
    pipeline.push(rawdoc! { "$match": wanted(namespaces) });
    // The changed data stays where it is: the feeder copies current states, not changes.
    pipeline.push(rawdoc! { "$project": {
        "operationType": 1, "ns": 1, "to": 1, "documentKey": 1, "clusterTime": 1, "wallTime": 1,
        "lsid": 1, "txnNumber": 1, "operationDescription": 1,
    } });
    rawdoc! {
        "aggregate": 1,
        "pipeline": pipeline,
        "cursor": { "batchSize": batch_size },
        "readConcern": { "level": "majority" },
    }
}

/// Events of the collections, and definition changes that touch them from outside.
///
/// Moves are not left out here although they could be: when only filtered events occur, the server
/// waits out its whole time before it moves the token, and barriers would wait with it.
fn wanted(namespaces: &[(&str, &str)]) -> RawDocumentBuf {
    let mut all: Vec<(&str, &str)> = namespaces.to_vec();
    all.push(HEARTBEAT);
    all.sort_unstable();
    all.dedup();
    let mut any = RawArrayBuf::new();
    let mut dbs = RawArrayBuf::new();
    for of_one_db in all.chunk_by(|a, b| a.0 == b.0) {
        let Some((db, _)) = of_one_db.first() else { continue };
        let mut colls = RawArrayBuf::new();
        for (_, coll) in of_one_db {
            colls.push(*coll);
        }
        any.push(rawdoc! { "ns.db": *db, "ns.coll": { "$in": colls.clone() } });
        any.push(rawdoc! { "operationType": "rename", "to.db": *db, "to.coll": { "$in": colls } });
        dbs.push(*db);
    }
    any.push(rawdoc! { "operationType": "dropDatabase", "ns.db": { "$in": dbs } });
    any.push(rawdoc! { "operationType": "invalidate" });
    rawdoc! { "$or": any }
}

fn malformed(tier: Tier, conn: &Conn, what: &str) -> ClusterError {
    ClusterError::Protocol {
        tier,
        address: conn.address().clone(),
        message: format!("a change stream answer without {what}"),
    }
}

fn cursor_id(reply: &Reply, tier: Tier, conn: &Conn) -> Result<i64, ClusterError> {
    let id = reply.get("cursor").and_then(|cursor| cursor.as_document()?.get_i64("id").ok());
    id.ok_or_else(|| malformed(tier, conn, "a cursor"))
}

fn parse_batch(
    reply: &Reply,
    field: &str,
    tier: Tier,
    conn: &Conn,
) -> Result<FeedBatch, ClusterError> {
    read_batch(reply, field).map_err(|what| malformed(tier, conn, what))
}

fn read_batch(reply: &Reply, field: &str) -> Result<FeedBatch, &'static str> {
    let cursor = reply.get("cursor").and_then(|cursor| cursor.as_document()).ok_or("a cursor")?;
    let mut events = Vec::new();
    let mut token = None;
    for element in cursor.iter_elements() {
        let element = element.map_err(|_| "a readable cursor")?;
        let name = element.key().as_str();
        if name == "postBatchResumeToken" {
            let value = element.value().map_err(|_| "a readable postBatchResumeToken")?;
            token = value.as_document().map(|token| ResumeToken(token.to_owned()));
        } else if name == field {
            let value = element.value().map_err(|_| "a readable batch")?;
            for event in value.as_array().ok_or("a batch")?.iter_elements() {
                let event = event.and_then(|event| event.value()).map_err(|_| "readable events")?;
                events.push(read_event(event.as_document().ok_or("documents for events")?)?);
            }
        }
    }
    let token = token.ok_or("a postBatchResumeToken")?;
    let through = token.through().ok_or("a postBatchResumeToken that begins with a time")?;
    Ok(FeedBatch { events, token, through })
}

/// Reads one event in one pass over its fields.
fn read_event(event: &RawDocument) -> Result<FeedEvent, &'static str> {
    let mut token = None;
    let mut operation = None;
    let mut ns = None;
    let mut to = None;
    let mut key = RawBson::Undefined;
    let mut time = None;
    let mut wall_time = None;
    let mut is_move = false;
    let mut description = None;
    for element in event.iter_elements() {
        let element = element.map_err(|_| "readable events")?;
        let value = || element.value().map_err(|_| "readable fields in its events");
        match element.key().as_str() {
            "_id" => token = value()?.as_document().map(|token| ResumeToken(token.to_owned())),
            "operationType" => operation = value()?.as_str(),
            "ns" => ns = value()?.as_document(),
            "to" => to = value()?.as_document(),
            "documentKey" => {
                if let Some(document_key) = value()?.as_document() {
                    key = read_key(document_key)?;
                }
            }
            "clusterTime" => time = value()?.as_timestamp(),
            "wallTime" => wall_time = value()?.as_datetime(),
            "lsid" => is_move = value()?.as_document().is_some_and(is_reserved),
            "operationDescription" => {
                description = value()?.as_document().map(RawDocument::to_owned);
            }
            _ => {}
        }
    }
    let operation = operation.ok_or("an operationType")?;
    let (db, coll) = namespace(ns);
    let op = match operation {
        "insert" => FeedOp::Insert,
        "update" => FeedOp::Update,
        "replace" => FeedOp::Replace,
        "delete" => FeedOp::Delete,
        "invalidate" => FeedOp::Invalidate,
        "create" => FeedOp::Ddl(Definition::Create),
        "createIndexes" => FeedOp::Ddl(Definition::CreateIndexes),
        "dropIndexes" => FeedOp::Ddl(Definition::DropIndexes),
        "modify" => FeedOp::Ddl(Definition::Modify),
        "drop" => FeedOp::Ddl(Definition::Drop),
        "dropDatabase" => FeedOp::Ddl(Definition::DropDatabase),
        "rename" => {
            let (db, coll) = namespace(to);
            FeedOp::Ddl(Definition::Rename { db, coll })
        }
        other => FeedOp::Ddl(Definition::Other(other.to_owned())),
    };
    Ok(FeedEvent {
        op,
        db,
        coll,
        key,
        time: time.ok_or("a clusterTime")?,
        wall_time,
        is_move,
        description,
        token: token.ok_or("a resume token in every event")?,
        bytes: event.as_bytes().len(),
    })
}

fn read_key(document_key: &RawDocument) -> Result<RawBson, &'static str> {
    for element in document_key.iter_elements() {
        let element = element.map_err(|_| "a readable documentKey")?;
        if element.key().as_str() == "_id" {
            // A key that is no valid UTF-8 cannot be mirrored, but must not stop the feed either.
            return element.value_utf8_lossy().map_err(|_| "a readable _id");
        }
    }
    Err("an _id in its documentKey")
}

fn namespace(ns: Option<&RawDocument>) -> (String, String) {
    let field = |name: &str| {
        let value = ns.and_then(|ns| ns.get(name).ok().flatten());
        match value {
            Some(RawBsonRef::String(value)) => value.to_owned(),
            _ => String::new(),
        }
    };
    (field("db"), field("coll"))
}

#[cfg(test)]
mod tests {
    use bson::Binary;
    use bson::spec::BinarySubtype;

    use super::*;

    // Tokens of a real server: an event's, and one that only marks how far the stream has come.
    const EVENT_TOKEN: &str = "826B0E206B000000022B022C0100296E5A1004BB7E5F2DF2A240EA9B1AFC8B15C50D9B461E5F6964002B020004";
    const HIGH_WATER_TOKEN: &str = "826B0E206B000000022B0229296E04";

    fn token(data: &str) -> ResumeToken {
        ResumeToken::new(rawdoc! { "_data": data })
    }

    #[test]
    fn a_token_tells_its_time_and_claims_nothing_at_that_time() {
        for data in [EVENT_TOKEN, HIGH_WATER_TOKEN] {
            let token = token(data);
            assert_eq!(token.time(), Some(Timestamp { time: 0x6b0e_206b, increment: 2 }));
            assert_eq!(token.through(), Some(Timestamp { time: 0x6b0e_206b, increment: 1 }));
        }
        let first_of_a_second = token("826B0E206B00000000");
        assert_eq!(
            first_of_a_second.through(),
            Some(Timestamp { time: 0x6b0e_206a, increment: u32::MAX })
        );
    }

    #[test]
    fn what_is_no_token_has_no_time() {
        for data in
            ["", "82", "826B0E206B", "7865A0C5D100000002", "82zzzzzzzzzzzzzzzz", "82€€€€€€€€"]
        {
            assert_eq!(token(data).time(), None, "{data}");
        }
        assert_eq!(ResumeToken::new(rawdoc! { "_data": 5 }).time(), None);
        assert_eq!(ResumeToken::new(rawdoc! {}).time(), None);
    }

    #[test]
    fn an_event_is_read_in_any_order_of_fields() {
        let event = rawdoc! {
            "documentKey": { "region": 5, "_id": { "a": 1 } },
            "clusterTime": Timestamp { time: 7, increment: 3 },
            "something": { "new": true },
            "lsid": { "id": Binary {
                subtype: BinarySubtype::Uuid, bytes: b"haloclin\0\0\0\0\0\0\0\x01".to_vec(),
            } },
            "ns": { "coll": "c.d", "db": "a" },
            "operationType": "delete",
            "_id": { "_data": EVENT_TOKEN },
        };
        let read = read_event(&event).unwrap();
        assert_eq!(read.op, FeedOp::Delete);
        assert_eq!((read.db.as_str(), read.coll.as_str()), ("a", "c.d"));
        assert_eq!(read.key, RawBson::Document(rawdoc! { "a": 1 }));
        assert_eq!(read.time, Timestamp { time: 7, increment: 3 });
        assert!(read.is_move);
        assert_eq!(read.token, token(EVENT_TOKEN));
    }

    #[test]
    fn an_event_that_lacks_what_is_needed_is_an_error_and_not_a_guess() {
        let whole = rawdoc! {
            "_id": { "_data": EVENT_TOKEN }, "operationType": "insert",
            "clusterTime": Timestamp { time: 7, increment: 3 },
            "ns": { "db": "a", "coll": "c" }, "documentKey": { "_id": 1 },
        };
        assert!(read_event(&whole).is_ok());
        for missing in ["_id", "operationType", "clusterTime"] {
            let fields =
                whole.iter().map(Result::unwrap).filter(|(key, _)| key.as_str() != missing);
            let event: RawDocumentBuf = fields.collect();
            assert!(read_event(&event).is_err(), "without {missing}");
        }
    }
}
