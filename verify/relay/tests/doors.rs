//! A relay with its doors, as the monitor, the programs and the kernel see it. One test: the names of
//! a process's relay are fixed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_fabric::Device;
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_os::Mapping;
use beeline_os::control_socket::{ControlSocket, Received};
use beeline_os::mapping::Protection;
use beeline_os::poller::Waker;
use beeline_sockets::relayed::{self, Adopted, RelayStatus, Reply, Request, relay_name};
use beeline_sockets::segment::{Segment, length_bytes};
use beeline_sockets_relay::network::{Inbox, Network, inbox};
use beeline_sockets_relay::{Core, Host, Relay, RelayError, Settings};
use beeline_verify_relay::program::{Program, Received as Got};
use beeline_verify_relay::{HOST, Wire, World};
use rustix::net::sockopt::socket_cookie;

fn settings() -> Settings {
    let hosts = vec![Host { addresses: vec![HOST] }];
    Settings { hosts, over_tcp: true, ..Settings::default() }
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{what}: not within 20 s");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn ask(request: Request) -> Vec<Reply> {
    let socket = ControlSocket::connect(relay_name().as_bytes()).unwrap();
    socket.send(&request.encode(), &[]).unwrap();
    let mut replies = Vec::new();
    until("an answer", || {
        let (mut record, mut fds) = ([0; 256], Vec::new());
        let Received::Record(length) = socket.receive(&mut record, &mut fds).unwrap() else {
            return None;
        };
        replies.push(Reply::decode(&record[..length]).unwrap());
        matches!(replies.last(), Some(Reply::Status(_) | Reply::End)).then_some(())
    });
    replies
}

fn status() -> RelayStatus {
    match ask(Request::Status)[..] {
        [Reply::Status(status)] => status,
        ref other => panic!("{other:?}"),
    }
}

/// Hands the relay an end that `process` holds.
fn adopt(monitor: &ControlSocket, stream: TcpStream, process: u32) -> Program {
    let cookie = socket_cookie(&stream).unwrap();
    let ends: (SocketAddr, SocketAddr) =
        (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
    let mapping = Mapping::memfd("doors", length_bytes(64 << 10)).unwrap();
    Segment::format_relayed(&mapping, cookie, process).unwrap();
    let memory = mapping.descriptor().unwrap();
    let adopted = Adopted { own: ends.0, peer: ends.1, process, cookie };
    let record = Request::Adopt(adopted).encode();
    monitor.send(&record, &[stream.as_fd(), memory.as_fd()]).unwrap();
    let own = memory.try_clone().unwrap();
    let own = Mapping::shared(own, length_bytes(64 << 10), Protection::ReadWrite).unwrap();
    Program::new(Segment::take(own, 0).unwrap(), stream, cookie)
}

/// Whether a thread of this process sleeps, and how often it has begun to.
fn sleep_of(thread: i32) -> (bool, u64) {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)).unwrap().to_owned()
    };
    (field("State") == "S", field("voluntary_ctxt_switches").parse().unwrap())
}

/// Waits until a thread sleeps, and sleeps on through several looks.
fn rests(thread: i32) {
    let (mut before, mut still) = (sleep_of(thread), 0);
    until("the relay's rest", || {
        std::thread::sleep(Duration::from_millis(200));
        let now = sleep_of(thread);
        still = if now.0 && now == before { still + 1 } else { 0 };
        before = now;
        (still >= 5).then_some(())
    });
}

fn receive(program: &mut Program, bytes: &mut [u8]) {
    let mut have = 0;
    until("bytes", || {
        if let Got::Bytes(count) = program.receive(&mut bytes[have..]) {
            have += count;
        }
        if program.take_bell() {
            let _ = relayed::ring(program.cookie);
        }
        (have == bytes.len()).then_some(())
    });
}

fn send(program: &mut Program, bytes: &[u8]) {
    assert_eq!(program.send(bytes), bytes.len());
    if program.take_bell() {
        assert_eq!(relayed::ring(program.cookie), relayed::Rung::Yes);
    }
}

#[test]
fn a_relay_serves_its_doors_sleeps_when_idle_and_notices_the_death_of_programs() {
    let name = format!("beeline-doors-{}", std::process::id());
    // SAFETY: no other thread of this process runs yet.
    unsafe { std::env::set_var(beeline_sockets::control::NAME_VARIABLE, name) };
    let open = || TcpDevice::open(TcpConfig::default()).unwrap();
    let devices: [Arc<dyn Device>; 2] = [open(), open()];
    let (far_inbox, far_events) = inbox().unwrap();
    let stop = Arc::new(Waker::new().unwrap());
    let (sender, begun) = std::sync::mpsc::channel();
    let (stopping, far, [near_device, far_device]) =
        (Arc::clone(&stop), far_inbox.clone(), devices.clone());
    let relay = std::thread::spawn(move || {
        let network = |own: Inbox| -> Result<Box<dyn Network>, std::io::Error> {
            let inbox = own.clone();
            let wire = Wire { own, other: far, device: near_device, other_device: far_device };
            sender.send((inbox, rustix::thread::gettid().as_raw_nonzero().get())).unwrap();
            Ok(Box::new(wire))
        };
        let mut relay = Relay::begin(settings(), network).unwrap();
        relay.run(Some(stopping.as_fd())).unwrap();
        relay.sleeps_and_turns()
    });
    let (near_inbox, thread) = begun.recv().unwrap();
    until("the relay", || ControlSocket::connect(relay_name().as_bytes()).ok());
    let second = Relay::begin(settings(), |inbox| -> Result<Box<dyn Network>, std::io::Error> {
        let (own, other) = (inbox.clone(), inbox);
        let [device, other_device] = [open(), open()];
        Ok(Box::new(Wire { own, other, device, other_device }))
    });
    assert!(matches!(second, Err(RelayError::Running)), "one relay a name");

    // The other host: a relay without doors, turned by a thread of its own.
    let (ends, to_far) = std::sync::mpsc::channel::<(TcpStream, Segment)>();
    let [near_device, far_device] = devices;
    std::thread::spawn(move || {
        let wire = Wire {
            own: far_inbox,
            other: near_inbox,
            device: far_device,
            other_device: near_device,
        };
        let (mut core, began) = (Core::new(settings(), Box::new(wire)), Instant::now());
        loop {
            match to_far.try_recv() {
                Ok((stream, segment)) => {
                    let ends = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
                    core.adopt(ends, stream.into(), segment).unwrap();
                }
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
                Err(_) => {}
            }
            while let Some(event) = far_events.next() {
                core.happened(event);
            }
            core.turn(began.elapsed());
            core.bells_for_all();
            std::thread::sleep(Duration::from_micros(100));
        }
    });
    let monitor = ControlSocket::connect(relay_name().as_bytes()).unwrap();
    let mut holder = Command::new("sleep").arg("60").spawn().unwrap();
    let pair = |process: u32| {
        let [one, other] = World::kernel_pair();
        let one = adopt(&monitor, one, process);
        let cookie = 1_000_000 + u64::from(other.local_addr().unwrap().port());
        let [program, segment] = World::segment(64 << 10, cookie);
        ends.send((other.try_clone().unwrap(), segment)).unwrap();
        let other = Program::new(program, other, cookie);
        until("pairing", || (one.is_paired() && other.is_paired()).then_some(()));
        (one, other)
    };
    let (mut one, mut other) = pair(std::process::id());
    let (mut held, mut across) = pair(holder.id());
    let mut bytes = [0; 5];
    for _ in 0..20 {
        // Slept in between, so that bells are needed.
        std::thread::sleep(Duration::from_millis(2));
        send(&mut one, b"there");
        receive(&mut other, &mut bytes);
        send(&mut other, b"again");
        receive(&mut one, &mut bytes);
    }
    // Another user rings and knocks without end: bells that find no room are made up for.
    if rustix::process::geteuid().is_root() {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let nobody = rustix::process::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
                let last = Instant::now() + Duration::from_secs(30);
                while !is_over.load(Ordering::Relaxed) && Instant::now() < last {
                    (0..20).for_each(|_| _ = relayed::ring(relayed::EVERYTHING));
                    drop(ControlSocket::connect(relay_name().as_bytes()));
                }
            });
            for _ in 0..20 {
                std::thread::sleep(Duration::from_millis(2));
                send(&mut one, b"there");
                receive(&mut other, &mut bytes);
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
    let now = status();
    assert_eq!((now.connections, now.paired, now.links, now.broken), (2, 2, 1, 0));
    assert!(now.bells > 0 && now.sent_bytes >= 20 * 16, "{now:?}");
    let listed = ask(Request::Connections);
    assert_eq!(listed.len(), 3, "{listed:?}");
    assert!(listed.iter().any(|reply| matches!(
        reply,
        Reply::Connection { connection, paired: true, moved }
            if connection.cookie == one.cookie && moved[0] >= 20 * 16 && moved[1] >= 20 * 16
    )));

    // Idle costs nothing, with connections open: the relay is not even woken.
    rests(thread);

    // A holder is killed: what it had sent comes, then the end.
    send(&mut held, b"dying");
    held.die();
    holder.kill().unwrap();
    holder.wait().unwrap();
    receive(&mut across, &mut bytes);
    assert_eq!(&bytes, b"dying");
    until("the end", || (across.receive(&mut bytes) == Got::End).then_some(()));
    until("the kernel's end", || across.kernel_end()).unwrap();

    // Nonsense at the door is hung up on.
    let rude = ControlSocket::connect(relay_name().as_bytes()).unwrap();
    rude.send(b"nonsense", &[]).unwrap();
    until("hanging up", || {
        let (mut record, mut fds) = ([0; 256], Vec::new());
        matches!(rude.receive(&mut record, &mut fds), Ok(Received::Closed)).then_some(())
    });
    stop.wake();
    let (sleeps, turns) = relay.join().unwrap();
    assert!(sleeps > 0 && turns > sleeps);
    // It is gone, and with it its connections.
    until("the news", || (other.receive(&mut bytes) == Got::Reset).then_some(()));
}
