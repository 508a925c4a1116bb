//! The list of peers.
//!
//! ```toml
//! addresses = ["10.77.0.1"]          # of this host, as programs connect to or from them
//! listen = "10.77.0.1:9090"          # where this host's monitor is reached
//! partitions = 1                     # of each window, 1 to 8; the same at both ends, as are slot, ring and queue
//! threads_of_a_partition = 1         # 2: one sends, one receives, both looking: for latency, where cores are spare
//! slot_bytes = 4096                  # a packet with its header, a power of two
//! ring_bytes = 2097152               # of a data ring, at most; the same at both ends, too
//! queue_blocks = 256                 # packets of a connection under way, a power of two
//! connections_per_partition = 4096
//! rounds = 16                        # of one priority while a lower one waits
//! bytes_a_second = 0                 # of a partition, towards the other host; 0: as many as there are
//! memory_of_a_process = 0            # bytes of queues and blocks of one program's process; 0: any number
//! extents_of_a_process = 67108864    # bytes of other hosts' memory that one program's process may write
//! extents_of_this_host = 268435456   # bytes of this host's memory that programs of others may write
//! balance = true                     # move busy connections from loaded partitions to others
//! cores = []                         # processors of the partitions' threads, in their order (two threads: in
//!                                    # pairs, the sending one first); none: any
//! grace_seconds = 5                  # how long connections wait for a proxy that died to be back
//!
//! [[peers]]
//! name = "b"
//! addresses = ["10.77.0.2"]
//! monitor = "10.77.0.2:9090"
//! window = "ntb:///run/window?side=0" # if not told on the command line
//!
//! [[rules]]                          # the first that fits decides; none: allowed
//! from = "10.77.0.2"                 # of the connecting end; left out: any
//! port = 6379                        # of the listening end; left out: any
//! allow = false
//! ```

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use beeline_ntb::WindowUrl;
use serde::Deserialize;

/// Longest time that connections wait for a proxy.
const LONGEST_GRACE_SECONDS: u64 = 3600;

/// An address of the file: its error says what one looks like, where the parser's would say only that this is none.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct Address(IpAddr);

/// An address with a port, in the same way.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct Place(SocketAddr);

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| {
            format!("{text:?} is no address, such as 10.77.0.2; names of hosts are not looked up")
        })
    }
}

impl TryFrom<String> for Place {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| {
            format!(
                "{text:?} is no address with a port, such as 10.77.0.2:9090; names of hosts are not looked up"
            )
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    addresses: Vec<Address>,
    listen: Place,
    #[serde(default = "one")]
    partitions: usize,
    #[serde(default = "one")]
    threads_of_a_partition: usize,
    #[serde(default = "slot_bytes")]
    slot_bytes: usize,
    #[serde(default = "ring_bytes")]
    ring_bytes: usize,
    #[serde(default = "queue_blocks")]
    queue_blocks: usize,
    #[serde(default = "connections")]
    connections_per_partition: usize,
    #[serde(default = "rounds")]
    rounds: u32,
    #[serde(default)]
    bytes_a_second: u64,
    #[serde(default)]
    memory_of_a_process: u64,
    #[serde(default = "process_extents")]
    extents_of_a_process: u64,
    #[serde(default = "host_extents")]
    extents_of_this_host: u64,
    #[serde(default = "yes")]
    balance: bool,
    #[serde(default)]
    cores: Vec<usize>,
    #[serde(default = "grace")]
    grace_seconds: u64,
    #[serde(default)]
    peers: Vec<FilePeer>,
    #[serde(default)]
    rules: Vec<Rule>,
}

fn one() -> usize {
    1
}

fn slot_bytes() -> usize {
    4096
}

fn ring_bytes() -> usize {
    2 << 20
}

fn queue_blocks() -> usize {
    256
}

fn connections() -> usize {
    4096
}

fn rounds() -> u32 {
    16
}

fn process_extents() -> u64 {
    64 << 20
}

fn host_extents() -> u64 {
    256 << 20
}

fn yes() -> bool {
    true
}

fn grace() -> u64 {
    5
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FilePeer {
    name: String,
    addresses: Vec<Address>,
    monitor: Place,
    window: Option<String>,
}

/// Which connections may be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Of the connecting end.
    pub from: Option<IpAddr>,
    /// Of the listening end.
    pub port: Option<u16>,
    /// What it says.
    pub allow: bool,
}

/// Another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// For the status.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Where its monitor is reached.
    pub monitor: SocketAddr,
    /// The window that leads there.
    pub window: WindowUrl,
}

/// Everything a proxy is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// This host's addresses.
    pub addresses: Vec<IpAddr>,
    /// Where its monitor is reached.
    pub listen: SocketAddr,
    /// Of each window.
    pub partitions: usize,
    /// 1: it alternates between sending and receiving; 2: one of each.
    pub threads_of_a_partition: usize,
    /// Of a packet with its header.
    pub slot_bytes: usize,
    /// Of a data ring, at most.
    pub ring_bytes: usize,
    /// Packets of a connection under way.
    pub queue_blocks: usize,
    /// At most.
    pub connections_per_partition: usize,
    /// Of one priority while a lower one waits.
    pub rounds: u32,
    /// Of a partition, towards the other host; `None`: no limit.
    pub bytes_a_second: Option<u64>,
    /// Bytes of queues and blocks that one program's process may have; `None`: no limit.
    pub memory_of_a_process: Option<u64>,
    /// Bytes of other hosts' memory that one program's process may write.
    pub extents_of_a_process: u64,
    /// Bytes of this host's memory that programs of others may write.
    pub extents_of_this_host: u64,
    /// Busy connections are moved from loaded partitions to others.
    pub balance: bool,
    /// Processors of the partitions' threads, counted round; none: any.
    pub cores: Vec<usize>,
    /// How long connections wait for a proxy that died.
    pub grace: Duration,
    /// The others.
    pub peers: Vec<Peer>,
    /// In their order.
    pub rules: Vec<Rule>,
}

/// Why a list of peers was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It is no such file.
    #[error("{0}")]
    Toml(#[from] toml::de::Error),
    /// A window cannot be.
    #[error("peer {peer}: {error}")]
    Window {
        /// Of which peer.
        peer: String,
        /// Why.
        error: beeline_ntb::CableError,
    },
    /// A peer has none.
    #[error(
        "peer {peer} has no window: name one in the file, or with --window where there is one peer"
    )]
    NoWindow {
        /// Which peer.
        peer: String,
    },
    /// A partition cannot have so many threads.
    #[error(
        "threads_of_a_partition is {threads}: 1, which alternates, or 2, one that sends and one that receives"
    )]
    Threads {
        /// As told.
        threads: usize,
    },
    /// There are none.
    #[error("there are no peers: name each in a [[peers]]")]
    NoPeers,
    /// Nothing could come from or go to it.
    #[error("{place} has no address")]
    NoAddress {
        /// This host, or which peer.
        place: String,
    },
    /// It would be two hosts'.
    #[error("{address} stands for two hosts")]
    Twice {
        /// Which.
        address: IpAddr,
    },
}

impl Config {
    /// From the text of a file; `window` for the one peer that names none.
    ///
    /// Errors: [`ConfigError`].
    pub fn parse(text: &str, window: Option<&str>) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text)?;
        if file.peers.is_empty() {
            return Err(ConfigError::NoPeers);
        }
        if !(1..=2).contains(&file.threads_of_a_partition) {
            return Err(ConfigError::Threads { threads: file.threads_of_a_partition });
        }
        let alone = file.peers.len() == 1;
        let mut known = BTreeSet::new();
        let mut canonical = |place: &str, addresses: Vec<Address>| {
            if addresses.is_empty() {
                return Err(ConfigError::NoAddress { place: place.to_owned() });
            }
            addresses
                .into_iter()
                .map(|Address(address)| {
                    let address = address.to_canonical();
                    if known.insert(address) {
                        Ok(address)
                    } else {
                        Err(ConfigError::Twice { address })
                    }
                })
                .collect::<Result<Vec<_>, _>>()
        };
        let addresses = canonical("this host", file.addresses)?;
        let mut peers = Vec::new();
        for FilePeer { name, addresses, monitor, window: own } in file.peers {
            let url = own.as_deref().or(window.filter(|_| alone));
            let url = url.ok_or_else(|| ConfigError::NoWindow { peer: name.clone() })?;
            let window = url.parse();
            let window =
                window.map_err(|error| ConfigError::Window { peer: name.clone(), error })?;
            let addresses = canonical(&name, addresses)?;
            peers.push(Peer { name, addresses, monitor: monitor.0, window });
        }
        Ok(Self {
            addresses,
            listen: file.listen.0,
            partitions: file.partitions,
            threads_of_a_partition: file.threads_of_a_partition,
            slot_bytes: file.slot_bytes,
            ring_bytes: file.ring_bytes,
            queue_blocks: file.queue_blocks,
            connections_per_partition: file.connections_per_partition,
            rounds: file.rounds,
            bytes_a_second: (file.bytes_a_second > 0).then_some(file.bytes_a_second),
            memory_of_a_process: (file.memory_of_a_process > 0).then_some(file.memory_of_a_process),
            extents_of_a_process: file.extents_of_a_process,
            extents_of_this_host: file.extents_of_this_host,
            balance: file.balance,
            cores: file.cores,
            grace: Duration::from_secs(file.grace_seconds.min(LONGEST_GRACE_SECONDS)),
            peers,
            rules: file.rules,
        })
    }

    /// Whether a connection from `from` to the listening `port` may be.
    #[must_use]
    pub fn allows(&self, from: IpAddr, port: u16) -> bool {
        let fits = |rule: &&Rule| {
            rule.from.is_none_or(|known| known.to_canonical() == from)
                && rule.port.is_none_or(|known| known == port)
        };
        self.rules.iter().find(fits).is_none_or(|rule| rule.allow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "addresses = [\"10.0.0.1\"]\nlisten = \"10.0.0.1:9090\"\n[[peers]]\n\
        name = \"b\"\naddresses = [\"10.0.0.2\"]\nmonitor = \"10.0.0.2:9090\"\n";

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rules = "[[rules]]\nfrom = \"10.0.0.2\"\nport = 80\nallow = true\n\
            [[rules]]\nfrom = \"10.0.0.2\"\nallow = false\n[[rules]]\nport = 443\nallow = false\n";
        let config = Config::parse(&format!("{TEXT}{rules}"), Some("ntb:///w?side=0")).unwrap();
        let [b, c]: [IpAddr; 2] = ["10.0.0.2".parse().unwrap(), "10.0.0.3".parse().unwrap()];
        let table =
            [(b, 80, true), (b, 81, false), (b, 443, false), (c, 443, false), (c, 80, true)];
        for (from, port, allowed) in table {
            assert_eq!(config.allows(from, port), allowed, "{from} {port}");
        }
    }

    #[test]
    fn what_is_missing_or_double_is_refused_by_its_name() {
        let said = |text: &str, window| Config::parse(text, window).unwrap_err().to_string();
        assert!(said(TEXT, None).contains("peer b has no window"));
        assert!(said(TEXT, Some("ntb:///w")).contains("which side"));
        assert!(
            said(&TEXT.replace("10.0.0.2\"]", "10.0.0.1\"]"), Some("ntb:///w?side=0"))
                .contains("two hosts")
        );
        assert!(
            said("addresses = [\"10.0.0.1\"]\nlisten = \"10.0.0.1:9090\"", None)
                .contains("no peers")
        );
        let three = format!("threads_of_a_partition = 3\n{TEXT}");
        assert!(said(&three, Some("ntb:///w?side=0")).contains("is 3: 1, which alternates, or 2"));
        assert!(said("adresses = []", None).contains("unknown field"));
        for (right, wrong, line) in [
            ("10.0.0.2:9090", "b.example:9090", "monitor = "),
            ("10.0.0.1:9090", "10.0.0.1", "listen = "),
        ] {
            let text = said(&TEXT.replace(right, wrong), None);
            assert!(text.contains(line), "{text}");
            let word = format!("\"{wrong}\" is no address with a port, such as 10.77.0.2:9090");
            assert!(text.contains(&word), "{text}");
        }
        let text = said(&TEXT.replace("[\"10.0.0.2", "[\"b.example"), None);
        assert!(text.contains("\"b.example\" is no address, such as 10.77.0.2; names"), "{text}");
    }
}
