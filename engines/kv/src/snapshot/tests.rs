//! What a snapshot asks shards about, and how it ends.

use std::cell::Cell;

use super::*;
use crate::{Embedded, PutOptions};

/// A store with `keys` keys, of which `again` were written twice: every second one of the first.
fn store(keys: u32, again: u32) -> Embedded {
    let pool = Pool::dram(&PoolOptions::volatile(64 << 10, 4 << 20)).unwrap();
    let options = StoreOptions { shards: 2, ..StoreOptions::default() };
    let store = Embedded::from(Store::open(pool, options).unwrap());
    store.with_all(|all| {
        for n in (0..keys).chain((0..2 * again).step_by(2)) {
            all.put(0, &n.to_be_bytes(), &[&[7; 100]], PutOptions::default()).unwrap();
        }
    });
    store
}

fn barrier(store: &Embedded) -> Snapshot {
    store.with_all(|keys| keys.begin_snapshot()).unwrap()
}

#[test]
fn shards_are_asked_about_segments_alone_of_which_much_was_superseded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot");
    for (again, least, most) in [(0, 0, 0), (1000, 1000, 3000)] {
        let store = store(4000, again);
        let snapshot = barrier(&store);
        let asked = Cell::new(0);
        let report = snapshot.write_asking(&path, &mut |questions| {
            assert!(questions.list.len() <= TOGETHER);
            asked.set(asked.get() + questions.list.len() as u64);
            snapshot.answer(questions);
        });
        assert_eq!(report.unwrap().records, 4000, "none but the superseded is left out");
        assert!((least..=most).contains(&asked.get()), "{} are looked up", asked.get());
    }
}

#[test]
fn the_thread_that_stands_back_asks_another_one() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (directory.path().join("one"), directory.path().join("other"));
    let store = store(3000, 1500);
    let report = barrier(&store).write(&one).unwrap();
    let writer = std::sync::Mutex::new(None);
    let stand_back = || *writer.lock().unwrap() = Some(std::thread::current().id());
    let beside = barrier(&store).write_beside(&other, stand_back).unwrap();
    assert_eq!((beside.records, beside.bytes), (report.records, report.bytes));
    let writer = writer.into_inner().unwrap();
    assert!(writer.is_some_and(|writer| writer != std::thread::current().id()));
    assert_eq!(check_snapshot(&other).unwrap(), beside);
}

#[test]
fn an_entry_at_a_position_that_no_stream_reaches_is_no_record() {
    for (position, is_one) in
        [(0, true), (u64::MAX >> 1, true), (1 << 63, false), (u64::MAX, false)]
    {
        let mut payload = vec![0; RECORD_BYTES];
        payload[20] = STREAM_KEY_BYTES as u8;
        payload[23] = APPENDED;
        payload[24..28].copy_from_slice(&FIRST_NAMESPACE.to_le_bytes());
        payload.extend_from_slice(&7_u64.to_be_bytes());
        payload.extend_from_slice(&position.to_be_bytes());
        assert_eq!(records_of(&payload).is_some(), is_one, "{position}");
    }
}
