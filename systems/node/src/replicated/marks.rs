//! How far each shard has applied the log beyond the position that is recorded for all of them.
//!
//! ```text
//! "marks"                    →  epoch u64 | shards u32           what the marks below mean
//! "mark:" name in its shard  →  epoch u64 | position u64 | index u32   in the batch of that shard's effects
//! "mark"                     →  the same, of a unit that was applied alone: of every shard
//! ```
//!
//! The log's thread records position, lanes' turns and the log's time at the end of a run, in one batch. A crash before
//! that leaves some of the run's effects: of each shard, everything up to its mark and nothing beyond. The log
//! brings the whole run again, and what lies up to the mark of its shard is skipped. Which shard a request belonged
//! to is decided as it was then, also where the store was opened with another number of shards since.
//!
//! An epoch ends where marks lose their meaning: with another number of shards, and where a log is founded upon
//! the store. Marks of another epoch count for nothing.

use beeline_kv::{Keyspace, KvError, Store, hash_key, shard_of_hash};
use beeline_resp::{Logged, Placement, Route};

use super::pair;

const MEANING: &[u8] = b"marks";
const OF_ALL: &[u8] = b"mark";
const PREFIX: &[u8] = b"mark:";

/// Where a unit stands in the log: in the entry at this position, and which one of the keys' units there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub position: u64,
    pub index: u32,
}

/// What earlier runs of the member left beyond the recorded position.
#[derive(Debug)]
pub(crate) struct Left {
    /// Of the shards there were.
    each: Vec<Place>,
    /// Every shard is as far as this.
    all: Place,
    /// No shard is further.
    pub end: Place,
    seed: u64,
}

/// Where keys lay in a store with so many shards.
struct Former {
    seed: u64,
    shards: usize,
}

impl Placement for Former {
    fn shard_of(&self, database: u8, key: &[u8]) -> usize {
        shard_of_hash(hash_key(self.seed, database, key), self.shards)
    }

    fn shard_of_cursor(&self, _cursor: u64) -> usize {
        0
    }
}

impl Left {
    /// Whether all of a unit took effect, as that of a unit behind it tells which was applied alone.
    pub(crate) fn has_all_of(&self, place: Place) -> bool {
        place <= self.all
    }

    /// Whether this request of a unit took effect.
    pub(crate) fn has(&self, place: Place, request: &[u8], logged: &mut Logged) -> bool {
        let former = Former { seed: self.seed, shards: self.each.len() };
        let route = match pair::decode(request) {
            Some(write) => Route::Shard(former.shard_of(write.database, write.key)),
            None if logged.read(request) => {
                logged.reach(&former).map_or(Route::All, |reach| reach.route)
            }
            None => Route::Here,
        };
        match route {
            Route::Shard(shard) => place <= self.each[shard].max(self.all),
            // Applied alone, or without any effect.
            _ => place <= self.all,
        }
    }
}

/// What the marks of this run look like.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    epoch: u64,
    /// One for each shard.
    names: Vec<Vec<u8>>,
}

fn decode(bytes: &[u8], epoch: u64) -> Option<Place> {
    let (written, rest) = bytes.split_first_chunk::<8>()?;
    let (position, rest) = rest.split_first_chunk::<8>()?;
    let index = u32::from_le_bytes(rest.try_into().ok()?);
    let place = Place { position: u64::from_le_bytes(*position), index };
    (u64::from_le_bytes(*written) == epoch).then_some(place)
}

fn names(store: &Store, shards: usize) -> Vec<Vec<u8>> {
    (0..shards).map(|shard| store.system_key_in(PREFIX, shard, shards)).collect()
}

impl Marks {
    /// Reads the marks beyond `recorded`, and has those of this run mean what they say. `keyspace` is whole, and not
    /// committed.
    ///
    /// Errors: the store's.
    pub(crate) fn open(
        keyspace: &mut Keyspace<'_>,
        recorded: u64,
    ) -> Result<(Self, Option<Left>), KvError> {
        let (store, mut found) = (keyspace.store().clone(), Vec::new());
        let known = keyspace.system(MEANING, &mut found)?;
        let meaning = found.split_first_chunk::<8>().filter(|_| known);
        let meaning = meaning.and_then(|(epoch, shards)| {
            let shards = u32::from_le_bytes(shards.try_into().ok()?);
            Some((u64::from_le_bytes(*epoch), shards as usize))
        });
        let (epoch, shards) = meaning.unwrap_or_default();
        let former = names(&store, shards);
        let mut place_of = |name: &[u8]| -> Result<Place, KvError> {
            found.clear();
            let known = keyspace.system(name, &mut found)?;
            Ok(decode(&found, epoch).filter(|_| known).unwrap_or_default())
        };
        let all = place_of(OF_ALL)?;
        let each = former.iter().map(|name| place_of(name)).collect::<Result<Vec<_>, _>>()?;
        let end = each.iter().copied().max().unwrap_or_default().max(all);
        let marks = Self { epoch, names: former };
        if end.position > recorded {
            return Ok((marks, Some(Left { each, all, end, seed: store.hash_seed() })));
        }
        let mut marks = marks;
        if shards != store.shards() {
            marks.begin_epoch(keyspace)?;
        }
        Ok((marks, None))
    }

    /// What was written before counts for nothing from now on. The caller commits before it writes another mark.
    ///
    /// Errors: the store's.
    pub(crate) fn begin_epoch(&mut self, keyspace: &mut Keyspace<'_>) -> Result<(), KvError> {
        let store = keyspace.store().clone();
        let shards = store.shards();
        let epoch = self.epoch + 1;
        let meaning = [&epoch.to_le_bytes()[..], &(shards as u32).to_le_bytes()].concat();
        keyspace.put_system(MEANING, &meaning)?;
        *self = Self { epoch, names: names(&store, shards) };
        Ok(())
    }

    /// Whether marks are about as many shards as there are.
    pub(crate) fn are_of(&self, shards: usize) -> bool {
        self.names.len() == shards
    }

    fn encode(&self, place: Place) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&place.position.to_le_bytes());
        bytes[16..].copy_from_slice(&place.index.to_le_bytes());
        bytes
    }

    /// Notes in the open batch that it takes every shard as far as `place`.
    ///
    /// Errors: the store's.
    pub(crate) fn put_all(&self, keyspace: &mut Keyspace<'_>, place: Place) -> Result<(), KvError> {
        keyspace.put_system(OF_ALL, &self.encode(place))
    }

    /// The entry of that kind for one shard: its name and its value.
    pub(crate) fn of_shard(&self, shard: usize, place: Place) -> (&[u8], [u8; 20]) {
        (&self.names[shard], self.encode(place))
    }
}
