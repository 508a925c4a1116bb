//! Message slots: a ring of cache lines from one producer to one consumer, over raw memory that
//! two processes map and either may scribble over.
//!
//! ```text
//! slot (64 bytes, aligned)   header: messages published together that are behind this one, where it
//!                            is the first of them (8 bits) | tag (24 bits) | sequence (32 bits)
//!                            body:   7 words
//! message i lives in slot i mod count, with sequence (i + 1) mod 2^32
//! ```
//!
//! Invariants:
//! - the producer writes the body, then the header with `Release`; the consumer loads the header
//!   with `Acquire`, so a header with the expected sequence means a whole body. One cache line
//!   crosses per message;
//! - messages can be staged, all but the first of them whole; the first one's header publishes them
//!   together. A consumer that looks for the first has no line of the others yet, so the producer
//!   writes them undisturbed, and then finds all of them at one look;
//! - each side's own index is private and authoritative; the other side learns it only as a hint
//!   ([`SlotProducer::consumed`]) and refuses an implausible one;
//! - the consumer copies a slot once and uses the copy: whatever the other side scrawls, it can
//!   only produce messages that it could have sent, or nonsense that the caller's validation of
//!   the copy refuses.

use std::ptr::NonNull;

use crate::sync::{AtomicU64, Ordering};

/// Words of a slot's body.
pub const BODY_WORDS: usize = 7;

/// Bits of a tag.
pub const TAG_BITS: u32 = 24;

/// Most messages that are published together.
pub const MOST_STAGED: u32 = 256;

/// One cache line.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    header: AtomicU64,
    body: [AtomicU64; BODY_WORDS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == 64, "a slot is one cache line");

impl Slot {
    /// An empty slot; the same as 64 zero bytes.
    #[must_use]
    pub fn empty() -> Self {
        Self { header: AtomicU64::new(0), body: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    #[inline(always)]
    fn fill(&self, body: &[u64]) {
        for (word, &value) in self.body.iter().zip(body) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// A copied message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMessage {
    /// The producer's 24 bits beside the sequence.
    pub tag: u32,
    /// Messages that were published together with this one and are behind it; 0 but for the first
    /// of several. Only as true as the producer is honest: it spares a look, and proves nothing.
    pub behind: u32,
    /// The body.
    pub body: [u64; BODY_WORDS],
}

/// The head of a message, without its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotHead {
    /// As in [`SlotMessage`].
    pub tag: u32,
    /// As in [`SlotMessage`].
    pub behind: u32,
}

/// The other side claims an index it cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer claims to have consumed {claimed} of {produced} messages, after {seen}")]
pub struct ImplausibleIndex {
    /// What it claims.
    pub claimed: u64,
    /// What it claimed before.
    pub seen: u64,
    /// Messages produced.
    pub produced: u64,
}

/// Slots shared by both sides.
#[derive(Clone, Copy, Debug)]
struct SlotArray {
    slots: NonNull<Slot>,
    mask: u64,
}

impl SlotArray {
    fn new(slots: NonNull<Slot>, count: u32) -> Self {
        assert!(count.is_power_of_two(), "the number of slots is a power of two");
        Self { slots, mask: u64::from(count) - 1 }
    }

    #[inline(always)]
    fn slot(&self, index: u64) -> &Slot {
        #[expect(clippy::cast_possible_truncation, reason = "the mask is below 2^32")]
        let place = (index & self.mask) as usize;
        // SAFETY: `place` is below the count that the constructor's caller vouched for.
        let slot = unsafe { self.slots.add(place) };
        // SAFETY: mapped, aligned and alive (constructor's contract); all fields are atomics, so a
        // shared reference claims nothing about who writes.
        unsafe { slot.as_ref() }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "sequences wrap at 2^32 by design")]
#[inline(always)]
fn sequence(index: u64) -> u32 {
    index.wrapping_add(1) as u32
}

#[inline(always)]
fn header(tag: u32, index: u64) -> u64 {
    u64::from(tag) << 32 | u64::from(sequence(index))
}

/// The sending side.
#[derive(Debug)]
pub struct SlotProducer {
    array: SlotArray,
    next: u64,
    consumed: u64,
    /// The index that has no slot yet: `consumed` and a lap.
    full_at: u64,
    /// Messages at the end that are staged, and the header that publishes them.
    staged: u32,
    held_header: u64,
}

impl SlotProducer {
    /// Takes the producing side of `count` slots (a power of two), all empty.
    ///
    /// # Safety
    ///
    /// `slots` points to `count` slots that stay mapped while the value lives, and nobody else in
    /// this process produces into them.
    #[must_use]
    pub unsafe fn new(slots: NonNull<Slot>, count: u32) -> Self {
        Self {
            array: SlotArray::new(slots, count),
            next: 0,
            consumed: 0,
            full_at: u64::from(count),
            staged: 0,
            held_header: 0,
        }
    }

    /// Index of the next message.
    #[must_use]
    pub fn next_index(&self) -> u64 {
        self.next
    }

    /// True when a message fits, as far as [`SlotProducer::consumed`] told.
    #[inline(always)]
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.next < self.full_at
    }

    /// The next slot, where it is free as far as [`SlotProducer::consumed`] told, and nothing is staged
    /// before it.
    #[inline(always)]
    #[must_use]
    pub fn free(&mut self) -> Option<FreeSlot<'_>> {
        (self.has_room() && self.staged == 0).then_some(FreeSlot(self))
    }

    /// Takes note of the consumer's published index.
    ///
    /// Errors: [`ImplausibleIndex`] when it runs backwards or ahead of what was produced; the old
    /// one is kept.
    pub fn consumed(&mut self, claimed: u64) -> Result<(), ImplausibleIndex> {
        if claimed < self.consumed || claimed > self.next {
            let (seen, produced) = (self.consumed, self.next);
            return Err(ImplausibleIndex { claimed, seen, produced });
        }
        self.consumed = claimed;
        self.full_at = claimed + self.array.mask + 1;
        Ok(())
    }

    /// Address of the slot `ahead` messages after the next one, to prefetch it.
    #[inline(always)]
    #[must_use]
    pub fn address(&self, ahead: u64) -> *const Slot {
        std::ptr::from_ref(self.array.slot(self.next + ahead))
    }

    /// Publishes one message, after those staged; `body` has at most [`BODY_WORDS`] words, the rest
    /// stays unspecified.
    ///
    /// Invariant: [`SlotProducer::has_room`].
    #[inline(always)]
    pub fn push(&mut self, tag: u32, body: &[u64]) {
        match self.free() {
            Some(slot) => slot.push(tag, body),
            None => {
                self.stage(tag, body);
                self.publish();
            }
        }
    }

    /// Writes the body of the next message; returns its header.
    #[inline(always)]
    fn write(&self, tag: u32, body: &[u64]) -> u64 {
        assert!(self.has_room(), "a slot is free");
        assert!(tag < 1 << TAG_BITS, "a tag fits its bits");
        self.array.slot(self.next).fill(body);
        header(tag, self.next)
    }

    /// Writes one message as [`SlotProducer::push`] does; the consumer finds it once
    /// [`SlotProducer::publish`] was called.
    ///
    /// Invariant: [`SlotProducer::has_room`].
    #[inline(always)]
    pub fn stage(&mut self, tag: u32, body: &[u64]) {
        if self.staged == MOST_STAGED {
            self.publish();
        }
        let header = self.write(tag, body);
        if self.staged == 0 {
            self.held_header = header;
        } else {
            // Pairs with the acquire in `SlotConsumer::header`, which comes here only past the
            // first staged message.
            self.array.slot(self.next).header.store(header, Ordering::Release);
        }
        self.staged += 1;
        self.next += 1;
    }

    /// Messages staged and not published.
    #[inline(always)]
    #[must_use]
    pub fn staged(&self) -> u32 {
        self.staged
    }

    /// Publishes what is staged.
    #[inline(always)]
    pub fn publish(&mut self) {
        if self.staged > 0 {
            let first = self.next - u64::from(self.staged);
            let behind = u64::from(self.staged - 1) << (32 + TAG_BITS);
            // Pairs with the acquire in `SlotConsumer::header`.
            self.array.slot(first).header.store(behind | self.held_header, Ordering::Release);
            self.staged = 0;
        }
    }
}

/// A slot that is free and will stay so: a queue has one producer, and this borrows it.
#[derive(Debug)]
pub struct FreeSlot<'a>(&'a mut SlotProducer);

impl FreeSlot<'_> {
    /// Publishes one message, as [`SlotProducer::push`] does, without looking for room again.
    #[inline(always)]
    pub fn push(self, tag: u32, body: &[u64]) {
        let Self(producer) = self;
        assert!(tag < 1 << TAG_BITS, "a tag fits its bits");
        let slot = producer.array.slot(producer.next);
        slot.fill(body);
        let header = header(tag, producer.next);
        // Pairs with the acquire in `SlotConsumer::header`.
        slot.header.store(header, Ordering::Release);
        producer.next += 1;
    }

    /// As [`SlotProducer::address`].
    #[inline(always)]
    #[must_use]
    pub fn address(&self, ahead: u64) -> *const Slot {
        self.0.address(ahead)
    }
}

/// The receiving side.
#[derive(Debug)]
pub struct SlotConsumer {
    array: SlotArray,
    next: u64,
}

impl SlotConsumer {
    /// Takes the consuming side of `count` slots (a power of two).
    ///
    /// # Safety
    ///
    /// As for [`SlotProducer::new`], for consuming.
    #[must_use]
    pub unsafe fn new(slots: NonNull<Slot>, count: u32) -> Self {
        Self { array: SlotArray::new(slots, count), next: 0 }
    }

    /// Index of the next message: how many were consumed.
    #[must_use]
    pub fn next_index(&self) -> u64 {
        self.next
    }

    /// True when a message waits.
    #[inline(always)]
    #[must_use]
    pub fn ready(&self) -> bool {
        self.header().is_some()
    }

    /// What is beside the sequence of the waiting message, if there is one.
    #[inline(always)]
    fn header(&self) -> Option<u32> {
        // Pairs with the release in `SlotProducer::push`.
        let header = self.array.slot(self.next).header.load(Ordering::Acquire);
        #[expect(clippy::cast_possible_truncation, reason = "the halves are 32 bits each")]
        let (found, beside) = (header as u32, (header >> 32) as u32);
        (found == sequence(self.next)).then_some(beside)
    }

    /// The head of the waiting message, if there is one. Its body is taken by
    /// [`SlotConsumer::word`], each word once: what the producer scrawls over later is not seen.
    #[inline(always)]
    #[must_use]
    pub fn head(&self) -> Option<SlotHead> {
        let beside = self.header()?;
        Some(SlotHead { tag: beside & ((1 << TAG_BITS) - 1), behind: beside >> TAG_BITS })
    }

    /// A word of the waiting message's body, below [`BODY_WORDS`]. Meaningful once
    /// [`SlotConsumer::head`] found the message.
    #[inline(always)]
    #[must_use]
    pub fn word(&self, at: usize) -> u64 {
        self.array.slot(self.next).body[at].load(Ordering::Relaxed)
    }

    /// Copies the waiting message, if there is one, and leaves it.
    #[inline(always)]
    #[must_use]
    pub fn peek(&self) -> Option<SlotMessage> {
        let SlotHead { tag, behind } = self.head()?;
        Some(SlotMessage { tag, behind, body: std::array::from_fn(|at| self.word(at)) })
    }

    /// Address of the slot `ahead` messages after the waiting one, to prefetch it.
    #[inline(always)]
    #[must_use]
    pub fn address(&self, ahead: u64) -> *const Slot {
        std::ptr::from_ref(self.array.slot(self.next + ahead))
    }

    /// Goes on to the next message.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.next += 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// Steps of a property: fewer where Miri makes each of them.
    const MOST_STEPS: usize = if cfg!(miri) { 100 } else { 400 };

    struct Backing(Box<[Slot]>);

    impl Backing {
        fn new(count: usize) -> Self {
            Self((0..count).map(|_| Slot::empty()).collect())
        }

        fn sides(&self) -> (SlotProducer, SlotConsumer) {
            let slots = NonNull::from(&*self.0).cast::<Slot>();
            #[expect(clippy::cast_possible_truncation, reason = "tests use few slots")]
            let count = self.0.len() as u32;
            // SAFETY: the boxed slice outlives the test's use of both sides.
            let producer = unsafe { SlotProducer::new(slots, count) };
            // SAFETY: as above.
            (producer, unsafe { SlotConsumer::new(slots, count) })
        }
    }

    #[test]
    fn a_full_ring_has_no_room_until_the_consumer_is_heard() {
        let backing = Backing::new(4);
        let (mut producer, mut consumer) = backing.sides();
        for value in 0..4 {
            producer.push(1, &[value]);
        }
        assert!(!producer.has_room());
        assert!(producer.free().is_none(), "a slot that is not there is not given");
        assert_eq!(consumer.peek().unwrap().body[0], 0);
        consumer.advance();
        assert!(!producer.has_room());
        producer.consumed(consumer.next_index()).unwrap();
        assert!(producer.has_room());
    }

    #[test]
    fn an_implausible_index_is_refused() {
        let backing = Backing::new(4);
        let (mut producer, _consumer) = backing.sides();
        producer.push(1, &[]);
        assert!(producer.consumed(2).is_err());
        producer.consumed(1).unwrap();
        assert!(producer.consumed(0).is_err());
    }

    #[test]
    fn what_is_staged_is_seen_when_it_is_published_and_then_all_of_it() {
        let backing = Backing::new(4);
        let (mut producer, mut consumer) = backing.sides();
        for value in 0..3 {
            producer.stage(1, &[value]);
            assert!(!consumer.ready(), "nothing is seen before it is published");
            assert!(producer.free().is_none(), "no message overtakes those staged");
        }
        producer.publish();
        assert_eq!(producer.staged(), 0);
        for value in 0..3 {
            let message = consumer.peek().unwrap();
            assert_eq!((message.tag, message.body[0]), (1, value));
            assert_eq!(message.behind, if value == 0 { 2 } else { 0 });
            consumer.advance();
        }
        assert!(!consumer.ready());
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push,
        Stage,
        Publish,
        Take,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![Just(Step::Push), Just(Step::Stage), Just(Step::Publish), Just(Step::Take)]
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_and_in_order(steps in proptest::collection::vec(step(), 1..MOST_STEPS)) {
            let backing = Backing::new(8);
            let (mut producer, mut consumer) = backing.sides();
            let (mut model, mut staged) = (VecDeque::new(), VecDeque::new());
            let mut sent = 0_u64;
            for step in steps {
                match step {
                    Step::Push | Step::Stage if producer.has_room() => {
                        let (tag, body) = (u32::try_from(sent).unwrap(), [sent; BODY_WORDS]);
                        staged.push_back(sent);
                        sent += 1;
                        if matches!(step, Step::Push) {
                            producer.push(tag, &body);
                            model.append(&mut staged);
                        } else {
                            producer.stage(tag, &body);
                        }
                    }
                    Step::Push | Step::Stage => {}
                    Step::Publish => {
                        producer.publish();
                        model.append(&mut staged);
                    }
                    Step::Take => {
                        let expected = model.pop_front();
                        let found = consumer.peek();
                        prop_assert_eq!(found.map(|message| message.body), expected.map(|v| [v; BODY_WORDS]));
                        if found.is_some() {
                            consumer.advance();
                            producer.consumed(consumer.next_index()).unwrap();
                        }
                    }
                }
                prop_assert_eq!(producer.staged() as usize, staged.len());
            }
        }

        #[test]
        fn scribbled_slots_never_break_the_consumer(words in proptest::collection::vec(any::<u64>(), 64)) {
            let backing = Backing::new(8);
            for (place, word) in words.iter().enumerate() {
                let slot = &backing.0[place / 8];
                match place % 8 {
                    0 => slot.header.store(*word, Ordering::Relaxed),
                    i => slot.body[i - 1].store(*word, Ordering::Relaxed),
                }
            }
            let (_, mut consumer) = backing.sides();
            let mut seen = 0;
            while consumer.peek().is_some() && seen < 9 {
                consumer.advance();
                seen += 1;
            }
            prop_assert!(seen <= 8);
        }
    }

    #[test]
    fn two_threads_exchange_many_messages() {
        const ROUNDS: u64 = if cfg!(miri) { 200 } else { 20_000 };
        let backing = Backing::new(16);
        let (mut producer, mut consumer) = backing.sides();
        let heard = AtomicU64::new(0);
        /// Lets a test move a side to another thread.
        struct Moved<T>(T);
        // SAFETY: one thread at a time uses the side, and the slots are atomics.
        unsafe impl<T> Send for Moved<T> {}
        std::thread::scope(|scope| {
            let heard = &heard;
            let moved = Moved(&mut consumer);
            scope.spawn(move || {
                let consumer = { moved }.0;
                for expected in 0..ROUNDS {
                    let message = loop {
                        if let Some(message) = consumer.peek() {
                            break message;
                        }
                        std::thread::yield_now();
                    };
                    assert_eq!(message.body, [expected; BODY_WORDS]);
                    consumer.advance();
                    heard.store(consumer.next_index(), Ordering::Release);
                }
            });
            for value in 0..ROUNDS {
                while !producer.has_room() {
                    producer.consumed(heard.load(Ordering::Acquire)).unwrap();
                    std::thread::yield_now();
                }
                producer.push(7, &[value; BODY_WORDS]);
            }
        });
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::{Arc, AtomicU32, fence};

    /// Lets a model move a side to another thread.
    struct Moved<T>(T);
    // SAFETY: one thread at a time uses the side, and the slots are atomics.
    unsafe impl<T> Send for Moved<T> {}

    /// The wake-up handshake: the producer publishes, fences, reads the armed word; the consumer
    /// arms, fences, looks again. One of them always sees the other.
    #[test]
    fn no_wake_up_is_lost() {
        crate::sync::explore("slots", || {
            let slots: Arc<Vec<Slot>> = Arc::new((0..2).map(|_| Slot::empty()).collect());
            let armed = Arc::new(AtomicU32::new(0));
            let pointer = NonNull::from(&slots[0]);
            // SAFETY: the slots live in the `Arc` both threads hold.
            let mut producer = unsafe { SlotProducer::new(pointer, 2) };
            // SAFETY: as above.
            let consumer = unsafe { SlotConsumer::new(pointer, 2) };
            let theirs = (Arc::clone(&slots), Arc::clone(&armed));
            let moved = Moved(consumer);
            let sleeper = loom::thread::spawn(move || {
                let consumer = { moved }.0;
                theirs.1.store(1, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                consumer.peek()
            });
            producer.push(3, &[9; BODY_WORDS]);
            fence(Ordering::SeqCst);
            let rang = armed.load(Ordering::Relaxed) == 1;
            let seen = sleeper.join().unwrap();
            assert!(rang || seen.is_some(), "the message was neither seen nor announced");
            if let Some(message) = seen {
                assert_eq!(message.body, [9; BODY_WORDS]);
            }
        });
    }
    /// Who sees the first of several staged messages sees the others, whole.
    #[test]
    fn staged_messages_are_published_together() {
        crate::sync::explore("staged slots", || {
            let slots: Arc<Vec<Slot>> = Arc::new((0..2).map(|_| Slot::empty()).collect());
            let pointer = NonNull::from(&slots[0]);
            // SAFETY: the slots live in the `Arc` both threads hold.
            let mut producer = unsafe { SlotProducer::new(pointer, 2) };
            // SAFETY: as above.
            let consumer = unsafe { SlotConsumer::new(pointer, 2) };
            let theirs = Arc::clone(&slots);
            let moved = Moved(consumer);
            let receiver = loom::thread::spawn(move || {
                let _held = theirs;
                let mut consumer = { moved }.0;
                let Some(first) = consumer.peek() else { return };
                assert_eq!(first.body, [1; BODY_WORDS]);
                consumer.advance();
                assert_eq!(consumer.peek().map(|second| second.body), Some([2; BODY_WORDS]));
            });
            producer.stage(3, &[1; BODY_WORDS]);
            producer.stage(3, &[2; BODY_WORDS]);
            producer.publish();
            receiver.join().unwrap();
        });
    }
}
