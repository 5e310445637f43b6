//! The command line: what it accepts, and which module does it. One file a verb.

mod check;
mod config;
mod demo;
mod run;
mod status;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::config::{Config, Problems};

const EXIT_CODES: &str = "\
Exit codes:
  0  all is well
  1  problems were found (check, status), or the daemon failed (run)
  2  the command line or the configuration is wrong; nothing was opened";

/// A fast tier of recent documents in front of a MongoDB replica set.
#[derive(Debug, Parser)]
#[command(name = "halocline", version, after_help = EXIT_CODES, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the daemon
    Run(run::Run),
    /// Check the configuration and both replica sets; changes nothing and opens no port
    Check(check::Check),
    /// Show what a running daemon is doing
    Status(status::Status),
    /// Try Halocline on this machine: local replica sets, a year of sample orders, live traffic
    Demo(demo::Demo),
    /// Print the commented default configuration
    Config(config::PrintConfig),
}

/// How a verb ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// All is well.
    Well,
    /// Problems were found, or the work failed.
    Problems,
    /// The command line or the configuration is wrong. The same code as clap's own.
    Usage,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Well => 0,
            Exit::Problems => 1,
            Exit::Usage => 2,
        })
    }
}

impl Cli {
    /// Does what the command line says.
    pub fn run(self) -> ExitCode {
        let exit = match self.verb {
            Verb::Run(verb) => verb.run(),
            Verb::Check(verb) => verb.run(),
            Verb::Status(verb) => verb.run(),
            Verb::Demo(verb) => verb.run(),
            Verb::Config(verb) => verb.run(),
        };
        exit.into()
    }
}

/// `--config`, for the verbs that need it.
#[derive(Debug, Args)]
struct ConfigArgument {
    /// Configuration file (TOML); environment variables HALOCLINE__<SECTION>__<KEY> win over it
    #[arg(long, value_name = "FILE", env = "HALOCLINE_CONFIG")]
    config: PathBuf,
}

impl ConfigArgument {
    /// Reads it, or prints everything that is wrong with it.
    fn load(&self) -> Result<Config, Exit> {
        Config::load(&self.config).map_err(|problems| {
            complain(&self.config, &problems);
            Exit::Usage
        })
    }
}

/// Prints the mistakes of a configuration to standard error.
fn complain(path: &Path, problems: &Problems) {
    let count = problems.0.len();
    let mistakes = if count == 1 { "one mistake".into() } else { format!("{count} mistakes") };
    eprintln!("{mistakes} in the configuration {}; nothing was started:\n", path.display());
    eprintln!("{problems}");
}

/// Writes to standard output. A reader that went away (`| head`) is not an error.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a value as JSON, for `--json`.
fn print_json(value: &impl serde::Serialize) -> Exit {
    match serde_json::to_string_pretty(value) {
        Ok(text) => {
            print(&format!("{text}\n"));
            Exit::Well
        }
        Err(error) => {
            eprintln!("the answer cannot be written as JSON: {error}");
            Exit::Problems
        }
    }
}

/// Colours for terminals that want them (`NO_COLOR` and pipes do not).
#[derive(Clone, Copy)]
struct Paint(bool);

impl Paint {
    fn for_stdout() -> Paint {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Paint(wanted && std::io::stdout().is_terminal())
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    fn faint(self, text: &str) -> String {
        self.with("2", text)
    }

    fn red(self, text: &str) -> String {
        self.with("31", text)
    }

    fn yellow(self, text: &str) -> String {
        self.with("33", text)
    }

    fn green(self, text: &str) -> String {
        self.with("32", text)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_shows_an_example_in_its_help() {
        for verb in Cli::command().get_subcommands_mut() {
            let help = verb.render_long_help().to_string();
            assert!(help.contains("Example"), "{help}");
        }
    }
}
