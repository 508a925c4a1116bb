//! CRC-32C, the checksum of every format of ours: computed by the processor where it can.
//!
//! The instruction takes eight bytes every cycle but answers only after three, so one chain uses a
//! third of it. From [`SPLIT_BYTES`] on, the bytes are split into three equal parts, summed side
//! by side and joined: the sum of a part followed by `n` bytes is its own times x^(8n) modulo the
//! polynomial, which is one carry-less multiplication by a constant of a table.
//!
//! The `crc32c` crate does the same for fixed part lengths of 256 and 8,192 bytes, after going byte
//! by byte to an aligned address; the pieces of log entries are shorter than that and start
//! anywhere, so there its set-up costs more than the sum. It remains for other processors.

/// Length from which splitting pays.
const SPLIT_BYTES: usize = 192;
/// Longest part in words of eight bytes.
const PART_WORDS: usize = 168;

/// CRC-32C (Castagnoli) of `bytes`.
#[must_use]
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c_append(0, bytes)
}

/// Continues `crc`, the CRC-32C of some prefix, over `bytes`.
#[must_use]
#[inline]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
    {
        // SAFETY: the instructions were just found to be there.
        return unsafe { hardware::append(crc, bytes) };
    }
    ::crc32c::crc32c_append(crc, bytes)
}

/// CRC-32C of `first`, `second` and all of `rest` in a row: in one go, since short pieces cost less than
/// finding out what the processor can do.
#[must_use]
#[inline]
pub fn crc32c_joined<const N: usize>(first: &[u8; N], second: &[u8], rest: &[&[u8]]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
    {
        // SAFETY: the instructions were just found to be there.
        return unsafe { hardware::joined(first, second, rest) };
    }
    let crc = ::crc32c::crc32c_append(::crc32c::crc32c(first), second);
    rest.iter().fold(crc, |crc, piece| ::crc32c::crc32c_append(crc, piece))
}

#[cfg(target_arch = "x86_64")]
mod hardware {
    use std::arch::x86_64::{
        _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64, _mm_cvtsi64_si128,
        _mm_cvtsi128_si64,
    };

    use super::{PART_WORDS, SPLIT_BYTES};

    /// The polynomial, bits reversed.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    /// x^(64 n - 33) modulo the polynomial, bits reversed, for n words that follow. The 33: reducing
    /// a product with the instruction multiplies by x^32, and the product of two reversed words is
    /// one bit off.
    const SHIFTS: [u32; 2 * PART_WORDS + 1] = {
        let mut shifts = [0; 2 * PART_WORDS + 1];
        // x^0 reversed; x^31 comes first.
        let mut power = 0x8000_0000_u32;
        let mut exponent = 0;
        let mut words = 1;
        while words < shifts.len() {
            while exponent < 64 * words - 33 {
                power = (power >> 1) ^ if power & 1 == 1 { POLYNOMIAL } else { 0 };
                exponent += 1;
            }
            shifts[words] = power;
            words += 1;
        }
        shifts
    };

    #[target_feature(enable = "sse4.2,pclmulqdq")]
    pub(super) fn append(crc: u32, bytes: &[u8]) -> u32 {
        !summed(!crc, bytes)
    }

    #[target_feature(enable = "sse4.2,pclmulqdq")]
    pub(super) fn joined<const N: usize>(first: &[u8; N], second: &[u8], rest: &[&[u8]]) -> u32 {
        let mut sum = summed(summed(!0, first), second);
        for piece in rest {
            sum = summed(sum, piece);
        }
        !sum
    }

    /// Goes on with a sum that is not yet inverted.
    #[inline]
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    fn summed(sum: u32, bytes: &[u8]) -> u32 {
        let mut sum = u64::from(sum);
        let (mut words, mut rest) = bytes.as_chunks::<8>();
        if bytes.len() >= SPLIT_BYTES {
            (sum, words) = split(sum, words);
        }
        for word in words {
            sum = _mm_crc32_u64(sum, u64::from_le_bytes(*word));
        }
        let mut sum = sum as u32;
        if let Some((word, tail)) = rest.split_first_chunk::<4>() {
            sum = _mm_crc32_u32(sum, u32::from_le_bytes(*word));
            rest = tail;
        }
        for byte in rest {
            sum = _mm_crc32_u8(sum, *byte);
        }
        sum
    }

    /// Goes on with a sum over whole parts of `words`; those that are left make no three of them.
    #[inline(never)]
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    fn split(mut sum: u64, mut words: &[[u8; 8]]) -> (u64, &[[u8; 8]]) {
        while words.len() * 8 >= SPLIT_BYTES {
            let part = (words.len() / 3).min(PART_WORDS);
            let (first, others) = words.split_at(part);
            let (second, others) = others.split_at(part);
            let (third, others) = others.split_at(part);
            let (mut b, mut c) = (0, 0);
            for ((x, y), z) in first.iter().zip(second).zip(third) {
                sum = _mm_crc32_u64(sum, u64::from_le_bytes(*x));
                b = _mm_crc32_u64(b, u64::from_le_bytes(*y));
                c = _mm_crc32_u64(c, u64::from_le_bytes(*z));
            }
            sum = shift(sum, 2 * part) ^ shift(b, part) ^ c;
            words = others;
        }
        (sum, words)
    }

    /// `sum` as it is after `words` words of zeros.
    #[inline]
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    fn shift(sum: u64, words: usize) -> u64 {
        let factor = i64::from(SHIFTS[words]);
        let product =
            _mm_clmulepi64_si128::<0>(_mm_cvtsi64_si128(sum as i64), _mm_cvtsi64_si128(factor));
        _mm_crc32_u64(0, _mm_cvtsi128_si64(product) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_published_check_value_comes_out() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn appending_equals_one_pass() {
        assert_eq!(crc32c_append(crc32c(b"1234"), b"56789"), crc32c(b"123456789"));
    }

    proptest! {
        #[test]
        fn every_length_and_start_agrees_with_the_crate(
            length in 0_usize..9000,
            seed: u64,
            start in 0_usize..16,
            crc: u32,
        ) {
            // Made here, not by the property: a generator of vectors is slow where Miri runs it.
            let mut state = seed | 1;
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            let bytes = &bytes[start.min(bytes.len())..];
            prop_assert_eq!(crc32c_append(crc, bytes), ::crc32c::crc32c_append(crc, bytes));
            if let Some((first, others)) = bytes.split_first_chunk::<28>() {
                let (second, third) = others.split_at(others.len() / 3);
                let (third, fourth) = third.split_at(third.len() / 2);
                let expected = ::crc32c::crc32c(bytes);
                prop_assert_eq!(crc32c_joined(first, second, &[third, fourth]), expected);
            }
        }
    }
}
