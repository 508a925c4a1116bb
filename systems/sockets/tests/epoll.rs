//! Epoll sets with accelerated connections: the same events as with the kernel's connections,
//! level- and edge-triggered and one-shot, beside every other kind of descriptor, and in sets that
//! are watched themselves.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

mod common;

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use beeline_sockets::kernel::{self, Errno};
use beeline_sockets::{connection, epoll, poll, receive, send, table};
use common::{accelerated, begin, pair, piece};
use proptest::prelude::*;

const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const QUIET: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

fn set() -> OwnedFd {
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    assert!(fd >= 0);
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn control(set: RawFd, operation: i32, fd: RawFd, mask: u32, data: u64) -> Result<usize, Errno> {
    let event = libc::epoll_event { events: mask, u64: data };
    epoll::control(set, operation, fd, Some(event))
        .unwrap_or_else(|| kernel::epoll_control(set, operation, fd, Some(event)))
}

/// Events by the program's data.
type Events = BTreeMap<u64, u32>;

fn as_map(events: &[libc::epoll_event]) -> Events {
    events.iter().map(|event| (event.u64, event.events)).collect()
}

fn wait(set: RawFd, timeout: Duration) -> Events {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
    let time = poll::time(timeout);
    let outcome = epoll::wait(set, &mut events, Some(timeout), None)
        .unwrap_or_else(|| kernel::epoll_wait(set, &mut events, Some(time), None));
    as_map(&events[..outcome.unwrap()])
}

fn kernel_wait(set: RawFd) -> Events {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
    let count = kernel::epoll_wait(set, &mut events, Some(poll::time(Duration::ZERO)), None);
    as_map(&events[..count.unwrap()])
}

fn give(stream: &TcpStream, length: usize) -> Result<usize, Errno> {
    let mut bytes = vec![7; length];
    let fd = stream.as_raw_fd();
    match table::ours(fd) {
        Some(ours) => unsafe { send::send(fd, ours, &piece(bytes.as_mut_ptr(), length), QUIET) },
        None => kernel::send(fd, &bytes, QUIET),
    }
}

fn take(stream: &TcpStream, room: usize) -> Result<usize, Errno> {
    let mut bytes = vec![0; room];
    let fd = stream.as_raw_fd();
    match table::ours(fd) {
        Some(ours) => unsafe {
            receive::receive(fd, ours, &piece(bytes.as_mut_ptr(), room), QUIET)
        },
        None => kernel::receive(fd, &mut bytes, QUIET),
    }
}

fn end(stream: &TcpStream) {
    let fd = stream.as_raw_fd();
    match table::ours(fd) {
        Some(ours) => connection::shutdown(fd, ours, libc::SHUT_WR).unwrap(),
        None => kernel::shutdown(fd, libc::SHUT_WR).unwrap(),
    };
}

fn close(streams: &[TcpStream]) {
    for stream in streams {
        connection::closing(stream.as_raw_fd());
    }
}

/// Before the number is given back: the library is not preloaded into this test.
fn close_set(set: OwnedFd) {
    connection::closing(set.as_raw_fd());
}

#[derive(Clone, Debug)]
enum Step {
    Send { side: usize, length: usize },
    Receive { side: usize, room: usize },
    End { side: usize },
    Control { side: usize, operation: i32, mask: u32 },
    Event { write: bool },
    Wait,
}

fn step(how: u32) -> impl Strategy<Value = Step> {
    let side = 0..2_usize;
    let operation = prop_oneof![
        3 => Just(libc::EPOLL_CTL_ADD),
        3 => Just(libc::EPOLL_CTL_MOD),
        1 => Just(libc::EPOLL_CTL_DEL),
    ];
    let mask = prop_oneof![Just(IN), Just(IN | RDHUP), Just(OUT), Just(IN | OUT | RDHUP)];
    prop_oneof![
        5 => (side.clone(), 1..2000_usize).prop_map(|(side, length)| Step::Send { side, length }),
        5 => (side.clone(), 1..4000_usize).prop_map(|(side, room)| Step::Receive { side, room }),
        1 => side.clone().prop_map(|side| Step::End { side }),
        6 => (side, operation, mask).prop_map(move |(side, operation, mask)| Step::Control {
            side,
            operation,
            mask: mask | how,
        }),
        2 => any::<bool>().prop_map(|write| Step::Event { write }),
        8 => Just(Step::Wait),
    ]
}

/// One of the two worlds: a set with a pair of connections and an event counter.
struct World {
    set: OwnedFd,
    streams: [TcpStream; 2],
    event: OwnedFd,
    accelerated: bool,
}

impl World {
    fn new(accelerated: bool) -> Self {
        let streams = if accelerated { self::accelerated() } else { pair() };
        let event = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        let world = Self { set: set(), streams, event, accelerated };
        let fd = world.event.as_raw_fd();
        world.control(libc::EPOLL_CTL_ADD, fd, IN, 2).unwrap();
        world
    }

    fn control(&self, operation: i32, fd: RawFd, mask: u32, data: u64) -> Result<usize, Errno> {
        let set = self.set.as_raw_fd();
        if self.accelerated {
            return control(set, operation, fd, mask, data);
        }
        kernel::epoll_control(
            set,
            operation,
            fd,
            Some(libc::epoll_event { events: mask, u64: data }),
        )
    }

    fn count(&self, write: bool) {
        let mut word = 1_u64;
        let place = (&raw mut word).cast();
        let fd = self.event.as_raw_fd();
        // A counter at zero has nothing to read: fine.
        if write {
            unsafe { libc::write(fd, place, 8) };
        } else {
            unsafe { libc::read(fd, place, 8) };
        }
    }
}

impl Drop for World {
    /// Before the numbers are given back: the library is not preloaded into this test.
    fn drop(&mut self) {
        close(&self.streams);
        connection::closing(self.event.as_raw_fd());
        connection::closing(self.set.as_raw_fd());
    }
}

/// Runs `steps` in both worlds. What one world's edges tell more often than they must is allowed
/// where nothing has happened since.
fn compare(steps: &[Step], how: u32) -> Result<(), TestCaseError> {
    begin();
    let (ours, theirs) = (World::new(true), World::new(false));
    let mut ended = [false; 2];
    // Whether a side has news since it last was reported.
    let mut news = [false; 2];
    let mut masks = [0; 2];
    for (at, step) in steps.iter().enumerate() {
        match *step {
            Step::Send { side, .. } | Step::End { side } if ended[side] => {}
            Step::Send { side, length } => {
                prop_assert_eq!(
                    give(&ours.streams[side], length),
                    give(&theirs.streams[side], length)
                );
                news[1 - side] |= masks[1 - side] & IN != 0;
            }
            Step::End { side } => {
                end(&ours.streams[side]);
                end(&theirs.streams[side]);
                ended[side] = true;
                // The other side can read an end; when both ended, both are hung up.
                let over = ended == [true; 2];
                news[1 - side] |= over || masks[1 - side] & (IN | RDHUP) != 0;
                news[side] |= over;
            }
            Step::Receive { side, room } => {
                let got = take(&ours.streams[side], room);
                let mut seen = take(&theirs.streams[side], room);
                // The kernel's loopback may take a moment.
                for _ in 0..400 {
                    if got == seen {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                    let so_far = seen.unwrap_or(0);
                    let left =
                        got.map_or(room, |mine| if mine == 0 { room } else { mine - so_far });
                    seen = take(&theirs.streams[side], left).map(|more| so_far + more).or(seen);
                }
                prop_assert_eq!(got, seen, "step {} of {:?}", at, steps);
            }
            Step::Control { side, operation, mask } => {
                let data = side as u64;
                let on = |world: &World| {
                    let fd = world.streams[side].as_raw_fd();
                    world.control(operation, fd, mask, data)
                };
                let (mine, other) = (on(&ours), on(&theirs));
                prop_assert_eq!(mine, other, "step {} of {:?}", at, steps);
                if mine.is_ok() {
                    news[side] = true;
                    masks[side] = mask;
                }
            }
            Step::Event { write } => {
                ours.count(write);
                theirs.count(write);
            }
            Step::Wait => {
                let mine = wait(ours.set.as_raw_fd(), Duration::ZERO);
                let mut other = Events::new();
                // The rings' answers may come some waits before the kernel's.
                let later = |data| data == 2 && !mine.is_empty();
                // An edge may be told more often than it must be.
                let again =
                    |data| how & EDGE != 0 && news.get(data as usize).is_some_and(|news| !news);
                let fits = |other: &Events| {
                    (0..3).all(|data| {
                        let (mine, other) = (mine.get(&data), other.get(&data));
                        mine == other || mine.is_none() && (later(data) || again(data))
                    })
                };
                for _ in 0..400 {
                    let seen = kernel_wait(theirs.set.as_raw_fd());
                    if how == 0 {
                        other = seen;
                    } else {
                        for (data, bits) in seen {
                            *other.entry(data).or_insert(0) |= bits;
                        }
                    }
                    if fits(&other) {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                prop_assert!(
                    fits(&other),
                    "step {}: {:?}, the kernel {:?}, of {:?}",
                    at,
                    mine,
                    other,
                    steps
                );
                for data in mine.keys().chain(other.keys()) {
                    if let Some(side) = news.get_mut(*data as usize) {
                        *side = false;
                    }
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn level_triggered_sets_report_what_the_kernels_do(
        steps in prop::collection::vec(step(0), 1..60),
    ) {
        compare(&steps, 0)?;
    }

    #[test]
    fn one_shot_sets_report_what_the_kernels_do(
        steps in prop::collection::vec(step(ONESHOT), 1..60),
    ) {
        compare(&steps, ONESHOT)?;
    }

    #[test]
    fn edge_triggered_sets_miss_nothing_that_the_kernels_report(
        steps in prop::collection::vec(step(EDGE), 1..60),
    ) {
        compare(&steps, EDGE)?;
    }
}

/// Sends one byte from another thread, some time later.
fn later(stream: &TcpStream) -> std::thread::JoinHandle<()> {
    let copy = stream.try_clone().unwrap();
    table::duplicate(stream.as_raw_fd(), copy.as_raw_fd());
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(give(&copy, 1), Ok(1));
        connection::closing(copy.as_raw_fd());
    })
}

#[test]
fn a_set_in_a_set_and_poll_on_a_set_hear_of_a_connection() {
    begin();
    let streams = accelerated();
    let (inner, outer) = (set(), set());
    let (inside, outside) = (inner.as_raw_fd(), outer.as_raw_fd());
    // Nested before there is anything in it.
    control(outside, libc::EPOLL_CTL_ADD, inside, IN, 50).unwrap();
    control(inside, libc::EPOLL_CTL_ADD, streams[0].as_raw_fd(), IN, 5).unwrap();
    for round in 0..3 {
        assert_eq!(wait(outside, Duration::ZERO), Events::new());
        let began = Instant::now();
        let sender = later(&streams[1]);
        if round == 1 {
            let mut entries = [libc::pollfd { fd: inside, events: libc::POLLIN, revents: 0 }];
            let outcome = poll::poll(&mut entries, Some(Duration::from_secs(20)), None);
            assert_eq!((outcome, entries[0].revents), (Some(Ok(1)), libc::POLLIN));
        } else {
            assert_eq!(wait(outside, Duration::from_secs(20)), Events::from([(50, IN)]));
        }
        assert!(began.elapsed() < Duration::from_secs(10), "woken, not timed out");
        assert_eq!(wait(inside, Duration::ZERO), Events::from([(5, IN)]));
        assert_eq!(take(&streams[0], 10), Ok(1));
        assert_eq!(wait(inside, Duration::ZERO), Events::new());
        sender.join().unwrap();
    }
    close(&streams);
    close_set(inner);
    close_set(outer);
}

#[test]
fn a_set_holds_connections_beside_every_other_kind_of_descriptor() {
    begin();
    let streams = accelerated();
    let set = set();
    let number = set.as_raw_fd();
    let folder = tempfile::tempdir().unwrap();
    let own = |fd: i32| {
        assert!(fd >= 0);
        unsafe { OwnedFd::from_raw_fd(fd) }
    };
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    let (pipe, writer) = (own(ends[0]), own(ends[1]));
    let event = own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) });
    let timer = own(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC) });
    let watcher = own(unsafe { libc::inotify_init1(libc::IN_CLOEXEC) });
    let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigaddset(&raw mut signals, libc::SIGUSR2) };
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut()) };
    let signal = own(unsafe { libc::signalfd(-1, &raw const signals, libc::SFD_CLOEXEC) });
    let path = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
    let watched =
        unsafe { libc::inotify_add_watch(watcher.as_raw_fd(), path.as_ptr(), libc::IN_CREATE) };
    assert!(watched >= 0);
    let others = [&pipe, &event, &timer, &watcher, &signal];
    for (data, fd) in (10..).zip(others) {
        control(number, libc::EPOLL_CTL_ADD, fd.as_raw_fd(), IN, data).unwrap();
    }
    control(number, libc::EPOLL_CTL_ADD, streams[0].as_raw_fd(), IN, 1).unwrap();
    assert_eq!(wait(number, Duration::ZERO), Events::new());
    let second = Duration::from_secs(20);
    let mut expected = Events::new();
    for data in 10..15 {
        let word = 1_u64.to_le_bytes();
        match data {
            10 => {
                assert_eq!(unsafe { libc::write(writer.as_raw_fd(), word.as_ptr().cast(), 1) }, 1)
            }
            11 => assert_eq!(unsafe { libc::write(event.as_raw_fd(), word.as_ptr().cast(), 8) }, 8),
            12 => {
                let soon = libc::timespec { tv_sec: 0, tv_nsec: 30_000_000 };
                let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                let time = libc::itimerspec { it_interval: never, it_value: soon };
                let fd = timer.as_raw_fd();
                let null = std::ptr::null_mut();
                assert_eq!(unsafe { libc::timerfd_settime(fd, 0, &raw const time, null) }, 0);
            }
            13 => drop(std::fs::File::create(folder.path().join("new")).unwrap()),
            _ => kernel::raise(libc::SIGUSR2),
        }
        // Level-triggered: what was ready before is ready still; the timer comes later.
        expected.insert(data, IN);
        let began = Instant::now();
        while wait(number, second) != expected {
            assert!(began.elapsed() < second, "waiting for {expected:?}");
        }
    }
    assert_eq!(give(&streams[1], 3), Ok(3));
    expected.insert(1, IN);
    assert_eq!(wait(number, second), expected);
    close(&streams);
    close_set(set);
}

#[test]
fn a_socket_put_into_a_set_before_it_connects_may_become_ours() {
    begin();
    let set = set();
    let number = set.as_raw_fd();
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0) };
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    control(number, libc::EPOLL_CTL_ADD, fd, IN | OUT | EDGE, 9).unwrap();
    assert!(!table::is_watched_plain(fd));
    // As the kernel's does: hung up, and writable for the error's sake.
    let hup = libc::EPOLLHUP as u32;
    assert_eq!(wait(number, Duration::ZERO), Events::from([(9, OUT | hup)]));
    connection::closing(fd);
    drop(socket);
    close_set(set);
}

#[test]
fn what_is_put_into_a_copy_of_a_set_is_in_the_set() {
    common::begin();
    let one = set();
    let copy = one.try_clone().unwrap();
    beeline_sockets::epoll::duplicate(one.as_raw_fd(), copy.as_raw_fd());
    let streams = common::accelerated();
    let fd = streams[1].as_raw_fd();
    control(copy.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, IN, 7).unwrap();
    give(&streams[0], 3).unwrap();
    let heard = wait(one.as_raw_fd(), Duration::from_millis(20));
    assert_eq!(heard, Events::from([(7, libc::EPOLLIN as u32)]));
    // Closing one number leaves the other.
    close_set(copy);
    assert_eq!(wait(one.as_raw_fd(), Duration::from_millis(20)).len(), 1);
    close_set(one);
    close(&streams);
}

#[test]
fn exclusive_entries_are_refused_where_the_kernel_refuses_them() {
    begin();
    let exclusive = libc::EPOLLEXCLUSIVE as u32;
    let (ours, theirs) = (World::new(true), World::new(false));
    let mut seen = Vec::new();
    for world in [&ours, &theirs] {
        let fd = world.streams[0].as_raw_fd();
        let control = |_, operation, fd, mask, data| world.control(operation, fd, mask, data);
        let number = ();
        seen.push([
            control(number, libc::EPOLL_CTL_ADD, fd, IN | exclusive | ONESHOT, 1),
            control(number, libc::EPOLL_CTL_ADD, fd, IN | exclusive | EDGE, 1),
            control(number, libc::EPOLL_CTL_MOD, fd, IN, 1),
            control(number, libc::EPOLL_CTL_DEL, fd, 0, 1),
            control(number, libc::EPOLL_CTL_ADD, fd, IN, 1),
            control(number, libc::EPOLL_CTL_MOD, fd, IN | exclusive, 1),
        ]);
    }
    assert_eq!(seen[0], seen[1]);
}

/// A connection whose second end never sent, and is closed with or without a word: a client that
/// fills the ring and then asks for room alone is told.
fn an_end_that_never_sent_is_gone(with_a_word: bool, blocks: bool) {
    begin();
    let [one, other] = accelerated();
    let set = set();
    let fd = one.as_raw_fd();
    control(set.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, OUT, 1).unwrap();
    // The first bytes go while the other end is there, so no send hears of its end.
    while give(&one, 4096).is_ok() {}
    assert_eq!(wait(set.as_raw_fd(), Duration::ZERO), Events::new(), "the ring is full");
    let connection = table::ours(fd).unwrap();
    if with_a_word {
        connection::closing(other.as_raw_fd());
    } else {
        // As when its process is killed.
        table::forget(other.as_raw_fd());
    }
    drop(other);
    if blocks {
        let mut bytes = [7; 4096];
        let pieces = piece(bytes.as_mut_ptr(), bytes.len());
        let wait = libc::MSG_NOSIGNAL;
        let error =
            (0..100).find_map(|_| unsafe { send::send(fd, connection, &pieces, wait) }.err());
        assert!(matches!(error, Some(Errno(libc::EPIPE | libc::ECONNRESET))), "{error:?}");
    } else {
        let heard = wait(set.as_raw_fd(), Duration::from_secs(20));
        assert_ne!(heard.get(&1).copied().unwrap_or(0) & OUT, 0, "{heard:?}");
        let error = (0..100).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            give(&one, 4).err()
        });
        assert!(matches!(error, Some(Errno(libc::EPIPE | libc::ECONNRESET))), "{error:?}");
    }
    close(&[one]);
    close_set(set);
}

#[test]
fn who_waits_for_room_hears_that_an_end_that_never_sent_was_closed() {
    an_end_that_never_sent_is_gone(true, false);
    an_end_that_never_sent_is_gone(true, true);
}

#[test]
fn who_waits_for_room_hears_that_an_end_that_never_sent_was_killed() {
    an_end_that_never_sent_is_gone(false, false);
    an_end_that_never_sent_is_gone(false, true);
}

#[test]
fn a_half_closed_end_that_never_sent_goes_on_reading() {
    begin();
    let [one, other] = accelerated();
    let (mine, theirs) = (table::ours(one.as_raw_fd()).unwrap(), other.as_raw_fd());
    // Its half-close went through the kernel: it had no other end then.
    let signs = &table::ours(theirs).unwrap().segment.own().signs;
    signs.mute.store(1, std::sync::atomic::Ordering::Release);
    signs.finished.store(1, std::sync::atomic::Ordering::Release);
    kernel::shutdown(theirs, libc::SHUT_WR).unwrap();
    assert_eq!(take(&one, 10), Ok(0), "the end of its half");
    mine.look_after_peer_now(one.as_raw_fd());
    assert_eq!(give(&one, 5), Ok(5));
    assert!(mine.is_bound_for_ring());
    assert_eq!(take(&other, 10), Ok(5));
    close(&[one, other]);
}

#[test]
fn a_set_of_a_large_number_hears_of_what_comes() {
    begin();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    let wanted = limit.rlim_max.min(1 << 20);
    limit.rlim_cur = wanted;
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let last = RawFd::try_from(wanted).unwrap() - 1;
    for number in [(1 << 14) - 1, 1 << 14, 19_999, last].into_iter().filter(|&n| n <= last) {
        let made = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        assert_eq!(unsafe { libc::dup3(made, number, libc::O_CLOEXEC) }, number);
        unsafe { libc::close(made) };
        epoll::created(number);
        let streams = accelerated();
        let fd = streams[0].as_raw_fd();
        control(number, libc::EPOLL_CTL_ADD, fd, IN, 7).unwrap();
        assert_eq!(wait(number, Duration::ZERO).len(), 0, "{number}");
        let sends = later(&streams[1]);
        let heard = wait(number, Duration::from_secs(60));
        assert_eq!(heard.get(&7).map(|bits| bits & IN), Some(1), "{number}");
        sends.join().unwrap();
        close(&streams);
        connection::closing(number);
        unsafe { libc::close(number) };
    }
}
