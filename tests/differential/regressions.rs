//! Cases that once went wrong, each named after what must hold.

use bson::{Bson, Document, doc};
use halocline_tiering::DateKind;

use super::step::{Call, Case, Order, Step, TIERED, date};
use super::values::DAY;

/// Name and case.
pub fn all() -> Vec<(&'static str, Case)> {
    let mut all = vec![
        ("an unacknowledged write reaches a document on the archive", unacknowledged()),
        ("what a server refuses to do to many documents is done to none", malformed_of_many()),
        ("what is malformed is refused in the server's words", malformed()),
        ("an upsert that was recorded answers its repetition", repeated_upsert()),
        ("an _id that no document can have is refused by the server", impossible_ids()),
        ("a collation that takes two _ids for one does not change one twice", collation_of_many()),
    ];
    // It needs a moment that is not met every time.
    for _ in 0..4 {
        let name = "an insert never succeeds because its key is just being evicted";
        all.push((name, insert_races_eviction()));
    }
    all
}

/// Documents far below the boundary: they are on the archive, and leave the fast tier soon after they
/// came.
fn old(ids: std::ops::Range<i32>) -> Vec<Document> {
    ids.map(|id| doc! { "_id": id, "n": id, "x": id % 5, "at": date(-DAY), "v": 0 }).collect()
}

fn case(documents: Vec<Document>, steps: Vec<Step>) -> Case {
    Case { kind: DateKind::Date, unique: false, documents, steps }
}

fn with(body: Document, sequence: &str, documents: Vec<Document>) -> Call {
    Call { sequence: Some((sequence.into(), documents)), ..Call::new(body) }
}

fn update(statement: Document) -> Call {
    with(doc! { "update": TIERED }, "updates", vec![statement])
}

fn delete(statement: Document) -> Call {
    with(doc! { "delete": TIERED }, "deletes", vec![statement])
}

/// Everything there is.
fn look() -> Step {
    Step::One(Call::new(doc! { "find": TIERED, "sort": { "_id": 1 } }).ordered(Order::Total))
}

fn unacknowledged() -> Case {
    let silent = |mut call: Call| {
        call.body.insert("writeConcern", doc! { "w": 0 });
        Step::One(Call { silent: true, ..call })
    };
    let bump = doc! { "$inc": { "v": 1 } };
    let steps = vec![
        silent(update(doc! { "q": { "_id": 1 }, "u": &bump })),
        look(),
        silent(update(doc! { "q": { "n": 2 }, "u": &bump })),
        look(),
        silent(update(doc! { "q": { "x": 3 }, "u": &bump, "multi": true })),
        look(),
        silent(delete(doc! { "q": { "_id": 4 }, "limit": 1 })),
        look(),
        silent(delete(doc! { "q": { "x": 0 }, "limit": 0 })),
        look(),
    ];
    case(old(0..10), steps)
}

/// Sent one document at a time, such statements lose what the server would refuse.
fn malformed_of_many() -> Case {
    let bump = || Bson::Document(doc! { "$inc": { "v": 1 } });
    let broad = || doc! { "x": { "$lt": 3 } };
    let by_ids = || doc! { "_id": { "$in": [1, 2, 3] } };
    let mut steps = Vec::new();
    for filter in [broad(), by_ids()] {
        let statements = [
            doc! { "q": &filter, "u": { "replaced": true }, "multi": true },
            doc! { "q": &filter, "u": bump(), "multi": true, "hint": "no such index" },
            doc! { "q": &filter, "u": bump(), "multi": true, "unknown": 1 },
            doc! { "q": &filter, "u": { "$set": { "a.$[no].b": 1 } }, "multi": true },
        ];
        steps.extend(statements.into_iter().map(|s| Step::One(update(s))));
        let statements = [
            doc! { "q": &filter, "limit": 2 },
            doc! { "q": &filter },
            doc! { "q": &filter, "limit": 0, "hint": "no such index" },
        ];
        steps.extend(statements.into_iter().map(|s| Step::One(delete(s))));
        steps.push(look());
    }
    let modify =
        doc! { "findAndModify": TIERED, "query": broad(), "sort": { "_id": 1 }, "update": bump() };
    for more in [doc! { "hint": "no such index" }, doc! { "remove": true }, doc! { "unknown": 1 }] {
        let mut body = modify.clone();
        body.extend(more);
        steps.push(Step::One(Call::new(body)));
    }
    steps.push(look());
    case(old(0..10), steps)
}

fn malformed() -> Case {
    let bad = || doc! { "x": { "$bad": 1 } };
    let bump = doc! { "$inc": { "v": 1 } };
    let one = doc! { "q": { "_id": 1 }, "u": &bump };
    let calls = vec![
        update(doc! { "q": bad(), "u": &bump }),
        update(doc! { "q": bad(), "u": &bump, "multi": true }),
        delete(doc! { "q": bad(), "limit": 0 }),
        with(
            doc! { "update": TIERED, "ordered": false },
            "updates",
            vec![one.clone(), doc! { "q": bad(), "u": &bump, "multi": true }, one.clone()],
        ),
        with(doc! { "update": TIERED }, "updates", vec![one, doc! { "q": 5, "u": &bump }]),
        Call::new(
            doc! { "findAndModify": TIERED, "query": bad(), "sort": { "x": 1 }, "remove": true },
        ),
        Call::new(doc! { "update": TIERED, "updates": [] }),
        Call::new(doc! { "update": TIERED }),
        Call::new(doc! { "delete": TIERED, "deletes": [] }),
        Call::new(doc! { "insert": TIERED, "documents": [] }),
        Call::new(doc! { "insert": TIERED }),
    ];
    let mut steps: Vec<Step> = calls.into_iter().map(Step::One).collect();
    steps.push(look());
    case(old(0..10), steps)
}

fn repeated_upsert() -> Case {
    let body = doc! {
        "findAndModify": TIERED, "query": { "n": 77 }, "upsert": true, "new": true,
        "update": { "$inc": { "v": 1 }, "$setOnInsert": { "_id": 77 } },
    };
    let modify =
        |number| Call { session: Some(1), number: Some(number), ..Call::new(body.clone()) };
    let statement = doc! { "q": { "n": 78 }, "u": { "$inc": { "v": 1 }, "$setOnInsert": { "_id": 78 } }, "upsert": true };
    let change = Call { session: Some(2), number: Some(1), ..update(statement) };
    let steps = [modify(1), modify(1), modify(2), modify(2), change.clone(), change];
    case(old(0..5), steps.into_iter().map(Step::One).chain([look()]).collect())
}

fn impossible_ids() -> Case {
    let regex = bson::Regex { pattern: "a".try_into().unwrap(), options: "".try_into().unwrap() };
    let ids = [
        Bson::Undefined,
        Bson::Array(vec![1.into()]),
        Bson::RegularExpression(regex),
        doc! { "$x": 1 }.into(),
        doc! { "x": 1, "$y": 1 }.into(),
        doc! { "x": { "$y": 1 } }.into(),
    ];
    let mut steps = Vec::new();
    for id in ids {
        for ordered in [true, false] {
            let documents = vec![doc! { "_id": 100 }, doc! { "_id": &id }, doc! { "_id": 1 }];
            steps.push(Step::One(with(
                doc! { "insert": TIERED, "ordered": ordered },
                "documents",
                documents,
            )));
        }
        let born = doc! { "$setOnInsert": { "_id": id } };
        steps.push(Step::One(update(doc! { "q": { "n": 55 }, "u": born, "upsert": true })));
        steps.push(look());
    }
    case(old(0..5), steps)
}

/// The documents are changed one by one, each named by an `_id` that the collation takes for others'.
fn collation_of_many() -> Case {
    let texts = ["abc", "ABC", "a.c", "ä", "a", "A", "k\0", ""];
    let mut documents = old(0..3);
    for (n, id) in (10..).zip(texts) {
        documents.push(doc! { "_id": id, "n": n, "x": 1, "at": date(-DAY), "v": 0 });
        documents.push(doc! { "_id": { "z": id }, "n": n + 100, "x": 2, "at": date(-DAY), "v": 0 });
    }
    let bump = doc! { "$inc": { "v": 1 } };
    let mut steps = Vec::new();
    for strength in [1, 2] {
        let collation = || doc! { "locale": "en", "strength": strength };
        for id in ["ABC", "a", "k\0"] {
            for filter in [
                doc! { "_id": id },
                doc! { "_id": { "z": id } },
                doc! { "x": 1, "_id": { "$ne": id } },
            ] {
                let statement =
                    doc! { "q": filter, "u": &bump, "multi": true, "collation": collation() };
                steps.extend([Step::One(update(statement)), look()]);
            }
        }
        let body = doc! {
            "findAndModify": TIERED, "query": { "_id": "A" }, "sort": { "n": -1 }, "update": &bump,
            "new": true, "collation": collation(),
        };
        steps.extend([Step::One(Call::new(body)), look()]);
        let statement = doc! { "q": { "_id": "Abc" }, "limit": 0, "collation": collation() };
        steps.extend([Step::One(delete(statement)), look()]);
    }
    case(documents, steps)
}

/// The key was seen on the fast tier, so the insert had to fail; but the evictor took it in between.
fn insert_races_eviction() -> Case {
    let insert = |id: i32| {
        let document = doc! { "_id": id, "n": 1000 + id, "at": Bson::Null };
        Step::One(with(doc! { "insert": TIERED }, "documents", vec![document]))
    };
    case(old(0..8), (0..250).flat_map(|_| (0..8).map(insert)).collect())
}
