//! How a queue pair of this provider is named: [`Endpoint`], its [`ConnectInfo`] (48 bytes).
//!
//! ```text
//!  0 "BTCP"   4 version u8 = 1   5 family u8 (4 or 6)   6 port u16
//!  8 address [16] (IPv4 in the first four, rest zero)
//! 24 qp_num u32   28 nonce [16]   44 crc32c u32 of bytes 0..44
//! ```
//!
//! What the ends then say to each other is the engine's: [`Greeting`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use beeline_fabric::fields::array;
use beeline_fabric::{ConnectInfo, FabricError};
pub use beeline_fabric_engine::handshake::{
    GREETING_BYTES, Greeting, GreetingRole, Identity, Nonce, same_nonce,
};

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
        if crc32c::crc32c(&bytes[..44]) != u32::from_le_bytes(array(bytes, 44)) {
            return Err(bad("damaged"));
        }
        let ip = match bytes[5] {
            4 if bytes[12..24].iter().all(|byte| *byte == 0) => {
                IpAddr::V4(Ipv4Addr::from(array::<4>(bytes, 8)))
            }
            6 => IpAddr::V6(Ipv6Addr::from(array::<16>(bytes, 8))),
            _ => return Err(bad("unknown address family")),
        };
        let port = u16::from_le_bytes(array(bytes, 6));
        Ok(Self {
            address: SocketAddr::new(ip, port),
            qp_num: u32::from_le_bytes(array(bytes, 24)),
            nonce: array(bytes, 28),
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
    }
}
