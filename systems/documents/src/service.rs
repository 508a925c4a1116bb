//! The document store as a service of the node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use beeline_documents_query::QueryError;
use beeline_kv::{Embedded, KvError};
use beeline_node::NodeHandle;
use beeline_observe::MetricSet;
use beeline_service::{Fact, Service};

use crate::channel::{ChannelHandle, ChannelOptions, Channels};
use crate::commands::Identity;
use crate::door::Door;
use crate::engine::{Engine, EngineOptions};
use crate::node_store::{NodeStore, PoolStore};
use crate::replica::agreed::Agreed;
use crate::replica::fabric::{FabricSources, MemberLinks};
use crate::replica::source::{Sources, TcpSources};
use crate::replica::store::ReplicaStore;
use crate::replica::{Propose, Replica, ReplicaOptions, Running};
use crate::stats::DocumentsMetrics;
use crate::store::Store;

/// How the service is set.
#[derive(Clone, Debug)]
pub struct DocumentsOptions {
    /// Where MongoDB clients connect. Port 0 picks a free one.
    pub address: SocketAddr,
    /// Threads that serve them.
    pub threads: usize,
    /// Connections served at once.
    pub most_connections: usize,
    /// The replica set the node says it is the only member of; `None`: it stands alone.
    pub replica_set: Option<String>,
    /// Limits of the engine.
    pub engine: EngineOptions,
    /// Clients over fabric.
    pub channel: ChannelOptions,
}

/// Why the service does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentsError {
    /// The address cannot be used.
    #[error(
        "cannot listen on {address} for MongoDB clients: {source}; stop what listens there, or choose another with --documents-address"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Threads or descriptors could not be had.
    #[error("cannot start the thread of fabric clients: {0}")]
    Channel(#[source] std::io::Error),
    /// The store refused.
    #[error("cannot open the documents in the node's store: {0}")]
    Store(#[from] KvError),
    /// A thread could not be made.
    #[error("a thread of the document store cannot be started: {0}")]
    Thread(#[source] std::io::Error),
    /// What is stored cannot be read.
    #[error("cannot read the stored documents: {0}")]
    Catalog(#[from] QueryError),
}

/// The running service.
#[derive(Debug)]
pub struct Documents {
    engine: Arc<Engine>,
    door: Door,
    channels: Channels,
    is_rdma: bool,
    replica_set: Option<String>,
    running: Option<Running>,
}

/// What makes a node a member of a replica set.
#[derive(Debug)]
pub struct Membership {
    /// How it is set.
    pub options: ReplicaOptions,
    /// What the cluster's log decided.
    pub agreed: Arc<Agreed>,
    /// The way into that log.
    pub propose: Box<dyn Propose>,
    /// The way to the other members over fabric; `None`: TCP alone.
    pub links: Option<Box<dyn MemberLinks>>,
}

impl Documents {
    /// Opens the databases of a node and the door to them.
    ///
    /// Errors: [`DocumentsError`].
    pub fn open(node: NodeHandle, options: &DocumentsOptions) -> Result<Self, DocumentsError> {
        let store: Arc<dyn Store> = Arc::new(NodeStore::open(node)?);
        Self::over(store, options)
    }

    /// The same over any store.
    ///
    /// Errors: [`DocumentsError`].
    pub fn over(store: Arc<dyn Store>, options: &DocumentsOptions) -> Result<Self, DocumentsError> {
        let engine = Engine::open(store, &options.engine)?;
        engine.finish_builds()?;
        let address = options.address;
        let door = Door::open(
            address,
            Arc::clone(&engine),
            options.threads,
            options.most_connections,
            options.replica_set.clone(),
        )
        .map_err(|source| DocumentsError::Listen { address, source })?;
        let set = options.replica_set.clone();
        Self::served(engine, door, options, set)
    }

    /// With the thread of fabric clients, who are told to use the door where `is_rdma` is off.
    fn served(
        engine: Arc<Engine>,
        door: Door,
        options: &DocumentsOptions,
        replica_set: Option<String>,
    ) -> Result<Self, DocumentsError> {
        let is_rdma = options.channel.server.is_rdma;
        let identity = Identity {
            address: door.address().to_string(),
            most_connections: options.most_connections,
            replica_set: replica_set.clone(),
        };
        let mut channel = options.channel.clone();
        channel.server.wire = Some(door.address());
        let stopped = || std::io::Error::other("the door is closed");
        let runtime = door.runtime().ok_or_else(stopped).map_err(DocumentsError::Channel)?;
        let engine_of = Arc::clone(&engine);
        let channels = Channels::start(engine_of, identity, channel, options.threads, runtime)
            .map_err(DocumentsError::Channel)?;
        Ok(Self { engine, door, channels, is_rdma, replica_set, running: None })
    }

    /// For the thread that meets fabric clients.
    #[must_use]
    pub fn channel_handle(&self) -> ChannelHandle {
        self.channels.handle()
    }

    /// A member of a replica set, over a pool of its own.
    ///
    /// Errors: [`DocumentsError`].
    pub fn join(
        pool: Embedded,
        options: &DocumentsOptions,
        membership: Membership,
    ) -> Result<Self, DocumentsError> {
        let Membership { options: set, agreed, propose, links } = membership;
        let inner: Arc<dyn Store> = Arc::new(PoolStore::open(pool)?);
        let store = Arc::new(ReplicaStore::open(inner, Arc::clone(&agreed.gate))?);
        let rows: Arc<dyn Store> = Arc::<ReplicaStore>::clone(&store);
        let engine = Engine::open(rows, &options.engine)?;
        let tcp = TcpSources {
            cluster: set.cluster,
            me: set.me,
            members: set.members.clone(),
            segment: set.longest_batch,
            patience: set.election_timeout.max(Duration::from_millis(200)),
        };
        let sources: Arc<dyn Sources> = match links {
            Some(links) => Arc::new(FabricSources { tcp, links, avoided: Arc::default() }),
            None => Arc::new(tcp),
        };
        let replica = Arc::new(Replica::new(set, store, agreed));
        replica.notice_loss()?;
        let known = engine.replica.set(Arc::clone(&replica));
        assert!(known.is_ok(), "an engine belongs to one replica set");
        let (address, threads) = (options.address, options.threads);
        let set = Some(replica.options.set.clone());
        let door = Door::open(
            address,
            Arc::clone(&engine),
            threads,
            options.most_connections,
            set.clone(),
        )
        .map_err(|source| DocumentsError::Listen { address, source })?;
        let mut served = Self::served(engine, door, options, set)?;
        let running = replica.start(&served.engine, propose, sources);
        served.running = Some(running.map_err(DocumentsError::Thread)?);
        Ok(served)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.door.address()
    }

    fn told(&self) -> String {
        let set = self
            .replica_set
            .as_ref()
            .map_or_else(|| "standalone".to_owned(), |name| format!("replica set {name}"));
        let users = if self.engine.authentication { ", users by SCRAM-SHA-256" } else { "" };
        let fabric = if self.is_rdma { "; over fabric" } else { "" };
        format!(
            "{}  as MongoDB {}, {set}{users}{fabric}",
            self.door.address(),
            crate::commands::VERSION
        )
    }

    /// The databases.
    #[must_use]
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

impl Service for Documents {
    fn name(&self) -> &'static str {
        "documents"
    }

    fn facts(&self) -> Vec<Fact> {
        vec![Fact::new("documents", self.told())]
    }

    fn now(&self) -> Vec<Fact> {
        let Some(replica) = self.engine.replica.get() else { return Vec::new() };
        vec![Fact::new("documents", replica.in_words())]
    }

    fn metrics(&self) -> Vec<Arc<dyn MetricSet>> {
        vec![self.engine.metrics.clone(), self.engine.times.clone()]
    }

    fn publish(&self) {
        let metrics = &self.engine.metrics;
        self.channels.publish(metrics);
        metrics.documents_cursors.set(self.engine.cursors.count() as u64);
        let databases = self.engine.databases();
        metrics
            .documents_collections
            .set(databases.iter().map(|one| one.collections().len() as u64).sum());
        metrics
            .documents_databases
            .set(databases.iter().filter(|one| !one.collections().is_empty()).count() as u64);
        if let Some(replica) = self.engine.replica.get() {
            publish(replica, metrics);
        }
    }

    fn health(&self) -> Result<(), String> {
        match self.engine.replica.get().and_then(|replica| replica.illness()) {
            Some(reason) => Err(reason),
            None => self.channels.health(),
        }
    }

    fn stop(mut self: Box<Self>) {
        // Replies that wait for other members are given up, then connections end.
        drop(self.running.take());
        self.channels.stop();
        self.door.close();
    }
}

/// What a member of a replica set counts.
fn publish(replica: &Replica, metrics: &DocumentsMetrics) {
    let counts = &replica.counts;
    let count = |one: &AtomicU64| one.load(Ordering::Relaxed);
    let (term, _) = replica.primary();
    metrics.documents_replica_state.set(replica.state() as u64);
    metrics.documents_replica_term.set(term);
    let behind = (replica.latest() >> 32).saturating_sub(replica.store.last().place.time >> 32);
    metrics.documents_replica_lag_seconds.set(behind.saturating_mul(1_000_000_000));
    metrics.documents_replica_terms_led.set(count(&counts.led));
    metrics.documents_replica_applied_entries.set(count(&counts.applied));
    metrics.documents_replica_taken_back_entries.set(count(&counts.taken_back));
    metrics.documents_replica_copies.set(count(&counts.copies));
    metrics.documents_replica_overdue_replies.set(count(&counts.overdue));
}
