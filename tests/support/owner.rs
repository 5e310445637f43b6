//! Owners: clients that change documents nobody else changes, and check every answer against the
//! truth. An error makes an operation's outcome unknown; it is found out before the owner goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::{Bson, DateTime, Document, RawDocumentBuf, doc};
use mongodb::error::{Error, ErrorKind, WriteFailure};
use mongodb::options::ReturnDocument;
use mongodb::{Client, ClientSession, Collection};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tokio::task::JoinHandle;

use super::daemon::{Daemon, connection_string};
use super::deployment::{COLL, DB, date};
use super::truth::{Number, State, Truth, changed, fresh_document, shown};
use super::{PATIENCE, until};

/// What owners do, and what they accept.
#[derive(Debug, Clone, Copy)]
pub struct Habits {
    /// How many owners there are.
    pub owners: i32,
    /// Whether any error is a broken promise. Otherwise those are accepted that say a server could
    /// not be reached or changed its role.
    pub no_errors: bool,
    /// Whether writes over many documents are among the operations: a driver cannot repeat them, so
    /// after an error nobody could find out what they have done, or will do.
    pub writes_over_many: bool,
    /// How many of them do not wait for a daemon to come back: their drivers give up before they
    /// have repeated an operation, and it is theirs to find out what became of it.
    pub impatient: i32,
    /// Age up to which documents are taken for covered, in seconds: well inside the window.
    pub recent: f64,
    /// Documents a batch of a cursor has. A cursor that is still open is lost with its daemon.
    pub batch: u32,
    /// Pause between two operations of one owner.
    pub pause: Duration,
}

impl Habits {
    /// Nothing goes wrong, and nothing may.
    pub const UNDISTURBED: Habits = Habits {
        owners: 4,
        no_errors: true,
        writes_over_many: true,
        impatient: 0,
        recent: 600.0,
        batch: 30,
        pause: Duration::from_millis(2),
    };

    /// Servers, or the daemon, are lost and found.
    pub const THROUGH_FAULTS: Habits =
        Habits { no_errors: false, writes_over_many: false, ..Self::UNDISTURBED };
}

/// How long a driver looks for a daemon. A restarted one waits up to 3 s for its predecessor's lease.
const IMPATIENCE: Duration = Duration::from_millis(500);

/// Owners at work.
pub struct Traffic {
    truth: Arc<Truth>,
    tasks: Vec<JoinHandle<()>>,
    errors: Arc<Mutex<BTreeMap<String, usize>>>,
    done: Vec<Arc<Mutex<BTreeMap<&'static str, usize>>>>,
}

impl Traffic {
    /// Begins, with clients that know these daemons and outlive their restarts.
    pub async fn start(
        daemons: &[&Daemon],
        truth: &Arc<Truth>,
        habits: Habits,
        seed: u64,
    ) -> Traffic {
        truth.go_on();
        let errors = Arc::default();
        let mut traffic =
            Traffic { truth: truth.clone(), tasks: Vec::new(), errors, done: Vec::new() };
        for number in 0..habits.owners {
            let done = Arc::<Mutex<BTreeMap<&'static str, usize>>>::default();
            let patience = if number < habits.impatient { IMPATIENCE } else { PATIENCE };
            let uri = connection_string(daemons, patience);
            let owner = Owner::new(
                number,
                habits,
                Client::with_uri_str(uri).await.unwrap(),
                truth.clone(),
                StdRng::seed_from_u64(seed.wrapping_mul(1000).wrapping_add(number as u64)),
                Counts { errors: traffic.errors.clone(), done: done.clone() },
            );
            traffic.tasks.push(tokio::spawn(owner.await.work()));
            traffic.done.push(done);
        }
        traffic
    }

    /// Waits until every owner has completed so many more operations.
    pub async fn proceed(&self, operations: usize) {
        let total = |done: &Arc<Mutex<BTreeMap<_, usize>>>| done.lock().values().sum::<usize>();
        let goals: Vec<usize> = self.done.iter().map(|done| total(done) + operations).collect();
        until("every owner to get on", async || {
            self.truth.assert_kept();
            self.tasks.iter().for_each(|task| assert!(!task.is_finished(), "an owner has ended"));
            let there = self.done.iter().zip(&goals).all(|(done, goal)| total(done) >= *goal);
            there.then_some(())
        })
        .await;
    }

    /// Tells the owners to stop, and waits until each has found every outcome out.
    pub async fn stop(self) {
        self.truth.stop();
        for task in self.tasks {
            let ended = tokio::time::timeout(PATIENCE, task).await;
            ended.expect("an owner should come to its end").expect("an owner panicked");
        }
        self.truth.assert_kept();
        let mut done = BTreeMap::<&str, usize>::new();
        for of_one in self.done {
            for (operation, count) in of_one.lock().iter() {
                *done.entry(operation).or_default() += count;
            }
        }
        println!("operations: {done:?}\nerrors: {:?}", self.errors.lock());
    }
}

/// What the owners count: errors together, what is done each for itself.
struct Counts {
    errors: Arc<Mutex<BTreeMap<String, usize>>>,
    done: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

/// One client and its documents.
struct Owner {
    number: i32,
    habits: Habits,
    truth: Arc<Truth>,
    orders: Collection<RawDocumentBuf>,
    /// One for everything the owner does: the server takes its operations in order.
    session: ClientSession,
    random: StdRng,
    counts: Counts,
    /// Documents whose last operation ended in an error.
    unknown: Vec<Number>,
}

impl Owner {
    async fn new(
        number: i32,
        habits: Habits,
        client: Client,
        truth: Arc<Truth>,
        random: StdRng,
        counts: Counts,
    ) -> Owner {
        // Half of them read their own writes by `afterClusterTime`.
        let session = client.start_session().causal_consistency(number % 2 == 0).await.unwrap();
        let orders = client.database(DB).collection(COLL);
        Owner { number, habits, truth, orders, session, random, counts, unknown: Vec::new() }
    }

    async fn work(mut self) {
        while !self.truth.is_stopping() {
            let operation = self.one_operation().await;
            *self.counts.done.lock().entry(operation).or_default() += 1;
            self.find_out().await;
            tokio::time::sleep(self.habits.pause).await;
        }
        self.find_out().await;
    }

    async fn one_operation(&mut self) -> &'static str {
        let mine = self.truth.of_owner(self.number);
        let live: Vec<(Number, RawDocumentBuf)> =
            mine.iter().filter_map(|(n, state)| Some((*n, state.clone()?))).collect();
        let dead: Vec<Number> =
            mine.iter().filter(|(_, state)| state.is_none()).map(|(n, _)| *n).collect();
        let Some((n, document)) = live.choose(&mut self.random).cloned() else {
            self.insert(None).await;
            return "insert";
        };
        let deleted = dead.choose(&mut self.random).copied();
        match self.random.random_range(0..100) {
            0..24 => self.read_one(n, Some(document)).await,
            24..28 => match deleted {
                Some(n) => self.read_one(n, None).await,
                None => "nothing",
            },
            28..34 => self.read_several(&mine).await,
            34..42 => self.read_range(&mine).await,
            42..45 => self.read_newest(&mine).await,
            45..47 => self.count_recent(&mine).await,
            47..49 => self.read_uncovered(&mine).await,
            49..57 => self.update(n, &document).await,
            57..61 => self.update_if(n, &document).await,
            61..64 => self.update_by_other_field(n, &document).await,
            64..68 => self.replace(n, &document).await,
            68..72 => self.find_and_update(n, &document).await,
            72..75 => self.redate(n, &document).await,
            75..80 => self.delete(n).await,
            80..82 => self.find_and_delete(n, document).await,
            82..91 => self.insert(None).await,
            91..94 => match deleted {
                Some(n) => self.insert(Some(n)).await,
                None => "nothing",
            },
            94..96 => self.upsert(deleted).await,
            96..98 => self.insert_again(n, &document).await,
            _ if self.habits.writes_over_many => self.write_over_many(&mine).await,
            _ => "nothing",
        }
    }

    /// Whether an operation went well. If not: whether its error is acceptable is judged here, what
    /// it has done is for the caller to find out.
    fn accepted<T>(&self, what: &str, result: Result<T, Error>) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        if self.habits.no_errors || !is_of_a_fault(&error) {
            self.truth.violation(format!("owner {}: {what} failed: {error:?}", self.number));
        }
        let kind = kind_of(&error);
        *self.counts.errors.lock().entry(format!("{what}: {kind}")).or_default() += 1;
        None
    }

    fn expect(&self, what: &str, n: Number, seen: &State, expected: &State) {
        if seen != expected {
            self.truth.violation(format!(
                "owner {}: {what} of document {n} ({}) gave {}, not {}",
                self.number,
                self.truth.id(n),
                shown(seen),
                shown(expected)
            ));
        }
    }

    fn expect_set(&self, what: &str, seen: Vec<RawDocumentBuf>, expected: Vec<&RawDocumentBuf>) {
        let number = |document: &RawDocumentBuf| document.get_i64("n").unwrap_or(-1);
        let count = seen.len();
        let seen: BTreeMap<Number, RawDocumentBuf> =
            seen.into_iter().map(|document| (number(&document), document)).collect();
        let expected: BTreeMap<Number, &RawDocumentBuf> =
            expected.into_iter().map(|document| (number(document), document)).collect();
        if count == seen.len()
            && seen.len() == expected.len()
            && seen.iter().all(|(n, document)| expected.get(n).is_some_and(|e| *e == document))
        {
            return;
        }
        let missing: Vec<_> = expected.keys().filter(|n| !seen.contains_key(n)).collect();
        let surplus: Vec<_> = seen.keys().filter(|n| !expected.contains_key(n)).collect();
        let differing: Vec<_> =
            seen.iter().filter(|(n, d)| expected.get(n).is_some_and(|e| e != d)).collect();
        self.truth.violation(format!(
            "owner {}: {what} gave {count} documents for {}; missing {missing:?}, surplus {surplus:?}, differing {:?}",
            self.number,
            expected.len(),
            differing.iter().map(|(n, d)| (n, shown(&Some((*d).clone())))).collect::<Vec<_>>()
        ));
    }

    fn by_id(&self, n: Number) -> Document {
        doc! { "_id": self.truth.id(n) }
    }

    /// Old documents, recent ones and ones of the future, most of them of now.
    fn some_date(&mut self) -> DateTime {
        let recent = self.habits.recent;
        let age = match self.random.random_range(0..10) {
            0..5 => 0.0,
            5..7 => self.random.random_range(0.0..recent),
            7 => -self.random.random_range(0.0..recent),
            _ => self.random.random_range(0.0..365.0) * 86_400.0,
        };
        date(age)
    }

    /// Ends a write of one document. `done` says what the server reported; `None` is an error.
    fn conclude(&mut self, what: &str, n: Number, after: State, done: Option<bool>) {
        match done {
            Some(true) => self.truth.known(n, after),
            Some(false) => {
                self.truth.violation(format!(
                    "owner {}: {what} of document {n} ({}) did not find it as it is: {}",
                    self.number,
                    self.truth.id(n),
                    shown(&after)
                ));
                self.unknown.push(n);
            }
            None => self.unknown.push(n),
        }
    }

    async fn read_one(&mut self, n: Number, expected: State) -> &'static str {
        let query = self.by_id(n);
        let read = self.orders.find_one(query).session(&mut self.session).await;
        if let Some(seen) = self.accepted("a point read", read) {
            self.expect("a point read", n, &seen, &expected);
        }
        "point read"
    }

    async fn all(
        &mut self,
        what: &str,
        query: Document,
        sort: Option<(Document, i64)>,
    ) -> Option<Vec<RawDocumentBuf>> {
        let session = &mut self.session;
        let find = self.orders.find(query);
        let find = match sort {
            Some((sort, limit)) => find.sort(sort).limit(limit),
            None => find.batch_size(self.habits.batch),
        };
        let read = async {
            let mut cursor = find.session(&mut *session).await?;
            let mut documents = Vec::new();
            while let Some(document) = cursor.next(&mut *session).await {
                documents.push(document?);
            }
            Ok(documents)
        };
        let read = read.await;
        self.accepted(what, read)
    }

    async fn read_several(&mut self, mine: &BTreeMap<Number, State>) -> &'static str {
        let numbers: Vec<Number> = mine.keys().copied().collect();
        let numbers: Vec<Number> = numbers.choose_multiple(&mut self.random, 5).copied().collect();
        let ids: Vec<Bson> = numbers.iter().map(|n| self.truth.id(*n)).collect();
        let query = doc! { "_id": { "$in": ids } };
        if let Some(seen) = self.all("a read of several", query, None).await {
            let expected = numbers.iter().filter_map(|n| mine[n].as_ref()).collect();
            self.expect_set("a read of several", seen, expected);
        }
        "several"
    }

    async fn read_range(&mut self, mine: &BTreeMap<Number, State>) -> &'static str {
        let from = date(self.random.random_range(0.0..self.habits.recent));
        let query = doc! { "owner": self.number, "at": { "$gte": from } };
        if let Some(seen) = self.all("a covered range", query, None).await {
            self.expect_set("a covered range", seen, since(mine, from).collect());
        }
        "covered range"
    }

    async fn read_newest(&mut self, mine: &BTreeMap<Number, State>) -> &'static str {
        const LIMIT: usize = 5;
        let query = doc! { "owner": self.number };
        let sort = Some((doc! { "at": -1 }, LIMIT as i64));
        if let Some(seen) = self.all("the newest", query, sort).await {
            let mut dates: Vec<DateTime> = mine.values().flatten().map(at).collect();
            dates.sort_unstable_by(|a, b| b.cmp(a));
            dates.truncate(LIMIT);
            let seen_dates: Vec<DateTime> = seen.iter().map(at).collect();
            if seen_dates != dates {
                self.truth.violation(format!(
                    "owner {}: the newest are of {seen_dates:?}, not {dates:?}",
                    self.number
                ));
            }
            for document in seen {
                // Which of several of one date, is open.
                let n = document.get_i64("n").unwrap();
                self.expect("a read of the newest", n, &Some(document), &mine[&n]);
            }
        }
        "newest"
    }

    async fn count_recent(&mut self, mine: &BTreeMap<Number, State>) -> &'static str {
        let from = date(self.random.random_range(0.0..self.habits.recent));
        let query = doc! { "owner": self.number, "at": { "$gte": from } };
        let counted = self.orders.count_documents(query).session(&mut self.session).await;
        if let Some(counted) = self.accepted("a count", counted) {
            let expected = since(mine, from).count() as u64;
            if counted != expected {
                self.truth.violation(format!(
                    "owner {}: counted {counted} since {from}, not {expected}",
                    self.number
                ));
            }
        }
        "count"
    }

    async fn read_uncovered(&mut self, mine: &BTreeMap<Number, State>) -> &'static str {
        let query = doc! { "owner": self.number, "v": { "$gte": 3_i64 } };
        if let Some(seen) = self.all("an uncovered read", query, None).await {
            let expected = mine.values().flatten().filter(|document| version(document) >= 3);
            self.expect_set("an uncovered read", seen, expected.collect());
        }
        "uncovered"
    }

    async fn update(&mut self, n: Number, document: &RawDocumentBuf) -> &'static str {
        let v = version(document) + 1;
        let note = self.a_note();
        let after = Some(changed(document, doc! { "v": v, "note": &note }));
        self.truth.begin(n, &after);
        let query = self.by_id(n);
        let update = if v % 2 == 0 {
            let set = doc! { "$set": { "v": v, "note": &note } };
            self.orders.update_one(query, set).session(&mut self.session).await
        } else {
            let stages = vec![
                doc! { "$set": { "v": { "$add": ["$v", 1_i64] }, "note": { "$literal": &note } } },
            ];
            self.orders.update_one(query, stages).session(&mut self.session).await
        };
        let done = self.accepted("an update", update).map(|done| done.matched_count == 1);
        self.conclude("an update", n, after, done);
        "update"
    }

    /// Compare and set, with the right value or a wrong one.
    async fn update_if(&mut self, n: Number, document: &RawDocumentBuf) -> &'static str {
        let v = version(document);
        let mut query = self.by_id(n);
        if self.random.random_bool(0.5) {
            query.insert("v", v + 1000);
            let update = doc! { "$set": { "v": v + 1001 } };
            let update = self.orders.update_one(query, update).session(&mut self.session).await;
            if let Some(done) = self.accepted("an update of another value", update)
                && done.matched_count != 0
            {
                self.truth.violation(format!("document {n} has no such value"));
            }
            return "update if (not)";
        }
        query.insert("v", v);
        let after = Some(changed(document, doc! { "v": v + 1 }));
        self.truth.begin(n, &after);
        let update = doc! { "$inc": { "v": 1_i64 } };
        let update = self.orders.update_one(query, update).session(&mut self.session).await;
        let done = self.accepted("a compare-and-set", update).map(|done| done.matched_count == 1);
        self.conclude("a compare-and-set", n, after, done);
        "update if"
    }

    /// By a field that has no index and says nothing about the date.
    async fn update_by_other_field(
        &mut self,
        n: Number,
        document: &RawDocumentBuf,
    ) -> &'static str {
        let after = Some(changed(document, doc! { "v": version(document) + 1 }));
        self.truth.begin(n, &after);
        let update = doc! { "$inc": { "v": 1_i64 } };
        let update =
            self.orders.update_one(doc! { "n": n }, update).session(&mut self.session).await;
        let done = self.accepted("an update by n", update).map(|done| done.matched_count == 1);
        self.conclude("an update by n", n, after, done);
        "update by n"
    }

    async fn replace(&mut self, n: Number, document: &RawDocumentBuf) -> &'static str {
        let values = doc! { "v": version(document) + 1, "note": self.a_note() };
        let replacement = changed(document, values);
        let after = Some(replacement.clone());
        self.truth.begin(n, &after);
        let query = self.by_id(n);
        let replace = self.orders.replace_one(query, &replacement).session(&mut self.session).await;
        let done = self.accepted("a replacement", replace).map(|done| done.matched_count == 1);
        self.conclude("a replacement", n, after, done);
        "replace"
    }

    async fn find_and_update(&mut self, n: Number, document: &RawDocumentBuf) -> &'static str {
        let after = Some(changed(document, doc! { "v": version(document) + 1 }));
        self.truth.begin(n, &after);
        let query = self.by_id(n);
        let found = self
            .orders
            .find_one_and_update(query, doc! { "$inc": { "v": 1_i64 } })
            .return_document(ReturnDocument::After)
            .session(&mut self.session)
            .await;
        let found = self.accepted("find and update", found);
        let done = found.map(|found| {
            self.expect("find and update", n, &found, &after);
            found.is_some()
        });
        self.conclude("find and update", n, after, done);
        "find and update"
    }

    /// Moves a document into the window, or out of it.
    async fn redate(&mut self, n: Number, document: &RawDocumentBuf) -> &'static str {
        let at = self.some_date();
        let after = Some(changed(document, doc! { "v": version(document) + 1, "at": at }));
        self.truth.begin(n, &after);
        let query = self.by_id(n);
        let update = doc! { "$inc": { "v": 1_i64 }, "$set": { "at": at } };
        let update = self.orders.update_one(query, update).session(&mut self.session).await;
        let done = self.accepted("a new date", update).map(|done| done.matched_count == 1);
        self.conclude("a new date", n, after, done);
        "new date"
    }

    async fn delete(&mut self, n: Number) -> &'static str {
        self.truth.begin(n, &None);
        let query = self.by_id(n);
        let delete = self.orders.delete_one(query).session(&mut self.session).await;
        let done = self.accepted("a delete", delete).map(|done| done.deleted_count == 1);
        self.conclude("a delete", n, None, done);
        "delete"
    }

    async fn find_and_delete(&mut self, n: Number, document: RawDocumentBuf) -> &'static str {
        self.truth.begin(n, &None);
        let query = self.by_id(n);
        let found = self.orders.find_one_and_delete(query).session(&mut self.session).await;
        let found = self.accepted("find and delete", found);
        let done = found.map(|found| {
            self.expect("find and delete", n, &found, &Some(document));
            found.is_some()
        });
        self.conclude("find and delete", n, None, done);
        "find and delete"
    }

    /// A document that never was, or one that was deleted, whose `_id` is free again.
    async fn insert(&mut self, n: Option<Number>) -> &'static str {
        let again = n.is_some();
        let n = n.unwrap_or_else(|| self.truth.new_number(self.number));
        let at = self.some_date();
        let document = fresh_document(n, &self.truth.id(n), self.number, at);
        let after = Some(document.clone());
        self.truth.begin(n, &after);
        let insert = self.orders.insert_one(&document).session(&mut self.session).await;
        let done = self.accepted("an insert", insert).map(|_| true);
        self.conclude("an insert", n, after, done);
        if again { "insert of a deleted one" } else { "insert" }
    }

    /// The `_id` is taken, whichever tier has it.
    async fn insert_again(&mut self, n: Number, document: &RawDocumentBuf) -> &'static str {
        let other = changed(document, doc! { "v": -5_i64 });
        match self.orders.insert_one(&other).session(&mut self.session).await {
            Ok(_) => self.truth.violation(format!("document {n} was inserted twice")),
            Err(error) if is_duplicate(&error) => {}
            Err(error) => drop(self.accepted("an insert of a taken _id", Err::<(), _>(error))),
        }
        "insert of a taken _id"
    }

    async fn upsert(&mut self, dead: Option<Number>) -> &'static str {
        let n = dead.unwrap_or_else(|| self.truth.new_number(self.number));
        let at = self.some_date();
        let document = fresh_document(n, &self.truth.id(n), self.number, at);
        let after = Some(document.clone());
        self.truth.begin(n, &after);
        let query = self.by_id(n);
        let upsert = self.orders.replace_one(query, &document).upsert(true);
        let upsert = upsert.session(&mut self.session).await;
        let done = self.accepted("an upsert", upsert).map(|done| done.upserted_id.is_some());
        self.conclude("an upsert", n, after, done);
        "upsert"
    }

    /// Every recent document of the owner, covered or not, by one command.
    async fn write_over_many(&mut self, mine: &BTreeMap<Number, State>) -> &'static str {
        let deletes = self.random.random_range(0..4) == 0;
        let reach = if deletes { 0.05 } else { 0.3 } * self.habits.recent;
        let mut query = doc! { "owner": self.number };
        let chosen: Vec<RawDocumentBuf> = if self.random.random_bool(0.7) {
            let from = date(self.random.random_range(0.0..reach));
            query.insert("at", doc! { "$gte": from });
            since(mine, from).cloned().collect()
        } else {
            // Wherever they are.
            let v = self.random.random_range(2..8_i64);
            query.insert("v", v);
            mine.values().flatten().filter(|document| version(document) == v).cloned().collect()
        };
        let changes: Vec<(Number, State)> = chosen
            .iter()
            .map(|document| {
                let after =
                    (!deletes).then(|| changed(document, doc! { "v": version(document) + 1 }));
                (document.get_i64("n").unwrap(), after)
            })
            .collect();
        changes.iter().for_each(|(n, after)| self.truth.begin(*n, after));
        let count = if deletes {
            let delete = self.orders.delete_many(query.clone()).session(&mut self.session).await;
            self.accepted("a delete of many", delete).map(|done| done.deleted_count)
        } else {
            let update = doc! { "$inc": { "v": 1_i64 } };
            let update = self.orders.update_many(query.clone(), update);
            let update = update.session(&mut self.session).await;
            self.accepted("an update of many", update).map(|done| done.matched_count)
        };
        if count != Some(changes.len() as u64) {
            self.truth.violation(format!(
                "owner {}: a write over {query} (deletes: {deletes}) reached {count:?} documents, not {}",
                self.number,
                changes.len()
            ));
        }
        for (n, after) in changes {
            self.conclude("a write over many", n, after, count.map(|_| true));
        }
        if deletes { "delete of many" } else { "update of many" }
    }

    fn a_note(&mut self) -> String {
        let length = self.random.random_range(0..300);
        "y".repeat(length)
    }

    /// Settles unknown outcomes. First a write of its own in the same session: the server runs a
    /// session's operations in order and refuses a late one, so after it the operation in question
    /// has taken effect or never will. Then a read tells which.
    async fn find_out(&mut self) {
        let began = std::time::Instant::now();
        while let Some(n) = self.unknown.last().copied() {
            if self.habits.no_errors {
                // The test has failed.
                return;
            }
            assert!(began.elapsed() < PATIENCE, "owner {} is cut off", self.number);
            let fence = doc! { "_id": format!("fence-{}", self.number) };
            let fenced = self
                .orders
                .update_one(
                    fence,
                    doc! { "$inc": { "fences": 1 }, "$setOnInsert": { "at": date(0.0) } },
                )
                .upsert(true)
                .session(&mut self.session)
                .await;
            if self.accepted("a fence", fenced).is_none() {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            let query = self.by_id(n);
            let read = self.orders.find_one(query).session(&mut self.session).await;
            if let Some(state) = self.accepted("a read after a fence", read) {
                self.truth.found_out(n, state);
                self.unknown.pop();
            }
        }
    }
}

fn at(document: &RawDocumentBuf) -> DateTime {
    document.get_datetime("at").unwrap()
}

fn version(document: &RawDocumentBuf) -> i64 {
    document.get_i64("v").unwrap()
}

fn since(mine: &BTreeMap<Number, State>, from: DateTime) -> impl Iterator<Item = &RawDocumentBuf> {
    mine.values().flatten().filter(move |document| at(document) >= from)
}

fn is_duplicate(error: &Error) -> bool {
    matches!(&*error.kind, ErrorKind::Write(WriteFailure::WriteError(e)) if e.code == 11000)
}

/// Whether an error says that a server or the daemon was lost or changed its role, and nothing else.
fn is_of_a_fault(error: &Error) -> bool {
    // HostUnreachable, HostNotFound, NetworkTimeout, CursorNotFound, ShutdownInProgress,
    // PrimarySteppedDown, SocketException, NotWritablePrimary, InterruptedAtShutdown,
    // InterruptedDueToReplStateChange, NotPrimaryNoSecondaryOk, NotPrimaryOrSecondary.
    const CODES: [i32; 12] = [6, 7, 89, 43, 91, 189, 9001, 10107, 11600, 11602, 13435, 13436];
    match &*error.kind {
        ErrorKind::Io(_)
        | ErrorKind::ConnectionPoolCleared { .. }
        | ErrorKind::ServerSelection { .. } => true,
        ErrorKind::Command(error) => CODES.contains(&error.code),
        ErrorKind::Write(WriteFailure::WriteConcernError(error)) => CODES.contains(&error.code),
        _ => false,
    }
}

fn kind_of(error: &Error) -> String {
    match &*error.kind {
        ErrorKind::Io(error) => format!("network, {:?}", error.kind()),
        ErrorKind::Command(error) => format!("{} {}", error.code, error.code_name),
        other => {
            let text = format!("{other:?}");
            text.split(['{', '(']).next().unwrap_or_default().trim().to_owned()
        }
    }
}
