//! Rings: the bytes by which the proxy says in a placeholder that packets came, and who takes them out.
//!
//! The kernel says of a placeholder that it is readable for as long as a ring is in it. A ring that stays behind when its
//! packets were read makes a program's set tell of what is not there, and the program's next call finds nothing: programs
//! that take that for an error (wrk does) count one. So the reader that empties the queue takes the rings, also one that
//! is on its way.

use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, fence};

use super::channel::{ARMED, RINGING};
use super::connection::Connection;
use crate::kernel;

/// Looks at a ring on its way with a pause of the processor between them, then with a yield.
const LOOKS: u32 = 200;
/// Sleeps of a millisecond between further looks: the proxy's thread waits for a processor by now. The thread of a proxy
/// that is stopped in the middle of a ring is not waited for any longer: the placeholder is readable once too often then.
const SLEEPS: u32 = 500;

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
        let _asleep = self.sleepers.enter();
        for _ in 0..SLEEPS {
            // A signal ends a sleep early, and the look that follows is the same.
            let _ = kernel::pause(1);
            if !is_ringing() {
                return;
            }
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
