//! A connection for a program that has no library: a process that carries its bytes.
//!
//! A static or set-uid program that gets a connection of ours by `exec` would read doorbells. So
//! before such an `exec` its descriptors are replaced by one end of a Unix socket pair, and a process
//! of its own, which has the library's memory, carries bytes between the other end and the rings.
//! The program sees a stream socket with the same bytes and the same ends; its names and TCP
//! options are another matter.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use crate::connection::{self, Connection};
use crate::kernel::{self, Errno};
use crate::{between, poll, receive, send, table};

/// Bytes carried at a time.
const BLOCK: usize = 64 << 10;

/// Replaces `numbers`, which all are `connection`, for the program that the next `exec` brings. One
/// carrier for all of them: two would take each other's bytes.
///
/// Errors: the kernel's, of making a process or a descriptor; nothing is replaced then.
pub fn replace(numbers: &[RawFd], connection: &'static Connection) -> Result<(), Errno> {
    let Some(&fd) = numbers.first() else { return Ok(()) };
    connection.segment.own().sharing.processes.store(1, Ordering::SeqCst);
    connection.forget_blocking_mode();
    let blocks = connection.blocks(fd);
    let [near, far] = kernel::socket_pair()?;
    // SAFETY: the child goes on in `carry_on` and ends there, or here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // The carrier is nobody's child, so that nobody waits for it.
        // SAFETY: as above.
        let carrier = unsafe { libc::fork() };
        if carrier == 0 {
            kernel::be_alone([fd, near]);
            carry_on(fd, connection, near);
        }
        kernel::exit(i32::from(carrier < 0));
    }
    let made = child > 0 && kernel::wait_for(child);
    let _ = kernel::close(near);
    let mut outcome = if made { Ok(()) } else { Err(Errno(libc::EAGAIN)) };
    for &number in numbers.iter().take_while(|_| made) {
        outcome = outcome.and(kernel::duplicate_onto(far, number, blocks).map(|_| ()));
        if !table::is_foreign_process() && table::forget(number).is_some() {
            between::handed_to_carrier(connection);
        }
    }
    let _ = kernel::close(far);
    outcome
}

/// Bytes on their way in one direction.
struct Way {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    /// The source said end; the target has not heard of it.
    ended: bool,
    over: bool,
}

impl Way {
    fn new() -> Self {
        Self { bytes: vec![0; BLOCK], from: 0, to: 0, ended: false, over: false }
    }

    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// One step; false when the target takes no more, ever.
    fn step(
        &mut self,
        mut take: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
        mut give: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
        mut end: impl FnMut(),
    ) -> bool {
        if self.is_empty() && !self.ended {
            match take(&mut self.bytes) {
                Ok(0) => self.ended = true,
                Ok(count) => (self.from, self.to) = (0, count),
                Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
                Err(_) => self.ended = true,
            }
        }
        while !self.is_empty() {
            match give(self.bytes.get_mut(self.from..self.to).unwrap_or_default()) {
                Ok(count) => self.from += count,
                Err(Errno(libc::EAGAIN | libc::EINTR)) => break,
                Err(_) => return false,
            }
        }
        if self.ended && self.is_empty() && !self.over {
            self.over = true;
            end();
        }
        true
    }
}

/// Carries until both directions are over, then ends this process.
fn carry_on(fd: RawFd, connection: &'static Connection, near: RawFd) -> ! {
    const QUIET: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let piece = |bytes: &mut [u8]| {
        [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }]
    };
    let (mut inward, mut outward) = (Way::new(), Way::new());
    loop {
        let inward_goes = inward.step(
            // SAFETY: our own buffer, as long as told.
            |bytes| unsafe { receive::receive(fd, connection, &piece(bytes), QUIET) },
            |bytes| kernel::send(near, bytes, QUIET),
            || {
                let _ = kernel::shutdown(near, libc::SHUT_WR);
            },
        );
        let outward_goes = outward.step(
            |bytes| kernel::receive(near, bytes, QUIET),
            // SAFETY: as above.
            |bytes| unsafe { send::send(fd, connection, &piece(bytes), QUIET) },
            || {
                let _ = connection::shutdown(fd, connection, libc::SHUT_WR);
            },
        );
        if !inward_goes || !outward_goes || inward.over && outward.over {
            break;
        }
        let wants = |reads: &Way, writes: &Way| {
            let reading = if reads.is_empty() && !reads.ended { libc::POLLIN } else { 0 };
            reading | if writes.is_empty() { 0 } else { libc::POLLOUT }
        };
        let mut entries = [
            libc::pollfd { fd, events: wants(&inward, &outward), revents: 0 },
            libc::pollfd { fd: near, events: wants(&outward, &inward), revents: 0 },
        ];
        // Asked nothing, it would only tell of its end again and again.
        if entries[0].events == 0 {
            entries[0].fd = -1;
        }
        if poll::poll(&mut entries, None, None).is_none() {
            let _ = kernel::poll_many(&mut entries, None, None);
        }
        // The program is gone, and all it said was carried.
        if entries[1].revents & (libc::POLLHUP | libc::POLLERR) != 0 && outward.ended {
            break;
        }
    }
    connection::closing(fd);
    let _ = kernel::close(fd);
    kernel::exit(0)
}
