//! `halocline-bench hop`: point reads direct to a mongod, and through Halocline untiered and
//! tiered, in one run: throughput, latency, and the daemon's CPU an operation.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::bail;
use bson::{DateTime, doc};
use clap::Args;
use halocline_testbed::ReplicaSet;
use hdrhistogram::Histogram;

use crate::client::{Client, find_by_id};
use crate::daemon::{Daemon, program};
use crate::process::cpu_time;

const DOCUMENTS: i64 = 10_000;
/// Bytes of payload a document.
const PAYLOAD: usize = 200;

/// Options of `hop`.
#[derive(Debug, Args)]
pub struct Options {
    /// The daemon's program; the one beside this program when not given
    #[arg(long)]
    halocline: Option<PathBuf>,
    /// Seconds a measurement
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Interleaved rounds
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Numbers of connections to measure
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    connections: Vec<usize>,
    /// Operations a second in all for the paced measurement (`p50` beside `at rate`), by which the
    /// machine is not saturated; 0 leaves it out
    #[arg(long, default_value_t = 1000)]
    rate: u64,
}

/// One measured way to a document.
struct Arm {
    name: &'static str,
    address: SocketAddr,
    coll: &'static str,
    /// Whose CPU time is divided by the operations.
    pid: Option<u32>,
}

struct Figures {
    operations: u64,
    seconds: f64,
    latency: Histogram<u64>,
    cpu: Option<Duration>,
}

/// Runs it and prints the table.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let program = program(options.halocline.clone())?;
    let (fast, archive) = tokio::try_join!(
        ReplicaSet::builder().name("fast").start(),
        ReplicaSet::builder().name("archive").start()
    )?;
    load(&archive).await?;
    let more =
        "[[collection]]\nnamespace = \"bench.tiered\"\ndate_field = \"at\"\nkeep = \"30d\"\n";
    let daemon = Daemon::start(&program, &fast, &archive, more).await?;
    let arms = [
        Arm { name: "direct", address: archive.address(0), coll: "plain", pid: None },
        Arm { name: "untiered", address: daemon.address, coll: "plain", pid: Some(daemon.pid()) },
        Arm { name: "tiered", address: daemon.address, coll: "tiered", pid: Some(daemon.pid()) },
    ];
    wait_until_warm(&daemon, &fast).await?;
    println!(
        "point reads of {PAYLOAD}-byte documents, {} rounds of {} s an arm, interleaved; daemon: {}",
        options.rounds,
        options.seconds,
        program.display()
    );
    println!(
        "{:>11} {:>9} {:>10} {:>9} {:>9} {:>9} {:>12}",
        "connections", "arm", "ops/s", "p50 us", "p95 us", "p99 us", "cpu us/op"
    );
    for &connections in &options.connections {
        compare(&arms, connections, None, &options).await?;
    }
    if options.rate > 0 {
        println!("open loop at {} ops/s, latency from the intended start", options.rate);
        compare(&arms, 4, Some(options.rate), &options).await?;
    }
    Ok(())
}

async fn compare(
    arms: &[Arm],
    connections: usize,
    rate: Option<u64>,
    options: &Options,
) -> anyhow::Result<()> {
    let length = Duration::from_secs_f64(options.seconds);
    let mut all: Vec<Vec<Figures>> = arms.iter().map(|_| Vec::new()).collect();
    for _ in 0..options.rounds.max(1) {
        for (arm, figures) in arms.iter().zip(&mut all) {
            figures.push(measure(arm, connections, rate, length).await?);
        }
    }
    for (arm, figures) in arms.iter().zip(all) {
        print_row(arm, connections, &figures)?;
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss)]
fn print_row(arm: &Arm, connections: usize, rounds: &[Figures]) -> anyhow::Result<()> {
    let operations: u64 = rounds.iter().map(|f| f.operations).sum();
    let seconds: f64 = rounds.iter().map(|f| f.seconds).sum();
    let mut latency = Histogram::<u64>::new(3)?;
    for figures in rounds {
        latency.add(&figures.latency)?;
    }
    let at = |q: f64| latency.value_at_quantile(q) as f64 / 1000.0;
    let cpu: Option<Duration> = rounds.iter().map(|f| f.cpu).sum();
    let cpu = cpu.map_or("-".to_owned(), |cpu| {
        format!("{:.1}", cpu.as_secs_f64() * 1e6 / operations.max(1) as f64)
    });
    println!(
        "{connections:>11} {:>9} {:>10.0} {:>9.1} {:>9.1} {:>9.1} {cpu:>12}",
        arm.name,
        operations as f64 / seconds,
        at(0.5),
        at(0.95),
        at(0.99),
    );
    Ok(())
}

async fn measure(
    arm: &Arm,
    connections: usize,
    rate: Option<u64>,
    length: Duration,
) -> anyhow::Result<Figures> {
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(Client::connect(arm.address).await?);
    }
    let before = arm.pid.map(cpu_time).transpose()?;
    let begun = Instant::now();
    let interval =
        rate.map(|rate| Duration::from_secs_f64(connections as f64 / rate.max(1) as f64));
    let coll = arm.coll;
    let workers: Vec<_> = clients
        .into_iter()
        .enumerate()
        .map(|(number, client)| {
            tokio::task::spawn_local(reader(client, coll, number, begun, length, interval))
        })
        .collect();
    let mut latency = Histogram::<u64>::new(3)?;
    for worker in workers {
        latency.add(&worker.await??)?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let cpu = match (arm.pid, before) {
        (Some(pid), Some(before)) => Some(cpu_time(pid)?.saturating_sub(before)),
        _ => None,
    };
    Ok(Figures { operations: latency.len(), seconds, latency, cpu })
}

async fn reader(
    mut client: Client,
    coll: &'static str,
    number: usize,
    begun: Instant,
    length: Duration,
    interval: Option<Duration>,
) -> anyhow::Result<Histogram<u64>> {
    let mut latency = Histogram::<u64>::new(3)?;
    // A fixed walk over the documents: the same for every arm.
    let mut id = i64::try_from(number).unwrap_or(0) * 7919 % DOCUMENTS;
    let mut turn = 0_u32;
    loop {
        let start = match interval {
            Some(interval) => {
                let intended = begun + interval * turn;
                turn += 1;
                tokio::time::sleep_until(intended.into()).await;
                intended
            }
            None => Instant::now(),
        };
        if begun.elapsed() >= length {
            return Ok(latency);
        }
        id = (id + 7907) % DOCUMENTS;
        let view = client.run(&find_by_id("bench", coll, id)).await?;
        if !view.ok || view.cursor.is_none_or(|cursor| cursor.is_empty) {
            bail!("document {id} was not found in bench.{coll}");
        }
        latency.record(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))?;
    }
}

async fn load(archive: &ReplicaSet) -> anyhow::Result<()> {
    let client = archive.client().await?;
    let now = DateTime::now().timestamp_millis();
    for coll in ["plain", "tiered"] {
        let collection = client.database("bench").collection::<bson::Document>(coll);
        let payload = "x".repeat(PAYLOAD);
        for first in (0..DOCUMENTS).step_by(1000) {
            let documents = (first..first + 1000).map(|id| {
                let at = DateTime::from_millis(now - (DOCUMENTS - id) * 1000);
                doc! { "_id": id, "at": at, "payload": &payload }
            });
            collection.insert_many(documents).await?;
        }
        collection
            .create_index(mongodb::IndexModel::builder().keys(doc! { "at": 1 }).build())
            .await?;
    }
    Ok(())
}

async fn wait_until_warm(daemon: &Daemon, fast: &ReplicaSet) -> anyhow::Result<()> {
    let collection =
        Rc::new(fast.client().await?.database("bench").collection::<bson::Document>("tiered"));
    let until = Instant::now() + Duration::from_secs(60);
    while collection.count_documents(doc! {}).await? < DOCUMENTS.unsigned_abs() {
        if Instant::now() > until {
            bail!("the warm-up does not end; look at http://{}/status", daemon.admin);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}
