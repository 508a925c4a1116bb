//! The end of a connection: `close`, and `shutdown` of a half.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::connection::Connection;
use crate::holder::{Held, hold, hold_within};
use crate::kernel::{self, Errno, Outcome};
use crate::segment::{
    CLOSED_CLEANLY, CLOSED_UNREAD, STATE_GIVEN_UP, STATE_MATCHING, STATE_OPEN, STATE_PAIRED,
};
use crate::{anew, epoll, introduce, receive, table, together};

/// The program closes `fd`; the kernel's `close` follows.
pub fn closing(fd: RawFd) {
    if introduce::is_asking() || table::is_foreign_process() {
        return;
    }
    epoll::forget(fd);
    let Some(connection) = table::forget(fd) else { return };
    // This process has it no more; the process that looks next has it.
    together::leave(&connection.segment);
    let shared = !together::is_alone(&connection.segment, true);
    if !connection.leave(shared) {
        // Other processes have it still, and may meet the other end; the kernel knows when the last
        // one closes. Between hosts the kernel does not, but the last one does.
        if connection.is_returned()
            && let Ok(_held) = hold_running(connection)
        {
            let _ = connection.skip_bells(fd);
        }
        return;
    }
    close_last(fd, connection);
    connection.tell_relay();
}

/// The last number of the last process that has `connection` is about to be closed.
fn close_last(fd: RawFd, connection: &Connection) {
    let segment = &connection.segment;
    let own = segment.own();
    if close_returned(fd, connection) {
        return;
    }
    let _ = segment.state().compare_exchange(
        STATE_OPEN,
        STATE_GIVEN_UP,
        Ordering::AcqRel,
        Ordering::Relaxed,
    );
    if !matches!(segment.state().load(Ordering::Acquire), STATE_PAIRED | STATE_MATCHING) {
        // It may have gone back just now.
        close_returned(fd, connection);
        return;
    }
    // Told also to an end that never sent: it may go over to its ring at any time, and would fill
    // one that nobody reads. How much the kernel holds is asked before what of it can be bytes.
    let queued = kernel::unread(fd);
    let by_kernel = connection.kernel_bytes_left();
    let in_ring = segment.consumer().is_ready();
    let unread = by_kernel.is_some() && queued > 0 || in_ring;
    if close_returned(fd, connection) {
        // What was counted may have been doorbells.
        return;
    }
    // Or as the program asked for: a linger of no time.
    let none = libc::linger { l_onoff: 0, l_linger: 0 };
    let linger = kernel::option(fd, libc::SOL_SOCKET, libc::SO_LINGER, none).unwrap_or(none);
    let unread = unread || linger.l_onoff != 0 && linger.l_linger == 0;
    let sign = if unread { CLOSED_UNREAD } else { CLOSED_CLEANLY };
    // Release with the Acquire in `heard_error`.
    own.signs.closed.store(sign, Ordering::Release);
    if unread {
        reset_by_close(fd);
        return;
    }
    if by_kernel.is_none() {
        // Doorbells left in the kernel's queue would make it reset the connection.
        connection.listen(fd, u32::MAX);
    } else {
        // Who calls it back may not have rung yet; one that begins after this finds the sign.
        drop(connection.go_to_bells(true));
    }
    // It may have gone back meanwhile.
    close_returned(fd, connection);
}

/// The end of a connection that went back to the kernel, whose it is but for what the kernel does not know
/// of. False for one that did not.
fn close_returned(fd: RawFd, connection: &Connection) -> bool {
    if !connection.is_returned() {
        return false;
    }
    let consumer = connection.segment.consumer();
    let own = connection.segment.own();
    if consumer.is_ready() && receive::available(connection, 1) != Ok(0) {
        reset_by_close(fd);
    } else if let Ok(_held) = hold_running(connection) {
        // As above.
        let _ = connection.skip_bells(fd);
    }
    // For the monitor, which keeps the segment.
    own.signs.closed.store(CLOSED_CLEANLY, Ordering::Release);
    true
}

/// The receiving half, for who closes and does not wait for a holder that was stopped: his bytes are his.
fn hold_running(connection: &Connection) -> Result<Held<'_>, Errno> {
    let half = &connection.segment.own().receiving.holder;
    hold_within(half, &connection.sleepers, || Some(Duration::ZERO))
}

/// As the kernel does with bytes unread: the other end is told.
fn reset_by_close(fd: RawFd) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let _ = kernel::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, linger);
}

fn is_open(connection: &Connection) -> bool {
    connection.segment.state().load(Ordering::Acquire) == STATE_OPEN
}

/// `shutdown`.
///
/// Errors: the kernel's.
pub fn shutdown(fd: RawFd, connection: &Connection, how: i32) -> Outcome {
    if !(libc::SHUT_RD..=libc::SHUT_RDWR).contains(&how) {
        return Err(Errno(libc::EINVAL));
    }
    if connection.is_over() {
        // Whatever the kernel says of a connection that is over.
        return kernel::shutdown(fd, how);
    }
    if how != libc::SHUT_RD && connection.between_hosts().is_some() && is_open(connection) {
        // The kernel's end would come before the relay's word of it. So early, it stays the
        // kernel's.
        connection.give_up(fd);
    }
    if connection.segment.state().load(Ordering::Acquire) == STATE_GIVEN_UP {
        return kernel::shutdown(fd, how);
    }
    let own = connection.segment.own();
    if how != libc::SHUT_WR {
        // Stored, then looked at, as by who goes to sleep.
        own.receiving.shut.store(1, Ordering::SeqCst);
        if connection.sleepers.any() || connection.is_returned() {
            // Nothing else wakes a thread that waits for bytes.
            let _ = kernel::shutdown(fd, libc::SHUT_RD);
        }
    }
    if how != libc::SHUT_RD {
        let held = match hold(&own.sending.holder, &connection.sleepers) {
            Err(anew::MOVED) => {
                return match anew::follow(fd, connection) {
                    Some(next) => shutdown(fd, next, how),
                    None => kernel::shutdown(fd, how),
                };
            }
            held => held?,
        };
        if !connection.sends_by_ring() {
            own.signs.mute.store(1, Ordering::Release);
            own.signs.finished.store(1, Ordering::Release);
            drop(held);
            connection.make_up_for_swallowed(fd);
            return kernel::shutdown(fd, how);
        }
        // Release with the readers' Acquire: everything sent is in the ring. The kernel's
        // connection stays open, for doorbells; its own end comes with `close`.
        own.signs.finished.store(1, Ordering::Release);
        drop(held);
        connection.wake(fd, &connection.segment.other().signs.receive_armed);
    }
    // This process's own sets report another thing now.
    connection.make_up_for_swallowed(fd);
    Ok(0)
}
