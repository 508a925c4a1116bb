//! Carries a lane's units and barriers to whoever leads, and tries again until somebody answers or
//! time is up. A unit may be proposed several times; it takes effect once ([`super::unit`]).
//!
//! A courier is a thread, one per lane, and asleep where this member leads and the log answers at
//! once.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::Replication;
use super::lane::Failure;
use super::log::{Done, Log, LogState, Refused};
use super::peer::{Peer, PeerError};
use super::unit::{self, REPEATED};
use crate::parcel::{Delivery, LogNews};
use crate::shared::Shared;
use crate::stats::count_shared;

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(5);
/// A connection attempt.
const CONNECT: Duration = Duration::from_millis(500);
/// Between two looks whether the leader is still the same.
const LOOK: Duration = Duration::from_millis(50);

/// What a courier is sent for.
#[derive(Debug)]
pub(crate) enum Errand {
    /// To have a unit applied.
    Unit {
        /// Its number.
        number: u64,
        /// The unit.
        unit: Vec<u8>,
        /// It was proposed before, and may take effect.
        proposed: bool,
    },
    /// To have a barrier pass.
    Barrier {
        /// The lane's name for it.
        ticket: u64,
    },
    /// Nothing more.
    Stop,
}

/// A courier, on its thread.
pub(crate) struct Courier {
    pub shared: Arc<Shared>,
    pub lane: usize,
    pub errands: Receiver<Errand>,
    pub peer: Option<Peer>,
}

/// How one attempt ended.
enum Attempt<T> {
    Done(T),
    /// It may be tried again.
    Again,
    Failed(Failure),
}

impl Courier {
    /// Runs until told to stop.
    pub(crate) fn run(mut self) {
        while let Ok(errand) = self.errands.recv() {
            let shared = Arc::clone(&self.shared);
            let Some(replication) = &shared.replication else { return };
            let deadline = Instant::now() + replication.options.request_timeout;
            let news = match errand {
                Errand::Stop => return,
                Errand::Unit { number, unit, proposed } => {
                    let outcome = self.deliver(replication, (number, &unit), proposed, deadline);
                    LogNews::Unit { number, outcome }
                }
                Errand::Barrier { ticket } => {
                    let outcome = self.pass(replication, deadline);
                    LogNews::Barrier { ticket, outcome }
                }
            };
            shared.doors[self.lane].deliver(Delivery::Log(news));
        }
    }

    /// Has a unit applied; its replies. `led`: somebody who led was asked to before.
    fn deliver(
        &mut self,
        replication: &Replication,
        (number, unit): (u64, &[u8]),
        mut led: bool,
        deadline: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let lane = self.lane;
        let shared = Arc::clone(&self.shared);
        loop {
            if let Some(reply) = replication.reply_to(lane, number) {
                return Ok(reply);
            }
            self.check_time(replication, deadline, led)?;
            let attempt = self.attempt(
                replication,
                deadline,
                &mut led,
                |log, done| {
                    let mut unit = unit.to_vec();
                    unit::stamp(&mut unit, shared.store.clock().unix_ms());
                    log.propose(unit, done);
                },
                &[b"PROPOSE", unit],
                |replication| replication.reply_to(lane, number).is_some(),
            );
            match attempt {
                Attempt::Done(reply) if reply == REPEATED => {
                    // It took effect before. Once a barrier behind it has passed, this member has
                    // applied it and has its reply, unless a snapshot brought it.
                    let _ = self.pass(replication, deadline);
                    return replication.reply_to(lane, number).ok_or(Failure::ReplyLost);
                }
                Attempt::Done(reply) => return Ok(reply),
                Attempt::Again => std::thread::sleep(PAUSE),
                Attempt::Failed(failure) => return Err(failure),
            }
        }
    }

    /// Has a barrier pass, and waits until what lies before it is applied here.
    fn pass(&mut self, replication: &Replication, deadline: Instant) -> Result<(), Failure> {
        let mut led = false;
        let position = loop {
            self.check_time(replication, deadline, led)?;
            let attempt = self.attempt(
                replication,
                deadline,
                &mut led,
                |log, done| {
                    log.barrier(Box::new(move |passed| {
                        done(passed.map(|position| position.to_string().into_bytes()));
                    }));
                },
                &[b"BARRIER"],
                |_| false,
            );
            match attempt {
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
        let reached =
            replication.wait_for(deadline, |found| found.has_applied(position).then_some(()));
        reached.ok_or(Failure::TimedOut)
    }

    /// The failure of a request whose time is over, counted; `led` says whether a leader was met.
    fn check_time(
        &self,
        replication: &Replication,
        deadline: Instant,
        led: bool,
    ) -> Result<(), Failure> {
        if !Self::is_over(replication, deadline) {
            return Ok(());
        }
        count_shared(&replication.counters.timed_out);
        Err(if led { Failure::TimedOut } else { Failure::NoLeader })
    }

    fn is_over(replication: &Replication, deadline: Instant) -> bool {
        Instant::now() >= deadline || replication.is_abandoned()
    }

    /// One attempt, here or at the member that leads. `settled`: an answer is not needed any more.
    fn attempt(
        &mut self,
        replication: &Replication,
        deadline: Instant,
        led: &mut bool,
        here: impl FnOnce(&dyn Log, Done<Vec<u8>>),
        there: &[&[u8]],
        settled: impl Fn(&Replication) -> bool,
    ) -> Attempt<Vec<u8>> {
        if let Some(obstacle) = replication.obstacle(false) {
            return Attempt::Failed(obstacle);
        }
        let Some(log) = replication.log.get() else { return Attempt::Again };
        let state = log.state();
        if state.leads() {
            *led = true;
            return Self::attempt_here(replication, log.as_ref(), deadline, here);
        }
        let Some(leader) = state.other_leader() else { return Attempt::Again };
        *led = true;
        count_shared(&replication.counters.forwarded);
        let address = leader.resp_address.clone();
        self.attempt_there(replication, &state, &address, deadline, there, settled)
    }

    fn attempt_here(
        replication: &Replication,
        log: &dyn Log,
        deadline: Instant,
        here: impl FnOnce(&dyn Log, Done<Vec<u8>>),
    ) -> Attempt<Vec<u8>> {
        let (sender, receiver) = mpsc::channel();
        here(
            log,
            Box::new(move |outcome| {
                // Nobody waits any more: given up.
                let _ = sender.send(outcome);
            }),
        );
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(Ok(reply)) => return Attempt::Done(reply),
                Ok(Err(refused)) => return refusal(refused),
                Err(RecvTimeoutError::Disconnected) => return Attempt::Again,
                Err(RecvTimeoutError::Timeout) => {
                    if Self::is_over(replication, deadline) || !log.state().leads() {
                        return Attempt::Again;
                    }
                }
            }
        }
    }

    fn attempt_there(
        &mut self,
        replication: &Replication,
        state: &LogState,
        address: &str,
        deadline: Instant,
        words: &[&[u8]],
        settled: impl Fn(&Replication) -> bool,
    ) -> Attempt<Vec<u8>> {
        let mut peer = match self.peer.take().filter(|peer| peer.address() == address) {
            Some(peer) => peer,
            None => {
                let password = self.shared.settings.password();
                let cluster = replication.options.cluster;
                match Peer::connect(address, cluster, password.as_deref(), CONNECT) {
                    Ok(peer) => peer,
                    Err(error) => {
                        tracing::debug!(%error, "the leader cannot be asked");
                        return Attempt::Again;
                    }
                }
            }
        };
        let mut wanted = || {
            let leader = replication.state().and_then(|state| state.leader);
            leader == state.leader && !settled(replication) && !replication.is_abandoned()
        };
        match peer.ask(words, deadline, &mut wanted) {
            Ok(reply) => {
                self.peer = Some(peer);
                Attempt::Done(reply)
            }
            Err(PeerError::Error { line }) => {
                self.peer = Some(peer);
                if line.starts_with("NOT") {
                    Attempt::Again
                } else {
                    let line = line.strip_prefix("ERR ").unwrap_or(&line);
                    Attempt::Failed(Failure::Refused(format!("the leader refused: {line}")))
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the leader did not answer");
                Attempt::Again
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
