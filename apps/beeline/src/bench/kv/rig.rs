//! A node in this process, and clients of it.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device, FabricError};
use beeline_kv::Eviction;
use beeline_kv::wire::Protocol;
use beeline_kv_client::{Client, ClientOptions, ConnectError, Connector};
use beeline_node::{FabricIncoming, Node, NodeConfig, NodeHandle, ServerOptions};
use beeline_pmem::{Durability, PoolKind, PoolOptions, WriteBack};

/// Bound of one exchange with a shard.
const BOUND: Duration = Duration::from_secs(10);

/// What differs between rigs.
#[derive(Clone, Debug)]
pub struct RigOptions {
    /// Shards, on the first processors.
    pub shards: usize,
    /// Bytes of a log segment.
    pub segment_bytes: u32,
    /// Bytes the pool may grow to.
    pub capacity_bytes: u64,
    /// Does the work of power durability, with this delay per written line; `None` persists
    /// nothing.
    pub emulated_ns: Option<u32>,
    /// Instruction that writes lines back; `None` is the best there is.
    pub write_back: Option<WriteBack>,
    /// Idle shards help.
    pub cooperative: bool,
    /// More threads than processors: shards poll on for the default time only.
    pub crowded: bool,
}

impl Default for RigOptions {
    fn default() -> Self {
        Self {
            shards: 1,
            segment_bytes: 64 << 20,
            capacity_bytes: 2 << 30,
            emulated_ns: None,
            write_back: None,
            cooperative: true,
            crowded: false,
        }
    }
}

/// The node, and the devices of both sides.
#[derive(Debug)]
pub struct Rig {
    node: Node,
    server: Arc<dyn Device>,
    url: String,
}

impl Rig {
    /// Starts a node whose memory is volatile.
    pub fn start(url: &str, options: &RigOptions) -> anyhow::Result<Self> {
        let emulated = options.emulated_ns;
        let config = NodeConfig {
            data_directory: std::env::temp_dir(),
            pool: PoolOptions {
                kind: Some(PoolKind::Dram),
                durability: emulated.map_or(Durability::None, |_| Durability::Power),
                segment_bytes: options.segment_bytes,
                capacity_bytes: options.capacity_bytes,
                write_delay_ns: emulated.unwrap_or(0),
                write_back: options.write_back,
                emulate_durability: emulated.is_some(),
                prepared_segments: 1,
                ..PoolOptions::default()
            },
            shards: options.shards,
            pin_shards: true,
            // Alone on its processor, a measured shard never sleeps between two requests of a turn.
            spin: Duration::from_micros(if options.crowded { 20 } else { 1000 }),
            max_memory_bytes: 0,
            feed_bytes: 0,
            eviction: Eviction::NoEviction,
            cooperative_write_back: options.cooperative,
            accept_damage: false,
            fabric: ServerOptions { baselines: true, ..ServerOptions::default() },
            shutdown_wait: Duration::from_secs(2),
            replication: None,
            redis: None,
        };
        // Shards take their processors from what this thread may use.
        let node = std::thread::scope(|scope| {
            let start = scope.spawn(|| {
                super::super::turns::unpin()?;
                Ok::<_, anyhow::Error>(Node::start(&config)?)
            });
            start.join().map_err(|_| anyhow::anyhow!("starting the node panicked"))?
        })?;
        let server = beeline_fabric_open::open(url)?;
        Ok(Self { node, server, url: url.to_owned() })
    }

    /// A client on the calling thread, with a device of its own.
    pub fn client(&self, protocol: Protocol, window: u16) -> anyhow::Result<Client> {
        self.client_with(protocol, window, true)
    }

    /// As [`Rig::client`]; with or without the mixed update.
    pub fn client_with(
        &self,
        protocol: Protocol,
        window: u16,
        mixed_update: bool,
    ) -> anyhow::Result<Client> {
        let connector = Direct {
            handle: self.node.handle(),
            server: Arc::clone(&self.server),
            device: beeline_fabric_open::open(&self.url)?,
        };
        let options = ClientOptions {
            protocol,
            window,
            value_bytes: 20 << 10,
            mixed_update,
            // Polls until the answer comes: what is measured is not a wake-up.
            spin: Duration::from_secs(1),
            reconnect: false,
            ..ClientOptions::default()
        };
        Ok(Client::connect(Box::new(connector), options)?)
    }

    /// What the pool is, in words.
    pub fn pool(&self) -> String {
        self.node.pool_report().to_string()
    }

    /// Waits, a second at most, until the collector is done with what clients left behind: it looks
    /// every tenth of a second.
    pub fn settle(&self) {
        let look = || {
            let stats = self.stats();
            let total = stats.store.total;
            (stats.pool_used_bytes, total.collector_copied_bytes, total.collector_won_bytes)
        };
        let mut seen = look();
        for _ in 0..8 {
            std::thread::sleep(Duration::from_millis(120));
            let now = look();
            if now == seen {
                return;
            }
            seen = now;
        }
    }

    /// Figures of the node.
    pub fn stats(&self) -> beeline_node::NodeStats {
        self.node.handle().stats()
    }
}

/// Reaches the node without the bootstrap exchange.
#[derive(Debug)]
struct Direct {
    handle: NodeHandle,
    server: Arc<dyn Device>,
    device: Arc<dyn Device>,
}

impl Connector for Direct {
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError> {
        Ok(Arc::clone(&self.device))
    }

    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError> {
        let (send, answer) = mpsc::channel();
        self.handle.accept_fabric(FabricIncoming {
            shard: usize::from(shard),
            device: Arc::clone(&self.server),
            peer: info.clone(),
            payload: hello.to_vec(),
            reply: Box::new(move |outcome| {
                let _ = send.send(outcome);
            }),
        });
        match answer.recv_timeout(BOUND) {
            Ok(Ok(accepted)) => {
                let info = accepted.connect_info.unwrap_or(ConnectInfo(Vec::new()));
                Ok((info, accepted.payload))
            }
            Ok(Err(reason)) => Err(ConnectError::Bootstrap {
                target: "the node of this process".to_owned(),
                source: reason.into(),
            }),
            Err(_) => Err(ConnectError::Fabric(FabricError::PeerGone)),
        }
    }
}
