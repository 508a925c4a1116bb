//! The format of `pool.bee`, byte by byte, as pure functions. `docs/pmem.md` shows the picture.
//!
//! ```text
//! 0      header (128 bytes used)      4096   root words: 64 pairs of 16 bytes, then marks
//! 8192   descriptor 0 (256 bytes): state line | words 0..4 | words 4..8 | reserved
//! 8448   descriptor 1 ...
//! ```
//! Invariants: everything that changes after creation changes by 8-byte stores inside one line.
//! A state word carries its own check, so that one store moves a descriptor from state to state; a
//! second copy behind it lets damage be told from age. A word pair is value, then rotated value.
//! Every page but the header's ends in its mark, so that a page of zeros is no page of free
//! descriptors.

use beeline_wire::crc32c;

/// First bytes of `pool.bee`.
pub const MAGIC: [u8; 8] = *b"BEELPOOL";
/// The format version that this build writes and reads.
pub const VERSION: u32 = 1;
/// Bytes of header page and root page.
pub const PAGE_BYTES: usize = 4096;
/// Encoded header length, checksum included.
pub const HEADER_BYTES: usize = 128;
/// Where the count of descriptors stands (a checked word).
pub const SLOTS_OFFSET: usize = 128;
/// Where root word 0 stands.
pub const ROOT_OFFSET: usize = PAGE_BYTES;
/// Root words.
pub const ROOT_WORDS: usize = 64;
/// Where the mark of a clean end stands (a pair).
pub const CLEAN_OFFSET: usize = ROOT_OFFSET + ROOT_WORDS * PAIR_BYTES;
/// Where descriptor 0 stands.
pub const TABLE_OFFSET: usize = 2 * PAGE_BYTES;
/// Bytes per descriptor.
pub const DESCRIPTOR_BYTES: usize = 256;
/// Bytes per word pair.
pub const PAIR_BYTES: usize = 16;
/// User words per descriptor.
pub const SEGMENT_WORDS: usize = 8;
/// Where the user words of a descriptor start, from its own start.
pub const WORDS_OFFSET: usize = 64;

/// Where the mark of a page stands, from the page's start: a checked word, twice. Behind the words
/// of the page's last descriptor.
const MARK_OFFSET: usize = PAGE_BYTES - 64;
/// What a mark says.
const MARK: u64 = 0x6265_656c_696e;
/// Bit of the header's flags: every page of the table has its mark.
const FLAG_MARKS: u32 = 1;

/// The unchanging part of a pool's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Identity of the pool.
    pub uuid: [u8; 16],
    /// Random bytes made at creation, for keyed checks; never leave the server.
    pub secret: [u8; 16],
    /// Length of every segment.
    pub segment_bytes: u32,
    /// Every page of the table has its mark. False in pools of builds that wrote none.
    pub marks: bool,
}

/// Why bytes are no header of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// Other magic.
    Foreign,
    /// Our magic, another version.
    Version(u32),
    /// The checksum or a field is wrong.
    Damaged,
}

impl Header {
    /// The header as it stands on media.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(PAGE_BYTES as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.uuid);
        bytes[32..48].copy_from_slice(&self.secret);
        bytes[48..52].copy_from_slice(&self.segment_bytes.to_le_bytes());
        bytes[52..56].copy_from_slice(&(DESCRIPTOR_BYTES as u32).to_le_bytes());
        let flags = if self.marks { FLAG_MARKS } else { 0 };
        bytes[56..60].copy_from_slice(&flags.to_le_bytes());
        let check = crc32c(&bytes[..124]);
        bytes[124..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Reads a header; magic first, then version, then checksum and ranges.
    ///
    /// Errors: [`HeaderError`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        if bytes[..8] != MAGIC {
            return Err(HeaderError::Foreign);
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        if crc32c(&bytes[..124]) != u32_at(bytes, 124) {
            return Err(HeaderError::Damaged);
        }
        let header = Self {
            uuid: array_at(bytes, 16),
            secret: array_at(bytes, 32),
            segment_bytes: u32_at(bytes, 48),
            marks: u32_at(bytes, 56) & FLAG_MARKS != 0,
        };
        let fits = (crate::options::MIN_SEGMENT_BYTES..=crate::options::MAX_SEGMENT_BYTES)
            .contains(&header.segment_bytes)
            && header.segment_bytes.is_multiple_of(4096)
            && u32_at(bytes, 52) as usize == DESCRIPTOR_BYTES;
        if fits { Ok(header) } else { Err(HeaderError::Damaged) }
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

const PAYLOAD_BITS: u32 = 48;
const PAYLOAD_MASK: u64 = (1 << PAYLOAD_BITS) - 1;

/// A word of 48 payload bits under a 16-bit check that also covers `place` (so that a word copied
/// to the wrong place is noticed). Payload 0 at any place may also be the all-zero word.
#[must_use]
pub fn checked_word(payload: u64, place: u32) -> u64 {
    assert!(payload <= PAYLOAD_MASK, "a checked word carries 48 bits");
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&payload.to_le_bytes());
    bytes[8..].copy_from_slice(&place.to_le_bytes());
    let crc = crc32c(&bytes);
    payload | u64::from((crc >> 16) ^ (crc & 0xffff)) << PAYLOAD_BITS
}

/// The payload of a checked word, if the check holds.
#[must_use]
pub fn check_word(word: u64, place: u32) -> Option<u64> {
    let payload = word & PAYLOAD_MASK;
    (word == 0 || checked_word(payload, place) == word).then_some(payload)
}

/// State of one descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// A segment belongs to it.
    pub in_use: bool,
    /// A peer may hold a writable mapping.
    pub shared: bool,
    /// How often the descriptor was allocated; 40 bits.
    pub generation: u64,
}

/// Largest generation.
pub const MAX_GENERATION: u64 = (1 << 40) - 1;

impl State {
    /// The state as one checked word for descriptor `id`.
    #[must_use]
    pub fn encode(self, id: u32) -> u64 {
        assert!(self.generation <= MAX_GENERATION, "a generation has 40 bits");
        let flags = u64::from(self.in_use) | u64::from(self.shared) << 1;
        checked_word(self.generation | flags << 40, id)
    }

    /// Reads a state word of descriptor `id`; none when its check fails.
    #[must_use]
    pub fn decode(word: u64, id: u32) -> Option<Self> {
        let payload = check_word(word, id)?;
        let flags = payload >> 40;
        (flags < 4).then_some(Self {
            in_use: flags & 1 != 0,
            shared: flags & 2 != 0,
            generation: payload & MAX_GENERATION,
        })
    }
}

/// The second word of a pair that holds `value`.
#[must_use]
pub fn guard(value: u64) -> u64 {
    value.rotate_left(23)
}

/// Where descriptor `id` starts.
#[must_use]
pub fn descriptor_offset(id: u32) -> usize {
    TABLE_OFFSET + id as usize * DESCRIPTOR_BYTES
}

/// Where user word `index` of descriptor `id` stands.
#[must_use]
pub fn word_offset(id: u32, index: usize) -> usize {
    assert!(index < SEGMENT_WORDS, "a segment has 8 user words");
    descriptor_offset(id) + WORDS_OFFSET + index * PAIR_BYTES
}

/// Where root word `index` stands.
#[must_use]
pub fn root_offset(index: usize) -> usize {
    assert!(index < ROOT_WORDS, "a pool has 64 root words");
    ROOT_OFFSET + index * PAIR_BYTES
}

/// Where the mark of page `page` stands, and the word it is, twice in a row.
#[must_use]
pub fn page_mark(page: usize) -> (usize, u64) {
    let place = (page as u32) | 1 << 31;
    (page * PAGE_BYTES + MARK_OFFSET, checked_word(MARK, place))
}

/// The pages that have a mark in a file of `bytes`.
pub fn marked_pages(bytes: usize) -> std::ops::Range<usize> {
    1..bytes / PAGE_BYTES
}

/// The page that descriptor `id` lies in.
#[must_use]
pub fn page_of(id: u32) -> usize {
    descriptor_offset(id) / PAGE_BYTES
}

/// Length of `pool.bee` for `slots` descriptors, in whole pages.
#[must_use]
pub fn file_bytes(slots: u32) -> usize {
    (TABLE_OFFSET + slots as usize * DESCRIPTOR_BYTES).next_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header { uuid: [1; 16], secret: [2; 16], segment_bytes: 64 << 10, marks: true }
    }

    #[test]
    fn a_header_reads_back() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    #[test]
    fn any_flipped_bit_of_a_header_is_noticed() {
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn any_flipped_bit_of_a_state_word_is_noticed() {
        let state = State { in_use: true, shared: false, generation: 77 };
        let word = state.encode(5);
        assert_eq!(State::decode(word, 5), Some(state));
        assert_eq!(State::decode(word, 6), None, "a word in the wrong place");
        for bit in 0..64 {
            assert_eq!(State::decode(word ^ 1 << bit, 5), None, "bit {bit}");
        }
    }

    #[test]
    fn a_fresh_descriptor_is_free() {
        assert_eq!(State::decode(0, 9), Some(State::default()));
    }

    #[test]
    fn descriptors_and_pairs_stay_inside_their_lines() {
        for id in [0, 1, 77] {
            assert!(descriptor_offset(id).is_multiple_of(64));
            for index in 0..SEGMENT_WORDS {
                let at = word_offset(id, index);
                assert_eq!(at / 64, (at + PAIR_BYTES - 1) / 64);
                assert!(at < descriptor_offset(id + 1));
            }
        }
        const { assert!(CLEAN_OFFSET + PAIR_BYTES <= TABLE_OFFSET) }
        // The mark of a page lies behind the words of its last descriptor, and behind the roots.
        let words_end = word_offset(15, SEGMENT_WORDS - 1) + PAIR_BYTES;
        assert_eq!(page_of(15), 2);
        assert!(words_end <= page_mark(2).0 && page_mark(2).0 + 16 <= descriptor_offset(16));
        assert!(CLEAN_OFFSET + PAIR_BYTES <= page_mark(1).0);
        assert_eq!(marked_pages(file_bytes(17)), 1..4);
    }
}
