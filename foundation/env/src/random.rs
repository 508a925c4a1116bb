//! Seeded chance.
//!
//! xoshiro256++ (Blackman and Vigna, 2019), its state filled from the seed by SplitMix64. The
//! sequence of a seed is part of the contract: a printed seed replays on every machine and with
//! every later version, so the algorithm stays. Not for keys or secrets.

/// A small, fast generator: 32 bytes of state, a few instructions per draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Randomness {
    state: [u64; 4],
}

/// One SplitMix64 step: also a good mixer of two seeds.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Randomness {
    /// The generator of `seed`; every seed is fine, 0 included.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut mixer = seed;
        Self { state: std::array::from_fn(|_| split_mix(&mut mixer)) }
    }

    /// An independent generator for a part of the run, so that one part drawing more does not
    /// change what another draws.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Uniform in `0..bound` (bias below 2^-64 per unit of `bound`).
    ///
    /// Invariant: `bound` is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "a range to draw from has at least one value");
        let wide = u128::from(self.next_u64()) * u128::from(bound);
        u64::try_from(wide >> 64).unwrap_or(u64::MAX)
    }

    /// Uniform in `low..=high`.
    ///
    /// Invariant: `low <= high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        assert!(low <= high, "a range's low end is not above its high end");
        match (high - low).checked_add(1) {
            Some(span) => low + self.below(span),
            None => self.next_u64(),
        }
    }

    /// True with probability `numerator / denominator`.
    ///
    /// Invariant: `denominator` is at least 1.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// One of `values`, or `None` when there is none.
    pub fn pick<'a, T>(&mut self, values: &'a [T]) -> Option<&'a T> {
        if values.is_empty() {
            return None;
        }
        let index = usize::try_from(self.below(values.len() as u64)).unwrap_or(0);
        values.get(index)
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_sequence_of_a_seed_is_fixed_for_good() {
        let mut random = Randomness::new(0);
        let drawn = [random.next_u64(), random.next_u64(), random.next_u64()];
        assert_eq!(drawn, [0x53175d61490b23df, 0x61da6f3dc380d507, 0x5c0fdf91ec9a7bfc]);
    }

    #[test]
    fn draws_fill_their_range_and_nothing_else() {
        let mut random = Randomness::new(7);
        let mut seen = [0_u32; 10];
        for _ in 0..10_000 {
            seen[usize::try_from(random.below(10)).unwrap()] += 1;
        }
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
        assert_eq!(random.between(5, 5), 5);
        let _any = random.between(0, u64::MAX);
        assert!(random.pick::<u8>(&[]).is_none());
        assert!(!random.chance(0, 3));
        assert!(random.chance(3, 3));
    }

    #[test]
    fn forks_differ_from_their_parent_and_from_each_other() {
        let mut parent = Randomness::new(1);
        let (mut first, mut second) = (parent.fork(), parent.fork());
        let drawn = [parent.next_u64(), first.next_u64(), second.next_u64()];
        assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2] && drawn[0] != drawn[2]);
    }

    proptest! {
        #[test]
        fn equal_seeds_draw_equal_bytes(seed: u64, length in 0_usize..100) {
            let (mut left, mut right) = (vec![0; length], vec![0; length]);
            Randomness::new(seed).fill(&mut left);
            Randomness::new(seed).fill(&mut right);
            prop_assert_eq!(left, right);
        }

        #[test]
        fn between_stays_between(seed: u64, a: u64, b: u64) {
            let (low, high) = (a.min(b), a.max(b));
            let drawn = Randomness::new(seed).between(low, high);
            prop_assert!((low..=high).contains(&drawn));
        }
    }
}
