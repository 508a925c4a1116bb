//! A worker's side: a thread that runs its elements and serves its link's rings.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use beeline_ir::graph::Graph;
use beeline_ir::interpreter::Frame;
use beeline_ir::run::{BATCH, Machine, Run, RunError, Signal};
use beeline_ir::tree::words;

use super::split::Crossing;
use crate::pcie::bus::{Direction, sleep_on};
use crate::pcie::queue::WorkQueue;
use crate::pcie::slot::Mode;
use crate::pcie::{FIRST_DATA, Link, SIGNALS};
use crate::reload::Carried;

/// What the manager asks of the worker.
pub(super) enum Request {
    /// Answer a signal between two iterations.
    Signal(usize, Signal),
    /// Set an element back.
    Reset(usize),
    /// Hand over the variables and memories of a node, as they are now.
    Look(usize),
    /// End, and hand over every node's.
    End,
}

/// What the worker answers.
pub(super) enum Reply {
    Signal(Result<Signal, RunError>),
    Reset(Result<(), RunError>),
    Look(Box<Frame>),
    End(Vec<Frame>),
}

/// What the other side may look at while the worker works.
#[derive(Debug)]
pub(super) struct Shown {
    /// Even while it rests, having found nothing to do; one more when it goes on, and again when it
    /// rests. It touches no ring and no channel while this is even.
    pub rest: AtomicU64,
    /// Which of its elements waits for which, as of its last rest.
    pub waits: Mutex<Vec<String>>,
    /// Iterations of each node.
    pub iterations: Vec<AtomicU64>,
    /// Items that went into each channel of the host's graph, and those inside.
    pub channels: Vec<(AtomicU64, AtomicU64)>,
}

/// The worker's thread.
#[derive(Debug)]
pub(super) struct Worker {
    pub shown: Arc<Shown>,
    requests: SyncSender<Request>,
    replies: Receiver<Reply>,
    /// The run's error, when it ended by itself.
    thread: Option<JoinHandle<Result<(), RunError>>>,
}

/// The ends of the rings at a side.
pub(super) struct Rings {
    /// Data slot, channel of this side's graph, words of an item.
    ends: Vec<(usize, usize, usize)>,
    direction: Direction,
}

impl Rings {
    /// Those that the side writes to, or reads from.
    pub fn new(crossings: &[Crossing], graph: &Graph, direction: Direction, worker: bool) -> Self {
        let mut ends = Vec::new();
        for (slot, crossing) in crossings.iter().enumerate() {
            if crossing.direction == direction {
                let channel = if worker { crossing.worker } else { crossing.card };
                ends.push((slot, channel, words(graph.channels[channel].bits)));
            }
        }
        Self { ends, direction }
    }

    fn queue<'l>(&self, link: &'l Link, slot: usize) -> WorkQueue<'l> {
        link.queue(slot, self.direction)
    }

    /// From channels into the rings; true where something went.
    pub fn send<M: Machine>(&self, link: &Link, run: &mut Run<'_, M>, item: &mut [u64]) -> bool {
        let mut moved = false;
        for (slot, channel, width) in &self.ends {
            let queue = self.queue(link, *slot);
            let from = run.channel_mut(*channel);
            if !from.is_empty() && queue.push_all(&mut item[..*width], |item| from.pop(item)) > 0 {
                queue.flush();
                moved = true;
            }
        }
        moved
    }

    /// From the rings into channels; true where something came.
    pub fn receive<M: Machine>(&self, link: &Link, run: &mut Run<'_, M>, item: &mut [u64]) -> bool {
        let mut moved = false;
        for (slot, channel, width) in &self.ends {
            let queue = self.queue(link, *slot);
            let to = run.channel_mut(*channel);
            let room = to.room();
            let came = queue.pop_all(&mut item[..*width], room, |item| {
                to.push(item);
            });
            if came > 0 {
                queue.release();
                moved = true;
            }
        }
        moved
    }

    /// True where none of the rings gives this side, which reads them, a reason to stay awake.
    pub fn arm_readers<M: Machine>(&self, link: &Link, run: &Run<'_, M>) -> bool {
        // A ring that cannot be emptied now is none: its channel's room comes from this side.
        let quiet = |end: &&(usize, usize, usize)| {
            run.channel(end.1).is_full() || self.queue(link, end.0).arm_reader()
        };
        self.ends.iter().filter(|end| !quiet(end)).count() == 0
    }

    /// As [`Rings::arm_readers`] for rings that this side writes to and found full.
    pub fn arm_writers<M: Machine>(&self, link: &Link, run: &Run<'_, M>) -> bool {
        let quiet = |end: &&(usize, usize, usize)| {
            run.channel(end.1).is_empty() || self.queue(link, end.0).arm_writer(end.2)
        };
        self.ends.iter().filter(|end| !quiet(end)).count() == 0
    }

    /// True where an entry waits for a channel that has room.
    pub fn can_come<M: Machine>(&self, link: &Link, run: &Run<'_, M>) -> bool {
        let comes = |end: &(usize, usize, usize)| {
            !run.channel(end.1).is_full() && !self.queue(link, end.0).is_empty()
        };
        self.ends.iter().any(comes)
    }

    /// True where an item waits for a ring that has room.
    pub fn can_go<M: Machine>(&self, link: &Link, run: &Run<'_, M>) -> bool {
        let goes = |end: &(usize, usize, usize)| {
            !run.channel(end.1).is_empty() && self.queue(link, end.0).has_room(end.2)
        };
        self.ends.iter().any(goes)
    }
}

/// Longest sleep without a look around.
const NAP: Duration = Duration::from_millis(500);

impl Worker {
    /// Starts the thread; it ends with the value. The nodes' numbers in the whole graph go with the
    /// state that is carried over.
    ///
    /// Errors: the system has no thread. An `.init` that does not end is told by [`Worker::ended`].
    pub fn start<M: Machine + Send + 'static>(
        (graph, machines): (Graph, Vec<M>),
        carried: Option<(Arc<Carried>, Vec<usize>)>,
        (link, mode): (Arc<Link>, Mode),
        crossings: &[Crossing],
    ) -> io::Result<Self> {
        let (requests, inbox) = sync_channel(1);
        let (outbox, replies) = sync_channel(1);
        let count = || AtomicU64::new(0);
        let shown = Arc::new(Shown {
            rest: AtomicU64::new(1),
            waits: Mutex::default(),
            iterations: graph.nodes.iter().map(|_| count()).collect(),
            channels: graph.channels.iter().map(|_| (count(), count())).collect(),
        });
        let down = Rings::new(crossings, &graph, Direction::Down, true);
        let up = Rings::new(crossings, &graph, Direction::Up, true);
        let seen = Arc::clone(&shown);
        let thread = std::thread::Builder::new().name("nf-worker".to_owned()).spawn(move || {
            let mut run = Run::new(&graph, machines)?;
            if let Some((carried, nodes)) = carried {
                for (at, node) in nodes.into_iter().enumerate() {
                    carried.apply(node, &graph.nodes[at].element, run.frame_mut(at));
                }
            }
            // It ends while it does not rest: the card goes on until it sees that the thread is gone.
            let ended = work(&mut run, (&link, mode), (&down, &up), &seen, (&inbox, &outbox));
            link.bus().wake_card();
            ended
        })?;
        Ok(Self { shown, requests, replies, thread: Some(thread) })
    }

    /// Asks and waits for the answer; none where the thread has ended.
    pub fn ask(&self, link: &Link, request: Request) -> Option<Reply> {
        self.requests.send(request).ok()?;
        link.bus().nudge_host(SIGNALS);
        self.replies.recv().ok()
    }

    /// True after [`Worker::end`], and after [`Worker::ended`] has told why.
    pub fn is_gone(&self) -> bool {
        self.thread.is_none()
    }

    /// Why the thread ended, if it did.
    ///
    /// # Panics
    /// Where the thread did, with its message.
    pub fn ended(&mut self) -> Option<RunError> {
        if !self.thread.as_ref()?.is_finished() {
            return None;
        }
        match self.thread.take()?.join() {
            Ok(outcome) => outcome.err(),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Ends the thread; the frames of its nodes.
    pub fn end(&mut self, link: &Link) -> Vec<Frame> {
        let Some(thread) = self.thread.take() else { return Vec::new() };
        let frames = match self.ask(link, Request::End) {
            Some(Reply::End(frames)) => frames,
            _ => Vec::new(),
        };
        let _ = thread.join();
        frames
    }
}

/// Turns without movement after which the worker sleeps: an element may count its turns.
const QUIET: u32 = 64;

/// Answers a request; false for the last one.
fn answer<M: Machine>(run: &mut Run<'_, M>, request: Request, outbox: &SyncSender<Reply>) -> bool {
    let reply = match request {
        Request::Signal(node, signal) => Reply::Signal(run.signal_now(node, signal)),
        Request::Reset(node) => Reply::Reset(run.reset(node)),
        Request::Look(node) => Reply::Look(Box::new(run.frame(node).clone())),
        Request::End => {
            let _ = outbox.send(Reply::End(run.take_frames()));
            return false;
        }
    };
    outbox.send(reply).is_ok()
}

/// The worker's loop.
fn work<M: Machine>(
    run: &mut Run<'_, M>,
    (link, mode): (&Link, Mode),
    (down, up): (&Rings, &Rings),
    shown: &Shown,
    (inbox, outbox): (&Receiver<Request>, &SyncSender<Reply>),
) -> Result<(), RunError> {
    let mut item = vec![0; run.widest()];
    let vectors = FIRST_DATA..FIRST_DATA + up.ends.len() + down.ends.len();
    let bells = || vectors.clone().chain([SIGNALS]);
    let mut quiet = 0;
    // A request that ended a rest.
    let mut asked = None;
    loop {
        let mut moved = up.receive(link, run, &mut item);
        let (rounds, round) = run.rounds(BATCH)?;
        // Of many rounds, only the last one may have moved nothing.
        moved |= round.fetched || round.wrote || rounds > 1;
        moved |= down.send(link, run, &mut item);
        for (node, shown) in shown.iterations.iter().enumerate() {
            shown.store(run.iterations(node), Ordering::Relaxed);
        }
        for (channel, (passed, inside)) in shown.channels.iter().enumerate() {
            passed.store(run.channel(channel).passed, Ordering::Relaxed);
            // Release: pairs with `Sides::rest`: who sees it sees that this side is awake.
            inside.store(run.channel(channel).len() as u64, Ordering::Release);
        }
        if let Some(request) = asked.take().or_else(|| inbox.try_recv().ok()) {
            if !answer(run, request, outbox) {
                return Ok(());
            }
            moved = true;
        }
        quiet = if moved { 0 } else { quiet + 1 };
        if quiet < QUIET {
            continue;
        }
        // Both: each ring that is armed stays so until its notice.
        let armed = up.arm_readers(link, run);
        if !(armed & down.arm_writers(link, run)) {
            continue;
        }
        let waits = if round.blocked { run.waits() } else { Vec::new() };
        *shown.waits.lock().unwrap_or_else(PoisonError::into_inner) = waits;
        // Release: who sees the rest sees all that was done before it.
        shown.rest.fetch_add(1, Ordering::Release);
        // A card that waits for this side to rest looks again.
        link.bus().wake_card();
        match mode {
            Mode::Interrupt => {
                let list: Vec<_> = bells().map(|vector| link.bus().host_bell(vector)).collect();
                let _ = sleep_on(&list, NAP);
                // What they announced is looked for after this; what comes now rings again.
                bells().for_each(|vector| link.bus().clear_host(vector));
            }
            Mode::Poll => {
                while !up.can_come(link, run) && !down.can_go(link, run) {
                    match inbox.try_recv() {
                        Ok(request) => {
                            asked = Some(request);
                            break;
                        }
                        Err(TryRecvError::Disconnected) => return Ok(()),
                        Err(TryRecvError::Empty) => std::thread::yield_now(),
                    }
                }
            }
        }
        // Before an entry is taken or put: each of these is a release, so that a card that sees it
        // sees that the rest is over.
        shown.rest.fetch_add(1, Ordering::Relaxed);
        quiet = 0;
    }
}
