//! What sets are told from outside about a connection that some of them hold: it is to be looked at, it
//! became ours, it is another one now.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use super::{HIGHEST, known, lock, nobody_sleeps, report_by_kernel, stir};
use crate::connection::Connection;
use crate::table;

/// Makes the kernel report `fd` to whoever sleeps on a set that holds it: it can always be written
/// to, and the next look at the report puts the mask right again.
pub fn kick(fd: RawFd) {
    // Sets may hold it by another of its numbers.
    let copied = table::ours(fd).filter(|ours| ours.references.load(Ordering::Relaxed) > 1);
    for number in 0..=HIGHEST.load(Ordering::Acquire) {
        let Ok(number) = RawFd::try_from(number) else { continue };
        let Some(set) = known(number) else { continue };
        if !set.may_be_slept_on() {
            continue;
        }
        let mut inner = lock(set);
        if let Some(entry) = inner.entry(fd) {
            report_by_kernel(number, entry);
        }
        let Some(connection) = copied else { continue };
        for entry in inner.each() {
            if table::ours(entry.fd).is_some_and(|other| std::ptr::eq(other, connection)) {
                report_by_kernel(number, entry);
            }
        }
    }
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
    for number in 0..=HIGHEST.load(Ordering::Acquire) {
        let Ok(number) = RawFd::try_from(number) else { continue };
        let Some(set) = known(number) else { continue };
        let mut inner = lock(set);
        let numbers: Vec<RawFd> =
            inner.each().filter(|entry| is_it(entry.fd)).map(|entry| entry.fd).collect();
        for fd in numbers {
            if let Some(entry) = inner.entry(fd) {
                // Watchers were counted for the other.
                entry.counted = false;
                entry.fresh = true;
                (entry.seen_tail, entry.seen_ends) = (u64::MAX, 0);
                if set.may_be_slept_on() {
                    report_by_kernel(number, entry);
                }
            }
            inner.renew(fd);
            inner.heat(fd);
        }
    }
}
