//! What two devices say to each other over their link socket.
//!
//! ```text
//!  0 "BLVL"   4 version u8 = 1   5 kind u8   6 zero u16   8 from u32   12 to u32
//! 16 nonce of `from`, 16 bytes   32 nonce of `to`, 16 bytes
//! ```
//!
//! little endian, 48 bytes. The nonces of both queue pairs, which only their connection data
//! tells, are in every frame: one that does not know them moves nothing.

use crate::endpoint::Nonce;
use beeline_fabric::fields::array;

pub(crate) const FRAME_BYTES: usize = 48;
const MAGIC: &[u8; 4] = b"BLVL";
const VERSION: u8 = 1;

/// What a frame says of the queue pair it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It is ready and asks the other to be.
    Connect,
    /// It is ready too.
    Accept,
    /// It is broken or gone.
    Gone,
}

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) from_nonce: Nonce,
    pub(crate) to_nonce: Nonce,
}

impl Frame {
    pub(crate) fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[4] = VERSION;
        bytes[5] = match self.kind {
            Kind::Connect => 1,
            Kind::Accept => 2,
            Kind::Gone => 3,
        };
        bytes[8..12].copy_from_slice(&self.from.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.to.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.from_nonce);
        bytes[32..].copy_from_slice(&self.to_nonce);
        bytes
    }

    /// `None` for anything that is not a frame of this version.
    pub(crate) fn decode(bytes: &[u8; FRAME_BYTES]) -> Option<Self> {
        let number = |at: usize| u32::from_le_bytes(array(bytes, at));
        if bytes[..4] != *MAGIC || bytes[4] != VERSION || bytes[6..8] != [0, 0] {
            return None;
        }
        let kind = match bytes[5] {
            1 => Kind::Connect,
            2 => Kind::Accept,
            3 => Kind::Gone,
            _ => return None,
        };
        let (from, to) = (number(8), number(12));
        Some(Self { kind, from, to, from_nonce: array(bytes, 16), to_nonce: array(bytes, 32) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back_as_they_went(
            kind in 0..3_usize, from in any::<u32>(), to in any::<u32>(),
            from_nonce in any::<[u8; 16]>(), to_nonce in any::<[u8; 16]>(),
        ) {
            let kind = [Kind::Connect, Kind::Accept, Kind::Gone][kind];
            let frame = Frame { kind, from, to, from_nonce, to_nonce };
            prop_assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }

        #[test]
        fn arbitrary_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), FRAME_BYTES)) {
            let mut frame = [0; FRAME_BYTES];
            frame.copy_from_slice(&bytes);
            if let Some(read) = Frame::decode(&frame) {
                prop_assert_eq!(read.encode(), frame);
            }
        }
    }
}
