//! What a user expects of the client, on every provider and protocol.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use beeline_kv::wire::{Protocol, RequestKind, pop_scan_record};
use beeline_kv_client::{ClientError, Command, PutOptions};
use beeline_kv_server::ServerOptions;
use common::{Outcome, Provider, Rig, RigOptions};
use proptest::prelude::*;

fn everywhere(test: impl Fn(&Rig, Protocol)) {
    for provider in Provider::all() {
        for protocol in provider.protocols() {
            let options = RigOptions { shards: 2, ..RigOptions::default() };
            test(&Rig::new(provider, &options), protocol);
        }
    }
}

#[test]
fn what_was_put_is_read_back_whatever_its_size() {
    everywhere(|rig, protocol| {
        let mut client = rig.speaking(protocol);
        for (number, length) in [0_usize, 1, 63, 64, 100, 4096, 5000, 16_000].iter().enumerate() {
            let key = format!("key {number}");
            let value: Vec<u8> = (0..*length).map(|i| (i + number) as u8).collect();
            rig.put(&mut client, key.as_bytes(), &value);
            assert_eq!(rig.get(&mut client, key.as_bytes()), Some(value), "{protocol:?} {length}");
        }
        assert_eq!(rig.get(&mut client, b"never put"), None);
    });
}

#[test]
fn a_value_longer_than_the_result_memory_arrives_after_one_retry() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = rig.client();
        let value = vec![9; 200_000];
        rig.put(&mut client, b"large", &value);
        assert_eq!(rig.get(&mut client, b"large").unwrap().len(), value.len());
        assert_eq!(client.counters().retries, 1, "{provider:?}");
        // The slot that grew is the one used next: the most recently freed.
        assert_eq!(rig.get(&mut client, b"large").unwrap(), value);
        assert_eq!(client.counters().retries, 1, "{provider:?}");
    }
}

#[test]
fn a_deleted_key_is_gone_and_deleting_says_whether_it_was_there() {
    everywhere(|rig, protocol| {
        let mut client = rig.speaking(protocol);
        rig.put(&mut client, b"key", b"value");
        let delete = Command::Delete { database: 0, key: b"key" };
        assert!(matches!(rig.run(&mut client, delete), Outcome::Stored(_)), "{protocol:?}");
        assert_eq!(rig.get(&mut client, b"key"), None, "{protocol:?}");
        assert!(matches!(rig.run(&mut client, delete), Outcome::Missing), "{protocol:?}");
        rig.put(&mut client, b"key", b"again");
        assert_eq!(rig.get(&mut client, b"key").as_deref(), Some(&b"again"[..]));
    });
}

#[test]
fn databases_are_apart_and_there_are_sixteen() {
    everywhere(|rig, protocol| {
        let mut client = rig.speaking(protocol);
        let options = PutOptions::default();
        for database in [0_u8, 1, 15] {
            let value = [database];
            let put = Command::Put { database, key: b"key", value: &value, options };
            assert!(matches!(rig.run(&mut client, put), Outcome::Stored(_)));
        }
        for database in [0_u8, 1, 15] {
            let get = Command::Get { database, key: b"key" };
            let Outcome::Value(value) = rig.run(&mut client, get) else { panic!("no value") };
            assert_eq!(value, [database]);
        }
        let refused = client.submit(Command::Get { database: 16, key: b"key" });
        assert!(matches!(refused, Err(ClientError::NoSuchDatabase { database: 16 })));
    });
}

#[test]
fn an_entry_past_its_time_is_not_found() {
    let rig = Rig::new(Provider::Sim, &RigOptions::default());
    let mut client = rig.client();
    let world = rig.world.clone().unwrap();
    let at = beeline_env::Clock::unix_ms(world.clock().as_ref()) + 1000;
    let options = PutOptions { expires_at_ms: at, kind: 0 };
    let put = Command::Put { database: 0, key: b"key", value: b"value", options };
    assert!(matches!(rig.run(&mut client, put), Outcome::Stored(_)));
    assert!(rig.get(&mut client, b"key").is_some());
    world.run_for(Duration::from_millis(1500));
    assert_eq!(rig.get(&mut client, b"key"), None);
}

#[test]
fn a_scan_meets_every_key_once() {
    everywhere(|rig, protocol| {
        let mut client = rig.speaking(protocol);
        for number in 0..300 {
            rig.put(&mut client, format!("key {number}").as_bytes(), b"v");
        }
        let mut met = BTreeMap::new();
        for shard in 0..client.shards() {
            let mut cursor = 0;
            loop {
                let scan = Command::Scan { database: 0, shard, cursor, count: 17 };
                let Outcome::Keys { next, records } = rig.run(&mut client, scan) else {
                    panic!("a scan gives keys")
                };
                let mut records = records.as_slice();
                while let Some((key, _)) = pop_scan_record(&mut records) {
                    *met.entry(key.to_vec()).or_insert(0) += 1;
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
        }
        assert_eq!(met.len(), 300, "{protocol:?}");
        assert!(met.values().all(|times| *times == 1), "{protocol:?}");
    });
}

#[test]
fn statistics_and_pings_are_answered() {
    everywhere(|rig, protocol| {
        let mut client = rig.speaking(protocol);
        rig.put(&mut client, b"key", b"value");
        assert!(matches!(rig.run(&mut client, Command::Ping { shard: 1 }), Outcome::Pong));
        let shard = client.shard_of(0, b"key");
        let Outcome::Text(text) = rig.run(&mut client, Command::Statistics { shard }) else {
            panic!("statistics are text")
        };
        assert!(text.contains("keys 1\n"), "{text}");
    });
}

#[test]
fn a_key_goes_straight_to_its_shard() {
    for provider in Provider::all() {
        let options = RigOptions { shards: 4, ..RigOptions::default() };
        let rig = Rig::new(provider, &options);
        let mut client = rig.client();
        assert_eq!(client.shards(), 4);
        for number in 0..64 {
            rig.put(&mut client, format!("{number}").as_bytes(), b"v");
        }
        for node in rig.nodes.borrow().iter() {
            let keys = node.shard.lock().unwrap().len(0);
            let announced = node.server.counters().announcements;
            assert_eq!(keys, announced, "{provider:?}: every entry went to its own shard");
            assert!(keys > 0, "{provider:?}: 64 keys spread over 4 shards");
        }
    }
}

#[test]
fn a_full_window_is_said_and_polling_makes_room() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = rig.client_with(|options| options.window = 4);
        for _ in 0..4 {
            client.submit(Command::Ping { shard: 0 }).unwrap();
        }
        let refused = client.submit(Command::Ping { shard: 0 });
        assert!(matches!(refused, Err(ClientError::WindowFull { window: 4 })), "{provider:?}");
        assert_eq!(rig.drain(&mut client).len(), 4);
        client.submit(Command::Ping { shard: 0 }).unwrap();
        rig.drain(&mut client);
    }
}

#[test]
fn the_first_of_a_burst_is_posted_at_once_and_the_rest_together() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = rig.client();
        let before = client.counters().sends;
        let posted = |client: &beeline_kv_client::Client| client.counters().sends - before;
        let submit = |client: &mut beeline_kv_client::Client, count: u32| {
            for _ in 0..count {
                client.submit(Command::Ping { shard: 0 }).unwrap();
            }
        };
        submit(&mut client, 1);
        assert_eq!(posted(&client), 1, "{provider:?}");
        submit(&mut client, 7);
        assert_eq!(posted(&client), 1, "{provider:?}: an answer is outstanding");
        submit(&mut client, 1);
        assert_eq!(posted(&client), 9, "{provider:?}: eight wait");
        submit(&mut client, 3);
        client.flush();
        assert_eq!(posted(&client), 12, "{provider:?}");
        assert_eq!(rig.drain(&mut client).len(), 12);
        submit(&mut client, 4);
        assert_eq!(rig.drain(&mut client).len(), 4, "{provider:?}: a poll posts what waits");
    }
}

#[test]
fn limits_are_named() {
    let rig = Rig::new(Provider::Sim, &RigOptions::default());
    let mut client = rig.client();
    let options = PutOptions::default();
    let huge = vec![0; 300 << 10];
    let put = client.submit(Command::Put { database: 0, key: b"key", value: &huge, options });
    assert!(matches!(put, Err(ClientError::TooLarge { limit, .. }) if limit == (256 << 10) - 64));
    let key = vec![b'k'; 70_000];
    let put = client.submit(Command::Put { database: 0, key: &key, value: b"", options });
    assert!(matches!(put, Err(ClientError::KeyTooLong { limit: 65_535, .. })));
    let get = client.submit(Command::Get { database: 0, key: &key[..1000] });
    assert!(matches!(get, Err(ClientError::KeyTooLong { length: 1000, .. })));
    assert_eq!(client.outstanding(), 0);
}

#[test]
fn long_keys_are_read_by_a_client_that_asked_for_them() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = rig.client_with(|options| options.longest_key_bytes = 65_535);
        let key = vec![b'k'; 65_000];
        rig.put(&mut client, &key, b"value");
        assert_eq!(rig.get(&mut client, &key).as_deref(), Some(&b"value"[..]));
        assert!(client.submit(Command::Get { database: 0, key: &key }).is_ok());
        rig.drain(&mut client);
    }
}

#[test]
fn a_full_pool_is_an_error_and_deleting_still_works_afterwards() {
    let options = RigOptions { capacity_bytes: 4 << 20, ..RigOptions::default() };
    let rig = Rig::new(Provider::Sim, &options);
    let mut client = rig.client();
    let mut stored = 0_u32;
    let full = loop {
        let (key, value) = (stored.to_le_bytes(), [5; 4000]);
        let options = PutOptions::default();
        match rig.run(&mut client, Command::Put { database: 0, key: &key, value: &value, options })
        {
            Outcome::Stored(_) => stored += 1,
            Outcome::Failed(error) => break error,
            other => panic!("{other:?}"),
        }
        assert!(stored < 2000, "the pool fills up");
    };
    assert!(matches!(full, ClientError::PoolFull), "{full:?}");
    assert!(full.is_retryable());
    for number in 0..stored {
        assert_eq!(rig.get(&mut client, &number.to_le_bytes()), Some(vec![5; 4000]));
    }
}

#[test]
fn baselines_are_refused_unless_offered() {
    let options = RigOptions { server: ServerOptions::default(), ..RigOptions::default() };
    let rig = Rig::new(Provider::Sim, &options);
    let mut client_options = rig.client_options();
    client_options.protocol = Protocol::TwoPhase;
    let refused = beeline_kv_client::Client::connect(rig.connector(), client_options);
    let Err(ClientError::Refused { refusal, .. }) = refused else { panic!("refused") };
    assert_eq!(refusal, beeline_kv::wire::Refusal::Protocol);
}

#[test]
fn a_pipeline_switches_segments_without_losing_or_reordering() {
    for provider in Provider::all() {
        for protocol in provider.protocols() {
            if protocol == Protocol::Oblivious {
                continue;
            }
            let options = RigOptions { segment_bytes: 64 << 10, ..RigOptions::default() };
            let rig = Rig::new(provider, &options);
            let mut client = rig.client_with(|options| {
                options.protocol = protocol;
                options.mixed_update = false;
            });
            for round in 0..20_u32 {
                for _ in 0..client.options().window {
                    let value = [round as u8; 1000];
                    let options = PutOptions::default();
                    let put = Command::Put { database: 0, key: b"same", value: &value, options };
                    client.submit(put).unwrap();
                }
                let outcomes = rig.drain(&mut client);
                let mut versions: Vec<_> = outcomes
                    .into_iter()
                    .map(|(token, outcome)| match outcome {
                        Outcome::Stored(version) => (token, version),
                        other => panic!("{other:?}"),
                    })
                    .collect();
                versions.sort_unstable();
                let ordered = versions.windows(2).all(|pair| pair[0].1 < pair[1].1);
                assert!(ordered, "{provider:?} {protocol:?}: versions follow submission");
                assert_eq!(rig.get(&mut client, b"same"), Some(vec![round as u8; 1000]));
            }
            assert_eq!(rig.server_counters().rejected, 0, "{provider:?} {protocol:?}");
            assert!(rig.server_counters().grants > 5);
        }
    }
}

#[test]
fn the_mixed_update_overwrites_and_the_server_refuses_none_of_it() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = rig.client();
        for round in 0..200_u32 {
            for key in 0..4_u8 {
                let value = vec![round as u8; 50 + (round as usize * 7 + key as usize) % 30];
                rig.put(&mut client, &[key], &value);
                assert_eq!(rig.get(&mut client, &[key]), Some(value));
            }
        }
        let counters = client.counters();
        assert!(counters.overwrites > 600, "{provider:?} {counters:?}");
        assert_eq!(rig.server_counters().rejected, 0);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, u16),
    Delete(u8),
    Get(u8),
    Drain,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (0..12_u8, 0..300_u16).prop_map(|(key, length)| Step::Put(key, length)),
        1 => (0..12_u8).prop_map(Step::Delete),
        3 => (0..12_u8).prop_map(Step::Get),
        1 => Just(Step::Drain),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Two clients' pipelined operations against a map, with keys kept apart by client.
    #[test]
    fn pipelined_clients_agree_with_a_map(histories in prop::collection::vec(steps(), 2)) {
        let options = RigOptions { shards: 2, segment_bytes: 64 << 10, ..RigOptions::default() };
        let rig = Rig::new(Provider::Sim, &options);
        for (owner, history) in histories.into_iter().enumerate() {
            let mut client = rig.client();
            let mut model: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
            let mut expected = std::collections::HashMap::new();
            let longest = history.len();
            for (number, step) in history.into_iter().enumerate() {
                let name = |key: u8| [owner as u8, key];
                if matches!(step, Step::Drain)
                    || expected.len() >= usize::from(client.options().window)
                    || number + 1 == longest
                {
                    for (token, outcome) in rig.drain(&mut client) {
                        let wanted: Option<Option<Vec<u8>>> = expected.remove(&token).unwrap();
                        match (wanted, outcome) {
                            (None, Outcome::Stored(_) | Outcome::Missing) => {}
                            (Some(Some(wanted)), Outcome::Value(found)) => prop_assert_eq!(wanted, found),
                            (Some(None), Outcome::Missing) => {}
                            (wanted, outcome) => prop_assert!(false, "{:?} {:?}", wanted, outcome),
                        }
                    }
                }
                let token = match step {
                    Step::Put(key, length) => {
                        let value = vec![number as u8; usize::from(length)];
                        let put = Command::Put {
                            database: 0, key: &name(key), value: &value, options: PutOptions::default(),
                        };
                        let token = client.submit(put).unwrap();
                        model.insert(key, value);
                        expected.insert(token, None);
                        continue;
                    }
                    Step::Delete(key) => {
                        let token = client.submit(Command::Delete { database: 0, key: &name(key) }).unwrap();
                        model.remove(&key);
                        expected.insert(token, None);
                        continue;
                    }
                    Step::Get(key) => {
                        let token = client.submit(Command::Get { database: 0, key: &name(key) }).unwrap();
                        expected.insert(token, Some(model.get(&key).cloned()));
                        continue;
                    }
                    Step::Drain => None::<()>,
                };
                prop_assert!(token.is_none());
            }
            rig.drain(&mut client);
            for key in 0..12_u8 {
                prop_assert_eq!(rig.get(&mut client, &[owner as u8, key]), model.get(&key).cloned());
            }
        }
        prop_assert_eq!(rig.server_counters().rejected, 0);
        prop_assert_eq!(rig.server_counters().of(RequestKind::VerifiedGet), 0);
    }
}

#[test]
fn entries_that_are_copied_wait_for_buffers_and_none_is_lost() {
    let server = ServerOptions { client_result_bytes: 64 << 10, ..ServerOptions::default() };
    let rig = Rig::new(Provider::Apart, &RigOptions { server, ..RigOptions::default() });
    let mut client = rig.client();
    let value =
        |number: u64| vec![number as u8; [100, 9_000, 40_000, 120_000][number as usize % 4]];
    for number in 0..24_u64 {
        rig.put(&mut client, &number.to_le_bytes(), &value(number));
    }
    for _ in 0..3 {
        let mut asked = BTreeMap::new();
        for number in 0..24_u64 {
            let key = number.to_le_bytes();
            asked.insert(client.submit(Command::Get { database: 0, key: &key }).unwrap(), number);
        }
        for (token, outcome) in rig.drain(&mut client) {
            let Outcome::Value(seen) = outcome else { panic!("{outcome:?}") };
            assert!(seen == value(asked[&token]), "{}", asked[&token]);
        }
    }
    let counters = rig.server_counters();
    assert!(counters.copied_bytes > 24 * 3 * 100, "{counters:?}");
}
