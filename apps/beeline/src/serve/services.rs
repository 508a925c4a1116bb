//! The services of a node beside its store: which are on, and with what configuration.
//!
//! One function per service turns its table into an [`Opening`]; the order in which they start
//! follows from what each says it comes after. `docs/services.md` says how to add one.

use beeline_node::NodeHandle;
use beeline_service::Opening;

use super::{documents, objects};
use crate::config::ServeConfig;

/// Every service that is not left out with `--without`.
pub fn openings(config: &ServeConfig, node: &NodeHandle) -> Vec<Opening> {
    let mut openings = all(config, node);
    openings.retain(|opening| !config.without.has(opening.name));
    openings
}

/// Every service this program has.
fn all(config: &ServeConfig, node: &NodeHandle) -> Vec<Opening> {
    let mut openings = vec![objects::opening(config)];
    openings.extend(documents::opening(config, node));
    openings
}
