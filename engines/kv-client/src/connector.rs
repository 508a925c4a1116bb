//! How a client reaches a server: the seam to whoever knows providers.

use std::fmt::Debug;
use std::sync::Arc;

use beeline_fabric::{ConnectInfo, Device, FabricError};

/// Why a connector could not reach the server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The bootstrap exchange failed.
    #[error("{target}: {source}")]
    Bootstrap {
        /// The server's address, as the user gave it.
        target: String,
        /// What went wrong.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The provider failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

/// Reaches one server. Applications implement it over `fabric-open`.
///
/// A client calls [`Connector::device`] once per connection attempt and then
/// [`Connector::exchange`] once per shard, shard 0 first.
pub trait Connector: Debug {
    /// The device to use for the server, negotiated anew: after a loss the choice may differ.
    ///
    /// Errors: [`ConnectError`]. May block, bounded by the connector.
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError>;

    /// Carries the connection data of a queue pair for `shard`, and `hello`, to the server; returns
    /// the server's connection data and its answer.
    ///
    /// Errors: [`ConnectError`]. May block, bounded by the connector.
    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError>;
}
