//! The crash model on small histories whose legal images are known by hand.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use beeline_pmem::{
    CrashImage, CrashKind, CrashLimits, Durability, Pool, PoolOptions, Segment, SimDevice,
    for_each_crash_image,
};

const SEGMENT: u32 = 64 << 10;

fn options() -> PoolOptions {
    PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 4 * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

fn simulated() -> (Pool, SimDevice, Arc<Segment>) {
    let (pool, device) = Pool::simulated(&options()).unwrap();
    let segment = pool.allocate().unwrap();
    (pool, device, segment)
}

/// Words of the only segment in an image.
fn words(image: &CrashImage, offsets: &[usize]) -> Vec<u64> {
    let bytes = image.object(1).unwrap_or_else(|| vec![0; SEGMENT as usize]);
    let word = |&at: &usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    offsets.iter().map(word).collect()
}

/// Every distinct content of the words over all images.
fn outcomes(device: &SimDevice, limits: &CrashLimits, offsets: &[usize]) -> BTreeSet<Vec<u64>> {
    let mut seen = BTreeSet::new();
    let counts = for_each_crash_image(device, limits, |image| {
        seen.insert(words(image, offsets));
    });
    println!("{counts}");
    seen
}

fn set<const N: usize>(all: &[[u64; N]]) -> BTreeSet<Vec<u64>> {
    all.iter().map(|one| one.to_vec()).collect()
}

const PAYLOAD: usize = 0;
const FLAG: usize = 64;

#[test]
fn a_flag_that_overtakes_its_payload_without_a_fence_is_found() {
    let (pool, device, segment) = simulated();
    let mut persister = pool.persister();
    segment.store_u64(PAYLOAD, 7);
    persister.flush(&segment, PAYLOAD, 8);
    segment.store_u64(FLAG, 1);
    persister.flush(&segment, FLAG, 8);
    persister.fence().unwrap();
    let seen = outcomes(&device, &CrashLimits::default(), &[PAYLOAD, FLAG]);
    assert_eq!(seen, set(&[[0, 0], [7, 0], [0, 1], [7, 1]]));
}

#[test]
fn a_flag_never_overtakes_a_payload_fenced_before_it() {
    let (pool, device, segment) = simulated();
    let mut persister = pool.persister();
    segment.store_u64(PAYLOAD, 7);
    persister.flush(&segment, PAYLOAD, 8);
    persister.fence().unwrap();
    segment.store_u64(FLAG, 1);
    persister.flush(&segment, FLAG, 8);
    persister.fence().unwrap();
    let seen = outcomes(&device, &CrashLimits::default(), &[PAYLOAD, FLAG]);
    assert_eq!(seen, set(&[[0, 0], [7, 0], [7, 1]]));
}

#[test]
fn stores_to_one_line_reach_media_in_order() {
    let (_pool, device, segment) = simulated();
    for (word, value) in [(0, 1), (8, 2), (0, 3)] {
        segment.store_u64(word, value);
    }
    let seen = outcomes(&device, &CrashLimits::default(), &[0, 8]);
    assert_eq!(seen, set(&[[0, 0], [1, 0], [1, 2], [3, 2]]));
}

#[test]
fn words_of_one_bulk_store_reach_media_in_any_order() {
    let (_pool, device, segment) = simulated();
    let bytes: Vec<u8> = [1_u64, 2, 3].iter().flat_map(|word| word.to_le_bytes()).collect();
    segment.store(0, &bytes);
    let seen = outcomes(&device, &CrashLimits::default(), &[0, 8, 16]);
    let both_ways = set(&[[0, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3], [0, 2, 3], [0, 0, 3]]);
    assert_eq!(seen, both_ways);
    // With other lines in play the set is sampled, and sampling knows every subset.
    for line in 1..10 {
        segment.store_u64(line * 64, 1);
    }
    let limits = CrashLimits { images_per_point: 400, ..CrashLimits::default() };
    let seen = outcomes(&device, &limits, &[0, 8, 16]);
    assert!(seen.is_superset(&set(&[[0, 2, 0], [1, 0, 3]])));
}

#[test]
fn words_are_never_torn() {
    let (_pool, device, segment) = simulated();
    segment.store(3, &[0xff; 10]);
    let seen = outcomes(&device, &CrashLimits::default(), &[0, 8]);
    let low = 0xffff_ffff_ff00_0000;
    let high = 0xff_ffff_ffff;
    assert_eq!(seen, set(&[[0, 0], [low, 0], [0, high], [low, high]]));
}

#[test]
fn a_flush_covers_only_the_stores_before_it() {
    let (pool, device, segment) = simulated();
    let mut persister = pool.persister();
    segment.store_u64(0, 1);
    persister.flush(&segment, 0, 8);
    segment.store_u64(0, 2);
    persister.fence().unwrap();
    let images = device.crash_images(device.position(), &CrashLimits::default());
    let seen: BTreeSet<_> = images.iter().map(|image| words(image, &[0])).collect();
    assert_eq!(seen, set(&[[1], [2]]));
}

#[test]
fn a_fence_completes_nobody_elses_flushes() {
    let (pool, device, segment) = simulated();
    let (mut flusher, mut fencer) = (pool.persister(), pool.persister());
    segment.store_u64(0, 1);
    flusher.flush(&segment, 0, 8);
    fencer.fence().unwrap();
    let images = device.crash_images(device.position(), &CrashLimits::default());
    assert_eq!(images.len(), 2);
    flusher.fence().unwrap();
    let images = device.crash_images(device.position(), &CrashLimits::default());
    assert_eq!(images.len(), 1);
}

#[test]
fn words_flushed_lazily_are_not_persisted_by_the_fence() {
    for (lazy_words, legal) in [(false, 1), (true, 3)] {
        let (pool, device) = Pool::simulated(&PoolOptions { lazy_words, ..options() }).unwrap();
        let segment = pool.allocate().unwrap();
        let mut persister = pool.persister();
        segment.store_word(0, 5);
        persister.flush_words(&segment);
        persister.fence().unwrap();
        let images = device.crash_images(device.position(), &CrashLimits::default());
        assert_eq!(images.len(), legal, "lazy: {lazy_words}");
        persister.flush_words_now(&segment);
        persister.fence().unwrap();
        let images = device.crash_images(device.position(), &CrashLimits::default());
        assert_eq!(images.len(), 1);
    }
}

#[test]
fn the_end_of_a_process_keeps_every_store_in_order() {
    let (_pool, device, segment) = simulated();
    segment.store_u64(FLAG, 1);
    segment.store_u64(PAYLOAD, 7);
    let limits = CrashLimits { kind: CrashKind::Process, ..CrashLimits::default() };
    let seen = outcomes(&device, &limits, &[PAYLOAD, FLAG]);
    assert_eq!(seen, set(&[[0, 0], [0, 1], [7, 1]]));
}

#[test]
fn counting_is_exact_and_sampling_keeps_its_bounds() {
    let (_pool, device, segment) = simulated();
    for line in 0..3 {
        segment.store_u64(line * 64, 1);
        segment.store_u64(line * 64 + 8, 1);
    }
    let all = CrashLimits::default();
    let images = device.crash_images(device.position(), &all);
    assert_eq!(images.len(), 27, "three lines of three prefixes");
    let distinct: BTreeSet<_> =
        images.iter().map(|image| words(image, &[0, 8, 64, 72, 128, 136])).collect();
    assert_eq!(distinct.len(), 27);

    let few = CrashLimits { images_per_point: 10, ..all };
    let counts = for_each_crash_image(&device, &few, |_| {});
    assert_eq!(counts.sampled_points, 1);
    let one = CrashLimits { points: 1, ..all };
    let counts = for_each_crash_image(&device, &one, |image| {
        assert_eq!(image.position(), device.position(), "the end is always looked at");
    });
    assert_eq!((counts.points, counts.images), (1, 27));
    assert!(counts.skipped_points > 0);

    let run = |limits: &CrashLimits| {
        let mut trace = Vec::new();
        for_each_crash_image(&device, limits, |image| trace.push(image.describe()));
        trace
    };
    assert_eq!(run(&few), run(&few), "one seed, one run");
}

#[test]
fn an_image_opens_as_a_pool_and_its_recovery_can_crash_too() {
    let (pool, device, segment) = simulated();
    segment.store_u64(PAYLOAD, 7);
    segment.store_word(0, 3);
    drop((pool, segment));
    let mut opened = 0;
    for_each_crash_image(&device, &CrashLimits::default(), |image| {
        let (pool, second) = Pool::open_image(image, &options()).unwrap();
        for segment in pool.segments() {
            assert!([0, 7].contains(&segment.load_u64(PAYLOAD)));
            assert!([0, 3].contains(&segment.word(0)));
            opened += 1;
        }
        drop(pool);
        for_each_crash_image(&second, &CrashLimits::default(), |image| {
            Pool::open_image(image, &options()).unwrap();
        });
    });
    assert!(opened > 0);
}

#[test]
fn stores_of_a_peer_are_recorded_through_stored() {
    use beeline_os::MemoryObject;
    let (_pool, device, segment) = simulated();
    // SAFETY: inside the segment.
    let at = unsafe { segment.base().as_ptr().add(128) };
    // SAFETY: inside the segment, which nothing else touches here.
    unsafe { at.write(9) };
    segment.stored(128, 1);
    assert_eq!(outcomes(&device, &CrashLimits::default(), &[128]), set(&[[0], [9]]));
    segment.persist(128, 1).unwrap();
    let images = device.crash_images(device.position(), &CrashLimits::default());
    assert_eq!(images.len(), 1);
}

/// Frees and allocations, cut at every point: descriptors, generations and zeroes hold.
#[test]
fn allocation_and_freeing_survive_a_crash_at_every_point() {
    let (pool, device) = Pool::simulated(&options()).unwrap();
    let mut persister = pool.persister();
    // What is in use, by mark: (id, generation).
    let mut history = vec![BTreeSet::new()];
    let mut held: Vec<Arc<Segment>> = Vec::new();
    for step in 0..24_u64 {
        let mut now = history.last().cloned().unwrap();
        if step % 3 == 2 || held.len() == 4 {
            let segment = held.remove((step as usize * 7) % held.len());
            now.remove(&(segment.id(), segment.generation()));
            pool.free(segment).unwrap();
        } else {
            let segment = pool.allocate().unwrap();
            now.insert((segment.id(), segment.generation()));
            segment.store_u64(0, u64::MAX);
            segment.store_u64(200, u64::MAX);
            segment.store_word(0, u64::MAX);
            persister.flush(&segment, 0, 256);
            persister.flush_words(&segment);
            persister.fence().unwrap();
            held.push(segment);
        }
        history.push(now);
        device.mark(step + 1);
    }
    let counts = for_each_crash_image(&device, &CrashLimits::default(), |image| {
        let (pool, _) = Pool::open_image(image, &options()).unwrap();
        assert!(!pool.report().findings.damage(), "{}", image.describe());
        let found: BTreeSet<_> = pool.segments().iter().map(|s| (s.id(), s.generation())).collect();
        let mark = image.mark().unwrap_or(0) as usize;
        let either = found == history[mark] || history.get(mark + 1) == Some(&found);
        assert!(either, "{found:?} after step {mark}: {}", image.describe());
        // Whatever comes next is zeroed, and no (id, generation) comes twice.
        while let Ok(segment) = pool.allocate() {
            assert_eq!(segment.word(0), 0, "{}", image.describe());
            let mut bytes = vec![0; SEGMENT as usize];
            segment.read(0, &mut bytes);
            assert!(bytes.iter().all(|&byte| byte == 0));
            let identity = (segment.id(), segment.generation());
            assert!(history[..=mark].iter().all(|old| !old.contains(&identity)));
        }
    });
    println!("{counts}");
    assert!(counts.points > 24 && counts.images > counts.points);
    assert_eq!(counts.sampled_points, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Damage anywhere in the table: an error, or a pool that works with what is left.
    #[test]
    fn a_table_full_of_damage_never_ends_the_process(
        flips in prop::collection::vec((0..9216_usize, 0..8_u32), 1..40),
    ) {
        let (pool, device, segment) = simulated();
        segment.store_word(0, 3);
        drop((pool, segment));
        let mut image = device.image_of_everything();
        for (offset, bit) in flips {
            image = image.with_flipped_bit(Pool::TABLE_OBJECT, offset, bit);
        }
        if let Ok((pool, _)) = Pool::open_image(&image, &options()) {
            for segment in pool.segments() {
                let _ = segment.word(0);
                pool.free(segment).unwrap();
            }
            while pool.allocate().is_ok() {}
        }
    }
}
