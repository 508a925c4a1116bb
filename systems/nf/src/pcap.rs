//! Capture files: the classic format, microseconds or nanoseconds, either byte order.

use std::io::{self, BufRead, Read, Write};

/// A packet and when it was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// From the Ethernet header on.
    pub bytes: Vec<u8>,
}

/// Not a capture.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PcapError {
    /// The file.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Shorter than a header.
    #[error("not a pcap file: it ends before its header of 24 bytes does")]
    TooShort,
    /// The header.
    #[error("not a pcap file: it begins with {0:#010x} (pcapng is not read; convert with editcap)")]
    Magic(u32),
    /// Packets of another kind.
    #[error("its packets are of link type {0}, and only Ethernet, type {ETHERNET}, is read")]
    NotEthernet(u32),
    /// A record.
    #[error("packet {number} claims {claimed} bytes: the file is damaged")]
    Record {
        /// From 1.
        number: u64,
        /// Its length field.
        claimed: u32,
    },
    /// The end.
    #[error("packet {number} is cut short: the file ends inside it")]
    CutShort {
        /// From 1.
        number: u64,
    },
}

const MICROSECONDS: u32 = 0xa1b2_c3d4;
const NANOSECONDS: u32 = 0xa1b2_3c4d;
/// The link type of Ethernet.
const ETHERNET: u32 = 1;
/// The bits of the header's last word that hold the link type; those above say how long a frame's check
/// sequence is.
const LINK_TYPE: u32 = 0x03ff_ffff;
/// The longest packet that is read.
const LONGEST: u32 = 262_144;

/// Reads packets one by one.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    swapped: bool,
    nanoseconds: bool,
    number: u64,
}

impl<R: Read> Reader<R> {
    /// Reads the file's header.
    ///
    /// Errors: the file, another format, or packets that are not Ethernet's.
    pub fn new(mut from: R) -> Result<Self, PcapError> {
        let mut header = [0; 24];
        from.read_exact(&mut header).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => PcapError::TooShort,
            _ => PcapError::Io(error),
        })?;
        let magic = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let (swapped, nanoseconds) = match (magic, magic.swap_bytes()) {
            (MICROSECONDS, _) => (false, false),
            (NANOSECONDS, _) => (false, true),
            (_, MICROSECONDS) => (true, false),
            (_, NANOSECONDS) => (true, true),
            _ => return Err(PcapError::Magic(magic)),
        };
        let kind = u32::from_le_bytes([header[20], header[21], header[22], header[23]]);
        let kind = if swapped { kind.swap_bytes() } else { kind } & LINK_TYPE;
        if kind != ETHERNET {
            return Err(PcapError::NotEthernet(kind));
        }
        Ok(Self { from, swapped, nanoseconds, number: 0 })
    }

    /// The next packet; none at the end.
    ///
    /// Errors: the file; a record that cannot be; the end inside a packet.
    pub fn next_packet(&mut self) -> Result<Option<Packet>, PcapError> {
        let mut bytes = Vec::new();
        Ok(self.next_into(&mut bytes)?.map(|time_ns| Packet { time_ns, bytes }))
    }

    /// The next packet's bytes into `bytes`, and its time; none at the end.
    ///
    /// Errors: as for [`Reader::next_packet`].
    #[inline]
    pub fn next_into(&mut self, bytes: &mut Vec<u8>) -> Result<Option<u64>, PcapError> {
        let mut header = [0; 16];
        let mut have = 0;
        while have < header.len() {
            match self.from.read(&mut header[have..])? {
                0 if have == 0 => return Ok(None),
                0 => return Err(PcapError::CutShort { number: self.number + 1 }),
                count => have += count,
            }
        }
        self.number += 1;
        let field = |at: usize| {
            let value =
                u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            if self.swapped { value.swap_bytes() } else { value }
        };
        let (seconds, fraction, length) = (field(0), field(4), field(8));
        if length > LONGEST {
            return Err(PcapError::Record { number: self.number, claimed: length });
        }
        bytes.resize(length as usize, 0);
        self.from.read_exact(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => PcapError::CutShort { number: self.number },
            _ => PcapError::Io(error),
        })?;
        let unit = if self.nanoseconds { 1 } else { 1_000 };
        let time_ns = u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * unit;
        Ok(Some(time_ns))
    }
}

impl<R: BufRead> Reader<R> {
    /// The next packet's time and bytes, where all of it lies in the file's buffer; [`Reader::pass`]
    /// goes on behind it. None where it does not: [`Reader::next_into`] says what is there.
    ///
    /// Errors: the file.
    #[inline]
    pub fn whole(&mut self) -> Result<Option<(u64, &[u8])>, PcapError> {
        let (swapped, nanoseconds) = (self.swapped, self.nanoseconds);
        let buffer = self.from.fill_buf()?;
        let Some((header, rest)) = buffer.split_first_chunk::<RECORD>() else { return Ok(None) };
        let field = |at: usize| {
            let value =
                u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            if swapped { value.swap_bytes() } else { value }
        };
        let length = field(8);
        if length > LONGEST {
            return Ok(None);
        }
        let unit = if nanoseconds { 1 } else { 1_000 };
        let time_ns = u64::from(field(0)) * 1_000_000_000 + u64::from(field(4)) * unit;
        Ok(rest.get(..length as usize).map(|bytes| (time_ns, bytes)))
    }

    /// Goes on behind the packet of `length` bytes that [`Reader::whole`] gave.
    #[inline]
    pub fn pass(&mut self, length: usize) {
        self.from.consume(16 + length);
        self.number += 1;
    }
}

/// Bytes of a [`record`].
pub const RECORD: usize = 16;

/// What stands before a packet of `length` bytes.
#[inline]
#[must_use]
pub fn record(time_ns: u64, length: usize) -> [u8; RECORD] {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let seconds = u32::try_from(time_ns / 1_000_000_000).unwrap_or(u32::MAX);
    let fraction = u32::try_from(time_ns % 1_000_000_000).unwrap_or(0);
    let mut record = [0; RECORD];
    for (to, field) in record.chunks_exact_mut(4).zip([seconds, fraction, length, length]) {
        to.copy_from_slice(&field.to_le_bytes());
    }
    record
}

/// Writes packets with nanoseconds.
#[derive(Debug)]
pub struct Writer<W> {
    to: W,
}

impl<W: Write> Writer<W> {
    /// Writes the file's header.
    ///
    /// Errors: the file.
    pub fn new(mut to: W) -> io::Result<Self> {
        let mut header = Vec::with_capacity(24);
        header.extend(NANOSECONDS.to_le_bytes());
        header.extend(2_u16.to_le_bytes());
        header.extend(4_u16.to_le_bytes());
        header.extend([0; 8]);
        header.extend(LONGEST.to_le_bytes());
        header.extend(ETHERNET.to_le_bytes());
        to.write_all(&header)?;
        Ok(Self { to })
    }

    /// Writes a packet.
    ///
    /// Errors: the file.
    #[inline]
    pub fn write(&mut self, time_ns: u64, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(&record(time_ns, bytes.len()))?;
        self.to.write_all(bytes)
    }

    /// Writes packets in a row, each behind its [`record`].
    ///
    /// Errors: the file.
    pub fn write_row(&mut self, row: &[u8]) -> io::Result<()> {
        self.to.write_all(row)
    }

    /// Hands the file back, flushed.
    ///
    /// Errors: the file.
    pub fn finish(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Vec<u8> {
        let mut writer = Writer::new(Vec::new()).unwrap();
        writer.write(1_500_000_000_123_456_789, &[1, 2, 3]).unwrap();
        writer.write(2_000_000_000, &[0; 1_518]).unwrap();
        writer.finish().unwrap()
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = file();
        let mut reader = Reader::new(&bytes[..]).unwrap();
        let first = reader.next_packet().unwrap().unwrap();
        assert_eq!((first.time_ns, first.bytes), (1_500_000_000_123_456_789, vec![1, 2, 3]));
        assert_eq!(reader.next_packet().unwrap().unwrap().bytes.len(), 1_518);
        assert_eq!(reader.next_packet().unwrap(), None);
    }

    #[test]
    fn a_file_cut_anywhere_is_an_error_or_ends_between_packets() {
        let bytes = file();
        let ends = [24, 24 + 16 + 3];
        for cut in 24..bytes.len() {
            let mut reader = Reader::new(&bytes[..cut]).unwrap();
            let end = loop {
                match reader.next_packet() {
                    Ok(Some(_)) => {}
                    other => break other,
                }
            };
            let whole = ends.contains(&cut);
            assert_eq!(matches!(end, Ok(None)), whole, "cut at {cut}: {end:?}");
        }
    }

    #[test]
    fn another_format_and_a_damaged_length_are_named() {
        assert!(matches!(Reader::new(&[0_u8; 24][..]), Err(PcapError::Magic(0))));
        assert!(matches!(Reader::new(&file()[..23]), Err(PcapError::TooShort)));
        // Linux' cooked packets have no Ethernet header; a check sequence's length is no link type.
        let mut cooked = file();
        cooked[20] = 113;
        assert!(matches!(Reader::new(&cooked[..]), Err(PcapError::NotEthernet(113))));
        let mut checked = file();
        checked[23] = 0x44;
        assert!(Reader::new(&checked[..]).is_ok());
        let mut bytes = file();
        bytes[24 + 8..24 + 12].copy_from_slice(&u32::MAX.to_le_bytes());
        let mut reader = Reader::new(&bytes[..]).unwrap();
        assert!(matches!(reader.next_packet(), Err(PcapError::Record { number: 1, .. })));
    }
}
