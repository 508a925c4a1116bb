//! Messages between two managers.
//!
//! ```text
//! 0 "OB" (2)  2 version (1)  3 kind (1)  4 number of the transfer (4)  8 id (20)  28 flags (4)
//! 32 six words, by kind: a b c d e f                    80 bytes of a PIECE
//! ```

use crate::id::ObjectId;

/// Bytes before a piece.
pub(crate) const HEADER_BYTES: usize = 80;
/// - 2: a `PULL` names the sizes that are read as a set; a `FIN` ends a transfer over a socket too.
const VERSION: u8 = 2;

/// Flag of [`Kind::Pull`]: the data may come before its sizes.
pub(crate) const PIECES_FIRST: u32 = 1;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Give me the object. a: of these sizes, let me read it: bit n is for 2^n bytes and more.
    Pull = 1,
    /// It comes in pieces. a: data bytes, b: metadata bytes, c: checksum or all ones.
    Data = 2,
    /// Read it. As `Data`, and d: offset, e: key.
    Read = 3,
    /// Some of it. a: offset, b: bytes.
    Piece = 4,
    /// a: bytes taken so far.
    Ack = 5,
    /// The transfer is over. a: 1 when the object is sealed.
    Fin = 6,
    /// It is not here.
    Gone = 7,
}

/// The fixed part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub kind: Kind,
    pub number: u32,
    pub id: ObjectId,
    pub flags: u32,
    pub words: [u64; 6],
}

/// Word c without a checksum.
const NO_CHECKSUM: u64 = u64::MAX;

impl Header {
    pub(crate) fn new(kind: Kind, number: u32, id: ObjectId, words: [u64; 6]) -> Self {
        Self { kind, number, id, flags: 0, words }
    }

    pub(crate) fn checksum_word(checksum: Option<u32>) -> u64 {
        checksum.map_or(NO_CHECKSUM, u64::from)
    }

    /// Word c of a `Data` or `Read`.
    pub(crate) fn checksum(&self) -> Option<u32> {
        u32::try_from(self.words[2]).ok()
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(b"OB");
        bytes[2] = VERSION;
        bytes[3] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..28].copy_from_slice(&self.id.0);
        bytes[28..32].copy_from_slice(&self.flags.to_le_bytes());
        for (place, word) in bytes[32..].chunks_mut(8).zip(self.words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From bytes; nothing for what is no message of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.get(..HEADER_BYTES)?.try_into().ok()?;
        if &bytes[..2] != b"OB" || bytes[2] != VERSION {
            return None;
        }
        let kind = match bytes[3] {
            1 => Kind::Pull,
            2 => Kind::Data,
            3 => Kind::Read,
            4 => Kind::Piece,
            5 => Kind::Ack,
            6 => Kind::Fin,
            7 => Kind::Gone,
            _ => return None,
        };
        let half = |at: usize| {
            let mut half = [0; 4];
            half.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(half)
        };
        let mut id = [0; 20];
        id.copy_from_slice(&bytes[8..28]);
        let mut words = [0; 6];
        for (word, place) in words.iter_mut().zip(bytes[32..].chunks(8)) {
            let mut whole = [0; 8];
            whole.copy_from_slice(place);
            *word = u64::from_le_bytes(whole);
        }
        Some(Self { kind, number: half(4), id: ObjectId(id), flags: half(28), words })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_to_what_encodes_again(bytes in proptest::collection::vec(any::<u8>(), 0..100), kind in 0_u8..9) {
            let mut bytes = bytes;
            if bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&[b'O', b'B', VERSION, kind]);
            }
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(&header.encode()[..], &bytes[..HEADER_BYTES]);
            }
        }
    }
}
