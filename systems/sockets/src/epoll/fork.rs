//! Sets over a `fork`, which two processes share from then on, each with its own list of what is in them.
//!
//! What the kernel has of an entry of ours says a number of the process that put it there, so another one
//! can do nothing with it. Most programs whose parent has made a set use it in the child alone (who becomes a
//! daemon does so); then nothing is different. Where the parent lives, and has the set, what the child puts
//! into it is left to the kernel if it can be: with the program's own data, which either may hear.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{ASLEEP, HIGHEST, SETS, forget_retired, is_yet_to_connect, known, made, watch};
use crate::{kernel, table, young};

/// A set of this process alone.
const OWN: u8 = 1;
/// The parent, which lives, has the set, too, and may wait on it.
const PARENTS: u8 = 2;
/// The parent of this process when it was made by `fork`; 0: it was not, or not from a program with us.
static PARENT: AtomicU32 = AtomicU32::new(0);

/// True when the set `number` is its parent's, too: the parent would not know what this process puts into it, and
/// has its own numbers for what the kernel reports.
fn is_parents(number: RawFd) -> bool {
    let parent = PARENT.load(Ordering::Relaxed);
    if parent == 0 || parent != kernel::parent() {
        return false;
    }
    let Some(set) = made(number) else { return false };
    match set.whose.load(Ordering::Relaxed) {
        0 => {
            let same = kernel::is_same_file_in(parent, number);
            set.whose.store(if same { PARENTS } else { OWN }, Ordering::Relaxed);
            same
        }
        whose => whose == PARENTS,
    }
}

/// A child of a `fork` puts `fd` into the set `number`: where that is its parent's, too, what never left the
/// kernel's stream stays there, so that the kernel tells both of it, with the program's own data.
pub(super) fn is_kernels_for_parents_sake(number: RawFd, fd: RawFd) -> bool {
    if PARENT.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let kind = table::kind(fd);
    if matches!(kind, table::Kind::Plain) && !is_yet_to_connect(fd) || !is_parents(number) {
        return false;
    }
    match kind {
        table::Kind::Ours(connection) if connection.stay_with_kernel(fd) => {
            table::forget(fd);
        }
        table::Kind::Ours(_) => return false,
        _ => young::leave_to_kernel(fd),
    }
    table::set_watched_plain(fd);
    true
}

/// Before `fork`: two processes share the kernel's sets from now on, so what it has of retired entries goes.
///
/// And what became ours since the last wait counts as watched, as it would with the next one: a child that waits
/// first would take itself for the only one, and sleep on an arm that this process then takes down for it.
pub fn before_fork() {
    for number in 0..=HIGHEST.load(Ordering::Acquire) {
        let Ok(number) = RawFd::try_from(number) else { continue };
        let Some(set) = known(number) else { continue };
        let Ok(mut inner) = set.inner.try_lock() else { continue };
        for fd in inner.all_retired() {
            forget_retired(number, set, &mut inner, fd);
        }
        for entry in inner.each() {
            if let Some(connection) = table::ours(entry.fd) {
                watch(entry, connection);
            }
        }
    }
}

/// In the child, after `fork`: its copies of the sets are not counted as watchers until it waits
/// on one.
pub fn after_fork_in_child() {
    for slot in &SETS[..=HIGHEST.load(Ordering::Acquire) as usize] {
        // SAFETY: sets are never freed.
        let Some(set) = (unsafe { slot.load(Ordering::Acquire).as_ref() }) else { continue };
        // A lock that another thread of the parent held is not ours to wait for.
        if let Ok(mut inner) = set.inner.try_lock() {
            inner.places_noted.abandon();
            inner.each().for_each(|entry| {
                entry.counted = 0;
                entry.noted = None;
            });
            inner.heat_all();
            if inner.each().next().is_some() {
                // The parent may sleep on it: what is reported to this process is armed again for it.
                set.outer.store(true, Ordering::SeqCst);
            }
        }
        set.asleep.store(0, Ordering::SeqCst);
        set.whose.store(0, Ordering::Relaxed);
    }
    PARENT.store(kernel::parent(), Ordering::Relaxed);
    ASLEEP.store(0, Ordering::SeqCst);
    table::each(|_, connection| connection.sets.store(0, Ordering::SeqCst));
}
