//! Raw packets of a network interface, through a packet socket; and TAP devices.
//!
//! An interface is opened in one of three ways: with a call per packet; with a ring that the kernel
//! fills and batches of packets that go by one call ([`Device::ringed`]); or, taken away from the
//! kernel's own network stack, by AF_XDP ([`Device::express`]).
//!
//! This module holds most of the crate's unsafe code: a bind whose address the standard library does
//! not know, device control and socket options, a call that sends several packets, and the rings.

mod checksum;
mod ring;
mod segments;
mod xdp;

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use ring::{Frame, Ring, insert};
use segments::segments;
use xdp::Express;

/// Packets of an interface.
#[derive(Debug)]
pub struct Device {
    file: File,
    /// What it is, for messages.
    pub name: String,
    /// The interface's number; 0 for a TAP device, which goes with its descriptor.
    index: u32,
    lane: Lane,
    /// Has the interface receive what is not addressed to it, where the packets come by AF_XDP.
    _all: Option<OwnedFd>,
    /// Longest network part that the interface takes; 0 where nobody says.
    mtu: usize,
    /// Packets that wait for [`Device::flush`]: their bytes in a row, and where each ends.
    waiting: Vec<u8>,
    ends: Vec<usize>,
    missed: u64,
    /// Room for a packet that comes by a call.
    scratch: Vec<u8>,
}

/// How packets come and go.
#[derive(Debug)]
enum Lane {
    Calls,
    Ring(Ring),
    Express(Box<Express>),
}

/// What became of packets.
#[derive(Debug, Default)]
pub struct Sent {
    /// Packets that the device took.
    pub sent: u64,
    /// Packets that it did not take.
    pub refused: u64,
    /// The last error but for a lack of room.
    pub error: Option<io::Error>,
}

/// Packets that go by one call.
const BATCH: usize = 64;
/// The same by AF_XDP.
const BATCH_EXPRESS: u32 = 64;
/// Longest packet.
const LONGEST: usize = 65_536;

/// What became of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is there, and up.
    Here,
    /// It is there and down, perhaps on its way to go.
    Down,
    /// No interface has its name.
    Gone,
    /// Another one has its name, and is used now.
    Replaced,
}

/// Every Ethernet type, in network order.
const ALL: u16 = 0x0003_u16.to_be();

fn index_of(name: &str) -> io::Result<u32> {
    let plain = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the pointer is to a string with a zero at its end, which lives past the call.
    let index = unsafe { libc::if_nametoindex(plain.as_ptr()) };
    if index == 0 { Err(io::Error::last_os_error()) } else { Ok(index) }
}

/// A packet socket without a protocol, so that nothing arrives before it is bound.
fn packet_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: a call without pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was made by the call above and belongs to nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has an interface receive what is not addressed to it, as long as the socket is open. An interface
/// that cannot goes on with what it receives.
fn receive_all(socket: &impl std::os::fd::AsFd, index: u32) {
    let request = libc::packet_mreq {
        mr_ifindex: i32::try_from(index).unwrap_or(0),
        mr_type: u16::try_from(libc::PACKET_MR_PROMISC).unwrap_or(0),
        mr_alen: 0,
        mr_address: [0; 8],
    };
    let length = u32::try_from(size_of::<libc::packet_mreq>()).unwrap_or(0);
    let pointer = (&raw const request).cast::<libc::c_void>();
    let (fd, name) = (socket.as_fd().as_raw_fd(), libc::PACKET_ADD_MEMBERSHIP);
    // SAFETY: the pointer is to a whole request of `length` bytes that lives past the call.
    unsafe { libc::setsockopt(fd, libc::SOL_PACKET, name, pointer, length) };
}

/// A request about an interface.
fn named(name: &str) -> libc::ifreq {
    // SAFETY: all bits zero are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    request
}

/// True where an interface is up; one that goes away between two questions is not.
fn is_up(name: &str) -> bool {
    let Ok(socket) = packet_socket() else { return false };
    let mut request = named(name);
    // SAFETY: the request is a whole ifreq that lives past the call.
    let asked = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) };
    // SAFETY: the call filled in the flags; all of their bits are valid.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    asked == 0 && i32::from(flags) & libc::IFF_UP != 0
}

/// The MTU of an interface; 0 where the kernel does not say.
fn mtu(name: &str) -> usize {
    let Ok(socket) = packet_socket() else { return 0 };
    let mut request = named(name);
    // SAFETY: the request is a whole ifreq that lives past the call.
    let asked = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    // SAFETY: the call filled in a number.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    if asked < 0 { 0 } else { usize::try_from(mtu).unwrap_or(0) }
}

/// What `ethtool` asks an interface about its queues.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    most: [u32; 4],
    receive: u32,
    send: u32,
    other: u32,
    combined: u32,
}

/// Receive queues of an interface; 1 where its driver does not say.
fn queues(name: &str) -> u32 {
    const ETHTOOL_GCHANNELS: u32 = 0x3c;
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    let Ok(socket) = packet_socket() else { return 1 };
    let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
    let mut request = named(name);
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: the request names an answer in the kernel's layout; both live past the call.
    let asked = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    if asked < 0 { 1 } else { (channels.receive + channels.combined).max(1) }
}

impl Device {
    /// A packet socket on an interface, receiving everything that arrives there.
    ///
    /// Errors: no such interface; no right to open a packet socket.
    pub fn interface(name: &str) -> io::Result<Self> {
        Self::open(name, false)
    }

    /// As [`Device::interface`], with a ring for what arrives, where the kernel has one. The interface
    /// receives what is not addressed to it, too.
    ///
    /// Errors: as for [`Device::interface`].
    pub fn ringed(name: &str) -> io::Result<Self> {
        let device = match Self::open(name, true) {
            // No such interface and no right to it are told by the simpler way too.
            Err(_) => Self::open(name, false),
            device => device,
        }?;
        receive_all(&device.file, device.index);
        Ok(device)
    }

    /// An interface's queue by AF_XDP: its packets come here, and not to the kernel's network stack.
    ///
    /// Errors: no such interface; it has more queues than the one; the kernel has no AF_XDP, the user
    /// no right to it, or the interface another program.
    pub fn express(name: &str, queue: Option<u32>) -> io::Result<Self> {
        let index = index_of(name)?;
        let queues = queues(name);
        if queue.is_none() && queues > 1 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{name} has {queues} receive queues and xdp: takes one: name it (xdp:{name}/0), or `ethtool -L {name} combined 1`"
                ),
            ));
        }
        let queue = queue.unwrap_or(0);
        let express = Express::open(index, queue)?;
        let file = File::from(express.descriptor()?);
        let all = packet_socket()?;
        receive_all(&all, index);
        let device = Self::of(file, name, index, Lane::Express(Box::new(express)));
        Ok(Self { _all: Some(all), ..device })
    }

    /// How packets come and go, in a word or two.
    #[must_use]
    pub fn way(&self) -> &'static str {
        match &self.lane {
            Lane::Calls if self.index == 0 => "TAP",
            Lane::Calls => "packet socket, a call each",
            Lane::Ring(_) => "packet socket with a ring",
            Lane::Express(express) => express.told(),
        }
    }

    fn open(name: &str, ringed: bool) -> io::Result<Self> {
        let index = index_of(name)?;
        let fd = packet_socket()?;
        let lane = if ringed { Lane::Ring(Ring::new(&fd)?) } else { Lane::Calls };
        // SAFETY: all bits zero are a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or(0);
        address.sll_protocol = ALL;
        address.sll_ifindex = i32::try_from(index).unwrap_or(0);
        let length = u32::try_from(size_of::<libc::sockaddr_ll>()).unwrap_or(0);
        let pointer = (&raw const address).cast::<libc::sockaddr>();
        // SAFETY: the pointer is to `length` bytes of an address that lives past the call.
        let bound = unsafe { libc::bind(fd.as_raw_fd(), pointer, length) };
        if bound < 0 {
            return Err(io::Error::last_os_error());
        }
        let device = Self::of(File::from(fd), name, index, lane);
        device.ignore_outgoing();
        Ok(device)
    }

    fn of(file: File, name: &str, index: u32, lane: Lane) -> Self {
        let (waiting, ends, scratch) = (Vec::new(), Vec::new(), Vec::new());
        let (mtu, name) = (mtu(name), name.to_owned());
        Self { file, name, index, lane, _all: None, mtu, waiting, ends, missed: 0, scratch }
    }

    /// Our own packets are not received again; a kernel without the option shows them.
    fn ignore_outgoing(&self) {
        const PACKET_IGNORE_OUTGOING: i32 = 23;
        let one = 1_i32;
        let length = u32::try_from(size_of::<i32>()).unwrap_or(0);
        let pointer = (&raw const one).cast::<libc::c_void>();
        let fd = self.file.as_raw_fd();
        // SAFETY: the pointer is to an integer of `length` bytes that lives past the call.
        unsafe { libc::setsockopt(fd, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, pointer, length) };
    }

    /// A TAP device of that name, made if it is missing.
    ///
    /// Errors: no right to make one; a name that is too long.
    pub fn tap(name: &str) -> io::Result<Self> {
        let file = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
        // SAFETY: all bits zero are a valid ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        let flags = libc::IFF_TAP | libc::IFF_NO_PI;
        request.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap_or(0);
        // SAFETY: the request is a whole ifreq that lives past the call.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        rustix::io::ioctl_fionbio(&file, true)?;
        Ok(Self::of(file, name, 0, Lane::Calls))
    }

    /// Looks whether the interface is still there; one that was made anew is opened. A TAP device that
    /// was taken away is made anew.
    ///
    /// Errors: the new one cannot be opened, now; another look may find it.
    pub fn look(&mut self) -> io::Result<Fate> {
        if self.index == 0 {
            let mut request = named("");
            let fd = self.file.as_raw_fd();
            // SAFETY: the request is a whole ifreq that lives past the call.
            if unsafe { libc::ioctl(fd, libc::TUNGETIFF, &raw mut request) } == 0 {
                return Ok(Fate::Here);
            }
            *self = Self::tap(&self.name)?;
            return Ok(Fate::Replaced);
        }
        match index_of(&self.name) {
            Err(_) => Ok(Fate::Gone),
            Ok(index) if index == self.index => {
                Ok(if is_up(&self.name) { Fate::Here } else { Fate::Down })
            }
            Ok(_) => {
                *self = match &self.lane {
                    Lane::Express(express) => Self::express(&self.name, Some(express.number))?,
                    Lane::Ring(_) => Self::ringed(&self.name)?,
                    Lane::Calls => Self::open(&self.name, false)?,
                };
                Ok(Fate::Replaced)
            }
        }
    }

    /// The next packet, if there is one; its bytes in `buffer`.
    ///
    /// Errors: the device is down or gone.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        if let Lane::Express(express) = &mut self.lane {
            if !express.take(&mut self.scratch) {
                return Ok(None);
            }
            let count = self.scratch.len().min(buffer.len());
            buffer[..count].copy_from_slice(&self.scratch[..count]);
            return Ok(Some(count));
        }
        match self.file.read(buffer) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the next packet, if there is one, into `packet`.
    ///
    /// Errors: the device is down or gone.
    pub fn take(&mut self, packet: &mut Vec<u8>) -> io::Result<bool> {
        let (tag, unsummed) = match &mut self.lane {
            Lane::Express(express) => return Ok(express.take(packet)),
            Lane::Ring(ring) => match ring.take(packet) {
                Frame::Nothing => return Ok(false),
                Frame::Packet => return Ok(true),
                Frame::Longer(tag, unsummed) => (tag, unsummed),
                Frame::Cut => {
                    self.missed += 1;
                    return Ok(false);
                }
            },
            Lane::Calls => (None, false),
        };
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(LONGEST, 0);
        let count = self.receive(&mut scratch);
        packet.clear();
        if let Ok(Some(count)) = &count {
            packet.extend_from_slice(&scratch[..*count]);
        }
        self.scratch = scratch;
        if unsummed {
            checksum::complete(packet);
        }
        insert(packet, tag);
        Ok(count?.is_some())
    }

    /// When the last packet that [`Device::take`] gave came, by the kernel's clock, in nanoseconds
    /// since 1970; 0 where packets come without a ring.
    #[must_use]
    pub fn stamp_ns(&self) -> u64 {
        match &self.lane {
            Lane::Ring(ring) => ring.stamp_ns,
            Lane::Calls | Lane::Express(_) => 0,
        }
    }

    /// An error that waits at the socket: the interface went down, or away. A ring does not tell.
    pub fn socket_error(&self) -> Option<io::Error> {
        if self.index == 0 {
            return None;
        }
        let error = rustix::net::sockopt::socket_error(&self.file).ok()?;
        error.err().map(Into::into)
    }

    /// Puts a packet behind those that wait to be sent; sends them where they are many.
    pub fn queue(&mut self, packet: &[u8]) -> Sent {
        if let Lane::Express(express) = &mut self.lane {
            return express.queue(packet, BATCH_EXPRESS);
        }
        if self.mtu > 0 && packet.len() > self.mtu + 14 {
            let mut sent = Sent::default();
            let cut = segments(packet, self.mtu, |part| {
                let more = self.queue_one(part);
                sent.sent += more.sent;
                sent.refused += more.refused;
                sent.error = more.error.or(sent.error.take());
            });
            if cut {
                return sent;
            }
        }
        self.queue_one(packet)
    }

    fn queue_one(&mut self, packet: &[u8]) -> Sent {
        self.waiting.extend_from_slice(packet);
        self.ends.push(self.waiting.len());
        if self.ends.len() >= BATCH { self.flush() } else { Sent::default() }
    }

    /// Sends what waits. A packet that the device does not take is dropped; the others go on.
    pub fn flush(&mut self) -> Sent {
        if let Lane::Express(express) = &mut self.lane {
            return express.flush();
        }
        let mut sent = Sent::default();
        let (waiting, ends) = (std::mem::take(&mut self.waiting), std::mem::take(&mut self.ends));
        let mut done = 0;
        while done < ends.len() {
            let first = done.checked_sub(1).map_or(0, |before| ends[before]);
            let outcome = if self.index == 0 {
                self.send(&waiting[first..ends[done]]).map(usize::from)
            } else {
                self.send_several(&waiting, first, &ends[done..])
            };
            match outcome {
                Ok(0) => {
                    sent.refused += 1;
                    done += 1;
                }
                Ok(count) => {
                    sent.sent += count as u64;
                    done += count;
                }
                Err(error) => {
                    (sent.refused, sent.error) = (sent.refused + 1, Some(error));
                    done += 1;
                }
            }
        }
        // Their memory is used again.
        (self.waiting, self.ends) = (waiting, ends);
        self.waiting.clear();
        self.ends.clear();
        sent
    }

    /// Sends packets that lie in a row by one call; how many went. None without room.
    fn send_several(&self, bytes: &[u8], first: usize, ends: &[usize]) -> io::Result<usize> {
        // SAFETY: all bits zero are a valid iovec, and a valid mmsghdr.
        let mut parts: [libc::iovec; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        let count = ends.len().min(BATCH);
        let mut from = first;
        for ((part, message), end) in parts.iter_mut().zip(&mut messages).zip(ends) {
            let packet = &bytes[from..*end];
            part.iov_base = packet.as_ptr().cast_mut().cast();
            part.iov_len = packet.len();
            message.msg_hdr.msg_iov = part;
            message.msg_hdr.msg_iovlen = 1;
            from = *end;
        }
        let number = u32::try_from(count).unwrap_or(0);
        let fd = self.file.as_raw_fd();
        // SAFETY: `number` messages, each of one part of `bytes`; all live past the call, which reads
        // the bytes and writes the messages' lengths.
        let sent = unsafe { libc::sendmmsg(fd, messages.as_mut_ptr(), number, 0) };
        match usize::try_from(sent) {
            Ok(sent) => Ok(sent),
            Err(_) => match io::Error::last_os_error() {
                error if lacks_room(&error) => Ok(0),
                error => Err(error),
            },
        }
    }

    /// Packets so far that came and found the ring, or the socket, full.
    pub fn missed(&mut self) -> u64 {
        if let Lane::Express(express) = &self.lane {
            return self.missed + express.missed();
        }
        if self.index != 0 {
            let mut counters = [0_u32; 2];
            let mut length = u32::try_from(size_of_val(&counters)).unwrap_or(0);
            let pointer = counters.as_mut_ptr().cast::<libc::c_void>();
            let (fd, name) = (self.file.as_raw_fd(), libc::PACKET_STATISTICS);
            // SAFETY: the pointers are to `length` bytes of integers and to their length, which live
            // past the call.
            let asked =
                unsafe { libc::getsockopt(fd, libc::SOL_PACKET, name, pointer, &raw mut length) };
            // The kernel begins anew with each look.
            if asked == 0 {
                self.missed += u64::from(counters[1]);
            }
        }
        self.missed
    }

    /// Sends a packet; false where the device has no room now.
    ///
    /// Errors: the device is down or gone, or the packet is too long for it.
    pub fn send(&mut self, packet: &[u8]) -> io::Result<bool> {
        if let Lane::Express(express) = &mut self.lane {
            let sent = express.queue(packet, 1);
            return sent.error.map_or(Ok(sent.sent == 1), Err);
        }
        match self.file.write(packet) {
            Ok(_) => Ok(true),
            Err(error) if lacks_room(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn lacks_room(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(libc::ENOBUFS)
}

impl std::os::fd::AsFd for Device {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}
