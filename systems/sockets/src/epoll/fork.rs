//! Sets over a `fork`, which two processes share from then on, each with its own list of what is in them.
//!
//! What the kernel has of an entry of ours says a number of the process that put it there, so another one
//! can do nothing with it. Most programs whose parent has made a set use it in the child alone (who becomes a
//! daemon does so); then nothing is different. Where the parent lives, and has the set, what the child puts
//! into it is left to the kernel if it can be: with the program's own data, which either may hear.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::lock::{Locked, is_inside, try_lock};
use super::set::Inner;
use super::{ASLEEP, Set, each_set, each_slot, forget_retired, is_yet_to_connect, made, watch};
use crate::wait::patiently;
use crate::{kernel, table, young};

/// A set of this process alone.
const OWN: u8 = 1;
/// The parent, which lives, has the set, too, and may wait on it.
const PARENTS: u8 = 2;
/// The parent of this process when it was made by `fork`; 0: it was not, or not from a program with us.
static PARENT: AtomicU32 = AtomicU32::new(0);

/// How long `fork` waits for those who have locks of sets, and for one of them while it has others: both longer
/// than anybody has one who runs.
const PATIENCE: Duration = Duration::from_secs(1);
const A_WHILE: Duration = Duration::from_millis(20);

thread_local! {
    /// The sets, of who is about to make a child.
    static HELD: RefCell<Vec<(&'static Set, Locked<'static>)>> = const { RefCell::new(Vec::new()) };
}

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

/// Two processes are about to share the kernel's sets, so what it has of retired entries goes.
///
/// And what became ours since the last wait counts as watched, as it would with the next one: a child that waits
/// first would take itself for the only one, and sleep on an arm that this process then takes down for it.
pub fn shared() {
    each_set(|number, set| {
        let Some(mut inner) = try_lock(set) else { return };
        for fd in inner.all_retired() {
            forget_retired(number, set, &mut inner, fd);
        }
        for entry in inner.each() {
            if let Some(connection) = table::ours(entry.fd) {
                watch(entry, connection);
            }
        }
    });
}

/// Before `fork`: locks all sets, which the child then has whole.
pub fn before_fork() {
    HELD.set(lock_all());
}

/// In the parent, after `fork`, and where that failed.
pub fn after_fork_in_parent() {
    HELD.take();
}

/// All sets, locked. One whose holder does not let go in time is left out.
fn lock_all() -> Vec<(&'static Set, Locked<'static>)> {
    let mut sets: Vec<&'static Set> = Vec::new();
    each_set(|_, set| {
        if !sets.iter().any(|other| std::ptr::eq(*other, set)) {
            sets.push(set);
        }
    });
    // The holder may be this very thread, in whose midst a signal handler forks.
    let until = Instant::now() + if is_inside() { Duration::ZERO } else { PATIENCE };
    loop {
        let last = Instant::now() >= until;
        let mut held = Vec::new();
        let missing = sets.iter().position(|&set| {
            let longest = if last { Duration::ZERO } else { A_WHILE };
            let inner = patiently(longest, || try_lock(set));
            let is_missing = inner.is_none();
            held.extend(inner.map(|inner| (set, inner)));
            is_missing && !last
        });
        let Some(at) = missing else { return held };
        // Its holder may wait for one of these, a set in that set: which comes first the next time.
        drop(held);
        sets[..=at].rotate_right(1);
    }
}

/// This process waits on the set from now on. Where it came with a `fork`, the parent may sleep on it, too: what is
/// reported to this process is armed again for it.
pub(super) fn join(set: &Set, inner: &mut Inner) {
    if std::mem::take(&mut inner.is_parents) {
        set.outer.store(true, Ordering::SeqCst);
    }
}

/// In the child, after `fork`: its copies of the sets are not counted as watchers until it waits
/// on one.
pub fn after_fork_in_child() {
    let mut held = HELD.take();
    each_slot(|_, slot| {
        let set = slot.load(Ordering::Acquire).cast_const();
        if !held.iter().any(|(other, _)| std::ptr::eq(*other, set)) {
            // Its lock is a thread's that is not in this process. What is put into it makes it anew.
            slot.store(std::ptr::null_mut(), Ordering::Release);
        }
    });
    for (set, inner) in &mut held {
        inner.places_noted.abandon();
        inner.each().for_each(|entry| {
            entry.counted = 0;
            entry.noted = None;
        });
        inner.heat_all();
        if inner.each().next().is_some() {
            set.outer.store(false, Ordering::SeqCst);
            inner.is_parents = true;
        }
        set.asleep.store(0, Ordering::SeqCst);
        set.whose.store(0, Ordering::Relaxed);
    }
    PARENT.store(kernel::parent(), Ordering::Relaxed);
    ASLEEP.store(0, Ordering::SeqCst);
    table::each(|_, connection| connection.sets.store(0, Ordering::SeqCst));
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::sync::mpsc::channel;

    use super::super::lock::lock;
    use super::super::{IN, control, created, forget, is_mixed, is_mixed_and_polled, known};
    use super::*;
    use crate::table::tests::{alone, has_run_apart, in_child};

    /// A set of these.
    fn set_of(fds: &[RawFd]) -> RawFd {
        // SAFETY: takes a number.
        let number = unsafe { libc::epoll_create1(0) };
        created(number);
        let event = libc::epoll_event { events: IN, u64: 0 };
        for &fd in fds {
            assert_eq!(control(number, libc::EPOLL_CTL_ADD, fd, Some(event)), Some(Ok(0)));
        }
        number
    }

    #[test]
    fn a_child_that_closes_and_does_not_wait_is_no_watcher() {
        if has_run_apart("epoll::fork::tests::a_child_that_closes_and_does_not_wait_is_no_watcher")
        {
            return;
        }
        for is_polled in [false, true] {
            let ((closed, _), (stays, connection)) = (alone(), alone());
            let number = set_of(&[closed.as_raw_fd(), stays.as_raw_fd()]);
            assert!(!is_polled || is_mixed_and_polled(number));
            before_fork();
            let closes = in_child(|| {
                after_fork_in_child();
                forget(closed.as_raw_fd());
                true
            });
            after_fork_in_parent();
            assert!(closes);
            let watchers = &connection.segment.own().sharing.watchers;
            assert_eq!(watchers.load(Ordering::SeqCst), 1, "polled: {is_polled}");
        }
    }

    #[test]
    fn a_child_waits_for_no_thread_of_its_parent() {
        if has_run_apart("epoll::fork::tests::a_child_waits_for_no_thread_of_its_parent") {
            return;
        }
        let (stream, _) = alone();
        let fd = stream.as_raw_fd();
        let number = set_of(&[fd]);
        let child = |is_whole| {
            before_fork();
            let said = in_child(|| {
                after_fork_in_child();
                let as_expected = is_mixed(number) == is_whole;
                forget(fd);
                as_expected && !is_mixed(number)
            });
            after_fork_in_parent();
            said
        };
        for lets_go in [true, false] {
            let ((says, said), (go_on, waits)) = (channel(), channel::<()>());
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let _inner = lock(known(number).unwrap());
                    says.send(()).unwrap();
                    if lets_go {
                        std::thread::sleep(A_WHILE * 2);
                    } else {
                        waits.recv().unwrap();
                    }
                });
                said.recv().unwrap();
                let goes_on = child(lets_go);
                let _ = go_on.send(());
                assert!(goes_on);
            });
        }
    }
}
