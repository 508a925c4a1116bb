//! Which processes have an end: those that a `fork` or `exec` gave it to, each by its name, so that it is one
//! process's again when the others have ended, become other programs, or closed it.
//!
//! The list stands in the segment, with a count of those on their way, and a word (`processes`) that says
//! whether it has to be looked at:
//!
//! ```text
//! who shares:  coming + 1;  word := shared, changed      (before the other process can have the end)
//! who came:    enters itself;  coming - 1
//! who leaves:  takes itself out, at its last close and before an `exec` that closes the end
//! who looks:   reads the word;  coming = 0?  all others are over?  then compares-and-swaps the word
//! ```
//!
//! A process that looks is too late where the word changed meanwhile, and looks again another time. A process that was
//! killed is found to be over by its number and the time at which it began.
//!
//! Invariants: an end that is another process's, too, is never taken to be one process's. What cannot be known
//! (a connection in a message, or in a program without the library; a full list; a child that was not made by
//! `fork`; a process of another namespace) counts as shared, for good.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::kernel;
use crate::segment::{Segment, Sharers};

/// In `processes`: its holders are not known any more.
pub const FOR_GOOD: u32 = 1;
/// In `processes`: its holders stand in the list.
pub const LISTED: u32 = 2;
/// Either.
pub const SHARED: u32 = FOR_GOOD | LISTED;
/// A change, of the sharers or of what they have to ask the kernel for.
const CHANGE: u32 = 4;

/// So long what was found out about another process holds, unless asked for now.
const FRESH_NS: u64 = 20_000_000;

const NUMBER_BITS: u32 = 22;
const NAMESPACE_BITS: u32 = 32;
const NUMBER_ALL: u64 = (1 << NUMBER_BITS) - 1;
const NAMESPACE_ALL: u64 = ((1 << NAMESPACE_BITS) - 1) << NUMBER_BITS;

/// The name of this process, or of one that shares its memory; 0: not known yet.
static ME: AtomicU64 = AtomicU64::new(0);

/// The name of a process: its number, of which namespace, and when it began. `None` where the kernel says too
/// little to tell it from the next one of its number.
fn name_of(process: u32, namespace: u64, begun: u64) -> Option<u64> {
    let fits = u64::from(process) <= NUMBER_ALL && namespace != 0 && begun != 0;
    let name = u64::from(process)
        | namespace << NUMBER_BITS & NAMESPACE_ALL
        | begun << (NUMBER_BITS + NAMESPACE_BITS);
    fits.then_some(name)
}

/// This process's name.
fn me() -> Option<u64> {
    let process = std::process::id();
    let known = ME.load(Ordering::Relaxed);
    // A child of `vfork` has this memory, and another number.
    if known & NUMBER_ALL == u64::from(process) {
        return Some(known);
    }
    let begun = kernel::begun_at();
    // A `/proc` of another namespace tells of other processes by these numbers.
    if kernel::process_begun_at(process) != Some(Some(begun)) {
        return None;
    }
    let name = name_of(process, kernel::process_namespace(), begun)?;
    ME.store(name, Ordering::Relaxed);
    Some(name)
}

/// In the child of a `fork`, and where this process was restored: its name is another one.
pub(crate) fn forget_name() {
    ME.store(0, Ordering::Relaxed);
}

/// Other processes that were found alive, by the lower bits of their names, and when.
static LIVED: [(AtomicU64, AtomicU64); 16] = [const { (AtomicU64::new(0), AtomicU64::new(0)) }; 16];

/// False only if the process of this name has ended.
fn may_live(name: u64, now: bool) -> bool {
    let Some(me) = me() else { return true };
    if (name ^ me) & NAMESPACE_ALL != 0 {
        return true;
    }
    #[expect(clippy::cast_possible_truncation, reason = "below the length of the list")]
    let (known, when) = &LIVED[(name % LIVED.len() as u64) as usize];
    let clock = kernel::coarse_ns();
    // The two may be of different names: then one counts as alive for a moment too long.
    let was_seen = known.load(Ordering::Relaxed) == name
        && clock.wrapping_sub(when.load(Ordering::Relaxed)) < FRESH_NS;
    if was_seen && !now {
        return true;
    }
    let number = u32::try_from(name & NUMBER_ALL).unwrap_or(0);
    let namespace = (me & NAMESPACE_ALL) >> NUMBER_BITS;
    let lives = kernel::process_begun_at(number).is_none_or(|begun| {
        begun.is_some_and(|begun| name_of(number, namespace, begun) == Some(name))
    });
    if lives {
        known.store(name, Ordering::Relaxed);
        when.store(clock, Ordering::Relaxed);
    }
    lives
}

/// The end may be several processes'.
#[inline]
#[must_use]
pub fn is_shared(segment: &Segment) -> bool {
    segment.own().sharing.processes.load(Ordering::SeqCst) & SHARED != 0
}

/// The end is one process's again. `now`: what was found out a moment ago does not do.
#[must_use]
pub fn is_alone(segment: &Segment, now: bool) -> bool {
    let word = &segment.own().sharing.processes;
    let seen = word.load(Ordering::SeqCst);
    if seen & SHARED == 0 {
        return true;
    }
    let Some(me) = me().filter(|_| seen & FOR_GOOD == 0) else { return false };
    let Sharers { coming, names } = segment.own_sharers();
    // Before the names: a newcomer entered itself first.
    if coming.load(Ordering::SeqCst) != 0 {
        return false;
    }
    for place in names {
        let name = place.load(Ordering::SeqCst);
        if name == 0 || name == me {
            continue;
        }
        if may_live(name, now) {
            return false;
        }
        let _ = place.compare_exchange(name, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
    let alone = seen & !SHARED;
    word.compare_exchange(seen, alone, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// This process has the end.
pub fn enter(segment: &Segment) {
    match me() {
        Some(me) => enter_as(segment, me),
        None => share_for_good(segment),
    }
}

fn enter_as(segment: &Segment, name: u64) {
    let names = segment.own_sharers().names;
    let has = |place: &AtomicU64| place.load(Ordering::SeqCst) == name;
    let takes = |place: &AtomicU64| {
        place.compare_exchange(0, name, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    };
    if !names.iter().any(has) && !names.iter().any(takes) {
        share_for_good(segment);
    }
}

/// This process does not have it any more, or will not in a moment.
pub fn leave(segment: &Segment) {
    let Some(me) = me() else { return };
    for place in segment.own_sharers().names {
        let _ = place.compare_exchange(me, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// A process that is about to be made will have the end: [`arrived`], [`came`] or [`not_coming`] follows.
pub fn expect(segment: &Segment) {
    segment.own_sharers().coming.fetch_add(1, Ordering::SeqCst);
    note(segment, LISTED);
}

/// The child that [`expect`] told of is this process.
pub fn arrived(segment: &Segment) {
    enter(segment);
    not_coming(segment);
}

/// The child that [`expect`] told of is `process`.
pub fn came(segment: &Segment, process: u32) {
    match kernel::process_begun_at(process) {
        Some(Some(begun)) => match name_of(process, kernel::process_namespace(), begun) {
            Some(name) => enter_as(segment, name),
            None => share_for_good(segment),
        },
        // It has ended, or nothing is known of it.
        Some(None) => {}
        None => share_for_good(segment),
    }
    not_coming(segment);
}

/// It was told of in another way, or not made.
pub fn not_coming(segment: &Segment) {
    let less = |coming: u32| coming.checked_sub(1);
    let coming = segment.own_sharers().coming;
    let _ = coming.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
}

/// Which processes have the end is not known from now on.
pub fn share_for_good(segment: &Segment) {
    note(segment, FOR_GOOD);
}

/// This process has the end, beside the process that gave it.
pub fn join(segment: &Segment) {
    // In this order: a process that reads the word after the change finds the name.
    enter(segment);
    note(segment, LISTED);
}

/// What the kernel was asked about the end by any process may be different by now.
pub fn changed(segment: &Segment) {
    note(segment, 0);
}

fn note(segment: &Segment, bits: u32) {
    let next = |word: u32| Some((word | bits).wrapping_add(CHANGE));
    let word = &segment.own().sharing.processes;
    let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
}

#[cfg(test)]
mod tests {
    use beeline_os::Mapping;

    use super::*;
    use crate::segment::length_bytes;

    fn segment() -> Segment {
        let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        let segment = Segment::take(mapping, 0).unwrap();
        enter(&segment);
        segment
    }

    fn sleeper() -> std::process::Child {
        std::process::Command::new("sleep").arg("600").spawn().unwrap()
    }

    #[test]
    fn an_end_is_one_processs_again_when_the_child_has_ended() {
        let segment = segment();
        assert!(!is_shared(&segment) && is_alone(&segment, true));
        expect(&segment);
        assert!(is_shared(&segment) && !is_alone(&segment, true), "it is on its way");
        let mut child = sleeper();
        came(&segment, child.id());
        assert!(is_shared(&segment) && !is_alone(&segment, true), "it lives");
        child.kill().unwrap();
        // Not waited for: it is a zombie, which has nothing any more.
        let begun = std::time::Instant::now();
        while !is_alone(&segment, true) {
            assert!(begun.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
        assert!(!is_shared(&segment));
        child.wait().unwrap();
    }

    #[test]
    fn what_cannot_be_known_is_shared_for_good() {
        let listed = || {
            let segment = segment();
            join(&segment);
            segment
        };
        assert!(is_alone(&listed(), true));
        let in_a_message = listed();
        share_for_good(&in_a_message);
        assert!(!is_alone(&in_a_message, true));
        let of_another_namespace = listed();
        let stranger = me().unwrap() ^ 1 << NUMBER_BITS;
        of_another_namespace.own_sharers().names[7].store(stranger, Ordering::SeqCst);
        assert!(!is_alone(&of_another_namespace, true));
        let full = listed();
        (1..=64).for_each(|name| enter_as(&full, name));
        assert!(!is_alone(&full, true));
    }

    #[test]
    fn a_number_that_is_another_processs_by_now_is_not_who_had_it() {
        let segment = segment();
        expect(&segment);
        let mut other = sleeper();
        came(&segment, other.id());
        assert!(!is_alone(&segment, true));
        let me = me().unwrap();
        let place = segment
            .own_sharers()
            .names
            .iter()
            .find(|place| ![0, me].contains(&place.load(Ordering::SeqCst)))
            .unwrap();
        // As one that began at another time.
        place.fetch_add(1 << (NUMBER_BITS + NAMESPACE_BITS), Ordering::SeqCst);
        assert!(is_alone(&segment, true));
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn who_shares_it_while_another_looks_is_not_overlooked() {
        let segment = segment();
        join(&segment);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                for _ in 0..20_000 {
                    let _ = is_alone(&segment, true);
                }
            });
            for _ in 0..20_000 {
                expect(&segment);
                assert!(is_shared(&segment), "before the child is there");
                not_coming(&segment);
            }
            looks.join().unwrap();
        });
    }
}
