//! Readers that follow the log from a position.
//!
//! A reader asks for the entries from a position on. Those that are applied here and still in this
//! member's ring it is given at once, up to as many bytes as it asked for; where none is applied yet
//! the question waits, and costs nothing until one is. So a reader holds what it asked for, the log
//! one question of it, and a reader that is slower than the ring comes round is told so.

use std::sync::Weak;

use beeline_paxos::{Kind, Position, batch};

use super::Node;
use crate::follow::{Command, Entry, Passage};
use crate::handle::{Done, Refusal};
use crate::machine::StateMachine;

/// Questions that wait at most; more are refused as [`Refusal::Full`].
const MOST_WAITING: usize = 256;

/// A reader's question.
pub(crate) struct Question {
    pub(crate) from: Position,
    /// Of commands, at most, but for one entry.
    pub(crate) limit_bytes: usize,
    /// While its reader waits for the answer.
    pub(crate) alive: Weak<()>,
    pub(crate) done: Done<Passage>,
}

impl<S: StateMachine> Node<S> {
    pub(super) fn follow(&mut self, question: Question) {
        if question.from <= self.applied {
            let passage = self.passage(question.from, question.limit_bytes);
            (question.done)(passage);
            return;
        }
        self.questions.retain(|waiting| waiting.alive.strong_count() > 0);
        if self.questions.len() < MOST_WAITING {
            self.questions.push(question);
        } else {
            (question.done)(Err(Refusal::Full));
        }
    }

    /// Answers the questions that waited for what is applied by now. True if there was one.
    pub(super) fn answer_questions(&mut self) -> bool {
        if self.answered_to == self.applied {
            return false;
        }
        self.answered_to = self.applied;
        let applied = self.applied;
        let due = self.questions.extract_if(.., |waiting| waiting.from <= applied);
        let due: Vec<_> = due.collect();
        let answered = !due.is_empty();
        due.into_iter().for_each(|question| self.follow(question));
        answered
    }

    /// Entries from `from`, which is applied, on.
    fn passage(&mut self, from: Position, limit_bytes: usize) -> Result<Passage, Refusal> {
        let mut passage = Passage { entries: Vec::new(), next: from };
        let (mut payload, mut bytes) = (std::mem::take(&mut self.payload), 0);
        while passage.next <= self.applied && (bytes < limit_bytes || passage.next == from) {
            let position = passage.next;
            let Some(kind) = self.member.replica().kept_entry(position, &mut payload) else {
                break;
            };
            if kind == Kind::Commands {
                // An entry that opens a session is none of a client's.
                let asked = batch::commands(&payload).filter(|command| command.session != 0);
                let commands: Vec<_> = asked.map(Command::of).collect();
                bytes += payload.len();
                if !commands.is_empty() {
                    passage.entries.push(Entry { position, commands });
                }
            }
            passage.next = position.next();
        }
        self.payload = payload;
        if passage.next == from {
            Err(Refusal::Gone { oldest: self.oldest_kept() })
        } else {
            Ok(passage)
        }
    }

    /// The first position that this member's ring still has. What is gone is gone from the front.
    fn oldest_kept(&mut self) -> Position {
        let mut payload = std::mem::take(&mut self.payload);
        let replica = self.member.replica();
        let slots = self.home.layout().slots();
        let first = self.applied.0.saturating_sub(slots).max(replica.ring_from().0) + 1;
        let (mut gone, mut kept) = (first - 1, self.applied.0 + 1);
        while kept - gone > 1 {
            let middle = gone + (kept - gone) / 2;
            if replica.kept_entry(Position(middle), &mut payload).is_some() {
                kept = middle;
            } else {
                gone = middle;
            }
        }
        self.payload = payload;
        Position(kept)
    }
}
