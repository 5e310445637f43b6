//! Random cases: which commands, in which order. The same seed makes the same case.

use bson::{Bson, Document, doc};
use halocline_tiering::DateKind;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::filters::{Breadth, Filter};
use super::step::{
    Call, Case, CursorStep, MayRefuse, OTHER, OUTPUT, Order, Step, TIERED, Transaction, date,
};
use super::values::{Dice, MINUTE};

/// Sessions of one client.
const SESSIONS: i32 = 4;
/// 20 `IllegalOperation`: a pipeline into a tiered collection.
const ILLEGAL: i32 = 20;
/// 115 `CommandNotSupported`.
const UNSUPPORTED: i32 = 115;
/// 263 `OperationNotSupportedInTransaction`.
const NOT_IN_TRANSACTION: i32 = 263;
/// 13 `Unauthorized`: Halocline's own sessions and database.
const UNAUTHORIZED: i32 = 13;

/// What a case is like.
#[derive(Debug, Clone, Copy)]
pub struct Profile {
    pub kind: DateKind,
    /// The collection has a unique index on `u`.
    pub unique: bool,
    pub documents: usize,
    pub commands: usize,
}

/// A case of that seed.
pub fn case(seed: u64, profile: Profile) -> Case {
    let mut dice = Dice::new(StdRng::seed_from_u64(seed));
    let mut documents: Vec<Document> = (0..profile.documents).map(|_| dice.document()).collect();
    if profile.unique {
        for document in &mut documents {
            let u = dice.unique_value();
            document.insert("u", u);
        }
    }
    let mut writer = Writer { dice, profile, steps: Vec::new(), number: 0, last: Vec::new() };
    let mut commands = 0;
    while commands < profile.commands {
        let step = writer.step();
        commands += match &step {
            Step::One(_) => 1,
            Step::Cursor(cursor) => 2 + cursor.between.len(),
            Step::Transaction(transaction) => 1 + transaction.calls.len(),
            Step::LetEvict => 0,
        };
        writer.steps.push(step);
    }
    Case { kind: profile.kind, unique: profile.unique, documents, steps: writer.steps }
}

impl Dice {
    /// A value of the unique index: few enough that they collide.
    fn unique_value(&mut self) -> Bson {
        Bson::Int32(self.below(400))
    }
}

struct Writer {
    dice: Dice,
    profile: Profile,
    steps: Vec<Step>,
    /// The last transaction number given out.
    number: i64,
    /// The last retryable write of each session, until another number is used there.
    last: Vec<(u8, Call)>,
}

impl Writer {
    fn step(&mut self) -> Step {
        match self.dice.below(200) {
            0..2 => return Step::LetEvict,
            2..12 => return Step::Cursor(self.cursor()),
            12..22 => return Step::Transaction(self.transaction()),
            22..28 => {
                if let Some(again) = self.retry() {
                    return Step::One(again);
                }
            }
            28..32 => return Step::One(self.refused()),
            _ => {}
        }
        let call = if self.dice.percent(45) { self.read() } else { self.write() };
        Step::One(call)
    }

    // Reads.

    fn read(&mut self) -> Call {
        let call = match self.dice.below(20) {
            0..10 => self.find(),
            10..15 => self.aggregate(),
            15..17 => self.count(),
            17..19 => self.distinct(),
            _ => self.malformed_read(),
        };
        self.with_read_options(call)
    }

    fn with_read_options(&mut self, mut call: Call) -> Call {
        if self.dice.percent(10) {
            let level = self.dice.pick(&["local", "majority", "available"]);
            call.body.insert("readConcern", doc! { "level": level });
            // What is not yet majority-committed it does not see, unless it waits.
            call.causal = level == "majority";
        }
        if self.dice.percent(30) {
            call.session = Some(self.session());
            call.causal |= !call.body.contains_key("readConcern") && self.dice.percent(50);
        }
        if self.dice.percent(5) {
            let comment = self.dice.pick(&["halocline:archive", "for the log"]);
            call.body.insert("comment", comment);
        }
        if self.dice.percent(10) {
            call.body.insert("maxTimeMS", 60_000);
        }
        if self.dice.percent(5) {
            call.body.insert("$readPreference", doc! { "mode": "primary" });
        }
        call.connection = usize::from(self.dice.percent(20));
        call
    }

    fn find(&mut self) -> Call {
        let filter = self.dice.filter();
        let mut body = doc! { "find": TIERED, "filter": filter.filter };
        if let Some(variables) = filter.variables {
            body.insert("let", variables);
        }
        let collation = self.dice.percent(8);
        if collation {
            body.insert("collation", self.dice.collation());
            if self.dice.percent(50) {
                body.insert("filter", doc! { "_id": self.dice.text_id() });
            }
        }
        let mut order = Order::Any;
        if self.dice.percent(45) {
            body.insert("sort", self.sort());
            // A collation may take two `_id`s for equal.
            order = if collation { Order::Any } else { Order::Total };
        }
        if self.dice.percent(30) {
            let limits = [1, 1, 2, 5, 20, 150];
            body.insert("limit", self.dice.pick(&limits));
            if self.dice.percent(20) {
                body.insert("skip", self.dice.below(4));
            }
            if order == Order::Any {
                order = Order::Some;
            }
            if self.dice.percent(30) {
                body.insert("singleBatch", true);
            }
        }
        if self.dice.percent(25) {
            body.insert("batchSize", self.dice.pick(&[0, 1, 2, 3, 10, 101]));
        }
        if self.dice.percent(30) {
            body.insert("projection", self.projection());
        }
        if self.dice.percent(8) {
            let hint = self.hint();
            body.insert("hint", hint);
        }
        if body.contains_key("singleBatch") && body.contains_key("batchSize") {
            body.remove("batchSize");
        }
        Call::new(body).ordered(order)
    }

    /// A total order.
    fn sort(&mut self) -> Document {
        let way = |dice: &mut Dice| dice.pick(&[1, -1]);
        match self.dice.below(10) {
            0..4 => doc! { "at": -1, "_id": 1 },
            4 => doc! { "at": 1, "n": 1, "_id": 1 },
            5 => doc! { "_id": way(&mut self.dice) },
            6 => doc! { "y": way(&mut self.dice), "_id": 1 },
            7 => doc! { "tags": way(&mut self.dice), "_id": -1 },
            8 => doc! { "x": way(&mut self.dice), "at": -1, "_id": 1 },
            _ => doc! { "sub.p": way(&mut self.dice), "s": 1, "_id": 1 },
        }
    }

    fn projection(&mut self) -> Document {
        let dice = &mut self.dice;
        match dice.below(10) {
            0 => doc! { "_id": 1 },
            1 => doc! { "x": 1, "at": 1 },
            2 => doc! { "_id": 0, "n": 1, "s": 1 },
            3 => doc! { "pad": 0, "items": 0 },
            4 => doc! { "tags": { "$slice": [1, 2] }, "pad": 0 },
            5 => doc! { "items": { "$elemMatch": { "k": dice.below(4) } }, "n": 1 },
            6 => doc! { "n": 1, "sum": { "$add": ["$x", 1] } },
            7 => doc! { "sub.p": 1, "items.k": 1 },
            8 => doc! { "_id": 0, "id": "$_id", "y": 1 },
            _ => doc! { "sub": { "p": 0 }, "pad": 0, "odd": 0 },
        }
    }

    fn hint(&mut self) -> Bson {
        let hints: [Bson; 8] = [
            "_id_".into(),
            doc! { "_id": 1 }.into(),
            "at_1".into(),
            doc! { "at": 1 }.into(),
            doc! { "x": 1, "at": -1 }.into(),
            doc! { "$natural": 1 }.into(),
            "no such index".into(),
            doc! { "n": -1 }.into(),
        ];
        self.dice.pick(&hints)
    }

    fn count(&mut self) -> Call {
        let filter = self.dice.filter();
        let mut body = doc! { "count": TIERED, "query": filter.filter };
        if filter.variables.is_some() {
            body.insert("query", self.dice.condition());
        }
        if self.dice.percent(15) {
            body.insert("limit", self.dice.pick(&[1, 3, -2]));
        }
        if self.dice.percent(10) {
            body.insert("skip", self.dice.below(4));
        }
        if self.dice.percent(8) {
            body.insert("collation", self.dice.collation());
        }
        Call::new(body)
    }

    fn distinct(&mut self) -> Call {
        let keys = ["x", "n", "s", "tags", "items.k", "sub.p", "at", "_id", "sub", "missing", "y"];
        let mut key = self.dice.pick(&keys);
        if key == "y" {
            // Equal numbers of different types: which one is shown, nobody says.
            key = "v";
        }
        let filter = self.dice.filter();
        let query = match filter.variables {
            Some(_) => doc! {},
            None => filter.filter,
        };
        Call::new(doc! { "distinct": TIERED, "key": key, "query": query })
    }

    fn aggregate(&mut self) -> Call {
        let filter = self.dice.filter();
        let variables = filter.variables.clone();
        let matching = doc! { "$match": filter.filter };
        let k = self.dice.below(6);
        let (mut pipeline, order) = match self.dice.below(18) {
            0 => (vec![matching], Order::Any),
            1 => (
                vec![matching, doc! { "$sort": self.sort() }, doc! { "$limit": k + 1 }],
                Order::Total,
            ),
            2 => {
                let newest = doc! { "$sort": { "at": -1, "_id": 1 } };
                (
                    vec![newest, doc! { "$limit": k * 10 + 1 }, doc! { "$project": { "n": 1 } }],
                    Order::Total,
                )
            }
            3 => (
                vec![
                    matching,
                    doc! { "$group": { "_id": "$x", "count": { "$sum": 1 }, "n": { "$sum": "$n" }, "newest": { "$max": "$n" } } },
                    doc! { "$sort": { "_id": 1 } },
                ],
                Order::Total,
            ),
            4 => (
                vec![
                    matching,
                    doc! { "$unwind": "$tags" },
                    doc! { "$group": { "_id": "$tags", "n": { "$sum": 1 } } },
                ],
                Order::Any,
            ),
            5 => (
                vec![
                    matching,
                    doc! { "$sort": { "_id": 1 } },
                    doc! { "$unwind": { "path": "$items", "includeArrayIndex": "i", "preserveNullAndEmptyArrays": true } },
                    doc! { "$project": { "n": 1, "i": 1, "items": 1 } },
                ],
                Order::Total,
            ),
            6 => (vec![matching, doc! { "$count": "n" }], Order::Total),
            7 => {
                let inner = vec![
                    doc! { "$match": { "$expr": { "$eq": ["$x", "$$x"] } } },
                    doc! { "$sort": { "_id": 1 } },
                    doc! { "$project": { "n": 1 } },
                ];
                let lookup = doc! { "$lookup": { "from": TIERED, "let": { "x": "$sub.p" }, "pipeline": inner, "as": "same" } };
                (vec![matching, lookup, doc! { "$project": { "n": 1, "same": 1 } }], Order::Any)
            }
            8 => (
                vec![
                    matching,
                    doc! { "$project": { "n": 1 } },
                    doc! { "$unionWith": { "coll": self.dice.pick(&[OTHER, TIERED]), "pipeline": [{ "$project": { "n": 1 } }] } },
                ],
                Order::Any,
            ),
            9 => {
                let facets = doc! {
                    "count": [{ "$count": "n" }],
                    "first": [{ "$sort": { "_id": 1 } }, { "$limit": 2 }, { "$project": { "n": 1 } }],
                };
                (vec![matching, doc! { "$facet": facets }], Order::Total)
            }
            10 => (
                vec![
                    matching,
                    doc! { "$sort": { "at": 1, "_id": 1 } },
                    doc! { "$group": { "_id": Bson::Null, "first": { "$first": "$n" }, "last": { "$last": "$n" } } },
                ],
                Order::Total,
            ),
            11 => (vec![doc! { "$project": { "x": 1, "at": 1 } }, matching], Order::Any),
            12 => {
                (vec![doc! { "$sort": { "_id": 1 } }, matching, doc! { "$skip": k }], Order::Total)
            }
            13 => (
                vec![
                    matching,
                    doc! { "$sort": { "_id": 1 } },
                    doc! { "$skip": 1 },
                    doc! { "$limit": 3 },
                    doc! { "$addFields": { "twice": { "$multiply": ["$n", 2] } } },
                ],
                Order::Total,
            ),
            14 => {
                let graph = doc! { "$graphLookup": {
                    "from": TIERED, "startWith": "$x", "connectFromField": "sub.p",
                    "connectToField": "x", "as": "reached", "maxDepth": 1,
                } };
                (
                    vec![
                        matching,
                        graph,
                        doc! { "$project": { "reached": { "$size": "$reached" } } },
                    ],
                    Order::Any,
                )
            }
            15 => (
                vec![
                    matching,
                    doc! { "$setWindowFields": {
                        "sortBy": { "n": 1 },
                        "output": { "rank": { "$sum": 1, "window": { "documents": ["unbounded", "current"] } } },
                    } },
                    doc! { "$project": { "n": 1, "rank": 1 } },
                ],
                Order::Any,
            ),
            16 => (vec![matching, doc! { "$limit": k + 1 }], Order::Some),
            _ => {
                return self.elsewhere();
            }
        };
        if self.dice.percent(10) {
            pipeline.push(doc! { "$addFields": { "seen": true } });
        }
        let mut body = doc! { "aggregate": TIERED, "pipeline": pipeline, "cursor": {} };
        if self.dice.percent(25) {
            body.insert("cursor", doc! { "batchSize": self.dice.pick(&[0, 1, 2, 10]) });
        }
        if let Some(variables) = variables {
            body.insert("let", variables);
        }
        if self.dice.percent(5) {
            body.insert("hint", self.hint());
        }
        Call::new(body).ordered(order)
    }

    /// Pipelines on, and into, untiered collections.
    fn elsewhere(&mut self) -> Call {
        let matching = doc! { "$match": self.dice.condition() };
        let lookup = doc! { "$lookup": {
            "from": TIERED, "localField": "n", "foreignField": "x", "as": "found",
            "pipeline": [{ "$sort": { "_id": 1 } }, { "$project": { "n": 1 } }],
        } };
        let (from, mut pipeline) = match self.dice.below(3) {
            0 => (OTHER, vec![doc! { "$match": { "n": { "$lt": 6 } } }, lookup]),
            1 => (TIERED, vec![matching, doc! { "$project": { "n": 1, "x": 1 } }]),
            _ => {
                let output = doc! { "find": OUTPUT, "filter": {} };
                return Call::new(output);
            }
        };
        if from == TIERED {
            let end = match self.dice.below(2) {
                0 => doc! { "$out": OUTPUT },
                _ => doc! { "$merge": { "into": OUTPUT, "on": "_id" } },
            };
            pipeline.push(end);
        }
        Call::new(doc! { "aggregate": from, "pipeline": pipeline, "cursor": {} })
    }

    /// Reads that a server refuses.
    fn malformed_read(&mut self) -> Call {
        let commands = [
            doc! { "find": TIERED, "filter": { "x": { "$bad": 1 } } },
            doc! { "find": TIERED, "filter": { "_id": 1, "x": { "$in": 1 } } },
            doc! { "find": TIERED, "filter": { "_id": { "$in": 1 } } },
            doc! { "find": TIERED, "filter": { "$or": [] } },
            doc! { "find": TIERED, "filter": { "at": { "$gte": date(10 * MINUTE) }, "$and": [{ "$bad": 1 }] } },
            doc! { "find": TIERED, "filter": {}, "limit": -1 },
            doc! { "find": TIERED, "filter": {}, "unknown": 1 },
            doc! { "find": TIERED, "filter": { "_id": 1 }, "projection": { "a": 1, "b": 0 } },
            doc! { "find": TIERED, "filter": { "_id": 1 }, "sort": { "a": 2 } },
            doc! { "find": TIERED, "filter": 5 },
            doc! { "find": TIERED, "filter": { "_id": 1 }, "collation": { "locale": "xx" } },
            doc! { "count": TIERED, "query": { "x": { "$bad": 1 } } },
            doc! { "distinct": TIERED, "query": {} },
            doc! { "aggregate": TIERED, "pipeline": [{ "$bad": 1 }], "cursor": {} },
            doc! { "aggregate": TIERED, "pipeline": [{ "$match": { "_id": 1 } }, { "$limit": 0 }], "cursor": {} },
            doc! { "aggregate": TIERED, "pipeline": [] },
            doc! { "find": TIERED, "filter": { "_id": 1 }, "let": { "a": "$$b" } },
            doc! { "find": TIERED, "filter": { "$expr": { "$eq": ["$x", "$$unknown"] } } },
            doc! { "find": TIERED, "filter": { "_id": 1 }, "readConcern": { "level": "odd" } },
            doc! { "find": TIERED, "filter": { "_id": 1 }, "maxTimeMS": -5 },
            doc! { "find": TIERED, "filter": { "_id": 1 }, "hint": "no such index" },
        ];
        Call::new(self.dice.pick(&commands))
    }

    // Writes.

    fn write(&mut self) -> Call {
        let call = match self.dice.below(20) {
            0..5 => self.insert(),
            5..8 => self.update_batch(),
            8..13 => self.update_one(),
            13..15 => self.delete(),
            15..18 => self.find_and_modify(),
            18 => self.delete_batch(),
            _ => self.malformed_write(),
        };
        self.with_write_options(call)
    }

    fn with_write_options(&mut self, mut call: Call) -> Call {
        let multi = call.sequence.as_ref().is_some_and(|(_, statements)| {
            statements.iter().any(|s| {
                s.get_bool("multi").unwrap_or(false) || s.get_i32("limit").is_ok_and(|n| n == 0)
            })
        });
        if self.dice.percent(50) {
            call.session = Some(self.session());
            if !multi && self.dice.percent(70) {
                call.number = Some(self.next_number());
            }
        }
        if self.dice.percent(5) {
            call.body.insert("writeConcern", doc! { "w": self.dice.pick(&[1, 1, 0]) });
        }
        let unacknowledged = call
            .body
            .get_document("writeConcern")
            .is_ok_and(|concern| concern.get_i32("w").is_ok_and(|w| w == 0));
        if unacknowledged {
            // What it did cannot be told, so it must be plain.
            let quiet = !call.follow && call.tag.is_none() && call.name() != "findAndModify";
            let upserts = call
                .sequence
                .as_ref()
                .is_some_and(|(_, s)| s.iter().any(|s| s.contains_key("upsert")));
            if quiet && !upserts {
                call.session = None;
                call.number = None;
                call.silent = true;
            } else {
                call.body.remove("writeConcern");
            }
        }
        if self.dice.percent(5) {
            call.body.insert("comment", "why");
        }
        if self.dice.percent(10) {
            call.body.insert("maxTimeMS", 60_000);
        }
        call.connection = if call.silent { 0 } else { usize::from(self.dice.percent(20)) };
        if let (Some(session), Some(_)) = (call.session, call.number) {
            self.last.retain(|(of, _)| *of != session);
            self.last.push((session, call.clone()));
        }
        call
    }

    /// The same retryable write once more, as after a lost reply.
    fn retry(&mut self) -> Option<Call> {
        if self.last.is_empty() {
            return None;
        }
        let at = usize::try_from(self.dice.below(i32::try_from(self.last.len()).unwrap())).unwrap();
        Some(self.last[at].1.clone())
    }

    fn session(&mut self) -> u8 {
        u8::try_from(self.dice.below(SESSIONS)).unwrap()
    }

    /// Leaves room for the attempts of a transaction.
    fn next_number(&mut self) -> i64 {
        self.number += 1000;
        self.number
    }

    /// A document to insert.
    fn new_document(&mut self) -> Document {
        let mut document = self.dice.document();
        if self.profile.unique {
            let u = self.dice.unique_value();
            document.insert("u", u);
        }
        document
    }

    fn insert(&mut self) -> Call {
        let mut body = doc! { "insert": TIERED };
        let mut count = 1;
        if self.dice.percent(40) {
            count += self.dice.below(5);
            body.insert("ordered", self.dice.percent(50));
        }
        let mut tag = None;
        let documents = if self.dice.percent(12) {
            let fresh = self.dice.tag();
            tag = Some(fresh);
            let tagged = |fields: &mut Document| fields.insert("tag", fresh);
            (0..count)
                .map(|_| {
                    let mut fields = self.dice.fields();
                    tagged(&mut fields);
                    fields
                })
                .collect()
        } else {
            let mut documents: Vec<Document> = (0..count).map(|_| self.new_document()).collect();
            if self.dice.percent(6) {
                let id = self.dice.impossible_id();
                documents[0].insert("_id", id);
            }
            documents
        };
        if self.dice.percent(3) {
            body.insert("bypassDocumentValidation", true);
        }
        let mut call = Call::new(body);
        call.sequence = Some(("documents".into(), documents));
        call.tag = tag;
        call
    }

    /// One statement of an update, and whether its choice of document must be followed.
    fn update_statement(&mut self, narrow: bool) -> (Document, bool, Option<Document>) {
        let many = self.dice.percent(if narrow { 30 } else { 40 });
        let mut upsert = self.dice.percent(25);
        let filter = if many || !narrow { self.dice.filter() } else { self.dice.narrow() };
        let Filter { mut filter, variables, breadth, by_id, .. } = filter;
        if upsert && makes_no_document(&filter) {
            upsert = false;
        }
        // Two that both make documents of many would need to be followed.
        let update = self.dice.update(many, upsert);
        let mut statement = doc! {};
        let positional = !many && !upsert && by_id && self.dice.percent(10);
        if positional {
            filter.insert("items.k", self.dice.below(4));
            statement.insert("u", doc! { "$set": { "items.$.q": self.dice.below(10) } });
        } else {
            statement.insert("u", update.update);
            if let Some(filters) = update.array_filters {
                statement.insert("arrayFilters", filters);
            }
        }
        statement.insert("q", filter);
        if many {
            statement.insert("multi", true);
        }
        if upsert {
            statement.insert("upsert", true);
            if self.dice.percent(20)
                && let Some(Bson::Document(update)) = statement.get_mut("u")
            {
                let id = self.dice.id();
                if let Ok(born) = update.get_document_mut("$setOnInsert") {
                    born.insert("_id", id);
                } else if !update.keys().any(|key| key.starts_with('$')) {
                    update.insert("_id", id);
                }
            }
        }
        if many && statement.get("u").is_some_and(is_replacement) {
            statement.remove("multi");
            return (statement, breadth == Breadth::Many, variables);
        }
        (statement, !many && breadth == Breadth::Many, variables)
    }

    fn update_one(&mut self) -> Call {
        let narrow = self.dice.percent(60);
        let (mut statement, mut follow, variables) = self.update_statement(narrow);
        let mut body = doc! { "update": TIERED };
        if let Some(variables) = variables {
            body.insert("let", variables);
        }
        if self.dice.percent(8) {
            statement.insert("collation", self.dice.collation());
            if self.dice.percent(60) {
                statement.insert("q", doc! { "_id": self.dice.text_id() });
            }
            follow |= !statement.contains_key("multi");
        }
        if self.dice.percent(6) {
            statement.insert("hint", self.hint());
        }
        let mut call = Call::new(body);
        if !follow && statement.contains_key("upsert") && self.dice.percent(8) {
            let stages = [doc! { "$replaceWith": { "$mergeObjects": ["$$ROOT", { "x": 1 }] } }];
            statement.insert("u", stages.to_vec());
            statement.remove("multi");
            statement.remove("arrayFilters");
            statement.insert("q", self.dice.narrow().filter);
            call.refusal = MayRefuse::With(UNSUPPORTED);
        }
        if follow {
            let tag = self.dice.tag();
            follow = mark(&mut statement, tag);
            if !follow {
                statement.insert("q", self.dice.by_id().filter);
            }
        }
        call.follow = follow;
        call.sequence = Some(("updates".into(), vec![statement]));
        call
    }

    fn update_batch(&mut self) -> Call {
        let mut body = doc! { "update": TIERED };
        if self.dice.percent(60) {
            body.insert("ordered", self.dice.percent(50));
        }
        let mut statements = Vec::new();
        let only_single = self.dice.percent(50);
        for _ in 0..2 + self.dice.below(4) {
            let (mut statement, follow, variables) = self.update_statement(true);
            if follow || variables.is_some() {
                continue;
            }
            if only_single && statement.contains_key("multi") {
                statement.remove("multi");
                statement.insert("q", self.dice.by_id().filter);
            }
            statements.push(statement);
        }
        let mut call = Call::new(body);
        call.sequence = Some(("updates".into(), statements));
        call
    }

    fn delete_statement(&mut self) -> (Document, bool) {
        if self.dice.percent(30) {
            // Not too many at once.
            let n = self.dice.known_serial();
            let mut filter = self.dice.filter();
            while filter.variables.is_some() {
                filter = self.dice.filter();
            }
            let few = doc! { "n": { "$gte": n, "$lt": n + 10 } };
            return (doc! { "q": { "$and": [filter.filter, few] }, "limit": 0 }, false);
        }
        let filter = if self.dice.percent(70) { self.dice.narrow() } else { self.dice.by_date() };
        (doc! { "q": filter.filter, "limit": 1 }, filter.breadth == Breadth::Many)
    }

    fn delete(&mut self) -> Call {
        let (mut statement, mut follow) = self.delete_statement();
        if self.dice.percent(8) {
            statement.insert("collation", self.dice.collation());
            if self.dice.percent(60) && statement.get_i32("limit").is_ok_and(|n| n == 1) {
                statement.insert("q", doc! { "_id": self.dice.text_id() });
                follow = true;
            }
        }
        if self.dice.percent(5) {
            statement.insert("hint", self.hint());
        }
        let mut call = Call::new(doc! { "delete": TIERED });
        call.follow = follow;
        call.sequence = Some(("deletes".into(), vec![statement]));
        call
    }

    fn delete_batch(&mut self) -> Call {
        let mut body = doc! { "delete": TIERED };
        if self.dice.percent(60) {
            body.insert("ordered", self.dice.percent(50));
        }
        let statements: Vec<Document> = (0..4)
            .map(|_| self.delete_statement())
            .filter(|(_, follow)| !follow)
            .map(|(statement, _)| statement)
            .collect();
        let mut call = Call::new(body);
        call.sequence = Some(("deletes".into(), statements));
        call
    }

    fn find_and_modify(&mut self) -> Call {
        let sorted = self.dice.percent(30);
        let filter =
            if sorted || self.dice.percent(30) { self.dice.filter() } else { self.dice.narrow() };
        let mut follow = !sorted && filter.breadth == Breadth::Many;
        let mut body = doc! { "findAndModify": TIERED, "query": filter.filter };
        if let Some(variables) = filter.variables {
            body.insert("let", variables);
        }
        if sorted {
            body.insert("sort", self.sort());
        }
        if self.dice.percent(30) {
            body.insert("remove", true);
        } else {
            let upsert = !follow
                && self.dice.percent(25)
                && body.get_document("query").is_ok_and(|query| !makes_no_document(query));
            let update = self.dice.update(false, upsert);
            body.insert("update", update.update);
            if let Some(filters) = update.array_filters {
                body.insert("arrayFilters", filters);
            }
            if upsert {
                body.insert("upsert", true);
            }
            if self.dice.percent(50) {
                body.insert("new", true);
            }
        }
        if self.dice.percent(6) && !body.contains_key("upsert") {
            body.insert("collation", self.dice.collation());
            follow = true;
            body.remove("sort");
        }
        if !follow && self.dice.percent(20) {
            let fields = self.projection();
            body.insert("fields", fields);
        }
        let mut call = Call::new(body);
        call.follow = follow;
        call
    }

    /// Writes that a server refuses, some of them only once a document matches.
    fn malformed_write(&mut self) -> Call {
        let id = self.dice.id();
        let old = self.dice.known_serial();
        let update = |u: Bson, more: Document| {
            let mut statement = doc! { "q": { "_id": id.clone() }, "u": u };
            statement.extend(more);
            ("update", "updates", vec![statement])
        };
        let operator = || Bson::Document(doc! { "$set": { "x": 1 } });
        let (name, field, statements) = match self.dice.below(15) {
            0 => update(doc! { "$bad": { "x": 1 } }.into(), doc! {}),
            1 => update(doc! { "$set": { "x": 1 }, "y": 1 }.into(), doc! {}),
            2 => update(doc! { "x": 1 }.into(), doc! { "multi": true }),
            3 => update(operator(), doc! { "q": { "x": { "$bad": 1 } } }),
            4 => update(operator(), doc! { "q": { "x": { "$bad": 1 } }, "multi": true }),
            5 => update(operator(), doc! { "q": { "n": old, "$or": [] } }),
            6 => update(Bson::Array(vec![doc! { "$group": { "_id": 1 } }.into()]), doc! {}),
            7 => update(doc! { "$set": { "items.$[no].q": 1 } }.into(), doc! {}),
            8 => update(doc! { "$set": { "x": 1 }, "$inc": { "x": 1 } }.into(), doc! {}),
            9 => update(5.into(), doc! {}),
            10 => update(operator(), doc! { "unknown": 1 }),
            11 => ("delete", "deletes", vec![doc! { "q": { "x": { "$bad": 1 } }, "limit": 0 }]),
            12 => ("delete", "deletes", vec![doc! { "q": { "_id": id.clone() }, "limit": 2 }]),
            13 => ("delete", "deletes", vec![doc! { "q": { "_id": id.clone() } }]),
            _ => {
                let bodies = [
                    doc! { "findAndModify": TIERED, "query": { "_id": id.clone() } },
                    doc! { "findAndModify": TIERED, "query": { "_id": id.clone() }, "remove": true, "new": true },
                    doc! { "findAndModify": TIERED, "query": { "_id": id.clone() }, "update": { "$bad": 1 } },
                    doc! { "findAndModify": TIERED, "query": { "x": { "$bad": 1 } }, "remove": true },
                    doc! { "findAndModify": TIERED, "query": { "x": { "$bad": 1 } }, "sort": { "_id": 1 }, "remove": true },
                    doc! { "insert": TIERED, "documents": [] },
                    doc! { "update": TIERED, "updates": [] },
                    doc! { "insert": TIERED },
                    doc! { "update": TIERED, "updates": [{ "q": 5, "u": {} }] },
                ];
                return Call::new(self.dice.pick(&bodies));
            }
        };
        let mut call = Call::new(doc! { name: TIERED });
        call.sequence = Some((field.into(), statements));
        call
    }

    // Several commands that belong together.

    fn cursor(&mut self) -> CursorStep {
        let mut open = loop {
            let call = if self.dice.percent(70) { self.find() } else { self.aggregate() };
            let writes = call.body.get_array("pipeline").is_ok_and(|stages| {
                stages
                    .iter()
                    .filter_map(Bson::as_document)
                    .any(|s| s.contains_key("$out") || s.contains_key("$merge"))
            });
            if !writes {
                break self.with_read_options(call);
            }
        };
        // The same session on every getMore, and no time limit, which only some cursors may have.
        open.body.remove("singleBatch");
        open.body.remove("maxTimeMS");
        let size = self.dice.pick(&[0, 1, 2, 3, 7]);
        if open.name() == "find" {
            open.body.insert("batchSize", size);
        } else {
            open.body.insert("cursor", doc! { "batchSize": size });
        }
        let batches = (0..=self.dice.below(3)).map(|_| self.dice.pick(&[1, 2, 5, 50])).collect();
        let mut between = Vec::new();
        for _ in 0..self.dice.below(4) {
            let call = if self.dice.percent(50) { self.find() } else { self.count() };
            between.push(self.with_read_options(call));
        }
        let kill_after =
            self.dice.percent(20).then(|| usize::try_from(self.dice.below(3)).unwrap());
        CursorStep { open, batches, between, let_evict: self.dice.percent(8), kill_after }
    }

    fn transaction(&mut self) -> Transaction {
        let session = self.session();
        self.last.retain(|(of, _)| *of != session);
        let number = self.next_number();
        let untiered = self.dice.percent(8);
        let mut calls = Vec::new();
        for _ in 0..1 + self.dice.below(5) {
            let call =
                if untiered { self.untiered_in_transaction() } else { self.in_transaction() };
            calls.push(call);
        }
        if self.dice.percent(4) {
            // It crosses, unless it is the only one.
            let mut other = self.untiered_in_transaction();
            other.refusal = MayRefuse::With(NOT_IN_TRANSACTION);
            calls.push(other);
        }
        let read_concern =
            self.dice.pick(&[None, Some("snapshot"), Some("majority"), Some("local")]);
        Transaction { session, number, read_concern, calls, commit: self.dice.percent(80) }
    }

    fn untiered_in_transaction(&mut self) -> Call {
        let n = self.dice.below(20);
        if self.dice.percent(50) {
            return Call::new(doc! { "find": OTHER, "filter": { "n": { "$lt": n } } });
        }
        let mut call = Call::new(doc! { "update": OTHER });
        call.sequence =
            Some(("updates".into(), vec![doc! { "q": { "_id": n }, "u": { "$inc": { "c": 1 } } }]));
        call
    }

    fn in_transaction(&mut self) -> Call {
        let may = MayRefuse::With(NOT_IN_TRANSACTION);
        let mut call = match self.dice.below(12) {
            0..3 => {
                let filter = self.dice.by_id();
                Call::new(doc! { "find": TIERED, "filter": filter.filter })
            }
            3 => {
                let filter = self.dice.by_date();
                let body =
                    doc! { "find": TIERED, "filter": filter.filter, "sort": { "n": 1, "_id": 1 } };
                Call { refusal: may, ..Call::new(body).ordered(Order::Total) }
            }
            4 => {
                let filter = self.dice.by_id();
                let pipeline =
                    [doc! { "$match": filter.filter }, doc! { "$project": { "n": 1, "v": 1 } }];
                Call::new(doc! { "aggregate": TIERED, "pipeline": pipeline.to_vec(), "cursor": {} })
            }
            5..7 => {
                let mut call = self.insert();
                call.tag = None;
                let documents: Vec<Document> =
                    (0..1 + self.dice.below(3)).map(|_| self.new_document()).collect();
                call.sequence = Some(("documents".into(), documents));
                call
            }
            7..9 => {
                let filter = self.dice.by_id();
                let upsert = self.dice.percent(20);
                let update = self.dice.update(false, upsert);
                let mut statement = doc! { "q": filter.filter, "u": update.update };
                if let Some(filters) = update.array_filters {
                    statement.insert("arrayFilters", filters);
                }
                if upsert {
                    statement.insert("upsert", true);
                }
                let mut call = Call::new(doc! { "update": TIERED });
                call.sequence = Some(("updates".into(), vec![statement]));
                call
            }
            9 => {
                let filter = self.dice.by_id();
                let mut call = Call::new(doc! { "delete": TIERED });
                call.sequence =
                    Some(("deletes".into(), vec![doc! { "q": filter.filter, "limit": 1 }]));
                call
            }
            10 => {
                let filter = self.dice.by_id();
                let update = self.dice.update(false, false);
                let mut body = doc! { "findAndModify": TIERED, "query": filter.filter, "update": update.update, "new": true };
                if let Some(filters) = update.array_filters {
                    body.insert("arrayFilters", filters);
                }
                Call::new(body)
            }
            _ => {
                // Of many: only inside the window.
                let filter = self.dice.by_date();
                let update =
                    doc! { "q": filter.filter, "u": { "$inc": { "v": 1 } }, "multi": true };
                let mut call = Call::new(doc! { "update": TIERED });
                call.refusal = may;
                call.sequence = Some(("updates".into(), vec![update]));
                call
            }
        };
        if call.body.contains_key("ordered") && self.dice.percent(50) {
            call.body.remove("ordered");
        }
        call
    }

    /// What Halocline refuses by design.
    fn refused(&mut self) -> Call {
        let all = [
            (doc! { "aggregate": TIERED, "pipeline": [{ "$out": TIERED }], "cursor": {} }, ILLEGAL),
            (
                doc! { "aggregate": OTHER, "pipeline": [{ "$merge": { "into": TIERED } }], "cursor": {} },
                ILLEGAL,
            ),
            (
                doc! { "createIndexes": TIERED, "indexes": [{ "key": { "z": 1 }, "name": "z_1" }] },
                UNSUPPORTED,
            ),
            (doc! { "drop": TIERED }, UNSUPPORTED),
            (doc! { "collMod": TIERED }, UNSUPPORTED),
            (doc! { "unknownCommand": TIERED }, UNSUPPORTED),
            (doc! { "bulkWrite": 1, "ops": [], "nsInfo": [] }, UNSUPPORTED),
            (
                doc! { "find": TIERED, "lsid": { "id": Bson::Binary(bson::Binary {
                    subtype: bson::spec::BinarySubtype::Uuid, bytes: b"haloclin01234567".to_vec(),
                }) } },
                UNAUTHORIZED,
            ),
            (doc! { "find": "boundaries", "$db": "halocline" }, UNAUTHORIZED),
        ];
        let (body, code) = self.dice.pick(&all);
        Call { refusal: MayRefuse::Always(code), ..Call::new(body) }
    }
}

fn is_replacement(update: &Bson) -> bool {
    update.as_document().is_some_and(|update| !update.keys().any(|key| key.starts_with('$')))
}

/// Not from every filter can a new document be taken: some fail, some give fields of the wrong types,
/// and from some Halocline cannot tell which `_id` the document would have.
fn makes_no_document(filter: &Document) -> bool {
    filter.iter().any(|(name, value)| match (name.as_str(), value) {
        ("_id", Bson::Document(condition)) => condition.iter().any(|(operator, operand)| {
            let one = operand.as_array().is_some_and(|ids| ids.len() == 1);
            operator.starts_with('$') && operator != "$eq" && !(operator == "$in" && one)
        }),
        ("_id", Bson::RegularExpression(_)) => true,
        ("_id", _) => false,
        ("n" | "v" | "x", value) => value.as_document().is_some(),
        _ => true,
    })
}

/// Makes a statement leave a mark on the document it changes. False: it cannot.
fn mark(statement: &mut Document, tag: i32) -> bool {
    match statement.get_mut("u") {
        Some(Bson::Array(stages)) => stages.push(doc! { "$set": { "tag": tag } }.into()),
        Some(Bson::Document(update)) if update.keys().any(|key| key.starts_with('$')) => {
            match update.get_document_mut("$set") {
                Ok(set) => set.insert("tag", tag),
                Err(_) => update.insert("$set", doc! { "tag": tag }),
            };
        }
        Some(Bson::Document(replacement)) => {
            replacement.insert("tag", tag);
        }
        _ => return false,
    }
    true
}
