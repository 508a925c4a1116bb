//! Partitions with two threads each (SP2C): one that sends, one that receives, at both ends of one window that
//! reorders what is not fenced.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_ntb::shim::Combining;
use beeline_ntb::window::Mapped;
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::channel::{Channel, Direction};
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::{Command, Key, Partition, Receiver};
use common::{BLOCKS, LENGTH, Program, SLOT, Silent, byte};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

const CONNECTIONS: u16 = 4;
/// Bytes of each connection, each way.
const BYTES: usize = 200_000;

fn partitions() -> [(Partition, Receiver); 2] {
    let geometry = Geometry::dividing(LENGTH, 1, SLOT, BLOCKS).unwrap();
    let geometry = Geometry { ring_bytes: 32 * SLOT, control_bytes: 1024, ..geometry };
    let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
    [0, 1].map(|side| {
        let far = Mapped::new(Arc::clone(&mapping), (1 - side) * LENGTH, LENGTH);
        let shim = Combining::new(Arc::new(far), 6, 7 + side as u64);
        let inbound = Inbound::new(Arc::clone(&mapping), side * LENGTH, LENGTH);
        let outbound = Outbound::new(Arc::new(shim));
        let window = Window { inbound, outbound, bells: Arc::new(Silent) };
        let (at, bytes) = geometry.partition(0);
        let schedule = Schedule::new(8, 4);
        Partition::shared(window.part(at, bytes), geometry, schedule, 1)
    })
}

fn connect(sides: &mut [(Partition, Receiver); 2], port: u16, page: &Arc<Page>) -> [Program; 2] {
    let keys = [Key { own: port, peer: 80 }, Key { own: 80, peer: port }];
    let at = "10.0.0.1:1".parse().unwrap();
    let geometry = Geometry::dividing(LENGTH, 1, SLOT, BLOCKS).unwrap();
    [0, 1].map(|side| {
        let channel = Channel::create(geometry.shape(), at, at).unwrap();
        let memory = channel.mapping().descriptor().unwrap().try_clone().unwrap();
        let flags = SocketFlags::CLOEXEC;
        let (socket, fd) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let taken = Channel::take(memory.try_clone().unwrap()).unwrap();
        let command = Command::Create {
            key: keys[side],
            id: u64::from(port),
            channel: Arc::new(channel),
            socket: socket.try_clone().unwrap(),
            priority: 0,
            open: true,
        };
        assert!(sides[side].0.obey(command).is_some());
        let connection = Connection::new(taken, Arc::clone(page));
        Program { connection, fd, memory, socket, key: keys[side], partition: 0 }
    })
}

/// Sends and receives on every connection, both ways, until every byte is there.
fn talk(programs: &[[Program; 2]]) {
    let mut totals = vec![[(0, 0); 2]; programs.len()];
    let begun = Instant::now();
    while totals.iter().flatten().any(|&total| total != (BYTES, BYTES)) {
        assert!(begun.elapsed() < Duration::from_secs(120), "{totals:?}");
        for (pair, totals) in programs.iter().zip(&mut totals) {
            for (program, (sent, received)) in pair.iter().zip(totals) {
                let part = (BYTES - *sent).min(1 + *sent % 3000);
                let bytes: Vec<u8> = (*sent..*sent + part).map(byte).collect();
                match program.send(&bytes) {
                    Ok(count) => *sent += count,
                    Err(Errno(error)) => assert_eq!(error, libc::EAGAIN),
                }
                match program.receive(5000) {
                    Ok(bytes) => {
                        for found in bytes {
                            assert_eq!(found, byte(*received), "byte {received}");
                            *received += 1;
                        }
                    }
                    Err(Errno(error)) => assert_eq!(error, libc::EAGAIN),
                }
            }
        }
        std::thread::yield_now();
    }
}

#[test]
fn two_threads_of_a_partition_carry_streams_whole_both_ways() {
    let mut sides = partitions();
    let page = Arc::new(Page::create().unwrap());
    for (partition, _) in &mut sides {
        partition.obey(Command::Link { up: true });
    }
    let programs: Vec<_> =
        (0..CONNECTIONS).map(|port| connect(&mut sides, 100 + port, &page)).collect();
    let over = AtomicBool::new(false);
    let received = std::thread::scope(|scope| {
        let threads = sides.map(|(mut partition, receiver)| {
            let over = &over;
            let second = scope.spawn(move || {
                let mut done = 0;
                while !over.load(Ordering::Relaxed) {
                    done += receiver.turn();
                    std::thread::yield_now();
                }
                done
            });
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    partition.turn().unwrap();
                    std::thread::yield_now();
                }
                assert_eq!(partition.counters.drops.load(Ordering::Relaxed), 0);
            });
            second
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| talk(&programs)));
        over.store(true, Ordering::Relaxed);
        outcome.unwrap_or_else(|cause| std::panic::resume_unwind(cause));
        threads.map(|thread| thread.join().unwrap())
    });
    let packets = usize::from(CONNECTIONS) * BYTES / (SLOT - 8);
    assert!(
        received.iter().all(|&count| count > packets),
        "the second threads received: {received:?}"
    );
}

#[test]
fn ends_and_resets_are_the_first_threads_and_come_behind_the_data() {
    let mut sides = partitions();
    let page = Arc::new(Page::create().unwrap());
    for (partition, _) in &mut sides {
        partition.obey(Command::Link { up: true });
    }
    let [client, server] = connect(&mut sides, 100, &page);
    let turns = |sides: &mut [(Partition, Receiver); 2]| {
        for _ in 0..4 {
            for (partition, receiver) in &mut *sides {
                partition.turn().unwrap();
                receiver.turn();
            }
        }
    };
    assert_eq!(client.send(b"last words"), Ok(10));
    client.connection.shutdown(std::os::fd::AsRawFd::as_raw_fd(&client.fd), libc::SHUT_WR).unwrap();
    turns(&mut sides);
    assert_eq!(server.receive(100), Ok(b"last words".to_vec()));
    assert_eq!(server.receive(100), Ok(Vec::new()));
    // The other way is broken off with bytes unread.
    assert_eq!(server.send(b"answer"), Ok(6));
    turns(&mut sides);
    let Program { connection, fd, socket, .. } = client;
    drop((connection, fd, socket));
    sides[0].0.heard(0, true);
    turns(&mut sides);
    assert_eq!(server.receive(100), Err(Errno(libc::ECONNRESET)));
    assert!(sides[0].0.is_idle());
    turns(&mut sides);
    assert!(sides[1].0.is_idle());
}

/// The second thread finds a program's nonsense, and the connection ends before the first thread has heard of it: the
/// one that has its place by then is another program's.
#[test]
fn what_the_second_thread_found_of_a_connection_that_is_over_is_not_said_of_the_next_one() {
    let mut sides = partitions();
    let page = Arc::new(Page::create().unwrap());
    for (partition, _) in &mut sides {
        partition.obey(Command::Link { up: true });
    }
    let [liar, _other] = connect(&mut sides, 100, &page);
    liar.connection.channel.packets(Direction::ToProgram).filled().skip(1);
    sides[0].1.turn();
    sides[0].0.obey(Command::Break { key: liar.key });
    let [client, server] = connect(&mut sides, 101, &page);
    assert_eq!(server.send(b"hello"), Ok(5));
    for _ in 0..4 {
        for (partition, receiver) in &mut sides {
            partition.turn().unwrap();
            receiver.turn();
        }
    }
    assert_eq!(client.receive(100), Ok(b"hello".to_vec()));
}
