//! Processes that are killed behind any of their instructions.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Waits until the child stands still or has ended: how.
pub fn wait_for(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: a place of ours; the child is ours and was not waited for to its end.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    status
}

/// Runs `step` in a process of its own, a copy of this one that shares mappings and descriptors with it, and
/// kills it behind the first of its instructions of which `behind` says so; false where it had come to its end by
/// then. `None`: the system has no single steps for this process.
pub fn killed_behind(mut behind: impl FnMut() -> bool, step: impl FnOnce()) -> Option<bool> {
    // SAFETY: the child runs `step` in its own copy of memory and ends without returning; no lock of another thread
    // is needed for that but the allocator's, which the C library takes care of.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no memory is named.
        let traced = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
        if traced == 0 {
            // SAFETY: stops this process, for the parent to go on with it.
            unsafe { libc::raise(libc::SIGSTOP) };
            let _ = catch_unwind(AssertUnwindSafe(step));
        }
        // SAFETY: ends this process, without the handlers of the one that it is a copy of.
        unsafe { libc::_exit(i32::from(traced != 0)) };
    }
    if child < 0 || !libc::WIFSTOPPED(wait_for(child)) {
        return None;
    }
    while !behind() {
        // SAFETY: the child stands still, and no memory is named.
        if unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0) } != 0 {
            break;
        }
        if !libc::WIFSTOPPED(wait_for(child)) {
            return Some(false);
        }
    }
    // SAFETY: a child that was not waited for to its end.
    unsafe { libc::kill(child, libc::SIGKILL) };
    wait_for(child);
    Some(true)
}
