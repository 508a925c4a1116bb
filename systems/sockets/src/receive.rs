//! Receiving.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use beeline_os::barrier;

use crate::connection::{Connection, Heard};
use crate::holder::hold_within;
use crate::kernel::{self, Errno, Outcome};
use crate::recall::Bells;
use crate::ring::Corrupt;
use crate::send::call_time;
use crate::{anew, wake};

/// Most pieces of one call (`IOV_MAX`).
pub const MOST_PIECES: usize = 1024;

/// What one look found.
enum Step {
    Bytes(usize),
    End,
    Nothing,
    /// Doorbells stay for who sleeps for room, before what else there may be.
    Later,
}

/// Doorbells and bytes that a peek looks over, to see what lies behind them in the kernel's stream.
const MOST_PEEKED_OVER: usize = 4096;

/// Bytes that `pieces` can hold.
#[must_use]
pub fn room(pieces: &[libc::iovec]) -> usize {
    pieces.iter().fold(0_usize, |sum, piece| sum.saturating_add(piece.iov_len))
}

/// True when no program has memory there: the null page, or the kernel's half. Anything else would
/// have to be probed, which costs more than a message does.
#[inline]
#[must_use]
pub fn is_nowhere(piece: &libc::iovec) -> bool {
    const PAGE: usize = 4096;
    const HALF: usize = 1 << 63;
    let begin = piece.iov_base.addr();
    begin < PAGE || begin.checked_add(piece.iov_len).is_none_or(|end| end > HALF)
}

/// Receives into the program's `pieces` as `recvmsg` would.
///
/// Errors: `errno` as the kernel's sockets have it.
///
/// # Safety
///
/// Each piece is writable memory of the program's, or no place for memory at all (unlike the
/// kernel, we cannot refuse an address that is merely not mapped).
pub unsafe fn receive(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    flags: i32,
) -> Outcome {
    let (mut connection, mut total) = (connection, 0);
    loop {
        // SAFETY: the caller's contract.
        let outcome = unsafe { receive_more(fd, connection, pieces, flags, &mut total) };
        if outcome == Err(anew::MOVED) {
            match anew::follow(fd, connection) {
                Some(next) => connection = next,
                None if total > 0 => return Ok(total),
                None => return kernel::receive_pieces(fd, pieces, flags),
            }
            continue;
        }
        if connection.anew.is_due() {
            anew::ask(fd, connection);
        }
        return outcome;
    }
}

/// As [`receive`], after `total` bytes of it.
///
/// Errors: also [`anew::MOVED`].
///
/// # Safety
///
/// As for [`receive`].
#[inline]
unsafe fn receive_more(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    flags: i32,
    total: &mut usize,
) -> Outcome {
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        // No urgent data and no error queue: the kernel's answer is the right one.
        return kernel::receive_pieces(fd, pieces, flags);
    }
    let wanted = room(pieces);
    if wanted == 0 && connection.kernel_bytes_left().is_none() {
        // Looks at nothing: bytes that stand there would be looked at for ever.
        return take_error(connection).map_or(Ok(0), Err);
    }
    let peek = flags & libc::MSG_PEEK != 0;
    if flags & libc::MSG_TRUNC != 0 && !peek {
        return throw_away(fd, connection, wanted, flags);
    }
    let all = flags & libc::MSG_WAITALL != 0;
    let waits = flags & libc::MSG_DONTWAIT == 0 && connection.blocks(fd);
    // A call that waits returns with so much, or at an end.
    let least = if all { wanted } else { connection.low_water().min(wanted) };
    let (mut goes_on, mut ended) = (false, false);
    loop {
        let longest = || call_time(fd, waits, libc::SO_RCVTIMEO);
        let half = &connection.segment.own().receiving.holder;
        let held = match hold_within(half, &connection.sleepers, longest) {
            Ok(held) => held,
            Err(error) if *total > 0 && error != anew::MOVED => return Ok(*total),
            Err(error) => return Err(error),
        };
        let was_behind = connection.is_behind_ring();
        // SAFETY: the caller's contract.
        let step = unsafe { look(fd, connection, pieces, *total, peek, waits) };
        let step = match step {
            // SAFETY: as above.
            Ok(Step::Bytes(count)) if peek && count < wanted => unsafe {
                peek_behind(fd, connection, pieces, count).map(Step::Bytes)
            },
            step => step,
        };
        if !peek && matches!(step, Ok(Step::Bytes(_))) {
            return_credits(fd, connection);
        }
        drop(held);
        match step {
            // A peek starts over each time; what came before an end, it sees after it has seen that.
            Ok(Step::Bytes(count)) if peek => {
                if count >= least || !waits || ended {
                    return Ok(count);
                }
                ended = is_last(fd, connection);
                if !ended && kernel::pause(1).is_err() {
                    return Ok(count);
                }
            }
            Ok(Step::Bytes(count)) => {
                *total += count;
                if *total >= least || !waits && !all {
                    // After the way back, behind the ring's last byte: who gets less than he asked for
                    // takes it that there is no more, and an edge may have been told already.
                    let more = *total < wanted && !goes_on && !was_behind;
                    if more && connection.is_behind_ring() {
                        goes_on = true;
                        continue;
                    }
                    return Ok(*total);
                }
            }
            Ok(Step::Later) => connection.let_room_be_heard_of(),
            Ok(Step::End) => return Ok(*total),
            Ok(Step::Nothing) if goes_on => return Ok(*total),
            Err(Errno(libc::ECONNRESET)) if goes_on => {
                // For the next call.
                connection.pending_error.store(libc::ECONNRESET, Ordering::Relaxed);
                return Ok(*total);
            }
            Err(error) => return if *total > 0 { Ok(*total) } else { Err(error) },
            Ok(Step::Nothing) => {
                if wanted == 0 {
                    return Ok(0);
                }
                let outcome = if waits { wait(fd, connection) } else { Err(Errno(libc::EAGAIN)) };
                if let Err(error) = outcome {
                    return if *total > 0 { Ok(*total) } else { Err(error) };
                }
            }
        }
    }
}

/// Nothing comes behind what is there, or a peek does not see it.
fn is_last(fd: RawFd, connection: &Connection) -> bool {
    let ends = || {
        // Of an end that the other end's words do not tell: its process ended.
        let told = kernel::poll_one(fd, libc::POLLRDHUP, 0).unwrap_or(0);
        told & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
    };
    connection.is_over()
        || connection.segment.other().signs.finished.load(Ordering::Acquire) != 0
        || connection.lies_before_last_bytes().is_some_and(|over| over > MOST_PEEKED_OVER as u64)
        || ends()
}

/// Bytes that a peek sees when there are more behind the `count` that [`look`] found: of the ring, behind what
/// the kernel's stream held before the switch, and of the kernel's stream, behind the ring's last after the way
/// [back](crate::recall). Nothing is taken, doorbells neither. The caller holds the receiving half.
///
/// # Safety
///
/// As for [`receive`].
#[cold]
unsafe fn peek_behind(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    count: usize,
) -> Outcome {
    let (own, other) = (connection.segment.own(), connection.segment.other());
    // Acquire with the Release in `sends_by_ring`.
    let switched = other.signs.switched_at.load(Ordering::Acquire);
    let read = own.receiving.by_kernel.load(Ordering::Relaxed);
    let before = switched.saturating_sub(1).saturating_sub(read);
    let before = usize::try_from(before).unwrap_or(usize::MAX);
    let follows = before > 0 || connection.is_returned();
    let ring_is_left = switched != 0 && connection.kernel_bytes_left() != Some(u64::MAX);
    if !follows || !ring_is_left || count < before {
        return Ok(count);
    }
    let consumer = connection.segment.consumer();
    let (mut count, mut in_ring, mut over) = (count, count - before, count);
    for piece in pieces {
        let start = over.min(piece.iov_len);
        over -= start;
        let length = piece.iov_len - start;
        if length == 0 {
            continue;
        }
        if is_nowhere(piece) {
            return Ok(count);
        }
        // SAFETY: `start` is at most the piece's length.
        let place = unsafe { piece.iov_base.cast::<u8>().add(start) };
        // SAFETY: the rest of a piece of the program's; the half is held.
        let part = unsafe { consumer.pop(place, length, in_ring, true) };
        let part = part.map_err(|Corrupt| corrupt(fd, connection))?;
        count += part;
        in_ring += part;
        if part < length {
            break;
        }
    }
    // Loaded before the ring is seen to be at its end: nothing comes into it any more.
    let Some(over) = connection.lies_before_last_bytes() else { return Ok(count) };
    let left = available(connection, in_ring + 1).map_err(|Corrupt| corrupt(fd, connection))?;
    let mut passed = [0_u8; MOST_PEEKED_OVER];
    let over = usize::try_from(over).unwrap_or(usize::MAX);
    let Some(passed) = passed.get_mut(..over).filter(|_| left == in_ring) else { return Ok(count) };
    let mut rest = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];
    rest[0] = libc::iovec { iov_base: passed.as_mut_ptr().cast(), iov_len: over };
    let more = rest_of(pieces, count, &mut rest[1..]);
    if more == 0 {
        return Ok(count);
    }
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let seen = kernel::receive_pieces(fd, &rest[..=more], flags).unwrap_or(0);
    Ok(count + seen.saturating_sub(over))
}

/// `MSG_TRUNC`: takes up to `wanted` bytes and copies none to the program, whose pieces may be
/// without memory.
fn throw_away(fd: RawFd, connection: &Connection, wanted: usize, flags: i32) -> Outcome {
    let mut space = [0_u8; 4096];
    let mut flags = flags & !libc::MSG_TRUNC;
    let mut total = 0;
    while total < wanted {
        let length = space.len().min(wanted - total);
        let piece = [libc::iovec { iov_base: space.as_mut_ptr().cast(), iov_len: length }];
        // SAFETY: our own memory, as long as told.
        match unsafe { receive(fd, connection, &piece, flags) } {
            Ok(0) => break,
            Ok(count) => total += count,
            Err(error) if total == 0 => return Err(error),
            Err(_) => break,
        }
        if flags & libc::MSG_WAITALL == 0 {
            flags |= libc::MSG_DONTWAIT;
        }
    }
    Ok(total)
}

/// One look at ring or kernel. The caller holds the receiving half.
unsafe fn look(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    skip: usize,
    peek: bool,
    waits: bool,
) -> Result<Step, Errno> {
    let segment = &connection.segment;
    let (own, other) = (segment.own(), segment.other());
    loop {
        if let Some(left) = connection.kernel_bytes_left() {
            if let Some(error) = take_error(connection) {
                return Err(error);
            }
            if let Some(step) = from_kernel(fd, connection, pieces, skip, peek, left)? {
                return Ok(step);
            }
            continue;
        }
        let consumer = segment.consumer();
        let mut count = 0;
        let mut over = skip;
        for piece in pieces {
            let start = over.min(piece.iov_len);
            over -= start;
            let length = piece.iov_len - start;
            if length == 0 {
                continue;
            }
            if is_nowhere(piece) {
                if count == 0 && consumer.is_ready() {
                    return Err(Errno(libc::EFAULT));
                }
                break;
            }
            // SAFETY: `start` is at most the piece's length.
            let place = unsafe { piece.iov_base.cast::<u8>().add(start) };
            let before = if peek { count } else { 0 };
            // SAFETY: the rest of a piece of the program's; the half is held.
            match unsafe { consumer.pop(place, length, before, peek) } {
                Ok(part) => {
                    count += part;
                    if part < length {
                        break;
                    }
                }
                Err(Corrupt) => return Err(corrupt(fd, connection)),
            }
        }
        if count > 0 {
            return Ok(Step::Bytes(count));
        }
        if own.receiving.shut.load(Ordering::Relaxed) != 0 {
            return Ok(Step::End);
        }
        // Acquire with the Release in `shutdown`: what was sent before is in the ring.
        if other.signs.finished.load(Ordering::Acquire) != 0 {
            if consumer.is_ready() {
                continue;
            }
            return Ok(Step::End);
        }
        let ended = connection.kernel_ended.load(Ordering::Relaxed);
        // Who is going to wait hears of the end there.
        if ended || !waits && connection.is_due_to_listen() {
            let heard = if ended { Heard::End } else { connection.listen(fd, 0) };
            if heard != Heard::Nothing {
                // The kernel's word came after everything the other end wrote.
                if consumer.is_ready() {
                    continue;
                }
                return take_error(connection).map_or(Ok(Step::End), Err);
            }
        }
        return Ok(Step::Nothing);
    }
}

/// Bytes that can be read now, counted up to `most`.
///
/// Errors: [`Corrupt`].
pub fn available(connection: &Connection, most: usize) -> Result<usize, Corrupt> {
    Ok(connection.segment.consumer().available(most)?.min(most))
}

/// The error the program has not heard of, if any.
pub fn take_error(connection: &Connection) -> Option<Errno> {
    let error = connection.pending_error.load(Ordering::Relaxed);
    if error == 0 {
        return None;
    }
    connection.pending_error.store(0, Ordering::Relaxed);
    Some(Errno(error))
}

/// The other end is hostile or broken: the connection ends here, as if reset.
#[cold]
pub fn corrupt(fd: RawFd, connection: &Connection) -> Errno {
    connection.kernel_ended.store(true, Ordering::Relaxed);
    connection.segment.own().signs.finished.store(1, Ordering::Release);
    connection.segment.own().receiving.shut.store(1, Ordering::Relaxed);
    connection.make_up_for_swallowed(fd);
    Errno(libc::ECONNRESET)
}

/// Bytes from the kernel's stream, of which at most `left` are the program's. `None`: look again.
fn from_kernel(
    fd: RawFd,
    connection: &Connection,
    pieces: &[libc::iovec],
    skip: usize,
    peek: bool,
    left: u64,
) -> Result<Option<Step>, Errno> {
    let own = connection.segment.own();
    if connection.is_returned() {
        match connection.skip_bells(fd)? {
            Bells::Passed => {}
            Bells::ToCome => return Ok(Some(Step::Nothing)),
            Bells::Needed => return Ok(Some(Step::Later)),
        }
    }
    let mut rest = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];
    let count = narrow(pieces, skip, usize::try_from(left).unwrap_or(usize::MAX), &mut rest);
    let flags = libc::MSG_DONTWAIT | if peek { libc::MSG_PEEK } else { 0 };
    match kernel::receive_pieces(fd, &rest[..count], flags) {
        Ok(read) => {
            // Loaded after reading: bytes beyond the switch are doorbells.
            let limit = connection.kernel_bytes_left().unwrap_or(0);
            let mine = (read as u64).min(limit);
            if !peek && mine < read as u64 {
                // A set that counts on them is told otherwise.
                connection.make_up_for_swallowed(fd);
            }
            if !peek {
                let before = own.receiving.by_kernel.load(Ordering::Relaxed);
                own.receiving.by_kernel.store(before.saturating_add(mine), Ordering::Relaxed);
            }
            if connection.kernel_bytes_left() == Some(u64::MAX) {
                connection.waited_for_other_end(fd);
            }
            if mine > 0 {
                return Ok(Some(Step::Bytes(usize::try_from(mine).unwrap_or(0))));
            }
            if read == 0 && room(&rest[..count]) > 0 {
                // The end of the kernel's stream, unless the other end switched before it.
                if connection.kernel_bytes_left().is_some() {
                    if !connection.is_other_mute() && connection.heard_end() == Heard::Broken {
                        // Not half of it: nobody reads our ring any more.
                        return Err(take_error(connection).unwrap_or(Errno(libc::ECONNRESET)));
                    }
                    return Ok(Some(Step::End));
                }
                connection.heard_end();
            } else if read == 0 {
                return Ok(Some(Step::Nothing));
            }
            if peek && read > 0 {
                // Only doorbells were seen: the stream is theirs from now on.
                connection.listen(fd, 0);
            }
            Ok(None)
        }
        // By now it may be the ring's turn. More from before the switch that is on its way does not count: who
        // went on writing of ever more would keep us here.
        Err(Errno(libc::EAGAIN)) if connection.kernel_bytes_left().is_none() => Ok(None),
        Err(Errno(libc::EAGAIN)) => {
            let shut = own.receiving.shut.load(Ordering::Relaxed) != 0;
            Ok(Some(if shut { Step::End } else { Step::Nothing }))
        }
        Err(Errno(libc::ECONNRESET)) => match connection.heard_error(libc::ECONNRESET) {
            Heard::Broken => Err(take_error(connection).unwrap_or(Errno(libc::ECONNRESET))),
            _ => Ok(Some(Step::End)),
        },
        Err(error) => Err(error),
    }
}

/// The part of `pieces` after `skip` bytes, at most `most` bytes of it, into `rest`.
fn narrow(pieces: &[libc::iovec], skip: usize, most: usize, rest: &mut [libc::iovec]) -> usize {
    let (mut skip, mut most, mut count) = (skip, most, 0);
    for piece in pieces {
        let start = skip.min(piece.iov_len);
        skip -= start;
        let length = (piece.iov_len - start).min(most);
        let Some(place) = rest.get_mut(count) else { break };
        if length == 0 {
            continue;
        }
        let base = piece.iov_base.cast::<u8>().wrapping_add(start).cast();
        *place = libc::iovec { iov_base: base, iov_len: length };
        most -= length;
        count += 1;
    }
    count
}

/// Pieces after `skip` bytes, for a sender.
pub fn rest_of(pieces: &[libc::iovec], skip: usize, rest: &mut [libc::iovec]) -> usize {
    narrow(pieces, skip, usize::MAX, rest)
}

#[inline]
fn return_credits(fd: RawFd, connection: &Connection) {
    let armed = &connection.segment.other().signs.send_armed;
    let waits = armed.load(Ordering::Relaxed) != 0;
    if connection.segment.consumer().give_back(waits) {
        if connection.between_hosts().is_some() {
            connection.switch_for_doorbells();
        }
        connection.wake(fd, armed);
    }
}

/// Waits until there may be something to read.
///
/// Errors: `EAGAIN` after `SO_RCVTIMEO`, `EINTR`, and what the connection broke with.
pub fn wait(fd: RawFd, connection: &Connection) -> Result<(), Errno> {
    let by_kernel = connection.kernel_bytes_left().is_some();
    let ready = || connection.is_readable();
    if !by_kernel && connection.budget.spin(ready) {
        return Ok(());
    }
    let own = connection.segment.own();
    let began = Instant::now();
    let asleep = connection.sleepers.enter();
    // Behind the ring nobody rings: the kernel wakes for what is its own.
    let rung_for = !connection.is_behind_ring();
    if rung_for {
        own.sharing.watchers.fetch_add(1, Ordering::SeqCst);
        wake::arm(&own.signs.receive_armed, barrier::heavy);
    }
    // What came into the ring before the fence is seen, also behind a switch; what comes after it rings. And
    // bytes from before the switch wake by themselves.
    let mut byte = [0];
    let outcome = if ready() || connection.anew.is_moving() {
        Ok(1)
    } else {
        // Sleeps in the kernel with the kernel's rules for time-outs and signals. What wakes is
        // only looked at: the next round takes it.
        kernel::receive(fd, &mut byte, libc::MSG_PEEK)
    };
    // It stays armed, should nobody have rung: a set may count on it. One doorbell too many later
    // costs less than one too few.
    if rung_for {
        own.sharing.watchers.fetch_sub(1, Ordering::SeqCst);
    }
    drop(asleep);
    connection.budget.learn(began.elapsed());
    match outcome {
        Ok(0) => {
            if connection.kernel_bytes_left().is_none() && !connection.ended_in_order() {
                connection.heard_end();
            }
            Ok(())
        }
        Ok(_) => {
            settle(fd, connection);
            Ok(())
        }
        Err(Errno(error @ (libc::EAGAIN | libc::EINTR))) => Err(Errno(error)),
        Err(Errno(error)) => {
            connection.heard_error(error);
            Ok(())
        }
    }
}

/// After a sleep: swallows the doorbell; where others watch the same end, leaves it to them and
/// gives them time.
fn settle(fd: RawFd, connection: &Connection) {
    if connection.kernel_bytes_left().is_some() {
        return;
    }
    connection.listen(fd, 0);
    let others = connection.segment.own().sharing.watchers.load(Ordering::SeqCst) > 0;
    if others && !connection.is_readable() {
        let _ = kernel::pause(1);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use beeline_os::Mapping;

    use super::*;
    use crate::segment::{Segment, length_bytes};

    #[test]
    fn a_switch_while_the_kernel_had_nothing_has_the_ring_looked_at_only_when_it_is_its_turn() {
        let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = stream.as_raw_fd();
        let connection = Connection::new(Segment::take(mapping, 0).unwrap(), fd);
        let mut byte = 0_u8;
        let pieces = [libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        // Before the switch, behind bytes that are still to come, and behind the last.
        for (switched, nothing) in [(0, true), (9, true), (1, false)] {
            connection.segment.other().signs.switched_at.store(switched, Ordering::Release);
            let step = from_kernel(fd, &connection, &pieces, 0, false, u64::MAX).unwrap();
            assert_eq!(matches!(step, Some(Step::Nothing)), nothing, "{switched}");
            assert_eq!(step.is_none(), !nothing, "{switched}");
        }
    }
}
