//! From the `[documents]` table to the running document store.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use beeline_documents::channel::{RegisterOptions, ServerOptions};
use beeline_documents::{
    ChannelHandle, ChannelOptions, Documents, DocumentsOptions, EngineOptions, FabricClient,
};
use beeline_fabric::ConnectInfo;
use beeline_fabric_open::{Incoming, Service as FabricService};
use beeline_node::NodeHandle;
use beeline_service::{Opening, Service};

use crate::config::{DocumentsConfig, ServeConfig};

/// Name of the document store in the bootstrap exchange.
pub use beeline_documents_client::SERVICE;

/// Where its fabric clients go once it is open.
pub type Target = Arc<OnceLock<ChannelHandle>>;

/// Its door for fabric clients.
pub fn door(target: &Target) -> FabricService {
    let target = Arc::clone(target);
    FabricService {
        name: SERVICE.to_owned(),
        shards: 1,
        payload: Vec::new(),
        incoming: Box::new(move |incoming| deliver(&target, incoming)),
    }
}

/// Hands a client to the thread of fabric clients, which answers.
fn deliver(target: &OnceLock<ChannelHandle>, incoming: Incoming) {
    let Some(channels) = target.get() else {
        incoming.reply.refuse("the document store is not open yet; try again");
        return;
    };
    let Incoming { device, peer, payload, reply, .. } = incoming;
    channels.accept(FabricClient {
        device,
        peer,
        payload,
        reply: Box::new(move |outcome| match outcome {
            // Who is told to use TCP has nothing to connect to.
            Ok(welcome) => {
                let info = welcome.info.unwrap_or(ConnectInfo(Vec::new()));
                reply.accept(&info, welcome.payload);
            }
            Err(reason) => reply.refuse(reason),
        }),
    });
}

fn channel(config: &DocumentsConfig) -> ChannelOptions {
    let buffer_bytes = 64 << 10;
    let register = RegisterOptions {
        base_bytes: config.channel_region.0,
        regularisation: f64::from(config.channel_share.0) / 100.0,
        overload_threshold: f64::from(config.channel_threshold.0) / 100.0,
        bandwidth: f64::from(config.channel_bandwidth.0) * 1e9,
    };
    ChannelOptions {
        spin: Duration::from_micros(config.channel_spin_us.0.into()),
        server: ServerOptions {
            is_rdma: config.is_rdma.0,
            checksum: config.channel_checksum.0,
            max_channels: config.channel_max_clients.0,
            register,
            pool_buffers: u32::try_from(config.channel_pool.0 / buffer_bytes).unwrap_or(u32::MAX),
            buffer_bytes: buffer_bytes as usize,
            ..ServerOptions::default()
        },
    }
}

/// The service, unless its door is closed.
pub fn opening(config: &ServeConfig, target: &Target, node: &NodeHandle) -> Option<Opening> {
    let documents = &config.documents;
    let options = DocumentsOptions {
        address: documents.address.0?,
        threads: node.store().shards(),
        most_connections: documents.max_connections.0 as usize,
        replica_set: documents.replica_set.0.clone().filter(|_| documents.oplog_size.0 > 0),
        engine: EngineOptions {
            log_bytes: documents.oplog_size.0,
            authentication: documents.authentication.0,
            most_cursors: documents.max_cursors.0 as usize,
            cursor_timeout_ms: u64::try_from(documents.cursor_timeout.0.as_millis())
                .unwrap_or(u64::MAX),
            transaction_lifetime_ms: u64::try_from(documents.transaction_lifetime.0.as_millis())
                .unwrap_or(u64::MAX),
            ..EngineOptions::default()
        },
        channel: channel(documents),
    };
    // The keys of a replicated node are its log's; documents do not go through the log.
    if config.member().is_some() {
        return None;
    }
    let (target, node) = (Arc::clone(target), node.clone());
    let open = move || {
        let service = Documents::open(node, &options)?;
        let set = target.set(service.channel_handle());
        assert!(set.is_ok(), "the document store is opened once");
        Ok(Box::new(service) as Box<dyn Service>)
    };
    Some(Opening { name: "documents", after: &[], open: Box::new(open) })
}
