//! Where a collection's boundary is kept: one document on the fast tier, lost with the fast tier
//! itself, so that nothing claims completeness that is not there (protocol rule 28).

use bson::raw::RawDocumentBuf;
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
        })
    });
    if let Some(stored) = stored {
        return Ok(stored);
    }
    let epoch = found.first().and_then(|d| d.get_i64("raise_epoch").ok()).unwrap_or(0) + 1;
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
    connection.run(DATABASE, &begin).await?;
    Ok(Stored { complete_from: None, raise_epoch: epoch })
}

/// Raises the boundary before anything below it goes (rules 26, 29, 30). Returns what is stored
/// then: someone else may have raised it further.
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
            "q": { "_id": collection.name.as_str(), "complete_from": { "$lt": to.0 } },
            "u": { "$set": { "complete_from": to.0 }, "$inc": { "raise_epoch": 1_i64 } },
        }],
        "writeConcern": { "w": "majority" },
    };
    let mut connection = context.fast.primary().await?;
    connection.run(DATABASE, &update).await?;
    drop(connection);
    load(context, collection).await
}

/// Makes a move conflict with every other move and raise of the collection, and lowers the
/// boundary if `complete_from` is given. `false`: the boundary was raised since `stored` was read.
///
/// # Errors
/// When the fast tier does not answer, or another move is committing.
pub async fn write_in(
    moving: &mut Move,
    collection: &Collection,
    stored: Stored,
    complete_from: Option<DatePoint>,
) -> Result<bool, ClusterError> {
    let query = rawdoc! { "_id": collection.name.as_str(), "raise_epoch": stored.raise_epoch };
    let mut update: RawDocumentBuf = rawdoc! { "$inc": { "moves": 1_i64 } };
    if let Some(from) = complete_from {
        update.append(bson::cstr!("$set"), rawdoc! { "complete_from": from.0 });
    }
    Ok(moving.update_one(DATABASE, COLLECTION, &query, &update, false).await? == 1)
}
