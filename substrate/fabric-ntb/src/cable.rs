//! The emulated link: two windows in one sealed memfd and a doorbell between two processes of one
//! host. Plugging one in takes a name and a key, both from the bootstrap exchange.
//!
//! ```text
//! record on a Unix socket: "BNTC"  4 geometry u32  8 key [16]  24 node of the sender [16]
//! descriptors: the memfd (window of the sender, then of the receiver), one end of the doorbell,
//!              and the memfd of the sender's memory for regions, if it has some
//! answer: "BNTW", with the memfd of the receiver's memory for regions, if it has some
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use beeline_fabric_engine::handshake::{Nonce, same_nonce};
use beeline_os::Mapping;
use beeline_os::control_socket::{ControlListener, ControlSocket, Received};
use beeline_os::doorbell::Doorbell;
use beeline_os::mapping::{Protection, create_memfd};
use rustix::fs::SealFlags;

use crate::heap::Heap;
use crate::layout::{Geometry, Side};
use crate::link::NodeName;
use crate::window::{Inbound, MappedWindow};

const MAGIC: &[u8; 4] = b"BNTC";
const WELCOME: &[u8; 4] = b"BNTW";
const HELLO_BYTES: usize = 40;

/// Where others plug their cables in.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) listener: ControlListener,
    pub(crate) key: Nonce,
}

fn socket_name(node: &NodeName) -> Vec<u8> {
    let digits = node.iter().map(|byte| format!("{byte:02x}"));
    format!("beeline-ntb-{}", digits.collect::<String>()).into_bytes()
}

fn window_of(mapping: &Arc<Mapping>, side: Side, bytes: usize) -> Inbound {
    Inbound::new(Arc::clone(mapping), side.index() * bytes, bytes)
}

/// One side's view of memory that holds both windows, the first side's first.
pub(crate) fn shared_window(
    mapping: Arc<Mapping>,
    side: Side,
    bytes: usize,
    doorbell: Option<Doorbell>,
) -> MappedWindow {
    let inbound = window_of(&mapping, side, bytes);
    let outbound = window_of(&mapping, side.other(), bytes);
    MappedWindow::new(inbound, outbound, doorbell)
}

fn bad() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Bytes of an object that was received, if it is sealed so that no access of ours can fault.
fn sealed_bytes(memory: &OwnedFd) -> io::Result<usize> {
    if !rustix::fs::fcntl_get_seals(memory)?.contains(SealFlags::SHRINK) {
        return Err(bad());
    }
    usize::try_from(rustix::fs::fstat(memory)?.st_size).map_err(|_| bad())
}

/// A peer's memory for regions.
fn peer_heap(memory: OwnedFd) -> io::Result<Inbound> {
    let bytes = sealed_bytes(&memory)?;
    Ok(Inbound::new(Arc::new(Mapping::shared_at(&memory, 0, bytes)?), 0, bytes))
}

/// Reads the answer to an offered cable. True when there is nothing more to wait for.
pub(crate) fn hear_welcome(socket: &ControlSocket, window: &MappedWindow) -> bool {
    let (mut record, mut descriptors) = ([0; WELCOME.len() + 1], Vec::new());
    match socket.receive(&mut record, &mut descriptors) {
        Ok(Received::Empty) => return false,
        Ok(Received::Record(length)) if &record[..length] == WELCOME => {
            match descriptors.pop().map(peer_heap) {
                Some(Ok(heap)) => window.set_heap(heap),
                Some(Err(error)) => tracing::debug!(%error, "a peer's memory was refused"),
                None => {}
            }
        }
        _ => {}
    }
    true
}

/// Answers a cable that was taken.
pub(crate) fn welcome(caller: &ControlSocket, heap: Option<&Heap>) {
    let descriptors: Vec<_> = heap.map(Heap::descriptor).into_iter().collect();
    if let Err(error) = caller.send(WELCOME, &descriptors) {
        tracing::debug!(%error, "the caller did not wait for its answer");
    }
}

impl Socket {
    pub(crate) fn open(node: &NodeName, key: Nonce) -> io::Result<Self> {
        Ok(Self { listener: ControlListener::bind(&socket_name(node))?, key })
    }

    /// Reads what a caller says. `Ok(None)`: nothing yet. `Err`: not a cable of ours.
    pub(crate) fn hear(
        &self,
        caller: &ControlSocket,
    ) -> io::Result<Option<(MappedWindow, Geometry, NodeName)>> {
        let (mut record, mut descriptors) = ([0; HELLO_BYTES + 1], Vec::new());
        let length = match caller.receive(&mut record, &mut descriptors)? {
            Received::Empty => return Ok(None),
            Received::Closed => return Err(bad()),
            Received::Record(length) => length,
        };
        if length != HELLO_BYTES || &record[..4] != MAGIC {
            return Err(bad());
        }
        let (mut code, mut key, mut node) = ([0; 4], [0; 16], [0; 16]);
        code.copy_from_slice(&record[4..8]);
        key.copy_from_slice(&record[8..24]);
        node.copy_from_slice(&record[24..40]);
        let geometry = Geometry::from_code(u32::from_le_bytes(code)).ok_or_else(bad)?;
        let heap = (descriptors.len() == 3).then(|| descriptors.pop()).flatten();
        let Ok([memory, bell]) = <[OwnedFd; 2]>::try_from(descriptors) else { return Err(bad()) };
        if !same_nonce(&key, &self.key) {
            return Err(bad());
        }
        let bytes = geometry.window_bytes();
        if sealed_bytes(&memory)? < 2 * bytes {
            return Err(bad());
        }
        let mapping = Mapping::shared(memory, 2 * bytes, Protection::ReadWrite)?;
        mapping.forget_descriptor();
        let doorbell = Doorbell::from_peer(bell)?;
        let window = shared_window(Arc::new(mapping), Side::Second, bytes, Some(doorbell));
        if let Some(heap) = heap {
            window.set_heap(peer_heap(heap)?);
        }
        Ok(Some((window, geometry, node)))
    }
}

/// A fresh cable, its first side here, its second offered to `peer`, which answers on the socket.
/// Whether that took it is seen
/// by the link coming up, or the cable being cut.
///
/// Errors: the system's (descriptor or memory limits).
pub(crate) fn plug(
    (peer, key): (&NodeName, &Nonce),
    geometry: Geometry,
    node: &NodeName,
    heap: Option<&Heap>,
) -> io::Result<(MappedWindow, Option<ControlSocket>)> {
    let bytes = geometry.window_bytes();
    let memory = create_memfd("beeline-ntb", 2 * bytes)?;
    let (ours, theirs) = Doorbell::pair()?;
    let mut record = Vec::with_capacity(HELLO_BYTES);
    record.extend_from_slice(MAGIC);
    record.extend_from_slice(&geometry.code().to_le_bytes());
    record.extend_from_slice(key);
    record.extend_from_slice(node);
    let mut descriptors = vec![memory.as_fd(), theirs.as_fd()];
    descriptors.extend(heap.map(Heap::descriptor));
    let offered = ControlSocket::connect(&socket_name(peer)).and_then(|socket| {
        socket.send(&record, &descriptors)?;
        Ok(socket)
    });
    drop(descriptors);
    drop(theirs);
    let mapping = Mapping::shared(memory, 2 * bytes, Protection::ReadWrite)?;
    mapping.forget_descriptor();
    let window = shared_window(Arc::new(mapping), Side::First, bytes, Some(ours));
    let socket = offered.inspect_err(|error| {
        tracing::debug!(%error, "nobody takes the cable");
        window.cut();
    });
    Ok((window, socket.ok()))
}
