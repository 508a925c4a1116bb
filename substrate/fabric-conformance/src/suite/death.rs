//! Peers that die.

use std::time::Duration;

use beeline_fabric::{LocalData, Operation, QueuePairState, Status};

use crate::context::{ALL, BOUND, Context, EndpointOptions, inline_write, visible, whole};
use crate::harness::{ItemResult, ensure, ensure_eq};
use crate::process::{Peer, PeerOptions};

pub(crate) fn the_death_of_a_peer_ends_outstanding_work(context: &Context<'_>) -> ItemResult {
    let mut peer = Peer::start(context, PeerOptions::default())?;
    let node = context.node()?;
    let mut options = EndpointOptions::default();
    options.queue_pair.transport_timeout = Duration::from_secs(5);
    options.queue_pair.receiver_not_ready_timeout = Duration::from_secs(60);
    let mut end = node.endpoint(options)?;
    peer.connect(&mut end, 0)?;
    context.perform(&mut end, inline_write(b"before", peer.address(0)), &[])?;
    context.perform(&mut end, visible(peer.address(0), 6), &[])?;
    ensure_eq!(peer.bytes(0, 6)?, b"before", "bytes written to the peer");
    for wr_id in 900..904 {
        end.post_empty_receive(wr_id)?;
    }
    // No receive is posted there: these wait until the peer dies.
    let mut expected = Vec::new();
    for immediate in 0..10 {
        let remote = peer.address(64);
        let local = LocalData::Inline(b"waits");
        expected.push(end.post(Operation::WriteWithImmediate { local, remote, immediate })?);
    }
    context.let_pass(&[&end.queue], Duration::from_millis(50))?;
    ensure_eq!(end.queue.len(), 0, "completions before the peer died");
    peer.kill()?;
    expected.extend(900..904);
    let mut ended = context.completions(&end.queue, expected.len(), &[])?;
    for completion in &ended {
        ensure!(
            matches!(completion.status, Status::TransportError | Status::Flushed),
            "a dead peer ended {completion:?}"
        );
    }
    ended.sort_by_key(|completion| completion.wr_id);
    let numbers: Vec<_> = ended.iter().map(|completion| completion.wr_id).collect();
    ensure_eq!(numbers, expected, "requests ended, each once");
    ensure_eq!(end.qp.state(), QueuePairState::Error, "state after the peer died");
    Ok(())
}

pub(crate) fn the_death_of_a_peer_in_the_middle_of_transfers_ends_them(
    context: &Context<'_>,
) -> ItemResult {
    for delay_ms in [0, 1, 3] {
        let node = context.node()?;
        let region_bytes = node.device.attributes().max_message_bytes.min(16 << 20);
        let mut peer = Peer::start(context, PeerOptions { region_bytes, ..PeerOptions::default() })?;
        let mut options = EndpointOptions::default();
        options.queue_pair.transport_timeout = Duration::from_secs(5);
        let mut end = node.endpoint(options)?;
        peer.connect(&mut end, 0)?;
        let source = node.region(usize::try_from(region_bytes).unwrap_or(0), ALL)?;
        let entries = [whole(&source)];
        let local = LocalData::Gather(&entries);
        let mut posted = 0;
        for _ in 0..8 {
            end.post(Operation::Write { local, remote: peer.address(0) })?;
            end.post(Operation::Read { local: whole(&source), remote: peer.address(0) })?;
            posted += 2;
        }
        context.let_pass(&[&end.queue], Duration::from_millis(delay_ms))?;
        peer.kill()?;
        let ended = context.completions(&end.queue, posted, &[])?;
        let mut failed = false;
        for completion in ended {
            failed |= !completion.is_success();
            ensure_eq!(!completion.is_success(), failed, "no success after a failure");
        }
        // What was under way may have finished; new work cannot go on for ever.
        let start = context.harness.now();
        while end.qp.state() != QueuePairState::Error {
            let _ = end.post(Operation::Write { local, remote: peer.address(0) });
            context.let_pass(&[&end.queue], Duration::from_millis(5))?;
            let waited = context.harness.now().saturating_sub(start);
            ensure!(waited < BOUND, "the death of the peer stayed unnoticed for {waited:?}");
        }
    }
    Ok(())
}

pub(crate) fn the_death_of_one_peer_leaves_the_others_alone(context: &Context<'_>) -> ItemResult {
    let mut doomed = Peer::start(context, PeerOptions::default())?;
    let mut other = Peer::start(context, PeerOptions::default())?;
    let node = context.node()?;
    let queue = node.queue(1024)?;
    let mut first = node.endpoint_on(&queue, None, EndpointOptions::default())?;
    let mut second = node.endpoint_on(&queue, None, EndpointOptions::default())?;
    doomed.connect(&mut first, 0)?;
    other.connect(&mut second, 0)?;
    first.post_empty_receive(77)?;
    doomed.kill()?;
    let ended = context.completion(&queue, &[])?;
    ensure_eq!(ended.wr_id, 77, "the receive of the dead peer's connection");
    ensure_eq!(ended.qp_num, first.qp.qp_num(), "queue pair of the ended receive");
    for byte in 0..50 {
        let remote = other.address(byte);
        context.perform(&mut second, inline_write(b"!", remote), &[])?;
    }
    context.perform(&mut second, visible(other.address(0), 50), &[])?;
    ensure_eq!(other.bytes(0, 50)?, vec![b'!'; 50], "bytes at the living peer");
    Ok(())
}

pub(crate) fn an_idle_peers_death_is_noticed(context: &Context<'_>) -> ItemResult {
    let mut peer = Peer::start(context, PeerOptions::default())?;
    let node = context.node()?;
    let mut end = node.endpoint(EndpointOptions::default())?;
    peer.connect(&mut end, 0)?;
    end.post_empty_receive(1)?;
    peer.kill()?;
    let ended = context.completion(&end.queue, &[])?;
    ensure!(!ended.is_success(), "a receive succeeded from a dead peer: {ended:?}");
    let error = QueuePairState::Error;
    context.pump(&[&end.queue], BOUND, "the error state", || end.qp.state() == error)
}

pub(crate) fn a_disconnecting_peer_process_ends_outstanding_work(
    context: &Context<'_>,
) -> ItemResult {
    let mut peer = Peer::start(context, PeerOptions { queue_pairs: 2, ..PeerOptions::default() })?;
    let node = context.node()?;
    let mut first = node.endpoint(EndpointOptions::default())?;
    let mut second = node.endpoint(EndpointOptions::default())?;
    peer.connect(&mut first, 0)?;
    peer.connect(&mut second, 1)?;
    first.post_empty_receive(5)?;
    peer.disconnect(0)?;
    let ended = context.completion(&first.queue, &[])?;
    ensure_eq!((ended.wr_id, ended.status), (5, Status::Flushed), "the posted receive");
    peer.post_receives(1, 1)?;
    let local = LocalData::Inline(b"z");
    let remote = peer.address(0);
    let notice = Operation::WriteWithImmediate { local, remote, immediate: 4 };
    context.perform(&mut second, notice, &[])?;
    let start = context.harness.now();
    while peer.completions()? == 0 {
        context.let_pass(&[&second.queue], Duration::from_millis(1))?;
        let waited = context.harness.now().saturating_sub(start);
        ensure!(waited < BOUND, "the peer never saw the immediate");
    }
    Ok(())
}
