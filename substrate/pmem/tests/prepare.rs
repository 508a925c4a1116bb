//! The preparing thread: keeps segments ready, recycles, sleeps, ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use beeline_pmem::{Durability, PmemError, Pool, PoolOptions};
use common::file_kind;

const SEGMENT: u32 = 64 << 10;

fn options(prepared_segments: u32) -> PoolOptions {
    PoolOptions {
        kind: Some(file_kind()),
        segment_bytes: SEGMENT,
        capacity_bytes: 4 * u64::from(SEGMENT),
        prepared_segments,
        ..PoolOptions::default()
    }
}

/// Waits, bounded, until `condition` holds.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn files(directory: &Path) -> usize {
    std::fs::read_dir(directory.join("segments")).unwrap().count()
}

#[test]
fn segments_are_prepared_ahead_and_their_files_go_with_the_pool() {
    for durability in [Durability::Process, Durability::Power] {
        let directory = tempfile::tempdir().unwrap();
        let options = PoolOptions { durability, ..options(2) };
        let pool = Pool::create(directory.path(), &options).unwrap();
        eventually("two segments are prepared", || pool.prepared_segments() == 2);
        let segment = pool.allocate().unwrap();
        eventually("the one taken is made up for", || pool.prepared_segments() == 2);
        assert_eq!(files(directory.path()), 3);
        assert_eq!(pool.used_bytes(), u64::from(SEGMENT), "prepared is not used");
        drop((segment, pool));
        assert_eq!(files(directory.path()), 1);
        let pool = Pool::open(directory.path(), &options).unwrap();
        assert_eq!(pool.report().findings.orphans_removed, 0);
        assert_eq!(pool.segments().len(), 1);
    }
}

#[test]
fn the_whole_capacity_can_be_allocated_while_segments_are_being_prepared() {
    for _ in 0..20 {
        let directory = tempfile::tempdir().unwrap();
        let pool = Pool::create(directory.path(), &options(3)).unwrap();
        for _ in 0..4 {
            pool.allocate().unwrap();
        }
        assert!(matches!(pool.allocate(), Err(PmemError::PoolFull { .. })));
    }
}

#[test]
fn a_freed_segment_nobody_else_holds_is_recycled_zeroed() {
    let directory = tempfile::tempdir().unwrap();
    let options = PoolOptions { capacity_bytes: SEGMENT.into(), ..options(1) };
    let pool = Pool::create(directory.path(), &options).unwrap();
    for round in 1..6 {
        let segment = pool.allocate().unwrap();
        assert_eq!(segment.generation(), round);
        let mut bytes = vec![1; SEGMENT as usize];
        segment.read(0, &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0));
        segment.store(0, &vec![0xcd; SEGMENT as usize]);
        pool.free(segment).unwrap();
        if round % 2 == 0 {
            eventually("it is prepared again", || pool.prepared_segments() == 1);
        }
    }
}

#[test]
fn whoever_still_holds_a_freed_segment_reads_on() {
    let directory = tempfile::tempdir().unwrap();
    let pool = Pool::create(directory.path(), &options(1)).unwrap();
    let segment = pool.allocate().unwrap();
    segment.store_u64(0, 42);
    let reader = std::sync::Arc::clone(&segment);
    pool.free(segment).unwrap();
    for _ in 0..4 {
        pool.allocate().unwrap().store_u64(0, 1);
    }
    assert_eq!(reader.load_u64(0), 42);
}

/// Context switches of the thread `name` of this process.
fn switches(name: &str) -> Option<u64> {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let comm = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
        if comm.trim() == name {
            let status = std::fs::read_to_string(task.join("status")).ok()?;
            let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
            let numbers =
                counts.filter_map(|line| line.split_whitespace().last()?.parse::<u64>().ok());
            return Some(numbers.sum());
        }
    }
    None
}

/// Its own process, so that no other test's preparing thread is counted.
#[test]
fn the_thread_sleeps_when_there_is_nothing_to_prepare() {
    const ALONE: &str = "BEELINE_PMEM_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["the_thread_sleeps_when_there_is_nothing_to_prepare", "--exact"])
            .env(ALONE, "1")
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let pool = Pool::create(directory.path(), &options(2)).unwrap();
    eventually("two segments are prepared", || pool.prepared_segments() == 2);
    let settled = || {
        let before = switches("beeline-prepare");
        std::thread::sleep(Duration::from_millis(50));
        before.is_some() && switches("beeline-prepare") == before
    };
    eventually("the thread does not run any more", settled);
    drop(pool);
    assert_eq!(switches("beeline-prepare"), None, "it ends with the pool");
}

/// Threads take and give back at once: no segment is ever in two hands, none is lost.
#[test]
fn threads_never_share_a_segment_they_did_not_share() {
    let options =
        PoolOptions { prepared_segments: 2, ..PoolOptions::volatile(SEGMENT, 6 * 65_536) };
    let pool = Pool::dram(&options).unwrap();
    std::thread::scope(|scope| {
        for thread in 1..=3_u64 {
            let pool = pool.clone();
            scope.spawn(move || {
                for _ in 0..200 {
                    let held = [pool.allocate().unwrap(), pool.allocate().unwrap()];
                    for segment in &held {
                        assert_eq!(segment.load_u64(0), 0, "zeroed");
                        segment.store_u64(0, thread);
                        segment.store_word(0, thread);
                    }
                    std::thread::yield_now();
                    for segment in held {
                        assert_eq!((segment.load_u64(0), segment.word(0)), (thread, thread));
                        pool.free(segment).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(pool.used_bytes(), 0);
    let all: Vec<_> = std::iter::from_fn(|| pool.allocate().ok()).collect();
    assert_eq!(all.len(), 6);
}
