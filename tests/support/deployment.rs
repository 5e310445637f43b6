//! Two replica sets, and documents put into the archive before a daemon runs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use halocline_testbed::ReplicaSet;
use mongodb::bson::{DateTime, Document, RawDocumentBuf, doc};
use mongodb::{Client, Collection, Database};

use super::PATIENCE;
use super::truth::{Truth, fresh_document};

/// Database of the tiered collection.
pub const DB: &str = "shop";
/// The tiered collection.
pub const COLL: &str = "orders";
/// Both.
pub const NS: &str = "shop.orders";

/// A fast tier and an archive, with direct clients of both.
pub struct Pair {
    pub fast: ReplicaSet,
    pub archive: ReplicaSet,
    pub fast_client: Client,
    pub archive_client: Client,
}

impl Pair {
    /// Two sets with so many members each.
    pub async fn start(members: usize) -> Pair {
        let set = |name: &str| {
            ReplicaSet::builder().name(name).members(members).cache_mb(128).oplog_mb(128).start()
        };
        let (fast, archive) = tokio::join!(set("fast"), set("archive"));
        let (fast, archive) = (fast.unwrap(), archive.unwrap());
        let (fast_client, archive_client) =
            (fast.client().await.unwrap(), archive.client().await.unwrap());
        Pair { fast, archive, fast_client, archive_client }
    }

    /// The tiered collection on the fast tier, past the daemon.
    pub fn on_fast(&self) -> Collection<RawDocumentBuf> {
        self.fast_client.database(DB).collection(COLL)
    }

    /// The tiered collection on the archive, past the daemon.
    pub fn on_archive(&self) -> Collection<RawDocumentBuf> {
        self.archive_client.database(DB).collection(COLL)
    }

    /// Fills the archive with documents of `owners` owners in turn, with the given ages in seconds
    /// (negative: in the future), and makes the index on the date. The fast tier stays empty.
    pub async fn seed(&self, truth: &Truth, owners: i32, ages: impl Iterator<Item = f64>) {
        let index = doc! { "createIndexes": COLL, "indexes": [
            { "key": { "at": -1 }, "name": "at" },
            { "key": { "owner": 1, "at": -1 }, "name": "owner_at" },
        ] };
        let mut documents = Vec::new();
        for (age, owner) in ages.zip((0..owners).cycle()) {
            documents.push(truth.seed(owner, |n, id| fresh_document(n, id, owner, date(age))));
        }
        self.archive_client.database(DB).run_command(index).await.unwrap();
        for batch in documents.chunks(1000) {
            self.on_archive().insert_many(batch).await.unwrap();
        }
        let there = self.on_fast().estimated_document_count().await.unwrap();
        assert_eq!(there, 0, "the fast tier starts empty");
    }

    /// Makes the archive refuse every write of the tiered collection, or take them again. It answers
    /// everything else.
    pub async fn refuse_mirroring(&self, refuse: bool) {
        let mut fail = doc! {
            "configureFailPoint": "failCommand",
            "mode": if refuse { "alwaysOn" } else { "off" },
        };
        if refuse {
            let commands = ["update", "delete", "insert"];
            // 96 OperationFailed.
            fail.insert(
                "data",
                doc! { "failCommands": commands, "namespace": NS, "errorCode": 96 },
            );
        }
        self.archive_client.database("admin").run_command(fail).await.unwrap();
    }

    /// Makes the fast tier's only member hold every one of these commands on the tiered collection
    /// for a while before it runs them.
    pub async fn hold(&self, commands: &[&str], hold: Duration) -> Held {
        let hold = i32::try_from(hold.as_millis()).unwrap();
        let admin = self.fast_client.database("admin");
        let reply = admin
            .run_command(doc! { "configureFailPoint": "failCommand", "mode": "alwaysOn", "data": {
                "failCommands": commands, "namespace": NS,
                "blockConnection": true, "blockTimeMS": hold,
            } })
            .await
            .unwrap();
        Held { admin, before: reply.get_i32("count").unwrap() }
    }

    /// A document of the daemon's own on a tier.
    pub async fn own_document(&self, client: &Client, coll: &str, id: &str) -> Option<Document> {
        let own = client.database("halocline").collection::<Document>(coll);
        own.find_one(doc! { "_id": id }).await.unwrap()
    }
}

/// A member that holds commands; see [`Pair::hold`].
pub struct Held {
    admin: Database,
    before: i32,
}

impl Held {
    /// Waits until so many have been held, or are.
    pub async fn wait_for(&self, commands: i32) {
        let patience = i32::try_from(PATIENCE.as_millis()).unwrap();
        let wait = doc! {
            "waitForFailPoint": "failCommand",
            "timesEntered": self.before + commands,
            "maxTimeMS": patience,
        };
        self.admin.run_command(wait).await.unwrap();
    }

    /// Holds no more; what is held goes on when its time is over.
    pub async fn end(self) {
        let off = doc! { "configureFailPoint": "failCommand", "mode": "off" };
        self.admin.run_command(off).await.unwrap();
    }
}

/// Now, as this machine's clock says; the servers use the same.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

/// The date so many seconds ago.
pub fn date(age: f64) -> DateTime {
    #[allow(clippy::cast_possible_truncation)]
    DateTime::from_millis(((now() - age) * 1000.0) as i64)
}
