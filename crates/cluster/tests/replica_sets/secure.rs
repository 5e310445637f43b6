//! Passwords and certificates.

use std::time::Duration;

use bson::{doc, rawdoc};
use halocline_cluster::feed::{ChangeFeed, FeedStart};
use halocline_cluster::moves::{Move, MoveSessions, ensure_anchor};
use halocline_cluster::{
    Cluster, ClusterError, ClusterOptions, Credentials, Pool, Tier, TlsOptions,
};
use halocline_testbed::{Auth, ReplicaSet, Tls};

use crate::support::{connect, options, run, soon};

fn ping() -> bson::RawDocumentBuf {
    rawdoc! { "ping": 1 }
}

/// Who the connection is to the server.
async fn whoami(pool: &Pool) -> String {
    let status = pool.run_once("admin", &rawdoc! { "connectionStatus": 1 }).await.unwrap();
    let info = status.get("authInfo").unwrap().as_document().unwrap();
    let users = info.get_array("authenticatedUsers").unwrap();
    match users.get_document(0) {
        Ok(user) => user.get_str("user").unwrap().to_owned(),
        Err(_) => String::new(),
    }
}

fn with_credentials(
    options: &ClusterOptions,
    set: &ReplicaSet,
    username: &str,
    password: &str,
) -> ClusterOptions {
    let mut options = options.clone();
    options.uri = format!("mongodb://{}/?replicaSet={}", set.host(0), set.name());
    options.credentials = Some(Credentials {
        username: username.into(),
        password: password.to_owned().into(),
        source: "admin".into(),
    });
    options
}

#[test]
fn passwords_are_proven_by_either_mechanism_and_wrong_ones_refused() {
    run(async {
        let set = ReplicaSet::builder().name("fast").auth(Auth::key_file()).start().await.unwrap();
        let options = options(&set);
        let pool = Pool::new(connect(options.clone()).await);
        assert_eq!(whoami(&pool).await, "root");

        let (user, password) = set.root_credentials().unwrap();
        let apart = with_credentials(&options, &set, user, password);
        assert!(!format!("{apart:?}").contains(password));
        let pool = Pool::new(connect(apart).await);
        assert_eq!(whoami(&pool).await, "root");

        let odd = "pass,word=ÄÖ ½";
        let client = set.client().await.unwrap();
        for (name, mechanism) in [("old,one=", "SCRAM-SHA-1"), ("new,one=", "SCRAM-SHA-256")] {
            let create = doc! {
                "createUser": name, "pwd": odd, "mechanisms": [mechanism],
                "roles": ["readAnyDatabase"],
            };
            client.database("admin").run_command(create).await.unwrap();
            let pool = Pool::new(connect(with_credentials(&options, &set, name, odd)).await);
            assert_eq!(whoami(&pool).await, name);
            let wrong = with_credentials(&options, &set, name, "wrong");
            let error = soon("the refusal", Cluster::connect(wrong)).await.unwrap_err();
            assert!(matches!(error, ClusterError::Authentication { .. }), "{error}");
            assert!(!error.to_string().contains("wrong"), "{error}");
        }
        let nobody = with_credentials(&options, &set, "nobody", "x");
        let error = soon("the refusal", Cluster::connect(nobody)).await.unwrap_err();
        assert!(matches!(error, ClusterError::Authentication { .. }), "{error}");

        // A password that stops being right while the pool runs.
        let create = doc! { "createUser": "leaver", "pwd": "x", "roles": ["readAnyDatabase"] };
        client.database("admin").run_command(create).await.unwrap();
        let pool = Pool::new(connect(with_credentials(&options, &set, "leaver", "x")).await);
        client.database("admin").run_command(doc! { "dropUser": "leaver" }).await.unwrap();
        let error = soon("the refusal", pool.primary()).await.unwrap_err();
        assert!(matches!(error, ClusterError::Authentication { .. }), "{error}");
    });
}

#[test]
fn moves_and_the_feed_work_with_authentication() {
    run(async {
        let set = ReplicaSet::builder().name("fast").auth(Auth::key_file()).start().await.unwrap();
        let pool = Pool::new(connect(options(&set)).await);
        ensure_anchor(&pool).await.unwrap();
        let sessions = MoveSessions::default();
        let mut moving = Move::open(&pool, &sessions).await.unwrap();
        let start = FeedStart::At(moving.snapshot_time());
        let query = rawdoc! { "_id": 1 };
        let update = rawdoc! { "$set": { "v": 1 } };
        moving.update_one("db", "c", &query, &update, true).await.unwrap();
        moving.commit().await.unwrap();
        let mut feed = ChangeFeed::open(&pool, start, &[("db", "c")]).await.unwrap();
        let is_move = soon("the event", async {
            loop {
                let batch = feed.next_batch(Duration::from_millis(50)).await.unwrap();
                if let Some(event) = batch.events.iter().find(|event| event.key == 1_i32.into()) {
                    return event.is_move;
                }
            }
        })
        .await;
        assert!(is_move);
    });
}

#[test]
fn tls_with_a_known_authority_works_and_with_another_says_why_not() {
    run(async {
        let set = ReplicaSet::builder().name("fast").tls(Tls::Server).start().await.unwrap();
        let pool = Pool::new(connect(options(&set)).await);
        pool.run_once("admin", &ping()).await.unwrap();
        // A large message in both directions.
        let large = "x".repeat(10_000_000);
        let insert =
            rawdoc! { "insert": "c", "documents": [{ "_id": 1, "large": large.as_str() }] };
        pool.run_once("db", &insert).await.unwrap();
        let find = rawdoc! { "find": "c" };
        let found = pool.run_once("db", &find).await.unwrap();
        assert!(found.body().as_bytes().len() > 10_000_000);
        // An idle TLS connection is recognised as alive.
        for _ in 0..10 {
            pool.run_once("admin", &ping()).await.unwrap();
        }
        assert!(pool.stats().idle <= 2, "{:?}", pool.stats());

        let mut apart = options(&set);
        apart.uri = format!("mongodb://{}/?replicaSet={}", set.host(0), set.name());
        apart.tls = Some(TlsOptions {
            ca_file: Some(set.certificates().unwrap().ca_file.clone()),
            cert_key_file: None,
        });
        Pool::new(connect(apart.clone()).await).run_once("admin", &ping()).await.unwrap();

        let other = ReplicaSet::builder().name("other").tls(Tls::Server).start().await.unwrap();
        apart.tls = Some(TlsOptions {
            ca_file: Some(other.certificates().unwrap().ca_file.clone()),
            cert_key_file: None,
        });
        apart.server_selection_timeout = Duration::from_secs(1);
        let error = soon("the refusal", Cluster::connect(apart.clone())).await.unwrap_err();
        assert!(error.to_string().to_lowercase().contains("certificate"), "{error}");
        apart.tls = None;
        let error = soon("the refusal", Cluster::connect(apart)).await.unwrap_err();
        assert!(matches!(error, ClusterError::NoPrimary { .. }), "{error}");
    });
}

#[test]
fn a_client_certificate_is_shown_and_can_be_the_identity() {
    run(async {
        let set = ReplicaSet::builder()
            .name("fast")
            .auth(Auth::key_file())
            .tls(Tls::Mutual)
            .set_parameter("authenticationMechanisms", "SCRAM-SHA-1,SCRAM-SHA-256,MONGODB-X509")
            .start()
            .await
            .unwrap();
        let by_password = options(&set);
        let pool = Pool::new(connect(by_password.clone()).await);
        assert_eq!(whoami(&pool).await, "root");

        let client = set.client().await.unwrap();
        let subject = "OU=halocline testbed client,CN=halocline testbed client";
        let create = doc! {
            "createUser": subject, "roles": [{ "role": "readAnyDatabase", "db": "admin" }],
        };
        client.database("$external").run_command(create).await.unwrap();
        let certificates = set.certificates().unwrap();
        let mut by_certificate = by_password;
        by_certificate.uri = format!(
            "mongodb://{}/?replicaSet={}&authMechanism=MONGODB-X509",
            set.host(0),
            set.name()
        );
        by_certificate.tls = Some(TlsOptions {
            ca_file: Some(certificates.ca_file.clone()),
            cert_key_file: Some(certificates.client_file.clone()),
        });
        let pool = Pool::new(connect(by_certificate).await);
        assert_eq!(whoami(&pool).await, subject);
    });
}

#[test]
fn settings_that_cannot_work_are_named() {
    run(async {
        let mut zero = ClusterOptions::new(Tier::Fast, "mongodb://localhost");
        zero.pool.max_size = 0;
        let of = |uri: &str| ClusterOptions::new(Tier::Fast, uri);
        let mut ca = of("mongodb://localhost");
        ca.tls = Some(TlsOptions { ca_file: Some("/nowhere/ca.pem".into()), cert_key_file: None });
        let cases = [
            (zero, "pool size 0"),
            (of("localhost"), "connection string"),
            (of("mongodb://localhost/?authMechanism=MONGODB-X509"), "MONGODB-X509"),
            (of("mongodb://u:secret@localhost/?authMechanism=PLAIN"), "PLAIN"),
            (of("mongodb://localhost/?tls=true&tlsAllowInvalidCertificates=true"), "tlsCAFile"),
            (ca, "/nowhere/ca.pem"),
        ];
        for (options, expected) in cases {
            let error = Cluster::connect(options).await.unwrap_err();
            assert!(matches!(error, ClusterError::Config { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    });
}
