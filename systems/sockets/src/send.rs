//! Sending.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_os::barrier;

use crate::connection::Connection;
use crate::holder::{self, hold_within};
use crate::kernel::{self, Errno, Outcome};
use crate::receive::{corrupt, is_nowhere, rest_of, room, take_error};
use crate::ring::{Corrupt, LONGEST_WHOLE};
use crate::{anew, wake};

/// Sends between two looks at the clock, and bytes that are worth one.
const SENDS_PER_LOOK: u32 = 8;
const LARGE: usize = 4096;

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
/// Each piece is readable memory of the program's, or no place for memory at all (unlike the
/// kernel, we cannot refuse an address that is merely not mapped).
pub unsafe fn send(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    flags: i32,
) -> Outcome {
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let (mut connection, mut total) = (connection, 0);
    loop {
        // SAFETY: the caller's contract.
        let outcome = unsafe { send_more(fd, connection, pieces, flags, &mut total) };
        if outcome == Err(anew::MOVED) {
            match anew::follow(fd, connection) {
                Some(next) => connection = next,
                None if total > 0 => return Ok(total),
                None => return kernel::send_pieces(fd, pieces, flags),
            }
            continue;
        }
        if connection.anew.is_due() {
            anew::ask(fd, connection);
        }
        return outcome;
    }
}

/// As [`send`], after `total` bytes of it.
///
/// Errors: also [`anew::MOVED`].
///
/// # Safety
///
/// As for [`send`].
#[inline]
unsafe fn send_more(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    flags: i32,
    total: &mut usize,
) -> Outcome {
    let wanted = room(pieces);
    let may_wait = || flags & libc::MSG_DONTWAIT == 0 && connection.blocks(fd);
    loop {
        if *total > 0 && connection.is_over() && !connection.is_returned() {
            // The next call hears why.
            return Ok(*total);
        }
        let longest = || call_time(fd, may_wait(), libc::SO_SNDTIMEO);
        let half = &connection.segment.own().sending.holder;
        let held = match hold_within(half, &connection.sleepers, longest) {
            Ok(held) => held,
            Err(error) if *total > 0 && error != anew::MOVED => return Ok(*total),
            Err(error) => return Err(error),
        };
        // SAFETY: the caller's contract.
        let step = unsafe { try_send(fd, connection, pieces, *total, flags) };
        drop(held);
        let full_of = match step {
            Ok(Step::Ring(count)) => {
                if count > 0 {
                    connection.wake(fd, &connection.segment.other().signs.receive_armed);
                }
                *total += count;
                Full::Ring
            }
            Ok(Step::Kernel(count)) => {
                connection.waited_for_other_end(fd);
                *total += count;
                Full::Not
            }
            Ok(Step::KernelFull) => Full::Kernel,
            Err(error) => return if *total > 0 { Ok(*total) } else { Err(error) },
        };
        if *total >= wanted {
            return Ok(*total);
        }
        connection.was_full.store(true, Ordering::Relaxed);
        if !may_wait() {
            if matches!(full_of, Full::Ring) && has_room_after_arming(connection) {
                continue;
            }
            return if *total > 0 { Ok(*total) } else { Err(Errno(libc::EAGAIN)) };
        }
        let outcome = match full_of {
            Full::Ring => wait(fd, connection, *total > 0),
            Full::Kernel => wait_kernel(fd, connection),
            Full::Not => Ok(()),
        };
        if let Err(error) = outcome {
            return if *total > 0 { Ok(*total) } else { Err(error) };
        }
    }
}

/// A send that does not wait found no room. Where sets or sleepers watch this end, they are to hear
/// of room: true when there is some by now.
fn has_room_after_arming(connection: &Connection) -> bool {
    let own = connection.segment.own();
    if own.sharing.watchers.load(Ordering::SeqCst) == 0 {
        return false;
    }
    wake::arm(&own.signs.send_armed, barrier::heavy);
    !connection.is_over() && connection.is_writable()
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
    let by_ring = connection.sends_by_ring();
    let over = by_ring
        && (connection.kernel_ended.load(Ordering::Relaxed)
            || other.signs.closed.load(Ordering::Relaxed) != 0);
    if !by_ring || over {
        return send_by_kernel(fd, connection, pieces, skip, flags, by_ring);
    }
    let producer = connection.segment.producer();
    if pieces.len() > 1 && skip == 0 && are_short(pieces, producer.longest_whole()) {
        // SAFETY: the caller's contract.
        return unsafe { try_send_gathered(fd, connection, pieces, flags) };
    }
    let (mut count, mut over) = (0, skip);
    for piece in pieces {
        let start = over.min(piece.iov_len);
        over -= start;
        let length = piece.iov_len - start;
        if length == 0 {
            continue;
        }
        if is_nowhere(piece) {
            if count == 0 {
                return Err(Errno(libc::EFAULT));
            }
            break;
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
            Err(Corrupt) => return Err(corrupt(fd, connection)),
        }
    }
    let sends = connection.sends.load(Ordering::Relaxed).wrapping_add(1);
    connection.sends.store(sends, Ordering::Relaxed);
    if sends.is_multiple_of(SENDS_PER_LOOK) || count >= LARGE {
        // The ring takes bytes whether or not anybody is there to read them.
        connection.look_after_peer(fd);
    }
    Ok(Step::Ring(count))
}

/// True for pieces with memory that together go in whole or not at all.
fn are_short(pieces: &[libc::iovec], most: usize) -> bool {
    room(pieces) <= most && !pieces.iter().any(|piece| piece.iov_len > 0 && is_nowhere(piece))
}

/// As [`try_send`] of all of `pieces`, which are [short](are_short), as one.
///
/// # Safety
///
/// As for [`send`].
#[inline(never)]
unsafe fn try_send_gathered(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    flags: i32,
) -> Result<Step, Errno> {
    let mut whole = [0_u8; LONGEST_WHOLE];
    let mut length = 0;
    for piece in pieces {
        let Some(target) = whole.get_mut(length..length + piece.iov_len) else { break };
        // SAFETY: the program's piece is readable, and the place is as long.
        unsafe { std::ptr::copy(piece.iov_base.cast(), target.as_mut_ptr(), piece.iov_len) };
        length += piece.iov_len;
    }
    let one = [libc::iovec { iov_base: whole.as_mut_ptr().cast(), iov_len: length }];
    // SAFETY: our own memory, as long as told.
    unsafe { try_send(fd, connection, &one, 0, flags) }
}

/// Through the kernel's stream: before the switch, and to an end that is gone, where the kernel
/// says what there is to say, with its signal.
#[cold]
fn send_by_kernel(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    skip: usize,
    flags: i32,
    by_ring: bool,
) -> Result<Step, Errno> {
    let own = connection.segment.own();
    if connection.is_returned() && holder::take(&own.receiving.holder).is_ok() {
        // Who only sends leaves the last doorbell unread, and the kernel would reset at its end.
        let _ = connection.skip_bells(fd);
        holder::leave(&own.receiving.holder);
    }
    let mut rest = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];
    let count = rest_of(pieces, skip, &mut rest);
    // Who has sent a part hears of it with the next call.
    let quiet = if skip > 0 { libc::MSG_NOSIGNAL } else { 0 };
    match kernel::send_pieces(fd, &rest[..count], flags | quiet | libc::MSG_DONTWAIT) {
        Ok(sent) => {
            if !by_ring {
                let before = own.sending.by_kernel.load(Ordering::Relaxed);
                let now = before.saturating_add(sent as u64);
                own.sending.by_kernel.store(now, Ordering::Relaxed);
            }
            Ok(Step::Kernel(sent))
        }
        Err(Errno(libc::EAGAIN)) => Ok(Step::KernelFull),
        Err(error) => Err(error),
    }
}

/// Waits until the ring has room again. `some` tells that part of the call's bytes were sent.
///
/// Errors: `EAGAIN` after `SO_SNDTIMEO`; `EINTR` where the kernel's sockets have it, or return
/// what they sent: after part was sent, with `SO_SNDTIMEO`, or where the handler says so.
fn wait(fd: RawFd, connection: &Connection, some: bool) -> Result<(), Errno> {
    if connection.budget.spin(|| connection.is_writable()) {
        return Ok(());
    }
    let own = connection.segment.own();
    let mut left = time_out(fd, libc::SO_SNDTIMEO);
    let asleep = connection.sleepers.enter();
    let outcome = loop {
        if connection.anew.is_moving() {
            break Ok(());
        }
        own.sharing.watchers.fetch_add(1, Ordering::SeqCst);
        let for_room = connection.sleeps_for_room();
        wake::arm(&own.signs.send_armed, barrier::heavy);
        let began = Instant::now();
        let slept =
            if connection.is_writable() { Ok(()) } else { sleep(fd, connection, left, some) };
        drop(for_room);
        own.sharing.watchers.fetch_sub(1, Ordering::SeqCst);
        connection.look_after_peer_now(fd);
        if connection.is_writable() {
            break Ok(());
        }
        if slept.is_err() {
            break slept;
        }
        if let Some(time) = &mut left {
            *time = time.saturating_sub(began.elapsed());
            if time.is_zero() {
                break Err(Errno(libc::EAGAIN));
            }
        }
    };
    // It stays armed, as in `receive::wait`.
    drop(asleep);
    outcome
}

/// Sleeps until there is a doorbell or an end, or the time is up; `some` as in [`wait`].
///
/// Errors: `EINTR`.
fn sleep(
    fd: RawFd,
    connection: &Connection,
    left: Option<Duration>,
    some: bool,
) -> Result<(), Errno> {
    let interrupted = Err(Errno(libc::EINTR));
    // Unread bytes in the kernel's stream would wake us at once, and a doorbell might lie behind
    // them: then we look by the clock.
    let blind = connection.kernel_bytes_left().is_some()
        || connection.ended_in_order()
        || connection.segment.own().sharing.watchers.load(Ordering::SeqCst) > 1;
    // Then any signal ends the call.
    let ends = some || left.is_some();
    if blind {
        return if ends { kernel::pause(1) } else { kernel::pause_again(1) };
    }
    if ends {
        let bound = left.map_or(-1, |time| {
            i32::try_from(time.as_millis()).unwrap_or(i32::MAX).saturating_add(1)
        });
        let waited = kernel::poll_one(fd, libc::POLLIN, bound);
        return if waited == Err(Errno(libc::EINTR)) { interrupted } else { Ok(()) };
    }
    // A wait that goes on after a signal if its handler says so.
    match kernel::receive(fd, &mut [0], libc::MSG_PEEK) {
        // The time-out of the other direction keeps the kernel from going on: look again.
        Err(Errno(libc::EINTR)) if time_out(fd, libc::SO_RCVTIMEO).is_none() => interrupted,
        Err(Errno(libc::EAGAIN)) => {
            // That time-out, or a descriptor that another process made non-blocking.
            let _ = kernel::pause(1);
            Ok(())
        }
        // Whatever broke, the look afterwards finds it out.
        _ => Ok(()),
    }
}

/// How long a call may take: no time if it does not wait, else what the program set (`which`), if anything.
pub fn call_time(fd: RawFd, waits: bool, which: i32) -> Option<Duration> {
    if waits { time_out(fd, which) } else { Some(Duration::ZERO) }
}

/// `SO_SNDTIMEO` or `SO_RCVTIMEO`, if it is set.
fn time_out(fd: RawFd, which: i32) -> Option<Duration> {
    let none = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let time = kernel::option(fd, libc::SOL_SOCKET, which, none).unwrap_or(none);
    let time = Duration::from_secs(time.tv_sec.unsigned_abs())
        + Duration::from_micros(time.tv_usec.unsigned_abs());
    (!time.is_zero()).then_some(time)
}

/// Waits until the kernel's stream has room.
fn wait_kernel(fd: RawFd, connection: &Connection) -> Result<(), Errno> {
    // The connection becomes another, or plain, beneath no sleeper.
    let _asleep = connection.sleepers.enter();
    if connection.anew.is_moving() {
        return Ok(());
    }
    let bound = time_out(fd, libc::SO_SNDTIMEO)
        .map_or(-1, |time| i32::try_from(time.as_millis()).unwrap_or(i32::MAX).max(1));
    match kernel::poll_one(fd, libc::POLLOUT, bound) {
        Ok(0) => Err(Errno(libc::EAGAIN)),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}
