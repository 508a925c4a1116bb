//! A key made to measure. Clients know the seed of the hash that places keys, and the hash of a
//! short key can be turned round, so anybody can make a key of any hash: of 0 for instance, which
//! is also what a free slot of the index holds.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

use std::sync::{MutexGuard, PoisonError};

use beeline_kv::{Keyspace, PutOptions, Shard, Store, StoreOptions, hash_key};
use beeline_pmem::{Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;

/// XXH3 of eight bytes, turned round.
fn key_of_hash_zero(seed: u64) -> [u8; 8] {
    const FACTOR: u64 = 0x9FB2_1C65_1E98_DF25;
    // Bytes 8..24 of XXH3's default secret.
    const SECRET: [u64; 2] = [0x1CAD_21F7_2C81_017C, 0xDB97_9083_E96D_D4DE];
    // Newton's iteration doubles the bits that are right.
    let mut inverse = FACTOR;
    for _ in 0..6 {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(FACTOR.wrapping_mul(inverse)));
    }
    // The last multiplication gives 0 for 0; before it stood `h ^ ((h >> 35) + length)`.
    let mut mixed = 8_u64.wrapping_mul(inverse);
    // x ^ rotl(x, 49) ^ rotl(x, 24) is its own inverse when applied 64 times; so 63 times undo one.
    for _ in 0..63 {
        mixed = mixed ^ mixed.rotate_left(49) ^ mixed.rotate_left(24);
    }
    let seed = seed ^ u64::from((seed as u32).swap_bytes()) << 32;
    let input = mixed ^ (SECRET[0] ^ SECRET[1]).wrapping_sub(seed);
    // First four bytes high, last four low.
    let mut key = [0; 8];
    key[..4].copy_from_slice(&((input >> 32) as u32).to_le_bytes());
    key[4..].copy_from_slice(&(input as u32).to_le_bytes());
    assert_eq!(hash_key(seed_of(seed), 0, &key), 0, "the hash was turned round");
    key
}

/// Undoes the change of the seed in [`key_of_hash_zero`], which keeps its low half.
fn seed_of(changed: u64) -> u64 {
    changed ^ u64::from((changed as u32).swap_bytes()) << 32
}

fn with_keys<R>(
    shards: &[std::sync::Arc<std::sync::Mutex<Shard>>],
    body: impl FnOnce(&mut Keyspace<'_>) -> R,
) -> R {
    let mut guards: Vec<MutexGuard<'_, Shard>> =
        shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner)).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 0))
}

#[test]
fn a_key_whose_hash_is_zero_is_a_key_like_any_other() {
    let pool = Pool::dram(&PoolOptions::volatile(SEGMENT, 16 * u64::from(SEGMENT))).unwrap();
    let (store, shards, _) = Store::open(pool, StoreOptions::default()).unwrap();
    let key = key_of_hash_zero(store.hash_seed());
    // Segment 0, which a free slot seems to point at, is nobody's in the store.
    let held = store.pool().allocate().unwrap();
    assert_eq!(held.id(), 0);
    with_keys(&shards, |keys| {
        keys.put(0, b"filler", &[b"value"], PutOptions::default()).unwrap();
        keys.commit().unwrap();
    });
    shards[0].lock().unwrap().expect_keys(0, [&key[..], b"filler"].into_iter());
    with_keys(&shards, |keys| {
        keys.expect_keys(0, [&key[..]].into_iter());
        assert!(keys.lookup(0, &key).unwrap().is_none());
        keys.put(0, &key, &[b"value"], PutOptions::default()).unwrap();
        keys.expect_keys(0, [&key[..]].into_iter());
        let entry = keys.lookup(0, &key).unwrap().unwrap();
        let mut value = Vec::new();
        keys.read_value(&entry, &mut value).unwrap();
        assert_eq!(value, b"value");
        keys.delete(0, &key).unwrap();
        keys.commit().unwrap();
        assert!(keys.lookup(0, &key).unwrap().is_none());
    });
    let findings = beeline_kv::audit(&store, &shards);
    assert!(findings.is_empty(), "{findings:?}");
}
