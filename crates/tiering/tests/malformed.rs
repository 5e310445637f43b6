//! Bytes from a client reach these functions before any server has looked at them: whatever they
//! are, the answer is an answer.

#![allow(clippy::expect_used, reason = "a test stops at what it did not expect")]

use bson::raw::{RawBsonRef, RawDocument, RawDocumentBuf};
use bson::{DateTime, rawdoc};
use halocline_tiering::coverage::covers;
use halocline_tiering::date::{DateField, DateKind, DatePoint};
use halocline_tiering::key::Key;
use halocline_tiering::pipeline::named_collections;
use halocline_tiering::route::{
    CollectionView, IndexDefinition, ReadQuery, keys_of, route_read, route_write_filter,
};
use halocline_tiering::upsert::upsert_id;
use proptest::prelude::*;
use proptest::sample::{Index, select};

fn seeds() -> Vec<RawDocumentBuf> {
    let date = DateTime::from_millis(5);
    let binary =
        bson::Binary { subtype: bson::spec::BinarySubtype::BinaryOld, bytes: vec![1, 2, 3] };
    let code =
        bson::raw::RawJavaScriptCodeWithScope { code: "a".into(), scope: rawdoc! { "x": 1 } };
    vec![
        rawdoc! { "find": "c", "filter": { "_id": { "$in": [1, "a", 2.5, { "x": [null] }] } } },
        rawdoc! { "find": "c", "filter": { "at": { "$gte": date }, "$or": [{ "at": date }] } },
        rawdoc! { "count": "c", "query": { "_id": binary }, "hint": { "x": 1 }, "limit": 5 },
        rawdoc! { "find": "c", "filter": { "_id": code }, "collation": { "locale": "en" } },
        rawdoc! { "aggregate": "c", "pipeline": [
            { "$match": { "_id": 5 } },
            { "$facet": { "a": [{ "$unionWith": "b" }] } },
            { "$lookup": { "from": { "db": "d", "coll": "c" }, "pipeline": [] } },
        ] },
        rawdoc! { "aggregate": "c", "pipeline": [{ "$merge": { "into": "x" } }] },
        rawdoc! { "name": "u", "key": { "u": 1 }, "unique": true, "_id": { "a": { "b": "c" } } },
        rawdoc! { "_id": 5, "q": { "_id": 5 }, "u": { "$set": { "_id": 6 } }, "at": [date, [date]] },
    ]
}

/// Everything of this crate that takes a client's or a server's bytes.
fn take(document: &RawDocument) {
    let field = DateField::new("at", DateKind::Date).expect("a field");
    let index = IndexDefinition::from_spec(document);
    let indexes: Vec<_> = index.into_iter().collect();
    let view = CollectionView { field: &field, boundary: Some(DatePoint(0)), indexes: &indexes };
    let _ = covers(document, &field, DatePoint(0));
    let _ = field.place(document);
    if let Ok(key) = Key::of(document) {
        let _ = (key.filter(), key.to_string(), key.memory(), key == key.clone());
    }
    let _ = route_write_filter(document, Some(document), &view);
    let _ = upsert_id(document, RawBsonRef::Document(document));
    if let Some(query) = ReadQuery::parse(document) {
        let _ = route_read(&query, &view).reason();
    }
    for (_, value) in document.iter().flatten() {
        match value {
            RawBsonRef::Document(inner) => take(inner),
            RawBsonRef::Array(values) => {
                let _ = keys_of(values);
                let _ = named_collections(values, &mut |_, _| {});
                let _ = upsert_id(document, value);
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(
        seed in select(seeds()),
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<Index>()),
    ) {
        let mut bytes = seed.into_bytes();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        // The frame around the bytes is what is checked before they get here.
        if let (Ok(length), Some(last)) = (i32::try_from(bytes.len()), bytes.len().checked_sub(1))
            && last >= 4
        {
            bytes[..4].copy_from_slice(&length.to_le_bytes());
            bytes[last] = 0;
        }
        if let Ok(document) = RawDocument::from_bytes(&bytes) {
            take(document);
        }
    }
}
