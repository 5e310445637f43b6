//! Members that die, freeze, step down, stop and come back with older files.
#![allow(clippy::unwrap_used)]

use bson::{Document, doc};
use halocline_testbed::{ReplicaSet, TestbedError};
use mongodb::Collection;

async fn things(set: &ReplicaSet) -> Collection<Document> {
    set.client().await.unwrap().database("test").collection("things")
}

#[tokio::test]
async fn a_killed_primary_is_replaced_and_comes_back() {
    let set = ReplicaSet::builder().members(3).start().await.unwrap();
    let things = things(&set).await;
    things.insert_one(doc! {"_id": 1}).await.unwrap();

    set.kill9(0);
    assert_eq!(set.pid(0), None);
    let second = set.wait_primary().await.unwrap();
    assert_ne!(second, 0);
    things.insert_one(doc! {"_id": 2}).await.unwrap();

    set.restart(0).await.unwrap();
    assert!(set.pid(0).is_some());
    let third = set.step_down().await.unwrap();
    assert_ne!(third, second);
    things.insert_one(doc! {"_id": 3}).await.unwrap();
    assert_eq!(things.count_documents(doc! {}).await.unwrap(), 3);
}

#[tokio::test]
async fn a_frozen_primary_is_replaced_and_follows_when_it_thaws() {
    let set = ReplicaSet::builder().members(3).start().await.unwrap();
    set.pause(0).unwrap();
    let next = set.wait_primary().await.unwrap();
    assert_ne!(next, 0);
    set.resume(0).unwrap();
    set.wait_up().await.unwrap();
    // It has learnt of the election: no two members lead.
    let client = set.direct_client(0).await.unwrap();
    let led = || async {
        let hello = client.database("admin").run_command(doc! {"hello": 1}).await.unwrap();
        hello.get_bool("isWritablePrimary").unwrap()
    };
    while led().await {}
    assert_eq!(set.wait_primary().await.unwrap(), next);
}

#[tokio::test]
async fn a_stopped_member_restarts_with_its_data_on_its_port() {
    let set = ReplicaSet::builder().start().await.unwrap();
    let things = things(&set).await;
    things.insert_one(doc! {"_id": 1}).await.unwrap();
    let port = set.port(0);

    set.stop(0).await.unwrap();
    assert!(matches!(set.pause(0), Err(TestbedError::WrongState { .. })));
    assert!(matches!(set.stop(0).await, Err(TestbedError::WrongState { .. })));
    set.restart(0).await.unwrap();
    assert_eq!(set.port(0), port);
    set.wait_primary().await.unwrap();
    assert_eq!(things.count_documents(doc! {}).await.unwrap(), 1);

    // Running: restart shuts it down first. Frozen: a stop must not wait for ever.
    let before = set.pid(0);
    set.restart(0).await.unwrap();
    assert_ne!(set.pid(0), before);
    set.pause(0).unwrap();
    set.stop(0).await.unwrap();
}

#[tokio::test]
async fn a_restored_backup_has_what_was_there_and_nothing_later() {
    let set = ReplicaSet::builder().members(2).start().await.unwrap();
    let things = things(&set).await;
    things.insert_one(doc! {"_id": "before"}).await.unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let running = set.copy_data_dir(0, elsewhere.path());
    assert!(matches!(running, Err(TestbedError::WrongState { .. })));
    assert!(matches!(
        set.restore_data_dir(0, elsewhere.path()),
        Err(TestbedError::WrongState { .. })
    ));

    let backup = set.back_up().await.unwrap();
    things.insert_one(doc! {"_id": "after"}).await.unwrap();
    set.restore(&backup).await.unwrap();
    let left = things.find_one(doc! {}).await.unwrap();
    assert_eq!(left, Some(doc! {"_id": "before"}));
    assert_eq!(things.count_documents(doc! {}).await.unwrap(), 1);
    // It is as good as new.
    things.insert_one(doc! {"_id": "after"}).await.unwrap();
}

#[tokio::test]
async fn a_rolled_oplog_has_lost_every_earlier_entry_on_every_member() {
    let set = ReplicaSet::builder().members(2).oplog_mb(2).start().await.unwrap();
    let oplog = |i: usize| {
        let client = set.direct_client(i);
        async move { client.await.unwrap().database("local").collection::<Document>("oplog.rs") }
    };
    let first = oplog(0).await.find_one(doc! {}).await.unwrap().unwrap();
    set.roll_oplog().await.unwrap();
    for i in 0..2 {
        let entry = oplog(i).await.find_one(doc! {"ts": first.get("ts")}).await.unwrap();
        assert_eq!(entry, None);
    }
}

#[tokio::test]
async fn one_killed_members_files_can_be_put_back_alone() {
    let set = ReplicaSet::builder().start().await.unwrap();
    let things = things(&set).await;
    things.insert_one(doc! {"_id": 1}).await.unwrap();
    set.kill9(0);
    let files = tempfile::tempdir().unwrap();
    let copy = files.path().join("copy");
    set.copy_data_dir(0, &copy).unwrap();
    set.launch(0).await.unwrap();
    set.wait_primary().await.unwrap();
    things.insert_one(doc! {"_id": 2}).await.unwrap();
    set.kill9(0);
    set.restore_data_dir(0, &copy).unwrap();
    set.restart(0).await.unwrap();
    set.wait_primary().await.unwrap();
    assert_eq!(things.count_documents(doc! {}).await.unwrap(), 1);
}
