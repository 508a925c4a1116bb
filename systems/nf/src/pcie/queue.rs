//! Work queues: a ring of 128 entries in each direction of a data slot, with few notices.
//!
//! Invariants: one writer, one reader. The writer notifies only a reader that has armed its notice;
//! the reader arms it when it found the ring empty, and looks again before it sleeps. Either the
//! writer sees the armed notice, or the reader sees the entry: both store, then fence, then load. The
//! same holds with the roles exchanged for a writer that found no room.
//!
//! An entry is eight words; a wider item takes as many entries as it needs, in a row.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::bus::Direction;
use super::{Link, RING};

/// Words of an entry: the time from which it is visible, then its item.
const ENTRY: usize = 9;
/// Words of an item in one entry.
pub(super) const ITEM: usize = 8;
/// Words of a ring: tail, head and notices on cache lines of their own, then the entries.
pub(super) const RING_SIZE: usize = 32 + ENTRY * RING;
const TAIL: usize = 0;
const HEAD: usize = 8;
/// The reader sleeps until an entry comes.
const READER_ARMED: usize = 16;
/// The writer sleeps until there is room.
const WRITER_ARMED: usize = 24;

/// One direction of a work queue, seen from either side.
#[derive(Clone, Copy, Debug)]
pub struct WorkQueue<'a> {
    link: &'a Link,
    at: usize,
    slot: usize,
    direction: Direction,
}

impl Link {
    /// The work queue of a data slot, from 0.
    ///
    /// # Panics
    /// Past the last data slot.
    #[must_use]
    pub fn queue(&self, data: usize, direction: Direction) -> WorkQueue<'_> {
        assert!(data < super::DATA_SLOTS, "data slot {data} is one of {}", super::DATA_SLOTS);
        let ring = data * 2 + usize::from(direction == Direction::Up);
        let at = super::QUEUES_AT + ring * RING_SIZE;
        WorkQueue { link: self, at, slot: super::FIRST_DATA + data, direction }
    }
}

impl WorkQueue<'_> {
    fn word(&self, at: usize) -> &AtomicU64 {
        self.link.bus.word(self.at + at)
    }

    /// Entries inside.
    #[must_use]
    pub fn len(&self) -> usize {
        let head = self.word(HEAD).load(Ordering::Acquire);
        let tail = self.word(TAIL).load(Ordering::Acquire);
        usize::try_from(tail.wrapping_sub(head)).unwrap_or(0).min(RING)
    }

    /// True without entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True where an item of so many words finds room.
    #[must_use]
    pub fn has_room(&self, words: usize) -> bool {
        self.len() + words.div_ceil(ITEM).max(1) <= RING
    }

    /// Wakes the reader, or the writer that waits for room.
    fn notify(&self, reader: bool) {
        if reader == (self.direction == Direction::Down) {
            self.link.bus.ring_card();
        } else {
            self.link.bus.interrupt(self.slot);
        }
    }

    /// Writer: puts an item in without a notice; false without room.
    pub fn push(&self, item: &[u64]) -> bool {
        let mut left = true;
        let mut copy = item.to_vec();
        self.push_all(&mut copy, |_| std::mem::take(&mut left)) == 1
    }

    /// Writer: puts items in without a notice, as long as there is room and `next` writes another one
    /// into `item`; how many. The reader sees them together.
    pub fn push_all(&self, item: &mut [u64], mut next: impl FnMut(&mut [u64]) -> bool) -> usize {
        let entries = item.len().div_ceil(ITEM).max(1);
        let head = self.word(HEAD).load(Ordering::Acquire);
        // The writer's own word.
        let tail = self.word(TAIL).load(Ordering::Relaxed);
        let mut inside = usize::try_from(tail.wrapping_sub(head)).unwrap_or(RING);
        let mut place = usize::try_from(tail % RING as u64).unwrap_or(0);
        let mut count = 0;
        while inside + entries <= RING && next(item) {
            let time = self.link.bus.arrival(self.direction, item.len() * 8);
            let mut parts = item.chunks(ITEM);
            for _ in 0..entries {
                let part = parts.next().unwrap_or(&[]);
                let entry = self.link.bus.words(self.at + 32 + place * ENTRY, ENTRY);
                entry[0].store(time, Ordering::Relaxed);
                for (word, value) in entry[1..].iter().zip(part) {
                    word.store(*value, Ordering::Relaxed);
                }
                place = (place + 1) % RING;
            }
            inside += entries;
            count += 1;
        }
        if count > 0 {
            let tail = tail.wrapping_add((count * entries) as u64);
            // Release: pairs with the reader's load of the tail, for the entries' words.
            self.word(TAIL).store(tail, Ordering::Release);
        }
        count
    }

    /// Writer: after one or more [`WorkQueue::push`]: wakes a reader that sleeps.
    pub fn flush(&self) {
        // Pairs with the fence in `arm_reader`: the reader's notice and the tail are not both missed.
        fence(Ordering::SeqCst);
        if self.word(READER_ARMED).load(Ordering::Relaxed) == 0 {
            self.link.bus.count_suppressed();
            return;
        }
        self.word(READER_ARMED).store(0, Ordering::Relaxed);
        self.notify(true);
    }

    /// Reader: takes the oldest item that has arrived; false without one.
    ///
    /// The item has `item.len()` words, as its writer's had.
    pub fn pop(&self, item: &mut [u64]) -> bool {
        self.pop_all(item, 1, |_| {}) == 1
    }

    /// Reader: takes at most so many of the items that have arrived, oldest first; how many. Each is
    /// given to `take` in `item`.
    pub fn pop_all(&self, item: &mut [u64], most: usize, mut take: impl FnMut(&[u64])) -> usize {
        let entries = item.len().div_ceil(ITEM).max(1);
        let tail = self.word(TAIL).load(Ordering::Acquire);
        // The reader's own word.
        let head = self.word(HEAD).load(Ordering::Relaxed);
        let mut inside = usize::try_from(tail.wrapping_sub(head)).unwrap_or(0).min(RING);
        let mut place = usize::try_from(head % RING as u64).unwrap_or(0);
        let mut count = 0;
        while count < most && inside >= entries {
            let mut parts = item.chunks_mut(ITEM);
            let mut at = place;
            for first in (0..entries).map(|entry| entry == 0) {
                let entry = self.link.bus.words(self.at + 32 + at * ENTRY, ENTRY);
                if first && !self.link.bus.reached(entry[0].load(Ordering::Relaxed)) {
                    inside = 0;
                    break;
                }
                for (value, word) in parts.next().unwrap_or_default().iter_mut().zip(&entry[1..]) {
                    *value = word.load(Ordering::Relaxed);
                }
                at = (at + 1) % RING;
            }
            if inside == 0 {
                break;
            }
            take(item);
            place = at;
            inside -= entries;
            count += 1;
        }
        if count > 0 {
            let head = head.wrapping_add((count * entries) as u64);
            // Release: pairs with the writer's load of the head: the entries may be written again.
            self.word(HEAD).store(head, Ordering::Release);
        }
        count
    }

    /// Reader: after one or more [`WorkQueue::pop`]: wakes a writer that waits for room.
    pub fn release(&self) {
        // Pairs with the fence in `arm_writer`.
        fence(Ordering::SeqCst);
        if self.word(WRITER_ARMED).load(Ordering::Relaxed) != 0 {
            self.word(WRITER_ARMED).store(0, Ordering::Relaxed);
            self.notify(false);
        }
    }

    /// Reader: asks for a notice, then looks again: true where it may sleep, because an entry that
    /// comes from now on is announced. False where an entry is there.
    #[must_use]
    pub fn arm_reader(&self) -> bool {
        self.word(READER_ARMED).store(1, Ordering::Relaxed);
        // Pairs with the fence in `flush`.
        fence(Ordering::SeqCst);
        if self.is_empty() {
            return true;
        }
        self.word(READER_ARMED).store(0, Ordering::Relaxed);
        false
    }

    /// Writer: asks for a notice when there is room for `words` again; false where there is now.
    #[must_use]
    pub fn arm_writer(&self, words: usize) -> bool {
        self.word(WRITER_ARMED).store(1, Ordering::Relaxed);
        // Pairs with the fence in `release`.
        fence(Ordering::SeqCst);
        if !self.has_room(words) {
            return true;
        }
        self.word(WRITER_ARMED).store(0, Ordering::Relaxed);
        false
    }
}
