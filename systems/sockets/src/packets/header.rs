//! The eight bytes before the payload of every packet, in a block as in a window's slot.
//!
//! ```text
//! 0  source port u16   2  destination port u16   4  length u16, with the header; 0: nothing here
//! 6  control u16: bit 15 sync request, bits 14 to 12 type, the rest 0
//! ```
//!
//! One aligned word, so that one store publishes a packet (NTSocks 3.3).

/// Bytes of it.
pub const HEADER_BYTES: usize = 8;

const SYNC: u16 = 1 << 15;
const TYPE_AT: u32 = 12;

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// Bytes of the stream.
    Data,
    /// Nothing follows in this direction.
    Finish,
    /// The connection is broken off.
    Reset,
    /// The connection goes on in another partition: two words of payload, the partition and the count of packets so far.
    Migrate,
    /// On a control ring: how many packets the receiver's program has consumed.
    Credit,
    /// Where bytes lie in the receiver's extents: two words of payload, offset and length.
    Extent,
}

/// A packet's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sender's port.
    pub source: u16,
    /// The receiver's port.
    pub destination: u16,
    /// Bytes with the header.
    pub length: u16,
    /// The receiver is to say how far it has read.
    pub sync: bool,
    /// What it is.
    pub kind: PacketKind,
}

/// Why a header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a header of {word:#018x} is none of a packet in slots of {slot_bytes} bytes")]
pub struct BadHeader {
    /// As it stands there.
    pub word: u64,
    /// The most a packet can have.
    pub slot_bytes: usize,
}

impl Header {
    /// As the word that is stored.
    #[must_use]
    pub fn encode(self) -> u64 {
        let kind: u16 = match self.kind {
            PacketKind::Data => 1,
            PacketKind::Finish => 4,
            PacketKind::Reset => 5,
            PacketKind::Migrate => 6,
            PacketKind::Credit => 0,
            PacketKind::Extent => 7,
        };
        let control = kind << TYPE_AT | if self.sync { SYNC } else { 0 };
        u64::from(self.source)
            | u64::from(self.destination) << 16
            | u64::from(self.length) << 32
            | u64::from(control) << 48
    }

    /// The length that stands in a word, with the header.
    #[must_use]
    #[inline]
    pub fn length_in(word: u64) -> usize {
        (word >> 32 & 0xffff) as usize
    }

    /// From a word that another process wrote; `None`: nothing is there yet.
    ///
    /// Errors: [`BadHeader`].
    pub fn decode(word: u64, slot_bytes: usize) -> Result<Option<Self>, BadHeader> {
        let half = |at: u32| (word >> at & 0xffff) as u16;
        let (length, control) = (half(32), half(48));
        if length == 0 {
            return if word == 0 { Ok(None) } else { Err(BadHeader { word, slot_bytes }) };
        }
        let kind = match control >> TYPE_AT & 7 {
            0 => PacketKind::Credit,
            1 => PacketKind::Data,
            4 => PacketKind::Finish,
            5 => PacketKind::Reset,
            6 => PacketKind::Migrate,
            7 => PacketKind::Extent,
            _ => return Err(BadHeader { word, slot_bytes }),
        };
        let whole = usize::from(length);
        let payload = match kind {
            PacketKind::Data => whole > HEADER_BYTES,
            PacketKind::Finish | PacketKind::Reset => whole == HEADER_BYTES,
            PacketKind::Credit => whole == HEADER_BYTES + 8,
            PacketKind::Migrate | PacketKind::Extent => whole == HEADER_BYTES + 16,
        };
        if !payload || whole > slot_bytes || control & 0x0fff != 0 {
            return Err(BadHeader { word, slot_bytes });
        }
        let sync = control & SYNC != 0;
        Ok(Some(Self { source: half(0), destination: half(16), length, sync, kind }))
    }

    /// Bytes behind the header.
    #[must_use]
    pub fn payload_bytes(self) -> usize {
        usize::from(self.length).saturating_sub(HEADER_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_word_is_refused_or_comes_back_as_it_was(word in any::<u64>()) {
            if let Ok(Some(header)) = Header::decode(word, 4096) {
                prop_assert_eq!(header.encode(), word);
                prop_assert!(usize::from(header.length) <= 4096);
            }
        }
    }

    #[test]
    fn every_kind_comes_back_as_it_was() {
        for (kind, length) in [
            (PacketKind::Data, 9),
            (PacketKind::Finish, 8),
            (PacketKind::Reset, 8),
            (PacketKind::Migrate, 24),
            (PacketKind::Credit, 16),
            (PacketKind::Extent, 24),
        ] {
            let header = Header { source: 1, destination: 0xfffe, length, sync: true, kind };
            assert_eq!(Header::decode(header.encode(), 64), Ok(Some(header)));
            let long = Header { length: 65, ..header };
            assert!(Header::decode(long.encode(), 64).is_err());
        }
        assert_eq!(Header::decode(0, 64), Ok(None));
    }
}
