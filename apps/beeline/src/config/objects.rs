//! `[objects]`: the object store of the node.

use std::path::PathBuf;

use super::values::{Auto, MoveWord, Names, Number, Secret, Size};
use super::{Knob, Rules, knobs};

knobs! {
    /// The object store.
    pub struct ObjectsConfig, table "objects" {
        socket: Auto<PathBuf> = "auto", "Unix socket that clients connect to, at most 107 bytes; auto is objects.sock in the data directory.";
        socket_mode: Mode = "600", "Rights on the socket, octal as in chmod: 600 for this user alone, 660 for its group too.";
        memory: Auto<Size> = "auto", "Most bytes of memory objects may take; auto is a quarter of this machine's.";
        disk: Auto<Size> = "auto", "Most bytes on disk for objects that memory has no room for; 0 drops the least recently used instead, auto is half of what is free in the data directory, at most four times the memory.";
        spin_us: Number = "20", "Microseconds the store polls on after a request before it sleeps, 0 to 10000; more costs idle CPU.";
        max_clients: Number = "10000", "Processes connected at once.";
        peers: Names = "none", "Fabric addresses of nodes that may have an object this node lacks, HOST:PORT apart by commas; each is asked in turn. With many nodes use a directory.";
        directory: Address = "none", "Address of the RESP server that knows which node has which object: the Redis door of any node, Redis or Valkey; the same at each node.";
        directory_password: Secret = "", "Password of the directory.";
        advertise: Address = "none", "Fabric address other nodes reach this one at, HOST:PORT; none is fabric-address itself.";
        transfer_port: Number = "0", "Port beside fabric-address for transfers where fabric cannot connect; 0 picks a free one.";
        protocol: MoveWord = "auto", "How objects come from other nodes: auto (by size, as measured), two-sided, one-sided, socket, socket-4k (the published baseline).";
        numa: Numa = "auto", "Processors that store and transfers keep to: auto is those of the memory node the network card is attached to, where there are several nodes; off is any; a number is that node's.";
        fetchers: Number = "2", "Fetches under way at once, 1 to 64.";
    }
}

impl ObjectsConfig {
    /// The rules over several values.
    pub fn check(&self, rules: &mut Rules<'_>) {
        let memory = match self.memory {
            Auto::Set(Size(bytes)) => bytes,
            Auto::Detect => u64::MAX,
        };
        rules.rule("objects-memory", memory >= 1 << 20, "less than 1MiB holds no object; raise it");
        let both = !self.peers.0.is_empty() && !self.directory.0.is_empty();
        rules.rule("objects-peers", !both, "a directory knows the peers: choose one of the two");
        let port = u16::try_from(self.transfer_port.0).is_ok();
        rules.rule("objects-transfer-port", port, "a port is 65535 at most");
        let fetchers = (1..=64).contains(&self.fetchers.0);
        rules.rule("objects-fetchers", fetchers, "choose 1 to 64");
        rules.rule("objects-spin-us", self.spin_us.0 <= 10_000, "choose 10000 or less");
        rules.rule(
            "objects-max-clients",
            self.max_clients.0 > 0,
            "0 would serve no client; use --without objects",
        );
        rules.rule(
            "objects-socket-mode",
            self.socket_mode.0 & 0o600 == 0o600,
            "the node's own user needs reading and writing; choose 600, 660 or 666",
        );
    }
}

/// HOST:PORT, or none, which is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(pub String);

impl Knob for Address {
    const PLACEHOLDER: &'static str = "HOST:PORT";

    fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(String::new()));
        }
        let port = text.rsplit_once(':').and_then(|(host, port)| {
            port.parse::<u16>().ok().filter(|port| *port > 0 && !host.is_empty())
        });
        match port {
            Some(_) => Ok(Self(text.to_owned())),
            None => Err(format!("{text:?} is no address; write HOST:PORT, or none")),
        }
    }

    fn show(&self) -> String {
        if self.0.is_empty() { "none".to_owned() } else { self.0.clone() }
    }
}

/// Which memory node's processors are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numa {
    /// The network card's.
    Auto,
    /// Any.
    Off,
    /// This node's.
    Node(u32),
}

impl Knob for Numa {
    const PLACEHOLDER: &'static str = "auto|off|NODE";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            number => number
                .parse()
                .map(Self::Node)
                .map_err(|_| format!("{text:?} is no NUMA node; write its number, auto or off")),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::Off => "off".to_owned(),
            Self::Node(number) => number.to_string(),
        }
    }
}

/// Rights on a file, octal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Knob for Mode {
    const PLACEHOLDER: &'static str = "MODE";

    fn parse(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text.trim_start_matches('0'), 8) {
            Ok(mode) if mode <= 0o777 => Ok(Self(mode)),
            _ => Err(format!("{text:?} is no mode; write octal digits, as in 600 or 660")),
        }
    }

    fn show(&self) -> String {
        format!("{:o}", self.0)
    }
}
