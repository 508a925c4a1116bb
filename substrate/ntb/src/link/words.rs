//! The words of a link come one by one, also while an end looks at others: whichever of them have come, an end is up
//! only in a life that the other end agreed to.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beeline_os::Mapping;
use proptest::prelude::*;

use super::tests::Silent;
use super::{BEAT, Link, State};
use crate::window::{Inbound, Mapped, Outbound, Window, Wire};

const LENGTH: usize = 64 << 10;
const SILENCE: Duration = Duration::from_secs(3600);
/// More reads than one look has.
const READS: usize = 32;

thread_local! {
    /// What comes before each read of a register, in a look of this thread.
    static COMES: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// A link of this thread is about to read a register.
pub(super) fn before_a_read() {
    COMES.with_borrow_mut(|comes| {
        if let Some(comes) = comes {
            comes();
        }
    });
}

/// Words on their way, and the memory that they come to.
#[derive(Debug)]
struct Way {
    posted: Mutex<VecDeque<(usize, u64)>>,
    far: Mapped,
}

impl Way {
    /// One word comes. False: none is on its way.
    fn deliver(&self) -> bool {
        let first = self.posted.lock().unwrap().pop_front();
        first.map(|(at, word)| self.far.post_word(at, word)).is_some()
    }

    fn deliver_all(&self) {
        while self.deliver() {}
    }

    fn length(&self) -> usize {
        self.posted.lock().unwrap().len()
    }
}

/// A wire whose words come when the test says so, in their order.
#[derive(Debug)]
struct Slow(Arc<Way>);

impl Wire for Slow {
    fn length_bytes(&self) -> usize {
        self.0.far.length_bytes()
    }

    unsafe fn post(&self, _: usize, _: *const u8, _: usize) {
        panic!("a link posts words alone")
    }

    fn post_word(&self, offset: usize, value: u64) {
        self.0.posted.lock().unwrap().push_back((offset, value));
    }

    fn fence(&self) {}
}

struct End {
    window: Window,
    link: Link,
    /// To the other end.
    way: Arc<Way>,
    /// Lives of this end, each with the other end's life that it agreed to.
    agreed: HashSet<(u64, u64)>,
}

impl End {
    fn all(epochs: [u64; 2]) -> [Self; 2] {
        let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        [0, 1].map(|side| {
            let far = Mapped::new(Arc::clone(&mapping), (1 - side) * LENGTH, LENGTH);
            let way = Arc::new(Way { posted: Mutex::default(), far });
            let window = Window {
                inbound: Inbound::new(Arc::clone(&mapping), side * LENGTH, LENGTH),
                outbound: Outbound::new(Arc::new(Slow(Arc::clone(&way)))),
                bells: Arc::new(Silent),
            };
            let link = Link::begin(&window, [1; 8], epochs[side], SILENCE, Instant::now());
            Self { window, link, way, agreed: HashSet::new() }
        })
    }

    /// A look, with `comes` before each of its reads.
    fn look_while(&mut self, now: &mut Instant, comes: impl FnMut() + 'static) {
        *now += BEAT;
        COMES.set(Some(Box::new(comes)));
        self.link.look(*now, &mut false);
        COMES.set(None);
        if self.link.seen != 0 {
            self.agreed.insert((self.link.epoch, self.link.seen));
        }
    }

    fn look(&mut self, now: &mut Instant) {
        self.look_while(now, || {});
    }

    /// Another process has this end.
    fn begin(&mut self, epoch: u64) {
        self.link = Link::begin(&self.window, [1; 8], epoch, SILENCE, Instant::now());
    }

    /// This end is not up, or `other` agreed to the very life, in the life of its own that this end has seen.
    fn is_up_by_agreement_of(&self, other: &Self) -> bool {
        self.link.state() != State::Up || other.agreed.contains(&(self.link.seen, self.link.epoch))
    }
}

fn settle(ends: &mut [End; 2], now: &mut Instant) {
    for _ in 0..12 {
        for end in &mut *ends {
            end.look(now);
            end.way.deliver_all();
        }
    }
}

/// Both ends were up; then another process has the first one, which sees the second one's old life, and the second one
/// has seen that: the words of its new life are on their way.
fn an_end_begins_anew(now: &mut Instant) -> [End; 2] {
    let mut ends = End::all([3, 5]);
    settle(&mut ends, now);
    let [one, other] = &mut ends;
    assert_eq!((one.link.state(), one.link.life()), (State::Up, other.link.life()));
    one.begin(9);
    one.look(now);
    one.way.deliver_all();
    (0..3).for_each(|_| other.look(now));
    ends
}

#[test]
fn an_end_that_began_anew_is_up_only_in_the_others_new_life_whichever_words_came() {
    let mut now = Instant::now();
    let [mut one, other] = an_end_begins_anew(&mut now);
    let mut lives = 0;
    while other.way.deliver() {
        one.look(&mut now);
        one.way.deliver_all();
        if let Some(life) = one.link.life() {
            lives += 1;
            assert_eq!(life, one.link.epoch() ^ other.link.epoch(), "a life that is over");
        }
    }
    assert!(lives > 0);
    let mut ends = [one, other];
    settle(&mut ends, &mut now);
    assert!(ends[0].link.life().is_some());
    assert_eq!(ends[0].link.life(), ends[1].link.life());
}

/// The second end agrees to a life of the first one before it posts the life in which it does. Both words may come
/// between two reads of one look, so that the first end finds the new agreement beside the old life.
#[test]
fn an_end_is_up_only_in_a_life_that_was_agreed_to_whichever_words_come_within_one_look() {
    let mut now = Instant::now();
    let on_their_way = an_end_begins_anew(&mut now)[1].way.length();
    assert!(on_their_way > 20, "{on_their_way} words");
    for read in 0..READS {
        for words in 1..=on_their_way {
            let [mut one, mut other] = an_end_begins_anew(&mut now);
            let (way, mut reads) = (Arc::clone(&other.way), 0);
            one.look_while(&mut now, move || {
                if reads == read {
                    (0..words).for_each(|_| _ = way.deliver());
                }
                reads += 1;
            });
            let agreed = one.is_up_by_agreement_of(&other);
            assert!(agreed, "{words} words before read {read}: a life that is over");
            one.way.deliver_all();
            other.look(&mut now);
            let mut ends = [one, other];
            settle(&mut ends, &mut now);
            let lives = ends.each_ref().map(|end| end.link.life());
            assert!(lives[0].is_some() && lives[0] == lives[1], "{lives:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ends_that_begin_anew_at_any_word_come_up_in_one_life(
        steps in proptest::collection::vec((0_usize..2, 0_u8..12, any::<u64>()), 1..200),
    ) {
        let mut ends = End::all([3, 5]);
        let (mut now, mut epoch) = (Instant::now(), 101_u64);
        for (side, kind, seed) in steps {
            let ways = ends.each_ref().map(|end| Arc::clone(&end.way));
            let end = &mut ends[side];
            match kind {
                0 => { epoch = epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1; end.begin(epoch); }
                1 => end.link.fail(),
                2..5 => {
                    // Four bits for each read: before one of four, some words come to this end.
                    let mut left = seed;
                    end.look_while(&mut now, move || {
                        if left & 3 == 3 {
                            (0..=(left >> 2 & 3) * 8).for_each(|_| _ = ways[1 - side].deliver());
                        }
                        left = left.rotate_right(4);
                    });
                }
                _ => _ = end.way.deliver(),
            }
            let [one, other] = &ends;
            let agreed = one.is_up_by_agreement_of(other) && other.is_up_by_agreement_of(one);
            prop_assert!(agreed, "an end is up in a life that the other one did not agree to");
        }
        settle(&mut ends, &mut now);
        let lives = ends.each_ref().map(|end| end.link.life());
        prop_assert!(lives[0].is_some() && lives[0] == lives[1], "{:?}", lives);
    }
}
