//! `halocline status`: what a running daemon is doing, asked over its admin HTTP.

use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use halocline_actors::status::{CollectionStatus, Status as DaemonStatus, TierStatus};

use super::{Exit, Paint};
use crate::config::Config;

const EXAMPLES: &str = "\
Examples:
  halocline status
  halocline status --admin 10.0.0.5:27118
  halocline status --config halocline.toml --json | jq .feeder.lag_seconds

Exit codes:
  0  the daemon serves and reports no problem
  1  it reports problems, does not serve, or does not answer
  2  the command line or the configuration is wrong";

/// Where the daemon's admin server listens unless configured otherwise.
const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 27118);

/// Longest wait for the daemon's answer, which needs no server.
const PATIENCE: Duration = Duration::from_secs(10);

/// A status is some kilobytes; a hundred thousand collections would still fit.
const LARGEST_ANSWER: usize = 64 << 20;

/// Show what a running daemon is doing
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Status {
    /// Address of the daemon's admin server
    #[arg(
        long,
        value_name = "HOST:PORT",
        env = "HALOCLINE_ADMIN",
        conflicts_with = "config",
        value_parser = host_and_port
    )]
    admin: Option<String>,
    /// Configuration file of the daemon, to take the address from
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the daemon's own JSON
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(super) fn run(self) -> Exit {
        let address = match (self.admin, &self.config) {
            (Some(address), _) => address,
            (None, None) => DEFAULT_ADMIN.to_string(),
            (None, Some(path)) => match Config::load(path) {
                Ok(config) => reachable(config.admin.listen).to_string(),
                Err(problems) => {
                    super::complain(path, &problems);
                    return Exit::Usage;
                }
            },
        };
        let status = match actix_rt::System::new().block_on(ask(&address)) {
            Ok(status) => status,
            Err(why) => {
                eprintln!(
                    "no answer from a daemon at http://{address}/status: {why}\n\
                     Look whether it runs, and whether [admin] listen says so; --admin names another address."
                );
                return Exit::Problems;
            }
        };
        if self.json {
            super::print_json(&status);
        } else {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let now = now.unwrap_or_default().as_secs_f64();
            super::print(&for_people(&status, now, Paint::for_stdout()));
        }
        if status.state == "serving" && status.problems.is_empty() {
            Exit::Well
        } else {
            Exit::Problems
        }
    }
}

/// An address to listen on "everywhere" is reached on this machine.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// Accepts `host:port`; names are looked up when the daemon is asked.
fn host_and_port(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
            Ok(text.to_owned())
        }
        _ => Err("write it as host:port, such as 127.0.0.1:27118".into()),
    }
}

async fn ask(address: &str) -> Result<DaemonStatus, String> {
    let client = awc::Client::builder().timeout(PATIENCE).finish();
    let url = format!("http://{address}/status");
    let mut reply = client.get(url).send().await.map_err(|error| error.to_string())?;
    if !reply.status().is_success() {
        return Err(format!("HTTP {}", reply.status()));
    }
    let body = reply.body().limit(LARGEST_ANSWER).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&body)
        .map_err(|error| format!("what answers there is no halocline of this version ({error})"))
}

fn for_people(status: &DaemonStatus, now: f64, paint: Paint) -> String {
    let mut text = String::new();
    let state = match status.state.as_str() {
        "serving" => paint.green("serving"),
        "starting" | "draining" => paint.yellow(&status.state),
        other => paint.red(other),
    };
    let _ = writeln!(
        text,
        "{} {}, {state}, up {}, clients connect to {}",
        paint.bold("halocline"),
        status.version,
        span(status.uptime_seconds as f64),
        status.connection_string
    );
    for problem in &status.problems {
        let _ = writeln!(text, "{} {problem}", paint.red("problem"));
    }
    text.push('\n');
    tier(&mut text, "fast tier", &status.fast, paint);
    tier(&mut text, "archive", &status.archive, paint);

    let feeder = &status.feeder;
    let _ = writeln!(
        text,
        "feeder     {}, lag {}, {} keys waiting, {} written, {} saved by coalescing",
        if feeder.state == "running" { feeder.state.clone() } else { paint.red(&feeder.state) },
        span(feeder.lag_seconds),
        feeder.pending_keys,
        feeder.mirrored,
        feeder.coalesced
    );
    if feeder.quarantined_keys > 0 {
        let set_aside = format!("{} keys set aside", feeder.quarantined_keys);
        let _ = writeln!(text, "           {}", paint.red(&set_aside));
    }
    let requests = &status.requests;
    let share = |part: u64| match requests.total {
        0 => "-".to_owned(),
        total => format!("{:.1} %", 100.0 * part as f64 / total as f64),
    };
    let _ = writeln!(
        text,
        "requests   {} in all: fast tier {}, archive {}, halocline itself {}; {} error replies",
        requests.total,
        share(requests.fast),
        share(requests.archive),
        share(requests.local),
        requests.errors
    );
    let _ = writeln!(
        text,
        "clients    {} connections, {} cursors",
        status.client_connections, status.cursors_open
    );
    if !status.collections.is_empty() {
        text.push('\n');
    }
    for entry in &status.collections {
        collection(&mut text, entry, now, paint);
    }
    let restarted: Vec<String> = status
        .actors
        .iter()
        .filter(|actor| actor.restarts > 0)
        .map(|actor| format!("{} {} times", actor.actor, actor.restarts))
        .collect();
    if !restarted.is_empty() {
        let _ = writeln!(text, "\n{} {}", paint.yellow("restarted"), restarted.join(", "));
    }
    text
}

fn tier(text: &mut String, name: &str, tier: &TierStatus, paint: Paint) {
    let primary = match &tier.primary {
        Some(primary) => format!("primary {primary}"),
        None => paint.red("no primary"),
    };
    let members: Vec<String> = tier
        .members
        .iter()
        .filter(|member| Some(&member.address) != tier.primary.as_ref())
        .map(|member| format!("{} {}", member.kind, member.address))
        .collect();
    let others =
        if members.is_empty() { String::new() } else { format!(" ({})", members.join(", ")) };
    let _ =
        writeln!(text, "{name:<10} {}, MongoDB {}, {primary}{others}", tier.set_name, tier.version);
}

fn collection(text: &mut String, entry: &CollectionStatus, now: f64, paint: Paint) {
    let held = match entry.boundary {
        None => "nothing complete yet".to_owned(),
        Some(boundary) => format!("complete for the last {}", span(now - boundary)),
    };
    let warm = if entry.warm {
        paint.green("warm")
    } else {
        let eta = entry.warm_eta_seconds.map(|eta| format!(", about {} to go", span(eta)));
        let progress = format!("warming {:.1} %", 100.0 * entry.warm_progress);
        paint.yellow(&(progress + &eta.unwrap_or_default()))
    };
    let _ = writeln!(
        text,
        "{} {warm}, keep {}, {held}; {} on the fast tier, {} warmed, {} evicted, {} faulted in",
        paint.bold(&entry.ns),
        span(entry.keep_seconds as f64),
        entry.fast_documents,
        entry.warmed,
        entry.evicted,
        entry.faulted_in
    );
}

/// A length of time for people: two units at most.
fn span(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "-".into();
    }
    if seconds < 1.0 {
        return format!("{:.0} ms", seconds * 1e3);
    }
    if seconds < 100.0 {
        return format!("{seconds:.1} s");
    }
    // Far beyond any time shown here, and below what u64 holds.
    let whole = seconds.min(1e15) as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes} min {} s", whole % 60),
        (0, _) => format!("{hours} h {minutes} min"),
        (_, 0) => format!("{days} d"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_two_units_at_most() {
        for (seconds, shown) in [
            (0.0842, "84 ms"),
            (12.34, "12.3 s"),
            (200.0, "3 min 20 s"),
            (7260.0, "2 h 1 min"),
            (2_592_000.0, "30 d"),
            (2_600_000.0, "30 d 2 h"),
            (f64::NAN, "-"),
            (f64::INFINITY, "-"),
        ] {
            assert_eq!(span(seconds), shown);
        }
    }

    #[test]
    fn trouble_is_on_the_first_lines() {
        let status = DaemonStatus {
            state: "history_lost".into(),
            problems: vec!["the saved position is gone; leave the daemon running".into()],
            ..DaemonStatus::default()
        };
        let text = for_people(&status, 0.0, Paint(false));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("history_lost"), "{text}");
        assert!(lines[1].contains("the saved position is gone"), "{text}");
        assert!(text.contains("no primary"), "{text}");
    }

    #[test]
    fn everywhere_is_reached_here() {
        assert_eq!(reachable("0.0.0.0:1".parse().unwrap()), "127.0.0.1:1".parse().unwrap());
        assert_eq!(reachable("[::]:1".parse().unwrap()), "[::1]:1".parse().unwrap());
        assert_eq!(reachable("10.0.0.5:1".parse().unwrap()), "10.0.0.5:1".parse().unwrap());
    }
}
