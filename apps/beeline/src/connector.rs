//! How the key-value client reaches a node: its connector over the bootstrap exchange.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_open::{Dialled, Dialler, OpenError};
use beeline_kv_client::{Client, ClientError, ClientOptions, ConnectError, Connector};

use crate::output::complain;
use crate::serve::fabric::SERVICE;

/// Connects to the node at `url`. When shared memory, a memory window or RDMA was agreed on and the
/// connection over it could not be made, TCP is tried. With `verbose`, what was chosen and why goes to standard error.
///
/// Errors: [`ClientError`] of the last attempt.
pub fn connect(url: &str, options: &ClientOptions, verbose: bool) -> Result<Client, ClientError> {
    let connector = |avoid: Option<String>| -> Result<Box<NodeConnector>, ClientError> {
        Ok(Box::new(NodeConnector::new(url, options.timeout, verbose, avoid)?))
    };
    let failed = match Client::connect(connector(None)?, options.clone()) {
        Err(error @ (ClientError::Fabric(_) | ClientError::Post(_))) => error,
        outcome => return outcome,
    };
    Client::connect(
        connector(Some(format!("the better provider failed: {failed}")))?,
        options.clone(),
    )
}

/// The key-value client's connector to a node. A provider whose agreement did not last is avoided
/// at the next attempt, so that a reconnect falls back to TCP; one that lasted is tried again.
#[derive(Debug)]
struct NodeConnector {
    url: String,
    dialler: Dialler,
    dialled: Option<(Dialled, Instant)>,
    /// An agreement over in less than this was none.
    trial: Duration,
    verbose: bool,
}

impl NodeConnector {
    fn new(
        url: &str,
        timeout: Duration,
        verbose: bool,
        avoid: Option<String>,
    ) -> Result<Self, ConnectError> {
        let failed = |source: OpenError| bootstrap(url, source);
        let mut dialler = Dialler::new(SERVICE, url, timeout).map_err(failed)?;
        if let Some(why) = avoid {
            for provider in ["shm", "ntb", "verbs"] {
                dialler.avoid(provider, why.clone());
            }
        }
        Ok(Self { url: url.to_owned(), dialler, dialled: None, trial: timeout, verbose })
    }
}

fn bootstrap(url: &str, source: OpenError) -> ConnectError {
    ConnectError::Bootstrap { target: url.to_owned(), source: Box::new(source) }
}

impl Connector for NodeConnector {
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError> {
        match self.dialled.take() {
            Some((last, since)) if since.elapsed() < self.trial => {
                self.dialler.avoid(&last.provider, "the last connection over it did not last");
            }
            Some(_) => self.dialler.forgive(),
            None => {}
        }
        let dialled = self.dialler.dial().map_err(|error| bootstrap(&self.url, error))?;
        if self.verbose {
            complain(format_args!(
                "{}: over {}, because {}; {} shards",
                self.url, dialled.provider, dialled.reason, dialled.shards
            ));
        }
        let device = Arc::clone(&dialled.device);
        self.dialled = Some((dialled, Instant::now()));
        Ok(device)
    }

    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError> {
        let Some((dialled, _)) = &self.dialled else {
            let state = beeline_fabric::QueuePairState::Init;
            let needed = "a device is agreed on before connection data is exchanged";
            return Err(beeline_fabric::FabricError::WrongState { state, needed }.into());
        };
        dialled.exchange(u32::from(shard), info, hello).map_err(|error| bootstrap(&self.url, error))
    }
}
