//! What the status page, `/metrics` and `/stats.json` show of a running node.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_node::{NodeHandle, NodeStats};
use beeline_observe::{Distribution, Registry, Unit, Value};
use beeline_service::{Service, Services};

use super::banner::Banner;
use super::lock;
use super::metrics::{
    CommandRow, DoorMetrics, DoorView, LogMetrics, LogView, NodeMetrics, Process, ProcessMetrics,
    RespTimes, command_rows,
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
        registry.register(Arc::new(RespTimes(handle.clone())), None);
        for (shard, times) in handle.loop_times().iter().enumerate() {
            registry.register(times.clone(), u32::try_from(shard).ok());
        }
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

    fn command_rows(&self) -> Vec<CommandRow> {
        command_rows(&self.registry.labelled())
    }

    /// How long the shards' turns and commits take, of all shards together.
    fn loop_facts(&self) -> Vec<(String, String)> {
        let (mut turns, mut commits) = (Distribution::default(), Distribution::default());
        for times in self.handle.loop_times() {
            turns.add(&Distribution::from(&times.node_turn_seconds.snapshot()));
            commits.add(&Distribution::from(&times.node_commit_seconds.snapshot()));
        }
        let told = |times: &Distribution| {
            let [half, most, all] = [500, 990, 999].map(|share| human_ns(times.quantile_ns(share)));
            format!("{half} / {most} / {all}")
        };
        let rows = [("turns, p50 / p99 / p99.9", turns), ("commits that waited", commits)];
        let shown = rows.into_iter().filter(|(_, times)| times.count() > 0);
        shown.map(|(name, times)| (name.to_owned(), told(&times))).collect()
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
        let standing: Vec<_> = lock(&self.services).iter().flat_map(Service::now).collect();
        let mut now = vec![
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
        ];
        now.extend(standing.into_iter().map(|fact| (fact.name, fact.value)));
        page.push(Section::facts("Now", now));
        let rows = self.command_rows();
        if !rows.is_empty() {
            page.push(Section::table("Commands, by time spent", &COMMAND_HEAD, cells(&rows)));
        }
        let loops = self.loop_facts();
        if !loops.is_empty() {
            page.push(Section::facts("Shards' loops", loops));
        }
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
        object.insert("commands".to_owned(), serde_json::json!(self.command_rows()));
        for set in self.registry.sets() {
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

/// The head of the table of commands.
const COMMAND_HEAD: [&str; 7] = ["service", "command", "calls", "time", "p50", "p99", "p99.9"];
/// Commands shown on the page.
const COMMANDS_SHOWN: usize = 20;

fn cells(rows: &[CommandRow]) -> Vec<Vec<String>> {
    let row = |row: &CommandRow| {
        vec![
            row.service.clone(),
            row.command.clone(),
            count(row.calls),
            human_us(row.seconds * 1e6),
            human_us(row.p50_us),
            human_us(row.p99_us),
            human_us(row.p999_us),
        ]
    };
    rows.iter().take(COMMANDS_SHOWN).map(row).collect()
}

#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn human_ns(nanoseconds: u64) -> String {
    human_us(nanoseconds as f64 / 1e3)
}

/// A time for people, three digits of it.
pub fn human_us(microseconds: f64) -> String {
    let (value, unit) = match microseconds {
        us if us >= 1e6 => (us / 1e6, "s"),
        us if us >= 1e3 => (us / 1e3, "ms"),
        us => (us, "us"),
    };
    if value >= 100.0 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
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
        let times = [0.5, 64.0, 131.072, 4_096.0, 1_048_576.0].map(human_us);
        assert_eq!(times, ["0.5 us", "64.0 us", "131 us", "4.1 ms", "1.0 s"]);
    }
}
