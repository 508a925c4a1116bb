//! Services' rows with a time: a row ends with its time or lives without one, with all its keys, in whatever log
//! its time and its mark lie and however far upkeep is; and its length is that of its keys.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use beeline_env::{Clock, ManualClock};
use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Keyspace, NamespaceOptions, Opened, PutOptions, Store, StoreOptions, audit};
use beeline_pmem::{CrashImage, Durability, Pool, PoolOptions, for_each_crash_image};

use crate::world::{SEGMENT, limits, with_keys};

/// Rows end when they are told to.
const TOLD: u32 = 300;
/// Rows end a while after their first key.
const BRIEF: u32 = 301;
const BRIEF_MS: u64 = 4000;
const BOTH: [u32; 2] = [TOLD, BRIEF];
const KEYS: u32 = 300;
const ROWS: u8 = 2;

/// Keys of a row, and when it ends.
type Row = (BTreeSet<u32>, u64);
/// By namespace and row.
type State = BTreeMap<(u32, u8), Row>;

/// What a reader at this time meets of a state.
fn at(state: &State, now: u64) -> State {
    let mut seen = state.clone();
    seen.retain(|_, (keys, time)| (*time == 0 || *time > now) && !(keys.is_empty() && *time == 0));
    seen
}

fn open(pool: &Pool, shards: usize, clock: &Arc<ManualClock>) -> Opened {
    let clock: Arc<dyn Clock> = Arc::clone(clock) as _;
    let options = StoreOptions {
        shards,
        clock,
        recovery_threads: 1,
        accept_damage: true,
        warm_bytes: Some(SEGMENT / 4),
        ..StoreOptions::default()
    };
    Store::open(pool.clone(), options).unwrap()
}

/// What is there; a row's length that is not that of its keys is told as an error.
fn observe(keys: &mut Keyspace<'_>) -> Result<State, String> {
    let mut state = State::new();
    for (number, _) in keys.store().namespaces() {
        for row in 0..ROWS {
            let mut met = BTreeSet::new();
            for n in 0..KEYS {
                let name = n.to_be_bytes();
                if keys.get_in(number, ([row].as_slice(), name.as_slice())).unwrap().is_some() {
                    met.insert(n);
                }
            }
            let known = keys.row_state(number, &[row]).unwrap();
            if known.length != met.len() as u64 {
                let there = met.len();
                return Err(format!("row {row} of {number}: {there} keys, {} told", known.length));
            }
            if !met.is_empty() || known.expires_at_ms != 0 {
                state.insert((number, row), (met, known.expires_at_ms));
            }
        }
    }
    Ok(state)
}

/// Runs the history and checks its images, with a bug put back while it runs; what is wrong, a few sentences.
fn violations(running: Option<KnownBug>) -> Vec<String> {
    let options = PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 32 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let (pool, device) = Pool::simulated(&options).unwrap();
    let clock = Arc::new(ManualClock::new(1_000_000));
    let (store, shards, _) = open(&pool, 2, &clock);
    with_keys(&shards, 0, |keys| {
        for number in BOTH {
            let options = NamespaceOptions {
                by_row: true,
                ordered: number == BRIEF,
                row_records: true,
                row_time_to_live_ms: if number == BRIEF { BRIEF_MS } else { 0 },
                ..Default::default()
            };
            keys.create_namespace(number, options).unwrap();
        }
    });
    device.mark(0);
    // Each step's state, and the time at which it was made.
    let mut states = vec![(State::new(), clock.unix_ms())];
    let run = |states: &mut Vec<(State, u64)>| {
        for turn in 0..48_u32 {
            clock.advance(Duration::from_millis(u64::from(turn * 37 % 11) * 100));
            let now = clock.unix_ms();
            let mut state = at(&states.last().unwrap().0, now);
            let (number, row) = (BOTH[turn as usize % 2], (turn / 2 % u32::from(ROWS)) as u8);
            let known = [row];
            let owner = store.shard_in(number, (known.as_slice(), b"".as_slice())).unwrap();
            // A write of several shards may lie in another log than that of the row's keys.
            let home = if turn % 3 == 0 { owner } else { 1 - owner };
            with_keys(&shards, home, |keys| {
                match turn / 4 % 6 {
                    0 | 1 | 4 => {
                        keys.begin_batch();
                        for n in (turn % 5..KEYS).step_by(11 + turn as usize % 5) {
                            let name = n.to_be_bytes();
                            let key = (known.as_slice(), name.as_slice());
                            keys.put_in(number, key, &[&[turn as u8; 60]], PutOptions::default())
                                .unwrap();
                            let (met, time) = state.entry((number, row)).or_default();
                            met.insert(n);
                            if number == BRIEF && *time == 0 {
                                *time = now + BRIEF_MS;
                            }
                        }
                        keys.end_batch();
                    }
                    2 => {
                        let time = if turn % 5 == 0 { 0 } else { now + 7000 + u64::from(turn) };
                        let there = state.get_mut(&(number, row)).filter(|row| !row.0.is_empty());
                        let changed = keys.expire_row(number, &known, time).unwrap();
                        assert_eq!(changed, there.is_some());
                        if let Some((_, known)) = there {
                            *known = time;
                        }
                    }
                    3 => {
                        keys.delete_row(number, &known).unwrap();
                        state.remove(&(number, row));
                    }
                    // Time passes: upkeep ends what is due.
                    _ => clock.advance(Duration::from_millis(1500)),
                }
            });
            // Upkeep, before the step is committed and after it.
            let upkeep = |turns: u32| {
                for shard in [&shards[owner], &shards[1 - owner]] {
                    let mut shard = shard.lock().unwrap();
                    for _ in 0..turns {
                        if !shard.maintain(8 << 10).unwrap().did_work {
                            break;
                        }
                    }
                }
            };
            if turn % 4 >= 2 {
                upkeep(8);
            }
            with_keys(&shards, home, |keys| keys.commit().unwrap());
            let now = clock.unix_ms();
            states.push((at(&state, now), now));
            device.mark(states.len() as u64 - 1);
            upkeep(turn % 3 * 4);
        }
    };
    match running {
        Some(bug) => with_known_bug(bug, || run(&mut states)),
        None => run(&mut states),
    }
    if running.is_none() {
        let (last, now) = states.last().unwrap();
        assert_eq!(with_keys(&shards, 0, observe).unwrap(), at(last, *now));
        let findings = audit(&store, &shards);
        assert!(findings.is_empty(), "{findings:#?}");
    }
    let mut wrong = Vec::new();
    let mut timed = 0;
    let mut check = |image: &CrashImage| {
        let acknowledged = image.mark().map_or(0, |mark| mark as usize);
        let later = states.get(acknowledged + 1).unwrap_or(&states[acknowledged]);
        // Whatever the image holds was stored by then.
        let now = later.1;
        let clock = Arc::new(ManualClock::new(now));
        let (pool, _) = Pool::open_image(image, &options).map_err(|error| error.to_string())?;
        let (store, shards, _) = open(&pool, 1 + acknowledged % 3, &clock);
        let seen = with_keys(&shards, 0, observe)?;
        timed += usize::from(seen.values().any(|row| row.1 != 0));
        let wanted = [&states[acknowledged].0, &later.0].map(|state| at(state, now));
        if !wanted.contains(&seen) {
            return Err(format!("after step {acknowledged} the store shows another state"));
        }
        let upkeep = || {
            for shard in &shards {
                let mut shard = shard.lock().unwrap();
                while shard.maintain(1 << 20).unwrap().did_work {}
            }
        };
        upkeep();
        if with_keys(&shards, 0, observe)? != seen {
            return Err(format!("after step {acknowledged} upkeep changed what is there"));
        }
        // In the end those are left that have no time.
        clock.advance(Duration::from_secs(3600));
        upkeep();
        let left = at(&seen, clock.unix_ms());
        if with_keys(&shards, 0, observe)? != left {
            return Err(format!("after step {acknowledged} rows with a time are left"));
        }
        let live: u64 = BOTH
            .iter()
            .filter(|number| store.namespace(**number).is_some())
            .map(|number| with_keys(&shards, 0, |keys| keys.len_in(*number).unwrap()))
            .sum();
        let there: usize = left.values().map(|row| row.0.len()).sum();
        if live != there as u64 {
            return Err(format!("after step {acknowledged}: {live} live, {there} there"));
        }
        let findings = audit(&store, &shards);
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    };
    let limits = if running.is_some() { limits(150, 40) } else { limits(150, 6) };
    let counts = for_each_crash_image(&device, &limits, |image| {
        if wrong.len() < 3
            && let Err(finding) = check(image)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("times of rows: {counts}, {timed} images with a time");
    assert!(counts.images > 100 && timed > 50, "nothing was enumerated");
    wrong
}

#[test]
fn a_row_with_a_time_is_there_with_all_its_keys_or_gone() {
    let wrong = violations(None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn times_that_outlive_their_row_are_caught() {
    let wrong = violations(Some(KnownBug::KeepRowTimes));
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}

#[test]
fn times_that_go_before_the_end_of_their_row_is_persisted_are_caught() {
    let wrong = violations(Some(KnownBug::SweepBeforePersist));
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}
