//! Processes by descriptor: a pidfd names one process for good, where a number may be reused.

use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags};

/// A descriptor that becomes readable when process `pid` ends. `pid` must be known to be alive or
/// unreaped (a connected socket's peer credential is not proof: the caller treats an immediate
/// end-of-file on that socket as death as well).
///
/// Errors: `NotFound` when there is no such process; the kernel's otherwise.
pub fn open(pid: i32) -> std::io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(std::io::ErrorKind::NotFound)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    #[test]
    fn the_descriptor_becomes_readable_when_the_process_ends() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let fd = open(i32::try_from(child.id()).unwrap()).unwrap();
        let ready = |bound_s| {
            let bound = Timespec { tv_sec: bound_s, tv_nsec: 0 };
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&bound)).unwrap()
        };
        assert_eq!(ready(0), 0);
        child.kill().unwrap();
        assert_eq!(ready(10), 1);
        child.wait().unwrap();
    }
}
