//! What relays say to each other: records in messages. Pure.
//!
//! A message is one send of fabric, at most [`MESSAGE_BYTES`], and holds records back to back, each
//! aligned to 8, little endian:
//!
//! ```text
//!  0  name   u64   the connection, as the receiver names it (0 in an offer)
//!  8  kind   u32
//! 12  length u32   of the body
//! 16  body, padded to a multiple of 8
//! ```
//!
//! | kind | body | says |
//! | --- | --- | --- |
//! | 1 offer | name u64, ring bytes u64, own address 24, peer address 24 | I stand for this end; have you the other? |
//! | 2 accept | name u64, key u64, base u64 | I have; my ring is there |
//! | 3 commit | key u64, base u64 | agreed: it is paired; my ring is there |
//! | 4 refuse | | not, or no longer |
//! | 5 data | position u64, messages of the ring | publish these |
//! | 6 placed | position u64, end u64, header u64 | a write has placed what follows this header |
//! | 7 credit | position u64 | everything before may be overwritten |
//! | 8 signs | switched_at u64, finished u32, closed u32, mute u32, 0 u32 | what the end says of itself |
//! | 9 ring | | my program sleeps: send it a doorbell |
//! | 10 nudge | | it sleeps, and yours has not switched yet: make it ring you |
//! | 11 ended | | I let go; nothing more comes |
//! | 12 reset | | it is over at once |
//! | 13 recall | hold u64, ms; while small u32, 0 u32 | bring your program's end back to the kernel, as I do, for so long (while small messages pass) |
//! | 14 stay | | mine cannot be: both go on |
//! | 15 drained | | mine does nothing, and all it did is there |
//! | 16 total | sent u64 | so much it has given to the kernel |
//!
//! An address is family u8 (4 or 6), 0, port u16, 0 u32, 16 bytes. Names are opaque to the other
//! side; keys and bases are those of fabric regions.

use std::net::{IpAddr, SocketAddr};

/// Longest message.
pub const MESSAGE_BYTES: usize = 4096;
/// Bytes before a body.
pub const RECORD_BYTES: usize = 16;

/// A peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ground {
    /// Of the region.
    pub key: u64,
    /// Where in it the ring begins.
    pub base: u64,
}

/// What one record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// A connection waits for its other end.
    Offer {
        /// How the sender names it.
        name: u64,
        /// Of each ring.
        ring_bytes: u64,
        /// The address of the sender's program.
        own: SocketAddr,
        /// The address of its peer.
        peer: SocketAddr,
    },
    /// The other end is here.
    Accept {
        /// How the sender names it.
        name: u64,
        /// The sender's incoming ring.
        ground: Ground,
    },
    /// Both will leave the kernel's stream.
    Commit {
        /// The sender's incoming ring.
        ground: Ground,
    },
    /// Neither will.
    Refuse,
    /// Messages of the ring, whole.
    Data {
        /// Of the first header.
        position: u64,
        /// Headers and payload.
        bytes: &'a [u8],
    },
    /// Messages of the ring, placed but for the first header.
    Placed {
        /// Of the first header.
        position: u64,
        /// Behind the last message.
        end: u64,
        /// The first.
        header: u64,
    },
    /// Room.
    Credit {
        /// Everything before it was read.
        position: u64,
    },
    /// Signs of the sender's program.
    Signs {
        /// As in the segment.
        switched_at: u64,
        /// As in the segment.
        finished: u32,
        /// As in the segment.
        closed: u32,
        /// As in the segment.
        mute: u32,
    },
    /// The sender's program sleeps.
    Ring,
    /// As `Ring`, but the receiver's program has not switched.
    Nudge,
    /// The sender let go.
    Ended,
    /// Over.
    Reset,
    /// Back to the kernel.
    Recall {
        /// How long the receiver's program does not ask anew, in milliseconds.
        hold_ms: u64,
        /// Only while small messages pass.
        while_small: bool,
    },
    /// Not back to the kernel.
    Stay,
    /// The sender's program does nothing, and everything is carried.
    Drained,
    /// What the sender's program has given to the kernel.
    Total {
        /// Bytes, and doorbells.
        sent: u64,
    },
}

/// A message that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a record, {at} bytes into a message")]
pub struct BadRecord {
    /// Where.
    pub at: usize,
}

/// Bytes of a record with a body of `length`.
#[must_use]
pub const fn record_bytes(length: usize) -> usize {
    RECORD_BYTES + length.next_multiple_of(8)
}

const ADDRESS_BYTES: usize = 24;
/// Bytes of a data record's body before the ring's.
pub const DATA_BYTES: usize = 8;

fn put_address(target: &mut [u8], address: SocketAddr) {
    let (family, bytes) = match address.ip() {
        IpAddr::V4(ip) => (4, ip.to_ipv6_mapped().octets()),
        IpAddr::V6(ip) => (6, ip.octets()),
    };
    target.fill(0);
    target[0] = family;
    target[2..4].copy_from_slice(&address.port().to_le_bytes());
    target[8..24].copy_from_slice(&bytes);
}

fn address(bytes: &[u8; ADDRESS_BYTES]) -> Option<SocketAddr> {
    let [family, 0, p0, p1, 0, 0, 0, 0, ip @ ..] = *bytes else { return None };
    let ip = std::net::Ipv6Addr::from(ip);
    let ip = match family {
        4 => IpAddr::V4(ip.to_ipv4_mapped()?),
        6 => IpAddr::V6(ip),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_le_bytes([p0, p1])))
}

impl Record<'_> {
    /// Bytes of its body.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        match self {
            Self::Offer { .. } => 16 + 2 * ADDRESS_BYTES,
            Self::Accept { .. } | Self::Placed { .. } | Self::Signs { .. } => 24,
            Self::Commit { .. } | Self::Recall { .. } => 16,
            Self::Credit { .. } | Self::Total { .. } => 8,
            Self::Data { bytes, .. } => DATA_BYTES + bytes.len(),
            Self::Refuse | Self::Ring | Self::Nudge | Self::Ended | Self::Reset => 0,
            Self::Stay | Self::Drained => 0,
        }
    }

    fn kind(&self) -> u32 {
        match self {
            Self::Offer { .. } => 1,
            Self::Accept { .. } => 2,
            Self::Commit { .. } => 3,
            Self::Refuse => 4,
            Self::Data { .. } => 5,
            Self::Placed { .. } => 6,
            Self::Credit { .. } => 7,
            Self::Signs { .. } => 8,
            Self::Ring => 9,
            Self::Nudge => 10,
            Self::Ended => 11,
            Self::Reset => 12,
            Self::Recall { .. } => 13,
            Self::Stay => 14,
            Self::Drained => 15,
            Self::Total { .. } => 16,
        }
    }

    /// Writes it about connection `name` into `target`, which is exactly as long as the record.
    pub fn encode(&self, name: u64, target: &mut [u8]) {
        let length = self.body_bytes();
        let body = head(name, self.kind(), length, target);
        let words = |body: &mut [u8], words: &[u64]| {
            for (place, word) in body.chunks_exact_mut(8).zip(words) {
                place.copy_from_slice(&word.to_le_bytes());
            }
        };
        match *self {
            Self::Offer { name, ring_bytes, own, peer } => {
                words(body, &[name, ring_bytes]);
                put_address(&mut body[16..16 + ADDRESS_BYTES], own);
                put_address(&mut body[16 + ADDRESS_BYTES..], peer);
            }
            Self::Accept { name, ground } => words(body, &[name, ground.key, ground.base]),
            Self::Commit { ground } => words(body, &[ground.key, ground.base]),
            Self::Data { position, bytes } => {
                words(body, &[position]);
                body[DATA_BYTES..DATA_BYTES + bytes.len()].copy_from_slice(bytes);
            }
            Self::Placed { position, end, header } => words(body, &[position, end, header]),
            Self::Credit { position } => words(body, &[position]),
            Self::Signs { switched_at, finished, closed, mute } => {
                let ends = u64::from(finished) | u64::from(closed) << 32;
                words(body, &[switched_at, ends, u64::from(mute)]);
            }
            Self::Recall { hold_ms, while_small } => {
                words(body, &[hold_ms, u64::from(while_small)]);
            }
            Self::Total { sent } => words(body, &[sent]),
            Self::Refuse | Self::Ring | Self::Nudge | Self::Ended | Self::Reset => {}
            Self::Stay | Self::Drained => {}
        }
    }
}

/// Writes a record's head into `target`, which is exactly as long as the record; its body.
fn head(name: u64, kind: u32, length: usize, target: &mut [u8]) -> &mut [u8] {
    assert_eq!(target.len(), record_bytes(length), "a record fits its place");
    let (head, body) = target.split_at_mut(RECORD_BYTES);
    head[..8].copy_from_slice(&name.to_le_bytes());
    head[8..12].copy_from_slice(&kind.to_le_bytes());
    #[expect(clippy::cast_possible_truncation, reason = "a message is short")]
    head[12..].copy_from_slice(&(length as u32).to_le_bytes());
    body
}

/// Writes a data record about `name` into `target` save for the ring's bytes, whose place is
/// returned; `length` of them.
pub fn data(name: u64, position: u64, length: usize, target: &mut [u8]) -> &mut [u8] {
    let body = head(name, 5, DATA_BYTES + length, target);
    let (at, bytes) = body.split_at_mut(DATA_BYTES);
    at.copy_from_slice(&position.to_le_bytes());
    &mut bytes[..length]
}

fn decode(kind: u32, body: &[u8]) -> Option<Record<'_>> {
    let (words, rest) = body.as_chunks::<8>();
    let word = |index: usize| words.get(index).map(|word| u64::from_le_bytes(*word));
    let halves = |word: u64| (word as u32, (word >> 32) as u32);
    Some(match (kind, body.len()) {
        (1, 64) => Record::Offer {
            name: word(0)?,
            ring_bytes: word(1)?,
            own: address(body.get(16..40)?.try_into().ok()?)?,
            peer: address(body.get(40..64)?.try_into().ok()?)?,
        },
        (2, 24) => {
            Record::Accept { name: word(0)?, ground: Ground { key: word(1)?, base: word(2)? } }
        }
        (3, 16) => Record::Commit { ground: Ground { key: word(0)?, base: word(1)? } },
        (4, 0) => Record::Refuse,
        (5, 16..) if rest.is_empty() => {
            Record::Data { position: word(0)?, bytes: body.get(DATA_BYTES..)? }
        }
        (6, 24) => Record::Placed { position: word(0)?, end: word(1)?, header: word(2)? },
        (7, 8) => Record::Credit { position: word(0)? },
        (8, 24) => {
            let ((finished, closed), (mute, 0)) = (halves(word(1)?), halves(word(2)?)) else {
                return None;
            };
            Record::Signs { switched_at: word(0)?, finished, closed, mute }
        }
        (9, 0) => Record::Ring,
        (10, 0) => Record::Nudge,
        (11, 0) => Record::Ended,
        (12, 0) => Record::Reset,
        (13, 16) => {
            let while_small @ (0 | 1) = word(1)? else { return None };
            Record::Recall { hold_ms: word(0)?, while_small: while_small == 1 }
        }
        (14, 0) => Record::Stay,
        (15, 0) => Record::Drained,
        (16, 8) => Record::Total { sent: word(0)? },
        _ => return None,
    })
}

/// The records of a message, with the names they are about. Ends after the first bad one.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    message: &'a [u8],
    at: usize,
}

impl<'a> Records<'a> {
    /// Of `message`.
    #[must_use]
    pub fn new(message: &'a [u8]) -> Self {
        Self { message, at: 0 }
    }

    fn take(&mut self) -> Option<(u64, Record<'a>)> {
        let rest = self.message.get(self.at..)?;
        let (head, rest) = rest.split_first_chunk::<RECORD_BYTES>()?;
        let [n @ .., k0, k1, k2, k3, l0, l1, l2, l3] = *head;
        let name = u64::from_le_bytes(n);
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let record = decode(u32::from_le_bytes([k0, k1, k2, k3]), rest.get(..length)?)?;
        let padded = length.next_multiple_of(8);
        rest.get(..padded)?;
        self.at += RECORD_BYTES + padded;
        Some((name, record))
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<(u64, Record<'a>), BadRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.message.len() {
            return None;
        }
        let at = self.at;
        let taken = self.take();
        if taken.is_none() {
            self.at = self.message.len();
        }
        Some(taken.ok_or(BadRecord { at }))
    }
}

/// Reads `bytes` as a message and checks what must hold for every input: it ends, never panics, and
/// what was taken is taken again as encoded. How many records there were. The entry for fuzzers.
///
/// # Panics
///
/// When something that must hold does not.
#[must_use]
pub fn fuzz(bytes: &[u8]) -> usize {
    let mut count = 0;
    for taken in Records::new(bytes) {
        let Ok((name, record)) = taken else { break };
        let mut again = vec![0; record_bytes(record.body_bytes())];
        record.encode(name, &mut again);
        let mut records = Records::new(&again);
        assert_eq!(records.next(), Some(Ok((name, record))), "a record means one thing");
        assert_eq!(records.next(), None, "a record ends where it ends");
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all() -> Vec<Record<'static>> {
        let (one, other) = ("10.0.0.1:80".parse().unwrap(), "[fe80::1]:4000".parse().unwrap());
        let ground = Ground { key: u64::MAX, base: 4096 };
        vec![
            Record::Offer { name: 7, ring_bytes: 1 << 18, own: one, peer: other },
            Record::Accept { name: 8, ground },
            Record::Commit { ground },
            Record::Refuse,
            Record::Data { position: 8, bytes: &[1; 24] },
            Record::Placed { position: 0, end: 4096, header: 1 << 32 | 4000 },
            Record::Credit { position: 64 },
            Record::Signs { switched_at: 1, finished: 1, closed: 2, mute: 0 },
            Record::Ring,
            Record::Nudge,
            Record::Ended,
            Record::Reset,
            Record::Recall { hold_ms: 60_000, while_small: true },
            Record::Stay,
            Record::Drained,
            Record::Total { sent: u64::MAX },
        ]
    }

    fn message(records: &[Record<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (index, record) in records.iter().enumerate() {
            let at = bytes.len();
            bytes.resize(at + record_bytes(record.body_bytes()), 0xff);
            record.encode(index as u64, &mut bytes[at..]);
        }
        bytes
    }

    #[test]
    fn every_record_comes_back_as_it_was_and_cut_short_it_does_not() {
        let bytes = message(&all());
        assert!(bytes.len() < MESSAGE_BYTES);
        let back: Vec<_> = Records::new(&bytes).map(Result::unwrap).collect();
        let expected: Vec<_> =
            all().into_iter().enumerate().map(|(index, record)| (index as u64, record)).collect();
        assert_eq!(back, expected);
        let mut whole = vec![0];
        for record in all() {
            whole.push(whole.last().unwrap() + record_bytes(record.body_bytes()));
        }
        for cut in 0..bytes.len() {
            let good = Records::new(&bytes[..cut]).take_while(Result::is_ok).count();
            assert_eq!(good, whole.iter().filter(|end| **end <= cut).count() - 1, "cut at {cut}");
        }
    }

    #[test]
    fn a_data_record_written_in_place_is_the_same() {
        let mut place = vec![0xff; record_bytes(DATA_BYTES + 16)];
        data(3, 40, 16, &mut place).fill(9);
        let record = Records::new(&place).next().unwrap().unwrap();
        assert_eq!(record, (3, Record::Data { position: 40, bytes: &[9; 16] }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = fuzz(&bytes);
        }

        #[test]
        fn damaged_messages_are_read_to_an_end(at in 0_usize..500, value in any::<u8>()) {
            let mut bytes = message(&all());
            let index = at % bytes.len();
            bytes[index] = value;
            let _ = fuzz(&bytes);
        }
    }
}
