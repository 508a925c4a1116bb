//! From which size on reading beats sending, learned while objects come in (spec section 3.6).
//!
//! For each power of two of size, and each of the two protocols, a moving average of the time a
//! transfer took. Sizes of which one protocol is unknown take the other's turn now and then.

use std::time::Duration;

/// How an object came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// By messages and copies.
    Sent,
    /// By a one-sided read.
    Read,
}

/// Where reading starts while nothing is known: near the published crossing of copies and
/// registration, less the registration, which is made once per segment here.
const FIRST_GUESS: u64 = 64 << 10;
/// Transfers of each kind before a size is known.
const ENOUGH: u32 = 4;
/// Every so many transfers the protocol is the one not chosen, so that a change is noticed: more
/// rarely where the other one is far slower, so that looking costs some 1 % of the time.
const EXPLORE: (u32, u32) = (64, 2048);
const EXPLORE_SHARE: f64 = 100.0;
/// From this size on objects are always read, also for looking: a sent object of this size would cost
/// more than can be learned.
const ALWAYS_READ: u64 = 4 << 20;
/// And every so many while a size is unknown.
const EXPLORE_UNKNOWN: u32 = 3;

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    count: u32,
    average_ns: f64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Learner {
    cells: [[Cell; 2]; 64],
    transfers: u32,
    /// Size class of the last transfer.
    last: usize,
}

impl Default for Learner {
    fn default() -> Self {
        Self { cells: [[Cell::default(); 2]; 64], transfers: 0, last: 0 }
    }
}

fn class(bytes: u64) -> usize {
    (64 - bytes.max(1).leading_zeros() as usize - 1).min(63)
}

impl Learner {
    /// The bound to ask with: at this many bytes or more, read.
    pub(crate) fn read_min(&mut self) -> u64 {
        self.transfers = self.transfers.wrapping_add(1);
        let unknown = self.cells[..class(ALWAYS_READ)].iter().any(|[sent, read]| {
            (sent.count > 0 || read.count > 0) && sent.count.min(read.count) < ENOUGH
        });
        let every = if unknown { EXPLORE_UNKNOWN } else { self.explore_every() };
        if self.transfers.is_multiple_of(every) {
            // Alternately everything read and everything sent; the size is not known beforehand.
            return if (self.transfers / every).is_multiple_of(2) { 1 } else { ALWAYS_READ };
        }
        self.crossing()
    }

    /// How rarely the protocol is tried that was slower for objects as the last one.
    fn explore_every(&self) -> u32 {
        let [sent, read] = self.cells[self.last];
        let (fast, slow) =
            (sent.average_ns.min(read.average_ns), sent.average_ns.max(read.average_ns));
        let every = EXPLORE_SHARE * (slow / fast.max(1.0) - 1.0);
        (every as u32).clamp(EXPLORE.0, EXPLORE.1)
    }

    /// The smallest size from which on reading is faster, as far as known.
    pub(crate) fn crossing(&self) -> u64 {
        let known = |cells: &[Cell; 2]| cells.iter().all(|cell| cell.count >= ENOUGH);
        let mut crossing = None;
        for (class, cells) in self.cells.iter().enumerate().rev() {
            if !known(cells) {
                continue;
            }
            if cells[1].average_ns > cells[0].average_ns {
                // Slower here: the crossing lies above.
                return crossing.unwrap_or((2_u64 << class.min(62)).max(FIRST_GUESS));
            }
            crossing = Some(1_u64 << class);
        }
        crossing.map_or(FIRST_GUESS, |crossing| crossing.min(FIRST_GUESS))
    }

    /// A transfer took so long.
    pub(crate) fn learn(&mut self, bytes: u64, protocol: Protocol, took: Duration) {
        self.last = class(bytes);
        let cell = &mut self.cells[self.last][usize::from(protocol == Protocol::Read)];
        let took = took.as_nanos() as f64;
        cell.count = cell.count.saturating_add(1);
        let weight = (1.0 / f64::from(cell.count)).max(0.1);
        cell.average_ns += (took - cell.average_ns) * weight;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crossing_is_where_the_curves_cross_and_both_sides_are_tried() {
        let mut learner = Learner::default();
        let sent = |bytes: u64| Duration::from_nanos(2_000 + bytes / 4);
        let read = |bytes: u64| Duration::from_nanos(10_000 + bytes / 20);
        let mut tried = [0_u32; 2];
        for round in 0..4000_u32 {
            let bytes = 1_u64 << (10 + round % 13);
            if bytes >= learner.read_min() {
                learner.learn(bytes, Protocol::Read, read(bytes));
                tried[1] += 1;
            } else {
                learner.learn(bytes, Protocol::Sent, sent(bytes));
                tried[0] += 1;
            }
        }
        // 2000 + b/4 = 10000 + b/20 at 40 000 bytes.
        assert_eq!(learner.crossing(), 64 << 10, "{tried:?}");
        assert!(tried[0] > 500 && tried[1] > 500, "{tried:?}");
    }

    #[test]
    fn a_protocol_that_is_far_slower_is_tried_rarely() {
        let took = |bytes: u64, read: bool| {
            let ns = if read { 20_000 + bytes / 10 } else { 5_000 + bytes };
            Duration::from_nanos(ns)
        };
        let mut learner = Learner::default();
        // How sending does for large objects stays unknown, and must not keep it looking.
        learner.learn(8 << 20, Protocol::Read, took(8 << 20, true));
        let (mut spent, mut best) = (Duration::ZERO, Duration::ZERO);
        let bytes = 1 << 20;
        for round in 0..10_000 {
            let read = bytes >= learner.read_min();
            let protocol = if read { Protocol::Read } else { Protocol::Sent };
            learner.learn(bytes, protocol, took(bytes, read));
            if round >= 100 {
                spent += took(bytes, read);
                best += took(bytes, true);
            }
        }
        // Looking costs something, and little.
        assert!(spent > best && spent < best * 102 / 100, "{spent:?} instead of {best:?}");
    }

    #[test]
    fn without_knowledge_the_published_figure_holds() {
        assert_eq!(Learner::default().crossing(), FIRST_GUESS);
    }
}
