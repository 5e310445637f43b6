//! Two tiers with a running daemon, and a plain replica set to hold its replies against.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bson::{Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use halocline_testbed::{Companion, ReplicaSet};
use halocline_tiering::DateKind;
use mongodb::{Client, Collection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Database of every collection here.
pub const DB: &str = "differential";
/// Age of the boundary once the warm-up has ended.
pub const KEEP: Duration = Duration::from_secs(3600);
/// How much older than that a document must be to be evicted.
pub const GRACE: Duration = Duration::from_secs(1);
/// How long anything may take on a machine that compiles meanwhile.
const PATIENCE: Duration = Duration::from_secs(90);

/// The three replica sets.
pub struct Sets {
    pub fast: ReplicaSet,
    pub archive: ReplicaSet,
    pub plain: ReplicaSet,
    pub fast_client: Client,
    pub archive_client: Client,
    pub plain_client: Client,
}

impl Sets {
    pub async fn start() -> Self {
        let set = |name: &str| {
            ReplicaSet::builder().name(name).members(1).cache_mb(256).oplog_mb(256).start()
        };
        let (fast, archive, plain) = tokio::join!(set("fast"), set("archive"), set("plain"));
        let (fast, archive, plain) = (fast.unwrap(), archive.unwrap(), plain.unwrap());
        Self {
            fast_client: fast.client().await.unwrap(),
            archive_client: archive.client().await.unwrap(),
            plain_client: plain.client().await.unwrap(),
            fast,
            archive,
            plain,
        }
    }

    pub fn of(client: &Client, coll: &str) -> Collection<RawDocumentBuf> {
        client.database(DB).collection(coll)
    }

    /// What matches at that set's primary.
    pub async fn find(client: &Client, coll: &str, filter: Document) -> Vec<RawDocumentBuf> {
        Self::of(client, coll).find(filter).await.unwrap().try_collect().await.unwrap()
    }
}

/// A tiered collection of one run.
#[derive(Debug, Clone)]
pub struct Tiered {
    pub coll: String,
    pub kind: DateKind,
}

/// A running daemon; killed when dropped.
pub struct Daemon {
    process: Companion,
    directory: PathBuf,
    pub listen: SocketAddr,
    admin: SocketAddr,
}

impl Daemon {
    /// Starts one that tiers these collections, and waits until it serves.
    pub async fn start(sets: &Sets, collections: &[Tiered]) -> Self {
        let directory = tempfile::Builder::new()
            .prefix("daemon-")
            .tempdir_in(sets.fast.directory())
            .unwrap()
            .keep();
        let (listen, admin) = (free_address(), free_address());
        let path = directory.join("halocline.toml");
        fs::write(&path, configuration(sets, collections, listen, admin)).unwrap();
        let hidden: Vec<_> = std::env::vars_os()
            .map(|(name, _)| name)
            .filter(|name| name.to_string_lossy().starts_with("HALOCLINE"))
            .collect();
        let log = File::create(directory.join("log")).unwrap();
        let arguments = ["run".into(), "--config".into(), path.into_os_string()];
        let program = env!("CARGO_BIN_EXE_halocline").as_ref();
        let process = sets.fast.start_beside(program, &arguments, &hidden, log).unwrap();
        let mut daemon = Self { process, directory, listen, admin };
        let began = Instant::now();
        while !daemon.get("/readyz").await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
        {
            let ended = daemon.process.ended();
            assert!(
                ended.is_none() && began.elapsed() < PATIENCE,
                "the daemon does not serve ({ended:?}):\n{}",
                daemon.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        daemon
    }

    /// SIGTERM, and waits for the end: the next daemon need not wait for this one's lease.
    pub async fn stop(mut self) {
        self.process.terminate().unwrap();
        let began = Instant::now();
        while self.process.ended().is_none() && began.elapsed() < Duration::from_secs(30) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn get(&self, path: &str) -> Option<String> {
        let mut socket = TcpStream::connect(self.admin).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        socket.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.ok()?;
        Some(answer)
    }

    /// `/status`.
    pub async fn status(&self) -> Option<serde_json::Value> {
        let answer = self.get("/status").await?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    /// Waits until the archive has every change. Says what is wrong if it never does.
    pub async fn drained(&self) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let status = self.status().await.unwrap_or_default();
            if status["feeder"]["pending_keys"] == 0 {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                return Err(format!("the feeder does not drain: {}", status["feeder"]));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    /// The end of its log, for people.
    pub fn end_of_log(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// Short times, so that documents come and go while a test looks on.
fn configuration(
    sets: &Sets,
    collections: &[Tiered],
    listen: SocketAddr,
    admin: SocketAddr,
) -> String {
    let (fast, archive) = (sets.fast.uri(), sets.archive.uri());
    let (keep, grace) = (KEEP.as_secs(), GRACE.as_secs());
    let mut text = format!(
        r#"
[listen]
addresses = ["{listen}"]
[admin]
listen = "{admin}"
[fast]
uri = "{fast}"
[archive]
uri = "{archive}"
[actors]
connection_threads = 2
appliers = 8
evictors = 4
warmers = 4
[feeder]
coalesce = "20ms"
token_interval = "200ms"
[moves]
batch_documents = 5
batch_pause = "50ms"
evict_interval = "200ms"
evict_grace = "{grace}s"
residency = "1s"
allow_short_residency = true
[log]
level = "info"
"#
    );
    for Tiered { coll, kind } in collections {
        let kind = match kind {
            DateKind::Date => "date",
            DateKind::ObjectId => "objectid",
            DateKind::EpochSeconds => "epoch-seconds",
            DateKind::EpochMillis => "epoch-millis",
        };
        text += &format!(
            "[[collection]]\nnamespace = \"{DB}.{coll}\"\ndate_field = \"at\"\n\
             date_kind = \"{kind}\"\nkeep = \"{keep}s\"\n"
        );
    }
    text
}

fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

/// What the daemon has stored of a collection's boundary.
pub async fn boundary(sets: &Sets, coll: &str) -> Option<i64> {
    let boundaries = sets.fast_client.database("halocline").collection::<Document>("boundaries");
    let stored = boundaries.find_one(doc! { "_id": format!("{DB}.{coll}") }).await.unwrap();
    stored.and_then(|boundary| boundary.get_i64("complete_from").ok())
}
