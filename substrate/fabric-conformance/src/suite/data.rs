//! Immediates, inline data, gather lists, signalling, sizes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_fabric::{LocalData, Opcode, Operation, PostError, QueuePairState, Status, WorkRequest};
use beeline_os::memory::load_u64;

use crate::context::{
    ALL, Context, bytes_at, contents, inline_write, part, pattern, visible, whole,
};
use crate::harness::{ItemResult, ensure, ensure_eq};

pub(crate) fn an_immediate_arrives_with_the_length_written(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(256, ALL)?;
    for (wr_id, length, immediate) in [(1, 0_usize, 0_u32), (2, 1, 1), (3, 64, u32::MAX)] {
        pair.b.post_empty_receive(wr_id)?;
        let bytes = pattern(wr_id, length);
        let local = LocalData::Inline(&bytes);
        let remote = target.remote_address(7);
        let write = Operation::WriteWithImmediate { local, remote, immediate };
        let sent = pair.a.post(write)?;
        let arrived = context.success(&pair.b.queue, wr_id, &[&pair.a.queue])?;
        ensure_eq!(arrived.opcode, Opcode::ReceiveWithImmediate, "opcode at the target");
        ensure_eq!(arrived.immediate, Some(immediate), "immediate");
        ensure_eq!(arrived.length, length as u64, "bytes placed by the write");
        ensure_eq!(arrived.qp_num, pair.b.qp.qp_num(), "queue pair at the target");
        ensure_eq!(bytes_at(&target, 7, length), bytes, "bytes written");
        let done = context.success(&pair.a.queue, sent, &[])?;
        ensure_eq!(done.opcode, Opcode::WriteWithImmediate, "opcode at the initiator");
    }
    Ok(())
}

pub(crate) fn a_write_with_immediate_consumes_one_receive(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(8, ALL)?;
    for wr_id in 0..3 {
        pair.b.post_empty_receive(wr_id)?;
    }
    for round in 0..3 {
        let local = LocalData::Inline(b"x");
        let remote = target.remote_address(0);
        let write = Operation::WriteWithImmediate { local, remote, immediate: 9 };
        context.perform(&mut pair.a, write, &[&pair.b.queue])?;
        context.perform(&mut pair.a, inline_write(b"y", remote), &[&pair.b.queue])?;
        let arrived = context.success(&pair.b.queue, round, &[&pair.a.queue])?;
        ensure_eq!(arrived.wr_id, round, "receive consumed");
    }
    let left = pair.b.queue.len();
    ensure_eq!(left, 0, "plain writes consume no receive");
    Ok(())
}

pub(crate) fn a_send_carries_bytes_and_perhaps_an_immediate(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let inbox = pair.far.region(4096, ALL)?;
    let outbox = pair.near.region_of(&pattern(3, 4096), ALL)?;
    for (wr_id, length, immediate) in [(1, 0, None), (2, 1, Some(77)), (3, 4096, None)] {
        pair.b.post_receive(wr_id, &inbox, 0, 4096)?;
        let entries = [part(&outbox, 0, length)];
        let sent = pair.a.post(Operation::Send { local: LocalData::Gather(&entries), immediate })?;
        let arrived = context.success(&pair.b.queue, wr_id, &[&pair.a.queue])?;
        ensure_eq!(arrived.opcode, Opcode::Receive, "opcode of {arrived:?}");
        ensure_eq!(arrived.length, length, "bytes received");
        ensure_eq!(arrived.immediate, immediate, "immediate of {arrived:?}");
        let count = usize::try_from(length).unwrap_or(0);
        ensure_eq!(bytes_at(&inbox, 0, count), bytes_at(&outbox, 0, count), "message");
        context.success(&pair.a.queue, sent, &[])?;
    }
    Ok(())
}

pub(crate) fn inline_data_may_change_after_the_post(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let limit = pair.near.device.attributes().max_inline_bytes as usize;
    ensure!(limit >= 8, "a provider takes at least a word inline, this one {limit} bytes");
    let target = pair.far.region(limit * 16, ALL)?;
    let mut bytes = vec![0; limit];
    for round in 0..16_u8 {
        bytes.fill(round + 1);
        let remote = target.remote_address(u64::from(round) * limit as u64);
        pair.a.post(inline_write(&bytes, remote))?;
        bytes.fill(0xee);
    }
    context.completions(&pair.a.queue, 16, &[])?;
    context.perform(&mut pair.a, visible(target.remote_address(0), target.length_bytes()), &[])?;
    for (round, placed) in (1_u8..).zip(contents(&target).chunks(limit)) {
        ensure!(placed.iter().all(|&byte| byte == round), "round {round} placed {placed:?}");
    }
    Ok(())
}

pub(crate) fn too_much_inline_data_is_refused(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let limit = pair.near.device.attributes().max_inline_bytes as usize;
    let target = pair.far.region(limit + 64, ALL)?;
    let bytes = vec![1; limit + 1];
    let remote = target.remote_address(0);
    let good = WorkRequest::new(1, inline_write(b"good", remote));
    let bad = WorkRequest::new(2, inline_write(&bytes, remote));
    let refused = pair.a.qp.post_send(&[good, bad]);
    ensure!(matches!(refused, Err(PostError::TooLarge { .. })), "the post gave {refused:?}");
    context.perform(&mut pair.a, visible(remote, 8), &[])?;
    ensure_eq!(contents(&target)[..4], [0; 4], "a refused list posts nothing");
    context.perform(&mut pair.a, inline_write(&bytes[..limit], remote), &[])?;
    Ok(())
}

pub(crate) fn a_gather_list_is_placed_without_gaps(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let most = pair.near.device.attributes().max_scatter_gather_entries as usize;
    ensure!(most >= 2, "a gather list has at least two entries, here {most}");
    let first = pair.near.region_of(&pattern(1, 1000), ALL)?;
    let second = pair.near.region_of(&pattern(2, 1000), ALL)?;
    let target = pair.far.region(64 << 10, ALL)?;
    let mut entries = Vec::new();
    let mut expected = Vec::new();
    for index in 0..most {
        let region = if index % 2 == 0 { &first } else { &second };
        let (offset, length) = (index % 7, 1 + index * 13 % 200);
        entries.push(part(region, offset as u64, length as u64));
        expected.extend_from_slice(&bytes_at(region, offset, length));
    }
    let local = LocalData::Gather(&entries);
    let remote = target.remote_address(3);
    let done = context.perform(&mut pair.a, Operation::Write { local, remote }, &[])?;
    ensure_eq!(done.opcode, Opcode::Write, "opcode");
    context.perform(&mut pair.a, visible(remote, expected.len() as u64), &[])?;
    ensure_eq!(bytes_at(&target, 3, expected.len()), expected, "gathered bytes");
    let around = (bytes_at(&target, 0, 3), bytes_at(&target, 3 + expected.len(), 1));
    ensure_eq!(around, (vec![0; 3], vec![0]), "bytes around the write");
    pair.b.post_receive(5, &target, 0, expected.len() as u64)?;
    pair.a.post(Operation::Send { local, immediate: None })?;
    context.success(&pair.b.queue, 5, &[&pair.a.queue])?;
    ensure_eq!(bytes_at(&target, 0, expected.len()), expected, "gathered message");
    Ok(())
}

pub(crate) fn a_gather_list_beyond_the_limit_is_refused(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let most = pair.near.device.attributes().max_scatter_gather_entries as usize;
    let source = pair.near.region(64, ALL)?;
    let target = pair.far.region(64, ALL)?;
    let entries = vec![part(&source, 0, 0); most + 1];
    let local = LocalData::Gather(&entries);
    let write = Operation::Write { local, remote: target.remote_address(0) };
    let refused = pair.a.qp.post_send(&[WorkRequest::new(1, write)]);
    ensure!(matches!(refused, Err(PostError::TooLarge { .. })), "the post gave {refused:?}");
    ensure_eq!(pair.a.qp.state(), QueuePairState::ReadyToSend, "state after a refused post");
    Ok(())
}

pub(crate) fn operations_of_no_bytes_complete(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region_of(&pattern(1, 64), ALL)?;
    let local = pair.near.region_of(&pattern(2, 64), ALL)?;
    let before = (contents(&target), contents(&local));
    // The end of the region is a valid place for nothing.
    for offset in [0, 13, 64] {
        let remote = target.remote_address(offset);
        context.perform(&mut pair.a, inline_write(b"", remote), &[])?;
        let entries = [part(&local, 64, 0)];
        let gathered = LocalData::Gather(&entries);
        context.perform(&mut pair.a, Operation::Write { local: gathered, remote }, &[])?;
        let read = Operation::Read { local: part(&local, 64, 0), remote };
        let done = context.perform(&mut pair.a, read, &[])?;
        ensure_eq!(done.length, 0, "bytes read");
        context.perform(&mut pair.a, visible(remote, 0), &[])?;
    }
    ensure_eq!((contents(&target), contents(&local)), before, "memory after nothing");
    Ok(())
}

pub(crate) fn the_first_and_the_last_byte_of_a_region_can_be_reached(
    context: &Context<'_>,
) -> ItemResult {
    let mut pair = context.pair()?;
    // Not a multiple of a page or a word.
    let length = 12_345_u64;
    let target = pair.far.region(12_345, ALL)?;
    let local = pair.near.region(12_345, ALL)?;
    context.perform(&mut pair.a, inline_write(b"F", target.remote_address(0)), &[])?;
    context.perform(&mut pair.a, inline_write(b"L", target.remote_address(length - 1)), &[])?;
    let remote = target.remote_address(0);
    let done = context.perform(&mut pair.a, Operation::Read { local: whole(&local), remote }, &[])?;
    ensure_eq!(done.length, length, "bytes read");
    let read = contents(&local);
    ensure_eq!((read[0], read[1], read[12_343], read[12_344]), (b'F', 0, 0, b'L'), "ends");
    Ok(())
}

pub(crate) fn silent_success_stays_silent(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(4096, ALL)?;
    // More than the send queue is deep: places of silent requests are given back.
    for round in 0..50_u64 {
        let bytes = round.to_le_bytes();
        let mut requests = Vec::new();
        for place in 0..9 {
            let remote = target.remote_address(place * 8);
            requests.push(WorkRequest::unsignalled(place, inline_write(&bytes, remote)));
        }
        requests.push(WorkRequest::new(1000 + round, visible(target.remote_address(0), 80)));
        pair.a.qp.post_send(&requests)?;
        context.success(&pair.a.queue, 1000 + round, &[])?;
        for place in 0..9 {
            ensure_eq!(bytes_at(&target, place * 8, 8), bytes, "silent write {place}");
        }
    }
    ensure_eq!(pair.a.queue.len(), 0, "completions beyond the signalled ones");
    Ok(())
}

pub(crate) fn silent_failure_is_not_silent(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let bad = WorkRequest::unsignalled(7, inline_write(b"xx", target.remote_address(63)));
    let after = WorkRequest::unsignalled(8, inline_write(b"x", target.remote_address(0)));
    pair.a.qp.post_send(&[bad, after])?;
    let done = context.completions(&pair.a.queue, 2, &[&pair.b.queue])?;
    ensure_eq!((done[0].wr_id, done[0].status), (7, Status::RemoteAccessError), "the failure");
    ensure_eq!((done[1].wr_id, done[1].status), (8, Status::Flushed), "the one after it");
    ensure_eq!(contents(&target), vec![0; 64], "memory after the failure");
    Ok(())
}

/// A thread of the target that looks at a word of a write sees it as it was or as it will be,
/// wherever in the gather list, or in what carries the bytes, it is divided.
pub(crate) fn words_are_placed_whole_wherever_their_bytes_come_from(
    context: &Context<'_>,
) -> ItemResult {
    context.require_threads()?;
    Context::require(context.harness.capabilities().divided_words_placed_whole)?;
    if crate::far::is_there() {
        return Err(crate::harness::Stop::skipped("the target's memory is in another host"));
    }
    let mut pair = context.pair()?;
    let target = pair.far.region(4096, ALL)?;
    let most = pair.near.device.attributes().max_scatter_gather_entries;
    if most < 2 {
        return Err(crate::harness::Stop::skipped("a gather list has one entry here"));
    }
    let zeros = pair.near.region_of(&[0; 64], ALL)?;
    let ones = pair.near.region_of(&[0xFF; 64], ALL)?;
    let over = AtomicBool::new(false);
    let memory = Arc::clone(target.memory());
    std::thread::scope(|scope| {
        // The word at 64 is the first of a long write, at 72 it is in its middle, at 80 the last.
        let watcher = scope.spawn(|| {
            let mut torn = None;
            while !over.load(Ordering::Relaxed) && torn.is_none() {
                for place in [64, 72, 80] {
                    crate::far::refresh(memory.as_ref(), place, 8);
                    let word = load_u64(memory.as_ref(), place);
                    if word != 0 && word != u64::MAX {
                        torn = Some((place, word));
                    }
                }
            }
            torn
        });
        let mut run = || -> ItemResult {
            let rounds = if Context::deep() { 2_000 } else { 40 };
            for round in 0..rounds {
                let source = if round % 2 == 0_u32 { &ones } else { &zeros };
                for (offset, length) in [(64, 8), (64, 16), (61, 27), (64, 24)] {
                    for split in 1..length {
                        let entries = [part(source, 0, split), part(source, 3, length - split)];
                        let local = LocalData::Gather(&entries);
                        let write =
                            Operation::Write { local, remote: target.remote_address(offset) };
                        context.perform(&mut pair.a, write, &[&pair.b.queue])?;
                    }
                }
                if watcher.is_finished() {
                    break;
                }
            }
            Ok(())
        };
        let ran = run();
        over.store(true, Ordering::Relaxed);
        let torn = watcher.join().map_err(|_| crate::harness::Stop::failed("the watcher panicked"))?;
        ran?;
        ensure!(torn.is_none(), "a word was seen half written (place, value): {torn:x?}");
        Ok(())
    })
}
