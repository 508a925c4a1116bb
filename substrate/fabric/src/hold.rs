//! The guard of [`QueuePair::hold`](crate::QueuePair::hold): posts that reach the peer together.
//!
//! It owns its share of what the provider needs, and so can be kept beside the queue pair, from one
//! call to another, and cannot be forgotten: whatever way its owner leaves, the posts go out.

use std::fmt;
use std::rc::Rc;

/// What a provider does at the end of a [`Hold`].
pub trait Held {
    /// Called once for every hold: one of several may still be there.
    fn release(&self);
}

/// Keeps what is posted to a queue pair from its peer, until it is dropped.
#[derive(Default)]
#[must_use = "dropped at once, it holds nothing back"]
pub struct Hold(Option<Rc<dyn Held>>);

impl Hold {
    /// Of a provider that keeps nothing back.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Calls `held` when it is dropped.
    pub fn new(held: Rc<dyn Held>) -> Self {
        Self(Some(held))
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Hold").field(&self.0.is_some()).finish()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(held) = self.0.take() {
            held.release();
        }
    }
}
