//! Known bugs, put back to show that the enumeration sees them.

use beeline_kv::fault::{KnownBug, with_known_bug};

use crate::world::{World, limits};

fn assert_caught(bug: KnownBug, history: impl FnOnce(&mut World), segments: u64) {
    let mut world = World::new(segments, false);
    with_known_bug(bug, || history(&mut world));
    print!("{bug:?}: ");
    let (_, wrong) = world.violations(&limits(200, 12), 0);
    assert!(!wrong.is_empty(), "{bug:?} went unnoticed");
    println!("caught: {}", wrong[0].lines().next().unwrap_or_default());
}

#[test]
fn an_acknowledgement_before_the_fence_is_caught() {
    let history = |world: &mut World| {
        world.put("a", &[1; 100]);
        world.put("a", &[2; 100]);
    };
    assert_caught(KnownBug::AcknowledgeBeforeFence, history, 8);
}

#[test]
fn a_tombstone_dropped_too_early_is_caught() {
    // The key's old entry lies among data that stays; its tombstone among data that goes.
    let history = |world: &mut World| {
        world.put("deleted", &[1; 100]);
        for stays in ["s1", "s2", "s3"] {
            world.put(stays, &[7; 21_700]);
        }
        world.put("starts the next segment", &[7; 500]);
        world.delete("deleted");
        for turn in 0..14 {
            world.put("churn", &[turn; 20_000]);
        }
        world.maintain(1 << 20);
        assert!(world.store.stats().total.segments_collected > 0);
        world.put("end", b"end");
    };
    assert_caught(KnownBug::DropTombstoneEarly, history, 8);
}

#[test]
fn freeing_before_the_copies_are_persisted_is_caught() {
    let history = |world: &mut World| {
        world.put("kept", &[1; 100]);
        for turn in 0..12 {
            world.put("churn", &[turn; 20_000]);
        }
        world.maintain(1 << 20);
        assert!(world.store.stats().total.segments_collected > 0);
    };
    assert_caught(KnownBug::FreeBeforePersist, history, 8);
}
