//! Carries a lane's units and barriers to the member that leads, and tries again until one is
//! answered or time is up. A unit may be proposed several times; it takes effect once
//! ([`crate::unit`]).
//!
//! A courier blocks: it lives on a thread of its service's.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::group::{Group, count};
use crate::log::{Done, Log, LogMember, Refused};
use crate::unit::{self, LaneName, REPEATED};

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

/// How one attempt ended.
enum Attempt<T> {
    Done(T),
    /// It may be tried again.
    Again,
    Failed(Failure),
}

/// What is carried.
#[derive(Clone, Copy)]
enum Load<'a> {
    Unit { number: u64, unit: &'a [u8] },
    Barrier,
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
        let deadline = self.deadline();
        self.settle(deadline)?;
        let mut unit = unit.to_vec();
        if !proposed {
            unit::renew(&mut unit, self.group.incarnation());
        }
        let mut led = proposed;
        loop {
            if let Some(reply) = self.group.reply_to(self.lane, number) {
                return Ok(reply);
            }
            self.check_time(deadline, led)?;
            match self.attempt(Load::Unit { number, unit: &unit }, deadline, &mut led) {
                Attempt::Done(reply) if reply == REPEATED => {
                    // It took effect before. Once a barrier behind it has passed, this member has
                    // applied it and has its reply, unless a snapshot brought it.
                    let _ = self.pass_until(deadline);
                    return self.group.reply_to(self.lane, number).ok_or(Failure::ReplyLost);
                }
                Attempt::Done(reply) => return Ok(reply),
                Attempt::Again => std::thread::sleep(PAUSE),
                Attempt::Failed(failure) => return Err(failure),
            }
        }
    }

    /// Has a barrier pass, and waits until what lies before it is applied here.
    ///
    /// Errors: [`Failure`].
    pub fn pass(&mut self) -> Result<(), Failure> {
        self.pass_until(self.deadline())
    }

    /// Units that an earlier run left in the log carry its incarnation, which may be above this
    /// run's where the clock was set back: a unit below it would be taken for one that took effect.
    /// So everything that is in the log by now is applied first, which raises this run's.
    fn settle(&mut self, deadline: Instant) -> Result<(), Failure> {
        if self.group.is_settled() {
            return Ok(());
        }
        match self.pass_until(deadline) {
            // Nothing was proposed.
            Err(Failure::TimedOut) => Err(Failure::NoLeader),
            passed => passed.inspect(|()| self.group.settle()),
        }
    }

    fn pass_until(&mut self, deadline: Instant) -> Result<(), Failure> {
        let mut led = false;
        let position = loop {
            self.check_time(deadline, led)?;
            match self.attempt(Load::Barrier, deadline, &mut led) {
                Attempt::Done(position) => {
                    let text = String::from_utf8_lossy(&position).into_owned();
                    match text.parse::<u64>() {
                        Ok(position) => break position,
                        Err(_) => return Err(Failure::Refused(format!("odd position {text}"))),
                    }
                }
                Attempt::Again => std::thread::sleep(PAUSE),
                Attempt::Failed(failure) => return Err(failure),
            }
        };
        let reached = self.group.wait_for(deadline, |group| {
            if group.has_failed() || group.is_abandoned() {
                return Some(Err(Failure::Failed));
            }
            group.has_applied(position).then_some(Ok(()))
        });
        reached.unwrap_or(Err(Failure::TimedOut))
    }

    /// The failure of a request whose time is over, counted; `led` says whether a leader was met.
    fn check_time(&self, deadline: Instant, led: bool) -> Result<(), Failure> {
        if !self.is_over(deadline) {
            return Ok(());
        }
        count(&self.group.counters.timed_out, 1);
        Err(if led { Failure::TimedOut } else { Failure::NoLeader })
    }

    fn is_over(&self, deadline: Instant) -> bool {
        Instant::now() >= deadline || self.group.is_abandoned()
    }

    /// One attempt, here or at the member that leads.
    fn attempt(&mut self, load: Load<'_>, deadline: Instant, led: &mut bool) -> Attempt<Vec<u8>> {
        if let Some(obstacle) = self.group.obstacle(false) {
            return Attempt::Failed(obstacle);
        }
        let Some(log) = self.group.log().cloned() else { return Attempt::Again };
        let state = log.state();
        if state.leads() {
            *led = true;
            return self.attempt_here(log.as_ref(), load, deadline);
        }
        let Some(leader) = state.other_leader() else { return Attempt::Again };
        *led = true;
        count(&self.group.counters.forwarded, 1);
        let (group, lane) = (Arc::clone(&self.group), self.lane);
        let mut wanted = || {
            let now = group.state().and_then(|state| state.leader);
            let settled = match load {
                Load::Unit { number, .. } => group.reply_to(lane, number).is_some(),
                Load::Barrier => false,
            };
            now == state.leader && !settled && !group.is_abandoned()
        };
        let answer = match load {
            Load::Unit { unit, .. } => self.forward.propose(leader, unit, deadline, &mut wanted),
            Load::Barrier => self.forward.barrier(leader, deadline, &mut wanted),
        };
        match answer {
            Forwarded::Answer(answer) => Attempt::Done(answer),
            Forwarded::Again => Attempt::Again,
            Forwarded::Refused(reason) => {
                Attempt::Failed(Failure::Refused(format!("the leader refused: {reason}")))
            }
        }
    }

    fn attempt_here(&self, log: &dyn Log, load: Load<'_>, deadline: Instant) -> Attempt<Vec<u8>> {
        let (sender, receiver) = mpsc::channel();
        let done: Done<Vec<u8>> = Box::new(move |outcome| {
            // A courier that gave up waits no more.
            let _ = sender.send(outcome);
        });
        match load {
            Load::Unit { unit, .. } => {
                let mut unit = unit.to_vec();
                self.group.stamp(&mut unit, (self.clock)());
                log.propose(unit, done);
            }
            Load::Barrier => log.barrier(Box::new(move |passed| {
                done(passed.map(|position| position.to_string().into_bytes()));
            })),
        }
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(Ok(reply)) => return Attempt::Done(reply),
                Ok(Err(refused)) => return refusal(refused),
                Err(RecvTimeoutError::Disconnected) => return Attempt::Again,
                Err(RecvTimeoutError::Timeout) => {
                    if self.is_over(deadline) || !log.state().leads() {
                        return Attempt::Again;
                    }
                }
            }
        }
    }
}

fn refusal<T>(refused: Refused) -> Attempt<T> {
    match refused {
        Refused::TooLarge { bytes, limit } => Attempt::Failed(Failure::TooLarge { bytes, limit }),
        Refused::Stopped => Attempt::Failed(Failure::Failed),
        refused if refused.is_retryable() => Attempt::Again,
        refused => Attempt::Failed(Failure::Refused(refused.to_string())),
    }
}
