//! What is different where the other end is in another host: who is woken, what the end of the
//! kernel's stream means, and who holds an end.
//!
//! The words of the other end are written by this host's relay, in the order in which the other
//! host's relay told of them. The kernel's connection runs beside the fabric, so its news may come
//! before theirs; but a relay lets go of the kernel's connection only after the other one confirmed
//! all it had to tell. So, once the other end has switched:
//!
//! | the kernel says | the other end's words | the program hears |
//! | --- | --- | --- |
//! | end or reset | `finished`, or `closed` with everything read | end of stream |
//! | end or reset | `closed` with bytes unread | `ECONNRESET` |
//! | end or reset | nothing | `ECONNRESET`: a relay died, or a host |
//! | nothing, and no relay hears the bell | | `ECONNRESET` |
//!
//! An end of the kernel's stream before the switch is an end of the program's bytes, as without us.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use crate::connection::{Connection, Heard};
use crate::holder::hold;
use crate::kernel;
use crate::relayed::{self, Rung};
use crate::segment::{CLOSED_CLEANLY, CLOSED_UNREAD, Holders};
use crate::table;

/// An end waits for the other relay at least so long before it stays with the kernel for good.
const PATIENCE_NS: u64 = 2_000_000_000;

fn this_process() -> u32 {
    std::process::id()
}

impl Connection {
    fn holders(&self) -> Option<(Holders<'_>, u64)> {
        self.between_hosts().map(|name| (self.segment.holders(), name))
    }

    /// Wakes the relay, which stands for the other end.
    #[cold]
    pub(crate) fn ring_relay(&self, fd: RawFd, name: u64) {
        if relayed::ring(name) == Rung::NoRelay {
            self.broke();
            // Whoever goes on sending hears it from the kernel, and so does the other end.
            let _ = kernel::shutdown(fd, libc::SHUT_RDWR);
        }
    }

    /// The connection ended otherwise than in good order: the program hears it once.
    fn broke(&self) -> Heard {
        if self.kernel_ended.swap(true, Ordering::Relaxed) {
            return Heard::End;
        }
        self.pending_error.store(libc::ECONNRESET, Ordering::Relaxed);
        Heard::Broken
    }

    /// The kernel's stream of a relayed connection ended.
    pub(crate) fn heard_end_between_hosts(&self) -> Heard {
        let other = &self.segment.other().signs;
        let closed = other.closed.load(Ordering::Acquire);
        if self.kernel_bytes_left().is_some() && closed != CLOSED_UNREAD {
            // The program's own bytes ended there. Whether the other end still reads is the
            // relays' to say.
            return Heard::End;
        }
        if closed == CLOSED_CLEANLY || closed == 0 && other.finished.load(Ordering::Acquire) != 0 {
            self.kernel_ended.store(true, Ordering::Relaxed);
            return Heard::End;
        }
        self.broke()
    }

    /// Polling the kernel's stream of a relayed connection said `over` (both directions, or an
    /// error), or only that nothing more will come. `due`: the last look is some time ago.
    pub(crate) fn heard_hang_up_between_hosts(&self, fd: RawFd, name: u64, over: bool, due: bool) {
        if self.kernel_bytes_left().is_none() {
            self.heard_end_between_hosts();
        } else if over && self.is_bound_for_ring() {
            let closed = self.segment.other().signs.closed.load(Ordering::Acquire);
            if closed != CLOSED_CLEANLY {
                self.broke();
            }
            self.kernel_ended.store(true, Ordering::Relaxed);
        } else if over {
            // The kernel's connection, and the kernel says why.
            self.kernel_ended.store(true, Ordering::Relaxed);
        } else if due {
            // It ended before the switch: only a relay knows more, if there is one.
            self.ring_relay(fd, name);
        }
    }

    /// An end that gives room back, or waits for any, can be woken by doorbells only after its own
    /// switch; the relay rings in this end's name.
    pub(crate) fn switch_for_doorbells(&self) {
        let own = self.segment.own();
        if own.signs.switched_at.load(Ordering::Relaxed) == 0
            && let Ok(_held) = hold(&own.sending.holder, &self.sleepers)
        {
            self.sends_by_ring();
        }
    }

    /// True while a relayed connection that began a short time ago may still be matched.
    pub(crate) fn is_being_matched(&self) -> bool {
        self.between_hosts().is_some()
            && kernel::coarse_ns().wrapping_sub(self.begun_ns) < PATIENCE_NS
    }

    /// The connection stays with the kernel for good, or is closed: the relay lets go of its copy of
    /// the socket.
    pub(crate) fn tell_relay(&self) {
        if let Some(name) = self.between_hosts() {
            let _ = relayed::ring(name);
        }
    }

    /// This process has the end of a relayed connection from now on.
    pub(crate) fn begin_to_hold(&self) {
        if let Some((holders, name)) = self.holders()
            && holders.add(this_process())
        {
            let _ = relayed::ring(name);
        }
    }

    /// This process closes its last number for it. True when nobody else has it.
    pub(crate) fn leave(&self, shared: bool) -> bool {
        let Some((holders, name)) = self.holders() else { return !shared };
        let mut again = false;
        if shared {
            // By a message to itself, a process has an end twice.
            table::each(|_, other| again |= other.between_hosts() == Some(name));
        }
        !again && holders.remove(this_process()) || !shared
    }
}

/// A process that is about to share this one's relayed connections is on its way.
pub fn expect_holder() {
    table::each(|_, connection| {
        if let Some((holders, _)) = connection.holders() {
            holders.expect_one();
        }
    });
}

/// It was told of in another way by now, or never came.
pub fn expected_holder() {
    table::each(|_, connection| {
        if let Some((holders, _)) = connection.holders() {
            holders.expected_one();
        }
    });
}

/// This process is the child that [`expect_holder`] told of.
pub(crate) fn arrived() {
    let mut news = false;
    table::each(|_, connection| {
        if let Some((holders, _)) = connection.holders() {
            news |= holders.add(this_process());
            holders.expected_one();
        }
    });
    ring_for_all(news);
}

/// Rings once, however many connections there are news of.
fn ring_for_all(news: bool) {
    if news {
        let _ = relayed::ring(relayed::EVERYTHING);
    }
}

/// `process`, which runs another program by now, has what survived.
pub fn held_by(process: u32) {
    let mut news = false;
    table::each(|fd, connection| {
        if let Some((holders, _)) = connection.holders()
            && kernel::survives_exec(fd)
        {
            news |= holders.add(process);
        }
    });
    ring_for_all(news);
}

/// This process is about to become another program, which will not have `connection`. Undone by
/// [`stayed`].
pub fn leaving_by_exec(connection: &Connection) {
    if let Some((holders, name)) = connection.holders()
        && holders.remove(this_process())
    {
        let _ = relayed::ring(name);
    }
}

/// This process did not become another program after all.
pub fn stayed() {
    let mut news = false;
    table::each(|_, connection| {
        if let Some((holders, _)) = connection.holders() {
            news |= holders.add(this_process());
        }
    });
    ring_for_all(news);
}

/// Another process carries `connection` from now on, and this one has no number for it any more.
pub(crate) fn handed_to_carrier(connection: &Connection) {
    leaving_by_exec(connection);
}
