//! Socket options of a packet connection: what the program sets is what it reads back.
//!
//! Options of TCP and IP have no kernel socket to live in, and the room of the placeholder's queue
//! is ours. They are kept here, up to a few; one that was never set is what a fresh TCP socket has.
//! Options that the placeholder can carry out (time-outs) are the kernel's.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Mutex, MutexGuard};

use crate::kernel::{self, Errno};

/// Most options of one connection that are kept, and bytes of one.
const MOST: usize = 32;
const LONGEST: usize = 64;
/// Looks at options that another thread has: a `fork` may have left them held for ever.
const PATIENCE: u32 = 10_000;

#[derive(Debug)]
struct Kept {
    level: i32,
    name: i32,
    value: Vec<u8>,
}

/// What the program set.
#[derive(Debug, Default)]
pub struct Options(Mutex<Vec<Kept>>);

/// Who answers for an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// The kernel, of the placeholder.
    Placeholder,
    /// This module.
    Here,
    /// The connection's error.
    Error,
    /// A number that does not change.
    Constant(i32),
}

/// Who answers for option `name` of `level`; `version` of the connection's addresses.
#[must_use]
pub fn keeper(level: i32, name: i32, version: i32) -> Keeper {
    if level != libc::SOL_SOCKET {
        return Keeper::Here;
    }
    match name {
        libc::SO_ERROR => Keeper::Error,
        libc::SO_DOMAIN => Keeper::Constant(version),
        libc::SO_PROTOCOL => Keeper::Constant(libc::IPPROTO_TCP),
        libc::SO_TYPE => Keeper::Constant(libc::SOCK_STREAM),
        libc::SO_ACCEPTCONN => Keeper::Constant(0),
        libc::SO_RCVTIMEO | libc::SO_SNDTIMEO => Keeper::Placeholder,
        _ => Keeper::Here,
    }
}

impl Options {
    fn lock(&self) -> Option<MutexGuard<'_, Vec<Kept>>> {
        for _ in 0..PATIENCE {
            if let Ok(kept) = self.0.try_lock() {
                return Some(kept);
            }
            kernel::yield_now();
        }
        None
    }

    /// Keeps a value, if a TCP socket takes it.
    ///
    /// Errors: a TCP socket's; `ENOBUFS` for more than are kept.
    pub fn set(&self, level: i32, name: i32, value: &[u8], version: i32) -> Result<(), Errno> {
        let fresh = kernel::tcp_socket(version)?;
        kernel::set_option_bytes(fresh.as_raw_fd(), level, name, value)?;
        // As the kernel tells it afterwards: it doubles some and bounds others.
        let mut told = [0; LONGEST];
        let count = kernel::option_bytes(fresh.as_raw_fd(), level, name, &mut told).unwrap_or(0);
        let told = told.get(..count).unwrap_or_default().to_vec();
        let mut kept = self.lock().ok_or(Errno(libc::ENOBUFS))?;
        let known = kept.iter().position(|one| (one.level, one.name) == (level, name));
        if let Some(place) = known {
            kept.swap_remove(place);
        } else if kept.len() >= MOST {
            return Err(Errno(libc::ENOBUFS));
        }
        kept.push(Kept { level, name, value: told });
        Ok(())
    }

    /// What was kept, or what a fresh TCP socket has. Its length.
    ///
    /// Errors: a TCP socket's.
    pub fn get(
        &self,
        level: i32,
        name: i32,
        value: &mut [u8],
        version: i32,
    ) -> Result<usize, Errno> {
        if let Some(kept) = self.lock()
            && let Some(one) = kept.iter().find(|one| (one.level, one.name) == (level, name))
        {
            let count = one.value.len().min(value.len());
            value[..count].copy_from_slice(&one.value[..count]);
            return Ok(count);
        }
        kernel::option_bytes(kernel::tcp_socket(version)?.as_raw_fd(), level, name, value)
    }
}

/// Priorities of sockets that are connected later: the explicit interface sets them.
static PRIORITIES: Mutex<Vec<(RawFd, u8)>> = Mutex::new(Vec::new());
/// Most sockets with a priority that are not connected yet.
const MOST_PRIORITIES: usize = 1 << 10;

/// The connection that `fd` makes next has this priority.
pub fn set_priority(fd: RawFd, priority: u8) {
    if let Ok(mut all) = PRIORITIES.try_lock() {
        all.retain(|(known, _)| *known != fd);
        if all.len() < MOST_PRIORITIES {
            all.push((fd, priority));
        }
    }
}

/// The priority of the connection that `fd` makes now; it is forgotten.
#[must_use]
pub fn priority(fd: RawFd) -> u8 {
    let Ok(mut all) = PRIORITIES.try_lock() else { return 0 };
    let place = all.iter().position(|(known, _)| *known == fd);
    place.map_or(0, |place| all.swap_remove(place).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_read_back_and_what_is_not_is_a_fresh_sockets() {
        let options = Options::default();
        let read = |name| {
            let mut value = [0; 4];
            assert_eq!(options.get(libc::IPPROTO_TCP, name, &mut value, libc::AF_INET), Ok(4));
            i32::from_ne_bytes(value)
        };
        assert_eq!(read(libc::TCP_NODELAY), 0);
        let one = 1_i32.to_ne_bytes();
        options.set(libc::IPPROTO_TCP, libc::TCP_NODELAY, &one, libc::AF_INET).unwrap();
        assert_eq!(read(libc::TCP_NODELAY), 1);
        assert!(read(libc::TCP_MAXSEG) > 0);
        let refused = options.set(libc::IPPROTO_TCP, 9999, &one, libc::AF_INET);
        assert_eq!(refused, Err(Errno(libc::ENOPROTOOPT)));
    }
}
