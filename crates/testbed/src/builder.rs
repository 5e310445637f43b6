//! The options of a replica set. Starting it is in `replica_set.rs`.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use crate::error::TestbedError;
use crate::replica_set::ReplicaSet;

/// The most members that may vote, which all of a test's members do.
const MOST_MEMBERS: usize = 7;

/// Whether clients must authenticate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Auth {
    /// Anyone may do anything.
    #[default]
    None,
    /// Members share a key file, and one user with the role `root` exists from the start.
    KeyFile {
        /// Name of the root user, in the database `admin`.
        user: String,
        /// Their password.
        password: String,
    },
}

impl Auth {
    /// A key file and the root user `root` with the password `root-password`.
    pub fn key_file() -> Self {
        Self::KeyFile { user: "root".into(), password: "root-password".into() }
    }
}

/// Whether members and clients speak TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    /// Plain TCP.
    #[default]
    Off,
    /// TLS is required; clients may do without a certificate of their own.
    Server,
    /// TLS is required, and so is a client certificate signed by the deployment's authority.
    Mutual,
}

/// The options of a replica set; [`ReplicaSetBuilder::start`] starts it. Made by
/// [`ReplicaSet::builder`].
///
/// By default a set is tuned so that it starts fast and fails over fast: test commands are on
/// (failpoints such as `failCommand` work), heartbeats and elections are quick, the journal is not
/// preallocated, diagnostic data is not collected. [`as_in_production`](Self::as_in_production)
/// takes all of that back.
#[derive(Clone, Debug)]
#[must_use = "nothing runs until start() is called"]
pub struct ReplicaSetBuilder {
    pub(crate) name: String,
    pub(crate) members: usize,
    pub(crate) cache_mb: u32,
    pub(crate) oplog_mb: u32,
    pub(crate) auth: Auth,
    pub(crate) tls: Tls,
    pub(crate) address: IpAddr,
    pub(crate) parameters: Vec<(String, String)>,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) launcher: Vec<OsString>,
    pub(crate) directory: Option<PathBuf>,
    pub(crate) proxied: bool,
    pub(crate) as_in_production: bool,
    pub(crate) election_timeout: Option<Duration>,
}

impl ReplicaSetBuilder {
    pub(crate) fn new() -> Self {
        Self {
            name: "rs0".into(),
            members: 1,
            cache_mb: 512,
            oplog_mb: 256,
            auth: Auth::None,
            tls: Tls::Off,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            parameters: Vec::new(),
            arguments: Vec::new(),
            launcher: Vec::new(),
            directory: None,
            proxied: false,
            as_in_production: false,
            election_timeout: None,
        }
    }

    /// The replica set's name; `rs0` by default.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// How many members: 1 (the default) or 3, and up to 7.
    pub fn members(mut self, members: usize) -> Self {
        self.members = members;
        self
    }

    /// The WiredTiger cache of each member in MB; 512 by default. mongod's own minimum of 256 does
    /// not apply here. With 256, a few documents of the largest size in a row are already refused
    /// as "too large for the storage engine cache": a fifth of the cache may be dirty.
    pub fn cache_mb(mut self, megabytes: u32) -> Self {
        self.cache_mb = megabytes;
        self
    }

    /// The oplog of each member in MB; 256 by default, 1 and up. (A running mongod's oplog cannot
    /// be resized below 990 MB.) An oplog is cut only as far as the last checkpoint allows; below
    /// 64 MB, checkpoints are therefore taken every second instead of every minute, but for
    /// [`as_in_production`](Self::as_in_production).
    pub fn oplog_mb(mut self, megabytes: u32) -> Self {
        self.oplog_mb = megabytes;
        self
    }

    /// Whether clients must authenticate.
    pub fn auth(mut self, auth: Auth) -> Self {
        self.auth = auth;
        self
    }

    /// Whether TLS is spoken.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }

    /// The loopback address to listen on and to be known by; 127.0.0.1 by default.
    pub fn bind(mut self, address: IpAddr) -> Self {
        self.address = address;
        self
    }

    /// A server parameter, as in `mongod --setParameter name=value`. A later one of the same name
    /// wins, also over the testbed's own.
    pub fn set_parameter(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.parameters.push((name.into(), value.to_string()));
        self
    }

    /// One more command-line argument of mongod.
    pub fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// A command that mongod is started through: it gets mongod's whole command line as its last
    /// arguments and must `exec` it (so that the process id stays). For limits such as a cgroup.
    pub fn launcher<I: Into<OsString>>(mut self, command: impl IntoIterator<Item = I>) -> Self {
        self.launcher = command.into_iter().map(Into::into).collect();
        self
    }

    /// The directory to make the set's temporary directory in; the system's by default. For a disk
    /// of its own.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Puts a [`FaultProxy`](crate::FaultProxy) before every member and makes the members known by
    /// the proxies' addresses: drivers, and the members among themselves, connect through them.
    pub fn proxied(mut self) -> Self {
        self.proxied = true;
        self
    }

    /// Runs mongod as an operator would: nothing of the testbed's that trades fidelity for speed.
    /// Three members then take some seconds longer to start.
    pub fn as_in_production(mut self) -> Self {
        self.as_in_production = true;
        self
    }

    /// How long members wait for a silent primary before they elect another; 2 s by default, 10 s
    /// as in production.
    pub fn election_timeout(mut self, timeout: Duration) -> Self {
        self.election_timeout = Some(timeout);
        self
    }

    /// Starts the set and waits until every member is up and a majority write has succeeded. The
    /// primary is member 0.
    pub async fn start(self) -> Result<ReplicaSet, TestbedError> {
        self.check()?;
        ReplicaSet::start(self).await
    }

    fn check(&self) -> Result<(), TestbedError> {
        let option = |message: String| Err(TestbedError::Option(message));
        if !(1..=MOST_MEMBERS).contains(&self.members) {
            return option(format!(
                "a replica set has 1 to {MOST_MEMBERS} members here, not {}",
                self.members
            ));
        }
        if self.name.is_empty() || self.name.contains(['/', '?', '&', '=', ',', ' ']) {
            return option(format!("{:?} cannot be a replica set's name", self.name));
        }
        if !self.address.is_loopback() {
            return option(format!(
                "{} is not a loopback address, and a test's mongod must not be reachable from \
                 elsewhere",
                self.address
            ));
        }
        if self.cache_mb == 0 || self.oplog_mb == 0 {
            return option("cache and oplog need at least 1 MB each".into());
        }
        Ok(())
    }
}
