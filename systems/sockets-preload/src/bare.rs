//! `syscall`: the door to the kernel for what the C library has no name for.
//!
//! A call that names descriptors is answered by the function of its name ([`crate::numbers`]).
//! Programs also come here for io_uring, whose operations name descriptors in memory that we never see.
//! A program that sets one up keeps the kernel's connections from then on; so does one that locks
//! itself into a filter of system calls (`seccomp`), which may not know those that we make. (A
//! program that makes the call by an instruction of its own is not noticed.)

use std::ffi::{c_int, c_long, c_ulong};

use beeline_sockets::kernel::enter;
use beeline_sockets::table;

use crate::real::real;
use crate::{numbers, quietly};

// The callers' "..." passes six words in the registers where six words are expected here; what a
// call takes fewer of is not looked at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    if matches!(number, libc::SYS_io_uring_setup | libc::SYS_seccomp) {
        quietly(table::leave_to_kernel);
    }
    // SAFETY: the program's own arguments: where it is a `clone`, its arguments.
    if unsafe { numbers::makes_process(number, a) } {
        crate::start::unheard_child();
    }
    // SAFETY: the program's own arguments, those of the call of this number.
    if let Some(outcome) = unsafe { numbers::by_number(number, [a, b, c, d, e, f]) } {
        return outcome;
    }
    // SAFETY: the program's own arguments.
    let outcome = unsafe { enter(number, [a, b, c, d, e, f]) };
    if (-4095..0).contains(&outcome) {
        crate::set_errno(c_int::try_from(-outcome).unwrap_or(libc::EIO));
        return -1;
    }
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(
    what: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    if what == libc::PR_SET_SECCOMP {
        quietly(table::leave_to_kernel);
    }
    real!(prctl(what, a, b, c, d) as fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int)
}
