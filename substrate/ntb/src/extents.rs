//! Parts of this host's memory that programs of the other one may write themselves (direct mode).
//!
//! On a bridge an extent is an offset and a length of the device's descriptor. In the emulation each extent is an
//! object of its own, and the end that has it hands its descriptor over through a socket beside the window's file:
//! `FILE.extents-0` is what side 0 listens at. A device's resource file has no such socket: no extents are given there.
//!
//! With an object each, a program that is given one can reach nothing else. An offset in a descriptor that several
//! programs share protects nothing: whoever has the descriptor can map all of it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use beeline_os::control_socket::{ControlListener, ControlSocket, Received};

use crate::cable::beside;
use crate::files::failed;
use crate::{CableError, WindowUrl};

/// Extents that came and were not taken yet, at most.
const MOST: usize = 1024;

/// One end of the way by which extents are handed over.
#[derive(Debug)]
pub struct Extents {
    /// `None` over a device.
    way: Option<(ControlListener, PathBuf)>,
    came: HashMap<u64, OwnedFd>,
}

impl Extents {
    /// Of the end of a window that this process has claimed.
    ///
    /// Errors: [`CableError::System`].
    pub fn open(url: &WindowUrl) -> Result<Self, CableError> {
        let paths = beside(url, url.side).zip(beside(url, url.side.other()));
        let listen = |(own, other): (PathBuf, PathBuf)| {
            let listener = ControlListener::bind_path(&own, 0o600);
            Ok((listener.map_err(failed("listening for extents at", &own))?, other))
        };
        Ok(Self { way: paths.map(listen).transpose()?, came: HashMap::new() })
    }

    /// Hands an extent over to the other end, which knows it by `number`. Never blocks.
    ///
    /// Errors: the kernel's, where the other end is not there; `Unsupported` over a device.
    pub fn give(&self, number: u64, memory: BorrowedFd<'_>) -> io::Result<()> {
        let (_, other) = self.way.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        ControlSocket::connect_path(other)?.send(&number.to_le_bytes(), &[memory])
    }

    /// The extent that the other end handed over under this number: once.
    pub fn take(&mut self, number: u64) -> Option<OwnedFd> {
        let own = rustix::process::geteuid().as_raw();
        for socket in self.way.iter().flat_map(|(listener, _)| listener.waiting(64)) {
            let known = socket.peer().is_ok_and(|peer| peer.uid == own || peer.uid == 0);
            let (mut record, mut descriptors) = ([0; 8], Vec::new());
            let received = socket.receive(&mut record, &mut descriptors);
            if known
                && matches!(received, Ok(Received::Record(8)))
                && self.came.len() < MOST
                && let Some(memory) = descriptors.pop()
            {
                self.came.insert(u64::from_le_bytes(record), memory);
            }
        }
        self.came.remove(&number)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn what_one_end_gives_the_other_takes_once_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let url = |side: usize| -> WindowUrl {
            let file = folder.path().join("window");
            format!("ntb://{}?side={side}&size=65536", file.display()).parse().unwrap()
        };
        let mut one = Extents::open(&url(0)).unwrap();
        let memory = beeline_os::mapping::create_memfd("extent", 4096).unwrap();
        let mut other = Extents::open(&url(1)).unwrap();
        other.give(7, memory.as_fd()).unwrap();
        other.give(8, memory.as_fd()).unwrap();
        assert!(one.take(9).is_none());
        assert!(one.take(8).is_some() && one.take(7).is_some());
        assert!(one.take(7).is_none());
        assert!(other.take(7).is_none());
        drop(one);
        assert!(other.give(9, memory.as_fd()).is_err(), "nobody is there");
    }
}
