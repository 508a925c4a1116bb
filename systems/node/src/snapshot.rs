//! Snapshots on request: SAVE, BGSAVE, SHUTDOWN SAVE.
//!
//! One at a time. A background snapshot takes its barrier on a thread of its own, which locks all
//! shards for a moment, and writes without any lock. SAVE takes the barrier in the shards' loop
//! ([`Snapshots::prepare`]) and keeps its client waiting until the file is whole. The file appears
//! under its name only then.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use beeline_kv::{Keyspace, KvError, Snapshot, SnapshotReport};
use beeline_resp::SaveError;

use crate::shared::{Shared, lock};

/// Name of the snapshot in the data directory.
pub const FILE_NAME: &str = "snapshot.bee";

/// How far the thread that writes a background snapshot's file stands back.
const SNAPSHOT_NICE: i32 = 19;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Snapshots {
    path: PathBuf,
    in_progress: AtomicBool,
    /// Another one was asked for meanwhile.
    again: AtomicBool,
    last_succeeded: AtomicBool,
    last_save_seconds: AtomicU64,
    /// The barrier of a SAVE about to run.
    prepared: Mutex<Option<Result<Snapshot, KvError>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Snapshots {
    pub(crate) fn new(directory: &Path, now_seconds: u64) -> Self {
        Self {
            path: directory.join(FILE_NAME),
            in_progress: AtomicBool::new(false),
            again: AtomicBool::new(false),
            last_succeeded: AtomicBool::new(true),
            last_save_seconds: AtomicU64::new(now_seconds),
            prepared: Mutex::default(),
            thread: Mutex::default(),
        }
    }

    pub(crate) fn in_progress(&self) -> bool {
        self.in_progress.load(Ordering::Acquire)
    }

    pub(crate) fn last_succeeded(&self) -> bool {
        self.last_succeeded.load(Ordering::Acquire)
    }

    pub(crate) fn last_save_seconds(&self) -> u64 {
        self.last_save_seconds.load(Ordering::Acquire)
    }

    /// Takes the barrier for a SAVE that runs next on this thread, which holds all shards.
    pub(crate) fn prepare(&self, keyspace: &mut Keyspace<'_>) {
        *lock(&self.prepared) = Some(keyspace.begin_snapshot());
    }

    /// Gives up a barrier that was not used.
    pub(crate) fn discard_prepared(&self) {
        lock(&self.prepared).take();
    }

    /// Writes the prepared snapshot and waits for it.
    pub(crate) fn save(&self, shared: &Shared) -> Result<(), SaveError> {
        let prepared = lock(&self.prepared).take().ok_or(SaveError::InProgress)?;
        let written = prepared.and_then(|prepared| {
            let written = prepared.write(&self.path);
            self.written(written, shared)
        });
        written.map_err(|error| match error {
            KvError::SnapshotInProgress => SaveError::InProgress,
            error => SaveError::Failed(error.to_string()),
        })
    }

    fn written(
        &self,
        written: Result<SnapshotReport, KvError>,
        shared: &Shared,
    ) -> Result<(), KvError> {
        self.last_succeeded.store(written.is_ok(), Ordering::Release);
        let report = written?;
        self.last_save_seconds.store(shared.unix_us() / 1_000_000, Ordering::Release);
        tracing::info!(
            records = report.records,
            bytes = report.bytes,
            path = %self.path.display(),
            "snapshot written"
        );
        Ok(())
    }

    /// Begins a snapshot on a thread of its own. `Ok(true)`: it follows the one in progress.
    pub(crate) fn save_in_background(
        &self,
        shared: &Arc<Shared>,
        schedule: bool,
    ) -> Result<bool, SaveError> {
        if self.in_progress.swap(true, Ordering::AcqRel) {
            if schedule {
                self.again.store(true, Ordering::SeqCst);
                return Ok(true);
            }
            return Err(SaveError::InProgress);
        }
        let shared = Arc::clone(shared);
        let spawned = std::thread::Builder::new().name("snapshot".into()).spawn(move || {
            let snapshots = &shared.snapshots;
            loop {
                if let Err(error) = snapshots.run(&shared) {
                    snapshots.last_succeeded.store(false, Ordering::Release);
                    tracing::error!(%error, "the background snapshot failed");
                }
                if snapshots.again.swap(false, Ordering::AcqRel) {
                    continue;
                }
                snapshots.in_progress.store(false, Ordering::SeqCst);
                // Scheduled between the look and the store: nobody else will run it.
                if !snapshots.again.swap(false, Ordering::SeqCst)
                    || snapshots.in_progress.swap(true, Ordering::SeqCst)
                {
                    break;
                }
            }
        });
        match spawned {
            Ok(thread) => {
                if let Some(earlier) = lock(&self.thread).replace(thread) {
                    // It has cleared `in_progress`, so it is at its end.
                    let _ = earlier.join();
                }
                Ok(false)
            }
            Err(error) => {
                self.in_progress.store(false, Ordering::Release);
                Err(SaveError::Failed(format!("cannot start a thread: {error}")))
            }
        }
    }

    fn run(&self, shared: &Shared) -> Result<(), KvError> {
        let snapshot = {
            let all: Vec<usize> = (0..shared.shards.len()).collect();
            let mut guards = shared.lock_shards(&all);
            let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
            Keyspace::many(shards, 0).begin_snapshot()?
        };
        // The barrier is taken and shards are asked as everything else here is: they would wait for a thread that
        // stands back and holds their locks until it gets a processor again. Shards' threads and their clients come
        // before the file, where there are not enough processors.
        let stand_back = || {
            let _ = rustix::process::nice(SNAPSHOT_NICE);
        };
        self.written(snapshot.write_beside(&self.path, stand_back), shared)
    }

    /// Waits for a snapshot that is being written.
    pub(crate) fn wait(&self) {
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}
