//! Halves that are held by who is stopped or dead, ends that were answered and never came, and what
//! a reader with a low-water mark is told.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

mod common;

use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets::connection::{Connection, find, inherited};
use beeline_sockets::holder::hold;
use beeline_sockets::kernel::{self, Errno};
use beeline_sockets::segment::{STATE_OPEN, STATE_PAIRED, Segment};
use beeline_sockets::sleepers::Sleepers;
use beeline_sockets::{connection, poll, receive, send};
use common::{accelerated, accelerated_by, begin, mapped_twice, pair, piece, sleeps};

fn give(stream: &TcpStream, bytes: &[u8]) -> Result<usize, Errno> {
    let connection = find(stream.as_raw_fd()).unwrap();
    let piece = piece(bytes.as_ptr().cast_mut(), bytes.len());
    unsafe { send::send(stream.as_raw_fd(), connection, &piece, libc::MSG_NOSIGNAL) }
}

fn take(stream: &TcpStream, bytes: &mut [u8], flags: i32) -> Result<usize, Errno> {
    let connection = find(stream.as_raw_fd()).unwrap();
    let piece = piece(bytes.as_mut_ptr(), bytes.len());
    unsafe { receive::receive(stream.as_raw_fd(), connection, &piece, flags) }
}

fn close(streams: [TcpStream; 2]) {
    for stream in streams {
        connection::closing(stream.as_raw_fd());
        drop(stream);
    }
}

/// A child of this process that takes the half and then waits to be killed.
fn child_that_holds(word: &AtomicU32) -> i32 {
    let child = unsafe { libc::fork() };
    if child == 0 {
        beeline_sockets::holder::forget_thread();
        if let Ok(held) = hold(word, &Sleepers::default()) {
            std::mem::forget(held);
        }
        loop {
            unsafe { libc::pause() };
        }
    }
    let begun = Instant::now();
    while word.load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "the child never held it");
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

fn wait_for(child: i32) {
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
}

#[test]
fn a_half_whose_holder_was_killed_is_taken_soon_also_before_anybody_waited_for_it() {
    begin();
    for waited in [true, false] {
        let streams = accelerated();
        let [one, other] = &streams;
        assert_eq!(give(one, b"before"), Ok(6));
        let ours = find(one.as_raw_fd()).unwrap();
        let theirs = find(other.as_raw_fd()).unwrap();
        let halves = [&ours.segment.own().sending.holder, &theirs.segment.own().receiving.holder];
        for half in halves {
            let child = child_that_holds(half);
            assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
            if waited {
                wait_for(child);
            } else {
                // Dead, and its number still taken.
                let begun = Instant::now();
                while kernel::life_of(child.unsigned_abs()) != kernel::Life::Over {
                    assert!(begun.elapsed() < Duration::from_secs(20));
                }
                assert!(kernel::thread_exists(child.unsigned_abs()));
            }
            let begun = Instant::now();
            assert_eq!(give(one, b"after"), Ok(5));
            let mut bytes = [0; 100];
            assert!(take(other, &mut bytes, 0).is_ok());
            // Two orders of magnitude below the ten seconds of a half that nobody holds.
            assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
            if !waited {
                wait_for(child);
            }
        }
        close(streams);
    }
}

#[test]
fn a_half_whose_holder_is_stopped_is_waited_for() {
    begin();
    let streams = accelerated();
    let half = &find(streams[0].as_raw_fd()).unwrap().segment.own().sending.holder;
    let child = child_that_holds(half);
    assert_eq!(unsafe { libc::kill(child, libc::SIGSTOP) }, 0);
    let begun = Instant::now();
    while kernel::life_of(child.unsigned_abs()) != kernel::Life::Stopped {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    let over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            over.store(true, Ordering::SeqCst);
            unsafe { libc::kill(child, libc::SIGKILL) };
        });
        assert_eq!(give(&streams[0], b"after"), Ok(5));
        assert!(over.load(Ordering::SeqCst), "it was sent past a holder that is not dead");
    });
    wait_for(child);
    close(streams);
}

#[test]
fn a_half_whose_holder_is_stopped_keeps_no_call_longer_than_it_may_wait() {
    begin();
    for sends in [true, false] {
        let streams = accelerated();
        assert_eq!(give(&streams[1], b"there"), Ok(5));
        let own = find(streams[0].as_raw_fd()).unwrap().segment.own();
        let half = if sends { &own.sending.holder } else { &own.receiving.holder };
        let child = child_that_holds(half);
        assert_eq!(unsafe { libc::kill(child, libc::SIGSTOP) }, 0);
        let begun = Instant::now();
        while kernel::life_of(child.unsigned_abs()) != kernel::Life::Stopped {
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        let stream = streams[0].try_clone().unwrap();
        let fd = streams[0].as_raw_fd();
        let (said, hears) = std::sync::mpsc::channel();
        let caller = std::thread::spawn(move || {
            let call = |flags: i32| {
                let connection = find(fd).unwrap();
                let mut bytes = [0; 5];
                let piece = piece(bytes.as_mut_ptr(), 5);
                if sends {
                    return unsafe { send::send(fd, connection, &piece, flags) };
                }
                unsafe { receive::receive(fd, connection, &piece, flags) }
            };
            said.send(call(libc::MSG_DONTWAIT)).unwrap();
            let time = Some(Duration::from_millis(200));
            stream.set_read_timeout(time).unwrap();
            stream.set_write_timeout(time).unwrap();
            let before = sleeps();
            said.send(call(0)).unwrap();
            assert!(sleeps() > before, "a call that may wait does");
            stream.set_nonblocking(true).unwrap();
            find(fd).unwrap().forget_blocking_mode();
            said.send(call(0)).unwrap();
            // It ends, and its half with it.
            unsafe { libc::kill(child, libc::SIGKILL) };
            wait_for(child);
            said.send(call(0)).unwrap();
        });
        for expected in [Err(Errno(libc::EAGAIN)); 3].into_iter().chain([Ok(5)]) {
            assert_eq!(hears.recv_timeout(Duration::from_secs(20)), Ok(expected), "{sends}");
        }
        caller.join().unwrap();
        close(streams);
    }
}

#[test]
fn an_end_that_was_answered_and_never_came_is_not_sent_to() {
    let streams = pair();
    let [first, second] = mapped_twice(4096);
    // The second is there; the first never mapped what it was given.
    let second = Connection::new(Segment::take(second, 1).unwrap(), streams[1].as_raw_fd());
    assert!(second.join());
    assert_eq!(second.segment.state().load(Ordering::SeqCst), STATE_OPEN);
    assert!(!second.is_bound_for_ring());
    // It comes late: now both are there.
    let first = Connection::new(Segment::take(first, 0).unwrap(), streams[0].as_raw_fd());
    assert!(first.join());
    assert_eq!(second.segment.state().load(Ordering::SeqCst), STATE_PAIRED);
    assert!(second.is_bound_for_ring() && first.is_bound_for_ring());
    // What is no connection is no heir's.
    inherited(-1);
}

#[test]
fn a_low_water_mark_is_kept_by_poll_and_by_calls_that_wait() {
    begin();
    let streams = accelerated_by(64 << 10);
    let [one, other] = &streams;
    let theirs = find(other.as_raw_fd()).unwrap();
    let water = theirs.held_option(libc::SOL_SOCKET, libc::SO_RCVLOWAT).unwrap();
    water.store(100, Ordering::Relaxed);
    let readable = || poll::readiness(theirs) & libc::POLLIN != 0;
    assert_eq!(give(one, &[1; 99]), Ok(99));
    assert!(!readable());
    assert_eq!(give(one, &[1; 1]), Ok(1));
    assert!(readable());
    // A call that does not wait takes what there is; one that waits, at least so much.
    let mut bytes = [0; 1000];
    assert_eq!(take(other, &mut bytes[..60], libc::MSG_DONTWAIT), Ok(60));
    assert!(!readable());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..60 {
                std::thread::sleep(Duration::from_millis(2));
                assert_eq!(give(one, &[1; 1]), Ok(1));
            }
        });
        assert!(take(other, &mut bytes, 0).unwrap() >= 100);
    });
    while take(other, &mut bytes, libc::MSG_DONTWAIT).is_ok() {}
    // More than a ring will hold: told when the sender might soon wait.
    water.store(1 << 20, Ordering::Relaxed);
    assert_eq!(give(one, &[1; 1000]), Ok(1000));
    assert!(!readable());
    while !readable() {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let connection = find(one.as_raw_fd()).unwrap();
        let mut more = [1; 1000];
        let piece = piece(more.as_mut_ptr(), more.len());
        assert_eq!(unsafe { send::send(one.as_raw_fd(), connection, &piece, flags) }, Ok(1000));
    }
    // Less than it, and the end.
    while take(other, &mut bytes, libc::MSG_DONTWAIT).is_ok() {}
    assert_eq!(give(one, &[1; 10]), Ok(10));
    assert!(!readable());
    connection::shutdown(one.as_raw_fd(), find(one.as_raw_fd()).unwrap(), libc::SHUT_WR).unwrap();
    assert!(readable());
    assert_eq!(take(other, &mut bytes, 0), Ok(10));
    close(streams);
}
