//! Registered regions of all nodes.
//!
//! Apart from the world's state and under its own lock: a region's last handle may be dropped
//! while the state is locked (by a request that held it). Lock order: state, then registry.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_env::Randomness;
use beeline_fabric::{Access, RemoteAddress, RemoteKey, Status};
use beeline_os::memory::{MemoryObject, contains};

use crate::options::PlantedBug;

/// One life of a node: a restarted node does not answer for its former self.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Incarnation {
    pub(crate) node: u32,
    pub(crate) generation: u32,
}

#[derive(Debug)]
struct Record {
    owner: Incarnation,
    domain: u64,
    memory: Arc<dyn MemoryObject>,
    access: Access,
    revoked: bool,
}

#[derive(Debug)]
struct Inner {
    regions: BTreeMap<RemoteKey, Record>,
    keys: Randomness,
    next_local: u32,
}

/// Who asks for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    pub(crate) owner: Incarnation,
    pub(crate) domain: u64,
    pub(crate) remote: RemoteAddress,
    pub(crate) length: u64,
    /// One of these is needed.
    pub(crate) rights: Access,
}

pub(crate) struct Registry(Mutex<Inner>);

impl Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("regions", &self.lock().regions.len()).finish()
    }
}

impl Registry {
    pub(crate) fn new(keys: Randomness) -> Self {
        Self(Mutex::new(Inner { regions: BTreeMap::new(), keys, next_local: 1 }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a region; returns its local and remote key numbers.
    pub(crate) fn add(
        &self,
        owner: Incarnation,
        domain: u64,
        memory: Arc<dyn MemoryObject>,
        access: Access,
    ) -> (u32, RemoteKey) {
        let mut inner = self.lock();
        let key = loop {
            let key = RemoteKey(inner.keys.next_u64());
            if !inner.regions.contains_key(&key) {
                break key;
            }
        };
        let record = Record { owner, domain, memory, access, revoked: false };
        inner.regions.insert(key, record);
        inner.next_local += 1;
        (inner.next_local - 1, key)
    }

    pub(crate) fn remove(&self, key: RemoteKey) {
        let removed = self.lock().regions.remove(&key);
        // The memory object goes after the lock is released.
        drop(removed);
    }

    pub(crate) fn revoke(&self, key: RemoteKey) {
        if let Some(record) = self.lock().regions.get_mut(&key) {
            record.revoked = true;
        }
    }

    /// The memory a peer may use as it asks.
    pub(crate) fn check(
        &self,
        demand: &Demand,
        bug: Option<PlantedBug>,
    ) -> Result<Arc<dyn MemoryObject>, Status> {
        let inner = self.lock();
        let refused = Err(Status::RemoteAccessError);
        let Some(record) = inner.regions.get(&demand.remote.key) else { return refused };
        let bug = |which| bug == Some(which);
        if record.owner != demand.owner
            || (record.domain != demand.domain && !bug(PlantedBug::IgnoreDomain))
            || (record.revoked && !bug(PlantedBug::ForgetRevocation))
            || !(record.access.intersects(demand.rights) || bug(PlantedBug::IgnoreRights))
            || !(contains(record.memory.as_ref(), demand.remote.offset, demand.length)
                || bug(PlantedBug::IgnoreBounds))
        {
            return refused;
        }
        Ok(Arc::clone(&record.memory))
    }
}
