//! How a one-sided client under test reaches a node: through the bootstrap exchange.

use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_open::{Dialled, Dialler, OpenError};
use beeline_kv_client::{ConnectError, Connector};

/// Dials the node anew for each connection, and takes the provider that is agreed on.
#[derive(Debug)]
pub struct ToNode {
    url: String,
    dialler: Dialler,
    dialled: Option<Dialled>,
}

impl ToNode {
    /// For the node at `url`; each step of the exchange takes at most `patience`.
    ///
    /// # Panics
    ///
    /// When the address cannot be one.
    #[must_use]
    pub fn new(url: &str, patience: Duration) -> Self {
        let dialler = Dialler::new("kv", url, patience).expect("the address of a node");
        Self { url: url.to_owned(), dialler, dialled: None }
    }

    fn failed(&self, source: OpenError) -> ConnectError {
        ConnectError::Bootstrap { target: self.url.clone(), source: Box::new(source) }
    }
}

impl Connector for ToNode {
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError> {
        let dialled = self.dialler.dial().map_err(|error| self.failed(error))?;
        let device = Arc::clone(&dialled.device);
        self.dialled = Some(dialled);
        Ok(device)
    }

    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError> {
        let dialled = self.dialled.as_ref().expect("a device is asked for first");
        dialled.exchange(u32::from(shard), info, hello).map_err(|error| self.failed(error))
    }
}
