//! Whether the machine was started anew since a member ran last.
//!
//! At durability `process` a member's votes and entries lie in memory that a dead process leaves
//! behind, and that goes with the machine: the kernel may have written any part of it to the disk, or
//! none. A member that comes back after that has forgotten what it promised. It could vote twice in
//! one term, or vote for a leader that lacks an entry which was committed with its help: an
//! acknowledged command would be lost although one member of three failed. So it does not take part
//! again ([`HomeError::Rebooted`]); it is removed, and joins with an empty directory.
//!
//! File `boot`: one line, `1`, the machine's boot id, and what the run was told to survive
//! (`process`, `power`), or `stopped` once everything was synchronised after an orderly end. Written
//! whole beside the old one, synchronised and renamed, before the member takes part.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::home::HomeError;
use crate::member::Durability;
use crate::snapshot::sync_directory_of;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const VERSION: &str = "1";
const STOPPED: &str = "stopped";
/// Stands for the id of a machine that does not tell it.
const UNKNOWN: &str = "unknown";

/// One run of a machine, from its start to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot(Option<String>);

impl Boot {
    /// The present one of this machine. Where the kernel does not tell, a new start goes unnoticed.
    #[must_use]
    pub fn of_this_machine() -> Self {
        match std::fs::read_to_string(BOOT_ID) {
            Ok(id) => Self::named(id.trim()),
            Err(error) => {
                tracing::warn!(%error, "{BOOT_ID} cannot be read: a new start of this machine would not be noticed");
                Self(None)
            }
        }
    }

    /// One with this id, for tests and simulations.
    #[must_use]
    pub fn named(id: &str) -> Self {
        let word: String = id.chars().filter(|char| !char.is_whitespace()).collect();
        Self(Some(word).filter(|word| !word.is_empty() && word != UNKNOWN))
    }
}

fn path_in(directory: &Path) -> PathBuf {
    directory.join("boot")
}

fn file(path: &Path) -> impl Fn(io::Error) -> HomeError + '_ {
    |source| HomeError::File { path: path.to_owned(), source }
}

/// Whether the memory of the run before is there for certain.
///
/// Errors: [`HomeError`]; [`HomeError::Damaged`] for a file that says nothing.
pub(crate) fn has_memory(directory: &Path, now: &Boot) -> Result<bool, HomeError> {
    let path = path_in(directory);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        // Never opened; or the user says so.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(source) => return Err(HomeError::File { path, source }),
    };
    let words: Vec<_> = text.split_whitespace().collect();
    let [VERSION, then, survives] = words[..] else { return Err(HomeError::Damaged { path }) };
    match survives {
        STOPPED | "power" => Ok(true),
        "process" => {
            let same = now.0.as_ref().is_none_or(|now| then == UNKNOWN || now == then);
            Ok(same)
        }
        _ => Err(HomeError::Damaged { path }),
    }
}

fn write(directory: &Path, line: &str) -> io::Result<()> {
    let (path, new) = (path_in(directory), directory.join("boot.new"));
    let mut to = File::create(&new)?;
    to.write_all(line.as_bytes())?;
    to.sync_all()?;
    std::fs::rename(&new, &path)?;
    sync_directory_of(&path)
}

/// The member runs from now on, under this boot.
///
/// Errors: [`HomeError::File`].
pub(crate) fn note_run(
    directory: &Path,
    now: &Boot,
    durability: Durability,
) -> Result<(), HomeError> {
    let survives = match durability {
        Durability::Process => "process",
        Durability::Power => "power",
    };
    let id = now.0.as_deref().unwrap_or(UNKNOWN);
    let path = path_in(directory);
    write(directory, &format!("{VERSION} {id} {survives}\n")).map_err(file(&path))
}

/// Synchronises the directory of a member that has ended, and `others` with what its state machine
/// keeps, and notes that nothing of them is in memory alone: the machine may be started anew.
///
/// Errors: the file system's. The note is not there then.
pub fn note_stop(directory: &Path, others: &[&Path]) -> io::Result<()> {
    for directory in others.iter().copied().chain([directory]) {
        synchronise(directory)?;
    }
    write(directory, &format!("{VERSION} {UNKNOWN} {STOPPED}\n"))
}

fn synchronise(directory: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            synchronise(&entry.path())?;
        } else if kind.is_file() {
            File::open(entry.path())?.sync_all()?;
        }
    }
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_there_under_the_same_boot_and_after_what_survives_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let (one, other) = (Boot::named("one\n"), Boot::named("other"));
        assert!(has_memory(path, &one).unwrap(), "never opened");
        note_run(path, &one, Durability::Process).unwrap();
        assert!(has_memory(path, &one).unwrap());
        assert!(!has_memory(path, &other).unwrap());
        assert!(has_memory(path, &Boot(None)).unwrap(), "there is no telling");
        note_run(path, &one, Durability::Power).unwrap();
        assert!(has_memory(path, &other).unwrap());
        note_run(path, &one, Durability::Process).unwrap();
        note_stop(path, &[]).unwrap();
        assert!(has_memory(path, &other).unwrap());
        for line in ["", "1 one", "1 one sometimes", "2 one process", "1 one process more"] {
            std::fs::write(path.join("boot"), line).unwrap();
            let said = has_memory(path, &one);
            assert!(matches!(said, Err(HomeError::Damaged { .. })), "{line:?}: {said:?}");
        }
    }

    #[test]
    fn this_machine_has_one_boot() {
        assert_eq!(Boot::of_this_machine(), Boot::of_this_machine());
    }
}
