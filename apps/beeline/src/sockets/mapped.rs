//! Segments that processes have mapped, found without the monitor: it may have been restarted, or have
//! forgotten them.
//!
//! A segment says which two sockets it belongs to, and either end's program may have changed that. So a
//! connection's segment is one that says so and that the holders of both sockets have mapped: who lies
//! about it harms connections of its own.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use anyhow::{Context as _, ensure};
use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_sockets::segment::{CLOSED_AT, COOKIES_AT, NAME_AT, STATE_AT, STATE_PAIRED, Segment};

/// A segment as one process has it mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    process: u32,
    /// As in `/proc/PID/maps`.
    range: String,
    start: u64,
    /// The memory's number, the same for all who have it mapped.
    pub file: u64,
}

/// A line of `/proc/PID/maps`, if it is a whole segment's.
fn mapped(process: u32, line: &str) -> Option<Mapped> {
    let mut words = line.split_ascii_whitespace();
    let (range, _, offset) = (words.next()?, words.next()?, words.next()?);
    let (file, path) = (words.nth(1)?, words.next()?);
    if path != "/memfd:beeline-socket" || u64::from_str_radix(offset, 16) != Ok(0) {
        return None;
    }
    let start = u64::from_str_radix(range.split_once('-')?.0, 16).ok()?;
    Some(Mapped { process, range: range.to_owned(), start, file: file.parse().ok()? })
}

/// The segments of `process`; none when it ended or is not ours to look into.
pub fn of(process: u32) -> Vec<Mapped> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    maps.lines().filter_map(|line| mapped(process, line)).collect()
}

impl Mapped {
    fn read<const N: usize>(&self, memory: &std::fs::File, place: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        memory.read_exact_at(&mut bytes, self.start + place as u64).ok()?;
        Some(bytes)
    }

    /// The sockets it belongs to, if it carries a connection; `None` for one that is over, or the kernel's,
    /// or unmapped meanwhile.
    pub fn carries(&self) -> Option<[u64; 2]> {
        let memory = std::fs::File::open(format!("/proc/{}/mem", self.process)).ok()?;
        let word = |place| self.read(&memory, place).map(u32::from_le_bytes);
        let long = |place| self.read(&memory, place).map(u64::from_le_bytes);
        if word(STATE_AT)? != STATE_PAIRED || word(CLOSED_AT[0])? != 0 || word(CLOSED_AT[1])? != 0 {
            return None;
        }
        match long(NAME_AT)? {
            0 => Some([long(COOKIES_AT[0])?, long(COOKIES_AT[1])?]),
            relayed => Some([relayed, 0]),
        }
    }

    /// The segment, as the end that `side` is.
    ///
    /// Errors: the kernel's; memory that is no segment.
    pub fn take(&self, side: usize) -> anyhow::Result<Segment> {
        let path = format!("/proc/{}/map_files/{}", self.process, self.range);
        let file = std::fs::File::options().read(true).write(true).open(path).context(
            "the monitor does not know its memory, which takes root (or CAP_CHECKPOINT_RESTORE) to get from \
             the process itself",
        )?;
        let about = file.metadata()?;
        let memory = OwnedFd::from(file);
        let seals = rustix::fs::fcntl_get_seals(&memory)?;
        ensure!(
            about.ino() == self.file && seals.contains(rustix::fs::SealFlags::SHRINK),
            "what it has mapped changed meanwhile"
        );
        let mapping =
            Mapping::shared(memory, usize::try_from(about.len())?, Protection::ReadWrite)?;
        Ok(Segment::take(mapping, side)?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use beeline_sockets::segment::length_bytes;

    use super::*;

    #[test]
    fn a_segment_is_found_where_it_is_mapped_and_says_whose_it_is() {
        let mapping = Mapping::memfd("beeline-socket", length_bytes(4096)).unwrap();
        Segment::format(&mapping).unwrap();
        let descriptor = mapping.descriptor().unwrap();
        for (place, cookie) in COOKIES_AT.into_iter().zip([7_u64, 8]) {
            rustix::io::pwrite(&descriptor, &cookie.to_le_bytes(), place as u64).unwrap();
        }
        let segment = Segment::take(mapping, 1).unwrap();
        let me = std::process::id();
        let find = || of(me).into_iter().find(|one| one.file == segment.file()).unwrap();
        assert_eq!(find().carries(), None);
        segment.state().store(STATE_PAIRED, Ordering::Release);
        assert_eq!(find().carries(), Some([7, 8]));
        // Not where it is not allowed.
        if let Ok(same) = find().take(0) {
            segment.own().signs.closed.store(1, Ordering::Release);
            assert_eq!(same.other().signs.closed.load(Ordering::Acquire), 1);
            assert_eq!(find().carries(), None);
        }
        assert!(of(u32::MAX).is_empty());
        let other = "7f00-8000 rw-s 00000000 00:01 77 /memfd:other (deleted)";
        let later = "7f00-8000 rw-s 00001000 00:01 77 /memfd:beeline-socket (deleted)";
        assert!([other, later, "", "7f00"].iter().all(|line| mapped(1, line).is_none()));
    }
}
