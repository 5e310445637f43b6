//! One replica set as shared by all threads: the driver's client (control plane), the published
//! topology, and what every pool needs to open connections. The connections themselves belong to
//! the pools, one a thread.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bson::{Document, doc};
use mongodb::event::EventHandler;
use mongodb::options::ServerAddress;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::error::ClusterError;
use crate::handshake::Dialer;
use crate::options::{ClusterOptions, PoolOptions, Tier, prepare};
use crate::topology::{ServerKind, Topology, TopologyKeeper};

/// Pause between two looks at a primary that has denied being one. The monitors are told of an
/// election by the servers themselves, at once; this is for the primary that denied too early.
const SUSPECT_PAUSE: Duration = Duration::from_millis(100);

/// One replica set.
pub struct Cluster {
    tier: Tier,
    pool: PoolOptions,
    server_selection_timeout: Duration,
    client: mongodb::Client,
    topology: Arc<TopologyKeeper>,
    dialer: Dialer,
    runtime: Handle,
    set_name: OnceLock<String>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("tier", &self.tier)
            .field("set_name", &self.set_name)
            .finish_non_exhaustive()
    }
}

/// What a replica set is and can do.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Version of the primary, such as `7.0.14`.
    pub version: String,
    /// Feature compatibility version, such as `7.0`; `None` if the user may not read it.
    pub fcv: Option<String>,
    /// Lowest wire version.
    pub min_wire_version: i32,
    /// Highest wire version.
    pub max_wire_version: i32,
    /// Largest document.
    pub max_bson_object_size: i32,
    /// Largest message.
    pub max_message_size: i32,
    /// Most statements of one write command.
    pub max_write_batch: i32,
    /// Replica set name.
    pub set_name: String,
    /// The identity given to the set when it was initiated: tells two sets of the same name
    /// apart. `None` if the user may not read the configuration.
    pub set_id: Option<bson::oid::ObjectId>,
}

impl Cluster {
    /// Connects: checks the options, starts the monitors, waits until a primary is known, and
    /// authenticates to it once.
    ///
    /// The driver's monitors live on the runtime this is called from. It must outlive the cluster,
    /// and nothing on it may block: a monitor that is kept from reading an answer in time takes
    /// the server for silent, and requests waiting on it are ended.
    pub async fn connect(options: ClusterOptions) -> Result<Arc<Cluster>, ClusterError> {
        let tier = options.tier;
        let prepared = prepare(&options).await?;
        let topology = Arc::new(TopologyKeeper::new(tier));
        let mut driver = prepared.driver;
        let keeper = topology.clone();
        driver.sdam_event_handler =
            Some(EventHandler::callback(move |event| keeper.observe(event)));
        let client =
            mongodb::Client::with_options(driver).map_err(|e| ClusterError::driver(tier, e))?;
        let cluster = Arc::new(Cluster {
            tier,
            dialer: Dialer::new(tier, options.pool.connect_timeout, prepared.login, prepared.tls),
            pool: options.pool,
            server_selection_timeout: options.server_selection_timeout,
            client,
            topology,
            runtime: Handle::current(),
            set_name: OnceLock::new(),
        });
        let primary = cluster.wait_primary().await?;
        // The monitors do not authenticate: wrong credentials show only now.
        match cluster.dialer.dial(&primary).await {
            Err(error @ ClusterError::Authentication { .. }) => return Err(error),
            Err(error) => tracing::warn!(tier = tier.label(), %primary, %error, "cannot connect"),
            Ok(_) => {}
        }
        let set_name = cluster.topology.current().set_name.clone();
        let _ = cluster.set_name.set(set_name.unwrap_or_default());
        Ok(cluster)
    }

    /// Which tier this is.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// The replica set's name.
    pub fn set_name(&self) -> &str {
        self.set_name.get().map_or("", String::as_str)
    }

    /// The driver's client: for DDL, scans and administration, never for client requests.
    pub fn client(&self) -> &mongodb::Client {
        &self.client
    }

    /// The replica set as the monitors see it.
    pub fn topology(&self) -> watch::Receiver<Arc<Topology>> {
        self.topology.subscribe()
    }

    pub(crate) fn keeper(&self) -> &TopologyKeeper {
        &self.topology
    }

    pub(crate) fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    pub(crate) fn pool_options(&self) -> &PoolOptions {
        &self.pool
    }

    pub(crate) fn server_selection_timeout(&self) -> Duration {
        self.server_selection_timeout
    }

    /// Waits until a primary is known, at most the server selection timeout.
    pub async fn wait_primary(&self) -> Result<ServerAddress, ClusterError> {
        let started = Instant::now();
        let mut topology = self.topology();
        let known = topology.wait_for(|topology| {
            topology.primary.is_some()
                || topology.servers.iter().any(|s| s.kind == ServerKind::NotReplicaSet)
        });
        let found = match tokio::time::timeout(self.server_selection_timeout, known).await {
            Ok(Ok(topology)) => topology.clone(),
            _ => return Err(self.no_primary(started)),
        };
        match &found.primary {
            Some(primary) => Ok(primary.clone()),
            None => Err(ClusterError::Config {
                tier: self.tier,
                message: format!(
                    "{found}; each tier must be a replica set (one member is enough), because \
                     change streams and transactions need one"
                ),
            }),
        }
    }

    pub(crate) fn no_primary(&self, started: Instant) -> ClusterError {
        ClusterError::NoPrimary {
            tier: self.tier,
            waited: started.elapsed(),
            topology: self.topology.current().to_string(),
        }
    }

    /// A server believed to be primary answered that it is not: no request is sent there until
    /// either the monitors have found another or it says that it is primary after all.
    pub fn note_not_primary(self: &Arc<Self>, address: &ServerAddress) {
        if !self.topology.suspect(address) {
            return;
        }
        tracing::info!(tier = self.tier.label(), %address, "server denies being primary, checking");
        let cluster = Arc::downgrade(self);
        let address = address.clone();
        self.runtime.spawn(async move {
            while let Some(cluster) = cluster.upgrade() {
                if !cluster.topology.is_suspect(&address) {
                    return;
                }
                match cluster.dialer.greet(&address).await {
                    Ok(hello) if hello.is_writable_primary => {
                        return cluster.topology.confirm(&address);
                    }
                    Ok(_) => {}
                    Err(error) => {
                        tracing::debug!(tier = cluster.tier.label(), %address, %error, "check failed");
                    }
                }
                drop(cluster);
                tokio::time::sleep(SUSPECT_PAUSE).await;
            }
        });
    }

    /// Asks the primary what it is.
    pub async fn facts(&self) -> Result<Facts, ClusterError> {
        let admin = self.client.database("admin");
        let run = async |command: Document| {
            admin.run_command(command).await.map_err(|e| ClusterError::driver(self.tier, e))
        };
        let hello = run(doc! { "hello": 1 }).await?;
        let build = run(doc! { "buildInfo": 1 }).await?;
        let fcv = run(doc! { "getParameter": 1, "featureCompatibilityVersion": 1 })
            .await
            .ok()
            .and_then(|reply| {
                let version = reply.get_document("featureCompatibilityVersion").ok()?;
                version.get_str("version").ok().map(str::to_owned)
            });
        let set_id = run(doc! { "replSetGetConfig": 1 }).await.ok().and_then(|reply| {
            let settings = reply.get_document("config").ok()?.get_document("settings").ok()?;
            settings.get_object_id("replicaSetId").ok()
        });
        let number = |name: &str| hello.get_i32(name).unwrap_or_default();
        let facts = Facts {
            version: build.get_str("version").unwrap_or_default().to_owned(),
            fcv,
            min_wire_version: number("minWireVersion"),
            max_wire_version: number("maxWireVersion"),
            max_bson_object_size: number("maxBsonObjectSize"),
            max_message_size: number("maxMessageSizeBytes"),
            max_write_batch: number("maxWriteBatchSize"),
            set_name: hello.get_str("setName").unwrap_or_default().to_owned(),
            set_id,
        };
        metrics::gauge!(
            "halocline_tier_info",
            "tier" => self.tier.label(),
            "version" => facts.version.clone(),
            "fcv" => facts.fcv.clone().unwrap_or_default()
        )
        .set(1.0);
        Ok(facts)
    }
}
