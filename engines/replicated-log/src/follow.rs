//! Following the log: entries in their order, as they are committed.
//!
//! ```text
//!  Follower ── from a position ──▶ log's thread ── what is applied and kept ──▶ Follower
//!                                      └─ nothing yet: the question waits there
//! ```
//!
//! A follower reads from one member, what that member has applied. It goes on where it was, at this member or
//! another, by giving the position behind the last entry that it used. The log keeps an entry until its
//! ring comes round, and after a member's restart those behind its snapshot: a follower that wants an older
//! one is told the oldest that is kept ([`Refusal::Gone`]), and begins anew with a state that covers what
//! lies before ([`Handle::state`] tells of which position it is).
//!
//! Entries are what was agreed on, not what took effect: a command that was proposed twice under a
//! session stands there twice, with one number.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use beeline_paxos::{ClientCommand, Position};

use crate::handle::{Handle, Refusal};

/// Commands that a follower holds at a time, bytes, but for one entry.
const HELD_BYTES: usize = 256 << 10;

/// A command of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Whose: a session's name, or [`crate::NO_SESSION`].
    pub session: u64,
    /// Its number in the session.
    pub sequence: u64,
    /// What the state machine is given.
    pub bytes: Vec<u8>,
}

impl Command {
    pub(crate) fn of(command: ClientCommand<'_>) -> Self {
        let ClientCommand { session, sequence, bytes } = command;
        Self { session, sequence, bytes: bytes.to_vec() }
    }
}

/// An entry of the log with its commands, of which there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it stands.
    pub position: Position,
    /// In their order.
    pub commands: Vec<Command>,
}

/// Entries one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passage {
    /// Those that have commands.
    pub entries: Vec<Entry>,
    /// Where the passage behind this one begins.
    pub next: Position,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Follower {
    handle: Handle,
    next: Position,
    held: VecDeque<Entry>,
    /// The question that is asked.
    asked: Option<Receiver<Result<Passage, Refusal>>>,
    /// Tells the log's thread that the answer is waited for.
    alive: Arc<()>,
}

impl Follower {
    pub(crate) fn new(handle: Handle, from: Position) -> Self {
        let (held, asked, alive) = (VecDeque::new(), None, Arc::default());
        // Positions count from 1.
        Self { handle, next: from.max(Position::NONE.next()), held, asked, alive }
    }

    /// The next entry, waited for up to `limit`; `None`: there was none.
    ///
    /// Errors: [`Refusal::Gone`], [`Refusal::Stopped`]; and [`Refusal::Full`]: too many followers wait.
    pub fn next(&mut self, limit: Duration) -> Result<Option<Entry>, Refusal> {
        let deadline = std::time::Instant::now() + limit;
        loop {
            if let Some(entry) = self.held.pop_front() {
                return Ok(Some(entry));
            }
            let asked = match self.asked.take() {
                Some(asked) => asked,
                None => self.ask(),
            };
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            match asked.recv_timeout(left) {
                Ok(told) => {
                    let Passage { entries, next } = told?;
                    self.held.extend(entries);
                    self.next = next;
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.asked = Some(asked);
                    return Ok(None);
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Refusal::Stopped),
            }
        }
    }

    fn ask(&self) -> Receiver<Result<Passage, Refusal>> {
        let (sender, receiver) = channel();
        self.handle.entries(self.next, HELD_BYTES, &self.alive, move |told| {
            // The follower may be gone.
            let _ = sender.send(told);
        });
        receiver
    }
}
