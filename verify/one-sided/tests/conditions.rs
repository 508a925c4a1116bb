//! The three conditions of the mixed update (BOOM §3.3): each test passes with all of them, and
//! shows what breaks when one is switched off.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

mod common;

use beeline_fabric_sim::SimOptions;
use beeline_kv::wire::{ReplyStatus, RequestKind};
use beeline_kv_client::{Client, ClientError, Command, Conditions, PutOptions};
use common::raw::{RESULT, Raw};
use common::{Outcome, Provider, Rig, RigOptions};

const WITHOUT_C1: Conditions = Conditions { superseded: false, ..Conditions::ALL };
const WITHOUT_C2: Conditions = Conditions { fits: false, ..Conditions::ALL };
const WITHOUT_C3: Conditions = Conditions { unread: false, ..Conditions::ALL };

fn client(rig: &Rig, conditions: Conditions) -> Client {
    rig.client_with(|options| options.conditions = conditions)
}

fn submit(client: &mut Client, key: &[u8], value: &[u8]) {
    let options = PutOptions::default();
    client.submit(Command::Put { database: 0, key, value, options }).unwrap();
}

/// Bytes of the pool that hold `byte`.
fn bytes_in_pool(rig: &Rig, byte: u8) -> usize {
    let mut found = 0;
    for segment in rig.store.pool().segments() {
        let mut bytes = vec![0; segment.length_bytes()];
        segment.read(0, &mut bytes);
        found += bytes.iter().filter(|found| **found == byte).count();
    }
    found
}

/// The client dies in the middle of its second put. What does the key hold?
fn torn_overwrite(conditions: Conditions) -> Outcome {
    let sim = SimOptions { chunk_bytes: 256, ..SimOptions::default() };
    let rig = Rig::new(Provider::Sim, &RigOptions { sim, ..RigOptions::default() });
    let world = rig.world.clone().unwrap();
    let mut reader = rig.client();
    let mut writer = client(&rig, conditions);
    let writers_node = rig.last_node();
    rig.put(&mut writer, b"key", &[b'A'; 4000]);
    submit(&mut writer, b"key", &[b'B'; 4000]);
    while !(1000..3000).contains(&bytes_in_pool(&rig, b'B')) {
        assert!(world.step(), "the write arrives piece by piece");
    }
    // The rest of it never comes.
    world.pause(writers_node);
    rig.run(&mut reader, Command::Get { database: 0, key: b"key" })
}

#[test]
fn c1_keeps_a_torn_overwrite_away_from_the_newest_version() {
    let Outcome::Value(value) = torn_overwrite(Conditions::ALL) else { panic!("the old value") };
    assert!(value == [b'A'; 4000], "the acknowledged value is there");
    let outcome = torn_overwrite(WITHOUT_C1);
    assert!(
        matches!(outcome, Outcome::Failed(ClientError::Damaged)),
        "without C1 an acknowledged value is lost: {outcome:?}"
    );
}

/// A key's third value is longer than its first. What does its neighbour hold?
fn longer_overwrite(provider: Provider, conditions: Conditions) -> Outcome {
    let rig = Rig::new(provider, &RigOptions::default());
    let mut reader = rig.client();
    let mut writer = client(&rig, conditions);
    rig.put(&mut writer, b"key", &[1; 100]);
    rig.put(&mut writer, b"neighbour", &[2; 100]);
    rig.put(&mut writer, b"key", &[3; 100]);
    submit(&mut writer, b"key", &[4; 200]);
    rig.drain(&mut writer);
    rig.run(&mut reader, Command::Get { database: 0, key: b"neighbour" })
}

#[test]
fn c2_keeps_a_long_entry_out_of_its_neighbours_slot() {
    for provider in Provider::all() {
        if provider == Provider::Apart {
            // What the server copies is what it has checked: there a neighbour needs no condition.
            continue;
        }
        let Outcome::Value(value) = longer_overwrite(provider, Conditions::ALL) else {
            panic!("the neighbour is whole")
        };
        assert_eq!(value, [2; 100], "{provider:?}");
        let outcome = longer_overwrite(provider, WITHOUT_C2);
        let lost = matches!(outcome, Outcome::Failed(ClientError::Damaged) | Outcome::Missing);
        assert!(lost, "{provider:?}: without C2 the neighbour is destroyed: {outcome:?}");
    }
}

/// A get of the first version waits for its reader's receive while two more versions are put.
/// What does the reader get?
fn overwritten_while_read(conditions: Conditions) -> Vec<u8> {
    let rig = Rig::new(Provider::Shm, &RigOptions::default());
    let mut writer = client(&rig, conditions);
    rig.put(&mut writer, b"key", &[1; 100]);
    let mut reader = Raw::connect(&rig, 4, 0);
    let request = reader.request(RequestKind::Get, b"key");
    let mut bytes = request.encode().to_vec();
    bytes.extend_from_slice(b"key");
    reader.send(&bytes).unwrap();
    rig.until("the get is looked up", || {
        reader.poll();
        rig.server_counters().of(RequestKind::Get) == 1
    });
    for value in [2, 3] {
        submit(&mut writer, b"key", &[value; 100]);
        rig.drain(&mut writer);
    }
    reader.post_receive(0);
    rig.until("the entry arrives", || {
        reader.poll();
        !reader.placed.is_empty()
    });
    let mut entry = vec![0; reader.placed[0].1 as usize];
    let memory = reader.memory.memory();
    beeline_os::memory::copy_out(memory.as_ref(), RESULT as usize, &mut entry);
    // Once the get is over its version may be overwritten.
    for value in [4, 5, 6] {
        submit(&mut writer, b"key", &[value; 100]);
        rig.drain(&mut writer);
    }
    if conditions == Conditions::ALL {
        assert!(writer.counters().overwrites > 0, "{:?}", writer.counters());
    }
    entry
}

#[test]
fn c3_keeps_an_entry_in_place_while_a_get_reads_it() {
    let value_of = |entry: &[u8]| entry[48 + 3..].to_vec();
    let entry = overwritten_while_read(Conditions::ALL);
    assert!(value_of(&entry) == [1; 100], "the get delivers the version it looked up");
    let entry = overwritten_while_read(WITHOUT_C3);
    assert!(value_of(&entry) != [1; 100], "without C3 it delivers something else");
    assert_eq!(entry[..8], [0; 8], "something that was never accepted");
}

#[test]
fn replies_name_the_smallest_version_being_read() {
    let rig = Rig::new(Provider::Shm, &RigOptions::default());
    let mut writer = rig.client();
    let first = rig.put(&mut writer, b"key", b"1");
    let mut readers: Vec<_> = (0..3).map(|_| Raw::connect(&rig, 4, 0)).collect();
    let mut raw = Raw::connect(&rig, 8, 8);
    let grant = raw.grant(&rig);
    let mut offset = beeline_kv::entry::FIRST_ENTRY;
    let mut put = |raw: &mut Raw| {
        let entry = common::raw::entry(b"key", b"x", 0);
        let reply = raw.announce(&rig, &grant, offset, &entry);
        offset += entry.len() as u32;
        assert_eq!(reply.status, ReplyStatus::Ok);
        reply
    };
    let none = put(&mut raw);
    assert_eq!(none.minimum_reading, beeline_kv::wire::NOTHING_READING);
    let mut versions = vec![none.version];
    for (number, reader) in readers.iter_mut().enumerate() {
        let request = reader.request(RequestKind::Get, b"key");
        let mut bytes = request.encode().to_vec();
        bytes.extend_from_slice(b"key");
        reader.send(&bytes).unwrap();
        rig.until("the get is looked up", || {
            reader.poll();
            rig.server_counters().of(RequestKind::Get) == number as u64 + 1
        });
        let reply = put(&mut raw);
        assert_eq!(reply.minimum_reading, versions[0], "the oldest of {}", number + 1);
        versions.push(reply.version);
    }
    assert!(versions[0] > first);
    // The readers end in the order they began, by dying: the minimum moves up.
    for number in 0..3 {
        drop(readers.remove(0));
        let clients = rig.nodes.borrow()[0].server.clients();
        rig.until("the server notices", || rig.nodes.borrow()[0].server.clients() < clients);
        let reply = put(&mut raw);
        let expected = versions[1..].get(number).filter(|_| number < 2).copied();
        assert_eq!(reply.minimum_reading, expected.unwrap_or(beeline_kv::wire::NOTHING_READING));
    }
}

#[test]
fn an_unaccepted_entry_is_never_shown() {
    // The misread that C3 prevents is also caught by the client: what carries no version is not
    // an entry, and it asks again.
    let rig = Rig::new(Provider::Sim, &RigOptions::default());
    let mut client = rig.client();
    rig.put(&mut client, b"key", b"value");
    let segments = rig.store.pool().segments();
    for segment in &segments {
        segment.store(64, &[0; 16]);
    }
    let outcome = rig.run(&mut client, Command::Get { database: 0, key: b"key" });
    assert!(matches!(outcome, Outcome::Failed(ClientError::Damaged)), "{outcome:?}");
    assert_eq!(rig.server_counters().of(RequestKind::VerifiedGet), 1);
}
