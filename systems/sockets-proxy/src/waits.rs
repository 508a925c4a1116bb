//! What a connection waits for after its link fell or its proxy died, without sockets or memory: each monitor says
//! how far its end has come, once in each life of the link, and each end goes on once in each life.
//!
//! Two lives may follow each other faster than threads and monitors do: what was said in one must not be taken for
//! another's, or an end would begin anew behind packets that it has sent since, and the other program would read
//! them twice. So every position carries the life in which it was taken ([`beeline_ntb::Link::life`]).
//!
//! | heard in this life of the link | of | then |
//! | --- | --- | --- |
//! | up | the same life | the end goes on, if it has not yet |
//! | not up | any | kept: the other end may have seen the new life first |
//! | up | another life | dropped: that life is over, and its other end reports again in the next |

use std::time::{Duration, Instant};

/// How far one end of a connection had come when a life of the link began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Which life.
    pub life: u64,
    /// Packets in the program's queue so far, counted round.
    pub delivered: u32,
    /// Of these, those that it has consumed.
    pub consumed: u32,
}

/// What one connection waits for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waits {
    /// The other monitor is to hear how far this end has come, once the link is up.
    reports: bool,
    /// Since when this end waits for the other one.
    since: Option<Instant>,
    /// The other end's position, and the partition that carries it there.
    heard: Option<(Position, usize)>,
}

impl Waits {
    /// The link fell, or the proxy is a new one.
    pub fn begin(&mut self, now: Instant) {
        *self = Self { reports: true, since: Some(now), heard: None };
    }

    /// This end does not wait: it is over, or goes on. True if it waited.
    pub fn end(&mut self) -> bool {
        self.heard = None;
        self.since.take().is_some()
    }

    /// This end waits for the other one.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.since.is_some()
    }

    /// The other end did not come back within `grace`.
    #[must_use]
    pub fn is_late(&self, now: Instant, grace: Duration) -> bool {
        self.since.is_some_and(|since| now.saturating_duration_since(since) > grace)
    }

    /// The link is up in this life: whether the other monitor is to hear of this end, and from where this end goes
    /// on, if the other one was heard of already.
    pub fn up(&mut self, life: u64) -> (bool, Option<(Position, usize)>) {
        let heard = self.heard.take().filter(|(position, _)| position.life == life);
        let heard = heard.filter(|_| self.since.take().is_some());
        (std::mem::take(&mut self.reports), heard)
    }

    /// The other monitor says how far its end has come, while the link is up in the life `now`. True if this end
    /// goes on from there.
    pub fn hears(&mut self, position: Position, partition: usize, now: Option<u64>) -> bool {
        if now.is_none() {
            self.heard = Some((position, partition));
            return false;
        }
        now == Some(position.life) && self.since.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn position(life: u64) -> Position {
        Position { life, delivered: 5, consumed: 3 }
    }

    #[test]
    fn an_end_goes_on_once_in_each_life_and_never_from_what_was_said_in_another() {
        let now = Instant::now();
        let mut waits = Waits::default();
        assert!(!waits.hears(position(1), 0, Some(1)), "it waits for nothing");
        waits.begin(now);
        assert!(!waits.hears(position(1), 0, Some(2)), "of a life that is over");
        assert!(waits.is_waiting());
        assert!(waits.hears(position(2), 0, Some(2)));
        assert!(!waits.hears(position(2), 0, Some(2)), "once");
        // Heard before this end has seen the life.
        waits.begin(now);
        assert!(!waits.hears(position(3), 1, None));
        assert_eq!(waits.up(3), (true, Some((position(3), 1))));
        assert_eq!(waits.up(3), (false, None));
        assert!(!waits.hears(position(3), 0, Some(3)), "it went on already");
        // Heard of a life that never came to be.
        waits.begin(now);
        assert!(!waits.hears(position(4), 0, None));
        assert_eq!(waits.up(5), (true, None));
        assert!(waits.is_waiting() && waits.hears(position(5), 0, Some(5)));
        // What was heard before a fall is of no use behind it.
        waits.begin(now);
        assert!(!waits.hears(position(6), 0, None));
        waits.begin(now);
        assert_eq!(waits.up(6), (true, None));
        assert!(waits.is_late(now + Duration::from_secs(6), Duration::from_secs(5)));
        assert!(waits.end() && !waits.end());
    }
}
