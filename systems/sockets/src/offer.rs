//! Large sends, taken by the reader straight from the sender's memory: one copy instead of two.
//!
//! ```text
//! sender                                      reader
//! word := (number, 0 taken, OPEN)
//! message OFFER in the ring: where, how long ──► at the head: compare-and-swap OPEN → BUSY
//! waits, a moment at most                         process_vm_readv into the program's buffer
//!                                             ◄── BUSY → OPEN with what was taken, or → DONE
//! not taken: OPEN → WITHDRAWN; the rest goes      WITHDRAWN: goes on behind the message
//! through the ring
//! ```
//!
//! The paper (p. 4.8) maps pages from one process to the other, with a kernel module. Without one,
//! mapping pages of a shared object into the reader costs more than copying them up to a megabyte,
//! even where the sender need not copy at all (`docs/sockets.md` has the figures). One copy made by
//! the kernel pays from [`DEFAULT_LEAST`] to [`MOST`], where both ends have a processor; otherwise
//! sends go through the ring.
//!
//! Invariants:
//! - what was taken counts only once the word says so, and the word changes only by
//!   compare-and-swap: bytes read after a withdrawal are thrown away, so a send that returned never
//!   lets anybody see what its buffer holds later;
//! - an offer stands in the ring behind the bytes sent before it, and nothing is sent behind it
//!   until it is done or withdrawn: the order of the stream is the ring's;
//! - only a send that may block offers, and it waits for progress no longer than [`PATIENCE`] where
//!   nobody is at it, and in all no longer than [`LONGEST_STAND`];
//! - a reader takes from a process of its own user and its own process namespace only, and from
//!   nowhere else than what its own kernel lets it read;
//! - an offer does not outlive the program whose memory it names ([`leaving`]);
//! - a peer has the reader take nothing that the peer could not read itself: of its own memory a reader
//!   takes only what this process offers at this moment ([`crate::open_offers`]), and of others' nothing
//!   where the kernel lets a process read its own children alone ([`reads_others`]).

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::kernel::{self, Errno};
use crate::open_offers::{self, Key};
use crate::receive::{narrow, room};
use crate::ring::{Consumer, Corrupt, OFFER_WORDS};
use crate::table;
use crate::wait::Budget;

/// Least bytes of a send that are offered, unless [`LEAST_VARIABLE`] says otherwise.
pub const DEFAULT_LEAST: usize = 256 << 10;
/// Most: what no cache of one processor holds, two that copy at the same time move faster.
pub const MOST: usize = 1 << 20;
/// Variable with the least bytes of a send that are offered, 65536 or more; 0: none are.
pub const LEAST_VARIABLE: &str = "BEELINE_SOCKETS_OFFER";
/// A reader with less room than this, and less than what is left, has them through the ring: each
/// taking is a system call.
pub const LEAST_TAKEN: usize = 64 << 10;
/// How long an offer waits without progress.
const PATIENCE: Duration = Duration::from_micros(200);
/// How long an offer stands: its reader may be stopped in the middle of it, or take next to nothing each time.
const LONGEST_STAND: Duration = Duration::from_secs(1);
/// Sends that are not offered after one that nobody took, at most.
const LONGEST_PAUSE: u32 = 256;

/// What an offer's word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Withdrawn,
    Open,
    Busy,
    Done,
}

/// The word of an offer: 24 bits number, 38 bits taken, 2 bits state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    number: u64,
    taken: u64,
    state: State,
}

const NUMBERS: u64 = 1 << 24;
/// Longest offer that is believed, bytes.
const LONGEST: usize = 1 << 30;

impl Word {
    fn encode(self) -> u64 {
        let state = match self.state {
            State::Withdrawn => 0,
            State::Open => 1,
            State::Busy => 2,
            State::Done => 3,
        };
        (self.number % NUMBERS) << 40 | (self.taken & ((1 << 38) - 1)) << 2 | state
    }

    fn decode(word: u64) -> Self {
        let state = match word & 3 {
            0 => State::Withdrawn,
            1 => State::Open,
            2 => State::Busy,
            _ => State::Done,
        };
        Self { number: word >> 40, taken: word >> 2 & ((1 << 38) - 1), state }
    }
}

/// Counts of this process.
#[derive(Debug)]
pub struct Tally {
    /// Bytes that readers took from this process.
    pub given: AtomicU64,
    /// Bytes that this process took.
    pub taken: AtomicU64,
}

/// Counts of this process.
pub static TALLY: Tally = Tally { given: AtomicU64::new(0), taken: AtomicU64::new(0) };

/// What a connection knows of offers.
#[derive(Debug, Default)]
pub struct Knowledge {
    /// Large sends left that are not offered, and how many it were after the last vain offer.
    pause: AtomicU32,
    longest_pause: AtomicU32,
    /// The process that was last found to be one of this user's; 0 for none.
    known: AtomicU32,
}

/// Least bytes of a send that are offered.
fn least() -> usize {
    static LEAST: OnceLock<usize> = OnceLock::new();
    *LEAST.get_or_init(|| {
        let given = std::env::var(LEAST_VARIABLE).ok().and_then(|text| text.parse().ok());
        match given {
            Some(0) => usize::MAX,
            Some(least) => least,
            None => DEFAULT_LEAST,
        }
    })
}

/// The process namespace, as a number: what another process's number means.
fn namespace() -> u64 {
    static NAMESPACE: OnceLock<u64> = OnceLock::new();
    *NAMESPACE.get_or_init(|| rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino))
}

/// Whether this process takes from others' memory: where the kernel lets it read its own children alone
/// (`ptrace_scope`), a peer that is none of theirs could have it read what the peer itself may not.
#[must_use]
pub fn reads_others() -> bool {
    static OTHERS: OnceLock<bool> = OnceLock::new();
    *OTHERS.get_or_init(|| match std::fs::read("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(text) => text.trim_ascii() == b"0",
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    })
}

/// What the offer `words` on `connection` is known by in the process that makes it.
fn key(connection: &Connection, words: [u64; OFFER_WORDS]) -> Key {
    let [address, length, number, ..] = words;
    Key { segment: connection.segment.file(), address, length, number }
}

/// Whether this end takes what is offered: what it says in its sign.
#[must_use]
pub fn takes_offers() -> bool {
    namespace() != 0
}

/// True when a send of `length` bytes that may block is worth an offer.
#[inline]
#[must_use]
pub fn is_worth_it(connection: &Connection, length: usize) -> bool {
    (LEAST_TAKEN..=MOST).contains(&length) && is_worth_it_by_history(connection, length)
}

#[cold]
fn is_worth_it_by_history(connection: &Connection, length: usize) -> bool {
    let willing = connection.segment.other().signs.takes_offers.load(Ordering::Relaxed) != 0;
    if length < least() || !willing || connection.between_hosts().is_some() || namespace() == 0 {
        return false;
    }
    let pause = connection.offers.pause.load(Ordering::Relaxed);
    connection.offers.pause.store(pause.saturating_sub(1), Ordering::Relaxed);
    pause == 0
}

/// Offers `length` bytes at `bytes` and waits while they are taken; says how many were. The rest is
/// the caller's to send. The caller holds the sending half.
///
/// Errors: [`Corrupt`].
pub fn make(
    fd: RawFd,
    connection: &Connection,
    bytes: *const u8,
    length: usize,
) -> Result<usize, Corrupt> {
    let word = &connection.segment.own().offer.word;
    let number = Word::decode(word.load(Ordering::Relaxed)).number.wrapping_add(1) % NUMBERS;
    let offer =
        [bytes.addr() as u64, length as u64, number, u64::from(std::process::id()), namespace()];
    let Some(_opened) = open_offers::open(key(connection, offer)) else { return Ok(0) };
    // The message's Release makes it known before the reader can ask. Stored, then looked at who leaves: see
    // `leaving`.
    word.store(Word { number, taken: 0, state: State::Open }.encode(), Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if LEAVING.load(Ordering::SeqCst) || !connection.segment.producer().push_offer(offer)? {
        withdraw(word, number);
        return Ok(0);
    }
    connection.wake(fd, &connection.segment.other().signs.receive_armed);
    let begun = Instant::now();
    let (mut seen, mut since, mut alone, mut asleep) = (0, begun, true, None);
    let taken = loop {
        // Acquire with the reader's Release: it has what it says.
        let mut now = Word::decode(word.load(Ordering::Acquire));
        if now.taken != seen {
            since = Instant::now();
        }
        let waited = since.elapsed();
        let is_long = waited > PATIENCE;
        let gone = connection.is_over()
            || connection.segment.other().signs.closed.load(Ordering::Relaxed) != 0;
        if gone || is_long && now.state == State::Open || begun.elapsed() > LONGEST_STAND {
            now = withdraw(word, number);
        }
        if now.number != number || now.taken > length as u64 || now.taken < seen {
            return Err(Corrupt);
        }
        seen = now.taken;
        if matches!(now.state, State::Withdrawn | State::Done) {
            break seen;
        }
        if is_long {
            // Another thread may close it meanwhile, and this one may not be back for longer than a call takes.
            asleep.get_or_insert_with(|| connection.sleepers.enter());
        }
        alone &= !Budget::pass(waited);
    };
    // Where the two share a processor, each offer costs two switches.
    learn(&connection.offers, if alone { taken } else { 0 });
    TALLY.given.fetch_add(taken, Ordering::Relaxed);
    #[expect(clippy::cast_possible_truncation, reason = "at most the length")]
    let taken = taken as usize;
    Ok(taken)
}

/// A thread is about to replace this program, while others may offer.
static LEAVING: AtomicBool = AtomicBool::new(false);

/// Before `exec`: other threads' offers name memory that will be another program's, under the same process
/// number. So those that stand are withdrawn, and none is made until [`stayed`]. This stores, then looks at the
/// words; who offers stores the word, then looks here: at least one of the two sees the other.
pub fn leaving() {
    LEAVING.store(true, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    table::each(|_, connection| {
        let word = &connection.segment.own().offer.word;
        let number = Word::decode(word.load(Ordering::SeqCst)).number;
        withdraw(word, number);
    });
}

/// This program is about to be replaced.
pub(crate) fn is_leaving() -> bool {
    LEAVING.load(Ordering::SeqCst)
}

/// The program was not replaced.
pub fn stayed() {
    LEAVING.store(false, Ordering::SeqCst);
}

/// Takes the offer back, whoever is at it: what was read of it since is thrown away. What the word says then,
/// or said already.
fn withdraw(word: &AtomicU64, number: u64) -> Word {
    let mut seen = word.load(Ordering::Acquire);
    loop {
        let now = Word::decode(seen);
        if now.number != number || !matches!(now.state, State::Open | State::Busy) {
            return now;
        }
        let next = Word { state: State::Withdrawn, ..now };
        match word.compare_exchange(seen, next.encode(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return next,
            Err(changed) => seen = changed,
        }
    }
}

/// After an offer: one that nobody took was time lost, and the next ones are not made.
fn learn(offers: &Knowledge, taken: u64) {
    let before = offers.longest_pause.load(Ordering::Relaxed);
    let next = if taken > 0 { 0 } else { (before * 2).clamp(1, LONGEST_PAUSE) };
    offers.longest_pause.store(next, Ordering::Relaxed);
    offers.pause.store(next, Ordering::Relaxed);
}

/// What a reader found at the head of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// So many bytes were taken.
    Bytes(usize),
    /// The offer is over: look behind it.
    Over,
}

/// An offer at the head of the incoming ring, with the words of both ends.
struct Offer<'a> {
    connection: &'a Connection,
    address: usize,
    length: u64,
    number: u64,
    process: u32,
}

/// Takes from the offer `words` at the head of `consumer` into the program's `pieces` after `skip`
/// bytes; with `peek` it stays. The caller holds the receiving half.
///
/// Errors: [`Corrupt`].
///
/// # Safety
///
/// As [`crate::receive::receive`].
pub unsafe fn take(
    connection: &Connection,
    consumer: &Consumer<'_>,
    words: [u64; OFFER_WORDS],
    pieces: &[libc::iovec],
    skip: usize,
    peek: bool,
) -> Result<Taken, Corrupt> {
    let [address, length, number, process, from] = words;
    let (Ok(address), Ok(process)) = (usize::try_from(address), u32::try_from(process)) else {
        return Err(Corrupt);
    };
    if connection.between_hosts().is_some() || length > LONGEST as u64 || number >= NUMBERS {
        return Err(Corrupt);
    }
    let offer = Offer { connection, address, length, number, process };
    let allowed = if offer.process == std::process::id() {
        open_offers::is_open(key(connection, words))
    } else {
        reads_others() && offer.is_of_this_user()
    };
    let sane = from == namespace() && allowed;
    // SAFETY: the caller's contract.
    let taken = unsafe { offer.take(pieces, if peek { 0 } else { skip }, peek, sane) }?;
    match taken {
        Some((bytes, all)) => {
            if all && !peek {
                consumer.pass_offer();
            }
            TALLY.taken.fetch_add(bytes as u64, Ordering::Relaxed);
            Ok(Taken::Bytes(bytes))
        }
        None => {
            consumer.pass_offer();
            Ok(Taken::Over)
        }
    }
}

impl Offer<'_> {
    fn word(&self) -> &AtomicU64 {
        &self.connection.segment.other().offer.word
    }

    /// True when the process that offers belongs to this user: another one's memory is nothing
    /// that a peer can point us to, even where we may read it.
    fn is_of_this_user(&self) -> bool {
        let known = &self.connection.offers.known;
        if known.load(Ordering::Relaxed) == self.process {
            return true;
        }
        let path = format!("/proc/{}", self.process);
        let uid = rustix::fs::stat(path).map(|stat| stat.st_uid);
        let same = uid == Ok(rustix::process::geteuid().as_raw());
        if same {
            known.store(self.process, Ordering::Relaxed);
        }
        same
    }

    /// Bytes taken, and whether nothing is left; `None` when the offer is over.
    unsafe fn take(
        &self,
        pieces: &[libc::iovec],
        skip: usize,
        peek: bool,
        sane: bool,
    ) -> Result<Option<(usize, bool)>, Corrupt> {
        let word = self.word();
        // Acquire with the sender's Release of the message, and with a predecessor's of the word.
        let seen = word.load(Ordering::Acquire);
        let now = Word::decode(seen);
        if now.number != self.number || !matches!(now.state, State::Open | State::Busy) {
            return Ok(None);
        }
        let Some(left) = self.length.checked_sub(now.taken) else { return Err(Corrupt) };
        let left = usize::try_from(left).map_err(|_| Corrupt)?;
        let space = room(pieces).saturating_sub(skip);
        if !sane {
            // Never here: the sender need not try again.
            self.connection.segment.own().signs.takes_offers.store(0, Ordering::Relaxed);
        }
        if !sane || space < left.min(LEAST_TAKEN) {
            withdraw(word, self.number);
            return Ok(None);
        }
        // Busy already: by a predecessor that died in the middle of it.
        let busy = Word { state: State::Busy, ..now }.encode();
        if word.compare_exchange(seen, busy, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Ok(None);
        }
        let mut rest = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];
        let count = narrow(pieces, skip, left, &mut rest);
        let most = room(&rest[..count]);
        #[expect(clippy::cast_possible_truncation, reason = "x86-64 and aarch64 have 64 bits")]
        let place = self.address.wrapping_add(now.taken as usize);
        // That memory may be what another program answers for: nobody knows how long this takes.
        let _asleep = self.connection.sleepers.enter();
        // SAFETY: the pieces are the program's to be written, by contract; the kernel checks both.
        let read = unsafe { kernel::read_process(self.process, place, most, &rest[..count]) };
        let bytes = match read {
            Ok(bytes) if bytes > 0 => bytes,
            Err(Errno(libc::EPERM | libc::ENOSYS)) => {
                // As above.
                self.connection.segment.own().signs.takes_offers.store(0, Ordering::Relaxed);
                withdraw(word, self.number);
                return Ok(None);
            }
            _ => {
                // A buffer of either side is not there: the ring finds out whose.
                withdraw(word, self.number);
                return Ok(None);
            }
        };
        let counted = if peek { now.taken } else { now.taken + bytes as u64 };
        let all = counted == self.length;
        let state = if all { State::Done } else { State::Open };
        let next = Word { taken: counted, state, ..now }.encode();
        // Release with the sender's Acquire: its buffer is its own again.
        if word.compare_exchange(busy, next, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // Withdrawn meanwhile: the same bytes come through the ring.
            return Ok(None);
        }
        Ok(Some((bytes, all)))
    }
}

/// Bytes that can be taken of the offer `words` at the head of the ring.
#[must_use]
pub fn left(connection: &Connection, words: [u64; OFFER_WORDS]) -> usize {
    let now = Word::decode(connection.segment.other().offer.word.load(Ordering::Acquire));
    let stands = matches!(now.state, State::Open | State::Busy) && now.number == words[2];
    let left = if stands { words[1].saturating_sub(now.taken) } else { 0 };
    usize::try_from(left).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_comes_back_as_it_was() {
        for state in [State::Withdrawn, State::Open, State::Busy, State::Done] {
            let word = Word { number: NUMBERS - 1, taken: LONGEST as u64, state };
            assert_eq!(Word::decode(word.encode()), word);
        }
    }

    #[test]
    fn what_was_withdrawn_stays_withdrawn_and_keeps_what_was_taken() {
        let open = Word { number: 5, taken: 9, state: State::Open };
        let word = AtomicU64::new(open.encode());
        withdraw(&word, 4);
        assert_eq!(Word::decode(word.load(Ordering::Relaxed)), open);
        withdraw(&word, 5);
        let now = Word::decode(word.load(Ordering::Relaxed));
        assert_eq!(now, Word { state: State::Withdrawn, ..open });
        let done = Word { state: State::Done, ..open };
        word.store(done.encode(), Ordering::Relaxed);
        withdraw(&word, 5);
        assert_eq!(Word::decode(word.load(Ordering::Relaxed)), done);
    }

    #[test]
    fn vain_offers_become_rare_and_one_that_was_taken_makes_up_for_them() {
        let offers = Knowledge::default();
        let pause = || offers.pause.load(Ordering::Relaxed);
        let pauses: Vec<_> = (0..10)
            .map(|_| {
                learn(&offers, 0);
                pause()
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 256]);
        learn(&offers, 1);
        assert_eq!(pause(), 0);
    }
}
