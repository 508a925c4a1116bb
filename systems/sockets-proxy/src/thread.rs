//! The thread of a partition: turns, spins, sleeps. Where a partition has two (SP2C of the source), the second one
//! receives for as long as the first is awake, and is parked while that sleeps: only one of them says that it sleeps.
//!
//! A thread that finds nothing to do spins for a while, then sleeps on its doorbell, its mailbox and
//! the placeholders. Before, it says so twice: to the programs (a word of the page, then a look at
//! every queue behind a fence), and to the other end's thread, which answers (`Partition::rests`).
//! The answer is posted behind everything that the other thread posted before, so that a thread that
//! has it and finds its ring empty cannot miss a packet: what follows rings. A flag alone would not
//! do between two hosts, whose posted writes may pass each other on the bus.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_ntb::Window;
use beeline_os::poller::Waker;
use beeline_sockets::packets::page::Page;
use beeline_sockets::packets::patience::{Next, Patience};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use crate::partition::{Command, Counters, Notice, Partition, Receiver};

/// How much of its own time a thread looks in vain before it sleeps.
const LOOKS: Duration = Duration::from_micros(60);
/// Turns between two looks at the placeholders and the mailbox.
const TURNS: u32 = 128;
/// Where the other end's thread does not answer: how often the ring is looked at by the clock.
const BLIND: Duration = Duration::from_millis(1);
/// The same in the end where the other end cannot ring and nothing comes.
const SLOWEST_LOOK: Duration = Duration::from_millis(16);

const MAILBOX: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;

/// A queue with a bell, from one thread to another.
#[derive(Debug)]
pub struct Mailbox<T> {
    items: Mutex<VecDeque<T>>,
    /// There is something: looked at without the lock.
    some: AtomicBool,
    /// Rung when something was put.
    pub waker: Arc<Waker>,
}

impl<T> Mailbox<T> {
    /// An empty one that rings `waker`.
    #[must_use]
    pub fn new(waker: Arc<Waker>) -> Self {
        Self { items: Mutex::default(), some: AtomicBool::new(false), waker }
    }

    /// Puts something.
    pub fn put(&self, item: T) {
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        items.push_back(item);
        self.some.store(true, Ordering::SeqCst);
        drop(items);
        self.waker.wake();
    }

    /// Takes everything.
    pub fn take(&self) -> VecDeque<T> {
        if self.is_empty() {
            return VecDeque::new();
        }
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        self.some.store(false, Ordering::SeqCst);
        std::mem::take(&mut *items)
    }

    /// True when there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.some.load(Ordering::SeqCst)
    }
}

/// Where a partition stands, for its notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which link.
    pub link: usize,
    /// Which partition of it.
    pub partition: usize,
}

/// A running partition.
#[derive(Debug)]
pub struct Running {
    /// To it.
    pub commands: Arc<Mailbox<Command>>,
    /// Its counters.
    pub counters: Arc<Counters>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.commands.put(Command::Stop);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The second thread of a partition, in the hands of the first.
#[derive(Debug)]
struct Second {
    receiver: Receiver,
    thread: std::thread::Thread,
}

impl Second {
    fn asleep(&self, asleep: bool) {
        self.receiver.asleep(asleep);
        if !asleep {
            self.thread.unpark();
        }
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        self.receiver.stop();
        self.thread.unpark();
    }
}

/// What the second thread does until it is stopped.
fn receive(receiver: &Receiver) {
    let mut patience = Patience::new(LOOKS);
    while !receiver.is_stopped() {
        if receiver.is_asleep() {
            std::thread::park();
            continue;
        }
        if receiver.turn() > 0 {
            patience.found();
            continue;
        }
        let mut before = None;
        match patience.next(|| *before.insert(Instant::now())) {
            Next::Pause => std::hint::spin_loop(),
            next => {
                std::thread::yield_now();
                if let Some(before) = before {
                    patience.yielded(before.elapsed());
                }
                if next == Next::Sleep {
                    // The first thread decides when both sleep.
                    patience.rest();
                }
            }
        }
    }
}

fn pin(core: Option<usize>) {
    if let Some(core) = core
        && let Err(error) = beeline_os::affinity::pin_current_thread(core)
    {
        tracing::warn!(%error, core, "a partition's thread is not pinned");
    }
}

struct Worker {
    partition: Partition,
    window: Window,
    bell: usize,
    commands: Arc<Mailbox<Command>>,
    notices: Arc<Mailbox<(Place, Notice)>>,
    place: Place,
    page: Arc<Page>,
    thread: usize,
    epoll: std::os::fd::OwnedFd,
    events: Vec<Event>,
    /// Mailboxes of the partitions of this link, in their order.
    siblings: Vec<Arc<Mailbox<Command>>>,
    limit: Option<Limit>,
    second: Option<Second>,
    /// How long the next sleep is at most where the other end cannot ring.
    look: Duration,
}

/// A limit of bandwidth: so many bytes a second, and when bytes were allowed last.
#[derive(Clone, Copy, Debug)]
struct Limit {
    bytes_a_second: u64,
    since: Instant,
}

impl Limit {
    /// Bytes that may go at once after a silence: what a hundredth of a second has.
    fn burst(self) -> u64 {
        (self.bytes_a_second / 100).max(64 << 10)
    }

    /// Bytes that the time since the last call has brought.
    fn earned(&mut self, now: Instant) -> u64 {
        let nanoseconds = now.saturating_duration_since(self.since).as_nanos();
        let earned = nanoseconds * u128::from(self.bytes_a_second) / 1_000_000_000;
        if earned > 0 {
            self.since = now;
        }
        u64::try_from(earned).unwrap_or(u64::MAX)
    }
}

/// Starts the thread of `partition`, which is `thread` in the page, sends at most so many bytes a
/// second, and stays on a processor, if one is named; and a second thread with the `receiver`, if there is one, on
/// the second processor.
///
/// Errors: the system's.
#[expect(clippy::too_many_arguments, reason = "one thread, fully described")]
pub fn start(
    (partition, receiver): (Partition, Option<Receiver>),
    window: Window,
    bell: usize,
    place: Place,
    page: Arc<Page>,
    thread: usize,
    notices: Arc<Mailbox<(Place, Notice)>>,
    (bytes_a_second, cores): (Option<u64>, [Option<usize>; 2]),
) -> io::Result<Running> {
    let commands = Arc::new(Mailbox::new(Arc::new(Waker::new()?)));
    let counters = Arc::clone(&partition.counters);
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, commands.waker.as_fd(), EventData::new_u64(MAILBOX), EventFlags::IN)?;
    if let Some(bell) = window.bells.descriptor(bell) {
        epoll::add(&epoll, bell, EventData::new_u64(BELL), EventFlags::IN)?;
    }
    let mailbox = Arc::clone(&commands);
    let name = format!("ntp-{}-{}", place.link, place.partition);
    let mut threads = Vec::new();
    let second = match receiver {
        None => None,
        Some(receiver) => {
            let theirs = receiver.clone();
            let started =
                std::thread::Builder::new().name(format!("{name}-rx")).spawn(move || {
                    pin(cores[1]);
                    receive(&theirs);
                })?;
            let thread = started.thread().clone();
            threads.push(started);
            Some(Second { receiver, thread })
        }
    };
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        pin(cores[0]);
        let events = Vec::with_capacity(256);
        let worker = Worker {
            partition,
            window,
            bell,
            commands: mailbox,
            notices,
            place,
            page,
            thread,
            epoll,
            events,
            siblings: Vec::new(),
            limit: bytes_a_second
                .map(|bytes_a_second| Limit { bytes_a_second, since: Instant::now() }),
            second,
            look: BLIND,
        };
        worker.run();
    })?;
    threads.push(thread);
    Ok(Running { commands, counters, threads })
}

impl Worker {
    /// Commands of the monitor; false when the thread is to end.
    fn obey(&mut self) -> bool {
        for command in self.commands.take() {
            let command = match command {
                Command::Stop => return false,
                Command::Siblings(all) => {
                    self.siblings = all;
                    continue;
                }
                other => other,
            };
            let Some(place) = self.partition.obey(command) else { continue };
            let Some(socket) = self.partition.socket(place) else { continue };
            let flags = EventFlags::IN | EventFlags::HUP | EventFlags::ET;
            let token = EventData::new_u64(place as u64);
            if let Err(error) = epoll::add(&self.epoll, socket, token, flags) {
                tracing::warn!(%error, "a connection is not watched");
                self.partition.heard(place, true);
            }
        }
        true
    }

    /// Hands connections over to other partitions.
    fn hand_over(&mut self) {
        for departure in self.partition.departures() {
            let to = departure.to;
            if let Some(socket) = departure.socket() {
                let _ = epoll::delete(&self.epoll, socket);
            }
            let thread = self.thread - self.place.partition + to;
            // Before the other thread looks at its queues: who publishes later sees whether that one sleeps.
            departure
                .channel()
                .partition()
                .store(u32::try_from(thread).unwrap_or(0), Ordering::SeqCst);
            if let Some(other) = self.siblings.get(to) {
                other.put(Command::Arrive(departure));
            }
        }
    }

    fn tell(&mut self) {
        for notice in self.partition.notices() {
            self.notices.put((self.place, notice));
        }
    }

    /// News of placeholders, the doorbell and the mailbox, waited for as long as told. How much there was.
    fn hear(&mut self, timeout: Option<Duration>) -> usize {
        // What the kernel has to tell of them goes with them, also what it would have told next.
        for socket in self.partition.unwatched() {
            let _ = epoll::delete(&self.epoll, socket);
        }
        let timeout = timeout.map(|time| rustix::event::Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        self.events.clear();
        let spare = rustix::buffer::spare_capacity(&mut self.events);
        let _ = epoll::wait(&self.epoll, spare, timeout.as_ref());
        for event in &self.events {
            let flags = event.flags;
            match event.data.u64() {
                MAILBOX => self.commands.waker.clear(),
                BELL => self.window.bells.clear(self.bell),
                place => {
                    let gone = EventFlags::HUP | EventFlags::ERR;
                    let place = usize::try_from(place).unwrap_or(usize::MAX);
                    self.partition.heard(place, flags.intersects(gone));
                }
            }
        }
        self.events.len()
    }

    fn run(mut self) {
        let (mut turns, mut patience) = (0_u32, Patience::new(LOOKS));
        while self.commands.is_empty() || self.obey() {
            if let Some(limit) = &mut self.limit {
                let earned = limit.earned(Instant::now());
                self.partition.allow(Some(earned), limit.burst());
            }
            let done = match self.partition.turn() {
                Ok(done) => done,
                Err(fault) => {
                    let reason = fault.to_string();
                    self.partition.obey(Command::Link { up: false });
                    self.notices.put((self.place, Notice::Fault { reason }));
                    0
                }
            };
            if self.partition.has_news() {
                self.hand_over();
                self.tell();
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(TURNS) {
                self.hear(Some(Duration::ZERO));
            }
            if done > 0 {
                self.partition.wakes();
                patience.found();
                self.look = BLIND;
                continue;
            }
            let mut before = None;
            match patience.next(|| *before.insert(Instant::now())) {
                Next::Pause => std::hint::spin_loop(),
                Next::Yield => {
                    std::thread::yield_now();
                    if let Some(before) = before {
                        patience.yielded(before.elapsed());
                    }
                }
                // One that hears nothing sleeps again at once.
                Next::Sleep if self.sleep() > 0 => patience.rest(),
                Next::Sleep => {}
            }
        }
    }

    /// Sleeps, if there is nothing to do. What was heard.
    fn sleep(&mut self) -> usize {
        // Where words go to and fro the other end's thread is about to be woken by one: it is not woken for
        // an answer alone before the clock has run out once.
        let known = self.partition.rests(false);
        if let Some(second) = &self.second {
            second.asleep(true);
        }
        let asleep = self.page.asleep(self.thread);
        asleep.store(1, Ordering::SeqCst);
        // Against the fence between a program's packets and its look at the word.
        fence(Ordering::SeqCst);
        let heard = if self.partition.is_limited() {
            // What waits may not go before there is time for it.
            self.hear(Some(BLIND))
        } else if self.partition.has_work() || !self.commands.is_empty() {
            1
        } else {
            self.partition.counters.sleeps.fetch_add(1, Ordering::Relaxed);
            // Where nothing rings the ring is looked at by the clock, less and less often. Asked each time: a bell
            // here does not mean that the other end can ring it, which is known once that end is there, and again
            // when it begins anew. Then the monitor's word ends a sleep.
            let limit = if self.window.bells.is_rung(self.bell) {
                (!known).then_some(BLIND)
            } else {
                let look = self.look;
                self.look = (2 * look).min(SLOWEST_LOOK);
                Some(look)
            };
            let heard = self.hear(limit);
            if heard == 0 && !known {
                self.partition.rests(true);
            }
            heard
        };
        self.page.asleep(self.thread).store(0, Ordering::SeqCst);
        if let Some(second) = &self.second {
            second.asleep(false);
        }
        heard
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

    use beeline_ntb::bells::Silent;
    use beeline_ntb::window::{Bells, Mapped};
    use beeline_ntb::{Inbound, Outbound};
    use beeline_os::Mapping;
    use beeline_sockets::packets::Connection;
    use beeline_sockets::packets::channel::Channel;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;
    use crate::flow::Schedule;
    use crate::geometry::{Geometry, at};
    use crate::partition::Key;

    const LENGTH: usize = 64 << 10;

    /// A doorbell that the other end cannot ring: that one has no interrupts.
    #[derive(Debug)]
    struct Unrung(Waker);

    impl Bells for Unrung {
        fn ring(&self, _: usize) {}

        fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }

        fn clear(&self, _: usize) {}

        fn is_rung(&self, _: usize) -> bool {
            false
        }
    }

    fn until(what: &str, done: impl Fn() -> bool) {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < Duration::from_secs(60), "in vain: {what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_the_other_end_cannot_ring_looks_by_the_clock_though_it_has_a_bell() {
        let geometry = Geometry::dividing(LENGTH, 1, 128, 16).unwrap();
        let memory = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        let page = Arc::new(Page::create().unwrap());
        let notices = Arc::new(Mailbox::new(Arc::new(Waker::new().unwrap())));
        let bells: [Arc<dyn Bells>; 2] =
            [Arc::new(Unrung(Waker::new().unwrap())), Arc::new(Silent)];
        let windows = [0, 1].map(|side: usize| {
            let far = Mapped::new(Arc::clone(&memory), (1 - side) * LENGTH, LENGTH);
            let inbound = Inbound::new(Arc::clone(&memory), side * LENGTH, LENGTH);
            let outbound = Outbound::new(Arc::new(far));
            let window = Window { inbound, outbound, bells: Arc::clone(&bells[side]) };
            let (at, bytes) = geometry.partition(0);
            window.part(at, bytes)
        });
        let address = "10.0.0.1:1".parse().unwrap();
        let ends = [0, 1].map(|side: usize| {
            let schedule = Schedule::new(8, 4);
            let mut partition = Partition::new(windows[side].clone(), geometry, schedule, 1);
            partition.obey(Command::Link { up: true });
            let place = Place { link: 0, partition: 0 };
            let running = start(
                (partition, None),
                windows[side].clone(),
                1,
                place,
                Arc::clone(&page),
                side,
                Arc::clone(&notices),
                (None, [None; 2]),
            );
            let channel = Channel::create(geometry.shape(), address, address).unwrap();
            channel.partition().store(u32::try_from(side).unwrap(), Ordering::Relaxed);
            let memory = channel.mapping().descriptor().unwrap().try_clone().unwrap();
            let flags = SocketFlags::CLOEXEC;
            let (socket, fd) =
                rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                    .unwrap();
            let key = [Key { own: 9, peer: 80 }, Key { own: 80, peer: 9 }][side];
            let channel = Arc::new(channel);
            let create = Command::Create { key, id: 9, channel, socket, priority: 0, open: true };
            let (running, taken) = (running.unwrap(), Channel::take(memory).unwrap());
            running.commands.put(create);
            let counters = Arc::clone(&running.counters);
            until("the connection", || counters.connections.load(Ordering::Relaxed) == 1);
            (running, Connection::new(taken, Arc::clone(&page)), fd)
        });
        let [(_, hears, at_hand), (_, says, far)] = &ends;
        let send = |socket: &OwnedFd| {
            let piece = [libc::iovec { iov_base: b"hello".as_ptr().cast_mut().cast(), iov_len: 5 }];
            // SAFETY: our own bytes, which are only read.
            unsafe { says.send(socket.as_raw_fd(), &piece, libc::MSG_DONTWAIT) }
        };
        let receive = || {
            let mut bytes = [0_u8; 5];
            let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 5 }];
            // SAFETY: our own bytes.
            unsafe { hears.receive(at_hand.as_raw_fd(), &piece, libc::MSG_DONTWAIT) }
        };
        let word = |side: usize, at: usize| windows[side].inbound.word(at).load(Ordering::Acquire);
        for round in 0..4 {
            until("the one end rests and the other has said that it knows", || {
                let rest = word(1, at::REST);
                rest % 2 == 1 && word(0, at::REST_SEEN) == rest
            });
            // A sleep without an end has begun by now, if there is one: the last look before it was short.
            std::thread::sleep(10 * BLIND);
            assert_eq!(send(far), Ok(5), "round {round}");
            until("what the other end sent", || receive() == Ok(5));
        }
    }

    #[test]
    fn a_limit_earns_what_the_time_is_worth_and_loses_no_part_of_it() {
        let begun = Instant::now();
        let mut limit = Limit { bytes_a_second: 1_000_000, since: begun };
        assert_eq!(limit.burst(), 64 << 10);
        assert_eq!(limit.earned(begun + Duration::from_nanos(900)), 0);
        assert_eq!(limit.earned(begun + Duration::from_nanos(1_000)), 1);
        assert_eq!(limit.earned(begun + Duration::from_nanos(1_000)), 0);
        assert_eq!(limit.earned(begun + Duration::from_millis(11)), 10_999);
    }
}
