//! `halocline run`: the daemon.

use clap::Args;

use super::{ConfigArgument, Exit};
use crate::{daemon, logging};

const EXAMPLES: &str = "\
Examples:
  halocline run --config halocline.toml
  HALOCLINE__FAST__PASSWORD=... halocline run --config halocline.toml --log-format json

SIGTERM and SIGINT drain: operations in flight finish, at most for [limits] drain_deadline.

Exit codes:
  0  stopped after a drain
  1  could not start, failed, or the drain missed its deadline
  2  the command line or the configuration is wrong; no port was opened";

/// Run the daemon
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    #[command(flatten)]
    config: ConfigArgument,
    /// Log for people or for machines; wins over [log] format
    #[arg(long, value_name = "FORMAT", value_enum)]
    log_format: Option<logging::Format>,
}

impl Run {
    pub(super) fn run(self) -> Exit {
        let mut config = match self.config.load() {
            Ok(config) => config,
            Err(exit) => return exit,
        };
        if let Some(format) = self.log_format {
            config.log.json = format == logging::Format::Json;
        }
        if let Err(error) = logging::start(&config.log) {
            eprintln!("logging cannot start: {error}");
            return Exit::Problems;
        }
        for warning in &config.warnings {
            tracing::warn!(key = warning.path, origin = warning.origin, "{}", warning.what);
        }
        match actix_rt::System::new().block_on(daemon::run(config)) {
            Ok(true) => Exit::Well,
            // Why is in the log.
            Ok(false) => Exit::Problems,
            Err(error) => {
                eprintln!("halocline cannot start: {error:#}");
                Exit::Problems
            }
        }
    }
}
