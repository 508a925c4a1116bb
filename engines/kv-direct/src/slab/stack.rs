//! A stack with two ends that a processor and a daemon share: the processor uses the left end, the
//! daemon the right one, and neither takes a lock.
//!
//! Why two takers never get the same entry: each takes at most a batch at a time, and only while the
//! stack holds a batch and the guard (a batch too). Between the store that publishes an end and the
//! next load of the other end its owner passes a sequentially consistent fence, so of two takers at
//! least one sees what the other has taken before; the one whose taking is not yet visible has a
//! batch in hand, and the guard is that batch.
//!
//! Source: spec/kv-direct.md 5.2, the race-freedom invariant.

use crate::slab::{BATCH, Entry};
use crate::sync::{AtomicU64, Ordering, fence, words};

/// Entries that stay where they are: what the other end may have in hand.
pub const GUARD: u64 = BATCH as u64;

/// The entries of one class in shared memory.
///
/// `left` and `right` only count: the stack holds the entries from `left` to `right`, each in the
/// word of its number modulo the capacity. They start in the middle of the number space.
#[derive(Debug)]
pub struct SharedStack {
    left: AtomicU64,
    right: AtomicU64,
    words: Vec<AtomicU64>,
}

const MIDDLE: u64 = 1 << 62;

impl SharedStack {
    /// An empty stack for `capacity` entries.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let words = words((capacity + 2 * BATCH).next_power_of_two());
        Self { left: AtomicU64::new(MIDDLE), right: AtomicU64::new(MIDDLE), words }
    }

    fn word(&self, number: u64) -> &AtomicU64 {
        &self.words[number as usize & (self.words.len() - 1)]
    }

    /// Entries in it; a moment later there may be more or fewer.
    #[must_use]
    pub fn len(&self) -> u64 {
        let left = self.left.load(Ordering::Acquire);
        self.right.load(Ordering::Acquire).saturating_sub(left)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The processor's end: adds entries. At most a batch.
    pub fn push_left(&self, entries: &[Entry]) {
        let left = self.left.load(Ordering::Relaxed);
        for (number, entry) in (left - entries.len() as u64..).zip(entries) {
            self.word(number).store(entry.encode(), Ordering::Relaxed);
        }
        // Publishes the words above; pairs with the loads of `left` at the right end.
        self.left.store(left - entries.len() as u64, Ordering::Release);
    }

    /// The processor's end: takes a batch into `into`; false where that would reach into the guard.
    pub fn pop_left(&self, into: &mut Vec<Entry>) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        // Pairs with the fence of the other end.
        fence(Ordering::SeqCst);
        // Pairs with the store of `right`: the words up to there are placed.
        let right = self.right.load(Ordering::Acquire);
        if right.saturating_sub(left) < BATCH as u64 + GUARD {
            return false;
        }
        for number in left..left + BATCH as u64 {
            into.push(Entry::decode(self.word(number).load(Ordering::Relaxed)));
        }
        self.left.store(left + BATCH as u64, Ordering::Release);
        true
    }

    /// The daemon's end: adds entries. At most a batch.
    pub fn push_right(&self, entries: &[Entry]) {
        let right = self.right.load(Ordering::Relaxed);
        for (number, entry) in (right..).zip(entries) {
            self.word(number).store(entry.encode(), Ordering::Relaxed);
        }
        // Publishes the words above; pairs with the loads of `right` at the left end.
        self.right.store(right + entries.len() as u64, Ordering::Release);
    }

    /// The daemon's end: takes a batch into `into`; false where that would reach into the guard.
    pub fn pop_right(&self, into: &mut Vec<Entry>) -> bool {
        let right = self.right.load(Ordering::Relaxed);
        // Pairs with the fence of the other end.
        fence(Ordering::SeqCst);
        // Pairs with the store of `left`: the words from there on are placed.
        let left = self.left.load(Ordering::Acquire);
        if right.saturating_sub(left) < BATCH as u64 + GUARD {
            return false;
        }
        for number in right - BATCH as u64..right {
            into.push(Entry::decode(self.word(number).load(Ordering::Relaxed)));
        }
        self.right.store(right - BATCH as u64, Ordering::Release);
        true
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::slab::Class;

    fn entry(unit: u32) -> Entry {
        Entry { unit, class: Class::new(0) }
    }

    #[test]
    fn neither_end_takes_what_the_guard_keeps() {
        let stack = SharedStack::new(64);
        let entries: Vec<Entry> = (0..2 * BATCH as u32 - 1).map(entry).collect();
        for batch in entries.chunks(BATCH) {
            stack.push_right(batch);
        }
        let mut taken = Vec::new();
        assert!(!stack.pop_left(&mut taken) && !stack.pop_right(&mut taken));
        stack.push_left(&[entry(99)]);
        assert!(stack.pop_left(&mut taken));
        assert_eq!(taken[0], entry(99));
        assert!(!stack.pop_right(&mut taken));
        assert_eq!(taken.len(), BATCH);
    }

    #[test]
    fn two_threads_lose_and_duplicate_nothing() {
        let stack = Arc::new(SharedStack::new(4096));
        let all: Vec<Entry> = (0..4096).map(entry).collect();
        for batch in all.chunks(BATCH) {
            stack.push_right(batch);
        }
        let turns = 200_000;
        let other = Arc::clone(&stack);
        let daemon = std::thread::spawn(move || {
            let mut hand = Vec::new();
            for turn in 0..turns {
                if turn % 3 == 0 && hand.len() >= BATCH {
                    let from = hand.len() - BATCH;
                    other.push_right(&hand[from..]);
                    hand.truncate(from);
                } else if hand.len() < 1024 {
                    other.pop_right(&mut hand);
                }
            }
            hand
        });
        let mut hand = Vec::new();
        for turn in 0..turns {
            if turn % 3 == 1 && hand.len() >= BATCH {
                let from = hand.len() - BATCH;
                stack.push_left(&hand[from..]);
                hand.truncate(from);
            } else if hand.len() < 1024 {
                stack.pop_left(&mut hand);
            }
        }
        hand.extend(daemon.join().unwrap());
        while stack.pop_left(&mut hand) {}
        let left: Vec<Entry> = (stack.left.load(Ordering::SeqCst)
            ..stack.right.load(Ordering::SeqCst))
            .map(|number| Entry::decode(stack.word(number).load(Ordering::SeqCst)))
            .collect();
        hand.extend(left);
        hand.sort_unstable();
        assert_eq!(hand, all, "every entry is somewhere, once");
    }
}

#[cfg(loom)]
#[cfg(test)]
mod models {
    use super::*;
    use crate::slab::Class;
    use loom::sync::Arc;

    /// Three batches, of which each taker wants two: one of them is refused.
    #[test]
    fn two_takers_never_get_the_same_entry() {
        loom::model(|| {
            let stack = Arc::new(SharedStack::new(3 * BATCH));
            let entries: Vec<Entry> =
                (0..3 * BATCH as u32).map(|unit| Entry { unit, class: Class::new(0) }).collect();
            for batch in entries.chunks(BATCH) {
                stack.push_right(batch);
            }
            let other = Arc::clone(&stack);
            let daemon = loom::thread::spawn(move || {
                let mut hand = Vec::new();
                other.pop_right(&mut hand);
                other.pop_right(&mut hand);
                hand
            });
            let mut hand = Vec::new();
            stack.pop_left(&mut hand);
            stack.pop_left(&mut hand);
            hand.extend(daemon.join().unwrap());
            let count = hand.len();
            hand.sort_unstable();
            hand.dedup();
            assert_eq!(hand.len(), count, "an entry was taken twice");
        });
    }

    #[test]
    fn what_is_taken_was_placed_before() {
        loom::model(|| {
            let stack = Arc::new(SharedStack::new(2 * BATCH));
            let other = Arc::clone(&stack);
            let made = |from: u32| {
                (from..from + BATCH as u32)
                    .map(|unit| Entry { unit, class: Class::new(1) })
                    .collect::<Vec<_>>()
            };
            let daemon = loom::thread::spawn(move || {
                other.push_right(&made(100));
                other.push_right(&made(200));
            });
            let mut hand = Vec::new();
            stack.pop_left(&mut hand);
            assert!(hand.iter().all(|entry| entry.unit >= 100 && entry.class == Class::new(1)));
            daemon.join().unwrap();
        });
    }
}
