//! Decimal128 as IEEE 754-2008 lays it out (binary integer significand), and arithmetic on it.
//!
//! Source: the published BSON Decimal128 specification. Arithmetic goes through arbitrary
//! precision and is rounded once, to 34 digits, half to even.

use std::cmp::Ordering;
use std::num::NonZeroU64;

use bigdecimal::{BigDecimal, RoundingMode, Signed as _, ToPrimitive as _, Zero as _};
use bson::Decimal128;

const BIAS: i64 = 6176;
const DIGITS: u64 = 34;
const LARGEST: u128 = 10_u128.pow(34) - 1;

/// A Decimal128 taken apart.
#[derive(Clone, Debug, PartialEq)]
pub enum Decimal {
    /// Not a number.
    NaN,
    /// Infinity; true when negative.
    Infinite(bool),
    /// A number.
    Finite(BigDecimal),
}

impl Decimal {
    /// Takes it apart.
    #[must_use]
    pub fn of(value: &Decimal128) -> Self {
        let bits = u128::from_le_bytes(value.bytes());
        let high = (bits >> 64) as u64;
        let negative = high >> 63 == 1;
        if (high >> 58) & 0b1_1111 == 0b1_1111 {
            return Self::NaN;
        }
        if (high >> 58) & 0b1_1111 == 0b1_1110 {
            return Self::Infinite(negative);
        }
        let (exponent, mut significand) = if (high >> 61) & 0b11 == 0b11 {
            // A significand of this form is past 34 digits and stands for zero.
            (((high >> 47) & 0x3fff) as i64, 0)
        } else {
            (((high >> 49) & 0x3fff) as i64, bits & ((1 << 113) - 1))
        };
        if significand > LARGEST {
            significand = 0;
        }
        let number = BigDecimal::new(significand.into(), BIAS - exponent);
        Self::Finite(if negative { -number } else { number })
    }

    /// From a binary number, exactly.
    #[must_use]
    pub fn of_f64(value: f64) -> Self {
        if value.is_nan() {
            return Self::NaN;
        }
        if value.is_infinite() {
            return Self::Infinite(value < 0.0);
        }
        BigDecimal::try_from(value).map_or(Self::NaN, Self::Finite)
    }

    /// From a whole number.
    #[must_use]
    pub fn of_i64(value: i64) -> Self {
        Self::Finite(BigDecimal::from(value))
    }

    /// From a binary number as MongoDB converts one: by its 15 significant digits.
    #[must_use]
    pub fn of_f64_short(value: f64) -> Self {
        match Self::of_f64(value) {
            Self::Finite(number) => Self::Finite(round(&number, 15).normalized()),
            other => other,
        }
    }

    /// Puts it together: 34 digits, half to even.
    #[must_use]
    pub fn pack(&self) -> Decimal128 {
        let number = match self {
            Self::NaN => return from_high(0b1_1111 << 58),
            Self::Infinite(negative) => {
                return from_high((0b1_1110 << 58) | (u64::from(*negative) << 63));
            }
            Self::Finite(number) => number,
        };
        let rounded = if number.digits() > DIGITS { round(number, DIGITS) } else { number.clone() };
        let negative = rounded.is_negative();
        let (digits, scale) = rounded.abs().into_bigint_and_exponent();
        let mut exponent = -scale;
        let mut significand = digits.to_u128().unwrap_or(0);
        while exponent < -BIAS && significand != 0 {
            significand /= 10;
            exponent += 1;
        }
        while exponent > 6111 && significand != 0 && significand <= LARGEST / 10 {
            significand *= 10;
            exponent -= 1;
        }
        if significand == 0 {
            exponent = exponent.clamp(-BIAS, 6111);
        } else if exponent > 6111 {
            return Self::Infinite(negative).pack();
        }
        let biased = (exponent + BIAS).clamp(0, 0x3fff) as u128;
        let bits = (u128::from(negative) << 127) | (biased << 113) | significand;
        Decimal128::from_bytes(bits.to_le_bytes())
    }

    /// The nearest binary number.
    #[must_use]
    pub fn to_f64(&self) -> f64 {
        match self {
            Self::NaN => f64::NAN,
            Self::Infinite(true) => f64::NEG_INFINITY,
            Self::Infinite(false) => f64::INFINITY,
            Self::Finite(number) => number.to_f64().unwrap_or(f64::NAN),
        }
    }

    /// The order of numbers: not-a-number before all others, and equal to itself.
    #[must_use]
    pub fn compare(&self, other: &Self) -> Ordering {
        let rank = |value: &Self| match value {
            Self::NaN => 0,
            Self::Infinite(true) => 1,
            Self::Finite(_) => 2,
            Self::Infinite(false) => 3,
        };
        match (self, other) {
            (Self::Finite(a), Self::Finite(b)) => a.cmp(b),
            _ => rank(self).cmp(&rank(other)),
        }
    }

    /// Applies an operation that two finite numbers have a result for.
    #[must_use]
    pub fn apply(&self, other: &Self, operation: Operation) -> Self {
        use Operation::{Add, Divide, Multiply, Remainder, Subtract};
        match (self, other) {
            (Self::Finite(a), Self::Finite(b)) => match operation {
                Add => Self::Finite(a + b),
                Subtract => Self::Finite(a - b),
                Multiply => Self::Finite(a * b),
                Divide if b.is_zero() && a.is_zero() => Self::NaN,
                Divide if b.is_zero() => Self::Infinite(a.is_negative()),
                Divide => Self::Finite(round(&(a / b), DIGITS).normalized()),
                Remainder if b.is_zero() => Self::NaN,
                Remainder => Self::Finite(a % b),
            },
            (Self::NaN, _) | (_, Self::NaN) => Self::NaN,
            // At least one is infinite: the rules of binary numbers.
            _ => Self::of_f64(operation.binary(self.to_f64(), other.to_f64())),
        }
    }
}

/// What [`Decimal::apply`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the words say it")]
pub enum Operation {
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

impl Operation {
    /// On binary numbers.
    #[must_use]
    pub fn binary(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Add => a + b,
            Self::Subtract => a - b,
            Self::Multiply => a * b,
            Self::Divide => a / b,
            Self::Remainder => a % b,
        }
    }
}

fn from_high(high: u64) -> Decimal128 {
    Decimal128::from_bytes((u128::from(high) << 64).to_le_bytes())
}

fn round(number: &BigDecimal, digits: u64) -> BigDecimal {
    match NonZeroU64::new(digits) {
        Some(digits) => number.with_precision_round(digits, RoundingMode::HalfEven),
        None => number.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Decimal128 {
        text.parse().unwrap()
    }

    #[test]
    fn taking_apart_and_putting_together_keeps_the_number() {
        for text in ["0", "1", "-1.50", "1E+6111", "9.99E-6143", "Infinity", "-Infinity", "NaN"] {
            let packed = Decimal::of(&parse(text)).pack();
            assert_eq!(packed.to_string(), parse(text).to_string(), "{text}");
        }
    }

    #[test]
    fn sums_are_exact_where_binary_ones_are_not() {
        let sum = Decimal::of(&parse("0.1")).apply(&Decimal::of(&parse("0.2")), Operation::Add);
        assert_eq!(sum.pack().to_string(), "0.3");
        assert_eq!(sum.compare(&Decimal::of_f64(0.3)), Ordering::Greater);
    }

    #[test]
    fn a_quotient_has_34_digits() {
        let third = Decimal::of_i64(1).apply(&Decimal::of_i64(3), Operation::Divide);
        assert_eq!(third.pack().to_string(), "0.3333333333333333333333333333333333");
        let none = Decimal::of_i64(1).apply(&Decimal::of_i64(0), Operation::Divide);
        assert_eq!(none, Decimal::Infinite(false));
    }
}
