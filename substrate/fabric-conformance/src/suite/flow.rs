//! Full queues.

use std::time::Duration;

use beeline_fabric::{
    FabricError, PostError, QueuePairState, Status, WorkCompletion, WorkRequest,
};

use crate::context::{ALL, BOUND, Context, EndpointOptions, contents, inline_write, visible};
use crate::harness::{ItemResult, ensure, ensure_eq};

pub(crate) fn a_full_send_queue_refuses_the_whole_post(context: &Context<'_>) -> ItemResult {
    let mut options = EndpointOptions::default();
    options.queue_pair.send_depth = 16;
    let mut pair = context.pair_with(options)?;
    let target = pair.far.region(4096, ALL)?;
    // Nothing is polled, so places are not given back. More than the depth may be taken where a
    // provider rounds up.
    let mut taken = 0_u64;
    let refused = loop {
        let remote = target.remote_address(taken % 4096);
        let request = WorkRequest::new(taken, inline_write(b"t", remote));
        match pair.a.qp.post_send(&[request]) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
        ensure!(taken <= 512, "a send queue of 16 takes more than 512 requests unpolled");
    };
    ensure_eq!(refused, PostError::QueueFull, "a post to a full queue");
    ensure!(taken >= 16, "a send queue of 16 took {taken} requests");
    let done = context.completions(&pair.a.queue, usize::try_from(taken).unwrap_or(0), &[])?;
    for (completion, wr_id) in done.iter().zip(0..) {
        ensure_eq!((completion.wr_id, completion.status), (wr_id, Status::Success), "completion");
    }
    // A list that does not fit leaves no trace, not even of its beginning.
    context.perform(&mut pair.a, visible(target.remote_address(0), 4096), &[])?;
    let before = contents(&target);
    let remote = target.remote_address(4000);
    let list: Vec<_> =
        (0..=taken).map(|wr_id| WorkRequest::new(wr_id, inline_write(b"z", remote))).collect();
    let refused = pair.a.qp.post_send(&list);
    ensure_eq!(refused, Err(PostError::QueueFull), "a list longer than the queue");
    context.let_pass(&[&pair.a.queue], Duration::from_millis(10))?;
    ensure_eq!(pair.a.queue.len(), 0, "completions of a refused list");
    ensure_eq!(contents(&target), before, "memory after a refused list");
    context.perform(&mut pair.a, inline_write(b"y", remote), &[])?;
    Ok(())
}

pub(crate) fn an_overrun_completion_queue_says_so_or_loses_nothing(
    context: &Context<'_>,
) -> ItemResult {
    let depth = 8_u32;
    let options = EndpointOptions { completion_depth: depth, ..EndpointOptions::default() };
    let (near, far) = (context.node()?, context.node()?);
    let mut a = near.endpoint(options)?;
    let mut b = far.endpoint(EndpointOptions::default())?;
    context.connect(&mut a, &mut b)?;
    let target = far.region(64, ALL)?;
    let remote = target.remote_address(0);
    let mut taken = 0_usize;
    for wr_id in 0..64 {
        match a.qp.post_send(&[WorkRequest::new(wr_id, inline_write(b"c", remote))]) {
            Ok(()) => taken += 1,
            Err(PostError::QueueFull) => break,
            Err(PostError::NotReady(QueuePairState::Error)) => break,
            Err(error) => return Err(error.into()),
        }
    }
    // Time for all of them to complete with nobody polling their queue.
    context.let_pass(&[&b.queue], Duration::from_millis(50))?;
    let start = context.harness.now();
    let mut seen = Vec::new();
    let mut buffer = [WorkCompletion::EMPTY; 16];
    loop {
        match a.queue.cq.poll(&mut buffer) {
            Ok(count) => seen.extend_from_slice(&buffer[..count]),
            Err(FabricError::CompletionQueueOverrun { .. }) => {
                for _ in 0..3 {
                    let again = a.queue.cq.poll(&mut buffer);
                    let sticky = matches!(again, Err(FabricError::CompletionQueueOverrun { .. }));
                    ensure!(sticky, "polled {again:?} after the overrun");
                }
                ensure_eq!(a.qp.state(), QueuePairState::Error, "state after the overrun");
                let refused =
                    a.qp.post_send(&[WorkRequest::new(99, inline_write(b"c", remote))]);
                ensure!(refused.is_err(), "a post after the overrun was taken");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        if seen.len() >= taken {
            break;
        }
        let waited = context.harness.now().saturating_sub(start);
        ensure!(waited < BOUND, "{} of {taken} completions came, silently", seen.len());
        b.queue.drain()?;
        context.harness.idle();
    }
    for (completion, wr_id) in seen.iter().zip(0..) {
        ensure_eq!(completion.wr_id, wr_id, "no completion is lost or doubled");
    }
    Ok(())
}

pub(crate) fn one_sided_operations_complete_though_the_target_never_polls(
    context: &Context<'_>,
) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let local = pair.near.region(64, ALL)?;
    let remote = target.remote_address(0);
    for round in 0..300_u64 {
        let bytes = round.to_ne_bytes();
        context.perform(&mut pair.a, inline_write(&bytes, remote), &[])?;
        let word = crate::context::part(&local, 0, 8);
        let read = beeline_fabric::Operation::Read { local: word, remote };
        context.perform(&mut pair.a, read, &[])?;
        let add = beeline_fabric::Operation::FetchAndAdd { local: word, remote, addend: 1 };
        context.perform(&mut pair.a, add, &[])?;
        context.perform(&mut pair.a, visible(remote, 8), &[])?;
        ensure_eq!(contents(&target)[..8], (round + 1).to_ne_bytes(), "round {round}");
    }
    Ok(())
}

pub(crate) fn a_small_polling_slice_gets_everything_in_the_end(
    context: &Context<'_>,
) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    for wr_id in 0..100 {
        let request = WorkRequest::new(wr_id, inline_write(b"s", target.remote_address(0)));
        pair.a.qp.post_send(&[request])?;
    }
    let mut one = [WorkCompletion::EMPTY];
    let mut next = 0;
    let start = context.harness.now();
    ensure_eq!(pair.a.queue.cq.poll(&mut [])?, 0, "an empty slice takes nothing");
    while next < 100 {
        if pair.a.queue.cq.poll(&mut one)? == 1 {
            ensure_eq!(one[0].wr_id, next, "completions one by one");
            next += 1;
        } else {
            context.harness.idle();
        }
        let waited = context.harness.now().saturating_sub(start);
        ensure!(waited < BOUND, "{next} of 100 completions came");
    }
    Ok(())
}
