//! Snapshots between members: a queue pair each, made for one snapshot, that carries the file in
//! messages.
//!
//! ```text
//!  sender ── Offer: position, bytes, queue pair ──▶ receiver     over the control connection
//!         ◀─ Accept: queue pair ───────────────────
//!         ── messages of 64 KiB ──────────────────▶ file         a receive per message is credit
//! ```
//!
//! The last message ends it; the job that installs the file synchronises it, and checks the checksum inside. What
//! breaks is forgotten: the protocol asks for the snapshot again.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use beeline_fabric::{
    LocalData, MemoryRegion, Operation, PostError, QueuePair, QueuePairState, ReceiveRequest,
    ScatterGatherEntry, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out};
use beeline_paxos::{NodeId, Position};

/// Bytes of one message, at most.
pub(crate) const CHUNK_BYTES: u64 = 64 << 10;
/// Messages on their way.
pub(crate) const CHUNKS: u64 = 8;
/// Memory of one end.
pub(crate) const BULK_BYTES: usize = (CHUNK_BYTES * CHUNKS) as usize;

/// A snapshot of which nothing came for so long gives way to another member's, nanoseconds. Shorter
/// than the protocol's pause between two requests to send one.
const INCOMING_PATIENCE_NS: u64 = 3_000_000_000;

/// A snapshot on its way to a peer.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) attempt: u32,
    pub(crate) qp: Box<dyn QueuePair>,
    pub(crate) region: MemoryRegion,
    /// What it covers.
    pub(crate) position: Position,
    pub(crate) file: File,
    pub(crate) length: u64,
    /// Bytes handed to the queue pair.
    pub(crate) posted: u64,
    /// Messages posted, and completed.
    pub(crate) messages: u64,
    pub(crate) completed: u64,
    pub(crate) chunk: u64,
    /// When something last happened.
    pub(crate) progress_ns: u64,
    pub(crate) buffer: Vec<u8>,
}

impl Outgoing {
    /// Posts what fits. True while there is something left to do.
    pub(crate) fn pump(&mut self) -> io::Result<bool> {
        match self.qp.state() {
            QueuePairState::Init => return Ok(true),
            QueuePairState::ReadyToSend => {}
            QueuePairState::Error => return Ok(false),
        }
        while self.posted < self.length && self.messages - self.completed < CHUNKS {
            let length = self.chunk.min(self.length - self.posted);
            self.buffer.resize(length as usize, 0);
            self.file.read_exact(&mut self.buffer)?;
            // Completions come in order, so a buffer whose turn is here again is free.
            let offset = self.messages % CHUNKS * CHUNK_BYTES;
            copy_in(self.region.memory().as_ref(), offset as usize, &self.buffer);
            let entries = [ScatterGatherEntry { region: &self.region, offset, length }];
            let operation = Operation::Send { local: LocalData::Gather(&entries), immediate: None };
            if self.qp.post_send(&[WorkRequest::new(0, operation)]).is_err() {
                return Ok(false);
            }
            self.messages += 1;
            self.posted += length;
        }
        Ok(self.posted < self.length || self.completed < self.messages)
    }
}

/// A snapshot on its way to us.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) from: NodeId,
    pub(crate) position: Position,
    pub(crate) qp: Box<dyn QueuePair>,
    pub(crate) region: MemoryRegion,
    pub(crate) file: File,
    pub(crate) length: u64,
    pub(crate) received: u64,
    /// When the last piece came.
    pub(crate) progress_ns: u64,
    pub(crate) buffer: Vec<u8>,
}

impl Incoming {
    /// Whether more may come: its sender, which may be gone without its queue pair's having been
    /// connected, has sent something lately.
    pub(crate) fn is_alive(&self, now_ns: u64) -> bool {
        self.qp.state() != QueuePairState::Error
            && now_ns.saturating_sub(self.progress_ns) < INCOMING_PATIENCE_NS
    }

    pub(crate) fn post_receive(&mut self, index: u64) -> Result<(), PostError> {
        let buffer = ScatterGatherEntry {
            region: &self.region,
            offset: index * CHUNK_BYTES,
            length: CHUNK_BYTES,
        };
        self.qp.post_receive(&[ReceiveRequest { wr_id: index, buffer: Some(buffer) }])
    }

    /// Takes the message in buffer `index`. True when it was the last. The file is not synchronised: that may
    /// take long.
    pub(crate) fn take(&mut self, index: u64, length: u64) -> io::Result<bool> {
        if index >= CHUNKS || length > CHUNK_BYTES || self.received + length > self.length {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.buffer.resize(length as usize, 0);
        let offset = (index * CHUNK_BYTES) as usize;
        copy_out(self.region.memory().as_ref(), offset, &mut self.buffer);
        self.file.write_all(&self.buffer)?;
        self.received += length;
        if self.received == self.length {
            return Ok(true);
        }
        self.post_receive(index).map_err(io::Error::other)?;
        Ok(false)
    }
}

/// A snapshot that arrived whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Who sent it.
    pub from: NodeId,
    /// What it says it covers.
    pub position: Position,
    /// Where it lies, not synchronised.
    pub path: PathBuf,
}
