//! `[documents]`: the door for MongoDB clients.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::values::{Door, Number, Size, Span, Switch};
use super::{Knob, Rules, knobs};

knobs! {
    /// The document store.
    pub struct DocumentsConfig, table "documents" {
        address: Door = "127.0.0.1:27017", "Where MongoDB clients connect; off closes the door, port 0 picks a free one.";
        max_connections: Number = "10000", "MongoDB connections served at once.";
        max_cursors: Number = "100000", "Cursors open at once.";
        replica_set: Name = "rs0", "Name of the replica set of which the node says it is the only member, so that drivers offer retryable writes and change streams; off: it stands alone.";
        oplog_size: Size = "64MiB", "Bytes of log each database keeps for change streams, and as many for members of its replica set that were away; 0 keeps no log.";
        authentication: Switch = "off", "Clients must show who they are (SCRAM-SHA-256); while there is no user, createUser works from this host without.";
        cursor_timeout: Span = "10m", "A cursor unused for this long is closed, unless its client asked that it is not.";
        members: SetMembers = "none", "Members of the replica set of a cluster's documents, this node among them, the same at each unless they are being changed: NUMBER=ADDRESS with their numbers in the cluster, apart by commas. none: nodes of a cluster have no document store.";
        election_timeout: Span = "1s", "A primary that is silent for so long is taken for dead, and another member is elected. A primary that no majority talked to for twice as long takes no writes.";
        transaction_lifetime: Span = "1m", "A transaction that is not committed for this long is ended without a trace.";
        test_commands: Switch = "off", "Clients may make commands fail on order (configureFailPoint), as tests of drivers do; MongoDB's enableTestCommands.";
        is_rdma: Switch = "on", "Clients may send their commands over fabric (shared memory, RDMA, TCP), met at the fabric address; off: they use TCP and the MongoDB wire.";
        channel_max_clients: Number = "1024", "Fabric clients served at once, 1 to 60000.";
        channel_region: Size = "4MiB", "Registered memory for the long commands of each fabric client; less is registered while the host is loaded (S of RMongo's Algorithm 2).";
        channel_share: Number = "80", "Percent of its fair part that a fabric client gets while the host is loaded, 1 to 99 (k).";
        channel_threshold: Number = "50", "Percent of memory and network that must be free for the host not to count as loaded, 0 to 100.";
        channel_bandwidth: Number = "100", "What the network moves at most, Gbit/s (B).";
        channel_pool: Size = "16MiB", "Registered memory in which replies for fabric clients are made; pages are taken as they are first used.";
        channel_checksum: Switch = "off", "Replies to fabric clients carry checksums (validation mode).";
        channel_spin_us: Number = "20", "Microseconds the thread of fabric clients polls on after work before it sleeps, 0 to 10000; more costs idle CPU.";
    }
}

impl DocumentsConfig {
    /// The rules over several values.
    pub fn check(&self, rules: &mut Rules<'_>) {
        rules.rule(
            "documents-max-connections",
            self.max_connections.0 > 0,
            "0 would serve no client; use --documents-address off to close the door",
        );
        rules.rule(
            "documents-max-cursors",
            self.max_cursors.0 > 0,
            "0 would answer no query; choose 1 or more",
        );
        rules.rule(
            "documents-cursor-timeout",
            !self.cursor_timeout.0.is_zero(),
            "0 would close cursors at once; choose a second or more",
        );
        rules.rule(
            "documents-transaction-lifetime",
            !self.transaction_lifetime.0.is_zero(),
            "0 would end transactions at once; choose a second or more",
        );
        let clients = 1..=60_000;
        let fine = clients.contains(&self.channel_max_clients.0);
        rules.rule("documents-channel-max-clients", fine, "choose 1 to 60000");
        let share = (1..=99).contains(&self.channel_share.0);
        rules.rule("documents-channel-share", share, "choose 1 to 99");
        rules.rule(
            "documents-channel-threshold",
            self.channel_threshold.0 <= 100,
            "choose 0 to 100",
        );
        rules.rule("documents-channel-bandwidth", self.channel_bandwidth.0 > 0, "choose 1 or more");
        let region = ((64 << 10)..=(1 << 30)).contains(&self.channel_region.0);
        rules.rule("documents-channel-region", region, "choose 64KiB to 1GiB");
        let pool = ((1 << 20)..=(16 << 30)).contains(&self.channel_pool.0);
        rules.rule("documents-channel-pool", pool, "choose 1MiB to 16GiB");
        rules.rule(
            "documents-channel-spin-us",
            self.channel_spin_us.0 <= 10_000,
            "choose 0 to 10000",
        );
        let replicated = !self.members.0.is_empty();
        rules.rule(
            "documents-election-timeout",
            !replicated || self.election_timeout.0 >= Duration::from_millis(200),
            "a busy machine is silent that long now and then; choose 200ms or more",
        );
        rules.rule(
            "documents-oplog-size",
            !replicated || self.oplog_size.0 >= 32 << 20,
            "members of a replica set copy from each other's logs, and an entry may take 16 MiB; choose 32MiB or more",
        );
        rules.rule(
            "documents-replica-set",
            !replicated || self.replica_set.0.is_some(),
            "members of a replica set need its name, rs0 for instance",
        );
    }
}

/// Where the members of a replica set listen, by number; empty: there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetMembers(pub BTreeMap<u16, SocketAddr>);

impl Knob for SetMembers {
    const PLACEHOLDER: &'static str = "MEMBERS";

    fn parse(text: &str) -> Result<Self, String> {
        let mut members = BTreeMap::new();
        if text.trim().is_empty() || text == "none" {
            return Ok(Self(members));
        }
        for word in text.split(',') {
            let wrong = || {
                format!("{word:?} is no member; write NUMBER=ADDRESS:PORT, as in 1=10.0.0.1:27017")
            };
            let (number, address) = word.trim().split_once('=').ok_or_else(wrong)?;
            let number: u16 =
                number.trim().parse().ok().filter(|one| *one > 0).ok_or_else(wrong)?;
            let address: SocketAddr = address.trim().parse().map_err(|_| wrong())?;
            if address.port() == 0 || address.ip().is_unspecified() {
                return Err(format!("{word:?} is where others reach a member: name its port"));
            }
            if members.values().any(|other| *other == address)
                || members.insert(number, address).is_some()
            {
                return Err(format!("{word:?} has the number or the address of another member"));
            }
        }
        Ok(Self(members))
    }

    fn show(&self) -> String {
        let words: Vec<String> =
            self.0.iter().map(|(number, address)| format!("{number}={address}")).collect();
        if words.is_empty() { "none".to_owned() } else { words.join(",") }
    }
}

/// A name, or off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(pub Option<String>);

impl Knob for Name {
    const PLACEHOLDER: &'static str = "NAME";

    fn parse(text: &str) -> Result<Self, String> {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        match text {
            "off" => Ok(Self(None)),
            name if !name.is_empty() && name.len() <= 64 && name.chars().all(plain) => {
                Ok(Self(Some(name.to_owned())))
            }
            _ => Err(format!("{text:?} is no name; write letters, digits, - and _, or off")),
        }
    }

    fn show(&self) -> String {
        self.0.clone().unwrap_or_else(|| "off".to_owned())
    }
}
