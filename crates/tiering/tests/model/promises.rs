//! What must hold in every state, and how the model's steps come together for the checker.

use stateright::{Model, Property};

use crate::feeder::FeederStep;
use crate::movers::{EvictorStep, WarmerStep};
use crate::scenario::{Operation, Scenario};
use crate::state::{Broken, Flight, LATE, Phase, Stage, State};

/// One step of somebody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A client sends a command; the fast tier answers it.
    Begin {
        client: usize,
        choice: usize,
        operation: Operation,
    },
    Continue {
        client: usize,
        phase: Phase,
    },
    Feed {
        daemon: usize,
        step: FeederStep,
    },
    /// A write that nobody waits for reaches the archive.
    LandLate {
        place: usize,
    },
    Evict {
        daemon: usize,
        step: EvictorStep,
    },
    Warm {
        daemon: usize,
        step: WarmerStep,
    },
    TakeOver,
}

impl Model for Scenario {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![self.begin()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        if state.broken != Broken::Nothing {
            return;
        }
        for client in 0..self.clients.len() {
            let own = &state.clients[client];
            if own.phase != Phase::Idle {
                if self.can_go_on(state, client) {
                    actions.push(Step::Continue { client, phase: own.phase });
                }
            } else if self.can_begin(state, client) {
                let alternatives = &self.clients[client].operations[usize::from(own.done)];
                for (choice, operation) in alternatives.iter().enumerate() {
                    if self.waits_for_eviction(state, client, *operation) {
                        continue;
                    }
                    actions.push(Step::Begin { client, choice, operation: *operation });
                }
            }
        }
        let daemons = if self.takeover { 2 } else { 1 };
        for daemon in 0..daemons {
            self.feeder_steps(state, daemon, |step| actions.push(Step::Feed { daemon, step }));
            self.evictor_steps(state, daemon, |step| actions.push(Step::Evict { daemon, step }));
            self.warmer_steps(state, daemon, |step| actions.push(Step::Warm { daemon, step }));
        }
        for place in 0..LATE {
            if state.archive.late[place].on_its_way {
                actions.push(Step::LandLate { place });
            }
        }
        if state.takeovers > 0 {
            actions.push(Step::TakeOver);
        }
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = *state;
        match step {
            Step::Begin { client, choice, .. } => self.begin_operation(&mut next, client, choice),
            Step::Continue { client, .. } => self.go_on(&mut next, client),
            Step::Feed { daemon, step } => self.feed(&mut next, daemon, step),
            Step::LandLate { place } => self.land_late(&mut next, place),
            Step::Evict { daemon, step } => self.evict(&mut next, daemon, step),
            Step::Warm { daemon, step } => self.warm(&mut next, daemon, step),
            Step::TakeOver => self.take_over(&mut next),
        }
        next.forget();
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no lost write", |model: &Self, state: &State| {
                model.every_key(|key| {
                    let truth = state.truth[key];
                    truth == 0
                        || state.fast.documents[key] == truth
                        || state.archive.documents[key] == truth
                })
            }),
            Property::always("linearizable reads", |_: &Self, state: &State| {
                state.broken != Broken::Read
            }),
            Property::always("no stale copy", |model: &Self, state: &State| {
                model.every_key(|key| {
                    let copy = state.fast.documents[key];
                    copy == 0 || state.truth[key] == 0 || copy == state.truth[key]
                })
            }),
            Property::always("no resurrection", |model: &Self, state: &State| {
                model.every_key(|key| state.truth[key] != 0 || state.fast.documents[key] == 0)
            }),
            Property::always("complete covered ranges", |_: &Self, state: &State| {
                state.broken != Broken::Range
            }),
            Property::always("the archive converges", |model: &Self, state: &State| {
                !model.has_caught_up(state)
                    || model.every_key(|key| state.archive.documents[key] == state.truth[key])
            }),
            Property::always("no double insert", |_: &Self, state: &State| {
                state.broken != Broken::DoubleInsert
            }),
            Property::always("the tiers do not differ", |_: &Self, state: &State| {
                state.broken != Broken::Comparison
            }),
            Property::always("nothing waits for ever", |model: &Self, state: &State| {
                !model.is_stuck(state)
            }),
        ]
    }
}

impl Scenario {
    fn every_key(&self, holds: impl Fn(usize) -> bool) -> bool {
        (0..self.keys).all(holds)
    }

    /// The newest feeder has taken everything in and has nothing left to write.
    fn has_caught_up(&self, state: &State) -> bool {
        let feeder = state.feeder(usize::from(state.fast.leader));
        feeder.stage == Stage::Running
            && feeder.epoch == state.fast.epoch
            && feeder.ingested == state.now()
            && feeder.pending.iter().all(|entry| !entry.pending)
    }

    /// Some client's operation through the leader has not ended, and nothing can happen any more.
    fn is_stuck(&self, state: &State) -> bool {
        if state.broken != Broken::Nothing {
            return false;
        }
        let leader = usize::from(state.fast.leader);
        let waits = (0..self.clients.len()).any(|client| {
            state.clients[client].phase != Phase::Idle && self.clients[client].daemon == leader
        });
        let sent = |flight| matches!(flight, Flight::Sent { .. });
        let feeder = state.feeder(leader);
        if !waits || feeder.pending.iter().any(|entry| sent(entry.flight)) {
            return false;
        }
        let mut actions = Vec::new();
        self.actions(state, &mut actions);
        actions.is_empty()
    }
}
