//! Senders that are killed behind any of their instructions, and what those find that go on with their half.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::sync::atomic::Ordering;

use beeline_os::Mapping;
use beeline_sockets::ring::{Corrupt, DATA, FILLER};
use beeline_sockets::segment::{RINGS_AT, Segment};
use common::mapped_twice;
use common::races::say;
use common::steps::killed_behind;

const RING: usize = 4096;

/// Both ends of a connection, as the processes of one end share them.
struct Ends {
    sender: Segment,
    receiver: Segment,
}

impl Ends {
    /// Whose next message begins at `place` of the ring.
    fn at(place: usize) -> Self {
        let [one, other] = mapped_twice(RING);
        let (sender, receiver) = (Segment::take(one, 0).unwrap(), Segment::take(other, 1).unwrap());
        let ends = Self { sender, receiver };
        // A word or two with each header.
        while ends.place() != place {
            let left = (place + RING - ends.place()) % RING;
            let length = if left == 24 { 16 } else { 8 };
            assert_eq!(ends.push(&[9; 16][..length]), Ok(length));
            assert_eq!(ends.pop().unwrap().len(), length);
        }
        ends
    }

    fn place(&self) -> usize {
        usize::try_from(self.sender.producer().tail()).unwrap() % RING
    }

    fn push(&self, bytes: &[u8]) -> Result<usize, Corrupt> {
        // SAFETY: a slice is readable, and no thread beside this one sends.
        unsafe { self.sender.producer().push(bytes.as_ptr(), bytes.len()) }
    }

    fn pop(&self) -> Result<Vec<u8>, Corrupt> {
        let mut bytes = vec![0; RING];
        let consumer = self.receiver.consumer();
        // SAFETY: a slice is writable, and no thread beside this one receives.
        let count = unsafe { consumer.pop(bytes.as_mut_ptr(), RING, 0, false) }?;
        bytes.truncate(count);
        consumer.give_back(true);
        Ok(bytes)
    }

    fn memory(&self) -> &Mapping {
        self.sender.mapping()
    }

    fn is_as(&self, picture: &[u8]) -> bool {
        let bytes = self.memory().base().as_ptr();
        // SAFETY: mapped for so many bytes; the process that wrote them stands still.
        (unsafe { std::slice::from_raw_parts(bytes, picture.len()) }) == picture
    }

    fn picture(&self) -> Vec<u8> {
        let bytes = self.memory().base().as_ptr();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(bytes, self.memory().length_bytes()) }.to_vec()
    }

    fn restore(&self, picture: &[u8]) {
        // SAFETY: as long as the mapping, which no reference to plain memory leads into.
        unsafe { picture.as_ptr().copy_to(self.memory().base().as_ptr(), picture.len()) };
    }

    /// The segment behind each store that a sender of `length` bytes makes; `None`: there are no single steps here.
    fn deaths(&self, length: usize) -> Option<Vec<Vec<u8>>> {
        let mut pictures = vec![self.picture()];
        let look = || {
            if !pictures.last().is_some_and(|last| self.is_as(last)) {
                pictures.push(self.picture());
            }
            false
        };
        let bytes = vec![1; length];
        killed_behind(look, || _ = self.push(&bytes))?;
        Some(pictures)
    }

    /// What the receiver could see stays, once, and what is sent by others afterwards comes behind it; also where the
    /// receiver has read the first part by then.
    fn goes_on(&self, picture: &[u8]) -> bool {
        [false, true].into_iter().all(|reads_before| {
            self.restore(picture);
            let (read, wanted) = self.stream(reads_before);
            read == Ok(wanted)
        })
    }

    /// What is read behind the death of a sender of ones, and what should be.
    fn stream(&self, reads_before: bool) -> (Result<Vec<u8>, Corrupt>, Vec<u8>) {
        let seen = self.receiver.consumer().available(usize::MAX).unwrap();
        let mut wanted = vec![1; seen];
        let mut read = Vec::new();
        let mut go_on = || {
            if reads_before {
                read.extend(self.pop()?);
            }
            // Of these senders only the first finds what the dead one left.
            for byte in 2..5 {
                let sent = self.push(&[byte; 8])?;
                wanted.extend(&[byte; 8][..sent]);
                read.extend(self.pop()?);
            }
            Ok(())
        };
        let outcome = go_on();
        assert!(outcome.is_err() || wanted.len() > seen, "the ring has no room for ever");
        (outcome.map(|()| read), wanted)
    }
}

/// Places of the ring and lengths with which a message is whole, cut in two, behind a filler, of several pieces, and
/// as long as there is room.
const CASES: [(usize, usize); 7] = [
    (0, 8),
    (RING - 64, 40),
    (RING - 64, 100),
    (RING - 16, 8),
    (RING - 8, 8),
    (RING - 64, 2000),
    (RING - 8, RING),
];

#[test]
fn a_sender_that_is_killed_behind_any_instruction_loses_nothing_that_was_seen() {
    let (mut deaths, mut seen) = (0, [0, 0]);
    for (place, length) in CASES {
        let ends = Ends::at(place);
        let Some(pictures) = ends.deaths(length) else {
            return say("a_sender_that_is_killed ... skipped: no single steps here");
        };
        for (index, picture) in pictures.iter().enumerate() {
            assert!(ends.goes_on(picture), "{length} bytes at {place}, behind store {index}");
            ends.restore(picture);
            let anything = ends.receiver.consumer().available(1).unwrap() > 0;
            seen[usize::from(anything)] += 1;
        }
        deaths += pictures.len();
        // The check is one: with `bound` as the tail is, what was seen is written over.
        let planted = pictures.iter().any(|picture| {
            ends.restore(picture);
            let sending = &ends.sender.own().sending;
            let tail = sending.tail.load(Ordering::Relaxed);
            sending.bound.store(tail, Ordering::Relaxed);
            !ends.goes_on(&ends.picture())
        });
        assert!(planted, "{length} bytes at {place}: the planted fault was not seen");
    }
    say(&format!("ran: {deaths} deaths, {seen:?} before and after the receiver saw a part"));
    assert!(seen.into_iter().all(|count| count > CASES.len()), "{seen:?}");
}

/// The receiver polls the line of the header at the tail: a sender looks there only where one was killed.
#[test]
fn what_stands_at_the_tail_is_looked_at_only_where_a_sender_was_killed() {
    let ends = Ends::at(0);
    for header in [u64::MAX, u64::from(FILLER) << 32, u64::from(DATA) << 32 | 8] {
        let place = RINGS_AT + ends.place();
        // SAFETY: within the ring.
        let at = unsafe { ends.memory().base().add(place) };
        // SAFETY: aligned as the ring's places are; no other process reaches it at this moment.
        unsafe { at.cast::<u64>().write(header) };
        assert_eq!(ends.push(&[3; 8]), Ok(8));
        assert_eq!(ends.pop(), Ok(vec![3; 8]));
    }
}
