//! The configuration: one TOML file, environment variables over it, and every mistake reported at
//! once, before anything is opened. What the values mean to the actors is in their own `Options`;
//! whether the replica sets fit is asked by `check`.

mod keys;
mod layers;
mod reader;
mod rules;
mod template;
mod values;

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use halocline_actors::options::{
    ActorOptions, CollectionOptions, FeederOptions, LimitOptions, MoveOptions, Options,
};
use halocline_cluster::{ClusterOptions, Credentials, PoolOptions, Tier, TlsOptions};
use halocline_tiering::{DateField, DateKind};
use serde::Serialize;

pub use template::template;
pub use values::{Age, is_loopback};

use reader::{Found, SectionReader};

/// Begins the name of every environment variable that sets a key.
pub const ENVIRONMENT_PREFIX: &str = "HALOCLINE__";

/// A whole configuration without mistakes.
#[derive(Debug, Clone)]
pub struct Config {
    /// The file it was read from.
    pub path: PathBuf,
    /// What the actors need.
    pub options: Options,
    /// Where operators connect.
    pub admin: AdminOptions,
    /// Logging.
    pub log: LogOptions,
    /// What is accepted but should be looked at again.
    pub warnings: Vec<Problem>,
}

/// `[admin]`.
#[derive(Debug, Clone)]
pub struct AdminOptions {
    /// Address of the HTTP server.
    pub listen: SocketAddr,
}

/// `[log]`.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// A filter of `tracing_subscriber`.
    pub level: String,
    /// One JSON object a line instead of lines for people.
    pub json: bool,
}

/// One thing that is wrong with the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The key, such as `fast.uri` or `collection[0].keep`; empty for the file as a whole.
    pub path: String,
    /// `file:line`, the environment variable's name, or the file.
    pub origin: String,
    /// What is wrong.
    pub what: String,
    /// What was probably meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<String>,
    /// What would be accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// A line that would be accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub example: Option<String>,
}

impl Problem {
    fn new(path: &str, origin: &str, what: String) -> Self {
        Problem {
            path: path.to_owned(),
            origin: origin.to_owned(),
            what,
            suggestion: None,
            allowed: None,
            example: None,
        }
    }

    fn suggestion(mut self, text: impl Into<String>) -> Self {
        self.suggestion = Some(text.into());
        self
    }

    fn allowed(mut self, text: impl Into<String>) -> Self {
        self.allowed = Some(text.into());
        self
    }

    fn example(mut self, text: impl Into<String>) -> Self {
        self.example = Some(text.into());
        self
    }

    /// Problems are listed in the order of the file's lines, those of the environment after them.
    fn place(&self) -> (bool, usize) {
        let line = self.origin.rsplit_once(':').and_then(|(_, line)| line.parse().ok());
        (self.origin.starts_with(ENVIRONMENT_PREFIX), line.unwrap_or(0))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.what)?;
        if let Some(suggestion) = &self.suggestion {
            write!(f, "; did you mean {suggestion}?")?;
        }
        if let Some(allowed) = &self.allowed {
            write!(f, "\n    allowed: {allowed}")?;
        }
        if let Some(example) = &self.example {
            write!(f, "\n    example: {example}")?;
        }
        Ok(())
    }
}

/// Every mistake of one configuration.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}", listed(.0))]
pub struct Problems(pub Vec<Problem>);

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n\n")
}

impl Config {
    /// Reads the file and the process's environment.
    pub fn load(path: &Path) -> Result<Config, Problems> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let what = format!("the configuration file cannot be read: {error}");
            let problem = Problem::new("", &path.display().to_string(), what)
                .allowed("a TOML file; `halocline config` prints a commented one")
                .example("halocline config > halocline.toml");
            Problems(vec![problem])
        })?;
        Config::parse(path, &text, std::env::vars_os())
    }

    /// Reads the text of a file and the given environment. `path` names the file in messages and
    /// anchors relative paths.
    pub fn parse(
        path: &Path,
        text: &str,
        environment: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<Config, Problems> {
        let mut problems = Vec::new();
        let mut warnings = Vec::new();
        let config = Assembly::new(path, text, environment, &mut problems)
            .and_then(|assembly| assembly.config(&mut problems, &mut warnings));
        problems.sort_by_key(Problem::place);
        match config {
            Some(config) if problems.is_empty() => Ok(Config { warnings, ..config }),
            _ => Err(Problems(problems)),
        }
    }
}

/// Everything that was read, before it is known to fit together.
struct Assembly {
    path: PathBuf,
    listen: Vec<Found<SocketAddr>>,
    allow_unauthenticated: bool,
    fast: TierEntry,
    archive: TierEntry,
    collections: Vec<CollectionEntry>,
    actors: ActorOptions,
    feeder: FeederOptions,
    moves: MoveOptions,
    residency_origin: String,
    allow_short_residency: bool,
    limits: LimitOptions,
    drain_deadline: std::time::Duration,
    admin: Option<Found<SocketAddr>>,
    log: LogOptions,
}

/// `[fast]` or `[archive]` as read.
struct TierEntry {
    /// The connection string: the secret itself, and what may be shown of it.
    uri: Option<Found<(String, values::Uri)>>,
    options: ClusterOptions,
}

/// A `[[collection]]` as read.
struct CollectionEntry {
    path: String,
    ns: Option<Found<halocline_tiering::Namespace>>,
    date: Option<DateField>,
    keep: Option<Found<std::time::Duration>>,
}

impl Assembly {
    fn new(
        path: &Path,
        text: &str,
        environment: impl Iterator<Item = (OsString, OsString)>,
        problems: &mut Vec<Problem>,
    ) -> Option<Assembly> {
        let file_name = path.display().to_string();
        let directory = path.parent().unwrap_or(Path::new(""));
        let mut merged = layers::merged(&file_name, text, environment, problems);
        let mut open = |section: &'static keys::Section, problems: &mut Vec<Problem>| {
            reader::sections(section, &mut merged, &file_name, problems)
        };
        // A section that is not repeated always gives exactly one reader.
        macro_rules! single {
            ($section:expr, $reader:ident) => {
                let values = open($section, problems).into_iter().next()?;
                #[allow(unused_mut)]
                let mut $reader = SectionReader::new($section, values, directory, problems);
            };
        }

        single!(&keys::LISTEN, r);
        let listen = r.sockets("addresses");
        let allow_unauthenticated = r.flag("allow_unauthenticated");

        single!(&keys::FAST, r);
        let fast = tier(&mut r, Tier::Fast);
        single!(&keys::ARCHIVE, r);
        let archive = tier(&mut r, Tier::Archive);

        let mut collections = Vec::new();
        for values in open(&keys::COLLECTION, problems) {
            let mut r = SectionReader::new(&keys::COLLECTION, values, directory, problems);
            collections.push(collection(&mut r));
        }

        single!(&keys::ACTORS, r);
        let actors = ActorOptions {
            connection_threads: r.size("connection_threads"),
            appliers: r.size("appliers"),
            evictors: r.size("evictors"),
            warmers: r.size("warmers"),
            failure_limit: u32::try_from(r.count("failure_limit").value).unwrap_or(u32::MAX),
            failure_window: r.age("failure_window").value,
        };

        single!(&keys::FEEDER, r);
        let feeder = FeederOptions {
            coalesce: r.age("coalesce").value,
            batch_keys: r.size("batch_keys"),
            token_interval: r.age("token_interval").value,
            max_pending_keys: r.size("max_pending_keys"),
            max_lag: r.age("max_lag").value,
        };

        single!(&keys::MOVES, r);
        let residency = r.age("residency");
        let moves = MoveOptions {
            batch_documents: r.size("batch_documents"),
            batch_pause: r.age("batch_pause").value,
            evict_interval: r.age("evict_interval").value,
            evict_grace: r.age("evict_grace").value,
            residency: residency.value,
        };
        let allow_short_residency = r.flag("allow_short_residency");

        single!(&keys::LIMITS, r);
        let limits = LimitOptions {
            max_connections: r.size("max_connections"),
            cursor_idle: r.age("cursor_idle").value,
            operation_wait: r.age("operation_wait").value,
        };
        let drain_deadline = r.age("drain_deadline").value;

        single!(&keys::ADMIN, r);
        let admin = r.socket("listen");

        single!(&keys::LOG, r);
        let log = LogOptions {
            level: r.text("level").map_or_else(|| "info".to_owned(), |found| found.value),
            json: r.text("format").is_some_and(|found| found.value == "json"),
        };

        Some(Assembly {
            path: path.to_owned(),
            listen,
            allow_unauthenticated,
            fast,
            archive,
            collections,
            actors,
            feeder,
            moves,
            residency_origin: residency.origin,
            allow_short_residency,
            limits,
            drain_deadline,
            admin,
            log,
        })
    }

    /// Judges how the values fit together, and puts them in their final form if they do.
    fn config(self, problems: &mut Vec<Problem>, warnings: &mut Vec<Problem>) -> Option<Config> {
        rules::judge(&self, problems, warnings);
        if !problems.is_empty() {
            return None;
        }
        let collections = self
            .collections
            .into_iter()
            .map(|entry| {
                Some(CollectionOptions {
                    ns: entry.ns?.value,
                    date: entry.date?,
                    keep: entry.keep?.value,
                })
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Config {
            path: self.path,
            options: Options {
                listen: self.listen.into_iter().map(|found| found.value).collect(),
                fast: self.fast.options,
                archive: self.archive.options,
                collections,
                actors: self.actors,
                feeder: self.feeder,
                moves: self.moves,
                limits: self.limits,
                drain_deadline: self.drain_deadline,
            },
            admin: AdminOptions { listen: self.admin?.value },
            log: self.log,
            warnings: Vec::new(),
        })
    }
}

fn tier(r: &mut SectionReader<'_>, tier: Tier) -> TierEntry {
    let uri = connection_string(r);
    let credentials = credentials(r, uri.as_ref());
    let ca_file = r.file("tls_ca_file");
    let cert_key_file = r.file("tls_certificate_key_file");
    for (key, found) in [("tls_ca_file", &ca_file), ("tls_certificate_key_file", &cert_key_file)] {
        let Some(found) = found else { continue };
        if let Err(error) = std::fs::File::open(&found.value) {
            let what = format!("the file {} cannot be read: {error}", found.value.display());
            r.report(r.problem(key, &found.origin, what).allowed("a readable PEM file"));
        }
    }
    let tls = (ca_file.is_some() || cert_key_file.is_some()).then(|| TlsOptions {
        ca_file: ca_file.map(|found| found.value),
        cert_key_file: cert_key_file.map(|found| found.value),
    });
    let text = uri.as_ref().map(|found| found.value.0.clone()).unwrap_or_default();
    let mut options = ClusterOptions::new(tier, text);
    options.tls = tls;
    options.credentials = credentials;
    options.server_selection_timeout = r.age("server_selection_timeout").value;
    options.pool = PoolOptions {
        max_size: r.size("max_connections"),
        min_idle: r.size("min_idle_connections"),
        checkout_timeout: r.age("checkout_timeout").value,
        idle_timeout: r.age("idle_timeout").value,
        connect_timeout: r.age("connect_timeout").value,
        ..PoolOptions::default()
    };
    if options.pool.min_idle > options.pool.max_size {
        let what = format!(
            "{} idle connections cannot be kept where {} are allowed in all",
            options.pool.min_idle, options.pool.max_size
        );
        let problem = r.problem("min_idle_connections", r.origin(), what);
        r.report(problem.allowed("at most max_connections"));
    }
    TierEntry { uri, options }
}

/// `uri` or `uri_file`, exactly one, and no password in the configuration file itself.
fn connection_string(r: &mut SectionReader<'_>) -> Option<Found<(String, values::Uri)>> {
    let one = "exactly one of uri and uri_file";
    let set = (r.is_set("uri"), r.is_set("uri_file"));
    let (key, found) = match set {
        (true, true) => {
            let found = r.text("uri_file")?;
            r.report(r.problem("uri_file", &found.origin, "is set beside uri").allowed(one));
            return None;
        }
        (true, false) => ("uri", r.text("uri")?),
        (false, true) => ("uri_file", r.secret_file("uri_file")?),
        (false, false) => {
            let problem = r.problem("uri", r.origin(), "is missing");
            r.report(problem.allowed(one).example(r.example("uri")));
            return None;
        }
    };
    match values::uri(&found.value) {
        Ok(uri) => {
            let in_file = key == "uri" && !found.origin.starts_with(ENVIRONMENT_PREFIX);
            if uri.has_password && in_file {
                let problem = r
                    .problem("uri", &found.origin, "a password does not belong in this file")
                    .allowed(
                        "the connection string without its password, and password_file; or \
                         uri_file; or the whole of it in the environment",
                    )
                    .example(r.example("password_file"));
                r.report(problem);
            }
            let text = found.value.trim().to_owned();
            Some(Found { value: (text, uri), origin: found.origin })
        }
        Err(what) => {
            let problem = r.problem(key, &found.origin, what);
            r.report(problem.allowed(keys::Kind::Uri.allowed()).example(r.example("uri")));
            None
        }
    }
}

/// User and password given apart from the connection string.
fn credentials(
    r: &mut SectionReader<'_>,
    uri: Option<&Found<(String, values::Uri)>>,
) -> Option<Credentials> {
    let in_uri = uri.map(|found| &found.value.1);
    let named = in_uri.and_then(|uri| uri.username.clone());
    let username = r.text("username");
    let filed = r.secret_file("password_file");
    let environment = r.environment_secret("password");
    let source = r.text("auth_source").map(|found| found.value).unwrap_or_default();
    if let (Some(filed), Some(_)) = (&filed, &environment) {
        let what = "a password is given by a file and by the environment";
        let problem = r.problem("password_file", &filed.origin, what);
        r.report(problem.allowed("one of password_file and the environment variable"));
        return None;
    }
    let password = environment.or(filed);
    match (username, named, password) {
        (Some(user), Some(_), _) => {
            let what = "a user is named here and in the connection string";
            r.report(r.problem("username", &user.origin, what).allowed("one of the two"));
            None
        }
        (Some(user), None, Some(password)) => {
            let password = password.value.into();
            Some(Credentials { username: user.value, password, source })
        }
        (None, Some(username), Some(password)) => {
            let source = in_uri.and_then(|uri| uri.auth_source.clone()).unwrap_or(source);
            Some(Credentials { username, password: password.value.into(), source })
        }
        (Some(user), None, None) => {
            let what = "there is a user and no password to go with it";
            let problem = r.problem("username", &user.origin, what);
            r.report(problem.allowed("a password_file too").example(r.example("password_file")));
            None
        }
        (None, None, Some(password)) => {
            let what = "there is a password and no user to go with it";
            let problem = r.problem("username", &password.origin, what);
            r.report(problem.allowed("a username too").example(r.example("username")));
            None
        }
        (None, _, None) => None,
    }
}

fn collection(r: &mut SectionReader<'_>) -> CollectionEntry {
    let ns = r.namespace("namespace");
    let kind = match r.text("date_kind").as_ref().map(|found| found.value.as_str()) {
        Some("objectid") => DateKind::ObjectId,
        Some("epoch-seconds") => DateKind::EpochSeconds,
        Some("epoch-millis") => DateKind::EpochMillis,
        _ => DateKind::Date,
    };
    let date = r.date_field("date_field", kind);
    let keep = r.optional_age("keep");
    CollectionEntry { path: r.path().to_owned(), ns, date, keep }
}

/// The known name nearest to a misspelt one, if one is near enough to be what was meant.
fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    /// Below this similarity (0 to 1) a suggestion confuses more often than it helps.
    const NEAR: f64 = 0.78;
    let name = name.to_lowercase().replace('-', "_");
    known
        .map(|known| (strsim::jaro_winkler(&name, &known.replace('-', "_")), known))
        .filter(|(similarity, _)| *similarity >= NEAR)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests;
