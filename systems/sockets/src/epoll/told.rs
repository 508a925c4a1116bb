//! What sets are told from outside about a connection that some of them hold: it is to be looked at, it
//! became ours, it is another one now.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use super::{each_set, lock, nobody_sleeps, report_by_kernel, stir};
use crate::connection::Connection;
use crate::table;

/// Makes the kernel report `fd` to whoever sleeps on a set that holds it: it can always be written
/// to, and the next look at the report puts the mask right again.
pub fn kick(fd: RawFd) {
    // Sets may hold it by another of its numbers.
    let copied = table::ours(fd).filter(|ours| ours.references.load(Ordering::Relaxed) > 1);
    each_set(|number, set| {
        if !set.may_be_slept_on() {
            return;
        }
        let mut inner = lock(set);
        if let Some(entry) = inner.entry(fd) {
            report_by_kernel(number, entry);
        }
        let Some(connection) = copied else { return };
        for entry in inner.each() {
            if table::ours(entry.fd).is_some_and(|other| std::ptr::eq(other, connection)) {
                report_by_kernel(number, entry);
            }
        }
    });
}

/// `fd` has become ours. Sets that hold it asked the kernel for what the program wants, and nobody
/// armed it. Not called under a set's lock.
pub fn became_ours(fd: RawFd) {
    stir(fd);
    if !nobody_sleeps() {
        kick(fd);
    }
}

/// What was another connection leads to `connection` now. Sets that hold a number of it begin with it as
/// with a fresh one, and may tell of what they told before. Not called under a set's lock.
pub(crate) fn renewed(connection: &Connection) {
    let is_it = |fd| table::ours(fd).is_some_and(|ours| std::ptr::eq(ours, connection));
    each_set(|number, set| {
        let mut inner = lock(set);
        let numbers: Vec<RawFd> =
            inner.each().filter(|entry| is_it(entry.fd)).map(|entry| entry.fd).collect();
        for fd in numbers {
            if let Some(entry) = inner.entry(fd) {
                entry.fresh = true;
                (entry.seen_tail, entry.seen_ends) = (u64::MAX, 0);
                if set.may_be_slept_on() {
                    report_by_kernel(number, entry);
                }
            }
            inner.renew(fd);
            inner.heat(fd);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;

    use beeline_os::Mapping;

    use super::*;
    use crate::epoll::control;
    use crate::segment::{Segment, length_bytes};

    fn event() -> Option<libc::epoll_event> {
        Some(libc::epoll_event { events: 1, u64: 0 })
    }

    fn counted(connection: &Connection) -> (u32, u32) {
        let watchers = connection.segment.own().sharing.watchers.load(Ordering::SeqCst);
        (connection.sets.load(Ordering::SeqCst), watchers)
    }

    #[test]
    fn an_entry_that_goes_or_is_looked_at_while_its_connection_moves_is_counted_right() {
        table::tests::begin_once();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let fd = stream.as_raw_fd();
        let connection = || {
            let mapping = Mapping::memfd("test", length_bytes(4096)).unwrap();
            Segment::format(&mapping).unwrap();
            Box::new(Connection::new(Segment::take(mapping, 0).unwrap(), fd))
        };
        // SAFETY: no memory is passed.
        let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let mut old = table::set_ours(fd, connection());
        for operation in [libc::EPOLL_CTL_DEL, libc::EPOLL_CTL_MOD] {
            assert_eq!(control(set, libc::EPOLL_CTL_ADD, fd, event()), Some(Ok(0)));
            assert_eq!(counted(old), (1, 1));
            let new: &'static Connection = Box::leak(connection());
            table::succeed(old, new);
            // Between the connection's move and the set's hearing of it.
            assert_eq!(control(set, operation, fd, event()), Some(Ok(0)));
            let stays = u32::from(operation == libc::EPOLL_CTL_MOD);
            assert_eq!(counted(new), (stays, stays), "in between");
            renewed(new);
            let _ = crate::epoll::wait(set, &mut [event().unwrap()], Some(BRIEF), None);
            assert_eq!(counted(new), (stays, stays), "afterwards");
            old = new;
        }
        assert_eq!(control(set, libc::EPOLL_CTL_DEL, fd, None), Some(Ok(0)));
        assert_eq!(counted(old), (0, 0));
        crate::epoll::forget(set);
        table::forget(fd);
        // SAFETY: nobody else has it.
        assert_eq!(unsafe { libc::close(set) }, 0);
    }

    const BRIEF: std::time::Duration = std::time::Duration::from_millis(1);
}
