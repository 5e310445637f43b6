//! Starts mongod processes so that none outlives the process that started it, and signals them.
//! What the processes are told and what they answer is not here.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{OnceLock, mpsc};

use rustix::process::{Pid, Signal, kill_process};

use crate::mongod::on_path;

/// Reads process ids until its standard input ends, which happens when the testbed closes it or its
/// process dies in whatever way. Then it kills those that still run (a process is known by the
/// directory in its command line: ids are reused) and removes the directory.
const JANITOR: &str = r#"
trap '' HUP INT TERM
directory=$1
keep=$2
ours() {
    arguments=$(tr '\000' ' ' < "/proc/$1/cmdline" 2>/dev/null || ps -o args= -p "$1" 2>/dev/null)
    case $arguments in *"$directory"*) return 0 ;; *) return 1 ;; esac
}
processes=
while read -r process; do processes="$processes $process"; done
for process in $processes; do
    if ours "$process"; then kill -9 "$process"; fi
done
tries=0
for process in $processes; do
    while ours "$process" && [ "$tries" -lt 200 ]; do sleep 0.05; tries=$((tries + 1)); done
done
if [ "$keep" = no ]; then rm -rf -- "$directory"; fi
"#;

/// A small shell process that outlives this one by a moment and cleans up after it.
#[derive(Debug)]
pub(crate) struct Janitor {
    shell: Child,
    line: Option<ChildStdin>,
}

impl Janitor {
    /// Makes `directory` go when this value is dropped or this process dies, unless `keep`.
    pub(crate) fn watch(directory: &Path, keep: bool) -> io::Result<Self> {
        let mut shell = Command::new("sh")
            .args(["-c", JANITOR, "halocline-testbed-janitor"])
            .arg(directory)
            .arg(if keep { "yes" } else { "no" })
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Out of the terminal's group: an interrupt meant for the test must not end it first.
            .process_group(0)
            .spawn()?;
        let line = shell.stdin.take();
        Ok(Self { shell, line })
    }

    fn also_kill(&mut self, pid: u32) -> io::Result<()> {
        match self.line.as_mut() {
            Some(line) => writeln!(line, "{pid}"),
            None => Ok(()),
        }
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.line.take());
        if let Err(error) = self.shell.wait() {
            tracing::warn!(%error, "the directory of a test deployment may be left behind");
        }
    }
}

/// One running or ended child.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    paused: bool,
}

impl Process {
    /// Starts `program` with `arguments`. Where the system can (setpriv of util-linux), it is also
    /// killed by the kernel at the moment this process dies; the janitor is the second line.
    pub(crate) fn start(
        program: &Path,
        arguments: &[std::ffi::OsString],
        output: std::fs::File,
        janitor: &mut Janitor,
    ) -> io::Result<Self> {
        Self::start_without(&[], program, arguments, output, janitor)
    }

    /// The same, hiding the environment variables `hidden` from it.
    pub(crate) fn start_without(
        hidden: &[std::ffi::OsString],
        program: &Path,
        arguments: &[std::ffi::OsString],
        output: std::fs::File,
        janitor: &mut Janitor,
    ) -> io::Result<Self> {
        let mut command = match setpriv() {
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(["--pdeathsig", "KILL", "--"]).arg(program);
                command
            }
            None => Command::new(program),
        };
        command
            .args(arguments)
            .current_dir("/")
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(output)
            .process_group(0);
        for variable in hidden {
            command.env_remove(variable);
        }
        let child = spawn(command)?;
        let mut process = Self { child, paused: false };
        if let Err(error) = janitor.also_kill(process.pid()) {
            process.kill();
            return Err(error);
        }
        Ok(process)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn paused(&self) -> bool {
        self.paused
    }

    /// Its exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// SIGKILL, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        // Both fail only when it has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn pause(&mut self) -> io::Result<()> {
        self.signal(Signal::STOP)?;
        self.paused = true;
        Ok(())
    }

    pub(crate) fn resume(&mut self) -> io::Result<()> {
        self.signal(Signal::CONT)?;
        self.paused = false;
        Ok(())
    }

    pub(crate) fn terminate(&mut self) -> io::Result<()> {
        self.signal(Signal::TERM)
    }

    fn signal(&mut self, signal: Signal) -> io::Result<()> {
        // Until `ended` reaps it, the id cannot belong to anybody else.
        if let Some(status) = self.ended() {
            return Err(io::Error::other(format!("it has ended already ({status})")));
        }
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("not a process id"))?;
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Where setpriv is, if it knows `--pdeathsig` (busybox's does not).
fn setpriv() -> Option<&'static Path> {
    static SETPRIV: OnceLock<Option<PathBuf>> = OnceLock::new();
    SETPRIV
        .get_or_init(|| {
            let setpriv = on_path("setpriv")?;
            let works = Command::new(&setpriv)
                .args(["--pdeathsig", "KILL", "--", "true"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success());
            works.then_some(setpriv)
        })
        .as_deref()
}

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// Spawns from one thread that lives as long as the process: the parent-death signal follows the
/// *thread* that spawned, and a test's thread ends before the process does.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, queue) = mpsc::channel::<Order>();
        // A failure to start the thread closes the channel, which the callers see.
        let _ = std::thread::Builder::new().name("testbed-spawner".into()).spawn(move || {
            for (mut command, reply) in queue {
                let _ = reply.send(command.spawn());
            }
        });
        orders
    });
    let gone = || io::Error::other("the thread that starts processes is gone");
    let (reply, answer) = mpsc::channel();
    spawner.send((command, reply)).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}
