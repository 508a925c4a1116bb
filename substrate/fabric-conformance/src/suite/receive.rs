//! Receives: waiting for them, sharing them, their length.

use std::time::Duration;

use beeline_fabric::{
    LocalData, Operation, PostError, QueuePairState, ReceiveRequest, Status, WorkRequest,
};

use crate::context::{
    ALL, BOUND, Context, EndpointOptions, bytes_at, contents, inline_write, part, visible,
};
use crate::harness::{ItemResult, ensure, ensure_eq};

fn impatient(milliseconds: u64) -> EndpointOptions {
    let mut options = EndpointOptions::default();
    options.queue_pair.receiver_not_ready_timeout = Duration::from_millis(milliseconds);
    options
}

pub(crate) fn a_send_without_a_receive_fails_within_the_bound(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair_with(impatient(100))?;
    let start = context.harness.now();
    let send = Operation::Send { local: LocalData::Inline(b"nobody"), immediate: None };
    let done = context.execute(&mut pair.a, send, &[&pair.b.queue])?;
    let took = context.harness.now().saturating_sub(start);
    ensure_eq!(done.status, Status::ReceiverNotReady, "status");
    ensure!(took >= Duration::from_millis(90), "gave up after {took:?} instead of 100 ms");
    ensure!(took < BOUND, "gave up after {took:?} instead of 100 ms");
    ensure_eq!(pair.a.qp.state(), QueuePairState::Error, "state after giving up");
    Ok(())
}

pub(crate) fn an_immediate_without_a_receive_fails_within_the_bound(
    context: &Context<'_>,
) -> ItemResult {
    let mut pair = context.pair_with(impatient(100))?;
    let target = pair.far.region(64, ALL)?;
    let remote = target.remote_address(0);
    let local = LocalData::Inline(b"");
    let first = pair.a.post(inline_write(b"plain", remote))?;
    let second = pair.a.post(Operation::WriteWithImmediate { local, remote, immediate: 1 })?;
    let third = pair.a.post(inline_write(b"never", target.remote_address(8)))?;
    let done = context.completions(&pair.a.queue, 3, &[&pair.b.queue])?;
    let ended: Vec<_> = done.iter().map(|done| (done.wr_id, done.status)).collect();
    let expected = vec![
        (first, Status::Success),
        (second, Status::ReceiverNotReady),
        (third, Status::Flushed),
    ];
    ensure_eq!(ended, expected, "how the requests ended");
    Ok(())
}

pub(crate) fn a_receive_posted_in_time_lets_the_waiting_send_through(
    context: &Context<'_>,
) -> ItemResult {
    let mut pair = context.pair_with(impatient(20_000))?;
    let inbox = pair.far.region(64, ALL)?;
    for round in 0..5_u64 {
        let bytes = [b'a' + u8::try_from(round).unwrap_or(0); 8];
        let local = LocalData::Inline(&bytes);
        let sent = pair.a.post(Operation::Send { local, immediate: None })?;
        let after = pair.a.post(inline_write(&bytes, inbox.remote_address(32)))?;
        context.let_pass(&[&pair.a.queue, &pair.b.queue], Duration::from_millis(5))?;
        ensure_eq!(pair.a.queue.len(), 0, "completions before a receive was posted");
        ensure!(bytes_at(&inbox, 32, 8) != bytes, "a write overtook the waiting send");
        pair.b.post_receive(round, &inbox, 0, 8)?;
        context.success(&pair.b.queue, round, &[&pair.a.queue])?;
        ensure_eq!(bytes_at(&inbox, 0, 8), bytes, "the message that waited");
        context.success(&pair.a.queue, sent, &[&pair.b.queue])?;
        context.success(&pair.a.queue, after, &[&pair.b.queue])?;
    }
    Ok(())
}

pub(crate) fn receives_posted_before_connecting_count(context: &Context<'_>) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = EndpointOptions::default();
    let (mut a, mut b) = (near.endpoint(options)?, far.endpoint(options)?);
    let inbox = far.region(8, ALL)?;
    b.post_receive(40, &inbox, 0, 8)?;
    context.connect(&mut a, &mut b)?;
    let send = Operation::Send { local: LocalData::Inline(b"early"), immediate: None };
    a.post(send)?;
    context.success(&b.queue, 40, &[&a.queue])?;
    ensure_eq!(bytes_at(&inbox, 0, 5), b"early", "message");
    Ok(())
}

pub(crate) fn a_message_longer_than_its_receive_fails_at_both_ends(
    context: &Context<'_>,
) -> ItemResult {
    for (room, length) in [(8_u64, 9_usize), (1, 64), (0, 1)] {
        let mut pair = context.pair()?;
        let inbox = pair.far.region(128, ALL)?;
        pair.b.post_receive(50, &inbox, 64, room)?;
        pair.b.post_receive(51, &inbox, 0, 64)?;
        let bytes = vec![7; length];
        let local = LocalData::Inline(&bytes);
        let sent = pair.a.post(Operation::Send { local, immediate: None })?;
        let done = context.completion(&pair.a.queue, &[&pair.b.queue])?;
        ensure_eq!((done.wr_id, done.status), (sent, Status::LengthError), "at the sender");
        let ended = context.completions(&pair.b.queue, 2, &[&pair.a.queue])?;
        ensure_eq!((ended[0].wr_id, ended[0].status), (50, Status::LengthError), "receiver");
        ensure_eq!((ended[1].wr_id, ended[1].status), (51, Status::Flushed), "the next receive");
        context.both_broken(&pair.a, &pair.b)?;
        let end = 64 + usize::try_from(room).unwrap_or(0);
        let beyond = bytes_at(&inbox, end, 128 - end);
        ensure!(beyond.iter().all(|&byte| byte == 0), "bytes beyond the receive were written");
    }
    Ok(())
}

pub(crate) fn a_receive_without_a_buffer_takes_no_bytes(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    pair.b.post_empty_receive(60)?;
    let send = Operation::Send { local: LocalData::Inline(b"x"), immediate: None };
    let done = context.execute(&mut pair.a, send, &[&pair.b.queue])?;
    ensure_eq!(done.status, Status::LengthError, "status at the sender");
    Ok(())
}

pub(crate) fn a_full_receive_queue_refuses_and_posts_nothing(context: &Context<'_>) -> ItemResult {
    let mut options = EndpointOptions::default();
    options.queue_pair.receive_depth = 8;
    let (near, far) = (context.node()?, context.node()?);
    let (mut a, mut b) = context.connected(&near, &far, options)?;
    let mut room = 0_u64;
    let receive = |wr_id| ReceiveRequest { wr_id, buffer: None };
    while b.qp.post_receive(&[receive(room)]).is_ok() {
        room += 1;
        ensure!(room <= 1 << 16, "a receive queue of 8 takes 65536 receives");
    }
    ensure!(room >= 8, "a receive queue of 8 took {room} receives");
    let refused = b.qp.post_receive(&[receive(900), receive(901)]);
    ensure_eq!(refused, Err(PostError::QueueFull), "a post to a full receive queue");
    let target = far.region(8, ALL)?;
    let remote = target.remote_address(0);
    let local = LocalData::Inline(b"");
    for round in 0..2 * room {
        let notice = Operation::WriteWithImmediate { local, remote, immediate: 0 };
        context.perform(&mut a, notice, &[&b.queue])?;
        let arrived = context.completion(&b.queue, &[&a.queue])?;
        ensure_eq!((arrived.wr_id, arrived.status), (round, Status::Success), "receive");
        b.qp.post_receive(&[receive(room + round)])?;
    }
    Ok(())
}

pub(crate) fn a_shared_receive_queue_serves_all_its_queue_pairs(
    context: &Context<'_>,
) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = EndpointOptions::default();
    let shared = far.domain.create_shared_receive_queue(64)?;
    let queue = far.queue(1024)?;
    let inbox = far.region(64 * 8, ALL)?;
    let mut senders = Vec::new();
    let mut targets = Vec::new();
    for _ in 0..6 {
        let mut a = near.endpoint(options)?;
        let mut b = far.endpoint_on(&queue, Some(&shared), options)?;
        context.connect(&mut a, &mut b)?;
        senders.push(a);
        targets.push(b);
    }
    let refused = targets[0].qp.post_receive(&[ReceiveRequest { wr_id: 0, buffer: None }]);
    let expected = matches!(refused, Err(PostError::TooLarge { limit: 0, .. }));
    ensure!(expected, "a receive posted beside the shared queue gave {refused:?}");
    for round in 0..20_u64 {
        for slot in 0..6 {
            let buffer = Some(part(&inbox, slot * 8, 8));
            shared.post_receive(&[ReceiveRequest { wr_id: round * 6 + slot, buffer }])?;
        }
        ensure_eq!(shared.posted(), 6, "receives posted");
        for (index, sender) in senders.iter_mut().enumerate() {
            let value = (round << 8 | index as u64).to_le_bytes();
            let send = Operation::Send { local: LocalData::Inline(&value), immediate: None };
            sender.post(send)?;
        }
        let pumped: Vec<&crate::context::Queue> =
            senders.iter().map(|sender| &*sender.queue).collect();
        let arrived = context.completions(&queue, 6, &pumped)?;
        let mut heard = Vec::new();
        for completion in arrived {
            ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
            let slot = usize::try_from(completion.wr_id - round * 6).unwrap_or(0);
            let value = bytes_at(&inbox, slot * 8, 8);
            let from = targets.iter().position(|qp| qp.qp.qp_num() == completion.qp_num);
            let from = from.unwrap_or(usize::MAX);
            ensure_eq!(value, (round << 8 | from as u64).to_le_bytes(), "message of {from}");
            heard.push(from);
        }
        heard.sort_unstable();
        ensure_eq!(heard, vec![0, 1, 2, 3, 4, 5], "senders heard in round {round}");
        ensure_eq!(shared.posted(), 0, "receives left");
        for sender in &senders {
            context.completion(&sender.queue, &[&queue])?;
        }
    }
    Ok(())
}

pub(crate) fn a_broken_queue_pair_leaves_the_shared_receives_to_the_others(
    context: &Context<'_>,
) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = EndpointOptions::default();
    let shared = far.domain.create_shared_receive_queue(16)?;
    let queue = far.queue(64)?;
    let (mut a1, mut a2) = (near.endpoint(options)?, near.endpoint(options)?);
    let mut b1 = far.endpoint_on(&queue, Some(&shared), options)?;
    let mut b2 = far.endpoint_on(&queue, Some(&shared), options)?;
    context.connect(&mut a1, &mut b1)?;
    context.connect(&mut a2, &mut b2)?;
    for wr_id in 0..4 {
        shared.post_receive(&[ReceiveRequest { wr_id, buffer: None }])?;
    }
    let target = far.region(8, ALL)?;
    let bad = inline_write(b"x", target.remote_address(8));
    let done = context.execute(&mut a1, bad, &[&queue])?;
    ensure_eq!(done.status, Status::RemoteAccessError, "status of the bad write");
    context.both_broken(&a1, &b1)?;
    ensure_eq!(shared.posted(), 4, "shared receives after one queue pair broke");
    for _ in 0..4 {
        let local = LocalData::Inline(b"ok");
        let remote = target.remote_address(0);
        let notice = Operation::WriteWithImmediate { local, remote, immediate: 3 };
        context.perform(&mut a2, notice, &[&queue])?;
        let arrived = context.completion(&queue, &[&a2.queue])?;
        ensure_eq!(arrived.qp_num, b2.qp.qp_num(), "queue pair that took the receive");
    }
    ensure_eq!(shared.posted(), 0, "shared receives left");
    Ok(())
}

/// Messages that had taken a receive, or were about to, when their queue pair was dropped.
pub(crate) fn a_dropped_queue_pair_leaves_the_shared_receives_to_the_others(
    context: &Context<'_>,
) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = EndpointOptions::default();
    let shared = far.domain.create_shared_receive_queue(16)?;
    let queue = far.queue(64)?;
    let (mut a1, mut a2) = (near.endpoint(options)?, near.endpoint(options)?);
    let mut b1 = far.endpoint_on(&queue, Some(&shared), options)?;
    let mut b2 = far.endpoint_on(&queue, Some(&shared), options)?;
    context.connect(&mut a1, &mut b1)?;
    context.connect(&mut a2, &mut b2)?;
    let length = far.device.attributes().max_send_bytes.min(64 << 10);
    let inbox = far.region(4 * length as usize, ALL)?;
    for wr_id in 0..4 {
        let buffer = Some(part(&inbox, wr_id * length, length));
        shared.post_receive(&[ReceiveRequest { wr_id, buffer }])?;
    }
    // Long ones, of which a part may be there when the queue pair goes.
    let source = near.region(length as usize, ALL)?;
    let entries = [part(&source, 0, length)];
    for _ in 0..2 {
        let local = LocalData::Gather(&entries);
        a1.post(Operation::Send { local, immediate: None })?;
    }
    context.let_pass(&[&a1.queue], Duration::from_micros(300))?;
    drop(b1);
    drop(a1);
    context.let_pass(&[&a2.queue], Duration::from_millis(20))?;
    // Each receive is either reported or there for the next message.
    let mut seen = Vec::new();
    queue.drain()?;
    seen.extend(queue.take_all().iter().map(|completion| completion.wr_id));
    while seen.len() < 4 {
        let local = LocalData::Inline(b"next");
        context.perform(&mut a2, Operation::Send { local, immediate: None }, &[&queue])?;
        seen.push(context.completion(&queue, &[&a2.queue])?.wr_id);
    }
    seen.sort_unstable();
    ensure_eq!(seen, vec![0, 1, 2, 3], "receives that came back");
    ensure_eq!(shared.posted(), 0, "shared receives left");
    Ok(())
}

pub(crate) fn a_receive_posted_after_an_error_is_refused(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    drop(pair.a);
    let error = QueuePairState::Error;
    context.pump(&[&pair.b.queue], BOUND, "the disconnection to be noticed", || {
        pair.b.qp.state() == error
    })?;
    let refused = pair.b.qp.post_receive(&[ReceiveRequest { wr_id: 1, buffer: None }]);
    ensure_eq!(refused, Err(PostError::NotReady(error)), "a receive posted after an error");
    context.let_pass(&[&pair.b.queue], Duration::from_millis(5))?;
    ensure_eq!(pair.b.queue.len(), 0, "completions of what was refused");
    Ok(())
}

pub(crate) fn a_waiting_send_takes_a_shared_receive_posted_in_time(
    context: &Context<'_>,
) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = impatient(20_000);
    let shared = far.domain.create_shared_receive_queue(16)?;
    let queue = far.queue(64)?;
    let mut a = near.endpoint(options)?;
    let mut b = far.endpoint_on(&queue, Some(&shared), options)?;
    context.connect(&mut a, &mut b)?;
    let inbox = far.region(8, ALL)?;
    a.post(Operation::Send { local: LocalData::Inline(b"patience"), immediate: Some(8) })?;
    context.let_pass(&[&a.queue, &queue], Duration::from_millis(5))?;
    ensure_eq!((a.queue.len(), queue.len()), (0, 0), "completions before the receive");
    shared.post_receive(&[ReceiveRequest { wr_id: 9, buffer: Some(part(&inbox, 0, 8)) }])?;
    let arrived = context.success(&queue, 9, &[&a.queue])?;
    ensure_eq!(arrived.immediate, Some(8), "immediate");
    ensure_eq!(contents(&inbox), b"patience", "message");
    Ok(())
}

pub(crate) fn an_error_flushes_posted_receives_in_order(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    for wr_id in 70..80 {
        pair.b.post_empty_receive(wr_id)?;
    }
    let target = pair.far.region(8, ALL)?;
    let bad = WorkRequest::new(1, visible(target.remote_address(0), 9));
    pair.a.qp.post_send(&[bad])?;
    let flushed = context.completions(&pair.b.queue, 10, &[&pair.a.queue])?;
    for (completion, wr_id) in flushed.iter().zip(70..) {
        let seen = (completion.wr_id, completion.status);
        ensure_eq!(seen, (wr_id, Status::Flushed), "flushed receive");
    }
    let refused = pair.b.qp.post_receive(&[ReceiveRequest { wr_id: 1, buffer: None }]);
    if refused.is_ok() {
        // Allowed, as in verbs, if it is flushed like the others.
        let late = context.completion(&pair.b.queue, &[&pair.a.queue])?;
        ensure_eq!((late.wr_id, late.status), (1, Status::Flushed), "a receive posted late");
    }
    Ok(())
}
