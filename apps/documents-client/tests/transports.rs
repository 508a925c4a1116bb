//! One suite of commands over every transport, and what happens when a transport breaks.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use beeline_documents::store::{Memory, Store};
use beeline_documents::{
    ChannelHandle, ChannelOptions, Documents, DocumentsOptions, EngineOptions, FabricClient,
};
use beeline_documents_channel::{
    self as channel, Answer, ChannelServer, Handler, Load, ReplyBuffer, ServerOptions,
};
use beeline_documents_client::{Client, ClientError, Login, Options, SERVICE};
use beeline_env::SystemClock;
use beeline_fabric::ConnectInfo;
use beeline_fabric_open::{Bootstrap, BootstrapConfig, Dialler, Incoming, Service, open};
use bson::{Bson, Document, doc};

/// A store with its doors, as `beeline serve` opens them.
struct World {
    store: Arc<dyn Store>,
    options: DocumentsOptions,
    documents: Option<Documents>,
    target: Arc<Mutex<Option<ChannelHandle>>>,
    bootstrap: Bootstrap,
    /// Of so many clients the channel is broken under their first request behind the hello.
    breaks: Arc<AtomicU32>,
}

impl World {
    fn new(is_rdma: bool) -> Self {
        Self::with(is_rdma, &["shm://", "tcp://127.0.0.1"])
    }

    fn with(is_rdma: bool, devices: &[&str]) -> Self {
        let mut channel = ChannelOptions::default();
        channel.server.is_rdma = is_rdma;
        channel.server.pool_buffers = 64;
        channel.rnic = |provider| channel::RnicInfo {
            ib_port: 7,
            gid_idx: 3,
            ip: [192, 168, 2, 3].into(),
            ..channel::RnicInfo::named(&format!("card of {provider}"))
        };
        let options = DocumentsOptions {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            threads: 1,
            most_connections: 100,
            replica_set: Some("rs0".to_owned()),
            engine: EngineOptions::default(),
            channel,
        };
        let target = Arc::new(Mutex::new(None::<ChannelHandle>));
        let door = Arc::clone(&target);
        let breaks = Arc::<AtomicU32>::default();
        let breaking = Arc::clone(&breaks);
        let service = Service {
            name: SERVICE.to_owned(),
            shards: 1,
            payload: Vec::new(),
            incoming: Box::new(move |incoming| {
                let one_less = |left: u32| left.checked_sub(1);
                match breaking.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less) {
                    Ok(_) => Breaker::serve(incoming),
                    Err(_) => deliver(door.lock().unwrap().as_ref(), incoming),
                }
            }),
        };
        let config = BootstrapConfig {
            tcp: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            ..BootstrapConfig::default()
        };
        let devices = devices.iter().map(|url| open(url).unwrap()).collect();
        let bootstrap = Bootstrap::listen(config, devices, vec![service]).unwrap();
        let store = Arc::new(Memory::default());
        let mut world = Self { store, options, documents: None, target, bootstrap, breaks };
        world.start();
        world
    }

    fn start(&mut self) {
        let documents = Documents::over(Arc::clone(&self.store), &self.options).unwrap();
        *self.target.lock().unwrap() = Some(documents.channel_handle());
        self.options.address = documents.address();
        self.documents = Some(documents);
    }

    fn stop(&mut self) {
        *self.target.lock().unwrap() = None;
        let documents: Box<dyn beeline_service::Service> = Box::new(self.documents.take().unwrap());
        documents.stop();
    }

    fn address(&self, scheme: &str) -> String {
        match scheme {
            "mongodb" => format!("mongodb://{}", self.options.address),
            scheme => format!("{scheme}://{}", self.bootstrap.address().unwrap()),
        }
    }

    fn connect(&self, scheme: &str) -> Client {
        Client::connect(&self.address(scheme), Options::default()).unwrap()
    }
}

fn deliver(target: Option<&ChannelHandle>, incoming: Incoming) {
    let Some(channels) = target else {
        incoming.reply.refuse("not open");
        return;
    };
    let Incoming { device, peer, payload, reply, .. } = incoming;
    channels.accept(FabricClient {
        device,
        peer,
        payload,
        reply: Box::new(move |outcome| match outcome {
            Ok(welcome) => {
                reply.accept(&welcome.info.unwrap_or(ConnectInfo(Vec::new())), welcome.payload);
            }
            Err(reason) => reply.refuse(reason),
        }),
    });
}

/// What a reply says beside its time.
fn said(outcome: Result<Document, ClientError>) -> String {
    match outcome {
        Ok(mut reply) => {
            reply.remove("$clusterTime");
            reply.remove("operationTime");
            reply.to_string()
        }
        Err(error) => format!("error {error}"),
    }
}

/// Commands of every kind, and what the store said to them.
fn suite(client: &mut Client, database: &str) -> Vec<String> {
    let mut said_all = Vec::new();
    let mut run = |client: &mut Client, command: Document| {
        said_all.push(said(client.run(database, command)));
    };
    let many: Vec<Document> =
        (0..500).map(|n| doc! { "_id": n, "n": n % 7, "text": "x".repeat(n as usize) }).collect();
    run(client, doc! { "insert": "c", "documents": many });
    run(client, doc! { "insert": "c", "documents": [{ "_id": 3 }, { "_id": 1000 }] });
    run(client, doc! { "find": "c", "filter": { "_id": 42 } });
    run(
        client,
        doc! { "find": "c", "filter": { "n": 3 }, "sort": { "_id": -1 }, "batchSize": 1000 },
    );
    run(client, doc! { "find": "c", "filter": { "n": { "$nope": 1 } } });
    run(client, doc! { "createIndexes": "c", "indexes": [{ "key": { "n": 1 }, "name": "n" }] });
    run(client, doc! { "count": "c", "query": { "n": 2 } });
    run(
        client,
        doc! { "update": "c", "updates": [
            { "q": { "_id": 5 }, "u": { "$set": { "a.b": [1, 2] } } },
            { "q": { "n": 6 }, "u": { "$inc": { "n": 10 } }, "multi": true },
            { "q": { "_id": "new" }, "u": { "$set": { "k": 1 } }, "upsert": true },
        ] },
    );
    run(client, doc! { "delete": "c", "deletes": [{ "q": { "_id": { "$lt": 10 } }, "limit": 0 }] });
    run(
        client,
        doc! { "aggregate": "c", "pipeline": [
            { "$group": { "_id": "$n", "count": { "$sum": 1 } } }, { "$sort": { "_id": 1 } },
        ], "cursor": {} },
    );
    run(
        client,
        doc! { "findAndModify": "c", "query": { "_id": 20 }, "update": { "n": 1 }, "new": true },
    );
    run(client, doc! { "distinct": "c", "key": "n" });
    run(client, doc! { "noSuchCommand": 1 });
    // A megabyte in, and out again in parts.
    run(client, doc! { "insert": "big", "documents": [{ "_id": 1, "t": "y".repeat(6 << 20) }] });
    run(client, doc! { "find": "big" });
    run(client, doc! { "insert": "big", "documents": [{ "_id": 2, "t": "y".repeat(17 << 20) }] });
    let mut c = client.collection(database, "c");
    said_all.push(format!(
        "{:?}",
        c.update_one(doc! { "_id": 21 }, doc! { "$set": { "z": 1 } }, false)
    ));
    said_all.push(format!("{:?}", c.delete_one(doc! { "_id": 22 })));
    said_all.push(format!("{:?}", c.insert_one(doc! { "_id": 21 })));
    let all: Vec<String> = client
        .collection(database, "c")
        .find(doc! {}, doc! { "batchSize": 50, "sort": { "_id": 1 } })
        .unwrap()
        .map(|found| found.unwrap().to_string())
        .collect();
    said_all.extend(all);
    said_all
}

#[test]
fn every_transport_gives_the_same_answers() {
    let world = World::new(true);
    let mut answers = Vec::new();
    for (scheme, transport) in
        [("mongodb", "mongodb wire"), ("shm", "shm"), ("tcp", "tcp"), ("auto", "shm")]
    {
        let mut client = world.connect(scheme);
        assert_eq!(client.transport(), transport, "{}", client.reason());
        // The names of databases stand in the answers: they have one length and are replaced.
        let database = format!("base-{:5}", answers.len()).replace(' ', "_");
        let said: Vec<String> = suite(&mut client, &database)
            .iter()
            .map(|text| text.replace(&database, "DB"))
            .collect();
        answers.push((scheme, said));
    }
    let (_, expected) = &answers[0];
    assert!(expected.len() > 480, "{} answers", expected.len());
    for (scheme, found) in &answers[1..] {
        for (at, (one, other)) in expected.iter().zip(found).enumerate() {
            assert!(one == other, "{scheme}, answer {at}: {other:.300} instead of {one:.300}");
        }
        assert_eq!(expected.len(), found.len());
    }
}

#[test]
fn is_rdma_off_at_either_end_or_no_device_means_the_wire_at_both_ends() {
    for (server, client_wants) in [(false, true), (true, false), (false, false), (true, true)] {
        let world = World::new(server);
        let options = Options { is_rdma: client_wants, ..Options::default() };
        let mut client = Client::connect(&world.address("auto"), options).unwrap();
        let wire = client.transport() == "mongodb wire";
        assert_eq!(wire, !(server && client_wants), "{}", client.reason());
        client.collection("d", "c").insert_one(doc! { "_id": 1 }).unwrap();
        let metrics = beeline_service::Service::metrics(world.documents.as_ref().unwrap());
        // What the fabric's clients do is told by the service that serves them.
        let names = metrics.iter().flat_map(|set| set.descriptors()).map(|one| one.name);
        assert!(names.into_iter().any(|name| name == "beeline_documents_channels"));
    }
    // The node lacks the device that the client insists on; the next best carries the commands.
    let world = World::with(true, &["tcp://127.0.0.1"]);
    let mut client = world.connect("auto");
    assert_eq!(client.transport(), "tcp", "{}", client.reason());
    client.collection("d", "c").insert_one(doc! { "_id": 1 }).unwrap();
    assert!(Client::connect(&world.address("shm"), Options::default()).is_err());
}

#[test]
fn a_client_is_told_the_stores_device() {
    let world = World::new(true);
    let (client, _dialler) = raw_client(&world, 16);
    let told = channel::RnicInfo {
        dev_name: "card of shm".to_owned(),
        ib_port: 7,
        gid_idx: 3,
        ip: [192, 168, 2, 3].into(),
    };
    assert_eq!(*client.peer(), told);
}

#[test]
fn clients_of_three_transports_work_on_one_collection_at_once() {
    let world = World::new(true);
    world.connect("auto").collection("d", "c").insert_one(doc! { "_id": "sum", "n": 0 }).unwrap();
    let threads: Vec<_> = ["shm", "tcp", "mongodb", "shm"]
        .into_iter()
        .enumerate()
        .map(|(number, scheme)| {
            let address = world.address(scheme);
            std::thread::spawn(move || {
                let mut client = Client::connect(&address, Options::default()).unwrap();
                for turn in 0..100 {
                    let mut c = client.collection("d", "c");
                    c.insert_one(doc! { "_id": format!("{number}-{turn}") }).unwrap();
                    c.update_one(doc! { "_id": "sum" }, doc! { "$inc": { "n": 1 } }, true).unwrap();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let mut client = world.connect("auto");
    let sum = client.collection("d", "c").find_one(doc! { "_id": "sum" }).unwrap().unwrap();
    assert_eq!(sum.get_i32("n").unwrap(), 400);
    let count = client.run("d", doc! { "count": "c" }).unwrap();
    assert_eq!(count.get_i32("n").unwrap(), 401);
}

#[test]
fn a_connection_that_ended_is_found_before_anything_is_sent_over_it() {
    let mut world = World::new(true);
    let mut client = world.connect("auto");
    client.collection("d", "c").insert_one(doc! { "_id": 1, "n": 0 }).unwrap();
    assert_eq!(client.transport(), "shm");
    world.stop();
    world.start();
    wait_until("the client sees that the channel ended", || !client.is_connected());
    // Nothing was sent, so even what cannot be sent twice is simply sent.
    let all = client.collection("d", "c").update_many(doc! {}, doc! { "$inc": { "n": 1 } }, false);
    assert_eq!(all.unwrap().modified, 1);
    assert_eq!((client.resent(), client.transport()), (0, "tcp"), "{}", client.reason());
    world.stop();
    wait_until("the client sees that the channel ended", || !client.is_connected());
    let gone = client.collection("d", "c").find_one(doc! {});
    assert!(matches!(gone, Err(ClientError::Unreachable { .. })), "{gone:?}");
}

/// Waits for an event that another thread brings about.
fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !happened() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A server that answers a client's hello, and ends its channel when a request came behind it.
struct Breaker {
    greeted: bool,
}

impl Breaker {
    /// Serves the client on a thread of its own.
    fn serve(incoming: Incoming) {
        std::thread::spawn(move || {
            let Incoming { device, peer, payload, reply, .. } = incoming;
            let (clock, meters) = (Arc::new(SystemClock), Box::new(Load::IDLE));
            let options = ServerOptions::default();
            let mut server = ChannelServer::new(device, options, clock, meters).unwrap();
            let (info, welcome) = server.accept(&peer, &payload);
            reply.accept(&info.unwrap(), welcome);
            let mut breaker = Self { greeted: false };
            // The client's hello, and a request.
            while server.counters().requests < 2 {
                server.poll(&mut breaker).unwrap();
            }
        });
    }
}

impl Handler for Breaker {
    fn execute(&mut self, _: &channel::Incoming<'_>, reply: &mut ReplyBuffer) -> Answer {
        if std::mem::replace(&mut self.greeted, true) {
            return Answer::Later;
        }
        reply.extend_from_slice(&doc! { "ok": 1.0 }.to_vec().unwrap());
        Answer::Reply
    }

    fn ended(&mut self, _: u64) {}
}

#[test]
fn a_write_whose_connection_broke_is_sent_again_over_the_next_transport_and_done_once() {
    let world = World::new(true);
    world.breaks.store(1, Ordering::SeqCst);
    let mut client = world.connect("auto");
    assert_eq!(client.transport(), "shm");
    let mut c = client.collection("d", "c");
    let upsert = c.update_one(doc! { "_id": 1 }, doc! { "$inc": { "n": 1 } }, true).unwrap();
    assert!(upsert.upserted.is_some());
    assert_eq!((client.resent(), client.transport()), (1, "tcp"), "{}", client.reason());
    // Whatever cannot be sent again says so.
    world.breaks.store(1, Ordering::SeqCst);
    let mut client = world.connect("auto");
    let lost = client.collection("d", "c").update_many(doc! {}, doc! { "$inc": { "n": 1 } }, false);
    assert!(matches!(lost, Err(ClientError::OutcomeUnknown { .. })), "{lost:?}");
    let found = client.collection("d", "c").find_one(doc! { "_id": 1 }).unwrap().unwrap();
    assert_eq!(found.get_i32("n").unwrap(), 1);
}

/// A door in front of a bootstrap that turns `left` callers away once they spoke, and lets the others through.
fn moody_door(behind: SocketAddr, left: Arc<AtomicU32>) -> SocketAddr {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for caller in listener.incoming() {
            let caller = caller.unwrap();
            // What is unread when a connection is closed resets it.
            caller.peek(&mut [0]).unwrap();
            let one_less = |left: u32| left.checked_sub(1);
            if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
                continue;
            }
            let server = std::net::TcpStream::connect(behind).unwrap();
            for (mut from, mut to) in
                [(caller.try_clone().unwrap(), server.try_clone().unwrap()), (server, caller)]
            {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    address
}

#[test]
fn a_client_that_is_turned_away_in_the_middle_of_an_exchange_comes_again() {
    let world = World::new(true);
    let left = Arc::new(AtomicU32::new(3));
    let door = moody_door(world.bootstrap.address().unwrap(), Arc::clone(&left));
    let mut client = Client::connect(&format!("tcp://{door}"), Options::default()).unwrap();
    assert_eq!((client.transport(), left.load(Ordering::SeqCst)), ("tcp", 0));
    client.collection("d", "c").insert_one(doc! { "_id": 1 }).unwrap();
}

#[test]
fn one_thread_has_many_clients_at_work_over_every_transport() {
    let world = World::new(true);
    for scheme in ["shm", "tcp", "mongodb"] {
        let mut clients: Vec<Client> = (0..8).map(|_| world.connect(scheme)).collect();
        for round in 0..20 {
            let insert = |(number, client): (usize, &mut Client)| {
                let one = doc! { "_id": format!("{scheme}-{number}-{round}"), "n": 1 };
                client.begin_insert_one("d", "c", one).unwrap()
            };
            let begun: Vec<_> = clients.iter_mut().enumerate().map(insert).collect();
            for (number, (client, mut begun)) in clients.iter_mut().zip(begun).enumerate() {
                wait_until("an insertion has its outcome", || client.is_ready(&mut begun));
                let id = client.finish_insert_one(begun).unwrap();
                assert_eq!(id, Bson::String(format!("{scheme}-{number}-{round}")));
            }
        }
        // Several of one client, taken in another order; one that is not there; one that is there already.
        let client = &mut clients[0];
        let find = |client: &mut Client, id: &str| {
            client.begin_find_one("d", "c", &doc! { "_id": id }).unwrap()
        };
        let first = find(client, &format!("{scheme}-1-7"));
        let second = find(client, "absent");
        let taken = doc! { "n": 2, "_id": format!("{scheme}-1-7") };
        let third = client.begin_insert_one("d", "c", taken).unwrap();
        assert_eq!(client.finish_insert_one(third).unwrap_err().code(), Some(11000));
        assert_eq!(client.finish_find_one(second).unwrap(), None);
        let found = client.finish_find_one(first).unwrap().unwrap();
        assert_eq!(found.get_i32("n").unwrap(), 1);
    }
    let mut client = world.connect("auto");
    let count = client.run("d", doc! { "count": "c" }).unwrap();
    assert_eq!(count.get_i32("n").unwrap(), 3 * 8 * 20);
}

#[test]
fn what_was_begun_on_a_connection_that_broke_is_sent_again_and_done_once() {
    let world = World::new(true);
    world.breaks.store(1, Ordering::SeqCst);
    let mut client = world.connect("auto");
    assert_eq!(client.transport(), "shm");
    let begun = client.begin_insert_one("d", "c", doc! { "_id": 1 }).unwrap();
    assert_eq!(client.finish_insert_one(begun).unwrap(), Bson::Int32(1));
    assert_eq!((client.resent(), client.transport()), (1, "tcp"), "{}", client.reason());
    // Without a number the client cannot know whether it was executed, and a find is only sent again.
    let options = Options { retry_writes: false, ..Options::default() };
    world.breaks.store(2, Ordering::SeqCst);
    let mut client = Client::connect(&world.address("auto"), options.clone()).unwrap();
    let begun = client.begin_insert_one("d", "c", doc! { "_id": 2 }).unwrap();
    let lost = client.finish_insert_one(begun);
    assert!(matches!(lost, Err(ClientError::OutcomeUnknown { .. })), "{lost:?}");
    let mut client = Client::connect(&world.address("auto"), options).unwrap();
    let begun = client.begin_find_one("d", "c", &doc! { "_id": 1 }).unwrap();
    assert_eq!(client.finish_find_one(begun).unwrap(), Some(doc! { "_id": 1 }));
    assert_eq!(client.resent(), 1);
}

#[test]
fn a_client_that_asks_for_much_at_once_leaves_the_others_served() {
    let world = World::new(true);
    let mut other = world.connect("shm");
    let many: Vec<Document> = (0..200).map(|n| doc! { "_id": n, "n": n % 10 }).collect();
    other.collection("d", "c").insert_many(many).unwrap();
    // A greedy client: as many long commands as its channel takes, and as it may have under way.
    let (mut greedy, _dialler) = raw_client(&world, 400);
    let join =
        doc! { "$lookup": { "from": "c", "localField": "n", "foreignField": "n", "as": "o" } };
    let command = doc! { "aggregate": "c", "cursor": {}, "$db": "d", "pipeline": [
        join, { "$unwind": "$o" }, { "$group": { "_id": null, "n": { "$sum": 1 } } },
    ] };
    let body = command.to_vec().unwrap();
    let limit = Duration::from_secs(600);
    for _ in 0..400 {
        greedy.submit(channel::MessageType::Insert, b"d", &body, (0, 0), limit).unwrap();
    }
    wait_until("the first long command is answered", || {
        greedy.poll();
        greedy.outstanding() < 400
    });
    // One worker there is always: a command is its next, and not its four hundredth. This thread may wait
    // for a processor in between, though not each time.
    let mut turns = Vec::new();
    let served = loop {
        greedy.poll();
        let left = greedy.outstanding();
        let found = other.collection("d", "c").find(doc! { "n": 3 }, Document::new()).unwrap();
        assert_eq!(found.count(), 20);
        greedy.poll();
        turns.push((left, greedy.outstanding()));
        if greedy.outstanding() + 40 > left {
            break left > 40;
        }
    };
    assert!(served, "outstanding before a command and behind it: {turns:?}");
    while greedy.outstanding() > 0 {
        greedy.sleep(Duration::from_millis(100));
    }
    let answers = std::iter::from_fn(|| greedy.take_outcome());
    let sums = answers.map(|(_, reply)| Document::from_reader(&reply.unwrap()[..]).unwrap());
    let sums: Vec<Document> = sums.collect();
    assert_eq!(sums.len(), 400);
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{}", sums[0]);
    wait_until("what was kept is gone", || metric(&world, "kept") == 0);
}

#[test]
fn one_number_of_a_session_is_executed_once_whatever_carries_it() {
    let world = World::new(true);
    let id = bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![7; 16] };
    let write = doc! {
        "update": "c",
        "updates": [{ "q": { "_id": 1 }, "u": { "$inc": { "n": 1 } }, "upsert": true }],
        "lsid": { "id": id },
        "txnNumber": 1_i64,
    };
    for scheme in ["shm", "mongodb", "tcp"] {
        let reply = world.connect(scheme).run("d", write.clone()).unwrap();
        assert_eq!(reply.get_i32("n").unwrap(), 1, "{scheme}: {reply}");
    }
    let found = world.connect("auto").collection("d", "c").find_one(doc! {}).unwrap().unwrap();
    assert_eq!(found.get_i32("n").unwrap(), 1);
}

/// What the thread of fabric clients counted.
fn metric(world: &World, name: &str) -> u64 {
    let handle = world.documents.as_ref().unwrap().channel_handle();
    match name {
        "sleeps" => handle.sleeps(),
        "kept" => handle.kept_bytes(),
        "registrations" => handle.registrations(),
        _ => handle.requests(),
    }
}

#[test]
fn a_store_without_traffic_sleeps_and_is_woken_by_the_next_request() {
    let world = World::new(true);
    let mut client = world.connect("shm");
    for turn in 0..20 {
        client.collection("d", "c").insert_one(doc! { "_id": turn }).unwrap();
        // Until the thread has gone to sleep, and then a while longer: it does not wake by itself.
        let mut before = metric(&world, "sleeps");
        loop {
            std::thread::sleep(Duration::from_millis(20));
            let now = metric(&world, "sleeps");
            if now == before && now > 0 {
                break;
            }
            before = now;
        }
        if turn == 0 {
            // A thread that waited for a processor goes to sleep for the last time in the first of these.
            let sleeps_through = || {
                let before = metric(&world, "sleeps");
                std::thread::sleep(Duration::from_millis(1500));
                metric(&world, "sleeps") == before
            };
            assert!((0..10).any(|_| sleeps_through()), "it wakes by itself");
        }
    }
    // With the client's hello.
    wait_until("all commands are counted", || metric(&world, "requests") == 21);
}

#[test]
fn registrations_follow_connections_and_not_commands() {
    let world = World::new(true);
    let mut client = world.connect("shm");
    let mut c = client.collection("d", "c");
    c.insert_one(doc! { "_id": 0, "t": "t".repeat(100_000) }).unwrap();
    // Figures are told a moment later: with the client's hello.
    wait_until("the first command is counted", || metric(&world, "requests") == 2);
    let before = metric(&world, "registrations");
    for turn in 1..2000_i32 {
        c.insert_one(doc! { "_id": turn, "t": "t".repeat(turn as usize % 3000) }).unwrap();
        assert!(c.find_one(doc! { "_id": turn }).unwrap().is_some());
    }
    wait_until("all commands are counted", || metric(&world, "requests") == 2 + 2 * 1999);
    assert!(before > 0);
    assert_eq!(metric(&world, "registrations"), before);
}

/// A store with a user, which a client of the wire made from this host.
fn guarded() -> World {
    let mut world = World::new(true);
    world.stop();
    world.options.engine.authentication = true;
    world.start();
    let ann = doc! { "createUser": "ann", "pwd": "se,cret=", "roles": [] };
    world.connect("mongodb").run("admin", ann).unwrap();
    world
}

fn login(user: &str, password: &str) -> Options {
    let (user, password) = (user.to_owned(), password.to_owned());
    Options { login: Some(Login { user, password }), ..Options::default() }
}

#[test]
fn a_store_with_users_takes_clients_of_every_transport_that_log_in_and_no_others() {
    let world = guarded();
    for (number, scheme) in ["shm", "tcp", "mongodb"].into_iter().enumerate() {
        let number = number as i32;
        let mut stranger = world.connect(scheme);
        let refused = stranger.collection("d", "c").insert_one(doc! { "_id": 7 }).unwrap_err();
        assert_eq!(refused.code(), Some(13), "{scheme}: {refused}");
        let found = stranger.collection("d", "c").find_one(doc! { "_id": 7 }).unwrap_err();
        assert_eq!(found.code(), Some(13), "{scheme}: {found}");
        for (user, password) in [("ann", "other"), ("ghost", "se,cret="), ("", ""), ("ann", "")] {
            let refused = Client::connect(&world.address(scheme), login(user, password));
            let refused = refused.unwrap_err();
            assert_eq!(refused.code(), Some(18), "{scheme}: {refused}");
        }
        let mut ann = Client::connect(&world.address(scheme), login("ann", "se,cret=")).unwrap();
        let transport = if scheme == "mongodb" { "mongodb wire" } else { scheme };
        assert_eq!(ann.transport(), transport, "{}", ann.reason());
        ann.collection("d", "c").insert_one(doc! { "_id": number }).unwrap();
        let long = doc! { "_id": 10 + number, "t": "t".repeat(1 << 20) };
        ann.collection("d", "c").insert_one(long).unwrap();
        // One password, written in two ways.
        let bea = format!("bea{number}");
        let made = doc! { "createUser": &bea, "pwd": "\u{2168}", "roles": [] };
        ann.run("admin", made).unwrap();
        Client::connect(&world.address(scheme), login(&bea, "IX")).unwrap();
        // An address may name the user.
        let address = world.address(scheme).replace("://", "://ann:se%2Ccret=@");
        let mut named = Client::connect(&address, Options::default()).unwrap();
        let found = named.collection("d", "c").find_one(doc! { "_id": number }).unwrap();
        assert_eq!(found, Some(doc! { "_id": number }));
        let status = named.run("admin", doc! { "connectionStatus": 1 }).unwrap();
        assert!(status.to_string().contains("\"ann\""), "{status}");
    }
}

#[test]
fn a_client_logs_in_again_where_its_connection_broke_and_a_dropped_user_has_no_rights_left() {
    let mut world = guarded();
    let mut ann = Client::connect(&world.address("auto"), login("ann", "se,cret=")).unwrap();
    ann.collection("d", "c").insert_one(doc! { "_id": 1 }).unwrap();
    world.stop();
    world.start();
    wait_until("the client sees that the channel ended", || !ann.is_connected());
    let found = ann.collection("d", "c").find_one(doc! { "_id": 1 }).unwrap();
    assert_eq!((found, ann.transport()), (Some(doc! { "_id": 1 }), "tcp"), "{}", ann.reason());
    let mut other = Client::connect(&world.address("shm"), login("ann", "se,cret=")).unwrap();
    other.run("admin", doc! { "dropUser": "ann" }).unwrap();
    for client in [&mut ann, &mut other] {
        let refused = client.collection("d", "c").find_one(doc! { "_id": 1 }).unwrap_err();
        assert_eq!(refused.code(), Some(13), "{refused}");
    }
}

#[test]
fn a_client_that_did_not_log_in_keeps_no_long_bodies_at_a_store_with_users() {
    let world = guarded();
    let (mut stranger, _dialler) = raw_client(&world, 16);
    let mut send = |length: usize| {
        let command = doc! { "insert": "c", "documents": [{ "_id": 1, "t": "t".repeat(length) }], "$db": "d" };
        let body = command.to_vec().unwrap();
        let limit = Duration::from_secs(30);
        let index =
            stranger.submit(channel::MessageType::Insert, b"d", &body, (0, 0), limit).unwrap();
        stranger.wait(index, Duration::ZERO)
    };
    let refused = Document::from_reader(&send(60_000).unwrap()[..]).unwrap();
    assert_eq!(refused.get_i32("code").unwrap(), 13, "{refused}");
    assert_eq!(send(66_000), Err(channel::RequestError::Broken));
}

/// A channel without a client above it, and what it was made by.
fn raw_client(world: &World, outstanding: u16) -> (channel::ChannelClient, Dialler) {
    let mut dialler =
        Dialler::new(SERVICE, &world.address("shm"), Duration::from_secs(10)).unwrap();
    let dialled = dialler.dial().unwrap();
    let options = channel::ClientOptions { outstanding, ..channel::ClientOptions::default() };
    let mut exchange = |info: &ConnectInfo, hello: &[u8]| {
        dialled.exchange(0, info, hello).map_err(|error| Box::new(error) as _)
    };
    let (clock, mut idle) = (Arc::new(SystemClock), Load::IDLE);
    let made = channel::connect(&dialled.device, &mut exchange, &options, clock, &mut idle);
    (made.unwrap(), dialler)
}

/// The number of a tailable cursor that stands at the end of a capped collection.
fn tail(client: &mut Client) -> i64 {
    let find = doc! { "find": "log", "tailable": true, "awaitData": true };
    let found = client.run("d", find).unwrap();
    found.get_document("cursor").unwrap().get_i64("id").unwrap()
}

/// What a getMore brings: the documents of its batch.
fn next_batch(client: &mut Client, cursor: i64, wait_ms: i64) -> Vec<Bson> {
    let more = doc! { "getMore": cursor, "collection": "log", "maxTimeMS": wait_ms };
    let reply = client.run("d", more).unwrap();
    reply.get_document("cursor").unwrap().get_array("nextBatch").unwrap().clone()
}

#[test]
fn a_get_more_waits_for_news_over_every_transport() {
    let world = World::new(true);
    let mut writer = world.connect("mongodb");
    writer.run("d", doc! { "create": "log", "capped": true, "size": 1 << 20 }).unwrap();
    writer.collection("d", "log").insert_one(doc! { "_id": 0 }).unwrap();
    for (number, scheme) in ["shm", "tcp", "mongodb"].into_iter().enumerate() {
        let (number, address) = (number as i32 + 1, world.address(scheme));
        let (ready, waits) = std::sync::mpsc::channel();
        let reading = std::thread::spawn(move || {
            // A command may take less time than the getMore waits.
            let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
            let mut reader = Client::connect(&address, options).unwrap();
            let cursor = tail(&mut reader);
            let start = std::time::Instant::now();
            assert!(next_batch(&mut reader, cursor, 2500).is_empty());
            assert!(start.elapsed() >= Duration::from_millis(2500));
            let pipeline = vec![doc! { "$changeStream": {} }];
            let watch = doc! { "aggregate": "log", "pipeline": pipeline, "cursor": {} };
            let opened = reader.run("d", watch).unwrap();
            let stream = opened.get_document("cursor").unwrap().get_i64("id").unwrap();
            ready.send(()).unwrap();
            let documents = next_batch(&mut reader, cursor, 60_000);
            (documents, next_batch(&mut reader, stream, 60_000))
        });
        waits.recv().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        writer.collection("d", "log").insert_one(doc! { "_id": number }).unwrap();
        let (documents, events) = reading.join().unwrap();
        assert_eq!(documents, [Bson::Document(doc! { "_id": number })], "{scheme}");
        let event = events[0].as_document().unwrap();
        let inserted = event.get_document("fullDocument").unwrap();
        assert_eq!((inserted, events.len()), (&doc! { "_id": number }, 1), "{scheme}");
    }
}

#[test]
fn commands_that_wait_for_news_keep_neither_their_channel_nor_a_worker() {
    let world = World::new(true);
    let mut writer = world.connect("shm");
    writer.run("d", doc! { "create": "log", "capped": true, "size": 1 << 20 }).unwrap();
    writer.collection("d", "log").insert_one(doc! { "_id": 0 }).unwrap();
    let (mut raw, _dialler) = raw_client(&world, 40);
    let mut submit = |command: Document| {
        let (body, limit) = (command.to_vec().unwrap(), Duration::from_secs(100));
        raw.submit(channel::MessageType::Insert, b"d", &body, (0, 0), limit).unwrap()
    };
    for _ in 0..30 {
        let cursor = tail(&mut writer);
        submit(doc! { "getMore": cursor, "collection": "log", "maxTimeMS": 60_000, "$db": "d" });
    }
    // A worker runs this one, behind all of those.
    let count = submit(doc! { "count": "log", "query": { "_id": 0 }, "$db": "d" });
    let counted = Document::from_reader(&raw.wait(count, Duration::ZERO).unwrap()[..]).unwrap();
    assert_eq!(counted.get_i32("n").unwrap(), 1);
    assert_eq!(raw.outstanding(), 30, "{:?}", raw.take_outcome());
    writer.collection("d", "log").insert_one(doc! { "_id": 1 }).unwrap();
    while raw.outstanding() > 0 {
        raw.sleep(Duration::from_millis(100));
    }
    let answers: Vec<_> = std::iter::from_fn(|| raw.take_outcome()).collect();
    assert_eq!(answers.len(), 30);
    for (_, reply) in answers {
        let reply = Document::from_reader(&reply.unwrap()[..]).unwrap();
        let batch = reply.get_document("cursor").unwrap().get_array("nextBatch").unwrap();
        assert_eq!(*batch, [Bson::Document(doc! { "_id": 1 })], "{reply}");
    }
    wait_until("what was kept is gone", || metric(&world, "kept") == 0);
}

fn deep(levels: u32) -> Bson {
    (0..levels).fold(Bson::Int32(1), |inner, _| Bson::Document(doc! { "d": inner }))
}

#[test]
fn a_document_that_is_nested_too_deeply_is_refused_and_the_channel_goes_on() {
    let world = World::new(true);
    let mut client = world.connect("shm");
    let mut c = client.collection("d", "c");
    let refused = c.insert_one(doc! { "_id": 1, "d": deep(200) }).unwrap_err();
    assert_eq!(refused.code(), Some(15), "{refused}");
    c.insert_one(doc! { "_id": 1, "d": deep(100) }).unwrap();
    assert_eq!(client.resent(), 0);
}
