//! What both stress suites do to a store: operations on keys of one writer, with values that name
//! themselves, and a one-sided client that keeps the rules.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use beeline_env::Randomness;
use beeline_kv::entry::Draft;
use beeline_kv::{ClientLog, Keyspace, KvError, Notice, PutOptions, Shard, Store};

use crate::ledger::{Effect, Key, Observed};

pub const SEGMENT: u32 = 64 << 10;
pub const KEYS: u16 = 40;

pub type Shards = Vec<Arc<Mutex<Shard>>>;

/// Every key of the first `databases` databases.
pub fn all_keys(databases: u8) -> impl Iterator<Item = Key> {
    (0..databases).flat_map(|database| (0..KEYS).map(move |number| (database, number)))
}

pub fn name(key: Key) -> Vec<u8> {
    let mut name = format!("key-{}", key.1).into_bytes();
    name.resize(5 + usize::from(key.1 % 13) * 9, b'.');
    name
}

/// A value that names its stamp in every eighth byte, so that a mixture of two shows.
pub fn value(stamp: u64, length: usize) -> Vec<u8> {
    let mut value: Vec<u8> =
        stamp.to_le_bytes().into_iter().cycle().take(8 + length / 8 * 8).collect();
    value[..8].copy_from_slice(&stamp.to_le_bytes());
    value
}

/// The stamp of a value; none when it is not one value from end to end.
pub fn stamp_of(value: &[u8]) -> Option<u64> {
    let (first, _) = value.split_first_chunk::<8>()?;
    let same = value.len().is_multiple_of(8) && value.chunks(8).all(|chunk| chunk == first);
    same.then(|| u64::from_le_bytes(*first))
}

pub fn lock_all(shards: &Shards) -> Vec<MutexGuard<'_, Shard>> {
    shards.iter().map(|shard| shard.lock().unwrap()).collect()
}

pub fn with_all<R>(shards: &Shards, home: usize, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let mut guards = lock_all(shards);
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), home))
}

pub fn read(keys: &mut Keyspace<'_>, key: Key) -> Result<Option<u64>, String> {
    let entry = keys.lookup(key.0, &name(key)).map_err(|error| error.to_string())?;
    let Some(entry) = entry else { return Ok(None) };
    let mut value = Vec::new();
    keys.read_value(&entry, &mut value).map_err(|error| format!("{key:?}: {error}"))?;
    match stamp_of(&value) {
        Some(stamp) => Ok(Some(stamp)),
        None => Err(format!("{key:?} holds a mixture of {} bytes", value.len())),
    }
}

/// What the store shows, by lookup and by scan, which have to agree.
pub fn observe(shards: &Shards, databases: u8) -> Result<Observed, String> {
    with_all(shards, 0, |keys| {
        let mut observed = Observed::new();
        for key in all_keys(databases) {
            if let Some(stamp) = read(keys, key)? {
                observed.insert(key, stamp);
            }
        }
        for database in 0..databases {
            let (mut met, mut cursor) = (Vec::new(), 0);
            loop {
                let next = keys.scan(database, cursor, 5, |key, _| met.push(key.to_vec()));
                cursor = next.map_err(|error| error.to_string())?;
                if cursor == 0 {
                    break;
                }
            }
            met.sort();
            let mut expected: Vec<_> =
                observed.keys().filter(|key| key.0 == database).map(|key| name(*key)).collect();
            expected.sort();
            if met != expected {
                let (met, expected) = (met.len(), expected.len());
                return Err(format!("a scan of {database} meets {met} keys, lookups {expected}"));
            }
            // Keys past their time stay counted where not even their tombstone fits.
            let pool = keys.store().pool();
            let free = pool.capacity_bytes() - pool.used_bytes();
            let full = free <= (keys.store().shards() as u64 + 1) * u64::from(SEGMENT);
            let (counted, found) = (keys.len(database), expected.len() as u64);
            if counted < found || (counted > found && !full) {
                return Err(format!("database {database} counts {counted} keys, has {found}"));
            }
        }
        Ok(observed)
    })
}

/// A length that now and then fills a good part of a segment.
pub fn length(randomness: &mut Randomness) -> usize {
    match randomness.below(20) {
        0..8 => randomness.below(60) as usize,
        8..14 => randomness.below(900) as usize,
        14..19 => randomness.below(6000) as usize,
        _ => randomness.below(20_000) as usize,
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    offset: u32,
    slot_bytes: u32,
    version: u64,
    acknowledged: bool,
}

#[derive(Debug)]
struct Pair {
    first: Slot,
    second: Option<Slot>,
    smallest_read: u64,
}

/// One-sided logs of one client, one per shard, with the mixed update as an honest client does it:
/// nothing is overwritten before its successor was acknowledged.
#[derive(Debug)]
pub struct Client {
    logs: Vec<Option<ClientLog>>,
    pairs: BTreeMap<Key, Pair>,
}

impl Client {
    pub fn new(shards: usize) -> Self {
        Self { logs: (0..shards).map(|_| None).collect(), pairs: BTreeMap::new() }
    }

    /// Closes the log of one shard.
    pub fn close(&mut self, store: &Store, shard: &mut Shard) {
        if let Some(log) = self.logs[shard.index()].take() {
            shard.close_client_log(log);
            self.forget(store, shard.index());
        }
    }

    fn forget(&mut self, store: &Store, index: usize) {
        self.pairs.retain(|key, _| store.shard_of(key.0, &name(*key)) != index);
    }

    /// Writes and announces an entry; the caller holds the owner's shard. True when it was
    /// accepted. Nothing is acknowledged before the next commit: until [`Client::acknowledged`].
    pub fn put(
        &mut self,
        store: &Store,
        shard: &mut Shard,
        (key, effect): (Key, Effect),
        length: usize,
    ) -> bool {
        let index = shard.index();
        let mut log = self.logs[index].take().unwrap_or_else(|| shard.open_client_log());
        let name = name(key);
        let (bytes_of_value, expires_at_ms, tombstone) = match effect {
            Effect::Put { stamp, expires_at_ms } => (value(stamp, length), expires_at_ms, false),
            Effect::Delete => (Vec::new(), 0, true),
        };
        let mut draft = Draft {
            database: key.0,
            key: &name,
            value: &bytes_of_value,
            expires_at_ms,
            tombstone,
            ..Draft::default()
        };
        let needed = beeline_kv::entry::slot_bytes_for(name.len(), bytes_of_value.len()) as u32;
        let overwritable = self.pairs.get(&key).and_then(|pair| {
            pair.second.filter(|second| {
                second.acknowledged
                    && pair.first.acknowledged
                    && pair.smallest_read > second.version
                    && needed <= second.slot_bytes
            })
        });
        if overwritable.is_none() && (log.segment().is_none() || log.tail() + needed > SEGMENT) {
            self.forget(store, index);
            match shard.grant(&mut log) {
                Ok(_) => {}
                Err(KvError::PoolFull { .. }) => {
                    self.logs[index] = Some(log);
                    return false;
                }
                Err(error) => panic!("{error}"),
            }
        }
        draft.slot_bytes = overwritable.map_or(0, |slot| slot.slot_bytes);
        let mut bytes = Vec::new();
        let slot_bytes = draft.form(&mut bytes).unwrap();
        let offset = overwritable.map_or(log.tail(), |slot| slot.offset);
        // As a provider places it: in pieces.
        for (number, piece) in bytes.chunks(64).enumerate() {
            log.segment().unwrap().store(offset as usize + number * 64, piece);
        }
        let outcome = shard.accept(&mut log, Notice { offset });
        self.logs[index] = Some(log);
        let Ok(accepted) = outcome else {
            // What lay there is spoilt and stale; an honest client appends from now on.
            self.pairs.remove(&key);
            return false;
        };
        assert_eq!(accepted.in_place, overwritable.is_some());
        let version = accepted.version;
        let first = Slot { offset, slot_bytes, version, acknowledged: false };
        let smallest_read = accepted.smallest_version_read.unwrap_or(u64::MAX);
        let second = self.pairs.remove(&key).map(|pair| pair.first);
        self.pairs.insert(key, Pair { first, second, smallest_read });
        true
    }

    /// Everything put so far was committed.
    pub fn acknowledged(&mut self) {
        for pair in self.pairs.values_mut() {
            pair.first.acknowledged = true;
            if let Some(second) = &mut pair.second {
                second.acknowledged = true;
            }
        }
    }
}

/// Stores one effect through a keyspace.
pub fn store(
    keys: &mut Keyspace<'_>,
    (key, effect): (Key, Effect),
    length: usize,
) -> Result<(), KvError> {
    match effect {
        Effect::Put { stamp, expires_at_ms } => {
            let options = PutOptions { kind: 0, expires_at_ms };
            keys.put(key.0, &name(key), &[&value(stamp, length)], options).map(|_| ())
        }
        Effect::Delete => keys.delete(key.0, &name(key)).map(|_| ()),
    }
}
