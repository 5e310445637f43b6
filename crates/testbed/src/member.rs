//! One member of a replica set: its port, its files and its mongod process, and the command line
//! that the options come to. What members are together is in `replica_set.rs`.

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::builder::{ReplicaSetBuilder, Tls};
use crate::certificates::Certificates;
use crate::error::TestbedError;
use crate::fault_proxy::FaultProxy;
use crate::files;
use crate::port::Port;
use crate::process::{Janitor, Process};

/// How long anything is waited for. A start takes about a second; a machine that also compiles
/// with every core can take twenty times that.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// Between two looks at a condition that cannot be awaited.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// mongod refuses a smaller cache on its command line; its storage engine does not.
const SMALLEST_CACHE_OPTION_MB: u32 = 256;
/// Whoever asks for less wants to see the oplog roll.
const SMALL_OPLOG_MB: u32 = 64;
/// Lines of log shown when a member ends unexpectedly.
const SHOWN_LINES: usize = 15;

/// Parameters that make sets start, stop and fail over fast, for tests.
const QUICK_PARAMETERS: [(&str, &str); 5] = [
    ("enableTestCommands", "1"),
    ("diagnosticDataCollectionEnabled", "false"),
    // A primary otherwise lingers in quiesce mode for 15 s after SIGTERM.
    ("shutdownTimeoutMillisForSignaledShutdown", "100"),
    // Both waits are one second, and a starting secondary meets each once.
    (
        "failpoint.forceSyncSourceRetryWaitForInitialSync",
        r#"{"mode": "alwaysOn", "data": {"retryMS": 10}}"#,
    ),
    (
        "failpoint.forceBgSyncSyncSourceRetryWaitMS",
        r#"{"mode": "alwaysOn", "data": {"sleepMillis": 20}}"#,
    ),
];

/// What the set's members have in common on disk.
#[derive(Debug)]
pub(crate) struct SharedFiles {
    pub(crate) mongod: PathBuf,
    pub(crate) key_file: Option<PathBuf>,
    pub(crate) certificates: Option<Certificates>,
}

#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) index: usize,
    pub(crate) address: SocketAddr,
    directory: PathBuf,
    process: Mutex<Option<Process>>,
    pub(crate) proxy: Option<FaultProxy>,
    _port: Port,
}

impl Member {
    /// Takes a port and makes the directories; starts nothing.
    pub(crate) fn new(
        index: usize,
        options: &ReplicaSetBuilder,
        set_directory: &Path,
    ) -> Result<Self, TestbedError> {
        let port = Port::reserve(options.address)?;
        let directory = set_directory.join(format!("member-{index}"));
        let data = directory.join("data");
        fs::create_dir_all(&data).map_err(|e| TestbedError::path("create", &data, e))?;
        let address = SocketAddr::new(options.address, port.number);
        let proxy = if options.proxied {
            Some(FaultProxy::start_on(options.address, address)?)
        } else {
            None
        };
        Ok(Self { index, address, proxy, directory, process: Mutex::new(None), _port: port })
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.directory.join("data")
    }

    pub(crate) fn log_path(&self) -> PathBuf {
        self.directory.join("mongod.log")
    }

    /// What mongod prints before its log is open, such as complaints about its command line.
    fn output_path(&self) -> PathBuf {
        self.directory.join("output")
    }

    /// Starts the process, without waiting for it to listen.
    pub(crate) fn spawn(
        &self,
        options: &ReplicaSetBuilder,
        shared: &SharedFiles,
        janitor: &mut Janitor,
    ) -> Result<(), TestbedError> {
        let mut process = self.process.lock();
        if process.as_mut().is_some_and(|running| running.ended().is_none()) {
            return Err(self.wrong_state("running", "started"));
        }
        let path = self.output_path();
        let output = fs::File::create(&path).map_err(|e| TestbedError::path("create", &path, e))?;
        let mut line = options.launcher.clone();
        line.push(shared.mongod.clone().into());
        line.extend(self.arguments(options, shared));
        let program = PathBuf::from(line.remove(0));
        let started = Process::start(&program, &line, output, janitor)
            .map_err(|e| TestbedError::path("start", &program, e))?;
        *process = Some(started);
        Ok(())
    }

    fn arguments(&self, options: &ReplicaSetBuilder, shared: &SharedFiles) -> Vec<OsString> {
        let mut line: Vec<OsString> = Vec::new();
        let mut option = |name: &str, value: &dyn AsRef<std::ffi::OsStr>| {
            line.push(format!("--{name}").into());
            line.push(value.as_ref().to_owned());
        };
        option("replSet", &options.name);
        option("port", &self.address.port().to_string());
        option("bind_ip", &self.address.ip().to_string());
        option("dbpath", &self.data_dir());
        option("logpath", &self.log_path());
        option("oplogSize", &options.oplog_mb.to_string());

        if options.oplog_mb < SMALL_OPLOG_MB && !options.as_in_production {
            option("syncdelay", &"1");
        }

        let cache_gb = f64::from(options.cache_mb.max(SMALLEST_CACHE_OPTION_MB)) / 1024.0;
        option("wiredTigerCacheSizeGB", &cache_gb.to_string());
        let mut engine = Vec::new();
        if options.cache_mb < SMALLEST_CACHE_OPTION_MB {
            engine.push(format!("cache_size={}M", options.cache_mb));
        }
        if !options.as_in_production {
            // Saves 200 MB of disk a member.
            engine.push("log=(prealloc=false)".to_owned());
        }
        if !engine.is_empty() {
            option("wiredTigerEngineConfigString", &engine.join(","));
        }

        let mut parameters: Vec<(&str, &str)> = Vec::new();
        if !options.as_in_production {
            parameters.extend(QUICK_PARAMETERS);
        }
        for (name, value) in &options.parameters {
            parameters.retain(|(earlier, _)| earlier != name);
            parameters.push((name, value));
        }
        for (name, value) in parameters {
            option("setParameter", &format!("{name}={value}"));
        }

        if let Some(key_file) = &shared.key_file {
            option("keyFile", key_file);
        }
        if let Some(certificates) = &shared.certificates {
            option("tlsMode", &"requireTLS");
            option("tlsCAFile", &certificates.ca_file);
            option("tlsCertificateKeyFile", &certificates.server_file);
        }
        if options.tls == Tls::Server {
            line.push("--tlsAllowConnectionsWithoutCertificates".into());
        }
        if self.address.is_ipv6() {
            line.push("--ipv6".into());
        }
        line.push("--nounixsocket".into());
        line.push("--logappend".into());
        line.extend(options.arguments.iter().cloned());
        line
    }

    /// Waits until the process accepts connections.
    pub(crate) async fn wait_listening(&self) -> Result<(), TestbedError> {
        let began = Instant::now();
        loop {
            let last = match tokio::net::TcpStream::connect(self.address).await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            self.check_alive("it should begin to listen")?;
            if began.elapsed() > PATIENCE {
                return Err(TestbedError::TimedOut {
                    what: format!("mongod to listen on {}", self.address),
                    waited: began.elapsed(),
                    last: format!("{last}\n{}", self.output()),
                });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Fails if the process has ended.
    pub(crate) fn check_alive(&self, during: &'static str) -> Result<(), TestbedError> {
        let status = match self.process.lock().as_mut() {
            Some(process) => process.ended().map(|status| status.to_string()),
            None => Some("it was stopped".to_owned()),
        };
        match status {
            None => Ok(()),
            Some(status) => Err(TestbedError::Ended {
                member: self.index,
                during,
                status,
                output: self.output(),
            }),
        }
    }

    fn output(&self) -> String {
        format!(
            "{}\n{}",
            files::tail(&self.output_path(), SHOWN_LINES),
            files::tail(&self.log_path(), SHOWN_LINES)
        )
    }

    /// Its process id, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        let mut process = self.process.lock();
        let process = process.as_mut()?;
        process.ended().is_none().then(|| process.pid())
    }

    /// Whether it runs and is not paused, so that it can be expected to answer.
    pub(crate) fn answers(&self) -> bool {
        let mut process = self.process.lock();
        process.as_mut().is_some_and(|process| !process.paused() && process.ended().is_none())
    }

    /// SIGKILL, and waits until it is gone. Nothing happens if it does not run.
    pub(crate) fn kill(&self) {
        // Dropping kills.
        drop(self.process.lock().take());
    }

    pub(crate) fn pause(&self) -> Result<(), TestbedError> {
        self.signal("paused", Process::pause)
    }

    pub(crate) fn resume(&self) -> Result<(), TestbedError> {
        self.signal("resumed", Process::resume)
    }

    fn signal(
        &self,
        action: &'static str,
        send: impl FnOnce(&mut Process) -> std::io::Result<()>,
    ) -> Result<(), TestbedError> {
        match self.process.lock().as_mut() {
            Some(process) => send(process).map_err(|source| {
                TestbedError::io(format!("member {} cannot be {action}", self.index), source)
            }),
            None => Err(self.wrong_state("stopped", action)),
        }
    }

    /// Asks it to shut down (SIGTERM), without waiting. A paused one is resumed first.
    pub(crate) fn terminate(&self) -> Result<(), TestbedError> {
        self.signal("stopped", |process| {
            process.resume()?;
            process.terminate()
        })
    }

    /// Waits until the process has ended.
    pub(crate) async fn wait_ended(&self) -> Result<(), TestbedError> {
        let began = Instant::now();
        loop {
            {
                let mut process = self.process.lock();
                if process.as_mut().is_none_or(|process| process.ended().is_some()) {
                    *process = None;
                    return Ok(());
                }
            }
            if began.elapsed() > PATIENCE {
                return Err(TestbedError::TimedOut {
                    what: format!("member {} to shut down", self.index),
                    waited: began.elapsed(),
                    last: self.output(),
                });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Fails if it runs: its files are not to be touched then.
    pub(crate) fn check_stopped(&self, action: &'static str) -> Result<(), TestbedError> {
        match self.pid() {
            None => Ok(()),
            Some(_) => Err(self.wrong_state("running", action)),
        }
    }

    fn wrong_state(&self, state: &'static str, action: &'static str) -> TestbedError {
        TestbedError::WrongState { member: self.index, state, action }
    }
}
