//! The processor by its clock: the reservation station of `kv-direct`, driven a cycle at a time.
//!
//! One operation is decoded a cycle, one forwarded a cycle; an operation in the main pipeline comes back after
//! a read over PCIe. Without the engine an operation that finds its key in flight stalls the decoder.
//!
//! Source: spec/kv-direct.md 5.3, 8 (figures 5.15a and b).

use std::collections::VecDeque;

use beeline_env::Randomness;
use beeline_kv_direct::station::{Arrival, Flight, IN_FLIGHT, Match, SLOTS, Station, Step};

use crate::platform::{CLOCK_HZ, LINKS, READ_SECONDS, TAGS};

/// What a run gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    /// Operations a second.
    pub rate: f64,
    /// Most operations in flight.
    pub most_in_flight: usize,
    /// Share of operations that found their slot taken.
    pub queued: f64,
    /// Write-backs, per operation.
    pub write_backs: f64,
    /// Share of operations that were executed on a value in the station, without an access.
    pub forwarded: f64,
    /// Within which half, and 95 of 100, operations were done after they arrived, seconds. The decoder always
    /// has a next one.
    pub times: [f64; 2],
}

/// Cycles from a read's issue to its data.
#[must_use]
pub fn latency_cycles() -> u64 {
    (READ_SECONDS * CLOCK_HZ) as u64
}

struct Flights {
    key: [u64; IN_FLIGHT],
    writes: [bool; IN_FLIGHT],
    arrived: [u64; IN_FLIGHT],
}

/// How operations change their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Through the pipeline as a read, computed on its return: a write-back stores it.
    Atomic,
    /// The pipeline stores it; a write-back follows only where one was forwarded.
    Put,
}

/// `operations` on keys that `next` draws, each with whether it changes its key, through the engine.
pub fn with_engine(operations: u64, change: Change, mut next: impl FnMut() -> (u64, bool)) -> Run {
    let mut station = Station::default();
    let mut flights =
        Flights { key: [0; IN_FLIGHT], writes: [false; IN_FLIGHT], arrived: [0; IN_FLIGHT] };
    let (mut forwarded, mut took) = (0_u64, Vec::new());
    // Key in hand of each slot.
    let mut held = vec![0_u64; SLOTS];
    let latency = latency_cycles();
    // Cycle, slot, and the operation, or none for a write-back.
    let mut pipeline: VecDeque<(u64, usize, Option<Flight>)> = VecDeque::new();
    let mut scanning: VecDeque<usize> = VecDeque::new();
    let mut waiting: Option<(u64, bool)> = None;
    // Reads that the tags of all links let out a cycle.
    let per_cycle = (TAGS * LINKS) as f64 / READ_SECONDS / CLOCK_HZ;
    let (mut tokens, mut to_issue) = (0.0_f64, VecDeque::new());
    let (mut now, mut done, mut drawn, mut most, mut write_backs) = (0_u64, 0_u64, 0_u64, 0, 0_u64);
    let slot_of = |key: u64| {
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        Station::slot_of(mixed as u32)
    };
    while done < operations {
        now += 1;
        tokens = (tokens + per_cycle).min(4.0);
        while let Some(&(at, slot, flight)) = pipeline.front()
            && at <= now
        {
            pipeline.pop_front();
            if let Some(flight) = flight {
                let index = usize::from(flight);
                held[slot] = flights.key[index];
                done += 1;
                took.push(now - flights.arrived[index]);
                station.retire(flight);
                station.complete(slot);
                if flights.writes[index] && change == Change::Atomic {
                    station.mark_dirty(slot);
                }
            } else {
                station.complete(slot);
            }
            scanning.push_back(slot);
        }
        // One operation a cycle is forwarded; steps that forward none are free.
        for _ in 0..scanning.len() {
            let Some(slot) = scanning.pop_front() else { break };
            let step = station.step(slot, |flight| {
                if flights.key[usize::from(flight)] == held[slot] {
                    Match::Same
                } else {
                    Match::Other
                }
            });
            match step {
                Step::Execute(flight) => {
                    done += 1;
                    forwarded += 1;
                    took.push(now - flights.arrived[usize::from(flight)]);
                    if flights.writes[usize::from(flight)] {
                        station.mark_dirty(slot);
                    }
                    station.retire(flight);
                    scanning.push_front(slot);
                    break;
                }
                Step::WriteBack => {
                    write_backs += 1;
                    to_issue.push_back((slot, None));
                }
                Step::Issue(flight) => to_issue.push_back((slot, Some(flight))),
                Step::Idle => {}
            }
        }
        if drawn < operations || waiting.is_some() {
            let (key, writes) = waiting.take().unwrap_or_else(|| {
                drawn += 1;
                next()
            });
            let slot = slot_of(key);
            match station.arrive(slot) {
                None => waiting = Some((key, writes)),
                Some((flight, arrival)) => {
                    flights.key[usize::from(flight)] = key;
                    flights.arrived[usize::from(flight)] = now;
                    flights.writes[usize::from(flight)] = writes;
                    if arrival == Arrival::Issue {
                        to_issue.push_back((slot, Some(flight)));
                    }
                }
            }
        }
        most = most.max(station.in_flight());
        while tokens >= 1.0
            && let Some((slot, flight)) = to_issue.pop_front()
        {
            tokens -= 1.0;
            pipeline.push_back((now + latency, slot, flight));
        }
    }
    let (arrived, queued) = station.arrivals();
    took.sort_unstable();
    let within = |percent: usize| {
        let at = (took.len() * percent / 100).min(took.len().saturating_sub(1));
        took.get(at).map_or(0.0, |cycles| *cycles as f64 / CLOCK_HZ)
    };
    Run {
        rate: done as f64 / (now as f64 / CLOCK_HZ),
        most_in_flight: most,
        queued: queued as f64 / arrived as f64,
        write_backs: write_backs as f64 / done as f64,
        forwarded: forwarded as f64 / done as f64,
        times: [within(50), within(95)],
    }
}

/// The same where an operation stalls the decoder while one on its key is in flight and either changes it.
pub fn with_stalls(operations: u64, mut next: impl FnMut() -> (u64, bool)) -> f64 {
    let latency = latency_cycles();
    let per_cycle = (TAGS * LINKS) as f64 / READ_SECONDS / CLOCK_HZ;
    let mut under_way: VecDeque<(u64, u64, bool)> = VecDeque::new();
    let (mut now, mut tokens, mut issued) = (0_u64, 0.0_f64, 0_u64);
    let mut waiting = None;
    while issued < operations {
        now += 1;
        tokens = (tokens + per_cycle).min(4.0);
        while under_way.front().is_some_and(|(at, ..)| *at <= now) {
            under_way.pop_front();
        }
        let (key, writes) = waiting.take().unwrap_or_else(&mut next);
        let stalls = under_way.iter().any(|&(_, other, wrote)| other == key && (wrote || writes));
        if stalls || tokens < 1.0 || under_way.len() >= IN_FLIGHT {
            waiting = Some((key, writes));
            continue;
        }
        tokens -= 1.0;
        under_way.push_back((now + latency, key, writes));
        issued += 1;
    }
    issued as f64 / ((now + latency) as f64 / CLOCK_HZ)
}

/// Draws the n-th most wanted of `count` keys `1/n^exponent` times as often as the first.
#[derive(Clone, Debug)]
pub struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    /// Over `count` keys.
    #[must_use]
    pub fn new(count: u64, exponent: f64) -> Self {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (1..=count)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        cumulative.iter_mut().for_each(|share| *share /= sum);
        Self { cumulative }
    }

    /// The next key.
    pub fn next(&self, random: &mut Randomness) -> u64 {
        let draw = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        self.cumulative.partition_point(|share| *share <= draw) as u64
    }

    /// Shares of the keys, the most wanted first.
    pub fn shares(&self) -> impl Iterator<Item = f64> + '_ {
        let before = std::iter::once(0.0).chain(self.cumulative.iter().copied());
        self.cumulative.iter().zip(before).map(|(upto, before)| upto - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomics_on_one_key_run_at_the_clock_and_stalling_at_one_a_read() {
        let engine = with_engine(400_000, Change::Atomic, || (1, true));
        assert!(engine.rate > 0.93 * CLOCK_HZ, "{}", engine.rate);
        assert!(engine.most_in_flight <= IN_FLIGHT);
        let stalling = with_stalls(2_000, || (1, true));
        assert!((0.90e6..1.0e6).contains(&stalling), "{stalling}");
        let ratio = engine.rate / stalling;
        assert!((170.0..200.0).contains(&ratio), "{ratio} where the paper has 191");
    }

    #[test]
    fn stalling_costs_more_the_more_keys_are_changed() {
        let zipf = Zipf::new(100_000, 0.99);
        let rate = |puts: u64| {
            let mut random = Randomness::new(3);
            with_stalls(20_000, || (zipf.next(&mut random), random.chance(puts, 100)))
        };
        let rates = [0, 10, 50, 100].map(rate);
        assert!(rates.is_sorted_by(|a, b| a > b), "{rates:?}");
        let mut random = Randomness::new(3);
        let engine =
            with_engine(50_000, Change::Put, || (zipf.next(&mut random), random.chance(1, 2)));
        assert!(engine.rate > rates[2], "{} against {}", engine.rate, rates[2]);
    }

    #[test]
    fn about_a_fifth_of_operations_on_distinct_keys_share_a_slot_of_the_station() {
        // By hashes: the station's own hash spreads consecutive numbers without collisions.
        let mut random = Randomness::new(6);
        let run = with_engine(200_000, Change::Put, || (random.next_u64(), false));
        assert!((0.05..0.25).contains(&run.queued), "{}", run.queued);
        assert!(run.forwarded < 0.001, "no two have one key: {}", run.forwarded);
        assert!(run.times[0] >= READ_SECONDS * 0.95 && run.times[0] <= run.times[1], "{run:?}");
    }

    #[test]
    fn one_write_back_ends_many_forwarded_changes() {
        let engine = with_engine(100_000, Change::Atomic, || (1, true));
        assert!(engine.write_backs < 0.01, "{}", engine.write_backs);
    }
}
