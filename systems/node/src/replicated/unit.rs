//! A unit: the requests that one lane of one node proposes together, in one command of the log.
//!
//! ```text
//!  0  version u8 = 1 | 0 u8 | node u16 | lane u16 | 0 u16
//!  8  incarnation u64     of the node: larger than those of its earlier runs
//! 16  number u64          within lane and incarnation, ascending
//! 24  time u64            Unix milliseconds, set by the leader that proposes it
//! 32  requests: length u32, then a request ([`beeline_resp::logged`])
//! reply                   per request: length u32, then the reply
//! ```
//!
//! Node, lane, incarnation and number make a retry harmless: each replica remembers the last of a
//! lane, and skips what is not beyond it. A lane has one unit under way.

/// Bytes before the requests.
pub(crate) const HEAD_BYTES: usize = 32;
const VERSION: u8 = 1;
const TIME_AT: usize = 24;
/// The whole reply to a unit that had been applied before.
pub(crate) const REPEATED: [u8; 4] = u32::MAX.to_le_bytes();

/// Whose unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LaneName {
    pub node: u16,
    pub lane: u16,
}

impl LaneName {
    /// Its key among the system's entries.
    pub(crate) fn key(self) -> [u8; 9] {
        let (node, lane) = (self.node.to_be_bytes(), self.lane.to_be_bytes());
        [b'l', b'a', b'n', b'e', b':', node[0], node[1], lane[0], lane[1]]
    }
}

/// Which unit of a lane: later ones are larger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    pub incarnation: u64,
    pub number: u64,
}

impl Turn {
    pub(crate) fn encode(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[8..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (incarnation, rest) = bytes.split_first_chunk::<8>()?;
        let number = u64::from_le_bytes(rest.try_into().ok()?);
        Some(Self { incarnation: u64::from_le_bytes(*incarnation), number })
    }
}

/// Writes the head of a unit, without its time, into the first bytes of `unit`.
pub(crate) fn put_head(unit: &mut [u8], lane: LaneName, turn: Turn) {
    unit[..HEAD_BYTES].fill(0);
    unit[0] = VERSION;
    unit[2..4].copy_from_slice(&lane.node.to_le_bytes());
    unit[4..6].copy_from_slice(&lane.lane.to_le_bytes());
    unit[8..TIME_AT].copy_from_slice(&turn.encode());
}

/// Sets the time at which a unit is proposed.
pub(crate) fn stamp(unit: &mut [u8], unix_ms: u64) {
    unit[TIME_AT..HEAD_BYTES].copy_from_slice(&unix_ms.to_le_bytes());
}

/// A unit, taken apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit<'a> {
    pub lane: LaneName,
    pub turn: Turn,
    pub unix_ms: u64,
    requests: &'a [u8],
}

impl<'a> Unit<'a> {
    /// `None`: these bytes are no unit of a version known here.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (head, requests) = bytes.split_first_chunk::<HEAD_BYTES>()?;
        if head[0] != VERSION {
            return None;
        }
        let short = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let mut time = [0; 8];
        time.copy_from_slice(&head[TIME_AT..]);
        Some(Self {
            lane: LaneName { node: short(2), lane: short(4) },
            turn: Turn::decode(&head[8..TIME_AT])?,
            unix_ms: u64::from_le_bytes(time),
            requests,
        })
    }

    /// Its requests in order; ends early where they are damaged.
    pub(crate) fn requests(&self) -> impl Iterator<Item = &'a [u8]> {
        parts(self.requests)
    }
}

/// Appends a part that `write` makes, behind its length.
pub(crate) fn put_part(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out);
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// The parts of requests or replies.
pub(crate) fn parts(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
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
        let lane = LaneName { node: 3, lane: 1 };
        let turn = Turn { incarnation: 1 << 40, number: 9 };
        put_head(&mut bytes, lane, turn);
        stamp(&mut bytes, 1234);
        for request in [&b"one"[..], b"", b"three"] {
            put_part(&mut bytes, |out| out.extend_from_slice(request));
        }
        let unit = Unit::decode(&bytes).unwrap();
        assert_eq!((unit.lane, unit.turn, unit.unix_ms), (lane, turn, 1234));
        assert_eq!(unit.requests().collect::<Vec<_>>(), [&b"one"[..], b"", b"three"]);
        bytes[0] = 2;
        assert!(Unit::decode(&bytes).is_none());
        assert!(Unit::decode(&bytes[..20]).is_none());
        assert_eq!(parts(&REPEATED).count(), 0);
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
