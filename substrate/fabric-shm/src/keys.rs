//! Remote keys a queue pair has opened: a small open-addressed table, private to its thread.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use beeline_fabric::Access;
use beeline_os::{Mapping, Persistence};

use crate::link::OpenedKey;

/// What is known about a key.
#[derive(Debug)]
pub(crate) enum KeyState {
    /// Asked for.
    Pending,
    /// The peer refused it.
    Refused,
    /// Mapped.
    Open(RemoteRegion),
}

/// A peer's region, mapped.
#[derive(Debug)]
pub(crate) struct RemoteRegion {
    pub base: NonNull<u8>,
    pub length: u64,
    pub access: Access,
    pub persistence: Persistence,
    mapping: Mapping,
}

impl RemoteRegion {
    /// The descriptor to flush; kept for file regions only.
    pub(crate) fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.mapping.descriptor()
    }
}

impl From<OpenedKey> for RemoteRegion {
    fn from(opened: OpenedKey) -> Self {
        let OpenedKey { mapping, access, persistence } = opened;
        let (base, length) = (mapping.base(), mapping.length_bytes() as u64);
        Self { base, length, access, persistence, mapping }
    }
}

/// The table. Keys are random, so their low bits serve as hash.
#[derive(Debug, Default)]
pub(crate) struct KeyTable {
    /// A power of two of places, at most half of them taken; or none.
    places: Vec<Option<(u64, KeyState)>>,
    taken: usize,
}

impl KeyTable {
    #[expect(clippy::cast_possible_truncation, reason = "any bits of the key will do")]
    #[inline(always)]
    fn place(&self, key: u64) -> usize {
        let mask = self.places.len() - 1;
        let mut place = key as usize & mask;
        while self.places[place].as_ref().is_some_and(|(found, _)| *found != key) {
            place = (place + 1) & mask;
        }
        place
    }

    #[inline(always)]
    pub(crate) fn find(&self, key: u64) -> Option<&KeyState> {
        if self.places.is_empty() {
            return None;
        }
        self.places[self.place(key)].as_ref().map(|(_, state)| state)
    }

    /// Sets what is known about `key`. Allocates; a control step.
    pub(crate) fn set(&mut self, key: u64, state: KeyState) {
        if (self.taken + 1) * 2 > self.places.len() {
            let bigger = (self.places.len() * 2).max(8);
            let old = std::mem::take(&mut self.places);
            self.places.resize_with(bigger, || None);
            for (key, state) in old.into_iter().flatten() {
                let place = self.place(key);
                self.places[place] = Some((key, state));
            }
        }
        let place = self.place(key);
        if self.places[place].is_none() {
            self.taken += 1;
        }
        self.places[place] = Some((key, state));
    }

    /// Forgets, and unmaps, everything.
    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.taken = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_with_equal_low_bits_are_told_apart() {
        let mut table = KeyTable::default();
        assert!(table.find(5).is_none());
        for key in 0..50_u64 {
            table.set(key << 32, if key % 2 == 0 { KeyState::Pending } else { KeyState::Refused });
        }
        for key in 0..50_u64 {
            let found = table.find(key << 32).unwrap();
            assert_eq!(matches!(found, KeyState::Pending), key % 2 == 0);
        }
        assert!(table.find(50 << 32).is_none());
        table.clear();
        assert!(table.find(0).is_none());
    }
}
