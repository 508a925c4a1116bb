//! CRC-32C, the checksum of every format of ours: computed by the processor where it can.
//!
//! The pieces of a log entry are mostly short, and there the crate's set-up (alignment first, byte
//! by byte) costs more than the sum itself. So short pieces go through the processor's instruction
//! directly, eight bytes at a time wherever they start; long ones go to the crate, which runs three
//! sums side by side.

/// Length from which the crate's three-way loop wins.
const LONG_BYTES: usize = 512;

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
    if bytes.len() < LONG_BYTES && std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the instruction was just found to be there.
        return unsafe { short(crc, bytes) };
    }
    ::crc32c::crc32c_append(crc, bytes)
}

/// The sum over few bytes, in one dependent chain.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn short(crc: u32, bytes: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64};
    let mut sum = u64::from(!crc);
    let (words, mut rest) = bytes.as_chunks::<8>();
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
    !sum
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
            bytes in proptest::collection::vec(any::<u8>(), 0..1200),
            start in 0_usize..16,
            crc: u32,
        ) {
            let bytes = &bytes[start.min(bytes.len())..];
            prop_assert_eq!(crc32c_append(crc, bytes), ::crc32c::crc32c_append(crc, bytes));
        }
    }
}
