//! A store on a simulated pool, the states it went through, and the check of one image.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use beeline_env::ManualClock;
use beeline_kv::entry::Draft;
use beeline_kv::{ClientLog, Keyspace, Notice, Opened, PutOptions, Shard, Store, StoreOptions};
use beeline_pmem::{
    CrashCounts, CrashImage, CrashLimits, Durability, Pool, PoolOptions, SimDevice,
    for_each_crash_image,
};

pub const SEGMENT: u32 = 64 << 10;

/// Key to value and version.
pub type State = BTreeMap<Vec<u8>, (Vec<u8>, u64)>;

pub struct World {
    pub device: SimDevice,
    pub store: Arc<Store>,
    pub shards: Shards,
    /// State after each step; a crash image's mark is the last acknowledged step.
    pub states: Vec<State>,
    /// Log of the one-sided client.
    pub log: Option<ClientLog>,
    options: PoolOptions,
}

pub type Shards = Vec<Arc<Mutex<Shard>>>;

/// Runs `body` over all shards at once, as a command over several keys does.
pub fn with_keys<R>(
    shards: &[Arc<Mutex<Shard>>],
    home: usize,
    body: impl FnOnce(&mut Keyspace<'_>) -> R,
) -> R {
    let mut guards: Vec<_> = shards.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), home))
}

pub fn deep() -> bool {
    std::env::var("BEELINE_DEEP").is_ok()
}

pub fn limits(points: usize, images: usize) -> CrashLimits {
    let factor = if deep() { 10 } else { 1 };
    CrashLimits {
        points: points * factor,
        images_per_point: images * factor,
        ..CrashLimits::default()
    }
}

pub fn open(pool: &Pool, shards: usize) -> Opened {
    let clock = Arc::new(ManualClock::new(1_000_000));
    let options = StoreOptions {
        shards,
        clock,
        recovery_threads: 1,
        // Where a bug was put back there may be some: the report says so.
        accept_damage: true,
        // A quarter of a segment, so that short histories come back to the same ones.
        warm_bytes: Some(SEGMENT / 4),
        ..StoreOptions::default()
    };
    Store::open(pool.clone(), options).unwrap()
}

impl World {
    pub fn new(segments: u64, lazy_words: bool) -> Self {
        let options = PoolOptions {
            durability: Durability::Power,
            segment_bytes: SEGMENT,
            capacity_bytes: segments * u64::from(SEGMENT),
            lazy_words,
            ..PoolOptions::default()
        };
        let (pool, device) = Pool::simulated(&options).unwrap();
        let (store, shards, _) = open(&pool, 1);
        device.mark(0);
        let states = vec![State::new()];
        Self { device, store, shards, states, log: None, options }
    }

    pub fn shard(&self) -> std::sync::MutexGuard<'_, Shard> {
        self.shards[0].lock().unwrap()
    }

    pub fn pool_options(&self) -> &PoolOptions {
        &self.options
    }

    fn step(&mut self, change: impl FnOnce(&mut State)) {
        let mut state = self.states.last().unwrap().clone();
        change(&mut state);
        self.states.push(state);
    }

    fn acknowledge(&self) {
        self.device.mark(self.states.len() as u64 - 1);
    }

    /// Puts without committing.
    pub fn store_put(&mut self, key: &str, value: &[u8]) {
        let options = PutOptions::default();
        let version = self.shard().put(0, key.as_bytes(), &[value], options).unwrap();
        self.step(|state| {
            state.insert(key.as_bytes().to_vec(), (value.to_vec(), version));
        });
    }

    pub fn commit(&mut self) {
        self.shard().commit().unwrap();
        self.acknowledge();
    }

    pub fn put(&mut self, key: &str, value: &[u8]) {
        self.store_put(key, value);
        self.commit();
    }

    pub fn delete(&mut self, key: &str) {
        assert!(self.shard().delete(0, key.as_bytes()).unwrap());
        self.step(|state| {
            state.remove(key.as_bytes());
        });
        self.commit();
    }

    /// Removes every key.
    pub fn flush(&mut self) {
        {
            let mut shard = self.shard();
            beeline_kv::Keyspace::single(&mut shard).flush(None).unwrap();
        }
        self.step(State::clear);
        self.acknowledge();
    }

    /// Several puts as one atomic step.
    pub fn batch(&mut self, pairs: &[(&str, Vec<u8>)]) {
        self.store_batch(pairs);
        self.commit();
    }

    /// A batch that waits for its commit.
    pub fn store_batch(&mut self, pairs: &[(&str, Vec<u8>)]) {
        let mut versions = Vec::new();
        {
            let mut shard = self.shard();
            shard.begin_batch();
            for (key, value) in pairs {
                let options = PutOptions::default();
                versions.push(shard.put(0, key.as_bytes(), &[value], options).unwrap());
            }
            shard.end_batch();
        }
        self.step(|state| {
            for ((key, value), version) in pairs.iter().zip(&versions) {
                state.insert(key.as_bytes().to_vec(), (value.clone(), *version));
            }
        });
    }

    /// A one-sided client's put at `place` (offset and slot length), or appended. Returns where.
    pub fn client_put(&mut self, key: &str, value: &[u8], place: Option<(u32, u32)>) -> (u32, u32) {
        let mut log = self.log.take().unwrap_or_else(|| self.shard().open_client_log());
        if log.segment().is_none() {
            self.shard().grant(&mut log).unwrap();
        }
        let slot_bytes = place.map_or(0, |place| place.1);
        let mut bytes = Vec::new();
        let draft = Draft { key: key.as_bytes(), value, slot_bytes, ..Draft::default() };
        let slot_bytes = draft.form(&mut bytes).unwrap();
        let offset = place.map_or(log.tail(), |place| place.0);
        // As a provider places it: in pieces.
        for (number, piece) in bytes.chunks(64).enumerate() {
            log.segment().unwrap().store(offset as usize + number * 64, piece);
        }
        let accepted = self.shard().accept(&mut log, Notice { offset }).unwrap();
        assert_eq!(accepted.in_place, place.is_some());
        self.step(|state| {
            state.insert(key.as_bytes().to_vec(), (value.to_vec(), accepted.version));
        });
        self.commit();
        self.log = Some(log);
        (offset, slot_bytes)
    }

    /// Collects until nothing is left to do.
    pub fn maintain(&mut self, budget_bytes: u64) {
        for _ in 0..200 {
            if !self.shard().maintain(budget_bytes).unwrap().did_work {
                return;
            }
        }
    }

    /// Segments freed, and segments written anew in place.
    pub fn freed(&self) -> (u64, u64) {
        let total = self.store.stats().total;
        (total.segments_collected, total.segments_recycled)
    }

    /// What the store shows.
    pub fn observe(shard: &mut Shard, keys: &[Vec<u8>]) -> Result<State, String> {
        let mut state = State::new();
        for key in keys {
            let entry = shard.lookup(0, key).map_err(|error| error.to_string())?;
            let Some(entry) = entry else { continue };
            let mut value = Vec::new();
            shard.read_value(&entry, &mut value).map_err(|error| error.to_string())?;
            state.insert(key.clone(), (value, entry.version));
        }
        if shard.len(0) != state.len() as u64 {
            return Err(format!("{} keys counted, {} found", shard.len(0), state.len()));
        }
        Ok(state)
    }

    fn keys(&self) -> Vec<Vec<u8>> {
        let mut keys: Vec<_> = self.states.iter().flat_map(|state| state.keys().cloned()).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    /// Opens the image and says what is wrong with it, if anything.
    pub fn check(&self, image: &CrashImage, keys: &[Vec<u8>]) -> Result<SimDevice, String> {
        let acknowledged = image.mark().map_or(0, |mark| mark as usize);
        let (pool, device) =
            Pool::open_image(image, &self.options).map_err(|error| error.to_string())?;
        device.mark(acknowledged as u64);
        let (store, shards, report) = open(&pool, 1);
        if report.damaged != 0 {
            return Err(format!("an image without damage is reported damaged: {report:?}"));
        }
        let seen = Self::observe(&mut shards[0].lock().unwrap(), keys)?;
        let allowed = &self.states[acknowledged..];
        // The next acknowledgement bounds how far ahead of it the image may be; any later state
        // would need entries that were not stored yet, so all of them may be compared.
        if !allowed.contains(&seen) {
            return Err(format!(
                "after step {acknowledged} was acknowledged the store shows {}",
                difference(&self.states[acknowledged], &seen)
            ));
        }
        let findings = beeline_kv::audit(&store, &shards);
        if !findings.is_empty() {
            return Err(findings.join("; "));
        }
        // Life goes on, with larger versions.
        let newest = self.states[acknowledged].values().map(|value| value.1).max().unwrap_or(0);
        let mut shard = shards[0].lock().unwrap();
        match shard.put(0, b"after the crash", &[b"x"], PutOptions::default()) {
            Ok(version) if version <= newest => {
                return Err(format!("version {version} was given out after {newest}"));
            }
            Ok(_) | Err(beeline_kv::KvError::PoolFull { .. }) => {}
            Err(error) => return Err(error.to_string()),
        }
        shard.commit().map_err(|error| error.to_string())?;
        Ok(device)
    }

    /// Checks the images of the whole history, and of the recovery of some of them. Returns what
    /// is wrong, at most a few sentences.
    pub fn violations(
        &self,
        limits: &CrashLimits,
        recoveries: usize,
    ) -> (CrashCounts, Vec<String>) {
        let keys = self.keys();
        let mut wrong = Vec::new();
        let mut nested = CrashCounts::default();
        let mut turn = 0_usize;
        let counts = for_each_crash_image(&self.device, limits, |image| {
            turn += 1;
            if wrong.len() >= 3 {
                return;
            }
            match self.check(image, &keys) {
                Err(finding) => wrong.push(format!("{finding}\n  {}", image.describe())),
                Ok(device) if recoveries > 0 && turn.is_multiple_of(recoveries) => {
                    let limits = CrashLimits { points: 6, images_per_point: 6, ..*limits };
                    let inner = for_each_crash_image(&device, &limits, |image| {
                        // The put after the crash is not among the states: stop before it counts.
                        if let Err(finding) = self.check_again(image, &keys) {
                            wrong.push(format!("crash of recovery: {finding}"));
                        }
                    });
                    nested.points += inner.points;
                    nested.images += inner.images;
                }
                Ok(_) => {}
            }
        });
        println!("{counts}; during recovery: {} images at {} points", nested.images, nested.points);
        (counts, wrong)
    }

    /// As `check`, for an image taken while an earlier check's recovery ran.
    fn check_again(&self, image: &CrashImage, keys: &[Vec<u8>]) -> Result<(), String> {
        let acknowledged = image.mark().map_or(0, |mark| mark as usize);
        let (pool, _) =
            Pool::open_image(image, &self.options).map_err(|error| error.to_string())?;
        let (_, shards, _) = open(&pool, 1);
        let mut shard = shards[0].lock().unwrap();
        let _ = shard.delete(0, b"after the crash");
        let seen = Self::observe(&mut shard, keys)?;
        if self.states[acknowledged..].contains(&seen) {
            Ok(())
        } else {
            Err(difference(&self.states[acknowledged], &seen))
        }
    }

    pub fn assert_survives(&self, name: &str, limits: &CrashLimits, recoveries: usize) {
        print!("{name}: ");
        let (counts, wrong) = self.violations(limits, recoveries);
        assert!(counts.images > 10, "{name}: nothing was enumerated");
        assert!(wrong.is_empty(), "{name}: {}", wrong.join("\n"));
    }
}

fn difference(expected: &State, seen: &State) -> String {
    let show = |value: Option<&(Vec<u8>, u64)>| match value {
        None => "nothing".to_owned(),
        Some((value, version)) => format!("version {version} ({} bytes)", value.len()),
    };
    let mut keys: Vec<_> = expected.keys().chain(seen.keys()).collect();
    keys.sort();
    keys.dedup();
    keys.iter()
        .filter(|key| expected.get(**key) != seen.get(**key))
        .map(|key| {
            let name = String::from_utf8_lossy(key);
            format!("{name}: {} instead of {}", show(seen.get(*key)), show(expected.get(*key)))
        })
        .collect::<Vec<_>>()
        .join(", ")
}
