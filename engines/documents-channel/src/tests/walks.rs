//! Random walks over a channel, by their seeds: requests, delays, late answers and ends of connections in any
//! order. With a bug put back, one of few seeds fails.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::planted::{PLANTED, Planted};

/// Turns of a walk.
const TURNS: u32 = 400;
/// Answers that come after their time at most, so that destinations are left.
const MOST_LATE: usize = 3;

/// Numbers that follow from a seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) % limit
    }
}

struct Walk {
    world: World,
    client: ChannelClient,
    /// What each request without an outcome is to be answered, and whether it may be late.
    waiting: HashMap<u32, (Vec<u8>, bool)>,
    sent: u32,
    /// Requests whose time was up; those that were not sent by then never are.
    late: u32,
}

impl Walk {
    fn ask(&mut self, kind: MessageType, body: &[u8], wanted: Vec<u8>, limit: Duration) {
        match self.client.submit(kind, b"d.c", body, (0, 0), limit) {
            Ok(index) => {
                let known = self.waiting.insert(index, (wanted, limit != LIMIT));
                assert!(known.is_none(), "an index is used twice");
                self.sent += 1;
            }
            Err(Submit::Full) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// A body of its own for each request.
    fn body(&self, length: usize) -> Vec<u8> {
        let mut body = pattern(length.max(4));
        body[..4].copy_from_slice(&self.sent.to_le_bytes());
        body
    }

    fn answer_one(&mut self, chance: &mut Chance) {
        if self.world.echo.kept.is_empty() {
            return;
        }
        let at = chance.below(self.world.echo.kept.len() as u64) as usize;
        let (channel, index, body) = self.world.echo.kept.swap_remove(at);
        self.world.server.respond(channel, index, &body, &mut self.world.echo);
    }

    fn take_outcomes(&mut self) {
        while let Some((index, outcome)) = self.client.take_outcome() {
            let (wanted, may_be_late) = self.waiting.remove(&index).expect("an outcome, once");
            let late = may_be_late && outcome == Err(RequestError::TimedOut);
            assert!(late || outcome == Ok(wanted), "another answer than its own");
            self.late += u32::from(late);
        }
    }

    fn turn(&mut self, chance: &mut Chance) {
        match chance.below(12) {
            0..=3 => {
                let length = [4, 20, 430, 441, 500, 9000, 40_000][chance.below(7) as usize];
                let body = self.body(length);
                self.ask(MessageType::Insert, &body, body.clone(), LIMIT);
            }
            4 => {
                let length = chance.below(70_000);
                let wanted = pattern(length as usize);
                self.ask(MessageType::Query, &length.to_le_bytes(), wanted, LIMIT);
            }
            5 if self.world.echo.kept.len() < MOST_LATE => {
                let body = self.body(100);
                let limit = if chance.below(2) == 0 { LIMIT } else { Duration::from_millis(1) };
                self.ask(MessageType::Update, &body, body.clone(), limit);
            }
            6 => self.answer_one(chance),
            7 | 8 => self.world.sim.run_for(Duration::from_micros(1 + chance.below(40))),
            9 => self.world.sim.run_for(Duration::from_micros(chance.below(1500))),
            10 => self.world.serve(),
            _ => {
                self.client.poll();
                self.client.expire();
            }
        }
        self.take_outcomes();
    }
}

fn walk(seed: u64) {
    let mut chance = Chance(seed);
    let (mut options, client_options) = tight(1 + chance.below(5) as u16);
    options.most_open = 2 + chance.below(6) as usize;
    let mut world = World::new(options);
    let client = world.connect(1, &client_options);
    let idle = (world.server.idle_buffers(), client.idle());
    let mut walk = Walk { world, client, waiting: HashMap::new(), sent: 0, late: 0 };
    for _ in 0..TURNS {
        walk.turn(&mut chance);
    }
    if seed % 4 == 3 {
        // The server's host is gone: every request ends all the same.
        walk.world.sim.crash(0);
        let body = walk.body(4);
        walk.ask(MessageType::Insert, &body, body.clone(), LIMIT);
        for _ in 0..100 {
            walk.world.sim.run_for(Duration::from_secs(1));
            walk.client.poll();
        }
        assert!(walk.client.is_broken());
        while let Some((index, _)) = walk.client.take_outcome() {
            walk.waiting.remove(&index).expect("an outcome, once");
        }
        assert!(walk.waiting.is_empty(), "requests without an outcome");
        assert_eq!((walk.client.idle(), walk.client.quarantined()), (idle.1, 0));
        return;
    }
    // What was asked is answered, however long the server kept it.
    for _ in 0..100 {
        walk.world.settle(&mut [&mut walk.client]);
        walk.take_outcomes();
        walk.answer_one(&mut chance);
    }
    walk.client.expire();
    walk.take_outcomes();
    assert!(walk.waiting.is_empty(), "requests without an outcome");
    let (sent, done) = (u64::from(walk.sent), walk.world.server.counters().requests);
    assert!((sent - u64::from(walk.late)..=sent).contains(&done), "{done} of {sent} were done");
    let left = (walk.world.server.idle_buffers(), walk.client.idle());
    assert_eq!((left, walk.client.quarantined()), (idle, 0), "every buffer is idle again");
    assert_eq!(walk.client.counters().unknown_immediates, 0, "every late write is waited for");
    assert_eq!((walk.client.is_broken(), walk.world.echo.ended.len()), (false, 0));
}

/// How many seeds: few among all tests, many in `cargo xtask deep`.
fn seeds() -> u64 {
    if std::env::var_os("BEELINE_DEEP").is_some() { 5000 } else { 60 }
}

#[test]
fn walks_of_many_seeds_lose_overwrite_and_repeat_nothing() {
    for seed in 0..seeds() {
        let ended = catch_unwind(AssertUnwindSafe(|| walk(seed)));
        assert!(ended.is_ok(), "seed {seed} fails");
    }
}

#[test]
fn walks_find_the_bugs_that_are_put_back() {
    let bugs = [
        Planted::SendWithoutCredit,
        Planted::GiveSlotBackEarly,
        Planted::FreePieceEarly,
        Planted::ReuseLateDestination,
        Planted::ReuseBufferUnderWrite,
        Planted::ForgetBrokenRequests,
    ];
    let mut missed = Vec::new();
    for bug in bugs {
        PLANTED.set(Some(bug));
        let found = (0..seeds()).filter(|seed| catch_unwind(|| walk(*seed)).is_err()).count();
        PLANTED.set(None);
        if found == 0 {
            missed.push(bug);
        }
    }
    assert!(missed.is_empty(), "no walk finds {missed:?}");
}
