//! Waking the other end: a note on a [board], or a doorbell through the kernel's stream.
//! `wake` has the order of the steps.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_os::barrier;

use crate::connection::Connection;
use crate::holder::hold;
use crate::kernel::{self, Errno};
use crate::{board, wake};

impl Connection {
    /// Makes the poster's store visible before it looks whether the other end sleeps.
    #[inline]
    pub fn light_fence(&self) {
        let theirs = self.segment.other().signs.asymmetric.load(Ordering::Relaxed) != 0;
        barrier::light(theirs && barrier::is_asymmetric());
    }

    /// Wakes the other end if it sleeps for the reason that `armed` (a sign of its) tells.
    #[inline]
    pub fn wake(&self, fd: RawFd, armed: &AtomicU64) {
        let sleep = wake::sleeps(armed, || self.light_fence());
        if sleep != 0 {
            self.wake_from(fd, armed, sleep);
        }
    }

    /// [`Connection::wake`] where the other end is armed with `held`.
    #[inline(never)]
    fn wake_from(&self, fd: RawFd, armed: &AtomicU64, held: u64) {
        if wake::is_place(held) {
            self.note(fd, armed, held);
        } else if !wake::was_rung(held) {
            self.ring_doorbell(fd, armed, held, held);
        }
    }

    /// The other end has a place on a board: notes it there, and rings if its set sleeps.
    fn note(&self, fd: RawFd, armed: &AtomicU64, place: u64) {
        match board::note(place) {
            Some(0) => {}
            Some(sleep) if sleep != wake::EACH => self.ring_doorbell(fd, armed, place, sleep),
            _ => self.ring_doorbell(fd, armed, wake::EACH, wake::EACH),
        }
    }

    /// Rings for `sleep`; the other end was armed with `held`.
    #[cold]
    fn ring_doorbell(&self, fd: RawFd, armed: &AtomicU64, held: u64, sleep: u64) {
        if !self.has_doorbells() {
            return;
        }
        // After the way back there are none: who took it woke everybody.
        let Some(_at_bells) = self.go_to_bells(true) else { return };
        // A sleep on many ends stays armed: it hears of this end by the bell of any.
        if sleep == wake::EACH && !wake::take_down(armed) {
            return;
        }
        if let Some(name) = self.between_hosts() {
            self.ring_relay(fd, name);
            return;
        }
        // A full socket holds unread bytes, which wake just as well.
        let rung = kernel::send(fd, &[0], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        if sleep != wake::EACH
            && matches!(rung, Ok(_) | Err(Errno(libc::EAGAIN)))
            && (held == sleep || wake::has_still(armed, held))
        {
            wake::remember_rung(sleep);
        }
        // To a process that is gone, it was answered with a reset.
        self.look_after_peer(fd);
    }

    /// What this end sends through the kernel is a doorbell: a reader may ring before it ever sent, and
    /// only bytes beyond the switch are.
    fn has_doorbells(&self) -> bool {
        let own = self.segment.own();
        if own.signs.switched_at.load(Ordering::Relaxed) != 0 {
            return true;
        }
        hold(&own.sending.holder, &self.sleepers).is_ok_and(|_held| self.sends_by_ring())
    }
}
