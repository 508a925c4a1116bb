//! The fabric door: where one-sided clients are met, and how they get to their shard.
//!
//! The address is bound before the pool is recovered, so that a taken port costs no recovery; who
//! comes before the node is ready is told to come again.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use beeline_fabric::Device;
use beeline_fabric_open::{
    Bootstrap, BootstrapConfig, Incoming, OpenError, Service, open, open_window,
};
use beeline_node::{FabricIncoming, NodeHandle};

use super::replicated::{self, LogDoor};
use crate::config::values::Window;

/// Name of the key-value service in the bootstrap exchange.
pub const SERVICE: &str = "kv";

/// The open door. Dropping it closes the address; clients connected by then stay connected.
#[derive(Debug)]
pub struct FabricDoor {
    bootstrap: Bootstrap,
    node: Arc<OnceLock<NodeHandle>>,
    providers: Vec<String>,
    rdma_flush: Option<String>,
}

impl FabricDoor {
    /// Opens what providers this host has, and listens on `address` for clients of `shards`
    /// shards, with `log` for members of the node's cluster, and for the services in `more`. At
    /// least TCP has to open, and a window that was asked for; why another did not is a
    /// warning.
    ///
    /// Errors: [`OpenError`].
    pub fn open(
        address: SocketAddr,
        shards: usize,
        window: &Window,
        log: Option<Arc<OnceLock<LogDoor>>>,
        more: Vec<Service>,
    ) -> Result<Self, OpenError> {
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        match open("shm://") {
            Ok(device) => devices.push(device),
            Err(error) => tracing::warn!(%error, "no shared-memory clients will be served"),
        }
        let window = window.url().map(|url| open_window(&url)).transpose()?;
        devices.extend(window.as_ref().map(|window| Arc::clone(&window.device)));
        // A client on another host reaches data where it reached this address.
        let ip = match address {
            SocketAddr::V4(address) => address.ip().to_string(),
            SocketAddr::V6(address) => format!("[{}]", address.ip()),
        };
        let rdma_url = rdma_url(address.ip());
        devices.extend(rdma_url.as_deref().and_then(rdma));
        devices.push(open(&format!("tcp://{ip}"))?);
        let end = window.and_then(|window| window.end);
        let named = |provider: &str| match (provider, &end) {
            ("ntb", None) => "ntb (emulated)".to_owned(),
            ("ntb", Some(end)) => format!("ntb (side {})", end.side),
            _ => provider.to_owned(),
        };
        let providers = devices.iter().map(|device| named(device.attributes().provider)).collect();
        let rdma_flush = devices
            .iter()
            .map(|device| device.attributes())
            .find(|attributes| attributes.provider == "verbs")
            .map(|attributes| attributes.persistent_flush.to_owned());
        let node = Arc::new(OnceLock::new());
        let target = Arc::clone(&node);
        let mut services = vec![Service {
            name: SERVICE.to_owned(),
            shards: u32::try_from(shards).unwrap_or(u32::MAX),
            payload: Vec::new(),
            incoming: Box::new(move |incoming| deliver(&target, incoming)),
        }];
        services.extend(log.map(|log| Service {
            name: replicated::SERVICE.to_owned(),
            shards: 1,
            payload: Vec::new(),
            incoming: Box::new(move |incoming| replicated::greet(&log, incoming)),
        }));
        services.extend(more);
        let config = BootstrapConfig {
            tcp: Some(address),
            window: end,
            renewed: rdma_url,
            ..BootstrapConfig::default()
        };
        let bootstrap = Bootstrap::listen(config, devices, services)?;
        Ok(Self { bootstrap, node, providers, rdma_flush })
    }

    /// The node is ready: clients are served from now on.
    pub fn serve(&self, node: NodeHandle) {
        let set = self.node.set(node);
        assert!(set.is_ok(), "a door leads to one node");
    }

    /// Where it listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.bootstrap.address()
    }

    /// How the RDMA device makes writes persistent; `None` where none is served.
    pub fn rdma_flush(&self) -> Option<String> {
        self.rdma_flush.clone()
    }

    /// Providers a client can be served over.
    pub fn providers(&self) -> Vec<String> {
        self.providers.clone()
    }
}

/// Where the RDMA device is that clients are served over: none for a door on loopback, because its
/// link would be a door to the network.
fn rdma_url(door: IpAddr) -> Option<String> {
    if door.is_loopback() {
        None
    } else if door.is_unspecified() {
        Some("verbs://".to_owned())
    } else {
        Some(format!("verbs://?address={door}"))
    }
}

/// The RDMA device, if there is one now; one that comes later is found when a client asks.
fn rdma(url: &str) -> Option<Arc<dyn Device>> {
    match open(url) {
        Ok(device) => Some(device),
        Err(reason) => {
            tracing::info!(%reason, "no RDMA clients will be served");
            None
        }
    }
}

/// Hands a client to its shard; the shard's thread answers.
fn deliver(node: &OnceLock<NodeHandle>, incoming: Incoming) {
    let Some(node) = node.get() else {
        incoming.reply.refuse("the node is still recovering its store; try again");
        return;
    };
    let Incoming { shard, device, peer, payload, reply, .. } = incoming;
    node.accept_fabric(FabricIncoming {
        shard: shard as usize,
        device,
        peer,
        payload,
        reply: Box::new(move |outcome| match outcome {
            // A refusal by the service is in its payload; there is nothing to connect to then.
            Ok(accepted) => match accepted.connect_info {
                Some(info) => reply.accept(&info, accepted.payload),
                None => reply.accept(&beeline_fabric::ConnectInfo(Vec::new()), accepted.payload),
            },
            Err(reason) => reply.refuse(reason),
        }),
    });
}
