//! Who sleeps and who wakes: the protocol, over any kind of atomic word, so that it can be checked
//! by trying every order of its steps.
//!
//! ```text
//! sleeper: armed := 1; heavy fence; anything there? no: sleeps until the bell
//! poster:  publishes;  light fence; armed?          yes: takes it down and rings
//! ```
//!
//! Store, fence, load on both sides: at least one sees the other. The bell is a byte in the
//! kernel's stream, so it is heard also by a sleeper that is not asleep yet. Where processes share
//! `membarrier`, the poster's fence is none at all; the sleeper pays for both.
//!
//! # One sleep on many ends
//!
//! A set that falls asleep on many connections would be rung for on each: a system call apiece,
//! though the first wakes it. So it arms them with the *name* of this one sleep instead, a word
//! that no other sleep has or will have, and a process that rang for a name rings for it no more:
//!
//! ```text
//! sleeper: name := fresh; each armed := name; heavy fence; anything anywhere? no: sleeps until any
//!          bell; then looks at all of them
//! poster:  publishes; light fence; armed? a name: rang for it before? no: rings, then notes it
//! ```
//!
//! A poster that does not ring had loaded the name, so the news was there before any later look
//! behind the fence of a later sleep; and the bell that it counts on came after the sleeper's look
//! behind this one's. Therefore: (1) each sleep has a fresh name; (2) whoever wakes looks at every end
//! that was armed with the name, or arms it anew before it sleeps; (3) what would take the bell's
//! effect away (the end that rang leaves the set) arms and looks again; (4) who sleeps on one end
//! alone writes [`EACH`], and a name is never written over it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What an end is armed with for which everybody rings.
pub const EACH: u64 = 1;

/// A word that the two sides share.
pub trait Word {
    /// As of an atomic.
    fn load(&self, order: Ordering) -> u64;
    /// As of an atomic.
    fn store(&self, value: u64, order: Ordering);
    /// As of an atomic.
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// As of an atomic: stores `value` if it holds `expected`; else what it holds.
    ///
    /// Errors: what it holds instead.
    fn replace(&self, expected: u64, value: u64) -> Result<(), u64>;
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.swap(value, order)
    }

    #[inline]
    fn replace(&self, expected: u64, value: u64) -> Result<(), u64> {
        self.compare_exchange(expected, value, Ordering::SeqCst, Ordering::Relaxed).map(drop)
    }
}

/// The sleeper's part: afterwards it looks once more, and sleeps only if there is nothing.
#[inline]
pub fn arm(armed: &impl Word, fence: impl FnOnce()) {
    armed.swap(EACH, Ordering::SeqCst);
    fence();
}

/// The part of who falls asleep on many ends, for one of them; the fence comes after the last. An end
/// that somebody sleeps on alone stays as it is: everybody rings for it.
#[inline]
pub fn arm_as(armed: &impl Word, name: u64) {
    let mut held = armed.load(Ordering::Relaxed);
    while held != EACH && held != name {
        match armed.replace(held, name) {
            Ok(()) => return,
            Err(other) => held = other,
        }
    }
}

/// The poster's part, after it published: what the end is armed with; 0: nobody sleeps.
#[inline]
pub fn sleeps(armed: &impl Word, fence: impl FnOnce()) -> u64 {
    fence();
    armed.load(Ordering::Relaxed)
}

/// Of several posters, one rings.
#[inline]
pub fn take_down(armed: &impl Word) -> bool {
    armed.swap(0, Ordering::AcqRel) != 0
}

/// Names that this process rang for, by their lower bits. What was written over is rung for again.
const NOTES: usize = 64;
static RUNG: [AtomicU64; NOTES] = [const { AtomicU64::new(0) }; NOTES];
/// The next name, and the process that gives them out.
static NAME: AtomicU64 = AtomicU64::new(0);
static NAMER: AtomicU32 = AtomicU32::new(0);

fn note(name: u64) -> &'static AtomicU64 {
    #[expect(clippy::cast_possible_truncation, reason = "below the length of the list")]
    let place = (name % NOTES as u64) as usize;
    &RUNG[place]
}

/// True when this process rang for the sleep of this name.
#[inline]
#[must_use]
pub fn was_rung(name: u64) -> bool {
    // Acquire with the Release in `remember_rung`: the bell is in the kernel's stream.
    name != EACH && note(name).load(Ordering::Acquire) == name
}

/// After ringing for `name`.
pub fn remember_rung(name: u64) {
    // Release with the Acquire in `was_rung`.
    note(name).store(name, Ordering::Release);
}

/// A name for one sleep on many ends, which no other sleep on this host has: each process begins at
/// random. `None` when there is no randomness to be had: then everybody rings.
#[must_use]
pub fn name() -> Option<u64> {
    // A child, however it was made, has names of its own.
    let process = std::process::id();
    if NAMER.load(Ordering::Acquire) != process {
        NAME.store(crate::kernel::random()? | 1 << 63, Ordering::Relaxed);
        // Release with the Acquire above.
        NAMER.store(process, Ordering::Release);
    }
    Some(NAME.fetch_add(1, Ordering::Relaxed))
}

/// In the child of a `fork`, whose number may be one that gave out names before: another process's of
/// this memory that is gone, or one of another process namespace.
pub fn forget_names() {
    NAMER.store(0, Ordering::Release);
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_child_gives_out_no_name_of_its_parents() {
        let before = name().unwrap();
        assert_eq!(name(), Some(before + 1));
        forget_names();
        let after = name().unwrap();
        assert!(after.abs_diff(before) > 1 << 20, "{before:x}, {after:x}");
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
    use loom::thread;

    use super::*;

    impl Word for AtomicU64 {
        fn load(&self, order: Ordering) -> u64 {
            self.load(order)
        }

        fn store(&self, value: u64, order: Ordering) {
            self.store(value, order);
        }

        fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.swap(value, order)
        }

        fn replace(&self, expected: u64, value: u64) -> Result<(), u64> {
            self.compare_exchange(expected, value, Ordering::SeqCst, Ordering::Relaxed).map(drop)
        }
    }

    fn full() {
        fence(Ordering::SeqCst);
    }

    /// One direction of a connection, as the protocol sees it.
    #[derive(Default)]
    struct World {
        /// The ring: something to read.
        data: AtomicU32,
        armed: AtomicU64,
        /// Bytes in the kernel's stream.
        bells: AtomicU32,
        /// Threads that sleep on a set, and the stirs.
        asleep: AtomicU32,
        stirs: AtomicU32,
    }

    impl World {
        fn post(&self, fence: impl FnOnce()) {
            self.data.store(1, Ordering::Release);
            if sleeps(&self.armed, fence) != 0 && take_down(&self.armed) {
                self.bells.fetch_add(1, Ordering::AcqRel);
            }
        }

        /// True when the sleeper found nothing and sleeps on the bell.
        fn sleep(&self, fence: impl FnOnce()) -> bool {
            arm(&self.armed, fence);
            self.data.load(Ordering::Acquire) == 0
        }
    }

    /// Nobody sleeps for ever: who sleeps has a bell coming.
    fn nothing_lost(world: &World, slept: bool) {
        let bells = world.bells.load(Ordering::Acquire);
        assert!(!slept || bells > 0, "a sleeper, news and no bell");
    }

    fn race(poster: fn(), sleeper: fn()) {
        loom::model(move || {
            let world = Arc::new(World::default());
            let other = Arc::clone(&world);
            let posting = thread::spawn(move || other.post(poster));
            let slept = world.sleep(sleeper);
            posting.join().unwrap();
            nothing_lost(&world, slept);
        });
    }

    #[test]
    fn a_sleeper_sees_the_news_or_hears_the_bell() {
        race(full, full);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_poster_without_its_fence_loses_a_wake_up() {
        race(|| {}, full);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_sleeper_without_its_fence_loses_a_wake_up() {
        race(full, || {});
    }

    #[test]
    fn of_two_posters_at_least_one_rings() {
        loom::model(|| {
            let world = Arc::new(World::default());
            let posters: Vec<_> = (0..2)
                .map(|_| {
                    let world = Arc::clone(&world);
                    thread::spawn(move || world.post(full))
                })
                .collect();
            let slept = world.sleep(full);
            for poster in posters {
                poster.join().unwrap();
            }
            nothing_lost(&world, slept);
        });
    }

    /// What who swallows a doorbell on behalf of a set does wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Planted {
        Nothing,
        NoStir,
        EarlyStir,
        NoKick,
    }

    /// A set counts on the arm of a cold connection; another thread of the process, inside a call
    /// on it, swallows a doorbell meanwhile (`Connection::listen`, `epoll::sleep`). The set's thread
    /// sleeps twice: the first time its time is soon up.
    fn swallowed_beside_a_set(planted: Planted) {
        let mut bounded = loom::model::Builder::new();
        bounded.preemption_bound = Some(4);
        bounded.check(move || {
            let world = Arc::new(World::default());
            world.armed.store(1, Ordering::SeqCst);
            let (one, two) = (Arc::clone(&world), Arc::clone(&world));
            let posting = thread::spawn(move || one.post(full));
            let swallowing = thread::spawn(move || {
                if planted == Planted::EarlyStir {
                    two.stirs.store(1, Ordering::SeqCst);
                }
                full();
                if two.asleep.load(Ordering::SeqCst) != 0 {
                    return;
                }
                if two.bells.swap(0, Ordering::AcqRel) == 0 {
                    return;
                }
                if planted != Planted::EarlyStir && planted != Planted::NoStir {
                    two.stirs.store(1, Ordering::SeqCst);
                }
                full();
                if planted != Planted::NoKick && two.asleep.load(Ordering::SeqCst) != 0 {
                    // The kernel reports the connection to who sleeps on the set.
                    two.bells.fetch_add(1, Ordering::AcqRel);
                }
            });
            let (mut seen, mut slept) = (0, true);
            for turn in 0..2 {
                world.asleep.fetch_add(1, Ordering::SeqCst);
                full();
                let stirs = world.stirs.load(Ordering::SeqCst);
                if stirs != seen {
                    seen = stirs;
                    slept = world.sleep(full);
                    if !slept {
                        break;
                    }
                }
                // A doorbell that is there wakes the first sleep.
                if turn == 0 {
                    if world.bells.load(Ordering::Acquire) > 0 {
                        slept = false;
                        break;
                    }
                    world.asleep.fetch_sub(1, Ordering::SeqCst);
                }
            }
            posting.join().unwrap();
            swallowing.join().unwrap();
            nothing_lost(&world, slept);
        });
    }

    #[test]
    fn a_bell_swallowed_beside_a_set_is_made_up_for() {
        swallowed_beside_a_set(Planted::Nothing);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_swallower_that_does_not_stir_loses_a_wake_up() {
        swallowed_beside_a_set(Planted::NoStir);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_swallower_that_stirs_only_before_loses_a_wake_up() {
        swallowed_beside_a_set(Planted::EarlyStir);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_swallower_that_does_not_look_again_loses_a_wake_up() {
        swallowed_beside_a_set(Planted::NoKick);
    }

    /// A thread puts a connection that is ready into a set on which another one falls asleep
    /// (`epoll::control`, `epoll::sleep`; `epoll::sleeps_plainly` has `ours` for the entry).
    fn added_beside_a_sleeper(look: fn(), sleep: fn()) {
        loom::model(move || {
            // Here `data` is the entry.
            let world = Arc::new(World::default());
            let other = Arc::clone(&world);
            let adding = thread::spawn(move || {
                other.data.store(1, Ordering::Release);
                look();
                if other.asleep.load(Ordering::Relaxed) != 0 {
                    other.bells.fetch_add(1, Ordering::AcqRel);
                }
            });
            world.asleep.store(1, Ordering::Release);
            sleep();
            let slept = world.data.load(Ordering::Acquire) == 0;
            adding.join().unwrap();
            nothing_lost(&world, slept);
        });
    }

    #[test]
    fn an_entry_added_beside_a_sleeper_is_looked_at_or_wakes_it() {
        added_beside_a_sleeper(full, full);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_adder_without_its_fence_loses_a_wake_up() {
        added_beside_a_sleeper(|| {}, full);
    }

    /// Two ends of one set, and what the posters' process remembers.
    #[derive(Default)]
    struct Many {
        data: [AtomicU64; 2],
        armed: [AtomicU64; 2],
        /// Of either end: the set hears both.
        bells: AtomicU32,
        rung: AtomicU64,
        asleep: AtomicU32,
    }

    /// What one of the parties does wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Wrong {
        Nothing,
        /// A sleep has the name of the one before.
        OldName,
        /// Who wakes looks at the first end alone, and goes to sleep without arming the other anew.
        OneLook,
        /// The sleeper does not fence.
        NoFence,
        /// An end leaves the set, with its bell, and nobody arms the other.
        Left,
        /// A name is written over the arm of who sleeps on one end alone.
        OverEach,
    }

    impl Many {
        fn post(&self, end: usize) {
            self.data[end].store(1, Ordering::Release);
            let sleep = sleeps(&self.armed[end], full);
            if sleep == 0 || sleep != EACH && self.rung.load(Ordering::Acquire) == sleep {
                return;
            }
            if sleep != EACH || take_down(&self.armed[end]) {
                self.bells.fetch_add(1, Ordering::AcqRel);
            }
            if sleep != EACH {
                self.rung.store(sleep, Ordering::Release);
            }
        }

        /// True when there was news of one of the first `ends`.
        fn take(&self, ends: usize) -> bool {
            let taken = |data: &AtomicU64| data.swap(0, Ordering::AcqRel) != 0;
            self.data[..ends].iter().filter(|data| taken(data)).count() > 0
        }

        fn arm_all(&self, name: u64, ends: usize, wrong: Wrong) {
            self.armed[..ends].iter().for_each(|armed| arm_as(armed, name));
            if wrong != Wrong::NoFence {
                full();
            }
        }
    }

    /// A set sleeps on two ends, again and again; two threads of another process post on one each.
    fn one_sleep_on_two_ends(wrong: Wrong) {
        let mut bounded = loom::model::Builder::new();
        bounded.preemption_bound = Some(3);
        bounded.check(move || {
            let world = Arc::new(Many::default());
            let posters = [0, 1].map(|end| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.post(end))
            });
            let mut slept = false;
            for turn in 0..3 {
                let name = if wrong == Wrong::OldName { 2 } else { 2 + turn };
                let ends = if wrong == Wrong::OneLook && turn > 0 { 1 } else { 2 };
                world.arm_all(name, ends, wrong);
                if world.take(ends) {
                    continue;
                }
                if world.bells.swap(0, Ordering::AcqRel) == 0 {
                    slept = true;
                    break;
                }
                world.take(ends);
            }
            posters.into_iter().for_each(|poster| poster.join().unwrap());
            let news = world.data.iter().any(|data| data.load(Ordering::Acquire) != 0);
            let bell = world.bells.load(Ordering::Acquire) > 0;
            assert!(!slept || !news || bell, "a sleeper, news and no bell");
        });
    }

    #[test]
    fn a_set_that_sleeps_on_many_ends_hears_of_each_by_the_bell_of_any() {
        one_sleep_on_two_ends(Wrong::Nothing);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_sleep_with_an_old_name_loses_a_wake_up() {
        one_sleep_on_two_ends(Wrong::OldName);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_waker_that_forgets_an_end_loses_a_wake_up() {
        one_sleep_on_two_ends(Wrong::OneLook);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_sleep_on_many_ends_without_its_fence_loses_a_wake_up() {
        one_sleep_on_two_ends(Wrong::NoFence);
    }

    /// The first end leaves the set beside a thread that sleeps on it, and its bell with it
    /// (`epoll::forget`, `epoll::sleep::leave_armed`).
    fn an_end_leaves(wrong: Wrong) {
        let mut bounded = loom::model::Builder::new();
        bounded.preemption_bound = Some(3);
        bounded.check(move || {
            let world = Arc::new(Many::default());
            let (posters, remover) = (Arc::clone(&world), Arc::clone(&world));
            let posting = thread::spawn(move || {
                posters.post(0);
                posters.post(1);
            });
            let removing = thread::spawn(move || {
                remover.bells.store(0, Ordering::Release);
                full();
                if wrong != Wrong::Left && remover.asleep.load(Ordering::SeqCst) != 0 {
                    arm(&remover.armed[1], full);
                    if remover.data[1].load(Ordering::Acquire) != 0 {
                        remover.bells.fetch_add(1, Ordering::AcqRel);
                    }
                }
            });
            world.asleep.store(1, Ordering::SeqCst);
            world.arm_all(2, 2, wrong);
            let slept = !world.take(2);
            posting.join().unwrap();
            removing.join().unwrap();
            let news = world.data[1].load(Ordering::Acquire) != 0;
            let bell = world.bells.load(Ordering::Acquire) > 0;
            assert!(!slept || !news || bell, "a sleeper, news and no bell");
        });
    }

    #[test]
    fn an_end_that_leaves_a_set_takes_no_wake_up_with_it() {
        an_end_leaves(Wrong::Nothing);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_end_that_leaves_without_a_word_loses_a_wake_up() {
        an_end_leaves(Wrong::Left);
    }

    /// One thread sleeps on the first end alone while a set goes to sleep on both.
    fn beside_one_that_sleeps_alone(wrong: Wrong) {
        loom::model(move || {
            let world = Arc::new(Many::default());
            let (posters, sets) = (Arc::clone(&world), Arc::clone(&world));
            let alone = Arc::new(AtomicU32::new(0));
            let heard = Arc::clone(&alone);
            let posting = thread::spawn(move || {
                posters.post(1);
                // The bell of the second end is none for who sleeps on the first.
                let before = posters.bells.load(Ordering::Acquire);
                posters.post(0);
                heard.store(posters.bells.load(Ordering::Acquire) - before, Ordering::Release);
            });
            let sleeping = thread::spawn(move || {
                if wrong == Wrong::OverEach {
                    sets.armed.iter().for_each(|armed| armed.store(2, Ordering::SeqCst));
                    full();
                } else {
                    sets.arm_all(2, 2, wrong);
                }
            });
            arm(&world.armed[0], full);
            let slept = world.data[0].load(Ordering::Acquire) == 0;
            posting.join().unwrap();
            sleeping.join().unwrap();
            assert!(!slept || alone.load(Ordering::Acquire) > 0, "a sleeper, news and no bell");
        });
    }

    #[test]
    fn who_sleeps_on_one_end_is_rung_for_whatever_sets_do() {
        beside_one_that_sleeps_alone(Wrong::Nothing);
    }

    #[test]
    #[should_panic(expected = "no bell")]
    fn a_planted_name_over_the_arm_of_one_loses_a_wake_up() {
        beside_one_that_sleeps_alone(Wrong::OverEach);
    }
}
