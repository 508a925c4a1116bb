//! An AF_XDP socket: packets of an interface's queue in memory that the kernel and this process share.
//!
//! ```text
//! driver → program (bpf) → frame ← fill ring ← frames that are free
//!                            └──→ receive ring → take() copies it out
//! queue() → frame → send ring → driver → completion ring → free again
//! ```
//!
//! The interface's packets do not reach the kernel's own network stack any more, which is what makes
//! this faster than a packet socket, and why it is asked for by name (`xdp:eth0`).
//!
//! Invariants: a frame is in one place: a ring, the list of free ones, or in the hands of this module.
//! Places that the kernel names are compared with the shared memory's size before they are used.

mod bpf;
mod rings;

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};

use beeline_os::Mapping;
use rings::{Packet, Ring};

use super::Sent;

const FRAME: usize = 4_096;
/// Entries of each ring; as many frames for what comes as for what goes.
const ENTRIES: u32 = 4_096;
/// The kernel sends a part of what waits by one call; so many calls send a whole ring.
const CALLS: u32 = 256;

/// A socket at a queue of an interface.
#[derive(Debug)]
pub(super) struct Express {
    /// The queue's.
    pub number: u32,
    socket: OwnedFd,
    program: bpf::Attached,
    receive: Ring<Packet>,
    fill: Ring<u64>,
    send: Ring<Packet>,
    completed: Ring<u64>,
    frames: Mapping,
    /// Frames for packets that go.
    free: Vec<u64>,
    /// Packets since the last call.
    waiting: u32,
}

fn option<V>(socket: &OwnedFd, name: i32, value: &V) -> io::Result<()> {
    let length = u32::try_from(size_of::<V>()).unwrap_or(0);
    let pointer = std::ptr::from_ref(value).cast::<libc::c_void>();
    // SAFETY: the pointer is to `length` bytes in the kernel's layout that live past the call.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, name, pointer, length) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reads an option whose bytes may all be zero.
///
/// # Safety
/// `V` is made of integers only.
unsafe fn asked<V>(socket: &OwnedFd, name: i32) -> io::Result<V> {
    // SAFETY: integers of zero bits are valid, by the caller's word.
    let mut value: V = unsafe { std::mem::zeroed() };
    let mut length = u32::try_from(size_of::<V>()).unwrap_or(0);
    let (fd, pointer) = (socket.as_raw_fd(), (&raw mut value).cast::<libc::c_void>());
    // SAFETY: the pointers are to `length` bytes of integers and to their length, which live past the
    // call.
    let got = unsafe { libc::getsockopt(fd, libc::SOL_XDP, name, pointer, &raw mut length) };
    let whole = usize::try_from(length).is_ok_and(|length| length == size_of::<V>());
    match (got, whole) {
        (0, true) => Ok(value),
        (0, false) => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn told(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

impl Express {
    /// Opens a queue of an interface.
    ///
    /// Errors: a kernel without AF_XDP; no right to it; an interface that has another program, or
    /// whose queue is taken.
    pub fn open(interface: u32, queue: u32) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: a call without pointers.
        let fd = unsafe { libc::socket(libc::AF_XDP, kind, 0) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::EAFNOSUPPORT) => io::Error::new(
                    io::ErrorKind::Unsupported,
                    "this kernel has no AF_XDP (CONFIG_XDP_SOCKETS): leave out xdp:",
                ),
                _ => told("no AF_XDP socket", &error),
            });
        }
        // SAFETY: the descriptor was made by the call above and belongs to nothing else.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let bytes = FRAME * ENTRIES as usize * 2;
        let frames = Mapping::anonymous(bytes).map_err(io::Error::from)?;
        let memory = libc::xdp_umem_reg {
            addr: frames.base().as_ptr() as u64,
            len: bytes as u64,
            chunk_size: u32::try_from(FRAME).unwrap_or(0),
            headroom: 0,
            flags: 0,
            tx_metadata_len: 0,
        };
        option(&socket, libc::XDP_UMEM_REG, &memory)
            .map_err(|error| told("no memory for packets", &error))?;
        for name in [
            libc::XDP_UMEM_FILL_RING,
            libc::XDP_UMEM_COMPLETION_RING,
            libc::XDP_RX_RING,
            libc::XDP_TX_RING,
        ] {
            option(&socket, name, &ENTRIES).map_err(|error| told("no ring", &error))?;
        }
        // SAFETY: offsets are integers.
        let offsets: libc::xdp_mmap_offsets = unsafe { asked(&socket, libc::XDP_MMAP_OFFSETS)? };
        let (receive, send) = (libc::XDP_PGOFF_RX_RING, libc::XDP_PGOFF_TX_RING);
        let place = |offset: libc::off_t| u64::try_from(offset).unwrap_or(0);
        let receive = Ring::map(&socket, place(receive), offsets.rx, ENTRIES)?;
        let send = Ring::map(&socket, place(send), offsets.tx, ENTRIES)?;
        let fill = libc::XDP_UMEM_PGOFF_FILL_RING;
        let mut fill = Ring::map(&socket, fill, offsets.fr, ENTRIES)?;
        let completed = libc::XDP_UMEM_PGOFF_COMPLETION_RING;
        let completed = Ring::map(&socket, completed, offsets.cr, ENTRIES)?;
        let frame = |number: u32| u64::from(number) * FRAME as u64;
        for number in 0..ENTRIES {
            fill.put(frame(number));
        }
        let free = (ENTRIES..2 * ENTRIES).map(frame).collect();
        let address = libc::sockaddr_xdp {
            sxdp_family: u16::try_from(libc::AF_XDP).unwrap_or(0),
            sxdp_flags: libc::XDP_USE_NEED_WAKEUP,
            sxdp_ifindex: interface,
            sxdp_queue_id: queue,
            sxdp_shared_umem_fd: 0,
        };
        let length = u32::try_from(size_of::<libc::sockaddr_xdp>()).unwrap_or(0);
        let pointer = (&raw const address).cast::<libc::sockaddr>();
        // SAFETY: the pointer is to `length` bytes of an address that lives past the call.
        if unsafe { libc::bind(socket.as_raw_fd(), pointer, length) } < 0 {
            return Err(told("the queue cannot be bound", &io::Error::last_os_error()));
        }
        let program = bpf::attach(interface, queue + 1).map_err(|error| {
            if error.raw_os_error() == Some(libc::EBUSY) {
                let text = "the interface has another XDP program: `ip link set dev NAME xdp off`";
                return io::Error::new(io::ErrorKind::ResourceBusy, text);
            }
            told("no program at the interface", &error)
        })?;
        program.lead(queue, socket.as_fd())?;
        let waiting = 0;
        let number = queue;
        Ok(Self { number, socket, program, receive, fill, send, completed, frames, free, waiting })
    }

    /// Another descriptor of the socket.
    ///
    /// Errors: too many descriptors.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// How packets come, in a word or two.
    pub fn told(&self) -> &'static str {
        // SAFETY: options are integers.
        let options = unsafe { asked::<libc::xdp_options>(&self.socket, libc::XDP_OPTIONS) };
        let direct = options.is_ok_and(|options| options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0);
        match (direct, self.program.by_driver) {
            (true, _) => "AF_XDP, without copies",
            (false, true) => "AF_XDP, with copies, the program in the driver",
            (false, false) => "AF_XDP, with copies, the program in the network stack",
        }
    }

    /// The part of the shared memory that a descriptor names; none where it lies outside.
    fn place(&self, at: u64, length: usize) -> Option<std::ptr::NonNull<u8>> {
        let at = usize::try_from(at).ok()?;
        let inside = at.checked_add(length)? <= self.frames.length_bytes();
        // SAFETY: inside the mapping (just compared).
        inside.then(|| unsafe { self.frames.base().add(at) })
    }

    /// Takes the next packet into `packet`; false without one.
    pub fn take(&mut self, packet: &mut Vec<u8>) -> bool {
        let Some(found) = self.receive.take() else {
            if self.fill.needs_call() {
                self.call_for_packets();
            }
            return false;
        };
        let length = found.length as usize;
        packet.clear();
        if let Some(from) = self.place(found.at, length) {
            packet.reserve(length);
            // SAFETY: the packet lies inside the mapping (`place`), and the frame is ours until it is
            // back in the fill ring; `packet` has room and is other memory.
            unsafe { packet.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr(), length) };
            // SAFETY: the first `length` bytes were written just now, within the capacity.
            unsafe { packet.set_len(length) };
        }
        // There are as many frames for what comes as the ring has entries.
        self.fill.put(found.at & !(FRAME as u64 - 1));
        true
    }

    fn call_for_packets(&self) {
        let fd = self.socket.as_raw_fd();
        let nothing = std::ptr::null_mut();
        // SAFETY: a call for no bytes.
        unsafe {
            libc::recvfrom(
                fd,
                nothing,
                0,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
    }

    /// Puts a packet into the send ring; it goes with [`Express::flush`], or when many wait. `batch`
    /// is how many.
    pub fn queue(&mut self, packet: &[u8], batch: u32) -> Sent {
        let mut sent = Sent::default();
        if packet.len() > FRAME {
            sent.refused = 1;
            sent.error = Some(io::Error::from_raw_os_error(libc::EMSGSIZE));
            return sent;
        }
        let frame = self.free.pop().or_else(|| {
            self.reclaim();
            self.free.pop()
        });
        let frame = frame.or_else(|| {
            sent = self.flush();
            self.free.pop()
        });
        let placed = frame.and_then(|at| Some((at, self.place(at, packet.len())?)));
        let Some((at, to)) = placed else {
            sent.refused += 1;
            return sent;
        };
        // SAFETY: inside the mapping (`place`), and the frame is ours: it came from the free ones.
        unsafe { to.as_ptr().copy_from_nonoverlapping(packet.as_ptr(), packet.len()) };
        let length = u32::try_from(packet.len()).unwrap_or(0);
        if self.send.put(Packet { at, length, options: 0 }) {
            self.waiting += 1;
            sent.sent += 1;
        } else {
            self.free.push(at);
            sent.refused += 1;
        }
        if self.waiting >= batch {
            let more = self.flush();
            (sent.refused, sent.error) = (sent.refused + more.refused, sent.error.or(more.error));
        }
        sent
    }

    fn reclaim(&mut self) {
        while let Some(frame) = self.completed.take() {
            self.free.push(frame);
        }
    }

    /// Has the kernel send what waits. What it cannot send now stays in the ring and goes later.
    pub fn flush(&mut self) -> Sent {
        let mut sent = Sent::default();
        let mut calls = 0;
        while self.send.waiting() > 0 && calls < CALLS {
            let before = self.send.waiting();
            if self.send.needs_call() {
                let (fd, nothing) = (self.socket.as_raw_fd(), std::ptr::null());
                // SAFETY: a call for no bytes to no address.
                let called = unsafe {
                    libc::sendto(fd, nothing, 0, libc::MSG_DONTWAIT, std::ptr::null(), 0)
                };
                if called < 0 {
                    let error = io::Error::last_os_error();
                    let later = [libc::EAGAIN, libc::EBUSY, libc::ENOBUFS];
                    if !error.raw_os_error().is_some_and(|code| later.contains(&code)) {
                        sent.error = Some(error);
                        break;
                    }
                }
            }
            self.reclaim();
            calls += 1;
            if self.send.waiting() == before {
                break;
            }
        }
        self.waiting = 0;
        sent
    }

    /// Packets that found no frame or no place in the ring.
    pub fn missed(&self) -> u64 {
        // SAFETY: statistics are integers.
        let counted = unsafe { asked::<libc::xdp_statistics>(&self.socket, libc::XDP_STATISTICS) };
        counted.map_or(0, |counted| counted.rx_dropped + counted.rx_ring_full)
    }
}
