//! From commit to the state machine.

use super::{Replica, Role};
use crate::event::Command;
use crate::ids::Position;
use crate::layout::{commit_position, commit_word};
use crate::memory::LogMemory;
use crate::slot::Kind;

impl<M: LogMemory> Replica<M> {
    /// A follower learns of commits from the word its leader writes into its memory.
    pub(super) fn look_at_commit_word(&mut self, commands: &mut Vec<Command>) {
        let mut word = [0; 8];
        self.memory.load(self.layout.commit_offset(), &mut word);
        let Some(position) = commit_position(u64::from_le_bytes(word)) else { return };
        if position > self.committed && position <= self.snapshot.plus(self.layout.slots()) {
            self.advance(position, commands);
        }
    }

    /// Slots up to here hold chosen values durably. Behind `committed` in one case: a server that
    /// led commits what others have before its own copy is persisted.
    pub(super) fn durably_committed(&self) -> Position {
        let mut word = [0; 8];
        self.memory.load(self.layout.commit_offset(), &mut word);
        let position = commit_position(u64::from_le_bytes(word)).unwrap_or_default();
        position.max(self.snapshot).min(self.committed)
    }

    /// A leader keeps its own word too, never beyond what is durable here.
    pub(super) fn store_commit_word(&mut self, position: Position) {
        self.memory.store(self.layout.commit_offset(), &commit_word(position).to_le_bytes());
    }

    /// Hands the entries up to `to`, which are chosen, to the state machine; takes changes of
    /// membership itself.
    pub(super) fn advance(&mut self, to: Position, commands: &mut Vec<Command>) {
        let first = self.committed.next();
        while self.committed < to {
            let position = self.committed.next();
            let Some(entry) = self.load_entry(position) else {
                self.stop(position, first, commands);
                return;
            };
            if entry.kind == Kind::Configuration {
                let payload = entry.payload.to_vec();
                if let Some(changed) = self.configuration.apply(position, &payload) {
                    self.configuration = changed;
                }
            } else if entry.kind == Kind::Lost {
                self.ring_from = self.ring_from.max(position);
            }
            self.committed = position;
        }
        commands.push(Command::Apply { first, last: to });
    }

    /// A chosen value is gone. What this server says from now on could contradict what it said.
    fn stop(&mut self, damaged: Position, first: Position, commands: &mut Vec<Command>) {
        if self.committed >= first {
            commands.push(Command::Apply { first, last: self.committed });
        }
        self.step_down(commands);
        self.role = Role::Stopped;
        commands.push(Command::Stop { damaged });
    }
}
