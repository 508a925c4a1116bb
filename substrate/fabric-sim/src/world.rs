//! The world: nodes, time, faults.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beeline_env::{Clock, ManualClock};
use beeline_fabric::QueuePairState;

use crate::objects::SimDevice;
use crate::options::{PlantedBug, SimOptions};
use crate::registry::{Incarnation, Registry};
use crate::state::{Event, NodeRecord, State};
use crate::trace::{TraceKind, TraceRecord};

/// A simulated network of nodes in virtual time. Cloning gives another handle on the same world.
///
/// Use a world from one thread: then one seed and one sequence of calls give one trace. (The
/// handle is `Send + Sync` because devices are; calls from several threads are safe, but their
/// order is the scheduler's.)
#[derive(Clone)]
pub struct SimWorld {
    state: Arc<Mutex<State>>,
    clock: Arc<ManualClock>,
    registry: Arc<Registry>,
}

impl Debug for SimWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimWorld").field("now_ns", &self.now_ns()).finish_non_exhaustive()
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl SimWorld {
    /// A world without nodes at virtual time 0.
    #[must_use]
    pub fn new(seed: u64, options: SimOptions) -> Self {
        let state = State::new(seed, options);
        let (clock, registry) = (Arc::clone(&state.clock), Arc::clone(&state.registry));
        Self { state: Arc::new(Mutex::new(state)), clock, registry }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// The device of `node`, which begins to exist when first asked for. After a crash, the
    /// device of the node's next life (see [`SimWorld::restart`]).
    #[must_use]
    pub fn device(&self, node: u32) -> Arc<SimDevice> {
        let generation = {
            let mut state = self.lock();
            let fresh = NodeRecord { generation: 0, alive: true, paused: false };
            state.nodes.entry(node).or_insert(fresh).generation
        };
        Arc::new(SimDevice::new(self.clone(), Incarnation { node, generation }))
    }

    /// The world's clock; shared with everything that simulates in this world.
    #[must_use]
    pub fn clock(&self) -> Arc<ManualClock> {
        Arc::clone(&self.clock)
    }

    /// Virtual nanoseconds since the world began.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    /// Lets the next event happen, moving time to it. False when nothing will ever happen.
    #[must_use = "false means that nothing will ever happen by itself"]
    pub fn step(&self) -> bool {
        self.step_until(u64::MAX)
    }

    /// Lets the next event happen if it does so within `limit`; else lets `limit` pass and returns
    /// false.
    pub fn step_within(&self, limit: Duration) -> bool {
        let end = self.now_ns().saturating_add(nanoseconds(limit));
        let happened = self.step_until(end);
        if !happened {
            self.clock.advance_to_ns(end);
        }
        happened
    }

    /// Lets the next event happen if it does so at `limit_ns` or before.
    pub(crate) fn step_until(&self, limit_ns: u64) -> bool {
        let mut state = self.lock();
        let event = state.pop_event(limit_ns);
        let happened = event.is_some();
        if let Some(event) = event {
            state.handle(event);
        }
        happened
    }

    /// Lets everything happen that is due now.
    pub(crate) fn deliver_due(&self) {
        let now = self.now_ns();
        while self.step_until(now) {}
    }

    /// Lets `duration` pass and everything in it happen.
    pub fn run_for(&self, duration: Duration) {
        let end = self.now_ns().saturating_add(nanoseconds(duration));
        while self.step_until(end) {}
        self.clock.advance_to_ns(end);
    }

    /// Steps until `done`, at most for `limit` of virtual time; whether it was done.
    pub fn run_until(&self, limit: Duration, mut done: impl FnMut() -> bool) -> bool {
        let end = self.now_ns().saturating_add(nanoseconds(limit));
        loop {
            if done() {
                return true;
            }
            if !self.step_until(end) {
                self.clock.advance_to_ns(end);
                return done();
            }
        }
    }

    /// Steps until nothing is left to happen, at most `limit` of virtual time.
    pub fn run_until_idle(&self, limit: Duration) {
        let end = self.now_ns().saturating_add(nanoseconds(limit));
        while self.step_until(end) {}
    }

    /// Cuts the link between two nodes: packets wait until [`SimWorld::heal`], and requests whose
    /// time-out passes meanwhile fail.
    pub fn partition(&self, one: u32, other: u32) {
        let mut state = self.lock();
        state.cut.insert((one.min(other), one.max(other)));
        state.record(TraceKind::Fault, one, 1);
    }

    /// Mends the link between two nodes.
    pub fn heal(&self, one: u32, other: u32) {
        let mut state = self.lock();
        state.cut.remove(&(one.min(other), one.max(other)));
        state.record(TraceKind::Fault, one, 2);
        state.release_held();
    }

    /// Mends all links.
    pub fn heal_all(&self) {
        let mut state = self.lock();
        state.cut.clear();
        state.record(TraceKind::Fault, 0, 3);
        state.release_held();
    }

    /// Freezes a node with everything in it; what was sent to it waits.
    pub fn pause(&self, node: u32) {
        let mut state = self.lock();
        if let Some(record) = state.nodes.get_mut(&node) {
            record.paused = true;
        }
        state.record(TraceKind::Fault, node, 4);
    }

    /// Lets a frozen node go on.
    pub fn resume(&self, node: u32) {
        let mut state = self.lock();
        if let Some(record) = state.nodes.get_mut(&node) {
            record.paused = false;
        }
        state.record(TraceKind::Fault, node, 5);
        state.release_held();
    }

    /// Ends a node at once. Its memory objects keep what had been placed in them, acknowledged
    /// writes that linger ([`SimOptions::slow_placement_ns`]) are lost, its objects are dead, and
    /// each connected peer sees [`beeline_fabric::Status::TransportError`] within its transport
    /// time-out.
    pub fn crash(&self, node: u32) {
        let mut state = self.lock();
        state.record(TraceKind::Fault, node, 6);
        let Some(record) = state.nodes.get_mut(&node) else { return };
        record.alive = false;
        record.paused = false;
        let owner = Incarnation { node, generation: record.generation };
        let mut told = Vec::new();
        for record in state.queue_pairs.values_mut().filter(|qp| qp.owner == owner) {
            record.state = QueuePairState::Error;
            record.sends.clear();
            record.receives.clear();
            record.inbound.clear();
            record.deferred.clear();
            told.extend(record.peer.map(|peer| peer.qp));
        }
        if state.has_bug(PlantedBug::SilentPeerDeath) {
            return;
        }
        for qp in told {
            let timeout = state.queue_pairs.get(&qp).map(|qp| qp.options.transport_timeout);
            if let Some(timeout) = timeout {
                state.schedule(nanoseconds(timeout), Event::PeerDead { qp });
            }
        }
        state.release_held();
    }

    /// Gives a crashed node another life; [`SimWorld::device`] then opens it. Objects of its
    /// former life stay dead.
    pub fn restart(&self, node: u32) {
        let mut state = self.lock();
        state.record(TraceKind::Fault, node, 7);
        if let Some(record) = state.nodes.get_mut(&node).filter(|record| !record.alive) {
            *record = NodeRecord { generation: record.generation + 1, alive: true, paused: false };
        }
    }

    /// A hash over everything that happened so far: equal seeds and calls give equal hashes.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.lock().trace.hash()
    }

    /// How many records the trace has had.
    #[must_use]
    pub fn trace_count(&self) -> u64 {
        self.lock().trace.count()
    }

    /// The first [`SimOptions::trace_records`] records.
    #[must_use]
    pub fn trace(&self) -> Vec<TraceRecord> {
        self.lock().trace.records()
    }
}

impl State {
    /// Lets held events come up again, in their order; those still blocked are held again.
    fn release_held(&mut self) {
        for event in std::mem::take(&mut self.held) {
            let delay = match &event {
                Event::Arrive { .. } => *self.options.latency_ns.start(),
                _ => 0,
            };
            self.schedule(delay, event);
        }
    }
}
