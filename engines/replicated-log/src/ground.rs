//! What a member's directory and threads stand on: the seam for simulations.
//!
//! A member asks its machine for four things beside fabric and files: memory that lasts, a number that
//! no other member has, which run of the machine this is, and threads for what may take long. A
//! simulation gives all four from its seed.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beeline_pmem::{PmemError, Pool, PoolOptions};

use crate::boot::Boot;

/// Memory, chance and the machine's run.
pub trait Ground: Debug {
    /// Makes the pool at `path`.
    ///
    /// Errors: the pool's.
    fn create_pool(&self, path: &Path, options: &PoolOptions) -> Result<Pool, PmemError>;

    /// Opens it again.
    ///
    /// Errors: the pool's.
    fn open_pool(&self, path: &Path, options: &PoolOptions) -> Result<Pool, PmemError>;

    /// A number that no other member has.
    ///
    /// Errors: there is no randomness.
    fn draw(&self) -> io::Result<u64>;

    /// The machine's present run.
    fn boot(&self) -> Boot;
}

/// This machine: pools in directories, the kernel's randomness.
#[derive(Debug, Default)]
pub struct ThisMachine {
    /// Instead of the machine's present run.
    pub boot: Option<Boot>,
}

impl Ground for ThisMachine {
    fn create_pool(&self, path: &Path, options: &PoolOptions) -> Result<Pool, PmemError> {
        Pool::create(path, options)
    }

    fn open_pool(&self, path: &Path, options: &PoolOptions) -> Result<Pool, PmemError> {
        Pool::open(path, options)
    }

    fn draw(&self) -> io::Result<u64> {
        getrandom::u64().map_err(|error| io::Error::other(error.to_string()))
    }

    fn boot(&self) -> Boot {
        self.boot.clone().unwrap_or_else(Boot::of_this_machine)
    }
}

/// Something that may take long.
pub type Job = Box<dyn FnOnce() + Send>;

/// Where a member has done what may take long: dialling, writing snapshots.
pub trait Jobs: Send + Sync + Debug {
    /// Has `job` run, soon and elsewhere.
    ///
    /// Errors: it cannot be.
    fn run(&self, name: &str, job: Job) -> io::Result<()>;
}

/// A thread for each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Threads;

impl Jobs for Threads {
    fn run(&self, name: &str, job: Job) -> io::Result<()> {
        std::thread::Builder::new().name(name.to_owned()).spawn(job).map(|_| ())
    }
}

/// A thread that has nothing to do for so long goes.
const LINGERS: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct State {
    waiting: Mutex<Waiting>,
    came: Condvar,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job; `None` when there was none for a while.
    fn next(&self) -> Option<Job> {
        let mut waiting = self.lock();
        waiting.idle += 1;
        let lacks = |waiting: &mut Waiting| waiting.jobs.is_empty();
        let waited = self.came.wait_timeout_while(waiting, LINGERS, lacks);
        waiting = waited.unwrap_or_else(PoisonError::into_inner).0;
        waiting.idle -= 1;
        let job = waiting.jobs.pop_front();
        waiting.threads -= usize::from(job.is_none());
        job
    }
}

/// A bounded number of threads for each kind of job, made when they are needed, for many members: jobs
/// beyond wait. Kinds are told apart by name, so dialling hosts that do not answer keeps no snapshot from
/// being written.
pub struct FewThreads {
    most: usize,
    kinds: Mutex<HashMap<String, Arc<State>>>,
}

impl Debug for FewThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FewThreads").field("most", &self.most).finish_non_exhaustive()
    }
}

impl FewThreads {
    /// Of `most` threads for each kind, at least one.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), kinds: Mutex::default() }
    }

    fn state_of(&self, name: &str) -> Arc<State> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(kinds.entry(name.to_owned()).or_default())
    }
}

impl Jobs for FewThreads {
    fn run(&self, name: &str, job: Job) -> io::Result<()> {
        let state = self.state_of(name);
        let mut waiting = state.lock();
        if waiting.idle <= waiting.jobs.len() && waiting.threads < self.most {
            let shared = Arc::clone(&state);
            let work = move || {
                while let Some(job) = shared.next() {
                    // One that panics takes neither the thread nor the place of it along.
                    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                }
            };
            let made = std::thread::Builder::new().name(name.to_owned()).spawn(work);
            match made {
                Ok(_) => waiting.threads += 1,
                Err(error) if waiting.threads == 0 => return Err(error),
                // Those that are there do it later.
                Err(_) => {}
            }
        }
        waiting.jobs.push_back(job);
        drop(waiting);
        state.came.notify_one();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn few_threads_do_every_job_and_outlive_one_that_panics() {
        let few = FewThreads::new(3);
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (sender, done) = channel();
        for number in 0..60 {
            let (running, most, sender) = (Arc::clone(&running), Arc::clone(&most), sender.clone());
            let job = move || {
                assert!(number != 7, "on purpose");
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
                running.fetch_sub(1, Ordering::SeqCst);
                let _ = sender.send(number);
            };
            few.run("job", Box::new(job)).unwrap();
        }
        // Another kind waits for none of them.
        let one = FewThreads::new(1);
        let (gate, waits) = channel::<()>();
        let (other, ran) = channel();
        let wait = move || assert!(waits.recv().is_err(), "only ended");
        one.run("stuck", Box::new(wait)).unwrap();
        one.run("free", Box::new(move || other.send(()).unwrap_or_default())).unwrap();
        ran.recv().unwrap();
        drop(gate);
        drop(sender);
        let mut numbers: Vec<_> = done.iter().collect();
        numbers.sort_unstable();
        let wanted: Vec<_> = (0..60).filter(|number| *number != 7).collect();
        assert_eq!(numbers, wanted);
        assert!(most.load(Ordering::SeqCst) <= 3);
    }
}
