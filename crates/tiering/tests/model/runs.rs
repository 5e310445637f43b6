//! The runs.
use crate::rules::Rule;
use crate::scenario::Scenario;
use crate::scenarios;
use stateright::{Checker, HasDiscoveries, Model};
use std::time::Instant;

#[test]
#[ignore = "unfinished: it prints what the checker finds and does not judge it yet"]
fn all_promises() {
    for scenario in scenarios::small() {
        let name = scenario.name;
        let begun = Instant::now();
        let checker = scenario
            .checker()
            .threads(2)
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        println!(
            "{name:40} {:>9} states {:>9} generated depth {:>3} {:?}",
            checker.unique_state_count(),
            checker.state_count(),
            checker.max_depth(),
            begun.elapsed()
        );
        for (property, path) in checker.discoveries() {
            println!("  VIOLATED {property} in {} steps", path.clone().into_actions().len());
            for a in path.into_actions() {
                println!("     {a:?}");
            }
        }
    }
}

#[test]
#[ignore = "unfinished: it prints what the checker finds and does not judge it yet"]
fn mutations() {
    for (rule, scenario) in scenarios::without() {
        let _: (Rule, &Scenario) = (rule, &scenario);
        let begun = Instant::now();
        let checker = scenario
            .checker()
            .threads(1)
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        print!(
            "{:3} {:26} {:>8} states {:>7.1?} ",
            rule.number(),
            format!("{rule:?}"),
            checker.unique_state_count(),
            begun.elapsed()
        );
        let mut found: Vec<_> = checker
            .discoveries()
            .into_iter()
            .map(|(p, path)| (path.clone().into_actions().len(), p, path))
            .collect();
        found.sort_by_key(|f| f.0);
        match found.first() {
            None => println!("NOTHING FOUND"),
            Some((len, p, path)) => {
                println!("{p} in {len}");
                if std::env::var("SHOW").is_ok() {
                    for a in path.clone().into_actions() {
                        println!("     {a:?}");
                    }
                }
            }
        }
    }
}
