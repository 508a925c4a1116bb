//! Two partitions over a window, with programs at both ends: no threads, no processes, every order of
//! steps from a seed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use beeline_ntb::bells::Silent;
use beeline_ntb::shim::Combining;
use beeline_ntb::window::{Mapped, Wire};
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::channel::{Channel, Direction};
use beeline_sockets::packets::header::{Header, PacketKind};
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::{BATCH, Command, Fault, Key, Notice, Partition};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

const SLOT: usize = 128;
const BLOCKS: usize = 16;

/// A program's end of a connection.
struct Program {
    connection: Connection,
    fd: OwnedFd,
    page: Arc<Page>,
}

/// Both hosts.
struct World {
    partitions: [Partition; 2],
    windows: [Window; 2],
    mapping: Arc<Mapping>,
    geometry: Geometry,
    page: Arc<Page>,
    next: u64,
}

impl World {
    /// `seed`: of the write-combining buffers before each window.
    fn new(seed: Option<u64>) -> Self {
        Self::with_queues(seed, BLOCKS)
    }

    /// Queues of so many blocks.
    fn with_queues(seed: Option<u64>, blocks: usize) -> Self {
        let length = 64 << 10;
        let geometry = Geometry::dividing(length, 1, SLOT, blocks).unwrap();
        // Rings so short that they are full now and then.
        let geometry = Geometry { ring_bytes: 64 * SLOT, control_bytes: 1024, ..geometry };
        let mapping = Arc::new(Mapping::anonymous(2 * length).unwrap());
        let (at, bytes) = geometry.partition(0);
        let windows = [(0, length), (length, 0)].map(|(own, other)| {
            let mut wire: Arc<dyn Wire> =
                Arc::new(Mapped::new(Arc::clone(&mapping), other, length));
            if let Some(seed) = seed {
                wire = Arc::new(Combining::new(wire, 6, seed));
            }
            let inbound = Inbound::new(Arc::clone(&mapping), own, length);
            Window { inbound, outbound: Outbound::new(wire), bells: Arc::new(Silent) }
                .part(at, bytes)
        });
        let mut partitions =
            windows.clone().map(|window| Partition::new(window, geometry, Schedule::new(8, 4), 1));
        for partition in &mut partitions {
            partition.obey(Command::Link { up: true });
            partition.notices();
        }
        let page = Arc::new(Page::create().unwrap());
        Self { partitions, windows, mapping, geometry, page, next: 1 }
    }

    /// A connection between both, with the client's port.
    fn connect(&mut self, port: u16, priority: u8) -> [Program; 2] {
        let keys = [Key { own: port, peer: 80 }, Key { own: 80, peer: port }];
        [0, 1].map(|side| {
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
            let (key, id) = (keys[side], self.next);
            self.next += 1;
            let command = Command::Create {
                key,
                id,
                channel: Arc::new(channel),
                socket,
                priority,
                open: true,
            };
            assert!(self.partitions[side].obey(command).is_some());
            let connection =
                Connection::new(Channel::take(memory).unwrap(), Arc::clone(&self.page));
            Program { connection, fd, page: Arc::clone(&self.page) }
        })
    }

    fn turn(&mut self) -> usize {
        self.partitions.iter_mut().map(|partition| partition.turn().unwrap()).sum()
    }

    /// Turns until nothing moves.
    fn settle(&mut self) {
        while self.turn() > 0 {}
    }
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

fn byte(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 7) as u8
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 64 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn streams_are_whole_both_ways_through_a_window_that_reorders(
        seed in any::<u64>(),
        steps in proptest::collection::vec((0_usize..3, 0_usize..2, 0_usize..5, 1_usize..3000), 1..200),
    ) {
        let mut world = World::new(Some(seed));
        let programs: Vec<[Program; 2]> = (0..3).map(|port| world.connect(100 + port, 0)).collect();
        let (mut sent, mut received) = ([[0_usize; 2]; 3], [[0_usize; 2]; 3]);
        let take = |received: &mut [[usize; 2]; 3], which: usize, side: usize, most: usize| {
            match programs[which][side].receive(most) {
                Ok(bytes) => {
                    let at = received[which][side];
                    for (index, found) in bytes.iter().enumerate() {
                        assert_eq!(*found, byte(at + index), "connection {which}, byte {}", at + index);
                    }
                    received[which][side] += bytes.len();
                    bytes.len()
                }
                Err(Errno(error)) => { assert_eq!(error, libc::EAGAIN); 0 }
            }
        };
        for (which, side, kind, count) in steps {
            match kind {
                0 | 1 => {
                    let at = sent[which][side];
                    let bytes: Vec<u8> = (at..at + count).map(byte).collect();
                    match programs[which][side].send(&bytes) {
                        Ok(count) => sent[which][side] += count,
                        Err(Errno(error)) => prop_assert_eq!(error, libc::EAGAIN),
                    }
                }
                2 => { take(&mut received, which, side, count); }
                3 => { world.partitions[side].turn().unwrap(); }
                _ => { world.turn(); }
            }
        }
        loop {
            let mut moved = world.turn();
            for which in 0..3 {
                for side in 0..2 {
                    moved += take(&mut received, which, side, 10_000);
                }
            }
            if moved == 0 { break; }
        }
        for which in 0..3 {
            prop_assert_eq!(sent[which][0], received[which][1]);
            prop_assert_eq!(sent[which][1], received[which][0]);
        }
        for partition in &world.partitions {
            prop_assert_eq!(partition.counters.drops.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn any_words_from_the_other_host_end_the_link_with_a_reason_or_are_packets(
        words in proptest::collection::vec((0_usize..6000, any::<u64>(), any::<bool>()), 1..60),
    ) {
        let mut world = World::new(None);
        let programs = world.connect(100, 0);
        let _ = programs[0].send(&[7; 500]);
        for (at, word, plausible) in words {
            let at = at * 8 % (world.windows[0].inbound.length_bytes() - 8) / 8 * 8;
            let word = if plausible { 100 | 80 << 16 | (word % 200) << 32 | 1 << 60 } else { word };
            world.windows[0].inbound.word(at).store(word, Ordering::Relaxed);
            match world.partitions[0].turn() {
                Ok(_) => {}
                Err(fault @ (Fault::Ring(_) | Fault::Flow { .. })) => {
                    prop_assert!(!fault.to_string().is_empty());
                    world.partitions[0].obey(Command::Link { up: false });
                    let notices = world.partitions[0].notices();
                    prop_assert!(notices.contains(&Notice::Cleared));
                    let _ = programs[0].receive(4096);
                    prop_assert!(programs[0].send(b"x").is_err());
                    return Ok(());
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }

    #[test]
    fn any_words_from_a_program_cost_it_its_connection_and_no_other(
        words in proptest::collection::vec((0_usize..1100, any::<u32>(), any::<bool>()), 1..80),
    ) {
        let mut world = World::new(None);
        let hostile = world.connect(100, 0);
        let other = world.connect(101, 0);
        let length = hostile[0].connection.channel.shape().length_bytes() / 4;
        for (at, word, small) in words {
            // From the program's words on.
            let at = 32 + at % (length - 32);
            let word = if small { word % 20 } else { word };
            let base = hostile[0].connection.channel.mapping().base();
            // SAFETY: within the mapping, aligned; the program may write all of it.
            let place = unsafe { base.cast::<u32>().add(at) };
            // SAFETY: as above.
            unsafe { std::sync::atomic::AtomicU32::from_ptr(place.as_ptr()) }.store(word, Ordering::Relaxed);
            for _ in 0..3 {
                world.turn();
            }
            let _ = hostile[1].send(b"to the hostile one");
            let _ = hostile[1].receive(1000);
        }
        prop_assert_eq!(other[0].send(b"untouched"), Ok(9));
        for _ in 0..20 {
            world.turn();
        }
        prop_assert_eq!(other[1].receive(100), Ok(b"untouched".to_vec()));
    }
}

/// Sizes about those of a packet and of a full queue, and one of 64 MiB, read in pieces of all lengths.
#[test]
fn a_write_of_any_size_is_sliced_and_merged() {
    const PAYLOAD: usize = SLOT - 8;
    let mut world = World::new(None);
    let [writer, reader] = world.connect(100, 0);
    let largest = if cfg!(miri) { 1 << 14 } else { 64 << 20 };
    let mut piece = 1;
    for size in
        [1, 2, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, BLOCKS * PAYLOAD + 1, (1 << 20) + 3, largest]
    {
        let bytes: Vec<u8> = (size..2 * size).map(byte).collect();
        let (mut sent, mut read) = (0, 0);
        while read < size {
            if sent < size {
                sent += writer.send(&bytes[sent..]).unwrap_or(0);
            }
            world.settle();
            while let Ok(part) = reader.receive(piece) {
                assert_eq!(part, bytes[read..read + part.len()], "{size} bytes, at {read}");
                read += part.len();
                piece = piece % 5000 * 7 % 5003 + 1;
            }
        }
        assert_eq!((sent, read), (size, size));
    }
}

#[test]
fn a_receiver_that_stands_still_stops_no_other_and_goes_on_by_itself() {
    let mut world = World::new(None);
    let all: Vec<[Program; 2]> = (0..10).map(|port| world.connect(100 + port, 0)).collect();
    let mut stalled = 0;
    while let Ok(count) = all[0][0].send(&[1; 1000]) {
        stalled += count;
        world.settle();
    }
    // A sender keeps the blocks of what is under way: as many packets as the receiver's queue has blocks.
    assert!(stalled >= BLOCKS * (SLOT - 8) * 3 / 4, "the queue is full");
    for _ in 0..200 {
        for pair in &all[1..] {
            assert_eq!(pair[0].send(&[2; 300]), Ok(300));
            world.settle();
            assert_eq!(pair[1].receive(300).unwrap().len(), 300);
        }
    }
    let mut read = 0;
    loop {
        match all[0][1].receive(5000) {
            Ok(bytes) => read += bytes.len(),
            Err(_) if world.turn() > 0 => {}
            Err(_) => break,
        }
    }
    assert_eq!(read, stalled);
    let drops = |partition: &Partition| partition.counters.drops.load(Ordering::Relaxed);
    assert_eq!(world.partitions.iter().map(drops).sum::<u64>(), 0);
}

/// A program takes packets out of the queue and gives their blocks back then; between both another thread may have its
/// processor for as long as the sender needs to fill the queue.
#[test]
fn a_program_that_stands_still_between_taking_packets_and_giving_back_their_blocks_keeps_its_connection()
 {
    let mut world = World::new(None);
    let [client, server] = world.connect(100, 0);
    let packets = server.connection.channel.packets(Direction::ToProgram);
    let fill = |world: &mut World| {
        let mut sent = 0;
        while let Ok(count) = client.send(&[1; SLOT - 8]) {
            sent += count / (SLOT - 8);
            world.settle();
        }
        sent
    };
    assert_eq!(fill(&mut world), BLOCKS);
    for _ in 0..3 * BLOCKS {
        // As many as make a credit due.
        let mut numbers = [0; BLOCKS / 4];
        assert_eq!(packets.look(&mut numbers), Ok(BLOCKS / 4));
        packets.filled().skip(BLOCKS / 4);
        world.settle();
        assert_eq!(fill(&mut world), 0, "no packet is granted for which no block is free");
        assert_eq!(packets.free().push(&numbers), Ok(BLOCKS / 4));
        world.settle();
        assert_eq!(fill(&mut world), BLOCKS / 4);
    }
    assert!(server.connection.take_error().is_none() && client.connection.take_error().is_none());
}

#[test]
fn a_small_message_waits_for_a_batch_of_each_greedy_connection_at_most() {
    let mut world = World::new(None);
    let greedy: Vec<[Program; 2]> = (0..2).map(|port| world.connect(100 + port, 0)).collect();
    let polite = world.connect(200, 0);
    let mut longest = 0;
    for _ in 0..200 {
        for pair in &greedy {
            let _ = pair[0].send(&[9; 4000]);
        }
        assert_eq!(polite[0].send(b"ping"), Ok(4));
        let mut packets = 0;
        let before = world.partitions[0].counters.sent_packets.load(Ordering::Relaxed);
        while polite[1].receive(10).is_err() {
            world.turn();
            for pair in &greedy {
                let _ = pair[1].receive(100_000);
            }
            let now = world.partitions[0].counters.sent_packets.load(Ordering::Relaxed);
            packets = now - before;
        }
        longest = longest.max(packets);
    }
    // Its own, and a batch of each of the two others in the round before and in its own.
    assert!(longest <= 1 + 2 * 2 * BATCH as u64, "{longest} packets went before it came");
}

#[test]
fn what_is_of_high_priority_goes_first_and_the_rest_goes_on() {
    // Queues of several batches: the high one always has something to send.
    let mut world = World::with_queues(None, 4 * BATCH);
    let (high, low) = (world.connect(100, 0), world.connect(101, 7));
    let (mut of_high, mut of_low) = (0, 0);
    for _ in 0..400 {
        let _ = high[0].send(&[1; 8000]);
        let _ = low[0].send(&[2; 8000]);
        world.turn();
        world.partitions[1].turn().unwrap();
        of_high += high[1].receive(10_000).map_or(0, |bytes| bytes.len());
        of_low += low[1].receive(10_000).map_or(0, |bytes| bytes.len());
        // Credits come back before the next round, so that the high one is never without.
        world.partitions[1].turn().unwrap();
    }
    assert!(of_low > 0, "the lowest priority does not starve");
    assert!(of_high > 3 * of_low, "{of_high} and {of_low}");
}

#[test]
fn a_finish_comes_behind_the_data_and_a_close_frees_both_ends() {
    let mut world = World::new(None);
    let [client, server] = world.connect(100, 0);
    assert_eq!(client.send(&[5; 900]), Ok(900));
    client.connection.shutdown(client.fd.as_raw_fd(), libc::SHUT_WR).unwrap();
    assert_eq!(client.send(b"more"), Err(Errno(libc::EPIPE)));
    world.settle();
    assert_eq!(server.receive(2000).unwrap().len(), 900);
    assert_eq!(server.receive(2000), Ok(Vec::new()));
    // The other direction goes on.
    assert_eq!(server.send(b"answer"), Ok(6));
    world.settle();
    assert_eq!(client.receive(100), Ok(b"answer".to_vec()));
    for (side, program) in [server, client].into_iter().enumerate() {
        drop(program.fd);
        world.partitions[1 - side].heard(0, true);
    }
    world.settle();
    for partition in &mut world.partitions {
        assert!(partition.is_idle());
        assert!(partition.notices().iter().any(|notice| matches!(notice, Notice::Gone { .. })));
    }
    // More data than goes in one turn.
    let mut world = World::with_queues(None, 4 * BATCH);
    let [client, server] = world.connect(100, 0);
    let bytes: Vec<u8> = (0..4 * BATCH * (SLOT - 8)).map(byte).collect();
    assert_eq!(client.send(&bytes), Ok(bytes.len()));
    client.connection.shutdown(client.fd.as_raw_fd(), libc::SHUT_WR).unwrap();
    world.settle();
    let mut came = Vec::new();
    while let Ok(part) = server.receive(5000)
        && !part.is_empty()
    {
        came.extend(part);
        world.settle();
    }
    assert!(came == bytes, "{} of {} bytes came before the end", came.len(), bytes.len());
    assert_eq!(server.receive(100), Ok(Vec::new()));
}

#[test]
fn a_close_with_bytes_unread_breaks_the_connection_off() {
    let mut world = World::new(None);
    let [client, server] = world.connect(100, 0);
    assert_eq!(client.send(b"never read"), Ok(10));
    world.settle();
    drop(server.fd);
    world.partitions[1].heard(0, true);
    world.settle();
    assert_eq!(client.receive(10), Err(Errno(libc::ECONNRESET)));
    assert_eq!(client.receive(10), Ok(Vec::new()));
    assert_eq!(client.send(b"x"), Err(Errno(libc::EPIPE)));
    assert!(world.partitions.iter().all(Partition::is_idle));
}

#[test]
fn blocks_in_the_programs_hands_are_part_of_the_stream_and_copy_nothing() {
    let mut world = World::new(None);
    let [client, server] = world.connect(100, 0);
    let (from, to) = (client.fd.as_raw_fd(), server.fd.as_raw_fd());
    assert_eq!(client.send(b"copied, "), Ok(8));
    let mut room = client.connection.room(from).unwrap().unwrap();
    assert_eq!(room.write(0, b"in place"), 8);
    room.send(from, 8).unwrap();
    world.settle();
    assert_eq!(server.receive(8), Ok(b"copied, ".to_vec()));
    let before = server.connection.copied();
    let arrived = server.connection.arrived(to).unwrap().unwrap();
    assert_eq!(arrived.bytes(), b"in place");
    arrived.release(to).unwrap();
    assert_eq!(server.connection.copied(), before);
    assert_eq!(client.connection.copied(), 8);
    assert!(server.connection.arrived(to).unwrap().is_none());
    let over = client.connection.room(from).unwrap().unwrap().send(from, SLOT);
    assert_eq!(over, Err(Errno(libc::EMSGSIZE)));
    let _ = (&client.page, &server.page, &world.mapping);
}

#[test]
fn a_thread_sleeps_only_once_the_other_knows_and_is_told_of_what_comes() {
    let mut world = World::new(None);
    let [client, _server] = world.connect(100, 0);
    assert!(!world.partitions[1].rests(true), "the other end has not answered");
    world.partitions[0].turn().unwrap();
    assert!(world.partitions[1].rests(true));
    assert!(!world.partitions[1].has_work());
    assert_eq!(client.send(b"wake"), Ok(4));
    assert!(world.partitions[0].has_work());
    world.partitions[0].turn().unwrap();
    assert!(world.partitions[1].has_work());
    world.partitions[1].wakes();
    world.settle();
}

/// A program publishes packets and, behind them in the same batch, a header that is none, while others fill the ring.
#[test]
fn a_batch_that_a_program_spoils_takes_no_room_in_the_ring_that_others_fill() {
    let mut world = World::with_queues(None, 4 * BATCH);
    let hostile: Vec<[Program; 2]> = (0..4).map(|port| world.connect(100 + port, 0)).collect();
    let others: Vec<[Program; 2]> = (0..5).map(|port| world.connect(200 + port, 0)).collect();
    for [program, _] in &hostile {
        assert_eq!(program.send(&[1; (BATCH - 1) * (SLOT - 8)]), Ok((BATCH - 1) * (SLOT - 8)));
        let packets = program.connection.channel.packets(Direction::ToProxy);
        let mut last = [0];
        assert_eq!(packets.take(&mut last), Ok(1));
        let header = program.connection.channel.header(Direction::ToProxy, last[0]);
        header.store(u64::MAX, Ordering::Relaxed);
        packets.publish(&last).unwrap();
    }
    let wanted: Vec<u8> = (0..BATCH * (SLOT - 8)).map(byte).collect();
    for [program, _] in &others {
        assert_eq!(program.send(&wanted), Ok(wanted.len()));
    }
    world.settle();
    for [_, program] in &others {
        assert_eq!(program.receive(10_000).as_ref(), Ok(&wanted));
    }
    for [program, other] in &hostile {
        assert_eq!(program.receive(100), Err(Errno(libc::ECONNRESET)));
        assert!(other.receive(100).is_err());
    }
}

/// A program that writes the block of its small packet over once it is published: what went is the copy beside the tail,
/// with both of which a program and a proxy, and a proxy and a program, hand one line over instead of two.
#[test]
fn a_small_packet_is_taken_from_its_copy_in_both_hand_overs() {
    let mut world = World::new(None);
    let [client, server] = world.connect(100, 0);
    let spoil = |channel: &Channel, direction| {
        for number in (0..).take(BLOCKS) {
            // SAFETY: a block's payload is longer.
            unsafe { channel.payload(direction, number).write_bytes(0xee, 48) };
        }
    };
    assert_eq!(client.send(b"small"), Ok(5));
    spoil(&client.connection.channel, Direction::ToProxy);
    world.settle();
    spoil(&server.connection.channel, Direction::ToProgram);
    assert_eq!(server.receive(100), Ok(b"small".to_vec()));
    // Two are no single packet, and have no copy.
    assert_eq!(client.send(&[7; 2 * (SLOT - 8)]), Ok(2 * (SLOT - 8)));
    spoil(&client.connection.channel, Direction::ToProxy);
    world.settle();
    let mut wanted = [7; 2 * (SLOT - 8)];
    wanted[..48].fill(0xee);
    wanted[SLOT - 8..][..48].fill(0xee);
    assert_eq!(server.receive(1000), Ok(wanted.to_vec()));
}

/// A copy may say anything at the right position. What goes is as much as a copy can hold of it, or the block.
#[test]
fn a_copy_that_a_program_spoils_sends_no_more_than_the_copy_has() {
    let data = |length| Header { length, ..header(PacketKind::Data) };
    let all = [data(9), data(55), data(56), data(57), data(64), data(127), data(128), data(129)];
    let others = [PacketKind::Finish, PacketKind::Reset, PacketKind::Extent, PacketKind::Migrate];
    let others = others.map(|kind| header(kind).encode());
    let odd = [0, u64::MAX, data(0).encode(), data(8).encode(), data(u16::MAX).encode()];
    let words = all.map(Header::encode).into_iter().chain(others).chain(odd);
    let (mut copies, mut blocks) = (0, 0);
    for word in words.flat_map(|word| [word, word | 1 << 63]) {
        let mut world = World::new(None);
        let [hostile, server] = world.connect(100, 0);
        let channel = &hostile.connection.channel;
        let packets = channel.packets(Direction::ToProxy);
        for position in 0..3_u32 {
            let mut number = [0];
            assert_eq!(packets.take(&mut number), Ok(1));
            let payload = channel.payload(Direction::ToProxy, number[0]);
            // SAFETY: a block's payload is longer.
            unsafe { payload.write_bytes(0xbb, 20) };
            let block = channel.header(Direction::ToProxy, number[0]);
            block.store(data(28).encode(), Ordering::Relaxed);
            packets.publish(&number).unwrap();
            copy(channel, position, word);
            world.settle();
            let came = server.receive(1000).unwrap();
            let length = (word >> 32 & 0xffff) as usize;
            if came[0] == 0xcc {
                assert!((9..=56).contains(&length), "{word:#x}");
                assert_eq!(came, vec![0xcc; length - 8], "{word:#x}");
                copies += 1;
            } else {
                assert_eq!(came, vec![0xbb; 20], "{word:#x}");
                blocks += 1;
            }
        }
    }
    assert_eq!((copies, blocks), (3 * 2 * 3, 3 * 2 * 14), "each of both was used");
}

fn header(kind: PacketKind) -> Header {
    let length = match kind {
        PacketKind::Data => 9,
        PacketKind::Finish | PacketKind::Reset => 8,
        PacketKind::Credit => 16,
        PacketKind::Migrate | PacketKind::Extent => 24,
    };
    Header { source: 0, destination: 0, length, sync: false, kind }
}

/// Writes the line of the tail over, but for the tail: a position and seven words, of which the first is `word`.
fn copy(channel: &Channel, position: u32, word: u64) {
    let line = channel.mapping().base();
    let half = |at: usize, value: u32| {
        // SAFETY: within the mapping, whose positions begin at 384; the program may write all of it.
        let place = unsafe { line.add(384 + at) };
        // SAFETY: aligned to 4; atomics only.
        unsafe { AtomicU32::from_ptr(place.cast().as_ptr()) }.store(value, Ordering::Relaxed);
    };
    half(8, word as u32);
    half(12, (word >> 32) as u32);
    (16..64).step_by(4).for_each(|at| half(at, 0xcccc_cccc));
    half(4, position);
}
