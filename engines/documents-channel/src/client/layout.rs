//! Where what lies in the region of a client that its server may write.

use super::ClientOptions;
use crate::message::SLOT_BYTES;

/// A destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) large: bool,
    pub(super) buffer: u16,
}

/// Where what lies in the region a server may write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(super) small: u64,
    small_bytes: u64,
    pub(super) small_count: u16,
    large: u64,
    large_bytes: u64,
    pub(super) large_count: u16,
    pub(crate) bytes: u64,
}

impl Layout {
    /// Ring, small destinations, large destinations that share `size` bytes.
    pub(crate) fn new(options: &ClientOptions, size: u64) -> Self {
        let small = u64::from(options.slots) * SLOT_BYTES as u64;
        let small_bytes = u64::from(options.small_bytes).next_multiple_of(64);
        let large = (small + small_bytes * u64::from(options.outstanding)).next_multiple_of(4096);
        let large_bytes = size / u64::from(options.large_buffers) / 64 * 64;
        Self {
            small,
            small_bytes,
            small_count: options.outstanding,
            large,
            large_bytes,
            large_count: options.large_buffers,
            bytes: large + large_bytes * u64::from(options.large_buffers),
        }
    }

    /// Where a destination is, and its bytes.
    pub(super) fn of(&self, place: Place) -> (u64, u64) {
        let (start, bytes) = match place.large {
            true => (self.large, self.large_bytes),
            false => (self.small, self.small_bytes),
        };
        (start + u64::from(place.buffer) * bytes, bytes)
    }
}
