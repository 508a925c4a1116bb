//! A graph at work on two sides: the card's elements on the caller's thread, the `host` elements on a
//! worker's, joined through the link of [`pcie`](crate::pcie).
//!
//! A graph without `host` elements has one side and no link. Nodes and channels are named by their
//! numbers in the whole graph; [`mod@split`] says where each of them is.
//!
//! Invariant: an item is in a channel of one side, in a ring, or in a channel of the other side;
//! neither side drops one. The graph is at its end only where the worker rested in one and the same
//! rest before and after a turn of the card that moved nothing, and no entry of a ring can move:
//! nothing was on its way then, and only the caller can wake the worker.

pub mod split;
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
use split::{Place, Split, TooManyCrossings, split};
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

/// The link to `host` elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkOptions {
    /// How the worker learns of items.
    pub mode: Mode,
    /// How fast the link is.
    pub pace: Pace,
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
    /// The plan of a graph: in two where it has `host` elements.
    ///
    /// Errors: more channels cross than the link has slots.
    pub fn of(whole: &'g Graph) -> Result<Self, TooManyCrossings> {
        let split = whole.nodes.iter().any(|node| node.host).then(|| split(whole)).transpose()?;
        Ok(Self { whole, split })
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

/// Machines for both sides of a plan.
#[derive(Debug)]
pub struct Machines<M> {
    card: Vec<M>,
    host: Vec<M>,
}

impl<M> Machines<M> {
    /// Makes them.
    ///
    /// Errors: the code generator's.
    pub fn make(plan: &Plan<'_>, make: Make<'_, M>) -> Result<Self, NativeError> {
        let host = plan.split().map(|split| make(&split.host)).transpose()?;
        Ok(Self { card: make(plan.card())?, host: host.unwrap_or_default() })
    }
}

/// The host's side.
struct Host {
    worker: Worker,
    link: Arc<Link>,
    down: Rings,
    up: Rings,
}

/// A graph at work.
pub struct Sides<'p, M> {
    plan: &'p Plan<'p>,
    card: Run<'p, M>,
    host: Option<Host>,
    item: Vec<u64>,
}

impl<M> std::fmt::Debug for Sides<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sides").field("host", &self.host.is_some()).finish_non_exhaustive()
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
        let whole_of = |host: bool| -> Vec<usize> {
            let nodes = plan.whole().nodes.iter().enumerate();
            nodes.filter(|(_, node)| node.host == host).map(|(at, _)| at).collect()
        };
        if let Some(carried) = &carried {
            for (at, node) in whole_of(false).into_iter().enumerate() {
                carried.apply(node, &plan.card().nodes[at].element, card.frame_mut(at));
            }
        }
        let host = match plan.split() {
            None => None,
            Some(split) => {
                let link = Arc::new(Link::new(options.pace)?);
                let both = (Arc::clone(&link), options.mode);
                let carried = carried.map(|carried| (carried, whole_of(true)));
                let work = (split.host.clone(), machines.host);
                let worker = Worker::start(work, carried, both, &split.crossings)
                    .map_err(SidesError::Thread)?;
                let rings = |direction| Rings::new(&split.crossings, &split.card, direction, false);
                let (down, up) = (rings(Direction::Down), rings(Direction::Up));
                Some(Host { worker, link, down, up })
            }
        };
        let item = vec![0; card.widest()];
        Ok(Self { plan, card, host, item })
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

    fn place(&self, node: usize) -> Place {
        self.plan.split().map_or(Place::Card(node), |split| split.nodes[node])
    }

    /// Moves items between the card's channels and the rings.
    fn cross(&mut self) -> Result<bool, RunError> {
        let Some(host) = &mut self.host else { return Ok(false) };
        if let Some(error) = host.worker.ended() {
            return Err(error);
        }
        let received = host.down.receive(&host.link, &mut self.card, &mut self.item);
        Ok(host.up.send(&host.link, &mut self.card, &mut self.item) | received)
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

    /// The number of the worker's rest, where it rests and no entry of a ring can move. Where it is
    /// the same before and after a turn of the card that moved nothing, nothing moves any more.
    fn rest(&self) -> Option<u64> {
        let (Some(host), Some(split)) = (&self.host, self.plan.split()) else { return Some(0) };
        if host.worker.is_gone() {
            return Some(0);
        }
        let number = || host.worker.shown.rest.load(Ordering::Acquire);
        let rest = number();
        let settled = split.crossings.iter().enumerate().all(|(slot, crossing)| {
            let ring = host.link.queue(slot, crossing.direction);
            let inside = host.worker.shown.channels[crossing.host].1.load(Ordering::Acquire);
            let depth = split.host.channels[crossing.host].depth;
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
        let (Some(host), Some(split)) = (&self.host, self.plan.split()) else { return waits };
        let of_host = host.worker.shown.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.extend(of_host.iter().cloned());
        for crossing in &split.crossings {
            let inside = match crossing.direction {
                Direction::Up => self.card.channel(crossing.card).len() as u64,
                Direction::Down => {
                    host.worker.shown.channels[crossing.host].1.load(Ordering::Acquire)
                }
            };
            if inside > 0 {
                let name = &split.card.channels[crossing.card].name;
                waits.push(format!("{name} waits for room in the link ({RING} entries)"));
            }
        }
        waits
    }

    /// Readable when the host's side has something for the card.
    #[must_use]
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.host.as_ref().map(|host| host.link.bus().card_bell())
    }

    /// Asks the rings for notices; true where the card may sleep until its bell.
    #[must_use]
    pub fn may_sleep(&self) -> bool {
        let Some(host) = &self.host else { return true };
        host.link.bus().clear_card();
        let armed = host.down.arm_readers(&host.link, &self.card);
        armed & host.up.arm_writers(&host.link, &self.card)
    }

    /// Rounds until nothing moves on either side; `between` serves the world's ends. As
    /// [`Run::settle`].
    ///
    /// Errors: a handler that does not end; a deadlock.
    pub fn settle(
        &mut self,
        quiet: u32,
        mut between: impl FnMut(&mut Run<'p, M>) -> bool,
    ) -> Result<u64, RunError> {
        if self.host.is_none() {
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
            if rest.is_none()
                && may_sleep
                && let Some(bell) = self.bell()
            {
                let _ = sleep_on(&[bell], Duration::from_millis(50));
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
        let mut host = match &mut self.host {
            Some(host) => host.worker.end(&host.link),
            None => Vec::new(),
        }
        .into_iter();
        let nodes = self.plan.whole().nodes.iter().enumerate();
        nodes
            .map(|(node, described)| {
                let frame = match self.place(node) {
                    Place::Card(_) => card.next(),
                    Place::Host(_) => host.next(),
                };
                frame.unwrap_or_else(|| Frame::new(&described.element))
            })
            .collect()
    }

    /// Sets an element back to how it began; what waits in its channels stays there.
    ///
    /// Errors: an `.init` that does not end.
    pub fn reset(&mut self, node: usize) -> Result<(), RunError> {
        match (self.place(node), &self.host) {
            (Place::Card(at), _) => self.card.reset(at),
            (Place::Host(at), Some(host)) => {
                match host.worker.ask(&host.link, Request::Reset(at)) {
                    Some(Reply::Reset(outcome)) => outcome,
                    _ => Ok(()),
                }
            }
            (Place::Host(_), None) => Ok(()),
        }
    }

    /// Variables and memories of a node as they are now.
    #[must_use]
    pub fn frame(&self, node: usize) -> Option<Frame> {
        match (self.place(node), &self.host) {
            (Place::Card(at), _) => Some(self.card.frame(at).clone()),
            (Place::Host(at), Some(host)) => match host.worker.ask(&host.link, Request::Look(at)) {
                Some(Reply::Look(frame)) => Some(*frame),
                _ => None,
            },
            (Place::Host(_), None) => None,
        }
    }

    /// Iterations of a node so far.
    #[must_use]
    pub fn iterations(&self, node: usize) -> u64 {
        match (self.place(node), &self.host) {
            (Place::Card(at), _) => self.card.iterations(at),
            (Place::Host(at), Some(host)) => {
                host.worker.shown.iterations[at].load(Ordering::Relaxed)
            }
            (Place::Host(_), None) => 0,
        }
    }

    fn channel_place(&self, channel: usize) -> Place {
        self.plan.split().map_or(Place::Card(channel), |split| split.channels[channel])
    }

    /// Items that went into a channel so far.
    #[must_use]
    pub fn passed(&self, channel: usize) -> u64 {
        match (self.channel_place(channel), &self.host) {
            (Place::Card(at), _) => self.card.channel(at).passed,
            (Place::Host(at), Some(host)) => {
                host.worker.shown.channels[at].0.load(Ordering::Relaxed)
            }
            (Place::Host(_), None) => 0,
        }
    }

    /// Items inside a channel: of one that crosses, in both halves and in the ring.
    #[must_use]
    pub fn waiting(&self, channel: usize) -> usize {
        let (Some(split), Some(host)) = (self.plan.split(), &self.host) else {
            return self.card.channel(channel).len();
        };
        let of_host = |at: usize| {
            let inside = host.worker.shown.channels[at].1.load(Ordering::Relaxed);
            usize::try_from(inside).unwrap_or(0)
        };
        let place = split.channels[channel];
        let crossing = split.crossings.iter().position(|crossing| match place {
            Place::Card(at) => crossing.direction == Direction::Up && crossing.card == at,
            Place::Host(at) => crossing.direction == Direction::Down && crossing.host == at,
        });
        match (crossing, place) {
            (Some(slot), _) => {
                let crossing = split.crossings[slot];
                let ring = host.link.queue(slot, crossing.direction).len();
                self.card.channel(crossing.card).len() + ring + of_host(crossing.host)
            }
            (None, Place::Card(at)) => self.card.channel(at).len(),
            (None, Place::Host(at)) => of_host(at),
        }
    }

    /// Which element waits for which on the card: see [`Run::waits`].
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        self.card.waits()
    }

    /// Operations on the link, where there is one.
    #[must_use]
    pub fn link(&self) -> Option<Counts> {
        self.host.as_ref().map(|host| host.link.counts())
    }
}

impl<M: Machine + Send + 'static> Signalled for Sides<'_, M> {
    fn signal_now(&mut self, node: usize, signal: Signal) -> Result<Signal, RunError> {
        match (self.place(node), &mut self.host) {
            (Place::Card(at), _) => self.card.signal_now(at, signal),
            (Place::Host(at), Some(host)) => {
                match host.worker.ask(&host.link, Request::Signal(at, signal)) {
                    Some(Reply::Signal(answer)) => answer,
                    _ => host.worker.ended().map_or(Ok(signal), Err),
                }
            }
            (Place::Host(_), None) => Ok(signal),
        }
    }
}

impl<M> Drop for Sides<'_, M> {
    fn drop(&mut self) {
        if let Some(host) = &mut self.host {
            host.worker.end(&host.link);
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
