//! One request outstanding: its registered memory and where it stands.

use std::sync::Arc;

use beeline_fabric::{
    Access, Device, LocalData, MemoryRegion, ProtectionDomain, RemoteAddress, ScatterGatherEntry,
};
use beeline_kv::entry::{self, HEADER_BYTES, Header};
use beeline_kv::wire::{Place, RequestKind};
use beeline_os::memory::{copy_in, copy_out};

use crate::client::Token;
use crate::error::ClientError;
use crate::update::{Digest, Found};

/// A range of registered memory.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub region: MemoryRegion,
    pub offset: u64,
    pub bytes: u32,
}

impl Buffer {
    /// Cuts `count` buffers of `bytes` each out of one new region.
    pub fn pool(
        device: &Arc<dyn Device>,
        domain: &Arc<dyn ProtectionDomain>,
        access: Access,
        count: u32,
        bytes: u32,
    ) -> Result<Vec<Self>, ClientError> {
        let length = u64::from(count) * u64::from(bytes);
        let length = usize::try_from(length.next_multiple_of(4096)).unwrap_or(usize::MAX);
        let region = domain.register(device.allocate_memory(length)?, access)?;
        let cut = |index: u32| Self {
            region: region.clone(),
            offset: u64::from(index) * u64::from(bytes),
            bytes,
        };
        Ok((0..count).map(cut).collect())
    }

    /// Makes sure of at least `bytes`, in a region of its own when this one is too small.
    pub fn grow(
        &mut self,
        device: &Arc<dyn Device>,
        domain: &Arc<dyn ProtectionDomain>,
        access: Access,
        bytes: u32,
    ) -> Result<(), ClientError> {
        if bytes > self.bytes {
            let rounded = bytes.checked_next_power_of_two().unwrap_or(bytes).max(4096);
            let grown = Self::pool(device, domain, access, 1, rounded)?;
            if let Some(buffer) = grown.into_iter().next() {
                *self = buffer;
            }
        }
        Ok(())
    }

    /// Stores `source` at `at` bytes from the buffer's start.
    pub fn store(&self, at: u32, source: &[u8]) {
        assert!(
            u64::from(at) + source.len() as u64 <= u64::from(self.bytes),
            "a store stays inside its buffer"
        );
        copy_in(self.region.memory().as_ref(), self.offset as usize + at as usize, source);
    }

    /// Copies `length` bytes from `at` on into `target`, in place of what was there.
    pub fn load(&self, at: u32, length: u32, target: &mut Vec<u8>) {
        assert!(
            u64::from(at) + u64::from(length) <= u64::from(self.bytes),
            "a load stays inside its buffer"
        );
        target.resize(length as usize, 0);
        let offset = self.offset as usize + at as usize;
        copy_out(self.region.memory().as_ref(), offset, target);
    }

    /// As the peer addresses it.
    pub fn place(&self) -> Place {
        let RemoteAddress { key, offset } = self.region.remote_address(self.offset);
        Place { key: key.0, offset }
    }
}

/// A request or an entry as it is sent. One that is short enough lies in private memory and is
/// posted inline: that saves the way through registered memory.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Longest that is posted inline, bytes.
    inline_bytes: u32,
    /// What is staged, where it is that short; else empty.
    private: Vec<u8>,
    buffer: Buffer,
    pub bytes: u32,
}

impl Staging {
    pub fn new(buffer: Buffer, inline_bytes: u32) -> Self {
        Self { inline_bytes, private: Vec::new(), buffer, bytes: 0 }
    }

    fn is_inline(&self) -> bool {
        self.bytes <= self.inline_bytes
    }

    /// Makes room for `bytes` that are stored next.
    pub fn begin(
        &mut self,
        device: &Arc<dyn Device>,
        domain: &Arc<dyn ProtectionDomain>,
        bytes: u32,
    ) -> Result<(), ClientError> {
        if bytes > self.inline_bytes {
            self.buffer.grow(device, domain, Access::LOCAL_WRITE, bytes)?;
        } else {
            self.private.resize(bytes as usize, 0);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Stores `source` at `at`.
    #[inline]
    pub fn store(&mut self, at: u32, source: &[u8]) {
        if self.is_inline() {
            self.private[at as usize..][..source.len()].copy_from_slice(source);
        } else {
            self.buffer.store(at, source);
        }
    }

    /// Copies the first `length` bytes into `target`, in place of what was there.
    pub fn load(&self, length: u32, target: &mut Vec<u8>) {
        if self.is_inline() {
            target.clear();
            target.extend_from_slice(&self.private[..length as usize]);
        } else {
            self.buffer.load(0, length, target);
        }
    }

    /// The checksum of the staged entry, were `header` its header.
    pub fn checksum(&mut self, header: &[u8; HEADER_BYTES as usize], scratch: &mut Vec<u8>) -> u32 {
        if self.is_inline() {
            self.private[..header.len()].copy_from_slice(header);
            return entry::checksum_whole(&self.private);
        }
        self.buffer.load(0, self.bytes, scratch);
        scratch[..header.len()].copy_from_slice(header);
        entry::checksum_whole(scratch)
    }

    /// What is staged, as one range of registered memory.
    pub fn range(&self) -> ScatterGatherEntry<'_> {
        let (region, offset) = (&self.buffer.region, self.buffer.offset);
        ScatterGatherEntry { region, offset, length: u64::from(self.bytes) }
    }

    /// What is staged, to be posted; `range` is [`Staging::range`].
    pub fn local<'a>(&'a self, range: &'a [ScatterGatherEntry<'a>]) -> LocalData<'a> {
        if self.is_inline() { LocalData::Inline(&self.private) } else { LocalData::Gather(range) }
    }
}

/// What the slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Nothing.
    Free,
    /// A request message of this kind, staged with its key.
    Request(RequestKind),
    /// An entry for the granted segment: put or delete (BOOM).
    Entry,
    /// Two-phase baseline: an entry whose place was allocated, to be written there.
    EntryAt { place: Place, grant: u8 },
    /// Two-phase baseline: a READ of a located entry, of this length.
    ReadAt(Place, u32),
}

/// One request outstanding.
#[derive(Debug)]
pub(crate) struct Slot {
    pub work: Work,
    /// [`Token::NONE`] for the link's own grant requests.
    pub token: Token,
    /// Set by the first look at the clock after it was submitted.
    pub deadline_ns: Option<u64>,
    /// Expected in the answer.
    pub tag: u16,
    /// Times it was sent again.
    pub retries: u8,
    /// Request or entry as sent.
    pub staging: Staging,
    /// Where the server writes.
    pub result: Buffer,
    /// The key of gets and entries; compared with what arrives.
    pub key: Vec<u8>,
    /// Header of an entry, before slot length and checksum are set.
    pub header: Header,
    pub digest: Digest,
    /// Where the update table has the key.
    pub found: Found,
    /// Offset of the entry in the segment.
    pub entry_offset: u32,
}

impl Slot {
    pub fn new(staging: Staging, result: Buffer) -> Self {
        Self {
            work: Work::Free,
            token: Token::NONE,
            deadline_ns: None,
            tag: 0,
            retries: 0,
            staging,
            result,
            key: Vec::new(),
            header: Header::default(),
            digest: Digest::default(),
            found: Found::default(),
            entry_offset: 0,
        }
    }
}
