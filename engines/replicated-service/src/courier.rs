//! Carries a lane's units and barriers to the member that leads, and tries again until one is
//! answered or time is up. A unit may be proposed several times; it takes effect once
//! ([`crate::unit`]). It reaches another member over fabric, by way of this member's log
//! ([`crate::Log::forward`]).
//!
//! A courier blocks: it lives on a thread of its service's. What it does next is decided by a
//! [`Journey`], which does not.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::group::Group;
use crate::journey::{Carried, Journey, Step, refusal, refusal_of_leader};
use crate::log::{Done, LogMember};
use crate::unit::LaneName;

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(5);
/// Between two looks whether the leader is still the same.
const LOOK: Duration = Duration::from_millis(50);

/// A courier of one lane.
pub struct Courier {
    group: Arc<Group>,
    lane: LaneName,
}

impl fmt::Debug for Courier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Courier").field("lane", &self.lane).finish_non_exhaustive()
    }
}

impl Courier {
    /// For `lane` of `group`.
    #[must_use]
    pub fn new(group: Arc<Group>, lane: LaneName) -> Self {
        Self { group, lane }
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

    fn drive(&self, mut journey: Journey) -> Result<Vec<u8>, Failure> {
        loop {
            let carried = match journey.decide(&self.group, Instant::now()) {
                Step::Done(outcome) => return outcome,
                Step::Here => self.attempt(&journey, None),
                Step::There(leader) => self.attempt(&journey, Some(&leader)),
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

    /// Gives the load to this member's log, for itself or for the member that leads.
    fn attempt(&self, journey: &Journey, leader: Option<&LogMember>) -> Carried {
        let Some(log) = self.group.log() else { return Carried::Again };
        let (sender, receiver) = mpsc::channel();
        let done: Done<Vec<u8>> = Box::new(move |outcome| {
            // A courier that gave up waits no more.
            let _ = sender.send(outcome);
        });
        match leader {
            None => self.group.ask(log.as_ref(), journey.load(), done),
            Some(leader) => {
                let limit = journey.deadline().saturating_duration_since(Instant::now());
                log.forward(leader.id, journey.load(), limit, done);
            }
        }
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(Ok(reply)) => return Carried::Answer(reply),
                Ok(Err(refused)) if leader.is_none() => return refusal(refused),
                Ok(Err(refused)) => return refusal_of_leader(refused),
                Err(RecvTimeoutError::Disconnected) => return Carried::Again,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let goes_on = !journey.is_over(&self.group, Instant::now())
                && match leader {
                    None => log.state().leads(),
                    Some(leader) => journey.wants(&self.group, leader.id),
                };
            if !goes_on {
                return Carried::Again;
            }
        }
    }
}
