//! How fast a leader proposes while a member takes in a snapshot.
//!
//! A follower that gets a snapshot needs the entries behind it next, and they are in the leader's
//! ring for as long as the ring takes to come round. Under sustained writes it could come round
//! before the snapshot is sent and restored, again and again, and the follower would never be back.
//! So proposals slow down, the more the less of the ring is left: at the present pace what is left
//! lasts [`LASTS_NS`], which makes some ten times as much in all.
//!
//! Bounds: an entry waits at most [`LONGEST_NS`], and commands that come meanwhile share it; a
//! member is waited for no longer than [`PATIENCE_NS`]; once the ring has come round for it there is
//! nothing to save until it is sent another snapshot.

use beeline_paxos::{NodeId, Position};

/// What is left of the ring lasts so long at the present pace, nanoseconds.
const LASTS_NS: u64 = 2_000_000_000;
/// Longest pause between two entries, nanoseconds.
const LONGEST_NS: u64 = 100_000_000;
/// One member slows the others down for so long, nanoseconds; then it has to do without.
const PATIENCE_NS: u64 = 60_000_000_000;

/// A member that takes in a snapshot.
#[derive(Debug)]
struct Behind {
    peer: NodeId,
    /// What the snapshot covers, or what the member has confirmed behind it.
    has: Position,
    since_ns: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Pace {
    slots: u64,
    behind: Vec<Behind>,
    last: Position,
    proposed_ns: u64,
}

impl Pace {
    pub(super) fn new(slots: u64) -> Self {
        Self { slots, behind: Vec::new(), last: Position::NONE, proposed_ns: 0 }
    }

    /// A snapshot up to `position` is on its way to `peer`, or begun for it.
    pub(super) fn begin(&mut self, peer: NodeId, position: Position, now_ns: u64) {
        let (slots, last) = (self.slots, self.last);
        match self.behind.iter_mut().find(|behind| behind.peer == peer) {
            // One that it has may be installed by now: the older counts while it is of use.
            Some(behind) => {
                if last.since(behind.has) >= slots {
                    behind.has = behind.has.max(position);
                }
            }
            None => self.behind.push(Behind { peer, has: position, since_ns: now_ns }),
        }
    }

    /// Forgets members that caught up. `confirmed` tells how far one is; `None`: it is gone.
    pub(super) fn look(
        &mut self,
        last: Position,
        now_ns: u64,
        confirmed: impl Fn(NodeId) -> Option<Position>,
    ) {
        self.last = last;
        let near = self.slots / 4;
        self.behind.retain_mut(|behind| {
            let Some(confirmed) = confirmed(behind.peer) else { return false };
            behind.has = behind.has.max(confirmed);
            let caught_up = confirmed > Position::NONE && last.since(confirmed) <= near;
            !caught_up && now_ns.saturating_sub(behind.since_ns) < 2 * PATIENCE_NS
        });
    }

    /// An entry was proposed.
    pub(super) fn proposed(&mut self, position: Position, now_ns: u64) {
        self.last = position;
        self.proposed_ns = now_ns;
    }

    fn pause_ns(&self, now_ns: u64) -> u64 {
        let waited_for = |behind: &&Behind| now_ns.saturating_sub(behind.since_ns) < PATIENCE_NS;
        let pause_ns = |behind: &Behind| {
            let used = self.last.since(behind.has);
            match self.slots.saturating_sub(used) {
                0 => 0,
                _ if used * 2 <= self.slots => 0,
                left => (LASTS_NS / left).min(LONGEST_NS),
            }
        };
        self.behind.iter().filter(waited_for).map(pause_ns).max().unwrap_or(0)
    }

    /// Whether the next entry has to wait.
    pub(super) fn holds(&self, now_ns: u64) -> bool {
        let pause_ns = self.pause_ns(now_ns);
        pause_ns > 0 && now_ns < self.proposed_ns.saturating_add(pause_ns)
    }

    /// When the next entry may be proposed, if it has to wait.
    pub(super) fn due_ns(&self) -> Option<u64> {
        let pause_ns = self.pause_ns(self.proposed_ns);
        (pause_ns > 0).then(|| self.proposed_ns.saturating_add(pause_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: NodeId = NodeId(2);
    const SECOND: u64 = 1_000_000_000;

    /// Proposes as fast as it may from position 1000 on; how long the ring lasts, and the longest
    /// wait for one entry.
    fn runs(pace: &mut Pace, slots: u64) -> (u64, u64) {
        let (mut now_ns, mut longest_ns) = (SECOND, 0);
        let mut position = Position(1000);
        let start_ns = now_ns;
        while position.since(Position(1000)) < slots {
            let before_ns = now_ns;
            while pace.holds(now_ns) {
                now_ns = pace.due_ns().unwrap().max(now_ns + 1);
            }
            longest_ns = longest_ns.max(now_ns - before_ns);
            position = position.next();
            pace.proposed(position, now_ns);
            now_ns += 10_000;
        }
        (now_ns - start_ns, longest_ns)
    }

    #[test]
    fn a_ring_lasts_for_seconds_while_a_member_restores_and_no_entry_waits_for_long() {
        for slots in [64, 1024, 4096] {
            let mut pace = Pace::new(slots);
            pace.look(Position(1000), SECOND, |_| None);
            let (alone_ns, _) = runs(&mut pace, slots);
            assert!(alone_ns < SECOND / 10, "nobody is waited for");
            pace.look(Position(1000), SECOND, |_| None);
            pace.begin(PEER, Position(1000), SECOND);
            let (slowed_ns, longest_ns) = runs(&mut pace, slots);
            // Half of a short ring is not waited for, and no entry of the rest for longer than that.
            let least_ns = (4 * SECOND).min(slots / 2 * LONGEST_NS * 3 / 4);
            assert!(slowed_ns > least_ns, "{slots} slots last {slowed_ns} ns");
            assert!(longest_ns <= LONGEST_NS, "{longest_ns}");
            assert!(!pace.holds(u64::MAX / 2), "the ring came round: nothing is left to save");
        }
    }

    #[test]
    fn a_member_that_caught_up_or_never_does_is_not_waited_for() {
        let mut pace = Pace::new(64);
        pace.begin(PEER, Position(1000), SECOND);
        pace.proposed(Position(1060), SECOND);
        assert!(pace.holds(SECOND + 1));
        assert!(!pace.holds(SECOND + PATIENCE_NS + LONGEST_NS));
        pace.look(Position(1060), SECOND, |_| Some(Position(1010)));
        assert!(pace.holds(SECOND + 1), "behind the snapshot, and not near");
        pace.look(Position(1060), SECOND, |_| Some(Position(1055)));
        assert!(!pace.holds(SECOND + 1), "caught up");
        pace.begin(PEER, Position(1000), SECOND);
        pace.look(Position(1060), SECOND, |_| None);
        assert!(!pace.holds(SECOND + 1), "gone");
    }
}
