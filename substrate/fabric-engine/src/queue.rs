//! The part of a completion queue that connections and the library's thread reach.
//!
//! ```text
//!  user's epoll ─▶ events (epoll) ─┬─ event (eventfd): completions by other threads, when armed
//!                                  └─ streams (epoll), only while armed
//!  wait() ──────────────────────────▶ streams ─┬─ one stream per queue pair
//!  library's epoll ─────────────────▶ streams  ├─ timer (timerfd): earliest deadline
//!   (unless the application drives)            └─ nudge (eventfd): wakes a sleeping wait()
//! ```

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use beeline_fabric::error::system;
use beeline_fabric::{FabricError, WorkCompletion};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::connection::{Connection, Mover};
use crate::stream::Transport;

/// Event data of the timer in the set of streams.
pub(crate) const TOKEN_TIMER: u64 = u64::MAX;
/// Event data of the nudge.
pub(crate) const TOKEN_NUDGE: u64 = u64::MAX - 1;

/// The library's thread sleeps on the streams of this queue.
pub(crate) const LIBRARY_RESTS: u8 = 0;
/// The library's thread leaves the streams alone and looks in now and then.
pub(crate) const LIBRARY_TICKS: u8 = 1;

/// Makes an eventfd readable. It can only fail when the counter is full: then it is readable.
pub(crate) fn raise(descriptor: &OwnedFd) {
    let _ = rustix::io::write(descriptor, &1_u64.to_ne_bytes());
}

/// Makes an eventfd or timerfd unreadable again.
pub(crate) fn lower(descriptor: &OwnedFd) {
    let _ = rustix::io::read(descriptor, &mut [0_u8; 8]);
}

/// Whether the application must be told of completions by a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It is about to look.
    Quiet,
    /// It may be asleep.
    Signal,
}

#[derive(Debug)]
struct Ring {
    completions: VecDeque<WorkCompletion>,
    overrun: bool,
    /// An event is asked for.
    armed: bool,
    /// `streams` is in `events`. Not before the first time it is asked for: a queue that is only
    /// polled then has no nested set to be called for every packet.
    nested: bool,
    /// The event has been raised.
    raised: bool,
    /// The application sleeps in `wait`, on the set of streams.
    sleeping: bool,
    /// The nudge has been raised.
    nudged: bool,
    /// Queue pairs that owe an acknowledgement.
    deferred: Vec<u32>,
}

#[derive(Debug)]
pub(crate) struct QueueState {
    /// Names the queue in the library's epoll set.
    pub(crate) token: u64,
    depth: u32,
    streams: OwnedFd,
    nudge: OwnedFd,
    timer: OwnedFd,
    /// When the timer fires; `u64::MAX` when it does not.
    timer_ns: AtomicU64,
    timer_setting: Mutex<()>,
    events: OwnedFd,
    event: OwnedFd,
    ring: Mutex<Ring>,
    /// There are completions, or an overrun, to take.
    has_completions: AtomicBool,
    /// Mirror of `!deferred.is_empty()`.
    has_deferred: AtomicBool,
    members: Mutex<HashMap<u32, Arc<Connection>>>,
    /// Counts the application's calls; the library compares it with what it last saw.
    activity: AtomicU64,
    /// The application is, or is about to be, asleep on the streams.
    waits: AtomicBool,
    /// [`LIBRARY_RESTS`] or [`LIBRARY_TICKS`].
    pub(crate) library: AtomicU8,
    /// The library's own eventfd.
    kick: Arc<OwnedFd>,
    pub(crate) transport: Arc<dyn Transport>,
}

impl QueueState {
    pub(crate) fn new(
        token: u64,
        depth: u32,
        kick: Arc<OwnedFd>,
        transport: Arc<dyn Transport>,
    ) -> Result<Self, FabricError> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let streams = epoll::create(CreateFlags::CLOEXEC).map_err(system("creating epoll"))?;
        let events = epoll::create(CreateFlags::CLOEXEC).map_err(system("creating epoll"))?;
        let nudge = eventfd(0, flags).map_err(system("creating an eventfd"))?;
        let event = eventfd(0, flags).map_err(system("creating an eventfd"))?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
        )
        .map_err(system("creating a timer"))?;
        let add = |set: &OwnedFd, source: &OwnedFd, token, flags| {
            epoll::add(set, source, EventData::new_u64(token), flags).map_err(system("epoll_ctl"))
        };
        add(&streams, &nudge, TOKEN_NUDGE, EventFlags::IN)?;
        add(&streams, &timer, TOKEN_TIMER, EventFlags::IN)?;
        add(&events, &event, 0, EventFlags::IN)?;
        Ok(Self {
            token,
            depth,
            streams,
            nudge,
            timer,
            timer_ns: AtomicU64::new(u64::MAX),
            timer_setting: Mutex::new(()),
            events,
            event,
            ring: Mutex::new(Ring {
                completions: VecDeque::with_capacity(depth as usize),
                overrun: false,
                armed: false,
                nested: false,
                raised: false,
                sleeping: false,
                nudged: false,
                deferred: Vec::with_capacity(64),
            }),
            has_completions: AtomicBool::new(false),
            has_deferred: AtomicBool::new(false),
            members: Mutex::default(),
            activity: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            library: AtomicU8::new(LIBRARY_TICKS),
            kick,
            transport,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The epoll set of streams, timer and nudge.
    pub(crate) fn streams(&self) -> BorrowedFd<'_> {
        self.streams.as_fd()
    }

    /// What users wait on.
    pub(crate) fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Queue pairs bound to this queue.
    pub(crate) fn members(&self) -> MutexGuard<'_, HashMap<u32, Arc<Connection>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Entries it holds.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    // ---- completions ----

    /// Moves `completions` in, in order; false when they do not fit, now or earlier.
    pub(crate) fn push(&self, completions: &mut Vec<WorkCompletion>, delivery: Delivery) -> bool {
        if completions.is_empty() {
            return true;
        }
        let mut ring = self.lock();
        for completion in completions.drain(..) {
            if ring.completions.len() >= self.depth as usize {
                ring.overrun = true;
                break;
            }
            ring.completions.push_back(completion);
        }
        // Release: pairs with the acquire load in `take`.
        self.has_completions.store(true, Ordering::Release);
        if delivery == Delivery::Signal {
            self.signal_locked(&mut ring);
        }
        !ring.overrun
    }

    /// Takes completions out. `Err` after an overrun, `Ok(None)` when there are none.
    pub(crate) fn take(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        if !self.has_completions.load(Ordering::Acquire) {
            return Ok(0);
        }
        let mut ring = self.lock();
        if ring.overrun {
            return Err(FabricError::CompletionQueueOverrun { depth_entries: self.depth });
        }
        let count = completions.len().min(ring.completions.len());
        for (slot, completion) in completions.iter_mut().zip(ring.completions.drain(..count)) {
            *slot = completion;
        }
        if ring.completions.is_empty() {
            self.has_completions.store(false, Ordering::Relaxed);
        } else if ring.armed {
            self.signal_locked(&mut ring);
        }
        Ok(count)
    }

    // ---- waking the application ----

    fn signal_locked(&self, ring: &mut Ring) {
        if ring.armed && !ring.raised {
            ring.raised = true;
            raise(&self.event);
        }
        if ring.sleeping {
            ring.sleeping = false;
            ring.nudged = true;
            raise(&self.nudge);
        }
    }

    /// Tells the application that something changed, if it may be asleep.
    pub(crate) fn signal(&self) {
        self.signal_locked(&mut self.lock());
    }

    /// Asks for an event.
    pub(crate) fn arm(&self) -> Result<(), FabricError> {
        let mut ring = self.lock();
        if !ring.armed {
            let (data, flags) = (EventData::new_u64(1), EventFlags::IN);
            let change = if ring.nested { epoll::modify } else { epoll::add };
            change(&self.events, &self.streams, data, flags).map_err(system("epoll_ctl"))?;
            ring.nested = true;
            ring.armed = true;
            self.waits.store(true, Ordering::SeqCst);
            drop(ring);
            self.transport.before_sleep();
        }
        Ok(())
    }

    /// Takes the event back.
    pub(crate) fn acknowledge(&self) -> Result<(), FabricError> {
        let mut ring = self.lock();
        if ring.armed {
            let (data, flags) = (EventData::new_u64(1), EventFlags::empty());
            epoll::modify(&self.events, &self.streams, data, flags).map_err(system("epoll_ctl"))?;
            ring.armed = false;
            self.waits.store(false, Ordering::SeqCst);
        }
        if std::mem::take(&mut ring.raised) {
            lower(&self.event);
        }
        Ok(())
    }

    /// The application is going to sleep on the streams; false when there is no need to.
    pub(crate) fn begin_sleep(&self, even_with_completions: bool) -> bool {
        let mut ring = self.lock();
        let needed = even_with_completions || (ring.completions.is_empty() && !ring.overrun);
        ring.sleeping = needed;
        self.waits.store(needed || ring.armed, Ordering::SeqCst);
        drop(ring);
        if needed {
            self.transport.before_sleep();
        }
        needed
    }

    /// It woke.
    pub(crate) fn end_sleep(&self) {
        let mut ring = self.lock();
        ring.sleeping = false;
        if std::mem::take(&mut ring.nudged) {
            lower(&self.nudge);
        }
        self.waits.store(ring.armed, Ordering::SeqCst);
    }

    /// Around a sleep on one stream; completions by other threads are impossible meanwhile.
    pub(crate) fn set_waits(&self, waits: bool) {
        self.waits.store(waits, Ordering::SeqCst);
    }

    // ---- who drives ----

    /// The application is here.
    pub(crate) fn note_activity(&self) {
        // One writer; the library only compares.
        let seen = self.activity.load(Ordering::Relaxed);
        self.activity.store(seen.wrapping_add(1), Ordering::Relaxed);
    }

    pub(crate) fn activity(&self) -> u64 {
        self.activity.load(Ordering::Relaxed)
    }

    /// True while the application sleeps where the streams wake it.
    pub(crate) fn waits(&self) -> bool {
        self.waits.load(Ordering::SeqCst)
    }

    // ---- acknowledgements that are put off ----

    /// Notes that `qp_num` owes an acknowledgement. If the application does not come back soon,
    /// the library pays: it must not be at rest, since no byte may ever arrive to wake it.
    pub(crate) fn defer(&self, qp_num: u32) {
        self.lock().deferred.push(qp_num);
        // Sequentially consistent, against the store of LIBRARY_RESTS and the load of
        // `has_deferred` in the library: one of the two sees the other.
        self.has_deferred.store(true, Ordering::SeqCst);
        if self.library.load(Ordering::SeqCst) == LIBRARY_RESTS {
            raise(&self.kick);
        }
    }

    /// True when acknowledgements are put off.
    pub(crate) fn has_deferred(&self) -> bool {
        self.has_deferred.load(Ordering::SeqCst)
    }

    /// Moves the list of debtors to `into`, which is empty.
    pub(crate) fn take_deferred(&self, into: &mut Vec<u32>) {
        let mut ring = self.lock();
        std::mem::swap(&mut ring.deferred, into);
        self.has_deferred.store(false, Ordering::SeqCst);
    }

    // ---- deadlines ----

    /// Makes sure somebody looks at the deadlines at `deadline_ns`. A system call only when that
    /// is earlier than anybody would.
    pub(crate) fn schedule(&self, deadline_ns: u64) {
        if deadline_ns >= self.timer_ns.load(Ordering::Relaxed) {
            return;
        }
        let _setting = self.timer_setting.lock().unwrap_or_else(PoisonError::into_inner);
        if deadline_ns < self.timer_ns.load(Ordering::Relaxed) {
            self.timer_ns.store(deadline_ns, Ordering::Relaxed);
            self.set_timer(deadline_ns);
        }
    }

    fn set_timer(&self, at_ns: u64) {
        let it_value = Timespec {
            tv_sec: i64::try_from(at_ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (at_ns % 1_000_000_000) as _,
        };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval, it_value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &spec) {
            tracing::warn!(%error, "the timer could not be set");
        }
    }

    /// When the timer fires.
    pub(crate) fn timer_ns(&self) -> u64 {
        self.timer_ns.load(Ordering::Relaxed)
    }

    /// Looks at the deadlines of `connections`, which are all of this queue's, if it is time.
    pub(crate) fn expire<'a>(
        &self,
        now_ns: u64,
        mover: Mover,
        connections: impl Iterator<Item = &'a Arc<Connection>>,
    ) {
        {
            let _setting = self.timer_setting.lock().unwrap_or_else(PoisonError::into_inner);
            if now_ns < self.timer_ns.load(Ordering::Relaxed) {
                return;
            }
            lower(&self.timer);
            self.timer_ns.store(u64::MAX, Ordering::Relaxed);
        }
        for connection in connections {
            // Settling schedules the next deadline.
            if connection.try_with(mover, |engine| engine.check_deadlines(now_ns)).is_none() {
                self.schedule(now_ns + 10_000_000);
            }
        }
    }
}
