//! Completions that wait for the receiver: sends to a shared receive queue.
//!
//! Such a receiver publishes no credit (its receives belong to whoever comes first), so a message
//! may reach the ring before there is a receive for it. Its request completes when the receiver
//! has taken it; until then, what was posted after it has run, but completes behind it.

use std::collections::VecDeque;

use beeline_fabric::{Status, WorkCompletion};

#[derive(Debug)]
struct Entry {
    /// Messages the receiver must have taken.
    until: u64,
    completion: WorkCompletion,
    signalled: bool,
}

/// In post order. Bounded by the send depth.
#[derive(Debug, Default)]
pub(crate) struct Unconfirmed {
    entries: VecDeque<Entry>,
    signalled: usize,
}

impl Unconfirmed {
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Somebody waits for one of the completions.
    pub(crate) fn is_awaited(&self) -> bool {
        self.signalled > 0
    }

    pub(crate) fn push(&mut self, until: u64, completion: WorkCompletion, signalled: bool) {
        self.signalled += usize::from(signalled);
        self.entries.push_back(Entry { until, completion, signalled });
    }

    /// The next completion that `consumed` messages confirm; with whether it was asked for.
    pub(crate) fn confirmed(&mut self, consumed: u64) -> Option<(WorkCompletion, bool)> {
        if self.entries.front()?.until > consumed {
            return None;
        }
        self.take()
    }

    /// The next completion, confirmed or not, as it is.
    pub(crate) fn take(&mut self) -> Option<(WorkCompletion, bool)> {
        let entry = self.entries.pop_front()?;
        self.signalled -= usize::from(entry.signalled);
        Some((entry.completion, entry.signalled))
    }

    /// The next completion after the connection broke: a success that nobody confirmed is flushed,
    /// or was too long when it is the message the receiver named.
    pub(crate) fn flushed(&mut self, too_long: u64) -> Option<WorkCompletion> {
        let until = self.entries.front()?.until;
        let (mut completion, _) = self.take()?;
        if completion.status == Status::Success {
            let named = too_long != 0 && too_long == until;
            completion.status = if named { Status::LengthError } else { Status::Flushed };
        }
        Some(completion)
    }
}
