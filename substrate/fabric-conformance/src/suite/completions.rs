//! What completions say of the queue pair they belong to.

use beeline_fabric::{LocalData, Operation, ReceiveRequest, Status, WorkCompletion, WorkRequest};

use crate::context::{ALL, Context, EndpointOptions, inline_write, part, visible};
use crate::harness::{ItemResult, ensure_eq};

fn with_context(context: u64) -> EndpointOptions {
    let mut options = EndpointOptions::default();
    options.queue_pair.context = context;
    options
}

/// Requests, statuses and contexts.
fn told(done: &[WorkCompletion]) -> Vec<(u64, Status, u64)> {
    done.iter().map(|done| (done.wr_id, done.status, done.context)).collect()
}

/// Two queue pairs share their completion queues; one fails, the other goes on.
pub(crate) fn every_completion_carries_the_context_of_its_queue_pair(
    context: &Context<'_>,
) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let (sending, receiving) = (near.queue(256)?, far.queue(256)?);
    let target = far.region(128, ALL)?;
    let local = near.region(64, ALL)?;
    let (word, remote) = (part(&local, 0, 8), target.remote_address(0));
    let mut ends = Vec::new();
    // The whole width counts, and 0 is a context as well.
    for (ours, theirs) in [(u64::MAX, 0), (7, 1 << 63 | 9)] {
        let mut a = near.endpoint_on(&sending, None, with_context(ours))?;
        let mut b = far.endpoint_on(&receiving, None, with_context(theirs))?;
        context.connect(&mut a, &mut b)?;
        b.post_receive(20, &target, 64, 8)?;
        b.post_receive(21, &target, 72, 8)?;
        b.post_empty_receive(22)?;
        ends.push((a, b, ours, theirs));
    }
    for (a, _, ours, theirs) in &mut ends {
        let inline = LocalData::Inline(b"a word");
        a.qp.post_send(&[
            WorkRequest::new(1, inline_write(b"bytes", remote)),
            WorkRequest::new(2, Operation::Read { local: word, remote }),
            WorkRequest::new(3, Operation::FetchAndAdd { local: word, remote, addend: 1 }),
            WorkRequest::new(4, visible(remote, 8)),
            WorkRequest::new(5, Operation::Send { local: inline, immediate: None }),
            WorkRequest::new(
                6,
                Operation::WriteWithImmediate { local: inline, remote, immediate: 1 },
            ),
        ])?;
        let sent = context.completions(&sending, 6, &[&receiving])?;
        let expected: Vec<_> = (1..7).map(|wr_id| (wr_id, Status::Success, *ours)).collect();
        ensure_eq!(told(&sent), expected, "at the initiator");
        let taken = context.completions(&receiving, 2, &[&sending])?;
        let expected: Vec<_> = (20..22).map(|wr_id| (wr_id, Status::Success, *theirs)).collect();
        ensure_eq!(told(&taken), expected, "at the target");
    }
    let (a, b, ours, theirs) = &mut ends[0];
    a.post_empty_receive(30)?;
    a.qp.post_send(&[
        WorkRequest::unsignalled(7, inline_write(b"beyond", target.remote_address(128))),
        WorkRequest::unsignalled(8, inline_write(b"behind", remote)),
    ])?;
    let mut ended = told(&context.completions(&sending, 3, &[&receiving])?);
    ended.sort_unstable_by_key(|(wr_id, ..)| *wr_id);
    let expected = vec![
        (7, Status::RemoteAccessError, *ours),
        (8, Status::Flushed, *ours),
        (30, Status::Flushed, *ours),
    ];
    ensure_eq!(ended, expected, "what failed and what was flushed");
    let flushed = context.completions(&receiving, 1, &[&sending])?;
    ensure_eq!(told(&flushed), vec![(22, Status::Flushed, *theirs)], "flushed at the target");
    context.both_broken(a, b)?;
    let (a, _, ours, _) = &mut ends[1];
    let done = context.perform(a, inline_write(b"on", remote), &[&receiving])?;
    ensure_eq!(done.context, *ours, "the other queue pair's context");
    Ok(())
}

pub(crate) fn a_shared_receive_carries_the_context_of_the_queue_pair_that_took_it(
    context: &Context<'_>,
) -> ItemResult {
    let (near, far) = (context.node()?, context.node()?);
    let shared = far.domain.create_shared_receive_queue(16)?;
    let queue = far.queue(256)?;
    let inbox = far.region(64, ALL)?;
    let remote = inbox.remote_address(56);
    let mut ends = Vec::new();
    for theirs in [1 << 40, 3 << 40, 2 << 40] {
        let mut a = near.endpoint(EndpointOptions::default())?;
        let mut b = far.endpoint_on(&queue, Some(&shared), with_context(theirs))?;
        context.connect(&mut a, &mut b)?;
        ends.push((a, b, theirs));
    }
    for round in 0..10 {
        for (a, _, theirs) in &mut ends {
            let buffer = Some(part(&inbox, 0, 8));
            shared.post_receive(&[ReceiveRequest { wr_id: round, buffer }])?;
            let local = LocalData::Inline(b"ticket");
            a.post(match round % 2 {
                0 => Operation::Send { local, immediate: None },
                _ => Operation::WriteWithImmediate { local, remote, immediate: 5 },
            })?;
            let taken = context.completion(&queue, &[&a.queue])?;
            ensure_eq!(told(&[taken]), vec![(round, Status::Success, *theirs)], "the context of the queue pair that took it");
            let sent = context.completion(&a.queue, &[&queue])?;
            ensure_eq!(sent.context, 0, "the context of a queue pair that was given none");
        }
    }
    let (a, b, theirs) = &mut ends[1];
    shared.post_receive(&[ReceiveRequest { wr_id: 40, buffer: None }])?;
    // Too long for its receive: that one is used up.
    a.post(Operation::Send { local: LocalData::Inline(b"x"), immediate: None })?;
    let failed = context.completion(&queue, &[&a.queue])?;
    ensure_eq!(told(&[failed]), vec![(40, Status::LengthError, *theirs)], "what failed");
    context.both_broken(a, b)
}
