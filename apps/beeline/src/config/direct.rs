//! `[direct]`: the in-memory store with atomics and vector operations.

use super::values::{Door, Number, Size};
use super::{Rules, knobs};

knobs! {
    /// The direct store.
    pub struct DirectConfig, table "direct" {
        memory: Size = "1GiB", "Memory of the direct store, index and values; volatile. Pages are taken as they are first used.";
        processors: Number = "1", "Threads that each own a part of the keys and of the memory, 1 to 64.";
        index_share: Number = "50", "Percent of the memory that is the hash index, 1 to 90: more keeps small pairs in fewer accesses, less leaves more for large values.";
        inline_threshold: Number = "25", "Bytes of key and value up to which a pair is kept in the index itself, 0 to 50.";
        spin_us: Number = "20", "Microseconds a processor polls on after work before it sleeps, 0 to 10000; more costs idle CPU.";
        udp_address: Door = "off", "Where datagrams are taken, one packet each; processor i listens at this port plus i.";
        max_clients: Number = "1024", "Fabric clients of one processor served at once, 1 to 60000.";
    }
}

impl DirectConfig {
    /// The rules over several values.
    pub fn check(&self, rules: &mut Rules<'_>) {
        rules.rule("direct-processors", (1..=64).contains(&self.processors.0), "choose 1 to 64");
        rules.rule(
            "direct-memory",
            self.memory.0 >= (8 << 20) * u64::from(self.processors.0.max(1)),
            "a processor needs 8MiB or more; raise it, or use --without direct",
        );
        rules.rule("direct-index-share", (1..=90).contains(&self.index_share.0), "choose 1 to 90");
        rules.rule("direct-inline-threshold", self.inline_threshold.0 <= 50, "choose 0 to 50");
        rules.rule("direct-spin-us", self.spin_us.0 <= 10_000, "choose 0 to 10000");
        rules.rule(
            "direct-max-clients",
            (1..=60_000).contains(&self.max_clients.0),
            "choose 1 to 60000",
        );
    }
}
