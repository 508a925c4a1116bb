//! Two threads and one set: what one of them does between two steps of the other is heard.
//!
//! `BEELINE_WAKE_SECONDS=n` for each test (else one; 60 with `BEELINE_DEEP=1`).

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::net::TcpStream;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets::kernel::Errno;
use beeline_sockets::{connection, epoll, receive, send};
use common::{accelerated_by, begin};

/// An answer later than this was never coming.
const LATEST: Duration = Duration::from_secs(20);

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn time() -> Duration {
    let deep = std::env::var_os("BEELINE_DEEP").is_some();
    let seconds = number("BEELINE_WAKE_SECONDS").unwrap_or(if deep { 60 } else { 1 });
    Duration::from_secs(seconds)
}

fn pair() -> [TcpStream; 2] {
    begin();
    accelerated_by(4096)
}

fn close(streams: [TcpStream; 2]) {
    for stream in streams {
        connection::closing(stream.as_raw_fd());
        drop(stream);
    }
}

fn give(fd: RawFd, bytes: &[u8], flags: i32) -> Result<usize, Errno> {
    let piece = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    unsafe { send::send(fd, connection::find(fd).unwrap(), &piece, flags) }
}

fn take(fd: RawFd, bytes: &mut [u8], flags: i32) -> Result<usize, Errno> {
    let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    unsafe { receive::receive(fd, connection::find(fd).unwrap(), &piece, flags) }
}

fn take_all(fd: RawFd, mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        match take(fd, bytes, 0) {
            Ok(count) => {
                assert!(count > 0, "the stream ended");
                bytes = &mut bytes[count..];
            }
            Err(error) => assert_eq!(error, Errno(libc::EINTR)),
        }
    }
}

fn say(line: &str) {
    use std::io::Write as _;
    let _ = std::io::stderr().write_all(format!("ran: {line}\n").as_bytes());
}

fn rearm(set: RawFd, fd: RawFd, how: i32, edge: bool) {
    let mode = if edge { libc::EPOLLET | libc::EPOLLONESHOT } else { 0 };
    let event = libc::epoll_event {
        events: (libc::EPOLLIN | mode) as u32,
        u64: u64::try_from(fd).unwrap(),
    };
    epoll::control(set, how, fd, Some(event)).unwrap().unwrap();
}

fn fresh_set() -> RawFd {
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert!(set >= 0);
    set
}

fn close_sets(sets: &[RawFd]) {
    for &set in sets {
        connection::closing(set);
        unsafe { libc::close(set) };
    }
}

/// Numbers from one seed.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Ends the test when nothing moved for too long: the threads that wait would wait for ever.
fn watch<T>(
    what: &str,
    seed: u64,
    moved: &AtomicU64,
    done: &AtomicBool,
    part: impl FnOnce() -> T,
) -> T {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut last, mut since) = (0, Instant::now());
            while !done.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(20));
                let now = moved.load(Ordering::Relaxed);
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > LATEST {
                    say(&format!(
                        "{what}: a wake-up was lost after {now} messages, BEELINE_SEED={seed}"
                    ));
                    std::process::abort();
                }
            }
        });
        let outcome = part();
        done.store(true, Ordering::Release);
        outcome
    })
}

#[test]
fn news_beside_another_report_of_an_edge_triggered_connection_is_an_edge() {
    let pair = pair();
    let (asks, hears) = (pair[0].as_raw_fd(), pair[1].as_raw_fd());
    let set = fresh_set();
    #[expect(clippy::cast_sign_loss, reason = "bits")]
    let (edge, bytes) =
        ((libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32, libc::EPOLLIN as u32);
    let fresh = libc::epoll_event { events: edge, u64: 7 };
    assert!(epoll::control(set, libc::EPOLL_CTL_ADD, hears, Some(fresh)).unwrap().is_ok());
    let (turn, said) = (AtomicU64::new(0), AtomicU64::new(0));
    let until = Instant::now() + time();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut chance = Chance(7);
            for now in 1.. {
                while turn.load(Ordering::Acquire) < now {
                    std::hint::spin_loop();
                }
                if turn.load(Ordering::Acquire) == u64::MAX {
                    break;
                }
                (0..chance.below(40)).for_each(|_| std::hint::spin_loop());
                give(asks, b"x", 0).unwrap();
                said.store(now, Ordering::Release);
            }
        });
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        let mut now = 0;
        let mut lost = false;
        while Instant::now() < until && !lost {
            now += 1;
            // Reports room at once, like any fresh registration.
            assert!(epoll::control(set, libc::EPOLL_CTL_MOD, hears, Some(fresh)).unwrap().is_ok());
            turn.store(now, Ordering::Release);
            loop {
                let all_said = said.load(Ordering::Acquire) == now;
                let count = epoll::wait(set, &mut events, Some(Duration::ZERO), None);
                let count = count.unwrap().unwrap();
                if events[..count].iter().any(|event| event.events & bytes != 0) {
                    break;
                }
                lost = all_said && count == 0;
                if lost {
                    break;
                }
            }
            take_all(hears, &mut [0; 1]);
        }
        turn.store(u64::MAX, Ordering::Release);
        say(&format!("{now} edges beside another report"));
        assert!(!lost, "round {now}");
    });
    close_sets(&[set]);
    close(pair);
}

#[test]
fn a_connection_taken_out_of_a_set_takes_no_wake_up_of_another_with_it() {
    let (stays, leaves) = (pair(), pair());
    let (asks, hears) = (stays[0].as_raw_fd(), stays[1].as_raw_fd());
    let (last, out) = (leaves[0].as_raw_fd(), leaves[1].as_raw_fd());
    let set = fresh_set();
    rearm(set, hears, libc::EPOLL_CTL_ADD, false);
    let (moved, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let until = Instant::now() + time();
    watch("taken out beside a sleeper", 0, &moved, &done, || {
        while Instant::now() < until {
            rearm(set, out, libc::EPOLL_CTL_ADD, false);
            // Both are busy, so that one name is for both.
            for fd in [asks, last] {
                give(fd, b"x", 0).unwrap();
            }
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
            assert_eq!(epoll::wait(set, &mut events, None, None), Some(Ok(2)));
            for fd in [hears, out] {
                take(fd, &mut [0; 9], 0).unwrap();
            }
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                    assert_eq!(epoll::wait(set, &mut events, None, None), Some(Ok(1)));
                    take_all(hears, &mut [0; 1]);
                });
                // Most rounds it sleeps by now.
                std::thread::sleep(Duration::from_micros(200));
                assert!(epoll::control(set, libc::EPOLL_CTL_DEL, out, None).unwrap().is_ok());
                // The bell of this one is swallowed before the sleeper comes to look at it.
                give(last, b"x", 0).unwrap();
                connection::find(out).unwrap().listen(out, 0);
                give(asks, b"x", 0).unwrap();
            });
            take_all(out, &mut [0; 1]);
            moved.fetch_add(1, Ordering::Relaxed);
        }
    });
    say(&format!("{} connections taken out beside a sleeper", moved.load(Ordering::Relaxed)));
    close_sets(&[set]);
    close(stays);
    close(leaves);
}
