//! Whether two replica sets and the collections named can be tiered: small independent checks, each
//! of which asks the servers, changes nothing, and says what is wrong with its remedy. `halocline
//! check` runs all of them; `halocline run` refuses to start on those that it could not survive.

mod collections;
mod connect;
mod deployment;
mod server;

use std::sync::Arc;

use bson::Document;
use futures_util::future::{BoxFuture, join_all};
use halocline_actors::options::{CollectionOptions, Options};
use halocline_cluster::{Cluster, Facts, Tier};
use serde::Serialize;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Halocline cannot work, or not safely, until this is mended.
    Error,
    /// It works, and something will hurt.
    Warning,
    /// Worth knowing.
    Note,
}

impl Severity {
    /// The word that output uses.
    pub fn label(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

/// One thing that a check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The check's stable name.
    pub check: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What it is about: a tier, or `database.collection`.
    pub subject: String,
    /// What is so.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

impl Finding {
    fn new(severity: Severity, subject: impl ToString, what: String, remedy: &str) -> Finding {
        // The name is filled in by the runner, which knows which check it ran.
        let (subject, remedy) = (subject.to_string(), remedy.to_owned());
        Finding { check: "", severity, subject, what, remedy }
    }

    fn error(subject: impl ToString, what: impl Into<String>, remedy: &str) -> Finding {
        Finding::new(Severity::Error, subject, what.into(), remedy)
    }

    fn warning(subject: impl ToString, what: impl Into<String>, remedy: &str) -> Finding {
        Finding::new(Severity::Warning, subject, what.into(), remedy)
    }

    fn note(subject: impl ToString, what: impl Into<String>, remedy: &str) -> Finding {
        Finding::new(Severity::Note, subject, what.into(), remedy)
    }
}

/// What a check gives: its findings, or why it could not look.
type Outcome = Result<Vec<Finding>, mongodb::error::Error>;

/// One tier that could be reached.
pub struct Side {
    /// Which.
    pub tier: Tier,
    /// What its primary says of itself.
    pub facts: Facts,
    /// The primary's reply to `hello`.
    hello: Document,
    cluster: Arc<Cluster>,
}

impl Side {
    async fn of(cluster: Arc<Cluster>) -> Result<Side, String> {
        // `hello` and `buildInfo` answer strangers; whether this user is known shows here.
        let known =
            bson::doc! { "listDatabases": 1, "nameOnly": true, "authorizedDatabases": true };
        let admin = cluster.client().database("admin");
        admin.run_command(known).await.map_err(|error| short(&error))?;
        let facts = cluster.facts().await.map_err(|error| error.to_string())?;
        let hello = admin.run_command(bson::doc! { "hello": 1 }).await;
        let hello = hello.map_err(|error| short(&error))?;
        Ok(Side { tier: cluster.tier(), facts, hello, cluster })
    }

    fn client(&self) -> &mongodb::Client {
        self.cluster.client()
    }

    async fn admin(&self, command: Document) -> mongodb::error::Result<Document> {
        self.client().database("admin").run_command(command).await
    }

    /// The primary, as it names itself.
    pub fn primary(&self) -> &str {
        self.hello.get_str("me").or_else(|_| self.hello.get_str("primary")).unwrap_or_default()
    }

    /// Members that hold data, as the set names them.
    pub fn members(&self) -> Vec<&str> {
        ["hosts", "passives"].iter().flat_map(|list| self.names(list)).collect()
    }

    fn names(&self, list: &str) -> Vec<&str> {
        let names = self.hello.get_array(list).map(Vec::as_slice).unwrap_or_default();
        names.iter().filter_map(bson::Bson::as_str).collect()
    }
}

/// What the checks look at.
pub struct Context<'a> {
    /// The configuration.
    pub options: &'a Options,
    /// The fast tier, if it could be reached.
    pub fast: Option<Side>,
    /// The archive, if it could be reached.
    pub archive: Option<Side>,
}

impl<'a> Context<'a> {
    /// Connects to both tiers. A tier that cannot be reached is a finding, and the checks that need
    /// it find nothing.
    pub async fn connect(options: &'a Options) -> (Context<'a>, Vec<Finding>) {
        let (fast, archive) =
            tokio::join!(connect::reach(&options.fast), connect::reach(&options.archive));
        let mut findings = Vec::new();
        let mut side = |reached: Result<Side, Finding>| match reached {
            Ok(side) => Some(side),
            Err(finding) => {
                findings.push(Finding { check: "reachable", ..finding });
                None
            }
        };
        let (fast, archive) = (side(fast), side(archive));
        (Context { options, fast, archive }, findings)
    }

    /// Looks at two tiers that are connected already.
    pub async fn connected(
        options: &'a Options,
        fast: Arc<Cluster>,
        archive: Arc<Cluster>,
    ) -> Result<Context<'a>, String> {
        let (fast, archive) = tokio::try_join!(Side::of(fast), Side::of(archive))?;
        Ok(Context { options, fast: Some(fast), archive: Some(archive) })
    }

    /// The tiers that could be reached.
    pub fn sides(&self) -> impl Iterator<Item = &Side> {
        self.fast.iter().chain(&self.archive)
    }

    fn both(&self) -> Option<(&Side, &Side)> {
        Some((self.fast.as_ref()?, self.archive.as_ref()?))
    }

    fn collections(&self) -> &[CollectionOptions] {
        &self.options.collections
    }
}

/// One check.
pub struct Check {
    /// Stable name, as in `--json`.
    pub name: &'static str,
    /// What it looks for, in a few words.
    pub about: &'static str,
    /// Whether an error of it keeps the daemon from starting.
    pub at_start: bool,
    run: for<'c> fn(&'c Context<'_>) -> BoxFuture<'c, Outcome>,
}

/// Declares a check; the functions are `async fn(&Context) -> Outcome`.
macro_rules! check {
    ($name:literal, $about:literal, $at_start:literal, $function:path) => {
        Check {
            name: $name,
            about: $about,
            at_start: $at_start,
            run: |context| Box::pin($function(context)),
        }
    };
}

/// All checks, in the order they are reported.
pub const CHECKS: &[Check] = &[
    check!("two_sets", "the tiers are two different replica sets", true, deployment::two_sets),
    check!("version", "server versions fit", true, deployment::version),
    check!("fcv", "feature compatibility versions fit", true, deployment::fcv),
    check!("storage_engine", "the fast tier runs WiredTiger", true, server::storage_engine),
    check!("members", "members and arbiters", false, deployment::members),
    check!("write_concern", "default write concern", false, deployment::write_concern),
    check!("clock", "clocks agree", false, server::clock),
    check!("oplog", "the fast tier's oplog is long enough", false, server::oplog),
    check!("history_window", "the archive's history window", false, server::history_window),
    check!(
        "collection_kind",
        "collections are of a kind that can be tiered",
        true,
        collections::kind
    ),
    check!("date_index", "an index begins with the date field", true, collections::date_index),
    check!(
        "date_values",
        "the date field holds dates of its kind",
        false,
        collections::date_values
    ),
    check!("unique_indexes", "unique indexes", true, collections::unique_indexes),
    check!("ttl_indexes", "TTL indexes", false, collections::ttl_indexes),
    check!("views", "views over tiered collections", false, collections::views),
];

/// Runs every check, side by side, and lists what they found: errors first.
pub async fn all(context: &Context<'_>) -> Vec<Finding> {
    run(context, |_| true).await
}

/// Runs the checks that the daemon must not start without, and lists the errors among what they
/// found. Empty: it may start.
pub async fn refusals(context: &Context<'_>) -> Vec<Finding> {
    let findings = run(context, |check| check.at_start).await;
    findings.into_iter().filter(|finding| finding.severity == Severity::Error).collect()
}

async fn run(context: &Context<'_>, wanted: impl Fn(&Check) -> bool) -> Vec<Finding> {
    let checks = CHECKS.iter().filter(|check| wanted(check));
    let outcomes = join_all(checks.map(|check| async move {
        let findings = match (check.run)(context).await {
            Ok(findings) => findings,
            Err(error) => vec![not_checked(check, &error)],
        };
        findings.into_iter().map(|finding| Finding { check: check.name, ..finding })
    }));
    let mut findings: Vec<Finding> = outcomes.await.into_iter().flatten().collect();
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// A check that could not look is a finding of its own: silence would read as "all is well". What
/// the daemon must not start without is then as bad as not fulfilled.
fn not_checked(check: &Check, error: &mongodb::error::Error) -> Finding {
    let severity = if check.at_start { Severity::Error } else { Severity::Warning };
    let what = format!("not checked ({}): {}", check.about, short(error));
    let remedy = if is_unauthorized(error) { GRANT } else { "mend what the server says" };
    Finding::new(severity, check.name, what, remedy)
}

/// What the checks need to be allowed.
const GRANT: &str =
    "grant the daemon's user clusterMonitor on admin and read on local, on both tiers";

/// For facts of a server that are almost certainly right and that its user may not see.
fn unseen(side: &Side, what: &str, error: &mongodb::error::Error) -> Finding {
    Finding::warning(side.tier, format!("does not let its {what} be seen: {}", short(error)), GRANT)
}

/// MongoDB's `Unauthorized`.
const UNAUTHORIZED: i32 = 13;
/// MongoDB's `NamespaceNotFound`.
const NAMESPACE_NOT_FOUND: i32 = 26;

fn server_code(error: &mongodb::error::Error) -> Option<i32> {
    match error.kind.as_ref() {
        mongodb::error::ErrorKind::Command(command) => Some(command.code),
        _ => None,
    }
}

fn is_unauthorized(error: &mongodb::error::Error) -> bool {
    server_code(error) == Some(UNAUTHORIZED)
}

fn is_namespace_not_found(error: &mongodb::error::Error) -> bool {
    server_code(error) == Some(NAMESPACE_NOT_FOUND)
}

/// The server's words without the driver's wrapping.
fn short(error: &mongodb::error::Error) -> String {
    match error.kind.as_ref() {
        mongodb::error::ErrorKind::Command(command) => {
            format!("{} ({})", command.message, command.code_name)
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_checks_are_unique() {
        let names: std::collections::BTreeSet<&str> = CHECKS.iter().map(|c| c.name).collect();
        assert_eq!(names.len(), CHECKS.len());
    }
}
