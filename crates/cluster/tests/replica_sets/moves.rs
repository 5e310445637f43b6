//! Move transactions: what the server's conflict detection gives the tiering protocol, on a real
//! server, and that every end of a move leaves nothing behind.

use std::time::Duration;

use bson::raw::{RawBson, RawDocumentBuf};
use bson::{Document, Timestamp, Uuid, doc, rawdoc};
use halocline_cluster::feed::{ChangeFeed, FeedOp, FeedStart};
use halocline_cluster::moves::{Find, Move, MoveSessions, ensure_anchor};
use halocline_cluster::{ClusterError, Pool};
use halocline_testbed::ReplicaSet;
use mongodb::Collection;

use crate::support::{one_member, pool, raw, run, soon, three_members, until};

/// A set with the collection `db.c` and what a mover needs.
struct Stage {
    set: ReplicaSet,
    client: mongodb::Client,
    pool: Pool,
    sessions: MoveSessions,
    uuid: Uuid,
}

impl Stage {
    async fn new(set: ReplicaSet) -> Self {
        let client = set.client().await.unwrap();
        client.database("db").create_collection("c").await.unwrap();
        let pool = pool(&set).await;
        let uuid = uuid(&client).await;
        Stage { set, client, pool, sessions: MoveSessions::default(), uuid }
    }

    async fn one_member() -> Self {
        Self::new(one_member().await).await
    }

    fn coll(&self) -> Collection<Document> {
        self.client.database("db").collection("c")
    }

    async fn open(&self) -> Move {
        Move::open(&self.pool, &self.sessions).await.unwrap()
    }

    async fn insert(&self, moving: &mut Move, document: Document) -> Result<(), ClusterError> {
        moving.insert("db", "c", self.uuid, &[raw(document)]).await
    }

    /// What the collection holds, by `_id`.
    async fn all(&self) -> Vec<RawDocumentBuf> {
        let mut moving = self.open().await;
        let (filter, sort) = (rawdoc! {}, rawdoc! { "_id": 1 });
        moving.find("db", "c", Find { sort: Some(&sort), ..Find::new(&filter) }).await.unwrap()
    }

    async fn count(&self) -> u64 {
        self.coll().count_documents(doc! {}).await.unwrap()
    }

    /// Makes a command fail in a certain way, on every member.
    async fn fail(&self, mode: impl Into<bson::Bson>, data: Document) {
        let command = doc! { "configureFailPoint": "failCommand", "mode": mode, "data": data };
        self.client.database("admin").run_command(command).await.unwrap();
    }

    async fn open_transactions(&self) -> i64 {
        let admin = self.client.database("admin");
        let status = admin.run_command(doc! { "serverStatus": 1 }).await.unwrap();
        status.get_document("transactions").unwrap().get_i64("currentOpen").unwrap()
    }

    async fn nothing_open(&self) {
        soon("transactions end", async {
            while self.open_transactions().await > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }
}

async fn uuid(client: &mongodb::Client) -> Uuid {
    let list = doc! { "listCollections": 1, "filter": { "name": "c" } };
    let reply = client.database("db").run_command(list).await.unwrap();
    let batch = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
    let info = batch[0].as_document().unwrap().get_document("info").unwrap();
    match info.get("uuid").unwrap() {
        bson::Bson::Binary(uuid) => uuid.to_uuid().unwrap(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_key_that_was_written_and_deleted_after_the_snapshot_conflicts() {
    // Without this a deleted document would come back (rules 18 and 27).
    run(async {
        let stage = Stage::one_member().await;
        let mut moving = stage.open().await;
        stage.coll().insert_one(doc! { "_id": "k" }).await.unwrap();
        stage.coll().delete_one(doc! { "_id": "k" }).await.unwrap();
        let error = stage.insert(&mut moving, doc! { "_id": "k" }).await.unwrap_err();
        assert!(error.is_write_conflict() && error.is_transient_transaction(), "{error}");
        assert!(!error.is_duplicate_key());
        let over = moving.commit().await.unwrap_err();
        assert!(matches!(over, ClusterError::Aborted { .. }) && !over.outcome_unknown());
        assert_eq!(stage.count().await, 0);
    });
}

#[test]
fn a_key_that_was_there_at_the_snapshot_is_a_duplicate() {
    run(async {
        let stage = Stage::one_member().await;
        stage.coll().insert_one(doc! { "_id": "k" }).await.unwrap();
        let mut moving = stage.open().await;
        let error = stage.insert(&mut moving, doc! { "_id": "k" }).await.unwrap_err();
        assert!(error.is_duplicate_key() && !error.is_write_conflict(), "{error}");
        moving.abort().await;
        stage.nothing_open().await;
    });
}

#[test]
fn a_key_deleted_before_the_snapshot_may_be_inserted() {
    run(async {
        let stage = Stage::one_member().await;
        stage.coll().insert_one(doc! { "_id": "k" }).await.unwrap();
        stage.coll().delete_one(doc! { "_id": "k" }).await.unwrap();
        let mut moving = stage.open().await;
        stage.insert(&mut moving, doc! { "_id": "k" }).await.unwrap();
        assert_eq!(stage.count().await, 0, "not before the commit");
        moving.commit().await.unwrap();
        assert_eq!(stage.count().await, 1);
    });
}

#[test]
fn a_collection_dropped_or_made_anew_is_not_created_by_a_move() {
    run(async {
        let stage = Stage::one_member().await;
        let mut moving = stage.open().await;
        stage.coll().drop().await.unwrap();
        let error = stage.insert(&mut moving, doc! { "_id": 1 }).await.unwrap_err();
        assert!(error.is_collection_uuid_mismatch(), "{error}");
        drop(moving);
        let names = stage.client.database("db").list_collection_names().await.unwrap();
        assert!(names.is_empty(), "{names:?}");

        stage.client.database("db").create_collection("c").await.unwrap();
        let mut moving = stage.open().await;
        let error = stage.insert(&mut moving, doc! { "_id": 1 }).await.unwrap_err();
        assert!(error.is_collection_uuid_mismatch(), "{error}");
        let mut moving = stage.open().await;
        let error = moving.delete_ids("db", "c", stage.uuid, [1]).await.unwrap_err();
        assert!(error.is_collection_uuid_mismatch(), "{error}");
        assert_eq!(stage.count().await, 0);
    });
}

#[test]
fn the_snapshot_time_is_no_older_than_what_the_snapshot_shows() {
    run(async {
        let stage = Stage::one_member().await;
        for n in 0..50 {
            let insert = rawdoc! {
                "insert": "c", "documents": [{ "_id": n }], "writeConcern": { "w": "majority" },
            };
            let written = stage.pool.run_once("db", &insert).await.unwrap();
            let mut moving = stage.open().await;
            assert!(moving.snapshot_time() >= written.operation_time().unwrap());
            let found = moving.find("db", "c", Find::new(&rawdoc! { "_id": n })).await.unwrap();
            assert_eq!(found.len(), 1);
        }
        stage.nothing_open().await;
    });
}

#[test]
fn a_query_returns_every_batch_of_one_snapshot() {
    run(async {
        let stage = Stage::one_member().await;
        let pad = "x".repeat(20_000);
        let documents = (0..2_000).map(|n| doc! { "_id": n, "pad": &pad });
        stage.coll().insert_many(documents).await.unwrap();
        let mut moving = stage.open().await;
        stage.coll().delete_many(doc! { "_id": { "$gte": 1_000 } }).await.unwrap();
        let all = moving.find("db", "c", Find::new(&rawdoc! {})).await.unwrap();
        assert_eq!(all.len(), 2_000);
        let (filter, projection) = (rawdoc! { "_id": { "$lt": 10 } }, rawdoc! { "_id": 1 });
        let sort = rawdoc! { "_id": -1 };
        let some = Find {
            projection: Some(&projection),
            sort: Some(&sort),
            limit: Some(3),
            hint: Some(bson::raw::RawBsonRef::String("_id_")),
            ..Find::new(&filter)
        };
        let some = moving.find("db", "c", some).await.unwrap();
        assert_eq!(some, [rawdoc! { "_id": 9 }, rawdoc! { "_id": 8 }, rawdoc! { "_id": 7 }]);
    });
}

#[test]
fn documents_beyond_one_message_are_inserted_in_one_transaction() {
    run(async {
        // In a small cache the server refuses such a transaction with a write conflict.
        let set = ReplicaSet::builder().name("fast").cache_mb(1024).start().await.unwrap();
        let stage = Stage::new(set).await;
        let pad = "y".repeat(13_000_000);
        let documents: Vec<RawDocumentBuf> =
            (0..4).map(|n| raw(doc! { "_id": n, "pad": &pad })).collect();
        let mut moving = stage.open().await;
        moving.insert("db", "c", stage.uuid, &documents).await.unwrap();
        moving.commit().await.unwrap();
        let found = stage.all().await;
        assert!(found == documents);
    });
}

#[test]
fn documents_keep_their_bytes() {
    run(async {
        let stage = Stage::one_member().await;
        let never = Timestamp { time: 0, increment: 0 };
        let documents = [
            raw(doc! { "_id": 1, "$odd": 1, "a.b": 2, "": 3, "x": { "$y": { ".": 4 } } }),
            raw(doc! { "_id": 2, "stamp": never, "later": 1, "inner": { "stamp": never } }),
            raw(doc! { "_id": { "b": 1, "a": 2 }, "stamp": never, "$odd": 1, "a.b": [never] }),
            raw(doc! { "_id": never, "nan": f64::NAN, "negative": -0.0 }),
        ];
        let mut moving = stage.open().await;
        moving.insert("db", "c", stage.uuid, &documents).await.unwrap();
        moving.commit().await.unwrap();
        let mut found = stage.all().await;
        found.sort_by_key(|document| documents.iter().position(|own| own == document));
        assert_eq!(found, documents);

        // The way around the server's rewriting guards keys as an insert does.
        let mut moving = stage.open().await;
        let present = [raw(doc! { "_id": 2, "stamp": never })];
        let error = moving.insert("db", "c", stage.uuid, &present).await.unwrap_err();
        assert!(error.is_duplicate_key(), "{error}");
        let mut moving = stage.open().await;
        stage.coll().insert_one(doc! { "_id": 9 }).await.unwrap();
        stage.coll().delete_one(doc! { "_id": 9 }).await.unwrap();
        let gone = [raw(doc! { "_id": 9, "stamp": never })];
        let error = moving.insert("db", "c", stage.uuid, &gone).await.unwrap_err();
        assert!(error.is_write_conflict(), "{error}");
        let mut moving = stage.open().await;
        stage.coll().drop().await.unwrap();
        let error = moving.insert("db", "c", stage.uuid, &gone).await.unwrap_err();
        assert!(error.is_collection_uuid_mismatch(), "{error}");
    });
}

#[test]
fn ids_of_any_type_are_deleted_and_counted() {
    run(async {
        let stage = Stage::one_member().await;
        let ids: Vec<bson::Bson> = vec![
            bson::Bson::Null,
            bson::bson!({}),
            bson::bson!({ "x": 1, "y": 2 }),
            bson::bson!({ "y": 2, "x": 1 }),
            bson::Bson::Binary(bson::Binary {
                subtype: bson::spec::BinarySubtype::UuidOld,
                bytes: vec![1; 16],
            }),
            bson::Bson::Binary(Uuid::new().into()),
            "z".repeat(5_000).into(),
            1.5.into(),
            bson::Bson::Int64(1 << 40),
        ];
        stage.coll().insert_many(ids.iter().map(|id| doc! { "_id": id })).await.unwrap();
        stage.coll().insert_one(doc! { "_id": "stays" }).await.unwrap();
        let mut moving = stage.open().await;
        let raw_ids: Vec<RawBson> = ids.into_iter().map(|id| id.try_into().unwrap()).collect();
        let mut asked = raw_ids.clone();
        asked.push(RawBson::String("not there".into()));
        assert_eq!(moving.delete_ids("db", "c", stage.uuid, asked).await.unwrap(), 9);
        let none: [i32; 0] = [];
        assert_eq!(moving.delete_ids("db", "c", stage.uuid, none).await.unwrap(), 0);
        moving.commit().await.unwrap();
        assert_eq!(stage.count().await, 1);
    });
}

#[test]
fn two_moves_that_write_the_same_boundary_conflict() {
    // Warming and evicting must not interleave (rule 28).
    run(async {
        let stage = Stage::one_member().await;
        let query = rawdoc! { "_id": "db.c" };
        let set = |n: i32| rawdoc! { "$set": { "boundary": n } };
        let mut first = stage.open().await;
        assert_eq!(first.update_one("db", "c", &query, &set(1), false).await.unwrap(), 0);
        assert_eq!(first.update_one("db", "c", &query, &set(1), true).await.unwrap(), 1);
        let mut second = stage.open().await;
        let error = second.update_one("db", "c", &query, &set(2), true).await.unwrap_err();
        assert!(error.is_write_conflict(), "{error}");
        first.commit().await.unwrap();
        let mut third = stage.open().await;
        assert_eq!(third.update_one("db", "c", &query, &set(3), false).await.unwrap(), 1);
        third.commit().await.unwrap();
    });
}

#[test]
fn a_dropped_move_is_aborted_and_its_session_used_again() {
    run(async {
        let stage = Stage::one_member().await;
        for n in 0..10 {
            let mut moving = stage.open().await;
            stage.insert(&mut moving, doc! { "_id": n }).await.unwrap();
            assert_eq!(stage.open_transactions().await, 1);
            drop(moving);
            stage.nothing_open().await;
            // Nothing blocks or conflicts with the key any more.
            stage.coll().insert_one(doc! { "_id": n }).await.unwrap();
        }
        until("the abort is answered", || format!("{:?}", stage.sessions).contains("free: 1"))
            .await;
        assert_eq!(stage.count().await, 10);

        // Dropped in the middle of an operation.
        let mut moving = stage.open().await;
        let document = raw(doc! { "_id": "cut" });
        let held = doc! {
            "failCommands": ["insert"], "blockConnection": true, "blockTimeMS": 600_000,
        };
        stage.fail(doc! { "times": 1 }, held).await;
        let cut = moving.insert("db", "c", stage.uuid, std::slice::from_ref(&document));
        assert!(tokio::time::timeout(Duration::from_millis(20), cut).await.is_err());
        drop(moving);
        stage.nothing_open().await;
        assert_eq!(stage.count().await, 10);
    });
}

#[test]
fn a_commit_whose_connection_broke_is_sent_again() {
    run(async {
        let stage = Stage::one_member().await;
        let mut moving = stage.open().await;
        stage.insert(&mut moving, doc! { "_id": 1 }).await.unwrap();
        let broken = doc! { "failCommands": ["commitTransaction"], "closeConnection": true };
        stage.fail(doc! { "times": 2 }, broken).await;
        soon("the commit", moving.commit()).await.unwrap();
        assert_eq!(stage.count().await, 1);

        // Executed, but the acknowledgement says that it might not last.
        let mut moving = stage.open().await;
        stage.insert(&mut moving, doc! { "_id": 2 }).await.unwrap();
        let unsure = doc! {
            "failCommands": ["commitTransaction"],
            "writeConcernError": { "code": 91, "errmsg": "shutting down" },
        };
        stage.fail(doc! { "times": 2 }, unsure).await;
        soon("the commit", moving.commit()).await.unwrap();
        assert_eq!(stage.count().await, 2);
    });
}

#[test]
fn the_outcome_of_a_commit_is_found_out_after_a_crash() {
    run(async {
        // Not executed before the crash.
        let stage = Stage::one_member().await;
        let mut moving = stage.open().await;
        stage.insert(&mut moving, doc! { "_id": 1 }).await.unwrap();
        let held = doc! {
            "failCommands": ["commitTransaction"], "blockConnection": true, "blockTimeMS": 600_000,
        };
        stage.fail("alwaysOn", held).await;
        let commit = tokio::task::spawn_local(moving.commit());
        until("the commit is under way", || stage.pool.stats().in_use == 1).await;
        stage.set.kill9(0);
        stage.set.restart(0).await.unwrap();
        let error = soon("the commit", commit).await.unwrap().unwrap_err();
        assert!(error.server().unwrap().is_no_such_transaction(), "{error}");
        assert_eq!(stage.count().await, 0);

        // Executed and durable before the crash, but not acknowledged.
        let stage = Stage::one_member().await;
        let mut moving = stage.open().await;
        stage.insert(&mut moving, doc! { "_id": 1 }).await.unwrap();
        let unsure = doc! {
            "failCommands": ["commitTransaction"],
            "writeConcernError": { "code": 91, "errmsg": "shutting down" },
        };
        stage.fail("alwaysOn", unsure).await;
        let commit = tokio::task::spawn_local(moving.commit());
        let majority = mongodb::options::ReadConcern::majority();
        soon("the commit takes effect", async {
            let coll = stage.coll();
            let find = || coll.find_one(doc! {}).read_concern(majority.clone());
            while find().await.unwrap().is_none() {}
        })
        .await;
        stage.set.kill9(0);
        stage.set.restart(0).await.unwrap();
        soon("the commit", commit).await.unwrap().unwrap();
        assert_eq!(stage.count().await, 1);
    });
}

#[test]
fn a_move_does_not_outlive_its_primary() {
    run(async {
        let stage = Stage::new(three_members().await).await;
        ensure_anchor(&stage.pool).await.unwrap();
        let mut moving = stage.open().await;
        stage.insert(&mut moving, doc! { "_id": 1 }).await.unwrap();
        stage.set.step_down().await.unwrap();
        let error = soon("the commit", moving.commit()).await.unwrap_err();
        assert!(error.server().unwrap().is_no_such_transaction(), "{error}");
        let mut moving = soon("another move", stage.open()).await;
        stage.insert(&mut moving, doc! { "_id": 1 }).await.unwrap();
        moving.commit().await.unwrap();
    });
}

#[test]
fn the_anchor_is_made_when_it_is_missing() {
    run(async {
        let stage = Stage::one_member().await;
        for _ in 0..2 {
            let moving = stage.open().await;
            assert!(moving.snapshot_time().time > 0);
            drop(moving);
            stage.nothing_open().await;
            stage.client.database("halocline").drop().await.unwrap();
        }
    });
}

#[test]
fn the_feed_tells_moves_from_clients_transactions() {
    // An eviction that looked like a client's delete would delete the document everywhere (rule 9).
    run(async {
        let stage = Stage::one_member().await;
        ensure_anchor(&stage.pool).await.unwrap();
        stage.coll().insert_one(doc! { "_id": "evicted" }).await.unwrap();
        let moving = stage.open().await;
        let start = FeedStart::At(moving.snapshot_time());
        drop(moving);
        let mut feed = ChangeFeed::open(&stage.pool, start, &[("db", "c")]).await.unwrap();

        let mut moving = stage.open().await;
        stage.insert(&mut moving, doc! { "_id": "moved" }).await.unwrap();
        moving.delete_ids("db", "c", stage.uuid, ["evicted"]).await.unwrap();
        moving.commit().await.unwrap();
        let mut session = stage.client.start_session().await.unwrap();
        session.start_transaction().await.unwrap();
        stage.coll().delete_one(doc! { "_id": "moved" }).session(&mut session).await.unwrap();
        session.commit_transaction().await.unwrap();
        let mut visible = Move::open(&stage.pool, &MoveSessions::visible()).await.unwrap();
        stage.insert(&mut visible, doc! { "_id": "ours" }).await.unwrap();
        visible.commit().await.unwrap();
        stage.coll().insert_one(doc! { "_id": "plain" }).await.unwrap();

        let mut seen = Vec::new();
        soon("all events", async {
            while seen.last().is_none_or(|(_, key, _)| key != "plain") {
                let batch = feed.next_batch(Duration::from_millis(100)).await.unwrap();
                seen.extend(batch.events.into_iter().map(|event| {
                    let key = event.key.as_str().unwrap_or_default().to_owned();
                    (event.op, key, event.is_move)
                }));
            }
        })
        .await;
        let expected = [
            // Between the snapshot's time and its own is where the first insert may lie.
            (FeedOp::Insert, "moved", true),
            (FeedOp::Delete, "evicted", true),
            (FeedOp::Delete, "moved", false),
            (FeedOp::Insert, "ours", false),
            (FeedOp::Insert, "plain", false),
        ];
        let tail = &seen[seen.len() - expected.len()..];
        for ((op, key, is_move), seen) in expected.iter().zip(tail) {
            assert_eq!((op, *key, is_move), (&seen.0, seen.1.as_str(), &seen.2));
        }
    });
}
