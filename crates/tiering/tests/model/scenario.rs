//! What a run of the model begins with and how much may happen in it: the clients' operations,
//! which daemons there are, how often things are moved and go wrong.

use crate::rules::Rule;
use crate::state::{
    Archive, Boundary, CLIENTS, Client, Daemon, Date, Document, Fast, Feeder, KEYS, Key, Published,
    Stage, State, number,
};

/// A client's operation on the tiered collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read(Key),
    /// A read that only the archive can answer, behind a range barrier; looked at for one key.
    Scan(Key),
    Insert(Key, Document),
    /// An insert under an `_id` made just now (a fresh ObjectId), which needs no proof of absence.
    InsertFresh(Key, Document),
    Update(Key, Document),
    Upsert(Key, Document),
    Delete(Key),
    /// Everything from the boundary on, key after key, under the boundary it began with.
    Range,
}

impl Operation {
    /// The key it is about; a range read is about all.
    pub fn key(self) -> Option<Key> {
        match self {
            Self::Read(key)
            | Self::Scan(key)
            | Self::Insert(key, _)
            | Self::InsertFresh(key, _)
            | Self::Update(key, _)
            | Self::Upsert(key, _)
            | Self::Delete(key) => Some(key),
            Self::Range => None,
        }
    }

    /// Whether it may create the document, so that its absence must be proved.
    pub fn proves(self) -> bool {
        matches!(self, Self::Insert(..) | Self::Upsert(..))
    }
}

/// One client: operations one after another, each one of some alternatives.
pub struct Script {
    /// The daemon it is connected to.
    pub daemon: usize,
    pub operations: Vec<Vec<Operation>>,
}

/// A client of the first daemon that does exactly this.
pub fn client(operations: &[Operation]) -> Script {
    Script { daemon: 0, operations: operations.iter().map(|only| vec![*only]).collect() }
}

/// A client that does so many of these, in any order.
pub fn any(times: usize, operations: &[Operation]) -> Script {
    Script { daemon: 0, operations: vec![operations.to_vec(); times] }
}

impl Script {
    /// The same through the second daemon.
    pub fn of_second(self) -> Self {
        Self { daemon: 1, ..self }
    }
}

pub struct Scenario {
    pub name: &'static str,
    pub keys: usize,
    /// The dates of documents 1, 2, ...
    pub dates: [Date; 8],
    /// What the tiers hold. Where both hold a document it is the same.
    pub fast: [Document; KEYS],
    pub archive: [Document; KEYS],
    pub complete_from: Date,
    pub clients: Vec<Script>,
    /// How many moves evictors open, and below which dates they evict.
    pub evictions: u8,
    pub horizons: Vec<Date>,
    /// How many moves warmers begin, and where they lower the boundary to.
    pub warms: u8,
    pub targets: Vec<Date>,
    /// How often a feeder ends and begins anew.
    pub crashes: u8,
    /// How often a write's outcome stays unknown.
    pub timeouts: u8,
    /// Whether a second daemon takes over while the first goes on.
    pub takeover: bool,
    /// Whether flush reads may be answered from the past (a new primary's majority snapshot).
    pub old_reads: bool,
    /// Whether the very first feeder is still to start.
    pub first_start: bool,
    /// The rules that are not followed.
    pub without: Vec<Rule>,
}

impl Scenario {
    /// Two keys of which the first exists, on both tiers; nothing happens.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            keys: 2,
            dates: [0; 8],
            fast: [1, 0],
            archive: [1, 0],
            complete_from: 1,
            clients: Vec::new(),
            evictions: 0,
            horizons: vec![1],
            warms: 0,
            targets: vec![0],
            crashes: 0,
            timeouts: 0,
            takeover: false,
            old_reads: false,
            first_start: false,
            without: Vec::new(),
        }
    }

    pub fn without(self, rules: &[Rule]) -> Self {
        Self { without: rules.to_vec(), ..self }
    }

    /// Whether a rule is followed.
    pub fn follows(&self, rule: Rule) -> bool {
        !self.without.contains(&rule)
    }

    pub fn date(&self, document: Document) -> Date {
        self.dates[usize::from(document) - 1]
    }

    /// Whether a document exists and is as new as that.
    pub fn is_from(&self, document: Document, from: Date) -> bool {
        document != 0 && self.date(document) >= from
    }

    /// Whether a document exists and is older than that.
    pub fn is_before(&self, document: Document, horizon: Date) -> bool {
        document != 0 && self.date(document) < horizon
    }

    pub fn operation(&self, client: usize, state: &Client) -> Operation {
        self.clients[client].operations[usize::from(state.done)][usize::from(state.choice)]
    }

    pub fn begin(&self) -> State {
        let mut truth = self.fast;
        for key in 0..KEYS {
            if truth[key] == 0 {
                truth[key] = self.archive[key];
            }
        }
        let boundary =
            Boundary { complete_from: self.complete_from, raise_epoch: 1, ..Boundary::default() };
        let published = Published { complete_from: self.complete_from, raise_epoch: 1 };
        let started = !self.first_start;
        let feeder = if started {
            Feeder { stage: Stage::Running, epoch: 1, incarnation: 1, ..Feeder::default() }
        } else {
            Feeder::default()
        };
        let first = Daemon { feeder, boundary: published, ..Daemon::default() };
        State {
            fast: Fast {
                documents: self.fast,
                before: self.fast,
                boundary,
                epoch: u8::from(started),
                ..Fast::default()
            },
            archive: Archive {
                documents: self.archive,
                lanes: [number(u8::from(started), 0); KEYS],
                mark: started.then_some(0),
                ..Archive::default()
            },
            daemons: [first, Daemon::default()],
            clients: [Client::default(); CLIENTS],
            truth,
            recent: [false; KEYS],
            broken: Default::default(),
            crashes: self.crashes,
            timeouts: self.timeouts,
            evictions: self.evictions,
            warms: self.warms,
            takeovers: u8::from(self.takeover),
        }
    }
}
