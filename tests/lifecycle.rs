//! A document's whole life between the tiers, under traffic: warmed from an archive that holds a
//! year, covered by the boundary, changed, faulted in, aged out and evicted. Whatever clients are
//! told equals what they have done, and in the end both tiers agree.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod support;

use std::sync::Arc;

use mongodb::bson::{RawDocumentBuf, doc};
use support::daemon::{Config, Daemon};
use support::deployment::{COLL, DB, Pair, date, now};
use support::owner::{Habits, Traffic};
use support::truth::{Truth, changed, fresh_document};
use support::{seed, until};

const OWNERS: i32 = 5;
/// So short that documents leave the window all the time.
const KEEP: f64 = 15.0;
const CONFIG: Config = Config { keep: "15s", batch_documents: 60, ..Config::DEFAULT };

const DAY: f64 = 86_400.0;

#[tokio::test]
async fn documents_are_warmed_changed_aged_and_evicted_and_clients_see_one_truth() {
    let seed = seed();
    let pair = Pair::start(1).await;
    let truth = Arc::new(Truth::default());
    // A year, evenly; and documents dated to enter and leave the window all through the test.
    let year = (0..1000).map(|i| 30.0 + f64::from(i) * 365.0 * DAY / 1000.0);
    let around_now = (0..800).map(|i| KEEP - f64::from(i) / 10.0);
    pair.seed(&truth, OWNERS, year.chain(around_now)).await;

    let mut daemon = Daemon::start(&pair, &CONFIG).await;
    let habits = Habits { owners: OWNERS, recent: KEEP / 2.0, ..Habits::UNDISTURBED };
    let traffic = Traffic::start(&[&daemon], &truth, habits, seed).await;

    until(
        "the boundary to reach the window, documents to leave, and owners to see it all",
        async || {
            truth.assert_kept();
            assert!(truth.audit(&pair).await > 0);
            let collection = daemon.collection().await;
            let boundary = collection["boundary"].as_f64();
            let reached =
                boundary.is_some_and(|b| b <= collection["window_start"].as_f64().unwrap());
            let enough = |name: &str, n: u64| collection[name].as_u64().unwrap() >= n;
            (reached
                && enough("warmed", 300)
                && enough("evicted", 300)
                && enough("faulted_in", 100))
            .then_some(())
        },
    )
    .await;
    traffic.proceed(300).await;
    traffic.stop().await;
    println!("{:#}", daemon.collection().await);
    for reason in ["covered", "newest_n", "point_hit", "point_miss", "points_merged", "not_covered"]
    {
        assert!(daemon.answered_for(reason).await > 0, "no read was answered for {reason}");
    }

    what_the_archive_lacks_is_not_evicted(&pair, &daemon, &truth).await;

    daemon.drained().await;
    let (on_fast, on_archive) = truth.compare(&pair).await;
    truth.assert_kept();
    println!("{on_fast} documents on the fast tier, {on_archive} on the archive");
    assert!(on_fast < on_archive / 2, "most of the year is not on the fast tier");

    daemon.terminate();
    assert!(daemon.wait_exit().await.success());
}

/// Holds: a document leaves the fast tier only when the archive has it as it is. While the archive
/// refuses to be written, documents whose last change it has not seen grow old and stay; then they go.
async fn what_the_archive_lacks_is_not_evicted(pair: &Pair, daemon: &Daemon, truth: &Truth) {
    const BLOCKED: &str =
        r#"halocline_evictor_blocked_total{ns="shop.orders",reason="not_mirrored"}"#;
    let orders = daemon.client().await.database(DB).collection::<RawDocumentBuf>(COLL);
    let mut documents = Vec::new();
    for _ in 0..20 {
        let n = truth.new_number(0);
        let document = fresh_document(n, &truth.id(n), 0, date(KEEP - 3.0));
        orders.insert_one(&document).await.unwrap();
        documents.push((n, document));
    }
    let ids: Vec<_> = documents.iter().map(|(n, _)| truth.id(*n)).collect();
    let these = doc! { "_id": { "$in": ids } };
    let on_archive = async || pair.on_archive().count_documents(these.clone()).await.unwrap();
    until("the archive to have them", async || (on_archive().await == 20).then_some(())).await;

    pair.refuse_mirroring(true).await;
    let blocked_before = daemon.metric(BLOCKED).await;
    let mut versions = Vec::new();
    for (n, document) in documents {
        let query = doc! { "_id": truth.id(n) };
        let update = doc! { "$set": { "v": 1_i64 } };
        assert_eq!(orders.update_one(query, update).await.unwrap().matched_count, 1);
        let after = changed(&document, doc! { "v": 1_i64 });
        truth.known(n, Some(after.clone()));
        versions.push((n, after));
    }
    let changed_at = now();
    let on_fast = async || pair.on_fast().count_documents(these.clone()).await.unwrap();
    until("the evictor to find that the archive does not have them", async || {
        assert_eq!(on_fast().await, 20, "none of them may go");
        let residency_is_over = now() > changed_at + 2.5;
        let blocked = daemon.metric(BLOCKED).await - blocked_before;
        (residency_is_over && blocked >= 20.0).then_some(())
    })
    .await;

    pair.refuse_mirroring(false).await;
    until("them to be evicted", async || (on_fast().await == 0).then_some(())).await;
    let mirrored = doc! { "$and": [these.clone(), { "v": 1_i64 }] };
    let mirrored = pair.on_archive().count_documents(mirrored).await.unwrap();
    assert_eq!(mirrored, 20, "they left with their last change on the archive");
}
