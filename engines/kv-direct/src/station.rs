//! The reservation station: what is in flight, and what waits for it.
//!
//! A hash of the key's bucket names one of 1,024 slots. Operations of one slot form a list in the
//! order of their arrival; at most one of them is in the main pipeline. When it comes back, the
//! waiting operations on the same key are executed on the value it brought, one after the other
//! (forwarding), and the value is written back once, when none of them is left.
//!
//! ```text
//!  IDLE ──arrive: issue──► BUSY ──complete──► SCAN ──same key: execute──► SCAN
//!                           ▲                   │
//!                           │                   ├─ end of list, dirty: write back ──► BUSY
//!                           │                   ├─ end of list, waiting: issue the first ──► BUSY
//!                           └───────────────────┘  end of list, none waiting ──► IDLE
//! ```
//!
//! The slot comes from the bucket, not from the key (the source is silent on it): two keys of one
//! bucket read and write the same 64 bytes, so they must not be in the pipeline together either.
//!
//! This module knows no memory, value or time: the processor and the model of it drive the same code.
//!
//! Invariants: at most one operation of a slot is in the pipeline; operations on one key run in the
//! order of their arrival; a write-back goes before any other operation of its slot reads memory; at
//! most [`IN_FLIGHT`] operations are in the station.
//!
//! Source: spec/kv-direct.md 5.3.

/// Slots.
pub const SLOTS: usize = 1024;
/// Most operations in the station.
pub const IN_FLIGHT: usize = 256;
/// Most operations executed by one scan before the rest of the slot has its turn: an endless stream
/// of operations on one key must not hold up its write-back, nor other keys of the slot.
pub const SCAN_LIMIT: u32 = 4096;

/// Names an operation in flight, below [`IN_FLIGHT`].
pub type Flight = u16;

const NONE: Flight = Flight::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Busy,
    Scan,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    dirty: bool,
    first: Flight,
    last: Flight,
    /// Where the scan has got to: the operation before the next one to look at.
    before: Flight,
    executed: u32,
}

const IDLE: Slot =
    Slot { state: State::Idle, dirty: false, first: NONE, last: NONE, before: NONE, executed: 0 };

/// What becomes of an operation that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It goes to the main pipeline.
    Issue,
    /// It waits in its slot's list.
    Queued,
}

/// What an operation in the list is to the value that was brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Of the same key: execute it.
    Same,
    /// Of another key: leave it.
    Other,
    /// Of the same key, but it cannot be executed on the value (its write-back could fail): leave it
    /// and everything behind it.
    Stop,
}

/// What to do next with a slot whose operation came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Execute this operation on the value; it left the list.
    Execute(Flight),
    /// Write the value back through the pipeline.
    WriteBack,
    /// Send this operation to the pipeline; it left the list.
    Issue(Flight),
    /// Nothing waits.
    Idle,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Station {
    slots: Box<[Slot; SLOTS]>,
    next: [Flight; IN_FLIGHT],
    /// Flights that are free.
    free: Vec<Flight>,
    queued: u64,
    arrived: u64,
}

impl Default for Station {
    fn default() -> Self {
        Self {
            slots: Box::new([IDLE; SLOTS]),
            next: [NONE; IN_FLIGHT],
            free: (0..IN_FLIGHT as Flight).rev().collect(),
            queued: 0,
            arrived: 0,
        }
    }
}

impl Station {
    /// The slot of a bucket.
    #[must_use]
    #[inline]
    pub fn slot_of(bucket: u32) -> usize {
        bucket as usize % SLOTS
    }

    /// Operations in the station.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        IN_FLIGHT - self.free.len()
    }

    /// Operations that arrived, and those of them that found their slot taken.
    #[must_use]
    pub fn arrivals(&self) -> (u64, u64) {
        (self.arrived, self.queued)
    }

    /// Takes an operation of `slot` in, under a number of its own; `None` where the station is full:
    /// the decoder has to wait.
    #[inline]
    pub fn arrive(&mut self, slot: usize) -> Option<(Flight, Arrival)> {
        let flight = self.free.pop()?;
        self.arrived += 1;
        let entry = &mut self.slots[slot];
        if entry.state == State::Idle {
            entry.state = State::Busy;
            return Some((flight, Arrival::Issue));
        }
        self.queued += 1;
        self.next[usize::from(flight)] = NONE;
        match entry.last {
            NONE => entry.first = flight,
            last => self.next[usize::from(last)] = flight,
        }
        entry.last = flight;
        Some((flight, Arrival::Queued))
    }

    /// Whether operations wait in a slot: only then is the value worth keeping.
    #[must_use]
    #[inline]
    pub fn has_waiting(&self, slot: usize) -> bool {
        self.slots[slot].first != NONE
    }

    /// An operation was answered: its number is free.
    #[inline]
    pub fn retire(&mut self, flight: Flight) {
        debug_assert!(!self.free.contains(&flight), "an operation is answered once");
        self.free.push(flight);
    }

    /// The slot's operation, or its write-back, came back from the pipeline; go on with
    /// [`Station::step`].
    ///
    /// Invariant: the slot had one there; that is asserted.
    #[inline]
    pub fn complete(&mut self, slot: usize) {
        let entry = &mut self.slots[slot];
        assert!(entry.state == State::Busy, "what comes back was in the pipeline");
        entry.state = State::Scan;
        entry.before = NONE;
        entry.executed = 0;
    }

    /// As [`Station::complete`] and the steps after it where nothing waits in the slot and nothing is to be
    /// written back: the slot is idle. False where that is not so; nothing was done then.
    ///
    /// Invariant: as of [`Station::complete`].
    #[inline(always)]
    pub fn complete_alone(&mut self, slot: usize) -> bool {
        let entry = &mut self.slots[slot];
        if entry.first != NONE || entry.dirty {
            return false;
        }
        assert!(entry.state == State::Busy, "what comes back was in the pipeline");
        entry.state = State::Idle;
        true
    }

    /// The value in hand differs from memory.
    #[inline]
    pub fn mark_dirty(&mut self, slot: usize) {
        self.slots[slot].dirty = true;
    }

    /// The next step of a scan. `matches` compares an operation with the value in hand.
    ///
    /// Invariant: the slot is being scanned; that is asserted.
    #[inline]
    pub fn step(&mut self, slot: usize, matches: impl Fn(Flight) -> Match) -> Step {
        let entry = &mut self.slots[slot];
        assert!(entry.state == State::Scan, "a step belongs to a scan");
        let mut at = match entry.before {
            NONE => entry.first,
            before => self.next[usize::from(before)],
        };
        while at != NONE && entry.executed < SCAN_LIMIT {
            let after = self.next[usize::from(at)];
            match matches(at) {
                Match::Same => {
                    match entry.before {
                        NONE => entry.first = after,
                        before => self.next[usize::from(before)] = after,
                    }
                    if after == NONE {
                        entry.last = entry.before;
                    }
                    entry.executed += 1;
                    return Step::Execute(at);
                }
                Match::Other => entry.before = at,
                Match::Stop => break,
            }
            at = after;
        }
        if entry.dirty {
            entry.dirty = false;
            entry.state = State::Busy;
            return Step::WriteBack;
        }
        if entry.first != NONE {
            let first = entry.first;
            entry.first = self.next[usize::from(first)];
            if entry.first == NONE {
                entry.last = NONE;
            }
            entry.state = State::Busy;
            return Step::Issue(first);
        }
        entry.state = State::Idle;
        Step::Idle
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_on_one_key_run_in_order_and_are_written_back_once() {
        let mut station = Station::default();
        let (first, arrival) = station.arrive(5).unwrap();
        assert_eq!(arrival, Arrival::Issue);
        let same: Vec<Flight> = (0..4).map(|_| station.arrive(5).unwrap().0).collect();
        station.complete(5);
        station.retire(first);
        let mut executed = Vec::new();
        loop {
            match station.step(5, |_| Match::Same) {
                Step::Execute(flight) => {
                    station.mark_dirty(5);
                    executed.push(flight);
                    station.retire(flight);
                }
                step => {
                    assert_eq!(step, Step::WriteBack);
                    break;
                }
            }
        }
        assert_eq!(executed, same);
        station.complete(5);
        assert_eq!(station.step(5, |_| Match::Same), Step::Idle);
        assert_eq!(station.in_flight(), 0);
    }

    #[test]
    fn other_keys_of_the_slot_wait_for_the_write_back_and_come_in_order() {
        let mut station = Station::default();
        station.arrive(0).unwrap();
        let a = station.arrive(0).unwrap().0;
        let hot = station.arrive(0).unwrap().0;
        let b = station.arrive(0).unwrap().0;
        station.complete(0);
        let matches = |flight| if flight == hot { Match::Same } else { Match::Other };
        assert_eq!(station.step(0, matches), Step::Execute(hot));
        station.mark_dirty(0);
        assert_eq!(station.step(0, matches), Step::WriteBack);
        station.complete(0);
        assert_eq!(station.step(0, |_| Match::Other), Step::Issue(a));
        station.complete(0);
        assert_eq!(station.step(0, |_| Match::Other), Step::Issue(b));
        station.complete(0);
        assert_eq!(station.step(0, |_| Match::Other), Step::Idle);
    }

    #[test]
    fn a_slot_in_which_nothing_waits_is_idle_at_once_and_no_other_is() {
        let mut station = Station::default();
        let first = station.arrive(9).unwrap().0;
        let second = station.arrive(9).unwrap().0;
        station.retire(first);
        assert!(!station.complete_alone(9), "an operation waits");
        station.complete(9);
        assert_eq!(station.step(9, |_| Match::Same), Step::Execute(second));
        station.retire(second);
        station.mark_dirty(9);
        assert_eq!(station.step(9, |_| Match::Same), Step::WriteBack);
        assert!(station.complete_alone(9), "the write-back came back");
        let third = station.arrive(9).unwrap();
        assert_eq!(third.1, Arrival::Issue);
        station.mark_dirty(9);
        assert!(!station.complete_alone(9), "a value is to be written back");
    }

    #[test]
    fn what_cannot_be_forwarded_stops_the_scan_so_that_nothing_overtakes() {
        let mut station = Station::default();
        station.arrive(0).unwrap();
        let growing = station.arrive(0).unwrap().0;
        let behind = station.arrive(0).unwrap().0;
        station.complete(0);
        let matches = |flight| if flight == growing { Match::Stop } else { Match::Same };
        assert_eq!(station.step(0, matches), Step::Issue(growing));
        station.complete(0);
        assert_eq!(station.step(0, matches), Step::Execute(behind));
    }

    #[test]
    fn a_full_station_takes_nothing_more_and_loses_nothing() {
        let mut station = Station::default();
        let mut taken = Vec::new();
        while let Some((flight, _)) = station.arrive(taken.len() % 7) {
            taken.push(flight);
        }
        assert_eq!((taken.len(), station.in_flight()), (IN_FLIGHT, IN_FLIGHT));
        taken.sort_unstable();
        taken.dedup();
        assert_eq!(taken.len(), IN_FLIGHT);
        station.retire(taken[0]);
        assert!(station.arrive(0).is_some() && station.arrive(0).is_none());
    }

    #[test]
    fn an_endless_stream_on_one_key_lets_the_write_back_through() {
        let mut station = Station::default();
        station.arrive(0).unwrap();
        station.complete(0);
        let mut executed = 0;
        loop {
            let (flight, _) = station.arrive(0).unwrap();
            match station.step(0, |_| Match::Same) {
                Step::Execute(flight) => {
                    station.mark_dirty(0);
                    station.retire(flight);
                    executed += 1;
                }
                step => {
                    assert_eq!(step, Step::WriteBack);
                    station.retire(flight);
                    break;
                }
            }
            assert!(executed <= SCAN_LIMIT);
        }
        assert_eq!(executed, SCAN_LIMIT);
    }

    #[test]
    fn a_quarter_of_uniform_operations_at_most_finds_its_slot_taken() {
        let mut station = Station::default();
        let mut state = 1_u64;
        let mut inside: std::collections::VecDeque<(usize, Flight)> = Default::default();
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let slot = (state >> 33) as usize % SLOTS;
            while station.in_flight() >= 255 {
                let (slot, flight) = inside.pop_front().unwrap();
                station.retire(flight);
                station.complete(slot);
                if let Step::Issue(next) = station.step(slot, |_| Match::Other) {
                    inside.push_back((slot, next));
                }
            }
            if let Some((flight, Arrival::Issue)) = station.arrive(slot) {
                inside.push_back((slot, flight));
            }
        }
        let (arrived, queued) = station.arrivals();
        let share = queued as f64 / arrived as f64;
        assert!((0.18..0.25).contains(&share), "{share} of operations were queued");
    }
}
