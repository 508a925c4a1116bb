//! Two relays in one thread, and programs at both ends of their connections, over any provider.
//!
//! A program is the library's rings and signs without its table: it sends, receives, sleeps and
//! wakes as `beeline-sockets` does, one step at a time, so that a test decides about every order.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "what tests are made of"
)]

pub mod program;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_sockets::segment::{Segment, length_bytes};
use beeline_sockets_relay::network::{Event, Events, Inbox, Network, inbox};
use beeline_sockets_relay::{Core, Host, Settings};

use program::Program;

/// The network between relays of one process: what the bootstrap exchange does, by hand.
#[derive(Debug)]
pub struct Wire {
    /// Where this relay hears.
    pub own: Inbox,
    /// Where the other one does.
    pub other: Inbox,
    /// This relay's device.
    pub device: Arc<dyn Device>,
    /// The other one's.
    pub other_device: Arc<dyn Device>,
}

impl Network for Wire {
    fn find(&self, host: usize) {
        self.own.put(Event::Found { host, device: Ok(Arc::clone(&self.device)) });
    }

    fn join(&self, _host: usize, link: u64, info: ConnectInfo, hello: Vec<u8>) {
        let own = self.own.clone();
        let answer = Box::new(move |answer| own.put(Event::Joined { link, answer }));
        let device = Arc::clone(&self.other_device);
        self.other.put(Event::Called { device, info, hello, answer });
    }

    fn confirm(&self, _host: usize, link: u64, words: Vec<u8>) {
        let own = self.own.clone();
        let answer = Box::new(move |answer: Result<(), String>| {
            own.put(Event::Confirmed { link, yes: answer.is_ok() });
        });
        self.other.put(Event::Asked { words, answer });
    }
}

/// Reaches nobody.
#[derive(Debug)]
struct Nobody;

impl Network for Nobody {
    fn find(&self, _host: usize) {}

    fn join(&self, _host: usize, _link: u64, _info: ConnectInfo, _hello: Vec<u8>) {}

    fn confirm(&self, _host: usize, _link: u64, _words: Vec<u8>) {}
}

/// What moves time.
#[derive(Debug)]
enum Clock {
    Simulated(SimWorld),
    Real(Instant),
}

/// Two hosts, each with a relay.
#[derive(Debug)]
pub struct World {
    /// The relays.
    pub cores: [Core; 2],
    events: [Events; 2],
    clock: Clock,
    next_cookie: u64,
}

/// Which provider.
#[derive(Clone, Debug)]
pub enum Over {
    /// Simulated.
    Sim(u64, SimOptions),
    /// Shared memory.
    Shm,
    /// TCP over loopback.
    Tcp,
}

/// The process, as the relay is told, that holds the end named `cookie`.
#[must_use]
pub fn process_of(cookie: u64) -> u32 {
    u32::try_from(cookie).unwrap() + 1_000_000
}

/// The address of every program's end.
pub const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

impl World {
    /// Two relays that know of each other, and carry over whatever there is.
    #[must_use]
    pub fn new(over: &Over, settings: &Settings) -> Self {
        Self::as_told(over, &Settings { over_tcp: true, ..settings.clone() })
    }

    /// Two relays that know of each other, with these settings.
    #[must_use]
    pub fn as_told(over: &Over, settings: &Settings) -> Self {
        let (devices, clock): ([Arc<dyn Device>; 2], _) = match over {
            Over::Sim(seed, options) => {
                let world = SimWorld::new(*seed, options.clone());
                ([world.device(0), world.device(1)], Clock::Simulated(world))
            }
            Over::Shm => {
                let open = || ShmDevice::open(ShmConfig::default()).unwrap();
                ([open(), open()], Clock::Real(Instant::now()))
            }
            Over::Tcp => {
                let open = || TcpDevice::open(TcpConfig::default()).unwrap();
                ([open(), open()], Clock::Real(Instant::now()))
            }
        };
        let (one, other) = (inbox().unwrap(), inbox().unwrap());
        let [first, second] = devices;
        let hosts = vec![Host { addresses: vec![HOST] }];
        let settings = Settings { hosts, ..settings.clone() };
        let core =
            |own: &Inbox, other: &Inbox, device: &Arc<dyn Device>, theirs: &Arc<dyn Device>| {
                let wire = Wire {
                    own: own.clone(),
                    other: other.clone(),
                    device: Arc::clone(device),
                    other_device: Arc::clone(theirs),
                };
                Core::new(settings.clone(), Box::new(wire))
            };
        let cores =
            [core(&one.0, &other.0, &first, &second), core(&other.0, &one.0, &second, &first)];
        Self { cores, events: [one.1, other.1], clock, next_cookie: 1 }
    }

    /// Time since the beginning.
    #[must_use]
    pub fn now(&self) -> Duration {
        match &self.clock {
            Clock::Simulated(world) => Duration::from_nanos(world.now_ns()),
            Clock::Real(began) => began.elapsed(),
        }
    }

    /// One turn of relay `side`.
    pub fn turn_one(&mut self, side: usize) -> bool {
        while let Some(event) = self.events[side].next() {
            self.cores[side].happened(event);
        }
        let now = self.now();
        self.cores[side].turn(now)
    }

    /// One turn of both, and a little time.
    pub fn turn(&mut self) {
        self.turn_one(0);
        self.turn_one(1);
        self.pass(Duration::from_nanos(500));
    }

    /// Lets time pass, in simulation.
    pub fn pass(&mut self, time: Duration) {
        if let Clock::Simulated(world) = &self.clock {
            let _ = world.step_within(time);
        }
    }

    /// Lets time pass without anything happening to the relays.
    pub fn wait(&mut self, time: Duration) {
        match &self.clock {
            Clock::Simulated(world) => world.run_for(time),
            Clock::Real(_) => std::thread::sleep(time),
        }
    }

    /// Turns until `done`; panics when it does not come to that.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let began = Instant::now();
        let mut turns = 0_u64;
        while !done(self) {
            turns += 1;
            assert!(
                turns < 2_000_000 && began.elapsed() < Duration::from_secs(30),
                "{what}: not within {turns} turns; {:?}",
                self.cores.each_ref().map(Core::counters)
            );
            self.turn();
        }
    }

    /// A kernel connection between the two hosts, unknown to the relays.
    #[must_use]
    pub fn kernel_pair() -> [TcpStream; 2] {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        one.set_nodelay(true).unwrap();
        other.set_nodelay(true).unwrap();
        [one, other]
    }

    /// A fresh segment, as the program and as the relay map it.
    #[must_use]
    pub fn segment(ring_bytes: usize, cookie: u64) -> [Segment; 2] {
        let length = length_bytes(ring_bytes);
        let one = Mapping::memfd("relay-test", length).unwrap();
        Segment::format_relayed(&one, cookie, process_of(cookie)).unwrap();
        let fd = one.descriptor().unwrap().try_clone().unwrap();
        let other = Mapping::shared(fd, length, Protection::ReadWrite).unwrap();
        [Segment::take(one, 0).unwrap(), Segment::take(other, 1).unwrap()]
    }

    /// Gives relay `side` the end `stream`; the program that has it.
    pub fn adopt(&mut self, side: usize, stream: TcpStream, ring_bytes: usize) -> Program {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let [program, relay] = Self::segment(ring_bytes, cookie);
        let ends: (SocketAddr, SocketAddr) =
            (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let copy: OwnedFd = stream.try_clone().unwrap().into();
        self.cores[side].adopt(ends, copy, relay).unwrap();
        Program::new(program, stream, cookie)
    }

    /// A connection that both relays took in, paired.
    pub fn connect(&mut self, ring_bytes: usize) -> [Program; 2] {
        let [one, other] = Self::kernel_pair();
        let ends = [self.adopt(0, one, ring_bytes), self.adopt(1, other, ring_bytes)];
        self.until("pairing", |_| ends.iter().all(Program::is_paired));
        ends
    }

    /// Relay `side` dies; another that reaches nobody takes its place.
    pub fn kill_relay(&mut self, side: usize) {
        self.cores[side] = Core::new(Settings::default(), Box::new(Nobody));
    }

    /// Tells relay `side` what the program rang for.
    pub fn deliver_bell(&mut self, side: usize, program: &mut Program) {
        if program.take_bell() {
            self.cores[side].bell(program.cookie);
        }
    }
}
