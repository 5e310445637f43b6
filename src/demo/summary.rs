//! What the demo prints: where to look while it runs, and what came of it. The facts are gathered
//! elsewhere.

use std::fmt::Write;
use std::time::Duration;

use halocline_actors::status::Status;

use super::compare::Comparison;
use super::stage::Daemon;
use super::{COLLECTION, DATABASE, DATE_FIELD, KEEP};

/// Where everything is, and what to try.
pub fn introduction(daemon: &Daemon, program: &str, orders: u64, shops: usize) -> String {
    let Daemon { admin, connection_string, config, log, .. } = daemon;
    let (config, log) = (config.display(), log.display());
    let uri = format!("{connection_string}{DATABASE}");
    let (orders, days) = (grouped(orders), KEEP.as_secs() / (24 * 60 * 60));
    format!(
        r#"
halocline demo: a year of orders ({orders}) on the archive, a fast tier that begins empty and keeps
{days} days, and {shops} shops that read and write through Halocline and check every answer.

  connection string  {connection_string}
  status page        http://{admin}/
  configuration      {config}
  log                {log}

Try, in another terminal:
  mongosh "{uri}" --eval 'db.{COLLECTION}.find().sort({{ {DATE_FIELD}: -1 }}).limit(3)'
  mongosh "{uri}" --eval 'db.{COLLECTION}.findOne({{ number: "HX-0000042" }})'
  mongosh "{uri}" --eval 'db.{COLLECTION}.insertOne({{ _id: "mine", {DATE_FIELD}: new Date() }})'
  curl -s http://{admin}/status
  curl -s http://{admin}/metrics | grep -E '^halocline_(warmer|evictor|feeder)'
  {program} status --admin {admin}

The first line is answered by the fast tier, the second by the archive. Change only what you
inserted: the shops would notice. Ctrl-C stops everything and removes it.

"#
    )
}

/// What came of a run.
pub struct Outcome {
    /// How long there was traffic.
    pub ran: Duration,
    /// The connection string.
    pub connection_string: String,
    /// The daemon's last account of itself.
    pub status: Status,
    /// The largest lag seen, in seconds.
    pub most_lag: f64,
    /// Operations of the shops.
    pub done: u64,
    /// Those that ended in an error.
    pub failed: u64,
    /// Those that were answered wrongly.
    pub wrong: u64,
    /// The first of both in words.
    pub complaints: Vec<String>,
    /// Both tiers compared, unless the run was interrupted.
    pub comparison: Option<Comparison>,
}

impl Outcome {
    /// Whether nothing failed and nothing differs.
    pub fn is_well(&self) -> bool {
        let differences = self.comparison.as_ref().map_or(0, |c| c.differences);
        self.failed + self.wrong + differences == 0
    }

    /// The summary table, and what is wrong.
    pub fn table(&self) -> String {
        let status = &self.status;
        let requests = &status.requests;
        let sum = |of: fn(&halocline_actors::status::CollectionStatus) -> u64| {
            grouped(status.collections.iter().map(of).sum())
        };
        let share = |part: u64| {
            let whole = (requests.fast + requests.archive).max(1);
            format!("{} ({:.1} %)", grouped(part), 100.0 * part as f64 / whole as f64)
        };
        let lag = |seconds: f64| span(Duration::from_secs_f64(seconds.max(0.0)));
        let mut rows = vec![
            ("connection string", self.connection_string.clone()),
            (
                "operations",
                format!(
                    "{} by the shops, {} failed, {} answered wrongly",
                    grouped(self.done),
                    grouped(self.failed),
                    grouped(self.wrong)
                ),
            ),
            ("answered by the fast tier", share(requests.fast)),
            ("answered by the archive", share(requests.archive)),
            ("documents warmed", sum(|c| c.warmed)),
            ("documents evicted", sum(|c| c.evicted)),
            ("documents mirrored", grouped(status.feeder.mirrored)),
            ("documents faulted in", sum(|c| c.faulted_in)),
            (
                "lag",
                format!(
                    "{} at the end, at most {}",
                    lag(status.feeder.lag_seconds),
                    lag(self.most_lag)
                ),
            ),
        ];
        if let Some(compared) = &self.comparison {
            rows.push((
                "on the fast tier",
                format!("{}, each compared with the archive's copy", documents(compared.fast)),
            ));
            rows.push((
                "on the archive",
                format!(
                    "{}, each compared with what was acknowledged",
                    documents(compared.archive)
                ),
            ));
            if compared.window > 0 {
                rows.push((
                    "in the window",
                    format!("{}, each looked for on the fast tier", documents(compared.window)),
                ));
            }
            if compared.strangers > 0 {
                rows.push(("inserted by others", documents(compared.strangers)));
            }
            rows.push(("differences", grouped(compared.differences)));
        } else {
            rows.push(("differences", "not compared: the run was interrupted".into()));
        }
        let mut text = format!("\nhalocline demo, {} of traffic\n\n", span(self.ran));
        for (name, value) in rows {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {name:<26} {value}");
        }
        let shown = self.comparison.iter().flat_map(|c| &c.shown);
        for trouble in self.complaints.iter().chain(shown) {
            let _ = writeln!(text, "\n  {trouble}");
        }
        text
    }
}

fn documents(n: u64) -> String {
    format!("{} {}", grouped(n), if n == 1 { "document" } else { "documents" })
}

/// A count with its thousands set apart.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    digits.char_indices().fold(String::new(), |mut text, (i, digit)| {
        if i > 0 && i % 3 == first {
            text.push(',');
        }
        text.push(digit);
        text
    })
}

/// A length of time, as short as can be.
pub fn span(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds @ 1..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_easy_to_read() {
        let counts = [0, 7, 999, 1000, 12_345, 123_456, 1_234_567].map(grouped);
        assert_eq!(counts, ["0", "7", "999", "1,000", "12,345", "123,456", "1,234,567"]);
        let times = [0, 42, 1000, 61_000, 3_660_000].map(|ms| span(Duration::from_millis(ms)));
        assert_eq!(times, ["0 ms", "42 ms", "1 s", "1 min 1 s", "1 h 1 min"]);
    }

    #[test]
    fn one_failure_or_difference_is_enough() {
        let outcome = |failed, wrong, differences| Outcome {
            ran: Duration::from_secs(1),
            connection_string: String::new(),
            status: Status::default(),
            most_lag: 0.0,
            done: 10,
            failed,
            wrong,
            complaints: Vec::new(),
            comparison: Some(Comparison { differences, ..Comparison::default() }),
        };
        assert!(outcome(0, 0, 0).is_well());
        assert!(!outcome(1, 0, 0).is_well());
        assert!(!outcome(0, 1, 0).is_well());
        assert!(!outcome(0, 0, 1).is_well());
        assert!(outcome(0, 0, 3).table().contains("differences                3"));
    }
}
