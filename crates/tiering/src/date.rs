//! The date field of a tiered collection: its path, its kind, points in time in the kind's own unit.
//! Filters over it are built in `window`, questions about a client's filter are answered in `coverage`.

use std::cmp::Ordering;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bson::oid::ObjectId;
use bson::raw::{CString, RawBson, RawBsonRef};
use serde::{Deserialize, Serialize};

use crate::number::Number;

/// How a document's date is stored. A query sees a date only under its own kind: MongoDB compares
/// a range with values of the same type alone, so a collection has one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DateKind {
    /// A BSON date; points are milliseconds since 1970.
    Date,
    /// The time inside an ObjectId; points are seconds since 1970.
    ObjectId,
    /// A number (int, long, double or decimal) of seconds since 1970.
    EpochSeconds,
    /// A number (int, long, double or decimal) of milliseconds since 1970.
    EpochMillis,
}

/// A point in time, in the unit of its collection's `DateKind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DatePoint(pub i64);

/// The field that says how old a document is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DateField {
    path: CString,
    kind: DateKind,
}

/// Why a text cannot be the path of a date field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{path}\" cannot be a date field: {why}")]
pub struct DateFieldError {
    path: String,
    why: &'static str,
}

impl DateField {
    /// A field at `path` (dotted for an embedded one).
    pub fn new(path: &str, kind: DateKind) -> Result<Self, DateFieldError> {
        let refuse = |why| DateFieldError { path: path.to_owned(), why };
        if path.split('.').any(str::is_empty) {
            return Err(refuse("a path has no empty parts"));
        }
        if path.split('.').any(|part| part.starts_with('$')) {
            return Err(refuse("no part of a path may begin with \"$\""));
        }
        if path.split('.').any(|part| part.bytes().all(|byte| byte.is_ascii_digit())) {
            return Err(refuse("a number in a path may mean a place in an array"));
        }
        let path = CString::try_from(path.to_owned())
            .map_err(|_| refuse("a path contains no NUL character"))?;
        Ok(Self { path, kind })
    }

    /// The path, dotted for an embedded field.
    pub fn path(&self) -> &str {
        self.path.as_str()
    }

    /// The path in the form that raw documents take as a field name.
    pub(crate) fn key(&self) -> &bson::raw::CStr {
        &self.path
    }

    /// How the date is stored.
    pub fn kind(&self) -> DateKind {
        self.kind
    }
}

impl DateKind {
    /// Units of a point in one second.
    const fn per_second(self) -> i64 {
        match self {
            Self::Date | Self::EpochMillis => 1_000,
            Self::ObjectId | Self::EpochSeconds => 1,
        }
    }

    /// The smallest value of this kind that is at `point`: what a range `$gte: point` compares with.
    /// ObjectIds hold unsigned 32-bit seconds; a point outside them gives the nearest they have.
    pub fn to_bson(self, point: DatePoint) -> RawBson {
        match self {
            Self::Date => RawBson::DateTime(bson::DateTime::from_millis(point.0)),
            Self::ObjectId => RawBson::ObjectId(first_object_id(point)),
            Self::EpochSeconds | Self::EpochMillis => RawBson::Int64(point.0),
        }
    }

    /// The point a value of this kind lies in, rounded down to the kind's unit. None when the value
    /// is not of this kind (or is NaN, which no range matches). Infinities and numbers beyond 64
    /// bits give the outermost points: only there a value may be older than its point.
    pub fn from_bson(self, value: RawBsonRef<'_>) -> Option<DatePoint> {
        match (self, value) {
            (Self::Date, RawBsonRef::DateTime(date)) => Some(DatePoint(date.timestamp_millis())),
            (Self::ObjectId, RawBsonRef::ObjectId(id)) => {
                Some(DatePoint(i64::from(object_id_seconds(id))))
            }
            (Self::EpochSeconds | Self::EpochMillis, value) => {
                Number::new(value)?.floor().map(DatePoint)
            }
            _ => None,
        }
    }

    /// Compares a value with a point exactly as MongoDB compares it with `to_bson(point)`. None
    /// when a range does not compare them at all: another type, or NaN.
    pub fn compare(self, value: RawBsonRef<'_>, point: DatePoint) -> Option<Ordering> {
        match (self, value) {
            (Self::Date, RawBsonRef::DateTime(date)) => Some(date.timestamp_millis().cmp(&point.0)),
            (Self::ObjectId, RawBsonRef::ObjectId(id)) => {
                Some(id.bytes().cmp(&first_object_id(point).bytes()))
            }
            (Self::EpochSeconds | Self::EpochMillis, value) => {
                Number::new(value)?.compare_i64(point.0)
            }
            _ => None,
        }
    }

    /// The point of a wall-clock time, rounded down.
    pub fn point_of_system_time(self, time: SystemTime) -> DatePoint {
        let per_second = i128::from(self.per_second());
        let nanos = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i128::try_from(after.as_nanos()).unwrap_or(i128::MAX),
            Err(before) => {
                i128::try_from(before.duration().as_nanos()).map_or(i128::MIN, |nanos| -nanos)
            }
        };
        let units = nanos.div_euclid(1_000_000_000 / per_second);
        DatePoint(i64::try_from(units).unwrap_or(if units < 0 { i64::MIN } else { i64::MAX }))
    }

    /// The wall-clock time of a point, or None where the clock has no such time.
    pub fn system_time(self, point: DatePoint) -> Option<SystemTime> {
        let unit = |n: u64| match self.per_second() {
            1 => Duration::from_secs(n),
            _ => Duration::from_millis(n),
        };
        if point.0 >= 0 {
            UNIX_EPOCH.checked_add(unit(point.0.unsigned_abs()))
        } else {
            UNIX_EPOCH.checked_sub(unit(point.0.unsigned_abs()))
        }
    }

    /// A span of time in this kind's unit, rounded up.
    pub fn units(self, span: Duration) -> i64 {
        let nanos_per_unit = 1_000_000_000 / u128::from(self.per_second().unsigned_abs());
        i64::try_from(span.as_nanos().div_ceil(nanos_per_unit)).unwrap_or(i64::MAX)
    }

    /// `point` moved back by `span` (rounded up), without overflow.
    pub fn before(self, point: DatePoint, span: Duration) -> DatePoint {
        DatePoint(point.0.saturating_sub(self.units(span)))
    }

    /// The name used in configuration and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Date => "date",
            Self::ObjectId => "object_id",
            Self::EpochSeconds => "epoch_seconds",
            Self::EpochMillis => "epoch_millis",
        }
    }
}

impl fmt::Display for DateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn object_id_seconds(id: ObjectId) -> u32 {
    let [a, b, c, d, ..] = id.bytes();
    u32::from_be_bytes([a, b, c, d])
}

/// The smallest ObjectId of a second.
fn first_object_id(point: DatePoint) -> ObjectId {
    let seconds = u32::try_from(point.0.max(0)).unwrap_or(u32::MAX);
    let [a, b, c, d] = seconds.to_be_bytes();
    ObjectId::from_bytes([a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_round_down_on_both_sides_of_1970() {
        let half = Duration::from_micros(1_500);
        let (after, before) = (UNIX_EPOCH + half, UNIX_EPOCH - half);
        assert_eq!(DateKind::Date.point_of_system_time(after), DatePoint(1));
        assert_eq!(DateKind::Date.point_of_system_time(before), DatePoint(-2));
        assert_eq!(DateKind::EpochSeconds.point_of_system_time(before), DatePoint(-1));
        assert_eq!(
            DateKind::Date.system_time(DatePoint(-2)),
            Some(UNIX_EPOCH - Duration::from_millis(2))
        );
    }

    #[test]
    fn a_value_is_never_older_than_its_point() {
        let kinds = [DateKind::EpochSeconds, DateKind::EpochMillis];
        let values = [1.5, -1.5, 0.0, -0.0, 9e18, -9.3e18, f64::INFINITY, f64::NEG_INFINITY];
        for (kind, value) in kinds.into_iter().flat_map(|k| values.map(|v| (k, v))) {
            let value = RawBsonRef::Double(value);
            let point = kind.from_bson(value).unwrap();
            if point.0 != i64::MIN {
                assert_ne!(kind.compare(value, point), Some(Ordering::Less), "{value:?}");
            }
        }
        assert_eq!(DateKind::EpochMillis.from_bson(RawBsonRef::Double(f64::NAN)), None);
        assert_eq!(DateKind::EpochMillis.from_bson(RawBsonRef::String("1")), None);
        assert_eq!(DateKind::Date.from_bson(RawBsonRef::Int64(1)), None);
    }

    #[test]
    fn paths_are_checked() {
        assert!(DateField::new("meta.created", DateKind::Date).is_ok());
        for bad in ["", ".", "a.", "a..b", "$a", "a.$b", "a.0", "a\0b"] {
            assert!(DateField::new(bad, DateKind::Date).is_err(), "{bad:?}");
        }
    }
}
