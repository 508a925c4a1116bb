//! The loop: virtual time, sites, clients, faults, and what must hold at the end.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use beeline_env::{Clock as _, Randomness};
use beeline_fabric_sim::{PlantedBug, SimOptions, SimWorld};
use beeline_kv::{Store, StoreOptions};
use beeline_pmem::PoolOptions;
use beeline_replicated_log::ground::Job;
use beeline_replicated_log::{
    ClusterId, Config, Contact, Durability, Founding, Ground as _, Handle, Home, Layout, Node,
    NodeId,
};
use beeline_replicated_service::journey::{refusal, refusal_of_leader};
use beeline_replicated_service::{
    Carried, Failure, Group, GroupOptions, Journey, Lane, LaneName, Log as _, LogHandle, Machine,
    Refused, Step, Tag, unit,
};
use beeline_verify_log::linear::{Call, Operation};
use beeline_verify_log::world::quick;

use crate::Bug;
use crate::ground::{DIRECTORY, Directory, SimGround, SimJobs, SimTransport};
use crate::keys::{Bank, Keys};

const SITES: u16 = 3;
const CLIENTS: usize = 4;
const LISTS: u64 = 3;
const US: u64 = 1_000;
const MS: u64 = 1_000_000;
/// Faults come for so long.
const TROUBLE_NS: u64 = 1_500 * MS;
/// Everything is done so long after them.
const PATIENCE_NS: u64 = 30_000 * MS;
/// Nothing has happened for so long at the end.
const REST_NS: u64 = 50 * MS;
/// A courier's pause between two attempts.
const PAUSE_NS: u64 = 5 * MS;

/// What a run did, so that an empty one is visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub answered: u64,
    pub unanswered: u64,
    pub reads: u64,
    pub crashes: u64,
    pub repeated: u64,
    pub leaderships: u64,
    pub snapshots_installed: u64,
    pub ended_ns: u64,
}

type Answer = Receiver<Result<Vec<u8>, Refused>>;

/// A unit or a barrier of a site's lane, on its way.
struct Trip {
    name: u64,
    journey: Journey,
    attempt: Option<(Answer, Option<u16>)>,
    rests_until_ns: u64,
}

struct Running {
    node: Rc<RefCell<Node<Machine>>>,
    handle: Handle,
    log: Arc<LogHandle>,
    group: Arc<Group>,
    bank: Arc<Bank>,
    lane: Lane<usize, usize>,
    unit: Option<Trip>,
    barrier: Option<Trip>,
    jobs: Arc<SimJobs>,
}

struct Site {
    id: u16,
    home: std::path::PathBuf,
    ground: SimGround,
    running: Option<Running>,
    back_ns: u64,
}

#[derive(Clone, Copy)]
enum Wish {
    Append(u32),
    Read,
}

struct Client {
    left: u32,
    /// What it waits for: list, wish, since when, at which site.
    under_way: Option<(u8, Wish, u64, usize)>,
    rests_until_ns: u64,
}

pub struct World {
    bug: Option<Bug>,
    random: Randomness,
    base: Instant,
    sim: SimWorld,
    place: tempfile::TempDir,
    sites: Vec<Site>,
    clients: Vec<Client>,
    jobs: BTreeMap<(u64, u64), (u16, Job)>,
    sequence: u64,
    items: u32,
    history: BTreeMap<u8, Vec<Call>>,
    heal_ns: BTreeMap<u64, (u16, u16)>,
    resume_ns: BTreeMap<u64, u16>,
    report: Report,
}

impl World {
    pub fn new(seed: u64, bug: Option<Bug>) -> Self {
        let early = (bug == Some(Bug::CountUnplaced)).then_some(PlantedBug::FlushWithoutPlacing);
        let options =
            SimOptions { planted_bug: early, trace_records: 100, ..SimOptions::slow_placement() };
        let sim = SimWorld::new(seed, options);
        DIRECTORY.set(Directory::default());
        let place = tempfile::tempdir().unwrap();
        let sites = (1..=SITES).map(|id| Site {
            id,
            home: place.path().join(id.to_string()),
            ground: SimGround::new(seed << 4 | u64::from(id)),
            running: None,
            back_ns: 0,
        });
        let client = |_| Client { left: 40, under_way: None, rests_until_ns: 0 };
        let mut world = Self {
            bug,
            random: Randomness::new(seed),
            base: Instant::now(),
            sim,
            sites: sites.collect(),
            place,
            clients: (0..CLIENTS).map(client).collect(),
            jobs: BTreeMap::new(),
            sequence: 0,
            items: 0,
            history: BTreeMap::new(),
            heal_ns: BTreeMap::new(),
            resume_ns: BTreeMap::new(),
            report: Report::default(),
        };
        for index in 0..world.sites.len() {
            world.found(index);
            world.start(index);
        }
        world
    }

    fn now(&self) -> Instant {
        self.base + Duration::from_nanos(self.sim.now_ns())
    }

    fn pool_options() -> PoolOptions {
        PoolOptions {
            segment_bytes: 64 << 10,
            capacity_bytes: 64 * (64 << 10),
            durability: beeline_pmem::Durability::Power,
            ..PoolOptions::default()
        }
    }

    fn contact(id: u16) -> Contact {
        Contact { address: id.to_string(), details: Vec::new() }
    }

    fn found(&mut self, index: usize) {
        let site = &self.sites[index];
        let members = (1..=SITES).map(|id| (NodeId(id), Self::contact(id))).collect();
        let founding = Founding {
            cluster: ClusterId(77),
            id: NodeId(site.id),
            layout: Layout::new(32, 1024).unwrap(),
            sessions: 4,
            members,
        };
        std::fs::create_dir_all(&site.home).unwrap();
        Home::create_on(&site.home.join("log"), &founding, Durability::Power, &site.ground)
            .unwrap();
        let pool = site.ground.create_pool(&site.home.join("pool"), &Self::pool_options()).unwrap();
        drop(Store::open(pool, self.store_options()).unwrap());
    }

    fn store_options(&self) -> StoreOptions {
        StoreOptions {
            shards: 2,
            recovery_threads: 1,
            clock: self.sim.clock(),
            batch_limit_bytes: Some(32 << 10),
            ..StoreOptions::default()
        }
    }

    fn start(&mut self, index: usize) {
        let options = self.store_options();
        let now_ns = self.sim.now_ns();
        let site = &mut self.sites[index];
        let pool = site.ground.open_pool(&site.home.join("pool"), &Self::pool_options()).unwrap();
        let (store, shards, _) = Store::open(pool, options).unwrap();
        let bank = Arc::new(Bank { store, shards, directory: site.home.clone() });
        let options = GroupOptions {
            cluster: 77,
            node: site.id,
            request_timeout: Duration::from_secs(1),
            incarnation: 1 + now_ns / US,
        };
        let clock = self.sim.clock();
        let unix_ms = move || 1 + clock.monotonic_ns() / MS;
        let group = Arc::new(Group::new(options, Arc::new(unix_ms)));
        let (bank_of, group_of) = (Arc::clone(&bank), Arc::clone(&group));
        let keys = Keys { bank: bank_of, group: group_of, bug: self.bug, effects: 0 };
        let machine = Machine::new(Arc::clone(&group), vec![Box::new(keys)]).unwrap();
        let home = Home::open_on(&site.home.join("log"), Durability::Power, &site.ground).unwrap();
        let payload = home.layout().max_payload_bytes();
        let jobs = Arc::new(SimJobs::default());
        let config = Config {
            options: quick(),
            jobs: jobs.clone(),
            ..Config::new(
                self.sim.device(u32::from(site.id)),
                Arc::new(SimTransport(site.id)),
                Self::contact(site.id),
            )
        };
        let (node, handle) = Node::open(home, config, machine).unwrap();
        let (node, log) =
            (Rc::new(RefCell::new(node)), Arc::new(LogHandle::new(handle.clone(), payload)));
        group.attach(log.clone());
        DIRECTORY.with_borrow_mut(|directory| {
            directory.sites.insert(site.id, (Rc::clone(&node), handle.clone()));
        });
        let lane = Lane::new(LaneName { service: Tag::KEYS, node: site.id, lane: 0 }, 1);
        let (unit, barrier) = (None, None);
        site.running = Some(Running { node, handle, log, group, bank, lane, unit, barrier, jobs });
    }

    fn crash(&mut self, index: usize, power: bool) {
        let (seed, back_ns) = (self.random.next_u64(), self.random.between(20, 400) * MS);
        let now_ns = self.sim.now_ns();
        let site = &mut self.sites[index];
        let Some(running) = site.running.take() else { return };
        // First, so that nothing that ends in order leaves a trace.
        site.ground.crash(power, seed);
        site.back_ns = now_ns + back_ns;
        let id = site.id;
        let counters = running.handle.status().counters;
        self.count(&running.group, counters);
        self.sim.crash(u32::from(id));
        DIRECTORY.with_borrow_mut(|directory| {
            directory.sites.remove(&id);
            directory.paused.remove(&id);
        });
        self.jobs.retain(|_, (of, _)| *of != id);
        self.report.crashes += 1;
        for client in 0..self.clients.len() {
            if self.clients[client].under_way.is_some_and(|(.., at)| at == index) {
                self.end(client, None);
            }
        }
    }

    fn count(&mut self, group: &Group, counters: beeline_replicated_log::Counters) {
        self.report.repeated += group.stats().repeated;
        self.report.leaderships += counters.leaderships;
        self.report.snapshots_installed += counters.snapshots_installed;
    }

    /// A client's wish is answered; `None`: its outcome is not known.
    fn end(&mut self, client: usize, answer: Option<Operation>) {
        let now_ns = self.sim.now_ns();
        let rest_ns = self.random.below(20 * MS);
        let client = &mut self.clients[client];
        let Some((key, wish, from_ns, _)) = client.under_way.take() else { return };
        client.rests_until_ns = now_ns + rest_ns;
        let (to_ns, operation) = match (answer, wish) {
            (Some(operation), _) => (now_ns, operation),
            (None, Wish::Append(item)) => (u64::MAX, Operation::Append(item, None)),
            (None, Wish::Read) => return,
        };
        match &operation {
            Operation::Append(_, Some(_)) => self.report.answered += 1,
            Operation::Append(_, None) => self.report.unanswered += 1,
            Operation::Read(_) => self.report.reads += 1,
        }
        self.history.entry(key).or_default().push(Call { from_ns, to_ns, operation });
    }

    pub fn run(mut self) -> Result<Report, String> {
        let (mut healed, mut rested_ns) = (false, 0);
        loop {
            let step_ns = self.random.between(50, 400) * US;
            self.sim.run_for(Duration::from_nanos(step_ns));
            let now_ns = self.sim.now_ns();
            if now_ns < TROUBLE_NS {
                self.trouble();
            } else if !healed {
                healed = true;
                self.heal();
            }
            self.mend(now_ns);
            self.deliver(now_ns);
            for index in 0..self.sites.len() {
                self.turn(index, now_ns)?;
            }
            self.ask();
            if !healed || !self.is_at_rest() {
                rested_ns = now_ns;
            }
            // What statuses say may be some milliseconds old.
            if now_ns - rested_ns > REST_NS {
                self.report.ended_ns = now_ns;
                return self.finish();
            }
            if now_ns > TROUBLE_NS + PATIENCE_NS {
                let tell = |site: &Site| {
                    let status = site.running.as_ref().map(|running| running.handle.status());
                    format!("{status:?}")
                };
                let all: Vec<_> = self.sites.iter().map(tell).collect();
                return Err(format!("liveness: {all:#?}"));
            }
        }
    }

    fn trouble(&mut self) {
        if !self.random.chance(1, 250) {
            return;
        }
        let index = self.random.below(u64::from(SITES)) as usize;
        let (id, now_ns) = (index as u16 + 1, self.sim.now_ns());
        let until_ns = now_ns + self.random.between(10, 300) * MS;
        match self.random.below(7) {
            0 | 1 => self.crash(index, false),
            2 => self.crash(index, true),
            3 | 4 => {
                let running = self.sites[index].running.is_some();
                if running && DIRECTORY.with_borrow_mut(|all| all.paused.insert(id)) {
                    self.sim.pause(u32::from(id));
                    self.resume_ns.insert(until_ns, id);
                }
            }
            5 => {
                let other = id % SITES + 1;
                let link = (id.min(other), id.max(other));
                DIRECTORY.with_borrow_mut(|all| all.cut.insert(link));
                self.sim.partition(u32::from(link.0), u32::from(link.1));
                self.heal_ns.insert(until_ns, link);
            }
            _ if self.random.chance(1, 3) => {
                (0..self.sites.len()).for_each(|index| self.crash(index, true));
            }
            _ => {}
        }
    }

    fn mend(&mut self, now_ns: u64) {
        while let Some(link) = self.heal_ns.first_entry().filter(|entry| *entry.key() <= now_ns) {
            let link = link.remove();
            DIRECTORY.with_borrow_mut(|all| all.cut.remove(&link));
            self.sim.heal(u32::from(link.0), u32::from(link.1));
        }
        while let Some(id) = self.resume_ns.first_entry().filter(|entry| *entry.key() <= now_ns) {
            let id = id.remove();
            if DIRECTORY.with_borrow_mut(|all| all.paused.remove(&id)) {
                self.sim.resume(u32::from(id));
            }
        }
        for index in 0..self.sites.len() {
            if self.sites[index].running.is_none() && self.sites[index].back_ns <= now_ns {
                self.sim.restart(u32::from(self.sites[index].id));
                self.start(index);
            }
        }
    }

    fn heal(&mut self) {
        self.mend(u64::MAX);
    }

    /// Jobs whose time has come.
    fn deliver(&mut self, now_ns: u64) {
        while let Some(entry) = self.jobs.first_entry().filter(|entry| entry.key().0 <= now_ns) {
            let (_, job) = entry.remove();
            job();
        }
    }

    fn turn(&mut self, index: usize, now_ns: u64) -> Result<(), String> {
        let id = self.sites[index].id;
        let paused = DIRECTORY.with_borrow_mut(|all| {
            all.now_ns = now_ns;
            all.paused.contains(&id)
        });
        if let Some(error) = DIRECTORY.with_borrow_mut(|all| all.errors.pop()) {
            return Err(format!("a member ended: {error}"));
        }
        let Some(running) = self.sites[index].running.as_ref().filter(|_| !paused) else {
            return Ok(());
        };
        for _ in 0..3 {
            let turned = running.node.borrow_mut().turn(now_ns);
            if !turned.map_err(|error| format!("member {id} ended: {error}"))? {
                break;
            }
        }
        if running.group.stats().divergences > 0 {
            return Err(format!("divergence: member {id} differs from a leader"));
        }
        let jobs: Vec<Job> = running.jobs.0.lock().unwrap().drain(..).collect();
        if self.random.chance(1, 40) {
            running.bank.upkeep();
        }
        for job in jobs {
            let delay_ns = self.random.between(100, 5_000) * US;
            self.sequence += 1;
            self.jobs.insert((now_ns + delay_ns, self.sequence), (id, job));
        }
        self.drive(index, now_ns);
        Ok(())
    }

    /// What the site's courier does.
    fn drive(&mut self, index: usize, now_ns: u64) {
        let (now, name) = (self.now(), self.sites[index].id);
        let lane_name = LaneName { service: Tag::KEYS, node: name, lane: 0 };
        let Some(mut running) = self.sites[index].running.take() else { return };
        let deadline = now + running.group.options().request_timeout;
        let rested = |name, journey| Trip { name, journey, attempt: None, rests_until_ns: 0 };
        if running.unit.is_none()
            && let Some((number, unit)) = running.lane.next_unit(running.group.incarnation())
        {
            let journey = Journey::of_unit(lane_name, (number, unit), false, deadline);
            running.unit = Some(rested(number, journey));
        }
        if running.barrier.is_none()
            && let Some(ticket) = running.lane.next_barrier()
        {
            let journey = Journey::of_barrier(lane_name, deadline);
            running.barrier = Some(rested(ticket, journey));
        }
        if let Some(mut trip) = running.unit.take() {
            match self.advance(&mut trip, &running, now_ns) {
                None => running.unit = Some(trip),
                Some(outcome) => {
                    let askers = running.lane.landed(trip.name);
                    let answered = outcome.is_ok();
                    let replies = outcome.unwrap_or_default();
                    let mut replies = unit::parts(&replies);
                    for client in askers.into_iter().flatten() {
                        let length = replies.next().and_then(|reply| reply.first_chunk::<8>());
                        let length = length.map(|bytes| u64::from_le_bytes(*bytes));
                        assert!(length.is_some() || !answered, "each request has a reply");
                        let item = match self.clients[client].under_way {
                            Some((_, Wish::Append(item), ..)) => item,
                            _ => continue,
                        };
                        let done = length.map(|length| Operation::Append(item, Some(length)));
                        self.end(client, done);
                    }
                }
            }
        }
        if let Some(mut trip) = running.barrier.take() {
            match self.advance(&mut trip, &running, now_ns) {
                None => running.barrier = Some(trip),
                Some(outcome) => {
                    for client in running.lane.passed(trip.name) {
                        let read = outcome.is_ok().then(|| {
                            let key =
                                self.clients[client].under_way.map_or(0, |under_way| under_way.0);
                            Operation::Read(running.bank.list(key))
                        });
                        self.end(client, read);
                    }
                }
            }
        }
        self.sites[index].running = Some(running);
    }

    /// One step of a unit or a barrier, as [`beeline_replicated_service::Courier`] does them on its
    /// thread; how it ended, if it has.
    fn advance(
        &mut self,
        trip: &mut Trip,
        running: &Running,
        now_ns: u64,
    ) -> Option<Result<Vec<u8>, Failure>> {
        if now_ns < trip.rests_until_ns {
            return None;
        }
        let (now, group) = (self.now(), &running.group);
        if let Some((answer, leader)) = &trip.attempt {
            let gone = match leader {
                Some(leader) => {
                    !trip.journey.wants(group, *leader) || now >= trip.journey.deadline()
                }
                None => trip.journey.is_over(group, now) || !running.log.state().leads(),
            };
            let carried = match answer.try_recv() {
                Ok(Ok(reply)) => Carried::Answer(reply),
                Ok(Err(refused)) if leader.is_none() => refusal(refused),
                Ok(Err(refused)) => refusal_of_leader(refused),
                Err(TryRecvError::Empty) if !gone => return None,
                Err(_) => Carried::Again,
            };
            trip.attempt = None;
            if carried == Carried::Again {
                trip.rests_until_ns = now_ns + PAUSE_NS;
            }
            trip.journey.took(group, carried);
        }
        let (sender, answer) = channel();
        match trip.journey.decide(group, now) {
            Step::Done(outcome) => return Some(outcome),
            Step::Wait => trip.rests_until_ns = now_ns + MS,
            Step::Here => {
                let told = Box::new(move |outcome| {
                    let _ = sender.send(outcome);
                });
                group.ask(running.log.as_ref(), trip.journey.load(), told);
                trip.attempt = Some((answer, None));
            }
            Step::There(leader) => {
                trip.attempt = Some((answer, Some(leader.id)));
                // The asker may have given up when an answer comes; or it is lost on its way.
                let lost = now_ns < TROUBLE_NS && self.random.chance(1, 10);
                let told = Box::new(move |outcome: Result<Vec<u8>, Refused>| {
                    if !(lost && outcome.is_ok()) {
                        let _ = sender.send(outcome);
                    }
                });
                let limit = trip.journey.deadline().saturating_duration_since(now);
                running.log.forward(leader.id, trip.journey.load(), limit, told);
            }
        }
        None
    }

    /// Clients that have rested wish for something.
    fn ask(&mut self) {
        let now_ns = self.sim.now_ns();
        for client in 0..self.clients.len() {
            let ready = self.clients[client].under_way.is_none()
                && self.clients[client].left > 0
                && self.clients[client].rests_until_ns <= now_ns;
            let index = self.random.below(u64::from(SITES)) as usize;
            if !ready || self.sites[index].running.is_none() {
                continue;
            }
            let key = self.random.below(LISTS) as u8;
            let reads = self.random.chance(1, 3);
            let Some(running) = &mut self.sites[index].running else { continue };
            let wish = if reads {
                running.lane.await_barrier(client);
                Wish::Read
            } else {
                self.items += 1;
                let item = self.items;
                let pushed = running.lane.push(client, false, 512, |out| {
                    out.push(key);
                    out.extend_from_slice(&item.to_le_bytes());
                });
                assert!(pushed.is_ok(), "an append is short");
                Wish::Append(item)
            };
            self.clients[client].left -= 1;
            self.clients[client].under_way = Some((key, wish, now_ns, index));
            if self.bug == Some(Bug::ReadAnything) && reads {
                let list = running.bank.list(key);
                running.lane.withdraw(|reader| *reader == client);
                self.end(client, Some(Operation::Read(list)));
            }
        }
    }

    fn is_at_rest(&self) -> bool {
        let idle = |client: &Client| client.left == 0 && client.under_way.is_none();
        let mut applied = Vec::new();
        for site in &self.sites {
            let Some(running) = &site.running else { return false };
            let status = running.handle.status();
            applied.push((status.applied, status.committed, status.leader));
        }
        self.clients.iter().all(idle)
            && applied.iter().all(|site| *site == applied[0] && site.0 == site.1)
            && applied[0].2.is_some()
    }

    fn finish(mut self) -> Result<Report, String> {
        let sites = std::mem::take(&mut self.sites);
        let banks: Vec<_> = sites.into_iter().filter_map(|site| site.running).collect();
        for running in &banks {
            self.count(&running.group, running.handle.status().counters);
            (0..50).for_each(|_| running.bank.upkeep());
        }
        for key in 0..LISTS as u8 {
            let calls = self.history.remove(&key).unwrap_or_default();
            let list = banks[0].bank.list(key);
            let mut once = list.clone();
            once.sort_unstable();
            once.dedup();
            if once.len() != list.len() {
                return Err(format!("exactly once: list {key} is {list:?}"));
            }
            let lost = calls.iter().find(|call| {
                let Operation::Append(item, Some(_)) = call.operation else { return false };
                !list.contains(&item)
            });
            if let Some(lost) = lost {
                return Err(format!("lost: {lost:?} is not in list {key}: {list:?}"));
            }
            let row = banks[0].bank.row(key);
            if row.0 != row.1.len() as u64 {
                return Err(format!("row {key} says {} and has {}", row.0, row.1.len()));
            }
            for (other, running) in banks.iter().enumerate().skip(1) {
                let (theirs, their_row) = (running.bank.list(key), running.bank.row(key));
                if theirs != list || their_row != row {
                    return Err(format!(
                        "member {other} has another list {key}: {theirs:?}, {list:?}"
                    ));
                }
            }
            explained(&calls, &list).map_err(|what| format!("linearizable: list {key}: {what}"))?;
        }
        Ok(self.report)
    }
}

/// Whether the order of the list explains what clients saw. The list is the order of all appends that
/// took effect, so nothing has to be searched for: each call has a place in it, and calls that did not
/// overlap have theirs in the order of their times.
fn explained(calls: &[Call], list: &[u32]) -> Result<(), String> {
    let mut placed = Vec::new();
    for call in calls {
        let place = match &call.operation {
            Operation::Append(item, length) => {
                let place = list.iter().position(|known| known == item).map(|at| at as u64 + 1);
                if length.is_some() && place != *length {
                    return Err(format!("{call:?} has place {place:?} in {list:?}"));
                }
                // One that was never answered may never have taken effect.
                place
            }
            Operation::Read(seen) if list.starts_with(seen) => Some(seen.len() as u64),
            Operation::Read(_) => return Err(format!("{call:?} is no beginning of {list:?}")),
        };
        placed.extend(place.map(|place| (call, place)));
    }
    for (earlier, before) in &placed {
        for (later, after) in placed.iter().filter(|(later, _)| earlier.to_ns < later.from_ns) {
            // An append is behind everything that was over when it began.
            let least = before + u64::from(matches!(later.operation, Operation::Append(..)));
            if *after < least {
                return Err(format!("{later:?} came after {earlier:?}: {list:?}"));
            }
        }
    }
    Ok(())
}

impl Drop for World {
    fn drop(&mut self) {
        // Nodes of this run are not those of the next.
        DIRECTORY.set(Directory::default());
        let _ = self.place.path();
    }
}
