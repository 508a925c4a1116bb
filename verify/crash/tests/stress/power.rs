//! Random histories on a simulated pool with several shards: what reaches media in which order is
//! up to chance, what was acknowledged has to be there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use beeline_env::{Clock, ManualClock, Randomness};
use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Keyspace, KvError, Store, StoreOptions, audit};
use beeline_pmem::{
    CrashCounts, CrashImage, CrashKind, CrashLimits, Durability, Pool, PoolOptions, SimDevice,
    for_each_crash_image,
};

use crate::actor::{self, Client, KEYS, SEGMENT, Shards};
use crate::ledger::{Effect, Ledger, Operation, Time};

const DATABASES: u8 = 2;

struct History {
    options: PoolOptions,
    device: SimDevice,
    store: Arc<Store>,
    shards: Shards,
    clock: Arc<ManualClock>,
    client: Client,
    randomness: Randomness,
    ledger: Ledger,
    /// Operations that wait for the next commit.
    waiting: Vec<usize>,
    /// Operations that wait for commits that were begun, and how far the shards have to come for them.
    begun: VecDeque<(Vec<usize>, Vec<u64>)>,
    mark: u64,
    stamp: u64,
}

fn open(pool: &Pool, shards: usize, clock: &Arc<ManualClock>) -> (Arc<Store>, Shards, u64) {
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    let options = StoreOptions {
        shards,
        clock,
        recovery_threads: 1,
        warm_bytes: Some(SEGMENT / 4),
        accept_damage: true,
        ..StoreOptions::default()
    };
    let (store, shards, report) = Store::open(pool.clone(), options).unwrap();
    (store, shards, report.damaged)
}

impl History {
    fn new(seed: u64) -> Self {
        let mut randomness = Randomness::new(seed);
        let count = 1 + randomness.below(3) as usize;
        let segments = 2 * count as u64 + 3 + randomness.below(6);
        let options = PoolOptions {
            durability: Durability::Power,
            segment_bytes: SEGMENT,
            capacity_bytes: segments * u64::from(SEGMENT),
            lazy_words: randomness.chance(1, 2),
            ..PoolOptions::default()
        };
        let (pool, device) = Pool::simulated(&options).unwrap();
        let clock = Arc::new(ManualClock::new(1_000_000));
        let (store, shards, _) = open(&pool, count, &clock);
        device.mark(0);
        if randomness.chance(2, 3) {
            device.hold_fences();
        }
        let client = Client::new(count);
        let (ledger, waiting) = (Ledger::default(), Vec::new());
        Self {
            options,
            device,
            store,
            shards,
            clock,
            client,
            randomness,
            ledger,
            waiting,
            begun: VecDeque::new(),
            mark: 0,
            stamp: 0,
        }
    }

    fn key(&mut self) -> (u8, u16) {
        let database = u8::from(self.randomness.chance(1, 5));
        let spread = if self.randomness.chance(1, 2) { 6 } else { KEYS };
        (database, self.randomness.below(u64::from(spread)) as u16)
    }

    fn put(&mut self) -> Effect {
        self.stamp += 1;
        let expires = self.randomness.chance(1, 12);
        let in_ms = 1 + self.randomness.below(800);
        let expires_at_ms = if expires { self.clock.unix_ms() + in_ms } else { 0 };
        Effect::Put { stamp: self.stamp, expires_at_ms }
    }

    fn effect(&mut self) -> Effect {
        if self.randomness.chance(1, 4) { Effect::Delete } else { self.put() }
    }

    fn note(&mut self, effects: Vec<((u8, u16), Effect)>, atomic: bool) {
        self.waiting.push(self.ledger.operations.len());
        self.ledger.operations.push(Operation { effects, atomic, acknowledged: None });
    }

    fn commit(&mut self) {
        let order = self.randomness.below(self.shards.len() as u64) as usize;
        for turn in 0..self.shards.len() {
            let shard = &self.shards[(order + turn) % self.shards.len()];
            shard.lock().unwrap().commit().unwrap();
        }
        self.acknowledge();
    }

    /// Everything that was stored is persisted.
    fn acknowledge(&mut self) {
        let begun = self.begun.drain(..).flat_map(|(numbers, _)| numbers);
        let numbers: Vec<usize> = begun.chain(self.waiting.drain(..)).collect();
        self.acknowledge_some(numbers);
        self.client.acknowledged();
    }

    fn acknowledge_some(&mut self, numbers: Vec<usize>) {
        self.mark += 1;
        for number in numbers {
            self.ledger.operations[number].acknowledged.get_or_insert(self.mark);
        }
        self.device.mark(self.mark);
    }

    /// Begins to commit what was stored, in every shard.
    fn begin_commit(&mut self) {
        let begin = |shard: &Arc<std::sync::Mutex<beeline_kv::Shard>>| {
            let mut shard = shard.lock().unwrap();
            shard.begin_commit().unwrap();
            shard.begun_to()
        };
        let commits = self.shards.iter().map(begin).collect();
        self.begun.push_back((std::mem::take(&mut self.waiting), commits));
    }

    /// Has some of the fences that were begun come to their end, and acknowledges what rested on them.
    fn settle_commits(&mut self) {
        for _ in 0..self.randomness.below(3) {
            self.device.complete_fence();
        }
        let settled: Vec<u64> = self
            .shards
            .iter()
            .map(|shard| {
                let mut shard = shard.lock().unwrap();
                shard.settle().unwrap();
                shard.settled_to()
            })
            .collect();
        while let Some((numbers, _)) = self.begun.pop_front_if(|(_, commits)| {
            commits.iter().zip(&settled).all(|(commit, settled)| commit <= settled)
        }) {
            self.acknowledge_some(numbers);
        }
    }

    /// A read whose reply waits for no commit: what it shows may not be lost from then on.
    fn read(&mut self) {
        let key = self.key();
        let owner = self.store.shard_of(key.0, &actor::name(key));
        let (shown, rests) = {
            let mut shard = self.shards[owner].lock().unwrap();
            shard.take_rests();
            let shown = actor::read(&mut Keyspace::single(&mut shard), key).unwrap();
            (shown, shard.take_rests())
        };
        let stored = |operation: &Operation| {
            let of_key = operation.effects.iter().rfind(|(known, _)| *known == key);
            of_key.is_some_and(
                |(_, effect)| matches!(effect, Effect::Put { stamp, .. } if Some(*stamp) == shown),
            )
        };
        if rests == 0
            && let Some(number) = self.ledger.operations.iter().rposition(stored)
            && self.ledger.operations[number].acknowledged.is_none()
        {
            self.acknowledge_some(vec![number]);
        }
    }

    fn step(&mut self) {
        match self.randomness.below(24) {
            0..8 => {
                let (key, effect) = (self.key(), self.effect());
                let length = actor::length(&mut self.randomness);
                let home = self.store.shard_of(key.0, &actor::name(key));
                // Noted first: making room may commit.
                self.note(vec![(key, effect)], false);
                let stored = actor::with_all(&self.shards, home, |keys| {
                    actor::store(keys, (key, effect), length)
                });
                self.settle(stored);
            }
            8..13 => self.batch(),
            13..19 => {
                let (key, effect) = (self.key(), self.effect());
                let length = actor::length(&mut self.randomness).min(2000);
                let owner = self.store.shard_of(key.0, &actor::name(key));
                self.note(vec![(key, effect)], false);
                let shard = Arc::clone(&self.shards[owner]);
                let mut shard = shard.lock().unwrap();
                if !self.client.put(&self.store, &mut shard, (key, effect), length) {
                    self.withdraw();
                }
            }
            19 => {
                let mut shard = self.shards[0].lock().unwrap();
                self.client.close(&self.store, &mut shard);
            }
            20 if self.randomness.chance(1, 3) => {
                let database = self.randomness.chance(2, 3).then_some(1);
                let gone = actor::all_keys(DATABASES)
                    .filter(|key| database.is_none_or(|database| database == key.0))
                    .map(|key| (key, Effect::Delete))
                    .collect();
                self.note(gone, false);
                actor::with_all(&self.shards, 0, |keys| keys.flush(database)).unwrap();
            }
            21 => self.clock.advance(Duration::from_millis(self.randomness.below(300))),
            _ => self.upkeep(),
        }
        match self.randomness.below(12) {
            0..2 => self.commit(),
            2..6 => self.begin_commit(),
            _ => {}
        }
        if self.randomness.chance(1, 3) {
            self.settle_commits();
        }
        if self.randomness.chance(1, 2) {
            self.read();
        }
    }

    fn settle(&mut self, stored: Result<(), KvError>) {
        match stored {
            Ok(()) => {}
            Err(KvError::PoolFull { .. }) => {
                self.withdraw();
                self.upkeep();
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The latest operation did not happen.
    fn withdraw(&mut self) {
        self.waiting.pop();
        self.ledger.operations.pop();
    }

    fn batch(&mut self) {
        let home = self.randomness.below(self.shards.len() as u64) as usize;
        // One of a single shard's keys may wait for its commit like any operation.
        let alone = self.randomness.chance(1, 2);
        let mut members = Vec::new();
        for _ in 0..1 + self.randomness.below(6) {
            let (key, effect) = (self.key(), self.effect());
            let fits = !alone || self.store.shard_of(key.0, &actor::name(key)) == home;
            if fits && members.iter().all(|(known, _)| *known != key) {
                members.push((key, effect));
            }
        }
        let lengths: Vec<_> = members.iter().map(|_| actor::length(&mut self.randomness)).collect();
        self.note(members.clone(), true);
        let stored: Vec<bool> = actor::with_all(&self.shards, home, |keys| {
            keys.begin_batch();
            let members = members.iter().zip(lengths);
            let stored =
                members.map(|(member, length)| match actor::store(keys, *member, length) {
                    Ok(()) => true,
                    Err(KvError::PoolFull { .. } | KvError::BatchTooLarge { .. }) => false,
                    Err(error) => panic!("{error}"),
                });
            let stored = stored.collect();
            keys.end_batch();
            // What runs under several locks is committed before they are given back.
            if !alone {
                keys.commit().unwrap();
            }
            stored
        });
        let mut turn = stored.into_iter();
        let operation = self.ledger.operations.last_mut().unwrap();
        operation.effects.retain(|_| turn.next().unwrap());
        if !alone {
            self.acknowledge();
        }
    }

    fn upkeep(&mut self) {
        for shard in &self.shards {
            for _ in 0..1 + self.randomness.below(3) {
                match shard.lock().unwrap().maintain(8 << 10) {
                    Ok(_) | Err(KvError::PoolFull { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    fn check(&self, image: &CrashImage, turn: u64) -> Result<(), String> {
        let (pool, _) =
            Pool::open_image(image, &self.options).map_err(|error| error.to_string())?;
        let now_ms = self.clock.unix_ms();
        let clock = Arc::new(ManualClock::new(1_000_000));
        // The clock of the image may have jumped back to the start.
        clock.set_unix_ms(if turn.is_multiple_of(2) { now_ms } else { 1_000_000 });
        let time = Time { now_ms: clock.unix_ms(), latest_ms: now_ms };
        let (store, shards, damaged) = open(&pool, 1 + turn as usize % 4, &clock);
        if damaged != 0 {
            return Err(format!("{damaged} entries are reported damaged"));
        }
        let observed = actor::observe(&shards, DATABASES)?;
        let mark = image.mark().unwrap_or(0);
        let mut wrong = self.ledger.violations(mark, &observed, actor::all_keys(DATABASES), time);
        wrong.extend(audit(&store, &shards));
        if !wrong.is_empty() {
            wrong.truncate(3);
            return Err(wrong.join("\n  "));
        }
        // Life goes on, and nothing comes back while it collects, nor at the next opening.
        for turn in 0..6_u64 {
            for shard in &shards {
                let _ = shard.lock().unwrap().maintain(1 << 20);
            }
            let length = 9000;
            let churn = Effect::Put { stamp: u64::MAX, expires_at_ms: 0 };
            let key = (DATABASES, turn as u16 % 3);
            let _ = actor::with_all(&shards, 0, |keys| {
                actor::store(keys, (key, churn), length).and_then(|()| keys.commit())
            });
        }
        drop((store, shards));
        let (_, shards, damaged) = open(&pool, 1 + (turn as usize + 1) % 4, &clock);
        let again = actor::observe(&shards, DATABASES)?;
        if again != observed || damaged != 0 {
            return Err(format!("another opening shows {again:?}, not {observed:?}"));
        }
        Ok(())
    }

    /// Runs `steps` steps and looks at images of the whole history.
    fn run(seed: u64, steps: usize, limits: &CrashLimits) -> (CrashCounts, u64, Vec<String>) {
        let mut history = Self::new(seed);
        for _ in 0..steps {
            history.step();
        }
        history.commit();
        let mut wrong = Vec::new();
        let observed = actor::observe(&history.shards, DATABASES).unwrap();
        let now_ms = history.clock.unix_ms();
        let time = Time { now_ms, latest_ms: now_ms };
        wrong.extend(history.ledger.violations(
            history.mark,
            &observed,
            actor::all_keys(DATABASES),
            time,
        ));
        let mut turn = seed;
        let counts = for_each_crash_image(&history.device, limits, |image| {
            turn += 1;
            if wrong.len() >= 3 {
                return;
            }
            if let Err(finding) = history.check(image, turn) {
                wrong.push(format!("seed {seed}: {finding}\n  {}", image.describe()));
            }
        });
        let total = history.store.stats().total;
        (counts, total.segments_collected + total.segments_recycled, wrong)
    }
}

fn limits(seed: u64, points: usize, images_per_point: usize) -> CrashLimits {
    let kind = if seed % 4 == 3 { CrashKind::Process } else { CrashKind::Power };
    CrashLimits { kind, points, images_per_point, seed: seed + 1 }
}

#[test]
fn random_histories_over_several_shards_survive_power_loss() {
    let (seeds, points, images) = if crate::deep() { (400, 40, 12) } else { (14, 10, 4) };
    let seeds = match crate::first_seed() {
        Some(seed) => seed..seed + 1,
        None => 0..seeds,
    };
    let mut total = CrashCounts::default();
    let mut collected = 0;
    let histories = seeds.end - seeds.start;
    for seed in seeds {
        let (counts, segments, wrong) = History::run(seed, 160, &limits(seed, points, images));
        assert!(wrong.is_empty(), "replay with BEELINE_SEED={seed}\n{}", wrong.join("\n"));
        total.images += counts.images;
        total.points += counts.points;
        total.skipped_points += counts.skipped_points;
        total.sampled_points += counts.sampled_points;
        total.exhaustive_points += counts.exhaustive_points;
        collected += segments;
    }
    println!("{histories} histories, {collected} segments collected, {total}");
    assert!(total.images > 100 && collected > 0, "the histories collect and crash");
}

/// What the store asserts where a known bug is on. Any other panic is a failure of the test.
const ASSERTED: [&str; 1] = ["a location names a segment in use"];

#[test]
fn known_bugs_are_caught_by_random_histories() {
    for bug in KnownBug::ALL {
        if matches!(
            bug,
            KnownBug::CollectUncommitted
                | KnownBug::KeepTail
                | KnownBug::RecycleBeforePersist
                | KnownBug::ForgetSince
                | KnownBug::ForgetFields
                | KnownBug::ExpiryOfAnyValue
                | KnownBug::ExpireWhileReplacing
                | KnownBug::SweepBeforePersist
                | KnownBug::KeepHollowRows
                | KnownBug::GapBetweenSegments
                | KnownBug::SplitBatch
                | KnownBug::ForgetTruncator
                | KnownBug::AppendAway
                | KnownBug::ForgetRowEnds
                | KnownBug::UnmarkEarly
                | KnownBug::KeepRowTimes
        ) {
            // Too rare for chance, or not about databases: they have histories of their own.
            continue;
        }
        let seeds = if crate::deep() { 400 } else { 60 };
        let caught = (0..seeds).find_map(|seed| {
            let run = || History::run(seed, 160, &limits(seed, 14, 6));
            // Some bugs break what the store asserts before the history reads what is wrong.
            let ran = with_known_bug(bug, || std::panic::catch_unwind(run));
            match ran {
                Ok((_, _, wrong)) => Some((seed, wrong.into_iter().next()?)),
                Err(panic) => match panic.downcast_ref::<&str>() {
                    Some(known) if ASSERTED.contains(known) => Some((seed, (*known).to_owned())),
                    _ => std::panic::resume_unwind(panic),
                },
            }
        });
        let Some((seed, finding)) = caught else { panic!("{bug:?} went unnoticed") };
        println!("{bug:?} caught by seed {seed}: {}", finding.lines().next().unwrap_or_default());
    }
}
