//! Connections over real kernel sockets, both ends in this process, without the preload library.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_sockets::connection::{Connection, shutdown};
use beeline_sockets::kernel::Errno;
use beeline_sockets::segment::{CLOSED_CLEANLY, Segment};
use beeline_sockets::{poll, receive, send};
use common::{mapped_twice, sleeps};

struct End {
    stream: TcpStream,
    connection: Connection,
}

fn piece(bytes: *const u8, length: usize) -> [libc::iovec; 1] {
    [libc::iovec { iov_base: bytes.cast_mut().cast(), iov_len: length }]
}

impl End {
    fn send(&self, bytes: &[u8], flags: i32) -> Result<usize, Errno> {
        let pieces = piece(bytes.as_ptr(), bytes.len());
        unsafe { send::send(self.stream.as_raw_fd(), &self.connection, &pieces, flags) }
    }

    fn receive(&self, room: usize, flags: i32) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; room];
        let pieces = piece(bytes.as_mut_ptr(), room);
        let fd = self.stream.as_raw_fd();
        let count = unsafe { receive::receive(fd, &self.connection, &pieces, flags) }?;
        bytes.truncate(count);
        Ok(bytes)
    }

    fn readiness(&self) -> i16 {
        poll::readiness(&self.connection)
    }
}

/// A connection, and what makes its second end once `join` is called.
struct Pair {
    first: End,
    other_stream: TcpStream,
    other_segment: Segment,
}

fn half_pair() -> Pair {
    let [one, other] = mapped_twice(64 << 10);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other_stream = listener.accept().unwrap().0;
    let fd = stream.as_raw_fd();
    let connection = Connection::new(Segment::take(one, 0).unwrap(), fd);
    assert!(connection.join());
    let other_segment = Segment::take(other, 1).unwrap();
    Pair { first: End { stream, connection }, other_stream, other_segment }
}

impl Pair {
    fn join(self) -> (End, End) {
        let connection = Connection::new(self.other_segment, self.other_stream.as_raw_fd());
        assert!(connection.join());
        (self.first, End { stream: self.other_stream, connection })
    }
}

const NOW: i32 = libc::MSG_DONTWAIT;

#[test]
fn bytes_cross_both_ways_without_the_kernel() {
    let (one, other) = half_pair().join();
    assert_eq!(one.send(b"question", 0), Ok(8));
    assert_eq!(other.receive(100, 0).unwrap(), b"question");
    assert_eq!(other.send(b"answer", 0), Ok(6));
    assert_eq!(one.receive(3, 0).unwrap(), b"ans");
    assert_eq!(one.receive(100, libc::MSG_PEEK).unwrap(), b"wer");
    assert_eq!(one.receive(100, 0).unwrap(), b"wer");
    assert_eq!(one.receive(100, NOW), Err(Errno(libc::EAGAIN)));
    // Nobody slept, so the kernel's stream carried nothing.
    other.stream.set_nonblocking(true).unwrap();
    let nothing = (&other.stream).read(&mut [0; 8]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn what_was_sent_before_the_other_end_came_is_read_first() {
    let pair = half_pair();
    assert_eq!(pair.first.send(b"early ", 0), Ok(6));
    let (one, other) = pair.join();
    assert_eq!(one.send(b"late", 0), Ok(4));
    assert_eq!(other.receive(2, 0).unwrap(), b"ea");
    assert_eq!(other.receive(100, libc::MSG_WAITALL | NOW).unwrap(), b"rly late");
}

#[test]
fn a_plain_peer_is_served_by_the_kernel_until_patience_ends() {
    let pair = half_pair();
    let mut plain = pair.other_stream;
    for round in (0..=255_u8).cycle().take(600) {
        assert_eq!(pair.first.send(&[round], 0), Ok(1));
        let mut byte = [0];
        plain.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [round]);
        plain.write_all(&[round, round]).unwrap();
        assert_eq!(pair.first.receive(10, 0).unwrap(), [round, round]);
    }
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(pair.first.send(b"x", 0), Ok(1));
    // Too late for the other end now.
    let late = Connection::new(pair.other_segment, plain.as_raw_fd());
    assert!(!late.join());
}

#[test]
fn a_sleeping_reader_is_woken_each_time() {
    let (one, other) = half_pair().join();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..300_u32 {
                // Now in the middle of a spin, now after it.
                std::thread::sleep(Duration::from_micros(u64::from(round % 13) * 20));
                one.send(&round.to_le_bytes(), 0).unwrap();
                let answer = one.receive(4, libc::MSG_WAITALL).unwrap();
                assert_eq!(answer, round.to_le_bytes());
            }
        });
        for round in 0..300_u32 {
            let asked = other.receive(4, libc::MSG_WAITALL).unwrap();
            assert_eq!(asked, round.to_le_bytes());
            std::thread::sleep(Duration::from_micros(u64::from(round % 7) * 30));
            other.send(&asked, 0).unwrap();
        }
    });
}

#[test]
fn a_writer_that_found_no_room_goes_on_when_there_is_some() {
    const TOTAL: usize = 8 << 20;
    let (one, other) = half_pair().join();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let bytes: Vec<u8> = (0..TOTAL).map(|i| (i % 251) as u8).collect();
            assert_eq!(one.send(&bytes, 0), Ok(TOTAL));
        });
        let mut read = 0;
        while read < TOTAL {
            if read % 7 == 0 {
                std::thread::sleep(Duration::from_micros(300));
            }
            let bytes = other.receive(60_000, 0).unwrap();
            assert!(bytes.iter().enumerate().all(|(i, b)| *b == ((read + i) % 251) as u8));
            read += bytes.len();
        }
    });
}

#[test]
fn a_full_ring_is_would_block_and_readiness_follows_the_reader() {
    let (one, other) = half_pair().join();
    assert_eq!(one.send(b"x", 0), Ok(1));
    assert_ne!(one.readiness() & libc::POLLOUT, 0);
    let mut sent = 1;
    loop {
        match one.send(&[7; 5000], NOW) {
            Ok(count) => sent += count,
            Err(error) => {
                assert_eq!(error, Errno(libc::EAGAIN));
                break;
            }
        }
    }
    assert!(sent > 60_000, "only {sent} bytes fitted");
    assert_eq!(one.readiness() & libc::POLLOUT, 0);
    assert_ne!(other.readiness() & libc::POLLIN, 0);
    let mut read = 0;
    while let Ok(bytes) = other.receive(4096, NOW) {
        read += bytes.len();
    }
    assert_eq!(read, sent);
    assert_ne!(one.readiness() & libc::POLLOUT, 0);
    assert_eq!(other.readiness() & libc::POLLIN, 0);
}

#[test]
fn a_doorbell_from_an_end_that_never_sent_is_no_byte() {
    let (one, other) = half_pair().join();
    one.send(b"x", 0).unwrap();
    // Who waits for room is woken by who reads, and that end has not switched yet.
    one.connection.segment.own().signs.send_armed.store(1, Ordering::SeqCst);
    assert_eq!(other.receive(10, 0).unwrap(), b"x");
    assert_eq!(one.connection.segment.own().signs.send_armed.load(Ordering::SeqCst), 0);
    assert_eq!(one.receive(10, NOW), Err(Errno(libc::EAGAIN)));
    other.send(b"y", 0).unwrap();
    assert_eq!(one.receive(10, NOW).unwrap(), b"y");
}

#[test]
fn a_half_close_ends_one_direction_and_leaves_the_other() {
    let (one, other) = half_pair().join();
    one.send(b"all of it", 0).unwrap();
    shutdown(one.stream.as_raw_fd(), &one.connection, libc::SHUT_WR).unwrap();
    assert_eq!(other.receive(100, 0).unwrap(), b"all of it");
    assert_eq!(other.receive(100, 0).unwrap(), b"");
    assert_ne!(other.readiness() & libc::POLLRDHUP, 0);
    assert_eq!(other.send(b"noted", 0), Ok(5));
    assert_eq!(one.receive(100, 0).unwrap(), b"noted");
    assert_eq!(one.send(b"more", libc::MSG_NOSIGNAL), Err(Errno(libc::EPIPE)));
}

#[test]
fn a_receive_of_no_bytes_ends_whatever_stands_there() {
    let (one, other) = half_pair().join();
    for flags in [0, libc::MSG_PEEK, NOW] {
        assert_eq!(other.receive(0, flags).unwrap(), b"");
    }
    one.send(b"bytes", 0).unwrap();
    assert_eq!(other.receive(0, 0).unwrap(), b"");
    // Also before an end that lies behind them.
    shutdown(one.stream.as_raw_fd(), &one.connection, libc::SHUT_WR).unwrap();
    for flags in [0, libc::MSG_PEEK, libc::MSG_WAITALL, NOW] {
        assert_eq!(other.receive(0, flags).unwrap(), b"");
    }
    assert_eq!(other.receive(10, 0).unwrap(), b"bytes");
    assert_eq!(other.receive(10, 0).unwrap(), b"");
}

#[test]
fn a_peer_that_vanishes_ends_the_stream_after_its_last_byte() {
    let (one, other) = half_pair().join();
    one.send(b"last words", 0).unwrap();
    // As when its process is killed: the kernel closes, nobody writes a sign.
    drop(one.stream);
    assert_eq!(other.receive(100, 0).unwrap(), b"last words");
    assert_eq!(other.receive(100, 0).unwrap(), b"");
    // Into the void once, as with the kernel; then the kernel says so.
    let _ = other.send(b"anyone?", libc::MSG_NOSIGNAL);
    let error = (0..100).find_map(|_| other.send(b"anyone?", libc::MSG_NOSIGNAL).err());
    assert!(matches!(error, Some(Errno(libc::EPIPE | libc::ECONNRESET))), "{error:?}");
}

#[test]
fn an_end_behind_doorbells_is_heard_by_who_may_swallow_them_and_by_who_may_not() {
    for watchers in [0, 1] {
        let (one, other) = half_pair().join();
        let own = other.connection.segment.own();
        own.sharing.watchers.store(watchers, Ordering::SeqCst);
        own.signs.receive_armed.store(1, Ordering::SeqCst);
        one.send(b"last words", 0).unwrap();
        assert_eq!(own.signs.receive_armed.load(Ordering::SeqCst), 0);
        drop(one.stream);
        let heard = other.connection.listen(other.stream.as_raw_fd(), 0);
        assert_eq!(heard, beeline_sockets::connection::Heard::End, "{watchers}");
        assert_eq!(other.receive(100, 0).unwrap(), b"last words");
        assert_eq!(other.receive(100, 0).unwrap(), b"");
    }
}

#[test]
fn a_reset_after_an_orderly_close_is_an_end() {
    let (one, other) = half_pair().join();
    other.send(b"x", 0).unwrap();
    other.connection.segment.own().signs.closed.store(CLOSED_CLEANLY, Ordering::Release);
    assert_eq!(
        one.connection.heard_error(libc::ECONNRESET),
        beeline_sockets::connection::Heard::End
    );
    assert_eq!(one.receive(1, NOW).unwrap(), b"x");
    assert_eq!(one.receive(1, NOW).unwrap(), b"");
}

#[test]
fn a_process_that_ends_with_a_doorbell_unread_is_an_end_and_with_bytes_unread_a_reset() {
    for reads in [true, false] {
        let (one, other) = half_pair().join();
        one.send(b"there", 0).unwrap();
        assert_eq!(other.receive(10, 0).unwrap(), b"there");
        // It armed, and found what it was waiting for by itself.
        other.connection.segment.own().signs.receive_armed.store(1, Ordering::SeqCst);
        one.send(b"more", 0).unwrap();
        if reads {
            assert_eq!(other.receive(10, 0).unwrap(), b"more");
        }
        drop(other.stream);
        let heard = (0..1000).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            match one.receive(10, NOW) {
                Err(Errno(libc::EAGAIN)) => None,
                told => Some(told),
            }
        });
        let told = if reads { Ok(vec![]) } else { Err(Errno(libc::ECONNRESET)) };
        assert_eq!(heard, Some(told), "{reads}");
    }
}

#[test]
fn a_receive_time_out_is_the_kernels() {
    let (_one, other) = half_pair().join();
    other.stream.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    let before = sleeps();
    assert_eq!(other.receive(1, 0), Err(Errno(libc::EAGAIN)));
    assert!(sleeps() > before, "it waited");
}

#[test]
fn bytes_from_before_the_switch_that_are_on_their_way_are_waited_for_in_the_kernel() {
    let Pair { first: one, other_stream, other_segment } = half_pair();
    // As between hosts, where the sign goes another way than the bytes.
    other_segment.own().signs.switched_at.store(4, Ordering::Release);
    one.stream.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    std::thread::scope(|scope| {
        let (receiving, began) = (scope.spawn(|| one.receive(3, 0)), Instant::now());
        while !receiving.is_finished() && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        (&other_stream).write_all(b"abc").unwrap();
        assert_eq!(receiving.join().unwrap(), Err(Errno(libc::EAGAIN)));
    });
    assert_eq!(one.receive(3, 0).unwrap(), b"abc");
}

/// Sends that fit the ring, and sends that wait for room in it several times.
#[test]
fn what_a_sender_writes_into_its_buffer_behind_a_send_is_not_what_is_read() {
    const ROUNDS: usize = 20;
    let (one, other) = half_pair().join();
    for size in [1, 100, 4096, 40_000, 200_000] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut bytes = vec![0; size];
                for round in 0..ROUNDS {
                    bytes.fill(u8::try_from(round + 1).unwrap());
                    assert_eq!(one.send(&bytes, 0), Ok(size));
                    bytes.fill(0);
                }
            });
            for round in 0..ROUNDS {
                let bytes = other.receive(size, libc::MSG_WAITALL).unwrap();
                let expected = u8::try_from(round + 1).unwrap();
                assert!(bytes == vec![expected; size], "{size} bytes, round {round}");
            }
        });
    }
}

#[test]
fn threads_that_share_an_end_lose_nothing() {
    const EACH: usize = 20_000;
    let (one, other) = half_pair().join();
    let (one, other) = (&one, &other);
    let total: usize = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4_u8)
            .map(|writer| {
                scope.spawn(move || {
                    for _ in 0..EACH {
                        assert_eq!(one.send(&[writer; 3], 0), Ok(3));
                    }
                })
            })
            .collect();
        let readers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(move || {
                    let mut read = 0;
                    loop {
                        let bytes = other.receive(3000, 0).unwrap();
                        if bytes.is_empty() {
                            return read;
                        }
                        read += bytes.len();
                    }
                })
            })
            .collect();
        // The end is told once all was written: it has been read or is in the ring.
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        shutdown(one.stream.as_raw_fd(), &one.connection, libc::SHUT_WR).unwrap();
        readers.into_iter().map(|reader| reader.join().unwrap()).sum()
    });
    assert_eq!(total, 4 * EACH * 3);
}

#[test]
fn an_end_that_only_sends_notices_soon_that_the_other_is_gone() {
    for other_sent_before in [true, false] {
        let (one, other) = half_pair().join();
        assert_eq!(one.send(b"x", 0), Ok(1));
        if other_sent_before {
            other.send(b"y", 0).unwrap();
        }
        assert_eq!(other.receive(1, 0).unwrap(), b"x");
        // As when its process is killed.
        drop(other.stream);
        // Far less than the ring would take.
        let error = (0..200).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            one.send(b"anyone?", libc::MSG_NOSIGNAL).err()
        });
        let gone = matches!(error, Some(Errno(libc::EPIPE | libc::ECONNRESET)));
        assert!(gone, "{other_sent_before}: {error:?}");
    }
}

#[test]
fn a_send_that_waits_for_a_reader_who_is_gone_ends() {
    let (one, other) = half_pair().join();
    std::thread::scope(|scope| {
        // The other end never sent, nor rang: it has not left the kernel's stream.
        let sending = scope.spawn(|| one.send(&[7; 300_000], libc::MSG_NOSIGNAL));
        std::thread::sleep(Duration::from_millis(30));
        drop(other.stream);
        let outcome = sending.join().unwrap();
        let ended = outcome.is_ok_and(|sent| sent < 300_000)
            || matches!(outcome, Err(Errno(libc::EPIPE | libc::ECONNRESET)));
        assert!(ended, "{outcome:?}");
    });
}

#[test]
fn a_shut_side_of_an_end_that_never_switched_is_not_taken_for_its_death() {
    let (one, other) = half_pair().join();
    one.send(b"x", 0).unwrap();
    // Through the kernel, since it has sent nothing yet.
    shutdown(other.stream.as_raw_fd(), &other.connection, libc::SHUT_WR).unwrap();
    for _ in 0..30 {
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(one.send(b"still there?", libc::MSG_NOSIGNAL), Ok(12));
    }
    assert_eq!(one.receive(9, 0).unwrap(), b"");
    assert_eq!(one.send(b"!", libc::MSG_NOSIGNAL), Ok(1));
    assert_eq!(other.receive(1000, 0).unwrap().len(), 1 + 30 * 12 + 1);
}

extern "C" fn heard(_signal: libc::c_int) {}

fn handle(signal: libc::c_int, flags: libc::c_int) {
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = heard as *const () as usize;
    action.sa_flags = flags;
    assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
}

#[test]
fn a_blocked_send_is_interrupted_unless_the_handler_asks_for_a_restart() {
    for (signal, flags) in [(libc::SIGUSR1, 0), (libc::SIGUSR2, libc::SA_RESTART)] {
        handle(signal, flags);
        // Who has sent nothing has not left the kernel's stream, and is waited for by the clock.
        [true, false].into_iter().for_each(|rings| interrupted(signal, flags == 0, rings));
    }
}

fn interrupted(signal: libc::c_int, ends: bool, rings: bool) {
    let (one, other) = half_pair().join();
    if rings {
        other.send(b"y", 0).unwrap();
    }
    while one.send(&[1; 1000], NOW).is_ok() {}
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            tell.send(unsafe { libc::pthread_self() }).unwrap();
            one.send(&[2; 100], 0)
        });
        let (thread, began) = (told.recv().unwrap(), Instant::now());
        let mut signals = 0;
        // Until one meets it in the call, which may begin late on a busy machine.
        while signals < 20 || ends && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
            unsafe { libc::pthread_kill(thread, signal) };
            signals += 1;
            if sending.is_finished() {
                break;
            }
        }
        let by_signal = sending.is_finished();
        while !sending.is_finished() {
            let _ = other.receive(60_000, NOW);
        }
        let told = if ends { Err(Errno(libc::EINTR)) } else { Ok(100) };
        assert_eq!((by_signal, sending.join().unwrap()), (ends, told), "rings: {rings}");
    });
}

#[test]
fn an_address_where_no_program_has_memory_is_refused() {
    let (one, other) = half_pair().join();
    one.send(b"x", 0).unwrap();
    let bad = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 5 }];
    let fds = [one.stream.as_raw_fd(), other.stream.as_raw_fd()];
    let sent = unsafe { send::send(fds[0], &one.connection, &bad, 0) };
    let received = unsafe { receive::receive(fds[1], &other.connection, &bad, NOW) };
    assert_eq!((sent, received), (Err(Errno(libc::EFAULT)), Err(Errno(libc::EFAULT))));
    assert_eq!(other.receive(9, 0).unwrap(), b"x");
}
