//! The state of several services as one stream.
//!
//! ```text
//!  0  magic "BEELSVC\0"    8  version u32, 1    12  services u32
//!     per service: tag u16, then pieces: length u32 (1 to 2^20) and bytes; a piece of length 0 ends
//! ```
//!
//! Little endian; the log's snapshot around it has the checksum. A stream with another beginning is
//! the keys' alone, as builds before this format wrote it.

use std::io::{self, Read, Write};

use beeline_replicated_log::SnapshotWriter;

use crate::machine::Tag;

const MAGIC: [u8; 8] = *b"BEELSVC\0";
const VERSION: u32 = 1;
const PIECE_BYTES: usize = 1 << 18;
const MOST_PIECE_BYTES: usize = 1 << 20;

/// Writes one service's state in pieces.
struct Pieces<'a> {
    out: &'a mut dyn Write,
    buffer: Vec<u8>,
}

impl Pieces<'_> {
    fn send(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let length = u32::try_from(self.buffer.len()).map_err(io::Error::other)?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    fn end(mut self) -> io::Result<()> {
        self.send()?;
        self.out.write_all(&[0; 4])
    }
}

impl Write for Pieces<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PIECE_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        if self.buffer.len() == PIECE_BYTES {
            self.send()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

/// Writes the states.
pub(crate) fn write(parts: Vec<(Tag, SnapshotWriter)>, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&MAGIC)?;
    out.write_all(&VERSION.to_le_bytes())?;
    out.write_all(&u32::try_from(parts.len()).map_err(io::Error::other)?.to_le_bytes())?;
    for (tag, state) in parts {
        out.write_all(&tag.0.to_le_bytes())?;
        let mut pieces = Pieces { out, buffer: Vec::with_capacity(PIECE_BYTES) };
        state(&mut pieces)?;
        pieces.end()?;
    }
    Ok(())
}

/// Reads one service's state out of its pieces.
struct Joined<'a> {
    from: &'a mut dyn Read,
    left: usize,
    ended: bool,
}

impl Joined<'_> {
    fn next(&mut self) -> io::Result<()> {
        let mut length = [0; 4];
        self.from.read_exact(&mut length)?;
        self.left = u32::from_le_bytes(length) as usize;
        self.ended = self.left == 0;
        if self.left > MOST_PIECE_BYTES {
            return Err(io::Error::other("a piece of the state is too long"));
        }
        Ok(())
    }
}

impl Read for Joined<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.ended {
            self.next()?;
        }
        if self.ended || into.is_empty() {
            return Ok(0);
        }
        let most = self.left.min(into.len());
        let read = self.from.read(&mut into[..most])?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= read;
        Ok(read)
    }
}

/// Hands each state to `take`.
///
/// Errors: the reader's, `take`'s, and a stream of another version.
pub(crate) fn read(
    reader: &mut dyn Read,
    mut take: impl FnMut(Tag, &mut dyn Read) -> io::Result<()>,
) -> io::Result<()> {
    let mut magic = Vec::new();
    (&mut *reader).take(MAGIC.len() as u64).read_to_end(&mut magic)?;
    if magic != MAGIC {
        return take(Tag::KEYS, &mut magic.as_slice().chain(reader));
    }
    let mut word = [0; 4];
    reader.read_exact(&mut word)?;
    let version = u32::from_le_bytes(word);
    if version != VERSION {
        return Err(io::Error::other(format!("the state has version {version}")));
    }
    reader.read_exact(&mut word)?;
    for _ in 0..u32::from_le_bytes(word) {
        let mut tag = [0; 2];
        reader.read_exact(&mut tag)?;
        let mut part = Joined { from: reader, left: 0, ended: false };
        take(Tag(u16::from_le_bytes(tag)), &mut part)?;
        // What the service did not need.
        io::copy(&mut part, &mut io::sink())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(bytes: Vec<u8>) -> SnapshotWriter {
        Box::new(move |out| out.write_all(&bytes))
    }

    #[test]
    fn states_of_any_length_come_back_to_their_services_and_an_old_one_to_the_keys() {
        for length in [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7] {
            let long: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
            let parts = vec![(Tag(1), writer(long.clone())), (Tag(9), writer(b"short".to_vec()))];
            let mut bytes = Vec::new();
            write(parts, &mut bytes).unwrap();
            let mut found = Vec::new();
            read(&mut bytes.as_slice(), |tag, part| {
                let mut state = Vec::new();
                if tag == Tag(1) {
                    part.read_to_end(&mut state)?;
                } else {
                    // It reads less than there is.
                    state = vec![0; 2];
                    part.read_exact(&mut state)?;
                }
                found.push((tag, state));
                Ok(())
            })
            .unwrap();
            assert_eq!(found, [(Tag(1), long), (Tag(9), b"sh".to_vec())]);
            for cut in [9, 14, bytes.len() / 2, bytes.len() - 1] {
                let mut cut = &bytes[..cut];
                assert!(
                    read(&mut cut, |_, part| io::copy(part, &mut io::sink()).map(|_| ())).is_err()
                );
            }
        }
        for old in [&b""[..], b"BEEL", b"some state of before"] {
            let mut found = Vec::new();
            read(&mut &old[..], |tag, part| {
                assert_eq!(tag, Tag::KEYS);
                part.read_to_end(&mut found).map(|_| ())
            })
            .unwrap();
            assert_eq!(found, old);
        }
    }
}
