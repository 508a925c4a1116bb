//! The services of a node beside its store: which are on, and with what configuration.
//!
//! One function per service turns its table into an [`Opening`]; the order in which they start
//! follows from what each says it comes after. `docs/services.md` says how to add one.

use std::net::SocketAddr;

use beeline_node::NodeHandle;
use beeline_service::Opening;

use super::{direct, documents, objects};
use crate::config::ServeConfig;

/// What services share with the fabric door, which is open before them.
#[derive(Debug)]
pub struct Links {
    /// Where the fabric door listens.
    pub fabric: Option<SocketAddr>,
    /// The object store's way to other nodes.
    pub objects: Option<objects::Link>,
    /// Where clients of the direct store go once it is open.
    pub direct: direct::Target,
    /// Where fabric clients of the document store go once it is open.
    pub documents: documents::Target,
    /// What the documents of a cluster's member share with its log.
    pub set: documents::Link,
}

/// Every service that is not left out with `--without`.
pub fn openings(config: &ServeConfig, node: &NodeHandle, links: Links) -> Vec<Opening> {
    let mut openings = all(config, node, links);
    openings.retain(|opening| !config.without.has(opening.name));
    openings
}

/// Every service this program has.
fn all(config: &ServeConfig, node: &NodeHandle, links: Links) -> Vec<Opening> {
    let mut openings = vec![
        objects::opening(config, links.fabric, links.objects),
        direct::opening(&config.direct, &links.direct, node),
    ];
    openings.extend(documents::opening(config, &links.documents, node, links.set));
    openings
}
