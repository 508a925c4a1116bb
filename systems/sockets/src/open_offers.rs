//! Offers that this process has open: all that it lets itself take from its own memory.
//!
//! Both ends of a connection may lie in one process, and then a reader takes from its own memory. A peer that
//! names the reader's own process would so be sent what the reader never sent: an echo server would hand
//! out whatever stands at an address of the peer's choice. So an offer of the own process is believed only
//! if a thread of it made just that one: the same segment, by its file, which no peer can choose, the same
//! place and length, and at this moment.
//!
//! A few places, without a lock, since a `fork` may come at any time: an offer that finds none is not made.
//! A child of a `fork` has none of its parent's ([`forget`]).
//!
//! Invariant: a place is written by whoever brought its stamp from free to filling, and read between two
//! loads of one stamp that says open; the stamp counts, so that nothing is read half and half.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Offers at a time.
const PLACES: usize = 64;
/// The lower bits of a stamp.
const FREE: u64 = 0;
const FILLING: u64 = 1;
const OPEN: u64 = 2;
const STATES: u64 = 4;

/// What an offer is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// File of its segment; never 0.
    pub segment: u64,
    pub address: u64,
    pub length: u64,
    pub number: u64,
}

impl Key {
    fn words(self) -> [u64; 4] {
        [self.segment, self.address, self.length, self.number]
    }
}

#[derive(Debug)]
struct Place {
    stamp: AtomicU64,
    key: [AtomicU64; 4],
}

#[expect(clippy::declare_interior_mutable_const, reason = "the beginning of each place")]
const EMPTY: Place = Place { stamp: AtomicU64::new(FREE), key: [const { AtomicU64::new(0) }; 4] };
static ALL: [Place; PLACES] = [EMPTY; PLACES];

/// An offer of this process that is open; its end closes it.
#[derive(Debug)]
pub(crate) struct Opened {
    place: &'static Place,
    stamp: u64,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Not after a `fork` in between: the child's places are free already.
        let free = self.stamp.wrapping_add(STATES) & !(STATES - 1);
        let _ = self.place.stamp.compare_exchange(
            self.stamp,
            free,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }
}

/// From now on the offer is this process's, if there is a place for it and its segment is known.
pub(crate) fn open(key: Key) -> Option<Opened> {
    if key.segment == 0 {
        return None;
    }
    for place in &ALL {
        let before = place.stamp.load(Ordering::Relaxed);
        let filling = before + FILLING;
        if before % STATES != FREE
            // Acquire with the Release of who had the place before.
            || place
                .stamp
                .compare_exchange(before, filling, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
        {
            continue;
        }
        // With the readers' fence: who reads a word stored below sees the stamp above.
        fence(Ordering::Release);
        for (word, value) in place.key.iter().zip(key.words()) {
            word.store(value, Ordering::Relaxed);
        }
        let stamp = before + OPEN;
        // Release with the Acquire in `is_open`.
        place.stamp.store(stamp, Ordering::Release);
        return Some(Opened { place, stamp });
    }
    None
}

/// True while a thread of this process has just that offer open.
pub(crate) fn is_open(key: Key) -> bool {
    key.segment != 0
        && ALL.iter().any(|place| {
            let stamp = place.stamp.load(Ordering::Acquire);
            let same = stamp % STATES == OPEN
                && place.key.iter().zip(key.words()).all(|(w, v)| w.load(Ordering::Relaxed) == v);
            // With the writer's fence.
            fence(Ordering::Acquire);
            same && place.stamp.load(Ordering::Relaxed) == stamp
        })
}

/// In the child of a `fork`: what its parent's threads offer is not the child's.
pub(crate) fn forget() {
    for place in &ALL {
        let stamp = place.stamp.load(Ordering::Relaxed);
        place.stamp.store(stamp.wrapping_add(STATES) & !(STATES - 1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_open_from_its_beginning_to_its_end_and_no_other_is() {
        let key = Key { segment: 77, address: 4096, length: 9, number: 1 };
        assert!(!is_open(key));
        let opened = open(key).unwrap();
        assert!(is_open(key));
        assert!(!is_open(Key { segment: 78, ..key }));
        assert!(!is_open(Key { address: 4095, ..key }));
        assert!(!is_open(Key { length: 10, ..key }));
        assert!(!is_open(Key { number: 2, ..key }));
        drop(opened);
        assert!(!is_open(key));
        let unknown = Key { segment: 0, ..key };
        assert!(open(unknown).is_none() && !is_open(unknown));
        // As many as there are places, none beyond them, and none of them in a child.
        let many: Vec<_> =
            (0..PLACES as u64).map(|number| open(Key { number, ..key }).unwrap()).collect();
        assert!(open(key).is_none());
        forget();
        assert!(!is_open(Key { number: 0, ..key }));
        let fresh = open(key).unwrap();
        drop(many);
        assert!(is_open(key), "what ends later leaves the place to its next owner");
        drop(fresh);
    }
}
