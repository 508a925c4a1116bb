//! A descriptor that one side makes readable and the other clears.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use beeline_fabric::FabricError;
use beeline_fabric::error::system;
use rustix::event::{EventfdFlags, eventfd};

/// An eventfd.
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    pub(crate) fn new() -> Result<Self, FabricError> {
        eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map(Self)
            .map_err(system("creating an eventfd"))
    }

    /// Makes it readable. It can only fail when the counter is full: then it is readable.
    pub(crate) fn raise(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it unreadable.
    pub(crate) fn lower(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
