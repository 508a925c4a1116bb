//! The way back beside what goes wrong or ends at that moment: two callers, a killed one, a stopped holder,
//! halves that were shut, a close, a doorbell that another takes, threads that sleep in the kernel while a
//! connection becomes another.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::io::Read as _;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _, IntoRawFd as _, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use beeline_sockets::connection::{self, Connection};
use beeline_sockets::holder::name_of;
use beeline_sockets::kernel::{self, Errno};
use beeline_sockets::recall::{Hold, NotRecalled, leave_to_kernel, recall};
use beeline_sockets::segment::Segment;
use beeline_sockets::{epoll, poll, table};
use common::races::{Chance, close, give, pair, take, time};
use common::returns::{back, back_by, byte, of, switched};

/// Longest wait for what is to happen at once.
const SOON: Duration = Duration::from_secs(20);
/// Longer than the memory of a connection without numbers is kept. Whatever goes gives back what went before,
/// and time counts by how often something goes.
fn let_grace_pass(others: Vec<[TcpStream; 2]>) {
    assert!(others.len() > 4);
    for streams in others {
        std::thread::sleep(Duration::from_millis(510));
        close(streams);
    }
}

/// What a thread says that may stand still.
fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (says, said) = channel();
    std::thread::spawn(move || says.send(work()));
    said
}

/// Sends numbered bytes by `stream` until told to stop, and how many it were.
fn pour(stream: &TcpStream, seed: u64, stop: &AtomicBool) -> u64 {
    let (fd, mut sent) = (stream.as_raw_fd(), 0_u64);
    while !stop.load(Ordering::Relaxed) {
        let bytes: Vec<u8> = (sent..sent + 50).map(|place| byte(seed, place)).collect();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = &rest[give(fd, rest, libc::MSG_NOSIGNAL).unwrap()..];
        }
        sent += 50;
    }
    connection::shutdown(fd, of(stream), libc::SHUT_WR).unwrap();
    sent
}

/// Reads to the end; every byte is looked at.
fn drain(stream: &TcpStream, seed: u64) -> u64 {
    let (mut read, mut bytes) = (0_u64, [0; 333]);
    loop {
        let count = take(stream.as_raw_fd(), &mut bytes, 0).unwrap();
        for (at, &found) in bytes[..count].iter().enumerate() {
            assert_eq!(found, byte(seed, read + at as u64), "byte {}", read + at as u64);
        }
        read += count as u64;
        if count == 0 {
            return read;
        }
    }
}

#[test]
fn of_two_callers_at_once_one_brings_it_back() {
    for round in 0..60 {
        let (streams, stop) = (switched(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| pour(&streams[0], round, &stop));
            let receiving = scope.spawn(|| drain(&streams[1], round));
            std::thread::sleep(Duration::from_micros(300 + round * 37));
            // At the same end, or at both.
            let ends = [0, usize::from(round % 2 == 0)];
            let callers = ends.map(|own| {
                scope.spawn({
                    let streams = &streams;
                    move || back_by(streams, own)
                })
            });
            let outcomes = callers.map(|caller| caller.join().unwrap());
            std::thread::sleep(Duration::from_millis(5));
            stop.store(true, Ordering::Relaxed);
            let [well, late] = [Ok(()), Err(NotRecalled::Kernels)];
            assert!([[well, late], [late, well]].contains(&outcomes), "{outcomes:?}");
            assert_eq!(sending.join().unwrap(), receiving.join().unwrap());
        });
        close(streams);
    }
}

#[test]
fn a_caller_who_waits_for_another_holds_nothing_that_one_needs() {
    for own in [0, 1] {
        let streams = switched();
        let segment = &of(&streams[own]).segment;
        let (mut ends, side) = ([segment.own(), segment.other()], segment.side());
        ends.rotate_left(side);
        // The other caller has come so far.
        ends[0].still().unwrap();
        std::thread::scope(|scope| {
            let calls = scope.spawn(|| back_by(&streams, 1 - own));
            for _ in 0..100 {
                assert_eq!(ends[1].still(), Ok(()));
                ends[1].go_on();
                std::thread::sleep(Duration::from_millis(1));
            }
            ends[0].go_on();
            assert_eq!(calls.join().unwrap(), Ok(()));
        });
        close(streams);
    }
}

/// Where a caller is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Killed {
    BeforeItCounts,
    Afterwards,
}

#[test]
fn an_end_that_was_said_is_heard_wherever_the_caller_is_killed() {
    for killed in [Killed::BeforeItCounts, Killed::Afterwards] {
        let streams = switched();
        let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
        give(one, b"last", 0).unwrap();
        connection::shutdown(one, of(&streams[0]), libc::SHUT_WR).unwrap();
        let segment = &of(&streams[0]).segment;
        let ends = [segment.own(), segment.other()];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (end, socket) in ends.iter().zip(&streams) {
                    end.still().unwrap();
                    end.switch();
                    end.ring_once(socket.as_fd());
                }
                let counted = [0, 1].map(|end| ends[end].count(streams[end].as_fd()).unwrap());
                ends.iter().zip(&streams).for_each(|(end, socket)| end.tell_kernel(socket.as_fd()));
                if killed == Killed::Afterwards {
                    let both = [0, 1].map(|end| (ends[end], counted[end], Hold::default()));
                    leave_to_kernel(segment, both);
                }
                // It lets nobody go.
            });
        });
        let said = aside(move || {
            let mut bytes = [0; 16];
            let first = take(other, &mut bytes, 0);
            (first, take(other, &mut bytes, 0))
        });
        assert_eq!(said.recv_timeout(SOON), Ok((Ok(4), Ok(0))), "{killed:?}");
        // The other direction goes on.
        give(other, b"still", 0).unwrap();
        let said = aside(move || take(one, &mut [0; 16], 0));
        assert_eq!(said.recv_timeout(SOON), Ok(Ok(5)), "{killed:?}");
        close(streams);
    }
}

#[test]
fn the_count_of_a_socket_that_was_restored_is_not_believed() {
    let streams = pair();
    let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
    // As if more had gone through the kernel before than it counts.
    of(&streams[0]).segment.own().sending.by_kernel.store(20, Ordering::Relaxed);
    of(&streams[1]).segment.own().receiving.by_kernel.store(20, Ordering::Relaxed);
    let armed = &of(&streams[1]).segment.own().signs.receive_armed;
    for _ in 0..25 {
        armed.store(1, Ordering::SeqCst);
        give(one, b"b", 0).unwrap();
    }
    give(other, b"x", 0).unwrap();
    assert_eq!(back(&streams), Err(NotRecalled::Unclear));
    give(one, b"END", 0).unwrap();
    let (mut all, mut bytes) = (Vec::new(), [0; 64]);
    while !all.ends_with(b"END") {
        let count = take(other, &mut bytes, 0).unwrap();
        all.extend_from_slice(&bytes[..count]);
    }
    assert_eq!(all, [&[b'b'; 25][..], b"END"].concat());
    close(streams);
}

#[test]
fn an_edge_of_an_end_behind_the_rings_last_bytes_is_told() {
    for by_close in [true, false] {
        let streams = switched();
        let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
        let set = kernel::epoll_set().unwrap();
        let events = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
        let event = libc::epoll_event { events, u64: 1 };
        epoll::control(set, libc::EPOLL_CTL_ADD, other, Some(event)).unwrap().unwrap();
        let mut told = [libc::epoll_event { events: 0, u64: 0 }; 2];
        let _ = epoll::wait(set, &mut told, Some(Duration::from_millis(10)), None);
        give(one, b"ring", 0).unwrap();
        back(&streams).unwrap();
        let ([first, second], mut open) = (streams, None);
        if by_close {
            connection::closing(one);
            drop(first);
        } else {
            connection::shutdown(one, of(&first), libc::SHUT_WR).unwrap();
            open = Some(first);
        }
        let mut ended = false;
        for _ in 0..3 {
            let told_of = epoll::wait(set, &mut told, Some(Duration::from_millis(300)), None);
            if told_of.unwrap() == Ok(1) {
                ended |= told[0].events & libc::EPOLLRDHUP as u32 != 0;
                // A short read, which programs take for the last.
                let _ = take(other, &mut [0; 64], libc::MSG_DONTWAIT);
            }
        }
        assert!(ended, "by close: {by_close}");
        for stream in open.into_iter().chain([second]) {
            connection::closing(stream.as_raw_fd());
        }
    }
}

#[test]
fn a_reading_side_that_was_shut_reads_an_end_on_either_way() {
    for before in [true, false] {
        let streams = switched();
        let other = streams[1].as_raw_fd();
        let shut = || connection::shutdown(other, of(&streams[1]), libc::SHUT_RD).unwrap();
        if before {
            shut();
        }
        back(&streams).unwrap();
        if !before {
            shut();
        }
        let said = aside(move || take(other, &mut [0; 8], 0));
        assert_eq!(said.recv_timeout(SOON), Ok(Ok(0)), "shut before: {before}");
        close(streams);
    }
}

#[test]
fn a_thread_that_waits_for_bytes_hears_that_its_process_shut_the_reading_side() {
    for (returned, how) in [
        (false, libc::SHUT_RD),
        (false, libc::SHUT_RDWR),
        (true, libc::SHUT_RD),
        (true, libc::SHUT_RDWR),
    ] {
        let streams = switched();
        let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
        if returned {
            back(&streams).unwrap();
        }
        let said = aside(move || take(other, &mut [0; 8], 0));
        std::thread::sleep(Duration::from_millis(50));
        connection::shutdown(other, of(&streams[1]), how).unwrap();
        assert_eq!(said.recv_timeout(SOON), Ok(Ok(0)), "returned: {returned}, how {how}");
        if how == libc::SHUT_RD {
            // It can send, and wait for room, as before.
            let sent = aside(move || give(other, &vec![1; 4 << 20], libc::MSG_NOSIGNAL));
            let (mut read, mut bytes) = (0, vec![0; 1 << 16]);
            while read < 4 << 20 {
                read += take(one, &mut bytes, 0).unwrap();
            }
            assert_eq!(sent.recv_timeout(SOON), Ok(Ok(4 << 20)));
        }
        close(streams);
    }
}

#[test]
fn a_look_that_wants_all_goes_beyond_the_ring() {
    let streams = switched();
    let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
    give(one, b"abc", 0).unwrap();
    back(&streams).unwrap();
    give(one, b"defghijk", 0).unwrap();
    let said = aside(move || {
        let mut bytes = [0; 8];
        (take(other, &mut bytes, libc::MSG_PEEK | libc::MSG_WAITALL), bytes)
    });
    assert_eq!(said.recv_timeout(SOON), Ok((Ok(8), *b"abcdefgh")));
    let said = aside(move || take(other, &mut [0; 11], libc::MSG_WAITALL));
    assert_eq!(said.recv_timeout(SOON), Ok(Ok(11)));
    close(streams);
}

#[test]
fn a_connection_left_to_the_kernel_stays_while_a_writer_sleeps_in_the_kernel() {
    const LENGTH: usize = 6 << 20;
    let others: Vec<_> = (0..5).map(|_| pair()).collect();
    // An end whose other end never comes.
    common::begin();
    let streams = common::pair();
    let [mapping, _] = common::mapped_twice(4096);
    let fd = streams[0].as_raw_fd();
    let connection = Connection::new(Segment::take(mapping, 0).unwrap(), fd);
    assert!(connection.join());
    table::set_ours(fd, Box::new(connection));
    for (stream, option) in [(&streams[0], libc::SO_SNDBUF), (&streams[1], libc::SO_RCVBUF)] {
        kernel::set_option(stream.as_raw_fd(), libc::SOL_SOCKET, option, 16384).unwrap();
    }
    let sent = aside(move || give(fd, &vec![7; LENGTH], 0));
    let (mut peer, mut bytes, mut read) = (&streams[1], vec![0; 8192], 0);
    let until = Instant::now() + 4 * SOON;
    while table::ours(fd).is_some() {
        assert!(Instant::now() < until, "it is never given up");
        read += peer.read(&mut bytes).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    let_grace_pass(others);
    while read < LENGTH {
        read += peer.read(&mut bytes).unwrap();
    }
    assert_eq!(sent.recv_timeout(SOON), Ok(Ok(LENGTH)));
}

#[test]
fn a_returned_connection_does_not_move_under_a_writer_that_sleeps_in_the_kernel() {
    let streams = switched();
    let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
    back(&streams).unwrap();
    assert!(!of(&streams[0]).sleepers.any());
    let sent = aside(move || give(one, &vec![1; 24 << 20], libc::MSG_NOSIGNAL));
    let until = Instant::now() + SOON;
    while !of(&streams[0]).sleepers.any() {
        assert!(Instant::now() < until, "nobody is said to sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (mut read, mut bytes) = (0, vec![0; 1 << 16]);
    while read < 24 << 20 {
        read += take(other, &mut bytes, 0).unwrap();
    }
    assert_eq!(sent.recv_timeout(SOON), Ok(Ok(24 << 20)));
    assert!(!of(&streams[0]).sleepers.any());
    close(streams);
}

/// A process that was stopped, and ends with this.
struct Stopped(std::process::Child);

impl Stopped {
    fn begin() -> Self {
        let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGSTOP) }, 0);
        let begun = Instant::now();
        while kernel::life_of(child.id()) != kernel::Life::Stopped {
            assert!(begun.elapsed() < SOON, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
        Self(child)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_connection_closed_while_a_call_waits_for_a_stopped_holder_stays_until_the_call_is_over() {
    let others: Vec<_> = (0..5).map(|_| pair()).collect();
    let (streams, stopped) = (switched(), Stopped::begin());
    let other = streams[1].as_raw_fd();
    let own = of(&streams[1]).segment.own();
    own.receiving.holder.store(name_of(stopped.0.id()), Ordering::SeqCst);
    let said = aside(move || take(other, &mut [0; 8], 0));
    std::thread::sleep(Duration::from_millis(200));
    connection::closing(other);
    // Closed, and another file's by now: not another test's.
    let file = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), other) }, other);
    let_grace_pass(others);
    std::thread::sleep(Duration::from_millis(200));
    drop(stopped);
    assert_eq!(said.recv_timeout(SOON), Ok(Err(Errno(libc::ENOTSOCK))));
    connection::closing(streams[0].as_raw_fd());
}

#[test]
fn who_seems_to_call_a_connection_back_without_end_is_waited_for_once() {
    let streams = switched();
    let connection = of(&streams[0]);
    let (told, tells) = channel();
    let (stop, stops) = channel::<()>();
    let idle = std::thread::spawn(move || {
        told.send(kernel::thread()).unwrap();
        let _ = stops.recv();
    });
    // The words are the other end's to write, too.
    let own = connection.segment.own();
    let held_by = |thread| {
        own.receiving.holder.store(thread, Ordering::SeqCst);
        own.sending.holder.store(thread, Ordering::SeqCst);
    };
    held_by(name_of(tells.recv().unwrap()));
    own.sharing.at_bells.fetch_or(1 << 31, Ordering::SeqCst);
    assert!(connection.go_to_bells(true).is_none());
    let waits = connection.sleepers.stamp();
    assert!(connection.go_to_bells(true).is_none());
    assert_eq!(connection.sleepers.stamp(), waits, "it waited again");
    // Who comes to an end is heard of all the same.
    held_by(0);
    assert!(connection.go_to_bells(true).is_some());
    stop.send(()).unwrap();
    idle.join().unwrap();
    close(streams);
}

#[test]
fn who_may_not_wait_does_not_wait_for_a_stopped_holder() {
    for closes in [false, true] {
        let (streams, stopped) = (switched(), Stopped::begin());
        let other = streams[1].as_raw_fd();
        let set = kernel::epoll_set().unwrap();
        let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 1 };
        epoll::control(set, libc::EPOLL_CTL_ADD, other, Some(event)).unwrap().unwrap();
        back(&streams).unwrap();
        of(&streams[1])
            .segment
            .own()
            .receiving
            .holder
            .store(name_of(stopped.0.id()), Ordering::SeqCst);
        let said = aside(move || {
            if closes {
                connection::closing(other);
            } else {
                let mut told = [libc::epoll_event { events: 0, u64: 0 }; 2];
                epoll::wait(set, &mut told, Some(Duration::ZERO), None).unwrap().unwrap();
            }
        });
        assert_eq!(said.recv_timeout(SOON), Ok(()), "closes: {closes}");
        drop(stopped);
        close(streams);
    }
}

#[test]
fn a_close_beside_the_way_back_is_no_reset() {
    let mut chance = Chance(77);
    let (begun, mut returned) = (Instant::now(), 0);
    while begun.elapsed() < time() || returned == 0 {
        assert!(begun.elapsed() < time() + 4 * SOON, "never both at once");
        // Also of an end that never sent, and rings first when it is called back.
        let streams = if chance.below(2) == 0 { switched() } else { pair() };
        let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
        give(one, b"2", 0).unwrap();
        assert_eq!(take(other, &mut [0; 8], 0), Ok(1));
        let segment = &of(&streams[0]).segment;
        let copies = streams.each_ref().map(|stream| stream.try_clone().unwrap());
        let [first, second] = streams;
        let wait = Duration::from_micros(chance.below(60));
        let outcome = std::thread::scope(|scope| {
            let caller = scope.spawn(move || {
                let sockets = copies.each_ref().map(|copy| copy.as_fd());
                recall(segment, sockets, [Duration::from_secs(60); 2])
            });
            let until = Instant::now() + wait;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            connection::closing(one);
            kernel::close(first.into_raw_fd()).unwrap();
            caller.join().unwrap()
        });
        returned += u32::from(outcome.is_ok());
        let said = aside(move || take(other, &mut [0; 8], 0));
        let said = said.recv_timeout(SOON);
        assert_eq!(said, Ok(Ok(0)), "{outcome:?}, closed after {wait:?}");
        connection::closing(other);
        drop(second);
        // Memory, and a descriptor of it, is kept for a grace.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_blocking_send_to_an_end_that_is_half_closed_is_whole() {
    const LENGTH: usize = 8 << 20;
    for returned in [false, true] {
        let streams = switched();
        let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
        connection::shutdown(one, of(&streams[0]), libc::SHUT_WR).unwrap();
        if returned {
            back(&streams).unwrap();
        }
        assert_eq!(take(other, &mut [0; 8], 0), Ok(0));
        let reading = aside(move || {
            let (mut bytes, mut read) = (vec![0; 1 << 16], 0);
            while let Ok(count @ 1..) = take(one, &mut bytes, 0) {
                read += count;
            }
            read
        });
        assert_eq!(give(other, &vec![1; LENGTH], libc::MSG_NOSIGNAL), Ok(LENGTH), "{returned}");
        connection::shutdown(other, of(&streams[1]), libc::SHUT_WR).unwrap();
        assert_eq!(reading.recv_timeout(SOON), Ok(LENGTH), "returned: {returned}");
        close(streams);
    }
}

/// How a thread sleeps until there is room.
#[derive(Clone, Copy, Debug)]
enum ForRoom {
    Send,
    Poll,
    Set,
}

/// True when the thread was told of room at `fd`, of which there was none.
fn told_of_room(fd: RawFd, sleeps: ForRoom) -> bool {
    let long = Some(Duration::from_secs(30));
    match sleeps {
        ForRoom::Send => give(fd, b"x", libc::MSG_NOSIGNAL) == Ok(1),
        ForRoom::Poll => {
            let mut entry = [libc::pollfd { fd, events: libc::POLLOUT, revents: 0 }];
            poll::poll(&mut entry, long, None) == Some(Ok(1))
        }
        ForRoom::Set => {
            let set = kernel::epoll_set().unwrap();
            let mut events = [libc::epoll_event { events: libc::EPOLLOUT as u32, u64: 1 }];
            epoll::control(set, libc::EPOLL_CTL_ADD, fd, Some(events[0])).unwrap().unwrap();
            let told = epoll::wait(set, &mut events, long, None) == Some(Ok(1));
            kernel::close(set).unwrap();
            told
        }
    }
}

#[test]
fn who_sleeps_for_room_hears_of_it_whoever_takes_the_last_doorbell() {
    for sleeps in [ForRoom::Send, ForRoom::Poll, ForRoom::Set] {
        let streams = switched();
        let [one, other] = streams.each_ref().map(|stream| stream.as_raw_fd());
        while give(one, &[7; 512], libc::MSG_DONTWAIT).is_ok() {}
        let told = aside(move || told_of_room(one, sleeps));
        std::thread::sleep(Duration::from_millis(100));
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        // Takes doorbells as soon as they lie there.
        let reading = aside(move || {
            while !stops.load(Ordering::Relaxed) {
                assert_eq!(take(one, &mut [0; 8], libc::MSG_DONTWAIT), Err(Errno(libc::EAGAIN)));
            }
        });
        // As `recall`, with the last doorbell behind all else: the sleeper has the least time.
        let segment = &of(&streams[0]).segment;
        let ends = [segment.own(), segment.other()];
        let since = Instant::now();
        for end in ends {
            while end.still().is_err() {
                assert!(since.elapsed() < SOON);
            }
        }
        let mut counted = [0, 1].map(|end| ends[end].count(streams[end].as_fd()).unwrap());
        counted[1].sent += 1;
        leave_to_kernel(segment, [0, 1].map(|end| (ends[end], counted[end], Hold::default())));
        ends.iter().for_each(|end| end.let_go());
        std::thread::sleep(Duration::from_millis(20));
        kernel::send(other, &[0], 0).unwrap();
        assert_eq!(told.recv_timeout(SOON), Ok(true), "{sleeps:?}");
        stop.store(true, Ordering::Relaxed);
        assert_eq!(reading.recv_timeout(SOON), Ok(()), "{sleeps:?}");
        close(streams);
    }
}
