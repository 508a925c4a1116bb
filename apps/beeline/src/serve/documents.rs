//! From the `[documents]` table to the running document store.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use beeline_documents::channel::{RegisterOptions, ServerOptions};
use beeline_documents::replica::agreed::{Agreed, FORMAT};
use beeline_documents::replica::fabric::{MemberLink, MemberLinks};
use beeline_documents::replica::{Propose, ReplicaOptions};
use beeline_documents::{
    ChannelHandle, ChannelOptions, Documents, DocumentsOptions, EngineOptions, FabricClient,
    Membership,
};
use beeline_documents_client::{MessageType, Options, RequestError};
use beeline_fabric::ConnectInfo;
use beeline_fabric_open::{Incoming, Service as FabricService};
use beeline_kv::{Embedded, KvError, Store, StoreOptions};
use beeline_node::{Node, NodeError, NodeHandle};
use beeline_pmem::{Pool, PoolKind, PoolOptions};
use beeline_replicated_service::{Replicator, Tag};
use beeline_service::{OpenService, Opening, Service};

use super::plan;
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
        rnic: beeline_documents_client::rnic,
    }
}

/// Bytes of entries that a member applies at once at most.
const MOST_BATCH_BYTES: usize = 4 << 20;

/// The service, unless its door is closed.
pub fn opening(
    config: &ServeConfig,
    target: &Target,
    node: &NodeHandle,
    link: Link,
) -> Option<Opening> {
    let documents = &config.documents;
    let options = DocumentsOptions {
        address: documents.address.0?,
        threads: node.store().shards(),
        most_connections: documents.max_connections.0 as usize,
        replica_set: documents.replica_set.0.clone().filter(|_| documents.oplog_size.0 > 0),
        engine: EngineOptions {
            log_bytes: documents.oplog_size.0,
            authentication: documents.authentication.0,
            test_commands: documents.test_commands.0,
            most_cursors: documents.max_cursors.0 as usize,
            cursor_timeout_ms: u64::try_from(documents.cursor_timeout.0.as_millis())
                .unwrap_or(u64::MAX),
            transaction_lifetime_ms: u64::try_from(documents.transaction_lifetime.0.as_millis())
                .unwrap_or(u64::MAX),
            ..EngineOptions::default()
        },
        channel: channel(documents),
    };
    let open: OpenService = if let Some(member) = config.member() {
        // The keys of a replicated node are its log's, and replaced as a whole by its snapshots: documents have
        // a pool of their own.
        let (propose, agreed) = (link.propose?, link.agreed);
        let (pool, directory) = (plan::pool(config), config.data.join("documents"));
        let replica = ReplicaOptions {
            set: documents.replica_set.0.clone().unwrap_or_else(|| "rs0".to_owned()),
            me: member.id,
            members: documents.members.0.clone(),
            fabric: config.peers.0.iter().map(|peer| (peer.id, peer.log)).collect(),
            cluster: config.cluster.0,
            election_timeout: documents.election_timeout.0,
            oplog_bytes: documents.oplog_size.0,
            longest_batch: pool.segment_bytes as usize,
            batch_bytes: (pool.segment_bytes as usize / 8).min(MOST_BATCH_BYTES),
            rollback_directory: config.data.join("rollback"),
            held_file: config.data.join("documents.held"),
        };
        let shards = node.store().shards();
        let (damage, target) = (config.accept_damage.0, Arc::clone(target));
        let links = documents.is_rdma.0.then(|| {
            let links = Links { doors: replica.fabric.clone(), patience: replica.election_timeout };
            Box::new(links) as Box<dyn MemberLinks>
        });
        Box::new(move || {
            let pool = open_pool(&directory, &pool, shards, damage)?;
            let membership = Membership { options: replica, agreed, propose, links };
            let service = Documents::join(pool, &options, membership)?;
            meet(&target, &service);
            Ok(Box::new(service) as Box<dyn Service>)
        })
    } else {
        let (target, node) = (Arc::clone(target), node.clone());
        Box::new(move || {
            let service = Documents::open(node, &options)?;
            meet(&target, &service);
            Ok(Box::new(service) as Box<dyn Service>)
        })
    };
    Some(Opening { name: "documents", after: &[], open })
}

/// The way to other members over fabric.
#[derive(Debug)]
struct Links {
    doors: BTreeMap<u16, SocketAddr>,
    patience: Duration,
}

impl MemberLinks for Links {
    fn link(&self, member: u16) -> Result<Box<dyn MemberLink>, String> {
        let Some(door) = self.doors.get(&member) else {
            return Err(format!("member {member} has no fabric door"));
        };
        let timeout = self.patience.max(Duration::from_millis(500));
        let options = Options { timeout, ..Options::default() };
        let link = beeline_documents_client::Link::connect(&format!("auto://{door}"), options);
        Ok(Box::new(ToMember(link.map_err(|error| error.to_string())?)))
    }
}

/// A channel to another member.
#[derive(Debug)]
struct ToMember(beeline_documents_client::Link);

impl MemberLink for ToMember {
    fn call(
        &self,
        kind: MessageType,
        name: &[u8],
        body: &[u8],
        optimes: (u64, u64),
        timeout: Duration,
    ) -> Result<Vec<u8>, RequestError> {
        self.0.call(kind, name, body, optimes, timeout)
    }

    fn provider(&self) -> &str {
        self.0.provider()
    }
}

/// Fabric clients go to the store from now on.
fn meet(target: &Target, service: &Documents) {
    let set = target.set(service.channel_handle());
    assert!(set.is_ok(), "the document store is opened once");
}

fn open_pool(
    directory: &Path,
    options: &PoolOptions,
    shards: usize,
    accept_damage: bool,
) -> Result<Embedded, KvError> {
    let store = StoreOptions { shards, accept_damage, ..StoreOptions::default() };
    match options.kind {
        Some(PoolKind::Dram) => Ok(Store::open(Pool::dram(options)?, store)?.into()),
        _ => Embedded::open(directory, options, store),
    }
}

/// The documents' way into the cluster's log.
#[derive(Debug)]
struct Proposals(Replicator);

impl Propose for Proposals {
    fn propose(&self, order: Vec<u8>, done: Box<dyn FnOnce() + Send>) {
        // What came of it is in the register, which every member applies.
        self.0.propose(order, move |_| done());
    }
}

/// What a member's documents share with its log.
#[derive(Debug, Default)]
pub struct Link {
    /// What the log decided.
    pub agreed: Arc<Agreed>,
    propose: Option<Box<dyn Propose>>,
}

impl Link {
    /// Opens the way into the log, where the documents are a member of a replica set.
    ///
    /// Errors: [`NodeError`].
    pub fn open(&mut self, config: &ServeConfig, node: &Node) -> Result<(), NodeError> {
        if config.member().is_some() && config.is_documents_member() {
            let replicator = node.replicator(Tag::DOCUMENTS, FORMAT)?;
            self.propose = Some(Box::new(Proposals(replicator)));
        }
        Ok(())
    }
}
