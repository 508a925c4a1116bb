//! Who works on a half of an end: one thread at a time, over all processes. Its number stands in a word of
//! the segment, taken by compare-and-swap and left by a store. Nobody sleeps holding one, and a holder
//! that no longer exists loses it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::kernel::{self, Errno, Life};
use crate::sleepers::Sleepers;

/// Longest time a half can be held by a thread that runs now and then.
const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// Looks after which whoever holds a half has been kept from running, or is dead and not waited for.
const LONG: u32 = 4096;

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

fn thread() -> u32 {
    let known = THREAD.get();
    if known != 0 {
        return known;
    }
    let thread = kernel::thread();
    THREAD.set(thread);
    thread
}

/// The calling thread has another number than before: it is the child of a `fork`.
pub fn forget_thread() {
    THREAD.set(0);
}

/// A held half.
#[derive(Debug)]
pub struct Held<'a>(&'a AtomicU32);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Release with the Acquire in `hold`: what we did to the half is there for the next.
        self.0.store(0, Ordering::Release);
    }
}

/// Takes a half of a connection with these `sleepers`: who waits for long is counted among them.
///
/// Errors: `EAGAIN` when this very thread holds it: a signal handler came in between;
/// [`crate::anew::MOVED`];
/// `ECONNRESET` when it is held for too long to be true.
#[inline]
pub fn hold<'a>(word: &'a AtomicU32, sleepers: &Sleepers) -> Result<Held<'a>, Errno> {
    hold_within(word, sleepers, || None)
}

/// As [`hold`], for a call that waits so long at most, as it says when asked: for ever if it says nothing.
///
/// A holder that runs is waited for in any case, since it holds the half for a moment only; one that was
/// stopped holds it until it goes on.
///
/// Errors: as [`hold`], and `EAGAIN` when the holder is stopped and the time is up.
#[inline]
pub fn hold_within<'a>(
    word: &'a AtomicU32,
    sleepers: &Sleepers,
    longest: impl FnOnce() -> Option<Duration>,
) -> Result<Held<'a>, Errno> {
    let me = thread();
    // Acquire with the Release in `Held::drop`.
    if word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        return Ok(Held(word));
    }
    hold_contended(word, me, sleepers, longest())
}

/// Takes a half for somebody who is neither end's, and does not wait; [`leave`] follows.
///
/// Errors: who holds it.
pub fn take(word: &AtomicU32) -> Result<(), u32> {
    let holder = word.load(Ordering::Relaxed);
    if holder == MOVED || holder != 0 && kernel::life_of(holder) != Life::Over {
        return Err(holder);
    }
    // As in `hold_contended`.
    word.compare_exchange(holder, thread(), Ordering::Acquire, Ordering::Relaxed).map(drop)
}

/// The number of a thread in a word, until it is dropped: as a hold, but taken down by who finds the thread dead.
#[derive(Debug)]
pub(crate) struct Signed<'a>(&'a AtomicU32, u32);

impl<'a> Signed<'a> {
    /// Signs with the calling thread's number, if no other one stands there.
    pub(crate) fn new(word: &'a AtomicU32) -> Option<Self> {
        let me = thread();
        // Acquire with the Release in `take_down`.
        let signs = word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed);
        signs.is_ok().then_some(Self(word, me))
    }

    /// False when somebody else has done it.
    pub(crate) fn take_down(self) -> bool {
        take_down(self.0, self.1)
    }
}

/// `thread` has not signed `word` any more. False when it had not: of several, one is told that it did.
pub(crate) fn take_down(word: &AtomicU32, thread: u32) -> bool {
    word.compare_exchange(thread, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Of a half whose end is another connection's by now.
const MOVED: u32 = u32::MAX;

/// Lets go of what [`take`] took; whoever wants it is told [`crate::anew::MOVED`].
pub fn leave_moved(word: &AtomicU32) {
    word.store(MOVED, Ordering::Release);
}

/// Lets go of what [`take`] took.
pub fn leave(word: &AtomicU32) {
    drop(Held(word));
}

/// Whoever holds this half is not the calling thread, and may still come to an end.
#[must_use]
pub fn is_held_by_another(holder: u32) -> bool {
    holder != 0 && holder != thread() && kernel::life_of(holder) != Life::Over
}

#[cold]
fn hold_contended<'a>(
    word: &'a AtomicU32,
    me: u32,
    sleepers: &Sleepers,
    longest: Option<Duration>,
) -> Result<Held<'a>, Errno> {
    let (mut rounds, mut asleep) = (0_u32, None);
    let came = Instant::now();
    let mut begun = came;
    loop {
        let holder = word.load(Ordering::Relaxed);
        if holder == me {
            return Err(Errno(libc::EAGAIN));
        }
        if holder == MOVED {
            return Err(crate::anew::MOVED);
        }
        rounds = rounds.saturating_add(1);
        if rounds == LONG {
            asleep = Some(sleepers.enter());
        }
        let life = if holder != 0 && rounds >= LONG {
            kernel::life_of(holder)
        } else if holder != 0 && rounds.is_multiple_of(64) && !kernel::thread_exists(holder) {
            Life::Over
        } else {
            Life::Running
        };
        // A dead thread's half is free; its positions are whole up to its last message.
        if (holder == 0 || life == Life::Over)
            // Acquire with the Release in `Held::drop`; after a death, with the kernel's own.
            && word.compare_exchange(holder, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            drop(asleep);
            return Ok(Held(word));
        }
        if life == Life::Stopped {
            if longest.is_some_and(|longest| came.elapsed() >= longest) {
                return Err(Errno(libc::EAGAIN));
            }
            // It goes on some day, and so do we.
            begun = Instant::now();
        } else if rounds >= LONG && begun.elapsed() > LONGEST_HOLD {
            // Nobody holds a half over a sleep: the word is nonsense.
            return Err(Errno(libc::ECONNRESET));
        }
        if rounds >= LONG {
            let _ = kernel::pause(1);
        } else if rounds.is_multiple_of(16) {
            kernel::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}
