//! The change feed: nothing lost, nothing out of order, nothing claimed that is not there, through
//! elections, killed cursors and transactions larger than a batch.

use std::time::Duration;

use bson::raw::RawBson;
use bson::{Document, Timestamp, doc, rawdoc};
use halocline_cluster::Pool;
use halocline_cluster::feed::{
    ChangeFeed, Definition, FeedBatch, FeedError, FeedEvent, FeedOp, FeedStart, ResumeToken,
};
use halocline_testbed::ReplicaSet;

use crate::support::{one_member, pool, run, soon, three_members};

const WAIT: Duration = Duration::from_millis(100);

/// Follows a feed and checks, batch by batch, what every batch promises.
struct Follower {
    pool: Pool,
    feed: ChangeFeed,
    batch_size: i32,
    names: Vec<(&'static str, &'static str)>,
    through: Timestamp,
    token: Option<ResumeToken>,
    events: Vec<FeedEvent>,
}

impl Follower {
    async fn start(
        pool: &Pool,
        names: &[(&'static str, &'static str)],
        batch_size: i32,
    ) -> Follower {
        let start = FeedStart::At(now(pool).await);
        let feed = ChangeFeed::open_with(pool, start, names, batch_size).await.unwrap();
        Follower {
            pool: pool.clone(),
            feed,
            batch_size,
            names: names.to_vec(),
            through: Timestamp { time: 0, increment: 0 },
            token: None,
            events: Vec::new(),
        }
    }

    async fn step(&mut self) -> Result<FeedBatch, FeedError> {
        let batch = soon("a batch", self.feed.next_batch(WAIT)).await?;
        for event in &batch.events {
            assert!(
                event.time > self.through,
                "an event of {} came after everything through {} was promised",
                event.time,
                self.through
            );
            if let Some(last) = self.events.last() {
                assert!(event.time >= last.time);
            }
            assert!(event.bytes > 0);
            self.events.push(event.clone());
        }
        assert!(batch.through >= self.through, "the promise never goes back");
        self.through = batch.through;
        self.token = Some(batch.token.clone());
        Ok(batch)
    }

    async fn reopen(&mut self) {
        let token = self.token.clone().unwrap();
        assert_eq!(ResumeToken::new(token.as_raw().to_owned()), token, "it can be kept");
        self.feed = soon("the feed opens again", async {
            loop {
                let start = FeedStart::Resume(token.clone());
                match ChangeFeed::open_with(&self.pool, start, &self.names, self.batch_size).await {
                    Ok(feed) => return feed,
                    Err(FeedError::Resumable(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        })
        .await;
    }

    /// Follows until everything up to a time is in.
    async fn until_through(&mut self, time: Timestamp) {
        soon("the feed comes that far", async {
            while self.through < time {
                self.step().await.unwrap();
            }
        })
        .await;
    }

    fn keys(&self) -> Vec<RawBson> {
        self.events.iter().map(|event| event.key.clone()).collect()
    }
}

/// The set's time after a write of its own.
async fn now(pool: &Pool) -> Timestamp {
    let touch = rawdoc! {
        "update": "heartbeat",
        "updates": [{ "q": { "_id": 1 }, "u": { "$inc": { "n": 1 } }, "upsert": true }],
        "writeConcern": { "w": "majority" },
    };
    pool.run_once("halocline", &touch).await.unwrap().operation_time().unwrap()
}

async fn run_on(set: &ReplicaSet, db: &str, command: Document) -> Document {
    set.client().await.unwrap().database(db).run_command(command).await.unwrap()
}

#[test]
fn every_kind_of_change_is_told_with_its_key() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "c"), ("db", "d")], 1000).await;
        let client = set.client().await.unwrap();
        let coll = client.database("db").collection::<Document>("c");
        coll.insert_one(doc! { "_id": { "a": 1, "b": "x" }, "v": 1 }).await.unwrap();
        coll.update_one(doc! {}, doc! { "$set": { "v": 2 } }).await.unwrap();
        coll.replace_one(doc! {}, doc! { "v": 3 }).await.unwrap();
        coll.delete_one(doc! {}).await.unwrap();
        client.database("db").collection("unwatched").insert_one(doc! {}).await.unwrap();
        let index = doc! { "createIndexes": "c", "indexes": [{ "key": { "v": 1 }, "name": "v" }] };
        run_on(&set, "db", index).await;
        let modify = doc! { "collMod": "c", "index": { "name": "v", "hidden": true } };
        run_on(&set, "db", modify).await;
        run_on(&set, "db", doc! { "dropIndexes": "c", "index": "v" }).await;
        let rename = doc! { "renameCollection": "db.c", "to": "db.d" };
        run_on(&set, "admin", rename).await;
        run_on(&set, "admin", doc! { "renameCollection": "db.unwatched", "to": "db.c" }).await;
        run_on(&set, "db", doc! { "drop": "d" }).await;
        run_on(&set, "db", doc! { "dropDatabase": 1 }).await;
        let end = now(&pool).await;
        let after = now(&pool).await;
        follower.until_through(end).await;
        assert!(follower.through < after || follower.events.iter().any(|e| e.time == after));

        let told: Vec<_> = follower
            .events
            .iter()
            .filter(|event| event.db != "halocline")
            .map(|event| (event.op.clone(), event.coll.as_str()))
            .collect();
        let ddl = FeedOp::Ddl;
        let rename = |coll: &str| Definition::Rename { db: "db".into(), coll: coll.into() };
        let expected = [
            (ddl(Definition::Create), "c"),
            (FeedOp::Insert, "c"),
            (FeedOp::Update, "c"),
            (FeedOp::Replace, "c"),
            (FeedOp::Delete, "c"),
            (ddl(Definition::CreateIndexes), "c"),
            (ddl(Definition::Modify), "c"),
            (ddl(Definition::DropIndexes), "c"),
            (ddl(rename("d")), "c"),
            (ddl(rename("c")), "unwatched"),
            (ddl(Definition::Drop), "d"),
            (ddl(Definition::Drop), "c"),
            (ddl(Definition::DropDatabase), ""),
        ];
        assert_eq!(told, expected);
        let key = RawBson::Document(rawdoc! { "a": 1, "b": "x" });
        for event in &follower.events {
            match event.op {
                FeedOp::Ddl(_) => assert_eq!(event.key, RawBson::Undefined),
                _ if event.db == "db" => assert_eq!(event.key, key),
                _ => {}
            }
            assert!(!event.is_move && event.wall_time.is_some());
        }
        let indexes = &follower.events.iter().find(|e| e.op == ddl(Definition::CreateIndexes));
        let spec = indexes.unwrap().description.as_ref().unwrap();
        assert!(spec.get_array("indexes").is_ok());
    });
}

#[test]
fn a_transaction_larger_than_a_batch_is_not_promised_before_it_is_whole() {
    // Promised too early, a key of the transaction would pass for not pending (rule 1).
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let client = set.client().await.unwrap();
        client.database("db").create_collection("c").await.unwrap();
        let coll = client.database("db").collection::<Document>("c");
        let mut follower = Follower::start(&pool, &[("db", "c")], 3).await;
        let mut session = client.start_session().await.unwrap();
        for round in 0..3 {
            coll.insert_one(doc! { "_id": format!("before {round}") }).await.unwrap();
            session.start_transaction().await.unwrap();
            for n in 0..20 {
                // Large enough that the transaction needs several oplog entries.
                let pad = if round == 2 { "x".repeat(1_000_000) } else { String::new() };
                let document = doc! { "_id": format!("{round} {n}"), "pad": pad };
                coll.insert_one(document).session(&mut session).await.unwrap();
            }
            session.commit_transaction().await.unwrap();
        }
        let end = now(&pool).await;
        let mut inside = 0;
        soon("the feed comes that far", async {
            while follower.through < end {
                let batch = follower.step().await.unwrap();
                let Some(last) = batch.events.last() else { continue };
                assert!(batch.through < last.time);
                inside += 1;
                if inside % 3 == 0 {
                    // Resume wherever that is, inside a transaction as well.
                    follower.reopen().await;
                }
                assert!(batch.events.len() <= 3);
            }
        })
        .await;
        let mut expected = Vec::new();
        for round in 0..3 {
            expected.push(format!("before {round}"));
            expected.extend((0..20).map(|n| format!("{round} {n}")));
        }
        let keys: Vec<String> =
            follower.keys().iter().filter_map(|key| key.as_str().map(str::to_owned)).collect();
        assert_eq!(keys, expected);
        let times: std::collections::HashSet<_> = follower.events.iter().map(|e| e.time).collect();
        assert!(times.len() < keys.len(), "the events of a transaction share one time");
    });
}

#[test]
fn the_position_moves_on_while_only_other_collections_are_written() {
    // Case 2: a position that stands still falls out of the oplog.
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "idle")], 1000).await;
        let client = set.client().await.unwrap();
        let busy = client.database("other").collection("busy");
        let mut last = None;
        for _ in 0..5 {
            busy.insert_one(doc! {}).await.unwrap();
            let ping = rawdoc! { "ping": 1 };
            let written = pool.run_once("admin", &ping).await.unwrap().operation_time().unwrap();
            let before = Timestamp { increment: written.increment - 1, ..written };
            follower.until_through(before).await;
            assert_ne!(follower.token, last);
            last = follower.token.clone();
        }
        assert!(follower.events.iter().all(|event| event.db == "halocline"));
    });
}

#[test]
fn a_heartbeat_wakes_a_feed_that_waits() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "idle")], 1000).await;
        follower.step().await.unwrap();
        let heart = tokio::task::spawn_local({
            let pool = pool.clone();
            async move { now(&pool).await }
        });
        // Waits for ten minutes if nothing wakes it; the heartbeats are written meanwhile.
        let woken = soon("the feed wakes", async {
            loop {
                let batch = follower.feed.next_batch(Duration::from_secs(600)).await.unwrap();
                if let Some(event) = batch.events.last() {
                    return event.clone();
                }
            }
        })
        .await;
        assert_eq!((woken.db.as_str(), woken.coll.as_str()), ("halocline", "heartbeat"));
        assert!(woken.time <= heart.await.unwrap());
    });
}

#[test]
fn the_feed_goes_on_after_an_election() {
    run(async {
        let set = three_members().await;
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "c")], 10).await;
        let mut expected = Vec::new();
        let mut broke = 0;
        for round in 0..3 {
            for n in 0..25 {
                let id = round * 100 + n;
                let insert = rawdoc! {
                    "insert": "c", "documents": [{ "_id": id }],
                    "writeConcern": { "w": "majority" },
                };
                pool.run_once("db", &insert).await.unwrap();
                expected.push(RawBson::Int32(id));
            }
            follower.step().await.ok();
            if round < 2 {
                set.step_down().await.unwrap();
            }
            if follower.token.is_none() {
                continue;
            }
            match follower.step().await {
                Ok(_) => {}
                Err(FeedError::Resumable(_)) => {
                    broke += 1;
                    follower.reopen().await;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let end = soon("a write", now(&pool)).await;
        soon("the feed comes that far", async {
            while follower.through < end {
                match follower.step().await {
                    Ok(_) => {}
                    Err(FeedError::Resumable(_)) => {
                        broke += 1;
                        follower.reopen().await;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        })
        .await;
        println!("the feed broke {broke} times");
        let keys: Vec<RawBson> = follower
            .events
            .iter()
            .filter(|event| event.db == "db" && event.op == FeedOp::Insert)
            .map(|event| event.key.clone())
            .collect();
        assert_eq!(keys, expected);
    });
}

#[test]
fn the_feed_goes_on_after_its_cursor_or_its_server_was_killed() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "c")], 10).await;
        follower.step().await.unwrap();
        let client = set.client().await.unwrap();
        let coll = client.database("db").collection::<Document>("c");
        coll.insert_one(doc! { "_id": 1 }).await.unwrap();
        let idle = doc! { "aggregate": 1, "cursor": {}, "pipeline": [
            { "$currentOp": { "idleCursors": true, "localOps": true } },
            { "$match": { "type": "idleCursor", "ns": "admin.$cmd.aggregate" } },
        ] };
        let found = run_on(&set, "admin", idle).await;
        let found = found.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
        let cursors: Vec<i64> = found
            .iter()
            .map(|op| op.as_document().unwrap().get_document("cursor").unwrap())
            .map(|cursor| cursor.get_i64("cursorId").unwrap())
            .collect();
        assert_eq!(cursors.len(), 1);
        let kill = doc! { "killCursors": "$cmd.aggregate", "cursors": cursors };
        let killed = run_on(&set, "admin", kill).await;
        assert_eq!(killed.get_array("cursorsKilled").unwrap().len(), 1, "{killed}");
        let error = follower.step().await.unwrap_err();
        assert!(matches!(error, FeedError::Resumable(_)), "{error}");
        // It stays over.
        let error = follower.step().await.unwrap_err();
        assert!(matches!(error, FeedError::Resumable(_)), "{error}");
        follower.reopen().await;

        coll.insert_one(doc! { "_id": 2 }).await.unwrap();
        let end = now(&pool).await;
        follower.until_through(end).await;
        set.kill9(0);
        let error = follower.step().await.unwrap_err();
        assert!(matches!(error, FeedError::Resumable(_)), "{error}");
        set.restart(0).await.unwrap();
        follower.reopen().await;
        coll.insert_one(doc! { "_id": 3 }).await.unwrap();
        let end = now(&pool).await;
        follower.until_through(end).await;
        let inserts = follower.events.iter().filter(|event| event.op == FeedOp::Insert);
        let keys: Vec<_> = inserts.filter(|e| e.db == "db").map(|e| e.key.clone()).collect();
        assert_eq!(keys, [RawBson::Int32(1), RawBson::Int32(2), RawBson::Int32(3)]);
    });
}

#[test]
fn a_dropped_feed_leaves_no_cursor_and_gives_its_connection_back() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "c")], 10).await;
        follower.step().await.unwrap();
        assert_eq!(pool.stats().in_use, 1);
        drop(follower);
        soon("the cursor is closed", async {
            loop {
                let status = run_on(&set, "admin", doc! { "serverStatus": 1 }).await;
                let cursor = status.get_document("metrics").unwrap().get_document("cursor");
                let open = cursor.unwrap().get_document("open").unwrap();
                if open.get_i64("total").unwrap() == 0 {
                    return;
                }
            }
        })
        .await;
        crate::support::until("the connection is back", || pool.stats().in_use == 0).await;
    });
}

#[test]
fn lost_history_is_told_apart_from_everything_else() {
    // Case 1: to continue from "now" would lose changes silently.
    run(async {
        let set = ReplicaSet::builder().name("fast").oplog_mb(1).start().await.unwrap();
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "c")], 10).await;
        follower.step().await.unwrap();
        let token = follower.token.clone().unwrap();
        let time = token.time().unwrap();
        drop(follower);
        let client = set.client().await.unwrap();
        let other = client.database("other").collection::<Document>("c");
        let oplog = client.database("local").collection::<Document>("oplog.rs");
        soon("the oplog rolls over", async {
            loop {
                for _ in 0..20 {
                    other.insert_one(doc! { "pad": "x".repeat(500_000) }).await.unwrap();
                }
                let first = oplog.find_one(doc! {}).sort(doc! { "$natural": 1 }).await.unwrap();
                if first.unwrap().get_timestamp("ts").unwrap() > time {
                    return;
                }
            }
        })
        .await;
        for start in [FeedStart::Resume(token.clone()), FeedStart::At(time)] {
            let result = soon("the answer", async {
                let mut feed = ChangeFeed::open(&pool, start.clone(), &[("db", "c")]).await?;
                feed.next_batch(WAIT).await?;
                feed.next_batch(WAIT).await
            })
            .await;
            assert!(matches!(result, Err(FeedError::HistoryLost(_))), "{start:?}: {result:?}");
        }
        let nonsense = FeedStart::Resume(ResumeToken::new(rawdoc! { "_data": "nonsense" }));
        let error = ChangeFeed::open(&pool, nonsense, &[("db", "c")]).await.unwrap_err();
        assert!(matches!(error, FeedError::Fatal(_)), "{error}");
    });
}

#[test]
fn the_largest_documents_do_not_stop_the_feed() {
    // Case 3.
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut follower = Follower::start(&pool, &[("db", "c")], 1000).await;
        let client = set.client().await.unwrap();
        let coll = client.database("db").collection::<Document>("c");
        let large = |letter: &str| doc! { "_id": "large", "pad": letter.repeat(16_700_000) };
        coll.insert_one(large("a")).await.unwrap();
        coll.replace_one(doc! { "_id": "large" }, large("b")).await.unwrap();
        let set_pad = doc! { "$set": { "pad": "c".repeat(16_700_000), "more": 1 } };
        coll.update_one(doc! { "_id": "large" }, set_pad).await.unwrap();
        coll.delete_one(doc! { "_id": "large" }).await.unwrap();
        let end = now(&pool).await;
        follower.until_through(end).await;
        let told: Vec<_> = follower
            .events
            .iter()
            .filter(|event| event.db == "db")
            .map(|event| event.op.clone())
            .collect();
        use FeedOp::{Delete, Insert, Replace, Update};
        assert_eq!(told, [FeedOp::Ddl(Definition::Create), Insert, Replace, Update, Delete]);
        assert!(follower.events.iter().all(|event| event.bytes < 10_000));
    });
}
