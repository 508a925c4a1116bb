//! One service's units in the order of the log, for a reader that follows it.
//!
//! A unit that was proposed twice takes effect once: of each lane, only a turn beyond the last one is
//! told. What lies before the position from which the reader began is not known, so the first unit
//! of a lane may be one that took effect before.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use beeline_replicated_log::{Follower, Position, Refusal};

use crate::machine::Tag;
use crate::unit::{LaneName, Turn, Unit};

/// A unit where it stands in the log: [`Unit::decode`] reads it. One that travels in pieces comes in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// The position of its entry. A reader that used the entry's last unit goes on behind it.
    pub position: Position,
    /// The unit.
    pub bytes: Vec<u8>,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Units {
    follower: Follower,
    service: Tag,
    turns: HashMap<LaneName, Turn>,
    told: VecDeque<Told>,
}

impl Units {
    pub(crate) fn new(follower: Follower, service: Tag) -> Self {
        Self { follower, service, turns: HashMap::new(), told: VecDeque::new() }
    }

    /// The next unit, waited for up to `limit`; `None`: there was none.
    ///
    /// Errors: as [`Follower::next`].
    pub fn next(&mut self, limit: Duration) -> Result<Option<Told>, Refusal> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(told) = self.told.pop_front() {
                return Ok(Some(told));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(entry) = self.follower.next(left)? else { return Ok(None) };
            for command in entry.commands {
                let Ok(unit) = Unit::decode(&command.bytes) else { continue };
                if unit.lane.service != self.service {
                    continue;
                }
                let last = self.turns.entry(unit.lane).or_default();
                if unit.turn > *last {
                    *last = unit.turn;
                    self.told.push_back(Told { position: entry.position, bytes: command.bytes });
                }
            }
        }
    }
}
