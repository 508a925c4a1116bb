//! The replicated state machine of the simulation: lists to which clients append.
//!
//! Every appended item is unique, so a list shows which appends took effect, in which order, and
//! whether one took effect twice.

use std::collections::BTreeMap;

use beeline_paxos::{ClientCommand, Outcome, Position, Sessions, batch};

/// A list's name.
pub type Key = u8;
/// A unique item.
pub type Item = u32;

/// Lists and sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    lists: BTreeMap<Key, Vec<Item>>,
    sessions: Sessions,
}

/// What a client hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The session's name.
    Opened(u64),
    /// The list's length behind the append.
    Appended(u64),
    /// The list.
    List(Vec<Item>),
    /// The command did not run.
    NotRun,
}

/// The bytes of an append.
#[must_use]
pub fn append(key: Key, item: Item) -> Vec<u8> {
    let mut bytes = vec![key];
    bytes.extend_from_slice(&item.to_le_bytes());
    bytes
}

impl Default for Machine {
    fn default() -> Self {
        Self { lists: BTreeMap::new(), sessions: Sessions::new(256) }
    }
}

impl Machine {
    /// Applies an entry of commands; `reply` hears what became of each.
    pub fn apply(&mut self, position: Position, payload: &[u8], mut reply: impl FnMut(u16, Reply)) {
        for (index, command) in (0..).zip(batch::commands(payload)) {
            let answer = self.run(position, index, &command);
            reply(index, answer);
        }
    }

    fn run(&mut self, position: Position, index: u16, command: &ClientCommand<'_>) -> Reply {
        let lists = &mut self.lists;
        let outcome = self.sessions.apply(position, index, command, |bytes, reply| {
            let (key, item) = bytes.split_at(1);
            let list = lists.entry(key[0]).or_default();
            list.push(Item::from_le_bytes([item[0], item[1], item[2], item[3]]));
            reply.extend_from_slice(&(list.len() as u64).to_le_bytes());
        });
        match outcome {
            Outcome::Opened(name) => Reply::Opened(name),
            Outcome::Applied(reply) | Outcome::Repeated(reply) => {
                let mut length = [0; 8];
                length.copy_from_slice(reply);
                Reply::Appended(u64::from_le_bytes(length))
            }
            Outcome::OutOfTurn { .. } | Outcome::Expired => Reply::NotRun,
        }
    }

    /// The list.
    #[must_use]
    pub fn read(&self, key: Key) -> Vec<Item> {
        self.lists.get(&key).cloned().unwrap_or_default()
    }

    /// All lists.
    #[must_use]
    pub fn lists(&self) -> &BTreeMap<Key, Vec<Item>> {
        &self.lists
    }
}
