//! Results that are copied: scans and statistics, the NVM-oblivious baseline, and everything of a
//! store whose segments the device cannot reach.
//!
//! ```text
//! put:  client ── write ──► buffer ── checked, copied ──► segment
//! get:  segment ── copied ──► staging buffer ── write ──► client
//! ```
//!
//! That a device cannot reach segments (memory of a DAX file system, without on-demand paging)
//! shows when the first is registered, and holds for all of them.

use std::sync::Arc;

use beeline_fabric::{Access, FabricError, MemoryRegion};
use beeline_kv::{ReadGuard, Shard};
use beeline_os::memory::copy_across;
use beeline_pmem::Segment;

use crate::connection::{Connection, Grant, Pending, Source, Staging};
use crate::server::ShardServer;

impl ShardServer {
    /// What a client writes to reach `segment`: the segment itself, or, where the device cannot
    /// reach it, a buffer of its length, from which announced entries are copied; and whether that
    /// is so. A client keeps its buffer from grant to grant, under a key for each.
    pub(crate) fn grantable(
        &mut self,
        before: Option<Grant>,
        segment: Arc<Segment>,
    ) -> Result<(MemoryRegion, bool), FabricError> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let length = segment.length_bytes();
        if self.unreachable.is_none() {
            match self.domain.register(segment, access) {
                Ok(region) => return Ok((region, false)),
                Err(error) => self.learn(error)?,
            }
        }
        let kept =
            before.filter(|grant| grant.is_copied).map(|grant| Arc::clone(grant.region.memory()));
        let memory = match kept.filter(|memory| memory.length_bytes() == length) {
            Some(memory) => memory,
            None => self.device.allocate_memory(length)?,
        };
        Ok((self.domain.register(memory, access)?, true))
    }

    /// Takes note that the device cannot reach segments; any other error goes back.
    fn learn(&mut self, error: FabricError) -> Result<(), FabricError> {
        if !matches!(error, FabricError::CannotRegister { .. }) {
            return Err(error);
        }
        tracing::warn!(shard = self.shard, %error, "entries of one-sided clients are copied");
        self.unreachable = Some(error);
        Ok(())
    }

    /// Where an entry will be sent from.
    pub(crate) fn source(
        &mut self,
        shard: &mut Shard,
        guard: &ReadGuard,
    ) -> Result<Source, FabricError> {
        if self.unreachable.is_none() {
            match self.sources.of(&self.domain, shard.segment_read(guard)) {
                Ok(_) => return Ok(Source::Segment),
                Err(error) => self.learn(error)?,
            }
        }
        Ok(Source::NoBufferYet)
    }

    /// Copies entries that wait for a buffer, in the order of the answers, while there are any.
    pub(crate) fn stage(&mut self, shard: &mut Shard, connection: &mut Connection) {
        for at in 0..connection.pending.len() {
            let Pending::Entry { guard, from: Source::NoBufferYet, .. } = &connection.pending[at]
            else {
                continue;
            };
            let (offset, length) = (guard.offset() as usize, guard.length_bytes());
            // With nothing before it and nothing under way, nothing will become free.
            let alone = at == 0 && connection.held.is_empty();
            let segment = Arc::clone(shard.segment_read(guard));
            let Some(buffer) = self.staging(connection, length, alone) else { break };
            let target = connection.staging[buffer].region.memory().as_ref();
            copy_across((segment.as_ref(), offset), (target, 0), length as usize);
            self.counters.copied_bytes += u64::from(length);
            if let Pending::Entry { from, .. } = &mut connection.pending[at] {
                *from = Source::Buffer(buffer);
            }
        }
    }

    /// As [`ShardServer::stage`], for all connections with answers.
    pub(crate) fn stage_listed(&mut self, shard: &mut Shard) {
        for at in 0..self.listed.len() {
            let index = usize::from(self.listed[at]);
            // Taken out while it is worked on, so that the server's parts can be used beside it.
            let Some(mut connection) = self.connections.get_mut(index).and_then(Option::take)
            else {
                continue;
            };
            self.stage(shard, &mut connection);
            self.connections[index] = Some(connection);
        }
    }

    /// A buffer of at least `bytes` that no send uses; `None` when the client's share is used up,
    /// unless it `must` be.
    pub(crate) fn staging(
        &mut self,
        connection: &mut Connection,
        bytes: u32,
        must: bool,
    ) -> Option<usize> {
        let share = u64::from(self.options.client_result_bytes);
        // A buffer larger than the share is for results as large, so that it does not stay.
        let fits = |staging: &Staging| {
            let common = u64::from(staging.bytes) <= share || u64::from(bytes) > share;
            !staging.busy && staging.bytes >= bytes && common
        };
        if let Some(found) = connection.staging.iter().position(fits) {
            connection.staging[found].busy = true;
            return Some(found);
        }
        let rounded = bytes.checked_next_power_of_two()?.max(4096);
        let used: u64 = connection.staging.iter().map(|staging| u64::from(staging.bytes)).sum();
        if used + u64::from(rounded) > share {
            // The largest idle one makes room, if that is enough.
            let idle = (0..connection.staging.len())
                .filter(|&at| !connection.staging[at].busy)
                .max_by_key(|&at| connection.staging[at].bytes);
            let freed = idle.map_or(0, |at| u64::from(connection.staging[at].bytes));
            if !must && used - freed + u64::from(rounded) > share {
                return None;
            }
            if let Some(idle) = idle {
                connection.staging[idle] = self.new_staging(rounded)?;
                return Some(idle);
            }
        }
        connection.staging.push(self.new_staging(rounded)?);
        Some(connection.staging.len() - 1)
    }

    fn new_staging(&self, bytes: u32) -> Option<Staging> {
        let memory = self.device.allocate_memory(bytes as usize).ok()?;
        let region = self.domain.register(memory, Access::LOCAL_WRITE).ok()?;
        Some(Staging { region, bytes, busy: true })
    }
}
