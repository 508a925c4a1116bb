//! The rings that an AF_XDP socket shares with the kernel: descriptors of frames, with a producer's
//! and a consumer's counter.
//!
//! Invariants: counters run freely and wrap; entry `n` lies at `n` modulo the ring's size, a power of
//! two. The side that produces stores entries, then its counter (Release); the side that consumes
//! loads that counter (Acquire), then entries, and stores its own counter (Release) when it is done
//! with them, which the producer loads (Acquire) before it stores there again.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use beeline_os::Mapping;

/// A frame, or a part of one that holds a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Packet {
    /// Its first byte in the memory that the socket shares.
    pub at: u64,
    pub length: u32,
    pub options: u32,
}

/// A ring of `E`.
#[derive(Debug)]
pub(super) struct Ring<E> {
    memory: Mapping,
    offsets: libc::xdp_ring_offset,
    entries: u32,
    /// Our counter.
    own: u32,
    entry: std::marker::PhantomData<E>,
}

impl<E: Copy> Ring<E> {
    /// Maps a ring of `entries` entries, a power of two.
    ///
    /// Errors: the kernel's.
    pub fn map(
        socket: impl AsFd,
        place: u64,
        offsets: libc::xdp_ring_offset,
        entries: u32,
    ) -> io::Result<Self> {
        let whole = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let bytes = whole(offsets.desc).saturating_add(entries as usize * size_of::<E>());
        let memory = Mapping::shared_at(socket, place, bytes).map_err(io::Error::from)?;
        for counter in [offsets.producer, offsets.consumer, offsets.flags] {
            let inside = whole(counter).checked_add(4).is_some_and(|end| end <= bytes);
            assert!(inside && counter % 4 == 0, "the kernel's offsets lie inside the ring");
        }
        assert!(entries.is_power_of_two(), "a ring's size is a power of two");
        Ok(Self { memory, offsets, entries, own: 0, entry: std::marker::PhantomData })
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        let at = usize::try_from(offset).unwrap_or(0);
        // SAFETY: the offset lies inside the mapping, by the check in `map`.
        let word = unsafe { self.memory.base().add(at) };
        // SAFETY: mapped while `self` is borrowed, and aligned, by the check in `map`; both sides use
        // whole words.
        unsafe { AtomicU32::from_ptr(word.cast().as_ptr()) }
    }

    fn place(&self, number: u32) -> std::ptr::NonNull<E> {
        let at = (number & (self.entries - 1)) as usize * size_of::<E>();
        let first = usize::try_from(self.offsets.desc).unwrap_or(0);
        // SAFETY: entries lie behind the first up to the ring's size, which the mapping was made for.
        unsafe { self.memory.base().add(first + at) }.cast()
    }

    /// True where the kernel wants to be called before it goes on.
    pub fn needs_call(&self) -> bool {
        self.word(self.offsets.flags).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }

    /// Takes the next entry out of a ring that the kernel fills.
    pub fn take(&mut self) -> Option<E> {
        // Acquire: pairs with the kernel's store after it wrote the entry.
        let theirs = self.word(self.offsets.producer).load(Ordering::Acquire);
        if theirs == self.own {
            return None;
        }
        // SAFETY: inside the ring, aligned as the kernel lays entries out; the kernel does not write it
        // until our counter has passed it.
        let entry = unsafe { self.place(self.own).read() };
        self.own = self.own.wrapping_add(1);
        // Release: the kernel writes the place again after our read.
        self.word(self.offsets.consumer).store(self.own, Ordering::Release);
        Some(entry)
    }

    /// Entries that the kernel has not taken yet from a ring that this process fills.
    pub fn waiting(&self) -> u32 {
        // Acquire: pairs with the kernel's store after it read an entry, whose place is ours then.
        self.own.wrapping_sub(self.word(self.offsets.consumer).load(Ordering::Acquire))
    }

    /// Puts an entry into a ring that the kernel empties; false without room.
    pub fn put(&mut self, entry: E) -> bool {
        if self.waiting() >= self.entries {
            return false;
        }
        // SAFETY: inside the ring, aligned; the kernel has taken what was there (`waiting`).
        unsafe { self.place(self.own).write(entry) };
        self.own = self.own.wrapping_add(1);
        // Release: pairs with the kernel's load before it reads the entry.
        self.word(self.offsets.producer).store(self.own, Ordering::Release);
        true
    }
}
