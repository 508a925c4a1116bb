//! Which entries of a set have a place on a board, and on which: see [`crate::board`].
//!
//! A set of many connections has a board for each program that has many of their other ends. The
//! connection that lends it stays in memory as long as the board is used, also when it is closed.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use super::set::Entry;
use crate::connection::Connection;
use crate::segment::Board;
use crate::wake::{self, Word as _};
use crate::{kernel, table};

/// Entries of a set, and of them those of one program, from which on they have places: fewer are looked
/// at, and rung for together.
const MANY: usize = 64;
const MANY_OF_ONE: u32 = 32;
/// Boards of a set, at most: each costs every wait a look.
const MOST_BOARDS: usize = 16;

/// So many times places of a board have to be found taken down, with such a time between, and nothing noted
/// since the first: then its sender does not have it. One that may not search yet takes them down, too:
/// hence the time.
const MISSES: u32 = 4;
const BETWEEN_MISSES_NS: u64 = 50_000_000;

/// An entry's place.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// What it is armed with.
    pub armed: u64,
    board: usize,
}

#[derive(Debug)]
struct Lent {
    name: u64,
    program: u64,
    lender: &'static Connection,
    /// This process was restored so often before.
    restores: u32,
    /// Of each bit, the entry's place in the set.
    entries: Vec<usize>,
    free: Vec<u32>,
    used: usize,
    /// Places of it that were taken down, and when the last was counted.
    missed: u32,
    missed_ns: u64,
    /// It is not known any more: its entries are to leave, and whether they were told.
    is_over: bool,
    told: bool,
}

impl Lent {
    fn board(&self) -> &'static Board {
        self.lender.segment.own_board()
    }

    /// The other end's program has it, or will soon not have it any more.
    fn is_known(&self) -> bool {
        let closed = self.lender.segment.other().signs.closed.load(Ordering::Relaxed) != 0;
        // What is back in the kernel's stream may be moved, or asks anew.
        !self.is_over
            && self.missed < MISSES
            && self.lender.references.load(Ordering::Relaxed) > 0
            && !closed
            && !self.lender.is_over()
            && !self.lender.is_returned()
            && self.restores == table::restores()
    }

    /// Who sends to an entry with a place took that down.
    fn miss(&mut self) {
        let now = kernel::coarse_ns();
        if self.missed == 0 || now.wrapping_sub(self.missed_ns) >= BETWEEN_MISSES_NS {
            (self.missed, self.missed_ns) = (self.missed + 1, now);
        }
    }

    fn has_room(&self) -> bool {
        !self.free.is_empty() || self.entries.len() < wake::BITS as usize
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.board().name.store(0, Ordering::SeqCst);
        self.lender.borrowed.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The boards of one set.
#[derive(Debug, Default)]
pub struct Places {
    boards: Vec<Option<Lent>>,
    lent: usize,
    /// Entries of each program.
    members: HashMap<u64, u32>,
}

impl Places {
    /// No entry has a place.
    pub fn is_empty(&self) -> bool {
        self.lent == 0
    }

    /// What `entry`, in the set's place `at`, is to be armed with; `many`: how many entries there are.
    pub fn give(
        &mut self,
        at: usize,
        entry: &mut Entry,
        connection: &'static Connection,
        many: usize,
    ) -> Option<u64> {
        let program = connection.segment.other().signs.program.load(Ordering::Relaxed);
        if let Some(place) = entry.noted {
            let lent = self.boards.get_mut(place.board)?.as_mut()?;
            let armed = connection.segment.own().signs.receive_armed.load(Ordering::Relaxed);
            // Who sleeps on it alone wrote over its place, but nobody took that down.
            if armed != place.armed && armed != wake::EACH {
                lent.miss();
            }
            if lent.program == program && lent.is_known() {
                return Some(place.armed);
            }
            self.leave_board(entry);
        }
        if entry.program != program {
            self.forget_program(entry);
            *self.members.entry(program).or_default() += 1;
            entry.program = program;
        }
        let of_one = self.members.get(&program).copied().unwrap_or(0);
        if program == 0 || many < MANY || of_one < MANY_OF_ONE {
            return None;
        }
        let open = |lent: &Lent| lent.program == program && lent.is_known() && lent.has_room();
        let found = self.boards.iter().position(|lent| lent.as_ref().is_some_and(open));
        let board = found.or_else(|| self.borrow(program, connection))?;
        let lent = self.boards.get_mut(board)?.as_mut()?;
        let bit = lent.free.pop().or_else(|| {
            lent.entries.push(at);
            u32::try_from(lent.entries.len() - 1).ok()
        })?;
        *lent.entries.get_mut(bit as usize)? = at;
        lent.used += 1;
        let armed = wake::place(lent.name, bit);
        entry.noted = Some(Place { armed, board });
        Some(armed)
    }

    /// A board in `lender`'s segment. The entries of those that are not known any more are told to leave:
    /// silent ones would keep them.
    fn borrow(&mut self, program: u64, lender: &'static Connection) -> Option<usize> {
        for lent in self.boards.iter_mut().flatten() {
            lent.is_over |= !lent.is_known();
        }
        if self.lent >= MOST_BOARDS {
            return None;
        }
        let name = wake::board_name()?;
        let board = lender.segment.own_board();
        board.name.replace(0, name).ok()?;
        // What another set left.
        board.sleep.store(0, Ordering::SeqCst);
        board.words.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        // Its memory stays.
        lender.borrowed.fetch_add(1, Ordering::AcqRel);
        let (entries, free) = (Vec::new(), Vec::new());
        let restores = table::restores();
        let lent = Some(Lent {
            name,
            program,
            lender,
            restores,
            entries,
            free,
            used: 0,
            missed: 0,
            missed_ns: 0,
            is_over: false,
            told: false,
        });
        self.lent += 1;
        if let Some(place) = self.boards.iter().position(Option::is_none) {
            self.boards[place] = lent;
            return Some(place);
        }
        self.boards.push(lent);
        Some(self.boards.len() - 1)
    }

    fn forget_program(&mut self, entry: &mut Entry) {
        if let Some(count) = self.members.get_mut(&entry.program) {
            *count -= 1;
            if *count == 0 {
                self.members.remove(&entry.program);
            }
        }
        entry.program = 0;
    }

    /// `entry` leaves the set.
    pub fn leave(&mut self, entry: &mut Entry) {
        self.leave_board(entry);
        self.forget_program(entry);
    }

    /// `entry` has a place no more, and is armed by the caller otherwise.
    pub fn leave_board(&mut self, entry: &mut Entry) {
        let Some(place) = entry.noted.take() else { return };
        if let Some(connection) = table::ours(entry.fd) {
            let _ = connection.segment.own().signs.receive_armed.replace(place.armed, 0);
        }
        let Some(slot) = self.boards.get_mut(place.board) else { return };
        let Some(lent) = slot else { return };
        lent.free.push(wake::bit_of(place.armed));
        lent.used -= 1;
        if lent.used == 0 {
            *slot = None;
            self.lent -= 1;
        }
    }

    /// Every entry with a place leaves: `entries` are all of them.
    pub fn end<'a>(&mut self, entries: impl Iterator<Item = &'a mut Entry>) {
        entries.for_each(|entry| self.leave(entry));
    }

    /// In the child of a `fork`: they are the parent's.
    pub fn abandon(&mut self) {
        for lent in self.boards.drain(..).flatten() {
            lent.lender.borrowed.fetch_sub(1, Ordering::AcqRel);
            std::mem::forget(lent);
        }
        self.lent = 0;
    }

    /// A thread goes to sleep, by this name.
    pub fn sleep_as(&self, name: u64) {
        for lent in self.boards.iter().flatten() {
            lent.board().sleep.swap(name, Ordering::SeqCst);
        }
    }

    /// Nobody sleeps on the set any more.
    pub fn are_awake(&self) {
        for lent in self.boards.iter().flatten() {
            lent.board().sleep.store(0, Ordering::Release);
        }
    }

    /// Takes what was noted, and whose boards are over: places in the set.
    pub fn take(&mut self, noted: &mut Vec<usize>) {
        for lent in self.boards.iter_mut().flatten() {
            let words = lent.entries.len().div_ceil(64);
            let before = noted.len();
            for (index, word) in lent.board().words.iter().take(words).enumerate() {
                let mut bits = wake::take_notes(word);
                while bits != 0 {
                    let bit = index * 64 + bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    noted.extend(lent.entries.get(bit));
                }
            }
            if noted.len() > before && lent.missed < MISSES {
                lent.missed = 0;
            }
            if lent.is_over && !lent.told {
                lent.told = true;
                noted.extend(&lent.entries);
            }
        }
    }

    /// Boards that are over, a bit each.
    pub fn over(&self) -> u32 {
        let over = |lent: &Option<Lent>| lent.as_ref().is_some_and(|lent| lent.is_over);
        let bit = |(at, lent)| u32::from(over(lent)) << at;
        self.boards.iter().enumerate().map(bit).sum()
    }
}

impl Place {
    /// On one of these boards, a bit each.
    pub fn is_on(&self, boards: u32) -> bool {
        boards >> self.board & 1 != 0
    }
}
