//! The simulated device's record: every store, flush and fence, in one order.
//!
//! Object 0 is `pool.bee`; object `id + 1` is the segment of descriptor `id`. Making and removing
//! an object is durable at once, as the real pool synchronises the directory before it goes on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_os::memory::{contains, load_u64};

use crate::memory::Memory;
use crate::synchroniser::Line;
use beeline_os::write_back::CACHE_LINE_BYTES as LINE_BYTES;

/// One entry of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A zeroed object came to be.
    Created {
        /// Object number.
        object: u32,
        /// Its length.
        length_bytes: usize,
    },
    /// The object is gone.
    Removed {
        /// Object number.
        object: u32,
    },
    /// An aligned word got a value. Words of one call share a group; within a group the processor
    /// may store in any order.
    Stored {
        /// Object number.
        object: u32,
        /// Word number: offset / 8.
        word: u32,
        /// Its value after the store.
        value: u64,
        /// Number of the call.
        group: u32,
    },
    /// A line's write-back started.
    Flushed {
        /// Object number.
        object: u32,
        /// Line number: offset / 64.
        line: u32,
        /// Who flushed: only its own fence completes the write-back.
        by: u32,
    },
    /// Every write-back started by `by` is complete.
    Fenced {
        /// Who fenced.
        by: u32,
    },
    /// A mark set by the test.
    Marked {
        /// Its label.
        label: u64,
    },
}

/// The record and its numbering.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    events: Mutex<History>,
    next_actor: AtomicU32,
    held: Mutex<Held>,
}

/// Fences that were begun and wait for the test.
#[derive(Debug, Default)]
struct Held {
    holds: bool,
    fences: VecDeque<(Arc<Line>, u64, u32)>,
}

#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) events: Vec<Event>,
    groups: u32,
}

impl Recorder {
    pub(crate) fn lock(&self) -> MutexGuard<'_, History> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A fresh number for somebody who flushes and fences.
    pub(crate) fn actor(&self) -> u32 {
        self.next_actor.fetch_add(1, Ordering::Relaxed)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether fences that are begun wait to be completed.
    pub(crate) fn holds_fences(&self) -> bool {
        self.held().holds
    }

    pub(crate) fn hold_fences(&self) {
        self.held().holds = true;
    }

    /// Keeps a fence of `by`, the ticket of `line`, for later.
    pub(crate) fn hold(&self, line: Arc<Line>, ticket: u64, by: u32) {
        self.held().fences.push_back((line, ticket, by));
    }

    /// Completes the fence that was begun first; false where none waits.
    pub(crate) fn complete_fence(&self) -> bool {
        let Some((line, ticket, by)) = self.held().fences.pop_front() else { return false };
        self.push(Event::Fenced { by });
        line.done(ticket);
        true
    }

    pub(crate) fn push(&self, event: Event) {
        self.lock().events.push(event);
    }

    /// Runs `store`, which changes `offset..offset+length` of `memory`, and records the words it
    /// leaves. Store and record are one step for every other recorded store.
    pub(crate) fn store(
        &self,
        object: u32,
        memory: &Memory,
        offset: usize,
        length: usize,
        store: impl FnOnce(),
    ) {
        let mut history = self.lock();
        store();
        if length == 0 {
            return;
        }
        assert!(contains(memory, offset as u64, length as u64), "a store stays in its object");
        history.groups += 1;
        let group = history.groups;
        for word in offset / 8..(offset + length).div_ceil(8) {
            let value = load_u64(memory, word * 8);
            history.events.push(Event::Stored { object, word: word as u32, value, group });
        }
    }

    pub(crate) fn flush(&self, object: u32, offset: usize, length: usize, by: u32) {
        if length == 0 {
            return;
        }
        let mut history = self.lock();
        for line in offset / LINE_BYTES..(offset + length).div_ceil(LINE_BYTES) {
            history.events.push(Event::Flushed { object, line: line as u32, by });
        }
    }
}
