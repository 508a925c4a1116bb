//! A process that outlives this one for a moment, to shut down sockets that others have copies of.
//!
//! When a process is killed the kernel closes its descriptors, which says nothing to anybody as long as another
//! process has the same socket open. The guardian shares the *table* of descriptors with the process that starts
//! it (`CLONE_FILES`): what that one opens and closes, it opens and closes for both, at no cost. It sleeps until
//! the process ends, shuts down those sockets that are marked, and ends.
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

/// The marks of what the guardian shuts down.
#[derive(Debug)]
pub struct Guardian {
    marks: Mapping,
}

impl Guardian {
    /// Starts one. To be called while the process has nothing that a copy of its memory would keep: it sleeps
    /// until this process ends, in whatever way. It is in a session of its own, and deaf to signals but `SIGKILL`.
    ///
    /// Errors: the kernel's.
    pub fn start() -> io::Result<Self> {
        let refused = |error: MappingError| io::Error::other(error);
        let marks = Mapping::memfd("guardian", WORDS * size_of::<u64>()).map_err(refused)?;
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

    fn word(&self, number: RawFd) -> Option<(&AtomicU64, u64)> {
        let number = usize::try_from(number).ok().filter(|&number| number < NUMBERS)?;
        // SAFETY: below `WORDS`, which are mapped.
        let place = unsafe { self.marks.base().cast::<AtomicU64>().add(number / 64) };
        // SAFETY: mapped as long as `self`, aligned, and an atomic.
        Some((unsafe { place.as_ref() }, 1 << (number % 64)))
    }

    /// From now on `socket` is shut down, both ways, when this process ends. To be taken back before it is closed.
    pub fn mark(&self, socket: BorrowedFd<'_>) {
        if let Some((word, bit)) = self.word(socket.as_raw_fd()) {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// The end of [`Guardian::mark`].
    pub fn unmark(&self, socket: BorrowedFd<'_>) {
        if let Some((word, bit)) = self.word(socket.as_raw_fd()) {
            word.fetch_and(!bit, Ordering::SeqCst);
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
            let Some((word, bit)) = self.word(number) else { break };
            if word.load(Ordering::SeqCst) & bit != 0 {
                // SAFETY: a number and two words; what is no socket is refused.
                unsafe { libc::shutdown(number, libc::SHUT_RDWR) };
            }
        }
        // SAFETY: ends this process, and runs nothing of what it was copied from.
        unsafe { libc::_exit(0) }
    }
}
