//! A graph at work on several sides: the card's elements on the caller's thread, the `host` elements on
//! a worker's, and more workers where more threads pay ([`mod@spread`]); each worker is joined to the
//! card through a link of [`pcie`](crate::pcie).
//!
//! A graph without `host` elements on one thread has one side and no link. Nodes and channels are
//! named by their numbers in the whole graph; [`mod@split`] says where each of them is.
//!
//! Invariant: an item is in a channel of one side, in a ring, or in a channel of another side; no
//! side drops one. The graph is at its end only where every worker rested in one and the same rest
//! before and after a turn of the card that moved nothing, and no entry of a ring can move: nothing was
//! on its way then, and only the caller can wake a worker.

pub mod split;
pub mod spread;
mod worker;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use beeline_ir::graph::Graph;
use beeline_ir::interpreter::Frame;
use beeline_ir::run::{BATCH, Interpreter, Machine, Moved, Run, RunError, Signal};
use beeline_native::{NativeError, NativeMachine, Program};

use crate::functions::Signalled;
use crate::pcie::bus::{BusError, Counts, Direction, Pace, sleep_on};
use crate::pcie::slot::Mode;
use crate::pcie::{Link, RING};
use crate::reload::Carried;
use split::{Part, Place, Split, TooManyCrossings, split};
use spread::spread;
use worker::{Reply, Request, Rings, Worker};

/// Makes machines for a graph.
pub type Make<'m, M> = &'m (dyn Fn(&Graph) -> Result<Vec<M>, NativeError> + Sync);

/// Machine code for a graph: a [`Make`].
///
/// Errors: the code generator's.
pub fn native(graph: &Graph) -> Result<Vec<NativeMachine>, NativeError> {
    Ok(Program::compile(graph)?.machines())
}

/// The tree walker for a graph: a [`Make`].
///
/// Errors: none.
pub fn walked(graph: &Graph) -> Result<Vec<Interpreter>, NativeError> {
    Ok(vec![Interpreter; graph.nodes.len()])
}

/// The workers and their links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// How a worker learns of items.
    pub mode: Mode,
    /// How fast the link to `host` elements is.
    pub pace: Pace,
    /// Threads for the elements that are not on the host, at most; fewer where more do not pay.
    pub threads: usize,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self { mode: Mode::default(), pace: Pace::default(), threads: 1 }
    }
}

/// A graph could not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SidesError {
    /// Channels between the sides.
    #[error(transparent)]
    Crossings(#[from] TooManyCrossings),
    /// Machine code.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// An element.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The link.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The worker's thread.
    #[error("the thread of the host elements: {0}")]
    Thread(io::Error),
}

/// What of a graph runs where.
#[derive(Clone, Debug)]
pub struct Plan<'g> {
    whole: &'g Graph,
    split: Option<Split>,
}

impl<'g> Plan<'g> {
    /// The plan of a graph on one thread, and one for its `host` elements.
    ///
    /// Errors: more channels cross than a link has slots.
    pub fn of(whole: &'g Graph) -> Result<Self, TooManyCrossings> {
        Self::threaded(whole, 1)
    }

    /// The plan of a graph on at most so many threads, and one for its `host` elements.
    ///
    /// Errors: as for [`Plan::of`].
    pub fn threaded(whole: &'g Graph, threads: usize) -> Result<Self, TooManyCrossings> {
        let (away, workers) = spread(whole, threads);
        Self::away(whole, &away, workers)
    }

    /// The plan where each node is run by a worker of so many, or by the card.
    ///
    /// Errors: as for [`Plan::of`].
    ///
    /// # Panics
    /// A worker past the last one.
    pub fn away(
        whole: &'g Graph,
        away: &[Option<usize>],
        workers: usize,
    ) -> Result<Self, TooManyCrossings> {
        let split = (workers > 0).then(|| split(whole, away, workers)).transpose()?;
        Ok(Self { whole, split })
    }

    /// Threads that it takes.
    #[must_use]
    pub fn threads(&self) -> usize {
        1 + self.parts().len()
    }

    fn parts(&self) -> &[Part] {
        self.split.as_ref().map_or(&[], |split| &split.workers)
    }

    /// The whole graph.
    #[must_use]
    pub fn whole(&self) -> &'g Graph {
        self.whole
    }

    /// What runs on the card. The world's ends come first in it, in the whole graph's order.
    #[must_use]
    pub fn card(&self) -> &Graph {
        self.split.as_ref().map_or(self.whole, |split| &split.card)
    }

    fn place(&self, node: usize) -> Place {
        self.split.as_ref().map_or(Place::Card(node), |split| split.nodes[node])
    }

    /// The cut, where there is one.
    #[must_use]
    pub fn split(&self) -> Option<&Split> {
        self.split.as_ref()
    }

    /// The channel of the card's graph of the world's input or output `at`.
    #[must_use]
    pub fn world(&self, input: bool, at: usize) -> usize {
        let ends = if input { &self.card().inputs } else { &self.card().outputs };
        ends[at].channel
    }
}

/// Machines for every side of a plan.
#[derive(Debug)]
pub struct Machines<M> {
    card: Vec<M>,
    workers: Vec<Vec<M>>,
}

impl<M> Machines<M> {
    /// Makes them.
    ///
    /// Errors: the code generator's.
    pub fn make(plan: &Plan<'_>, make: Make<'_, M>) -> Result<Self, NativeError> {
        let workers =
            plan.parts().iter().map(|part| make(&part.graph)).collect::<Result<_, _>>()?;
        Ok(Self { card: make(plan.card())?, workers })
    }
}

/// Machine code of a plan's parts, made ahead: its [`Ahead::machines`] are a [`Make`] that takes no
/// time.
#[derive(Debug)]
pub struct Ahead(Vec<(Vec<String>, Program)>);

fn names(graph: &Graph) -> Vec<String> {
    graph.nodes.iter().map(|node| node.name.clone()).collect()
}

impl Ahead {
    /// Compiles every part.
    ///
    /// Errors: the code generator's.
    pub fn of(plan: &Plan<'_>) -> Result<Self, NativeError> {
        let workers = plan.parts().iter().map(|part| &part.graph);
        let compile = |graph: &Graph| Ok((names(graph), Program::compile(graph)?));
        workers.chain([plan.card()]).map(compile).collect::<Result<_, _>>().map(Self)
    }

    /// Machines for one of the parts; any other graph is compiled now.
    ///
    /// Errors: the code generator's.
    pub fn machines(&self, graph: &Graph) -> Result<Vec<NativeMachine>, NativeError> {
        let wanted = names(graph);
        match self.0.iter().find(|(names, _)| *names == wanted) {
            Some((_, program)) => Ok(program.machines()),
            None => native(graph),
        }
    }
}

/// A worker's side, as the card sees it.
struct Away {
    worker: Worker,
    link: Arc<Link>,
    down: Rings,
    up: Rings,
}

/// A graph at work.
pub struct Sides<'p, M> {
    plan: &'p Plan<'p>,
    card: Run<'p, M>,
    away: Vec<Away>,
    item: Vec<u64>,
}

impl<M> std::fmt::Debug for Sides<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sides").field("workers", &self.away.len()).finish_non_exhaustive()
    }
}

impl<'p, M: Machine + Send + 'static> Sides<'p, M> {
    /// Starts every element, with the state that is `carried` over from another graph.
    ///
    /// Errors: see [`SidesError`].
    pub fn start(
        plan: &'p Plan<'p>,
        machines: Machines<M>,
        options: LinkOptions,
        carried: Option<Arc<Carried>>,
    ) -> Result<Self, SidesError> {
        let mut card = Run::new(plan.card(), machines.card)?;
        if let Some(carried) = &carried {
            let places = plan.whole().nodes.iter().enumerate();
            let here = places.filter_map(|(node, _)| match plan.place(node) {
                Place::Card(at) => Some((node, at)),
                Place::Worker(..) => None,
            });
            for (node, at) in here {
                carried.apply(node, &plan.card().nodes[at].element, card.frame_mut(at));
            }
        }
        let mut away = Vec::new();
        for (part, machines) in plan.parts().iter().zip(machines.workers) {
            // Between threads nothing is emulated.
            let host = part.graph.nodes.iter().any(|node| node.host);
            let link = Arc::new(Link::new(if host { options.pace } else { Pace::default() })?);
            let both = (Arc::clone(&link), options.mode);
            let carried = carried.clone().map(|carried| (carried, part.nodes.clone()));
            let work = (part.graph.clone(), machines);
            let worker =
                Worker::start(work, carried, both, &part.crossings).map_err(SidesError::Thread)?;
            let rings = |direction| Rings::new(&part.crossings, plan.card(), direction, false);
            let (down, up) = (rings(Direction::Down), rings(Direction::Up));
            away.push(Away { worker, link, down, up });
        }
        let item = vec![0; card.widest()];
        Ok(Self { plan, card, away, item })
    }

    /// The plan it runs by.
    #[must_use]
    pub fn plan(&self) -> &'p Plan<'p> {
        self.plan
    }

    /// The card's side, for the world's ends: see [`Plan::world`].
    pub fn card(&mut self) -> &mut Run<'p, M> {
        &mut self.card
    }

    /// Moves items between the card's channels and the rings.
    fn cross(&mut self) -> Result<bool, RunError> {
        let mut moved = false;
        for away in &mut self.away {
            if let Some(error) = away.worker.ended() {
                return Err(error);
            }
            moved |= away.down.receive(&away.link, &mut self.card, &mut self.item);
        }
        for away in &self.away {
            moved |= away.up.send(&away.link, &mut self.card, &mut self.item);
        }
        Ok(moved)
    }

    /// Rounds of the card's side, as [`Run::rounds`], and what crosses the link before and after.
    ///
    /// Errors: a handler that does not end, on either side.
    pub fn rounds(&mut self, most: u64) -> Result<(u64, Moved), RunError> {
        let before = self.cross()?;
        let (rounds, mut moved) = self.card.rounds(most)?;
        moved.fetched |= before;
        moved.wrote |= self.cross()?;
        Ok((rounds, moved))
    }

    /// The sum of the numbers of the workers' rests, where all of them rest and no entry of a ring can
    /// move. Numbers only grow: where the sum is the same before and after a turn of the card that moved
    /// nothing, nothing moves any more.
    fn rest(&self) -> Option<u64> {
        let mut sum = 0;
        for (away, part) in self.away.iter().zip(self.plan.parts()) {
            sum += self.rest_of(away, part)?;
        }
        Some(sum)
    }

    fn rest_of(&self, away: &Away, part: &Part) -> Option<u64> {
        if away.worker.is_gone() {
            return Some(0);
        }
        let number = || away.worker.shown.rest.load(Ordering::Acquire);
        let rest = number();
        let settled = part.crossings.iter().enumerate().all(|(slot, crossing)| {
            let ring = away.link.queue(slot, crossing.direction);
            let inside = away.worker.shown.channels[crossing.worker].1.load(Ordering::Acquire);
            let depth = part.graph.channels[crossing.worker].depth;
            match crossing.direction {
                Direction::Up => ring.is_empty() || inside >= u64::from(depth),
                Direction::Down => {
                    let channel = self.card.channel(crossing.card);
                    let stays = ring.is_empty() || channel.is_full();
                    stays && (inside == 0 || !ring.has_room(channel.width()))
                }
            }
        });
        // Last, behind loads that acquire: none of them saw what came after this rest.
        (rest % 2 == 0 && settled && number() == rest).then_some(rest)
    }

    /// Which element waits for which, and which channels wait for room in a ring, at a rest.
    fn stuck(&self, blocked: bool) -> Vec<String> {
        let mut waits = if blocked { self.card.waits() } else { Vec::new() };
        for (away, part) in self.away.iter().zip(self.plan.parts()) {
            let theirs = away.worker.shown.waits.lock().unwrap_or_else(PoisonError::into_inner);
            waits.extend(theirs.iter().cloned());
            for crossing in &part.crossings {
                let inside = match crossing.direction {
                    Direction::Up => self.card.channel(crossing.card).len() as u64,
                    Direction::Down => {
                        away.worker.shown.channels[crossing.worker].1.load(Ordering::Acquire)
                    }
                };
                if inside > 0 {
                    let name = &self.plan.card().channels[crossing.card].name;
                    waits.push(format!("{name} waits for room in the link ({RING} entries)"));
                }
            }
        }
        waits
    }

    /// Readable when a worker has something for the card.
    pub fn bells(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.away.iter().map(|away| away.link.bus().card_bell())
    }

    /// Asks the rings for notices; true where the card may sleep until a bell.
    #[must_use]
    pub fn may_sleep(&self) -> bool {
        let mut all = true;
        // Each: a ring that is armed stays so until its notice.
        for away in &self.away {
            away.link.bus().clear_card();
            all &= away.down.arm_readers(&away.link, &self.card);
            all &= away.up.arm_writers(&away.link, &self.card);
        }
        all
    }

    /// Rounds until nothing moves on any side; `between` serves the world's ends. As
    /// [`Run::settle`].
    ///
    /// Errors: a handler that does not end; a deadlock.
    pub fn settle(
        &mut self,
        quiet: u32,
        mut between: impl FnMut(&mut Run<'p, M>) -> bool,
    ) -> Result<u64, RunError> {
        if self.away.is_empty() {
            return self.card.settle(quiet, u64::MAX, between);
        }
        let (mut still, mut done, mut rest) = (0, 0, None);
        loop {
            let (rounds, moved) = self.rounds(BATCH)?;
            done += rounds;
            let outside = between(&mut self.card);
            // Of many rounds, only the last one may have moved nothing.
            if moved.fetched || moved.wrote || outside || rounds > 1 {
                (still, rest) = (0, None);
                continue;
            }
            still += 1;
            if still < quiet {
                continue;
            }
            // Before the look at the rest: a worker that rests from now on rings the bell.
            let may_sleep = self.may_sleep();
            let now = self.rest();
            if now.is_some() && now == rest {
                let waits = self.stuck(moved.blocked);
                return if waits.is_empty() { Ok(done) } else { Err(RunError::Deadlock(waits)) };
            }
            rest = now;
            if rest.is_none() && may_sleep {
                let bells: Vec<_> = self.bells().collect();
                let _ = sleep_on(&bells, Duration::from_millis(50));
            }
        }
    }

    /// Lets what is inside come out, and takes the frames of the whole graph's nodes: `between`
    /// serves the world's outputs. The graph is at an end after this, unless it gives an error.
    ///
    /// Errors: what could not come out, by channel, after `limit`.
    pub fn drain(
        &mut self,
        limit: Duration,
        mut between: impl FnMut(&mut Run<'p, M>) -> bool,
    ) -> Result<(), DrainError> {
        let deadline = Instant::now() + limit;
        let (mut still, mut rest) = (0, None);
        loop {
            let (rounds, moved) = self.rounds(BATCH)?;
            let outside = between(&mut self.card);
            let moves = moved.fetched || moved.wrote || outside || rounds > 1;
            still = if moves { 0 } else { still + 1 };
            // As in `settle`: the same rest before and after this turn.
            let now = if still >= DRAINED { self.rest() } else { None };
            if now.is_some() && now == rest {
                let left = self.left();
                return if left.is_empty() { Ok(()) } else { Err(DrainError::Left(left)) };
            }
            rest = now;
            if Instant::now() >= deadline {
                let mut left = self.left();
                left.push(format!("{} ms have passed", limit.as_millis()));
                return Err(DrainError::Left(left));
            }
            if still >= DRAINED {
                std::thread::yield_now();
            }
        }
    }

    /// Channels that hold items, and inputs of elements that do.
    fn left(&self) -> Vec<String> {
        let graph = self.plan.whole();
        let mut left = Vec::new();
        for (at, channel) in graph.channels.iter().enumerate() {
            let inside = self.waiting(at);
            if inside > 0 {
                left.push(format!("{} holds {inside} of {} items", channel.name, channel.depth));
            }
        }
        left
    }

    /// Ends the graph; the frames of the whole graph's nodes as they are.
    pub fn into_frames(mut self) -> Vec<Frame> {
        let mut card = self.card.take_frames().into_iter();
        let frames = |away: &mut Away| away.worker.end(&away.link).into_iter();
        let mut workers: Vec<_> = self.away.iter_mut().map(frames).collect();
        let nodes = self.plan.whole().nodes.iter().enumerate();
        nodes
            .map(|(node, described)| {
                let frame = match self.plan.place(node) {
                    Place::Card(_) => card.next(),
                    Place::Worker(worker, _) => workers[worker].next(),
                };
                frame.unwrap_or_else(|| Frame::new(&described.element))
            })
            .collect()
    }

    /// Asks a worker; none where its thread has ended.
    fn ask(&self, worker: usize, request: Request) -> Option<Reply> {
        let away = &self.away[worker];
        away.worker.ask(&away.link, request)
    }

    /// Sets an element back to how it began; what waits in its channels stays there.
    ///
    /// Errors: an `.init` that does not end.
    pub fn reset(&mut self, node: usize) -> Result<(), RunError> {
        match self.plan.place(node) {
            Place::Card(at) => self.card.reset(at),
            Place::Worker(worker, at) => match self.ask(worker, Request::Reset(at)) {
                Some(Reply::Reset(outcome)) => outcome,
                _ => Ok(()),
            },
        }
    }

    /// Variables and memories of a node as they are now.
    #[must_use]
    pub fn frame(&self, node: usize) -> Option<Frame> {
        match self.plan.place(node) {
            Place::Card(at) => Some(self.card.frame(at).clone()),
            Place::Worker(worker, at) => match self.ask(worker, Request::Look(at)) {
                Some(Reply::Look(frame)) => Some(*frame),
                _ => None,
            },
        }
    }

    /// Iterations of a node so far.
    #[must_use]
    pub fn iterations(&self, node: usize) -> u64 {
        match self.plan.place(node) {
            Place::Card(at) => self.card.iterations(at),
            Place::Worker(worker, at) => {
                self.away[worker].worker.shown.iterations[at].load(Ordering::Relaxed)
            }
        }
    }

    fn channel_place(&self, channel: usize) -> Place {
        self.plan.split().map_or(Place::Card(channel), |split| split.channels[channel])
    }

    /// Items that went into a channel so far.
    #[must_use]
    pub fn passed(&self, channel: usize) -> u64 {
        match self.channel_place(channel) {
            Place::Card(at) => self.card.channel(at).passed,
            Place::Worker(worker, at) => {
                self.away[worker].worker.shown.channels[at].0.load(Ordering::Relaxed)
            }
        }
    }

    /// Items inside a channel: of one that crosses, in its halves and in the rings.
    #[must_use]
    pub fn waiting(&self, channel: usize) -> usize {
        let inside = |worker: usize, at: usize| {
            let inside = self.away[worker].worker.shown.channels[at].1.load(Ordering::Relaxed);
            usize::try_from(inside).unwrap_or(0)
        };
        let card = match self.channel_place(channel) {
            Place::Card(at) => at,
            Place::Worker(worker, at) => {
                let crossings = &self.plan.parts()[worker].crossings;
                let down = |crossing: &&split::Crossing| {
                    crossing.direction == Direction::Down && crossing.worker == at
                };
                match crossings.iter().find(down) {
                    Some(crossing) => crossing.card,
                    None => return inside(worker, at),
                }
            }
        };
        let mut all = self.card.channel(card).len();
        for (worker, part) in self.plan.parts().iter().enumerate() {
            for (slot, crossing) in part.crossings.iter().enumerate() {
                if crossing.card == card {
                    all += self.away[worker].link.queue(slot, crossing.direction).len();
                    all += inside(worker, crossing.worker);
                }
            }
        }
        all
    }

    /// Which element waits for which on the card: see [`Run::waits`].
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        self.card.waits()
    }

    /// Operations on the link to the `host` elements, where there are any.
    #[must_use]
    pub fn link(&self) -> Option<Counts> {
        let of_host = |part: &Part| part.graph.nodes.iter().any(|node| node.host);
        let at = self.plan.parts().iter().position(of_host)?;
        Some(self.away[at].link.counts())
    }
}

impl<M: Machine + Send + 'static> Signalled for Sides<'_, M> {
    fn signal_now(&mut self, node: usize, signal: Signal) -> Result<Signal, RunError> {
        match self.plan.place(node) {
            Place::Card(at) => self.card.signal_now(at, signal),
            Place::Worker(worker, at) => match self.ask(worker, Request::Signal(at, signal)) {
                Some(Reply::Signal(answer)) => answer,
                _ => self.away[worker].worker.ended().map_or(Ok(signal), Err),
            },
        }
    }
}

impl<M> Drop for Sides<'_, M> {
    fn drop(&mut self) {
        for away in &mut self.away {
            away.worker.end(&away.link);
        }
    }
}

/// Turns without movement after which nothing comes out any more.
const DRAINED: u32 = 256;

/// A graph could not be emptied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DrainError {
    /// A handler.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Items that stay.
    #[error("packets stay inside: {}", .0.join("; "))]
    Left(Vec<String>),
}
