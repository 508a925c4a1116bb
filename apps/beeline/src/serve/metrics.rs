//! What a node counts, as `/metrics` names it: each figure declared once, with where it is read.
//!
//! The parts keep their counters in structs of their own; a scrape copies the sums here. The table
//! in `docs/metrics.md` is rendered from these declarations.

use beeline_node::replicated::log::LogState;
use beeline_node::{CommandTime, NodeHandle, NodeStats, ReplicationStats};
use beeline_observe::{
    COMMAND_SECONDS, Descriptor, Distribution, Labelled, MetricSet, Value, command_seconds,
};
use serde::Serialize;

/// Declares metrics together with the expression that reads each from its source.
macro_rules! published {
    (
        $(#[$meta:meta])*
        struct $set:ident reads $stats:ident: $source:ty {
            $($kind:ident $field:ident: $unit:ident = $value:expr, $help:literal;)*
        }
    ) => {
        beeline_observe::metrics! {
            $(#[$meta])*
            pub struct $set in "beeline" {
                $($kind $field: $unit, $help;)*
            }
        }

        impl $set {
            /// Copies the figures of this moment.
            pub fn publish(&self, $stats: &$source) {
                $(published!(@set $kind, self.$field, $value);)*
            }
        }
    };
    (@set counter, $cell:expr, $value:expr) => { $cell.publish($value) };
    (@set gauge, $cell:expr, $value:expr) => { $cell.set($value) };
}

published! {
    /// The loops, the store and the pool of a node.
    struct NodeMetrics reads stats: NodeStats {
        gauge node_clients: Count = stats.connected_clients as u64, "Redis connections open.";
        counter node_connections: Count = stats.loops.connections_received, "Redis connections accepted.";
        counter node_rejected_connections: Count = stats.loops.connections_rejected, "Redis connections refused at the limit on clients.";
        counter node_commands: Count = stats.loops.commands, "Redis commands executed.";
        counter node_forwarded_commands: Count = stats.loops.forwarded_commands, "Commands that came from another shard's connection: one hop each.";
        counter node_several_shard_commands: Count = stats.loops.several_shard_commands, "Commands that locked several shards.";
        counter node_error_replies: Count = stats.loops.error_replies, "Error replies sent.";
        counter node_protocol_errors: Count = stats.loops.protocol_errors, "Connections closed for breaking the protocol or passing the query-buffer limit.";
        counter node_output_limit_disconnections: Count = stats.loops.output_limit_disconnections, "Connections closed because their unread replies passed the limit.";
        counter node_input_bytes: Bytes = stats.loops.input_bytes, "Bytes read from Redis clients.";
        counter node_output_bytes: Bytes = stats.loops.output_bytes, "Bytes sent to Redis clients.";
        gauge node_fabric_clients: Count = stats.loops.fabric_clients, "One-sided clients connected, counted once per shard.";
        counter node_fabric_requests: Count = stats.loops.fabric_requests, "Requests of one-sided clients.";
        counter node_fabric_copied_bytes: Bytes = stats.loops.fabric_copied_bytes, "Bytes of one-sided clients' entries copied between log segments and buffers, because the device cannot reach segments.";
        counter node_yields: Count = stats.loops.yields, "Times a shard's loop that only polled let other threads have its core.";
        counter node_sleeps: Count = stats.loops.sleeps, "Times a shard's loop went to sleep.";
        counter node_turns: Count = stats.loops.turns, "Turns of the shards' loops.";
        gauge kv_keys: Count = stats.store.total.keys, "Keys a reader finds.";
        gauge kv_expiring_keys: Count = stats.store.total.expiring_keys, "Keys with an expiry among them.";
        gauge kv_live_bytes: Bytes = stats.store.total.live_bytes, "Bytes on media of the entries that hold live keys.";
        gauge kv_garbage_bytes: Bytes = stats.store.garbage_bytes, "Bytes in used segments that are not live: what collection could win at most.";
        gauge kv_index_bytes: Bytes = stats.store.total.index_bytes, "Memory of the indexes.";
        gauge kv_streams: Count = stats.store.total.streams, "Streams of services.";
        gauge kv_stream_bytes: Bytes = stats.store.total.stream_bytes, "Bytes on media of the entries of streams.";
        counter kv_stream_appended_entries: Count = stats.store.total.stream_entries_appended, "Entries appended to streams.";
        counter kv_stream_truncations: Count = stats.store.total.stream_truncations, "Times a stream was cut off in front.";
        gauge kv_feed_limit_bytes: Bytes = stats.feed.limit_bytes, "Bytes that the change feed may hold; 0 where there is none.";
        gauge kv_feed_bytes: Bytes = stats.feed.bytes, "Bytes that it holds.";
        gauge kv_feed_events: Count = stats.feed.events, "Changes that it holds.";
        gauge kv_feed_oldest_position: Count = stats.feed.oldest, "The least position that a reader of the change feed may go on from.";
        gauge kv_feed_newest_position: Count = stats.feed.newest, "The position of a reader that has seen every change.";
        counter kv_feed_dropped_events: Count = stats.feed.dropped, "Changes dropped to make room for newer ones; a reader that had not seen them begins anew.";
        counter kv_hits: Count = stats.store.total.hits, "Lookups that found a key.";
        counter kv_misses: Count = stats.store.total.misses, "Lookups that found none.";
        counter kv_stored_entries: Count = stats.store.total.entries_stored, "Entries stored: puts, deletions, relocations.";
        counter kv_stored_bytes: Bytes = stats.store.total.bytes_stored, "Bytes of entries stored.";
        counter kv_accepted_entries: Count = stats.store.total.entries_accepted, "Entries accepted from one-sided clients.";
        counter kv_in_place_entries: Count = stats.store.total.entries_in_place, "Of these, overwrites in place.";
        counter kv_rejected_entries: Count = stats.store.total.entries_rejected, "Announcements of one-sided clients refused.";
        counter kv_commits: Count = stats.store.total.commits, "Commits that had something to persist.";
        counter kv_expired_keys: Count = stats.store.total.expired, "Keys expired.";
        counter kv_evicted_keys: Count = stats.store.total.evicted, "Keys evicted at the memory limit.";
        counter kv_damaged_entries: Count = stats.store.total.damaged, "Entries found damaged. Not zero needs a person: run `beeline kv check`.";
        counter kv_collected_segments: Count = stats.store.total.segments_collected, "Segments collected.";
        counter kv_recycled_segments: Count = stats.store.total.segments_recycled, "Segments in which nothing was needed any more, written anew in place.";
        counter kv_collector_copied_bytes: Bytes = stats.store.total.collector_copied_bytes, "Bytes the collector copied.";
        counter kv_collector_won_bytes: Bytes = stats.store.total.collector_won_bytes, "Bytes the collector won back.";
        gauge pmem_segments: Count = stats.store.segments, "Segments of the pool in use.";
        gauge pmem_granted_segments: Count = stats.store.segments_granted, "Of these, held by one-sided clients.";
        gauge pmem_quarantined_segments: Count = stats.store.segments_quarantined, "Of these, set aside because damage was found in them.";
        gauge pmem_used_bytes: Bytes = stats.pool_used_bytes, "Bytes of the pool in use.";
        gauge pmem_capacity_bytes: Bytes = stats.pool_capacity_bytes, "Bytes the pool may grow to.";
    }
}

published! {
    /// The process itself, as the kernel accounts for it.
    struct ProcessMetrics reads process: Process {
        gauge process_uptime_seconds: Seconds = process.uptime_ns, "Time since the node was started.";
        counter process_cpu_seconds: Seconds = process.cpu_ns, "Processor time used, user and system.";
        gauge process_resident_bytes: Bytes = process.resident_bytes, "Memory resident, shared pages of the pool included.";
        gauge process_open_files: Count = process.open_files, "Descriptors open.";
    }
}

published! {
    /// The fabric door.
    struct DoorMetrics reads door: DoorView {
        gauge fabric_flushes_by_read: Count = u64::from(door.flushes_by_read), "1 where RDMA clients are served and a read behind their writes stands for the device's own FLUSH; 0 where no RDMA device was there at the start.";
    }
}

/// What is shown of the fabric door.
#[derive(Clone, Copy, Debug)]
pub struct DoorView {
    /// There is an RDMA device, and its persistent flush is a read.
    pub flushes_by_read: bool,
}

published! {
    /// The replicated log, as this member sees it; 0 in a node by itself.
    struct LogMetrics reads log: LogView {
        gauge log_leader: Count = u64::from(log.state.leads()), "1 while this member leads.";
        gauge log_term: Count = u64::from(log.state.term), "The leadership this member knows of.";
        gauge log_members: Count = log.state.members.len() as u64, "Members of the cluster.";
        gauge log_connected_members: Count = log.connected, "Of these, others this member has a connection to.";
        gauge log_committed_position: Count = log.state.committed, "Position up to which entries are committed, as known here.";
        gauge log_applied_position: Count = log.state.applied, "Position up to which they are applied here.";
        gauge log_lag_entries: Count = log.state.committed.saturating_sub(log.state.applied), "Entries committed, as known here, and not applied here.";
        gauge log_slowest_lag_entries: Count = log.slowest, "At the leader: entries committed that the member furthest behind is not known to have.";
        gauge log_snapshot_position: Count = log.state.snapshot, "What the newest snapshot here covers.";
        counter log_leaderships: Count = log.state.leaderships, "Leaderships this member won.";
        counter log_sent_snapshots: Count = log.state.snapshots_sent, "Snapshots sent to members that lagged behind.";
        counter log_installed_snapshots: Count = log.state.snapshots_installed, "Snapshots installed here.";
        counter log_units: Count = log.stats.units, "Units applied: requests of one shard that were agreed on together.";
        counter log_requests: Count = log.stats.requests, "Requests applied.";
        counter log_repeated_units: Count = log.stats.repeated, "Units skipped because they had been applied before.";
        counter log_unit_pieces: Count = log.stats.pieces, "Pieces of units longer than an entry, kept until these were whole.";
        counter log_forwarded_requests: Count = log.stats.forwarded, "Units and barriers carried to the leader.";
        counter log_unanswered_forwards: Count = log.state.forwards_unanswered, "Of these, attempts that the leader did not answer: the way broke, or the time was over. They are tried again.";
        counter log_refused_forwards: Count = log.state.forwards_refused, "Attempts that were not sent: the leader cannot be reached, or too much waits for it. They are tried again.";
        counter log_served_forwards: Count = log.state.forwards_served, "Units and barriers that other members had this one propose, over fabric.";
        counter log_timed_out_requests: Count = log.stats.timed_out, "Units and barriers given up after request-timeout.";
        counter log_divergent_windows: Count = log.stats.divergences, "Windows of the log that did something else here than at a leader. Not 0: members differ; remove the wrong one.";
    }
}

/// How long commands of the Redis door took, read from the node when it is scraped.
#[derive(Debug)]
pub struct RespTimes(pub NodeHandle);

impl MetricSet for RespTimes {
    fn descriptors(&self) -> &'static [Descriptor] {
        &[]
    }

    fn values(&self) -> Vec<Value> {
        Vec::new()
    }

    fn labelled(&self) -> Vec<Labelled> {
        let labelled = |time: CommandTime| {
            let last = time.classes.len() - 1;
            let classes = time.classes.iter().enumerate();
            // The last class holds longer ones too.
            let bound = |at, most: u64| if at == last { u64::MAX } else { most * 1000 };
            let buckets = classes.map(|(at, &(most, calls))| (bound(at, most), calls)).collect();
            let sum_ns = time.microseconds.saturating_mul(1000);
            command_seconds("resp", time.name, Distribution { buckets, sum_ns }, time.calls)
        };
        self.0.command_times().into_iter().map(labelled).collect()
    }
}

/// A command's line of the status page, of `/stats.json` and of `beeline top`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CommandRow {
    /// The service.
    pub service: String,
    /// The command.
    pub command: String,
    /// Calls.
    pub calls: u64,
    /// Their time together, seconds: of all, also where a part is timed.
    pub seconds: f64,
    /// Half of them took no longer, microseconds.
    pub p50_us: f64,
    /// 99 % took no longer.
    pub p99_us: f64,
    /// 99.9 % took no longer.
    pub p999_us: f64,
}

/// The rows of all commands that were timed, those that took most time together first.
#[expect(clippy::cast_precision_loss, reason = "for reading")]
pub fn command_rows(labelled: &[Labelled]) -> Vec<CommandRow> {
    let label = |one: &Labelled, wanted: &str| {
        let found = one.labels.iter().find(|(name, _)| *name == wanted);
        found.map(|(_, value)| value.clone()).unwrap_or_default()
    };
    let mut rows: Vec<CommandRow> = labelled
        .iter()
        .filter(|one| one.descriptor.name == COMMAND_SECONDS.name)
        .map(|one| {
            let times = &one.distribution;
            let quantile_us = |share| times.quantile_ns(share) as f64 / 1e3;
            CommandRow {
                service: label(one, "service"),
                command: label(one, "command"),
                calls: one.calls,
                seconds: times.sum_ns as f64 / 1e9
                    * (one.calls as f64 / times.count().max(1) as f64),
                p50_us: quantile_us(500),
                p99_us: quantile_us(990),
                p999_us: quantile_us(999),
            }
        })
        .collect();
    rows.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    rows
}

/// The log and what the node counts of it.
#[derive(Clone, Debug, Default)]
pub struct LogView {
    state: LogState,
    stats: ReplicationStats,
    connected: u64,
    slowest: u64,
}

impl LogView {
    /// Of a node's figures; nothing of a node by itself.
    pub fn of(stats: &NodeStats) -> Self {
        let Some((state, stats)) = stats.replication.clone() else { return Self::default() };
        let others = state.members.iter().filter(|member| member.id != state.id);
        let connected = others.clone().filter(|member| member.connected).count() as u64;
        let slowest = others.filter_map(|member| member.lag).max().unwrap_or(0);
        Self { state, stats, connected, slowest }
    }
}

/// What the kernel says of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Process {
    /// Since `started`.
    pub uptime_ns: u64,
    /// User and system.
    pub cpu_ns: u64,
    /// Resident set.
    pub resident_bytes: u64,
    /// Descriptors open.
    pub open_files: u64,
}

impl Process {
    /// Reads the figures; what cannot be read is zero.
    pub fn read(started: std::time::Instant) -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // Fields after the name, which may hold spaces: state is field 3.
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .map(|field| field.parse().unwrap_or(0))
            .collect();
        let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
        let tick_ns = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
        let page_bytes = rustix::param::page_size() as u64;
        Self {
            uptime_ns: u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX),
            cpu_ns: (field(14) + field(15)) * tick_ns,
            resident_bytes: field(24) * page_bytes,
            open_files: std::fs::read_dir("/proc/self/fd").map_or(0, |d| d.count() as u64),
        }
    }
}

/// `docs/metrics.md`.
#[cfg(test)]
fn document() -> String {
    use beeline_node::LoopTimes;
    use beeline_observe::registry::markdown;
    let head = "# Metrics\n\n\
        Served in OpenMetrics text at `/metrics` of the status address (127.0.0.1:9464 unless told\n\
        otherwise), and as JSON at `/stats.json`, there without histograms but with percentiles of the\n\
        commands (`commands`), which the status page and `beeline top` show too. A counter only grows and\n\
        ends in `_total`; times are in seconds. This page is rendered from the declarations: `BEELINE_BLESS=1 cargo test -p beeline\n\
        metrics` writes it anew, and a test fails while it differs.\n\n";
    let commands = markdown("Commands of all services", &[COMMAND_SECONDS]);
    let loops = markdown("Loops, by shard", LoopTimes::DESCRIPTORS);
    let node = markdown("Node, store and pool", NodeMetrics::DESCRIPTORS);
    let door = markdown("Fabric door", DoorMetrics::DESCRIPTORS);
    let log = markdown("Replicated log", LogMetrics::DESCRIPTORS);
    let direct = markdown("Direct store", beeline_direct::DirectMetrics::DESCRIPTORS);
    let process = markdown("Process", ProcessMetrics::DESCRIPTORS);
    let objects = markdown("Object store", beeline_objects::ObjectMetrics::DESCRIPTORS);
    let documents = markdown("Document store", beeline_documents::DocumentsMetrics::DESCRIPTORS);
    let transfers =
        markdown("Objects between nodes", beeline_objects::cluster::TransferMetrics::DESCRIPTORS);
    format!(
        "{head}{commands}\n{loops}\n{node}\n{door}\n{log}\n{objects}\n{transfers}\n{documents}\n{direct}\n{process}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_lists_exactly_the_metrics_there_are() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
        let document = document();
        if std::env::var_os("BEELINE_BLESS").is_some() {
            std::fs::write(&path, &document).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(written == document, "docs/metrics.md differs; BEELINE_BLESS=1 writes it anew");
    }

    #[test]
    fn commands_come_in_the_order_of_the_time_they_took() {
        let of = |command, buckets: Vec<(u64, u64)>, sum_ns, calls| {
            command_seconds("shed", command, Distribution { buckets, sum_ns }, calls)
        };
        // One of a hundred calls is timed of the first.
        let rows = command_rows(&[
            of("mend", vec![(1_000, 0), (64_000, 9)], 500_000, 9),
            of("open", vec![(1_000, 99), (64_000, 1)], 200_000, 10_000),
        ]);
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row.command.as_str(), row.calls, row.p50_us, row.p99_us, row.p999_us))
            .collect();
        assert_eq!(told, [("open", 10_000, 1.0, 1.0, 64.0), ("mend", 9, 64.0, 64.0, 64.0)]);
        assert!((rows[0].seconds - 0.02).abs() < 1e-9 && (rows[1].seconds - 0.0005).abs() < 1e-9);
        assert_eq!(rows[0].service, "shed");
    }

    #[test]
    fn the_process_knows_itself() {
        let process = Process::read(std::time::Instant::now());
        assert!(process.resident_bytes > 1 << 20 && process.open_files >= 3, "{process:?}");
        assert!(process.resident_bytes < 1 << 40, "{process:?}");
    }
}
