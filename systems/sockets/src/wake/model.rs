//! Every order of the steps of sleepers and posters, with planted omissions, under loom.

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

    fn set(&self, bits: u64) {
        self.fetch_or(bits, Ordering::SeqCst);
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

/// Two ends with places on one board, and what the posters' process remembers.
#[derive(Default)]
struct Noted {
    data: [AtomicU64; 2],
    armed: [AtomicU64; 2],
    bits: AtomicU64,
    sleep: AtomicU64,
    bells: [AtomicU32; 2],
    rung: AtomicU64,
}

/// What one of the parties at a board does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Amiss {
    Nothing,
    /// The poster looks whether the set sleeps before it sets the bit.
    BitLate,
    /// The poster does not fence between the two.
    NoPostersFence,
    /// The sleeper does not fence.
    NoFence,
    /// A sleep has the name of the one before.
    OldName,
    /// The set looks at the ends that were noted, then takes the bits.
    LookFirst,
    /// The sleeper takes the bits before it says that it sleeps, and not afterwards.
    TakenEarly,
    /// Who rang notes the name though the end has left the set.
    Blind,
    /// An end leaves the set and keeps its place.
    PlaceKept,
}

impl Noted {
    fn new() -> Self {
        let noted = Self::default();
        for (bit, armed) in (0..).zip(&noted.armed) {
            armed.store(place(5, bit), Ordering::SeqCst);
        }
        noted
    }

    fn post(&self, end: usize, amiss: Amiss) {
        self.data[end].store(1, Ordering::Release);
        let place = sleeps(&self.armed[end], full);
        if place == 0 {
            return;
        }
        assert!(is_place(place) && board_of(place) == 5, "armed with its place");
        let fence = if amiss == Amiss::NoPostersFence { || {} } else { full };
        let early = self.sleep.load(Ordering::Acquire);
        let sleep = note_on(&self.bits, 1 << bit_of(place), &self.sleep, fence);
        let sleep = if amiss == Amiss::BitLate { early } else { sleep };
        if sleep == 0 || self.rung.load(Ordering::Acquire) == sleep {
            return;
        }
        self.bells[end].fetch_add(1, Ordering::AcqRel);
        if amiss == Amiss::Blind || has_still(&self.armed[end], place) {
            self.rung.store(sleep, Ordering::Release);
        }
    }

    fn look(&self, ends: u64) -> bool {
        let taken = |end: usize| self.data[end].swap(0, Ordering::AcqRel) != 0;
        (0..2).filter(|end| ends >> end & 1 != 0 && taken(*end)).count() > 0
    }

    /// True when there was news of one of `ends`: those that were noted are looked at.
    fn take(&self, ends: u64, amiss: Amiss) -> bool {
        if amiss == Amiss::LookFirst {
            let news = self.look(self.bits.load(Ordering::Acquire) & ends);
            take_notes(&self.bits);
            return news;
        }
        self.look(take_notes(&self.bits) & ends)
    }

    fn name(&self, name: u64, amiss: Amiss) {
        self.sleep.swap(name, Ordering::SeqCst);
        if amiss != Amiss::NoFence {
            full();
        }
    }
}

/// A set sleeps, again and again, and looks at nothing that was not noted; two threads of another
/// process post on an end each.
fn two_ends_of_a_board(amiss: Amiss) {
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(3);
    bounded.check(move || {
        let world = Arc::new(Noted::new());
        let posters = [0, 1].map(|end| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.post(end, amiss))
        });
        let mut slept = false;
        for turn in 0..3 {
            // Awake, as before each sleep.
            if (turn == 0 || amiss == Amiss::TakenEarly) && world.take(3, amiss) {
                continue;
            }
            world.name(if amiss == Amiss::OldName { 2 } else { 2 + turn }, amiss);
            if amiss != Amiss::TakenEarly && world.take(3, amiss) {
                continue;
            }
            let heard = |bells: &AtomicU32| bells.swap(0, Ordering::AcqRel) != 0;
            if world.bells.iter().filter(|bells| heard(bells)).count() == 0 {
                slept = true;
                break;
            }
            world.take(3, amiss);
        }
        posters.into_iter().for_each(|poster| poster.join().unwrap());
        let news = world.data.iter().any(|data| data.load(Ordering::Acquire) != 0);
        let bell = world.bells.iter().any(|bells| bells.load(Ordering::Acquire) > 0);
        assert!(!slept || !news || bell, "a sleeper, news and no bell");
    });
}

#[test]
fn what_is_noted_on_a_board_is_taken_or_rung_for() {
    two_ends_of_a_board(Amiss::Nothing);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_poster_that_sets_its_bit_late_loses_a_wake_up() {
    two_ends_of_a_board(Amiss::BitLate);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_poster_without_a_fence_behind_its_bit_loses_a_wake_up() {
    two_ends_of_a_board(Amiss::NoPostersFence);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_sleeper_without_a_fence_behind_its_name_loses_a_wake_up() {
    two_ends_of_a_board(Amiss::NoFence);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_board_with_an_old_name_loses_a_wake_up() {
    two_ends_of_a_board(Amiss::OldName);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_set_that_looks_before_it_takes_the_bits_loses_a_wake_up() {
    two_ends_of_a_board(Amiss::LookFirst);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_sleeper_that_takes_the_bits_too_early_loses_a_wake_up() {
    two_ends_of_a_board(Amiss::TakenEarly);
}

/// The first end leaves the set, which no longer hears its bells, and the set falls asleep (`Places::leave`).
fn an_end_leaves_its_board(amiss: Amiss) {
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(3);
    bounded.check(move || {
        let world = Arc::new(Noted::new());
        let posters = Arc::clone(&world);
        let posting = thread::spawn(move || {
            posters.post(0, amiss);
            posters.post(1, amiss);
        });
        if amiss != Amiss::PlaceKept {
            let _ = world.armed[0].replace(place(5, 0), 0);
        }
        world.name(2, amiss);
        let slept = !world.take(2, amiss);
        posting.join().unwrap();
        let news = world.data[1].load(Ordering::Acquire) != 0;
        let bell = world.bells[1].load(Ordering::Acquire) > 0;
        assert!(!slept || !news || bell, "a sleeper, news and no bell");
    });
}

#[test]
fn an_end_that_leaves_its_board_takes_no_wake_up_with_it() {
    an_end_leaves_its_board(Amiss::Nothing);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_note_of_a_bell_that_nobody_heard_loses_a_wake_up() {
    an_end_leaves_its_board(Amiss::Blind);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_end_that_leaves_with_its_place_loses_a_wake_up() {
    an_end_leaves_its_board(Amiss::PlaceKept);
}

/// What is left out where one thread sleeps for room and another skips the last doorbell.
#[derive(Clone, Copy, PartialEq)]
enum Skips {
    Nothing,
    NoCount,
    NoFence,
}

/// A connection goes back to the kernel: its last doorbell (`bells`) comes, then the word of it (`data`).
/// A thread falls asleep for room, and another one skips doorbells (`recall`).
fn skipped_beside_one_that_sleeps_for_room(planted: Skips) {
    loom::model(move || {
        let world = Arc::new(World::default());
        let (one, two) = (Arc::clone(&world), Arc::clone(&world));
        let returning = thread::spawn(move || {
            one.bells.fetch_add(1, Ordering::AcqRel);
            one.data.store(1, Ordering::Release);
        });
        let skipping = thread::spawn(move || {
            if two.data.load(Ordering::Acquire) == 0 {
                return;
            }
            if planted != Skips::NoFence {
                full();
            }
            // `asleep` stands for `for_room`.
            if planted == Skips::NoCount || two.asleep.load(Ordering::Relaxed) == 0 {
                two.bells.swap(0, Ordering::AcqRel);
            }
        });
        world.asleep.fetch_add(1, Ordering::Relaxed);
        full();
        let slept = world.data.load(Ordering::Acquire) == 0;
        returning.join().unwrap();
        skipping.join().unwrap();
        nothing_lost(&world, slept);
    });
}

#[test]
fn a_doorbell_stays_for_who_sleeps_for_room() {
    skipped_beside_one_that_sleeps_for_room(Skips::Nothing);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_skipper_that_does_not_look_who_sleeps_for_room_loses_a_wake_up() {
    skipped_beside_one_that_sleeps_for_room(Skips::NoCount);
}

#[test]
#[should_panic(expected = "no bell")]
fn a_planted_skipper_without_its_fence_loses_a_wake_up() {
    skipped_beside_one_that_sleeps_for_room(Skips::NoFence);
}
