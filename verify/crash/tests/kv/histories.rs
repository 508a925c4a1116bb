//! The histories: put, in-place update, segment switch, batch, collection, each with crashes of
//! its own recovery.

use crate::world::{World, limits};

fn value(stamp: usize, length: usize) -> Vec<u8> {
    let mut value = format!("value {stamp} ").into_bytes();
    value.resize(length, stamp as u8);
    value
}

#[test]
fn puts_and_deletes_survive_once_acknowledged() {
    for lazy_words in [false, true] {
        let mut world = World::new(8, lazy_words);
        for turn in 0..6 {
            world.put("a", &value(turn, 30));
            world.put("b", &value(turn, 150));
            world.store_put("c", &value(turn, 10));
            world.store_put("d", &value(turn, 200));
            world.commit();
        }
        world.delete("a");
        world.delete("d");
        world.put("a", &value(99, 64));
        world.assert_survives("puts", &limits(60, 24), 9);
    }
}

#[test]
fn an_overwrite_in_place_never_costs_the_newest_version() {
    let mut world = World::new(8, false);
    let first = world.client_put("key", &value(0, 200), None);
    let second = world.client_put("key", &value(1, 180), None);
    world.client_put("other", &value(2, 40), None);
    for turn in 0..4 {
        world.client_put("key", &value(10 + turn, 150 + turn), Some(first));
        world.client_put("key", &value(20 + turn, 100 + turn), Some(second));
    }
    world.client_put("other", &value(3, 40), None);
    world.assert_survives("in place", &limits(60, 40), 9);
}

#[test]
fn a_segment_switch_loses_nothing() {
    for lazy_words in [false, true] {
        let mut world = World::new(10, lazy_words);
        for turn in 0..8 {
            world.put(["a", "b", "c"][turn % 3], &value(turn, 18_000));
            world.put("small", &value(turn, 20));
        }
        world.assert_survives("segment switch", &limits(60, 12), 15);
    }
}

#[test]
fn a_batch_is_there_as_a_whole_or_not_at_all() {
    let mut world = World::new(10, false);
    world.put("a", &value(1, 40));
    world.batch(&[("a", value(2, 40)), ("b", value(2, 60)), ("c", value(2, 10))]);
    world.batch(&[("b", value(3, 90))]);
    world.put("c", &value(3, 20));
    // One that starts in a segment too full for it and moves to the next.
    world.put("filler", &value(4, 60_000));
    world.batch(&[
        ("a", value(5, 900)),
        ("b", value(5, 1900)),
        ("c", value(5, 1200)),
        ("d", value(5, 2500)),
    ]);
    world.put("a", &value(6, 40));
    world.assert_survives("batches", &limits(80, 30), 11);
}

#[test]
fn collection_can_be_cut_short_anywhere() {
    let mut world = World::new(7, false);
    world.put("kept", &value(1, 500));
    world.put("gone", &value(1, 500));
    for turn in 0..40 {
        world.put(["x", "y", "z"][turn % 3], &value(turn, 6000));
        if turn == 12 {
            world.delete("gone");
        }
        if turn % 4 == 3 {
            world.maintain(8 << 10);
        }
    }
    let (collected, recycled) = world.freed();
    assert!(collected + recycled >= 3, "the history frees segments: {collected}, {recycled}");
    world.assert_survives("collection", &limits(120, 10), 40);
}

#[test]
fn segments_written_anew_in_place_lose_nothing() {
    for lazy_words in [false, true] {
        let mut world = World::new(12, lazy_words);
        world.put("stays", &value(0, 300));
        world.put("gone", &value(0, 300));
        for turn in 0..60_usize {
            let key = ["x", "y", "z"][turn % 3];
            match turn % 8 {
                3 => world.batch(&[
                    ("x", value(turn, 900)),
                    ("x", value(turn, 1200)),
                    ("b", value(turn, 70)),
                ]),
                5 => {
                    world.store_put(key, &value(turn, 2500));
                    world.store_put(key, &value(turn + 100, 2600));
                    world.commit();
                }
                _ => world.put(key, &value(turn, 3000 + turn % 5 * 400)),
            }
            if turn == 14 {
                world.delete("gone");
            }
            if turn % 9 == 8 {
                world.maintain(16 << 10);
            }
        }
        let (_, recycled) = world.freed();
        assert!(recycled >= 3, "{recycled} segments were written anew");
        world.assert_survives("written anew in place", &limits(120, 12), 25);
    }
}

/// A little generator, so that a seed is a history.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn random_history(seed: u64) -> World {
    let names = ["a", "b", "c", "d", "e", "f"];
    let mut dice = Dice(seed);
    let mut world = World::new(9, seed % 2 == 1);
    let mut copies: std::collections::BTreeMap<&str, Vec<(u32, u32)>> = Default::default();
    for turn in 0..60 {
        let key = names[dice.roll(6) as usize];
        let length = [10, 60, 700, 5000, 14_000][dice.roll(5) as usize];
        match dice.roll(20) {
            0..8 => world.put(key, &value(turn, length)),
            8..10 => {
                let known = world.states.last().unwrap().contains_key(key.as_bytes());
                if known {
                    world.delete(key);
                }
            }
            10..12 => {
                let pairs: Vec<_> = names[..1 + dice.roll(5) as usize]
                    .iter()
                    .map(|name| (*name, value(turn, 20 + length / 10)))
                    .collect();
                world.batch(&pairs);
            }
            12..17 => {
                let length = length.min(400);
                let copies = copies.entry(key).or_default();
                let fits = |place: &(u32, u32)| 48 + key.len() + length <= place.1 as usize;
                let place = (copies.len() == 2).then(|| copies[0]).filter(fits);
                let place = world.client_put(key, &value(turn, length), place);
                if copies.len() == 2 {
                    copies.remove(0);
                }
                copies.push(place);
            }
            17 => {
                let log = world.log.take();
                if let Some(log) = log {
                    world.shard().close_client_log(log);
                    copies.clear();
                }
            }
            18 if dice.roll(3) == 0 => {
                world.flush();
            }
            _ => world.maintain(16 << 10),
        }
    }
    world
}

#[test]
fn random_histories_survive_a_crash_at_any_point() {
    let seeds = if crate::world::deep() { 60 } else { 8 };
    let first = std::env::var("BEELINE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for seed in first..first + seeds {
        let world = random_history(seed);
        let name = format!("random history, replay with BEELINE_SEED={seed}");
        world.assert_survives(&name, &limits(20, 6), 30);
    }
}
