//! The same operations on a kernel connection and on an accelerated one: returns, errors, bytes
//! and readiness are the same.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

mod common;

use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use beeline_sockets::connection;
use beeline_sockets::kernel::{self, Errno};
use beeline_sockets::{poll, receive, send, table};
use common::{accelerated, begin, pair, piece};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Send { side: usize, length: usize },
    Receive { side: usize, room: usize, peek: bool },
    Shutdown { side: usize, how: i32 },
    Poll { side: usize },
    Waiting { side: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let side = 0..2_usize;
    prop_oneof![
        6 => (side.clone(), 1..2000_usize).prop_map(|(side, length)| Step::Send { side, length }),
        6 => (side.clone(), 1..3000_usize, any::<bool>())
            .prop_map(|(side, room, peek)| Step::Receive { side, room, peek }),
        4 => side.clone().prop_map(|side| Step::Poll { side }),
        2 => side.clone().prop_map(|side| Step::Waiting { side }),
        1 => (side, 0..3_i32).prop_map(|(side, how)| Step::Shutdown { side, how }),
    ]
}

/// What a step yields: a number and, of a receive, its bytes.
type Seen = (Result<usize, Errno>, Vec<u8>);

const WANTED: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
const QUIET: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

fn bytes_of(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|i| (seed * 31 + i) as u8).collect()
}

fn on_kernel(fd: RawFd, step: &Step, seed: usize) -> Seen {
    match *step {
        Step::Send { length, .. } => (kernel::send(fd, &bytes_of(seed, length), QUIET), Vec::new()),
        Step::Receive { room, peek, .. } => {
            let mut bytes = vec![0; room];
            let peek = if peek { libc::MSG_PEEK } else { 0 };
            let count = kernel::receive(fd, &mut bytes, QUIET | peek);
            bytes.truncate(count.unwrap_or(0));
            (count, bytes)
        }
        Step::Shutdown { how, .. } => (kernel::shutdown(fd, how), Vec::new()),
        Step::Poll { .. } => {
            (kernel::poll_one(fd, WANTED, 0).map(|bits| bits as usize), Vec::new())
        }
        Step::Waiting { .. } => {
            let mut count = 0_i32;
            let outcome = unsafe { libc::ioctl(fd, libc::FIONREAD, &raw mut count) };
            assert_eq!(outcome, 0);
            (Ok(count as usize), Vec::new())
        }
    }
}

fn on_ours(fd: RawFd, step: &Step, seed: usize) -> Seen {
    let connection = table::ours(fd).unwrap();
    match *step {
        Step::Send { length, .. } => {
            let mut bytes = bytes_of(seed, length);
            let pieces = piece(bytes.as_mut_ptr(), length);
            (unsafe { send::send(fd, connection, &pieces, QUIET) }, Vec::new())
        }
        Step::Receive { room, peek, .. } => {
            let mut bytes = vec![0; room];
            let pieces = piece(bytes.as_mut_ptr(), room);
            let peek = if peek { libc::MSG_PEEK } else { 0 };
            let count = unsafe { receive::receive(fd, connection, &pieces, QUIET | peek) };
            bytes.truncate(count.unwrap_or(0));
            (count, bytes)
        }
        Step::Shutdown { how, .. } => (connection::shutdown(fd, connection, how), Vec::new()),
        Step::Poll { .. } => {
            let mut entries = [libc::pollfd { fd, events: WANTED, revents: 0 }];
            let outcome = poll::poll(&mut entries, Some(Duration::ZERO), None);
            (outcome.unwrap().map(|_| entries[0].revents as usize), Vec::new())
        }
        Step::Waiting { .. } => {
            let waiting = if connection.kernel_bytes_left().is_some() {
                0
            } else {
                connection.segment.consumer().available(1 << 20).unwrap()
            };
            (Ok(waiting), Vec::new())
        }
    }
}

fn side_of(step: &Step) -> usize {
    match *step {
        Step::Send { side, .. }
        | Step::Receive { side, .. }
        | Step::Shutdown { side, .. }
        | Step::Poll { side }
        | Step::Waiting { side } => side,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_accelerated_connection_answers_as_the_kernels_does(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        begin();
        let (plain, fast) = (pair(), accelerated());
        // What each side may still do: the kernel's answers to a second shutdown, and to anything
        // after a reset, depend on timing.
        let mut shut = [[false; 2]; 2];
        let mut in_flight = 0;
        for (seed, step) in steps.iter().enumerate() {
            let side = side_of(step);
            match *step {
                Step::Shutdown { how, .. } => {
                    let (reading, writing) = (how != libc::SHUT_WR, how != libc::SHUT_RD);
                    if reading || writing && shut[side][1] {
                        continue;
                    }
                    shut[side][1] = true;
                }
                Step::Send { length, .. } => {
                    in_flight += length;
                    // The two differ in how much they hold.
                    if in_flight > 100_000 {
                        continue;
                    }
                }
                _ => {}
            }
            let ours = on_ours(fast[side].as_raw_fd(), step, seed);
            let mut theirs = on_kernel(plain[side].as_raw_fd(), step, seed);
            for _ in 0..1000 {
                // The kernel's loopback may take a moment, on a loaded machine a long one.
                if theirs == ours || matches!(step, Step::Send { .. } | Step::Shutdown { .. }) {
                    break;
                }
                let again = !matches!(step, Step::Receive { peek: false, .. })
                    || theirs.0 == Err(Errno(libc::EAGAIN));
                if !again {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
                theirs = on_kernel(plain[side].as_raw_fd(), step, seed);
            }
            prop_assert_eq!(&ours, &theirs, "step {} of {:?}", seed, steps);
        }
        for stream in &fast {
            connection::closing(stream.as_raw_fd());
        }
    }
}
