//! Blocking clients against shards on threads, over shared memory and TCP.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_fabric::Device;
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_kv::wire::Protocol;
use beeline_kv_client::{Answer, ClientError, ClientOptions, Command, PutOptions};
use beeline_pmem::PoolOptions;
use common::threaded::{Server, connect};

fn shm() -> Arc<dyn Device> {
    ShmDevice::open(ShmConfig::default()).unwrap()
}

fn tcp() -> Arc<dyn Device> {
    TcpDevice::open(TcpConfig::default()).unwrap()
}

const DEVICES: [fn() -> Arc<dyn Device>; 2] = [shm, tcp];

fn pool() -> PoolOptions {
    PoolOptions::volatile(1 << 20, 64 << 20)
}

#[test]
fn blocking_calls_do_what_they_say() {
    for device in DEVICES {
        let server = Server::start(device, 2, &pool());
        for protocol in Protocol::ALL {
            let options = ClientOptions { protocol, ..ClientOptions::default() };
            let mut client = connect(&server.doors, device, options).unwrap();
            let name = protocol.name();
            let put = PutOptions::default();
            for number in 0..100_u32 {
                let key = format!("{name} {number}");
                client.put(0, key.as_bytes(), &number.to_le_bytes(), put).unwrap();
            }
            for number in 0..100_u32 {
                let key = format!("{name} {number}");
                let value = client.get(0, key.as_bytes()).unwrap();
                assert_eq!(value.as_deref(), Some(&number.to_le_bytes()[..]), "{key}");
            }
            assert!(client.delete(0, format!("{name} 7").as_bytes()).unwrap());
            assert!(!client.delete(0, format!("{name} 7").as_bytes()).unwrap());
            assert_eq!(client.get(0, format!("{name} 7").as_bytes()).unwrap(), None);
            client.put(3, b"elsewhere", b"v", put).unwrap();
            let mut found = Vec::new();
            let mut at = Some((0, 0));
            while let Some(position) = at {
                let page = client.scan(3, position, 10).unwrap();
                found.extend(page.keys);
                at = page.next;
            }
            assert_eq!(found, [(b"elsewhere".to_vec(), 0)]);
            client.ping(0).unwrap();
            assert!(client.statistics(1).unwrap().contains("shard 1\n"));
        }
        server.stop();
    }
}

#[test]
fn several_threads_have_a_client_each() {
    for device in DEVICES {
        let server = Server::start(device, 2, &pool());
        let threads: Vec<_> = (0..4_u32)
            .map(|thread| {
                let doors = server.doors.clone();
                std::thread::spawn(move || {
                    let mut client = connect(&doors, device, ClientOptions::default()).unwrap();
                    let mut outcomes = 0;
                    for round in 0..200_u32 {
                        let mut submitted = 0;
                        for number in 0..8_u32 {
                            let key = [thread.to_le_bytes(), number.to_le_bytes()].concat();
                            let value = round.to_le_bytes();
                            let options = PutOptions::default();
                            let put =
                                Command::Put { database: 0, key: &key, value: &value, options };
                            client.submit(put).unwrap();
                            submitted += 1;
                        }
                        let mut deliver = |_, answer: Result<Answer<'_>, ClientError>| {
                            answer.unwrap();
                            outcomes += 1;
                        };
                        while client.outstanding() > 0 {
                            client.wait(Duration::from_millis(20), &mut deliver).unwrap();
                        }
                        assert_eq!(outcomes, submitted);
                        outcomes = 0;
                        let key = [thread.to_le_bytes(), 3_u32.to_le_bytes()].concat();
                        let value = client.get(0, &key).unwrap();
                        assert_eq!(value.as_deref(), Some(&round.to_le_bytes()[..]));
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        server.stop();
    }
}

#[test]
fn submitted_requests_and_blocking_calls_do_not_mix() {
    let server = Server::start(shm, 1, &pool());
    let mut client = connect(&server.doors, shm, ClientOptions::default()).unwrap();
    client.submit(Command::Ping { shard: 0 }).unwrap();
    let refused = client.get(0, b"key");
    assert!(matches!(refused, Err(ClientError::PipelineInUse { outstanding: 1 })), "{refused:?}");
    while client.outstanding() > 0 {
        client.poll(&mut |_, _| ()).unwrap();
    }
    assert_eq!(client.get(0, b"key").unwrap(), None);
}

#[test]
fn a_lost_server_is_an_error_in_bounded_time_and_its_successor_is_found() {
    for device in DEVICES {
        let pool = beeline_pmem::Pool::dram(&pool()).unwrap();
        let (store, shards, _) =
            beeline_kv::Store::open(pool, beeline_kv::StoreOptions::default()).unwrap();
        let first = Server::start_on(device, Arc::clone(&store), shards.clone());
        let options = ClientOptions {
            timeout: Duration::from_secs(2),
            reconnect: false,
            ..ClientOptions::default()
        };
        let put = PutOptions::default();
        let mut client = connect(&first.doors, device, options).unwrap();
        client.put(0, b"key", b"value", put).unwrap();
        first.stop();
        let start = Instant::now();
        let lost = client.put(0, b"key", b"lost", put).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(lost.is_retryable(), "{lost:?}");
        let again = client.get(0, b"key").unwrap_err();
        assert!(matches!(again, ClientError::NotConnected { shard: 0 }), "{again:?}");
        let second = Server::start_on(device, store, shards);
        let mut client = connect(&second.doors, device, ClientOptions::default()).unwrap();
        let value = client.get(0, b"key").unwrap();
        assert!(value.as_deref() == Some(b"value") || value.as_deref() == Some(b"lost"));
    }
}

#[test]
fn an_idle_server_sleeps() {
    for device in DEVICES {
        let server = Server::start(device, 1, &pool());
        let mut client = connect(&server.doors, device, ClientOptions::default()).unwrap();
        client.ping(0).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let before = server.turns.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(200));
        // At most one wake-up, from the sleep's own bound, and the short spin after it.
        let turns = server.turns.load(Ordering::Relaxed) - before;
        assert!(turns < 20_000, "{turns}");
        client.ping(0).unwrap();
    }
}
