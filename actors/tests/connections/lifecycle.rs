//! How connections come and go: limits, panics, slow clients, drains.

use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bson::doc;
use halocline_wire::MsgFlags;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use crate::echo::{Server, eventually, run};
use crate::metrics::{errors, value};
use crate::raw::{Raw, request};

#[test]
fn a_panic_ends_its_client_alone_and_is_counted() {
    run(async {
        let server = Server::start().await;
        let mut bystander = Raw::connect(server.address).await;
        bystander.ping().await;
        let mut busy = Raw::connect(server.address).await;
        busy.send(&request(1, MsgFlags::NONE, doc! { "wait": 1, "$db": "d" })).await;
        let before = errors("panic");
        for round in 1..=3 {
            let mut victim = Raw::connect(server.address).await;
            victim.send(&request(1, MsgFlags::NONE, doc! { "panic": 1, "$db": "d" })).await;
            victim.closed().await;
            eventually("the count", || server.counts("connection_handler").panics == round).await;
        }
        eventually("two are left", || server.counts("connection_handler").up == 2).await;
        assert_eq!(server.clients.open(), 2);
        assert_eq!(errors("panic"), before + 3.0);
        bystander.ping().await;
        server.shared.gate.add_permits(1);
        assert_eq!(busy.receive().await.unwrap().header.response_to, 1);
        assert!(server.supervisor.is_ready(), "clients cannot make the daemon fail");
        assert_eq!(server.counts("connection_thread").restarts, 0);
    });
}

#[test]
fn beyond_the_limit_clients_are_turned_away_until_one_leaves() {
    run(async {
        let server = Server::with(2, 3, |_| {}).await;
        let rejected = "halocline_clients_rejected_total{reason=\"max_connections\"}";
        let before = value(rejected);
        let mut clients = Vec::new();
        for _ in 0..3 {
            let mut client = Raw::connect(server.address).await;
            client.ping().await;
            clients.push(client);
        }
        for _ in 0..5 {
            Raw::connect(server.address).await.closed().await;
        }
        eventually("the count", || value(rejected) == before + 5.0).await;
        clients.pop();
        eventually("a place is free", || server.clients.open() == 2).await;
        Raw::connect(server.address).await.ping().await;
        for client in &mut clients {
            client.ping().await;
        }
    });
}

#[test]
fn clients_go_to_the_thread_that_has_the_fewest() {
    run(async {
        let server = Server::with(3, 100, |_| {}).await;
        let mut clients = Vec::new();
        for _ in 0..9 {
            let mut client = Raw::connect(server.address).await;
            client.ping().await;
            clients.push(client);
        }
        let loads = |all: Vec<Vec<_>>| all.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(loads(server.describe().await), [3, 3, 3]);

        // Empty one thread: the next clients fill it up.
        let leavers: Vec<_> = server.describe().await[1].iter().map(|c| c.peer).collect();
        clients.retain(|client| !leavers.contains(&client.socket.local_addr().unwrap()));
        eventually("they have left", || server.clients.open() == 6).await;
        for _ in 0..3 {
            let mut client = Raw::connect(server.address).await;
            client.ping().await;
            clients.push(client);
        }
        assert_eq!(loads(server.describe().await), [3, 3, 3]);
    });
}

#[test]
fn a_client_that_does_not_read_its_reply_is_cut_off() {
    run(async {
        let server = Server::with(1, 10, |settings| {
            settings.write_timeout = Duration::from_millis(200);
        })
        .await;
        let before = errors("client_write_timeout");
        let mut client = Raw::connect(server.address).await;
        // More than the kernel buffers for a connection.
        let big = doc! { "big": 15_000_000, "$db": "d" };
        client.send(&request(1, MsgFlags::NONE, big)).await;
        eventually("it is cut off", || errors("client_write_timeout") > before).await;
        eventually("and forgotten", || server.clients.open() == 0).await;
    });
}

#[test]
fn a_client_that_reads_slowly_gets_every_byte() {
    run(async {
        let patience = Duration::from_secs(2);
        let server = Server::with(1, 10, |settings| settings.write_timeout = patience).await;
        let mut reader = Raw::connect(server.address).await;
        let began = std::time::Instant::now();
        let big = doc! { "big": 15_000_000, "$db": "d" };
        reader.send(&request(2, MsgFlags::NONE, big)).await;
        let mut head = [0; 16];
        reader.socket.read_exact(&mut head).await.unwrap();
        let length = i32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
        let mut left = length - 16;
        let mut piece = vec![0; 400_000];
        while left > 0 {
            tokio::time::sleep(Duration::from_millis(80)).await;
            let read = reader.socket.read(&mut piece).await.unwrap();
            assert_ne!(read, 0, "cut off with {left} bytes to go");
            left -= read;
        }
        assert!(began.elapsed() > patience, "too fast to show anything");
        reader.ping().await;
    });
}

#[test]
fn a_client_that_stops_inside_a_message_is_cut_off_and_an_idle_one_is_not() {
    run(async {
        let server = Server::with(1, 10, |settings| {
            settings.read_timeout = Duration::from_millis(100);
        })
        .await;
        let before = errors("client_read_timeout");
        let mut idle = Raw::connect(server.address).await;
        idle.ping().await;
        let whole = request(1, MsgFlags::NONE, doc! { "ping": 1, "$db": "d" });
        for cut in [1, 15, 16, whole.len() - 1] {
            let mut client = Raw::connect(server.address).await;
            client.send(&whole[..cut]).await;
            client.closed().await;
        }
        eventually("the count", || errors("client_read_timeout") >= before + 4.0).await;
        idle.ping().await;
    });
}

/// Case 29, on one connection of each kind.
#[test]
fn a_drain_closes_idle_clients_at_once_and_busy_ones_after_their_reply() {
    run(async {
        let server = Server::with(2, 100, |_| {}).await;
        let mut idle = Raw::connect(server.address).await;
        idle.ping().await;
        let mut busy = Raw::connect(server.address).await;
        busy.send(&request(5, MsgFlags::NONE, doc! { "wait": 1, "$db": "d" })).await;
        let waiting = &server.shared.waiting;
        eventually("it is busy", || waiting.load(Ordering::SeqCst) == 1).await;

        let supervisor = server.supervisor.clone();
        let drain = actix_rt::spawn(async move { supervisor.drain(Duration::from_secs(60)).await });
        idle.closed().await;
        assert!(busy.is_silent().await, "its operation is still running");
        assert!(!drain.is_finished());
        let refused = tokio::net::TcpStream::connect(server.address).await;
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);

        server.shared.gate.add_permits(1);
        let reply = busy.receive().await.unwrap();
        assert_eq!(reply.header.response_to, 5);
        busy.closed().await;
        let report = drain.await.unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(server.clients.open(), 0);
        assert_eq!(server.counts("connection_handler").up, 0);
    });
}

#[test]
fn commands_without_a_reply_are_still_run_when_a_drain_begins_between_them() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let insert = doc! { "insert": "c", "$db": "d", "documents": [] };
        let mut burst = request(1, MsgFlags::MORE_TO_COME, doc! { "wait": 1, "$db": "d" }).to_vec();
        burst.extend_from_slice(&request(2, MsgFlags::MORE_TO_COME, insert));
        burst.extend_from_slice(&request(3, MsgFlags::NONE, doc! { "inserts": 1, "$db": "d" }));
        client.send(&burst).await;
        let waiting = &server.shared.waiting;
        eventually("it is busy", || waiting.load(Ordering::SeqCst) == 1).await;
        let supervisor = server.supervisor.clone();
        let drain = actix_rt::spawn(async move { supervisor.drain(Duration::from_secs(60)).await });
        let hello = server.hello.clone();
        eventually("the drain has reached the connections", || hello.is_draining()).await;
        server.shared.gate.add_permits(1);
        let reply = client.receive().await.unwrap();
        assert_eq!(reply.header.response_to, 3);
        assert_eq!(reply.document().get_i64("n").unwrap(), 1);
        client.closed().await;
        assert!(drain.await.unwrap().is_clean());
    });
}

#[test]
fn a_client_that_never_pauses_is_not_served_for_ever_during_a_drain() {
    run(async {
        let server = Server::start().await;
        let mut client = Raw::connect(server.address).await;
        let mut burst = request(1, MsgFlags::NONE, doc! { "wait": 1, "$db": "d" }).to_vec();
        burst.extend_from_slice(&request(2, MsgFlags::NONE, doc! { "ping": 1, "$db": "d" }));
        client.send(&burst).await;
        let waiting = &server.shared.waiting;
        eventually("it is busy", || waiting.load(Ordering::SeqCst) == 1).await;
        let supervisor = server.supervisor.clone();
        let drain = actix_rt::spawn(async move { supervisor.drain(Duration::from_secs(60)).await });
        let hello = server.hello.clone();
        eventually("the drain has reached the connections", || hello.is_draining()).await;
        server.shared.gate.add_permits(1);
        assert_eq!(client.receive().await.unwrap().header.response_to, 1);
        client.closed().await;
        assert!(drain.await.unwrap().is_clean());
    });
}

#[test]
fn a_client_whose_operation_outlasts_the_deadline_is_named_and_cut_off() {
    run(async {
        let server = Server::start().await;
        let mut busy = Raw::connect(server.address).await;
        busy.send(&request(5, MsgFlags::NONE, doc! { "wait": 1, "$db": "d" })).await;
        let waiting = &server.shared.waiting;
        eventually("it is busy", || waiting.load(Ordering::SeqCst) == 1).await;
        let report = server.supervisor.drain(Duration::from_secs(2)).await;
        assert_eq!(report.unfinished, ["connections-0"]);
        assert!(report.stuck_arbiters.is_empty(), "{report:?}");
        busy.closed().await;
    });
}

const STARVED: &str = "HALOCLINE_TEST_STARVED";

/// Not a test by itself: the daemon of the next one, in a process with few file descriptors.
#[test]
fn starved_daemon() {
    if std::env::var_os(STARVED).is_none() {
        return;
    }
    run(async {
        let server = Server::start().await;
        println!("listening on {}", server.address);
        // Until the parent ends this process, or is gone.
        let ask = || std::io::Read::read(&mut std::io::stdin(), &mut [0]);
        while actix_rt::task::spawn_blocking(ask).await.unwrap().unwrap() > 0 {
            let failed = "halocline_clients_rejected_total{reason=\"accept_failed\"}";
            println!("open {} failed {}", server.clients.open(), value(failed));
        }
    });
}

#[test]
fn running_out_of_file_descriptors_does_not_end_the_acceptor() {
    run(async {
        let me = std::env::current_exe().unwrap();
        let mut daemon = tokio::process::Command::new("sh")
            .args([
                "-c",
                "ulimit -n 48 && exec \"$0\" --exact lifecycle::starved_daemon --nocapture",
            ])
            .arg(me)
            .env(STARVED, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut input = daemon.stdin.take().unwrap();
        let mut lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
        let mut line_with = async |word: &str| loop {
            let line = lines.next_line().await.unwrap().expect("the daemon has ended");
            if let Some((_, rest)) = line.split_once(word) {
                break rest.to_owned();
            }
        };
        let address = line_with("listening on ").await.trim().parse().unwrap();

        let mut clients = Vec::new();
        for _ in 0..60 {
            clients.push(Raw::connect(address).await);
        }
        // The first are served while the last wait in the backlog.
        clients[0].ping().await;
        loop {
            input.write_all(b"?").await.unwrap();
            let rest = line_with("failed ").await;
            if rest.trim().parse::<f64>().unwrap() > 0.0 {
                break;
            }
            tokio::task::yield_now().await;
        }
        clients[0].ping().await;
        // Room again: those who waited are served, without anybody's help.
        clients.drain(..50);
        for client in &mut clients {
            client.ping().await;
        }
        daemon.kill().await.unwrap();
    });
}
