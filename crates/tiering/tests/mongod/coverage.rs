//! A filter that is called covered matches no document outside `{date: {$gte: boundary}}`.

use bson::raw::{RawArrayBuf, RawBson, RawDocument, RawDocumentBuf, cstr};
use halocline_tiering::coverage::covers;
use halocline_tiering::date::{DateField, DateKind, DatePoint};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};

use crate::server::{Server, document, shared};
use crate::values::{MIDDLE, array, dates, embedded, others, singles, value};

pub const KINDS: [DateKind; 4] =
    [DateKind::Date, DateKind::ObjectId, DateKind::EpochSeconds, DateKind::EpochMillis];

const COLLECTION: &str = "coverage";

/// Documents whose fields `at` and `a.b` hold everything a date field was ever seen to hold. The
/// `_id` is the position.
pub fn universe(runner: &mut TestRunner) -> Vec<RawDocumentBuf> {
    let mut shapes = vec![None, Some(array([])), Some(array([array([])]))];
    for one in singles() {
        shapes.push(Some(one.clone()));
        shapes.push(Some(array([one.clone()])));
        shapes.push(Some(array([array([one.clone()])])));
        shapes.push(Some(embedded([("b", one)])));
    }
    let any = (value(), value());
    for _ in 0..150 {
        let (a, b) = any.new_tree(runner).expect("values").current();
        shapes.push(Some(array([a.clone(), b.clone()])));
        shapes.push(Some(array([array([a.clone(), b.clone()]), b.clone()])));
        shapes.push(Some(array([embedded([("b", a)]), embedded([("b", b)])])));
    }
    let mut documents = Vec::new();
    for (number, shape) in shapes.into_iter().enumerate() {
        let extra = |place: usize| ("x", RawBson::Int32(((number + place) % 3) as i32));
        let mut add = |fields: Vec<(&str, RawBson)>| {
            let id = ("_id", RawBson::Int32(documents.len() as i32));
            let fields = [id, extra(documents.len())].into_iter().chain(fields);
            documents.push(document(fields));
        };
        let Some(shape) = shape else {
            add(vec![]);
            add(vec![("a", embedded([]))]);
            continue;
        };
        add(vec![("at", shape.clone()), ("a", embedded([("b", shape.clone())]))]);
        add(vec![("a", array([embedded([("b", shape.clone())]), embedded([])]))]);
        add(vec![("a", shape)]);
    }
    documents
}

/// The bounds that a filter of this kind is asked about.
fn boundary(kind: DateKind) -> impl Strategy<Value = DatePoint> {
    let edge = if kind == DateKind::ObjectId { 0 } else { i64::MIN };
    select(vec![MIDDLE - 1, MIDDLE, MIDDLE, MIDDLE + 1, edge]).prop_map(DatePoint)
}

/// What may stand beside an operator or a path. Undefined is left out: mongod refuses it.
fn operand() -> impl Strategy<Value = RawBson> {
    let plain = value().prop_filter("mongod refuses it", |one| *one != RawBson::Undefined).boxed();
    prop_oneof![
        8 => plain.clone(),
        1 => prop::collection::vec(plain, 0..3).prop_map(array),
    ]
}

fn operators() -> impl Strategy<Value = RawBson> {
    let comparison = (select(vec!["$gte", "$gt", "$eq", "$lt", "$lte", "$ne"]), operand());
    let list = (select(vec!["$in", "$nin", "$all"]), prop::collection::vec(operand(), 0..3))
        .prop_map(|(name, list)| (name, array(list)));
    let other = prop_oneof![
        Just(("$exists", RawBson::Boolean(true))),
        Just(("$type", RawBson::Int32(9))),
        Just(("$type", RawBson::String("array".into()))),
        Just(("$size", RawBson::Int32(1))),
        Just(("$mod", array([RawBson::Int32(7), RawBson::Int32(1)]))),
    ];
    let leaf = prop_oneof![6 => comparison, 2 => list, 1 => other];
    let some = prop::collection::vec(leaf, 1..3).prop_map(embedded);
    some.prop_recursive(2, 6, 2, |inner| {
        (select(vec!["$not", "$elemMatch"]), inner.clone(), inner).prop_map(
            |(name, inner, beside)| {
                let beside = beside.as_raw_bson_ref().as_document().expect("operators").to_owned();
                let mut fields: Vec<(String, RawBson)> = vec![(name.to_owned(), inner)];
                for field in &beside {
                    let (name, value) = field.expect("a field");
                    fields.push((name.as_str().to_owned(), value.into()));
                }
                embedded(fields.iter().take(2).map(|(name, value)| (name.as_str(), value.clone())))
            },
        )
    })
}

/// A filter over `path` (mostly), nested as clients nest them and worse.
pub fn filter(path: &'static str) -> impl Strategy<Value = RawDocumentBuf> {
    let name =
        prop_oneof![6 => Just(path), 1 => Just("x"), 1 => select(vec!["at.b", "a", "a.0.b"])];
    let condition = (name, prop_oneof![3 => operators(), 2 => operand()]);
    let expression =
        (select(vec!["$gte", "$gt", "$eq"]), operand()).prop_map(move |(name, one)| {
            let sides = array([RawBson::String(format!("${path}")), embedded([("$literal", one)])]);
            ("$expr", embedded([(name, sides)]))
        });
    let elements =
        operators().prop_map(|inner| ("a", embedded([("$elemMatch", embedded([("b", inner)]))])));
    let leaf = prop_oneof![
        12 => prop::collection::vec(condition, 1..3).prop_map(document),
        1 => expression.prop_map(|one| document([one])),
        1 => elements.prop_map(|one| document([one])),
        1 => Just(RawDocumentBuf::new()),
    ];
    leaf.prop_recursive(3, 10, 3, |inner| {
        let branches = prop::collection::vec(inner.clone(), 1..4);
        (select(vec!["$and", "$or", "$or", "$nor"]), branches, inner, any::<bool>()).prop_map(
            |(name, branches, beside, with)| {
                let mut filter = if with { beside } else { RawDocumentBuf::new() };
                let name = bson::raw::CString::try_from(name.to_owned()).expect("a name");
                filter.append(&*name, branches.into_iter().collect::<RawArrayBuf>());
                filter
            },
        )
    })
}

/// A filter that is covered more often than not, and then spoilt in one place or not at all.
fn nearly_covered(path: &'static str, kind: DateKind) -> impl Strategy<Value = RawDocumentBuf> {
    let recent: Vec<_> = dates()
        .into_iter()
        .chain(crate::values::numbers())
        .filter(|one| {
            kind.compare(one.as_raw_bson_ref(), DatePoint(MIDDLE))
                .is_some_and(|order| order.is_ge())
        })
        .collect();
    let odd: Vec<_> = others().into_iter().chain(dates()).collect();
    let operand = prop_oneof![9 => select(recent.clone()), 1 => select(odd)];
    let condition = prop_oneof![
        3 => (select(vec!["$gte", "$gt", "$eq"]), operand.clone())
            .prop_map(|(name, one)| embedded([(name, one)])),
        2 => prop::collection::vec(operand.clone(), 0..3)
            .prop_map(|list| embedded([("$in", array(list))])),
        1 => prop::collection::vec(operand.clone(), 1..3)
            .prop_map(|list| embedded([("$all", array(list))])),
        1 => operand.clone(),
        1 => (select(vec!["$gte", "$eq"]), operand)
            .prop_map(|(name, one)| embedded([("$elemMatch", embedded([(name, one)]))])),
    ];
    let leaf = condition.prop_map(move |one| document([(path, one)]));
    leaf.prop_recursive(3, 8, 3, |inner| {
        let branches = prop::collection::vec(inner, 1..4);
        (select(vec!["$and", "$or", "$or"]), branches).prop_map(|(name, branches)| {
            document([(name, RawBson::Array(branches.into_iter().collect::<RawArrayBuf>()))])
        })
    })
}

/// The documents a filter matches outside the window; Err if mongod refuses the filter.
fn outside(
    server: &Server,
    coll: &str,
    filter: &RawDocument,
    window: &RawDocument,
) -> Result<i32, String> {
    let mut nor = RawArrayBuf::new();
    nor.push(window.to_owned());
    let mut rest = RawDocumentBuf::new();
    rest.append(cstr!("$nor"), nor);
    let mut both = RawArrayBuf::new();
    both.push(filter.to_owned());
    both.push(rest);
    let mut query = RawDocumentBuf::new();
    query.append(cstr!("$and"), both);
    let mut command = RawDocumentBuf::new();
    command.append(cstr!("count"), coll);
    command.append(cstr!("query"), query);
    server.try_run(command).map(|reply| reply.get_i32("n").expect("a count"))
}

#[derive(Default)]
struct Tally {
    refused: u32,
    covered: u32,
    open: u32,
}

fn check(
    path: &'static str,
    kind: DateKind,
    filters: impl Strategy<Value = RawDocumentBuf>,
    cases: u32,
) -> Tally {
    let server = shared();
    let field = DateField::new(path, kind).expect("a field");
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let tally = std::cell::RefCell::new(Tally::default());
    let outcome = runner.run(&(filters, boundary(kind)), |(filter, boundary)| {
        let mut tally = tally.borrow_mut();
        if !covers(&filter, &field, boundary) {
            tally.open += 1;
            return Ok(());
        }
        match outside(&server, COLLECTION, &filter, &field.window(boundary)) {
            Err(_) => tally.refused += 1,
            Ok(count) => {
                tally.covered += 1;
                let readable = bson::Document::try_from(&*filter);
                prop_assert_eq!(count, 0, "{:?} from {:?}", readable, boundary);
            }
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{path}, {kind}: {failure}");
    }
    tally.into_inner()
}

#[test]
fn covered_filters_match_nothing_outside_the_window() {
    let server = shared();
    server.fresh(COLLECTION, &[]);
    assert_eq!(server.insert(COLLECTION, &universe(&mut TestRunner::default())), []);
    for kind in KINDS {
        for path in ["at", "a.b"] {
            let random = check(path, kind, filter(path), 700);
            assert!(random.covered > 10, "too few of the filters were covered to prove anything");
            let near = check(path, kind, nearly_covered(path, kind), 400);
            assert!(
                near.covered > 100 && near.open > 50,
                "covered {}, open {}",
                near.covered,
                near.open
            );
        }
    }
}
