//! The life of a link: scratchpads, and the four steps by which two hosts find each other.
//!
//! ```text
//! offset of a part's first page, one word of 8 bytes on each line of 64:
//!   0  magic and version     64  epoch of the writer     128  agreement: see below
//! 192  state                256  beat                    320  up to 8 words of announcement
//! ```
//!
//! The steps, at each end (NTSocks 3.1): the memory is there (1) and the other host's writes come
//! to it (2) once the window is mapped; then this end publishes what it has, under an epoch of its
//! own (3); when it sees the other end's, it clears its own memory, agrees to the pair of epochs, and
//! rings "peer up" (4). The link is up at an end that has prepared for the other end's epoch and finds
//! the other end's agreement to the same pair. A new epoch of the other end, "going down", or a beat
//! that stands still ends it; whatever the memory holds then is cleared before the next life.
//!
//! The agreement is one word made of both epochs. Were it the reader's epoch alone, a reader could
//! find it while the writer's epoch is still the one of before, and be up with a life that is over:
//! the two words are posted one after the other.
//!
//! The other host writes only after it found the agreement, which is posted behind the clearing:
//! nothing of one life is taken for the next one's.

use std::time::{Duration, Instant};

use std::sync::atomic::Ordering;

use crate::window::{Inbound, Outbound, Window};

/// Bytes of the registers at the beginning of a window's part.
pub const REGISTERS_BYTES: usize = 4096;
/// Doorbell bit of the link itself.
pub const LINK_BELL: usize = 0;
/// Words of an announcement.
pub const ANNOUNCED: usize = 8;

const MAGIC_AT: usize = 0;
const EPOCH_AT: usize = 64;
const AGREED_AT: usize = 128;
const STATE_AT: usize = 192;
const BEAT_AT: usize = 256;
const ANNOUNCED_AT: usize = 320;

/// "BLNTB", two zeros and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"BLNTB\0\0\x02");

/// Why a link fell whose other end said that it goes: it is not coming back.
pub const IN_GOOD_ORDER: &str = "the other end went in good order";

const GOING_DOWN: u64 = 1;
const DOWN_AGREED: u64 = 2;

/// How often an end announces itself anew, and shows that it lives.
pub const BEAT: Duration = Duration::from_millis(200);

/// The word by which the writer, in its life `own`, agrees to the reader's life `theirs`.
fn agreement(theirs: u64, own: u64) -> u64 {
    theirs ^ own.rotate_left(32)
}

/// What an end publishes of how it divides the window: both must say the same.
pub type Announcement = [u64; ANNOUNCED];

/// How a link stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The other end is not there, or has not seen this one.
    Down,
    /// Both have seen each other.
    Up,
    /// This end said that it goes, and waits for the answer.
    GoingDown,
    /// It may go.
    Over,
}

/// What a look found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The link is up.
    Up,
    /// It is not any more.
    Down {
        /// Why.
        reason: &'static str,
    },
    /// The other end divides its window otherwise, or is of another version: the place in the
    /// announcement that differs, its word there and this end's.
    Unequal {
        /// Place in the announcement; `None` for the magic and version.
        place: Option<usize>,
        /// The other end's word.
        theirs: u64,
        /// This end's.
        ours: u64,
    },
}

/// One end of a link. Pure but for the window: the caller looks, and says what time it is.
#[derive(Debug)]
pub struct Link {
    inbound: Inbound,
    outbound: Outbound,
    /// What is cleared before each life: the rest of the part.
    body: Inbound,
    announced: Announcement,
    epoch: u64,
    /// The other end's epoch that this end prepared for.
    seen: u64,
    state: State,
    beat: u64,
    told: Option<Instant>,
    theirs: (u64, Instant),
    silence: Duration,
    refused: Option<(u64, Option<usize>)>,
}

impl Link {
    /// Begins a life over `window`, whose first [`REGISTERS_BYTES`] are the link's. `epoch` is
    /// random and not 0.
    #[must_use]
    pub fn begin(
        window: &Window,
        announced: Announcement,
        epoch: u64,
        silence: Duration,
        now: Instant,
    ) -> Self {
        let length = window.inbound.length_bytes();
        let body = window.inbound.part(REGISTERS_BYTES, length - REGISTERS_BYTES);
        Self {
            inbound: window.inbound.clone(),
            outbound: window.outbound.clone(),
            body,
            announced,
            epoch,
            seen: 0,
            state: State::Down,
            beat: 0,
            told: None,
            theirs: (0, now),
            silence,
            refused: None,
        }
    }

    /// How it stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// This end's epoch.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The life that both ends agreed to, by the same number at both; `None` while the link is not up.
    #[must_use]
    pub fn life(&self) -> Option<u64> {
        (self.state == State::Up).then_some(self.epoch ^ self.seen)
    }

    fn read(&self, at: usize) -> u64 {
        #[cfg(test)]
        words::before_a_read();
        // Acquire with the fence that the other end puts behind what a register announces.
        self.inbound.word(at).load(Ordering::Acquire)
    }

    fn announce(&mut self, now: Instant) {
        self.told = Some(now);
        for (index, word) in self.announced.iter().enumerate() {
            self.outbound.post_word(ANNOUNCED_AT + index * 64, *word);
        }
        self.outbound.post_word(STATE_AT, 0);
        let agreed = if self.seen == 0 { 0 } else { agreement(self.seen, self.epoch) };
        self.outbound.post_word(AGREED_AT, agreed);
        self.outbound.fence();
        self.outbound.post_word(EPOCH_AT, self.epoch);
        self.outbound.post_word(MAGIC_AT, MAGIC);
        self.outbound.fence();
    }

    /// Looks at the registers, and shows that this end lives. `ring`: where the caller has to ring.
    pub fn look(&mut self, now: Instant, ring: &mut bool) -> Option<Event> {
        if self.state == State::Over {
            return None;
        }
        let due = self.told.is_none_or(|told| now.saturating_duration_since(told) >= BEAT);
        if due && self.state == State::GoingDown {
            self.told = Some(now);
        } else if due {
            self.beat = self.beat.wrapping_add(1);
            self.outbound.post_word(BEAT_AT, self.beat);
            self.announce(now);
        }
        if self.state == State::GoingDown {
            if matches!(self.read(STATE_AT), DOWN_AGREED | GOING_DOWN) {
                self.state = State::Over;
            }
            return None;
        }
        let magic = self.read(MAGIC_AT);
        if magic == 0 {
            return self.falls("the other end is not there");
        }
        let epoch = self.read(EPOCH_AT);
        if let Some(event) = self.refusal(magic, epoch) {
            return event;
        }
        if epoch == 0 {
            return None;
        }
        if self.read(STATE_AT) == GOING_DOWN {
            self.outbound.post_word(STATE_AT, DOWN_AGREED);
            self.outbound.fence();
            *ring = true;
            return self.falls(IN_GOOD_ORDER);
        }
        if epoch != self.seen {
            if self.state == State::Up {
                // The next look prepares for the new one.
                return self.falls("the other end began anew");
            }
            self.body.clear();
            self.seen = epoch;
            self.theirs = (self.read(BEAT_AT), now);
            self.announce(now);
            *ring = true;
        }
        let beat = self.read(BEAT_AT);
        if beat != self.theirs.0 {
            self.theirs = (beat, now);
        } else if self.state == State::Up
            && now.saturating_duration_since(self.theirs.1) > self.silence
        {
            return self.falls("the other end's beat stands still");
        }
        if self.state == State::Down && self.read(AGREED_AT) == agreement(self.epoch, self.seen) {
            self.state = State::Up;
            self.theirs.1 = now;
            *ring = true;
            return Some(Event::Up);
        }
        None
    }

    /// What differs at the other end, if anything: said once for each of its lives.
    fn refusal(&mut self, magic: u64, epoch: u64) -> Option<Option<Event>> {
        let (place, theirs, ours) = if magic == MAGIC {
            let words = (0..ANNOUNCED).map(|index| self.read(ANNOUNCED_AT + index * 64));
            let mut pairs = words.zip(self.announced).enumerate();
            let (index, (theirs, ours)) = pairs.find(|(_, (theirs, ours))| theirs != ours)?;
            (Some(index), theirs, ours)
        } else {
            (None, magic, MAGIC)
        };
        let known = self.refused == Some((epoch, place));
        self.refused = Some((epoch, place));
        let up = self.state == State::Up;
        self.state = State::Down;
        Some((!known || up).then_some(Event::Unequal { place, theirs, ours }))
    }

    fn falls(&mut self, reason: &'static str) -> Option<Event> {
        if self.state != State::Up {
            return None;
        }
        self.end();
        Some(Event::Down { reason })
    }

    fn end(&mut self) {
        self.state = State::Down;
        self.seen = 0;
        // Another life: what this end wrote in the old one is none of it.
        self.epoch = self.epoch.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1) | 1;
        self.told = None;
    }

    /// Ends the life for a reason of this end's: the other one finds a new epoch.
    pub fn fail(&mut self) {
        if self.state == State::Up {
            self.end();
        }
    }

    /// Says that this end goes; [`Link::look`] finds [`State::Over`] once the other end agreed. At
    /// once where it is not there.
    pub fn go_down(&mut self) {
        if self.state == State::Up {
            self.state = State::GoingDown;
            self.outbound.post_word(STATE_AT, GOING_DOWN);
        } else {
            self.state = State::Over;
        }
        self.outbound.fence();
    }

    /// Takes this end's words out of the other's registers: the last act of a life.
    pub fn leave(&mut self) {
        self.state = State::Over;
        self.outbound.post_word(MAGIC_AT, 0);
        self.outbound.post_word(EPOCH_AT, 0);
        self.outbound.fence();
    }
}

/// A random epoch.
///
/// Errors: the system's, without randomness.
pub fn random_epoch() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(u64::from_le_bytes(bytes) | 1)
}

#[cfg(test)]
mod words;

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;
    use std::sync::Arc;

    use beeline_os::Mapping;

    use super::*;
    use crate::window::{Bells, Mapped};

    /// Bells that nothing hears.
    #[derive(Debug)]
    pub(super) struct Silent;

    impl Bells for Silent {
        fn ring(&self, _: usize) {}

        fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
            None
        }

        fn clear(&self, _: usize) {}
    }

    fn windows() -> [Window; 2] {
        let length = 64 << 10;
        let mapping = Arc::new(Mapping::anonymous(2 * length).unwrap());
        [(0, length), (length, 0)].map(|(own, other)| Window {
            inbound: Inbound::new(Arc::clone(&mapping), own, length),
            outbound: Outbound::new(Arc::new(Mapped::new(Arc::clone(&mapping), other, length))),
            bells: Arc::new(Silent),
        })
    }

    const SILENCE: Duration = Duration::from_secs(5);

    fn turns(link: &mut Link, other: &mut Link, now: &mut Instant, count: u32) -> [Vec<Event>; 2] {
        let mut events = [Vec::new(), Vec::new()];
        for _ in 0..count {
            *now += BEAT;
            let mut ring = false;
            events[0].extend(link.look(*now, &mut ring));
            events[1].extend(other.look(*now, &mut ring));
        }
        events
    }

    #[test]
    fn either_end_may_begin_and_both_come_up() {
        for first in [0, 1] {
            let [one, other] = windows();
            let mut now = Instant::now();
            let mut links = [
                Link::begin(&one, [7; 8], 3, SILENCE, now),
                Link::begin(&other, [7; 8], 5, SILENCE, now),
            ];
            let mut ring = false;
            assert_eq!(links[first].look(now, &mut ring), None);
            let [left, right] = &mut links;
            let events = turns(left, right, &mut now, 6);
            assert_eq!(events, [vec![Event::Up], vec![Event::Up]]);
        }
    }

    #[test]
    fn an_end_that_began_anew_is_met_by_cleared_memory() {
        let [one, other] = windows();
        let mut now = Instant::now();
        let mut link = Link::begin(&one, [1; 8], 3, SILENCE, now);
        let mut second = Link::begin(&other, [1; 8], 5, SILENCE, now);
        turns(&mut link, &mut second, &mut now, 6);
        other.outbound.post_word(REGISTERS_BYTES + 8, 99);
        let mut second = Link::begin(&other, [1; 8], 9, SILENCE, now);
        let events = turns(&mut link, &mut second, &mut now, 8);
        assert_eq!(events[0], [Event::Down { reason: "the other end began anew" }, Event::Up]);
        assert_eq!(events[1], [Event::Up]);
        assert_eq!(one.inbound.word(REGISTERS_BYTES + 8).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_orderly_end_is_agreed_and_a_silent_one_is_noticed() {
        let [one, other] = windows();
        let mut now = Instant::now();
        let mut link = Link::begin(&one, [1; 8], 3, SILENCE, now);
        let mut second = Link::begin(&other, [1; 8], 5, SILENCE, now);
        turns(&mut link, &mut second, &mut now, 6);
        link.go_down();
        let events = turns(&mut link, &mut second, &mut now, 2);
        assert_eq!(events[1], [Event::Down { reason: "the other end went in good order" }]);
        assert_eq!((link.state(), second.state()), (State::Over, State::Down));
        let mut link = Link::begin(&one, [1; 8], 11, SILENCE, now);
        turns(&mut link, &mut second, &mut now, 8);
        assert_eq!(link.state(), State::Up);
        assert_eq!(link.look(now, &mut false), None);
        now += SILENCE * 2;
        let event = link.look(now, &mut false);
        assert_eq!(event, Some(Event::Down { reason: "the other end's beat stands still" }));
    }

    #[test]
    fn unequal_ends_are_told_of_once_by_what_differs() {
        let [one, other] = windows();
        let mut now = Instant::now();
        let mut link = Link::begin(&one, [1, 2, 3, 4, 5, 6, 7, 8], 3, SILENCE, now);
        let mut second = Link::begin(&other, [1, 2, 9, 4, 5, 6, 7, 8], 5, SILENCE, now);
        let events = turns(&mut link, &mut second, &mut now, 8);
        assert_eq!(events[0], [Event::Unequal { place: Some(2), theirs: 9, ours: 3 }]);
        assert_eq!(events[1], [Event::Unequal { place: Some(2), theirs: 3, ours: 9 }]);
    }
}
