//! A program that runs beside a replica set, such as a daemon that uses it. How it is kept from
//! outliving its starter is in `process.rs`.

use std::process::ExitStatus;

use crate::error::TestbedError;
use crate::process::Process;

/// A running or ended program; killed when dropped, and when this process dies in whatever way.
/// Started by [`ReplicaSet::start_beside`](crate::ReplicaSet::start_beside).
#[derive(Debug)]
pub struct Companion {
    process: Process,
}

impl Companion {
    pub(crate) fn new(process: Process) -> Self {
        Self { process }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// Asks it to end (SIGTERM), without waiting.
    pub fn terminate(&mut self) -> Result<(), TestbedError> {
        self.process
            .terminate()
            .map_err(|source| TestbedError::io("the program cannot be asked to end", source))
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}
