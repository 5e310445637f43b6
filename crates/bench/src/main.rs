//! `halocline-bench`: measures the daemon. One module a question.

mod client;
mod daemon;
mod hop;
mod idle;
mod process;

use clap::{Parser, Subcommand};

/// Measures Halocline on this machine, on loopback, against real replica sets.
#[derive(Debug, Parser)]
#[command(name = "halocline-bench", version)]
struct Cli {
    #[command(subcommand)]
    question: Question,
}

#[derive(Debug, Subcommand)]
enum Question {
    /// What does the hop through Halocline cost a point read?
    Hop(hop::Options),
    /// What does an idle client connection cost?
    Idle(idle::Options),
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        match cli.question {
            Question::Hop(options) => hop::run(options).await,
            Question::Idle(options) => idle::run(options).await,
        }
    })
}
