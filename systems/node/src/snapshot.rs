//! Snapshots on request: SAVE, BGSAVE, SHUTDOWN SAVE.
//!
//! One at a time. A background snapshot takes its barrier on a thread of its own, which locks all
//! shards for a moment, and writes without any lock. SAVE takes the barrier in the shards' loop
//! ([`Snapshots::prepare`]) and keeps its client waiting until the file is whole. The file appears
//! under its name only then. A node that stops gives a background snapshot up.
//!
//! Invariant: while [`Snapshots::in_progress`] says no, every snapshot that was asked for, or
//! scheduled, before has ended: a backup copies the file then.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use beeline_kv::{Keyspace, KvError, Snapshot, SnapshotReport, Store};
use beeline_resp::SaveError;

use crate::replicated::Look;
use crate::shared::{Shared, lock};

/// Name of the snapshot in the data directory.
pub const FILE_NAME: &str = "snapshot.bee";

/// How far the thread that writes a background snapshot's file stands back.
const SNAPSHOT_NICE: i32 = 19;

/// Between two looks whether another snapshot of the store, a replicated log's for instance, has ended.
const OTHERS_PAUSE: Duration = Duration::from_millis(50);
/// Between two looks whether one that was given up has ended.
const GIVE_UP_PAUSE: Duration = Duration::from_millis(2);

/// What the thread of background snapshots is at.
#[derive(Debug, Default)]
struct Background {
    running: bool,
    /// Another one was asked for meanwhile.
    again: bool,
    /// The node stops: none begins any more.
    stopping: bool,
}

impl Background {
    /// Asks for one. `Ok(true)`: the thread is to be started; `Ok(false)`: it will write another.
    fn ask(&mut self, schedule: bool) -> Result<bool, SaveError> {
        if self.stopping {
            return Err(SaveError::Failed("the node is stopping".into()));
        }
        if self.running && !schedule {
            return Err(SaveError::InProgress);
        }
        self.again = self.running;
        Ok(!std::mem::replace(&mut self.running, true))
    }

    /// One has ended; whether the thread is to write another.
    fn end(&mut self) -> bool {
        self.running = std::mem::take(&mut self.again) && !self.stopping;
        self.running
    }
}

/// Ends what is under way where the thread that writes panics.
struct Writing<'s>(&'s Snapshots);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut background = lock(&self.0.background);
            (background.running, background.again) = (false, false);
            self.0.last_succeeded.store(false, Ordering::Release);
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Snapshots {
    path: PathBuf,
    background: Mutex<Background>,
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
            background: Mutex::default(),
            last_succeeded: AtomicBool::new(true),
            last_save_seconds: AtomicU64::new(now_seconds),
            prepared: Mutex::default(),
            thread: Mutex::default(),
        }
    }

    pub(crate) fn in_progress(&self) -> bool {
        lock(&self.background).running
    }

    pub(crate) fn last_succeeded(&self) -> bool {
        self.last_succeeded.load(Ordering::Acquire)
    }

    pub(crate) fn last_save_seconds(&self) -> u64 {
        self.last_save_seconds.load(Ordering::Acquire)
    }

    /// Takes the barrier for a SAVE that runs next on this thread, which holds all shards. None while what they hold
    /// is a part.
    pub(crate) fn prepare(&self, keyspace: &mut Keyspace<'_>, shared: &Shared) {
        *lock(&self.prepared) = Some(begin(keyspace, shared));
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
        if !lock(&self.background).ask(schedule)? {
            return Ok(true);
        }
        let shared = Arc::clone(shared);
        let spawned = std::thread::Builder::new().name("snapshot".into()).spawn(move || {
            let snapshots = &shared.snapshots;
            let _writing = Writing(snapshots);
            loop {
                if let Err(error) = snapshots.run(&shared) {
                    snapshots.last_succeeded.store(false, Ordering::Release);
                    tracing::error!(%error, "the background snapshot failed");
                }
                if !lock(&snapshots.background).end() {
                    break;
                }
            }
        });
        match spawned {
            Ok(thread) => {
                if let Some(earlier) = lock(&self.thread).replace(thread) {
                    // It has said that it ended.
                    let _ = earlier.join();
                }
                Ok(false)
            }
            Err(error) => {
                lock(&self.background).end();
                Err(SaveError::Failed(format!("cannot start a thread: {error}")))
            }
        }
    }

    fn run(&self, shared: &Shared) -> Result<(), KvError> {
        let all: Vec<usize> = (0..shared.shards.len()).collect();
        let take_barrier = || {
            let _inside = shared.enter_cut(Look::Save);
            let mut guards = shared.lock_shards(&all);
            let shards = guards.iter_mut().map(|guard| &mut **guard).collect();
            begin(&mut Keyspace::many(shards, 0), shared)
        };
        let snapshot = loop {
            match take_barrier() {
                // Of a replicated log, or the log brings what is missing: it ends, and this one was asked for.
                Err(KvError::SnapshotInProgress) if !lock(&self.background).stopping => {
                    std::thread::sleep(OTHERS_PAUSE);
                }
                begun => break begun?,
            }
        };
        // The barrier is taken and shards are asked as everything else here is: they would wait for a thread that
        // stands back and holds their locks until it gets a processor again. Shards' threads and their clients come
        // before the file, where there are not enough processors.
        let stand_back = || {
            let _ = rustix::process::nice(SNAPSHOT_NICE);
        };
        self.written(snapshot.write_beside(&self.path, stand_back), shared)
    }

    /// Gives up a background snapshot that is being written, and what was scheduled behind it: the
    /// file under its name stays as it was. Called when no shard's thread runs any more.
    pub(crate) fn stop(&self, store: &Store) {
        lock(&self.background).stopping = true;
        let Some(thread) = lock(&self.thread).take() else { return };
        while !thread.is_finished() {
            store.give_up_snapshot();
            std::thread::sleep(GIVE_UP_PAUSE);
        }
        if thread.join().is_err() {
            tracing::error!("the thread of a background snapshot ended in a panic");
        }
    }
}

/// Takes the barrier of a snapshot: not while a replicated log brings the rest of what the shards hold.
fn begin(keyspace: &mut Keyspace<'_>, shared: &Shared) -> Result<Snapshot, KvError> {
    if shared.is_loading() { Err(KvError::SnapshotInProgress) } else { keyspace.begin_snapshot() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_that_was_scheduled_is_under_way_until_it_ended() {
        let mut background = Background::default();
        assert!(background.ask(true).unwrap(), "the first one starts the thread");
        assert!(background.ask(false).is_err(), "one at a time");
        assert!(!background.ask(true).unwrap(), "the thread goes on with it");
        // At no moment between the two does it look as if all had ended.
        assert!(background.end() && background.running);
        assert!(!background.end() && !background.running);
        assert!(background.ask(false).unwrap());
        background.stopping = true;
        assert!(background.ask(true).is_err(), "the node stops");
        background.again = true;
        assert!(!background.end(), "the node stops");
    }
}
