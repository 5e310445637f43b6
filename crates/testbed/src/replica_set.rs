//! A replica set on loopback: start, look, break, mend, and the end of it. How one member runs is
//! in `member.rs`, the options are in `builder.rs`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bson::{Document, Timestamp, doc};
use mongodb::Client;
use mongodb::options::ClientOptions;
use parking_lot::Mutex;

use crate::builder::{Auth, ReplicaSetBuilder, Tls};
use crate::certificates::Certificates;
use crate::companion::Companion;
use crate::error::TestbedError;
use crate::fault_proxy::FaultProxy;
use crate::files;
use crate::member::{LOOK_AGAIN, Member, PATIENCE, SharedFiles};
use crate::process::{Janitor, Process};

/// Heartbeats of a test's set. A starting or recovering member waits for a few of them.
const QUICK_HEARTBEAT: Duration = Duration::from_millis(100);
/// How long a test's set waits for a silent primary: short for tests, long enough that a machine busy
/// compiling does not make a primary look dead.
const QUICK_ELECTION_TIMEOUT: Duration = Duration::from_secs(2);
/// mongod's own defaults.
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(2);
const DEFAULT_ELECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long one member may take to say what it is.
const HELLO_PATIENCE: Duration = Duration::from_secs(2);
/// How long a primary that steps down stays away from elections; ended early once another leads.
const STEP_DOWN_SECONDS: i32 = 30;
/// One no-op written to roll an oplog.
const NOTE_BYTES: usize = 1024 * 1024;
/// Directories are kept for a look when this is set in the environment.
const KEEP_VARIABLE: &str = "HALOCLINE_TESTBED_KEEP";

/// A running replica set of mongods on loopback. It ends, and its directory goes, when it is
/// dropped, when the test panics and when the process is killed; with `HALOCLINE_TESTBED_KEEP` set
/// the directory stays.
///
/// Members are numbered from 0. A number that no member has is a mistake in the test and panics.
#[derive(Debug)]
pub struct ReplicaSet {
    options: ReplicaSetBuilder,
    members: Vec<Member>,
    shared: SharedFiles,
    directory: PathBuf,
    /// After the members: it removes their directory when it is dropped.
    janitor: Mutex<Janitor>,
}

/// What a member says it is.
#[derive(Debug, Clone)]
struct Role {
    primary: bool,
    secondary: bool,
    /// Grows with every election: of two members that say they are primary the later is.
    election: Option<[u8; 12]>,
}

/// The clients that one wait asks the members with, kept from look to look.
#[derive(Default)]
struct Callers(HashMap<usize, Client>);

impl ReplicaSet {
    /// The options to start one with.
    pub fn builder() -> ReplicaSetBuilder {
        ReplicaSetBuilder::new()
    }

    pub(crate) async fn start(options: ReplicaSetBuilder) -> Result<Self, TestbedError> {
        let mongod = tokio::task::spawn_blocking(crate::mongod::mongod)
            .await
            .map_err(|e| TestbedError::io("looking for mongod", std::io::Error::other(e)))??;
        let set = Self::prepare(options, mongod)?;
        set.launch_all().await?;
        set.bring_together().await?;
        Ok(set)
    }

    /// Makes the directory with the files that must be there before a mongod starts.
    fn prepare(options: ReplicaSetBuilder, mongod: PathBuf) -> Result<Self, TestbedError> {
        let base = options.directory.clone().unwrap_or_else(std::env::temp_dir);
        let directory = tempfile::Builder::new()
            .prefix("halocline-testbed-")
            .tempdir_in(&base)
            .map_err(|e| TestbedError::path("create a directory in", &base, e))?;
        // mongod does not start in the current directory, so its paths must be absolute.
        let path = std::path::absolute(directory.path())
            .map_err(|e| TestbedError::path("find", directory.path(), e))?;
        let keep = std::env::var_os(KEEP_VARIABLE).is_some_and(|value| !value.is_empty());
        let janitor = Janitor::watch(&path, keep)
            .map_err(|e| TestbedError::io("cannot start sh to clean up after a test", e))?;
        // From here on the janitor removes it.
        let _ = directory.keep();
        if keep {
            tracing::warn!(directory = %path.display(), "the deployment's directory will be kept");
        }

        let key_file = match &options.auth {
            Auth::None => None,
            Auth::KeyFile { .. } => {
                let file = path.join("key");
                let key: String = std::iter::repeat_with(rand::random::<u64>).take(8).fold(
                    String::new(),
                    |mut key, part| {
                        // Writing to a string cannot fail.
                        let _ = write!(key, "{part:016x}");
                        key
                    },
                );
                files::write_private(&file, &key)?;
                Some(file)
            }
        };
        let certificates = match options.tls {
            Tls::Off => None,
            Tls::Server | Tls::Mutual => Some(Certificates::generate(&path, &[options.address])?),
        };
        let members = (0..options.members)
            .map(|index| Member::new(index, &options, &path))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shared: SharedFiles { mongod, key_file, certificates },
            options,
            members,
            directory: path,
            janitor: Mutex::new(janitor),
        })
    }

    /// Starts every member's process and waits until all listen.
    async fn launch_all(&self) -> Result<(), TestbedError> {
        for member in &self.members {
            member.spawn(&self.options, &self.shared, &mut self.janitor.lock())?;
        }
        for member in &self.members {
            member.wait_listening().await?;
        }
        Ok(())
    }

    /// Makes the empty members one set. Initiating member 0 alone and adding the others by a forced
    /// reconfiguration saves the second or so that an election among three takes.
    async fn bring_together(&self) -> Result<(), TestbedError> {
        let first = self.direct_client_as(0, Identity::Nobody).await?;
        let settings = |heartbeat: Duration, election: Duration| {
            doc! {
                "heartbeatIntervalMillis": milliseconds(heartbeat),
                "electionTimeoutMillis": milliseconds(election),
            }
        };
        let election = self.options.election_timeout.unwrap_or(if self.options.as_in_production {
            DEFAULT_ELECTION_TIMEOUT
        } else {
            QUICK_ELECTION_TIMEOUT
        });
        let config = doc! {
            "_id": &self.options.name,
            "members": self.configured_members(1),
            "settings": settings(QUICK_HEARTBEAT, election),
        };
        admin(&first, doc! {"replSetInitiate": config}).await?;
        self.wait_primary().await?;
        if let Auth::KeyFile { user, password } = &self.options.auth {
            // mongod lets anyone on loopback make the first user.
            let create = doc! {"createUser": user, "pwd": password, "roles": ["root"]};
            admin(&first, create).await?;
        }
        let first = self.direct_client(0).await?;
        if self.members.len() > 1 {
            let mut config = current_config(&first).await?;
            config.insert("members", self.configured_members(self.members.len()));
            admin(&first, doc! {"replSetReconfig": config, "force": true}).await?;
        }
        self.wait_up().await?;
        self.replicate_once(&first).await?;
        if self.options.as_in_production {
            let mut config = current_config(&first).await?;
            let version = config.get_i32("version").unwrap_or(1);
            config.insert("version", version.saturating_add(1));
            config.insert("settings", settings(DEFAULT_HEARTBEAT, election));
            admin(&first, doc! {"replSetReconfig": config}).await?;
        }
        Ok(())
    }

    fn configured_members(&self, count: usize) -> Vec<Document> {
        self.members
            .iter()
            .take(count)
            .map(|member| doc! {"_id": member.index as i32, "host": self.host(member.index)})
            .collect()
    }

    /// Proves that a write reaches every member.
    async fn replicate_once(&self, primary: &Client) -> Result<(), TestbedError> {
        let reply = admin(
            primary,
            doc! {
                "appendOplogNote": 1,
                "data": {"testbed": "ready"},
                "writeConcern": {"w": self.members.len() as i32, "wtimeout": milliseconds(PATIENCE)},
            },
        )
        .await?;
        match reply.get("writeConcernError") {
            None => Ok(()),
            Some(error) => Err(TestbedError::TimedOut {
                what: "a write to reach every member".into(),
                waited: PATIENCE,
                last: error.to_string(),
            }),
        }
    }

    /// The replica set's name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// How many members it has, running or not.
    pub fn member_count(&self) -> usize {
        self.members.len()
    }

    /// A connection string for drivers: every member, with the set's name, and with credentials and
    /// certificates where the set asks for them.
    pub fn uri(&self) -> String {
        let hosts: Vec<String> = (0..self.members.len()).map(|i| self.host(i)).collect();
        self.uri_to(&hosts.join(","), &format!("replicaSet={}", self.options.name), Identity::Root)
    }

    /// A connection string that reaches member `i` and no other, past its proxy if it has one.
    pub fn direct_uri(&self, i: usize) -> String {
        self.uri_to(&self.address(i).to_string(), "directConnection=true", Identity::Root)
    }

    fn uri_to(&self, hosts: &str, first_option: &str, identity: Identity) -> String {
        let mut uri = String::from("mongodb://");
        let mut options = String::from(first_option);
        if let (Auth::KeyFile { user, password }, Identity::Root) = (&self.options.auth, identity) {
            uri += &format!("{}:{}@", percent_encoded(user), percent_encoded(password));
            options += "&authSource=admin";
        }
        if let Some(certificates) = &self.shared.certificates {
            let file = |path: &Path| percent_encoded(&path.to_string_lossy());
            options += &format!("&tls=true&tlsCAFile={}", file(&certificates.ca_file));
            if self.options.tls == Tls::Mutual {
                options += &format!("&tlsCertificateKeyFile={}", file(&certificates.client_file));
            }
        }
        format!("{uri}{hosts}/?{options}")
    }

    /// A new client of the whole set, as the root user if there is one.
    pub async fn client(&self) -> Result<Client, TestbedError> {
        connect(&self.uri()).await
    }

    /// A new client of member `i` alone, as the root user if there is one.
    pub async fn direct_client(&self, i: usize) -> Result<Client, TestbedError> {
        self.direct_client_as(i, Identity::Root).await
    }

    async fn direct_client_as(&self, i: usize, who: Identity) -> Result<Client, TestbedError> {
        let address = self.address(i).to_string();
        connect(&self.uri_to(&address, "directConnection=true", who)).await
    }

    /// Name and password of the root user, if there is one.
    pub fn root_credentials(&self) -> Option<(&str, &str)> {
        match &self.options.auth {
            Auth::None => None,
            Auth::KeyFile { user, password } => Some((user, password)),
        }
    }

    /// The certificates, if the set speaks TLS.
    pub fn certificates(&self) -> Option<&Certificates> {
        self.shared.certificates.as_ref()
    }

    /// Where everything of the set is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Starts another program that must not outlive this process either, such as a daemon that uses
    /// the set: with these arguments, without the environment variables `hidden`, its output in that
    /// file. It is cleaned up after like a member, by the path of a file in
    /// [`directory`](Self::directory) that one of the arguments must name.
    pub fn start_beside(
        &self,
        program: &Path,
        arguments: &[OsString],
        hidden: &[OsString],
        output: std::fs::File,
    ) -> Result<Companion, TestbedError> {
        let directory = self.directory.to_string_lossy();
        if !arguments.iter().any(|a| a.to_string_lossy().contains(directory.as_ref())) {
            return Err(TestbedError::Option(format!(
                "{} could not be told from other processes: no argument names a file in {directory}",
                program.display()
            )));
        }
        let mut janitor = self.janitor.lock();
        Process::start_without(hidden, program, arguments, output, &mut janitor)
            .map(Companion::new)
            .map_err(|e| TestbedError::path("start", program, e))
    }

    /// Where member `i` listens.
    pub fn address(&self, i: usize) -> SocketAddr {
        self.member(i).address
    }

    /// The name that the set's configuration has for member `i`.
    pub fn host(&self, i: usize) -> String {
        let member = self.member(i);
        member.proxy.as_ref().map_or(member.address, FaultProxy::address).to_string()
    }

    /// The proxy before member `i`, in a [`proxied`](ReplicaSetBuilder::proxied) set.
    pub fn proxy(&self, i: usize) -> Option<&FaultProxy> {
        self.member(i).proxy.as_ref()
    }

    /// The port member `i` listens on.
    pub fn port(&self, i: usize) -> u16 {
        self.address(i).port()
    }

    /// The process id of member `i`, while it runs.
    pub fn pid(&self, i: usize) -> Option<u32> {
        self.member(i).pid()
    }

    /// The directory with member `i`'s data files.
    pub fn data_dir(&self, i: usize) -> PathBuf {
        self.member(i).data_dir()
    }

    /// Member `i`'s log.
    pub fn log_path(&self, i: usize) -> PathBuf {
        self.member(i).log_path()
    }

    /// A wrong number is a bug in the test, for which a panic is the right end.
    #[allow(clippy::indexing_slicing)]
    fn member(&self, i: usize) -> &Member {
        &self.members[i]
    }

    /// Kills member `i` (SIGKILL) and waits until it is gone. Nothing happens if it does not run.
    pub fn kill9(&self, i: usize) {
        self.member(i).kill();
    }

    /// Freezes member `i` (SIGSTOP): its connections stay open and nothing answers.
    pub fn pause(&self, i: usize) -> Result<(), TestbedError> {
        self.member(i).pause()
    }

    /// Lets a paused member `i` go on (SIGCONT).
    pub fn resume(&self, i: usize) -> Result<(), TestbedError> {
        self.member(i).resume()
    }

    /// Shuts member `i` down (SIGTERM) and waits until it has ended.
    pub async fn stop(&self, i: usize) -> Result<(), TestbedError> {
        self.member(i).terminate()?;
        self.member(i).wait_ended().await
    }

    /// Starts member `i` and waits until it accepts connections, whatever its state in the set.
    pub async fn launch(&self, i: usize) -> Result<(), TestbedError> {
        let member = self.member(i);
        member.spawn(&self.options, &self.shared, &mut self.janitor.lock())?;
        member.wait_listening().await
    }

    /// Starts member `i`, shutting it down first if it runs, and waits until it is primary or
    /// secondary.
    pub async fn restart(&self, i: usize) -> Result<(), TestbedError> {
        if self.pid(i).is_some() {
            self.stop(i).await?;
        }
        self.launch(i).await?;
        self.wait_member_up(i).await
    }

    /// Copies member `i`'s data files to `to`, replacing what is there. The member must not run; a
    /// killed one may be copied too, its journal being part of the files.
    pub fn copy_data_dir(&self, i: usize, to: &Path) -> Result<(), TestbedError> {
        self.member(i).check_stopped("copied")?;
        files::replace_directory(&self.data_dir(i), to)
    }

    /// Replaces member `i`'s data files by those copied to `from`. The member must not run.
    pub fn restore_data_dir(&self, i: usize, from: &Path) -> Result<(), TestbedError> {
        self.member(i).check_stopped("restored")?;
        files::replace_directory(from, &self.data_dir(i))
    }

    /// Shuts every running member down and waits for all.
    pub async fn stop_all(&self) -> Result<(), TestbedError> {
        for member in self.members.iter().filter(|member| member.pid().is_some()) {
            member.terminate()?;
        }
        for member in &self.members {
            member.wait_ended().await?;
        }
        Ok(())
    }

    /// Starts every member that does not run and waits until all are primary or secondary.
    pub async fn start_all(&self) -> Result<(), TestbedError> {
        for member in self.members.iter().filter(|member| member.pid().is_none()) {
            member.spawn(&self.options, &self.shared, &mut self.janitor.lock())?;
        }
        for member in &self.members {
            member.wait_listening().await?;
        }
        self.wait_up().await
    }

    /// Stops the set, copies every member's data files and starts it again.
    pub async fn back_up(&self) -> Result<Backup, TestbedError> {
        let directory = tempfile::Builder::new()
            .prefix("backup-")
            .tempdir_in(&self.directory)
            .map_err(|e| TestbedError::path("create a directory in", &self.directory, e))?;
        self.stop_all().await?;
        for member in &self.members {
            self.copy_data_dir(member.index, &backed_up(directory.path(), member.index))?;
        }
        self.start_all().await?;
        Ok(Backup { directory })
    }

    /// Kills the set, puts the data files of a backup of it in place and starts it again.
    pub async fn restore(&self, backup: &Backup) -> Result<(), TestbedError> {
        for member in &self.members {
            member.kill();
        }
        for member in &self.members {
            self.restore_data_dir(member.index, &backed_up(backup.directory.path(), member.index))?;
        }
        self.start_all().await
    }

    /// Writes no-ops until every running member has dropped all that is in its oplog now, so that
    /// whoever reads it from an earlier position has lost its place. Best with a small
    /// [`oplog_mb`](ReplicaSetBuilder::oplog_mb): somewhat more than that is written.
    pub async fn roll_oplog(&self) -> Result<(), TestbedError> {
        let began = Instant::now();
        let primary = self.direct_client(self.wait_primary().await?).await?;
        let newest = oplog_end(&primary, -1).await?;
        let mut members = Vec::new();
        for member in self.members.iter().filter(|member| member.answers()) {
            members.push(self.direct_client(member.index).await?);
        }
        let filler = "x".repeat(NOTE_BYTES);
        let notes_a_round = (self.options.oplog_mb / 4).clamp(1, 64);
        loop {
            for _ in 0..notes_a_round {
                admin(&primary, doc! {"appendOplogNote": 1, "data": {"filler": &filler}}).await?;
            }
            let mut oldest = None;
            for member in &members {
                let here = oplog_end(member, 1).await?;
                oldest = Some(oldest.map_or(here, |least: Timestamp| least.min(here)));
            }
            if oldest.is_some_and(|oldest| oldest > newest) {
                return Ok(());
            }
            self.tire(began, "oplog entries to be dropped", || {
                format!("the oldest is of {oldest:?}, wanted one after {newest:?}")
            })?;
            // What the last checkpoint needs stays until the next.
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Looks once which member is primary.
    pub async fn primary_index(&self) -> Option<usize> {
        self.primary_seen(&mut Callers::default()).await
    }

    async fn primary_seen(&self, callers: &mut Callers) -> Option<usize> {
        let mut latest: Option<(Option<[u8; 12]>, usize)> = None;
        for member in &self.members {
            if let Ok(Role { primary: true, election, .. }) = self.role(member, callers).await {
                latest = latest.max(Some((election, member.index)));
            }
        }
        latest.map(|(_, index)| index)
    }

    /// Waits until a member is primary and says which.
    pub async fn wait_primary(&self) -> Result<usize, TestbedError> {
        self.wait_primary_that(|_| true).await
    }

    async fn wait_primary_that(
        &self,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<usize, TestbedError> {
        let began = Instant::now();
        let mut callers = Callers::default();
        loop {
            let primary = self.primary_seen(&mut callers).await;
            if let Some(index) = primary.filter(|&index| wanted(index)) {
                return Ok(index);
            }
            self.tire(began, "another primary", || format!("{primary:?}"))?;
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Waits until every member that was not stopped or paused is primary or secondary, and one of
    /// them primary.
    pub async fn wait_up(&self) -> Result<(), TestbedError> {
        for member in self.members.iter().filter(|member| member.answers()) {
            self.wait_member_up(member.index).await?;
        }
        self.wait_primary().await.map(drop)
    }

    async fn wait_member_up(&self, i: usize) -> Result<(), TestbedError> {
        let member = self.member(i);
        let began = Instant::now();
        let mut callers = Callers::default();
        loop {
            let role = self.role(member, &mut callers).await;
            if role.as_ref().is_ok_and(|role| role.primary || role.secondary) {
                return Ok(());
            }
            member.check_alive("it should become primary or secondary")?;
            self.tire(began, "a member to become primary or secondary", || format!("{role:?}"))?;
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    fn tire(
        &self,
        began: Instant,
        what: &str,
        last: impl FnOnce() -> String,
    ) -> Result<(), TestbedError> {
        if began.elapsed() <= PATIENCE {
            return Ok(());
        }
        Err(TestbedError::TimedOut {
            what: format!("{what} of replica set {}", self.options.name),
            waited: began.elapsed(),
            last: last(),
        })
    }

    async fn role(&self, member: &Member, callers: &mut Callers) -> Result<Role, TestbedError> {
        member.check_alive("it was asked for its state")?;
        if !member.answers() {
            return Err(TestbedError::WrongState {
                member: member.index,
                state: "paused",
                action: "asked for its state",
            });
        }
        let client = match callers.0.get(&member.index) {
            Some(client) => client.clone(),
            None => {
                let client = self.direct_client_as(member.index, Identity::Nobody).await?;
                callers.0.insert(member.index, client.clone());
                client
            }
        };
        let hello = tokio::time::timeout(HELLO_PATIENCE, admin(&client, doc! {"hello": 1}))
            .await
            .map_err(|_| TestbedError::TimedOut {
                what: format!("member {} to say what it is", member.index),
                waited: HELLO_PATIENCE,
                last: "no answer".into(),
            })??;
        Ok(Role {
            primary: hello.get_bool("isWritablePrimary").unwrap_or(false),
            secondary: hello.get_bool("secondary").unwrap_or(false),
            election: hello.get_object_id("electionId").map(|id| id.bytes()).ok(),
        })
    }

    /// Makes the primary step down and waits for the next: another member, or, in a set of one, the
    /// same in a new term. Says which.
    pub async fn step_down(&self) -> Result<usize, TestbedError> {
        let old = self.wait_primary().await?;
        let client = self.direct_client(old).await?;
        let alone = self.members.iter().filter(|member| member.answers()).count() == 1;
        let order = doc! {"replSetStepDown": STEP_DOWN_SECONDS, "force": alone};
        admin(&client, order).await?;
        if !alone {
            self.wait_primary_that(|index| index != old).await?;
        }
        // It may be elected again from now on; a set of one elects itself at once.
        admin(&client, doc! {"replSetFreeze": 0}).await?;
        self.wait_primary().await
    }
}

/// The data files of a replica set as they were, made by [`ReplicaSet::back_up`]. Dropping it removes
/// them; they go with their replica set in any case.
#[derive(Debug)]
pub struct Backup {
    directory: tempfile::TempDir,
}

fn backed_up(directory: &Path, member: usize) -> PathBuf {
    directory.join(format!("member-{member}"))
}

impl Drop for ReplicaSet {
    fn drop(&mut self) {
        for member in &self.members {
            member.kill();
        }
    }
}

/// Whom a connection authenticates as, if the set knows users.
#[derive(Clone, Copy, PartialEq)]
enum Identity {
    Nobody,
    Root,
}

async fn connect(uri: &str) -> Result<Client, TestbedError> {
    let failed = |error| TestbedError::driver(format!("connecting to {uri}"), error);
    let mut options = ClientOptions::parse(uri).await.map_err(failed)?;
    options.app_name = Some("halocline-testbed".into());
    Client::with_options(options).map_err(failed)
}

/// Runs a command on the database `admin`.
async fn admin(client: &Client, command: Document) -> Result<Document, TestbedError> {
    let name = command.keys().next().cloned().unwrap_or_default();
    client.database("admin").run_command(command).await.map_err(|e| TestbedError::driver(name, e))
}

async fn current_config(client: &Client) -> Result<Document, TestbedError> {
    let reply = admin(client, doc! {"replSetGetConfig": 1}).await?;
    reply.get_document("config").cloned().map_err(|e| {
        TestbedError::io("replSetGetConfig answered without a config", std::io::Error::other(e))
    })
}

/// The time of a member's oldest (1) or newest (-1) oplog entry.
async fn oplog_end(client: &Client, direction: i32) -> Result<Timestamp, TestbedError> {
    let oplog = client.database("local").collection::<Document>("oplog.rs");
    let entry = oplog.find_one(doc! {}).sort(doc! {"$natural": direction}).await;
    let entry = entry.map_err(|e| TestbedError::driver("reading the oplog", e))?;
    entry.and_then(|entry| entry.get_timestamp("ts").ok()).ok_or_else(|| {
        TestbedError::io("reading the oplog", std::io::Error::other("no entry with a time"))
    })
}

fn milliseconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_millis()).unwrap_or(i32::MAX)
}

/// Everything but unreserved characters percent-encoded, as connection strings need it.
fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
        encoded
    })
}
