//! The store's decisions: requests in, effects out. No socket, no thread, no clock of its own.
//!
//! Place: between the loop ([`super::serve`]) and the tables. Time comes as a number of
//! nanoseconds with each call; what has to be sent or done is collected in
//! [`Core::take_effects`], in the order in which it has to happen.
//!
//! Invariants: a request gets exactly one reply, but for a release, which gets none; a reader is
//! told of an object only once it is sealed, and of its segment before the reply; memory of an
//! object is free only when no client holds a reference.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use super::figures::Counters;
use super::memory::{GONE, Memory, Place, STORE, Segments};
use super::planted::{Planted, planted};
use super::reserve::Reserve;
use super::spill::Job;
use super::table::{Object, State, Table};
use crate::id::ObjectId;
use crate::segment::Segment;
use crate::wire::{
    FLAG_CHECKSUM, FLAG_FETCH, FLAG_IN_MEMORY, FLAG_RELEASE, Location, Operation, Record,
    RecordKind, Reply, Request, Status,
};

/// Most requests of one client that wait, and most objects it subscribed to.
pub(super) const MOST_WAITING: usize = 1 << 16;
/// Most creates of one client that wait for memory.
pub(super) const MOST_HUNGRY: usize = 1 << 10;
/// How long a client may take to map a segment it was offered, and a disk to give an object back.
const MAPPING_US: u64 = 10_000_000;
/// First and longest pause before an object is looked for at other nodes again.
pub(super) const FETCH_AGAIN_NS: (u64, u64) = (20_000_000, 1_000_000_000);

/// What has to be done for the outside.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Answer request `tag` of `client`.
    Reply { client: u32, tag: u32, reply: Reply },
    /// Tell `client` that the object is here.
    News { client: u32, id: ObjectId },
    /// Send a record over the socket, with the segment's descriptor.
    Send { client: u32, record: Record, segment: Option<Arc<Segment>> },
    /// Work for the spilling thread.
    Spill(Job),
    /// Bring the object from another node, or from this one, then [`Core::fetched`].
    Fetch(ObjectId, Option<SocketAddr>),
    /// The object is here now, and others may fetch it.
    Announce(ObjectId),
    /// It is no more.
    Withdraw(ObjectId),
    /// The client broke the protocol: end the connection.
    Expel { client: u32, reason: &'static str },
}

#[derive(Debug, Default)]
pub(super) struct Client {
    // In an order, so that what a client leaves behind goes in the same order each time.
    references: BTreeMap<u32, u32>,
    subscriptions: HashSet<ObjectId>,
    pub waiting: BTreeSet<u32>,
    pub reserve: Option<Reserve>,
}

/// A request that has not been answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub request: Request,
    pub timer: Option<(u64, u64)>,
    /// Tells it from a later one of the same number.
    pub serial: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    Wait {
        client: u32,
        tag: u32,
    },
    FetchAgain {
        id: ObjectId,
        pause_ns: u64,
    },
    /// The disk may take something again.
    SpillAgain,
    /// What clients should have unmapped by now does not come free.
    Unmapping,
}

/// Something that waits for memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hungry {
    Create { client: u32, tag: u32, serial: u64 },
    Restore { slot: u32, handle: u64 },
}

/// Why there is no memory for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// Its writer has yet to map a segment.
    Offered,
    /// Something has to go first, or nothing can.
    Now,
}

/// How the store is set up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes on disk; 0: objects are not spilled but lost.
    pub spill: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Core {
    pub(super) table: Table,
    pub(super) memory: Memory,
    pub(super) clients: HashMap<u32, Client>,
    pub(super) waits: HashMap<(u32, u32), Wait>,
    /// Requests that wait for an object.
    pub(super) by_id: HashMap<ObjectId, Vec<(u32, u32)>>,
    pub(super) hungry: VecDeque<Hungry>,
    /// Of these, creates that are over.
    pub(super) fed_up: usize,
    /// Fetches under way: the pause before the next try, and the node asked, if one was named.
    pub(super) fetching: HashMap<ObjectId, (u64, Option<SocketAddr>)>,
    /// Reserves that were not called in.
    pub(super) reserves: usize,
    /// Bytes of all reserves.
    pub(super) reserved_bytes: u64,
    subscribers: HashMap<ObjectId, Vec<u32>>,
    pub(super) timers: BTreeMap<(u64, u64), Timer>,
    pub(super) sequence: u64,
    pub(super) effects: Vec<Effect>,
    pub(super) spill_limit: u64,
    pub(super) spilled_bytes: u64,
    /// Live objects and bytes of each file.
    pub(super) files: HashMap<u64, (u64, u64)>,
    pub(super) next_file: u64,
    /// The objects of the spill under way.
    pub(super) spilling: Vec<u32>,
    /// The last spill failed: nothing is spilled until then.
    pub(super) no_spill_before_ns: u64,
    /// When memory is looked for again though clients do not unmap what they should.
    pub(super) unmapping_due_ns: Option<u64>,
    /// Objects that a timer looks for at other nodes again.
    pub(super) again: HashSet<ObjectId>,
    pub(super) memory_changed: bool,
    pub(super) now_ns: u64,
    pub(crate) counters: Counters,
}

impl Core {
    pub(crate) fn new(limits: Limits, segments: Segments) -> Self {
        Self {
            table: Table::default(),
            memory: Memory::new(limits.memory, segments),
            clients: HashMap::new(),
            waits: HashMap::new(),
            by_id: HashMap::new(),
            hungry: VecDeque::new(),
            fed_up: 0,
            fetching: HashMap::new(),
            reserves: 0,
            reserved_bytes: 0,
            subscribers: HashMap::new(),
            timers: BTreeMap::new(),
            sequence: 0,
            effects: Vec::new(),
            spill_limit: limits.spill,
            spilled_bytes: 0,
            files: HashMap::new(),
            next_file: 1,
            spilling: Vec::new(),
            no_spill_before_ns: 0,
            unmapping_due_ns: None,
            again: HashSet::new(),
            memory_changed: false,
            now_ns: 0,
            counters: Counters::default(),
        }
    }

    pub(crate) fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients.len()
    }

    pub(crate) fn spilled_bytes(&self) -> u64 {
        self.spilled_bytes
    }

    /// Bytes of the memory that are no object's: reserved for those to come.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waits.len()
    }

    /// A client came.
    pub(crate) fn join(&mut self, client: u32) {
        assert!(client != STORE && client != GONE, "the store is no client");
        self.clients.insert(client, Client::default());
    }

    /// A client is gone: its references, what it had not sealed, and what it waited for.
    pub(crate) fn leave(&mut self, client: u32, now_ns: u64) {
        self.now_ns = now_ns;
        let Some(gone) = self.clients.remove(&client) else { return };
        for tag in gone.waiting {
            if let Some(wait) = self.waits.remove(&(client, tag)) {
                wait.timer.and_then(|timer| self.timers.remove(&timer));
                self.fed_up += usize::from(wait.request.operation == Operation::Create);
                self.forget_waiter(wait.request.id, client, tag);
            }
        }
        for id in gone.subscriptions {
            if let Some(subscribers) = self.subscribers.get_mut(&id) {
                subscribers.retain(|other| *other != client);
                if subscribers.is_empty() {
                    self.subscribers.remove(&id);
                }
            }
        }
        for (slot, count) in gone.references {
            if planted(Planted::KeepDeadReferences) {
                continue;
            }
            self.drop_references(slot, count);
        }
        if let Some(reserve) = gone.reserve {
            self.forget_reserve(reserve);
        }
        for (number, clients) in self.memory.forget_client(client, now_ns) {
            self.tell_to_unmap(number, clients);
        }
        self.memory_changed = true;
        self.feed();
    }

    pub(super) fn reply(&mut self, client: u32, tag: u32, reply: Reply) {
        self.effects.push(Effect::Reply { client, tag, reply });
    }

    pub(super) fn answer(&mut self, client: u32, tag: u32, status: Status) {
        self.reply(client, tag, Reply::of(status));
    }

    /// A request of `client`.
    pub(crate) fn request(&mut self, client: u32, tag: u32, request: Request, now_ns: u64) {
        self.now_ns = now_ns;
        let Some(known) = self.clients.get(&client) else { return };
        if tag == 0 || known.waiting.contains(&tag) {
            self.effects.push(Effect::Expel { client, reason: "a request's number is in use" });
            return;
        }
        let id = request.id;
        match request.operation {
            Operation::Ping => self.answer(client, tag, Status::Done),
            Operation::Contains => {
                let sealed = self.sealed(id).is_some();
                self.answer(client, tag, if sealed { Status::Done } else { Status::Absent });
            }
            Operation::Create => self.create(client, tag, request),
            Operation::Seal => {
                let status = self.seal(client, &request);
                self.answer(client, tag, status);
            }
            Operation::Release => self.release(client, &request),
            Operation::Reserve => self.reserve(client, tag, &request),
            Operation::Put => self.put(client, tag, &request),
            Operation::GiveBack => self.give_back(client),
            Operation::Get | Operation::Fetch => self.get(client, tag, request),
            Operation::Delete => {
                let status = self.delete(id);
                self.answer(client, tag, status);
            }
            Operation::Subscribe => self.subscribe(client, tag, id),
            Operation::Pin | Operation::Unpin => {
                let status = self.pin(id, request.operation == Operation::Pin);
                self.answer(client, tag, status);
            }
        }
        self.feed();
    }

    /// The slot of a sealed object.
    fn sealed(&self, id: ObjectId) -> Option<u32> {
        let slot = self.table.find(id)?;
        let sealed = self.table.get(slot)?.is_sealed() || planted(Planted::ServeUnsealed);
        sealed.then_some(slot)
    }

    // ── create, seal, release ──────────────────────────────────────────────────────────────────

    fn create(&mut self, client: u32, tag: u32, request: Request) {
        let Some(bytes) = request.size.checked_add(request.metadata_size) else {
            return self.answer(client, tag, Status::TooLarge);
        };
        if bytes > self.memory.limit() {
            return self.answer(client, tag, Status::TooLarge);
        }
        if self.table.find(request.id).is_some() {
            return self.answer(client, tag, Status::Exists);
        }
        match self.allocate_new(client, bytes) {
            Ok(place) => self.created(client, tag, &request, place),
            // Who does not wait is told at once, but for a segment that is on its way.
            Err(Shortage::Now) if request.timeout_us == 0 => {
                self.counters.refused_creates += 1;
                self.answer(client, tag, Status::Full);
            }
            Err(shortage) => {
                let mut waiting = request;
                if shortage == Shortage::Offered {
                    waiting.timeout_us = waiting.timeout_us.max(MAPPING_US);
                }
                if self.is_greedy(client) {
                    return self.answer(client, tag, Status::Limit);
                }
                if let Some(serial) = self.wait(client, tag, waiting) {
                    self.hungry.push_back(Hungry::Create { client, tag, serial });
                }
            }
        }
    }

    /// Whether as many creates of the client wait for memory as may: each of them is looked at
    /// whenever some comes free.
    fn is_greedy(&self, client: u32) -> bool {
        let of_client = |next: &&Hungry| match **next {
            Hungry::Create { client: of, tag, serial } => {
                of == client && self.is_waiting(client, tag, serial)
            }
            Hungry::Restore { .. } => false,
        };
        self.hungry.len() >= MOST_HUNGRY
            && self.hungry.iter().filter(of_client).count() >= MOST_HUNGRY
    }

    /// Gives memory to a create that waits. `false`: it has to wait on.
    pub(super) fn try_create(&mut self, client: u32, tag: u32, serial: u64) -> bool {
        if !self.is_waiting(client, tag, serial) {
            self.fed_up = self.fed_up.saturating_sub(1);
            return true;
        }
        let Some(Wait { request, .. }) = self.waits.get(&(client, tag)).copied() else {
            return true;
        };
        if self.table.find(request.id).is_some() {
            self.end_wait(client, tag);
            self.answer(client, tag, Status::Exists);
            return true;
        }
        let Ok(place) = self.allocate_new(client, request.size + request.metadata_size) else {
            return false;
        };
        self.end_wait(client, tag);
        self.created(client, tag, &request, place);
        true
    }

    fn created(&mut self, client: u32, tag: u32, request: &Request, place: Place) {
        let mut object =
            Object::new(request.id, client, place, request.size, request.metadata_size);
        object.references = 1;
        object.created_ns = self.now_ns;
        let slot = self.table.insert(object);
        if let Some(known) = self.clients.get_mut(&client) {
            *known.references.entry(slot).or_insert(0) += 1;
        }
        self.counters.creates += 1;
        let location = self.location(slot);
        self.reply(client, tag, Reply { status: Status::Done, location });
    }

    fn location(&self, slot: u32) -> Location {
        let handle = self.table.handle(slot);
        let Some(object) = self.table.get(slot) else { return Location::default() };
        let place = object.place.unwrap_or(Place { segment: 0, offset: 0 });
        Location {
            segment: place.segment,
            offset: place.offset,
            size: object.size,
            metadata_size: object.metadata_size,
            handle,
            checksum: object.checksum,
        }
    }

    fn seal(&mut self, client: u32, request: &Request) -> Status {
        let Some(slot) = self.table.of_handle(request.size) else { return Status::Absent };
        let Some(object) = self.table.get_mut(slot) else { return Status::Absent };
        if object.id != request.id || object.state != (State::Writing { creator: client }) {
            return Status::NotYours;
        }
        object.state = State::Sealed;
        if request.flags & FLAG_CHECKSUM != 0 {
            object.checksum = u32::try_from(request.checksum).ok();
        }
        let (id, bytes) = (object.id, object.bytes());
        if request.flags & FLAG_RELEASE != 0 {
            self.give_up(client, slot, 1);
        }
        self.tell_sealed(id, bytes);
        Status::Done
    }

    /// Counts an object that was sealed, and tells of it.
    pub(super) fn tell_sealed(&mut self, id: ObjectId, bytes: u64) {
        self.counters.seals += 1;
        self.counters.sealed_bytes += bytes;
        self.effects.push(Effect::Announce(id));
        for subscriber in self.subscribers.remove(&id).unwrap_or_default() {
            if let Some(known) = self.clients.get_mut(&subscriber) {
                known.subscriptions.remove(&id);
                self.effects.push(Effect::News { client: subscriber, id });
            }
        }
        self.serve_waiters(id);
    }

    fn release(&mut self, client: u32, request: &Request) {
        let slot = self.table.of_handle(request.size);
        let held = slot.filter(|slot| {
            self.clients.get(&client).is_some_and(|known| known.references.contains_key(slot))
        });
        match held {
            Some(slot) => self.give_up(client, slot, 1),
            None => {
                let reason = "a reference was released that the client does not hold";
                self.effects.push(Effect::Expel { client, reason });
            }
        }
    }

    fn give_up(&mut self, client: u32, slot: u32, count: u32) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        let Some(held) = known.references.get_mut(&slot) else { return };
        *held -= count.min(*held);
        if *held == 0 {
            known.references.remove(&slot);
        }
        self.drop_references(slot, count);
    }

    fn drop_references(&mut self, slot: u32, count: u32) {
        let Some(object) = self.table.get_mut(slot) else { return };
        object.references -= count.min(object.references);
        if object.references > 0 {
            return;
        }
        if matches!(object.state, State::Writing { .. }) {
            let id = object.id;
            self.counters.aborts += 1;
            self.destroy(slot);
            self.look_elsewhere(id);
        } else if object.doomed && object.state == State::Sealed {
            self.destroy(slot);
        } else {
            self.settle(slot);
            // Others' creates may have waited for this object to be evictable.
            self.memory_changed = true;
        }
    }

    /// Keeps the queue of those that may go, and each segment's count of them.
    pub(super) fn settle(&mut self, slot: u32) {
        let queued =
            |table: &Table| table.get(slot).map(|object| (object.is_queued(), object.place));
        let before = queued(&self.table);
        self.table.settle(slot);
        let after = queued(&self.table);
        if let (Some((was, _)), Some((is, Some(place)))) = (before, after)
            && was != is
        {
            self.memory.queue(place, is);
        }
    }

    /// Frees what the object takes and forgets it.
    pub(super) fn destroy(&mut self, slot: u32) {
        let Some(object) = self.table.remove(slot) else { return };
        if let Some(place) = object.place {
            if object.is_queued() {
                self.memory.queue(place, false);
            }
            self.memory.free(place, object.bytes());
        }
        // Its entry is free also where it lay on disk.
        self.memory_changed = true;
        if let State::Spilled { file, .. } | State::Restoring { file, .. } = object.state {
            self.forget_in_file(file, object.bytes());
        }
        if object.is_sealed() && !object.doomed {
            self.effects.push(Effect::Withdraw(object.id));
        }
    }

    // ── get, fetch, delete, subscribe, pin ─────────────────────────────────────────────────────

    fn get(&mut self, client: u32, tag: u32, request: Request) {
        let id = request.id;
        self.counters.gets += u64::from(request.operation == Operation::Get);
        let here = self.sealed(id);
        if let Some(slot) = here
            && self.try_get(client, tag, request.operation, slot)
        {
            return;
        }
        let fetch = request.flags & FLAG_FETCH != 0 || request.operation == Operation::Fetch;
        let comes = here.is_some() || self.table.find(id).is_some();
        let from_disk = here.is_some() && request.flags & FLAG_IN_MEMORY == 0;
        if request.timeout_us == 0 && !from_disk {
            self.counters.misses += 1;
            return self.answer(client, tag, if comes { Status::TimedOut } else { Status::Absent });
        }
        // An object that only has to be read back from disk is waited for, whatever the time-out.
        let mut request = request;
        if from_disk && request.timeout_us == 0 {
            request.timeout_us = MAPPING_US;
        }
        if self.wait(client, tag, request).is_none() {
            return;
        }
        self.by_id.entry(id).or_default().push((client, tag));
        if let Some(slot) = here {
            self.restore(slot);
        } else if fetch && !comes {
            self.fetch(id, request.node());
        }
    }

    pub(super) fn fetch(&mut self, id: ObjectId, from: Option<SocketAddr>) {
        if let std::collections::hash_map::Entry::Vacant(entry) = self.fetching.entry(id) {
            entry.insert((FETCH_AGAIN_NS.0, from));
            self.counters.fetches += 1;
            self.effects.push(Effect::Fetch(id, from));
        }
    }

    /// An object that is waited for is not made here after all: another node may have it.
    fn look_elsewhere(&mut self, id: ObjectId) {
        let wanted = self.waiters(id).into_iter().find_map(|waiter| {
            let request = self.waits.get(&waiter)?.request;
            let fetch = request.flags & FLAG_FETCH != 0 || request.operation == Operation::Fetch;
            fetch.then_some(request.node())
        });
        if let Some(from) = wanted {
            self.fetch(id, from);
        }
    }

    /// A fetch ended. One that succeeded sealed the object before, like any client.
    pub(crate) fn fetched(&mut self, id: ObjectId, found: bool, now_ns: u64) {
        self.now_ns = now_ns;
        let (pause, asked) = self.fetching.remove(&id).unwrap_or((FETCH_AGAIN_NS.0, None));
        if found {
            if self.sealed(id).is_some() {
                self.serve_waiters(id);
                self.feed();
            } else if self.by_id.contains_key(&id) {
                // It came and was deleted before this was said, and was asked for again; or another
                // makes it here.
                match self.table.find(id) {
                    None => self.fetch(id, None),
                    Some(_) => self.fetch_again(id, pause),
                }
            }
            return;
        }
        self.counters.failed_fetches += 1;
        let mut interested = false;
        let mut other = None;
        for (client, tag) in self.waiters(id) {
            let Some(wait) = self.waits.get(&(client, tag)).copied() else { continue };
            if wait.request.operation == Operation::Fetch && wait.request.node() != asked {
                // This fetch named another node, or none: that is asked next.
                other = Some(wait.request.node());
            } else if wait.request.operation == Operation::Fetch {
                self.end_wait(client, tag);
                self.forget_waiter(id, client, tag);
                self.answer(client, tag, Status::Unreachable);
            } else {
                interested |= wait.request.flags & FLAG_FETCH != 0;
            }
        }
        match other {
            Some(from) => self.fetch(id, from),
            None if interested => self.fetch_again(id, pause),
            None => {}
        }
    }

    /// Answers a get of an object that is in memory. `false` where it is not.
    fn try_get(&mut self, client: u32, tag: u32, operation: Operation, slot: u32) -> bool {
        let Some(object) = self.table.get_mut(slot) else { return false };
        if operation == Operation::Fetch {
            self.answer(client, tag, Status::Done);
            return true;
        }
        let Some(place) = object.place else { return false };
        if matches!(object.state, State::Restoring { .. }) {
            return false;
        }
        if object.references == u32::MAX {
            self.answer(client, tag, Status::Limit);
            return true;
        }
        object.references += 1;
        let Some(known) = self.clients.get_mut(&client) else { return true };
        *known.references.entry(slot).or_insert(0) += 1;
        self.counters.hits += 1;
        self.settle(slot);
        self.show(client, place.segment);
        let location = self.location(slot);
        self.reply(client, tag, Reply { status: Status::Done, location });
        true
    }

    /// Sees to it that `client` has the segment's descriptor.
    fn show(&mut self, client: u32, number: u32) {
        let Some(held) = self.memory.get_mut(number) else { return };
        if held.mapped_by.insert(client) {
            let record = Record::new(RecordKind::Segment, number.into(), held.segment.bytes(), 0);
            let segment = Some(Arc::clone(&held.segment));
            self.effects.push(Effect::Send { client, record, segment });
        }
    }

    pub(super) fn serve_waiters(&mut self, id: ObjectId) {
        let Some(slot) = self.sealed(id) else { return };
        for (client, tag) in self.waiters(id) {
            let Some(wait) = self.waits.get(&(client, tag)).copied() else { continue };
            if self.try_get(client, tag, wait.request.operation, slot) {
                self.end_wait(client, tag);
                self.forget_waiter(id, client, tag);
            } else {
                self.restore(slot);
            }
        }
    }

    /// Requests that wait for the object.
    pub(super) fn waiters(&self, id: ObjectId) -> Vec<(u32, u32)> {
        self.by_id.get(&id).cloned().unwrap_or_default()
    }

    fn delete(&mut self, id: ObjectId) -> Status {
        let Some(slot) = self.table.find(id) else { return Status::Absent };
        let Some(object) = self.table.get(slot) else { return Status::Absent };
        if !object.is_sealed() {
            return Status::Unsealed;
        }
        let gone = match object.state {
            State::Sealed | State::Spilled { .. } => object.references == 0,
            // It still waits for memory to be read back into.
            State::Restoring { .. } => object.place.is_none(),
            State::Writing { .. } | State::Spilling { .. } => false,
        };
        self.counters.deletes += 1;
        if object.is_queued()
            && let Some(place) = object.place
        {
            self.memory.queue(place, false);
        }
        self.table.doom(slot);
        self.effects.push(Effect::Withdraw(id));
        if gone || planted(Planted::FreeWhileReferenced) {
            self.destroy(slot);
        }
        Status::Done
    }

    fn subscribe(&mut self, client: u32, tag: u32, id: ObjectId) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        if known.subscriptions.len() >= MOST_WAITING {
            return self.answer(client, tag, Status::Limit);
        }
        if self.sealed(id).is_some() {
            self.answer(client, tag, Status::Done);
            self.effects.push(Effect::News { client, id });
            return;
        }
        let Some(known) = self.clients.get_mut(&client) else { return };
        if known.subscriptions.insert(id) {
            self.subscribers.entry(id).or_default().push(client);
        }
        self.answer(client, tag, Status::Done);
    }

    fn pin(&mut self, id: ObjectId, pinned: bool) -> Status {
        let Some(slot) = self.sealed(id) else { return Status::Absent };
        let Some(object) = self.table.get_mut(slot) else { return Status::Absent };
        object.pinned = pinned;
        let on_disk = object.place.is_none();
        self.settle(slot);
        if pinned && on_disk {
            self.restore(slot);
        }
        self.memory_changed |= !pinned;
        Status::Done
    }
}
