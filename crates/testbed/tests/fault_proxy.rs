//! The fault proxy, before a plain TCP server and before mongods.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::time::Duration;

use bson::{Document, doc};
use halocline_testbed::{Direction, FaultProxy, ReplicaSet};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// A server that answers `?x` with `!x` and reports every byte it gets, ends included.
struct Server {
    address: SocketAddr,
    heard: mpsc::UnboundedReceiver<Option<u8>>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (report, heard) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let report = report.clone();
                tokio::spawn(async move {
                    while let Ok(byte) = socket.read_u8().await {
                        let _ = report.send(Some(byte));
                        if socket.write_all(&[byte.to_ascii_uppercase()]).await.is_err() {
                            break;
                        }
                    }
                    let _ = report.send(None);
                });
            }
        });
        Self { address, heard }
    }

    async fn hears(&mut self) -> Option<u8> {
        self.heard.recv().await.unwrap()
    }
}

async fn connected(proxy: &FaultProxy) -> TcpStream {
    TcpStream::connect(proxy.address()).await.unwrap()
}

async fn ask(client: &mut TcpStream, byte: u8) -> std::io::Result<u8> {
    client.write_all(&[byte]).await?;
    client.read_u8().await
}

/// Long enough that what should come would have come.
async fn stays_silent(client: &mut TcpStream) {
    let read = tokio::time::timeout(Duration::from_millis(150), client.read_u8()).await;
    assert!(read.is_err(), "{read:?}");
}

#[tokio::test]
async fn without_faults_everything_passes_and_is_counted() {
    let mut server = Server::start().await;
    let proxy = FaultProxy::start(server.address).unwrap();
    let mut client = connected(&proxy).await;
    assert_eq!(ask(&mut client, b'a').await.unwrap(), b'A');
    assert_eq!(server.hears().await, Some(b'a'));
    // Counted when the write has returned, which the reader may be ahead of.
    while proxy.forwarded_bytes(Direction::ToServer) + proxy.forwarded_bytes(Direction::ToClient)
        < 2
    {
        tokio::task::yield_now().await;
    }
    assert_eq!((proxy.open_connections(), proxy.accepted_connections()), (1, 1));
    // A close is passed on too, and the connection is forgotten.
    drop(client);
    assert_eq!(server.hears().await, None);
    while proxy.open_connections() > 0 {
        tokio::task::yield_now().await;
    }
    // Dropping the proxy ends the rest.
    let mut client = connected(&proxy).await;
    assert_eq!(ask(&mut client, b'b').await.unwrap(), b'B');
    drop(proxy);
    client.read_u8().await.unwrap_err();
}

#[tokio::test]
async fn a_pause_holds_each_direction_and_loses_nothing() {
    let mut server = Server::start().await;
    let proxy = FaultProxy::start(server.address).unwrap();
    let mut client = connected(&proxy).await;
    assert_eq!(ask(&mut client, b'a').await.unwrap(), b'A');
    assert_eq!(server.hears().await, Some(b'a'));

    proxy.pause(Direction::ToServer);
    client.write_all(b"b").await.unwrap();
    stays_silent(&mut client).await;
    assert!(server.heard.try_recv().is_err());
    proxy.forward(Direction::ToServer);
    assert_eq!(client.read_u8().await.unwrap(), b'B');
    assert_eq!(server.hears().await, Some(b'b'));

    proxy.pause(Direction::ToClient);
    client.write_all(b"c").await.unwrap();
    assert_eq!(server.hears().await, Some(b'c'));
    stays_silent(&mut client).await;
    proxy.heal();
    assert_eq!(client.read_u8().await.unwrap(), b'C');
}

#[tokio::test]
async fn a_paused_direction_makes_the_sender_wait_instead_of_filling_memory() {
    let server = Server::start().await;
    let proxy = FaultProxy::start(server.address).unwrap();
    let mut client = connected(&proxy).await;
    assert_eq!(ask(&mut client, b'a').await.unwrap(), b'A');
    proxy.pause(Direction::ToServer);
    let flood = vec![b'x'; 64 * 1024 * 1024];
    let sent = tokio::time::timeout(Duration::from_millis(500), client.write_all(&flood)).await;
    assert!(sent.is_err(), "64 MB went into a paused connection");
}

#[tokio::test]
async fn a_blackhole_loses_silently_and_healing_resets_what_lost_something() {
    let mut server = Server::start().await;
    let proxy = FaultProxy::start(server.address).unwrap();
    let (mut hurt, mut idle) = (connected(&proxy).await, connected(&proxy).await);
    assert_eq!(ask(&mut hurt, b'a').await.unwrap(), b'A');
    assert_eq!(server.hears().await, Some(b'a'));
    assert_eq!(ask(&mut idle, b'b').await.unwrap(), b'B');
    assert_eq!(server.hears().await, Some(b'b'));

    proxy.blackhole(Direction::ToServer);
    hurt.write_all(b"c").await.unwrap();
    stays_silent(&mut hurt).await;
    proxy.heal();
    hurt.read_u8().await.unwrap_err();
    assert_eq!(server.hears().await, None, "the request never came");
    assert_eq!(ask(&mut idle, b'd').await.unwrap(), b'D');
    assert_eq!(server.hears().await, Some(b'd'));

    proxy.blackhole(Direction::ToClient);
    idle.write_all(b"e").await.unwrap();
    assert_eq!(server.hears().await, Some(b'e'), "the request came, its reply is lost");
    stays_silent(&mut idle).await;
    proxy.forward(Direction::ToClient);
    idle.read_u8().await.unwrap_err();
    assert_eq!(ask(&mut connected(&proxy).await, b'f').await.unwrap(), b'F');
}

#[tokio::test]
async fn a_delay_holds_everything_back_in_order() {
    let server = Server::start().await;
    let proxy = FaultProxy::start(server.address).unwrap();
    let mut client = connected(&proxy).await;
    let delay = Duration::from_millis(60);
    proxy.delay(Direction::ToServer, delay);
    proxy.delay(Direction::ToClient, delay);
    let began = tokio::time::Instant::now();
    client.write_all(b"a").await.unwrap();
    client.write_all(b"bc").await.unwrap();
    let mut answer = [0; 3];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"ABC");
    // A lower bound, which no load on the machine can break.
    assert!(began.elapsed() >= 2 * delay);
}

#[tokio::test]
async fn a_cut_resets_both_sides_and_a_refusal_new_connections_too() {
    let mut server = Server::start().await;
    let proxy = FaultProxy::start(server.address).unwrap();
    let mut client = connected(&proxy).await;
    assert_eq!(ask(&mut client, b'a').await.unwrap(), b'A');
    assert_eq!(server.hears().await, Some(b'a'));
    proxy.cut();
    let error = client.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(server.hears().await, None);
    let mut client = connected(&proxy).await;
    assert_eq!(ask(&mut client, b'b').await.unwrap(), b'B');

    proxy.refuse();
    client.read_u8().await.unwrap_err();
    assert!(
        match TcpStream::connect(proxy.address()).await {
            Ok(mut client) => ask(&mut client, b'c').await.is_err(),
            Err(_) => true,
        },
        "a refused connection answered"
    );
    proxy.heal();
    assert_eq!(ask(&mut connected(&proxy).await, b'd').await.unwrap(), b'D');
    // A target that is not there is a refusal as well.
    let nobody = FaultProxy::start("127.0.0.1:1".parse().unwrap()).unwrap();
    let mut client = connected(&nobody).await;
    client.read_u8().await.unwrap_err();
}

#[tokio::test]
async fn the_reply_to_a_chosen_request_is_lost_after_the_server_had_it() {
    let mut server = Server::start().await;
    let proxy = FaultProxy::start(server.address).unwrap();
    let mut client = connected(&proxy).await;
    let lost = proxy.lose_reply_to(|bytes| bytes.contains(&b'x'));
    assert_eq!(ask(&mut client, b'a').await.unwrap(), b'A');
    assert!(!lost.has_happened());
    ask(&mut client, b'x').await.unwrap_err();
    lost.happened().await;
    assert_eq!(server.hears().await, Some(b'a'));
    assert_eq!(server.hears().await, Some(b'x'));
    // Once only.
    assert_eq!(ask(&mut connected(&proxy).await, b'x').await.unwrap(), b'X');
}

#[tokio::test]
async fn a_drivers_retry_after_a_lost_reply_inserts_once() {
    let set = ReplicaSet::builder().proxied().start().await.unwrap();
    let proxy = set.proxy(0).unwrap();
    assert!(set.uri().contains(&proxy.address().to_string()));
    let things = set.client().await.unwrap().database("test").collection::<Document>("things");
    things.insert_one(doc! {"_id": 1}).await.unwrap();

    let lost = proxy.lose_reply_to(|bytes| bytes.windows(7).any(|w| w == b"insert\0"));
    things.insert_one(doc! {"_id": 2}).await.unwrap();
    assert!(lost.has_happened());
    assert_eq!(things.count_documents(doc! {}).await.unwrap(), 2);
}

#[tokio::test]
async fn members_of_a_proxied_set_reach_each_other_through_the_proxies() {
    let set = ReplicaSet::builder().members(3).proxied().start().await.unwrap();
    let things = set.client().await.unwrap().database("test").collection::<Document>("things");
    things.insert_one(doc! {"_id": 1}).await.unwrap();
    // Cut off from everybody who would reach it, the primary hears of no vote and loses its place.
    set.proxy(0).unwrap().refuse();
    for i in [1, 2] {
        set.proxy(i).unwrap().cut();
    }
    things.insert_one(doc! {"_id": 2}).await.unwrap();
    set.proxy(0).unwrap().heal();
    set.wait_up().await.unwrap();
    assert_eq!(things.count_documents(doc! {}).await.unwrap(), 2);
}
