//! One facade for atomics and cells: std, or loom under `--cfg loom`.

#[cfg(not(loom))]
pub use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

#[cfg(loom)]
pub use loom::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// A cell whose exclusive access the surrounding protocol guarantees; loom checks that it does.
#[derive(Debug)]
pub struct ProtocolCell<T>(Cell<T>);

#[cfg(not(loom))]
type Cell<T> = std::cell::UnsafeCell<T>;
#[cfg(loom)]
type Cell<T> = loom::cell::UnsafeCell<T>;

impl<T> ProtocolCell<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self(Cell::new(value))
    }

    /// Runs `with` on the exclusive pointer to the value.
    #[cfg(not(loom))]
    pub fn with_mut<R>(&self, with: impl FnOnce(*mut T) -> R) -> R {
        with(self.0.get())
    }

    /// Runs `with` on the exclusive pointer to the value.
    #[cfg(loom)]
    pub fn with_mut<R>(&self, with: impl FnOnce(*mut T) -> R) -> R {
        self.0.with_mut(with)
    }
}
