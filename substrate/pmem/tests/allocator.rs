//! The allocator against a plain model: allocate, free, store, reopen, crash, in any order.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use beeline_pmem::{
    CrashLimits, Durability, Persister, PmemError, Pool, PoolOptions, Segment, for_each_crash_image,
};
use common::file_kind;
use proptest::prelude::*;

const SEGMENT: u32 = 64 << 10;
const CAPACITY: usize = 5;

fn options() -> PoolOptions {
    PoolOptions {
        kind: Some(file_kind()),
        segment_bytes: SEGMENT,
        capacity_bytes: CAPACITY as u64 * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate,
    Free(usize),
    Store(usize, u64),
    Share(usize),
    Replace(usize),
    Reopen,
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Allocate),
        4 => any::<usize>().prop_map(Step::Free),
        4 => (any::<usize>(), 1..u64::MAX).prop_map(|(at, value)| Step::Store(at, value)),
        1 => any::<usize>().prop_map(Step::Share),
        1 => any::<usize>().prop_map(Step::Replace),
        1 => Just(Step::Reopen),
        1 => Just(Step::Kill),
    ]
}

/// What a segment should hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Content {
    value: u64,
    shared: bool,
}

type Model = BTreeMap<(u32, u64), Content>;

fn check(pool: &Pool, model: &Model) {
    let found: Model = pool
        .segments()
        .iter()
        .map(|segment| {
            let value = segment.load_u64(512);
            assert_eq!(segment.word(5), value, "word and bytes go together");
            assert!(segment.word_intact(5));
            ((segment.id(), segment.generation()), Content { value, shared: segment.is_shared() })
        })
        .collect();
    assert_eq!(&found, model);
    assert_eq!(pool.used_bytes(), model.len() as u64 * u64::from(SEGMENT));
}

fn pick(pool: &Pool, at: usize) -> Option<Arc<Segment>> {
    let mut all = pool.segments();
    if all.is_empty() { None } else { Some(all.swap_remove(at % all.len())) }
}

fn store(persister: &mut Persister, segment: &Segment, value: u64) {
    segment.store_u64(512, value);
    segment.store_word(5, value);
    persister.flush(segment, 512, 8);
    persister.flush_words(segment);
    persister.fence().unwrap();
}

fn assert_zero(segment: &Segment) {
    let mut bytes = vec![1; SEGMENT as usize];
    segment.read(0, &mut bytes);
    assert!(bytes.iter().all(|&byte| byte == 0), "a new segment reads as zero");
    assert!((0..8).all(|index| segment.word(index) == 0), "so do its words");
    assert!(!segment.is_shared());
}

/// What kill -9 leaves: the files as the page cache has them, and no lock.
fn copy_directory(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_directory(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn one_step(pool: &Pool, model: &mut Model, seen: &mut BTreeSet<(u32, u64)>, step: Step) {
    use beeline_os::MemoryObject;
    let key = |segment: &Segment| (segment.id(), segment.generation());
    match step {
        Step::Allocate => match pool.allocate() {
            Ok(segment) => {
                assert!(model.len() < CAPACITY);
                assert_zero(&segment);
                assert!(seen.insert(key(&segment)), "id and generation never come twice");
                model.insert(key(&segment), Content::default());
            }
            Err(PmemError::PoolFull { .. }) => assert_eq!(model.len(), CAPACITY),
            Err(error) => panic!("{error}"),
        },
        Step::Free(at) => {
            if let Some(segment) = pick(pool, at) {
                model.remove(&key(&segment));
                pool.free(segment).unwrap();
            }
        }
        Step::Store(at, value) => {
            if let Some(segment) = pick(pool, at) {
                store(&mut pool.persister(), &segment, value);
                model.get_mut(&key(&segment)).unwrap().value = value;
            }
        }
        Step::Share(at) => {
            if let Some(segment) = pick(pool, at) {
                segment.mark_shared();
                model.get_mut(&key(&segment)).unwrap().shared = true;
            }
        }
        Step::Replace(at) => {
            if let Some(segment) = pick(pool, at) {
                segment.replace_backing().unwrap();
                model.get_mut(&key(&segment)).unwrap().shared = false;
            }
        }
        Step::Reopen | Step::Kill => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_file_pool_behaves_as_the_model(
        steps in prop::collection::vec(step(), 1..40),
        prepared_segments in 0..3_u32,
    ) {
        let home = tempfile::tempdir().unwrap();
        let options = PoolOptions { prepared_segments, ..options() };
        let mut directory = home.path().join("0");
        let mut pool = Some(Pool::create(&directory, &options).unwrap());
        let (mut model, mut seen) = (Model::new(), BTreeSet::new());
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Reopen => {
                    pool.take();
                    let opened = Pool::open(&directory, &options).unwrap();
                    prop_assert!(opened.report().findings.clean);
                    prop_assert_eq!(opened.report().findings.orphans_removed, 0);
                    pool = Some(opened);
                }
                Step::Kill if prepared_segments == 0 => {
                    let copy = home.path().join((number + 1).to_string());
                    copy_directory(&directory, &copy);
                    directory = copy;
                    let opened = Pool::open(&directory, &options).unwrap();
                    prop_assert!(!opened.report().findings.clean);
                    prop_assert!(!opened.report().findings.damage());
                    pool = Some(opened);
                }
                _ => one_step(pool.as_ref().unwrap(), &mut model, &mut seen, step),
            }
            check(pool.as_ref().unwrap(), &model);
        }
    }

    #[test]
    fn a_dram_pool_behaves_as_the_model(
        steps in prop::collection::vec(step(), 1..60),
        prepared_segments in 0..3_u32,
    ) {
        let volatile = PoolOptions::volatile(SEGMENT, options().capacity_bytes);
        let pool = Pool::dram(&PoolOptions { prepared_segments, ..volatile }).unwrap();
        let (mut model, mut seen) = (Model::new(), BTreeSet::new());
        for step in steps {
            one_step(&pool, &mut model, &mut seen, step);
            check(&pool, &model);
        }
    }

    /// Whatever is done, and wherever the power goes: what comes back is the state before or after
    /// the step that was under way.
    #[test]
    fn every_crash_of_a_simulated_pool_recovers_to_a_state_of_the_model(
        steps in prop::collection::vec(step(), 1..14),
    ) {
        let options = PoolOptions { kind: None, durability: Durability::Power, ..options() };
        let (pool, device) = Pool::simulated(&options).unwrap();
        let (mut model, mut seen) = (Model::new(), BTreeSet::new());
        let mut states = vec![model.clone()];
        for step in steps {
            one_step(&pool, &mut model, &mut seen, step);
            check(&pool, &model);
            states.push(model.clone());
            device.mark(states.len() as u64 - 1);
        }
        let counts = for_each_crash_image(&device, &CrashLimits::default(), |image| {
            let (pool, _) = Pool::open_image(image, &options).unwrap();
            let found: Model = pool
                .segments()
                .iter()
                .map(|segment| {
                    let (value, shared) = (segment.load_u64(512), segment.is_shared());
                    ((segment.id(), segment.generation()), Content { value, shared })
                })
                .collect();
            let mark = image.mark().unwrap_or(0) as usize;
            let legal = &states[mark..states.len().min(mark + 2)];
            assert!(legal.contains(&found), "{found:?} not in {legal:?}: {}", image.describe());
        });
        prop_assert!(counts.images >= counts.points);
    }
}
