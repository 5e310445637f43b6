//! The differential test: random commands through Halocline and to a plain replica set that holds the
//! same data, while documents are warmed, faulted in, mirrored and evicted. Replies must be equal but
//! for the envelope and for the order of rows where MongoDB promises none; at the end the archive must
//! equal the plain set byte for byte.
//!
//! `cargo test --test differential` runs about 1,500 commands. The long form:
//!
//! ```sh
//! HALOCLINE_DIFFERENTIAL_COMMANDS=20000 HALOCLINE_DIFFERENTIAL_SEED=7 \
//!     cargo test --test differential -- --nocapture
//! ```
//!
//! The seed decides the commands, not when documents move. A failure is shrunk for
//! `HALOCLINE_DIFFERENTIAL_SHRINK` seconds (60) and printed with what repeats it;
//! `HALOCLINE_DIFFERENTIAL_CASE` runs one client's case alone, as a failure prints it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "differential/client.rs"]
mod client;
#[path = "differential/compare.rs"]
mod compare;
#[path = "differential/deployment.rs"]
mod deployment;
#[path = "differential/filters.rs"]
mod filters;
#[path = "differential/generate.rs"]
mod generate;
#[path = "differential/regressions.rs"]
mod regressions;
#[path = "differential/run.rs"]
mod run;
#[path = "differential/shrink.rs"]
mod shrink;
#[path = "differential/step.rs"]
mod step;
#[path = "differential/tally.rs"]
mod tally;
#[path = "differential/updates.rs"]
mod updates;
#[path = "differential/values.rs"]
mod values;

use std::time::Duration;

use halocline_tiering::DateKind;

use deployment::Sets;
use generate::{Profile, case};
use run::Failure;
use step::Case;
use tally::Tally;

/// Clients at work at once, each on a collection of its own, and how its documents are dated.
const CLIENTS: [DateKind; 4] =
    [DateKind::Date, DateKind::Date, DateKind::EpochMillis, DateKind::ObjectId];
/// Documents of a collection at first.
const DOCUMENTS: usize = 180;
/// Commands of one client before everything begins anew.
const COMMANDS_OF_A_CASE: usize = 375;
/// The seed when none is given: one that has passed, so that a change that fails it is to blame.
const SEED: u64 = 1;
/// Share of commands that Halocline may refuse by design, in a hundred.
const REFUSED_AT_MOST: u64 = 5;

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(format!("HALOCLINE_DIFFERENTIAL_{name}")).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}")))
}

/// What one client does: the seed and the profile say it all.
#[derive(Debug, Clone, Copy)]
struct Plan {
    seed: u64,
    profile: Profile,
}

impl Plan {
    /// As it is given in `HALOCLINE_DIFFERENTIAL_CASE`.
    fn text(&self) -> String {
        let Profile { kind, unique, documents, commands } = self.profile;
        format!("{}/{kind}/{unique}/{documents}/{commands}", self.seed)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let mut next = || parts.next();
        let seed = next()?.parse().ok()?;
        let name = next()?;
        let kind = [DateKind::Date, DateKind::EpochMillis, DateKind::ObjectId]
            .into_iter()
            .find(|kind| kind.name() == name)?;
        let profile = Profile {
            kind,
            unique: next()?.parse().ok()?,
            documents: next()?.parse().ok()?,
            commands: next()?.parse().ok()?,
        };
        Some(Self { seed, profile })
    }

    fn case(&self) -> Case {
        case(self.seed, self.profile)
    }
}

#[tokio::test]
async fn halocline_answers_as_the_archive_alone_would() {
    let seed: u64 = variable("SEED").unwrap_or(SEED);
    let commands: usize = variable("COMMANDS").unwrap_or(1500);
    let sets = Sets::start().await;
    let mut tally = Tally::default();
    if let Some(text) = variable::<String>("CASE") {
        let plan = Plan::parse(&text).unwrap_or_else(|| panic!("no such case: {text:?}"));
        println!("{}", plan.case());
        let tries: usize = variable("TRIES").unwrap_or(1);
        for _ in 0..tries {
            together(&sets, &[plan], &mut tally).await;
        }
        println!("{tally}");
        return;
    }
    println!("HALOCLINE_DIFFERENTIAL_SEED={seed} HALOCLINE_DIFFERENTIAL_COMMANDS={commands}");
    let rounds = commands.div_ceil(COMMANDS_OF_A_CASE * CLIENTS.len()).max(1);
    for round in 0..rounds {
        let plans: Vec<Plan> = CLIENTS
            .iter()
            .enumerate()
            .map(|(client, kind)| Plan {
                seed: seed * 1_000_000 + (round * CLIENTS.len() + client) as u64,
                profile: Profile {
                    kind: *kind,
                    unique: false,
                    documents: DOCUMENTS,
                    commands: commands.div_ceil(rounds * CLIENTS.len()),
                },
            })
            .collect();
        together(&sets, &plans, &mut tally).await;
    }
    println!("{tally}");
    let (sent, refused) = (tally.sent(), tally.refused_unasked());
    assert!(
        refused * 100 <= sent * REFUSED_AT_MOST,
        "{refused} of {sent} commands were refused; at most {REFUSED_AT_MOST} in a hundred may be"
    );
}

#[tokio::test]
async fn what_once_went_wrong_stays_right() {
    let sets = Sets::start().await;
    let (names, cases): (Vec<&str>, Vec<Case>) = regressions::all().into_iter().unzip();
    let failures = run::run(&sets, &cases, &mut Tally::default()).await;
    let failed: Vec<String> = names
        .iter()
        .zip(failures)
        .filter_map(|(name, failure)| Some((name, failure?)))
        .map(|(name, failure)| format!("{name}: at step {}: {}", failure.step, failure.what))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// Runs clients side by side; on failure shrinks the first that failed, and panics.
async fn together(sets: &Sets, plans: &[Plan], tally: &mut Tally) {
    let cases: Vec<Case> = plans.iter().map(Plan::case).collect();
    let failures = run::run(sets, &cases, tally).await;
    let failed: Vec<(&Plan, &Case, Failure)> = plans
        .iter()
        .zip(&cases)
        .zip(failures)
        .filter_map(|((plan, case), failure)| Some((plan, case, failure?)))
        .collect();
    let Some((plan, case, failure)) = failed.first() else { return };
    for (plan, _, failure) in &failed {
        println!(
            "FAILED HALOCLINE_DIFFERENTIAL_CASE={} at step {}: {}\n",
            plan.text(),
            failure.step,
            failure.what
        );
    }
    let budget = Duration::from_secs(variable("SHRINK").unwrap_or(60));
    let (small, last, again) = shrink::shrink(sets, (*case).clone(), failure.clone(), budget).await;
    if again {
        println!(
            "the smallest case found that fails:\n{small}fails at step {}: {}",
            last.step, last.what
        );
    } else {
        println!(
            "it did not fail again while it was shrunk; it needs a moment that is hard to meet"
        );
    }
    panic!(
        "{} differs from a plain replica set; repeat it with HALOCLINE_DIFFERENTIAL_CASE={}",
        "Halocline",
        plan.text()
    );
}
