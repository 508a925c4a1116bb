//! An end of another version, and one that writes anything: the link is refused by name or stays down, never up.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_ntb::link::REGISTERS_BYTES;
use beeline_ntb::window::{Bells, Mapped};
use beeline_ntb::{Event, Inbound, Link, Outbound, State, Window};
use beeline_os::Mapping;
use proptest::prelude::*;

const LENGTH: usize = 64 << 10;
const SILENCE: Duration = Duration::from_secs(5);
const ANNOUNCED: [u64; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const EPOCH: u64 = 0x1234_5678_9abc_def1;

#[derive(Debug)]
struct Silent;

impl Bells for Silent {
    fn ring(&self, _: usize) {}

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear(&self, _: usize) {}
}

fn window() -> Window {
    let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
    let inbound = Inbound::new(Arc::clone(&mapping), 0, LENGTH);
    let outbound = Outbound::new(Arc::new(Mapped::new(mapping, LENGTH, LENGTH)));
    Window { inbound, outbound, bells: Arc::new(Silent) }
}

#[test]
fn an_end_of_another_version_is_refused_by_its_word() {
    let window = window();
    let mut now = Instant::now();
    let mut link = Link::begin(&window, ANNOUNCED, EPOCH, SILENCE, now);
    let version_one = u64::from_le_bytes(*b"BLNTB\0\0\x01");
    let ours = u64::from_le_bytes(*b"BLNTB\0\0\x02");
    window.inbound.word(64).store(77, Ordering::Relaxed);
    window.inbound.word(0).store(version_one, Ordering::Release);
    let mut events = Vec::new();
    for _ in 0..5 {
        now += Duration::from_millis(300);
        events.extend(link.look(now, &mut false));
    }
    assert_eq!(events, [Event::Unequal { place: None, theirs: version_one, ours }], "said once");
    assert_eq!(link.state(), State::Down);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_words_in_the_registers_leave_a_link_down_that_nothing_was_agreed_for(
        words in proptest::collection::vec((0_usize..REGISTERS_BYTES / 8, any::<u64>()), 1..60),
    ) {
        let window = window();
        let mut now = Instant::now();
        let mut link = Link::begin(&window, ANNOUNCED, EPOCH, SILENCE, now);
        for (at, word) in words {
            window.inbound.word(at * 8).store(word, Ordering::Relaxed);
            now += Duration::from_millis(300);
            link.look(now, &mut false);
            prop_assert_eq!(link.state(), State::Down);
        }
    }
}
