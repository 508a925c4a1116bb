//! What a store needs to be one of several that apply the same commands.
//!
//! Beside the clients' keys lie a few entries that no client can name and no flush reaches: how far
//! the commands were applied. They go into the batches of the commands' effects, so that after a
//! crash they tell exactly what is there; and into snapshots.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use beeline_wire::checksum::crc32c_append;

use crate::ended::Ended;
use crate::placement::{hash_in, shard_of_hash};
use crate::rows::{agreed_from, agreed_key};
use crate::shard::{PutOptions, Shard};
use crate::snapshot::{SnapshotReport, check_snapshot, read_file};
use crate::store::Store;
use crate::{Keyspace, KvError, SYSTEM_NAMESPACE};

/// Records between two commits.
const RECORDS_PER_COMMIT: u32 = 1024;

/// What a keyspace's writes changed, in one word: the same at every replica that changed the same.
/// Generations and positions of rows' fields are a store's own and count for nothing; nor does the
/// order of writes, because fields are visited in the order of positions.
#[derive(Debug, Default)]
pub(crate) struct Effects(Option<u64>);

impl Effects {
    /// True where somebody asked for them.
    pub fn are_watched(&self) -> bool {
        self.0.is_some()
    }

    /// A key got this value.
    pub fn put(&mut self, namespace: u32, key: &[u8], value: &[&[u8]], options: PutOptions) {
        let Some(sum) = &mut self.0 else { return };
        if crate::expiries::is_expiries(namespace) || namespace == crate::row_ends::ROW_ENDS {
            // Told of the value that it stands beside, and of the row that ended.
            return;
        }
        let mut check = check_of(namespace, key);
        let mut skipped = agreed_from(namespace, options.kind);
        for part in value {
            let (_, agreed) = part.split_at(skipped.min(part.len()));
            skipped -= part.len() - agreed.len();
            check = crc32c_append(check, agreed);
        }
        let head = u64::from(namespace) << 8 | u64::from(options.kind);
        *sum = sum.wrapping_add(mixed([u64::from(check), head, options.expires_at_ms]));
    }

    /// A stream got this entry.
    pub fn append(&mut self, namespace: u32, stream: &[u8], position: u64, value: &[&[u8]]) {
        let Some(sum) = &mut self.0 else { return };
        let check = check_of(namespace, stream);
        let check = value.iter().fold(check, |check, part| crc32c_append(check, part));
        *sum = sum.wrapping_add(mixed([u64::from(check), u64::from(namespace), position]));
    }

    /// A stream was cut off in front.
    pub fn truncate(&mut self, namespace: u32, stream: &[u8], first: u64) {
        let Some(sum) = &mut self.0 else { return };
        let check = u64::from(check_of(namespace, stream));
        *sum = sum.wrapping_add(mixed([check, u64::from(namespace) | 1 << 40, first]));
    }

    /// A row ended.
    pub fn delete_row(&mut self, namespace: u32, row: &[u8]) {
        let Some(sum) = &mut self.0 else { return };
        let check = u64::from(check_of(namespace, row));
        *sum = sum.wrapping_add(mixed([check, u64::from(namespace) | 1 << 41, u64::MAX]));
    }

    /// A key that was there was deleted.
    pub fn delete(&mut self, namespace: u32, key: &[u8]) {
        let Some(sum) = &mut self.0 else { return };
        let check = u64::from(check_of(namespace, key));
        *sum = sum.wrapping_add(mixed([check, u64::from(namespace), u64::MAX]));
    }
}

fn check_of(namespace: u32, key: &[u8]) -> u32 {
    agreed_key(namespace, key).into_iter().fold(0, crc32c_append)
}

fn mixed(words: [u64; 3]) -> u64 {
    words.into_iter().fold(0, |digest: u64, word| {
        (digest.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    })
}

impl Keyspace<'_> {
    /// From now on [`Keyspace::effects`] tells what writes change.
    pub fn watch_effects(&mut self) {
        self.effects = Effects(Some(0));
    }

    /// What was written since [`Keyspace::watch_effects`], in one word: the same at every replica
    /// that wrote the same. Only a keyspace of several shards tells.
    #[must_use]
    pub fn effects(&self) -> u64 {
        self.effects.0.unwrap_or_default()
    }

    /// Something changed that had its effect told by an entry once, and is one no more.
    pub(crate) fn note_effect(
        &mut self,
        namespace: u32,
        key: &[u8],
        value: &[&[u8]],
        options: PutOptions,
    ) {
        if self.joins_several() {
            self.effects.put(namespace, key, value, options);
        }
    }

    /// The locked shards apply what all replicas agree on at this time, Unix milliseconds, and will see no earlier
    /// one: what [`crate::StoreOptions::agreed_ms`] says of all shards is true of these already.
    pub fn agree_until(&mut self, unix_ms: u64) {
        self.shards_mut().for_each(|shard| shard.agreed_ms = shard.agreed_ms.max(unix_ms));
    }

    /// Stores an entry that no client can name; within a batch, as a part of it. The shard of the
    /// key has to be locked.
    ///
    /// Errors: as [`Keyspace::put`].
    pub fn put_system(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let hash = self.store().place(SYSTEM_NAMESPACE, key);
        let (home, _) = self.home_and_owner(hash)?;
        home.check_writable()?;
        let options = PutOptions::default();
        let appended = home.append_put(SYSTEM_NAMESPACE, hash, key, &[value], options);
        // Also where it failed: room may have been made by moving the batch.
        self.spread_moves();
        let appended = appended?;
        let (owner, home) = (self.store().owner_of(hash), self.home().index());
        let shard = self.shard(owner)?;
        shard.install(SYSTEM_NAMESPACE, hash, key, &appended);
        if owner != home {
            shard.lean(true);
        }
        Ok(())
    }

    /// Deletes such an entry; false when there was none.
    ///
    /// Errors: as [`Keyspace::delete`].
    pub fn delete_system(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.delete_at(SYSTEM_NAMESPACE, key)
    }

    /// Puts the value of such an entry into `out`; `false`: there is none.
    ///
    /// Errors: [`KvError::WrongShard`], [`KvError::Damaged`].
    pub fn system(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool, KvError> {
        let hash = self.store().place(SYSTEM_NAMESPACE, key);
        let owner = self.store().owner_of(hash);
        match self.shard(owner)?.lookup_hashed(SYSTEM_NAMESPACE, hash, key) {
            Some(entry) => self.read_value(&entry, out).map(|()| true),
            None => Ok(false),
        }
    }
}

impl Store {
    /// A name, beginning with `prefix`, for an entry of [`Keyspace::put_system`] that lies in `shard` of this store,
    /// if the store has so many `shards`. The same at every opening.
    #[must_use]
    pub fn system_key_in(&self, prefix: &[u8], shard: usize, shards: usize) -> Vec<u8> {
        let names = (0..=u64::MAX).map(|salt: u64| [prefix, &salt.to_be_bytes()].concat());
        let belongs = |key: &Vec<u8>| {
            let hash = hash_in(self.hash_seed(), SYSTEM_NAMESPACE, key);
            shard_of_hash(hash, shards) == shard
        };
        names.into_iter().find(belongs).unwrap_or_default()
    }
}

/// Checks the snapshot at `path`, and whether its entries are more than the store's whole pool holds:
/// one for which it is too much would be left with a part.
///
/// A pool as large as the one that the snapshot is of passes, however full that one is. One that is a
/// little smaller may pass and be too small all the same.
///
/// Errors: as [`check_snapshot`]; [`KvError::PoolFull`].
pub fn check_replacement(path: &Path, store: &Store) -> Result<SnapshotReport, KvError> {
    let (report, capacity_bytes) = (check_snapshot(path)?, store.pool().capacity_bytes());
    if report.slot_bytes > capacity_bytes {
        return Err(KvError::PoolFull { capacity_bytes });
    }
    Ok(report)
}

/// Replaces everything in a store that is in use by the snapshot at `path`, system entries
/// included. Shards are locked one record at a time: who looks meanwhile sees a part. A crash
/// before this returned leaves an empty store.
///
/// Records keep their order and get versions above all that were there.
///
/// Errors: as [`check_replacement`], and nothing changed; the pool's: the store then holds a part, and
/// is empty when it is opened next.
pub fn replace_by_snapshot(
    path: &Path,
    store: &Arc<Store>,
    shards: &[Arc<Mutex<Shard>>],
) -> Result<SnapshotReport, KvError> {
    let lock = |index: usize| shards[index].lock().unwrap_or_else(PoisonError::into_inner);
    let checked = check_replacement(path, store)?;
    let barrier = {
        let mut guards: Vec<_> = (0..shards.len()).map(lock).collect();
        let barrier = store.begin_replacing(checked.version)?;
        // Those of all shards: a shard's log may hold entries of a namespace that is open only where its
        // keys belong, and what the shard recorded of them must not count against the new contents.
        let mut namespaces: Vec<u32> =
            guards.iter().flat_map(|shard| shard.spaces.numbers()).collect();
        namespaces.sort_unstable();
        namespaces.dedup();
        for shard in &mut guards {
            // Rows that ended in the old contents: a row of the new ones may have such a key and
            // generation, and live. Those that the snapshot brings are found by a sweep.
            shard.ended = Ended::default();
            for &namespace in &namespaces {
                shard.forget(namespace);
                shard.spaces.remove(namespace);
            }
        }
        barrier
    };
    let commit = || (0..shards.len()).try_for_each(|index| lock(index).commit());
    let mut uncommitted = 0;
    let report = read_file(path, |mut record, body| {
        record.version = record.version.saturating_add(barrier);
        let (key, value) = body.split_at(usize::from(record.key_length));
        let owner = store.shard_for(record.namespace, record.place_of(body));
        let beside = crate::expiries::is_expiries(record.namespace);
        let shifted = crate::expiries::shifted(value, barrier).filter(|_| beside);
        match shifted {
            // It is about the version that the value has here.
            Some(value) => lock(owner).restore_record(&record, &[key, &value].concat())?,
            None => lock(owner).restore_record(&record, body)?,
        }
        uncommitted += 1;
        if uncommitted < RECORDS_PER_COMMIT {
            return Ok(());
        }
        uncommitted = 0;
        commit()
    })?;
    commit()?;
    crate::catalog::load(store, shards)?;
    store.end_replacing()?;
    Ok(report)
}
