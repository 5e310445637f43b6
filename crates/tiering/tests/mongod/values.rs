//! Values of every BSON type, close to each other and to a date that matters, and random filters
//! and documents made of them.

use bson::oid::ObjectId;
use bson::raw::{RawArrayBuf, RawBson, RawDocumentBuf};
use bson::spec::BinarySubtype;
use bson::{Binary, DateTime, Decimal128, Timestamp};
use proptest::prelude::*;
use proptest::sample::select;

use crate::server::document;

/// The point around which dates of all kinds lie, in seconds as in milliseconds.
pub const MIDDLE: i64 = 1_000;

pub fn decimal(text: &str) -> RawBson {
    RawBson::Decimal128(text.parse().expect("a decimal"))
}

pub fn date(millis: i64) -> RawBson {
    RawBson::DateTime(DateTime::from_millis(millis))
}

pub fn object_id(seconds: u32, rest: u8) -> RawBson {
    let mut bytes = [rest; 12];
    bytes[..4].copy_from_slice(&seconds.to_be_bytes());
    RawBson::ObjectId(ObjectId::from_bytes(bytes))
}

pub fn array(values: impl IntoIterator<Item = RawBson>) -> RawBson {
    RawBson::Array(values.into_iter().collect::<RawArrayBuf>())
}

pub fn embedded<'a>(fields: impl IntoIterator<Item = (&'a str, RawBson)>) -> RawBson {
    RawBson::Document(document(fields))
}

/// A value that the bson crate reads but does not build.
fn from_bytes(bytes: &[u8]) -> RawBson {
    let document = RawDocumentBuf::from_bytes(bytes.to_vec()).expect("a document");
    document.get("x").expect("bson").expect("a value").into()
}

pub fn numbers() -> Vec<RawBson> {
    let big = 1_i64 << 53;
    let mut numbers = vec![
        RawBson::Int32(0),
        RawBson::Double(0.0),
        RawBson::Double(-0.0),
        decimal("-0E-10"),
        RawBson::Int32(1),
        RawBson::Int64(1),
        RawBson::Double(1.0),
        decimal("1"),
        decimal("1.00"),
        RawBson::Double(0.1),
        decimal("0.1"),
        decimal("0.1000000000000000055511151231257827"),
        RawBson::Double(0.5),
        decimal("0.5"),
        RawBson::Int64(big),
        RawBson::Int64(big + 1),
        RawBson::Double(big as f64),
        RawBson::Double((big + 2) as f64),
        decimal("9007199254740993"),
        RawBson::Int64(i64::MAX),
        RawBson::Int64(i64::MIN),
        RawBson::Double(i64::MAX as f64),
        RawBson::Double(i64::MIN as f64),
        decimal("9223372036854775807"),
        decimal("9223372036854775808"),
        RawBson::Double(1e22),
        decimal("1E+22"),
        RawBson::Double(1e23),
        decimal("1E+23"),
        RawBson::Double(1e300),
        decimal("1E+300"),
        decimal("1E+6000"),
        decimal("1E-6000"),
        RawBson::Double(5e-324),
        RawBson::Double(f64::NAN),
        RawBson::Double(-f64::NAN),
        decimal("NaN"),
        RawBson::Double(f64::INFINITY),
        RawBson::Double(f64::NEG_INFINITY),
        decimal("Infinity"),
        decimal("-Infinity"),
    ];
    // Coefficients that are not canonical: their value is zero.
    let mut large = [0xff; 16];
    large[15] = 0x6c;
    numbers.push(RawBson::Decimal128(Decimal128::from_bytes(large)));
    let mut beyond = (10_u128.pow(34)).to_le_bytes();
    beyond[15] |= 0x30;
    numbers.push(RawBson::Decimal128(Decimal128::from_bytes(beyond)));
    for near in [MIDDLE - 1, MIDDLE, MIDDLE + 1] {
        let millis = near as f64;
        numbers.extend([
            RawBson::Int64(near),
            RawBson::Int32(near as i32),
            RawBson::Double(millis),
            RawBson::Double(millis + 0.5),
            decimal(&format!("{near}.0000000000000000001")),
        ]);
    }
    numbers
}

pub fn dates() -> Vec<RawBson> {
    let near = [MIDDLE - 1, MIDDLE, MIDDLE + 1];
    let mut dates = vec![date(i64::MIN), date(-1), date(0), date(i64::MAX)];
    dates.extend(near.map(date));
    dates.extend(near.map(|n| object_id(n as u32, 0)));
    dates.extend(near.map(|n| object_id(n as u32, 0xff)));
    dates.extend([object_id(0, 0), object_id(u32::MAX, 0xff)]);
    dates
}

pub fn others() -> Vec<RawBson> {
    let binary = |subtype, bytes: &[u8]| RawBson::Binary(Binary { subtype, bytes: bytes.to_vec() });
    let regex = |pattern: &str, options: &str| {
        RawBson::RegularExpression(bson::Regex {
            pattern: pattern.to_owned().try_into().expect("a pattern"),
            options: options.to_owned().try_into().expect("options"),
        })
    };
    vec![
        RawBson::Null,
        RawBson::MinKey,
        RawBson::MaxKey,
        RawBson::Boolean(false),
        RawBson::Boolean(true),
        RawBson::String(String::new()),
        RawBson::String("a".into()),
        RawBson::String("A".into()),
        RawBson::String("a\0".into()),
        RawBson::Symbol("a".into()),
        RawBson::JavaScriptCode("a".into()),
        RawBson::JavaScriptCodeWithScope(bson::raw::RawJavaScriptCodeWithScope {
            code: "a".into(),
            scope: document([("s", RawBson::Int32(1))]),
        }),
        RawBson::JavaScriptCodeWithScope(bson::raw::RawJavaScriptCodeWithScope {
            code: "a".into(),
            scope: document([("s", RawBson::Double(1.0))]),
        }),
        regex("a", ""),
        regex("a", "i"),
        binary(BinarySubtype::Generic, b""),
        binary(BinarySubtype::Generic, b"abcd"),
        binary(BinarySubtype::BinaryOld, b"abcd"),
        binary(BinarySubtype::Uuid, &[7; 16]),
        binary(BinarySubtype::UuidOld, &[7; 16]),
        RawBson::Timestamp(Timestamp { time: 0, increment: 1 }),
        RawBson::Timestamp(Timestamp { time: 1, increment: 1 }),
        from_bytes(b"\x1a\0\0\0\x0cx\0\x02\0\0\0a\0abcdefghijkl\0"),
        embedded([]),
        embedded([("x", RawBson::Int32(1)), ("y", RawBson::Int32(2))]),
        embedded([("y", RawBson::Int32(2)), ("x", RawBson::Int32(1))]),
        embedded([("x", RawBson::Double(1.0)), ("y", RawBson::Int64(2))]),
        embedded([("", RawBson::Null)]),
    ]
}

/// All single values, undefined among them.
pub fn singles() -> Vec<RawBson> {
    let mut all = numbers();
    all.extend(dates());
    all.extend(others());
    all.push(RawBson::Undefined);
    all
}

/// A single value.
pub fn single() -> impl Strategy<Value = RawBson> {
    select(singles())
}

/// A value near the middle more often than not.
pub fn value() -> impl Strategy<Value = RawBson> {
    let near: Vec<_> = [MIDDLE - 1, MIDDLE, MIDDLE + 1]
        .into_iter()
        .flat_map(|n| {
            [date(n), object_id(n as u32, 0), RawBson::Int64(n), RawBson::Double(n as f64 + 0.5)]
        })
        .collect();
    prop_oneof![3 => select(near), 2 => single()]
}

/// A value with arrays and embedded documents in it, two levels deep.
pub fn nested() -> impl Strategy<Value = RawBson> {
    single().prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(array),
            prop::collection::vec((select(vec!["x", "y", ""]), inner), 0..3).prop_map(embedded),
        ]
    })
}
