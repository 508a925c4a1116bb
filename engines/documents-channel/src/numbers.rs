//! Maps by numbers that this crate gives out, or bounds: without the cost of a hash that resists choice.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// By request index or channel.
pub type ByNumber<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Spreads a number over all bits.
#[derive(Clone, Copy, Debug, Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        // The golden ratio's bits; the table looks at both ends of the result.
        let mixed = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_a_row_and_apart_find_their_values() {
        let mut map: ByNumber<u32, u32> = ByNumber::default();
        let numbers =
            (0..1000).chain((0..1000).map(|n| n << 22)).collect::<std::collections::BTreeSet<_>>();
        map.extend(numbers.iter().map(|n| (*n, !n)));
        assert!(map.len() == numbers.len() && numbers.iter().all(|n| map[n] == !n));
    }
}
