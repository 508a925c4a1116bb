//! Memory of the table itself: an entry of a tiny object is larger than the object, and an object
//! that is on disk keeps its entry.
//!
//! Invariants: entries take at most half of the limit, but for objects that clients put into reserves
//! they have still to give back; what they take beyond a sixteenth is not given to new segments of clients. The
//! store's own segments may have it: what is on disk comes back however many entries there are.

use super::core::{Core, Shortage};
use super::memory::Place;
use super::table;

/// Bytes of an entry: its slot, and its places in the index and in the order of use.
pub(super) const ENTRY: u64 = 256;

/// Share of the limit that entries may take.
const MOST_SHARE: u64 = 2;
/// Share of the limit that entries take beside the segments.
const FREE_SHARE: u64 = 16;

const _: () = assert!(table::SLOT_BYTES + 80 <= ENTRY as usize, "an entry is counted whole");

impl Core {
    /// Bytes of all entries.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.table.held() as u64 * ENTRY
    }

    /// Whether so few objects are here that clients may put many more without asking for each.
    pub(super) fn has_many_entries(&self) -> bool {
        self.table_bytes() <= self.memory.limit() / (2 * MOST_SHARE)
    }

    /// Makes room for an entry: where nothing is spilled, the least recently used object goes. False
    /// where none can.
    pub(super) fn make_entry(&mut self) -> bool {
        while self.table_bytes() + ENTRY > self.memory.limit() / MOST_SHARE {
            // On disk an object would keep its entry.
            let oldest = self.table.oldest().next().filter(|_| self.spill_limit == 0);
            match oldest {
                Some(slot) => self.evict(slot),
                None => {
                    self.call_in();
                    return false;
                }
            }
        }
        true
    }

    /// Memory for a new object of `bytes` that `writer` may write.
    pub(super) fn allocate_new(&mut self, writer: u32, bytes: u64) -> Result<Place, Shortage> {
        if self.make_entry() { self.allocate(writer, bytes) } else { Err(Shortage::Now) }
    }

    /// Bytes of entries that segments of clients may not have.
    pub(super) fn charge_entries(&mut self) {
        let free = self.memory.limit() / FREE_SHARE;
        self.memory.charge(self.table_bytes().saturating_sub(free));
    }
}
