//! A monitor with one peer, whose part is played by the test: what it says, and what programs say.

use std::io::Read as _;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_os::control_socket::{ControlSocket, Received};

use crate::config::Config;
use crate::handshake::{Event, State};
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
