//! Lanes: once a later epoch has closed them nothing of an earlier one lands, whatever happened to
//! it on the way.

use std::rc::Rc;
use std::time::Duration;

use bson::raw::{RawDocument, RawDocumentBuf};
use bson::{Document, doc, rawdoc};
use halocline_cluster::lanes::{LaneError, LaneRecord, LaneSet};
use halocline_cluster::{ClusterError, Pool, Reply, ServerAddress};
use halocline_testbed::ReplicaSet;

use crate::support::{one_member, pool, run, soon, three_members};

const LANES: usize = 20;

async fn open(archive: &Pool, epoch: i64) -> LaneSet {
    let lanes = LaneSet::open(archive, "fast", LANES, epoch).await.unwrap();
    soon("closing", lanes.close_earlier_epochs(archive)).await.unwrap();
    lanes
}

fn set_value(id: i32, value: i32) -> RawDocumentBuf {
    rawdoc! { "q": { "_id": id }, "u": { "$set": { "value": value } }, "upsert": true }
}

async fn write(
    lanes: &LaneSet,
    archive: &Pool,
    lane: usize,
    value: i32,
) -> Result<Reply, LaneError> {
    let statement = set_value(lane as i32, value);
    let statements: [&RawDocument; 1] = [&statement];
    let command = rawdoc! { "update": "c", "ordered": false };
    lanes.write(lane, archive, "db", command, &[("updates", &statements)]).await
}

async fn value(set: &ReplicaSet, id: i32) -> Option<i32> {
    let client = set.client().await.unwrap();
    let coll = client.database("db").collection::<Document>("c");
    coll.find_one(doc! { "_id": id })
        .await
        .unwrap()
        .map(|document| document.get_i32("value").unwrap())
}

/// Makes a command fail in a certain way; returns how often that has happened so far.
async fn fail(set: &ReplicaSet, mode: impl Into<bson::Bson>, data: Document) -> i64 {
    let command = doc! { "configureFailPoint": "failCommand", "mode": mode, "data": data };
    let primary = set.primary_index().await.unwrap();
    let client = set.direct_client(primary).await.unwrap();
    let reply = client.database("admin").run_command(command).await.unwrap();
    reply.get_i64("count").or_else(|_| reply.get_i32("count").map(i64::from)).unwrap()
}

/// Holds the next update of `db.c` in the server before it is executed; returns what
/// [`is_held`] wants.
async fn hold(set: &ReplicaSet, time: Duration) -> i64 {
    let data = doc! {
        "failCommands": ["update"], "namespace": "db.c",
        "blockConnection": true, "blockTimeMS": time.as_millis() as i64,
    };
    fail(set, doc! { "times": 1 }, data).await
}

/// Waits until that update has come.
async fn is_held(set: &ReplicaSet, count: i64) {
    let wait = doc! {
        "waitForFailPoint": "failCommand", "timesEntered": count + 1, "maxTimeMS": 60_000,
    };
    let client = set.client().await.unwrap();
    client.database("admin").run_command(wait).await.unwrap();
}

#[test]
fn what_an_earlier_epoch_still_has_under_way_does_not_land() {
    // A paused feeder's write would overwrite a newer state (rules 7 and 8).
    run(async {
        let set = one_member().await;
        let archive = pool(&set).await;
        // On its way while the successor begins: held in the server before it is executed, as
        // long as it takes.
        let mut epoch = 1;
        let mut seconds = 1;
        let first = loop {
            let first = Rc::new(open(&archive, epoch).await);
            for lane in 0..LANES {
                write(&first, &archive, lane, 1).await.unwrap();
            }
            let held = hold(&set, Duration::from_secs(seconds)).await;
            let late = tokio::task::spawn_local({
                let (first, archive) = (first.clone(), archive.clone());
                async move { write(&first, &archive, 7, 666).await }
            });
            is_held(&set, held).await;
            let second = open(&archive, epoch + 1).await;
            if late.is_finished() {
                // Closing took longer, so that this says nothing.
                (epoch, seconds) = (epoch + 2, seconds * 4);
                continue;
            }
            write(&second, &archive, 7, 2).await.unwrap();
            let late = soon("the late write", late).await.unwrap();
            assert!(matches!(late, Err(LaneError::Superseded)), "{late:?}");
            assert_eq!(value(&set, 7).await, Some(2));
            break first;
        };

        // And on every lane, from the start.
        for lane in 0..LANES {
            let refused = write(&first, &archive, lane, 666).await;
            assert!(matches!(refused, Err(LaneError::Superseded)), "{refused:?}");
            let expected = if lane == 7 { 2 } else { 1 };
            assert_eq!(value(&set, lane as i32).await, Some(expected));
        }
        let refused = first.refresh(&archive, &[3]).await;
        assert!(matches!(refused, Err(LaneError::Superseded)), "{refused:?}");
    });
}

#[test]
fn a_lane_stays_closed_through_an_election() {
    run(async {
        let set = three_members().await;
        let archive = pool(&set).await;
        let first = open(&archive, 1).await;
        let second = open(&archive, 2).await;
        set.step_down().await.unwrap();
        for lane in 0..LANES {
            let refused = soon("an answer", async {
                loop {
                    match write(&first, &archive, lane, 666).await {
                        Err(LaneError::Failed(error)) if error.is_retryable() => {}
                        answer => return answer,
                    }
                }
            })
            .await;
            assert!(matches!(refused, Err(LaneError::Superseded)), "{refused:?}");
        }
        for lane in 0..LANES {
            write(&second, &archive, lane, 2).await.unwrap();
        }
    });
}

#[test]
fn a_lane_goes_on_after_an_unknown_outcome() {
    run(async {
        let set = ReplicaSet::builder().name("fast").proxied().start().await.unwrap();
        let archive = pool(&set).await;
        let lanes = open(&archive, 1).await;
        let marker = rawdoc! { "value": 5 };
        let lost = set.proxy(0).unwrap().lose_reply_to(move |bytes| {
            bytes.windows(marker.as_bytes().len()).any(|window| window == marker.as_bytes())
        });
        let error = write(&lanes, &archive, 3, 5).await.unwrap_err();
        assert!(lost.has_happened());
        match error {
            LaneError::Failed(error) => assert!(error.outcome_unknown(), "{error}"),
            LaneError::Superseded => panic!("by nobody"),
        }
        let reply = soon("a write", write(&lanes, &archive, 3, 6)).await.unwrap();
        assert_eq!(reply.get_number("n"), Some(1));
        assert_eq!(value(&set, 3).await, Some(6));

        // Executed on the primary, but not assured of lasting: not acknowledged.
        fail(
            &set,
            doc! { "times": 1 },
            doc! {
                "failCommands": ["update"], "namespace": "db.c",
                "writeConcernError": { "code": 64, "errmsg": "waiting for replication timed out" },
            },
        )
        .await;
        let error = write(&lanes, &archive, 3, 7).await.unwrap_err();
        assert!(matches!(error, LaneError::Failed(_)), "{error}");
        write(&lanes, &archive, 3, 8).await.unwrap();
        assert_eq!(value(&set, 3).await, Some(8));
    });
}

#[test]
fn a_cancelled_write_leaves_the_lane_usable_and_the_last_write_wins() {
    run(async {
        let set = one_member().await;
        let archive = pool(&set).await;
        let lanes = Rc::new(open(&archive, 1).await);
        let held = hold(&set, Duration::from_secs(1)).await;
        let cancelled = tokio::task::spawn_local({
            let (lanes, archive) = (lanes.clone(), archive.clone());
            async move { write(&lanes, &archive, 3, 666).await }
        });
        is_held(&set, held).await;
        cancelled.abort();
        assert!(cancelled.await.unwrap_err().is_cancelled());
        write(&lanes, &archive, 3, 1).await.unwrap();
        // Wait until the server is done with the cancelled one, whatever became of it.
        soon("the held command ends", async {
            let client = set.client().await.unwrap();
            let admin = client.database("admin");
            let ops = doc! { "currentOp": 1, "ns": "db.c" };
            loop {
                let running = admin.run_command(ops.clone()).await.unwrap();
                if running.get_array("inprog").unwrap().is_empty() {
                    return;
                }
            }
        })
        .await;
        assert_eq!(value(&set, 3).await, Some(1));
    });
}

#[test]
fn failed_statements_are_told_and_the_others_stand() {
    run(async {
        let set = one_member().await;
        let archive = pool(&set).await;
        let lanes = open(&archive, 1).await;
        let client = set.client().await.unwrap();
        let index = mongodb::IndexModel::builder()
            .keys(doc! { "value": 1 })
            .options(mongodb::options::IndexOptions::builder().unique(true).build())
            .build();
        client.database("db").collection::<Document>("c").create_index(index).await.unwrap();
        let statements = [set_value(1, 10), set_value(2, 10), set_value(3, 30)];
        let statements: Vec<&RawDocument> = statements.iter().map(AsRef::as_ref).collect();
        let command = rawdoc! { "update": "c", "ordered": false };
        let sequence = [("updates", statements.as_slice())];
        let reply = lanes.write(0, &archive, "db", command, &sequence).await.unwrap();
        let failed = reply.write_errors();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].index, 1);
        assert!(failed[0].error.is_duplicate_key());
        assert!(failed[0].error.document.get_document("keyValue").is_ok());
        assert_eq!(value(&set, 3).await, Some(30));
    });
}

#[test]
fn one_command_a_lane() {
    run(async {
        let set = one_member().await;
        let archive = pool(&set).await;
        let lanes = open(&archive, 1).await;
        let (first, second) =
            tokio::join!(write(&lanes, &archive, 5, 1), write(&lanes, &archive, 5, 2));
        first.unwrap();
        assert!(matches!(second, Err(LaneError::Failed(ClusterError::Config { .. }))));
        let outside = write(&lanes, &archive, LANES, 1).await;
        assert!(matches!(outside, Err(LaneError::Failed(ClusterError::Config { .. }))));
    });
}

#[test]
fn the_number_of_lanes_is_fixed_and_the_highest_epoch_remembered() {
    run(async {
        let set = one_member().await;
        let archive = pool(&set).await;
        let record = LaneRecord::find_or_fix(&archive, "fast", LANES).await.unwrap();
        assert_eq!((record.lanes, record.highest_epoch), (LANES, 0));
        open(&archive, 5).await;
        let record = LaneRecord::find_or_fix(&archive, "fast", 64).await.unwrap();
        assert_eq!((record.lanes, record.highest_epoch), (LANES, 5));
        let other = LaneSet::open(&archive, "fast", 64, 6).await.unwrap_err();
        assert!(other.to_string().contains("fixed at 20"), "{other}");
        for epoch in [5, 4] {
            let earlier = LaneSet::open(&archive, "fast", LANES, epoch).await.unwrap_err();
            assert!(matches!(earlier, LaneError::Superseded), "{earlier}");
        }
        for epoch in [0, -1, 1 << 23] {
            assert!(LaneSet::open(&archive, "fast", LANES, epoch).await.is_err());
        }
        // Another fast tier on the same archive is another set of lanes.
        let elsewhere = LaneSet::open(&archive, "another", 3, 1).await.unwrap();
        elsewhere.close_earlier_epochs(&archive).await.unwrap();
        assert_eq!(elsewhere.len(), 3);
        let six = open(&archive, 6).await;
        six.refresh(&archive, &[0, 19]).await.unwrap();
        six.refresh(&archive, &[]).await.unwrap();
        assert_eq!((six.len(), six.epoch()), (LANES, 6));
    });
}

#[test]
fn closing_the_lanes_survives_broken_connections() {
    run(async {
        let set = ReplicaSet::builder().name("fast").proxied().start().await.unwrap();
        let archive = pool(&set).await;
        let lanes = LaneSet::open(&archive, "fast", LANES, 1).await.unwrap();
        let address: ServerAddress = archive.primary().await.unwrap().address().clone();
        fail(
            &set,
            doc! { "times": 10 },
            doc! {
                "failCommands": ["update"], "closeConnection": true,
            },
        )
        .await;
        let lost = set
            .proxy(0)
            .unwrap()
            .lose_reply_to(|bytes| bytes.windows(6).any(|window| window == b"lanes\0"));
        soon("closing", lanes.close_earlier_epochs(&archive)).await.unwrap();
        assert!(lost.has_happened(), "the test did not break {address}");
        let client = set.client().await.unwrap();
        let documents = client.database("halocline").collection::<Document>("lanes");
        let closed = documents.count_documents(doc! { "epoch": 1_i64 }).await.unwrap();
        assert_eq!(closed, LANES as u64);
    });
}
