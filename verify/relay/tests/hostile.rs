//! A relay that lies: its connections end, nobody else's do, and nothing falls over.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::cell::RefCell;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, LocalData, MemoryRegion, Operation,
    ProtectionDomain, QueuePair, QueuePairOptions, ReceiveRequest, RemoteAddress, RemoteKey, Role,
    ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_fabric_sim::{SimDevice, SimOptions, SimWorld};
use beeline_os::memory::{copy_in, copy_out};
use beeline_sockets_relay::message::{Ground, MESSAGE_BYTES, Record, Records, record_bytes};
use beeline_sockets_relay::network::{Event, Events, Inbox, Network, inbox};
use beeline_sockets_relay::{Core, Host, Settings};
use beeline_verify_relay::program::{Program, Received};
use beeline_verify_relay::{HOST, World};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

/// The network of the relay under test: it reaches the liar, which answers what it likes.
#[derive(Debug)]
struct ToLiar {
    own: Inbox,
    device: Arc<SimDevice>,
    calls: std::sync::mpsc::Sender<(u64, ConnectInfo, Vec<u8>)>,
    confirms: bool,
}

impl Network for ToLiar {
    fn find(&self, host: usize) {
        let device: Arc<dyn Device> = Arc::<SimDevice>::clone(&self.device);
        self.own.put(Event::Found { host, device: Ok(device) });
    }

    fn join(&self, _host: usize, link: u64, info: ConnectInfo, hello: Vec<u8>) {
        self.calls.send((link, info, hello)).unwrap();
    }

    fn confirm(&self, _host: usize, link: u64, _words: Vec<u8>) {
        self.own.put(Event::Confirmed { link, yes: self.confirms });
    }
}

const RECEIVES: usize = 64;
/// Of another host than everybody else's.
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

fn host(address: IpAddr) -> Host {
    Host { addresses: vec![address] }
}

/// A queue pair with hand-made messages.
struct Liar {
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
    domain: Arc<dyn ProtectionDomain>,
    region: MemoryRegion,
    heard: Vec<(u64, OwnedRecord)>,
    /// What others were told that they may write to.
    grounds: RefCell<Vec<MemoryRegion>>,
}

/// What of a record is used here.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OwnedRecord {
    Offer { name: u64, own: SocketAddr, peer: SocketAddr },
    Accept { name: u64, ground: Ground },
    Commit { ground: Ground },
    Refuse,
    Reset,
    Ended,
    Recall,
    Stay,
    Other,
}

impl Liar {
    fn new(device: &Arc<SimDevice>) -> Self {
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(4096).unwrap();
        let memory = device.allocate_memory((RECEIVES + 1) * MESSAGE_BYTES).unwrap();
        let region = domain.register(memory, Access::LOCAL_WRITE).unwrap();
        let options = QueuePairOptions { receive_depth: 128, ..QueuePairOptions::default() };
        let mut pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        for slot in 0..RECEIVES {
            let entry = ScatterGatherEntry {
                region: &region,
                offset: ((slot + 1) * MESSAGE_BYTES) as u64,
                length: MESSAGE_BYTES as u64,
            };
            let request = ReceiveRequest { wr_id: slot as u64 + 1, buffer: Some(entry) };
            pair.post_receive(&[request]).unwrap();
        }
        Self { queue, pair, domain, region, heard: Vec::new(), grounds: RefCell::default() }
    }

    fn ground(&self) -> Ground {
        let memory = Arc::new(beeline_os::SharedMemory::allocate("liar", 1 << 16).unwrap());
        let region = self.domain.register(memory, Access::REMOTE_WRITE).unwrap();
        let ground = Ground { key: region.remote_key().0, base: 0 };
        self.grounds.borrow_mut().push(region);
        ground
    }

    fn poll(&mut self) {
        let mut completions = [WorkCompletion::EMPTY; 16];
        let count = self.queue.poll(&mut completions).unwrap();
        for completion in &completions[..count] {
            if completion.wr_id == 0 || !completion.is_success() {
                continue;
            }
            let at = completion.wr_id as usize * MESSAGE_BYTES;
            let mut message = vec![0; completion.length as usize];
            copy_out(self.region.memory().as_ref(), at, &mut message);
            for record in Records::new(&message) {
                let (name, record) = record.expect("an honest relay says what can be read");
                let record = match record {
                    Record::Offer { name, own, peer, .. } => OwnedRecord::Offer { name, own, peer },
                    Record::Accept { name, ground } => OwnedRecord::Accept { name, ground },
                    Record::Commit { ground } => OwnedRecord::Commit { ground },
                    Record::Refuse => OwnedRecord::Refuse,
                    Record::Reset => OwnedRecord::Reset,
                    Record::Ended => OwnedRecord::Ended,
                    Record::Recall { .. } => OwnedRecord::Recall,
                    Record::Stay => OwnedRecord::Stay,
                    _ => OwnedRecord::Other,
                };
                self.heard.push((name, record));
            }
            let entry = ScatterGatherEntry {
                region: &self.region,
                offset: at as u64,
                length: MESSAGE_BYTES as u64,
            };
            let request = ReceiveRequest { wr_id: completion.wr_id, buffer: Some(entry) };
            let _ = self.pair.post_receive(&[request]);
        }
    }

    fn say_bytes(&mut self, message: &[u8]) {
        copy_in(self.region.memory().as_ref(), 0, message);
        let entry =
            [ScatterGatherEntry { region: &self.region, offset: 0, length: message.len() as u64 }];
        let operation = Operation::Send { local: LocalData::Gather(&entry), immediate: None };
        let _ = self.pair.post_send(&[WorkRequest::new(0, operation)]);
    }

    fn say(&mut self, name: u64, record: &Record<'_>) {
        let mut message = vec![0; record_bytes(record.body_bytes())];
        record.encode(name, &mut message);
        self.say_bytes(&message);
    }

    /// Writes to where it was let write, or elsewhere.
    fn write(&mut self, ground: Ground, offset: u64, length: u64) {
        let entry = [ScatterGatherEntry { region: &self.region, offset: 0, length }];
        let remote = RemoteAddress { key: RemoteKey(ground.key), offset };
        let operation = Operation::Write { local: LocalData::Gather(&entry), remote };
        let _ = self.pair.post_send(&[WorkRequest::new(0, operation)]);
    }
}

/// A relay under test and a liar.
struct Scene {
    world: SimWorld,
    core: Core,
    events: Events,
    inbox: Inbox,
    calls: std::sync::mpsc::Receiver<(u64, ConnectInfo, Vec<u8>)>,
    device: Arc<SimDevice>,
    next_cookie: u64,
}

impl Scene {
    fn new(seed: u64, confirms: bool) -> Self {
        let world = SimWorld::new(seed, SimOptions::default());
        let (inbox, events) = inbox().unwrap();
        let (calls, heard) = std::sync::mpsc::channel();
        let (honest, device) = (world.device(0), world.device(1));
        let network = ToLiar { own: inbox.clone(), device: Arc::clone(&honest), calls, confirms };
        let settings =
            Settings { hosts: [HOST, ELSEWHERE].map(host).into(), ..Settings::default() };
        let core = Core::new(settings, Box::new(network));
        Self { world, core, events, inbox, calls: heard, device, next_cookie: 1 }
    }

    fn turn(&mut self) {
        while let Some(event) = self.events.next() {
            self.core.happened(event);
        }
        self.core.turn(Duration::from_nanos(self.world.now_ns()));
        let _ = self.world.step_within(Duration::from_nanos(500));
    }

    fn turns(&mut self, liar: &mut Liar, count: usize) {
        for _ in 0..count {
            self.turn();
            liar.poll();
        }
    }

    /// A program's end whose relay offers (`smaller` address) or is offered; what is left of the
    /// kernel's pair keeps it open.
    fn adopt(&mut self, smaller: bool) -> (Program, TcpStream) {
        let [one, other] = pair_of(smaller);
        (self.take_in(one), other)
    }

    fn take_in(&mut self, stream: TcpStream) -> Program {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let [program, relay] = World::segment(16 << 10, cookie);
        let ends = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let copy = stream.try_clone().unwrap().into();
        self.core.adopt(ends, copy, relay).unwrap();
        Program::new(program, stream, cookie)
    }

    /// Answers the relay's call.
    fn be_called(&mut self) -> Liar {
        let mut liar = Liar::new(&self.device);
        let call = loop {
            self.turn();
            if let Ok(call) = self.calls.try_recv() {
                break call;
            }
        };
        let (link, info, hello) = call;
        liar.pair.connect(&info, Role::Passive).unwrap();
        let answer = Ok((liar.pair.connect_info(), hello));
        self.inbox.put(Event::Joined { link, answer });
        self.turns(&mut liar, 200);
        liar
    }

    /// Calls the relay.
    fn call(&mut self) -> Liar {
        let mut liar = Liar::new(&self.device);
        let (sender, answers) = std::sync::mpsc::channel();
        let device: Arc<dyn Device> = self.honest_device();
        self.inbox.put(Event::Called {
            device,
            info: liar.pair.connect_info(),
            hello: [&b"BLRL\x03\0\0\0"[..], &[9; 16]].concat(),
            answer: Box::new(move |answer| sender.send(answer).unwrap()),
        });
        self.turn();
        let (info, _) = answers.recv().unwrap().unwrap();
        liar.pair.connect(&info, Role::Active).unwrap();
        self.turns(&mut liar, 200);
        liar
    }

    fn honest_device(&self) -> Arc<dyn Device> {
        self.world.device(0)
    }

    /// A connection that the relay offered, paired; with its name at the relay and its ring.
    fn paired(&mut self, liar: &mut Liar, program: &Program) -> (u64, Ground) {
        let ends = (
            program.stream.as_ref().unwrap().local_addr().unwrap(),
            program.stream.as_ref().unwrap().peer_addr().unwrap(),
        );
        let offered = |liar: &Liar| {
            liar.heard.iter().find_map(|(_, record)| match record {
                OwnedRecord::Offer { name, own, peer } if (*own, *peer) == ends => Some(*name),
                _ => None,
            })
        };
        let name = loop {
            self.turns(liar, 1);
            if let Some(name) = offered(liar) {
                break name;
            }
        };
        let mine = 1000 + program.cookie;
        let ground = liar.ground();
        liar.say(name, &Record::Accept { name: mine, ground });
        loop {
            self.turns(liar, 1);
            let committed = liar.heard.iter().find_map(|(at, record)| match record {
                OwnedRecord::Commit { ground } if *at == mine => Some(*ground),
                _ => None,
            });
            if let Some(ground) = committed {
                return (name, ground);
            }
        }
    }
}

/// A kernel connection whose first end has the `smaller` address.
fn pair_of(smaller: bool) -> [TcpStream; 2] {
    loop {
        let pair = World::kernel_pair();
        if (pair[0].local_addr().unwrap() < pair[0].peer_addr().unwrap()) == smaller {
            return pair;
        }
    }
}

fn is_reset(program: &mut Program) -> bool {
    program.receive(&mut [0; 64]) == Received::Reset
}

/// A data message: a header that says `length` bytes, and the payload.
fn ring_bytes(length: u64, payload: usize) -> Vec<u8> {
    let mut bytes = (1 << 32 | length).to_le_bytes().to_vec();
    bytes.resize(8 + payload, 7);
    bytes
}

#[test]
fn a_lie_about_one_connection_resets_that_one_alone() {
    let honest = ring_bytes(16, 16);
    let (too_long, too_short) = (ring_bytes(24, 16), ring_bytes(0, 16));
    let filler = [(2_u64 << 32).to_le_bytes().to_vec(), vec![0; 16]].concat();
    let header = 1 << 32 | 100;
    let signs =
        |switched_at, finished, closed, mute| Record::Signs { switched_at, finished, closed, mute };
    let lies = [
        Record::Data { position: 8, bytes: &honest },
        Record::Data { position: u64::MAX - 7, bytes: &honest },
        Record::Data { position: 0, bytes: &too_long },
        Record::Data { position: 0, bytes: &too_short },
        Record::Data { position: 0, bytes: &filler },
        Record::Placed { position: 0, end: 16 << 10, header },
        Record::Placed { position: 0, end: 104, header },
        Record::Placed { position: 0, end: 50, header },
        Record::Placed { position: 112, end: 0, header },
        Record::Placed { position: 0, end: u64::MAX, header: 1 << 32 | (20 << 10) },
        Record::Credit { position: 8 },
        Record::Credit { position: u64::MAX },
        signs(1, 2, 0, 0),
        signs(1, 0, 3, 0),
        signs(1, 0, 0, 9),
        Record::Commit { ground: Ground { key: 0, base: 0 } },
        Record::Accept { name: 1, ground: Ground { key: 0, base: 0 } },
        Record::Refuse,
        Record::Ended,
    ];
    for lie in &lies {
        let mut scene = Scene::new(1, true);
        let (mut victim, _one) = scene.adopt(true);
        let (mut bystander, _two) = scene.adopt(true);
        let mut liar = scene.be_called();
        let (name, _) = scene.paired(&mut liar, &victim);
        let (other, _) = scene.paired(&mut liar, &bystander);
        liar.say(name, lie);
        scene.turns(&mut liar, 50);
        assert!(is_reset(&mut victim), "{lie:?}");
        // Its neighbour on the same link goes on.
        liar.say(other, &Record::Data { position: 0, bytes: &honest });
        scene.turns(&mut liar, 50);
        assert_eq!(bystander.receive(&mut [0; 64]), Received::Bytes(16), "after {lie:?}");
        assert_eq!(scene.core.links_up(), 1, "{lie:?}");
    }
}

#[test]
fn what_goes_back_is_no_sign_of_an_end() {
    let mut scene = Scene::new(2, true);
    let (mut victim, _one) = scene.adopt(true);
    let mut liar = scene.be_called();
    let (name, _) = scene.paired(&mut liar, &victim);
    let signs = |switched_at| Record::Signs { switched_at, finished: 0, closed: 0, mute: 0 };
    liar.say(name, &signs(5));
    scene.turns(&mut liar, 50);
    assert!(!is_reset(&mut victim));
    liar.say(name, &signs(6));
    scene.turns(&mut liar, 50);
    assert!(is_reset(&mut victim), "a switch happens once");
}

#[test]
fn a_stay_that_answers_nothing_is_not_answered() {
    let mut scene = Scene::new(10, true);
    let (program, _far) = scene.adopt(true);
    let mut liar = scene.be_called();
    let (name, _) = scene.paired(&mut liar, &program);
    let stays = |liar: &Liar| liar.heard.iter().filter(|one| one.1 == OwnedRecord::Stay).count();
    for _ in 0..3 {
        liar.say(name, &Record::Stay);
        scene.turns(&mut liar, 200);
    }
    assert_eq!(stays(&liar), 0);
    // One that does is, once.
    scene.core.recall(program.cookie, Duration::from_secs(60));
    scene.turns(&mut liar, 200);
    assert!(liar.heard.iter().any(|one| one.1 == OwnedRecord::Recall));
    for _ in 0..3 {
        liar.say(name, &Record::Stay);
        scene.turns(&mut liar, 200);
    }
    assert_eq!((stays(&liar), scene.core.links_up()), (1, 1));
}

#[test]
fn a_relay_that_does_not_bring_back_what_it_is_asked_for_loses_that_connection_alone() {
    let mut scene = Scene::new(11, true);
    let ((mut back, _far), (mut stays, _far_too)) = (scene.adopt(true), scene.adopt(true));
    let mut liar = scene.be_called();
    scene.paired(&mut liar, &back);
    let (name, _) = scene.paired(&mut liar, &stays);
    scene.core.recall(back.cookie, Duration::from_secs(60));
    for _ in 0..11 {
        scene.world.run_for(Duration::from_secs(1));
        scene.turns(&mut liar, 20);
    }
    assert!(is_reset(&mut back));
    assert_eq!(stays.receive(&mut [0; 16]), Received::Nothing);
    assert_eq!(scene.core.links_up(), 1);
    let bytes = ring_bytes(16, 16);
    liar.say(name, &Record::Data { position: 0, bytes: &bytes });
    scene.turns(&mut liar, 200);
    assert_eq!(stays.receive(&mut [0; 16]), Received::Bytes(16));
}

#[test]
fn an_end_whose_relay_was_told_the_total_hears_of_no_end_in_good_order_when_the_link_breaks() {
    let mut scene = Scene::new(3, true);
    let (mut program, mut other) = scene.adopt(true);
    let mut liar = scene.be_called();
    let (name, _) = scene.paired(&mut liar, &program);
    liar.say(name, &Record::Signs { switched_at: 1, finished: 0, closed: 0, mute: 0 });
    scene.turns(&mut liar, 200);
    liar.say(name, &Record::Recall { hold_ms: u64::MAX, while_small: false });
    scene.turns(&mut liar, 1000);
    liar.say(name, &Record::Drained);
    scene.turns(&mut liar, 1000);
    assert!(scene.core.find(program.cookie).unwrap().is_silent());
    // By now it may be the kernel's there, whose relay said so, and nobody heard it.
    liar.say_bytes(b"not a message");
    scene.turns(&mut liar, 1000);
    assert_eq!(scene.core.links_up(), 0);
    assert!(is_reset(&mut program));
    other.set_nonblocking(true).unwrap();
    let mut bell = [0; 2];
    assert_eq!(other.read(&mut bell).ok(), Some(1), "the last doorbell");
    let end = other.read(&mut bell).map_err(|error| error.kind());
    assert_eq!(end, Err(std::io::ErrorKind::ConnectionReset));
}

#[test]
fn a_ring_cannot_be_overfilled_by_messages() {
    let mut scene = Scene::new(3, true);
    let (mut victim, _one) = scene.adopt(true);
    let mut liar = scene.be_called();
    let (name, _) = scene.paired(&mut liar, &victim);
    let piece = ring_bytes(1000, 1000);
    let mut position = 0;
    for _ in 0..20 {
        liar.say(name, &Record::Data { position, bytes: &piece });
        position += 1008;
        scene.turns(&mut liar, 20);
    }
    // Sixteen fit a ring of 16 KiB; the program never sees what was beyond.
    assert!(is_reset(&mut victim));
}

#[test]
fn doorbells_are_not_sent_for_a_program_that_has_not_switched() {
    let mut scene = Scene::new(4, true);
    let (mut victim, mut stream) = scene.adopt(true);
    let mut liar = scene.be_called();
    let (name, _) = scene.paired(&mut liar, &victim);
    for _ in 0..10 {
        liar.say(name, &Record::Ring);
        liar.say(name, &Record::Nudge);
    }
    scene.turns(&mut liar, 100);
    stream.set_nonblocking(true).unwrap();
    let nothing = std::io::Read::read(&mut stream, &mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock, "its kernel stream is its own");
    assert_eq!(scene.core.counters().doorbells, 0);
    // Nudged, it is armed: the next thing it does rings.
    assert_eq!(victim.send(b"x"), 1);
    assert!(victim.take_bell());
}

#[test]
fn a_peer_cannot_write_beyond_its_connections_rings() {
    for beyond in [false, true] {
        let mut scene = Scene::new(5, true);
        let (mut victim, _one) = scene.adopt(true);
        let mut liar = scene.be_called();
        let (_, ground) = scene.paired(&mut liar, &victim);
        let offset = if beyond { (16 << 10) - 8 } else { 8 };
        liar.write(ground, offset, 16);
        scene.turns(&mut liar, 200);
        assert_eq!(is_reset(&mut victim), beyond, "the link of who writes beyond breaks");
        assert_eq!(scene.core.links_up(), usize::from(!beyond));
    }
}

#[test]
fn another_links_peer_cannot_write_where_it_was_not_let() {
    let mut scene = Scene::new(6, true);
    let (mut victim, _one) = scene.adopt(true);
    let mut friend = scene.be_called();
    let (name, ground) = scene.paired(&mut friend, &victim);
    let mut liar = scene.call();
    // It knows the key, the name and all.
    liar.write(ground, 0, 16);
    scene.turns(&mut liar, 300);
    liar.say(name, &Record::Reset);
    scene.turns(&mut liar, 300);
    scene.turns(&mut friend, 100);
    assert!(!is_reset(&mut victim));
    let honest = ring_bytes(16, 16);
    friend.say(name, &Record::Data { position: 0, bytes: &honest });
    scene.turns(&mut friend, 100);
    assert_eq!(victim.receive(&mut [0; 64]), Received::Bytes(16));
}

#[test]
fn a_caller_that_is_not_who_it_says_gets_nothing() {
    for confirms in [false, true] {
        let mut scene = Scene::new(7, confirms);
        let (victim, _one) = scene.adopt(false);
        let mut liar = scene.call();
        let stream = victim.stream.as_ref().unwrap();
        let (own, peer) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let offer = Record::Offer { name: 5, ring_bytes: 16 << 10, own: peer, peer: own };
        liar.say(0, &offer);
        scene.turns(&mut liar, 300);
        let accepted =
            liar.heard.iter().any(|(_, record)| matches!(record, OwnedRecord::Accept { .. }));
        assert_eq!(accepted, confirms, "what the configured host says decides");
        assert!(!victim.is_given_up() && !victim.is_paired());
        assert_eq!(scene.core.links_up(), usize::from(confirms));
    }
}

#[test]
fn a_relay_of_another_version_gets_no_link_and_is_told_why() {
    let mut scene = Scene::new(12, true);
    let (sender, answers) = std::sync::mpsc::channel();
    let device: Arc<dyn Device> = scene.honest_device();
    let older = [&b"BLRL\x02\0\0\0"[..], &[9; 16]].concat();
    scene.inbox.put(Event::Called {
        device,
        info: Liar::new(&scene.device).pair.connect_info(),
        hello: older.clone(),
        answer: Box::new(move |answer| sender.send(answer).unwrap()),
    });
    scene.turn();
    let why = answers.recv().unwrap().unwrap_err();
    assert!(why.contains("version 2 and the other of 3"), "{why}");
    // One that answers so gets none, either, and the connection is the kernel's.
    let (program, _far) = scene.adopt(true);
    let liar = Liar::new(&scene.device);
    let (link, ..) = loop {
        scene.turn();
        if let Ok(call) = scene.calls.try_recv() {
            break call;
        }
    };
    scene.inbox.put(Event::Joined { link, answer: Ok((liar.pair.connect_info(), older)) });
    (0..100).for_each(|_| scene.turn());
    assert_eq!((scene.core.links_up(), program.is_paired()), (0, false));
    assert!(program.give_up());
}

#[test]
fn offers_of_others_connections_and_other_rings_are_refused() {
    let mut scene = Scene::new(8, true);
    let (victim, _one) = scene.adopt(false);
    let mut liar = scene.call();
    let stream = victim.stream.as_ref().unwrap();
    let (own, peer) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
    let foreign: SocketAddr = "192.0.2.1:80".parse().unwrap();
    liar.say(0, &Record::Offer { name: 5, ring_bytes: 16 << 10, own: foreign, peer: own });
    scene.turns(&mut liar, 300);
    assert!(liar.heard.contains(&(5, OwnedRecord::Refuse)), "{:?}", liar.heard);
    liar.say(0, &Record::Offer { name: 6, ring_bytes: 1 << 20, own: peer, peer: own });
    scene.turns(&mut liar, 300);
    assert!(liar.heard.contains(&(6, OwnedRecord::Refuse)), "{:?}", liar.heard);
    assert!(victim.is_given_up(), "it is left to the kernel");
}

#[test]
fn a_host_that_calls_without_end_keeps_no_other_out() {
    let mut scene = Scene::new(14, true);
    let mut liars = Vec::new();
    for port in 1..=40 {
        let mut liar = scene.call();
        let [own, peer] = [(ELSEWHERE, port), (HOST, 80)].map(SocketAddr::from);
        liar.say(0, &Record::Offer { name: 5, ring_bytes: 16 << 10, own, peer });
        scene.turns(&mut liar, 200);
        liars.push(liar);
    }
    assert_eq!(scene.core.links_up(), 4);
    let (program, _far) = scene.adopt(true);
    let mut honest = scene.be_called();
    scene.paired(&mut honest, &program);
    assert!(program.is_paired());
}

#[test]
fn a_host_that_offers_without_end_leaves_room_for_the_offers_of_others() {
    let mut scene = Scene::new(13, true);
    let mut flood = scene.call();
    let ports: Vec<u16> = (1..=1200).collect();
    for some in ports.chunks(40) {
        let mut message = Vec::new();
        for port in some {
            let [own, peer] = [(ELSEWHERE, *port), (HOST, 80)].map(SocketAddr::from);
            let record = Record::Offer { name: 5, ring_bytes: 16 << 10, own, peer };
            let before = message.len();
            message.resize(before + record_bytes(record.body_bytes()), 0);
            record.encode(0, &mut message[before..]);
        }
        flood.say_bytes(&message);
        scene.turns(&mut flood, 100);
    }
    let refused = |liar: &Liar| {
        liar.heard.iter().filter(|(_, record)| *record == OwnedRecord::Refuse).count()
    };
    assert_eq!(refused(&flood), 1200 - 1024);
    // Another host's offer is there before its end here is.
    let mut honest = scene.call();
    let [one, other] = pair_of(false);
    let [own, peer] = [&other, &one].map(|end| end.local_addr().unwrap());
    honest.say(0, &Record::Offer { name: 6, ring_bytes: 16 << 10, own, peer });
    scene.turns(&mut honest, 200);
    let _program = scene.take_in(one);
    scene.turns(&mut honest, 200);
    let accepted = |(name, record): &(u64, OwnedRecord)| {
        *name == 6 && matches!(record, OwnedRecord::Accept { .. })
    };
    assert!(honest.heard.iter().any(accepted), "{:?}", honest.heard);
}

fn any_record<'a>(rng: &mut SmallRng, bytes: &'a [u8], names: &[u64]) -> (u64, Record<'a>) {
    let near = |rng: &mut SmallRng| match rng.random_range(0..5) {
        0 => rng.next_u64(),
        1 => u64::MAX - rng.random_range(0..64),
        2 => 0,
        _ => rng.random_range(0..2000_u64) * 8,
    };
    let small = |rng: &mut SmallRng| rng.random_range(0..4) / 2 + rng.random_range(0..2);
    let name = match rng.random_range(0..8) {
        0 => rng.next_u64(),
        _ => names[rng.random_range(0..names.len())],
    };
    let ground = Ground { key: rng.next_u64(), base: near(rng) };
    let record = match rng.random_range(0..14) {
        0 => Record::Offer {
            name: near(rng),
            ring_bytes: 16 << 10,
            own: SocketAddr::new(HOST, rng.random()),
            peer: SocketAddr::new(HOST, rng.random()),
        },
        1 => Record::Accept { name: near(rng), ground },
        2 => Record::Commit { ground },
        3 => Record::Refuse,
        4..=6 => {
            let length = rng.random_range(1..bytes.len() / 8) * 8;
            Record::Data { position: near(rng), bytes: &bytes[..length.max(8)] }
        }
        7 => Record::Placed { position: near(rng), end: near(rng), header: 1 << 32 | near(rng) },
        8 => Record::Credit { position: near(rng) },
        9 => Record::Signs {
            switched_at: near(rng),
            finished: small(rng),
            closed: small(rng),
            mute: small(rng),
        },
        10 => Record::Ring,
        11 => Record::Nudge,
        12 => Record::Ended,
        _ => Record::Reset,
    };
    (name, record)
}

#[test]
fn whatever_a_relay_says_nothing_falls_over_and_the_programs_see_whole_messages() {
    let mut resets = 0;
    for seed in 0..150 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut scene = Scene::new(seed, true);
        let (mut one, _one) = scene.adopt(true);
        let (mut two, _two) = scene.adopt(true);
        let (_third, _three) = scene.adopt(false);
        let mut liar = scene.be_called();
        let names = [scene.paired(&mut liar, &one).0, scene.paired(&mut liar, &two).0];
        let mut bytes = vec![0; 400];
        for _ in 0..40 {
            rng.fill_bytes(&mut bytes);
            let length = rng.random_range(0..400_u64);
            bytes[..8].copy_from_slice(&(1_u64 << 32 | length).to_le_bytes());
            if rng.random_range(0..30) == 0 {
                let length = rng.random_range(1..400);
                liar.say_bytes(&bytes[..length]);
            } else {
                let (name, record) = any_record(&mut rng, &bytes, &names);
                liar.say(name, &record);
            }
            for program in [&mut one, &mut two] {
                if rng.random() && program.stream.is_some() {
                    let _ = program.segment.producer().has_room().unwrap();
                    program.send(b"what a program says");
                }
                program.receive(&mut [0; 500]);
                if program.take_bell() {
                    scene.core.bell(program.cookie);
                }
            }
            scene.turns(&mut liar, 4);
        }
        scene.turns(&mut liar, 50);
        resets += usize::from(is_reset(&mut one)) + usize::from(is_reset(&mut two));
    }
    assert!(resets > 100, "{resets} resets: the lies were too harmless");
}
