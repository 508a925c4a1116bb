//! Which memory was handed to which peers, and how it is taken back.
//!
//! A page another process mapped cannot be taken from it. What can be done: give our own address a
//! new backing object, so that the old peer stores into an orphan. This table knows, for the whole
//! process (one piece of memory may be registered with several devices), which connections hold
//! the present backing of each memory object.
//!
//! Rights belong to the object. A descriptor opened for reading can be opened anew for writing, so
//! before an object goes to a peer that may only read, it is sealed: from then on nobody maps it
//! for writing. That is for good, so an object is sealed only while no region of it gives a right
//! to write, and afterwards none is registered until the backing was replaced. Objects that know no
//! seals (files), or that some region lets peers write, protect nobody from a hostile reader; it is
//! moved away from like a writer.
//!
//! Taking back, under the table's lock, in this order:
//! 1. every connection that opened the memory gets a new epoch: an honest initiator that sees it
//!    before or after its copy forgets its keys and does the operation again, on what the key then
//!    stands for;
//! 2. a full fence on every processor, which pairs with the initiator's light fence between its
//!    stores and its second look at the epoch: a write whose second look saw the old epoch is
//!    whole before the copy below begins;
//! 3. a bounded wait for initiators inside an atomic, which cannot be done again; one that is still
//!    inside then is told that nobody waits for it, and reports its result as unknown;
//! 4. the new backing ([`beeline_os::moving`]: the providers of this process keep out).
//!
//! Keys are granted under the same lock, so nobody opens the old backing in between. While a peer
//! holds the memory it is tied to its backing, so that no other provider moves it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use beeline_fabric::{Access, FabricError};
use beeline_os::mapping::{is_sealed_for_readers, seal_for_readers, seal_for_writers};
use beeline_os::moving::{self, Tie};
use beeline_os::{MemoryObject, barrier, reopen};

use crate::PROVIDER;
use crate::link::{Link, lock};

/// How long an initiator may stay inside an atomic. An honest one is there for nanoseconds; one
/// that was stopped there does not hold up the revocation, and its result is then unknown.
const ATOMIC_BOUND: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Exposure {
    /// The whole object.
    memory: Weak<dyn MemoryObject>,
    /// Regions of it that give a right to write.
    writable_regions: u32,
    /// Somebody was given the present backing, even if gone by now.
    exposed: bool,
    holders: Vec<Holder>,
    /// While somebody holds the present backing.
    tie: Option<Tie>,
}

impl Exposure {
    fn of(memory: &Arc<dyn MemoryObject>) -> Self {
        Self {
            memory: Arc::downgrade(memory),
            writable_regions: 0,
            exposed: false,
            holders: Vec::new(),
            tie: None,
        }
    }

    /// Notes that `link` has the present backing.
    fn hold(&mut self, link: &Arc<Link>, can_write: bool) {
        self.exposed = true;
        self.holders.retain(|holder| holder.link.strong_count() > 0);
        let held = self
            .holders
            .iter_mut()
            .find(|holder| std::ptr::eq(holder.link.as_ptr(), Arc::as_ptr(link)));
        match held {
            Some(holder) => holder.can_write |= can_write,
            None => self.holders.push(Holder { link: Arc::downgrade(link), can_write }),
        }
    }
}

#[derive(Debug)]
struct Holder {
    link: Weak<Link>,
    /// Nothing but its own honesty keeps it from writing.
    can_write: bool,
}

/// What a peer is given.
#[derive(Debug)]
pub(crate) struct Granted {
    pub memory: Arc<dyn MemoryObject>,
    pub access: Access,
    pub descriptor: Arc<OwnedFd>,
}

static EXPOSURES: Mutex<Option<HashMap<usize, Exposure>>> = Mutex::new(None);

fn with<R>(act: impl FnOnce(&mut HashMap<usize, Exposure>) -> R) -> R {
    act(lock(&EXPOSURES).get_or_insert_default())
}

/// The object that `memory` is, or is a part of.
fn whole(memory: &Arc<dyn MemoryObject>) -> Arc<dyn MemoryObject> {
    memory.whole().unwrap_or_else(|| Arc::clone(memory))
}

fn place(memory: &Arc<dyn MemoryObject>) -> usize {
    memory.anchor().addr().get()
}

fn entry<'a>(
    table: &'a mut HashMap<usize, Exposure>,
    memory: &Arc<dyn MemoryObject>,
) -> &'a mut Exposure {
    if table.len() >= 64 && table.len().is_power_of_two() {
        table.retain(|_, exposure| exposure.memory.strong_count() > 0);
    }
    let exposure = table.entry(place(memory)).or_insert_with(|| Exposure::of(memory));
    if exposure.memory.strong_count() == 0 {
        // Other memory once lay at this address.
        *exposure = Exposure::of(memory);
    }
    exposure
}

/// A region of `memory` is being registered. [`unregistered`] takes it back.
///
/// Errors: [`FabricError::CannotRegister`] when peers are to write an object that was sealed.
pub(crate) fn registered(
    memory: &Arc<dyn MemoryObject>,
    access: Access,
    in_process: bool,
) -> Result<(), FabricError> {
    if !access.is_remote() {
        return Ok(());
    }
    let refuse = |reason| Err(FabricError::CannotRegister { provider: PROVIDER, access, reason });
    let memory = whole(memory);
    with(|table| {
        let descriptor = memory.descriptor();
        if descriptor.is_none() && !in_process {
            return refuse("the memory has no descriptor another process could map");
        }
        if access.is_remotely_writable() {
            if descriptor.is_some_and(|descriptor| is_sealed_for_readers(&*descriptor)) {
                return refuse(
                    "the object was handed out for reading only, which is final for its backing; \
                     revoke the region that peers read first, or take another object",
                );
            }
            entry(table, &memory).writable_regions += 1;
        }
        Ok(())
    })
}

/// A region of `memory` lost its rights, or is gone: peers that opened the memory ask again before
/// they use it. The backing stays.
pub(crate) fn unregistered(memory: &Arc<dyn MemoryObject>, access: Access) {
    with(|table| {
        if let Some(exposure) = table.get_mut(&place(memory)) {
            if access.is_remotely_writable() {
                exposure.writable_regions = exposure.writable_regions.saturating_sub(1);
            }
            exposure.holders.iter().filter_map(|holder| holder.link.upgrade()).for_each(|link| {
                link.bump_epoch();
            });
        }
    });
}

/// Runs `find` (which looks the key up) under the table's lock and notes that `link` now holds
/// what it returns. Nothing when the key is refused, the link revoked, or the memory without a
/// descriptor.
pub(crate) fn grant(
    link: &Arc<Link>,
    find: impl FnOnce() -> Option<(Arc<dyn MemoryObject>, Access)>,
) -> Option<Granted> {
    with(|table| {
        if link.is_revoked() {
            return None;
        }
        let (memory, access) = find()?;
        let object = whole(&memory);
        let own = object.descriptor()?;
        let exposure = entry(table, &object);
        let (descriptor, can_write) = if access.is_remotely_writable() {
            seal_for_writers(&*own);
            (own, true)
        } else {
            let sealed = is_sealed_for_readers(&*own)
                || (exposure.writable_regions == 0 && seal_for_readers(&*own));
            (Arc::new(reopen::read_only(&*own).ok()?), !sealed)
        };
        exposure.tie.get_or_insert_with(|| moving::tie(&object));
        exposure.hold(link, can_write);
        Some(Granted { memory, access, descriptor })
    })
}

/// As [`grant`], to a queue pair of this process, which shares the memory object. It follows
/// whatever the object moves to, so that nothing is tied.
pub(crate) fn lend(
    link: &Arc<Link>,
    find: impl FnOnce() -> Option<(Arc<dyn MemoryObject>, Access)>,
) -> Option<(Arc<dyn MemoryObject>, Access)> {
    with(|table| {
        if link.is_revoked() {
            return None;
        }
        let (memory, access) = find()?;
        entry(table, &whole(&memory)).hold(link, access.is_remotely_writable());
        Some((memory, access))
    })
}

/// Takes `memory` back from everyone who opened it. The memory's contents stay.
///
/// Errors: [`FabricError::System`] when the backing cannot be replaced.
pub(crate) fn take_back(memory: &Arc<dyn MemoryObject>) -> Result<(), FabricError> {
    with(|table| match table.get_mut(&place(memory)) {
        Some(exposure) if exposure.exposed => replace(exposure, &whole(memory)),
        _ => Ok(()),
    })
}

/// Takes back everything that the peer of `link` could write. Others who opened the same memory are
/// moved along. What the peer can only read, kept so by a seal, stays where it is.
///
/// Errors: as [`take_back`]; the rest is still tried.
pub(crate) fn take_back_from(link: &Arc<Link>) -> Result<(), FabricError> {
    with(|table| {
        link.set_revoked();
        let mut outcome = Ok(());
        for exposure in table.values_mut() {
            let holds = exposure.holders.iter().any(|holder| {
                holder.can_write && std::ptr::eq(holder.link.as_ptr(), Arc::as_ptr(link))
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
        while link.peer_is_in_atomic() {
            if Instant::now() >= deadline {
                link.give_up_atomic();
                break;
            }
            std::thread::yield_now();
        }
    }
    // Ours is the one tie that goes along.
    exposure.tie = None;
    let outcome = memory.replace_backing();
    if let Err(source) = outcome {
        exposure.tie = Some(moving::tie(memory));
        return Err(FabricError::System { action: "replacing a region's backing", source });
    }
    exposure.exposed = false;
    exposure.holders.clear();
    Ok(())
}
