//! Streams in crashes: appended alone and in batches with keys, over several segments and in several shards'
//! logs, cut off and deleted; the state after a crash is one that was acknowledged or on the way.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use beeline_kv::fault::{KnownBug, with_known_bug};
use beeline_kv::{Keyspace, KvError, NamespaceOptions, PutOptions, Store, audit};
use beeline_pmem::{
    CrashCounts, CrashImage, CrashLimits, Durability, Pool, PoolOptions, SimDevice,
    for_each_crash_image,
};

use crate::world::{SEGMENT, Shards, limits, open, with_keys};

const TOPICS: u32 = 300;
const ROWS: [&[u8]; 3] = [b"one", b"two", b"three"];

/// First position, and values from there on.
type Contents = (u64, Vec<Vec<u8>>);

/// Streams by row, and the keys of database 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    streams: BTreeMap<Vec<u8>, Contents>,
    keys: BTreeMap<Vec<u8>, Vec<u8>>,
}

struct World {
    options: PoolOptions,
    device: SimDevice,
    store: Arc<Store>,
    shards: Shards,
    /// After each step.
    states: Vec<State>,
    stamp: u8,
}

fn observe(keys: &mut Keyspace<'_>, names: &[Vec<u8>]) -> Result<State, String> {
    let mut state = State::default();
    for (row, ends) in keys.streams(TOPICS).map_err(|error| error.to_string())? {
        let (mut values, mut wrong) = (Vec::new(), None);
        let read = keys.read_stream(TOPICS, &row, ends.first, |entry| {
            if entry.position != ends.first + values.len() as u64 {
                wrong = Some(format!("position {} after {} entries", entry.position, values.len()));
            }
            values.push(entry.value.to_vec());
            ControlFlow::Continue(())
        });
        read.map_err(|error| error.to_string())?;
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        if ends.first + values.len() as u64 != ends.next {
            return Err(format!("{} entries read of {ends:?}", values.len()));
        }
        state.streams.insert(row, (ends.first, values));
    }
    for name in names {
        let found = keys.lookup(0, name).map_err(|error| error.to_string())?;
        let Some(entry) = found else { continue };
        let mut value = Vec::new();
        keys.read_value(&entry, &mut value).map_err(|error| error.to_string())?;
        state.keys.insert(name.clone(), value);
    }
    Ok(state)
}

impl World {
    fn new(segments: u64) -> Self {
        let options = PoolOptions {
            durability: Durability::Power,
            segment_bytes: SEGMENT,
            capacity_bytes: segments * u64::from(SEGMENT),
            ..PoolOptions::default()
        };
        let (pool, device) = Pool::simulated(&options).unwrap();
        let (store, shards, _) = open(&pool, 2);
        let topics = NamespaceOptions { by_row: true, stream: true, ..NamespaceOptions::default() };
        with_keys(&shards, 0, |keys| keys.create_namespace(TOPICS, topics).unwrap());
        device.mark(0);
        Self { options, device, store, shards, states: vec![State::default()], stamp: 0 }
    }

    /// A row whose stream belongs to this shard.
    fn row_of(&self, shard: usize) -> &'static [u8] {
        let rows: [&[u8]; 8] = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"];
        let name: &[u8] = b"";
        let mine = |row: &&&[u8]| self.store.shard_in(TOPICS, (**row, name)).unwrap() == shard;
        rows.iter().find(mine).unwrap()
    }

    fn keys<R>(&self, home: usize, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
        with_keys(&self.shards, home, body)
    }

    fn step(&mut self, change: impl FnOnce(&mut State)) {
        let mut state = self.states.last().unwrap().clone();
        change(&mut state);
        self.states.push(state);
    }

    fn commit(&mut self, home: usize) {
        self.keys(home, |keys| keys.commit().unwrap());
        self.device.mark(self.states.len() as u64 - 1);
    }

    fn value(&mut self, length: usize) -> Vec<u8> {
        self.stamp = self.stamp.wrapping_add(1);
        vec![self.stamp; length]
    }

    fn append(&mut self, home: usize, row: &[u8], lengths: &[usize]) {
        let values: Vec<_> = lengths.iter().map(|length| self.value(*length)).collect();
        let parts: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
        self.keys(home, |keys| keys.append_in(TOPICS, row, &parts).unwrap());
        self.step(|state| state.streams.entry(row.to_vec()).or_default().1.extend(values));
    }

    /// A batch of an append with keys before and behind it.
    fn batch(&mut self, home: usize, row: &[u8], length: usize) {
        let value = self.value(length);
        self.keys(home, |keys| {
            keys.begin_batch();
            keys.put(0, b"before", &[&value], PutOptions::default()).unwrap();
            keys.put(0, b"beside", &[&value[..9]], PutOptions::default()).unwrap();
            keys.append_in(TOPICS, row, &[&value]).unwrap();
            keys.put(0, b"behind", &[&value[..40]], PutOptions::default()).unwrap();
            keys.end_batch();
        });
        self.step(|state| {
            state.streams.entry(row.to_vec()).or_default().1.push(value.clone());
            state.keys.insert(b"before".to_vec(), value.clone());
            state.keys.insert(b"beside".to_vec(), value[..9].to_vec());
            state.keys.insert(b"behind".to_vec(), value[..40].to_vec());
        });
    }

    /// Does something to a stream within a batch that lies in the home shard's log.
    fn pinned(
        &mut self,
        home: usize,
        body: impl FnOnce(&mut Keyspace<'_>),
        change: impl FnOnce(&mut State),
    ) {
        let value = self.value(20);
        self.keys(home, |keys| {
            keys.begin_batch();
            keys.put(0, b"pin", &[&value], PutOptions::default()).unwrap();
            body(keys);
            keys.end_batch();
        });
        self.step(|state| {
            state.keys.insert(b"pin".to_vec(), value);
            change(state);
        });
    }

    fn append_pinned(&mut self, home: usize, row: &[u8], length: usize) {
        let value = self.value(length);
        self.pinned(
            home,
            |keys| assert!(keys.append_in(TOPICS, row, &[&value]).is_ok()),
            |state| state.streams.entry(row.to_vec()).or_default().1.push(value.clone()),
        );
    }

    fn truncate(&mut self, home: usize, row: &[u8], first: u64) {
        self.keys(home, |keys| keys.truncate_stream(TOPICS, row, first).unwrap());
        self.step(|state| {
            let stream = state.streams.get_mut(row).unwrap();
            stream.1.drain(..(first - stream.0) as usize);
            stream.0 = first;
        });
    }

    fn delete(&mut self, home: usize, row: &[u8]) {
        self.keys(home, |keys| assert!(keys.delete_stream(TOPICS, row).unwrap()));
        self.step(|state| drop(state.streams.remove(row)));
    }

    fn put(&mut self, home: usize, name: &str, value: Vec<u8>) {
        self.keys(home, |keys| {
            keys.put(0, name.as_bytes(), &[&value], PutOptions::default()).unwrap()
        });
        self.step(|state| drop(state.keys.insert(name.into(), value)));
    }

    fn maintain(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap();
            for _ in 0..40 {
                if !shard.maintain(32 << 10).unwrap().did_work {
                    break;
                }
            }
        }
    }

    fn next(&self, row: &[u8]) -> u64 {
        let stream = &self.states.last().unwrap().streams[row];
        stream.0 + stream.1.len() as u64
    }

    fn check(
        &self,
        image: &CrashImage,
        names: &[Vec<u8>],
        allowed: &[State],
    ) -> Result<(), String> {
        // Before the namespace there is nothing to say.
        let Some(acknowledged) = image.mark().map(|mark| mark as usize) else { return Ok(()) };
        let (pool, _) =
            Pool::open_image(image, &self.options).map_err(|error| error.to_string())?;
        let (store, shards, report) = open(&pool, 1 + acknowledged % 3);
        if report.damaged != 0 {
            return Err(format!("an image without damage is reported damaged: {report:?}"));
        }
        let seen = with_keys(&shards, 0, |keys| observe(keys, names))?;
        let later = &self.states[acknowledged.min(self.states.len())..];
        if !later.contains(&seen) && !allowed.contains(&seen) {
            let show = |state: &State| {
                let ends = |stream: &Contents| (stream.0, stream.1.len());
                let streams: Vec<_> =
                    state.streams.iter().map(|(row, of)| (row, ends(of))).collect();
                format!("{streams:?} {:?}", state.keys.keys().collect::<Vec<_>>())
            };
            let expected = show(&self.states[acknowledged]);
            return Err(format!("{} instead of {expected} (step {acknowledged})", show(&seen)));
        }
        let findings = audit(&store, &shards);
        if !findings.is_empty() {
            return Err(findings.join("; "));
        }
        // Life goes on where the stream ended.
        with_keys(&shards, 0, |keys| {
            for row in ROWS {
                let next = keys.stream(TOPICS, row).unwrap().map_or(0, |ends| ends.next);
                match keys.append_in(TOPICS, row, &[b"on"]) {
                    Ok(position) if position == next => {}
                    Err(KvError::PoolFull { .. }) => {}
                    other => return Err(format!("{other:?} instead of {next}")),
                }
            }
            keys.commit().map_err(|error| error.to_string())
        })
    }

    /// What is wrong with the images of the history, at most a few sentences. States that are `allowed`
    /// besides are so at any time.
    fn violations(&self, limits: &CrashLimits, allowed: &[State]) -> (CrashCounts, Vec<String>) {
        let names: Vec<Vec<u8>> =
            self.states.iter().flat_map(|state| state.keys.keys().cloned()).collect();
        let names: std::collections::BTreeSet<_> = names.into_iter().collect();
        let names: Vec<_> = names.into_iter().collect();
        let mut wrong = Vec::new();
        let counts = for_each_crash_image(&self.device, limits, |image| {
            if wrong.len() < 3
                && let Err(finding) = self.check(image, &names, allowed)
            {
                wrong.push(format!("{finding}\n  {}", image.describe()));
            }
        });
        println!("{counts}");
        assert!(counts.images > 20, "nothing was enumerated");
        (counts, wrong)
    }
}

fn with(bug: Option<KnownBug>, body: impl FnOnce() -> World) -> World {
    match bug {
        Some(bug) => with_known_bug(bug, body),
        None => body(),
    }
}

/// Appends, batches, truncations and deletions; segments are freed and written again.
fn history() -> World {
    let mut world = World::new(18);
    for turn in 0..44_usize {
        let row = ROWS[turn % 3];
        let home = turn / 5 % 2;
        match turn % 11 {
            0 | 4 => world.append(home, row, &[2000, 10, 3000]),
            1 | 7 => world.batch(home, row, 4000 + turn * 11),
            2 | 8 => {
                // Several steps of one commit.
                for length in [9000, 100, 7000, 12_000] {
                    world.append(home, row, &[length]);
                }
                world.batch(home, row, 6000);
            }
            3 => {
                world.append(home, row, &[700]);
                world.truncate(home, row, world.next(row) - 1);
            }
            5 => {
                world.append(home, row, &[8000]);
                world.truncate(home, row, world.next(row));
                world.append(home, row, &[900, 900]);
            }
            6 => world.maintain(),
            9 => {
                world.append(home, row, &[1]);
                world.delete(home, row);
                world.append(home, row, &[50]);
            }
            _ => world.put(home, "before", vec![turn as u8; 5000]),
        }
        world.commit(home);
    }
    world.maintain();
    world
}

#[test]
fn streams_and_their_batches_survive_as_a_whole_or_not_at_all() {
    let world = history();
    let freed = world.store.stats().total;
    assert!(freed.segments_collected + freed.segments_recycled > 2, "{freed:?}");
    let (_, wrong) = world.violations(&limits(150, 10), &[]);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn assert_caught(bug: KnownBug, history: fn() -> World, allowed: &[State]) {
    let world = with(Some(bug), history);
    let (_, wrong) = world.violations(&limits(300, 16), allowed);
    assert!(!wrong.is_empty(), "{bug:?} went unnoticed");
    println!("{bug:?} caught: {}", wrong[0]);
}

#[test]
fn a_gap_between_two_segments_is_caught() {
    assert_caught(KnownBug::GapBetweenSegments, history, &[]);
}

#[test]
fn a_batch_in_two_chains_is_caught() {
    assert_caught(KnownBug::SplitBatch, history, &[]);
}

#[test]
fn a_truncation_that_is_not_persisted_before_its_segments_go_is_caught() {
    assert_caught(KnownBug::RecycleBeforePersist, || cut_off(0), &[]);
}

/// A stream of the first shard, cut off in the log of some shard.
fn cut_off(home: usize) -> World {
    let mut world = World::new(18);
    let row = world.row_of(0);
    for _ in 0..14 {
        world.append(0, row, &[20_000]);
    }
    world.commit(0);
    world.pinned(
        home,
        |keys| assert_eq!(keys.truncate_stream(TOPICS, row, 14).unwrap(), 14),
        |state| *state.streams.get_mut(row).unwrap() = (14, Vec::new()),
    );
    if home == 0 {
        world.commit(0);
    }
    // The shard of the segments wants them back, and writes them again.
    world.maintain();
    for turn in 0..30_u8 {
        // Not acknowledged, and of no stream: only what the segments held matters.
        let mut shard = world.shards[0].lock().unwrap();
        let key = (0..).map(|n: u32| n.to_be_bytes());
        let mut mine = key.filter(|key| world.store.shard_of(1, key) == 0);
        let key = mine.next().unwrap();
        shard.put(1, &key, &[&[turn; 20_000]], PutOptions::default()).unwrap();
        shard.commit().unwrap();
    }
    world.commit(1);
    world
}

#[test]
fn a_stream_cut_off_in_another_log_keeps_its_entries_until_that_is_persisted() {
    for home in [0, 1] {
        let (_, wrong) = cut_off(home).violations(&limits(100, 8), &[]);
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
    assert_caught(KnownBug::ForgetTruncator, || cut_off(1), &[]);
}

/// One stream changed in two logs, one after the other.
fn appended_in_two_logs() -> World {
    let mut world = World::new(14);
    let row = world.row_of(1);
    for turn in 0..6 {
        world.append_pinned(0, row, 100 + turn);
        world.append(1, row, &[200]);
        // Only one of the logs.
        world.shards[1].lock().unwrap().commit().unwrap();
        world.append(1, row, &[300]);
        world.append_pinned(0, row, 400);
        world.commit(turn % 2);
    }
    world
}

#[test]
fn a_stream_changed_in_two_logs_has_no_gap() {
    let (_, wrong) = appended_in_two_logs().violations(&limits(100, 8), &[]);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_caught(KnownBug::AppendAway, appended_in_two_logs, &[]);
}

/// A batch that moves to the chain of streams, and puts where it was; each entry is one line, so that any
/// of them may be on media without its neighbours.
fn moved_batch() -> World {
    let mut world = World::new(12);
    let row = world.row_of(0);
    world.append(0, row, &[10]);
    world.commit(0);
    world.put(0, "first", vec![1; 30]);
    world.commit(0);
    let value = [7; 8];
    world.keys(0, |keys| {
        keys.begin_batch();
        for name in [b"member 1", b"member 2", b"member 3"] {
            keys.put(0, name, &[&value], PutOptions::default()).unwrap();
        }
        keys.append_in(TOPICS, row, &[&value]).unwrap();
        keys.end_batch();
    });
    world.step(|state| {
        for name in [b"member 1", b"member 2", b"member 3"] {
            state.keys.insert(name.to_vec(), value.to_vec());
        }
        state.streams.get_mut(row).unwrap().1.push(value.to_vec());
    });
    for name in ["behind 1", "behind 2", "behind 3"] {
        world.put(0, name, vec![9; 8]);
    }
    world.commit(0);
    world
}

#[test]
fn nothing_connects_to_where_a_batch_was_before_it_moved() {
    // Of what was not acknowledged, the puts may be there and the batch not.
    let mut allowed = Vec::new();
    let world = moved_batch();
    let base = &world.states[2];
    for puts in 0..=3 {
        let mut state = base.clone();
        for name in ["behind 1", "behind 2", "behind 3"].iter().take(puts) {
            state.keys.insert(name.as_bytes().to_vec(), vec![9; 8]);
        }
        allowed.push(state);
    }
    let (_, wrong) = world.violations(&limits(100, 60), &allowed);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
