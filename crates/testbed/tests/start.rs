//! Replica sets on real mongods: start with each option, and say why when they do not.
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use bson::{Bson, Document, doc};
use halocline_testbed::{Auth, ReplicaSet, TestbedError, Tls};
use mongodb::Client;
use mongodb::options::ClientOptions;

async fn admin(client: &Client, command: Document) -> Document {
    client.database("admin").run_command(command).await.unwrap()
}

async fn write_and_count(client: &Client) -> u64 {
    let things = client.database("test").collection("things");
    things.insert_one(doc! {"a": 1}).await.unwrap();
    things.count_documents(doc! {}).await.unwrap()
}

#[tokio::test]
async fn one_member_starts_and_takes_writes() {
    let began = Instant::now();
    let set = ReplicaSet::builder().name("fast").start().await.unwrap();
    println!("one member usable after {:?}", began.elapsed());
    let client = set.client().await.unwrap();
    assert_eq!(write_and_count(&client).await, 1);
    assert_eq!(set.primary_index().await, Some(0));
    let hello = admin(&client, doc! {"hello": 1}).await;
    assert_eq!(hello.get_str("setName").unwrap(), "fast");
    assert_eq!(set.step_down().await.unwrap(), 0, "a set of one elects itself again");
    assert_eq!(write_and_count(&client).await, 2);
}

#[tokio::test]
async fn three_members_start_with_member_0_as_primary_and_all_in_step() {
    let began = Instant::now();
    let set = ReplicaSet::builder().members(3).start().await.unwrap();
    println!("three members usable after {:?}", began.elapsed());
    let client = set.client().await.unwrap();
    assert_eq!(write_and_count(&client).await, 1);
    assert_eq!(set.primary_index().await, Some(0));
    let status = admin(&client, doc! {"replSetGetStatus": 1}).await;
    let mut states: Vec<&str> = status
        .get_array("members")
        .unwrap()
        .iter()
        .filter_map(|m| m.as_document()?.get_str("stateStr").ok())
        .collect();
    states.sort_unstable();
    assert_eq!(states, ["PRIMARY", "SECONDARY", "SECONDARY"]);
}

#[tokio::test]
async fn sizes_below_mongods_own_minimum_and_parameters_take_effect() {
    let set = ReplicaSet::builder()
        .cache_mb(48)
        .oplog_mb(2)
        .set_parameter("ttlMonitorSleepSecs", 7)
        .set_parameter("diagnosticDataCollectionEnabled", true)
        .start()
        .await
        .unwrap();
    let client = set.client().await.unwrap();
    let status = admin(&client, doc! {"serverStatus": 1}).await;
    let cache = status.get_document("wiredTiger").unwrap().get_document("cache").unwrap();
    let maximum = cache.get("maximum bytes configured").cloned();
    assert!(
        matches!(maximum, Some(Bson::Int64(50_331_648) | Bson::Int32(50_331_648))),
        "{maximum:?}"
    );
    let parameters = admin(
        &client,
        doc! {"getParameter": 1, "ttlMonitorSleepSecs": 1, "diagnosticDataCollectionEnabled": 1},
    )
    .await;
    assert_eq!(parameters.get_i32("ttlMonitorSleepSecs").unwrap(), 7);
    assert!(parameters.get_bool("diagnosticDataCollectionEnabled").unwrap());

    // A fact the builder's documentation states.
    let resize = client
        .database("admin")
        .run_command(doc! {"replSetResizeOplog": 1, "size": 100.0})
        .await
        .unwrap_err();
    assert!(resize.to_string().contains("990"), "{resize}");
}

#[tokio::test]
async fn with_a_key_file_only_the_root_user_gets_in() {
    let auth = Auth::KeyFile { user: "chief@home".into(), password: "p/ss:w%rd".into() };
    let set = ReplicaSet::builder().members(3).auth(auth).start().await.unwrap();
    assert_eq!(set.root_credentials(), Some(("chief@home", "p/ss:w%rd")));
    let client = set.client().await.unwrap();
    assert_eq!(write_and_count(&client).await, 1);
    let direct = set.direct_client(0).await.unwrap();
    assert_eq!(write_and_count(&direct).await, 2);

    let mut options = ClientOptions::parse(set.uri()).await.unwrap();
    options.credential = None;
    let stranger = Client::with_options(options).unwrap();
    let error = stranger.database("test").collection("things").insert_one(doc! {}).await;
    assert!(error.unwrap_err().to_string().contains("requires authentication"));
}

#[tokio::test]
async fn with_mutual_tls_a_client_needs_the_deployments_certificate() {
    let set = ReplicaSet::builder().tls(Tls::Mutual).auth(Auth::key_file()).start().await.unwrap();
    assert_eq!(write_and_count(&set.client().await.unwrap()).await, 1);

    let certificates = set.certificates().unwrap().clone();
    let reach = |query: String| async move {
        let uri = format!("{}&serverSelectionTimeoutMS=1500", query);
        let client = Client::with_uri_str(uri).await.unwrap();
        client.database("admin").run_command(doc! {"hello": 1}).await
    };
    let port = set.port(0);
    let base = format!("mongodb://127.0.0.1:{port}/?directConnection=true");
    let ca = certificates.ca_file.to_string_lossy().into_owned();
    let client_file = certificates.client_file.to_string_lossy().into_owned();
    reach(format!("{base}&tls=true&tlsCAFile={ca}&tlsCertificateKeyFile={client_file}"))
        .await
        .unwrap();
    reach(format!("{base}&tls=true&tlsCAFile={ca}")).await.unwrap_err();
    reach(base).await.unwrap_err();
}

#[tokio::test]
async fn with_tls_three_members_trust_each_other_and_clients_need_no_certificate() {
    let set = ReplicaSet::builder().members(3).tls(Tls::Server).start().await.unwrap();
    assert!(!set.uri().contains("tlsCertificateKeyFile"));
    assert_eq!(write_and_count(&set.client().await.unwrap()).await, 1);
}

#[tokio::test]
async fn failpoints_work_unless_the_set_runs_as_in_production() {
    let point = doc! {
        "configureFailPoint": "failCommand",
        "mode": {"times": 1},
        "data": {"failCommands": ["count"], "errorCode": 11601},
    };
    let set = ReplicaSet::builder().start().await.unwrap();
    let client = set.client().await.unwrap();
    admin(&client, point.clone()).await;
    let count = doc! {"count": "things"};
    client.database("test").run_command(count.clone()).await.unwrap_err();
    client.database("test").run_command(count).await.unwrap();
    drop(set);

    let set = ReplicaSet::builder().as_in_production().start().await.unwrap();
    let client = set.client().await.unwrap();
    client.database("admin").run_command(point).await.unwrap_err();
    let reply = admin(&client, doc! {"replSetGetConfig": 1}).await;
    let settings = reply.get_document("config").unwrap().get_document("settings").unwrap();
    assert_eq!(settings.get_i32("electionTimeoutMillis").unwrap(), 10_000);
    assert_eq!(settings.get_i32("heartbeatIntervalMillis").unwrap(), 2_000);
}

#[tokio::test]
async fn a_launcher_runs_before_mongod_and_leaves_its_process_id() {
    let marks = tempfile::tempdir().unwrap();
    let mark = marks.path().join("pid");
    let set = ReplicaSet::builder()
        .launcher([
            "sh".to_owned(),
            "-c".to_owned(),
            "echo $$ > \"$0\"; exec \"$@\"".to_owned(),
            mark.to_string_lossy().into_owned(),
        ])
        .start()
        .await
        .unwrap();
    let noted = std::fs::read_to_string(&mark).unwrap();
    assert_eq!(noted.trim(), set.pid(0).unwrap().to_string());
}

#[tokio::test]
async fn a_mongod_that_refuses_its_options_is_quoted() {
    let error =
        ReplicaSet::builder().set_parameter("noSuchParameter", 1).start().await.unwrap_err();
    assert!(matches!(error, TestbedError::Ended { member: 0, .. }), "{error}");
    assert!(error.to_string().contains("noSuchParameter"), "{error}");
    for (builder, word) in [
        (ReplicaSet::builder().members(0), "members"),
        (ReplicaSet::builder().members(8), "members"),
        (ReplicaSet::builder().name("a b"), "name"),
        (ReplicaSet::builder().oplog_mb(0), "oplog"),
        (ReplicaSet::builder().bind("0.0.0.0".parse().unwrap()), "loopback"),
    ] {
        let error = builder.start().await.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
