//! Lanes: the fixed sessions on the archive under which the feeder writes (protocol rules 7, 8).
//! The archive itself refuses a lane's older transaction numbers, so that nothing a dead or paused
//! feeder still has under way can land after its successor has begun. Which key goes on which
//! lane, and what is written, is decided elsewhere.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use bson::raw::{RawDocument, RawDocumentBuf, cstr};
use bson::{Timestamp, rawdoc};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::error::ClusterError;
use crate::lease::MAX_EPOCH;
use crate::options::Tier;
use crate::pool::Pool;
use crate::reply::{Reply, number};
use crate::session::SessionId;

const DATABASE: &str = "halocline";
const COLLECTION: &str = "lanes";

/// Transaction numbers of one epoch: a lane can write a thousand times a second for 34 years.
const SEQUENCE_BITS: u32 = 40;

/// Most lanes: the lane's number is two bytes of its session id.
const MAX_LANES: usize = 1 << 16;

/// How long a write waits for its majority. Beyond that the write stands, unacknowledged, and the
/// flush is repeated.
const WTIMEOUT: Duration = Duration::from_secs(30);

/// How long a write may take altogether; the lane then goes on under a higher number.
const WRITE_LIMIT: Duration = Duration::from_secs(60);

/// How long closing the lanes to earlier epochs may take; it is tried again until then.
const CLOSE_LIMIT: Duration = Duration::from_secs(120);

/// Lanes closed or refreshed at once, so as not to take all connections.
const AT_ONCE: usize = 16;

/// Pause before a lane is tried again.
const PAUSE: Duration = Duration::from_millis(50);

/// Why a write on a lane is not acknowledged.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// A later epoch has closed this lane: another feeder has taken over. Whoever sees this must
    /// stop writing at once.
    #[error("another feeder has taken over the lanes on the archive")]
    Superseded,
    /// The outcome is unknown or the write failed; the lane can go on.
    #[error("{0}")]
    Failed(#[from] ClusterError),
}

/// The lanes of one fast tier on the archive, under one epoch. Shared by the threads that write.
pub struct LaneSet {
    tier: Tier,
    /// The fast tier's name: an archive may have several.
    fast: String,
    epoch: i64,
    lanes: Vec<Lane>,
}

struct Lane {
    session: SessionId,
    sequence: AtomicI64,
    /// A command is in flight.
    busy: AtomicBool,
}

/// What the archive remembers of a fast tier's lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneRecord {
    /// How many there are.
    pub lanes: usize,
    /// The highest epoch that has closed any of them, or 0.
    pub highest_epoch: i64,
}

impl LaneRecord {
    /// Reads how many lanes this fast tier has on the archive; fixes it at `wanted` if it never
    /// had any.
    pub async fn find_or_fix(
        archive: &Pool,
        fast: &str,
        wanted: usize,
    ) -> Result<LaneRecord, ClusterError> {
        let tier = archive.tier();
        if !(1..=MAX_LANES).contains(&wanted) {
            return Err(ClusterError::Config {
                tier,
                message: format!("{wanted} lanes are not between 1 and {MAX_LANES}"),
            });
        }
        let fix = rawdoc! {
            "findAndModify": COLLECTION,
            "query": { "_id": { "fast": fast } },
            "update": { "$setOnInsert": { "lanes": wanted as i64 } },
            "upsert": true,
            "new": true,
            "writeConcern": { "w": "majority" },
        };
        let reply = match archive.run_idempotent(DATABASE, &fix).await {
            // Two at once; the document is there now.
            Err(error) if error.is_duplicate_key() => {
                archive.run_idempotent(DATABASE, &fix).await?
            }
            result => result?,
        };
        reply.require_acknowledged()?;
        let fixed = reply.get("value").and_then(|value| read_fixed(value.as_document()?));
        let Some(lanes) = fixed else {
            return Err(ClusterError::Config {
                tier,
                message: format!(
                    "the document {{fast: {fast:?}}} in {DATABASE}.{COLLECTION} does not say how \
                     many lanes there are; nothing but halocline may write there"
                ),
            });
        };
        let highest = rawdoc! {
            "find": COLLECTION,
            "filter": { "fast": fast, "epoch": { "$exists": true } },
            "sort": { "epoch": -1 },
            "limit": 1,
            "singleBatch": true,
            "readConcern": { "level": "majority" },
        };
        let reply = archive.run_idempotent(DATABASE, &highest).await?;
        let highest_epoch = reply
            .get("cursor")
            .and_then(|cursor| {
                let lane = cursor.as_document()?.get_array("firstBatch").ok()?.get(0).ok()??;
                number(lane.as_document()?.get("epoch").ok()??)
            })
            .unwrap_or(0);
        Ok(LaneRecord { lanes, highest_epoch })
    }
}

fn read_fixed(document: &RawDocument) -> Option<usize> {
    let lanes = usize::try_from(number(document.get("lanes").ok()??)?).ok()?;
    (1..=MAX_LANES).contains(&lanes).then_some(lanes)
}

/// The session id of a lane. Made from the name, not drawn and kept, so that it is the same one
/// even if what is kept on the archive was lost: an earlier feeder would still be shut out.
fn session(fast: &str, lane: u16) -> SessionId {
    // FNV-1a
    let hash = fast.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let [a, b, c, d, e, f, ..] = hash.to_be_bytes();
    let [high, low] = lane.to_be_bytes();
    SessionId::reserved([a, b, c, d, e, f, high, low])
}

impl LaneSet {
    /// The lanes of a fast tier (by its replica set name) under an epoch of the lease. Their
    /// number is fixed on the archive by the first who asks: keys are spread by it, and a lane
    /// that nobody closes would stay open to an earlier feeder. Another number is an error.
    ///
    /// Nothing may be written before [`Self::close_earlier_epochs`].
    pub async fn open(
        archive: &Pool,
        fast: &str,
        lanes: usize,
        epoch: i64,
    ) -> Result<LaneSet, LaneError> {
        let record = LaneRecord::find_or_fix(archive, fast, lanes).await?;
        let tier = archive.tier();
        if record.lanes != lanes {
            return Err(LaneError::Failed(ClusterError::Config {
                tier,
                message: format!(
                    "{lanes} lanes are wanted, but the number was fixed at {} when the fast tier \
                     {fast:?} was first mirrored to this archive; set it to that",
                    record.lanes
                ),
            }));
        }
        if !(1..=MAX_EPOCH).contains(&epoch) {
            return Err(LaneError::Failed(ClusterError::Config {
                tier,
                message: format!("epoch {epoch} is outside 1 to {MAX_EPOCH}"),
            }));
        }
        if record.highest_epoch >= epoch {
            return Err(LaneError::Superseded);
        }
        let lanes = (0..record.lanes)
            .map(|lane| Lane {
                session: session(fast, lane as u16),
                sequence: AtomicI64::new(0),
                busy: AtomicBool::new(false),
            })
            .collect();
        Ok(LaneSet { tier, fast: fast.to_owned(), epoch, lanes })
    }

    /// How many lanes there are.
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Never: there is at least one.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// The epoch they are written under.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// Writes once on every lane, which closes it to every earlier epoch. When this has returned
    /// nothing of an earlier feeder can reach the archive any more. Returns the archive's time
    /// then: what it shows at that time is no older than anything an earlier feeder wrote.
    pub async fn close_earlier_epochs(
        &self,
        archive: &Pool,
    ) -> Result<Option<Timestamp>, LaneError> {
        let all: Vec<usize> = (0..self.lanes.len()).collect();
        self.touch(archive, &all).await
    }

    /// Writes once on each of these lanes, so that the archive, which forgets a session after 30
    /// idle minutes, keeps refusing its older numbers.
    pub async fn refresh(&self, archive: &Pool, lanes: &[usize]) -> Result<(), LaneError> {
        self.touch(archive, lanes).await.map(drop)
    }

    async fn touch(&self, archive: &Pool, lanes: &[usize]) -> Result<Option<Timestamp>, LaneError> {
        let mut newest = None;
        let deadline = Instant::now() + CLOSE_LIMIT;
        let mut rest = lanes.iter().copied();
        let mut under_way = FuturesUnordered::new();
        loop {
            while under_way.len() < AT_ONCE
                && let Some(lane) = rest.next()
            {
                under_way.push(self.touch_one(archive, lane, deadline));
            }
            match under_way.next().await {
                Some(result) => newest = newest.max(result?),
                None => return Ok(newest),
            }
        }
    }

    async fn touch_one(
        &self,
        archive: &Pool,
        lane: usize,
        deadline: Instant,
    ) -> Result<Option<Timestamp>, LaneError> {
        loop {
            // The sequence makes every one of them change the document: a write that changes
            // nothing is not recorded, and would close nothing.
            let sequence = self.lane(lane)?.sequence.load(Ordering::Relaxed) + 1;
            let update = rawdoc! {
                "update": COLLECTION,
                "updates": [{
                    "q": { "_id": { "fast": self.fast.as_str(), "lane": lane as i64 } },
                    "u": { "$set": {
                        "fast": self.fast.as_str(), "epoch": self.epoch, "sequence": sequence,
                    } },
                    "upsert": true,
                }],
            };
            let written = self.write(lane, archive, DATABASE, update, &[]).await;
            let acknowledged = written.and_then(|reply| {
                reply.require_acknowledged()?;
                Ok(reply.operation_time())
            });
            let error = match acknowledged {
                Ok(time) => return Ok(time),
                Err(LaneError::Superseded) => return Err(LaneError::Superseded),
                Err(LaneError::Failed(error)) => error,
            };
            if Instant::now() >= deadline || matches!(error, ClusterError::Config { .. }) {
                return Err(LaneError::Failed(error));
            }
            tracing::debug!(tier = self.tier.label(), lane, %error, "writing on a lane again");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Runs one write command (given without `$db`, session and write concern) on a lane. One
    /// command may be in flight on a lane; its statements must be such as can be retried (no
    /// `multi`, no `limit: 0`).
    ///
    /// `Ok` means majority-acknowledged; failed statements are in the reply's `writeErrors`. On
    /// [`LaneError::Failed`] the command may or may not have been executed, in whole or in part:
    /// read the state again and write that; the lane goes on with a higher number, which waits
    /// for, and then shuts out, whatever is left of this one.
    pub async fn write(
        &self,
        lane: usize,
        archive: &Pool,
        db: &str,
        mut command: RawDocumentBuf,
        sequences: &[(&str, &[&RawDocument])],
    ) -> Result<Reply, LaneError> {
        let lane = self.lane(lane)?;
        let _in_flight = InFlight::begin(lane, self.tier)?;
        let sequence = lane.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        let number = (self.epoch << SEQUENCE_BITS) | sequence;
        lane.session.sign(&mut command, number);
        command.append(
            cstr!("writeConcern"),
            rawdoc! { "w": "majority", "wtimeout": WTIMEOUT.as_millis() as i64 },
        );
        let work = async {
            let mut conn = archive.primary().await?;
            let result = conn.run_with(db, &command, sequences).await;
            if let Err(error) = &result
                && error.is_not_primary()
            {
                archive.note_not_primary(conn.address());
            }
            result
        };
        let reply = match tokio::time::timeout(WRITE_LIMIT, work).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => {
                return Err(match error.server() {
                    Some(server) if server.is_transaction_too_old() => LaneError::Superseded,
                    _ => LaneError::Failed(error),
                });
            }
            Err(_) => {
                return Err(LaneError::Failed(ClusterError::TimedOut {
                    tier: self.tier,
                    what: "a write to the archive",
                    limit: WRITE_LIMIT,
                }));
            }
        };
        if reply.write_errors().iter().any(|failed| failed.error.is_transaction_too_old()) {
            return Err(LaneError::Superseded);
        }
        match reply.write_concern_error() {
            Some(error) => Err(LaneError::Failed(ClusterError::server_error(error))),
            None => Ok(reply),
        }
    }

    fn lane(&self, lane: usize) -> Result<&Lane, ClusterError> {
        self.lanes.get(lane).ok_or_else(|| ClusterError::Config {
            tier: self.tier,
            message: format!("there is no lane {lane}, only {}", self.lanes.len()),
        })
    }
}

/// The one command in flight on a lane.
struct InFlight<'a>(&'a Lane);

impl<'a> InFlight<'a> {
    fn begin(lane: &'a Lane, tier: Tier) -> Result<Self, ClusterError> {
        if lane.busy.swap(true, Ordering::Acquire) {
            return Err(ClusterError::Config {
                tier,
                message: "two commands were sent on one lane at once".into(),
            });
        }
        Ok(InFlight(lane))
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

impl fmt::Debug for LaneSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneSet")
            .field("fast", &self.fast)
            .field("epoch", &self.epoch)
            .field("lanes", &self.lanes.len())
            .finish()
    }
}
