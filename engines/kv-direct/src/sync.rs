//! Atomics, or loom's stand-ins for them where loom drives the tests.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// `length` words of zero; pages are taken as they are first used.
pub(crate) fn words(length: usize) -> Vec<AtomicU64> {
    #[cfg(not(loom))]
    return bytemuck::allocation::zeroed_vec(length);
    #[cfg(loom)]
    return (0..length).map(|_| AtomicU64::new(0)).collect();
}
