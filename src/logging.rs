//! Where log lines go and how they look. What is logged is decided where it happens.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::LogOptions;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

/// Starts logging to standard error. Once a process.
pub fn start(options: &LogOptions) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut filter = EnvFilter::try_new(&options.level)?;
    // Its lines about workers and ports repeat what the daemon says itself.
    if !options.level.contains("actix_server") {
        filter = filter.add_directive("actix_server=warn".parse()?);
    }
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if options.json {
        builder.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init()
    }
}
