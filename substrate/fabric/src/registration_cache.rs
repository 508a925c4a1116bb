//! Registrations kept for reuse.
//!
//! Registering memory with a network card pins its pages and costs from tens of microseconds to
//! milliseconds; a program that sends from buffers of its own asks for the same ones again and
//! again. The cache keeps their regions, and the memory alive with them, so that an address is
//! never found for memory that is gone.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_os::memory::MemoryObject;

use crate::{Access, FabricError, MemoryRegion, ProtectionDomain};

#[derive(Debug)]
struct Entry {
    region: MemoryRegion,
    /// When it was last asked for.
    used: u64,
}

#[derive(Debug, Default)]
struct Entries {
    all: Vec<Entry>,
    bytes: u64,
    tick: u64,
    hits: u64,
    misses: u64,
}

/// Regions by their memory, the least recently used given up beyond a bound.
///
/// A control object: it may block while it registers. Lookups are linear: it is for tens of
/// buffers, not thousands.
#[derive(Debug)]
pub struct RegistrationCache {
    domain: Arc<dyn ProtectionDomain>,
    capacity_bytes: u64,
    entries: Mutex<Entries>,
}

/// How often a cache helped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Regions found.
    pub hits: u64,
    /// Regions registered.
    pub misses: u64,
    /// Bytes registered now.
    pub bytes: u64,
}

impl RegistrationCache {
    /// A cache of at most `capacity_bytes` registered bytes in `domain`; a single larger object is
    /// kept alone.
    #[must_use]
    pub fn new(domain: Arc<dyn ProtectionDomain>, capacity_bytes: u64) -> Self {
        Self { domain, capacity_bytes, entries: Mutex::default() }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The region of `memory` with at least these rights: a known one, or a new one.
    ///
    /// When the device or the process can register no more, everything cached is given up and the
    /// registration tried once more.
    ///
    /// Errors: those of [`ProtectionDomain::register`].
    pub fn region(
        &self,
        memory: &Arc<dyn MemoryObject>,
        access: Access,
    ) -> Result<MemoryRegion, FabricError> {
        let mut entries = self.entries();
        entries.tick += 1;
        let tick = entries.tick;
        let known = entries.all.iter_mut().find(|entry| {
            std::ptr::addr_eq(Arc::as_ptr(entry.region.memory()), Arc::as_ptr(memory))
                && entry.region.access().contains(access)
                && !entry.region.is_revoked()
        });
        if let Some(entry) = known {
            entry.used = tick;
            let region = entry.region.clone();
            entries.hits += 1;
            return Ok(region);
        }
        entries.misses += 1;
        let length = memory.length_bytes() as u64;
        while !entries.all.is_empty() && entries.bytes + length > self.capacity_bytes {
            Self::give_up_oldest(&mut entries);
        }
        let region = match self.domain.register(Arc::clone(memory), access) {
            Err(FabricError::Limit { .. } | FabricError::System { .. })
                if !entries.all.is_empty() =>
            {
                while !entries.all.is_empty() {
                    Self::give_up_oldest(&mut entries);
                }
                self.domain.register(Arc::clone(memory), access)?
            }
            outcome => outcome?,
        };
        entries.bytes += length;
        entries.all.push(Entry { region: region.clone(), used: tick });
        Ok(region)
    }

    fn give_up_oldest(entries: &mut Entries) {
        let oldest = entries.all.iter().enumerate().min_by_key(|(_, entry)| entry.used);
        if let Some(index) = oldest.map(|(index, _)| index) {
            let entry = entries.all.swap_remove(index);
            // Whoever still holds the region keeps it; the cache does not.
            entries.bytes -= entry.region.length_bytes();
        }
    }

    /// Gives up the regions of `memory`; returns whether there were any.
    pub fn forget(&self, memory: &Arc<dyn MemoryObject>) -> bool {
        let mut entries = self.entries();
        let before = entries.all.len();
        entries.all.retain(|entry| {
            !std::ptr::addr_eq(Arc::as_ptr(entry.region.memory()), Arc::as_ptr(memory))
        });
        entries.bytes = entries.all.iter().map(|entry| entry.region.length_bytes()).sum();
        entries.all.len() < before
    }

    /// What it did so far.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        let entries = self.entries();
        CacheCounts { hits: entries.hits, misses: entries.misses, bytes: entries.bytes }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use beeline_os::SharedMemory;

    use super::*;
    use crate::{
        CompletionQueue, LocalKey, QueuePair, QueuePairOptions, RegionControl, RemoteKey,
        SharedReceiveQueue,
    };

    /// Registers up to a number of regions at a time.
    #[derive(Debug)]
    struct Counting {
        live: Arc<AtomicU32>,
        most: u32,
    }

    #[derive(Debug)]
    struct Control(Arc<AtomicU32>);

    impl RegionControl for Control {
        fn revoke(&self, _region: &MemoryRegion) -> Result<(), FabricError> {
            Ok(())
        }

        fn deregister(&self, _local_key: LocalKey, _remote_key: RemoteKey) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    impl ProtectionDomain for Counting {
        fn register(
            &self,
            memory: Arc<dyn MemoryObject>,
            access: Access,
        ) -> Result<MemoryRegion, FabricError> {
            if self.live.load(Ordering::Relaxed) >= self.most {
                let (what, limit) = ("regions", u64::from(self.most));
                return Err(FabricError::Limit { what, requested: limit + 1, limit });
            }
            let number = self.live.fetch_add(1, Ordering::Relaxed);
            let control = Arc::new(Control(Arc::clone(&self.live)));
            let (local, remote) = (LocalKey(number), RemoteKey(number.into()));
            Ok(MemoryRegion::new(memory, access, local, remote, control))
        }

        fn create_shared_receive_queue(
            &self,
            _depth: u32,
        ) -> Result<Rc<dyn SharedReceiveQueue>, FabricError> {
            Err(FabricError::PeerGone)
        }

        fn create_queue_pair(
            &self,
            _send_queue: &Rc<dyn CompletionQueue>,
            _receive_queue: &Rc<dyn CompletionQueue>,
            _shared_receive_queue: Option<&Rc<dyn SharedReceiveQueue>>,
            _options: QueuePairOptions,
        ) -> Result<Box<dyn QueuePair>, FabricError> {
            Err(FabricError::PeerGone)
        }
    }

    fn memory() -> Arc<dyn MemoryObject> {
        Arc::new(SharedMemory::allocate("cache", 4096).unwrap())
    }

    fn cache(capacity_bytes: u64, most: u32) -> (RegistrationCache, Arc<AtomicU32>) {
        let live = Arc::new(AtomicU32::new(0));
        let domain = Arc::new(Counting { live: Arc::clone(&live), most });
        (RegistrationCache::new(domain, capacity_bytes), live)
    }

    #[test]
    fn a_buffer_is_registered_once() {
        let (cache, live) = cache(1 << 20, 100);
        let (one, other) = (memory(), memory());
        let first = cache.region(&one, Access::LOCAL_WRITE).unwrap();
        let again = cache.region(&one, Access::empty()).unwrap();
        assert_eq!(first.local_key(), again.local_key(), "more rights than asked for will do");
        cache.region(&other, Access::LOCAL_WRITE).unwrap();
        cache.region(&one, Access::REMOTE_READ).unwrap();
        let counts = cache.counts();
        assert_eq!((counts.hits, counts.misses, counts.bytes), (1, 3, 3 * 4096));
        first.revoke().unwrap();
        cache.region(&one, Access::LOCAL_WRITE).unwrap();
        assert_eq!(cache.counts().misses, 4, "a revoked region is not given out");
        drop((first, again));
        assert!(cache.forget(&one));
        assert!(!cache.forget(&one));
        assert_eq!(live.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let (cache, live) = cache(2 * 4096, 100);
        let (a, b, c) = (memory(), memory(), memory());
        for memory in [&a, &b, &a, &c] {
            cache.region(memory, Access::empty()).unwrap();
        }
        assert_eq!(live.load(Ordering::Relaxed), 2);
        cache.region(&a, Access::empty()).unwrap();
        assert_eq!(cache.counts().hits, 2, "the one asked for twice stayed");
        cache.region(&b, Access::empty()).unwrap();
        assert_eq!(cache.counts().misses, 4);
    }

    #[test]
    fn a_limit_empties_the_cache_before_it_is_an_error() {
        let (cache, live) = cache(1 << 20, 2);
        let (a, b, c) = (memory(), memory(), memory());
        cache.region(&a, Access::empty()).unwrap();
        cache.region(&b, Access::empty()).unwrap();
        let held = cache.region(&c, Access::empty()).unwrap();
        assert_eq!(live.load(Ordering::Relaxed), 1);
        let still = cache.region(&a, Access::empty()).unwrap();
        assert!(matches!(cache.region(&b, Access::empty()), Err(FabricError::Limit { .. })));
        drop((held, still));
    }
}
