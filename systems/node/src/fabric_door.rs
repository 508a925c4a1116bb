//! How one-sided clients reach a shard.
//!
//! The bootstrap exchange and the choice of provider happen at the edge of the program; what
//! arrives here is a device, the peer's connection data and a way to answer. The queue pair is
//! made on the shard's own thread, which alone uses it.

use std::fmt;
use std::sync::Arc;

use beeline_fabric::{ConnectInfo, Device};

/// Answers an incoming client: connection data and the service's welcome, or why not.
pub type FabricReply = Box<dyn FnOnce(Result<FabricAccepted, String>) + Send>;

/// A one-sided client that wants to be served by a shard.
pub struct FabricIncoming {
    /// Which shard.
    pub shard: usize,
    /// The chosen provider's device.
    pub device: Arc<dyn Device>,
    /// How to reach the client's queue pair.
    pub peer: ConnectInfo,
    /// What the client said to the key-value service.
    pub payload: Vec<u8>,
    /// Called once.
    pub reply: FabricReply,
}

impl fmt::Debug for FabricIncoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricIncoming")
            .field("shard", &self.shard)
            .field("provider", &self.device.attributes().provider)
            .finish_non_exhaustive()
    }
}

/// What an accepted client is told.
#[derive(Clone, Debug)]
pub struct FabricAccepted {
    /// How to reach the shard's queue pair; `None` when the service refused, as its payload says.
    pub connect_info: Option<ConnectInfo>,
    /// The service's welcome, or refusal.
    pub payload: Vec<u8>,
}
