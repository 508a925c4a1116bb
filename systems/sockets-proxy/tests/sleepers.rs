//! Threads of several partitions at both ends of one window, with programs behind them, as one model: every thread
//! sleeps whenever it may, and is woken by doorbells and programs alone. Every order of steps comes from a seed.
//!
//! A packet, a credit or a position that was posted and not rung for leaves the model at rest with bytes under way.

#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_ntb::shim::Combining;
use beeline_ntb::window::{Bells, Mapped, Wire};
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::channel::Channel;
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::{Command, Key, Partition};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

const SLOT: usize = 128;
const BLOCKS: usize = 16;
const LENGTH: usize = 64 << 10;

/// Rings towards one side: one flag a bit.
#[derive(Debug, Default)]
struct Rung(Vec<AtomicBool>);

/// The doorbells of one end.
#[derive(Debug)]
struct Flags {
    other: Arc<Rung>,
    /// A planted fault: rings are lost.
    loses: bool,
}

impl Bells for Flags {
    fn ring(&self, bit: usize) {
        if self.loses {
            return;
        }
        self.other.0[bit].store(true, Ordering::SeqCst);
    }

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear(&self, _: usize) {}
}

/// What a thread does next; the other threads may go on in between.
#[derive(Clone, Copy)]
enum Phase {
    /// Receives and sends.
    Turn,
    /// Says that it wants to sleep.
    Rest,
    /// Looks once more; it knows whether the other end's thread has heard.
    Look(bool),
}

/// A partition's thread, one step at a time.
struct Thread {
    partition: Partition,
    rung: Arc<Rung>,
    bell: usize,
    /// In the page.
    index: usize,
    asleep: bool,
    /// Where it stands between a turn that found nothing and its sleep.
    phase: Phase,
    /// Bytes in each placeholder at the last look.
    seen: Vec<u64>,
}

impl Thread {
    /// What lies in the placeholders now is no news any more.
    fn look(&mut self) {
        for (place, seen) in self.seen.iter_mut().enumerate() {
            let socket = self.partition.socket(place);
            *seen = socket.map_or(0, |end| rustix::io::ioctl_fionread(end).unwrap());
        }
    }
}

struct Program {
    connection: Connection,
    fd: OwnedFd,
    /// Thread and place of the proxy's end.
    at: (usize, usize),
}

struct World {
    /// Partitions of side 0, then of side 1.
    threads: Vec<Thread>,
    page: Arc<Page>,
    geometry: Geometry,
}

impl World {
    fn new(partitions: usize, slots: usize, seed: u64, loses: bool) -> Self {
        let geometry = Geometry::dividing(LENGTH, partitions, SLOT, BLOCKS).unwrap();
        let geometry = Geometry { ring_bytes: slots * SLOT, control_bytes: 1024, ..geometry };
        let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        let rungs: [Arc<Rung>; 2] = std::array::from_fn(|_| {
            Arc::new(Rung((0..9).map(|_| AtomicBool::new(false)).collect()))
        });
        let page = Arc::new(Page::create().unwrap());
        let mut threads = Vec::new();
        for side in 0..2 {
            let (own, other) = (side * LENGTH, (1 - side) * LENGTH);
            let wire: Arc<dyn Wire> = Arc::new(Mapped::new(Arc::clone(&mapping), other, LENGTH));
            for index in 0..partitions {
                // Each thread has write-combining buffers of its own.
                let shim = Combining::new(Arc::clone(&wire), 6, seed ^ (side * 8 + index) as u64);
                let window = Window {
                    inbound: Inbound::new(Arc::clone(&mapping), own, LENGTH),
                    outbound: Outbound::new(Arc::new(shim)),
                    bells: Arc::new(Flags { other: Arc::clone(&rungs[1 - side]), loses }),
                };
                let (at, bytes) = geometry.partition(index);
                let bell = index + 1;
                let part = window.part(at, bytes);
                let mut partition = Partition::new(part, geometry, Schedule::new(8, 4), bell);
                partition.obey(Command::Link { up: true });
                threads.push(Thread {
                    partition,
                    rung: Arc::clone(&rungs[side]),
                    bell,
                    index: side * partitions + index,
                    asleep: false,
                    phase: Phase::Turn,
                    seen: Vec::new(),
                });
            }
        }
        Self { threads, page, geometry }
    }

    fn connect(&mut self, port: u16, partition: usize) -> [Program; 2] {
        let partitions = self.threads.len() / 2;
        let keys = [Key { own: port, peer: 80 }, Key { own: 80, peer: port }];
        [0, 1].map(|side| {
            let thread = side * partitions + partition;
            let at = "10.0.0.1:1".parse().unwrap();
            let channel = Channel::create(self.geometry.shape(), at, at).unwrap();
            channel.partition().store(u32::try_from(thread).unwrap(), Ordering::Relaxed);
            let memory = channel.mapping().descriptor().unwrap().try_clone().unwrap();
            let flags = SocketFlags::CLOEXEC;
            let (socket, fd) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                    .unwrap();
            let (id, channel) = (u64::from(port), Arc::new(channel));
            let command =
                Command::Create { key: keys[side], id, channel, socket, priority: 0, open: true };
            let place = self.threads[thread].partition.obey(command).unwrap();
            self.threads[thread].seen.resize(place + 1, 0);
            let connection =
                Connection::new(Channel::take(memory).unwrap(), Arc::clone(&self.page));
            Program { connection, fd, at: (thread, place) }
        })
    }

    /// News of a placeholder for its thread, as an edge of its epoll set.
    fn hears(&mut self, (thread, place): (usize, usize)) {
        let thread = &mut self.threads[thread];
        let Some(socket) = thread.partition.socket(place) else { return };
        let bytes = rustix::io::ioctl_fionread(socket).unwrap();
        if std::mem::replace(&mut thread.seen[place], bytes) < bytes {
            thread.partition.heard(place, false);
            thread.look();
            (thread.asleep, thread.phase) = (false, Phase::Turn);
            self.page.asleep(thread.index).store(0, Ordering::SeqCst);
        }
    }

    /// One step of a thread: what it did, or `None` while it sleeps.
    fn step(&mut self, index: usize) -> Option<usize> {
        let thread = &mut self.threads[index];
        let asleep = self.page.asleep(thread.index);
        if thread.rung.0[thread.bell].swap(false, Ordering::SeqCst) {
            (thread.asleep, thread.phase) = (false, Phase::Turn);
            asleep.store(0, Ordering::SeqCst);
        }
        if thread.asleep {
            return None;
        }
        match thread.phase {
            Phase::Turn => {
                let done = thread.partition.turn().unwrap();
                thread.look();
                if done > 0 {
                    thread.partition.wakes();
                } else {
                    thread.phase = Phase::Rest;
                }
                return Some(done);
            }
            Phase::Rest => {
                thread.phase = Phase::Look(thread.partition.rests(true));
                asleep.store(1, Ordering::SeqCst);
            }
            Phase::Look(known) => {
                thread.phase = Phase::Turn;
                if known && !thread.partition.has_work() {
                    thread.asleep = true;
                    return None;
                }
                asleep.store(0, Ordering::SeqCst);
            }
        }
        Some(0)
    }

    fn at_rest(&self) -> bool {
        self.threads
            .iter()
            .all(|thread| thread.asleep && !thread.rung.0[thread.bell].load(Ordering::SeqCst))
    }
}

impl Program {
    fn send(&self, bytes: &[u8]) -> usize {
        let piece =
            [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: our own bytes, which are only read.
        match unsafe { self.connection.send(self.fd.as_raw_fd(), &piece, flags) } {
            Ok(count) => count,
            Err(Errno(error)) => {
                assert_eq!(error, libc::EAGAIN);
                0
            }
        }
    }

    fn receive(&self, most: usize) -> usize {
        let mut bytes = vec![0; most];
        let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: most }];
        // SAFETY: our own bytes.
        match unsafe { self.connection.receive(self.fd.as_raw_fd(), &piece, libc::MSG_DONTWAIT) } {
            Ok(count) => count,
            Err(Errno(error)) => {
                assert_eq!(error, libc::EAGAIN);
                0
            }
        }
    }

    /// The kernel says of the placeholder that it is readable.
    fn rings(&self) -> bool {
        rustix::io::ioctl_fionread(&self.fd).unwrap() > 0
    }
}

/// What was sent and received, by connection and side.
type Totals = Vec<([usize; 2], [usize; 2])>;

/// What programs do: which connection, which side, what, how much.
type Step = (usize, usize, usize, usize);

/// Runs the steps, then lets all threads go on until they sleep. A program reads on only where its placeholder says
/// so. What went, and whether all sleep.
fn run(partitions: usize, slots: usize, seed: u64, loses: bool, steps: &[Step]) -> (Totals, bool) {
    let mut world = World::new(partitions, slots, seed, loses);
    let programs: Vec<[Program; 2]> =
        (0..5).map(|which| world.connect(100 + which, usize::from(which) % partitions)).collect();
    let mut totals = vec![([0_usize; 2], [0_usize; 2]); programs.len()];
    let pass = |world: &mut World, program: &Program, most: usize| {
        let count = program.receive(most);
        world.hears(program.at);
        count
    };
    for &(which, side, kind, count) in steps {
        let program = &programs[which][side];
        match kind {
            0 | 1 => {
                totals[which].0[side] += program.send(&vec![7; count]);
                world.hears(program.at);
            }
            2 => totals[which].1[side] += pass(&mut world, program, count),
            _ => {
                let index = count % world.threads.len();
                world.step(index);
            }
        }
    }
    // A reader's first look arms it; from then on it goes by the kernel's word.
    for _ in 0..5_000 {
        let mut moved = false;
        for index in 0..world.threads.len() {
            moved |= world.step(index).is_some();
        }
        for (which, pair) in programs.iter().enumerate() {
            for (side, program) in pair.iter().enumerate() {
                if program.rings() || !moved {
                    let count = pass(&mut world, program, 100_000);
                    totals[which].1[side] += count;
                    moved |= count > 0;
                }
            }
        }
        if !moved && world.at_rest() {
            break;
        }
    }
    (totals, world.at_rest())
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let count = prop_oneof![1_usize..400, 1_usize..2500];
    proptest::collection::vec((0_usize..5, 0_usize..2, 0_usize..6, count), 1..120)
}

/// Every byte came, and all threads sleep.
fn whole((totals, at_rest): &(Totals, bool)) -> bool {
    *at_rest
        && totals.iter().all(|(sent, received)| sent[0] == received[1] && sent[1] == received[0])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn threads_that_sleep_whenever_they_may_leave_nothing_under_way(
        partitions in 1_usize..4, slots in prop_oneof![Just(8_usize), Just(16), Just(64)], seed in any::<u64>(), steps in steps(),
    ) {
        let outcome = run(partitions, slots, seed, false, &steps);
        prop_assert!(whole(&outcome), "{outcome:?}");
    }
}

#[test]
fn rings_that_are_lost_are_caught_with_bytes_under_way() {
    let steps: Vec<Step> =
        (0..160).map(|step| (step % 5, step % 2, [0, 3, 3, 3][step % 4], 300 + step)).collect();
    let caught = (0..20).filter(|&seed| {
        let (totals, _) = run(2, 16, seed, true, &steps[seed as usize..]);
        totals.iter().any(|(sent, received)| sent[0] != received[1] || sent[1] != received[0])
    });
    assert!(caught.count() >= 15, "the model hears of lost doorbells");
}
