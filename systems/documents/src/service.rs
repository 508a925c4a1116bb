//! The document store as a service of the node.

use std::net::SocketAddr;
use std::sync::Arc;

use beeline_documents_query::QueryError;
use beeline_kv::KvError;
use beeline_node::NodeHandle;
use beeline_observe::MetricSet;
use beeline_service::{Fact, Service};

use crate::channel::{ChannelHandle, ChannelOptions, Channels};
use crate::commands::Identity;
use crate::door::Door;
use crate::engine::{Engine, EngineOptions};
use crate::node_store::NodeStore;
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
        let identity = Identity {
            address: door.address().to_string(),
            most_connections: options.most_connections,
            replica_set: options.replica_set.clone(),
        };
        let mut channel = options.channel.clone();
        channel.server.wire = Some(door.address());
        let is_rdma = channel.server.is_rdma;
        let channels = Channels::start(Arc::clone(&engine), identity, channel, options.threads)
            .map_err(DocumentsError::Channel)?;
        let replica_set = options.replica_set.clone();
        Ok(Self { engine, door, channels, is_rdma, replica_set })
    }

    /// For the thread that meets fabric clients.
    #[must_use]
    pub fn channel_handle(&self) -> ChannelHandle {
        self.channels.handle()
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

    fn metrics(&self) -> Vec<Arc<dyn MetricSet>> {
        vec![self.engine.metrics.clone()]
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
    }

    fn health(&self) -> Result<(), String> {
        self.channels.health()
    }

    fn stop(mut self: Box<Self>) {
        self.channels.stop();
        self.door.close();
    }
}
