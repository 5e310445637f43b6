//! Two `_id`s are one key exactly when mongod's unique index refuses the second.

use std::collections::HashSet;

use bson::raw::{RawBson, RawBsonRef};
use halocline_tiering::key::Key;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::server::{document, shared};
use crate::values::{embedded, nested, singles};

fn key(value: &RawBson) -> Key {
    Key::new(RawBsonRef::from(value)).expect("a key")
}

/// Every value inserted as an `_id`, in order: mongod keeps the first of each key.
fn assert_same_duplicates(coll: &str, ids: &[RawBson]) {
    let server = shared();
    server.fresh(coll, &[]);
    let documents: Vec<_> = ids.iter().map(|id| document([("_id", id.clone())])).collect();
    let mut refused = vec![None; ids.len()];
    for (position, code) in server.insert(coll, &documents) {
        refused[position] = Some(code);
    }
    let mut known = HashSet::new();
    for (id, refused) in ids.iter().zip(refused) {
        match refused {
            None => assert!(known.insert(key(id)), "distinct for mongod: {id:?}"),
            Some(11000) => assert!(known.contains(&key(id)), "equal for mongod: {id:?}"),
            // Arrays, regular expressions and undefined are no `_id`s at all.
            Some(code) => assert_eq!(code, 53, "{id:?}"),
        }
    }
    // The bytes kept are those that went in, so every key finds its document.
    for id in known.iter().take(50) {
        assert_eq!(server.find(coll, &id.filter(), &Default::default()).len(), 1, "{id:?}");
    }
}

#[test]
fn ids_of_every_type_are_equal_where_mongod_says_so() {
    assert_same_duplicates("key_single", &singles());
}

#[test]
fn embedded_ids_are_equal_where_mongod_says_so() {
    let mut ids = Vec::new();
    for value in singles() {
        ids.push(embedded([("x", value.clone())]));
        ids.push(embedded([("x", value.clone()), ("y", RawBson::Int32(1))]));
        ids.push(embedded([("x", crate::values::array([value.clone()]))]));
        ids.push(embedded([("x", embedded([("z", value)]))]));
    }
    assert_same_duplicates("key_embedded", &ids);
}

/// Pairs side by side: the second of each is refused exactly when the keys are equal.
#[test]
fn random_pairs_of_ids_are_equal_where_mongod_says_so() {
    let mut runner = TestRunner::default();
    let server = shared();
    server.fresh("key_pairs", &[]);
    let mut pairs = Vec::new();
    for _ in 0..5_000 {
        let a = nested().new_tree(&mut runner).expect("a value").current();
        let b = nested().new_tree(&mut runner).expect("a value").current();
        pairs.push((a.clone(), respelt(&a)));
        pairs.push((a, b));
    }
    let id = |slot: usize, value: &RawBson| {
        embedded([("slot", RawBson::Int32(slot as i32)), ("value", value.clone())])
    };
    let documents: Vec<_> = pairs
        .iter()
        .enumerate()
        .flat_map(|(slot, (a, b))| [a, b].map(|value| document([("_id", id(slot, value))])))
        .collect();
    let refused = server.insert("key_pairs", &documents);
    assert!(refused.iter().all(|(at, code)| at % 2 == 1 && *code == 11000), "{refused:?}");
    let refused: HashSet<_> = refused.into_iter().map(|(position, _)| position / 2).collect();
    for (slot, (a, b)) in pairs.iter().enumerate() {
        assert_eq!(key(a) == key(b), refused.contains(&slot), "{a:?} and {b:?}");
        if key(a) == key(b) {
            assert_eq!(key(a).lane(64), key(b).lane(64));
        }
    }
    assert!(refused.len() > 1_000, "the pairs are too different to prove anything");
}

/// The same value with its numbers in other types, where that keeps them equal.
fn respelt(value: &RawBson) -> RawBson {
    match value {
        RawBson::Int32(n) => RawBson::Double(f64::from(*n)),
        RawBson::Int64(n) if i64::from(*n as i32) == *n => RawBson::Int32(*n as i32),
        RawBson::Int64(n) => crate::values::decimal(&n.to_string()),
        RawBson::Double(n) if *n == n.trunc() && n.abs() < 1e15 => RawBson::Int64(*n as i64),
        RawBson::String(text) => RawBson::Symbol(text.clone()),
        RawBson::Array(values) => crate::values::array(
            values.into_iter().map(|value| respelt(&value.expect("a value").into())),
        ),
        RawBson::Document(fields) => {
            let fields: Vec<_> = fields
                .iter()
                .map(|field| field.expect("a field"))
                .map(|(name, value)| (name.as_str(), respelt(&value.into())))
                .collect();
            embedded(fields)
        }
        other => other.clone(),
    }
}
