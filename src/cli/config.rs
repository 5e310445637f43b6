//! `halocline config`: the commented default configuration.

use clap::Args;

use super::Exit;

const EXAMPLES: &str = "\
Example:
  halocline config > halocline.toml";

/// Print the commented default configuration
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PrintConfig {}

impl PrintConfig {
    pub(super) fn run(self) -> Exit {
        super::print(&crate::config::template());
        Exit::Well
    }
}
