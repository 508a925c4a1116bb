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

use std::sync::atomic::{AtomicU32, Ordering};

/// A word that the two sides share.
pub trait Word {
    /// As of an atomic.
    fn load(&self, order: Ordering) -> u32;
    /// As of an atomic.
    fn store(&self, value: u32, order: Ordering);
    /// As of an atomic.
    fn swap(&self, value: u32, order: Ordering) -> u32;
}

impl Word for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }
}

/// The sleeper's part: afterwards it looks once more, and sleeps only if there is nothing.
#[inline]
pub fn arm(armed: &impl Word, fence: impl FnOnce()) {
    armed.store(1, Ordering::SeqCst);
    fence();
}

/// The poster's part, after it published: true when it has to ring.
#[inline]
pub fn sleeps(armed: &impl Word, fence: impl FnOnce()) -> bool {
    fence();
    armed.load(Ordering::Relaxed) != 0
}

/// Of several posters, one rings.
#[inline]
pub fn take_down(armed: &impl Word) -> bool {
    armed.swap(0, Ordering::AcqRel) != 0
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, fence};
    use loom::thread;

    use super::*;

    impl Word for AtomicU32 {
        fn load(&self, order: Ordering) -> u32 {
            self.load(order)
        }

        fn store(&self, value: u32, order: Ordering) {
            self.store(value, order);
        }

        fn swap(&self, value: u32, order: Ordering) -> u32 {
            self.swap(value, order)
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
        armed: AtomicU32,
        /// Bytes in the kernel's stream.
        bells: AtomicU32,
        /// Threads that sleep on a set, and the stirs.
        asleep: AtomicU32,
        stirs: AtomicU32,
    }

    impl World {
        fn post(&self, fence: impl FnOnce()) {
            self.data.store(1, Ordering::Release);
            if sleeps(&self.armed, fence) && take_down(&self.armed) {
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
}
