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
//!
//! # Many ends that are silent for long
//!
//! What is silent cannot be armed anew for every sleep, and one bell for each message is what the
//! kernel does. So an end has a *place*: it stays armed with a word that tells a board and a bit on it, whether
//! its set sleeps or not, and who posts notes it there:
//!
//! ```text
//! poster:  publishes; light fence; armed? a place: sets the bit; fence; does the board's set sleep? a
//!          name: rang for it before? no: rings; is it armed with the place still? notes the name
//! set:     takes the bits, and looks at those ends
//! sleeper: board := fresh name; heavy fence; any bits, or anything there? no: sleeps until any bell;
//!          then takes the bits
//! ```
//!
//! (5) A bit is taken before its end is looked at: what the look does not see sets the bit again, so that
//! the end may be let go of without a fence as long as it is armed with its place. (6) Who rang notes it only if
//! the end had its place after the bell, and an end's place is taken down before it leaves the set: else the
//! name would be one that nobody in the set heard of.

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
    /// As of an atomic: sets `bits`.
    fn set(&self, bits: u64);
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

    #[inline]
    fn set(&self, bits: u64) {
        self.fetch_or(bits, Ordering::SeqCst);
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

/// The poster's part at an end with a place: the sleep of the board's set; 0: it is awake, and takes the bits
/// before it sleeps.
#[inline]
pub fn note_on(word: &impl Word, bit: u64, sleep: &impl Word, fence: impl FnOnce()) -> u64 {
    word.set(bit);
    fence();
    sleep.load(Ordering::Acquire)
}

/// True when an end that was just rung for has its place still: its set heard the bell.
#[inline]
pub fn has_still(armed: &impl Word, place: u64) -> bool {
    // A read-modify-write: the bell, a system call, came before.
    armed.replace(place, place).is_ok()
}

/// Takes the bits of a board's word.
#[inline]
pub fn take_notes(word: &impl Word) -> u64 {
    if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::AcqRel) }
}

/// After [`Word::set`] where the look at the board's sleep follows.
#[inline]
pub fn between_bit_and_sleep() {
    // There a read-modify-write is a full fence.
    if cfg!(target_arch = "x86_64") {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Upper two bits of a place; names of sleeps have the highest.
const PLACE: u64 = 1 << 62;
const PLACE_MASK: u64 = 3 << 62;
const BIT_BITS: u32 = 13;
/// Bits of a board.
pub const BITS: u32 = 1 << BIT_BITS;
const BOARD_NAMES: u64 = (1 << (62 - BIT_BITS)) - 1;

/// A place: a bit of the board of this name.
#[must_use]
pub fn place(board: u64, bit: u32) -> u64 {
    PLACE | (board & BOARD_NAMES) << BIT_BITS | u64::from(bit % BITS)
}

/// True for a place.
#[inline]
#[must_use]
pub fn is_place(armed: u64) -> bool {
    armed & PLACE_MASK == PLACE
}

/// The board of a place.
#[inline]
#[must_use]
pub fn board_of(place: u64) -> u64 {
    place >> BIT_BITS & BOARD_NAMES
}

/// The bit of a place, below [`BITS`].
#[inline]
#[must_use]
pub fn bit_of(place: u64) -> u32 {
    u32::try_from(place % u64::from(BITS)).unwrap_or(0)
}

/// A name for a board, as [`name`]. Not 0.
#[must_use]
pub fn board_name() -> Option<u64> {
    Some((name()? & BOARD_NAMES).max(1))
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
mod model;
