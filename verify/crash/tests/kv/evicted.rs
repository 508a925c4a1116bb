//! What eviction leaves in a crash. Rows that writes evict, and rows that a batch in another shard's log deletes: what upkeep and later
//! writes remove of them must not outlive their ends in a crash. Every row of this history is written
//! once, in one batch, so after a crash it is there with all its fields, or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{
    Eviction, Keyspace, KvError, NamespaceLimit, NamespaceOptions, PutOptions, audit,
};
use beeline_pmem::{CrashImage, Durability, Pool, PoolOptions, SimDevice, for_each_crash_image};

use crate::world::{SEGMENT, Shards, limits, open, with_keys};

const DATABASE: u8 = 2;
const KIND: u8 = 1;
const FIELDS: u8 = 40;
const TURNS: u32 = 90;
/// Some twenty rows, beside the index.
const MEMORY_BYTES: u64 = 320 << 10;

/// Fields and their values, in order.
type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

fn name(turn: u32) -> Vec<u8> {
    format!("row{turn}").into_bytes()
}

fn value(turn: u32, field: u8) -> Vec<u8> {
    vec![turn as u8 ^ field; 150 + usize::from(field)]
}

/// What happened to the rows by turn.
#[derive(Default)]
struct History {
    /// Deleted by a command: after the mark of this turn they are gone.
    deleted: BTreeMap<u32, u64>,
    /// Rows at the end: after the mark of their turn they are there.
    left: BTreeSet<u32>,
}

/// The fields of a row, `None` without one.
fn fields(keys: &mut Keyspace<'_>, turn: u32) -> Result<Option<Pairs>, KvError> {
    let key = name(turn);
    let Some(row) = keys.row(DATABASE, &key)? else { return Ok(None) };
    let mut met = Vec::new();
    keys.visit_row(DATABASE, &key, &row, (0, usize::MAX), |field, value| {
        met.push((field.to_vec(), value.to_vec()));
    })?;
    assert_eq!(row.length, met.len() as u64, "a row counts its fields");
    met.sort();
    Ok(Some(met))
}

fn run(device: &SimDevice, shards: &Shards, deletions: bool) -> History {
    let mut history = History::default();
    let store = Arc::clone(shards[0].lock().unwrap().store());
    store.set_max_memory_bytes(MEMORY_BYTES);
    store.set_eviction(Eviction::AllKeysLru);
    for turn in 0..TURNS {
        let home = turn as usize % shards.len();
        let key = name(turn);
        with_keys(shards, home, |keys| {
            keys.begin_batch();
            let mut row = keys.new_row(KIND, 0).unwrap();
            for field in 0..FIELDS {
                let value = value(turn, field);
                keys.put_field(DATABASE, &key, &mut row, &[field], &[&value]).unwrap();
            }
            keys.put_head(DATABASE, &key, &row).unwrap();
            keys.end_batch();
            keys.commit().unwrap();
        });
        // Writes that need what rows take, several of them to one commit; each in its shard alone, as
        // a node's are.
        for part in 0..3_u8 {
            let key = [b's', turn as u8, part];
            let owner = store.shard_of(DATABASE, &key);
            let mut shard = shards[owner].lock().unwrap();
            let long = vec![part; 1500 + 700 * usize::from(part)];
            shard.put(DATABASE, &key, &[&long], PutOptions::default()).unwrap();
        }
        if deletions && turn % 4 == 3 {
            // A deletion in another shard's log, and the owner's upkeep before that commits.
            let gone = turn - 1;
            let owner = store.shard_of(DATABASE, &name(gone));
            let elsewhere = (owner + 1) % shards.len();
            let deleted =
                with_keys(shards, elsewhere, |keys| keys.delete(DATABASE, &name(gone)).unwrap());
            let mut shard = shards[owner].lock().unwrap();
            for _ in 0..4 {
                shard.maintain(8 << 10).unwrap();
            }
            if deleted {
                history.deleted.insert(gone, u64::from(turn) + 1);
            }
        }
        with_keys(shards, 0, |keys| keys.commit().unwrap());
        device.mark(u64::from(turn) + 1);
    }
    with_keys(shards, 0, |keys| {
        for turn in 0..TURNS {
            if fields(keys, turn).unwrap().is_some() {
                history.left.insert(turn);
            }
        }
    });
    history
}

/// Says what is wrong with the rows that a store opened from an image shows.
fn check(shards: &Shards, history: &History, acknowledged: u64) -> Result<(), String> {
    with_keys(shards, 0, |keys| {
        for turn in 0..TURNS {
            let seen = fields(keys, turn).map_err(|error| error.to_string())?;
            let written = u64::from(turn) < acknowledged;
            match seen {
                None if written && history.left.contains(&turn) => {
                    return Err(format!("row {turn} is lost after {acknowledged}"));
                }
                None => {}
                Some(_) if history.deleted.get(&turn).is_some_and(|at| *at <= acknowledged) => {
                    return Err(format!("row {turn} is back after {acknowledged}"));
                }
                Some(seen) => {
                    let all: Vec<_> =
                        (0..FIELDS).map(|field| (vec![field], value(turn, field))).collect();
                    if seen != all {
                        let (found, written) = (seen.len(), all.len());
                        return Err(format!("row {turn} has {found} of {written} fields"));
                    }
                }
            }
        }
        Ok(())
    })
}

/// Runs the history, with or without `deletions` and with `bug` put back, and checks its images; returns
/// what is wrong, at most a few sentences.
fn violations(deletions: bool, bug: Option<KnownBug>) -> Vec<String> {
    let options = PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 48 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let (pool, device) = Pool::simulated(&options).unwrap();
    let (store, shards, _) = open(&pool, 2);
    device.mark(0);
    let history = match bug {
        Some(bug) => with_known_bug(bug, || run(&device, &shards, deletions)),
        None => run(&device, &shards, deletions),
    };
    assert!(store.stats().total.evicted > 20, "rows are evicted");
    assert!(history.left.len() > 2, "rows are left");
    assert_eq!(history.deleted.len() > 5, deletions, "rows are deleted");
    let mut wrong = Vec::new();
    let look = |image: &CrashImage| {
        let acknowledged = image.mark().unwrap_or(0);
        let (pool, _) = Pool::open_image(image, &options).map_err(|error| error.to_string())?;
        let (store, shards, report) = open(&pool, 1 + acknowledged as usize % 3);
        if report.damaged != 0 {
            return Err(format!("an image without damage is reported damaged: {report:?}"));
        }
        check(&shards, &history, acknowledged)?;
        let findings = audit(&store, &shards);
        if !findings.is_empty() {
            return Err(findings.join("; "));
        }
        // What ended rows left behind goes, and takes nothing with it.
        for shard in &shards {
            let mut shard = shard.lock().unwrap();
            while shard.maintain(1 << 20).map_err(|error| error.to_string())?.did_work {}
        }
        check(&shards, &history, acknowledged)
    };
    let counts = for_each_crash_image(&device, &limits(250, 12), |image| {
        if wrong.len() < 3
            && let Err(finding) = look(image)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("evicted rows: {counts}");
    assert!(counts.images > 500, "nothing was enumerated");
    wrong
}

#[test]
fn an_ended_row_is_whole_or_gone_after_every_crash() {
    let wrong = violations(true, None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// By the writes that evict, and by upkeep where another shard's log holds the deletion.
#[test]
fn fields_removed_before_their_rows_end_is_persisted_are_caught() {
    for deletions in [false, true] {
        let wrong = violations(deletions, Some(KnownBug::SweepBeforePersist));
        assert!(!wrong.is_empty(), "the bug went unnoticed, deletions: {deletions}");
        println!("caught: {}", wrong[0].lines().next().unwrap_or_default());
    }
}

const CACHE: u32 = 256;

/// A namespace's limit is one of those set between the last acknowledged step and the next; keys it
/// evicted before that step stay away, and those it kept are there.
#[test]
fn a_namespaces_limit_and_what_it_evicted_survive_every_crash() {
    let options = PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 24 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let (pool, device) = Pool::simulated(&options).unwrap();
    let (_, shards, _) = open(&pool, 2);
    with_keys(&shards, 0, |keys| {
        keys.create_namespace(CACHE, NamespaceOptions::default()).unwrap();
    });
    let value = |n: u32| vec![n as u8; 900 + n as usize];
    let there = |keys: &mut Keyspace<'_>, n: u32| -> Result<bool, String> {
        let found = keys.get_in(CACHE, &n.to_be_bytes()).map_err(|error| error.to_string())?;
        let Some(entry) = found else { return Ok(false) };
        let mut found = Vec::new();
        keys.read_value(&entry, &mut found).map_err(|error| error.to_string())?;
        if found == value(n) { Ok(true) } else { Err(format!("key {n} has another value")) }
    };
    // The limit and the keys after each step; step n puts key n, and a mark is the number of steps.
    let mut states = vec![(NamespaceLimit::default(), BTreeSet::new())];
    device.mark(0);
    for step in 0..120_u32 {
        let state = with_keys(&shards, step as usize % 2, |keys| {
            if step % 40 == 10 {
                let max_bytes = 40_000 - 200 * u64::from(step);
                let eviction =
                    [Eviction::AllKeysLru, Eviction::AllKeysRandom][step as usize / 40 % 2];
                keys.limit_namespace(CACHE, NamespaceLimit { max_bytes, eviction }).unwrap();
            }
            keys.put_in(CACHE, &step.to_be_bytes(), &[&value(step)], PutOptions::default())
                .unwrap();
            keys.commit().unwrap();
            let left: BTreeSet<u32> = (0..=step).filter(|n| there(keys, *n).unwrap()).collect();
            (keys.store().namespace_limit(CACHE).unwrap(), left)
        });
        states.push(state);
        device.mark(u64::from(step) + 1);
        if step % 8 == 7 {
            for shard in &shards {
                while shard.lock().unwrap().maintain(16 << 10).unwrap().did_work {}
            }
            // Upkeep evicts, too.
            let left = with_keys(&shards, 0, |keys| {
                (0..=step).filter(|n| there(keys, *n).unwrap()).collect()
            });
            states.last_mut().unwrap().1 = left;
            device.mark(u64::from(step) + 1);
        }
    }
    let (_, last) = states.last().unwrap().clone();
    assert!(last.len() > 10 && last.len() < 60, "{} keys are left", last.len());
    let mut wrong = Vec::new();
    let look = |image: &CrashImage| {
        // Before the first mark the namespace is on its way.
        let Some(mark) = image.mark() else { return Ok(()) };
        let acknowledged = mark as usize;
        let (pool, _) = Pool::open_image(image, &options).map_err(|error| error.to_string())?;
        let (store, shards, _) = open(&pool, 1 + acknowledged % 3);
        let (limit, kept) = &states[acknowledged];
        let next = states.get(acknowledged + 1).map(|state| state.0);
        let found = store.namespace_limit(CACHE);
        if found.is_none() || (found != Some(*limit) && found != next) {
            return Err(format!("after {acknowledged} the limit is {found:?}"));
        }
        with_keys(&shards, 0, |keys| {
            for n in 0..120 {
                let there = there(keys, n)?;
                let written = (n as usize) < acknowledged;
                // What upkeep evicted before its mark is among `kept` of no state.
                let evicted = written && !kept.contains(&n);
                let lost = written && last.contains(&n) && !there;
                if lost || (there && evicted && !acknowledged.is_multiple_of(8)) {
                    return Err(format!("key {n} after {acknowledged}: there {there}"));
                }
            }
            Ok(())
        })?;
        let findings = audit(&store, &shards);
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    };
    let counts = for_each_crash_image(&device, &limits(150, 8), |image| {
        if wrong.len() < 3
            && let Err(finding) = look(image)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("limited namespace: {counts}");
    assert!(counts.images > 500, "nothing was enumerated");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
