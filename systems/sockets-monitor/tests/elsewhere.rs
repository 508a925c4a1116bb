//! What the monitor says of connections to other hosts. The test plays the relay; the two hosts are
//! two addresses of this one.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use beeline_os::control_socket::{ControlListener, ControlSocket, Received};
use beeline_sockets::control::{Answer, Question, Status};
use beeline_sockets::relayed::{Adopted, Request, relay_name};
use beeline_sockets::{introduce, young};
use beeline_sockets_monitor::{Elsewhere, Hosts, Monitor, Policy, Settings, is_here};

/// An address of this host that is not a loopback one.
fn outside() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Nothing is sent.
    socket.connect("192.0.2.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_loopback())
}

/// From a loopback address to `address`, and the other end.
fn connection(address: IpAddr) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((address, 0)).unwrap();
    let to = listener.local_addr().unwrap();
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    (socket.into(), listener.accept().unwrap().0)
}

fn asked(stream: &TcpStream, question: Question) -> (Answer, Option<OwnedFd>) {
    let socket = introduce::dial().unwrap();
    introduce::ask(&socket, question, Some(std::os::fd::AsFd::as_fd(stream))).unwrap();
    introduce::answer(&socket).unwrap()
}

fn status() -> Status {
    let socket = introduce::dial().unwrap();
    introduce::ask(&socket, Question::Status, None).unwrap();
    match introduce::answer(&socket).unwrap().0 {
        Answer::Status(status) => status,
        other => panic!("{other:?}"),
    }
}

/// Runs `part` beside a monitor with these settings.
fn beside(settings: Settings, part: impl FnOnce()) {
    let (stop, stopped) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut monitor = Monitor::begin(settings).unwrap();
    let running = std::thread::spawn(move || monitor.run(Some(std::os::fd::AsFd::as_fd(&stopped))));
    part();
    drop(stop);
    running.join().unwrap().unwrap();
}

fn accepted(relay: &ControlListener) -> ControlSocket {
    let begun = Instant::now();
    loop {
        if let Some(socket) = relay.accept().unwrap() {
            return socket;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "the monitor does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn adopted(socket: &ControlSocket) -> (Adopted, Vec<OwnedFd>) {
    let (mut record, mut descriptors) = ([0; 256], Vec::new());
    let begun = Instant::now();
    loop {
        match socket.receive(&mut record, &mut descriptors).unwrap() {
            Received::Record(length) => match Request::decode(&record[..length]).unwrap() {
                Request::Adopt(connection) => return (connection, descriptors),
                other => panic!("{other:?}"),
            },
            Received::Empty => std::thread::sleep(Duration::from_millis(1)),
            Received::Closed => panic!("the monitor went away"),
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "the monitor says nothing");
    }
}

#[test]
fn connections_to_configured_hosts_are_handed_to_the_relay_and_others_are_not() {
    let name = format!("beeline-test-elsewhere-{}", std::process::id());
    // The only test of this file: nobody reads the environment meanwhile.
    unsafe { std::env::set_var("BEELINE_SOCKETS_MONITOR", name) };
    // The monitor here waits for a processor beside other tests: it is not given up for that.
    unsafe { std::env::set_var("BEELINE_SOCKETS_PATIENCE_MS", "20000") };
    young::begin();
    let Some(address) = outside() else {
        let line = b"skipped: this machine has loopback addresses only\n";
        std::io::Write::write_all(&mut std::io::stderr(), line).unwrap();
        return;
    };
    let (near, far) = connection(address);

    beside(Settings::default(), || {
        assert_eq!(asked(&near, Question::Attach).0, Answer::NoHosts);
    });

    let text = format!(
        "over_tcp = true\n\
         listen = \"tcp://127.0.0.1:1\"\n\
         [[hosts]]\naddresses = [\"{address}\"]\nrelay = \"tcp://{address}:1\"\n"
    );
    // The other host's address is this one's, as it is where a program was moved.
    let elsewhere =
        |is_here| Some(Elsewhere { hosts: Hosts::parse(&text).unwrap(), relay: None, is_here });
    assert!(is_here(address) && !is_here("192.0.2.1".parse().unwrap()));
    let settings = Settings { elsewhere: elsewhere(is_here), ..Settings::default() };
    beside(settings, || {
        assert_eq!(asked(&near, Question::Attach).0, Answer::Segment { side: 0 });
        assert_eq!(asked(&far, Question::Attach).0, Answer::Segment { side: 1 });
        assert_eq!((status().relayed, status().paired), (0, 1));
    });
    // Where nothing is said about TCP, the kernel is left what it does better, and the status says so.
    let unsaid = Hosts::parse(text.strip_prefix("over_tcp = true\n").unwrap()).unwrap();
    let unsaid = Elsewhere { hosts: unsaid, relay: None, is_here: |_| false };
    beside(Settings { elsewhere: Some(unsaid), ..Settings::default() }, || {
        assert_eq!(asked(&near, Question::Attach).0, Answer::Plain);
        assert_eq!(asked(&far, Question::Attach).0, Answer::Plain);
        let status = status();
        assert_eq!((status.over_tcp, status.strangers, status.refused), (1, 1, 2));
    });
    let settings = Settings { elsewhere: elsewhere(|_| false), ..Settings::default() };
    beside(settings.clone(), || {
        // Nobody to hand it to.
        assert_eq!(asked(&near, Question::Attach).0, Answer::Plain);
        // Its peer is no configured host.
        assert_eq!(asked(&far, Question::Attach).0, Answer::Plain);
        assert_eq!((status().relayed, status().refused), (0, 2));

        let relay = ControlListener::bind(relay_name().as_bytes()).unwrap();
        let link = accepted(&relay);
        let (Answer::Segment { side: 0 }, Some(memory)) = asked(&near, Question::Attach) else {
            panic!("no segment")
        };
        let (told, descriptors) = adopted(&link);
        assert_eq!(told.own, near.local_addr().unwrap());
        assert_eq!(told.peer, near.peer_addr().unwrap());
        assert_eq!(told.process, std::process::id());
        let [socket, segment] = &descriptors[..] else { panic!("{descriptors:?}") };
        assert_eq!(beeline_sockets::kernel::cookie(socket.as_raw_fd()), Some(told.cookie));
        let file = |memory: &OwnedFd| rustix::fs::fstat(memory).unwrap().st_ino;
        assert_eq!(file(segment), file(&memory));
        let length = usize::try_from(rustix::fs::fstat(segment).unwrap().st_size).unwrap();
        let mapping = beeline_os::Mapping::shared_at(segment, 0, length).unwrap();
        let segment = beeline_sockets::segment::Segment::take(mapping, 1).unwrap();
        assert_eq!(segment.relayed(), Some(told.cookie));
        // Asked again, or by the next program: the same, and the relay hears nothing new.
        for question in [Question::Attach, Question::Resume] {
            let (answer, again) = asked(&near, question);
            assert_eq!(answer, Answer::Segment { side: 0 });
            assert_eq!(file(&again.unwrap()), file(&memory));
        }
        assert_eq!((status().relayed, status().kept), (1, 1));

        // The relay died and another came: the monitor finds it by itself.
        drop((link, relay));
        let relay = ControlListener::bind(relay_name().as_bytes()).unwrap();
        let _link = accepted(&relay);
    });

    let denied = Policy::parse("accelerate = false").unwrap();
    beside(Settings { policy: denied, ..settings }, || {
        assert_eq!(asked(&near, Question::Attach).0, Answer::Plain);
        assert_eq!(status().denied, 1);
    });
}
