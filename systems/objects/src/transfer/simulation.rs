//! Transfers in simulated time: every seed a network, sizes, protocols and faults of its own.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_env::random::Randomness;
use beeline_fabric::{Device, MemoryRegion, Role};
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_os::memory::{MemoryObject, copy_in, copy_out};
use beeline_wire::checksum::crc32c;

use super::message::PIECES_FIRST;
use super::{
    Context, Lent, Line, Made, NotMade, Outcome, Plan, Pulling, Seal, Serving, Shelf, TransferError,
};
use crate::id::ObjectId;

const MEMORY: usize = 8 << 20;

#[derive(Clone, Copy)]
struct Placed {
    offset: u64,
    size: u64,
    metadata_size: u64,
    checksum: Option<u32>,
}

/// A store in a few lines: memory that is never reused, and counts of what is held.
struct Model {
    region: MemoryRegion,
    memory: Arc<dyn MemoryObject>,
    next: u64,
    sealed: Rc<RefCell<HashMap<ObjectId, Placed>>>,
    lent: Rc<Cell<i32>>,
    unsealed: Rc<Cell<i32>>,
    room: u64,
}

/// Counts up while it lives.
struct Count(Rc<Cell<i32>>);

impl Count {
    fn new(cell: &Rc<Cell<i32>>) -> Self {
        cell.set(cell.get() + 1);
        Self(Rc::clone(cell))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

struct Sealing {
    id: ObjectId,
    placed: Placed,
    sealed: Rc<RefCell<HashMap<ObjectId, Placed>>>,
    _count: Count,
}

impl Seal for Sealing {
    fn seal(self: Box<Self>, checksum: Option<u32>) -> Result<(), String> {
        let placed = Placed { checksum, ..self.placed };
        self.sealed.borrow_mut().insert(self.id, placed);
        Ok(())
    }
}

impl Model {
    fn new(context: &Arc<Context>) -> Self {
        let memory = context.device.allocate_memory(MEMORY).unwrap();
        let region = context.segment(1, &memory).unwrap();
        Self {
            region,
            memory,
            next: 0,
            sealed: Rc::default(),
            lent: Rc::default(),
            unsealed: Rc::default(),
            room: MEMORY as u64,
        }
    }

    fn put(&mut self, id: ObjectId, data: &[u8], metadata_size: u64, checked: bool) {
        copy_in(&*self.memory, self.next as usize, data);
        let placed = Placed {
            offset: self.next,
            size: data.len() as u64 - metadata_size,
            metadata_size,
            checksum: checked.then(|| crc32c(data)),
        };
        self.next = (self.next + data.len() as u64).next_multiple_of(64);
        self.sealed.borrow_mut().insert(id, placed);
    }

    fn bytes(&self, id: ObjectId) -> Option<Vec<u8>> {
        let placed = *self.sealed.borrow().get(&id)?;
        let mut bytes = vec![0; (placed.size + placed.metadata_size) as usize];
        copy_out(&*self.memory, placed.offset as usize, &mut bytes);
        Some(bytes)
    }
}

impl Shelf for Model {
    fn lend(&mut self, id: ObjectId) -> Option<Lent> {
        let placed = *self.sealed.borrow().get(&id)?;
        Some(Lent {
            region: self.region.clone(),
            offset: placed.offset,
            size: placed.size,
            metadata_size: placed.metadata_size,
            checksum: placed.checksum,
            _hold: Box::new(Count::new(&self.lent)),
        })
    }

    fn make(&mut self, id: ObjectId, size: u64, metadata_size: u64) -> Result<Made, NotMade> {
        if self.sealed.borrow().contains_key(&id) {
            return Err(NotMade::Exists);
        }
        if self.next + size + metadata_size > self.room {
            return Err(NotMade::Failed("full".to_owned()));
        }
        let placed = Placed { offset: self.next, size, metadata_size, checksum: None };
        self.next = (self.next + size + metadata_size).next_multiple_of(64);
        let seal = Sealing {
            id,
            placed,
            sealed: Rc::clone(&self.sealed),
            _count: Count::new(&self.unsealed),
        };
        Ok(Made { region: self.region.clone(), offset: placed.offset, seal: Box::new(seal) })
    }

    fn put(
        &mut self,
        id: ObjectId,
        bytes: &[u8],
        size: u64,
        checksum: Option<u32>,
    ) -> Result<(), NotMade> {
        let made = self.make(id, size, bytes.len() as u64 - size)?;
        copy_in(&*self.memory, made.offset as usize, bytes);
        made.seal.seal(checksum).map_err(NotMade::Failed)
    }

    fn rouse(&mut self) {}
}

struct World {
    world: SimWorld,
    server: Model,
    puller: Model,
    serving: Option<Serving>,
    pulling: Option<Pulling>,
    contexts: [Arc<Context>; 2],
    /// Whether the server's time for an object is over.
    late: bool,
}

impl World {
    fn new(seed: u64, options: SimOptions) -> Self {
        let world = SimWorld::new(seed, options);
        let context = |node| {
            let device: Arc<dyn Device> = world.device(node);
            Arc::new(Context::new(device).unwrap())
        };
        let contexts = [context(1), context(2)];
        let [server, puller] = [Model::new(&contexts[0]), Model::new(&contexts[1])];
        let (serving, pulling) = (None, None);
        let mut world = Self { world, server, puller, serving, pulling, contexts, late: false };
        world.connect();
        world
    }

    fn connect(&mut self) {
        let (passive, active) =
            (Line::new(&self.contexts[0]).unwrap(), Line::new(&self.contexts[1]).unwrap());
        let (to_passive, to_active) = (passive.info(), active.info());
        let passive = passive.connect(&to_active, Role::Passive, None).unwrap();
        let patience = Some(Duration::from_secs(5));
        let active = active.connect(&to_passive, Role::Active, patience).unwrap();
        self.serving = Some(Serving::new(passive));
        self.pulling = Some(Pulling::new(active));
    }

    /// One turn of both ends; an end whose connection is over goes.
    fn turn(&mut self) -> Option<Result<Outcome, TransferError>> {
        if let Some(serving) = &mut self.serving
            && serving.progress(&mut self.server, Duration::ZERO).is_err()
        {
            self.serving = None;
        }
        let pulling = self.pulling.as_mut()?;
        let late = self.late;
        match pulling.progress(&mut self.puller, Duration::ZERO, &|_| !late) {
            Ok((outcome, _)) => outcome.map(Ok),
            Err(error) => {
                self.pulling = None;
                Some(Err(error))
            }
        }
    }

    /// Runs until the transfer ended, or 30 s of simulated time.
    fn finish(&mut self) -> Option<Result<Outcome, TransferError>> {
        let end = self.world.now_ns() + 30_000_000_000;
        while self.world.now_ns() < end {
            if let Some(outcome) = self.turn() {
                return Some(outcome);
            }
            self.world.step_within(Duration::from_millis(1));
        }
        None
    }
}

fn object(chance: &mut Randomness) -> (ObjectId, Vec<u8>, u64) {
    let mut id = [0; 20];
    chance.fill(&mut id);
    let length = match chance.below(5) {
        0 => chance.below(3),
        1 => chance.below(2_000),
        2 => 65_456 + chance.below(3),
        3 => chance.below(200_000),
        _ => chance.below(1 << 20),
    };
    let mut data = vec![0; length as usize];
    chance.fill(&mut data);
    (ObjectId(id), data, chance.below(length + 1).min(100))
}

/// One seed's life; its trace, and how the transfers ended.
fn run(seed: u64) -> (u64, [u32; 4]) {
    let mut chance = Randomness::new(seed);
    let options = match chance.below(3) {
        0 => SimOptions::default(),
        1 => SimOptions::lossy(),
        _ => SimOptions::slow_placement(),
    };
    let mut world = World::new(seed, options);
    let mut ends = [0; 4];
    for _ in 0..chance.between(1, 8) {
        let (id, data, metadata_size) = object(&mut chance);
        let known = chance.chance(9, 10);
        if known {
            world.server.put(id, &data, metadata_size, chance.chance(1, 2));
        }
        let flags = if chance.chance(1, 2) { PIECES_FIRST } else { 0 };
        let from_64k = Plan { read: u64::MAX << 16, ..Plan::SENT };
        let plan = *chance.pick(&[Plan::READ, from_64k, Plan::SENT]).unwrap();
        let started = world.pulling.as_mut().unwrap().start(id, plan, flags);
        started.unwrap();
        let fault = chance.below(8);
        for _ in 0..chance.below(40) {
            if world.world.step_within(Duration::from_micros(20)) && fault == 0 {
                break;
            }
        }
        match fault {
            0 => world.serving = None,
            1 => world.pulling = None,
            2 => {
                world.world.partition(1, 2);
                world.world.run_for(Duration::from_millis(chance.below(50)));
                world.world.heal(1, 2);
            }
            3 => {
                // Deleted while it is on its way: who has the reference reads on.
                let under_way = world.serving.as_ref().is_some_and(Serving::is_busy);
                if under_way {
                    world.server.sealed.borrow_mut().remove(&id);
                }
            }
            _ => {}
        }
        match world.finish() {
            Some(Ok(Outcome::Came { bytes, .. })) => {
                ends[0] += 1;
                assert_eq!(bytes, data.len() as u64, "seed {seed}");
                let came = world.puller.bytes(id).unwrap();
                assert!(came == data, "seed {seed}: other bytes came");
            }
            Some(Ok(Outcome::Gone)) => {
                ends[1] += 1;
                assert!(!known, "seed {seed}: an object was not found");
            }
            Some(Ok(other)) => panic!("seed {seed}: {other:?}"),
            Some(Err(_)) => ends[2] += 1,
            None => {
                ends[3] += 1;
                assert!(fault == 1, "seed {seed}: nothing ended the transfer");
            }
        }
        let broken = world.serving.is_none() || world.pulling.is_none();
        if broken {
            world.serving = None;
            world.pulling = None;
            assert!(world.puller.sealed.borrow().get(&id).is_none() || ends[0] > 0);
            world.world.run_until_idle(Duration::from_secs(1));
            world.connect();
        }
        // Whatever the end was, FIN arrives or the connection ends: nothing stays held.
        for _ in 0..200 {
            let _ = world.turn();
            world.world.step_within(Duration::from_millis(1));
        }
        assert_eq!(world.server.lent.get(), 0, "seed {seed}: a reference is still held");
        assert_eq!(world.puller.unsealed.get(), 0, "seed {seed}: an object is still unsealed");
    }
    (world.world.trace_hash(), ends)
}

#[test]
fn objects_come_whole_or_not_at_all_and_nothing_stays_held() {
    let seeds = if std::env::var_os("BEELINE_DEEP").is_some() { 3000 } else { 150 };
    let mut ends = [0; 4];
    for seed in 1..=seeds {
        for (sum, count) in ends.iter_mut().zip(run(seed).1) {
            *sum += count;
        }
    }
    assert!(ends[0] > 100 && ends[1] > 10 && ends[2] > 10, "the seeds meet too little: {ends:?}");
}

#[test]
fn one_seed_gives_one_trace() {
    for seed in [3, 17, 99] {
        assert_eq!(run(seed), run(seed));
    }
}

#[test]
fn buffers_of_a_connection_are_used_by_the_next() {
    let mut world = World::new(1, SimOptions::default());
    for _ in 0..5 {
        world.serving = None;
        world.pulling = None;
        world.connect();
    }
    for context in &world.contexts {
        let reused = context.reused_buffers.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!((reused, context.registered()), (5, 1));
    }
}

#[test]
fn a_full_store_refuses_and_the_next_object_comes() {
    let mut world = World::new(5, SimOptions::default());
    let (big, small) = (ObjectId([1; 20]), ObjectId([2; 20]));
    world.server.put(big, &[7; 100_000], 0, false);
    world.server.put(small, &[8; 100], 0, true);
    world.puller.room = 50_000;
    for plan in [Plan::READ, Plan::SENT] {
        world.pulling.as_mut().unwrap().start(big, plan, 0).unwrap();
        let outcome = world.finish().unwrap().unwrap();
        assert_eq!(outcome, Outcome::Failed("full".to_owned()));
        world.world.run_for(Duration::from_millis(5));
        let _ = world.turn();
    }
    world.pulling.as_mut().unwrap().start(small, Plan::READ, 0).unwrap();
    assert_eq!(world.finish().unwrap().unwrap(), Outcome::Came { bytes: 100, read: true });
    world.pulling.as_mut().unwrap().start(small, Plan::READ, 0).unwrap();
    assert_eq!(world.finish().unwrap().unwrap(), Outcome::Here);
}

#[test]
fn a_fin_that_is_lost_keeps_its_reference_until_the_connection_ends() {
    for plan in [Plan::READ, Plan::SENT] {
        let mut world = World::new(9, SimOptions::default());
        let id = ObjectId([1; 20]);
        world.server.put(id, &[7; 100_000], 0, true);
        world.pulling.as_mut().unwrap().start(id, plan, 0).unwrap();
        assert!(matches!(world.finish(), Some(Ok(Outcome::Came { .. }))));
        // FIN was posted, and nothing arrives any more.
        world.world.partition(1, 2);
        world.world.run_for(Duration::from_millis(1));
        let _ = world.turn();
        assert_eq!(world.server.lent.get(), 1, "FIN arrived, or the reference is gone before it");
        world.pulling = None;
        world.serving = None;
        assert_eq!(world.server.lent.get(), 0, "a reference outlives its connection");
        world.world.heal(1, 2);
        world.world.run_until_idle(Duration::from_secs(1));
        world.connect();
        world.puller.sealed.borrow_mut().remove(&id);
        world.pulling.as_mut().unwrap().start(id, plan, 0).unwrap();
        assert!(matches!(world.finish(), Some(Ok(Outcome::Came { .. }))));
    }
}

#[test]
fn an_object_that_is_to_come_over_a_socket_is_given_back_at_once_and_the_connection_goes_on() {
    let mut world = World::new(12, SimOptions::default());
    let (large, small) = (ObjectId([1; 20]), ObjectId([2; 20]));
    world.server.put(large, &[7; 100_000], 0, true);
    world.server.put(small, &[8; 100], 0, true);
    let plan = Plan { socket: u64::MAX << 16, ..Plan::SENT };
    world.pulling.as_mut().unwrap().start(large, plan, 0).unwrap();
    assert_eq!(world.finish().unwrap().unwrap(), Outcome::OverSocket);
    for _ in 0..20 {
        let _ = world.turn();
        world.world.step_within(Duration::from_millis(1));
    }
    assert_eq!((world.server.lent.get(), world.puller.unsealed.get()), (0, 0));
    assert!(world.puller.bytes(large).is_none());
    world.pulling.as_mut().unwrap().start(small, plan, 0).unwrap();
    assert_eq!(world.finish().unwrap().unwrap(), Outcome::Came { bytes: 100, read: false });
}

#[test]
fn what_was_read_after_its_server_may_have_let_go_is_not_sealed() {
    let mut world = World::new(13, SimOptions::default());
    let id = ObjectId([1; 20]);
    world.server.put(id, &[7; 100_000], 0, false);
    world.late = true;
    world.pulling.as_mut().unwrap().start(id, Plan::READ, 0).unwrap();
    let outcome = world.finish().unwrap();
    assert!(matches!(outcome, Err(TransferError::Late)), "{outcome:?}");
    assert!(world.puller.bytes(id).is_none() && world.puller.unsealed.get() == 0);
    // What the server copied itself is what it was.
    world.serving = None;
    world.world.run_until_idle(Duration::from_secs(1));
    world.connect();
    world.pulling.as_mut().unwrap().start(id, Plan::SENT, 0).unwrap();
    assert!(matches!(world.finish(), Some(Ok(Outcome::Came { read: false, .. }))));
}

#[test]
fn bytes_that_changed_on_the_way_are_noticed() {
    let mut world = World::new(6, SimOptions::default());
    let id = ObjectId([1; 20]);
    world.server.put(id, &[7; 100_000], 0, true);
    copy_in(&*world.server.memory, 50_000, &[1]);
    for plan in [Plan::READ, Plan::SENT] {
        world.pulling.as_mut().unwrap().start(id, plan, 0).unwrap();
        let outcome = world.finish().unwrap().unwrap();
        assert!(matches!(outcome, Outcome::Failed(ref why) if why.contains("checksum")));
        world.world.run_for(Duration::from_millis(5));
        let _ = world.turn();
    }
    assert_eq!(world.puller.unsealed.get(), 0);
}
