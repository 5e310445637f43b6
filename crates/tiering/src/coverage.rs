//! Whether a client's filter can match only documents the fast tier is known to hold. Sound, not
//! complete: a "yes" is a proof, a "no" costs a read of the archive. Where a query goes is decided
//! in `route`.
//!
//! The proof works value by value. MongoDB matches a range or an equality on a path when one of
//! the path's values (elements of arrays counted singly) satisfies it, and `{date: {$gte: B}}`
//! asks the same values. So a condition on the same path that only values of the date's own type
//! at or after `B` can satisfy implies the window, whatever else the document holds.

use std::cmp::Ordering;

use bson::raw::{RawArray, RawBsonRef, RawDocument};

use crate::date::{DateField, DatePoint};

/// Deepest nesting of `$and` and `$or` that is followed; deeper ones are simply not proved.
const MAX_DEPTH: usize = 32;

/// Whether every document that `filter` matches also matches `{date: {$gte: boundary}}`.
pub fn covers(filter: &RawDocument, field: &DateField, boundary: DatePoint) -> bool {
    Proof { field, boundary }.filter(filter, MAX_DEPTH)
}

struct Proof<'a> {
    field: &'a DateField,
    boundary: DatePoint,
}

impl Proof<'_> {
    /// The fields of a filter hold together, also when one is named twice: any of them suffices.
    fn filter(&self, filter: &RawDocument, depth: usize) -> bool {
        let Some(depth) = depth.checked_sub(1) else {
            return false;
        };
        for element in filter.iter_elements() {
            let Ok(element) = element else {
                return false;
            };
            let name = element.key().as_str();
            // Everything that begins with "$" and is not named here ($nor, $expr, $where, ...)
            // proves nothing.
            let proved = match name {
                "$and" => element.value().is_ok_and(|value| {
                    branches(value).is_some_and(|mut all| {
                        all.any(|branch| branch.is_some_and(|one| self.filter(one, depth)))
                    })
                }),
                "$or" => element.value().is_ok_and(|value| self.every_branch(value, depth)),
                _ if name == self.field.path() => {
                    element.value().is_ok_and(|value| self.condition(value))
                }
                _ => false,
            };
            if proved {
                return true;
            }
        }
        false
    }

    fn every_branch(&self, value: RawBsonRef<'_>, depth: usize) -> bool {
        let Some(mut all) = branches(value) else {
            return false;
        };
        let mut any = false;
        let proved = all.all(|branch| {
            any = true;
            branch.is_some_and(|one| self.filter(one, depth))
        });
        proved && any
    }

    /// What stands beside the path: a value to equal, or a document of operators.
    fn condition(&self, value: RawBsonRef<'_>) -> bool {
        match value {
            RawBsonRef::Document(operators) => {
                is_operators(operators) && self.operators(operators, true)
            }
            value => self.is_inside(value),
        }
    }

    /// The operators hold together: any that implies the window suffices.
    fn operators(&self, operators: &RawDocument, outermost: bool) -> bool {
        operators.iter().any(|operator| {
            let Ok((name, operand)) = operator else {
                return false;
            };
            match (name.as_str(), operand) {
                ("$eq" | "$gt" | "$gte", operand) => self.is_inside(operand),
                // A null or a regular expression among them is not a date, hence no proof.
                ("$in", RawBsonRef::Array(values)) => self.every_value(values),
                ("$all", RawBsonRef::Array(values)) if outermost => {
                    values.into_iter().any(|value| value.is_ok_and(|one| self.is_inside(one)))
                }
                // One element of the array satisfies all of these at once, itself and not as an
                // array of its own: hence no second level.
                ("$elemMatch", RawBsonRef::Document(inner)) if outermost => {
                    is_operators(inner) && self.operators(inner, false)
                }
                _ => false,
            }
        })
    }

    fn every_value(&self, values: &RawArray) -> bool {
        values.into_iter().all(|value| value.is_ok_and(|one| self.is_inside(one)))
    }

    /// Whether a value is of the date's own type and not older than the boundary. An array equals
    /// whole arrays too, whose elements a range does not see: it is never inside.
    fn is_inside(&self, value: RawBsonRef<'_>) -> bool {
        self.field.kind().compare(value, self.boundary).is_some_and(|order| order != Ordering::Less)
    }
}

/// The branches of `$and` or `$or`; None inside for one that is not a document.
fn branches<'a>(value: RawBsonRef<'a>) -> Option<impl Iterator<Item = Option<&'a RawDocument>>> {
    let array = value.as_array()?;
    Some(array.into_iter().map(|branch| branch.ok().and_then(RawBsonRef::as_document)))
}

/// Whether MongoDB reads a document beside a path as operators rather than as a value to equal:
/// the first name begins with `$`. A reference (`$ref`, `$id`, `$db`) is a value, and a document
/// that mixes both kinds of name is left unread.
pub(crate) fn is_operators(document: &RawDocument) -> bool {
    let mut any = false;
    let all = document.iter_elements().all(|element| {
        any = true;
        element.is_ok_and(|element| {
            let name = element.key().as_str();
            name.starts_with('$') && !matches!(name, "$ref" | "$id" | "$db")
        })
    });
    any && all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::date::DateKind;
    use bson::oid::ObjectId;
    use bson::{Bson, DateTime, RawDocumentBuf, doc};

    const BOUNDARY: i64 = 1_000;

    fn date(millis: i64) -> Bson {
        Bson::DateTime(DateTime::from_millis(millis))
    }

    fn proved(kind: DateKind, filter: bson::Document) -> bool {
        let field = DateField::new("at", kind).unwrap();
        covers(&RawDocumentBuf::try_from(filter).unwrap(), &field, DatePoint(BOUNDARY))
    }

    #[test]
    fn what_only_recent_dates_satisfy_is_covered() {
        let (new, newer) = (date(1_000), date(2_000));
        for filter in [
            doc! { "at": new.clone() },
            doc! { "at": { "$gte": new.clone() } },
            doc! { "at": { "$gt": new.clone(), "$lt": newer.clone() } },
            doc! { "at": { "$lt": newer.clone(), "$gte": new.clone() } },
            doc! { "at": { "$in": [new.clone(), newer.clone()] } },
            doc! { "at": { "$all": [date(1), new.clone()] } },
            doc! { "at": { "$elemMatch": { "$gte": new.clone(), "$ne": 5 } } },
            doc! { "x": 1, "$and": [{ "y": 2 }, { "$and": [{ "at": { "$eq": new.clone() } }] }] },
            doc! { "$or": [{ "at": new.clone() }, { "x": 1, "at": { "$gt": newer.clone() } }] },
            doc! { "at": { "$gte": date(1) }, "$and": [{ "at": { "$gte": newer } }] },
        ] {
            assert!(proved(DateKind::Date, filter.clone()), "{filter}");
        }
    }

    #[test]
    fn nothing_else_is() {
        let (old, new) = (date(999), date(1_000));
        for filter in [
            doc! {},
            doc! { "at": old.clone() },
            doc! { "at": { "$gte": old.clone() } },
            doc! { "at": { "$lt": new.clone() } },
            doc! { "at": { "$ne": old.clone() } },
            doc! { "at": { "$in": [new.clone(), old.clone()] } },
            doc! { "at": { "$in": [new.clone(), Bson::Null] } },
            doc! { "at": { "$in": [new.clone(), { "$oid": 1 }] } },
            doc! { "at": { "$nin": [old.clone()] } },
            doc! { "at": [new.clone()] },
            doc! { "at": { "$eq": [new.clone()] } },
            doc! { "at": { "$in": [[new.clone()]] } },
            doc! { "at": Bson::Null },
            doc! { "at": { "x": { "$gte": new.clone() } } },
            doc! { "at": { "x": 1, "$gte": new.clone() } },
            doc! { "at": { "$gte": new.clone(), "$ref": "c" } },
            doc! { "at": { "$not": { "$lt": new.clone() } } },
            doc! { "at": { "$not": { "$not": { "$gte": new.clone() } } } },
            doc! { "at": { "$elemMatch": { "$elemMatch": { "$gte": new.clone() } } } },
            doc! { "at": { "$elemMatch": { "$or": [{ "$gte": new.clone() }] } } },
            doc! { "at": { "$elemMatch": { "b": { "$gte": new.clone() } } } },
            doc! { "at": { "$type": "date" } },
            doc! { "at": { "$exists": true } },
            doc! { "at": { "$gte": "2030-01-01" } },
            doc! { "at": { "$gte": 5_000 } },
            doc! { "at": { "$gte": Bson::MaxKey } },
            doc! { "at": { "$gte": Bson::Timestamp(bson::Timestamp { time: 9, increment: 9 }) } },
            doc! { "at.x": { "$gte": new.clone() } },
            doc! { "$nor": [{ "at": { "$gte": new.clone() } }] },
            doc! { "$or": [{ "at": new.clone() }, { "x": 1 }] },
            doc! { "$or": [{ "at": new.clone() }, 5] },
            doc! { "$or": [] },
            doc! { "$and": [] },
            doc! { "$or": { "at": new.clone() } },
            doc! { "$expr": { "$gte": ["$at", new.clone()] } },
            doc! { "$jsonSchema": { "properties": { "at": { "minimum": 5 } } } },
            doc! { "$comment": { "at": new } },
        ] {
            assert!(!proved(DateKind::Date, filter.clone()), "{filter}");
        }
    }

    #[test]
    fn numbers_are_compared_exactly_and_across_their_types() {
        let at = |operand: Bson| doc! { "at": { "$gte": operand } };
        let decimal = |text: &str| Bson::Decimal128(text.parse().unwrap());
        for operand in [
            Bson::Int32(1_000),
            Bson::Int64(1_000),
            Bson::Double(1_000.5),
            decimal("1000.00"),
            Bson::Double(f64::INFINITY),
        ] {
            assert!(proved(DateKind::EpochMillis, at(operand.clone())), "{operand}");
        }
        for operand in [
            Bson::Double(999.999),
            decimal("999.99999999999999999999"),
            Bson::Double(f64::NAN),
            decimal("NaN"),
            Bson::Double(f64::NEG_INFINITY),
            date(5_000),
            Bson::String("5000".into()),
        ] {
            assert!(!proved(DateKind::EpochMillis, at(operand.clone())), "{operand}");
        }
    }

    #[test]
    fn an_object_id_is_compared_by_all_its_bytes() {
        let id = |seconds: u32, rest: u8| {
            let mut bytes = [rest; 12];
            bytes[..4].copy_from_slice(&seconds.to_be_bytes());
            Bson::ObjectId(ObjectId::from_bytes(bytes))
        };
        let at = |operand: Bson| doc! { "at": { "$gt": operand } };
        assert!(proved(DateKind::ObjectId, at(id(1_000, 0))));
        assert!(!proved(DateKind::ObjectId, at(id(999, 0xff))));
        assert!(!proved(DateKind::ObjectId, at(date(5_000_000))));
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |levels: usize| {
            (0..levels).fold(doc! { "at": date(1_000) }, |inner, _| doc! { "$and": [inner] })
        };
        assert!(proved(DateKind::Date, nested(10)));
        assert!(!proved(DateKind::Date, nested(90)));
    }
}
