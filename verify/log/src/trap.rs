//! Stops a process in the middle of a copy into a peer's memory.
//!
//! On shared memory the leader's own processor copies entries into the followers' logs. Here a
//! page of the leader's mapping of such a log is made read-only; the copy that reaches it faults,
//! in its middle, and the handler of the fault makes the page writable again and stops the whole
//! process, as SIGSTOP from outside would at this very instruction. SIGCONT lets the copy go on,
//! however much later.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

static START: AtomicUsize = AtomicUsize::new(0);
static LENGTH: AtomicUsize = AtomicUsize::new(0);
static SPRUNG: AtomicU32 = AtomicU32::new(0);

const PAGE: usize = 4096;

extern "C" fn on_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    let (start, length) = (START.load(Ordering::SeqCst), LENGTH.load(Ordering::SeqCst));
    // SAFETY: the kernel passes a valid description of the fault.
    let fault = unsafe { &*info };
    // SAFETY: a SIGSEGV's description has the address.
    let address = unsafe { fault.si_addr() } as usize;
    if !(start..start + length).contains(&address) {
        // Somebody else's fault: it happens again, and ends the process.
        // SAFETY: the default action is a valid handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // SAFETY: the range is the mapping `set` found; nothing unmaps it while its key is held.
    unsafe { libc::mprotect(start as *mut _, length, libc::PROT_READ | libc::PROT_WRITE) };
    SPRUNG.fetch_add(1, Ordering::SeqCst);
    // SAFETY: no memory is involved.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// How often the process was stopped by a trap.
#[must_use]
pub fn sprung() -> u32 {
    SPRUNG.load(Ordering::SeqCst)
}

/// Makes every second page of this process's mapping of the log in `folder` a trap, all of which
/// the first one springs. Returns the mapping's length. Headers and commit words, in the first
/// page, stay writable.
///
/// Errors: `NotFound` when no such mapping is there.
pub fn set(folder: &Path) -> io::Result<usize> {
    let folder = folder.to_string_lossy().into_owned();
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let found = maps.lines().find_map(|line| {
        let is_log = line.contains(&folder) && line.contains("rw-s") && !line.ends_with(')');
        let (start, end) = line.split_once(' ').filter(|_| is_log)?.0.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        Some((address(start)?, address(end)?)).filter(|(start, end)| end - start > 16 * PAGE)
    });
    let (start, end) = found.ok_or(io::ErrorKind::NotFound)?;
    START.store(start, Ordering::SeqCst);
    LENGTH.store(end - start, Ordering::SeqCst);
    // SAFETY: all zeroes is a valid action: no flags, no mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_fault as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the action is whole, and its handler does only what is allowed in one: `mprotect`
    // and `raise` are system calls.
    let installed =
        unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut()) };
    if installed != 0 {
        return Err(io::Error::last_os_error());
    }
    for page in (start + 2 * PAGE..end).step_by(2 * PAGE) {
        // SAFETY: a page of the mapping just found. Whoever stores there meets the handler.
        if unsafe { libc::mprotect(page as *mut _, PAGE, libc::PROT_READ) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(end - start)
}
