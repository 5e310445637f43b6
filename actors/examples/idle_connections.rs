//! What idle client connections cost: resident memory and threads of a daemon without tiers.
//!
//! `cargo run -p halocline-actors --example idle_connections [connections] [threads]`
//!
//! Two processes, so that each has file descriptors enough and the client's memory is not counted.
//! Every client does a handshake and a ping first: what is measured has been used once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "../tests/connections/echo.rs"]
mod echo;
#[path = "../tests/connections/raw.rs"]
mod raw;

use std::process::Stdio;

use bson::doc;
use halocline_actors::connection::ConnectionHandler;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

use echo::{Echo, Server};
use raw::Raw;

/// The most an idle connection may cost, socket buffers in the kernel not counted.
const BUDGET_BYTES: usize = 10 * 1024;
/// Clients that connect at once.
const AT_ONCE: usize = 100;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |at: usize, usual| arguments.get(at).map_or(usual, |text| text.parse().unwrap());
    let connections = number(1, 10_000);
    let threads = number(2, 2);
    let system = actix_rt::System::new();
    if arguments.get(3).is_some_and(|role| role == "serve") {
        system.block_on(serve(threads, connections));
    } else {
        system.block_on(measure(connections, threads));
    }
}

/// The daemon: tells its memory when asked, ends with its input.
async fn serve(threads: usize, connections: usize) {
    let server = Server::with(threads, connections, |_| {}).await;
    println!("{}", server.address);
    let ask = || std::io::Read::read(&mut std::io::stdin(), &mut [0]);
    while actix_rt::task::spawn_blocking(ask).await.unwrap().unwrap() > 0 {
        println!("{} {} {}", status("VmRSS:"), status("Threads:"), server.clients.open());
    }
}

fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

async fn measure(connections: usize, threads: usize) {
    let mut daemon = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args([connections.to_string(), threads.to_string(), "serve".to_owned()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut input = daemon.stdin.take().unwrap();
    let mut lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
    let address = lines.next_line().await.unwrap().unwrap().parse().unwrap();
    let mut ask = async || {
        input.write_all(b"?").await.unwrap();
        let line = lines.next_line().await.unwrap().unwrap();
        let mut numbers = line.split(' ').map(|number| number.parse::<usize>().unwrap());
        let mut next = || numbers.next().unwrap();
        (next() * 1024, next(), next())
    };

    // What a first client brings into being is not the price of one.
    connect(address).await.ping().await;
    let (before, threads_before, _) = ask().await;
    let mut clients = Vec::with_capacity(connections);
    while clients.len() < connections {
        let batch = (connections - clients.len()).min(AT_ONCE);
        let joining: Vec<_> = (0..batch).map(|_| actix_rt::spawn(connect(address))).collect();
        for client in joining {
            clients.push(client.await.unwrap());
        }
    }
    let (after, threads_after, open) = ask().await;
    assert_eq!(open, connections, "clients were turned away");
    let each = after.saturating_sub(before) / connections;

    // Still served, all of them.
    for client in &mut clients {
        client.ping().await;
    }
    let (used, _, _) = ask().await;
    let each_used = used.saturating_sub(before) / connections;
    drop(clients);

    println!("connections            {connections}");
    println!("resident before        {} KiB", before / 1024);
    println!("resident with them     {} KiB", after / 1024);
    println!("each                   {each} bytes, {each_used} after another command");
    println!("of which the loop      {} bytes", ConnectionHandler::<Echo>::task_bytes());
    println!("threads                {threads_before} before, {threads_after} with them");
    assert_eq!(threads_before, threads_after, "threads must not grow with connections");
    assert!(each.max(each_used) <= BUDGET_BYTES, "an idle connection costs more than 10 KiB");
}

async fn connect(address: std::net::SocketAddr) -> Raw {
    let mut client = Raw::connect(address).await;
    let introduction = doc! {
        "hello": 1,
        "client": {
            "application": { "name": "idle-connections" },
            "driver": { "name": "raw", "version": "1" },
        },
    };
    client.command(introduction).await;
    client.ping().await;
    client
}
