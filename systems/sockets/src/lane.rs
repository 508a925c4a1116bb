//! What carries a connection: the line between what a connection *is* (bytes, an end, readiness,
//! death) and what moves its bytes.
//!
//! Two lanes stand behind the same calls: *rings* in shared memory beside a kernel connection
//! ([`crate::connection`]), and *packets* through the proxy of this host ([`crate::packets`]). The
//! preload library and the table know a [`Lane`]; each lane knows nothing of the other.

use std::net::SocketAddr;
use std::os::fd::RawFd;

use crate::connection::{self, Connection};
use crate::kernel::{Errno, Outcome};
use crate::table::{self, Kind};
use crate::{packets, receive, send};

/// What the calls of a program ask of a connection.
pub trait Carries {
    /// Receives as `recvmsg` would.
    ///
    /// Errors: `errno` as the kernel's sockets have it.
    ///
    /// # Safety
    ///
    /// Each piece is writable memory of the program's.
    unsafe fn receive(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome;

    /// Sends as `sendmsg` would.
    ///
    /// Errors: as [`Carries::receive`].
    ///
    /// # Safety
    ///
    /// Each piece is readable memory of the program's.
    unsafe fn send(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome;

    /// `shutdown`.
    ///
    /// Errors: as the kernel's.
    fn shutdown(&self, fd: RawFd, how: i32) -> Outcome;

    /// The error that the program has not heard of (`SO_ERROR`), if any.
    fn take_error(&self) -> Option<Errno>;

    /// The program may have changed whether calls block.
    fn forget_blocking_mode(&self);

    /// Its own address, or the peer's, where the descriptor does not know it.
    fn address(&self, peer: bool) -> Option<SocketAddr>;
}

impl Carries for Connection {
    unsafe fn receive(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { receive::receive(fd, self, pieces, flags) }
    }

    unsafe fn send(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { send::send(fd, self, pieces, flags) }
    }

    fn shutdown(&self, fd: RawFd, how: i32) -> Outcome {
        connection::shutdown(fd, self, how)
    }

    fn take_error(&self) -> Option<Errno> {
        receive::take_error(self)
    }

    fn forget_blocking_mode(&self) {
        Self::forget_blocking_mode(self);
    }

    fn address(&self, _: bool) -> Option<SocketAddr> {
        None
    }
}

impl Carries for packets::Connection {
    unsafe fn receive(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { Self::receive(self, fd, pieces, flags) }
    }

    unsafe fn send(&self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        // SAFETY: the caller's contract.
        unsafe { Self::send(self, fd, pieces, flags) }
    }

    fn shutdown(&self, fd: RawFd, how: i32) -> Outcome {
        Self::shutdown(self, fd, how)
    }

    fn take_error(&self) -> Option<Errno> {
        Self::take_error(self)
    }

    fn forget_blocking_mode(&self) {
        Self::forget_blocking_mode(self);
    }

    fn address(&self, peer: bool) -> Option<SocketAddr> {
        self.channel.addresses().map(|[own, other]| if peer { other } else { own })
    }
}

/// Which lane has a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum Lane {
    /// Rings in shared memory.
    Rings(&'static Connection),
    /// Packets through the proxy.
    Packets(&'static packets::Connection),
}

impl Lane {
    /// The connection, whatever carries it.
    #[must_use]
    pub fn carries(self) -> &'static dyn Carries {
        match self {
            Self::Rings(connection) => connection,
            Self::Packets(connection) => connection,
        }
    }

    /// As [`Carries::receive`], without a table of functions in between.
    ///
    /// Errors: as there.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline]
    pub unsafe fn receive(self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        match self {
            // SAFETY: the caller's contract.
            Self::Rings(connection) => unsafe { Carries::receive(connection, fd, pieces, flags) },
            // SAFETY: the caller's contract.
            Self::Packets(connection) => unsafe { Carries::receive(connection, fd, pieces, flags) },
        }
    }

    /// As [`Carries::send`], without a table of functions in between.
    ///
    /// Errors: as there.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline]
    pub unsafe fn send(self, fd: RawFd, pieces: &[libc::iovec], flags: i32) -> Outcome {
        match self {
            // SAFETY: the caller's contract.
            Self::Rings(connection) => unsafe { Carries::send(connection, fd, pieces, flags) },
            // SAFETY: the caller's contract.
            Self::Packets(connection) => unsafe { Carries::send(connection, fd, pieces, flags) },
        }
    }
}

/// The connection behind `fd`, for a call that young connections do not count: such a one asks now.
#[must_use]
pub fn find(fd: RawFd) -> Option<Lane> {
    match table::kind(fd) {
        Kind::Packets(connection) => Some(Lane::Packets(connection)),
        _ => connection::find(fd).map(Lane::Rings),
    }
}

/// As [`find`], for who only looks at `fd`: one that is young stays so.
#[must_use]
pub fn look(fd: RawFd) -> Option<Lane> {
    match table::kind(fd) {
        Kind::Packets(connection) => Some(Lane::Packets(connection)),
        _ => connection::look(fd).map(Lane::Rings),
    }
}
