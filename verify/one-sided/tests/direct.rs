//! The direct store end to end: many clients, local and remote, one order.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "common/direct.rs"]
mod common;

use std::net::UdpSocket;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use beeline_direct::{DirectOptions, DirectService, FabricClient};
use beeline_fabric::{
    CompletionQueue, Device, DeviceAttributes, FabricError, ProtectionDomain, QueuePairOptions,
};
use beeline_kv_direct::datagram::answer;
use beeline_kv_direct::function::number;
use beeline_kv_direct::{
    Connect, DirectClientError, Kind, LinkOptions, PacketWriter, ReplyReader, Request, Status,
    Width,
};
use beeline_os::memory::MemoryObject;
use common::{DEVICES, Direct, Target, World, shm};

#[test]
fn a_client_stores_reads_changes_and_deletes_on_every_provider() {
    for open in DEVICES {
        let world = World::new(open, 1, 1);
        let mut client = world.client();
        assert_eq!(client.get(b"key").unwrap(), None);
        client.put(b"key", b"value").unwrap();
        assert_eq!(client.get(b"key").unwrap().unwrap(), b"value");
        client.put(b"n", &5_u64.to_le_bytes()).unwrap();
        assert_eq!(client.fetch_and_add(b"n", 3).unwrap(), Some(5));
        assert_eq!(client.compare_and_swap(b"n", 8, 1).unwrap(), Some(8));
        assert_eq!(client.fetch_and_add(b"n", 0).unwrap(), Some(1));
        assert_eq!(client.fetch_and_add(b"none", 1).unwrap(), None);
        assert!(client.delete(b"key").unwrap() && !client.delete(b"key").unwrap());
        let refused = client.one(Request::with_function(Kind::Reduce, b"n", 200, Width::One, &[0]));
        let Err(DirectClientError::Refused { status }) = refused else { panic!("{refused:?}") };
        assert_eq!(status, Status::UnknownFunction);
        let long = client.put(b"k", &[0; 4000]);
        assert!(matches!(long, Err(DirectClientError::TooLong { .. })), "{long:?}");
    }
}

#[test]
fn local_and_remote_clients_share_one_order() {
    const EACH: u64 = 3000;
    for open in DEVICES {
        let world = World::new(open, 1, 1);
        world.client().put(b"sequence", &0_u64.to_le_bytes()).unwrap();
        let numbers: Vec<u64> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for _ in 0..3 {
                let world = &world;
                threads.push(scope.spawn(move || {
                    let mut client = world.client();
                    let one = 1_u64.to_le_bytes();
                    let add = Request::with_function(
                        Kind::UpdateScalar,
                        b"sequence",
                        number::ADD,
                        Width::Eight,
                        &one,
                    );
                    let mut mine = Vec::new();
                    while mine.len() < EACH as usize {
                        let before = mine.last().copied();
                        let mut batch = vec![0; 30];
                        client
                            .execute(&[add; 30], &mut |index, status, bytes| {
                                assert_eq!(status, Status::Ok);
                                batch[index] =
                                    u64::from_le_bytes(bytes.unwrap().try_into().unwrap());
                            })
                            .unwrap();
                        assert!(batch.is_sorted() && before < batch.first().copied());
                        mine.extend(batch);
                    }
                    mine
                }));
            }
            // A local caller in the same queue.
            let handle = world.handle(0);
            threads.push(scope.spawn(move || {
                let one = 1_u64.to_le_bytes();
                let (kind, width) = (Kind::UpdateScalar, Width::Eight);
                let add = Request::with_function(kind, b"sequence", number::ADD, width, &one);
                let mut mine = Vec::new();
                for _ in 0..EACH / 30 {
                    let mut packet = PacketWriter::new(1 << 14, 1 << 18);
                    (0..30).for_each(|_| assert!(packet.push(&add)));
                    let reply = handle.execute(0, packet.finish(1).to_vec(), 1 << 18).unwrap();
                    for (_, bytes) in ReplyReader::new(&reply).unwrap().1 {
                        mine.push(u64::from_le_bytes(bytes.unwrap().try_into().unwrap()));
                    }
                }
                mine
            }));
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let mut sorted = numbers;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..4 * EACH).collect::<Vec<_>>(), "each number is given once");
    }
}

#[test]
fn an_idle_client_goes_on_with_a_server_that_was_started_anew() {
    for open in DEVICES {
        let mut world = World::new(open, 1, 2);
        let mut client = world.client();
        client.put(b"key", b"value").unwrap();
        world.end(0);
        world.start();
        // Under the name that the client knows.
        world.targets.lock().unwrap().swap(0, 1);
        assert_eq!(client.get(b"key").unwrap(), None);
        client.put(b"key", b"new").unwrap();
    }
}

#[test]
fn a_chain_of_swaps_has_one_winner_for_each_value() {
    let world = World::new(shm, 1, 1);
    world.client().put(b"lock", &0_u64.to_le_bytes()).unwrap();
    let wins: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = world.client();
                    let (mut seen, mut won) = (0, Vec::new());
                    while seen < 2000 {
                        let found = client.compare_and_swap(b"lock", seen, seen + 1).unwrap();
                        if found == Some(seen) {
                            won.push(seen);
                            seen += 1;
                        } else {
                            seen = found.unwrap();
                        }
                    }
                    won
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut wins = wins;
    wins.sort_unstable();
    assert_eq!(wins, (0..2000).collect::<Vec<u64>>());
}

#[test]
fn vectors_change_as_wholes_whoever_looks() {
    const ELEMENTS: usize = 300;
    let uniform = |bytes: &[u8]| {
        let (elements, rest) = bytes.as_chunks::<4>();
        let whole = rest.is_empty() && elements.len() == ELEMENTS;
        assert!(whole && elements.iter().all(|element| *element == elements[0]), "{bytes:?}");
        u32::from_le_bytes(elements[0])
    };
    for open in DEVICES {
        let world = World::new(open, 1, 1);
        world.client().put(b"vector", &[0; ELEMENTS * 4]).unwrap();
        // Elements that are equal stay so only where each change and each look is one of all of them.
        let by_one = (Kind::UpdateVectorByScalar, number::ADD, 1_u32.to_le_bytes().to_vec());
        let by_many =
            (Kind::UpdateVector, number::XOR, 0x5a5a_1234_u32.to_le_bytes().repeat(ELEMENTS));
        let look = (Kind::Get, 0, Vec::new());
        let seen: usize = std::thread::scope(|scope| {
            let threads = [by_one, by_many, look].map(|(kind, function, parameter)| {
                let world = &world;
                scope.spawn(move || {
                    let mut client = world.client();
                    let request = match kind {
                        Kind::Get => Request::get(b"vector"),
                        _ => {
                            let width = Width::Four;
                            Request::with_function(kind, b"vector", function, width, &parameter)
                        }
                    };
                    let mut seen = std::collections::HashSet::new();
                    for turn in 0..500 {
                        let batch = vec![request; turn % 7 + 1];
                        let outcome = client.execute(&batch, &mut |_, status, bytes| {
                            assert_eq!(status, Status::Ok);
                            seen.insert(uniform(bytes.unwrap()));
                        });
                        outcome.unwrap();
                    }
                    seen.len()
                })
            });
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(seen > 1000, "{seen} values were seen: nothing changed beside a look");
    }
}

#[test]
fn several_servers_with_several_processors_are_one_map() {
    let world = World::new(shm, 3, 2);
    let mut client = world.client();
    let keys: Vec<[u8; 4]> = (0..2000_u32).map(u32::to_le_bytes).collect();
    let puts: Vec<Request<'_>> = keys.iter().map(|key| Request::put(key, key)).collect();
    client.execute(&puts, &mut |_, status, _| assert_eq!(status, Status::Ok)).unwrap();
    let gets: Vec<Request<'_>> = keys.iter().map(|key| Request::get(key)).collect();
    let mut found = 0;
    let mut other = world.client();
    other
        .execute(&gets, &mut |index, status, bytes| {
            assert_eq!((status, bytes), (Status::Ok, Some(&keys[index][..])));
            found += 1;
        })
        .unwrap();
    assert_eq!(found, keys.len());
    for service in world.services.iter().flatten() {
        beeline_service::Service::publish(service);
        assert!(beeline_service::Service::health(service).is_ok());
    }
}

#[test]
fn a_client_that_breaks_the_protocol_ends_alone() {
    for open in DEVICES {
        let world = World::new(open, 1, 1);
        let mut honest = world.client();
        honest.put(b"key", b"value").unwrap();
        // Its reply slots are small, and it asks for more than fits them.
        let small = LinkOptions { reply_bytes: 4096, ..LinkOptions::default() };
        let (mut link, _) = world.connect(small).connect("0", 0).unwrap();
        let mut packet = PacketWriter::new(1 << 14, 1 << 20);
        (0..60).for_each(|_| assert!(packet.push(&Request::get(b"key"))));
        link.submit(&mut packet).unwrap();
        let ended = link.wait(Duration::ZERO, |_, _| panic!("it is answered"));
        assert!(ended.is_err() && link.is_broken(), "{ended:?}");
        // One that goes away with packets under way.
        let (mut link, _) = world.connect(LinkOptions::default()).connect("0", 0).unwrap();
        while link.room() > 0 {
            let mut packet = link.packet();
            packet.push(&Request::put(b"other", &[7; 100]));
            link.submit(&mut packet).unwrap();
        }
        drop(link);
        assert_eq!(honest.get(b"key").unwrap().unwrap(), b"value");
        // A hello of another version is refused with its reason.
        let (sender, receiver) = mpsc::channel();
        world.handle(0).accept(FabricClient {
            processor: 0,
            device: world.target(0).device,
            peer: beeline_fabric::ConnectInfo(vec![]),
            payload: vec![9, 0, 1, 0],
            reply: Box::new(move |outcome| sender.send(outcome).unwrap()),
        });
        let refusal = receiver.recv().unwrap().unwrap();
        assert!(refusal.info.is_none());
        let reason = beeline_kv_direct::wire::Hello::decode(&refusal.payload).unwrap_err();
        assert!(reason.to_string().contains("version 9"), "{reason}");
    }
}

#[test]
fn a_packet_in_a_datagram_is_answered_and_garbage_is_not() {
    let options = DirectOptions {
        memory_bytes: 16 << 20,
        udp: Some("127.0.0.1:0".parse().unwrap()),
        ..DirectOptions::default()
    };
    let service = DirectService::start(&options).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(service.udp_addresses()[0]).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket.send(b"?").unwrap();
    socket.send(&[0xff; 40]).unwrap();
    let mut packet = PacketWriter::new(1400, 60_000);
    packet.push(&Request::put(b"key", b"value"));
    packet.push(&Request::get(b"key"));
    let packet = packet.finish(77).to_vec();
    let mut token = 0_u64;
    let mut challenged = 0;
    let mut bytes = [0; 65_536];
    loop {
        socket.send(&[&token.to_le_bytes(), &packet[..]].concat()).unwrap();
        let length = socket.recv(&mut bytes).unwrap();
        let (shown, reply) = answer(&bytes[..length]).unwrap();
        token = shown;
        if reply.is_empty() {
            challenged += 1;
            assert!(length <= 8 + packet.len(), "an unproven sender gets no more than it sent");
            continue;
        }
        let (id, results) = ReplyReader::new(reply).unwrap();
        assert_eq!(id, 77);
        let results: Vec<_> = results.collect();
        assert_eq!(results[1], (Status::Ok, Some(&b"value"[..])));
        break;
    }
    assert!(challenged >= 1, "nothing is executed before the sender has shown its address");
}

#[test]
fn clients_that_never_finish_connecting_give_their_places_back() {
    for open in DEVICES {
        let mut options = DirectOptions { memory_bytes: 16 << 20, ..DirectOptions::default() };
        options.server.max_clients = 3;
        options.server.connect_timeout = Duration::from_millis(50);
        let service = DirectService::start(&options).unwrap();
        let target = Target { handle: service.handle(), device: open() };
        let device = open();
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(64).unwrap();
        let hello = beeline_kv_direct::wire::Hello {
            window: 8,
            packet_bytes: 16 << 10,
            reply_bytes: 132 << 10,
            area_key: 1,
        };
        // They are taken, and nothing more is heard of them; the processor sleeps.
        let mut halves = Vec::new();
        for _ in 0..3 {
            let qp = domain
                .create_queue_pair(&queue, &queue, None, QueuePairOptions::default())
                .unwrap();
            let (sender, receiver) = mpsc::channel();
            target.handle.accept(FabricClient {
                processor: 0,
                device: Arc::clone(&target.device),
                peer: qp.connect_info(),
                payload: hello.encode(),
                reply: Box::new(move |outcome| sender.send(outcome).unwrap()),
            });
            receiver.recv().unwrap().unwrap();
            halves.push(qp);
        }
        // Until then this one is refused; the limit is that of a machine that is very busy.
        let until = Instant::now() + Duration::from_secs(60);
        let mut connect = Direct {
            targets: Arc::new(Mutex::new(vec![Some(target)])),
            open,
            options: LinkOptions::default(),
        };
        loop {
            match connect.connect("0", 0) {
                Ok(_) => break,
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A device that can be taken away.
#[derive(Debug)]
struct Fleeting {
    inner: Arc<dyn Device>,
    lost: AtomicBool,
}

impl Device for Fleeting {
    fn attributes(&self) -> &DeviceAttributes {
        self.inner.attributes()
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        self.inner.allocate_memory(length_bytes)
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        self.inner.allocate_protection_domain()
    }

    fn create_completion_queue(&self, depth: u32) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        self.inner.create_completion_queue(depth)
    }
}

#[test]
fn a_device_that_is_gone_is_let_go_with_its_last_client() {
    let world = World::new(shm, 1, 1);
    let fleeting = Arc::new(Fleeting { inner: shm(), lost: AtomicBool::new(false) });
    let held = Arc::downgrade(&fleeting);
    world.targets.lock().unwrap()[0].as_mut().unwrap().device = fleeting;
    let mut client = world.client();
    client.put(b"key", b"value").unwrap();
    // Another device stands for it from here on; its client is still connected.
    world.targets.lock().unwrap()[0].as_mut().unwrap().device = shm();
    held.upgrade().unwrap().lost.store(true, Ordering::Relaxed);
    assert_eq!(client.get(b"key").unwrap().unwrap(), b"value");
    assert!(held.strong_count() > 0, "a client is left");
    drop(client);
    let until = Instant::now() + Duration::from_secs(60);
    while held.strong_count() > 0 {
        assert!(Instant::now() < until, "the service keeps a device that is gone");
        let mut get = PacketWriter::new(1 << 14, 1 << 14);
        assert!(get.push(&Request::get(b"key")));
        world.handle(0).execute(0, get.finish(1).to_vec(), 1 << 14).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(world.client().get(b"key").unwrap().unwrap(), b"value");
}

#[test]
fn a_client_of_long_packets_does_not_keep_local_callers_waiting() {
    const LONG: u64 = 4000;
    // Completions of one poll.
    const POLL: u64 = 32;
    let world = World::new(shm, 1, 1);
    world.client().put(b"n", &0_u64.to_le_bytes()).unwrap();
    let one = 1_u64.to_le_bytes();
    let add = Request::with_function(Kind::UpdateScalar, b"n", number::ADD, Width::Eight, &one);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let options = LinkOptions { window: 64, ..LinkOptions::default() };
            let (mut link, _) = world.connect(options).connect("0", 0).unwrap();
            while !stop.load(Ordering::Relaxed) {
                while link.room() > 0 {
                    let mut packet = link.packet();
                    (0..LONG).for_each(|_| assert!(packet.push(&add.without_return())));
                    link.submit(&mut packet).unwrap();
                }
                link.wait(Duration::from_millis(1), |_, _| {}).unwrap();
            }
        });
        let handle = world.handle(0);
        let add_one = || {
            let mut packet = PacketWriter::new(1 << 14, 1 << 14);
            assert!(packet.push(&add));
            let reply = handle.execute(0, packet.finish(1).to_vec(), 1 << 14).unwrap();
            let (_, bytes) = ReplyReader::new(&reply).unwrap().1.next().unwrap();
            u64::from_le_bytes(bytes.unwrap().try_into().unwrap())
        };
        let mut sums = vec![add_one()];
        while sums.len() < 12 || sums.last() < Some(&(100 * POLL * LONG)) {
            sums.push(add_one());
        }
        stop.store(true, Ordering::Relaxed);
        // Calls that met the long packets: what was executed between one of them and the next.
        let between = sums.windows(2).map(|two| two[1] - two[0]).filter(|count| *count > LONG);
        let least = between.min().expect("the packets go on beside the calls");
        assert!(least <= 8 * POLL * LONG, "{least} operations before a local one had its turn");
    });
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    for (options, name) in [
        (DirectOptions { processors: 0, ..DirectOptions::default() }, "direct-processors"),
        (DirectOptions { memory_bytes: 1, ..DirectOptions::default() }, "direct-memory"),
    ] {
        let error = DirectService::start(&options).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}
