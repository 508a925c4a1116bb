//! Connections that each thread has for itself, behind objects that threads share.
//!
//! Invariants: a connection ends with its object, at the latest when its thread next uses another of
//! the same kind; a child of `fork` neither uses nor ends a connection of its parent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

static NEXT: AtomicU64 = AtomicU64::new(0);
/// Objects that Python let go of so far: a thread whose count differs looks through its connections.
static GONE: AtomicU64 = AtomicU64::new(0);

/// Names an object with connections, while it lives.
pub(crate) struct Named {
    number: u64,
    life: Arc<()>,
}

impl Named {
    pub(crate) fn new() -> Self {
        Self { number: NEXT.fetch_add(1, Ordering::Relaxed), life: Arc::new(()) }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        GONE.fetch_add(1, Ordering::Relaxed);
    }
}

/// A connection, and the process that made it.
struct Kept<C> {
    connection: Option<C>,
    process: u32,
    of: Weak<()>,
}

impl<C> Kept<C> {
    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<C> Drop for Kept<C> {
    fn drop(&mut self) {
        if !self.is_own() {
            // To end it would end it in the parent.
            std::mem::forget(self.connection.take());
        }
    }
}

/// The connections of one thread, by object.
pub(crate) struct Connections<C> {
    kept: HashMap<u64, Kept<C>>,
    gone: u64,
}

impl<C> Connections<C> {
    pub(crate) fn new() -> Self {
        Self { kept: HashMap::new(), gone: 0 }
    }

    /// This thread's connection of `object`, made by `connect` where there is none.
    pub(crate) fn of<E>(
        &mut self,
        object: &Named,
        connect: impl FnOnce() -> Result<C, E>,
    ) -> Result<&mut C, E> {
        let gone = GONE.load(Ordering::Relaxed);
        if self.gone != gone {
            self.gone = gone;
            self.kept.retain(|_, kept| kept.of.strong_count() > 0);
        }
        let kept = self.kept.entry(object.number).or_insert_with(|| Kept {
            connection: None,
            process: std::process::id(),
            of: Arc::downgrade(&object.life),
        });
        if !kept.is_own() {
            std::mem::forget(kept.connection.take());
            kept.process = std::process::id();
        }
        match &mut kept.connection {
            Some(connection) => Ok(connection),
            none => Ok(none.insert(connect()?)),
        }
    }

    /// Ends this thread's connection of `object`.
    pub(crate) fn end(&mut self, object: &Named) {
        self.kept.remove(&object.number);
    }
}
