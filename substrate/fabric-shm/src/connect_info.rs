//! Connection data: what the bootstrap exchange carries for this provider. 96 bytes, little
//! endian; read as hostile.
//!
//! ```text
//! 0  magic "BSHM"   4  version u16   6  flags u16 (bit 0: asymmetric fences, bit 1: within a process)
//! 8  boot id 16     24 network namespace u64      32 socket name 16
//! 48 qp number u32  52 slots u32  56 lengths u32  60 payload bytes u32
//! 64 nonce 16       80 reserved, zero
//! ```

use beeline_fabric::fields::array;
use beeline_fabric::{ConnectInfo, FabricError};

use crate::object::Geometry;

const MAGIC: [u8; 4] = *b"BSHM";
const VERSION: u16 = 5;
const LENGTH: usize = 96;
const ASYMMETRIC: u16 = 1;
const IN_PROCESS: u16 = 2;

/// Sixteen unguessable bytes.
pub(crate) type Nonce = [u8; 16];

/// Which kernel and which set of abstract socket names a process sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    boot_id: [u8; 16],
    network_namespace: u64,
}

impl Host {
    /// The one this process runs on.
    pub(crate) fn this() -> std::io::Result<Self> {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let mut boot_id = [0; 16];
        let digits = text.bytes().filter_map(|byte| char::from(byte).to_digit(16));
        for (place, digit) in digits.take(32).enumerate() {
            boot_id[place / 2] = boot_id[place / 2] << 4 | u8::try_from(digit).unwrap_or(0);
        }
        let namespace = rustix::fs::stat("/proc/self/ns/net")?;
        Ok(Self { boot_id, network_namespace: namespace.st_ino })
    }
}

/// Decoded connection data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub host: Host,
    pub socket: [u8; 16],
    pub qp_num: u32,
    pub geometry: Geometry,
    pub nonce: Nonce,
    /// The peer arms with `membarrier` and is registered for ours.
    pub asymmetric: bool,
    /// The peer's device serves its own process only.
    pub in_process: bool,
}

impl PeerInfo {
    pub(crate) fn encode(&self) -> ConnectInfo {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        let within = if self.in_process { IN_PROCESS } else { 0 };
        let flags = (u16::from(self.asymmetric) * ASYMMETRIC) | within;
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&self.host.boot_id);
        bytes.extend_from_slice(&self.host.network_namespace.to_le_bytes());
        bytes.extend_from_slice(&self.socket);
        for word in
            [self.qp_num, self.geometry.slots, self.geometry.lengths, self.geometry.payload_bytes]
        {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&self.nonce);
        bytes.resize(LENGTH, 0);
        ConnectInfo(bytes)
    }

    /// Errors: [`FabricError::BadConnectInfo`] with what is wrong.
    pub(crate) fn decode(info: &ConnectInfo) -> Result<Self, FabricError> {
        let refuse = |reason| FabricError::BadConnectInfo { reason };
        let bytes: &[u8; LENGTH] =
            info.0.as_slice().try_into().map_err(|_| refuse("it is not 96 bytes long"))?;
        if array::<4>(bytes, 0) != MAGIC {
            return Err(refuse("it is not for the shm provider"));
        }
        if u16::from_le_bytes(array(bytes, 4)) != VERSION {
            return Err(refuse("its version is unknown"));
        }
        let word = |at| u32::from_le_bytes(array(bytes, at));
        let geometry = Geometry { slots: word(52), lengths: word(56), payload_bytes: word(60) };
        if !geometry.is_valid() {
            return Err(refuse("its ring geometry is out of range"));
        }
        if array::<16>(bytes, 80) != [0; 16] {
            return Err(refuse("its reserved bytes are not zero"));
        }
        Ok(Self {
            host: Host {
                boot_id: array(bytes, 8),
                network_namespace: u64::from_le_bytes(array(bytes, 24)),
            },
            socket: array(bytes, 32),
            qp_num: word(48),
            geometry,
            nonce: array(bytes, 64),
            asymmetric: u16::from_le_bytes(array(bytes, 6)) & ASYMMETRIC != 0,
            in_process: u16::from_le_bytes(array(bytes, 6)) & IN_PROCESS != 0,
        })
    }
}

/// Unguessable bytes.
///
/// Errors: [`FabricError::System`].
pub(crate) fn random<const N: usize>() -> Result<[u8; N], FabricError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| FabricError::System {
        action: "drawing random bytes",
        source: std::io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(0)),
    })?;
    Ok(bytes)
}

/// Abstract socket name for `socket`.
pub(crate) fn socket_name(socket: &[u8; 16]) -> Vec<u8> {
    let mut name = b"beeline-shm-".to_vec();
    for byte in socket {
        for nibble in [byte >> 4, byte & 15] {
            name.push(b"0123456789abcdef"[usize::from(nibble)]);
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> PeerInfo {
        PeerInfo {
            host: Host::this().unwrap(),
            socket: [7; 16],
            qp_num: 9,
            geometry: Geometry { slots: 64, lengths: 128, payload_bytes: 1 << 18 },
            nonce: [3; 16],
            asymmetric: true,
            in_process: false,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(PeerInfo::decode(&example().encode()).unwrap(), example());
    }

    proptest! {
        #[test]
        fn damaged_connection_data_is_refused_or_well_formed(at in 0..LENGTH, value: u8, cut in 0..=LENGTH) {
            let mut info = example().encode();
            info.0[at] = value;
            if let Ok(decoded) = PeerInfo::decode(&info) {
                prop_assert!(decoded.geometry.is_valid());
            }
            info.0.truncate(cut);
            prop_assert_eq!(PeerInfo::decode(&info).is_ok(), cut == LENGTH && PeerInfo::decode(&info).is_ok());
        }

        #[test]
        fn random_bytes_never_break_the_decoder(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = PeerInfo::decode(&ConnectInfo(bytes));
        }
    }
}
