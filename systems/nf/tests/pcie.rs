//! The link between card and host: protocol steps, counts, rings, lost wake-ups, and the library.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_nf::pcie::bus::{Direction, Pace, now_ns, sleep_on};
use beeline_nf::pcie::card::{Card, CardError, Library, Registers};
use beeline_nf::pcie::slot::{Mode, SlotError};
use beeline_nf::pcie::{
    CONTROL_SLOTS, DATA_SLOTS, FIRST_DATA, Link, RING, SIGNALS, SLOT_WORDS, SLOTS, WINDOW,
};
use common::{Dice, compiled, native};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn the_link_has_64_slots_of_three_kinds_and_rings_of_128() {
    assert_eq!((SLOTS, CONTROL_SLOTS, SIGNALS, FIRST_DATA, DATA_SLOTS), (64, 33, 33, 34, 30));
    let link = Link::new(Pace::default()).unwrap();
    link.bus().check().unwrap();
    let queue = link.queue(DATA_SLOTS - 1, Direction::Down);
    for at in 0..RING as u64 {
        assert!(queue.push(&[at; 8]));
    }
    assert!(!queue.push(&[0; 8]), "the ring holds {RING} entries");
    let mut item = [0; 8];
    for at in 0..RING as u64 {
        assert!(queue.pop(&mut item));
        assert_eq!(item, [at; 8]);
    }
    assert!(!queue.pop(&mut item));
    // Wider items take several entries, and cross the ring's end whole.
    let mut wide = [0; 20];
    for at in 0..200_u64 {
        assert!(queue.push(&[at; 20]));
        assert!(queue.pop(&mut wide));
        assert_eq!(wide, [at; 20]);
    }
    // A word of the header that is not ours is told.
    link.bus().word(1).store(9, Ordering::Relaxed);
    assert!(link.bus().check().unwrap_err().to_string().contains("version"));
}

#[test]
fn a_message_down_takes_a_doorbell_a_read_a_completion_and_an_interrupt() {
    let link = Link::new(Pace::default()).unwrap();
    link.host_send(5, &[1, 2, 3]).unwrap();
    let counts = link.counts();
    assert_eq!((counts.mmio_writes, counts.dma_reads, counts.dma_writes), (1, 0, 0));
    // One outstanding message a slot; other slots are free.
    assert!(matches!(link.host_send(5, &[4]), Err(SlotError::Busy(5))));
    link.host_send(6, &[9]).unwrap();
    assert_eq!(link.card_receive(5), Some(vec![1, 2, 3]));
    assert!(!link.host_completed(5));
    link.card_complete(5);
    assert!(matches!(link.host_send(5, &[4]), Err(SlotError::Busy(5))), "its completion waits");
    assert!(link.host_completed(5) && !link.host_completed(5));
    let counts = link.counts();
    assert_eq!((counts.mmio_writes, counts.dma_reads), (2, 1));
    assert_eq!((counts.dma_writes, counts.interrupts), (1, 1));
    link.host_send(5, &[4]).unwrap();
    assert!(matches!(link.host_send(64, &[4]), Err(SlotError::NoSuchSlot(64))));
    assert!(matches!(link.host_send(7, &[]), Err(SlotError::Length(0))));
    assert!(link.host_send(7, &vec![0; SLOT_WORDS + 1]).is_err());
}

#[test]
fn a_message_up_waits_for_the_release_of_the_one_before() {
    let link = Link::new(Pace::default()).unwrap();
    assert!(link.card_send(40, &[7, 8]).unwrap());
    assert!(!link.card_send(40, &[9]).unwrap(), "the register is not empty");
    assert!(link.card_send(41, &[9]).unwrap(), "another slot's is");
    let before = link.counts();
    assert_eq!((before.dma_writes, before.interrupts, before.mmio_reads), (2, 2, 0));
    assert_eq!(link.host_receive(40), Some(vec![7, 8]));
    assert_eq!(link.host_receive(40), None);
    let after = link.counts();
    assert_eq!(
        (after.mmio_reads, after.mmio_writes),
        (1, 1),
        "read the register, release the slot"
    );
    assert!(link.card_send(40, &[9]).unwrap());
}

#[test]
fn the_pace_delays_what_crosses_and_shares_the_wires_among_slots() {
    let pace = Pace { delay_ns: 2_000_000, bytes_per_second: 1_000_000_000 };
    let link = Link::new(pace).unwrap();
    let start = now_ns();
    link.host_send(0, &[1; 100]).unwrap();
    let mut came = link.card_receive(0);
    let soon = now_ns() - start < pace.delay_ns;
    assert!(came.is_none() || !soon, "the doorbell is on its way");
    while came.is_none() {
        came = link.card_receive(0);
    }
    // One way for the doorbell, a round trip for the read, and 800 bytes at a byte a nanosecond.
    assert!(now_ns() - start >= 3 * 2_000_000 + 800);
    // Arrivals in one direction stand in a row, whatever slot they belong to.
    let first = link.bus().arrival_after(now_ns(), Direction::Up, 1_000_000);
    let second = link.bus().arrival_after(now_ns(), Direction::Up, 1_000_000);
    assert!(second - first >= 1_000_000, "{}", second - first);
}

/// Moves numbered items through a ring while both sides sleep and wake; what was counted.
fn through_a_ring(items: u64, mode: Mode, direction: Direction, seed: u64) -> (u64, u64) {
    let link = Link::new(Pace::default()).unwrap();
    let queue = || link.queue(3, direction);
    let down = direction == Direction::Down;
    let bell = |card: bool| {
        if card { link.bus().card_bell() } else { link.bus().host_bell(FIRST_DATA + 3) }
    };
    let clear = |card: bool| {
        if card { link.bus().clear_card() } else { link.bus().clear_host(FIRST_DATA + 3) }
    };
    let late = AtomicU64::new(0);
    let nap = |card: bool| {
        let start = Instant::now();
        sleep_on(&[bell(card)], LIMIT).unwrap();
        // A sleep that only the limit ends is a wake-up lost.
        if start.elapsed() >= LIMIT {
            late.fetch_add(1, Ordering::Relaxed);
        }
    };
    let pause = |dice: &mut Dice| {
        if dice.below(5_000) == 0 {
            std::thread::sleep(Duration::from_micros(dice.below(300)));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut dice = Dice(seed);
            let mut sent = 0;
            while sent < items {
                clear(!down);
                let batch = (1 + dice.below(40)).min(items - sent);
                let before = sent;
                while sent < before + batch && queue().push(&[sent; 8]) {
                    sent += 1;
                }
                if sent > before {
                    queue().flush();
                } else if queue().arm_writer(8) {
                    nap(!down);
                }
                pause(&mut dice);
            }
        });
        let mut dice = Dice(seed + 1);
        let mut item = [0; 8];
        let mut got = 0;
        while got < items {
            clear(down);
            let before = got;
            while queue().pop(&mut item) {
                assert_eq!(item, [got; 8], "in order, none lost, none twice");
                got += 1;
            }
            if got > before {
                queue().release();
            } else if mode == Mode::Interrupt && queue().arm_reader() {
                nap(down);
            }
            pause(&mut dice);
        }
    });
    assert_eq!(late.load(Ordering::Relaxed), 0, "no wake-up is lost");
    let counts = link.counts();
    (counts.mmio_writes + counts.interrupts, counts.suppressed)
}

#[test]
fn a_million_items_cross_the_rings_with_few_notices_and_no_wake_up_lost() {
    for (direction, seed) in [(Direction::Down, 11), (Direction::Up, 12)] {
        let (notices, suppressed) = through_a_ring(1_000_000, Mode::Interrupt, direction, seed);
        assert!(notices > 0 && suppressed > 0);
        assert!(notices < 1_000_000 / 4, "{notices} notices for a million items");
        let (notices, _) = through_a_ring(100_000, Mode::Poll, direction, seed + 7);
        assert!(notices < 100_000 / 4, "a reader that polls is not told: {notices}");
    }
}

#[test]
fn a_reader_that_armed_its_notice_looks_again_before_it_sleeps() {
    let link = Link::new(Pace::default()).unwrap();
    let queue = link.queue(0, Direction::Down);
    // The entry lies there before the notice is armed: the reader must not sleep.
    assert!(queue.push(&[1; 8]));
    queue.flush();
    assert_eq!(link.counts().mmio_writes, 0, "nothing slept, so nothing was rung");
    assert!(!queue.arm_reader());
    let mut item = [0; 8];
    assert!(queue.pop(&mut item) && queue.arm_reader());
    assert!(queue.push(&[2; 8]) && queue.push(&[3; 8]));
    queue.flush();
    assert!(queue.push(&[4; 8]));
    queue.flush();
    assert_eq!(link.counts().mmio_writes, 1, "the first notice is enough");
    // The same for a writer without room.
    while queue.push(&[5; 8]) {}
    assert!(queue.arm_writer(8));
    assert!(queue.pop(&mut item));
    queue.release();
    assert_eq!(link.counts().interrupts, 1);
    assert!(!queue.arm_writer(8));
}

/// Four registers that count their writes.
#[derive(Default)]
struct Logic {
    values: [u64; 4],
    writes: u64,
}

impl Registers for Logic {
    fn read(&mut self, address: u64) -> u64 {
        self.values.get(usize::try_from(address).unwrap()).copied().unwrap_or(u64::MAX)
    }

    fn write(&mut self, address: u64, value: u64) {
        self.writes += 1;
        if let Some(register) = self.values.get_mut(usize::try_from(address).unwrap()) {
            *register = value;
        }
    }
}

const COUNTER: &str = ".element Count (flit in -> flit out) {\n.state { ulong count; }\n.handler {\n\
         if (test_input_port(in)) { flit x = read_input_port(in); count++; set_output_port(out, x); }\n}\n\
         .signal { ClSignal p = read_signal(); p.Sig.LParam[0] = count; set_signal(p); }\n}\n\
         .input in\n.output out\nCount :: cnt @\nin -> cnt -> {4} out\n";

/// Runs `host` beside a card with a counter behind `link`.
fn beside_a_card(link: &Link, host: impl FnOnce() + Send) -> u64 {
    let loaded = compiled(COUNTER);
    let graph = &loaded.compiled.graph;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let card = scope.spawn(|| {
            let mut card = Card::new(graph, native(graph), 256);
            let mut logic = Logic::default();
            for at in 0..3 {
                let input = graph.inputs[0].channel;
                assert!(card.run().channel_mut(input).push(&[at; 8]));
            }
            while !done.load(Ordering::Relaxed) {
                link.bus().clear_card();
                let moved = card.turn(link).unwrap() | link.serve_registers(&mut logic);
                if !moved {
                    sleep_on(&[link.bus().card_bell()], Duration::from_millis(1)).unwrap();
                }
            }
            logic.writes
        });
        host();
        done.store(true, Ordering::Relaxed);
        card.join().unwrap()
    })
}

#[test]
fn the_library_starts_stops_resets_signals_and_changes_variables() {
    let loaded = compiled(COUNTER);
    let element = &loaded.compiled.graph.nodes[0].element;
    let count = element.vars.iter().position(|var| var.name == "count").unwrap();
    let at = beeline_ir::interpreter::Frame::new(element).var_at[count];
    for mode in [Mode::Poll, Mode::Interrupt] {
        let link = Link::new(Pace { delay_ns: 20_000, bytes_per_second: 1 << 30 }).unwrap();
        beside_a_card(&link, || {
            let card = Library { link: &link, mode, limit: LIMIT };
            let count = || card.signal(1, [0; 8]).unwrap()[1];
            assert_eq!(count(), 0, "a stopped card answers signals");
            card.start().unwrap();
            let deadline = Instant::now() + LIMIT;
            while count() < 3 {
                assert!(Instant::now() < deadline, "the graph does not run");
            }
            card.stop().unwrap();
            assert_eq!(count(), 3);
            // The frame holds the count; a change of it is seen by the next signal.
            assert_eq!(card.variables(1, at, 1).unwrap(), [3]);
            card.set_variable(1, at, 77).unwrap();
            assert_eq!(count(), 77);
            card.reset(1).unwrap();
            assert_eq!(count(), 0);
            for refused in [
                card.reset(9).unwrap_err(),
                card.signal(9, [0; 8]).unwrap_err(),
                card.variables(1, 1 << 40, 4).unwrap_err(),
                card.set_variable(1, 1 << 40, 0).unwrap_err(),
            ] {
                assert!(matches!(refused, CardError::Refused(_)), "{refused}");
            }
        });
    }
}

#[test]
fn board_memory_raw_dma_and_registers() {
    let link = Link::new(Pace::default()).unwrap();
    let writes = beside_a_card(&link, || {
        let card = Library { link: &link, mode: Mode::Interrupt, limit: LIMIT };
        // Host memory to the board and back to another place: the completions order the copies.
        for at in 0..200 {
            link.window(at).store(at as u64 * 3, Ordering::Relaxed);
        }
        card.copy(true, 10, 0, 200).unwrap();
        card.copy(false, 10, 1_000, 200).unwrap();
        for at in 0..200 {
            assert_eq!(link.window(1_000 + at).load(Ordering::Relaxed), at as u64 * 3);
        }
        assert!(card.copy(true, 100, 0, 200).is_err(), "the board has 256 words");
        assert!(card.copy(false, 0, WINDOW - 10, 20).is_err(), "past the window");
        // Registers are answered by the card's logic, not by memory.
        link.mmio_write(2, 55, LIMIT).unwrap();
        link.mmio_write(9, 1, LIMIT).unwrap();
        assert_eq!(link.mmio_read(2, LIMIT).unwrap(), 55);
        assert_eq!(link.mmio_read(9, LIMIT).unwrap(), u64::MAX);
    });
    assert_eq!(writes, 2);
    // Without a card nothing answers.
    assert!(matches!(link.mmio_read(0, Duration::from_millis(5)), Err(SlotError::Late { .. })));
    // Raw DMA: the card's logic reads and writes host memory without a message.
    let before = link.counts();
    let mut words = [0; 4];
    assert!(link.dma_read(1_001, &mut words) && words == [3, 6, 9, 12]);
    assert!(link.dma_write(WINDOW - 4, &words) && !link.dma_write(WINDOW - 3, &words));
    assert!(!link.dma_read(usize::MAX, &mut words));
    let after = link.counts();
    assert_eq!(after.dma_reads - before.dma_reads, 1);
    assert_eq!((after.dma_writes - before.dma_writes, after.mmio_writes), (1, before.mmio_writes));
}

#[test]
fn garbage_in_every_slot_is_refused_and_the_card_goes_on() {
    let link = Link::new(Pace::default()).unwrap();
    beside_a_card(&link, || {
        let card = Library { link: &link, mode: Mode::Interrupt, limit: LIMIT };
        let mut dice = Dice(77);
        for turn in 0..3_000 {
            let slot = [0, 1, SIGNALS][usize::try_from(dice.below(3)).unwrap()];
            let length = 1 + usize::try_from(dice.below(7)).unwrap();
            let mut words: Vec<u64> = (0..length)
                .map(|_| match dice.below(3) {
                    0 => dice.below(8),
                    1 => dice.below(1 << 20),
                    _ => dice.below(u64::MAX),
                })
                .collect();
            if turn % 2 == 0 {
                words[0] = dice.below(6);
            }
            link.host_send(slot, &words).unwrap();
            let mode = Mode::Interrupt;
            let answer = link.host_wait(slot, mode, LIMIT, || link.host_receive(slot)).unwrap();
            assert!(answer[0] == 1 || answer[0] == 2, "{words:?}: {answer:?}");
            link.host_wait(slot, mode, LIMIT, || link.host_completed(slot).then_some(())).unwrap();
        }
        card.reset(1).unwrap();
        assert_eq!(card.signal(1, [0; 8]).unwrap()[1], 0);
        // A variable takes the bits of its width and no more.
        let loaded = compiled(COUNTER);
        let element = &loaded.compiled.graph.nodes[0].element;
        let frame = beeline_ir::interpreter::Frame::new(element);
        let flag = frame.var_at[element.in_valid[0].0 as usize];
        card.set_variable(1, flag, u64::MAX).unwrap();
        assert_eq!(card.variables(1, flag, 1).unwrap(), [1]);
        card.reset(1).unwrap();
    });
}
