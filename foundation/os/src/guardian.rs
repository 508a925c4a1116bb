//! A process that outlives this one for a moment, to shut down sockets that others have copies of.
//!
//! When a process is killed the kernel closes its descriptors, which says nothing to anybody as long as another
//! process has the same socket open. The guardian shares the *table* of descriptors with the process that starts
//! it (`CLONE_FILES`): what that one opens and closes, it opens and closes for both, at no cost. It sleeps until
//! the process ends, shuts down those sockets that are marked, resets those that are marked for that, and ends.
//!
//! Invariant: the guardian uses no memory but its own stack and the marks, and takes no lock: it is a copy of
//! one thread of a process that may have had more.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mapping::MappingError;
use crate::{Mapping, process};

/// Numbers from here on are not guarded.
const NUMBERS: usize = 1 << 20;
const WORDS: usize = NUMBERS / 64;

/// The marks of what the guardian shuts down, and behind them of what of it is to be reset.
#[derive(Debug)]
pub struct Guardian {
    marks: Mapping,
}

/// The two kinds of marks.
const SHUT: usize = 0;
const RESET: usize = 1;

/// Breaks the TCP connection beneath `number`, whoever else has it open: its other end is told of a reset, and not
/// of an end. False when the kernel refuses. Uses nothing but its stack.
fn reset(number: RawFd) -> bool {
    // SAFETY: a plain C structure for which all zeros is a value: `AF_UNSPEC`, which takes a connection down.
    let none: libc::sockaddr = unsafe { std::mem::zeroed() };
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr>()).unwrap_or(0);
    // SAFETY: an address of ours, as long as told; what is no socket is refused.
    unsafe { libc::connect(number, &raw const none, length) == 0 }
}

impl Guardian {
    /// Starts one. To be called while the process has nothing that a copy of its memory would keep: it sleeps
    /// until this process ends, in whatever way. It is in a session of its own, and deaf to signals but `SIGKILL`.
    ///
    /// Errors: the kernel's.
    pub fn start() -> io::Result<Self> {
        let refused = |error: MappingError| io::Error::other(error);
        let marks = Mapping::memfd("guardian", 2 * WORDS * size_of::<u64>()).map_err(refused)?;
        marks.forget_descriptor();
        let guardian = Self { marks };
        let number = i32::try_from(std::process::id()).map_err(io::Error::other)?;
        let own = process::open(number)?;
        let flags = libc::c_long::from(libc::CLONE_FILES);
        // SAFETY: no memory is shared and no stack is given: as `fork`, but for the table of descriptors.
        let made =
            unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, 0_usize, 0_usize, 0_usize) };
        match made {
            0 => guardian.watch(own.as_raw_fd()),
            1.. => {
                // Open in the table that both have, as long as either lives.
                std::mem::forget(own);
                Ok(guardian)
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn word(&self, kind: usize, number: RawFd) -> Option<(&AtomicU64, u64)> {
        let number = usize::try_from(number).ok().filter(|&number| number < NUMBERS)?;
        let at = kind.min(RESET) * WORDS + number / 64;
        // SAFETY: below twice `WORDS`, which are mapped.
        let place = unsafe { self.marks.base().cast::<AtomicU64>().add(at) };
        // SAFETY: mapped as long as `self`, aligned, and an atomic.
        Some((unsafe { place.as_ref() }, 1 << (number % 64)))
    }

    /// From now on `socket` is shut down, both ways, when this process ends. To be taken back before it is closed.
    pub fn mark(&self, socket: BorrowedFd<'_>) {
        if let Some((word, bit)) = self.word(SHUT, socket.as_raw_fd()) {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// As [`Guardian::mark`], where the other end of the TCP connection is to be told of a reset.
    pub fn mark_to_reset(&self, socket: BorrowedFd<'_>) {
        if let Some((word, bit)) = self.word(RESET, socket.as_raw_fd()) {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// The end of [`Guardian::mark`] and [`Guardian::mark_to_reset`].
    pub fn unmark(&self, socket: BorrowedFd<'_>) {
        for kind in [SHUT, RESET] {
            if let Some((word, bit)) = self.word(kind, socket.as_raw_fd()) {
                word.fetch_and(!bit, Ordering::SeqCst);
            }
        }
    }

    /// The guardian's life. `process` is readable when the guarded one has ended.
    fn watch(&self, process: RawFd) -> ! {
        // SAFETY: takes nothing.
        unsafe { libc::setsid() };
        // SAFETY: a plain C structure for which all zeros is a value.
        let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: our own set.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: as above; the old one is not asked for.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()) };
        let mut entry = libc::pollfd { fd: process, events: libc::POLLIN, revents: 0 };
        while entry.revents & libc::POLLIN == 0 {
            // SAFETY: one entry, ours.
            let ready = unsafe { libc::poll(&raw mut entry, 1, -1) };
            if ready < 0 || entry.revents & libc::POLLNVAL != 0 {
                break;
            }
        }
        for number in 0..NUMBERS {
            let Ok(number) = RawFd::try_from(number) else { break };
            let marked = |kind| {
                self.word(kind, number)
                    .is_some_and(|(word, bit)| word.load(Ordering::SeqCst) & bit != 0)
            };
            if marked(RESET) && reset(number) {
                continue;
            }
            if marked(SHUT) || marked(RESET) {
                // SAFETY: a number and two words; what is no socket is refused.
                unsafe { libc::shutdown(number, libc::SHUT_RDWR) };
            }
        }
        // SAFETY: ends this process, and runs nothing of what it was copied from.
        unsafe { libc::_exit(0) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn what_is_marked_ends_in_good_order_or_is_reset_whoever_else_has_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = || {
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (one, listener.accept().unwrap().0)
        };
        let [(ends, mut heard), (broken, mut told), (kept, _other)] = [(); 3].map(|()| pair());
        // SAFETY: the child calls what follows, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let began = Guardian::start().map(|guardian| {
                guardian.mark(ends.as_fd());
                guardian.mark_to_reset(broken.as_fd());
                for unmark in [Guardian::mark, Guardian::mark_to_reset, Guardian::unmark] {
                    unmark(&guardian, kept.as_fd());
                }
            });
            // SAFETY: takes a number.
            unsafe { libc::_exit(i32::from(began.is_err())) };
        }
        let mut status = 0;
        // SAFETY: our own word.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        let mut byte = [0];
        assert_eq!(heard.read(&mut byte).unwrap(), 0);
        assert_eq!(told.read(&mut byte).unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        kept.set_nonblocking(true).unwrap();
        assert_eq!((&kept).read(&mut byte).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
}
