//! Whether the kernel offers a facility, found out by asking for it and giving it back at once.

use rustix::io::Errno;

/// Whether a process may use `io_uring`.
///
/// Errors: `ENOSYS` where the kernel lacks it, `EPERM` where it is forbidden.
pub fn io_uring() -> Result<(), Errno> {
    // SAFETY: zero entries and a null parameter block are refused before anything is made: the
    // kernel answers EINVAL or EFAULT where the call exists and is allowed.
    let answer =
        unsafe { libc::syscall(libc::SYS_io_uring_setup, 0, std::ptr::null_mut::<libc::c_void>()) };
    match last(answer) {
        Err(error) if error == Errno::NOSYS || error == Errno::PERM => Err(error),
        _ => Ok(()),
    }
}

/// Whether a process may handle its own page faults (`userfaultfd`).
///
/// Errors: `ENOSYS` where the kernel lacks it, `EPERM` where it is forbidden.
pub fn userfaultfd() -> Result<(), Errno> {
    // SAFETY: the call takes flags only and returns a new descriptor.
    let answer = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
    close(last(answer)?);
    Ok(())
}

/// Whether another process can be watched through a descriptor (`pidfd_open`).
///
/// Errors: `ENOSYS` where the kernel lacks it.
pub fn pidfd() -> Result<(), Errno> {
    let own = rustix::process::getpid();
    rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).map(drop)
}

/// Whether anonymous memory can be shared through a descriptor (`memfd_create`).
///
/// Errors: `ENOSYS` where the kernel lacks it.
pub fn memfd() -> Result<(), Errno> {
    rustix::fs::memfd_create("beeline-probe", rustix::fs::MemfdFlags::CLOEXEC).map(drop)
}

fn last(answer: libc::c_long) -> Result<libc::c_long, Errno> {
    if answer >= 0 {
        return Ok(answer);
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::NOSYS))
}

fn close(descriptor: libc::c_long) {
    if let Ok(descriptor) = i32::try_from(descriptor) {
        // SAFETY: the caller just received this descriptor from the kernel and keeps no other
        // handle to it.
        let owned =
            unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(descriptor) };
        drop(owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_leaves_no_descriptor_behind() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let _ = (io_uring(), userfaultfd(), pidfd(), memfd());
        let before = open();
        for _ in 0..50 {
            let _ = (io_uring(), userfaultfd(), pidfd(), memfd());
        }
        // Other tests of this process open and close a few at the same time.
        assert!(open() < before + 40, "{before} descriptors grew to {}", open());
    }
}
