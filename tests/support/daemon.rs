//! The real daemon as a child process: its configuration, its ports, its end, and what it says of
//! itself over HTTP.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use halocline_testbed::Companion;
use mongodb::Client;
use mongodb::bson::{Document, doc};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::deployment::{COLL, DB, NS, Pair};
use super::until;

/// What differs between tests; everything else is the daemon's default or suits a small machine.
#[derive(Debug, Clone)]
pub struct Config {
    /// Age at which documents leave the window.
    pub keep: &'static str,
    /// How long a client's change keeps its document on the fast tier. Tests cannot wait for the
    /// usual ten minutes; no document here is inserted again that soon after it was mirrored.
    pub residency: &'static str,
    /// How often the evictor looks.
    pub evict_interval: &'static str,
    /// Documents a move carries at most.
    pub batch_documents: u32,
    /// Pause between moves.
    pub batch_pause: &'static str,
    /// How long a change waits to be joined by others.
    pub coalesce: &'static str,
    /// Panics of one actor that end the daemon.
    pub failure_limit: u32,
    /// How long a drain may take.
    pub drain_deadline: &'static str,
}

impl Config {
    /// A window nothing leaves.
    pub const DEFAULT: Config = Config {
        keep: "1h",
        residency: "2s",
        evict_interval: "300ms",
        batch_documents: 100,
        batch_pause: "10ms",
        coalesce: "100ms",
        failure_limit: 1000,
        drain_deadline: "20s",
    };

    fn text(&self, pair: &Pair, listen: SocketAddr, admin: SocketAddr) -> String {
        let Self {
            keep,
            residency,
            evict_interval,
            batch_documents,
            batch_pause,
            coalesce,
            failure_limit,
            drain_deadline,
        } = self;
        let (fast, archive) = (pair.fast.uri(), pair.archive.uri());
        format!(
            r#"
[listen]
addresses = ["{listen}"]
[admin]
listen = "{admin}"
[fast]
uri = "{fast}"
[archive]
uri = "{archive}"
[[collection]]
namespace = "{NS}"
date_field = "at"
keep = "{keep}"
[actors]
connection_threads = 2
appliers = 8
failure_limit = {failure_limit}
failure_window = "2m"
[feeder]
coalesce = "{coalesce}"
token_interval = "200ms"
[moves]
batch_documents = {batch_documents}
batch_pause = "{batch_pause}"
evict_interval = "{evict_interval}"
evict_grace = "1s"
residency = "{residency}"
allow_short_residency = true
[limits]
drain_deadline = "{drain_deadline}"
[log]
level = "info,halocline_actors=debug"
"#
        )
    }
}

/// A daemon, or the place for one after its end. Killed when dropped; its log is shown then if the
/// test fails.
pub struct Daemon {
    directory: PathBuf,
    listen: Port,
    admin: Port,
    process: Option<Companion>,
}

impl Daemon {
    /// Starts one and waits until it serves clients.
    pub async fn start(pair: &Pair, config: &Config) -> Daemon {
        let mut daemon = Self::prepare(pair, config);
        daemon.launch(pair);
        daemon.wait_ready().await;
        daemon
    }

    /// Takes the ports and writes the configuration; starts nothing.
    pub fn prepare(pair: &Pair, config: &Config) -> Daemon {
        // Inside the fast tier's: the testbed knows its processes by it, and removes it.
        let directory = tempfile::Builder::new()
            .prefix("daemon-")
            .tempdir_in(pair.fast.directory())
            .unwrap()
            .keep();
        let (listen, admin) = (Port::take(), Port::take());
        let text = config.text(pair, listen.address(), admin.address());
        fs::write(directory.join("halocline.toml"), text).unwrap();
        Daemon { directory, listen, admin, process: None }
    }

    /// Starts the process and does not wait for anything.
    pub fn launch(&mut self, pair: &Pair) {
        assert!(self.process.is_none(), "it runs already");
        let hidden: Vec<OsString> = std::env::vars_os()
            .map(|(name, _)| name)
            .filter(|name| name.to_string_lossy().starts_with("HALOCLINE"))
            .collect();
        let mut arming = OsString::from("HALOCLINE_PANIC_FILE=");
        arming.push(self.orders());
        // env(1) becomes the daemon: same process, one more variable.
        let arguments = [
            arming,
            env!("CARGO_BIN_EXE_halocline").into(),
            "run".into(),
            "--config".into(),
            self.directory.join("halocline.toml").into(),
        ];
        let mut log = File::options().create(true).append(true).open(self.log_path()).unwrap();
        writeln!(log, "=== started by the test").unwrap();
        let env = Path::new("/usr/bin/env");
        self.process = Some(pair.fast.start_beside(env, &arguments, &hidden, log).unwrap());
    }

    /// Waits until `/readyz` says so.
    pub async fn wait_ready(&mut self) {
        let began = Instant::now();
        loop {
            if let Ok((200, _)) = self.get("/readyz").await {
                return;
            }
            let ended = self.process.as_mut().and_then(Companion::ended);
            assert!(ended.is_none(), "the daemon ended ({ended:?}) before it was ready");
            assert!(began.elapsed() < super::PATIENCE, "the daemon is not ready");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// SIGKILL; returns when it is gone.
    pub fn kill9(&mut self) {
        drop(self.process.take());
    }

    /// SIGTERM; does not wait.
    pub fn terminate(&mut self) {
        self.process.as_mut().unwrap().terminate().unwrap();
    }

    /// Freezes the process (SIGSTOP), as a machine that stalls would.
    pub fn pause(&self) {
        self.signal("-STOP");
    }

    /// Lets a frozen process go on (SIGCONT).
    pub fn resume(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let pid = self.process.as_ref().unwrap().pid().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Waits until everything acknowledged so far is on the archive: the daemon's own promise for a
    /// read that it cannot cover, so this also holds it to that.
    pub async fn drained(&self) {
        let orders = self.client().await.database(DB).collection::<Document>(COLL);
        orders.count_documents(doc! { "n": -1_i64 }).await.unwrap();
    }

    /// Waits until it has ended by itself.
    pub async fn wait_exit(&mut self) -> ExitStatus {
        let mut process = self.process.take().unwrap();
        until("the daemon to end", async || process.ended()).await
    }

    /// Starts it again, with the same configuration and ports, and waits until it serves clients.
    pub async fn restart(&mut self, pair: &Pair) {
        self.launch(pair);
        self.wait_ready().await;
    }

    /// Fails if the process that was started has ended.
    #[track_caller]
    pub fn assert_running(&mut self) {
        let ended = self.process.as_mut().map(Companion::ended);
        assert_eq!(ended, Some(None), "the daemon should run on");
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.listen.address()
    }

    /// A new client.
    pub async fn client(&self) -> Client {
        Client::with_uri_str(connection_string(&[self], super::PATIENCE)).await.unwrap()
    }

    /// The status code and body of a GET; an error when nobody listens.
    pub async fn get(&self, path: &str) -> io::Result<(u16, String)> {
        let answer = async {
            let mut socket = TcpStream::connect(self.admin.address()).await?;
            let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
            socket.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            socket.read_to_string(&mut answer).await?;
            let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
            let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
            match status {
                Some(status) => Ok((status, body.to_owned())),
                None => Err(io::Error::other("no HTTP answer")),
            }
        };
        tokio::time::timeout(Duration::from_secs(10), answer).await?
    }

    /// `/status`.
    pub async fn status(&self) -> Value {
        let (code, body) = self.get("/status").await.unwrap();
        assert_eq!(code, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// The status of the tiered collection.
    pub async fn collection(&self) -> Value {
        self.status().await["collections"][0].clone()
    }

    /// Requests answered for that reason.
    pub async fn answered_for(&self, reason: &str) -> u64 {
        let status = self.status().await;
        let reasons = status["requests"]["by_reason"].as_array().unwrap();
        let found = reasons.iter().find(|pair| pair[0] == reason);
        found.map_or(0, |pair| pair[1].as_u64().unwrap())
    }

    /// Up, restarts and panics of one kind of actor.
    pub async fn actor(&self, kind: &str) -> ActorCounts {
        let status = self.status().await;
        let actors = status["actors"].as_array().unwrap();
        let actor = actors.iter().find(|actor| actor["actor"] == kind);
        let actor = actor.unwrap_or_else(|| panic!("no actor {kind} in {actors:?}"));
        let count = |name: &str| actor[name].as_u64().unwrap();
        ActorCounts { up: count("up"), restarts: count("restarts"), panics: count("panics") }
    }

    /// One series of `/metrics`, as Prometheus would read it; 0 if it is not there.
    pub async fn metric(&self, series: &str) -> f64 {
        let (code, body) = self.get("/metrics").await.unwrap();
        assert_eq!(code, 200);
        let value = body.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    /// The next `times` checkpoints of that name panic in the running daemon. Returns when the order
    /// has been taken.
    pub async fn arm(&self, checkpoint: &str, times: u32) {
        let draft = self.directory.join("orders.draft");
        fs::write(&draft, format!("{checkpoint}:{times}")).unwrap();
        fs::rename(&draft, self.orders()).unwrap();
        let orders = self.orders();
        until("the daemon to take the order to panic", async || (!orders.exists()).then_some(()))
            .await;
    }

    fn orders(&self) -> PathBuf {
        self.directory.join("orders")
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// Everything it has logged, of all its lives.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill9();
        if std::thread::panicking() {
            const SHOWN: usize = 150;
            let log = self.log();
            if let Some(directory) = std::env::var_os("HALOCLINE_TEST_LOGS") {
                let name = self.directory.file_name().unwrap_or_default();
                let _ = fs::write(Path::new(&directory).join(name), &log);
            }
            let lines: Vec<&str> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(SHOWN)..];
            println!("--- the daemon's log, last {SHOWN} lines\n{}", tail.join("\n"));
        }
    }
}

/// For clients that look so long for one of the daemons to serve them. Nothing of a replica set in it:
/// daemons look like mongos.
pub fn connection_string(daemons: &[&Daemon], patience: Duration) -> String {
    let addresses: Vec<String> = daemons.iter().map(|d| d.address().to_string()).collect();
    let patience = patience.as_millis();
    format!(
        "mongodb://{}/?heartbeatFrequencyMS=500&serverSelectionTimeoutMS={patience}",
        addresses.join(",")
    )
}

/// Counts of one kind of actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActorCounts {
    pub up: u64,
    pub restarts: u64,
    pub panics: u64,
}

/// A port that stays ours while the daemon is down: clients must find it again where it was.
struct Port {
    number: u16,
    /// Keeps other tests off, also those of other processes.
    _lock: File,
}

impl Port {
    /// Between those of the testbed and those that systems give to outgoing connections.
    const RANGE: std::ops::Range<u16> = 28_000..32_000;

    fn take() -> Self {
        let directory = std::env::temp_dir().join("halocline-test-ports");
        fs::create_dir_all(&directory).unwrap();
        for _ in 0..200 {
            let number = rand::random_range(Self::RANGE);
            let path = directory.join(number.to_string());
            let lock = File::options().create(true).truncate(false).write(true).open(path).unwrap();
            let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok();
            if lock.try_lock().is_ok() && free() {
                return Self { number, _lock: lock };
            }
        }
        panic!("no free port in {:?}", Self::RANGE);
    }

    fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.number).into()
    }
}
