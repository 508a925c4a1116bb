//! Connections beyond one life of a partition and beyond one place: partitions that die at any post and
//! are taken over, and connections that move between partitions while bytes flow. No threads, no
//! processes, every order of steps from a seed.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "../../sockets/tests/common/steps.rs"]
mod steps;

use std::os::fd::AsRawFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use beeline_ntb::window::Mapped;
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_ring::packets::IndexQueue;
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::channel::{Channel, Direction};
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::{Command, Key, Notice, Partition};
use beeline_sockets_proxy::waits::Position;
use common::{BLOCKS, Killed, LENGTH, Mortal, Program, SLOT, Silent, byte, next, say};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use steps::{killed_behind, wait_for};

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

impl World {
    fn new(partitions: usize) -> Self {
        let geometry = Geometry::dividing(LENGTH, partitions, SLOT, BLOCKS).unwrap();
        let geometry = Geometry { ring_bytes: 32 * SLOT, control_bytes: 1024, ..geometry };
        // Shared with a process that carries out a part of a turn.
        let mapping = Arc::new(Mapping::memfd("window", 2 * LENGTH).unwrap());
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
                if let Notice::Moved { id, .. } = notice {
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
        self.adopt(side, count);
        for partition in self.partitions.iter_mut().flatten() {
            partition.obey(Command::Link { up: true });
            partition.notices();
        }
        for which in 0..self.programs.len() {
            for from in 0..2 {
                self.go_on(which, from);
            }
        }
    }

    /// Fresh partitions of a side, with every connection that its keeper has.
    fn adopt(&mut self, side: usize, count: usize) {
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
    }

    /// The other end of a connection goes on from where the end at `from` is.
    fn go_on(&mut self, which: usize, from: usize) {
        let programs = &self.programs[which];
        let [own, other] = [&programs[from], &programs[1 - from]];
        let partition = &mut self.partitions[from][own.partition];
        partition.obey(Command::Report { key: own.key, life: 1 });
        let Some(Notice::Position { position, .. }) = partition.notices().pop() else {
            panic!("a position was asked for")
        };
        let Position { delivered, consumed, .. } = position;
        let delivered = if self.forgets && delivered > consumed { consumed } else { delivered };
        let key = other.key;
        let command = Command::Resume { key, delivered, consumed };
        self.partitions[1 - from][other.partition].obey(command);
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

/// What a proxy does that may die in the middle of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Turn,
    TakeOver,
}

impl World {
    fn work(&mut self, side: usize, work: Work) {
        match work {
            Work::Turn => _ = self.turn(side, 0),
            Work::TakeOver => {
                self.adopt(side, 1);
                self.partitions[side][0].obey(Command::Link { up: true });
            }
        }
    }

    /// All memory that outlives a proxy: the window, and every connection's.
    fn shared(&self) -> Vec<&Mapping> {
        let channels = self.programs.iter().flatten();
        let channels = channels.map(|program| program.connection.channel.mapping());
        channels.chain([&*self.mapping]).collect()
    }

    fn picture(&self) -> Vec<Vec<u8>> {
        let copy = |mapping: &&Mapping| {
            // SAFETY: mapped for so many bytes; no process writes them meanwhile.
            unsafe {
                std::slice::from_raw_parts(mapping.base().as_ptr(), mapping.length_bytes()).to_vec()
            }
        };
        self.shared().iter().map(copy).collect()
    }

    /// What a proxy of this side may have written is as in the picture: its programs' memory, and its partition's part
    /// of both halves of the window.
    fn is_as(&self, side: usize, picture: &[Vec<u8>]) -> bool {
        let (at, length) = self.geometry.partition(0);
        let windows = [0, LENGTH].map(|half| (2 * self.programs.len(), half + at, length));
        let own = (0..self.programs.len()).map(|which| 2 * which + side);
        let own = own.map(|index| (index, 0, picture[index].len()));
        let shared = self.shared();
        own.chain(windows).all(|(index, at, length)| {
            // SAFETY: within the mapping, as the picture of it is.
            let now = unsafe { shared[index].base().add(at) };
            // SAFETY: as above.
            let now = unsafe { std::slice::from_raw_parts(now.as_ptr(), length) };
            now == &picture[index][at..at + length]
        })
    }

    fn restore(&self, picture: &[Vec<u8>]) {
        for (mapping, bytes) in self.shared().iter().zip(picture) {
            // SAFETY: as long as the mapping, which no reference leads into.
            unsafe { bytes.as_ptr().copy_to(mapping.base().as_ptr(), bytes.len()) };
        }
    }

    /// Every block of a side's connections is free or holds a packet, while no proxy and no program has one in hands.
    fn has_all_blocks(&self, side: usize) -> bool {
        self.programs.iter().all(|programs| {
            [Direction::ToProxy, Direction::ToProgram].into_iter().all(|direction| {
                let packets = programs[side].connection.channel.packets(direction);
                let count =
                    |queue: &IndexQueue<'_>| queue.count().map_or(usize::MAX, |n| n as usize);
                count(packets.free()).saturating_add(count(packets.filled())) == BLOCKS
            })
        })
    }

    /// Another proxy takes over, in a process of its own, and everything comes to its end: true if every byte is there
    /// and no one twice, and no block is lost.
    fn survives(&mut self, side: usize) -> bool {
        // SAFETY: as in `killed_behind`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // One that does not come to its end has not survived.
            // SAFETY: names no memory.
            unsafe { libc::alarm(60) };
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                self.take_over(side);
                self.has_all_blocks(side) && {
                    self.settle();
                    self.is_whole()
                }
            }));
            // SAFETY: as in `killed_behind`.
            unsafe { libc::_exit(i32::from(!matches!(outcome, Ok(true)))) };
        }
        assert!(child > 0);
        let status = wait_for(child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }

    /// A proxy dies behind each store to shared memory that `work` makes: how many there were, and how many of these
    /// deaths cost a byte or a block. `None`: the system has no single steps for this process.
    fn die_behind_stores(&mut self, side: usize, work: Work) -> Option<(usize, usize)> {
        let before = self.picture();
        let mut pictures = vec![self.picture()];
        let world = std::cell::RefCell::new(self);
        let look = || {
            let world = world.borrow();
            if pictures.last().is_none_or(|last| !world.is_as(side, last)) {
                pictures.push(world.picture());
            }
            false
        };
        // The child has a copy of the borrow's state as of everything else, from before the first look.
        killed_behind(look, || world.borrow_mut().work(side, work))?;
        let world = world.into_inner();
        let mut lost = 0;
        for picture in &pictures {
            world.restore(picture);
            lost += usize::from(!world.survives(side));
        }
        world.restore(&before);
        Some((pictures.len(), lost))
    }
}

/// Programs send and receive, partitions take turns, and proxies die behind any instruction of a turn or of a
/// take-over; by `seed`. How many died in the middle.
fn die_behind_instructions(seed: u64) -> Option<u32> {
    let mut world = World::new(1);
    (0..3).for_each(|port| world.connect(100 + port, 0));
    let (mut state, mut died) = (seed, 0);
    for _ in 0..80 {
        let (side, kind, count) = (next(&mut state) % 2, next(&mut state) % 16, next(&mut state));
        let which = count % 3;
        match kind {
            0..5 => world.put(which, side, 1 + count % 1200),
            5..8 => _ = world.take(which, side, 1 + count % 3000),
            8..14 => _ = world.turn(side, 0),
            _ => {
                let mut left = (1 << (next(&mut state) % 14)) + next(&mut state) % 4096;
                let work = if kind == 14 { Work::Turn } else { Work::TakeOver };
                let behind = || {
                    left -= 1;
                    left == 0
                };
                let killed = killed_behind(behind, || world.work(side, work))?;
                died += u32::from(killed);
                world.take_over(side);
            }
        }
    }
    world.settle();
    assert!(world.is_whole(), "{:?} {:?}", world.sent, world.received);
    Some(died)
}

#[test]
fn a_proxy_that_dies_behind_any_instruction_is_taken_over_and_no_byte_is_lost_or_doubled() {
    let seeds = std::env::var("BEELINE_SEEDS").ok().and_then(|text| text.parse().ok());
    let mut died = 0;
    for seed in 0..seeds.unwrap_or(12) {
        let outcome = catch_unwind(|| die_behind_instructions(seed));
        let outcome = outcome.unwrap_or_else(|cause| {
            say(&format!("seed {seed}"));
            resume_unwind(cause)
        });
        let Some(count) = outcome else {
            say("a_proxy_that_dies_behind_any_instruction ... skipped: no single steps here");
            return;
        };
        died += count;
    }
    say(&format!("ran: {died} proxies died in the middle of a turn or of a take-over"));
    assert!(died > 50, "{died} proxies died");
}

/// A world by `seed` with bytes, credits and rings under way.
fn busy(seed: u64) -> World {
    let mut world = World::new(1);
    (0..2).for_each(|port| world.connect(100 + port, 0));
    let mut state = seed;
    for _ in 0..40 {
        let (side, kind, count) = (next(&mut state) % 2, next(&mut state) % 8, next(&mut state));
        match kind {
            0..3 => world.put(count % 2, side, 1 + count % 1200),
            3..5 => _ = world.take(count % 2, side, 1 + count % 3000),
            _ => _ = world.turn(side, 0),
        }
    }
    world
}

/// Every moment at which a proxy may die: what the next one finds changes with a store to shared memory and with
/// nothing else.
#[test]
fn a_proxy_that_dies_behind_any_store_of_a_turn_or_a_take_over_loses_and_doubles_nothing() {
    let test = "a_proxy_that_dies_behind_any_store";
    let mut stores = 0;
    for seed in 0..if std::env::var_os("BEELINE_DEEP").is_some() { 40 } else { 2 } {
        for work in [Work::Turn, Work::TakeOver] {
            for side in 0..2 {
                let mut world = busy(seed);
                let Some((count, lost)) = world.die_behind_stores(side, work) else {
                    return say(&format!("{test} ... skipped: no single steps here"));
                };
                assert_eq!(lost, 0, "of {count} deaths; seed {seed}, side {side}, {work:?}");
                stores += count;
            }
        }
    }
    // The check is one: an end that goes on from elsewhere than where the other one is costs bytes.
    let mut world = busy(0);
    world.forgets = true;
    let found_out = world.die_behind_stores(0, Work::Turn).map_or(0, |(_, lost)| lost);
    say(&format!(
        "ran: {stores} deaths behind stores; of a planted fault {found_out} are found out"
    ));
    assert!(stores > 80 && found_out > 0, "{stores} stores, {found_out} found out");
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

/// Two partitions at each host, one connection in the first ones.
fn one_that_may_move() -> (World, Key) {
    let mut world = World::new(2);
    world.connect(100, 0);
    let key = world.programs[0][0].key;
    (world, key)
}

fn every_partition_is_idle(world: &mut World) {
    for _ in 0..8 {
        for side in 0..2 {
            for index in 0..2 {
                world.turn(side, index).unwrap();
            }
        }
    }
    assert!(world.partitions.iter().flatten().all(Partition::is_idle));
}

/// The other end is broken off before it reads of the move, and does not answer it any more.
#[test]
fn a_connection_that_is_reset_while_it_leaves_is_over_at_both_ends() {
    let (mut world, key) = one_that_may_move();
    world.partitions[0][0].obey(Command::Move { key, to: 1 });
    world.turn(0, 0).unwrap();
    let other = world.programs[0][1].key;
    world.partitions[1][0].obey(Command::Break { key: other });
    every_partition_is_idle(&mut world);
    let read = world.programs[0].each_ref().map(|program| program.receive(10));
    assert_eq!(read, [Err(Errno(libc::ECONNRESET)), Err(Errno(libc::ECONNRESET))]);
}

/// The order to move comes behind the last packet, with which the other end is over.
#[test]
fn a_connection_that_has_sent_its_last_packet_stays_where_it_is_and_both_ends_are_freed() {
    let (mut world, key) = one_that_may_move();
    let [own, other] = world.programs.pop().unwrap();
    own.connection.shutdown(own.fd.as_raw_fd(), libc::SHUT_WR).unwrap();
    world.turn(0, 0).unwrap();
    world.partitions[0][0].obey(Command::Move { key, to: 1 });
    world.turn(1, 0).unwrap();
    assert_eq!(other.receive(10), Ok(Vec::new()));
    drop(other.fd);
    world.partitions[1][0].heard(0, true);
    world.turn(1, 0).unwrap();
    world.turn(0, 0).unwrap();
    assert_eq!(own.receive(10), Ok(Vec::new()));
    drop(own.fd);
    world.partitions[0][0].heard(0, true);
    every_partition_is_idle(&mut world);
}

/// The monitor has a connection broken off that is on its way, and the link falls before it is there.
#[test]
fn a_connection_that_is_to_be_broken_off_where_it_goes_does_not_outlive_the_links_fall() {
    let (mut world, key) = one_that_may_move();
    world.partitions[0][0].obey(Command::Move { key, to: 1 });
    world.turn(0, 0).unwrap();
    world.partitions[0][0].obey(Command::Break { key });
    world.partitions[0][0].obey(Command::Suspend);
    assert!(world.partitions[0][0].is_idle());
    assert_eq!(world.programs[0][0].receive(10), Err(Errno(libc::ECONNRESET)));
    // The same where it has left the first partition by then.
    let (mut world, key) = one_that_may_move();
    world.partitions[0][0].obey(Command::Move { key, to: 1 });
    world.turn(0, 0).unwrap();
    world.turn(1, 0).unwrap();
    world.turn(1, 0).unwrap();
    world.partitions[0][0].obey(Command::Break { key });
    world.partitions[0][0].turn().unwrap();
    let departure = world.partitions[0][0].departures().pop().unwrap();
    world.partitions[0][1].obey(Command::Suspend);
    world.partitions[0][1].obey(Command::Arrive(departure));
    assert!(world.partitions[0][1].is_idle());
    assert_eq!(world.programs[0][0].receive(10), Err(Errno(libc::ECONNRESET)));
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
