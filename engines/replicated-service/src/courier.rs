//! Carries a lane's units and barriers to the member that leads, and tries again until one is
//! answered or time is up. A unit may be proposed several times; it takes effect once
//! ([`crate::unit`]).
//!
//! A courier blocks: it lives on a thread of its service's. What it does next is decided by a
//! [`Journey`], which does not.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::group::Group;
use crate::journey::{Carried, Journey, Load, Step, refusal};
use crate::log::{Done, LogMember};
use crate::unit::LaneName;

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(5);
/// Between two looks whether the leader is still the same.
const LOOK: Duration = Duration::from_millis(50);

/// Unix milliseconds, for the stamps of units that are proposed here.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What came of asking another member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Forwarded {
    /// The answer: the replies to a unit, or a position in decimal digits.
    Answer(Vec<u8>),
    /// It may be asked again, or another one.
    Again,
    /// It said no, for good.
    Refused(String),
}

/// How units and barriers reach the member that leads.
pub trait Forward: Send {
    /// Has the member propose `unit`. Blocks until it answers, `deadline`, or an answer is not
    /// `wanted` any more; that is asked every now and then.
    fn propose(
        &mut self,
        leader: &LogMember,
        unit: &[u8],
        deadline: Instant,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Forwarded;

    /// Has the member pass a barrier; otherwise as [`Forward::propose`].
    fn barrier(
        &mut self,
        leader: &LogMember,
        deadline: Instant,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Forwarded;
}

/// A courier of one lane.
pub struct Courier<F> {
    group: Arc<Group>,
    lane: LaneName,
    clock: Clock,
    forward: F,
}

impl<F> fmt::Debug for Courier<F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Courier").field("lane", &self.lane).finish_non_exhaustive()
    }
}

impl<F: Forward> Courier<F> {
    /// For `lane` of `group`.
    #[must_use]
    pub fn new(group: Arc<Group>, lane: LaneName, clock: Clock, forward: F) -> Self {
        Self { group, lane, clock, forward }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.group.options().request_timeout
    }

    /// Has a unit of the lane applied; its replies. `proposed`: a leader was asked to before, and it
    /// may take effect.
    ///
    /// Errors: [`Failure`].
    pub fn deliver(
        &mut self,
        number: u64,
        unit: &[u8],
        proposed: bool,
    ) -> Result<Vec<u8>, Failure> {
        let load = (number, unit.to_vec());
        self.drive(Journey::of_unit(self.lane, load, proposed, self.deadline()))
    }

    /// Has a barrier pass, and waits until what lies before it is applied here.
    ///
    /// Errors: [`Failure`].
    pub fn pass(&mut self) -> Result<(), Failure> {
        self.drive(Journey::of_barrier(self.lane, self.deadline())).map(|_| ())
    }

    fn drive(&mut self, mut journey: Journey) -> Result<Vec<u8>, Failure> {
        loop {
            let carried = match journey.decide(&self.group, Instant::now()) {
                Step::Done(outcome) => return outcome,
                Step::Here => self.attempt_here(&journey),
                Step::There(leader) => self.attempt_there(&journey, &leader),
                Step::Wait => {
                    self.group.wait_a_little(PAUSE);
                    continue;
                }
            };
            let again = carried == Carried::Again;
            journey.took(&self.group, carried);
            if again {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn attempt_there(&mut self, journey: &Journey, leader: &LogMember) -> Carried {
        let group = Arc::clone(&self.group);
        let mut wanted = || journey.wants(&group, leader.id);
        let deadline = journey.deadline();
        let answer = match journey.load() {
            Load::Unit(unit) => self.forward.propose(leader, unit, deadline, &mut wanted),
            Load::Barrier => self.forward.barrier(leader, deadline, &mut wanted),
        };
        match answer {
            Forwarded::Answer(answer) => Carried::Answer(answer),
            Forwarded::Again => Carried::Again,
            Forwarded::Refused(reason) => {
                Carried::Failed(Failure::Refused(format!("the leader refused: {reason}")))
            }
        }
    }

    fn attempt_here(&self, journey: &Journey) -> Carried {
        let Some(log) = self.group.log() else { return Carried::Again };
        let (sender, receiver) = mpsc::channel();
        let done: Done<Vec<u8>> = Box::new(move |outcome| {
            // A courier that gave up waits no more.
            let _ = sender.send(outcome);
        });
        self.group.ask(log.as_ref(), journey.load(), (self.clock)(), done);
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(Ok(reply)) => return Carried::Answer(reply),
                Ok(Err(refused)) => return refusal(refused),
                Err(RecvTimeoutError::Disconnected) => return Carried::Again,
                Err(RecvTimeoutError::Timeout) => {
                    if journey.is_over(&self.group, Instant::now()) || !log.state().leads() {
                        return Carried::Again;
                    }
                }
            }
        }
    }
}
