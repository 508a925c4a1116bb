//! Bounded codecs and checksums.
//!
//! - [`checksum`]: CRC-32C, the checksum of every format of ours.

pub mod checksum;

pub use checksum::{crc32c, crc32c_append, crc32c_joined};
