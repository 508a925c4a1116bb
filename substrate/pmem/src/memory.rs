//! The bytes behind a table or a segment: a mapping, or heap for the simulated device.

use std::alloc::Layout;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use beeline_os::mapping::is_sealed_for_readers;
use beeline_os::{Mapping, MemoryObject};

/// Zeroed heap memory, aligned to a page.
#[derive(Debug)]
pub(crate) struct Heap {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain owned memory; its bytes are reached through raw copies and atomics only.
unsafe impl Send for Heap {}
// SAFETY: as for `Send`.
unsafe impl Sync for Heap {}

impl Heap {
    pub(crate) fn zeroed(length_bytes: usize) -> Self {
        assert!(length_bytes > 0, "heap memory has at least one byte");
        let layout = Layout::from_size_align(length_bytes, 4096);
        let layout = layout.unwrap_or_else(|_| std::process::abort());
        // SAFETY: the layout is not empty (asserted above).
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        Self { base, layout }
    }
}

impl Heap {
    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        let heap = Self::zeroed(bytes.len());
        // SAFETY: freshly allocated with exactly this length, reachable through `heap` alone.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), heap.base.as_ptr(), bytes.len());
        }
        heap
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, freed once.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[derive(Debug)]
pub(crate) enum Memory {
    Mapped(Mapping),
    Heap(Heap),
}

impl Memory {
    /// Peers were given it for reading only, which is final: no peer will ever write it.
    pub(crate) fn is_sealed(&self) -> bool {
        self.descriptor().is_some_and(|descriptor| is_sealed_for_readers(&*descriptor))
    }
}

// SAFETY: either variant keeps its range at a fixed, page-aligned base until dropped; bytes are
// reached through raw copies and atomics only.
unsafe impl MemoryObject for Memory {
    #[inline]
    fn base(&self) -> NonNull<u8> {
        match self {
            Self::Mapped(mapping) => mapping.base(),
            Self::Heap(heap) => heap.base,
        }
    }

    #[inline]
    fn length_bytes(&self) -> usize {
        match self {
            Self::Mapped(mapping) => mapping.length_bytes(),
            Self::Heap(heap) => heap.layout.size(),
        }
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        match self {
            Self::Mapped(mapping) => mapping.descriptor(),
            Self::Heap(_) => None,
        }
    }

    fn has_retired_mark(&self) -> bool {
        matches!(self, Self::Mapped(mapping) if mapping.retired().is_some())
    }
}
