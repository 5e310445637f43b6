//! `halocline-bench idle`: many client connections that do nothing: resident memory a connection,
//! CPU at idle, threads.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use halocline_testbed::ReplicaSet;

use crate::client::Client;
use crate::daemon::{Daemon, program};
use crate::process::{cpu_time, resident_bytes, threads};

/// Options of `idle`.
#[derive(Debug, Args)]
pub struct Options {
    /// The daemon's program; the one beside this program when not given
    #[arg(long)]
    halocline: Option<PathBuf>,
    /// Connections, each opened with a handshake and one ping
    #[arg(long, default_value_t = 10_000)]
    connections: usize,
    /// Seconds over which CPU at idle is measured
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// Runs it and prints the figures.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let program = program(options.halocline.clone())?;
    let (fast, archive) = tokio::try_join!(
        ReplicaSet::builder().name("fast").start(),
        ReplicaSet::builder().name("archive").start()
    )?;
    let more = format!("[limits]\nmax_connections = {}\n", options.connections + 100);
    let daemon = Daemon::start(&program, &fast, &archive, &more).await?;
    let pid = daemon.pid();

    // One connection has everything warmed up that is paid once.
    let mut first = Client::connect(daemon.address).await?;
    first.run(&bson::rawdoc! { "ping": 1, "$db": "admin" }).await?;
    let length = Duration::from_secs(options.seconds);
    let idle_without = cpu_share(pid, length).await?;
    let (memory_before, threads_before) = (resident_bytes(pid)?, threads(pid)?);

    let begun = Instant::now();
    let mut clients = Vec::with_capacity(options.connections);
    for _ in 0..options.connections {
        let mut client = Client::connect(daemon.address).await?;
        client.run(&bson::rawdoc! { "ping": 1, "$db": "admin" }).await?;
        clients.push(client);
    }
    let opened_in = begun.elapsed();
    let idle_with = cpu_share(pid, length).await?;
    let memory = resident_bytes(pid)?;
    #[allow(clippy::cast_precision_loss)]
    let each = memory.saturating_sub(memory_before) as f64 / options.connections.max(1) as f64;
    println!("connections          {}", options.connections);
    println!("opened in            {:.1} s", opened_in.as_secs_f64());
    println!("resident before      {} KiB", memory_before / 1024);
    println!("resident with them   {} KiB", memory / 1024);
    println!("resident each        {:.2} KiB", each / 1024.0);
    println!("CPU idle, one client {:.2} % of one core", idle_without * 100.0);
    println!("CPU idle, all        {:.2} % of one core", idle_with * 100.0);
    println!("threads              {threads_before} before, {} with them", threads(pid)?);
    // All of them still answer.
    for client in &mut clients {
        client.run(&bson::rawdoc! { "ping": 1, "$db": "admin" }).await?;
    }
    println!("all answered a ping afterwards");
    Ok(())
}

async fn cpu_share(pid: u32, length: Duration) -> anyhow::Result<f64> {
    let (before, begun) = (cpu_time(pid)?, Instant::now());
    tokio::time::sleep(length).await;
    let used = cpu_time(pid)?.saturating_sub(before);
    Ok(used.as_secs_f64() / begun.elapsed().as_secs_f64())
}
