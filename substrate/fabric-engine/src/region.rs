//! The regions of a device, and the guard that makes revocation sharp.
//!
//! Whoever lets bytes of a peer into a region, the application's thread or the library's, holds a
//! [`UseGuard`] for one bounded copy (one non-blocking receive or one small copy). Revocation
//! stores the flag, then waits until no guard is left. Both sides are sequentially consistent, so
//! one of them sees the other: a guard taken after the flag is refused, and one taken before is
//! waited for. A large write takes a guard per piece and is cut off between two pieces.
//!
//! A [`Storing`] besides keeps the memory in its place for the copy: what this process's own receives
//! and reads bring is not lost when a provider moves the memory away from a peer.
//!
//! A *grant* tells a peer where memory lies that it can write by itself. Grants are of objects, since
//! it is objects that move: one lock orders all of a device, so that a place is told only while the
//! object lies there, and taking one region back moves its object away from the peers of every other
//! region over it, whose writes go through the peer from then on.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use beeline_fabric::{Access, FabricError, LocalKey, MemoryRegion, RegionControl, RemoteKey};
use beeline_os::memory::{MemoryObject, contains};
use beeline_os::moving::{self, Storing, Tie};

use crate::persist::{Job, Persister};

/// What the device knows of one region.
#[derive(Debug)]
pub(crate) struct Entry {
    memory: Arc<dyn MemoryObject>,
    access: Access,
    /// Protection domain it belongs to.
    pub(crate) domain: u64,
    /// Peers may not reach it any more; local requests that are outstanding still finish.
    closed: AtomicBool,
    /// Copies under way.
    users: AtomicU32,
    /// The backing is being replaced: no copy for a peer begins.
    moving: AtomicBool,
}

/// Held while bytes of a peer are being copied into a region.
#[derive(Debug)]
pub(crate) struct UseGuard<'a>(&'a Entry);

impl Drop for UseGuard<'_> {
    fn drop(&mut self) {
        // Release: the copy is over before `settle` (sequentially consistent load) sees zero.
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl Entry {
    /// The memory.
    pub(crate) fn memory(&self) -> &dyn MemoryObject {
        self.memory.as_ref()
    }

    /// True when the range lies inside.
    pub(crate) fn contains(&self, offset: u64, length: u64) -> bool {
        contains(self.memory(), offset, length)
    }

    /// True when local results may be placed here.
    pub(crate) fn is_locally_writable(&self) -> bool {
        self.access.contains(Access::LOCAL_WRITE)
    }

    /// Address of `offset`.
    ///
    /// Invariant: the caller checked the range it is about to touch with `contains`.
    pub(crate) fn pointer(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.memory.length_bytes(), "a range was checked before it is used");
        // SAFETY: inside or one past the mapping, just checked.
        unsafe { self.memory.base().as_ptr().add(offset) }
    }

    /// Leave to copy one piece for a peer; `None` once the region is taken away. What its owner
    /// posts (receives, results of reads) needs none: that is not the peer's doing.
    pub(crate) fn enter(&self) -> Option<UseGuard<'_>> {
        loop {
            self.users.fetch_add(1, Ordering::SeqCst);
            let guard = UseGuard(self);
            if !self.moving.load(Ordering::SeqCst) {
                return (!self.is_closed()).then_some(guard);
            }
            drop(guard);
            std::thread::yield_now();
        }
    }

    /// Leave of this process's memory for one copy, the peer's doing or the owner's: the backing is
    /// not replaced meanwhile, by whatever provider.
    pub(crate) fn storing(&self) -> Storing {
        moving::storing(self.memory.anchor())
    }

    /// Names the object it is, or is a part of.
    fn object(&self) -> usize {
        self.memory.anchor().addr().get()
    }

    /// True when others than the region that goes and this entry, which have one each, hold the
    /// memory, or the object it is a part of.
    fn is_kept(&self) -> bool {
        // A part holds its object once, and so does the question.
        Arc::strong_count(&self.memory) > 2
            || self.memory.whole().is_some_and(|whole| Arc::strong_count(&whole) > 2)
    }

    /// True once the region is taken away from peers, by revocation or because its last handle is
    /// gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Takes the region away from peers; after it returns no copy for one is under way.
    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.settle();
    }

    /// Waits for the copies under way. Each is one non-blocking call, so this is short.
    fn settle(&self) {
        let mut rounds = 0_u32;
        while self.users.load(Ordering::SeqCst) != 0 {
            rounds = rounds.saturating_add(1);
            if rounds < 64 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

/// Keys are random already.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

type ByKey = HashMap<u64, Arc<Entry>, BuildHasherDefault<KeyHasher>>;

/// All regions of a device, by remote key.
#[derive(Debug, Default)]
pub(crate) struct RegionTable {
    entries: RwLock<ByKey>,
    /// Objects that a peer was told the place of, by where they begin; tied, so that no other
    /// provider moves them.
    grants: Mutex<HashMap<usize, Tie>>,
    pub(crate) persister: Persister<Job>,
    next_local_key: AtomicU32,
}

/// Fresh unguessable bits.
///
/// Errors: [`FabricError::System`] where the kernel gives none.
pub fn random_u64() -> Result<u64, FabricError> {
    getrandom::u64().map_err(|error| FabricError::System {
        action: "drawing a random key",
        source: std::io::Error::other(error.to_string()),
    })
}

impl RegionTable {
    /// Registers `memory`.
    pub(crate) fn register(
        self: &Arc<Self>,
        memory: Arc<dyn MemoryObject>,
        access: Access,
        domain: u64,
    ) -> Result<MemoryRegion, FabricError> {
        let entry = Arc::new(Entry {
            memory: Arc::clone(&memory),
            access,
            domain,
            closed: AtomicBool::new(false),
            users: AtomicU32::new(0),
            moving: AtomicBool::new(false),
        });
        let local_key = LocalKey(self.next_local_key.fetch_add(1, Ordering::Relaxed));
        let key = loop {
            let key = random_u64()?;
            let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
            if key != 0 && !entries.contains_key(&key) {
                entries.insert(key, entry);
                break key;
            }
        };
        let control: Arc<dyn RegionControl> = Arc::clone(self) as Arc<dyn RegionControl>;
        Ok(MemoryRegion::new(memory, access, local_key, RemoteKey(key), control))
    }

    /// The region behind a key, whoever asks.
    pub(crate) fn find(&self, key: RemoteKey) -> Option<Arc<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&key.0).cloned()
    }

    /// The region a peer of `domain` may reach at this range with one of `rights`; `None` is a
    /// refusal.
    pub(crate) fn reach(
        &self,
        key: RemoteKey,
        domain: u64,
        (offset, length): (u64, u64),
        rights: Access,
    ) -> Option<Arc<Entry>> {
        let entry = self.find(key)?;
        let allowed = entry.domain == domain
            && entry.access.intersects(rights)
            && entry.contains(offset, length)
            && !entry.is_closed();
        allowed.then_some(entry)
    }

    /// The region of a local request, when it is of this device and domain.
    pub(crate) fn local(&self, region: &MemoryRegion, domain: u64) -> Option<Arc<Entry>> {
        self.find(region.remote_key()).filter(|entry| entry.domain == domain)
    }
}

impl RegionTable {
    fn grants(&self) -> MutexGuard<'_, HashMap<usize, Tie>> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place to tell a peer, as `place` finds it; `None` where there is none, or the region is
    /// taken away already. The caller holds no guard of a region.
    pub(crate) fn grant(&self, entry: &Entry, place: impl FnOnce() -> Option<u64>) -> Option<u64> {
        // Under the lock nothing is moved away, and `closed` is stored before a withdrawal takes it:
        // either the place is not told, or the withdrawal finds the grant.
        let mut grants = self.grants();
        if entry.is_closed() {
            return None;
        }
        let at = place()?;
        grants.entry(entry.object()).or_insert_with(|| moving::tie(&entry.memory));
        Some(at)
    }

    /// Moves a granted object away from where peers can write by themselves, contents and all.
    ///
    /// Errors: the memory's; it is then where it was.
    pub(crate) fn withdraw(&self, entry: &Entry) -> std::io::Result<()> {
        let object = entry.object();
        let mut grants = self.grants();
        // Ours goes along.
        if grants.remove(&object).is_none() {
            return Ok(());
        }
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let all: Vec<_> =
            entries.values().filter(|other| other.object() == object).cloned().collect();
        drop(entries);
        // The entry itself may have left the table.
        let all = || all.iter().map(Arc::as_ref).chain([entry]);
        all().for_each(|entry| entry.moving.store(true, Ordering::SeqCst));
        all().for_each(Entry::settle);
        let outcome = entry.memory.replace_backing();
        if outcome.is_err() {
            grants.insert(object, moving::tie(&entry.memory));
        }
        all().for_each(|entry| entry.moving.store(false, Ordering::SeqCst));
        outcome
    }
}

impl RegionControl for RegionTable {
    fn revoke(&self, region: &MemoryRegion) -> Result<(), FabricError> {
        if let Some(entry) = self.find(region.remote_key()) {
            entry.close();
            self.withdraw(&entry).map_err(|source| FabricError::System {
                action: "moving a region away from its peers",
                source,
            })?;
        }
        Ok(())
    }

    fn deregister(&self, _local_key: LocalKey, remote_key: RemoteKey) {
        let entry =
            self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&remote_key.0);
        if let Some(entry) = entry {
            entry.close();
            // Only what others keep is worth moving.
            if !entry.is_kept() {
                // The object goes with them, and other memory may come to lie there.
                self.grants().remove(&entry.object());
            } else if let Err(error) = self.withdraw(&entry) {
                tracing::warn!(%error, "a peer can still write memory whose region is gone");
            }
        }
    }
}

/// A checked range of a region of this process.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    pub(crate) entry: Arc<Entry>,
    pub(crate) offset: usize,
    pub(crate) length: usize,
}

impl Range {
    /// True when both share a byte of the same memory.
    pub(crate) fn overlaps(&self, entry: &Entry, offset: u64, length: u64) -> bool {
        let mine = self.entry.memory.base().as_ptr() as u64 + self.offset as u64;
        let other = (entry.memory.base().as_ptr() as u64).saturating_add(offset);
        mine < other.saturating_add(length) && other < mine + self.length as u64
    }
}
