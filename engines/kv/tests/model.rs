//! Random operations against a plain map, with collection, expiry, batches, one-sided clients and
//! reopening, in a pool that is nearly full all the time.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use beeline_env::ManualClock;
use beeline_kv::entry::Draft;
use beeline_kv::{ClientLog, Keyspace, KvError, Notice, PutOptions, Shard, Store, StoreOptions};
use beeline_pmem::{Pool, PoolOptions};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Operation {
    Put { database: u8, key: u8, length: u16, expires_in: u16 },
    Delete { database: u8, key: u8 },
    Get { database: u8, key: u8 },
    Batch { database: u8, keys: Vec<u8>, length: u16 },
    Client { key: u8, length: u16, in_place: bool },
    Regrant,
    Flush { database: Option<u8> },
    Advance(u16),
    Jump(i16),
    Maintain,
    Reopen,
}

fn operation() -> impl Strategy<Value = Operation> {
    let key = 0..24_u8;
    let database = 0..3_u8;
    prop_oneof![
        12 => (database.clone(), key.clone(), 0..2500_u16, prop_oneof![4 => Just(0), 1 => 1..900_u16])
            .prop_map(|(database, key, length, expires_in)| Operation::Put { database, key, length, expires_in }),
        4 => (database.clone(), key.clone()).prop_map(|(database, key)| Operation::Delete { database, key }),
        3 => (database.clone(), key.clone()).prop_map(|(database, key)| Operation::Get { database, key }),
        2 => (database.clone(), prop::collection::vec(key.clone(), 1..9), 0..1500_u16)
            .prop_map(|(database, keys, length)| Operation::Batch { database, keys, length }),
        16 => (0..6_u8, 0..700_u16, prop::bool::weighted(0.8))
            .prop_map(|(key, length, in_place)| Operation::Client { key, length, in_place }),
        1 => Just(Operation::Regrant),
        1 => prop_oneof![Just(None), database.prop_map(Some)].prop_map(|database| Operation::Flush { database }),
        2 => (0..400_u16).prop_map(Operation::Advance),
        1 => (-300..300_i16).prop_map(Operation::Jump),
        3 => Just(Operation::Maintain),
        1 => Just(Operation::Reopen),
    ]
}

type Model = BTreeMap<(u8, Vec<u8>), (Vec<u8>, u64)>;

/// A client that uses the mixed update: per shard a log, and per key the last two slots.
#[derive(Default)]
struct Client {
    logs: Vec<Option<ClientLog>>,
    copies: BTreeMap<Vec<u8>, Vec<(u32, u32)>>,
}

struct World {
    pool: Pool,
    clock: Arc<ManualClock>,
    store: Arc<Store>,
    shards: Vec<Arc<Mutex<Shard>>>,
    client: Client,
    model: Model,
    stamp: u64,
    count: usize,
}

fn key_bytes(key: u8) -> Vec<u8> {
    let mut bytes = format!("key-{key}").into_bytes();
    bytes.resize(6 + usize::from(key) * 5, b'.');
    bytes
}

impl World {
    fn new(count: usize) -> Self {
        let pool = {
            // Nearly full all the time; or with room, so that segments are written anew in place.
            let segments = if count.is_multiple_of(2) { 14 } else { 40 };
            let options = PoolOptions::volatile(64 << 10, segments * (64 << 10));
            Pool::dram(&options).unwrap()
        };
        let clock = Arc::new(ManualClock::new(1_000_000));
        let (store, shards) = Self::open(&pool, &clock, count);
        let client = Client { logs: (0..count).map(|_| None).collect(), ..Client::default() };
        let model = Model::new();
        Self { pool, clock, store, shards, client, model, stamp: 0, count }
    }

    fn open(
        pool: &Pool,
        clock: &Arc<ManualClock>,
        shards: usize,
    ) -> (Arc<Store>, Vec<Arc<Mutex<Shard>>>) {
        let clock = clock.clone();
        let warm_bytes = Some(12 << 10);
        let options = StoreOptions { shards, clock, warm_bytes, ..StoreOptions::default() };
        let (store, shards, report) = Store::open(pool.clone(), options).unwrap();
        assert_eq!(report.damaged, 0, "{report:?}");
        assert_eq!(report.torn, 0, "{report:?}");
        (store, shards)
    }

    fn now(&self) -> u64 {
        use beeline_env::Clock;
        self.clock.unix_ms()
    }

    fn value(&mut self, length: u16) -> Vec<u8> {
        self.stamp += 1;
        let mut value = self.stamp.to_le_bytes().to_vec();
        value.resize(8 + usize::from(length), self.stamp as u8);
        value
    }

    fn with_keys<R>(&mut self, home: usize, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
        let mut guards: Vec<MutexGuard<'_, Shard>> =
            self.shards.iter().map(|shard| shard.lock().unwrap()).collect();
        let all = guards.iter_mut().map(|guard| &mut **guard).collect();
        let mut keys = Keyspace::many(all, home);
        body(&mut keys)
    }

    fn expire_model(&mut self) {
        let now = self.now();
        self.model.retain(|_, (_, at)| *at == 0 || *at > now);
    }

    fn get(&mut self, database: u8, key: &[u8]) -> Option<(Vec<u8>, u64)> {
        self.with_keys(0, |keys| {
            let entry = keys.lookup(database, key).unwrap()?;
            let mut value = Vec::new();
            keys.read_value(&entry, &mut value).unwrap();
            Some((value, entry.expires_at_ms))
        })
    }

    fn compare_all(&mut self) {
        self.expire_model();
        for database in 0..3 {
            for key in 0..24 {
                let key = key_bytes(key);
                let expected = self.model.get(&(database, key.clone())).cloned();
                let found = self.get(database, &key);
                assert_eq!(found, expected, "database {database}, key {key:?}");
            }
            let (mut met, mut cursor) = (Vec::new(), 0);
            loop {
                cursor = self.with_keys(0, |keys| {
                    keys.scan(database, cursor, 5, |key, _| met.push(key.to_vec())).unwrap()
                });
                if cursor == 0 {
                    break;
                }
            }
            met.sort();
            let expected: Vec<_> = self
                .model
                .keys()
                .filter(|key| key.0 == database)
                .map(|key| key.1.clone())
                .collect();
            assert_eq!(met, expected);
        }
        let findings = beeline_kv::audit(&self.store, &self.shards);
        assert!(findings.is_empty(), "{findings:#?}");
    }

    fn client_put(&mut self, key: &[u8], value: &[u8], in_place: bool) {
        let index = self.store.shard_of(0, key);
        let shard = Arc::clone(&self.shards[index]);
        let mut shard = shard.lock().unwrap();
        let mut log = self.client.logs[index].take().unwrap_or_else(|| shard.open_client_log());
        let copies = self.client.copies.entry(key.to_vec()).or_default().clone();
        let mut bytes = Vec::new();
        let mut place = None;
        if in_place && copies.len() == 2 && log.segment().is_some() {
            let (offset, slot_bytes) = copies[0];
            let draft = Draft { key, value, slot_bytes, ..Draft::default() };
            if draft.form(&mut bytes).is_ok() {
                place = Some((offset, slot_bytes));
            }
        }
        let (offset, slot_bytes) = match place {
            Some(place) => place,
            None => {
                bytes.clear();
                let slot_bytes = Draft { key, value, ..Draft::default() }.form(&mut bytes).unwrap();
                let room =
                    log.segment().map_or(0, |segment| segment.length_bytes() as u32 - log.tail());
                if room < slot_bytes {
                    match shard.grant(&mut log) {
                        Ok(_) => self.forget_copies(index),
                        Err(KvError::PoolFull { .. }) => {
                            self.client.logs[index] = Some(log);
                            return;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                (log.tail(), slot_bytes)
            }
        };
        log.segment().unwrap().store(offset as usize, &bytes);
        let accepted = shard.accept(&mut log, Notice { offset }).unwrap();
        assert_eq!(accepted.in_place, place.is_some());
        shard.commit().unwrap();
        self.client.logs[index] = Some(log);
        let copies = self.client.copies.entry(key.to_vec()).or_default();
        if copies.len() == 2 {
            copies.remove(0);
        }
        copies.push((offset, slot_bytes));
        self.model.insert((0, key.to_vec()), (value.to_vec(), 0));
    }

    fn forget_copies(&mut self, shard: usize) {
        let store = Arc::clone(&self.store);
        self.client.copies.retain(|key, _| store.shard_of(0, key) != shard);
    }

    fn run(&mut self, operation: &Operation) {
        self.expire_model();
        match operation {
            Operation::Put { database, key, length, expires_in } => {
                let (key, value) = (key_bytes(*key), self.value(*length));
                let expires_at_ms =
                    if *expires_in == 0 { 0 } else { self.now() + u64::from(*expires_in) };
                let options = PutOptions { expires_at_ms, ..PutOptions::default() };
                let home = self.stamp as usize % self.count;
                let outcome = self.with_keys(home, |keys| {
                    let outcome = keys.put(*database, &key, &[&value], options);
                    keys.commit().unwrap();
                    outcome
                });
                match outcome {
                    Ok(_) => {
                        self.model.insert((*database, key), (value, expires_at_ms));
                    }
                    Err(KvError::PoolFull { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Operation::Delete { database, key } => {
                let key = key_bytes(*key);
                let expected = self.model.remove(&(*database, key.clone())).is_some();
                let deleted = self.with_keys(0, |keys| {
                    let deleted = keys.delete(*database, &key).unwrap();
                    keys.commit().unwrap();
                    deleted
                });
                assert_eq!(deleted, expected);
            }
            Operation::Get { database, key } => {
                let key = key_bytes(*key);
                let expected = self.model.get(&(*database, key.clone())).cloned();
                assert_eq!(self.get(*database, &key), expected);
            }
            Operation::Batch { database, keys: numbers, length } => {
                let values: Vec<_> = numbers.iter().map(|_| self.value(*length)).collect();
                let home = self.stamp as usize % self.count;
                let stored = self.with_keys(home, |keys| {
                    keys.begin_batch();
                    let mut stored = Vec::new();
                    for (number, value) in numbers.iter().zip(&values) {
                        let key = key_bytes(*number);
                        match keys.put(*database, &key, &[value], PutOptions::default()) {
                            Ok(_) => stored.push((key, value.clone())),
                            Err(KvError::PoolFull { .. }) => break,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    keys.end_batch();
                    keys.commit().unwrap();
                    stored
                });
                for (key, value) in stored {
                    self.model.insert((*database, key), (value, 0));
                }
            }
            Operation::Client { key, length, in_place } => {
                let (key, value) = (key_bytes(*key), self.value(*length));
                self.client_put(&key, &value, *in_place);
            }
            Operation::Regrant => {
                for index in 0..self.count {
                    if let Some(log) = self.client.logs[index].take() {
                        self.shards[index].lock().unwrap().close_client_log(log);
                        self.forget_copies(index);
                    }
                }
            }
            Operation::Flush { database } => {
                let database = *database;
                self.with_keys(0, |keys| keys.flush(database).unwrap());
                self.model.retain(|key, _| database.is_some_and(|database| key.0 != database));
            }
            Operation::Advance(ms) => {
                self.clock.advance(std::time::Duration::from_millis(u64::from(*ms)));
            }
            // Going back must not revive what was seen expired: look at everything first.
            Operation::Jump(ms) => {
                self.compare_all();
                self.clock.jump_unix_ms(i64::from(*ms));
                self.expire_model();
            }
            Operation::Maintain => {
                for shard in &self.shards {
                    for _ in 0..4 {
                        shard.lock().unwrap().maintain(16 << 10).unwrap();
                    }
                }
            }
            Operation::Reopen => {
                self.compare_all();
                self.client =
                    Client { logs: (0..self.count).map(|_| None).collect(), ..Client::default() };
                self.shards.clear();
                let (store, shards) = Self::open(&self.pool, &self.clock, self.count);
                (self.store, self.shards) = (store, shards);
                self.compare_all();
            }
        }
    }
}

fn cases() -> u32 {
    if std::env::var("BEELINE_DEEP").is_ok() { 1000 } else { 25 }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(), failure_persistence: None, max_shrink_iters: 1500, ..ProptestConfig::default()
    })]
    #[test]
    fn the_store_agrees_with_a_map(
        shards in 1..4_usize,
        operations in prop::collection::vec(operation(), 200..1200),
    ) {
        let mut world = World::new(shards);
        for operation in &operations {
            world.run(operation);
        }
        world.run(&Operation::Reopen);
    }
}
