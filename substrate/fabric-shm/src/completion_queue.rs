//! Completion queues: local completions, polling of hot queue pairs, sleep.
//!
//! A queue pair bound to the queue is *hot* (looked at by every poll) or *cold* (its peer rings a
//! doorbell that sits in the queue's epoll set). Up to `always_hot` quiet queue pairs stay hot;
//! beyond that, one that was quiet for [`QUIET_POLLS`] polls goes cold: by the ski-rental rule,
//! once the looks have cost as much as going cold and being heard again would. Many go cold
//! together, because each time takes a heavy fence. [`Queue::arm`] makes every hot one's peer ring
//! as well.
//!
//! No wake-up is lost: going cold and arming store the armed word, run the heavy fence, and then
//! look at the ring again (arming: the caller's poll does). The peer stores the slot, runs the
//! light fence, and then looks at the armed word. Whichever fence comes first in the total order,
//! the other side's look sees its store. What this thread itself does after arming (a post that
//! completes, a receive posted for a message that waits) signals the queue's own waker.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::error::system;
use beeline_fabric::{CompletionQueue, FabricError, WorkCompletion};
use beeline_os::barrier;
use beeline_os::doorbell::Rung;
use beeline_os::patience::Patience;
use beeline_os::poller::{Interest, Poller};
use rustix::event::Timespec;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use crate::config::ShmConfig;
use crate::core::{Core, Heat};
use crate::link::QueueSignal;

/// Polls without news after which a queue pair may go cold: a look at a quiet one takes about 10 ns, and a
/// message to a cold one about 10 us of system calls at both ends.
const QUIET_POLLS: u32 = 1024;
/// Quiet queue pairs go cold where they are at least one of so many hot ones, or at a rare poll.
const COOLED_TOGETHER: usize = 8;
/// Polls at which quiet queue pairs go cold however few they are.
const POLLS_PER_COOLING: u32 = 1024;
/// Polls between looks at the doorbells of cold queue pairs.
const POLLS_PER_LOOK: u32 = 128;
/// Waiting requests look at the clock once per this many polls.
const POLLS_PER_CLOCK: u32 = 64;

const _: () = assert!(POLLS_PER_LOOK.is_multiple_of(POLLS_PER_CLOCK), "looks are rare polls too");

const SIGNAL: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

#[derive(Debug)]
struct Entry {
    completion: WorkCompletion,
    /// The queue pair whose send queue it frees.
    member: u32,
}

/// The queue itself, shared by its handle and its queue pairs.
#[derive(Debug)]
pub(crate) struct Queue {
    depth: usize,
    always_hot: usize,
    spin: Duration,
    pub signal: Arc<QueueSignal>,
    poller: RefCell<Poller>,
    /// A second descriptor of the epoll set, to lend out.
    descriptor: OwnedFd,
    timer: OwnedFd,
    entries: RefCell<VecDeque<Entry>>,
    /// How many those are: most polls need not look at them.
    local: Cell<usize>,
    members: RefCell<Vec<Option<Rc<Core>>>>,
    free: RefCell<Vec<u32>>,
    hot: RefCell<Vec<(u32, Rc<Core>)>>,
    /// To become hot when the list is not being walked.
    late: RefCell<Vec<u32>>,
    news: RefCell<Vec<u32>>,
    turn: Cell<usize>,
    polls: Cell<u32>,
    cold: Cell<u32>,
    armed: Cell<bool>,
    clock_due: Cell<bool>,
    overrun: Cell<bool>,
    /// Something waits for the next poll that most polls need not ask after: an overrun, queue
    /// pairs to heat, a clock that is due.
    rare: Cell<bool>,
    generation: Cell<u32>,
    patience: Cell<Patience>,
}

impl Queue {
    fn new(depth_entries: u32, config: &ShmConfig) -> Result<Self, FabricError> {
        let poller = Poller::new(64).map_err(system("creating an epoll set"))?;
        let signal = Arc::new(QueueSignal::new().map_err(system("creating an event descriptor"))?);
        let timer = rustix::time::timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )
        .map_err(system("creating a timer"))?;
        let watch = |fd: BorrowedFd<'_>, token| poller.add(fd, token, Interest::READ);
        watch(signal.waker.as_fd(), SIGNAL).map_err(system("watching an event descriptor"))?;
        watch(timer.as_fd(), TIMER).map_err(system("watching a timer"))?;
        let descriptor = poller.as_fd().try_clone_to_owned().map_err(system("duplicating"))?;
        Ok(Self {
            depth: depth_entries as usize,
            always_hot: config.always_hot as usize,
            spin: config.spin,
            signal,
            poller: RefCell::new(poller),
            descriptor,
            timer,
            entries: RefCell::new(VecDeque::with_capacity(depth_entries as usize)),
            local: Cell::new(0),
            members: RefCell::new(Vec::new()),
            free: RefCell::new(Vec::new()),
            hot: RefCell::new(Vec::new()),
            late: RefCell::new(Vec::new()),
            news: RefCell::new(Vec::new()),
            turn: Cell::new(0),
            polls: Cell::new(0),
            cold: Cell::new(0),
            armed: Cell::new(false),
            clock_due: Cell::new(false),
            overrun: Cell::new(false),
            rare: Cell::new(false),
            generation: Cell::new(0),
            patience: Cell::default(),
        })
    }

    /// A place for a queue pair.
    pub(crate) fn reserve(&self) -> u32 {
        if let Some(free) = self.free.borrow_mut().pop() {
            return free;
        }
        let mut members = self.members.borrow_mut();
        members.push(None);
        u32::try_from(members.len() - 1).unwrap_or(u32::MAX)
    }

    pub(crate) fn join(&self, member: u32, core: &Rc<Core>) {
        self.members.borrow_mut()[member as usize] = Some(Rc::clone(core));
    }

    /// The queue pair is gone; its completions stay.
    pub(crate) fn leave(&self, member: u32) {
        let mut hot = self.hot.borrow_mut();
        if let Some(place) = hot.iter().position(|(other, _)| *other == member) {
            hot.swap_remove(place);
        }
        drop(hot);
        if self.member(member).is_some_and(|core| core.heat_in(self).get() == Heat::Cold) {
            self.cold.set(self.cold.get().saturating_sub(1));
        }
        for entry in self.entries.borrow_mut().iter_mut().filter(|entry| entry.member == member) {
            entry.member = u32::MAX;
        }
        self.members.borrow_mut()[member as usize] = None;
        self.free.borrow_mut().push(member);
    }

    fn member(&self, member: u32) -> Option<Rc<Core>> {
        self.members.borrow().get(member as usize).cloned().flatten()
    }

    /// Watches a queue pair's doorbell.
    pub(crate) fn watch(&self, member: u32, doorbell: BorrowedFd<'_>) {
        // Fails only at a kernel limit; the queue pair then stays hot for good.
        let _ = self.poller.borrow().add(doorbell, u64::from(member), Interest::READ);
    }

    /// Has every poll look at the queue pair.
    pub(crate) fn heat(&self, member: u32) {
        let Some(core) = self.member(member) else { return };
        let heat = core.heat_in(self);
        if heat.get() == Heat::Hot {
            return;
        }
        let Ok(mut hot) = self.hot.try_borrow_mut() else {
            self.late.borrow_mut().push(member);
            self.rare.set(true);
            return;
        };
        hot.push((member, Rc::clone(&core)));
        if heat.replace(Heat::Hot) == Heat::Cold {
            self.cold.set(self.cold.get().saturating_sub(1));
        }
        core.quiet_polls.set(0);
        if !self.armed.get() {
            core.disarm(self);
        }
    }

    #[cold]
    fn heat_late(&self) {
        for member in self.late.take() {
            self.heat(member);
        }
    }

    /// Errors: [`FabricError::CompletionQueueOverrun`].
    pub(crate) fn check(&self) -> Result<(), FabricError> {
        if self.overrun.get() { Err(self.overrun_error()) } else { Ok(()) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.local.get() == 0
    }

    /// Adds a local completion. False when the queue overran.
    #[inline(always)]
    pub(crate) fn push(&self, member: u32, completion: WorkCompletion) -> bool {
        let mut entries = self.entries.borrow_mut();
        if entries.len() == self.depth {
            drop(entries);
            self.overrun();
            return false;
        }
        entries.push_back(Entry { completion, member });
        self.local.set(entries.len());
        drop(entries);
        self.signal_if_armed();
        true
    }

    #[cold]
    fn overrun(&self) {
        self.rare.set(true);
        if !self.overrun.replace(true) {
            for core in self.members.borrow().iter().flatten() {
                core.break_if_idle();
            }
            self.signal_if_armed();
        }
    }

    #[inline(always)]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.get()
    }

    /// Makes the event for something this thread did itself.
    #[inline(always)]
    pub(crate) fn signal_if_armed(&self) {
        if self.armed.get() {
            self.armed.set(false);
            self.signal.waker.wake();
        }
    }

    /// Moves local completions out.
    #[inline(always)]
    fn drain(&self, out: &mut [WorkCompletion]) -> usize {
        if self.is_empty() { 0 } else { self.drain_some(out) }
    }

    #[inline(never)]
    fn drain_some(&self, out: &mut [WorkCompletion]) -> usize {
        let mut entries = self.entries.borrow_mut();
        let members = self.members.borrow();
        let mut count = 0;
        while count < out.len()
            && let Some(entry) = entries.pop_front()
        {
            out[count] = entry.completion;
            count += 1;
            if let Some(Some(core)) = members.get(entry.member as usize) {
                core.outstanding.set(core.outstanding.get().saturating_sub(1));
            }
        }
        self.local.set(entries.len());
        count
    }

    #[cold]
    fn attend(&self) {
        let mut news = self.news.take();
        self.signal.take(&mut news);
        for member in news.drain(..) {
            if let Some(core) = self.member(member) {
                core.attend();
                self.heat(member);
            }
        }
        self.news.replace(news);
    }

    #[inline(always)]
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        let polls = self.polls.get().wrapping_add(1);
        self.polls.set(polls);
        let rare =
            self.rare.get() || self.signal.has_news() || polls.is_multiple_of(POLLS_PER_CLOCK);
        if rare {
            let check_clock = self.attend_rarely(polls)?;
            return self.poll_several(out, 0, check_clock);
        }
        if !self.is_empty() {
            let count = self.drain_some(out);
            if count == out.len() {
                // There may be more than the caller took.
                self.signal_if_armed();
                return Ok(count);
            }
            return self.poll_several(out, count, false);
        }
        if !out.is_empty() {
            let hot = self.hot.borrow();
            // Clients mostly have one.
            if let [(_, core)] = &hot[..]
                && let Some(count) = core.progress_at_once(self, out)
            {
                let quiet = core.quiet_polls.get().saturating_add(1);
                core.quiet_polls.set(if count == 0 { quiet } else { 0 });
                if count == out.len() {
                    // There may be more than the caller took.
                    self.signal_if_armed();
                }
                return Ok(count);
            }
        }
        self.poll_several(out, 0, false)
    }

    /// [`Queue::poll`] where there is more to look at than one queue pair that only receives; `count`
    /// completions are there already.
    #[inline(never)]
    fn poll_several(
        &self,
        out: &mut [WorkCompletion],
        mut count: usize,
        check_clock: bool,
    ) -> Result<usize, FabricError> {
        count += self.drain(&mut out[count..]);
        if count < out.len() {
            count += self.look_at_hot(&mut out[count..], check_clock);
            if count < out.len() {
                count += self.drain(&mut out[count..]);
            }
        }
        if self.overrun.get() {
            return Err(self.break_all());
        }
        if count == out.len() {
            // There may be more than the caller took.
            self.signal_if_armed();
        }
        Ok(count)
    }

    /// What few polls have to do before they look; returns whether waiting requests look at the
    /// clock.
    #[cold]
    fn attend_rarely(&self, polls: u32) -> Result<bool, FabricError> {
        if self.overrun.get() {
            return Err(self.break_all());
        }
        self.rare.set(false);
        if self.signal.has_news() {
            self.attend();
        }
        if !self.late.borrow().is_empty() {
            self.heat_late();
        }
        if self.cold.get() > 0 && polls.is_multiple_of(POLLS_PER_LOOK) && !self.armed.get() {
            self.hear_doorbells();
        }
        Ok(polls.is_multiple_of(POLLS_PER_CLOCK) || self.clock_due.replace(false))
    }

    #[inline(always)]
    fn look_at_hot(&self, out: &mut [WorkCompletion], check_clock: bool) -> usize {
        let mut count = 0;
        let (mut finished, mut due) = (false, 0);
        let hot = self.hot.borrow();
        let total = hot.len();
        let mut place = self.turn.get();
        for _ in 0..total {
            place = if place + 1 >= total { 0 } else { place + 1 };
            let (_, core) = &hot[place];
            let progress = core.progress(self, &mut out[count..], check_clock);
            count += progress.completions;
            if progress.quiet {
                let quiet = core.quiet_polls.get().saturating_add(1);
                core.quiet_polls.set(quiet);
                finished |= progress.finished;
                due += usize::from(quiet >= QUIET_POLLS);
            } else {
                core.quiet_polls.set(0);
            }
            if count == out.len() {
                break;
            }
        }
        drop(hot);
        self.turn.set(place);
        let spare = due > 0 && total > self.always_hot;
        let together = spare
            && (due * COOLED_TOGETHER >= total
                || self.polls.get().is_multiple_of(POLLS_PER_COOLING));
        if (finished || together) && !self.armed.get() {
            self.cool(total);
        }
        count
    }

    /// Takes quiet queue pairs off the list. One fence for all of them.
    #[cold]
    fn cool(&self, total: usize) {
        let mut hot = self.hot.borrow_mut();
        let mut spare = total.saturating_sub(self.always_hot);
        let mut candidates = Vec::new();
        let generation = self.next_generation();
        hot.retain(|(member, core)| {
            if core.is_finished() {
                core.heat_in(self).set(Heat::Out);
                return false;
            }
            if spare > 0 && core.quiet_polls.get() >= QUIET_POLLS && core.can_sleep() {
                spare -= 1;
                core.arm(self, generation);
                candidates.push((*member, Rc::clone(core)));
                return false;
            }
            true
        });
        if candidates.is_empty() {
            return;
        }
        barrier::heavy();
        for (member, core) in candidates {
            if core.has_message() {
                core.disarm(self);
                core.quiet_polls.set(0);
                hot.push((member, core));
            } else {
                core.heat_in(self).set(Heat::Cold);
                self.cold.set(self.cold.get() + 1);
            }
        }
    }

    fn next_generation(&self) -> u32 {
        let next = self.generation.get().wrapping_add(1).max(1);
        self.generation.set(next);
        next
    }

    /// Every queue pair of an overrun queue is broken.
    #[cold]
    fn break_all(&self) -> FabricError {
        let members: Vec<_> = self.members.borrow().iter().flatten().cloned().collect();
        for core in members {
            core.break_if_idle();
        }
        self.overrun_error()
    }

    fn overrun_error(&self) -> FabricError {
        FabricError::CompletionQueueOverrun {
            depth_entries: u32::try_from(self.depth).unwrap_or(u32::MAX),
        }
    }

    /// Takes what the epoll set reports: rung queue pairs become hot.
    fn hear_doorbells(&self) {
        loop {
            let Ok(count) = self.poller.borrow_mut().wait(Some(Duration::ZERO)) else { return };
            if !self.take_rung(count) {
                return;
            }
        }
    }

    /// Takes the `count` pieces of news that the epoll set reported last; whether there may be more.
    fn take_rung(&self, count: usize) -> bool {
        let mut rung = [0; 64];
        let count = count.min(rung.len());
        let poller = self.poller.borrow();
        for (index, token) in rung[..count].iter_mut().enumerate() {
            *token = poller.readiness(index).token;
        }
        drop(poller);
        for &token in &rung[..count] {
            match token {
                SIGNAL => self.signal.waker.clear(),
                TIMER => {
                    let _ = rustix::io::read(&self.timer, &mut [0_u8; 8]);
                    self.clock_due.set(true);
                    self.rare.set(true);
                }
                token => self.hear(u32::try_from(token).unwrap_or(u32::MAX)),
            }
        }
        count == rung.len()
    }

    fn hear(&self, member: u32) {
        let Some(core) = self.member(member) else { return };
        let rung = core.clear_doorbell();
        if rung == Rung::Closed {
            core.with_doorbell(|doorbell| {
                let _ = self.poller.borrow().remove(doorbell);
            });
        }
        core.heat_both(Some(self));
    }

    fn arm(&self) -> Result<(), FabricError> {
        self.armed.set(true);
        let generation = self.next_generation();
        let mut deadline: Option<Instant> = None;
        let hot = self.hot.borrow();
        for (_, core) in hot.iter() {
            core.arm(self, generation);
            if let Some(due) = core.deadline() {
                deadline = Some(deadline.map_or(due, |earlier| earlier.min(due)));
            }
        }
        if !hot.is_empty() {
            barrier::heavy();
        }
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            self.set_timer(left.max(Duration::from_micros(1)))?;
        }
        Ok(())
    }

    fn set_timer(&self, after: Duration) -> Result<(), FabricError> {
        let value = Timespec {
            tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(after.subsec_nanos()),
        };
        let interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timer = Itimerspec { it_interval: interval, it_value: value };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer)
            .map_err(system("setting a timer"))?;
        Ok(())
    }

    /// Peers of hot queue pairs need not ring any more.
    fn disarm(&self) {
        self.armed.set(false);
        for (_, core) in self.hot.borrow().iter() {
            core.disarm(self);
        }
    }

    fn acknowledge(&self) {
        self.disarm();
        self.hear_doorbells();
    }

    /// Sleeps until the event or the deadline, and clears the event.
    fn sleep(&self, deadline: Instant) -> Result<(), FabricError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let slept = self.poller.borrow_mut().wait(Some(left));
        let count = slept.map_err(system("waiting for completions"))?;
        self.disarm();
        if self.take_rung(count) {
            self.hear_doorbells();
        }
        Ok(())
    }

    /// [`Queue::poll`], for those that do not mind a call.
    #[inline(never)]
    fn look(&self, out: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        self.poll(out)
    }

    /// Polls until something came, it is too late, or the processor is found crowded.
    fn poll_until(
        &self,
        out: &mut [WorkCompletion],
        end: Instant,
        patience: &mut Patience,
    ) -> Result<usize, FabricError> {
        let mut looks = 0_u32;
        let mut yielded_ns = 0;
        while !looks.is_multiple_of(32) || Instant::now() < end {
            let count = self.look(out)?;
            if count > 0 {
                return Ok(count);
            }
            if !patience.goes_on(std::mem::take(&mut yielded_ns)) {
                return Ok(0);
            }
            looks += 1;
            // With more threads than processors the peer may need this one.
            if looks.is_multiple_of(64) {
                let before = Instant::now();
                std::thread::yield_now();
                yielded_ns = u64::try_from(before.elapsed().as_nanos()).unwrap_or(u64::MAX);
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(0)
    }

    fn wait(&self, out: &mut [WorkCompletion], timeout: Duration) -> Result<usize, FabricError> {
        let count = self.look(out)?;
        if count > 0 || timeout == Duration::ZERO {
            return Ok(count);
        }
        let start = Instant::now();
        let deadline = start.checked_add(timeout).unwrap_or(start + Duration::from_secs(1 << 30));
        let mut patience = self.patience.get();
        if patience.begins() {
            let spin_end = deadline.min(start + self.spin);
            let count = self.poll_until(out, spin_end, &mut patience)?;
            if count > 0 {
                return Ok(count);
            }
        }
        self.patience.set(patience);
        loop {
            self.arm()?;
            let count = self.look(out)?;
            if count > 0 {
                self.disarm();
                return Ok(count);
            }
            self.sleep(deadline)?;
            let count = self.look(out)?;
            if count > 0 || Instant::now() >= deadline {
                return Ok(count);
            }
        }
    }
}

/// The handle.
#[derive(Debug)]
pub(crate) struct ShmCompletionQueue(Rc<Queue>);

impl ShmCompletionQueue {
    pub(crate) fn create(
        depth_entries: u32,
        config: &ShmConfig,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        Ok(Rc::new(Self(Rc::new(Queue::new(depth_entries, config)?))))
    }

    pub(crate) fn of(queue: &dyn CompletionQueue) -> Option<Rc<Queue>> {
        queue.as_any().downcast_ref::<Self>().map(|queue| Rc::clone(&queue.0))
    }
}

impl CompletionQueue for ShmCompletionQueue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        self.0.poll(completions)
    }

    fn arm(&self) -> Result<(), FabricError> {
        self.0.arm()
    }

    fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor.as_fd()
    }

    fn acknowledge(&self) -> Result<(), FabricError> {
        self.0.acknowledge();
        Ok(())
    }

    fn wait(
        &self,
        completions: &mut [WorkCompletion],
        timeout: Duration,
    ) -> Result<usize, FabricError> {
        self.0.wait(completions, timeout)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use beeline_fabric::{
        Device, LocalData, Operation, QueuePair, QueuePairOptions, ReceiveRequest, Role,
        WorkRequest,
    };

    use super::*;
    use crate::ShmDevice;

    const BOUND: Duration = Duration::from_secs(10);

    /// Two ends, one at each queue.
    fn connected(
        device: &Arc<dyn Device>,
        queues: [&Rc<dyn CompletionQueue>; 2],
    ) -> [Box<dyn QueuePair>; 2] {
        let domain = device.allocate_protection_domain().unwrap();
        let mut ends = queues.map(|queue| {
            domain.create_queue_pair(queue, queue, None, QueuePairOptions::default()).unwrap()
        });
        let infos = [ends[0].connect_info(), ends[1].connect_info()];
        ends[0].connect(&infos[1], Role::Active).unwrap();
        ends[1].connect(&infos[0], Role::Passive).unwrap();
        for end in &mut ends {
            end.wait_connected(BOUND).unwrap();
        }
        ends
    }

    #[test]
    fn what_is_used_now_and_then_stays_hot_and_what_is_idle_goes_cold() {
        let config = ShmConfig { always_hot: 2, ..ShmConfig::default() };
        let device = ShmDevice::open(config).unwrap();
        let queues = [(); 2].map(|()| device.create_completion_queue(256).unwrap());
        let [here, there] = &queues;
        let mut pairs: Vec<_> = (0..8).map(|_| connected(&device, [here, there])).collect();
        let queue = ShmCompletionQueue::of(&**here).unwrap();
        let used = pairs[0][0].qp_num();
        let mut out = [WorkCompletion::EMPTY; 8];
        for round in 0..8 {
            for _ in 0..600 {
                assert_eq!(queue.poll(&mut out).unwrap(), 0);
            }
            let is_used = |(_, core): &(u32, Rc<Core>)| core.link.qp_num == used;
            assert!(queue.hot.borrow().iter().any(is_used), "round {round}");
            let [ours, theirs] = &mut pairs[0];
            ours.post_receive(&[ReceiveRequest { wr_id: round, buffer: None }]).unwrap();
            let send = Operation::Send { local: LocalData::Inline(&[]), immediate: Some(7) };
            theirs.post_send(&[WorkRequest::unsignalled(round, send)]).unwrap();
            let found = (0..100).map(|_| queue.poll(&mut out).unwrap()).find(|&n| n > 0);
            assert_eq!(found, Some(1), "it is found without its doorbell");
        }
        assert_eq!(queue.cold.get(), 6, "two may stay hot");
    }
}
