//! Where things stand in a server's memory, and the control words, byte by byte.
//!
//! Three pieces of memory with different rights:
//!
//! ```text
//! log region     written and read by the present leader alone
//!        0  header: magic, version, geometry, cluster       written when made
//!       64  commit word                                     written by the leader
//!       72  retired word                                    written by the owner, never by a peer
//!     4096  slots; position p stands in slot p mod slots
//! status words   read by every member
//!        0  term u32, beats u32: a leader's sign of life; elsewhere 0, and the beats it saw last
//!        8  snapshot: the position up to which slots may be overwritten
//! vote word      no remote rights
//!        term u32, candidate + 1 u16 (0: none), check u16
//! ```
//!
//! Every control word is eight aligned bytes, so a loss of power leaves the old one or the new
//! one. The address of a slot is a function of its position alone: a leader knows where an entry
//! stands in every follower's region without asking.

use beeline_wire::checksum::crc32c;

use crate::ids::{ClusterId, NodeId, Position, Term};
use crate::memory::LogMemory;
use crate::slot::SLOT_HEADER_BYTES;

const MAGIC: [u8; 8] = *b"BEELLOG\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;
const COMMIT_OFFSET: u64 = 64;
const RETIRED_OFFSET: u64 = 72;
const FIRST_SLOT_OFFSET: u64 = 4096;
/// A commit word's payload; the upper 16 bits are its check.
const COMMIT_BITS: u32 = 48;

/// Why a log region cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Slots must be a power of two, 8 to 2^24; their bytes a multiple of 64, 128 to 2^24.
    #[error(
        "{slots} slots of {slot_bytes} bytes: slots must be a power of two from 8 to 2^24, bytes a multiple of 64 from 128 to 2^24"
    )]
    Geometry {
        /// As asked for.
        slots: u64,
        /// As asked for.
        slot_bytes: u64,
    },
    /// The region does not hold a log.
    #[error("the region does not begin with a log's header")]
    Foreign,
    /// The region holds a log of another format.
    #[error("the log has format version {found}, this program knows {VERSION}")]
    Version {
        /// As read.
        found: u32,
    },
    /// The header fails its checksum.
    #[error("the log's header is damaged")]
    Damaged,
    /// The log belongs to another cluster.
    #[error("the log belongs to cluster {found:016x}, not {wanted:016x}")]
    Cluster {
        /// As read.
        found: u64,
        /// As configured.
        wanted: u64,
    },
    /// The log was made with another geometry, which every member shares.
    #[error("the log has {slots} slots of {slot_bytes} bytes, the cluster another geometry")]
    OtherGeometry {
        /// As read.
        slots: u64,
        /// As read.
        slot_bytes: u64,
    },
    /// The vote word fails its check: the server no longer knows whom it promised what.
    #[error("the vote word is damaged: the server must be replaced by a new member")]
    Vote,
}

impl LayoutError {
    /// Never: each needs other configuration or another disk.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }
}

/// Geometry of a log; the same at every member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    slots: u64,
    slot_bytes: u64,
}

impl Layout {
    /// `slots` of `slot_bytes` each.
    ///
    /// Errors: [`LayoutError::Geometry`].
    pub fn new(slots: u64, slot_bytes: u64) -> Result<Self, LayoutError> {
        let slots_fit = slots.is_power_of_two() && (8..=1 << 24).contains(&slots);
        let bytes_fit = slot_bytes.is_multiple_of(64) && (128..=1 << 24).contains(&slot_bytes);
        if slots_fit && bytes_fit {
            Ok(Self { slots, slot_bytes })
        } else {
            Err(LayoutError::Geometry { slots, slot_bytes })
        }
    }

    /// Slots of the ring.
    #[must_use]
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// Bytes from one slot to the next.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Most payload bytes of one entry.
    #[must_use]
    pub fn max_payload_bytes(&self) -> usize {
        self.slot_bytes as usize - SLOT_HEADER_BYTES
    }

    /// Length of a log region.
    #[must_use]
    pub fn region_bytes(&self) -> u64 {
        FIRST_SLOT_OFFSET + self.slots * self.slot_bytes
    }

    /// Where the slot of `position` begins in a log region.
    #[must_use]
    pub fn slot_offset(&self, position: Position) -> u64 {
        FIRST_SLOT_OFFSET + (position.0 & (self.slots - 1)) * self.slot_bytes
    }

    /// Where the commit word stands in a log region.
    #[must_use]
    pub fn commit_offset(&self) -> u64 {
        COMMIT_OFFSET
    }

    /// Where the retired word stands in a log region, behind the commit word: one READ fetches both.
    ///
    /// A server that finds memory of an earlier run stores 1 here *before* it moves the contents to
    /// a backing that no peer has mapped, and 0 in the new one. A peer of the earlier run may still
    /// copy into the old backing, and everything there succeeds; it looks at this word behind its
    /// copies, and counts nothing where it is not 0.
    #[must_use]
    pub fn retired_offset(&self) -> u64 {
        RETIRED_OFFSET
    }

    fn header(&self, cluster: ClusterId) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..20].copy_from_slice(&self.slots.to_le_bytes());
        header[20..28].copy_from_slice(&self.slot_bytes.to_le_bytes());
        header[28..36].copy_from_slice(&cluster.0.to_le_bytes());
        let check = crc32c(&header[..36]);
        header[36..].copy_from_slice(&check.to_le_bytes());
        header
    }

    /// Stores the header of an empty log. The caller persists it.
    pub fn format(&self, cluster: ClusterId, memory: &mut impl LogMemory) {
        memory.store(0, &self.header(cluster));
    }

    /// Checks that `memory` holds a log of this geometry and cluster.
    ///
    /// Errors: [`LayoutError`], one per reason.
    pub fn check(&self, cluster: ClusterId, memory: &impl LogMemory) -> Result<(), LayoutError> {
        let mut found = [0; HEADER_BYTES];
        memory.load(0, &mut found);
        if found == self.header(cluster) {
            return Ok(());
        }
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&found[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let version = long(8) as u32;
        let check = (long(32) >> 32) as u32;
        if found[..8] != MAGIC {
            Err(LayoutError::Foreign)
        } else if version != VERSION {
            Err(LayoutError::Version { found: version })
        } else if check != crc32c(&found[..36]) {
            Err(LayoutError::Damaged)
        } else if long(28) != cluster.0 {
            Err(LayoutError::Cluster { found: long(28), wanted: cluster.0 })
        } else {
            Err(LayoutError::OtherGeometry { slots: long(12), slot_bytes: long(20) })
        }
    }
}

/// The low 16 bits of a CRC-32C folded once.
fn fold(bytes: &[u8]) -> u16 {
    let check = crc32c(bytes);
    (check >> 16) as u16 ^ check as u16
}

/// The commit word for `position`.
#[must_use]
pub fn commit_word(position: Position) -> u64 {
    assert!(position.0 < 1 << COMMIT_BITS, "positions fit a commit word: 2^48 last for decades");
    u64::from(fold(&position.0.to_le_bytes())) << COMMIT_BITS | position.0
}

/// The position of a commit word; `None` when its check fails. The zero word of a new log is
/// [`Position::NONE`].
#[must_use]
pub fn commit_position(word: u64) -> Option<Position> {
    let position = Position(word & ((1 << COMMIT_BITS) - 1));
    (word == 0 || word == commit_word(position)).then_some(position)
}

/// The vote word for a promise to `term`, and the candidate that got the vote.
#[must_use]
pub fn vote_word(term: Term, voted_for: Option<NodeId>) -> u64 {
    let candidate = voted_for.map_or(0, |id| {
        assert!(id.0 < u16::MAX, "node ids are below 65535");
        u64::from(id.0) + 1
    });
    let payload = u64::from(term.0) | candidate << 32;
    payload | u64::from(fold(&payload.to_le_bytes())) << 48
}

/// Term and candidate of a vote word; `None` when its check fails. The zero word of a new server
/// is term 0 without a vote.
#[must_use]
pub fn vote(word: u64) -> Option<(Term, Option<NodeId>)> {
    let term = Term(word as u32);
    let candidate = (word >> 32) as u16;
    let voted_for = candidate.checked_sub(1).map(NodeId);
    (word == 0 || word == vote_word(term, voted_for)).then_some((term, voted_for))
}

/// What a server shows to every member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The term it leads; 0 when it does not.
    pub term: Term,
    /// Grows while it leads and runs; elsewhere those that it saw of the leader it follows.
    pub beats: u32,
    /// Slots up to here may be overwritten: a snapshot covers them.
    pub snapshot: Position,
    /// Its state machine is about to have no room; at a leader, that of any member it reaches.
    pub short: bool,
    /// It has nothing to do: a leader's beats stand still, and a follower looks at none.
    pub rests: bool,
}

/// In the word of the snapshot's position, which needs 48 bits.
const SHORT: u64 = 1 << 63;
const RESTS: u64 = 1 << 62;

impl Status {
    /// Bytes of the status words.
    pub const BYTES: usize = 16;

    /// The words as they stand in memory, each eight aligned bytes.
    #[must_use]
    pub fn words(&self) -> [u64; 2] {
        let short = if self.short { SHORT } else { 0 };
        let rests = if self.rests { RESTS } else { 0 };
        [u64::from(self.term.0) | u64::from(self.beats) << 32, self.snapshot.0 | short | rests]
    }

    /// From the words of a peer.
    #[must_use]
    pub fn from_words(words: [u64; 2]) -> Self {
        Self {
            term: Term(words[0] as u32),
            beats: (words[0] >> 32) as u32,
            snapshot: Position(words[1] & !(SHORT | RESTS)),
            short: words[1] & SHORT != 0,
            rests: words[1] & RESTS != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HeapMemory;

    const CLUSTER: ClusterId = ClusterId(0xbee);

    #[test]
    fn a_slots_address_depends_on_its_position_alone() {
        let layout = Layout::new(8, 128).unwrap();
        assert_eq!(layout.slot_offset(Position(1)), 4096 + 128);
        assert_eq!(layout.slot_offset(Position(8)), 4096);
        assert_eq!(layout.slot_offset(Position(9)), layout.slot_offset(Position(1)));
        assert_eq!(layout.region_bytes(), 4096 + 8 * 128);
        for (slots, bytes) in [(7, 128), (4, 128), (8, 100), (8, 64), (1 << 25, 128)] {
            assert!(Layout::new(slots, bytes).is_err(), "{slots} of {bytes}");
        }
    }

    #[test]
    fn a_log_of_another_cluster_format_or_geometry_is_named() {
        let layout = Layout::new(8, 128).unwrap();
        let mut memory = HeapMemory::new(layout.region_bytes());
        assert_eq!(layout.check(CLUSTER, &memory), Err(LayoutError::Foreign));
        layout.format(CLUSTER, &mut memory);
        assert_eq!(layout.check(CLUSTER, &memory), Ok(()));
        let other = layout.check(ClusterId(1), &memory);
        assert_eq!(other, Err(LayoutError::Cluster { found: 0xbee, wanted: 1 }));
        let wider = Layout::new(16, 128).unwrap().check(CLUSTER, &memory);
        assert_eq!(wider, Err(LayoutError::OtherGeometry { slots: 8, slot_bytes: 128 }));
        memory.store(20, &[1]);
        assert_eq!(layout.check(CLUSTER, &memory), Err(LayoutError::Damaged));
        memory.store(8, &[9]);
        assert_eq!(layout.check(CLUSTER, &memory), Err(LayoutError::Version { found: 9 }));
    }

    #[test]
    fn control_words_come_back_and_a_flipped_bit_is_noticed() {
        for position in [0, 1, 77, (1 << 48) - 1] {
            let word = commit_word(Position(position));
            assert_eq!(commit_position(word), Some(Position(position)));
            for bit in 0..64 {
                let found = commit_position(word ^ 1 << bit);
                assert!(found.is_none() || word ^ 1 << bit == 0, "{position}, bit {bit}");
            }
        }
        for candidate in [None, Some(NodeId(0)), Some(NodeId(65_534))] {
            let word = vote_word(Term(9), candidate);
            assert_eq!(vote(word), Some((Term(9), candidate)));
            for bit in 0..64 {
                assert_eq!(vote(word ^ 1 << bit), None, "{candidate:?}, bit {bit}");
            }
        }
        assert_eq!(vote(0), Some((Term(0), None)));
        assert_eq!(commit_position(0), Some(Position::NONE));
        for (short, rests) in [(false, false), (false, true), (true, false), (true, true)] {
            let status = Status { term: Term(3), beats: 9, snapshot: Position(12), short, rests };
            assert_eq!(Status::from_words(status.words()), status);
        }
    }
}
