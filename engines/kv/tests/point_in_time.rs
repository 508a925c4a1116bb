//! Snapshots of one moment, written by another thread while keys are overwritten, deleted, flushed
//! and collected in a pool that is too small to keep everything.
//!
//! `BEELINE_DEEP=1` takes more histories, `BEELINE_SEED=n` one of them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_kv::{
    Keyspace, KvError, Opened, PutOptions, Shard, Store, StoreOptions, check_snapshot, restore,
};
use beeline_pmem::{Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;
const KEYS: u64 = 60;

type Contents = BTreeMap<(u8, Vec<u8>), Vec<u8>>;

fn pool(segments: u64) -> Pool {
    Pool::dram(&PoolOptions::volatile(SEGMENT, segments * u64::from(SEGMENT))).unwrap()
}

fn with_keys<R>(opened: &Opened, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let mut guards: Vec<MutexGuard<'_, Shard>> =
        opened.1.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 0))
}

fn contents(keys: &mut Keyspace<'_>) -> Contents {
    let mut all = Contents::new();
    for database in 0..2 {
        let (mut names, mut cursor) = (Vec::new(), 0);
        loop {
            cursor = keys.scan(database, cursor, 50, |key, _| names.push(key.to_vec())).unwrap();
            if cursor == 0 {
                break;
            }
        }
        for name in names {
            let entry = keys.lookup(database, &name).unwrap().unwrap();
            let mut value = Vec::new();
            keys.read_value(&entry, &mut value).unwrap();
            all.insert((database, name), value);
        }
    }
    all
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}

/// One random request, then perhaps a commit or some upkeep. A full pool refuses, as it should.
fn step(opened: &Opened, random: &mut Random) {
    let fine = |outcome: Result<(), KvError>| match outcome {
        Ok(()) | Err(KvError::PoolFull { .. }) => {}
        Err(error) => panic!("{error}"),
    };
    with_keys(opened, |keys| {
        let database = random.below(2) as u8;
        // Most writes go to a few keys, so that whole segments die.
        let bound = if random.below(4) == 0 { KEYS } else { 6 };
        let key = random.below(bound).to_be_bytes();
        match random.below(100) {
            0 => fine(keys.flush(Some(database)).map(drop)),
            1..=14 => fine(keys.delete(database, &key).map(drop)),
            _ => {
                let value = vec![random.below(256) as u8; 50 + random.below(7000) as usize];
                fine(keys.put(database, &key, &[&value], PutOptions::default()).map(drop));
            }
        }
        if random.below(4) == 0 {
            keys.commit().unwrap();
        }
    });
    if random.below(3) == 0 {
        for shard in &opened.1 {
            shard.lock().unwrap().maintain(1 << 18).unwrap();
        }
    }
}

fn history(seed: u64, directory: &std::path::Path) -> u64 {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let shards = 1 + random.below(3) as usize;
    let options = || StoreOptions { shards, ..StoreOptions::default() };
    let opened = Store::open(pool(20 + random.below(20)), options()).unwrap();
    let mut meanwhile = 0;
    for round in 0..4 {
        for _ in 0..150 + random.below(300) {
            step(&opened, &mut random);
        }
        let path = directory.join(format!("{seed}-{round}"));
        let (snapshot, then) =
            with_keys(&opened, |keys| (keys.begin_snapshot().unwrap(), contents(keys)));
        // Some of what follows happens before the writer begins, some beside it.
        for _ in 0..random.below(60) {
            step(&opened, &mut random);
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                snapshot.write(&path).unwrap();
                done.store(true, Ordering::Release);
            });
            while !done.load(Ordering::Acquire) {
                step(&opened, &mut random);
                meanwhile += 1;
            }
        });
        check_snapshot(&path).unwrap();
        let (again, _) = restore(&path, pool(120), options()).unwrap();
        let found = with_keys(&again, contents);
        assert!(found == then, "seed {seed}, round {round}: {} keys, {}", found.len(), then.len());
        std::fs::remove_file(&path).unwrap();
    }
    with_keys(&opened, |keys| keys.commit().unwrap());
    let findings = beeline_kv::audit(&opened.0, &opened.1);
    assert!(findings.is_empty(), "seed {seed}: {findings:?}");
    meanwhile
}

#[test]
fn a_snapshot_is_of_one_moment_whatever_goes_on_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let only = std::env::var("BEELINE_SEED").ok().and_then(|seed| seed.parse().ok());
    let count = if std::env::var("BEELINE_DEEP").is_ok() { 400 } else { 12 };
    let seeds = only.map_or(1..=count, |seed: u64| seed..=seed);
    let histories = seeds.end() - seeds.start() + 1;
    let meanwhile: u64 = seeds.map(|seed| history(seed, directory.path())).sum();
    println!("{histories} histories of 4 snapshots, {meanwhile} requests while they were written");
}
