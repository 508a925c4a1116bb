//! Pools as their users see them: allocation, words, persistence, reopening.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;

use beeline_os::{Mapping, MemoryObject, mapping::Protection};
use beeline_pmem::{Durability, Mechanism, PmemError, Pool, PoolKind, PoolOptions, WriteBack};
use common::file_kind;

const SEGMENT: u32 = 64 << 10;

fn file_options() -> PoolOptions {
    PoolOptions {
        kind: Some(file_kind()),
        segment_bytes: SEGMENT,
        capacity_bytes: 8 * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

fn dram_options() -> PoolOptions {
    PoolOptions::volatile(SEGMENT, 8 * u64::from(SEGMENT))
}

fn segment_files(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory.join("segments"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_pool_gives_back_what_was_stored_after_reopening() {
    for durability in [Durability::None, Durability::Process, Durability::Power] {
        let directory = tempfile::tempdir().unwrap();
        let options = PoolOptions { durability, ..file_options() };
        let secret = {
            let pool = Pool::create(directory.path(), &options).unwrap();
            let mut persister = pool.persister();
            let segment = pool.allocate().unwrap();
            segment.store(5, b"hello");
            segment.store_u64(64, 77);
            segment.store_word(1, 42);
            pool.store_root_word(3, 9);
            persister.flush(&segment, 5, 5);
            persister.flush(&segment, 64, 8);
            persister.flush_words_now(&segment);
            persister.flush_root();
            persister.fence().unwrap();
            let counters = persister.counters();
            match (durability, file_kind()) {
                // One line of payload each, the segment's words, the root's.
                (Durability::Power, PoolKind::Dax) => {
                    assert_eq!(counters.syncs, 0);
                    assert!(counters.lines >= 4, "{counters:?}");
                }
                (Durability::Power, _) => assert_eq!(counters.syncs, 2),
                _ => assert_eq!((counters.syncs, counters.lines), (0, 0)),
            }
            pool.secret()
        };
        let pool = Pool::open(directory.path(), &options).unwrap();
        assert!(pool.report().findings.clean);
        assert_eq!(pool.secret(), secret);
        let segments = pool.segments();
        assert_eq!(segments.len(), 1);
        let mut read = [0; 5];
        segments[0].read(5, &mut read);
        assert_eq!(&read, b"hello");
        assert_eq!(segments[0].load_u64(64), 77);
        assert_eq!(segments[0].word(1), 42);
        assert_eq!(segments[0].generation(), 1);
        assert_eq!(pool.root_word(3), 9);
        assert_eq!(pool.used_bytes(), u64::from(SEGMENT));
    }
}

#[test]
fn a_new_segment_reads_as_zero_even_where_an_old_one_was() {
    let directory = tempfile::tempdir().unwrap();
    let pools = [
        Pool::create(directory.path(), &file_options()).unwrap(),
        Pool::dram(&dram_options()).unwrap(),
        Pool::dram(&PoolOptions { prepared_segments: 2, ..dram_options() }).unwrap(),
    ];
    for pool in pools {
        for round in 1..=20 {
            let segment = pool.allocate().unwrap();
            let mut bytes = vec![0; SEGMENT as usize];
            segment.read(0, &mut bytes);
            assert!(bytes.iter().all(|&byte| byte == 0), "round {round}");
            assert_eq!(segment.word(2), 0);
            segment.store(0, &vec![0xab; SEGMENT as usize]);
            segment.store_word(2, round);
            pool.free(segment).unwrap();
        }
    }
}

#[test]
fn generations_tell_the_lives_of_one_descriptor_apart() {
    let pool = Pool::dram(&PoolOptions::volatile(SEGMENT, SEGMENT.into())).unwrap();
    for expected in 1..5 {
        let segment = pool.allocate().unwrap();
        assert_eq!((segment.id(), segment.generation()), (0, expected));
        pool.free(segment).unwrap();
    }
}

#[test]
fn a_full_pool_says_so_and_recovers_when_something_is_freed() {
    let pool = Pool::dram(&dram_options()).unwrap();
    let mut held: Vec<_> = (0..8).map(|_| pool.allocate().unwrap()).collect();
    let error = pool.allocate().unwrap_err();
    assert!(matches!(error, PmemError::PoolFull { capacity_bytes } if capacity_bytes == 8 * 65536));
    assert!(error.is_retryable());
    pool.free(held.pop().unwrap()).unwrap();
    pool.allocate().unwrap();
    assert_eq!(pool.used_bytes(), pool.capacity_bytes());
}

#[test]
fn opening_with_more_capacity_grows_the_pool_and_with_less_stops_allocation() {
    let directory = tempfile::tempdir().unwrap();
    let small = PoolOptions { capacity_bytes: 2 * u64::from(SEGMENT), ..file_options() };
    let large = PoolOptions { capacity_bytes: 200 * u64::from(SEGMENT), ..file_options() };
    {
        let pool = Pool::create(directory.path(), &small).unwrap();
        for _ in 0..2 {
            pool.allocate().unwrap();
        }
        assert!(matches!(pool.allocate(), Err(PmemError::PoolFull { .. })));
    }
    {
        let pool = Pool::open(directory.path(), &large).unwrap();
        for _ in 0..98 {
            pool.allocate().unwrap();
        }
        assert_eq!(pool.segments().len(), 100);
    }
    let pool = Pool::open(directory.path(), &small).unwrap();
    assert_eq!(pool.segments().len(), 100);
    for segment in pool.segments().split_off(1) {
        assert!(matches!(pool.allocate(), Err(PmemError::PoolFull { .. })));
        pool.free(segment).unwrap();
    }
    pool.allocate().unwrap();
    assert!(matches!(pool.allocate(), Err(PmemError::PoolFull { .. })));
}

#[test]
fn dram_refuses_a_promise_it_cannot_keep_unless_asked_to_pretend() {
    for durability in [Durability::Process, Durability::Power] {
        let options = PoolOptions { durability, ..dram_options() };
        let error = Pool::dram(&options).unwrap_err();
        assert!(matches!(error, PmemError::CannotPromise { .. }));
        assert!(error.to_string().contains("emulate_durability"));
    }
    let options = PoolOptions {
        durability: Durability::Power,
        emulate_durability: true,
        write_delay_ns: 150,
        ..dram_options()
    };
    let pool = Pool::dram(&options).unwrap();
    let report = pool.report();
    assert!(report.emulated);
    assert!(matches!(report.mechanism, Mechanism::CacheLineEmulated(_)));
    let segment = pool.allocate().unwrap();
    let mut persister = pool.persister();
    segment.store(60, &[1; 8]);
    persister.flush(&segment, 60, 8);
    persister.store_nontemporal(&segment, 4096, &[2; 256]);
    persister.fence().unwrap();
    let counters = persister.counters();
    assert_eq!((counters.flushes, counters.lines, counters.fences), (2, 6, 1));
    for length in [100, 1000, 2000] {
        let bytes = vec![length as u8; length];
        persister.store_flushed(&segment, 8192, &bytes);
        let mut read = vec![0; length];
        segment.read(8192, &mut read);
        assert_eq!(read, bytes);
    }
    persister.fence().unwrap();
    assert_eq!(persister.counters().lines, 6 + 2 + 16 + 32);
}

#[test]
fn a_failed_synchronisation_ends_every_promise() {
    let directory = tempfile::tempdir().unwrap();
    let options = PoolOptions { durability: Durability::Power, ..file_options() };
    let pool = Pool::create(directory.path(), &options).unwrap();
    let segment = pool.allocate().unwrap();
    let (mut first, mut second) = (pool.persister(), pool.persister());
    segment.store(0, b"x");
    first.flush(&segment, 0, 1);
    pool.fail_next_sync();
    if file_kind() == PoolKind::Dax {
        // Cache lines need no synchronisation, so none can fail.
        first.fence().unwrap();
        assert_eq!(first.counters().syncs, 0);
        return;
    }
    let error = first.fence().unwrap_err();
    assert!(matches!(&error, PmemError::SyncFailed { file, .. } if file.ends_with("0.seg")));
    assert!(!error.is_retryable());
    for outcome in [first.fence(), second.fence()] {
        assert!(matches!(outcome, Err(PmemError::SyncFailed { .. })));
    }
    assert!(matches!(pool.allocate(), Err(PmemError::SyncFailed { .. })));
    assert!(segment.persist(0, 1).is_err());
    drop((first, second, segment, pool));
    let pool = Pool::open(directory.path(), &options).unwrap();
    assert!(!pool.report().findings.clean);
}

#[test]
fn a_replaced_backing_keeps_contents_and_leaves_old_holders_behind() {
    let directory = tempfile::tempdir().unwrap();
    for pool in [
        Pool::create(directory.path(), &file_options()).unwrap(),
        Pool::dram(&dram_options()).unwrap(),
    ] {
        let segment = pool.allocate().unwrap();
        segment.store(100, b"kept");
        segment.mark_shared();
        let granted = segment.descriptor().unwrap().try_clone().unwrap();
        let peer = Mapping::shared(granted, SEGMENT as usize, Protection::ReadWrite).unwrap();
        segment.replace_backing().unwrap();
        assert!(!segment.is_shared());
        // SAFETY: inside the peer's mapping of 64 KiB.
        let at = unsafe { peer.base().as_ptr().add(100) };
        // SAFETY: the mapping is writable.
        unsafe { at.write(b'X') };
        segment.store(104, b"!");
        let mut read = [0; 5];
        segment.read(100, &mut read);
        assert_eq!(&read, b"kept!");
    }
    // The file pool's new file carries the contents under the old name.
    let pool = Pool::open(directory.path(), &file_options()).unwrap();
    let mut read = [0; 5];
    pool.segments()[0].read(100, &mut read);
    assert_eq!(&read, b"kept!");
    assert_eq!(segment_files(directory.path()), ["0.seg"]);
}

#[test]
fn a_shared_segment_is_never_recycled() {
    let directory = tempfile::tempdir().unwrap();
    let options = PoolOptions { prepared_segments: 1, ..file_options() };
    let pool = Pool::create(directory.path(), &options).unwrap();
    let segment = pool.allocate().unwrap();
    segment.mark_shared();
    let granted = segment.descriptor().unwrap().try_clone().unwrap();
    let peer = Mapping::shared(granted, SEGMENT as usize, Protection::ReadWrite).unwrap();
    pool.free(segment).unwrap();
    // SAFETY: inside the peer's writable mapping.
    unsafe { peer.base().as_ptr().write(0xff) };
    for _ in 0..8 {
        let segment = pool.allocate().unwrap();
        let mut byte = [1];
        segment.read(0, &mut byte);
        assert_eq!(byte, [0]);
    }
}

/// The example that prints what persisting costs, at its smallest setting.
#[test]
fn the_cost_example_runs() {
    let directory = tempfile::tempdir().unwrap();
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.push("examples/persistence_cost");
    if !path.exists() {
        // Built with the tests, unless only this test was asked for.
        return;
    }
    let output =
        std::process::Command::new(path).arg("--quick").arg(directory.path()).output().unwrap();
    assert!(output.status.success());
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.lines().count() > 20, "{table}");
}

#[test]
fn the_instruction_that_writes_lines_back_can_be_chosen_among_those_there_are() {
    for instruction in WriteBack::available() {
        let options = PoolOptions {
            durability: Durability::Power,
            emulate_durability: true,
            write_back: Some(instruction),
            ..dram_options()
        };
        let pool = Pool::dram(&options).unwrap();
        assert_eq!(pool.report().mechanism, Mechanism::CacheLineEmulated(instruction));
        let segment = pool.allocate().unwrap();
        let mut persister = pool.persister();
        segment.store(60, b"across two lines");
        persister.flush(&segment, 60, 16);
        persister.fence().unwrap();
        assert_eq!(persister.counters().lines, 2, "{instruction}");
        let mut read = [0; 16];
        segment.read(60, &mut read);
        assert_eq!(&read, b"across two lines");
    }
    // No processor has both kinds.
    let foreign = if cfg!(target_arch = "x86_64") { WriteBack::DcCvap } else { WriteBack::Clwb };
    let options = PoolOptions { write_back: Some(foreign), ..dram_options() };
    let error = Pool::dram(&options).unwrap_err();
    assert!(matches!(error, PmemError::Options { option: "write_back", .. }), "{error:?}");
}
