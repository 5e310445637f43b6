//! The lease: one holder at a time, by everybody's own clock.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bson::{Document, doc};
use halocline_cluster::lease::acquire;
use halocline_cluster::{ClusterError, Pool};

use crate::support::{one_member, options, pool, run, soon, three_members, until};

/// Short, for tests that wait for it.
const TTL: Duration = Duration::from_millis(500);
/// For tests that must not wait for it.
const LONG: Duration = Duration::from_secs(3600);

#[test]
fn a_taker_waits_until_the_holder_can_no_longer_believe() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut first = soon("the first lease", acquire(&pool, "one", TTL)).await.unwrap();
        assert_eq!((first.epoch(), first.holder()), (1, "one"));
        assert!(first.is_valid());
        let taken = Rc::new(Cell::new(None));
        let taker = tokio::task::spawn_local({
            let (pool, taken) = (pool.clone(), taken.clone());
            async move {
                let lease = acquire(&pool, "two", TTL).await.unwrap();
                taken.set(Some(Instant::now()));
                lease
            }
        });
        // As long as the holder renews, it keeps the lease.
        for _ in 0..30 {
            let asked = Instant::now();
            first.renew(&pool).await.unwrap();
            assert!(first.valid_until() >= asked + TTL);
            assert!(taken.get().is_none());
            tokio::time::sleep(TTL / 10).await;
        }
        let mut second = soon("the second lease", taker).await.unwrap();
        assert!(taken.get().unwrap() >= first.valid_until(), "two holders at once");
        assert_eq!(second.epoch(), 2);
        let error = first.renew(&pool).await.unwrap_err();
        assert!(error.is_superseded(), "{error}");
        assert!(!first.is_valid());
        assert!(first.next_epoch(&pool, 0).await.unwrap_err().is_superseded());
        assert!(first.release(&pool).await.unwrap_err().is_superseded());
        second.renew(&pool).await.unwrap();
    });
}

#[test]
fn a_released_lease_is_taken_at_once_under_a_higher_epoch() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let lease = acquire(&pool, "one", LONG).await.unwrap();
        lease.release(&pool).await.unwrap();
        let mut lease = soon("the lease", acquire(&pool, "two", LONG)).await.unwrap();
        assert_eq!(lease.epoch(), 2);
        assert_eq!(lease.next_epoch(&pool, 0).await.unwrap(), 3);
        assert_eq!(lease.next_epoch(&pool, 41).await.unwrap(), 42);
        lease.renew(&pool).await.unwrap();
        assert_eq!(lease.epoch(), 42);
        lease.release(&pool).await.unwrap();
        let lease = soon("the lease", acquire(&pool, "three", LONG)).await.unwrap();
        assert_eq!(lease.epoch(), 43);
    });
}

#[test]
fn of_many_takers_each_gets_it_once_and_one_at_a_time() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let holders = Rc::new(Cell::new(0));
        let takers: Vec<_> = (0..6)
            .map(|n| {
                let (pool, holders) = (pool.clone(), holders.clone());
                tokio::task::spawn_local(async move {
                    // Short enough to see a release soon, long enough not to be waited out.
                    let ttl = Duration::from_secs(10);
                    let lease = acquire(&pool, &format!("taker {n}"), ttl).await.unwrap();
                    holders.set(holders.get() + 1);
                    assert_eq!(holders.get(), 1);
                    tokio::task::yield_now().await;
                    let epoch = lease.epoch();
                    holders.set(holders.get() - 1);
                    lease.release(&pool).await.unwrap();
                    epoch
                })
            })
            .collect();
        let mut epochs = Vec::new();
        for taker in takers {
            epochs.push(soon("a taker", taker).await.unwrap());
        }
        epochs.sort_unstable();
        assert_eq!(epochs, [1, 2, 3, 4, 5, 6]);
    });
}

#[test]
fn the_time_of_a_slow_renewal_counts_against_the_holder() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let mut lease = acquire(&pool, "one", LONG).await.unwrap();
        let slow = doc! {
            "configureFailPoint": "failCommand", "mode": { "times": 1 },
            "data": { "failCommands": ["update"], "blockConnection": true, "blockTimeMS": 300 },
        };
        set.client().await.unwrap().database("admin").run_command(slow).await.unwrap();
        lease.renew(&pool).await.unwrap();
        let held_up = Duration::from_millis(300);
        assert!(lease.valid_until() + held_up <= Instant::now() + LONG);
    });
}

#[test]
fn a_renewal_without_majority_does_not_count() {
    run(async {
        let set = three_members().await;
        let mut options = options(&set);
        // This test is about the lease's own limit.
        options.pool.checkout_timeout = LONG;
        let pool = Pool::new(crate::support::connect(options).await);
        let mut lease = soon("the lease", acquire(&pool, "one", LONG)).await.unwrap();
        let short = doc! {
            "configureFailPoint": "failCommand", "mode": { "times": 1 },
            "data": { "failCommands": ["update"], "writeConcernError": {
                "code": 64, "errmsg": "waiting for replication timed out",
            } },
        };
        let primary = set.primary_index().await.unwrap();
        let client = set.direct_client(primary).await.unwrap();
        client.database("admin").run_command(short).await.unwrap();
        let before = lease.valid_until();
        let error = lease.renew(&pool).await.unwrap_err();
        assert!(error.outcome_unknown() && !error.is_superseded(), "{error}");
        assert_eq!(lease.valid_until(), before);
        lease.renew(&pool).await.unwrap();
        assert!(lease.valid_until() > before);

        // Through an election it stays ours.
        set.step_down().await.unwrap();
        soon("a renewal", async {
            while let Err(error) = lease.renew(&pool).await {
                assert!(!error.is_superseded(), "{error}");
            }
        })
        .await;
    });
}

#[test]
fn a_taker_whose_acquisition_got_lost_waits_it_out_like_anybodys() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        acquire(&pool, "one", TTL).await.unwrap();
        let lost = doc! {
            "configureFailPoint": "failCommand", "mode": { "times": 1 },
            "data": { "failCommands": ["update"], "writeConcernError": {
                "code": 91, "errmsg": "shutting down",
            } },
        };
        set.client().await.unwrap().database("admin").run_command(lost).await.unwrap();
        let mut lease = soon("the lease", acquire(&pool, "two", TTL)).await.unwrap();
        assert_eq!(lease.epoch(), 3, "the lost acquisition has used one");
        lease.renew(&pool).await.unwrap();
    });
}

#[test]
fn a_document_that_is_no_lease_is_not_overwritten() {
    run(async {
        let set = one_member().await;
        let pool = pool(&set).await;
        let client = set.client().await.unwrap();
        let leases = client.database("halocline").collection::<Document>("lease");
        leases.insert_one(doc! { "_id": "leader", "holder": 5 }).await.unwrap();
        let error = soon("the answer", acquire(&pool, "one", TTL)).await.unwrap_err();
        assert!(matches!(error, ClusterError::Config { .. }), "{error}");
        leases.delete_one(doc! {}).await.unwrap();
        let lease = acquire(&pool, "one", TTL).await.unwrap();
        drop(lease);
        until("connections are back", || pool.stats().in_use == 0).await;
    });
}
