//! Filters that name the documents of the window, of eviction and of warming, in MongoDB's own
//! query language, and the place of one document in that order. Nothing here runs a query.
//!
//! MongoDB orders values of different types by type first, and a range matches its own type alone.
//! So every document stands in exactly one of these places, seen from a point `X`:
//!
//! | place | which | filter |
//! |---|---|---|
//! | above | some value of the date sorts above the kind's type; first in a descending sort | [`above_type`](DateField::above_type) |
//! | window | not above, and MongoDB's `{date: {$gte: X}}` | [`window`](DateField::window) |
//! | dated | not above, all values older than `X`, at least one of the kind's type | [`evictable_dated`](DateField::evictable_dated) |
//! | undated | neither: missing, null, another type that sorts below, an empty array, NaN | [`evictable_undated`](DateField::evictable_undated) |
//!
//! The fast tier holds the first two. An array stands where its newest element does.

use bson::oid::ObjectId;
use bson::raw::{CStr, RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf, cstr};
use bson::{DateTime, Timestamp};

use crate::date::{DateField, DateKind, DatePoint};

/// Types above a number and not above ObjectId, by the numbers `$type` takes: string, symbol,
/// object, binary, ObjectId. (An array counts by its elements.)
const ABOVE_NUMBER: [i32; 5] = [2, 14, 3, 5, 7];
/// Types above ObjectId and not above date: boolean, date.
const ABOVE_OBJECT_ID: [i32; 2] = [8, 9];
/// Types above date: timestamp, regular expression, DBPointer, both kinds of code, MaxKey.
const ABOVE_DATE: [i32; 6] = [17, 11, 12, 13, 15, MAX_KEY];
/// Array and MaxKey, by the numbers `$type` takes.
const ARRAY: i32 = 4;
const MAX_KEY: i32 = 127;

/// Where one document stands in a sort by date; what comes later in an ascending sort is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// No value of the kind's type and none above it.
    Undated,
    /// The newest value of the kind's type, rounded down to the kind's unit.
    At(DatePoint),
    /// A value sorts above the kind's type.
    Above,
}

impl DateField {
    /// `{date: {$gte: from}}`.
    pub fn window(&self, from: DatePoint) -> RawDocumentBuf {
        self.condition([(cstr!("$gte"), self.kind().to_bson(from))])
    }

    /// The documents that sort above the kind's type. For dates and ObjectIds an index on the date
    /// field gives exactly these; for numbers, arrays inside arrays sort above them too and no
    /// filter bounds an index for those: prefer [`above_type_min`](Self::above_type_min) there.
    pub fn above_type(&self) -> RawDocumentBuf {
        let types = self.condition([(cstr!("$type"), RawBson::Array(self.types_above()))]);
        if !self.arrays_are_above() {
            return types;
        }
        let mut element = RawDocumentBuf::new();
        element.append(cstr!("$type"), ARRAY);
        let nested = self.condition([(cstr!("$elemMatch"), RawBson::Document(element))]);
        any_of([types, nested])
    }

    /// The same documents as an index range: `min` of a `find` with a hint on an index whose first
    /// (or only) field is the date; further fields of the index need `MinKey` added (or `MaxKey`,
    /// where they descend). No range reaches `MaxKey` itself: [`max_key`](Self::max_key) does.
    pub fn above_type_min(&self) -> RawDocumentBuf {
        let first = match self.kind() {
            DateKind::Date => RawBson::Timestamp(Timestamp { time: 0, increment: 0 }),
            DateKind::ObjectId => RawBson::Boolean(false),
            DateKind::EpochSeconds | DateKind::EpochMillis => RawBson::String(String::new()),
        };
        self.value(first)
    }

    /// The documents whose date is `MaxKey`, which [`above_type_min`](Self::above_type_min) leaves
    /// out and [`above_type`](Self::above_type) includes.
    pub fn max_key(&self) -> RawDocumentBuf {
        self.condition([(cstr!("$type"), RawBson::Int32(MAX_KEY))])
    }

    /// Everything the fast tier holds when its boundary is `from`: the window and what sorts above
    /// the type. A descending sort by date over these is the beginning of the sort over all.
    pub fn held(&self, from: DatePoint) -> RawDocumentBuf {
        any_of([self.window(from), self.above_type()])
    }

    /// Exactly what may be evicted at `horizon`: what [`held`](Self::held) does not match. True by
    /// definition but not bounded by an index; for counts and checks.
    pub fn evictable(&self, horizon: DatePoint) -> RawDocumentBuf {
        let mut filter = RawDocumentBuf::new();
        exclude(&mut filter, [self.window(horizon), self.above_type()]);
        filter
    }

    /// The part of [`evictable`](Self::evictable) that has a date of the kind's type, from the
    /// point a previous batch has reached (or from the beginning). An index on the date field
    /// bounds it on both sides; with that index as a hint and no sort, the oldest come first.
    pub fn evictable_dated(&self, from: Option<DatePoint>, horizon: DatePoint) -> RawDocumentBuf {
        let from = from.map_or_else(|| self.lowest(), |point| self.kind().to_bson(point));
        let mut filter =
            self.condition([(cstr!("$gte"), from), (cstr!("$lt"), self.kind().to_bson(horizon))]);
        exclude(&mut filter, [self.window(horizon), self.above_type()]);
        filter
    }

    /// The part of [`evictable`](Self::evictable) without a date of the kind's type. An index on
    /// the date field bounds it to both sides of the type; what sorts above is read and left out,
    /// so where that is much prefer [`undated_max`](Self::undated_max). The index must be neither
    /// sparse nor partial: a missing date is one of these.
    pub fn evictable_undated(&self) -> RawDocumentBuf {
        let mut any_date = RawDocumentBuf::new();
        any_date.append(cstr!("$gte"), self.lowest());
        let mut filter = self.condition([(cstr!("$not"), RawBson::Document(any_date))]);
        exclude(&mut filter, [self.above_type()]);
        filter
    }

    /// `max` of a `find` (with a hint, as for [`above_type_min`](Self::above_type_min)) that keeps
    /// [`evictable_undated`](Self::evictable_undated) to the part of the index below the type.
    pub fn undated_max(&self) -> RawDocumentBuf {
        self.value(self.lowest())
    }

    /// What is still to be warmed with dates: in the window from `target` on, not yet in the part
    /// that is complete (`complete_from`), and not above the type, which is copied first of all
    /// ([`above_type`](Self::above_type)). To be sorted by [`newest_first`](Self::newest_first);
    /// an index on the date field gives filter and order, unless documents hold arrays of dates:
    /// then mongod sorts, so prefer one long cursor over identifiers to many sorted batches.
    pub fn warmable(&self, target: DatePoint, complete_from: Option<DatePoint>) -> RawDocumentBuf {
        let target = (cstr!("$gte"), self.kind().to_bson(target));
        let mut filter;
        match complete_from {
            None => {
                filter = self.condition([target]);
                exclude(&mut filter, [self.above_type()]);
            }
            Some(done) => {
                filter = self.condition([target, (cstr!("$lt"), self.kind().to_bson(done))]);
                exclude(&mut filter, [self.window(done), self.above_type()]);
            }
        }
        filter
    }

    /// `{date: -1}`.
    pub fn newest_first(&self) -> RawDocumentBuf {
        self.value(RawBson::Int32(-1))
    }

    /// `{date: 1}`: sort, projection and index key alike.
    pub fn oldest_first(&self) -> RawDocumentBuf {
        self.value(RawBson::Int32(1))
    }

    /// Where a whole document stands. Its values are those MongoDB would index: elements of arrays
    /// one by one, also on the way to the field. None for a document that is not valid BSON.
    pub fn place(&self, document: &RawDocument) -> Option<Place> {
        let mut newest = Place::Undated;
        visit(document, self.path(), &mut |value| newest = newest.max(self.place_of(value)))?;
        Some(newest)
    }

    fn place_of(&self, value: RawBsonRef<'_>) -> Place {
        match self.kind().from_bson(value) {
            Some(point) => Place::At(point),
            None if self.is_above(value) => Place::Above,
            None => Place::Undated,
        }
    }

    /// Whether a single value sorts above the kind's type.
    fn is_above(&self, value: RawBsonRef<'_>) -> bool {
        let kind = match self.kind() {
            DateKind::Date => rank::DATE,
            DateKind::ObjectId => rank::OBJECT_ID,
            DateKind::EpochSeconds | DateKind::EpochMillis => rank::NUMBER,
        };
        rank::of(value) > kind
    }

    /// `{date: {operators}}`.
    fn condition<const N: usize>(
        &self,
        operators: [(&'static CStr, RawBson); N],
    ) -> RawDocumentBuf {
        self.value(RawBson::Document(operators.into_iter().collect()))
    }

    /// `{date: value}`.
    fn value(&self, value: RawBson) -> RawDocumentBuf {
        let mut document = RawDocumentBuf::new();
        document.append(self.key(), value);
        document
    }

    /// The lowest value of the kind's type that ranges compare (NaN is below it).
    fn lowest(&self) -> RawBson {
        match self.kind() {
            DateKind::Date => RawBson::DateTime(DateTime::MIN),
            DateKind::ObjectId => RawBson::ObjectId(ObjectId::from_bytes([0; 12])),
            DateKind::EpochSeconds | DateKind::EpochMillis => RawBson::Double(f64::NEG_INFINITY),
        }
    }

    fn types_above(&self) -> RawArrayBuf {
        let lists: &[&[i32]] = match self.kind() {
            DateKind::Date => &[&ABOVE_DATE],
            DateKind::ObjectId => &[&ABOVE_OBJECT_ID, &ABOVE_DATE],
            DateKind::EpochSeconds | DateKind::EpochMillis => {
                &[&ABOVE_NUMBER, &ABOVE_OBJECT_ID, &ABOVE_DATE]
            }
        };
        lists.iter().copied().flatten().copied().collect()
    }

    /// An array that is an element of an array is a value of its own, of type array.
    fn arrays_are_above(&self) -> bool {
        matches!(self.kind(), DateKind::EpochSeconds | DateKind::EpochMillis)
    }
}

impl Place {
    /// Whether a document that stands here belongs to what the fast tier holds when its boundary
    /// is `from`.
    pub fn is_held(self, from: DatePoint) -> bool {
        self >= Self::At(from)
    }
}

/// `{$or: [branches]}`.
fn any_of<const N: usize>(branches: [RawDocumentBuf; N]) -> RawDocumentBuf {
    let mut filter = RawDocumentBuf::new();
    filter.append(cstr!("$or"), branches.into_iter().collect::<RawArrayBuf>());
    filter
}

/// Adds `$nor: [branches]`.
fn exclude<const N: usize>(filter: &mut RawDocumentBuf, branches: [RawDocumentBuf; N]) {
    filter.append(cstr!("$nor"), branches.into_iter().collect::<RawArrayBuf>());
}

/// Calls `each` with every value that MongoDB's index on `path` would have of this document, but
/// for the nulls of what is missing. None when the document is not valid BSON.
fn visit(document: &RawDocument, path: &str, each: &mut impl FnMut(RawBsonRef<'_>)) -> Option<()> {
    let (name, rest) = match path.split_once('.') {
        Some((name, rest)) => (name, Some(rest)),
        None => (path, None),
    };
    match (document.get(name).ok()?, rest) {
        (None, _) => {}
        (Some(RawBsonRef::Array(elements)), None) => {
            for element in elements {
                each(element.ok()?);
            }
        }
        (Some(value), None) => each(value),
        (Some(RawBsonRef::Document(inner)), Some(rest)) => visit(inner, rest, each)?,
        (Some(RawBsonRef::Array(elements)), Some(rest)) => {
            for element in elements {
                if let RawBsonRef::Document(inner) = element.ok()? {
                    visit(inner, rest, each)?;
                }
            }
        }
        (Some(_), Some(_)) => {}
    }
    Some(())
}

/// MongoDB's order of types, from its `canonicalizeBSONType`.
mod rank {
    use bson::raw::RawBsonRef;

    pub(super) const NUMBER: u8 = 10;
    pub(super) const OBJECT_ID: u8 = 35;
    pub(super) const DATE: u8 = 45;

    pub(super) fn of(value: RawBsonRef<'_>) -> u8 {
        match value {
            RawBsonRef::MinKey | RawBsonRef::Undefined => 0,
            RawBsonRef::Null => 5,
            RawBsonRef::Int32(_)
            | RawBsonRef::Int64(_)
            | RawBsonRef::Double(_)
            | RawBsonRef::Decimal128(_) => NUMBER,
            RawBsonRef::String(_) | RawBsonRef::Symbol(_) => 15,
            RawBsonRef::Document(_) => 20,
            RawBsonRef::Array(_) => 25,
            RawBsonRef::Binary(_) => 30,
            RawBsonRef::ObjectId(_) => OBJECT_ID,
            RawBsonRef::Boolean(_) => 40,
            RawBsonRef::DateTime(_) => DATE,
            RawBsonRef::Timestamp(_) => 47,
            RawBsonRef::RegularExpression(_) => 50,
            RawBsonRef::DbPointer(_) => 55,
            RawBsonRef::JavaScriptCode(_) => 60,
            RawBsonRef::JavaScriptCodeWithScope(_) => 65,
            RawBsonRef::MaxKey => 127,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::{RawBson, rawdoc};

    fn field(kind: DateKind) -> DateField {
        DateField::new("at", kind).unwrap()
    }

    fn date(millis: i64) -> RawBson {
        RawBson::DateTime(DateTime::from_millis(millis))
    }

    #[test]
    fn filters_read_as_documented() {
        let field = field(DateKind::Date);
        let above = rawdoc! { "at": { "$type": [17, 11, 12, 13, 15, 127] } };
        assert_eq!(field.window(DatePoint(5)), rawdoc! { "at": { "$gte": date(5) } });
        assert_eq!(field.above_type(), above);
        assert_eq!(
            field.evictable_dated(Some(DatePoint(1)), DatePoint(5)),
            rawdoc! {
                "at": { "$gte": date(1), "$lt": date(5) },
                "$nor": [{ "at": { "$gte": date(5) } }, above.clone()],
            }
        );
        assert_eq!(
            field.evictable_undated(),
            rawdoc! { "at": { "$not": { "$gte": date(i64::MIN) } }, "$nor": [above.clone()] }
        );
        assert_eq!(
            field.warmable(DatePoint(1), None),
            rawdoc! { "at": { "$gte": date(1) }, "$nor": [above] }
        );
    }

    #[test]
    fn an_array_stands_where_its_newest_element_does() {
        let field = DateField::new("a.b", DateKind::Date).unwrap();
        for (document, place) in [
            (rawdoc! { "a": { "b": date(3) } }, Place::At(DatePoint(3))),
            (rawdoc! { "a": { "b": [date(3), date(7), "x"] } }, Place::At(DatePoint(7))),
            (rawdoc! { "a": [{ "b": date(3) }, { "b": [date(9)] }, 4] }, Place::At(DatePoint(9))),
            (rawdoc! { "a": { "b": [[date(3)]] } }, Place::Undated),
            (rawdoc! { "a": [[{ "b": date(3) }]] }, Place::Undated),
            (rawdoc! { "a": { "b": [date(3), { "$maxKey": 1 }] } }, Place::At(DatePoint(3))),
            (rawdoc! { "a": { "b": [date(3), RawBson::MaxKey] } }, Place::Above),
            (rawdoc! { "a": 5 }, Place::Undated),
            (rawdoc! { "a.b": date(3) }, Place::Undated),
        ] {
            assert_eq!(field.place(&document), Some(place), "{document:?}");
        }
    }

    #[test]
    fn numbers_have_more_above_them_and_nan_below() {
        let field = field(DateKind::EpochSeconds);
        for (value, place) in [
            (RawBson::Double(f64::NAN), Place::Undated),
            (RawBson::Double(2.5), Place::At(DatePoint(2))),
            (RawBson::String("2".into()), Place::Above),
            (
                RawBson::Array([RawBson::Array(RawArrayBuf::new())].into_iter().collect()),
                Place::Above,
            ),
            (RawBson::Array(RawArrayBuf::new()), Place::Undated),
            (RawBson::Null, Place::Undated),
        ] {
            assert_eq!(field.place(&rawdoc! { "at": value.clone() }), Some(place), "{value:?}");
        }
        assert!(Place::At(DatePoint(2)).is_held(DatePoint(2)));
        assert!(!Place::At(DatePoint(2)).is_held(DatePoint(3)));
        assert!(
            Place::Above.is_held(DatePoint(i64::MAX))
                && !Place::Undated.is_held(DatePoint(i64::MIN))
        );
    }
}
