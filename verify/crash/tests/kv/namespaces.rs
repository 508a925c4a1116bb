//! Namespaces in crashes: created, cleared and dropped; batches over several of them; their order
//! after the opening; the state after a crash is one that was acknowledged or on the way.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{
    Applied, Change, Condition, Keyspace, NamespaceOptions, PutOptions, Range, Write, audit,
};
use beeline_pmem::{CrashImage, Durability, Pool, PoolOptions, for_each_crash_image};

use crate::world::{SEGMENT, limits, open, with_keys};

const ORDERED: u32 = 300;
const ROWS: u32 = 301;

/// Key (with its row) to value, by namespace; one that is not there is absent.
type State = BTreeMap<u32, BTreeMap<Vec<u8>, Vec<u8>>>;

fn options_of(number: u32) -> NamespaceOptions {
    NamespaceOptions { by_row: number == ROWS, ordered: true, ..NamespaceOptions::default() }
}

/// What the store shows, by ranges: the order has to agree with the index.
fn observe(keys: &mut Keyspace<'_>) -> Result<State, String> {
    let mut state = State::new();
    for (number, options) in keys.store().namespaces() {
        let mut shown = BTreeMap::new();
        let rows: &[&[u8]] = if options.by_row { &[b"one", b"two"] } else { &[b""] };
        for row in rows {
            let mut last = None;
            let range = Range { row, ..Range::ALL };
            keys.range(number, &range, |key, _, value| {
                assert!(last.as_deref().is_none_or(|last| last < key), "in order");
                last = Some(key.to_vec());
                shown.insert([*row, key].concat(), value.to_vec());
                ControlFlow::Continue(())
            })
            .map_err(|error| error.to_string())?;
        }
        let live = keys.len_in(number).map_err(|error| error.to_string())?;
        if live != shown.len() as u64 {
            return Err(format!("namespace {number}: {live} live, {} shown", shown.len()));
        }
        state.insert(number, shown);
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
    let step = |states: &mut Vec<State>, change: &dyn Fn(&mut State)| {
        let mut state = states.last().unwrap().clone();
        change(&mut state);
        states.push(state);
        device.mark(states.len() as u64 - 1);
    };
    let create = |number| {
        with_keys(&shards, 0, |keys| keys.create_namespace(number, options_of(number)).unwrap());
    };
    create(ORDERED);
    step(&mut states, &|state| drop(state.insert(ORDERED, BTreeMap::new())));
    create(ROWS);
    step(&mut states, &|state| drop(state.insert(ROWS, BTreeMap::new())));
    for turn in 0..50_u8 {
        match turn % 10 {
            4 => with_keys(&shards, 1, |keys| {
                keys.clear_namespace(ORDERED).unwrap();
            }),
            7 => with_keys(&shards, 0, |keys| {
                assert!(keys.drop_namespace(ROWS).unwrap());
            }),
            8 => create(ROWS),
            3 | 6 => {
                for shard in &shards {
                    let mut shard = shard.lock().unwrap();
                    while shard.maintain(8 << 10).unwrap().did_work {}
                }
            }
            _ => {
                let value = vec![turn; 300 + usize::from(turn) * 61];
                let parts: [&[u8]; 1] = [&value];
                let (first, gone) = ([b'a' + turn % 3], [b'a' + turn % 5]);
                let put = Change::Put { value: &parts, options: PutOptions::default() };
                let mut writes = vec![
                    Write {
                        namespace: ORDERED,
                        key: (&first).into(),
                        condition: Condition::None,
                        change: put,
                    },
                    Write {
                        namespace: ORDERED,
                        key: (&gone).into(),
                        condition: Condition::None,
                        change: put,
                    },
                ];
                if turn % 10 != 9 {
                    writes[1].change = Change::Delete;
                    let key =
                        (if turn % 2 == 0 { b"one".as_slice() } else { b"two" }, first.as_slice());
                    writes.push(Write {
                        namespace: ROWS,
                        key: key.into(),
                        condition: Condition::None,
                        change: put,
                    });
                }
                let applied = with_keys(&shards, usize::from(turn) % 2, |keys| {
                    let applied = keys.apply(&writes).unwrap();
                    keys.commit().unwrap();
                    applied
                });
                assert!(matches!(applied, Applied::Done(_)));
                step(&mut states, &|state| {
                    for write in &writes {
                        let Some(space) = state.get_mut(&write.namespace) else {
                            panic!("created")
                        };
                        let key = [write.key.row, write.key.name].concat();
                        match write.change {
                            Change::Put { .. } => space.insert(key, value.clone()),
                            _ => space.remove(&key),
                        };
                    }
                });
                continue;
            }
        }
        step(&mut states, &|state| match turn % 10 {
            4 => drop(state.insert(ORDERED, BTreeMap::new())),
            7 => drop(state.remove(&ROWS)),
            8 => drop(state.insert(ROWS, BTreeMap::new())),
            _ => {}
        });
    }
    let freed = store.stats().total;
    assert!(freed.segments_collected + freed.segments_recycled > 0, "the history frees segments");
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
        if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
    };
    let counts = for_each_crash_image(&device, &limits(150, 10), |image| {
        if wrong.len() < 3
            && let Err(finding) = check(image)
        {
            wrong.push(format!("{finding}\n  {}", image.describe()));
        }
    });
    println!("namespaces: {counts}");
    assert!(counts.images > 100, "nothing was enumerated");
    wrong
}

#[test]
fn namespaces_and_their_batches_survive_as_a_whole_or_not_at_all() {
    let wrong = violations(None);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_cleared_namespace_that_comes_back_is_caught() {
    let wrong = violations(Some(KnownBug::ForgetSince));
    assert!(!wrong.is_empty(), "the bug went unnoticed");
    println!("caught: {}", wrong[0]);
}
