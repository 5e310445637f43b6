//! What the model remembers: both tiers, the archive's lanes, two daemons with feeder, evictor and
//! warmer, clients in the middle of an operation, and what is really true of each document.
//! How one state follows another is in the other modules.

use std::hash::{Hash, Hasher};

/// A document's key. There are at most two.
pub type Key = usize;
pub const KEYS: usize = 2;

/// A document, by its number in the scenario's table of dates; 0 is none.
pub type Document = u8;
pub const NONE: Document = 0;

/// A position in the fast tier's history: everything before it has happened. The model's cluster time.
pub type Time = u8;

/// A date, or a boundary between dates: documents have 0 (old) or 1 (new); 2 lies after both.
pub type Date = u8;
/// A boundary that covers nothing.
pub const NOTHING: Date = 2;

pub const CLIENTS: usize = 3;
pub const LATE: usize = 3;
pub const LOG: usize = 20;

/// One change on the fast tier, as the change stream tells it: the state it left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Event {
    pub key: u8,
    pub document: Document,
    pub is_move: bool,
}

/// The fast tier's history, from the oldest position that anybody may still ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Log {
    pub len: u8,
    pub events: [Event; LOG],
}

/// The stored boundary of the collection (a document on the fast tier).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Boundary {
    pub complete_from: Date,
    pub raise_epoch: u8,
    /// The daemon that may raise it and move under it.
    pub owner: u8,
    /// Everything ever evicted was older than this.
    pub evicted_to: Date,
    pub evictions: u8,
    /// Rises with every write: a transaction that writes the document conflicts with any other.
    pub writes: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fast {
    pub documents: [Document; KEYS],
    /// The documents as of the beginning of the log.
    pub before: [Document; KEYS],
    pub log: Log,
    pub boundary: Boundary,
    /// The lease: the epoch given out last, and who leads.
    pub epoch: u8,
    pub leader: u8,
}

/// A number of a lane: the feeder's epoch, then the sequence within it.
pub type Number = u8;

pub const fn number(epoch: u8, sequence: u8) -> Number {
    epoch * 16 + sequence
}

/// A write to the archive whose sender no longer waits for it. It may land at any time, or never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LateWrite {
    pub on_its_way: bool,
    pub key: u8,
    pub document: Document,
    pub number: Number,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Archive {
    pub documents: [Document; KEYS],
    /// One lane a key: the highest number it has seen.
    pub lanes: [Number; KEYS],
    /// The persisted position: everything before it is on the archive. `None` before the first.
    pub mark: Option<Time>,
    pub late: [LateWrite; LATE],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Change {
    #[default]
    Upsert,
    Delete,
}

/// A flush under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Flight {
    #[default]
    None,
    /// The fast tier did not have the key at `read_at`; what that means is not known yet.
    Absent { read_at: Time },
    /// The archive has been sent this state.
    Sent { document: Document, number: Number },
}

/// A key of the pending set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Entry {
    pub pending: bool,
    pub last: Change,
    pub oldest: Time,
    pub dirty: Option<Time>,
    pub flight: Flight,
    /// Only without rule 7: the last write's outcome is unknown, so its number is used again.
    pub same_number: bool,
}

/// Where a feeder stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stage {
    #[default]
    Down,
    /// It has an epoch, the lanes are still open to others.
    Epoch,
    Closed,
    Running,
    Superseded,
}

/// Feeder and pending set. What barriers look at stays as it is until an incarnation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Feeder {
    pub stage: Stage,
    /// The epoch of the flushes under way.
    pub epoch: u8,
    pub next_epoch: u8,
    pub incarnation: u8,
    pub ingested: Time,
    /// The published `applied`.
    pub applied: Time,
    /// Flush reads are no older than this.
    pub no_older_than: Time,
    pub pending: [Entry; KEYS],
    /// Only without tickets: the end of an earlier incarnation's flush is still to be heard of.
    pub stray: [bool; KEYS],
}

/// The boundary as a daemon knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Published {
    pub complete_from: Date,
    pub raise_epoch: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MovePhase {
    #[default]
    Idle,
    /// Evictor: the boundary is high enough; old holders are looked for next.
    Raised,
    /// Between two moves of a round. Warmer: the archive has named the keys.
    Ready,
    /// The snapshot is open; its barrier is waited for.
    Barrier,
    /// The barrier's first half has passed: the snapshot's events are ingested.
    Ingested,
    /// Everything is proved, nothing is committed.
    Proved,
    /// Warmer: committed, not yet published.
    Committed,
}

/// Evictor or warmer, and its move transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mover {
    pub phase: MovePhase,
    /// Evictor: its horizon. Warmer: where the boundary is to be.
    pub to: Date,
    /// The raise epoch its work began under, and the evictions until then.
    pub raise_epoch: u8,
    pub evictions: u8,
    /// Warmer: the keys that the archive named.
    pub listed: [bool; KEYS],
    /// Keys of the move.
    pub keys: [bool; KEYS],
    /// What it moves.
    pub documents: [Document; KEYS],
    pub snapshot: Time,
    /// The boundary document at the snapshot, and whether it forbids the move.
    pub boundary_writes: u8,
    pub forbidden: bool,
    pub incarnation: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Daemon {
    pub feeder: Feeder,
    pub boundary: Published,
    pub evictor: Mover,
    pub warmer: Mover,
}

/// What a barrier is passed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Purpose {
    #[default]
    Read,
    ProofOfAbsence,
    FaultIn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    #[default]
    Idle,
    Barrier(Purpose),
    RangeBarrier,
    /// The barrier's first half has passed.
    Ingested(Purpose),
    /// Only without rule 18's order: the archive's copy is here, the snapshot is not open yet.
    Copied,
    /// The archive's copy is in the move's transaction, uncommitted.
    FaultIn,
    /// The command is to be sent to the fast tier (again).
    Command,
    /// A covered read has read this many keys.
    Covered(u8),
}

/// A client, and its operation under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Client {
    /// Operations done.
    pub done: u8,
    /// Which of the alternatives the scenario gives for this operation.
    pub choice: u8,
    pub phase: Phase,
    /// The time of the answer or the snapshot that a barrier is passed for.
    pub at: Time,
    pub incarnation: u8,
    /// The archive's copy.
    pub copy: Document,
    /// Every state the key has been in since the operation began, a bit each.
    pub seen: u8,
    /// The boundary that a covered read relies on.
    pub hold: Date,
}

/// A promise broken on the way here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Broken {
    #[default]
    Nothing,
    Read,
    Range,
    DoubleInsert,
    Comparison,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    pub fast: Fast,
    pub archive: Archive,
    pub daemons: [Daemon; 2],
    pub clients: [Client; CLIENTS],
    /// The documents as clients have left them, in the fast tier's order of changes.
    pub truth: [Document; KEYS],
    /// Whether a client has changed the key lately, which is: since the run began.
    pub recent: [bool; KEYS],
    pub broken: Broken,
    pub crashes: u8,
    pub timeouts: u8,
    pub evictions: u8,
    pub warms: u8,
    pub takeovers: u8,
}

impl Log {
    pub fn events(&self) -> &[Event] {
        &self.events[..usize::from(self.len)]
    }
}

impl State {
    /// The fast tier's time.
    pub fn now(&self) -> Time {
        self.fast.log.len
    }

    /// Whether a key changed at or after a time, by whomever.
    pub fn changed_since(&self, key: Key, at: Time) -> bool {
        let events = self.fast.log.events();
        let mut place = usize::from(at);
        while place < events.len() {
            if usize::from(events[place].key) == key {
                return true;
            }
            place += 1;
        }
        false
    }

    /// The fast tier's document as of a time.
    pub fn as_of(&self, key: Key, at: Time) -> Document {
        let events = self.fast.log.events();
        let mut place = usize::from(at);
        while place > 0 {
            place -= 1;
            if usize::from(events[place].key) == key {
                return events[place].document;
            }
        }
        self.fast.before[key]
    }

    fn log(&mut self, key: Key, document: Document, is_move: bool) {
        let log = &mut self.fast.log;
        let place = usize::from(log.len);
        assert!(place < LOG, "the scenario changes more than the log holds");
        log.events[place] = Event { key: key as u8, document, is_move };
        log.len += 1;
        self.fast.documents[key] = document;
    }

    /// A move puts a document on the fast tier or takes it away.
    pub fn moved(&mut self, key: Key, document: Document) {
        self.log(key, document, true);
    }

    /// A client's change of a key.
    pub fn changed(&mut self, key: Key, document: Document) {
        self.log(key, document, false);
        self.truth[key] = document;
        self.recent[key] = true;
    }

    /// Forgets the beginning of the log, which nobody can ask for any more, so that states that
    /// differ only in it are one.
    pub fn forget(&mut self) {
        let mut first = self.fast.log.len;
        if let Some(mark) = self.archive.mark {
            first = first.min(mark);
        } else {
            return;
        }
        for daemon in &self.daemons {
            let feeder = &daemon.feeder;
            if feeder.epoch > 0 {
                first = first.min(feeder.ingested).min(feeder.applied);
            }
            for entry in &feeder.pending {
                if entry.pending {
                    first = first.min(entry.oldest);
                    if let Flight::Absent { read_at } = entry.flight {
                        first = first.min(read_at);
                    }
                }
            }
            for mover in [&daemon.evictor, &daemon.warmer] {
                if matches!(
                    mover.phase,
                    MovePhase::Barrier | MovePhase::Ingested | MovePhase::Proved
                ) {
                    first = first.min(mover.snapshot);
                }
            }
        }
        for client in &self.clients {
            if client.phase != Phase::Idle {
                first = first.min(client.at);
            }
        }
        if first == 0 {
            return;
        }
        for key in 0..KEYS {
            self.fast.before[key] = self.as_of(key, first);
        }
        let log = &mut self.fast.log;
        let (len, gone) = (usize::from(log.len), usize::from(first));
        for place in 0..len - gone {
            log.events[place] = log.events[place + gone];
        }
        for place in len - gone..len {
            log.events[place] = Event::default();
        }
        log.len -= first;
        let back = |time: &mut Time| *time = time.saturating_sub(first);
        if let Some(mark) = &mut self.archive.mark {
            back(mark);
        }
        for daemon in &mut self.daemons {
            let feeder = &mut daemon.feeder;
            back(&mut feeder.ingested);
            back(&mut feeder.applied);
            back(&mut feeder.no_older_than);
            for entry in &mut feeder.pending {
                back(&mut entry.oldest);
                if let Some(dirty) = &mut entry.dirty {
                    back(dirty);
                }
                if let Flight::Absent { read_at } = &mut entry.flight {
                    back(read_at);
                }
            }
            back(&mut daemon.evictor.snapshot);
            back(&mut daemon.warmer.snapshot);
        }
        for client in &mut self.clients {
            back(&mut client.at);
        }
    }
}

/// The state in as few bytes as is convenient: hashing them is most of the work in a debug build.
struct Bytes {
    bytes: [u8; 192],
    len: usize,
}

impl Bytes {
    fn put(&mut self, byte: u8) {
        self.bytes[self.len] = byte;
        self.len += 1;
    }

    fn pair(&mut self, high: u8, low: u8) {
        self.put(high << 4 | low);
    }

    fn option(&mut self, time: Option<Time>) {
        self.put(time.map_or(u8::MAX, |time| time));
    }
}

impl Feeder {
    fn put(&self, into: &mut Bytes) {
        into.pair(self.stage as u8, self.epoch);
        into.pair(self.next_epoch, self.incarnation);
        into.put(self.ingested);
        into.put(self.applied);
        into.put(self.no_older_than);
        for (entry, stray) in self.pending.iter().zip(self.stray) {
            let flags = u8::from(entry.pending)
                | u8::from(entry.same_number) << 1
                | u8::from(stray) << 2
                | (entry.last as u8) << 3;
            into.put(flags);
            if entry.pending {
                into.put(entry.oldest);
                into.option(entry.dirty);
                match entry.flight {
                    Flight::None => into.put(u8::MAX),
                    Flight::Absent { read_at } => into.put(128 | read_at),
                    Flight::Sent { document, number } => {
                        into.put(document);
                        into.put(number);
                    }
                }
            }
        }
    }
}

impl Mover {
    fn put(&self, into: &mut Bytes) {
        into.pair(self.phase as u8, self.to);
        if self.phase != MovePhase::Idle {
            let bits = |keys: [bool; KEYS]| u8::from(keys[0]) | u8::from(keys[1]) << 1;
            into.pair(self.raise_epoch, self.evictions);
            into.pair(bits(self.keys), bits(self.listed) << 1 | u8::from(self.forbidden));
            into.pair(self.documents[0], self.documents[1]);
            into.put(self.snapshot);
            into.pair(self.boundary_writes, self.incarnation);
        }
    }
}

impl Client {
    fn put(&self, into: &mut Bytes) {
        into.pair(self.done, self.choice);
        let (phase, detail) = match self.phase {
            Phase::Idle => (0, 0),
            Phase::Barrier(purpose) => (1, purpose as u8),
            Phase::Ingested(purpose) => (2, purpose as u8),
            Phase::Copied => (3, 0),
            Phase::FaultIn => (4, 0),
            Phase::Command => (5, 0),
            Phase::Covered(read) => (6, read),
            Phase::RangeBarrier => (7, 0),
        };
        into.pair(phase, detail);
        if self.phase != Phase::Idle {
            into.put(self.at);
            into.pair(self.incarnation, self.copy);
            into.put(self.seen);
            into.put(self.hold);
        }
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mut into = Bytes { bytes: [0; 192], len: 0 };
        into.pair(self.fast.documents[0], self.fast.documents[1]);
        into.pair(self.fast.before[0], self.fast.before[1]);
        into.put(self.fast.log.len);
        for event in self.fast.log.events() {
            into.put(event.key << 7 | u8::from(event.is_move) << 6 | event.document);
        }
        let boundary = &self.fast.boundary;
        into.pair(boundary.complete_from, boundary.raise_epoch);
        into.pair(boundary.evicted_to << 2 | boundary.owner, boundary.writes);
        into.put(boundary.evictions);
        into.pair(self.fast.epoch, self.fast.leader);
        into.pair(self.archive.documents[0], self.archive.documents[1]);
        into.put(self.archive.lanes[0]);
        into.put(self.archive.lanes[1]);
        into.option(self.archive.mark);
        for late in &self.archive.late {
            if late.on_its_way {
                into.pair(8 | late.key, late.document);
                into.put(late.number);
            }
        }
        into.put(0);
        for daemon in &self.daemons {
            if daemon.feeder == Feeder::default() {
                into.put(u8::MAX);
            } else {
                daemon.feeder.put(&mut into);
            }
            into.pair(daemon.boundary.complete_from, daemon.boundary.raise_epoch);
            daemon.evictor.put(&mut into);
            daemon.warmer.put(&mut into);
        }
        for client in &self.clients {
            client.put(&mut into);
        }
        into.pair(self.truth[0], self.truth[1]);
        into.put(u8::from(self.recent[0]) | u8::from(self.recent[1]) << 1);
        into.pair(self.broken as u8, self.crashes);
        into.pair(self.timeouts, self.evictions);
        into.pair(self.warms, self.takeovers);
        hasher.write(&into.bytes[..into.len]);
    }
}
