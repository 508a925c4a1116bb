//! How a peer reaches a queue pair: the connection data of this provider.
//!
//! ```text
//!  0 "BLVB"  4 version u8 = 1   5 link u8 (1 InfiniBand, 2 Ethernet)   6 lid u16
//!  8 path MTU code u8   9 reads taken u8   10 reads made u8   11 address family u8 (4, 6)
//! 12 receiver-not-ready timer code u8   13 zero   14 link port u16
//! 16 device's queue pair number u32   20 own number u32   24 first packet number u32
//! 28 GID, 16 bytes   44 link address, 16 bytes   60 nonce, 16 bytes   76 crc32c u32
//! ```
//!
//! little endian, 80 bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use beeline_fabric::fields::array;
use beeline_fabric::{ConnectInfo, FabricError};

use crate::abi::{Gid, LINK_ETHERNET, LINK_INFINIBAND};

const MAGIC: &[u8; 4] = b"BLVB";
const VERSION: u8 = 1;
const BYTES: usize = 80;

/// Names one queue pair for ever; who knows it was given the connection data.
pub(crate) type Nonce = [u8; 16];

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// [`LINK_INFINIBAND`] or [`LINK_ETHERNET`].
    pub(crate) link_layer: u8,
    pub(crate) lid: u16,
    pub(crate) gid: Gid,
    /// 1 to 5.
    pub(crate) mtu: u8,
    /// Reads and atomics it can answer at a time.
    pub(crate) reads_taken: u8,
    /// Reads and atomics it will have outstanding.
    pub(crate) reads_made: u8,
    /// The timer its peer shall send in refusals for want of a receive.
    pub(crate) rnr_timer: u8,
    /// The device's number.
    pub(crate) hardware_number: u32,
    /// Our number.
    pub(crate) number: u32,
    pub(crate) packet_number: u32,
    /// Where its device's link socket listens.
    pub(crate) link: SocketAddr,
    pub(crate) nonce: Nonce,
}

impl Endpoint {
    pub(crate) fn encode(&self) -> ConnectInfo {
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.link_layer;
        bytes[6..8].copy_from_slice(&self.lid.to_le_bytes());
        bytes[8] = self.mtu;
        bytes[9] = self.reads_taken;
        bytes[10] = self.reads_made;
        bytes[12] = self.rnr_timer;
        bytes[14..16].copy_from_slice(&self.link.port().to_le_bytes());
        bytes[16..20].copy_from_slice(&self.hardware_number.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.packet_number.to_le_bytes());
        bytes[28..44].copy_from_slice(&self.gid.0);
        match self.link.ip() {
            IpAddr::V4(ip) => {
                bytes[11] = 4;
                bytes[44..48].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes[11] = 6;
                bytes[44..60].copy_from_slice(&ip.octets());
            }
        }
        bytes[60..76].copy_from_slice(&self.nonce);
        let sum = crc32c::crc32c(&bytes[..76]);
        bytes[76..].copy_from_slice(&sum.to_le_bytes());
        ConnectInfo(bytes.to_vec())
    }

    /// Errors: [`FabricError::BadConnectInfo`].
    pub(crate) fn decode(info: &ConnectInfo) -> Result<Self, FabricError> {
        let bad = |reason| FabricError::BadConnectInfo { reason };
        let bytes: &[u8; BYTES] =
            info.0.as_slice().try_into().map_err(|_| bad("its length is not this provider's"))?;
        if bytes[..4] != *MAGIC {
            return Err(bad("it is of another provider"));
        }
        if bytes[4] != VERSION {
            return Err(bad("its version is unknown"));
        }
        if u32::from_le_bytes(array(bytes, 76)) != crc32c::crc32c(&bytes[..76]) {
            return Err(bad("its checksum does not match"));
        }
        let ip = match bytes[11] {
            4 => IpAddr::V4(Ipv4Addr::from(array::<4>(bytes, 44))),
            6 => IpAddr::V6(Ipv6Addr::from(array::<16>(bytes, 44))),
            _ => return Err(bad("its address family is unknown")),
        };
        let end = Self {
            link_layer: bytes[5],
            lid: u16::from_le_bytes(array(bytes, 6)),
            gid: Gid(array(bytes, 28)),
            mtu: bytes[8],
            reads_taken: bytes[9],
            reads_made: bytes[10],
            rnr_timer: bytes[12],
            hardware_number: u32::from_le_bytes(array(bytes, 16)),
            number: u32::from_le_bytes(array(bytes, 20)),
            packet_number: u32::from_le_bytes(array(bytes, 24)),
            link: SocketAddr::new(ip, u16::from_le_bytes(array(bytes, 14))),
            nonce: array(bytes, 60),
        };
        let sound = matches!(end.link_layer, LINK_INFINIBAND | LINK_ETHERNET)
            && (1..=5).contains(&end.mtu)
            && end.rnr_timer < 32
            && end.hardware_number < 1 << 24
            && end.packet_number < 1 << 24
            && end.link.port() != 0;
        if sound { Ok(end) } else { Err(bad("a field is out of its range")) }
    }
}

/// `info` with `host` as the link's address, where it names none (an unspecified address): the
/// bootstrap exchange knows where it reached the peer. Data of other providers comes back as it
/// is.
#[must_use]
pub fn with_host(info: &ConnectInfo, host: IpAddr) -> ConnectInfo {
    match Endpoint::decode(info) {
        Ok(mut end) if end.link.ip().is_unspecified() => {
            end.link.set_ip(host);
            end.encode()
        }
        _ => info.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn end(link: SocketAddr) -> Endpoint {
        Endpoint {
            link_layer: LINK_ETHERNET,
            lid: 7,
            gid: Gid([3; 16]),
            mtu: 3,
            reads_taken: 16,
            reads_made: 8,
            rnr_timer: 13,
            hardware_number: 17,
            number: 4,
            packet_number: 0xab_cdef,
            link,
            nonce: [9; 16],
        }
    }

    #[test]
    fn data_comes_back_as_it_went() {
        for link in ["10.9.0.1:4000", "[fe80::1]:1"] {
            let end = end(link.parse().unwrap());
            assert_eq!(Endpoint::decode(&end.encode()).unwrap(), end);
        }
    }

    #[test]
    fn only_an_unspecified_host_is_filled_in() {
        let host: IpAddr = "10.0.0.9".parse().unwrap();
        let open = end("0.0.0.0:77".parse().unwrap()).encode();
        assert_eq!(Endpoint::decode(&with_host(&open, host)).unwrap().link.ip(), host);
        let named = end("10.1.1.1:77".parse().unwrap()).encode();
        assert_eq!(with_host(&named, host), named);
        let other = ConnectInfo(vec![1, 2, 3]);
        assert_eq!(with_host(&other, host), other);
    }

    proptest! {
        #[test]
        fn any_one_flipped_bit_is_seen(bit in 0..BYTES * 8) {
            let mut info = end("10.9.0.1:4000".parse().unwrap()).encode();
            info.0[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Endpoint::decode(&info).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Endpoint::decode(&ConnectInfo(bytes));
        }
    }
}
