//! What a member's directory and threads stand on: the seam for simulations.
//!
//! A member asks its machine for four things beside fabric and files: memory that lasts, a number that
//! no other member has, which run of the machine this is, and threads for what may take long. A
//! simulation gives all four from its seed.

use std::fmt::Debug;
use std::io;
use std::path::Path;

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
