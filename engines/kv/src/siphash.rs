//! SipHash-1-3: the keyed hash behind seals and behind places in the index.
//!
//! Whoever does not know the key can neither make a hash nor find two inputs that share one; one
//! round a word is what hash tables take it with, and three at the end.
//!
//! Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF" (2012).

/// A hash in the making.
#[derive(Clone, Copy)]
pub(crate) struct SipHash {
    state: [u64; 4],
}

impl SipHash {
    #[inline]
    pub fn new(key: [u64; 2]) -> Self {
        Self {
            state: [
                key[0] ^ 0x736f_6d65_7073_6575,
                key[1] ^ 0x646f_7261_6e64_6f6d,
                key[0] ^ 0x6c79_6765_6e65_7261,
                key[1] ^ 0x7465_6462_7974_6573,
            ],
        }
    }

    /// Takes in eight bytes.
    #[inline]
    pub fn word(&mut self, word: u64) {
        self.state[3] ^= word;
        self.round();
        self.state[0] ^= word;
    }

    /// The hash, after the last word: the length in the top byte, below it the bytes that made no
    /// whole word.
    #[inline]
    pub fn finish(mut self) -> u64 {
        self.state[2] ^= 0xff;
        for _ in 0..3 {
            self.round();
        }
        self.state[0] ^ self.state[1] ^ self.state[2] ^ self.state[3]
    }

    /// The hash of `bytes`.
    #[inline]
    pub fn of(key: [u64; 2], bytes: &[u8]) -> u64 {
        Self::new(key).last(bytes, bytes.len())
    }

    /// The hash of the eight bytes of `first`, the lowest one in front, and `bytes` behind them.
    #[inline]
    pub fn of_both(key: [u64; 2], first: u64, bytes: &[u8]) -> u64 {
        let mut hash = Self::new(key);
        hash.word(first);
        hash.last(bytes, 8 + bytes.len())
    }

    /// Takes in the last bytes of an input of `length` bytes; the hash.
    #[inline]
    fn last(mut self, bytes: &[u8], length: usize) -> u64 {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        self.word((length as u64) << 56 | tail(bytes, rest));
        self.finish()
    }

    #[inline]
    fn round(&mut self) {
        let v = &mut self.state;
        v[0] = v[0].wrapping_add(v[1]);
        v[2] = v[2].wrapping_add(v[3]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].rotate_left(32).wrapping_add(v[3]);
        v[2] = v[2].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].rotate_left(32);
    }
}

/// The bytes of `rest`, the end of `bytes`, without a loop: keys have all lengths.
#[inline]
fn tail(bytes: &[u8], rest: &[u8]) -> u64 {
    if let Some(last) = bytes.last_chunk::<8>() {
        // Shifted by 64 where nothing is left: nothing remains.
        return u64::from_le_bytes(*last).checked_shr(64 - 8 * rest.len() as u32).unwrap_or(0);
    }
    if let (Some(first), Some(last)) = (bytes.first_chunk::<4>(), bytes.last_chunk::<4>()) {
        let shift = 8 * (bytes.len() as u32 - 4);
        return u64::from(u32::from_le_bytes(*first))
            | u64::from(u32::from_le_bytes(*last)) << shift;
    }
    match *bytes {
        [a, b, c] => u64::from(a) | u64::from(b) << 8 | u64::from(c) << 16,
        [a, b] => u64::from(a) | u64::from(b) << 8,
        [a] => u64::from(a),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_hash_is_siphash_1_3_of_any_length(secret: [u8; 16], bytes in prop::collection::vec(any::<u8>(), 0..70)) {
            let (halves, _) = secret.as_chunks::<8>();
            let key = [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])];
            let reference = siphasher::sip::SipHasher13::new_with_key(&secret).hash(&bytes);
            prop_assert_eq!(SipHash::of(key, &bytes), reference);
            let Some((first, rest)) = bytes.split_first_chunk::<8>() else { return Ok(()) };
            prop_assert_eq!(SipHash::of_both(key, u64::from_le_bytes(*first), rest), reference);
        }
    }
}
