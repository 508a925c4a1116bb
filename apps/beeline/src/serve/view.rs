//! What the status page, `/metrics` and `/stats.json` show of a running node.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_node::{NodeHandle, NodeStats};
use beeline_observe::{MetricSet, Registry, Unit, Value};
use beeline_service::{Service, Services};

use super::banner::Banner;
use super::lock;
use super::metrics::{
    DoorMetrics, DoorView, LogMetrics, LogView, NodeMetrics, Process, ProcessMetrics,
};
use crate::config::values::human_bytes;
use crate::status::{Page, Section, Source};

/// The source behind the pages.
#[derive(Debug)]
pub struct View {
    handle: NodeHandle,
    banner: Arc<Banner>,
    started: Instant,
    registry: Registry,
    services: Arc<Mutex<Services>>,
    node: Arc<NodeMetrics>,
    door: Arc<DoorMetrics>,
    log: Arc<LogMetrics>,
    process: Arc<ProcessMetrics>,
}

impl View {
    /// A view of the node behind `handle`.
    pub fn new(
        handle: NodeHandle,
        banner: Arc<Banner>,
        services: Arc<Mutex<Services>>,
        started: Instant,
    ) -> Self {
        let registry = Registry::new();
        for set in lock(&services).iter().flat_map(Service::metrics) {
            registry.register(set, None);
        }
        let node = Arc::new(NodeMetrics::default());
        let door = Arc::new(DoorMetrics::default());
        let log = Arc::new(LogMetrics::default());
        let process = Arc::new(ProcessMetrics::default());
        registry.register(node.clone(), None);
        registry.register(door.clone(), None);
        registry.register(log.clone(), None);
        registry.register(process.clone(), None);
        Self { handle, banner, started, registry, services, node, door, log, process }
    }

    fn publish(&self) -> NodeStats {
        let stats = self.handle.stats();
        self.node.publish(&stats);
        self.door.publish(&DoorView { flushes_by_read: self.banner.serves_rdma() });
        self.log.publish(&LogView::of(&stats));
        self.process.publish(&Process::read(self.started));
        lock(&self.services).iter().for_each(Service::publish);
        stats
    }
}

impl Source for View {
    fn page(&self) -> Page {
        let stats = self.publish();
        let total = &stats.store.total;
        let mut page = Page::new(&format!("beeline {}", env!("CARGO_PKG_VERSION")));
        page.push(Section::facts("Node", self.banner.facts()));
        let fact = |name: &str, value: String| (name.to_owned(), value);
        let uptime = self.started.elapsed();
        page.push(Section::facts(
            "Now",
            vec![
                fact("up for", span(uptime)),
                fact("keys", count(total.keys)),
                fact("Redis clients", count(stats.connected_clients as u64)),
                fact("commands since start", count(stats.loops.commands)),
                fact("one-sided clients", count(stats.loops.fabric_clients)),
                fact("one-sided requests", count(stats.loops.fabric_requests)),
                fact(
                    "pool",
                    format!(
                        "{} of {} used, {} live, {} to collect",
                        human_bytes(stats.pool_used_bytes),
                        human_bytes(stats.pool_capacity_bytes),
                        human_bytes(total.live_bytes),
                        human_bytes(stats.store.garbage_bytes),
                    ),
                ),
                fact("hits and misses", format!("{} / {}", count(total.hits), count(total.misses))),
                fact(
                    "expired, evicted",
                    format!("{} / {}", count(total.expired), count(total.evicted)),
                ),
                fact("memory resident", human_bytes(self.process.process_resident_bytes.value())),
                fact(
                    "processor time",
                    span(Duration::from_nanos(self.process.process_cpu_seconds.value())),
                ),
            ],
        ));
        if let Some((state, _)) = &stats.replication {
            let mut facts = vec![
                fact("cluster", format!("{:016x}", state.cluster)),
                fact("this member", format!("{}, {}", state.id, state.role.name())),
                fact("term", state.term.to_string()),
                fact("leader", state.leader.map_or("none".to_owned(), |id| id.to_string())),
                fact("committed, applied", format!("{} / {}", state.committed, state.applied)),
            ];
            for member in &state.members {
                let link = match (member.id == state.id, member.connected) {
                    (true, _) => "this one",
                    (_, true) => "connected",
                    (_, false) => "NOT connected",
                };
                let lag = member.lag.map(|lag| format!(", {lag} entries behind"));
                facts.push(fact(
                    &format!("member {}", member.id),
                    format!("{}, {link}{}", member.resp_address, lag.unwrap_or_default()),
                ));
            }
            page.push(Section::facts("Cluster", facts));
        }
        if total.damaged > 0 {
            page.push(Section::facts(
                "Needs a person",
                vec![fact("damaged entries", format!("{}; run `beeline kv check`", total.damaged))],
            ));
        }
        page
    }

    fn stats(&self) -> serde_json::Value {
        self.publish();
        let mut object = serde_json::Map::new();
        object.insert("node".to_owned(), serde_json::json!(*self.banner));
        for set in [&*self.node as &dyn MetricSet, &*self.log, &*self.process] {
            for (descriptor, value) in set.descriptors().iter().zip(set.values()) {
                let Value::Number(number) = value else { continue };
                let value = match descriptor.unit {
                    Unit::Seconds => {
                        serde_json::json!(Duration::from_nanos(number).as_secs_f64())
                    }
                    Unit::Count | Unit::Bytes => serde_json::json!(number),
                };
                object.insert(descriptor.name.to_owned(), value);
            }
        }
        serde_json::Value::Object(object)
    }

    fn metrics(&self) -> String {
        self.publish();
        self.registry.encode()
    }

    fn health(&self) -> Result<(), String> {
        self.handle.health()?;
        let damaged = self.handle.stats().store.segments_quarantined;
        if damaged > 0 {
            return Err(format!(
                "{damaged} segments are set aside as damaged; run `beeline kv check`"
            ));
        }
        if let Some((state, _)) = &self.handle.stats().replication
            && state.leader.is_none()
        {
            return Err("no member leads the cluster, as far as this one knows".to_owned());
        }
        lock(&self.services).health()
    }
}

/// A whole number with its thousands apart.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut spaced = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            spaced.push(',');
        }
        spaced.push(digit);
    }
    spaced
}

fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, _) => format!("{:.1} s", duration.as_secs_f64()),
        (0, 0, m, s) => format!("{m} min {s} s"),
        (0, h, m, _) => format!("{h} h {m} min"),
        (d, h, _, _) => format!("{d} d {h} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_spans_read_well() {
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(7), "7");
        assert_eq!(span(Duration::from_millis(1500)), "1.5 s");
        assert_eq!(span(Duration::from_secs(3_700)), "1 h 1 min");
    }
}
