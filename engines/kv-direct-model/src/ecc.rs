//! Six bits of metadata in the check bits of a line of 64 bytes, which stays protected.
//!
//! Memory with ECC has eight check bits to a word of 64 bits: seven correct one error, the eighth, a parity
//! bit, tells two from one. Here one parity bit covers four words with their 28 check bits, so a line of eight
//! words needs two and has six to spare: five for the cache, one that is their parity.
//!
//! Source: spec/kv-direct.md 5.6.

/// A line as memory holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Data.
    pub words: [u64; 8],
    /// Seven check bits of each word.
    pub check: [u8; 8],
    /// Parity of each four words and their check bits.
    pub parity: [bool; 2],
    /// Five bits, and their parity above them.
    pub metadata: u8,
}

/// What a line's bits say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// The data, and the metadata where its own parity is right.
    Good([u64; 8], Option<u8>),
    /// More errors than can be corrected.
    Uncorrectable,
}

/// The code of data bit `bit`: what it adds to the check bits. All distinct, none a power of two: those are
/// the codes of the check bits themselves.
const CODES: [u8; 64] = {
    let mut codes = [0; 64];
    let (mut code, mut at) = (3_u8, 0);
    while at < 64 {
        if !code.is_power_of_two() {
            codes[at] = code;
            at += 1;
        }
        code += 1;
    }
    codes
};

fn check_of(word: u64) -> u8 {
    (0..64).filter(|bit| word >> bit & 1 == 1).fold(0, |check, bit| check ^ CODES[bit])
}

fn parity_of(words: &[u64], check: &[u8]) -> bool {
    let ones: u32 = words.iter().map(|word| word.count_ones()).sum::<u32>()
        + check.iter().map(|check| check.count_ones()).sum::<u32>();
    ones % 2 == 1
}

impl Line {
    /// Data with five bits of metadata.
    #[must_use]
    pub fn encode(words: [u64; 8], metadata: u8) -> Self {
        let metadata = metadata & 0x1f;
        let check = words.map(check_of);
        let parity = [parity_of(&words[..4], &check[..4]), parity_of(&words[4..], &check[4..])];
        let odd = metadata.count_ones() % 2 == 1;
        Self { words, check, parity, metadata: metadata | u8::from(odd) << 5 }
    }

    /// Corrects what can be corrected.
    #[must_use]
    pub fn decode(&self) -> Decoded {
        let mut words = self.words;
        for group in 0..2 {
            let range = group * 4..group * 4 + 4;
            let (data, check) = (&self.words[range.clone()], &self.check[range.clone()]);
            let mismatch = parity_of(data, check) != self.parity[group];
            let syndromes: Vec<u8> =
                data.iter().zip(check).map(|(word, check)| check_of(*word) ^ check).collect();
            let wrong = syndromes.iter().filter(|syndrome| **syndrome != 0).count();
            if wrong == 0 {
                // A parity that does not match is then the parity bit itself.
                continue;
            }
            if (wrong % 2 == 1) != mismatch {
                return Decoded::Uncorrectable;
            }
            for (word, syndrome) in words[range].iter_mut().zip(syndromes) {
                if syndrome == 0 || syndrome.is_power_of_two() {
                    // Right, or a check bit is wrong.
                    continue;
                }
                match CODES.iter().position(|code| *code == syndrome) {
                    Some(bit) => *word ^= 1 << bit,
                    None => return Decoded::Uncorrectable,
                }
            }
        }
        let kept = self.metadata & 0x1f;
        let odd = kept.count_ones() % 2 == 1;
        Decoded::Good(words, (odd == (self.metadata >> 5 & 1 == 1)).then_some(kept))
    }

    /// Bits of a line: data, check, parity, metadata.
    pub const BITS: usize = 512 + 56 + 2 + 6;

    /// Flips one of [`Line::BITS`].
    pub fn flip(&mut self, bit: usize) {
        match bit {
            0..512 => self.words[bit / 64] ^= 1 << (bit % 64),
            512..568 => self.check[(bit - 512) / 7] ^= 1 << ((bit - 512) % 7),
            568..570 => self.parity[bit - 568] ^= true,
            _ => self.metadata ^= 1 << (bit - 570),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> [u64; 8] {
        std::array::from_fn(|word| {
            0x0123_4567_89ab_cdef_u64.rotate_left(word as u32 * 7) ^ word as u64
        })
    }

    #[test]
    fn metadata_comes_back_and_a_single_flip_of_it_is_reported() {
        for metadata in 0..32 {
            let line = Line::encode(sample(), metadata);
            assert_eq!(line.decode(), Decoded::Good(sample(), Some(metadata)));
            for bit in 570..Line::BITS {
                let mut flipped = line;
                flipped.flip(bit);
                assert_eq!(flipped.decode(), Decoded::Good(sample(), None));
            }
        }
    }

    #[test]
    fn every_single_flip_of_data_check_and_parity_is_corrected() {
        let line = Line::encode(sample(), 21);
        for bit in 0..570 {
            let mut flipped = line;
            flipped.flip(bit);
            assert_eq!(flipped.decode(), Decoded::Good(sample(), Some(21)), "bit {bit}");
        }
    }

    #[test]
    fn every_double_flip_is_corrected_or_reported_and_never_silent() {
        let line = Line::encode(sample(), 21);
        let (mut corrected, mut reported) = (0_u32, 0_u32);
        for first in 0..570 {
            for second in first + 1..570 {
                let mut flipped = line;
                flipped.flip(first);
                flipped.flip(second);
                match flipped.decode() {
                    Decoded::Uncorrectable => reported += 1,
                    Decoded::Good(words, metadata) => {
                        assert_eq!((words, metadata), (sample(), Some(21)), "{first} {second}");
                        corrected += 1;
                    }
                }
            }
        }
        assert!(corrected > 100_000 && reported > 10_000, "{corrected} {reported}");
    }
}
