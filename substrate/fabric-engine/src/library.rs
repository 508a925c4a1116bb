//! The device's thread: serves the transport, hears callers, and drives connections whose application does not look.
//!
//! Per completion queue the library is in one of two modes:
//!
//! ```text
//!            a stream is ready and the application is quiet: drive it, stay
//!            ┌──┐
//!            ▼  │
//!   ┌────▶ RESTS ── a stream is ready, and the application was here since last seen, or sleeps ──┐
//!   │      (streams in the library's epoll set, no timer)       an acknowledgement was put off   │
//!   │                                                                                             ▼
//!   └── a tick without a sign of the application: drive what is left ◀── TICKS (streams out of the set,
//!                                                                        one look per millisecond)
//! ```
//!
//! *An application that polls or waits* is never disturbed: in TICKS the library's set does not
//! hold the streams, so that an arriving byte wakes the application alone; the library wakes once
//! a millisecond to compare one counter. *An idle pair costs nothing*: a tick without a sign leads
//! to RESTS, where there is no timer. *An application that computes* is stood in for: at once when
//! it has been quiet since the library last saw it, else after a tick (two at most). The price is
//! one superfluous wake-up of the library per quiet spell of more than a millisecond, not per
//! message.
//!
//! No byte is missed: going to RESTS, the library drives first and then puts the streams back
//! level-triggered, so that whatever is readable by then reports at once. No acknowledgement is
//! missed: [`QueueState::defer`] kicks a library at rest, and RESTS is stored before the list is
//! looked at again, both sequentially consistent.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};

use beeline_os::callers::{Pause, most_strangers};
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::time::Timespec;

use crate::clock;
use crate::connection::{Connection, Mover};
use crate::device::Shared;
use crate::handshake::{GREETING_BYTES, Greeting, GreetingRole, same_nonce};
use crate::queue::{LIBRARY_RESTS, LIBRARY_TICKS, QueueState, TOKEN_NUDGE, TOKEN_TIMER, lower};
use crate::stream::{Attention, Moved, Served, Stream};

/// Event data of the transport in the library's set; queues count up from [`FIRST_QUEUE`].
pub(crate) const TOKEN_TRANSPORT: u64 = 0;
/// Of the kick.
pub(crate) const TOKEN_KICK: u64 = 1;
/// Of the first queue.
pub(crate) const FIRST_QUEUE: u64 = 2;
/// Callers that have not greeted yet are numbered from here.
const FIRST_CALLER: u64 = 1 << 48;

/// Time between two looks at an application that drives.
const TICK_NS: u64 = 1_000_000;
/// How long a caller may take to say hello.
const GREETING_NS: u64 = 5_000_000_000;
/// Callers that may be about to say hello at once, in a share of the process's descriptors; more push
/// out the oldest.
const MAX_CALLERS: usize = 1024;
/// Bytes moved for one connection before the next.
const BUDGET_BYTES: usize = 1 << 20;

#[derive(Debug)]
struct Caller {
    token: u64,
    stream: Box<dyn Stream>,
    until_ns: u64,
    greeting: [u8; GREETING_BYTES],
    have: usize,
}

/// A queue as the library sees it.
#[derive(Debug)]
struct Watched {
    queue: Arc<QueueState>,
    seen_activity: u64,
}

#[derive(Debug)]
pub(crate) struct Library {
    shared: Arc<Shared>,
    callers: Vec<Caller>,
    next_caller: u64,
    watched: Vec<Watched>,
    debtors: Vec<u32>,
    accepted: Vec<Box<dyn Stream>>,
    /// The transport's events are not looked at.
    pause: Pause,
}

impl Library {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            callers: Vec::new(),
            next_caller: FIRST_CALLER,
            watched: Vec::new(),
            debtors: Vec::new(),
            accepted: Vec::new(),
            pause: Pause::default(),
        }
    }

    /// Runs until the device is dropped.
    pub(crate) fn run(mut self) {
        let nothing = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut events = [nothing; 64];
        let mut next_tick = 0;
        // Acquire: pairs with the release store of the device's drop.
        while !self.shared.stop.load(Ordering::Acquire) {
            let timeout = self.timeout(next_tick);
            let set = Arc::clone(&self.shared);
            let count = epoll::wait(&set.thread_set, &mut events, timeout.as_ref()).unwrap_or(0);
            self.adopt_queues();
            for event in &events[..count] {
                match event.data.u64() {
                    TOKEN_TRANSPORT => self.serve(),
                    TOKEN_KICK => lower(&set.kick),
                    token if token >= FIRST_CALLER => self.hear(token),
                    token => self.queue_ready(token),
                }
            }
            let now = clock::now_ns();
            if self.any_ticks() {
                if now >= next_tick {
                    if set.transport.is_polled() {
                        self.serve();
                    }
                    self.tick();
                    next_tick = now + TICK_NS;
                }
            } else {
                next_tick = 0;
            }
            self.callers.retain(|caller| now < caller.until_ns);
            if self.pause.end() {
                let (events, data) = (set.transport.events(), EventData::new_u64(TOKEN_TRANSPORT));
                if let Err(error) = epoll::add(&set.thread_set, events, data, EventFlags::IN) {
                    tracing::warn!(%error, "callers cannot be looked for yet");
                    self.pause.begin();
                }
            }
        }
    }

    fn any_ticks(&self) -> bool {
        self.watched.iter().any(|watched| ticks(&watched.queue))
    }

    fn timeout(&self, next_tick: u64) -> Option<Timespec> {
        let now = clock::now_ns();
        let tick = self.any_ticks().then(|| next_tick.max(now + TICK_NS / 8));
        let caller = self.callers.iter().map(|caller| caller.until_ns).min();
        let pause = self.pause.left().and_then(|left| u64::try_from(left.as_nanos()).ok());
        let pause = pause.map(|left| now.saturating_add(left));
        let wait = tick.into_iter().chain(caller).chain(pause).min()?.saturating_sub(now);
        Some(Timespec {
            tv_sec: i64::try_from(wait / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (wait % 1_000_000_000) as _,
        })
    }

    /// Takes over queues that were made, and drops those that went, since the last look; a queue
    /// at rest with an acknowledgement put off is put to ticking.
    fn adopt_queues(&mut self) {
        let shared = Arc::clone(&self.shared);
        // Acquire: pairs with the release increment by whoever changed the list.
        let version = shared.queues_version.load(Ordering::Acquire);
        if version != shared.queues_adopted.swap(version, Ordering::Relaxed) {
            let queues = shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
            self.watched
                .retain(|watched| queues.iter().any(|queue| Arc::ptr_eq(queue, &watched.queue)));
            for queue in queues.iter() {
                if !self.watched.iter().any(|watched| Arc::ptr_eq(queue, &watched.queue)) {
                    let seen_activity = queue.activity();
                    self.watched.push(Watched { queue: Arc::clone(queue), seen_activity });
                }
            }
        }
        for watched in &self.watched {
            if !ticks(&watched.queue) && watched.queue.has_deferred() {
                stand_back(&shared.thread_set, &watched.queue);
            }
        }
    }

    // ---- callers ----

    /// Whether somebody may sleep through what arrives, unless streams become readable.
    fn attention(&self) -> Attention {
        let looks = |watched: &Watched| ticks(&watched.queue) && !watched.queue.waits();
        let spared =
            self.callers.is_empty() && !self.watched.is_empty() && self.watched.iter().all(looks);
        if spared { Attention::Spared } else { Attention::Needed }
    }

    fn serve(&mut self) {
        let mut accepted = std::mem::take(&mut self.accepted);
        let served = self.shared.transport.serve(&|| self.attention(), &mut accepted);
        let some = !accepted.is_empty();
        if served == Served::NoDescriptor && !some {
            // The stranger that has been silent longest makes room; where there is none, callers
            // wait. They stay readable, and looking at once would be looking for ever.
            if self.callers.is_empty() {
                let events = self.shared.transport.events();
                if !self.pause.is_on() && epoll::delete(&self.shared.thread_set, events).is_ok() {
                    self.pause.begin();
                }
            } else {
                self.callers.remove(0);
            }
        }
        let most = most_strangers(MAX_CALLERS);
        for stream in accepted.drain(..) {
            if self.callers.len() >= most {
                self.callers.remove(0);
            }
            let token = self.next_caller;
            self.next_caller += 1;
            let (set, data) = (&self.shared.thread_set, EventData::new_u64(token));
            if epoll::add(set, stream.readiness(), data, EventFlags::IN).is_err() {
                continue;
            }
            self.callers.push(Caller {
                token,
                stream,
                until_ns: clock::now_ns() + GREETING_NS,
                greeting: [0; GREETING_BYTES],
                have: 0,
            });
        }
        self.accepted = accepted;
        if some {
            // From here on the library sleeps on their streams.
            self.shared.transport.before_sleep();
        }
    }

    /// A caller's bytes: never more than the greeting, so that its frames stay in the stream.
    fn hear(&mut self, token: u64) {
        let Some(index) = self.callers.iter().position(|caller| caller.token == token) else {
            return;
        };
        let caller = &mut self.callers[index];
        match caller.stream.receive_bytes(&mut caller.greeting[caller.have..]) {
            Moved::Bytes(bytes) => caller.have += bytes,
            Moved::Later => return,
            Moved::Closed => {
                self.callers.remove(index);
                return;
            }
        }
        if caller.have < GREETING_BYTES {
            return;
        }
        let caller = self.callers.remove(index);
        let _ = epoll::delete(&self.shared.thread_set, caller.stream.readiness());
        let Some(hello) = Greeting::decode(&caller.greeting) else { return };
        if hello.role != GreetingRole::Hello {
            return;
        }
        let connection = self.shared.connection(hello.target.0);
        if let Some(connection) = connection.as_ref().and_then(Weak::upgrade)
            && same_nonce(&connection.nonce, &hello.target.1)
            && connection.state() == beeline_fabric::QueuePairState::Init
        {
            connection.with(Mover::Library, |engine| engine.accept(caller.stream, &hello));
        }
    }

    // ---- connections ----

    /// A stream, or the timer, of a queue at rest is ready.
    fn queue_ready(&mut self, token: u64) {
        let Some(index) = self.watched.iter().position(|watched| watched.queue.token == token)
        else {
            return;
        };
        let queue = Arc::clone(&self.watched[index].queue);
        if ticks(&queue) {
            return;
        }
        let activity = queue.activity();
        if activity != self.watched[index].seen_activity || queue.waits() {
            self.watched[index].seen_activity = activity;
            stand_back(&self.shared.thread_set, &queue);
        } else if !self.stand_in(&queue) {
            stand_back(&self.shared.thread_set, &queue);
        }
    }

    fn tick(&mut self) {
        for index in 0..self.watched.len() {
            let queue = Arc::clone(&self.watched[index].queue);
            if !ticks(&queue) {
                continue;
            }
            let activity = queue.activity();
            if activity != self.watched[index].seen_activity {
                self.watched[index].seen_activity = activity;
                continue;
            }
            if self.stand_in(&queue) {
                rest(&self.shared.thread_set, &queue);
                // What came between the two is announced.
                self.shared.transport.before_sleep();
            }
        }
    }

    /// Drives what is ready; false when the application was found in the middle of it.
    fn stand_in(&mut self, queue: &Arc<QueueState>) -> bool {
        self.shared.transport.before_sleep();
        let nothing = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut events = [nothing; 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(queue.streams(), &mut events, Some(&now)).unwrap_or(0);
        let mut alone = true;
        let mut acknowledgements = std::mem::take(&mut self.debtors);
        if queue.has_deferred() {
            queue.take_deferred(&mut acknowledgements);
        }
        for qp_num in acknowledgements.drain(..) {
            let Some(connection) = member(queue, qp_num) else { continue };
            alone &= connection.pay(Mover::Library);
        }
        self.debtors = acknowledgements;
        for event in &events[..count] {
            match event.data.u64() {
                TOKEN_TIMER => {
                    let all: Vec<_> = queue.members().values().cloned().collect();
                    queue.expire(clock::now_ns(), Mover::Library, all.iter());
                }
                TOKEN_NUDGE => {}
                qp_num => {
                    let qp_num = u32::try_from(qp_num).unwrap_or(u32::MAX);
                    let Some(connection) = member(queue, qp_num) else { continue };
                    alone &= connection
                        .try_with(Mover::Library, |engine| engine.drive(BUDGET_BYTES, false))
                        .is_some();
                }
            }
        }
        alone
    }
}

fn member(queue: &QueueState, qp_num: u32) -> Option<Arc<Connection>> {
    queue.members().get(&qp_num).cloned()
}

fn ticks(queue: &QueueState) -> bool {
    queue.library.load(Ordering::SeqCst) == LIBRARY_TICKS
}

/// Leaves the streams of `queue` to the application. They leave the set altogether: a nested set
/// with nothing asked for would still be called for every arriving packet.
fn stand_back(set: &OwnedFd, queue: &QueueState) {
    queue.library.store(LIBRARY_TICKS, Ordering::SeqCst);
    match epoll::delete(set, queue.streams()) {
        // Not there: it was ticking before, or the queue has just been dropped.
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => tracing::warn!(%error, "the library's readiness set kept a queue"),
    }
}

/// Sleeps on the streams of `queue` itself.
fn rest(set: &OwnedFd, queue: &QueueState) {
    queue.library.store(LIBRARY_RESTS, Ordering::SeqCst);
    if queue.has_deferred() {
        queue.library.store(LIBRARY_TICKS, Ordering::SeqCst);
        return;
    }
    let data = EventData::new_u64(queue.token);
    match epoll::add(set, queue.streams(), data, EventFlags::IN) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => {
            tracing::warn!(%error, "the library's readiness set refused a queue");
            queue.library.store(LIBRARY_TICKS, Ordering::SeqCst);
        }
    }
}
