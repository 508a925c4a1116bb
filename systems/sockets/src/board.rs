//! Boards: where one program's senders note which of its connections have news for a set of another's, so
//! that a set of very many connections is neither rung for by each nor looks at all.
//!
//! A board lies in the segment of one of the connections between the two programs, which *lends* it; the
//! others are armed with a place on it (`wake` tells how, [`crate::epoll`] who gives places). A sender
//! finds the board by its name among its own connections, and remembers where it was. A board that it
//! does not find (closed at this end, or never given to this process) is none: it takes the place down and rings,
//! as for anything armed.
//!
//! All that is read from a board are bits and names: nonsense costs a look or a bell.

use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};

use crate::connection::Connection;
use crate::segment::{BOARD_WORDS, Board};
use crate::{kernel, table, wake};

const _: () =
    assert!(BOARD_WORDS as u32 * u64::BITS == wake::BITS, "a board has a place for each bit");

/// Boards that were found: a name has its row, and any place in it.
const ROW_BITS: u32 = 8;
const ROWS: usize = 1 << ROW_BITS;
const WAYS: usize = 4;
static FOUND: [[AtomicPtr<Connection>; WAYS]; ROWS] =
    [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; WAYS] }; ROWS];
/// Where all places of a row are taken, the next one to be given anew.
static TURN: AtomicUsize = AtomicUsize::new(0);
/// Names that were looked for in vain, by their rows, and when.
static MISSED: [AtomicU64; ROWS] = [const { AtomicU64::new(0) }; ROWS];
static MISSED_NS: [AtomicU64; ROWS] = [const { AtomicU64::new(0) }; ROWS];
const AGAIN_NS: u64 = 250_000_000;

/// Looking for a board takes a look at each connection. So each such search is paid for with so many times
/// as long without one, whatever the names; what is not looked for is rung for.
const REST: u64 = 64;
/// When all searches will be paid for.
static PAID_NS: AtomicU64 = AtomicU64::new(0);
/// So far ahead they go on: a program may get several boards at once.
const AHEAD_NS: u64 = 1_000_000_000;
/// No search costs more.
const DEAREST_NS: u64 = 1_000_000_000;
static SEARCHES: AtomicU64 = AtomicU64::new(0);

/// How often this process has looked at its connections for a board.
#[must_use]
pub fn searches() -> u64 {
    SEARCHES.load(Ordering::Relaxed)
}

/// This program's name: drawn at random, with the number of the process that drew it in its lower bits; 0 until
/// one is needed.
static PROGRAM: AtomicU64 = AtomicU64::new(0);
/// Linux gives no process a larger number.
const PROCESS_BITS: u32 = 22;

/// What this program's connections are known by at their other ends; 0 without randomness.
pub fn program() -> u64 {
    let process = u64::from(std::process::id());
    let known = PROGRAM.load(Ordering::Relaxed);
    if known != 0 && known & ((1 << PROCESS_BITS) - 1) == process {
        return known;
    }
    let Some(random) = kernel::random() else { return 0 };
    let fresh = random << PROCESS_BITS | process;
    // Of threads that draw at once, one's stays: a connection of another name would have no place among the
    // others. Relaxed: the number is all there is.
    match PROGRAM.compare_exchange(known, fresh, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => fresh,
        Err(others) => others,
    }
}

/// In the child of a `fork`, which will have connections of its own.
pub fn forget_program() {
    PROGRAM.store(0, Ordering::Relaxed);
}

/// The row of a name. Names follow each other, from a start at random.
fn row(name: u64) -> usize {
    let mixed = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - ROW_BITS);
    usize::try_from(mixed).unwrap_or(0)
}

/// The connection of a place, and the name of its board.
fn known(place: &AtomicPtr<Connection>) -> Option<(&'static Connection, u64)> {
    // Acquire with the store in `search`. SAFETY: a connection of the table's, taken out of the rows
    // before it is retired; whoever has loaded it is within the grace of those that are.
    let connection = unsafe { place.load(Ordering::Acquire).as_ref() }?;
    Some((connection, connection.segment.other_board().name.load(Ordering::Relaxed)))
}

/// The board of this name, if a connection of this process has it. 0 is no name: boards that nobody borrows have it.
#[inline]
#[must_use]
pub fn find(name: u64) -> Option<&'static Board> {
    if name == 0 {
        return None;
    }
    for place in &FOUND[row(name)] {
        if let Some((connection, held)) = known(place)
            && held == name
        {
            return Some(connection.segment.other_board());
        }
    }
    search(name)
}

/// How far ahead of now searches are paid for.
fn ahead(now: u64) -> u64 {
    let ahead = PAID_NS.load(Ordering::Relaxed).saturating_sub(now);
    // Further than any search leaves it: the clock went back, as it may when a checkpoint is restored.
    if ahead > AHEAD_NS + DEAREST_NS { 0 } else { ahead }
}

/// After a search of this length. Of searches at the same time, one may be free.
fn pay(now: u64, took_ns: u64) {
    let cost = took_ns.saturating_mul(REST).min(DEAREST_NS);
    PAID_NS.store(now + (ahead(now) + cost).min(AHEAD_NS + DEAREST_NS), Ordering::Relaxed);
}

#[cold]
fn search(name: u64) -> Option<&'static Board> {
    let row = row(name);
    let now = kernel::coarse_ns();
    let missed = MISSED[row].load(Ordering::Relaxed) == name;
    if missed && now.wrapping_sub(MISSED_NS[row].load(Ordering::Relaxed)) < AGAIN_NS
        || ahead(now) > AHEAD_NS
    {
        return None;
    }
    let begun = kernel::worked_ns();
    let is = |one: &Connection| one.segment.other_board().name.load(Ordering::Relaxed) == name;
    let found = table::first(is);
    SEARCHES.fetch_add(1, Ordering::Relaxed);
    pay(now, kernel::worked_ns().saturating_sub(begun));
    let Some((fd, connection)) = found else {
        MISSED_NS[row].store(now, Ordering::Relaxed);
        MISSED[row].store(name, Ordering::Relaxed);
        return None;
    };
    connection.lends.store(true, Ordering::SeqCst);
    let place = std::ptr::from_ref(connection).cast_mut();
    place_in(row, connection).store(place, Ordering::SeqCst);
    // Either this sees that its number is gone, or `forget` sees this.
    fence(Ordering::SeqCst);
    if !table::leads_to(fd, connection) {
        take_out(connection);
        return None;
    }
    Some(connection.segment.other_board())
}

/// A place of this row for `connection`: its own, or one that is empty, or whose board has another name by
/// now, or the next in turn.
fn place_in(index: usize, connection: &Connection) -> &'static AtomicPtr<Connection> {
    let free = |place: &&AtomicPtr<Connection>| {
        known(place).is_none_or(|(held, name)| std::ptr::eq(held, connection) || row(name) != index)
    };
    let turn = || &FOUND[index][TURN.fetch_add(1, Ordering::Relaxed) % WAYS];
    FOUND[index].iter().find(free).unwrap_or_else(turn)
}

/// `connection` has left the table, and is about to be retired.
pub fn forget(connection: &Connection) {
    fence(Ordering::SeqCst);
    if connection.lends.load(Ordering::SeqCst) {
        take_out(connection);
    }
}

fn take_out(connection: &Connection) {
    let place = std::ptr::from_ref(connection).cast_mut();
    for found in FOUND.iter().flatten() {
        if found.load(Ordering::SeqCst) == place {
            let null = std::ptr::null_mut();
            let _ = found.compare_exchange(place, null, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
}

/// Notes news for the end that is armed with `place`: the name of the sleep that is to be rung for, 0 for
/// none. `None`: there is no such board.
#[inline(never)]
pub fn note(place: u64) -> Option<u64> {
    let board = find(wake::board_of(place))?;
    let bit = wake::bit_of(place);
    let word = board.words.get(bit as usize / 64)?;
    let fence = wake::between_bit_and_sleep;
    let sleep = wake::note_on(word, 1 << (bit % 64), &board.sleep, fence);
    Some(if wake::was_rung(sleep) { 0 } else { sleep })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn threads_that_name_their_program_at_once_give_it_one_name() {
        const ROUNDS: u32 = 20_000;
        let (round, named) = (AtomicU32::new(0), AtomicU64::new(0));
        let mut differ = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for next in 1..=ROUNDS {
                    while round.load(Ordering::SeqCst) != next {
                        std::thread::yield_now();
                    }
                    named.store(program(), Ordering::SeqCst);
                }
            });
            for next in 1..=ROUNDS {
                forget_program();
                named.store(0, Ordering::SeqCst);
                round.store(next, Ordering::SeqCst);
                let own = program();
                let other = loop {
                    let other = named.load(Ordering::SeqCst);
                    if other != 0 {
                        break other;
                    }
                    std::thread::yield_now();
                };
                differ += u32::from(own != other);
            }
        });
        assert_eq!(differ, 0, "of {ROUNDS} rounds");
    }
}
