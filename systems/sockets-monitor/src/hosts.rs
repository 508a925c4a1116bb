//! Other hosts whose programs may be reached over the fabric.
//!
//! ```toml
//! listen = "verbs://10.0.0.1:4791"   # where this host's relay is reached
//!
//! [[hosts]]
//! addresses = ["10.0.0.2"]           # of the other host, as programs connect to or from them
//! relay = "verbs://10.0.0.2:4791"    # where its relay is reached
//! ```
//!
//! and, before the first `[[hosts]]`, if wanted:
//!
//! ```toml
//! over_tcp = true                    # carry connections also where the link would be TCP, which the kernel does better
//! sleepers_hold_seconds = 60         # how long what only sleepers use is left to the kernel; 0, if not given: never
//! ```
//!
//! A connection to an address that stands here for no host stays with the kernel. Both hosts name
//! each other.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use beeline_sockets::control::LONGEST_HOLD_SECONDS;
use serde::Deserialize;

use crate::file::{self, FileError};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: String,
    #[serde(default)]
    hosts: Vec<Host>,
    #[serde(default)]
    sleepers_hold_seconds: u16,
    #[serde(default)]
    over_tcp: bool,
}

/// One other host.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Its addresses; one of version 4 in version 6 clothes is one of version 4.
    pub addresses: Vec<IpAddr>,
    /// Where its relay is reached.
    pub relay: String,
}

/// This host's place on the fabric, and the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// Where this host's relay is reached.
    pub listen: String,
    /// The others.
    pub others: Vec<Host>,
    /// How long a connection at one end of which a program sleeps at nearly every message is left to the
    /// kernel, at most [`LONGEST_HOLD_SECONDS`]; zero: it is carried all the same.
    pub sleepers_hold: Duration,
    /// Connections are carried also where the link is the kernel's own TCP.
    pub over_tcp: bool,
}

impl Hosts {
    /// From the text of a file.
    ///
    /// Errors: [`FileError`].
    pub fn parse(text: &str) -> Result<Self, FileError> {
        let File { listen, mut hosts, sleepers_hold_seconds, over_tcp } = file::parse(text)?;
        let mut known = BTreeSet::new();
        for (place, other) in (1..).zip(&mut hosts) {
            if other.addresses.is_empty() {
                return Err(FileError::Nowhere { host: place });
            }
            for address in &mut other.addresses {
                *address = address.to_canonical();
                if !known.insert(*address) {
                    return Err(FileError::Twice { host: place, address: *address });
                }
            }
        }
        let places = hosts.iter().map(|other| &other.relay).chain([&listen]);
        for text in places {
            let (scheme, rest) = text.split_once("://").unwrap_or_default();
            if scheme.is_empty() || rest.is_empty() {
                return Err(FileError::Place { text: text.clone() });
            }
        }
        if sleepers_hold_seconds > LONGEST_HOLD_SECONDS {
            return Err(FileError::Hold { seconds: sleepers_hold_seconds });
        }
        let sleepers_hold = Duration::from_secs(u64::from(sleepers_hold_seconds));
        Ok(Self { listen, others: hosts, sleepers_hold, over_tcp })
    }

    /// True when `address` is one of another host's.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.other(address).is_some()
    }

    fn other(&self, address: IpAddr) -> Option<&Host> {
        self.others.iter().find(|other| other.addresses.contains(&address.to_canonical()))
    }

    /// True when the host that has `address` is to be reached by TCP and nothing else, which is left to the kernel.
    #[must_use]
    pub fn is_left_over_tcp(&self, address: IpAddr) -> bool {
        let by_tcp = |other: &Host| other.relay.starts_with("tcp://");
        !self.over_tcp && self.other(address).is_some_and(by_tcp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_known_by_each_of_their_addresses() {
        let text = "listen = \"tcp://10.0.0.1:4791\"\n\
                    [[hosts]]\naddresses = [\"10.0.0.2\", \"::ffff:10.0.0.3\", \"fd00::2\"]\n\
                    relay = \"verbs://10.0.0.2:4791\"\n";
        let hosts = Hosts::parse(text).unwrap();
        for known in ["10.0.0.2", "10.0.0.3", "::ffff:10.0.0.2", "fd00::2"] {
            assert!(hosts.has(known.parse().unwrap()), "{known}");
        }
        assert!(!hosts.has("10.0.0.1".parse().unwrap()));
        let left =
            |text: &str| Hosts::parse(text).unwrap().is_left_over_tcp("10.0.0.3".parse().unwrap());
        assert!(!left(text), "the relays find out what there is");
        let by_tcp = text.replace("verbs://", "tcp://");
        assert!(left(&by_tcp));
        assert!(!left(&format!("over_tcp = true\n{by_tcp}")));
        assert_eq!(hosts.others.len(), 1);
        assert_eq!(hosts.sleepers_hold, Duration::ZERO);
        let minute = format!("sleepers_hold_seconds = 60\n{text}");
        assert_eq!(Hosts::parse(&minute).unwrap().sleepers_hold, Duration::from_secs(60));
        // A host that only waits to be named by others.
        assert!(Hosts::parse("listen = \"tcp://10.0.0.1:1\"").unwrap().others.is_empty());
    }

    #[test]
    fn what_is_no_list_of_hosts_is_refused() {
        let one = "[[hosts]]\naddresses = [\"10.0.0.2\"]\nrelay = \"tcp://10.0.0.2:1\"\n";
        let listen = "listen = \"tcp://10.0.0.1:1\"\n";
        for wrong in [
            one.to_owned(),
            format!("listen = \"10.0.0.1\"\n{one}"),
            format!("listen = \"://1\"\n{one}"),
            format!("{listen}{one}{one}"),
            format!("{listen}[[hosts]]\naddresses = []\nrelay = \"tcp://a:1\""),
            format!("{listen}[[hosts]]\naddresses = [\"a\"]\nrelay = \"tcp://a:1\""),
            format!("{listen}[[hosts]]\naddresses = [\"10.0.0.2\"]"),
            format!("{listen}{one}port = 5\n"),
            format!("{listen}sleepers_hold_seconds = 3601\n{one}"),
            format!("{listen}sleepers_hold_seconds = -1\n{one}"),
        ] {
            assert!(Hosts::parse(&wrong).is_err(), "{wrong}");
        }
    }
}
