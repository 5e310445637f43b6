//! Which `_id` an upsert gives the document it inserts, as far as the command's bytes tell. An
//! insert must be proved absent from both tiers before it runs, so its key must be known; where it
//! is not, the caller finds out in a transaction.

use bson::raw::{RawArray, RawBsonRef, RawDocument};
use smallvec::SmallVec;

use crate::coverage::is_operators;
use crate::route::id_by_equality;

/// Deepest nesting of a filter that is searched for `_id`.
const MAX_DEPTH: usize = 64;

/// The `_id` of the document that an upsert inserts when nothing matches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UpsertId<'a> {
    /// This one (or the server refuses the command).
    Known(RawBsonRef<'a>),
    /// A new ObjectId, made by the server.
    Generated,
    /// Cannot be told from the command (`{_id: {$all: [5]}}`, `{"_id.a": 5}`, a filter that can
    /// never hold, a pipeline that computes it): run it in a transaction and look at `upserted`
    /// before committing.
    Unclear,
}

/// What the filter and the update say of the new `_id`. `update` is a replacement, a document of
/// operators or a pipeline.
pub fn upsert_id<'a>(filter: &'a RawDocument, update: RawBsonRef<'a>) -> UpsertId<'a> {
    let from_filter = if mentions_id(filter, MAX_DEPTH) {
        let mut plain = PlainFilter::default();
        match (plain.walk(filter, MAX_DEPTH), plain.id) {
            (Some(()), Some(id)) => UpsertId::Known(id),
            _ => return UpsertId::Unclear,
        }
    } else {
        UpsertId::Generated
    };
    let from_update = match update {
        RawBsonRef::Array(stages) => match leaves_id(stages) {
            true => UpsertId::Generated,
            false => UpsertId::Unclear,
        },
        RawBsonRef::Document(update) if is_operators(update) => id_in_operators(update),
        RawBsonRef::Document(replacement) => match replacement.get("_id") {
            Ok(Some(id)) => UpsertId::Known(id),
            Ok(None) => UpsertId::Generated,
            Err(_) => UpsertId::Unclear,
        },
        _ => UpsertId::Unclear,
    };
    match (from_filter, from_update) {
        // An operator cannot change the `_id` that the filter gave, nor can a replacement.
        (UpsertId::Known(id), UpsertId::Known(_) | UpsertId::Generated) => UpsertId::Known(id),
        (_, from_update) => from_update,
    }
}

/// A filter of plain conditions, one a field, one of them an equality on `_id`. mongod takes the
/// new `_id` from the filter *after* simplifying it, and a filter it finds contradictory
/// (`{_id: 5, x: {$all: []}}`) gives none: so nothing is accepted that could be simplified away.
#[derive(Default)]
struct PlainFilter<'a> {
    fields: SmallVec<[&'a str; 8]>,
    id: Option<RawBsonRef<'a>>,
}

impl<'a> PlainFilter<'a> {
    /// None as soon as something is not plain.
    fn walk(&mut self, filter: &'a RawDocument, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        for field in filter {
            let (name, value) = field.ok()?;
            match (name.as_str(), value) {
                ("$comment", _) => continue,
                ("$and", RawBsonRef::Array(branches)) => {
                    for branch in branches {
                        self.walk(branch.ok()?.as_document()?, depth)?;
                    }
                    continue;
                }
                ("_id", value) => self.id = Some(id_by_equality(value)?),
                (name, value) => {
                    let is_plain = !name.starts_with('$') && !is_id_path(name) && is_plain(value);
                    is_plain.then_some(())?;
                }
            }
            if self.fields.contains(&name.as_str()) {
                return None;
            }
            self.fields.push(name.as_str());
        }
        Some(())
    }
}

/// A value to equal, or comparisons that do not contradict each other by form.
fn is_plain(value: RawBsonRef<'_>) -> bool {
    let operators = match value {
        RawBsonRef::Document(operators) if is_operators(operators) => operators,
        _ => return true,
    };
    let mut negative = false;
    let mut count = 0;
    let plain = operators.into_iter().all(|operator| {
        count += 1;
        match operator {
            Ok((name, RawBsonRef::Array(list))) if matches!(name.as_str(), "$in" | "$nin") => {
                negative |= name.as_str() == "$nin";
                !list.is_empty()
            }
            Ok((name, _)) => {
                negative |= name.as_str() == "$ne";
                matches!(name.as_str(), "$eq" | "$ne" | "$gt" | "$gte" | "$lt" | "$lte" | "$exists")
            }
            Err(_) => false,
        }
    });
    plain && (count == 1 || !negative)
}

/// `_id` in `$set` or `$setOnInsert`; anything else that touches it is not followed.
fn id_in_operators(update: &RawDocument) -> UpsertId<'_> {
    let mut found = UpsertId::Generated;
    for operator in update {
        let Ok((name, RawBsonRef::Document(fields))) = operator else {
            return UpsertId::Unclear;
        };
        for field in fields {
            let Ok((path, value)) = field else {
                return UpsertId::Unclear;
            };
            let renames_to_id = name.as_str() == "$rename" && value.as_str().is_none_or(is_id_path);
            if !is_id_path(path.as_str()) && !renames_to_id {
                continue;
            }
            let sets = matches!(name.as_str(), "$set" | "$setOnInsert") && path.as_str() == "_id";
            if !sets || found != UpsertId::Generated {
                return UpsertId::Unclear;
            }
            found = UpsertId::Known(value);
        }
    }
    found
}

/// Whether a pipeline's stages change single fields only, `_id` not among them.
fn leaves_id(stages: &RawArray) -> bool {
    stages.into_iter().all(|stage| {
        let Ok(RawBsonRef::Document(stage)) = stage else {
            return false;
        };
        stage.into_iter().all(|field| match field {
            Ok((name, RawBsonRef::Document(fields))) => {
                matches!(name.as_str(), "$set" | "$addFields")
                    && fields
                        .iter_elements()
                        .all(|field| field.is_ok_and(|field| !is_id_path(field.key().as_str())))
            }
            Ok((name, RawBsonRef::String(path))) => name.as_str() == "$unset" && !is_id_path(path),
            Ok((name, RawBsonRef::Array(paths))) => {
                name.as_str() == "$unset"
                    && paths.into_iter().all(|path| {
                        path.is_ok_and(|path| path.as_str().is_some_and(|path| !is_id_path(path)))
                    })
            }
            _ => false,
        })
    })
}

fn is_id_path(path: &str) -> bool {
    path == "_id" || path.starts_with("_id.")
}

/// Whether a filter has a condition on `_id` or a part of it, anywhere.
fn mentions_id(filter: &RawDocument, depth: usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else {
        return true;
    };
    filter.into_iter().any(|field| match field {
        Ok((name, RawBsonRef::Array(branches))) if name.as_str().starts_with('$') => {
            branches.into_iter().any(|branch| match branch {
                Ok(RawBsonRef::Document(branch)) => mentions_id(branch, depth),
                _ => true,
            })
        }
        Ok((name, _)) => is_id_path(name.as_str()),
        Err(_) => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::rawdoc;

    #[test]
    fn the_new_id_is_known_where_it_can_be() {
        let set = rawdoc! { "$set": { "x": 1 } };
        let by_id = rawdoc! { "_id": 5 };
        let guarded =
            rawdoc! { "_id": { "$eq": 5 }, "n": { "$lt": 9, "$gt": 1 }, "$and": [{ "s": "x" }] };
        let by_other = rawdoc! { "x": 1, "$or": [{ "y": 1 }, { "z": 1 }] };
        for (filter, update, expected) in [
            (&by_id, set.clone(), Some(5)),
            (&by_id, rawdoc! { "_id": 6 }, Some(5)),
            (&guarded, set.clone(), Some(5)),
            (&by_other, set.clone(), None),
            (&by_other, rawdoc! { "x": 1 }, None),
            (&by_other, rawdoc! { "_id": 5, "x": 1 }, Some(5)),
            (&by_other, rawdoc! { "$setOnInsert": { "_id": 5 } }, Some(5)),
        ] {
            let expected =
                expected.map_or(UpsertId::Generated, |id| UpsertId::Known(RawBsonRef::Int32(id)));
            assert_eq!(upsert_id(filter, RawBsonRef::Document(&update)), expected, "{update:?}");
        }
        for (filter, update) in [
            (rawdoc! { "_id": { "$gt": 5 } }, set.clone()),
            (rawdoc! { "_id": 5, "x": { "$all": [] } }, set.clone()),
            (rawdoc! { "_id": 5, "x": { "$in": [] } }, set.clone()),
            (rawdoc! { "_id": 5, "x": 1, "$and": [{ "x": { "$ne": 1 } }] }, set.clone()),
            (rawdoc! { "_id": 5, "x": { "$eq": 1, "$ne": 1 } }, set.clone()),
            (rawdoc! { "_id": { "$eq": 5, "$ne": 5 } }, set.clone()),
            (rawdoc! { "_id": 5, "$expr": false }, set.clone()),
            (rawdoc! { "$or": [{ "_id": 5 }] }, set.clone()),
            (rawdoc! { "_id.a": 5 }, set),
            (by_other.clone(), rawdoc! { "$set": { "_id.a": 5 } }),
            (by_other.clone(), rawdoc! { "$inc": { "_id": 5 } }),
            (by_other, rawdoc! { "$rename": { "x": "_id" } }),
        ] {
            let id = upsert_id(&filter, RawBsonRef::Document(&update));
            assert_eq!(id, UpsertId::Unclear, "{filter:?} {update:?}");
        }
    }

    #[test]
    fn a_pipeline_may_compute_the_id() {
        let filter = rawdoc! { "x": 1 };
        let of = |stages: &RawDocument| {
            let stages = stages.get_array("p").unwrap().to_owned();
            upsert_id(&filter, RawBsonRef::Array(&stages)) == UpsertId::Generated
        };
        assert!(of(&rawdoc! { "p": [{ "$set": { "y": 1 } }, { "$unset": ["z", "w"] }] }));
        assert!(!of(&rawdoc! { "p": [{ "$set": { "_id": "$x" } }] }));
        assert!(!of(&rawdoc! { "p": [{ "$unset": "_id" }] }));
        assert!(!of(&rawdoc! { "p": [{ "$replaceWith": { "y": 1 } }] }));
        assert!(!of(&rawdoc! { "p": [{ "$project": { "y": 1 } }] }));
    }
}
