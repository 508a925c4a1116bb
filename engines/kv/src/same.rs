//! Keys compared without a call: most have 8 to 32 bytes.

/// Whether both are the same bytes.
#[inline]
pub(crate) fn same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    // Both ends, which overlap where the length is no whole one.
    match one.len() {
        8..=16 => ends::<8>(one) == ends::<8>(other),
        17..=32 => ends::<16>(one) == ends::<16>(other),
        _ => one == other,
    }
}

#[inline]
fn ends<const N: usize>(bytes: &[u8]) -> Option<(&[u8; N], &[u8; N])> {
    Some((bytes.first_chunk::<N>()?, bytes.last_chunk::<N>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_the_same_where_no_byte_differs() {
        for length in 0..80_usize {
            let one: Vec<u8> = (0..length as u8).collect();
            assert!(same(&one, &one.clone()), "{length}");
            for at in 0..length {
                let mut other = one.clone();
                other[at] ^= 1;
                assert!(!same(&one, &other), "byte {at} of {length}");
            }
            assert!(!same(&one, &[one.as_slice(), b"x"].concat()), "one longer than {length}");
        }
    }
}
