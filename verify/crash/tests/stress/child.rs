//! The process that is ended: threads that work on one store and say on standard output what they
//! are about to do (`I`), what was committed (`A`) and what did not happen (`F`).
//!
//! Every thread writes keys of a database of its own, so that each key has one writer; logs,
//! segments, indexes and the collector are shared.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use beeline_env::{Clock, ManualClock, Randomness};
use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Keyspace, KvError, Store, StoreOptions, audit, restore};
use beeline_pmem::{Durability, Pool, PoolOptions};

use crate::actor::{self, Client, KEYS, SEGMENT, Shards};
use crate::ledger::{Effect, Key, Observed};

pub const THREADS: u8 = 3;

/// What a round is told, by environment.
#[derive(Clone, Debug)]
pub struct Orders {
    pub directory: PathBuf,
    pub seed: u64,
    pub shards: usize,
    pub segments: u64,
    pub prepared: u32,
    pub clock_ms: u64,
    pub milliseconds: u64,
    pub bug: Option<KnownBug>,
    pub durability: Durability,
}

const VARIABLE: &str = "BEELINE_STRESS_CHILD";

impl Orders {
    pub fn encode(&self) -> (&'static str, String) {
        let Self { seed, shards, segments, prepared, clock_ms, milliseconds, .. } = self;
        let bug = self
            .bug
            .map_or(0, |bug| 1 + KnownBug::ALL.iter().position(|known| *known == bug).unwrap());
        let directory = self.directory.display();
        let numbers = format!("{seed} {shards} {segments} {prepared} {clock_ms} {milliseconds}");
        (VARIABLE, format!("{numbers} {bug} {} {directory}", self.durability))
    }

    pub fn from_environment() -> Option<Self> {
        let orders = std::env::var(VARIABLE).ok()?;
        let mut words = orders.splitn(9, ' ');
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        Some(Self {
            seed: number(),
            shards: number() as usize,
            segments: number(),
            prepared: number() as u32,
            clock_ms: number(),
            milliseconds: number(),
            bug: (number() as usize).checked_sub(1).map(|bug| KnownBug::ALL[bug]),
            durability: match words.next().unwrap() {
                "none" => Durability::None,
                "process" => Durability::Process,
                "power" => Durability::Power,
                other => panic!("durability {other}"),
            },
            directory: words.next().unwrap().into(),
        })
    }

    pub fn pool_options(&self) -> PoolOptions {
        PoolOptions {
            durability: self.durability,
            segment_bytes: SEGMENT,
            capacity_bytes: self.segments * u64::from(SEGMENT),
            prepared_segments: self.prepared,
            ..PoolOptions::default()
        }
    }
}

fn say(line: &str) {
    // One write of a whole line, past the test harness; the lock keeps lines apart.
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("@{line}\n").as_bytes());
    let _ = out.flush();
}

pub fn encode_effects(effects: &[(Key, Effect)]) -> String {
    effects
        .iter()
        .map(|((database, number), effect)| match effect {
            Effect::Put { stamp, expires_at_ms } => {
                format!("{database}:{number}:{stamp}:{expires_at_ms}")
            }
            Effect::Delete => format!("{database}:{number}:-:0"),
        })
        .collect::<Vec<_>>()
        .join(" ")
}

pub fn decode_effect(word: &str) -> Option<(Key, Effect)> {
    let mut parts = word.split(':');
    let key = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let (stamp, expires) = (parts.next()?, parts.next()?);
    let effect = match stamp {
        "-" => Effect::Delete,
        stamp => Effect::Put { stamp: stamp.parse().ok()?, expires_at_ms: expires.parse().ok()? },
    };
    Some((key, effect))
}

struct World {
    store: Arc<Store>,
    shards: Shards,
    clock: Arc<ManualClock>,
    /// Held for writing by who flushes everything.
    gate: RwLock<()>,
    /// How often everything was flushed.
    flushed: AtomicU64,
    /// Numbers operations and values, from the round's seed on.
    stamps: AtomicU64,
    /// Larger than any clock said so far: said before the clock moves.
    told_ms: Mutex<u64>,
}

/// The child's entry point: does nothing in an ordinary run of the tests.
#[test]
fn child() {
    let Some(orders) = Orders::from_environment() else { return };
    let run = || run(&orders);
    match orders.bug {
        Some(bug) => with_known_bug(bug, run),
        None => run(),
    }
}

fn run(orders: &Orders) {
    let pool = Pool::open_or_create(&orders.directory, &orders.pool_options()).unwrap();
    let clock = Arc::new(ManualClock::new(orders.clock_ms));
    let options = StoreOptions {
        shards: orders.shards,
        clock: Arc::clone(&clock) as Arc<dyn Clock>,
        recovery_threads: orders.seed as usize % 3,
        ..StoreOptions::default()
    };
    let (store, shards, report) = Store::open(pool, options).unwrap();
    if report.damaged != 0 {
        say(&format!("V {report:?}"));
    }
    let observed = match actor::observe(&shards, THREADS) {
        Ok(observed) => observed,
        Err(finding) => return say(&format!("V at the start: {finding}")),
    };
    // What was seen expired is gone for good only once it is committed.
    for shard in &shards {
        shard.lock().unwrap().commit().unwrap();
    }
    let shown: Vec<_> = observed
        .iter()
        .map(|(key, stamp)| (*key, Effect::Put { stamp: *stamp, expires_at_ms: 0 }))
        .collect();
    say(&format!("O {}", encode_effects(&shown)));
    let world = World {
        store,
        shards,
        clock,
        gate: RwLock::new(()),
        flushed: AtomicU64::new(0),
        stamps: AtomicU64::new(orders.seed * 1_000_000_000),
        told_ms: Mutex::new(orders.clock_ms),
    };
    let ends = Instant::now() + Duration::from_millis(orders.milliseconds);
    std::thread::scope(|scope| {
        for database in 0..THREADS {
            let (world, observed) = (&world, &observed);
            let worker = move || {
                let mut thread = Thread::new(world, orders, database, observed);
                while Instant::now() < ends {
                    thread.group();
                }
            };
            scope.spawn(move || match orders.bug {
                Some(bug) => with_known_bug(bug, worker),
                None => worker(),
            });
        }
    });
    for finding in audit(&world.store, &world.shards) {
        say(&format!("V audit: {finding}"));
    }
    let stats = world.store.stats().total;
    say(&format!("S {} {}", stats.segments_collected, stats.entries_in_place));
}

struct Thread<'a> {
    world: &'a World,
    database: u8,
    randomness: Randomness,
    client: Client,
    /// What the keys of this thread's database hold.
    model: BTreeMap<Key, Effect>,
    /// Flushes of everything that the model knows of.
    flushed: u64,
    snapshot: PathBuf,
}

impl<'a> Thread<'a> {
    fn new(world: &'a World, orders: &Orders, database: u8, observed: &Observed) -> Self {
        let own = observed.iter().filter(|(key, _)| key.0 == database);
        // Expiries of keys from before are not known here: they may go at any time.
        let model = own
            .map(|(key, stamp)| (*key, Effect::Put { stamp: *stamp, expires_at_ms: 1 }))
            .collect();
        Self {
            world,
            database,
            randomness: Randomness::new(orders.seed * 16 + u64::from(database)),
            client: Client::new(world.shards.len()),
            model,
            flushed: 0,
            snapshot: orders.directory.with_extension(format!("snapshot-{database}")),
        }
    }

    fn key(&mut self) -> Key {
        let spread = if self.randomness.chance(1, 2) { 5 } else { KEYS };
        (self.database, self.randomness.below(u64::from(spread)) as u16)
    }

    fn owner(&self, key: Key) -> usize {
        self.world.store.shard_of(key.0, &actor::name(key))
    }

    fn effect(&mut self) -> Effect {
        if self.randomness.chance(1, 4) {
            return Effect::Delete;
        }
        let stamp = self.world.stamps.fetch_add(1, Ordering::Relaxed);
        let expires = self.randomness.chance(1, 12);
        let in_ms = 1 + self.randomness.below(2000);
        let expires_at_ms = if expires { self.world.clock.unix_ms() + in_ms } else { 0 };
        Effect::Put { stamp, expires_at_ms }
    }

    fn announce(&self, effects: &[(Key, Effect)], atomic: bool) -> u64 {
        let number = self.world.stamps.fetch_add(1, Ordering::Relaxed);
        let kind = if atomic { "I+" } else { "I" };
        say(&format!("{kind} {number} {}", encode_effects(effects)));
        number
    }

    fn applied(&mut self, effects: &[(Key, Effect)]) {
        for (key, effect) in effects {
            self.model.insert(*key, *effect);
        }
    }

    /// A few operations, committed together or one by one, and some upkeep.
    fn group(&mut self) {
        let world = self.world;
        let gate = world.gate.read().unwrap_or_else(PoisonError::into_inner);
        let flushed = world.flushed.load(Ordering::Relaxed);
        if self.flushed != flushed {
            self.model.clear();
            self.flushed = flushed;
        }
        let mut done = Vec::new();
        for _ in 0..1 + self.randomness.below(4) {
            match self.randomness.below(32) {
                0..10 => done.extend(self.single()),
                10..15 => self.batch(),
                15..22 => done.extend(self.one_sided()),
                22..25 => self.verify(),
                25 => self.scan(),
                26 if self.randomness.chance(1, 4) => self.flush(),
                27 if self.randomness.chance(1, 6) => self.snapshot(),
                28 => self.advance(),
                29 if self.randomness.chance(1, 6) => {
                    let index = self.randomness.below(world.shards.len() as u64) as usize;
                    let mut shard = world.shards[index].lock().unwrap();
                    self.client.close(&world.store, &mut shard);
                }
                _ => self.upkeep(),
            }
        }
        self.commit_all(&done);
        drop(gate);
        if self.randomness.chance(1, 600) {
            self.flush_everything();
        }
    }

    fn commit_all(&mut self, done: &[u64]) {
        for shard in &self.world.shards {
            shard.lock().unwrap().commit().unwrap();
        }
        self.client.acknowledged();
        for number in done {
            say(&format!("A {number}"));
        }
    }

    fn upkeep(&mut self) {
        let index = self.randomness.below(self.world.shards.len() as u64) as usize;
        let mut shard = self.world.shards[index].lock().unwrap();
        match shard.maintain(16 << 10) {
            Ok(_) | Err(KvError::PoolFull { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Locks the shards of `keys` and of one more, in order.
    fn with_keys<R>(&mut self, keys: &[Key], body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
        let world = self.world;
        let mut wanted: Vec<usize> = keys.iter().map(|key| self.owner(*key)).collect();
        wanted.push(self.randomness.below(world.shards.len() as u64) as usize);
        wanted.sort_unstable();
        wanted.dedup();
        let home = self.randomness.below(wanted.len() as u64) as usize;
        let mut guards: Vec<_> =
            wanted.iter().map(|index| world.shards[*index].lock().unwrap()).collect();
        body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), home))
    }

    fn single(&mut self) -> Option<u64> {
        let (key, effect) = (self.key(), self.effect());
        let length = actor::length(&mut self.randomness);
        let number = self.announce(&[(key, effect)], false);
        let owner = self.owner(key);
        let stored = {
            let mut shard = self.world.shards[owner].lock().unwrap();
            actor::store(&mut Keyspace::single(&mut shard), (key, effect), length)
        };
        self.outcome(stored, number, (key, effect))
    }

    fn outcome(
        &mut self,
        stored: Result<(), KvError>,
        number: u64,
        effect: (Key, Effect),
    ) -> Option<u64> {
        match stored {
            Ok(()) => {
                self.applied(&[effect]);
                return Some(number);
            }
            Err(KvError::PoolFull { .. }) => {
                say(&format!("F {number} {}", encode_effects(&[effect])));
                for _ in 0..4 {
                    self.upkeep();
                }
            }
            Err(error) => panic!("{error}"),
        }
        None
    }

    fn one_sided(&mut self) -> Option<u64> {
        let (key, effect) = (self.key(), self.effect());
        let length = actor::length(&mut self.randomness).min(3000);
        let number = self.announce(&[(key, effect)], false);
        let (owner, world) = (self.owner(key), self.world);
        let mut shard = world.shards[owner].lock().unwrap();
        if self.client.put(&world.store, &mut shard, (key, effect), length) {
            self.applied(&[(key, effect)]);
            return Some(number);
        }
        say(&format!("F {number} {}", encode_effects(&[(key, effect)])));
        None
    }

    fn batch(&mut self) {
        let mut members: Vec<(Key, Effect)> = Vec::new();
        for _ in 0..1 + self.randomness.below(6) {
            let (key, effect) = (self.key(), self.effect());
            if members.iter().all(|(known, _)| *known != key) {
                members.push((key, effect));
            }
        }
        let lengths: Vec<_> = members.iter().map(|_| actor::length(&mut self.randomness)).collect();
        let keys: Vec<_> = members.iter().map(|(key, _)| *key).collect();
        let number = self.announce(&members, true);
        let mut stored = Vec::new();
        self.with_keys(&keys, |keys| {
            keys.begin_batch();
            for (member, length) in members.iter().zip(lengths) {
                match actor::store(keys, *member, length) {
                    Ok(()) => stored.push(*member),
                    Err(KvError::PoolFull { .. } | KvError::BatchTooLarge { .. }) => {
                        say(&format!("F {number} {}", encode_effects(&[*member])));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            keys.end_batch();
            // What runs under several locks is committed before they are given back.
            keys.commit().unwrap();
        });
        say(&format!("A {number}"));
        self.applied(&stored);
    }

    /// A lookup that has to show what this thread wrote last.
    fn verify(&mut self) {
        let key = self.key();
        let before = self.world.clock.unix_ms();
        let shown = self.with_keys(&[key], |keys| actor::read(keys, key));
        let after = self.world.clock.unix_ms();
        let shown = match shown {
            Ok(shown) => shown,
            Err(finding) => return say(&format!("V {finding}")),
        };
        let expected = self.model.get(&key).copied().unwrap_or(Effect::Delete);
        let right = match (expected, shown) {
            (Effect::Delete, shown) => shown.is_none(),
            (Effect::Put { stamp, expires_at_ms: 0 | 1 }, Some(shown)) => stamp == shown,
            (Effect::Put { stamp, expires_at_ms }, Some(shown)) => {
                stamp == shown && expires_at_ms > before
            }
            (Effect::Put { expires_at_ms, .. }, None) => {
                expires_at_ms != 0 && expires_at_ms <= after
            }
        };
        if !right {
            say(&format!("V key {key:?} shows {shown:?} instead of {expected:?}"));
        }
    }

    /// A scan in small steps, with changes to other keys between them: a key that is not touched
    /// is met once.
    fn scan(&mut self) {
        let kept: Vec<Key> = (20..30).map(|number| (self.database, number)).collect();
        let steady: Vec<Key> = kept
            .into_iter()
            .filter(|key| matches!(self.model.get(key), Some(Effect::Put { expires_at_ms: 0, .. })))
            .collect();
        let (mut met, mut cursor) = (BTreeMap::<Vec<u8>, u32>::new(), 0);
        loop {
            let index = Keyspace::shard_of_cursor(cursor);
            let mut shard = self.world.shards[index].lock().unwrap();
            let mut keys = Keyspace::many(vec![&mut *shard], 0);
            let visit = |key: &[u8], _| *met.entry(key.to_vec()).or_default() += 1;
            cursor = keys.scan(self.database, cursor, 3, visit).unwrap();
            drop(keys);
            drop(shard);
            if cursor == 0 {
                break;
            }
            let key = (self.database, self.randomness.below(20) as u16);
            let effect = self.effect();
            let number = self.announce(&[(key, effect)], false);
            let stored = {
                let mut shard = self.world.shards[self.owner(key)].lock().unwrap();
                actor::store(&mut Keyspace::single(&mut shard), (key, effect), 40)
            };
            self.outcome(stored, number, (key, effect));
        }
        for key in steady {
            let times = met.get(&actor::name(key)).copied().unwrap_or(0);
            if times != 1 {
                say(&format!("V a scan met {key:?} {times} times"));
            }
        }
    }

    fn all_gone(&mut self, databases: std::ops::Range<u8>) -> Vec<(Key, Effect)> {
        databases
            .flat_map(|database| (0..KEYS).map(move |number| (database, number)))
            .map(|key| (key, Effect::Delete))
            .collect()
    }

    fn flush(&mut self) {
        let gone = self.all_gone(self.database..self.database + 1);
        let number = self.announce(&gone, false);
        actor::with_all(&self.world.shards, 0, |keys| keys.flush(Some(self.database))).unwrap();
        say(&format!("A {number}"));
        self.model.clear();
    }

    /// Everybody else waits, so that the order of all operations is plain.
    fn flush_everything(&mut self) {
        let world = self.world;
        let _alone = world.gate.write().unwrap_or_else(PoisonError::into_inner);
        let gone = self.all_gone(0..THREADS);
        let number = self.announce(&gone, false);
        actor::with_all(&world.shards, 0, |keys| keys.flush(None)).unwrap();
        say(&format!("A {number}"));
        // All find out when they pass the gate: their models are no longer right.
        world.flushed.fetch_add(1, Ordering::Relaxed);
    }

    fn advance(&mut self) {
        let world = self.world;
        let by = self.randomness.below(200);
        let mut told = world.told_ms.lock().unwrap();
        *told += by;
        say(&format!("C {}", *told));
        world.clock.advance(Duration::from_millis(by));
    }

    /// A snapshot of a moment shows what a look at that moment showed.
    fn snapshot(&mut self) {
        let world = self.world;
        // Nobody moves the clock while the moment is looked at.
        let told = world.told_ms.lock().unwrap();
        let begun = actor::with_all(&world.shards, 0, |keys| {
            let mut shown = Observed::new();
            for key in actor::all_keys(THREADS) {
                if let Ok(Some(stamp)) = actor::read(keys, key) {
                    shown.insert(key, stamp);
                }
            }
            (keys.begin_snapshot(), shown, world.clock.unix_ms())
        });
        drop(told);
        let (Ok(snapshot), shown, now_ms) = begun else { return };
        // Time for the others to overwrite, delete and collect.
        std::thread::sleep(Duration::from_millis(self.randomness.below(4)));
        snapshot.write(&self.snapshot).unwrap();
        let restored = restored(&self.snapshot, now_ms);
        let _ = std::fs::remove_file(&self.snapshot);
        match restored {
            Ok(restored) if restored == shown => {}
            Ok(restored) => {
                let differs = actor::all_keys(THREADS)
                    .find(|key| restored.get(key) != shown.get(key))
                    .map(|key| (key, restored.get(&key).copied(), shown.get(&key).copied()));
                say(&format!("V a snapshot differs from its moment: {differs:?}"));
            }
            Err(finding) => say(&format!("V a snapshot cannot be read: {finding}")),
        }
    }
}

fn restored(path: &Path, now_ms: u64) -> Result<Observed, String> {
    let pool = Pool::dram(&PoolOptions::volatile(SEGMENT, 256 * u64::from(SEGMENT)))
        .map_err(|error| error.to_string())?;
    let clock = Arc::new(ManualClock::new(now_ms));
    let options = StoreOptions { shards: 2, clock, ..StoreOptions::default() };
    let ((_, shards, _), _) = restore(path, pool, options).map_err(|error| error.to_string())?;
    actor::observe(&shards, THREADS)
}

/// For the parent: what the files show.
pub fn look(orders: &Orders, shards: usize) -> Result<(Observed, u64), String> {
    let pool =
        Pool::open(&orders.directory, &orders.pool_options()).map_err(|error| error.to_string())?;
    let clock = Arc::new(ManualClock::new(orders.clock_ms)) as Arc<dyn Clock>;
    let options = StoreOptions { shards, clock, recovery_threads: 1, ..StoreOptions::default() };
    let (store, shards, report) = Store::open(pool, options).map_err(|error| error.to_string())?;
    if report.damaged != 0 {
        return Err(format!("{report:?}"));
    }
    let observed = actor::observe(&shards, THREADS)?;
    let findings = audit(&store, &shards);
    if !findings.is_empty() {
        return Err(findings.join("; "));
    }
    Ok((observed, report.entries))
}
