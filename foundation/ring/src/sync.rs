//! One facade for atomics and cells: std, or loom under `--cfg loom`, in this crate's own tests. A crate with loom models
//! of its own has these rings over std's atomics, as the memory of other processes has them.

#[cfg(not(all(test, loom)))]
pub use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

#[cfg(all(test, loom))]
pub use loom::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// A cell whose exclusive access the surrounding protocol guarantees; loom checks that it does.
#[derive(Debug)]
pub struct ProtocolCell<T>(Cell<T>);

#[cfg(not(all(test, loom)))]
type Cell<T> = std::cell::UnsafeCell<T>;
#[cfg(all(test, loom))]
type Cell<T> = loom::cell::UnsafeCell<T>;

impl<T> ProtocolCell<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self(Cell::new(value))
    }

    /// Runs `with` on the exclusive pointer to the value.
    #[cfg(not(all(test, loom)))]
    pub fn with_mut<R>(&self, with: impl FnOnce(*mut T) -> R) -> R {
        with(self.0.get())
    }

    /// Runs `with` on the exclusive pointer to the value.
    #[cfg(all(test, loom))]
    pub fn with_mut<R>(&self, with: impl FnOnce(*mut T) -> R) -> R {
        self.0.with_mut(with)
    }
}

/// Explores `body` under loom and says how many executions there were.
#[cfg(all(test, loom))]
pub(crate) fn explore(name: &str, body: impl Fn() + Sync + Send + 'static) {
    use std::io::Write as _;
    static EXECUTIONS: std::sync::Mutex<u64> = std::sync::Mutex::new(0);
    let count = |change: fn(&mut u64)| {
        let mut executions = EXECUTIONS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        change(&mut executions);
        *executions
    };
    let before = count(|_| ());
    loom::model(move || {
        count(|executions| *executions += 1);
        body();
    });
    // Exact when models run one after the other, as `cargo xtask deep` has it.
    let executions = count(|_| ()) - before;
    let _ = writeln!(std::io::stderr(), "ran: {name}: {executions} executions");
}
