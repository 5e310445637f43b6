//! Running a test on one thread as an arbiter would, and waiting for conditions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bson::raw::{RawDocument, RawDocumentBuf};
use halocline_cluster::{Cluster, ClusterOptions, Pool, Tier};
use halocline_testbed::ReplicaSet;

/// How long a condition may take to come about before the test is given up.
const PATIENCE: Duration = Duration::from_secs(180);

/// Runs a test on a current-thread runtime with local tasks.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test)
}

/// A set of one member.
pub async fn one_member() -> ReplicaSet {
    ReplicaSet::builder().name("fast").start().await.unwrap()
}

/// A set of three members.
pub async fn three_members() -> ReplicaSet {
    ReplicaSet::builder().name("fast").members(3).start().await.unwrap()
}

/// Options for a set, with the short times that tests want.
pub fn options(set: &ReplicaSet) -> ClusterOptions {
    let mut options = ClusterOptions::new(Tier::Fast, set.uri());
    options.heartbeat = Duration::from_millis(500);
    options.pool.connect_timeout = Duration::from_secs(2);
    options.server_selection_timeout = Duration::from_secs(30);
    options
}

pub async fn connect(options: ClusterOptions) -> Arc<Cluster> {
    Cluster::connect(options).await.unwrap()
}

/// A pool on a set, with default options.
pub async fn pool(set: &ReplicaSet) -> Pool {
    Pool::new(connect(options(set)).await)
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "still not true: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Fails the test instead of hanging it.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(done) => done,
        Err(_) => panic!("did not end: {what}"),
    }
}

/// A command as an application would send it: a whole OP_MSG.
pub fn op_msg(id: i32, body: &RawDocument) -> Vec<u8> {
    let mut message = bytes::BytesMut::new();
    halocline_wire::encode_msg(id, 0, halocline_wire::MsgFlags::default(), body, &[], &mut message);
    message.to_vec()
}

/// A document as raw BSON.
pub fn raw(document: bson::Document) -> RawDocumentBuf {
    RawDocumentBuf::try_from(&document).unwrap()
}
