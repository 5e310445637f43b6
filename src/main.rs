//! The `halocline` command line; everything is in the library.

use std::process::ExitCode;

use clap::Parser;
use halocline::cli::Cli;

fn main() -> ExitCode {
    Cli::parse().run()
}
