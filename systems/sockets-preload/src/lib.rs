//! The names of the C library that a preloaded program calls, answered by `beeline-sockets`.
//!
//! Thin on purpose: each function asks whether a descriptor is ours, and otherwise calls the C
//! library's own function of that name. Nothing here panics into the program: a panic inside the
//! library becomes `EIO`. Before the constructor ran (another library's constructor may call us),
//! every descriptor is plain and calls go straight to the kernel.
//!
//! - [`real`]: the C library's own functions.
//! - [`data`]: reading and writing.
//! - [`descriptors`]: connections begun, copied, ended; options.
//! - [`readiness`]: poll, select, epoll.
//! - [`explicit`]: what the C library's calls cannot say of the packet lane (`nts_*`, `include/nts.h`).
//! - [`stdio`]: the C library's streams.
//! - [`exec`]: programs that replace this one.
//! - [`spawn`]: programs beside this one, and who goes between; `actions`: what they are handed.
//! - `bare`: `syscall`; `numbers`: calls that are made by their numbers.
//! - [`start`]: the constructor, and what happens at `fork`.

#![allow(
    clippy::missing_safety_doc,
    reason = "each function is the C function of its name, whose manual is its contract"
)]

mod actions;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod bare;
mod data;
mod descriptors;
mod exec;
mod explicit;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod numbers;
mod readiness;
mod real;
mod spawn;
mod start;
mod stdio;
#[cfg(target_arch = "x86_64")]
mod variadic;

use beeline_sockets::kernel::Outcome;

/// Sets `errno`.
pub(crate) fn set_errno(error: i32) {
    // SAFETY: the C library returns the place of this thread's errno, which is always valid.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place = error };
}

/// Reads `errno`.
pub(crate) fn errno() -> i32 {
    // SAFETY: as in `set_errno`.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place }
}

/// Runs the library's part of a call; a panic in it ends here.
pub(crate) fn guarded(part: impl FnOnce() -> Outcome) -> isize {
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(part));
    match outcome {
        Ok(Ok(value)) => isize::try_from(value).unwrap_or(isize::MAX),
        Ok(Err(error)) => {
            set_errno(error.0);
            -1
        }
        Err(_) => {
            set_errno(libc::EIO);
            -1
        }
    }
}

/// As [`guarded`], for functions that return an `int`.
pub(crate) fn guarded_int(part: impl FnOnce() -> Outcome) -> i32 {
    i32::try_from(guarded(part)).unwrap_or(i32::MAX)
}

/// Runs what has no result; a panic in it ends here, and `errno` stays.
pub(crate) fn quietly(part: impl FnOnce()) {
    let before = errno();
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(part));
    set_errno(before);
}
