//! Makes a failing case small: leaves out steps and documents as long as it still fails. Moves between
//! the tiers take their own time, so a case may fail only now and then; every candidate is run
//! several times at once, on collections of its own.

use std::time::{Duration, Instant};

use super::deployment::Sets;
use super::run::{Failure, run};
use super::step::Case;
use super::tally::Tally;

/// Candidates run side by side.
const AT_ONCE: usize = 8;

/// A smaller case that fails, and how.
pub async fn shrink(
    sets: &Sets,
    case: Case,
    failure: Failure,
    budget: Duration,
) -> (Case, Failure, bool) {
    let mut search =
        Search { sets, ends: Instant::now() + budget, reproduced: false, best: (case, failure) };
    search.cut_the_end();
    search.part(|case| &mut case.steps).await;
    search.part(|case| &mut case.documents).await;
    search.part(|case| &mut case.steps).await;
    (search.best.0, search.best.1, search.reproduced)
}

struct Search<'a> {
    sets: &'a Sets,
    ends: Instant,
    reproduced: bool,
    best: (Case, Failure),
}

impl Search<'_> {
    /// Steps after the failure have no part in it.
    fn cut_the_end(&mut self) {
        let (case, failure) = &mut self.best;
        case.steps.truncate(failure.step + 1);
    }

    /// Leaves out ever smaller pieces of one list.
    async fn part<T: Clone>(&mut self, list: impl Fn(&mut Case) -> &mut Vec<T>) {
        let mut piece = list(&mut self.best.0).len().div_ceil(2);
        while piece > 0 && Instant::now() < self.ends {
            let mut at = 0;
            // From the front: what comes late is more often part of the failure.
            while at < list(&mut self.best.0).len() && Instant::now() < self.ends {
                let length = list(&mut self.best.0).len();
                let starts: Vec<usize> =
                    (0..AT_ONCE).map(|i| at + i * piece).filter(|s| *s < length).collect();
                let mut candidates: Vec<Case> = starts
                    .iter()
                    .map(|start| {
                        let mut case = self.best.0.clone();
                        let list = list(&mut case);
                        list.drain(*start..(*start + piece).min(length));
                        case
                    })
                    .collect();
                // Few candidates: each several times.
                let distinct = candidates.len();
                while candidates.len() < AT_ONCE {
                    candidates.push(candidates[candidates.len() % distinct].clone());
                }
                let failures = run(self.sets, &candidates, &mut Tally::default()).await;
                let found = failures.into_iter().enumerate().find_map(|(i, f)| Some((i, f?)));
                match found {
                    Some((i, failure)) => {
                        self.best = (candidates.swap_remove(i), failure);
                        self.reproduced = true;
                        self.cut_the_end();
                    }
                    None => at += piece * starts.len(),
                }
            }
            piece = if piece == 1 { 0 } else { piece.div_ceil(2) };
        }
    }
}
