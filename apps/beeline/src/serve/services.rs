//! The services of a node beside its store: which are on, and with what configuration.
//!
//! One function per service turns its table into an [`Opening`]; the order in which they start
//! follows from what each says it comes after.

use beeline_node::NodeHandle;
use beeline_service::Opening;

use crate::config::ServeConfig;

/// Every service that is not switched off.
pub fn openings(_config: &ServeConfig, _node: &NodeHandle) -> Vec<Opening> {
    Vec::new()
}
