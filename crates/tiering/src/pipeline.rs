//! What an aggregation pipeline asks for, as far as routing needs it: its beginning, and whether
//! any stage reads or writes something other than the collection. Where it goes is decided in
//! `route`.

use bson::raw::{RawArray, RawBsonRef, RawDocument};
use smallvec::SmallVec;

use crate::number::Number;

/// Deepest nesting of pipelines in `$facet`, `$lookup` and `$unionWith` that is followed (MongoDB
/// itself allows 20 levels of views and sub-pipelines).
const MAX_DEPTH: usize = 32;

/// A collection that a stage names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named<'a> {
    /// The database, where the stage names one; else the aggregation's own.
    pub db: Option<&'a str>,
    /// The collection.
    pub coll: &'a str,
}

/// What a stage does, as far as routing cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Match,
    Sort,
    Limit,
    /// As many documents come out as go in.
    EachDocument,
    /// Nothing comes out of nothing.
    Plain,
    /// Something may come out of nothing.
    FromNothing,
    /// Sub-pipelines over the same documents; something comes out of nothing.
    Facet,
    /// Reads another collection.
    Join,
    /// Writes a collection.
    Output,
    /// Answers from a server's own records, not from documents.
    Statistics,
    ChangeStream,
    /// Needs more than the documents (a search index), or is not known here.
    Other,
}

fn stage_of(name: &str) -> Stage {
    match name {
        "$match" => Stage::Match,
        "$sort" => Stage::Sort,
        "$limit" => Stage::Limit,
        "$project" | "$addFields" | "$set" | "$unset" | "$replaceRoot" | "$replaceWith" => {
            Stage::EachDocument
        }
        "$skip" | "$group" | "$unwind" | "$redact" | "$sample" | "$count" | "$sortByCount"
        | "$bucket" | "$bucketAuto" | "$setWindowFields" | "$fill" => Stage::Plain,
        "$densify" => Stage::FromNothing,
        "$facet" => Stage::Facet,
        "$lookup" | "$unionWith" | "$graphLookup" => Stage::Join,
        "$out" | "$merge" => Stage::Output,
        "$collStats"
        | "$indexStats"
        | "$planCacheStats"
        | "$currentOp"
        | "$listSessions"
        | "$listLocalSessions"
        | "$listSampledQueries"
        | "$listSearchIndexes"
        | "$listCatalog"
        | "$listClusterCatalog"
        | "$queryStats"
        | "$querySettings"
        | "$operationMetrics"
        | "$shardedDataDistribution" => Stage::Statistics,
        "$changeStream" | "$changeStreamSplitLargeEvent" => Stage::ChangeStream,
        _ => Stage::Other,
    }
}

/// The beginning of a pipeline and the nature of the rest.
#[derive(Debug, Default)]
pub(crate) struct Pipeline<'a> {
    /// The filters of the leading `$match` stages (a `$sort` may stand among them).
    pub filters: SmallVec<[&'a RawDocument; 2]>,
    /// The last `$sort` among the leading stages.
    pub sort: Option<&'a RawDocument>,
    /// The `$limit` right behind the leading stages.
    pub limit: Option<RawBsonRef<'a>>,
    /// How many stages `filters`, `sort` and `limit` came from.
    pub prefix: usize,
    /// All stages but the leading `$match` are one document in, one document out.
    pub keeps_all: bool,
    /// The same, if no more than one document goes in.
    pub keeps_one: bool,
    /// Nothing comes out if nothing goes in.
    pub nothing_from_nothing: bool,
    pub output: Option<Named<'a>>,
    pub statistics: bool,
    pub change_stream: bool,
    /// A stage reads more than the collection, or cannot be told not to.
    pub beyond_collection: bool,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn read(stages: &'a RawArray) -> Self {
        let mut read = Self {
            keeps_all: true,
            keeps_one: true,
            nothing_from_nothing: true,
            ..Self::default()
        };
        let mut leading = true;
        for (position, stage) in stages.into_iter().enumerate() {
            let Some((name, value)) = stage.ok().and_then(only_field) else {
                read.beyond_collection = true;
                return read;
            };
            let kind = stage_of(name);
            if leading {
                leading = read.lead(kind, value, position + 1);
            }
            match kind {
                Stage::Match if leading => {}
                Stage::Sort | Stage::EachDocument => {}
                Stage::Limit => {
                    read.keeps_all = false;
                    read.keeps_one &= whole(value).is_some_and(|limit| limit > 0);
                }
                Stage::Match | Stage::Plain => read.loses_documents(),
                Stage::FromNothing => {
                    read.loses_documents();
                    read.nothing_from_nothing = false;
                }
                Stage::Facet => {
                    read.loses_documents();
                    read.nothing_from_nothing = false;
                    read.beyond_collection |= facet_goes_beyond(value, MAX_DEPTH);
                }
                Stage::Output => read.output = target(value).or(read.output),
                Stage::Statistics => read.statistics |= position == 0,
                Stage::ChangeStream => read.change_stream |= position == 0,
                Stage::Join | Stage::Other => read.beyond_collection = true,
            }
            // Such stages are legal only where they are read as what they are.
            read.beyond_collection |= match kind {
                Stage::Output => read.output.is_none(),
                Stage::Statistics => position != 0,
                _ => false,
            };
        }
        read
    }

    fn loses_documents(&mut self) {
        self.keeps_all = false;
        self.keeps_one = false;
    }

    /// Takes in one leading stage; false when it is the last, or none, of them.
    fn lead(&mut self, kind: Stage, value: RawBsonRef<'a>, prefix: usize) -> bool {
        match (kind, value) {
            (Stage::Match, RawBsonRef::Document(filter)) => self.filters.push(filter),
            (Stage::Sort, RawBsonRef::Document(sort)) => self.sort = Some(sort),
            (Stage::Limit, limit) => {
                self.limit = Some(limit);
                self.prefix = prefix;
                return false;
            }
            _ => return false,
        }
        self.prefix = prefix;
        true
    }
}

/// The one field of a stage.
fn only_field(stage: RawBsonRef<'_>) -> Option<(&str, RawBsonRef<'_>)> {
    let mut fields = stage.as_document()?.iter();
    let (name, value) = fields.next()?.ok()?;
    fields.next().is_none().then(|| (name.as_str(), value))
}

/// The collection that `$out` or `$merge` writes.
fn target(value: RawBsonRef<'_>) -> Option<Named<'_>> {
    match value {
        RawBsonRef::Document(document) => match document.get("into").ok()? {
            Some(into) => named(into),
            None => named(value),
        },
        _ => named(value),
    }
}

/// `"coll"` or `{db: .., coll: ..}`.
fn named(value: RawBsonRef<'_>) -> Option<Named<'_>> {
    match value {
        RawBsonRef::String(coll) => Some(Named { db: None, coll }),
        RawBsonRef::Document(document) => {
            let coll = document.get("coll").ok()??.as_str()?;
            let db = match document.get("db").ok()? {
                Some(db) => Some(db.as_str()?),
                None => None,
            };
            Some(Named { db, coll })
        }
        _ => None,
    }
}

/// Whether a sub-pipeline of `$facet` reads more than the documents it is given.
fn facet_goes_beyond(value: RawBsonRef<'_>, depth: usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else {
        return true;
    };
    let Some(facets) = value.as_document() else {
        return true;
    };
    let stage_goes_beyond = |(name, value)| match stage_of(name) {
        Stage::Match
        | Stage::Sort
        | Stage::Limit
        | Stage::EachDocument
        | Stage::Plain
        | Stage::FromNothing => false,
        Stage::Facet => facet_goes_beyond(value, depth),
        _ => true,
    };
    facets.iter().any(|facet| match facet {
        Ok((_, RawBsonRef::Array(stages))) => stages
            .into_iter()
            .any(|stage| stage.ok().and_then(only_field).is_none_or(stage_goes_beyond)),
        _ => true,
    })
}

/// Calls `each` with every collection that the pipeline reads besides its own, and with the one it
/// writes (`true`), at any depth. False when a stage is not understood: it may name anything.
pub fn named_collections<'a>(stages: &'a RawArray, each: &mut impl FnMut(Named<'a>, bool)) -> bool {
    named_in_stages(stages, MAX_DEPTH, each)
}

fn named_in_stages<'a>(
    stages: &'a RawArray,
    depth: usize,
    each: &mut impl FnMut(Named<'a>, bool),
) -> bool {
    let Some(depth) = depth.checked_sub(1) else {
        return false;
    };
    let mut understood = true;
    for stage in stages {
        understood &= stage
            .ok()
            .and_then(only_field)
            .is_some_and(|(name, value)| named_in_stage(name, value, depth, each));
    }
    understood
}

fn named_in_stage<'a>(
    name: &str,
    value: RawBsonRef<'a>,
    depth: usize,
    each: &mut impl FnMut(Named<'a>, bool),
) -> bool {
    let get = |document: &'a RawDocument, field: &str| document.get(field).ok().flatten();
    match (stage_of(name), value) {
        (Stage::Output, value) => {
            let target = target(value);
            target.into_iter().for_each(|target| each(target, true));
            target.is_some()
        }
        (Stage::Join, RawBsonRef::String(coll)) => {
            each(Named { db: None, coll }, false);
            true
        }
        (Stage::Join, RawBsonRef::Document(options)) => {
            // $unionWith: {coll, db}; the others: {from}. A sub-pipeline that begins with
            // $documents needs neither.
            let from = match get(options, "from") {
                Some(from) => named(from),
                None => named(value),
            };
            let pipeline = get(options, "pipeline");
            from.into_iter().for_each(|from| each(from, false));
            match pipeline {
                Some(RawBsonRef::Array(stages)) => named_in_stages(stages, depth, each),
                Some(_) => false,
                None => from.is_some(),
            }
        }
        (Stage::Facet, RawBsonRef::Document(facets)) => {
            let mut understood = true;
            for facet in facets {
                understood &= match facet {
                    Ok((_, RawBsonRef::Array(stages))) => named_in_stages(stages, depth, each),
                    _ => false,
                };
            }
            understood
        }
        // These name no collection; all others that are not known may.
        (Stage::Other, _) => {
            matches!(name, "$documents" | "$geoNear" | "$search" | "$searchMeta" | "$vectorSearch")
        }
        (Stage::Join | Stage::Facet, _) => false,
        _ => true,
    }
}

/// A count of documents as commands give it: any number type, whole, not negative.
pub(crate) fn whole(value: RawBsonRef<'_>) -> Option<i64> {
    let number = Number::new(value)?;
    let floor = number.floor()?;
    (number.compare_i64(floor)? == std::cmp::Ordering::Equal).then_some(floor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bson::{Bson, RawDocumentBuf, bson, doc};

    fn stages(stages: Bson) -> RawDocumentBuf {
        RawDocumentBuf::try_from(doc! { "pipeline": stages }).unwrap()
    }

    #[test]
    fn the_beginning_is_what_mongod_runs_first() {
        let command = stages(bson!([
            { "$match": { "a": 1 } },
            { "$sort": { "b": 1 } },
            { "$match": { "c": 1 } },
            { "$limit": 3.0 },
            { "$match": { "d": 1 } },
        ]));
        let read = Pipeline::read(command.get_array("pipeline").unwrap());
        assert_eq!(read.filters.len(), 2);
        assert_eq!(read.prefix, 4);
        assert_eq!(read.limit.and_then(whole), Some(3));
        assert!(!read.keeps_one && read.nothing_from_nothing && !read.beyond_collection);
    }

    #[test]
    fn stages_that_read_elsewhere_are_found_at_any_depth() {
        let beyond = |list: Bson| {
            let command = stages(list);
            Pipeline::read(command.get_array("pipeline").unwrap()).beyond_collection
        };
        assert!(beyond(bson!([{ "$facet": { "a": [{ "$unionWith": "c" }] } }])));
        assert!(beyond(bson!([{ "$project": { "a": 1 } }, { "$lookup": { "from": "c" } }])));
        assert!(beyond(bson!([{ "$someday": {} }])));
        assert!(beyond(bson!([{ "$match": {}, "$limit": 1 }])));
        assert!(beyond(bson!([{ "$match": {} }, { "$indexStats": {} }])));
        assert!(beyond(bson!([5])));
        assert!(!beyond(bson!([
            { "$facet": { "a": [{ "$match": {} }, { "$densify": { "partitionByFields": ["x"] } }] } },
        ])));
    }

    #[test]
    fn every_named_collection_is_reported() {
        let command = stages(bson!([
            { "$lookup": { "from": "a", "pipeline": [{ "$unionWith": "b" }] } },
            { "$facet": { "x": [{ "$unionWith": { "coll": "c", "pipeline": [] } }] } },
            { "$graphLookup": { "from": { "db": "other", "coll": "d" } } },
            { "$lookup": { "pipeline": [{ "$documents": [] }] } },
            { "$merge": { "into": { "db": "other", "coll": "e" } } },
        ]));
        let mut names = Vec::new();
        let understood =
            named_collections(command.get_array("pipeline").unwrap(), &mut |n, out| {
                names.push((n.db, n.coll, out));
            });
        assert!(understood);
        assert_eq!(
            names,
            [
                (None, "a", false),
                (None, "b", false),
                (None, "c", false),
                (Some("other"), "d", false),
                (Some("other"), "e", true),
            ]
        );
        for unknown in
            [bson!([{ "$someday": {} }]), bson!([{ "$lookup": 5 }]), bson!([{ "$out": 5 }])]
        {
            let command = stages(unknown);
            assert!(!named_collections(command.get_array("pipeline").unwrap(), &mut |_, _| {}));
        }
    }
}
