//! Snapshots on request: SAVE, BGSAVE, `beeline kv backup`.
//!
//! One at a time, on a thread of its own; the file appears under its name only when it is whole.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use beeline_resp::SaveError;

use crate::shared::{Shared, lock};

/// Name of the snapshot in the data directory.
pub const FILE_NAME: &str = "snapshot.bee";

#[derive(Debug, Default)]
struct Running {
    thread: Option<JoinHandle<()>>,
    again: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Snapshots {
    path: PathBuf,
    in_progress: Arc<AtomicBool>,
    last_succeeded: Arc<AtomicBool>,
    last_save_seconds: Arc<AtomicU64>,
    running: Mutex<Running>,
}

impl Snapshots {
    pub(crate) fn new(directory: &Path, now_seconds: u64) -> Self {
        Self {
            path: directory.join(FILE_NAME),
            in_progress: Arc::default(),
            last_succeeded: Arc::new(AtomicBool::new(true)),
            last_save_seconds: Arc::new(AtomicU64::new(now_seconds)),
            running: Mutex::default(),
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

    /// Writes a snapshot and waits for it.
    pub(crate) fn save(&self, shared: &Shared) -> Result<(), SaveError> {
        let _ = (shared, &self.path);
        Err(SaveError::Failed("snapshots are not connected yet".into()))
    }

    /// Begins a snapshot on a thread of its own.
    pub(crate) fn save_in_background(&self, schedule: bool) -> Result<bool, SaveError> {
        let mut running = lock(&self.running);
        running.again |= schedule && self.in_progress();
        Err(SaveError::Failed("snapshots are not connected yet".into()))
    }

    /// Waits for a snapshot that is being written.
    pub(crate) fn wait(&self) {
        if let Some(thread) = lock(&self.running).thread.take() {
            let _ = thread.join();
        }
    }
}
