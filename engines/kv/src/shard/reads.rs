//! Reads in flight beyond the shard's lock: a remote GET whose bytes the fabric is still sending.
//!
//! A guard pins the segment (the collector does not free it) and registers the version, so that
//! a one-sided client learns which of its old copies it may not overwrite yet (C3).
//!
//! Source: BOOM-KV §3.1 step 4 and §3.3.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_pmem::Segment;

use crate::entry::HEADER_BYTES;
use crate::index::Location;
use crate::segments::SegmentState;
use crate::shard::{EntryRef, Shard};
use crate::{KvError, Version};

/// Keys are hashes already.
#[derive(Debug, Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0 << 8 | u64::from(*byte);
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    version: Version,
    place: Location,
}

/// Reads in flight by key hash.
#[derive(Debug, Default)]
pub(crate) struct ReadRegistry {
    by_hash: HashMap<u64, Vec<InFlight>, BuildHasherDefault<Identity>>,
    /// Emptied lists, kept so that steady traffic allocates nothing.
    spare: Vec<Vec<InFlight>>,
}

impl ReadRegistry {
    fn begin(&mut self, hash: u64, read: InFlight) {
        let spare = &mut self.spare;
        self.by_hash.entry(hash).or_insert_with(|| spare.pop().unwrap_or_default()).push(read);
    }

    fn end(&mut self, hash: u64, version: Version) {
        let Some(reads) = self.by_hash.get_mut(&hash) else { return };
        if let Some(at) = reads.iter().position(|read| read.version == version) {
            reads.swap_remove(at);
        }
        if reads.is_empty()
            && let Some(list) = self.by_hash.remove(&hash)
            && self.spare.len() < 1024
        {
            self.spare.push(list);
        }
    }

    pub fn smallest(&self, hash: u64) -> Option<Version> {
        if self.by_hash.is_empty() {
            return None;
        }
        self.by_hash.get(&hash)?.iter().map(|read| read.version).min()
    }

    pub fn reads_place(&self, hash: u64, place: Location) -> bool {
        !self.by_hash.is_empty()
            && self
                .by_hash
                .get(&hash)
                .is_some_and(|reads| reads.iter().any(|read| read.place.same_place(place)))
    }
}

/// The bytes of one entry, kept in place until [`Shard::end_read`].
#[derive(Debug)]
#[must_use = "a read that is begun is ended with Shard::end_read"]
pub struct ReadGuard {
    state: Arc<SegmentState>,
    hash: u64,
    /// Version of the entry being read.
    version: Version,
    offset: u32,
    length: u32,
    key_length: u16,
}

impl ReadGuard {
    /// The segment the entry lies in; register it to send from it.
    #[must_use]
    pub fn segment(&self) -> &Arc<Segment> {
        &self.state.segment
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

impl Drop for ReadGuard {
    fn drop(&mut self) {
        // Release pairs with the collector's acquire: the reader is done with the bytes.
        self.state.pins.fetch_sub(1, Ordering::Release);
    }
}

impl Shard {
    /// Keeps the entry's bytes in place and registers the read.
    ///
    /// Errors: [`KvError::Damaged`] when the entry lies in memory a client can write and fails
    /// its checks now. (It may be changed later all the same: the receiver checks again.)
    pub fn begin_read(&mut self, entry: &EntryRef) -> Result<ReadGuard, KvError> {
        let state = Arc::clone(self.cache.get(&self.store.table, entry.location.segment()));
        // Relaxed: the collector looks at pins while it holds this shard's lock, as we do now.
        state.pins.fetch_add(1, Ordering::Relaxed);
        let read = InFlight { version: entry.version, place: entry.location };
        self.reads.begin(entry.hash, read);
        Ok(ReadGuard {
            state,
            hash: entry.hash,
            version: entry.version,
            offset: entry.location.offset(),
            length: HEADER_BYTES + u32::from(entry.key_length) + entry.value_length,
            key_length: entry.key_length,
        })
    }

    /// Ends a read begun in this shard.
    pub fn end_read(&mut self, guard: ReadGuard) {
        self.reads.end(guard.hash, guard.version);
    }

    /// The smallest version of the key with this hash that is being read, if any.
    #[must_use]
    pub fn smallest_version_read(&self, hash: u64) -> Option<Version> {
        self.reads.smallest(hash)
    }
}
