//! What else a set owes: the kernel's news where the rings have more than the program asks for, a process
//! that shares it by `fork`, a thread that polled it while it was empty, and no time while nothing can be done.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::net::TcpStream;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use beeline_sockets::{connection, epoll, poll, table};
use common::races::{close, close_sets, fresh_set, give, pair, take};

const NONE: libc::epoll_event = libc::epoll_event { events: 0, u64: 0 };
const BRIEF: Option<Duration> = Some(Duration::from_millis(5));
const LONG: Option<Duration> = Some(Duration::from_secs(20));
/// The data of the program's own descriptor.
const OWN: u64 = u64::MAX >> 40;

/// Pairs whose asking ends have gone over to their rings.
fn spoken(many: usize) -> Vec<[TcpStream; 2]> {
    let pairs: Vec<_> = (0..many).map(|_| pair()).collect();
    for pair in &pairs {
        assert_eq!(give(pair[0].as_raw_fd(), b"x", 0), Ok(1));
        assert_eq!(take(pair[1].as_raw_fd(), &mut [0; 9], 0), Ok(1));
    }
    pairs
}

fn add(set: RawFd, fd: RawFd, mode: i32) {
    let events = (libc::EPOLLIN | mode) as u32;
    let event = libc::epoll_event { events, u64: u64::try_from(fd).unwrap() };
    epoll::control(set, libc::EPOLL_CTL_ADD, fd, Some(event)).unwrap().unwrap();
}

/// A readable descriptor of the kernel's in `set`.
fn add_own(set: RawFd) -> RawFd {
    let own = unsafe { libc::eventfd(1, libc::EFD_CLOEXEC) };
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: OWN };
    assert!(epoll::control(set, libc::EPOLL_CTL_ADD, own, Some(event)).is_none());
    let added = unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, own, &raw mut event) };
    assert_eq!(added, 0);
    own
}

#[test]
fn the_kernels_news_are_told_where_the_rings_fill_every_answer() {
    const WAITS: u32 = 1000;
    for places in [1, 8] {
        let (set, pairs) = (fresh_set(), spoken(16));
        pairs.iter().for_each(|pair| add(set, pair[1].as_raw_fd(), 0));
        let own = add_own(set);
        for pair in &pairs {
            give(pair[0].as_raw_fd(), b"x", 0).unwrap();
        }
        let (mut kernels, mut rings) = (0, 0);
        let mut events = [NONE; 8];
        for _ in 0..WAITS {
            let count = epoll::wait(set, &mut events[..places], LONG, None).unwrap().unwrap();
            for event in &events[..count] {
                let Some(pair) = pairs
                    .iter()
                    .find(|pair| u64::try_from(pair[1].as_raw_fd()).unwrap() == { event.u64 })
                else {
                    assert_eq!({ event.u64 }, OWN);
                    kernels += 1;
                    continue;
                };
                rings += 1;
                // Read, and there is more at once.
                take(pair[1].as_raw_fd(), &mut [0; 9], 0).unwrap();
                give(pair[0].as_raw_fd(), b"x", 0).unwrap();
            }
        }
        assert!(
            kernels > WAITS / 20,
            "{places} places: {kernels} of the kernel's, {rings} of ours"
        );
        assert!(rings > WAITS / 20, "{places} places: {kernels} of the kernel's, {rings} of ours");
        close_sets(&[set]);
        pairs.into_iter().for_each(close);
        assert_eq!(unsafe { libc::close(own) }, 0);
    }
}

#[test]
fn who_polls_an_empty_set_hears_what_comes_into_it() {
    let (set, pair) = (fresh_set(), spoken(1).pop().unwrap());
    epoll::created(set);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let mut entry = [libc::pollfd { fd: set, events: libc::POLLIN, revents: 0 }];
            // As the library does: with nothing of ours, the kernel is asked.
            match poll::poll(&mut entry, LONG, None) {
                Some(outcome) => outcome.unwrap(),
                None => {
                    usize::try_from(unsafe { libc::poll(entry.as_mut_ptr(), 1, 20_000) }).unwrap()
                }
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        add(set, pair[1].as_raw_fd(), 0);
        std::thread::sleep(Duration::from_millis(50));
        give(pair[0].as_raw_fd(), b"x", 0).unwrap();
        assert_eq!(sleeper.join().unwrap(), 1, "a wake-up was lost");
    });
    close_sets(&[set]);
    close(pair);
}

/// Time of the processor that this thread took.
fn spent() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap())
}

#[test]
fn a_caller_of_the_way_back_who_is_stopped_midway_costs_no_time() {
    for mode in [0, libc::EPOLLET] {
        let (set, pair) = (fresh_set(), spoken(1).pop().unwrap());
        add(set, pair[1].as_raw_fd(), mode);
        let mut events = [NONE; 4];
        assert_eq!(epoll::wait(set, &mut events, BRIEF, None), Some(Ok(0)));
        // A doorbell that stays: what it told of was read.
        give(pair[0].as_raw_fd(), b"x", 0).unwrap();
        take(pair[1].as_raw_fd(), &mut [0; 9], 0).unwrap();
        let own = connection::find(pair[1].as_raw_fd()).unwrap().segment.own();
        let ((says, said), (go_on, waits)) = (channel(), channel::<()>());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                own.still().unwrap();
                says.send(()).unwrap();
                waits.recv().unwrap();
                own.go_on();
            });
            said.recv().unwrap();
            let (before, time) = (spent(), Duration::from_millis(400));
            assert_eq!(epoll::wait(set, &mut events, Some(time), None), Some(Ok(0)));
            let spent = spent() - before;
            go_on.send(()).unwrap();
            assert!(spent < time / 2, "{spent:?} of a processor in a wait of {time:?}");
        });
        close_sets(&[set]);
        close(pair);
    }
}

#[test]
fn a_parent_hears_an_edge_after_one_that_its_child_heard() {
    for many in [1, 100] {
        let (set, pairs) = (fresh_set(), spoken(many));
        pairs.iter().for_each(|pair| add(set, pair[1].as_raw_fd(), libc::EPOLLET));
        let mut events = [NONE; 128];
        assert_eq!(epoll::wait(set, &mut events, BRIEF, None), Some(Ok(0)));
        let (asks, hears) = (pairs[many - 1][0].as_raw_fd(), pairs[many - 1][1].as_raw_fd());
        table::before_fork();
        let child = unsafe { libc::fork() };
        if child == 0 {
            table::after_fork_in_child();
            let count = epoll::wait(set, &mut events, LONG, None).unwrap().unwrap_or(0);
            let _ = take(hears, &mut [0; 9], libc::MSG_DONTWAIT);
            unsafe { libc::_exit(i32::try_from(count).unwrap_or(0)) };
        }
        table::after_fork_in_parent();
        std::thread::sleep(Duration::from_millis(100));
        give(asks, b"1", 0).unwrap();
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 1, "the child heard it");
        std::thread::scope(|scope| {
            let parent = scope.spawn(|| {
                let (mut events, begun) = ([NONE; 128], Instant::now());
                loop {
                    let count = epoll::wait(set, &mut events, LONG, None).unwrap().unwrap();
                    let mut bytes = [0; 9];
                    if count == 0 || take(hears, &mut bytes, libc::MSG_DONTWAIT).is_ok() {
                        return (count > 0 && begun.elapsed() < LONG.unwrap(), bytes[0]);
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(200));
            give(asks, b"2", 0).unwrap();
            assert_eq!(parent.join().unwrap(), (true, b'2'), "{many}: a wake-up was lost");
        });
        close_sets(&[set]);
        pairs.into_iter().for_each(close);
    }
}
