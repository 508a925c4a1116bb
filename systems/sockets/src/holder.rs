//! Who works on a half of an end: one thread at a time, over all processes. Its name stands in a word of
//! the segment, taken by compare-and-swap and left by a store. Nobody sleeps holding one, and a holder
//! that no longer exists loses it.
//!
//! ```text
//! 31          22 21                    0
//! mark of the   | the thread's number    0: held by no thread; all ones: the end is another connection's
//! namespace     |
//! ```
//!
//! Two namespaces of processes give the same numbers. A name with another mark than this process's is of a thread that
//! nobody here can look up: it is taken for one that runs, and waited for as long as any that does. Of some thousand
//! marks two namespaces may have the same.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::kernel::{self, Errno, Life};
use crate::sleepers::Sleepers;

/// Longest time a half can be held by a thread that runs now and then.
const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// Looks after which whoever holds a half has been kept from running, or is dead and not waited for.
const LONG: u32 = 4096;

/// Bits of a thread's number: the kernel gives no larger one.
const NUMBER_BITS: u32 = 22;
const NUMBER: u32 = (1 << NUMBER_BITS) - 1;
/// Marks: all but that of the word with all ones, and 0, which stands for a namespace that is not known.
const MARKS: u64 = (1 << (u32::BITS - NUMBER_BITS)) - 2;

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// What names begin with here, above their numbers; all ones while that is not known.
static MARK: AtomicU32 = AtomicU32::new(u32::MAX);

fn mark() -> u32 {
    let known = MARK.load(Ordering::Relaxed);
    if known != u32::MAX {
        return known;
    }
    let mark = mark_of(kernel::process_namespace());
    MARK.store(mark, Ordering::Relaxed);
    mark
}

/// The mark of a namespace by the kernel's number for it, which is 0 if it is not known.
fn mark_of(namespace: u64) -> u32 {
    let mixed = namespace.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let mark = if namespace == 0 { 0 } else { 1 + mixed % MARKS };
    u32::try_from(mark).unwrap_or(0) << NUMBER_BITS
}

/// The name of the calling thread.
pub(crate) fn thread() -> u32 {
    let known = THREAD.get();
    if known != 0 {
        return known;
    }
    let thread = name_of(kernel::thread());
    THREAD.set(thread);
    thread
}

/// The name of a thread with this number in this process's namespace.
#[must_use]
pub fn name_of(thread: u32) -> u32 {
    mark() | thread & NUMBER
}

/// The number in a name, of whichever namespace.
#[must_use]
pub fn number_of(name: u32) -> u32 {
    name & NUMBER
}

/// What becomes of the thread with this name.
pub(crate) fn life_of(name: u32) -> Life {
    if name & !NUMBER == mark() { kernel::life_of(number_of(name)) } else { Life::Running }
}

/// False when the thread with this name has ended for certain: one system call.
fn may_exist(name: u32) -> bool {
    name & !NUMBER != mark() || kernel::thread_exists(number_of(name))
}

/// The calling thread has another number than before, and may be in another namespace: it is the child of a `fork`.
pub fn forget_thread() {
    THREAD.set(0);
    MARK.store(u32::MAX, Ordering::Relaxed);
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
    if holder == MOVED || holder != 0 && life_of(holder) != Life::Over {
        return Err(holder);
    }
    // As in `hold_contended`.
    word.compare_exchange(holder, thread(), Ordering::Acquire, Ordering::Relaxed).map(drop)
}

/// The name of a thread in a word, until it is dropped: as a hold, but taken down by who finds the thread dead.
#[derive(Debug)]
pub(crate) struct Signed<'a>(&'a AtomicU32, u32);

impl<'a> Signed<'a> {
    /// Signs with the calling thread's name, if no other one stands there.
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
    holder != 0 && holder != thread() && life_of(holder) != Life::Over
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
            life_of(holder)
        } else if holder != 0 && rounds.is_multiple_of(64) && !may_exist(holder) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_another_namespace_is_no_thread_of_this_one_and_none_that_has_ended() {
        let own = mark_of(kernel::process_namespace());
        assert_eq!(thread(), own | kernel::thread());
        assert_eq!((number_of(thread()), name_of(kernel::thread())), (kernel::thread(), thread()));
        let other = (1..).map(mark_of).find(|mark| *mark != own).unwrap();
        // With the number of this very thread, and with one that no thread here has.
        for number in [kernel::thread(), NUMBER] {
            let stranger = other | number;
            assert_eq!(life_of(stranger), Life::Running);
            assert!(is_held_by_another(stranger));
            assert_eq!(take(&AtomicU32::new(stranger)), Err(stranger));
            let (word, none) = (AtomicU32::new(stranger), Some(Duration::ZERO));
            // It is not this thread's, which would be told at once, and it is let go of in the end.
            std::thread::scope(|scope| {
                let holds = scope.spawn(|| {
                    let sleepers = Sleepers::default();
                    hold_within(&word, &sleepers, || none).map(drop)
                });
                std::thread::sleep(Duration::from_millis(20));
                assert!(!holds.is_finished());
                word.store(0, Ordering::Release);
                assert_eq!(holds.join().unwrap(), Ok(()));
            });
        }
        // One of this namespace that is over.
        assert_eq!(life_of(own | NUMBER), Life::Over);
    }

    #[test]
    fn no_namespace_has_the_mark_of_a_word_that_is_none() {
        assert_eq!(mark_of(0), 0);
        for namespace in 4_026_531_836..4_026_541_836 {
            let mark = mark_of(namespace);
            assert!(mark & NUMBER == 0 && mark != 0 && mark | NUMBER != MOVED, "{namespace}");
        }
    }
}
