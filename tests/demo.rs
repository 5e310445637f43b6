//! `halocline demo` as a person meets it: the real binary with real mongods. It must end well, and
//! leave nothing behind however it ends.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use halocline_actors::status::Status;

/// The demos of this file run one at a time: each keeps two mongods and a daemon busy.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Demo {
    process: Child,
    said: BufReader<std::process::ChildStderr>,
    printed: Arc<Mutex<String>>,
    printing: JoinHandle<()>,
    directory: tempfile::TempDir,
}

impl Demo {
    /// Starts it with a directory of its own for everything it makes.
    fn start(arguments: &[&str]) -> Demo {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_halocline"));
        // A configuration meant for another daemon must not reach the demo's.
        command.env("HALOCLINE__FAST__URI", "mongodb://127.0.0.1:1/?replicaSet=elsewhere");
        command.env("TMPDIR", directory.path());
        command.arg("demo").args(["--orders", "20000", "--rate", "200"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let said = BufReader::new(process.stderr.take().unwrap());
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let printed = Arc::new(Mutex::new(String::new()));
        let so_far = printed.clone();
        let printing = std::thread::spawn(move || {
            for line in stdout.lines() {
                *so_far.lock().unwrap() += &(line.unwrap() + "\n");
            }
        });
        Demo { process, said, printed, printing, directory }
    }

    /// Returns when it says that this has begun.
    fn wait_for(&mut self, phase: &str) {
        let mut before = String::new();
        loop {
            let from = before.len();
            assert!(self.said.read_line(&mut before).unwrap() > 0, "no {phase:?} in:\n{before}");
            if before[from..].contains(phase) {
                return;
            }
        }
    }

    /// Returns when the daemon's status is like that.
    fn wait_until(&mut self, wanted: impl Fn(&Status) -> bool) {
        loop {
            let status = self.status();
            if status.as_ref().is_some_and(&wanted) {
                return;
            }
            assert!(self.process.try_wait().unwrap().is_none(), "it has ended; {status:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// What the daemon says at the address that the demo prints.
    fn status(&self) -> Option<Status> {
        let printed = self.printed.lock().unwrap().clone();
        let line = printed.lines().find(|line| line.contains("status page"))?;
        let address = line.rsplit_once("http://")?.1.trim_end_matches('/').to_owned();
        let mut socket = TcpStream::connect(&address).ok()?;
        write!(socket, "GET /status HTTP/1.0\r\nHost: {address}\r\n\r\n").ok()?;
        let mut reply = String::new();
        socket.read_to_string(&mut reply).ok()?;
        serde_json::from_str(reply.split_once("\r\n\r\n")?.1).ok()
    }

    /// The daemon's process id.
    fn daemon(&self) -> String {
        let output = Command::new("ps").args(["-A", "-o", "pid=,args="]).output().unwrap();
        let all = String::from_utf8_lossy(&output.stdout).into_owned();
        let directory = self.directory.path().to_string_lossy();
        let line = all.lines().find(|l| l.contains(&*directory) && l.contains("run --config"));
        let line = line.unwrap_or_else(|| panic!("no daemon in:\n{all}"));
        line.split_whitespace().next().unwrap().to_owned()
    }

    fn signal(&self, signal: &str) {
        kill(signal, &self.process.id().to_string());
    }

    /// Waits until it and everything that it started are gone, and says what it printed.
    fn end(mut self) -> (ExitStatus, String, String) {
        let mut said = String::new();
        self.said.read_to_string(&mut said).unwrap();
        let status = self.process.wait().unwrap();
        let left = || (processes_of(self.directory.path()), files_in(self.directory.path()));
        // Where it was killed, its janitors need a moment. The test's own limit ends this otherwise.
        for _ in 0..1500 {
            if left() == (Vec::new(), Vec::new()) {
                self.printing.join().unwrap();
                return (status, self.printed.lock().unwrap().clone(), said);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{status}, and left behind: {:?}\n{said}", left());
    }
}

fn kill(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, pid]).status().unwrap().success());
}

/// Command lines that name the directory.
fn processes_of(directory: &Path) -> Vec<String> {
    let output = Command::new("ps").args(["-A", "-o", "args="]).output().unwrap();
    let all = String::from_utf8_lossy(&output.stdout).into_owned();
    let directory = directory.to_string_lossy();
    all.lines().filter(|line| line.contains(&*directory)).map(str::to_owned).collect()
}

fn files_in(directory: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The number that begins a row of the summary.
fn row(printed: &str, name: &str) -> u64 {
    let line = printed.lines().find(|line| line.trim_start().starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no row {name:?} in:\n{printed}"));
    let value = line.trim_start()[name.len()..].trim_start();
    let digits: String = value.chars().take_while(|c| !c.is_whitespace()).collect();
    digits.replace(',', "").parse().unwrap_or_else(|_| panic!("{line}"))
}

/// Holds: in the end both tiers agree with each other and with what was acknowledged.
#[test]
fn a_short_demo_ends_by_itself_and_finds_no_differences() {
    let _alone = alone();
    let (status, printed, said) = Demo::start(&["--minutes", "0.3"]).end();
    assert!(status.success(), "{status}\n{printed}\n{said}");
    assert_eq!(printed.matches("connection string  ").count(), 2, "{printed}");
    assert!(printed.contains("mongodb://127.0.0.1:"), "{printed}");
    assert!(printed.contains("0 failed, 0 answered wrongly"), "{printed}");
    for some in ["operations", "answered by the fast tier", "on the fast tier", "on the archive"] {
        assert!(row(&printed, some) > 0, "{some} in:\n{printed}");
    }
    for present in
        ["documents warmed", "documents evicted", "documents mirrored", "documents faulted in"]
    {
        row(&printed, present);
    }
    assert!(printed.contains("lag  "), "{printed}");
    assert_eq!(row(&printed, "differences"), 0, "{printed}");
}

/// Holds: everything that the demo promises to show happens while one watches.
#[test]
fn documents_are_warmed_mirrored_faulted_in_and_evicted() {
    let _alone = alone();
    let mut demo = Demo::start(&["--minutes", "1.6"]);
    demo.wait_for("the shops open");
    demo.wait_until(|status| {
        let orders = &status.collections[0];
        orders.warm
            && [orders.warmed, orders.evicted, orders.faulted_in, status.feeder.mirrored]
                .iter()
                .all(|count| *count > 0)
            && status.requests.archive > 0
    });
    demo.signal("-INT");
    let (status, printed, said) = demo.end();
    // Interrupted, a run with an end of its own is no success.
    assert_eq!(status.code(), Some(1), "{printed}\n{said}");
    assert!(
        printed.contains("not compared") && row(&printed, "documents evicted") > 0,
        "{printed}"
    );
}

#[test]
fn ctrl_c_ends_everything_at_any_moment() {
    let _alone = alone();
    for (phase, signal) in [
        ("starting two replica sets", "-INT"),
        ("loading", "-INT"),
        ("starting halocline", "-TERM"),
        ("the shops open", "-INT"),
    ] {
        let mut demo = Demo::start(&[]);
        demo.wait_for(phase);
        demo.signal(signal);
        let (status, printed, said) = demo.end();
        // That is how a demo without an end of its own ends.
        assert_eq!(status.code(), Some(0), "{phase}: {status}\n{printed}\n{said}");
    }
}

#[test]
fn a_daemon_that_ends_too_early_is_a_failure() {
    let _alone = alone();
    let mut demo = Demo::start(&[]);
    demo.wait_for("the shops open");
    kill("-KILL", &demo.daemon());
    let (status, printed, said) = demo.end();
    assert_eq!(status.code(), Some(1), "{printed}\n{said}");
    assert!(said.contains("halocline has ended") && said.contains("serving clients"), "{said}");
}

#[test]
fn a_killed_demo_leaves_nothing_behind() {
    let _alone = alone();
    let mut demo = Demo::start(&[]);
    demo.wait_for("the shops open");
    assert_ne!(demo.daemon(), demo.process.id().to_string());
    demo.signal("-KILL");
    let (status, ..) = demo.end();
    assert!(!status.success());
}

#[test]
fn a_wrong_length_is_usage() {
    for wrong in ["0", "-1", "soon"] {
        let output = Command::new(env!("CARGO_BIN_EXE_halocline"))
            .args(["demo", &format!("--minutes={wrong}")])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}
