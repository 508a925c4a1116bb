//! Rings: the bytes by which the proxy says in a placeholder that packets came, and the reader that takes them out.
//!
//! The kernel says of a placeholder that it is readable for as long as a ring is in it. A ring that stays behind when its
//! packets were read makes a program's set tell of what is not there, and the program's next call finds nothing: programs
//! that take that for an error (wrk does) count one. So the reader that empties the queue takes the rings, also one that
//! is on its way.

use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::channel::{ARMED, RINGING};
use super::connection::Connection;
use crate::kernel;

/// Looks at a ring on its way with a pause of the processor between them, then with a yield.
const LOOKS: u32 = 200;
/// How long further looks go on, with a sleep between them: the proxy's thread waits for a processor by now. The thread of
/// a proxy that is stopped in the middle of a ring is not waited for any longer: the placeholder is readable once too
/// often then. Nor is any other ring of the connection: another process that has it may say without end that one is on
/// its way.
const LONGEST: Duration = Duration::from_millis(500);

/// Sleeps until no ring is on its way. False: that took too long.
fn is_over_in_time(
    is_ringing: impl Fn() -> bool,
    mut now: impl FnMut() -> Instant,
    mut sleep: impl FnMut(),
) -> bool {
    let end = now() + LONGEST;
    loop {
        sleep();
        if !is_ringing() {
            return true;
        }
        if now() >= end {
            return false;
        }
    }
}

impl Connection {
    /// Waits until no ring is on its way.
    fn await_ring(&self) {
        let armed = &self.channel.program().reader_armed;
        let is_ringing = || armed.load(Ordering::SeqCst) == RINGING;
        for look in 0..2 * LOOKS {
            if !is_ringing() {
                return;
            }
            if look < LOOKS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        if self.gave_up_rings.load(Ordering::Relaxed) {
            return;
        }
        let _asleep = self.sleepers.enter();
        // A signal ends a sleep early, and the look that follows is the same.
        if !is_over_in_time(is_ringing, Instant::now, || _ = kernel::pause(1)) {
            self.gave_up_rings.store(true, Ordering::Relaxed);
        }
    }

    /// Takes rings that were heard, and has the next packet ring.
    pub(super) fn settle(&self, fd: RawFd) {
        let (program, receiving) = (self.channel.program(), self.channel.receiving());
        // Against the fence between the proxy's word that it rings and its look at the queue.
        fence(Ordering::SeqCst);
        // A ring on its way would tell of what was read already.
        self.await_ring();
        let taken = receiving.bells.load(Ordering::Relaxed);
        if self.channel.proxy().bells.load(Ordering::Acquire) != taken {
            let count = kernel::receive(fd, &mut [0; 64], libc::MSG_DONTWAIT).unwrap_or(0);
            let count = u32::try_from(count).unwrap_or(0);
            receiving.bells.store(taken.wrapping_add(count), Ordering::Relaxed);
        }
        if program.reader_armed.load(Ordering::Relaxed) != ARMED {
            program.reader_armed.store(ARMED, Ordering::SeqCst);
        }
        // Against the fence between the proxy's packets and its look at the arm.
        fence(Ordering::SeqCst);
        if self.has_packets() && program.reader_armed.load(Ordering::SeqCst) == ARMED {
            // It may have looked before: asked again, it rings.
            self.poke(fd);
        }
    }

    /// From now on the kernel's view of the placeholder counts.
    pub fn watch(&self, fd: RawFd) {
        let watched = &self.channel.program().watched;
        if watched.load(Ordering::Relaxed) == 0 {
            watched.store(1, Ordering::SeqCst);
            self.settle(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;
    use crate::packets::channel::{Channel, Shape};
    use crate::packets::page::Page;

    #[test]
    fn the_clock_ends_the_wait_for_a_ring_however_long_sleeps_are() {
        for length in [1, 4, 70] {
            let (clock, sleeps) = (Cell::new(Instant::now()), Cell::new(0));
            let end = clock.get() + LONGEST;
            let length = Duration::from_millis(length);
            let sleep = || {
                clock.set(clock.get() + length);
                sleeps.set(sleeps.get() + 1);
            };
            assert!(!is_over_in_time(|| true, || clock.get(), sleep));
            assert!(clock.get() >= end && clock.get() < end + length);
            let before = sleeps.get();
            assert!(is_over_in_time(|| sleeps.get() < before + 3, || clock.get(), sleep));
            assert_eq!(sleeps.get(), before + 3);
        }
    }

    /// Another process that has the connection writes the word.
    #[test]
    fn a_ring_that_never_comes_is_slept_for_once() {
        let at = "10.0.0.1:1".parse().unwrap();
        let channel = Channel::create(Shape { block_bytes: 256, blocks: 8 }, at, at).unwrap();
        let connection = Connection::new(channel, Arc::new(Page::create().unwrap()));
        let (fd, _proxy) = UnixStream::pair().unwrap();
        let stamps = [(); 3].map(|()| {
            connection.channel.program().reader_armed.store(RINGING, Ordering::Relaxed);
            let before = connection.sleep_stamp();
            connection.settle(fd.as_raw_fd());
            connection.sleep_stamp() != before
        });
        assert_eq!(stamps, [true, false, false]);
    }
}
