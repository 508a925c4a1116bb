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

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

use crate::connection::Connection;
use crate::segment::{BOARD_WORDS, Board};
use crate::{kernel, table, wake};

const _: () =
    assert!(BOARD_WORDS as u32 * u64::BITS == wake::BITS, "a board has a place for each bit");

/// Boards that were found, by the lower bits of their names.
const PLACES: usize = 64;
static FOUND: [AtomicPtr<Connection>; PLACES] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; PLACES];
/// Names that were looked for in vain, and when.
static MISSED: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
static MISSED_NS: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// Looking for a board takes a look at each connection.
const AGAIN_NS: u64 = 250_000_000;

/// This program's name, and the process that drew it.
static PROGRAM: AtomicU64 = AtomicU64::new(0);
static DRAWN_BY: AtomicU32 = AtomicU32::new(0);

/// What this program's connections are known by at their other ends; 0 without randomness.
pub fn program() -> u64 {
    let process = std::process::id();
    // Acquire with the Release below.
    if DRAWN_BY.load(Ordering::Acquire) != process {
        PROGRAM.store(kernel::random().unwrap_or(0), Ordering::Relaxed);
        DRAWN_BY.store(process, Ordering::Release);
    }
    PROGRAM.load(Ordering::Relaxed)
}

/// In the child of a `fork`, which will have connections of its own.
pub fn forget_program() {
    DRAWN_BY.store(0, Ordering::Release);
}

fn index(name: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "below the length of the list")]
    let index = (name % PLACES as u64) as usize;
    index
}

/// The board of this name, if a connection of this process has it.
#[inline]
#[must_use]
pub fn find(name: u64) -> Option<&'static Board> {
    // Acquire with the Release in `search`. SAFETY: a connection of the table's, taken out of the list
    // before it is retired; whoever has loaded it is within the grace of those that are.
    let known = unsafe { FOUND[index(name)].load(Ordering::Acquire).as_ref() };
    if let Some(connection) = known {
        let board = connection.segment.other_board();
        if board.name.load(Ordering::Relaxed) == name {
            return Some(board);
        }
    }
    search(name)
}

#[cold]
fn search(name: u64) -> Option<&'static Board> {
    let index = index(name);
    let now = kernel::coarse_ns();
    let missed = MISSED[index].load(Ordering::Relaxed) == name;
    if missed && now.wrapping_sub(MISSED_NS[index].load(Ordering::Relaxed)) < AGAIN_NS {
        return None;
    }
    let mut found = None;
    table::each(|fd, connection| {
        let board = connection.segment.other_board();
        if found.is_none() && board.name.load(Ordering::Relaxed) == name {
            found = Some((fd, connection));
        }
    });
    let Some((fd, connection)) = found else {
        MISSED_NS[index].store(now, Ordering::Relaxed);
        MISSED[index].store(name, Ordering::Relaxed);
        return None;
    };
    connection.lends.store(true, Ordering::SeqCst);
    let place = std::ptr::from_ref(connection).cast_mut();
    FOUND[index].store(place, Ordering::SeqCst);
    // Either this sees that its number is gone, or `forget` sees this.
    fence(Ordering::SeqCst);
    if !table::ours(fd).is_some_and(|now| std::ptr::eq(now, connection)) {
        take_out(connection);
        return None;
    }
    Some(connection.segment.other_board())
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
    for found in &FOUND {
        let null = std::ptr::null_mut();
        let _ = found.compare_exchange(place, null, Ordering::SeqCst, Ordering::Relaxed);
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
