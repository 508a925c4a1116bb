//! The emulation between two processes of one host that need no file: both directions in one sealed memfd and a
//! latched doorbell. Plugging one in takes a name and a key, both from an exchange of the caller's.
//!
//! ```text
//! record on a Unix socket: "BNTD"  4 note u32, of which the length follows  8 key [16]  24 name of the sender [16]
//! descriptors: the memfd (the sender's direction, then the receiver's, each behind a page with the latch), one end of
//!              the doorbell, and the memfd of the sender's memory for direct writes, if it has some
//! answer: "BNTW", with the memfd of the receiver's memory for direct writes, if it has some
//! ```

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use beeline_os::Mapping;
use beeline_os::control_socket::{ControlListener, ControlSocket, Received};
use beeline_os::doorbell::Doorbell;
use beeline_os::mapping::{Protection, create_memfd};
use rustix::fs::SealFlags;

use crate::Side;
use crate::bells::{Latched, Pair};
use crate::directory::PAGE_BYTES;
use crate::shim::{Combining, Disorder};
use crate::window::{Bells, Inbound, Mapped, Outbound, Window, Wire};

const MAGIC: &[u8; 4] = b"BNTD";
const WELCOME: &[u8; 4] = b"BNTW";
const HELLO_BYTES: usize = 40;
/// Memory for direct writes, at most.
const MOST_MEMORY: usize = 1 << 46;

/// Names a process among all: random.
pub type Name = [u8; 16];
/// Shows that a caller was told of it: random.
pub type Key = [u8; 16];

/// Where others plug their cables in.
#[derive(Debug)]
pub struct Socket {
    /// Readable when a peer calls.
    pub listener: ControlListener,
    key: Key,
}

/// Both directions, and behind the other one the memory for direct writes, once it is known.
#[derive(Debug)]
struct Joined {
    far: Mapped,
    memory: OnceLock<Mapped>,
}

impl Joined {
    fn place(&self, offset: usize) -> (&Mapped, usize) {
        match (self.memory.get(), offset.checked_sub(self.far.length_bytes())) {
            (Some(memory), Some(offset)) => (memory, offset),
            _ => (&self.far, offset),
        }
    }
}

impl Wire for Joined {
    fn length_bytes(&self) -> usize {
        self.far.length_bytes() + MOST_MEMORY
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        let (wire, offset) = self.place(offset);
        // SAFETY: the caller's contract.
        unsafe { wire.post(offset, source, length) };
    }

    fn post_word(&self, offset: usize, value: u64) {
        let (wire, offset) = self.place(offset);
        wire.post_word(offset, value);
    }

    fn fence(&self) {
        self.far.fence();
    }
}

/// One end of a cable that was handed over.
#[derive(Debug)]
pub struct Handed {
    /// This end of the window. Its bell is bit 0.
    pub window: Window,
    all: Outbound,
    joined: Arc<Joined>,
    memory: OnceLock<Outbound>,
    pair: Arc<Pair>,
}

/// What a caller offered.
#[derive(Debug)]
pub struct Offered {
    /// Its cable.
    pub cable: Handed,
    /// As the caller gave it.
    pub note: u32,
    /// Of the caller.
    pub name: Name,
}

fn socket_name(name: &Name) -> Vec<u8> {
    let digits = name.iter().map(|byte| format!("{byte:02x}"));
    format!("beeline-ntb-{}", digits.collect::<String>()).into_bytes()
}

fn bad() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

fn is_same(one: &Key, other: &Key) -> bool {
    one.iter().zip(other).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

/// Bytes of an object that was received, if it is sealed so that no access of ours can fault.
fn sealed_bytes(memory: &OwnedFd) -> io::Result<usize> {
    if !rustix::fs::fcntl_get_seals(memory)?.contains(SealFlags::SHRINK) {
        return Err(bad());
    }
    usize::try_from(rustix::fs::fstat(memory)?.st_size).map_err(|_| bad())
}

/// One side's view of memory that holds both directions, the first side's first, each of `bytes` and with no page
/// before it: looked at by the clock.
#[must_use]
pub fn halves(memory: &Arc<Mapping>, side: Side, bytes: usize) -> Window {
    let far = Mapped::new(Arc::clone(memory), side.other().index() * bytes, bytes);
    Window {
        inbound: Inbound::new(Arc::clone(memory), side.index() * bytes, bytes),
        outbound: Outbound::new(Arc::new(far)),
        bells: Arc::new(crate::bells::Silent),
    }
}

impl Handed {
    fn new(
        memory: OwnedFd,
        side: Side,
        bytes: usize,
        doorbell: Doorbell,
        disorder: Option<Disorder>,
    ) -> io::Result<Self> {
        let half = PAGE_BYTES + bytes;
        let mapping = Mapping::shared(memory, 2 * half, Protection::ReadWrite)?;
        mapping.forget_descriptor();
        let memory = Arc::new(mapping);
        let page = |side: Side| Inbound::new(Arc::clone(&memory), side.index() * half, PAGE_BYTES);
        let pair = Arc::new(Pair::new(doorbell));
        let latched = Latched::new(Arc::clone(&pair) as _, page(side), page(side.other()), 0);
        let mut bells: Arc<dyn Bells> = Arc::new(latched);
        let far = Mapped::new(Arc::clone(&memory), side.other().index() * half, half);
        let joined = Arc::new(Joined { far, memory: OnceLock::new() });
        let mut wire: Arc<dyn Wire> = Arc::clone(&joined) as _;
        if let Some(disorder) = disorder {
            let combining = Combining::paced(wire, disorder)?;
            bells = combining.bells(bells);
            wire = Arc::new(combining);
        }
        let all = Outbound::new(wire);
        let inbound = Inbound::new(memory, side.index() * half, half);
        let window = Window {
            inbound: inbound.part(PAGE_BYTES, bytes),
            outbound: all.part(PAGE_BYTES, bytes),
            bells,
        };
        Ok(Self { window, all, joined, memory: OnceLock::new(), pair })
    }

    /// The other end's memory for direct writes, once it is known.
    #[must_use]
    pub fn memory(&self) -> Option<&Outbound> {
        self.memory.get()
    }

    fn set_memory(&self, memory: OwnedFd) -> io::Result<()> {
        let bytes = sealed_bytes(&memory)?;
        if bytes == 0 || bytes > MOST_MEMORY {
            return Err(bad());
        }
        let mapping = Arc::new(Mapping::shared_at(&memory, 0, bytes)?);
        let fresh = self.joined.memory.set(Mapped::new(mapping, 0, bytes)).is_ok();
        if fresh {
            let _ = self.memory.set(self.all.part(self.joined.far.length_bytes(), bytes));
        }
        Ok(())
    }

    /// Reads the answer to an offered cable. True when there is nothing more to wait for.
    pub fn hear_welcome(&self, socket: &ControlSocket) -> bool {
        let (mut record, mut descriptors) = ([0; WELCOME.len() + 1], Vec::new());
        match socket.receive(&mut record, &mut descriptors) {
            Ok(Received::Empty) => return false,
            Ok(Received::Record(length)) if &record[..length] == WELCOME => {
                let taken = descriptors.pop().map(|memory| self.set_memory(memory));
                if let Some(Err(error)) = taken {
                    tracing::debug!(%error, "a peer's memory was refused");
                }
            }
            _ => {}
        }
        true
    }

    /// A fresh cable, its first side here, its second offered to the process of that name, which answers on the socket.
    /// Whether that took it is seen by its words in the window, or by the cable being cut.
    ///
    /// Errors: the system's (descriptor or memory limits).
    pub fn offer(
        (other, key): (&Name, &Key),
        (note, bytes): (u32, usize),
        own: &Name,
        memory: Option<BorrowedFd<'_>>,
        disorder: Option<Disorder>,
    ) -> io::Result<(Self, Option<ControlSocket>)> {
        let window = create_memfd("beeline-ntb", 2 * (PAGE_BYTES + bytes))?;
        let (ours, theirs) = Doorbell::pair()?;
        let mut record = Vec::with_capacity(HELLO_BYTES);
        record.extend_from_slice(MAGIC);
        record.extend_from_slice(&note.to_le_bytes());
        record.extend_from_slice(key);
        record.extend_from_slice(own);
        let mut descriptors = vec![window.as_fd(), theirs.as_fd()];
        descriptors.extend(memory);
        let offered = ControlSocket::connect(&socket_name(other)).and_then(|socket| {
            socket.send(&record, &descriptors)?;
            Ok(socket)
        });
        drop(descriptors);
        drop(theirs);
        let cable = Self::new(window, Side::First, bytes, ours, disorder)?;
        let socket = offered.inspect_err(|error| {
            tracing::debug!(%error, "no peer takes the cable");
            cable.pair.cut();
        });
        Ok((cable, socket.ok()))
    }
}

impl Socket {
    /// Where the process of this name takes cables from those that know its key.
    ///
    /// Errors: the system's.
    pub fn open(name: &Name, key: Key) -> io::Result<Self> {
        Ok(Self { listener: ControlListener::bind(&socket_name(name))?, key })
    }

    /// What a caller has to know.
    #[must_use]
    pub fn key(&self) -> Key {
        self.key
    }

    /// Reads what a caller says, whose note tells the `bytes` of each direction. `Ok(None)`: nothing yet.
    ///
    /// Errors: it is no cable of ours.
    pub fn hear(
        &self,
        caller: &ControlSocket,
        bytes: impl Fn(u32) -> Option<usize>,
        disorder: Option<Disorder>,
    ) -> io::Result<Option<Offered>> {
        let (mut record, mut descriptors) = ([0; HELLO_BYTES + 1], Vec::new());
        let length = match caller.receive(&mut record, &mut descriptors)? {
            Received::Empty => return Ok(None),
            Received::Closed => return Err(bad()),
            Received::Record(length) => length,
        };
        if length != HELLO_BYTES || &record[..4] != MAGIC {
            return Err(bad());
        }
        let (mut note, mut key, mut name) = ([0; 4], [0; 16], [0; 16]);
        note.copy_from_slice(&record[4..8]);
        key.copy_from_slice(&record[8..24]);
        name.copy_from_slice(&record[24..40]);
        let note = u32::from_le_bytes(note);
        let bytes = bytes(note).ok_or_else(bad)?;
        let memory = (descriptors.len() == 3).then(|| descriptors.pop()).flatten();
        let Ok([window, bell]) = <[OwnedFd; 2]>::try_from(descriptors) else { return Err(bad()) };
        if !is_same(&key, &self.key) || sealed_bytes(&window)? < 2 * (PAGE_BYTES + bytes) {
            return Err(bad());
        }
        let doorbell = Doorbell::from_peer(bell)?;
        let cable = Handed::new(window, Side::Second, bytes, doorbell, disorder)?;
        if let Some(memory) = memory {
            cable.set_memory(memory)?;
        }
        Ok(Some(Offered { cable, note, name }))
    }

    /// Answers a cable that was taken.
    pub fn welcome(caller: &ControlSocket, memory: Option<BorrowedFd<'_>>) {
        let descriptors: Vec<_> = memory.into_iter().collect();
        if let Err(error) = caller.send(WELCOME, &descriptors) {
            tracing::debug!(%error, "the caller did not wait for its answer");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_cable_is_handed_over_to_a_process_whose_key_is_known_with_memory_both_ways() {
        let (name, key) = ([0x5a; 16], [3; 16]);
        let socket = Socket::open(&name, key).unwrap();
        let mine = create_memfd("mine", 8192).unwrap();
        let memory = || Some(mine.as_fd());
        let offer =
            |key| Handed::offer((&name, &key), (7, 4096), &[1; 16], memory(), None).unwrap();
        let hear = |note: u32| (note == 7).then_some(4096);
        let (_wrong, _waits) = offer([4; 16]);
        let caller = socket.listener.accept().unwrap().unwrap();
        assert!(socket.hear(&caller, hear, None).is_err(), "another key");
        let (near, waits) = offer(key);
        let caller = socket.listener.accept().unwrap().unwrap();
        let Offered { cable: far, note, name } = socket.hear(&caller, hear, None).unwrap().unwrap();
        assert_eq!((note, name), (7, [1; 16]));
        assert!(near.memory().is_none() && far.memory().is_some());
        Socket::welcome(&caller, memory());
        assert!(near.hear_welcome(waits.as_ref().unwrap()));
        near.window.outbound.post_word(4088, 9);
        assert_eq!(far.window.inbound.word(4088).load(Ordering::Acquire), 9);
        far.memory().unwrap().post_word(16, 11);
        let map = Mapping::shared_at(&mine, 0, 8192).unwrap();
        assert_eq!(Inbound::new(Arc::new(map), 0, 8192).word(16).load(Ordering::Acquire), 11);
        near.window.bells.ring(0);
        let bell = far.window.bells.descriptor(0).unwrap();
        assert!(rustix::io::read(bell, &mut [0; 8]).is_ok());
        drop(near);
        far.window.bells.clear(0);
        assert!(!far.window.bells.is_plugged());
    }
}
