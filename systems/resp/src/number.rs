//! Integers as Redis reads and writes them, and doubles as it writes them.
//!
//! Redis accepts exactly one spelling of each integer: no plus sign, no leading zero, no blank.
//! The same rule decides whether a stored string "is an integer" for INCR, whether a length in a
//! request is valid, and whether an option is a number.

/// Reads the one canonical spelling of a 64-bit signed integer; anything else is `None`.
#[inline]
#[must_use]
pub fn parse_i64(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, text),
    };
    match digits {
        [] => return None,
        [b'0'] => return if negative { None } else { Some(0) },
        [b'1'..=b'9', ..] if digits.len() <= 19 => {}
        _ => return None,
    }
    // 19 digits are below 10^19 < 2^64: the sum cannot wrap.
    let mut magnitude = 0_u64;
    for &digit in digits {
        let value = digit.wrapping_sub(b'0');
        if value > 9 {
            return None;
        }
        magnitude = magnitude * 10 + u64::from(value);
    }
    if negative { 0_i64.checked_sub_unsigned(magnitude) } else { i64::try_from(magnitude).ok() }
}

/// Reads a decimal `u64` such as a SCAN cursor: digits only, leading zeros allowed.
///
/// SCAN cursors go through C's `strtoul` in Redis, which is laxer than [`parse_i64`]; a sign is
/// refused here, as a cursor we gave out never has one.
#[must_use]
pub fn parse_u64_lax(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    let mut value = 0_u64;
    for &digit in text {
        if !digit.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
    }
    Some(value)
}

/// Two decimal digits for each number below one hundred.
const PAIRS: [[u8; 2]; 100] = {
    let mut pairs = [[0; 2]; 100];
    let mut value = 0;
    while value < 100 {
        pairs[value] = [b'0' + (value / 10) as u8, b'0' + (value % 10) as u8];
        value += 1;
    }
    pairs
};

/// Room for any 64-bit integer in decimal: twenty digits, or nineteen and a sign.
#[derive(Clone, Copy, Debug)]
pub struct Decimal {
    digits: [u8; 20],
    start: u8,
}

impl Decimal {
    /// The decimal spelling of an unsigned number.
    #[inline]
    #[must_use]
    pub fn unsigned(mut value: u64) -> Self {
        let mut digits = [0; 20];
        let mut start = digits.len();
        while value >= 100 {
            let pair = PAIRS[(value % 100) as usize];
            value /= 100;
            start -= 2;
            digits[start] = pair[0];
            digits[start + 1] = pair[1];
        }
        if value >= 10 {
            let pair = PAIRS[value as usize];
            start -= 2;
            digits[start] = pair[0];
            digits[start + 1] = pair[1];
        } else {
            start -= 1;
            digits[start] = b'0' + value as u8;
        }
        Self { digits, start: start as u8 }
    }

    /// The decimal spelling of a signed number.
    #[inline]
    #[must_use]
    pub fn signed(value: i64) -> Self {
        let mut text = Self::unsigned(value.unsigned_abs());
        if value < 0 {
            text.start -= 1;
            text.digits[usize::from(text.start)] = b'-';
        }
        text
    }

    /// The digits.
    #[inline]
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.digits[usize::from(self.start)..]
    }
}

/// A double as C's `%.17g` writes it, the form Redis 7.0 uses in replies.
#[must_use]
pub fn format_double(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:.16e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..17).contains(&exponent) {
        let mantissa = trim_fraction(mantissa);
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs());
    }
    let decimals = usize::try_from(16 - exponent).unwrap_or(0);
    trim_fraction(&format!("{value:.decimals$}")).to_owned()
}

fn trim_fraction(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_canonical_spelling_is_an_integer() {
        for (text, value) in [
            ("0", 0),
            ("7", 7),
            ("-1", -1),
            ("9223372036854775807", i64::MAX),
            ("-9223372036854775808", i64::MIN),
        ] {
            assert_eq!(parse_i64(text.as_bytes()), Some(value), "{text}");
        }
        for text in [
            "",
            "-",
            "-0",
            "00",
            "01",
            "+1",
            " 1",
            "1 ",
            "1.0",
            "0x1",
            "9223372036854775808",
            "-9223372036854775809",
            "99999999999999999999",
            "18446744073709551616",
            "1a",
        ] {
            assert_eq!(parse_i64(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn decimals_match_the_standard_library() {
        let mut value = 1_i64;
        for step in 0..64 {
            for number in [value, -value, value - 1, i64::MIN + step, i64::MAX - step] {
                let text = Decimal::signed(number);
                assert_eq!(text.as_bytes(), number.to_string().as_bytes());
                assert_eq!(parse_i64(text.as_bytes()), Some(number));
            }
            value = value.wrapping_mul(3);
        }
        assert_eq!(Decimal::unsigned(u64::MAX).as_bytes(), b"18446744073709551615");
    }

    #[test]
    fn doubles_are_written_as_seventeen_significant_digits() {
        for (value, text) in [
            (0.0, "0"),
            (3.0, "3"),
            (0.1, "0.10000000000000001"),
            (-2.5, "-2.5"),
            (1e17, "1e+17"),
            (12_345_678_901_234_567.0, "12345678901234568"),
            (1e-5, "1.0000000000000001e-05"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(format_double(value), text);
        }
    }
}
