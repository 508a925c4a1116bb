//! Known bugs, put back to show that the enumeration sees them.

use beeline_kv::fault::{KnownBug, with_known_bug};

use beeline_kv::PutOptions;
use beeline_pmem::{Pool, for_each_crash_image};

use crate::world::{World, limits, open};

fn assert_caught(bug: KnownBug, history: impl FnOnce(&mut World), segments: u64, images: usize) {
    let mut world = World::new(segments, false);
    with_known_bug(bug, || history(&mut world));
    print!("{bug:?}: ");
    let (_, wrong) = world.violations(&limits(200, images), 0);
    assert!(!wrong.is_empty(), "{bug:?} went unnoticed");
    println!("caught: {}", wrong[0].lines().next().unwrap_or_default());
}

#[test]
fn an_acknowledgement_before_the_fence_is_caught() {
    let history = |world: &mut World| {
        world.put("a", &[1; 100]);
        world.put("a", &[2; 100]);
    };
    assert_caught(KnownBug::AcknowledgeBeforeFence, history, 8, 12);
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
        assert_ne!(world.freed(), (0, 0));
        world.put("end", b"end");
    };
    assert_caught(KnownBug::DropTombstoneEarly, history, 8, 12);
}

#[test]
fn freeing_before_the_copies_are_persisted_is_caught() {
    let history = |world: &mut World| {
        world.put("kept", &[1; 100]);
        for turn in 0..12 {
            world.put("churn", &[turn; 20_000]);
        }
        world.maintain(1 << 20);
        assert!(world.freed().0 > 0, "a segment with something in it is collected");
    };
    assert_caught(KnownBug::FreeBeforePersist, history, 6, 12);
}

/// A batch that waits for its commit lies at the end of the segment with the most garbage, and
/// the next entry needs room.
fn collect_what_is_not_committed(world: &mut World) {
    for stays in ["a", "b", "c", "d", "e", "f", "g", "h", "i"] {
        world.put(stays, &[1; 17_000]);
    }
    world.put("superseded", &[2; 57_600]);
    world.put("superseded", &[3; 10]);
    world.store_batch(&[("one", vec![4; 60]), ("two", vec![5; 60]), ("three", vec![6; 60])]);
    world.store_put("needs room", &[7; 16_000]);
    assert!(world.freed().0 > 0, "the batch was collected");
    world.commit();
}

#[test]
fn collecting_a_batch_that_is_not_committed_is_caught() {
    assert_caught(KnownBug::CollectUncommitted, collect_what_is_not_committed, 6, 1500);
}

#[test]
fn a_batch_is_whole_even_where_it_is_collected_before_its_commit() {
    let mut world = World::new(6, false);
    collect_what_is_not_committed(&mut world);
    world.assert_survives("an early collection", &limits(60, 60), 9);
}

/// A few keys written again and again, so that the same segments have life after life.
fn overwrite(world: &mut World) {
    for turn in 0..36_usize {
        world.put(["x", "y", "z"][turn % 3], &vec![turn as u8; 3000 + turn % 5 * 500]);
    }
    assert!(world.freed().1 > 2, "segments are written anew in place");
}

#[test]
fn appending_before_the_new_generation_is_persisted_is_caught() {
    assert_caught(KnownBug::ReuseBeforePersist, overwrite, 12, 12);
}

#[test]
fn a_new_generation_before_the_superseding_entries_are_persisted_is_caught() {
    assert_caught(KnownBug::RecycleBeforePersist, overwrite, 12, 12);
}

#[test]
fn a_count_believed_in_another_life_is_caught() {
    let mut world = World::new(12, false);
    overwrite(&mut world);
    let violations = || world.violations(&limits(200, 12), 0);
    let (_, wrong) = with_known_bug(KnownBug::CountOfAnotherLife, violations);
    assert!(wrong.iter().any(|finding| finding.contains("damaged")), "{wrong:?}");
    println!("CountOfAnotherLife caught: {}", wrong[0].lines().next().unwrap_or_default());
}

/// Images in which an entry behind a torn one comes back once the torn one's place is taken.
fn connected_to_what_a_crash_left(anew: bool) -> u64 {
    let mut world = World::new(12, false);
    if anew {
        overwrite(&mut world);
    }
    world.put("before", &[1; 40]);
    let before = world.states.len() as u64 - 1;
    world.store_put("torn", &[2; 30]);
    world.store_put("left", &[3; 30]);
    world.commit();
    let mut connected = 0;
    for_each_crash_image(&world.device, &limits(200, 400), |image| {
        // In the last group only: an earlier one leaves nothing behind that is called so.
        if image.mark() != Some(before) {
            return;
        }
        let (pool, _) = Pool::open_image(image, world.pool_options()).unwrap();
        let (_, shards, _) = open(&pool, 1);
        let shown = shards[0].lock().unwrap().lookup(0, b"left").unwrap().is_some();
        if shown {
            return;
        }
        let mut shard = shards[0].lock().unwrap();
        shard.put(0, b"next", &[&[4; 30]], PutOptions::default()).unwrap();
        shard.commit().unwrap();
        drop(shard);
        drop(shards);
        let (_, shards, _) = open(&Pool::clone(&pool), 1);
        let back = shards[0].lock().unwrap().lookup(0, b"left").unwrap().is_some();
        connected += u64::from(back);
    });
    connected
}

#[test]
fn a_tail_left_behind_by_recovery_is_caught() {
    for anew in [false, true] {
        assert_eq!(connected_to_what_a_crash_left(anew), 0);
        let connected = with_known_bug(KnownBug::KeepTail, || connected_to_what_a_crash_left(anew));
        assert!(connected > 0, "an append must be able to connect to what was left");
        println!("KeepTail caught in {connected} images; in a later life: {anew}");
    }
}
