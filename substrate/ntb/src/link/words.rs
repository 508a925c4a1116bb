//! The words of a link come one by one: whichever of them have come, an end is up only in a life that the other end
//! agreed to.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_ntb::link::BEAT;
use beeline_ntb::window::{Bells, Mapped, Wire};
use beeline_ntb::{Inbound, Link, Outbound, State, Window};
use beeline_os::Mapping;
use proptest::prelude::*;

const LENGTH: usize = 64 << 10;
const SILENCE: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct Silent;

impl Bells for Silent {
    fn ring(&self, _: usize) {}

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear(&self, _: usize) {}
}

/// Words that were posted and have yet to come.
type Posted = Arc<Mutex<VecDeque<(usize, u64)>>>;

/// A wire whose words come when the test says so, in their order.
#[derive(Debug)]
struct Slow {
    wire: Mapped,
    posted: Posted,
}

impl Wire for Slow {
    fn length_bytes(&self) -> usize {
        self.wire.length_bytes()
    }

    unsafe fn post(&self, _: usize, _: *const u8, _: usize) {
        panic!("a link posts words alone")
    }

    fn post_word(&self, offset: usize, value: u64) {
        self.posted.lock().unwrap().push_back((offset, value));
    }

    fn fence(&self) {}
}

struct End {
    window: Window,
    link: Link,
    posted: Posted,
    /// Where the words come to.
    far: Mapped,
}

impl End {
    fn all(epochs: [u64; 2]) -> [Self; 2] {
        let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        [0, 1].map(|side| {
            let far = || Mapped::new(Arc::clone(&mapping), (1 - side) * LENGTH, LENGTH);
            let posted = Posted::default();
            let wire = Slow { wire: far(), posted: Arc::clone(&posted) };
            let window = Window {
                inbound: Inbound::new(Arc::clone(&mapping), side * LENGTH, LENGTH),
                outbound: Outbound::new(Arc::new(wire)),
                bells: Arc::new(Silent),
            };
            let link = Link::begin(&window, [1; 8], epochs[side], SILENCE, Instant::now());
            Self { window, link, posted, far: far() }
        })
    }

    /// One word comes. False: none is on its way.
    fn deliver(&self) -> bool {
        let first = self.posted.lock().unwrap().pop_front();
        first.map(|(at, word)| self.far.post_word(at, word)).is_some()
    }

    fn look(&mut self, now: &mut Instant) {
        *now += BEAT;
        self.link.look(*now, &mut false);
    }

    /// Another process has this end.
    fn begin(&mut self, epoch: u64) {
        self.link = Link::begin(&self.window, [1; 8], epoch, SILENCE, Instant::now());
    }
}

fn settle(ends: &mut [End; 2], now: &mut Instant) {
    for _ in 0..12 {
        for end in &mut *ends {
            end.look(now);
            while end.deliver() {}
        }
    }
}

#[test]
fn an_end_that_began_anew_is_up_only_in_the_others_new_life_whichever_words_came() {
    let mut ends = End::all([3, 5]);
    let mut now = Instant::now();
    settle(&mut ends, &mut now);
    let [one, other] = &mut ends;
    assert_eq!((one.link.state(), one.link.life()), (State::Up, other.link.life()));
    one.begin(9);
    // It sees the other end's old life, which is about to be over.
    one.look(&mut now);
    while one.deliver() {}
    (0..3).for_each(|_| other.look(&mut now));
    let mut lives = 0;
    while other.deliver() {
        one.look(&mut now);
        while one.deliver() {}
        if let Some(life) = one.link.life() {
            lives += 1;
            assert_eq!(life, one.link.epoch() ^ other.link.epoch(), "a life that is over");
        }
    }
    assert!(lives > 0);
    settle(&mut ends, &mut now);
    assert!(ends[0].link.life().is_some());
    assert_eq!(ends[0].link.life(), ends[1].link.life());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ends_that_begin_anew_at_any_word_come_up_in_one_life(
        steps in proptest::collection::vec((0_usize..2, 0_u8..12), 1..200),
    ) {
        let mut ends = End::all([3, 5]);
        let (mut now, mut epoch) = (Instant::now(), 101_u64);
        for (side, kind) in steps {
            let end = &mut ends[side];
            match kind {
                0 => { epoch = epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1; end.begin(epoch); }
                1 => end.link.fail(),
                2..5 => end.look(&mut now),
                _ => _ = end.deliver(),
            }
        }
        settle(&mut ends, &mut now);
        let lives = ends.each_ref().map(|end| end.link.life());
        prop_assert!(lives[0].is_some() && lives[0] == lives[1], "{:?}", lives);
    }
}
