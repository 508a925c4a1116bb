//! The change feed: what a reader that follows it knows, against the store; who falls off is told.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use beeline_env::ManualClock;
use beeline_kv::{
    Event, EventKind, Keyspace, KvError, NamespaceOptions, Opened, PutOptions, Shard, Store,
    StoreOptions,
};
use beeline_pmem::{Pool, PoolOptions};

const SPACE: u32 = 300;

fn open(pool: &Pool, shards: usize, feed_bytes: u64) -> Opened {
    let clock = Arc::new(ManualClock::new(1_000_000));
    let options = StoreOptions { shards, clock, feed_bytes, ..StoreOptions::default() };
    Store::open(pool.clone(), options).unwrap()
}

fn pool() -> Pool {
    Pool::dram(&PoolOptions::volatile(64 << 10, 64 * (64 << 10))).unwrap()
}

fn with_all<R>(
    shards: &[Arc<Mutex<Shard>>],
    home: usize,
    body: impl FnOnce(&mut Keyspace<'_>) -> R,
) -> R {
    let mut guards: Vec<_> = shards.iter().map(|shard| shard.lock().unwrap()).collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), home))
}

/// A reader and what it knows: namespace and key to the version of the newest value.
#[derive(Default)]
struct Reader {
    position: u64,
    known: BTreeMap<(u32, Vec<u8>), u64>,
    seen: u64,
}

impl Reader {
    fn take(&mut self, event: &Event) {
        self.seen += 1;
        let key = (event.namespace, event.key.to_vec());
        match event.kind {
            EventKind::Put { .. } => drop(self.known.insert(key, event.version)),
            EventKind::Delete => drop(self.known.remove(&key)),
            EventKind::Clear => self.known.retain(|known, _| known.0 != event.namespace),
            _ => panic!("a kind that no test knows"),
        }
    }

    fn follow(&mut self, store: &Store, limit: usize) {
        let got = store.events(self.position, limit).unwrap();
        let mut last = self.position;
        for event in &got.events {
            let cleared = event.kind == EventKind::Clear && event.version == last;
            assert!(event.version > last || cleared, "versions go up");
            last = event.version;
            self.take(event);
        }
        assert!(got.next >= last && got.next >= self.position);
        self.position = got.next;
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[test]
fn a_reader_that_follows_knows_what_the_store_holds() {
    for seed in 1..25_u64 {
        let pool = pool();
        let (store, shards, _) = open(&pool, 3, 1 << 20);
        let mut random = Random(seed * 0x9E37_79B9);
        let options = NamespaceOptions { ordered: true, ..NamespaceOptions::default() };
        with_all(&shards, 0, |keys| keys.create_namespace(SPACE, options).unwrap());
        let mut reader = Reader::default();
        let mut model = BTreeMap::new();
        for turn in 0..300_u64 {
            let before = reader.position;
            with_all(&shards, random.below(3) as usize, |keys| {
                let batch = random.below(3) == 0;
                if batch {
                    keys.begin_batch();
                }
                for _ in 0..=random.below(if batch { 4 } else { 1 }) {
                    let name = vec![b'k', random.below(30) as u8];
                    let (number, value) = ([0, 5, SPACE][random.below(3) as usize], [7_u8; 400]);
                    let key = (number, name.clone());
                    if random.below(4) == 0 {
                        let gone = keys.delete_in(number, name.as_slice()).unwrap();
                        assert_eq!(gone, model.remove(&key).is_some());
                    } else {
                        let options = PutOptions::default();
                        let put = keys.put_in(number, name.as_slice(), &[&value], options);
                        model.insert(key, put.unwrap());
                    }
                }
                // What is not persisted is not told.
                let early = store.events(before, 1000).unwrap();
                let known = early.next;
                if batch {
                    keys.end_batch();
                }
                assert_eq!(store.events(before, 1000).unwrap().next, known);
                keys.commit().unwrap();
            });
            match random.below(40) {
                0 => {
                    with_all(&shards, 0, |keys| keys.flush(Some(5)).unwrap());
                    model.retain(|key, _| key.0 != 5);
                }
                1 => {
                    with_all(&shards, 0, |keys| keys.flush(None).unwrap());
                    model.retain(|key, _| key.0 == SPACE);
                }
                2 => {
                    with_all(&shards, 0, |keys| keys.clear_namespace(SPACE).unwrap());
                    model.retain(|key, _| key.0 != SPACE);
                }
                3 => {
                    with_all(&shards, 1, |keys| {
                        assert!(keys.drop_namespace(SPACE).unwrap());
                        keys.create_namespace(SPACE, options).unwrap();
                    });
                    model.retain(|key, _| key.0 != SPACE);
                }
                4 => {
                    for shard in &shards {
                        let mut shard = shard.lock().unwrap();
                        while shard.maintain(1 << 20).unwrap().did_work {}
                    }
                }
                _ => {}
            }
            if random.below(3) == 0 {
                reader.follow(&store, 1 + random.below(20) as usize);
            }
            if turn % 50 == 49 {
                let mut last = u64::MAX;
                while last != reader.position {
                    last = reader.position;
                    reader.follow(&store, 7);
                }
                assert_eq!(reader.known, model, "seed {seed}, turn {turn}");
                assert_eq!(store.feed_stats().newest, reader.position);
            }
        }
    }
}

#[test]
fn nothing_is_told_before_what_is_older_is_persisted() {
    let pool = pool();
    let (store, shards, _) = open(&pool, 2, 1 << 20);
    let put = |shard: usize, name: u32| {
        let mine = (0_u32..).map(|salt| [name.to_be_bytes(), salt.to_be_bytes()].concat());
        let mut mine = mine.filter(|key| store.shard_of(0, key) == shard);
        let options = PutOptions::default();
        shards[shard].lock().unwrap().put(0, &mine.next().unwrap(), &[b"v"], options).unwrap()
    };
    let first = put(0, 1);
    let second = put(1, 2);
    shards[1].lock().unwrap().commit().unwrap();
    // The second is persisted, and the first, which is older, may still come.
    let early = store.events(0, 10).unwrap();
    assert_eq!((early.events.len(), early.next < first), (0, true));
    assert_eq!(store.feed_stats().newest, early.next);
    let third = put(0, 3);
    shards[0].lock().unwrap().commit().unwrap();
    let told = store.events(early.next, 10).unwrap();
    let versions: Vec<_> = told.events.iter().map(|event| event.version).collect();
    assert_eq!((versions, told.next), (vec![first, second, third], third));
}

#[test]
fn a_batch_is_told_as_one() {
    let pool = pool();
    let (store, shards, _) = open(&pool, 2, 1 << 20);
    with_all(&shards, 1, |keys| {
        keys.begin_batch();
        for name in [b"a", b"b", b"c"] {
            keys.put(2, name, &[b"value"], PutOptions::default()).unwrap();
        }
        keys.end_batch();
        keys.put(2, b"d", &[b"alone"], PutOptions { kind: 0, expires_at_ms: 9_000_000 }).unwrap();
        keys.commit().unwrap();
    });
    let events = store.events(0, 100).unwrap().events;
    let told: Vec<_> = events.iter().map(|event| (&*event.key, event.more)).collect();
    let wanted: [(&[u8], bool); 4] = [(b"a", true), (b"b", true), (b"c", false), (b"d", false)];
    assert_eq!(told, wanted);
    let last = EventKind::Put { kind: 0, value_length: 5, expires_at_ms: 9_000_000 };
    assert_eq!((events[3].kind, events[3].namespace), (last, 2));
}

#[test]
fn fields_of_hashes_are_named_and_what_upkeep_removes_is_not_told() {
    let pool = pool();
    let (store, shards, _) = open(&pool, 2, 1 << 20);
    with_all(&shards, 0, |keys| {
        let mut row = keys.new_row(1, 0).unwrap();
        keys.begin_batch();
        keys.put_field(4, b"hash", &mut row, b"one", &[b"1"]).unwrap();
        keys.put_field(4, b"hash", &mut row, b"", &[b"2"]).unwrap();
        keys.put_head(4, b"hash", &row).unwrap();
        keys.end_batch();
        keys.delete_field(4, b"hash", &mut row, b"one").unwrap();
        keys.delete(4, b"hash").unwrap();
        keys.commit().unwrap();
    });
    let events = store.events(0, 100).unwrap();
    let told: Vec<_> = events
        .events
        .iter()
        .map(|event| {
            let (key, field) = event.key_and_field();
            assert_eq!((event.namespace, key), (4, b"hash".as_slice()));
            (field.map(<[u8]>::to_vec), event.kind == EventKind::Delete)
        })
        .collect();
    let field = |name: &[u8]| Some(name.to_vec());
    let wanted = [
        (field(b"one"), false),
        (field(b""), false),
        (None, false),
        (field(b"one"), true),
        (None, true),
    ];
    assert_eq!(told, wanted);
    for shard in &shards {
        let mut shard = shard.lock().unwrap();
        while shard.maintain(1 << 20).unwrap().did_work {}
    }
    assert_eq!(store.stats().total.keys, 0, "the field that was left is gone");
    assert_eq!(store.events(events.next, 100).unwrap().events, []);
}

#[test]
fn a_reader_that_falls_off_is_told_where_to_begin_anew() {
    let pool = pool();
    let (store, shards, _) = open(&pool, 1, 1);
    let put = |n: u32| {
        let mut shard = shards[0].lock().unwrap();
        shard.put(0, &n.to_be_bytes(), &[b"value"], PutOptions::default()).unwrap();
        shard.commit().unwrap();
    };
    put(0);
    let slow = store.events(0, 10).unwrap().next;
    for n in 1..3000 {
        put(n);
    }
    let stats = store.feed_stats();
    assert!(stats.dropped > 0 && stats.bytes <= 64 << 10, "{stats:?}");
    assert_eq!(stats.events + stats.dropped, 3000);
    let Err(error) = store.events(slow, 10) else { panic!("it fell off") };
    let KvError::FeedLost { position, oldest, newest } = error else { panic!("{error}") };
    assert_eq!((position, oldest, newest), (slow, stats.oldest, stats.newest));
    // From the oldest position nothing is missing, and the newest one goes on.
    let kept = store.events(oldest, usize::MAX - 100).unwrap();
    assert_eq!(kept.events.len() as u64, stats.events);
    assert_eq!(kept.events.last().unwrap().version, newest);
    put(1);
    assert_eq!(store.events(newest, 10).unwrap().events.len(), 1);
    assert!(matches!(store.events(newest + 100, 10), Err(KvError::FeedLost { .. })));
    // An opening ends positions; where nothing is kept, nothing can be followed.
    drop((store, shards));
    let (store, shards, _) = open(&pool, 2, 1 << 20);
    assert!(matches!(store.events(newest, 10), Err(KvError::FeedLost { .. })));
    assert_eq!(store.events(store.feed_stats().newest, 10).unwrap().events, []);
    drop((store, shards));
    assert!(matches!(open(&pool, 1, 0).0.events(0, 10), Err(KvError::FeedOff)));
}

#[test]
fn a_snapshot_that_replaces_the_contents_ends_positions() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot");
    let (other, others, _) = open(&pool(), 1, 0);
    others[0].lock().unwrap().put(0, b"theirs", &[b"x"], PutOptions::default()).unwrap();
    let snapshot = with_all(&others, 0, |keys| keys.begin_snapshot().unwrap());
    snapshot.write(&path).unwrap();
    drop((other, others));
    let (store, shards, _) = open(&pool(), 2, 1 << 20);
    with_all(&shards, 0, |keys| {
        keys.put(0, b"ours", &[b"x"], PutOptions::default()).unwrap();
        keys.commit().unwrap();
    });
    let before = store.events(0, 10).unwrap();
    assert_eq!(before.events.len(), 1);
    beeline_kv::replace_by_snapshot(&path, &store, &shards).unwrap();
    assert!(matches!(store.events(before.next, 10), Err(KvError::FeedLost { .. })));
    let position = store.feed_stats().newest;
    with_all(&shards, 0, |keys| {
        keys.delete(0, b"theirs").unwrap();
        keys.commit().unwrap();
    });
    assert_eq!(store.events(position, 10).unwrap().events.len(), 1);
}

#[test]
fn an_entry_that_makes_room_by_a_commit_is_told_after_it() {
    // So small that segments are collected all the time, in the middle of puts.
    let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 8 * (64 << 10))).unwrap();
    let (store, shards, _) = open(&pool, 1, 8 << 20);
    let mut reader = Reader::default();
    for n in 0..4000_u32 {
        let mut shard = shards[0].lock().unwrap();
        let key = (n % 40).to_be_bytes();
        shard.put(0, &key, &[&[1; 3000]], PutOptions::default()).unwrap();
        if n % 3 == 0 {
            shard.commit().unwrap();
        }
        drop(shard);
        reader.follow(&store, 1000);
    }
    shards[0].lock().unwrap().commit().unwrap();
    reader.follow(&store, 1000);
    assert_eq!(reader.seen, 4000, "each put is told once");
    assert!(store.stats().total.segments_collected + store.stats().total.segments_recycled > 50);
}

#[test]
fn readers_beside_writers_miss_nothing_and_see_nothing_twice() {
    const PUTS: u64 = 6000;
    let pool = Pool::dram(&PoolOptions::volatile(1 << 20, 64 << 20)).unwrap();
    let (store, shards, _) = open(&pool, 3, 64 << 20);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = shards
            .iter()
            .map(|shard| {
                scope.spawn(|| {
                    let index = shard.lock().unwrap().index();
                    for n in 0..PUTS {
                        let mut shard = shard.lock().unwrap();
                        let mine = (0_u64..).map(|salt| (n << 16 | salt).to_be_bytes());
                        let mut mine = mine.filter(|key| store.shard_of(0, key) == index);
                        shard
                            .put(0, &mine.next().unwrap(), &[b"v"], PutOptions::default())
                            .unwrap();
                        if n % 5 == 4 {
                            shard.commit().unwrap();
                        }
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let mut reader = Reader::default();
            loop {
                let last = done.load(Ordering::Acquire);
                let before = reader.position;
                reader.follow(&store, 100);
                if last && before == reader.position {
                    return reader;
                }
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Release);
        let reader = reader.join().unwrap();
        assert_eq!(reader.seen, 3 * PUTS);
        assert_eq!(reader.known.len() as u64, store.stats().total.keys);
    });
}

#[test]
fn a_reader_that_begins_while_a_ring_wraps_is_not_lost() {
    let pool = pool();
    let (store, shards, _) = open(&pool, 2, 1);
    let mut salts = 0_u32..;
    let mut put = |shard: usize| {
        let mut mine = salts.by_ref().map(u32::to_be_bytes);
        let key = mine.find(|key| store.shard_of(0, key) == shard).unwrap();
        shards[shard].lock().unwrap().put(0, &key, &[b"v"], PutOptions::default()).unwrap()
    };
    let commit = |shard: usize| shards[shard].lock().unwrap().commit().unwrap();
    let late = put(0);
    let mut last = 0;
    for _ in 0..3000 {
        last = put(1);
        commit(1);
    }
    let stats = store.feed_stats();
    assert!(stats.dropped > 0 && stats.oldest > late, "{stats:?}");
    let begin = store.events_from_now().unwrap();
    assert_eq!((begin.events.len(), begin.next), (0, stats.newest));
    assert_eq!(store.events(begin.next, 10).unwrap().next, begin.next);
    commit(0);
    let next = put(0);
    commit(0);
    let told = store.events(begin.next, usize::MAX - 100).unwrap();
    let versions: Vec<_> = told.events.iter().map(|event| event.version).collect();
    assert!(versions.starts_with(&[stats.newest + 1]), "what the other ring keeps");
    assert!(versions.ends_with(&[last, next]), "and what came after the beginning");
}

#[test]
fn a_refused_entry_holds_no_reader_up() {
    for batch in [false, true] {
        let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 12 * (64 << 10))).unwrap();
        let (store, shards, _) = open(&pool, 2, 8 << 20);
        let keys_of = |shard: usize| {
            let store = &store;
            let all = (0_u32..).map(u32::to_be_bytes);
            all.filter(move |key| store.shard_of(0, key) == shard)
        };
        let put = |shard: &mut Shard, key: [u8; 4], length: usize| {
            shard.put(0, &key, &[&vec![1; length]], PutOptions::default())
        };
        let mut theirs = keys_of(1);
        {
            let mut shard = shards[1].lock().unwrap();
            put(&mut shard, theirs.next().unwrap(), 10).unwrap();
            shard.commit().unwrap();
        }
        let mut shard = shards[0].lock().unwrap();
        for key in keys_of(0) {
            if batch {
                shard.begin_batch();
            }
            let stored = put(&mut shard, key, 20_000);
            if batch {
                shard.end_batch();
            }
            match stored {
                Ok(_) => shard.commit().unwrap(),
                Err(KvError::PoolFull { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        drop(shard);
        let before = store.events(0, 10_000).unwrap().next;
        let mut shard = shards[1].lock().unwrap();
        let version = put(&mut shard, theirs.next().unwrap(), 10).unwrap();
        shard.commit().unwrap();
        let told = store.events(before, 10).unwrap();
        assert_eq!((told.events.len(), told.next), (1, version), "in a batch: {batch}");
    }
}
