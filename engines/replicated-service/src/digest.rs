//! What the log did at one member, window by window, so that members that differ find out.
//!
//! A window is [`WINDOW`] positions. Its digest covers, per position, the command and what its service
//! says of its effects, or its replies where the service says nothing. The leader stamps the digest of its newest whole window on
//! each unit it proposes; a member that applies the unit has the same window behind it, and compares.
//! That costs two checksums per unit and no message.
//!
//! A window counts only where every unit in it took effect here, in this run: a unit that is applied
//! again after a restart answers that it was applied before, and says nothing. So windows across a
//! restart, a snapshot or a repeated proposal are not compared; the next one is.

use std::collections::VecDeque;

use crate::unit::Check;

/// Positions of a window.
pub(crate) const WINDOW: u64 = 64;
/// Windows that are remembered: a leader's newest is never further behind than what is under way.
const KEPT: usize = 256;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// The window of the position applied last, and its digest while it may become whole.
    open: Option<(u64, Option<u64>)>,
    whole: VecDeque<Check>,
}

fn mix(digest: u64, word: u64) -> u64 {
    (digest.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Windows {
    /// A command at `position` was applied: with this outcome, or with one that says nothing.
    ///
    /// Positions come in order, some several times and some (without a command) never, which is
    /// alike at every member. A window is whole once a later one begins.
    pub(crate) fn applied(&mut self, position: u64, outcome: Option<u64>) {
        let Some(before) = position.checked_sub(1) else { return };
        let window = before / WINDOW + 1;
        if self.open.is_none_or(|(open, _)| open != window) {
            let from_its_start = self.open.is_some() || before % WINDOW == 0;
            if let Some((window, Some(digest))) = self.open.take() {
                if self.whole.len() == KEPT {
                    self.whole.pop_front();
                }
                self.whole.push_back(Check { window, digest });
            }
            self.open = Some((window, from_its_start.then_some(window)));
        }
        if let Some((_, digest)) = &mut self.open {
            let both = digest.zip(outcome);
            *digest = both.map(|(digest, outcome)| mix(digest, outcome ^ position.rotate_left(40)));
        }
    }

    /// The state was replaced.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }

    /// The newest whole window.
    pub(crate) fn newest(&self) -> Option<Check> {
        self.whole.back().copied()
    }

    /// What a window did here; `None` where it is not known.
    pub(crate) fn find(&self, window: u64) -> Option<u64> {
        let found = self.whole.iter().find(|check| check.window == window);
        found.map(|check| check.digest)
    }
}

/// What a unit did, in one word, from the checksum of its command.
pub(crate) fn outcome(command: u32, effects: u64) -> u64 {
    mix(u64::from(command), effects)
}

#[cfg(test)]
mod tests {
    use beeline_wire::checksum::crc32c;

    use super::*;

    #[test]
    fn windows_agree_where_everything_agrees_and_only_whole_ones_count() {
        let (mut one, mut other) = (Windows::default(), Windows::default());
        for position in 1..=200 {
            one.applied(position, Some(position));
            // The other one began in the middle of the first window, and has a gap in the third.
            let tells = position > 10 && position != 150;
            other.applied(position, Some(position).filter(|_| tells));
        }
        assert_eq!(one.newest().map(|check| check.window), Some(3));
        assert_eq!(other.newest().map(|check| check.window), Some(2));
        assert_eq!((other.find(1), other.find(3)), (None, None));
        assert_eq!(one.find(2), other.find(2));
        assert!(one.find(2).is_some());
    }

    #[test]
    fn any_difference_makes_another_digest() {
        let of = |command: &[u8], effects, place: u64| {
            let mut windows = Windows::default();
            for position in 1..=WINDOW + 1 {
                let told = outcome(crc32c(command), effects);
                windows.applied(position, Some(if position == place { told } else { 0 }));
            }
            windows.newest().map(|check| check.digest)
        };
        let all = [
            of(b"command", 1, 5),
            of(b"command", 1, 6),
            of(b"command", 2, 5),
            of(b"commands", 1, 5),
        ];
        for (index, digest) in all.iter().enumerate() {
            assert!(digest.is_some() && !all[..index].contains(digest), "{index}");
        }
    }
}
