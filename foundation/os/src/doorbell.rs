//! Doorbells: a socket pair through which two processes wake each other.
//!
//! Not an eventfd ([`crate::poller::Waker`]): its ends would share one open file, so a hostile peer could clear `O_NONBLOCK`,
//! fill the counter and leave our next write blocked for good. The ends of a socket pair are two
//! files, and `MSG_DONTWAIT` is a property of our call.
//!
//! Invariants: no call here blocks; rings coalesce until cleared; a ring says "look", never "there
//! is something".

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// One end.
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

/// What [`Doorbell::clear`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// Nobody rang.
    No,
    /// Somebody rang.
    Yes,
    /// The other end is gone; the descriptor stays readable for good.
    Closed,
}

impl Doorbell {
    /// Two connected ends.
    ///
    /// Errors: the kernel's (descriptor limit).
    pub fn pair() -> std::io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (left, right) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        Ok((Self(left), Self(right)))
    }

    /// Takes over an end received from a peer.
    ///
    /// Errors: `InvalidData` when it is not a Unix stream socket.
    pub fn from_peer(descriptor: OwnedFd) -> std::io::Result<Self> {
        let is_unix = rustix::net::sockopt::socket_domain(&descriptor)? == AddressFamily::UNIX;
        let is_stream = rustix::net::sockopt::socket_type(&descriptor)? == SocketType::STREAM;
        if is_unix && is_stream {
            Ok(Self(descriptor))
        } else {
            Err(std::io::ErrorKind::InvalidData.into())
        }
    }

    /// Makes the other end readable. One system call.
    pub fn ring(&self) {
        // A full buffer means readable already; a closed end is noticed by its own signs.
        let _ = rustix::net::send(&self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Takes the rings that waited; says whether there were any. A peer that rings without pause
    /// costs a bounded number of calls.
    #[must_use]
    pub fn clear(&self) -> Rung {
        let mut rings = [0_u8; 256];
        match rustix::net::recv(&self.0, &mut rings[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Rung::Closed,
            Ok(_) => Rung::Yes,
            Err(Errno::AGAIN | Errno::INTR) => Rung::No,
            Err(_) => Rung::Closed,
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Doorbell> for OwnedFd {
    fn from(doorbell: Doorbell) -> Self {
        doorbell.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_coalesce_and_a_closed_end_is_told() {
        let (left, right) = Doorbell::pair().unwrap();
        assert_eq!(right.clear(), Rung::No);
        left.ring();
        left.ring();
        assert_eq!(right.clear(), Rung::Yes);
        assert_eq!(right.clear(), Rung::No);
        drop(left);
        assert_eq!(right.clear(), Rung::Closed);
        right.ring();
    }

    #[test]
    fn ringing_a_peer_that_never_clears_does_not_block() {
        let (left, _right) = Doorbell::pair().unwrap();
        for _ in 0..100_000 {
            left.ring();
        }
    }

    #[test]
    fn something_else_than_a_socket_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(Doorbell::from_peer(file.into()).is_err());
    }
}
