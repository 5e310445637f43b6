//! The command line as a person meets it: the real binary, its words and its exit codes. Nothing here
//! needs a MongoDB server.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

fn halocline(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halocline"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HALOCLINE") {
            command.env_remove(name);
        }
    }
    command.args(arguments).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn written(directory: &Path, text: &str) -> String {
    let path = directory.join("halocline.toml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Holds: all configuration is judged before anything is opened, and every mistake is told at once.
#[test]
fn five_mistakes_are_five_errors_and_no_port_is_opened() {
    // Whoever tried to listen would fail on these and say so; whoever tried to connect would be seen.
    let clients = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    server.set_nonblocking(true).unwrap();
    let text = format!(
        r#"
[listen]
addresses = ["{}"]
[admin]
listen = "{}"
[fast]
url = "mongodb://{server}/?replicaSet=fast"
uri = "mongodb://{server}/?replicaSet=fast"
[archive]
uri = "mongodb://archive:27017/"
[[collection]]
namespace = "orders"
date_field = "created_at"
keep = "30 fortnights"
[feeder]
batch_keys = 0
"#,
        clients.local_addr().unwrap(),
        admin.local_addr().unwrap(),
        server = server.local_addr().unwrap(),
    );
    let directory = tempfile::tempdir().unwrap();
    let config = written(directory.path(), &text);
    for verb in ["run", "check"] {
        let output = halocline(&[verb, "--config", &config]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("5 mistakes"), "{said}");
        for expected in [
            "fast.url: there is no such key; did you mean uri?",
            "archive.uri: does not name the replica set",
            "collection[0].namespace:",
            "collection[0].keep: `30 fortnights` is not an age",
            "feeder.batch_keys: `0` is below 1",
        ] {
            assert_eq!(said.matches(expected).count(), 1, "{expected} in:\n{said}");
        }
        assert_eq!(said.matches("    allowed: ").count(), 5, "{said}");
        assert!(!said.contains("in use"), "{said}");
        assert!(server.accept().is_err(), "something connected to a server");
    }

    let output = halocline(&["check", "--json", "--config", &config]);
    assert_eq!(output.status.code(), Some(2));
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["config_problems"].as_array().unwrap().len(), 5);
    assert_eq!(report["config_problems"][0]["suggestion"], "uri");
}

#[test]
fn a_missing_file_says_how_to_make_one() {
    let output = halocline(&["run", "--config", "/nonexistent/halocline.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("halocline config > halocline.toml"), "{}", stderr(&output));
}

#[test]
fn the_default_configuration_is_printed_and_accepted() {
    let printed = halocline(&["config"]);
    assert_eq!(printed.status.code(), Some(0));
    let directory = tempfile::tempdir().unwrap();
    let config = written(directory.path(), &stdout(&printed));
    // Its example hosts do not exist, which is a problem found, not a mistake in the file.
    let output = halocline(&["status", "--config", &config]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
}

#[test]
fn a_daemon_that_does_not_answer_is_a_problem_with_a_remedy() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let output = halocline(&["status", "--admin", &nobody]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.contains(&nobody) && said.contains("--admin"), "{said}");
}

#[test]
fn a_wrong_command_line_is_usage() {
    for wrong in [&["rnu"][..], &["run"], &["status", "--admin", "nowhere"], &["check", "--jsn"]] {
        assert_eq!(halocline(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn help_of_every_verb_shows_an_example_and_exit_codes() {
    for verb in ["run", "check", "status", "demo"] {
        let help = stdout(&halocline(&[verb, "--help"]));
        assert!(help.contains("Example") && help.contains("Exit codes"), "{help}");
    }
}
