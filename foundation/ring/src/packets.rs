//! Packets between two processes: queues of block numbers, and blocks that go round.
//!
//! ```text
//!            filled (numbers) ──────────────►
//!   sender ◄                                  ► receiver       blocks lie still in shared memory
//!            ◄────────────── free (numbers)
//! ```
//!
//! The sender takes a free block, fills it and publishes its number; the receiver uses the block in
//! place and gives the number back. Both ways are the same queue: one producer, one consumer, no
//! lock, and one update of an index for a whole batch. The free list is the second queue in the
//! reverse direction, so an empty one is back-pressure and nothing else (NTSocks 3.4, 3.5).
//!
//! The two processes map the memory at different addresses, so only numbers cross. Every word is an
//! atomic and every number is checked: a process at the other end that writes nonsense is told of
//! as [`Corrupt`], and reads or writes nothing beside the blocks.
//!
//! What a small packet says may stand beside the tail, too ([`beside`]).
//!
//! Invariants:
//! - `tail` is written by the producer only and `head` by the consumer only; both count up and wrap; `tail - head` is at
//!   most the length;
//! - a receiver takes a number out of the queue first and gives the block back then. Between both it may stand still for
//!   as long as its processor runs something else: a packet that was taken has no free block yet. A sender
//!   of credits counts what was given back ([`Packets::returned`]), and not what was taken.

pub mod beside;

use crate::sync::{AtomicU32, Ordering};
use beside::TailLine;

/// The process at the other end wrote what it cannot have meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other end wrote nonsense into a queue of block numbers")]
pub struct Corrupt;

/// A queue of block numbers: one producer, one consumer.
///
/// Both positions and the entries lie in memory that two processes share. The caller sees to it
/// that one thread at a time produces, and one consumes; if not, numbers are lost or doubled, and
/// nothing worse.
#[derive(Clone, Copy, Debug)]
pub struct IndexQueue<'a> {
    tail: &'a AtomicU32,
    head: &'a AtomicU32,
    entries: &'a [AtomicU32],
}

impl<'a> IndexQueue<'a> {
    /// The queue with these words.
    #[must_use]
    pub fn new(tail: &'a AtomicU32, head: &'a AtomicU32, entries: &'a [AtomicU32]) -> Self {
        assert!(entries.len().is_power_of_two(), "a queue's length is a power of two");
        assert!(u32::try_from(entries.len()).is_ok(), "positions are 32 bits");
        Self { tail, head, entries }
    }

    #[expect(clippy::cast_possible_truncation, reason = "checked when made")]
    fn length(&self) -> u32 {
        self.entries.len() as u32
    }

    fn entry(&self, position: u32) -> &AtomicU32 {
        &self.entries[position as usize & (self.entries.len() - 1)]
    }

    /// Numbers in the queue, as either side may ask.
    ///
    /// Errors: [`Corrupt`].
    pub fn count(&self) -> Result<u32, Corrupt> {
        // Acquire: what the other side did before its last update is there.
        let head = self.head.load(Ordering::Acquire);
        let count = self.tail.load(Ordering::Acquire).wrapping_sub(head);
        if count > self.length() { Err(Corrupt) } else { Ok(count) }
    }

    /// True when there is nothing to take; nonsense counts as something, to be found out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count() == Ok(0)
    }

    /// How many numbers were taken so far, counted round.
    #[must_use]
    pub fn taken(&self) -> u32 {
        self.head.load(Ordering::Acquire)
    }

    /// How many numbers were put so far, counted round.
    #[must_use]
    pub fn put(&self) -> u32 {
        self.tail.load(Ordering::Acquire)
    }

    /// Puts as many of `numbers` as there is room for, with one update, and says how many. The
    /// producer's.
    ///
    /// Errors: [`Corrupt`].
    pub fn push(&self, numbers: &[u32]) -> Result<usize, Corrupt> {
        let tail = self.tail.load(Ordering::Relaxed);
        // Acquire with the consumer's Release in `pop`: it is done with the entries.
        let filled = tail.wrapping_sub(self.head.load(Ordering::Acquire));
        let room = self.length().checked_sub(filled).ok_or(Corrupt)?;
        let part = numbers.len().min(room as usize);
        let mut at = tail;
        for &number in &numbers[..part] {
            // Blocks that go round in their order come to the entries that they had: what stands there already is not
            // stored again, so that the line of an entry stays in the caches of both ends.
            let entry = self.entry(at);
            if entry.load(Ordering::Relaxed) != number {
                entry.store(number, Ordering::Relaxed);
            }
            at = at.wrapping_add(1);
        }
        if part > 0 {
            // Release with the consumer's Acquire: the entries, and the blocks they name.
            self.tail.store(at, Ordering::Release);
        }
        Ok(part)
    }

    /// Reads the numbers at the head without taking them, and says how many. The consumer's;
    /// [`IndexQueue::skip`] takes them.
    ///
    /// Errors: [`Corrupt`].
    pub fn look(&self, numbers: &mut [u32]) -> Result<usize, Corrupt> {
        let head = self.head.load(Ordering::Relaxed);
        // Acquire with the producer's Release in `push`.
        let filled = self.tail.load(Ordering::Acquire).wrapping_sub(head);
        if filled > self.length() {
            return Err(Corrupt);
        }
        let part = numbers.len().min(filled as usize);
        let mut at = head;
        for number in &mut numbers[..part] {
            *number = self.entry(at).load(Ordering::Relaxed);
            at = at.wrapping_add(1);
        }
        Ok(part)
    }

    /// As [`IndexQueue::look`], from `position` on, which the consumer counts round and which lies
    /// between what was taken and what was put.
    ///
    /// Errors: [`Corrupt`], also for a position outside of that.
    pub fn look_from(&self, position: u32, numbers: &mut [u32]) -> Result<usize, Corrupt> {
        let head = self.head.load(Ordering::Relaxed);
        // Acquire with the producer's Release in `push`.
        let filled = self.tail.load(Ordering::Acquire).wrapping_sub(head);
        let passed = position.wrapping_sub(head);
        if filled > self.length() || passed > filled {
            return Err(Corrupt);
        }
        let part = numbers.len().min((filled - passed) as usize);
        let mut at = position;
        for number in &mut numbers[..part] {
            *number = self.entry(at).load(Ordering::Relaxed);
            at = at.wrapping_add(1);
        }
        Ok(part)
    }

    /// Takes `count` numbers that [`IndexQueue::look`] found, with one update.
    #[expect(clippy::cast_possible_truncation, reason = "at most the length")]
    pub fn skip(&self, count: usize) {
        let head = self.head.load(Ordering::Relaxed);
        // Release with the producer's Acquire in `push`: the entries were read.
        self.head.store(head.wrapping_add(count as u32), Ordering::Release);
    }

    /// Takes numbers, with one update, and says how many. The consumer's.
    ///
    /// Errors: [`Corrupt`].
    pub fn pop(&self, numbers: &mut [u32]) -> Result<usize, Corrupt> {
        let part = self.look(numbers)?;
        if part > 0 {
            self.skip(part);
        }
        Ok(part)
    }
}

/// One direction: filled blocks one way, free ones the other.
#[derive(Clone, Copy, Debug)]
pub struct Packets<'a> {
    filled: IndexQueue<'a>,
    free: IndexQueue<'a>,
    blocks: u32,
    /// Of the filled queue, where a small packet is copied beside the tail.
    line: Option<&'a TailLine>,
}

impl<'a> Packets<'a> {
    /// The direction with these queues and so many blocks.
    #[must_use]
    pub fn new(filled: IndexQueue<'a>, free: IndexQueue<'a>, blocks: u32) -> Self {
        assert!(blocks <= free.length() && blocks <= filled.length(), "every block fits a queue");
        Self { filled, free, blocks, line: None }
    }

    /// The same, with small packets copied into the line of the filled queue's tail.
    #[must_use]
    #[inline]
    pub fn beside(self, line: &'a TailLine) -> Self {
        assert!(std::ptr::eq(line.tail(), self.filled.tail), "the line of the filled queue");
        Self { line: Some(line), ..self }
    }

    /// Makes every block free: once, before the other process has the memory.
    ///
    /// Errors: [`Corrupt`] for memory that was in use.
    pub fn format(&self) -> Result<(), Corrupt> {
        for number in 0..self.blocks {
            if self.free.push(&[number])? != 1 {
                return Err(Corrupt);
            }
        }
        Ok(())
    }

    /// Filled blocks, in their order.
    #[must_use]
    pub fn filled(&self) -> &IndexQueue<'a> {
        &self.filled
    }

    /// Free blocks.
    #[must_use]
    pub fn free(&self) -> &IndexQueue<'a> {
        &self.free
    }

    /// Of how many packets the receiver has given the blocks back, counted round: as many more as there are blocks find
    /// a free one, whatever the receiver is doing. What it has taken out of the queue may be ahead of that.
    #[must_use]
    #[inline]
    pub fn returned(&self) -> u32 {
        // `format` put every block once.
        self.free.put().wrapping_sub(self.blocks)
    }

    /// The sender takes free blocks.
    ///
    /// Errors: [`Corrupt`] for a number that is no block's.
    pub fn take(&self, numbers: &mut [u32]) -> Result<usize, Corrupt> {
        let part = self.free.pop(numbers)?;
        self.check(&numbers[..part])?;
        Ok(part)
    }

    /// The sender publishes blocks that it filled.
    ///
    /// Errors: [`Corrupt`]: more blocks are about than there are.
    pub fn publish(&self, numbers: &[u32]) -> Result<(), Corrupt> {
        if let Some(line) = self.line {
            line.pass(numbers.len());
        }
        if self.filled.push(numbers)? == numbers.len() { Ok(()) } else { Err(Corrupt) }
    }

    /// As [`Packets::publish`], of one block that begins with these words: all of the packet, so that its receiver needs no
    /// look at the block.
    ///
    /// Errors: [`Corrupt`].
    #[inline]
    pub fn publish_beside(
        &self,
        number: u32,
        packet: &[u64; beside::WORDS],
    ) -> Result<(), Corrupt> {
        if let Some(line) = self.line {
            line.copy(packet);
        }
        if self.filled.push(&[number])? == 1 { Ok(()) } else { Err(Corrupt) }
    }

    /// What the block of the packet at `position` of the filled queue begins with, if the sender copied that beside the
    /// tail and nothing came since. The sender may write anything: as a block, it is to be checked.
    #[must_use]
    #[inline]
    pub fn copy_at(&self, position: u32) -> Option<[u64; beside::WORDS]> {
        self.line?.read(position)
    }

    /// The receiver looks at filled blocks; they stay.
    ///
    /// Errors: [`Corrupt`] for a number that is no block's.
    pub fn look(&self, numbers: &mut [u32]) -> Result<usize, Corrupt> {
        let part = self.filled.look(numbers)?;
        self.check(&numbers[..part])?;
        Ok(part)
    }

    /// As [`Packets::look`], from `position` on, as [`IndexQueue::look_from`] has it: for a receiver
    /// that gives blocks back later.
    ///
    /// Errors: [`Corrupt`].
    pub fn look_from(&self, position: u32, numbers: &mut [u32]) -> Result<usize, Corrupt> {
        let part = self.filled.look_from(position, numbers)?;
        self.check(&numbers[..part])?;
        Ok(part)
    }

    /// Takes up for a sender that died: blocks that it took and did not publish are free again.
    ///
    /// Blocks are published in the order in which they were taken, so that as many were taken as
    /// were published, but for these.
    ///
    /// Errors: [`Corrupt`].
    pub fn mend_sender(&self) -> Result<(), Corrupt> {
        let (published, taken) = (self.filled.put(), self.free.taken());
        if taken.wrapping_sub(published) > self.blocks {
            return Err(Corrupt);
        }
        // Release with the Acquire of `push`, as in `skip`. Their entries are as they were: the
        // queue has room for every block, and these are in no hands.
        self.free.head.store(published, Ordering::Release);
        Ok(())
    }

    /// Takes up for a receiver that died: blocks that it took and did not give back are free again.
    ///
    /// Errors: [`Corrupt`].
    pub fn mend_receiver(&self) -> Result<(), Corrupt> {
        let taken = self.filled.taken();
        let missing = taken.wrapping_add(self.blocks).wrapping_sub(self.free.put());
        if missing > self.blocks {
            return Err(Corrupt);
        }
        for back in (1..=missing).rev() {
            // As it was: the sender has no block to put into this entry.
            let number = self.filled.entry(taken.wrapping_sub(back)).load(Ordering::Relaxed);
            self.check(&[number])?;
            if self.free.push(&[number])? != 1 {
                return Err(Corrupt);
            }
        }
        Ok(())
    }

    /// The receiver is done with blocks that it looked at, the first ones in the queue.
    ///
    /// Errors: [`Corrupt`]: more blocks are about than there are.
    pub fn release(&self, numbers: &[u32]) -> Result<(), Corrupt> {
        // Taken first: a block that is free before its number left the queue could be in it twice.
        // A receiver that dies in between loses blocks, and no packet is read twice.
        self.filled.skip(numbers.len());
        if self.free.push(numbers)? == numbers.len() { Ok(()) } else { Err(Corrupt) }
    }

    fn check(&self, numbers: &[u32]) -> Result<(), Corrupt> {
        if numbers.iter().all(|&number| number < self.blocks) { Ok(()) } else { Err(Corrupt) }
    }
}

/// Owned words of a queue, for tests and for threads of one process.
#[derive(Debug)]
pub struct OwnedQueue {
    line: TailLine,
    head: AtomicU32,
    entries: Box<[AtomicU32]>,
}

impl OwnedQueue {
    /// A queue of `length` numbers, a power of two.
    #[must_use]
    pub fn new(length: usize) -> Self {
        let entries = (0..length).map(|_| AtomicU32::new(0)).collect();
        Self { line: TailLine::new(), head: AtomicU32::new(0), entries }
    }

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> IndexQueue<'_> {
        IndexQueue::new(&self.line.tail, &self.head, &self.entries)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Steps of a property: fewer where Miri makes each of them.
    const MOST_STEPS: usize = if cfg!(miri) { 60 } else { 400 };

    proptest! {
        #[test]
        fn a_queue_behaves_like_a_bounded_deque(
            steps in proptest::collection::vec((any::<bool>(), 0_usize..12), 0..MOST_STEPS),
            start in prop_oneof![Just(0_u32), Just(u32::MAX - 3)],
        ) {
            let owned = OwnedQueue::new(8);
            owned.line.tail.store(start, Ordering::Relaxed);
            owned.head.store(start, Ordering::Relaxed);
            let queue = owned.queue();
            let (mut model, mut next) = (VecDeque::new(), 0);
            for (puts, count) in steps {
                if puts {
                    let numbers: Vec<u32> = (next..next + count as u32).collect();
                    let part = queue.push(&numbers).unwrap();
                    prop_assert_eq!(part, count.min(8 - model.len()));
                    model.extend(&numbers[..part]);
                    next += part as u32;
                } else {
                    let mut numbers = vec![0; count];
                    let part = queue.pop(&mut numbers).unwrap();
                    let expected: Vec<u32> = model.drain(..count.min(model.len())).collect();
                    prop_assert_eq!(&numbers[..part], &expected[..]);
                }
                prop_assert_eq!(queue.count(), Ok(model.len() as u32));
            }
        }

        #[test]
        fn nonsense_in_the_words_is_told_of_and_no_entry_is_read_beside_the_queue(
            tail in any::<u32>(), head in any::<u32>(), numbers in proptest::collection::vec(any::<u32>(), 8),
        ) {
            let (filled, free) = (OwnedQueue::new(8), OwnedQueue::new(8));
            for (entry, number) in free.entries.iter().chain(&filled.entries).zip(numbers.iter().cycle()) {
                entry.store(*number, Ordering::Relaxed);
            }
            free.line.tail.store(tail, Ordering::Relaxed);
            free.head.store(head, Ordering::Relaxed);
            let packets = Packets::new(filled.queue(), free.queue(), 4);
            let mut taken = [0; 8];
            if let Ok(part) = packets.take(&mut taken) {
                prop_assert!(taken[..part].iter().all(|&number| number < 4));
            }
            let _ = packets.release(&[1, 2]);
        }
    }

    #[test]
    fn a_batch_is_one_update_and_blocks_come_back() {
        let (filled, free) = (OwnedQueue::new(8), OwnedQueue::new(8));
        let packets = Packets::new(filled.queue(), free.queue(), 6);
        packets.format().unwrap();
        let mut numbers = [0; 8];
        assert_eq!(packets.take(&mut numbers), Ok(6));
        assert_eq!(packets.take(&mut numbers[6..]), Ok(0));
        packets.publish(&numbers[..6]).unwrap();
        let mut seen = [0; 8];
        assert_eq!(packets.look(&mut seen), Ok(6));
        assert_eq!(seen[..6], numbers[..6]);
        packets.release(&seen[..2]).unwrap();
        assert_eq!(packets.look(&mut seen), Ok(4));
        assert_eq!(packets.take(&mut numbers), Ok(2));
    }

    #[test]
    fn what_a_dead_end_had_in_its_hands_is_free_or_filled_again_at_every_step() {
        for start in [0, u32::MAX - 5] {
            for (published, taken, released, given) in
                [(0, 0, 0, 0), (2, 5, 0, 0), (3, 3, 2, 1), (4, 6, 4, 0), (6, 6, 3, 3)]
            {
                let (filled, free) = (OwnedQueue::new(8), OwnedQueue::new(8));
                for queue in [&filled, &free] {
                    queue.line.tail.store(start, Ordering::Relaxed);
                    queue.head.store(start, Ordering::Relaxed);
                }
                let packets = Packets::new(filled.queue(), free.queue(), 8);
                packets.format().unwrap();
                let mut numbers = [0; 8];
                packets.take(&mut numbers[..taken]).unwrap();
                packets.publish(&numbers[..published]).unwrap();
                // The sender died here, and the receiver between its two updates.
                let mut seen = [0; 8];
                packets.look(&mut seen[..released]).unwrap();
                packets.filled.skip(released);
                packets.free.push(&seen[..given]).unwrap();
                packets.mend_sender().unwrap();
                packets.mend_receiver().unwrap();
                let mut left = [0; 8];
                let unread = packets.look(&mut left).unwrap();
                assert_eq!(left[..unread], numbers[released..published]);
                let mut all: Vec<u32> = left[..unread].to_vec();
                let mut rest = [0; 8];
                let count = packets.take(&mut rest).unwrap();
                // What the dead sender had is the next to be taken, in the same order.
                assert_eq!(rest[..taken - published], numbers[published..taken]);
                all.extend(&rest[..count]);
                all.sort_unstable();
                assert_eq!(all, (0..8).collect::<Vec<_>>());
                assert_eq!(packets.mend_sender(), Ok(()));
                free.head.store(start.wrapping_sub(20), Ordering::Relaxed);
                assert_eq!(packets.mend_sender(), Err(Corrupt));
            }
        }
    }

    #[test]
    fn a_receiver_may_look_ahead_of_what_it_gave_back_and_no_further_than_what_came() {
        let (filled, free) = (OwnedQueue::new(8), OwnedQueue::new(8));
        let packets = Packets::new(filled.queue(), free.queue(), 8);
        packets.format().unwrap();
        let mut numbers = [0; 5];
        packets.take(&mut numbers).unwrap();
        packets.publish(&numbers).unwrap();
        let mut seen = [0; 8];
        assert_eq!(packets.look_from(2, &mut seen), Ok(3));
        assert_eq!(seen[..3], numbers[2..]);
        assert_eq!(packets.look_from(5, &mut seen), Ok(0));
        assert_eq!(packets.look_from(6, &mut seen), Err(Corrupt));
        packets.release(&numbers[..3]).unwrap();
        assert_eq!(packets.look_from(2, &mut seen), Err(Corrupt));
    }

    #[test]
    fn packets_cross_threads_whole_and_in_order() {
        let rounds: u32 = if cfg!(miri) { 60 } else { 100_000 };
        let (filled, free) = (OwnedQueue::new(8), OwnedQueue::new(8));
        let blocks: Vec<AtomicU32> = (0..8).map(|_| AtomicU32::new(0)).collect();
        let packets = Packets::new(filled.queue(), free.queue(), 8);
        packets.format().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut next = 0;
                while next < rounds {
                    let mut numbers = [0; 3];
                    let part = packets.take(&mut numbers).unwrap().min((rounds - next) as usize);
                    for &number in &numbers[..part] {
                        blocks[number as usize].store(next, Ordering::Relaxed);
                        next += 1;
                    }
                    packets.publish(&numbers[..part]).unwrap();
                    if part == 0 {
                        std::thread::yield_now();
                    }
                }
            });
            let mut expected = 0;
            while expected < rounds {
                let mut numbers = [0; 5];
                let part = packets.look(&mut numbers).unwrap();
                for &number in &numbers[..part] {
                    assert_eq!(blocks[number as usize].load(Ordering::Relaxed), expected);
                    expected += 1;
                }
                packets.release(&numbers[..part]).unwrap();
                if part == 0 {
                    std::thread::yield_now();
                }
            }
        });
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;

    /// A sender that goes by what the receiver has given back, as one at another host does: it never looks whether a
    /// block is free.
    #[test]
    fn a_packet_that_was_granted_by_what_came_back_finds_a_free_block() {
        crate::sync::explore("granted packets", || {
            let queues = Arc::new((OwnedQueue::new(2), OwnedQueue::new(2)));
            let packets = Packets::new(queues.0.queue(), queues.1.queue(), 2);
            packets.format().unwrap();
            let theirs = Arc::clone(&queues);
            let receiver = loom::thread::spawn(move || {
                let packets = Packets::new(theirs.0.queue(), theirs.1.queue(), 2);
                let mut numbers = [0; 2];
                let found = packets.look(&mut numbers).unwrap();
                packets.release(&numbers[..found]).unwrap();
            });
            for sent in 0..4_u32 {
                if sent.wrapping_sub(packets.returned()) >= 2 {
                    break;
                }
                let mut number = [0; 1];
                assert_eq!(packets.take(&mut number), Ok(1), "packet {sent} has a block");
                packets.publish(&number).unwrap();
            }
            receiver.join().unwrap();
        });
    }

    #[test]
    fn a_block_is_seen_filled_and_is_filled_anew_only_after_it_was_read() {
        crate::sync::explore("packets", || {
            let queues = Arc::new((OwnedQueue::new(2), OwnedQueue::new(2)));
            let block = Arc::new(crate::sync::ProtocolCell::new(0_u32));
            Packets::new(queues.0.queue(), queues.1.queue(), 1).format().unwrap();
            let (theirs, their_block) = (Arc::clone(&queues), Arc::clone(&block));
            let sender = loom::thread::spawn(move || {
                let packets = Packets::new(theirs.0.queue(), theirs.1.queue(), 1);
                for value in 1..=2 {
                    let mut numbers = [0; 1];
                    while packets.take(&mut numbers).unwrap() == 0 {
                        loom::thread::yield_now();
                    }
                    // SAFETY: the block was free, so the sender has it alone; loom checks.
                    their_block.with_mut(|block| unsafe { block.write(value) });
                    packets.publish(&numbers).unwrap();
                }
            });
            let packets = Packets::new(queues.0.queue(), queues.1.queue(), 1);
            for expected in 1..=2 {
                let mut numbers = [0; 1];
                while packets.look(&mut numbers).unwrap() == 0 {
                    loom::thread::yield_now();
                }
                // SAFETY: the block is filled, so the receiver has it alone; loom checks.
                let value = block.with_mut(|block| unsafe { block.read() });
                assert_eq!(value, expected);
                packets.release(&numbers).unwrap();
            }
            sender.join().unwrap();
        });
    }
}
