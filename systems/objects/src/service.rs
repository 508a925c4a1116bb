//! The store as a part of a node.

use std::sync::Arc;

use beeline_observe::MetricSet;
use beeline_service::{Fact, Service};

use crate::store::{Cluster, ObjectMetrics, Store, StoreHandle, StoreOptions};

/// The word that names the service.
pub const NAME: &str = "objects";

/// The running service.
#[derive(Debug)]
pub struct ObjectService {
    store: Store,
    metrics: Arc<ObjectMetrics>,
    facts: Vec<Fact>,
}

impl ObjectService {
    /// Starts the store; `more` is said of it beside what the store says itself.
    ///
    /// Errors: as [`Store::start`].
    pub fn open(
        options: StoreOptions,
        cluster: impl FnOnce(StoreHandle) -> Box<dyn Cluster>,
        more: Vec<Fact>,
    ) -> std::io::Result<Self> {
        let spill = match options.spill_bytes {
            0 => "objects that find no room are dropped".to_owned(),
            bytes => format!("up to {} MiB on disk", bytes >> 20),
        };
        let value = format!(
            "{}  up to {} MiB of memory, {spill}",
            options.socket.display(),
            options.memory_bytes >> 20
        );
        let store = Store::start(options, cluster)?;
        let metrics = store.handle().metrics();
        let mut facts = vec![Fact::new(NAME, value)];
        facts.extend(more);
        Ok(Self { store, metrics, facts })
    }
}

impl Service for ObjectService {
    fn name(&self) -> &'static str {
        NAME
    }

    fn facts(&self) -> Vec<Fact> {
        self.facts.clone()
    }

    fn metrics(&self) -> Vec<Arc<dyn MetricSet>> {
        vec![self.metrics.clone()]
    }

    fn publish(&self) {
        self.store.handle().publish();
    }

    fn health(&self) -> Result<(), String> {
        if self.store.is_running() {
            Ok(())
        } else {
            Err("the store's thread ended; restart the node".to_owned())
        }
    }

    fn stop(self: Box<Self>) {
        // Dropping the store ends its thread; objects live in memory and go with it.
    }
}
