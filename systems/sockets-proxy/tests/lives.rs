//! Connections beyond one life of a partition and beyond one place: partitions that die at any post and
//! are taken over, and connections that move between partitions while bytes flow. No threads, no
//! processes, every order of steps from a seed.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_ntb::window::{Bells, Mapped, Wire};
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::channel::Channel;
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::{Command, Key, Notice, Partition};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

const SLOT: usize = 128;
const BLOCKS: usize = 16;
const LENGTH: usize = 64 << 10;

#[derive(Debug)]
struct Silent;

impl Bells for Silent {
    fn ring(&self, _: usize) {}

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear(&self, _: usize) {}
}

/// What a thread that was killed leaves by.
struct Killed;

/// A wire whose writer dies before one of its posts.
#[derive(Debug)]
struct Mortal {
    wire: Mapped,
    /// Posts that are left; never 0 before the last.
    left: Arc<AtomicU64>,
}

impl Mortal {
    fn one(&self) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            resume_unwind(Box::new(Killed));
        }
    }
}

impl Wire for Mortal {
    fn length_bytes(&self) -> usize {
        self.wire.length_bytes()
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        self.one();
        // SAFETY: the caller's contract.
        unsafe { self.wire.post(offset, source, length) };
    }

    fn post_word(&self, offset: usize, value: u64) {
        self.one();
        self.wire.post_word(offset, value);
    }

    fn fence(&self) {
        self.wire.fence();
    }
}

/// A program's end of a connection, and what a keeper has of it.
struct Program {
    connection: Connection,
    fd: OwnedFd,
    memory: OwnedFd,
    socket: OwnedFd,
    key: Key,
    partition: usize,
}

impl Program {
    fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let piece =
            [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: our own bytes, which are only read.
        unsafe { self.connection.send(self.fd.as_raw_fd(), &piece, flags) }
    }

    fn receive(&self, most: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; most];
        let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: most }];
        // SAFETY: our own bytes.
        let count =
            unsafe { self.connection.receive(self.fd.as_raw_fd(), &piece, libc::MSG_DONTWAIT)? };
        bytes.truncate(count);
        Ok(bytes)
    }
}

/// Two hosts with some partitions each, and programs at both ends.
struct World {
    mapping: Arc<Mapping>,
    geometry: Geometry,
    /// Of side 0, then of side 1.
    partitions: [Vec<Partition>; 2],
    lives: [Arc<AtomicU64>; 2],
    page: Arc<Page>,
    programs: Vec<[Program; 2]>,
    sent: Vec<[usize; 2]>,
    received: Vec<[usize; 2]>,
    /// A planted fault: a connection that is taken over goes on from what its own end had sent.
    forgets: bool,
}

fn byte(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 7) as u8
}

impl World {
    fn new(partitions: usize) -> Self {
        let geometry = Geometry::dividing(LENGTH, partitions, SLOT, BLOCKS).unwrap();
        let geometry = Geometry { ring_bytes: 32 * SLOT, control_bytes: 1024, ..geometry };
        let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        let lives = [0, 1].map(|_| Arc::new(AtomicU64::new(u64::MAX)));
        let page = Arc::new(Page::create().unwrap());
        let mut world = Self {
            mapping,
            geometry,
            partitions: [Vec::new(), Vec::new()],
            lives,
            page,
            programs: Vec::new(),
            sent: Vec::new(),
            received: Vec::new(),
            forgets: false,
        };
        for side in 0..2 {
            world.partitions[side] =
                (0..partitions).map(|index| world.fresh(side, index)).collect();
            for partition in &mut world.partitions[side] {
                partition.obey(Command::Link { up: true });
            }
        }
        world
    }

    fn fresh(&self, side: usize, index: usize) -> Partition {
        let (own, other) = (side * LENGTH, (1 - side) * LENGTH);
        let wire = Mortal {
            wire: Mapped::new(Arc::clone(&self.mapping), other, LENGTH),
            left: Arc::clone(&self.lives[side]),
        };
        let inbound = Inbound::new(Arc::clone(&self.mapping), own, LENGTH);
        let outbound = Outbound::new(Arc::new(wire));
        let (at, bytes) = self.geometry.partition(index);
        let window = Window { inbound, outbound, bells: Arc::new(Silent) }.part(at, bytes);
        Partition::new(window, self.geometry, Schedule::new(8, 4), index + 1)
    }

    fn connect(&mut self, port: u16, partition: usize) {
        let keys = [Key { own: port, peer: 80 }, Key { own: 80, peer: port }];
        let programs = [0, 1].map(|side| {
            let at = "10.0.0.1:1".parse().unwrap();
            let channel = Channel::create(self.geometry.shape(), at, at).unwrap();
            let memory = channel.mapping().descriptor().unwrap().try_clone().unwrap();
            let (socket, fd) = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            )
            .unwrap();
            let command = Command::Create {
                key: keys[side],
                id: u64::from(port),
                channel: Arc::new(channel),
                socket: socket.try_clone().unwrap(),
                priority: 0,
                open: true,
            };
            assert!(self.partitions[side][partition].obey(command).is_some());
            let taken = Channel::take(memory.try_clone().unwrap()).unwrap();
            let connection = Connection::new(taken, Arc::clone(&self.page));
            Program { connection, fd, memory, socket, key: keys[side], partition }
        });
        self.programs.push(programs);
        self.sent.push([0; 2]);
        self.received.push([0; 2]);
    }

    /// A turn of a partition. False when it died in it.
    fn turn(&mut self, side: usize, index: usize) -> Option<usize> {
        let partition = &mut self.partitions[side][index];
        let outcome = catch_unwind(AssertUnwindSafe(|| partition.turn().unwrap()));
        let done = match outcome {
            Ok(done) => done,
            Err(cause) if cause.is::<Killed>() => return None,
            Err(cause) => resume_unwind(cause),
        };
        for departure in self.partitions[side][index].departures() {
            let to = departure.to;
            self.partitions[side][to].obey(Command::Arrive(departure));
        }
        for index in 0..self.partitions[side].len() {
            for notice in self.partitions[side][index].notices() {
                if let Notice::Moved { id } = notice {
                    let of = |programs: &&mut [Program; 2]| u64::from(programs[0].key.own) == id;
                    self.programs.iter_mut().find(of).unwrap()[side].partition = index;
                }
            }
        }
        Some(done)
    }

    /// Everything once. What moved, or `None`: side 0 or 1 died.
    fn round(&mut self) -> Result<usize, usize> {
        let mut moved = 0;
        for side in 0..2 {
            for index in 0..self.partitions[side].len() {
                moved += self.turn(side, index).ok_or(side)?;
            }
        }
        for which in 0..self.programs.len() {
            moved += self.take(which, 0, 10_000) + self.take(which, 1, 10_000);
        }
        Ok(moved)
    }

    /// Turns until nothing moves; what dies is taken over.
    fn settle(&mut self) {
        loop {
            match self.round() {
                Ok(0) => return,
                Ok(_) => {}
                Err(side) => self.take_over(side),
            }
        }
    }

    fn put(&mut self, which: usize, side: usize, count: usize) {
        let at = self.sent[which][side];
        let bytes: Vec<u8> = (at..at + count).map(byte).collect();
        match self.programs[which][side].send(&bytes) {
            Ok(count) => self.sent[which][side] += count,
            Err(Errno(error)) => assert_eq!(error, libc::EAGAIN),
        }
    }

    fn take(&mut self, which: usize, side: usize, most: usize) -> usize {
        match self.programs[which][side].receive(most) {
            Ok(bytes) => {
                let at = self.received[which][side];
                for (index, found) in bytes.iter().enumerate() {
                    assert_eq!(*found, byte(at + index), "connection {which}, byte {}", at + index);
                }
                self.received[which][side] += bytes.len();
                bytes.len()
            }
            Err(Errno(error)) => {
                assert_eq!(error, libc::EAGAIN);
                0
            }
        }
    }

    /// What the two monitors do when a proxy died.
    fn take_over(&mut self, side: usize) {
        self.lives[side].store(u64::MAX, Ordering::Relaxed);
        let count = self.partitions[side].len();
        // Dropped in the middle of what it did.
        self.partitions[side].clear();
        for partition in &mut self.partitions[1 - side] {
            partition.obey(Command::Suspend);
            partition.notices();
        }
        for half in 0..2 {
            Inbound::new(Arc::clone(&self.mapping), half * LENGTH, LENGTH).clear();
        }
        self.partitions[side] = (0..count).map(|index| self.fresh(side, index)).collect();
        for programs in &self.programs {
            let Program { memory, socket, key, partition, .. } = &programs[side];
            let command = Command::Adopt {
                key: *key,
                id: u64::from(programs[0].key.own),
                channel: Arc::new(Channel::take(memory.try_clone().unwrap()).unwrap()),
                socket: socket.try_clone().unwrap(),
                priority: 0,
            };
            assert!(self.partitions[side][*partition].obey(command).is_some());
        }
        for partition in self.partitions.iter_mut().flatten() {
            partition.obey(Command::Link { up: true });
            partition.notices();
        }
        for which in 0..self.programs.len() {
            for from in 0..2 {
                let programs = &self.programs[which];
                let [own, other] = [&programs[from], &programs[1 - from]];
                let partition = &mut self.partitions[from][own.partition];
                partition.obey(Command::Report { key: own.key });
                let Some(Notice::Position { delivered, consumed, .. }) = partition.notices().pop()
                else {
                    panic!("a position was asked for")
                };
                let delivered =
                    if self.forgets && delivered > consumed { consumed } else { delivered };
                let key = other.key;
                self.partitions[1 - from][other.partition].obey(Command::Resume {
                    key,
                    delivered,
                    consumed,
                });
            }
        }
    }

    fn is_whole(&self) -> bool {
        let pairs = self.sent.iter().zip(&self.received);
        pairs.into_iter().all(|(sent, received)| sent[0] == received[1] && sent[1] == received[0])
    }
}

/// Programs send and receive, partitions take turns, and some die; by `steps`.
fn live(world: &mut World, steps: &[(usize, usize, usize, usize)]) {
    for &(which, side, kind, count) in steps {
        let which = which % world.programs.len();
        match kind {
            0 | 1 => world.put(which, side, count),
            2 => _ = world.take(which, side, count),
            3 => world.lives[side].store(1 + count as u64 % 40, Ordering::Relaxed),
            _ => {
                for index in 0..world.partitions[side].len() {
                    if world.turn(side, index).is_none() {
                        world.take_over(side);
                        break;
                    }
                }
            }
        }
    }
    world.settle();
}

fn steps() -> impl Strategy<Value = Vec<(usize, usize, usize, usize)>> {
    proptest::collection::vec((0_usize..3, 0_usize..2, 0_usize..8, 1_usize..3000), 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_partition_that_dies_at_any_post_is_taken_over_and_no_byte_is_lost_or_doubled(steps in steps()) {
        let mut world = World::new(1);
        (0..3).for_each(|port| world.connect(100 + port, 0));
        live(&mut world, &steps);
        prop_assert!(world.is_whole(), "{:?} {:?}", world.sent, world.received);
    }

    #[test]
    fn connections_move_between_partitions_at_any_moment_and_no_byte_is_lost_or_doubled(
        steps in steps(), moves in proptest::collection::vec((0_usize..3, 0_usize..3), 1..40),
    ) {
        let mut world = World::new(3);
        (0..3).for_each(|port| world.connect(100 + port, 0));
        let mut moves = moves.into_iter();
        for part in steps.chunks(8) {
            if let Some((which, to)) = moves.next() {
                let Program { key, partition, .. } = world.programs[which][0];
                world.partitions[0][partition].obey(Command::Move { key, to });
            }
            for &(which, side, kind, count) in part {
                match kind {
                    0 | 1 | 3 => world.put(which, side, count),
                    2 => _ = world.take(which, side, count),
                    _ => _ = world.turn(side, count % 3).unwrap(),
                }
            }
        }
        world.settle();
        prop_assert!(world.is_whole(), "{:?} {:?}", world.sent, world.received);
    }
}

#[test]
fn a_connection_that_moves_a_thousand_times_carries_its_stream_whole() {
    let mut world = World::new(2);
    world.connect(100, 0);
    for round in 0..1000 {
        let Program { key, partition, .. } = world.programs[0][0];
        world.partitions[0][partition].obey(Command::Move { key, to: 1 - partition });
        world.put(0, 0, 1 + round * 37 % 1500);
        world.put(0, 1, 1 + round * 61 % 900);
        for _ in 0..4 {
            world.round().unwrap();
        }
        let Program { partition: now, .. } = world.programs[0][0];
        assert_eq!(now, 1 - partition, "move {round}");
    }
    world.settle();
    assert!(world.is_whole() && world.sent[0][0] > 500_000, "{:?}", world.sent);
    let moves = |side: usize| {
        let of = |partition: &Partition| partition.counters.moves.load(Ordering::Relaxed);
        world.partitions[side].iter().map(of).sum::<u64>()
    };
    assert_eq!([moves(0), moves(1)], [1000, 1000]);
}

#[test]
fn an_end_that_goes_on_from_elsewhere_than_where_the_other_one_is_doubles_bytes() {
    let doubles = || {
        let mut world = World::new(1);
        world.forgets = true;
        world.connect(100, 0);
        world.put(0, 0, 1000);
        for side in 0..2 {
            world.turn(side, 0).unwrap();
        }
        world.take_over(1);
        world.settle();
        world.is_whole()
    };
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = catch_unwind(doubles);
    std::panic::set_hook(hook);
    assert!(!matches!(outcome, Ok(true)), "the planted fault was not seen");
}
