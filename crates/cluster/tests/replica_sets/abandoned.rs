//! Moves that a dead daemon has left open are ended by the next one, and nothing else is.

use bson::{doc, rawdoc};
use halocline_cluster::abandoned::abort_abandoned_moves;
use halocline_cluster::moves::{Move, MoveSessions, ensure_anchor};
use halocline_testbed::{Auth, ReplicaSet};

use crate::support::{one_member, pool, run};

/// Leaves a move open that has written a document, and a transaction of a client's that has
/// written another; then a new leader ends the move alone.
async fn the_next_leader_frees_the_keys(set: ReplicaSet) {
    let client = set.client().await.unwrap();
    let orders = client.database("db").collection::<bson::Document>("c");
    orders.insert_many([doc! { "_id": 1, "n": 0 }, doc! { "_id": 2, "n": 0 }]).await.unwrap();
    let dead = pool(&set).await;
    ensure_anchor(&dead).await.unwrap();
    let update = rawdoc! { "$inc": { "n": 1 } };
    let mut abandoned = Move::open(&dead, &MoveSessions::default()).await.unwrap();
    abandoned.update_one("db", "c", &rawdoc! { "_id": 1 }, &update, false).await.unwrap();
    // A dead daemon does not abort.
    std::mem::forget(abandoned);
    let mut session = client.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    let increase = doc! { "$inc": { "n": 1 } };
    orders.update_one(doc! { "_id": 2 }, increase.clone()).session(&mut session).await.unwrap();

    let successor = pool(&set).await;
    assert_eq!(abort_abandoned_moves(&successor).await.unwrap(), 1);
    assert_eq!(abort_abandoned_moves(&successor).await.unwrap(), 0);
    // Would wait for the move's end, a minute, if it still held the key.
    let free = orders.update_one(doc! { "_id": 1 }, increase).await.unwrap();
    assert_eq!(free.matched_count, 1);
    session.commit_transaction().await.unwrap();
    for id in [1, 2] {
        let document = orders.find_one(doc! { "_id": id }).await.unwrap().unwrap();
        assert_eq!(document.get_i32("n").unwrap(), 1, "{document}");
    }
}

#[test]
fn a_dead_daemons_moves_are_ended_and_a_clients_transaction_is_not() {
    run(async { the_next_leader_frees_the_keys(one_member().await).await });
}

#[test]
fn so_they_are_where_users_authenticate() {
    run(async {
        let set = ReplicaSet::builder().name("fast").auth(Auth::key_file()).start().await.unwrap();
        the_next_leader_frees_the_keys(set).await;
    });
}
