//! A unit: the requests that one lane of one node proposes together, in one command of the log.
//!
//! ```text
//!  0  version u8 = 2 | format u8 | node u16 | lane u16 | service u16
//!  8  incarnation u64     of the node: larger than those of its earlier runs
//! 16  number u64          within lane and incarnation, ascending
//! 24  time u64            Unix milliseconds, set by the leader that proposes it
//! 32  checked u64         a window of the log, numbered from 1; 0: none
//! 40  digest u64          of what it did at the leader ([`crate::Machine`])
//! 48  requests: length u32, then a request, in the service's own format
//! reply                   per request: length u32, then the reply
//! ```
//!
//! A unit that is longer than an entry of the log travels in *pieces*, each in an entry with a turn of its
//! own. A piece has version 3, and behind the same head
//!
//! ```text
//! 48  series u64          number of the turn of the first piece
//! 56  index u32 | count u32
//! 64  bytes               of the requests, as they lie in a whole unit
//! ```
//!
//! The service keeps pieces ([`crate::Replicated::keep_piece`]) until the last one makes them whole.
//!
//! Little endian. The *service* is a [`Tag`], the *format* that of its commands, counted by itself.
//! Version 1 ended at 32, had zeroes for format and service, and is the keys' ([`Tag::KEYS`]).
//!
//! Service, node, lane, incarnation and number make a retry harmless: each replica remembers the
//! last of a lane, and skips what is not beyond it. A lane has one unit under way.

use crate::machine::Tag;

/// Bytes before the requests.
pub const HEAD_BYTES: usize = 48;
const HEAD_BYTES_V1: usize = 32;
/// Bytes before those of a piece.
pub const PIECE_HEAD_BYTES: usize = HEAD_BYTES + 16;
const VERSION: u8 = 2;
const PIECE_VERSION: u8 = 3;
const TIME_AT: usize = 24;
const CHECKED_AT: usize = 32;
/// The whole reply to a unit that had been applied before.
pub const REPEATED: [u8; 4] = u32::MAX.to_le_bytes();

/// Whose unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneName {
    /// Of which service.
    pub service: Tag,
    /// Of which member.
    pub node: u16,
    /// Which one.
    pub lane: u16,
}

impl LaneName {
    /// A name for what its service stores about it.
    #[must_use]
    pub fn key(self) -> Vec<u8> {
        let mut key = b"lane:".to_vec();
        if self.service != Tag::KEYS {
            key.extend_from_slice(&self.service.0.to_be_bytes());
        }
        key.extend_from_slice(&self.node.to_be_bytes());
        key.extend_from_slice(&self.lane.to_be_bytes());
        key
    }
}

/// Which unit of a lane: later ones are larger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    /// Of the node.
    pub incarnation: u64,
    /// Within it.
    pub number: u64,
}

impl Turn {
    /// As its service stores it.
    #[must_use]
    pub fn encode(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[8..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// What [`Turn::encode`] wrote.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (incarnation, rest) = bytes.split_first_chunk::<8>()?;
        let number = u64::from_le_bytes(rest.try_into().ok()?);
        Some(Self { incarnation: u64::from_le_bytes(*incarnation), number })
    }
}

/// Writes the head of a unit, without its time, into the first bytes of `unit`, which are there.
/// `format` is that of the service's requests.
pub fn put_head(unit: &mut [u8], lane: LaneName, format: u8, turn: Turn) {
    unit[..HEAD_BYTES].fill(0);
    unit[0] = VERSION;
    unit[1] = format;
    unit[2..4].copy_from_slice(&lane.node.to_le_bytes());
    unit[4..6].copy_from_slice(&lane.lane.to_le_bytes());
    unit[6..8].copy_from_slice(&lane.service.0.to_le_bytes());
    unit[8..TIME_AT].copy_from_slice(&turn.encode());
}

/// As [`put_head`], of a piece: into the first [`PIECE_HEAD_BYTES`].
pub fn put_piece_head(bytes: &mut [u8], lane: LaneName, format: u8, turn: Turn, piece: Piece) {
    put_head(bytes, lane, format, turn);
    bytes[0] = PIECE_VERSION;
    bytes[HEAD_BYTES..HEAD_BYTES + 8].copy_from_slice(&piece.series.to_le_bytes());
    bytes[HEAD_BYTES + 8..HEAD_BYTES + 12].copy_from_slice(&piece.index.to_le_bytes());
    bytes[HEAD_BYTES + 12..PIECE_HEAD_BYTES].copy_from_slice(&piece.count.to_le_bytes());
}

/// Sets the incarnation of a unit that was not proposed yet.
pub(crate) fn renew(unit: &mut [u8], incarnation: u64) {
    unit[8..16].copy_from_slice(&incarnation.to_le_bytes());
}

/// Sets the time at which a unit, which [`Unit::decode`] knows, is proposed.
pub(crate) fn stamp(unit: &mut [u8], unix_ms: u64) {
    unit[TIME_AT..CHECKED_AT].copy_from_slice(&unix_ms.to_le_bytes());
}

/// Sets what the leader that proposes a unit tells of a window of the log.
pub(crate) fn stamp_check(unit: &mut [u8], check: Check) {
    if unit.len() >= HEAD_BYTES && matches!(unit[0], VERSION | PIECE_VERSION) {
        unit[CHECKED_AT..CHECKED_AT + 8].copy_from_slice(&check.window.to_le_bytes());
        unit[CHECKED_AT + 8..HEAD_BYTES].copy_from_slice(&check.digest.to_le_bytes());
    }
}

/// What a window of the log did at one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// Which one, from 1.
    pub window: u64,
    /// Equal at all members.
    pub digest: u64,
}

/// Why bytes are no unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoUnit {
    /// Of a later version.
    Version(u8),
    /// Something else: every build says so.
    Malformed,
}

/// Which piece of a unit that travels in several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the first piece's turn: the same in all of them.
    pub series: u64,
    /// Which one, from 0.
    pub index: u32,
    /// How many there are.
    pub count: u32,
}

impl Piece {
    /// Whether the unit is whole with this one.
    #[must_use]
    pub fn is_last(self) -> bool {
        self.index.checked_add(1) == Some(self.count)
    }
}

/// A unit, taken apart.
#[derive(Clone, Copy, Debug)]
pub struct Unit<'a> {
    /// Whose.
    pub lane: LaneName,
    /// Of the service's requests.
    pub format: u8,
    /// Which of the lane.
    pub turn: Turn,
    /// When it was proposed, by the clock of a leader; may lie before an earlier unit's.
    pub unix_ms: u64,
    /// What the leader tells of a window.
    pub check: Option<Check>,
    /// Of a piece; it has no requests by itself.
    pub piece: Option<Piece>,
    requests: &'a [u8],
}

impl<'a> Unit<'a> {
    /// Takes it apart.
    ///
    /// Errors: [`NoUnit`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, NoUnit> {
        let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES_V1>().ok_or(NoUnit::Malformed)?;
        let short = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let long = |bytes: &[u8], at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let (service, check, piece, requests) = match head[0] {
            1 => (Tag::KEYS, None, None, rest),
            2 => {
                let (more, requests) = rest.split_first_chunk::<16>().ok_or(NoUnit::Malformed)?;
                let check = Check { window: long(more, 0), digest: long(more, 8) };
                (Tag(short(6)), Some(check).filter(|check| check.window != 0), None, requests)
            }
            PIECE_VERSION => {
                let (more, bytes) = rest.split_first_chunk::<32>().ok_or(NoUnit::Malformed)?;
                let check = Check { window: long(more, 0), digest: long(more, 8) };
                let both = long(more, 24);
                let (index, count) = (both as u32, (both >> 32) as u32);
                if index >= count {
                    return Err(NoUnit::Malformed);
                }
                let piece = Piece { series: long(more, 16), index, count };
                let check = Some(check).filter(|check| check.window != 0);
                (Tag(short(6)), check, Some(piece), bytes)
            }
            0 => return Err(NoUnit::Malformed),
            version => return Err(NoUnit::Version(version)),
        };
        Ok(Self {
            lane: LaneName { service, node: short(2), lane: short(4) },
            format: head[1],
            turn: Turn { incarnation: long(head, 8), number: long(head, 16) },
            unix_ms: long(head, TIME_AT),
            check,
            piece,
            requests,
        })
    }

    /// The bytes of its requests; of a piece, its own.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.requests
    }

    /// The unit that a last piece makes whole, of all pieces' bytes.
    #[must_use]
    pub fn whole<'b>(&self, bytes: &'b [u8]) -> Unit<'b> {
        Unit { piece: None, requests: bytes, ..*self }
    }

    /// Its requests in order; ends early where they are damaged.
    pub fn requests(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        parts(self.requests)
    }
}

/// Appends a part that `write` makes, behind its length.
pub fn put_part(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out);
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// The parts of requests or replies.
pub fn parts(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, behind) = rest.split_first_chunk::<4>()?;
        let (part, behind) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        rest = behind;
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_comes_back() {
        let mut bytes = vec![0; HEAD_BYTES];
        let lane = LaneName { service: Tag(7), node: 3, lane: 1 };
        let turn = Turn { incarnation: 1 << 40, number: 9 };
        put_head(&mut bytes, lane, 5, turn);
        stamp(&mut bytes, 1234);
        for request in [&b"one"[..], b"", b"three"] {
            put_part(&mut bytes, |out| out.extend_from_slice(request));
        }
        let unit = Unit::decode(&bytes).unwrap();
        assert_eq!((unit.lane, unit.format, unit.turn), (lane, 5, turn));
        assert_eq!((unit.unix_ms, unit.check), (1234, None));
        assert_eq!(unit.requests().collect::<Vec<_>>(), [&b"one"[..], b"", b"three"]);
        let check = Check { window: 4, digest: 99 };
        stamp_check(&mut bytes, check);
        renew(&mut bytes, 1 << 41);
        let unit = Unit::decode(&bytes).unwrap();
        assert_eq!((unit.check, unit.turn.incarnation), (Some(check), 1 << 41));
        bytes[0] = 4;
        assert_eq!(Unit::decode(&bytes).err(), Some(NoUnit::Version(4)));
        for length in 0..HEAD_BYTES {
            bytes[0] = 2;
            assert_eq!(Unit::decode(&bytes[..length]).err(), Some(NoUnit::Malformed));
        }
        assert_eq!(parts(&REPEATED).count(), 0);
    }

    #[test]
    fn a_piece_comes_back() {
        let lane = LaneName { service: Tag(7), node: 3, lane: 1 };
        let turn = Turn { incarnation: 1 << 40, number: 12 };
        let piece = Piece { series: 9, index: 3, count: 4 };
        let mut bytes = vec![0; PIECE_HEAD_BYTES];
        put_piece_head(&mut bytes, lane, 5, turn, piece);
        bytes.extend_from_slice(b"the rest");
        stamp(&mut bytes, 1234);
        stamp_check(&mut bytes, Check { window: 4, digest: 99 });
        let unit = Unit::decode(&bytes).unwrap();
        assert_eq!((unit.lane, unit.format, unit.turn, unit.unix_ms), (lane, 5, turn, 1234));
        assert_eq!((unit.piece, unit.bytes()), (Some(piece), &b"the rest"[..]));
        assert!(piece.is_last() && unit.check.is_some());
        let whole = unit.whole(b"\x03\0\0\0one");
        assert_eq!(whole.requests().collect::<Vec<_>>(), [b"one"]);
        for length in 0..PIECE_HEAD_BYTES {
            assert_eq!(Unit::decode(&bytes[..length]).err(), Some(NoUnit::Malformed));
        }
        // Behind the last, and of none.
        for (index, count) in [(4, 4), (9, 4), (0, 0)] {
            put_piece_head(&mut bytes, lane, 5, turn, Piece { series: 9, index, count });
            assert_eq!(Unit::decode(&bytes).err(), Some(NoUnit::Malformed));
        }
    }

    #[test]
    fn a_unit_of_the_first_version_is_the_keys() {
        let mut bytes = vec![0; HEAD_BYTES_V1];
        bytes[0] = 1;
        bytes[2] = 3;
        bytes[16] = 9;
        put_part(&mut bytes, |out| out.extend_from_slice(b"one"));
        let unit = Unit::decode(&bytes).unwrap();
        assert_eq!(unit.lane, LaneName { service: Tag::KEYS, node: 3, lane: 0 });
        assert_eq!((unit.format, unit.turn.number), (0, 9));
        assert_eq!(unit.requests().collect::<Vec<_>>(), [&b"one"[..]]);
        let lane = LaneName { service: Tag(2), ..unit.lane };
        assert_eq!(unit.lane.key(), [&b"lane:"[..], &[0, 3, 0, 0]].concat(), "as ever");
        assert_ne!(unit.lane.key(), lane.key());
    }

    #[test]
    fn later_turns_are_larger_whatever_their_number() {
        let old = Turn { incarnation: 1, number: 900 };
        let new = Turn { incarnation: 2, number: 1 };
        assert!(new > old);
        assert_eq!(Turn::decode(&new.encode()), Some(new));
        assert_eq!(Turn::decode(&new.encode()[..15]), None);
    }
}
