//! A server's durable memory: what is visible, what would survive a loss of power, and who may
//! write.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use beeline_env::Randomness;
use beeline_paxos::{AccessKey, LogMemory, Status};

const LINE_BYTES: usize = 64;
const WORD_BYTES: usize = 8;

/// The memory of one server.
#[derive(Debug, Default)]
pub struct NodeMemory {
    visible: Vec<u8>,
    durable: Vec<u8>,
    dirty: BTreeSet<usize>,
    /// The status words.
    pub status: Status,
    /// Opens the log region; `None` before the first fence of a run.
    pub key: Option<AccessKey>,
    /// With a planted bug: keys that were revoked in word only, and until when.
    pub lingering: Vec<(AccessKey, u64)>,
}

impl NodeMemory {
    /// Zeroed memory.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self {
            visible: vec![0; bytes as usize],
            durable: vec![0; bytes as usize],
            dirty: BTreeSet::new(),
            status: Status::default(),
            key: None,
            lingering: Vec::new(),
        }
    }

    /// Whether `key` opens the region at this moment.
    #[must_use]
    pub fn admits(&self, key: AccessKey, now_ns: u64) -> bool {
        self.key == Some(key)
            || self.lingering.iter().any(|(old, until_ns)| *old == key && now_ns < *until_ns)
    }

    /// Stores, visibly.
    pub fn store(&mut self, offset: u64, bytes: &[u8]) {
        let start = offset as usize;
        self.visible[start..start + bytes.len()].copy_from_slice(bytes);
        if !bytes.is_empty() {
            let last = start + bytes.len() - 1;
            self.dirty.extend(start / LINE_BYTES..=last / LINE_BYTES);
        }
    }

    /// The visible bytes.
    #[must_use]
    pub fn load(&self, offset: u64, length: usize) -> &[u8] {
        &self.visible[offset as usize..offset as usize + length]
    }

    /// The bytes that survive a loss of power for certain.
    #[must_use]
    pub fn durable(&self, offset: u64, length: usize) -> &[u8] {
        &self.durable[offset as usize..offset as usize + length]
    }

    /// Makes a range durable, in whole lines.
    pub fn persist(&mut self, offset: u64, length: usize) {
        let (start, end) = (offset as usize, offset as usize + length);
        let lines = start / LINE_BYTES..end.div_ceil(LINE_BYTES);
        for line in lines {
            if self.dirty.remove(&line) {
                let range = line * LINE_BYTES..(line + 1) * LINE_BYTES;
                self.durable[range.clone()].copy_from_slice(&self.visible[range]);
            }
        }
    }

    /// The power fails: every line that was not persisted is its old self, its new self, or a
    /// mixture of words.
    pub fn lose_power(&mut self, random: &mut Randomness) {
        for line in std::mem::take(&mut self.dirty) {
            let all = random.below(3);
            for word in 0..LINE_BYTES / WORD_BYTES {
                let arrived = match all {
                    0 => false,
                    1 => true,
                    _ => random.chance(1, 2),
                };
                if arrived {
                    let start = line * LINE_BYTES + word * WORD_BYTES;
                    let range = start..start + WORD_BYTES;
                    self.durable[range.clone()].copy_from_slice(&self.visible[range]);
                }
            }
        }
        self.visible.copy_from_slice(&self.durable);
    }
}

/// The memory as its own server's replica holds it.
#[derive(Clone, Debug)]
pub struct Shared(pub Rc<RefCell<NodeMemory>>);

impl LogMemory for Shared {
    fn load(&self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(self.0.borrow().load(offset, into.len()));
    }

    fn store(&mut self, offset: u64, bytes: &[u8]) {
        self.0.borrow_mut().store(offset, bytes);
    }

    fn publish(&mut self, status: Status) {
        self.0.borrow_mut().status = status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_persisted_survives_and_the_rest_tears_by_words() {
        let (mut kept, mut torn) = (0, 0);
        for seed in 0..64 {
            let mut memory = NodeMemory::new(4096);
            memory.store(0, &[1; 64]);
            memory.persist(0, 64);
            memory.store(0, &[2; 64]);
            memory.store(128, &[3; 8]);
            memory.lose_power(&mut Randomness::new(seed));
            let words: BTreeSet<u8> = memory.load(0, 64).iter().copied().collect();
            assert!(words.iter().all(|byte| [1, 2].contains(byte)));
            torn += usize::from(words.len() == 2);
            kept += usize::from(memory.load(128, 1) == [3]);
        }
        assert!(torn > 0 && kept > 0 && kept < 64, "{torn} torn, {kept} kept");
    }
}
