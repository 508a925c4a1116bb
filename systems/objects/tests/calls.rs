//! The calls of a client against a running store.

#![allow(dead_code, clippy::unwrap_used, reason = "helpers of tests, shared between suites")]

mod common;

use std::time::Duration;

use beeline_objects::{Client, ClientOptions, ObjectsError};
use common::{Home, NOW, SOON, bytes, id};

#[test]
fn an_object_is_found_by_others_once_it_is_sealed_and_not_before() {
    let home = Home::new(64 << 20, 0);
    let (writer, reader) = (home.client(), home.client());
    let mut buffer = writer.create(id(1), 5000, b"about", SOON).unwrap();
    assert!(!reader.contains(id(1)).unwrap());
    assert!(matches!(reader.get(id(1), NOW), Err(ObjectsError::TimedOut { .. })));
    assert!(matches!(reader.delete(id(1)), Err(ObjectsError::Unsealed { .. })));
    assert!(matches!(reader.create(id(1), 1, b"", NOW), Err(ObjectsError::Exists { .. })));
    let data = bytes(1, 5000);
    buffer.write_at(0, &data).unwrap();
    assert!(matches!(buffer.write_at(4999, b"ab"), Err(ObjectsError::Outside { .. })));
    writer.seal(buffer).unwrap();
    assert!(reader.contains(id(1)).unwrap());
    let object = reader.get(id(1), NOW).unwrap();
    assert_eq!(object.to_vec(), data);
    assert_eq!(object.metadata(), b"about");
    assert_eq!(object.as_ptr().addr() % 64, 0);
    let own = writer.get(id(1), NOW).unwrap();
    assert_eq!(own.to_vec(), data);
}

#[test]
fn both_map_the_same_memory_and_the_kernel_refuses_to_let_a_reader_write() {
    let home = Home::new(64 << 20, 0);
    let (writer, reader) = (home.client(), home.client());
    writer.put(id(1), &bytes(1, 100_000), b"", SOON).unwrap();
    let object = reader.get(id(1), NOW).unwrap();
    let address = object.as_ptr().addr();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let own = maps.lines().filter(|line| line.contains("memfd:beeline-objects "));
    let mapping = own
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (from, to) = words.next()?.split_once('-')?;
            let range =
                usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
            range.contains(&address).then(|| line.to_owned())
        })
        .next()
        .expect("the object lies in the store's memory");
    assert!(mapping.contains(" r--s "), "{mapping}");
}

#[test]
fn long_objects_come_back_whole_also_where_a_part_of_one_is_copied_inside_it() {
    let home = Home::new(256 << 20, 0);
    let (writer, reader) = (home.client(), home.client());
    let data = bytes(3, (33 << 20) + 5);
    writer.put(id(1), &data, b"about", SOON).unwrap();
    let object = reader.get(id(1), NOW).unwrap();
    assert!(object.to_vec() == data && object.metadata() == b"about");
    // Its first twelve megabytes, written again one byte further on.
    let length = 12 << 20;
    let mut buffer = writer.create(id(2), data.len() as u64, b"", SOON).unwrap();
    buffer.write_at(0, &data).unwrap();
    let own = buffer.as_mut_ptr().cast_const();
    // SAFETY: the buffer's own memory, as long as the object is.
    unsafe { buffer.write_from(1, own, length) }.unwrap();
    // SAFETY: nothing is read.
    let outside = unsafe { buffer.write_from(data.len() as u64, own, 1) };
    assert!(matches!(outside, Err(ObjectsError::Outside { .. })));
    writer.seal(buffer).unwrap();
    let back = reader.get(id(2), NOW).unwrap().to_vec();
    assert!(back[0] == data[0] && back[1..=length] == data[..length]);
    assert!(back[length + 1..] == data[length + 1..]);
}

#[test]
fn a_get_waits_for_the_seal_and_no_longer_than_asked() {
    let home = Home::new(64 << 20, 0);
    let (writer, reader) = (home.client(), home.client());
    let short = Duration::from_millis(30);
    assert!(matches!(reader.get(id(1), short), Err(ObjectsError::TimedOut { .. })));
    let waiting = std::thread::spawn(move || reader.get(id(1), SOON).map(|o| o.to_vec()));
    home.await_figure("waiting", |m| m.objects_waiting_requests.value(), 1);
    writer.put(id(1), b"late", b"", SOON).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap(), b"late");
}

#[test]
fn a_deleted_object_is_gone_at_once_and_its_memory_with_the_last_reference() {
    let home = Home::new(64 << 20, 0);
    let client = home.client();
    client.put(id(1), &bytes(1, 1000), b"", SOON).unwrap();
    let held = client.get(id(1), NOW).unwrap();
    client.delete(id(1)).unwrap();
    assert!(matches!(client.get(id(1), NOW), Err(ObjectsError::NotFound { .. })));
    client.put(id(1), b"another", b"", SOON).unwrap();
    assert_eq!(held.to_vec(), bytes(1, 1000));
    assert_eq!(client.get(id(1), NOW).unwrap().to_vec(), b"another");
    home.await_figure("doomed", |m| m.objects_doomed_objects.value(), 1);
    drop(held);
    home.await_figure("doomed", |m| m.objects_doomed_objects.value(), 0);
    home.await_figure("used", |m| m.objects_used_bytes.value(), 64);
}

#[test]
fn a_subscriber_is_told_once_of_what_was_and_what_will_be_sealed() {
    let home = Home::new(64 << 20, 0);
    let (writer, reader) = (home.client(), home.client());
    writer.put(id(1), b"before", b"", SOON).unwrap();
    reader.subscribe(id(1)).unwrap();
    reader.subscribe(id(2)).unwrap();
    assert_eq!(reader.next_sealed(SOON).unwrap(), Some(id(1)));
    assert_eq!(reader.next_sealed(Duration::from_millis(20)).unwrap(), None);
    writer.put(id(2), b"after", b"", SOON).unwrap();
    assert_eq!(reader.next_sealed(SOON).unwrap(), Some(id(2)));
}

#[test]
fn the_oldest_unreferenced_objects_give_way_and_no_others() {
    let home = Home::new(8 << 20, 0);
    let client = home.client();
    let mega = bytes(3, 1 << 20);
    client.put(id(0), &mega, b"", SOON).unwrap();
    client.put(id(1), &mega, b"", SOON).unwrap();
    client.pin(id(1)).unwrap();
    let held = client.get(id(0), NOW).unwrap();
    for number in 2..30 {
        client.put(id(number), &mega, b"", SOON).unwrap();
    }
    assert!(client.contains(id(0)).unwrap() && client.contains(id(1)).unwrap());
    assert!(!client.contains(id(2)).unwrap() && client.contains(id(29)).unwrap());
    assert_eq!(held.to_vec(), mega);
    let big = client.put(id(100), &bytes(1, 9 << 20), b"", SOON);
    assert!(matches!(big, Err(ObjectsError::TooLarge { .. })), "{big:?}");
}

#[test]
fn a_create_waits_for_memory_and_then_fails_with_a_reason() {
    let home = Home::new(4 << 20, 0);
    let client = home.client();
    let mut held = Vec::new();
    for number in 0.. {
        match client.put(id(number), &bytes(1, 1 << 20), b"", NOW) {
            Ok(()) => held.push(client.get(id(number), NOW).unwrap()),
            Err(error) => {
                assert!(matches!(error, ObjectsError::Full { .. }), "{error}");
                assert!(error.to_string().contains("--objects-memory"), "{error}");
                break;
            }
        }
    }
    assert!(held.len() >= 3, "{}", held.len());
    let other = client.clone();
    let waiting = std::thread::spawn(move || other.put(id(1000), &bytes(2, 1 << 20), b"", SOON));
    home.await_figure("waiting", |m| m.objects_waiting_requests.value(), 1);
    held.pop();
    waiting.join().unwrap().unwrap();
}

#[test]
fn what_memory_has_no_room_for_goes_to_disk_and_comes_back_whole() {
    let home = Home::new(8 << 20, 1 << 30);
    let client = home.client();
    for number in 0..40 {
        client.put(id(number), &bytes(number, 700_000), b"m", SOON).unwrap();
    }
    for number in 0..40 {
        let object = client.get(id(number), NOW).unwrap();
        assert!(object.to_vec() == bytes(number, 700_000), "object {number} differs");
        assert_eq!(object.metadata(), b"m");
    }
    // A caller that must not wait for the disk does not, and brings nothing back.
    let spilled = client.list().unwrap().into_iter().find(|entry| entry.spilled).unwrap().id;
    let handle = home.store.as_ref().unwrap().handle();
    let restores = || {
        handle.publish();
        client.contains(spilled).unwrap();
        handle.metrics().objects_restores.value()
    };
    let before = restores();
    let at_once = client.get_in_memory(spilled);
    assert!(matches!(at_once, Err(ObjectsError::TimedOut { .. })), "{at_once:?}");
    assert_eq!(restores(), before);
    let waited = client.get(spilled, NOW).unwrap();
    assert_eq!(client.get_in_memory(spilled).unwrap().to_vec(), waited.to_vec());
    drop(waited);
    let metrics = home.store.as_ref().unwrap().handle().metrics();
    assert!(metrics.objects_spills.value() >= 20, "{}", metrics.objects_spills.value());
    assert_eq!(client.list().unwrap().len(), 40);
    for number in 0..40 {
        client.delete(id(number)).unwrap();
    }
    home.await_figure("disk", |m| m.objects_disk_bytes.value(), 0);
    home.await_figure("used", |m| m.objects_used_bytes.value(), 0);
}

#[test]
fn entries_of_tiny_objects_count_against_the_limit() {
    // Their 64 bytes each would fit 16,384 times, entries of 256 bytes in half of it 2,048 times.
    let home = Home::new(1 << 20, 0);
    let client = home.client();
    for number in 0..3000 {
        client.put(id(number), b"tiny", b"", SOON).unwrap();
    }
    let here = client.list().unwrap().len();
    assert!((1..=2048).contains(&here), "{here} objects");
    assert!(client.contains(id(2999)).unwrap(), "the newest one is here");
    // On disk they keep their entries: creates wait until some are deleted.
    let home = Home::new(1 << 20, 1 << 30);
    let client = home.client();
    let mut put = 0;
    let refused = loop {
        match client.put(id(put), b"tiny", b"", NOW) {
            Ok(()) => put += 1,
            Err(error) => break error,
        }
        assert!(put < 10_000, "entries without end");
    };
    assert!(matches!(refused, ObjectsError::Full { .. }), "{refused:?}");
    home.await_figure("table", |m| m.objects_table_bytes.value(), u64::from(put) * 256);
    let waiting = client.clone();
    let waiting = std::thread::spawn(move || waiting.put(id(20_000), b"tiny", b"", SOON));
    home.await_figure("waiting", |m| m.objects_waiting_requests.value(), 1);
    for number in 0..put {
        client.delete(id(number)).unwrap();
    }
    waiting.join().unwrap().unwrap();
}

#[test]
fn one_writers_memory_is_given_back_when_another_needs_it() {
    let home = Home::new(8 << 20, 0);
    let (first, second) = (home.client(), home.client());
    for number in 0..6 {
        first.put(id(number), &bytes(1, 1 << 20), b"", SOON).unwrap();
    }
    let reader = home.client();
    drop(reader.get(id(5), NOW).unwrap());
    second.put(id(100), &bytes(2, 6 << 20), b"", SOON).unwrap();
    assert_eq!(reader.get(id(100), NOW).unwrap().to_vec(), bytes(2, 6 << 20));
    assert!(!first.contains(id(0)).unwrap());
}

#[test]
fn small_objects_are_put_by_one_request_each_and_are_as_others() {
    let home = Home::new(64 << 20, 0);
    let (client, other) = (home.client(), home.client());
    let length = |number: u32| number as usize * 97 % 5000;
    // Its segments first: while it maps one, which takes a busy machine long, it gets no reserve.
    for number in 1000..1400 {
        client.put(id(number), &[1; 5000], b"", SOON).unwrap();
    }
    (1000..1400).for_each(|number| client.delete(id(number)).unwrap());
    home.await_figure("deletes", |m| m.objects_deletes.value(), 400);
    let metrics = home.store.as_ref().unwrap().handle().metrics();
    let before = metrics.objects_reserved_puts.value();
    for number in 0..500 {
        client.put(id(number), &bytes(number, length(number)), b"about", SOON).unwrap();
    }
    drop(other.get(id(0), NOW).unwrap());
    home.await_figure("gets", |m| m.objects_gets.value(), 1);
    let reserved = metrics.objects_reserved_puts.value() - before;
    assert!((400..=500).contains(&reserved), "{reserved} of 500 objects were put by one request");
    for number in 0..500 {
        let object = other.get(id(number), NOW).unwrap();
        assert!(object.to_vec() == bytes(number, length(number)), "object {number}");
        assert_eq!(object.metadata(), b"about");
    }
    let taken = client.put(id(7), b"again", b"", SOON);
    assert!(matches!(taken, Err(ObjectsError::Exists { .. })), "{taken:?}");
    client.put(id(500), b"goes on", b"", SOON).unwrap();
    assert_eq!(other.get(id(500), NOW).unwrap().to_vec(), b"goes on");
    for number in 0..=500 {
        other.delete(id(number)).unwrap();
    }
    home.await_figure("used", |m| m.objects_used_bytes.value(), 0);
    // What is left is the reserve, and it goes with its client.
    drop(client);
    home.await_figure("reserved", |m| m.objects_reserved_bytes.value(), 0);
}

#[test]
fn a_waiting_subscriber_and_a_waiting_get_are_told_of_a_small_object() {
    let home = Home::new(64 << 20, 0);
    let (client, other) = (home.client(), home.client());
    for number in 0..40 {
        client.put(id(number), b"first", b"", SOON).unwrap();
    }
    other.subscribe(id(100)).unwrap();
    let waits = other.clone();
    let waiting = std::thread::spawn(move || waits.get(id(100), SOON).unwrap().to_vec());
    home.await_figure("waiting", |m| m.objects_waiting_requests.value(), 1);
    client.put(id(100), b"small", b"", SOON).unwrap();
    assert_eq!(waiting.join().unwrap(), b"small");
    assert_eq!(other.next_sealed(SOON).unwrap(), Some(id(100)));
}

#[test]
fn a_reserve_is_given_back_when_another_needs_the_memory() {
    let home = Home::new(8 << 20, 0);
    let (first, second) = (home.client(), home.client());
    for number in 0..40 {
        first.put(id(number), b"small", b"", SOON).unwrap();
    }
    let handle = home.store.as_ref().unwrap().handle();
    handle.publish();
    second.ping().unwrap();
    assert!(handle.metrics().objects_reserved_puts.value() > 0, "there is no reserve to give back");
    // Takes all there is: small objects go, and the reserve too.
    second.put(id(100), &bytes(2, 8 << 20), b"", SOON).unwrap();
    assert!(!first.contains(id(0)).unwrap());
    second.delete(id(100)).unwrap();
    first.put(id(200), b"small again", b"", SOON).unwrap();
    assert_eq!(second.get(id(200), NOW).unwrap().to_vec(), b"small again");
}

#[test]
fn many_threads_share_a_connection() {
    let home = Home::new(64 << 20, 0);
    let client = home.client();
    let threads: Vec<_> = (0..4_u32)
        .map(|thread| {
            let client = client.clone();
            std::thread::spawn(move || {
                for round in 0..300 {
                    let number = thread * 1000 + round;
                    client.put(id(number), &number.to_le_bytes(), b"", SOON).unwrap();
                    let object = client.get(id(number), SOON).unwrap();
                    assert_eq!(object.to_vec(), number.to_le_bytes());
                    if round % 2 == 0 {
                        client.delete(id(number)).unwrap();
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(client.list().unwrap().len(), 4 * 150);
    let all: Vec<_> = client.list().unwrap().iter().map(|entry| entry.id).collect();
    assert!(client.get_all(&all, NOW).unwrap().iter().all(Result::is_ok));
}

#[test]
fn a_checksum_is_kept_and_verified() {
    let home = Home::new(64 << 20, 0);
    let options = ClientOptions { checksums: true, ..ClientOptions::default() };
    let client = Client::connect_with(&home.socket(), options).unwrap();
    client.put(id(1), &bytes(1, 10_000), b"meta", SOON).unwrap();
    assert_eq!(client.get(id(1), NOW).unwrap().to_vec(), bytes(1, 10_000));
    // A creator that keeps its mapping can break its own objects; who verifies is told.
    let mut buffer = client.create(id(2), 8, b"", SOON).unwrap();
    let place = buffer.as_mut_ptr();
    buffer.seal().unwrap();
    // SAFETY: the segment stays mapped for writing in its creator, this process.
    unsafe { place.write(1) };
    assert!(matches!(client.get(id(2), NOW), Err(ObjectsError::Damaged { .. })));
    let trusting = home.client();
    assert_eq!(trusting.get(id(2), NOW).unwrap().to_vec()[0], 1);
}

#[test]
fn a_client_that_goes_leaves_its_sealed_objects_and_nothing_else() {
    let home = Home::new(64 << 20, 0);
    let (first, second) = (home.client(), home.client());
    first.put(id(1), b"stays", b"", SOON).unwrap();
    let _unsealed = first.create(id(2), 100, b"", SOON).unwrap();
    let _held = first.get(id(1), NOW).unwrap();
    home.await_figure("clients", |m| m.objects_clients.value(), 2);
    drop((first, _unsealed, _held));
    home.await_figure("clients", |m| m.objects_clients.value(), 1);
    assert_eq!(second.get(id(1), NOW).unwrap().to_vec(), b"stays");
    assert!(matches!(second.get(id(2), NOW), Err(ObjectsError::NotFound { .. })));
    second.delete(id(1)).unwrap();
    home.await_figure("used", |m| m.objects_used_bytes.value(), 0);
}

#[test]
fn a_store_that_stops_is_told_to_those_that_wait_and_objects_stay_readable() {
    let mut home = Home::new(64 << 20, 0);
    let client = home.client();
    client.put(id(1), &bytes(1, 1000), b"", SOON).unwrap();
    let held = client.get(id(1), NOW).unwrap();
    let other = client.clone();
    let waiting = std::thread::spawn(move || other.get(id(9), SOON).map(drop));
    home.await_figure("waiting", |m| m.objects_waiting_requests.value(), 1);
    home.store = None;
    assert!(matches!(waiting.join().unwrap(), Err(ObjectsError::StoreGone)));
    assert!(matches!(client.contains(id(1)), Err(ObjectsError::StoreGone)));
    assert!(!client.is_connected());
    assert_eq!(held.to_vec(), bytes(1, 1000));
    home.start(64 << 20, 0);
    let again = home.client();
    assert_ne!(again.generation(), client.generation());
    assert!(again.list().unwrap().is_empty());
}

#[test]
fn no_store_is_told_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let error = Client::connect(&folder.path().join("objects.sock")).unwrap_err();
    assert!(error.to_string().contains("beeline serve"), "{error}");
}
