//! What a route promises of a query holds on a mongod: a point names at most its own document, a
//! unique value at most one, and the newest are the newest.

use std::collections::HashSet;

use bson::raw::{RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use bson::{Bson, Document, doc};
use halocline_tiering::date::{DateField, DateKind, DatePoint};
use halocline_tiering::key::Key;
use halocline_tiering::route::{
    CollectionView, IndexDefinition, ReadQuery, ReadRoute, WriteTarget, keys_of, route_read,
    route_write_filter,
};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};

use crate::coverage::{filter, universe};
use crate::server::{Server, document, shared};
use crate::values::{MIDDLE, array, embedded, nested, singles};

fn config(cases: u32) -> Config {
    Config { cases, failure_persistence: None, ..Config::default() }
}

fn key(value: &RawBson) -> Key {
    Key::new(RawBsonRef::from(value)).expect("a key")
}

fn readable(document: &RawDocument) -> String {
    Document::try_from(document).map_or_else(|error| error.to_string(), |one| one.to_string())
}

/// `_id`s of every type, of which `present` are in the collection.
struct Ids {
    all: Vec<RawBson>,
    present: HashSet<Key>,
}

impl Ids {
    fn insert(server: &Server, coll: &str) -> Self {
        server.fresh(coll, &[]);
        let mut all: Vec<_> = singles();
        all.extend(singles().into_iter().take(40).map(|one| embedded([("x", one)])));
        all.extend(singles().into_iter().take(40).map(|one| embedded([("x", array([one]))])));
        let documents: Vec<_> = all
            .iter()
            .enumerate()
            // Every third `_id` stays absent.
            .filter(|(number, _)| number % 3 != 0)
            .map(|(number, id)| {
                document([("_id", id.clone()), ("x", RawBson::Int32((number % 4) as i32))])
            })
            .collect();
        let refused: HashSet<_> =
            server.insert(coll, &documents).into_iter().map(|(position, _)| position).collect();
        let present = documents
            .iter()
            .enumerate()
            .filter(|(position, _)| !refused.contains(position))
            .map(|(_, document)| Key::of(document).expect("a key"))
            .collect();
        Self { all, present }
    }
}

/// Conditions on `_id` and on another field, as clients write them and worse.
fn id_filter(ids: Vec<RawBson>) -> impl Strategy<Value = RawDocumentBuf> {
    let id = prop_oneof![8 => select(ids), 1 => nested()];
    let list = prop::collection::vec(id.clone(), 0..4);
    let operator = prop_oneof![
        3 => id.clone().prop_map(|id| ("$eq", id)),
        3 => list.clone().prop_map(|list| ("$in", array(list))),
        2 => (select(vec!["$gt", "$gte", "$lt", "$lte", "$ne"]), id.clone()),
        1 => list.prop_map(|list| ("$nin", array(list))),
        1 => id.clone().prop_map(|id| ("$not", embedded([("$eq", id)]))),
        1 => Just(("$exists", RawBson::Boolean(true))),
        1 => id.clone().prop_map(|id| ("$elemMatch", embedded([("$eq", id)]))),
    ];
    let condition = prop_oneof![
        3 => id.clone(),
        4 => prop::collection::vec(operator, 1..3).prop_map(embedded),
    ];
    let leaf = prop_oneof![
        6 => condition.clone().prop_map(|one| document([("_id", one)])),
        2 => (condition, 0..4).prop_map(|(one, x)| {
            document([("_id", one), ("x", RawBson::Int32(x))])
        }),
        1 => (0..4).prop_map(|x| document([("x", RawBson::Int32(x))])),
        1 => id.prop_map(|id| {
            let sides = array([RawBson::String("$_id".into()), embedded([("$literal", id)])]);
            document([("$expr", embedded([("$eq", sides)]))])
        }),
    ];
    leaf.prop_recursive(2, 6, 3, |inner| {
        let branches = prop::collection::vec(inner.clone(), 1..3);
        (select(vec!["$and", "$and", "$or", "$nor"]), branches, inner, any::<bool>()).prop_map(
            |(name, branches, beside, with)| {
                let mut filter = if with { beside } else { RawDocumentBuf::new() };
                let name = bson::raw::CString::try_from(name.to_owned()).expect("a name");
                filter.append(&*name, branches.into_iter().collect::<RawArrayBuf>());
                filter
            },
        )
    })
}

fn collation() -> impl Strategy<Value = Option<Document>> {
    select(vec![
        None,
        None,
        Some(doc! { "locale": "simple" }),
        Some(doc! { "locale": "en", "strength": 2 }),
    ])
}

/// A find with the filter byte for byte and options beside it.
fn command(name: &str, part: &str, filter: RawBson, options: &Document) -> RawDocumentBuf {
    let mut command = document([(name, RawBson::String("c".into())), (part, filter)]);
    for (name, value) in options {
        let name = bson::raw::CString::try_from(name.clone()).expect("a name");
        command.append(&*name, RawBson::try_from(value.clone()).expect("bson"));
    }
    command
}

/// The rows of the query part of a command, on a collection of any name.
fn run(server: &Server, coll: &str, command: &RawDocument) -> Result<Vec<RawDocumentBuf>, String> {
    let mut named = RawDocumentBuf::new();
    for (number, field) in command.iter().enumerate() {
        let (name, value) = field.expect("a field");
        match number {
            0 => named.append(name, coll),
            _ => named.append(name, value),
        }
    }
    let mut cursor = RawDocumentBuf::new();
    cursor.append(cstr!("batchSize"), 100_000);
    match command.iter_elements().next().expect("a name").expect("a name").key().as_str() {
        "find" => named.append(cstr!("batchSize"), 100_000),
        _ => named.append(cstr!("cursor"), cursor),
    }
    server.try_run(named).map(|reply| crate::server::rows(&reply))
}

#[test]
fn a_point_is_at_most_its_own_document() {
    let server = shared();
    let ids = Ids::insert(&server, "route_points");
    let field = DateField::new("at", DateKind::Date).expect("a field");
    let view = CollectionView { field: &field, boundary: Some(DatePoint(MIDDLE)), indexes: &[] };
    let (points, lists) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let cases = (id_filter(ids.all.clone()), collation(), 0..3_i32);
    let outcome = TestRunner::new(config(4_000)).run(&cases, |(filter, collation, skip)| {
        let mut options = doc! { "skip": skip / 2 };
        options.extend(collation.clone().map(|one| doc! { "collation": one }).unwrap_or_default());
        let find = command("find", "filter", RawBson::Document(filter.clone()), &options);
        let route = route_read(&ReadQuery::parse(&find).expect("a read"), &view);
        let (named, only_id) = match &route {
            ReadRoute::Point { id, only_id, .. } => {
                points.set(points.get() + 1);
                (vec![Key::new(*id).expect("a key")], *only_id)
            }
            ReadRoute::Points { ids, only_id, .. } => {
                lists.set(lists.get() + 1);
                (keys_of(ids).expect("keys"), *only_id)
            }
            ReadRoute::Archive(_) => return Ok(()),
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        };
        let Ok(rows) = run(&server, "route_points", &find) else { return Ok(()) };
        let found: HashSet<_> = rows.iter().map(|row| Key::of(row).expect("a key")).collect();
        let text = readable(&find);
        prop_assert!(found.iter().all(|key| named.contains(key)), "{} gave {:?}", text, found);
        prop_assert!(found.len() == rows.len(), "{}", text);
        if only_id {
            let expected: HashSet<_> =
                named.iter().filter(|key| ids.present.contains(*key)).cloned().collect();
            prop_assert_eq!(found, expected, "{}", text);
        }
        // A write with this filter is classified alike.
        let collation = collation.map(|one| RawDocumentBuf::try_from(one).expect("bson"));
        let target = route_write_filter(&filter, collation.as_deref(), &view);
        let same = match (&target, &route) {
            (WriteTarget::Id { id, .. }, ReadRoute::Point { id: read, .. }) => {
                Key::new(*id) == Key::new(*read)
            }
            (WriteTarget::Ids { ids, .. }, ReadRoute::Points { ids: read, .. }) => {
                keys_of(ids) == keys_of(read)
            }
            _ => false,
        };
        prop_assert!(same, "{} but {:?}", text, target);
        Ok(())
    });
    outcome.expect("what the route promises");
    assert!(points.get() > 500 && lists.get() > 200, "{} {}", points.get(), lists.get());
}

/// Presence of the key decides whether rows come out, as far as the route says so.
#[test]
fn an_aggregate_by_id_shows_presence_where_the_route_says_so() {
    let server = shared();
    let ids = Ids::insert(&server, "route_stages");
    let field = DateField::new("at", DateKind::Date).expect("a field");
    let view = CollectionView { field: &field, boundary: None, indexes: &[] };
    let stages = vec![
        doc! { "$match": { "x": { "$gte": 2 } } },
        doc! { "$project": { "x": 1 } },
        doc! { "$set": { "y": "$x" } },
        doc! { "$replaceWith": { "y": "$x" } },
        doc! { "$sort": { "x": 1 } },
        doc! { "$limit": 1 },
        doc! { "$skip": 1 },
        doc! { "$count": "n" },
        doc! { "$group": { "_id": Bson::Null, "n": { "$sum": 1 } } },
        doc! { "$facet": { "a": [{ "$count": "n" }] } },
        doc! { "$unwind": "$none" },
        doc! { "$redact": "$$PRUNE" },
        doc! { "$sample": { "size": 1 } },
        doc! { "$sortByCount": "$x" },
        doc! { "$bucketAuto": { "groupBy": "$x", "buckets": 2 } },
        doc! { "$densify": { "field": "x", "range": { "step": 1, "bounds": [0, 3] } } },
        doc! { "$fill": { "output": { "y": { "value": 1 } } } },
        doc! { "$setWindowFields": { "output": { "n": { "$sum": 1 } } } },
    ];
    let cases = (select(ids.all.clone()), prop::collection::vec(select(stages), 0..4), 0..4_usize);
    let outcome = TestRunner::new(config(1_500)).run(&cases, |(id, mut stages, at)| {
        // Not every value is a filter of its own: arrays and undefined are not routed.
        let by_id = document([("_id", embedded([("$eq", id.clone())]))]);
        let Ok(by_id) = Document::try_from(&*by_id) else { return Ok(()) };
        stages.insert(at.min(stages.len()), doc! { "$match": by_id });
        let pipeline = document([("p", RawBson::try_from(Bson::from(stages)).expect("bson"))]);
        let pipeline = RawBson::from(pipeline.get("p").expect("bson").expect("a pipeline"));
        let aggregate = command("aggregate", "pipeline", pipeline, &Document::new());
        let route = route_read(&ReadQuery::parse(&aggregate).expect("a read"), &view);
        let ReadRoute::Point { only_id, rows_prove, .. } = route else { return Ok(()) };
        let Ok(rows) = run(&server, "route_stages", &aggregate) else { return Ok(()) };
        let present = ids.present.contains(&key(&id));
        let text = readable(&aggregate);
        prop_assert!(!rows_prove || rows.is_empty() || present, "rows of an absent key: {}", text);
        prop_assert!(!only_id || !rows.is_empty() || !present, "none of a present key: {}", text);
        Ok(())
    });
    outcome.expect("what the route promises");
}

#[test]
fn a_unique_value_is_at_most_one_document() {
    let unique = |spec: Document| {
        let mut named = doc! { "name": "i", "unique": true };
        named.extend(spec);
        named
    };
    let u = &["u", "x"][..];
    assert!(check_unique(u, unique(doc! { "key": { "u": 1 } })) > 100);
    assert!(check_unique(u, unique(doc! { "key": { "u": 1 }, "sparse": true })) > 100);
    assert!(check_unique(&["v", "w", "x"], unique(doc! { "key": { "v": 1, "w": -1 } })) > 100);
    assert!(check_unique(&["r.a", "x"], unique(doc! { "key": { "r.a": 1 } })) > 100);
    // Those that do not make a query unique, though they look like it.
    let partial = doc! { "key": { "u": 1 }, "partialFilterExpression": { "x": 1 } };
    assert_eq!(check_unique(u, unique(partial)), 0);
    let same_array = doc! { "key": { "r.a": 1, "r.b": 1 } };
    assert_eq!(check_unique(&["r.a", "r.b"], unique(same_array)), 0);
}

/// Queries over `names` on a collection with this index; how many of them were called unique.
fn check_unique(names: &'static [&'static str], spec: Document) -> u32 {
    let server = shared();
    server.fresh("route_unique", std::slice::from_ref(&spec));
    let indexes =
        [IndexDefinition::from_spec(&RawDocumentBuf::try_from(&spec).expect("bson")).expect("one")];
    // Few values, so that those that may repeat do.
    let few = vec![
        RawBson::Int32(1),
        RawBson::Double(1.0),
        RawBson::Int32(2),
        RawBson::Null,
        RawBson::Undefined,
        RawBson::String("a".into()),
        RawBson::String("A".into()),
        embedded([("a", RawBson::Int32(1))]),
        RawBson::MinKey,
        RawBson::Double(f64::NAN),
    ];
    let one = prop_oneof![4 => select(few), 1 => select(singles())].boxed();
    let list = || prop::collection::vec(one.clone(), 0..3).prop_map(array);
    let held = prop_oneof![
        3 => one.clone(),
        1 => list(),
        1 => list().prop_map(|inner| array([inner])),
    ]
    .boxed();
    let object = (held.clone(), held.clone()).prop_map(|(a, b)| embedded([("a", a), ("b", b)]));
    let objects = prop::collection::vec(object, 0..3).prop_map(array);
    let mut runner = TestRunner::new(config(1));
    let documents: Vec<_> = (0..2_000)
        .map(|number| {
            let (a, b) = (held.clone(), held.clone()).new_tree(&mut runner).expect("two").current();
            let mut fields = vec![("_id", RawBson::Int32(number))];
            fields.push(("x", RawBson::Int32(number % 2)));
            match names {
                ["u", ..] => fields.push(("u", a)),
                ["v", ..] => fields.extend([("v", a), ("w", b)]),
                _ => fields.push(("r", objects.new_tree(&mut runner).expect("some").current())),
            }
            // Some lack the field: that is what sparse indexes and null are about.
            fields.truncate(if number % 9 == 0 { 2 } else { 4 });
            document(fields)
        })
        .collect();
    let refused = server.insert("route_unique", &documents);
    assert!(documents.len() - refused.len() > 20, "too few documents to prove anything");

    let field = DateField::new("at", DateKind::Date).expect("a field");
    let view = CollectionView { field: &field, boundary: None, indexes: &indexes };
    let operand = prop_oneof![4 => one.clone(), 1 => list()].boxed();
    let condition = prop_oneof![
        3 => operand.clone(),
        1 => operand.clone().prop_map(|one| embedded([("$eq", one)])),
        1 => operand.prop_map(|one| embedded([("$in", array([one]))])),
    ];
    let part = prop::collection::vec((select(names), condition), 1..4).prop_map(document).boxed();
    let filters = (part.clone(), part, any::<bool>()).prop_map(|(mut filter, inner, nest)| {
        if nest {
            filter.append(cstr!("$and"), [inner].into_iter().collect::<RawArrayBuf>());
        }
        filter
    });
    let unique = std::cell::Cell::new(0);
    let cases = (filters, collation());
    let outcome = TestRunner::new(config(1_000)).run(&cases, |(filter, collation)| {
        let options = collation.map(|one| doc! { "collation": one }).unwrap_or_default();
        let find = command("find", "filter", RawBson::Document(filter), &options);
        let route = route_read(&ReadQuery::parse(&find).expect("a read"), &view);
        let ReadRoute::Unique { values, only_unique, .. } = route else { return Ok(()) };
        unique.set(unique.get() + 1);
        let Ok(rows) = run(&server, "route_unique", &find) else { return Ok(()) };
        // The values alone name the document, if there is one.
        let equalities =
            values.iter().map(|(path, value)| (*path, embedded([("$eq", RawBson::from(*value))])));
        let named = server.find("route_unique", &document(equalities), &Document::new());
        let text = readable(&find);
        prop_assert!(rows.len() <= 1 && named.len() <= 1, "{} rows: {}", rows.len(), text);
        let id = |rows: &[RawDocumentBuf]| rows.first().map(|row| row.get_i32("_id").ok());
        if only_unique || !rows.is_empty() {
            prop_assert_eq!(id(&rows), id(&named), "{}", text);
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{spec}: {failure}");
    }
    unique.get()
}

/// The procedure of `ReadRoute::NewestN`, with two collections for the tiers.
#[test]
fn the_newest_of_the_fast_tier_are_the_newest_of_all() {
    let server = shared();
    let mut runner = TestRunner::new(config(1));
    for kind in crate::coverage::KINDS {
        let field = DateField::new("at", kind).expect("a field");
        let boundary = DatePoint(MIDDLE);
        let documents: Vec<_> = universe(&mut runner).into_iter().step_by(2).collect();
        // Besides what it holds, the fast tier has a few older ones left over from writes.
        let fast: Vec<_> = documents
            .iter()
            .enumerate()
            .filter(|(number, one)| {
                number % 17 == 0 || field.place(one).is_some_and(|place| place.is_held(boundary))
            })
            .map(|(_, one)| one.clone())
            .collect();
        for (coll, documents) in [("newest_archive", &documents), ("newest_fast", &fast)] {
            server.fresh(coll, &[]);
            assert_eq!(server.insert(coll, documents), []);
        }
        let view = CollectionView { field: &field, boundary: Some(boundary), indexes: &[] };
        let used = std::cell::Cell::new(0);
        let limits = prop_oneof![1..5_i64, 1..200_i64];
        let outcome = TestRunner::new(config(400)).run(&(filter("at"), limits), |(filter, n)| {
            let sort = doc! { "at": -1, "_id": 1 };
            let options = doc! { "sort": sort.clone(), "limit": n };
            let find = command("find", "filter", RawBson::Document(filter.clone()), &options);
            let route = route_read(&ReadQuery::parse(&find).expect("a read"), &view);
            let n = match route {
                ReadRoute::NewestN { n, .. } => n,
                _ => return Ok(()),
            };
            let mut both = RawArrayBuf::new();
            both.push(filter.clone());
            both.push(field.held(boundary));
            let mut narrowed = RawDocumentBuf::new();
            narrowed.append(cstr!("$and"), both);
            let one_more = doc! { "sort": sort, "limit": n + 1 };
            let Ok(rows) = server.try_find("newest_fast", &narrowed, &one_more) else {
                return Ok(());
            };
            let count = usize::try_from(n).expect("a count");
            let Some(last) = rows.get(count - 1) else { return Ok(()) };
            let place = field.place(last).expect("a place");
            if !place.is_held(boundary) {
                return Ok(());
            }
            used.set(used.get() + 1);
            let rows: Vec<_> = rows.iter().take(count).map(|row| row.get_i32("_id").ok()).collect();
            let truth = server.find("newest_archive", &filter, &options);
            let truth: Vec<_> = truth.iter().map(|row| row.get_i32("_id").ok()).collect();
            prop_assert_eq!(rows, truth, "{}", readable(&find));
            Ok(())
        });
        if let Err(failure) = outcome {
            panic!("{kind}: {failure}");
        }
        assert!(used.get() > 5, "{kind}: only {} were answered by the fast tier", used.get());
    }
}
