//! Snapshots: what a member's log begins from, as a file.
//!
//! ```text
//!  0  magic "BEELSNP\0"           16  cluster u64               40  configuration, sessions,
//!  8  version u32, 1              24  position u64                  the state machine's bytes
//! 12  flags u32: 1 has a state    32  bytes of configuration u32    CRC-32C of all before u32
//!                                 36  bytes of sessions u32
//! ```
//!
//! Little endian. A new member has a snapshot of position 0 without a state: it tells the first
//! members. The file is written beside the old one, synchronised, and renamed over it.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use beeline_paxos::{ClusterId, Configuration, Position, Sessions};
use beeline_wire::checksum::{crc32c, crc32c_append};

const MAGIC: [u8; 8] = *b"BEELSNP\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;
const HAS_STATE: u32 = 1;
/// More than any table of sessions or members needs.
const MAX_PART_BYTES: u32 = 1 << 30;

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file system's.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// Not a snapshot, cut short, or damaged.
    #[error("{}: the snapshot is damaged ({part})", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What does not fit.
        part: &'static str,
    },
    /// Of another format.
    #[error("{}: the snapshot has format version {found}, this program knows {VERSION}", path.display())]
    Version {
        /// Which file.
        path: PathBuf,
        /// As read.
        found: u32,
    },
    /// Of another cluster.
    #[error("{}: the snapshot belongs to cluster {found:016x}", path.display())]
    Cluster {
        /// Which file.
        path: PathBuf,
        /// As read.
        found: u64,
    },
}

impl SnapshotError {
    /// A full disk may have room later; damage stays.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::File { .. })
    }
}

/// Everything of a snapshot but the state.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) position: Position,
    pub(crate) configuration: Configuration,
    pub(crate) sessions: Sessions,
    pub(crate) has_state: bool,
}

struct Checked<T> {
    inner: T,
    check: u32,
    bytes: u64,
}

impl<W: Write> Write for Checked<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.check = crc32c_append(self.check, &bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> SnapshotError {
    let path = path.to_owned();
    move |source| SnapshotError::File { path, source }
}

/// Makes a rename in the file's directory survive a loss of power.
pub(crate) fn sync_directory_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

/// Writes a snapshot to `path`, durably, under this name; returns its length.
///
/// Errors: [`SnapshotError::File`]; what was written of the file is removed.
pub(crate) fn write(
    path: &Path,
    cluster: ClusterId,
    head: &Head,
    state: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<u64, SnapshotError> {
    let written = write_parts(path, cluster, head, state);
    if written.is_err() {
        let _ = std::fs::remove_file(path);
    }
    written.map_err(failed(path))
}

fn write_parts(
    path: &Path,
    cluster: ClusterId,
    head: &Head,
    state: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<u64> {
    let (configuration, sessions) = (head.configuration.encode(), head.sessions.encode());
    let mut header = MAGIC.to_vec();
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&(if head.has_state { HAS_STATE } else { 0 }).to_le_bytes());
    header.extend_from_slice(&cluster.0.to_le_bytes());
    header.extend_from_slice(&head.position.0.to_le_bytes());
    for part in [&configuration, &sessions] {
        let length = u32::try_from(part.len()).ok().filter(|length| *length < MAX_PART_BYTES);
        let length = length.ok_or_else(|| io::Error::other("the session table is too long"))?;
        header.extend_from_slice(&length.to_le_bytes());
    }
    let file = BufWriter::with_capacity(1 << 18, File::create(path)?);
    let mut out = Checked { inner: file, check: crc32c(&[]), bytes: 0 };
    for part in [&header, &configuration, &sessions] {
        out.write_all(part)?;
    }
    if head.has_state {
        state(&mut out)?;
    }
    let (check, bytes) = (out.check, out.bytes);
    out.inner.write_all(&check.to_le_bytes())?;
    let file = out.inner.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    Ok(bytes + 4)
}

/// Checks the snapshot in `path`, all of it; then hands its state, if it has one, to `state`.
///
/// Errors: [`SnapshotError`]; what `state` said is [`SnapshotError::File`].
pub(crate) fn read(
    path: &Path,
    cluster: ClusterId,
    state: impl FnOnce(&Head, &mut dyn Read) -> io::Result<()>,
) -> Result<Head, SnapshotError> {
    let damaged = |part| SnapshotError::Damaged { path: path.to_owned(), part };
    let mut file = File::open(path).map_err(failed(path))?;
    let length = file.metadata().map_err(failed(path))?.len();
    let body = length.checked_sub(4).filter(|body| *body >= HEADER_BYTES as u64);
    let body = body.ok_or_else(|| damaged("length"))?;
    let mut header = [0; HEADER_BYTES];
    file.read_exact(&mut header).map_err(failed(path))?;
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    if header[..8] != MAGIC {
        return Err(damaged("magic"));
    }
    if word(8) != VERSION {
        return Err(SnapshotError::Version { path: path.to_owned(), found: word(8) });
    }
    // The checksum over everything before anything is believed.
    let mut check = crc32c(&header);
    let mut left = body - HEADER_BYTES as u64;
    let mut chunk = vec![0; 1 << 18];
    while left > 0 {
        let piece = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        file.read_exact(&mut chunk[..piece]).map_err(failed(path))?;
        check = crc32c_append(check, &chunk[..piece]);
        left -= piece as u64;
    }
    let mut trailer = [0; 4];
    file.read_exact(&mut trailer).map_err(failed(path))?;
    if u32::from_le_bytes(trailer) != check {
        return Err(damaged("checksum"));
    }
    if long(16) != cluster.0 {
        return Err(SnapshotError::Cluster { path: path.to_owned(), found: long(16) });
    }
    let parts = u64::from(word(32)) + u64::from(word(36));
    let state_bytes = body
        .checked_sub(HEADER_BYTES as u64 + parts)
        .filter(|_| word(32) < MAX_PART_BYTES && word(36) < MAX_PART_BYTES);
    let state_bytes = state_bytes.ok_or_else(|| damaged("lengths"))?;
    let mut file = BufReader::with_capacity(1 << 18, File::open(path).map_err(failed(path))?);
    let mut part = |length: usize| -> Result<Vec<u8>, SnapshotError> {
        let mut bytes = vec![0; length];
        file.read_exact(&mut bytes).map_err(failed(path))?;
        Ok(bytes)
    };
    part(HEADER_BYTES)?;
    let configuration = Configuration::decode(&part(word(32) as usize)?);
    let sessions = Sessions::decode(&part(word(36) as usize)?);
    let head = Head {
        position: Position(long(24)),
        configuration: configuration.ok_or_else(|| damaged("members"))?,
        sessions: sessions.ok_or_else(|| damaged("sessions"))?,
        has_state: word(12) & HAS_STATE != 0,
    };
    if head.has_state {
        state(&head, &mut file.take(state_bytes)).map_err(failed(path))?;
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_paxos::NodeId;

    const CLUSTER: ClusterId = ClusterId(77);

    fn head() -> Head {
        Head {
            position: Position(12),
            configuration: Configuration::at(Position(3), vec![(NodeId(1), b"one".to_vec())]),
            sessions: Sessions::new(9),
            has_state: true,
        }
    }

    fn reads(path: &Path) -> Result<(Head, Vec<u8>), SnapshotError> {
        let mut state = Vec::new();
        let head = read(path, CLUSTER, |_, reader| reader.read_to_end(&mut state).map(drop))?;
        Ok((head, state))
    }

    #[test]
    fn a_snapshot_comes_back_and_damage_anywhere_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("snapshot");
        let length = write(&path, CLUSTER, &head(), |out| out.write_all(b"the state")).unwrap();
        let (found, state) = reads(&path).unwrap();
        assert_eq!((found.position, state), (Position(12), b"the state".to_vec()));
        assert_eq!(found.configuration, head().configuration);
        let sound = std::fs::read(&path).unwrap();
        assert_eq!(sound.len() as u64, length);
        for at in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert!(reads(&path).is_err(), "byte {at}");
            std::fs::write(&path, &sound[..at]).unwrap();
            assert!(reads(&path).is_err(), "cut at {at}");
        }
        std::fs::write(&path, &sound).unwrap();
        let other = read(&path, ClusterId(78), |_, _| Ok(()));
        assert!(matches!(other, Err(SnapshotError::Cluster { found: 77, .. })));
    }

    #[test]
    fn a_state_that_cannot_be_written_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("snapshot");
        assert!(write(&path, CLUSTER, &head(), |_| Err(io::Error::other("full"))).is_err());
        assert!(!path.exists());
    }
}
