//! What a shard answers when another one asks: see [`crate::peers`].

use std::sync::Arc;

use crate::Version;
use crate::entry::ALIGNMENT;
use crate::index::{Location, Slot};
use crate::peers::Peer;
use crate::segments::SegmentState;
use crate::shard::log::Appended;
use crate::shard::{Shard, read_header};
use crate::stats;

impl Peer for Shard {
    fn commit_for_peer(&mut self) -> bool {
        self.batch.is_none() && self.commit().is_ok()
    }

    fn is_persisted(&mut self, segment: &Arc<SegmentState>, offset: u32, commit: bool) -> bool {
        let pending = self.poisoned || self.log.is_pending(segment, offset);
        !pending || (commit && self.commit_for_peer())
    }

    fn slot_at(&self, namespace: u32, hash: u64, place: Location) -> Option<Slot> {
        let index = self.spaces.get(namespace)?;
        let id = index.find(hash, |slot| slot.location.same_place(place))?;
        Some(*index.slot(id))
    }

    fn newest_place_of(&self, namespace: u32, hash: u64) -> Option<Location> {
        let index = self.spaces.get(namespace)?;
        Some(index.slot(index.find_only(hash)?).location)
    }

    fn newest_version_of(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
        place: Location,
    ) -> Option<Version> {
        let id = self.find(namespace, hash, key)?;
        let location = self.spaces.get(namespace)?.slot(id).location;
        // What a client can overwrite is no witness, except against itself.
        if !location.is_readable()
            || (location.has(Location::UNTRUSTED) && !location.same_place(place))
        {
            return None;
        }
        let state = self.cache.get(&self.store.table, location.segment());
        Some(read_header(state, location.offset()).version)
    }

    fn repoint(&mut self, namespace: u32, hash: u64, place: Location, to: Option<Appended>) {
        let Some(index) = self.spaces.get(namespace) else { return };
        let Some(id) = index.find(hash, |slot| slot.location.same_place(place)) else { return };
        self.change_slot(namespace, id, |slot| match to {
            Some(to) => {
                slot.location = slot.location.moved_to(to.location);
                // A client's slot may have been longer than its entry; the copy's is not.
                slot.units = to.slot_bytes / ALIGNMENT;
                // The original stays on media until its segment is freed.
                slot.add_stale();
            }
            None => slot.location = Location(slot.location.0 | Location::DROPPED),
        });
    }

    fn lose_slots(&mut self, segment: &SegmentState) {
        for namespace in self.spaces.numbers() {
            let Some(index) = self.spaces.get(namespace) else { continue };
            let mut hit = Vec::new();
            for page in 0..index.pages() {
                hit.extend(
                    index
                        .page(page)
                        .filter(|slot| {
                            slot.location.is_readable() && slot.location.segment() == segment.id
                        })
                        .copied(),
                );
            }
            for slot in hit {
                let Some(index) = self.spaces.get(namespace) else { continue };
                let same = |known: &Slot| known.location.same_place(slot.location);
                let Some(id) = index.find(slot.hash, same) else { continue };
                stats::add(&self.counters().damaged, 1);
                self.change_slot(namespace, id, |slot| {
                    slot.location = Location(slot.location.0 | Location::LOST);
                    if segment.by_run {
                        // Its run is on record, and counts until the segment is freed.
                        slot.add_stale();
                    }
                });
                self.drop_if_hollow(namespace, id);
            }
        }
    }
}
