//! Compare-and-swap and fetch-and-add.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use beeline_fabric::{AtomicScope, ConnectInfo, Operation, RemoteAddress, Role, Status, WorkRequest};
use beeline_os::memory::{atomic_u64, load_u64};

use crate::context::{ALL, BOUND, Context, Endpoint, EndpointOptions, part};
use crate::harness::{ItemResult, Stop, ensure, ensure_eq};

fn old_value(region: &beeline_fabric::MemoryRegion, offset: usize) -> u64 {
    crate::far::refresh(region.memory().as_ref(), offset, 8);
    load_u64(region.memory().as_ref(), offset)
}

pub(crate) fn atomics_return_the_old_value(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let local = pair.near.region(64, ALL)?;
    let remote = target.remote_address(56);
    let word = part(&local, 16, 8);
    let mut run = |operation, before, after| -> ItemResult {
        let done = context.perform(&mut pair.a, operation, &[])?;
        ensure_eq!(done.length, 8, "bytes of {done:?}");
        ensure_eq!(old_value(&local, 16), before, "the old value");
        ensure_eq!(old_value(&target, 56), after, "the new value");
        Ok(())
    };
    run(Operation::FetchAndAdd { local: word, remote, addend: 5 }, 0, 5)?;
    run(Operation::FetchAndAdd { local: word, remote, addend: u64::MAX }, 5, 4)?;
    run(Operation::FetchAndAdd { local: word, remote, addend: 0 }, 4, 4)?;
    run(Operation::CompareAndSwap { local: word, remote, expected: 9, desired: 1 }, 4, 4)?;
    run(Operation::CompareAndSwap { local: word, remote, expected: 4, desired: u64::MAX }, 4, u64::MAX)?;
    run(Operation::FetchAndAdd { local: word, remote, addend: 2 }, u64::MAX, 1)
}

pub(crate) fn atomics_of_many_connections_lose_nothing(context: &Context<'_>) -> ItemResult {
    let far = context.node()?;
    let target = far.region(4096, ALL)?;
    let rounds = 50_u64;
    let mut ends = Vec::new();
    for _ in 0..8 {
        let near = context.node()?;
        let (a, b) = context.connected(&near, &far, EndpointOptions::default())?;
        let local = near.region(4096, ALL)?;
        ends.push((a, b, local));
    }
    for (a, _, local) in &mut ends {
        for place in 0..rounds {
            let word = part(local, place * 8, 8);
            let remote = target.remote_address(64);
            a.post(Operation::FetchAndAdd { local: word, remote, addend: 1 })?;
        }
    }
    let mut seen = Vec::new();
    for (a, _, local) in &ends {
        let others: Vec<&crate::context::Queue> =
            ends.iter().flat_map(|(a, b, _)| [&*a.queue, &*b.queue]).collect();
        for completion in context.completions(&a.queue, 50, &others)? {
            ensure_eq!(completion.status, Status::Success, "status of {completion:?}");
        }
        let mut last = None;
        for place in 0..50 {
            let value = old_value(local, place * 8);
            ensure!(Some(value) > last, "one connection's adds happen in order");
            last = Some(value);
            seen.push(value);
        }
    }
    ensure_eq!(old_value(&target, 64), 8 * rounds, "the sum");
    seen.sort_unstable();
    ensure_eq!(seen, (0..8 * rounds).collect::<Vec<_>>(), "each old value was seen once");
    Ok(())
}

/// Adds 1 `rounds` times by fetch-and-add at `remote` and by compare-and-swap 8 bytes further.
fn hammer(
    context: &Context<'_>,
    end: &mut Endpoint,
    local: &beeline_fabric::MemoryRegion,
    remote: RemoteAddress,
    rounds: u64,
) -> ItemResult {
    let word = part(local, 0, 8);
    let mut expected = 0;
    for _ in 0..rounds {
        context.perform(end, Operation::FetchAndAdd { local: word, remote, addend: 1 }, &[])?;
        loop {
            let remote = remote.advanced(8);
            let desired = expected + 1;
            let swap = Operation::CompareAndSwap { local: word, remote, expected, desired };
            context.perform(end, swap, &[])?;
            let seen = old_value(local, 0);
            if seen == expected {
                expected = desired;
                break;
            }
            expected = seen;
        }
    }
    Ok(())
}

pub(crate) fn atomics_under_contention_of_threads_are_exact(context: &Context<'_>) -> ItemResult {
    context.require_threads()?;
    let threads = 4_u64;
    let rounds = if Context::deep() { 20_000 } else { 500 };
    let far = context.node()?;
    let target = far.region(4096, ALL)?;
    let remote = target.remote_address(128);
    std::thread::scope(|scope| {
        let mut working = Vec::new();
        for _ in 0..threads {
            let (to_client, from_server) = mpsc::channel::<ConnectInfo>();
            let (to_server, from_client) = mpsc::channel::<ConnectInfo>();
            let (finish, finished) = mpsc::channel::<()>();
            let (serve, serving) = mpsc::channel::<()>();
            let far = far.clone();
            let server = scope.spawn(move || -> ItemResult {
                let mut b = far.endpoint(EndpointOptions::default())?;
                let _ = to_client.send(b.qp.connect_info());
                let info = from_client.recv().map_err(|_| Stop::failed("the client gave up"))?;
                b.qp.connect(&info, Role::Passive)?;
                b.qp.wait_connected(BOUND)?;
                let _ = serve.send(());
                // One-sided: this thread does nothing for the client.
                let _ = finished.recv();
                Ok(())
            });
            let context = *context;
            let client = scope.spawn(move || -> ItemResult {
                let _finish = finish;
                let near = context.node()?;
                let local = near.region(64, ALL)?;
                let mut a = near.endpoint(EndpointOptions::default())?;
                let _ = to_server.send(a.qp.connect_info());
                let info = from_server.recv().map_err(|_| Stop::failed("the server gave up"))?;
                a.qp.connect(&info, Role::Active)?;
                a.qp.wait_connected(BOUND)?;
                let hammered = hammer(&context, &mut a, &local, remote, rounds);
                // The server may not have seen the connection yet: had the client left by then, the
                // server's wait would end with a peer that is gone.
                let _ = serving.recv();
                hammered
            });
            working.push(server);
            working.push(client);
        }
        for thread in working {
            thread.join().map_err(|_| Stop::failed("a thread panicked"))??;
        }
        ensure_eq!(old_value(&target, 128), threads * rounds, "sum by fetch-and-add");
        ensure_eq!(old_value(&target, 136), threads * rounds, "sum by compare-and-swap");
        Ok(())
    })
}

pub(crate) fn atomics_and_reads_and_writes_keep_their_order(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let local = pair.near.region(64, ALL)?;
    let remote = target.remote_address(0);
    for round in 0..200_u64 {
        let start = (round * 1000).to_ne_bytes();
        let write = crate::context::inline_write(&start, remote);
        let add = Operation::FetchAndAdd { local: part(&local, 0, 8), remote, addend: 1 };
        let read = Operation::Read { local: part(&local, 8, 8), remote };
        pair.a.qp.post_send(&[
            WorkRequest::unsignalled(1, write),
            WorkRequest::unsignalled(2, add),
            WorkRequest::new(3, read),
        ])?;
        context.success(&pair.a.queue, 3, &[])?;
        ensure_eq!(old_value(&local, 0), round * 1000, "the add saw the write");
        ensure_eq!(old_value(&local, 8), round * 1000 + 1, "the read saw the add");
    }
    Ok(())
}

/// The target's processor adds to the word that a peer adds to. The initiator is the node that may be
/// in another host: the processor whose instructions count is the one here.
pub(crate) fn atomics_are_atomic_with_what_the_device_says(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.near.region(64, ALL)?;
    let local = pair.far.region(64, ALL)?;
    let (word, remote) = (part(&local, 0, 8), target.remote_address(24));
    let with_processor = match pair.near.device.attributes().atomics {
        AtomicScope::Processor => true,
        // What is left of the promise is what the other items of this group look at.
        AtomicScope::Device => false,
    };
    let rounds = if Context::deep() { 50_000 } else { 2_000 };
    let (begun, done) = (AtomicBool::new(!with_processor), AtomicBool::new(false));
    let (ours, outcome) = std::thread::scope(|scope| {
        let adding = scope.spawn(|| {
            let mut added = 0_u64;
            // Relaxed, all: the scope's end orders what is read afterwards.
            while with_processor && !done.load(Ordering::Relaxed) {
                atomic_u64(target.memory().as_ref(), 24).fetch_add(1, Ordering::Relaxed);
                added += 1;
                begun.store(true, Ordering::Relaxed);
            }
            added
        });
        while !begun.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let outcome = (0..rounds).try_for_each(|_| {
            let add = Operation::FetchAndAdd { local: word, remote, addend: 1 };
            context.perform(&mut pair.b, add, &[&pair.a.queue]).map(drop)
        });
        done.store(true, Ordering::Relaxed);
        (adding.join(), outcome)
    });
    outcome?;
    let ours = ours.map_err(|_| Stop::failed("the thread that adds panicked"))?;
    ensure_eq!(old_value(&target, 24), ours + rounds, "the sum");
    Ok(())
}
