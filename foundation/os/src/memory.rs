//! What a piece of memory is to the rest of Beeline.
//!
//! [`MemoryObject`] is the seam between durable memory and fabric: `pmem` hands out segments,
//! fabric registers them, and neither knows the other. Memory that a peer, a device or another
//! process can write is never a Rust reference: it is reached through raw-pointer copies and
//! atomics ([`copy_in`], [`copy_out`]), because a `&[u8]` promises that nobody writes behind it.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How bytes of an object come to survive a loss of power.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Persistence {
    /// They do not.
    Volatile,
    /// Write-back of the processor's cache lines, then a store fence (DAX, or DRAM standing for
    /// persistent memory).
    CacheLine,
    /// `fdatasync` on the object's descriptor.
    File,
}

/// A piece of memory with a fixed base and length for as long as the value lives.
///
/// # Safety
///
/// An implementation promises that `base()..base()+length_bytes()` stays mapped readable and
/// writable at that address until the value is dropped, that `base()` is aligned to 64 bytes, and
/// that no Rust reference to those bytes is handed out while others may write them.
pub unsafe trait MemoryObject: Send + Sync + Debug {
    /// First byte. Aligned to 64 bytes.
    fn base(&self) -> NonNull<u8>;

    /// Length in bytes.
    fn length_bytes(&self) -> usize;

    /// Descriptor through which another process can map the whole object from offset 0 with the
    /// same length, if there is one. Whoever holds it can map all of it.
    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        None
    }

    /// True when the object behind the descriptor carries the retired mark
    /// ([`crate::mapping::Retired`]) behind its bytes.
    fn has_retired_mark(&self) -> bool {
        false
    }

    /// Names the object in [`crate::moving`]: where the memory begins that moves as a whole.
    fn anchor(&self) -> NonNull<u8> {
        self.base()
    }

    /// The object this one is a part of. The descriptor is the whole object's.
    fn whole(&self) -> Option<Arc<dyn MemoryObject>> {
        None
    }

    /// How its bytes come to survive a loss of power.
    fn persistence(&self) -> Persistence {
        Persistence::Volatile
    }

    /// Called after bytes were stored from outside the object's own interface (a fabric provider
    /// placed a remote write). A simulated device records the store; others do nothing.
    fn stored(&self, _offset: usize, _length: usize) {}

    /// Makes `offset..offset+length` survive a loss of power; returns when it does.
    ///
    /// Errors: the file system's, when persistence goes through it.
    fn persist(&self, _offset: usize, _length: usize) -> std::io::Result<()> {
        Ok(())
    }

    /// Moves the contents to a new backing object at the same base, so that whoever mapped the old
    /// one writes to memory nobody reads any more. The old one gets the retired mark first.
    ///
    /// Invariant: the owner stores nothing into the object meanwhile but under
    /// [`crate::moving::storing`], as the providers of fabric do; what it stores otherwise may be
    /// lost.
    ///
    /// Errors: `Unsupported` where the object has no shareable backing; `ResourceBusy` while
    /// something is tied to the present one ([`crate::moving::tie`]).
    fn replace_backing(&self) -> std::io::Result<()> {
        Err(std::io::Error::from(std::io::ErrorKind::Unsupported))
    }
}

/// A part of a memory object, to be registered by itself: peers reach it, and nothing beside it,
/// through its key.
///
/// The descriptor is the whole object's, so a provider that hands it out (shm) protects the rest
/// from honest peers only; taking one part back moves the whole object, and holders of other parts
/// along.
#[derive(Debug)]
pub struct Part {
    whole: Arc<dyn MemoryObject>,
    offset: usize,
    length: usize,
}

impl Part {
    /// Parts begin at a multiple of this.
    pub const ALIGNMENT: usize = 64;

    /// The `length` bytes of `whole` from `offset` on; `None` when they do not lie inside, there
    /// are none, or `offset` is not a multiple of [`Part::ALIGNMENT`].
    #[must_use]
    pub fn new(whole: Arc<dyn MemoryObject>, offset: usize, length: usize) -> Option<Self> {
        let inside = contains(whole.as_ref(), offset as u64, length as u64);
        if !inside || length == 0 || !offset.is_multiple_of(Self::ALIGNMENT) {
            return None;
        }
        // A part of a part is a part of the whole: what moves is the whole.
        Some(match whole.whole() {
            Some(larger) => {
                let before = whole.base().addr().get() - larger.base().addr().get();
                Self { whole: larger, offset: before + offset, length }
            }
            None => Self { whole, offset, length },
        })
    }
}

// SAFETY: the range lies inside `whole` (checked when made), which is held; 64 divides its offset.
unsafe impl MemoryObject for Part {
    #[inline]
    fn base(&self) -> NonNull<u8> {
        // SAFETY: inside the whole object.
        unsafe { self.whole.base().add(self.offset) }
    }

    #[inline]
    fn length_bytes(&self) -> usize {
        self.length
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.whole.descriptor()
    }

    fn has_retired_mark(&self) -> bool {
        self.whole.has_retired_mark()
    }

    #[inline]
    fn anchor(&self) -> NonNull<u8> {
        self.whole.anchor()
    }

    fn whole(&self) -> Option<Arc<dyn MemoryObject>> {
        Some(Arc::clone(&self.whole))
    }

    fn persistence(&self) -> Persistence {
        self.whole.persistence()
    }

    fn stored(&self, offset: usize, length: usize) {
        self.whole.stored(self.offset + offset, length);
    }

    fn persist(&self, offset: usize, length: usize) -> std::io::Result<()> {
        self.whole.persist(self.offset + offset, length)
    }

    /// Moves the whole object.
    fn replace_backing(&self) -> std::io::Result<()> {
        self.whole.replace_backing()
    }
}

/// True when `offset..offset+length` lies inside `object`.
#[must_use]
#[inline]
pub fn contains(object: &(impl MemoryObject + ?Sized), offset: u64, length: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= object.length_bytes() as u64)
}

/// Copies `source` into `object` at `offset`.
///
/// Invariant: the range lies inside the object; a caller validates untrusted offsets first with
/// [`contains`].
#[inline]
pub fn copy_in(object: &(impl MemoryObject + ?Sized), offset: usize, source: &[u8]) {
    assert!(
        contains(object, offset as u64, source.len() as u64),
        "copy_in stays inside the object"
    );
    // SAFETY: the range was just checked to lie inside the mapping.
    let target = unsafe { object.base().as_ptr().add(offset) };
    // SAFETY: the target range is mapped writable (trait contract); `source` is a live slice that
    // cannot overlap memory nobody has references to. Concurrent writers are possible only by
    // peers; the bytes are then theirs to mangle, and readers validate copies.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
}

/// Copies from `object` at `offset` into `target`.
///
/// Invariant: the range lies inside the object (see [`copy_in`]).
#[inline]
pub fn copy_out(object: &(impl MemoryObject + ?Sized), offset: usize, target: &mut [u8]) {
    assert!(
        contains(object, offset as u64, target.len() as u64),
        "copy_out stays inside the object"
    );
    // SAFETY: the range was just checked to lie inside the mapping.
    let source = unsafe { object.base().as_ptr().add(offset) };
    // SAFETY: as in `copy_in`; a torn copy is possible and is what callers validate.
    unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
}

/// Copies `length` bytes from one object to another, by way of no reference.
///
/// Invariant: both ranges lie inside their objects and do not overlap.
pub fn copy_across(
    source: (&dyn MemoryObject, usize),
    target: (&dyn MemoryObject, usize),
    length: usize,
) {
    assert!(contains(source.0, source.1 as u64, length as u64), "a copy stays inside its source");
    assert!(contains(target.0, target.1 as u64, length as u64), "a copy stays inside its target");
    // SAFETY: the range was just checked to lie inside the mapping.
    let from = unsafe { source.0.base().as_ptr().add(source.1) };
    // SAFETY: as above.
    let to = unsafe { target.0.base().as_ptr().add(target.1) };
    // SAFETY: both ranges are mapped (trait contract); `copy` allows for any overlap. Bytes a peer
    // writes meanwhile come out torn, as in `copy_out`.
    unsafe { std::ptr::copy(from, to, length) };
}

/// The 8-byte word at `offset` as an atomic.
///
/// Invariant: the word lies inside the object and `offset` is a multiple of 8.
#[must_use]
#[inline]
pub fn atomic_u64(object: &(impl MemoryObject + ?Sized), offset: usize) -> &AtomicU64 {
    assert!(contains(object, offset as u64, 8), "the word lies inside the object");
    assert!(offset.is_multiple_of(8), "an atomic word is aligned to 8 bytes");
    // SAFETY: the range was just checked to lie inside the mapping.
    let word = unsafe { object.base().as_ptr().add(offset) };
    // SAFETY: inside the mapping, aligned (base to 64, offset to 8), lives as long as `object`,
    // and every party reaches shared words through atomics.
    unsafe { AtomicU64::from_ptr(word.cast()) }
}

/// Loads the word at `offset` with acquire ordering; pairs with [`store_u64`].
#[must_use]
#[inline]
pub fn load_u64(object: &(impl MemoryObject + ?Sized), offset: usize) -> u64 {
    atomic_u64(object, offset).load(Ordering::Acquire)
}

/// Stores the word at `offset` with release ordering; pairs with [`load_u64`].
#[inline]
pub fn store_u64(object: &(impl MemoryObject + ?Sized), offset: usize, value: u64) {
    atomic_u64(object, offset).store(value, Ordering::Release);
}
