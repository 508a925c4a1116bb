//! Fences that are begun and not waited for, on files.
//!
//! In a binary of its own: fault points are global to the process.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use beeline_env::{FaultAction, fault};
use beeline_pmem::{Durability, Persister, PmemError, Pool, PoolKind, PoolOptions, Segment};

/// Longest wait for anything; far beyond what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(20);
const SYNC: &str = "pmem.file.sync";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn options() -> PoolOptions {
    PoolOptions {
        kind: Some(PoolKind::File),
        durability: Durability::Power,
        // The machine's directory for temporary files may be in memory.
        emulate_durability: true,
        segment_bytes: 64 << 10,
        capacity_bytes: 4 << 20,
        ..PoolOptions::default()
    }
}

/// Runs `body` with a pool of its own, and no other test beside it.
fn with_pool(body: impl FnOnce(&Pool)) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let pool = Pool::create(directory.path(), &options()).unwrap();
    body(&pool);
}

fn store(persister: &mut Persister, segment: &Segment, at: usize) {
    segment.store(at, b"stored");
    persister.flush(segment, at, 6);
}

/// Tells when a fence that was begun is done.
fn told(persister: &Persister) -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel();
    let sender = Mutex::new(sender);
    persister.set_waker(move || {
        let _ = sender.lock().unwrap().send(());
    });
    receiver
}

fn wait_for(persister: &Persister, told: &mpsc::Receiver<()>, ticket: u64) {
    while persister.fenced_to() < ticket {
        told.recv_timeout(PATIENCE).unwrap();
    }
}

/// Waits until the point was passed so often.
fn until_passed(armed: &beeline_env::ArmedFault, hits: u64) {
    let begun = std::time::Instant::now();
    while armed.hits() < hits {
        assert!(begun.elapsed() < PATIENCE, "no synchronisation began");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn fences_of_two_persisters_begun_during_a_synchronisation_share_the_next_one() {
    with_pool(|pool| {
        let segment = pool.allocate().unwrap();
        let (mut one, mut other) = (pool.persister(), pool.persister());
        let (told_one, told_other) = (told(&one), told(&other));
        let held = fault::arm(SYNC, FaultAction::Hold, 0);
        let before = pool.syncs();
        store(&mut one, &segment, 0);
        let first = one.begin_fence().unwrap();
        until_passed(&held, 1);
        let later: Vec<_> = (1..=3)
            .map(|turn| {
                store(&mut one, &segment, turn * 64);
                store(&mut other, &segment, turn * 640);
                (one.begin_fence().unwrap(), other.begin_fence().unwrap())
            })
            .collect();
        assert!(one.fenced_to() < first, "its synchronisation is held up");
        assert_eq!(other.fenced_to(), 0);
        drop(held);
        wait_for(&one, &told_one, later[2].0);
        wait_for(&other, &told_other, later[2].1);
        assert_eq!(pool.syncs() - before, 2, "one was under way, and one served the other six");
        one.check().unwrap();
        // Nothing new: no file is synchronised for it.
        let ticket = one.begin_fence().unwrap();
        assert_eq!((one.fenced_to(), pool.syncs() - before), (ticket, 2));
    });
}

#[test]
fn fences_that_wait_for_the_same_synchronisation_have_one_ticket() {
    with_pool(|pool| {
        let (segment, other) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        let mut persister = pool.persister();
        let before = pool.syncs();
        let held = fault::arm(SYNC, FaultAction::Hold, 0);
        store(&mut persister, &segment, 0);
        let first = persister.begin_fence().unwrap();
        until_passed(&held, 1);
        let mut begin = |at: usize| {
            store(&mut persister, &segment, at * 64);
            persister.begin_fence().unwrap()
        };
        let second = begin(1);
        assert!(second > first, "it began before this was stored");
        for at in 2..100 {
            assert_eq!(begin(at), second, "nothing more is to be remembered for it");
        }
        // A file that nothing waits for.
        store(&mut persister, &other, 0);
        assert!(persister.begin_fence().unwrap() > second);
        until_passed(&held, 2);
        store(&mut persister, &segment, 0);
        let waits = std::thread::spawn(move || persister.fence().map(|()| persister));
        drop(held);
        waits.join().unwrap().unwrap();
        // One that was under way, one for all that came meanwhile, the other file's, and one more where
        // the last fence came after the second had begun.
        let syncs = pool.syncs() - before;
        assert!((3..=4).contains(&syncs), "{syncs} synchronisations");
    });
}

#[test]
fn a_slow_file_does_not_hold_up_the_fences_of_another() {
    with_pool(|pool| {
        let (slow, quick) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        let (mut one, mut other) = (pool.persister(), pool.persister());
        let told_other = told(&other);
        // The first synchronisation is held up, and no other.
        let held = fault::arm(SYNC, FaultAction::HoldOnce, 0);
        store(&mut one, &slow, 0);
        let first = one.begin_fence().unwrap();
        until_passed(&held, 1);
        store(&mut one, &quick, 0);
        let second = one.begin_fence().unwrap();
        store(&mut other, &quick, 64);
        let ticket = other.begin_fence().unwrap();
        wait_for(&other, &told_other, ticket);
        assert!(one.fenced_to() < first, "tickets count in order");
        drop(held);
        one.fence().unwrap();
        assert_eq!(one.fenced_to(), second, "a fence that waits covers those that were begun");
    });
}

#[test]
fn a_failure_is_told_to_every_fence_that_was_begun_and_to_all_that_follow() {
    with_pool(|pool| {
        let segment = pool.allocate().unwrap();
        let (mut one, mut other) = (pool.persister(), pool.persister());
        let (told_one, told_other) = (told(&one), told(&other));
        let failing = fault::arm(SYNC, FaultAction::Fail, 0);
        store(&mut one, &segment, 0);
        store(&mut other, &segment, 64);
        let tickets = (one.begin_fence().unwrap(), other.begin_fence());
        wait_for(&one, &told_one, tickets.0);
        let failed = |checked| matches!(checked, Err(PmemError::SyncFailed { .. }));
        assert!(failed(one.check()));
        match tickets.1 {
            Ok(ticket) => wait_for(&other, &told_other, ticket),
            Err(error) => assert!(failed(Err(error))),
        }
        assert!(failed(other.check()));
        drop(failing);
        assert!(failed(one.begin_fence().map(drop)) && failed(other.fence()));
    });
}

#[test]
fn a_pool_that_closes_waits_for_fences_and_can_be_opened_at_once() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    drop(Pool::create(directory.path(), &options()).unwrap());
    for turn in 0..50 {
        let pool = Pool::open(directory.path(), &options()).unwrap();
        assert!(pool.report().findings.clean, "turn {turn}");
        let segment = pool.allocate().unwrap();
        let mut persister = pool.persister();
        store(&mut persister, &segment, 0);
        let before = pool.syncs();
        let _ = persister.begin_fence().unwrap();
        drop(persister);
        assert_eq!(pool.syncs() - before, 1, "it was done when the persister was dropped");
        pool.free(segment).unwrap();
    }
}
