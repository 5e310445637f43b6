//! Nothing is left behind: no process, no directory, however the test ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use halocline_testbed::ReplicaSet;

/// Set when this test binary runs itself as the process that is to die.
const ROLE: &str = "HALOCLINE_TESTBED_CLEANUP_ROLE";

/// Not a test by itself: starts a set in a process of its own and then waits, or panics.
#[tokio::test]
#[ignore = "run by the tests below in a process of its own"]
async fn victim() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let set = ReplicaSet::builder().members(if role == "panic" { 1 } else { 2 }).start();
    let set = set.await.unwrap();
    if role == "paused" {
        set.pause(1).unwrap();
    }
    let pids: Vec<String> =
        (0..set.member_count()).map(|i| set.pid(i).unwrap().to_string()).collect();
    println!("\nset {} {}", set.directory().display(), pids.join(" "));
    if role == "panic" {
        panic!("as ordered");
    }
    std::future::pending::<()>().await;
}

struct Victim {
    process: Child,
    directory: PathBuf,
    pids: Vec<u32>,
}

fn start_victim(role: &str) -> Victim {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim", "--ignored", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let line = BufReader::new(process.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok)
        .find(|line| line.starts_with("set "))
        .expect("the victim said where its set is");
    let mut words = line.split(' ').skip(1);
    let directory = PathBuf::from(words.next().unwrap());
    let pids = words.map(|pid| pid.parse().unwrap()).collect();
    Victim { process, directory, pids }
}

fn runs(pid: u32, directory: &Path) -> bool {
    let output = Command::new("ps").args(["-o", "args=", "-p", &pid.to_string()]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).contains(&*directory.to_string_lossy())
}

/// Returns when everything of the victim is gone; the test harness's own limit ends it otherwise.
fn wait_until_gone(victim: &Victim) {
    let gone = || {
        !victim.directory.exists() && !victim.pids.iter().any(|&pid| runs(pid, &victim.directory))
    };
    for _ in 0..1500 {
        if gone() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("left behind: {} or a process of {:?}", victim.directory.display(), victim.pids);
}

#[test]
fn killing_the_test_process_ends_its_mongods_and_removes_their_files() {
    for role in ["killed", "paused"] {
        let mut victim = start_victim(role);
        assert!(victim.pids.iter().all(|&pid| runs(pid, &victim.directory)));
        victim.process.kill().unwrap();
        victim.process.wait().unwrap();
        wait_until_gone(&victim);
    }
}

#[test]
fn a_panicking_test_leaves_nothing() {
    let mut victim = start_victim("panic");
    assert!(!victim.process.wait().unwrap().success());
    wait_until_gone(&victim);
}

#[tokio::test]
async fn dropping_a_set_ends_it_before_drop_returns() {
    let set = ReplicaSet::builder().start().await.unwrap();
    let (pid, directory) = (set.pid(0).unwrap(), set.directory().to_path_buf());
    assert!(runs(pid, &directory));
    assert!(set.data_dir(0).starts_with(&directory) && set.log_path(0).exists());
    drop(set);
    assert!(!runs(pid, &directory));
    assert!(!directory.exists());
}
