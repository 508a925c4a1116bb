//! How clients of the direct store reach its nodes: over the bootstrap exchange.
//!
//! Place: `apps`, an edge of the program: it opens fabric devices. The command, the Python package and
//! the C library connect through it.

#![forbid(unsafe_code)]

use std::time::Duration;

use beeline_fabric_open::Dialler;
use beeline_kv_direct::{Connect, DirectClient, DirectClientError, Link, LinkError, LinkOptions};

/// Name of the direct store in the bootstrap exchange.
pub const SERVICE: &str = "direct";

/// Opens links; when one over the best provider cannot be made, the next best is tried.
#[derive(Clone, Copy, Debug)]
pub struct Dials {
    options: LinkOptions,
}

impl Dials {
    /// Every exchange and every answer is bounded by `timeout`.
    pub fn new(timeout: Duration) -> Self {
        Self::with(LinkOptions { timeout, ..LinkOptions::default() })
    }

    /// Links with these options.
    pub fn with(options: LinkOptions) -> Self {
        Self { options }
    }
}

impl Connect for Dials {
    fn connect(&mut self, server: &str, processor: u32) -> Result<(Link, u32), LinkError> {
        let unreachable = |error| LinkError::Unreachable(Box::new(error));
        let mut dialler =
            Dialler::new(SERVICE, server, self.options.timeout).map_err(unreachable)?;
        let mut last = None;
        // Shared memory, a window, RDMA, TCP.
        for _ in 0..4 {
            let dialled = match dialler.dial() {
                Ok(dialled) => dialled,
                Err(error) => return Err(last.unwrap_or_else(|| unreachable(error))),
            };
            let mut exchange = |info: &_, hello: &[u8]| {
                dialled.exchange(processor, info, hello).map_err(|error| Box::new(error) as _)
            };
            match Link::connect(&dialled.device, &mut exchange, self.options) {
                Ok(link) => return Ok((link, dialled.shards)),
                Err(error @ LinkError::Fabric(_)) => {
                    dialler.avoid(&dialled.provider, format!("the link failed: {error}"));
                    last = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or(LinkError::Broken))
    }
}

/// A client of the map that `servers` hold together, by their fabric addresses as in
/// `auto://127.0.0.1:4790`. Stays on its thread.
///
/// Errors: [`DirectClientError`] of the first that cannot be reached.
pub fn connect(
    servers: impl IntoIterator<Item = String>,
    timeout: Duration,
) -> Result<DirectClient, DirectClientError> {
    DirectClient::connect(servers, Box::new(Dials::new(timeout)))
}
