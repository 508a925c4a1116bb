//! Services' rows that end: a row is there with all its keys or gone with all of them, in whatever log its
//! mark lies and however far upkeep is.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Key, Keyspace, NamespaceOptions, PutOptions, Range, audit};
use beeline_pmem::{CrashImage, Durability, Pool, PoolOptions, for_each_crash_image};

use crate::world::{SEGMENT, limits, open, with_keys};

const PLAIN: u32 = 300;
const ORDERED: u32 = 301;
const KEYS: u32 = 600;

/// Namespace, row and name of what is there.
type State = BTreeSet<(u32, u8, u32)>;

fn key_of<'k>(row: &'k [u8; 1], name: &'k [u8; 4]) -> Key<'k> {
    Key { row, name }
}

fn observe(keys: &mut Keyspace<'_>) -> State {
    let mut state = State::new();
    // Of a crash before they were created.
    let there = keys.store().namespaces().into_iter().map(|(number, _)| number);
    for number in there {
        for row in 0..3_u8 {
            for n in 0..KEYS {
                if keys.get_in(number, key_of(&[row], &n.to_be_bytes())).unwrap().is_some() {
                    state.insert((number, row, n));
                }
            }
            let mut met = 0;
            if number == ORDERED {
                keys.range(number, &Range { row: &[row], ..Range::ALL }, |_, _, _| {
                    met += 1;
                    ControlFlow::Continue(())
                })
                .unwrap();
                let there = state.iter().filter(|key| (key.0, key.1) == (number, row)).count();
                assert_eq!(met, there, "the order agrees with the index");
            }
        }
    }
    state
}

/// Runs the history and checks its images; returns what is wrong, at most a few sentences. A bug is put back
/// while the history runs, or where an image is opened.
fn violations(running: Option<KnownBug>, opening: Option<KnownBug>) -> Vec<String> {
    let options = PoolOptions {
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 32 * u64::from(SEGMENT),
        ..PoolOptions::default()
    };
    let (pool, device) = Pool::simulated(&options).unwrap();
    let (store, shards, _) = open(&pool, 2);
    with_keys(&shards, 0, |keys| {
        for number in [PLAIN, ORDERED] {
            let ordered = number == ORDERED;
            let options = NamespaceOptions { by_row: true, ordered, ..Default::default() };
            keys.create_namespace(number, options).unwrap();
        }
    });
    device.mark(0);
    let mut states = vec![State::new()];
    let run = |states: &mut Vec<State>| {
        for turn in 0..36_u32 {
            let mut state = states.last().unwrap().clone();
            let (number, row) = ([PLAIN, ORDERED][turn as usize % 2], (turn / 2 % 3) as u8);
            let ended = [row];
            let owner = store.shard_in(number, key_of(&ended, &[0; 4])).unwrap();
            let home = if turn % 9 == 7 { 1 - owner } else { (turn / 4 % 2) as usize };
            match turn % 9 {
                // Keys of a row, some of them anew.
                0..4 => with_keys(&shards, home, |keys| {
                    keys.begin_batch();
                    for n in (turn % 7..KEYS).step_by(7 + turn as usize) {
                        let name = n.to_be_bytes();
                        let key = key_of(&ended, &name);
                        keys.put_in(number, key, &[&[turn as u8; 90]], PutOptions::default())
                            .unwrap();
                        state.insert((number, row, n));
                    }
                    keys.end_batch();
                    keys.commit().unwrap();
                }),
                // The end of the row, and what comes after it in the same batch.
                4 | 6 => with_keys(&shards, home, |keys| {
                    keys.begin_batch();
                    keys.delete_row(number, &ended).unwrap();
                    state.retain(|key| (key.0, key.1) != (number, row));
                    if turn % 9 == 6 {
                        let name = turn.to_be_bytes();
                        let key = key_of(&ended, &name);
                        keys.put_in(number, key, &[b"later"], PutOptions::default()).unwrap();
                        state.insert((number, row, turn));
                    }
                    keys.end_batch();
                    keys.commit().unwrap();
                }),
                // The end of a row whose commit is upkeep's, in another log than the row's keys.
                7 => with_keys(&shards, home, |keys| {
                    keys.delete_row(number, &ended).unwrap();
                    state.retain(|key| (key.0, key.1) != (number, row));
                }),
                _ => {}
            }
            if turn % 9 >= 5 {
                // That of the row first, where its mark waits.
                let first = if turn % 9 == 7 { owner } else { 0 };
                for shard in [&shards[first], &shards[1 - first]] {
                    let mut shard = shard.lock().unwrap();
                    for _ in 0..2 + turn {
                        if !shard.maintain(8 << 10).unwrap().did_work {
                            break;
                        }
                    }
                }
            }
            if turn % 9 == 7 {
                with_keys(&shards, home, |keys| keys.commit().unwrap());
            }
            states.push(state);
            device.mark(states.len() as u64 - 1);
        }
    };
    match running {
        Some(bug) => with_known_bug(bug, || run(&mut states)),
        None => run(&mut states),
    }
    if running.is_none() {
        assert_eq!(with_keys(&shards, 0, observe), *states.last().unwrap());
        let findings = audit(&store, &shards);
        assert!(findings.is_empty(), "{findings:#?}");
    }
    let mut wrong = Vec::new();
    let check = |image: &CrashImage| {
        let acknowledged = image.mark().map_or(0, |mark| mark as usize);
        let (pool, _) = Pool::open_image(image, &options).map_err(|error| error.to_string())?;
        let shards = 1 + acknowledged % 3;
        let (store, shards, _) = match opening {
            Some(bug) => with_known_bug(bug, || open(&pool, shards)),
            None => open(&pool, shards),
        };
        let seen = with_keys(&shards, 0, observe);
        if !states[acknowledged..].contains(&seen) {
            return Err(format!("after step {acknowledged} the store shows another state"));
        }
        for shard in &shards {
            let mut shard = shard.lock().unwrap();
            while shard.maintain(1 << 20).unwrap().did_work {}
        }
        if with_keys(&shards, 0, observe) != seen {
            return Err(format!("after step {acknowledged} upkeep changed what is there"));
        }
        let there = store.namespaces().into_iter().map(|(number, _)| number);
        let live: u64 =
            there.map(|number| with_keys(&shards, 0, |keys| keys.len_in(number).unwrap())).sum();
        if live != seen.len() as u64 {
            return Err(format!("after step {acknowledged}: {live} live, {} there", seen.len()));
        }
        let findings = audit(&store, &shards);
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    };
    // Where a bug strikes is a narrow place.
    let limits = if running.is_some() { limits(150, 80) } else { limits(150, 6) };
    let counts = for_each_crash_image(&device, &limits, |image| {
        if wrong.len() < 3
            && let Err(finding) = check(image)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("ends of rows: {counts}");
    assert!(counts.images > 100, "nothing was enumerated");
    wrong
}

#[test]
fn a_row_ends_with_all_its_keys_or_not_at_all() {
    let wrong = violations(None, None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn rows_that_come_back_are_caught() {
    let wrong = violations(None, Some(KnownBug::ForgetRowEnds));
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}

#[test]
fn keys_that_go_before_the_end_of_their_row_is_persisted_are_caught() {
    let wrong = violations(Some(KnownBug::SweepBeforePersist), None);
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}

#[test]
fn a_mark_that_goes_before_the_deletions_are_persisted_is_caught() {
    let wrong = violations(Some(KnownBug::UnmarkEarly), None);
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}
