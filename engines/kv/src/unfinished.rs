//! The mark of a restore that has not ended: a file in the pool's directory.
//!
//! ```text
//! mark made, on media ──▶ pool made ──▶ records stored ──▶ everything on media ──▶ mark removed
//! ```
//! While the mark is there, what lies beside it is part of a store at best: [`refuse_unfinished`]
//! says so, to a node before it touches the pool, to [`crate::Store::open`] and [`crate::check()`],
//! and the next restore into the directory begins anew. Whoever restores holds a lock on the mark,
//! so two restores never work on one directory.

use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use beeline_pmem::PmemError;

use crate::KvError;

/// Name of the mark.
const MARK: &str = "restore.unfinished";
/// What a person reads who finds it.
const TEXT: &[u8] = b"A restore into this directory has not finished. Until it has, the data is \
not whole.\nRun `beeline kv restore` again, or remove the directory.\n";

fn io_error(path: &Path) -> impl Fn(std::io::Error) -> KvError + '_ {
    move |source| KvError::Io { path: path.display().to_string(), source }
}

fn sync(path: &Path) -> Result<(), KvError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(io_error(path))
}

/// Fails when a restore into `directory` did not finish. Whoever opens a pool there asks first: of one
/// cut short while it removed what another had left, pool or segments may be missing.
///
/// Errors: [`KvError::Unfinished`].
pub fn refuse_unfinished(directory: &Path) -> Result<(), KvError> {
    if directory.join(MARK).exists() {
        return Err(KvError::Unfinished { directory: directory.display().to_string() });
    }
    Ok(())
}

/// A directory being restored into, marked so until [`Unfinished::finish`].
#[derive(Debug)]
pub(crate) struct Unfinished {
    directory: PathBuf,
    /// Holds the lock.
    mark: File,
}

impl Unfinished {
    /// Marks `directory` (made if absent), and removes what a restore that did not finish left.
    ///
    /// Errors: `Exists` for a pool without a mark; the file system's.
    pub(crate) fn begin(directory: &Path) -> Result<Self, KvError> {
        let path = directory.join(MARK);
        let failed = io_error(&path);
        let pool = directory.join("pool.bee");
        let again = path.exists();
        if pool.exists() && !again {
            return Err(PmemError::Exists { file: pool }.into());
        }
        std::fs::create_dir_all(directory).map_err(io_error(directory))?;
        let mut mark = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(&failed)?;
        mark.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                failed(std::io::Error::other("another process is restoring into this directory"))
            }
            TryLockError::Error(error) => failed(error),
        })?;
        let unfinished =
            Self { directory: directory.to_owned(), mark: mark.try_clone().map_err(&failed)? };
        mark.write_all(TEXT).and_then(|()| mark.sync_all()).map_err(&failed)?;
        sync(directory)?;
        if again {
            unfinished.empty().map_err(io_error(directory))?;
        }
        Ok(unfinished)
    }

    /// Removes pool and segments.
    fn empty(&self) -> std::io::Result<()> {
        let absent_is_fine = |outcome: std::io::Result<()>| match outcome {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        };
        absent_is_fine(std::fs::remove_file(self.directory.join("pool.bee")))?;
        absent_is_fine(std::fs::remove_dir_all(self.directory.join("segments")))
    }

    /// Takes back everything, the mark last: as if nothing had been begun.
    pub(crate) fn undo(self) {
        // What cannot be removed stays marked.
        if self.empty().is_ok() {
            self.unmark();
        }
    }

    /// Takes the mark back and leaves the rest alone: it is somebody else's.
    pub(crate) fn unmark(self) {
        let _ = std::fs::remove_file(self.directory.join(MARK));
        drop(self.mark);
    }

    /// Puts the pool on media, whatever its durability level, then removes the mark.
    pub(crate) fn finish(self) -> Result<(), KvError> {
        let segments = self.directory.join("segments");
        for entry in std::fs::read_dir(&segments).map_err(io_error(&segments))? {
            sync(&entry.map_err(io_error(&segments))?.path())?;
        }
        sync(&segments)?;
        sync(&self.directory.join("pool.bee"))?;
        sync(&self.directory)?;
        let mark = self.directory.join(MARK);
        std::fs::remove_file(&mark).map_err(io_error(&mark))?;
        sync(&self.directory)
    }
}
