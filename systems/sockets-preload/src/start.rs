//! The constructor, and what happens at `fork`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use beeline_sockets::table;

use crate::quietly;
use crate::real::{self, real};

/// Programs that hand a connection to a child behind a filter of system calls (`seccomp`) before
/// they know who is there: it kills whoever makes a call that it does not know, as those we make.
const LEFT_ALONE: [&str; 4] = ["sshd", "sshd-session", "sshd-auth", "vsftpd"];

/// True when this program keeps the kernel's connections.
fn is_left_alone() -> bool {
    let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let name = program.file_name().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
    LEFT_ALONE.contains(&name)
}

extern "C" fn start() {
    quietly(|| {
        real::find_all();
        if crate::spawn::is_beside_go_between() {
            return;
        }
        crate::exec::remember();
        let _ = crate::spawn::library();
        let _ = beeline_os::barrier::is_asymmetric();
        if is_left_alone() {
            return;
        }
        beeline_sockets::young::begin();
        table::begin();
        crate::stdio::adopt(&[0, 1, 2]);
        // SAFETY: three functions that stay loaded and take nothing.
        let _ = unsafe {
            libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork))
        };
    });
}

/// For a program that is about to be another, which was started by one that was `preloaded` so.
pub(crate) fn begin_for_another(preloaded: &[u8]) {
    real::find_all();
    crate::exec::remember_as(preloaded);
    let _ = beeline_os::barrier::is_asymmetric();
    table::begin();
    // SAFETY: as in `start`.
    let _ = unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork))
    };
}

extern "C" fn before_fork() {
    quietly(table::before_fork);
}

extern "C" fn after_fork_in_parent() {
    quietly(table::after_fork_in_parent);
}

extern "C" fn after_fork() {
    quietly(table::after_fork_in_child);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> c_int {
    let child = real!(fork() as fn() -> c_int);
    if child < 0 {
        quietly(|| {
            if !table::is_foreign_process() {
                table::not_forked();
            }
        });
    }
    child
}

/// A child is about to be made of which nothing is heard, as `fork`'s is by the functions above.
pub(crate) fn unheard_child() {
    quietly(|| {
        if !table::is_foreign_process() {
            table::shared_for_good();
        }
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> c_int {
    unheard_child();
    real!(_Fork() as fn() -> c_int)
}

/// The program's function, in a child of its own or of this memory.
type Begun = Option<unsafe extern "C" fn(*mut c_void) -> c_int>;

// The last three are passed on as they are found where the caller gave fewer: the C library looks at those that the
// flags tell of.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    begun: Begun,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    storage: *mut c_void,
    child: *mut c_void,
) -> c_int {
    if flags & libc::CLONE_VM == 0 {
        unheard_child();
    }
    real!(clone(begun, stack, flags, argument, parent, storage, child)
        as fn(
            Begun,
            *mut c_void,
            c_int,
            *mut c_void,
            *mut c_void,
            *mut c_void,
            *mut c_void,
        ) -> c_int)
}

/// Variable that asks for [`tell`].
const VERBOSE: &str = "BEELINE_SOCKETS_VERBOSE";

/// At the end of a program that was asked to: one line on what was accelerated.
extern "C" fn tell() {
    quietly(|| {
        let tally = &beeline_sockets::connection::TALLY;
        let count = |counter: &AtomicU32| counter.load(Ordering::Relaxed);
        let asked = count(&tally.asked);
        if std::env::var_os(VERBOSE).is_none() || asked == 0 {
            return;
        }
        let line = format!(
            "beeline: process {}: {asked} connections the monitor was asked about, {} given memory by it, \
             {} sent through shared memory; the others stayed with the kernel{}\n",
            std::process::id(),
            count(&tally.taken),
            count(&tally.switched),
            if table::is_left_to_kernel() { " (io_uring or seccomp is in use)" } else { "" },
        );
        let _ = beeline_sockets::kernel::write(2, line.as_bytes());
    });
}

#[used]
#[unsafe(link_section = ".fini_array")]
static TELL: extern "C" fn() = tell;

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
