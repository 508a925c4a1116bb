//! What a courier decides: where a unit or a barrier goes next, and what its answer means.
//!
//! ```text
//!             ┌─────────── again ───────────┐
//!             ▼                             │
//!   decide ── Here / There ──► the driver does it ── took ──► decide … Done
//!     └────── Wait: nothing to do at this moment
//! ```
//!
//! A journey waits for nothing and asks no clock: [`crate::Courier`] drives one on its thread, a
//! simulation many of them in virtual time.

use std::time::Instant;

use crate::failure::Failure;
use crate::group::{Group, count};
use crate::log::{LogMember, Refused};
use crate::unit::{self, LaneName, REPEATED};

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Give the load to this member's own log, and tell the journey what came of it.
    Here,
    /// Have this member do so.
    There(LogMember),
    /// Decide again in some milliseconds.
    Wait,
    /// It is over: the replies to a unit; nothing for a barrier.
    Done(Result<Vec<u8>, Failure>),
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Carried {
    /// The answer: the replies to a unit, or a position in decimal digits.
    Answer(Vec<u8>),
    /// It may be tried again.
    Again,
    /// It will not be done.
    Failed(Failure),
}

/// What is carried.
#[derive(Clone, Copy, Debug)]
pub enum Load<'a> {
    /// To be proposed.
    Unit(&'a [u8]),
    /// To be passed.
    Barrier,
}

/// Why a barrier is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Units that an earlier run left in the log carry its incarnation, which may be above this
    /// run's where the clock was set back: a unit below it would be taken for one that took effect.
    /// So everything that is in the log by now is applied first, which raises this run's.
    Settle,
    /// It was asked for.
    Pass,
    /// The unit took effect before. Once a barrier behind it has passed, this member has applied it
    /// and has its reply, unless a snapshot brought it.
    Repeat,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Barrier(Purpose),
    /// Until the position is applied here.
    Reach(Purpose, u64),
    Unit,
}

/// A unit or a barrier on its way.
#[derive(Debug)]
pub struct Journey {
    lane: LaneName,
    number: u64,
    unit: Vec<u8>,
    /// A leader was asked to propose the unit before, and it may take effect.
    proposed: bool,
    deadline: Instant,
    /// A leader was met.
    led: bool,
    stage: Stage,
    ended: Option<Result<Vec<u8>, Failure>>,
}

impl Journey {
    /// Of a unit of `lane`; `proposed`: a leader was asked to before, and it may take effect.
    #[must_use]
    pub fn of_unit(
        lane: LaneName,
        (number, unit): (u64, Vec<u8>),
        proposed: bool,
        deadline: Instant,
    ) -> Self {
        let stage = Stage::Barrier(Purpose::Settle);
        Self { lane, number, unit, proposed, deadline, led: false, stage, ended: None }
    }

    /// Of a barrier.
    #[must_use]
    pub fn of_barrier(lane: LaneName, deadline: Instant) -> Self {
        let (number, unit, proposed) = (0, Vec::new(), false);
        let stage = Stage::Barrier(Purpose::Pass);
        Self { lane, number, unit, proposed, deadline, led: false, stage, ended: None }
    }

    /// When its time is over.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What [`Step::Here`] and [`Step::There`] carry.
    #[must_use]
    pub fn load(&self) -> Load<'_> {
        match self.stage {
            Stage::Unit => Load::Unit(&self.unit),
            _ => Load::Barrier,
        }
    }

    /// Whether the answer of a member that was taken for the leader is still waited for.
    #[must_use]
    pub fn wants(&self, group: &Group, leader: u16) -> bool {
        let leads = group.state().and_then(|state| state.leader) == Some(leader);
        let settled =
            matches!(self.stage, Stage::Unit) && group.reply_to(self.lane, self.number).is_some();
        leads && !settled && !group.is_abandoned()
    }

    /// Whether its time is over, or its client waits no more.
    #[must_use]
    pub fn is_over(&self, group: &Group, now: Instant) -> bool {
        now >= self.deadline || group.is_abandoned()
    }

    /// What to do at `now`. After [`Step::Done`] the journey is of no more use.
    pub fn decide(&mut self, group: &Group, now: Instant) -> Step {
        loop {
            if let Some(ended) = self.ended.take() {
                return Step::Done(ended);
            }
            match self.stage {
                Stage::Barrier(Purpose::Settle) if group.is_settled() => {
                    self.settled(group);
                    continue;
                }
                Stage::Unit => {
                    if let Some(reply) = group.reply_to(self.lane, self.number) {
                        return Step::Done(Ok(reply));
                    }
                }
                Stage::Reach(purpose, position) => {
                    if group.has_failed() || group.is_abandoned() {
                        self.fail(group, Failure::Failed);
                    } else if group.has_applied(position) {
                        self.passed(group, purpose);
                    } else if now >= self.deadline {
                        self.fail(group, Failure::TimedOut);
                    } else {
                        return Step::Wait;
                    }
                    continue;
                }
                Stage::Barrier(_) => {}
            }
            if self.is_over(group, now) {
                count(&group.counters.timed_out, 1);
                self.fail(group, if self.led { Failure::TimedOut } else { Failure::NoLeader });
                continue;
            }
            if let Some(obstacle) = group.obstacle(false) {
                self.fail(group, obstacle);
                continue;
            }
            let Some(state) = group.state() else { return Step::Wait };
            if state.leads() {
                self.led = true;
                return Step::Here;
            }
            let Some(leader) = state.other_leader() else { return Step::Wait };
            self.led = true;
            count(&group.counters.forwarded, 1);
            return Step::There(leader.clone());
        }
    }

    /// What came of [`Step::Here`] or [`Step::There`].
    pub fn took(&mut self, group: &Group, carried: Carried) {
        match (carried, self.stage) {
            (Carried::Again, _) => {}
            (Carried::Failed(failure), _) => self.fail(group, failure),
            (Carried::Answer(reply), Stage::Unit) => {
                if reply == REPEATED {
                    self.stage = Stage::Barrier(Purpose::Repeat);
                } else {
                    self.ended = Some(Ok(reply));
                }
            }
            (Carried::Answer(position), Stage::Barrier(purpose) | Stage::Reach(purpose, _)) => {
                let text = String::from_utf8_lossy(&position);
                match text.parse::<u64>() {
                    Ok(position) => self.stage = Stage::Reach(purpose, position),
                    Err(_) => {
                        let refused = Failure::Refused(format!("odd position {text}"));
                        self.fail(group, refused);
                    }
                }
            }
        }
    }

    fn settled(&mut self, group: &Group) {
        if !self.proposed {
            unit::renew(&mut self.unit, group.incarnation());
        }
        self.led = self.proposed;
        self.stage = Stage::Unit;
    }

    fn passed(&mut self, group: &Group, purpose: Purpose) {
        match purpose {
            Purpose::Settle => {
                group.settle();
                self.settled(group);
            }
            Purpose::Pass => self.ended = Some(Ok(Vec::new())),
            Purpose::Repeat => self.end_repeated(group),
        }
    }

    fn fail(&mut self, group: &Group, failure: Failure) {
        match self.stage {
            Stage::Barrier(Purpose::Repeat) | Stage::Reach(Purpose::Repeat, _) => {
                self.end_repeated(group);
            }
            // Nothing was proposed.
            Stage::Barrier(Purpose::Settle) | Stage::Reach(Purpose::Settle, _)
                if failure == Failure::TimedOut =>
            {
                self.ended = Some(Err(Failure::NoLeader));
            }
            _ => self.ended = Some(Err(failure)),
        }
    }

    fn end_repeated(&mut self, group: &Group) {
        let reply = group.reply_to(self.lane, self.number);
        self.ended = Some(reply.ok_or(Failure::ReplyLost));
    }
}

/// What the refusal of a leader that was asked over fabric means for a journey.
#[must_use]
pub fn refusal_of_leader(refused: Refused) -> Carried {
    match refused {
        Refused::Invalid { reason } => {
            Carried::Failed(Failure::Refused(format!("the leader refused: {reason}")))
        }
        refused => refusal(refused),
    }
}

/// What a log's refusal means for a journey.
#[must_use]
pub fn refusal(refused: Refused) -> Carried {
    match refused {
        Refused::TooLarge { bytes, limit } => Carried::Failed(Failure::TooLarge { bytes, limit }),
        Refused::Stopped => Carried::Failed(Failure::Failed),
        refused if refused.is_retryable() => Carried::Again,
        refused => Carried::Failed(Failure::Refused(refused.to_string())),
    }
}
