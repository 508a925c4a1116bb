//! The card's memory as a write-back, direct-mapped cache of the host's, without valid bits.
//!
//! A line's four tag bits and its dirty bit lie in the metadata of [`crate::ecc::Line`]. Nothing but the card
//! touches the store's memory, so a line that is cached stays true; at the start every line of the cache
//! holds a true copy, tag 0, of memory that is zero.
//!
//! Source: spec/kv-direct.md 5.6.

use crate::dispatch::is_cacheable;
use crate::ecc::{Decoded, Line};

/// Accesses of one line each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads over PCIe.
    pub host_reads: u64,
    /// Writes over PCIe.
    pub host_writes: u64,
    /// Reads of the card's memory.
    pub card_reads: u64,
    /// Writes of it.
    pub card_writes: u64,
    /// Accesses to lines that may be cached.
    pub cacheable: u64,
    /// Those of them that were.
    pub hits: u64,
    /// All accesses.
    pub accesses: u64,
}

/// Host memory behind the cache.
#[derive(Debug)]
pub struct CachedMemory {
    host: Vec<[u64; 8]>,
    card: Vec<Line>,
    ratio: f64,
    counts: Counts,
}

const DIRTY: u8 = 0x10;

impl CachedMemory {
    /// `lines` zeroed lines and a cache of a sixteenth of them, with a share `ratio` that may be cached.
    #[must_use]
    pub fn new(lines: usize, ratio: f64) -> Self {
        let card = vec![Line::encode([0; 8], 0); lines.div_ceil(16).max(1)];
        Self { host: vec![[0; 8]; lines], card, ratio, counts: Counts::default() }
    }

    /// Accesses so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Reads a line; `None` where the card's memory is damaged beyond repair.
    pub fn read(&mut self, line: usize) -> Option<[u64; 8]> {
        self.counts.accesses += 1;
        if !is_cacheable(line as u64, self.ratio) {
            self.counts.host_reads += 1;
            return Some(self.host[line]);
        }
        let (words, _) = self.bring(line, true)?;
        Some(words)
    }

    /// Writes a whole line; `None` as with [`CachedMemory::read`].
    pub fn write(&mut self, line: usize, words: [u64; 8]) -> Option<()> {
        self.counts.accesses += 1;
        if !is_cacheable(line as u64, self.ratio) {
            self.counts.host_writes += 1;
            self.host[line] = words;
            return Some(());
        }
        // The line is written whole: the old one need not be fetched.
        let (_, tag) = self.bring(line, false)?;
        let slot = line % self.card.len();
        self.counts.card_writes += 1;
        self.card[slot] = Line::encode(words, tag | DIRTY);
        Some(())
    }

    /// Makes `line` the cached one of its slot; its words, where they were wanted, and its tag.
    fn bring(&mut self, line: usize, wanted: bool) -> Option<([u64; 8], u8)> {
        let slots = self.card.len();
        let (slot, tag) = (line % slots, (line / slots) as u8);
        self.counts.cacheable += 1;
        self.counts.card_reads += 1;
        let Decoded::Good(words, Some(metadata)) = self.card[slot].decode() else { return None };
        if metadata & 0x0f == tag {
            self.counts.hits += 1;
            return Some((words, tag));
        }
        if metadata & DIRTY != 0 {
            self.counts.host_writes += 1;
            self.host[usize::from(metadata & 0x0f) * slots + slot] = words;
        }
        if !wanted {
            return Some((words, tag));
        }
        self.counts.host_reads += 1;
        self.counts.card_writes += 1;
        let words = self.host[line];
        self.card[slot] = Line::encode(words, tag);
        Some((words, tag))
    }

    /// Writes every dirty line back; host memory then holds everything.
    pub fn flush(&mut self) -> Option<&[[u64; 8]]> {
        let slots = self.card.len();
        for slot in 0..slots {
            let Decoded::Good(words, Some(metadata)) = self.card[slot].decode() else {
                return None;
            };
            if metadata & DIRTY != 0 {
                self.host[usize::from(metadata & 0x0f) * slots + slot] = words;
                self.card[slot] = Line::encode(words, metadata & 0x0f);
            }
        }
        Some(&self.host)
    }
}

#[cfg(test)]
mod tests {
    use beeline_env::Randomness;

    use super::*;

    #[test]
    fn memory_behind_the_cache_is_memory_from_a_cold_start() {
        let mut random = Randomness::new(5);
        for ratio in [0.0, 0.5, 1.0] {
            let mut memory = CachedMemory::new(1600, ratio);
            let mut shadow = vec![[0; 8]; 1600];
            for _ in 0..60_000 {
                let line = random.below(1600) as usize;
                if random.chance(1, 2) {
                    let words = std::array::from_fn(|_| random.next_u64());
                    memory.write(line, words).unwrap();
                    shadow[line] = words;
                } else {
                    assert_eq!(memory.read(line).unwrap(), shadow[line]);
                }
            }
            let share = memory.counts().cacheable as f64 / memory.counts().accesses as f64;
            assert!((share - ratio).abs() < 0.05, "{share}");
            assert_eq!(memory.flush().unwrap(), shadow);
        }
    }

    #[test]
    fn damage_in_the_cards_memory_is_corrected_or_told() {
        let mut memory = CachedMemory::new(160, 1.0);
        memory.write(33, [7; 8]).unwrap();
        let slot = 33 % memory.card.len();
        memory.card[slot].flip(100);
        assert_eq!(memory.read(33), Some([7; 8]));
        memory.card[slot].flip(101);
        assert_eq!(memory.read(33), None, "two flips in one word");
    }
}
