//! What `serve` prints once it serves.

use std::net::SocketAddr;

use beeline_node::Node;
use beeline_pmem::Durability;
use beeline_service::Services;
use serde::Serialize;

use super::view::count;
use crate::config::ServeConfig;
use crate::config::values::{DurabilityWord, human_bytes};

/// What runs where, and how durable it is. With `--json` it is printed as one object.
#[derive(Clone, Debug, Serialize)]
pub struct Banner {
    event: &'static str,
    version: &'static str,
    commit: &'static str,
    process: u32,
    resp_address: Option<SocketAddr>,
    http_address: Option<SocketAddr>,
    fabric_address: Option<SocketAddr>,
    fabric_providers: Vec<String>,
    /// How writes over RDMA are made persistent; only where an RDMA device is served.
    rdma_persistent_flush: Option<String>,
    data: String,
    pool: String,
    durability: String,
    mechanism: String,
    emulated: bool,
    reasons: Vec<String>,
    capacity_bytes: u64,
    used_bytes: u64,
    shards: usize,
    recovered_keys: u64,
    recovered_entries: u64,
    damaged_entries: u64,
    torn_entries: u64,
    recovery_seconds: f64,
    /// What each service says of itself.
    services: Vec<ServiceFacts>,
}

/// A service's lines.
#[derive(Clone, Debug, Serialize)]
struct ServiceFacts {
    service: &'static str,
    facts: Vec<(String, String)>,
}

/// The other doors, which the node itself does not know.
#[derive(Clone, Debug, Default)]
pub struct Doors {
    /// Status page.
    pub http: Option<SocketAddr>,
    /// Fabric bootstrap.
    pub fabric: Option<SocketAddr>,
    /// Providers that answer there.
    pub providers: Vec<String>,
    /// How the RDMA device among them makes writes persistent.
    pub rdma_flush: Option<String>,
}

/// What `process` means for members on separate machines.
fn power_advice(config: &ServeConfig) -> Option<String> {
    let apart = config.peers.0.iter().any(|peer| !peer.log.ip().is_loopback());
    let forgets = !matches!(config.durability, DurabilityWord::Power);
    (apart && forgets).then(|| {
        "members on separate machines: one that loses power forgets what it acknowledged and voted \
         for; --durability power keeps it"
            .to_owned()
    })
}

impl Banner {
    /// Whether clients are served over an RDMA device.
    pub fn serves_rdma(&self) -> bool {
        self.rdma_persistent_flush.is_some()
    }

    /// Of a node that just started.
    pub fn new(node: &Node, config: &ServeConfig, doors: Doors, services: &Services) -> Self {
        let pool = node.pool_report();
        let recovery = node.recovery();
        let stats = node.handle().stats();
        Self {
            event: "ready",
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("BUILD_COMMIT"),
            process: std::process::id(),
            resp_address: node.redis_address(),
            http_address: doors.http,
            fabric_address: doors.fabric,
            fabric_providers: doors.providers,
            rdma_persistent_flush: doors.rdma_flush,
            data: config.data.display().to_string(),
            pool: pool.kind.to_string(),
            durability: pool.durability.to_string(),
            mechanism: pool.mechanism.to_string(),
            emulated: pool.emulated,
            reasons: pool.reasons.iter().cloned().chain(power_advice(config)).collect(),
            capacity_bytes: stats.pool_capacity_bytes,
            used_bytes: stats.pool_used_bytes,
            shards: node.shards(),
            recovered_keys: recovery.keys,
            recovered_entries: recovery.entries,
            damaged_entries: recovery.damaged,
            torn_entries: recovery.torn,
            recovery_seconds: recovery.seconds,
            services: services
                .iter()
                .map(|service| ServiceFacts {
                    service: service.name(),
                    facts: service
                        .facts()
                        .into_iter()
                        .map(|fact| (fact.name, fact.value))
                        .collect(),
                })
                .collect(),
        }
    }

    /// Names with their values, for the page and the text.
    pub fn facts(&self) -> Vec<(String, String)> {
        let mut facts = Vec::new();
        let mut fact = |name: &str, value: String| facts.push((name.to_owned(), value));
        let door = |address: Option<SocketAddr>, more: &str| {
            address.map_or_else(|| "off".to_owned(), |address| format!("{address}{more}"))
        };
        fact("RESP", door(self.resp_address, ""));
        fact("status page", door(self.http_address, "  also /metrics, /healthz, /stats.json"));
        let providers = self.fabric_providers.join(", ");
        fact("fabric", door(self.fabric_address, &format!("  providers: {providers}")));
        if let Some(flush) = &self.rdma_persistent_flush {
            fact("RDMA flush", flush.clone());
        }
        for (name, value) in self.services.iter().flat_map(|service| &service.facts) {
            fact(name, value.clone());
        }
        fact("data", self.data.clone());
        fact(
            "pool",
            format!(
                "{}, {} of {} used",
                self.pool,
                human_bytes(self.used_bytes),
                human_bytes(self.capacity_bytes)
            ),
        );
        let promise = match self.durability.as_str() {
            d if d == Durability::None.to_string() => "survives nothing",
            d if d == Durability::Process.to_string() => "acknowledged writes survive kill -9",
            _ => "acknowledged writes survive a power loss",
        };
        let emulated = if self.emulated { "; EMULATED on volatile memory" } else { "" };
        fact(
            "durability",
            format!("{}: {promise}{emulated} (mechanism: {})", self.durability, self.mechanism),
        );
        fact("shards", self.shards.to_string());
        let mut recovered = format!(
            "{} {} from {} {} in {:.3} s",
            count(self.recovered_keys),
            if self.recovered_keys == 1 { "key" } else { "keys" },
            count(self.recovered_entries),
            if self.recovered_entries == 1 { "entry" } else { "entries" },
            self.recovery_seconds
        );
        if self.torn_entries > 0 {
            recovered.push_str(&format!("; {} unacknowledged dropped", count(self.torn_entries)));
        }
        fact("recovered", recovered);
        if self.damaged_entries > 0 {
            fact(
                "DAMAGED",
                format!(
                    "{} acknowledged entries were lost; run `beeline kv check`",
                    count(self.damaged_entries)
                ),
            );
        }
        facts
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = format!("beeline {} ({})\n", self.version, self.commit);
        for (name, value) in self.facts() {
            text.push_str(&format!("  {name:<12} {value}\n"));
        }
        for reason in &self.reasons {
            text.push_str(&format!("  {:<12} {reason}\n", "note"));
        }
        text.push_str("ready");
        text
    }
}
