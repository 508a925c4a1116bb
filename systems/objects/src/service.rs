//! The store as a part of a node.

use std::sync::Arc;

use std::net::TcpListener;

use beeline_observe::MetricSet;
use beeline_service::{Fact, Service};

use crate::cluster::{ClusterOptions, Dial, Door, Finding, Manager};
use crate::store::{Alone, Cluster, ObjectMetrics, Store, StoreOptions};

/// The word that names the service.
pub const NAME: &str = "objects";

/// The running service.
#[derive(Debug)]
pub struct ObjectService {
    /// Before the store, whose client it is.
    manager: Option<Manager>,
    store: Store,
    metrics: Arc<ObjectMetrics>,
    facts: Vec<Fact>,
}

impl ObjectService {
    /// Starts the store of a node that no other reaches.
    ///
    /// Errors: as [`Store::start`].
    pub fn open_alone(options: StoreOptions) -> std::io::Result<Self> {
        let facts = facts(&options);
        let store = Store::start(options, |handle| Box::new(Alone(handle)))?;
        let metrics = store.handle().metrics();
        Ok(Self { manager: None, store, metrics, facts })
    }

    /// Starts the store and its manager; peers come in through the door, those without fabric
    /// through `listener`.
    ///
    /// Errors: as [`Store::start`] and [`Manager::start`].
    pub fn open(
        options: StoreOptions,
        cluster: ClusterOptions,
        dial: Box<dyn Dial>,
        listener: TcpListener,
    ) -> std::io::Result<(Self, Door)> {
        let others = match &cluster.finding {
            Finding::Peers(peers) if peers.is_empty() => "looks at no other node".to_owned(),
            Finding::Peers(peers) => format!("peers {}", peers.join(", ")),
            Finding::Directory { address, .. } => format!("directory {address}"),
        };
        let others = format!("{}  {others}", cluster.advertised);
        let mut facts = facts(&options);
        facts.insert(1, Fact::new("objects from", others));
        let mut manager = Ok(None);
        let store = Store::start(options, |handle| {
            match Manager::start(cluster, dial, handle.clone(), listener) {
                Ok((started, calls)) => {
                    manager = Ok(Some(started));
                    calls
                }
                Err(error) => {
                    manager = Err(error);
                    Box::new(Alone(handle)) as Box<dyn Cluster>
                }
            }
        })?;
        let manager = manager?.ok_or(std::io::ErrorKind::Other)?;
        let door = manager.door();
        let metrics = store.handle().metrics();
        Ok((Self { manager: Some(manager), store, metrics, facts }, door))
    }
}

fn facts(options: &StoreOptions) -> Vec<Fact> {
    let mut facts = vec![fact(options)];
    if !options.processors.is_empty() {
        facts.push(Fact::new("objects on", format!("processors {:?}", options.processors)));
    }
    facts
}

fn fact(options: &StoreOptions) -> Fact {
    let spill = match options.spill_bytes {
        0 => "objects that find no room are dropped".to_owned(),
        bytes => format!("up to {} MiB on disk", bytes >> 20),
    };
    let socket = options.socket.display();
    Fact::new(
        NAME,
        format!("{socket}  up to {} MiB of memory, {spill}", options.memory_bytes >> 20),
    )
}

impl Service for ObjectService {
    fn name(&self) -> &'static str {
        NAME
    }

    fn facts(&self) -> Vec<Fact> {
        self.facts.clone()
    }

    fn metrics(&self) -> Vec<Arc<dyn MetricSet>> {
        let mut sets: Vec<Arc<dyn MetricSet>> =
            vec![self.metrics.clone(), self.store.handle().times()];
        if let Some(manager) = &self.manager {
            sets.push(manager.metrics());
        }
        sets
    }

    fn publish(&self) {
        self.store.handle().publish();
        if let Some(manager) = &self.manager {
            manager.publish();
        }
    }

    fn health(&self) -> Result<(), String> {
        if self.store.is_running() {
            Ok(())
        } else {
            Err("the store's thread ended; restart the node".to_owned())
        }
    }

    fn stop(self: Box<Self>) {
        // Dropping the manager ends what peers do here, dropping the store its thread; objects
        // live in memory and go with it.
    }
}
