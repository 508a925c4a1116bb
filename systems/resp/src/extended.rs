//! Arithmetic of the x87 80-bit extended type, in integers.
//!
//! INCRBYFLOAT in Redis computes with C's `long double` and prints with `%.17Lf`. On x86-64 that
//! type has a 64-bit mantissa, and clients see its rounding: `0.1 + 0.2` gives `0.3`, not the
//! `0.30000000000000004` of a double. Rust has no such type, so this module computes it exactly:
//! text is read to the nearest representable value (ties to even, through big integers where
//! needed), sums are rounded once, and printing rounds the exact value once. Results are the same
//! digits on every processor, which C's `long double` cannot promise.

/// Bits of precision of a normal number.
const PRECISION: i32 = 64;
/// Exponent of the last mantissa bit of the smallest (subnormal) numbers.
const MIN_EXPONENT: i32 = -16_445;
/// Exponent of the last mantissa bit of the largest numbers.
const MAX_EXPONENT: i32 = 16_383 - (PRECISION - 1);
/// Longest text Redis accepts as a number, one more than it takes in bytes.
const MAX_TEXT_BYTES: usize = 5 * 1024;

/// A finite extended-precision number, or an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extended {
    negative: bool,
    magnitude: Magnitude,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Magnitude {
    Zero,
    /// `mantissa * 2^exponent`; the top mantissa bit is set unless the number is subnormal.
    Finite {
        mantissa: u64,
        exponent: i32,
    },
    Infinite,
}

/// Rounds `(value + something below one if sticky) * 2^exponent` to the nearest, ties to even.
fn round(value: u128, exponent: i32, sticky: bool) -> Magnitude {
    if value == 0 {
        return Magnitude::Zero;
    }
    let bits = 128 - i32::try_from(value.leading_zeros()).unwrap_or(0);
    let mut target = exponent + bits - PRECISION;
    if target < MIN_EXPONENT {
        target = MIN_EXPONENT;
    }
    let drop = target - exponent;
    if drop <= 0 {
        // Only exact values are this short.
        let Ok(mantissa) = u64::try_from(value << drop.unsigned_abs()) else {
            return Magnitude::Infinite;
        };
        return finite(mantissa, target);
    }
    if drop > 127 {
        return Magnitude::Zero;
    }
    let kept = value >> drop;
    let rest = value & ((1 << drop) - 1);
    let half = 1_u128 << (drop - 1);
    let up = rest > half || (rest == half && (sticky || kept & 1 == 1));
    let rounded = kept + u128::from(up);
    match u64::try_from(rounded) {
        Ok(mantissa) => finite(mantissa, target),
        // Rounding carried out of 64 bits: the value is the next power of two.
        Err(_) => finite(1 << 63, target + 1),
    }
}

fn finite(mantissa: u64, exponent: i32) -> Magnitude {
    if mantissa == 0 {
        Magnitude::Zero
    } else if exponent > MAX_EXPONENT {
        Magnitude::Infinite
    } else {
        Magnitude::Finite { mantissa, exponent }
    }
}

impl Extended {
    /// Nothing to add to.
    pub const ZERO: Self = Self { negative: false, magnitude: Magnitude::Zero };

    /// Reads a number as Redis does for INCRBYFLOAT: C's `strtold`, the whole text, no leading
    /// blank, no NaN, no result that overflows or vanishes. `inf` is a number.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.is_empty() || text.len() >= MAX_TEXT_BYTES {
            return None;
        }
        let (negative, unsigned) = match text {
            [b'-', rest @ ..] => (true, rest),
            [b'+', rest @ ..] => (false, rest),
            _ => (false, text),
        };
        let magnitude = if unsigned.eq_ignore_ascii_case(b"inf")
            || unsigned.eq_ignore_ascii_case(b"infinity")
        {
            Magnitude::Infinite
        } else if let [b'0', b'x' | b'X', digits @ ..] = unsigned {
            parse_hexadecimal(digits)?
        } else {
            parse_decimal(unsigned)?
        };
        Some(Self { negative, magnitude })
    }

    /// The rounded sum; `None` where it is not a finite number.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        let (mut a, mut b) = match (self.magnitude, other.magnitude) {
            (Magnitude::Infinite, _) | (_, Magnitude::Infinite) => return None,
            (Magnitude::Zero, _) => return Some(other),
            (_, Magnitude::Zero) => return Some(self),
            (
                Magnitude::Finite { mantissa: m, exponent: e },
                Magnitude::Finite { mantissa: n, exponent: f },
            ) => ((self.negative, m, e), (other.negative, n, f)),
        };
        // Order by exponent; with equal exponents by mantissa, so that `a` is the larger.
        if (b.2, b.1) > (a.2, a.1) {
            std::mem::swap(&mut a, &mut b);
        }
        let shift = (a.2 - b.2).unsigned_abs();
        let large = u128::from(a.1) << 63;
        let small = u128::from(b.1) << 63;
        let (aligned, sticky) =
            if shift > 127 { (0, true) } else { (small >> shift, small & ((1 << shift) - 1) != 0) };
        let exponent = a.2 - 63;
        // A subnormal operand has no top bit set, but then both exponents are near the minimum
        // and the shift is small: `large >= aligned` may fail only with equal exponents, which the
        // swap above excludes, or for an unnormalised `a`, which has the minimum exponent.
        let (value, sticky) = if a.0 == b.0 {
            (large + aligned, sticky)
        } else {
            (large - aligned - u128::from(sticky), sticky)
        };
        let magnitude = round(value, exponent, sticky);
        if magnitude == Magnitude::Infinite {
            return None;
        }
        let negative = a.0 && magnitude != Magnitude::Zero;
        Some(Self { negative, magnitude })
    }

    /// Appends the number as Redis shows it: `%.17Lf` without trailing zeros, never `-0`.
    pub fn write_to(self, out: &mut Vec<u8>) {
        let (mantissa, exponent) = match self.magnitude {
            Magnitude::Zero => return out.push(b'0'),
            Magnitude::Infinite => {
                out.extend_from_slice(if self.negative { b"-inf" } else { b"inf" });
                return;
            }
            Magnitude::Finite { mantissa, exponent } => (mantissa, exponent),
        };
        let start = out.len();
        if self.negative {
            out.push(b'-');
        }
        if exponent >= 0 {
            let mut whole = Natural::from_u128(u128::from(mantissa));
            whole.shift_left(exponent.unsigned_abs());
            whole.write_decimal(out);
            return;
        }
        let (whole, hundred_quadrillionths) = split_at_point(mantissa, exponent.unsigned_abs());
        let body = out.len();
        out.extend_from_slice(whole.to_string().as_bytes());
        if hundred_quadrillionths > 0 {
            let digits = format!("{hundred_quadrillionths:017}");
            out.push(b'.');
            out.extend_from_slice(digits.trim_end_matches('0').as_bytes());
        }
        if &out[body..] == b"0" {
            out.truncate(start);
            out.push(b'0');
        }
    }
}

/// Splits `mantissa / 2^shift` into the whole part and the fraction rounded to 17 decimals.
fn split_at_point(mantissa: u64, shift: u32) -> (u128, u128) {
    const SCALE: u128 = 100_000_000_000_000_000;
    if shift > 121 {
        // mantissa * 10^17 < 2^121 is below half of 2^shift.
        return (0, 0);
    }
    let mantissa = u128::from(mantissa);
    let whole = mantissa >> shift;
    let fraction = mantissa & ((1 << shift) - 1);
    let scaled = fraction * SCALE;
    let mut decimals = scaled >> shift;
    let rest = scaled & ((1 << shift) - 1);
    let half = (1_u128 << shift) >> 1;
    if rest > half || (rest == half && decimals & 1 == 1) {
        decimals += 1;
    }
    if decimals == SCALE { (whole + 1, 0) } else { (whole, decimals) }
}

/// Reads `[-+]digits` to the end of `text`, saturating far beyond any meaningful exponent.
fn parse_exponent(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let value = digits
        .iter()
        .fold(0_i64, |sum, digit| (sum * 10 + i64::from(digit - b'0')).min(1_000_000_000));
    Some(if negative { -value } else { value })
}

fn parse_decimal(text: &[u8]) -> Option<Magnitude> {
    let (number, exponent) = match text.iter().position(|&byte| byte == b'e' || byte == b'E') {
        Some(at) => (&text[..at], parse_exponent(&text[at + 1..])?),
        None => (text, 0),
    };
    let (whole, fraction) = match number.iter().position(|&byte| byte == b'.') {
        Some(at) => (&number[..at], &number[at + 1..]),
        None => (number, &number[..0]),
    };
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let mut digits = Natural::default();
    let mut significant = 0_i64;
    for &digit in whole.iter().chain(fraction) {
        if !digit.is_ascii_digit() {
            return None;
        }
        digits.multiply_add(10, u32::from(digit - b'0'));
        significant += i64::from(significant > 0 || digit != b'0');
    }
    if digits.is_zero() {
        return Some(Magnitude::Zero);
    }
    let exponent = exponent - i64::try_from(fraction.len()).unwrap_or(i64::MAX);
    // The value lies in [10^(magnitude-1), 10^magnitude).
    let magnitude = significant + exponent;
    if !(-4_990..=4_940).contains(&magnitude) {
        return None;
    }
    let mut divisor = Natural::from_u128(1);
    let scaled = if exponent >= 0 { &mut digits } else { &mut divisor };
    for _ in 0..exponent.unsigned_abs() {
        scaled.multiply_add(10, 0);
    }
    match divide(digits, divisor) {
        // Overflow and underflow to zero are range errors.
        Magnitude::Infinite | Magnitude::Zero => None,
        finite => Some(finite),
    }
}

fn parse_hexadecimal(text: &[u8]) -> Option<Magnitude> {
    let (number, exponent) = match text.iter().position(|&byte| byte == b'p' || byte == b'P') {
        Some(at) => (&text[..at], parse_exponent(&text[at + 1..])?),
        None => (text, 0),
    };
    let mut mantissa = 0_u128;
    let mut dropped_bits = 0_i64;
    let mut sticky = false;
    let mut fraction_bits = 0_i64;
    let mut in_fraction = false;
    let mut any = false;
    for &byte in number {
        if byte == b'.' && !in_fraction {
            in_fraction = true;
            continue;
        }
        let digit = char::from(byte).to_digit(16)?;
        any = true;
        fraction_bits += if in_fraction { 4 } else { 0 };
        if mantissa >> 120 == 0 {
            mantissa = mantissa << 4 | u128::from(digit);
        } else {
            dropped_bits += 4;
            sticky |= digit != 0;
        }
    }
    if !any {
        return None;
    }
    if mantissa == 0 {
        return Some(Magnitude::Zero);
    }
    let exponent = exponent - fraction_bits + dropped_bits;
    let exponent = i32::try_from(exponent.clamp(-1_000_000, 1_000_000)).unwrap_or(0);
    match round(mantissa, exponent, sticky) {
        Magnitude::Infinite | Magnitude::Zero => None,
        finite => Some(finite),
    }
}

/// The correctly rounded quotient of two positive integers.
fn divide(mut dividend: Natural, mut divisor: Natural) -> Magnitude {
    // Scale so that the quotient has 66 or 67 bits: 64 to keep, the rest to round by.
    let shift = 66 + divisor.bits() - dividend.bits();
    if shift >= 0 {
        dividend.shift_left(shift.unsigned_abs());
    } else {
        divisor.shift_left(shift.unsigned_abs());
    }
    const STEPS: u32 = 68;
    divisor.shift_left(STEPS);
    let mut quotient = 0_u128;
    for _ in 0..=STEPS {
        quotient <<= 1;
        if dividend.at_least(&divisor) {
            dividend.subtract(&divisor);
            quotient |= 1;
        }
        divisor.halve();
    }
    round(quotient, -shift, !dividend.is_zero())
}

/// A natural number of any size, least significant limb first, no leading zero limb.
#[derive(Clone, Debug, Default)]
struct Natural {
    limbs: Vec<u32>,
}

impl Natural {
    fn from_u128(mut value: u128) -> Self {
        let mut limbs = Vec::with_capacity(8);
        while value > 0 {
            limbs.push(value as u32);
            value >>= 32;
        }
        Self { limbs }
    }

    fn is_zero(&self) -> bool {
        self.limbs.is_empty()
    }

    fn trim(&mut self) {
        while self.limbs.last() == Some(&0) {
            self.limbs.pop();
        }
    }

    fn bits(&self) -> i32 {
        let top = self.limbs.last().map_or(0, |limb| 32 - limb.leading_zeros());
        let below = self.limbs.len().saturating_sub(1) * 32;
        i32::try_from(below).unwrap_or(i32::MAX) + i32::try_from(top).unwrap_or(0)
    }

    fn multiply_add(&mut self, factor: u32, addend: u32) {
        let mut carry = u64::from(addend);
        for limb in &mut self.limbs {
            let product = u64::from(*limb) * u64::from(factor) + carry;
            *limb = product as u32;
            carry = product >> 32;
        }
        if carry > 0 {
            self.limbs.push(carry as u32);
        }
    }

    fn shift_left(&mut self, bits: u32) {
        if self.is_zero() {
            return;
        }
        let small = bits % 32;
        if small > 0 {
            let mut carry = 0;
            for limb in &mut self.limbs {
                let shifted = u64::from(*limb) << small | carry;
                *limb = shifted as u32;
                carry = shifted >> 32;
            }
            if carry > 0 {
                self.limbs.push(carry as u32);
            }
        }
        let whole = usize::try_from(bits / 32).unwrap_or(0);
        self.limbs.splice(0..0, std::iter::repeat_n(0, whole));
    }

    fn halve(&mut self) {
        let mut carry = 0;
        for limb in self.limbs.iter_mut().rev() {
            let low = *limb & 1;
            *limb = *limb >> 1 | carry << 31;
            carry = low;
        }
        self.trim();
    }

    fn at_least(&self, other: &Self) -> bool {
        let by_length = self.limbs.len().cmp(&other.limbs.len());
        by_length.then_with(|| self.limbs.iter().rev().cmp(other.limbs.iter().rev())).is_ge()
    }

    /// Needs `self >= other`.
    fn subtract(&mut self, other: &Self) {
        let mut borrow = 0_i64;
        for (at, limb) in self.limbs.iter_mut().enumerate() {
            let taken = other.limbs.get(at).copied().unwrap_or(0);
            let difference = i64::from(*limb) - i64::from(taken) - borrow;
            borrow = i64::from(difference < 0);
            *limb = difference as u32;
        }
        self.trim();
    }

    /// Divides by `divisor` and returns the remainder.
    fn divide_small(&mut self, divisor: u32) -> u32 {
        let mut remainder = 0_u64;
        for limb in self.limbs.iter_mut().rev() {
            let value = remainder << 32 | u64::from(*limb);
            *limb = (value / u64::from(divisor)) as u32;
            remainder = value % u64::from(divisor);
        }
        self.trim();
        remainder as u32
    }

    fn write_decimal(mut self, out: &mut Vec<u8>) {
        let mut groups = Vec::new();
        while !self.is_zero() {
            groups.push(self.divide_small(1_000_000_000));
        }
        let Some(first) = groups.pop() else { return out.push(b'0') };
        out.extend_from_slice(first.to_string().as_bytes());
        while let Some(group) = groups.pop() {
            out.extend_from_slice(format!("{group:09}").as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(a: &str, b: &str) -> Option<String> {
        let total = Extended::parse(a.as_bytes())?.checked_add(Extended::parse(b.as_bytes())?)?;
        let mut out = Vec::new();
        total.write_to(&mut out);
        Some(String::from_utf8(out).unwrap())
    }

    #[test]
    fn sums_show_the_digits_of_an_extended_precision_addition() {
        // Each expectation was read from redis-server 7.0 on x86-64.
        for (a, b, expected) in [
            ("0.1", "0.2", "0.3"),
            ("10.50", "0.1", "10.6"),
            ("5.0e3", "2.0e2", "5200"),
            ("3", "1.5", "4.5"),
            ("1e18", "0.5", "1000000000000000000.5"),
            ("1e19", "0.5", "10000000000000000000"),
            ("1e20", "0.5", "100000000000000000000"),
            ("-1.5", "1.5", "0"),
            ("0", "-0", "0"),
            ("1e-18", "0", "0"),
            ("1e-17", "0", "0.00000000000000001"),
            ("0x10", "0", "16"),
            ("1", "1e-17", "1.00000000000000001"),
        ] {
            assert_eq!(sum(a, b).as_deref(), Some(expected), "{a} + {b}");
        }
    }

    #[test]
    fn what_is_not_a_finite_number_is_refused() {
        for text in
            ["", " 1", "1 ", "abc", "1e", "1e+", "nan", "0x", "--1", ".", "1e5000", "1e-5000"]
        {
            assert_eq!(Extended::parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(sum("inf", "1"), None);
        assert_eq!(sum("1e4932", "1e4932"), None);
        assert!(Extended::parse(b"1e4932").is_some());
        assert!(Extended::parse(b"1e-4950").is_some(), "subnormal");
        assert!(Extended::parse(&vec![b'1'; 5_200]).is_none());
    }

    #[test]
    fn whole_numbers_of_any_size_print_exactly() {
        assert_eq!(
            sum("1e30", "0").as_deref(),
            Some("1000000000000000000024696061952"),
            "the nearest 64-bit mantissa to 10^30"
        );
        assert_eq!(sum("18446744073709551615", "1").as_deref(), Some("18446744073709551616"));
        assert_eq!(sum("18446744073709551616", "1").as_deref(), Some("18446744073709551616"));
    }
}
