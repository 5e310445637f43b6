//! The usual reads are classified without touching the allocator.

#![allow(clippy::expect_used, reason = "a test stops at what it did not expect")]
#![allow(unsafe_code, reason = "counting allocations takes an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bson::oid::ObjectId;
use bson::{DateTime, RawDocumentBuf, rawdoc};
use halocline_tiering::date::{DateField, DateKind, DatePoint};
use halocline_tiering::key::Key;
use halocline_tiering::route::{
    CollectionView, IndexDefinition, ReadQuery, ReadRoute, Reason, route_read, route_write_filter,
};

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is being torn down is not counted.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

#[test]
fn usual_reads_are_classified_without_an_allocation() {
    let field = DateField::new("meta.at", DateKind::Date).expect("a field");
    let spec = rawdoc! { "name": "u_1", "key": { "u": 1 }, "unique": true };
    let indexes = [IndexDefinition::from_spec(&spec).expect("an index")];
    let view = CollectionView { field: &field, boundary: Some(DatePoint(0)), indexes: &indexes };
    let find = |filter: RawDocumentBuf| {
        rawdoc! {
            "find": "c",
            "filter": filter,
            "sort": { "meta.at": -1 },
            "limit": 1,
            "lsid": { "id": 5 },
            "$db": "d",
        }
    };
    for (filter, reason) in [
        (rawdoc! { "_id": ObjectId::from_bytes([7; 12]) }, Reason::PointHit),
        (rawdoc! { "_id": "a rather long string", "state": { "$ne": 5 } }, Reason::PointHit),
        (rawdoc! { "_id": { "$in": [1, 2, 3] } }, Reason::PointsHit),
        (rawdoc! { "u": 5 }, Reason::UniqueHit),
        (rawdoc! { "meta.at": { "$gte": DateTime::from_millis(5) } }, Reason::Covered),
        (rawdoc! { "$or": [{ "x": 1 }, { "y": 2 }] }, Reason::NewestN),
    ] {
        let command = find(filter);
        let mut routed = None;
        let count = allocations(|| {
            let query = ReadQuery::parse(&command).expect("a read");
            routed = Some(route_read(&query, &view));
        });
        assert_eq!(routed.map(|route| route.reason()), Some(reason));
        assert_eq!(count, 0, "{reason:?}");
    }
}

#[test]
fn usual_keys_are_made_without_an_allocation() {
    let field = DateField::new("at", DateKind::Date).expect("a field");
    let view = CollectionView { field: &field, boundary: None, indexes: &[] };
    let filter = rawdoc! { "_id": ObjectId::from_bytes([7; 12]) };
    let command = rawdoc! { "find": "c", "filter": filter.clone() };
    let count = allocations(|| {
        let query = ReadQuery::parse(&command).expect("a read");
        let ReadRoute::Point { id, .. } = route_read(&query, &view) else { return };
        let key = Key::new(id).expect("a key");
        assert_eq!(key.clone(), key);
        let _ = route_write_filter(&filter, None, &view);
    });
    assert_eq!(count, 0);
}
