//! Packets to flits and back.
//!
//! A flit has 512 bits: 256 of payload (byte 0 in bits 0 to 7), `sop` at 256, `eop` at 257, `pad` at
//! 258 to 262, a `tag` of 57 bits for elements, and 192 bits of `meta`. The shell writes the time a
//! packet arrived, in nanoseconds, into `meta[2]` of its first flit.

/// Words of a flit.
pub const WORDS: usize = 8;
/// Bits of a flit.
pub const BITS: u32 = 512;
/// Payload bytes of a flit.
pub const PAYLOAD: usize = 32;

/// A flit.
pub type Flit = [u64; WORDS];

/// Flits of a packet of so many bytes; an empty one has one.
#[must_use]
#[inline]
pub fn count(bytes: usize) -> usize {
    bytes.div_ceil(PAYLOAD).max(1)
}

/// Flit `at` of a packet; of an empty one 31 bytes of padding and one zero byte.
#[must_use]
#[inline]
pub fn flit(packet: &[u8], time_ns: u64, at: usize) -> Flit {
    let mut made = [0; WORDS];
    write_flit(packet, time_ns, at, &mut made);
    made
}

/// Writes what [`flit`] gives into its place.
#[inline]
pub fn write_flit(packet: &[u8], time_ns: u64, at: usize, flit: &mut Flit) {
    let last = at + 1 >= count(packet.len());
    let part = packet.get(at * PAYLOAD..).unwrap_or(&[]);
    let mut fill = |bytes: &[u8; PAYLOAD]| {
        for (word, chunk) in flit.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*chunk);
        }
    };
    // A whole part needs no copy of unknown length.
    let length = match part.first_chunk() {
        Some(whole) => {
            fill(whole);
            PAYLOAD
        }
        None => {
            let mut bytes = [0_u8; PAYLOAD];
            bytes[..part.len()].copy_from_slice(part);
            fill(&bytes);
            part.len()
        }
    };
    let pad = if last { (PAYLOAD - length).min(PAYLOAD - 1) } else { 0 };
    let first = at == 0;
    flit[4] = u64::from(first) | u64::from(last) << 1 | (pad as u64) << 2;
    (flit[5], flit[6], flit[7]) = (0, 0, if first { time_ns } else { 0 });
}

/// Splits a packet.
pub fn split(packet: &[u8], time_ns: u64, mut each: impl FnMut(Flit)) {
    for at in 0..count(packet.len()) {
        each(flit(packet, time_ns, at));
    }
}

/// True for the first flit of a packet.
#[must_use]
pub fn sop(flit: &[u64]) -> bool {
    flit[4] & 1 != 0
}

/// True for the last flit of a packet.
#[must_use]
pub fn eop(flit: &[u64]) -> bool {
    flit[4] & 2 != 0
}

/// Why flits are not packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlitError {
    /// Inside a packet.
    #[error("a packet begins inside another")]
    BeginsInside,
    /// Outside a packet.
    #[error("a flit outside a packet")]
    Outside,
    /// Longer than the largest packet.
    #[error("a packet of more than {LONGEST} bytes")]
    TooLong,
}

/// The longest packet that is joined.
pub const LONGEST: usize = 65_536;

/// Joins flits to packets.
#[derive(Clone, Debug, Default)]
pub struct Joiner {
    bytes: Vec<u8>,
    inside: bool,
    time_ns: u64,
}

impl Joiner {
    /// Takes a flit; the packet it ended and its time, if it ended one.
    ///
    /// Errors: the flit is dropped, and the packet it disturbed; the next `sop` begins anew.
    #[inline]
    pub fn push(&mut self, flit: &[u64]) -> Result<Option<(&[u8], u64)>, FlitError> {
        let begins = sop(flit);
        if begins {
            let was_inside = self.inside;
            self.bytes.clear();
            self.inside = true;
            self.time_ns = flit[7];
            if was_inside {
                self.append(flit);
                self.inside = !eop(flit);
                return Err(FlitError::BeginsInside);
            }
        } else if !self.inside {
            return Err(FlitError::Outside);
        }
        if self.bytes.len() > LONGEST {
            self.inside = false;
            return Err(FlitError::TooLong);
        }
        self.append(flit);
        if eop(flit) {
            self.inside = false;
            return Ok(Some((&self.bytes, self.time_ns)));
        }
        Ok(None)
    }

    #[inline]
    fn append(&mut self, flit: &[u64]) {
        let pad = if eop(flit) { (flit[4] >> 2 & 31) as usize } else { 0 };
        let mut bytes = [0_u8; PAYLOAD];
        for (to, word) in bytes.chunks_exact_mut(8).zip(flit) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        self.bytes.extend_from_slice(&bytes);
        self.bytes.truncate(self.bytes.len() - pad);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn packets_of_any_length_come_back(
            packet in proptest::collection::vec(any::<u8>(), 1..1_519), time in any::<u64>()
        ) {
            let mut joiner = Joiner::default();
            let mut back = Vec::new();
            let mut count = 0;
            split(&packet, time, |flit| {
                count += 1;
                if let Ok(Some((bytes, at))) = joiner.push(&flit) {
                    back.push((bytes.to_vec(), at));
                }
            });
            prop_assert_eq!(count, packet.len().div_ceil(32));
            prop_assert_eq!(back, vec![(packet, time)]);
        }
    }

    #[test]
    fn flits_out_of_place_are_named_and_the_next_packet_is_whole() {
        let mut joiner = Joiner::default();
        assert_eq!(joiner.push(&[0; 8]), Err(FlitError::Outside));
        let mut first = [0; 8];
        first[4] = 1;
        assert_eq!(joiner.push(&first), Ok(None));
        assert_eq!(joiner.push(&first), Err(FlitError::BeginsInside));
        let mut last = [0; 8];
        last[4] = 2 | 31 << 2;
        assert_eq!(joiner.push(&last).map(|p| p.map(|(bytes, _)| bytes.len())), Ok(Some(33)));
    }
}
