//! Order on one queue pair.

use beeline_env::Randomness;
use beeline_fabric::{LocalData, Opcode, Operation, Status, WorkRequest};

use crate::context::{
    ALL, Context, bytes_at, contents, inline_write, part, pattern, store, visible, whole,
};
use crate::harness::{ItemResult, ensure_eq};

pub(crate) fn a_write_is_placed_before_its_completion(context: &Context<'_>) -> ItemResult {
    Context::require(context.harness.capabilities().placed_before_completion)?;
    let mut pair = context.pair()?;
    let length = 100_000;
    let target = pair.far.region(length, ALL)?;
    let source = pair.near.region(length, ALL)?;
    for round in 0..50 {
        let bytes = pattern(round, length);
        store(&source, 0, &bytes);
        let entries = [whole(&source)];
        let local = LocalData::Gather(&entries);
        let remote = target.remote_address(0);
        context.perform(&mut pair.a, Operation::Write { local, remote }, &[])?;
        ensure_eq!(contents(&target) == bytes, true, "round {round} was placed at completion");
    }
    Ok(())
}

pub(crate) fn a_write_is_placed_before_the_immediate_after_it(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let length = 64 << 10;
    let target = pair.far.region(length, ALL)?;
    let source = pair.near.region(length, ALL)?;
    let mut random = Randomness::new(5);
    for round in 0..200_u32 {
        let size = random.between(1, length as u64);
        let bytes = pattern(u64::from(round) + 1, usize::try_from(size).unwrap_or(1));
        store(&source, 0, &bytes);
        pair.b.post_empty_receive(u64::from(round))?;
        let entries = [part(&source, 0, size)];
        let local = LocalData::Gather(&entries);
        let remote = target.remote_address(0);
        let write = Operation::Write { local, remote };
        let notice = Operation::WriteWithImmediate {
            local: LocalData::Inline(&[]),
            remote,
            immediate: round,
        };
        if random.chance(1, 2) {
            pair.a.qp.post_send(&[WorkRequest::unsignalled(0, write), WorkRequest::new(1, notice)])?;
        } else {
            let both = Operation::WriteWithImmediate { local, remote, immediate: round };
            pair.a.qp.post_send(&[WorkRequest::new(1, both)])?;
        }
        let arrived = context.success(&pair.b.queue, u64::from(round), &[&pair.a.queue])?;
        ensure_eq!(arrived.immediate, Some(round), "immediate");
        let placed = bytes_at(&target, 0, bytes.len()) == bytes;
        ensure_eq!(placed, true, "round {round}: {size} bytes were in place at the immediate");
        context.success(&pair.a.queue, 1, &[])?;
    }
    Ok(())
}

pub(crate) fn interleaved_operations_complete_in_post_order(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64 << 10, ALL)?;
    let local = pair.near.region(64 << 10, ALL)?;
    let mut random = Randomness::new(17);
    let mut wr_id = 0;
    for _ in 0..20 {
        let mut expected = Vec::new();
        let mut receives = 0;
        for _ in 0..30 {
            let length = [0, 1, 8, 300, 40_000][usize::try_from(random.below(5)).unwrap_or(0)];
            let remote = target.remote_address(0);
            let entries = [part(&local, 0, length)];
            let word = part(&local, 0, 8);
            let gathered = LocalData::Gather(&entries);
            let (operation, opcode) = match random.below(7) {
                0 => (Operation::Write { local: gathered, remote }, Opcode::Write),
                1 => (
                    Operation::WriteWithImmediate { local: gathered, remote, immediate: 1 },
                    Opcode::WriteWithImmediate,
                ),
                2 => (Operation::Read { local: part(&local, 0, length), remote }, Opcode::Read),
                3 => (Operation::Send { local: LocalData::Inline(b""), immediate: None }, Opcode::Send),
                4 => (
                    Operation::CompareAndSwap { local: word, remote, expected: 0, desired: 1 },
                    Opcode::CompareAndSwap,
                ),
                5 => (Operation::FetchAndAdd { local: word, remote, addend: 1 }, Opcode::FetchAndAdd),
                _ => (visible(remote, length), Opcode::Flush),
            };
            if matches!(opcode, Opcode::WriteWithImmediate | Opcode::Send) {
                pair.b.post_empty_receive(u64::from(opcode == Opcode::Send))?;
                receives += 1;
            }
            wr_id += 1;
            pair.a.qp.post_send(&[WorkRequest::new(wr_id, operation)])?;
            expected.push((wr_id, opcode));
        }
        let done = context.completions(&pair.a.queue, expected.len(), &[&pair.b.queue])?;
        for (completion, (wr_id, opcode)) in done.iter().zip(expected) {
            ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
            ensure_eq!(completion.wr_id, wr_id, "completions come in post order");
            ensure_eq!(completion.opcode, opcode, "opcode of {completion:?}");
            ensure_eq!(completion.qp_num, pair.a.qp.qp_num(), "queue pair of {completion:?}");
        }
        context.completions(&pair.b.queue, receives, &[&pair.a.queue])?;
    }
    Ok(())
}

pub(crate) fn a_read_sees_the_writes_before_it(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(4096, ALL)?;
    let local = pair.near.region(4096, ALL)?;
    for round in 1..=100_u64 {
        let bytes = round.to_le_bytes();
        let remote = target.remote_address(8 * (round % 512));
        let write = WorkRequest::unsignalled(0, inline_write(&bytes, remote));
        let read = Operation::Read { local: part(&local, 0, 8), remote };
        pair.a.qp.post_send(&[write, WorkRequest::new(round, read)])?;
        let done = context.success(&pair.a.queue, round, &[])?;
        ensure_eq!(done.length, 8, "bytes read");
        ensure_eq!(bytes_at(&local, 0, 8), bytes, "the read after the write");
    }
    Ok(())
}

pub(crate) fn messages_arrive_in_the_order_sent(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let inbox = pair.far.region(64 * 8, ALL)?;
    let mut sent = 0_u64;
    for _ in 0..30 {
        for slot in 0..64 {
            pair.b.post_receive(slot, &inbox, slot * 8, 8)?;
        }
        for _ in 0..64 {
            let bytes = sent.to_le_bytes();
            let local = LocalData::Inline(&bytes);
            let send = Operation::Send { local, immediate: None };
            pair.a.qp.post_send(&[WorkRequest::unsignalled(sent, send)])?;
            sent += 1;
        }
        let arrived = context.completions(&pair.b.queue, 64, &[&pair.a.queue])?;
        for (slot, completion) in arrived.iter().enumerate() {
            ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
            ensure_eq!(completion.wr_id, slot as u64, "receives are used in post order");
            let value = bytes_at(&inbox, slot * 8, 8);
            ensure_eq!(value, (sent - 64 + slot as u64).to_le_bytes(), "message {slot}");
        }
        // A signalled request frees the send-queue places of the silent ones before it.
        context.perform(&mut pair.a, visible(inbox.remote_address(0), 8), &[&pair.b.queue])?;
    }
    Ok(())
}

pub(crate) fn a_list_is_posted_whole_and_in_order(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let bytes: Vec<[u8; 1]> = (1..=64).map(|byte| [byte]).collect();
    let requests: Vec<_> = bytes
        .iter()
        .zip(0..)
        .map(|(byte, place)| {
            WorkRequest::new(place, inline_write(byte, target.remote_address(place)))
        })
        .collect();
    pair.a.qp.post_send(&requests)?;
    let done = context.completions(&pair.a.queue, 64, &[])?;
    for (completion, wr_id) in done.iter().zip(0..) {
        ensure_eq!((completion.wr_id, completion.status), (wr_id, Status::Success), "completion");
    }
    context.perform(&mut pair.a, visible(target.remote_address(0), 64), &[])?;
    ensure_eq!(contents(&target), (1..=64).collect::<Vec<u8>>(), "bytes of the list");
    Ok(())
}

pub(crate) fn posts_that_are_held_arrive_in_order_once_released(
    context: &Context<'_>,
) -> ItemResult {
    const MOST: u64 = 20;
    let mut pair = context.pair()?;
    let target = pair.far.region(64 << 10, ALL)?;
    let source = pair.near.region(64 << 10, ALL)?;
    let mut random = Randomness::new(23);
    for round in 0..100_u64 {
        let count = random.between(1, MOST);
        for number in 0..count {
            pair.b.post_empty_receive(number)?;
        }
        let bytes = pattern(round + 1, 2048);
        store(&source, 0, &bytes);
        let held = pair.a.qp.hold();
        // Within it, another.
        let within = random.chance(1, 2).then(|| pair.a.qp.hold());
        let mut lengths = Vec::new();
        for number in 0..count {
            // Short and long ones: a provider may treat them differently.
            let length = [0, 8, 300, 2048][usize::try_from(random.below(4)).unwrap_or(0)];
            let entries = [part(&source, 0, length)];
            let operation = Operation::WriteWithImmediate {
                local: LocalData::Gather(&entries),
                remote: target.remote_address(number * 2048),
                immediate: u32::try_from(number).unwrap_or(0),
            };
            pair.a.qp.post_send(&[WorkRequest::unsignalled(number, operation)])?;
            lengths.push(length);
        }
        if random.chance(1, 4) {
            // Nothing that is not a message waits for the release.
            let local = part(&source, 4096, 8);
            let read = Operation::Read { local, remote: target.remote_address(0) };
            context.perform(&mut pair.a, read, &[&pair.b.queue])?;
        }
        drop(within);
        drop(held);
        for (number, length) in (0..count).zip(&lengths) {
            let arrived = context.success(&pair.b.queue, number, &[&pair.a.queue])?;
            ensure_eq!(arrived.immediate.map(u64::from), Some(number), "immediate");
            ensure_eq!(arrived.length, *length, "length");
            let length = usize::try_from(*length).unwrap_or(0);
            let at = usize::try_from(number * 2048).unwrap_or(0);
            let placed = bytes_at(&target, at, length) == bytes[..length];
            ensure_eq!(placed, true, "round {round}: write {number} was in place");
        }
        // A signalled request frees the send-queue places of the silent ones before it.
        context.perform(&mut pair.a, visible(target.remote_address(0), 8), &[&pair.b.queue])?;
    }
    Ok(())
}
