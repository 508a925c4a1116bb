//! A connection that has not shown yet that it lives.
//!
//! Asking the monitor, mapping a segment and changing over cost about as much as the kernel takes for
//! five round trips. A program that connects for every request would pay it each time and gain nothing.
//! So a fresh connection is *young*: the kernel's, while the calls that move its bytes are counted. The
//! one that brings the count to [`CALLS`] asks, on its way out ([`Call::done`]): the price is paid when
//! as much was already lost by waiting, so nobody pays more than twice what the better choice costs.
//!
//! What is counted stands in the connection's place in the table:
//!
//! ```text
//! 63          40 39       24 23        8 7      0
//! | bytes / 256  |  calls   | in a call | young |        while it is young
//! | thread that asks                    | asks  |        while it asks: others wait for the answer
//! ```
//!
//! Invariants:
//! - nobody changes over while another thread is inside a call of the kernel on the number, which would
//!   take doorbells for bytes, or sleep without hearing them: who asks was the last inside;
//! - how many bytes went either way before is the kernel's to say ([`kernel::moved`]), at a moment when
//!   none of this process's calls is under way; if it cannot, or the stream is over, it stays plain, and
//!   so do those that a process had when it was restored from a checkpoint;
//! - what shares a young connection with another program or number ([`settle`]) asks at once, or leaves
//!   it to the kernel for good.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use crate::connection;
use crate::introduce;
use crate::kernel;
use crate::lane::Lane;
use crate::table::{self, Kind};

/// Calls that moved bytes after which a connection lives.
pub const CALLS: u32 = 10;
/// And bytes that one call or more moved.
pub const BYTES: usize = 64 << 10;
/// Variable for another number of calls than [`CALLS`]; 0: each connection asks at once.
pub const VARIABLE: &str = "BEELINE_SOCKETS_ASK_AFTER";

/// 0 until the library is told otherwise: who calls this crate's functions himself asks at once.
static ASK_AFTER: AtomicU32 = AtomicU32::new(0);

const KIND: usize = 0xff;
const YOUNG: usize = 0x05;
const ASKS: usize = 0x06;
const INSIDE: usize = 1 << 8;
const INSIDE_ALL: usize = 0xffff << 8;
const CALL: usize = 1 << 24;
const CALLS_ALL: usize = 0xffff << 24;
const BYTES_AT: u32 = 40;
/// Longest time that a `fork` or an `exec` asks for those that are young, in parts of the wait for one answer: 50 ms.
const BRIEF_PART: u32 = 5;
/// Longest time that others wait for the thread that asks, in waits for one answer: longer than it can take.
const LONGEST_TIMES: u32 = 8;

/// From now on connections ask after so many calls, as the environment says.
pub fn begin() {
    let given = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok());
    ASK_AFTER.store(given.unwrap_or(CALLS), Ordering::Relaxed);
    introduce::begin();
}

/// What was told by [`begin`].
pub(crate) fn calls_before_asking() -> u32 {
    ASK_AFTER.load(Ordering::Relaxed)
}

/// True when a place in the table is not a connection's, but what this module wrote.
pub(crate) fn is_mark(value: usize) -> bool {
    matches!(value & KIND, YOUNG | ASKS)
}

/// What such a place tells, once nobody asks any more.
#[cold]
pub(crate) fn settled_kind(slot: &AtomicUsize) -> Kind {
    let begun = Instant::now();
    let mut value = slot.load(Ordering::Acquire);
    while value & KIND == ASKS {
        kernel::yield_now();
        if begun.elapsed() > introduce::patience() * LONGEST_TIMES {
            // Its thread is gone. It finds that the place is not its own any more, should it come back.
            let _ = slot.compare_exchange(value, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
        value = slot.load(Ordering::Acquire);
    }
    if value & KIND == YOUNG { Kind::Young } else { table::kind_of(value) }
}

/// `fd` has just become connected.
pub fn connected(fd: RawFd) {
    if ASK_AFTER.load(Ordering::Relaxed) == 0 || table::was_copied_early(fd) {
        connection::connected(fd);
    } else if !table::is_foreign_process()
        && !table::is_left_to_kernel()
        && !table::is_watched_plain(fd)
        && table::ours(fd).is_none()
        && table::packets(fd).is_none()
    {
        table::set_mark(fd, YOUNG);
    }
}

/// `fd` has just come out of `accept`.
pub fn accepted(fd: RawFd) {
    table::forget(fd);
    connected(fd);
}

/// A call that moves bytes of `fd` is the kernel's; [`Call::done`] follows.
#[derive(Debug)]
pub struct Call(Option<RawFd>);

/// Whose a call that moves bytes is.
#[derive(Debug)]
pub enum Way {
    /// Ours.
    Ours(Lane),
    /// The kernel's.
    Kernels(Call),
}

/// Before a call that moves bytes of `fd`.
#[inline]
#[must_use]
pub fn enter(fd: RawFd) -> Way {
    match table::kind(fd) {
        Kind::Ours(connection) => Way::Ours(Lane::Rings(connection)),
        Kind::Packets(connection) => Way::Ours(Lane::Packets(connection)),
        Kind::Plain => Way::Kernels(Call(None)),
        Kind::Connecting => {
            connection::look_at_connecting(fd);
            if let Kind::Connecting = table::kind(fd) {
                Way::Kernels(Call(None))
            } else {
                enter(fd)
            }
        }
        Kind::Young => {
            if go_inside(fd) {
                Way::Kernels(Call(Some(fd)))
            } else {
                enter(fd)
            }
        }
    }
}

/// Counts a call of this thread; false when `fd` is not young any more.
fn go_inside(fd: RawFd) -> bool {
    let Some(slot) = table::slot(fd) else { return false };
    let enters = |value: usize| {
        let fits = value & KIND == YOUNG && value & INSIDE_ALL != INSIDE_ALL;
        fits.then_some(value.wrapping_add(INSIDE))
    };
    slot.fetch_update(Ordering::AcqRel, Ordering::Acquire, enters).is_ok()
}

impl Call {
    /// True when [`Call::done`] has anything to do.
    #[inline]
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.0.is_some()
    }

    /// The call is over; it moved so many bytes, or none (zero and less).
    pub fn done(self, moved: isize) {
        let Some(fd) = self.0 else { return };
        let moved = usize::try_from(moved).unwrap_or(0);
        if go_outside(fd, moved) {
            ask(fd, false);
        }
    }
}

/// True when the connection lives, and nobody is inside a call on it.
fn lives(value: usize) -> bool {
    let calls = u32::try_from((value & CALLS_ALL) / CALL).unwrap_or(u32::MAX);
    let bytes = (value >> BYTES_AT) << 8;
    let alone = value & KIND == YOUNG && value & INSIDE_ALL == 0;
    alone && (calls >= ASK_AFTER.load(Ordering::Relaxed) || bytes >= BYTES)
}

/// The end of [`go_inside`]: true when it is time to ask, and nobody else is inside.
fn go_outside(fd: RawFd, moved: usize) -> bool {
    let Some(slot) = table::slot(fd) else { return false };
    let leaves = |value: usize| {
        if value & KIND != YOUNG || value & INSIDE_ALL == 0 {
            // Closed meanwhile, and perhaps open again as another.
            return None;
        }
        let mut next = value - INSIDE;
        if moved > 0 {
            if next & CALLS_ALL != CALLS_ALL {
                next += CALL;
            }
            let bytes = (next >> BYTES_AT).saturating_add(moved.div_ceil(256)).min(0xff_ffff);
            next = next & ((1 << BYTES_AT) - 1) | bytes << BYTES_AT;
        }
        Some(next)
    };
    slot.fetch_update(Ordering::AcqRel, Ordering::Acquire, leaves).is_ok()
        && moved > 0
        && lives(slot.load(Ordering::Relaxed))
}

/// If `fd` is young: asks now, or leaves it to the kernel for good where another thread is inside a call
/// on it. For whatever is about to share it, or to use it in a way that is not counted.
pub fn settle(fd: RawFd) {
    if !matches!(table::kind(fd), Kind::Young) {
        return;
    }
    if table::is_foreign_process() {
        // The memory is the parent's, which goes on beside this child.
        leave_to_kernel(fd);
    } else {
        ask(fd, true);
    }
}

/// `fd`, if it is young, stays the kernel's.
pub fn leave_to_kernel(fd: RawFd) {
    let Some(slot) = table::slot(fd) else { return };
    let plain = |value: usize| (value & KIND == YOUNG).then_some(0);
    let _ = slot.fetch_update(Ordering::AcqRel, Ordering::Acquire, plain);
}

/// [`settle`], for every young connection of which `is` says so; those that do not come to it in a fifth of the
/// longest wait for one answer stay the kernel's.
pub fn settle_all(is: impl Fn(RawFd) -> bool) {
    let (begun, brief) = (Instant::now(), introduce::patience() / BRIEF_PART);
    table::each_young(|fd| {
        if !is(fd) {
            return;
        }
        if begun.elapsed() < brief { settle(fd) } else { leave_to_kernel(fd) }
    });
}

/// Before anybody is asked: whether this process was restored since.
pub(crate) fn look_for_restore() {
    if table::was_restored() {
        // The kernel counts a restored connection's bytes from 0 again, and nobody else did.
        table::each_young(leave_to_kernel);
    }
}

/// Asks for `fd`, unless somebody is inside a call on it; then, if `finally`, it stays plain.
fn ask(fd: RawFd, finally: bool) {
    look_for_restore();
    let Some(slot) = table::slot(fd) else { return };
    let mine = (kernel::thread() as usize) << 8 | ASKS;
    let asks = |value: usize| match value & KIND {
        YOUNG if value & INSIDE_ALL == 0 => Some(mine),
        YOUNG if finally => Some(0),
        _ => None,
    };
    // A handler that interrupted us and came to this number would wait for us.
    let signals = kernel::block_signals();
    match slot.fetch_update(Ordering::AcqRel, Ordering::Acquire, asks) {
        Ok(before) if before & INSIDE_ALL == 0 => {
            let outcome = connection::asked(fd).map(Box::new);
            match outcome {
                // Another thread closed the number meanwhile: whatever it is now is not ours.
                Some(connection) => {
                    if let Err(connection) = table::replace_mark(fd, mine, connection) {
                        connection.is_nobodys();
                    } else {
                        crate::epoll::became_ours(fd);
                    }
                }
                None => {
                    let _ = slot.compare_exchange(mine, 0, Ordering::AcqRel, Ordering::Relaxed);
                }
            }
        }
        _ => {}
    }
    kernel::restore_signals(signals);
}

/// Young connections that this thread sleeps on in the kernel, by `poll` or `select`: they do not change
/// over meanwhile.
#[derive(Debug, Default)]
pub struct Watched(Vec<RawFd>);

impl Watched {
    /// Of these numbers, the young ones.
    pub fn new(numbers: impl Iterator<Item = RawFd>) -> Self {
        let young = |&fd: &RawFd| matches!(table::kind(fd), Kind::Young) && go_inside(fd);
        Self(numbers.filter(young).collect())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        for &fd in &self.0 {
            go_outside(fd, 0);
        }
    }
}
