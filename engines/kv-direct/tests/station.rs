//! The reservation station against a sequential map, with operations in the pipeline at once and write-backs
//! that take their time; and the same with hazards planted in what drives it, which must be found.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use std::collections::{BTreeMap, HashMap, VecDeque};

use beeline_env::Randomness;
use beeline_kv_direct::station::{Arrival, Flight, IN_FLIGHT, Match, Station, Step};

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hazard {
    None,
    /// The slot comes from the key: two keys of one bucket are in the pipeline together.
    SlotByKey,
    /// A delete leaves the value at hand behind.
    ForwardPastDelete,
    /// A new pair is acknowledged before its memory is there.
    AcknowledgeBeforeAllocation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Get,
    Put(u32),
    Delete,
    Add(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Found(Option<u32>),
    Stored,
    Deleted(bool),
    Full,
}

type Bucket = BTreeMap<u8, u32>;

const BUCKETS: u8 = 3;
/// Pairs that one bucket has memory for.
const ROOM: usize = 2;

/// Applies an operation to a value, as one after the other would.
fn apply(operation: Operation, value: &mut Option<u32>, room: bool) -> Outcome {
    match operation {
        Operation::Get => Outcome::Found(*value),
        Operation::Put(_) if value.is_none() && !room => Outcome::Full,
        Operation::Put(new) => {
            *value = Some(new);
            Outcome::Stored
        }
        Operation::Delete => Outcome::Deleted(value.take().is_some()),
        Operation::Add(by) => {
            let before = *value;
            *value = before.map(|number| number.wrapping_add(by));
            Outcome::Found(before)
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    key: u8,
    value: Option<u32>,
    /// Memory has the pair.
    stored: bool,
}

/// An operation in the pipeline, or a write-back, with the bucket as it was when it was issued.
struct Issued {
    slot: usize,
    flight: Option<Flight>,
    read: Bucket,
}

struct Driver {
    hazard: Hazard,
    station: Station,
    random: Randomness,
    memory: Vec<Bucket>,
    flights: Vec<(u8, Operation, usize)>,
    held: HashMap<usize, Held>,
    pipeline: Vec<Issued>,
    outcomes: Vec<Option<Outcome>>,
}

impl Driver {
    fn new(hazard: Hazard, seed: u64) -> Self {
        Self {
            hazard,
            station: Station::default(),
            random: Randomness::new(seed),
            memory: vec![Bucket::new(); BUCKETS.into()],
            flights: vec![(0, Operation::Get, 0); IN_FLIGHT],
            held: HashMap::new(),
            pipeline: Vec::new(),
            outcomes: Vec::new(),
        }
    }

    fn slot(&self, key: u8) -> usize {
        let by = if self.hazard == Hazard::SlotByKey { key } else { key % BUCKETS };
        Station::slot_of(by.into())
    }

    fn bucket(key: u8) -> usize {
        (key % BUCKETS).into()
    }

    fn issue(&mut self, slot: usize, flight: Option<Flight>, key: u8) {
        let read = self.memory[Self::bucket(key)].clone();
        self.pipeline.push(Issued { slot, flight, read });
    }

    fn arrive(&mut self, key: u8, operation: Operation) {
        let slot = self.slot(key);
        let number = self.outcomes.len();
        self.outcomes.push(None);
        let (flight, arrival) = loop {
            match self.station.arrive(slot) {
                Some(taken) => break taken,
                None => self.complete_one(),
            }
        };
        self.flights[usize::from(flight)] = (key, operation, number);
        if arrival == Arrival::Issue {
            self.issue(slot, Some(flight), key);
        }
    }

    /// Any operation of the pipeline comes back: of different slots they overtake each other.
    fn complete_one(&mut self) {
        let at = self.random.below(self.pipeline.len() as u64) as usize;
        let Issued { slot, flight, read: mut bucket } = self.pipeline.swap_remove(at);
        match flight {
            Some(flight) => {
                let (key, operation, number) = self.flights[usize::from(flight)];
                let mut value = bucket.get(&key).copied();
                let room = bucket.len() < ROOM;
                self.outcomes[number] = Some(apply(operation, &mut value, room));
                match value {
                    Some(value) => drop(bucket.insert(key, value)),
                    None => drop(bucket.remove(&key)),
                }
                self.memory[Self::bucket(key)] = bucket;
                self.held.insert(slot, Held { key, value, stored: value.is_some() });
                self.station.retire(flight);
            }
            None => {
                let held = self.held.get_mut(&slot).unwrap();
                let fits = bucket.contains_key(&held.key) || bucket.len() < ROOM;
                match held.value {
                    Some(value) if fits => drop(bucket.insert(held.key, value)),
                    Some(_) => {}
                    None => drop(bucket.remove(&held.key)),
                }
                held.stored = held.value.is_some();
                self.memory[Self::bucket(held.key)] = bucket;
            }
        }
        self.station.complete(slot);
        self.scan(slot);
    }

    fn scan(&mut self, slot: usize) {
        loop {
            let Self { station, flights, held, hazard, .. } = self;
            let held_now = held[&slot];
            let step = station.step(slot, |flight| {
                let (key, operation, _) = flights[usize::from(flight)];
                let needs_room = matches!(operation, Operation::Put(_)) && !held_now.stored;
                match () {
                    () if key != held_now.key => Match::Other,
                    () if needs_room && *hazard != Hazard::AcknowledgeBeforeAllocation => {
                        Match::Stop
                    }
                    () => Match::Same,
                }
            });
            match step {
                Step::Execute(flight) => {
                    let (_, operation, number) = self.flights[usize::from(flight)];
                    let held = self.held.get_mut(&slot).unwrap();
                    let before = held.value;
                    self.outcomes[number] = Some(apply(operation, &mut held.value, true));
                    if operation == Operation::Delete && self.hazard == Hazard::ForwardPastDelete {
                        held.value = before;
                    }
                    if held.value != before || operation == Operation::Delete {
                        self.station.mark_dirty(slot);
                    }
                    self.station.retire(flight);
                }
                Step::WriteBack => {
                    let key = self.held[&slot].key;
                    return self.issue(slot, None, key);
                }
                Step::Issue(flight) => {
                    let key = self.flights[usize::from(flight)].0;
                    return self.issue(slot, Some(flight), key);
                }
                Step::Idle => return,
            }
        }
    }
}

/// Runs `count` operations; the first one whose outcome is not that of a map which executes the operations of
/// its key one after the other. Whether there was room is taken from the outcome: it depends on other keys.
fn run(hazard: Hazard, seed: u64, count: usize) -> Option<String> {
    let mut driver = Driver::new(hazard, seed);
    let mut given = VecDeque::new();
    for _ in 0..count {
        let key = driver.random.below(9) as u8;
        let value = driver.random.below(1000) as u32;
        let operation = match driver.random.below(5) {
            0 | 1 => Operation::Put(value),
            2 => Operation::Delete,
            3 => Operation::Add(value),
            _ => Operation::Get,
        };
        driver.arrive(key, operation);
        given.push_back((key, operation));
        assert!(driver.station.in_flight() <= IN_FLIGHT);
        if driver.random.chance(1, 2) && !driver.pipeline.is_empty() {
            driver.complete_one();
        }
    }
    while !driver.pipeline.is_empty() {
        driver.complete_one();
    }
    assert_eq!(driver.station.in_flight(), 0, "every operation is answered");
    let mut map: HashMap<u8, Option<u32>> = HashMap::new();
    for (number, (key, operation)) in given.into_iter().enumerate() {
        let value = map.entry(key).or_default();
        let outcome = driver.outcomes[number].expect("every operation has an outcome");
        let room = outcome != Outcome::Full;
        let expected = apply(operation, value, room);
        if outcome != expected {
            return Some(format!(
                "{number}: {operation:?} of {key}: {outcome:?}, not {expected:?}"
            ));
        }
    }
    for (key, value) in map {
        let stored = driver.memory[Driver::bucket(key)].get(&key).copied();
        if stored != value {
            return Some(format!("at the end {key} is {stored:?}, not {value:?}"));
        }
    }
    None
}

#[test]
fn the_station_is_a_sequential_map_whatever_order_the_pipeline_returns_in() {
    for seed in 0..400 {
        let fault = run(Hazard::None, seed, 400);
        assert_eq!(fault, None, "seed {seed}");
    }
}

#[test]
fn planted_hazards_are_found() {
    for hazard in
        [Hazard::SlotByKey, Hazard::ForwardPastDelete, Hazard::AcknowledgeBeforeAllocation]
    {
        let found = (0..50).filter(|seed| run(hazard, *seed, 400).is_some()).count();
        assert!(found > 25, "{hazard:?} is found with {found} of 50 seeds");
    }
}
