//! A field's name in full, and the key under which it is stored.
//!
//! ```text
//! row's length u16 | row | generation u64 | position u64 | field
//! ```
//!
//! Numbers are big-endian, so that a row's fields lie in the order of their positions. The position follows
//! from generation and field, so a look-up of a field compares the rest alone and
//! needs no position. A shard works it out where it stores a new field.

use crate::same::same;
use crate::siphash::SipHash;
use crate::space::row_of;

/// Bits of a field's position: what a scan's cursor can hold.
const POSITION_BITS: u32 = 48;
/// Bytes between the row and the field's name.
pub(crate) const SUB_BYTES: usize = 16;

/// A row's field: database and key of the row, its generation, and the field's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FieldName<'k> {
    pub database: u32,
    pub key: &'k [u8],
    pub generation: u64,
    pub field: &'k [u8],
}

impl<'k> FieldName<'k> {
    /// The name in a stored key, and the position there; `None` for one that is cut short.
    #[inline]
    pub fn of_stored(database: u32, stored: &'k [u8]) -> Option<(Self, u64)> {
        let key = row_of(stored);
        let (generation, rest) = stored.get(2 + key.len()..)?.split_first_chunk::<8>()?;
        let (position, field) = rest.split_first_chunk::<8>()?;
        let generation = u64::from_be_bytes(*generation);
        Some((Self { database, key, generation, field }, u64::from_be_bytes(*position)))
    }

    /// Bytes of the stored key.
    #[inline]
    pub fn stored_bytes(&self) -> usize {
        2 + self.key.len() + SUB_BYTES + self.field.len()
    }

    /// Appends the key under which the field is stored.
    pub fn push_to(&self, out: &mut Vec<u8>) {
        let position = field_position(self.generation, self.field);
        out.reserve(self.stored_bytes());
        out.extend_from_slice(&(self.key.len() as u16).to_be_bytes());
        out.extend_from_slice(self.key);
        // One append of a small array is cheaper than two of its parts.
        let both = u128::from(self.generation) << 64 | u128::from(position);
        out.extend_from_slice(&both.to_be_bytes());
        out.extend_from_slice(self.field);
    }

    /// True for the stored key of this field, whose position is not looked at.
    #[inline]
    pub fn is(&self, stored: &[u8]) -> bool {
        let length = self.key.len();
        let Some((told, rest)) = stored.split_first_chunk::<2>() else { return false };
        let Some((key, rest)) = rest.split_at_checked(length) else { return false };
        let Some((generation, rest)) = rest.split_first_chunk::<8>() else { return false };
        *generation == self.generation.to_be_bytes()
            && usize::from(u16::from_be_bytes(*told)) == length
            && rest.get(8..).is_some_and(|field| same(field, self.field))
            && same(key, self.key)
    }
}

/// Where a field stands among its row's: below 2^48. By the row's generation alone, which travels in
/// its head: a field is found again in whatever pool a snapshot is put.
pub(crate) fn field_position(generation: u64, field: &[u8]) -> u64 {
    let key = [generation, generation.rotate_left(32)];
    SipHash::of(key, field) >> (64 - POSITION_BITS)
}

/// True for the key of a field that has the position of its name.
pub(crate) fn field_at_its_place(key: &[u8]) -> bool {
    FieldName::of_stored(0, key)
        .is_some_and(|(name, position)| field_position(name.generation, name.field) == position)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name<'k>(key: &'k [u8], generation: u64, field: &'k [u8]) -> FieldName<'k> {
        FieldName { database: 3, key, generation, field }
    }

    #[test]
    fn a_stored_key_is_that_of_its_own_field_alone() {
        let names = [
            name(b"key", 7, b"field"),
            name(b"key", 8, b"field"),
            name(b"kex", 7, b"field"),
            name(b"keyf", 7, b"ield"),
            name(b"key", 7, b"fiele"),
            name(b"key", 7, b""),
            name(b"", 7, b"field"),
            name(b"", 0, b""),
        ];
        for (at, mine) in names.iter().enumerate() {
            let mut stored = Vec::new();
            mine.push_to(&mut stored);
            assert_eq!(stored.len(), mine.stored_bytes());
            assert_eq!(FieldName::of_stored(3, &stored).map(|(name, _)| name), Some(*mine));
            assert!(field_at_its_place(&stored));
            for (other, theirs) in names.iter().enumerate() {
                assert_eq!(theirs.is(&stored), at == other, "{mine:?} {theirs:?}");
            }
            let short = &stored[..2 + mine.key.len() + SUB_BYTES - 1];
            assert_eq!(FieldName::of_stored(3, short), None);
            stored[2 + mine.key.len() + SUB_BYTES - 1] ^= 1;
            assert!(mine.is(&stored) && !field_at_its_place(&stored), "another position");
        }
    }
}
