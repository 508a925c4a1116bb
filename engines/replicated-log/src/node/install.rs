//! Snapshots that came: looked at and restored on another thread.
//!
//! ```text
//!  the log's thread ── the machine goes ──► a job: file synchronised, checked, examined, adopted, restored
//!    votes, beats, asks, answers, forwards        │
//!    what is committed is held                    │
//!  the log's thread ◄── the machine comes back ───┘
//! ```
//!
//! Reading and restoring take as long as there is state. The machine is in one place at a time: here, or with the
//! job. While it is away the member applies nothing, takes no snapshot, and answers no read, to be asked again, as
//! one that holds entries for want of room; and it takes no other snapshot from a peer. Everything that needs no
//! machine goes on.
//!
//! Invariants: a snapshot is adopted, durably, before the machine gives anything of its old state up; none of this
//! member's own is adopted meanwhile, which would be older; a member that ends waits for a job that has begun.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use beeline_paxos::{Event, NodeId, Position};

use super::{Node, NodeError};
use crate::handle::{Refusal, Request};
use crate::home::{Home, HomeError};
use crate::machine::StateMachine;
use crate::snapshot::{self, Head};

/// What became of a snapshot that came.
enum Outcome {
    /// It has nothing that the member lacks.
    Old,
    /// It cannot be used, or could not be kept.
    Refused(String),
    /// The machine cannot take it.
    TooMuch(String),
    /// The machine's state is this one.
    Restored(Head),
}

enum Stage<S> {
    Waiting(S),
    /// The job has it; or it went back.
    Away,
    Done(S, Result<Outcome, NodeError>),
}

/// A machine that was given to a job.
pub(super) struct Errand<S> {
    stage: Mutex<Stage<S>>,
    changed: Condvar,
}

impl<S> Errand<S> {
    fn of(machine: S) -> Arc<Self> {
        Arc::new(Self { stage: Mutex::new(Stage::Waiting(machine)), changed: Condvar::new() })
    }

    fn stage(&self) -> MutexGuard<'_, Stage<S>> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine, for the job; `None` where it was taken back.
    fn begin(&self) -> Option<S> {
        match std::mem::replace(&mut *self.stage(), Stage::Away) {
            Stage::Waiting(machine) => Some(machine),
            Stage::Away | Stage::Done(..) => None,
        }
    }

    fn end(&self, machine: S, outcome: Result<Outcome, NodeError>) {
        *self.stage() = Stage::Done(machine, outcome);
        self.changed.notify_all();
    }

    /// The machine and what came of it, if the job is done.
    fn take(&self) -> Option<(S, Result<Outcome, NodeError>)> {
        let mut stage = self.stage();
        match std::mem::replace(&mut *stage, Stage::Away) {
            Stage::Done(machine, outcome) => Some((machine, outcome)),
            other => {
                *stage = other;
                None
            }
        }
    }

    /// The machine, whatever came of it: of a job that has begun when it is done.
    fn take_back(&self) -> S {
        let mut stage = self.stage();
        loop {
            match std::mem::replace(&mut *stage, Stage::Away) {
                Stage::Waiting(machine) | Stage::Done(machine, _) => return machine,
                Stage::Away => {
                    stage = self.changed.wait(stage).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

/// Looks at the snapshot in `path`, and has the machine take its state where that is newer than everything up to
/// `committed`, and than what the machine `has`.
///
/// One for which the machine has no room is refused while the member still has what it had: adopted,
/// it would keep the member from starting, too.
fn install<S: StateMachine>(
    home: &Home,
    path: &Path,
    (committed, has): (Position, Position),
    machine: &mut S,
) -> Result<Outcome, NodeError> {
    let cluster = home.cluster();
    if let Err(error) = File::open(path).and_then(|file| file.sync_all()) {
        return Ok(Outcome::Refused(error.to_string()));
    }
    let newer = |head: &Head| head.has_state && head.position > committed;
    // All of it is checked before anything of it is used.
    let mut examined = Ok(());
    let head = snapshot::read(path, cluster, |head, reader| {
        if newer(head) && head.position > has {
            examined = machine.examine(head.position, reader);
        }
        Ok(())
    });
    let head = match head {
        Ok(head) if newer(&head) => head,
        Ok(_) => return Ok(Outcome::Old),
        Err(error) => return Ok(Outcome::Refused(error.to_string())),
    };
    if let Err(error) = examined {
        return Ok(Outcome::TooMuch(error.to_string()));
    }
    if let Err(error) = home.adopt_snapshot(path) {
        return Ok(Outcome::Refused(error.to_string()));
    }
    // A machine that lasts by itself may be further on than its log: a loss of power can take
    // the log's word of what is committed and leave what the machine made of it.
    if head.position > has {
        let mut restored = Ok(());
        snapshot::read(&home.snapshot_path(), cluster, |head, reader| {
            restored = machine.restore(head.position, reader);
            Ok(())
        })
        .map_err(HomeError::from)?;
        restored.map_err(NodeError::Machine)?;
    }
    Ok(Outcome::Restored(head))
}

impl<S: StateMachine> Node<S> {
    /// Has a snapshot that a peer sent installed.
    pub(super) fn install(&mut self) {
        if self.errand.is_some() {
            return;
        }
        let Some(machine) = self.machine.take() else { return };
        let Some(received) = self.member.received() else {
            self.machine = Some(machine);
            return;
        };
        self.member.use_received(true);
        let errand = Errand::of(machine);
        // A job that still waits for a thread holds no folder: the member may have ended, and be opened again.
        let (job, home, mailbox) =
            (Arc::clone(&errand), Arc::downgrade(&self.home), self.mailbox.clone());
        let has = (self.member.replica().committed(), self.machine_has);
        let from = received.from;
        let working = move || {
            let Some(mut machine) = job.begin() else { return };
            // The node lives, and waits from now on.
            let Some(home) = home.upgrade() else { return };
            let work = || install(&home, &received.path, has, &mut machine);
            let outcome = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
                Err(NodeError::Machine(std::io::Error::other("it panicked over a snapshot")))
            });
            // The thread that waits for the job may open the folder.
            drop(home);
            job.end(machine, outcome);
            // The node may have ended meanwhile.
            mailbox.send(Request::Installed { from });
        };
        match self.jobs.run("log-restore", Box::new(working)) {
            Ok(()) => self.errand = Some(errand),
            Err(error) => {
                tracing::warn!(%from, %error, "a snapshot that came finds no thread");
                self.machine = Some(errand.take_back());
                self.member.use_received(false);
            }
        }
    }

    /// The machine is back.
    pub(super) fn installed(&mut self, from: NodeId, now_ns: u64) -> Result<(), NodeError> {
        let done = self.errand.as_ref().and_then(|errand| errand.take());
        let Some((machine, outcome)) = done else { return Ok(()) };
        self.machine = Some(machine);
        self.errand = None;
        self.member.use_received(false);
        match outcome? {
            Outcome::Old => {}
            Outcome::Refused(error) => {
                tracing::warn!(%from, error, "a snapshot that came is refused");
                self.counters.snapshots_failed += 1;
            }
            Outcome::TooMuch(error) => {
                tracing::error!(
                    %from,
                    error,
                    "this member cannot take the snapshot that it needs, and stays behind"
                );
                self.counters.snapshots_failed += 1;
                self.member.decline_snapshots(now_ns);
            }
            Outcome::Restored(head) => {
                self.member.want_snapshots();
                self.go_on_from(head)?;
            }
        }
        // Requests behind this one see the new state, in this turn: its position is told first.
        self.tell_status();
        Ok(())
    }

    /// The machine has what this snapshot covers.
    fn go_on_from(&mut self, head: Head) -> Result<(), NodeError> {
        let Head { position, configuration, sessions, .. } = head;
        self.sessions = sessions;
        // Where it brings no later membership it removes no member.
        if configuration.position() > self.membership.position() {
            for member in self.known.forget_before(&configuration) {
                // A peer that is connected has greeted, and does not again.
                if !self.member.is_connected(member) {
                    self.peers.forget(member);
                }
            }
        }
        self.membership = configuration.clone();
        self.applied = position;
        // What is held beyond it was committed while the machine was away.
        let last = self.held.map_or(position, |(_, last)| last);
        self.held = (last > position).then_some((position.next(), last));
        while let Some((_, waiters)) = self.pending.pop_front_if(|(at, _)| *at <= position) {
            waiters.into_iter().for_each(|waiter| waiter.refuse(Refusal::Lost));
        }
        self.snapshot = position;
        self.snapshot_has_state = true;
        self.counters.snapshots_installed += 1;
        let is_behind = self.member.replica().committed() < position;
        let event = if is_behind {
            Event::SnapshotInstalled { position, configuration }
        } else {
            // The log came there by itself meanwhile.
            Event::SnapshotTaken { position }
        };
        let mut upward = std::mem::take(&mut self.upward);
        self.member.event(event, &mut upward)?;
        self.upward = upward;
        Ok(())
    }
}

impl<S: StateMachine> Node<S> {
    /// What waits for a job that has begun, if there is one, and then lets machine and folder go: instead of the
    /// node's own end, on a thread that others share.
    pub(crate) fn take_errand(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        let errand = self.errand.take()?;
        let home = Arc::clone(&self.home);
        Some(Box::new(move || drop((errand.take_back(), home))))
    }
}

impl<S> Drop for Node<S> {
    /// When this is done no job works in the member's folder, or in the machine's.
    fn drop(&mut self) {
        if let Some(errand) = self.errand.take() {
            self.machine = Some(errand.take_back());
        }
    }
}
