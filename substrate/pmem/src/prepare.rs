//! The thread that keeps zeroed, pre-faulted segments ready, and gives freed memory back. Asleep when
//! there are enough and nothing is freed.

use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

use beeline_os::MemoryObject;
use rustix::mm::Advice;

use crate::backing;
use crate::core::SyncTurn;
use crate::error::PmemError;
use crate::memory::Memory;
use crate::options::Mechanism;
use crate::pool::{Shared, Slots};

#[derive(Debug)]
pub(crate) struct Preparer {
    thread: JoinHandle<()>,
}

impl Preparer {
    /// Starts the thread; none when the system has no more threads (allocation then does the work
    /// itself).
    pub(crate) fn start(shared: &Arc<Shared>) -> Option<Self> {
        let shared = Arc::clone(shared);
        std::thread::Builder::new()
            .name("beeline-prepare".to_owned())
            .spawn(move || run(&shared))
            .ok()
            .map(|thread| Self { thread })
    }

    pub(crate) fn join(self) {
        let _ = self.thread.join();
    }
}

/// The next descriptor to work on, with old memory to zero if there is some.
fn next(slots: &mut Slots, target: usize) -> Option<(u32, Option<Memory>)> {
    if let Some((id, memory)) = slots.recycle.pop() {
        return Some((id, Some(memory)));
    }
    if slots.ready.len() >= target || slots.discouraged {
        return None;
    }
    slots.free.pop_first().map(|id| (id, None))
}

fn run(shared: &Shared) {
    let mut slots = shared.lock();
    loop {
        if slots.stop {
            for (id, _memory) in slots.recycle.drain(..) {
                shared.remove_file(id);
            }
            return;
        }
        if let Some(memory) = slots.retired.pop() {
            slots.retiring = true;
            drop(slots);
            retire(memory);
            slots = shared.lock();
            slots.retiring = false;
            shared.changed.notify_all();
            continue;
        }
        let Some((id, old)) = next(&mut slots, shared.prepared_target) else {
            slots = shared.changed.wait(slots).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        slots.preparing += 1;
        drop(slots);
        let made = prepare(shared, id, old);
        if let Err(error) = &made {
            shared.remove_file(id);
            tracing::warn!(segment = id, %error, "no segment could be prepared");
        }
        slots = shared.lock();
        slots.preparing -= 1;
        match made {
            Ok(memory) => slots.ready.push((id, memory)),
            Err(_) => {
                slots.discouraged = true;
                slots.free.insert(id);
            }
        }
        shared.changed.notify_all();
    }
}

/// Gives the pages back piece by piece, so that what is left to do at the end is short.
fn retire(memory: Memory) {
    if matches!(memory, Memory::Mapped(_)) {
        for (start, length) in backing::pieces(memory.length_bytes()) {
            let piece = memory.base().as_ptr().wrapping_add(start);
            // SAFETY: the memory was taken out of a segment nobody else held and no peer ever
            // mapped, so this thread alone reaches the range, which is a piece of the mapping.
            if unsafe { rustix::mm::madvise(piece.cast(), length, Advice::LinuxRemove) }.is_err() {
                break;
            }
            std::thread::yield_now();
        }
    }
}

fn prepare(shared: &Shared, id: u32, old: Option<Memory>) -> Result<Memory, PmemError> {
    let core = &shared.core;
    core.persist_zero_words(id)?;
    let path = core.segment_file(id);
    let Some(memory) = old else {
        return backing::make(shared.making(), &path, true);
    };
    for (start, length) in backing::pieces(memory.length_bytes()) {
        let piece = memory.base().as_ptr().wrapping_add(start);
        // SAFETY: the memory was taken out of a segment nobody else held and no peer ever mapped,
        // so this thread alone reaches the range, which is a piece of the mapping.
        unsafe { std::ptr::write_bytes(piece, 0, length) };
        std::thread::yield_now();
    }
    match core.mechanism {
        Mechanism::CacheLine(_) | Mechanism::CacheLineEmulated(_) => {
            core.write_back_range(&memory, 0, memory.length_bytes());
            beeline_os::write_back::store_fence();
        }
        Mechanism::FileSync => core.sync(&SyncTurn::default(), &memory, || path)?,
        Mechanism::None | Mechanism::Recorded => {}
    }
    Ok(memory)
}
