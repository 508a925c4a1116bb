//! Large sends, taken from the sender's memory: both ends in this process.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use beeline_sockets::kernel::Errno;
use beeline_sockets::offer::{DEFAULT_LEAST, TALLY};
use beeline_sockets::segment::Segment;
use beeline_sockets::{connection, receive, send, table};
use common::races::close;
use common::{accelerated_by, begin, mapped_twice, piece};

/// Counts are the process's: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    begin();
    ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn taken() -> u64 {
    TALLY.taken.load(Ordering::Relaxed)
}

fn of(stream: &TcpStream) -> &'static connection::Connection {
    table::ours(stream.as_raw_fd()).unwrap()
}

fn put(stream: &TcpStream, bytes: &[u8], flags: i32) -> Result<usize, Errno> {
    let pieces = piece(bytes.as_ptr().cast_mut(), bytes.len());
    unsafe { send::send(stream.as_raw_fd(), of(stream), &pieces, flags) }
}

fn get(stream: &TcpStream, bytes: &mut [u8], flags: i32) -> Result<usize, Errno> {
    let pieces = piece(bytes.as_mut_ptr(), bytes.len());
    unsafe { receive::receive(stream.as_raw_fd(), of(stream), &pieces, flags) }
}

/// A byte of the stream, by its place.
fn byte(place: u64) -> u8 {
    (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn fill(bytes: &mut [u8], from: u64) {
    bytes.iter_mut().zip(from..).for_each(|(b, place)| *b = byte(place));
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % bound
    }
}

/// Sends the stream in random sends, overwriting the buffer after each; reads it in random reads of
/// at least `least` bytes of room.
fn stream(seed: u64, total: u64, least: usize) {
    let [one, other] = accelerated_by(256 << 10);
    let sender = std::thread::spawn(move || {
        let mut random = Random(seed);
        let mut buffer = vec![0_u8; 1 << 20];
        let mut sent = 0;
        while sent < total {
            let length = if random.below(3) == 0 { 1 + random.below(5000) } else { 1 << 20 };
            let length = (1 + random.below(length)).min((total - sent) as usize);
            let bytes = &mut buffer[..length];
            fill(bytes, sent);
            assert_eq!(put(&one, bytes, 0), Ok(length));
            // What is in the buffer later is nobody's to see.
            bytes.fill(0xEE);
            sent += length as u64;
        }
        one
    });
    let mut random = Random(seed ^ 7);
    let mut buffer = vec![0_u8; 2 << 20];
    let mut read = 0;
    while read < total {
        let room = least + random.below((1 << 20) - least);
        let flags = if random.below(5) == 0 { libc::MSG_PEEK } else { 0 };
        let count = get(&other, &mut buffer[..room], flags).unwrap();
        assert!(count > 0, "the stream ended at {read} of {total}");
        for (place, &found) in (read..).zip(&buffer[..count]) {
            assert_eq!(found, byte(place), "byte {place} of {total}, seed {seed}");
        }
        if flags == 0 {
            read += count as u64;
        }
        if random.below(40) == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
    let one = sender.join().unwrap();
    assert_eq!(get(&other, &mut buffer, libc::MSG_DONTWAIT), Err(Errno(libc::EAGAIN)));
    close([one, other]);
}

#[test]
fn every_byte_arrives_once_and_as_it_was_when_it_was_sent() {
    let _alone = alone();
    let before = taken();
    for seed in 0..4 {
        stream(seed, 64 << 20, 100_000);
    }
    // How much depends on who else uses the processors.
    for seed in 4..40 {
        if taken() > before {
            return;
        }
        stream(seed, 16 << 20, 100_000);
    }
    panic!("nothing was taken from the sender's memory");
}

#[test]
fn a_reader_with_little_room_has_its_bytes_through_the_ring() {
    let _alone = alone();
    let before = taken();
    let [one, other] = accelerated_by(256 << 10);
    let mut bytes = vec![0; 400_000];
    fill(&mut bytes, 0);
    let copy = bytes.clone();
    let sender = std::thread::spawn(move || {
        assert_eq!(put(&one, &copy, 0), Ok(copy.len()));
        one
    });
    let mut all = Vec::new();
    let mut buffer = [0; 1000];
    while all.len() < bytes.len() {
        let count = get(&other, &mut buffer, 0).unwrap();
        all.extend_from_slice(&buffer[..count]);
    }
    assert_eq!(all, bytes);
    assert_eq!(taken(), before);
    close([sender.join().unwrap(), other]);
}

#[test]
fn a_sender_whose_reader_is_away_goes_on_as_without_offers() {
    let _alone = alone();
    let [one, other] = accelerated_by(4 << 20);
    let mut bytes = vec![0; DEFAULT_LEAST * 2];
    fill(&mut bytes, 0);
    // Fits the ring: returns though nobody reads. A second one that does not wait offers nothing.
    assert_eq!(put(&one, &bytes, 0), Ok(bytes.len()));
    assert_eq!(put(&one, &bytes, libc::MSG_DONTWAIT), Ok(bytes.len()));
    let sent = bytes.clone();
    bytes.fill(0xEE);
    let mut all = vec![0; sent.len()];
    for _ in 0..2 {
        assert_eq!(get(&other, &mut all, libc::MSG_WAITALL), Ok(sent.len()));
        assert_eq!(all, sent);
    }
    close([one, other]);
}

#[test]
fn a_peek_sees_an_offer_and_leaves_it() {
    let _alone = alone();
    // Room for all of it, should the offer be withdrawn before we look.
    let [one, other] = accelerated_by(1 << 20);
    let mut bytes = vec![0; DEFAULT_LEAST];
    fill(&mut bytes, 3);
    let sent = bytes.clone();
    let sender = std::thread::spawn(move || {
        assert_eq!(put(&one, &bytes, 0), Ok(bytes.len()));
        one
    });
    let mut all = vec![0; sent.len()];
    for flags in [libc::MSG_PEEK | libc::MSG_WAITALL, libc::MSG_PEEK, libc::MSG_WAITALL] {
        all.fill(0);
        let count = get(&other, &mut all, flags).unwrap();
        // A peek that waits for no more may meet the first messages of a withdrawn one.
        assert!(count == sent.len() || flags == libc::MSG_PEEK && count > 0, "{count}, {flags}");
        assert_eq!(all[..count], sent[..count]);
    }
    close([sender.join().unwrap(), other]);
}

/// An offer as a hostile sender would write it, and what reading it yields.
fn forged(offer: [u64; 5], word: u64) -> Result<usize, Errno> {
    let streams = common::pair();
    let [near, far] = mapped_twice(256 << 10);
    let hostile = Segment::take(near, 0).unwrap();
    let fd = streams[1].as_raw_fd();
    let reader = connection::Connection::new(Segment::take(far, 1).unwrap(), fd);
    assert!(reader.join());
    hostile.own().signs.switched_at.store(1, Ordering::Release);
    hostile.own().offer.word.store(word, Ordering::Relaxed);
    assert_eq!(hostile.producer().push_offer(offer), Ok(true));
    let buffer = beeline_os::Mapping::anonymous(1 << 20).unwrap();
    let pieces = piece(buffer.base().as_ptr(), 1 << 20);
    let outcome = unsafe { receive::receive(fd, &reader, &pieces, libc::MSG_DONTWAIT) };
    // Who takes is there for as long as the other's memory lets it: the connection's own stays.
    assert!(outcome.is_err() || reader.sleepers.stamp() != 0);
    outcome
}

/// The namespace that offers of this process name.
fn space() -> u64 {
    std::os::linux::fs::MetadataExt::st_ino(&std::fs::metadata("/proc/self/ns/pid").unwrap())
}

/// A child that has this process's memory as it is, and does nothing.
struct Copy(i32);

impl Copy {
    fn start() -> Self {
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0);
        Self(child)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

#[test]
fn a_peer_that_offers_the_readers_own_memory_has_it_read_nothing() {
    let _alone = alone();
    let secret = beeline_os::Mapping::anonymous(200_000).unwrap();
    let place = secret.base().addr().get() as u64;
    let before = taken();
    let mine = [place, 200_000, 5, u64::from(std::process::id()), space()];
    assert_eq!(forged(mine, 5 << 40 | 1), Err(Errno(libc::EAGAIN)));
    assert_eq!(taken(), before);
    // The same is an offer where this process makes it: both ends are here.
    if beeline_sockets::offer::takes_offers() {
        let [one, other] = accelerated_by(256 << 10);
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0_u8; 1 << 20];
            while get(&other, &mut bytes, 0).unwrap() > 0 {}
            connection::closing(other.as_raw_fd());
        });
        let (bytes, began) = (vec![1_u8; 1 << 20], Instant::now());
        while taken() == before {
            assert!(began.elapsed() < Duration::from_secs(20), "no offer was ever taken");
            assert_eq!(put(&one, &bytes, 0), Ok(1 << 20));
        }
        connection::closing(one.as_raw_fd());
        drop(one);
        reader.join().unwrap();
    }
}

#[test]
fn a_forged_offer_yields_nothing_and_a_senseless_one_ends_the_connection() {
    let _alone = alone();
    let bytes = vec![7_u8; 200_000];
    let place = bytes.as_ptr().addr() as u64;
    let sender = Copy::start();
    let (me, space) = (u64::try_from(sender.0).unwrap(), space());
    let open = |number: u64| number << 40 | 1;
    let honest = [place, 200_000, 5, me, space];
    let nothing = Err(Errno(libc::EAGAIN));
    // Where the kernel lets this process read its child alone, a peer could not: nobody takes.
    let taken = if beeline_sockets::offer::reads_others() { Ok(200_000) } else { nothing };
    assert_eq!(forged(honest, open(5)), taken);
    // Another number than the word's; no such process; another namespace; no memory there.
    assert_eq!(forged(honest, open(6)), nothing);
    assert_eq!(forged([place, 200_000, 5, 0x7FFF_FFF0, space], open(5)), nothing);
    assert_eq!(forged([place, 200_000, 5, me, space + 1], open(5)), nothing);
    assert_eq!(forged([8, 200_000, 5, me, space], open(5)), nothing);
    // Done and withdrawn before it was seen.
    assert_eq!(forged(honest, open(5) + 2), nothing);
    assert_eq!(forged(honest, open(5) - 1), nothing);
    // Longer than any, more taken than there is, a number beyond all: nonsense.
    let reset = Err(Errno(libc::ECONNRESET));
    assert_eq!(forged([place, u64::MAX, 5, me, space], open(5)), reset);
    assert_eq!(forged(honest, open(5) | 200_001 << 2), reset);
    assert_eq!(forged([place, 200_000, 1 << 24, me, space], open(0)), reset);
    assert_eq!(forged([place, 200_000, 5, u64::MAX, space], open(5)), reset);
    drop(sender);
}

/// What comes of `sends`, to which sending is lent, while `hostile` does what it likes with the reader's end.
fn beside<T>(
    hostile: impl Fn(&Segment) + Sync,
    sends: impl FnOnce(&dyn Fn() -> Result<usize, Errno>, &connection::Connection) -> T,
) -> T {
    let streams = common::pair();
    let [near, far] = mapped_twice(64 << 20);
    let fd = streams[0].as_raw_fd();
    let sender = connection::Connection::new(Segment::take(near, 0).unwrap(), fd);
    let reader = Segment::take(far, 1).unwrap();
    reader.own().signs.takes_offers.store(1, Ordering::Relaxed);
    reader.state().store(beeline_sockets::segment::STATE_PAIRED, Ordering::Release);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                hostile(&reader);
                std::thread::yield_now();
            }
        });
        let bytes = vec![1_u8; DEFAULT_LEAST];
        let pieces = piece(bytes.as_ptr().cast_mut(), bytes.len());
        let told = sends(&|| unsafe { send::send(fd, &sender, &pieces, 0) }, &sender);
        over.store(true, Ordering::Relaxed);
        told
    })
}

#[test]
fn a_reader_that_claims_more_than_was_offered_loses_the_connection() {
    let _alone = alone();
    let lies = |reader: &Segment| {
        let word = &reader.other().offer.word;
        if word.load(Ordering::Acquire) & 3 == 1 {
            word.fetch_or(0x3FFF_FFFF << 2, Ordering::AcqRel);
        }
    };
    // An offer may be withdrawn before the liar sees it: then the ring, far from full, took it.
    let told = beside(lies, |send, _| (0..200).find_map(|_| send().err()));
    assert_eq!(told, Some(Errno(libc::ECONNRESET)));
}

#[test]
fn a_reader_that_takes_a_byte_now_and_then_keeps_no_send_for_as_long_as_it_likes() {
    let _alone = alone();
    let bytes = AtomicU32::new(0);
    let takes_little = |reader: &Segment| {
        let word = &reader.other().offer.word;
        let now = word.load(Ordering::Acquire);
        if !matches!(now & 3, 1 | 2) {
            return;
        }
        // Busy with one byte more; at last it has enough of it.
        let enough = bytes.load(Ordering::Relaxed) >= 200;
        let next = if enough { now & !3 } else { (now & !3 | 2) + (1 << 2) };
        if word.compare_exchange(now, next, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            bytes.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    // An offer may be withdrawn before it is seen, and the next ones are rare then.
    let stamp = (0..20).find_map(|_| {
        beside(takes_little, |send, sender| {
            let seen = |_| send() != Ok(DEFAULT_LEAST) || bytes.load(Ordering::Relaxed) > 0;
            (0..100).any(seen).then(|| sender.sleepers.stamp())
        })
    });
    assert!(bytes.into_inner() < 200, "kept until the reader had enough of it");
    // Whoever closed it meanwhile would have given its memory back otherwise.
    assert_ne!(stamp.expect("no offer was seen"), 0);
}

#[test]
fn an_offer_does_not_outlive_the_program_and_one_that_stays_offers_again() {
    let _alone = alone();
    let [one, other] = accelerated_by(256 << 10);
    let word = &of(&one).segment.own().offer.word;
    // Another thread's, that a reader is at.
    for state in [1, 2] {
        word.store(9 << 40 | 70 << 2 | state, Ordering::Relaxed);
        beeline_sockets::offer::leaving();
        assert_eq!(word.load(Ordering::Relaxed), 9 << 40 | 70 << 2, "what was taken stays taken");
    }
    let reader = std::thread::spawn(move || {
        let mut bytes = vec![0_u8; 1 << 20];
        while get(&other, &mut bytes, 0).unwrap() > 0 {}
        connection::closing(other.as_raw_fd());
    });
    let (bytes, before) = (vec![1_u8; 1 << 20], taken());
    (0..8).for_each(|_| assert_eq!(put(&one, &bytes, 0), Ok(1 << 20)));
    assert_eq!(taken(), before, "none is made by a program that is about to be another");
    beeline_sockets::offer::stayed();
    let began = Instant::now();
    while taken() == before {
        assert!(began.elapsed() < Duration::from_secs(20), "no offer was ever taken");
        assert_eq!(put(&one, &bytes, 0), Ok(1 << 20));
    }
    connection::closing(one.as_raw_fd());
    drop(one);
    reader.join().unwrap();
}

#[test]
fn bytes_behind_a_withdrawn_offer_are_counted_and_an_offer_alone_is_none_unread() {
    let _alone = alone();
    let [one, other] = accelerated_by(256 << 10);
    let sends = of(&one);
    let withdrawn = [8, 200_000, 0, 1, 0];
    assert_eq!(put(&one, b"abc", 0), Ok(3));
    for _ in 0..2 {
        assert_eq!(sends.segment.producer().push_offer(withdrawn), Ok(true));
    }
    assert_eq!(put(&one, b"defg", 0), Ok(4));
    assert_eq!(receive::available(of(&other), 100), Ok(7));
    assert_eq!(get(&other, &mut [0; 3], 0), Ok(3));
    assert_eq!(receive::available(of(&other), 100), Ok(4));
    assert_eq!(get(&other, &mut [0; 100], 0), Ok(4));
    // What stands there open counts as what it still has.
    let word = &sends.segment.own().offer.word;
    word.store(1 << 40 | 50 << 2 | 1, Ordering::Relaxed);
    assert_eq!(sends.segment.producer().push_offer([8, 200_000, 1, 1, 0]), Ok(true));
    assert_eq!(receive::available(of(&other), 1 << 20), Ok(199_950));
    word.store(1 << 40, Ordering::Relaxed);
    assert_eq!(receive::available(of(&other), 1 << 20), Ok(0));
    connection::closing(other.as_raw_fd());
    let closed = sends.segment.other().signs.closed.load(Ordering::Acquire);
    assert_eq!(closed, beeline_sockets::segment::CLOSED_CLEANLY);
    close([one, other]);
}
