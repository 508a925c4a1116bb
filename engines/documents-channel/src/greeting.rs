//! What both ends tell each other over the bootstrap exchange, and what follows from it: RMongo's
//! Algorithm 1, context detection.
//!
//! All numbers are little-endian; addresses are IPv6, IPv4 as mapped ones.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | "BLDC" |
//! | 4 | 2 | version, 1 |
//! | 6 | 2 | flags: bit 0 `is_rdma`, bit 1 validation mode |
//! | 8 | 2 | slots of the sender's ring |
//! | 10 | 1 | port of the device |
//! | 11 | 1 | index of its address (GID) |
//! | 12 | 16 | IP address |
//! | 28 | 8 | remote key of the sender's region |
//! | 36 | 8 | bytes of that region; the ring is at its start |
//! | 44 | 2 | port where the MongoDB wire is spoken; 0: nowhere |
//! | 46 | 16 | its address |
//! | 62 | 1 | bytes of the device's name |
//! | 63 | | name of the device, UTF-8 |
//! | | 2 | bytes of the reason |
//! | | | why the sender does not offer the channel, UTF-8 |
//! | | 4 | CRC-32C of all before |
//!
//! Queue pair numbers, addresses and MTU travel beside it in the provider's connect data.
//!
//! Source: spec/rmongo.md 3.1.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use beeline_wire::crc32c;

const MAGIC: &[u8; 4] = b"BLDC";
/// The version of all formats of the channel.
pub const VERSION: u16 = 1;
const FIXED: usize = 63;
const LONGEST_REASON: usize = 1024;

/// The device that an end would use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RnicInfo {
    /// Its name; at most 255 bytes.
    pub dev_name: String,
    /// The active port; 0 where a device has none.
    pub ib_port: u8,
    /// Index of the address in the port's table.
    pub gid_idx: u8,
    /// The address.
    pub ip: IpAddr,
}

impl RnicInfo {
    /// A device without ports and addresses of its own, such as shared memory.
    #[must_use]
    pub fn named(dev_name: &str) -> Self {
        let ip = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        Self { dev_name: dev_name.to_owned(), ib_port: 0, gid_idx: 0, ip }
    }
}

/// One end's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The end offers the channel.
    pub is_rdma: bool,
    /// Replies carry checksums.
    pub checksum: bool,
    /// Slots of its ring.
    pub slots: u16,
    /// Its device.
    pub rnic: RnicInfo,
    /// Its region.
    pub region_key: u64,
    /// Bytes of it.
    pub region_bytes: u64,
    /// Where the MongoDB wire is spoken.
    pub wire: Option<SocketAddr>,
    /// Why it does not offer the channel.
    pub reason: String,
}

/// Why some bytes are no greeting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GreetingError {
    /// Not this format.
    #[error("the peer does not speak the channel of the document store")]
    Magic,
    /// Of another build.
    #[error("version {0} of the document channel, where this side speaks {VERSION}; use one build")]
    Version(u16),
    /// Cut, or changed on the way.
    #[error("the greeting of the document channel is damaged: {0}")]
    Damaged(&'static str),
}

fn ip_bytes(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn ip_of(bytes: [u8; 16]) -> IpAddr {
    let ip = Ipv6Addr::from(bytes);
    ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
}

/// The longest beginning of `text` of at most `most` bytes.
fn cut(text: &str, most: usize) -> &str {
    let end = (0..=text.len().min(most)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

impl Greeting {
    /// An end that does not offer the channel, and why.
    #[must_use]
    pub fn without(rnic: RnicInfo, wire: Option<SocketAddr>, reason: impl Into<String>) -> Self {
        Self {
            is_rdma: false,
            checksum: false,
            slots: 0,
            rnic,
            region_key: 0,
            region_bytes: 0,
            wire,
            reason: reason.into(),
        }
    }

    /// For the exchange. Too long a name or reason is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        let flags = u16::from(self.is_rdma) | u16::from(self.checksum) << 1;
        bytes.extend(flags.to_le_bytes());
        bytes.extend(self.slots.to_le_bytes());
        bytes.extend([self.rnic.ib_port, self.rnic.gid_idx]);
        bytes.extend(ip_bytes(self.rnic.ip));
        bytes.extend(self.region_key.to_le_bytes());
        bytes.extend(self.region_bytes.to_le_bytes());
        bytes.extend(self.wire.map_or(0, |wire| wire.port()).to_le_bytes());
        let unspecified = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        bytes.extend(ip_bytes(self.wire.map_or(unspecified, |wire| wire.ip())));
        let name = cut(&self.rnic.dev_name, 255);
        bytes.push(name.len() as u8);
        bytes.extend(name.as_bytes());
        let reason = cut(&self.reason, LONGEST_REASON);
        bytes.extend((reason.len() as u16).to_le_bytes());
        bytes.extend(reason.as_bytes());
        bytes.extend(crc32c(&bytes).to_le_bytes());
        bytes
    }

    /// Of what came.
    ///
    /// Errors: [`GreetingError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, GreetingError> {
        let damaged = GreetingError::Damaged;
        let Some((head, _)) = bytes.split_first_chunk::<6>() else {
            return Err(GreetingError::Magic);
        };
        if &head[..4] != MAGIC {
            return Err(GreetingError::Magic);
        }
        let version = u16::from_le_bytes([head[4], head[5]]);
        if version != VERSION {
            return Err(GreetingError::Version(version));
        }
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or(damaged("it is cut short"))?;
        if crc32c(body) != u32::from_le_bytes(*checksum) {
            return Err(damaged("its checksum is wrong"));
        }
        let short = || damaged("it is cut short");
        if body.len() < FIXED {
            return Err(short());
        }
        let flags = u16::from_le_bytes(at(body, 6));
        if flags > 3 {
            return Err(damaged("it has flags of another build"));
        }
        let name_end = FIXED + usize::from(body[62]);
        let name = text(body.get(FIXED..name_end).ok_or_else(short)?)?;
        let rest = body.get(name_end..).ok_or_else(short)?;
        let (length, reason) = rest.split_first_chunk::<2>().ok_or_else(short)?;
        if usize::from(u16::from_le_bytes(*length)) != reason.len() {
            return Err(short());
        }
        let port = u16::from_le_bytes(at(body, 44));
        Ok(Self {
            is_rdma: flags & 1 != 0,
            checksum: flags & 2 != 0,
            slots: u16::from_le_bytes(at(body, 8)),
            rnic: RnicInfo {
                dev_name: name,
                ib_port: body[10],
                gid_idx: body[11],
                ip: ip_of(at(body, 12)),
            },
            region_key: u64::from_le_bytes(at(body, 28)),
            region_bytes: u64::from_le_bytes(at(body, 36)),
            wire: (port != 0).then(|| SocketAddr::new(ip_of(at(body, 46)), port)),
            reason: text(reason)?,
        })
    }
}

fn at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn text(bytes: &[u8]) -> Result<String, GreetingError> {
    String::from_utf8(bytes.to_vec()).map_err(|_| GreetingError::Damaged("a text is no UTF-8"))
}

/// What two greetings lead to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detected {
    /// The channel carries the commands; the peer's device.
    Rdma(RnicInfo),
    /// TCP carries them; why.
    Tcp(String),
}

/// Algorithm 1: both ends call it with the same two greetings, and both come to the same outcome.
#[must_use]
pub fn detect(local: &Greeting, remote: &Greeting) -> Detected {
    match (local.is_rdma, remote.is_rdma) {
        (true, true) => Detected::Rdma(remote.rnic.clone()),
        (false, _) => Detected::Tcp(format!("this end has is_rdma off: {}", local.reason)),
        (true, false) => Detected::Tcp(format!("the peer has is_rdma off: {}", remote.reason)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn greeting(is_rdma: bool) -> Greeting {
        Greeting {
            is_rdma,
            checksum: true,
            slots: 16,
            rnic: RnicInfo {
                dev_name: "rxe0".to_owned(),
                ib_port: 1,
                gid_idx: 3,
                ip: "192.168.2.3".parse().unwrap(),
            },
            region_key: 0x0102_0304_0506_0708,
            region_bytes: 1 << 20,
            wire: Some("127.0.0.1:27017".parse().unwrap()),
            reason: "is_rdma = off".to_owned(),
        }
    }

    #[test]
    fn only_two_ends_that_both_want_it_use_rdma_and_both_know() {
        for local in [false, true] {
            for remote in [false, true] {
                let (one, other) = (greeting(local), greeting(remote));
                let here = detect(&one, &Greeting::decode(&other.encode()).unwrap());
                let there = detect(&other, &Greeting::decode(&one.encode()).unwrap());
                let expected = local && remote;
                assert_eq!(matches!(here, Detected::Rdma(_)), expected, "{local} {remote}");
                assert_eq!(matches!(there, Detected::Rdma(_)), expected, "{local} {remote}");
            }
        }
        assert_eq!(detect(&greeting(true), &greeting(true)), Detected::Rdma(greeting(true).rnic));
    }

    #[test]
    fn a_greeting_has_these_bytes() {
        let bytes = greeting(true).encode();
        assert_eq!(&bytes[..12], b"BLDC\x01\0\x03\0\x10\0\x01\x03");
        assert_eq!(&bytes[12..28], &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 192, 168, 2, 3]);
        assert_eq!(&bytes[28..44], &[8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 16, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[44..46], &27017_u16.to_le_bytes());
        assert_eq!(&bytes[62..69], b"\x04rxe0\x0d\0");
        assert_eq!(Greeting::decode(&bytes), Ok(greeting(true)));
        let without = Greeting::without(RnicInfo::named("shm"), None, "é".repeat(2000));
        let read = Greeting::decode(&without.encode()).unwrap();
        assert_eq!(read.reason, "é".repeat(512));
        assert_eq!((read.wire, read.is_rdma), (None, false));
    }

    #[test]
    fn another_version_says_so_and_every_change_is_found() {
        let bytes = greeting(true).encode();
        let mut other = bytes.clone();
        other[4] = 9;
        assert_eq!(Greeting::decode(&other), Err(GreetingError::Version(9)));
        for at in 0..bytes.len() {
            assert!(Greeting::decode(&bytes[..at]).is_err());
            let mut changed = bytes.clone();
            changed[at] ^= 0x40;
            assert!(Greeting::decode(&changed).is_err(), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Greeting::decode(&bytes);
            let mut sealed = b"BLDC\x01\0".to_vec();
            sealed.extend(&bytes);
            sealed.extend(crc32c(&sealed).to_le_bytes());
            if let Ok(read) = Greeting::decode(&sealed) {
                prop_assert_eq!(Greeting::decode(&read.encode()), Ok(read));
            }
        }
    }
}
