//! What the two ends say before the first frame. Pure.
//!
//! [`Endpoint`] is the provider's [`ConnectInfo`] (48 bytes):
//!
//! ```text
//!  0 "BTCP"   4 version u8 = 1   5 family u8 (4 or 6)   6 port u16
//!  8 address [16] (IPv4 in the first four, rest zero)
//! 24 qp_num u32   28 nonce [16]   44 crc32c u32 of bytes 0..44
//! ```
//!
//! [`Greeting`] opens the connection (64 bytes): the dialling end names the queue pair it wants by
//! number and nonce and shows its own; the other end answers with the mirror image. The nonces are
//! random and travel only in the bootstrap exchange, so that whoever can show the right one took
//! part in it.
//!
//! ```text
//!  0 "BTCPHELO"   8 version u8 = 1   9 role u8 (1 hello, 2 welcome)   10 zero u16
//! 12 target qp_num u32   16 target nonce [16]
//! 32 source qp_num u32   36 source nonce [16]
//! 52 zero [8]            60 crc32c u32 of bytes 0..60
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use beeline_fabric::{ConnectInfo, FabricError};

/// Proof of having taken part in the bootstrap exchange.
pub type Nonce = [u8; 16];

/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 64;
const ENDPOINT_BYTES: usize = 48;
const VERSION: u8 = 1;

/// Where a queue pair is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The device's listener.
    pub address: SocketAddr,
    /// Number of the queue pair there.
    pub qp_num: u32,
    /// Its nonce.
    pub nonce: Nonce,
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(bytes);
    value
}

impl Endpoint {
    /// As opaque bytes for the bootstrap exchange.
    #[must_use]
    pub fn encode(&self) -> ConnectInfo {
        let mut bytes = Vec::with_capacity(ENDPOINT_BYTES);
        bytes.extend_from_slice(b"BTCP");
        bytes.push(VERSION);
        let mut address = [0; 16];
        match self.address.ip() {
            IpAddr::V4(ip) => {
                bytes.push(4);
                address[..4].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes.push(6);
                address = ip.octets();
            }
        }
        bytes.extend_from_slice(&self.address.port().to_le_bytes());
        bytes.extend_from_slice(&address);
        bytes.extend_from_slice(&self.qp_num.to_le_bytes());
        bytes.extend_from_slice(&self.nonce);
        let checksum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        ConnectInfo(bytes)
    }

    /// Reads a peer's bytes.
    ///
    /// Errors: [`FabricError::BadConnectInfo`].
    pub fn decode(info: &ConnectInfo) -> Result<Self, FabricError> {
        let bad = |reason| FabricError::BadConnectInfo { reason };
        let bytes = info.0.as_slice();
        if bytes.len() != ENDPOINT_BYTES {
            return Err(bad("not the length of tcp's"));
        }
        if &bytes[..4] != b"BTCP" {
            return Err(bad("not tcp's"));
        }
        if bytes[4] != VERSION {
            return Err(bad("unknown version"));
        }
        if crc32c::crc32c(&bytes[..44]) != u32::from_le_bytes(array(&bytes[44..48])) {
            return Err(bad("damaged"));
        }
        let ip = match bytes[5] {
            4 if bytes[12..24].iter().all(|byte| *byte == 0) => {
                IpAddr::V4(Ipv4Addr::from(array::<4>(&bytes[8..12])))
            }
            6 => IpAddr::V6(Ipv6Addr::from(array::<16>(&bytes[8..24]))),
            _ => return Err(bad("unknown address family")),
        };
        let port = u16::from_le_bytes(array(&bytes[6..8]));
        Ok(Self {
            address: SocketAddr::new(ip, port),
            qp_num: u32::from_le_bytes(array(&bytes[24..28])),
            nonce: array(&bytes[28..44]),
        })
    }
}

/// Puts `host` where the peer, bound to every address, could not know which one reaches it.
/// Other connect data is returned unchanged.
#[must_use]
pub fn with_host(info: &ConnectInfo, host: IpAddr) -> ConnectInfo {
    match Endpoint::decode(info) {
        Ok(mut endpoint) if endpoint.address.ip().is_unspecified() => {
            endpoint.address.set_ip(host);
            endpoint.encode()
        }
        _ => info.clone(),
    }
}

/// Which way a greeting goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GreetingRole {
    /// From the dialling end.
    Hello,
    /// The answer.
    Welcome,
}

/// First bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Which way.
    pub role: GreetingRole,
    /// The queue pair spoken to.
    pub target: (u32, Nonce),
    /// The queue pair speaking.
    pub source: (u32, Nonce),
}

impl Greeting {
    /// The bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(b"BTCPHELO");
        bytes[8] = VERSION;
        bytes[9] = match self.role {
            GreetingRole::Hello => 1,
            GreetingRole::Welcome => 2,
        };
        bytes[12..16].copy_from_slice(&self.target.0.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.target.1);
        bytes[32..36].copy_from_slice(&self.source.0.to_le_bytes());
        bytes[36..52].copy_from_slice(&self.source.1);
        let checksum = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads a peer's bytes; `None` when they are not exactly a greeting.
    #[must_use]
    pub fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Self> {
        let role = match bytes[9] {
            1 => GreetingRole::Hello,
            2 => GreetingRole::Welcome,
            _ => return None,
        };
        let greeting = Self {
            role,
            target: (u32::from_le_bytes(array(&bytes[12..16])), array(&bytes[16..32])),
            source: (u32::from_le_bytes(array(&bytes[32..36])), array(&bytes[36..52])),
        };
        (greeting.encode() == *bytes).then_some(greeting)
    }
}

/// Compares without telling, by its running time, how far two nonces agree.
#[must_use]
pub fn same_nonce(left: &Nonce, right: &Nonce) -> bool {
    left.iter().zip(right).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn endpoint() -> impl Strategy<Value = Endpoint> {
        (any::<SocketAddr>(), any::<u32>(), any::<Nonce>()).prop_map(|(address, qp_num, nonce)| {
            let address = SocketAddr::new(address.ip(), address.port());
            Endpoint { address, qp_num, nonce }
        })
    }

    proptest! {
        #[test]
        fn an_endpoint_survives_the_exchange(endpoint in endpoint()) {
            prop_assert_eq!(Endpoint::decode(&endpoint.encode()).unwrap(), endpoint);
        }

        #[test]
        fn a_changed_endpoint_is_refused(
            endpoint in endpoint(),
            at in 0..ENDPOINT_BYTES,
            change in 1..=u8::MAX,
        ) {
            let mut info = endpoint.encode();
            info.0[at] ^= change;
            prop_assert!(Endpoint::decode(&info).is_err());
        }

        #[test]
        fn arbitrary_connect_data_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = Endpoint::decode(&ConnectInfo(bytes));
        }

        #[test]
        fn a_changed_greeting_is_refused(
            target in any::<(u32, Nonce)>(),
            source in any::<(u32, Nonce)>(),
            at in 0..GREETING_BYTES,
            change in 1..=u8::MAX,
        ) {
            let greeting = Greeting { role: GreetingRole::Hello, target, source };
            let mut bytes = greeting.encode();
            prop_assert_eq!(Greeting::decode(&bytes), Some(greeting));
            bytes[at] ^= change;
            prop_assert_eq!(Greeting::decode(&bytes), None);
        }
    }
}
