//! Exact values of BSON numbers, whatever their type: MongoDB compares int, long, double and
//! decimal by value, so identity and ranges must not round. Arithmetic does not belong here.

use std::cmp::Ordering;

use bson::Decimal128;
use bson::raw::RawBsonRef;

/// Largest decimal128 coefficient plus one (34 decimal digits).
const COEFFICIENT_LIMIT: u128 = 10_u128.pow(34);

/// Bias of the decimal128 exponent.
const EXPONENT_BIAS: i16 = 6176;

/// A number in one form a value: equal numbers of different BSON types are equal here.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Number {
    /// All NaNs, which MongoDB treats as one value.
    NaN,
    /// An infinity.
    Infinite {
        /// Below every number rather than above.
        negative: bool,
    },
    /// What decimal128 can hold: `coefficient * 10^exponent`, the coefficient without trailing
    /// zeros; zero is always `+0 * 10^0`.
    Decimal { negative: bool, coefficient: u128, exponent: i16 },
    /// A finite double that needs more than 34 decimal digits, hence equals no other type's value.
    Double(f64),
}

impl Number {
    /// The number a BSON value is, or None if it is none.
    pub(crate) fn new(value: RawBsonRef<'_>) -> Option<Self> {
        match value {
            RawBsonRef::Int32(n) => Some(Self::from_i64(i64::from(n))),
            RawBsonRef::Int64(n) => Some(Self::from_i64(n)),
            RawBsonRef::Double(n) => Some(Self::from_f64(n)),
            RawBsonRef::Decimal128(n) => Some(Self::from_decimal(n)),
            _ => None,
        }
    }

    fn from_i64(n: i64) -> Self {
        // 64-bit divisions are several times cheaper than the 128-bit ones of the general case.
        let (mut coefficient, mut exponent) = (n.unsigned_abs(), 0);
        while coefficient != 0 && coefficient % 10 == 0 {
            coefficient /= 10;
            exponent += 1;
        }
        Self::Decimal { negative: n < 0, coefficient: u128::from(coefficient), exponent }
    }

    fn from_f64(n: f64) -> Self {
        if n.is_nan() {
            return Self::NaN;
        }
        if n.is_infinite() {
            return Self::Infinite { negative: n < 0.0 };
        }
        if n == 0.0 {
            return Self::from_i64(0);
        }
        let bits = n.to_bits();
        let fraction = bits & ((1 << 52) - 1);
        let (mut mantissa, mut power_of_two) = match (bits >> 52) & 0x7ff {
            0 => (u128::from(fraction), -1074_i64),
            biased => (u128::from(fraction | (1 << 52)), i64::try_from(biased).unwrap_or(0) - 1075),
        };
        let shift = mantissa.trailing_zeros();
        mantissa >>= shift;
        power_of_two += i64::from(shift);

        // n = mantissa * 2^power_of_two with an odd mantissa. Bring it to c * 10^e.
        let mut exponent: i16 = 0;
        if power_of_two >= 0 {
            while power_of_two > 0 && mantissa.is_multiple_of(5) {
                mantissa /= 5;
                power_of_two -= 1;
                exponent += 1;
            }
            match u32::try_from(power_of_two) {
                Ok(by) if by < mantissa.leading_zeros() => mantissa <<= by,
                _ => return Self::Double(n),
            }
        } else {
            // Odd and multiplied by fives only: no factor of ten can arise.
            let fives = u32::try_from(-power_of_two).ok().and_then(|k| 5_u128.checked_pow(k));
            match fives.and_then(|fives| mantissa.checked_mul(fives)) {
                Some(product) => mantissa = product,
                None => return Self::Double(n),
            }
            match i16::try_from(power_of_two) {
                Ok(power) => exponent = power,
                Err(_) => return Self::Double(n),
            }
        }
        if mantissa >= COEFFICIENT_LIMIT {
            return Self::Double(n);
        }
        Self::Decimal { negative: n < 0.0, coefficient: mantissa, exponent }
    }

    fn from_decimal(n: Decimal128) -> Self {
        let bits = u128::from_le_bytes(n.bytes());
        let negative = bits >> 127 == 1;
        match (bits >> 122) & 0b11111 {
            0b11111 => return Self::NaN,
            0b11110 => return Self::Infinite { negative },
            _ => {}
        }
        // The form with the large coefficient, and coefficients of more than 34 digits, are not
        // canonical: their value is zero.
        let large = (bits >> 125) & 0b11 == 0b11;
        let mut coefficient = if large { 0 } else { bits & ((1 << 113) - 1) };
        if coefficient == 0 || coefficient >= COEFFICIENT_LIMIT {
            return Self::from_i64(0);
        }
        let biased = i16::try_from((bits >> 113) & 0x3fff).unwrap_or(0);
        let mut exponent = biased - EXPONENT_BIAS;
        while coefficient.is_multiple_of(10) {
            coefficient /= 10;
            exponent += 1;
        }
        Self::Decimal { negative, coefficient, exponent }
    }

    /// The whole number at or below, and whether something was cut off. None for NaN.
    fn floor_parts(self) -> Option<(i128, bool)> {
        match self {
            Self::NaN => None,
            Self::Infinite { negative } => {
                Some((if negative { i128::MIN } else { i128::MAX }, false))
            }
            // The cast saturates, far outside 64 bits.
            Self::Double(n) => Some((n.floor() as i128, n.floor() != n)),
            Self::Decimal { negative, coefficient, exponent } => {
                let ten_to = 10_u128.checked_pow(u32::from(exponent.unsigned_abs()));
                let (whole, cut) = match (exponent >= 0, ten_to) {
                    (true, Some(factor)) => (coefficient.saturating_mul(factor), false),
                    (true, None) => (if coefficient == 0 { 0 } else { u128::MAX }, false),
                    (false, Some(divisor)) => {
                        (coefficient / divisor, !coefficient.is_multiple_of(divisor))
                    }
                    (false, None) => (0, coefficient != 0),
                };
                let whole = i128::try_from(whole).unwrap_or(i128::MAX);
                Some((if negative { -whole - i128::from(cut) } else { whole }, cut))
            }
        }
    }

    /// The whole number at or below, limited to 64 bits. None for NaN.
    pub(crate) fn floor(self) -> Option<i64> {
        let (whole, _) = self.floor_parts()?;
        Some(i64::try_from(whole).unwrap_or(if whole < 0 { i64::MIN } else { i64::MAX }))
    }

    /// Compares by value. None for NaN, which no range matches.
    pub(crate) fn compare_i64(self, n: i64) -> Option<Ordering> {
        let (whole, cut) = self.floor_parts()?;
        Some(whole.cmp(&i128::from(n)).then(if cut { Ordering::Greater } else { Ordering::Equal }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decimal(text: &str) -> Number {
        Number::from_decimal(text.parse().unwrap())
    }

    #[test]
    fn equal_values_are_one_number() {
        for (a, b) in [
            (Number::from_i64(1), Number::from_f64(1.0)),
            (Number::from_i64(1), decimal("1.000")),
            (Number::from_i64(0), Number::from_f64(-0.0)),
            (Number::from_i64(0), decimal("-0E+300")),
            (Number::from_i64(i64::MIN), Number::from_f64(-9_223_372_036_854_775_808.0)),
            (Number::from_f64(0.5), decimal("0.5")),
            (Number::from_f64(f64::INFINITY), decimal("Infinity")),
            (Number::from_f64(1e22), decimal("1E+22")),
            (Number::from_f64(5e-5), Number::from_f64(0.00005)),
        ] {
            assert_eq!(a, b);
        }
    }

    #[test]
    fn close_values_stay_apart() {
        for (a, b) in [
            (Number::from_f64(0.1), decimal("0.1")),
            (Number::from_i64((1 << 53) + 1), Number::from_f64((1_u64 << 53) as f64)),
            (Number::from_i64(i64::MAX), Number::from_f64(i64::MAX as f64)),
            (decimal("9223372036854775807.1"), Number::from_i64(i64::MAX)),
            (decimal("1E+400"), Number::from_f64(f64::INFINITY)),
            (Number::from_f64(f64::MIN_POSITIVE), Number::from_f64(5e-324)),
            (Number::from_f64(1e300), decimal("1E+300")),
        ] {
            assert_ne!(a, b);
        }
    }

    #[test]
    fn comparison_does_not_round() {
        let big = (1_i64 << 53) + 1;
        assert_eq!(Number::from_f64((1_u64 << 53) as f64).compare_i64(big), Some(Ordering::Less));
        assert_eq!(decimal("1.0000000001").compare_i64(1), Some(Ordering::Greater));
        assert_eq!(decimal("-1.0000000001").compare_i64(-1), Some(Ordering::Less));
        assert_eq!(decimal("1E-6000").compare_i64(0), Some(Ordering::Greater));
        assert_eq!(decimal("-1E-6000").compare_i64(0), Some(Ordering::Less));
        assert_eq!(decimal("-1E+6000").compare_i64(i64::MIN), Some(Ordering::Less));
        assert_eq!(Number::from_f64(1e300).compare_i64(i64::MAX), Some(Ordering::Greater));
        assert_eq!(Number::NaN.compare_i64(0), None);
        assert_eq!(Number::from_f64(f64::NEG_INFINITY).floor(), Some(i64::MIN));
    }
}
