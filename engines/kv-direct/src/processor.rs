//! The processor: decoder, reservation station, main pipeline, execution engine, replies.
//!
//! ```text
//!  packet ─► decoder ─► reservation station ─► main pipeline (hash table, slabs, memory)
//!                          │  ▲ waiting              │
//!                          │  └── execution engine ◄─┘ value       ─► results in order ─► reply
//! ```
//!
//! Memory is at hand here, so an operation in the pipeline waits for nothing; what is in flight are cache
//! lines: those of the buckets are asked for when an operation is decoded, those of blocks and chained
//! buckets when it enters the pipeline, which it leaves some operations later. The reservation station is the
//! same code as in the model.
//!
//! Cost: a GET of an inline pair is one line; an operation that finds its key in the station none. No
//! allocation once the buffers have grown, no lock, no system call; an allocation of a block may wait
//! for the slab daemon when a class runs out.
//!
//! Invariants: results equal those of executing the operations one by one in the order in which they
//! arrived; what was acknowledged is in memory when [`Processor::process`] returns.
//!
//! Source: spec/kv-direct.md 3, 5.3, 5.4.

pub mod moves;

use std::sync::Arc;

use crate::bucket::same;
use crate::function::{Functions, Width, number};
use crate::memory::{HostMemory, Memory};
use crate::packet::{Kind, PacketReader, Request, Status, begin_reply, push_bytes, push_status};
use crate::slab::{SlabCache, SlabPools};
use crate::station::{Arrival, Flight, IN_FLIGHT, Match, SLOTS, Station, Step};
use crate::table::{Place, Table, TableError, TableOptions, layout};

/// Operations in the pipeline beyond which the oldest leaves it: what a few of them take is about the time of
/// an access to memory, and fewer of them meet one that is on its key.
const LOOK_AHEAD: usize = 6;

/// Operations did not come to their end in their order.
const DISORDER: u32 = u32::MAX;

/// An operation of the packet in hand. Key and value are ranges of the packet.
#[derive(Clone, Copy, Debug)]
struct Operation {
    kind: Kind,
    no_return: bool,
    function: u8,
    width: Width,
    key: (u32, u16),
    value: (u32, u16),
    place: Place,
    /// The decoder refused it: it has its outcome.
    refused: bool,
}

impl Operation {
    fn key<'p>(&self, packet: &'p [u8]) -> &'p [u8] {
        let (at, length) = self.key;
        &packet[at as usize..at as usize + usize::from(length)]
    }

    fn value<'p>(&self, packet: &'p [u8]) -> &'p [u8] {
        let (at, length) = self.value;
        &packet[at as usize..at as usize + usize::from(length)]
    }
}

/// How an operation of the packet in hand ended.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    status: Status,
    /// Its result, as it is sent, in `results`; nothing where the decoder refused it.
    result: (u32, u32),
}

/// The pair that a slot's scan works on.
#[derive(Clone, Debug)]
struct Held {
    key: Vec<u8>,
    place: Place,
    value: Vec<u8>,
    /// False where the key is absent.
    present: bool,
    /// Bytes of the value in memory; `None` where the key is absent there.
    stored: Option<usize>,
}

/// What a processor did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessorCounters {
    /// Packets.
    pub packets: u64,
    /// Operations, those refused included.
    pub operations: u64,
    /// Operations that went through the main pipeline.
    pub pipelined: u64,
    /// Operations executed on a value that was at hand.
    pub forwarded: u64,
    /// Values written back after forwarding.
    pub write_backs: u64,
    /// Operations that were refused or failed.
    pub failed: u64,
    /// Pairs given to other servers.
    pub moved: u64,
    /// Pairs taken over from other servers.
    pub adopted: u64,
}

/// What is in the main pipeline, in the order in which it was issued.
#[derive(Debug)]
struct Pipeline {
    flights: Box<[Flight; IN_FLIGHT]>,
    /// Flights that came out so far; wraps around.
    first: u32,
    /// Flights that went in so far; wraps around.
    end: u32,
}

const _: () = assert!(IN_FLIGHT.is_power_of_two(), "a place is found without a division");

impl Default for Pipeline {
    fn default() -> Self {
        Self { flights: Box::new([0; IN_FLIGHT]), first: 0, end: 0 }
    }
}

impl Pipeline {
    #[inline(always)]
    fn length(&self) -> usize {
        self.end.wrapping_sub(self.first) as usize
    }

    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// Issues a flight. The station takes at most [`IN_FLIGHT`] in.
    #[inline(always)]
    fn push(&mut self, flight: Flight) {
        self.flights[self.end as usize % IN_FLIGHT] = flight;
        self.end = self.end.wrapping_add(1);
    }

    #[inline(always)]
    fn pop(&mut self) -> Option<Flight> {
        if self.is_empty() {
            return None;
        }
        let flight = self.flights[self.first as usize % IN_FLIGHT];
        self.first = self.first.wrapping_add(1);
        Some(flight)
    }
}

/// See the module's documentation. Stays on one thread.
#[derive(Debug)]
pub struct Processor<M> {
    table: Table<M>,
    functions: Arc<Functions>,
    station: Station,
    /// The operation of each flight: an index into `operations`.
    flights: Box<[u32; IN_FLIGHT]>,
    held: Box<[Held]>,
    pipeline: Pipeline,
    operations: Vec<Operation>,
    /// By place in `operations`; what is behind its end is of packets before.
    outcomes: Vec<Outcome>,
    /// A reply's header, then results in the order in which they came: mostly that of the operations, and
    /// then this is the reply.
    results: Vec<u8>,
    /// Operations executed so far, if they were the first ones in their order; else [`DISORDER`].
    in_order: u32,
    part: moves::Part,
    counters: ProcessorCounters,
}

/// Options of a processor over this process' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessorOptions {
    /// Bytes of memory, index and blocks; at least [`SMALLEST_MEMORY`].
    pub memory_bytes: u64,
    /// The table's.
    pub table: TableOptions,
}

/// Below this, what the allocator keeps ready for each class would be most of the memory.
pub const SMALLEST_MEMORY: u64 = 8 << 20;

impl Default for ProcessorOptions {
    fn default() -> Self {
        Self { memory_bytes: 1 << 30, table: TableOptions::default() }
    }
}

impl Processor<HostMemory> {
    /// An empty processor over memory of this process, and the pools that its daemon tends. With
    /// `has_daemon`, start a [`crate::slab::SlabDaemon`] for them.
    ///
    /// Errors: the kernel has no such memory.
    pub fn new(
        options: &ProcessorOptions,
        functions: Arc<Functions>,
        has_daemon: bool,
    ) -> std::io::Result<(Self, Arc<SlabPools>)> {
        let memory = HostMemory::new(options.memory_bytes.max(SMALLEST_MEMORY))?;
        let (first, end) = layout(memory.length_bytes(), options.table.index_permille);
        let pools = Arc::new(SlabPools::new(first, end));
        let slabs = SlabCache::new(Arc::clone(&pools), has_daemon);
        Ok((Self::over(Table::new(memory, slabs, options.table), functions), pools))
    }
}

impl<M: Memory> Processor<M> {
    /// A processor over a table.
    #[must_use]
    pub fn over(table: Table<M>, functions: Arc<Functions>) -> Self {
        Self {
            table,
            functions,
            station: Station::default(),
            flights: Box::new([0; IN_FLIGHT]),
            held: vec![Held::NONE; SLOTS].into(),
            pipeline: Pipeline::default(),
            operations: Vec::new(),
            outcomes: Vec::new(),
            results: Vec::new(),
            in_order: DISORDER,
            part: moves::Part::default(),
            counters: ProcessorCounters::default(),
        }
    }

    /// The table.
    pub fn table(&mut self) -> &mut Table<M> {
        &mut self.table
    }

    /// What it did so far.
    #[must_use]
    pub fn counters(&self) -> ProcessorCounters {
        self.counters
    }

    /// The station, for its figures.
    #[must_use]
    pub fn station(&self) -> &Station {
        &self.station
    }

    /// Executes a packet and writes its reply to `reply`; false where the packet is too short to
    /// have one, or its reply could pass `reply_limit` bytes: nothing was executed then.
    pub fn process(&mut self, packet: &[u8], reply: &mut Vec<u8>, reply_limit: usize) -> bool {
        let Some((id, reader)) = PacketReader::new(packet) else { return false };
        self.counters.packets += 1;
        let count = reader.left();
        if !self.part.agrees(reader.state()) || reader.is_control() {
            begin_reply(reply, id, count);
            return self.process_checked(packet, reader, reply, reply_limit);
        }
        self.begin(usize::from(count));
        begin_reply(&mut self.results, id, count);
        if !self.decode(packet, reader, reply_limit) {
            return false;
        }
        self.execute_all(packet);
        self.counters.operations += u64::from(count);
        if self.in_order == u32::from(count) {
            std::mem::swap(reply, &mut self.results);
            return true;
        }
        self.put_in_order(id, reply);
        true
    }

    /// Writes the reply from results that came in another order than their operations.
    #[inline(never)]
    fn put_in_order(&self, id: u32, reply: &mut Vec<u8>) {
        let count = self.operations.len();
        begin_reply(reply, id, count as u16);
        // Results that lie one behind the other are copied together.
        let mut run = (0, 0);
        for outcome in &self.outcomes[..count] {
            if outcome.result.0 == run.1 && run.1 > 0 {
                run.1 = outcome.result.1;
                continue;
            }
            reply.extend_from_slice(&self.results[run.0 as usize..run.1 as usize]);
            run = outcome.result;
            if run.1 == 0 {
                push_status(reply, outcome.status);
            }
        }
        reply.extend_from_slice(&self.results[run.0 as usize..run.1 as usize]);
    }

    /// Nothing is in hand; up to `count` operations will be.
    fn begin(&mut self, count: usize) {
        self.operations.clear();
        self.operations.reserve(count);
        if self.outcomes.len() < count {
            self.outcomes.resize(count, Outcome { status: Status::Ok, result: (0, 0) });
        }
        self.results.clear();
        self.in_order = 0;
    }

    /// An operation came to its end.
    #[inline(always)]
    fn ended(&mut self, index: u32, outcome: Outcome) {
        self.outcomes[index as usize] = outcome;
        self.in_order = if self.in_order == index { index + 1 } else { DISORDER };
        self.counters.failed += u64::from(outcome.status != Status::Ok);
    }

    /// Executes the decoded operations.
    fn execute_all(&mut self, packet: &[u8]) {
        for index in 0..self.operations.len() {
            let operation = &mut self.operations[index];
            if operation.refused {
                continue;
            }
            let slot = Station::slot_of(operation.place.bucket);
            let Some((flight, arrival)) = self.station.arrive(slot) else {
                self.wait_for_room(slot, index as u32, packet);
                continue;
            };
            self.flights[usize::from(flight)] = index as u32;
            if arrival == Arrival::Queued {
                continue;
            }
            // No operation changes its bucket until it leaves: the station holds them back.
            operation.place = self.table.look_ahead(operation.place, operation.key(packet));
            self.pipeline.push(flight);
            if self.pipeline.length() > LOOK_AHEAD {
                self.finish_one(packet);
            }
        }
        while !self.pipeline.is_empty() {
            self.finish_one(packet);
        }
    }

    /// As an operation that arrives where the station is full.
    #[inline(never)]
    fn wait_for_room(&mut self, slot: usize, index: u32, packet: &[u8]) {
        let (flight, arrival) = loop {
            self.finish_one(packet);
            if let Some(taken) = self.station.arrive(slot) {
                break taken;
            }
        };
        self.flights[usize::from(flight)] = index;
        if arrival == Arrival::Issue {
            self.pipeline.push(flight);
        }
    }

    /// Reads all operations and asks for the lines of their buckets.
    fn decode(&mut self, packet: &[u8], mut reader: PacketReader<'_>, reply_limit: usize) -> bool {
        let mut bound = crate::packet::HEADER_BYTES;
        while let Some(next) = reader.next_bound() {
            let Some((request, longest)) = next else {
                self.refuse(
                    Operation::of(packet, &Request::get(&[]), Place::NOWHERE),
                    Status::Malformed,
                );
                bound += 1;
                continue;
            };
            bound += longest;
            if bound > reply_limit {
                return false;
            }
            let operation = Operation::of(packet, &request, self.table.place(request.key));
            if request.kind.has_function() && !self.knows(&request) {
                self.refuse(operation, Status::UnknownFunction);
                continue;
            }
            self.table.expect(operation.place);
            self.operations.push(operation);
        }
        bound <= reply_limit
    }

    /// An operation ends before it arrives.
    #[cold]
    fn refuse(&mut self, operation: Operation, status: Status) {
        self.outcomes[self.operations.len()] = Outcome { status, result: (0, 0) };
        self.operations.push(Operation { refused: true, ..operation });
        self.counters.failed += 1;
    }

    #[inline]
    fn knows(&self, request: &Request<'_>) -> bool {
        if !request.kind.has_function() {
            return true;
        }
        let function = self.functions.get(request.function, request.width);
        match request.kind {
            Kind::UpdateScalar | Kind::UpdateVectorByScalar | Kind::UpdateVector => {
                function.update.is_some()
            }
            Kind::Reduce => function.reduce.is_some(),
            _ => function.filter.is_some(),
        }
    }

    /// The oldest operation in the pipeline comes back; what waits for it is executed.
    #[inline(always)]
    fn finish_one(&mut self, packet: &[u8]) {
        let Some(flight) = self.pipeline.pop() else { return };
        let index = self.flights[usize::from(flight)];
        let Self { table, functions, station, operations, results, .. } = self;
        let operation = &operations[index as usize];
        let slot = Station::slot_of(operation.place.bucket);
        station.retire(flight);
        self.counters.pipelined += 1;
        // Nothing arrives until this operation has ended, so the slot may be left before.
        if !station.complete_alone(slot) {
            self.finish_waited_for(index, packet);
            return;
        }
        let outcome = pipeline(table, functions, operation, packet, results);
        self.ended(index, outcome);
    }

    /// As the rest of [`Processor::finish_one`] where operations wait in the slot.
    #[inline(never)]
    fn finish_waited_for(&mut self, index: u32, packet: &[u8]) {
        let operation = self.operations[index as usize];
        let slot = Station::slot_of(operation.place.bucket);
        let (table, held) = (&mut self.table, &mut self.held[slot]);
        let outcome =
            pipeline_held(table, &self.functions, &operation, packet, held, &mut self.results);
        self.ended(index, outcome);
        self.station.complete(slot);
        self.scan(slot, packet);
    }

    #[inline(never)]
    fn scan(&mut self, slot: usize, packet: &[u8]) {
        loop {
            let Self { station, table, held, flights, operations, .. } = self;
            let held = &held[slot];
            let step = station.step(slot, |flight| {
                let operation = &operations[flights[usize::from(flight)] as usize];
                let key = operation.key(packet);
                if !same(key, &held.key) {
                    return Match::Other;
                }
                let new = operation.value(packet).len();
                if operation.kind != Kind::Put || held.stored == Some(new) {
                    return Match::Same;
                }
                let kept = held
                    .stored
                    .is_some_and(|old| table.keeps_its_place(key.len(), old, new).unwrap_or(false));
                if kept { Match::Same } else { Match::Stop }
            });
            match step {
                Step::Execute(flight) => self.forward(slot, flight, packet),
                Step::WriteBack => {
                    self.write_back(slot);
                    self.station.complete(slot);
                }
                Step::Issue(flight) => {
                    self.pipeline.push(flight);
                    return;
                }
                Step::Idle => return,
            }
        }
    }

    /// Executes an operation on the value at hand.
    fn forward(&mut self, slot: usize, flight: Flight, packet: &[u8]) {
        let index = self.flights[usize::from(flight)];
        let operation = self.operations[index as usize];
        let (outcome, changed) =
            execute(&self.functions, &operation, packet, &mut self.held[slot], &mut self.results);
        self.ended(index, outcome);
        if changed {
            self.station.mark_dirty(slot);
        }
        self.counters.forwarded += 1;
        self.station.retire(flight);
    }

    fn write_back(&mut self, slot: usize) {
        self.counters.write_backs += 1;
        let held = &mut self.held[slot];
        let place = held.place;
        if held.present {
            let written = self.table.put(place, &held.key, &held.value);
            assert!(written.is_ok(), "only values that keep their place are forwarded");
            held.stored = Some(held.value.len());
        } else {
            self.table.delete(place, &held.key);
            held.stored = None;
        }
    }
}

impl Operation {
    #[inline]
    fn of(packet: &[u8], request: &Request<'_>, place: Place) -> Self {
        // Key and value are parts of the packet, or empty.
        let range = |bytes: &[u8]| {
            let at = bytes.as_ptr().addr().wrapping_sub(packet.as_ptr().addr());
            if bytes.is_empty() { (0, 0) } else { (at as u32, bytes.len() as u16) }
        };
        Self {
            kind: request.kind,
            no_return: request.no_return,
            function: request.function,
            width: request.width,
            key: range(request.key),
            value: range(request.value),
            place,
            refused: false,
        }
    }
}

impl Held {
    const NONE: Self = Self {
        key: Vec::new(),
        place: Place::NOWHERE,
        value: Vec::new(),
        present: false,
        stored: None,
    };

    /// Takes the pair of an operation as it is in memory; `None` where the key is absent.
    fn take(&mut self, key: &[u8], place: Place, value: Option<&[u8]>) {
        self.key.clear();
        self.key.extend_from_slice(key);
        // For the write-back, when the bucket may have changed.
        self.place = place.unseen();
        self.value.clear();
        self.value.extend_from_slice(value.unwrap_or_default());
        self.present = value.is_some();
        self.stored = value.map(<[u8]>::len);
    }
}

impl Outcome {
    /// Without bytes.
    #[inline]
    fn of(status: Status, results: &mut Vec<u8>) -> Self {
        let at = results.len() as u32;
        push_status(results, status);
        Self { status, result: (at, at + 1) }
    }

    fn failed(error: TableError, results: &mut Vec<u8>) -> Self {
        let status = match error {
            TableError::OutOfMemory => Status::OutOfMemory,
            TableError::TooLong { .. } | TableError::Key { .. } => Status::TooLong,
        };
        Self::of(status, results)
    }

    /// Done, with `bytes` where they are wanted.
    #[inline(always)]
    fn done(operation: &Operation, bytes: &[u8], results: &mut Vec<u8>) -> Self {
        if operation.no_return {
            return Self::of(Status::Ok, results);
        }
        let at = results.len() as u32;
        push_bytes(results, Status::Ok, bytes);
        Self { status: Status::Ok, result: (at, results.len() as u32) }
    }
}

/// The main pipeline: an operation on the table.
#[inline(always)]
fn pipeline<M: Memory>(
    table: &mut Table<M>,
    functions: &Functions,
    operation: &Operation,
    packet: &[u8],
    results: &mut Vec<u8>,
) -> Outcome {
    let (place, key) = (operation.place, operation.key(packet));
    match operation.kind {
        Kind::Get => {
            let got = table.get(place, key, |value| Outcome::done(operation, value, results));
            got.unwrap_or_else(|| Outcome::of(Status::NotFound, results))
        }
        Kind::Put => match table.put(place, key, operation.value(packet)) {
            Ok(_) => Outcome::of(Status::Ok, results),
            Err(error) => Outcome::failed(error, results),
        },
        Kind::Delete => {
            let existed = table.delete(place, key);
            Outcome::of(if existed { Status::Ok } else { Status::NotFound }, results)
        }
        _ => modify(table, functions, operation, packet, results),
    }
}

#[inline(never)]
fn modify<M: Memory>(
    table: &mut Table<M>,
    functions: &Functions,
    operation: &Operation,
    packet: &[u8],
    results: &mut Vec<u8>,
) -> Outcome {
    let (place, key) = (operation.place, operation.key(packet));
    let found =
        table.modify(place, key, |value| apply(functions, operation, packet, value, results));
    found.unwrap_or_else(|| Outcome::of(Status::NotFound, results))
}

/// As [`pipeline`], and the pair is left in `held`.
fn pipeline_held<M: Memory>(
    table: &mut Table<M>,
    functions: &Functions,
    operation: &Operation,
    packet: &[u8],
    held: &mut Held,
    results: &mut Vec<u8>,
) -> Outcome {
    let (place, key) = (operation.place, operation.key(packet));
    match operation.kind {
        Kind::Put => {
            let value = operation.value(packet);
            match table.put(place, key, value) {
                Ok(_) => {
                    held.take(key, place, Some(value));
                    Outcome::of(Status::Ok, results)
                }
                Err(error) => {
                    // What the key held before is what the others find.
                    held.take(key, place, None);
                    table.get(place.unseen(), key, |old| held.take(key, place, Some(old)));
                    Outcome::failed(error, results)
                }
            }
        }
        Kind::Delete => {
            let existed = table.delete(place, key);
            held.take(key, place, None);
            Outcome::of(if existed { Status::Ok } else { Status::NotFound }, results)
        }
        _ => {
            let found = table.modify(place, key, |value| {
                let done = apply(functions, operation, packet, value, results);
                held.take(key, place, Some(value));
                done
            });
            found.unwrap_or_else(|| {
                held.take(key, place, None);
                Outcome::of(Status::NotFound, results)
            })
        }
    }
}

/// The execution engine: an operation on the value at hand; whether that changed.
fn execute(
    functions: &Functions,
    operation: &Operation,
    packet: &[u8],
    held: &mut Held,
    results: &mut Vec<u8>,
) -> (Outcome, bool) {
    match operation.kind {
        Kind::Put => {
            held.value.clear();
            held.value.extend_from_slice(operation.value(packet));
            held.present = true;
            (Outcome::of(Status::Ok, results), true)
        }
        _ if !held.present => (Outcome::of(Status::NotFound, results), false),
        Kind::Delete => {
            held.present = false;
            held.value.clear();
            (Outcome::of(Status::Ok, results), true)
        }
        _ => apply(functions, operation, packet, &mut held.value, results),
    }
}

/// Everything that reads or changes a value in place; whether it changed.
#[inline]
fn apply(
    functions: &Functions,
    operation: &Operation,
    packet: &[u8],
    value: &mut [u8],
    results: &mut Vec<u8>,
) -> (Outcome, bool) {
    if operation.kind == Kind::Get {
        return (Outcome::done(operation, value, results), false);
    }
    let parameter = operation.value(packet);
    let width = operation.width.bytes();
    let function = functions.get(operation.function, operation.width);
    let at = results.len();
    let fits = match operation.kind {
        Kind::UpdateScalar => {
            let swap = operation.function == number::COMPARE_AND_SWAP;
            value.len() == width && parameter.len() == if swap { 2 * width } else { width }
        }
        Kind::UpdateVectorByScalar | Kind::Reduce => parameter.len() == width,
        Kind::UpdateVector => {
            parameter.len() == value.len() && operation.function != number::COMPARE_AND_SWAP
        }
        _ => true,
    };
    if !fits {
        return (Outcome::of(Status::LengthMismatch, results), false);
    }
    let (outcome, done, changed) = match operation.kind {
        Kind::Reduce => {
            let mut sum = [0; 8];
            let sum = &mut sum[..width];
            sum.copy_from_slice(parameter);
            let done = function.reduce.is_some_and(|reduce| reduce(value, sum));
            (Outcome::done(operation, sum, results), done, false)
        }
        Kind::Filter => {
            // The elements go behind a header, which learns their length afterwards.
            push_bytes(results, Status::Ok, &[]);
            let from = results.len();
            let done = function.filter.is_some_and(|filter| filter(value, results));
            let length = (results.len() - from) as u16;
            if operation.no_return {
                results.truncate(at);
                (Outcome::of(Status::Ok, results), done, false)
            } else {
                results[from - 2..from].copy_from_slice(&length.to_le_bytes());
                let result = (at as u32, results.len() as u32);
                (Outcome { status: Status::Ok, result }, done, false)
            }
        }
        _ => {
            let outcome = Outcome::done(operation, value, results);
            let done = function.update.is_some_and(|update| update(value, parameter));
            (outcome, done, done)
        }
    };
    if done {
        return (outcome, changed);
    }
    results.truncate(at);
    (Outcome::of(Status::LengthMismatch, results), false)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
