//! Real drivers against the handshake: PyMongo and the Rust driver. They must see one mongos, use
//! sessions and every compressor, and move on as soon as a drain begins.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use bson::doc;
use mongodb::Client;
use mongodb::event::EventHandler;
use mongodb::event::sdam::SdamEvent;
use mongodb::options::ClientOptions;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::mpsc;

use crate::echo::{Server, eventually, run};

#[test]
fn the_rust_driver_sees_a_mongos_and_is_told_of_a_drain() {
    run(async {
        let server = Server::with(2, 100, |_| {}).await;
        let mut options =
            ClientOptions::parse(format!("{}?appName=rust-test", server.uri())).await.unwrap();
        // So long that only a waiting or streaming hello can bring the news.
        options.heartbeat_freq = Some(Duration::from_secs(600));
        options.server_selection_timeout = Some(Duration::from_secs(20));
        let (events, mut seen) = mpsc::unbounded_channel();
        options.sdam_event_handler = Some(EventHandler::callback(move |event| {
            if let SdamEvent::ServerDescriptionChanged(change) = event {
                let _ = events.send(format!("{:?}", change.new_description.server_type()));
            }
        }));
        let client = Client::with_options(options).unwrap();
        let admin = client.database("admin");
        assert_eq!(
            admin.run_command(doc! { "ping": 1 }).await.unwrap().get_f64("ok").unwrap(),
            1.0
        );
        let info = admin.run_command(doc! { "buildInfo": 1 }).await.unwrap();
        assert_eq!(info.get_str("version").unwrap(), "6.0.5");
        assert_eq!(seen.recv().await.unwrap(), "Mongos");
        // Sessions are on: the driver would refuse to start one otherwise.
        let mut session = client.start_session().await.unwrap();
        admin.run_command(doc! { "ping": 1 }).session(&mut session).await.unwrap();
        let apps: Vec<_> = server.describe().await.concat();
        assert!(apps.iter().any(|client| client.app_name.as_deref() == Some("rust-test")));

        let report = server.drain().await;
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(seen.recv().await.unwrap(), "Unknown");
    });
}

/// PyMongo, installed once for all test runs of this checkout.
async fn pymongo() -> PathBuf {
    let site = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("pymongo-4.20");
    if site.join("pymongo").exists() {
        return site;
    }
    // Built beside and moved into place: other test processes may be doing the same.
    let scratch = site.with_extension(format!("{}", std::process::id()));
    let mut pip = tokio::process::Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-warn-script-location", "--target"]);
    pip.arg(&scratch).args(["pymongo[snappy,zstd]==4.20.*"]);
    let status = pip.status().await.expect("python3 with pip is needed for PyMongo");
    assert!(status.success(), "pip cannot install PyMongo");
    if std::fs::rename(&scratch, &site).is_err() {
        std::fs::remove_dir_all(&scratch).unwrap();
    }
    assert!(site.join("pymongo").exists());
    site
}

const PYTHON: &str = r#"
import sys
import pymongo
from pymongo import monitoring

class Watch(monitoring.ServerListener):
    def opened(self, event): pass
    def closed(self, event): pass
    def description_changed(self, event):
        print("server", event.new_description.server_type_name, flush=True)

uri = sys.argv[1]
for compressors in (None, "snappy", "zlib", "zstd"):
    options = {"compressors": compressors} if compressors else {}
    client = pymongo.MongoClient(uri, appname="py-test", serverSelectionTimeoutMS=20000, **options)
    text = "compressible " * 1000
    reply = client.admin.command({"echo": text})
    assert reply["echo"] == text, reply
    # PyMongo has no public way to tell; its version is pinned.
    (connection,) = client._topology._servers[client.address].pool.conns
    context = connection.compression_context
    assert type(context).__name__.lower() == (compressors or "none") + ("context" if compressors else "type")
    hello = client.admin.command("hello")
    assert hello["msg"] == "isdbgrid" and "setName" not in hello and "hosts" not in hello, hello
    assert client.nodes == {client.address}, client.nodes
    assert client.topology_description.topology_type_name == "Sharded"
    assert client.server_info()["version"] == "6.0.5"
    with client.start_session() as session:
        client.admin.command("ping", session=session)
    # An unacknowledged write, and at once a read on the same connection.
    before = client.admin.command("inserts")["n"]
    single = pymongo.MongoClient(uri, maxPoolSize=1, **options)
    single.test.get_collection("c", write_concern=pymongo.WriteConcern(w=0)).insert_one({"x": 1})
    assert single.admin.command("inserts")["n"] == before + 1
    single.close()
    client.close()

# One monitor that streams and one that polls, neither due again for ten minutes.
streaming = pymongo.MongoClient(uri, serverMonitoringMode="stream", heartbeatFrequencyMS=600000,
                                event_listeners=[Watch()])
polling = pymongo.MongoClient(uri, serverMonitoringMode="poll", heartbeatFrequencyMS=600000)
for client in (streaming, polling):
    client.admin.command("ping")
print("ready", flush=True)
sys.stdin.read()
"#;

#[test]
fn pymongo_sees_a_mongos_with_every_compressor_and_is_told_of_a_drain() {
    run(async {
        let site = pymongo().await;
        let server = Server::with(2, 100, |_| {}).await;
        let mut python = tokio::process::Command::new("python3")
            .args(["-c", PYTHON, &server.uri()])
            .env("PYTHONPATH", site)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let input = python.stdin.take().unwrap();
        let mut lines = BufReader::new(python.stdout.take().unwrap()).lines();
        let mut next = async || lines.next_line().await.unwrap().expect("python has failed");
        // Listeners are told from a thread of their own, at its leisure.
        let mut seen = [next().await, next().await];
        seen.sort();
        assert_eq!(seen, ["ready", "server Mongos"]);
        let described = server.describe().await.concat();
        let from_pymongo =
            |name: &Option<String>| name.as_ref().is_some_and(|n| n.starts_with("PyMongo"));
        assert!(described.iter().any(|client| from_pymongo(&client.driver)), "{described:?}");

        let report = server.drain().await;
        assert!(report.is_clean(), "{report:?}");
        // By the stream: the next poll would be ten minutes away.
        assert_eq!(next().await, "server Unknown");
        drop(input);
        assert!(python.wait().await.unwrap().success());
        eventually("nobody is left", || server.clients.open() == 0).await;
    });
}
