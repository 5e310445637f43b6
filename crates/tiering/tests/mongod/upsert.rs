//! An upsert gives its document the `_id` that was foretold.

use bson::raw::{RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf};
use bson::{Bson, Document, doc};
use halocline_tiering::key::Key;
use halocline_tiering::upsert::{UpsertId, upsert_id};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};

use crate::server::{document, shared};
use crate::values::embedded;

/// Filters with and without an `_id`, some of which only mongod reads as one.
fn filter() -> impl Strategy<Value = RawDocumentBuf> {
    let id = select(vec![
        RawBson::Int32(5),
        RawBson::Double(5.0),
        RawBson::Null,
        RawBson::String("a".into()),
        embedded([("a", RawBson::Int32(5))]),
    ]);
    let list = prop::collection::vec(id.clone(), 0..3)
        .prop_map(|list| RawBson::Array(list.into_iter().collect::<RawArrayBuf>()));
    let operator = prop_oneof![
        3 => (select(vec!["$eq", "$gte", "$ne"]), id.clone()),
        2 => (select(vec!["$in", "$all", "$nin"]), list),
    ];
    let condition = prop_oneof![
        2 => id,
        3 => prop::collection::vec(operator, 1..3).prop_map(embedded),
    ];
    let name = select(vec!["_id", "_id", "_id.a", "x", "y"]);
    let leaf = prop::collection::vec((name, condition), 0..3).prop_map(document);
    leaf.prop_recursive(2, 5, 2, |inner| {
        let branches = prop::collection::vec(inner.clone(), 1..3);
        (select(vec!["$and", "$or", "$nor"]), branches, inner, any::<bool>()).prop_map(
            |(name, branches, beside, with)| {
                let mut filter = if with { beside } else { RawDocumentBuf::new() };
                let name = bson::raw::CString::try_from(name.to_owned()).expect("a name");
                filter.append(&*name, branches.into_iter().collect::<RawArrayBuf>());
                filter
            },
        )
    })
}

fn updates() -> Vec<Bson> {
    vec![
        doc! { "$set": { "z": 1 } }.into(),
        doc! { "$set": { "_id": 7 } }.into(),
        doc! { "$setOnInsert": { "_id": 7, "z": 1 } }.into(),
        doc! { "$setOnInsert": { "_id.a": 7 } }.into(),
        doc! { "$set": { "_id": 7 }, "$setOnInsert": { "_id.b": 7 } }.into(),
        doc! { "$inc": { "_id": 1 } }.into(),
        doc! { "$rename": { "x": "_id" } }.into(),
        doc! { "$rename": { "_id": "x" } }.into(),
        doc! { "$unset": { "_id": 1 } }.into(),
        doc! { "$currentDate": { "_id": true } }.into(),
        doc! {}.into(),
        doc! { "z": 1 }.into(),
        doc! { "_id": 7, "z": 1 }.into(),
        vec![Bson::from(doc! { "$set": { "z": 1 } })].into(),
        vec![Bson::from(doc! { "$set": { "_id": 7 } })].into(),
        vec![Bson::from(doc! { "$addFields": { "_id": "$x" } })].into(),
        vec![Bson::from(doc! { "$unset": ["z", "x"] })].into(),
        vec![Bson::from(doc! { "$unset": "_id" })].into(),
        vec![Bson::from(doc! { "$project": { "_id": 0, "x": 1 } })].into(),
        vec![Bson::from(doc! { "$replaceWith": { "z": 1 } })].into(),
        vec![Bson::from(doc! { "$replaceWith": { "_id": 7 } })].into(),
        Vec::<Bson>::new().into(),
    ]
}

fn readable(document: &RawDocument) -> String {
    Document::try_from(document).map_or_else(|error| error.to_string(), |one| one.to_string())
}

#[test]
fn an_upsert_inserts_under_the_foretold_id() {
    let server = shared();
    server.fresh("upsert", &[]);
    let (known, generated) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let cases = (filter(), select(updates()));
    let config = Config { cases: 3_000, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&cases, |(filter, update)| {
        let update = RawBson::try_from(update).expect("bson");
        let foretold = upsert_id(&filter, RawBsonRef::from(&update));
        if foretold == UpsertId::Unclear {
            return Ok(());
        }
        // The collection is empty before each: what an upsert inserted is removed at once.
        let statement = document([
            ("q", RawBson::Document(filter.clone())),
            ("u", update.clone()),
            ("upsert", RawBson::Boolean(true)),
        ]);
        let text = readable(&statement);
        let updates = [statement].into_iter().collect::<RawArrayBuf>();
        let command = document([
            ("update", RawBson::String("upsert".into())),
            ("updates", RawBson::Array(updates)),
        ]);
        let Ok(reply) = server.try_run(command) else { return Ok(()) };
        let Ok(upserted) = reply.get_array("upserted") else { return Ok(()) };
        let upserted = upserted.get(0).expect("bson").expect("one");
        let id = upserted.as_document().expect("one").get("_id").expect("bson").expect("an _id");
        let remove = doc! { "delete": "upsert", "deletes": [{ "q": {}, "limit": 0 }] };
        server.run(RawDocumentBuf::try_from(remove).expect("bson"));
        match foretold {
            UpsertId::Known(foretold) => {
                known.set(known.get() + 1);
                prop_assert_eq!(Key::new(foretold), Key::new(id), "{}", text);
            }
            _ => {
                generated.set(generated.get() + 1);
                prop_assert!(id.as_object_id().is_some(), "{} gave {:?}", text, id);
            }
        }
        Ok(())
    });
    outcome.expect("what was foretold");
    assert!(known.get() > 40 && generated.get() > 40, "{} {}", known.get(), generated.get());
}
