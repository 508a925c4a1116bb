//! The rings alone, without sockets around them: what benchmarks hold the sockets against.

use beeline_os::Mapping;
use beeline_os::mapping::Protection;

use crate::ring::Corrupt;
use crate::segment::{Segment, length_bytes};

/// One end of a segment of its own. It is used by one thread at a time, since its calls take it
/// mutably: no half is held.
#[derive(Debug)]
pub struct BareEnd(Segment);

impl BareEnd {
    /// Both ends of a fresh segment with rings of `ring_bytes`, a power of two from 4096.
    ///
    /// Errors: the kernel's; `InvalidInput` for another length.
    pub fn pair(ring_bytes: usize) -> std::io::Result<[Self; 2]> {
        let length = length_bytes(ring_bytes);
        let fail = std::io::Error::other::<Box<dyn std::error::Error + Send + Sync>>;
        let one = Mapping::memfd("beeline-bare", length).map_err(|error| fail(error.into()))?;
        Segment::format(&one).map_err(|error| fail(error.into()))?;
        let copy = one.descriptor().ok_or(std::io::ErrorKind::InvalidInput)?.try_clone()?;
        let other = Mapping::shared(copy, length, Protection::ReadWrite);
        let other = other.map_err(|error| fail(error.into()))?;
        let end = |mapping, side| Segment::take(mapping, side).map(Self);
        let one = end(one, 0).map_err(|error| fail(error.into()))?;
        Ok([one, end(other, 1).map_err(|error| fail(error.into()))?])
    }

    /// Sends as much of `bytes` as there is room for, and says how much.
    ///
    /// Errors: [`Corrupt`].
    #[inline]
    pub fn push(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        // SAFETY: a slice is readable; `self` is the only user of this end's sending half.
        unsafe { self.0.producer().push(bytes.as_ptr(), bytes.len()) }
    }

    /// Receives what there is, as far as `bytes` has room, and says how much.
    ///
    /// Errors: [`Corrupt`].
    #[inline]
    pub fn pop(&mut self, bytes: &mut [u8]) -> Result<usize, Corrupt> {
        let consumer = self.0.consumer();
        // SAFETY: a slice is writable; `self` is the only user of this end's receiving half.
        let taken = unsafe { consumer.pop(bytes.as_mut_ptr(), bytes.len(), 0, false) }?;
        if taken > 0 {
            consumer.give_back(false);
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_cross_and_other_lengths_are_refused() {
        let [mut one, mut other] = BareEnd::pair(4096).unwrap();
        assert_eq!(one.push(b"there"), Ok(5));
        let mut bytes = [0; 9];
        assert_eq!(other.pop(&mut bytes), Ok(5));
        assert_eq!(&bytes[..5], b"there");
        assert_eq!(other.pop(&mut bytes), Ok(0));
        assert!(BareEnd::pair(5000).is_err());
    }
}
