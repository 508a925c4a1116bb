//! System calls that a program makes by their numbers, through `syscall`.
//!
//! libuv closes descriptors that way, Go's and Rust's libraries ask for calls that are newer than the
//! C library, and runtimes avoid its cancellation points. A call that names a descriptor goes to the
//! function of its name here, so that the library hears of it: a `close` it missed would leave a dead
//! connection under a number that the kernel gives to the next file.
//!
//! A child made by number (`fork`, `clone`) is not heard of: what it shares counts as shared for good.

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};

use libc::{
    epoll_event, fd_set, iovec, mmsghdr, msghdr, pollfd, sigset_t, sockaddr, socklen_t, timespec,
    timeval,
};

use crate::{data, descriptors, exec, readiness};

/// Bytes of the kernel's set of signals; the C library's is longer.
const KERNEL_SET: usize = 8;

/// A set of signals as the C library has it; `None` stands for the null pointer.
struct Mask(Option<sigset_t>);

impl Mask {
    /// From the kernel's.
    ///
    /// # Safety
    ///
    /// `address` is null or the address of eight readable bytes.
    unsafe fn of(address: c_long) -> Self {
        if address == 0 {
            return Self(None);
        }
        // SAFETY: a set of signals is an array of numbers: zero is the empty one.
        let mut set: sigset_t = unsafe { std::mem::zeroed() };
        let to = (&raw mut set).cast::<u8>();
        // SAFETY: the caller's eight bytes, and the C library's set is longer than that.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, to, KERNEL_SET) };
        Self(Some(set))
    }

    /// From the kernel's, behind the address of its address, as `pselect6` has it.
    ///
    /// # Safety
    ///
    /// `place` is null or the address of an address as [`Mask::of`] takes.
    unsafe fn at(place: c_long) -> Self {
        if place == 0 {
            return Self(None);
        }
        // SAFETY: the caller's address of a word.
        let address = unsafe { (place as *const c_long).read() };
        // SAFETY: as the caller promised.
        unsafe { Self::of(address) }
    }

    fn pointer(&self) -> *const sigset_t {
        self.0.as_ref().map_or(std::ptr::null(), std::ptr::from_ref)
    }
}

/// Calls the function of a call's name.
macro_rules! named {
    ($call:expr) => {
        // SAFETY: the caller's arguments are those of the call of this number, which are those of the
        // function of its name, in its order.
        unsafe { $call }
    };
}

/// True for a call that makes a process with memory of its own.
///
/// # Safety
///
/// `first` is the first argument of the call of this number.
pub(crate) unsafe fn makes_process(number: c_long, first: c_long) -> bool {
    let flags = match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => return true,
        libc::SYS_clone => first,
        // SAFETY: the program's structure, which begins with its flags.
        libc::SYS_clone3 if first != 0 => unsafe { (first as *const c_long).read_unaligned() },
        _ => return false,
    };
    flags & c_long::from(libc::CLONE_VM) == 0
}

/// The call's outcome (with `errno` set where it is -1) if it is one that the library answers;
/// `None` for all others.
///
/// # Safety
///
/// The arguments are those of the call of this number.
pub(crate) unsafe fn by_number(number: c_long, arguments: [c_long; 6]) -> Option<c_long> {
    let [a, b, c, d, e, f] = arguments;
    let fd = a as c_int;
    let size = |word: c_long| word as usize;
    let outcome: isize = match number {
        libc::SYS_close => named!(descriptors::close(fd)) as isize,
        libc::SYS_close_range => {
            named!(descriptors::close_range(a as c_uint, b as c_uint, c as c_int)) as isize
        }
        libc::SYS_dup => named!(descriptors::dup(fd)) as isize,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_dup2 => named!(descriptors::dup2(fd, b as c_int)) as isize,
        libc::SYS_dup3 => named!(descriptors::dup3(fd, b as c_int, c as c_int)) as isize,
        libc::SYS_fcntl => named!(descriptors::fcntl(fd, b as c_int, c as c_ulong)) as isize,
        libc::SYS_ioctl => named!(descriptors::ioctl(fd, b as c_ulong, c as *mut c_void)) as isize,
        libc::SYS_socket => {
            named!(descriptors::socket(a as c_int, b as c_int, c as c_int)) as isize
        }
        libc::SYS_connect => {
            named!(descriptors::connect(fd, b as *const sockaddr, c as socklen_t)) as isize
        }
        libc::SYS_accept => {
            named!(descriptors::accept(fd, b as *mut sockaddr, c as *mut socklen_t)) as isize
        }
        libc::SYS_accept4 => {
            let (from, length) = (b as *mut sockaddr, c as *mut socklen_t);
            named!(descriptors::accept4(fd, from, length, d as c_int)) as isize
        }
        libc::SYS_shutdown => named!(descriptors::shutdown(fd, b as c_int)) as isize,
        libc::SYS_getsockopt => {
            let (value, length) = (d as *mut c_void, e as *mut socklen_t);
            named!(descriptors::getsockopt(fd, b as c_int, c as c_int, value, length)) as isize
        }
        libc::SYS_setsockopt => {
            let (value, length) = (d as *const c_void, e as socklen_t);
            named!(descriptors::setsockopt(fd, b as c_int, c as c_int, value, length)) as isize
        }
        libc::SYS_read => named!(data::read(fd, b as *mut c_void, size(c))),
        libc::SYS_readv => named!(data::readv(fd, b as *const iovec, c as c_int)),
        libc::SYS_write => named!(data::write(fd, b as *const c_void, size(c))),
        libc::SYS_writev => named!(data::writev(fd, b as *const iovec, c as c_int)),
        libc::SYS_recvfrom => {
            let (from, length) = (e as *mut sockaddr, f as *mut socklen_t);
            named!(data::recvfrom(fd, b as *mut c_void, size(c), d as c_int, from, length))
        }
        libc::SYS_sendto => {
            let (to, length) = (e as *const sockaddr, f as socklen_t);
            named!(data::sendto(fd, b as *const c_void, size(c), d as c_int, to, length))
        }
        libc::SYS_recvmsg => named!(data::recvmsg(fd, b as *mut msghdr, c as c_int)),
        libc::SYS_sendmsg => named!(data::sendmsg(fd, b as *const msghdr, c as c_int)),
        libc::SYS_recvmmsg => {
            let (list, timeout) = (b as *mut mmsghdr, e as *mut timespec);
            named!(data::recvmmsg(fd, list, c as u32, d as c_int, timeout)) as isize
        }
        libc::SYS_sendmmsg => {
            named!(data::sendmmsg(fd, b as *mut mmsghdr, c as u32, d as c_int)) as isize
        }
        libc::SYS_sendfile => {
            named!(data::sendfile(fd, b as c_int, c as *mut libc::off_t, size(d)))
        }
        libc::SYS_splice => {
            let (from_offset, to_offset) = (b as *mut i64, d as *mut i64);
            named!(data::splice(fd, from_offset, c as c_int, to_offset, size(e), f as u32))
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll => {
            named!(readiness::poll(a as *mut pollfd, b as c_ulong, c as c_int)) as isize
        }
        libc::SYS_ppoll => {
            let mask = named!(Mask::of(d));
            let (list, timeout) = (a as *mut pollfd, c as *const timespec);
            named!(readiness::ppoll(list, b as c_ulong, timeout, mask.pointer())) as isize
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_select => {
            let set = |word: c_long| word as *mut fd_set;
            named!(readiness::select(fd, set(b), set(c), set(d), e as *mut timeval)) as isize
        }
        libc::SYS_pselect6 => {
            let set = |word: c_long| word as *mut fd_set;
            // The sixth argument is the address of a mask's address and its length.
            let mask = named!(Mask::at(f));
            let timeout = e as *const timespec;
            named!(readiness::pselect(fd, set(b), set(c), set(d), timeout, mask.pointer())) as isize
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_create => named!(readiness::epoll_create(a as c_int)) as isize,
        libc::SYS_epoll_create1 => named!(readiness::epoll_create1(a as c_int)) as isize,
        libc::SYS_epoll_ctl => {
            named!(readiness::epoll_ctl(fd, b as c_int, c as c_int, d as *mut epoll_event)) as isize
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait => {
            named!(readiness::epoll_wait(fd, b as *mut epoll_event, c as c_int, d as c_int))
                as isize
        }
        libc::SYS_epoll_pwait => {
            let (events, mask) = (b as *mut epoll_event, named!(Mask::of(e)));
            named!(readiness::epoll_pwait(fd, events, c as c_int, d as c_int, mask.pointer()))
                as isize
        }
        libc::SYS_epoll_pwait2 => {
            let (events, mask) = (b as *mut epoll_event, named!(Mask::of(e)));
            let timeout = d as *const timespec;
            named!(readiness::epoll_pwait2(fd, events, c as c_int, timeout, mask.pointer()))
                as isize
        }
        libc::SYS_execve => {
            named!(exec::execve(a as *const _, b as *const _, c as *const _)) as isize
        }
        _ => return None,
    };
    Some(outcome as c_long)
}
