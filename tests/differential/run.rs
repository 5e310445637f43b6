//! Runs cases: every step on both deployments, replies compared, and at the end everything that is
//! stored.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bson::oid::ObjectId;
use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use halocline_tiering::DatePoint;
use mongodb::options::IndexOptions;
use mongodb::{Client, IndexModel};

use super::client::{Connection, Message};
use super::compare::{Reply, brief, difference, number, rows, shown};
use super::deployment::{DB, Daemon, GRACE, KEEP, Sets, Tiered, boundary};
use super::step::{Call, Case, CursorStep, MayRefuse, Order, Reality, Step, Transaction, lsid};
use super::tally::Tally;

/// A promise that was not kept.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The step at which it showed; past the last one: when all was done.
    pub step: usize,
    pub what: String,
}

/// Attempts of a transaction that is told to try again.
const ATTEMPTS: i64 = 40;
/// Longest wait for the evictor, which may have reasons to keep a document.
const EVICTION: Duration = Duration::from_secs(4);
/// Documents of the untiered collection.
const OTHERS: i32 = 20;

static RUNS: AtomicU64 = AtomicU64::new(0);

/// Runs cases side by side, each on collections of its own, through one daemon.
pub async fn run(sets: &Sets, cases: &[Case], tally: &mut Tally) -> Vec<Option<Failure>> {
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let names: Vec<String> = (0..cases.len()).map(|i| format!("c{run}_{i}")).collect();
    for (name, case) in names.iter().zip(cases) {
        seed(sets, name, case).await;
    }
    let tiered: Vec<Tiered> = names
        .iter()
        .zip(cases)
        .map(|(coll, case)| Tiered { coll: coll.clone(), kind: case.kind })
        .collect();
    let daemon = Daemon::start(sets, &tiered).await;
    let running = names.iter().zip(cases).map(async |(name, case)| {
        let mut runner = Runner::new(sets, &daemon, name, case).await;
        let outcome = runner.case().await.err();
        (outcome, runner.tally)
    });
    let outcomes = futures_util::future::join_all(running).await;
    if outcomes.iter().any(|(failure, _)| failure.is_some()) {
        println!("--- the daemon's log, its end\n{}\n---", daemon.end_of_log(25));
    }
    if std::env::var_os("HALOCLINE_DIFFERENTIAL_TRACE").is_some() {
        println!("{:#}", daemon.status().await.unwrap_or_default()["collections"]);
    }
    daemon.stop().await;
    for name in &names {
        for client in [&sets.fast_client, &sets.archive_client, &sets.plain_client] {
            for coll in [name.clone(), other(name), output(name)] {
                Sets::of(client, &coll).drop().await.unwrap();
            }
        }
    }
    let (failures, tallies): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
    tallies.iter().for_each(|one| tally.add(one));
    failures
}

fn other(name: &str) -> String {
    format!("other_{name}")
}

fn output(name: &str) -> String {
    format!("output_{name}")
}

fn millis(time: SystemTime) -> i64 {
    i64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// What places mean in a run that begins now.
fn reality(name: &str, case: &Case) -> Reality {
    Reality {
        kind: case.kind,
        boundary: millis(SystemTime::now() - KEEP),
        tiered: name.to_owned(),
        other: other(name),
        output: output(name),
    }
}

thread_local! {
    /// The dates of a run are relative to the moment its documents were made.
    static REALITIES: std::cell::RefCell<HashMap<String, Reality>> = Default::default();
}

async fn seed(sets: &Sets, name: &str, case: &Case) {
    let reality = reality(name, case);
    let documents: Vec<RawDocumentBuf> = case
        .documents
        .iter()
        .map(|document| RawDocumentBuf::try_from(&reality.document(document)).unwrap())
        .collect();
    let index = |keys: Document, unique: bool| {
        let options = IndexOptions::builder().unique(unique).sparse(unique.then_some(true)).build();
        IndexModel::builder().keys(keys).options(options).build()
    };
    let mut indexes = vec![index(doc! { "at": 1 }, false), index(doc! { "x": 1, "at": -1 }, false)];
    if case.unique {
        indexes.push(index(doc! { "u": 1 }, true));
    }
    let others =
        (0..OTHERS).map(|n| RawDocumentBuf::try_from(&doc! { "_id": n, "n": n, "c": 0 }).unwrap());
    let others: Vec<_> = others.collect();
    for client in [&sets.plain_client, &sets.archive_client] {
        Sets::of(client, name).create_indexes(indexes.clone()).await.unwrap();
        Sets::of(client, &other(name)).insert_many(&others).await.unwrap();
    }
    // The plain set says which of them can be together.
    let plain = Sets::of(&sets.plain_client, name);
    if !documents.is_empty() {
        let _ = plain.insert_many(&documents).ordered(false).await;
        let kept = Sets::find(&sets.plain_client, name, doc! {}).await;
        if !kept.is_empty() {
            Sets::of(&sets.archive_client, name).insert_many(&kept).await.unwrap();
        }
    }
    REALITIES.with_borrow_mut(|realities| realities.insert(name.to_owned(), reality));
}

/// One deployment as a client sees it.
struct Side {
    connections: [Connection; 2],
    operation_time: Option<Bson>,
    cluster_time: Option<Bson>,
}

impl Side {
    async fn open(address: std::net::SocketAddr) -> Self {
        let connect = || async { Connection::open(address).await.unwrap() };
        Self {
            connections: [connect().await, connect().await],
            operation_time: None,
            cluster_time: None,
        }
    }

    async fn run(
        &mut self,
        connection: usize,
        message: &Message,
    ) -> Result<RawDocumentBuf, String> {
        let reply = self.connections[connection].run(message).await.map_err(|e| e.to_string())?;
        for (name, kept) in
            [("operationTime", &mut self.operation_time), ("$clusterTime", &mut self.cluster_time)]
        {
            if let Ok(Some(value)) = reply.get(name) {
                *kept = Some(Bson::try_from(value).map_err(|e| e.to_string())?);
            }
        }
        Ok(reply)
    }
}

struct Runner<'a> {
    sets: &'a Sets,
    daemon: &'a Daemon,
    case: &'a Case,
    name: &'a str,
    reality: Reality,
    halocline: Side,
    plain: Side,
    /// `_id`s the plain set made, and those of Halocline's that replaced them.
    renamed: HashMap<ObjectId, ObjectId>,
    tally: Tally,
    /// Show every command with both replies: `HALOCLINE_DIFFERENTIAL_TRACE`.
    trace: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Halocline,
    Plain,
}

impl<'a> Runner<'a> {
    async fn new(sets: &'a Sets, daemon: &'a Daemon, name: &'a str, case: &'a Case) -> Self {
        let reality = REALITIES.with_borrow_mut(|realities| realities.remove(name).unwrap());
        Self {
            sets,
            daemon,
            case,
            name,
            reality,
            halocline: Side::open(daemon.listen).await,
            plain: Side::open(sets.plain.address(0)).await,
            renamed: HashMap::new(),
            tally: Tally::default(),
            trace: std::env::var_os("HALOCLINE_DIFFERENTIAL_TRACE").is_some(),
        }
    }

    async fn case(&mut self) -> Result<(), Failure> {
        for (number, step) in self.case.steps.iter().enumerate() {
            let outcome = match step {
                Step::One(call) => self.one(call).await,
                Step::Cursor(cursor) => self.cursor(cursor).await,
                Step::Transaction(transaction) => self.transaction(transaction).await,
                Step::LetEvict => self.let_evict().await,
            };
            if let Err(what) = outcome {
                let stored = self.end().await.err().unwrap_or_else(|| "the same".into());
                let what = format!("{what}\n  after: {step}\n  stored by now: {stored}");
                return Err(Failure { step: number, what });
            }
        }
        let end = self.case.steps.len();
        self.end().await.map_err(|what| Failure { step: end, what })
    }

    fn side(&mut self, who: Who) -> &mut Side {
        match who {
            Who::Halocline => &mut self.halocline,
            Who::Plain => &mut self.plain,
        }
    }

    /// The command as it is sent.
    fn message(&mut self, who: Who, call: &Call) -> Message {
        let mut body = self.reality.document(&call.body);
        if !body.contains_key("$db") {
            body.insert("$db", DB);
        }
        if let Some(session) = call.session {
            body.insert("lsid", lsid(self.name, session));
        }
        if let Some(number) = call.number {
            body.insert("txnNumber", number);
        }
        let side = self.side(who);
        if call.causal
            && let Some(time) = &side.operation_time
        {
            let mut concern = body.get_document("readConcern").cloned().unwrap_or_default();
            concern.insert("afterClusterTime", time);
            body.insert("readConcern", concern);
            body.insert("$clusterTime", side.cluster_time.clone().unwrap_or(Bson::Null));
        }
        let sequence = call.sequence.as_ref().map(|(name, documents)| {
            (
                name.clone(),
                documents.iter().map(|document| self.reality.document(document)).collect(),
            )
        });
        Message { body, sequence }
    }

    /// Sends a command and reads its cursor to the end, the further batches over the other connection.
    async fn exhaust(
        &mut self,
        who: Who,
        connection: usize,
        message: &Message,
    ) -> Result<Reply, String> {
        let body = self.side(who).run(connection, message).await?;
        let mut reply = Reply { body, rows: Vec::new(), batches: Vec::new() };
        let mut cursor = take_batch(&reply.body.clone(), &mut reply)?;
        while let Some((id, coll)) = cursor {
            let more = more(id, &coll, None, message);
            // Inside a transaction everything stays on one connection, as with drivers.
            let connection =
                if message.body.contains_key("autocommit") { connection } else { 1 - connection };
            let body = self.side(who).run(connection, &more).await?;
            if error_of(&body).is_some() {
                return Err(format!("a getMore failed: {}", brief(&document(&body))));
            }
            cursor = take_batch(&body, &mut reply)?;
        }
        Ok(reply)
    }

    async fn one(&mut self, call: &Call) -> Result<(), String> {
        if let MayRefuse::Always(code) = call.refusal {
            let message = self.message(Who::Halocline, call);
            let reply = self.exhaust(Who::Halocline, call.connection, &message).await?;
            if reply.error_code() != Some(code) {
                return Err(format!("not refused with {code}: {}", brief(&reply.document())));
            }
            self.tally.refused(call.name(), code, true);
            return Ok(());
        }
        if call.silent {
            return self.silently(call).await;
        }
        let matching = if call.follow { self.matching(call).await? } else { Vec::new() };
        let message = self.message(Who::Halocline, call);
        let ours = self.exhaust(Who::Halocline, call.connection, &message).await?;
        if let Some(code) = ours.error_code()
            && call.refusal == MayRefuse::With(code)
        {
            self.tally.refused(call.name(), code, false);
            return Ok(());
        }
        let mut message = self.message(Who::Plain, call);
        if matching.len() > 1
            && ours.matched() == 1
            && let Some(n) = self.chosen(call, &ours, &matching).await?
        {
            self.tally.followed += 1;
            narrow(&mut message, call, n);
        }
        let theirs = self.exhaust(Who::Plain, call.connection, &message).await?;
        self.adopt(call, &ours, &theirs).await?;
        self.tally.answered(call.name(), ours.error_code().is_some());
        self.compared(call, &ours, &theirs)?;
        if call.order == Order::Some {
            self.are_of_the_whole(call, &ours).await?;
        }
        Ok(())
    }

    fn compared(&self, call: &Call, ours: &Reply, theirs: &Reply) -> Result<(), String> {
        if self.trace {
            println!("{call}\n  {}\n  {}", brief(&ours.document()), brief(&theirs.document()));
        }
        let asked = call.body.contains_key("batchSize")
            || call
                .body
                .get_document("cursor")
                .is_ok_and(|cursor| cursor.contains_key("batchSize"));
        match difference(ours, theirs, call.order, asked, &self.renamed) {
            Some(what) => Err(what),
            None => Ok(()),
        }
    }

    /// A write that nobody acknowledges, and a command after it on the same connection, whose reply
    /// must be its own.
    async fn silently(&mut self, call: &Call) -> Result<(), String> {
        let ping = Message { body: doc! { "ping": 1, "$db": DB }, sequence: None };
        for who in [Who::Halocline, Who::Plain] {
            let message = self.message(who, call);
            let side = self.side(who);
            side.connections[0].tell(&message).await.map_err(|e| e.to_string())?;
            let pong = side.run(0, &ping).await?;
            if error_of(&pong).is_some() {
                return Err(format!("a ping failed: {}", brief(&document(&pong))));
            }
        }
        self.tally.answered(call.name(), false);
        Ok(())
    }

    // Choices that MongoDB leaves to the server.

    /// `_id` and number of the plain set's documents that a statement matches. None if it is refused.
    async fn matching(&mut self, call: &Call) -> Result<Vec<Named>, String> {
        let Some((statement, field)) = call.statement() else { return Ok(Vec::new()) };
        let mut find = doc! { "find": self.name, "$db": DB, "batchSize": 10_000 };
        find.insert("projection", doc! { "n": 1 });
        let statement = self.reality.document(statement);
        find.insert("filter", statement.get(field).cloned().unwrap_or_else(|| doc! {}.into()));
        if let Some(collation) = statement.get("collation") {
            find.insert("collation", collation);
        }
        if let Some(variables) = call.body.get("let") {
            find.insert("let", variables);
        }
        let found = self.exhaust(Who::Plain, 0, &Message { body: find, sequence: None }).await?;
        Ok(names(&found.rows))
    }

    /// The number of the document that Halocline chose; none if a record answered. The number that
    /// it had before, and it is looked for by `_id`: a replacement changes the number, and a
    /// collation takes one `_id` for another.
    async fn chosen(
        &mut self,
        call: &Call,
        reply: &Reply,
        matching: &[Named],
    ) -> Result<Option<Bson>, String> {
        let number_of = |chosen: Option<Named>| {
            let found = matching.iter().find(|named| chosen.as_ref().is_some_and(|c| named.is(c)));
            found.map(|named| named.n.clone())
        };
        if let Ok(value) = reply.document().get_document("value") {
            return Ok(number_of(Named::of(value)));
        }
        if call.name() == "delete" {
            let ids: Vec<&Bson> = matching.iter().map(|named| &named.id).collect();
            let mut find = doc! { "find": self.name, "$db": DB, "projection": { "n": 1 } };
            find.insert("filter", doc! { "_id": { "$in": ids } });
            let find = Message { body: find, sequence: None };
            let left = names(&self.exhaust(Who::Halocline, 0, &find).await?.rows);
            let gone = matching.iter().find(|named| !left.iter().any(|kept| kept.is(named)));
            return Ok(gone.map(|named| named.n.clone()));
        }
        let tag = call.statement().and_then(|(statement, _)| tag_in(statement.get("u")?));
        let Some(tag) = tag else { return Ok(None) };
        let changed = names(&self.directly(doc! { "tag": tag }).await);
        Ok(number_of(changed.into_iter().next()))
    }

    /// Documents on the fast tier, or else on the archive, past the daemon.
    async fn directly(&self, filter: Document) -> Vec<RawDocumentBuf> {
        for client in [&self.sets.fast_client, &self.sets.archive_client] {
            let found = Sets::find(client, self.name, filter.clone()).await;
            if !found.is_empty() {
                return found;
            }
        }
        Vec::new()
    }

    /// Gives documents that the plain set made `_id`s for those of Halocline's.
    async fn adopt(&mut self, call: &Call, ours: &Reply, theirs: &Reply) -> Result<(), String> {
        let mut pairs = Vec::new();
        if let Some(tag) = call.tag {
            let by_number = |documents: Vec<RawDocumentBuf>| -> BTreeMap<i64, ObjectId> {
                documents
                    .iter()
                    .map(|d| document(d))
                    .filter_map(|d| Some((number(&d, "n")?, d.get_object_id("_id").ok()?)))
                    .collect()
            };
            let made = by_number(self.directly(doc! { "tag": tag }).await);
            let plain = Sets::find(&self.sets.plain_client, self.name, doc! { "tag": tag });
            let plain = by_number(plain.await);
            pairs.extend(plain.iter().filter_map(|(n, id)| Some((*id, *made.get(n)?))));
        }
        let made: BTreeMap<i64, ObjectId> = ours.generated().into_iter().collect();
        pairs.extend(
            theirs.generated().into_iter().filter_map(|(at, id)| Some((id, *made.get(&at)?))),
        );
        for (from, to) in pairs {
            if from == to || self.renamed.contains_key(&from) {
                continue;
            }
            let plain = Sets::of(&self.sets.plain_client, self.name);
            if let Some(old) = plain.find_one(doc! { "_id": from }).await.unwrap() {
                plain.delete_one(doc! { "_id": from }).await.unwrap();
                plain.insert_one(with_id(&old, to)).await.unwrap();
            }
            self.renamed.insert(from, to);
        }
        Ok(())
    }

    /// Rows that a limit chose must all be rows of the unlimited result.
    async fn are_of_the_whole(&mut self, call: &Call, ours: &Reply) -> Result<(), String> {
        let mut whole = call.clone();
        for name in ["limit", "skip", "singleBatch"] {
            whole.body.remove(name);
        }
        if let Ok(stages) = whole.body.get_array_mut("pipeline") {
            stages.retain(|stage| !stage.as_document().is_some_and(|s| s.contains_key("$limit")));
        }
        let message = self.message(Who::Plain, &whole);
        let whole = self.exhaust(Who::Plain, 0, &message).await?;
        let whole = rows(&whole, Order::Any, &self.renamed);
        let strange = rows(ours, Order::Any, &HashMap::new())
            .into_iter()
            .find(|row| whole.binary_search(row).is_err());
        match strange {
            Some(row) => Err(format!("a row that does not match: {}", shown(&row))),
            None => Ok(()),
        }
    }

    // Cursors.

    async fn cursor(&mut self, step: &CursorStep) -> Result<(), String> {
        let call = &step.open;
        let mut replies = Vec::new();
        let mut open = Vec::new();
        for who in [Who::Halocline, Who::Plain] {
            let message = self.message(who, call);
            let body = self.side(who).run(call.connection, &message).await?;
            let mut reply = Reply { body: body.clone(), rows: Vec::new(), batches: Vec::new() };
            open.push((take_batch(&body, &mut reply)?, message));
            replies.push(reply);
        }
        let mut between = step.between.iter();
        let mut batches = step.batches.iter();
        let mut size = 101;
        let mut read = 1;
        while open.iter().any(|(cursor, _)| cursor.is_some()) {
            if open.iter().any(|(cursor, _)| cursor.is_none()) && call.order != Order::Some {
                break;
            }
            if step.let_evict && read == 1 {
                self.let_evict().await?;
            }
            if let Some(call) = between.next() {
                self.one(call).await?;
            }
            size = batches.next().copied().unwrap_or(size);
            let kill = step.kill_after.is_some_and(|after| read > after);
            let connection = read % 2;
            read += 1;
            for (at, who) in [Who::Halocline, Who::Plain].into_iter().enumerate() {
                let (cursor, message) = &open[at];
                let Some((id, coll)) = cursor else { continue };
                let next = if kill {
                    let mut body = doc! { "killCursors": coll, "cursors": [id], "$db": DB };
                    if let Some(lsid) = message.body.get("lsid") {
                        body.insert("lsid", lsid);
                    }
                    Message { body, sequence: None }
                } else {
                    more(*id, coll, Some(size), message)
                };
                let body = self.side(who).run(connection, &next).await?;
                if kill {
                    let killed = document(&body);
                    if killed.get_array("cursorsKilled").map_or(0, Vec::len) != 1 {
                        return Err(format!("a cursor was not killed: {}", brief(&killed)));
                    }
                    // A dead cursor has no more rows.
                    let after = more(*id, coll, None, message);
                    let body = self.side(who).run(connection, &after).await?;
                    if error_of(&body) != Some(43) {
                        return Err(format!("a dead cursor answered: {}", brief(&document(&body))));
                    }
                    open[at].0 = None;
                } else {
                    if error_of(&body).is_some() {
                        return Err(format!("a getMore failed: {}", brief(&document(&body))));
                    }
                    open[at].0 = take_batch(&body, &mut replies[at])?;
                }
            }
        }
        self.tally.answered(call.name(), replies[0].error_code().is_some());
        for _ in 1..read {
            self.tally.answered("getMore", false);
        }
        let killed = step.kill_after.is_some_and(|after| read > after + 1);
        let mut compared = call.clone();
        if killed && call.order == Order::Any {
            // Which rows came first, nobody promised.
            compared.order = Order::Some;
        }
        self.compared(&compared, &replies[0], &replies[1])?;
        if compared.order == Order::Some {
            self.are_of_the_whole(call, &replies[0]).await?;
        }
        Ok(())
    }

    // Transactions.

    async fn transaction(&mut self, transaction: &Transaction) -> Result<(), String> {
        let mut attempt = 0;
        let ours = loop {
            match self.attempt(Who::Halocline, transaction, attempt).await? {
                Attempt::Done(replies) => break replies,
                Attempt::Again(_) if attempt < ATTEMPTS => {
                    self.tally.rerun += 1;
                    attempt += 1;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Attempt::Again(why) => {
                    return Err(format!(
                        "after {attempt} attempts still: {}",
                        brief(&why.document())
                    ));
                }
                // Aborted, by design; nothing has happened.
                Attempt::Refused => return Ok(()),
            }
        };
        let mut attempt = 0;
        let theirs = loop {
            match self.attempt(Who::Plain, transaction, attempt).await? {
                Attempt::Done(replies) => break replies,
                Attempt::Again(_) if attempt < ATTEMPTS => attempt += 1,
                Attempt::Again(why) => {
                    return Err(format!("the plain set: {}", brief(&why.document())));
                }
                Attempt::Refused => return Err("the plain set refused a transaction".into()),
            }
        };
        let names = transaction.calls.iter().map(Call::name).chain(["commitTransaction"]);
        for (at, ((ours, theirs), name)) in ours.iter().zip(&theirs).zip(names).enumerate() {
            let call = transaction.calls.get(at);
            self.tally.answered(name, ours.error_code().is_some());
            let order = call.map_or(Order::Total, |call| call.order);
            if let Some(what) = difference(ours, theirs, order, false, &self.renamed) {
                return Err(format!("statement {at}: {what}"));
            }
        }
        if ours.len() != theirs.len() {
            return Err(format!("{} statements ran, and {}", ours.len(), theirs.len()));
        }
        Ok(())
    }

    async fn attempt(
        &mut self,
        who: Who,
        transaction: &Transaction,
        attempt: i64,
    ) -> Result<Attempt, String> {
        let mut replies = Vec::new();
        let common = doc! {
            "lsid": lsid(self.name, transaction.session),
            "txnNumber": transaction.number + attempt,
            "autocommit": false,
        };
        for (at, call) in transaction.calls.iter().enumerate() {
            let mut message =
                self.message(who, &Call { session: None, number: None, ..call.clone() });
            message.body.extend(common.clone());
            if at == 0 {
                message.body.insert("startTransaction", true);
                if let Some(level) = transaction.read_concern {
                    message.body.insert("readConcern", doc! { "level": level });
                }
            }
            let reply = self.exhaust(who, 0, &message).await?;
            if reply.has_label("TransientTransactionError") {
                self.end_transaction(who, "abortTransaction", &common).await?;
                return Ok(Attempt::Again(reply));
            }
            if who == Who::Halocline
                && let Some(code) = reply.error_code()
                && call.refusal == MayRefuse::With(code)
            {
                self.tally.refused(call.name(), code, false);
                let after = self.end_transaction(who, "abortTransaction", &common).await?;
                if after.error_code() != Some(251) {
                    return Err(format!("refused, but not aborted: {}", brief(&after.document())));
                }
                return Ok(Attempt::Refused);
            }
            let failed =
                reply.error_code().is_some() || reply.document().contains_key("writeErrors");
            replies.push(reply);
            if failed {
                // It is aborted; ending it says so.
                replies.push(self.end_transaction(who, "commitTransaction", &common).await?);
                return Ok(Attempt::Done(replies));
            }
        }
        let end = if transaction.commit { "commitTransaction" } else { "abortTransaction" };
        let end = self.end_transaction(who, end, &common).await?;
        if end.has_label("TransientTransactionError") {
            return Ok(Attempt::Again(end));
        }
        replies.push(end);
        Ok(Attempt::Done(replies))
    }

    async fn end_transaction(
        &mut self,
        who: Who,
        end: &str,
        common: &Document,
    ) -> Result<Reply, String> {
        let mut body = doc! { end: 1, "$db": "admin" };
        body.extend(common.clone());
        self.exhaust(who, 0, &Message { body, sequence: None }).await
    }

    // What goes on meanwhile, and the end.

    /// Waits until the fast tier has nothing that is old enough to go, or something has a reason to stay.
    async fn let_evict(&mut self) -> Result<(), String> {
        let point = DatePoint(
            self.point(self.reality.boundary - i64::try_from(GRACE.as_millis()).unwrap()),
        );
        let old = doc! { "at": { "$lt": Bson::try_from(self.case.kind.to_bson(point)).unwrap() } };
        let began = Instant::now();
        while began.elapsed() < EVICTION {
            let fast = Sets::of(&self.sets.fast_client, self.name);
            if fast.count_documents(old.clone()).await.unwrap() == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Milliseconds in the date kind's own unit.
    fn point(&self, millis: i64) -> i64 {
        match self.case.kind {
            halocline_tiering::DateKind::Date | halocline_tiering::DateKind::EpochMillis => millis,
            _ => millis.div_euclid(1000),
        }
    }

    /// What both hold is the same, byte for byte; and what the fast tier holds is what the archive has.
    async fn end(&mut self) -> Result<(), String> {
        // Answered by the archive once it has everything.
        let count = doc! { "count": self.name, "comment": "halocline:archive", "$db": DB };
        let counted = self.halocline.run(0, &Message { body: count, sequence: None }).await?;
        if error_of(&counted).is_some() {
            return Err(format!("the last count failed: {}", brief(&document(&counted))));
        }
        self.daemon.drained().await?;
        let plain = everything(&self.sets.plain_client, self.name).await;
        let archive = everything(&self.sets.archive_client, self.name).await;
        same("the archive", &archive, "the plain set", &plain)?;
        let mut tries = 0;
        loop {
            let before = boundary(self.sets, self.name).await;
            let fast = everything(&self.sets.fast_client, self.name).await;
            let after = boundary(self.sets, self.name).await;
            let problem = self.fast_tier_is_right(&fast, &archive, before.max(after)).await;
            tries += 1;
            match problem {
                // The boundary may have moved meanwhile.
                Err(what) if tries == 3 => return Err(what),
                Err(_) => {}
                Ok(()) => break,
            }
        }
        let log = self.daemon.log();
        let name = format!("{DB}.{}", self.name);
        match log.lines().find(|l| l.contains("the tiers differ") && l.contains(&name)) {
            Some(line) => Err(format!("the evictor found a difference: {line}")),
            None => Ok(()),
        }
    }

    async fn fast_tier_is_right(
        &self,
        fast: &Contents,
        archive: &Contents,
        boundary: Option<i64>,
    ) -> Result<(), String> {
        let strange: Contents = fast
            .iter()
            .filter(|(id, row)| archive.get(*id) != Some(row))
            .map(|(id, row)| (id.clone(), row.clone()))
            .collect();
        let counterparts: Contents = archive
            .iter()
            .filter(|(id, _)| strange.contains_key(*id))
            .map(|(id, row)| (id.clone(), row.clone()))
            .collect();
        same("the fast tier", &strange, "the archive", &counterparts)?;
        let Some(boundary) = boundary else { return Ok(()) };
        let from = Bson::try_from(self.case.kind.to_bson(DatePoint(boundary))).unwrap();
        let filter = doc! { "at": { "$gte": from } };
        for row in Sets::find(&self.sets.plain_client, self.name, filter).await {
            if !fast.contains_key(&id_bytes(&row)) {
                return Err(format!(
                    "above the boundary ({boundary}) and not on the fast tier: {}",
                    shown(row.as_bytes())
                ));
            }
        }
        Ok(())
    }
}

enum Attempt {
    Done(Vec<Reply>),
    Again(Reply),
    Refused,
}

type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

async fn everything(client: &Client, name: &str) -> Contents {
    let all = Sets::find(client, name, doc! {}).await;
    all.iter().map(|row| (id_bytes(row), row.as_bytes().to_vec())).collect()
}

fn id_bytes(row: &RawDocument) -> Vec<u8> {
    super::client::encoded(&doc! { "": document(row).get("_id") })
}

fn same(one: &str, left: &Contents, other: &str, right: &Contents) -> Result<(), String> {
    let differing: Vec<String> = left
        .keys()
        .chain(right.keys().filter(|id| !left.contains_key(*id)))
        .filter(|id| left.get(*id) != right.get(*id))
        .take(5)
        .map(|id| {
            let side =
                |contents: &Contents| contents.get(id).map_or("nothing".into(), |row| shown(row));
            format!("\n    {one}: {}\n    {other}: {}", side(left), side(right))
        })
        .collect();
    if differing.is_empty() {
        Ok(())
    } else {
        Err(format!("not the same:{}", differing.join("\n")))
    }
}

fn document(raw: &RawDocument) -> Document {
    Document::try_from(raw).unwrap_or_else(|e| doc! { "unreadable": e.to_string() })
}

/// A document's `_id` and the number in its field `n`.
struct Named {
    id: Bson,
    n: Bson,
}

impl Named {
    fn of(row: &Document) -> Option<Self> {
        Some(Self { id: row.get("_id")?.clone(), n: row.get("n")?.clone() })
    }

    /// Whether both have the same `_id`, NaN too.
    fn is(&self, other: &Self) -> bool {
        super::client::encoded(&doc! { "": &self.id })
            == super::client::encoded(&doc! { "": &other.id })
    }
}

fn names(rows: &[RawDocumentBuf]) -> Vec<Named> {
    rows.iter().filter_map(|row| Named::of(&document(row))).collect()
}

fn error_of(reply: &RawDocument) -> Option<i32> {
    Reply { body: reply.to_owned(), rows: Vec::new(), batches: Vec::new() }.error_code()
}

/// Takes the rows of a batch; the cursor, if it is still open.
fn take_batch(body: &RawDocument, into: &mut Reply) -> Result<Option<(i64, String)>, String> {
    let Ok(cursor) = body.get_document("cursor") else { return Ok(None) };
    let batch = cursor.get_array("firstBatch").or_else(|_| cursor.get_array("nextBatch"));
    let before = into.rows.len();
    for row in batch.map_err(|e| e.to_string())? {
        let row = row.map_err(|e| e.to_string())?;
        into.rows.push(row.as_document().ok_or("a row is no document")?.to_owned());
    }
    let id = cursor.get_i64("id").map_err(|e| e.to_string())?;
    into.batches.push((into.rows.len() - before, id != 0));
    let ns = cursor.get_str("ns").map_err(|e| e.to_string())?;
    let coll = ns.split_once('.').map_or(ns, |(_, coll)| coll).to_owned();
    Ok((id != 0).then_some((id, coll)))
}

/// The `getMore` of a cursor that a command opened.
fn more(id: i64, coll: &str, size: Option<i32>, opened_by: &Message) -> Message {
    let mut body = doc! { "getMore": id, "collection": coll, "$db": DB };
    if let Some(size) = size {
        body.insert("batchSize", size);
    }
    for name in ["lsid", "txnNumber", "autocommit"] {
        if let Some(value) = opened_by.body.get(name) {
            body.insert(name, value);
        }
    }
    Message { body, sequence: None }
}

/// Leaves one document for a statement to match.
fn narrow(message: &mut Message, call: &Call, n: Bson) {
    let Some((_, field)) = call.statement() else { return };
    let statement = match &mut message.sequence {
        Some((_, statements)) => statements.first_mut(),
        None => Some(&mut message.body),
    };
    if let Some(statement) = statement {
        let filter = statement.get(field).cloned().unwrap_or_else(|| doc! {}.into());
        statement.insert(field, doc! { "$and": [filter, { "n": n }] });
    }
}

fn tag_in(update: &Bson) -> Option<i32> {
    match update {
        Bson::Array(stages) => stages.iter().rev().find_map(tag_in),
        Bson::Document(update) => update
            .get_i32("tag")
            .ok()
            .or_else(|| update.get_document("$set").ok()?.get_i32("tag").ok()),
        _ => None,
    }
}

fn with_id(old: &RawDocument, id: ObjectId) -> RawDocumentBuf {
    let mut new = RawDocumentBuf::new();
    for (name, value) in old.iter().map_while(Result::ok) {
        if name.as_str() == "_id" {
            new.append(name, id);
        } else {
            new.append(name, value);
        }
    }
    new
}
