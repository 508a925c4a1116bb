//! From the `[documents]` table to the running document store.

use beeline_documents::{Documents, DocumentsOptions, EngineOptions};
use beeline_node::NodeHandle;
use beeline_service::{Opening, Service};

use crate::config::ServeConfig;

/// The service, unless its door is closed.
pub fn opening(config: &ServeConfig, node: &NodeHandle) -> Option<Opening> {
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
    };
    // The keys of a replicated node are its log's; documents do not go through the log.
    if config.member().is_some() {
        return None;
    }
    let node = node.clone();
    let open = move || Ok(Box::new(Documents::open(node, &options)?) as Box<dyn Service>);
    Some(Opening { name: "documents", after: &[], open: Box::new(open) })
}
