//! Which memory was handed to which peers, and how it is taken back.
//!
//! A page another process mapped cannot be taken from it. What can be done: give our own address a
//! new backing object, so that the old peer stores into an orphan. This table knows, for the whole
//! process (one piece of memory may be registered with several devices), which connections hold
//! the present backing of each memory object.
//!
//! Taking back, under the table's lock, in this order:
//! 1. every connection that opened the memory gets a new epoch: an honest initiator that sees it
//!    before or after its copy forgets its keys and does the operation again, on what the key then
//!    stands for;
//! 2. a full fence on every processor, which pairs with the initiator's light fence between its
//!    stores and its second look at the epoch: a write whose second look saw the old epoch is
//!    whole before the copy below begins;
//! 3. a bounded wait for initiators inside an atomic, which cannot be done again;
//! 4. the new backing.
//!
//! Keys are granted under the same lock, so nobody opens the old backing in between.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use beeline_fabric::FabricError;
use beeline_os::MemoryObject;
use beeline_os::barrier;

use crate::link::{Link, lock};

/// How long an initiator may stay inside an atomic. An honest one is there for nanoseconds; one
/// that was stopped there does not hold up the revocation, and its result is then unknown.
const ATOMIC_BOUND: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Exposure {
    memory: Weak<dyn MemoryObject>,
    /// Somebody was given the present backing, even if gone by now.
    exposed: bool,
    holders: Vec<Holder>,
}

#[derive(Debug)]
struct Holder {
    link: Weak<Link>,
    writable: bool,
}

static EXPOSURES: Mutex<Option<HashMap<usize, Exposure>>> = Mutex::new(None);

fn with<R>(act: impl FnOnce(&mut HashMap<usize, Exposure>) -> R) -> R {
    act(lock(&EXPOSURES).get_or_insert_default())
}

/// Runs `find` (which looks the key up) under the table's lock and notes that `link` now holds
/// what it returns. Nothing when the key is refused, the link revoked, or the memory without a
/// descriptor.
pub(crate) fn grant(
    link: &Arc<Link>,
    find: impl FnOnce() -> Option<(Arc<dyn MemoryObject>, bool)>,
) -> Option<Arc<OwnedFd>> {
    with(|table| {
        if link.is_revoked() {
            return None;
        }
        let (memory, writable) = find()?;
        let descriptor = memory.descriptor()?;
        if table.len() >= 64 && table.len().is_power_of_two() {
            table.retain(|_, exposure| exposure.memory.strong_count() > 0);
        }
        let exposure = table.entry(memory.base().addr().get()).or_insert_with(|| Exposure {
            memory: Arc::downgrade(&memory),
            exposed: false,
            holders: Vec::new(),
        });
        if exposure.memory.strong_count() == 0 {
            // Other memory once lay at this address.
            *exposure =
                Exposure { memory: Arc::downgrade(&memory), exposed: false, holders: Vec::new() };
        }
        exposure.exposed = true;
        exposure.holders.retain(|holder| holder.link.strong_count() > 0);
        let held = exposure
            .holders
            .iter_mut()
            .find(|holder| std::ptr::eq(holder.link.as_ptr(), Arc::as_ptr(link)));
        match held {
            Some(holder) => holder.writable |= writable,
            None => exposure.holders.push(Holder { link: Arc::downgrade(link), writable }),
        }
        Some(descriptor)
    })
}

/// Takes `memory` back from everyone who opened it. The memory's contents stay.
///
/// Errors: [`FabricError::System`] when the backing cannot be replaced.
pub(crate) fn take_back(memory: &Arc<dyn MemoryObject>) -> Result<(), FabricError> {
    with(|table| match table.get_mut(&memory.base().addr().get()) {
        Some(exposure) if exposure.exposed => replace(exposure, memory),
        _ => Ok(()),
    })
}

/// A key of `memory` is gone: everyone who opened the memory asks again before using it. The
/// backing stays.
pub(crate) fn forget_keys(memory: &Arc<dyn MemoryObject>) {
    with(|table| {
        if let Some(exposure) = table.get(&memory.base().addr().get()) {
            exposure.holders.iter().filter_map(|holder| holder.link.upgrade()).for_each(|link| {
                link.bump_epoch();
            });
        }
    });
}

/// Takes back everything that the peer of `link` may write. Others who opened the same memory are
/// moved along.
///
/// Errors: as [`take_back`]; the rest is still tried.
pub(crate) fn take_back_from(link: &Arc<Link>) -> Result<(), FabricError> {
    with(|table| {
        link.set_revoked();
        let mut outcome = Ok(());
        for exposure in table.values_mut() {
            let holds = exposure.holders.iter().any(|holder| {
                holder.writable && std::ptr::eq(holder.link.as_ptr(), Arc::as_ptr(link))
            });
            if !holds {
                continue;
            }
            if let Some(memory) = exposure.memory.upgrade() {
                outcome = outcome.and(replace(exposure, &memory));
            }
        }
        outcome
    })
}

fn replace(exposure: &mut Exposure, memory: &Arc<dyn MemoryObject>) -> Result<(), FabricError> {
    let holders: Vec<_> =
        exposure.holders.iter().filter_map(|holder| holder.link.upgrade()).collect();
    for link in &holders {
        link.bump_epoch();
    }
    barrier::heavy();
    let deadline = Instant::now() + ATOMIC_BOUND;
    for link in &holders {
        while link.peer_is_in_atomic() && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }
    memory
        .replace_backing()
        .map_err(|source| FabricError::System { action: "replacing a region's backing", source })?;
    exposure.exposed = false;
    exposure.holders.clear();
    Ok(())
}
