//! The bytes of a window. Pure.
//!
//! Each side of a link has one inbound window, written by the peer and read here. Both have the
//! same shape:
//!
//! ```text
//!    0   16 scratchpads, a u32 in a word of 8 bytes each:
//!          0 magic "BNT2"   1 geometry   2 epoch   3 seen   4 heartbeat   8..12 node
//! 4096   one line of 64 bytes for each partition:
//!          0 tail u64    bytes the peer has put into this partition's ring here, ever
//!          8 head u64    bytes the peer has taken from this partition's ring at its side, ever
//!         16 state u64   generation << 8 | 0 closed, 1 open, 2 open but finished sending
//!    …   one ring for each partition
//! ```
//!
//! All little endian, as the processors are. Every word has one writer, the peer; the head here is
//! the shadow of the peer's reading position, so that a producer never reads across the link
//! (NTSocks 3.2). Each is written with one aligned store, after a fence behind what it announces.

/// Scratchpad registers.
pub(crate) const SCRATCHPADS: usize = 16;
/// What the first scratchpad says of a side that is there.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"BNT2");
/// Scratchpad of the magic.
pub(crate) const PAD_MAGIC: usize = 0;
/// Of [`Geometry::code`].
pub(crate) const PAD_GEOMETRY: usize = 1;
/// Of the writer's epoch: random, another one in each life of the link.
pub(crate) const PAD_EPOCH: usize = 2;
/// Of the reader's epoch, as the writer last saw it.
pub(crate) const PAD_SEEN: usize = 3;
/// Counts up while the writer lives.
pub(crate) const PAD_HEARTBEAT: usize = 4;
/// First of four: the writer's node.
pub(crate) const PAD_NODE: usize = 8;

/// Bytes of one scratchpad.
pub(crate) const PAD_BYTES: usize = 8;
/// First partition line.
pub(crate) const LINES_AT: usize = 4096;
/// Bytes of a line: one cache line, so that partitions share none.
pub(crate) const LINE_BYTES: usize = 64;
/// In a line.
pub(crate) const TAIL: usize = 0;
/// In a line.
pub(crate) const HEAD: usize = 8;
/// In a line.
pub(crate) const STATE: usize = 16;

const _: () = assert!(SCRATCHPADS * PAD_BYTES <= LINES_AT, "scratchpads end before the lines");
const _: () = assert!(PAD_NODE + 4 <= SCRATCHPADS, "the node's name fits the scratchpads");
const _: () = assert!(STATE + 8 <= LINE_BYTES, "a line holds its words");

/// How a window is divided; the same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    ring_log2: u32,
    partitions_log2: u32,
}

impl Geometry {
    /// Ring sizes, as powers of two.
    const RING: std::ops::RangeInclusive<u32> = 12..=26;
    /// Numbers of partitions, as powers of two: one for each end to open, at least.
    const PARTITIONS: std::ops::RangeInclusive<u32> = 1..=10;

    /// Rings of `ring_bytes` and as many partitions, up to `partitions`, as `window_bytes` holds.
    /// `None` when that is not even two.
    pub(crate) fn fitting(
        ring_bytes: usize,
        partitions: usize,
        window_bytes: usize,
    ) -> Option<Self> {
        let ring_log2 = ring_bytes.checked_ilog2()?.clamp(*Self::RING.start(), *Self::RING.end());
        let most = partitions.checked_ilog2()?.clamp(*Self::PARTITIONS.start(), 10);
        (*Self::PARTITIONS.start()..=most)
            .rev()
            .map(|partitions_log2| Self { ring_log2, partitions_log2 })
            .find(|geometry| geometry.window_bytes() <= window_bytes)
    }

    /// As the peer reads it in a scratchpad.
    pub(crate) fn code(self) -> u32 {
        1 << 16 | self.ring_log2 << 8 | self.partitions_log2
    }

    /// What a peer's code means; `None` for one no honest peer has.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        let geometry = Self { ring_log2: code >> 8 & 0xff, partitions_log2: code & 0xff };
        let valid = geometry.code() == code
            && Self::RING.contains(&geometry.ring_log2)
            && Self::PARTITIONS.contains(&geometry.partitions_log2);
        valid.then_some(geometry)
    }

    /// Bytes of one ring, a power of two.
    pub(crate) fn ring_bytes(self) -> usize {
        1 << self.ring_log2
    }

    /// Partitions of one window, a power of two.
    pub(crate) fn partitions(self) -> usize {
        1 << self.partitions_log2
    }

    /// Where the line of a partition lies.
    pub(crate) fn line(self, partition: usize) -> usize {
        assert!(partition < self.partitions(), "a partition of the window");
        LINES_AT + partition * LINE_BYTES
    }

    /// Where the ring of a partition lies.
    pub(crate) fn ring(self, partition: usize) -> usize {
        assert!(partition < self.partitions(), "a partition of the window");
        let lines = (self.partitions() * LINE_BYTES).next_multiple_of(4096);
        LINES_AT + lines + partition * self.ring_bytes()
    }

    /// Bytes a window needs.
    pub(crate) fn window_bytes(self) -> usize {
        self.ring(self.partitions() - 1) + self.ring_bytes()
    }
}

/// What one end says of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not in use; nothing more is written for this generation.
    Closed,
    /// In use.
    Open,
    /// In use, but no byte follows the tail.
    Finished,
}

/// A partition's state word: which use of the partition, and how it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// Uses are numbered from 1; 0 is the state of a fresh window.
    pub(crate) generation: u64,
    /// How it stands.
    pub(crate) phase: Phase,
}

impl State {
    pub(crate) fn encode(self) -> u64 {
        let phase = match self.phase {
            Phase::Closed => 0,
            Phase::Open => 1,
            Phase::Finished => 2,
        };
        self.generation << 8 | phase
    }

    /// How the use numbered `generation` stands, if the word speaks of that one.
    pub(crate) fn opens(self, generation: u64) -> Option<Phase> {
        (self.generation == generation).then_some(self.phase)
    }

    /// `None` for a word no honest peer writes.
    pub(crate) fn decode(word: u64) -> Option<Self> {
        let phase = match word & 0xff {
            0 => Phase::Closed,
            1 => Phase::Open,
            2 => Phase::Finished,
            _ => return None,
        };
        Some(Self { generation: word >> 8, phase })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_parts_of_a_window_do_not_overlap(
            ring in 1_usize..1 << 20,
            partitions in 2_usize..256,
            window in 0_usize..64 << 20,
        ) {
            let Some(geometry) = Geometry::fitting(ring, partitions, window) else {
                return Ok(());
            };
            prop_assert!(geometry.window_bytes() <= window);
            let last = geometry.partitions() - 1;
            prop_assert!(geometry.line(last) + LINE_BYTES <= geometry.ring(0));
            prop_assert_eq!(geometry.ring(1) - geometry.ring(0), geometry.ring_bytes());
            prop_assert_eq!(Geometry::from_code(geometry.code()), Some(geometry));
        }

        #[test]
        fn any_geometry_word_is_refused_or_has_one_spelling(code in any::<u32>()) {
            if let Some(geometry) = Geometry::from_code(code) {
                prop_assert_eq!(geometry.code(), code);
                prop_assert!(geometry.window_bytes() > 0);
            }
        }

        #[test]
        fn any_state_word_is_refused_or_has_one_spelling(word in any::<u64>()) {
            if let Some(state) = State::decode(word) {
                prop_assert_eq!(state.encode(), word);
            }
        }
    }
}
