//! `syscall`: the door to the kernel for what the C library has no name for.
//!
//! Programs come here for io_uring, whose operations name descriptors in memory that we never see.
//! A program that sets one up keeps the kernel's connections from then on; so does one that locks
//! itself into a filter of system calls (`seccomp`), which may not know those that we make. (A
//! program that makes the call by an instruction of its own is not noticed.)

use std::ffi::{c_int, c_long, c_ulong};

use beeline_sockets::table;

use crate::quietly;
use crate::real::real;

#[cfg(target_arch = "x86_64")]
unsafe fn call(number: c_long, arguments: [c_long; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    let outcome: c_long;
    // SAFETY: the kernel's calling convention; what the call does is the caller's affair.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => outcome,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    outcome
}

#[cfg(target_arch = "aarch64")]
unsafe fn call(number: c_long, arguments: [c_long; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    let outcome: c_long;
    // SAFETY: the kernel's calling convention; what the call does is the caller's affair.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => outcome,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    outcome
}

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
    // SAFETY: the program's own arguments.
    let outcome = unsafe { call(number, [a, b, c, d, e, f]) };
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
