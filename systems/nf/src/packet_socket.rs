//! Raw packets of a network interface, through a packet socket; and TAP devices.
//!
//! This module holds the crate's unsafe code: a bind whose address the standard library does not
//! know, and one device control call.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// Packets of an interface.
#[derive(Debug)]
pub struct Device {
    file: File,
    /// What it is, for messages.
    pub name: String,
    /// The interface's number; 0 for a TAP device, which goes with its descriptor.
    index: u32,
}

/// What became of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is there, perhaps down.
    Here,
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

impl Device {
    /// A packet socket on an interface, receiving everything that arrives there.
    ///
    /// Errors: no such interface; no right to open a packet socket.
    pub fn interface(name: &str) -> io::Result<Self> {
        let index = index_of(name)?;
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: a call without pointers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, i32::from(ALL)) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made by the call above and belongs to nothing else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
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
        let device = Self { file: File::from(fd), name: name.to_owned(), index };
        device.ignore_outgoing();
        Ok(device)
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
        Ok(Self { file, name: name.to_owned(), index: 0 })
    }

    /// Looks whether the interface is still there; one that was made anew is opened.
    ///
    /// Errors: the new one cannot be opened.
    pub fn look(&mut self) -> io::Result<Fate> {
        if self.index == 0 {
            return Ok(Fate::Here);
        }
        match index_of(&self.name) {
            Err(_) => Ok(Fate::Gone),
            Ok(index) if index == self.index => Ok(Fate::Here),
            Ok(_) => {
                *self = Self::interface(&self.name)?;
                Ok(Fate::Replaced)
            }
        }
    }

    /// The next packet, if there is one; its bytes in `buffer`.
    ///
    /// Errors: the device is down or gone.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match self.file.read(buffer) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a packet; false where the device has no room now.
    ///
    /// Errors: the device is down or gone, or the packet is too long for it.
    pub fn send(&mut self, packet: &[u8]) -> io::Result<bool> {
        match self.file.write(packet) {
            Ok(_) => Ok(true),
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock
                    || error.raw_os_error() == Some(libc::ENOBUFS) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

impl std::os::fd::AsFd for Device {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}
