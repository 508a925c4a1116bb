//! One thread of a host: turns members that have something to do, and sleeps otherwise.
//!
//! A member is turned when it has requests, completions, or its time has come; one that rests has no
//! time. While some rest, the thread beats and looks at other threads' beats twice a heartbeat.
//!
//! Where many members are awake at once, as after the death of another host, three bounds keep the thread
//! from being late for all of them: completions are taken before members are turned for the time alone, and
//! only [`DUE_A_TURN`] of these between two looks at the completions; the more members are awake, the longer
//! their pauses ([`pause_ns`]); and few campaign at a time ([`CAMPAIGNS`]).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_fabric::{Device, FabricError, WorkCompletion};
use beeline_os::poller::{Interest, Poller};
use beeline_paxos::{ClusterId, NodeId, Options};

use super::Counts;
use super::resident::Resident;
use super::watch::Watch;
use crate::handle::Bell;
use crate::line::LineNews;
use crate::node::{IDLE_NS, NodeError, Seat};
use crate::shared::Shared;

/// How long it looks for more before it sleeps.
const SPIN_NS: u64 = 20_000;
const COMPLETIONS: usize = 64;
/// Completions taken in a turn at most: so many that members of a thousand clusters hear at once.
const COMPLETIONS_A_TURN: usize = 8192;
/// Members that are turned in a turn because their time has come. Each makes completions, which others wait
/// for: were all turned between two looks, completions would come faster than they are taken.
const DUE_A_TURN: usize = 64;
/// Members that campaign at a time. A campaign takes some milliseconds of processor time at each of its
/// members, and is given up after [`Options::campaign`].
const CAMPAIGNS: usize = 32;
/// So many members that are awake have the shortest pauses.
const FEW_AWAKE: u64 = 64;

/// Opens a member in its seat; `None`: it could not be, and its opener knows why.
pub(super) type Opening = Box<dyn FnOnce(Seat) -> Option<Resident> + Send>;

/// What a thread is asked for.
pub(super) enum Task {
    Open(Opening),
    Stop,
}

/// What a thread needs.
pub(super) struct Setup {
    pub(super) device: Arc<dyn Device>,
    pub(super) options: Options,
    pub(super) rest: Duration,
    pub(super) threads: u16,
    pub(super) bell: Bell,
    pub(super) counts: Arc<Counts>,
    pub(super) tasks: Receiver<Task>,
}

pub(super) struct Worker {
    shared: Shared,
    bell: Bell,
    rest_ns: u64,
    threads: u16,
    counts: Arc<Counts>,
    tasks: Receiver<Task>,
    poller: Poller,
    start: Instant,
    members: HashMap<u64, Resident>,
    /// By cluster.
    of: HashMap<ClusterId, u64>,
    next_name: u64,
    /// Where a look puts completions.
    completions: Box<[WorkCompletion]>,
    /// Those to be turned now.
    ready: Vec<u64>,
    /// When members are due, each once: one that is due later by now is listed anew.
    due: BinaryHeap<Reverse<(u64, u64)>>,
    watch: Watch,
    resting: u64,
    /// Those that campaign.
    campaigning: usize,
    beats: u64,
    beat_ns: u64,
    interval_ns: u64,
    /// Of members that wait for their machines.
    ending: Vec<JoinHandle<()>>,
    stopping: bool,
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Between two turns of a member that has nothing to do, where `awake` members do not rest: in proportion to
/// their number, and half a heartbeat at most, nanoseconds. A follower takes its leader for dead after several
/// heartbeats.
fn pause_ns(awake: u64, heartbeat_ns: u64) -> u64 {
    let longest_ns = IDLE_NS.max(heartbeat_ns / 2);
    (IDLE_NS.saturating_mul(awake) / FEW_AWAKE).clamp(IDLE_NS, longest_ns)
}

impl Worker {
    pub(super) fn new(setup: Setup) -> Result<Self, NodeError> {
        let Setup { device, options, rest, threads, bell, counts, tasks } = setup;
        let drawn = getrandom::u64();
        let host =
            drawn.map_err(|error| NodeError::System(std::io::Error::other(error.to_string())))?;
        let shared = Shared::open(device, host.max(1))?;
        let poller = Poller::new(4).map_err(NodeError::System)?;
        poller
            .add(shared.queue.event_descriptor(), 0, Interest::READ)
            .map_err(NodeError::System)?;
        poller.add(bell.waker.as_ref(), 1, Interest::READ).map_err(NodeError::System)?;
        let interval_ns = ns(options.heartbeat) / 2;
        Ok(Self {
            shared,
            bell,
            rest_ns: ns(rest),
            threads,
            counts,
            tasks,
            poller,
            start: Instant::now(),
            members: HashMap::new(),
            of: HashMap::new(),
            next_name: 0,
            completions: vec![WorkCompletion::EMPTY; COMPLETIONS].into(),
            ready: Vec::new(),
            due: BinaryHeap::new(),
            watch: Watch::new(interval_ns, ns(options.patience)),
            resting: 0,
            campaigning: 0,
            beats: 0,
            beat_ns: 0,
            interval_ns,
            ending: Vec::new(),
            stopping: false,
        })
    }

    fn now_ns(&self) -> u64 {
        ns(self.start.elapsed())
    }

    pub(super) fn run(mut self) {
        let stopped = self.go_on();
        if let Err(error) = &stopped {
            tracing::error!(%error, "a thread of the host has stopped, and its members with it");
        }
        let mut ending = std::mem::take(&mut self.ending);
        for (_, resident) in self.members.drain() {
            let reason = |error: &NodeError| std::io::Error::other(error.to_string());
            let how = stopped.as_ref().copied().map_err(|error| NodeError::System(reason(error)));
            ending.extend(resident.end(how));
        }
        for thread in ending {
            let _ = thread.join();
        }
    }

    fn go_on(&mut self) -> Result<(), NodeError> {
        let mut busy_ns = self.now_ns();
        while !self.stopping {
            let now_ns = self.now_ns();
            if self.turn(now_ns)? {
                busy_ns = self.now_ns();
                continue;
            }
            if self.now_ns().saturating_sub(busy_ns) < SPIN_NS {
                std::thread::yield_now();
                continue;
            }
            self.sleep()?;
        }
        Ok(())
    }

    /// What came before arming makes no event.
    fn sleep(&mut self) -> Result<(), NodeError> {
        self.bell.asleep.store(true, Ordering::SeqCst);
        self.shared.queue.arm()?;
        let now_ns = self.now_ns();
        if !self.turn(now_ns)? && self.bell.line.is_empty() {
            self.counts.lines.store(self.shared.lines.count() as u64, Ordering::Relaxed);
            let wait = self.next_ns().map(|next_ns| next_ns.saturating_sub(self.now_ns()));
            self.poller.wait(wait.map(Duration::from_nanos)).map_err(NodeError::System)?;
            self.counts.wakeups.fetch_add(1, Ordering::Relaxed);
        }
        if !self.bell.asleep.swap(false, Ordering::SeqCst) {
            self.bell.waker.clear();
        }
        Ok(self.shared.queue.acknowledge()?)
    }

    /// When something is due next, if nothing happens before.
    fn next_ns(&mut self) -> Option<u64> {
        let due_ns = loop {
            let Some(Reverse((listed_ns, name))) = self.due.peek().copied() else { break None };
            let resident = self.members.get(&name);
            let is_due = resident.is_some_and(|member| {
                member.listed_ns == Some(listed_ns) && member.due_ns == Some(listed_ns)
            });
            if is_due {
                break Some(listed_ns);
            }
            self.due.pop();
            self.list_anew(name, listed_ns);
        };
        let beat_ns = (self.resting > 0).then_some(self.beat_ns);
        due_ns.into_iter().chain(beat_ns).min()
    }

    /// An entry of a member was taken from those that are due: it may be due later by now.
    fn list_anew(&mut self, name: u64, listed_ns: u64) {
        let Some(resident) = self.members.get_mut(&name) else { return };
        if resident.listed_ns == Some(listed_ns) {
            resident.listed_ns = None;
            self.list(name);
        }
    }

    /// Sees to it that a member stands among those that are due, once and no later than it is.
    fn list(&mut self, name: u64) {
        let Some(resident) = self.members.get_mut(&name) else { return };
        let Some(due_ns) = resident.due_ns else { return };
        if resident.listed_ns.is_none_or(|listed_ns| due_ns < listed_ns) {
            resident.listed_ns = Some(due_ns);
            self.due.push(Reverse((due_ns, name)));
        }
    }

    /// One turn of everything that has something to do. True if there was something.
    fn turn(&mut self, now_ns: u64) -> Result<bool, NodeError> {
        let mut busy = self.obey(now_ns);
        busy |= self.take_completions()?;
        for name in self.bell.line.take() {
            self.make_ready(name);
        }
        let mut due = 0;
        while let Some(Reverse((listed_ns, name))) = self.due.peek().copied()
            && listed_ns <= now_ns
        {
            if due == DUE_A_TURN {
                busy = true;
                break;
            }
            self.due.pop();
            let resident = self.members.get_mut(&name);
            let Some(resident) = resident.filter(|member| member.listed_ns == Some(listed_ns))
            else {
                continue;
            };
            resident.listed_ns = None;
            if resident.due_ns.is_some_and(|due_ns| due_ns <= now_ns) {
                due += 1;
                self.make_ready(name);
            } else {
                self.list(name);
            }
        }
        if self.resting > 0 && now_ns >= self.beat_ns {
            self.beat(now_ns);
        }
        for name in std::mem::take(&mut self.ready) {
            busy |= self.turn_one(name);
        }
        Ok(busy)
    }

    fn obey(&mut self, now_ns: u64) -> bool {
        let mut busy = false;
        while let Ok(task) = self.tasks.try_recv() {
            busy = true;
            match task {
                Task::Stop => self.stopping = true,
                Task::Open(open) => {
                    let name = self.next_name;
                    self.next_name += 1;
                    let (shared, bell) = (self.shared.clone(), self.bell.clone());
                    let (rest_ns, threads) = (self.rest_ns, self.threads);
                    if let Some(resident) = open(Seat { shared, bell, name, rest_ns, threads }) {
                        self.of.insert(resident.node.cluster(), name);
                        self.members.insert(name, resident);
                        self.counts.members.store(self.members.len() as u64, Ordering::Relaxed);
                        self.schedule(name, Some(now_ns));
                    }
                }
            }
        }
        busy
    }

    fn take_completions(&mut self) -> Result<bool, FabricError> {
        let mut completions = std::mem::take(&mut self.completions);
        let taken = self.share_out(&mut completions);
        self.completions = completions;
        let taken = taken?;
        Ok(self.hear_lines() || taken > 0)
    }

    /// Gives members the completions that wait, with `completions` as the place to put them; returns how
    /// many.
    fn share_out(&mut self, completions: &mut [WorkCompletion]) -> Result<usize, FabricError> {
        let mut taken = 0;
        while taken < COMPLETIONS_A_TURN {
            let count = self.shared.queue.poll(completions)?;
            for completion in &completions[..count] {
                if self.shared.lines.take(completion) {
                    continue;
                }
                // Else of a queue pair that is gone.
                if let Some(owner) = self.shared.owner(completion.qp_num)
                    && let Some(resident) = self.members.get_mut(&owner)
                {
                    resident.node.give(*completion);
                    self.make_ready(owner);
                }
            }
            taken += count;
            if count < completions.len() {
                break;
            }
        }
        Ok(taken)
    }

    /// Gives members what came over lines.
    fn hear_lines(&mut self) -> bool {
        let mut heard = false;
        while let Some(news) = self.shared.lines.news() {
            heard = true;
            let name = match &news {
                LineNews::Broken { members } => {
                    members.iter().for_each(|name| self.make_ready(*name));
                    continue;
                }
                LineNews::Read { reader, .. } => Some(reader.member),
                LineNews::Frame { frame, .. } => self.of.get(&frame.cluster).copied(),
            };
            if let Some(name) = name
                && let Some(resident) = self.members.get_mut(&name)
            {
                resident.node.give_line_news(news);
                self.make_ready(name);
            }
        }
        heard
    }

    fn make_ready(&mut self, name: u64) {
        if let Some(resident) = self.members.get_mut(&name)
            && !std::mem::replace(&mut resident.is_ready, true)
        {
            self.ready.push(name);
        }
    }

    fn turn_one(&mut self, name: u64) -> bool {
        let now_ns = self.now_ns();
        let Some(resident) = self.members.get_mut(&name) else { return false };
        resident.is_ready = false;
        self.counts.turns.fetch_add(1, Ordering::Relaxed);
        resident.node.let_campaign(resident.campaigns || self.campaigning < CAMPAIGNS);
        let turned = resident.node.turn(now_ns);
        let busy = match turned {
            Ok(busy) => busy,
            Err(error) => {
                tracing::error!(%error, "a member of the host has stopped");
                self.end(name, Err(error));
                return true;
            }
        };
        if resident.node.is_stopping() {
            self.end(name, Ok(()));
            return true;
        }
        self.campaigning -= usize::from(resident.campaigns);
        resident.campaigns = resident.node.is_campaigning();
        self.campaigning += usize::from(resident.campaigns);
        for (peer, beats) in resident.node.beats() {
            if let (Some((beat, leader)), Some(beats)) = (resident.node.relies_on(), beats)
                && leader == peer
            {
                self.watch.heard(beat.host, beats, now_ns);
            }
        }
        let awake = self.counts.members.load(Ordering::Relaxed).saturating_sub(self.resting);
        let due_ns = resident.node.due_ns(now_ns, pause_ns(awake, 2 * self.interval_ns));
        let relies_on = resident.node.relies_on().map(|(beat, leader)| (beat.host, leader));
        let before = std::mem::replace(&mut resident.relies_on, relies_on.map(|(host, _)| host));
        if before.is_some() || relies_on.is_some() {
            self.watch.rely(name, before, relies_on, now_ns);
        }
        self.schedule(name, due_ns);
        if busy {
            self.make_ready(name);
        }
        busy
    }

    /// Notes when a member is due, and how many rest.
    fn schedule(&mut self, name: u64, due_ns: Option<u64>) {
        let Some(resident) = self.members.get_mut(&name) else { return };
        let before = std::mem::replace(&mut resident.due_ns, due_ns);
        self.resting -= u64::from(before.is_none());
        self.resting += u64::from(due_ns.is_none());
        self.counts.resting.store(self.resting, Ordering::Relaxed);
        self.list(name);
    }

    fn end(&mut self, name: u64, how: Result<(), NodeError>) {
        let Some(resident) = self.members.remove(&name) else { return };
        self.of.remove(&resident.node.cluster());
        self.resting -= u64::from(resident.due_ns.is_none());
        self.campaigning -= usize::from(resident.campaigns);
        self.watch.rely(name, resident.relies_on, None, self.beat_ns);
        self.counts.members.store(self.members.len() as u64, Ordering::Relaxed);
        self.counts.resting.store(self.resting, Ordering::Relaxed);
        self.ending.retain(|thread| !thread.is_finished());
        self.ending.extend(resident.end(how));
    }

    /// Beats, and looks at other threads' beats.
    fn beat(&mut self, now_ns: u64) {
        self.beats += 1;
        self.shared.store_beat(self.beats);
        self.beat_ns = now_ns + self.interval_ns;
        let members = &mut self.members;
        let read = |name: u64, peer: NodeId| {
            members.get_mut(&name).is_some_and(|resident| resident.node.read_beat(peer))
        };
        let (silent, threads) = self.watch.look(now_ns, read);
        self.counts.silences.fetch_add(threads, Ordering::Relaxed);
        for (name, leader) in silent {
            let Some(resident) = self.members.get_mut(&name) else { continue };
            match resident.node.silent(leader, now_ns) {
                Ok(()) => self.make_ready(name),
                Err(error) => self.end(name, Err(error)),
            }
        }
        let members = &self.members;
        self.shared.sweep(|name, qp_num| {
            members.get(&name).is_some_and(|resident| resident.node.has_queue_pair(qp_num))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_members_are_awake_the_longer_they_pause_and_no_leader_is_taken_for_dead() {
        let options = Options::default();
        let pause_ns = |awake| super::pause_ns(awake, ns(options.heartbeat));
        assert_eq!(pause_ns(1), IDLE_NS);
        assert_eq!(pause_ns(FEW_AWAKE), IDLE_NS);
        assert_eq!(pause_ns(3 * FEW_AWAKE), 3 * IDLE_NS);
        // A follower looks once more in its pause, and the leader's beat may have moved right behind.
        assert!(4 * pause_ns(u64::MAX) <= ns(options.patience));
    }
}
