//! How a client of the direct store reaches a node: over the bootstrap exchange.

use std::time::Duration;

use beeline_fabric_open::Dialler;
use beeline_kv_direct::{Connect, Link, LinkError, LinkOptions};

use crate::serve::direct::SERVICE;

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
