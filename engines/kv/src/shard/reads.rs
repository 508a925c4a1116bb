//! Reads in flight beyond the shard's lock: a remote GET whose bytes the fabric is still sending.
//!
//! A guard pins the segment (the collector does not free it) and registers the version, so that
//! a one-sided client learns which of its old copies it may not overwrite yet (C3).
//!
//! Source: BOOM-KV §3.1 step 4 and §3.3.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_pmem::Segment;

use crate::entry::HEADER_BYTES;
use crate::index::Location;
use crate::shard::{EntryRef, Shard};
use crate::{KvError, Version};

#[derive(Clone, Copy, Debug)]
struct InFlight {
    hash: u64,
    version: Version,
    place: Location,
}

/// Lists that reads in flight are spread over.
const BUCKETS: usize = 256;

/// Reads in flight, found by key hash; and how many of them each segment is kept for.
#[derive(Debug)]
pub(crate) struct ReadRegistry {
    /// Lists keep their memory, so that steady traffic allocates nothing.
    buckets: Box<[Vec<InFlight>]>,
    reads: usize,
    /// Reads of this shard by segment. The first pins the segment and the last lets it go, so
    /// that a batch costs two atomic operations and not two a read.
    by_segment: Vec<u32>,
}

impl Default for ReadRegistry {
    fn default() -> Self {
        let buckets = std::iter::repeat_with(Vec::new).take(BUCKETS).collect();
        Self { buckets, reads: 0, by_segment: Vec::new() }
    }
}

impl ReadRegistry {
    #[inline]
    fn bucket(hash: u64) -> usize {
        hash as usize % BUCKETS
    }

    /// True when it is the first of its segment.
    #[inline]
    fn begin(&mut self, read: InFlight) -> bool {
        self.buckets[Self::bucket(read.hash)].push(read);
        self.reads += 1;
        let segment = read.place.segment() as usize;
        if self.by_segment.len() <= segment {
            self.by_segment.resize(segment + 1, 0);
        }
        self.by_segment[segment] += 1;
        self.by_segment[segment] == 1
    }

    /// True when it was the last of its segment.
    #[inline]
    fn end(&mut self, hash: u64, version: Version, segment: u32) -> bool {
        let bucket = &mut self.buckets[Self::bucket(hash)];
        let found = bucket.iter().position(|read| (read.hash, read.version) == (hash, version));
        assert!(found.is_some(), "a read that ends has begun");
        if let Some(at) = found {
            bucket.swap_remove(at);
        }
        self.reads -= 1;
        let left = &mut self.by_segment[segment as usize];
        *left -= 1;
        *left == 0
    }

    pub fn smallest(&self, hash: u64) -> Option<Version> {
        if self.reads == 0 {
            return None;
        }
        let of_key = self.buckets[Self::bucket(hash)].iter().filter(|read| read.hash == hash);
        of_key.map(|read| read.version).min()
    }

    pub fn reads_place(&self, hash: u64, place: Location) -> bool {
        self.reads != 0
            && self.buckets[Self::bucket(hash)]
                .iter()
                .any(|read| read.hash == hash && read.place.same_place(place))
    }
}

/// The bytes of one entry, kept in place until [`Shard::end_read`].
#[derive(Debug)]
#[must_use = "a read that is begun is ended with Shard::end_read"]
pub struct ReadGuard {
    hash: u64,
    /// Version of the entry being read.
    version: Version,
    generation: u64,
    segment: u32,
    offset: u32,
    length: u32,
    key_length: u16,
}

impl ReadGuard {
    /// Identifier of the segment the entry lies in. It stays in use until the read ends.
    #[must_use]
    pub fn segment_id(&self) -> u32 {
        self.segment
    }

    /// Which life of the segment that is.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Offset of the entry in the segment.
    #[must_use]
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// Length of header, key and value in bytes: what a receiver needs to check the entry.
    #[must_use]
    pub fn length_bytes(&self) -> u32 {
        self.length
    }

    /// Offset of the value from the start of the entry.
    #[must_use]
    pub fn value_start(&self) -> u32 {
        HEADER_BYTES + u32::from(self.key_length)
    }

    /// Version of the entry.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }
}

impl Shard {
    /// Keeps the entry's bytes in place and registers the read.
    ///
    /// Errors: [`KvError::Damaged`] when the entry lies in memory a client can write and fails
    /// its checks now. (It may be changed later all the same: the receiver checks again.)
    pub fn begin_read(&mut self, entry: &EntryRef) -> Result<ReadGuard, KvError> {
        let state = self.cache.get(&self.store.table, entry.location.segment());
        let read = InFlight { hash: entry.hash, version: entry.version, place: entry.location };
        if self.reads.begin(read) {
            // Relaxed: the collector looks at pins while it holds this shard's lock, as we do now.
            state.pins.fetch_add(1, Ordering::Relaxed);
        }
        Ok(ReadGuard {
            hash: entry.hash,
            version: entry.version,
            generation: state.generation,
            segment: state.id,
            offset: entry.location.offset(),
            length: HEADER_BYTES + u32::from(entry.key_length) + entry.value_length,
            key_length: entry.key_length,
        })
    }

    /// The segment that a read keeps; register it to send from it.
    #[must_use]
    pub fn segment_read(&mut self, guard: &ReadGuard) -> &Arc<Segment> {
        &self.cache.get(&self.store.table, guard.segment).segment
    }

    /// Ends a read begun in this shard.
    pub fn end_read(&mut self, guard: ReadGuard) {
        if self.reads.end(guard.hash, guard.version, guard.segment) {
            // Pinned until now, so the identifier still means the segment of the guard.
            let state = self.cache.get(&self.store.table, guard.segment);
            // Release pairs with the collector's acquire: the readers are done with the bytes.
            state.pins.fetch_sub(1, Ordering::Release);
        }
    }

    /// The smallest version of the key with this hash that is being read, if any.
    #[must_use]
    pub fn smallest_version_read(&self, hash: u64) -> Option<Version> {
        self.reads.smallest(hash)
    }
}
