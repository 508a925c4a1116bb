//! The data directory: can it be written, what file system, DAX, free space.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_pmem::{PmemError, Pool};
use rustix::mm::MapFlags;

use super::{Finding, Verdict};
use crate::config::ServeConfig;
use crate::config::values::human_bytes;

pub fn probe(config: &ServeConfig, findings: &mut Vec<Finding>) {
    let place = existing(&config.data);
    findings.push(writable(&config.data, &place));
    findings.push(file_system(&place));
    findings.push(dax(&place));
    findings.push(free_space(&place, config.segment_size.0));
}

/// The directory, or its closest ancestor that exists.
pub fn existing(data: &Path) -> PathBuf {
    let whole = std::path::absolute(data).unwrap_or_else(|_| data.to_owned());
    whole.ancestors().find(|path| path.is_dir()).map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// A file without a name, gone with its descriptor.
fn nameless(place: &Path) -> std::io::Result<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let flags = rustix::fs::OFlags::TMPFILE.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(place).map(OwnedFd::from)
}

fn writable(data: &Path, place: &Path) -> Finding {
    let seen = if data.is_dir() {
        format!("{}", data.display())
    } else {
        format!("{}, to be made in {}", data.display(), place.display())
    };
    if let Err(PmemError::Busy { pid, .. }) = Pool::check_free(data) {
        let who = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
        return Finding::ok("data directory", format!("{seen}, in use by {who}"));
    }
    let answer = rustix::fs::access(place, rustix::fs::Access::WRITE_OK);
    match answer {
        Ok(()) => Finding::ok("data directory", seen),
        Err(error) => Finding::advise(
            "data directory",
            Verdict::Broken,
            format!("{seen}: {error}"),
            "make it writable for this user, or name another with --data",
        ),
    }
}

/// Magic numbers of `statfs(2)` worth a name.
const FILE_SYSTEMS: [(u64, &str); 8] = [
    (0xEF53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683E, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x794C_7630, "overlayfs"),
    (0x6969, "nfs"),
    (0x2FC1_2FC1, "zfs"),
    (0x8584_58F6, "ramfs"),
];

fn file_system(place: &Path) -> Finding {
    let Ok(about) = rustix::fs::statfs(place) else {
        return Finding::advise(
            "file system",
            Verdict::Missing,
            "unknown",
            "name a directory that exists with --data",
        );
    };
    #[expect(clippy::cast_sign_loss, reason = "a magic number, 32 bits wide")]
    let magic = about.f_type as u64 & 0xFFFF_FFFF;
    let name = FILE_SYSTEMS.iter().find(|(known, _)| *known == magic).map(|(_, name)| *name);
    match name {
        Some(name @ ("tmpfs" | "ramfs")) => Finding::advise(
            "file system",
            Verdict::CouldBeFaster,
            format!("{name}: lives in memory, gone with a restart of the machine"),
            "fine for --durability process; for power put --data on a disk",
        ),
        Some(name @ ("nfs" | "overlayfs")) => Finding::advise(
            "file system",
            Verdict::CouldBeFaster,
            name,
            "put --data on a local file system such as ext4 or xfs",
        ),
        Some(name) => Finding::ok("file system", name),
        None => Finding::ok("file system", format!("type {magic:#x}")),
    }
}

fn dax(place: &Path) -> Finding {
    let advice = "durability power goes through fdatasync here; a file system mounted with dax=always \
                  on persistent memory makes it one fence";
    let attempt = nameless(place).and_then(|file| {
        rustix::fs::ftruncate(&file, 4096)?;
        let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
        Mapping::shared_with(file, 4096, Protection::ReadWrite, flags).map_err(Into::into)
    });
    match attempt {
        Ok(_) => Finding::ok("DAX", "MAP_SYNC works"),
        Err(error) => {
            Finding::advise("DAX", Verdict::Optional, format!("MAP_SYNC: {error}"), advice)
        }
    }
}

fn free_space(place: &Path, segment_bytes: u64) -> Finding {
    let free = free_bytes(place).unwrap_or(0);
    if free >= segment_bytes.saturating_mul(16) {
        return Finding::ok("free space", human_bytes(free));
    }
    Finding::advise(
        "free space",
        if free < segment_bytes.saturating_mul(4) {
            Verdict::Broken
        } else {
            Verdict::CouldBeFaster
        },
        human_bytes(free),
        "a node wants room for a few segments per shard; free some, lower --segment-size or move --data",
    )
}

/// Bytes an ordinary user may still write where `place` lies.
pub fn free_bytes(place: &Path) -> std::io::Result<u64> {
    let about = rustix::fs::statvfs(place)?;
    Ok(about.f_bavail.saturating_mul(about.f_frsize))
}
