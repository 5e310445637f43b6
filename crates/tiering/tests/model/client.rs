//! Clients' operations, step by step, and whether their answers are true.

use crate::barrier::{Look, only};
use crate::rules::Rule;
use crate::scenario::{Operation, Scenario};
use crate::state::{
    Broken, CLIENTS, Client, Document, Key, MovePhase, NONE, NOTHING, Phase, Purpose, State,
};

impl Scenario {
    /// Whether a client's operation can go on.
    pub fn can_go_on(&self, state: &State, client: usize) -> bool {
        let own = &state.clients[client];
        let daemon = self.clients[client].daemon;
        let Some(key) = self.operation(client, own).key() else { return true };
        let feeder = state.feeder(daemon);
        let look = match own.phase {
            Phase::Barrier(_) => self.first_half(feeder, only(key), own.at),
            Phase::Ingested(_) => self.second_half(feeder, own.incarnation, only(key), own.at),
            Phase::RangeBarrier => self.range_barrier(feeder, own.at),
            _ => Look::Passed,
        };
        look != Look::Wait
    }

    /// Whether the next operation can begin.
    pub fn can_begin(&self, state: &State, client: usize) -> bool {
        let script = &self.clients[client];
        let done = usize::from(state.clients[client].done);
        let served = script.daemon == 0 || usize::from(state.fast.leader) == 1;
        let positioned = state.archive.mark.is_some() || !self.follows(Rule::FirstPosition);
        done < script.operations.len() && served && positioned
    }

    /// An insert or upsert of a key that is just leaving waits for that to end.
    pub fn waits_for_eviction(&self, state: &State, client: usize, operation: Operation) -> bool {
        let evictor = &state.daemons[self.clients[client].daemon].evictor;
        self.follows(Rule::Leaving)
            && operation.proves()
            && evictor.phase == MovePhase::Proved
            && operation.key().is_some_and(|key| evictor.keys[key])
    }

    /// The first thing an operation does on the fast tier.
    pub fn begin_operation(&self, state: &mut State, client: usize, choice: usize) {
        state.clients[client].choice = choice as u8;
        let operation = self.operation(client, &state.clients[client]);
        let Some(key) = operation.key() else { return self.begin_range(state, client) };
        state.clients[client].seen = 1 << state.truth[key];
        let on_fast = state.fast.documents[key] != NONE;
        match operation {
            Operation::Read(_) if on_fast => {
                self.answer(state, client, state.fast.documents[key]);
            }
            Operation::Read(_) => self.look_on_archive(state, client, key, Purpose::Read),
            Operation::Scan(_) => {
                state.clients[client].at = state.now();
                state.clients[client].phase = Phase::RangeBarrier;
            }
            Operation::InsertFresh(..) => state.clients[client].phase = Phase::Command,
            Operation::Insert(..) | Operation::Upsert(..) => {
                // Whether it is there was looked at; the command follows.
                if on_fast {
                    state.clients[client].phase = Phase::Command;
                } else if self.follows(Rule::ProofOfAbsence) {
                    self.look_on_archive(state, client, key, Purpose::ProofOfAbsence);
                } else {
                    state.clients[client].phase = Phase::Command;
                }
            }
            _ if on_fast => self.command(state, client),
            _ => self.look_on_archive(state, client, key, Purpose::FaultIn),
        }
    }

    /// The fast tier did not have the key just now, or in a snapshot opened now: what the archive
    /// has counts once it reflects that moment.
    fn look_on_archive(&self, state: &mut State, client: usize, key: Key, purpose: Purpose) {
        let barrier = match purpose {
            Purpose::Read => Rule::ReadBarrier,
            Purpose::ProofOfAbsence => Rule::ProofBarrier,
            Purpose::FaultIn => Rule::FaultInBarrier,
        };
        let own = &mut state.clients[client];
        own.at = state.fast.log.len;
        own.phase = Phase::Barrier(purpose);
        if !self.follows(barrier) {
            self.read_archive(state, client, key, purpose);
        }
    }

    pub fn go_on(&self, state: &mut State, client: usize) {
        let own = state.clients[client];
        let daemon = self.clients[client].daemon;
        let operation = self.operation(client, &own);
        let Some(key) = operation.key() else { return self.go_on_range(state, client) };
        match own.phase {
            Phase::Idle | Phase::Covered(_) => {}
            Phase::Barrier(purpose) | Phase::Ingested(purpose) => {
                let feeder = state.feeder(daemon);
                let look = match own.phase {
                    Phase::Barrier(_) => self.first_half(feeder, only(key), own.at),
                    _ => self.second_half(feeder, own.incarnation, only(key), own.at),
                };
                match look {
                    Look::Wait => {}
                    Look::Half => {
                        let incarnation = feeder.incarnation;
                        let own = &mut state.clients[client];
                        own.incarnation = incarnation;
                        own.phase = Phase::Ingested(purpose);
                    }
                    Look::Again => state.clients[client].phase = Phase::Barrier(purpose),
                    Look::Passed => self.read_archive(state, client, key, purpose),
                }
            }
            Phase::RangeBarrier => {
                if self.range_barrier(state.feeder(daemon), own.at) == Look::Passed {
                    self.answer(state, client, state.archive.documents[key]);
                }
            }
            Phase::Copied => {
                // The snapshot that should have been open all along.
                state.clients[client].at = state.now();
                let on_fast = state.fast.documents[key] != NONE;
                state.clients[client].phase = if on_fast { Phase::Command } else { Phase::FaultIn };
            }
            Phase::FaultIn => self.commit_fault_in(state, client, key),
            Phase::Command => {
                let leads = usize::from(state.fast.leader) == daemon;
                if operation.proves() && !leads && self.follows(Rule::LeaderCommands) {
                    // Refused: what was proved is not kept true for this daemon any more.
                    return self.end(state, client);
                }
                self.command(state, client);
            }
        }
    }

    fn read_archive(&self, state: &mut State, client: usize, key: Key, purpose: Purpose) {
        let copy = state.archive.documents[key];
        match (purpose, copy) {
            (Purpose::Read, _) => self.answer(state, client, copy),
            (Purpose::ProofOfAbsence, NONE) => state.clients[client].phase = Phase::Command,
            (Purpose::ProofOfAbsence, _) => self.open_fault_in(state, client, key),
            (Purpose::FaultIn, NONE) => {
                if self.operation(client, &state.clients[client]).proves() {
                    state.clients[client].phase = Phase::Command;
                } else {
                    // On neither tier: nothing matches.
                    self.answer(state, client, NONE);
                }
            }
            (Purpose::FaultIn, _) => {
                let own = &mut state.clients[client];
                own.copy = copy;
                let in_order = self.follows(Rule::SnapshotFirst);
                own.phase = if in_order { Phase::FaultIn } else { Phase::Copied };
            }
        }
    }

    /// Opens the snapshot of a fault-in, by way of the anchor.
    fn open_fault_in(&self, state: &mut State, client: usize, key: Key) {
        if state.fast.documents[key] != NONE {
            // The insert would say so (11000).
            state.clients[client].phase = Phase::Command;
        } else {
            self.look_on_archive(state, client, key, Purpose::FaultIn);
        }
    }

    fn commit_fault_in(&self, state: &mut State, client: usize, key: Key) {
        let own = state.clients[client];
        let transaction = self.follows(Rule::FaultInTransaction);
        if transaction && state.changed_since(key, own.at) {
            // 112: from the beginning.
            return self.open_fault_in(state, client, key);
        }
        if state.fast.documents[key] == NONE {
            state.moved(key, own.copy);
        }
        state.clients[client].phase = Phase::Command;
    }

    /// The client's own command on the fast tier.
    fn command(&self, state: &mut State, client: usize) {
        let operation = self.operation(client, &state.clients[client]);
        let Some(key) = operation.key() else { return };
        let on_fast = state.fast.documents[key] != NONE;
        match operation {
            // 11000
            Operation::Insert(..) | Operation::InsertFresh(..) if on_fast => {
                self.end(state, client);
            }
            Operation::Insert(_, document)
            | Operation::InsertFresh(_, document)
            | Operation::Upsert(_, document) => {
                if !on_fast && state.truth[key] != NONE {
                    state.broken = Broken::DoubleInsert;
                }
                self.write(state, client, key, document);
            }
            Operation::Update(_, document) if on_fast => self.write(state, client, key, document),
            Operation::Delete(_) if on_fast => self.write(state, client, key, NONE),
            // It has gone again.
            _ => self.open_fault_in(state, client, key),
        }
    }

    /// A client's change takes effect.
    fn write(&self, state: &mut State, client: usize, key: Key, document: Document) {
        state.changed(key, document);
        self.end(state, client);
        for other in 0..CLIENTS {
            let phase = state.clients[other].phase;
            if phase == Phase::Idle {
                continue;
            }
            if self.operation(other, &state.clients[other]).key() == Some(key) {
                state.clients[other].seen |= 1 << document;
            }
        }
    }

    /// An answer is true if the key was in that state at some moment of the operation.
    fn answer(&self, state: &mut State, client: usize, document: Document) {
        if state.clients[client].seen & 1 << document == 0 {
            state.broken = Broken::Read;
        }
        self.end(state, client);
    }

    fn end(&self, state: &mut State, client: usize) {
        let done = state.clients[client].done + 1;
        state.clients[client] = Client { done, ..Client::default() };
    }

    fn begin_range(&self, state: &mut State, client: usize) {
        let daemon = self.clients[client].daemon;
        let complete_from = state.daemons[daemon].boundary.complete_from;
        if complete_from == NOTHING {
            return self.end(state, client);
        }
        state.clients[client].hold = complete_from;
        state.clients[client].phase = Phase::Covered(0);
        self.go_on_range(state, client);
    }

    /// The next document of a covered read. It may be a batch of a cursor: each is answered at once.
    fn go_on_range(&self, state: &mut State, client: usize) {
        let Phase::Covered(read) = state.clients[client].phase else { return };
        let leads = usize::from(state.fast.leader) == self.clients[client].daemon;
        if !leads && self.follows(Rule::LeaderAnswers) {
            return self.end(state, client);
        }
        let key = usize::from(read);
        let from = state.clients[client].hold;
        let in_range = |document| if self.is_from(document, from) { document } else { NONE };
        if in_range(state.fast.documents[key]) != in_range(state.truth[key]) {
            state.broken = Broken::Range;
        }
        if key + 1 < self.keys {
            state.clients[client].phase = Phase::Covered(read + 1);
        } else {
            self.end(state, client);
        }
    }

    /// Whether a covered read through this daemon relies on a boundary below that.
    pub fn is_held_below(&self, state: &State, daemon: usize, complete_from: u8) -> bool {
        for client in 0..self.clients.len() {
            let own = &state.clients[client];
            if self.clients[client].daemon == daemon
                && matches!(own.phase, Phase::Covered(_))
                && own.hold < complete_from
            {
                return true;
            }
        }
        false
    }

    /// Residency, as this daemon's evictor knows it.
    pub fn is_resident(&self, state: &State, daemon: usize, key: Key) -> bool {
        let mut changed_lately = false;
        let mut pinned = false;
        for client in 0..self.clients.len() {
            let own = &state.clients[client];
            let script = &self.clients[client];
            // As long as an `_id` is fresh, its document's first change is not long ago.
            let rest = &script.operations[usize::from(own.done)..];
            changed_lately |= rest.iter().flatten().any(
                |operation| matches!(operation, Operation::InsertFresh(fresh, _) if *fresh == key),
            );
            if own.phase != Phase::Idle {
                let operation = self.operation(client, own);
                let by_this = script.daemon == daemon;
                pinned |= operation.proves() && operation.key() == Some(key) && by_this;
            }
        }
        changed_lately &= state.recent[key] && self.follows(Rule::Residency);
        changed_lately || (pinned && self.follows(Rule::Pin))
    }
}
