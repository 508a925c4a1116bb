//! The line of a queue's tail, with a copy of the packet that was put last, if that is small.
//!
//! A receiver that waits looks at the tail. What a small packet says fits beside it, so that one cache line goes from
//! processor to processor where two went: the tail's, and the block's. The block is filled all the same. It stays the
//! packet's place for a receiver that comes late, looks twice, or takes up for one that died, and every receiver may use
//! the block alone.
//!
//! ```text
//! 0  tail u32   4  position of the packet that is copied u32   8  seven words: the first 56 bytes of its block
//! ```
//!
//! The copy is a sequence lock whose number is the packet's position: a receiver reads position, words, position. The
//! sender says another position before it changes the words.
//!
//! Invariant: when the tail passes a position, the copy has that packet's words or another position.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Words of a copy.
pub const WORDS: usize = 7;

/// What no packet under way, and none that is put next, has as its position.
const ELSEWHERE: u32 = 1 << 31;

/// The line.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct TailLine {
    pub(super) tail: AtomicU32,
    position: AtomicU32,
    words: [AtomicU64; WORDS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<TailLine>() == 64, "a tail and its copy share a cache line");

impl TailLine {
    /// Of an empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tail: AtomicU32::new(0),
            position: AtomicU32::new(ELSEWHERE),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// How many numbers were put so far, counted round.
    #[must_use]
    pub fn tail(&self) -> &AtomicU32 {
        &self.tail
    }

    /// The sender is about to put so many packets that are not copied.
    #[inline]
    pub(super) fn pass(&self, count: usize) {
        let tail = self.tail.load(Ordering::Relaxed);
        let ahead = self.position.load(Ordering::Relaxed).wrapping_sub(tail);
        // A sender that died after a copy and before its tail left one for the position that is put now.
        if (ahead as usize) < count {
            // Before the tail, whose store is a Release.
            self.position.store(tail ^ ELSEWHERE, Ordering::Relaxed);
        }
    }

    /// The sender is about to put the packet that begins with these words.
    #[inline]
    pub(super) fn copy(&self, packet: &[u64; WORDS]) {
        let tail = self.tail.load(Ordering::Relaxed);
        self.position.store(tail ^ ELSEWHERE, Ordering::Relaxed);
        // Release with the Acquire fence of `read`: a receiver that sees a new word sees that its copy is gone.
        fence(Ordering::Release);
        for (place, &word) in self.words.iter().zip(packet) {
            place.store(word, Ordering::Relaxed);
        }
        // Release with the Acquire of `read`: the words.
        self.position.store(tail, Ordering::Release);
    }

    /// The copy of the packet at `position`, if it is there.
    #[inline]
    pub(super) fn read(&self, position: u32) -> Option<[u64; WORDS]> {
        if self.position.load(Ordering::Acquire) != position {
            return None;
        }
        let words = std::array::from_fn(|index| self.words[index].load(Ordering::Relaxed));
        // Acquire with the Release fence of `copy`.
        fence(Ordering::Acquire);
        (self.position.load(Ordering::Relaxed) == position).then_some(words)
    }
}

impl Default for TailLine {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::super::{OwnedQueue, Packets};
    use super::*;

    proptest! {
        #[test]
        fn a_copy_is_of_the_packet_at_its_position_or_there_is_none(
            steps in proptest::collection::vec((any::<bool>(), 1_usize..4, 0_usize..4, any::<bool>()), 1..100),
            start in prop_oneof![Just(0_u32), Just(u32::MAX - 5)],
        ) {
            let (filled, free) = (OwnedQueue::new(8), OwnedQueue::new(8));
            for queue in [&filled, &free] {
                queue.line.tail.store(start, Ordering::Relaxed);
                queue.head.store(start, Ordering::Relaxed);
            }
            let packets = Packets::new(filled.queue(), free.queue(), 8).beside(&filled.line);
            packets.format().unwrap();
            // What stands in the first word of each block.
            let (mut blocks, mut next) = ([0_u64; 8], 1_u64);
            for (copies, puts, takes, dies) in steps {
                let mut numbers = [0; 8];
                let count = packets.take(&mut numbers[..puts]).unwrap();
                for &number in &numbers[..count] {
                    blocks[number as usize] = next;
                    next += 1;
                }
                if copies && count == 1 {
                    let word = blocks[numbers[0] as usize];
                    if dies {
                        // Its copy is made and its tail is not.
                        filled.line.copy(&[word; WORDS]);
                        packets.mend_sender().unwrap();
                    } else {
                        packets.publish_beside(numbers[0], &[word; WORDS]).unwrap();
                    }
                } else {
                    packets.publish(&numbers[..count]).unwrap();
                }
                let found = packets.look(&mut numbers).unwrap();
                for (index, &number) in numbers[..found].iter().enumerate() {
                    let position = filled.queue().taken().wrapping_add(index as u32);
                    if let Some(words) = packets.copy_at(position) {
                        prop_assert_eq!(words, [blocks[number as usize]; WORDS]);
                    }
                }
                packets.release(&numbers[..takes.min(found)]).unwrap();
            }
        }
    }

    #[test]
    fn a_single_packet_is_copied_and_a_batch_is_not() {
        let (filled, free) = (OwnedQueue::new(8), OwnedQueue::new(8));
        let packets = Packets::new(filled.queue(), free.queue(), 8).beside(&filled.line);
        packets.format().unwrap();
        let mut numbers = [0; 3];
        packets.take(&mut numbers).unwrap();
        packets.publish_beside(numbers[0], &[7; WORDS]).unwrap();
        assert_eq!(packets.copy_at(0), Some([7; WORDS]));
        packets.publish(&numbers[1..]).unwrap();
        assert_eq!((packets.copy_at(0), packets.copy_at(1)), (Some([7; WORDS]), None));
        packets.take(&mut numbers[..1]).unwrap();
        packets.publish_beside(numbers[0], &[8; WORDS]).unwrap();
        assert_eq!(packets.copy_at(0), None);
        assert_eq!(packets.copy_at(3), Some([8; WORDS]));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;

    /// The receiver reads the copy of one packet while the sender makes the next one.
    #[test]
    fn a_copy_that_is_made_while_another_is_read_is_never_taken_for_it() {
        crate::sync::explore("beside", || {
            let line = Arc::new(TailLine::new());
            let theirs = Arc::clone(&line);
            let sender = loom::thread::spawn(move || {
                for value in 1..=2 {
                    theirs.copy(&[value; WORDS]);
                    let tail = theirs.tail.load(Ordering::Relaxed);
                    theirs.tail.store(tail + 1, Ordering::Release);
                }
            });
            let mut seen = 0;
            while seen < 2 {
                let tail = line.tail.load(Ordering::Acquire);
                for position in seen..tail {
                    if let Some(words) = line.read(position) {
                        assert_eq!(words, [u64::from(position) + 1; WORDS]);
                    }
                }
                // A copy of what was put last is there once its tail is, unless the next one is being made.
                assert!(tail < 2 || line.read(1).is_some());
                if tail == seen {
                    loom::thread::yield_now();
                }
                seen = tail;
            }
            sender.join().unwrap();
        });
    }
}
