//! What can go wrong with a pool; each variant names the file and what to change.

use std::path::{Path, PathBuf};

use beeline_os::MappingError;
use rustix::io::Errno;

use crate::options::{Durability, PoolKind};

/// Why a pool cannot be opened, grown or trusted to keep its promise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PmemError {
    /// The file does not start as a pool does.
    #[error("{file} is not a Beeline pool: choose another directory, or move the file away")]
    Foreign {
        /// The file found.
        file: PathBuf,
    },
    /// A file is shorter than its format says.
    #[error(
        "{file} has {found_bytes} bytes where {expected_bytes} are due: it was truncated; \
         restore it from a backup or snapshot"
    )]
    Truncated {
        /// The short file.
        file: PathBuf,
        /// Length the format asks for.
        expected_bytes: u64,
        /// Length found.
        found_bytes: u64,
    },
    /// A file that the pool refers to is not there.
    #[error("{file} is missing: restore it, or give the right directory")]
    Missing {
        /// The absent file.
        file: PathBuf,
    },
    /// A checksum does not match.
    #[error("{file} is damaged ({part}): restore it from a backup or snapshot")]
    Damaged {
        /// The damaged file.
        file: PathBuf,
        /// The part whose check failed.
        part: &'static str,
    },
    /// Written by a version of Beeline with another format.
    #[error("{file} has format version {found}; this build reads version {supported}")]
    Version {
        /// The pool file.
        file: PathBuf,
        /// Version found.
        found: u32,
        /// The one version this build reads.
        supported: u32,
    },
    /// Another opener holds the pool.
    #[error(
        "{file} is held by {}: a pool has one user at a time; stop it, or give another directory",
        pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    Busy {
        /// The lock file.
        file: PathBuf,
        /// The holder as it wrote itself down; none when it was too quick to read.
        pid: Option<u32>,
    },
    /// A pool is there already.
    #[error("{file} exists: open the pool, or give an empty directory")]
    Exists {
        /// The pool file.
        file: PathBuf,
    },
    /// Every segment that the capacity allows is in use.
    #[error(
        "the pool is full: {capacity_bytes} bytes in use; free something or raise its capacity"
    )]
    PoolFull {
        /// The limit in force.
        capacity_bytes: u64,
    },
    /// The file system has no room for another segment.
    #[error("no space left for {file}: free some on its file system")]
    NoSpace {
        /// The file that could not be allocated.
        file: PathBuf,
    },
    /// The directory or file cannot be written.
    #[error("{file} cannot be written: make it writable for this user, or give another directory")]
    ReadOnly {
        /// What could not be written.
        file: PathBuf,
    },
    /// A DAX pool was asked for where `MAP_SYNC` does not work.
    #[error(
        "{directory} does not map with MAP_SYNC: mount its file system with -o dax, \
         or ask for a file pool"
    )]
    NotDax {
        /// The directory tried.
        directory: PathBuf,
    },
    /// A setting is outside its range or does not fit the others.
    #[error("{option}: {advice}")]
    Options {
        /// Name of the field.
        option: &'static str,
        /// What it has to be.
        advice: &'static str,
    },
    /// The kind of pool cannot keep what the durability level promises.
    #[error(
        "a {kind} pool cannot promise durability {durability}: ask for durability none, use a \
         dax or file pool, or set emulate_durability for an experiment"
    )]
    CannotPromise {
        /// Kind asked for.
        kind: PoolKind,
        /// Level asked for.
        durability: Durability,
    },
    /// Durability power was asked for on a file system that lives in memory.
    #[error(
        "{directory} is on a file system in memory, which a loss of power empties: give a \
         directory on a disk, ask for durability process, or set emulate_durability"
    )]
    VolatileFileSystem {
        /// The directory tried.
        directory: PathBuf,
    },
    /// A synchronisation failed once. The kernel may have dropped the bytes it could not write, so
    /// nothing is promised any more until the pool is opened again and recovered.
    #[error(
        "fdatasync of {file} failed ({source}): the pool promises nothing any more; \
         mend the device and start again"
    )]
    SyncFailed {
        /// The first file that failed.
        file: PathBuf,
        /// What the kernel said.
        #[source]
        source: Errno,
    },
    /// The process has used up a limit of its own.
    #[error("{file}: {limit} is used up: raise it, or take larger segments")]
    Limit {
        /// What could not be opened or mapped.
        file: PathBuf,
        /// The limit, and how it is named.
        limit: &'static str,
    },
    /// Memory could not be mapped.
    #[error("cannot map {file}: {source}")]
    Mapping {
        /// What was to be mapped.
        file: PathBuf,
        /// The failed call.
        #[source]
        source: MappingError,
    },
    /// Another system call failed.
    #[error("{call} of {file} failed: {source}")]
    System {
        /// Name of the call.
        call: &'static str,
        /// Its object.
        file: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
}

impl PmemError {
    /// True when the same call may succeed later without anybody touching the configuration.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::PoolFull { .. } | Self::NoSpace { .. } | Self::Busy { .. })
    }

    /// Sorts a failed call into the cases a user can act on.
    pub(crate) fn from_call(call: &'static str, file: &Path, source: std::io::Error) -> Self {
        let file = file.to_path_buf();
        match Errno::from_io_error(&source) {
            Some(Errno::NOSPC | Errno::DQUOT) => Self::NoSpace { file },
            Some(Errno::ROFS | Errno::ACCESS | Errno::PERM) => Self::ReadOnly { file },
            Some(Errno::MFILE | Errno::NFILE) => {
                Self::Limit { file, limit: "the limit on open files (ulimit -n)" }
            }
            Some(Errno::NOENT) => Self::Missing { file },
            _ => Self::System { call, file, source },
        }
    }

    /// Sorts a failed mapping: many segments are many mappings and descriptors.
    pub(crate) fn from_mapping(file: &Path, source: MappingError) -> Self {
        let file = file.to_path_buf();
        match source {
            MappingError::Call { source: Errno::NOMEM, .. } => {
                Self::Limit { file, limit: "memory or the limit on mappings (vm.max_map_count)" }
            }
            MappingError::Call { source: Errno::MFILE | Errno::NFILE, .. } => {
                Self::Limit { file, limit: "the limit on open files (ulimit -n)" }
            }
            source => Self::Mapping { file, source },
        }
    }
}
