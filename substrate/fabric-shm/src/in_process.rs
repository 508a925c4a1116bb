//! The device for one process: memory without a descriptor, and a table in the place of sockets.
//!
//! Place: what [`crate::control`] does between processes, its queue pairs do here on the thread that
//! asks. Rings, credit, keys and one-sided operations are those of shm.
//!
//! ```text
//! connect at both ends ─▶ one block of memory with both rings, both ends told
//! open(key) ───────────▶ the owner's table of keys: a share of the memory object itself
//! ring ────────────────▶ the sleeper's completion queues, as the control thread's news do
//! ```
//!
//! Invariants:
//! - no thread, no socket, and no descriptor but what a completion queue sleeps on;
//! - an initiator stores into the owner's memory under [`beeline_os::moving`]'s guard and looks at
//!   the epoch under it, so that a revocation, which changes the epoch and then waits for guards,
//!   ends it without moving the memory;
//! - locks are taken in the order: table of ends, exposures, a link's inbox; the first is not held
//!   while the second is taken.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use beeline_fabric::Role;
use beeline_os::mapping::MappingError;
use beeline_os::{Mapping, MemoryObject, barrier, moving};

use crate::connect_info::{Nonce, PeerInfo};
use crate::control::Command;
use crate::device::DeviceShared;
use crate::exposure;
use crate::link::{Bell, Link, LinkEvent, Opened, OpenedKey, lock};
use crate::object::{ConnectionObject, End};

/// Memory of this process alone.
#[derive(Debug)]
pub(crate) struct PlainMemory(Mapping);

impl PlainMemory {
    /// Errors: [`MappingError`].
    pub(crate) fn allocate(length_bytes: usize) -> Result<Self, MappingError> {
        Ok(Self(Mapping::anonymous(length_bytes)?))
    }
}

// SAFETY: the mapping lives exactly as long as the value, at a fixed page-aligned base; its bytes
// are reached through raw copies and atomics only.
unsafe impl MemoryObject for PlainMemory {
    #[inline]
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }

    #[inline]
    fn length_bytes(&self) -> usize {
        self.0.length_bytes()
    }

    /// Returns once no provider of this process stores into it any more: there is no other access
    /// to take away.
    fn replace_backing(&self) -> std::io::Result<()> {
        moving::replace(self.anchor(), || Ok(()))
    }
}

/// Names a queue pair in this process: its device, and its number there.
type Place = ([u8; 16], u32);

#[derive(Debug)]
struct LocalEnd {
    link: Arc<Link>,
    device: Weak<DeviceShared>,
    /// The end that it wants, and in which role, once its owner called connect.
    wants: Option<(Box<PeerInfo>, Role)>,
    connected: bool,
}

impl LocalEnd {
    fn wants(&self, (device, qp_num): Place, nonce: Nonce, other: Role) -> bool {
        self.wants.as_ref().is_some_and(|(peer, role)| {
            (peer.socket, peer.qp_num, peer.nonce) == (device, qp_num, nonce) && *role != other
        })
    }

    fn peer(&self) -> Option<Place> {
        self.wants.as_ref().map(|(peer, _)| (peer.socket, peer.qp_num))
    }
}

static ENDS: Mutex<Option<HashMap<Place, LocalEnd>>> = Mutex::new(None);

fn with<R>(act: impl FnOnce(&mut HashMap<Place, LocalEnd>) -> R) -> R {
    act(lock(&ENDS).get_or_insert_default())
}

/// Does what a queue pair asks for, on its thread.
pub(crate) fn obey(device: &Arc<DeviceShared>, command: Command) {
    let own = device.socket;
    match command {
        Command::Add(link) => with(|ends| {
            let (place, device) = ((own, link.qp_num), Arc::downgrade(device));
            ends.insert(place, LocalEnd { link, device, wants: None, connected: false });
        }),
        Command::Connect { qp_num, peer, role } => {
            with(|ends| connect(ends, (own, qp_num), peer, role));
        }
        Command::Open { qp_num, key, epoch } => open((own, qp_num), key, epoch),
        Command::Close { qp_num } => with(|ends| close(ends, (own, qp_num))),
        Command::Stop => with(|ends| {
            let all: Vec<Place> =
                ends.keys().filter(|(device, _)| *device == own).copied().collect();
            for place in all {
                if let Some(end) = ends.get(&place) {
                    end.link.push(LinkEvent::Closed);
                }
                close(ends, place);
            }
        }),
    }
}

/// Connects the two ends where both want each other; an end whose peer is not there is told so.
fn connect(ends: &mut HashMap<Place, LocalEnd>, place: Place, peer: Box<PeerInfo>, role: Role) {
    let other = (peer.socket, peer.qp_num);
    let known = ends.get(&other).is_some_and(|end| end.link.nonce == peer.nonce && other != place);
    let Some(end) = ends.get_mut(&place) else { return };
    if !known {
        end.link.push(LinkEvent::Closed);
        ends.remove(&place);
        return;
    }
    end.wants = Some((peer, role));
    let link = Arc::clone(&end.link);
    let Some(far) = ends.get_mut(&other) else { return };
    if far.connected || !far.wants(place, link.nonce, role) {
        return;
    }
    far.connected = true;
    let peer = Arc::clone(&far.link);
    if let Some(end) = ends.get_mut(&place) {
        end.connected = true;
    }
    let (active, passive) = if role == Role::Active { (link, peer) } else { (peer, link) };
    if join(&active, &passive).is_none() {
        tracing::warn!("no memory for the rings of a connection within the process");
        close(ends, place);
        for end in [active, passive] {
            end.push(LinkEvent::Closed);
        }
    }
}

/// Gives both ends their rings; nothing where there is no memory for them.
fn join(active: &Arc<Link>, passive: &Arc<Link>) -> Option<()> {
    let (first, second) = (active.geometry, passive.geometry);
    let length = ConnectionObject::length_bytes(first, second);
    let block = Arc::new(Mapping::anonymous(length).ok()?);
    let view = |end| ConnectionObject::new(Arc::clone(&block), end, first, second).ok();
    let objects = (Arc::new(view(End::Active)?), Arc::new(view(End::Passive)?));
    let asymmetric = barrier::is_asymmetric();
    for (link, object, peer) in [(active, objects.0, passive), (passive, objects.1, active)] {
        let bell = Bell::Thread(Arc::downgrade(peer));
        link.push(LinkEvent::Connected { object, bell, asymmetric });
    }
    Some(())
}

/// Answers the first use of a key.
fn open(place: Place, key: u64, epoch: u64) {
    let found = with(|ends| {
        let end = ends.get(&place)?;
        let peer = ends.get(&end.peer()?)?;
        Some((Arc::clone(&end.link), Arc::clone(&peer.link), peer.device.upgrade()))
    });
    let Some((link, owner, device)) = found else { return };
    let find = || device.as_ref()?.find_region(key, owner.domain);
    let opened = exposure::lend(&owner, find).map(|(memory, access)| OpenedKey {
        length: memory.length_bytes() as u64,
        access,
        persistence: memory.persistence(),
        offset: 0,
        memory: Opened::Here(memory),
    });
    link.push(LinkEvent::Key { key, epoch, opened });
}

/// Forgets an end; its peer is told that it is gone.
fn close(ends: &mut HashMap<Place, LocalEnd>, place: Place) {
    let Some(end) = ends.remove(&place) else { return };
    if end.connected
        && let Some(peer) = end.peer()
        && let Some(far) = ends.remove(&peer)
    {
        far.link.push(LinkEvent::Closed);
    }
}
