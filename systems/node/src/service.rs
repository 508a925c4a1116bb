//! The node as Redis commands see it: INFO, CONFIG, CLIENT, SAVE, SHUTDOWN.
//!
//! Commands that come here may run while their thread holds shards' locks (in a transaction), so
//! nothing below takes one.

use std::fmt::Write as _;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use beeline_kv::Eviction;
use beeline_resp::{
    AbsentWatches, ClientInfo, ConfigError, KillFilter, Pause, SaveError, Server, Shutdown,
};

use crate::parcel::Delivery;
use crate::shared::{Shared, lock};
use crate::stats::LoopStats;

/// The Redis whose behaviour is promised.
pub const REDIS_VERSION: &str = "7.0.15";

/// Most entries of the slow log.
const SLOW_LOG_LIMIT: usize = 65_536;

const SECTIONS: [&str; 12] = [
    "server",
    "clients",
    "memory",
    "persistence",
    "stats",
    "replication",
    "cpu",
    "commandstats",
    "errorstats",
    "latencystats",
    "beeline",
    "keyspace",
];

impl Shared {
    pub(crate) fn loop_stats(&self) -> LoopStats {
        let mut stats = LoopStats::default();
        self.counters.iter().for_each(|counters| counters.add_to(&mut stats));
        stats
    }

    fn info_server(&self, out: &mut String) {
        let uptime = self.unix_us().saturating_sub(self.started_us) / 1_000_000;
        let port = self
            .redis_address
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .map_or(0, |address| address.port());
        let _ = write!(
            out,
            "redis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\n\
             beeline_version:{}\r\nos:{}\r\narch_bits:64\r\nmultiplexing_api:epoll\r\n\
             process_id:{}\r\nrun_id:{}\r\ntcp_port:{port}\r\nserver_time_usec:{}\r\n\
             uptime_in_seconds:{uptime}\r\nuptime_in_days:{}\r\nio_threads_active:{}\r\n",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::OS,
            std::process::id(),
            self.run_id,
            self.unix_us(),
            uptime / 86_400,
            self.shards.len(),
        );
    }

    fn info_memory(&self, out: &mut String) {
        let stats = self.store.stats();
        let resident = resident_bytes();
        let _ = write!(
            out,
            "used_memory:{}\r\nused_memory_human:{}\r\nused_memory_rss:{resident}\r\n\
             used_memory_dataset:{}\r\nmaxmemory:{}\r\nmaxmemory_human:{}\r\n\
             maxmemory_policy:{}\r\nmem_fragmentation_ratio:{:.2}\r\n",
            self.store.memory_bytes(),
            human(self.store.memory_bytes()),
            stats.total.live_bytes,
            self.store.max_memory_bytes(),
            human(self.store.max_memory_bytes()),
            self.store.eviction().name(),
            resident as f64 / self.store.memory_bytes().max(1) as f64,
        );
    }

    fn info_persistence(&self, out: &mut String) {
        let report = self.store.pool().report();
        let _ = write!(
            out,
            "loading:{}\r\nasync_loading:0\r\nrdb_bgsave_in_progress:{}\r\n\
             rdb_last_save_time:{}\r\nrdb_last_bgsave_status:{}\r\naof_enabled:0\r\n\
             beeline_durability:{}\r\nbeeline_pool:{}\r\n",
            u8::from(self.replication.as_ref().is_some_and(|known| {
                matches!(known.obstacle(true), Some(crate::replicated::lane::Failure::Loading))
            })),
            u8::from(self.snapshots.in_progress()),
            self.snapshots.last_save_seconds(),
            if self.snapshots.last_succeeded() { "ok" } else { "err" },
            format!("{:?}", report.durability).to_lowercase(),
            format!("{:?}", report.kind).to_lowercase(),
        );
    }

    fn info_stats(&self, out: &mut String) {
        let (earlier_loops, earlier) = *lock(&self.forgotten);
        let loops = self.loop_stats().since(&earlier_loops);
        let stats = self.store.stats().total;
        let since = u64::saturating_sub;
        let _ = write!(
            out,
            "total_connections_received:{}\r\ntotal_commands_processed:{}\r\n\
             total_net_input_bytes:{}\r\ntotal_net_output_bytes:{}\r\nrejected_connections:{}\r\n\
             expired_keys:{}\r\nevicted_keys:{}\r\nkeyspace_hits:{}\r\nkeyspace_misses:{}\r\n\
             client_output_buffer_limit_disconnections:{}\r\ntotal_error_replies:{}\r\n",
            loops.connections_received,
            loops.commands,
            loops.input_bytes,
            loops.output_bytes,
            loops.connections_rejected,
            since(stats.expired, earlier.expired),
            since(stats.evicted, earlier.evicted),
            since(stats.hits, earlier.hits),
            since(stats.misses, earlier.misses),
            loops.output_limit_disconnections,
            loops.error_replies,
        );
    }

    fn info_beeline(&self, out: &mut String) {
        let loops = self.loop_stats();
        let stats = self.store.stats().total;
        let pool = self.store.pool();
        let _ = write!(
            out,
            "shards:{}\r\nfabric_clients:{}\r\nfabric_requests:{}\r\nforwarded_commands:{}\r\n\
             several_shard_commands:{}\r\npool_capacity_bytes:{}\r\npool_used_bytes:{}\r\n\
             damaged_entries:{}\r\n",
            self.shards.len(),
            loops.fabric_clients,
            loops.fabric_requests,
            loops.forwarded_commands,
            loops.several_shard_commands,
            pool.capacity_bytes(),
            pool.used_bytes(),
            stats.damaged,
        );
    }

    /// The log as this member sees it, as lines of INFO. Redis' names where they fit.
    pub(crate) fn replication_lines(&self) -> String {
        let mut out = String::new();
        let Some(replication) = &self.replication else { return out };
        let state = replication.state().unwrap_or_default();
        let stats = replication.stats();
        let met = replication.meeting.stats();
        let others = state.members.iter().filter(|member| member.id != state.id);
        let role = if state.leads() { "master" } else { "slave" };
        let _ = write!(out, "role:{role}\r\n");
        if let Some(leader) = state.other_leader() {
            let (host, port) =
                leader.resp_address.rsplit_once(':').unwrap_or((&leader.resp_address, "0"));
            let link = if leader.connected { "up" } else { "down" };
            let _ = write!(
                out,
                "master_host:{host}\r\nmaster_port:{port}\r\nmaster_link_status:{link}\r\n"
            );
        }
        let connected = others.clone().filter(|member| member.connected).count();
        let _ = write!(
            out,
            "connected_slaves:{}\r\ncluster_id:{:016x}\r\nnode_id:{}\r\nlog_role:{}\r\n\
             log_term:{}\r\nlog_leader:{}\r\nlog_committed:{}\r\nlog_applied:{}\r\n\
             log_lag:{}\r\nlog_snapshot:{}\r\nlog_leaderships:{}\r\nlog_snapshots_sent:{}\r\n\
             log_snapshots_installed:{}\r\nlog_units:{}\r\nlog_requests:{}\r\n\
             log_repeated_units:{}\r\nlog_forwarded:{}\r\nlog_forwards_served:{}\r\n\
             log_timed_out:{}\r\nlog_divergences:{}\r\nlog_waves:{}\r\nlog_parts:{}\r\n\
             log_parts_handed_over:{}\r\nlog_left_at_start:{}\r\nlog_members:{}\r\n",
            if state.leads() { connected } else { 0 },
            replication.options.cluster,
            replication.options.node,
            state.role.name(),
            state.term,
            state.leader.map_or_else(|| "none".to_owned(), |leader| leader.to_string()),
            state.committed,
            replication.applied(),
            state.committed.saturating_sub(replication.applied()),
            state.snapshot,
            state.leaderships,
            state.snapshots_sent,
            state.snapshots_installed,
            stats.units,
            stats.requests,
            stats.repeated,
            stats.forwarded,
            state.forwards_served,
            stats.timed_out,
            stats.divergences,
            met.waves,
            met.parts,
            met.handed_over,
            replication.left_at_start.load(Ordering::Relaxed),
            state.members.len(),
        );
        for (index, member) in state.members.iter().enumerate() {
            let _ = write!(
                out,
                "member{index}:id={},log={},resp={},connected={},lag={},room={}\r\n",
                member.id,
                member.log_address,
                member.resp_address,
                if member.connected || member.id == state.id { "yes" } else { "no" },
                member.lag.map_or_else(|| "unknown".to_owned(), |lag| lag.to_string()),
                if member.short { "short" } else { "ok" },
            );
        }
        out
    }

    fn info_keyspace(&self, out: &mut String) {
        for database in 0..beeline_kv::DATABASES {
            let Ok(database) = u8::try_from(database) else { return };
            let (keys, expiring) = self.store.database_keys(database);
            if keys > 0 {
                let _ = write!(out, "db{database}:keys={keys},expires={expiring}\r\n");
            }
        }
    }

    /// Every parameter CONFIG GET knows, with its value.
    fn parameters(&self) -> Vec<(&'static str, String)> {
        let settings = &self.settings;
        let address = *self.redis_address.read().unwrap_or_else(PoisonError::into_inner);
        let report = self.store.pool().report();
        vec![
            ("appendfsync", "always".into()),
            ("appendonly", "no".into()),
            ("bind", address.map(|address| address.ip().to_string()).unwrap_or_default()),
            (
                "client-output-buffer-limit",
                match settings.output_limit_bytes.load(Ordering::Relaxed) {
                    usize::MAX => "normal 0 0 0".into(),
                    bytes => format!("normal {bytes} 0 0"),
                },
            ),
            (
                "client-query-buffer-limit",
                settings.query_limit_bytes.load(Ordering::Relaxed).to_string(),
            ),
            ("databases", beeline_kv::DATABASES.to_string()),
            ("dbfilename", crate::snapshot::FILE_NAME.into()),
            ("dir", self.data_directory.display().to_string()),
            ("durability", format!("{:?}", report.durability).to_lowercase()),
            ("io-threads", self.shards.len().to_string()),
            ("maxclients", settings.max_clients.load(Ordering::Relaxed).to_string()),
            ("maxmemory", self.store.max_memory_bytes().to_string()),
            ("maxmemory-policy", self.store.eviction().name().into()),
            ("port", address.map_or(0, |address| address.port()).to_string()),
            ("proto-max-bulk-len", settings.bulk_limit_bytes.load(Ordering::Relaxed).to_string()),
            (
                "requirepass",
                settings
                    .require_password
                    .read()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone()
                    .unwrap_or_default(),
            ),
            ("save", String::new()),
            ("slowlog-log-slower-than", self.figures.slow.slower_than_us().to_string()),
            ("slowlog-max-len", self.figures.slow.longest().to_string()),
            ("timeout", settings.idle_timeout_s.load(Ordering::Relaxed).to_string()),
        ]
    }
}

/// A change of one parameter, checked and not yet made.
enum Change {
    Nothing,
    MaxMemory(u64),
    Eviction(Eviction),
    MaxClients(usize),
    Timeout(u64),
    Password(Option<String>),
    QueryLimit(u64),
    BulkLimit(u64),
    OutputLimit(usize),
    SlowerThan(i64),
    SlowLog(usize),
}

impl Change {
    fn parse(name: &str, value: &str) -> Result<Self, ConfigError> {
        let invalid =
            |reason: &str| ConfigError::Invalid { name: name.into(), reason: reason.into() };
        let number = || {
            value.parse::<u64>().map_err(|_| invalid("argument couldn't be parsed into an integer"))
        };
        let memory =
            || parse_memory(value).ok_or_else(|| invalid("argument must be a memory value"));
        Ok(match name.to_ascii_lowercase().as_str() {
            "maxmemory" => Self::MaxMemory(memory()?),
            "maxmemory-policy" => Self::Eviction(Eviction::from_name(value).ok_or_else(|| {
                invalid(
                    "argument(s) must be one of the following: noeviction, allkeys-lru, \
                     allkeys-random, volatile-lru, volatile-random, volatile-ttl",
                )
            })?),
            "maxclients" => match usize::try_from(number()?) {
                Ok(clients) if clients > 0 => Self::MaxClients(clients),
                _ => return Err(invalid("argument must be at least 1")),
            },
            "timeout" => match number()? {
                seconds if seconds <= i32::MAX as u64 => Self::Timeout(seconds),
                _ => return Err(invalid("argument must be between 0 and 2147483647 inclusive")),
            },
            "slowlog-log-slower-than" => match value.parse::<i64>() {
                Ok(microseconds) if microseconds >= -1 => Self::SlowerThan(microseconds),
                _ => return Err(invalid("argument must be at least -1")),
            },
            "slowlog-max-len" => match usize::try_from(number()?) {
                Ok(entries) if entries <= SLOW_LOG_LIMIT => Self::SlowLog(entries),
                _ => return Err(invalid("argument must be between 0 and 65536")),
            },
            "requirepass" => Self::Password((!value.is_empty()).then(|| value.to_owned())),
            "client-query-buffer-limit" => match memory()? {
                bytes if (1 << 20..=u64::from(u32::MAX)).contains(&bytes) => {
                    Self::QueryLimit(bytes)
                }
                _ => return Err(invalid("argument must be between 1mb and 4gb")),
            },
            "proto-max-bulk-len" => match memory()? {
                bytes if (1 << 20..=u64::from(u32::MAX)).contains(&bytes) => Self::BulkLimit(bytes),
                _ => return Err(invalid("argument must be between 1mb and 4gb")),
            },
            "client-output-buffer-limit" => {
                let mut words = value.split_whitespace();
                match (words.next(), words.next().and_then(parse_memory)) {
                    (Some("normal"), Some(bytes)) if bytes == 0 || bytes >= 64 << 10 => {
                        Self::OutputLimit(usize::try_from(bytes).unwrap_or(usize::MAX))
                    }
                    _ => {
                        return Err(invalid(
                            "argument must be 'normal <hard limit> 0 0', the limit 0 (none) or at \
                             least 64kb",
                        ));
                    }
                }
            }
            // There is no schedule to switch off.
            "save" if value.is_empty() => Self::Nothing,
            "appendonly" | "appendfsync" | "bind" | "databases" | "dbfilename" | "dir"
            | "durability" | "io-threads" | "port" | "save" => {
                return Err(ConfigError::Immutable { name: name.into() });
            }
            _ => return Err(ConfigError::Unknown { name: name.into() }),
        })
    }

    fn make(self, shared: &Shared) {
        let settings = &shared.settings;
        match self {
            Self::MaxMemory(bytes) => shared.store.set_max_memory_bytes(bytes),
            Self::Eviction(policy) => shared.store.set_eviction(policy),
            Self::MaxClients(clients) => settings.max_clients.store(clients, Ordering::Relaxed),
            Self::Nothing => {}
            Self::Timeout(seconds) => settings.idle_timeout_s.store(seconds, Ordering::Relaxed),
            Self::SlowerThan(limit) => shared.figures.slow.set_slower_than_us(limit),
            Self::SlowLog(entries) => shared.figures.slow.set_longest(entries),
            Self::Password(password) => settings.set_password(password),
            Self::QueryLimit(bytes) => settings.query_limit_bytes.store(bytes, Ordering::Relaxed),
            Self::BulkLimit(bytes) => settings.bulk_limit_bytes.store(bytes, Ordering::Relaxed),
            Self::OutputLimit(bytes) => settings
                .output_limit_bytes
                .store(if bytes == 0 { usize::MAX } else { bytes }, Ordering::Relaxed),
        }
    }
}

impl Server for Shared {
    fn unix_us(&self) -> u64 {
        Self::unix_us(self)
    }

    fn redis_version(&self) -> &str {
        REDIS_VERSION
    }

    fn is_replicated(&self) -> bool {
        self.replication.is_some()
    }

    fn figures(&self) -> Option<&beeline_resp::figures::NodeFigures> {
        Some(&self.figures)
    }

    fn password_required(&self) -> bool {
        self.settings.password_set.load(Ordering::Acquire)
    }

    fn absent_watches(&self) -> &AbsentWatches {
        &self.absent_watches
    }

    fn authenticate(&self, user: &[u8], password: &[u8]) -> bool {
        let wanted = self.settings.require_password.read().unwrap_or_else(PoisonError::into_inner);
        user == beeline_resp::DEFAULT_USER.as_bytes()
            && wanted.as_deref().is_none_or(|wanted| same_bytes(wanted.as_bytes(), password))
    }

    fn info_sections(&self) -> &[&'static str] {
        &SECTIONS
    }

    fn info(&self, section: &str, out: &mut String) {
        match section {
            "server" => self.info_server(out),
            "clients" => {
                let _ = write!(
                    out,
                    "connected_clients:{}\r\nmaxclients:{}\r\nblocked_clients:{}\r\n",
                    self.connected.load(Ordering::Relaxed),
                    self.settings.max_clients.load(Ordering::Relaxed),
                    self.loop_stats().held_clients,
                );
            }
            "memory" => self.info_memory(out),
            "persistence" => self.info_persistence(out),
            "stats" => self.info_stats(out),
            "replication" => match &self.replication {
                None => out.push_str("role:master\r\nconnected_slaves:0\r\n"),
                Some(_) => out.push_str(&self.replication_lines()),
            },
            "cpu" => {
                let (system, user) = processor_seconds();
                let _ = write!(out, "used_cpu_sys:{system:.6}\r\nused_cpu_user:{user:.6}\r\n");
            }
            "commandstats" => self.figures.write_commands(out),
            "errorstats" => self.figures.write_errors(out),
            "latencystats" => self.figures.write_latencies(out),
            "beeline" => self.info_beeline(out),
            "keyspace" => self.info_keyspace(out),
            _ => {}
        }
    }

    fn config(&self, visit: &mut dyn FnMut(&str, &str)) {
        for (name, value) in self.parameters() {
            visit(name, &value);
        }
    }

    fn config_set(&self, pairs: &[(String, String)]) -> Result<(), ConfigError> {
        let limits_memory =
            |name: &str| ["maxmemory", "maxmemory-policy"].contains(&name.to_lowercase().as_str());
        if self.replication.is_some()
            && let Some((name, _)) = pairs.iter().find(|(name, _)| limits_memory(name))
        {
            // Replicas must not differ in what they drop.
            return Err(ConfigError::Immutable { name: name.clone() });
        }
        let changes: Result<Vec<_>, _> =
            pairs.iter().map(|(name, value)| Change::parse(name, value)).collect();
        changes?.into_iter().for_each(|change| change.make(self));
        Ok(())
    }

    fn config_rewrite(&self) -> Result<(), String> {
        Err("The server is running without a config file".into())
    }

    fn reset_statistics(&self) {
        *lock(&self.forgotten) = (self.loop_stats(), self.store.stats().total);
        self.figures.reset();
    }

    fn clients(&self, visit: &mut dyn FnMut(&ClientInfo)) {
        let clients = lock(&self.clients);
        let mut ids: Vec<_> = clients.keys().copied().collect();
        ids.sort_unstable();
        ids.iter().filter_map(|id| clients.get(id)).for_each(|client| visit(&client.info));
    }

    fn kill_clients(&self, filter: &KillFilter, caller: u64) -> usize {
        let clients = lock(&self.clients);
        let selected = clients.iter().filter(|(_, client)| filter.selects(&client.info));
        selected
            .map(|(&id, client)| {
                if id != caller {
                    self.doors[client.shard].deliver(Delivery::Kill(id));
                }
            })
            .count()
    }

    fn pause_clients(&self, milliseconds: u64, pause: Pause) {
        let now_ns = self.store.clock().monotonic_ns();
        // The pause first: a shard that finds none would let keys expire again.
        self.pause.set(now_ns.saturating_add(milliseconds.saturating_mul(1_000_000)), pause);
        if self.replication.is_none() {
            self.expire_until_ms.store(self.store.clock().unix_ms(), Ordering::Relaxed);
        }
    }

    fn unpause_clients(&self) {
        self.pause.clear();
        if self.replication.is_none() {
            self.expire_until_ms.store(u64::MAX, Ordering::Relaxed);
        }
        self.doors.iter().for_each(|door| door.waker.wake());
    }

    fn save(&self) -> Result<(), SaveError> {
        self.snapshots.save(self)
    }

    fn save_in_background(&self, schedule: bool) -> Result<bool, SaveError> {
        let Some(shared) = self.this.upgrade() else {
            return Err(SaveError::Failed("the node is stopping".into()));
        };
        self.snapshots.save_in_background(&shared, schedule)
    }

    fn last_save_seconds(&self) -> u64 {
        self.snapshots.last_save_seconds()
    }

    fn shutdown(&self, request: Shutdown) -> Result<(), String> {
        if request.save == Some(true)
            && let Err(error) = self.snapshots.save(self)
            && !request.force
        {
            return Err(format!("Errors trying to SHUTDOWN: {error}. Check logs."));
        }
        self.shutdown_requested.wake();
        Ok(())
    }

    fn abort_shutdown(&self) -> bool {
        false
    }
}

/// Compares without telling by its duration where the first difference is.
fn same_bytes(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len()
        && left.iter().zip(right).fold(0, |difference, (left, right)| difference | (left ^ right))
            == 0
}

/// Redis' memory values: a number with an optional unit.
fn parse_memory(text: &str) -> Option<u64> {
    let text = text.to_ascii_lowercase();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "b" => 1,
        "k" => 1000,
        "kb" => 1 << 10,
        "m" => 1_000_000,
        "mb" => 1 << 20,
        "g" => 1_000_000_000,
        "gb" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn human(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "K", "M", "G"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes}B") } else { format!("{value:.2}{unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.2}T")
}

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

/// System and user time of the process.
fn processor_seconds() -> (f64, f64) {
    let Ok(text) = std::fs::read_to_string("/proc/self/stat") else { return (0.0, 0.0) };
    // Fields after the command, which may hold blanks but ends with the last parenthesis.
    let fields: Vec<_> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let seconds = |index: usize| {
        fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0) / ticks
    };
    (seconds(12), seconds(11))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_values_take_redis_units() {
        assert_eq!(parse_memory("100"), Some(100));
        assert_eq!(parse_memory("1k"), Some(1000));
        assert_eq!(parse_memory("2GB"), Some(2 << 30));
        assert_eq!(parse_memory("1x"), None);
        assert_eq!(parse_memory(""), None);
    }

    #[test]
    fn passwords_compare_whole() {
        assert!(same_bytes(b"secret", b"secret"));
        assert!(!same_bytes(b"secret", b"secres"));
        assert!(!same_bytes(b"secret", b"secre"));
    }
}
