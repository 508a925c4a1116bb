//! Whether a member may write: a term that it leads in, which is the newest, while a majority is known to follow.
//!
//! Looked at with every batch, under the lock of its row. Shut by a newer term at the moment the log applies it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Whether a member may write, looked at with every batch.
#[derive(Debug)]
pub struct Gate {
    began: Instant,
    /// The term this member was made ready to lead in; 0: none.
    led: AtomicU64,
    /// The newest term that the log has begun.
    begun: AtomicU64,
    /// Until when a majority is known to follow, milliseconds of [`Gate::now_ms`].
    lease_ms: AtomicU64,
}

impl Default for Gate {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self { began: Instant::now(), led: zero(), begun: zero(), lease_ms: zero() }
    }
}

impl Gate {
    /// Milliseconds since the member started.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The log has begun a term: the member that led before acknowledges nothing.
    pub fn fence(&self, term: u64) {
        self.begun.fetch_max(term, Ordering::SeqCst);
    }

    /// Opens it for a term.
    pub fn lead(&self, term: u64) {
        self.led.store(term, Ordering::SeqCst);
    }

    /// A majority follows until this time.
    pub fn extend(&self, until_ms: u64) {
        self.lease_ms.fetch_max(until_ms, Ordering::SeqCst);
    }

    /// Shuts it.
    pub fn shut(&self) {
        self.led.store(0, Ordering::SeqCst);
        self.lease_ms.store(0, Ordering::SeqCst);
    }

    /// The term in which this member may write now.
    #[must_use]
    pub fn term(&self) -> Option<u64> {
        let led = self.led.load(Ordering::SeqCst);
        let leads = led != 0
            && led == self.begun.load(Ordering::SeqCst)
            && self.now_ms() < self.lease_ms.load(Ordering::SeqCst);
        leads.then_some(led)
    }
}
