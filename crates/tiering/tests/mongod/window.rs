//! Window, eviction and warming divide all documents exactly as the protocol says, by index.

use std::collections::BTreeSet;

use bson::raw::{RawBson, RawDocument, RawDocumentBuf};
use bson::{Bson, Document, doc};
use halocline_tiering::date::{DateField, DateKind, DatePoint};
use halocline_tiering::window::Place;
use proptest::test_runner::TestRunner;

use crate::coverage::{KINDS, universe};
use crate::server::{Server, document, shared};
use crate::values::MIDDLE;

struct Collection {
    server: std::sync::Arc<Server>,
    name: String,
    field: DateField,
    documents: Vec<RawDocumentBuf>,
}

impl Collection {
    /// Every document of the universe, or those without an array where the date is.
    fn new(path: &str, kind: DateKind, arrays: bool) -> Self {
        let server = shared();
        let field = DateField::new(path, kind).expect("a field");
        let name = format!("window_{kind}_{}_{arrays}", path.replace('.', "_"));
        let mut documents = universe(&mut TestRunner::default());
        if !arrays {
            let scalar = |one: &RawDocumentBuf| {
                let at = one.get("at").expect("bson");
                let a = one.get("a").expect("bson");
                let inner = a.and_then(|a| a.as_document()).and_then(|a| a.get("b").expect("bson"));
                ![at, a, inner].into_iter().flatten().any(|value| value.as_array().is_some())
            };
            documents.retain(scalar);
        }
        for (position, document) in documents.iter_mut().enumerate() {
            *document = renumbered(document, position);
        }
        server.fresh(&name, &[doc! { "name": "date", "key": { path: 1 } }]);
        assert_eq!(server.insert(&name, &documents), []);
        Self { server, name, field, documents }
    }

    fn ids(&self, filter: &RawDocument) -> BTreeSet<i32> {
        self.ids_with(filter, &Document::new())
    }

    fn ids_with(&self, filter: &RawDocument, options: &Document) -> BTreeSet<i32> {
        self.server.ids(&self.name, filter, options).into_iter().collect()
    }

    fn readable(&self, ids: impl IntoIterator<Item = i32>) -> Vec<Result<Document, String>> {
        ids.into_iter()
            .map(|id| Document::try_from(&*self.documents[id as usize]).map_err(|e| e.to_string()))
            .collect()
    }

    /// All rows, newest first, as mongod sorts them.
    fn newest_first(&self) -> Vec<i32> {
        let sort = Document::try_from(&*self.field.newest_first()).expect("bson");
        self.server.ids(&self.name, &RawDocumentBuf::new(), &doc! { "sort": sort })
    }
}

fn renumbered(document: &RawDocument, position: usize) -> RawDocumentBuf {
    let fields: Vec<_> = document
        .iter()
        .map(|field| field.expect("a field"))
        .map(|(name, value)| match name.as_str() {
            "_id" => ("_id", RawBson::Int32(position as i32)),
            name => (name, value.into()),
        })
        .collect();
    crate::server::document(fields)
}

/// The highest value of a kind's type, and the type above.
fn highest(kind: DateKind) -> RawBson {
    match kind {
        DateKind::Date => crate::values::date(i64::MAX),
        DateKind::ObjectId => RawBson::ObjectId(bson::oid::ObjectId::from_bytes([0xff; 12])),
        DateKind::EpochSeconds | DateKind::EpochMillis => RawBson::Double(f64::INFINITY),
    }
}

/// Those that sort strictly above the kind's type, found by sorting them against a sentinel.
fn above_by_sorting(collection: &Collection) -> BTreeSet<i32> {
    let path = collection.field.path();
    let sentinel = match path.split_once('.') {
        None => document([("_id", RawBson::Int32(-1)), (path, highest(collection.field.kind()))]),
        Some((outer, inner)) => {
            let inside = document([(inner, highest(collection.field.kind()))]);
            document([("_id", RawBson::Int32(-1)), (outer, RawBson::Document(inside))])
        }
    };
    assert_eq!(collection.server.insert(&collection.name, &[sentinel]), []);
    // Among equal dates the sentinel, with the smallest `_id`, comes first.
    let sort = doc! { "sort": { path: -1, "_id": 1 } };
    let rows = collection.server.ids(&collection.name, &RawDocumentBuf::new(), &sort);
    let delete =
        doc! { "delete": &collection.name, "deletes": [{ "q": { "_id": -1 }, "limit": 1 }] };
    collection.server.run(RawDocumentBuf::try_from(delete).expect("bson"));
    rows.into_iter().take_while(|id| *id != -1).collect()
}

fn difference(a: &BTreeSet<i32>, b: &BTreeSet<i32>) -> BTreeSet<i32> {
    a.difference(b).copied().collect()
}

fn check_division(collection: &Collection) {
    let field = &collection.field;
    let all = collection.ids(&RawDocumentBuf::new());
    let above = collection.ids(&field.above_type());
    let sorted_above = above_by_sorting(collection);
    let odd = above.symmetric_difference(&sorted_above).copied();
    assert_eq!(above, sorted_above, "{:?}", collection.readable(odd));

    let places: Vec<Place> =
        collection.documents.iter().map(|one| field.place(one).expect("a place")).collect();
    // Numbers go below 64 bits: those share the lowest point with the lowest integer.
    let edge = match field.kind() {
        DateKind::Date => i64::MIN,
        DateKind::ObjectId => 0,
        DateKind::EpochSeconds | DateKind::EpochMillis => i64::MIN + 1,
    };
    for point in [edge, -1, 0, MIDDLE - 1, MIDDLE, MIDDLE + 1, MIDDLE + 2].map(DatePoint) {
        let window = collection.ids(&field.window(point));
        let held = collection.ids(&field.held(point));
        let evictable = collection.ids(&field.evictable(point));
        let dated = collection.ids(&field.evictable_dated(None, point));
        let undated = collection.ids(&field.evictable_undated());
        assert_eq!(held, &window | &above);
        assert_eq!(evictable, difference(&all, &held));
        let both = &dated | &undated;
        let odd = evictable.symmetric_difference(&both).copied();
        assert_eq!(evictable, both, "{:?}", collection.readable(odd));
        assert!(dated.is_disjoint(&undated));

        // The same from the bytes alone.
        for (id, place) in places.iter().enumerate() {
            let readable = || collection.readable([id as i32]);
            let id = id as i32;
            assert_eq!(place.is_held(point), held.contains(&id), "{place:?} {:?}", readable());
            assert_eq!(*place == Place::Above, above.contains(&id), "{place:?} {:?}", readable());
            assert_eq!(*place == Place::Undated, undated.contains(&id), "{:?}", readable());
        }

        // Batches: what one has passed and what the next takes up make the whole.
        for step in [MIDDLE - 1, MIDDLE].map(DatePoint) {
            let rest = collection.ids(&field.evictable_dated(Some(step), point));
            let passed = collection.ids(&field.evictable_dated(None, step.min(point)));
            assert_eq!(&rest | &passed, dated);
        }
        for complete in [MIDDLE - 1, MIDDLE, MIDDLE + 1].map(DatePoint) {
            let warmable = collection.ids(&field.warmable(point, Some(complete)));
            let done = collection.ids(&field.held(complete));
            assert_eq!(warmable, difference(&difference(&window, &done), &above));
        }
        assert_eq!(collection.ids(&field.warmable(point, None)), difference(&window, &above));
    }

    // What is held comes first, and places never rise on the way down.
    let rows = collection.newest_first();
    for pair in rows.windows(2) {
        let [a, b] = [pair[0], pair[1]].map(|id| places[id as usize]);
        assert!(a >= b, "{a:?} before {b:?}: {:?}", collection.readable(pair.to_vec()));
    }
    check_index_ranges(collection, &above);
}

/// `min` and `max` over the index give the same documents as the filters.
fn check_index_ranges(collection: &Collection, above: &BTreeSet<i32>) {
    let field = &collection.field;
    let bound = |one: RawDocumentBuf| {
        // Through bytes: a Document keeps what the bound holds.
        Bson::Document(Document::try_from(&*one).expect("bson"))
    };
    let hint = bound(field.oldest_first());
    let options = doc! { "min": bound(field.above_type_min()), "hint": hint.clone() };
    let in_range = collection.ids_with(&RawDocumentBuf::new(), &options);
    let by_range = &in_range | &collection.ids(&field.max_key());
    let odd = by_range.symmetric_difference(above).copied();
    assert_eq!(by_range, *above, "{:?}", collection.readable(odd));

    let options = doc! { "max": bound(field.undated_max()), "hint": hint };
    let undated = collection.ids(&field.evictable_undated());
    assert_eq!(collection.ids_with(&field.evictable_undated(), &options), undated);
}

#[test]
fn every_document_has_exactly_one_place() {
    for kind in KINDS {
        for path in ["at", "a.b"] {
            for arrays in [true, false] {
                check_division(&Collection::new(path, kind, arrays));
            }
        }
    }
}

/// The stages of a plan with the bounds of its index scans.
fn plan(collection: &Collection, filter: &RawDocument, options: &Document) -> String {
    let mut find = doc! { "find": &collection.name };
    find.insert("filter", Document::try_from(filter).expect("bson"));
    find.extend(options.clone());
    let explain = doc! { "explain": find, "verbosity": "queryPlanner" };
    let reply = collection.server.run(RawDocumentBuf::try_from(explain).expect("bson"));
    let planner = Document::try_from(reply.get_document("queryPlanner").expect("a plan"));
    let winning = planner.expect("bson").get_document("winningPlan").expect("a plan").clone();
    let mut stages = Vec::new();
    describe(&winning, &mut stages);
    stages.join(" ")
}

fn describe(stage: &Document, out: &mut Vec<String>) {
    out.push(stage.get_str("stage").unwrap_or("?").to_owned());
    if let Ok(bounds) = stage.get_document("indexBounds") {
        out.extend(bounds.values().map(Bson::to_string));
    }
    if let Ok(input) = stage.get_document("inputStage") {
        describe(input, out);
    }
    for input in stage.get_array("inputStages").into_iter().flatten() {
        describe(input.as_document().expect("a stage"), out);
    }
}

#[test]
fn an_index_on_the_date_bounds_every_filter() {
    let (low, high) = (DatePoint(MIDDLE), DatePoint(MIDDLE + 1));
    for kind in KINDS {
        for arrays in [true, false] {
            let collection = Collection::new("at", kind, arrays);
            let field = &collection.field;
            let is_number = matches!(kind, DateKind::EpochSeconds | DateKind::EpochMillis);
            let newest = doc! { "sort": { "at": -1 }, "limit": 10 };
            let mut cases = vec![
                ("window", field.window(low), Document::new()),
                ("dated", field.evictable_dated(None, low), Document::new()),
                ("dated from", field.evictable_dated(Some(low), high), Document::new()),
                ("undated", field.evictable_undated(), Document::new()),
                ("warmable", field.warmable(low, Some(high)), Document::new()),
            ];
            // Documented: arrays in arrays sort above numbers, and no filter bounds an index for
            // those; there the range does.
            if !is_number {
                cases.push(("above", field.above_type(), Document::new()));
                cases.push(("held", field.held(low), Document::new()));
            }
            for (name, filter, options) in cases {
                let plan = plan(&collection, &filter, &options);
                assert!(plan.contains("IXSCAN"), "{kind} {name}: {plan}");
                assert!(!plan.contains("COLLSCAN"), "{kind} {name}: {plan}");
                assert!(!plan.contains("[MinKey, MaxKey]"), "{kind} {name}: {plan}");
            }
            if !arrays {
                for filter in [field.warmable(low, None), field.warmable(low, Some(high))] {
                    let plan = plan(&collection, &filter, &newest);
                    assert!(plan.starts_with("LIMIT FETCH IXSCAN"), "{kind}: {plan}");
                }
            }
        }
    }
}
