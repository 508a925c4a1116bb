//! The pool of registered buffers that replies are made in.
//!
//! It is registered once, when the server is made, and no peer has rights on it: what it holds leaves by
//! the server's own writes. A reply is encoded straight into buffers of the pool; where the pool has
//! none left, the rest is kept beside it and copied into a buffer when there is one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{Access, Device, FabricError, MemoryRegion, ProtectionDomain};
use beeline_os::memory::{copy_in, copy_out};
use beeline_wire::checksum::crc32c_append;

use crate::message::Part;

/// Buffers that replies leave for messages and for what did not fit into the pool.
const RESERVE: usize = 8;

/// The pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) region: MemoryRegion,
    pub(crate) buffer_bytes: usize,
    free: RefCell<Vec<u32>>,
    count: u32,
    staged: Cell<u64>,
    /// Bytes of the replies of all channels that there are.
    replies: Cell<usize>,
}

impl Pool {
    /// Registers it.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        domain: &Arc<dyn ProtectionDomain>,
        buffer_bytes: usize,
        count: u32,
    ) -> Result<Rc<Self>, FabricError> {
        let count = count.max(2 * RESERVE as u32);
        let memory = device.allocate_memory(buffer_bytes * count as usize)?;
        let region = domain.register(memory, Access::empty())?;
        let free = RefCell::new((0..count).rev().collect());
        let (staged, replies) = (Cell::new(0), Cell::new(0));
        Ok(Rc::new(Self { region, buffer_bytes, free, count, staged, replies }))
    }

    /// Any buffer.
    pub(crate) fn take(&self) -> Option<u32> {
        self.free.borrow_mut().pop()
    }

    fn take_for_reply(&self) -> Option<u32> {
        let mut free = self.free.borrow_mut();
        if free.len() > RESERVE { free.pop() } else { None }
    }

    pub(crate) fn put_back(&self, buffer: u32) {
        self.free.borrow_mut().push(buffer);
    }

    pub(crate) fn offset(&self, buffer: u32) -> u64 {
        u64::from(buffer) * self.buffer_bytes as u64
    }

    pub(crate) fn idle(&self) -> usize {
        self.free.borrow().len()
    }

    /// Whether few buffers are left for the channels that have none.
    pub(crate) fn is_scarce(&self) -> bool {
        self.idle() <= self.count as usize / 4
    }

    /// Bytes of the replies that belong to channels.
    pub(crate) fn replies(&self) -> usize {
        self.replies.get()
    }

    /// Bytes that were copied once more because the pool had no buffer.
    pub(crate) fn staged(&self) -> u64 {
        self.staged.get()
    }
}

/// A reply, being made.
///
/// ```text
/// part 16 B │ bytes of the reply …      in buffers of the pool, then beside it
/// ```
#[derive(Debug)]
pub struct ReplyBuffer {
    pool: Rc<Pool>,
    buffers: Vec<u32>,
    rest: Vec<u8>,
    length: usize,
    /// What the channel counts it in, and as how much.
    counted: Option<(Rc<Cell<usize>>, usize)>,
}

/// Where some bytes of a reply lie.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece<'r> {
    /// In the pool: offset and length.
    Pooled(u64, u64),
    /// Beside it.
    Beside(&'r [u8]),
}

impl ReplyBuffer {
    pub(crate) fn new(pool: &Rc<Pool>) -> Self {
        let mut reply = Self {
            pool: Rc::clone(pool),
            buffers: Vec::new(),
            rest: Vec::new(),
            length: 0,
            counted: None,
        };
        reply.put(&[0; Part::BYTES]);
        reply
    }

    /// Counts it among the replies of a channel for as long as it lives.
    pub(crate) fn belong_to(&mut self, channel: &Rc<Cell<usize>>) {
        assert!(self.counted.is_none(), "a reply belongs to one channel");
        let bytes = self.len();
        channel.set(channel.get() + bytes);
        self.pool.replies.set(self.pool.replies.get() + bytes);
        self.counted = Some((Rc::clone(channel), bytes));
    }

    /// Whether it is counted among the replies of a channel.
    pub(crate) fn is_counted(&self) -> bool {
        self.counted.is_some()
    }

    /// Bytes of the reply so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length - Part::BYTES
    }

    /// True before the first byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.put(bytes);
    }

    /// Overwrites bytes that were appended before.
    ///
    /// Invariant: they were; that is asserted.
    pub fn patch(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len(), "only what is there is patched");
        self.overwrite(Part::BYTES + at, bytes);
    }

    /// Begins anew.
    pub fn clear(&mut self) {
        self.length = Part::BYTES;
        let kept = self.buffers.len() * self.pool.buffer_bytes;
        self.rest.truncate(Part::BYTES.saturating_sub(kept));
    }

    fn put(&mut self, mut bytes: &[u8]) {
        let size = self.pool.buffer_bytes;
        while !bytes.is_empty() {
            let pooled = self.buffers.len() * size;
            if self.length < pooled {
                let (now, later) = bytes.split_at(bytes.len().min(pooled - self.length));
                self.store(self.length, now);
                self.length += now.len();
                bytes = later;
            } else if let Some(buffer) =
                self.rest.is_empty().then(|| self.pool.take_for_reply()).flatten()
            {
                self.buffers.push(buffer);
            } else {
                self.rest.extend_from_slice(bytes);
                self.length += bytes.len();
                return;
            }
        }
    }

    /// Stores bytes that lie in one buffer.
    fn store(&self, at: usize, bytes: &[u8]) {
        let size = self.pool.buffer_bytes;
        let buffer = self.pool.offset(self.buffers[at / size]) as usize;
        copy_in(self.pool.region.memory().as_ref(), buffer + at % size, bytes);
    }

    fn overwrite(&mut self, mut at: usize, mut bytes: &[u8]) {
        let size = self.pool.buffer_bytes;
        let pooled = self.buffers.len() * size;
        while !bytes.is_empty() {
            if at >= pooled {
                let start = at - pooled;
                self.rest[start..start + bytes.len()].copy_from_slice(bytes);
                return;
            }
            let (now, later) = bytes.split_at(bytes.len().min(size - at % size));
            self.store(at, now);
            at += now.len();
            bytes = later;
        }
    }

    /// Writes the head of the first part.
    pub(crate) fn head(&mut self, part: Part) {
        self.overwrite(0, &part.encode());
    }

    /// The pieces of `count` bytes of the reply from `from`; with the head of the first part where `headed`.
    pub(crate) fn pieces(&self, from: usize, count: usize, headed: bool) -> Vec<Piece<'_>> {
        let size = self.pool.buffer_bytes;
        let pooled = self.buffers.len() * size;
        let mut at = if headed { 0 } else { Part::BYTES + from };
        let end = Part::BYTES + from + count;
        let mut pieces = Vec::with_capacity(1);
        while at < end {
            if at < pooled {
                let length = (end - at).min(size - at % size);
                let offset = self.pool.offset(self.buffers[at / size]) + (at % size) as u64;
                pieces.push(Piece::Pooled(offset, length as u64));
                at += length;
            } else {
                let length = (end - at).min(size);
                let start = at - pooled;
                pieces.push(Piece::Beside(&self.rest[start..start + length]));
                at += length;
            }
        }
        pieces
    }

    /// CRC-32C of some bytes of the reply.
    pub(crate) fn checksum(&self, from: usize, count: usize) -> u32 {
        let mut scratch = Vec::new();
        self.pieces(from, count, false).iter().fold(0, |sum, piece| match piece {
            Piece::Beside(bytes) => crc32c_append(sum, bytes),
            Piece::Pooled(offset, length) => {
                scratch.resize(*length as usize, 0);
                copy_out(self.pool.region.memory().as_ref(), *offset as usize, &mut scratch);
                crc32c_append(sum, &scratch)
            }
        })
    }

    /// Counts bytes that take a second copy.
    pub(crate) fn count_staged(&self, bytes: usize) {
        self.pool.staged.set(self.pool.staged.get() + bytes as u64);
    }
}

impl Drop for ReplyBuffer {
    fn drop(&mut self) {
        for buffer in self.buffers.drain(..) {
            self.pool.put_back(buffer);
        }
        if let Some((channel, bytes)) = self.counted.take() {
            channel.set(channel.get() - bytes);
            self.pool.replies.set(self.pool.replies.get() - bytes);
        }
    }
}
