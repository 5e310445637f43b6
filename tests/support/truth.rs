//! What every document must be. Each document has one owner, a client that changes it by one
//! operation at a time and writes down here what the daemon has acknowledged; so at any moment it is
//! known what a document is, or, after an operation of unknown outcome, what it may be. Held against
//! both tiers here; how owners find an outcome out is in `owner.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::TryStreamExt;
use mongodb::Collection;
use mongodb::bson::oid::ObjectId;
use mongodb::bson::{Bson, DateTime, Document, RawDocument, RawDocumentBuf, doc};
use mongodb::options::ReadConcern;
use parking_lot::Mutex;

use super::deployment::Pair;

/// One document at one moment; `None`: it does not exist.
pub type State = Option<RawDocumentBuf>;

/// The number of a document, which it carries in its field `n`. Its `_id` is of some other form.
pub type Number = i64;

/// See the module's description.
#[derive(Default)]
pub struct Truth {
    entries: Mutex<BTreeMap<Number, Entry>>,
    violations: Mutex<Vec<String>>,
    /// Operations acknowledged.
    acknowledged: AtomicU64,
    stopping: AtomicBool,
}

struct Entry {
    id: Bson,
    owner: i32,
    /// What it may be; one state, unless an operation is under way or its outcome unknown.
    possible: Vec<State>,
    /// Grows when an operation on it begins and when it ends.
    version: u64,
}

impl Entry {
    fn certain(&self) -> Option<&State> {
        match self.possible.as_slice() {
            [only] => Some(only),
            _ => None,
        }
    }
}

/// A new document in the one shape that all have, so that its bytes follow from its values.
pub fn fresh_document(n: Number, id: &Bson, owner: i32, at: DateTime) -> RawDocumentBuf {
    let document = doc! {
        "_id": id, "n": n, "owner": owner, "at": at, "v": 0_i64, "note": "x".repeat((n % 200) as usize),
    };
    RawDocumentBuf::try_from(&document).unwrap()
}

/// A document with some of its values changed.
pub fn changed(document: &RawDocument, values: Document) -> RawDocumentBuf {
    let mut document = Document::try_from(document).unwrap();
    for (name, value) in values {
        assert!(document.insert(name, value).is_some(), "the shape stays");
    }
    RawDocumentBuf::try_from(&document).unwrap()
}

impl Truth {
    /// Writes a new document down that the caller puts into the archive itself.
    pub fn seed(
        &self,
        owner: i32,
        make: impl FnOnce(Number, &Bson) -> RawDocumentBuf,
    ) -> RawDocumentBuf {
        let n = self.new_number(owner);
        let document = make(n, &self.id(n));
        self.known(n, Some(document.clone()));
        document
    }

    /// A number, and an `_id`, for a document that does not exist yet.
    pub fn new_number(&self, owner: i32) -> Number {
        let mut entries = self.entries.lock();
        let n = entries.last_key_value().map_or(0, |(last, _)| last + 1);
        let id = match n % 4 {
            0 => Bson::Int64(n),
            1 => Bson::String(format!("order-{n}")),
            2 => Bson::Document(doc! { "region": n % 5, "n": n }),
            _ => Bson::ObjectId(ObjectId::new()),
        };
        entries.insert(n, Entry { id, owner, possible: vec![None], version: 0 });
        n
    }

    /// The `_id` of a document.
    pub fn id(&self, n: Number) -> Bson {
        self.entries.lock()[&n].id.clone()
    }

    /// Every document's number by its `_id`, as that prints.
    pub fn numbers(&self) -> BTreeMap<String, Number> {
        self.entries.lock().iter().map(|(n, entry)| (entry.id.to_string(), *n)).collect()
    }

    /// What a document is. Only its owner may ask, between operations.
    pub fn state(&self, n: Number) -> State {
        let entries = self.entries.lock();
        entries[&n].certain().expect("the owner has found out").clone()
    }

    /// The documents of an owner, those that exist and those that do not.
    pub fn of_owner(&self, owner: i32) -> BTreeMap<Number, State> {
        let entries = self.entries.lock();
        let mine = entries.iter().filter(|(_, entry)| entry.owner == owner);
        mine.map(|(n, entry)| (*n, entry.certain().expect("found out").clone())).collect()
    }

    /// An operation begins that will have led to `after`, or not.
    pub fn begin(&self, n: Number, after: &State) {
        let mut entries = self.entries.lock();
        let entry = entries.get_mut(&n).unwrap();
        entry.version += 1;
        entry.possible.push(after.clone());
    }

    /// What a document is now, for certain.
    pub fn known(&self, n: Number, state: State) {
        let mut entries = self.entries.lock();
        let entry = entries.get_mut(&n).unwrap();
        entry.version += 1;
        entry.possible = vec![state];
        self.acknowledged.fetch_add(1, Ordering::Relaxed);
    }

    /// What a document turned out to be after an unknown outcome.
    pub fn found_out(&self, n: Number, state: State) {
        let possible = self.entries.lock()[&n].possible.clone();
        if !possible.contains(&state) {
            self.violation(format!(
                "document {n} is {} and can only be one of {:?}",
                shown(&state),
                possible.iter().map(shown).collect::<Vec<_>>()
            ));
        }
        self.known(n, state);
    }

    /// A promise was broken.
    pub fn violation(&self, what: String) {
        println!("VIOLATION: {what}");
        self.violations.lock().push(what);
        self.stop();
    }

    /// Fails the test if a promise was broken.
    #[track_caller]
    pub fn assert_kept(&self) {
        let violations = self.violations.lock();
        assert!(violations.is_empty(), "{} violations: {violations:#?}", violations.len());
    }

    /// Operations acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Tells the owners to come to an end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether they were told.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Lets new owners begin.
    pub fn go_on(&self) {
        self.stopping.store(false, Ordering::Relaxed);
    }

    fn certainties(&self) -> BTreeMap<Number, (u64, State)> {
        let entries = self.entries.lock();
        let certain = entries.iter().filter_map(|(n, entry)| {
            entry.certain().map(|state| (*n, (entry.version, state.clone())))
        });
        certain.collect()
    }

    /// Looks past the daemon, at any moment: every document that nobody was changing must be on the
    /// fast tier, or else on the archive, as it was acknowledged; and one that was deleted must not
    /// be on the fast tier. In this order: a document may leave the fast tier when the archive has
    /// it. Returns how many documents were looked at.
    pub async fn audit(&self, pair: &Pair) -> usize {
        let before = self.certainties();
        let fast = Contents::read(&pair.on_fast()).await;
        let archive = Contents::read(&pair.on_archive()).await;
        let after = self.certainties();
        let mut looked_at = 0;
        for (n, (version, state)) in &before {
            if after.get(n).is_none_or(|(later, _)| later != version) {
                continue;
            }
            looked_at += 1;
            let found = fast.numbered.get(n);
            let found = if state.is_some() { found.or(archive.numbered.get(n)) } else { found };
            if found != state.as_ref() {
                self.violation(format!(
                    "document {n} should be {}; the fast tier has {}, the archive {}",
                    shown(state),
                    shown(&fast.numbered.get(n).cloned()),
                    shown(&archive.numbered.get(n).cloned())
                ));
            }
        }
        looked_at
    }

    /// When nothing is under way and the feeder has drained: the archive is exactly what was
    /// acknowledged, the fast tier's documents are the archive's, byte by byte, and those from the
    /// boundary on are all there. Returns the documents on each tier.
    pub async fn compare(&self, pair: &Pair) -> (usize, usize) {
        let fast = Contents::read(&pair.on_fast()).await;
        let archive = Contents::read(&pair.on_archive()).await;
        let boundary = pair.own_document(&pair.fast_client, "boundaries", super::deployment::NS);
        let boundary = boundary.await.and_then(|b| b.get_i64("complete_from").ok());
        for (n, entry) in self.entries.lock().iter() {
            let Some(state) = entry.certain() else {
                self.violation(format!("nobody has found out what document {n} is"));
                continue;
            };
            let (on_fast, on_archive) = (fast.numbered.get(n), archive.numbered.get(n));
            if on_archive != state.as_ref() {
                self.violation(format!(
                    "the archive has {} as document {n} ({}), not {}; the fast tier has {}",
                    shown(&on_archive.cloned()),
                    entry.id,
                    shown(state),
                    shown(&on_fast.cloned())
                ));
            }
            if on_fast.is_some() && on_fast != on_archive {
                self.violation(format!(
                    "the tiers differ in document {n}: {} and {}",
                    shown(&on_fast.cloned()),
                    shown(&on_archive.cloned())
                ));
            }
            let covered = state.as_ref().zip(boundary).is_some_and(|(document, from)| {
                document.get_datetime("at").unwrap().timestamp_millis() >= from
            });
            if covered && on_fast.is_none() {
                self.violation(format!(
                    "document {n} is above the boundary and not on the fast tier"
                ));
            }
        }
        for (tier, contents) in [("fast tier", &fast), ("archive", &archive)] {
            let known = self.entries.lock();
            let strange: Vec<_> =
                contents.numbered.keys().filter(|n| !known.contains_key(n)).collect();
            assert!(strange.is_empty(), "nobody made these on the {tier}: {strange:?}");
        }
        for (id, document) in &fast.others {
            if archive.others.get(id) != Some(document) {
                self.violation(format!("the tiers differ in {id}"));
            }
        }
        (fast.numbered.len(), archive.numbered.len())
    }
}

/// All documents of a tier, by number; those without one by `_id`.
pub struct Contents {
    pub numbered: BTreeMap<Number, RawDocumentBuf>,
    others: BTreeMap<String, RawDocumentBuf>,
}

impl Contents {
    /// Reads them at the primary.
    pub async fn read(collection: &Collection<RawDocumentBuf>) -> Contents {
        let all = collection.find(doc! {}).read_concern(ReadConcern::majority());
        let all: Vec<RawDocumentBuf> = all.await.unwrap().try_collect().await.unwrap();
        let mut contents = Contents { numbered: BTreeMap::new(), others: BTreeMap::new() };
        for document in all {
            // A scan meets a document twice when it went and came back meanwhile; the later counts.
            match document.get_i64("n") {
                Ok(n) => drop(contents.numbered.insert(n, document)),
                Err(_) => {
                    let id = format!("{:?}", document.get("_id").unwrap());
                    contents.others.insert(id, document);
                }
            }
        }
        contents
    }
}

/// A state in a line.
pub fn shown(state: &State) -> String {
    match state {
        None => "absent".to_owned(),
        Some(document) => {
            let at = document.get_datetime("at").map(|at| at.to_string()).unwrap_or_default();
            format!("v{} of {at}", document.get_i64("v").unwrap_or(-1))
        }
    }
}
