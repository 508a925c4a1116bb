//! The newest entry of a key: putting one in its index slot, and the sums that follow it.
//!
//! Invariant: a slot's bytes are in the sums of the segment it points into, of its index and of
//! the shard exactly while it stands in the index; whoever changes a slot does it here. A slot that
//! moves is counted where it goes to before it is taken out where it came from.

use crate::entry;
use crate::fault::{self, KnownBug};
use crate::field::FieldName;
use crate::index::{Location, Slot, SlotId};
use crate::rows::{fields_of, generation_of, is_fields};
use crate::shard::Shard;
use crate::shard::log::Appended;
use crate::stats;

/// The generation of the row that counts a key, if it is that of a field.
#[inline]
fn counted_as(namespace: u32, key: &[u8]) -> Option<u64> {
    if is_fields(namespace) { generation_of(key) } else { None }
}

impl Shard {
    /// Makes `appended` the newest entry of its key, whose index this shard holds. True where it is a value
    /// and the key was not there; of a key with a place in an order, where it has come into that.
    pub(crate) fn install(
        &mut self,
        namespace: u32,
        hash: u64,
        key: &[u8],
        appended: &Appended,
    ) -> bool {
        let found = self.find(namespace, hash, key);
        let index = self.spaces.get(namespace);
        let before = found.and_then(|id| index.map(|index| *index.slot(id)));
        if let Some(before) = before
            && self.spaces.has_extra()
            && namespace < u32::from(crate::DATABASES)
        {
            self.note_row(namespace, before, appended.location, key);
        }
        let held = before.is_some_and(|slot| !slot.location.is_absent());
        self.install_found(namespace, hash, found, appended);
        let came = !held && !appended.location.is_absent();
        if namespace < crate::INDEXES as u32 {
            return came;
        }
        if self.spaces.extra(namespace).is_some_and(|extra| extra.rows.is_some()) {
            self.count_in_row(namespace, key, before, !appended.location.is_absent());
        }
        self.note_order(namespace, key, appended, held).unwrap_or(came)
    }

    /// As [`Shard::install`], of the value of a field whose slot is known.
    pub(crate) fn install_field(
        &mut self,
        field: &FieldName<'_>,
        place: u64,
        (stored, found): (&[u8], Option<(SlotId, Location)>),
        appended: &Appended,
    ) -> bool {
        let namespace = fields_of(field.database);
        let held = found.is_some_and(|(_, before)| !before.is_absent());
        self.install_found(namespace, place, found.map(|(id, _)| id), appended);
        if !held {
            return self.note_order(namespace, stored, appended, false).unwrap_or(true);
        }
        // It is in the order.
        if let Some(extra) = self.spaces.extra_mut(namespace) {
            extra.counted.changed(field.generation, appended.version);
        }
        false
    }

    /// Takes a key without an entry out of the order.
    pub(crate) fn forget_order(&mut self, namespace: u32, key: &[u8]) {
        let Some(extra) = self.spaces.extra_mut(namespace) else { return };
        if extra.ordered.as_mut().is_some_and(|ordered| ordered.remove(key))
            && let Some(generation) = counted_as(namespace, key)
        {
            extra.counted.left(generation, 0);
        }
    }

    /// Keeps the order of an ordered namespace: a key is in it while its newest entry is a value. Where
    /// one was `held` already, it is in the order. Rows' fields are counted as they come and go. Whether the
    /// key came; `None` where there is no order.
    fn note_order(
        &mut self,
        namespace: u32,
        key: &[u8],
        appended: &Appended,
        held: bool,
    ) -> Option<bool> {
        let extra = self.spaces.extra_mut(namespace)?;
        let ordered = extra.ordered.as_mut()?;
        let absent = appended.location.is_absent();
        let moved = match (absent, held) {
            (true, _) => ordered.remove(key),
            (false, true) => false,
            (false, false) => ordered.insert(key),
        };
        if let Some(generation) = counted_as(namespace, key) {
            match (moved, absent) {
                (true, true) => extra.counted.left(generation, appended.version),
                (true, false) => extra.counted.came(generation, appended.version),
                (false, false) => extra.counted.changed(generation, appended.version),
                // Deleted once more.
                (false, true) => {}
            }
        }
        Some(moved && !absent)
    }

    /// As [`Shard::install`] where the slot is known.
    #[inline]
    pub(crate) fn install_found(
        &mut self,
        namespace: u32,
        hash: u64,
        found: Option<SlotId>,
        appended: &Appended,
    ) {
        let follows = found.is_some_and(|id| self.follows(namespace, id, appended));
        self.install_at(namespace, hash, found, appended, !follows);
    }

    /// True when the entry just appended goes on a run: the newest entry of its key lies in the
    /// same head. Takes back its record then.
    fn follows(&mut self, namespace: u32, id: SlotId, appended: &Appended) -> bool {
        let Some(index) = self.spaces.get(namespace) else { return false };
        let newest = index.slot(id).location;
        if !newest.is_readable() || newest.segment() != appended.location.segment() {
            return false;
        }
        let [data, _, appends] = &mut self.log.heads;
        let mut heads = data.iter_mut().chain(appends.iter_mut());
        let head = heads.find(|head| head.state.id == newest.segment());
        let Some(roster) = head.and_then(|head| head.roster.as_mut()) else { return false };
        let record = roster.pop();
        assert!(
            record.is_some_and(|record| record.1 == index.slot(id).hash),
            "the entry appended last has the last record"
        );
        self.note_follower();
        true
    }

    /// As [`Shard::install_found`]. `leaves_stale` is false when the new entry took the place of
    /// an older one that was counted, or counts as one with it.
    pub(crate) fn install_at(
        &mut self,
        namespace: u32,
        hash: u64,
        found: Option<SlotId>,
        appended: &Appended,
        leaves_stale: bool,
    ) {
        self.known_row.forget(hash);
        let second = self.use_second;
        let index = self.spaces.get_or_insert(namespace);
        let fresh = Slot {
            hash,
            location: appended.location,
            units: appended.slot_bytes / entry::ALIGNMENT,
            stale: 0,
            last_use: second,
        };
        let Some(id) = found else {
            index.insert(fresh);
            self.count(namespace, &fresh);
            return;
        };
        let slot = index.slot_mut(id);
        let before = *slot;
        let mut after = Slot { stale: before.stale, ..fresh };
        if leaves_stale
            && !before.location.has(Location::LOST)
            && !fault::is_on(KnownBug::ForgetStale)
        {
            after.add_stale();
        }
        *slot = after;
        if before.is_needed() {
            self.collector.garbage_made += before.slot_bytes();
        }
        if before.location.is_plain() && after.location.is_plain() {
            self.replace(namespace, &before, &after);
        } else {
            self.count(namespace, &after);
            self.uncount(namespace, &before);
        }
        self.note_superseding(&before, &after);
    }

    /// The sums, where a key without an expiry got another value without one.
    #[inline]
    fn replace(&mut self, namespace: u32, before: &Slot, after: &Slot) {
        let difference = after.slot_bytes().wrapping_sub(before.slot_bytes());
        if difference != 0
            && let Some(index) = self.spaces.get_mut(namespace)
        {
            index.add_live_bytes(self.index, difference);
            stats::add(&self.store.counters[self.index].live_bytes, difference);
        }
        if before.location.segment() != after.location.segment() {
            self.count_place(after);
            self.uncount_place(before);
        } else if difference != 0 {
            let state = self.cache.get(&self.store.table, after.location.segment());
            state.add_live(difference);
        }
    }

    /// Notes where what superseded an entry lies: it has to be persisted before the entry goes.
    #[inline]
    fn note_superseding(&mut self, before: &Slot, after: &Slot) {
        let (from, to) = (before.location.segment(), after.location.segment());
        if self.store.shards() > 1 && from != to && before.location.is_readable() {
            let owner = self.cache.get(&self.store.table, to).owner;
            self.cache.get(&self.store.table, from).supersede(owner);
        }
    }

    /// Adds a slot to the sums of the segment it points into.
    #[inline]
    pub(crate) fn count_place(&mut self, slot: &Slot) {
        if !slot.location.is_readable() {
            return;
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        if slot.is_needed() {
            state.add_live(slot.slot_bytes());
        } else {
            state.change_hollow(1);
        }
    }

    /// The opposite of [`Shard::count_place`]. A slot that moves is counted first where it goes
    /// to, so that no segment looks dead in between.
    #[inline]
    pub(crate) fn uncount_place(&mut self, slot: &Slot) {
        if !slot.location.is_readable() {
            return;
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        if !slot.is_needed() {
            state.change_hollow(-1);
        } else if !state.remove_live(slot.slot_bytes()) {
            return;
        }
        self.recycler.look |= state.owner as usize == self.index;
    }

    /// Adds a slot to the sums it takes part in.
    fn count(&mut self, namespace: u32, slot: &Slot) {
        self.count_place(slot);
        let Some(index) = self.spaces.get_mut(namespace) else { return };
        let counters = &self.store.counters[self.index];
        if !slot.location.is_absent() {
            index.live += 1;
            index.add_live_bytes(self.index, slot.slot_bytes());
            let databases = &self.store.database_counters[self.index];
            stats::add(&counters.keys, 1);
            if let Some(count) = databases.keys.get(namespace as usize) {
                stats::add(count, 1);
            }
            stats::add(&counters.live_bytes, slot.slot_bytes());
            if slot.location.has(Location::EXPIRES) {
                index.expiring += 1;
                stats::add(&counters.expiring_keys, 1);
                if let Some(count) = databases.expiring.get(namespace as usize) {
                    stats::add(count, 1);
                }
            }
        }
    }

    /// Takes a slot out of the sums; the opposite of [`Shard::count`].
    fn uncount(&mut self, namespace: u32, slot: &Slot) {
        self.uncount_place(slot);
        let Some(index) = self.spaces.get_mut(namespace) else { return };
        let counters = &self.store.counters[self.index];
        if !slot.location.is_absent() {
            index.live -= 1;
            index.add_live_bytes(self.index, slot.slot_bytes().wrapping_neg());
            let databases = &self.store.database_counters[self.index];
            stats::add(&counters.keys, 1_u64.wrapping_neg());
            if let Some(count) = databases.keys.get(namespace as usize) {
                stats::add(count, 1_u64.wrapping_neg());
            }
            stats::add(&counters.live_bytes, slot.slot_bytes().wrapping_neg());
            if slot.location.has(Location::EXPIRES) {
                index.expiring -= 1;
                stats::add(&counters.expiring_keys, 1_u64.wrapping_neg());
                if let Some(count) = databases.expiring.get(namespace as usize) {
                    stats::add(count, 1_u64.wrapping_neg());
                }
            }
        }
    }

    /// Changes a slot and keeps the sums right.
    pub(crate) fn change_slot(
        &mut self,
        namespace: u32,
        id: SlotId,
        change: impl FnOnce(&mut Slot),
    ) {
        let Some(index) = self.spaces.get_mut(namespace) else { return };
        let before = *index.slot(id);
        change(index.slot_mut(id));
        let after = *index.slot(id);
        self.count(namespace, &after);
        self.uncount(namespace, &before);
    }
}
