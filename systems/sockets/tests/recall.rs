//! The way back: a connection called back to the kernel's stream in the middle of what it does loses no
//! byte, no wake-up and no end.
//!
//! `BEELINE_WAKE_SECONDS=n` for each random test (else one; 60 with `BEELINE_DEEP=1`), `BEELINE_SEED=n`.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::os::fd::{AsRawFd as _, IntoRawFd as _, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets::connection;
use beeline_sockets::holder::name_of;
use beeline_sockets::kernel::{self, Errno};
use beeline_sockets::recall::NotRecalled;
use beeline_sockets::{epoll, poll, table};
use common::races::{Chance, close, give, number, pair, take, time};
use common::returns::{back, back_once, byte, of, switched};

/// How an end waits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Waits {
    Blocking,
    Poll,
    Level,
    Edge,
}

const ALL: [Waits; 4] = [Waits::Blocking, Waits::Poll, Waits::Level, Waits::Edge];

/// Something of `wanted` (poll's bits) can be done with `fd`, as a program would wait for it.
fn wait(waits: Waits, set: RawFd, fd: RawFd, wanted: i16) {
    match waits {
        Waits::Blocking => {}
        Waits::Poll => {
            let mut entry = [libc::pollfd { fd, events: wanted, revents: 0 }];
            let told = poll::poll(&mut entry, Some(Duration::from_secs(20)), None).unwrap();
            assert_eq!(told, Ok(1), "nothing to do for 20 s: a wake-up was lost");
        }
        Waits::Level | Waits::Edge => {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 2];
            let told = epoll::wait(set, &mut events, Some(Duration::from_secs(20)), None);
            assert!(told.unwrap().unwrap() > 0, "nothing to do for 20 s: a wake-up was lost");
        }
    }
}

fn set_of(waits: Waits, fd: RawFd, events: i32) -> RawFd {
    let set = kernel::epoll_set().unwrap();
    let edge = if waits == Waits::Edge { libc::EPOLLET } else { 0 };
    let event = libc::epoll_event { events: (events | edge) as u32, u64: 1 };
    if matches!(waits, Waits::Level | Waits::Edge) {
        epoll::control(set, libc::EPOLL_CTL_ADD, fd, Some(event)).unwrap().unwrap();
    }
    set
}

/// `ends` is what the thread that sends counts just before it shuts its half down.
fn sender(fd: RawFd, waits: Waits, seed: u64, total: u64, ends: &AtomicU32) {
    let set = set_of(waits, fd, libc::EPOLLOUT);
    let flags = if waits == Waits::Blocking { 0 } else { libc::MSG_DONTWAIT };
    let flags = flags | libc::MSG_NOSIGNAL;
    let (mut chance, mut sent) = (Chance(seed | 1), 0);
    while sent < total {
        let most = if chance.below(8) == 0 { 6000 } else { 64 };
        let length = (1 + chance.below(most)).min(total - sent);
        let bytes: Vec<u8> = (sent..sent + length).map(|place| byte(seed, place)).collect();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match give(fd, rest, flags) {
                Ok(count) => rest = &rest[count..],
                Err(Errno(libc::EAGAIN)) => wait(waits, set, fd, libc::POLLOUT),
                Err(error) => panic!("{error:?} after {sent}"),
            }
        }
        sent += length;
        chance.idle();
    }
    ends.fetch_add(1, Ordering::SeqCst);
    connection::shutdown(fd, connection::find(fd).unwrap(), libc::SHUT_WR).unwrap();
    kernel::close(set).unwrap();
}

fn receiver(fd: RawFd, waits: Waits, seed: u64, total: u64) {
    let set = set_of(waits, fd, libc::EPOLLIN);
    let flags = if waits == Waits::Blocking { 0 } else { libc::MSG_DONTWAIT };
    let (mut chance, mut read, mut bytes) = (Chance((seed * 3) | 1), 0, [0; 5000]);
    loop {
        let most = if chance.below(8) == 0 { 5000 } else { 100 };
        let most = 1 + chance.below(most) as usize;
        let peek = if chance.below(16) == 0 { libc::MSG_PEEK } else { 0 };
        match take(fd, &mut bytes[..most], flags | peek) {
            Ok(0) => break,
            Ok(count) => {
                for (at, &found) in bytes[..count].iter().enumerate() {
                    let place = read + at as u64;
                    assert_eq!(found, byte(seed, place), "at {place} of {total}, {waits:?}");
                }
                read += if peek == 0 { count as u64 } else { 0 };
            }
            Err(Errno(libc::EAGAIN)) => wait(waits, set, fd, libc::POLLIN),
            Err(error) => panic!("{error:?} after {read}"),
        }
        chance.idle();
    }
    assert_eq!(read, total);
    kernel::close(set).unwrap();
}

#[test]
fn streams_called_back_at_any_moment_are_whole_however_their_ends_wait() {
    let (mut chance, begun, mut rounds, mut returned) =
        (Chance(number("BEELINE_SEED").unwrap_or(1).max(1)), Instant::now(), 0, 0);
    while begun.elapsed() < time() || returned < 20 {
        assert!(begun.elapsed() < time() + Duration::from_secs(60), "{returned} of {rounds}");
        let streams = pair();
        let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
        let ends = AtomicU32::new(0);
        let (seed, total) = (chance.below(1 << 40) + 1, 1 + chance.below(60_000));
        let ways: [Waits; 4] = std::array::from_fn(|_| ALL[chance.below(4) as usize]);
        let pause = Duration::from_micros(chance.below(3000));
        let (done, ended) = std::thread::scope(|scope| {
            scope.spawn(|| sender(one, ways[0], seed, total, &ends));
            scope.spawn(|| receiver(other, ways[1], seed, total));
            scope.spawn(|| sender(other, ways[2], seed + 1, total / 2, &ends));
            scope.spawn(|| receiver(one, ways[3], seed + 1, total / 2));
            std::thread::sleep(pause);
            (back(&streams), ends.load(Ordering::SeqCst))
        });
        match done {
            Ok(()) => {
                returned += 1;
                assert!(streams.iter().all(|stream| of(stream).is_returned()));
                assert_eq!(back(&streams), Err(NotRecalled::Kernels));
            }
            // Both ends had shut it down before it switched.
            Err(why) => assert_eq!((why, ended), (NotRecalled::Unclear, 2)),
        }
        close(streams);
        rounds += 1;
    }
}

#[test]
fn what_nobody_has_read_yet_comes_in_order_from_the_kernel_the_ring_and_the_kernel() {
    let streams = pair();
    let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
    // Before the switch, as of an end that had talked to the kernel.
    kernel::send(one, b"early ", 0).unwrap();
    of(&streams[0]).segment.own().sending.by_kernel.store(6, Ordering::Relaxed);
    give(one, b"ring ", 0).unwrap();
    assert!(of(&streams[0]).sends_by_ring());
    // Bells that lie behind it.
    let armed = &of(&streams[1]).segment.own().signs.receive_armed;
    for _ in 0..3 {
        armed.store(1, Ordering::SeqCst);
        give(one, b"more ", 0).unwrap();
    }
    back(&streams).unwrap();
    give(one, b"late", 0).unwrap();
    assert!(!of(&streams[0]).sends_by_ring());
    let mut text = Vec::new();
    while text.len() < 30 {
        let mut bytes = [0; 4];
        let count = take(other, &mut bytes, 0).unwrap();
        text.extend_from_slice(&bytes[..count]);
    }
    assert_eq!(String::from_utf8_lossy(&text), "early ring more more more late");
    assert_eq!(take(other, &mut [0; 4], libc::MSG_DONTWAIT), Err(Errno(libc::EAGAIN)));
    close(streams);
}

#[test]
fn a_peek_for_all_sees_what_lies_in_the_kernel_the_ring_and_the_kernel() {
    let streams = pair();
    let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
    let all = libc::MSG_PEEK | libc::MSG_WAITALL;
    let peek = |wanted: usize| {
        let mut bytes = [0; 64];
        let count = take(other, &mut bytes[..wanted], all).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    kernel::send(one, b"early ", 0).unwrap();
    of(&streams[0]).segment.own().sending.by_kernel.store(6, Ordering::Relaxed);
    let armed = &of(&streams[1]).segment.own().signs.receive_armed;
    for word in ["ring ", "more "] {
        armed.store(1, Ordering::SeqCst);
        give(one, word.as_bytes(), 0).unwrap();
    }
    assert_eq!(peek(14), "early ring mor");
    back(&streams).unwrap();
    give(one, b"late", 0).unwrap();
    for wanted in 1..=20 {
        assert_eq!(peek(wanted), "early ring more late"[..wanted]);
    }
    // From within the ring, and where a part is still to come.
    common::races::take_all(other, &mut [0; 8]);
    assert_eq!(peek(12), "ng more late");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| peek(16));
        std::thread::sleep(Duration::from_millis(20));
        give(one, b"r on", 0).unwrap();
        assert_eq!(waits.join().unwrap(), "ng more later on");
    });
    // An end that the kernel alone tells.
    let [stream, second] = streams;
    kernel::shutdown(stream.as_raw_fd(), libc::SHUT_WR).unwrap();
    assert_eq!(peek(40), "ng more later on");
    let mut bytes = [0; 16];
    common::races::take_all(other, &mut bytes);
    assert_eq!(&bytes, b"ng more later on");
    assert_eq!(take(other, &mut bytes, 0), Ok(0));
    close([stream, second]);
}

#[test]
fn the_last_doorbell_is_no_news_for_who_polls() {
    for by_set in [false, true] {
        let streams = pair();
        let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
        give(other, b"switched", 0).unwrap();
        assert_eq!(take(one, &mut [0; 8], 0), Ok(8));
        back(&streams).unwrap();
        assert!(kernel::unread(one) > 0, "the doorbell is there");
        let set = set_of(Waits::Level, one, libc::EPOLLIN);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }];
        let mut entry = [libc::pollfd { fd: one, events: libc::POLLIN, revents: 0 }];
        let mut look = || {
            if by_set {
                epoll::wait(set, &mut events, Some(Duration::ZERO), None)
            } else {
                poll::poll(&mut entry, Some(Duration::ZERO), None)
            }
        };
        assert_eq!(look(), Some(Ok(0)), "by a set: {by_set}");
        give(other, b"x", 0).unwrap();
        assert_eq!(look(), Some(Ok(1)), "by a set: {by_set}");
        kernel::close(set).unwrap();
        close(streams);
    }
}

#[test]
fn a_half_that_was_shut_down_ends_after_its_last_byte() {
    let streams = pair();
    let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
    give(one, b"last", 0).unwrap();
    connection::shutdown(one, of(&streams[0]), libc::SHUT_WR).unwrap();
    back(&streams).unwrap();
    let mut bytes = [0; 16];
    assert_eq!(take(other, &mut bytes, 0), Ok(4));
    assert_eq!(take(other, &mut bytes, 0), Ok(0));
    assert_eq!(give(one, b"x", libc::MSG_NOSIGNAL), Err(Errno(libc::EPIPE)));
    give(other, b"answer", 0).unwrap();
    assert_eq!(take(one, &mut bytes, 0), Ok(6));
    connection::shutdown(other, of(&streams[1]), libc::SHUT_WR).unwrap();
    assert_eq!(take(one, &mut bytes, 0), Ok(0));
    close(streams);
}

#[test]
fn a_close_with_bytes_unread_in_the_ring_resets_and_one_without_does_not() {
    for unread in [true, false] {
        let streams = pair();
        let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
        give(one, b"bytes", 0).unwrap();
        back(&streams).unwrap();
        if !unread {
            assert_eq!(take(other, &mut [0; 8], 0), Ok(5));
        }
        let [first, second] = streams;
        connection::closing(other);
        drop(second);
        let told = take(one, &mut [0; 8], 0);
        assert_eq!(told, if unread { Err(Errno(libc::ECONNRESET)) } else { Ok(0) });
        connection::closing(first.into_raw_fd());
        kernel::close(one).unwrap();
    }
}

#[test]
fn who_works_on_an_end_for_too_long_keeps_the_connection_where_it_is() {
    let streams = pair();
    let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
    give(one, b"1", 0).unwrap();
    let holder = &of(&streams[1]).segment.own().sending.holder;
    // A thread that lives and does nothing.
    let (told, tells) = std::sync::mpsc::channel();
    let (stop, stops) = std::sync::mpsc::channel::<()>();
    let idle = std::thread::spawn(move || {
        told.send(kernel::thread()).unwrap();
        let _ = stops.recv();
    });
    let thread = tells.recv().unwrap();
    holder.store(name_of(thread), Ordering::SeqCst);
    assert_eq!(back_once(&streams, 0), Err(NotRecalled::Busy(thread)));
    holder.store(0, Ordering::SeqCst);
    let bells = &of(&streams[0]).segment.own().sharing.at_bells;
    bells.fetch_add(1, Ordering::SeqCst);
    assert_eq!(back_once(&streams, 0), Err(NotRecalled::Ringing));
    bells.fetch_sub(1, Ordering::SeqCst);
    // By its number, too, as long as it lives.
    let rings = of(&streams[0]).go_to_bells(true);
    assert_eq!(back_once(&streams, 0), Err(NotRecalled::Ringing));
    drop(rings);
    // As before, doorbells and all.
    give(one, b"2", 0).unwrap();
    assert_eq!(take(other, &mut [0; 8], 0), Ok(2));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(take(other, &mut [0; 8], 0), Ok(1)));
        std::thread::sleep(Duration::from_millis(50));
        give(one, b"3", 0).unwrap();
    });
    // One that died without letting go is not waited for.
    stop.send(()).unwrap();
    idle.join().unwrap();
    holder.store(name_of(thread), Ordering::SeqCst);
    assert_eq!(back(&streams), Ok(()));
    give(one, b"4", 0).unwrap();
    assert_eq!(take(other, &mut [0; 8], 0), Ok(1));
    close(streams);
}

#[test]
fn who_waits_for_room_at_an_end_that_never_sent_is_woken() {
    for waits in ALL {
        let streams = pair();
        let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| sender(one, waits, 5, 200_000, &AtomicU32::new(0)));
            std::thread::sleep(Duration::from_millis(30));
            back(&streams).unwrap();
            std::thread::sleep(Duration::from_millis(30));
            receiver(other, Waits::Blocking, 5, 200_000);
            sending.join().unwrap();
        });
        close(streams);
    }
}

#[test]
fn threads_that_sleep_on_one_set_go_on_after_the_way_back() {
    for _ in 0..20 {
        let streams = switched();
        let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
        let set = set_of(Waits::Edge, other, libc::EPOLLIN);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut bytes = [0; 8];
                    loop {
                        match take(other, &mut bytes, libc::MSG_DONTWAIT) {
                            Ok(0) => break,
                            Ok(_) => {}
                            Err(_) => wait(Waits::Level, set, other, libc::POLLIN),
                        }
                    }
                    // An edge is told to one: the other thread is to hear of the end, too.
                    let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
                    let event = libc::epoll_event { events, u64: 1 };
                    let again = epoll::control(set, libc::EPOLL_CTL_MOD, other, Some(event));
                    again.unwrap().unwrap();
                });
            }
            std::thread::sleep(Duration::from_millis(5));
            back(&streams).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            give(one, b"more", 0).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            connection::shutdown(one, of(&streams[0]), libc::SHUT_WR).unwrap();
        });
        kernel::close(set).unwrap();
        close(streams);
    }
}

#[test]
fn who_is_killed_before_it_is_decided_has_changed_nothing() {
    let streams = pair();
    let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
    give(one, b"before", 0).unwrap();
    let own = of(&streams[0]).segment.own();
    // What he would leave behind: everything but the state, and the halves of one that is dead.
    let dead = std::thread::spawn(kernel::thread).join().unwrap();
    own.signs.returned_at.store(1000, Ordering::SeqCst);
    own.sharing.at_bells.fetch_or(1 << 31, Ordering::SeqCst);
    own.receiving.holder.store(name_of(dead), Ordering::SeqCst);
    own.sending.holder.store(name_of(dead), Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = [0; 11];
            common::races::take_all(other, &mut bytes);
            assert_eq!(&bytes, b"beforeafter");
        });
        std::thread::sleep(Duration::from_millis(50));
        give(one, b"after", 0).unwrap();
    });
    assert!(of(&streams[0]).sends_by_ring());
    assert_eq!(back(&streams), Ok(()));
    close(streams);
}

#[test]
fn who_was_killed_while_he_rang_keeps_nobody_from_the_way_back() {
    let streams = switched();
    let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
    let first = of(&streams[0]);
    for _ in 0..3 {
        // As by who is killed: it is never let go of.
        std::thread::spawn(|| std::mem::forget(first.go_to_bells(true))).join().unwrap();
    }
    give(one, b"1", 0).unwrap();
    assert_eq!(back(&streams), Ok(()));
    give(one, b"2", 0).unwrap();
    let mut bytes = [0; 2];
    common::races::take_all(other, &mut bytes);
    assert_eq!(&bytes, b"12");
    close(streams);
}

#[test]
fn who_only_sends_ends_in_good_order() {
    let streams = switched();
    let [one, other] = [streams[0].as_raw_fd(), streams[1].as_raw_fd()];
    let (mut bytes, first) = ([0; 8], of(&streams[0]));
    back(&streams).unwrap();
    assert!(kernel::unread(one) > 0, "the last doorbell is there");
    give(one, b"last", 0).unwrap();
    // As by the end of its process: nothing of ours is called.
    let [stream, second] = streams;
    kernel::close(stream.into_raw_fd()).unwrap();
    assert_eq!(take(other, &mut bytes, 0), Ok(4));
    assert_eq!(take(other, &mut bytes, 0), Ok(0));
    connection::closing(second.as_raw_fd());
    if table::ours(one).is_some_and(|ours| std::ptr::eq(ours, first)) {
        table::forget(one);
    }
}
