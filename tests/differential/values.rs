//! Random values: `_id`s of every kind, dates on both sides of the boundary and of other types,
//! documents.

use std::str::FromStr;

use bson::oid::ObjectId;
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, DateTime, Decimal128, Document, Regex, Timestamp, doc};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use super::step::date;

/// Random choices of one case.
pub struct Dice {
    pub rng: StdRng,
    serial: i32,
    tag: i32,
    odd_ids: Vec<Bson>,
}

pub const SECOND: i64 = 1000;
pub const MINUTE: i64 = 60 * SECOND;
pub const DAY: i64 = 1440 * MINUTE;

/// Strings that differ in case, accents and length.
const WORDS: [&str; 9] = ["a", "A", "b", "B", "ä", "abc", "ABC", "Abc", ""];

impl Dice {
    pub fn new(rng: StdRng) -> Self {
        Self { rng, serial: 0, tag: 0, odd_ids: odd_ids() }
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, of_hundred: u32) -> bool {
        self.rng.random_range(0..100) < of_hundred
    }

    pub fn below(&mut self, end: i32) -> i32 {
        self.rng.random_range(0..end)
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from.choose(&mut self.rng).unwrap().clone()
    }

    /// A number no document has in its field `n` yet.
    pub fn serial(&mut self) -> i32 {
        self.serial += 1;
        self.serial
    }

    /// One that a document has, or had.
    pub fn known_serial(&mut self) -> i32 {
        self.below(self.serial.max(1)) + 1
    }

    pub fn tag(&mut self) -> i32 {
        self.tag += 1;
        self.tag
    }

    pub fn word(&mut self) -> Bson {
        self.pick(&WORDS).into()
    }

    /// An `_id`; many of them are in use.
    pub fn id(&mut self) -> Bson {
        match self.below(10) {
            0..6 => Bson::Int32(self.below(90)),
            6 => Bson::String(format!("k{}", self.below(12))),
            7 => Bson::ObjectId(ObjectId::from_bytes([7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {
                u8::try_from(self.below(12)).unwrap()
            }])),
            _ => {
                let ids = std::mem::take(&mut self.odd_ids);
                let id = self.pick(&ids);
                self.odd_ids = ids;
                id
            }
        }
    }

    /// An `_id` of text that collations may take for others.
    pub fn text_id(&mut self) -> Bson {
        self.pick(&["a", "A", "abc", "ABC", "Abc", "ä", "k1", "K1"]).into()
    }

    /// What no document can have for an `_id`.
    pub fn impossible_id(&mut self) -> Bson {
        let regex = Regex { pattern: "^a".try_into().unwrap(), options: "".try_into().unwrap() };
        let pattern = Bson::RegularExpression(regex);
        self.pick(&[Bson::Array(vec![1.into()]), pattern, Bson::Undefined])
    }

    /// Milliseconds from the boundary to a date around it.
    pub fn near(&mut self) -> i64 {
        let offset = self.rng.random_range(-90 * SECOND..120 * SECOND);
        // Some dates are equal, and some are the same second.
        if self.percent(50) { offset / 5000 * 5000 } else { offset }
    }

    /// Milliseconds from the boundary to any date.
    pub fn offset(&mut self) -> i64 {
        match self.below(10) {
            0..6 => self.near(),
            6..8 => -self.rng.random_range(MINUTE..30 * DAY),
            _ => self.rng.random_range(2 * MINUTE..55 * MINUTE),
        }
    }

    /// A value of the date field; `None`: it has none.
    pub fn date(&mut self) -> Option<Bson> {
        let (one, other) = (self.offset(), self.offset());
        if self.percent(85) {
            return Some(date(one));
        }
        Some(match self.below(16) {
            0 => return None,
            1 => Bson::Null,
            2 => "2024-01-01".into(),
            3 => Bson::Array(vec![date(one), date(other)]),
            4 => Bson::Array(vec![date(-DAY), date(10 * MINUTE)]),
            5 => Bson::Array(vec![]),
            6 => Bson::Array(vec![date(one), "x".into()]),
            7 => Bson::Int32(7),
            8 => Bson::Double(f64::NAN),
            9 => Bson::Timestamp(Timestamp { time: 1_700_000_000, increment: 1 }),
            10 => Bson::MaxKey,
            11 => Bson::MinKey,
            12 => Bson::Boolean(true),
            13 => Bson::Document(doc! { "at": date(one) }),
            14 => Bson::DateTime(DateTime::from_millis(-1_000_000)),
            _ => Bson::DateTime(DateTime::from_millis(253_402_300_799_999)),
        })
    }

    /// A number of some type.
    pub fn number(&mut self) -> Bson {
        let n = self.below(7) - 2;
        match self.below(6) {
            0 => Bson::Int64(n.into()),
            1 => Bson::Double(n.into()),
            2 => Bson::Double(f64::from(n) + 0.5),
            3 => Bson::Decimal128(Decimal128::from_str(&format!("{n}.0")).unwrap()),
            _ => Bson::Int32(n),
        }
    }

    pub fn item(&mut self) -> Document {
        doc! { "k": self.below(4), "q": self.below(10) }
    }

    /// A whole document but for its `_id`.
    pub fn fields(&mut self) -> Document {
        let n = self.serial();
        let mut document =
            doc! { "n": n, "x": self.below(6), "y": self.number(), "s": self.word() };
        if let Some(at) = self.date() {
            document.insert("at", at);
        }
        let tags: Vec<i32> = (0..self.below(4)).map(|_| self.below(6)).collect();
        document.insert("tags", tags);
        let items: Vec<Document> = (0..self.below(4)).map(|_| self.item()).collect();
        document.insert("items", items);
        document.insert("sub", doc! { "p": self.below(5), "q": { "r": self.below(3) } });
        document.insert("v", 0);
        if self.percent(10) {
            document.insert("odd", self.odd_value());
        }
        if self.percent(3) {
            document.insert("pad", "p".repeat(200_000));
        }
        document
    }

    /// Fields and types that are easily lost on the way.
    fn odd_value(&mut self) -> Bson {
        let nested = (0..40).fold(Bson::Int32(1), |inner, _| Bson::Document(doc! { "d": inner }));
        let all = [
            Bson::Document(doc! { "10": 1, "a.b": 2, "$x": 3, "": 4 }),
            Bson::Undefined,
            Bson::Symbol("symbol".into()),
            Bson::JavaScriptCode("x".into()),
            Bson::Binary(Binary { subtype: BinarySubtype::BinaryOld, bytes: vec![1, 2, 3] }),
            Bson::Binary(Binary { subtype: BinarySubtype::UserDefined(200), bytes: vec![] }),
            Bson::Double(-0.0),
            Bson::Int64(i64::MIN),
            // At the top the server would put its own clock there.
            Bson::Document(doc! { "t": Bson::Timestamp(Timestamp { time: 0, increment: 0 }) }),
            Bson::Decimal128(Decimal128::from_str("-0E+3").unwrap()),
            Bson::RegularExpression(Regex {
                pattern: "a/b".try_into().unwrap(),
                options: "im".try_into().unwrap(),
            }),
            nested,
        ];
        self.pick(&all)
    }

    /// A whole document.
    pub fn document(&mut self) -> Document {
        let id = self.id();
        let mut fields = self.fields();
        if self.percent(10) {
            // The server puts it first.
            fields.insert("_id", id);
            return fields;
        }
        let mut document = doc! { "_id": id };
        document.extend(fields);
        document
    }
}

fn odd_ids() -> Vec<Bson> {
    let uuid = |subtype| Bson::Binary(Binary { subtype, bytes: (0..16).collect() });
    let decimal = |text: &str| Bson::Decimal128(Decimal128::from_str(text).unwrap());
    vec![
        uuid(BinarySubtype::Uuid),
        uuid(BinarySubtype::UuidOld),
        uuid(BinarySubtype::Generic),
        doc! { "x": 1, "y": 2 }.into(),
        doc! { "y": 2, "x": 1 }.into(),
        doc! { "x": 1.0, "y": 2_i64 }.into(),
        doc! { "x": { "z": "a" } }.into(),
        doc! { "x": [1, 2] }.into(),
        doc! {}.into(),
        Bson::Null,
        Bson::Boolean(false),
        "l".repeat(1500).into(),
        "".into(),
        "a".into(),
        "A".into(),
        "abc".into(),
        "ABC".into(),
        "ä".into(),
        Bson::Symbol("k1".into()),
        1.0.into(),
        1_i64.into(),
        decimal("1"),
        decimal("2.0"),
        2.5.into(),
        decimal("2.5"),
        Bson::Double(0.1),
        decimal("0.1"),
        Bson::Double(-0.0),
        Bson::Double(f64::NAN),
        decimal("NaN"),
        Bson::Double(f64::INFINITY),
        Bson::Int64((1 << 53) + 1),
        Bson::Double(9_007_199_254_740_992.0),
        Bson::DateTime(DateTime::from_millis(5)),
        Bson::Timestamp(Timestamp { time: 5, increment: 5 }),
        Bson::JavaScriptCode("f".into()),
        Bson::MinKey,
        Bson::MaxKey,
    ]
}
