//! Connecting, breaking, reconnecting.

use std::time::Duration;

use beeline_fabric::{
    ConnectInfo, FabricError, PostError, QueuePairState, RemoteAddress, RemoteKey, Role, Status,
};

use crate::context::{ALL, BOUND, Context, EndpointOptions, contents, inline_write};
use crate::harness::{ItemResult, Stop, ensure, ensure_eq};

pub(crate) fn a_pair_connects_and_both_ends_are_ready(context: &Context<'_>) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = EndpointOptions::default();
    let (mut a, mut b) = (near.endpoint(options)?, far.endpoint(options)?);
    ensure_eq!(a.qp.state(), QueuePairState::Init, "state before connecting");
    ensure!(a.qp.connect_info().0.len() <= ConnectInfo::MAX_BYTES, "connection data is bounded");
    context.connect(&mut a, &mut b)?;
    let target = far.region(64, ALL)?;
    context.perform(&mut a, inline_write(b"there", target.remote_address(0)), &[])?;
    context.perform(&mut a, crate::context::visible(target.remote_address(0), 5), &[])?;
    ensure_eq!(&contents(&target)[..5], b"there", "bytes written over the new connection");
    let back = near.region(64, ALL)?;
    context.perform(&mut b, inline_write(b"back", back.remote_address(0)), &[])?;
    context.perform(&mut b, crate::context::visible(back.remote_address(0), 4), &[])?;
    ensure_eq!(&contents(&back)[..4], b"back", "bytes written by the passive end");
    Ok(())
}

pub(crate) fn queue_pair_numbers_are_unique(context: &Context<'_>) -> ItemResult {
    let node = context.node()?;
    let mut numbers = std::collections::HashSet::new();
    for _ in 0..50 {
        let endpoint = node.endpoint(EndpointOptions::default())?;
        let number = endpoint.qp.qp_num();
        ensure!(numbers.insert(number), "queue pair number {number} was given twice");
    }
    Ok(())
}

pub(crate) fn posting_before_connecting_is_refused(context: &Context<'_>) -> ItemResult {
    let mut endpoint = context.node()?.endpoint(EndpointOptions::default())?;
    let nowhere = RemoteAddress { key: RemoteKey(1), offset: 0 };
    let request = beeline_fabric::WorkRequest::new(1, inline_write(b"x", nowhere));
    let refused = endpoint.qp.post_send(&[request]);
    ensure_eq!(refused, Err(PostError::NotReady(QueuePairState::Init)), "post before connecting");
    endpoint.post_empty_receive(7)?;
    ensure_eq!(endpoint.queue.drain()?, 0, "completions of an unconnected queue pair");
    Ok(())
}

pub(crate) fn connecting_twice_is_refused(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let info = pair.b.qp.connect_info();
    let again = pair.a.qp.connect(&info, Role::Active);
    ensure!(matches!(again, Err(FabricError::WrongState { .. })), "second connect gave {again:?}");
    let target = pair.far.region(8, ALL)?;
    context.perform(&mut pair.a, inline_write(b"x", target.remote_address(0)), &[])?;
    Ok(())
}

pub(crate) fn waiting_for_nobody_times_out(context: &Context<'_>) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = EndpointOptions::default();
    let (mut a, b) = (near.endpoint(options)?, far.endpoint(options)?);
    a.qp.connect(&b.qp.connect_info(), Role::Active)?;
    let start = context.harness.now();
    let waited = a.qp.wait_connected(Duration::from_millis(200));
    let took = context.harness.now().saturating_sub(start);
    ensure!(
        matches!(waited, Err(FabricError::ConnectTimeout { .. } | FabricError::PeerGone)),
        "waiting for an end that never connects gave {waited:?}"
    );
    ensure!(took < BOUND, "waiting 200 ms took {took:?}");
    Ok(())
}

pub(crate) fn wait_connected_returns_when_the_peer_connects(context: &Context<'_>) -> ItemResult {
    context.require_threads()?;
    let (near, far) = (context.node()?, context.node()?);
    let (to_near, from_far) = std::sync::mpsc::channel::<ConnectInfo>();
    let (to_far, from_near) = std::sync::mpsc::channel::<ConnectInfo>();
    let options = EndpointOptions::default();
    let (end_near, near_ended) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let passive = scope.spawn(move || -> ItemResult {
            let mut b = far.endpoint(options)?;
            let _ = to_near.send(b.qp.connect_info());
            let info = from_near.recv().map_err(|_| Stop::failed("the active end gave up"))?;
            b.qp.connect(&info, Role::Passive)?;
            let waited = b.qp.wait_connected(BOUND);
            // Stay until the other end saw the connection.
            let _ = near_ended.recv_timeout(BOUND);
            Ok(waited?)
        });
        let mut a = near.endpoint(options)?;
        let _ = to_far.send(a.qp.connect_info());
        let info = from_far.recv().map_err(|_| Stop::failed("the passive end gave up"))?;
        std::thread::sleep(Duration::from_millis(20));
        a.qp.connect(&info, Role::Active)?;
        a.qp.wait_connected(BOUND)?;
        ensure_eq!(a.qp.state(), QueuePairState::ReadyToSend, "state after waiting");
        let _ = end_near.send(());
        passive.join().map_err(|_| Stop::failed("the passive thread panicked"))?
    })
}

pub(crate) fn damaged_connection_data_never_connects(context: &Context<'_>) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let options = EndpointOptions::default();
    let honest = far.endpoint(options)?.qp.connect_info().0;
    let mut random = beeline_env::Randomness::new(11);
    let mut damaged = vec![Vec::new(), vec![0; 4], vec![0xff; ConnectInfo::MAX_BYTES + 1]];
    damaged.push(honest[..honest.len() / 2].to_vec());
    damaged.push(honest.iter().copied().chain([0; 2000]).collect());
    for _ in 0..if Context::deep() { 500 } else { 30 } {
        let mut bytes = vec![0; usize::try_from(random.below(200)).unwrap_or(0)];
        random.fill(&mut bytes);
        damaged.push(bytes);
        let mut flipped = honest.clone();
        // The queue pair that gave the data is gone: even an undetected flip leads nowhere.
        if let Some(byte) = flipped.get_mut(usize::try_from(random.below(honest.len() as u64)).unwrap_or(0)) {
            *byte ^= 1 << random.below(8);
        }
        damaged.push(flipped);
    }
    for bytes in damaged {
        let mut a = near.endpoint(options)?;
        let info = ConnectInfo(bytes);
        if a.qp.connect(&info, Role::Active).is_err() {
            continue;
        }
        let waited = a.qp.wait_connected(Duration::from_millis(5));
        ensure!(waited.is_err(), "connected through damaged data {:02x?}", info.0);
        ensure!(a.qp.state() != QueuePairState::ReadyToSend, "ready through damaged data");
    }
    let (mut a, mut b) = (near.endpoint(options)?, far.endpoint(options)?);
    context.connect(&mut a, &mut b)
}

pub(crate) fn posting_after_an_error_is_refused(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let nowhere = RemoteAddress { key: RemoteKey(0xdead), offset: 0 };
    let bad = context.execute(&mut pair.a, inline_write(b"x", nowhere), &[&pair.b.queue])?;
    ensure_eq!(bad.status, Status::RemoteAccessError, "status of a write to no region");
    ensure_eq!(pair.a.qp.state(), QueuePairState::Error, "state after an error");
    let target = pair.far.region(8, ALL)?;
    let request =
        beeline_fabric::WorkRequest::new(2, inline_write(b"x", target.remote_address(0)));
    let refused = pair.a.qp.post_send(&[request]);
    ensure_eq!(refused, Err(PostError::NotReady(QueuePairState::Error)), "post after an error");
    context.let_pass(&[&pair.a.queue, &pair.b.queue], Duration::from_millis(20))?;
    ensure_eq!(contents(&target), vec![0; 8], "memory after a refused post");
    Ok(())
}

pub(crate) fn an_orderly_disconnect_ends_the_peers_work(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    for wr_id in 100..105 {
        pair.a.post_empty_receive(wr_id)?;
    }
    drop(pair.b);
    let flushed = context.completions(&pair.a.queue, 5, &[])?;
    for (completion, wr_id) in flushed.iter().zip(100..) {
        ensure_eq!(completion.wr_id, wr_id, "order of flushed receives");
        ensure_eq!(completion.status, Status::Flushed, "status of a posted receive");
    }
    ensure_eq!(pair.a.qp.state(), QueuePairState::Error, "state after the peer left");
    Ok(())
}

pub(crate) fn reconnecting_after_an_error_works(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    for round in 0..5_u8 {
        let nowhere = RemoteAddress { key: RemoteKey(0xdead), offset: 0 };
        let bad = context.execute(&mut pair.a, inline_write(b"x", nowhere), &[&pair.b.queue])?;
        ensure_eq!(bad.status, Status::RemoteAccessError, "status of a write to no region");
        context.both_broken(&pair.a, &pair.b)?;
        let options = EndpointOptions::default();
        (pair.a, pair.b) = context.connected(&pair.near, &pair.far, options)?;
        let remote = target.remote_address(u64::from(round));
        context.perform(&mut pair.a, inline_write(&[round + 1], remote), &[])?;
        context.perform(&mut pair.a, crate::context::visible(remote, 1), &[])?;
    }
    ensure_eq!(&contents(&target)[..5], &[1, 2, 3, 4, 5], "one byte per reconnect");
    Ok(())
}

pub(crate) fn dropping_with_outstanding_work_is_harmless(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(1 << 20, ALL)?;
    let source = pair.near.region(1 << 20, ALL)?;
    for _ in 0..20 {
        let (mut a, b) = context.connected(&pair.near, &pair.far, EndpointOptions::default())?;
        let entries = [crate::context::whole(&source)];
        for _ in 0..8 {
            let local = beeline_fabric::LocalData::Gather(&entries);
            a.post(beeline_fabric::Operation::Write { local, remote: target.remote_address(0) })?;
        }
        a.post_empty_receive(1)?;
        // Everything goes while requests are under way, the target first every other time.
        if a.next_id() % 2 == 0 {
            drop(b);
            drop(a);
        } else {
            drop(a);
            drop(b);
        }
    }
    drop(source);
    context.perform(&mut pair.a, inline_write(b"alive", target.remote_address(0)), &[])?;
    Ok(())
}
