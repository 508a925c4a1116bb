//! How a queue pair of this provider is named: [`Endpoint`], its [`ConnectInfo`] (64 bytes).
//!
//! ```text
//!  0 "BNTB"   4 version u8 = 1   5 zero [3]
//!  8 node [16]   24 key [16]   40 qp_num u32   44 nonce [16]   60 crc32c u32 of bytes 0..60
//! ```
//!
//! The key is what a cable to the emulation of that node is plugged in with; it is zero for a
//! device over a fixed window.

use beeline_fabric::fields::array;
use beeline_fabric::{ConnectInfo, FabricError};
use beeline_fabric_engine::handshake::Nonce;

use crate::link::NodeName;

const BYTES: usize = 64;
const MAGIC: &[u8; 4] = b"BNTB";
const VERSION: u8 = 1;

/// Where a queue pair is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) node: NodeName,
    /// Shows that the caller took part in the bootstrap exchange.
    pub(crate) key: Nonce,
    pub(crate) qp_num: u32,
    pub(crate) nonce: Nonce,
}

impl Endpoint {
    pub(crate) fn encode(&self) -> ConnectInfo {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&[VERSION, 0, 0, 0]);
        bytes.extend_from_slice(&self.node);
        bytes.extend_from_slice(&self.key);
        bytes.extend_from_slice(&self.qp_num.to_le_bytes());
        bytes.extend_from_slice(&self.nonce);
        let checksum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        ConnectInfo(bytes)
    }

    /// Reads a peer's bytes.
    ///
    /// Errors: [`FabricError::BadConnectInfo`].
    pub(crate) fn decode(info: &ConnectInfo) -> Result<Self, FabricError> {
        let bad = |reason| FabricError::BadConnectInfo { reason };
        let bytes = info.0.as_slice();
        if bytes.len() != BYTES {
            return Err(bad("not the length of ntb's"));
        }
        if &bytes[..4] != MAGIC {
            return Err(bad("not ntb's"));
        }
        if bytes[4..8] != [VERSION, 0, 0, 0] {
            return Err(bad("unknown version"));
        }
        if crc32c::crc32c(&bytes[..60]) != u32::from_le_bytes(array(bytes, 60)) {
            return Err(bad("damaged"));
        }
        Ok(Self {
            node: array(bytes, 8),
            key: array(bytes, 24),
            qp_num: u32::from_le_bytes(array(bytes, 40)),
            nonce: array(bytes, 44),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_endpoint_survives_the_exchange_and_a_changed_one_is_refused(
            node in any::<[u8; 16]>(),
            key in any::<[u8; 16]>(),
            qp_num in any::<u32>(),
            nonce in any::<[u8; 16]>(),
            at in 0..BYTES,
            change in 1..=u8::MAX,
        ) {
            let endpoint = Endpoint { node, key, qp_num, nonce };
            let mut info = endpoint.encode();
            prop_assert_eq!(Endpoint::decode(&info).unwrap(), endpoint);
            info.0[at] ^= change;
            prop_assert!(Endpoint::decode(&info).is_err());
        }
    }
}
