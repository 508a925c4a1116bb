//! How a window is divided between partitions: the same in both directions and at both ends.
//!
//! ```text
//!    0  the link's registers, 4096 bytes (`beeline_ntb::link`)
//! 4096  partition 0:   0  how far the writer has read the data ring that leads the other way, 8
//!                     64  the same of the control ring, 8
//!                    128  rest: odd while the writer's thread sleeps or is about to, 8
//!                    192  the rest of the reader that the writer has seen, 8
//!                    256  control ring: slots of 16 bytes
//!                         data ring: slots of `slot_bytes`
//!       partition 1 ...
//! ```
//!
//! Everything begins at a cache line. A ring's length is a power of two.

use beeline_ntb::Announcement;
use beeline_ntb::link::REGISTERS_BYTES;
use beeline_sockets::packets::channel::{BLOCKS, Shape};

/// Version of this layout and of the packets' headers.
pub const VERSION: u64 = 1;
/// Bytes of a slot of a control ring.
pub const CONTROL_SLOT_BYTES: usize = 16;
/// Bytes of a partition's words.
const WORDS_BYTES: usize = 256;
/// Most partitions of a window: as many doorbells as there are beside the link's.
pub const MOST_PARTITIONS: usize = 8;
/// Least slots of a ring.
const LEAST_SLOTS: usize = 8;
/// Names of an announcement's words, for a refusal.
const NAMES: [&str; 6] = [
    "version of the layout",
    "partitions",
    "bytes of a slot",
    "bytes of a data ring",
    "bytes of a control ring",
    "blocks of a queue",
];

/// Where the words of a partition lie.
pub mod at {
    /// How far the data ring was read.
    pub const READ: usize = 0;
    /// How far the control ring was read.
    pub const CONTROL_READ: usize = 64;
    /// The writer's rest.
    pub const REST: usize = 128;
    /// The reader's rest, as seen.
    pub const REST_SEEN: usize = 192;
}

/// How a window is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Partitions.
    pub partitions: usize,
    /// Bytes of a slot of a data ring, and of a block: a packet with its header.
    pub slot_bytes: usize,
    /// Bytes of a data ring.
    pub ring_bytes: usize,
    /// Bytes of a control ring.
    pub control_bytes: usize,
    /// Blocks of each direction of a connection, and so the packets that may be under way.
    pub blocks: usize,
}

/// Why a window cannot be divided so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A number is out of bounds.
    #[error("{name} = {value}: {wanted}")]
    Bounds {
        /// Which.
        name: &'static str,
        /// As given.
        value: usize,
        /// What is right.
        wanted: &'static str,
    },
    /// The window is too small.
    #[error(
        "a window of {window_bytes} bytes each way holds no {partitions} partitions with rings of \
         at least {LEAST_SLOTS} slots of {slot_bytes} bytes: a larger window, fewer partitions or smaller slots"
    )]
    TooSmall {
        /// Bytes of each direction.
        window_bytes: usize,
        /// As asked for.
        partitions: usize,
        /// As asked for.
        slot_bytes: usize,
    },
}

impl Geometry {
    /// Divides a window with `window_bytes` each way, with the longest rings that fit.
    ///
    /// Errors: [`GeometryError`].
    pub fn dividing(
        window_bytes: usize,
        partitions: usize,
        slot_bytes: usize,
        blocks: usize,
    ) -> Result<Self, GeometryError> {
        let bounds = |name, value, wanted| Err(GeometryError::Bounds { name, value, wanted });
        if !(1..=MOST_PARTITIONS).contains(&partitions) {
            return bounds("partitions", partitions, "1 to 8");
        }
        if !(Shape { block_bytes: slot_bytes, blocks: *BLOCKS.start() }).is_valid() {
            return bounds("slot bytes", slot_bytes, "a power of two from 64 to 32768");
        }
        if !(Shape { block_bytes: slot_bytes, blocks }).is_valid() {
            return bounds("queue blocks", blocks, "a power of two from 4 to 16384");
        }
        let small = GeometryError::TooSmall { window_bytes, partitions, slot_bytes };
        let each = window_bytes.saturating_sub(REGISTERS_BYTES) / partitions;
        let rings = each.checked_sub(WORDS_BYTES).ok_or(small)?;
        let control_bytes = (rings / 32).clamp(1024, 64 << 10);
        let control_bytes = 1 << control_bytes.ilog2();
        let rest = rings.saturating_sub(control_bytes);
        let ring_bytes = rest.checked_ilog2().map_or(0, |bits| 1_usize << bits).min(64 << 20);
        if ring_bytes / slot_bytes < LEAST_SLOTS {
            return Err(small);
        }
        Ok(Self { partitions, slot_bytes, ring_bytes, control_bytes, blocks })
    }

    /// The same with data rings of at most so many bytes. A ring need not hold what is under way of many connections,
    /// since blocks do; one that the caches of both hosts hold is faster.
    ///
    /// Errors: [`GeometryError::Bounds`]: such a ring has too few slots.
    pub fn with_rings_of(self, most: usize) -> Result<Self, GeometryError> {
        let most = most.checked_ilog2().map_or(0, |bits| 1_usize << bits);
        let ring_bytes = self.ring_bytes.min(most);
        if ring_bytes / self.slot_bytes < LEAST_SLOTS {
            let wanted = "room for eight slots and more";
            return Err(GeometryError::Bounds { name: "ring bytes", value: most, wanted });
        }
        Ok(Self { ring_bytes, ..self })
    }

    /// As the link announces it.
    #[must_use]
    pub fn announcement(&self) -> Announcement {
        let words =
            [self.partitions, self.slot_bytes, self.ring_bytes, self.control_bytes, self.blocks];
        let mut announced = [0; 8];
        announced[0] = VERSION;
        for (place, word) in announced[1..].iter_mut().zip(words) {
            *place = word as u64;
        }
        announced
    }

    /// What the word at `place` of an announcement is.
    #[must_use]
    pub fn name_of(place: Option<usize>) -> &'static str {
        match place {
            None => "version of the link",
            Some(place) => NAMES.get(place).copied().unwrap_or("word without a name"),
        }
    }

    /// Where a partition begins in the window, and how long it is.
    #[must_use]
    pub fn partition(&self, index: usize) -> (usize, usize) {
        let length = WORDS_BYTES + self.control_bytes + self.ring_bytes;
        (REGISTERS_BYTES + index * length, length)
    }

    /// Where the control ring begins in a partition.
    #[must_use]
    pub fn control_at(&self) -> usize {
        WORDS_BYTES
    }

    /// Where the data ring begins in a partition.
    #[must_use]
    pub fn ring_at(&self) -> usize {
        WORDS_BYTES + self.control_bytes
    }

    /// Of a connection's memory.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { block_bytes: self.slot_bytes, blocks: self.blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_division_fits_its_window_and_its_rings_are_powers_of_two() {
        for window in [64 << 10, 1 << 20, 32 << 20, 600 << 20] {
            for partitions in 1..=MOST_PARTITIONS {
                for slot_bytes in [64, 1024, 4096] {
                    let Ok(geometry) = Geometry::dividing(window, partitions, slot_bytes, 64)
                    else {
                        assert!(window / partitions < 20 * slot_bytes, "{window} {partitions}");
                        continue;
                    };
                    let (at, length) = geometry.partition(partitions - 1);
                    assert!(at + length <= window);
                    assert!(at.is_multiple_of(64) && geometry.ring_at().is_multiple_of(64));
                    assert!(geometry.ring_bytes.is_power_of_two());
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_its_name() {
        let said = |window, partitions, slot, blocks| {
            Geometry::dividing(window, partitions, slot, blocks).unwrap_err().to_string()
        };
        assert!(said(1 << 20, 9, 1024, 64).contains("partitions = 9"));
        assert!(said(1 << 20, 1, 1000, 64).contains("slot bytes = 1000"));
        assert!(said(1 << 20, 1, 1024, 65).contains("queue blocks = 65"));
        assert!(said(64 << 10, 8, 4096, 64).contains("8 partitions"));
        let whole = Geometry::dividing(32 << 20, 1, 4096, 64).unwrap();
        assert_eq!(whole.with_rings_of(3 << 20).unwrap().ring_bytes, 2 << 20);
        assert_eq!(whole.with_rings_of(1 << 30), Ok(whole));
        assert!(
            whole.with_rings_of(16_384).unwrap_err().to_string().contains("ring bytes = 16384")
        );
    }
}
