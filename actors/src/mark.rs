//! The feeder's persisted position. It lives in the archive, with the data it describes: an
//! archive restored from a backup resumes from that backup's position.

use bson::rawdoc;
use halocline_cluster::ClusterError;
use halocline_cluster::feed::ResumeToken;
use halocline_tiering::time::ClusterTime;

use crate::context::ThreadContext;
use crate::fetch::find_all;

/// Everything before `time` is on the archive.
#[derive(Debug, Clone)]
pub struct Mark {
    /// Events before this time are applied; those at it may not be.
    pub time: ClusterTime,
    /// The change stream's token at that time; `None` before the first event.
    pub token: Option<ResumeToken>,
}

const DATABASE: &str = "halocline";
const COLLECTION: &str = "feeder";

impl Mark {
    /// Reads the position of this fast tier's feeder. A fast tier that never had one begins at
    /// `now`, which is written down before it is used.
    ///
    /// # Errors
    /// When the archive does not answer.
    pub async fn load(context: &ThreadContext, now: ClusterTime) -> Result<Self, ClusterError> {
        let find = rawdoc! {
            "find": COLLECTION,
            "filter": { "_id": context.shared.fast.set_name() },
            "limit": 1,
            "readConcern": { "level": "majority" },
        };
        let mut connection = context.archive.primary().await?;
        let (found, _) = find_all(&mut connection, DATABASE, &find).await?;
        drop(connection);
        let stored = found.first().and_then(|mark| mark.get_timestamp("time").ok());
        if let Some(time) = stored {
            return Ok(Self { time: time.into(), token: None });
        }
        let first = Self { time: now, token: None };
        first.save(context, 0).await?;
        Ok(first)
    }

    /// Writes the position, durable at majority. A feeder of an older epoch cannot overwrite it.
    ///
    /// # Errors
    /// When the archive does not answer or a newer feeder has written.
    pub async fn save(&self, context: &ThreadContext, epoch: i64) -> Result<(), ClusterError> {
        let time: bson::Timestamp = self.time.into();
        let mut fields = rawdoc! { "time": time, "epoch": epoch };
        if let Some(token) = &self.token {
            fields.append(bson::cstr!("token"), token.as_raw().to_owned());
        }
        let update = rawdoc! {
            "update": COLLECTION,
            "updates": [{
                "q": {
                    "_id": context.shared.fast.set_name(),
                    "$or": [{ "epoch": { "$lte": epoch } }, { "epoch": { "$exists": false } }],
                },
                "u": { "$set": fields, "$currentDate": { "wall": true } },
                "upsert": true,
            }],
            "writeConcern": { "w": "majority" },
        };
        let mut connection = context.archive.primary().await?;
        let reply = connection.run(DATABASE, &update).await?;
        let refused = reply.write_errors().into_iter().next().map(|failed| failed.error);
        match refused.or_else(|| reply.write_concern_error()) {
            None => Ok(()),
            Some(error) => Err(ClusterError::Server(Box::new(error))),
        }
    }
}
