//! What a partition's thread hears of placeholders is of the connection that has its place now, also where the keeper
//! has the placeholder's end of the one before; and a program that waits for room is told of it, also where its wish
//! met a proxy that was just emptying the placeholder. A placeholder is not readable with nothing behind it.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_ntb::window::Mapped;
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_os::poller::Waker;
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::channel::{ARMED, Channel, Direction, RINGING, UNARMED};
use beeline_sockets::packets::connection::{FILLER_BYTES, PLACEHOLDER_BYTES};
use beeline_sockets::packets::header::{HEADER_BYTES, Header, PacketKind};
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::{Command, Key, Notice, Partition};
use beeline_sockets_proxy::thread::{Mailbox, Place, Running, start};
use common::{BLOCKS, LENGTH, Program, SLOT, Silent};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `found` has something.
fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A partition with a thread of its own, and the other host's, which takes its turns here.
struct World {
    thread: Running,
    notices: Arc<Mailbox<(Place, Notice)>>,
    other: Partition,
    page: Arc<Page>,
    geometry: Geometry,
}

impl World {
    fn new() -> Self {
        let geometry = Geometry::dividing(LENGTH, 1, SLOT, BLOCKS).unwrap();
        let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        let (at, bytes) = geometry.partition(0);
        let [window, far] = [0, 1].map(|side| {
            let wire = Mapped::new(Arc::clone(&mapping), (1 - side) * LENGTH, LENGTH);
            let inbound = Inbound::new(Arc::clone(&mapping), side * LENGTH, LENGTH);
            let outbound = Outbound::new(Arc::new(wire));
            Window { inbound, outbound, bells: Arc::new(Silent) }.part(at, bytes)
        });
        let page = Arc::new(Page::create().unwrap());
        let notices = Arc::new(Mailbox::new(Arc::new(Waker::new().unwrap())));
        let partition = Partition::new(window.clone(), geometry, Schedule::new(8, 4), 1);
        let thread = start(
            (partition, None),
            window,
            1,
            Place { link: 0, partition: 0 },
            Arc::clone(&page),
            0,
            Arc::clone(&notices),
            (None, [None; 2]),
        )
        .unwrap();
        let mut other = Partition::new(far, geometry, Schedule::new(8, 4), 1);
        thread.commands.put(Command::Link { up: true });
        other.obey(Command::Link { up: true });
        Self { thread, notices, other, page, geometry }
    }

    fn program(&self, key: Key) -> (Program, Command) {
        let at = "10.0.0.1:1".parse().unwrap();
        let channel = Channel::create(self.geometry.shape(), at, at).unwrap();
        let memory = channel.mapping().descriptor().unwrap().try_clone().unwrap();
        let flags = SocketFlags::CLOEXEC;
        let (socket, fd) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let taken = Channel::take(memory.try_clone().unwrap()).unwrap();
        let command = Command::Create {
            key,
            id: u64::from(key.own.max(key.peer)),
            channel: Arc::new(channel),
            socket: socket.try_clone().unwrap(),
            priority: 0,
            open: true,
        };
        let connection = Connection::new(taken, Arc::clone(&self.page));
        (Program { connection, fd, memory, socket, key, partition: 0 }, command)
    }

    /// A connection at both hosts; the keeper has the placeholder's end at this one.
    fn connect(&mut self, port: u16) -> [Program; 2] {
        let (own, command) = self.program(Key { own: port, peer: 80 });
        self.thread.commands.put(command);
        self.hears(&Notice::Created { id: u64::from(port) });
        let (other, command) = self.program(Key { own: 80, peer: port });
        assert!(self.other.obey(command).is_some());
        [own, other]
    }

    fn hears(&self, notice: &Notice) {
        eventually(&format!("{notice:?}"), || {
            self.notices.take().iter().any(|(_, found)| found == notice).then_some(())
        });
    }

    /// What `program` reads next, while both partitions take turns.
    fn read(&mut self, program: &Program) -> Result<Vec<u8>, Errno> {
        eventually("something to read", || {
            self.other.turn().unwrap();
            Some(program.receive(100)).filter(|read| *read != Err(Errno(libc::EAGAIN)))
        })
    }
}

/// Bytes that the proxy has yet to take out of the placeholder.
fn untaken(fd: &OwnedFd) -> u64 {
    let mut count = 0_i32;
    // SAFETY: a place of ours for an int.
    let outcome = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    assert_eq!(outcome, 0);
    u64::try_from(count).unwrap()
}

/// The keeper forgets a connection a moment after its partition does. A program that closes its end in between is
/// not to be taken for one that closes the connection which has the place by then.
#[test]
fn the_end_of_a_connection_that_is_over_is_not_heard_of_the_one_that_has_its_place() {
    let mut world = World::new();
    for round in 0..20 {
        let (first, second) = (100 + 2 * round, 101 + 2 * round);
        let [own, _other] = world.connect(first);
        world.thread.commands.put(Command::Break { key: own.key });
        world.hears(&Notice::Gone { id: u64::from(first) });
        let [next, far] = world.connect(second);
        // The program that had the first one closes it. The keeper's copy of the other end is still open.
        let Program { fd, socket: _kept, .. } = own;
        drop(fd);
        // What was heard before this byte was heard with it at the latest.
        rustix::net::send(&next.fd, &[1], rustix::net::SendFlags::empty()).unwrap();
        eventually("the byte is taken", || (untaken(&next.fd) == 0).then_some(()));
        assert_eq!(far.send(b"hello"), Ok(5));
        assert_eq!(world.read(&next), Ok(b"hello".to_vec()), "round {round}");
        // Its own end is heard of as ever.
        let Program { fd, .. } = next;
        drop(fd);
        assert_eq!(world.read(&far), Ok(Vec::new()), "round {round}");
        let Program { fd, .. } = far;
        drop(fd);
    }
}

fn writable(program: &Program) -> bool {
    let mut fds = [PollFd::new(&program.fd, PollFlags::OUT)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

/// The other host's program reads, and the one that waits for room is told and writes again.
fn room_is_told(world: &mut World, program: &Program, other: &Program) {
    let mut read = 0;
    eventually("room", || {
        world.other.turn().unwrap();
        read += other.receive(1 << 12).map_or(0, |bytes| bytes.len());
        (read > 0 && writable(program)).then_some(())
    });
    assert!(program.send(b"more").is_ok());
}

/// A wish for room that comes while the proxy empties the placeholder loses its filler to that. A program that is told
/// of changes only, as of an edge-triggered set, tries again then, and sleeps until the next change: there has to be one.
#[test]
fn a_wish_for_room_whose_filler_was_taken_along_is_said_again() {
    let mut world = World::new();
    let (program, command) = world.program(Key { own: 4000, peer: 80 });
    let bytes = usize::try_from(PLACEHOLDER_BYTES).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&program.fd, bytes).unwrap();
    let full = |program: &Program| eventually("no room", || program.send(&[7; 4096]).err());
    assert_eq!(full(&program), Errno(libc::EAGAIN));
    assert!(!writable(&program));
    // What a proxy does that saw no wish yet.
    let mut bytes = [0_u8; 32 << 10];
    let taken = rustix::net::recv(&program.socket, &mut bytes[..], RecvFlags::DONTWAIT).unwrap();
    assert!(taken.1 >= FILLER_BYTES && untaken(&program.fd) == 0);
    assert!(writable(&program));
    assert_eq!(full(&program), Errno(libc::EAGAIN));
    assert!(!writable(&program), "nothing would tell of room");
    // The rest of the way: the other host's program reads, and this one is told.
    world.thread.commands.put(command);
    world.hears(&Notice::Created { id: 4000 });
    let (other, command) = world.program(Key { own: 80, peer: 4000 });
    assert!(world.other.obey(command).is_some());
    room_is_told(&mut world, &program, &other);
}

/// A program that waits for room writes and reads other things, each of which may wake the proxy's thread. A filler and
/// some thirty bytes fill the placeholder; a byte that finds it full wakes no proxy.
#[test]
fn a_program_that_waits_for_room_wakes_the_proxy_as_often_as_it_likes() {
    let mut world = World::new();
    let (program, command) = world.program(Key { own: 4000, peer: 80 });
    let bytes = usize::try_from(PLACEHOLDER_BYTES).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&program.fd, bytes).unwrap();
    world.thread.commands.put(command);
    world.hears(&Notice::Created { id: 4000 });
    let (other, command) = world.program(Key { own: 80, peer: 4000 });
    assert!(world.other.obey(command).is_some());
    let full = |program: &Program| eventually("no room", || program.send(&[7; 4096]).err());
    assert_eq!(full(&program), Errno(libc::EAGAIN));
    let sleeps = Arc::clone(&world.thread.counters);
    let sleeps = || sleeps.sleeps.load(Ordering::Relaxed);
    for number in 0..60 {
        // Each time with a wish for room.
        assert_eq!(full(&program), Errno(libc::EAGAIN));
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        let woken = rustix::net::send(&program.fd, &[1], flags);
        assert_eq!(woken, Ok(1), "wake-up {number} is lost");
        // It was heard once the thread sleeps again for the second time.
        let before = sleeps();
        eventually("the thread sleeps", || (sleeps() >= before + 2).then_some(()));
    }
    // Room is still told: the other host's program reads.
    assert_eq!(full(&program), Errno(libc::EAGAIN));
    room_is_told(&mut world, &program, &other);
}

/// A proxy's thread that waits for a processor in the middle of a ring has said that it rings, and has not done so.
/// The reader that takes the packets meanwhile takes that ring, too: a set would tell of what was read already.
#[test]
fn a_ring_whose_thread_waits_for_a_processor_is_taken_with_the_packets_it_tells_of() {
    let world = World::new();
    let (program, _) = world.program(Key { own: 4000, peer: 80 });
    let channel = Channel::take(program.memory.try_clone().unwrap()).unwrap();
    program.connection.watch(program.fd.as_raw_fd());
    let (packets, armed) = (channel.packets(Direction::ToProgram), &channel.program().reader_armed);
    let mut numbers = [0; 1];
    assert_eq!(packets.take(&mut numbers), Ok(1));
    let length = u16::try_from(HEADER_BYTES + 1).unwrap();
    let kind = PacketKind::Data;
    let header = Header { source: 80, destination: 4000, length, sync: false, kind };
    channel.header(Direction::ToProgram, numbers[0]).store(header.encode(), Ordering::Relaxed);
    packets.publish(&numbers).unwrap();
    let step =
        |from, to| armed.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    assert!(step(ARMED, RINGING));
    let is_back = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let read = program.receive(100);
            is_back.store(true, Ordering::SeqCst);
            read
        });
        eventually("the packet is read", || packets.filled().is_empty().then_some(()));
        // Longer than a reader looks that does not give up its processor.
        std::thread::sleep(Duration::from_millis(20));
        assert!(!is_back.load(Ordering::SeqCst), "the reader does not wait for the ring");
        rustix::net::send(&program.socket, &[1], rustix::net::SendFlags::empty()).unwrap();
        channel.proxy().bells.fetch_add(1, Ordering::SeqCst);
        assert!(step(RINGING, UNARMED));
        assert_eq!(reader.join().unwrap().map(|bytes| bytes.len()), Ok(1));
    });
    let mut fds = [PollFd::new(&program.fd, PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(0));
    assert_eq!(program.receive(100), Err(Errno(libc::EAGAIN)));
}
