//! The runs: every promise in the small scenarios, the table of what breaks without which rule, and
//! on demand a larger run whose bounds come from the environment.

use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use crate::rules::Rule;
use crate::scenario::Scenario;
use crate::scenarios::{self, Bounds};

/// Explores a scenario to its end and returns what it broke, if anything, with the way there.
fn explore(scenario: Scenario) -> Option<String> {
    let name = scenario.name;
    let begun = Instant::now();
    let checker =
        scenario.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!(
        "{name:26} {:>10} states {:>11} transitions, depth {:>3}, {:.1?}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        begun.elapsed(),
    );
    let (promise, path) = checker.discoveries().into_iter().next()?;
    let steps: Vec<String> =
        path.into_actions().into_iter().map(|step| format!("    {step:?}")).collect();
    Some(format!("{name}: {promise} broken\n{}", steps.join("\n")))
}

#[test]
fn every_promise_holds_in_every_small_scenario() {
    let broken: Vec<String> = scenarios::small().into_iter().filter_map(explore).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// A rule whose absence breaks nothing is not needed, or not modelled.
#[test]
fn without_a_rule_a_promise_breaks() {
    println!("{:18} {:50} {:26} steps  states", "protocol rule", "left out", "broken promise");
    let mut unbroken = Vec::new();
    for (rules, promise, scenario) in scenarios::without() {
        let numbers: Vec<&str> = rules.iter().map(|rule| rule.number()).collect();
        let names: Vec<String> = rules.iter().map(|rule| format!("{rule:?}")).collect();
        // One thread: the path found first is a shortest one.
        let checker = scenario
            .checker()
            .threads(1)
            .finish_when(HasDiscoveries::AllOf([promise].into()))
            .spawn_bfs()
            .join();
        let Some(path) = checker.discovery(promise) else {
            unbroken.push(format!("{}: {promise}", names.join(" + ")));
            continue;
        };
        println!(
            "{:18} {:50} {promise:26} {:>5} {:>7}",
            numbers.join(", "),
            names.join(" + "),
            path.clone().into_actions().len(),
            checker.unique_state_count(),
        );
        if std::env::var_os("HALOCLINE_MODEL_PATHS").is_some() {
            for step in path.into_actions() {
                println!("    {step:?}");
            }
        }
    }
    assert!(unbroken.is_empty(), "nothing breaks without {}", unbroken.join("; "));
}

/// The proof of absence reads the archive behind a barrier, and the model finds no need for it: a
/// key that exists and is not on the fast tier was evicted, so the archive has it already.
#[test]
fn a_proof_of_absence_needs_no_barrier_in_the_model() {
    let broken: Vec<String> = scenarios::small()
        .into_iter()
        .filter(|scenario| scenario.name == "inserts" || scenario.name == "takeover")
        .filter_map(|scenario| explore(scenario.without(&[Rule::ProofBarrier])))
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// `HALOCLINE_MODEL_OPERATIONS` and the like are the bounds; see `docs/protocol.md`.
#[test]
#[ignore = "minutes and gigabytes, with optimisation: see docs/protocol.md"]
fn every_promise_holds_in_the_large_scenarios() {
    let bound = |name: &str, usual: usize| {
        std::env::var(format!("HALOCLINE_MODEL_{name}"))
            .map_or(usual, |value| value.parse().unwrap())
    };
    let small = |name: &str, usual: usize| u8::try_from(bound(name, usual)).unwrap();
    let bounds = Bounds {
        operations: bound("OPERATIONS", 2),
        evictions: small("EVICTIONS", 1),
        warms: small("WARMS", 1),
        crashes: small("CRASHES", 1),
        timeouts: small("TIMEOUTS", 1),
        takeover: bound("TAKEOVER", 0) > 0,
    };
    let broken: Vec<String> = scenarios::large(&bounds).into_iter().filter_map(explore).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
