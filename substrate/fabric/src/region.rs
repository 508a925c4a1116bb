//! Memory regions: what may be reached, by whom, how.

use std::any::Any;
use std::fmt::{self, Debug};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use beeline_os::memory::{MemoryObject, Persistence};

use crate::FabricError;

bitflags::bitflags! {
    /// Rights on a region. Local reads are always allowed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u8 {
        /// Results of reads and atomics, and received messages, may be placed here.
        const LOCAL_WRITE = 1;
        /// Peers may read.
        const REMOTE_READ = 1 << 1;
        /// Peers may write.
        const REMOTE_WRITE = 1 << 2;
        /// Peers may run compare-and-swap and fetch-and-add.
        const REMOTE_ATOMIC = 1 << 3;
    }
}

impl Access {
    /// Rights that need a descriptor a peer can map for writing.
    #[must_use]
    pub fn is_remotely_writable(self) -> bool {
        self.intersects(Self::REMOTE_WRITE | Self::REMOTE_ATOMIC)
    }

    /// Any remote right.
    #[must_use]
    pub fn is_remote(self) -> bool {
        self.intersects(Self::REMOTE_READ | Self::REMOTE_WRITE | Self::REMOTE_ATOMIC)
    }
}

/// Names a region within its own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalKey(pub u32);

/// Names a region to peers. Never reused within a device's life; unguessable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RemoteKey(pub u64);

/// A place in a peer's region. Offsets, not pointers, cross a process boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteAddress {
    /// Which region.
    pub key: RemoteKey,
    /// Bytes from the region's start.
    pub offset: u64,
}

impl RemoteAddress {
    /// The address `bytes` further on.
    #[must_use]
    pub fn advanced(self, bytes: u64) -> Self {
        Self { key: self.key, offset: self.offset.wrapping_add(bytes) }
    }
}

/// What a provider does for a region beyond remembering it.
pub trait RegionControl: Any + Send + Sync + Debug {
    /// Makes the region unreachable for every peer, then returns (see [`MemoryRegion::revoke`]).
    ///
    /// Errors: the provider's; the region then counts as not revoked.
    fn revoke(&self, region: &MemoryRegion) -> Result<(), FabricError>;

    /// The last handle was dropped.
    fn deregister(&self, local_key: LocalKey, remote_key: RemoteKey);
}

struct Inner {
    memory: Arc<dyn MemoryObject>,
    /// The memory's, which does not change: asked for at every post.
    length_bytes: u64,
    /// Also the memory's. Never stored to: atomics only because a bare pointer is not shared.
    base: AtomicPtr<u8>,
    anchor: AtomicPtr<u8>,
    access: Access,
    local_key: LocalKey,
    remote_key: RemoteKey,
    revoked: AtomicBool,
    control: Arc<dyn RegionControl>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.control.deregister(self.local_key, self.remote_key);
    }
}

/// A registered piece of memory. Cloning is cheap; the region lives until the last handle and the
/// last outstanding request on it are gone.
#[derive(Clone)]
pub struct MemoryRegion(Arc<Inner>);

impl Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("local_key", &self.0.local_key)
            .field("length_bytes", &self.length_bytes())
            .field("access", &self.0.access)
            .field("revoked", &self.is_revoked())
            .finish_non_exhaustive()
    }
}

impl MemoryRegion {
    /// Called by providers.
    #[must_use]
    pub fn new(
        memory: Arc<dyn MemoryObject>,
        access: Access,
        local_key: LocalKey,
        remote_key: RemoteKey,
        control: Arc<dyn RegionControl>,
    ) -> Self {
        let revoked = AtomicBool::new(false);
        let length_bytes = memory.length_bytes() as u64;
        let base = AtomicPtr::new(memory.base().as_ptr());
        let anchor = AtomicPtr::new(memory.anchor().as_ptr());
        Self(Arc::new(Inner {
            memory,
            length_bytes,
            base,
            anchor,
            access,
            local_key,
            remote_key,
            revoked,
            control,
        }))
    }

    /// Whether both are handles on one region.
    #[must_use]
    #[inline]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The memory behind it.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn MemoryObject> {
        &self.0.memory
    }

    /// Where it begins: the memory's base, without asking the memory.
    #[must_use]
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.0.base.load(Ordering::Relaxed)
    }

    /// What names the memory where it is moved ([`MemoryObject::anchor`]), without asking the memory.
    #[must_use]
    #[inline]
    pub fn anchor(&self) -> NonNull<u8> {
        let anchor = NonNull::new(self.0.anchor.load(Ordering::Relaxed));
        anchor.unwrap_or(NonNull::dangling())
    }

    /// What the provider keeps for it, for the provider's own use.
    #[must_use]
    pub fn control(&self) -> &dyn Any {
        self.0.control.as_ref()
    }

    /// Length in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> u64 {
        self.0.length_bytes
    }

    /// Rights granted.
    #[must_use]
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// Key for requests of this process.
    #[must_use]
    pub fn local_key(&self) -> LocalKey {
        self.0.local_key
    }

    /// Key to give to peers.
    #[must_use]
    pub fn remote_key(&self) -> RemoteKey {
        self.0.remote_key
    }

    /// The address peers use for `offset`.
    #[must_use]
    pub fn remote_address(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { key: self.0.remote_key, offset }
    }

    /// How its bytes come to survive a loss of power.
    #[must_use]
    pub fn persistence(&self) -> Persistence {
        self.0.memory.persistence()
    }

    /// True when the range lies inside the region.
    #[must_use]
    #[inline]
    pub fn contains(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.0.length_bytes)
    }

    /// True once [`MemoryRegion::revoke`] began.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.0.revoked.load(Ordering::Acquire)
    }

    /// Takes the region away from all peers. After it returns, nothing a peer does, not even a
    /// call it was in the middle of, changes this memory; the local contents stay. A later remote
    /// access ends in [`crate::Status::RemoteAccessError`]. May copy the whole region (shm, ntb).
    ///
    /// Invariant: the owner's own code stores nothing into the memory while this runs; what it
    /// stores may be lost. What fabric places on its behalf meanwhile (messages received, results
    /// of reads and atomics, operations of peers through other regions of the same memory) is
    /// there afterwards.
    ///
    /// Errors: [`FabricError`] when the provider could not replace the backing, also because
    /// another provider or device reaches the same memory by itself and would not follow it; peers
    /// may then still write.
    pub fn revoke(&self) -> Result<(), FabricError> {
        self.0.revoked.store(true, Ordering::Release);
        self.0.control.revoke(self)
    }
}
