//! Arming, sleeping, waking.

use std::sync::mpsc;
use std::time::Duration;

use beeline_env::Randomness;
use beeline_fabric::{
    CompletionQueue, ConnectInfo, LocalData, Operation, ReceiveRequest, Role, WorkCompletion,
    WorkRequest,
};

use crate::far::wait_event;
use crate::context::{ALL, BOUND, Context, Endpoint, EndpointOptions, Queue, inline_write};
use crate::harness::{ItemResult, Stop, ensure, ensure_eq};

/// Wake-ups without a completion that no work a thread is in the middle of explains.
const MANY_LOOKS: u64 = 100_000;

/// Sleeps on the event until a completion is there: arm, poll once more, wait, acknowledge.
/// `others` are polled meanwhile, because their queue pairs may have work to do; `queue` is not,
/// so that a lost wake-up shows.
fn sleep_until_completion(
    context: &Context<'_>,
    queue: &dyn CompletionQueue,
    others: &[&Queue],
) -> Result<WorkCompletion, Stop> {
    let mut one = [WorkCompletion::EMPTY];
    let slice = if others.is_empty() { BOUND } else { Duration::from_millis(2) };
    // Deferred work may wake the queue without a completion, but not for ever: work that another thread
    // has begun is there at each look, until that thread has a processor again.
    let (begun, mut looks) = (context.harness.now(), 0_u64);
    while looks < MANY_LOOKS || context.harness.now().saturating_sub(begun) < BOUND {
        ensure!(looks < 100 * MANY_LOOKS, "time stands still while the queue wakes");
        looks += 1;
        if looks > MANY_LOOKS {
            context.harness.idle();
        }
        if queue.poll(&mut one)? == 1 {
            return Ok(one[0]);
        }
        queue.arm()?;
        if queue.poll(&mut one)? == 1 {
            return Ok(one[0]);
        }
        let start = context.harness.now();
        while !wait_event(context, queue, slice)? {
            for other in others {
                other.drain()?;
            }
            if context.harness.now().saturating_sub(start) < BOUND {
                continue;
            }
            let there = queue.poll(&mut one)?;
            return Err(Stop::failed(if there == 1 {
                "a completion was there and the armed queue did not wake: a lost wake-up"
            } else {
                "no completion came and no event"
            }));
        }
        queue.acknowledge()?;
    }
    Err(Stop::failed(format!("the queue woke {looks} times without a completion")))
}

pub(crate) fn an_armed_queue_wakes_for_a_completion(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let remote = target.remote_address(0);
    for round in 0..50 {
        pair.b.post_empty_receive(round)?;
        pair.b.queue.cq.arm()?;
        ensure_eq!(pair.b.queue.drain()?, 0, "completions before the immediate");
        let local = LocalData::Inline(b"wake");
        pair.a.post(Operation::WriteWithImmediate { local, remote, immediate: 1 })?;
        let start = context.harness.now();
        loop {
            // The initiator may have deferred work.
            pair.a.queue.drain()?;
            if wait_event(context, pair.b.queue.cq.as_ref(), Duration::from_millis(2))? {
                pair.b.queue.cq.acknowledge()?;
                if pair.b.queue.drain()? > 0 {
                    break;
                }
                pair.b.queue.cq.arm()?;
                if pair.b.queue.drain()? > 0 {
                    break;
                }
            }
            let waited = context.harness.now().saturating_sub(start);
            ensure!(waited < BOUND, "round {round}: the armed queue did not wake");
        }
        let arrived = pair.b.queue.take_all();
        ensure_eq!(arrived.len(), 1, "completions of round {round}");
        ensure_eq!(arrived[0].wr_id, round, "receive of round {round}");
        let done = context.completion(&pair.a.queue, &[&pair.b.queue])?;
        ensure!(done.is_success(), "the write ended in {done:?}");
    }
    Ok(())
}

pub(crate) fn an_idle_armed_queue_sleeps(context: &Context<'_>) -> ItemResult {
    let pair = context.pair()?;
    // Whatever connecting left to do may wake it a few times.
    let mut woke = 0;
    for _ in 0..20 {
        pair.a.queue.cq.arm()?;
        pair.a.queue.drain()?;
        if !wait_event(context, pair.a.queue.cq.as_ref(), Duration::from_millis(30))? {
            ensure_eq!(pair.a.queue.len(), 0, "completions without work");
            return Ok(());
        }
        pair.a.queue.cq.acknowledge()?;
        woke += 1;
    }
    Err(Stop::failed(format!("an idle queue woke {woke} times in a row")))
}

pub(crate) fn acknowledging_clears_the_event(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let queue = std::rc::Rc::clone(&pair.a.queue);
    for _ in 0..3 {
        queue.cq.arm()?;
        queue.drain()?;
        pair.a.post(inline_write(b"x", target.remote_address(0)))?;
        sleep_until_completion(context, queue.cq.as_ref(), &[])?;
        // An acknowledgement without an event is harmless.
        queue.cq.acknowledge()?;
        queue.cq.acknowledge()?;
        // A completion may be there to poll before its event is, however long the thread that
        // raises the event is kept from it. Nothing arms for another one.
        let mut late = 0;
        for bound in [50, 5] {
            if wait_event(context, queue.cq.as_ref(), Duration::from_millis(bound))? {
                queue.cq.acknowledge()?;
                late += 1;
            }
        }
        ensure!(late < 2, "the event stayed after it was acknowledged");
    }
    Ok(())
}

pub(crate) fn waiting_ends_with_a_completion_or_the_time_out(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let mut buffer = [WorkCompletion::EMPTY; 4];
    let start = context.harness.now();
    let count = pair.a.queue.cq.wait(&mut buffer, Duration::from_millis(50))?;
    let waited = context.harness.now().saturating_sub(start);
    ensure_eq!(count, 0, "completions without work");
    ensure!(waited >= Duration::from_millis(45), "waited {waited:?} instead of 50 ms");
    for _ in 0..20 {
        let wr_id = pair.a.post(inline_write(b"x", target.remote_address(0)))?;
        let count = pair.a.queue.cq.wait(&mut buffer, BOUND)?;
        ensure_eq!((count, buffer[0].wr_id), (1, wr_id), "what waiting returned");
    }
    Ok(())
}

pub(crate) fn single_threaded_ping_pong_loses_no_wake_up(context: &Context<'_>) -> ItemResult {
    let mut pair = context.pair()?;
    let target = pair.far.region(64, ALL)?;
    let back = pair.near.region(64, ALL)?;
    let rounds = if Context::deep() { 20_000 } else { 1_000 };
    let (a_cq, b_cq) =
        (std::rc::Rc::clone(&pair.a.queue.cq), std::rc::Rc::clone(&pair.b.queue.cq));
    for round in 0..rounds {
        pair.a.post_empty_receive(round)?;
        pair.b.post_empty_receive(round)?;
        let local = LocalData::Inline(b"ping");
        let remote = target.remote_address(0);
        let ping = Operation::WriteWithImmediate { local, remote, immediate: 1 };
        pair.a.qp.post_send(&[WorkRequest::unsignalled(1, ping)])?;
        let arrived = sleep_until_completion(context, b_cq.as_ref(), &[&pair.a.queue])?;
        ensure!(arrived.is_success(), "ping {round} ended in {arrived:?}");
        let local = LocalData::Inline(b"pong");
        let remote = back.remote_address(0);
        let pong = Operation::WriteWithImmediate { local, remote, immediate: 2 };
        pair.b.qp.post_send(&[WorkRequest::unsignalled(1, pong)])?;
        let arrived = sleep_until_completion(context, a_cq.as_ref(), &[&pair.b.queue])?;
        ensure!(arrived.is_success(), "pong {round} ended in {arrived:?}");
    }
    Ok(())
}

/// One end of the ping-pong between threads; `serve` is true for the end that moves first.
fn play(
    context: &Context<'_>,
    end: &mut Endpoint,
    region: &beeline_fabric::MemoryRegion,
    remote: beeline_fabric::RemoteAddress,
    rounds: u64,
    serve: bool,
) -> ItemResult {
    let mut random = Randomness::new(u64::from(serve));
    let queue = std::rc::Rc::clone(&end.queue.cq);
    for round in 0..rounds {
        if serve {
            hit(end, remote, round)?;
        }
        // From "the answer is long there" to "asleep before it comes".
        match random.below(4) {
            0 => {}
            1 => std::thread::yield_now(),
            2 => {
                for _ in 0..random.below(3_000) {
                    std::hint::spin_loop();
                }
            }
            _ => std::thread::sleep(Duration::from_micros(random.below(60))),
        }
        let arrived = sleep_until_completion(context, queue.as_ref(), &[])?;
        ensure!(arrived.is_success(), "round {round} ended in {arrived:?}");
        let value = crate::context::bytes_at(region, 0, 8);
        ensure_eq!(value, round.to_le_bytes(), "what round {round} brought");
        end.qp.post_receive(&[ReceiveRequest { wr_id: round, buffer: None }])?;
        if !serve {
            hit(end, remote, round)?;
        }
    }
    Ok(())
}

fn hit(end: &mut Endpoint, remote: beeline_fabric::RemoteAddress, round: u64) -> ItemResult {
    // The ball of a round carries the round's number, and so does its answer.
    let bytes = round.to_le_bytes();
    let local = LocalData::Inline(&bytes);
    let ball = Operation::WriteWithImmediate { local, remote, immediate: 0 };
    Ok(end.qp.post_send(&[WorkRequest::unsignalled(round, ball)])?)
}

/// What each end tells the other before they play.
type Greeting = (ConnectInfo, beeline_fabric::RemoteAddress);

pub(crate) fn thousands_of_rounds_between_threads_lose_no_wake_up(
    context: &Context<'_>,
) -> ItemResult {
    context.require_threads()?;
    let rounds = if Context::deep() { 100_000 } else { 3_000 };
    let (near, far) = (context.node()?, context.node()?);
    let (to_near, from_far) = mpsc::channel::<Greeting>();
    let (to_far, from_near) = mpsc::channel::<Greeting>();
    let enter = move |context: Context<'_>,
                      node: crate::context::Node,
                      tell: mpsc::Sender<Greeting>,
                      hear: mpsc::Receiver<Greeting>,
                      serve: bool|
          -> ItemResult {
        let region = node.region(64, ALL)?;
        let mut end = node.endpoint(EndpointOptions::default())?;
        for wr_id in 0..4 {
            end.post_empty_receive(wr_id)?;
        }
        let _ = tell.send((end.qp.connect_info(), region.remote_address(0)));
        let (info, remote) = hear.recv().map_err(|_| Stop::failed("the other end gave up"))?;
        end.qp.connect(&info, if serve { Role::Active } else { Role::Passive })?;
        end.qp.wait_connected(BOUND)?;
        let played = play(&context, &mut end, &region, remote, rounds, serve);
        // Neither end leaves while the other still waits for the last ball.
        drop(tell);
        let _ = hear.recv();
        played
    };
    let context = *context;
    std::thread::scope(|scope| {
        let first = scope.spawn(move || enter(context, near, to_far, from_far, true));
        let second = scope.spawn(move || enter(context, far, to_near, from_near, false));
        let first = first.join().map_err(|_| Stop::failed("a thread panicked"))?;
        let second = second.join().map_err(|_| Stop::failed("a thread panicked"))?;
        first.and(second)
    })
}
