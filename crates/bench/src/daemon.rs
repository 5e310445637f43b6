//! The Halocline daemon as a child process, under a configuration made for one measurement.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use halocline_testbed::ReplicaSet;

/// How long a daemon may take until it serves: the lease of an earlier one included.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running daemon; killed when dropped.
pub struct Daemon {
    child: Child,
    /// Where clients connect.
    pub address: SocketAddr,
    /// `/status` and `/metrics`.
    pub admin: SocketAddr,
    _directory: tempfile::TempDir,
}

/// The daemon's program: named, or beside this one.
pub fn program(named: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    if let Some(named) = named {
        return Ok(named);
    }
    let here = std::env::current_exe()?;
    let beside = here.parent().map(|dir| dir.join("halocline")).filter(|p| p.is_file());
    beside.context(
        "there is no `halocline` beside this program; build it (cargo build --release) or name it with --halocline",
    )
}

impl Daemon {
    /// Starts it and waits until it serves.
    pub async fn start(
        program: &PathBuf,
        fast: &ReplicaSet,
        archive: &ReplicaSet,
        more: &str,
    ) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let (address, admin) = (free_address()?, free_address()?);
        let path = directory.path().join("halocline.toml");
        let mut file = std::fs::File::create(&path)?;
        write!(
            file,
            "[listen]\naddresses = [\"{address}\"]\n[admin]\nlisten = \"{admin}\"\n\
             [fast]\nuri = \"{}\"\n[archive]\nuri = \"{}\"\n{more}",
            fast.uri(),
            archive.uri()
        )?;
        let log = std::fs::File::create(directory.path().join("log"))?;
        let child = Command::new(program)
            .args(["run", "--config"])
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{} could not be started", program.display()))?;
        let mut daemon = Self { child, address, admin, _directory: directory };
        daemon.wait_until_it_serves().await?;
        Ok(daemon)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    async fn wait_until_it_serves(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + PATIENCE;
        while tokio::net::TcpStream::connect(self.address).await.is_err() {
            if let Some(status) = self.child.try_wait()? {
                bail!("the daemon ended: {status}; its log:\n{}", self.log());
            }
            if Instant::now() > until {
                bail!("the daemon does not serve; its log:\n{}", self.log());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self._directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
