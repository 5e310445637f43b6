//! The point barrier in its two halves, as a connection thread or a mover sees it: between them
//! anything may happen.

use crate::rules::Rule;
use crate::scenario::Scenario;
use crate::state::{Feeder, KEYS, State, Time};

/// What a look at a barrier comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Not yet.
    Wait,
    /// The first half has passed.
    Half,
    /// From the beginning.
    Again,
    Passed,
}

impl Scenario {
    /// The time a barrier is told for an answer, or a snapshot, of the fast tier.
    fn told(&self, at: Time) -> Time {
        if self.follows(Rule::AnswersTime) { at } else { at.saturating_sub(1) }
    }

    fn settled(feeder: &Feeder, keys: [bool; KEYS], at: Time) -> bool {
        for key in 0..KEYS {
            let entry = &feeder.pending[key];
            if keys[key] && entry.pending && entry.oldest < at {
                return false;
            }
        }
        true
    }

    pub fn first_half(&self, feeder: &Feeder, keys: [bool; KEYS], at: Time) -> Look {
        let at = self.told(at);
        if feeder.applied >= at {
            return Look::Passed;
        }
        let half = if self.follows(Rule::IngestedFirst) {
            feeder.ingested >= at
        } else {
            Self::settled(feeder, keys, at)
        };
        if half { Look::Half } else { Look::Wait }
    }

    pub fn second_half(
        &self,
        feeder: &Feeder,
        incarnation: u8,
        keys: [bool; KEYS],
        at: Time,
    ) -> Look {
        let at = self.told(at);
        if self.follows(Rule::OneIncarnation) && feeder.incarnation != incarnation {
            return Look::Again;
        }
        let rest = if self.follows(Rule::IngestedFirst) {
            Self::settled(feeder, keys, at)
        } else {
            feeder.ingested >= at
        };
        if rest { Look::Passed } else { Look::Wait }
    }
}

impl Scenario {
    pub fn range_barrier(&self, feeder: &Feeder, at: Time) -> Look {
        if feeder.applied >= self.told(at) || !self.follows(Rule::RangeBarrier) {
            Look::Passed
        } else {
            Look::Wait
        }
    }
}

/// A set of one key.
pub fn only(key: usize) -> [bool; KEYS] {
    let mut keys = [false; KEYS];
    keys[key] = true;
    keys
}

impl State {
    pub fn feeder(&self, daemon: usize) -> &Feeder {
        &self.daemons[daemon].feeder
    }
}
