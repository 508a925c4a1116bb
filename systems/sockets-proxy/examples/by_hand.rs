//! Two programs and two proxies' partitions in one thread, which takes every step of each in turn: what a message costs
//! in work alone, with no scheduler, no second processor and no system call. `by_hand ROUNDS [BYTES]` says how long a
//! round trip takes so, and how long turns take that find nothing; under `valgrind --tool=callgrind` it is counted.
//! `by_hand ROUNDS BYTES 2` gives each host a thread and a processor of its own, still without a scheduler, and 3 gives
//! one program a processor and everything else the other; behind that the bytes of a slot, the blocks of a queue and the
//! bytes of a ring. `by_hand ROUNDS BYTES 4` has the threads of real proxies and programs that wait, four parties on two
//! processors; behind the bytes of a ring stands where the proxies' threads are: 0 anywhere, 1 beside their programs, 2
//! beside the other host's. `by_hand ROUNDS BYTES 0` has no connections: a
//! round trip through the window alone, and copies between two threads: out of private memory through shared memory into
//! private memory, as two programs at a window do, and from shared memory that the other thread wrote to shared memory
//! that it reads, as a proxy does.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use beeline_ntb::bells::Silent;
use beeline_ntb::window::Mapped;
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_os::poller::Waker;
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::channel::Channel;
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::{Command, Key, Partition};
use beeline_sockets_proxy::thread::{Mailbox, Place, start};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Bytes of each direction of the window.
const BYTES: usize = 8 << 20;
const FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

struct Program {
    connection: Connection,
    fd: OwnedFd,
}

impl Program {
    /// Sends all of it, or as much as there are blocks.
    fn send(&self, bytes: &[u8]) -> usize {
        let piece =
            [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        // SAFETY: bytes of a slice, which are only read.
        unsafe { self.connection.send(self.fd.as_raw_fd(), &piece, FLAGS) }.unwrap_or(0)
    }

    /// Receives what is there.
    fn receive(&self, bytes: &mut [u8]) -> usize {
        let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
        if !self.connection.is_readable() {
            return 0;
        }
        // SAFETY: bytes of a slice of this function's alone.
        unsafe { self.connection.receive(self.fd.as_raw_fd(), &piece, FLAGS) }.unwrap_or(0)
    }
}

fn windows() -> Outcome<[Window; 2]> {
    let mapping = Arc::new(Mapping::anonymous(2 * BYTES)?);
    Ok([(0, BYTES), (BYTES, 0)].map(|(own, other)| {
        let wire = Arc::new(Mapped::new(Arc::clone(&mapping), other, BYTES));
        let inbound = Inbound::new(Arc::clone(&mapping), own, BYTES);
        Window { inbound, outbound: Outbound::new(wire), bells: Arc::new(Silent) }
    }))
}

fn partitions(geometry: Geometry) -> Outcome<[Partition; 2]> {
    let (at, length) = geometry.partition(0);
    Ok(windows()?.map(|window| {
        let window = window.part(at, length);
        let mut partition = Partition::new(window, geometry, Schedule::new(8, 16), 1);
        partition.obey(Command::Link { up: true });
        partition
    }))
}

/// A program's end of the connection, and the command that makes it at the partition.
fn connection(geometry: Geometry, page: &Arc<Page>, side: usize) -> Outcome<(Program, Command)> {
    let ports = [4000, 80];
    let key = Key { own: ports[side], peer: ports[1 - side] };
    let at = "10.0.0.1:1".parse()?;
    let channel = Channel::create(geometry.shape(), at, at)?;
    let memory = channel.mapping().descriptor().ok_or("no descriptor")?.try_clone()?;
    let (socket, fd) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let channel = Arc::new(channel);
    let create = Command::Create { key, id: 1, channel, socket, priority: 0, open: true };
    let connection = Connection::new(Channel::take(memory)?, Arc::clone(page));
    Ok((Program { connection, fd }, create))
}

fn connect(geometry: Geometry, partitions: &mut [Partition; 2]) -> Outcome<[Program; 2]> {
    let page = Arc::new(Page::create()?);
    let mut program = |side: usize| -> Outcome<Program> {
        let (program, create) = connection(geometry, &page, side)?;
        partitions[side].obey(create).ok_or("no connection")?;
        Ok(program)
    };
    Ok([program(0)?, program(1)?])
}

/// One host: a program and the partition that carries its connection, both in one thread's hands.
struct Host {
    program: Program,
    partition: Partition,
}

impl Host {
    /// Sends `bytes`, with turns of the partition while there is no room.
    fn send(&mut self, bytes: &[u8]) -> Outcome<()> {
        let mut out = self.program.send(bytes);
        self.partition.turn()?;
        while out < bytes.len() {
            out += self.program.send(&bytes[out..]);
            self.partition.turn()?;
        }
        Ok(())
    }

    /// Receives until `bytes` are full.
    fn receive(&mut self, bytes: &mut [u8]) -> Outcome<()> {
        let mut back = self.program.receive(bytes);
        while back < bytes.len() {
            self.partition.turn()?;
            back += self.program.receive(&mut bytes[back..]);
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn each(begun: Instant, rounds: u64) -> f64 {
    begun.elapsed().as_secs_f64() * 1e9 / rounds as f64
}

/// Nanoseconds of a round trip whose every step one thread takes, and of a turn that finds nothing.
fn in_one_thread(hosts: &mut [Host; 2], rounds: u64, size: usize) -> Outcome<[f64; 2]> {
    let (sent, mut got) = (vec![7; size], vec![0; size]);
    let begun = Instant::now();
    for _ in 0..rounds {
        for (from, to) in [(0, 1), (1, 0)] {
            let (mut out, mut back) = (0, 0);
            while back < size {
                if out < size {
                    out += hosts[from].program.send(&sent[out..]);
                }
                hosts[from].partition.turn()?;
                hosts[to].partition.turn()?;
                back += hosts[to].program.receive(&mut got[back..]);
            }
        }
    }
    let trip = each(begun, rounds);
    let begun = Instant::now();
    for _ in 0..rounds {
        hosts[0].partition.turn()?;
    }
    Ok([trip, each(begun, rounds)])
}

/// Nanoseconds of a round trip, and of a send of a stream, where each host is a thread with a processor of its own.
fn in_two_threads(hosts: [Host; 2], rounds: u64, size: usize) -> Outcome<[f64; 2]> {
    let [mut near, mut far] = hosts;
    let fails = |error: Box<dyn std::error::Error>| error.to_string();
    let echo = std::thread::spawn(move || -> Result<(), String> {
        beeline_os::affinity::pin_current_thread(1).map_err(|error| error.to_string())?;
        let mut bytes = vec![0; size];
        for _ in 0..rounds {
            far.receive(&mut bytes).map_err(fails)?;
            far.send(&bytes).map_err(fails)?;
        }
        for _ in 0..rounds {
            far.receive(&mut bytes).map_err(fails)?;
        }
        far.send(&[1]).map_err(fails)
    });
    beeline_os::affinity::pin_current_thread(0)?;
    let mut bytes = vec![7; size];
    let begun = Instant::now();
    for _ in 0..rounds {
        near.send(&bytes)?;
        near.receive(&mut bytes)?;
    }
    let trip = each(begun, rounds);
    let begun = Instant::now();
    for _ in 0..rounds {
        near.send(&bytes)?;
    }
    near.receive(&mut [0])?;
    let send = each(begun, rounds);
    echo.join().map_err(|_| "the other thread panicked")??;
    Ok([trip, send])
}

/// Nanoseconds of a round trip where one program has a thread and a processor of its own, and everything else has the
/// other: what its queues hand over, and nothing that the window does.
fn with_a_program_apart(hosts: [Host; 2], rounds: u64, size: usize) -> Outcome<f64> {
    let [Host { program, partition: mut near }, mut far] = hosts;
    let fails = |error: Box<dyn std::error::Error>| error.to_string();
    let rest = std::thread::spawn(move || -> Result<(), String> {
        beeline_os::affinity::pin_current_thread(1).map_err(|error| error.to_string())?;
        let mut bytes = vec![0; size];
        for _ in 0..rounds {
            let mut back = 0;
            while back < size {
                near.turn().map_err(|error| fails(error.into()))?;
                far.partition.turn().map_err(|error| fails(error.into()))?;
                back += far.program.receive(&mut bytes[back..]);
            }
            far.send(&bytes).map_err(fails)?;
            near.turn().map_err(|error| fails(error.into()))?;
        }
        Ok(())
    });
    beeline_os::affinity::pin_current_thread(0)?;
    let mut bytes = vec![7; size];
    let begun = Instant::now();
    for _ in 0..rounds {
        let mut out = 0;
        while out < size {
            out += program.send(&bytes[out..]);
        }
        let mut back = 0;
        while back < size {
            back += program.receive(&mut bytes[back..]);
        }
    }
    let trip = each(begun, rounds);
    rest.join().map_err(|_| "the other thread panicked")??;
    Ok(trip)
}

/// Nanoseconds of a round trip, and of a send of a stream, of four parties on two processors: both programs with a
/// processor each, in calls that wait, and the partitions' threads of a proxy on `cores`.
fn with_a_scheduler(
    geometry: Geometry,
    cores: [Option<usize>; 2],
    rounds: u64,
    size: usize,
) -> Outcome<[f64; 2]> {
    let page = Arc::new(Page::create()?);
    let mut threads = Vec::new();
    let mut programs = Vec::new();
    for (side, (window, core)) in windows()?.into_iter().zip(cores).enumerate() {
        let (at, length) = geometry.partition(0);
        let window = window.part(at, length);
        let mut partition = Partition::new(window.clone(), geometry, Schedule::new(8, 16), 1);
        partition.obey(Command::Link { up: true });
        let place = Place { link: 0, partition: side };
        let notices = Arc::new(Mailbox::new(Arc::new(Waker::new()?)));
        let running = start(
            (partition, None),
            window,
            1,
            place,
            Arc::clone(&page),
            side,
            notices,
            (None, [core, None]),
        )?;
        let (program, create) = connection(geometry, &page, side)?;
        program.connection.channel.partition().store(u32::try_from(side)?, Ordering::SeqCst);
        running.commands.put(create);
        threads.push(running);
        programs.push(program);
    }
    let [near, far] = <[Program; 2]>::try_from(programs).map_err(|_| "two programs")?;
    let receive = |program: &Program, bytes: &mut [u8]| -> Result<(), String> {
        let mut back = 0;
        while back < bytes.len() {
            let rest = &mut bytes[back..];
            let piece = [libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() }];
            // SAFETY: bytes of a slice of the caller's alone.
            let got = unsafe { program.connection.receive(program.fd.as_raw_fd(), &piece, 0) };
            match got {
                Ok(0) => return Err("the connection ended".to_owned()),
                Ok(count) => back += count,
                Err(error) => return Err(format!("receiving: {error:?}")),
            }
        }
        Ok(())
    };
    let send = |program: &Program, bytes: &[u8]| -> Result<(), String> {
        let piece =
            [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        // SAFETY: bytes of a slice, which are only read.
        let sent = unsafe { program.connection.send(program.fd.as_raw_fd(), &piece, 0) };
        sent.map(drop).map_err(|error| format!("sending: {error:?}"))
    };
    let echo = std::thread::spawn(move || -> Result<(), String> {
        let _ = beeline_os::affinity::pin_current_thread(1);
        let mut bytes = vec![0; size];
        for _ in 0..rounds {
            receive(&far, &mut bytes)?;
            send(&far, &bytes)?;
        }
        for _ in 0..rounds {
            receive(&far, &mut bytes)?;
        }
        send(&far, &[1])?;
        // Open until the other end has read it.
        receive(&far, &mut [0])
    });
    beeline_os::affinity::pin_current_thread(0)?;
    let mut bytes = vec![7; size];
    let begun = Instant::now();
    for _ in 0..rounds {
        send(&near, &bytes)?;
        receive(&near, &mut bytes)?;
    }
    let trip = each(begun, rounds);
    let begun = Instant::now();
    for _ in 0..rounds {
        send(&near, &bytes)?;
    }
    receive(&near, &mut [0])?;
    let sent = each(begun, rounds);
    send(&near, &[1])?;
    echo.join().map_err(|_| "the other thread panicked")??;
    Ok([trip, sent])
}

/// Nanoseconds of a round trip through the window alone, between two threads that spin.
fn bare(rounds: u64, size: usize) -> Outcome<f64> {
    let [near, far] = windows()?;
    let post = |window: &Window, bytes: &[u8], round: u64| {
        window.outbound.post_bytes(64, bytes);
        window.outbound.fence();
        window.outbound.post_word(0, round);
        window.outbound.fence();
    };
    let take = |window: &Window, bytes: &mut [u8], round: u64| {
        while window.inbound.word(0).load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
        window.inbound.read(64, bytes);
    };
    let echo = std::thread::spawn(move || {
        let _ = beeline_os::affinity::pin_current_thread(1);
        let mut bytes = vec![0; size];
        for round in 1..=rounds {
            take(&far, &mut bytes, round);
            post(&far, &bytes, round);
        }
    });
    beeline_os::affinity::pin_current_thread(0)?;
    let mut bytes = vec![7; size];
    let begun = Instant::now();
    for round in 1..=rounds {
        post(&near, &bytes, round);
        take(&near, &mut bytes, round);
    }
    let trip = each(begun, rounds);
    echo.join().map_err(|_| "the other thread panicked")?;
    Ok(trip)
}

/// Pieces under way between two threads that copy.
const PIECES: usize = 64;

/// Memory of pieces, each behind a line with the number of the round in which it was written.
struct Shared {
    memory: Mapping,
    piece: usize,
}

impl Shared {
    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: a piece's line lies in the mapping, aligned to 64; atomics only.
        let word = unsafe { self.memory.base().add(index % PIECES * (self.piece + 64)) };
        // SAFETY: as above; mapped while `self` lives.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    fn bytes(&self, index: usize) -> *mut u8 {
        // SAFETY: the piece lies behind its line, in the mapping.
        unsafe { self.memory.base().add(index % PIECES * (self.piece + 64) + 64).as_ptr() }
    }

    /// Waits until the piece was written in this round, or its place is free again.
    fn wait(&self, index: usize, value: u64) {
        while self.word(index).load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
    }
}

/// Nanoseconds of a piece that goes from one thread's private memory to the other's, and of a piece that a thread copies
/// from one shared memory to another, where the other thread does the same the other way round.
fn copies(rounds: u64, size: usize) -> Outcome<[f64; 2]> {
    let shared = || -> Outcome<Shared> {
        Ok(Shared { memory: Mapping::anonymous(PIECES * (size + 64))?, piece: size })
    };
    let both = [shared()?, shared()?];
    let total = usize::try_from(rounds)? / PIECES * PIECES;
    let lap = |index: usize| (index / PIECES) as u64;
    let mut figures = [0.0; 2];
    for (figure, private) in figures.iter_mut().zip([true, false]) {
        for index in 0..PIECES {
            for half in &both {
                half.word(index).store(0, Ordering::SeqCst);
            }
        }
        let run = |side: usize| {
            let (own, other) = (&both[side], &both[1 - side]);
            let mut buffer = vec![7_u8; size];
            for index in 0..total {
                // A word is odd once its piece is written, and even once it is read.
                let (free, full) = (2 * lap(index), 2 * lap(index) + 1);
                let writes = !private || side == 0;
                let source = if private { &both[0] } else { other };
                if side == 1 || !private && index >= PIECES {
                    let expected = if private || side == 1 { full } else { full - 2 };
                    source.wait(index, expected);
                }
                if writes {
                    own.wait(index, free);
                }
                let buffer = buffer.as_mut_ptr().cast_const();
                let (from, to) = match (private, side) {
                    (true, 0) => (buffer, own.bytes(index)),
                    (true, _) => (source.bytes(index).cast_const(), buffer.cast_mut()),
                    (false, _) => (source.bytes(index).cast_const(), own.bytes(index)),
                };
                // SAFETY: pieces of this size that do not overlap; the words say whose they are.
                unsafe { std::ptr::copy_nonoverlapping(from, to, size) };
                if writes {
                    own.word(index).store(full, Ordering::Release);
                }
                if side == 1 || !private && index >= PIECES {
                    let value = if private || side == 1 { free + 2 } else { free };
                    source.word(index).store(value, Ordering::Release);
                }
            }
        };
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for side in 0..2 {
                let run = &run;
                scope.spawn(move || {
                    let _ = beeline_os::affinity::pin_current_thread(side);
                    run(side);
                });
            }
        });
        *figure = each(begun, total as u64);
    }
    Ok(figures)
}

fn hosts(geometry: Geometry) -> Outcome<[Host; 2]> {
    let mut partitions = partitions(geometry)?;
    let [near, far] = connect(geometry, &mut partitions)?;
    let [one, other] = partitions;
    Ok([Host { program: near, partition: one }, Host { program: far, partition: other }])
}

fn main() -> Outcome<()> {
    let words: Vec<usize> =
        std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let word = |index: usize, otherwise: usize| words.get(index).copied().unwrap_or(otherwise);
    let (rounds, size, threads) = (word(0, 1000) as u64, word(1, 8), word(2, 1));
    let (slot, blocks, ring) = (word(3, 4096), word(4, 256), word(5, 2 << 20));
    let geometry = Geometry::dividing(BYTES, 1, slot, blocks)?.with_rings_of(ring)?;
    let said = if threads == 0 {
        let trip = bare(rounds, size)?;
        let [private, shared] = copies(rounds, size)?;
        format!(
            "{size} B round trip through the window alone {trip:.0} ns, a piece copied through shared memory \
             {private:.0} ns, from one shared memory to another {shared:.0} ns"
        )
    } else if threads == 1 {
        let [trip, empty] = in_one_thread(&mut hosts(geometry)?, rounds, size)?;
        format!(
            "{size} B round trip in one thread {trip:.0} ns, a turn that finds nothing {empty:.0} ns"
        )
    } else if threads == 3 {
        let trip = with_a_program_apart(hosts(geometry)?, rounds, size)?;
        format!("{size} B round trip with one program apart {trip:.0} ns")
    } else if threads == 4 {
        let (how, cores) = match word(6, 0) {
            0 => ("wherever the kernel has them", [None, None]),
            1 => ("beside their programs", [Some(0), Some(1)]),
            _ => ("beside the other host's programs", [Some(1), Some(0)]),
        };
        let [trip, send] = with_a_scheduler(geometry, cores, rounds, size)?;
        format!(
            "{size} B round trip of four parties, partitions {how}: {trip:.0} ns, a send {send:.0} ns"
        )
    } else {
        let [trip, send] = in_two_threads(hosts(geometry)?, rounds, size)?;
        #[expect(clippy::cast_precision_loss, reason = "a few bytes")]
        let rate = size as f64 / send;
        format!(
            "{size} B round trip in two threads {trip:.0} ns, a send {send:.0} ns, {rate:.2} GB/s"
        )
    };
    #[expect(clippy::print_stdout, reason = "the result")]
    {
        println!("{said}");
    }
    Ok(())
}
