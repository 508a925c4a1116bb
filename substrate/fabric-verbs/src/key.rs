//! Remote keys: 64 bits that hold all a peer needs to reach a region.
//!
//! ```text
//!  63      41  40   39 38  37    32  31            0
//!  [ random ][read][media][in page][ device's rkey ]
//! ```
//!
//! A region is registered at an address of our choosing (`iova`), which the key holds: the random
//! bits are its upper part, the place of the first byte in its page (in units of 64) its lower
//! one. So offsets stay offsets, the device itself checks 23 bits that nobody can guess on top of
//! its own key, and a key is practically never valid twice.
//!
//! The `media` and `read` bits tell the peer how the memory survives a loss of power and whether
//! it may read there, for its flushes. A peer that changes them fools nobody but itself.

use beeline_fabric::{Access, RemoteAddress, RemoteKey};
use beeline_os::Persistence;

/// Longest region, bytes: offsets below it cannot carry into the random bits.
pub(crate) const MAX_REGION_BYTES: u64 = 1 << 38;
const RANDOM_BITS: u32 = 23;
const IOVA_SHIFT: u32 = 38;
const PAGE_UNIT: u64 = 64;

/// A key, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) rkey: u32,
    /// Below 64.
    pub(crate) in_page: u8,
    pub(crate) persistence: Persistence,
    pub(crate) readable: bool,
    /// 23 bits.
    pub(crate) random: u32,
}

impl Key {
    /// A key for memory at `base`; the device's part is still to come.
    pub(crate) fn new(base: usize, persistence: Persistence, access: Access, random: u32) -> Self {
        let random = random & ((1 << RANDOM_BITS) - 1);
        Self {
            rkey: 0,
            // Below 64: a page has 64 units.
            in_page: (base % 4096 / PAGE_UNIT as usize) as u8,
            persistence,
            readable: access.contains(Access::REMOTE_READ),
            // Zero is left out: address 0 then lies in no region.
            random: random.max(1),
        }
    }

    /// The address that the region is registered at.
    pub(crate) fn iova(self) -> u64 {
        (u64::from(self.random) << IOVA_SHIFT) | (u64::from(self.in_page) * PAGE_UNIT)
    }

    pub(crate) fn encode(self) -> RemoteKey {
        let media = match self.persistence {
            Persistence::Volatile => 0_u64,
            Persistence::CacheLine => 1,
            Persistence::File => 2,
        };
        RemoteKey(
            u64::from(self.random) << 41
                | u64::from(self.readable) << 40
                | media << 38
                | u64::from(self.in_page) << 32
                | u64::from(self.rkey),
        )
    }

    /// Takes any 64 bits apart: they come from a peer, and what they name is for its device to
    /// judge.
    pub(crate) fn decode(key: RemoteKey) -> Self {
        Self {
            rkey: key.0 as u32,
            in_page: (key.0 >> 32 & 63) as u8,
            persistence: match key.0 >> 38 & 3 {
                1 => Persistence::CacheLine,
                2 => Persistence::File,
                _ => Persistence::Volatile,
            },
            readable: key.0 >> 40 & 1 == 1,
            random: (key.0 >> 41) as u32,
        }
    }
}

/// Where a request goes, in the device's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) rkey: u32,
    pub(crate) address: u64,
}

/// The device's terms for `length` bytes at `remote`. A range that no region can hold is sent to
/// an address that no region has, so that the peer's device refuses it like any other bad one.
pub(crate) fn target(remote: RemoteAddress, length: u64) -> Target {
    let key = Key::decode(remote.key);
    let fits = remote.offset.checked_add(length).is_some_and(|end| end <= MAX_REGION_BYTES);
    let address = if fits { key.iova() + remote.offset } else { 0 };
    Target { rkey: key.rkey, address }
}

/// What peers are told of memory, which decides what they make of a persistent flush: that it
/// survives by itself only where the user `vouched` for the way from the network card to it.
pub(crate) fn told(persistence: Persistence, vouched: bool) -> Persistence {
    match persistence {
        Persistence::CacheLine if !vouched => Persistence::Volatile,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durable_memory_is_told_as_durable_only_where_the_user_vouched_for_the_way_to_it() {
        assert_eq!(told(Persistence::CacheLine, false), Persistence::Volatile);
        assert_eq!(told(Persistence::CacheLine, true), Persistence::CacheLine);
        assert_eq!(told(Persistence::File, true), Persistence::File);
        assert_eq!(told(Persistence::Volatile, true), Persistence::Volatile);
    }

    proptest! {
        #[test]
        fn keys_come_back_as_they_went(
            rkey in any::<u32>(), base in 0..1_usize << 40, random in any::<u32>(),
            media in 0..3, readable in any::<bool>(),
        ) {
            let persistence =
                [Persistence::Volatile, Persistence::CacheLine, Persistence::File][media as usize];
            let access = if readable { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
            let base = base / 64 * 64;
            let mut key = Key::new(base, persistence, access, random);
            key.rkey = rkey;
            prop_assert_eq!(Key::decode(key.encode()), key);
            prop_assert_eq!(key.iova() % 4096, base as u64 % 4096);
            prop_assert!(key.iova() < 1 << 62);
        }

        #[test]
        fn no_offset_reaches_another_region(
            key in any::<u64>(), offset in any::<u64>(), length in any::<u64>(),
        ) {
            let remote = RemoteAddress { key: RemoteKey(key), offset };
            let own = Key::decode(RemoteKey(key)).iova();
            let reached = target(remote, length);
            let inside = reached.address >= own
                && reached.address.checked_add(length).is_some_and(|end| end <= own + MAX_REGION_BYTES);
            prop_assert!(inside || reached.address == 0);
        }
    }
}
