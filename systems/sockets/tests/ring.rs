//! The ring against a queue of bytes, between two threads, and against a hostile other side.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::multiple_unsafe_ops_per_block)]

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_sockets::segment::{RINGS_AT, Segment, length_bytes};
use proptest::prelude::*;

const RING: usize = 4096;

/// Both ends of one segment.
fn ends(ring_bytes: usize) -> (Segment, Segment) {
    let length = length_bytes(ring_bytes);
    let one = Mapping::memfd("test", length).unwrap();
    Segment::format(&one).unwrap();
    let fd = one.descriptor().unwrap().try_clone().unwrap();
    let other = Mapping::shared(fd, length, Protection::ReadWrite).unwrap();
    (Segment::take(one, 0).unwrap(), Segment::take(other, 1).unwrap())
}

fn push(end: &Segment, bytes: &[u8]) -> usize {
    unsafe { end.producer().push(bytes.as_ptr(), bytes.len()).unwrap() }
}

fn pop(end: &Segment, room: usize, peek: bool) -> Vec<u8> {
    let mut bytes = vec![0; room];
    let count = unsafe { end.consumer().pop(bytes.as_mut_ptr(), room, 0, peek).unwrap() };
    bytes.truncate(count);
    bytes
}

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Pop(usize),
    Peek(usize),
    GiveBack(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_usize..3000).prop_map(Step::Push),
        (1_usize..20).prop_map(Step::Push),
        (0_usize..3000).prop_map(Step::Pop),
        (0_usize..300).prop_map(Step::Peek),
        any::<bool>().prop_map(Step::GiveBack),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_ring_is_a_queue_of_bytes(steps in prop::collection::vec(step(), 1..200)) {
        let (sender, receiver) = ends(RING);
        let mut model = VecDeque::new();
        let mut next = 0_u8;
        for step in steps {
            match step {
                Step::Push(length) => {
                    let bytes: Vec<u8> =
                        (0..length).map(|i| next.wrapping_add(i as u8)).collect();
                    let sent = push(&sender, &bytes);
                    next = next.wrapping_add(sent as u8);
                    model.extend(&bytes[..sent]);
                }
                Step::Pop(room) => {
                    let bytes = pop(&receiver, room, false);
                    // All that fits comes.
                    prop_assert_eq!(bytes.len(), room.min(model.len()));
                    let expected: Vec<u8> = model.drain(..bytes.len()).collect();
                    prop_assert_eq!(bytes, expected);
                }
                Step::Peek(room) => {
                    let bytes = pop(&receiver, room, true);
                    let expected: Vec<u8> = model.iter().take(room).copied().collect();
                    prop_assert_eq!(bytes, expected);
                }
                Step::GiveBack(all) => {
                    receiver.consumer().give_back(all);
                }
            }
            prop_assert_eq!(receiver.consumer().available(usize::MAX).unwrap(), model.len());
            prop_assert_eq!(receiver.consumer().is_ready(), !model.is_empty());
        }
        // Whoever has read everything leaves room for the sender, without being asked.
        let rest = pop(&receiver, RING, false);
        prop_assert_eq!(rest.len(), model.len());
        receiver.consumer().give_back(false);
        prop_assert!(sender.producer().has_room().unwrap());
    }

    #[test]
    fn a_hostile_sender_yields_bytes_or_an_error_and_nothing_else(
        words in prop::collection::vec(any::<u64>(), 1..64),
        small in any::<bool>(),
        rooms in prop::collection::vec(1_usize..5000, 1..20),
    ) {
        let (scribbled, receiver) = scribbled_ring();
        let ring = unsafe { scribbled.base().as_ptr().add(RINGS_AT) };
        for (place, word) in words.iter().enumerate() {
            // Half the cases look like headers.
            let word = if small { (1 << 32) | (word % 5000) } else { *word };
            unsafe { ring.add(place * 8).cast::<u64>().write_unaligned(word) };
        }
        for room in rooms {
            let mut bytes = vec![0; room];
            let taken = unsafe { receiver.consumer().pop(bytes.as_mut_ptr(), room, 0, false) };
            if let Ok(taken) = taken {
                prop_assert!(taken <= room);
            }
            receiver.consumer().give_back(true);
            let _ = receiver.consumer().available(1 << 20);
            let _ = receiver.consumer().is_ready();
        }
    }
}

/// A segment as a hostile end 0 has it, and end 1, which reads what that writes.
fn scribbled_ring() -> (Mapping, Segment) {
    let length = length_bytes(RING);
    let one = Mapping::memfd("test", length).unwrap();
    Segment::format(&one).unwrap();
    let fd = one.descriptor().unwrap().try_clone().unwrap();
    let other = Mapping::shared(fd, length, Protection::ReadWrite).unwrap();
    (one, Segment::take(other, 1).unwrap())
}

#[test]
fn forged_credits_end_the_connection() {
    let (sender, receiver) = ends(RING);
    push(&sender, b"hello");
    for forged in [1_u64 << 40, 3, u64::MAX] {
        receiver.own().credits.consumed.store(forged, Ordering::Relaxed);
        let mut full = Ok(0);
        for _ in 0..100 {
            full = unsafe { sender.producer().push([7; 100].as_ptr(), 100) };
            if full.is_err() {
                break;
            }
        }
        assert!(full.is_err(), "credits of {forged} were believed");
        receiver.own().credits.consumed.store(0, Ordering::Relaxed);
    }
}

#[test]
fn two_threads_move_a_stream_whole_and_in_order() {
    const TOTAL: usize = 4 << 20;
    let (sender, receiver) = ends(RING);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut sent, mut size) = (0_usize, 1_usize);
            while sent < TOTAL {
                size = (size * 31 + 7) % 1500 + 1;
                let bytes: Vec<u8> =
                    (sent..(sent + size).min(TOTAL)).map(|i| (i % 251) as u8).collect();
                let pushed = push(&sender, &bytes);
                sent += pushed;
                if pushed == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let mut read = 0;
        while read < TOTAL {
            let bytes = pop(&receiver, 777, false);
            if bytes.is_empty() {
                std::thread::yield_now();
            }
            for byte in bytes {
                assert_eq!(byte, (read % 251) as u8, "at {read}");
                read += 1;
            }
            receiver.consumer().give_back(false);
        }
    });
}

/// Lengths with which a ring of [`RING`] bytes is cut, filled, and left alone.
const CUTS: [usize; 6] = [1, 8, 100, 500, 2000, 4000];

#[test]
fn what_a_killed_sender_published_is_not_written_over() {
    for length in CUTS {
        let (sender, receiver) = ends(RING);
        let tail = || sender.own().sending.tail.load(Ordering::Relaxed);
        // From every place of the ring on.
        for round in 0..RING / 8 {
            let before = tail();
            let published = push(&sender, &vec![1; length]);
            assert!(published > 0);
            // Killed between the header's store and the tail's.
            sender.own().sending.tail.store(before, Ordering::Relaxed);
            let more = push(&sender, &[2; 8]);
            let read = pop(&receiver, RING, false);
            let (first, second) = read.split_at(published);
            assert!(first.iter().all(|byte| *byte == 1), "{length}, {round}");
            assert_eq!(second, &[2; 8][..more], "{length}, {round}");
            receiver.consumer().give_back(true);
        }
    }
}

#[test]
fn what_a_killed_reader_took_is_read_from_its_beginning() {
    let (sender, receiver) = ends(RING);
    let own = &receiver.own().receiving;
    for round in 0..RING as u64 {
        assert_eq!(push(&sender, &[1; 16]) + push(&sender, &[2; 24]), 40);
        assert_eq!(pop(&receiver, 7, false), [1; 7]);
        let (head, offset) = (own.head.load(Ordering::Relaxed), own.offset.load(Ordering::Relaxed));
        let dead = pop(&receiver, 9 + 5, false);
        assert_eq!(dead, [&[1; 9][..], &[2; 5]].concat());
        let next = own.head.load(Ordering::Relaxed);
        match round % 2 {
            // Killed before it moved on: all of it comes again, and nothing of what another had.
            0 => {
                own.head.store(head, Ordering::Relaxed);
                own.offset.store(offset, Ordering::Relaxed);
                assert_eq!(pop(&receiver, RING, false), [&[1; 9][..], &[2; 24]].concat());
            }
            // Killed when it had moved on, and had not said how far.
            _ => {
                own.offset.store(offset, Ordering::Relaxed);
                assert_ne!(next, head);
                assert_eq!(pop(&receiver, RING, false), [2; 24]);
            }
        }
        receiver.consumer().give_back(true);
    }
}
