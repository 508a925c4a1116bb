//! Readers of fields at fixed places, for the formats of providers: connection data, greetings, frames.
//!
//! The lengths are the format's and known before anything is read: what a peer says about lengths is for
//! checked decoding, and not for these.

/// `N` bytes from `at` on, for `from_le_bytes` and the like.
///
/// Panics where the format's length does not reach so far: a mistake in the reader, never the peer's.
#[inline]
#[must_use]
pub fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}
