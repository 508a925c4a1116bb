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

/// Writes the first flits of a packet, as many as there are places and at most all of them.
#[inline]
pub fn write_flits(packet: &[u8], time_ns: u64, places: &mut [Flit]) {
    let last = count(packet.len()) - 1;
    let whole = packet.as_chunks::<PAYLOAD>().0;
    for (at, (flit, part)) in places.iter_mut().zip(whole).enumerate() {
        for (word, chunk) in flit.iter_mut().zip(part.as_chunks().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        flit[4] = u64::from(at == 0) | u64::from(at == last) << 1;
        (flit[5], flit[6], flit[7]) = (0, 0, if at == 0 { time_ns } else { 0 });
    }
    // The part that does not fill a flit, or the flit of an empty packet.
    if last == whole.len()
        && let Some(flit) = places.get_mut(last)
    {
        write_flit(packet, time_ns, last, flit);
    }
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
///
/// One made by [`Joiner::in_a_row`] keeps its packets, each with room before it for a header, so that
/// many can be written by one call.
#[derive(Clone, Debug, Default)]
pub struct Joiner {
    bytes: Vec<u8>,
    /// Bytes left free before each packet; none, where a packet replaces the one before.
    head: Option<usize>,
    /// The present packet's first byte.
    start: usize,
    inside: bool,
    time_ns: u64,
}

impl Joiner {
    /// One that keeps its packets, and `head` bytes before each.
    #[must_use]
    pub fn in_a_row(head: usize) -> Self {
        Self { head: Some(head), ..Self::default() }
    }

    /// Takes a flit; the packet it ended and its time, if it ended one.
    ///
    /// Errors: the flit is dropped, and the packet it disturbed; the next `sop` begins anew.
    #[inline]
    pub fn push(&mut self, flit: &Flit) -> Result<Option<(&[u8], u64)>, FlitError> {
        let begins = sop(flit);
        if begins {
            let was_inside = self.inside;
            if was_inside {
                self.forget();
            }
            match self.head {
                Some(head) => {
                    self.start = self.bytes.len() + head;
                    self.bytes.resize(self.start, 0);
                }
                None => self.bytes.clear(),
            }
            self.inside = true;
            self.time_ns = flit[7];
            if was_inside {
                self.append(flit);
                if eop(flit) {
                    // A packet that begins inside another and ends at once is not told apart.
                    self.forget();
                }
                return Err(FlitError::BeginsInside);
            }
        } else if !self.inside {
            return Err(FlitError::Outside);
        }
        if self.bytes.len() - self.start > LONGEST {
            self.forget();
            return Err(FlitError::TooLong);
        }
        self.append(flit);
        if eop(flit) {
            self.inside = false;
            return Ok(Some((&self.bytes[self.start..], self.time_ns)));
        }
        Ok(None)
    }

    /// Drops the packet under way.
    fn forget(&mut self) {
        self.inside = false;
        self.bytes.truncate(self.start.saturating_sub(self.head.unwrap_or(0)));
    }

    /// The room before the packet that [`Joiner::push`] gave last.
    #[inline]
    pub fn head_mut(&mut self) -> &mut [u8] {
        let head = self.head.unwrap_or(0);
        self.bytes.get_mut(self.start - head..self.start).unwrap_or_default()
    }

    /// Every whole packet since the last time, each behind its room; `write` has them, and then they
    /// are forgotten.
    ///
    /// Errors: those of `write`.
    pub fn take_row<E>(&mut self, write: impl FnOnce(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let head = self.head.unwrap_or(0);
        let whole = if self.inside { self.start - head } else { self.bytes.len() };
        if whole > 0 {
            write(&self.bytes[..whole])?;
            self.bytes.drain(..whole);
            self.start = if self.inside { head } else { 0 };
        }
        Ok(())
    }

    #[inline]
    fn append(&mut self, flit: &Flit) {
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
            let mut places = vec![[u64::MAX; WORDS]; packet.len().div_ceil(32) + 1];
            write_flits(&packet, time, &mut places);
            prop_assert_eq!(places.pop(), Some([u64::MAX; WORDS]));
            split(&packet, time, |flit| {
                assert_eq!(flit, places[count]);
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
    fn packets_in_a_row_are_those_that_come_one_by_one() {
        let mut row = Joiner::in_a_row(3);
        let mut joiner = Joiner::default();
        let (mut wanted, mut got) = (Vec::new(), Vec::new());
        let mut dice = 1_u64;
        for at in 0..2_000_u64 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Flits in and out of place: packets cut short, doubled beginnings, ends alone.
            let flit = [at, 0, 0, dice, dice >> 33 & 127, 0, 0, at];
            let ended = match (joiner.push(&flit), row.push(&flit)) {
                (Ok(one), Ok(other)) => {
                    assert_eq!(one, other);
                    one.map(|(bytes, _)| bytes.to_vec())
                }
                (one, other) => {
                    assert_eq!(one.map(|_| ()), other.map(|_| ()));
                    None
                }
            };
            if let Some(bytes) = ended {
                row.head_mut().copy_from_slice(&[1, 2, 3]);
                wanted.extend([1, 2, 3]);
                wanted.extend(bytes);
            }
            if at % 97 == 0 {
                row.take_row(|bytes| {
                    got.extend_from_slice(bytes);
                    Ok::<(), ()>(())
                })
                .unwrap();
            }
        }
        row.take_row(|bytes| {
            got.extend_from_slice(bytes);
            Ok::<(), ()>(())
        })
        .unwrap();
        assert!(wanted.len() > 10_000 && got == wanted);
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
