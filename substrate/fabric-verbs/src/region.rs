//! Regions: registered memory, its two registrations, revocation, the limits on pinning.
//!
//! A region that peers may reach is registered twice: once for this process (its own requests name
//! it by the local key, at its own address) and once for peers (they name it by the remote key,
//! at an address of our choosing, see [`crate::key`]). So revocation is one call that takes the
//! second registration away, and requests of the owner that are under way never notice.

use std::ffi::c_int;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use beeline_fabric::{
    Access, FabricError, LocalKey, MemoryRegion, RegionControl, RemoteKey, ScatterGatherEntry,
};
use beeline_os::Persistence;
use beeline_os::memory::MemoryObject;
use beeline_os::moving::{self, Tie};
use rustix::process::{Resource, getrlimit};

use crate::abi;
use crate::handle::{Domain, Registration};
use crate::key::{Key, MAX_REGION_BYTES, told};

/// What this device has registered, against its limits.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) max_regions: u64,
    pub(crate) max_region_bytes: u64,
    /// The device takes memory that is not pinned.
    pub(crate) on_demand: bool,
    regions: AtomicU64,
    bytes: AtomicU64,
}

impl Pinned {
    pub(crate) fn new(max_regions: u64, max_region_bytes: u64, on_demand: bool) -> Self {
        let (regions, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { max_regions, max_region_bytes, on_demand, regions, bytes }
    }

    pub(crate) fn regions(&self) -> u64 {
        self.regions.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// One registration, counted.
#[derive(Debug)]
struct Counted {
    registration: Option<Registration>,
    length: u64,
    pinned: Arc<Pinned>,
}

impl Counted {
    fn new(registration: Registration, length: u64, pinned: &Arc<Pinned>) -> Self {
        pinned.regions.fetch_add(1, Ordering::Relaxed);
        pinned.bytes.fetch_add(length, Ordering::Relaxed);
        Self { registration: Some(registration), length, pinned: Arc::clone(pinned) }
    }

    fn deregister(mut self) -> io::Result<()> {
        self.registration.take().map_or(Ok(()), Registration::deregister)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        drop(self.registration.take());
        self.pinned.regions.fetch_sub(1, Ordering::Relaxed);
        self.pinned.bytes.fetch_sub(self.length, Ordering::Relaxed);
    }
}

/// What the provider keeps for a region.
#[derive(Debug)]
pub(crate) struct VerbsRegion {
    domain: Arc<Domain>,
    base: u64,
    lkey: u32,
    _local: Counted,
    remote: Mutex<Option<Counted>>,
    /// The device was told the pages: nobody moves the memory to others.
    _tie: Tie,
    /// Last, so that the memory outlives the registrations.
    _memory: Arc<dyn MemoryObject>,
}

impl RegionControl for VerbsRegion {
    fn revoke(&self, _region: &MemoryRegion) -> Result<(), FabricError> {
        let remote = self.remote.lock().unwrap_or_else(PoisonError::into_inner).take();
        match remote.map_or(Ok(()), Counted::deregister) {
            // The kernel has cut this process off a device that is gone, registrations and all.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV)) => Ok(()),
            outcome => outcome.map_err(|source| FabricError::System {
                action: "taking a region's registration away",
                source,
            }),
        }
    }

    fn deregister(&self, _local_key: LocalKey, _remote_key: RemoteKey) {
        // Peers lose the region with its last handle, before the memory can go.
        drop(self.remote.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

fn rights(access: Access) -> c_int {
    let mut flags = 0;
    if access.contains(Access::REMOTE_READ) {
        flags |= abi::access::REMOTE_READ;
    }
    if access.contains(Access::REMOTE_WRITE) {
        flags |= abi::access::REMOTE_WRITE | abi::access::LOCAL_WRITE;
    }
    if access.contains(Access::REMOTE_ATOMIC) {
        flags |= abi::access::REMOTE_ATOMIC | abi::access::LOCAL_WRITE;
    }
    flags
}

/// The kernel refuses to pin this kind of memory, however often it is asked.
fn is_unpinnable(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EOPNOTSUPP | libc::EINVAL))
}

/// The error of a refused registration, with the limit it ran into where that can be told.
fn refusal(
    source: io::Error,
    (access, persistence): (Access, Persistence),
    wanted: u64,
    pinned: &Pinned,
) -> FabricError {
    let limit = |what, requested, limit| FabricError::Limit { what, requested, limit };
    match source.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
            let requested = pinned.bytes().saturating_add(wanted);
            match getrlimit(Resource::Memlock).current {
                Some(allowed) if allowed < requested => limit(
                    "RLIMIT_MEMLOCK, the bytes this process may pin (ulimit -l),",
                    requested,
                    allowed,
                ),
                _ if pinned.regions().saturating_add(1) >= pinned.max_regions => limit(
                    "the device's number of memory regions",
                    pinned.regions() + 1,
                    pinned.max_regions,
                ),
                _ => FabricError::System { action: "registering memory", source },
            }
        }
        _ if is_unpinnable(&source) => FabricError::CannotRegister {
            provider: "verbs",
            access,
            reason: match (persistence, pinned.on_demand) {
                (Persistence::CacheLine, false) => {
                    "it belongs to a DAX file system, whose pages the kernel pins for no device \
                     (FOLL_LONGTERM), and this device has no usable on-demand paging, which would \
                     need no pinning"
                }
                (Persistence::CacheLine, true) => {
                    "it belongs to a DAX file system, whose pages the kernel pins for no device \
                     (FOLL_LONGTERM), and on-demand paging of it was refused as well"
                }
                _ => {
                    "the kernel does not pin this mapping for a device: it is read-only, or not \
                      ordinary memory"
                }
            },
        },
        _ => FabricError::System { action: "registering memory", source },
    }
}

/// Fills `bytes` with what nobody can guess.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), FabricError> {
    getrandom::fill(bytes).map_err(|error| FabricError::System {
        action: "drawing a random number",
        source: io::Error::other(error.to_string()),
    })
}

pub(crate) fn random_u32() -> Result<u32, FabricError> {
    let mut bytes = [0; 4];
    random(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Registers all of `memory`.
pub(crate) fn register(
    domain: &Arc<Domain>,
    pinned: &Arc<Pinned>,
    memory: Arc<dyn MemoryObject>,
    access: Access,
    vouched: bool,
) -> Result<MemoryRegion, FabricError> {
    let length = memory.length_bytes();
    let most = pinned.max_region_bytes.min(MAX_REGION_BYTES / 2);
    if length as u64 > most {
        let (what, requested) = ("bytes of a memory region", length as u64);
        return Err(FabricError::Limit { what, requested, limit: most });
    }
    // Before the device looks at the pages.
    let tie = moving::tie(&memory);
    let base = memory.base().as_ptr();
    let persistence = memory.persistence();
    let make = |iova, flags| {
        let attempt = |flags| {
            // SAFETY: the object keeps the range mapped while it lives, and the region it is put
            // into below holds it and drops its registrations first.
            unsafe { Registration::new(Arc::clone(domain), base, length, iova, flags) }
        };
        let (made, pinned_bytes) = match attempt(flags) {
            // Pages of a DAX file system: the device asks for them when it needs them.
            Err(error) if is_unpinnable(&error) && pinned.on_demand => {
                (attempt(flags | abi::access::ON_DEMAND), 0)
            }
            made => (made, length as u64),
        };
        made.map_err(|error| refusal(error, (access, persistence), length as u64, pinned))
            .map(|made| Counted::new(made, pinned_bytes, pinned))
    };
    let local_flags =
        if access.contains(Access::LOCAL_WRITE) { abi::access::LOCAL_WRITE } else { 0 };
    let local = make(None, local_flags)?;
    let lkey = local.registration.as_ref().map_or(0, Registration::lkey);
    let mut key = Key::new(base as usize, told(persistence, vouched), access, random_u32()?);
    let remote = if access.is_remote() {
        let remote = make(Some(key.iova()), rights(access))?;
        key.rkey = remote.registration.as_ref().map_or(0, Registration::rkey);
        Some(remote)
    } else {
        None
    };
    let region = VerbsRegion {
        domain: Arc::clone(domain),
        base: base as u64,
        lkey,
        _local: local,
        remote: Mutex::new(remote),
        _tie: tie,
        _memory: Arc::clone(&memory),
    };
    Ok(MemoryRegion::new(memory, access, LocalKey(lkey), key.encode(), Arc::new(region)))
}

/// A local range in the device's terms; `None` when it lies outside its region, the region is
/// another provider's or domain's, or `writable` is asked for and not given.
pub(crate) fn local_range(
    entry: &ScatterGatherEntry<'_>,
    domain: &Arc<Domain>,
    writable: bool,
) -> Option<abi::Sge> {
    let region = entry.region.control().downcast_ref::<VerbsRegion>()?;
    let allowed = Arc::ptr_eq(&region.domain, domain)
        && entry.region.contains(entry.offset, entry.length)
        && (!writable || entry.region.access().contains(Access::LOCAL_WRITE));
    let length = u32::try_from(entry.length).ok()?;
    allowed.then(|| abi::Sge { addr: region.base + entry.offset, length, lkey: region.lkey })
}
