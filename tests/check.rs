//! `halocline check` against real replica sets: each kind of problem is planted and must be found,
//! and a deployment that is in order must pass. What check refuses, run refuses.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::process::{Command, Output};

use halocline_testbed::{Auth, ReplicaSet, Tls};
use mongodb::bson::{Document, doc};
use serde_json::Value;

struct Deployment {
    fast: ReplicaSet,
    archive: ReplicaSet,
    directory: tempfile::TempDir,
}

impl Deployment {
    async fn start() -> Deployment {
        let (fast, archive) = tokio::join!(
            ReplicaSet::builder().name("fast").start(),
            ReplicaSet::builder().name("archive").start(),
        );
        let directory = tempfile::tempdir().unwrap();
        Deployment { fast: fast.unwrap(), archive: archive.unwrap(), directory }
    }

    fn config(&self, collections: &[(&str, &str, &str)]) -> String {
        config(&self.fast.uri(), &self.archive.uri(), collections)
    }

    async fn check(&self, text: &str) -> Report {
        Report::of(halocline(self.directory.path(), "check", &["--json"], text).await)
    }
}

fn config(fast: &str, archive: &str, collections: &[(&str, &str, &str)]) -> String {
    let mut text = format!(
        "[listen]\naddresses = [\"127.0.0.1:0\"]\n[admin]\nlisten = \"127.0.0.1:0\"\n\
         [fast]\nuri = {fast:?}\nserver_selection_timeout = \"2s\"\n\
         [archive]\nuri = {archive:?}\nserver_selection_timeout = \"2s\"\n"
    );
    for (namespace, field, kind) in collections {
        text += &format!(
            "[[collection]]\nnamespace = {namespace:?}\ndate_field = {field:?}\n\
             date_kind = {kind:?}\nkeep = \"30d\"\n"
        );
    }
    text
}

async fn halocline(
    directory: &std::path::Path,
    verb: &'static str,
    more: &'static [&'static str],
    text: &str,
) -> Output {
    let path = directory.join("halocline.toml");
    std::fs::write(&path, text).unwrap();
    let run = move || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_halocline"));
        command.arg(verb).arg("--config").arg(path).args(more).output().unwrap()
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

struct Report {
    code: Option<i32>,
    json: Value,
}

impl Report {
    fn of(output: Output) -> Report {
        let text = String::from_utf8(output.stdout).unwrap();
        let json = serde_json::from_str(&text).unwrap_or_else(|error| {
            panic!("{error}: {text} {}", String::from_utf8_lossy(&output.stderr))
        });
        Report { code: output.status.code(), json }
    }

    fn findings(&self) -> &[Value] {
        self.json["findings"].as_array().unwrap()
    }

    /// The findings of one check about one subject, as `severity: what`.
    fn about(&self, check: &str, subject: &str) -> Vec<String> {
        self.findings()
            .iter()
            .filter(|f| f["check"] == check && f["subject"] == subject)
            .map(|f| {
                format!("{}: {}", f["severity"].as_str().unwrap(), f["what"].as_str().unwrap())
            })
            .collect()
    }

    /// Exactly one finding of this check about this subject, with this severity and these words.
    #[track_caller]
    fn has(&self, severity: &str, check: &str, subject: &str, words: &str) {
        let found = self.about(check, subject);
        assert_eq!(found.len(), 1, "{check} about {subject}: {:#}", self.json["findings"]);
        assert!(found[0].starts_with(severity) && found[0].contains(words), "{}", found[0]);
    }

    fn count(&self, severity: &str) -> usize {
        self.findings().iter().filter(|f| f["severity"] == severity).count()
    }
}

async fn run(set: &ReplicaSet, db: &str, commands: Vec<Document>) {
    let client = set.client().await.unwrap();
    for command in commands {
        client.database(db).run_command(command).await.unwrap();
    }
}

fn index(collection: &str, key: Document, name: &str, more: Document) -> Document {
    let mut spec = doc! { "key": key, "name": name };
    spec.extend(more);
    doc! { "createIndexes": collection, "indexes": [spec] }
}

#[tokio::test]
async fn problems_are_found_and_a_sound_deployment_passes() {
    let deployment = Deployment::start().await;
    let now = mongodb::bson::DateTime::now();
    let dated = |collection: &str, key: &str| index(collection, doc! { key: -1 }, "dated", doc! {});
    run(
        &deployment.archive,
        "shop",
        vec![
            dated("orders", "at"),
            doc! { "insert": "orders", "documents": [{ "_id": 1, "at": now }] },
            dated("numbered", "at"),
            index("numbered", doc! { "number": 1 }, "number_unique", doc! { "unique": true }),
            index("orders", doc! { "gone": 1 }, "ttl", doc! { "expireAfterSeconds": 60 }),
            doc! { "create": "recent_orders", "viewOn": "orders", "pipeline": [] },
            doc! {
                "create": "report", "viewOn": "customers",
                "pipeline": [{ "$lookup": { "from": "orders", "as": "o", "pipeline": [] } }],
            },
            doc! { "create": "weather", "timeseries": { "timeField": "at" } },
            doc! { "create": "ring", "capped": true, "size": 4096 },
            doc! { "create": "namen", "collation": { "locale": "de" } },
            index(
                "fs.chunks",
                doc! { "files_id": 1, "n": 1 },
                "files_id_1_n_1",
                doc! { "unique": true },
            ),
            doc! { "create": "bare" },
            index("sparse", doc! { "at": 1 }, "at_sparse", doc! { "sparse": true }),
            dated("seconds", "at"),
            doc! { "insert": "seconds", "documents": [{ "at": 1_700_000_000_000_i64 }] },
            dated("strings", "at"),
            doc! { "insert": "strings", "documents": [{ "at": "2024-01-01" }] },
            doc! { "create": "log" },
            doc! { "insert": "log", "documents": [{ "_id": mongodb::bson::oid::ObjectId::new() }] },
        ],
    )
    .await;

    // In order: an ordinary collection, and one whose date is its ObjectId.
    let sound =
        deployment.config(&[("shop.orders", "at", "date"), ("shop.log", "_id", "objectid")]);
    let report = deployment.check(&sound).await;
    assert_eq!((report.code, report.count("error")), (Some(0), 0), "{:#}", report.json);
    assert_eq!(report.json["ok"], true);
    assert_eq!(report.json["tiers"][0]["set_name"], "fast");
    assert_eq!(report.json["tiers"][1]["members"].as_array().unwrap().len(), 1);
    report.has("note", "ttl_indexes", "shop.orders", "ttl, 60 s");
    report.has("note", "views", "shop.orders", "recent_orders");
    assert!(report.about("views", "shop.orders")[0].contains("report"), "through $lookup");
    report.has("note", "members", "fast tier", "one member");
    report.has("note", "history_window", "archive", "300 s of history");

    // Everything that cannot be tiered, and everything that would hurt.
    let wrong = deployment.config(&[
        ("shop.recent_orders", "at", "date"),
        ("shop.weather", "at", "date"),
        ("shop.ring", "at", "date"),
        ("shop.namen", "at", "date"),
        ("shop.fs.chunks", "at", "date"),
        ("shop.missing", "at", "date"),
        ("shop.bare", "at", "date"),
        ("shop.sparse", "at", "date"),
        ("shop.numbered", "at", "date"),
        ("shop.seconds", "at", "epoch-seconds"),
        ("shop.strings", "at", "date"),
    ]);
    let report = deployment.check(&wrong).await;
    assert_eq!(report.code, Some(1));
    report.has("error", "collection_kind", "shop.recent_orders", "is a view in the archive");
    report.has("error", "collection_kind", "shop.weather", "time-series");
    report.has("error", "collection_kind", "shop.ring", "capped");
    report.has("error", "collection_kind", "shop.namen", "collation \"de\"");
    report.has("error", "collection_kind", "shop.fs.chunks", "GridFS");
    report.has("error", "collection_kind", "shop.missing", "does not exist in the archive");
    report.has("error", "date_index", "shop.bare", "no index that begins with at");
    report.has("error", "date_index", "shop.sparse", "but it is sparse");
    report.has("error", "unique_indexes", "shop.numbered", "number_unique");
    report.has("warning", "date_values", "shop.seconds", "look like epoch-millis");
    report.has("error", "date_values", "shop.strings", "BSON type date");
    for finding in report.findings() {
        assert!(!finding["remedy"].as_str().unwrap().is_empty(), "{finding}");
    }

    // What check refuses, run refuses, before clients could connect.
    let view = deployment.config(&[("shop.recent_orders", "at", "date")]);
    let output = halocline(deployment.directory.path(), "run", &[], &view).await;
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("shop.recent_orders") && said.contains("is a view"), "{said}");
    assert!(!said.contains("serving clients"), "{said}");

    // On the fast tier, a stranger of the same name.
    run(&deployment.fast, "shop", vec![doc! { "create": "orders", "capped": true, "size": 4096 }])
        .await;
    let report = deployment.check(&sound).await;
    report.has("error", "collection_kind", "shop.orders", "on the fast tier");

    a_wrong_set_name_is_told_the_right_one(&deployment).await;
    a_closed_port_is_told_from_a_lost_primary(&deployment).await;
}

async fn a_wrong_set_name_is_told_the_right_one(deployment: &Deployment) {
    let wrong = deployment.fast.uri().replace("replicaSet=fast", "replicaSet=quick");
    let report = deployment.check(&config(&wrong, &deployment.archive.uri(), &[])).await;
    assert_eq!(report.code, Some(1));
    report.has("error", "reachable", "fast tier", "belongs to the replica set \"fast\"");
    assert_eq!(report.json["tiers"].as_array().unwrap().len(), 1, "the archive was looked at");
}

async fn a_closed_port_is_told_from_a_lost_primary(deployment: &Deployment) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = format!("mongodb://{free}/?replicaSet=fast");
    let report = deployment.check(&config(&nobody, &deployment.archive.uri(), &[])).await;
    report.has("error", "reachable", "fast tier", "connection refused");
}

/// Two connection strings that share no host can still lead to one set: its identity tells.
#[tokio::test]
async fn one_replica_set_named_twice_is_found_out() {
    let set = ReplicaSet::builder().name("both").members(3).start().await.unwrap();
    let of = |member: usize| format!("mongodb://{}/?replicaSet=both", set.host(member));
    let directory = tempfile::tempdir().unwrap();
    let text = config(&of(0), &of(1), &[]);
    let report = Report::of(halocline(directory.path(), "check", &["--json"], &text).await);
    assert_eq!(report.code, Some(1));
    report.has("error", "two_sets", "archive", "is the fast tier itself");
}

/// With authentication: right credentials pass, wrong ones are named as such, and never printed.
#[tokio::test]
async fn credentials_are_used_and_wrong_ones_are_named() {
    let (fast, archive) = tokio::join!(
        ReplicaSet::builder().name("fast").auth(Auth::key_file()).start(),
        ReplicaSet::builder().name("archive").start(),
    );
    let (fast, archive) = (fast.unwrap(), archive.unwrap());
    let (user, password) = fast.root_credentials().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let base = config(&format!("mongodb://{}/?replicaSet=fast", fast.host(0)), &archive.uri(), &[]);
    let with = |lines: String| base.replace("[archive]", &format!("{lines}\n[archive]"));
    let secret = directory.path().join("password");

    let text = with(format!("username = {user:?}\npassword_file = \"password\""));
    std::fs::write(&secret, format!("{password}\n")).unwrap();
    let report = Report::of(halocline(directory.path(), "check", &["--json"], &text).await);
    assert_eq!((report.code, report.count("error")), (Some(0), 0), "{:#}", report.json);

    std::fs::write(&secret, "not-the-password").unwrap();
    let report = Report::of(halocline(directory.path(), "check", &["--json"], &text).await);
    assert_eq!(report.code, Some(1));
    report.has("error", "reachable", "fast tier", "uthentication");
    assert!(!report.json.to_string().contains("not-the-password"));

    let report = Report::of(halocline(directory.path(), "check", &["--json"], &base).await);
    assert_eq!(report.code, Some(1), "no credentials at all");
    report.has("error", "reachable", "fast tier", "requires authentication");
}

/// TLS towards a tier: the right files pass; without them, or against a tier that has none, the
/// finding says that TLS is the difference.
#[tokio::test]
async fn tls_on_one_end_only_is_told_as_such() {
    let (fast, archive) = tokio::join!(
        ReplicaSet::builder().name("fast").tls(Tls::Mutual).start(),
        ReplicaSet::builder().name("archive").start(),
    );
    let (fast, archive) = (fast.unwrap(), archive.unwrap());
    let directory = tempfile::tempdir().unwrap();
    let files = fast.certificates().unwrap();
    let base = config(&format!("mongodb://{}/?replicaSet=fast", fast.host(0)), &archive.uri(), &[]);
    let lines = format!(
        "tls_ca_file = {:?}\ntls_certificate_key_file = {:?}\n",
        files.ca_file, files.client_file
    );

    let both = base.replace("[archive]", &format!("{lines}[archive]"));
    let report = Report::of(halocline(directory.path(), "check", &["--json"], &both).await);
    assert_eq!((report.code, report.count("error")), (Some(0), 0), "{:#}", report.json);

    let report = Report::of(halocline(directory.path(), "check", &["--json"], &base).await);
    assert_eq!(report.code, Some(1));
    report.has("error", "reachable", "fast tier", "TLS");

    let wrong_tier = base.replace("[archive]\n", &format!("[archive]\n{lines}"));
    let report = Report::of(halocline(directory.path(), "check", &["--json"], &wrong_tier).await);
    report.has("error", "reachable", "archive", "TLS");
}
