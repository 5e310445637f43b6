//! Checks of the servers themselves: storage engine, clocks, oplog, history window.

use std::time::{Duration, SystemTime};

use bson::{Bson, Document, doc};
use halocline_cluster::Tier;

use super::{Context, Finding, Outcome, Side, is_unauthorized, unseen};
use crate::config::Age;

/// A clock this far off shifts windows and what people read in logs.
const SKEW_WARNING: Duration = Duration::from_secs(1);
/// A clock this far off makes date windows wrong by more than the evictor's usual grace.
const SKEW_ERROR: Duration = Duration::from_secs(60);
/// Time between the clock readings of two attempts matters; the fastest of a few is the best.
const CLOCK_ATTEMPTS: usize = 3;

/// The fast tier's oplog must outlast the longest outage of daemon or archive that is to be survived
/// without comparing everything anew.
const OPLOG_WARNING: Duration = Duration::from_secs(24 * 60 * 60);
/// Less than this and a restart at the wrong moment loses history.
const OPLOG_ERROR: Duration = Duration::from_secs(10 * 60);
/// An oplog that is filled less than this has not begun to drop entries; its age says nothing.
const OPLOG_FULL: f64 = 0.9;

/// Move transactions and snapshot reads need WiredTiger.
pub async fn storage_engine(context: &Context<'_>) -> Outcome {
    let Some(side) = &context.fast else { return Ok(vec![]) };
    let asked =
        side.admin(doc! { "serverStatus": 1, "metrics": 0, "locks": 0, "wiredTiger": 0 }).await;
    let status = match asked {
        Ok(status) => status,
        Err(error) if is_unauthorized(&error) => {
            return Ok(vec![unseen(side, "storage engine", &error)]);
        }
        Err(error) => return Err(error),
    };
    let engine = status
        .get_document("storageEngine")
        .and_then(|engine| engine.get_str("name"))
        .unwrap_or_default();
    if engine == "wiredTiger" || engine.is_empty() {
        return Ok(vec![]);
    }
    Ok(vec![Finding::error(
        side.tier,
        format!("uses the storage engine {engine}, which has no snapshots to move documents under"),
        "run the fast tier on WiredTiger",
    )])
}

/// Windows are reckoned by this host's clock; change streams and logs carry the servers'.
pub async fn clock(context: &Context<'_>) -> Outcome {
    let mut findings = Vec::new();
    for side in context.sides() {
        let Some(skew) = skew(side).await? else { continue };
        if skew.certain() < SKEW_WARNING {
            continue;
        }
        let what = format!(
            "has a clock {} {} this host's: windows are reckoned here, dates are written there",
            Age(Duration::from_millis(skew.millis.unsigned_abs())),
            if skew.millis > 0 { "ahead of" } else { "behind" }
        );
        let remedy = "run chrony or ntpd on this host and on every member";
        findings.push(if skew.certain() >= SKEW_ERROR {
            Finding::error(side.tier, what, remedy)
        } else {
            Finding::warning(side.tier, what, remedy)
        });
    }
    Ok(findings)
}

/// How far a server's clock is from this host's.
struct Skew {
    /// Positive: the server is ahead.
    millis: i64,
    /// The reading may be off by so much either way.
    uncertain: Duration,
}

impl Skew {
    /// The part that the time on the network cannot explain.
    fn certain(&self) -> Duration {
        Duration::from_millis(self.millis.unsigned_abs()).saturating_sub(self.uncertain)
    }
}

async fn skew(side: &Side) -> mongodb::error::Result<Option<Skew>> {
    let mut best: Option<Skew> = None;
    for _ in 0..CLOCK_ATTEMPTS {
        let sent = SystemTime::now();
        let hello = side.admin(doc! { "hello": 1 }).await?;
        let Ok(there) = hello.get_datetime("localTime") else { return Ok(None) };
        let round_trip = sent.elapsed().unwrap_or_default();
        let here = bson::DateTime::from_system_time(sent + round_trip / 2);
        let millis = there.timestamp_millis() - here.timestamp_millis();
        // Half the way, and a millisecond that rounding can hide.
        let uncertain = round_trip / 2 + Duration::from_millis(1);
        if best.as_ref().is_none_or(|best| uncertain < best.uncertain) {
            best = Some(Skew { millis, uncertain });
        }
    }
    Ok(best)
}

/// How long the feeder may be away before the fast tier forgets what changed.
pub async fn oplog(context: &Context<'_>) -> Outcome {
    let Some(side) = &context.fast else { return Ok(vec![]) };
    let local = side.client().database("local");
    let stats = local.run_command(doc! { "collStats": "oplog.rs" }).await?;
    let (size, max) = (number(&stats, "size"), number(&stats, "maxSize"));
    let entries = local.collection::<Document>("oplog.rs");
    let end = async |direction: i32| {
        let newest = entries.find_one(doc! {}).sort(doc! { "$natural": direction });
        let newest = newest.projection(doc! { "ts": 1 }).await?;
        Ok::<_, mongodb::error::Error>(newest.and_then(|entry| entry.get_timestamp("ts").ok()))
    };
    let (Some(first), Some(last)) = (end(1).await?, end(-1).await?) else { return Ok(vec![]) };
    let seconds = last.time.saturating_sub(first.time);
    let Some(window) = projected(Duration::from_secs(seconds.into()), size, max) else {
        return Ok(vec![]);
    };
    let megabytes = (max / 1e6).round();
    let what = format!(
        "has an oplog of {megabytes} MB, which holds about {} of changes at the present rate; a \
         feeder away for longer has lost its place",
        Age(window)
    );
    let remedy = "db.adminCommand({ replSetResizeOplog: 1, size: <MB> }) on each member, for at \
                  least a day of changes";
    Ok(if window < OPLOG_ERROR.max(context.options.feeder.max_lag * 10) {
        vec![Finding::error(Tier::Fast, what, remedy)]
    } else if window < OPLOG_WARNING {
        vec![Finding::warning(Tier::Fast, what, remedy)]
    } else {
        vec![]
    })
}

/// How far back the oplog reaches once it is full: measured if it is, projected from the rate so far
/// if it is well on the way, unknown if it is nearly empty.
fn projected(age: Duration, size: f64, max: f64) -> Option<Duration> {
    /// Below this a projection is a guess.
    const TELLING: f64 = 0.05;
    if max <= 0.0 || size <= 0.0 {
        return None;
    }
    let filled = size / max;
    if filled >= OPLOG_FULL {
        return Some(whole_seconds(age));
    }
    (filled >= TELLING).then(|| whole_seconds(age.mul_f64(1.0 / filled)))
}

fn whole_seconds(age: Duration) -> Duration {
    Duration::from_secs(age.as_secs())
}

/// The archive keeps old versions of documents for reads in its past, and pays for each update.
pub async fn history_window(context: &Context<'_>) -> Outcome {
    let Some(side) = &context.archive else { return Ok(vec![]) };
    let name = "minSnapshotHistoryWindowInSeconds";
    let reply = side.admin(doc! { "getParameter": 1, name: 1 }).await?;
    let seconds = number(&reply, name);
    if seconds <= 0.0 {
        return Ok(vec![]);
    }
    Ok(vec![Finding::note(
        side.tier,
        format!(
            "keeps {seconds} s of history ({name}): an update then costs about 1.9 disk reads \
             instead of 1.0 when the disk is the limit"
        ),
        "if nobody reads the archive's past (atClusterTime, snapshot sessions), on every member: \
         db.adminCommand({ setParameter: 1, minSnapshotHistoryWindowInSeconds: 0 }), and the same \
         in its configuration file; the price is that such reads of the past are refused",
    )])
}

/// A number of any of BSON's kinds; 0 when there is none.
fn number(document: &Document, field: &str) -> f64 {
    match document.get(field) {
        Some(Bson::Double(number)) => *number,
        Some(Bson::Int32(number)) => f64::from(*number),
        // Sizes and counts lie far below the 2^53 that a double holds exactly.
        Some(Bson::Int64(number)) => *number as f64,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_young_oplog_is_judged_by_its_rate() {
        let hour = Duration::from_secs(3600);
        assert_eq!(projected(hour, 95.0, 100.0), Some(hour), "full: what it holds");
        assert_eq!(projected(hour, 50.0, 100.0), Some(hour * 2), "half full: twice that");
        assert_eq!(projected(hour, 1.0, 100.0), None, "nearly empty: nobody knows");
        assert_eq!(projected(hour, 1.0, 0.0), None);
    }

    #[test]
    fn the_network_explains_a_part_of_a_skew() {
        let skew = Skew { millis: -1500, uncertain: Duration::from_millis(600) };
        assert_eq!(skew.certain(), Duration::from_millis(900));
    }
}
