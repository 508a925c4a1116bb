//! Expiries that changed since their values were stored: small entries beside large values.
//!
//! ```text
//! value   namespace 0..15, the key          as it was stored, its expiry then in its header
//! expiry  namespace 48 + database, by row   row = the key, no sub-key; value: of u64 | expires at u64
//! ```
//!
//! `of` is the version of the value that the expiry is about: beside any other value it means nothing.
//! So a value that is stored anew ends it without a write, and in whatever order a crash, a collection
//! or a snapshot leaves the two, an expiry is never taken for another value's. The slot of a value with
//! such an expiry says so ([`Location::TOUCHED`]), and whether it expires at all; others pay nothing.
//!
//! What is left beside a value that was stored anew is deleted by upkeep ([`Shard::sweep_expiries`]), and
//! only once the newer value is persisted: a crash may bring the older value back, with its expiry.
//!
//! Small values, and those that clients can write, are stored anew instead.

use crate::entry::{HEADER_BYTES, Header, KEY_LIMIT};
use crate::fault::{self, KnownBug};
use crate::index::{Location, Slot};
use crate::shard::upkeep::Swept;
use crate::shard::{EntryRef, PutOptions, Shard, read_header};
use crate::space::IN_ROWS;
use crate::{Keyspace, KvError, Store, Version};

/// Namespaces of the databases' changed expiries, before [`IN_ROWS`].
const EXPIRIES: u32 = 48;
/// Bytes of an expiry's value.
const VALUE_BYTES: usize = 16;
/// Values up to this many bytes are stored anew: their own entry is hardly longer.
const REWRITTEN_BYTES: u32 = 256;
/// Expiries deleted in one slice of upkeep.
const SLICE: usize = 256;

/// True for the namespace of a database's changed expiries, as entries have it.
#[inline]
pub(crate) fn is_expiries(namespace: u32) -> bool {
    namespace & !15 == IN_ROWS | EXPIRIES
}

/// True for a namespace that lies beside a database: of its rows' fields, or of its expiries.
#[inline]
pub(crate) fn is_beside(namespace: u32) -> bool {
    is_expiries(namespace) || crate::rows::is_fields(namespace)
}

/// The namespace of a database's changed expiries.
#[inline]
pub(crate) fn expiries_of(database: u32) -> u32 {
    IN_ROWS | EXPIRIES | database
}

/// The key of an expiry: by row, without a sub-key.
fn stored_key(key: &[u8]) -> Vec<u8> {
    let mut stored = Vec::with_capacity(2 + key.len());
    stored.extend_from_slice(&(key.len() as u16).to_be_bytes());
    stored.extend_from_slice(key);
    stored
}

/// Which version an expiry is about, and when that expires.
pub(crate) fn parse(value: &[u8]) -> Option<(Version, u64)> {
    let (of, at) = value.split_first_chunk::<8>()?;
    let at: &[u8; 8] = at.try_into().ok()?;
    Some((u64::from_le_bytes(*of), u64::from_le_bytes(*at)))
}

/// An expiry's value for a store whose versions are larger by `by`.
pub(crate) fn shifted(value: &[u8], by: Version) -> Option<[u8; VALUE_BYTES]> {
    let (of, at) = parse(value)?;
    let mut shifted = [0; VALUE_BYTES];
    shifted[..8].copy_from_slice(&of.saturating_add(by).to_le_bytes());
    shifted[8..].copy_from_slice(&at.to_le_bytes());
    Some(shifted)
}

impl Keyspace<'_> {
    /// Sets, or with 0 removes, the expiry of a key whose entry is known, by an entry of a few bytes
    /// where the value is large. The caller deals with a time in the past. A row that is evicted to make
    /// room for that stays away.
    ///
    /// Errors: as [`Keyspace::put`]. Nothing changed then.
    pub fn change_expiry(
        &mut self,
        database: u8,
        key: &[u8],
        entry: &EntryRef,
        expires_at_ms: u64,
    ) -> Result<(), KvError> {
        let options = PutOptions { kind: entry.kind, expires_at_ms };
        if entry.value_length <= REWRITTEN_BYTES
            || entry.location.has(Location::UNTRUSTED)
            || key.len() + 2 > KEY_LIMIT
        {
            let mut entry = *entry;
            if crate::rows::is_row_kind(entry.kind) && !self.home().in_batch() {
                // Making room may evict this very row. Its head must not come back then: upkeep
                // removes the fields of its generation. So the room comes first, then a look.
                self.reserve_bytes(Store::head_bytes(key.len()))?;
                let now = self.peek(database, key)?.filter(|now| now.version == entry.version);
                let Some(now) = now else {
                    self.home_mut().take_reserved();
                    return Ok(());
                };
                entry = now;
            }
            let mut value = Vec::new();
            self.read_value(&entry, &mut value)?;
            let stored = self.put(database, key, &[&value], options).map(drop);
            if !self.home().in_batch() {
                self.home_mut().take_reserved();
            }
            return stored;
        }
        let namespace = expiries_of(u32::from(database));
        let stored = stored_key(key);
        let hash = self.store().place(namespace, &stored);
        let owner = self.store().owner_of(hash);
        self.shard(owner)?.spaces.open(namespace);
        // Replicas compare what a key holds, however it came to hold it.
        let mut value = Vec::new();
        if self.effects.are_watched() {
            self.read_value(entry, &mut value)?;
        }
        let (of, at) = (entry.version.to_le_bytes(), expires_at_ms.to_le_bytes());
        self.put_at(namespace, hash.into(), &stored, &[&of, &at], PutOptions::default())?;
        self.shard(owner)?.touch(u32::from(database), entry, key, expires_at_ms);
        self.note_effect(u32::from(database), key, &[&value], options);
        Ok(())
    }
}

impl Shard {
    /// The value of `entry` has an expiry beside it now.
    fn touch(&mut self, database: u32, entry: &EntryRef, key: &[u8], expires_at_ms: u64) {
        self.note_expiry(expires_at_ms);
        let found = self.find(database, entry.hash, key).filter(|id| {
            let Some(index) = self.spaces.get(database) else { return false };
            let location = index.slot(*id).location;
            if location.is_absent() || location.has(Location::UNTRUSTED) {
                return false;
            }
            let state = self.cache.get(&self.store.table, location.segment());
            read_header(state, location.offset()).version == entry.version
        });
        match found {
            Some(id) => self.change_slot(database, id, |slot| {
                slot.location = slot.location.touched(expires_at_ms != 0);
            }),
            // It gave way to the expiry.
            None => self.ended.remember_expiry(database, key),
        }
    }

    /// The expiry of a slot's entry, and the version of the change that made it so: of the entry
    /// itself, or of what stands beside it.
    #[inline]
    pub(crate) fn expiry_of(
        &mut self,
        namespace: u32,
        slot: &Slot,
        header: &Header,
    ) -> (u64, Version) {
        if slot.location.has(Location::TOUCHED)
            && let Some(beside) = self.beside(namespace, slot, header)
        {
            return beside;
        }
        let expires = slot.location.has(Location::EXPIRES);
        (if expires { header.expires_at_ms } else { 0 }, header.version)
    }

    #[cold]
    fn beside(&mut self, database: u32, slot: &Slot, header: &Header) -> Option<(u64, Version)> {
        let state = self.cache.get(&self.store.table, slot.location.segment());
        let key_at = slot.location.offset() + HEADER_BYTES;
        let stored = stored_key(state.bytes(key_at, usize::from(header.key_length)));
        let (of, at, version) = self.read_expiry(database, &stored)?;
        (of == header.version).then_some((at, version))
    }

    /// An expiry as it stands there: which version it is about, when that expires, its own version.
    fn read_expiry(&mut self, database: u32, stored: &[u8]) -> Option<(Version, u64, Version)> {
        let namespace = expiries_of(database);
        let hash = self.store.place(namespace, stored);
        let id = self.find(namespace, hash, stored)?;
        let slot = *self.spaces.get(namespace)?.slot(id);
        self.read_expiry_in(&slot)
    }

    fn read_expiry_in(&mut self, slot: &Slot) -> Option<(Version, u64, Version)> {
        if slot.location.is_absent() || !slot.location.is_readable() {
            return None;
        }
        let state = self.cache.get(&self.store.table, slot.location.segment());
        let header = read_header(state, slot.location.offset());
        if header.used_bytes() > slot.slot_bytes() {
            return None;
        }
        let at = slot.location.offset() + HEADER_BYTES + u32::from(header.key_length);
        let (of, at) = parse(state.bytes(at, header.value_length as usize))?;
        Some((of, at, header.version))
    }

    /// Whether an expiry is about the newest value of its key, whose slot is told then.
    fn value_of(&mut self, database: u32, key: &[u8], of: Version) -> Option<crate::index::SlotId> {
        let hash = self.store.place(database, key);
        let id = self.find(database, hash, key)?;
        let location = self.spaces.get(database)?.slot(id).location;
        if location.is_absent() || !location.is_readable() || location.has(Location::UNTRUSTED) {
            return None;
        }
        let state = self.cache.get(&self.store.table, location.segment());
        let same = read_header(state, location.offset()).version == of;
        (same || fault::is_on(KnownBug::ExpiryOfAnyValue)).then_some(id)
    }

    /// Tells the slots of values that have an expiry beside them, once every entry is in its index.
    pub(crate) fn settle_expiries(&mut self) {
        for database in 0..u32::from(crate::DATABASES) {
            let Some(index) = self.spaces.get(expiries_of(database)) else { continue };
            let slots: Vec<Slot> =
                (0..index.pages()).flat_map(|page| index.page(page).copied()).collect();
            let mut stored = Vec::new();
            for slot in slots {
                let Some((of, at, _)) = self.read_expiry_in(&slot) else { continue };
                let state = self.cache.get(&self.store.table, slot.location.segment());
                crate::shard::read_key(state, &slot, &mut stored);
                let Some(key) = stored.get(2..) else { continue };
                match self.value_of(database, key, of) {
                    Some(id) => self.change_slot(database, id, |slot| {
                        slot.location = slot.location.touched(at != 0);
                    }),
                    None => self.ended.remember_expiry(database, key),
                }
            }
        }
    }

    /// What the slots of values say otherwise than the expiries beside them, a sentence each.
    pub(crate) fn misplaced_expiries(&mut self) -> Vec<String> {
        let mut findings = Vec::new();
        for database in 0..u32::from(crate::DATABASES) {
            let Some(index) = self.spaces.get(database) else { continue };
            let touched =
                |slot: &&Slot| slot.location.has(Location::TOUCHED) && !slot.location.is_absent();
            let told: Vec<Slot> = (0..index.pages())
                .flat_map(|page| index.page(page).filter(touched).copied())
                .collect();
            for slot in &told {
                let state = self.cache.get(&self.store.table, slot.location.segment());
                let header = read_header(state, slot.location.offset());
                let beside = self.beside(database, slot, &header);
                let expires = slot.location.has(Location::EXPIRES);
                if beside.is_none_or(|(at, _)| (at != 0) != expires) {
                    findings.push(format!("a slot says that it has {expires}, beside: {beside:?}"));
                }
            }
            let Some(index) = self.spaces.get(expiries_of(database)) else { continue };
            let all: Vec<Slot> =
                (0..index.pages()).flat_map(|page| index.page(page).copied()).collect();
            let (mut meant, mut stored) = (0, Vec::new());
            for slot in all {
                let Some((of, _, _)) = self.read_expiry_in(&slot) else { continue };
                let state = self.cache.get(&self.store.table, slot.location.segment());
                crate::shard::read_key(state, &slot, &mut stored);
                let key = stored.get(2..).unwrap_or_default();
                meant += usize::from(self.value_of(database, key, of).is_some());
            }
            if meant != told.len() {
                findings
                    .push(format!("{meant} values have an expiry beside, {} slots", told.len()));
            }
        }
        findings
    }

    /// Deletes some expiries beside values that were stored anew, once what made them so is persisted,
    /// in whatever log it is.
    ///
    /// Errors: [`KvError::PoolFull`] when not even the reserve has room, the pool's.
    pub(crate) fn sweep_expiries(&mut self) -> Result<Swept, KvError> {
        let nothing = self.ended.expiries.is_empty() && self.ended.expiry_sweep.is_none();
        if nothing || self.in_batch() || self.store.is_replacing() {
            return Ok(Swept::Nothing);
        }
        let mut blocked = Vec::new();
        let swept = self.sweep_ended_expiries(&mut blocked);
        let waits = !blocked.is_empty();
        // Below the others, so that the next slice begins with those.
        self.ended.expiries.splice(0..0, blocked);
        let some = swept? || (!waits && self.look_for_ended_expiries());
        let more = !self.ended.expiries.is_empty() || self.ended.expiry_sweep.is_some();
        Ok(match (some, waits) {
            (true, _) => Swept::Some,
            (false, true) => Swept::Waiting,
            (false, false) if more => Swept::Some,
            (false, false) => Swept::Nothing,
        })
    }

    /// The part of [`Shard::sweep_expiries`] about those that are remembered; those that wait for another
    /// thread go to `blocked`. True where one was deleted.
    fn sweep_ended_expiries(&mut self, blocked: &mut Vec<(u32, Vec<u8>)>) -> Result<bool, KvError> {
        let mut some = false;
        for _ in 0..SLICE {
            if blocked.len() == crate::rows::BLOCKED {
                break;
            }
            let Some((database, key)) = self.ended.expiries.pop() else { break };
            let stored = stored_key(&key);
            let Some((of, _, _)) = self.read_expiry(database, &stored) else { continue };
            if self.value_of(database, &key, of).is_some() {
                // It has another one by now.
                continue;
            }
            if !self.newest_is_persisted(database, &key, true)? {
                blocked.push((database, key));
                continue;
            }
            let namespace = expiries_of(database);
            self.waiting.muted = true;
            let appended = self.append_tombstone(namespace, &stored);
            self.waiting.muted = false;
            match appended {
                Ok(appended) => {
                    let hash = self.store.place(namespace, &stored);
                    self.install(namespace, hash, &stored, &appended);
                    some = true;
                }
                Err(error) => {
                    self.ended.expiries.push((database, key));
                    return Err(error);
                }
            }
        }
        Ok(some)
    }

    /// A slice of the sweep over all expiries, where none that ended is remembered: remembers those that
    /// ended. True when there was one under way.
    fn look_for_ended_expiries(&mut self) -> bool {
        if !self.ended.expiries.is_empty() {
            return false;
        }
        let Some((database, position)) = self.ended.expiry_sweep.take() else { return false };
        let (mut slots, mut stored, mut ended) = (Vec::new(), Vec::new(), Vec::new());
        let index = self.spaces.get(expiries_of(database));
        let next = index.and_then(|index| index.collect(position, SLICE, &mut slots));
        for slot in slots {
            let Some((of, _, _)) = self.read_expiry_in(&slot) else { continue };
            let state = self.cache.get(&self.store.table, slot.location.segment());
            crate::shard::read_key(state, &slot, &mut stored);
            let key = stored.get(2..).unwrap_or_default();
            if self.value_of(database, key, of).is_none() {
                ended.push((database, key.to_vec()));
            }
        }
        self.ended.expiries.append(&mut ended);
        let databases = u32::from(crate::DATABASES);
        self.ended.expiry_sweep = match next {
            Some(position) => Some((database, position)),
            None if database + 1 < databases => Some((database + 1, 0)),
            None => std::mem::take(&mut self.ended.expiries_again).then_some((0, 0)),
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use beeline_pmem::{Pool, PoolOptions};

    use super::*;
    use crate::rows::REMEMBERED;
    use crate::{Embedded, StoreOptions};

    #[test]
    fn expiries_that_end_between_two_turns_of_upkeep_take_bounded_memory_and_all_go() {
        const KEYS: u32 = 2 * REMEMBERED as u32 + 100;
        let pool = Pool::dram(&PoolOptions::volatile(1 << 20, 64 << 20)).unwrap();
        let options = StoreOptions { shards: 1, ..StoreOptions::default() };
        let store = Embedded::from(Store::open(pool, options).unwrap());
        let put_all = || {
            store.with_all(|keys| {
                for n in 0..KEYS {
                    let database = (n % 3) as u8;
                    keys.put(database, &n.to_be_bytes(), &[&[7; 300]], PutOptions::default())
                        .unwrap();
                }
                keys.commit().unwrap();
            });
        };
        let expiries =
            || store.with_all(|keys| (0..3).map(|at| keys.len_at(expiries_of(at))).sum::<u64>());
        put_all();
        store.with_all(|keys| {
            for n in 0..KEYS {
                assert!(keys.set_expiry((n % 3) as u8, &n.to_be_bytes(), 1 << 50).unwrap());
            }
        });
        assert_eq!(expiries(), u64::from(KEYS));
        put_all();
        store.with_all(|keys| {
            let ended = &keys.home().ended;
            assert_eq!(ended.expiries.len(), REMEMBERED);
            assert!(ended.expiry_sweep.is_some() && ended.expiries_again);
        });
        while store.maintain().unwrap() {
            store.with_all(|keys| assert!(keys.home().ended.expiries.len() <= REMEMBERED + SLICE));
        }
        assert_eq!(expiries(), 0);
    }
}
