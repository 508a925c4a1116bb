//! Records between a program's library and the monitor of its host's proxy.
//!
//! `SOCK_SEQPACKET`, abstract name: the monitor of the rings' with `-proxy` behind it. One question
//! and its answers for each Unix connection. Eight bytes of head: `BLNM`, the version, kind, two
//! zeros; then words of eight bytes.
//!
//! | question | words | descriptors | answers |
//! | --- | --- | --- | --- |
//! | 1 hello | | | 1 page |
//! | 2 connect | address 3, own address 3 (zeros: any), priority | | 2 channel, 3 kernel |
//! | 3 listen | address 3, inode of the socket | | 4 done |
//! | 4 claim | | what `accept` gave | 2 channel, 3 kernel |
//! | 5 resume | | a placeholder | 2 channel, 3 kernel |
//! | 6 status | | | 5 line, as many as there are, then 4 done |
//! | 7 extent | bytes | a placeholder | 6 extent, 3 kernel |
//! | 8 arrivals | | a placeholder | 6 extent, 3 kernel |
//!
//! | answer | content | descriptors |
//! | --- | --- | --- |
//! | 1 page | | the page, for reading |
//! | 2 channel | | memory, placeholder (not for resume) |
//! | 3 kernel | an error 8; 0: the kernel's connection is right | |
//! | 4 done | | |
//! | 5 line | text | |
//! | 6 extent | | memory: to be written (7), or for reading (8) |

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::channel::VERSION;

const MAGIC: [u8; 4] = *b"BLNM";
const HEAD_BYTES: usize = 8;
/// Most bytes of a record.
pub const LONGEST: usize = 512;

/// What a library, or the command, asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Where do you lead?
    Hello,
    /// Connect to this address.
    Connect {
        /// Where to.
        to: SocketAddr,
        /// What the socket is bound to.
        own: Option<SocketAddr>,
        /// 0: the highest.
        priority: u8,
    },
    /// A socket listens at this address.
    Listen {
        /// As the kernel tells it.
        at: SocketAddr,
        /// The socket's.
        inode: u64,
    },
    /// Whose connection is the one that `accept` gave?
    Claim,
    /// Whose placeholder is this?
    Resume,
    /// How are you?
    Status,
    /// Memory of the other host, for this connection's program to write.
    Extent {
        /// How much.
        bytes: u64,
    },
    /// The memory of this host that the other end's program writes.
    Arrivals,
}

/// What the monitor answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The page comes along.
    Page,
    /// The memory comes along, and the placeholder.
    Channel,
    /// Stay with the kernel, or fail so.
    Kernel {
        /// 0: the kernel's connection is right.
        error: i32,
    },
    /// That was all.
    Done,
    /// A line of the status.
    Line(String),
    /// The memory comes along.
    Extent,
}

/// Why a record was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRecord {
    /// It is none.
    #[error("a record of {length} bytes is none of version {VERSION}")]
    Form {
        /// Its length.
        length: usize,
    },
    /// The library and the proxy are not of one version.
    #[error("a record of version {found}, where this is version {VERSION}")]
    OtherVersion {
        /// The one that it says.
        found: u8,
    },
}

fn head(kind: u8) -> Vec<u8> {
    let [a, b, c, d] = MAGIC;
    vec![a, b, c, d, VERSION, kind, 0, 0]
}

fn parts(record: &[u8]) -> Result<(u8, &[u8]), BadRecord> {
    let bad = BadRecord::Form { length: record.len() };
    let (head, body) = record.split_at_checked(HEAD_BYTES).ok_or(bad)?;
    match head[4] {
        _ if head[..4] != MAGIC => Err(bad),
        VERSION => Ok((head[5], body)),
        found => Err(BadRecord::OtherVersion { found }),
    }
}

/// An address as three words; zeros for none.
#[must_use]
pub fn address_words(address: Option<SocketAddr>) -> [u64; 3] {
    let Some(address) = address else { return [0; 3] };
    let (family, host) = match address.ip() {
        IpAddr::V4(host) => (4_u64, u128::from(host.to_bits())),
        IpAddr::V6(host) => (6, host.to_bits()),
    };
    [
        family | u64::from(address.port()) << 16,
        (host & u128::from(u64::MAX)) as u64,
        (host >> 64) as u64,
    ]
}

/// An address from its words.
#[must_use]
pub fn address_of([first, low, high]: [u64; 3]) -> Option<SocketAddr> {
    let port = (first >> 16 & 0xffff) as u16;
    let host = u128::from(low) | u128::from(high) << 64;
    let host = match first & 0xffff {
        4 => IpAddr::V4(u32::try_from(host).ok()?.into()),
        6 => IpAddr::V6(Ipv6Addr::from_bits(host)),
        _ => return None,
    };
    Some(SocketAddr::new(host, port))
}

fn words<const N: usize>(body: &[u8]) -> Option<[u64; N]> {
    let (words, []) = body.as_chunks::<8>() else { return None };
    let words: &[[u8; 8]; N] = words.try_into().ok()?;
    Some(words.map(u64::from_le_bytes))
}

impl Question {
    /// As bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let (kind, words) = match self {
            Self::Hello => (1, Vec::new()),
            Self::Connect { to, own, priority } => {
                let words = [address_words(Some(to)), address_words(own)].concat();
                (2, [&words[..], &[u64::from(priority)]].concat())
            }
            Self::Listen { at, inode } => (3, [&address_words(Some(at))[..], &[inode]].concat()),
            Self::Claim => (4, Vec::new()),
            Self::Resume => (5, Vec::new()),
            Self::Status => (6, Vec::new()),
            Self::Extent { bytes } => (7, vec![bytes]),
            Self::Arrivals => (8, Vec::new()),
        };
        let mut record = head(kind);
        record.extend(words.into_iter().flat_map(u64::to_le_bytes));
        record
    }

    /// From bytes.
    ///
    /// Errors: [`BadRecord`].
    pub fn decode(record: &[u8]) -> Result<Self, BadRecord> {
        let bad = BadRecord::Form { length: record.len() };
        match parts(record)? {
            (1, []) => Ok(Self::Hello),
            (2, body) => {
                let [a, b, c, d, e, f, priority] = words(body).ok_or(bad)?;
                let to = address_of([a, b, c]).ok_or(bad)?;
                let own = address_of([d, e, f]);
                let priority = u8::try_from(priority).map_err(|_| bad)?;
                Ok(Self::Connect { to, own, priority })
            }
            (3, body) => {
                let [a, b, c, inode] = words(body).ok_or(bad)?;
                Ok(Self::Listen { at: address_of([a, b, c]).ok_or(bad)?, inode })
            }
            (4, []) => Ok(Self::Claim),
            (5, []) => Ok(Self::Resume),
            (6, []) => Ok(Self::Status),
            (7, body) => {
                let [bytes] = words(body).ok_or(bad)?;
                Ok(Self::Extent { bytes })
            }
            (8, []) => Ok(Self::Arrivals),
            _ => Err(bad),
        }
    }
}

impl Answer {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Page => head(1),
            Self::Channel => head(2),
            Self::Kernel { error } => {
                let mut record = head(3);
                record.extend(i64::from(*error).to_le_bytes());
                record
            }
            Self::Done => head(4),
            Self::Extent => head(6),
            Self::Line(text) => {
                let mut record = head(5);
                record.extend(text.bytes().take(LONGEST - HEAD_BYTES));
                record
            }
        }
    }

    /// From bytes.
    ///
    /// Errors: [`BadRecord`].
    pub fn decode(record: &[u8]) -> Result<Self, BadRecord> {
        let bad = BadRecord::Form { length: record.len() };
        match parts(record)? {
            (1, []) => Ok(Self::Page),
            (2, []) => Ok(Self::Channel),
            (3, body) => {
                let [error] = words(body).ok_or(bad)?;
                Ok(Self::Kernel { error: i32::try_from(error).map_err(|_| bad)? })
            }
            (4, []) => Ok(Self::Done),
            (5, text) => Ok(Self::Line(String::from_utf8_lossy(text).into_owned())),
            (6, []) => Ok(Self::Extent),
            _ => Err(bad),
        }
    }
}

/// The name under which the proxy's monitor of this user listens.
#[must_use]
pub fn name() -> String {
    format!("{}-proxy", crate::control::name())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back_as_they_were(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            for kind in 0..10 {
                let record = [&head(kind), &bytes[..]].concat();
                if let Ok(question) = Question::decode(&record) {
                    prop_assert_eq!(Question::decode(&question.encode()), Ok(question));
                }
                if let Ok(answer) = Answer::decode(&record) {
                    prop_assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
                }
            }
            let _ = Question::decode(&bytes);
        }
    }

    #[test]
    fn a_record_of_another_version_is_refused_by_its_version() {
        let mut record = Question::Hello.encode();
        record[4] = VERSION - 1;
        let refused = Err(BadRecord::OtherVersion { found: VERSION - 1 });
        assert_eq!(Question::decode(&record), refused);
        assert_eq!(Answer::decode(&record).map(|_| Question::Hello), refused);
        record[0] = 0;
        assert_eq!(Question::decode(&record), Err(BadRecord::Form { length: 8 }));
    }

    #[test]
    fn every_record_comes_back_as_it_was() {
        let at: SocketAddr = "10.0.0.1:6379".parse().unwrap();
        let other: SocketAddr = "[fd00::1]:1".parse().unwrap();
        for question in [
            Question::Hello,
            Question::Connect { to: at, own: None, priority: 7 },
            Question::Connect { to: other, own: Some(at), priority: 0 },
            Question::Listen { at, inode: u64::MAX },
            Question::Claim,
            Question::Resume,
            Question::Status,
            Question::Extent { bytes: 1 << 20 },
            Question::Arrivals,
        ] {
            assert_eq!(Question::decode(&question.encode()), Ok(question));
        }
        for answer in [
            Answer::Page,
            Answer::Channel,
            Answer::Kernel { error: 111 },
            Answer::Done,
            Answer::Line("partitions 2".to_owned()),
            Answer::Extent,
        ] {
            assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
        }
    }
}
