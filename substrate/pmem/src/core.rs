//! What segments, persisters and the pool share: table memory, the mechanism, the sticky error.
//!
//! Lives until the last of them is gone; so does the lock on the pool.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use beeline_env::FaultPoint;
use beeline_os::MemoryObject;
use beeline_os::memory::{load_u64, store_u64};
use rustix::io::Errno;

use crate::error::PmemError;
use crate::layout::{self, State};
use crate::memory::Memory;
use crate::open::PoolLock;
use crate::options::{Durability, Mechanism, PoolKind};
use crate::record::Recorder;
use crate::synchroniser::Synchroniser;
use beeline_os::write_back::{self as cache, CACHE_LINE_BYTES as LINE_BYTES, WriteBack};

/// The table's object number in a record.
pub(crate) const TABLE_OBJECT: u32 = 0;

/// Where a test makes a file's synchronisation slow, or fail.
static SYNC: FaultPoint = FaultPoint::new("pmem.file.sync");

/// The turn of whoever synchronises one file.
///
/// The kernel reports a failed write-back once to each open file description, to the first
/// synchronisation of it that ends afterwards: of two that run at the same time one hears of the
/// failure and the other returns well, with its bytes lost. So a file has one synchroniser at a
/// time, and each looks at the pool's error before and after.
#[derive(Debug, Default)]
pub(crate) struct SyncTurn(Mutex<()>);

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) kind: PoolKind,
    pub(crate) durability: Durability,
    pub(crate) mechanism: Mechanism,
    /// The instruction that reaches memory, whatever the pool promises.
    pub(crate) write_back: WriteBack,
    pub(crate) write_delay_ns: u32,
    pub(crate) lazy_words: bool,
    pub(crate) segment_bytes: u32,
    pub(crate) secret: [u8; 16],
    pub(crate) table: Memory,
    pub(crate) table_file: PathBuf,
    pub(crate) table_turn: SyncTurn,
    /// Every page of the table has its mark.
    pub(crate) marks: bool,
    /// Where the files are; none for dram and sim.
    pub(crate) directory: Option<PathBuf>,
    pub(crate) recorder: Option<Arc<Recorder>>,
    pub(crate) sync_error: OnceLock<(PathBuf, Errno)>,
    pub(crate) fail_next_sync: AtomicBool,
    /// Synchronisations of files that were begun.
    pub(crate) syncs: AtomicU64,
    pub(crate) synchroniser: Arc<Synchroniser>,
    /// Opening came to its end: only then does closing mark the pool as closed in good order.
    pub(crate) opened: AtomicBool,
    /// Holds the lock on the pool.
    pub(crate) _lock: Option<PoolLock>,
}

impl Core {
    /// Fails once a synchronisation has failed.
    pub(crate) fn check_sync(&self) -> Result<(), PmemError> {
        match self.sync_error.get() {
            None => Ok(()),
            Some((file, source)) => {
                Err(PmemError::SyncFailed { file: file.clone(), source: *source })
            }
        }
    }

    /// From here on nothing is promised any more: `file` may have lost what was stored into it.
    pub(crate) fn poison(&self, file: &Path, source: Errno) {
        let _ = self.sync_error.set((file.to_path_buf(), source));
    }

    /// `fdatasync` of the file behind `memory`; the first failure of any file sticks, also for a
    /// synchronisation that was under way meanwhile.
    pub(crate) fn sync(
        &self,
        turn: &SyncTurn,
        memory: &Memory,
        file: impl FnOnce() -> PathBuf,
    ) -> Result<(), PmemError> {
        let Some(descriptor) = memory.descriptor() else { return self.check_sync() };
        self.sync_by(turn, file, || {
            self.syncs.fetch_add(1, Ordering::Relaxed);
            if SYNC.check().is_err() || self.fail_next_sync.swap(false, Ordering::Relaxed) {
                Err(Errno::IO)
            } else {
                rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&*descriptor))
            }
        })
    }

    fn sync_by(
        &self,
        turn: &SyncTurn,
        file: impl FnOnce() -> PathBuf,
        synchronise: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), PmemError> {
        let _turn = turn.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_sync()?;
        if let Err(source) = synchronise() {
            self.poison(&file(), source);
        }
        self.check_sync()
    }

    pub(crate) fn sync_table(&self) -> Result<(), PmemError> {
        self.sync(&self.table_turn, &self.table, || self.table_file.clone())
    }

    /// Stores one word of the table.
    pub(crate) fn table_store(&self, offset: usize, value: u64) {
        match &self.recorder {
            None => store_u64(&self.table, offset, value),
            Some(recorder) => {
                recorder.store(TABLE_OBJECT, &self.table, offset, 8, || {
                    store_u64(&self.table, offset, value);
                });
            }
        }
    }

    pub(crate) fn table_load(&self, offset: usize) -> u64 {
        load_u64(&self.table, offset)
    }

    /// Stores a pair: the value, then its guard, in this order inside one line.
    pub(crate) fn store_pair(&self, offset: usize, value: u64) {
        self.table_store(offset, value);
        self.table_store(offset + 8, layout::guard(value));
    }

    pub(crate) fn pair_intact(&self, offset: usize) -> bool {
        self.table_load(offset + 8) == layout::guard(self.table_load(offset))
    }

    /// Persists a range of the table at the pool's durability.
    pub(crate) fn persist_table(&self, offset: usize, length: usize) -> Result<(), PmemError> {
        self.check_sync()?;
        match self.mechanism {
            Mechanism::None => Ok(()),
            Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_) => {
                let lines = self.write_back_range(&self.table, offset, length);
                cache::store_fence();
                self.delay(lines as u64);
                Ok(())
            }
            Mechanism::FileSync => self.sync_table(),
            Mechanism::Recorded => {
                if let Some(recorder) = &self.recorder {
                    let by = recorder.actor();
                    recorder.flush(TABLE_OBJECT, offset, length, by);
                    recorder.push(crate::record::Event::Fenced { by });
                }
                Ok(())
            }
        }
    }

    /// Starts write-back of lines of `memory`; returns how many.
    pub(crate) fn write_back_range(&self, memory: &Memory, offset: usize, length: usize) -> usize {
        assert!(
            beeline_os::memory::contains(memory, offset as u64, length as u64),
            "a flush stays inside its object"
        );
        // SAFETY: the range was just checked to lie inside the mapping.
        let start = unsafe { memory.base().as_ptr().add(offset) };
        // SAFETY: `memory` is borrowed, so the range stays mapped for the call.
        unsafe { cache::write_back(self.write_back, start, length) };
        cache::line_count(offset, length)
    }

    /// Waits as slower memory would have for `lines` lines.
    pub(crate) fn delay(&self, lines: u64) {
        let nanos = u64::from(self.write_delay_ns) * lines;
        if nanos > 0 {
            let until = Instant::now() + Duration::from_nanos(nanos);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
    }

    /// Moves descriptor `id` to `state`: one store decides, the second copy follows. Persisted
    /// when it returns.
    pub(crate) fn persist_state(&self, id: u32, state: State) -> Result<(), PmemError> {
        self.store_state(id, state);
        self.persist_table(layout::descriptor_offset(id), LINE_BYTES)
    }

    /// As [`Core::persist_state`], stored only.
    pub(crate) fn store_state(&self, id: u32, state: State) {
        let offset = layout::descriptor_offset(id);
        let word = state.encode(id);
        self.table_store(offset, word);
        self.table_store(offset + 8, word);
    }

    /// Zeroes the user words of descriptor `id` and persists them.
    pub(crate) fn persist_zero_words(&self, id: u32) -> Result<(), PmemError> {
        for index in 0..layout::SEGMENT_WORDS {
            let offset = layout::word_offset(id, index);
            if self.table_load(offset) != 0 || self.table_load(offset + 8) != 0 {
                self.store_pair(offset, 0);
            }
        }
        let offset = layout::word_offset(id, 0);
        self.persist_table(offset, layout::SEGMENT_WORDS * layout::PAIR_BYTES)
    }

    /// The file of segment `id`; a name for messages where there are no files.
    pub(crate) fn segment_file(&self, id: u32) -> PathBuf {
        let directory = self.directory.clone().unwrap_or_else(|| self.kind.to_string().into());
        directory.join("segments").join(format!("{id}.seg"))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.synchroniser.stop();
        // A good end, unless a promise was broken. Losing the mark costs nothing but the mark.
        let opened = self.opened.load(Ordering::Relaxed);
        if opened && self.directory.is_some() && self.sync_error.get().is_none() {
            self.store_pair(layout::CLEAN_OFFSET, 1);
            let _ = self.persist_table(layout::CLEAN_OFFSET, layout::PAIR_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::open;
    use crate::options::PoolOptions;

    /// The kernel tells one of the two; the other's call returns well.
    #[test]
    fn two_synchronisers_of_one_file_both_hear_of_its_failure() {
        let options = PoolOptions::volatile(64 << 10, 1 << 20);
        let core = open::dram(&options).unwrap().core;
        let turn = SyncTurn::default();
        let (inside, is_inside) = mpsc::channel();
        let (outcome, second) = mpsc::channel();
        let file = || PathBuf::from("file");
        std::thread::scope(|scope| {
            scope.spawn({
                let (core, turn) = (&core, &turn);
                move || {
                    is_inside.recv().unwrap();
                    outcome.send(core.sync_by(turn, file, || Ok(()))).unwrap();
                }
            });
            let first = core.sync_by(&turn, file, || {
                inside.send(()).unwrap();
                // The other has every chance to return before this one is told.
                let early = second.recv_timeout(Duration::from_secs(1));
                assert!(early.is_err(), "a second synchroniser returned {early:?}");
                Err(Errno::IO)
            });
            assert!(matches!(first, Err(PmemError::SyncFailed { .. })));
            let late = second.recv().unwrap();
            assert!(matches!(late, Err(PmemError::SyncFailed { .. })), "{late:?}");
        });
    }

    #[test]
    fn a_synchronisation_fails_when_another_file_failed_meanwhile() {
        let options = PoolOptions::volatile(64 << 10, 1 << 20);
        let core = open::dram(&options).unwrap().core;
        let (one, other) = (SyncTurn::default(), SyncTurn::default());
        let outcome = core.sync_by(
            &one,
            || "one".into(),
            || {
                let _ = core.sync_by(&other, || "other".into(), || Err(Errno::IO));
                Ok(())
            },
        );
        assert!(
            matches!(outcome, Err(PmemError::SyncFailed { file, .. }) if file.ends_with("other"))
        );
    }
}
