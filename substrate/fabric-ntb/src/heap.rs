//! Memory for regions that lies in the window, so that peers write it by themselves.
//!
//! All of it is writable by whoever is at the other end of the link, whatever rights a region has:
//! protection in a window is per window. It is opened only where that is wanted
//! ([`crate::NtbConfig::window_memory_bytes`]). An honest peer writes where it was granted; a
//! block that was ever granted is not given out again, since a peer that was stopped in the middle
//! of a write may go on much later.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_os::Mapping;
use beeline_os::mapping::create_memfd;
use beeline_os::memory::MemoryObject;
use beeline_os::moving;

const PAGE: usize = 4096;

#[derive(Debug)]
struct Block {
    at: usize,
    granted: bool,
    /// Its bytes live elsewhere now.
    moved: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Never used from here on.
    next: usize,
    /// Used, and never granted.
    free: Vec<(usize, usize)>,
    /// By the address of what is allocated there.
    blocks: HashMap<usize, Block>,
}

/// The part of a window that regions may lie in.
#[derive(Debug)]
pub(crate) struct Heap {
    file: OwnedFd,
    /// Where it begins in the file.
    start: usize,
    bytes: usize,
    state: Mutex<State>,
}

impl Heap {
    /// `bytes` of `file` from `start`, a multiple of the page size.
    pub(crate) fn new(file: OwnedFd, start: usize, bytes: usize) -> Arc<Self> {
        Arc::new(Self { file, start, bytes, state: Mutex::default() })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Zeroed memory in the window; `None` when there is no room.
    pub(crate) fn allocate(self: &Arc<Self>, length: usize) -> Option<WindowMemory> {
        let whole = length.checked_next_multiple_of(PAGE)?;
        let mut state = self.lock();
        let known = state.free.iter().position(|(_, bytes)| *bytes == whole);
        let at = match known {
            Some(index) => state.free.swap_remove(index).0,
            None => {
                let at = state.next;
                let end = at.checked_add(whole).filter(|end| *end <= self.bytes)?;
                state.next = end;
                at
            }
        };
        let mapping = Mapping::shared_at(&self.file, (self.start + at) as u64, length).ok()?;
        // SAFETY: a mapping of that length, which nobody else has; what a peer scribbles there is
        // its own doing.
        unsafe { std::ptr::write_bytes(mapping.base().as_ptr(), 0, length) };
        let base = mapping.base().as_ptr() as usize;
        state.blocks.insert(base, Block { at, granted: false, moved: false });
        drop(state);
        Some(WindowMemory { mapping, heap: Arc::clone(self) })
    }

    /// Where `memory` lies in the heap, if its bytes are there; counts as granted from then on.
    pub(crate) fn placement(&self, memory: &dyn MemoryObject) -> Option<u64> {
        let mut state = self.lock();
        let block = state.blocks.get_mut(&(memory.base().as_ptr() as usize))?;
        block.granted = true;
        (!block.moved).then_some(block.at as u64)
    }
}

/// Memory in the window, until its backing is replaced.
#[derive(Debug)]
pub(crate) struct WindowMemory {
    mapping: Mapping,
    heap: Arc<Heap>,
}

// SAFETY: the mapping lives exactly as long as the value, at a fixed page-aligned base; bytes are
// only reached through raw copies and atomics.
unsafe impl MemoryObject for WindowMemory {
    fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    fn length_bytes(&self) -> usize {
        self.mapping.length_bytes()
    }

    fn replace_backing(&self) -> std::io::Result<()> {
        moving::replace(self.anchor(), || self.move_away())
    }
}

impl WindowMemory {
    fn move_away(&self) -> std::io::Result<()> {
        // Under the lock: no placement is told meanwhile.
        let mut state = self.heap.lock();
        let base = self.mapping.base();
        let Some(block) = state.blocks.get_mut(&(base.as_ptr() as usize)) else { return Ok(()) };
        if block.moved {
            return Ok(());
        }
        let length = self.mapping.length_bytes();
        let fresh = create_memfd("beeline-ntb-moved", length)?;
        let copy = Mapping::shared_at(&fresh, 0, length)?;
        // SAFETY: both mappings are `length` bytes long and distinct. A peer may be storing into
        // the old one meanwhile; what is copied of that store is unspecified, as for any write in
        // flight when its region is revoked.
        unsafe {
            std::ptr::copy_nonoverlapping(base.as_ptr(), copy.base().as_ptr(), length);
        }
        self.mapping.replace_with(fresh)?;
        block.moved = true;
        Ok(())
    }
}

impl Drop for WindowMemory {
    fn drop(&mut self) {
        let mut state = self.heap.lock();
        let removed = state.blocks.remove(&(self.mapping.base().as_ptr() as usize));
        if let Some(Block { at, granted: false, .. }) = removed {
            let whole = self.mapping.length_bytes().next_multiple_of(PAGE);
            state.free.push((at, whole));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_os::memory::{copy_in, load_u64};

    fn heap() -> Arc<Heap> {
        Heap::new(create_memfd("test", 8 * PAGE).unwrap(), PAGE, 7 * PAGE)
    }

    #[test]
    fn what_was_never_granted_is_given_out_again_and_zeroed() {
        let heap = heap();
        for _ in 0..20 {
            let memory = heap.allocate(5 * PAGE - 9).unwrap();
            assert_eq!(load_u64(&memory, 64), 0);
            copy_in(&memory, 64, b"whatever");
        }
        assert!(heap.allocate(8 * PAGE).is_none());
    }

    #[test]
    fn a_granted_block_is_not_given_out_again_and_moves_away_from_its_peer() {
        let heap = heap();
        let memory = heap.allocate(2 * PAGE).unwrap();
        copy_in(&memory, 8, b"contents");
        assert_eq!(heap.placement(&memory), Some(0));
        let peer = Mapping::shared_at(heap.descriptor(), PAGE as u64, 2 * PAGE).unwrap();
        memory.replace_backing().unwrap();
        assert_eq!(heap.placement(&memory), None);
        // SAFETY: two pages long.
        unsafe { peer.base().as_ptr().write_bytes(0xEE, PAGE) };
        assert_eq!(load_u64(&memory, 8), u64::from_ne_bytes(*b"contents"));
        drop(memory);
        assert_eq!(heap.allocate(5 * PAGE).map(|memory| memory.length_bytes()), Some(5 * PAGE));
        assert!(heap.allocate(3 * PAGE).is_none(), "two of seven pages are spent");
    }
}
