//! `halocline check`: every problem of the configuration and of both replica sets, with its remedy.

use std::fmt::Write;

use clap::Args;
use serde::Serialize;

use super::{ConfigArgument, Exit, Paint};
use crate::check::{self, CHECKS, Context, Finding, Severity};
use crate::config::{Config, Problem};

const EXAMPLES: &str = "\
Examples:
  halocline check --config halocline.toml
  halocline check --config halocline.toml --json | jq '.findings[] | select(.severity == \"error\")'

Exit codes:
  0  no errors; warnings and notes may have been printed
  1  errors, or warnings with --strict
  2  the command line or the configuration is wrong";

/// Check the configuration and both replica sets; changes nothing and opens no port
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Check {
    #[command(flatten)]
    config: ConfigArgument,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Count warnings as problems, too
    #[arg(long)]
    strict: bool,
}

/// What `--json` prints.
#[derive(Debug, Default, Serialize)]
struct Report {
    /// Whether the exit code is 0.
    ok: bool,
    /// Mistakes in the configuration; nothing else was looked at if there are any.
    config_problems: Vec<Problem>,
    /// What is accepted and should be looked at again.
    config_warnings: Vec<Problem>,
    /// The tiers that could be reached.
    tiers: Vec<TierReport>,
    /// Names of the checks that were made.
    checks: Vec<&'static str>,
    /// What they found, errors first.
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct TierReport {
    tier: &'static str,
    set_name: String,
    primary: String,
    members: Vec<String>,
    version: String,
    fcv: Option<String>,
}

impl Check {
    pub(super) fn run(self) -> Exit {
        let config = match Config::load(&self.config.config) {
            Ok(config) => config,
            Err(problems) => {
                if self.json {
                    let report = Report { config_problems: problems.0, ..Report::default() };
                    super::print_json(&report);
                } else {
                    super::complain(&self.config.config, &problems);
                }
                return Exit::Usage;
            }
        };
        let report = actix_rt::System::new().block_on(look(config, self.strict));
        let exit = if report.ok { Exit::Well } else { Exit::Problems };
        if self.json {
            super::print_json(&report);
        } else {
            super::print(&for_people(&report, Paint::for_stdout()));
        }
        exit
    }
}

async fn look(config: Config, strict: bool) -> Report {
    let (context, mut findings) = Context::connect(&config.options).await;
    findings.extend(check::all(&context).await);
    findings.sort_by_key(|finding| finding.severity);
    let worst = if strict { Severity::Warning } else { Severity::Error };
    let tiers = context.sides().map(|side| TierReport {
        tier: side.tier.label(),
        set_name: side.facts.set_name.clone(),
        primary: side.primary().to_owned(),
        members: side.members().into_iter().map(str::to_owned).collect(),
        version: side.facts.version.clone(),
        fcv: side.facts.fcv.clone(),
    });
    Report {
        ok: findings.iter().all(|finding| finding.severity > worst)
            && (!strict || config.warnings.is_empty()),
        tiers: tiers.collect(),
        checks: std::iter::once("reachable").chain(CHECKS.iter().map(|c| c.name)).collect(),
        findings,
        config_problems: Vec::new(),
        config_warnings: config.warnings,
    }
}

fn for_people(report: &Report, paint: Paint) -> String {
    let mut text = String::new();
    for tier in &report.tiers {
        let fcv = tier.fcv.as_ref().map(|fcv| format!(" (FCV {fcv})")).unwrap_or_default();
        let members = match tier.members.len() {
            1 => "one member".to_owned(),
            count => format!("{count} members"),
        };
        let _ = writeln!(
            text,
            "{:<8} replica set {}, MongoDB {}{fcv}, {members}, primary {}",
            tier.tier,
            paint.bold(&tier.set_name),
            tier.version,
            tier.primary
        );
    }
    if !report.tiers.is_empty() {
        text.push('\n');
    }
    for warning in &report.config_warnings {
        let _ = writeln!(text, "{} {warning}\n", paint.yellow("warning"));
    }
    for finding in &report.findings {
        let label = format!("{}[{}]", finding.severity.label(), finding.check);
        let label = match finding.severity {
            Severity::Error => paint.red(&label),
            Severity::Warning => paint.yellow(&label),
            Severity::Note => paint.faint(&label),
        };
        let _ = writeln!(text, "{label} {}: {}", paint.bold(&finding.subject), finding.what);
        let _ = writeln!(text, "    remedy: {}\n", finding.remedy);
    }
    if report.tiers.len() < 2 {
        text.push_str("Checks that need a tier which could not be reached were left out.\n");
    }
    let count = |severity| report.findings.iter().filter(|f| f.severity == severity).count();
    let warnings = count(Severity::Warning) + report.config_warnings.len();
    let counts = [
        counted(count(Severity::Error), "error"),
        counted(warnings, "warning"),
        counted(count(Severity::Note), "note"),
    ];
    let counts = counts.join(", ");
    let _ = writeln!(text, "{}", if report.ok { paint.green(&counts) } else { paint.red(&counts) });
    text
}

fn counted(count: usize, one: &str) -> String {
    match count {
        0 => format!("no {one}s"),
        1 => format!("1 {one}"),
        _ => format!("{count} {one}s"),
    }
}
