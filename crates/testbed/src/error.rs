//! What can go wrong when a mongod is found, started or driven, said so that the reader knows what
//! to do. No policy: nothing is retried here.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why the testbed could not do what a test, the demo or the bench asked.
///
/// Its `Debug` form is the message too, because that is what a test's `unwrap()` shows.
#[derive(thiserror::Error)]
pub enum TestbedError {
    /// There is no mongod and none could be fetched.
    #[error(
        "no mongod was found and none could be fetched: {reason}. Install MongoDB 6.0 or newer and \
         set MONGOD to the path of its mongod, or put it on PATH"
    )]
    NoMongod {
        /// What went wrong while fetching.
        reason: String,
    },
    /// A mongod is there but does not run, or is too old.
    #[error("{} cannot be used: {reason}", path.display())]
    UnusableMongod {
        /// The binary.
        path: PathBuf,
        /// What it said, and what helps.
        reason: String,
    },
    /// A file, a directory, a socket or a process of the testbed's own failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A mongod ended while it was needed.
    #[error(
        "mongod of member {member} ended while {during} ({status}); the end of its output:\n{output}"
    )]
    Ended {
        /// Which member.
        member: usize,
        /// What the testbed was waiting for.
        during: &'static str,
        /// Its exit status.
        status: String,
        /// Its last lines of log and output.
        output: String,
    },
    /// Something that should have come about did not.
    #[error("waited {} s in vain for {what}; last seen: {last}", waited.as_secs())]
    TimedOut {
        /// What was awaited.
        what: String,
        /// For how long.
        waited: Duration,
        /// The last state or error seen.
        last: String,
    },
    /// The member is not in the state that the call needs.
    #[error("member {member} is {state}, so it cannot be {action}")]
    WrongState {
        /// Which member.
        member: usize,
        /// What it is.
        state: &'static str,
        /// What was asked.
        action: &'static str,
    },
    /// An option of the builder makes no sense.
    #[error("{0}")]
    Option(String),
    /// A certificate could not be made.
    #[error("a certificate for the test deployment could not be made: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The MongoDB driver failed.
    #[error("{what}: {source}")]
    Driver {
        /// What was being done.
        what: String,
        /// The driver's answer.
        source: Box<mongodb::error::Error>,
    },
}

impl fmt::Debug for TestbedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TestbedError {
    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }

    pub(crate) fn path(action: &str, path: &Path, source: std::io::Error) -> Self {
        Self::io(format!("cannot {action} {}", path.display()), source)
    }

    pub(crate) fn driver(what: impl Into<String>, source: mongodb::error::Error) -> Self {
        Self::Driver { what: what.into(), source: Box::new(source) }
    }
}
