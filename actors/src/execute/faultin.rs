//! Fault-in (protocol rule 18) and proof of absence (rule 19): bringing one document to the fast
//! tier, or knowing that neither tier has it, before a write runs there.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bson::raw::{RawBsonRef, RawDocumentBuf};
use bson::{RawArrayBuf, Timestamp, rawdoc};
use halocline_cluster::moves::Move;
use halocline_cluster::{ClusterError, Tier};
use halocline_tiering::key::Key;
use halocline_tiering::pending::CollectionId;
use halocline_tiering::time::ClusterTime;
use metrics::counter;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::context::ThreadContext;
use crate::execute::deadline::Deadline;
use crate::execute::forward::no_clock;
use crate::execute::refusal::Refusal;
use crate::fetch::find_all;
use crate::panic_injection::checkpoint;
use crate::shared::{Collection, FRESH_OBJECT_ID};

/// Where a key turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residence {
    /// On the fast tier (now, or already).
    Fast,
    /// On neither tier: a final answer.
    Nowhere,
}

/// Fault-ins under way in this daemon: whoever wants a key that is already coming waits for it.
#[derive(Debug, Default)]
pub struct FaultIns {
    running: Mutex<HashMap<(CollectionId, Key), Outcome>>,
}

/// How a fault-in ended, once it has.
type Outcome = watch::Receiver<Option<Residence>>;

/// Pause before a fault-in that met a conflict starts over; the other side is about to commit.
const CONFLICT_PAUSE: Duration = Duration::from_millis(2);

/// Brings the key to the fast tier, or finds that neither tier has it.
///
/// # Errors
/// When the time is used up or a tier does not answer.
pub async fn fault_in(
    context: &ThreadContext,
    collection: &Collection,
    key: &Key,
    deadline: &Deadline,
) -> Result<Residence, Refusal> {
    let place = (collection.id, key.clone());
    loop {
        let running = context.shared.faultins.running.lock().get(&place).cloned();
        if let Some(mut running) = running {
            let outcome = deadline
                .within("a document on its way from the archive", running.wait_for(Option::is_some))
                .await?;
            match outcome.ok().and_then(|residence| *residence) {
                Some(Residence::Fast) => return Ok(Residence::Fast),
                // "Nowhere" was true of a moment before this caller asked; and an abandoned
                // fault-in says nothing. Look again.
                Some(Residence::Nowhere) | None => {}
            }
        }
        let (sender, receiver) = watch::channel(None);
        {
            let mut table = context.shared.faultins.running.lock();
            if table.contains_key(&place) {
                continue;
            }
            table.insert(place.clone(), receiver);
        }
        let _leave = Leave { table: &context.shared.faultins, place: &place };
        let begun = Instant::now();
        let outcome = deadline
            .within("a document from the archive", bring(context, collection, key, deadline))
            .await?;
        context.recorder.faultin.record(begun.elapsed().as_secs_f64());
        if let Ok(residence) = outcome {
            let label = match residence {
                Residence::Fast => "brought",
                Residence::Nowhere => "absent",
            };
            counter!("halocline_faultin_total", "ns" => collection.name.clone(), "outcome" => label)
                .increment(1);
            sender.send_replace(Some(residence));
        }
        return outcome;
    }
}

struct Leave<'a> {
    table: &'a FaultIns,
    place: &'a (CollectionId, Key),
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.table.running.lock().remove(self.place);
    }
}

async fn bring(
    context: &ThreadContext,
    collection: &Collection,
    key: &Key,
    deadline: &Deadline,
) -> Result<Residence, Refusal> {
    let unreachable = |error: ClusterError| Refusal::unreachable(Tier::Fast, &error);
    loop {
        // The snapshot comes first; only then does an archive that reflects it prove anything.
        let mut moving = Move::open(&context.fast, &context.moves).await.map_err(unreachable)?;
        let snapshot: ClusterTime = moving.snapshot_time().into();
        point_barrier(context, collection, key, snapshot, deadline).await?;
        let Some(document) = read_archive(context, collection, key).await? else {
            moving.abort().await;
            return Ok(Residence::Nowhere);
        };
        // The evictor must not take it away again before the write it is wanted for.
        context.shared.recent.touch(collection.id, key, Instant::now());
        let Some(uuid) = collection.fast_uuid.load_full() else {
            moving.abort().await;
            return Err(Refusal::unsupported(format!(
                "{} is not ready on the fast tier; see `halocline status`",
                collection.name
            )));
        };
        let inserted =
            moving.insert(collection.ns.db(), collection.ns.coll(), *uuid, &[&document]).await;
        checkpoint("connection_handler/faulted_in");
        let error = match inserted {
            Ok(()) => match moving.commit().await {
                Ok(()) => {
                    collection.moves.faulted_in.fetch_add(1, Ordering::Relaxed);
                    return Ok(Residence::Fast);
                }
                Err(error) => error,
            },
            Err(error) => {
                moving.abort().await;
                error
            }
        };
        match error.server() {
            Some(server) if server.is_duplicate_key() => return Ok(Residence::Fast),
            Some(server) if server.is_write_conflict() || server.is_transient_transaction() => {
                tokio::time::sleep(CONFLICT_PAUSE).await;
            }
            _ if error.is_network() || error.is_timeout() => {
                tokio::time::sleep(CONFLICT_PAUSE).await;
            }
            _ => return Err(Refusal::unreachable(Tier::Fast, &error)),
        }
        if deadline.has_passed() {
            return Err(Refusal::timed_out("a document from the archive"));
        }
    }
}

/// Waits until the archive's answer for the key reflects the fast tier as of `at` (rule 12).
///
/// # Errors
/// When the time is used up.
pub async fn point_barrier(
    context: &ThreadContext,
    collection: &Collection,
    key: &Key,
    at: ClusterTime,
    deadline: &Deadline,
) -> Result<(), Refusal> {
    let begun = Instant::now();
    let barrier = context.shared.progress.point_barrier(collection.id, key, at);
    deadline.within("the archive to catch up with the fast tier", barrier).await?;
    context.recorder.point_barrier.record(begun.elapsed().as_secs_f64());
    Ok(())
}

/// Waits until the archive reflects every change of the collection up to `at` (rule 14).
///
/// # Errors
/// When the time is used up.
pub async fn range_barrier(
    context: &ThreadContext,
    collection: &Collection,
    at: ClusterTime,
    deadline: &Deadline,
) -> Result<(), Refusal> {
    let begun = Instant::now();
    let barrier = context.shared.progress.range_barrier(collection.id, at);
    deadline.within("the archive to catch up with the fast tier", barrier).await?;
    context.recorder.range_barrier.record(begun.elapsed().as_secs_f64());
    Ok(())
}

/// The archive's copy of a document, read at its primary and no older than the acknowledged flushes.
async fn read_archive(
    context: &ThreadContext,
    collection: &Collection,
    key: &Key,
) -> Result<Option<RawDocumentBuf>, Refusal> {
    let find = rawdoc! {
        "find": collection.ns.coll(),
        "filter": key.filter(),
        "limit": 1,
        "singleBatch": true,
        "readConcern": archive_read_concern(context),
    };
    let (mut found, _) = query(context, Tier::Archive, collection.ns.db(), find).await?;
    Ok(found.pop())
}

/// Rule 15: no older than the acknowledged flush, by the archive's own clock.
#[must_use]
pub fn archive_read_concern(context: &ThreadContext) -> RawDocumentBuf {
    let time = context.shared.progress.archive_time();
    if time == ClusterTime::ZERO {
        return rawdoc! { "level": "local" };
    }
    let time: Timestamp = time.into();
    rawdoc! { "level": "local", "afterClusterTime": time }
}

/// Runs a read of the daemon's own on a tier's primary, once more if the connection broke.
///
/// # Errors
/// When the tier does not answer.
pub async fn query(
    context: &ThreadContext,
    tier: Tier,
    db: &str,
    command: RawDocumentBuf,
) -> Result<(Vec<RawDocumentBuf>, ClusterTime), Refusal> {
    let mut tries = 0;
    loop {
        let result = async {
            let mut connection = context.pool(tier).primary().await?;
            let result = find_all(&mut connection, db, &command).await;
            if let Err(error) = &result
                && error.server().is_some_and(halocline_cluster::ServerError::is_not_primary)
            {
                context.pool(tier).note_not_primary(connection.address());
            }
            result
        };
        match result.await {
            Ok((documents, reply)) => {
                let at = reply.cluster_time().ok_or_else(|| no_clock(tier))?;
                return Ok((documents, at.into()));
            }
            Err(error) => {
                tries += 1;
                if tries > 3 || !(error.is_network() || error.is_retryable()) {
                    return Err(match error.server() {
                        Some(server) if !server.is_retryable() => Refusal {
                            verbatim: Some(server.document.clone()),
                            ..Refusal::new(server.code, server.message.clone())
                        },
                        _ => Refusal::unreachable(tier, &error),
                    });
                }
            }
        }
    }
}

/// Which of the keys the fast tier has, and the time of that answer.
async fn on_fast(
    context: &ThreadContext,
    collection: &Collection,
    keys: &[Key],
) -> Result<(Vec<Key>, ClusterTime), Refusal> {
    ids_on(context, Tier::Fast, collection, keys, rawdoc! { "level": "local" }).await
}

async fn ids_on(
    context: &ThreadContext,
    tier: Tier,
    collection: &Collection,
    keys: &[Key],
    read_concern: RawDocumentBuf,
) -> Result<(Vec<Key>, ClusterTime), Refusal> {
    let mut ids = RawArrayBuf::new();
    for key in keys {
        ids.push(key.value());
    }
    let find = rawdoc! {
        "find": collection.ns.coll(),
        "filter": { "_id": { "$in": ids } },
        "projection": { "_id": 1 },
        "hint": { "_id": 1 },
        "batchSize": 100_000,
        "readConcern": read_concern,
    };
    let (found, at) = query(context, tier, collection.ns.db(), find).await?;
    Ok((found.iter().filter_map(|document| Key::of(document).ok()).collect(), at))
}

/// Whether the fast tier has the key now.
///
/// # Errors
/// When the fast tier does not answer.
pub async fn is_on_fast(
    context: &ThreadContext,
    collection: &Collection,
    key: &Key,
) -> Result<(bool, ClusterTime), Refusal> {
    let (found, at) = on_fast(context, collection, std::slice::from_ref(key)).await?;
    Ok((!found.is_empty(), at))
}

/// Makes sure that every key that exists anywhere is on the fast tier. Afterwards an insert or an
/// upsert of these keys gets the right answer from the fast tier alone, for [`Shared::proof_age`].
///
/// [`Shared::proof_age`]: crate::shared::Shared::proof_age
///
/// # Errors
/// When the time is used up or a tier does not answer.
pub async fn settle(
    context: &ThreadContext,
    collection: &Collection,
    keys: &[Key],
    deadline: &Deadline,
) -> Result<(), Refusal> {
    let unknown: Vec<Key> =
        keys.iter().filter(|key| may_be_stored(key) && !is_fresh(context, key)).cloned().collect();
    for keys in unknown.chunks(KEYS_A_LOOK) {
        // A key that is seen on the fast tier must still be there when the write arrives.
        for key in keys {
            let pinned = context.shared.recent.pin(collection.id, key, Instant::now());
            deadline.within("an eviction to end", pinned).await?;
        }
        let (present, at) = on_fast(context, collection, keys).await?;
        let missing: Vec<Key> = keys.iter().filter(|key| !present.contains(key)).cloned().collect();
        if missing.is_empty() {
            continue;
        }
        for key in &missing {
            point_barrier(context, collection, key, at, deadline).await?;
        }
        let concern = archive_read_concern(context);
        let (archived, _) = ids_on(context, Tier::Archive, collection, &missing, concern).await?;
        for key in &archived {
            fault_in(context, collection, key, deadline).await?;
        }
    }
    Ok(())
}

/// Keys looked up with one query: a reply of bare ids stays far below 16 MB.
const KEYS_A_LOOK: usize = 1000;

/// Whether a document can have that `_id`. Of one that cannot, the server refuses the insert; and the
/// query that looks for it would mean something else, or nothing.
fn may_be_stored(key: &Key) -> bool {
    match key.value() {
        RawBsonRef::Array(_) | RawBsonRef::RegularExpression(_) | RawBsonRef::Undefined => false,
        RawBsonRef::Document(id) => id
            .iter_elements()
            .all(|field| field.is_ok_and(|field| !field.key().as_str().starts_with('$'))),
        _ => true,
    }
}

/// Rule 20: an ObjectId made minutes ago, by the fast tier's own clock, cannot have been inserted,
/// mirrored and evicted already, once the residency record is whole.
fn is_fresh(context: &ThreadContext, key: &Key) -> bool {
    let RawBsonRef::ObjectId(id) = key.value() else { return false };
    let shared = &context.shared;
    if !shared.residency_known() {
        return false;
    }
    let made = u64::from(u32::from_be_bytes(first_four(&id.bytes())));
    let now = u64::from(shared.progress.ingested().seconds());
    // The stream is at most seconds behind; a host clock may be wrong by hours.
    let host = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let fresh = FRESH_OBJECT_ID.min(shared.recent.residency() / 2).as_secs();
    now.abs_diff(host) < fresh && made <= now + fresh / 2 && made + fresh >= now
}

fn first_four(bytes: &[u8; 12]) -> [u8; 4] {
    let [a, b, c, d, ..] = *bytes;
    [a, b, c, d]
}
