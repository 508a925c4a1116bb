//! Completion queues: the device's, and what the library adds to it.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_fabric::error::system;
use beeline_fabric::{CompletionQueue, FabricError, Opcode, WorkCompletion};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::abi;
use crate::core::{Core, Kind, Tag};
use crate::device::DeviceHandle;
use crate::handle::{Pair, Queue};
use crate::receive_queue::SharedCore;
use crate::shared::{Cause, QueueShared};
use crate::wake::Wake;

/// Completions taken from the device at a time.
const BATCH: usize = 32;
/// Polls before `wait` sleeps.
const SPINS: u32 = 200;

/// Queue pairs by their place.
#[derive(Debug, Default)]
struct Members {
    places: Vec<(u16, Option<Rc<Core>>)>,
    free: Vec<u32>,
    /// By the device's number, for completions of shared receives.
    by_hardware: HashMap<u32, u32>,
    shared_receives: Vec<(u32, Rc<SharedCore>)>,
}

/// A reset queue pair of the device, waiting for its next owner.
#[derive(Debug)]
pub(crate) struct Parked {
    pub(crate) pair: Pair,
    pub(crate) tag: usize,
    /// What it is bound to: domain, receive queue, shared receives (addresses of their owners).
    pub(crate) bound: (usize, usize, usize),
    pub(crate) asked: abi::QpCap,
}

#[derive(Debug)]
pub(crate) struct VerbsCompletionQueue {
    pub(crate) shared: Arc<QueueShared>,
    pub(crate) device: Arc<DeviceHandle>,
    tag: usize,
    depth: u32,
    raw: RefCell<Box<[abi::Wc; BATCH]>>,
    ready: RefCell<VecDeque<WorkCompletion>>,
    members: RefCell<Members>,
    parked: RefCell<Vec<Parked>>,
    overrun_seen: Cell<bool>,
    abandoned: Cell<bool>,
}

impl VerbsCompletionQueue {
    pub(crate) fn new(
        device: Arc<DeviceHandle>,
        tag: usize,
        depth: u32,
    ) -> Result<Self, FabricError> {
        // Room for the reports the library asks for of its own on silent requests.
        let entries = depth.saturating_add(depth / 2).saturating_add(16);
        let entries = entries.min(device.max_completion_queue_depth);
        let context = Arc::clone(&device.board.context);
        let hardware = Queue::new(context, entries, tag).map_err(|source| FabricError::System {
            action: "creating a completion queue",
            source,
        })?;
        if let Some((count, period_us)) = device.config.moderation
            && !hardware.moderate(count, period_us)
        {
            tracing::debug!("the device does not moderate completion events");
        }
        let wake = Wake::new()?;
        let events = epoll::create(CreateFlags::CLOEXEC).map_err(system("creating epoll"))?;
        for source in [hardware.descriptor(), wake.as_fd()] {
            epoll::add(&events, source, EventData::new_u64(0), EventFlags::IN)
                .map_err(system("epoll_ctl"))?;
        }
        let shared = Arc::new(QueueShared {
            hardware: Arc::new(hardware),
            overrun: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            overdue: AtomicBool::new(false),
            wake,
            events,
        });
        device.board.add_queue(tag, &shared);
        // Looked at once the library's thread can find the queue: a loss before is seen here, one
        // after is told. Acquire: pairs with the release store of that thread.
        if device.board.lost.load(Ordering::Acquire) {
            shared.lost.store(true, Ordering::Release);
        }
        Ok(Self {
            shared,
            device,
            tag,
            depth,
            raw: RefCell::new(Box::new([abi::Wc::default(); BATCH])),
            ready: RefCell::new(VecDeque::with_capacity(depth as usize)),
            members: RefCell::default(),
            parked: RefCell::default(),
            overrun_seen: Cell::new(false),
            abandoned: Cell::new(false),
        })
    }

    /// A place for a queue pair that is about to be made.
    pub(crate) fn reserve(&self) -> (u32, u16) {
        let members = &mut *self.members.borrow_mut();
        match members.free.pop() {
            Some(place) => (place, members.places[place as usize].0),
            None => {
                // Below 2^22: the device's limit on queue pairs is far less.
                let place = members.places.len() as u32;
                members.places.push((0, None));
                (place, 0)
            }
        }
    }

    /// Puts a queue pair at its place.
    pub(crate) fn add(&self, place: u32, core: &Rc<Core>) {
        let members = &mut *self.members.borrow_mut();
        members.by_hardware.insert(core.hardware_number, place);
        members.places[place as usize].1 = Some(Rc::clone(core));
        if let Some(shared) = &core.shared_receives
            && members.shared_receives.iter().all(|(number, _)| *number != shared.number)
        {
            members.shared_receives.push((shared.number, Rc::clone(shared)));
        }
    }

    /// Gives a place back; completions of its queue pair are seen no more.
    pub(crate) fn remove(&self, place: u32) {
        let members = &mut *self.members.borrow_mut();
        let (generation, core) = &mut members.places[place as usize];
        *generation = generation.wrapping_add(1);
        let core = core.take();
        members.free.push(place);
        let Some(core) = core else { return };
        let number = core.hardware_number;
        if members.by_hardware.get(&number) == Some(&place) {
            members.by_hardware.remove(&number);
        }
        let shares = core.shared_receives.is_some();
        let gone = core.shared.number;
        drop(core);
        // What the device has consumed and not reported yet is to be found: a queue of shared
        // receives is known for as long as its handle or a queue pair has it.
        members.shared_receives.retain(|(_, shared)| Rc::strong_count(shared) > 1);
        // A message in a shared receive that was taken from the device is reported: its receive
        // has nobody else to come back to.
        self.ready.borrow_mut().retain(|completion| {
            let arrived =
                matches!(completion.opcode, Opcode::Receive | Opcode::ReceiveWithImmediate);
            completion.qp_num != gone || (shares && arrived)
        });
    }

    /// Keeps a reset queue pair for the next one of its kind.
    pub(crate) fn park(&self, parked: Parked) {
        let mut all = self.parked.borrow_mut();
        if all.len() < self.device.config.reused_queue_pairs {
            all.push(parked);
        }
    }

    /// A parked queue pair of that kind.
    pub(crate) fn unpark(
        &self,
        bound: (usize, usize, usize),
        asked: abi::QpCap,
    ) -> Option<(Pair, usize)> {
        let mut all = self.parked.borrow_mut();
        let index = all.iter().position(|parked| parked.bound == bound && parked.asked == asked)?;
        let parked = all.swap_remove(index);
        Some((parked.pair, parked.tag))
    }

    /// Adds a completion that the device did not make.
    pub(crate) fn push(&self, completion: WorkCompletion) {
        self.ready.borrow_mut().push_back(completion);
        self.shared.wake.raise();
    }

    fn dispatch(&self, wc: &abi::Wc, deliver: &mut impl FnMut(WorkCompletion)) {
        let tag = Tag::decode(wc.wr_id);
        let members = self.members.borrow();
        if tag.kind == Kind::Shared {
            let found = members.shared_receives.iter().find(|(number, _)| *number == tag.place);
            let Some((_, shared)) = found else { return };
            let place = members.by_hardware.get(&wc.qp_num);
            let core = place.and_then(|place| members.places[*place as usize].1.as_ref());
            let Some(core) = core else {
                // Its queue pair is gone; the receive is the others'.
                shared.give_back(tag.entry);
                return;
            };
            if let Some(wr_id) = shared.consumed(tag.entry) {
                deliver(core.arrival(wr_id, wc));
            }
            return;
        }
        let Some((generation, Some(core))) = members.places.get(tag.place as usize) else { return };
        if *generation != tag.generation {
            return;
        }
        match tag.kind {
            Kind::Send => core.sent(tag.entry, wc, deliver),
            _ => core.received(tag.entry, wc, deliver),
        }
    }

    /// Moves completions into `into`, what does not fit into `ready`; returns how many.
    fn take(&self, into: &mut [WorkCompletion]) -> usize {
        let mut ready = self.ready.borrow_mut();
        let mut count = 0;
        while count < into.len()
            && let Some(completion) = ready.pop_front()
        {
            into[count] = completion;
            count += 1;
        }
        let raw = &mut **self.raw.borrow_mut();
        while count < into.len() {
            let room = (into.len() - count).min(BATCH);
            let Ok(found) = self.shared.hardware.poll(&mut raw[..room]) else {
                // The driver cannot read its queue any more: the same as an overrun, unless there
                // is no device behind it.
                if !self.shared.lost.load(Ordering::Acquire) {
                    self.shared.overrun.store(true, Ordering::Release);
                }
                break;
            };
            for wc in &raw[..found] {
                self.dispatch(wc, &mut |completion| {
                    if count < into.len() {
                        into[count] = completion;
                        count += 1;
                    } else {
                        ready.push_back(completion);
                    }
                });
            }
            if found < room {
                break;
            }
        }
        count
    }

    /// Takes what the device has, for later.
    pub(crate) fn gather(&self) {
        let ready = &mut *self.ready.borrow_mut();
        let raw = &mut **self.raw.borrow_mut();
        while let Ok(found) = self.shared.hardware.poll(raw) {
            for wc in &raw[..found] {
                self.dispatch(wc, &mut |completion| ready.push_back(completion));
            }
            if found < BATCH {
                break;
            }
        }
        if !ready.is_empty() {
            self.shared.wake.raise();
        }
    }

    fn cores(&self) -> Vec<Rc<Core>> {
        self.members.borrow().places.iter().filter_map(|(_, core)| core.clone()).collect()
    }

    /// Requests of this queue's have waited too long: those whose completions are not here fail.
    fn judge(&self) {
        // Cleared first: what is found overdue from here on is judged by the next poll.
        self.shared.overdue.store(false, Ordering::Relaxed);
        self.gather();
        for core in self.cores() {
            if Arc::ptr_eq(&core.shared.queues[0], &self.shared) {
                core.judge();
            }
        }
    }

    /// The queue overran: its queue pairs are broken.
    fn overran(&self) -> FabricError {
        if !self.overrun_seen.replace(true) {
            for core in self.cores() {
                core.shared.fail(Cause::Overrun);
            }
        }
        FabricError::CompletionQueueOverrun { depth_entries: self.depth }
    }

    /// The device is gone: everything outstanding ends here.
    fn abandon_all(&self) {
        if self.abandoned.replace(true) {
            return;
        }
        for core in self.cores() {
            core.shared.fail(Cause::Device);
            let ready = &mut *self.ready.borrow_mut();
            let [sends, receives] = &core.shared.queues;
            if Arc::ptr_eq(sends, &self.shared) {
                core.abandon_sends(&mut |completion| ready.push_back(completion));
            }
            if Arc::ptr_eq(receives, &self.shared) {
                core.abandon_receives(&mut |completion| ready.push_back(completion));
            }
        }
    }
}

impl CompletionQueue for VerbsCompletionQueue {
    fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        // Acquire: pairs with the release store of the library's thread.
        if self.shared.overrun.load(Ordering::Acquire) {
            return Err(self.overran());
        }
        let mut count = self.take(completions);
        if count == 0 && self.shared.lost.load(Ordering::Acquire) {
            self.abandon_all();
            count = self.take(completions);
        }
        // Acquire: pairs with the release store of the library's thread.
        if count == 0 && self.shared.overdue.load(Ordering::Acquire) {
            self.judge();
            count = self.take(completions);
        }
        Ok(count)
    }

    fn arm(&self) -> Result<(), FabricError> {
        if !self.ready.borrow().is_empty() || self.shared.overrun.load(Ordering::Acquire) {
            self.shared.wake.raise();
        }
        if self.shared.lost.load(Ordering::Acquire) {
            self.shared.wake.raise();
            return Ok(());
        }
        self.shared
            .hardware
            .arm()
            .map_err(|source| FabricError::System { action: "arming a completion queue", source })
    }

    fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.shared.events.as_fd()
    }

    fn acknowledge(&self) -> Result<(), FabricError> {
        self.shared.wake.lower();
        self.shared.hardware.drain_events();
        Ok(())
    }

    fn wait(
        &self,
        completions: &mut [WorkCompletion],
        timeout: Duration,
    ) -> Result<usize, FabricError> {
        for _ in 0..SPINS {
            let count = self.poll(completions)?;
            if count > 0 {
                return Ok(count);
            }
            std::hint::spin_loop();
        }
        let deadline = Instant::now() + timeout;
        loop {
            self.arm()?;
            let count = self.poll(completions)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if count > 0 || left.is_zero() {
                return Ok(count);
            }
            let mut fds = [PollFd::new(&self.shared.events, PollFlags::IN)];
            // An hour at most at a time: any duration fits.
            let slice = Timespec::try_from(left.min(Duration::from_secs(3600)))
                .unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            match poll(&mut fds, Some(&slice)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(system("waiting for a completion")(error)),
            }
            self.acknowledge()?;
            let count = self.poll(completions)?;
            if count > 0 {
                return Ok(count);
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for VerbsCompletionQueue {
    fn drop(&mut self) {
        self.device.board.remove_queue(self.tag);
    }
}
