//! Sets by their numbers, of which one may have several.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::{Set, forget};
use crate::{kernel, table};

/// A page of numbers.
const PAGE: usize = 1 << 10;
/// Numbers past these, which no kernel gives out unless told to, cannot have a set of ours.
const PAGES: usize = table::NUMBERS / PAGE;

type Page = [AtomicPtr<Set>; PAGE];

/// Sets by their numbers; pages stay once made.
static SETS: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];
static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// The largest number of a set we know.
#[must_use]
pub fn highest() -> RawFd {
    RawFd::try_from(HIGHEST.load(Ordering::Acquire)).unwrap_or(RawFd::MAX)
}

fn page(at: usize) -> Option<&'static Page> {
    // Acquire with the Release in `made_slot`. SAFETY: pages are never freed.
    unsafe { SETS.get(at)?.load(Ordering::Acquire).as_ref() }
}

fn slot(number: RawFd) -> Option<&'static AtomicPtr<Set>> {
    let number = usize::try_from(number).ok()?;
    page(number / PAGE)?.get(number % PAGE)
}

/// As [`slot`], whose page is made if need be.
fn made_slot(number: RawFd) -> Option<&'static AtomicPtr<Set>> {
    let place = SETS.get(usize::try_from(number).ok()? / PAGE)?;
    if place.load(Ordering::Acquire).is_null() {
        let page: Box<Page> = Box::new([const { AtomicPtr::new(std::ptr::null_mut()) }; PAGE]);
        let fresh = Box::into_raw(page);
        let null = std::ptr::null_mut();
        // Release with the Acquire in `page`.
        if place.compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: ours alone: it was not put into its place.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
    slot(number)
}

/// Every number that leads to a set, from the smallest on.
pub(super) fn each_set(mut visit: impl FnMut(RawFd, &'static Set)) {
    each_slot(|number, slot| {
        // Acquire with the Release in `made`. SAFETY: sets are never freed.
        if let Some(set) = unsafe { slot.load(Ordering::Acquire).as_ref() } {
            visit(number, set);
        }
    });
}

pub(super) fn each_slot(mut visit: impl FnMut(RawFd, &'static AtomicPtr<Set>)) {
    let last = HIGHEST.load(Ordering::Acquire) as usize;
    for at in 0..=last / PAGE {
        let Some(page) = page(at) else { continue };
        for (number, slot) in (at * PAGE..).zip(page) {
            if number > last {
                return;
            }
            visit(RawFd::try_from(number).unwrap_or(RawFd::MAX), slot);
        }
    }
}

pub(super) fn known(number: RawFd) -> Option<&'static Set> {
    // Acquire with the Release in `made`. SAFETY: sets are never freed.
    unsafe { slot(number)?.load(Ordering::Acquire).as_ref() }
}

/// The set of this number, made if need be. Sets stay for the next one of the same number.
pub(super) fn made(number: RawFd) -> Option<&'static Set> {
    if let Some(set) = known(number) {
        return Some(set);
    }
    let slot = made_slot(number)?;
    let fresh = Box::into_raw(Box::<Set>::default());
    let null = std::ptr::null_mut();
    // Release with the Acquire in `known`.
    if slot.compare_exchange(null, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: ours alone: it was not put into the slot.
        drop(unsafe { Box::from_raw(fresh) });
    }
    HIGHEST.fetch_max(u32::try_from(number).unwrap_or(0), Ordering::AcqRel);
    known(number)
}

/// The program made a set: known from now on, so that who polls it before anything of ours is in it is
/// woken for what comes into it.
pub fn created(number: RawFd) {
    if !table::is_foreign_process() {
        // What was of this number may have been closed unseen.
        forget(number);
        let _ = made(number);
    }
}

/// `new` is a copy of `old`, which may be a set: then it is the same one.
pub fn duplicate(old: RawFd, new: RawFd) {
    if old == new || !kernel::is_epoll(new) {
        return;
    }
    let (Some(slot), Some(set)) = (made_slot(new), made(old)) else { return };
    set.copies.fetch_add(1, Ordering::AcqRel);
    // Release with the Acquire in `known`.
    slot.store(std::ptr::from_ref(set).cast_mut(), Ordering::Release);
    HIGHEST.fetch_max(u32::try_from(new).unwrap_or(0), Ordering::AcqRel);
}

/// `fd` is about to be closed: true when it was one of several numbers of a set, which has the others
/// still.
pub(super) fn forget_copy(fd: RawFd) -> bool {
    let Some(set) = known(fd) else { return false };
    let less = |copies: u32| copies.checked_sub(1);
    let one_of_several = set.copies.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok();
    if one_of_several && let Some(slot) = slot(fd) {
        slot.store(std::ptr::null_mut(), Ordering::Release);
    }
    one_of_several
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::super::{IN, control, is_mixed, is_mixed_and_polled};
    use super::*;
    use crate::table::tests::{alone, begin_once};

    #[test]
    fn what_was_polled_is_not_slept_on_when_its_number_is_another_sets() {
        begin_once();
        // Of nothing else here.
        let number = RawFd::try_from(table::NUMBERS - 1).unwrap();
        let may_be_slept_on = || known(number).unwrap().may_be_slept_on();
        created(number);
        assert!(!is_mixed_and_polled(number) && may_be_slept_on());
        forget(number);
        assert!(!may_be_slept_on());
        // By now it is a pipe's, perhaps.
        assert!(!is_mixed_and_polled(number));
        created(number);
        assert!(!may_be_slept_on());
    }

    #[test]
    fn a_set_whose_number_was_closed_unseen_has_left_nothing_to_the_next() {
        let (stream, connection) = alone();
        let fresh = || {
            // SAFETY: takes a number.
            unsafe { libc::epoll_create1(0) }
        };
        let replace = |number| {
            // SAFETY: numbers of this test.
            assert_eq!(unsafe { libc::dup2(fresh(), number) }, number);
            created(number);
        };
        let [number, copy] = [fresh(), fresh()];
        created(number);
        let event = libc::epoll_event { events: IN, u64: 0 };
        let added = control(number, libc::EPOLL_CTL_ADD, stream.as_raw_fd(), Some(event));
        assert_eq!(added, Some(Ok(0)));
        duplicate(number, copy);
        let watchers = &connection.segment.own().sharing.watchers;
        replace(number);
        assert!(!is_mixed(number) && is_mixed(copy));
        assert_eq!(watchers.load(Ordering::SeqCst), 1);
        replace(copy);
        assert!(!is_mixed(copy));
        assert_eq!(watchers.load(Ordering::SeqCst), 0);
    }
}
