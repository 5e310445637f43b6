//! SIGTERM: what is under way is finished, nobody new is served, the exit code is 0 and comes within
//! the deadline; what was not mirrored yet is mirrored after the next start; and drivers that know a
//! second daemon move over to it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::{RawDocumentBuf, doc};
use support::daemon::{Config, Daemon};
use support::deployment::{COLL, DB, Pair, date};
use support::owner::{Habits, Traffic};
use support::truth::{Contents, Truth, changed, fresh_document};
use support::{seed, until};
use tokio::net::TcpStream;

#[tokio::test]
async fn sigterm_finishes_what_is_under_way_and_the_next_daemon_goes_on() {
    let seed = seed();
    let pair = Pair::start(1).await;
    let truth = Arc::new(Truth::default());
    let ages = (0..600).map(|i| 3000.0 - f64::from(i) * 10.0);
    pair.seed(&truth, 4, ages).await;

    operations_finish_and_their_changes_are_mirrored_later(&pair, &truth).await;

    // Under traffic: one daemon serves, one stands by.
    let mut first = Daemon::start(&pair, &Config::DEFAULT).await;
    let mut second = Daemon::prepare(&pair, &Config::DEFAULT);
    second.launch(&pair);
    until("the second daemon to stand by", async || {
        matches!(second.get("/readyz").await, Ok((503, _))).then_some(())
    })
    .await;
    // Not one error: drivers repeat what a drain cuts off, and find the other daemon.
    let habits = Habits { writes_over_many: false, batch: 10_000, ..Habits::UNDISTURBED };
    let traffic = Traffic::start(&[&first, &second], &truth, habits, seed).await;
    traffic.proceed(30).await;
    first.terminate();
    assert!(first.wait_exit().await.success());
    second.wait_ready().await;
    traffic.proceed(30).await;
    second.assert_running();

    traffic.stop().await;
    second.drained().await;
    truth.compare(&pair).await;
    truth.assert_kept();
    second.terminate();
    assert!(second.wait_exit().await.success());
}

async fn operations_finish_and_their_changes_are_mirrored_later(pair: &Pair, truth: &Truth) {
    const OPERATIONS: usize = 20;
    // Changes wait so long to be joined by others that none of these is mirrored before the end.
    let mut daemon = Daemon::start(pair, &Config { coalesce: "1m", ..Config::DEFAULT }).await;
    let orders = daemon.client().await.database(DB).collection::<RawDocumentBuf>(COLL);
    until("the window to be warm", async || {
        let collection = daemon.collection().await;
        collection["warm"].as_bool().unwrap().then_some(())
    })
    .await;

    let held = pair.hold(&["update", "delete", "find"], Duration::from_secs(2)).await;
    let before = truth.of_owner(1);
    let chosen: Vec<_> = before.iter().take(OPERATIONS).collect();
    let mut under_way = Vec::new();
    for (place, (n, document)) in chosen.iter().enumerate() {
        let (n, document) = (**n, (*document).clone().unwrap());
        let (orders, query) = (orders.clone(), doc! { "_id": truth.id(n) });
        under_way.push(tokio::spawn(async move {
            let after = match place % 3 {
                0 => {
                    let set = doc! { "$set": { "v": 1_i64 } };
                    let done = orders.update_one(query, set).await.unwrap();
                    assert_eq!(done.matched_count, 1);
                    Some(changed(&document, doc! { "v": 1_i64 }))
                }
                1 => {
                    assert_eq!(orders.delete_one(query).await.unwrap().deleted_count, 1);
                    None
                }
                _ => {
                    let read = orders.find_one(query).await.unwrap();
                    assert_eq!(read.as_ref(), Some(&document));
                    read
                }
            };
            (n, after)
        }));
    }
    held.wait_for(OPERATIONS as i32).await;
    daemon.terminate();
    until("the daemon to refuse newcomers", async || {
        TcpStream::connect(daemon.address()).await.err()
    })
    .await;
    for operation in under_way {
        let (n, after) = operation.await.expect("an operation under way is finished");
        truth.known(n, after);
    }
    let status = daemon.wait_exit().await;
    assert!(status.success(), "{status}: the drain was clean and within its deadline");
    held.end().await;

    let archived = Contents::read(&pair.on_archive()).await.numbered;
    let left = chosen.iter().filter(|(n, _)| archived.get(*n) != truth.state(**n).as_ref());
    let left = left.count();
    println!("{left} changes were left for the next daemon");
    assert!(left > OPERATIONS / 3, "the test wants changes that are not mirrored yet");

    let n = truth.new_number(0);
    let document = fresh_document(n, &truth.id(n), 0, date(0.0));
    let mut daemon = Daemon::start(pair, &Config::DEFAULT).await;
    let orders = daemon.client().await.database(DB).collection::<RawDocumentBuf>(COLL);
    orders.insert_one(&document).await.unwrap();
    truth.known(n, Some(document));
    daemon.drained().await;
    truth.compare(pair).await;
    truth.assert_kept();
    daemon.terminate();
    assert!(daemon.wait_exit().await.success());
}
