//! Flushes: visible and persistent.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use beeline_fabric::{FlushKind, Operation, QueuePairState, Status, WorkRequest};
use beeline_os::Persistence;
use beeline_os::memory::MemoryObject;

use crate::context::{ALL, Context, bytes_at, contents, inline_write, visible};
use crate::harness::{ItemResult, ensure, ensure_eq};

/// A device's own memory, said to survive a loss of power by write-back of cache lines (DRAM
/// standing for persistent memory).
#[derive(Debug)]
struct StandIn {
    memory: Arc<dyn MemoryObject>,
}

// SAFETY: every promise is kept by the object inside, which lives as long as this one.
unsafe impl MemoryObject for StandIn {
    fn base(&self) -> NonNull<u8> {
        self.memory.base()
    }

    fn length_bytes(&self) -> usize {
        self.memory.length_bytes()
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.memory.descriptor()
    }

    fn persistence(&self) -> Persistence {
        Persistence::CacheLine
    }

    fn stored(&self, offset: usize, length: usize) {
        self.memory.stored(offset, length);
    }

    fn persist(&self, _offset: usize, _length: usize) -> std::io::Result<()> {
        Ok(())
    }

    fn replace_backing(&self) -> std::io::Result<()> {
        self.memory.replace_backing()
    }
}

fn persistent(remote: beeline_fabric::RemoteAddress, length: u64) -> Operation<'static> {
    Operation::Flush { remote, length, kind: FlushKind::Persistent }
}

pub(crate) fn a_visible_flush_completes_after_placement(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(4096, ALL)?;
    for round in 1..=200_u64 {
        let bytes = round.to_le_bytes();
        let remote = target.remote_address(8 * (round % 512));
        let write = WorkRequest::unsignalled(0, inline_write(&bytes, remote));
        pair.a.qp.post_send(&[write, WorkRequest::new(round, visible(remote, 8))])?;
        context.success(&pair.a.queue, round, &[])?;
        let place = usize::try_from(8 * (round % 512)).unwrap_or(0);
        ensure_eq!(bytes_at(&target, place, 8), bytes, "bytes at the flush of round {round}");
    }
    Ok(())
}

pub(crate) fn a_persistent_flush_of_volatile_memory_fails(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(4096, ALL)?;
    ensure_eq!(target.persistence(), Persistence::Volatile, "the device's own memory");
    let remote = target.remote_address(0);
    context.perform(&mut pair.a, inline_write(b"gone", remote), &[])?;
    let done = context.execute(&mut pair.a, persistent(remote, 4), &[&pair.b.queue])?;
    ensure_eq!(done.status, Status::PersistenceError, "status");
    ensure_eq!(pair.a.qp.state(), QueuePairState::Error, "state after a failure");
    Ok(())
}

pub(crate) fn a_persistent_flush_of_durable_memory_succeeds(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let memory = Arc::new(StandIn { memory: pair.far.device.allocate_memory(8192)? });
    let target = pair.far.domain.register(memory, ALL)?;
    for round in 1..=50_u64 {
        let bytes = round.to_le_bytes();
        let remote = target.remote_address(100 * (round % 64));
        let write = WorkRequest::unsignalled(0, inline_write(&bytes, remote));
        pair.a.qp.post_send(&[write, WorkRequest::new(round, persistent(remote, 8))])?;
        context.success(&pair.a.queue, round, &[])?;
        let place = usize::try_from(100 * (round % 64)).unwrap_or(0);
        ensure_eq!(bytes_at(&target, place, 8), bytes, "bytes at the flush of round {round}");
    }
    // A range may be anything inside the region, aligned or not.
    context.perform(&mut pair.a, persistent(target.remote_address(0), 8192), &[])?;
    context.perform(&mut pair.a, persistent(target.remote_address(8191), 1), &[])?;
    Ok(())
}

pub(crate) fn a_flush_of_one_region_leaves_another_alone(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let first = pair.far.region(64, ALL)?;
    let second = pair.far.region(64, ALL)?;
    context.perform(&mut pair.a, inline_write(b"one", first.remote_address(0)), &[])?;
    context.perform(&mut pair.a, visible(first.remote_address(0), 3), &[])?;
    ensure!(contents(&second).iter().all(|&byte| byte == 0), "the other region changed");
    Ok(())
}
