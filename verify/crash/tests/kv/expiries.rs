//! Expiries of large values in crashes: a small entry beside the value changes them; after a crash each
//! key has value and expiry of a state that was acknowledged or on the way.

use std::collections::BTreeMap;

use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Keyspace, PutOptions, audit};
use beeline_pmem::{CrashImage, Durability, Pool, PoolOptions, for_each_crash_image};

use crate::world::{SEGMENT, limits, open, with_keys};

const DATABASE: u8 = 7;
const KEYS: [&[u8]; 3] = [b"a", b"the second", b"c"];
/// Far in the future: a time apart for every change.
const LATER: u64 = 1 << 50;

/// Key to value and expiry.
type State = BTreeMap<Vec<u8>, (Vec<u8>, u64)>;

fn observe(keys: &mut Keyspace<'_>) -> Result<State, String> {
    let mut state = State::new();
    for key in KEYS {
        let Some(entry) = keys.lookup(DATABASE, key).map_err(|error| error.to_string())? else {
            continue;
        };
        let mut value = Vec::new();
        keys.read_value(&entry, &mut value).map_err(|error| error.to_string())?;
        state.insert(key.to_vec(), (value, entry.expires_at_ms));
    }
    Ok(state)
}

/// Runs the history and checks its images; returns what is wrong, at most a few sentences.
fn violations(bug: Option<KnownBug>) -> Vec<String> {
    let options = PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 16 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let (pool, device) = Pool::simulated(&options).unwrap();
    let (store, shards, _) = open(&pool, 2);
    device.mark(0);
    let mut states = vec![State::new()];
    for turn in 0..150_u64 {
        let mut state = states.last().unwrap().clone();
        let key = KEYS[turn as usize % 3];
        let value = vec![turn as u8; 1000 + turn as usize * 40];
        with_keys(&shards, (turn / 2) as usize % 2, |keys| {
            let mut put = |keys: &mut Keyspace<'_>, expires_at_ms| {
                let options = PutOptions { kind: 0, expires_at_ms };
                keys.put(DATABASE, key, &[&value], options).unwrap();
                state.insert(key.to_vec(), (value.clone(), expires_at_ms));
            };
            match turn % 10 {
                0 => put(keys, 0),
                1 => put(keys, LATER + turn),
                4 => {
                    keys.delete(DATABASE, key).unwrap();
                    state.remove(key);
                }
                // Upkeep: expiries beside values that are gone go, and segments come back.
                3 | 8 => {}
                7 => {
                    keys.begin_batch();
                    put(keys, LATER);
                    assert!(keys.set_expiry(DATABASE, key, LATER + turn).unwrap());
                    keys.end_batch();
                    state.get_mut(key).unwrap().1 = LATER + turn;
                }
                other => {
                    let at = if other == 5 { 0 } else { LATER + turn };
                    let known = keys.set_expiry(DATABASE, key, at).unwrap();
                    assert_eq!(known, state.contains_key(key));
                    state.entry(key.to_vec()).and_modify(|known| known.1 = at);
                }
            }
        });
        for shard in &shards {
            let mut shard = shard.lock().unwrap();
            shard.commit().unwrap();
            while matches!(turn % 10, 3 | 8) && shard.maintain(8 << 10).unwrap().did_work {}
        }
        states.push(state);
        device.mark(states.len() as u64 - 1);
    }
    let freed = store.stats().total;
    assert!(freed.segments_collected + freed.segments_recycled > 0, "the history frees segments");
    assert_eq!(with_keys(&shards, 0, observe).as_ref(), Ok(states.last().unwrap()));
    assert_eq!(audit(&store, &shards), Vec::<String>::new());
    let mut wrong = Vec::new();
    let check = |image: &CrashImage| {
        let acknowledged = image.mark().map_or(0, |mark| mark as usize);
        let (pool, _) = Pool::open_image(image, &options).map_err(|error| error.to_string())?;
        let shards = 1 + acknowledged % 3;
        let (store, shards, report) = match bug {
            Some(bug) => with_known_bug(bug, || open(&pool, shards)),
            None => open(&pool, shards),
        };
        if report.damaged != 0 {
            return Err(format!("an image without damage is reported damaged: {report:?}"));
        }
        let seen = with_keys(&shards, 0, observe)?;
        if !states[acknowledged..].contains(&seen) {
            return Err(format!("after step {acknowledged} the store shows another state"));
        }
        for shard in &shards {
            let mut shard = shard.lock().unwrap();
            while shard.maintain(1 << 20).map_err(|error| error.to_string())?.did_work {}
        }
        if with_keys(&shards, 0, observe)? != seen {
            return Err("upkeep changed a key".to_owned());
        }
        let findings = audit(&store, &shards);
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    };
    let counts = for_each_crash_image(&device, &limits(150, 8), |image| {
        if wrong.len() < 3
            && let Err(finding) = check(image)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("expiries: {counts}");
    assert!(counts.images > 100, "nothing was enumerated");
    wrong
}

#[test]
fn values_have_their_expiries_after_every_crash() {
    let wrong = violations(None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_expiry_taken_for_another_values_is_caught() {
    let wrong = violations(Some(KnownBug::ExpiryOfAnyValue));
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}
