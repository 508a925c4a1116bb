//! The memory that the processor works on, behind the trait that lets one core run over real memory
//! and over a model of it.
//!
//! An address is a number of 32-byte units from the start. Every call is one access: what the paper
//! calls one DMA. In the real build an access is a load or a store; [`Traced`] counts and records
//! accesses for the model and for the figures that count them.
//!
//! Source: spec/kv-direct.md 3 (emulation), 5.1.

use crate::bucket::{BUCKET_BYTES, Bucket, View};

/// Bytes of the unit that addresses count in.
pub const UNIT_BYTES: usize = 32;

/// What the key-value processor needs of its memory.
pub trait Memory {
    /// Bytes of the memory; a multiple of 2048.
    fn length_bytes(&self) -> u64;

    /// Reads a bucket: one access.
    fn bucket(&mut self, unit: u32) -> View<'_>;

    /// The bucket that was read last, once more: it is at hand, so this is no access.
    fn bucket_again(&mut self, unit: u32) -> View<'_>;

    /// Writes a bucket: one access.
    fn write_bucket(&mut self, unit: u32, bucket: &Bucket);

    /// Reads `length` bytes of a block: one access.
    fn block(&mut self, unit: u32, length: usize) -> &[u8];

    /// The block that was read last, once more: it is at hand, so this is no access.
    fn block_again(&mut self, unit: u32, length: usize) -> &[u8];

    /// Writes the parts one after the other to a block: one access.
    fn write_block(&mut self, unit: u32, parts: &[&[u8]]);

    /// Lends the `length` bytes of the bucket or block that was read last to `change`: one access where that
    /// says that it changed them, none where not.
    fn change<R>(
        &mut self,
        unit: u32,
        length: usize,
        change: impl FnOnce(&mut [u8]) -> (R, bool),
    ) -> R;

    /// Says that a bucket, or a block of `length` bytes, will be read soon. A hint.
    fn expect(&self, _unit: u32, _length: usize) {}

    /// A bucket that was asked for a while ago, to see what else to ask for: no access, the one that counts
    /// follows.
    fn peek(&self, unit: u32) -> View<'_>;
}

/// Memory of this process, zeroed, in huge pages where the kernel has them.
#[derive(Debug)]
pub struct HostMemory {
    map: memmap2::MmapMut,
}

impl HostMemory {
    /// `length_bytes`, rounded down to a multiple of 2048. Pages are taken as they are first used.
    ///
    /// Errors: the kernel's.
    pub fn new(length_bytes: u64) -> std::io::Result<Self> {
        let length = usize::try_from(length_bytes / 2048 * 2048)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
        let map = memmap2::MmapMut::map_anon(length.max(2048))?;
        #[cfg(target_os = "linux")]
        // Refused where huge pages are switched off; ordinary pages serve.
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map })
    }

    #[inline]
    fn at(unit: u32) -> usize {
        unit as usize * UNIT_BYTES
    }
}

impl Memory for HostMemory {
    fn length_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    #[inline]
    fn bucket(&mut self, unit: u32) -> View<'_> {
        self.peek(unit)
    }

    #[inline]
    fn bucket_again(&mut self, unit: u32) -> View<'_> {
        self.bucket(unit)
    }

    #[inline]
    fn write_bucket(&mut self, unit: u32, bucket: &Bucket) {
        let at = Self::at(unit);
        self.map[at..at + BUCKET_BYTES].copy_from_slice(bucket.bytes());
    }

    #[inline]
    fn block(&mut self, unit: u32, length: usize) -> &[u8] {
        let at = Self::at(unit);
        &self.map[at..at + length]
    }

    #[inline]
    fn block_again(&mut self, unit: u32, length: usize) -> &[u8] {
        self.block(unit, length)
    }

    #[inline]
    fn write_block(&mut self, unit: u32, parts: &[&[u8]]) {
        let mut at = Self::at(unit);
        for part in parts {
            self.map[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }

    #[inline]
    fn change<R>(
        &mut self,
        unit: u32,
        length: usize,
        change: impl FnOnce(&mut [u8]) -> (R, bool),
    ) -> R {
        let at = Self::at(unit);
        change(&mut self.map[at..at + length]).0
    }

    #[inline]
    fn expect(&self, unit: u32, length: usize) {
        beeline_os::prefetch::for_reading(self.map.as_ptr().wrapping_add(Self::at(unit)), length);
    }

    #[inline]
    fn peek(&self, unit: u32) -> View<'_> {
        let at = Self::at(unit);
        View::new(&self.map[at..at + BUCKET_BYTES].as_chunks().0[0])
    }
}

/// One access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAccess {
    /// Where, in units of 32 bytes.
    pub unit: u32,
    /// Bytes.
    pub length: u32,
    /// Whether it changed memory.
    pub write: bool,
}

/// Another memory, with its accesses counted, and recorded where that was asked for.
#[derive(Debug)]
pub struct Traced<M> {
    /// The memory itself.
    pub inner: M,
    /// Reads so far.
    pub reads: u64,
    /// Writes so far.
    pub writes: u64,
    /// Accesses since the last [`Traced::take`]; `None` where they are only counted.
    record: Option<Vec<MemoryAccess>>,
}

impl<M> Traced<M> {
    /// Counts accesses.
    pub fn counting(inner: M) -> Self {
        Self { inner, reads: 0, writes: 0, record: None }
    }

    /// Counts and records accesses.
    pub fn recording(inner: M) -> Self {
        Self { inner, reads: 0, writes: 0, record: Some(Vec::new()) }
    }

    /// Hands over what was recorded since the last call.
    pub fn take(&mut self, into: &mut Vec<MemoryAccess>) {
        if let Some(record) = &mut self.record {
            into.append(record);
        }
    }

    fn note(&mut self, unit: u32, length: usize, write: bool) {
        *(if write { &mut self.writes } else { &mut self.reads }) += 1;
        if let Some(record) = &mut self.record {
            record.push(MemoryAccess { unit, length: length as u32, write });
        }
    }
}

impl<M: Memory> Memory for Traced<M> {
    fn length_bytes(&self) -> u64 {
        self.inner.length_bytes()
    }

    fn bucket(&mut self, unit: u32) -> View<'_> {
        self.note(unit, BUCKET_BYTES, false);
        self.inner.bucket(unit)
    }

    fn bucket_again(&mut self, unit: u32) -> View<'_> {
        self.inner.bucket_again(unit)
    }

    fn write_bucket(&mut self, unit: u32, bucket: &Bucket) {
        self.note(unit, BUCKET_BYTES, true);
        self.inner.write_bucket(unit, bucket);
    }

    fn block(&mut self, unit: u32, length: usize) -> &[u8] {
        self.note(unit, length, false);
        self.inner.block(unit, length)
    }

    fn block_again(&mut self, unit: u32, length: usize) -> &[u8] {
        self.inner.block_again(unit, length)
    }

    fn write_block(&mut self, unit: u32, parts: &[&[u8]]) {
        self.note(unit, parts.iter().map(|part| part.len()).sum(), true);
        self.inner.write_block(unit, parts);
    }

    fn change<R>(
        &mut self,
        unit: u32,
        length: usize,
        change: impl FnOnce(&mut [u8]) -> (R, bool),
    ) -> R {
        let (result, changed) = self.inner.change(unit, length, |bytes| {
            let (result, changed) = change(bytes);
            ((result, changed), changed)
        });
        if changed {
            self.note(unit, length, true);
        }
        result
    }

    fn expect(&self, unit: u32, length: usize) {
        self.inner.expect(unit, length);
    }

    fn peek(&self, unit: u32) -> View<'_> {
        self.inner.peek(unit)
    }
}
