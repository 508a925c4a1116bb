//! What one shard asks of another, and how it reaches it.
//!
//! Any log may hold the entry of any key, so the collector and the recycler of one shard need what another
//! one knows: whether it persisted an entry, and where its keys' newest entries lie. They ask for that alone,
//! through [`Peer`]; the store knows its shards no further.
//!
//! A shard asks while it is locked itself. So it never waits for another one: what is busy is asked again
//! later, and no order of locks is needed.

use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};

use crate::Version;
use crate::index::{Location, Slot};
use crate::segments::SegmentState;
use crate::shard::log::Appended;

/// A shard as others see it.
pub(crate) trait Peer: Send {
    /// Persists everything it stored; false where it cannot: a batch is open, or it failed.
    fn commit_for_peer(&mut self) -> bool;

    /// True when an entry of its log is persisted; where `commit`, it sees to that if it can. One that failed
    /// to persist says nothing about its last entries.
    fn is_persisted(&mut self, segment: &Arc<SegmentState>, offset: u32, commit: bool) -> bool;

    /// The slot of this hash that points at `place`.
    fn slot_at(&self, namespace: u32, hash: u64, place: Location) -> Option<Slot>;

    /// Where the newest entry of the only key with this hash lies; `None` where it cannot be told.
    fn newest_place_of(&self, namespace: u32, hash: u64) -> Option<Location>;

    /// Version of the newest entry of a key, unless that cannot be told.
    fn newest_version_of(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
        place: Location,
    ) -> Option<Version>;

    /// Points the slot at the copy; without one, marks it to go with the segment.
    fn repoint(&mut self, namespace: u32, hash: u64, place: Location, to: Option<Appended>);

    /// Marks every readable slot in `segment` as lost.
    fn lose_slots(&mut self, segment: &SegmentState);
}

/// Why a shard was not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Away {
    /// It is no more: it may have failed to persist its last entries.
    Gone,
    /// Another thread holds it.
    Busy,
}

/// The shards of a store, by index. They own the store, so it does not own them.
#[derive(Default)]
pub(crate) struct Peers(Mutex<Vec<Weak<Mutex<dyn Peer>>>>);

impl std::fmt::Debug for Peers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Peers")
    }
}

impl Peers {
    /// Says which shards there are.
    pub fn set(&self, shards: impl Iterator<Item = Weak<Mutex<dyn Peer>>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = shards.collect();
    }

    /// Asks a shard, unless another thread holds it.
    pub fn ask<R>(&self, shard: usize, ask: impl FnOnce(&mut dyn Peer) -> R) -> Result<R, Away> {
        let peer = {
            let peers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            peers.get(shard).and_then(Weak::upgrade).ok_or(Away::Gone)?
        };
        let mut peer = match peer.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Away::Busy),
        };
        Ok(ask(&mut *peer))
    }

    /// Has a shard persist everything it stored, unless another thread holds it; whether it did.
    pub fn commit(&self, shard: usize) -> bool {
        self.ask(shard, |peer| peer.commit_for_peer()).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts what it is asked.
    #[derive(Default)]
    struct Counting(u32);

    impl Peer for Counting {
        fn commit_for_peer(&mut self) -> bool {
            self.0 += 1;
            self.0 < 3
        }
        fn is_persisted(&mut self, _: &Arc<SegmentState>, _: u32, _: bool) -> bool {
            false
        }
        fn slot_at(&self, _: u32, _: u64, _: Location) -> Option<Slot> {
            None
        }
        fn newest_place_of(&self, _: u32, _: u64) -> Option<Location> {
            None
        }
        fn newest_version_of(&mut self, _: u32, _: u64, _: &[u8], _: Location) -> Option<Version> {
            None
        }
        fn repoint(&mut self, _: u32, _: u64, _: Location, _: Option<Appended>) {}
        fn lose_slots(&mut self, _: &SegmentState) {}
    }

    #[test]
    fn a_shard_that_is_busy_or_gone_is_not_waited_for() {
        let peers = Peers::default();
        let shard: Arc<Mutex<dyn Peer>> = Arc::new(Mutex::new(Counting::default()));
        peers.set([Arc::downgrade(&shard)].into_iter());
        assert!(peers.commit(0));
        let held = shard.lock().unwrap();
        assert_eq!(peers.ask(0, |_| ()), Err(Away::Busy));
        assert!(!peers.commit(0));
        drop(held);
        assert!(peers.commit(0) && !peers.commit(0), "its own answer counts");
        assert_eq!(peers.ask(1, |_| ()), Err(Away::Gone));
        drop(shard);
        assert_eq!(peers.ask(0, |_| ()), Err(Away::Gone));
        assert!(!peers.commit(0));
    }
}
