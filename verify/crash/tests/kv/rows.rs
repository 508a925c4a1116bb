//! Rows in crashes: fields that are one entry each, heads that come and go with the first and the last;
//! after a crash a row has the fields of a state that was acknowledged or on the way, and counts them.

use std::collections::BTreeMap;

use beeline_kv::entry::{FIRST_ENTRY, slot_bytes_for};
use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Keyspace, KvError, PutOptions, Store, audit};
use beeline_pmem::{CrashImage, Durability, Pool, PoolOptions, for_each_crash_image};

use crate::world::{SEGMENT, limits, open, with_keys};

const DATABASE: u8 = 3;
const KIND: u8 = 1;
const KEYS: [&[u8]; 3] = [b"one", b"two", b"three"];

/// Row to field to value; a row without fields is none.
type State = BTreeMap<Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>>;

fn set(keys: &mut Keyspace<'_>, key: &[u8], fields: &[Vec<u8>], value: &[u8]) {
    let known = keys.row(DATABASE, key).unwrap();
    let single = known.is_some() && fields.len() == 1;
    let mut row = known.unwrap_or_else(|| keys.new_row(KIND, 0).unwrap());
    if !single {
        keys.begin_batch();
    }
    for field in fields {
        keys.put_field(DATABASE, key, &mut row, field, &[value]).unwrap();
    }
    keys.put_head(DATABASE, key, &row).unwrap();
    if !single {
        keys.end_batch();
    }
}

fn remove(keys: &mut Keyspace<'_>, key: &[u8], fields: &[Vec<u8>]) {
    let Some(mut row) = keys.row(DATABASE, key).unwrap() else { return };
    keys.begin_batch();
    for field in fields {
        keys.delete_field(DATABASE, key, &mut row, field).unwrap();
    }
    keys.put_head(DATABASE, key, &row).unwrap();
    keys.end_batch();
}

/// What the store shows; a length that is not the number of fields is told.
fn observe(keys: &mut Keyspace<'_>) -> Result<State, String> {
    let text = |error: KvError| error.to_string();
    let mut state = State::new();
    for key in KEYS {
        let Some(row) = keys.row(DATABASE, key).map_err(text)? else { continue };
        let mut fields = BTreeMap::new();
        keys.visit_row(DATABASE, key, &row, (0, usize::MAX), |field, value| {
            fields.insert(field.to_vec(), value.to_vec());
        })
        .map_err(text)?;
        if fields.is_empty() {
            return Err(format!("a row without fields is there, of {} counted", row.length));
        }
        if row.length != fields.len() as u64 {
            return Err(format!("{} fields counted, {} there", row.length, fields.len()));
        }
        state.insert(key.to_vec(), fields);
    }
    Ok(state)
}

/// In one commit a row gets its second field at the end of a segment and loses its first one at the start
/// of the next; returns what images of that show that may not be.
fn violations_of_two_steps_in_one_commit(bug: Option<KnownBug>) -> Vec<String> {
    let options = PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 8 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let (pool, device) = Pool::simulated(&options).unwrap();
    let (store, shards, _) = open(&pool, 1);
    device.mark(0);
    let (key, first, second) = (KEYS[0], b"a".to_vec(), b"b".to_vec());
    let commit = || shards[0].lock().unwrap().commit().unwrap();
    with_keys(&shards, 0, |keys| {
        let name = b"fills the segment";
        let used = u64::from(FIRST_ENTRY)
            + slot_bytes_for(name.len(), SEGMENT as usize - 6000)
            + Store::field_bytes(key.len(), first.len(), 1)
            + Store::head_bytes(key.len());
        let value = vec![1; SEGMENT as usize - 6000];
        keys.put(DATABASE, name, &[&value], PutOptions::default()).unwrap();
        set(keys, key, std::slice::from_ref(&first), b"1");
        keys.commit().unwrap();
        device.mark(1);
        let left = u64::from(SEGMENT) - used;
        let value = vec![2; (left - Store::field_bytes(key.len(), second.len(), 0)) as usize];
        set(keys, key, std::slice::from_ref(&second), &value);
        assert_eq!(store.stats().segments, 1, "the second field ends the segment");
        remove(keys, key, std::slice::from_ref(&first));
        assert_eq!(store.stats().segments, 2, "the deletion begins another one");
    });
    commit();
    device.mark(2);
    let mut wrong = Vec::new();
    let mut gone = 0;
    let check = |image: &CrashImage, gone: &mut u32| {
        let (pool, _) = Pool::open_image(image, &options).map_err(|error| error.to_string())?;
        let open = || open(&pool, 1 + image.mark().unwrap_or(0) as usize);
        let (store, shards, _) = match bug {
            Some(bug) => with_known_bug(bug, open),
            None => open(),
        };
        let seen = with_keys(&shards, 0, observe)?;
        let fields = seen.get(key).map(|row| row.keys().cloned().collect::<Vec<_>>());
        match (image.mark(), &fields) {
            (Some(2), Some(fields)) if *fields != [second.clone()] => {
                return Err(format!("acknowledged, and there are {fields:?}"));
            }
            (Some(2), None) => return Err("acknowledged, and gone".to_owned()),
            // The deletion alone.
            (Some(1), None) => *gone += 1,
            _ => {}
        }
        let findings = audit(&store, &shards);
        if !findings.is_empty() {
            return Err(findings.join("; "));
        }
        if image.mark() == Some(1) && fields.is_none() {
            drop((store, shards));
            let (_, shards, _) = crate::world::open(&pool, 1);
            if with_keys(&shards, 0, observe)? != seen {
                return Err("another opening shows something else".to_owned());
            }
        }
        Ok(())
    };
    let counts = for_each_crash_image(&device, &limits(20, 60), |image| {
        if wrong.len() < 3
            && let Err(finding) = check(image, &mut gone)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("two steps in one commit: {counts}; {gone} images keep the deletion alone");
    assert!(!wrong.is_empty() || gone > 0, "no image kept the second step without the first");
    wrong
}

#[test]
fn a_row_that_lost_all_its_fields_in_a_crash_is_gone() {
    let wrong = violations_of_two_steps_in_one_commit(None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_row_that_stays_without_fields_is_caught() {
    let wrong = violations_of_two_steps_in_one_commit(Some(KnownBug::KeepHollowRows));
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
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
    for turn in 0..150_u8 {
        let mut state = states.last().unwrap().clone();
        let key = KEYS[usize::from(turn) % 3];
        let value = vec![turn; 2000 + usize::from(turn) * 40];
        let field = |n: u8| vec![b'f', n % 5];
        with_keys(&shards, usize::from(turn / 2) % 2, |keys| match turn % 10 {
            // Upkeep: what ended rows left behind goes, and segments come back.
            3 | 6 => {}
            4 => {
                keys.delete(DATABASE, key).unwrap();
                state.remove(key);
            }
            7 => {
                let fields: Vec<_> = (0..5).map(field).collect();
                remove(keys, key, &fields[..usize::from(turn / 10) % 6]);
                if let Some(row) = state.get_mut(key) {
                    let gone = &fields[..usize::from(turn / 10) % 6];
                    gone.iter().for_each(|gone| drop(row.remove(gone)));
                    if row.is_empty() {
                        state.remove(key);
                    }
                }
            }
            8 => {
                keys.set_expiry(DATABASE, key, 1 << 50).unwrap();
            }
            5 => {
                let fields = [field(turn), field(turn + 1), field(turn + 2)];
                set(keys, key, &fields, &value);
                let row = state.entry(key.to_vec()).or_default();
                row.extend(fields.map(|field| (field, value.clone())));
            }
            _ => {
                set(keys, key, &[field(turn / 2)], &value);
                state.entry(key.to_vec()).or_default().insert(field(turn / 2), value.clone());
            }
        });
        for shard in &shards {
            let mut shard = shard.lock().unwrap();
            shard.commit().unwrap();
            while matches!(turn % 10, 3 | 6) && shard.maintain(8 << 10).unwrap().did_work {}
        }
        states.push(state);
        device.mark(states.len() as u64 - 1);
    }
    let freed = store.stats().total;
    assert!(freed.segments_collected + freed.segments_recycled > 0, "the history frees segments");
    assert_eq!(with_keys(&shards, 0, observe).as_ref(), Ok(states.last().unwrap()));
    let mut wrong = Vec::new();
    let check = |image: &CrashImage| {
        let acknowledged = image.mark().map_or(0, |mark| mark as usize);
        let (pool, _) = Pool::open_image(image, &options).map_err(|error| error.to_string())?;
        // Another number of shards: every key finds its place anew.
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
        let findings = audit(&store, &shards);
        if !findings.is_empty() {
            return Err(findings.join("; "));
        }
        // What ended rows left behind goes, and takes nothing with it.
        for shard in &shards {
            let mut shard = shard.lock().unwrap();
            while shard.maintain(1 << 20).map_err(|error| error.to_string())?.did_work {}
        }
        let left = with_keys(&shards, 0, observe)?;
        if left == seen { Ok(()) } else { Err("upkeep changed a row".to_owned()) }
    };
    let counts = for_each_crash_image(&device, &limits(150, 8), |image| {
        if wrong.len() < 3
            && let Err(finding) = check(image)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("rows: {counts}");
    assert!(counts.images > 100, "nothing was enumerated");
    wrong
}

#[test]
fn rows_have_the_fields_they_count_after_every_crash() {
    let wrong = violations(None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_opening_that_does_not_count_fields_is_caught() {
    let wrong = violations(Some(KnownBug::ForgetFields));
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}
