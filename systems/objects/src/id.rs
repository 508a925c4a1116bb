//! Object identifiers: 20 bytes, shown as 40 hexadecimal digits (spec section 2.1).

use std::fmt;
use std::str::FromStr;

/// Bytes of an identifier.
pub const ID_BYTES: usize = 20;

/// Names one object in every store of a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(pub [u8; ID_BYTES]);

/// A text that is no identifier.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no object id; an id has 40 hexadecimal digits")]
pub struct BadId {
    /// The text.
    pub text: String,
}

impl ObjectId {
    /// A new identifier, from the kernel's randomness.
    ///
    /// Errors: the kernel's, where it has no randomness to give.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; ID_BYTES];
        getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(Self(bytes))
    }

    /// As three words; the upper half of the third is free for the caller.
    pub(crate) fn words(self) -> [u64; 3] {
        let word = |at: usize| {
            let mut bytes = [0_u8; 8];
            let end = (at + 8).min(ID_BYTES);
            bytes[..end - at].copy_from_slice(&self.0[at..end]);
            u64::from_le_bytes(bytes)
        };
        [word(0), word(8), word(16)]
    }

    /// Back from [`ObjectId::words`]; the upper half of the third word is not looked at.
    pub(crate) fn from_words(words: [u64; 3]) -> Self {
        let mut bytes = [0; ID_BYTES];
        bytes[..8].copy_from_slice(&words[0].to_le_bytes());
        bytes[8..16].copy_from_slice(&words[1].to_le_bytes());
        bytes[16..].copy_from_slice(&words[2].to_le_bytes()[..4]);
        Self(bytes)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectId({self})")
    }
}

impl FromStr for ObjectId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        let bad = || BadId { text: text.to_owned() };
        if text.len() != 2 * ID_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut bytes = [0; ID_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| bad())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_words_give_the_identifier_back() {
        let id = ObjectId::random().unwrap();
        assert_eq!(id.to_string().parse::<ObjectId>().unwrap(), id);
        let mut words = id.words();
        words[2] |= 0xffff_ffff_0000_0000;
        assert_eq!(ObjectId::from_words(words), id);
        assert_ne!(id, ObjectId::random().unwrap());
    }

    #[test]
    fn a_text_of_another_shape_is_named() {
        for text in ["", "12", &"zz".repeat(20), &"é".repeat(20), &"+1".repeat(20)] {
            let error = text.parse::<ObjectId>().unwrap_err();
            assert!(error.to_string().contains("40 hexadecimal"));
        }
    }
}
