//! Unix control sockets: short records with descriptors, between two processes of one host.
//!
//! Sockets are `SOCK_SEQPACKET`, in the abstract namespace or at a file's path: record boundaries are kept, a
//! peer's death is end-of-file. Everything received is hostile: a record
//! longer than the caller's buffer, or with more descriptors than [`MAX_DESCRIPTORS`], is an
//! error, and descriptors nobody asked for are closed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most descriptors one record may carry.
pub const MAX_DESCRIPTORS: usize = 4;

#[expect(clippy::cast_possible_truncation, reason = "twelve bytes")]
const LENGTH_OF_CREDENTIALS: libc::socklen_t = size_of::<libc::ucred>() as libc::socklen_t;

/// Who is at the other end, as the kernel recorded it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process; 0 when it is outside our process namespace.
    pub pid: i32,
    /// Effective user.
    pub uid: u32,
}

/// One received record.
#[derive(Debug)]
pub enum Received {
    /// A record of this many bytes.
    Record(usize),
    /// Nothing there now.
    Empty,
    /// The other end closed or died.
    Closed,
}

/// A socket that accepts connections to an abstract name.
#[derive(Debug)]
pub struct ControlListener(OwnedFd);

/// One connected end.
#[derive(Debug)]
pub struct ControlSocket(OwnedFd);

fn socket() -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

impl ControlListener {
    /// Listens on abstract name `name` (at most 107 bytes).
    ///
    /// Errors: `AddrInUse`; the kernel's otherwise.
    pub fn bind(name: &[u8]) -> std::io::Result<Self> {
        let fd = socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name)?)?;
        rustix::net::listen(&fd, 4096)?;
        Ok(Self(fd))
    }

    /// Listens on the file `path`, that processes with the rights `mode` gives may open. A socket
    /// file that is left there from before is replaced.
    ///
    /// Errors: the kernel's, as `PermissionDenied` or a path over 107 bytes.
    pub fn bind_path(path: &std::path::Path, mode: u32) -> std::io::Result<Self> {
        let fd = socket()?;
        let address = SocketAddrUnix::new(path)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        rustix::net::bind(&fd, &address)?;
        // Before `listen`, so that nobody gets in under other rights.
        rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(mode))?;
        rustix::net::listen(&fd, 4096)?;
        Ok(Self(fd))
    }

    /// The next waiting connection, if there is one. Never blocks.
    ///
    /// Errors: the kernel's (descriptor limit).
    pub fn accept(&self) -> std::io::Result<Option<ControlSocket>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.0, flags) {
            Ok(fd) => Ok(Some(ControlSocket(fd))),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// At most `most` of the connections that wait: anybody may connect to an abstract name, and whoever
    /// does it without end keeps nobody here.
    pub fn waiting(&self, most: usize) -> impl Iterator<Item = ControlSocket> {
        std::iter::from_fn(|| self.accept().ok().flatten()).take(most)
    }
}

impl AsFd for ControlListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ControlSocket {
    /// Connects to abstract name `name`. Never blocks.
    ///
    /// Errors: `ConnectionRefused` when nobody listens; `WouldBlock` when the listener's backlog
    /// is full (retry later).
    pub fn connect(name: &[u8]) -> std::io::Result<Self> {
        let fd = socket()?;
        rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name)?)?;
        Ok(Self(fd))
    }

    /// Connects to the listener at the file `path`. Never blocks.
    ///
    /// Errors: `NotFound`, `PermissionDenied`, `ConnectionRefused`; `WouldBlock` when the
    /// listener's backlog is full (retry later).
    pub fn connect_path(path: &std::path::Path) -> std::io::Result<Self> {
        let fd = socket()?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self(fd))
    }

    /// Two connected ends.
    ///
    /// Errors: the kernel's (descriptor limit).
    pub fn pair() -> std::io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(one), Self(other)))
    }

    /// An end that another process made with [`ControlSocket::pair`].
    ///
    /// Errors: `InvalidInput` for a descriptor of another kind.
    pub fn from_peer(end: OwnedFd) -> std::io::Result<Self> {
        let kind = rustix::net::sockopt::socket_type(&end);
        if kind != Ok(SocketType::SEQPACKET) {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        Ok(Self(end))
    }

    /// The descriptor, for another process.
    #[must_use]
    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }

    /// Who is at the other end. `pid` is 0 for a process outside our process namespace.
    ///
    /// Errors: the kernel's.
    pub fn peer(&self) -> std::io::Result<PeerCredentials> {
        // Not rustix's wrapper: its process number cannot be zero, the kernel's can.
        let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = LENGTH_OF_CREDENTIALS;
        // SAFETY: the kernel writes at most `length` bytes of a plain C structure that outlives
        // the call.
        let outcome = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut credentials).cast(),
                &raw mut length,
            )
        };
        if outcome != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(PeerCredentials { pid: credentials.pid, uid: credentials.uid })
    }

    /// Sends one record with up to [`MAX_DESCRIPTORS`] descriptors. Never blocks.
    ///
    /// Errors: `WouldBlock` when the peer does not read; `BrokenPipe` when it is gone.
    pub fn send(&self, record: &[u8], descriptors: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        assert!(descriptors.len() <= MAX_DESCRIPTORS, "a record carries few descriptors");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let pushed = control.push(SendAncillaryMessage::ScmRights(descriptors));
            assert!(pushed, "the buffer holds the largest number of descriptors");
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&self.0, &[IoSlice::new(record)], &mut control, flags)?;
        Ok(())
    }

    /// Receives one record into `record` and its descriptors into `descriptors` (which is
    /// cleared). Never blocks.
    ///
    /// Errors: `InvalidData` for a record longer than the buffer or with too many descriptors;
    /// the kernel's.
    pub fn receive(
        &self,
        record: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> std::io::Result<Received> {
        descriptors.clear();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut slices = [IoSliceMut::new(record)];
        let outcome = rustix::net::recvmsg(&self.0, &mut slices, &mut control, flags);
        let received = match outcome {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Empty),
            Err(Errno::CONNRESET) => return Ok(Received::Closed),
            Err(error) => return Err(error.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            descriptors.clear();
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        // A sequenced-packet socket reports end-of-file as an empty record; nobody sends empty
        // records on purpose.
        Ok(if received.bytes == 0 { Received::Closed } else { Received::Record(received.bytes) })
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(name: &str) -> (ControlSocket, ControlSocket) {
        let name = format!("beeline-test-{name}-{}", std::process::id());
        let listener = ControlListener::bind(name.as_bytes()).unwrap();
        let dialled = ControlSocket::connect(name.as_bytes()).unwrap();
        let accepted = listener.accept().unwrap().unwrap();
        (dialled, accepted)
    }

    #[test]
    fn a_record_carries_bytes_and_descriptors() {
        let (left, right) = pair("carry");
        let (event, other) = crate::doorbell::Doorbell::pair().unwrap();
        left.send(b"hello", &[event.as_fd()]).unwrap();
        let (mut record, mut fds) = ([0; 16], Vec::new());
        let Received::Record(length) = right.receive(&mut record, &mut fds).unwrap() else {
            panic!("a record was sent")
        };
        assert_eq!(&record[..length], b"hello");
        assert_eq!(fds.len(), 1);
        crate::doorbell::Doorbell::from_peer(fds.pop().unwrap()).unwrap().ring();
        assert_eq!(other.clear(), crate::doorbell::Rung::Yes);
    }

    #[test]
    fn an_end_of_a_pair_is_taken_for_one_and_another_descriptor_is_not() {
        let (left, right) = ControlSocket::pair().unwrap();
        let right = ControlSocket::from_peer(right.into_descriptor()).unwrap();
        left.send(b"through", &[]).unwrap();
        let (mut record, mut fds) = ([0; 16], Vec::new());
        assert!(matches!(right.receive(&mut record, &mut fds).unwrap(), Received::Record(7)));
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(ControlSocket::from_peer(file.into()).is_err());
    }

    #[test]
    fn an_over_long_record_is_an_error_and_a_closed_end_is_told() {
        let (left, right) = pair("long");
        left.send(&[7; 64], &[]).unwrap();
        let (mut record, mut fds) = ([0; 16], Vec::new());
        assert!(right.receive(&mut record, &mut fds).is_err());
        assert!(matches!(right.receive(&mut record, &mut fds).unwrap(), Received::Empty));
        drop(left);
        assert!(matches!(right.receive(&mut record, &mut fds).unwrap(), Received::Closed));
    }

    #[test]
    fn the_peer_is_known_by_its_process() {
        let (left, _right) = pair("peer");
        assert_eq!(left.peer().unwrap().pid, i32::try_from(std::process::id()).unwrap());
    }
}
