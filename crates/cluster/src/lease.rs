//! The leader lease (protocol rule 32): one document on the fast tier says who may act. Judged by
//! monotonic time only: the holder counts from before it asked, the taker from after it saw.
//!
//! What a leader does with it, and that it stops in time, is decided elsewhere.

use std::fmt;
use std::time::{Duration, Instant};

use bson::raw::{RawDocument, RawDocumentBuf};
use bson::{Uuid, rawdoc};

use crate::error::ClusterError;
use crate::options::Tier;
use crate::pool::Pool;
use crate::reply::{Reply, number};

const DATABASE: &str = "halocline";
const COLLECTION: &str = "lease";
const LEADER: &str = "leader";

/// How many looks a taker has at the lease during one ttl.
const LOOKS_A_TTL: u32 = 10;
/// Bounds of the pause between two looks.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Epochs beyond this do not fit into a lane's transaction numbers. At a takeover a second it is
/// reached after three months; nobody takes over that often.
pub(crate) const MAX_EPOCH: i64 = (1 << 23) - 1;

/// The right to act as leader, until [`Lease::valid_until`].
///
/// Dropped without [`Lease::release`] it is waited out by the next holder.
pub struct Lease {
    holder: String,
    /// Tells this acquisition from every other, also by a holder of the same name.
    instance: Uuid,
    epoch: i64,
    ttl: Duration,
    valid_until: Instant,
}

/// The lease document as read.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    holder: String,
    epoch: i64,
    released: bool,
    /// All of it, so that any change is noticed.
    document: RawDocumentBuf,
}

/// Waits until the lease is free and takes it, under a new epoch.
///
/// Another holder's lease counts as free when its document did not change for the ttl, counted on
/// this process's own clock from when it was seen, or when it was released.
pub async fn acquire(pool: &Pool, holder: &str, ttl: Duration) -> Result<Lease, ClusterError> {
    let pause = (ttl / LOOKS_A_TTL).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
    let mut watched: Option<(Seen, Instant)> = None;
    loop {
        let found = look(pool).await?;
        // The answer is here: whatever it shows, a later change cannot be in it.
        let now = Instant::now();
        let free = match (&found, &watched) {
            (None, _) => true,
            (Some(found), _) if found.released => true,
            (Some(found), Some((seen, since))) if found == seen => {
                now.saturating_duration_since(*since) >= ttl
            }
            (Some(found), _) => {
                tracing::info!(
                    tier = pool.tier().label(),
                    holder = found.holder,
                    epoch = found.epoch,
                    "another holder has the lease, waiting for it to end"
                );
                watched = Some((found.clone(), now));
                false
            }
        };
        if free && let Some(lease) = take(pool, holder, ttl, found.as_ref()).await? {
            tracing::info!(tier = pool.tier().label(), epoch = lease.epoch, "lease taken");
            return Ok(lease);
        }
        tokio::time::sleep(pause).await;
    }
}

async fn look(pool: &Pool) -> Result<Option<Seen>, ClusterError> {
    let find = rawdoc! {
        "find": COLLECTION,
        "filter": { "_id": LEADER },
        "limit": 1,
        "singleBatch": true,
        "readConcern": { "level": "majority" },
    };
    let reply = pool.run_idempotent(DATABASE, &find).await?;
    let found = reply
        .get("cursor")
        .and_then(|cursor| cursor.as_document()?.get_array("firstBatch").ok()?.get(0).ok()?);
    match found.and_then(|lease| lease.as_document()) {
        None => Ok(None),
        Some(lease) => read(lease).map(Some).ok_or_else(|| unreadable(pool.tier())),
    }
}

fn read(document: &RawDocument) -> Option<Seen> {
    Some(Seen {
        holder: document.get_str("holder").ok()?.to_owned(),
        epoch: number(document.get("epoch").ok()??)?,
        released: document.get_bool("released").ok()?,
        document: document.to_owned(),
    })
}

fn unreadable(tier: Tier) -> ClusterError {
    ClusterError::Config {
        tier,
        message: format!(
            "the document {LEADER:?} in {DATABASE}.{COLLECTION} is not a lease; nothing but \
             halocline may write there. Put back what it was, or, with no halocline running, \
             remove it"
        ),
    }
}

/// Takes the lease if it still is as it was found; `None` if it is not.
async fn take(
    pool: &Pool,
    holder: &str,
    ttl: Duration,
    found: Option<&Seen>,
) -> Result<Option<Lease>, ClusterError> {
    let instance = Uuid::new();
    let epoch = found.map_or(1, |found| found.epoch + 1);
    check_epoch(pool.tier(), epoch)?;
    let document = rawdoc! {
        "_id": LEADER,
        "holder": holder,
        "instance": bson::Binary::from(instance),
        "epoch": epoch,
        "beat": 0_i64,
        "released": false,
    };
    let command = match found {
        None => rawdoc! { "insert": COLLECTION, "documents": [document] },
        // The whole document is compared, not some of its fields.
        Some(found) => rawdoc! {
            "update": COLLECTION,
            "updates": [{
                "q": {
                    "_id": LEADER,
                    "$expr": { "$eq": ["$$ROOT", { "$literal": found.document.clone() }] },
                },
                "u": document,
            }],
        },
    };
    let asked = Instant::now();
    match write(pool, ttl, command).await {
        Ok(0) => Ok(None),
        Ok(_) => Ok(Some(Lease {
            holder: holder.to_owned(),
            instance,
            epoch,
            ttl,
            valid_until: asked + ttl,
        })),
        Err(error) if error.is_duplicate_key() => Ok(None),
        // It may be ours now, without our knowing: it is waited out like anybody's.
        Err(error) if error.outcome_unknown() || error.is_network() => {
            tracing::debug!(tier = pool.tier().label(), %error, "lease not taken");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Runs a write of one lease document, majority-acknowledged; returns how many it touched.
async fn write(
    pool: &Pool,
    limit: Duration,
    mut command: RawDocumentBuf,
) -> Result<i64, ClusterError> {
    let wtimeout = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
    command.append(
        bson::raw::cstr!("writeConcern"),
        rawdoc! { "w": "majority", "wtimeout": wtimeout },
    );
    let reply: Reply = match tokio::time::timeout(limit, pool.run_once(DATABASE, &command)).await {
        Ok(reply) => reply?,
        Err(_) => {
            return Err(ClusterError::TimedOut {
                tier: pool.tier(),
                what: "a majority write of the lease",
                limit,
            });
        }
    };
    reply.require_acknowledged()?;
    Ok(reply.get_number("n").unwrap_or(0))
}

fn check_epoch(tier: Tier, epoch: i64) -> Result<(), ClusterError> {
    if (1..=MAX_EPOCH).contains(&epoch) {
        Ok(())
    } else {
        Err(ClusterError::Config {
            tier,
            message: format!("epoch {epoch} is outside 1 to {MAX_EPOCH}"),
        })
    }
}

impl Lease {
    /// The number of this term; rises with every acquisition and never falls.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// Who holds it.
    pub fn holder(&self) -> &str {
        &self.holder
    }

    /// Until when nobody else can have taken it: the ttl after the last successful request was
    /// *begun*.
    pub fn valid_until(&self) -> Instant {
        self.valid_until
    }

    /// Whether it still holds now.
    pub fn is_valid(&self) -> bool {
        Instant::now() < self.valid_until
    }

    /// Holds it for another ttl. An error leaves [`Self::valid_until`] as it was; unless it is
    /// [`ClusterError::Superseded`], trying again before then is right.
    pub async fn renew(&mut self, pool: &Pool) -> Result<(), ClusterError> {
        let asked = Instant::now();
        self.change(pool, rawdoc! { "$inc": { "beat": 1_i64 } }).await?;
        self.valid_until = asked + self.ttl;
        Ok(())
    }

    /// Goes on under a new epoch, higher than `above` too: for a feeder that starts anew, and for
    /// a fast tier that was rebuilt empty while the archive remembers higher epochs.
    pub async fn next_epoch(&mut self, pool: &Pool, above: i64) -> Result<i64, ClusterError> {
        let epoch = self.epoch.max(above) + 1;
        check_epoch(pool.tier(), epoch)?;
        let asked = Instant::now();
        // By $max, so that a request repeated after an unknown outcome does no harm.
        self.change(pool, rawdoc! { "$max": { "epoch": epoch }, "$inc": { "beat": 1_i64 } })
            .await?;
        self.epoch = epoch;
        self.valid_until = asked + self.ttl;
        Ok(epoch)
    }

    /// Gives it up, so that the next holder need not wait. To be called when nothing acts under
    /// it any more.
    pub async fn release(mut self, pool: &Pool) -> Result<(), ClusterError> {
        self.change(pool, rawdoc! { "$set": { "released": true } }).await
    }

    async fn change(&mut self, pool: &Pool, update: RawDocumentBuf) -> Result<(), ClusterError> {
        let command = rawdoc! {
            "update": COLLECTION,
            "updates": [{
                "q": {
                    "_id": LEADER,
                    "instance": bson::Binary::from(self.instance),
                    "released": false,
                },
                "u": update,
            }],
        };
        match write(pool, self.ttl, command).await? {
            0 => {
                self.valid_until = Instant::now();
                Err(ClusterError::Superseded {
                    tier: pool.tier(),
                    message: format!(
                        "the lease {} held under epoch {} has another holder",
                        self.holder, self.epoch
                    ),
                })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("holder", &self.holder)
            .field("epoch", &self.epoch)
            .field("valid_for", &self.valid_until.saturating_duration_since(Instant::now()))
            .finish_non_exhaustive()
    }
}
