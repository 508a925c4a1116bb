//! The lock of a set.
//!
//! A signal handler may come in between while its thread has the lock, and close a number, which then leaves
//! every set: it cannot wait for its own thread, and leaves the number to it, for when it lets go. A thread says
//! that it is inside before it locks and until it has let go: two writes to memory of its own for each lock.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::sync::atomic::{Ordering, compiler_fence};
use std::sync::{MutexGuard, PoisonError, TryLockError};

use super::set::Inner;
use super::{Set, forget};

/// Numbers that handlers can leave to a thread while it is inside. Of more, an entry stays until its number comes
/// into the set again.
const MOST_LEFT: usize = 64;

thread_local! {
    /// Locks that this thread has, or is about to have.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
    /// Numbers that were closed meanwhile, and how many.
    static LEFT: [Cell<RawFd>; MOST_LEFT] = const { [const { Cell::new(-1) }; MOST_LEFT] };
    static MANY_LEFT: Cell<usize> = const { Cell::new(0) };
}

/// True in a thread that has the lock of a set: it may have the one that it would wait for.
pub(super) fn is_inside() -> bool {
    INSIDE.get() > 0
}

/// Leaves `fd`, which is about to be closed, to this thread for when it is not inside any more.
pub(super) fn leave(fd: RawFd) {
    let many = MANY_LEFT.get();
    if many < MOST_LEFT {
        // First: another handler may come in between.
        MANY_LEFT.set(many + 1);
        LEFT.with(|left| left[many].set(fd));
    }
}

#[cold]
fn forget_left() {
    while let Some(last) = MANY_LEFT.get().checked_sub(1) {
        MANY_LEFT.set(last);
        forget(LEFT.with(|left| left[last].get()));
    }
}

/// A thread that has the lock of a set, or is about to.
#[derive(Debug)]
struct Inside(());

impl Inside {
    fn new() -> Self {
        INSIDE.set(INSIDE.get() + 1);
        // Its handlers see it before the lock is taken, and (below) until after it was let go.
        compiler_fence(Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        let inside = INSIDE.get() - 1;
        INSIDE.set(inside);
        compiler_fence(Ordering::SeqCst);
        if inside == 0 && MANY_LEFT.get() > 0 {
            forget_left();
        }
    }
}

/// A set's entries, locked.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    // In this order they are let go of.
    inner: MutexGuard<'a, Inner>,
    _inside: Inside,
}

impl Deref for Locked<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.inner
    }
}

pub(super) fn lock(set: &Set) -> Locked<'_> {
    let inside = Inside::new();
    let inner = set.inner.lock().unwrap_or_else(PoisonError::into_inner);
    Locked { inner, _inside: inside }
}

/// [`lock`], if nobody has it.
pub(super) fn try_lock(set: &Set) -> Option<Locked<'_>> {
    let inside = Inside::new();
    let inner = match set.inner.try_lock() {
        Ok(inner) => inner,
        Err(TryLockError::Poisoned(inner)) => inner.into_inner(),
        Err(TryLockError::WouldBlock) => return None,
    };
    Some(Locked { inner, _inside: inside })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::sync::atomic::AtomicI32;

    use super::super::{IN, control, created, is_mixed, known};
    use super::*;
    use crate::ending::closing;
    use crate::table::tests::alone;

    static CLOSED: AtomicI32 = AtomicI32::new(-1);

    extern "C" fn handler(_: i32) {
        closing(CLOSED.load(Ordering::SeqCst));
    }

    #[test]
    fn a_handler_closes_what_is_in_a_set_that_its_thread_has_locked() {
        let (stream, _) = alone();
        let fd = stream.as_raw_fd();
        CLOSED.store(fd, Ordering::SeqCst);
        // SAFETY: takes a number.
        let number = unsafe { libc::epoll_create1(0) };
        created(number);
        let event = libc::epoll_event { events: IN, u64: 0 };
        assert_eq!(control(number, libc::EPOLL_CTL_ADD, fd, Some(event)), Some(Ok(0)));
        let signal = libc::SIGRTMIN() + 1;
        let place = handler as extern "C" fn(i32) as usize;
        // SAFETY: a handler that stays.
        assert_ne!(unsafe { libc::signal(signal, place) }, libc::SIG_ERR);
        let inner = lock(known(number).unwrap());
        // SAFETY: handled in this thread.
        assert_eq!(unsafe { libc::raise(signal) }, 0);
        assert!(inner.contains(fd));
        drop(inner);
        assert!(!is_mixed(number));
    }
}
