//! Evictor and warmer: rounds, their move transactions, and the boundary they share.

use crate::barrier::Look;
use crate::rules::Rule;
use crate::scenario::Scenario;
use crate::state::{
    Broken, Daemon, Date, KEYS, Key, MovePhase, Mover, NONE, NOTHING, Published, State,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvictorStep {
    /// A round: the boundary is raised to the horizon if it is below.
    Raise { horizon: Date },
    /// Nobody relies on a lower boundary.
    NotHeld,
    /// A move of one key: the snapshot is opened.
    Open { key: Key },
    /// The barrier, the proof, the commit, in turn.
    GoOn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmerStep {
    /// The archive names the keys from this date to the boundary.
    List { to: Date },
    /// The snapshot is opened.
    Open,
    /// The barrier, the copies, the commit, the news, in turn.
    GoOn,
}

impl Daemon {
    /// The boundary as it was stored under a raise epoch; older news is passed over.
    fn publish(&mut self, in_order: bool, raise_epoch: u8, complete_from: Date) {
        let known = &self.boundary;
        let lower = complete_from < known.complete_from;
        let old = raise_epoch < known.raise_epoch || (raise_epoch == known.raise_epoch && !lower);
        if !old || !in_order {
            self.boundary = Published { complete_from, raise_epoch };
        }
    }
}

impl Scenario {
    fn may_move(&self, state: &State, daemon: usize) -> bool {
        usize::from(state.fast.boundary.owner) == daemon || !self.follows(Rule::LeaderMoves)
    }

    fn can_look(&self, state: &State, daemon: usize, mover: &Mover) -> bool {
        let feeder = state.feeder(daemon);
        let look = match mover.phase {
            MovePhase::Barrier => self.first_half(feeder, mover.keys, mover.snapshot),
            MovePhase::Ingested => {
                self.second_half(feeder, mover.incarnation, mover.keys, mover.snapshot)
            }
            _ => Look::Passed,
        };
        look != Look::Wait
    }

    pub fn evictor_steps(&self, state: &State, daemon: usize, mut can: impl FnMut(EvictorStep)) {
        let evictor = &state.daemons[daemon].evictor;
        let leads_or_led = daemon == 0 || state.fast.leader == 1;
        match evictor.phase {
            MovePhase::Idle | MovePhase::Ready => {
                if state.evictions == 0 || !leads_or_led {
                    return;
                }
                for horizon in &self.horizons {
                    can(EvictorStep::Raise { horizon: *horizon });
                }
                if evictor.phase == MovePhase::Ready {
                    for key in 0..self.keys {
                        if self.is_before(state.fast.documents[key], evictor.to) {
                            can(EvictorStep::Open { key });
                        }
                    }
                }
            }
            MovePhase::Raised => {
                let held = self.is_held_below(state, daemon, evictor.to);
                if !held || !self.follows(Rule::Holds) {
                    can(EvictorStep::NotHeld);
                }
            }
            _ => {
                if self.can_look(state, daemon, evictor) {
                    can(EvictorStep::GoOn);
                }
            }
        }
    }

    pub fn evict(&self, state: &mut State, daemon: usize, step: EvictorStep) {
        match step {
            EvictorStep::Raise { horizon } => self.raise(state, daemon, horizon),
            EvictorStep::NotHeld => state.daemons[daemon].evictor.phase = MovePhase::Ready,
            EvictorStep::Open { key } => {
                state.evictions -= 1;
                let snapshot = state.now();
                let document = state.fast.documents[key];
                let boundary = state.fast.boundary;
                let covered = self.follows(Rule::OnlyUncovered)
                    && boundary.complete_from != NOTHING
                    && boundary.complete_from <= self.date(document);
                let forbidden = covered || !self.may_move(state, daemon);
                let evictor = &mut state.daemons[daemon].evictor;
                let raised = boundary.raise_epoch != evictor.raise_epoch;
                evictor.forbidden = forbidden || (raised && self.follows(Rule::RaiseEpoch));
                evictor.keys = [false; KEYS];
                evictor.keys[key] = true;
                evictor.documents = [NONE; KEYS];
                evictor.documents[key] = document;
                evictor.snapshot = snapshot;
                evictor.boundary_writes = boundary.writes;
                evictor.phase = MovePhase::Barrier;
                if !self.follows(Rule::EvictionBarrier) {
                    self.prove_eviction(state, daemon, key);
                }
            }
            EvictorStep::GoOn => {
                let evictor = state.daemons[daemon].evictor;
                let key = if evictor.keys[0] { 0 } else { 1 };
                match evictor.phase {
                    MovePhase::Proved => self.commit_eviction(state, daemon, key),
                    _ => match self.look(state, daemon, evictor) {
                        Look::Wait => {}
                        Look::Passed => self.prove_eviction(state, daemon, key),
                        half => self.note(state, daemon, half, |daemon| &mut daemon.evictor),
                    },
                }
            }
        }
    }

    fn look(&self, state: &State, daemon: usize, mover: Mover) -> Look {
        let feeder = state.feeder(daemon);
        if mover.phase == MovePhase::Barrier {
            self.first_half(feeder, mover.keys, mover.snapshot)
        } else {
            self.second_half(feeder, mover.incarnation, mover.keys, mover.snapshot)
        }
    }

    fn note(
        &self,
        state: &mut State,
        daemon: usize,
        look: Look,
        which: impl Fn(&mut Daemon) -> &mut Mover,
    ) {
        let incarnation = state.feeder(daemon).incarnation;
        let mover = which(&mut state.daemons[daemon]);
        if look == Look::Half {
            mover.phase = MovePhase::Ingested;
            mover.incarnation = incarnation;
        } else {
            mover.phase = MovePhase::Barrier;
        }
    }

    fn raise(&self, state: &mut State, daemon: usize, horizon: Date) {
        if !self.may_move(state, daemon) {
            return;
        }
        let boundary = &mut state.fast.boundary;
        let covers = boundary.complete_from != NOTHING && boundary.complete_from < horizon;
        if covers && self.follows(Rule::RaiseFirst) {
            boundary.complete_from = horizon;
            boundary.raise_epoch += 1;
            boundary.writes += 1;
        }
        let (raise_epoch, complete_from) = (boundary.raise_epoch, boundary.complete_from);
        let own = &mut state.daemons[daemon];
        own.publish(self.follows(Rule::OrderedNews), raise_epoch, complete_from);
        own.evictor =
            Mover { phase: MovePhase::Raised, to: horizon, raise_epoch, ..Mover::default() };
    }

    /// Behind the barrier: is the key resident, and has the archive the same bytes?
    fn prove_eviction(&self, state: &mut State, daemon: usize, key: Key) {
        let evictor = state.daemons[daemon].evictor;
        let resident = self.is_resident(state, daemon, key);
        let same = state.archive.documents[key] == evictor.documents[key];
        if !same && !state.changed_since(key, evictor.snapshot) && self.without.is_empty() {
            // Nothing changed the key, and the archive must have it.
            state.broken = Broken::Comparison;
        }
        if same && !resident {
            state.daemons[daemon].evictor.phase = MovePhase::Proved;
        } else {
            self.next_eviction(state, daemon);
        }
    }

    fn commit_eviction(&self, state: &mut State, daemon: usize, key: Key) {
        let evictor = state.daemons[daemon].evictor;
        let boundary = &state.fast.boundary;
        let key_conflict =
            self.follows(Rule::EvictionTransaction) && state.changed_since(key, evictor.snapshot);
        let move_conflict =
            self.follows(Rule::MovesConflict) && boundary.writes != evictor.boundary_writes;
        let evicted_to = self.date(evictor.documents[key]) + 1;
        if !(key_conflict || move_conflict || evictor.forbidden) {
            if state.fast.documents[key] != NONE {
                state.moved(key, NONE);
            }
            if self.follows(Rule::MovesConflict) {
                let boundary = &mut state.fast.boundary;
                boundary.writes += 1;
                boundary.evictions += 1;
                boundary.evicted_to = boundary.evicted_to.max(evicted_to);
            }
        }
        self.next_eviction(state, daemon);
    }

    /// The round goes on, or ends with the last move that the scenario has.
    fn next_eviction(&self, state: &mut State, daemon: usize) {
        let last = state.evictions == 0;
        let evictor = &mut state.daemons[daemon].evictor;
        *evictor = if last {
            Mover::default()
        } else {
            Mover {
                phase: MovePhase::Ready,
                to: evictor.to,
                raise_epoch: evictor.raise_epoch,
                ..Mover::default()
            }
        };
    }

    pub fn warmer_steps(&self, state: &State, daemon: usize, mut can: impl FnMut(WarmerStep)) {
        let warmer = &state.daemons[daemon].warmer;
        let leads_or_led = daemon == 0 || state.fast.leader == 1;
        match warmer.phase {
            MovePhase::Idle => {
                if state.warms == 0 || !leads_or_led {
                    return;
                }
                for to in &self.targets {
                    if *to < state.fast.boundary.complete_from {
                        can(WarmerStep::List { to: *to });
                    }
                }
            }
            MovePhase::Ready => can(WarmerStep::Open),
            _ => {
                if self.can_look(state, daemon, warmer) {
                    can(WarmerStep::GoOn);
                }
            }
        }
    }

    pub fn warm(&self, state: &mut State, daemon: usize, step: WarmerStep) {
        match step {
            WarmerStep::List { to } => {
                state.warms -= 1;
                let stored = state.fast.boundary;
                let mut keys = [false; KEYS];
                for (key, listed) in keys.iter_mut().enumerate().take(self.keys) {
                    let copy = state.archive.documents[key];
                    *listed = self.is_from(copy, to) && self.is_before(copy, stored.complete_from);
                }
                let own = &mut state.daemons[daemon];
                own.publish(
                    self.follows(Rule::OrderedNews),
                    stored.raise_epoch,
                    stored.complete_from,
                );
                own.warmer = Mover {
                    phase: MovePhase::Ready,
                    to,
                    raise_epoch: stored.raise_epoch,
                    evictions: stored.evictions,
                    listed: keys,
                    ..Mover::default()
                };
            }
            WarmerStep::Open => {
                let snapshot = state.now();
                let (fast, boundary) = (state.fast.documents, state.fast.boundary);
                let fenced = !self.may_move(state, daemon);
                let warmer = &mut state.daemons[daemon].warmer;
                warmer.snapshot = snapshot;
                warmer.boundary_writes = boundary.writes;
                let raised =
                    self.follows(Rule::RaiseEpoch) && boundary.raise_epoch != warmer.raise_epoch;
                let evicted = self.follows(Rule::NothingEvictedMeanwhile)
                    && boundary.evicted_to > warmer.to
                    && boundary.evictions != warmer.evictions;
                warmer.forbidden = raised || evicted || fenced;
                let mut any = false;
                for key in 0..KEYS {
                    warmer.documents[key] = NONE;
                    // Those that are on the fast tier already need no copy.
                    warmer.keys[key] = warmer.listed[key] && fast[key] == NONE;
                    any |= warmer.keys[key];
                }
                warmer.phase = MovePhase::Barrier;
                if !any {
                    warmer.phase = MovePhase::Proved;
                } else if !self.follows(Rule::WarmBarrier) {
                    self.read_copies(state, daemon);
                }
            }
            WarmerStep::GoOn => {
                let warmer = state.daemons[daemon].warmer;
                match warmer.phase {
                    MovePhase::Proved => self.commit_warm(state, daemon),
                    MovePhase::Committed => {
                        let own = &mut state.daemons[daemon];
                        let in_order = self.follows(Rule::OrderedNews);
                        own.publish(in_order, warmer.raise_epoch, warmer.to);
                        own.warmer = Mover::default();
                    }
                    _ => match self.look(state, daemon, warmer) {
                        Look::Wait => {}
                        Look::Passed => self.read_copies(state, daemon),
                        half => self.note(state, daemon, half, |daemon| &mut daemon.warmer),
                    },
                }
            }
        }
    }

    fn read_copies(&self, state: &mut State, daemon: usize) {
        let archive = state.archive.documents;
        let warmer = &mut state.daemons[daemon].warmer;
        for key in 0..KEYS {
            if warmer.keys[key] {
                warmer.documents[key] = archive[key];
            }
        }
        warmer.phase = MovePhase::Proved;
    }

    fn commit_warm(&self, state: &mut State, daemon: usize) {
        let warmer = state.daemons[daemon].warmer;
        let boundary = state.fast.boundary;
        let move_conflict =
            self.follows(Rule::MovesConflict) && boundary.writes != warmer.boundary_writes;
        let mut key_conflict = false;
        for key in 0..self.keys {
            let copies = warmer.documents[key] != NONE;
            key_conflict |= copies && state.changed_since(key, warmer.snapshot);
        }
        key_conflict &= self.follows(Rule::WarmTransaction);
        if key_conflict || move_conflict {
            // 112: the same keys again.
            state.daemons[daemon].warmer.phase = MovePhase::Ready;
            return;
        }
        if warmer.forbidden {
            state.daemons[daemon].warmer = Mover::default();
            return;
        }
        for key in 0..self.keys {
            if warmer.documents[key] != NONE && state.fast.documents[key] == NONE {
                state.moved(key, warmer.documents[key]);
            }
        }
        let boundary = &mut state.fast.boundary;
        boundary.writes += 1;
        boundary.complete_from = warmer.to;
        state.daemons[daemon].warmer.phase = MovePhase::Committed;
    }
}
