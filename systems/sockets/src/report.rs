//! Whether a program that was started in two steps began: a Unix socket of a fresh abstract name,
//! to which the child connects before its last `exec`. That closes it; where the `exec` fails, the
//! child says why first. Nothing is inherited for it, so nothing the starter does to the child's
//! descriptors gets in between.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Time between two looks at a child that has not called.
const LOOKS: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The starter's side.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    name: Vec<u8>,
}

impl Listener {
    /// Listens under a name that the kernel chooses.
    ///
    /// Errors: the kernel's.
    pub fn new() -> rustix::io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed())?;
        rustix::net::listen(&socket, 4)?;
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(&socket)?)?;
        let name = address.abstract_name().ok_or(Errno::ADDRNOTAVAIL)?.to_vec();
        Ok(Self { socket, name })
    }

    /// What the child is told.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// Waits for the last `exec` of process `child`, which runs `first` before it (a path as in
    /// `/proc/PID/exe`): its error, or `None` when it came about, or the child ended before, or
    /// nobody can tell.
    #[must_use]
    pub fn hear(&self, child: i32, first: &[u8]) -> Option<i32> {
        let child = Pid::from_raw(child)?;
        let alive = pidfd_open(child, PidfdFlags::empty()).ok()?;
        loop {
            let wanted = PollFlags::IN;
            let mut entries = [PollFd::new(&self.socket, wanted), PollFd::new(&alive, wanted)];
            match poll(&mut entries, Some(&LOOKS)) {
                Err(Errno::INTR) => continue,
                Err(_) => return None,
                // One that could not call, for want of a descriptor, is not waited for when it
                // runs its program.
                Ok(0) if runs(child, first) => continue,
                Ok(0) => return None,
                Ok(_) => {}
            }
            if entries[0].revents().is_empty() {
                return None;
            }
            let Ok(caller) = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) else {
                continue;
            };
            // Anybody may call.
            if socket_peercred(&caller).is_ok_and(|peer| peer.pid == child) {
                return heard(&caller);
            }
        }
    }
}

/// True while `child` runs the program at `path`.
fn runs(child: Pid, path: &[u8]) -> bool {
    let link = format!("/proc/{}/exe", child.as_raw_nonzero());
    rustix::fs::readlink(link, Vec::new()).is_ok_and(|found| found.as_bytes() == path)
}

fn heard(caller: &OwnedFd) -> Option<i32> {
    let mut word = [0; 4];
    loop {
        match rustix::io::read(caller, &mut word) {
            Err(Errno::INTR) => {}
            Ok(4) => return Some(i32::from_le_bytes(word)),
            _ => return None,
        }
    }
}

/// The child's side.
#[derive(Debug)]
pub struct Caller(Option<OwnedFd>);

impl Caller {
    /// Calls the starter that listens under `name`; an empty one, or nobody there: nobody is told.
    #[must_use]
    pub fn new(name: &[u8]) -> Self {
        let call = || -> rustix::io::Result<OwnedFd> {
            let flags = SocketFlags::CLOEXEC;
            let kind = SocketType::STREAM;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
            rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
            Ok(socket)
        };
        Self(if name.is_empty() { None } else { call().ok() })
    }

    /// Tells the starter that there will be no `exec`, and why.
    pub fn tell(&self, error: i32) {
        if let Some(socket) = &self.0 {
            let _ = rustix::io::write(socket.as_fd(), &error.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_heard_and_silence_is_success() {
        let listener = Listener::new().unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let caller = Caller::new(listener.name());
        caller.tell(libc::ENOENT);
        assert_eq!(listener.hear(me, b""), Some(libc::ENOENT));
        drop(Caller::new(listener.name()));
        assert_eq!(listener.hear(me, b""), None);
        // A child that ended without a word.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        assert_eq!(listener.hear(i32::try_from(child.id()).unwrap(), b""), None);
        child.wait().unwrap();
    }

    #[test]
    fn a_child_that_could_not_call_is_waited_for_until_it_runs_its_program() {
        let listener = Listener::new().unwrap();
        let mut child = std::process::Command::new("sleep").arg("3").spawn().unwrap();
        let (number, begun) = (i32::try_from(child.id()).unwrap(), std::time::Instant::now());
        assert_eq!(listener.hear(number, b"/another/program"), None);
        assert!(child.try_wait().unwrap().is_none(), "it runs, and was not waited for");
        let own = std::fs::read_link(format!("/proc/{number}/exe")).unwrap();
        let own = std::os::unix::ffi::OsStrExt::as_bytes(own.as_os_str());
        assert_eq!(listener.hear(number, own), None);
        assert!(begun.elapsed().as_secs() >= 1, "it was waited for to its end");
        child.wait().unwrap();
    }
}
