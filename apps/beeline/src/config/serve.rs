//! `[serve]`: the node itself, and the tables of its services.

use std::path::PathBuf;

use super::values::{
    Auto, ClusterWord, Door, DurabilityWord, EvictionWord, LogProviderWord, MemberWord, Members,
    Names, Number, PoolWord, Size, Span, Switch, Window, WriteBackWord,
};
use super::{
    ConfigError, DirectConfig, DocumentsConfig, Environment, FileLayer, Knob as _, ObjectsConfig,
    Origin, RespConfig, Row, Rules, ServeFlags, Table, knobs, nearest,
};

knobs! {
    /// The settings of a node. Each knob's default, and why, is in its help.
    pub struct ServeConfig, table "serve" {
        data: PathBuf = "./beeline-data", "Directory of the data; made if absent.";
        without: Names = "none", "Services that are not started, apart by commas, as in resp,objects; their tables are the names there are.";
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
        accept_damage: Switch = "off", "Start although acknowledged data is damaged or lost, with what is left: older values and deleted keys may be among it. What is accepted once is not asked about again.";
        prepared_segments: Number = "1", "Segments made ready ahead of need by a background thread.";
        shards: Auto<Number> = "auto", "Threads that each own a part of the keys, 1 to 256; auto is one per core.";
        pin: Switch = "off", "Keep each shard on its own core; worth it when nothing else runs there.";
        spin_us: Number = "20", "Microseconds a shard polls on after fabric work before it sleeps, 0 to 10000; more costs idle CPU.";
        max_memory: Size = "0", "Bytes of live data at which eviction starts; 0 is no limit but the capacity.";
        eviction_policy: EvictionWord = "noeviction", "What gives way at max-memory: noeviction, allkeys-lru, allkeys-random, volatile-lru, volatile-random, volatile-ttl.";
        change_feed: Size = "0", "Bytes of memory for the latest changes of keys, which `beeline kv watch` follows; 0 keeps none.";
        peers: Members = "none", "Members of the cluster this node is one of, itself among them: NUMBER=FABRIC-ADDRESS@RESP-ADDRESS, apart by commas. Who is there once the cluster runs is in its log.";
        node_id: Number = "0", "This node's number among the peers; 0 is a node by itself. Never used again once its data is lost.";
        cluster: ClusterWord = "none", "Identity of the cluster, as `beeline cluster init` makes it.";
        join: Switch = "off", "With empty data: wait to be taken in by `beeline cluster join`, instead of founding the cluster with the peers.";
        log_provider: LogProviderWord = "auto", "Fabric between members, the same at each: shm (one host), tcp, or auto: shm where all peers are on loopback.";
        log_slots: Number = "4096", "Entries the log holds, a power of two, the same at each member; decided when the cluster is founded.";
        log_slot_size: Size = "32KiB", "Bytes of one entry, the same at each member; longer commands travel in pieces, up to half of segment-size. log-slots times this is at most 1GiB.";
        request_timeout: Span = "5s", "How long a request of a replicated node waits for a leader and its answer; a fail-over takes well under a second.";
        shutdown_wait: Span = "2s", "How long a node that stops waits for clients to read replies they are owed; the default is shorter than supervisors wait.";
    }
    tables {
        /// The door for Redis clients.
        resp: RespConfig;
        /// The object store.
        objects: ObjectsConfig;
        /// The document store.
        documents: DocumentsConfig;
        /// The in-memory store with atomics and vectors.
        direct: DirectConfig;
    }
}

impl ServeConfig {
    /// What the layers say together, checked: the settings and the rows of `config show`.
    ///
    /// Errors: every value that does not parse, every name that is no setting, else every rule that
    /// is broken; each with its place and what to change.
    pub fn load(
        flags: &ServeFlags,
        file: &FileLayer,
        environment: &Environment,
    ) -> Result<(Self, Vec<Row>), ConfigError> {
        let (mut config, mut rows) = Self::resolve(flags, file, environment)?;
        config.settle(&mut rows);
        let mut rules = Rules::new(&rows);
        config.check_all(&mut rules);
        rules.finish()?;
        Ok((config, rows))
    }

    /// Settings that follow from others. A value that a person gave is kept.
    fn settle(&mut self, rows: &mut [Row]) {
        let mut follow = |name: &str, value: Door, by: &'static str, always: bool| {
            let row = rows.iter_mut().find(|row| row.name == name)?;
            (always || row.origin == Origin::Default).then(|| {
                row.value = value.show();
                row.origin = Origin::Setting(by);
                value
            })
        };
        // A member listens where its peers look for it.
        if let Some(member) = self.member() {
            let (resp, log) = (Door(Some(member.resp)), Door(Some(member.log)));
            let found = follow("resp-address", resp, "peers", false);
            self.resp.address = found.unwrap_or(self.resp.address);
            let found = follow("fabric-address", log, "peers", false);
            self.fabric_address = found.unwrap_or(self.fabric_address);
            if let Some(address) = self.documents.members.0.get(&member_id(self.node_id.0)) {
                let door = Door(Some(*address));
                let found = follow("documents-address", door, "documents-members", false);
                self.documents.address = found.unwrap_or(self.documents.address);
            }
        }
        // The Redis door is the node's own, which starts no service for it.
        if self.without.has(RespConfig::NAME) {
            let closed = follow("resp-address", Door(None), "without", true);
            self.resp.address = closed.unwrap_or(Door(None));
        }
    }

    /// The services a node has, by the names of their tables.
    pub fn services() -> Vec<&'static str> {
        let mut settings = Vec::new();
        Self::settings(&mut settings);
        let mut names: Vec<&str> = settings.iter().map(|setting| setting.table).collect();
        names.dedup();
        names.retain(|&name| name != Self::NAME);
        names
    }

    fn check(&self, rules: &mut Rules<'_>) {
        let services = Self::services();
        for name in &self.without.0 {
            let hint = nearest(name, services.iter().copied()).map_or_else(
                || format!("the services are {}", services.join(", ")),
                |near| format!("did you mean {near}?"),
            );
            let known = services.contains(&name.as_str());
            rules.rule("without", known, format!("there is no service {name}; {hint}"));
        }
        let segment = self.segment_size.0;
        rules.rule(
            "segment-size",
            (64 << 10..=1 << 30).contains(&segment) && segment.is_multiple_of(4096),
            format!("{segment} bytes; choose 64KiB to 1GiB in steps of 4KiB"),
        );
        if let Auto::Set(Size(capacity)) = self.capacity {
            rules.rule(
                "capacity",
                capacity >= segment.saturating_mul(4),
                format!(
                    "{capacity} bytes hold fewer than 4 segments of {segment} bytes; raise \
                     capacity or lower segment-size"
                ),
            );
        }
        if let Auto::Set(Number(shards)) = self.shards {
            let problem = format!("{shards}; choose 1 to 256, or auto");
            rules.rule("shards", (1..=256).contains(&shards), problem);
        }
        rules.rule(
            "spin-us",
            self.spin_us.0 <= 10_000,
            format!(
                "{} is more than 10000; a shard that polls this long never sleeps",
                self.spin_us.0
            ),
        );
        let volatile = self.pool == PoolWord::Dram;
        rules.rule(
            "write-delay-ns",
            self.write_delay_ns.0 == 0 || (volatile && self.emulate_durability.0),
            "only a dram pool with emulate-durability stands for another memory; add --pool dram \
             --emulate-durability on",
        );
        rules.rule(
            "durability",
            !volatile || self.durability == DurabilityWord::None || self.emulate_durability.0,
            format!(
                "a dram pool is gone with the process and cannot promise {}; use --durability \
                 none, another --pool, or --emulate-durability on for experiments",
                self.durability.show()
            ),
        );
        self.check_doors(rules);
        self.check_cluster(rules);
    }

    fn check_doors(&self, rules: &mut Rules<'_>) {
        let doors = [
            ("resp-address", self.resp.address),
            ("http-address", self.http_address),
            ("fabric-address", self.fabric_address),
        ];
        rules.rule(
            "resp-address",
            doors.iter().any(|(_, door)| door.0.is_some()),
            "http-address and fabric-address are off too; open one of the three",
        );
        rules.rule(
            "fabric-window",
            self.fabric_window == Window::Off || self.fabric_address.0.is_some(),
            "clients find a window through fabric-address, which is off; open it",
        );
        for (i, (name, door)) in doors.iter().enumerate() {
            for (other, second) in &doors[..i] {
                rules.rule(
                    name,
                    door.0.is_none_or(|address| address.port() == 0) || door.0 != second.0,
                    format!("{other} is {} too; change one", door.show()),
                );
            }
        }
    }

    /// This node's entry among the peers; `None` for a node by itself.
    pub fn member(&self) -> Option<&MemberWord> {
        self.peers.0.iter().find(|member| u32::from(member.id) == self.node_id.0)
    }

    /// Whether this node's documents are a member of a replica set.
    pub fn is_documents_member(&self) -> bool {
        self.documents.address.0.is_some() && !self.documents.members.0.is_empty()
    }

    fn check_cluster(&self, rules: &mut Rules<'_>) {
        if self.is_documents_member() {
            let members = &self.documents.members.0;
            let known = |number: &u16| self.peers.0.iter().any(|peer| peer.id == *number);
            rules.rule(
                "documents-members",
                members.keys().all(known) && members.contains_key(&member_id(self.node_id.0)),
                "the members of the replica set are nodes of the cluster, this one among them: name \
                 the same numbers as in peers",
            );
        }
        if self.node_id.0 == 0 && self.peers.0.is_empty() {
            return;
        }
        rules.rule(
            "node-id",
            self.member().is_some(),
            "the peers lack a member of this number; peers lists every member, this node among \
             them",
        );
        rules.rule(
            "cluster",
            self.cluster.0 != 0,
            "a member needs the cluster's identity; `beeline cluster init` makes one",
        );
        rules.rule("peers", self.peers.0.len() <= 11, "a cluster has at most eleven members");
        for (door, open) in [
            ("resp-address", self.resp.address.0.is_some()),
            ("fabric-address", self.fabric_address.0.is_some()),
        ] {
            rules.rule(door, open, "members reach each other through this door; open it");
        }
        rules.rule(
            "max-memory",
            self.max_memory.0 == 0,
            "members of a cluster cannot drop keys each by itself; remove it",
        );
        let (slots, slot) = (u64::from(self.log_slots.0), self.log_slot_size.0);
        rules.rule(
            "log-slots",
            slots.is_power_of_two() && (64..=1 << 20).contains(&slots),
            "choose a power of two from 64 to 1048576",
        );
        rules.rule(
            "log-slot-size",
            (4 << 10..=8 << 20).contains(&slot) && slot.is_multiple_of(4096),
            "choose 4KiB to 8MiB in steps of 4KiB",
        );
        rules.rule(
            "log-slots",
            slots.saturating_mul(slot) < 1 << 30,
            "with log-slot-size the log takes 1GiB or more; lower one of them",
        );
        rules.rule(
            "log-slot-size",
            slot <= self.segment_size.0 / 8,
            "an entry's effects fit a segment many times over; raise segment-size",
        );
        rules.rule("request-timeout", !self.request_timeout.0.is_zero(), "choose more than 0");
    }
}

/// A node's number as members are known by it.
fn member_id(node_id: u32) -> u16 {
    u16::try_from(node_id).unwrap_or(0)
}
