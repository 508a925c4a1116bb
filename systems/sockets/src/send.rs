//! Sending.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_os::barrier;

use crate::connection::{Connection, hold};
use crate::kernel::{self, Errno, Outcome};
use crate::receive::{corrupt, rest_of, room, take_error};
use crate::ring::Corrupt;

/// Every so many sends the kernel is asked whether the other end is alive.
const BLIND_SENDS: u64 = 256 << 10;

/// What one try did.
enum Step {
    /// So many bytes went into the ring.
    Ring(usize),
    /// So many bytes went through the kernel.
    Kernel(usize),
    /// The kernel has no room.
    KernelFull,
}

/// Sends the program's `pieces` as `sendmsg` would.
///
/// Errors: `errno` as the kernel's sockets have it; `EOPNOTSUPP` for urgent data.
///
/// # Safety
///
/// Each piece is readable memory of the program's (unlike the kernel, we cannot refuse an address
/// that is not mapped).
pub unsafe fn send(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    flags: i32,
) -> Outcome {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let wanted = room(pieces);
    let mut total = 0;
    loop {
        let held = hold(&connection.segment.own().sending.holder)?;
        // SAFETY: the caller's contract.
        let step = unsafe { try_send(fd, connection, pieces, total, flags) };
        drop(held);
        let full_of = match step {
            Ok(Step::Ring(count)) => {
                if count > 0 {
                    connection.wake(fd, &connection.segment.other().signs.receive_armed);
                }
                total += count;
                Full::Ring
            }
            Ok(Step::Kernel(count)) => {
                connection.waited_for_other_end(fd);
                total += count;
                Full::Not
            }
            Ok(Step::KernelFull) => Full::Kernel,
            Err(error) => return if total > 0 { Ok(total) } else { Err(error) },
        };
        if total >= wanted {
            return Ok(total);
        }
        connection.was_full.store(true, Ordering::Relaxed);
        if flags & libc::MSG_DONTWAIT != 0 || !connection.blocks(fd) {
            return if total > 0 { Ok(total) } else { Err(Errno(libc::EAGAIN)) };
        }
        let outcome = match full_of {
            Full::Ring => wait(fd, connection, total > 0),
            Full::Kernel => wait_kernel(fd),
            Full::Not => Ok(()),
        };
        if let Err(error) = outcome {
            return if total > 0 { Ok(total) } else { Err(error) };
        }
    }
}

/// What to wait for.
enum Full {
    Ring,
    Kernel,
    Not,
}

/// One try. The caller holds the sending half.
unsafe fn try_send(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    skip: usize,
    flags: i32,
) -> Result<Step, Errno> {
    let (own, other) = (connection.segment.own(), connection.segment.other());
    if own.signs.finished.load(Ordering::Relaxed) != 0 {
        if let Some(error) = take_error(connection) {
            return Err(error);
        }
        if flags & libc::MSG_NOSIGNAL == 0 {
            kernel::raise(libc::SIGPIPE);
        }
        return Err(Errno(libc::EPIPE));
    }
    if let Some(error) = take_error(connection) {
        return Err(error);
    }
    let mut rest = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];
    let by_ring = connection.sends_by_ring();
    let over = by_ring
        && (connection.kernel_ended.load(Ordering::Relaxed)
            || other.signs.closed.load(Ordering::Relaxed) != 0);
    if !by_ring || over {
        let count = rest_of(pieces, skip, &mut rest);
        // To an end that is gone, the kernel says what there is to say, with its signal.
        let outcome = kernel::send_pieces(fd, &rest[..count], flags | libc::MSG_DONTWAIT);
        return match outcome {
            Ok(sent) => {
                if !by_ring {
                    let before = own.sending.by_kernel.load(Ordering::Relaxed);
                    own.sending.by_kernel.store(before + sent as u64, Ordering::Relaxed);
                }
                Ok(Step::Kernel(sent))
            }
            Err(Errno(libc::EAGAIN)) => Ok(Step::KernelFull),
            Err(error) => Err(error),
        };
    }
    let producer = connection.segment.producer();
    let before = producer.tail();
    let (mut count, mut over) = (0, skip);
    for piece in pieces {
        let start = over.min(piece.iov_len);
        over -= start;
        let length = piece.iov_len - start;
        if length == 0 {
            continue;
        }
        // SAFETY: `start` is at most the piece's length.
        let place = unsafe { piece.iov_base.cast::<u8>().add(start) };
        // SAFETY: the rest of a piece of the program's; the half is held.
        match unsafe { producer.push(place, length) } {
            Ok(part) => {
                count += part;
                if part < length {
                    break;
                }
            }
            Err(Corrupt) => return Err(corrupt(connection)),
        }
    }
    if before / BLIND_SENDS != producer.tail() / BLIND_SENDS
        && connection.kernel_bytes_left().is_none()
    {
        connection.listen(fd, 0);
    }
    Ok(Step::Ring(count))
}

/// Waits until the ring has room again. `some` tells that part of the call's bytes were sent.
///
/// Errors: `EAGAIN` after `SO_SNDTIMEO`; `EINTR` where the kernel's sockets have it, or return
/// what they sent: after part was sent, with `SO_SNDTIMEO`, or where the handler says so.
fn wait(fd: RawFd, connection: &Connection, some: bool) -> Result<(), Errno> {
    if connection.budget.spin(|| connection.is_writable()) {
        return Ok(());
    }
    let (own, other) = (connection.segment.own(), connection.segment.other());
    let mut left = time_out(fd);
    connection.sleepers.fetch_add(1, Ordering::AcqRel);
    let outcome = loop {
        own.sharing.watchers.fetch_add(1, Ordering::SeqCst);
        own.signs.send_armed.store(1, Ordering::SeqCst);
        barrier::heavy();
        let began = Instant::now();
        let mut interrupted = false;
        if !connection.is_writable() {
            // Unread bytes in the kernel's stream would wake us at once, and a doorbell might lie
            // behind them: then we look by the clock.
            let blind = connection.kernel_bytes_left().is_some()
                || other.signs.mute.load(Ordering::Relaxed) != 0
                || own.sharing.watchers.load(Ordering::SeqCst) > 1;
            if blind {
                // Whether the handler lets calls go on is not known here; most do.
                interrupted = kernel::pause(1).is_err() && (some || left.is_some());
            } else if some || left.is_some() {
                let bound = left.map_or(-1, |time| {
                    i32::try_from(time.as_millis()).unwrap_or(i32::MAX).saturating_add(1)
                });
                let waited = kernel::poll_one(fd, libc::POLLIN, bound);
                interrupted = waited == Err(Errno(libc::EINTR));
            } else {
                // A wait that goes on after a signal if its handler says so.
                let waited = kernel::receive(fd, &mut [0], libc::MSG_PEEK);
                interrupted = waited == Err(Errno(libc::EINTR));
            }
        }
        own.sharing.watchers.fetch_sub(1, Ordering::SeqCst);
        connection.look_after_peer(fd);
        if connection.is_writable() {
            break Ok(());
        }
        if interrupted {
            break Err(Errno(libc::EINTR));
        }
        if let Some(time) = &mut left {
            *time = time.saturating_sub(began.elapsed());
            if time.is_zero() {
                break Err(Errno(libc::EAGAIN));
            }
        }
    };
    own.signs.send_armed.store(0, Ordering::Relaxed);
    connection.sleepers.fetch_sub(1, Ordering::AcqRel);
    outcome
}

/// `SO_SNDTIMEO`, if it is set.
fn time_out(fd: RawFd) -> Option<Duration> {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let time = kernel::option(fd, libc::SOL_SOCKET, libc::SO_SNDTIMEO, none).unwrap_or(none);
    let time = Duration::from_secs(time.tv_sec.unsigned_abs())
        + Duration::from_micros(time.tv_usec.unsigned_abs());
    (!time.is_zero()).then_some(time)
}

/// Waits until the kernel's stream has room.
fn wait_kernel(fd: RawFd) -> Result<(), Errno> {
    let bound =
        time_out(fd).map_or(-1, |time| i32::try_from(time.as_millis()).unwrap_or(i32::MAX).max(1));
    match kernel::poll_one(fd, libc::POLLOUT, bound) {
        Ok(0) => Err(Errno(libc::EAGAIN)),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}
