//! Many queue pairs, many threads, much data.

use std::sync::mpsc;
use std::time::Duration;

use beeline_env::Randomness;
use beeline_fabric::{
    ConnectInfo, LocalData, Operation, QueuePairOptions, QueuePairState, RemoteAddress, Role,
    Status, WorkRequest,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::context::{
    ALL, BOUND, Context, EndpointOptions, Node, bytes_at, part, pattern, store, visible, whole,
};
use crate::harness::{ItemResult, Stop, ensure, ensure_eq};

/// Providers may need a few descriptors per queue pair: takes all the process may have.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Refused only where the machine forbids it; the item then shows what is missing.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

pub(crate) fn many_queue_pairs_work_side_by_side(context: &Context<'_>) -> ItemResult {
    raise_descriptor_limit();
    let count = if Context::deep() { 2_000_u64 } else { 200 };
    let count = count.min(context.harness.capabilities().most_connections);
    let (near, far) = (context.node()?, context.node()?);
    let (near_queue, far_queue) = (near.queue(8192)?, far.queue(8192)?);
    let target = far.region(usize::try_from(count * 8).unwrap_or(0), ALL)?;
    let options = EndpointOptions {
        queue_pair: QueuePairOptions {
            send_depth: 8,
            receive_depth: 8,
            ..QueuePairOptions::default()
        },
        ..EndpointOptions::default()
    };
    let mut ends = Vec::new();
    for _ in 0..count {
        let mut a = near.endpoint_on(&near_queue, None, options)?;
        let mut b = far.endpoint_on(&far_queue, None, options)?;
        let (info_a, info_b) = (a.qp.connect_info(), b.qp.connect_info());
        b.qp.connect(&info_a, Role::Passive)?;
        a.qp.connect(&info_b, Role::Active)?;
        ends.push((a, b));
    }
    let ready = QueuePairState::ReadyToSend;
    let queues = [&*near_queue, &*far_queue];
    context.pump(&queues, 4 * BOUND, "all connections", || {
        ends.iter().all(|(a, b)| a.qp.state() == ready && b.qp.state() == ready)
    })?;
    for round in 1..=2_u64 {
        for (index, (a, b)) in (0..).zip(&mut ends) {
            b.post_empty_receive(index)?;
            let bytes = (round << 32 | index).to_le_bytes();
            let local = LocalData::Inline(&bytes);
            let remote = target.remote_address(index * 8);
            let immediate = u32::try_from(index).unwrap_or(0);
            let operation = Operation::WriteWithImmediate { local, remote, immediate };
            a.qp.post_send(&[WorkRequest::new(index, operation)])?;
        }
        let total = usize::try_from(count).unwrap_or(0);
        let arrived = context.completions(&far_queue, total, &queues)?;
        let mut seen = vec![false; total];
        for completion in arrived {
            ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
            let index = completion.immediate.unwrap_or(u32::MAX) as usize;
            let expected = ends.get(index).map(|(_, b)| b.qp.qp_num());
            ensure_eq!(Some(completion.qp_num), expected, "queue pair of immediate {index}");
            ensure!(!seen[index], "immediate {index} came twice");
            seen[index] = true;
            let value = (round << 32 | index as u64).to_le_bytes();
            ensure_eq!(bytes_at(&target, index * 8, 8), value, "bytes of queue pair {index}");
        }
        for completion in context.completions(&near_queue, total, &queues)? {
            ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
        }
    }
    // Half of them go; the others stay.
    let doomed = ends.split_off(ends.len() / 2);
    drop(doomed);
    let mut local = Vec::new();
    for (index, (a, _)) in (0..).zip(&mut ends) {
        local.push(a.post(visible(target.remote_address(index * 8), 8))?);
    }
    for completion in context.completions(&near_queue, local.len(), &queues)? {
        ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
    }
    Ok(())
}

pub(crate) fn a_large_transfer_arrives_intact_both_ways(context: &Context<'_>) -> ItemResult {
    let length = if Context::deep() { 1_usize << 30 } else { 64 << 20 };
    let mut pair = context.pair()?;
    let most = pair.near.device.attributes().max_message_bytes;
    let target = pair.far.region(length, ALL)?;
    let source = pair.near.region(length, ALL)?;
    let block = pattern(99, 1 << 20);
    let mark = |at: usize| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    for at in (0..length).step_by(block.len()) {
        store(&source, at, &block);
        store(&source, at, &mark(at));
    }
    let length_bytes = length as u64;
    let piece = length_bytes.min(most);
    let mut pieces = 0;
    for offset in (0..length_bytes).step_by(usize::try_from(piece).unwrap_or(length)) {
        let entries = [part(&source, offset, piece.min(length_bytes - offset))];
        let local = LocalData::Gather(&entries);
        let write = Operation::Write { local, remote: target.remote_address(offset) };
        let wr_id = pair.a.next_id();
        pair.a.qp.post_send(&[WorkRequest::new(wr_id, write)])?;
        pieces += 1;
    }
    for completion in context.completions(&pair.a.queue, pieces, &[&pair.b.queue])? {
        ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
    }
    let flush = visible(target.remote_address(0), length_bytes);
    context.perform(&mut pair.a, flush, &[&pair.b.queue])?;
    let check = |region: &beeline_fabric::MemoryRegion, what: &str| -> ItemResult {
        let mut expected = block.clone();
        for at in (0..length).step_by(block.len()) {
            let seen = bytes_at(region, at, block.len());
            expected[..8].copy_from_slice(&mark(at));
            ensure!(seen == expected, "{what}: the block at {at} differs");
        }
        Ok(())
    };
    check(&target, "written")?;
    for at in (0..length).step_by(block.len()) {
        store(&source, at, &[0; 4096]);
    }
    for offset in (0..length_bytes).step_by(usize::try_from(piece).unwrap_or(length)) {
        let local = part(&source, offset, piece.min(length_bytes - offset));
        let read = Operation::Read { local, remote: target.remote_address(offset) };
        let done = context.perform(&mut pair.a, read, &[&pair.b.queue])?;
        ensure_eq!(done.length, local.length, "bytes read");
    }
    check(&source, "read back")
}

pub(crate) fn a_message_of_the_longest_length_arrives(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let most = pair.near.device.attributes().max_send_bytes.min(64 << 20);
    let length = usize::try_from(most).unwrap_or(0);
    let outbox = pair.near.region_of(&pattern(5, length), ALL)?;
    let inbox = pair.far.region(length, ALL)?;
    pair.b.post_receive(1, &inbox, 0, most)?;
    let entries = [whole(&outbox)];
    let send = Operation::Send { local: LocalData::Gather(&entries), immediate: None };
    pair.a.post(send)?;
    let arrived = context.success(&pair.b.queue, 1, &[&pair.a.queue])?;
    ensure_eq!(arrived.length, most, "bytes received");
    let same = crate::context::contents(&inbox) == crate::context::contents(&outbox);
    ensure!(same, "the message arrived changed");
    Ok(())
}

pub(crate) fn many_threads_work_with_queue_pairs_of_their_own(
    context: &Context<'_>,
) -> ItemResult {
    context.require_threads()?;
    let threads = if Context::deep() { 32 } else { 8 };
    let rounds = if Context::deep() { 2_000 } else { 200 };
    let (near, far) = (context.node()?, context.node()?);
    let context = *context;
    std::thread::scope(|scope| {
        let mut working = Vec::new();
        for thread in 0..threads {
            let (to_client, from_server) = mpsc::channel::<(ConnectInfo, RemoteAddress)>();
            let (to_server, from_client) = mpsc::channel::<ConnectInfo>();
            let (near, far) = (near.clone(), far.clone());
            let server = scope.spawn(move || {
                let (tell, hear) = (to_client, from_client);
                echo(&context, &far, &tell, &hear, rounds)
            });
            working.push((format!("server {thread}"), server));
            let client = scope.spawn(move || {
                let (tell, hear) = (to_server, from_server);
                shout(&context, &near, &tell, &hear, thread, rounds)
            });
            working.push((format!("client {thread}"), client));
        }
        // All of them: which one failed first is not to be seen from the order here.
        let mut stopped = Vec::new();
        for (who, thread) in working {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(stop)) => stopped.push(format!("{who}: {stop}")),
                Err(_) => stopped.push(format!("{who} panicked")),
            }
        }
        ensure!(stopped.is_empty(), "{}", stopped.join("\n"));
        Ok(())
    })
}

/// Sixteen threads beside a device that is a program leave one of them without a processor for a
/// second and more: what is looked at here is not how long a send waits for its receive.
fn patient() -> EndpointOptions {
    let mut options = EndpointOptions::default();
    options.queue_pair.receiver_not_ready_timeout = BOUND;
    options
}

/// The serving half of a thread pair: receives messages and answers nothing.
fn echo(
    context: &Context<'_>,
    node: &Node,
    tell: &mpsc::Sender<(ConnectInfo, RemoteAddress)>,
    hear: &mpsc::Receiver<ConnectInfo>,
    rounds: u64,
) -> ItemResult {
    let mut end = node.endpoint(patient())?;
    let region = node.region(64 << 10, ALL)?;
    let inbox = node.region(64, ALL)?;
    end.post_receive(0, &inbox, 0, 8)?;
    let _ = tell.send((end.qp.connect_info(), region.remote_address(0)));
    let info = hear.recv().map_err(|_| Stop::failed("the other thread gave up"))?;
    end.qp.connect(&info, Role::Passive)?;
    end.qp.wait_connected(BOUND)?;
    // Between two looks at the queue, and from a look to the receive posted after it.
    let (mut unseen, mut unposted) = (Duration::ZERO, Duration::ZERO);
    for round in 0..rounds {
        let begun = context.harness.now();
        let mut looked = begun;
        let mut turn = || -> ItemResult {
            while end.queue.len() == 0 && looked - begun < BOUND {
                if end.queue.drain()? == 0 {
                    context.harness.idle();
                }
                let now = context.harness.now();
                unseen = unseen.max(now - looked);
                looked = now;
            }
            let arrived = context.success(&end.queue, round, &[])?;
            ensure_eq!(arrived.length, 8, "bytes of message {round}");
            ensure_eq!(bytes_at(&inbox, 0, 8), round.to_le_bytes(), "message {round}");
            // None behind the last message: its sender may have left by now.
            if round + 1 < rounds {
                end.post_receive(round + 1, &inbox, 0, 8)?;
            }
            unposted = unposted.max(context.harness.now() - looked);
            Ok(())
        };
        turn().map_err(|stop| {
            let now = context.harness.now();
            Stop::failed(format!(
                "at {now:?}, round {round} begun at {begun:?}, last looked at {looked:?}: {stop}; at \
                 most {unseen:?} between looks, {unposted:?} from a look to a receive"
            ))
        })?;
    }
    // The other side leaves first.
    let _ = hear.recv();
    Ok(())
}

/// The working half: writes, reads back, compares, and sends a message each round.
fn shout(
    context: &Context<'_>,
    node: &Node,
    tell: &mpsc::Sender<ConnectInfo>,
    hear: &mpsc::Receiver<(ConnectInfo, RemoteAddress)>,
    thread: u64,
    rounds: u64,
) -> ItemResult {
    let mut random = Randomness::new(thread);
    let mut end = node.endpoint(patient())?;
    let source = node.region(64 << 10, ALL)?;
    let back = node.region(64 << 10, ALL)?;
    let _ = tell.send(end.qp.connect_info());
    let (info, remote) = hear.recv().map_err(|_| Stop::failed("the other thread gave up"))?;
    end.qp.connect(&info, Role::Active)?;
    end.qp.wait_connected(BOUND)?;
    for round in 0..rounds {
        let length = random.between(1, 64 << 10);
        let count = usize::try_from(length).unwrap_or(1);
        store(&source, 0, &pattern(thread << 32 | round, count));
        let entries = [part(&source, 0, length)];
        let write = Operation::Write { local: LocalData::Gather(&entries), remote };
        let read = Operation::Read { local: part(&back, 0, length), remote };
        let number = round.to_le_bytes();
        let send = Operation::Send { local: LocalData::Inline(&number), immediate: None };
        let begun = context.harness.now();
        let mut turn = || -> ItemResult {
            end.qp.post_send(&[
                WorkRequest::unsignalled(1, write),
                WorkRequest::new(2, read),
                WorkRequest::new(3, send),
            ])?;
            context.success(&end.queue, 2, &[])?;
            context.success(&end.queue, 3, &[])?;
            Ok(())
        };
        turn().map_err(|stop| {
            let now = context.harness.now();
            Stop::failed(format!("at {now:?}, round {round}, begun at {begun:?}: {stop}"))
        })?;
        let same = bytes_at(&source, 0, count) == bytes_at(&back, 0, count);
        ensure!(same, "thread {thread}, round {round}: read back something else");
    }
    Ok(())
}
