//! The direct store as a service of the node: its door in the fabric bootstrap, and its opening.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use beeline_direct::{
    Connector, DirectHandle, DirectOptions, DirectServerOptions, DirectService, FabricClient,
};
use beeline_fabric::ConnectInfo;
use beeline_fabric_open::{Incoming, Service as FabricService};
use beeline_kv_direct::TableOptions;
use beeline_node::NodeHandle;
use beeline_service::{Opening, Service};

use crate::config::DirectConfig;

use beeline_direct_client::Dials;
pub use beeline_direct_client::SERVICE;

/// How long a server that takes pairs over may be silent before the packet is sent again.
const MOVES_TIMEOUT: Duration = Duration::from_secs(2);

/// Where its clients go once it is open.
pub type Target = Arc<OnceLock<DirectHandle>>;

/// Its door.
pub fn door(config: &DirectConfig, target: &Target) -> FabricService {
    let target = Arc::clone(target);
    FabricService {
        name: SERVICE.to_owned(),
        shards: config.processors.0,
        payload: Vec::new(),
        incoming: Box::new(move |incoming| deliver(&target, incoming)),
    }
}

/// Its opening.
pub fn opening(config: &DirectConfig, target: &Target, node: &NodeHandle) -> Opening {
    let options = DirectOptions {
        memory_bytes: config.memory.0,
        processors: config.processors.0,
        table: TableOptions {
            index_permille: config.index_share.0 * 10,
            inline_threshold: config.inline_threshold.0 as usize,
            seed: seed(),
        },
        spin: Duration::from_micros(config.spin_us.0.into()),
        server: DirectServerOptions {
            max_clients: config.max_clients.0,
            ..DirectServerOptions::default()
        },
        udp: config.udp_address.0,
        connector: Some(Connector(Arc::new(|| Box::new(Dials::new(MOVES_TIMEOUT))))),
        ..DirectOptions::default()
    };
    let (target, node) = (Arc::clone(target), node.clone());
    let open = move || {
        let service = DirectService::start(&options)?;
        let set = target.set(service.handle());
        assert!(set.is_ok(), "the direct store is opened once");
        node.serve_direct(Arc::new(service.handle()));
        Ok(Box::new(service) as Box<dyn Service>)
    };
    Opening { name: SERVICE, after: &[], open: Box::new(open) }
}

/// A number that clients cannot know: with it, keys that all fall into one bucket cannot be chosen.
fn seed() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// Hands a client to its processor; the processor's thread answers.
fn deliver(target: &OnceLock<DirectHandle>, incoming: Incoming) {
    let Some(direct) = target.get() else {
        incoming.reply.refuse("the direct store is not open yet; try again");
        return;
    };
    let Incoming { shard, device, peer, payload, reply, .. } = incoming;
    direct.accept(FabricClient {
        processor: shard,
        device,
        peer,
        payload,
        reply: Box::new(move |outcome| match outcome {
            // A refusal is in the payload; there is nothing to connect to then.
            Ok(welcome) => {
                let info = welcome.info.unwrap_or(ConnectInfo(Vec::new()));
                reply.accept(&info, welcome.payload);
            }
            Err(reason) => reply.refuse(reason),
        }),
    });
}
