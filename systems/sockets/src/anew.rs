//! Asking anew, after a connection went [back](crate::recall) to the kernel: the other end may be in
//! another host by now, or in this one.
//!
//! Until then the end *rests*: it is the kernel's, and every byte is counted, because a socket that was
//! restored elsewhere has the kernel's own count no more. Like a young connection ([`crate::young`]) it asks
//! on its way out of a call that brings the count of calls to as many; not before the time for which it
//! was called back, unless the socket is another one by then (restored), or that time was for small messages only
//! ([`Hold`]) and large ones pass; and again a second later, after
//! some times 2, 4, ... 32 seconds later, as often as the other end does not come. While a thread sleeps on
//! it, it stays due: every call looks on its way out, the sleeper's, too.
//!
//! The answer is a new segment, so the connection becomes another one for this process: the table leads
//! to the new, and whoever is inside a call on the old finds its halves [moved](MOVED) and looks again.
//!
//! Invariants:
//! - asked only by an end that one process has, from whose ring everything was read, and on which no
//!   thread sleeps; while asking, the asker holds both halves, and keeps them when they are moved;
//! - the new segment goes on counting where the old one stopped: `switched_at` tells a place in the
//!   stream that both ends know by the same number.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::control::Question;
use crate::kernel::{self, Errno};
use crate::recall::{Bells, Hold};
use crate::segment::{STATE_GIVEN_UP, Segment};
use crate::{epoll, holder, introduce, table, together, young};

/// What a call on a connection that moved answers: the number leads to another one by now.
pub const MOVED: Errno = Errno(libc::ERESTART);

/// So many bytes a call are not small any more: more than relays send whole in a message.
const LARGE: u64 = 2048;
/// An end that asked anew waits so long for the other.
pub(crate) const PATIENT_NS: u64 = 30_000_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// Longest time that moving takes.
const LONGEST: Duration = Duration::from_secs(2);
/// So many questions are a second apart: the other end was moved a moment ago, or is about to be.
const EVEN_TRIES: u32 = 16;
/// Longest time between two questions: so many doublings of a second, about half a minute.
const MOST_DOUBLINGS: u32 = 5;

/// Of one connection: whether, when and by whom it was asked for anew.
#[derive(Debug, Default)]
pub struct Anew {
    /// It came out of such a question: it does not become plain, it rests.
    is_renewed: AtomicBool,
    is_due: AtomicBool,
    calls: AtomicU32,
    tries: AtomicU32,
    not_before_ns: AtomicU64,
    /// Sooner, from then on, if what passes is large; 0: not so.
    lifts_from_ns: AtomicU64,
    /// Bytes that had passed, both ways, when calls were last counted.
    passed: AtomicU64,
    /// The kernel's number of the socket when it came here.
    cookie: AtomicU64,
    is_moving: AtomicBool,
    successor: AtomicPtr<Connection>,
}

impl Anew {
    /// Of the socket `fd`.
    pub(crate) fn new(fd: RawFd) -> Self {
        let cookie = AtomicU64::new(kernel::cookie(fd).unwrap_or(0));
        Self { cookie, ..Self::default() }
    }

    /// It is time to ask.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.is_due.load(Ordering::Relaxed)
    }

    /// It came out of a question asked anew.
    pub(crate) fn is_renewed(&self) -> bool {
        self.is_renewed.load(Ordering::Relaxed)
    }

    /// A thread that has counted itself among the sleepers is not to sleep: the connection moves.
    #[inline]
    pub(crate) fn is_moving(&self) -> bool {
        self.is_moving.load(Ordering::SeqCst)
    }

    /// The next question comes later than the last one did.
    pub(crate) fn put_off(&self) {
        let tries = self.tries.fetch_add(1, Ordering::Relaxed);
        let wait = SECOND_NS << tries.saturating_sub(EVEN_TRIES).min(MOST_DOUBLINGS);
        self.not_before_ns.store(kernel::coarse_ns().saturating_add(wait), Ordering::Relaxed);
        self.calls.store(0, Ordering::Relaxed);
    }
}

impl Connection {
    /// The kernel's, and counted, until it asks anew.
    #[inline]
    pub(crate) fn rests(&self) -> bool {
        self.is_returned()
            || self.anew.is_renewed()
                && self.segment.state().load(Ordering::Acquire) == STATE_GIVEN_UP
    }

    /// A call moved bytes while it rests.
    #[cold]
    pub(crate) fn count_towards_anew(&self, fd: RawFd) {
        let calls = self.anew.calls.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if calls < young::calls_before_asking().max(1) {
            return;
        }
        self.anew.calls.store(0, Ordering::Relaxed);
        let now = kernel::coarse_ns();
        let own = self.segment.own();
        let hold = own.sharing.hold_ns.swap(0, Ordering::Relaxed);
        let sent = own.sending.by_kernel.load(Ordering::Relaxed);
        let passed = sent.wrapping_add(own.receiving.by_kernel.load(Ordering::Relaxed));
        let more = passed.wrapping_sub(self.anew.passed.swap(passed, Ordering::Relaxed));
        if hold != 0 {
            let Hold { time, while_small } = Hold::decode(hold);
            let until = now.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            self.anew.not_before_ns.fetch_max(until, Ordering::Relaxed);
            let lifts = if while_small { now.saturating_add(SECOND_NS) } else { 0 };
            self.anew.lifts_from_ns.store(lifts, Ordering::Relaxed);
        } else if more >= LARGE.saturating_mul(u64::from(calls)) {
            let lifts = self.anew.lifts_from_ns.load(Ordering::Relaxed);
            if lifts != 0 && now >= lifts {
                self.anew.lifts_from_ns.store(0, Ordering::Relaxed);
                self.anew.not_before_ns.store(0, Ordering::Relaxed);
            }
        }
        let early = now < self.anew.not_before_ns.load(Ordering::Relaxed);
        let restored = || kernel::cookie(fd) != Some(self.anew.cookie.load(Ordering::Relaxed));
        if !early || restored() {
            self.anew.is_due.store(true, Ordering::Relaxed);
        }
    }
}

/// The two halves of an end, held by this thread.
struct Halves<'a>(&'a Connection);

impl<'a> Halves<'a> {
    fn take(connection: &'a Connection) -> Option<Self> {
        let own = connection.segment.own();
        holder::take(&own.receiving.holder).ok()?;
        if holder::take(&own.sending.holder).is_err() {
            holder::leave(&own.receiving.holder);
            return None;
        }
        Some(Self(connection))
    }

    /// Whoever comes next is sent on.
    fn move_on(self) {
        let own = self.0.segment.own();
        holder::leave_moved(&own.receiving.holder);
        holder::leave_moved(&own.sending.holder);
        std::mem::forget(self);
    }
}

impl Drop for Halves<'_> {
    fn drop(&mut self) {
        let own = self.0.segment.own();
        holder::leave(&own.sending.holder);
        holder::leave(&own.receiving.holder);
    }
}

/// Asks for `fd` anew, which is `connection` and due. Later, if it cannot be now.
#[cold]
pub(crate) fn ask(fd: RawFd, connection: &Connection) {
    // It stays due: the sleeper asks on its way out, or who comes when it has left.
    if connection.sleepers.any() {
        return;
    }
    connection.anew.is_due.store(false, Ordering::Relaxed);
    let Some(old) = table::ours(fd).filter(|ours| std::ptr::eq(*ours, connection)) else { return };
    if !together::is_alone(&old.segment, true)
        || table::is_foreign_process()
        || table::is_left_to_kernel()
        || introduce::is_asking()
        || !introduce::is_candidate(fd)
    {
        return;
    }
    young::look_for_restore();
    // A handler that interrupted us and came to this number would wait for us.
    let signals = kernel::block_signals();
    if let Some(halves) = Halves::take(old) {
        // Said, then looked at, as by who goes to sleep.
        old.anew.is_moving.store(true, Ordering::SeqCst);
        let alone = !old.sleepers.any() && !is_leaving() && !together::is_shared(&old.segment);
        let asks = alone && is_between_streams(fd, old);
        match asks.then(|| renewed(fd, old)).flatten() {
            Some(new) => {
                let new = Box::leak(Box::new(new));
                old.anew.successor.store(new, Ordering::SeqCst);
                table::succeed(old, new);
                halves.move_on();
                epoll::renewed(new);
            }
            None => {
                // Where nobody was asked, the next calls bring it about again.
                if asks {
                    old.anew.put_off();
                }
                old.anew.is_moving.store(false, Ordering::SeqCst);
                drop(halves);
            }
        }
    }
    kernel::restore_signals(signals);
}

/// Nothing of what was sent before `old` rested, doorbells neither, lies before its reader.
fn is_between_streams(fd: RawFd, old: &Connection) -> bool {
    old.skip_bells(fd) == Ok(Bells::Passed) && old.kernel_bytes_left() == Some(u64::MAX)
}

/// The connection that `old` becomes, both halves of which the caller holds.
fn renewed(fd: RawFd, old: &Connection) -> Option<Connection> {
    let own = old.segment.own();
    let clean = own.signs.finished.load(Ordering::Relaxed) == 0
        && own.receiving.shut.load(Ordering::Relaxed) == 0
        && !old.is_over();
    if !clean {
        return None;
    }
    let sent = own.sending.by_kernel.load(Ordering::Relaxed);
    let received = own.receiving.by_kernel.load(Ordering::Relaxed);
    let (given, taken) = kernel::counted(fd)?;
    let segment = introduce::segment(fd, Question::Attach)?;
    let words = segment.own();
    words.sending.by_kernel.store(sent, Ordering::Relaxed);
    words.receiving.by_kernel.store(received, Ordering::Relaxed);
    let origins = &words.sharing.origins;
    origins[0].store(sent.wrapping_sub(given), Ordering::Relaxed);
    origins[1].store(received.wrapping_sub(taken), Ordering::Relaxed);
    words.sharing.is_anew.store(1, Ordering::Relaxed);
    let new = Connection::new(segment, fd);
    // The kernel may have ours still: what the program wants is known here alone.
    for (kept, known) in new.held_options.iter().zip(&old.held_options) {
        kept.store(known.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    new.anew.is_renewed.store(true, Ordering::Relaxed);
    new.anew.tries.store(old.anew.tries.load(Ordering::Relaxed), Ordering::Relaxed);
    new.was_full.store(true, Ordering::Relaxed);
    new.forget_blocking_mode();
    new.join().then_some(new)
}

/// Where a call that found `connection` [moved](MOVED) goes on; `None`: with the kernel, as nothing of
/// ours.
pub(crate) fn follow(fd: RawFd, connection: &Connection) -> Option<&'static Connection> {
    let begun = Instant::now();
    loop {
        let ours = table::ours(fd)?;
        if !std::ptr::eq(ours, connection) {
            return Some(ours);
        }
        if let Some(successor) = successor(ours) {
            table::succeed_one(fd, ours, successor);
        } else if begun.elapsed() > LONGEST {
            // Nobody of this process moves it: words that nobody can have meant.
            table::forget(fd);
        }
        kernel::yield_now();
    }
}

/// Another process is about to have `connection`, too, as `mark` notes: what it is by then, which does not move any
/// more.
pub(crate) fn shared(
    connection: &'static Connection,
    mark: impl Fn(&Segment),
) -> &'static Connection {
    // Said, then looked at, as by who moves it.
    mark(&connection.segment);
    let settled = settled(connection);
    if !std::ptr::eq(connection, settled) {
        mark(&settled.segment);
    }
    settled
}

static LEAVING: AtomicBool = AtomicBool::new(false);

/// Before `exec`: no connection begins to move until [`stayed`], so that the next program finds what each has
/// become.
pub fn leaving() {
    LEAVING.store(true, Ordering::SeqCst);
}

/// This program is about to be replaced.
fn is_leaving() -> bool {
    LEAVING.load(Ordering::SeqCst)
}

/// The program was not replaced.
pub fn stayed() {
    LEAVING.store(false, Ordering::SeqCst);
}

/// What `connection` is once it does not move, for who has seen to it that it does not begin to: by
/// [`shared`], or before `exec` by [`leaving`].
pub fn settled(connection: &'static Connection) -> &'static Connection {
    let begun = Instant::now();
    while connection.anew.is_moving() && begun.elapsed() <= LONGEST {
        if let Some(successor) = successor(connection) {
            return successor;
        }
        kernel::yield_now();
    }
    connection
}

/// True when the number leads elsewhere by now.
pub(crate) fn has_moved(connection: &Connection) -> bool {
    !connection.anew.successor.load(Ordering::Acquire).is_null()
}

/// What `connection` became, for a number that was copied from it meanwhile.
pub(crate) fn successor(connection: &Connection) -> Option<&'static Connection> {
    let successor = connection.anew.successor.load(Ordering::SeqCst);
    // SAFETY: a leaked box, given back only after its last number went and a grace was over.
    unsafe { successor.as_ref() }
}
