//! Where a collection's boundary is kept: one document on the fast tier, lost with the fast tier
//! itself, so that nothing claims completeness that is not there (protocol rule 28).

use bson::raw::{RawArrayBuf, RawBson};
use bson::rawdoc;
use halocline_cluster::ClusterError;
use halocline_cluster::moves::Move;
use halocline_tiering::{DateKind, DatePoint};

use crate::context::ThreadContext;
use crate::fetch::find_all;
use crate::shared::Collection;

const DATABASE: &str = "halocline";
const COLLECTION: &str = "boundaries";

/// The stored boundary of one collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// The fast tier holds every document from here on; `None`: nothing is complete.
    pub complete_from: Option<DatePoint>,
    /// Rises with every raise. A move that began under an older one does not commit.
    pub raise_epoch: i64,
    /// How many evictions there were.
    pub evictions: i64,
}

/// What a move does to the range that the boundary speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Copies documents; the boundary stays.
    Copies,
    /// The range is complete from here on.
    Lowers(DatePoint),
    /// Takes away documents older than this; `None`: documents without a date, which are in no
    /// range.
    Evicts(Option<DatePoint>),
}

/// What a stored boundary speaks of: it means nothing for another field or kind of date.
fn meaning(collection: &Collection) -> String {
    let kind = match collection.date.kind() {
        DateKind::Date => "date",
        DateKind::ObjectId => "objectid",
        DateKind::EpochSeconds => "epoch_seconds",
        DateKind::EpochMillis => "epoch_millis",
    };
    format!("{}:{kind}", collection.date.path())
}

/// Which copy of the collection it speaks of: a dropped and recreated one is empty.
fn incarnation(collection: &Collection) -> String {
    collection.fast_uuid.load().as_deref().map(ToString::to_string).unwrap_or_default()
}

/// Reads the stored boundary; begins with "nothing is complete" if there is none, or if it was of
/// another date field or of a collection that has been dropped since.
///
/// # Errors
/// When the fast tier does not answer.
pub async fn load(
    context: &ThreadContext,
    collection: &Collection,
) -> Result<Stored, ClusterError> {
    let find = rawdoc! {
        "find": COLLECTION,
        "filter": { "_id": collection.name.as_str() },
        "limit": 1,
        "readConcern": { "level": "majority" },
    };
    let mut connection = context.fast.primary().await?;
    let (found, _) = find_all(&mut connection, DATABASE, &find).await?;
    let stored = found.first().and_then(|document| {
        let same = document.get_str("date").ok() == Some(meaning(collection).as_str())
            && document.get_str("uuid").ok() == Some(incarnation(collection).as_str());
        same.then(|| Stored {
            complete_from: document.get_i64("complete_from").ok().map(DatePoint),
            raise_epoch: document.get_i64("raise_epoch").unwrap_or(0),
            evictions: document.get_i64("evictions").unwrap_or(0),
        })
    });
    if let Some(stored) = stored {
        return Ok(stored);
    }
    let number = |name| found.first().and_then(|d| d.get_i64(name).ok()).unwrap_or(0);
    let (epoch, evictions) = (number("raise_epoch") + 1, number("evictions"));
    let begin = rawdoc! {
        "update": COLLECTION,
        "updates": [{
            "q": { "_id": collection.name.as_str() },
            "u": {
                "$set": {
                    "date": meaning(collection),
                    "uuid": incarnation(collection),
                    "raise_epoch": epoch,
                },
                "$unset": { "complete_from": "" },
            },
            "upsert": true,
        }],
        "writeConcern": { "w": "majority" },
    };
    connection.run(DATABASE, &begin).await?.require_acknowledged()?;
    Ok(Stored { complete_from: None, raise_epoch: epoch, evictions })
}

/// Makes this daemon the one that raises the boundary and moves documents under it. Whoever did
/// before it and does not know yet that it no longer leads (rule 32) can do neither: it would evict
/// what this daemon takes for covered. Returns what is stored then.
///
/// # Errors
/// When the fast tier does not answer.
pub async fn claim(
    context: &ThreadContext,
    collection: &Collection,
) -> Result<Stored, ClusterError> {
    // There must be one to claim.
    load(context, collection).await?;
    let update = rawdoc! {
        "update": COLLECTION,
        "updates": [{
            "q": { "_id": collection.name.as_str() },
            "u": { "$set": { "owner": bson::Binary::from(context.shared.instance) } },
        }],
        "writeConcern": { "w": "majority" },
    };
    let mut connection = context.fast.primary().await?;
    connection.run(DATABASE, &update).await?.require_acknowledged()?;
    drop(connection);
    load(context, collection).await
}

/// Raises the boundary before anything below it goes (rules 26, 29, 30), unless it has another
/// owner by now. Returns what is stored then.
///
/// # Errors
/// When the fast tier does not answer.
pub async fn raise(
    context: &ThreadContext,
    collection: &Collection,
    to: DatePoint,
) -> Result<Stored, ClusterError> {
    let update = rawdoc! {
        "update": COLLECTION,
        "updates": [{
            "q": {
                "_id": collection.name.as_str(),
                "owner": bson::Binary::from(context.shared.instance),
                "complete_from": { "$lt": to.0 },
            },
            "u": { "$set": { "complete_from": to.0 }, "$inc": { "raise_epoch": 1_i64 } },
        }],
        "writeConcern": { "w": "majority" },
    };
    let mut connection = context.fast.primary().await?;
    connection.run(DATABASE, &update).await?.require_acknowledged()?;
    drop(connection);
    load(context, collection).await
}

/// Makes a move conflict with every other move and raise of the collection, and writes down what it
/// does to the range. `false`: it must not commit. The boundary was raised since `stored` was read;
/// or it has another owner; or the move would make it speak untrue: by evicting what it covers (it
/// may have been lowered since the round began), or by lowering it over documents that were evicted
/// since, which the archive may not have had when it was asked what to copy.
///
/// # Errors
/// When the fast tier does not answer, or another move is committing.
pub async fn write_in(
    context: &ThreadContext,
    moving: &mut Move,
    collection: &Collection,
    stored: Stored,
    effect: Effect,
) -> Result<bool, ClusterError> {
    let mut query = rawdoc! {
        "_id": collection.name.as_str(),
        "raise_epoch": stored.raise_epoch,
        "owner": bson::Binary::from(context.shared.instance),
    };
    let update = match effect {
        Effect::Copies | Effect::Evicts(None) => rawdoc! { "$inc": { "moves": 1_i64 } },
        Effect::Lowers(to) => {
            let untouched = rawdoc! { "evicted_to": { "$not": { "$gt": to.0 } } };
            // Missing as long as nothing was evicted.
            let unchanged = rawdoc! { "evictions": { "$in": [stored.evictions, RawBson::Null] } };
            query.append(
                bson::cstr!("$or"),
                [untouched, unchanged].into_iter().collect::<RawArrayBuf>(),
            );
            rawdoc! { "$inc": { "moves": 1_i64 }, "$set": { "complete_from": to.0 } }
        }
        Effect::Evicts(Some(below)) => {
            let uncovered = rawdoc! { "$not": { "$lt": below.0 } };
            query.append(bson::cstr!("complete_from"), uncovered);
            rawdoc! {
                "$inc": { "moves": 1_i64, "evictions": 1_i64 },
                "$max": { "evicted_to": below.0 },
            }
        }
    };
    Ok(moving.update_one(DATABASE, COLLECTION, &query, &update, false).await? == 1)
}
