//! A monitor with one peer, whose part is played by the test: what it says, and what programs say.

use std::io::Read as _;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_os::control_socket::{ControlSocket, Received};
use beeline_sockets::packets::channel::{Channel, VERSION};
use beeline_sockets::packets::protocol::{Answer, Question};

use crate::config::Config;
use crate::handshake::{Event, State};
use crate::keeper::{Inheritance, Kept, Record};
use crate::message::{Message, Refusal};
use crate::monitor::Monitor;
use crate::partition::{Command, Key};
use crate::peer::Session;
use crate::thread::Place;

/// The other monitor's end of the session, and the monitor; the folder of their window.
struct World {
    monitor: Monitor,
    other: UnixStream,
    name: String,
    _folder: tempfile::TempDir,
}

impl World {
    fn new(test: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "addresses = [\"10.0.0.1\"]\nlisten = \"127.0.0.1:0\"\n[[peers]]\nname = \"b\"\n\
             addresses = [\"10.0.0.2\"]\nmonitor = \"127.0.0.1:1\"\n\
             window = \"ntb://{}?side=1&size=4194304\"\n",
            folder.path().join("window").display()
        );
        let name = format!("beeline-test-{test}-{}", std::process::id());
        let config = Config::parse(&text, None).unwrap();
        let mut monitor = Monitor::open_as(&name, config, None).unwrap();
        let (own, other) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        monitor.remotes[0].session = Some(Session::new(own.into(), false));
        monitor.watch_session(0, true);
        monitor.remotes[0].greeted();
        Self { monitor, other, name, _folder: folder }
    }

    /// What the monitor has said since the last question.
    fn said(&mut self) -> Vec<Message> {
        let mut bytes = [0; 4096];
        let count = self.other.read(&mut bytes).unwrap_or(0);
        let (mut from, mut all) = (0, Vec::new());
        while let Ok(Some((message, length))) = Message::decode(&bytes[from..count]) {
            all.push(message);
            from += length;
        }
        all
    }
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// The other monitor knows a connection that it said yes to by a number that it told with the yes: until then it
/// cannot be told that this end has given up.
#[test]
fn a_yes_that_comes_after_this_end_gave_up_is_answered_and_both_ends_are_freed() {
    let mut world = World::new("late-yes");
    let key = Key { own: 61_000, peer: 80 };
    let monitor = &mut world.monitor;
    let id = monitor.add(0, key, at("10.0.0.1:61000"), at("10.0.0.2:80"), 0, State::SynSent);
    monitor.happens(id, Event::TimedOut);
    assert_eq!(world.said(), []);
    world.monitor.hear_monitor(0, Message::SynAck { to: id, from: 99, partition: 0 });
    assert_eq!(world.said(), [Message::Gone { to: 99 }]);
    // Said twice, it is answered once.
    world.monitor.hear_monitor(0, Message::SynAck { to: id, from: 98, partition: 0 });
    assert_eq!(world.said(), []);
    world.monitor.hear_monitor(0, Message::Gone { to: id });
    assert!(world.monitor.connections.is_empty() && world.monitor.keys.is_empty());
}

#[test]
fn a_peer_that_speaks_for_this_host_is_refused() {
    let mut world = World::new("another-host");
    let mut refusal = |source| {
        let destination = at("10.0.0.1:80");
        world.monitor.hear_monitor(0, Message::Syn { from: 7, priority: 0, source, destination });
        world.said()
    };
    let refused = |why| [Message::Refusal { to: 7, why }];
    assert_eq!(refusal(at("10.0.0.1:5000")), refused(Refusal::NotHere));
    assert_eq!(refusal(at("[::ffff:10.0.0.1]:5000")), refused(Refusal::NotHere));
    assert_eq!(refusal(at("10.0.0.2:5000")), refused(Refusal::NoListener));
}

fn connections_come_to(monitor: &Monitor, wanted: u64) {
    let counters = &monitor.remotes[0].partitions[0].counters;
    let begun = Instant::now();
    while counters.connections.load(Ordering::Relaxed) != wanted {
        assert!(begun.elapsed() < Duration::from_secs(60), "{wanted} connections");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The order to break it off went to the partition that it had left.
#[test]
fn a_connection_that_ended_at_its_monitor_while_it_moved_is_broken_off_where_it_is() {
    let mut world = World::new("ended-in-a-move");
    let monitor = &mut world.monitor;
    let key = Key { own: 80, peer: 61_000 };
    let id = monitor.add(0, key, at("10.0.0.2:61000"), at("10.0.0.1:80"), 0, State::Preparing);
    monitor.connections.get_mut(&id).unwrap().partition = Some(0);
    monitor.remotes[0].partitions[0].commands.put(Command::Link { up: true });
    monitor.create(id, false);
    connections_come_to(monitor, 1);
    monitor.happens(id, Event::LinkDown);
    assert!(monitor.connections.is_empty());
    monitor.has_moved(id, key, Place { link: 0, partition: 0 });
    connections_come_to(monitor, 0);
}

/// A library of another version would take the connection that is made for it for one of none, and reset it.
#[test]
fn a_program_whose_library_is_of_another_version_is_left_to_the_kernel_and_not_knocked_at() {
    let mut world = World::new("other-version");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listens_at = listener.local_addr().unwrap();
    let destination = SocketAddr::new([10, 0, 0, 1].into(), listens_at.port());
    let listen = Question::Listen { at: listens_at, inode: 7 };
    let connect = Question::Connect { to: at("10.0.0.2:80"), own: None, priority: 0 };
    for question in [listen, connect, Question::Hello] {
        let client = ControlSocket::connect(world.name.as_bytes()).unwrap();
        let mut record = question.encode();
        record[4] = VERSION - 1;
        client.send(&record, &[]).unwrap();
        world.monitor.meet_programs();
        let mut answer = [0; 64];
        let heard = client.receive(&mut answer, &mut Vec::new()).unwrap();
        let Received::Record(length) = heard else { panic!("{heard:?}") };
        assert_eq!(Answer::decode(&answer[..length]), Ok(Answer::Kernel { error: 0 }));
    }
    assert_eq!((world.monitor.listeners.count(), world.monitor.connections.len()), (0, 0));
    let told = "left to the kernel: the program's library is of another version=3";
    assert!(world.monitor.status().iter().any(|line| line == told));
    let source = at("10.0.0.2:5000");
    world.monitor.hear_monitor(0, Message::Syn { from: 7, priority: 0, source, destination });
    assert_eq!(world.said(), [Message::Refusal { to: 7, why: Refusal::NoListener }]);
}

/// The proxy on disk is another one than the one that died.
#[test]
fn a_connection_whose_memory_is_of_another_version_is_broken_off_and_counted() {
    let mut world = World::new("old-memory");
    let (source, destination) = (at("10.0.0.1:61000"), at("10.0.0.2:80"));
    let record = Record {
        established: true,
        peer: "b".to_owned(),
        partition: 0,
        key: Key { own: 61_000, peer: 80 },
        peer_id: 17,
        priority: 0,
        source,
        destination,
        owner: 0,
    };
    let shape = world.monitor.remotes[0].geometry.shape();
    let keeps = |id, version: u8| {
        let channel = Channel::create(shape, source, destination).unwrap();
        let memory = channel.mapping().descriptor().unwrap().try_clone().unwrap();
        rustix::io::pwrite(&memory, &[version], 7).unwrap();
        let (own, program) = UnixStream::pair().unwrap();
        program.set_nonblocking(true).unwrap();
        (Kept { id, record: record.clone(), memory, socket: own.into() }, program)
    };
    let (old, mut of_old) = keeps(1, VERSION - 1);
    let (own, mut of_own) = keeps(2, VERSION);
    world.monitor.inherit(Inheritance { connections: vec![old, own], ..Inheritance::default() });
    assert_eq!(of_old.read(&mut [0; 8]).ok(), Some(0));
    assert!(of_own.read(&mut [0; 8]).is_err());
    let tally = &world.monitor.tally;
    assert_eq!((tally.not_adopted, tally.adopted), (1, 1));
}

#[test]
fn a_program_that_asks_nothing_is_not_waited_for() {
    let mut world = World::new("silent");
    let silent = ControlSocket::connect(world.name.as_bytes()).unwrap();
    world.monitor.meet_programs();
    assert_eq!(world.monitor.clients.len(), 1);
    let now = Instant::now();
    world.monitor.late(now + Duration::from_secs(1));
    assert_eq!(world.monitor.clients.len(), 1);
    world.monitor.late(now + Duration::from_secs(60));
    assert!(world.monitor.clients.is_empty());
    let heard = silent.receive(&mut [0; 8], &mut Vec::new());
    assert!(matches!(heard, Ok(Received::Closed)), "{heard:?}");
}
