//! The nine calls against a plain map: random programs of several clients, with eviction, a disk that
//! is full or fails, time-outs and clients that die.

use std::collections::{BTreeMap, HashMap};

use beeline_env::random::Randomness;

use super::planted::{PLANTED, Planted};
use super::rig::{Rig, Said, Todo};
use super::situation_tests::{
    a_full_disk_makes_room_without_another_call, a_number_is_used_again_after_its_create_timed_out,
    an_object_deleted_while_it_is_written_to_a_full_disk_is_gone,
};
use crate::id::ObjectId;
use crate::wire::{FLAG_RELEASE, Location, Operation, Request, Status};

pub(super) const SECOND: u64 = 1_000_000_000;

pub(super) fn id(number: u64) -> ObjectId {
    let mut bytes = [7; 20];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    ObjectId(bytes)
}

pub(super) fn contents(seed: u64, size: u64) -> Vec<u8> {
    (0..size).map(|at| (seed.wrapping_mul(31).wrapping_add(at) % 251) as u8).collect()
}

/// An object of the model.
#[derive(Clone, Copy, Debug)]
struct Known {
    seed: u64,
    size: u64,
    sealed: bool,
    pinned: bool,
    references: u32,
    /// The disk failed for it: it may be gone.
    lost: bool,
    /// Tells it from a later object of the same id.
    life: u64,
}

/// A reference a client holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    client: u32,
    id: ObjectId,
    life: u64,
    location: Location,
    seed: u64,
    creator: bool,
}

/// A plain map beside a store.
struct Model {
    rig: Rig,
    spills: bool,
    limit: u64,
    objects: BTreeMap<ObjectId, Known>,
    held: Vec<Held>,
    pending: HashMap<(u32, u32), Request>,
    /// Reserves: the segment, where the next object lies, and the bytes left.
    reserves: HashMap<u32, (u32, u64, u64)>,
    clients: Vec<u32>,
    next_client: u32,
    lives: u64,
    /// A delete is under way, whose withdrawal is no eviction.
    deleting: Option<ObjectId>,
    /// A seal is under way: those that wait for the object are answered before its creator is.
    sealing: Option<ObjectId>,
    done: u64,
    judged: u64,
    /// All that the store said.
    trace: String,
}

type Verdict = Result<(), String>;

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}

impl Model {
    fn new(limit: u64, spill: u64) -> Self {
        let mut model = Self {
            rig: Rig::new(limit, spill),
            spills: spill > 0,
            limit,
            objects: BTreeMap::new(),
            held: Vec::new(),
            pending: HashMap::new(),
            reserves: HashMap::new(),
            clients: Vec::new(),
            next_client: 1,
            lives: 0,
            deleting: None,
            sealing: None,
            done: 0,
            judged: 0,
            trace: String::new(),
        };
        for _ in 0..3 {
            model.join();
        }
        model
    }

    fn join(&mut self) {
        self.rig.core.join(self.next_client);
        self.clients.push(self.next_client);
        self.next_client += 1;
    }

    fn drop_reference(&mut self, held: Held) {
        let Some(known) = self.objects.get_mut(&held.id) else { return };
        if known.life != held.life {
            return;
        }
        known.references -= 1;
        if !known.sealed && held.creator {
            self.objects.remove(&held.id);
        }
    }

    fn leave(&mut self, client: u32) -> Verdict {
        let gone: Vec<Held> =
            self.held.iter().filter(|held| held.client == client).copied().collect();
        self.held.retain(|held| held.client != client);
        gone.into_iter().for_each(|held| self.drop_reference(held));
        self.pending.retain(|(of, _), _| *of != client);
        self.clients.retain(|other| *other != client);
        self.reserves.remove(&client);
        self.rig.leave(client);
        self.join();
        self.judge()
    }

    fn send(&mut self, client: u32, request: Request) -> Verdict {
        // Numbers come again soon, as soon as they may.
        let free = |tag: &u32| !self.pending.contains_key(&(client, *tag));
        let tag = (1..64).find(free).ok_or("too many requests wait")?;
        self.pending.insert((client, tag), request);
        self.deleting = (request.operation == Operation::Delete).then_some(request.id);
        self.sealing = (request.operation == Operation::Seal).then_some(request.id);
        self.rig.request_as(client, tag, request);
        let verdict = self.judge();
        (self.deleting, self.sealing) = (None, None);
        verdict
    }

    /// Judges what the store said since the last time.
    fn judge(&mut self) -> Verdict {
        while let Some(said) = self.rig.said.pop_front() {
            self.trace += &format!("{said:?}\n");
            match said {
                Said::Withdrawn(id) => self.withdrawn(id)?,
                Said::Fetch(id, _) => {
                    self.rig.core.fetched(id, false, self.rig.now_ns);
                    self.rig.take();
                }
                Said::Reply { client, tag, reply } => {
                    let asked = self.pending.remove(&(client, tag));
                    let Some(asked) = asked else {
                        return Err(format!("client {client} gets a second reply to {tag}"));
                    };
                    self.done += u64::from(reply.status == Status::Done);
                    self.answered(client, &asked, reply.status, &reply.location)
                        .map_err(|what| format!("{what}: {asked:?} -> {reply:?}"))?;
                }
            }
        }
        match self.rig.complaint.take() {
            Some(complaint) => Err(complaint),
            None => self.references_hold(),
        }
    }

    /// An object left by itself: only one that no client holds may, and only where nothing is spilled.
    fn withdrawn(&mut self, id: ObjectId) -> Verdict {
        if self.deleting == Some(id) {
            return Ok(());
        }
        let known = self.objects.remove(&id).ok_or("what is not there was withdrawn")?;
        ensure(known.sealed, || format!("{id} is withdrawn before it is sealed"))?;
        ensure(known.references == 0, || format!("{id} is evicted while it is referenced"))?;
        ensure(!known.pinned || known.lost, || format!("{id} is evicted while it is pinned"))?;
        ensure(!self.spills || known.lost, || format!("{id} is evicted though there is a disk"))
    }

    fn answered(
        &mut self,
        client: u32,
        asked: &Request,
        status: Status,
        location: &Location,
    ) -> Verdict {
        let known = self.objects.get(&asked.id).copied();
        let sealed = known.is_some_and(|known| known.sealed);
        match (asked.operation, status) {
            (Operation::Create, Status::Done) => {
                ensure(known.is_none(), || "an id names two objects".to_owned())?;
                let held = self.rig.core.memory().get(location.segment);
                let own = held.is_some_and(|held| held.writer == client && held.ready);
                ensure(own, || "created where the client may not write".to_owned())?;
                self.lives += 1;
                let (life, seed, size) = (self.lives, self.lives, asked.size);
                let known = Known {
                    seed,
                    size,
                    sealed: false,
                    pinned: false,
                    references: 1,
                    lost: false,
                    life,
                };
                self.objects.insert(asked.id, known);
                self.rig.write(location, &contents(seed, size));
                let held =
                    Held { client, id: asked.id, life, location: *location, seed, creator: true };
                self.held.push(held);
                Ok(())
            }
            (Operation::Reserve, Status::Done) => {
                let held = self.rig.core.memory().get(location.segment);
                let own = held.is_some_and(|held| held.writer == client && held.ready);
                ensure(own, || "reserved where the client may not write".to_owned())?;
                let reserve = (location.segment, location.offset, location.size);
                self.reserves.insert(client, reserve);
                Ok(())
            }
            (Operation::Reserve, Status::Full) => Ok(()),
            (Operation::Put, Status::Done) => {
                ensure(known.is_none(), || "an id names two objects".to_owned())?;
                self.lives += 1;
                let known = Known {
                    seed: self.lives,
                    size: asked.size,
                    sealed: true,
                    pinned: false,
                    references: 0,
                    lost: false,
                    life: self.lives,
                };
                self.objects.insert(asked.id, known);
                Ok(())
            }
            (Operation::Create | Operation::Put, Status::Exists) => {
                ensure(known.is_some(), || "there is none of this id".to_owned())
            }
            (Operation::Create, Status::Full) => Ok(()),
            (Operation::Create, Status::TooLarge) => {
                ensure(asked.size > self.limit, || "it would fit".to_owned())
            }
            (Operation::Seal, Status::Done) => {
                let place = self.held.iter().position(|held| {
                    held.client == client && held.location.handle == asked.size && held.creator
                });
                let place = place.ok_or("sealed by another than its creator")?;
                let held = self.held[place];
                let known = self.objects.get_mut(&asked.id).ok_or("what is not there is sealed")?;
                ensure(!known.sealed && known.life == held.life, || "sealed twice".to_owned())?;
                known.sealed = true;
                if asked.flags & FLAG_RELEASE != 0 {
                    known.references -= 1;
                    self.held.remove(place);
                } else {
                    self.held[place].creator = false;
                }
                Ok(())
            }
            (Operation::Get, Status::Done) => {
                let known = self.objects.get_mut(&asked.id).ok_or("served and not there")?;
                let sealed = known.sealed || self.sealing == Some(asked.id);
                ensure(sealed, || "served before it is sealed".to_owned())?;
                ensure(location.size == known.size, || "served with another size".to_owned())?;
                known.references += 1;
                let held = Held {
                    client,
                    id: asked.id,
                    life: known.life,
                    location: *location,
                    seed: known.seed,
                    creator: false,
                };
                self.held.push(held);
                Ok(())
            }
            (Operation::Get, Status::Absent) => {
                ensure(known.is_none(), || "it is there".to_owned())
            }
            (Operation::Get, Status::TimedOut) => {
                ensure(!sealed || self.spills, || "it was there all the time".to_owned())
            }
            (Operation::Get, Status::Damaged) => Ok(()),
            (Operation::Contains, Status::Done) => ensure(sealed, || "it is not there".to_owned()),
            (Operation::Contains, _) => ensure(!sealed, || "it is there".to_owned()),
            (Operation::Delete, Status::Done) => {
                ensure(sealed, || "deleted and not there".to_owned())?;
                self.objects.remove(&asked.id);
                Ok(())
            }
            (Operation::Delete, Status::Unsealed) => {
                ensure(known.is_some() && !sealed, || "it is sealed".to_owned())
            }
            (Operation::Delete, _) => ensure(known.is_none(), || "it is there".to_owned()),
            (Operation::Pin | Operation::Unpin, Status::Done) => {
                let known = self.objects.get_mut(&asked.id).ok_or("pinned and not there")?;
                ensure(known.sealed, || "pinned before it is sealed".to_owned())?;
                known.pinned = asked.operation == Operation::Pin;
                Ok(())
            }
            (Operation::Pin | Operation::Unpin, _) => ensure(!sealed, || "it is there".to_owned()),
            _ => Err("an answer out of place".to_owned()),
        }
    }

    /// What is referenced stays as it was, whatever happens: every byte now and then, some always.
    fn references_hold(&mut self) -> Verdict {
        self.judged += 1;
        let whole = self.judged.is_multiple_of(32);
        for held in &self.held {
            let size = held.location.size;
            let right = contents(held.seed, if whole { size } else { size.min(256) });
            let found = self.rig.bytes(&held.location, right.len());
            ensure(found.as_ref() == Some(&right), || {
                format!("the bytes of {} changed while client {} held it", held.id, held.client)
            })?;
        }
        Ok(())
    }

    /// A small object by one request, or the reserve for such.
    fn put_small(&mut self, client: u32, object: ObjectId, size: u64) -> Verdict {
        let taken = size.max(1).next_multiple_of(64);
        let request = |operation| Request { size, ..Request::new(operation, object) };
        match self.reserves.get_mut(&client).filter(|(_, _, left)| *left >= taken) {
            None => {
                self.reserves.remove(&client);
                self.send(client, Request { size: 32 << 10, ..request(Operation::Reserve) })
            }
            Some((segment, next, left)) => {
                let place = Location { segment: *segment, offset: *next, ..Location::default() };
                *next += taken;
                *left -= taken;
                if *left == 0 {
                    self.reserves.remove(&client);
                }
                self.rig.write(&place, &contents(self.lives + 1, size));
                let put = Request { timeout_us: place.offset, ..request(Operation::Put) };
                self.send(client, put)
            }
        }
    }

    /// Does the thing to do at `index`.
    fn one(&mut self, index: usize, fails: bool) {
        if let Some(Todo::GiveBack { client }) = self.rig.todo.get(index) {
            self.reserves.remove(client);
        }
        self.rig.one(index, fails);
    }

    /// One thing that a client, the disk or the clock has to do.
    fn step(&mut self, chance: &mut Randomness) -> Verdict {
        let client = self.clients[chance.below(self.clients.len() as u64) as usize];
        let object = id(chance.below(10));
        let request = |operation| Request::new(operation, object);
        match chance.below(110) {
            100.. => {
                let size = chance.below(12_000);
                self.put_small(client, object, size)
            }
            0..22 => {
                let size = match chance.below(8) {
                    0 => 0,
                    1..4 => chance.below(2_000),
                    4..7 => chance.below(200_000),
                    _ => chance.below(self.limit * 5 / 4),
                };
                let timeout_us = [0, 100, 1_000_000][chance.below(3) as usize];
                self.send(client, Request { size, timeout_us, ..request(Operation::Create) })
            }
            22..42 => {
                let own: Vec<Held> = self
                    .held
                    .iter()
                    .filter(|held| held.creator && held.client == client)
                    .copied()
                    .collect();
                let Some(held) = own.first() else { return Ok(()) };
                let flags = if chance.chance(1, 2) { FLAG_RELEASE } else { 0 };
                let seal = Request::new(Operation::Seal, held.id);
                self.send(client, Request { flags, size: held.location.handle, ..seal })
            }
            42..57 => {
                let timeout_us = [0, 0, 100, 500_000][chance.below(4) as usize];
                self.send(client, Request { timeout_us, ..request(Operation::Get) })
            }
            57..67 => {
                let Some(place) = self.held.iter().position(|held| held.client == client) else {
                    return Ok(());
                };
                let held = self.held.swap_remove(place);
                self.drop_reference(held);
                let release = Request::new(Operation::Release, held.id);
                let size = held.location.handle;
                self.rig.request_as(client, 1 << 20, Request { size, ..release });
                self.judge()
            }
            67..72 => self.send(client, request(Operation::Delete)),
            72..76 => self.send(client, request(Operation::Contains)),
            76..78 => self.send(client, request(Operation::Pin)),
            78..81 => self.send(client, request(Operation::Unpin)),
            81..83 => self.leave(client),
            83..88 => {
                self.rig.pass([50_000, 300_000, SECOND][chance.below(3) as usize]);
                self.judge()
            }
            _ => {
                let count = self.rig.todo.len() as u64;
                if count == 0 {
                    return Ok(());
                }
                let index = chance.below(count) as usize;
                // The disk does its work in order.
                let disk = |todo: &Todo| matches!(todo, Todo::Disk(_));
                let index = match &self.rig.todo[index] {
                    Todo::Disk(_) => self.rig.todo.iter().position(disk).unwrap_or(index),
                    _ => index,
                };
                let fails = chance.chance(1, 6);
                if fails && disk(&self.rig.todo[index]) {
                    self.objects.values_mut().for_each(|known| known.lost |= known.sealed);
                }
                self.one(index, fails);
                self.judge()
            }
        }
    }

    /// All clients leave; nothing is left but what was sealed, and when that is deleted nothing at all.
    fn end(&mut self) -> Verdict {
        for client in self.clients.clone() {
            self.leave(client)?;
        }
        let last = self.clients[0];
        for _ in 0..200 {
            while !self.rig.todo.is_empty() {
                self.one(0, false);
                self.judge()?;
            }
            self.rig.pass(SECOND);
            self.judge()?;
        }
        for object in self.objects.clone().into_keys() {
            self.send(last, Request::new(Operation::Delete, object))?;
        }
        for _ in 0..5 {
            while !self.rig.todo.is_empty() {
                self.rig.one(0, false);
                self.judge()?;
            }
            self.rig.pass(SECOND);
        }
        let core = &self.rig.core;
        ensure(self.objects.is_empty(), || format!("left: {:?}", self.objects))?;
        ensure(core.table().held() == 0, || format!("{} objects leak", core.table().held()))?;
        ensure(core.memory().used() == 0, || format!("{} bytes leak", core.memory().used()))?;
        ensure(core.reserved_bytes() == 0, || format!("{} reserved", core.reserved_bytes()))?;
        ensure(core.spilled_bytes() == 0, || format!("{} on disk", core.spilled_bytes()))?;
        ensure(self.rig.disk.is_empty(), || format!("{} files leak", self.rig.disk.len()))?;
        ensure(core.waiting() == 0, || format!("{} requests wait", core.waiting()))
    }
}

fn run(seed: u64, steps: u32) -> Result<u64, String> {
    let mut chance = Randomness::new(seed);
    let spill = [0, 1 << 20, 64 << 20][chance.below(3) as usize];
    let mut model = Model::new(2 << 20, spill);
    for step in 0..steps {
        model.step(&mut chance).map_err(|what| format!("seed {seed}, step {step}: {what}"))?;
    }
    model.end().map_err(|what| format!("seed {seed}, at the end: {what}"))?;
    Ok(model.done)
}

#[test]
fn random_programs_agree_with_a_plain_map() {
    let seeds = if std::env::var_os("BEELINE_DEEP").is_some() { 3000 } else { 120 };
    let mut done = 0;
    for seed in 0..seeds {
        done += run(seed, 500).unwrap_or_else(|what| panic!("{what}"));
    }
    assert!(done > seeds * 100, "{done} requests of {seeds} programs did anything");
}

/// Whether there is a program that the store does not pass while it has the bug.
fn finds(bug: Planted, programs: impl IntoIterator<Item = impl FnOnce() -> Verdict>) -> bool {
    PLANTED.set(Some(bug));
    // A bug may also break what the store or the program asserts.
    let run = |program| std::panic::catch_unwind(std::panic::AssertUnwindSafe(program));
    let found = programs.into_iter().any(|program| !matches!(run(program), Ok(Ok(()))));
    PLANTED.set(None);
    found
}

#[test]
fn each_planted_bug_is_found() {
    for bug in [
        Planted::EvictReferenced,
        Planted::ServeUnsealed,
        Planted::KeepDeadReferences,
        Planted::WriteAmongOthers,
        Planted::FreeWhileReferenced,
        Planted::KeepDeadReserves,
        Planted::PutOverAnother,
    ] {
        let programs = (0..300).map(|seed| move || run(seed, 500).map(drop));
        assert!(finds(bug, programs), "no program of 300 finds {bug:?}");
    }
    // Random programs seldom come to these situations: they are arranged.
    for (bug, program) in [
        (Planted::LoseFailedSpill, a_full_disk_makes_room_without_another_call as fn()),
        (Planted::LeakDeletedSpill, an_object_deleted_while_it_is_written_to_a_full_disk_is_gone),
        (Planted::TakeAnotherRequest, a_number_is_used_again_after_its_create_timed_out),
    ] {
        let arranged = || -> Verdict {
            program();
            Ok(())
        };
        arranged().unwrap();
        assert!(finds(bug, [arranged]), "the arranged program does not find {bug:?}");
    }
}

#[test]
fn a_random_program_is_the_same_each_time() {
    let said = |seed| {
        let mut chance = Randomness::new(seed);
        let mut model = Model::new(2 << 20, 1 << 20);
        (0..500).for_each(|_| model.step(&mut chance).unwrap());
        model.end().unwrap();
        model.trace
    };
    for seed in 0..8 {
        assert!(said(seed) == said(seed), "seed {seed} says something else the second time");
    }
}
