//! What this member has another one propose, and what others have this one.
//!
//! ```text
//!  Handle::forward ─▶ ask ─▶ member ══ fabric ══▶ member ─▶ serve ─▶ as if asked here
//!          closure ◀─ told ◀────────◀═ fabric ══◀─────────◀─ Request::Forwarded
//! ```
//!
//! Each closure is told once: an answer, that the connection broke, or that the time is over.

use std::time::Duration;

use beeline_paxos::{ClientCommand, NodeId, Position, batch};

use super::{Node, NodeError, Queued, Read, Waiter};
use crate::forward::{DONE, Item, Kind, News, outcome_of, refusal_of};
use crate::handle::{Done, NO_SESSION, Refusal, Reply, Request};
use crate::machine::StateMachine;

/// What another member was asked for.
pub(super) struct Forwarded {
    to: NodeId,
    /// The connection that it went through.
    epoch: u64,
    until_ns: u64,
    done: Done<Vec<u8>>,
}

impl<S: StateMachine> Node<S> {
    /// Has `to` propose a command, or pass a barrier.
    pub(super) fn forward(
        &mut self,
        (to, command): (NodeId, Option<Vec<u8>>),
        limit: Duration,
        done: Done<Vec<u8>>,
        now_ns: u64,
    ) {
        let command_bytes = command.as_deref().map_or(0, |bytes| {
            batch::encoded_bytes(&ClientCommand { session: NO_SESSION, sequence: 0, bytes })
        });
        if command_bytes > self.batch_limit {
            let (bytes, limit) = (command_bytes, self.batch_limit);
            return done(Err(Refusal::TooLarge { bytes, limit }));
        }
        let number = self.next_forward;
        self.next_forward += 1;
        let what = match command {
            Some(command) => (Kind::Command, number, command),
            None => (Kind::Barrier, number, Vec::new()),
        };
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = now_ns.saturating_add(limit_ns);
        match self.member.ask(to, what, now_ns) {
            Ok(epoch) => {
                self.counters.forwards_sent += 1;
                self.forwarded.insert(number, Forwarded { to, epoch, until_ns, done });
            }
            Err(refusal) => {
                self.counters.forwards_refused += 1;
                done(Err(refusal));
            }
        }
    }

    /// What came over the fabric. True if there was something.
    pub(super) fn look_at_forwards(&mut self) -> Result<bool, NodeError> {
        let mut busy = false;
        while let Some(news) = self.member.forward_news() {
            busy = true;
            match news {
                News::Asked { from, epoch, item } => self.serve_forward(from, epoch, item)?,
                News::Answered { item: Item { outcome, number, body, .. } } => {
                    if let Some(Forwarded { done, .. }) = self.forwarded.remove(&number) {
                        done(if outcome == DONE {
                            Ok(body)
                        } else {
                            Err(refusal_of(outcome, &body))
                        });
                    }
                }
                News::Broken { epoch, unsent } => {
                    let through = |_: &u64, asked: &mut Forwarded| asked.epoch == epoch;
                    let ended: Vec<_> = self.forwarded.extract_if(.., through).collect();
                    for (number, Forwarded { to, done, .. }) in ended {
                        self.counters.forwards_unanswered += 1;
                        let unreachable = Refusal::Unreachable { member: to };
                        let unsent = unsent.contains(&number);
                        done(Err(if unsent { unreachable } else { Refusal::Lost }));
                    }
                }
            }
        }
        Ok(busy)
    }

    /// Those whose time is over are told so.
    pub(super) fn end_late_forwards(&mut self, now_ns: u64) {
        let late = |_: &u64, asked: &mut Forwarded| asked.until_ns <= now_ns;
        let late: Vec<_> = self.forwarded.extract_if(.., late).collect();
        for (number, Forwarded { to, epoch, done, .. }) in late {
            self.counters.forwards_unanswered += 1;
            let unsent = self.member.stop_asking(to, epoch, number);
            let unreachable = Refusal::Unreachable { member: to };
            done(Err(if unsent { unreachable } else { Refusal::TimedOut }));
        }
        self.member.let_forwards_go(now_ns);
    }

    /// Does what a peer asks for as if it was asked here.
    fn serve_forward(&mut self, from: NodeId, epoch: u64, item: Item) -> Result<(), NodeError> {
        self.counters.forwards_served += 1;
        let Item { kind, number, mut body, .. } = item;
        let mailbox = self.mailbox.clone();
        let answer = move |outcome: Result<Vec<u8>, Refusal>| {
            let (outcome, body) = match outcome {
                Ok(body) => (DONE, body),
                Err(refusal) => outcome_of(&refusal),
            };
            let item = Item { kind: Kind::Answer, outcome, number, body };
            // The node may have ended meanwhile.
            mailbox.send(Request::Forwarded { to: from, epoch, item });
        };
        if kind == Kind::Barrier {
            let passed = Box::new(move |outcome: Result<Position, Refusal>| {
                answer(outcome.map(|position| position.0.to_le_bytes().to_vec()));
            });
            return self.read(Read::Barrier(passed));
        }
        let Some(machine) = &mut self.machine else {
            answer(Err(Refusal::Full));
            return Ok(());
        };
        if let Err(reason) = machine.stamp(&mut body) {
            answer(Err(Refusal::Refused { reason }));
            return Ok(());
        }
        let waiter = Waiter::Command(Box::new(move |outcome: Result<Reply, Refusal>| {
            answer(outcome.map(|reply| reply.bytes));
        }));
        self.enqueue(Queued { session: NO_SESSION, sequence: 0, bytes: body, waiter });
        Ok(())
    }
}
