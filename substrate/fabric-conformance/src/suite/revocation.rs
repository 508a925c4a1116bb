//! Taking memory back.

use std::time::Duration;

use beeline_fabric::{LocalData, Operation, QueuePairState, Status};
use beeline_os::memory::load_u64;

use crate::context::{
    ALL, BOUND, Context, EndpointOptions, bytes_at, contents, inline_write, part, pattern, store,
    visible,
};
use crate::harness::{ItemResult, ensure, ensure_eq};
use crate::process::{Peer, PeerOptions};

pub(crate) fn a_revoked_region_keeps_its_contents_and_refuses_peers(
    context: &Context<'_>,
) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(8192, ALL)?;
    context.perform(&mut pair.a, inline_write(b"kept", target.remote_address(5000)), &[])?;
    context.perform(&mut pair.a, visible(target.remote_address(5000), 4), &[])?;
    store(&target, 0, b"own");
    target.revoke()?;
    ensure!(target.is_revoked(), "the region says that it is revoked");
    ensure_eq!(bytes_at(&target, 5000, 4), b"kept", "contents written before");
    ensure_eq!(bytes_at(&target, 0, 3), b"own", "contents stored locally");
    let write = inline_write(b"evil", target.remote_address(5000));
    let done = context.execute(&mut pair.a, write, &[&pair.b.queue])?;
    ensure_eq!(done.status, Status::RemoteAccessError, "status of a write after the revocation");
    context.both_broken(&pair.a, &pair.b)?;
    ensure_eq!(bytes_at(&target, 5000, 4), b"kept", "contents after the refused write");
    let options = EndpointOptions::default();
    let (mut a, b) = context.connected(&pair.near, &pair.far, options)?;
    let local = pair.near.region(8, ALL)?;
    let read = Operation::Read { local: part(&local, 0, 8), remote: target.remote_address(0) };
    let done = context.execute(&mut a, read, &[&b.queue])?;
    ensure_eq!(done.status, Status::RemoteAccessError, "status of a read after the revocation");
    ensure_eq!(contents(&local), vec![0; 8], "bytes read from a revoked region");
    Ok(())
}

pub(crate) fn revoking_one_region_leaves_the_others_alone(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let revoked = pair.far.region(4096, ALL)?;
    let kept = pair.far.region(4096, ALL)?;
    context.perform(&mut pair.a, inline_write(b"1", revoked.remote_address(0)), &[])?;
    context.perform(&mut pair.a, inline_write(b"1", kept.remote_address(0)), &[])?;
    revoked.revoke()?;
    context.perform(&mut pair.a, inline_write(b"2", kept.remote_address(0)), &[])?;
    context.perform(&mut pair.a, visible(kept.remote_address(0), 1), &[])?;
    ensure_eq!(bytes_at(&kept, 0, 1), b"2", "the other region");
    ensure_eq!(pair.a.qp.state(), QueuePairState::ReadyToSend, "the connection's state");
    Ok(())
}

pub(crate) fn a_revoked_region_still_serves_its_owner(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let source = pair.near.region_of(&pattern(6, 4096), ALL)?;
    let target = pair.far.region(4096, ALL)?;
    source.revoke()?;
    let entries = [part(&source, 0, 4096)];
    let write = Operation::Write {
        local: LocalData::Gather(&entries),
        remote: target.remote_address(0),
    };
    context.perform(&mut pair.a, write, &[])?;
    let remote = target.remote_address(0);
    context.perform(&mut pair.a, visible(remote, 4096), &[])?;
    ensure_eq!(contents(&target) == pattern(6, 4096), true, "bytes from the revoked region");
    context.perform(&mut pair.a, inline_write(b"new", remote), &[])?;
    let read = Operation::Read { local: part(&source, 0, 4096), remote };
    context.perform(&mut pair.a, read, &[])?;
    ensure_eq!(bytes_at(&source, 0, 3), b"new", "bytes read into the revoked region");
    Ok(())
}

/// What the peer writes to, and how its access is taken away.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Region,
    QueuePair,
}

/// A peer writes without end; it is stopped somewhere, loses its access, goes on, and must not
/// change a byte.
fn stopped_writer_cannot_reach_us(context: &Context<'_>, way: Way) -> ItemResult {
    let length = 8_usize << 20;
    let rounds = if Context::deep() { 40_u64 } else { 6 };
    for round in 0..rounds {
        let mut peer = Peer::start(context, PeerOptions::default())?;
        let node = context.node()?;
        let mut end = node.endpoint(EndpointOptions::default())?;
        peer.connect(&mut end, 0)?;
        let region = node.region(length, ALL)?;
        peer.start_writing(0, region.remote_address(0), length as u64)?;
        let start = context.harness.now();
        while peer.writer_state(0)?.0 < 2 {
            context.let_pass(&[&end.queue], Duration::from_micros(100))?;
            let waited = context.harness.now().saturating_sub(start);
            ensure!(waited < BOUND, "the peer did not begin to write");
        }
        // A different moment of the write each time.
        let moment = Duration::from_micros(500 * (round + 1));
        context.let_pass(&[&end.queue], moment)?;
        peer.turn()?;
        peer.stop()?;
        match way {
            Way::Region => region.revoke()?,
            Way::QueuePair => end.qp.revoke()?,
        }
        let at_revocation = contents(&region);
        ensure!(at_revocation.iter().any(|&byte| byte != 0), "the peer had written nothing");
        peer.go_on()?;
        let start = context.harness.now();
        let mut first_rounds = None;
        loop {
            let (rounds, ended) = peer.writer_state(0)?;
            let since = rounds - *first_rounds.get_or_insert(rounds);
            ensure!(since < 50, "the peer went on writing without an error");
            if ended != 0 {
                ensure!(ended != 1, "a write to revoked memory succeeded");
                break;
            }
            end.queue.drain()?;
            context.harness.idle();
            let waited = context.harness.now().saturating_sub(start);
            ensure!(waited < BOUND, "the peer never learned that its access is gone");
        }
        context.let_pass(&[&end.queue], Duration::from_millis(10))?;
        let unchanged = contents(&region) == at_revocation;
        ensure_eq!(unchanged, true, "memory is as it was when the revocation returned");
        if way == Way::QueuePair {
            ensure_eq!(end.qp.state(), QueuePairState::Error, "state after the revocation");
        }
    }
    Ok(())
}

pub(crate) fn a_region_revoked_from_a_peer_stopped_in_a_write_stays_unchanged(
    context: &Context<'_>,
) -> ItemResult {
    stopped_writer_cannot_reach_us(context, Way::Region)
}

pub(crate) fn a_queue_pair_revoked_from_a_peer_stopped_in_a_write_protects_all_memory(
    context: &Context<'_>,
) -> ItemResult {
    stopped_writer_cannot_reach_us(context, Way::QueuePair)
}

pub(crate) fn revoking_a_queue_pair_ends_it_and_flushes_its_work(
    context: &Context<'_>,
) -> ItemResult {
    let mut pair = context.pair()?;
    let options = EndpointOptions::default();
    pair.b.post_empty_receive(31)?;
    pair.b.qp.revoke()?;
    ensure_eq!(pair.b.qp.state(), QueuePairState::Error, "state after the revocation");
    let flushed = context.completion(&pair.b.queue, &[&pair.a.queue])?;
    ensure_eq!((flushed.wr_id, flushed.status), (31, Status::Flushed), "the posted receive");
    let error = QueuePairState::Error;
    context.pump(&[&pair.a.queue, &pair.b.queue], BOUND, "the peer to learn of it", || {
        pair.a.qp.state() == error
    })?;
    // A new connection reaches what the node registers from now on.
    let target = pair.far.region(64, ALL)?;
    let (mut a, _b) = context.connected(&pair.near, &pair.far, options)?;
    context.perform(&mut a, inline_write(b"new", target.remote_address(0)), &[])?;
    context.perform(&mut a, visible(target.remote_address(0), 3), &[])?;
    ensure_eq!(bytes_at(&target, 0, 3), b"new", "bytes over the new connection");
    Ok(())
}

/// Long enough that a provider which moves it takes a while.
const MOVED_BYTES: usize = 32 << 20;

/// What fabric itself places on the owner's behalf is not lost, though a revocation may move the
/// memory under it.
pub(crate) fn results_and_messages_that_arrive_during_a_revocation_are_there(
    context: &Context<'_>,
) -> ItemResult {
    context.require_threads()?;
    if crate::far::is_there() {
        return Err(crate::harness::Stop::skipped("what is revoked is in another host"));
    }
    let rounds = if Context::deep() { 20 } else { 3 };
    for round in 0..rounds {
        let mut pair = context.pair()?;
        let own = pair.near.region(MOVED_BYTES, ALL)?;
        store(&own, 0, &vec![0xA5; MOVED_BYTES]);
        let source = pair.far.region(4096, ALL)?;
        store(&source, 0, &7_u64.to_ne_bytes());
        // A peer holds the memory, so that it has to be moved.
        context.perform(&mut pair.b, inline_write(b"1", own.remote_address(0)), &[])?;
        let remote = source.remote_address(0);
        context.perform(&mut pair.a, visible(remote, 8), &[])?;
        let (began, beginning) = std::sync::mpsc::channel();
        let revoked = own.clone();
        let revoker = std::thread::spawn(move || {
            let _ = began.send(());
            revoked.revoke()
        });
        let _ = beginning.recv();
        let mut places = Vec::new();
        let mut last_ones = 20;
        // From the front, where what moves is copied first; results and messages in turn.
        for place in (8..MOVED_BYTES as u64 - 8).step_by(64) {
            if places.len() % 2 == 0 {
                let local = part(&own, place, 8);
                context.perform(&mut pair.a, Operation::Read { local, remote }, &[])?;
            } else {
                pair.a.post_receive(place, &own, place, 8)?;
                let local = LocalData::Inline(&[7, 0, 0, 0, 0, 0, 0, 0]);
                let send = Operation::Send { local, immediate: None };
                context.perform(&mut pair.b, send, &[&pair.a.queue])?;
                context.success(&pair.a.queue, place, &[&pair.b.queue])?;
            }
            places.push(place as usize);
            last_ones -= i32::from(revoker.is_finished());
            if last_ones == 0 {
                break;
            }
        }
        revoker.join().map_err(|_| crate::harness::Stop::failed("the revoker panicked"))??;
        for place in &places {
            let found = load_u64(own.memory().as_ref(), *place);
            let count = places.len();
            ensure_eq!(found, 7, "what arrived at {place}, one of {count}, in round {round}");
        }
        ensure_eq!(bytes_at(&own, MOVED_BYTES - 8, 8), vec![0xA5; 8], "what was there before");
    }
    Ok(())
}

/// Another region of the same memory stays, and so does what is done through it.
pub(crate) fn atomics_of_others_during_a_revocation_are_all_counted(
    context: &Context<'_>,
) -> ItemResult {
    context.require_threads()?;
    if crate::far::is_there() {
        return Err(crate::harness::Stop::skipped("what is revoked is in another host"));
    }
    let rounds = if Context::deep() { 50 } else { 5 };
    for round in 0..rounds {
        let mut pair = context.pair()?;
        let memory = pair.far.device.allocate_memory(1 << 20)?;
        let kept = pair.far.domain.register(std::sync::Arc::clone(&memory), ALL)?;
        let taken = pair.far.domain.register(memory, ALL)?;
        let local = pair.near.region(8, ALL)?;
        let remote = kept.remote_address(64);
        context.perform(&mut pair.a, inline_write(b"1", taken.remote_address(0)), &[])?;
        let revoker = std::thread::spawn(move || taken.revoke());
        let (mut added, mut last_ones, mut unknown) = (0, 20, 0);
        while last_ones > 0 {
            last_ones -= i32::from(revoker.is_finished());
            let word = part(&local, 0, 8);
            let add = Operation::FetchAndAdd { local: word, remote, addend: 1 };
            let done = context.execute(&mut pair.a, add, &[&pair.b.queue])?;
            if done.status == Status::TransportError {
                // It stood still for longer than the owner waits; it may count or not.
                unknown = 1;
                break;
            }
            ensure_eq!(done.status, Status::Success, "status of {done:?}");
            added += 1;
        }
        revoker.join().map_err(|_| crate::harness::Stop::failed("the revoker panicked"))??;
        crate::far::refresh(kept.memory().as_ref(), 64, 8);
        let found = load_u64(kept.memory().as_ref(), 64);
        let right = found == added || found == added + unknown;
        ensure!(right, "{added} additions succeeded and {found} are there, in round {round}");
    }
    Ok(())
}
