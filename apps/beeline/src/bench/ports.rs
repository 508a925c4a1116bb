//! Ports for the servers a benchmark starts.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// A port nobody listens on, given out once in this process: below the range from which the kernel
/// takes ports for outgoing connections, or somebody who asks for a server that is not there yet
/// could be connected with itself and hold the server's port.
///
/// Errors: none is free.
pub fn free_port() -> anyhow::Result<u16> {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 22_000;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    // Processes begin at different places.
    let start = std::process::id().wrapping_mul(61);
    (0..COUNT)
        .map(|_| FIRST + start.wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed)) % COUNT)
        .filter_map(|port| u16::try_from(port).ok())
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .ok_or_else(|| anyhow::anyhow!("no port is free on loopback"))
}
