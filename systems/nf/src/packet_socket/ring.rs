//! A packet socket's ring: frames that the kernel fills and this process empties, without a call per
//! packet.
//!
//! The second version of the kernel's format: a frame is handed over as soon as its packet is there.
//! The third hands over blocks, a partly filled one only after a millisecond or more, which would be
//! the latency of every packet on a quiet wire.
//!
//! Invariant: a frame's status says whose it is. The kernel's store of `USER` publishes the frame's
//! bytes; our store of 0 gives the frame back.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::sync::atomic::{AtomicU32, Ordering};

use beeline_os::Mapping;

use super::checksum::complete;

const FRAME: usize = 2_048;
const FRAMES: usize = 4_096;
const BLOCK: usize = 1 << 16;

const STATUS_USER: u32 = 1;
const STATUS_COPY: u32 = 1 << 1;
const STATUS_CHECKSUM_LEFT: u32 = 1 << 3;
const STATUS_VLAN: u32 = 1 << 4;
const STATUS_TPID: u32 = 1 << 6;

/// Bytes before the Ethernet type that a VLAN tag is put into.
const ADDRESSES: usize = 12;
const VLAN: u16 = 0x8100;

/// The ring of a socket.
#[derive(Debug)]
pub(super) struct Ring {
    memory: Mapping,
    next: usize,
    /// When the last packet that was taken came, in nanoseconds since 1970.
    pub stamp_ns: u64,
}

/// What a frame held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// None is there.
    Nothing,
    /// A packet, now in the caller's buffer.
    Packet,
    /// The beginning of a longer one, which waits whole in the socket itself, its VLAN tag, and
    /// whether its checksum was left to the device.
    Longer(Option<[u8; 4]>, bool),
    /// The beginning of a longer one that found no room in the socket.
    Cut,
}

fn option(fd: impl AsFd, name: i32, value: &[u32]) -> io::Result<()> {
    let length = u32::try_from(size_of_val(value)).unwrap_or(0);
    let pointer = value.as_ptr().cast::<libc::c_void>();
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the pointer is to `length` bytes of integers that live past the call.
    let set = unsafe { libc::setsockopt(fd, libc::SOL_PACKET, name, pointer, length) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Ring {
    /// Gives a packet socket that is not bound yet a ring.
    ///
    /// Errors: the kernel has none, or no memory.
    pub fn new(socket: impl AsFd) -> io::Result<Self> {
        let version = u32::try_from(libc::tpacket_versions::TPACKET_V2 as i32).unwrap_or(1);
        option(&socket, libc::PACKET_VERSION, &[version])?;
        // Packets that do not fit a frame come by the socket.
        option(&socket, libc::PACKET_COPY_THRESH, &[1])?;
        let bytes = FRAME * FRAMES;
        let number = |value: usize| u32::try_from(value).unwrap_or(0);
        let request = [BLOCK, bytes / BLOCK, FRAME, FRAMES].map(number);
        option(&socket, libc::PACKET_RX_RING, &request)?;
        let memory = Mapping::shared_at(&socket, 0, bytes).map_err(io::Error::from)?;
        Ok(Self { memory, next: 0, stamp_ns: 0 })
    }

    fn status(&self) -> &AtomicU32 {
        let at = self.next * FRAME;
        assert!(at + FRAME <= self.memory.length_bytes(), "frames lie inside the ring");
        // SAFETY: the frame lies inside the mapping (asserted).
        let status = unsafe { self.memory.base().add(at) };
        // SAFETY: mapped while `self` is borrowed, aligned to a frame; the kernel and we use whole
        // words.
        unsafe { AtomicU32::from_ptr(status.cast().as_ptr()) }
    }

    /// Bytes of the frame from `at` on, at most those of a frame.
    fn bytes(&self, at: usize, to: &mut [u8]) {
        let whole = at.checked_add(to.len()).is_some_and(|end| end <= FRAME);
        assert!(whole, "the kernel's lengths lie inside a frame");
        // SAFETY: inside the frame (asserted), which is inside the mapping.
        let from = unsafe { self.memory.base().add(self.next * FRAME + at) };
        // SAFETY: `to` is ours, and the kernel does not write a frame whose status is `USER`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
    }

    /// Takes the next packet into `packet`, with its VLAN tag where the kernel took that out.
    pub fn take(&mut self, packet: &mut Vec<u8>) -> Frame {
        // Acquire: pairs with the kernel's store, for the frame's bytes.
        let status = self.status().load(Ordering::Acquire);
        if status & STATUS_USER == 0 {
            return Frame::Nothing;
        }
        // Status, length, captured length, place of the packet, of its payload; seconds,
        // nanoseconds; tag, its protocol.
        let mut header = [0; 28];
        self.bytes(4, &mut header);
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let captured = usize::try_from(word(4)).unwrap_or(0);
        let place = usize::from(half(8));
        self.stamp_ns = u64::from(word(12)) * 1_000_000_000 + u64::from(word(16));
        let tag = (status & STATUS_VLAN != 0).then(|| {
            let protocol = if status & STATUS_TPID == 0 { VLAN } else { half(22) };
            let ([a, b], [c, d]) = (protocol.to_be_bytes(), half(20).to_be_bytes());
            [a, b, c, d]
        });
        let unsummed = status & STATUS_CHECKSUM_LEFT != 0;
        let found = if status & STATUS_COPY != 0 {
            Frame::Longer(tag, unsummed)
        } else if word(0) > word(4) {
            Frame::Cut
        } else {
            packet.clear();
            packet.resize(captured.min(FRAME.saturating_sub(place)), 0);
            self.bytes(place, packet);
            if unsummed {
                complete(packet);
            }
            insert(packet, tag);
            Frame::Packet
        };
        // Release: the kernel may fill the frame again, after our reads of it.
        self.status().store(0, Ordering::Release);
        self.next = (self.next + 1) % FRAMES;
        found
    }
}

/// Puts a VLAN tag back where it was.
pub(super) fn insert(packet: &mut Vec<u8>, tag: Option<[u8; 4]>) {
    if let Some(tag) = tag
        && packet.len() >= ADDRESSES
    {
        packet.splice(ADDRESSES..ADDRESSES, tag);
    }
}
