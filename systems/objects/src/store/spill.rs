//! Objects on disk: what memory has no room for is written to files and read back when asked for.
//!
//! A thread of its own does the work, one job at a time, so that the store's loop never waits for
//! a disk. A file holds the objects of one job and goes when the last of them does. Nothing here
//! outlives the store: the directory is emptied when the store starts.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use beeline_os::memory::{copy_in, copy_out};

use crate::segment::Segment;

/// Bytes copied at a time.
const PIECE_BYTES: usize = 1 << 20;

/// One object of a job, in memory.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub segment: Arc<Segment>,
    pub offset: u64,
    pub length: u64,
    /// Where in the file.
    pub file_offset: u64,
}

/// Work for the thread.
#[derive(Debug)]
pub(crate) enum Job {
    /// Write a file of these pieces.
    Spill { file: u64, pieces: Vec<Piece> },
    /// Read one piece back.
    Restore { file: u64, slot: u32, piece: Piece },
    /// Remove a file.
    Forget { file: u64 },
}

/// What came of a job.
#[derive(Debug)]
pub(crate) enum Done {
    Spilled { file: u64, outcome: io::Result<()> },
    Restored { slot: u32, outcome: io::Result<()> },
}

/// The thread, and where its results arrive.
#[derive(Debug)]
pub(crate) struct Spiller {
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    thread: Option<std::thread::JoinHandle<()>>,
    directory: PathBuf,
}

impl Spiller {
    /// Empties `directory` and starts the thread; `wake` is called after each result.
    ///
    /// Errors: the file system's.
    pub(crate) fn start(directory: &Path, wake: impl Fn() + Send + 'static) -> io::Result<Self> {
        clear(directory)?;
        // For this user alone, as the memory is: the socket's rights say which others read objects.
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let (jobs, work) = channel::<Job>();
        let (results, done) = channel();
        let home = directory.to_owned();
        let thread =
            std::thread::Builder::new().name("objects-spill".to_owned()).spawn(move || {
                let mut piece = vec![0; PIECE_BYTES];
                for job in work {
                    let result = match job {
                        Job::Spill { file, pieces } => {
                            let outcome = write(&home, file, &pieces, &mut piece);
                            if outcome.is_err() {
                                let _ = std::fs::remove_file(path(&home, file));
                            }
                            Done::Spilled { file, outcome }
                        }
                        Job::Restore { file, slot, piece: target } => {
                            let outcome = read(&home, file, &target, &mut piece);
                            Done::Restored { slot, outcome }
                        }
                        Job::Forget { file } => {
                            let _ = std::fs::remove_file(path(&home, file));
                            continue;
                        }
                    };
                    if results.send(result).is_err() {
                        return;
                    }
                    wake();
                }
            })?;
        let directory = directory.to_owned();
        Ok(Self { jobs: Some(jobs), done, thread: Some(thread), directory })
    }

    pub(crate) fn give(&self, job: Job) {
        // The thread ends only after this end is dropped.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    pub(crate) fn next(&self) -> Option<Done> {
        self.done.try_recv().ok()
    }
}

impl Drop for Spiller {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = clear(&self.directory);
    }
}

fn path(home: &Path, file: u64) -> PathBuf {
    home.join(format!("{file:016x}.spilled"))
}

/// Removes what an earlier store left; files of other names stay.
fn clear(directory: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "spilled") {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn write(home: &Path, file: u64, pieces: &[Piece], buffer: &mut [u8]) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut target = options.open(path(home, file))?;
    for piece in pieces {
        let mut at = 0;
        while at < piece.length {
            let length = (piece.length - at).min(PIECE_BYTES as u64);
            let (start, size) = numbers(piece.offset + at, length)?;
            copy_out(&*piece.segment, start, &mut buffer[..size]);
            target.write_all(&buffer[..size])?;
            at += length;
        }
    }
    Ok(())
}

fn read(home: &Path, file: u64, piece: &Piece, buffer: &mut [u8]) -> io::Result<()> {
    let source = File::open(path(home, file))?;
    let mut at = 0;
    while at < piece.length {
        let length = (piece.length - at).min(PIECE_BYTES as u64);
        let (start, size) = numbers(piece.offset + at, length)?;
        source.read_exact_at(&mut buffer[..size], piece.file_offset + at)?;
        copy_in(&*piece.segment, start, &buffer[..size]);
        at += length;
    }
    Ok(())
}

fn numbers(offset: u64, length: u64) -> io::Result<(usize, usize)> {
    let offset = usize::try_from(offset).map_err(io::Error::other)?;
    let length = usize::try_from(length).map_err(io::Error::other)?;
    Ok((offset, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_os::MemoryObject as _;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn what_is_spilled_comes_back_and_the_files_go() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("left.spilled"), b"old").unwrap();
        let spiller = Spiller::start(home.path(), || ()).unwrap();
        let segment = Arc::new(Segment::create(4 << 20).unwrap());
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        copy_in(&*segment, 64, &bytes);
        let piece = Piece {
            segment: Arc::clone(&segment),
            offset: 64,
            length: bytes.len() as u64,
            file_offset: 0,
        };
        spiller.give(Job::Spill { file: 1, pieces: vec![piece.clone()] });
        let next = || loop {
            if let Some(done) = spiller.next() {
                break done;
            }
            std::thread::yield_now();
        };
        assert!(matches!(next(), Done::Spilled { file: 1, outcome: Ok(()) }));
        let rights = std::fs::metadata(path(home.path(), 1)).unwrap().permissions().mode();
        assert_eq!(rights & 0o077, 0, "others may read what is spilled: {rights:o}");
        copy_in(&*segment, 64, &vec![0; bytes.len()]);
        spiller.give(Job::Restore { file: 1, slot: 3, piece: piece.clone() });
        assert!(matches!(next(), Done::Restored { slot: 3, outcome: Ok(()) }));
        let mut back = vec![0; bytes.len()];
        copy_out(&*segment, 64, &mut back);
        assert!(back == bytes, "what came back differs");
        spiller.give(Job::Restore { file: 2, slot: 4, piece });
        assert!(matches!(next(), Done::Restored { slot: 4, outcome: Err(_) }));
        drop(spiller);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        assert_eq!(segment.length_bytes(), 4 << 20);
    }
}
