//! A slot: one position's entry, byte by byte.
//!
//! ```text
//!  0  term u32 ┐ the term word: the only bytes in which two
//!  4  seal u32 ┘ proposals of one value for one position differ
//!  8  position u64
//! 16  payload length u32
//! 20  kind u8, three zeroes
//! 24  body check u32, four zeroes
//! 32  payload
//! ```
//!
//! All numbers are little endian. The body check is the CRC-32C of cluster, position, length, kind
//! and payload, but not of the term. The seal is the CRC-32C of cluster, term, position and body
//! check. Two things follow, and recovery rests on both:
//!
//! - *Proposing the same value again under a higher term changes one aligned word of eight bytes.*
//!   A loss of power in the middle leaves the old term or the new one, and the value either way:
//!   writing an accepted value again never loses it.
//! - *A slot torn between two values is no entry.* The seal binds the term word to its own body,
//!   so a new term word over an old body, or a half-written body, fails a check and counts as a
//!   hole.

use beeline_wire::checksum::{crc32c, crc32c_append};

use crate::ids::{ClusterId, Position, Term};

/// Bytes before the payload.
pub const SLOT_HEADER_BYTES: usize = 32;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Commands of the state machine; see [`crate::batch`].
    Commands,
    /// Fills a hole; changes nothing.
    NoOp,
    /// A change of membership; see [`crate::Configuration`].
    Configuration,
    /// Stands where an entry was chosen that no log has any more, and that the state machine of the
    /// server that wrote this had applied. Changes nothing, and is never copied to another server:
    /// that one needs the state, as a snapshot.
    Lost,
}

impl Kind {
    fn to_byte(self) -> u8 {
        match self {
            Self::Commands => 1,
            Self::NoOp => 2,
            Self::Configuration => 3,
            Self::Lost => 4,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Commands),
            2 => Some(Self::NoOp),
            3 => Some(Self::Configuration),
            4 => Some(Self::Lost),
            _ => None,
        }
    }
}

/// A slot that passed its checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The ballot under which it was written.
    pub term: Term,
    /// Where it stands.
    pub position: Position,
    /// What it is.
    pub kind: Kind,
    /// Its bytes.
    pub payload: &'a [u8],
}

fn body_check(cluster: ClusterId, position: Position, kind: Kind, payload: &[u8]) -> u32 {
    let mut head = [0; 24];
    head[..8].copy_from_slice(&cluster.0.to_le_bytes());
    head[8..16].copy_from_slice(&position.0.to_le_bytes());
    head[16..20].copy_from_slice(&length_of(payload).to_le_bytes());
    head[20] = kind.to_byte();
    crc32c_append(crc32c(&head), payload)
}

fn seal(cluster: ClusterId, term: Term, position: Position, body: u32) -> u32 {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&cluster.0.to_le_bytes());
    bytes[8..12].copy_from_slice(&term.0.to_le_bytes());
    bytes[12..20].copy_from_slice(&position.0.to_le_bytes());
    bytes[20..].copy_from_slice(&body.to_le_bytes());
    crc32c(&bytes)
}

fn length_of(payload: &[u8]) -> u32 {
    u32::try_from(payload.len()).unwrap_or(u32::MAX)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// The header of an entry.
#[must_use]
pub fn header(
    cluster: ClusterId,
    term: Term,
    position: Position,
    kind: Kind,
    payload: &[u8],
) -> [u8; SLOT_HEADER_BYTES] {
    let body = body_check(cluster, position, kind, payload);
    let mut header = [0; SLOT_HEADER_BYTES];
    header[..4].copy_from_slice(&term.0.to_le_bytes());
    header[4..8].copy_from_slice(&seal(cluster, term, position, body).to_le_bytes());
    header[8..16].copy_from_slice(&position.0.to_le_bytes());
    header[16..20].copy_from_slice(&length_of(payload).to_le_bytes());
    header[20] = kind.to_byte();
    header[24..28].copy_from_slice(&body.to_le_bytes());
    header
}

/// The position a slot says it holds, unchecked; of `bytes` as long as a header.
#[must_use]
pub(crate) fn claimed_position(bytes: &[u8]) -> Position {
    Position(long(bytes, 8))
}

/// Header and payload together, unchecked, bytes; of `bytes` as long as a header.
#[must_use]
pub(crate) fn claimed_length(bytes: &[u8]) -> usize {
    SLOT_HEADER_BYTES.saturating_add(word(bytes, 16) as usize)
}

/// Bytes of a slot that are in use, by its header: what has to travel. Rounded up to eight.
#[must_use]
pub fn length(header: &[u8; SLOT_HEADER_BYTES]) -> u64 {
    claimed_length(header).next_multiple_of(8) as u64
}

/// The entry of `position` in a copy of its slot; `None` for a hole: never written, torn, or the
/// slot of another position.
#[must_use]
pub fn decode(cluster: ClusterId, position: Position, bytes: &[u8]) -> Option<Entry<'_>> {
    if bytes.len() < SLOT_HEADER_BYTES || claimed_position(bytes) != position {
        return None;
    }
    let payload = bytes.get(SLOT_HEADER_BYTES..claimed_length(bytes))?;
    let kind = Kind::from_byte(bytes[20])?;
    let (term, body) = (Term(word(bytes, 0)), word(bytes, 24));
    let spelled = bytes[21..24] == [0; 3] && bytes[28..32] == [0; 4];
    let sound = spelled
        && body == body_check(cluster, position, kind, payload)
        && word(bytes, 4) == seal(cluster, term, position, body);
    sound.then_some(Entry { term, position, kind, payload })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CLUSTER: ClusterId = ClusterId(7);

    fn slot(term: u32, position: u64, payload: &[u8]) -> Vec<u8> {
        let head = header(CLUSTER, Term(term), Position(position), Kind::Commands, payload);
        [&head[..], payload].concat()
    }

    #[test]
    fn one_value_under_two_terms_differs_in_one_aligned_word() {
        let (old, new) = (slot(3, 9, b"value"), slot(4, 9, b"value"));
        assert_ne!(old[..8], new[..8]);
        assert_eq!(old[8..], new[8..]);
    }

    #[test]
    fn another_cluster_position_or_length_is_a_hole() {
        let bytes = slot(3, 9, b"value");
        assert_eq!(decode(CLUSTER, Position(9), &bytes).unwrap().payload, b"value");
        assert_eq!(decode(ClusterId(8), Position(9), &bytes), None);
        assert_eq!(decode(CLUSTER, Position(8), &bytes), None);
        assert_eq!(decode(CLUSTER, Position(9), &bytes[..bytes.len() - 1]), None);
        assert_eq!(decode(CLUSTER, Position(0), &[0; 64]), None, "a slot never written");
    }

    proptest! {
        #[test]
        fn a_slot_torn_between_two_values_is_one_of_them_or_a_hole(
            old in proptest::collection::vec(any::<u8>(), 0..80),
            new in proptest::collection::vec(any::<u8>(), 0..80),
            arrived in any::<u32>(),
        ) {
            let (mut old, mut new) = (slot(1, 5, &old), slot(2, 5, &new));
            let length = old.len().max(new.len()).next_multiple_of(8);
            old.resize(length, 0);
            new.resize(length, 0);
            let torn: Vec<u8> = (0..length)
                .map(|at| if arrived >> (at / 8) & 1 == 1 { new[at] } else { old[at] })
                .collect();
            let found = decode(CLUSTER, Position(5), &torn);
            let (was, is) = (decode(CLUSTER, Position(5), &old), decode(CLUSTER, Position(5), &new));
            prop_assert!(
                found.is_none()
                    || found == was
                    || found == is
                    || found.map(|entry| entry.payload) == was.map(|entry| entry.payload)
            );
        }

        #[test]
        fn an_accepted_value_written_again_survives_every_tear(
            payload in proptest::collection::vec(any::<u8>(), 0..80),
            arrived in any::<u32>(),
        ) {
            let (old, new) = (slot(1, 5, &payload), slot(2, 5, &payload));
            let torn: Vec<u8> = (0..old.len())
                .map(|at| if arrived >> (at / 8) & 1 == 1 { new[at] } else { old[at] })
                .collect();
            let found = decode(CLUSTER, Position(5), &torn);
            prop_assert_eq!(found.map(|entry| entry.payload), Some(&payload[..]));
        }

        #[test]
        fn any_bytes_decode_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let position = if bytes.len() >= 16 { claimed_position(&bytes) } else { Position(1) };
            let _ = decode(CLUSTER, position, &bytes);
        }
    }
}
