//! The demo's servers: two replica sets, the year's orders in one of them, and the daemon as a process
//! of its own, just as an operator would run it. Everything ends with this process.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bson::doc;
use bson::raw::RawDocumentBuf;
use futures_util::StreamExt;
use halocline_actors::status::Status;
use halocline_testbed::{Companion, ReplicaSet};

use super::orders::{SHOPS, Year};
use super::shop::{Shop, bytes_of};
use super::{COLLECTION, DATABASE, DATE_FIELD, KEEP};
use crate::config::Age;

/// Orders sent to the archive with one command.
const LOAD_BATCH: usize = 1000;
/// Such commands under way at once.
const LOADS_AT_ONCE: usize = 4;
/// Each mongod's cache: the demo should not be felt by the machine it runs on.
const CACHE_MB: u32 = 256;
/// How long the daemon may take until it serves; a debug build on a busy machine takes seconds.
const DAEMON_PATIENCE: Duration = Duration::from_secs(60);
/// How long the daemon may take to drain, as its configuration says.
const DRAIN_DEADLINE: Duration = Duration::from_secs(10);
/// How long the daemon may take to answer a question about itself.
const STATUS_PATIENCE: Duration = Duration::from_secs(5);
/// A status is some kilobytes.
const LARGEST_STATUS: usize = 1 << 20;
/// Between two looks at a condition that cannot be awaited.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Where the daemon listens unless somebody else does: what its default configuration says.
const USUAL_PORTS: [u16; 2] = [27117, 27118];
/// How often other ports are tried when somebody takes them first.
const PORT_TRIES: usize = 5;
/// Lines of the daemon's log that are shown when it fails.
const LOG_LINES: usize = 20;

/// How fast things happen, for a run of that length: whoever watches for two minutes wants to see
/// what takes a day in production.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    residency: Duration,
    batch_documents: u32,
    batch_pause: Duration,
}

impl Pace {
    /// A short run evicts early; a longer one keeps to the residency that is safe for real data,
    /// and warms up slowly enough to be watched.
    pub fn for_run(length: Option<Duration>) -> Self {
        const WATCHABLE: Duration = Duration::from_secs(100);
        match length {
            Some(length) if length < WATCHABLE => Self {
                residency: (length / 5).clamp(Duration::from_secs(3), Duration::from_secs(30)),
                batch_documents: 500,
                batch_pause: Duration::from_millis(10),
            },
            _ => Self {
                residency: Duration::from_secs(60),
                batch_documents: 100,
                batch_pause: Duration::from_millis(40),
            },
        }
    }
}

/// The two replica sets.
pub struct Tiers {
    /// Empty at first.
    pub fast: ReplicaSet,
    /// Holds everything.
    pub archive: ReplicaSet,
}

impl Tiers {
    /// Starts both.
    pub async fn start() -> anyhow::Result<Self> {
        let set = |name: &str| ReplicaSet::builder().name(name).cache_mb(CACHE_MB).start();
        let (fast, archive) = tokio::try_join!(set("fast"), set("archive"))?;
        Ok(Self { fast, archive })
    }

    /// Puts the year's orders in the archive, with an index on their date, and enters them in the
    /// shops' books. `loaded` is told how many are there.
    pub async fn load(&self, year: Year, mut loaded: impl FnMut(u64)) -> anyhow::Result<Vec<Shop>> {
        let mut shops: Vec<Shop> = (0..SHOPS.len()).map(|n| Shop::new(n, year)).collect();
        let client = self.archive.client().await?;
        let orders = client.database(DATABASE).collection::<RawDocumentBuf>(COLLECTION);
        let mut next = 0;
        let batches = std::iter::from_fn(|| {
            let mut batch = Vec::with_capacity(LOAD_BATCH);
            while next < year.len() && batch.len() < LOAD_BATCH {
                let order = year.order(next);
                batch.extend(bytes_of(&order));
                if let Some(shop) = shops.get_mut(order.shop) {
                    shop.enter_sample(next, &order);
                }
                next += 1;
            }
            (!batch.is_empty()).then_some(batch)
        });
        let mut loads = futures_util::stream::iter(batches)
            .map(|batch| {
                let orders = &orders;
                async move { orders.insert_many(batch).ordered(false).await }
            })
            .buffer_unordered(LOADS_AT_ONCE);
        let mut count = 0;
        while let Some(inserted) = loads.next().await {
            let inserted = inserted.context("the sample orders could not be loaded")?;
            count += inserted.inserted_ids.len() as u64;
            loaded(count);
        }
        drop(loads);
        let index = doc! {
            "createIndexes": COLLECTION,
            "indexes": [{ "key": { DATE_FIELD: -1 }, "name": "by_date" }],
        };
        client
            .database(DATABASE)
            .run_command(index)
            .await
            .context("the archive's index on the date could not be made")?;
        Ok(shops)
    }
}

/// The daemon's process.
pub struct Daemon {
    process: Companion,
    client: awc::Client,
    /// Its HTTP address.
    pub admin: SocketAddr,
    /// The connection string that it tells clients.
    pub connection_string: String,
    /// Its configuration file.
    pub config: PathBuf,
    /// Its log.
    pub log: PathBuf,
}

impl Daemon {
    /// Starts `halocline run` in front of the two and waits until it serves.
    pub async fn start(tiers: &Tiers, pace: Pace) -> anyhow::Result<Self> {
        let mut ports = Ports::usual_or_free()?;
        let mut tries = 1;
        loop {
            match Self::start_on(tiers, pace, ports).await {
                // Whoever took a port in the moment since we looked may keep it.
                Err(_) if !ports.are_free() && tries < PORT_TRIES => {
                    ports = Ports::free()?;
                    tries += 1;
                }
                outcome => return outcome,
            }
        }
    }

    async fn start_on(tiers: &Tiers, pace: Pace, ports: Ports) -> anyhow::Result<Self> {
        // In the archive's directory, so that it goes with it.
        let directory = tiers.archive.directory();
        let (config, log) = (directory.join("halocline.toml"), directory.join("halocline.log"));
        let text = configuration(&tiers.fast.uri(), &tiers.archive.uri(), pace, ports);
        File::create(&config)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("{} cannot be written", config.display()))?;
        let output =
            File::create(&log).with_context(|| format!("{} cannot be written", log.display()))?;
        let program = std::env::current_exe().context("where this program is cannot be found")?;
        let arguments = ["run".into(), "--config".into(), config.clone().into_os_string()];
        let process = tiers.archive.start_beside(&program, &arguments, &own_variables(), output)?;
        let mut daemon = Self {
            process,
            client: awc::Client::builder().timeout(STATUS_PATIENCE).finish(),
            admin: ports.admin,
            connection_string: String::new(),
            config,
            log,
        };
        daemon.wait_until_it_serves().await?;
        Ok(daemon)
    }

    async fn wait_until_it_serves(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let last = match self.status().await {
                Ok(status) if status.state == "serving" => {
                    self.connection_string = status.connection_string;
                    return Ok(());
                }
                Ok(status) => format!("it is {}", status.state),
                Err(error) => format!("{error:#}"),
            };
            if let Some(how) = self.ended() {
                bail!("halocline ended before it served ({how}):\n{}", self.last_words());
            }
            if began.elapsed() > DAEMON_PATIENCE {
                bail!(
                    "halocline does not serve after {} s; last seen: {last}\n{}",
                    DAEMON_PATIENCE.as_secs(),
                    self.last_words()
                );
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// What it says of itself, over HTTP.
    pub async fn status(&self) -> anyhow::Result<Status> {
        let url = format!("http://{}/status", self.admin);
        let reply = self.client.get(&url).send().await;
        let mut reply = reply.map_err(|e| anyhow::anyhow!("no answer from {url}: {e}"))?;
        let body = reply.body().limit(LARGEST_STATUS).await;
        let body = body.map_err(|e| anyhow::anyhow!("no whole answer from {url}: {e}"))?;
        Ok(serde_json::from_slice(&body)?)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let from = lines.len().saturating_sub(LOG_LINES);
        lines.iter().skip(from).fold(String::new(), |text, line| text + "  " + line + "\n")
    }

    /// Asks it to drain and waits until it has ended well.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.process.terminate()?;
        let began = Instant::now();
        let ended = loop {
            if let Some(status) = self.ended() {
                break status;
            }
            // Its own deadline, and a moment to close everything.
            if began.elapsed() > DRAIN_DEADLINE * 2 {
                bail!(
                    "halocline did not drain within {} s and was killed:\n{}",
                    DRAIN_DEADLINE.as_secs() * 2,
                    self.last_words()
                );
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        };
        if !ended.success() {
            bail!("halocline did not drain cleanly ({ended}):\n{}", self.last_words());
        }
        Ok(())
    }
}

/// Environment variables that configure a daemon: this one's configuration is in its file, whatever
/// the person who runs the demo has set for another.
fn own_variables() -> Vec<OsString> {
    std::env::vars_os()
        .map(|(name, _)| name)
        .filter(|name| name.to_string_lossy().starts_with("HALOCLINE"))
        .collect()
}

/// Where the daemon listens.
#[derive(Debug, Clone, Copy)]
struct Ports {
    clients: SocketAddr,
    admin: SocketAddr,
}

impl Ports {
    fn usual_or_free() -> anyhow::Result<Self> {
        let [clients, admin] = USUAL_PORTS.map(|port| (Ipv4Addr::LOCALHOST, port).into());
        let usual = Self { clients, admin };
        if usual.are_free() { Ok(usual) } else { Self::free() }
    }

    fn free() -> anyhow::Result<Self> {
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        // Both at once, so that they differ.
        let (clients, admin) = (free()?, free()?);
        Ok(Self { clients: clients.local_addr()?, admin: admin.local_addr()? })
    }

    fn are_free(self) -> bool {
        [self.clients, self.admin].iter().all(|address| TcpListener::bind(address).is_ok())
    }
}

fn configuration(fast: &str, archive: &str, pace: Pace, ports: Ports) -> String {
    let Pace { residency, batch_documents, batch_pause } = pace;
    let short = if residency < Duration::from_secs(60) {
        "# Too short for real data; this run ends before a minute of residency would.\n\
         allow_short_residency = true\n"
    } else {
        ""
    };
    format!(
        r#"# The configuration of `halocline demo`. `halocline config` prints one with every key explained.

[listen]
addresses = ["{clients}"]

[admin]
listen = "{admin}"

[fast]
uri = "{fast}"

[archive]
uri = "{archive}"

[[collection]]
namespace = "{DATABASE}.{COLLECTION}"
date_field = "{DATE_FIELD}"
keep = "{keep}"

[moves]
# Quick, so that there is something to see; the defaults are for real data.
evict_interval = "1s"
evict_grace = "2s"
residency = "{residency}"
{short}batch_documents = {batch_documents}
batch_pause = "{batch_pause}"

[limits]
drain_deadline = "{drain}"
"#,
        clients = ports.clients,
        admin = ports.admin,
        keep = Age(KEEP),
        residency = Age(residency),
        batch_pause = Age(batch_pause),
        drain = Age(DRAIN_DEADLINE),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn the_configuration_is_accepted_for_runs_of_any_length() {
        for length in [None, Some(1), Some(18), Some(60), Some(120), Some(86_400)] {
            let pace = Pace::for_run(length.map(Duration::from_secs));
            let (fast, archive) = (
                "mongodb://127.0.0.1:20000/?replicaSet=fast",
                "mongodb://127.0.0.1:20001/?replicaSet=archive",
            );
            let text = configuration(fast, archive, pace, Ports::free().unwrap());
            let parsed = Config::parse("demo.toml".as_ref(), &text, std::iter::empty());
            let config = parsed.unwrap_or_else(|problems| panic!("{length:?}: {problems}"));
            // Only a run too short for it does without the residency that real data needs.
            assert_eq!(config.warnings.is_empty(), length.is_none_or(|l| l >= 100), "{length:?}");
        }
    }
}
