//! Messages as bytes.
//!
//! ```text
//!  0  magic u32 "BLM3"        12  sender u16          24  attempt u32
//!  4  cluster u64             14  kind u8             28  four words u64
//!                             15  transfer u8         60  length of connection data u16
//!                             16  term u32, zero u32  62  connection data
//! ```
//!
//! Little endian; what a kind does not use is zero. A request that leads to a grant carries the
//! connection data of the asker's data queue pair and the number of the attempt; the answer
//! carries that of the granter's, and repeats the number. So do the offer of a snapshot and its
//! acceptance, for the queue pair that carries it, and those of a connection to forward through.

use beeline_fabric::ConnectInfo;
use beeline_paxos::{AccessKey, ClusterId, Grant, Message, NodeId, Position, Term};

const MAGIC: u32 = u32::from_le_bytes(*b"BLM3");
const HEADER_BYTES: usize = 62;

/// Longest frame.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + ConnectInfo::MAX_BYTES;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A message of the protocol.
    Protocol(Message),
    /// A snapshot is to be had.
    Offer {
        /// What it covers.
        position: Position,
        /// Its length in bytes.
        bytes: u64,
    },
    /// Send it.
    Accept,
    /// Do not.
    Decline,
    /// The sender wants to have the receiver propose and pass barriers.
    Forward,
    /// It may.
    Forwarding,
}

/// A message with what the driver adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Whose log this is about.
    pub cluster: ClusterId,
    /// Who sends.
    pub from: NodeId,
    /// Which try of the asker.
    pub attempt: u32,
    /// What it says.
    pub content: Content,
    /// Of a data queue pair; empty where none is offered.
    pub info: Vec<u8>,
}

fn fields(content: Content) -> (u8, Term, bool, [u64; 4]) {
    let none = Term(0);
    let message = match content {
        Content::Protocol(message) => message,
        Content::Offer { position, bytes } => return (9, none, false, [position.0, bytes, 0, 0]),
        Content::Accept => return (10, none, false, [0; 4]),
        Content::Decline => return (11, none, false, [0; 4]),
        Content::Forward => return (12, none, false, [0; 4]),
        Content::Forwarding => return (13, none, false, [0; 4]),
    };
    let one = |position: Position| [position.0, 0, 0, 0];
    let all = |grant: Grant| [grant.key.0, grant.committed.0, grant.highest.0, grant.snapshot.0];
    match message {
        Message::WouldYouVote { term, committed } => (1, term, false, one(committed)),
        Message::WouldVote { term } => (2, term, false, [0; 4]),
        Message::RequestVote { term, committed, transfer } => (3, term, transfer, one(committed)),
        Message::Vote { term, grant } => (4, term, false, all(grant)),
        Message::Follow { term } => (5, term, false, [0; 4]),
        Message::Following { term, grant } => (6, term, false, all(grant)),
        Message::Refused { term } => (7, term, false, [0; 4]),
        Message::TakeOver { term } => (8, term, false, [0; 4]),
        Message::Awake { term } => (14, term, false, [0; 4]),
    }
}

impl Frame {
    /// Writes the frame; `bytes` is cleared first.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        let (kind, term, transfer, words) = fields(self.content);
        let length = u16::try_from(self.info.len()).unwrap_or(u16::MAX);
        assert!(self.info.len() <= ConnectInfo::MAX_BYTES, "providers bound connection data");
        bytes.clear();
        bytes.extend_from_slice(&MAGIC.to_le_bytes());
        bytes.extend_from_slice(&self.cluster.0.to_le_bytes());
        bytes.extend_from_slice(&self.from.0.to_le_bytes());
        bytes.extend_from_slice(&[kind, u8::from(transfer)]);
        bytes.extend_from_slice(&term.0.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&self.attempt.to_le_bytes());
        for word in words {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&self.info);
    }

    /// The frame in `bytes`; `None` unless they are exactly what [`Frame::encode`] writes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let header = bytes.get(..HEADER_BYTES)?;
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let term = Term(long(16) as u32);
        let words = [long(28), long(36), long(44), long(52)];
        let committed = Position(words[0]);
        let grant = Grant {
            key: AccessKey(words[0]),
            committed: Position(words[1]),
            highest: Position(words[2]),
            snapshot: Position(words[3]),
        };
        let content = match header[14] {
            9 => Content::Offer { position: committed, bytes: words[1] },
            10 => Content::Accept,
            11 => Content::Decline,
            12 => Content::Forward,
            13 => Content::Forwarding,
            kind => Content::Protocol(match kind {
                1 => Message::WouldYouVote { term, committed },
                2 => Message::WouldVote { term },
                3 => Message::RequestVote { term, committed, transfer: header[15] == 1 },
                4 => Message::Vote { term, grant },
                5 => Message::Follow { term },
                6 => Message::Following { term, grant },
                7 => Message::Refused { term },
                8 => Message::TakeOver { term },
                14 => Message::Awake { term },
                _ => return None,
            }),
        };
        let frame = Self {
            cluster: ClusterId(long(4)),
            from: NodeId(short(12)),
            attempt: (long(20) >> 32) as u32,
            content,
            info: bytes[HEADER_BYTES..].to_vec(),
        };
        if frame.info.len() > ConnectInfo::MAX_BYTES {
            return None;
        }
        let mut spelled = Vec::with_capacity(bytes.len());
        frame.encode(&mut spelled);
        (spelled == bytes).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn contents() -> Vec<Content> {
        let mut contents: Vec<_> = messages().into_iter().map(Content::Protocol).collect();
        contents.push(Content::Offer { position: Position(9), bytes: 1 << 40 });
        contents.extend([Content::Accept, Content::Decline]);
        contents.extend([Content::Forward, Content::Forwarding]);
        contents
    }

    fn messages() -> Vec<Message> {
        let (term, committed) = (Term(7), Position(99));
        let grant = Grant {
            key: AccessKey(0xfeed),
            committed,
            highest: Position(120),
            snapshot: Position(64),
        };
        vec![
            Message::WouldYouVote { term, committed },
            Message::WouldVote { term },
            Message::RequestVote { term, committed, transfer: false },
            Message::RequestVote { term, committed, transfer: true },
            Message::Vote { term, grant },
            Message::Follow { term },
            Message::Following { term, grant },
            Message::Refused { term },
            Message::TakeOver { term },
            Message::Awake { term },
        ]
    }

    #[test]
    fn every_message_comes_back_and_no_other_spelling_is_taken() {
        for content in contents() {
            let frame = Frame {
                cluster: ClusterId(5),
                from: NodeId(3),
                attempt: 17,
                content,
                info: vec![1, 2, 3],
            };
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            assert_eq!(Frame::decode(&bytes), Some(frame), "{content:?}");
            assert_eq!(Frame::decode(&bytes[..bytes.len() - 1]), None);
            bytes[20] = 1;
            assert_eq!(Frame::decode(&bytes), None, "a byte that has to be zero");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_mean_what_they_spell(
            bytes in proptest::collection::vec(any::<u8>(), 0..120),
        ) {
            if let Some(frame) = Frame::decode(&bytes) {
                let mut again = Vec::new();
                frame.encode(&mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
