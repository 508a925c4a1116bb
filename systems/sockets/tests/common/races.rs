//! What the tests of lost wake-ups share: pairs with short rings, calls on them, sets, chance, and a watch
//! that ends a test which stands still.

use std::net::TcpStream;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets::connection::Connection;
use beeline_sockets::kernel::{self, Errno};
use beeline_sockets::{connection, epoll, receive, send, table};

use super::{accelerated_by, begin};

/// An answer later than so many looks was never coming. Looks and not time: a machine that was stopped
/// as a whole, and whose clock went on, lost nothing.
const LATEST: u32 = 1000;
const TICK: Duration = Duration::from_millis(20);

pub fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

pub fn time() -> Duration {
    let deep = std::env::var_os("BEELINE_DEEP").is_some();
    let seconds = number("BEELINE_WAKE_SECONDS").unwrap_or(if deep { 60 } else { 1 });
    Duration::from_secs(seconds)
}

/// Numbers from one seed.
pub struct Chance(pub u64);

impl Chance {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Nothing, part of a spin, just after it, long after it.
    pub fn idle(&mut self) {
        match self.below(8) {
            0..=2 => {}
            3 | 4 => {
                let until = Instant::now() + Duration::from_nanos(self.below(60_000));
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
            5 | 6 => std::thread::sleep(Duration::from_micros(self.below(150))),
            _ => std::thread::sleep(Duration::from_micros(self.below(3000))),
        }
    }
}

/// A connection with both ends in the table, and short rings.
pub fn pair() -> [TcpStream; 2] {
    begin();
    accelerated_by(4096)
}

pub fn close(streams: [TcpStream; 2]) {
    for stream in streams {
        connection::closing(stream.as_raw_fd());
        drop(stream);
    }
}

pub fn give(fd: RawFd, bytes: &[u8], flags: i32) -> Result<usize, Errno> {
    let piece = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    unsafe { send::send(fd, connection::find(fd).unwrap(), &piece, flags) }
}

pub fn take(fd: RawFd, bytes: &mut [u8], flags: i32) -> Result<usize, Errno> {
    let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    unsafe { receive::receive(fd, connection::find(fd).unwrap(), &piece, flags) }
}

pub fn take_all(fd: RawFd, mut bytes: &mut [u8]) {
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

pub fn say(line: &str) {
    use std::io::Write as _;
    let _ = std::io::stderr().write_all(format!("ran: {line}\n").as_bytes());
}

/// Ends the test when nothing moved for too long, for the threads that wait would wait for ever; says
/// what stands in the words of every connection first. With `BEELINE_WAKE_KEEP` the process stays.
pub fn watch<T>(
    what: &str,
    seed: u64,
    moved: &AtomicU64,
    done: &AtomicBool,
    part: impl FnOnce() -> T,
) -> T {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut last, mut looks) = (0, 0);
            while !done.load(Ordering::Acquire) {
                std::thread::sleep(TICK);
                let now = moved.load(Ordering::Relaxed);
                looks = if now == last { looks + 1 } else { 0 };
                last = now;
                if looks > LATEST {
                    say(&format!(
                        "{what}: a wake-up was lost after {now} messages, BEELINE_SEED={seed}"
                    ));
                    table::each(|fd, connection| say(&words(fd, connection)));
                    if std::env::var_os("BEELINE_WAKE_KEEP").is_some() {
                        std::thread::sleep(Duration::from_secs(24 * 3600));
                    }
                    std::process::abort();
                }
            }
        });
        // Of what fails in the part itself, that is told.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(part));
        done.store(true, Ordering::Release);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What one end says of itself, and what the kernel's stream holds for it.
fn words(fd: RawFd, connection: &Connection) -> String {
    let own = connection.segment.own();
    let state = connection.segment.state();
    let unread = kernel::unread(fd);
    format!("descriptor {fd}, state {state:?}, {unread} bytes in the kernel's stream: {own:?}")
}

pub fn rearm(set: RawFd, fd: RawFd, how: i32, edge: bool) {
    let mode = if edge { libc::EPOLLET | libc::EPOLLONESHOT } else { 0 };
    let event = libc::epoll_event {
        events: (libc::EPOLLIN | mode) as u32,
        u64: u64::try_from(fd).unwrap(),
    };
    epoll::control(set, how, fd, Some(event)).unwrap().unwrap();
}

pub fn fresh_set() -> RawFd {
    let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert!(set >= 0);
    set
}

pub fn close_sets(sets: &[RawFd]) {
    for &set in sets {
        connection::closing(set);
        unsafe { libc::close(set) };
    }
}
