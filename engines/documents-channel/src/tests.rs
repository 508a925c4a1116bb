//! Both ends together, in virtual time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, ConnectInfo, Device, LocalData, MemoryRegion, Operation, QueuePair, QueuePairOptions,
    ReceiveRequest, RemoteAddress, RemoteKey, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_os::memory::copy_in;

use crate::client::{ChannelClient, ClientOptions, Outcome, RequestError, Submit};
use crate::greeting::Greeting;
use crate::indices::Indices;
use crate::message::{Immediate, Message, MessageType, REGION_KEY, SLOT_BYTES};
use crate::pool::ReplyBuffer;
use crate::register::{Load, Meters, RegisterOptions};
use crate::server::{Answer, ChannelId, ChannelServer, Handler, Incoming, ServerOptions};
use crate::{ConnectError, connect};

mod limits;
mod planted;
mod walks;

const LIMIT: Duration = Duration::from_secs(5);

/// What the server does: sends inserts back, answers a query with so many bytes, keeps updates.
#[derive(Default)]
struct Echo {
    kept: Vec<(ChannelId, u32, Vec<u8>)>,
    ended: Vec<ChannelId>,
    thread: Option<std::thread::ThreadId>,
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at as u32).wrapping_mul(2_654_435_761) as u8).collect()
}

impl Handler for Echo {
    fn execute(&mut self, request: &Incoming<'_>, reply: &mut ReplyBuffer) -> Answer {
        self.thread = Some(std::thread::current().id());
        match request.message.kind {
            MessageType::Insert | MessageType::Command => {
                // In odd pieces, so that buffers of the pool are crossed.
                for piece in request.body.chunks(37) {
                    reply.extend_from_slice(piece);
                }
                Answer::Reply
            }
            MessageType::Query => {
                let length = u64::from_le_bytes(request.body.try_into().unwrap()) as usize;
                reply.extend_from_slice(&vec![0; length]);
                reply.patch(0, &pattern(length));
                Answer::Reply
            }
            MessageType::Update => {
                let index = request.message.index;
                self.kept.push((request.channel, index, request.body.to_vec()));
                Answer::Later
            }
            MessageType::OptimeRequest => Answer::Optime(77),
            _ => Answer::Fail(123, "it is not done".to_owned()),
        }
    }

    fn ended(&mut self, channel: ChannelId) {
        self.ended.push(channel);
    }
}

struct World {
    sim: SimWorld,
    device: Arc<dyn Device>,
    server: ChannelServer,
    echo: Echo,
}

impl World {
    fn new(options: ServerOptions) -> Self {
        Self::with(options, SimOptions::default(), Load::IDLE)
    }

    fn with(options: ServerOptions, sim: SimOptions, load: Load) -> Self {
        let sim = SimWorld::new(7, sim);
        let device: Arc<dyn Device> = sim.device(0);
        let server =
            ChannelServer::new(device.clone(), options, sim.clock(), Box::new(load)).unwrap();
        Self { sim, device, server, echo: Echo::default() }
    }

    fn try_connect(
        &mut self,
        node: u32,
        options: &ClientOptions,
    ) -> Result<ChannelClient, ConnectError> {
        let device: Arc<dyn Device> = self.sim.device(node);
        let (clock, server) = (self.sim.clock(), RefCell::new(&mut self.server));
        let mut exchange = |info: &ConnectInfo, hello: &[u8]| {
            let (info, answer) = server.borrow_mut().accept(info, hello);
            Ok((info.unwrap_or(ConnectInfo(Vec::new())), answer))
        };
        let mut meters = Load::IDLE;
        connect(&device, &mut exchange, options, clock, &mut meters)
    }

    fn connect(&mut self, node: u32, options: &ClientOptions) -> ChannelClient {
        self.try_connect(node, options).unwrap()
    }

    fn serve(&mut self) {
        while self.server.poll(&mut self.echo).unwrap() > 0 {}
    }

    /// Everything that can happen happens.
    fn settle(&mut self, clients: &mut [&mut ChannelClient]) {
        for _ in 0..100_000 {
            let happened = self.sim.step_within(Duration::from_micros(200));
            self.serve();
            let polled: usize = clients.iter_mut().map(|client| client.poll()).sum();
            if !happened && polled == 0 {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    fn call(&mut self, client: &mut ChannelClient, kind: MessageType, body: &[u8]) -> Outcome {
        let index = client.submit(kind, b"d.c", body, (0, 0), LIMIT).unwrap();
        self.settle(&mut [client]);
        let (found, outcome) = client.take_outcome().expect("every request ends");
        assert_eq!(found, index);
        outcome
    }
}

/// Little of everything, so that ends are met.
fn tight(slots: u16) -> (ServerOptions, ClientOptions) {
    let register = RegisterOptions { base_bytes: 64 << 10, ..RegisterOptions::default() };
    let server = ServerOptions {
        slots,
        register,
        pool_buffers: 16,
        buffer_bytes: 4096,
        ..ServerOptions::default()
    };
    let client = ClientOptions { slots, outstanding: 8, register, ..ClientOptions::default() };
    (server, client)
}

#[test]
fn bodies_and_replies_of_every_size_come_back_as_they_were() {
    let (options, client_options) = tight(4);
    let mut world = World::new(options);
    let mut client = world.connect(1, &client_options);
    let idle = (world.server.idle_buffers(), client.idle());
    for length in [0, 1, 439, 440, 441, 4079, 4096, 32_767, 32_768, 65_536, 70_000, 1 << 20] {
        let body = pattern(length);
        assert_eq!(world.call(&mut client, MessageType::Insert, &body), Ok(body), "{length}");
    }
    for length in [0_u64, 5, 4080, 32_751, 32_752, 32_753, 100_000, 3 << 20] {
        let found = world.call(&mut client, MessageType::Query, &length.to_le_bytes()).unwrap();
        assert!(found == pattern(length as usize), "{length}: {} bytes came", found.len());
    }
    assert!(world.server.counters().staged_bytes > 0, "the pool of 64 KiB was too small for that");
    assert_eq!((world.server.idle_buffers(), client.idle()), idle, "every buffer is back");
    assert_eq!(world.echo.thread, Some(std::thread::current().id()), "run to completion");
}

#[test]
fn where_buffers_are_idle_no_reply_is_copied_once_more() {
    let mut world = World::new(ServerOptions::default());
    let mut client = world.connect(1, &ClientOptions::default());
    for length in [0_u64, 1000, 60_000, 300_000] {
        let found = world.call(&mut client, MessageType::Query, &length.to_le_bytes()).unwrap();
        assert!(found == pattern(length as usize), "{length}: {} bytes came", found.len());
    }
    assert_eq!(world.server.counters().staged_bytes, 0);
}

#[test]
fn errors_optimes_and_late_answers_find_their_requests() {
    let mut world = World::new(ServerOptions::default());
    let mut client = world.connect(1, &ClientOptions::default());
    let refused = RequestError::Refused { code: 123, text: "it is not done".to_owned() };
    assert_eq!(world.call(&mut client, MessageType::Delete, b"x"), Err(refused));
    let optime = world.call(&mut client, MessageType::OptimeRequest, b"").unwrap();
    assert_eq!(optime, 77_u64.to_le_bytes());
    let first = client.submit(MessageType::Update, b"n", b"1", (0, 0), LIMIT).unwrap();
    let second = client.submit(MessageType::Update, b"n", b"2", (0, 0), LIMIT).unwrap();
    world.settle(&mut [&mut client]);
    assert!(client.take_outcome().is_none());
    // Answered in the other order.
    for (channel, index, body) in std::mem::take(&mut world.echo.kept).into_iter().rev() {
        world.server.respond(channel, index, &body, &mut world.echo);
    }
    world.settle(&mut [&mut client]);
    assert_eq!(client.take_outcome(), Some((second, Ok(b"2".to_vec()))));
    assert_eq!(client.take_outcome(), Some((first, Ok(b"1".to_vec()))));
}

#[test]
fn a_slow_receiver_makes_the_sender_wait_and_loses_and_overwrites_nothing() {
    for slots in 1..=4 {
        let (options, client_options) = tight(slots);
        let mut world = World::new(options);
        let mut client = world.connect(1, &client_options);
        let mut waiting = HashMap::new();
        let (mut done, mut sent, mut refused) = (0, 0_u32, 0);
        while done < 300 {
            // The receiver looks once in seven turns.
            if sent < 300 {
                // Bodies inside messages and in the area, each its own canary.
                let length = [20, 430, 500, 9000][sent as usize % 4];
                let mut body = pattern(length);
                body[..4].copy_from_slice(&sent.to_le_bytes());
                match client.submit(MessageType::Insert, b"d.c", &body, (0, 0), LIMIT) {
                    Ok(index) => {
                        assert!(waiting.insert(index, body).is_none());
                        sent += 1;
                    }
                    Err(Submit::Full) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            world.sim.run_for(Duration::from_micros(3));
            client.poll();
            if refused % 7 == 0 {
                world.serve();
            }
            refused += u32::from(sent == 300);
            while let Some((index, outcome)) = client.take_outcome() {
                assert_eq!(outcome, Ok(waiting.remove(&index).unwrap()), "{slots} slots");
                done += 1;
            }
        }
        assert!(refused > 0, "{slots} slots: the sender had to wait");
        world.settle(&mut [&mut client]);
        assert_eq!(world.server.counters().requests, 300);
    }
}

#[test]
fn nothing_is_registered_on_the_data_path() {
    let (options, client_options) = tight(16);
    let mut world = World::new(options);
    let mut client = world.connect(1, &client_options);
    let before = (world.server.counters().registrations, client.counters().registrations);
    let bytes = (world.server.registered_bytes(), client.registered_bytes());
    let mut done = 0;
    while done < 100_000 {
        while client.submit(MessageType::Insert, b"d.c", b"small", (0, 0), LIMIT).is_ok() {}
        world.sim.run_for(Duration::from_micros(5));
        world.serve();
        client.poll();
        while let Some((_, outcome)) = client.take_outcome() {
            assert_eq!(outcome.unwrap(), b"small");
            done += 1;
        }
    }
    assert_eq!((world.server.counters().registrations, client.counters().registrations), before);
    assert_eq!((world.server.registered_bytes(), client.registered_bytes()), bytes);
    world.settle(&mut [&mut client]);
    assert_eq!(world.server.idle_buffers(), 16);
}

#[test]
fn a_connection_that_breaks_ends_every_request_once_and_gives_every_buffer_back() {
    for server_dies in [true, false] {
        let (options, client_options) = tight(4);
        let mut world = World::new(options);
        let mut client = world.connect(1, &client_options);
        let mut other = world.connect(2, &client_options);
        let idle = client.idle();
        let mut asked = Vec::new();
        for _ in 0..3 {
            asked.push(client.submit(MessageType::Update, b"n", b"x", (0, 0), LIMIT).unwrap());
        }
        world.settle(&mut [&mut client]);
        // A long reply is kept for a client that is about to go.
        let length = (1_u64 << 20).to_le_bytes();
        asked.push(client.submit(MessageType::Query, b"n", &length, (0, 0), LIMIT).unwrap());
        world.sim.run_for(Duration::from_micros(5));
        world.serve();
        world.sim.crash(if server_dies { 0 } else { 1 });
        if server_dies {
            // What is written to a peer that is gone comes back as an error.
            asked.push(client.submit(MessageType::Insert, b"n", b"x", (0, 0), LIMIT).unwrap());
            for _ in 0..100 {
                world.sim.run_for(Duration::from_secs(1));
                client.poll();
            }
            assert!(client.is_broken());
            assert_eq!((client.idle(), client.quarantined(), client.outstanding()), (idle, 0, 0));
            let mut ended: Vec<u32> = Vec::new();
            while let Some((index, outcome)) = client.take_outcome() {
                assert_eq!(outcome, Err(RequestError::Broken));
                ended.push(index);
            }
            ended.sort_unstable();
            assert_eq!(ended, asked);
            let again = client.submit(MessageType::Insert, b"n", b"x", (0, 0), LIMIT);
            assert_eq!(again, Err(Submit::Broken));
        } else {
            for _ in 0..100 {
                world.sim.run_for(Duration::from_secs(1));
                // What is written to a peer that is gone comes back as an error.
                for (channel, index, body) in std::mem::take(&mut world.echo.kept) {
                    world.server.respond(channel, index, &body, &mut world.echo);
                }
                world.serve();
            }
            assert_eq!((world.server.channels(), world.echo.ended.len()), (1, 1));
            assert_eq!(world.server.idle_buffers(), 16, "its buffers are back");
            let body = pattern(5000);
            assert_eq!(world.call(&mut other, MessageType::Insert, &body), Ok(body));
        }
    }
}

#[test]
fn a_write_that_comes_after_its_time_out_hits_a_buffer_nobody_uses() {
    let (options, mut client_options) = tight(4);
    client_options.outstanding = 2;
    let mut world = World::new(options);
    let mut client = world.connect(1, &client_options);
    let short = Duration::from_millis(1);
    let late = client.submit(MessageType::Update, b"n", b"late", (0, 0), short).unwrap();
    world.settle(&mut [&mut client]);
    world.sim.run_for(Duration::from_millis(2));
    client.expire();
    assert_eq!(client.take_outcome(), Some((late, Err(RequestError::TimedOut))));
    assert_eq!((client.quarantined(), client.idle().0), (1, 1));
    // The buffer that is left serves others, and the index of the late request is not given out.
    client_indices(&mut client, late);
    for _ in 0..5 {
        let body = pattern(300);
        let index = client.submit(MessageType::Insert, b"n", &body, (0, 0), LIMIT).unwrap();
        assert_ne!(index, late);
        world.settle(&mut [&mut client]);
        assert_eq!(client.take_outcome(), Some((index, Ok(body))));
    }
    let (channel, index, body) = world.echo.kept.pop().unwrap();
    world.server.respond(channel, index, &body, &mut world.echo);
    world.settle(&mut [&mut client]);
    assert!(client.take_outcome().is_none());
    assert_eq!((client.quarantined(), client.idle().0), (0, 2));
    assert_eq!(client.counters().late_writes, 1);
    assert_eq!(client.counters().unknown_immediates, 0);
}

/// Lets the next request have the index `next`, unless that is in use.
fn client_indices(client: &mut ChannelClient, next: u32) {
    client.set_indices(Indices::from(next));
}

#[test]
fn indices_wrap_on_a_channel_at_work() {
    let (options, client_options) = tight(4);
    let mut world = World::new(options);
    let mut client = world.connect(1, &client_options);
    client_indices(&mut client, 0xFFFF_FFFC);
    for turn in 0..6_u32 {
        let body = turn.to_le_bytes();
        assert_eq!(world.call(&mut client, MessageType::Insert, &body), Ok(body.to_vec()));
    }
}

#[test]
fn a_flipped_bit_is_found_in_validation_mode_and_only_there() {
    for checksum in [true, false] {
        let mut world = World::new(ServerOptions::default());
        let options = ClientOptions { checksum, ..ClientOptions::default() };
        let mut client = world.connect(1, &options);
        let body = pattern(1000);
        assert_eq!(world.call(&mut client, MessageType::Insert, &body), Ok(body.clone()));
        let index = client.submit(MessageType::Insert, b"n", &body, (0, 0), LIMIT).unwrap();
        for _ in 0..200 {
            world.sim.run_for(Duration::from_micros(10));
            world.serve();
            // Credits and grants are taken, and the reply is not: it lies in its destination.
            if world.server.counters().requests == 2 {
                break;
            }
            client.poll();
        }
        world.sim.run_for(Duration::from_millis(1));
        client.flip_destination_bits();
        world.settle(&mut [&mut client]);
        let (found, outcome) = client.take_outcome().unwrap();
        assert_eq!(found, index);
        match checksum {
            true => assert_eq!(outcome, Err(RequestError::Corrupt)),
            false => assert!(outcome.is_ok_and(|bytes| bytes != body)),
        }
    }
}

#[test]
fn a_hundred_and_more_channels_share_one_receive_queue() {
    let (mut options, mut client_options) = tight(2);
    client_options.outstanding = 2;
    options.pool_buffers = 64;
    let mut world = World::new(options);
    let posted = world.server.posted_receives();
    let mut clients: Vec<ChannelClient> =
        (0..130).map(|node| world.connect(node + 1, &client_options)).collect();
    assert_eq!(world.server.posted_receives(), posted, "no channel has receives of its own");
    for round in 0..90_u32 {
        for client in &mut clients {
            let body = round.to_le_bytes();
            client.submit(MessageType::Insert, b"n", &body, (0, 0), LIMIT).unwrap();
        }
        let mut all: Vec<&mut ChannelClient> = clients.iter_mut().collect();
        world.settle(&mut all);
        for client in &mut clients {
            let (_, outcome) = client.take_outcome().unwrap();
            assert_eq!(outcome, Ok(round.to_le_bytes().to_vec()));
        }
    }
    // 11,700 messages went through 8,192 receives: they were posted again, half of them at a time.
    assert!(world.server.posted_receives() > posted / 2);
    assert_eq!(world.server.counters().requests, 130 * 90);
}

#[test]
fn a_loaded_host_gives_smaller_areas() {
    let busy = Load { memory_used: 80.0, memory_total: 100.0, network_used: 0.0 };
    let mut sizes = Vec::new();
    for load in [Load::IDLE, busy] {
        let register = RegisterOptions { base_bytes: 1 << 20, ..RegisterOptions::default() };
        let options = ServerOptions { register, ..ServerOptions::default() };
        let mut world = World::with(options, SimOptions::default(), load);
        let _client = world.connect(1, &ClientOptions::default());
        sizes.push(world.server.area_bytes(1).unwrap());
    }
    assert_eq!(sizes, [1 << 20, ((1_u64 << 20) as f64 * 0.2 * 0.8) as u64 / 4096 * 4096 + 4096]);
}

#[test]
fn two_ends_that_do_not_both_want_the_channel_use_tcp_and_register_nothing() {
    for (server, client) in [(false, true), (true, false), (false, false)] {
        let wire = "127.0.0.1:27017".parse().ok();
        let options = ServerOptions { is_rdma: server, wire, ..ServerOptions::default() };
        let mut world = World::new(options);
        let options = ClientOptions { is_rdma: client, ..ClientOptions::default() };
        let outcome = world.try_connect(1, &options);
        let Err(ConnectError::UseTcp { wire: found, reason }) = outcome else {
            panic!("{server} and {client}: {outcome:?}");
        };
        assert_eq!(found, wire, "{reason}");
        let counters = world.server.counters();
        assert_eq!((counters.refused, counters.registrations), (1, 1));
    }
}

/// A client that keeps no rule.
struct Raw {
    qp: Box<dyn QueuePair>,
    queue: Rc<dyn beeline_fabric::CompletionQueue>,
    theirs: RemoteAddress,
    window: MemoryRegion,
}

impl Raw {
    fn connect(world: &mut World, node: u32) -> Self {
        let device: Arc<dyn Device> = world.sim.device(node);
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(256).unwrap();
        let options = QueuePairOptions::default();
        let mut qp = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        let memory = device.allocate_memory(64 << 10).unwrap();
        let window = domain.register(memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
        let hello = Greeting {
            is_rdma: true,
            slots: 4,
            region_key: window.remote_key().0,
            region_bytes: window.length_bytes(),
            ..Greeting::without(crate::RnicInfo::named("raw"), None, "")
        };
        let (info, answer) = world.server.accept(&qp.connect_info(), &hello.encode());
        let theirs = Greeting::decode(&answer).unwrap();
        for _ in 0..64 {
            qp.post_receive(&[ReceiveRequest { wr_id: 0, buffer: None }]).unwrap();
        }
        qp.connect(&info.unwrap(), Role::Active).unwrap();
        qp.wait_connected(LIMIT).unwrap();
        let theirs = RemoteAddress { key: RemoteKey(theirs.region_key), offset: 0 };
        Self { qp, queue, theirs, window }
    }

    fn write(&mut self, bytes: &[u8], remote: RemoteAddress, immediate: Option<u32>) {
        copy_in(self.window.memory().as_ref(), 32 << 10, bytes);
        let (region, length) = (&self.window, bytes.len() as u64);
        let entry = [ScatterGatherEntry { region, offset: 32 << 10, length }];
        let local = LocalData::Gather(&entry);
        let operation = match immediate {
            Some(immediate) => Operation::WriteWithImmediate { local, remote, immediate },
            None => Operation::Write { local, remote },
        };
        self.qp.post_send(&[WorkRequest::new(0, operation)]).unwrap();
    }

    fn is_ended(&mut self, world: &mut World) -> bool {
        let mut seen = [WorkCompletion::EMPTY; 64];
        for _ in 0..20 {
            world.sim.run_for(Duration::from_millis(100));
            world.serve();
            let count = self.queue.poll(&mut seen).unwrap();
            if seen[..count].iter().any(|one| !one.is_success()) {
                return true;
            }
        }
        world.server.channels() == 1
    }
}

#[test]
fn a_client_that_breaks_the_rules_ends_its_own_channel_alone() {
    let mut world = World::new(ServerOptions { slots: 4, ..ServerOptions::default() });
    let mut good = world.connect(1, &ClientOptions::default());
    let message = Immediate::Message.code();
    let wrong_key = |raw: &Raw| RemoteAddress { key: RemoteKey(raw.theirs.key.0 ^ 1), offset: 0 };
    type Deed = fn(&mut Raw, u32, RemoteAddress);
    let deeds: [(&str, Deed); 6] = [
        ("a message that is too short", |raw, message, _| {
            raw.write(b"short", raw.theirs, Some(message));
        }),
        ("data without a request", |raw, _, _| {
            raw.write(b"", raw.theirs, Some(5));
        }),
        ("an acknowledgement of nothing", |raw, _, _| {
            raw.write(b"", raw.theirs, Some(Immediate::Acknowledge.code()));
        }),
        ("a write with a wrong key", |raw, _, wrong| raw.write(b"x", wrong, None)),
        ("a write behind the region", |raw, _, _| {
            raw.write(b"x", raw.theirs.advanced(1 << 40), None);
        }),
        ("a write across the end of the region", |raw, _, _| {
            let end = raw.theirs.advanced(4 * SLOT_BYTES as u64 + (64 << 20) - 4);
            raw.write(&[0; 100], end, None);
        }),
    ];
    for (node, (name, deed)) in deeds.iter().enumerate() {
        let mut raw = Raw::connect(&mut world, 10 + node as u32);
        let wrong = wrong_key(&raw);
        deed(&mut raw, message, wrong);
        assert!(raw.is_ended(&mut world), "{name}");
        drop(raw);
        world.settle(&mut [&mut good]);
        let body = pattern(900);
        assert_eq!(world.call(&mut good, MessageType::Insert, &body), Ok(body), "after {name}");
    }
}

#[test]
fn destinations_outside_the_clients_region_and_broken_messages_are_refused() {
    let kinds = [
        Message { address: 0, bytes: 4096, key: REGION_KEY, ..Message::new(MessageType::Query, 1) },
        Message { address: 8192, bytes: 4096, key: 2, ..Message::new(MessageType::Query, 1) },
        Message { address: 8192, bytes: 8, key: REGION_KEY, ..Message::new(MessageType::Query, 1) },
        Message {
            address: u64::MAX,
            bytes: 4096,
            key: REGION_KEY,
            ..Message::new(MessageType::Query, 1)
        },
        Message {
            address: 64 << 10,
            bytes: 4096,
            key: REGION_KEY,
            ..Message::new(MessageType::Query, 1)
        },
        Message {
            address: 8192,
            bytes: 4096,
            key: REGION_KEY,
            ..Message::new(MessageType::Grant, 1)
        },
    ];
    for message in kinds {
        let mut world = World::new(ServerOptions { slots: 4, ..ServerOptions::default() });
        let mut raw = Raw::connect(&mut world, 3);
        // One that keeps the rules first: what is refused is not refused for its bytes.
        let length = 5_u64.to_le_bytes();
        let fine = Message {
            address: 8192,
            bytes: 4096,
            key: REGION_KEY,
            body: &length,
            ..Message::new(MessageType::Query, 0)
        };
        let mut out = [0; SLOT_BYTES];
        let message_code = Immediate::Message.code();
        raw.write(fine.write(&mut out).unwrap(), raw.theirs, Some(message_code));
        world.sim.run_for(Duration::from_millis(10));
        world.serve();
        assert_eq!((world.server.channels(), world.server.counters().requests), (1, 1));
        let second = raw.theirs.advanced(SLOT_BYTES as u64);
        raw.write(message.write(&mut out).unwrap(), second, Some(message_code));
        world.sim.run_for(Duration::from_millis(10));
        world.serve();
        assert_eq!(world.server.channels(), 0, "{message:?}");
        assert_eq!(world.server.counters().protocol_errors, 1);
    }
}

#[test]
fn a_loop_that_arms_before_it_polls_misses_no_completion() {
    let (options, client_options) = tight(4);
    let mut world = World::new(options);
    let mut client = world.connect(1, &client_options);
    // A completion at every point between the event, its acknowledgement, arming and polling.
    for point in 0..4 {
        let mut send = |world: &mut World, at: usize| {
            if at == point {
                client.submit(MessageType::Insert, b"n", b"x", (0, 0), LIMIT).unwrap();
                world.sim.run_for(Duration::from_micros(50));
            }
        };
        send(&mut world, 0);
        world.server.acknowledge().unwrap();
        send(&mut world, 1);
        world.server.arm().unwrap();
        send(&mut world, 2);
        let before = world.server.counters().requests;
        world.serve();
        send(&mut world, 3);
        let served = world.server.counters().requests - before;
        let readable = is_readable(&world.server);
        assert!(served == 1 || readable, "point {point}: {served} served, event {readable}");
        world.settle(&mut [&mut client]);
        while client.take_outcome().is_some() {}
    }
}

fn is_readable(server: &ChannelServer) -> bool {
    let mut poller = beeline_os::poller::Poller::new(1).unwrap();
    poller.add(server.event_descriptor(), 0, beeline_os::poller::Interest::READ).unwrap();
    poller.wait(Some(Duration::ZERO)).unwrap() > 0
}

#[test]
fn a_client_that_never_connects_is_let_go() {
    let mut world = World::new(ServerOptions::default());
    let device: Arc<dyn Device> = world.sim.device(4);
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(256).unwrap();
    let options = QueuePairOptions::default();
    let qp = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    let hello = Greeting {
        is_rdma: true,
        slots: 4,
        region_bytes: 1 << 16,
        ..Greeting::without(crate::RnicInfo::named("raw"), None, "")
    };
    let (info, _) = world.server.accept(&qp.connect_info(), &hello.encode());
    assert!(info.is_some() && world.server.expects());
    world.sim.run_for(Duration::from_secs(11));
    world.serve();
    world.server.expire(&mut world.echo);
    assert_eq!((world.server.channels(), world.server.expects()), (0, false));
}

/// Meters that a test may change while the server has them.
#[test]
fn meters_are_asked_for_each_channel() {
    #[derive(Debug)]
    struct Rising(f64);
    impl Meters for Rising {
        fn load(&mut self) -> Load {
            self.0 += 30.0;
            Load { memory_used: self.0, memory_total: 100.0, network_used: 0.0 }
        }
    }
    let mut world = World::new(ServerOptions::default());
    let register = RegisterOptions { base_bytes: 1 << 20, ..RegisterOptions::default() };
    let options = ServerOptions { register, ..ServerOptions::default() };
    let (device, clock) = (world.device.clone(), world.sim.clock());
    world.server = ChannelServer::new(device, options, clock, Box::new(Rising(0.0))).unwrap();
    let _clients: Vec<ChannelClient> =
        (1..4).map(|node| world.connect(node, &ClientOptions::default())).collect();
    let sizes: Vec<u64> = (1..4).filter_map(|id| world.server.area_bytes(id)).collect();
    assert!(sizes[0] == 1 << 20 && sizes[1] < sizes[0] && sizes[2] < sizes[1], "{sizes:?}");
}

/// For the test of validation mode.
impl ChannelClient {
    fn flip_destination_bits(&mut self) {
        let (offset, count) = self.small_destinations();
        let memory = self.window().memory().as_ref();
        for destination in 0..count {
            let at = (offset + destination * 4096) as usize + 16 + 100;
            let mut byte = [0];
            beeline_os::memory::copy_out(memory, at, &mut byte);
            copy_in(memory, at, &[byte[0] ^ 8]);
        }
    }
}
