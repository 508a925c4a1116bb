//! A stream socket moved with raw pointers.
//!
//! Registered memory may be written by peers at any moment, so it is never a `&[u8]`: the calls
//! here take address and length, and the kernel does the copying. The descriptor is in blocking
//! mode (a sleeping receive costs one call); every call that must not sleep says `MSG_DONTWAIT`.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use beeline_fabric_engine::stream::{BLOCKING_SLICE, Moved, Part, Stream};
use rustix::net::sockopt;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};

#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

fn outcome(result: isize) -> Moved {
    match usize::try_from(result) {
        Ok(0) => Moved::Closed,
        Ok(bytes) => Moved::Bytes(bytes),
        Err(_) => match io::Error::last_os_error().kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Moved::Later,
            _ => Moved::Closed,
        },
    }
}

impl Socket {
    /// Begins to connect; [`Socket::connected`] tells when it has.
    pub(crate) fn dial(address: SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&fd, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok(Self(fd)),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes over an accepted descriptor.
    pub(crate) fn accepted(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl Stream for Socket {
    fn readiness(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn can_sleep(&self) -> bool {
        true
    }

    /// Also turns to blocking mode.
    fn prepare(&mut self, transport_timeout: Duration) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&self.0, false)?;
        sockopt::set_tcp_nodelay(&self.0, true)?;
        sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Recv, Some(BLOCKING_SLICE))?;
        // A host that vanished while nothing is outstanding is found by the kernel.
        sockopt::set_socket_keepalive(&self.0, true)?;
        sockopt::set_tcp_keepidle(&self.0, Duration::from_secs(10))?;
        sockopt::set_tcp_keepintvl(&self.0, Duration::from_secs(3))?;
        sockopt::set_tcp_keepcnt(&self.0, 3)?;
        let bound = u32::try_from(transport_timeout.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&self.0, bound.max(1000))?;
        Ok(())
    }

    fn connected(&mut self) -> Option<io::Result<()>> {
        let mut fds = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::OUT)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        match rustix::event::poll(&mut fds, Some(&now)) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(match sockopt::socket_error(&self.0) {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) | Err(error) => Err(error.into()),
            }),
        }
    }

    fn available(&mut self) -> usize {
        rustix::io::ioctl_fionread(&self.0).map_or(0, |bytes| usize::try_from(bytes).unwrap_or(0))
    }

    unsafe fn receive(&mut self, parts: &mut [Part], sleep: bool) -> Moved {
        let flags = if sleep { 0 } else { libc::MSG_DONTWAIT };
        if let [single] = parts {
            // SAFETY: the caller vouches for the memory; the descriptor is open.
            return outcome(unsafe {
                libc::recv(self.0.as_raw_fd(), single.iov_base, single.iov_len, flags)
            });
        }
        // SAFETY: all-zero is a valid msghdr: no address, no parts, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len();
        // SAFETY: the message points at `parts`, whose memory the caller vouches for.
        outcome(unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, flags) })
    }

    unsafe fn send(&mut self, parts: &mut [Part]) -> Moved {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        if let [single] = parts {
            // SAFETY: the caller vouches for the memory; the descriptor is open.
            return outcome(unsafe {
                libc::send(self.0.as_raw_fd(), single.iov_base, single.iov_len, flags)
            });
        }
        // SAFETY: all-zero is a valid msghdr: no address, no parts, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len();
        // SAFETY: the message points at `parts`, whose memory the caller vouches for.
        outcome(unsafe { libc::sendmsg(self.0.as_raw_fd(), &raw const message, flags) })
    }

    fn finish_sending(&mut self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Write);
    }

    /// A thread sleeping in `receive` wakes.
    fn shut_down(&mut self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}
