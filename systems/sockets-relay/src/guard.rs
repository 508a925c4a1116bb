//! Who tells the programs when this relay is killed together with the other host's: a guardian, which shuts
//! down the kernel's connections beneath those that both relays had. Of one relay's death the other one
//! hears, and cuts them; of both deaths nobody would, and a program that sleeps on a connection would sleep
//! as long as the other one lives.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::OnceLock;

use beeline_os::guardian::Guardian;

static GUARDIAN: OnceLock<Guardian> = OnceLock::new();

/// Starts this process's guardian. For the relay's own process, before anything else is done in it.
///
/// Errors: the kernel's.
pub fn start() -> std::io::Result<()> {
    let guardian = Guardian::start()?;
    GUARDIAN.get_or_init(|| guardian);
    Ok(())
}

/// The connection is the relays' from now on.
pub(crate) fn mark(socket: &OwnedFd) {
    if let Some(guardian) = GUARDIAN.get() {
        guardian.mark(socket.as_fd());
    }
}

/// The other relay may have given it back to the kernel: an end that is told now would be heard as one in good
/// order.
pub(crate) fn mark_to_reset(socket: &OwnedFd) {
    if let Some(guardian) = GUARDIAN.get() {
        guardian.mark_to_reset(socket.as_fd());
    }
}

/// This relay lets go of it.
pub(crate) fn unmark(socket: &OwnedFd) {
    if let Some(guardian) = GUARDIAN.get() {
        guardian.unmark(socket.as_fd());
    }
}
