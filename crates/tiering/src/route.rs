//! Where a read of a tiered collection goes, and what a write's filter names: the read table of
//! the manual, decided from the command's bytes alone. Carrying it out is the data path's task;
//! what it must still check stands with each variant of [`ReadRoute`].
//!
//! The usual `find` by `_id` is classified without an allocation.

use bson::raw::{RawArray, RawBsonRef, RawDocument, RawDocumentBuf};
use smallvec::SmallVec;

use crate::coverage::{covers, is_operators};
use crate::date::{DateField, DatePoint};
use crate::key::{Key, KeyError, has_text};
use crate::number::Number;
use crate::pipeline::{Named, Pipeline, whole};

/// Deepest nesting of a filter that is looked into; deeper ones go to the archive.
const MAX_DEPTH: usize = 64;

/// The word in a command's `comment` that sends a read to the archive.
const ARCHIVE_HINT: &str = "halocline:archive";

/// Why a read went where it went. The labels are stable: metrics, `explain` and logs carry them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The namespace is not tiered.
    Untiered,
    /// The client asked for the archive in a comment.
    Hint,
    /// Inside a transaction that runs on the fast tier.
    Transaction,
    /// Something only the archive answers exactly.
    UnsupportedShape,
    /// By `_id`, found on the fast tier.
    PointHit,
    /// By `_id`, not on the fast tier.
    PointMiss,
    /// By several `_id`s, all found on the fast tier.
    PointsHit,
    /// By several `_id`s, answered by both tiers together.
    PointsMerged,
    /// By a unique value, found on the fast tier.
    UniqueHit,
    /// By a unique value, not on the fast tier.
    UniqueMiss,
    /// The filter names recent dates only.
    Covered,
    /// The newest documents.
    NewestN,
    /// Nothing of the above.
    NotCovered,
}

impl Reason {
    /// All of them, for registering metrics.
    pub const ALL: [Self; 13] = [
        Self::Untiered,
        Self::Hint,
        Self::Transaction,
        Self::UnsupportedShape,
        Self::PointHit,
        Self::PointMiss,
        Self::PointsHit,
        Self::PointsMerged,
        Self::UniqueHit,
        Self::UniqueMiss,
        Self::Covered,
        Self::NewestN,
        Self::NotCovered,
    ];

    /// The stable label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Untiered => "untiered",
            Self::Hint => "hint",
            Self::Transaction => "transaction",
            Self::UnsupportedShape => "unsupported_shape",
            Self::PointHit => "point_hit",
            Self::PointMiss => "point_miss",
            Self::PointsHit => "points_hit",
            Self::PointsMerged => "points_merged",
            Self::UniqueHit => "unique_hit",
            Self::UniqueMiss => "unique_miss",
            Self::Covered => "covered",
            Self::NewestN => "newest_n",
            Self::NotCovered => "not_covered",
        }
    }
}

/// What a collection looks like at the moment a command is routed.
#[derive(Debug, Clone, Copy)]
pub struct CollectionView<'a> {
    /// The date field.
    pub field: &'a DateField,
    /// The boundary: the fast tier holds every document with `{date: {$gte: boundary}}`, and every
    /// document whose date sorts above the kind's type. None while nothing is known to be whole.
    pub boundary: Option<DatePoint>,
    /// The indexes of the fast tier. The one on `_id` need not be among them.
    pub indexes: &'a [IndexDefinition],
}

/// An index as `listIndexes` describes it.
#[derive(Debug, Clone)]
pub struct IndexDefinition {
    name: String,
    pattern: Key,
    unique: bool,
    /// The fields, if equality on all of them finds at most one document.
    finds_one: Option<Vec<String>>,
    spec: RawDocumentBuf,
}

impl CollectionView<'_> {
    /// Whether the fast tier can follow a hint. One on `$natural` it cannot.
    pub fn follows_hint(&self, hint: RawBsonRef<'_>) -> bool {
        is_known_index(hint, self.indexes)
    }
}

impl IndexDefinition {
    /// Reads one document of `listIndexes`.
    pub fn from_spec(spec: &RawDocument) -> Result<Self, IndexError> {
        let malformed = |_| IndexError;
        let name = spec.get_str("name").map_err(malformed)?.to_owned();
        let pattern = spec.get_document("key").map_err(malformed)?;
        let option = |name| spec.get(name).map_err(|_| IndexError);
        let is_set = |name| option(name).map(|value| value.is_some_and(is_truthy));
        let unique = is_set("unique")?;
        // A partial index lets documents outside its filter share values. A hidden one, and one
        // with a collation of its own, keep values unique but do not help to find them.
        let collation = option("collation")?.and_then(RawBsonRef::as_document);
        let helps = option("partialFilterExpression")?.is_none()
            && !is_set("hidden")?
            && is_simple(collation);
        let finds_one = if unique && helps { fields_that_find_one(pattern) } else { None };
        let pattern = Key::new(RawBsonRef::Document(pattern)).map_err(|_| IndexError)?;
        Ok(Self { name, pattern, unique, finds_one, spec: spec.to_owned() })
    }

    /// The index's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the index keeps anything unique, if only for a part of the documents.
    pub fn is_unique(&self) -> bool {
        self.unique
    }

    /// The fields of a unique index by which one document is found, and at most one; None if the
    /// index is not unique, is of no help, or is unique in a way that several matching documents
    /// can get round.
    pub fn finds_one_by(&self) -> Option<&[String]> {
        self.finds_one.as_deref()
    }

    /// The whole description.
    pub fn spec(&self) -> &RawDocument {
        &self.spec
    }
}

/// A description of an index that could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the description of an index has no name or no key pattern")]
pub struct IndexError;

/// The fields of a unique index's pattern, if equality on all of them means at most one document.
/// Two fields inside the same array do not: `{"r.a": 1, "r.b": 4}` matches
/// `{r: [{a: 1, b: 2}, {a: 3, b: 4}]}`, which has no key `(1, 4)`. Nor do places in arrays.
fn fields_that_find_one(pattern: &RawDocument) -> Option<Vec<String>> {
    let mut fields: Vec<String> = Vec::new();
    for field in pattern {
        let (path, order) = field.ok()?;
        let path = path.as_str();
        // Other than by value: hashed, text, geographic.
        Number::new(order)?;
        let first = path.split('.').next()?;
        let by_position = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if path.contains('$') || path.split('.').any(by_position) {
            return None;
        }
        if fields.iter().any(|known| known.split('.').next() == Some(first)) {
            return None;
        }
        fields.push(path.to_owned());
    }
    (!fields.is_empty() && fields != ["_id"]).then_some(fields)
}

/// Which command a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadKind {
    /// `find`
    Find,
    /// `aggregate`
    Aggregate,
    /// `count`
    Count,
    /// `distinct`
    Distinct,
}

/// What routing needs to know of a read command, as views into its bytes.
#[derive(Debug, Clone, Copy)]
pub struct ReadQuery<'a> {
    /// Which command.
    pub kind: ReadKind,
    /// `filter` of a find, `query` of count and distinct.
    pub filter: Option<&'a RawDocument>,
    /// The stages of an aggregate.
    pub pipeline: Option<&'a RawArray>,
    /// `sort` of a find.
    pub sort: Option<&'a RawDocument>,
    /// `projection` of a find.
    pub projection: Option<&'a RawDocument>,
    /// `limit`; zero is none.
    pub limit: i64,
    /// `skip`.
    pub skip: i64,
    /// `hint`, by name or by key pattern.
    pub hint: Option<RawBsonRef<'a>>,
    /// `collation`.
    pub collation: Option<&'a RawDocument>,
    /// `comment`.
    pub comment: Option<RawBsonRef<'a>>,
    /// An option that ties the answer to one server's storage or index (`min`, `max`, `returnKey`,
    /// `showRecordId`, `tailable`, ...), or a field of a type the server will refuse.
    pub unusual: bool,
}

impl<'a> ReadQuery<'a> {
    /// Reads a command's body. None if it is not one of the four commands (an `explain` is not:
    /// pass the command inside it), or not valid BSON.
    pub fn parse(command: &'a RawDocument) -> Option<Self> {
        let mut fields = command.iter_elements();
        let kind = match fields.next()?.ok()?.key().as_str() {
            "find" => ReadKind::Find,
            "aggregate" => ReadKind::Aggregate,
            "count" => ReadKind::Count,
            "distinct" => ReadKind::Distinct,
            _ => return None,
        };
        let mut query = Self {
            kind,
            filter: None,
            pipeline: None,
            sort: None,
            projection: None,
            limit: 0,
            skip: 0,
            hint: None,
            collation: None,
            comment: None,
            unusual: false,
        };
        for field in fields {
            let field = field.ok()?;
            let name = field.key().as_str();
            match (kind, name) {
                (_, "hint") => query.hint = Some(field.value().ok()?),
                (_, "comment") => query.comment = Some(field.value().ok()?),
                (_, "collation") => query.set_document(field.value().ok()?, |q| &mut q.collation),
                (ReadKind::Find, "filter") | (ReadKind::Count | ReadKind::Distinct, "query") => {
                    query.set_document(field.value().ok()?, |q| &mut q.filter);
                }
                (ReadKind::Find, "sort") => {
                    query.set_document(field.value().ok()?, |q| &mut q.sort);
                }
                (ReadKind::Find, "projection") => {
                    query.set_document(field.value().ok()?, |q| &mut q.projection);
                }
                (ReadKind::Find | ReadKind::Count, "limit") => {
                    query.set_whole(field.value().ok()?, |q| &mut q.limit);
                }
                (ReadKind::Find | ReadKind::Count, "skip") => {
                    query.set_whole(field.value().ok()?, |q| &mut q.skip);
                }
                (ReadKind::Aggregate, "pipeline") => match field.value().ok()? {
                    RawBsonRef::Array(stages) => query.pipeline = Some(stages),
                    _ => query.unusual = true,
                },
                (ReadKind::Find, "min" | "max") => {
                    let bound = field.value().ok()?;
                    let empty = bound.as_document().is_some_and(RawDocument::is_empty);
                    query.unusual |= !empty;
                }
                (
                    ReadKind::Find,
                    "returnKey" | "showRecordId" | "tailable" | "awaitData" | "oplogReplay"
                    | "ntoreturn",
                )
                | (
                    ReadKind::Aggregate,
                    "explain" | "exchange" | "needsMerge" | "fromMongos" | "fromRouter",
                ) => {
                    query.unusual |= is_truthy(field.value().ok()?);
                }
                _ => {}
            }
        }
        // A negative limit means its absolute value in a count; a find with one is refused.
        if kind == ReadKind::Count {
            query.limit = query.limit.saturating_abs();
        }
        query.unusual |= query.limit < 0 || query.skip < 0;
        Some(query)
    }

    fn set_document(
        &mut self,
        value: RawBsonRef<'a>,
        slot: impl Fn(&mut Self) -> &mut Option<&'a RawDocument>,
    ) {
        match value {
            RawBsonRef::Document(document) => *slot(self) = Some(document),
            RawBsonRef::Null => {}
            _ => self.unusual = true,
        }
    }

    fn set_whole(&mut self, value: RawBsonRef<'a>, slot: impl Fn(&mut Self) -> &mut i64) {
        match (value, whole(value)) {
            (_, Some(n)) => *slot(self) = n,
            (RawBsonRef::Null, _) => {}
            _ => self.unusual = true,
        }
    }
}

/// Fields and the values they must equal.
pub type FieldValues<'a> = SmallVec<[(&'a str, RawBsonRef<'a>); 2]>;

/// Where a read goes. `F` is the fast tier, `A` the archive.
#[derive(Debug, Clone)]
pub enum ReadRoute<'a> {
    /// At most the document with this `_id`. F answers if it holds the key; otherwise A answers,
    /// behind the key's barrier.
    Point {
        /// The `_id`.
        id: RawBsonRef<'a>,
        /// The answer is empty only if the key is absent. Otherwise an empty answer of F needs a
        /// look at whether F holds the key: if it does, empty is the whole answer.
        only_id: bool,
        /// The answer is not empty only if the key is present (rows of a `find`, `n` of a `count`,
        /// `values` of a `distinct`). Otherwise (`$facet`) rows say nothing: look for the key.
        rows_prove: bool,
    },
    /// At most the documents with these `_id`s; there may be none of them, and duplicates.
    Points {
        /// The values; [`keys_of`] makes distinct keys of them.
        ids: &'a RawArray,
        /// The answers of both tiers may be put together (rows of a `find`, `n` of a `count`). If
        /// not, one key that F lacks sends the whole query to A behind every key's barrier.
        mergeable: bool,
        /// A key has no row only if it is absent from F. Otherwise a key without a row needs a
        /// look at whether F holds it.
        only_id: bool,
        /// Every row of F's answer carries its `_id`.
        rows_have_ids: bool,
    },
    /// At most one document, by equality on all fields of a unique index. F answers with a row; on
    /// an empty answer A is asked, and the `_id` it names is looked up on F again.
    Unique {
        /// The name of the index.
        index: &'a str,
        /// The fields of the index and the values they must equal.
        values: FieldValues<'a>,
        /// The filter holds nothing else. Otherwise look by `values` alone whether F has the
        /// document, before A is asked.
        only_unique: bool,
        /// As for `Point`.
        rows_prove: bool,
    },
    /// F has everything the filter can match, while the boundary this was decided by is held.
    Covered,
    /// The `n` newest of what matches, the date descending being the first sort key and nothing
    /// skipped. The caller must
    /// 1. run it on F with the filter narrowed to [`DateField::held`] of the boundary (the same
    ///    boundary all along, held as for `Covered`), with a limit of `n + 1`, in a form that shows
    ///    the rows' dates;
    /// 2. use the first `n` rows only if there are `n`, the `n`th row's [`DateField::place`] is
    ///    held at the boundary, and the row after it (if any) has another date. Otherwise A answers.
    ///    An unknown place is not held.
    ///
    /// Narrowing makes the second half of 2 a matter of order among equal dates alone. An
    /// aggregate's rows show no dates once later stages have run: look at the date with the first
    /// `prefix` stages, then run the whole (narrowed) pipeline in the same snapshot
    /// (`atClusterTime`), else rows may have gone in between.
    NewestN {
        /// How many.
        n: i64,
        /// Aggregates: the number of leading stages up to and including the `$limit`.
        prefix: usize,
    },
    /// A answers, behind a range barrier, and one for every other tiered collection that the
    /// pipeline reads ([`named_collections`](crate::pipeline::named_collections)).
    Archive(Reason),
    /// The pipeline writes this collection: refused if it is tiered, else run on A behind the same
    /// barriers.
    Output(Named<'a>),
    /// A answers from its own statistics (`$collStats`, `$indexStats`, ...); no barrier.
    Statistics,
    /// `$changeStream`: opened as the manual's "Change streams" says.
    ChangeStream,
}

impl ReadRoute<'_> {
    /// The reason as far as it is known before the tiers are asked: hit until found missing.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Point { .. } => Reason::PointHit,
            Self::Points { .. } => Reason::PointsHit,
            Self::Unique { .. } => Reason::UniqueHit,
            Self::Covered => Reason::Covered,
            Self::NewestN { .. } => Reason::NewestN,
            Self::Archive(reason) => *reason,
            Self::Output(_) | Self::Statistics | Self::ChangeStream => Reason::UnsupportedShape,
        }
    }
}

/// Decides where a read of a tiered collection goes. Client transactions are decided before.
pub fn route_read<'a>(query: &ReadQuery<'a>, view: &CollectionView<'a>) -> ReadRoute<'a> {
    let pipeline = query.pipeline.map(Pipeline::read);
    if let Some(pipeline) = &pipeline {
        if pipeline.change_stream {
            return ReadRoute::ChangeStream;
        }
        if let Some(target) = pipeline.output {
            return ReadRoute::Output(target);
        }
        if pipeline.statistics && !pipeline.beyond_collection {
            return ReadRoute::Statistics;
        }
    }
    if query.comment.is_some_and(asks_for_archive) {
        return ReadRoute::Archive(Reason::Hint);
    }
    let shape = Shape::new(query, pipeline.as_ref());
    if query.unusual
        || pipeline.as_ref().is_some_and(|pipeline| pipeline.beyond_collection)
        || shape.sort.is_some_and(sorts_unusually)
        || !query.hint.is_none_or(|hint| view.follows_hint(hint))
    {
        return ReadRoute::Archive(Reason::UnsupportedShape);
    }

    let facts = FilterFacts::of(shape.filters.iter().copied());
    if facts.unsupported {
        return ReadRoute::Archive(Reason::UnsupportedShape);
    }
    if !is_simple(query.collation) && facts.id.is_text() {
        return ReadRoute::Archive(Reason::UnsupportedShape);
    }
    match facts.id {
        IdCondition::One(id) => {
            return ReadRoute::Point {
                id,
                only_id: facts.only_id() && shape.keeps_one,
                rows_prove: shape.nothing_from_nothing,
            };
        }
        IdCondition::Among(ids) => {
            let plain = shape.sort.is_none() && shape.limit == 0 && query.skip == 0;
            return ReadRoute::Points {
                ids,
                mergeable: plain && matches!(query.kind, ReadKind::Find | ReadKind::Count),
                only_id: facts.only_id() && shape.keeps_all,
                rows_have_ids: query.kind == ReadKind::Find
                    && query.projection.is_none_or(keeps_id),
            };
        }
        IdCondition::Any => {}
    }
    if query.skip == 0
        && let Some((index, values)) = unique_values(&shape.filters, query.collation, view.indexes)
    {
        return ReadRoute::Unique {
            index,
            only_unique: facts.conditions == values.len() && shape.keeps_one,
            values,
            rows_prove: shape.nothing_from_nothing,
        };
    }
    let Some(boundary) = view.boundary else {
        return ReadRoute::Archive(Reason::NotCovered);
    };
    if shape.filters.iter().any(|filter| covers(filter, view.field, boundary)) {
        return ReadRoute::Covered;
    }
    if shape.limit > 0
        && query.skip == 0
        && shape.sort.is_some_and(|sort| is_newest_first(sort, view.field))
    {
        return ReadRoute::NewestN { n: shape.limit, prefix: shape.prefix };
    }
    ReadRoute::Archive(Reason::NotCovered)
}

/// What the filter of an update, delete or findAndModify names.
#[derive(Debug, Clone)]
pub enum WriteTarget<'a> {
    /// At most the document with this `_id`.
    Id {
        /// The `_id`.
        id: RawBsonRef<'a>,
        /// The filter holds nothing else: no match means the key is absent.
        only_id: bool,
    },
    /// At most the documents with these `_id`s.
    Ids {
        /// The values; [`keys_of`] makes distinct keys of them.
        ids: &'a RawArray,
        /// The filter holds nothing else.
        only_id: bool,
    },
    /// At most one document, by equality on all fields of a unique index.
    Unique {
        /// The name of the index.
        index: &'a str,
        /// The fields of the index and the values they must equal.
        values: FieldValues<'a>,
        /// The filter holds nothing else.
        only_unique: bool,
    },
    /// The fast tier has everything the filter can match, while the boundary is held.
    Covered,
    /// Only the archive can tell what matches.
    Other,
}

/// Classifies the filter of a write by the rules of reads: equality of `_id`, unique values,
/// coverage. `$where` does not matter here (the fast tier runs it on the one document), a text
/// search does. A hint is the caller's to look at ([`CollectionView::follows_hint`]), and so is an
/// upsert's new `_id` ([`upsert_id`](crate::upsert::upsert_id)).
pub fn route_write_filter<'a>(
    filter: &'a RawDocument,
    collation: Option<&RawDocument>,
    view: &CollectionView<'a>,
) -> WriteTarget<'a> {
    let facts = FilterFacts::of([filter]);
    if facts.unsupported && !facts.only_javascript {
        return WriteTarget::Other;
    }
    if !is_simple(collation) && facts.id.is_text() {
        return WriteTarget::Other;
    }
    match facts.id {
        IdCondition::One(id) => return WriteTarget::Id { id, only_id: facts.only_id() },
        IdCondition::Among(ids) => return WriteTarget::Ids { ids, only_id: facts.only_id() },
        IdCondition::Any => {}
    }
    if let Some((index, values)) = unique_values(&[filter], collation, view.indexes) {
        let only_unique = facts.conditions == values.len();
        return WriteTarget::Unique { index, values, only_unique };
    }
    match view.boundary {
        Some(boundary) if covers(filter, view.field, boundary) => WriteTarget::Covered,
        _ => WriteTarget::Other,
    }
}

/// The `_id` that stands beside `_id` in a filter as a value to equal, and nothing else with it.
pub(crate) fn id_by_equality(value: RawBsonRef<'_>) -> Option<RawBsonRef<'_>> {
    match id_condition(value) {
        (IdCondition::One(id), 1) => Some(id),
        _ => None,
    }
}

/// The distinct keys of a list of `_id`s, in its order.
pub fn keys_of(ids: &RawArray) -> Result<Vec<Key>, KeyError> {
    let mut known = ahash::AHashSet::new();
    let mut keys = Vec::new();
    for id in ids {
        let key = Key::new(id.map_err(|error| KeyError::Malformed(error.to_string()))?)?;
        if known.insert(key.clone()) {
            keys.push(key);
        }
    }
    Ok(keys)
}

/// The parts of a read that its rules look at, the same for all four commands.
struct Shape<'a> {
    filters: SmallVec<[&'a RawDocument; 2]>,
    sort: Option<&'a RawDocument>,
    limit: i64,
    prefix: usize,
    keeps_all: bool,
    keeps_one: bool,
    nothing_from_nothing: bool,
}

impl<'a> Shape<'a> {
    fn new(query: &ReadQuery<'a>, pipeline: Option<&Pipeline<'a>>) -> Self {
        let keeps_one = query.skip == 0 && query.kind != ReadKind::Distinct;
        match pipeline {
            Some(pipeline) => Self {
                filters: pipeline.filters.clone(),
                sort: pipeline.sort,
                limit: pipeline.limit.and_then(whole).unwrap_or(0),
                prefix: pipeline.prefix,
                keeps_all: pipeline.keeps_all,
                keeps_one: pipeline.keeps_one,
                nothing_from_nothing: pipeline.nothing_from_nothing,
            },
            // A distinct over a field that the document lacks is empty though the key is there.
            None => Self {
                filters: query.filter.into_iter().collect(),
                sort: query.sort,
                limit: query.limit,
                prefix: 0,
                keeps_all: keeps_one && query.limit == 0,
                keeps_one,
                nothing_from_nothing: true,
            },
        }
    }
}

/// What a filter asks of `_id`.
#[derive(Debug, Clone, Copy)]
enum IdCondition<'a> {
    Any,
    One(RawBsonRef<'a>),
    Among(&'a RawArray),
}

impl IdCondition<'_> {
    /// Whether a collation can change which `_id`s match.
    fn is_text(&self) -> bool {
        match *self {
            Self::Any => false,
            Self::One(id) => has_text(id, MAX_DEPTH),
            Self::Among(ids) => has_text(RawBsonRef::Array(ids), MAX_DEPTH),
        }
    }
}

/// What one walk over a filter finds.
struct FilterFacts<'a> {
    id: IdCondition<'a>,
    /// Conditions in all: operators on fields, and fields with a value to equal.
    conditions: usize,
    /// Something the fast tier may answer otherwise than the archive.
    unsupported: bool,
    /// What is unsupported is `$where` alone.
    only_javascript: bool,
}

impl<'a> FilterFacts<'a> {
    fn of(filters: impl IntoIterator<Item = &'a RawDocument>) -> Self {
        let mut facts =
            Self { id: IdCondition::Any, conditions: 0, unsupported: false, only_javascript: true };
        for filter in filters {
            facts.walk(filter, true, MAX_DEPTH);
        }
        facts
    }

    fn only_id(&self) -> bool {
        self.conditions == 1
    }

    fn refuse(&mut self) {
        self.unsupported = true;
        self.only_javascript = false;
    }

    /// `holds`: every document that matches satisfies this part of the filter.
    fn walk(&mut self, filter: &'a RawDocument, holds: bool, depth: usize) {
        let Some(depth) = depth.checked_sub(1) else {
            return self.refuse();
        };
        for field in filter {
            let Ok((name, value)) = field else {
                return self.refuse();
            };
            match (name.as_str(), value) {
                ("$comment", _) => {}
                ("$and", RawBsonRef::Array(branches)) => {
                    self.walk_branches(branches, holds, depth);
                }
                ("$or" | "$nor", RawBsonRef::Array(branches)) => {
                    self.conditions += 1;
                    self.walk_branches(branches, false, depth);
                }
                ("$where", _) => {
                    self.conditions += 1;
                    self.unsupported = true;
                }
                ("$text", _) => self.refuse(),
                ("_id", value) if holds => {
                    let (id, conditions) = id_condition(value);
                    self.conditions += conditions;
                    self.id = match (self.id, id) {
                        (IdCondition::One(known), _) => IdCondition::One(known),
                        (known, IdCondition::Any) => known,
                        (_, id) => id,
                    };
                    self.look_for_distance(value, depth);
                }
                (_, value) => {
                    self.conditions += match value {
                        RawBsonRef::Document(operators) if is_operators(operators) => {
                            operators.iter_elements().count()
                        }
                        _ => 1,
                    };
                    self.look_for_distance(value, depth);
                }
            }
        }
    }

    fn walk_branches(&mut self, branches: &'a RawArray, holds: bool, depth: usize) {
        for branch in branches {
            match branch {
                Ok(RawBsonRef::Document(branch)) => self.walk(branch, holds, depth),
                // The server will refuse it, in its own words.
                _ => self.refuse(),
            }
        }
    }

    /// Operators that order by distance need an index of their own, and an order with them.
    fn look_for_distance(&mut self, value: RawBsonRef<'_>, depth: usize) {
        let RawBsonRef::Document(operators) = value else {
            return;
        };
        let Some(depth) = depth.checked_sub(1) else {
            return self.refuse();
        };
        for operator in operators.iter_elements() {
            let Ok(operator) = operator else {
                return self.refuse();
            };
            match operator.key().as_str() {
                "$near" | "$nearSphere" | "$geoNear" => return self.refuse(),
                "$not" | "$elemMatch" => match operator.value() {
                    Ok(value) => self.look_for_distance(value, depth),
                    Err(_) => return self.refuse(),
                },
                name if !name.starts_with('$') => return,
                _ => {}
            }
        }
    }
}

/// What stands beside `_id` in a filter, and how many conditions that is.
fn id_condition(value: RawBsonRef<'_>) -> (IdCondition<'_>, usize) {
    let operators = match value {
        RawBsonRef::Document(document) if begins_with_dollar(document) => document,
        value if can_be_id(value) => return (IdCondition::One(value), 1),
        _ => return (IdCondition::Any, 1),
    };
    let mut found = IdCondition::Any;
    let mut conditions = 0;
    if !is_operators(operators) {
        return (found, 1);
    }
    for operator in operators {
        conditions += 1;
        match (operator, found) {
            (_, IdCondition::One(_)) => {}
            (Ok((name, id)), _) if name.as_str() == "$eq" && can_be_id(id) => {
                found = IdCondition::One(id);
            }
            (Ok((name, RawBsonRef::Array(ids))), IdCondition::Any) if name.as_str() == "$in" => {
                found = among(ids);
            }
            _ => {}
        }
    }
    (found, conditions)
}

/// `{$in: ids}`: one value is an equality, an unusual value none of it.
fn among(ids: &RawArray) -> IdCondition<'_> {
    let mut only = None;
    for (position, id) in ids.into_iter().enumerate() {
        match id {
            Ok(id) if can_be_id(id) && !is_operator_like(id) => {
                only = (position == 0).then_some(id);
            }
            _ => return IdCondition::Any,
        }
    }
    only.map_or(IdCondition::Among(ids), IdCondition::One)
}

/// Whether a document can have this `_id`. A regular expression in a filter is a pattern; arrays
/// and undefined are refused as `_id`s, and mean more than equality in filters.
fn can_be_id(value: RawBsonRef<'_>) -> bool {
    !matches!(
        value,
        RawBsonRef::RegularExpression(_) | RawBsonRef::Array(_) | RawBsonRef::Undefined
    )
}

fn is_operator_like(value: RawBsonRef<'_>) -> bool {
    matches!(value, RawBsonRef::Document(document) if begins_with_dollar(document))
}

fn begins_with_dollar(document: &RawDocument) -> bool {
    document
        .iter_elements()
        .next()
        .is_some_and(|first| !first.is_ok_and(|first| !first.key().as_str().starts_with('$')))
}

/// Whether strings compare byte by byte. Tiered collections have no collation of their own.
pub fn is_simple(collation: Option<&RawDocument>) -> bool {
    collation.is_none_or(|collation| {
        collation.get("locale").is_ok_and(|locale| {
            locale.and_then(RawBsonRef::as_str).is_some_and(|locale| locale == "simple")
        })
    })
}

/// The first unique index whose fields all have a value to equal, with the values.
fn unique_values<'a>(
    filters: &[&'a RawDocument],
    collation: Option<&RawDocument>,
    indexes: &'a [IndexDefinition],
) -> Option<(&'a str, FieldValues<'a>)> {
    let simple = is_simple(collation);
    indexes.iter().find_map(|index| {
        let values = index
            .finds_one_by()?
            .iter()
            .map(|path| {
                let value = filters.iter().find_map(|filter| equal_to(filter, path, MAX_DEPTH))?;
                (simple || !has_text(value, MAX_DEPTH)).then_some((path.as_str(), value))
            })
            .collect::<Option<SmallVec<_>>>()?;
        Some((index.name(), values))
    })
}

/// The value that a filter makes `path` equal to, if a unique index tells it from all others. A
/// null equals what is missing and what is undefined, which the index keeps apart; an array equals
/// both an array and an element of one.
fn equal_to<'a>(filter: &'a RawDocument, path: &str, depth: usize) -> Option<RawBsonRef<'a>> {
    let depth = depth.checked_sub(1)?;
    let tells_apart =
        |value: &RawBsonRef<'a>| can_be_id(*value) && !matches!(value, RawBsonRef::Null);
    for field in filter {
        let (name, value) = field.ok()?;
        let found = match (name.as_str(), value) {
            ("$and", RawBsonRef::Array(branches)) => {
                branches.into_iter().find_map(|branch| match branch {
                    Ok(RawBsonRef::Document(branch)) => equal_to(branch, path, depth),
                    _ => None,
                })
            }
            (name, RawBsonRef::Document(document)) if name == path && is_operators(document) => {
                document.get("$eq").ok().flatten()
            }
            (name, value) if name == path && !is_operator_like(value) => Some(value),
            _ => None,
        };
        if let Some(value) = found.filter(tells_apart) {
            return Some(value);
        }
    }
    None
}

/// Whether the fast tier has the index a hint names. A hint on `$natural` names none.
fn is_known_index(hint: RawBsonRef<'_>, indexes: &[IndexDefinition]) -> bool {
    match hint {
        RawBsonRef::String(name) => {
            name == "_id_" || indexes.iter().any(|index| index.name == name)
        }
        RawBsonRef::Document(pattern) => {
            // An empty hint is no hint.
            pattern.is_empty()
                || is_id_pattern(pattern)
                || Key::new(hint)
                    .is_ok_and(|hint| indexes.iter().any(|index| index.pattern == hint))
        }
        _ => false,
    }
}

fn is_id_pattern(pattern: &RawDocument) -> bool {
    let mut fields = pattern.into_iter();
    let first = fields.next();
    let is_id = matches!(first, Some(Ok((name, order)))
        if name.as_str() == "_id" && whole(order) == Some(1));
    is_id && fields.next().is_none()
}

/// A sort that is no order of the documents' own values.
fn sorts_unusually(sort: &RawDocument) -> bool {
    sort.into_iter().any(|key| {
        key.map_or(true, |(name, order)| name.as_str() == "$natural" || whole(order).is_none())
    })
}

fn is_newest_first(sort: &RawDocument, field: &DateField) -> bool {
    matches!(sort.into_iter().next(), Some(Ok((name, order)))
        if name.as_str() == field.path() && whole(order) == Some(-1))
}

/// Whether a projection leaves `_id` as it is.
fn keeps_id(projection: &RawDocument) -> bool {
    projection.into_iter().all(|field| {
        field.is_ok_and(|(name, value)| match name.as_str() {
            "_id" => {
                matches!(value, RawBsonRef::Boolean(true)) || whole(value).is_some_and(|n| n != 0)
            }
            name => !name.starts_with("_id."),
        })
    })
}

/// `"halocline:archive"` among the words of a comment, or `{halocline: "archive"}`.
fn asks_for_archive(comment: RawBsonRef<'_>) -> bool {
    match comment {
        RawBsonRef::String(text) => text.split_ascii_whitespace().any(|word| word == ARCHIVE_HINT),
        RawBsonRef::Document(document) => document.get("halocline").is_ok_and(|value| {
            value.and_then(RawBsonRef::as_str).is_some_and(|tier| tier == "archive")
        }),
        _ => false,
    }
}

/// MongoDB's reading of an option that should be a boolean.
fn is_truthy(value: RawBsonRef<'_>) -> bool {
    match value {
        RawBsonRef::Boolean(value) => value,
        RawBsonRef::Null | RawBsonRef::Undefined => false,
        value => match Number::new(value) {
            Some(number) => number.compare_i64(0) != Some(std::cmp::Ordering::Equal),
            None => true,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::date::DateKind;
    use bson::{Bson, DateTime, Document, bson, doc};

    const BOUNDARY: i64 = 1_000;

    fn date(millis: i64) -> Bson {
        Bson::DateTime(DateTime::from_millis(millis))
    }

    fn index(spec: Document) -> IndexDefinition {
        IndexDefinition::from_spec(&RawDocumentBuf::try_from(spec).unwrap()).unwrap()
    }

    fn indexes() -> Vec<IndexDefinition> {
        vec![
            index(doc! { "name": "u_1", "key": { "u": 1 }, "unique": true }),
            index(doc! { "name": "v_1_w_1", "key": { "v": 1, "w": -1.0 }, "unique": true }),
            index(doc! { "name": "at_-1", "key": { "at": -1 } }),
        ]
    }

    /// A short form of the route, for tables of cases.
    fn routed(command: Document) -> String {
        let command = RawDocumentBuf::try_from(command).unwrap();
        let query = ReadQuery::parse(&command).unwrap();
        let field = DateField::new("at", DateKind::Date).unwrap();
        let indexes = indexes();
        let view = CollectionView {
            field: &field,
            boundary: Some(DatePoint(BOUNDARY)),
            indexes: &indexes,
        };
        match route_read(&query, &view) {
            ReadRoute::Point { id, only_id, rows_prove } => {
                let id = Key::new(id).unwrap();
                let alone = if only_id { " alone" } else { "" };
                let blind = if rows_prove { "" } else { " blind" };
                format!("point {id}{alone}{blind}")
            }
            ReadRoute::Points { ids, mergeable, only_id, rows_have_ids } => {
                let count = keys_of(ids).unwrap().len();
                format!("points {count} {mergeable} {only_id} {rows_have_ids}")
            }
            ReadRoute::Unique { index, only_unique, .. } => format!("unique {index} {only_unique}"),
            ReadRoute::Covered => "covered".into(),
            ReadRoute::NewestN { n, prefix } => format!("newest {n} {prefix}"),
            ReadRoute::Archive(reason) => reason.label().into(),
            ReadRoute::Output(target) => format!("output {}", target.coll),
            ReadRoute::Statistics => "statistics".into(),
            ReadRoute::ChangeStream => "change stream".into(),
        }
    }

    fn find(filter: Document) -> String {
        routed(doc! { "find": "c", "filter": filter, "$db": "d" })
    }

    fn find_with(filter: Document, options: Document) -> String {
        let mut command = doc! { "find": "c", "filter": filter };
        command.extend(options);
        routed(command)
    }

    fn aggregate(stages: Bson) -> String {
        routed(doc! { "aggregate": "c", "pipeline": stages, "cursor": {} })
    }

    fn assert_all(cases: impl IntoIterator<Item = (String, &'static str)>) {
        for (number, (is, should)) in cases.into_iter().enumerate() {
            assert_eq!(is, should, "case {number}");
        }
    }

    #[test]
    fn equality_of_the_id_is_a_point() {
        assert_all([
            (find(doc! { "_id": 5 }), "point 5 alone"),
            (find(doc! { "_id": { "$eq": 5 } }), "point 5 alone"),
            (find(doc! { "_id": { "$in": [5] } }), "point 5 alone"),
            (find(doc! { "_id": 5, "$comment": "x" }), "point 5 alone"),
            (find(doc! { "_id": 5, "x": 1 }), "point 5"),
            (find(doc! { "_id": { "$eq": 5, "$gt": 9 } }), "point 5"),
            (find(doc! { "$and": [{ "x": 1 }, { "$and": [{ "_id": 5 }] }] }), "point 5"),
            (find(doc! { "$and": [{ "_id": { "$in": [5, 6] } }, { "_id": 5 }] }), "point 5"),
            (find(doc! { "_id": Bson::Null }), "point null alone"),
            (find(doc! { "_id": {} }), "point {} alone"),
            (find(doc! { "_id": { "a": 1, "$b": 2 } }), "point { \"a\": 1, \"$b\": 2 } alone"),
            (find(doc! { "_id": "$$var" }), "point \"$$var\" alone"),
            (find_with(doc! { "_id": 5 }, doc! { "skip": 1 }), "point 5"),
            (
                find_with(doc! { "_id": 5 }, doc! { "limit": 1, "singleBatch": true }),
                "point 5 alone",
            ),
            (find_with(doc! { "_id": 5 }, doc! { "sort": { "x": 1 } }), "point 5 alone"),
            (routed(doc! { "count": "c", "query": { "_id": 5 }, "limit": -1 }), "point 5 alone"),
            (routed(doc! { "distinct": "c", "key": "x", "query": { "_id": 5 } }), "point 5"),
        ]);
    }

    #[test]
    fn what_looks_like_equality_of_the_id_but_is_not() {
        let regex = || {
            Bson::RegularExpression(bson::Regex {
                pattern: "^a".to_owned().try_into().unwrap(),
                options: String::new().try_into().unwrap(),
            })
        };
        for filter in [
            doc! { "_id": regex() },
            doc! { "_id": { "$in": [regex()] } },
            doc! { "_id": { "$in": [5, regex()] } },
            doc! { "_id": { "$gt": 5 } },
            doc! { "_id": { "$gte": 5, "$lte": 5 } },
            doc! { "_id": { "$ne": 5 } },
            doc! { "_id": { "$not": { "$eq": 5 } } },
            doc! { "_id": [5] },
            doc! { "_id": Bson::Undefined },
            doc! { "_id": { "$ref": "c", "$id": 5 } },
            doc! { "_id": { "$unknown": 5 } },
            doc! { "_id.a": 5 },
            doc! { "$or": [{ "_id": 5 }, { "_id": 6 }] },
            doc! { "$nor": [{ "_id": 5 }] },
            doc! { "$expr": { "$eq": ["$_id", "$$var"] } },
            doc! {},
        ] {
            assert_eq!(find(filter.clone()), "not_covered", "{filter}");
        }
    }

    #[test]
    fn several_ids_are_points() {
        let ids = || doc! { "_id": { "$in": [5, 6, 5.0] } };
        assert_all([
            (find(ids()), "points 2 true true true"),
            (find(doc! { "_id": { "$in": [] } }), "points 0 true true true"),
            (find(doc! { "_id": { "$in": [5, 6], "$ne": 7 } }), "points 2 true false true"),
            (find_with(ids(), doc! { "sort": { "_id": 1 } }), "points 2 false true true"),
            (find_with(ids(), doc! { "limit": 1 }), "points 2 false false true"),
            (find_with(ids(), doc! { "projection": { "_id": 0 } }), "points 2 true true false"),
            (find_with(ids(), doc! { "projection": { "_id": "$x" } }), "points 2 true true false"),
            (find_with(ids(), doc! { "projection": { "_id": 1 } }), "points 2 true true true"),
            (routed(doc! { "count": "c", "query": ids() }), "points 2 true true false"),
            (routed(doc! { "distinct": "c", "query": ids() }), "points 2 false false false"),
            (aggregate(bson!([{ "$match": ids() }])), "points 2 false true false"),
        ]);
    }

    #[test]
    fn a_collation_matters_to_ids_that_hold_text() {
        let strength = || doc! { "collation": { "locale": "en", "strength": 2 } };
        assert_all([
            (find_with(doc! { "_id": "ABC" }, strength()), "unsupported_shape"),
            (find_with(doc! { "_id": { "a": [{ "b": "x" }] } }, strength()), "unsupported_shape"),
            (find_with(doc! { "_id": { "$in": [1, "x"] } }, strength()), "unsupported_shape"),
            (find_with(doc! { "_id": 5 }, strength()), "point 5 alone"),
            (find_with(doc! { "_id": { "x": 5 } }, strength()), "point { \"x\": 5 } alone"),
            (
                find_with(doc! { "_id": "a" }, doc! { "collation": { "locale": "simple" } }),
                "point \"a\" alone",
            ),
            (find_with(doc! { "u": "ABC" }, strength()), "not_covered"),
            (find_with(doc! { "u": 5 }, strength()), "unique u_1 true"),
            (find_with(doc! { "x": "A", "at": { "$gt": date(1_000) } }, strength()), "covered"),
        ]);
    }

    #[test]
    fn what_depends_on_a_server_goes_to_the_archive() {
        let near = || doc! { "$near": [0, 0] };
        assert_all(
            [
                find(doc! { "_id": 5, "$where": "true" }),
                find(doc! { "$and": [{ "_id": 5 }, { "$text": { "$search": "x" } }] }),
                find(doc! { "$or": [{ "x": 5 }, { "$where": "true" }] }),
                find(doc! { "_id": 5, "loc": near() }),
                find(doc! { "at": { "$gt": date(1_000) }, "loc": { "$nearSphere": [0, 0] } }),
                find_with(doc! { "_id": 5 }, doc! { "hint": { "$natural": -1 } }),
                find_with(doc! { "_id": 5 }, doc! { "hint": "x_1" }),
                find_with(doc! { "_id": 5 }, doc! { "hint": { "x": 1 } }),
                find_with(doc! { "_id": 5 }, doc! { "sort": { "$natural": 1 } }),
                find_with(doc! {}, doc! { "sort": { "s": { "$meta": "textScore" } } }),
                find_with(doc! { "_id": 5 }, doc! { "min": { "_id": 1 } }),
                find_with(doc! { "_id": 5 }, doc! { "showRecordId": true }),
                find_with(doc! { "_id": 5 }, doc! { "returnKey": true }),
                find_with(doc! { "_id": 5 }, doc! { "tailable": true }),
                find_with(doc! { "_id": 5 }, doc! { "limit": -1 }),
                find_with(doc! { "_id": 5 }, doc! { "limit": "1" }),
                find_with(doc! { "_id": 5 }, doc! { "sort": 5 }),
                aggregate(bson!([{ "$match": { "_id": 5 } }, { "$lookup": { "from": "c" } }])),
                aggregate(bson!([{ "$geoNear": {} }])),
            ]
            .map(|route| (route, "unsupported_shape")),
        );
        assert_all([
            (find_with(doc! { "_id": 5 }, doc! { "hint": "_id_" }), "point 5 alone"),
            (find_with(doc! { "_id": 5 }, doc! { "hint": { "_id": 1.0 } }), "point 5 alone"),
            (find_with(doc! { "_id": 5 }, doc! { "hint": { "at": -1.0 } }), "point 5 alone"),
            (find_with(doc! { "_id": 5 }, doc! { "hint": "u_1", "min": {} }), "point 5 alone"),
            (find_with(doc! { "_id": 5 }, doc! { "comment": "why halocline:archive" }), "hint"),
            (find_with(doc! { "_id": 5 }, doc! { "comment": { "halocline": "archive" } }), "hint"),
            (
                find_with(doc! { "_id": 5 }, doc! { "comment": "xhalocline:archive" }),
                "point 5 alone",
            ),
        ]);
    }

    #[test]
    fn equality_on_a_whole_unique_index_is_unique() {
        assert_all([
            (find(doc! { "u": 5 }), "unique u_1 true"),
            (find(doc! { "u": { "$eq": 5 }, "x": 1 }), "unique u_1 false"),
            (find(doc! { "u": { "$eq": 5, "$gt": 7 } }), "unique u_1 false"),
            (find(doc! { "v": 1, "$and": [{ "w": "x" }] }), "unique v_1_w_1 true"),
            (find(doc! { "v": 1 }), "not_covered"),
            (find(doc! { "u": Bson::Null }), "not_covered"),
            (find(doc! { "u": [5] }), "not_covered"),
            (find(doc! { "u": { "$in": [5] } }), "not_covered"),
            (find(doc! { "$or": [{ "u": 5 }] }), "not_covered"),
            (find_with(doc! { "u": 5 }, doc! { "skip": 1 }), "not_covered"),
        ]);
        for (spec, expected) in [
            (doc! { "key": { "a.b": 1 }, "unique": true }, true),
            (doc! { "key": { "a": 1 } }, false),
            (doc! { "key": { "a.b": 1, "a.c": 1 }, "unique": true }, false),
            (doc! { "key": { "a.0": 1 }, "unique": true }, false),
            (doc! { "key": { "a": "hashed" }, "unique": true }, false),
            (doc! { "key": { "a": 1 }, "unique": true, "hidden": true }, false),
            (doc! { "key": { "a": 1 }, "unique": true, "collation": { "locale": "en" } }, false),
            (doc! { "key": { "a": 1 }, "unique": true, "partialFilterExpression": {} }, false),
        ] {
            let mut named = doc! { "name": "i" };
            named.extend(spec.clone());
            assert_eq!(index(named).finds_one_by().is_some(), expected, "{spec}");
        }
    }

    #[test]
    fn recent_dates_are_covered_and_the_newest_found() {
        let newest = || doc! { "sort": { "at": -1, "_id": 1 }, "limit": 10 };
        assert_all([
            (find(doc! { "at": { "$gte": date(1_000) } }), "covered"),
            (find(doc! { "at": { "$gte": date(999) } }), "not_covered"),
            (find_with(doc! { "x": 1 }, newest()), "newest 10 0"),
            (
                find_with(doc! {}, doc! { "sort": { "at": -1.0 }, "limit": 10, "skip": 1 }),
                "not_covered",
            ),
            (find_with(doc! {}, doc! { "sort": { "at": -1 } }), "not_covered"),
            (find_with(doc! {}, doc! { "sort": { "at": 1 }, "limit": 10 }), "not_covered"),
            (find_with(doc! {}, doc! { "sort": { "x": 1, "at": -1 }, "limit": 1 }), "not_covered"),
            (find_with(doc! { "_id": 5 }, newest()), "point 5 alone"),
        ]);
    }

    #[test]
    fn aggregates_are_routed_by_their_beginning() {
        let recent = || doc! { "$match": { "at": { "$gte": date(1_000) } } };
        let by_id = || doc! { "$match": { "_id": 5 } };
        let newest = || doc! { "$sort": { "at": -1 } };
        assert_all([
            (aggregate(bson!([by_id(), { "$project": { "x": 1 } }])), "point 5 alone"),
            (aggregate(bson!([by_id(), { "$limit": 1 }])), "point 5 alone"),
            (aggregate(bson!([by_id(), { "$unwind": "$x" }])), "point 5"),
            (aggregate(bson!([by_id(), { "$facet": { "a": [] } }])), "point 5 blind"),
            (aggregate(bson!([{ "$sort": { "x": 1 } }, by_id()])), "point 5 alone"),
            (aggregate(bson!([{ "$limit": 1 }, by_id()])), "not_covered"),
            (aggregate(bson!([{ "$project": { "x": 1 } }, by_id()])), "not_covered"),
            (aggregate(bson!([{ "$match": { "x": 1 } }, by_id()])), "point 5"),
            (aggregate(bson!([recent(), { "$group": { "_id": "$x" } }])), "covered"),
            (
                aggregate(bson!([{ "$match": {} }, newest(), { "$limit": 3 }, by_id()])),
                "newest 3 3",
            ),
            (aggregate(bson!([newest(), { "$skip": 1 }, { "$limit": 3 }])), "not_covered"),
            (aggregate(bson!([recent(), { "$out": "x" }])), "output x"),
            (aggregate(bson!([{ "$merge": { "into": "x" } }])), "output x"),
            (aggregate(bson!([{ "$collStats": { "count": {} } }])), "statistics"),
            (aggregate(bson!([{ "$collStats": {} }, { "$unionWith": "c" }])), "unsupported_shape"),
            (aggregate(bson!([{ "$changeStream": {} }, { "$match": {} }])), "change stream"),
            (aggregate(bson!([])), "not_covered"),
            (aggregate(bson!(5)), "unsupported_shape"),
        ]);
    }

    #[test]
    fn nothing_is_covered_without_a_boundary() {
        let field = DateField::new("at", DateKind::Date).unwrap();
        let view = CollectionView { field: &field, boundary: None, indexes: &[] };
        let command = RawDocumentBuf::try_from(
            doc! { "find": "c", "filter": { "at": date(5_000) }, "sort": { "at": -1 }, "limit": 1 },
        )
        .unwrap();
        let route = route_read(&ReadQuery::parse(&command).unwrap(), &view);
        assert_eq!(route.reason(), Reason::NotCovered);
    }

    #[test]
    fn filters_of_writes() {
        let field = DateField::new("at", DateKind::Date).unwrap();
        let indexes = indexes();
        let view =
            CollectionView { field: &field, boundary: Some(DatePoint(1_000)), indexes: &indexes };
        let target = |filter: Document, collation: Option<Document>| {
            let filter = RawDocumentBuf::try_from(filter).unwrap();
            let collation = collation.map(|one| RawDocumentBuf::try_from(one).unwrap());
            match route_write_filter(&filter, collation.as_deref(), &view) {
                WriteTarget::Id { only_id, .. } => format!("id {only_id}"),
                WriteTarget::Ids { only_id, .. } => format!("ids {only_id}"),
                WriteTarget::Unique { index, only_unique, .. } => format!("{index} {only_unique}"),
                WriteTarget::Covered => "covered".into(),
                WriteTarget::Other => "other".into(),
            }
        };
        let english = || Some(doc! { "locale": "en" });
        assert_all([
            (target(doc! { "_id": 5 }, None), "id true"),
            (target(doc! { "_id": 5, "state": "open" }, None), "id false"),
            (target(doc! { "_id": 5, "$where": "true" }, None), "id false"),
            (target(doc! { "_id": "a" }, english()), "other"),
            (target(doc! { "_id": { "$in": [1, 2] } }, english()), "ids true"),
            (target(doc! { "u": 5 }, None), "u_1 true"),
            (target(doc! { "at": date(2_000), "x": 1 }, None), "covered"),
            (target(doc! { "x": 1 }, None), "other"),
            (target(doc! { "_id": 5, "$text": { "$search": "x" } }, None), "other"),
            (target(doc! {}, None), "other"),
        ]);
    }

    #[test]
    fn other_commands_are_no_reads() {
        for command in [doc! { "insert": "c" }, doc! { "explain": { "find": "c" } }, doc! {}] {
            assert!(ReadQuery::parse(&RawDocumentBuf::try_from(command).unwrap()).is_none());
        }
    }

    #[test]
    fn labels_are_distinct() {
        let labels: std::collections::HashSet<_> = Reason::ALL.iter().map(|r| r.label()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
    }
}
