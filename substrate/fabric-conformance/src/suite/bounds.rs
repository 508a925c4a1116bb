//! Keys, ranges and rights.
//!
//! Each refusal is checked in full: the status, both ends in the error state, the memory
//! untouched, and a second connection between the same nodes still working.

use std::sync::Arc;

use beeline_fabric::{
    Access, LocalData, MemoryRegion, Operation, PostError, QueuePairState, RemoteAddress,
    RemoteKey, Status, WorkRequest,
};

use crate::context::{
    ALL, Context, EndpointOptions, Node, Pair, contents, inline_write, object_bytes, part, pattern,
    visible,
};
use crate::harness::{ItemResult, Stop, ensure, ensure_eq};

/// Posts what `operation` makes of the target region and a local one and checks the refusal.
fn refused(
    context: &Context<'_>,
    rights: Access,
    expected: Status,
    operation: impl for<'a> Fn(&'a MemoryRegion, &'a MemoryRegion) -> Operation<'a>,
) -> ItemResult {
    refused_on(context, |far| far.region_of(&pattern(1, 4096), rights), expected, operation)
}

fn refused_on(
    context: &Context<'_>,
    target: impl Fn(&Node) -> Result<MemoryRegion, Stop>,
    expected: Status,
    operation: impl for<'a> Fn(&'a MemoryRegion, &'a MemoryRegion) -> Operation<'a>,
) -> ItemResult {
    let mut pair = context.pair()?;
    let options = EndpointOptions::default();
    let (mut other_a, mut other_b) = context.connected(&pair.near, &pair.far, options)?;
    let target = target(&pair.far)?;
    let local = pair.near.region_of(&pattern(2, 4096), ALL)?;
    let before = (contents(&target), contents(&local));

    let done = context.execute(&mut pair.a, operation(&target, &local), &[&pair.b.queue])?;
    ensure_eq!(done.status, expected, "status");
    context.both_broken(&pair.a, &pair.b)?;
    ensure_eq!(contents(&target) == before.0, true, "the target's memory is untouched");
    ensure_eq!(contents(&local) == before.1, true, "the initiator's memory is untouched");

    let allowed = pair.far.region(64, ALL)?;
    let remote = allowed.remote_address(0);
    let others = [&*other_b.queue];
    context.perform(&mut other_a, inline_write(b"neighbour", remote), &others)?;
    let read = Operation::Read { local: part(&local, 0, 9), remote };
    context.perform(&mut other_a, read, &others)?;
    ensure_eq!(&contents(&local)[..9], b"neighbour", "bytes over the neighbouring connection");
    ensure_eq!(other_b.qp.state(), QueuePairState::ReadyToSend, "the neighbour's state");
    let back = inline_write(b"!", local.remote_address(0));
    context.perform(&mut other_b, back, &[&other_a.queue])?;
    Ok(())
}

fn write_at(remote: RemoteAddress) -> Operation<'static> {
    inline_write(b"12345678", remote)
}

pub(crate) fn a_write_past_the_end_is_refused(context: &Context<'_>) -> ItemResult {
    for offset in [4089, 4096, 1 << 20, u64::from(u32::MAX) + 1] {
        refused(context, ALL, Status::RemoteAccessError, |target, _| {
            write_at(target.remote_address(offset))
        })?;
    }
    // No receive is posted for the immediate. The write is refused in any case.
    let order = context.harness.capabilities().range_checked_before_receive;
    let expected =
        if order.is_ok() { Status::RemoteAccessError } else { Status::ReceiverNotReady };
    refused(context, ALL, expected, |target, _| Operation::WriteWithImmediate {
        local: LocalData::Inline(b"12345678"),
        remote: target.remote_address(4090),
        immediate: 1,
    })?;
    Context::require(order)
}

pub(crate) fn an_offset_that_wraps_around_is_refused(context: &Context<'_>) -> ItemResult {
    for offset in [u64::MAX, u64::MAX - 3, u64::MAX - 7, 1 << 63] {
        refused(context, ALL, Status::RemoteAccessError, |target, _| {
            write_at(target.remote_address(offset))
        })?;
        refused(context, ALL, Status::RemoteAccessError, |target, local| Operation::Read {
            local: part(local, 0, 8),
            remote: target.remote_address(offset),
        })?;
    }
    Ok(())
}

pub(crate) fn a_read_past_the_end_is_refused(context: &Context<'_>) -> ItemResult {
    for (offset, length) in [(4089, 8), (1, 4096), (4096, 1)] {
        refused(context, ALL, Status::RemoteAccessError, |target, local| Operation::Read {
            local: part(local, 0, length),
            remote: target.remote_address(offset),
        })?;
    }
    Ok(())
}

pub(crate) fn an_atomic_past_the_end_is_refused(context: &Context<'_>) -> ItemResult {
    for offset in [4096, 1 << 40, u64::MAX - 7] {
        refused(context, ALL, Status::RemoteAccessError, |target, local| {
            Operation::FetchAndAdd {
                local: part(local, 0, 8),
                remote: target.remote_address(offset),
                addend: 1,
            }
        })?;
        refused(context, ALL, Status::RemoteAccessError, |target, local| {
            Operation::CompareAndSwap {
                local: part(local, 0, 8),
                remote: target.remote_address(offset),
                expected: 0,
                desired: 1,
            }
        })?;
    }
    Ok(())
}

pub(crate) fn a_flush_past_the_end_is_refused(context: &Context<'_>) -> ItemResult {
    for (offset, length) in [(0, 4097), (4096, 1), (u64::MAX, 1), (1, u64::MAX)] {
        refused(context, ALL, Status::RemoteAccessError, |target, _| {
            visible(target.remote_address(offset), length)
        })?;
    }
    Ok(())
}

pub(crate) fn an_unknown_key_is_refused(context: &Context<'_>) -> ItemResult {
    refused(context, ALL, Status::RemoteAccessError, |target, _| {
        let key = RemoteKey(target.remote_key().0.wrapping_add(1));
        write_at(RemoteAddress { key, offset: 0 })
    })?;
    for key in [0, 1, u64::MAX] {
        refused(context, ALL, Status::RemoteAccessError, |_, local| Operation::Read {
            local: part(local, 0, 8),
            remote: RemoteAddress { key: RemoteKey(key), offset: 0 },
        })?;
    }
    Ok(())
}

pub(crate) fn the_key_of_another_node_is_refused(context: &Context<'_>) -> ItemResult {
    let third = context.node()?;
    let elsewhere = third.region_of(&pattern(9, 64), ALL)?;
    let remote = elsewhere.remote_address(0);
    refused(context, ALL, Status::RemoteAccessError, |_, _| write_at(remote))?;
    // The initiator's own key names nothing at the target.
    refused(context, ALL, Status::RemoteAccessError, |_, local| {
        write_at(local.remote_address(0))
    })?;
    ensure_eq!(contents(&elsewhere), pattern(9, 64), "memory of the third node");
    Ok(())
}

pub(crate) fn a_key_of_another_protection_domain_is_refused(context: &Context<'_>) -> ItemResult {
    let other_domain = |far: &Node| {
        let domain = far.device.allocate_protection_domain()?;
        Node { device: far.device.clone(), domain }.region_of(&pattern(1, 4096), ALL)
    };
    let expected = Status::RemoteAccessError;
    refused_on(context, other_domain, expected, |target, _| write_at(target.remote_address(0)))?;
    refused_on(context, other_domain, expected, |target, local| Operation::Read {
        local: part(local, 0, 8),
        remote: target.remote_address(0),
    })
}

pub(crate) fn the_key_of_a_dropped_region_is_refused(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let region = pair.far.region(4096, ALL)?;
    let memory = std::sync::Arc::clone(region.memory());
    let remote = region.remote_address(0);
    context.perform(&mut pair.a, write_at(remote), &[])?;
    context.perform(&mut pair.a, visible(remote, 8), &[])?;
    drop(region);
    let done = context.execute(&mut pair.a, inline_write(b"x", remote), &[&pair.b.queue])?;
    ensure_eq!(done.status, Status::RemoteAccessError, "status");
    context.both_broken(&pair.a, &pair.b)?;
    let bytes = crate::context::object_bytes(memory.as_ref(), 0, 8);
    ensure_eq!(bytes, b"12345678", "memory of the dropped region");
    Ok(())
}

pub(crate) fn writing_without_the_right_is_refused(context: &Context<'_>) -> ItemResult {
    for rights in [
        Access::empty(),
        Access::REMOTE_READ,
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
    ] {
        refused(context, rights, Status::RemoteAccessError, |target, _| {
            write_at(target.remote_address(0))
        })?;
    }
    Ok(())
}

pub(crate) fn reading_without_the_right_is_refused(context: &Context<'_>) -> ItemResult {
    for rights in [Access::empty(), Access::LOCAL_WRITE | Access::REMOTE_WRITE] {
        refused(context, rights, Status::RemoteAccessError, |target, local| Operation::Read {
            local: part(local, 0, 8),
            remote: target.remote_address(0),
        })?;
    }
    Ok(())
}

pub(crate) fn atomics_without_the_right_are_refused(context: &Context<'_>) -> ItemResult {
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    refused(context, rights, Status::RemoteAccessError, |target, local| Operation::FetchAndAdd {
        local: part(local, 0, 8),
        remote: target.remote_address(0),
        addend: 1,
    })?;
    refused(context, rights, Status::RemoteAccessError, |target, local| {
        Operation::CompareAndSwap {
            local: part(local, 0, 8),
            remote: target.remote_address(0),
            expected: 0,
            desired: 1,
        }
    })
}

pub(crate) fn an_unaligned_atomic_is_an_invalid_request(context: &Context<'_>) -> ItemResult {
    for offset in [1, 4, 4095] {
        refused(context, ALL, Status::RemoteInvalidRequest, |target, local| {
            Operation::FetchAndAdd {
                local: part(local, 0, 8),
                remote: target.remote_address(offset),
                addend: 1,
            }
        })?;
    }
    refused(context, ALL, Status::RemoteInvalidRequest, |target, local| {
        Operation::CompareAndSwap {
            local: part(local, 0, 8),
            remote: target.remote_address(12),
            expected: 0,
            desired: 1,
        }
    })
}

pub(crate) fn local_ranges_outside_their_region_are_refused(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(8192, ALL)?;
    let local = pair.near.region(4096, ALL)?;
    let remote = target.remote_address(0);
    for (offset, length) in [(4096, 1), (4089, 8), (u64::MAX, 8), (u64::MAX - 3, 4), (1 << 63, 8)] {
        let entries = [part(&local, 0, 8), part(&local, offset, length)];
        let gathered = LocalData::Gather(&entries);
        let word = part(&local, offset, length);
        for operation in [
            Operation::Write { local: gathered, remote },
            Operation::WriteWithImmediate { local: gathered, remote, immediate: 0 },
            Operation::Send { local: gathered, immediate: None },
            Operation::Read { local: word, remote },
        ] {
            let refused = pair.a.qp.post_send(&[WorkRequest::new(1, operation)]);
            ensure_eq!(refused, Err(PostError::LocalProtection), "{operation:?}");
        }
        let refused = pair.a.post_receive(1, &local, offset, length);
        ensure!(refused.is_err(), "a receive outside its region was taken");
    }
    for operation in [
        Operation::FetchAndAdd { local: part(&local, 4092, 8), remote, addend: 1 },
        Operation::CompareAndSwap {
            local: part(&local, 4096, 8),
            remote,
            expected: 0,
            desired: 1,
        },
    ] {
        let refused = pair.a.qp.post_send(&[WorkRequest::new(1, operation)]);
        ensure_eq!(refused, Err(PostError::LocalProtection), "{operation:?}");
    }
    ensure_eq!(pair.a.qp.state(), QueuePairState::ReadyToSend, "state after refused posts");
    context.perform(&mut pair.a, write_at(remote), &[])?;
    Ok(())
}

pub(crate) fn results_need_the_right_to_write_locally(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let local = pair.near.region_of(&pattern(4, 64), Access::empty())?;
    let remote = target.remote_address(0);
    for operation in [
        Operation::Read { local: part(&local, 0, 8), remote },
        Operation::FetchAndAdd { local: part(&local, 0, 8), remote, addend: 1 },
        Operation::CompareAndSwap {
            local: part(&local, 0, 8),
            remote,
            expected: 0,
            desired: 1,
        },
    ] {
        let refused = pair.a.qp.post_send(&[WorkRequest::new(1, operation)]);
        ensure_eq!(refused, Err(PostError::LocalProtection), "{operation:?}");
    }
    let refused = pair.a.post_receive(1, &local, 0, 8);
    ensure!(refused.is_err(), "a receive into a region that may not be written was taken");
    // Local reads are always allowed.
    let entries = [part(&local, 0, 64)];
    let write = Operation::Write { local: LocalData::Gather(&entries), remote };
    context.perform(&mut pair.a, write, &[])?;
    context.perform(&mut pair.a, visible(remote, 64), &[])?;
    ensure_eq!(contents(&target), pattern(4, 64), "bytes from a region without rights");
    Ok(())
}

pub(crate) fn a_part_of_an_object_is_reached_and_nothing_beside_it(
    context: &Context<'_>,
) -> ItemResult {
    if crate::far::is_there() {
        return Err(crate::harness::Stop::skipped("the object is in another host"));
    }
    let pair = context.pair()?;
    let whole = pair.far.device.allocate_memory(12_288)?;
    let part_of = |offset, length| {
        beeline_os::Part::new(Arc::clone(&whole), offset, length)
            .map(Arc::new)
            .ok_or_else(|| crate::harness::Stop::failed("a part inside its object"))
    };
    let middle = pair.far.domain.register(part_of(4160, 512)?, ALL)?;
    let last = pair.far.domain.register(part_of(8192, 4096)?, ALL)?;
    ensure_eq!(middle.length_bytes(), 512, "length of the part");
    let Pair { near, mut a, b, far: _far } = pair;
    context.perform(&mut a, inline_write(b"first", middle.remote_address(0)), &[])?;
    context.perform(&mut a, inline_write(b"end", middle.remote_address(509)), &[])?;
    context.perform(&mut a, inline_write(b"other", last.remote_address(8)), &[])?;
    context.perform(&mut a, visible(last.remote_address(8), 5), &[])?;
    ensure_eq!(object_bytes(whole.as_ref(), 4160, 5), b"first", "the part's first bytes");
    ensure_eq!(object_bytes(whole.as_ref(), 4669, 3), b"end", "the part's last bytes");
    ensure_eq!(object_bytes(whole.as_ref(), 8200, 5), b"other", "another part's bytes");
    let local = near.region(8, ALL)?;
    let word = part(&local, 0, 8);
    let add = Operation::FetchAndAdd { local: word, remote: last.remote_address(64), addend: 3 };
    context.perform(&mut a, add, &[])?;
    ensure_eq!(object_bytes(whole.as_ref(), 8256, 1), [3], "an atomic in a part");
    // Taking one part back leaves the other and all contents.
    middle.revoke()?;
    context.perform(&mut a, inline_write(b"still", last.remote_address(8)), &[&b.queue])?;
    context.perform(&mut a, visible(last.remote_address(8), 5), &[])?;
    ensure_eq!(object_bytes(whole.as_ref(), 8200, 5), b"still", "the other part, written again");
    ensure_eq!(object_bytes(whole.as_ref(), 4160, 5), b"first", "what was in the part taken back");
    let beyond = inline_write(b"x", last.remote_address(4096));
    let done = context.execute(&mut a, beyond, &[&b.queue])?;
    ensure_eq!(done.status, Status::RemoteAccessError, "a write past the part's end");
    Ok(())
}
