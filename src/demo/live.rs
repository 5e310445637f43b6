//! How far the demo is, on standard error: one line that changes on a terminal, few lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use halocline_actors::status::Status;
use indicatif::{ProgressBar, ProgressStyle};

use super::summary::{grouped, span};
use super::traffic::Tally;

/// How often the line on a terminal moves.
const TICK: Duration = Duration::from_millis(120);
/// Time between two lines where nobody watches them change.
const QUIET: Duration = Duration::from_secs(15);

/// Shows progress.
pub struct Live {
    /// Only on a terminal.
    bar: Option<ProgressBar>,
    last: Instant,
}

impl Live {
    /// Shows nothing yet.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {wide_msg}");
            let bar = ProgressBar::new_spinner()
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.enable_steady_tick(TICK);
            bar
        });
        Self { bar, last: Instant::now() }
    }

    /// Something new begins.
    pub fn phase(&mut self, what: impl Into<String>) {
        let what = what.into();
        match &self.bar {
            Some(bar) => bar.set_message(what),
            None => eprintln!("{what}"),
        }
        self.last = Instant::now();
    }

    /// It goes on.
    pub fn progress(&mut self, what: impl FnOnce() -> String) {
        match &self.bar {
            Some(bar) => bar.set_message(what()),
            None if self.last.elapsed() >= QUIET => {
                eprintln!("{}", what());
                self.last = Instant::now();
            }
            None => {}
        }
    }

    /// Prints to standard output without tearing the line.
    pub fn print(&self, text: &str, print: impl FnOnce(&str)) {
        match &self.bar {
            Some(bar) => bar.suspend(|| print(text)),
            None => print(text),
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The traffic in one line, what matters most first: a narrow terminal cuts it.
pub fn line(running: Duration, left: Option<Duration>, tally: &Tally, status: &Status) -> String {
    let sum = |of: fn(&halocline_actors::status::CollectionStatus) -> u64| {
        grouped(status.collections.iter().map(of).sum())
    };
    let time = match left {
        Some(left) => format!("{} to go", span(left)),
        None => format!("{}, Ctrl-C ends it", span(running)),
    };
    let troubles = tally.failed.get() + tally.wrong.get();
    let troubles = if troubles > 0 {
        format!("{} FAILED OR WRONG | ", grouped(troubles))
    } else {
        String::new()
    };
    format!(
        "{troubles}{time} | warmed {}, mirrored {}, evicted {}, faulted in {} | answered: fast tier {}, archive {} | lag {}",
        sum(|c| c.warmed),
        grouped(status.feeder.mirrored),
        sum(|c| c.evicted),
        sum(|c| c.faulted_in),
        grouped(status.requests.fast),
        grouped(status.requests.archive),
        span(Duration::from_secs_f64(status.feeder.lag_seconds.max(0.0))),
    )
}
