//! What two monitors say to each other, over TCP.
//!
//! ```text
//! 0  length of what follows u32   4  kind u8, three zeros
//! 8  words of eight bytes
//! ```
//!
//! | kind | words |
//! | --- | --- |
//! | 1 hello | magic and version; announcement 8 |
//! | 2 syn | the sender's number, priority, source address 3, destination address 3 |
//! | 3 syn-ack | the receiver's number, the sender's, partition |
//! | 4 refusal | the receiver's number, why |
//! | 5 established | the receiver's number |
//! | 6 gone | the receiver's number |
//! | 8 extent | the receiver's number, the sender's, bytes |
//! | 9 extent-is | the receiver's number, the extent's number; 0: there is none |
//! | 7 resume | the receiver's number, the sender's, partition, packets in the sender's queue, those consumed, life of the link |

use std::net::SocketAddr;

use beeline_ntb::Announcement;
use beeline_sockets::packets::protocol::{address_of, address_words};

use crate::waits::Position;

/// "BLNTM", two zeros and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"BLNTM\0\0\x03");
/// Bytes before the words.
const HEAD_BYTES: usize = 8;
/// Most bytes of a message.
pub const LONGEST: usize = HEAD_BYTES + 9 * 8;

/// Why a connection was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No program with the library listens there.
    NoListener,
    /// The backlog is full, or the listening socket refused the knock.
    NotTaken,
    /// The rules say no.
    Denied,
    /// The ports are in use.
    PortInUse,
    /// A quota is used up, or memory.
    NoRoom,
    /// The address is none of this host's.
    NotHere,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first of each.
    Hello {
        /// How the window is divided.
        announced: Announcement,
    },
    /// May this connection be?
    Syn {
        /// The sender's number of it.
        from: u64,
        /// 0: the highest.
        priority: u8,
        /// The connecting program's address.
        source: SocketAddr,
        /// The listening program's.
        destination: SocketAddr,
    },
    /// Yes.
    SynAck {
        /// The receiver's number of it.
        to: u64,
        /// The sender's.
        from: u64,
        /// Which partition carries it.
        partition: u8,
    },
    /// No.
    Refusal {
        /// The receiver's number of it.
        to: u64,
        /// Why.
        why: Refusal,
    },
    /// The program has it.
    Established {
        /// The receiver's number of it.
        to: u64,
    },
    /// The sender knows it no more.
    Gone {
        /// The receiver's number of it.
        to: u64,
    },
    /// The sender's program asks for memory of the receiver's host, to write itself.
    Extent {
        /// The receiver's number of the connection.
        to: u64,
        /// The sender's.
        from: u64,
        /// How much.
        bytes: u64,
    },
    /// The memory was handed over under this number.
    ExtentIs {
        /// The receiver's number of the connection.
        to: u64,
        /// By which [`beeline_ntb::Extents::take`] finds it; 0: there is none to be had.
        number: u64,
    },
    /// After a new life of the link or of a proxy: this far the sender's end has come.
    Resume {
        /// The receiver's number of it.
        to: u64,
        /// The sender's.
        from: u64,
        /// Which partition carries it.
        partition: u8,
        /// How far the sender's end has come.
        position: Position,
    },
}

/// Bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{length} bytes of kind {kind} are no message of this version")]
pub struct BadMessage {
    /// As told.
    pub length: usize,
    /// As told.
    pub kind: u8,
}

impl Refusal {
    fn code(self) -> u64 {
        match self {
            Self::NoListener => 63,
            Self::NotTaken => 65,
            Self::Denied => 40,
            Self::PortInUse => 13,
            Self::NoRoom => 20,
            Self::NotHere => 62,
        }
    }

    fn decode(code: u64) -> Option<Self> {
        [
            Self::NoListener,
            Self::NotTaken,
            Self::Denied,
            Self::PortInUse,
            Self::NoRoom,
            Self::NotHere,
        ]
        .into_iter()
        .find(|refusal| refusal.code() == code)
    }
}

impl Message {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (kind, words): (u8, Vec<u64>) = match *self {
            Self::Hello { announced } => (1, [&[MAGIC][..], &announced].concat()),
            Self::Syn { from, priority, source, destination } => {
                let addresses = [address_words(Some(source)), address_words(Some(destination))];
                (2, [&[from, u64::from(priority)][..], &addresses.concat()].concat())
            }
            Self::SynAck { to, from, partition } => (3, vec![to, from, u64::from(partition)]),
            Self::Refusal { to, why } => (4, vec![to, why.code()]),
            Self::Established { to } => (5, vec![to]),
            Self::Gone { to } => (6, vec![to]),
            Self::Extent { to, from, bytes } => (8, vec![to, from, bytes]),
            Self::ExtentIs { to, number } => (9, vec![to, number]),
            Self::Resume { to, from, partition, position } => {
                let Position { life, delivered, consumed } = position;
                let counts = [delivered, consumed].map(u64::from);
                (7, [&[to, from, u64::from(partition)][..], &counts, &[life]].concat())
            }
        };
        let length = u32::try_from(4 + words.len() * 8).unwrap_or(0);
        let mut bytes = Vec::with_capacity(LONGEST);
        bytes.extend(length.to_le_bytes());
        bytes.extend([kind, 0, 0, 0]);
        bytes.extend(words.into_iter().flat_map(u64::to_le_bytes));
        bytes
    }

    /// The first message of `bytes` and how long it is; `None`: it is not all there.
    ///
    /// Errors: [`BadMessage`].
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, BadMessage> {
        let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        let bad = BadMessage { length, kind: rest.first().copied().unwrap_or(0) };
        if length < 4 || length + 4 > LONGEST {
            return Err(bad);
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let (words, []) = body[4..].as_chunks::<8>() else { return Err(bad) };
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let small = |word: u64| u8::try_from(word).map_err(|_| bad);
        let message = match (body[0], &words[..]) {
            (1, [MAGIC, announced @ ..]) => {
                Self::Hello { announced: announced.try_into().map_err(|_| bad)? }
            }
            (2, &[from, priority, a, b, c, d, e, f]) => Self::Syn {
                from,
                priority: small(priority)?,
                source: address_of([a, b, c]).ok_or(bad)?,
                destination: address_of([d, e, f]).ok_or(bad)?,
            },
            (3, &[to, from, partition]) => Self::SynAck { to, from, partition: small(partition)? },
            (4, &[to, why]) => Self::Refusal { to, why: Refusal::decode(why).ok_or(bad)? },
            (5, &[to]) => Self::Established { to },
            (6, &[to]) => Self::Gone { to },
            (8, &[to, from, bytes]) => Self::Extent { to, from, bytes },
            (9, &[to, number]) => Self::ExtentIs { to, number },
            (7, &[to, from, partition, delivered, consumed, life]) => {
                let delivered = u32::try_from(delivered).map_err(|_| bad)?;
                let consumed = u32::try_from(consumed).map_err(|_| bad)?;
                let position = Position { life, delivered, consumed };
                Self::Resume { to, from, partition: small(partition)?, position }
            }
            _ => return Err(bad),
        };
        Ok(Some((message, length + 4)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_message_comes_back_as_it_was_and_a_part_of_one_is_waited_for() {
        let source: SocketAddr = "10.0.0.1:61000".parse().unwrap();
        let destination: SocketAddr = "[fd00::2]:80".parse().unwrap();
        for message in [
            Message::Hello { announced: [1, 2, 3, 4, 5, 6, 7, 8] },
            Message::Syn { from: 7, priority: 3, source, destination },
            Message::SynAck { to: 7, from: u64::MAX, partition: 255 },
            Message::Refusal { to: 1, why: Refusal::NoListener },
            Message::Refusal { to: 1, why: Refusal::NotHere },
            Message::Established { to: 9 },
            Message::Gone { to: 9 },
            Message::Extent { to: 1, from: 2, bytes: 1 << 30 },
            Message::ExtentIs { to: 1, number: 0 },
            Message::Resume {
                to: 1,
                from: 2,
                partition: 7,
                position: Position { life: u64::MAX, delivered: u32::MAX, consumed: 3 },
            },
        ] {
            let mut bytes = message.encode();
            for cut in 0..bytes.len() {
                assert_eq!(Message::decode(&bytes[..cut]), Ok(None));
            }
            let length = bytes.len();
            bytes.push(1);
            assert_eq!(Message::decode(&bytes), Ok(Some((message, length))));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_a_message(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(Some((message, length))) = Message::decode(&bytes) {
                prop_assert!(length <= bytes.len());
                prop_assert_eq!(Message::decode(&message.encode()), Ok(Some((message, length))));
            }
        }
    }
}
