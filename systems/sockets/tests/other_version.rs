//! A program and the proxy of its host may be of two versions, where one of them began before an update. Then the program
//! has the kernel's connections alone, and one that it inherits is reset: nothing is read that was never sent, and
//! nothing that is written is lost in silence.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use beeline_os::control_socket::{ControlListener, Received};
use beeline_sockets::control::NAME_VARIABLE;
use beeline_sockets::packets::channel::{Channel, Shape, VERSION};
use beeline_sockets::packets::dial::{self, Connected, PLACEHOLDER_NAME};
use beeline_sockets::packets::page::Page;
use beeline_sockets::packets::protocol::{Answer, LONGEST, Question, name};
use beeline_sockets::table;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// What another version has where this one's stands, in records and in memory.
const VERSION_AT: (usize, u64) = (4, 7);

/// A proxy: the versions of its records and of its memory.
struct Proxy {
    records: u8,
    memory: u8,
    page: Page,
    listener: ControlListener,
    stops: AtomicBool,
    /// Connections that it made.
    made: AtomicUsize,
}

fn channel_of_version(version: u8) -> OwnedFd {
    let at = "10.0.0.1:1".parse().unwrap();
    let channel = Channel::create(Shape { block_bytes: 256, blocks: 8 }, at, at).unwrap();
    let memory = channel.mapping().descriptor().unwrap().try_clone().unwrap();
    rustix::io::pwrite(&memory, &[version], VERSION_AT.1).unwrap();
    memory
}

/// The program's end of a placeholder and the proxy's.
fn placeholder(number: usize) -> (UnixStream, UnixStream) {
    let (own, program) = UnixStream::pair().unwrap();
    let name = [PLACEHOLDER_NAME, format!("{}-{number}", std::process::id()).as_bytes()].concat();
    rustix::net::bind(&own, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    (program, own)
}

impl Proxy {
    fn new(records: u8, memory: u8) -> Self {
        let page = Page::create().unwrap();
        page.set_routes(&[("10.0.0.2".parse().unwrap(), true)]);
        let listener = ControlListener::bind(name().as_bytes()).unwrap();
        let (stops, made) = (AtomicBool::new(false), AtomicUsize::new(0));
        Self { records, memory, page, listener, stops, made }
    }

    fn serve(&self) {
        while !self.stops.load(Ordering::Relaxed) {
            for client in self.listener.waiting(64) {
                let (mut record, mut descriptors) = ([0; LONGEST], Vec::new());
                let length = loop {
                    match client.receive(&mut record, &mut descriptors).unwrap() {
                        Received::Empty => std::thread::sleep(Duration::from_millis(1)),
                        Received::Closed => break 0,
                        Received::Record(length) => break length,
                    }
                };
                // As every proxy refuses what is not of its version.
                if length == 0 || record[VERSION_AT.0] != self.records {
                    continue;
                }
                record[VERSION_AT.0] = VERSION;
                let (answer, given): (_, Vec<OwnedFd>) = match Question::decode(&record[..length])
                    .unwrap()
                {
                    Question::Hello => (Answer::Page, vec![self.page.for_reading().unwrap()]),
                    Question::Resume => (Answer::Channel, vec![channel_of_version(self.memory)]),
                    Question::Connect { .. } => {
                        let number = self.made.fetch_add(1, Ordering::Relaxed);
                        let (program, _own) = placeholder(1000 + number);
                        let memory = channel_of_version(self.memory);
                        (Answer::Channel, vec![memory, program.into()])
                    }
                    _ => (Answer::Done, Vec::new()),
                };
                let mut answer = answer.encode();
                answer[VERSION_AT.0] = self.records;
                let given: Vec<_> = given.iter().map(OwnedFd::as_fd).collect();
                client.send(&answer, &given).unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Also where an assertion fails.
struct Stops<'a>(&'a Proxy);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.stops.store(true, Ordering::Relaxed);
    }
}

/// A process before has the placeholder, too, and its library is the proxy's.
fn inherits(number: usize, taken: bool) {
    let (mut before, mut own) = placeholder(number);
    let mut inherited = before.try_clone().unwrap();
    own.write_all(&[1]).unwrap();
    dial::inherited(inherited.as_raw_fd());
    assert_eq!(table::packets(inherited.as_raw_fd()).is_some(), taken);
    if !taken {
        let mut bytes = [0; 8];
        let read = inherited.read(&mut bytes).map_err(|error| error.kind());
        assert_eq!(read, Err(std::io::ErrorKind::ConnectionReset), "{bytes:?}");
        assert_eq!(inherited.read(&mut bytes).unwrap(), 0);
        let written = inherited.write(b"lost").map_err(|error| error.kind());
        assert_eq!(written, Err(std::io::ErrorKind::BrokenPipe));
    }
    // The one before goes on, and nothing was written to its proxy.
    let mut bytes = [0; 8];
    assert_eq!(before.read(&mut bytes).unwrap(), 1);
    before.write_all(b"?").unwrap();
    assert_eq!((own.read(&mut bytes).unwrap(), bytes[0]), (1, b'?'));
    table::forget(inherited.as_raw_fd());
}

/// In one test: a process asks for one name.
#[test]
fn a_program_and_a_proxy_of_two_versions_have_no_connection_that_only_one_of_them_knows() {
    let own_name = format!("beeline-test-other-version-{}", std::process::id());
    // SAFETY: the only test of this process, before any other thread of it.
    unsafe { std::env::set_var(NAME_VARIABLE, own_name) };
    table::begin();
    let to: SocketAddr = "10.0.0.2:80".parse().unwrap();
    let (address, _) = dial::storage(to, libc::AF_INET);
    // None at all; then the one that is right; one before; one whose records are this version's and whose memory is not.
    inherits(1, false);
    for (number, (records, memory)) in
        [(VERSION, VERSION), (1, VERSION - 1), (VERSION, VERSION - 1)].into_iter().enumerate()
    {
        let proxy = Proxy::new(records, memory);
        std::thread::scope(|scope| {
            scope.spawn(|| proxy.serve());
            let _stops = Stops(&proxy);
            inherits(10 + number, (records, memory) == (VERSION, VERSION));
            if records != VERSION {
                let flags = SocketFlags::CLOEXEC;
                let kind = SocketType::STREAM;
                let socket = rustix::net::socket_with(AddressFamily::INET, kind, flags, None);
                let socket = socket.unwrap();
                assert_eq!(dial::connect(socket.as_raw_fd(), &address), Connected::Kernels);
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                dial::listening(listener.as_raw_fd());
                assert_eq!(proxy.made.load(Ordering::Relaxed), 0, "a connection that none has");
            }
        });
    }
}
