//! The HTTP server over a real socket, as operators' tools meet it.

use std::collections::HashSet;

use metrics_exporter_prometheus::PrometheusBuilder;

use super::*;

fn sources(ready: bool) -> Sources {
    Sources {
        status: Arc::new(|| Status {
            version: "1.2.3".into(),
            problems: vec!["</script><b>not markup</b>".into()],
            ..Status::default()
        }),
        readiness: Arc::new(move || Readiness {
            ready,
            reasons: if ready { vec![] } else { vec!["the archive has no primary".into()] },
        }),
        metrics: PrometheusBuilder::new().build_recorder().handle(),
    }
}

fn start(ready: bool) -> Admin {
    Admin::start("127.0.0.1:0".parse().unwrap(), sources(ready)).unwrap()
}

async fn get(admin: &Admin, path: &str) -> (u16, String, awc::http::header::HeaderMap) {
    let url = format!("http://{}{path}", admin.address);
    let mut response = awc::Client::default().get(url).send().await.unwrap();
    let body = String::from_utf8(response.body().await.unwrap().to_vec()).unwrap();
    (response.status().as_u16(), body, response.headers().clone())
}

#[actix_web::test]
async fn status_is_what_the_daemon_says() {
    let admin = start(true);
    let (code, body, headers) = get(&admin, "/status").await;
    let status: Status = serde_json::from_str(&body).unwrap();
    assert_eq!((code, status.version.as_str()), (200, "1.2.3"));
    assert_eq!(headers.get("content-type").unwrap(), "application/json");
    assert_eq!(headers.get("cache-control").unwrap(), "no-store");
    admin.stop().await;
}

#[actix_web::test]
async fn readiness_gives_its_reasons_and_a_code_for_machines() {
    let admin = start(false);
    let (code, body, _) = get(&admin, "/readyz").await;
    let readiness: Readiness = serde_json::from_str(&body).unwrap();
    assert_eq!((code, readiness.ready), (503, false));
    assert_eq!(readiness.reasons, ["the archive has no primary"]);
    assert_eq!(get(&admin, "/healthz").await.0, 200, "alive, though not ready");
    admin.stop().await;

    let admin = start(true);
    assert_eq!(get(&admin, "/readyz").await.0, 200);
    admin.stop().await;
}

#[actix_web::test]
async fn metrics_are_typed_for_prometheus() {
    let admin = start(true);
    let (code, _, headers) = get(&admin, "/metrics").await;
    assert_eq!(code, 200);
    assert_eq!(headers.get("content-type").unwrap(), "text/plain; version=0.0.4; charset=utf-8");
    admin.stop().await;
}

#[actix_web::test]
async fn the_page_is_whole_and_runs_nothing_but_itself() {
    let admin = start(true);
    let mut nonces = HashSet::new();
    for _ in 0..2 {
        let (code, body, headers) = get(&admin, "/").await;
        assert_eq!(code, 200);
        let policy = headers.get("content-security-policy").unwrap().to_str().unwrap().to_owned();
        let nonce = policy.split("'nonce-").nth(1).unwrap().split('\'').next().unwrap();
        assert_eq!(body.matches(nonce).count(), 2, "one style, one script");
        assert!(!body.contains(NONCE_MARK));
        nonces.insert(nonce.to_owned());
    }
    assert_eq!(nonces.len(), 2, "a nonce is used once");
    admin.stop().await;
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    for outside in ["src=\"http", "href=\"http", "url(http", "@import", "//cdn"] {
        assert!(!PAGE.contains(outside), "{outside}");
    }
    // Text from the daemon is only ever set as text; the one innerHTML is a constant.
    assert_eq!(PAGE.matches("innerHTML").count(), 1);
    assert!(!PAGE.contains("onclick=") && !PAGE.contains("insertAdjacentHTML"));
}

/// Every field the page reads exists in what the daemon sends.
#[test]
fn the_page_reads_fields_that_exist() {
    let status = Status {
        collections: vec![Default::default()],
        actors: vec![Default::default()],
        fast: halocline_actors::status::TierStatus {
            members: vec![Default::default()],
            ..Default::default()
        },
        ..Status::default()
    };
    let status = serde_json::to_value(status).unwrap();
    let script = PAGE.split("<script").nth(1).unwrap();
    let reads = |variable: &str, value: &serde_json::Value| {
        let known: HashSet<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let mut seen = 0;
        for (at, _) in script.match_indices(&format!("{variable}.")) {
            let before = script[..at].chars().next_back().unwrap_or(' ');
            if before.is_alphanumeric() || matches!(before, '_' | '.' | '"') {
                continue;
            }
            let field: String = script[at + variable.len() + 1..]
                .chars()
                .take_while(|c| c.is_ascii_lowercase() || *c == '_')
                .collect();
            // Lower-case methods of strings and arrays that share a variable's name.
            if field.contains('_') || known.contains(field.as_str()) {
                assert!(known.contains(field.as_str()), "{variable}.{field}");
                seen += 1;
            }
        }
        assert!(seen > 0, "{variable} is not read at all");
    };
    reads("s", &status);
    reads("f", &status["feeder"]);
    reads("c", &status["collections"][0]);
    reads("t", &status["fast"]);
    reads("m", &status["fast"]["members"][0]);
    reads("a", &status["actors"][0]);
}

#[actix_web::test]
async fn other_methods_and_paths_are_refused() {
    let admin = start(true);
    let (code, body, _) = get(&admin, "/nothing").await;
    assert_eq!(code, 404);
    assert!(body.contains("/status"), "{body}");
    let url = format!("http://{}/status", admin.address);
    let post = awc::Client::default().post(&url).send().await.unwrap();
    assert_eq!(post.status().as_u16(), 405);
    let head = awc::Client::default().head(&url).send().await.unwrap();
    assert_eq!(head.status().as_u16(), 200);
    admin.stop().await;
}

#[actix_web::test]
async fn an_address_in_use_is_named() {
    let admin = start(true);
    let error = Admin::start(admin.address, sources(true)).err().unwrap().to_string();
    assert!(
        error.contains(&admin.address.to_string()) && error.contains("admin.listen"),
        "{error}"
    );
    admin.stop().await;
}
