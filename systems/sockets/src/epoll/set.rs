//! What a set knows of its entries, and which of them a wait has to look at.
//!
//! An entry is *hot* when a wait looks at its rings, and *cold* when it need not: its connection
//! is armed and had nothing to report after the fence, so whoever makes it ready rings, and the
//! kernel reports it. A wait therefore costs by the hot entries and the kernel's news, however
//! many idle connections the set holds.
//!
//! Invariant: an entry is cold only if no news can come without the kernel's report or a
//! [`stir`]. What this process itself changes about a connection (a doorbell swallowed elsewhere,
//! a `shutdown`) is told by [`stir`].

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ONESHOT;
use super::places::{Place, Places};
use crate::connection::Connection;
use crate::table;

/// Connections stirred since a set last looked that it is told one by one; of more, it looks at
/// all.
const STIRS: usize = 256;

static STIRRED: [AtomicU64; STIRS] = [const { AtomicU64::new(0) }; STIRS];
static COUNT: AtomicU64 = AtomicU64::new(0);

/// This process changed something about `fd` that no doorbell will tell of.
pub fn stir(fd: RawFd) {
    let turn = COUNT.fetch_add(1, Ordering::SeqCst);
    #[expect(clippy::cast_possible_truncation, reason = "below the length of the list")]
    let place = (turn % STIRS as u64) as usize;
    let number = u64::from(u32::try_from(fd).unwrap_or(u32::MAX));
    // Release with the Acquire in `take_stirred`; the upper half tells whose turn it is.
    STIRRED[place].store((turn + 1) << 32 | number, Ordering::Release);
}

#[derive(Debug)]
pub struct Entry {
    pub fd: RawFd,
    pub wanted: u32,
    pub data: u64,
    /// As the kernel has it.
    pub kernel_mask: u32,
    /// The connection that has it counted among its watchers, by its number; 0: none.
    pub counted: u64,
    pub silent: bool,
    /// A set: asked for what is due in it, instead of a ring.
    pub is_set: bool,
    /// Edge-triggered: report what there is, once, as after a fresh registration.
    pub fresh: bool,
    pub seen_tail: u64,
    pub seen_ends: u32,
    /// Place in the answer of the wait under way, and which wait that is.
    pub answered: (u64, usize),
    /// Looks in a row that found nothing.
    pub vain: u32,
    /// The wait that last looked at it.
    pub looked: u64,
    /// On a board: who sends notes it there, and the entry need not be hot.
    pub noted: Option<Place>,
    /// The other end's program, once asked; see [`Places::give`].
    pub program: u64,
    /// The program took it out of the set, and the kernel still has it: the connection's number,
    /// see [`Inner::retire`].
    retired: Option<u64>,
    /// Place among the hot ones.
    hot: Option<usize>,
}

impl Entry {
    /// A fresh registration.
    pub fn new(
        fd: RawFd,
        wanted: libc::epoll_event,
        kernel_mask: u32,
        counted: u64,
        is_set: bool,
    ) -> Self {
        Self {
            fd,
            wanted: wanted.events,
            data: wanted.u64,
            kernel_mask,
            counted,
            silent: false,
            is_set,
            fresh: true,
            seen_tail: 0,
            seen_ends: 0,
            answered: (0, 0),
            vain: 0,
            looked: 0,
            noted: None,
            program: 0,
            retired: None,
            hot: None,
        }
    }
}

impl Entry {
    /// The kernel reports each of its bells: a one-shot entry's that has spoken it does not, and a sender
    /// rings once for all entries.
    pub fn can_be_noted(&self) -> bool {
        self.wanted & ONESHOT == 0
    }
}

/// Looks in vain before an entry is armed on its own and let go when its set sleeps: a set that sleeps
/// between its waits looks two or three times for each, which costs a tenth of the doorbell it saves.
pub const QUIET_LOOKS: u32 = 32;

/// No entry of this descriptor.
const NOWHERE: u32 = u32::MAX;

/// Entries of one set.
#[derive(Debug, Default)]
pub struct Inner {
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    /// Of each descriptor, where its entry is.
    places: Vec<u32>,
    count: usize,
    retired: usize,
    hot: Vec<usize>,
    /// Places of entries on boards.
    pub places_noted: Places,
    /// Where the next look begins, so that nobody starves behind a full answer.
    pub turn: usize,
    pub waits: u64,
    seen_stirs: u64,
    /// It came with a `fork`, and this process has not waited on it yet.
    pub is_parents: bool,
    /// What other sets and their sleepers are to be told of, once this one's lock is let go.
    pub kicks: Vec<RawFd>,
    /// Kept for its memory.
    noted: Vec<usize>,
}

impl Inner {
    /// Entries, and what the kernel has of the retired.
    pub fn len_with_retired(&self) -> usize {
        self.count + self.retired
    }

    fn place(&self, fd: RawFd) -> Option<usize> {
        let place = *self.places.get(usize::try_from(fd).ok()?)?;
        if place == NOWHERE { None } else { usize::try_from(place).ok() }
    }

    fn set_place(&mut self, fd: RawFd, place: u32) {
        let Ok(index) = usize::try_from(fd) else { return };
        if index >= self.places.len() {
            self.places.resize(index + 1, NOWHERE);
        }
        self.places[index] = place;
    }

    pub fn contains(&self, fd: RawFd) -> bool {
        self.place(fd)
            .and_then(|place| self.entries.get(place)?.as_ref())
            .is_some_and(|entry| entry.retired.is_none())
    }

    pub fn entry(&mut self, fd: RawFd) -> Option<&mut Entry> {
        let place = self.place(fd)?;
        self.entries.get_mut(place)?.as_mut().filter(|entry| entry.retired.is_none())
    }

    pub fn each(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.entries.iter_mut().flatten().filter(|entry| entry.retired.is_none())
    }

    /// Adds an entry, or replaces the one of the same descriptor. It is hot; a new one until the
    /// next sleep, unless there is news of it by then.
    pub fn insert(&mut self, entry: Entry) {
        let fd = entry.fd;
        if let Some(place) = self.place(fd)
            && let Some(Some(old)) = self.entries.get_mut(place)
            && old.retired.is_none()
        {
            let (hot, noted, program) = (old.hot, old.noted, old.program);
            *old = Entry { hot, noted, program, ..entry };
            if !old.can_be_noted() {
                self.places_noted.leave(old);
            }
            self.heat(fd);
            return;
        }
        if self.len_with_retired() == 0 {
            // What was stirred before there was anything here is not news.
            self.seen_stirs = COUNT.load(Ordering::SeqCst);
        }
        self.count += 1;
        if let Some(place) = self.place(fd) {
            self.retired -= 1;
            self.entries[place] = Some(entry);
            self.heat(fd);
            return;
        }
        let entry = Some(Entry { vain: QUIET_LOOKS, ..entry });
        let place = if let Some(place) = self.free.pop() {
            self.entries[place] = entry;
            place
        } else {
            self.entries.push(entry);
            self.entries.len() - 1
        };
        self.set_place(fd, u32::try_from(place).unwrap_or(NOWHERE));
        self.make_hot(place);
    }

    pub fn remove(&mut self, fd: RawFd) -> Option<Entry> {
        if !self.contains(fd) {
            return None;
        }
        let place = self.place(fd)?;
        self.cool(place);
        self.leave_board(place);
        self.set_place(fd, NOWHERE);
        self.free.push(place);
        self.count -= 1;
        self.entries.get_mut(place)?.take()
    }

    /// The program took `fd` out of the set; the kernel keeps it until it reports it, or until it
    /// is closed or shared: programs take a connection out of a set and put it in again with every
    /// message. `connection` is the connection's number.
    pub fn retire(&mut self, fd: RawFd, connection: u64) {
        let Some(place) = self.place(fd).filter(|_| self.contains(fd)) else { return };
        self.cool(place);
        self.leave_board(place);
        if let Some(Some(entry)) = self.entries.get_mut(place) {
            entry.retired = Some(connection);
            entry.counted = 0;
            self.count -= 1;
            self.retired += 1;
        }
    }

    /// What the kernel was asked to report of a retired `fd`, if it is still this connection.
    pub fn retired(&self, fd: RawFd, connection: u64) -> Option<u32> {
        let entry = self.entries.get(self.place(fd)?)?.as_ref()?;
        (entry.retired == Some(connection)).then_some(entry.kernel_mask)
    }

    /// Forgets a retired `fd`: true when there was one, which the kernel has still.
    pub fn forget_retired(&mut self, fd: RawFd) -> bool {
        let Some(place) = self.place(fd).filter(|_| !self.contains(fd)) else { return false };
        self.set_place(fd, NOWHERE);
        self.entries[place] = None;
        self.free.push(place);
        self.retired -= 1;
        true
    }

    /// Every retired descriptor.
    pub fn all_retired(&self) -> Vec<RawFd> {
        let retired = self.entries.iter().flatten().filter(|entry| entry.retired.is_some());
        retired.map(|entry| entry.fd).collect()
    }

    /// The next waits look at `fd`.
    pub fn heat(&mut self, fd: RawFd) {
        let Some(place) = self.place(fd).filter(|_| self.contains(fd)) else { return };
        if let Some(Some(entry)) = self.entries.get_mut(place) {
            (entry.vain, entry.looked) = (0, 0);
        }
        self.make_hot(place);
    }

    fn make_hot(&mut self, place: usize) {
        let at = self.hot.len();
        if let Some(Some(entry)) = self.entries.get_mut(place)
            && entry.hot.is_none()
        {
            entry.hot = Some(at);
            self.hot.push(place);
        }
    }

    /// The next waits look at everything.
    pub fn heat_all(&mut self) {
        let all: Vec<RawFd> = self.each().map(|entry| entry.fd).collect();
        all.into_iter().for_each(|fd| self.heat(fd));
    }

    /// The next waits do not look at `fd`.
    pub fn cool_one(&mut self, fd: RawFd) {
        if let Some(place) = self.place(fd) {
            self.cool(place);
        }
    }

    /// The next waits do not look at the entry of this place.
    fn cool(&mut self, place: usize) {
        let Some(Some(entry)) = self.entries.get_mut(place) else { return };
        let Some(at) = entry.hot.take() else { return };
        self.hot.swap_remove(at);
        if let Some(&moved) = self.hot.get(at)
            && let Some(Some(entry)) = self.entries.get_mut(moved)
        {
            entry.hot = Some(at);
        }
    }

    /// Hot entries.
    pub fn hot(&self) -> usize {
        self.hot.len()
    }

    /// The hot entry `turn` places after the first, counted round.
    pub fn hot_entry(&mut self, turn: usize) -> Option<&mut Entry> {
        let place = *self.hot.get(turn.checked_rem(self.hot.len())?)?;
        self.entries.get_mut(place)?.as_mut()
    }

    /// Cools the hot entries that `settled` says can be.
    pub fn cool_if(&mut self, mut settled: impl FnMut(&mut Entry) -> bool) {
        let mut at = self.hot.len();
        // From the last on: one that is taken out moves only one that was already asked about.
        while at > 0 {
            at -= 1;
            let Some(&place) = self.hot.get(at) else { continue };
            let Some(Some(entry)) = self.entries.get_mut(place) else { continue };
            if settled(entry) {
                self.cool(place);
            }
        }
    }

    /// The entry of this place is to have none on a board: it leaves the set, whose bells it would take
    /// along. Before the kernel's set lets it go.
    fn leave_board(&mut self, place: usize) {
        let Some(Some(entry)) = self.entries.get_mut(place) else { return };
        self.places_noted.leave(entry);
    }

    /// As when every entry leaves.
    pub fn leave_boards(&mut self) {
        let Self { entries, places_noted, .. } = self;
        places_noted.end(entries.iter_mut().flatten());
    }

    /// A place on a board for the `turn`th hot entry, which is `connection`'s: what it is to be armed with.
    pub fn place_for(&mut self, turn: usize, connection: &'static Connection) -> Option<u64> {
        let place = *self.hot.get(turn.checked_rem(self.hot.len())?)?;
        let many = self.count;
        let entry = self.entries.get_mut(place)?.as_mut()?;
        self.places_noted.give(place, entry, connection, many)
    }

    /// The `turn`th hot entry has a place no more, and is armed by the caller otherwise.
    pub fn displace(&mut self, turn: usize) {
        let Some(&place) = turn.checked_rem(self.hot.len()).and_then(|turn| self.hot.get(turn))
        else {
            return;
        };
        if let Some(Some(entry)) = self.entries.get_mut(place) {
            self.places_noted.leave_board(entry);
        }
    }

    /// `fd` leads to another connection by now.
    pub fn renew(&mut self, fd: RawFd) {
        if let Some(place) = self.place(fd) {
            self.leave_board(place);
        }
    }

    /// Heats what senders noted. True when there was any.
    pub fn take_noted(&mut self) -> bool {
        if self.places_noted.is_empty() {
            return false;
        }
        let mut noted = std::mem::take(&mut self.noted);
        self.places_noted.take(&mut noted);
        let any = !noted.is_empty();
        for place in noted.drain(..) {
            let Some(Some(entry)) = self.entries.get_mut(place) else { continue };
            if entry.retired.is_none() && entry.noted.is_some() {
                (entry.vain, entry.looked) = (0, 0);
                self.make_hot(place);
            }
        }
        self.noted = noted;
        any
    }

    /// Lets go of the entries that `settled` says can be, of those with a place on a board. Where that is
    /// over they are armed otherwise first.
    pub fn cool_noted(&mut self, mut settled: impl FnMut(&Entry) -> bool) {
        if !self.places_noted.is_empty() {
            let over = self.places_noted.over();
            let keeps = |entry: &Entry| entry.noted.is_some_and(|place| !place.is_on(over));
            self.cool_if(|entry| keeps(entry) && settled(entry));
        }
    }

    /// Heats what was stirred since the last time.
    pub fn take_stirred(&mut self) {
        let now = COUNT.load(Ordering::SeqCst);
        if now == self.seen_stirs {
            return;
        }
        let mut all = now.wrapping_sub(self.seen_stirs) > STIRS as u64;
        for turn in self.seen_stirs..now {
            if all {
                break;
            }
            #[expect(clippy::cast_possible_truncation, reason = "below the length of the list")]
            let place = (turn % STIRS as u64) as usize;
            // Acquire with the Release in `stir`.
            let word = STIRRED[place].load(Ordering::Acquire);
            let fd = RawFd::try_from(word & u64::from(u32::MAX)).unwrap_or(-1);
            // Not written yet, or written over; or known here by another number.
            all = word >> 32 != (turn + 1) & u64::from(u32::MAX)
                || !self.contains(fd) && is_copied(fd);
            self.heat(fd);
        }
        if all {
            self.heat_all();
        }
        self.seen_stirs = now;
    }
}

fn is_copied(fd: RawFd) -> bool {
    let copies = |connection: &Connection| connection.references.load(Ordering::Relaxed) > 1;
    table::ours(fd).is_some_and(copies)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(fd: RawFd) -> Entry {
        Entry::new(fd, libc::epoll_event { events: 1, u64: 0 }, 1, 0, false)
    }

    fn hot(inner: &mut Inner) -> Vec<RawFd> {
        let count = inner.hot();
        let mut all: Vec<RawFd> =
            (0..count).filter_map(|turn| Some(inner.hot_entry(turn)?.fd)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn only_what_is_hot_is_looked_at_and_a_stir_makes_it_hot() {
        let mut inner = Inner::default();
        (10..20).for_each(|fd| inner.insert(entry(fd)));
        assert_eq!(inner.hot(), 10);
        inner.cool_if(|entry| entry.fd % 3 != 0);
        assert_eq!(hot(&mut inner), [12, 15, 18]);
        inner.remove(15);
        inner.insert(entry(30));
        assert_eq!(hot(&mut inner), [12, 18, 30]);
        inner.take_stirred();
        stir(13);
        inner.take_stirred();
        assert_eq!(hot(&mut inner), [12, 13, 18, 30]);
        assert!(inner.remove(15).is_none() && inner.remove(30).is_some());
        (0..STIRS + 1).for_each(|_| stir(13));
        inner.take_stirred();
        assert_eq!(inner.hot(), inner.count);
    }

    #[test]
    fn what_is_retired_is_in_no_set_and_comes_back_as_the_same_connection_only() {
        let mut inner = Inner::default();
        (10..13).for_each(|fd| inner.insert(entry(fd)));
        inner.retire(11, 7);
        assert!(!inner.contains(11) && inner.entry(11).is_none() && inner.remove(11).is_none());
        assert_eq!((inner.count, inner.len_with_retired()), (2, 3));
        assert_eq!(hot(&mut inner), [10, 12]);
        inner.heat_all();
        inner.heat(11);
        assert_eq!(hot(&mut inner), [10, 12]);
        assert_eq!((inner.retired(11, 8), inner.retired(11, 7)), (None, Some(1)));
        inner.insert(entry(11));
        assert_eq!((inner.count, inner.len_with_retired()), (3, 3));
        assert_eq!((hot(&mut inner), inner.retired(11, 7)), (vec![10, 11, 12], None));
        inner.retire(12, 9);
        assert_eq!(inner.all_retired(), [12]);
        assert!(inner.forget_retired(12) && !inner.forget_retired(12));
        inner.insert(entry(40));
        assert_eq!((inner.count, inner.len_with_retired()), (3, 3));
    }
}
