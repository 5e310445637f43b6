//! The feeder's steps: ingest, flush, what comes of it on the archive, position, restart.

use crate::rules::Rule;
use crate::scenario::Scenario;
use crate::state::{
    Change, Entry, Feeder, Flight, KEYS, Key, LATE, LateWrite, NONE, Number, Published, Stage,
    State, Time, number,
};

/// What a feeder, or the network behind it, does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeederStep {
    /// Takes one event in.
    Ingest,
    /// Takes a key off the pending set and reads it on the fast tier as of this time.
    Flush {
        key: Key,
        read_at: Time,
    },
    /// Judges that the key was absent.
    JudgeAbsence {
        key: Key,
    },
    /// The archive executes, or refuses, the key's write, and the feeder hears of it.
    Land {
        key: Key,
    },
    /// The feeder no longer waits for the key's write.
    GiveUp {
        key: Key,
    },
    Persist,
    /// The incarnation ends.
    Crash,
    TakeEpoch,
    CloseLanes,
    BeginIncarnation,
    /// The end of an earlier incarnation's flush is heard of.
    HearStray {
        key: Key,
    },
}

impl Entry {
    fn ingest(&mut self, change: Change, at: Time) {
        self.last = change;
        if !self.pending {
            *self = Self { pending: true, last: change, oldest: at, ..Self::default() };
        } else if self.flight != Flight::None && self.dirty.is_none() {
            self.dirty = Some(at);
        }
    }

    /// Back into the queue, nothing being known to have been written.
    fn retry(&mut self) {
        self.flight = Flight::None;
        self.dirty = None;
    }
}

impl Feeder {
    /// What is applied: everything before it is on the archive.
    fn applied_now(&self) -> Time {
        let mut applied = self.ingested;
        for entry in &self.pending {
            if entry.pending && entry.oldest < applied {
                applied = entry.oldest;
            }
        }
        applied
    }

    fn publish_applied(&mut self) {
        if self.stage == Stage::Running {
            self.applied = self.applied.max(self.applied_now());
        }
    }
}

impl Scenario {
    pub fn feeder_steps(&self, state: &State, daemon: usize, mut can: impl FnMut(FeederStep)) {
        let feeder = state.feeder(daemon);
        let leads = usize::from(state.fast.leader) == daemon;
        let running = feeder.stage == Stage::Running;
        if running {
            if feeder.ingested < state.now() {
                can(FeederStep::Ingest);
            }
            let applied = self.position(feeder);
            let restarts = state.crashes > 0 || state.takeovers > 0;
            if restarts && state.archive.mark.is_none_or(|mark| mark < applied) {
                can(FeederStep::Persist);
            }
            if state.crashes > 0 && leads {
                can(FeederStep::Crash);
            }
        }
        match feeder.stage {
            Stage::Down if leads => can(FeederStep::TakeEpoch),
            Stage::Epoch if self.follows(Rule::LanesClosedFirst) => can(FeederStep::CloseLanes),
            Stage::Epoch | Stage::Closed => can(FeederStep::BeginIncarnation),
            _ => {}
        }
        for key in 0..self.keys {
            let entry = &feeder.pending[key];
            if !entry.pending {
                continue;
            }
            match entry.flight {
                Flight::None if running => self.flushes(state, feeder, key, &mut can),
                Flight::None => {}
                Flight::Absent { read_at } => {
                    let known = feeder.ingested >= read_at || !self.follows(Rule::AbsenceWaits);
                    if running && known {
                        can(FeederStep::JudgeAbsence { key });
                    }
                }
                Flight::Sent { .. } => {
                    can(FeederStep::Land { key });
                    if state.timeouts > 0 && running {
                        can(FeederStep::GiveUp { key });
                    }
                }
            }
            if feeder.stray[key] && running {
                can(FeederStep::HearStray { key });
            }
        }
    }

    /// A flush of the key, once for every answer that the fast tier may give.
    fn flushes(&self, state: &State, feeder: &Feeder, key: Key, can: &mut impl FnMut(FeederStep)) {
        let now = state.now();
        let earliest = match (self.old_reads, self.follows(Rule::ReadsNotOlder)) {
            (false, _) => now,
            (true, true) => feeder.no_older_than.max(feeder.ingested),
            (true, false) => 0,
        };
        let mut offered = [false; 16];
        let mut read_at = now;
        loop {
            let document = state.as_of(key, read_at);
            // Of a document, when it was read makes no difference.
            if document == NONE || !offered[usize::from(document)] {
                offered[usize::from(document)] = true;
                can(FeederStep::Flush { key, read_at });
            }
            if read_at <= earliest {
                return;
            }
            read_at -= 1;
        }
    }

    fn position(&self, feeder: &Feeder) -> Time {
        if self.follows(Rule::PositionBehindApplied) {
            feeder.applied_now()
        } else {
            feeder.ingested
        }
    }

    pub fn feed(&self, state: &mut State, daemon: usize, step: FeederStep) {
        match step {
            FeederStep::Ingest => {
                let feeder = &mut state.daemons[daemon].feeder;
                let event = state.fast.log.events[usize::from(feeder.ingested)];
                if !event.is_move || !self.follows(Rule::MovesMarked) {
                    let change =
                        if event.document == NONE { Change::Delete } else { Change::Upsert };
                    feeder.pending[usize::from(event.key)].ingest(change, feeder.ingested);
                }
                feeder.ingested += 1;
                feeder.publish_applied();
            }
            FeederStep::Flush { key, read_at } => {
                let document = state.as_of(key, read_at);
                state.daemons[daemon].feeder.pending[key].dirty = None;
                if document == NONE {
                    let entry = &mut state.daemons[daemon].feeder.pending[key];
                    entry.flight = Flight::Absent { read_at };
                } else {
                    self.send(state, daemon, key, document);
                }
            }
            FeederStep::JudgeAbsence { key } => {
                let entry = &mut state.daemons[daemon].feeder.pending[key];
                if entry.dirty.is_some() {
                    entry.retry();
                } else if entry.last == Change::Delete || !self.follows(Rule::Evicted) {
                    self.send(state, daemon, key, NONE);
                } else {
                    self.flushed(state, daemon, key);
                }
            }
            FeederStep::Land { key } => self.land(state, daemon, key),
            FeederStep::GiveUp { key } => {
                state.timeouts -= 1;
                self.leave_behind(state, daemon, key);
                let entry = &mut state.daemons[daemon].feeder.pending[key];
                entry.retry();
                entry.same_number = !self.follows(Rule::HigherNumber);
            }
            FeederStep::Persist => {
                state.archive.mark = Some(self.position(state.feeder(daemon)));
            }
            FeederStep::Crash => {
                state.crashes -= 1;
                state.daemons[daemon].feeder.stage = Stage::Down;
            }
            FeederStep::TakeEpoch => {
                state.fast.epoch += 1;
                let feeder = &mut state.daemons[daemon].feeder;
                feeder.next_epoch = state.fast.epoch;
                feeder.stage = Stage::Epoch;
            }
            FeederStep::CloseLanes => self.close_lanes(state, daemon),
            FeederStep::BeginIncarnation => self.begin_incarnation(state, daemon),
            FeederStep::HearStray { key } => {
                let feeder = &mut state.daemons[daemon].feeder;
                feeder.stray[key] = false;
                if feeder.pending[key].flight != Flight::None {
                    self.leave_behind(state, daemon, key);
                    self.flushed(state, daemon, key);
                }
            }
        }
    }

    fn send(&self, state: &mut State, daemon: usize, key: Key, document: u8) {
        let feeder = &mut state.daemons[daemon].feeder;
        let epoch = feeder.epoch;
        let mut last = number(epoch, 0);
        let lane = state.archive.lanes[key];
        if lane / 16 == epoch {
            last = last.max(lane);
        }
        for late in &state.archive.late {
            if late.on_its_way && usize::from(late.key) == key && late.number / 16 == epoch {
                last = last.max(late.number);
            }
        }
        let entry = &mut feeder.pending[key];
        let number = if entry.same_number { last } else { last + 1 };
        entry.same_number = false;
        entry.flight = Flight::Sent { document, number };
    }

    /// The key's flush has ended: it leaves the pending set unless it changed meanwhile.
    fn flushed(&self, state: &mut State, daemon: usize, key: Key) {
        let feeder = &mut state.daemons[daemon].feeder;
        let entry = &mut feeder.pending[key];
        match entry.dirty.filter(|_| self.follows(Rule::Dirty)) {
            None => *entry = Entry::default(),
            Some(dirty) => {
                entry.retry();
                entry.oldest = dirty;
            }
        }
        feeder.publish_applied();
    }

    fn land(&self, state: &mut State, daemon: usize, key: Key) {
        let Flight::Sent { document, number } = state.feeder(daemon).pending[key].flight else {
            return;
        };
        if self.execute(state, key, document, number) {
            self.flushed(state, daemon, key);
            return;
        }
        let feeder = &mut state.daemons[daemon].feeder;
        feeder.pending[key].retry();
        if feeder.stage == Stage::Running {
            feeder.stage = Stage::Superseded;
        }
    }

    /// What the archive makes of a write on a lane; `false`: 225 `TransactionTooOld`.
    pub fn execute(&self, state: &mut State, key: Key, document: u8, number: Number) -> bool {
        let lane = &mut state.archive.lanes[key];
        if number < *lane && self.follows(Rule::LaneNumbers) {
            return false;
        }
        // The same number again is a retry: the record answers, nothing is executed.
        if number != *lane {
            state.archive.documents[key] = document;
            *lane = number.max(*lane);
        }
        self.tidy_lane(state, key);
        true
    }

    /// Late writes that would be refused are as good as gone; with none left, sequences begin anew.
    fn tidy_lane(&self, state: &mut State, key: Key) {
        if !self.follows(Rule::LaneNumbers) || !self.follows(Rule::HigherNumber) {
            return;
        }
        let lane = state.archive.lanes[key];
        let mut kept = 0;
        let mut busy = false;
        for place in 0..LATE {
            let late = state.archive.late[place];
            let mine = usize::from(late.key) == key;
            if !late.on_its_way || (mine && late.number < lane) {
                continue;
            }
            busy |= mine && late.number / 16 == lane / 16;
            state.archive.late[kept] = late;
            kept += 1;
        }
        for place in kept..LATE {
            state.archive.late[place] = LateWrite::default();
        }
        let sent = state.daemons.iter().any(|daemon| match daemon.feeder.pending[key].flight {
            Flight::Sent { number, .. } => number / 16 == lane / 16 && number > lane,
            _ => false,
        });
        if !busy && !sent {
            state.archive.lanes[key] = number(lane / 16, 0);
        }
    }

    /// A write whose outcome nobody waits for any more.
    fn leave_behind(&self, state: &mut State, daemon: usize, key: Key) {
        let Flight::Sent { document, number } = state.feeder(daemon).pending[key].flight else {
            return;
        };
        if number < state.archive.lanes[key] && self.follows(Rule::LaneNumbers) {
            return;
        }
        let late = LateWrite { on_its_way: true, key: key as u8, document, number };
        for place in &mut state.archive.late {
            if !place.on_its_way {
                *place = late;
                return;
            }
        }
        // More than the model holds: this one never lands, which may happen too.
    }

    fn close_lanes(&self, state: &mut State, daemon: usize) {
        let epoch = state.feeder(daemon).next_epoch;
        for key in 0..self.keys {
            if state.archive.lanes[key] / 16 > epoch {
                state.daemons[daemon].feeder.stage = Stage::Superseded;
                return;
            }
        }
        for key in 0..self.keys {
            if !self.follows(Rule::Ticket) {
                // The write lands in time; that it has is heard of in the next incarnation.
                let flight = state.feeder(daemon).pending[key].flight;
                if let Flight::Sent { document, number } = flight
                    && self.execute(state, key, document, number)
                {
                    let feeder = &mut state.daemons[daemon].feeder;
                    feeder.pending[key].flight = Flight::None;
                    feeder.stray[key] = true;
                }
            }
            state.archive.lanes[key] = number(epoch, 0);
            self.tidy_lane(state, key);
        }
        state.daemons[daemon].feeder.stage = Stage::Closed;
    }

    fn begin_incarnation(&self, state: &mut State, daemon: usize) {
        for key in 0..KEYS {
            self.leave_behind(state, daemon, key);
        }
        let now = state.now();
        let mark = *state.archive.mark.get_or_insert(now);
        let feeder = &mut state.daemons[daemon].feeder;
        feeder.stage = Stage::Running;
        feeder.epoch = feeder.next_epoch;
        feeder.next_epoch = 0;
        feeder.no_older_than = now;
        feeder.ingested = mark;
        feeder.incarnation += 1;
        feeder.pending = [Entry::default(); KEYS];
        feeder.publish_applied();
    }

    pub fn land_late(&self, state: &mut State, place: usize) {
        let late = std::mem::take(&mut state.archive.late[place]);
        // No gaps, so that the same set of writes is the same state.
        for next in place + 1..LATE {
            state.archive.late.swap(next - 1, next);
        }
        self.execute(state, usize::from(late.key), late.document, late.number);
    }

    /// The second daemon leads from now on; nothing tells the first.
    pub fn take_over(&self, state: &mut State) {
        state.takeovers -= 1;
        state.fast.leader = 1;
        if self.follows(Rule::LeaderMoves) {
            state.fast.boundary.owner = 1;
            state.fast.boundary.writes += 1;
        }
        let boundary = &state.fast.boundary;
        state.daemons[1].boundary =
            Published { complete_from: boundary.complete_from, raise_epoch: boundary.raise_epoch };
    }
}
