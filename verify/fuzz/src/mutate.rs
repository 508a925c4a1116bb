//! Inputs made from good ones: bits flipped, numbers made extreme, parts cut, doubled, moved and
//! crossed. One seed, one sequence.

/// Numbers where decoders tend to go wrong.
const EXTREMES: [u64; 12] = [
    0,
    1,
    0x7F,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    0x7FFF_FFFF_FFFF_FFFF,
    0x8000_0000_0000_0000,
    u64::MAX,
];
/// The same for decoders of text.
const WORDS: [&[u8]; 10] = [
    b"-1",
    b"0",
    b"2147483648",
    b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551616",
    b"\r\n",
    b"\0",
    b"*",
    b"\\",
];
/// Longest input made.
pub const LONGEST_BYTES: usize = 64 << 10;

/// Makes inputs from seeds.
#[derive(Clone, Debug)]
pub struct Mutator {
    state: u64,
    seeds: Vec<Vec<u8>>,
}

impl Mutator {
    /// Inputs made from `seeds`; the same `seed` gives the same sequence.
    ///
    /// # Panics
    ///
    /// Without seeds.
    #[must_use]
    pub fn new(seed: u64, seeds: Vec<Vec<u8>>) -> Self {
        assert!(!seeds.is_empty(), "a mutation needs something to begin from");
        Self { state: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1, seeds }
    }

    fn random(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.random() >> 33) as usize % bound.max(1)
    }

    fn seed(&mut self) -> Vec<u8> {
        let index = self.below(self.seeds.len());
        self.seeds[index].clone()
    }

    /// The next input.
    pub fn next_input(&mut self) -> Vec<u8> {
        let mut bytes = self.seed();
        // Mostly few changes: many make noise that the first check refuses.
        let changes = 1 + (self.random() >> 40).trailing_zeros() as usize * 2;
        for _ in 0..changes {
            self.change(&mut bytes);
        }
        bytes.truncate(LONGEST_BYTES);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            *bytes = self.seed();
            return;
        }
        let at = self.below(bytes.len());
        let rest = bytes.len() - at;
        match self.below(11) {
            0 | 1 => bytes[at] ^= 1 << self.below(8),
            2 => bytes[at] = self.random() as u8,
            3 | 4 => {
                let width = [1, 2, 4, 8][self.below(4)].min(rest);
                let number = EXTREMES[self.below(EXTREMES.len())];
                bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
            5 => {
                // A number near the one that stands there.
                let width = [1, 2, 4, 8][self.below(4)].min(rest);
                let mut number = [0; 8];
                number[..width].copy_from_slice(&bytes[at..at + width]);
                let step = self.below(33) as u64;
                let number = u64::from_le_bytes(number).wrapping_add(step).wrapping_sub(16);
                bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
            6 => bytes.truncate(at),
            7 => {
                let length = self.below(rest.min(64)) + 1;
                bytes.drain(at..at + length);
            }
            8 => {
                let length = self.below(rest.min(256)) + 1;
                let part = bytes[at..at + length].to_vec();
                let to = self.below(bytes.len() + 1);
                bytes.splice(to..to, part);
            }
            9 => {
                let word = WORDS[self.below(WORDS.len())];
                let over = self.below(4).min(rest);
                bytes.splice(at..at + over, word.iter().copied());
            }
            _ => {
                let other = self.seed();
                let from = self.below(other.len().max(1)).min(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
}
