//! Connections that the kernel serves better: their program sleeps whenever something small comes.
//!
//! To wake it takes this relay, the other one, and the kernel's connection of the two programs: a message
//! that has to be rung for has gone by four processes where the kernel needs none. So a connection at one
//! end of which nearly every message is rung for is [brought back](crate::recall), and its ends ask anew
//! after a while: a program that is busy by then hears of what comes without being woken, and is carried on.
//! What is too large for a message is another matter: the kernel would copy it. Where such pass, either way,
//! nothing is brought back for this, and what was is carried again as soon as they do.

use std::time::Duration;

use beeline_sockets::recall::Hold;

use crate::relay::Core;

/// Messages that are looked at together.
const MESSAGES: u32 = 32;
/// So many of them rung for are nearly every one.
const NEARLY_ALL: u32 = 24;

/// What the program did at the last messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sleepy {
    came: u32,
    rung_for: u32,
}

impl Sleepy {
    /// A small message came.
    pub fn came(&mut self) {
        if self.came >= MESSAGES {
            *self = Self::default();
        }
        self.came += 1;
    }

    /// Something large came or went: nothing is known any more.
    pub fn large(&mut self) {
        *self = Self::default();
    }

    /// The program slept for what came. True when it nearly always does.
    #[must_use]
    pub fn rung_for(&mut self) -> bool {
        self.rung_for += 1;
        let nearly_always = self.rung_for >= NEARLY_ALL;
        if nearly_always {
            // Where it cannot be brought back, not again at once.
            *self = Self::default();
        }
        nearly_always
    }
}

impl Core {
    /// The program of this connection sleeps at nearly every message.
    pub(crate) fn is_sleepy(&mut self, index: u32) {
        let hold = Hold { time: self.settings.sleepers_hold, while_small: true };
        if hold.time > Duration::ZERO && self.bring_back(index, hold, hold) {
            self.counters.sleepy += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of a kind until it is sleepy, at most `most`.
    fn tell(most: u32, mut is_rung_for: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut sleepy = Sleepy::default();
        (1..=most).find(|at| {
            sleepy.came();
            is_rung_for(*at) && sleepy.rung_for()
        })
    }

    #[test]
    fn who_sleeps_at_nearly_every_message_is_told_from_who_is_busy() {
        assert_eq!(tell(1000, |_| true), Some(NEARLY_ALL));
        assert_eq!(tell(1000, |at| at % 4 != 1), Some(MESSAGES));
        assert_eq!(tell(1000, |at| at % 4 != 0), Some(MESSAGES - 1));
        assert_eq!(tell(1000, |at| at % 2 == 0), None);
        assert_eq!(tell(1000, |_| false), None);
        // Busy before, and sleepy from then on.
        assert!(tell(1000, |at| at > 500).is_some_and(|at| at <= 500 + 2 * MESSAGES));
    }

    #[test]
    fn where_large_ones_come_it_is_nothing_for_the_kernel() {
        let mut sleepy = Sleepy::default();
        for at in 0..1000 {
            if at % 20 == 0 {
                sleepy.large();
            } else {
                sleepy.came();
            }
            assert!(!sleepy.rung_for());
        }
    }
}
