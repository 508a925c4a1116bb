//! What `beeline serve` can be told.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::values::{
    Auto, ClusterWord, Door, DurabilityWord, EvictionWord, LogProviderWord, MemberWord, Members,
    Number, PoolWord, Secret, Size, Span, Switch, Window, WriteBackWord,
};
use super::{ConfigError, knobs};

knobs! {
    /// The settings of a node. Each knob's default, and why, is in its help.
    pub struct ServeConfig, flags ServeFlags {
        data: PathBuf = "./beeline-data", "Directory of the data; made if absent.";
        resp_address: Door = "127.0.0.1:6379", "Where Redis clients connect; off closes the door, port 0 picks a free one.";
        http_address: Door = "127.0.0.1:9464", "Where the status page and /metrics are; off closes it.";
        fabric_address: Door = "127.0.0.1:4790", "Where fabric clients bootstrap; off closes it.";
        fabric_window: Window = "off", "Memory window (PCIe NTB) that fabric clients may use: FILE or FILE?outbound=FILE&side=0, emulated (between processes of this host), or off.";
        durability: DurabilityWord = "process", "What acknowledged writes survive: none, process (kill -9), power.";
        pool: PoolWord = "auto", "Durable memory: dax, file, dram (gone with the process), or auto: dax where the file system has it, else file.";
        capacity: Auto<Size> = "auto", "Most bytes the pool may take; auto is 80 % of what is free (half of memory for dram).";
        segment_size: Size = "64MiB", "Bytes of one log segment, 64KiB to 1GiB in steps of 4KiB; larger is fewer files, smaller is less space held per fabric client. Bounds the largest value.";
        emulate_durability: Switch = "off", "Let a dram pool do the work of process or power durability, for experiments: it keeps neither promise.";
        write_delay_ns: Number = "0", "With emulate-durability, added to each written-back line of a dram pool, to stand for persistent memory; 150 is the usual figure.";
        write_back: WriteBackWord = "auto", "Instruction that writes lines back where the pool does: clwb, clflushopt, clflush, or auto: the best this processor has.";
        prepared_segments: Number = "1", "Segments made ready ahead of need by a background thread.";
        shards: Auto<Number> = "auto", "Threads that each own a part of the keys, 1 to 256; auto is one per core.";
        pin: Switch = "off", "Keep each shard on its own core; worth it when nothing else runs there.";
        spin_us: Number = "20", "Microseconds a shard polls on after fabric work before it sleeps, 0 to 10000; more costs idle CPU.";
        max_memory: Size = "0", "Bytes of live data at which eviction starts; 0 is no limit but the capacity.";
        eviction_policy: EvictionWord = "noeviction", "What gives way at max-memory: noeviction, allkeys-lru, allkeys-random, volatile-lru, volatile-random, volatile-ttl.";
        max_clients: Number = "10000", "Redis connections served at once.";
        require_password: Secret = "", "Password Redis clients must give. Prefer the file or BEELINE_REQUIRE_PASSWORD: flags show in process lists.";
        idle_timeout: Span = "0", "A Redis connection silent for this long is closed; 0 is never.";
        output_buffer_limit: Size = "256MiB", "Replies one client may leave unread before it is closed; 1MiB or more.";
        query_buffer_limit: Size = "1GiB", "Bytes of one incomplete request before its client is closed, 1MiB to 4GiB; the default is Redis'.";
        peers: Members = "none", "Members of the cluster this node is one of, itself among them: NUMBER=FABRIC-ADDRESS@RESP-ADDRESS, apart by commas. Who is there once the cluster runs is in its log.";
        node_id: Number = "0", "This node's number among the peers; 0 is a node by itself. Never used again once its data is lost.";
        cluster: ClusterWord = "none", "Identity of the cluster, as `beeline cluster init` makes it.";
        join: Switch = "off", "With empty data: wait to be taken in by `beeline cluster join`, instead of founding the cluster with the peers.";
        log_provider: LogProviderWord = "auto", "Fabric between members, the same at each: shm (one host), tcp, or auto: shm where all peers are on loopback.";
        log_slots: Number = "4096", "Entries the log holds, a power of two, the same at each member; decided when the cluster is founded.";
        log_slot_size: Size = "32KiB", "Bytes of one entry, the same at each member; bounds what one command or transaction carries. log-slots times this is at most 1GiB.";
        request_timeout: Span = "5s", "How long a request of a replicated node waits for a leader and its answer; a fail-over takes well under a second.";
        shutdown_wait: Span = "2s", "How long a node that stops waits for clients to read replies they are owed; the default is shorter than supervisors wait.";
    }
}

impl ServeConfig {
    /// Checks what one value alone cannot tell.
    ///
    /// Errors: every rule that is broken, and what to change.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        let mut rule = |holds: bool, problem: String| {
            if !holds {
                problems.push(problem);
            }
        };
        let segment = self.segment_size.0;
        rule(
            (64 << 10..=1 << 30).contains(&segment) && segment.is_multiple_of(4096),
            format!("segment-size: {segment} bytes; choose 64KiB to 1GiB in steps of 4KiB"),
        );
        if let Auto::Set(Size(capacity)) = self.capacity {
            rule(
                capacity >= segment.saturating_mul(4),
                format!(
                    "capacity: {capacity} bytes hold fewer than 4 segments of {segment} bytes; \
                     raise capacity or lower segment-size"
                ),
            );
        }
        if let Auto::Set(Number(shards)) = self.shards {
            rule(
                (1..=256).contains(&shards),
                format!("shards: {shards}; choose 1 to 256, or auto"),
            );
        }
        rule(
            self.spin_us.0 <= 10_000,
            format!(
                "spin-us: {} is more than 10000; a shard that polls this long never sleeps",
                self.spin_us.0
            ),
        );
        rule(
            self.max_clients.0 > 0,
            "max-clients: 0 would serve nobody; use --resp-address off to close the door"
                .to_owned(),
        );
        rule(
            self.output_buffer_limit.0 >= 1 << 20,
            "output-buffer-limit: less than 1MiB would close honest clients; raise it".to_owned(),
        );
        rule(
            (1 << 20..=1 << 32).contains(&self.query_buffer_limit.0),
            "query-buffer-limit: choose 1MiB to 4GiB".to_owned(),
        );
        let volatile = self.pool == PoolWord::Dram;
        rule(
            self.write_delay_ns.0 == 0 || (volatile && self.emulate_durability.0),
            "write-delay-ns: only a dram pool with emulate-durability stands for another memory; \
             add --pool dram --emulate-durability on"
                .to_owned(),
        );
        rule(
            !volatile || self.durability == DurabilityWord::None || self.emulate_durability.0,
            format!(
                "durability: a dram pool is gone with the process and cannot promise {}; use \
                 --durability none, another --pool, or --emulate-durability on for experiments",
                super::Knob::show(&self.durability)
            ),
        );
        let doors = [
            ("resp-address", self.resp_address),
            ("http-address", self.http_address),
            ("fabric-address", self.fabric_address),
        ];
        rule(
            doors.iter().any(|(_, door)| door.0.is_some()),
            "resp-address, http-address and fabric-address are all off; open one".to_owned(),
        );
        rule(
            self.fabric_window == Window::Off || self.fabric_address.0.is_some(),
            "fabric-window: clients find a window through fabric-address, which is off; open it"
                .to_owned(),
        );
        for (i, (name, door)) in doors.iter().enumerate() {
            for (other, second) in &doors[i + 1..] {
                rule(
                    door.0.is_none_or(|a| a.port() == 0) || door.0 != second.0,
                    format!("{name} and {other} are both {}; change one", super::Knob::show(door)),
                );
            }
        }
        self.check_cluster(&mut problems);
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    /// This node's entry among the peers; `None` for a node by itself.
    pub fn member(&self) -> Option<&MemberWord> {
        self.peers.0.iter().find(|member| u32::from(member.id) == self.node_id.0)
    }

    /// A member listens where its peers look for it, unless it is told to listen elsewhere.
    pub fn adopt_member(&mut self) {
        let Some(member) = self.member().cloned() else { return };
        let default = |port: u16| Some(SocketAddr::from(([127, 0, 0, 1], port)));
        if self.resp_address.0 == default(6379) {
            self.resp_address = Door(Some(member.resp));
        }
        if self.fabric_address.0 == default(4790) {
            self.fabric_address = Door(Some(member.log));
        }
    }

    fn check_cluster(&self, problems: &mut Vec<String>) {
        let mut rule = |holds: bool, problem: &str| {
            if !holds {
                problems.push(problem.to_owned());
            }
        };
        if self.node_id.0 == 0 && self.peers.0.is_empty() {
            return;
        }
        rule(
            self.member().is_some(),
            "node-id: the peers lack a member of this number; peers lists every member, this node \
             among them",
        );
        rule(
            self.cluster.0 != 0,
            "cluster: a member needs the cluster's identity; `beeline cluster init` makes one",
        );
        rule(self.peers.0.len() <= 11, "peers: a cluster has at most eleven members");
        rule(
            self.fabric_address.0.is_some() && self.resp_address.0.is_some(),
            "resp-address, fabric-address: members reach each other through both; open them",
        );
        rule(
            self.max_memory.0 == 0,
            "max-memory: members of a cluster cannot drop keys each by itself; remove it",
        );
        let (slots, slot) = (u64::from(self.log_slots.0), self.log_slot_size.0);
        rule(
            slots.is_power_of_two() && (64..=1 << 20).contains(&slots),
            "log-slots: choose a power of two from 64 to 1048576",
        );
        rule(
            (4 << 10..=8 << 20).contains(&slot) && slot.is_multiple_of(4096),
            "log-slot-size: choose 4KiB to 8MiB in steps of 4KiB",
        );
        rule(
            slots.saturating_mul(slot) < 1 << 30,
            "log-slots, log-slot-size: a log takes less than 1GiB; lower one of them",
        );
        rule(
            slot <= self.segment_size.0 / 8,
            "log-slot-size: an entry's effects fit a segment many times over; raise segment-size",
        );
        rule(!self.request_timeout.0.is_zero(), "request-timeout: choose more than 0");
    }
}

#[cfg(test)]
mod tests {
    use super::super::FileLayer;
    use super::*;

    fn with(change: impl FnOnce(&mut ServeFlags)) -> Result<(), ConfigError> {
        let mut flags = ServeFlags::default();
        change(&mut flags);
        ServeConfig::resolve(&flags, &FileLayer::default(), &|_| None)?.0.validate()
    }

    #[test]
    fn each_rule_names_the_knob_to_change() {
        type Change = fn(&mut ServeFlags);
        let cases: [(&str, Change); 11] = [
            ("segment-size", |f| f.segment_size = Some("5000".into())),
            ("capacity", |f| f.capacity = Some("100MiB".into())),
            ("shards", |f| f.shards = Some("0".into())),
            ("spin-us", |f| f.spin_us = Some("1000000".into())),
            ("max-clients", |f| f.max_clients = Some("0".into())),
            ("output-buffer-limit", |f| f.output_buffer_limit = Some("1".into())),
            ("query-buffer-limit", |f| f.query_buffer_limit = Some("1".into())),
            ("write-delay-ns", |f| f.write_delay_ns = Some("150".into())),
            ("http-address", |f| f.http_address = Some("127.0.0.1:6379".into())),
            ("fabric-window", |f| {
                f.fabric_window = Some("emulated".into());
                f.fabric_address = Some("off".into());
            }),
            ("durability", |f| {
                f.pool = Some("dram".into());
                f.durability = Some("power".into());
            }),
        ];
        for (knob, change) in cases {
            let error = with(change).expect_err(knob);
            assert!(error.to_string().contains(knob), "{error}");
            assert_eq!(error.problems.len(), 1, "{error}");
        }
        assert!(with(|_| {}).is_ok());
    }
}
