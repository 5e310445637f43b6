//! Replica sets on real mongods: start, write, fail over, clean up.

use std::time::Instant;

use bson::doc;
use halocline_testbed::ReplicaSet;

async fn write_and_count(set: &ReplicaSet) -> u64 {
    let client = set.client().await.unwrap();
    let things = client.database("test").collection("things");
    things.insert_one(doc! {"a": 1}).await.unwrap();
    things.count_documents(doc! {}).await.unwrap()
}

#[tokio::test]
async fn one_member_starts_and_takes_writes() {
    let began = Instant::now();
    let set = ReplicaSet::builder().name("fast").start().await.unwrap();
    println!("one member usable after {:?}", began.elapsed());
    assert_eq!(write_and_count(&set).await, 1);
    assert_eq!(set.primary_index().await, Some(0));
}

#[tokio::test]
async fn three_members_start_with_member_0_as_primary() {
    let began = Instant::now();
    let set = ReplicaSet::builder().members(3).start().await.unwrap();
    println!("three members usable after {:?}", began.elapsed());
    assert_eq!(write_and_count(&set).await, 1);
    assert_eq!(set.primary_index().await, Some(0));
}
