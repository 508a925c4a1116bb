//! Flow completion times at one bottleneck: pFabric's queue against drop-tail and the ideal.
//!
//! Simulated, packet by packet, a slot being the time of a full packet on the bottleneck (1.2 us at
//! 10 Gbit/s). Flows begin at random times; their sizes are those of a data-mining workload with the
//! tail cut at [`LONGEST`] packets. Every sender's own wire is as fast as the bottleneck.
//!
//! - **pFabric**: the queue is the library's `SRPrioQueue` at work, 32 packets, the priority is what
//!   is left of the flow. Senders keep a window of one round trip and the packet's own slot, so that
//!   a flow alone fills the wire, and send a packet that was not answered again after three.
//! - **drop-tail**: a queue of [`TAIL`] packets, first in, first out; senders double their window each
//!   round trip until a loss halves it, and then add a packet each; a loss is found after a round
//!   trip, or after [`TIMEOUT`] where fewer than three packets follow.
//! - **ideal**: the bottleneck always serves the flow of which least is left; nothing is lost.
//!
//! A completion time is divided by that of the flow alone on the wire. A packet has left the
//! bottleneck at the end of its slot, in each of the three. No queue has a smaller mean completion time
//! than the ideal; the mean of the divided times can be smaller, since the ideal looks at what is left
//! of a flow and not at how much that is of it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Run, RunError};

/// The graph whose element is the queue.
pub const QUEUE: &str = ".input QueueOperation operation\n.output QueueAnswer answer\n\
                         SRPrioQueue :: queue\noperation -> queue -> answer\n";
/// Slots from a packet's departure to its answer, on an empty wire.
pub const ROUND_TRIP: u64 = 12;
/// Packets in the drop-tail queue.
pub const TAIL: usize = 225;
/// Slots until a sender without news sends again.
pub const TIMEOUT: u64 = 1_000;
/// Packets of the longest flow.
pub const LONGEST: u64 = 6_667;

/// Sizes in packets, and the part of flows that have at most so many: data mining, with a shorter end.
const SIZES: [(u64, f64); 8] = [
    (1, 0.5),
    (2, 0.6),
    (3, 0.7),
    (7, 0.8),
    (267, 0.9),
    (2_107, 0.95),
    (4_000, 0.99),
    (LONGEST, 1.0),
];

/// A flow: its first slot and its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// When it begins.
    pub start: u64,
    /// Packets.
    pub size: u64,
}

fn random(seed: &mut u64) -> f64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    f64::from(u32::try_from(*seed >> 32).unwrap_or(0)) / f64::from(u32::MAX)
}

fn size(at: f64) -> u64 {
    let mut before = (1_u64, 0.0);
    for (packets, part) in SIZES {
        if at <= part {
            let within = (at - before.1) / (part - before.1);
            let span = f64::from(u32::try_from(packets - before.0).unwrap_or(0));
            return before.0 + whole(span * within);
        }
        before = (packets, part);
    }
    LONGEST
}

fn whole(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "values here are small and not negative"
    )]
    let whole = value as u64;
    whole
}

/// `count` flows that load the bottleneck to `load` (0 to 1).
#[must_use]
pub fn flows(count: usize, load: f64, seed: u64) -> Vec<Flow> {
    let mut seed = seed | 1;
    let sizes: Vec<u64> = (0..count).map(|_| size(random(&mut seed))).collect();
    let packets: u64 = sizes.iter().sum();
    let span = f64::from(u32::try_from(packets).unwrap_or(u32::MAX)) / load.clamp(0.01, 1.0);
    let mut starts: Vec<u64> = (0..count).map(|_| whole(span * random(&mut seed))).collect();
    starts.sort_unstable();
    starts.into_iter().zip(sizes).map(|(start, size)| Flow { start, size }).collect()
}

/// What happens to a packet that comes to a queue.
pub trait Bottleneck {
    /// A packet comes, with what is left of its flow; the packets that are lost for it.
    ///
    /// Errors: a handler that does not end.
    fn come(&mut self, packet: u32, left: u32) -> Result<Option<u32>, RunError>;
    /// The packet that leaves in this slot.
    ///
    /// Errors: a handler that does not end.
    fn leave(&mut self) -> Result<Option<u32>, RunError>;
}

/// First in, first out.
#[derive(Debug, Default)]
pub struct DropTail(VecDeque<u32>);

impl Bottleneck for DropTail {
    fn come(&mut self, packet: u32, _left: u32) -> Result<Option<u32>, RunError> {
        if self.0.len() >= TAIL {
            return Ok(Some(packet));
        }
        self.0.push_back(packet);
        Ok(None)
    }

    fn leave(&mut self) -> Result<Option<u32>, RunError> {
        Ok(self.0.pop_front())
    }
}

/// The library's priority queue: see [`QUEUE`].
#[derive(Debug)]
pub struct Priorities<'g, M> {
    run: Run<'g, M>,
    ends: (usize, usize),
}

impl<'g, M: Machine> Priorities<'g, M> {
    /// The queue of a graph of [`QUEUE`].
    ///
    /// # Panics
    /// For another graph.
    #[must_use]
    pub fn new(graph: &'g Graph, run: Run<'g, M>) -> Self {
        Self { run, ends: (graph.inputs[0].channel, graph.outputs[0].channel) }
    }

    /// An operation; the answer's words.
    fn operate(&mut self, words: [u64; 2]) -> Result<[u64; 2], RunError> {
        let mut answer = [0; 2];
        self.run.channel_mut(self.ends.0).push(&words);
        // The element answers every operation.
        while !self.run.channel_mut(self.ends.1).pop(&mut answer) {
            self.run.rounds(4)?;
        }
        Ok(answer)
    }
}

impl<M: Machine> Bottleneck for Priorities<'_, M> {
    fn come(&mut self, packet: u32, left: u32) -> Result<Option<u32>, RunError> {
        // enqueue, dequeue, priority, id: 1, 1, 32, 32 bits.
        let (left, id) = (u64::from(left), u64::from(packet));
        let a = self.operate([1 | left << 2 | id << 34, id >> 30])?;
        // valid, dropped, priority, id, dropped id: 1, 1, 32, 32, 32 bits.
        let lost = (a[1] >> 2) & 0xffff_ffff;
        Ok((a[0] & 2 != 0).then(|| u32::try_from(lost).unwrap_or(0)))
    }

    fn leave(&mut self) -> Result<Option<u32>, RunError> {
        let a = self.operate([2, 0])?;
        let id = (a[0] >> 34 | a[1] << 30) & 0xffff_ffff;
        Ok((a[0] & 1 != 0).then(|| u32::try_from(id).unwrap_or(0)))
    }
}

/// How senders behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Senders {
    /// A window of a round trip; again after three.
    Eager,
    /// Windows that grow until a loss.
    Careful,
}

#[derive(Clone, Copy, Debug)]
struct Sender {
    flow: Flow,
    /// Packets not sent yet, packets to send again, packets under way, packets answered.
    fresh: u64,
    again: u64,
    away: u64,
    answered: u64,
    window: f64,
    threshold: f64,
    /// Losses before this slot have been counted.
    deaf_until: u64,
}

/// A sender hears something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    Answer,
    Loss,
}

/// Completion times in slots, by flow.
///
/// Errors: a handler that does not end.
pub fn completions(
    flows: &[Flow],
    senders: Senders,
    queue: &mut dyn Bottleneck,
) -> Result<Vec<u64>, RunError> {
    let eager = senders == Senders::Eager;
    let window = if eager { 13.0 } else { 10.0 };
    let mut all: Vec<Sender> = flows
        .iter()
        .map(|flow| Sender {
            flow: *flow,
            fresh: flow.size,
            again: 0,
            away: 0,
            answered: 0,
            window,
            threshold: f64::MAX,
            deaf_until: 0,
        })
        .collect();
    let mut done = vec![0; flows.len()];
    let mut left = flows.len();
    let mut news: BTreeMap<u64, Vec<(News, usize)>> = BTreeMap::new();
    // Packets on their way to the queue, by slot; numbers of packets are used again.
    let mut arriving: VecDeque<Vec<u32>> = (0..=ROUND_TRIP / 2).map(|_| Vec::new()).collect();
    let (mut owners, mut free): (Vec<usize>, Vec<u32>) = (Vec::new(), Vec::new());
    let mut active: Vec<usize> = Vec::new();
    let (mut next, mut slot) = (0, 0_u64);
    while left > 0 {
        if active.is_empty() && arriving.iter().all(Vec::is_empty) && news.is_empty() {
            // Nothing happens until the next flow begins.
            slot = slot.max(flows.get(next).map_or(slot, |flow| flow.start));
        }
        while flows.get(next).is_some_and(|flow| flow.start <= slot) {
            active.push(next);
            next += 1;
        }
        for (what, at) in news.remove(&slot).unwrap_or_default() {
            let sender = &mut all[at];
            sender.away -= 1;
            if what == News::Answer {
                sender.answered += 1;
                if !eager {
                    let slow = sender.window < sender.threshold;
                    sender.window += if slow { 1.0 } else { 1.0 / sender.window };
                }
            } else {
                sender.again += 1;
                if !eager && slot >= sender.deaf_until {
                    sender.threshold = (sender.window / 2.0).max(1.0);
                    sender.window = sender.threshold;
                    sender.deaf_until = slot + ROUND_TRIP;
                }
            }
            if sender.answered == sender.flow.size {
                done[at] = slot - sender.flow.start;
                left -= 1;
            }
        }
        active.retain(|at| all[*at].answered < all[*at].flow.size);
        // Each sender's wire takes a packet a slot.
        for at in &active {
            let sender = &mut all[*at];
            if sender.away >= whole(sender.window) || sender.again + sender.fresh == 0 {
                continue;
            }
            if sender.again > 0 {
                sender.again -= 1;
            } else {
                sender.fresh -= 1;
            }
            sender.away += 1;
            let packet = free.pop().unwrap_or_else(|| {
                owners.push(0);
                u32::try_from(owners.len() - 1).unwrap_or(u32::MAX)
            });
            owners[packet as usize] = *at;
            if let Some(last) = arriving.back_mut() {
                last.push(packet);
            }
        }
        let comes = arriving.pop_front().unwrap_or_default();
        arriving.push_back(Vec::new());
        for packet in comes {
            let sender = &all[owners[packet as usize]];
            let rest = sender.flow.size - sender.answered;
            if let Some(lost) = queue.come(packet, u32::try_from(rest).unwrap_or(u32::MAX))? {
                let at = owners[lost as usize];
                let after = match (eager, all[at].away > 3) {
                    (true, _) => 3 * ROUND_TRIP,
                    (false, true) => ROUND_TRIP,
                    (false, false) => TIMEOUT,
                };
                news.entry(slot + after).or_default().push((News::Loss, at));
                free.push(lost);
            }
        }
        if let Some(packet) = queue.leave()? {
            let at = owners[packet as usize];
            // The packet takes its slot, and its answer half a round trip.
            let answered = slot + 1 + ROUND_TRIP / 2;
            news.entry(answered).or_default().push((News::Answer, at));
            free.push(packet);
        }
        slot += 1;
    }
    Ok(done)
}

/// Completion times where the bottleneck serves the flow of which least is left.
#[must_use]
pub fn ideal(flows: &[Flow]) -> Vec<u64> {
    let mut done = vec![0; flows.len()];
    let mut waiting: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut next, mut slot) = (0, 0);
    while next < flows.len() || !waiting.is_empty() {
        if waiting.is_empty() {
            slot = slot.max(flows[next].start);
        }
        while flows.get(next).is_some_and(|flow| flow.start <= slot) {
            waiting.push(Reverse((flows[next].size, next)));
            next += 1;
        }
        let Some(Reverse((left, at))) = waiting.pop() else { continue };
        // Until it is done, or another flow begins.
        let until = flows.get(next).map_or(u64::MAX, |flow| flow.start - slot);
        let served = left.min(until);
        slot += served;
        if served < left {
            waiting.push(Reverse((left - served, at)));
        } else {
            done[at] = slot - flows[at].start + ROUND_TRIP;
        }
    }
    done
}

/// The mean of the flows' completion times, each divided by that of the flow alone; of flows of at
/// most `most` packets.
#[must_use]
pub fn slowdown(flows: &[Flow], completions: &[u64], most: u64) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for (flow, slots) in flows.iter().zip(completions).filter(|(flow, _)| flow.size <= most) {
        let number = |slots: u64| f64::from(u32::try_from(slots).unwrap_or(u32::MAX));
        sum += number(*slots) / number(flow.size + ROUND_TRIP);
        count += 1.0;
    }
    if count > 0.0 { sum / count } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::compile;

    #[test]
    fn a_flow_alone_takes_its_packets_and_a_round_trip() {
        let flows = [Flow { start: 5, size: 40 }];
        let ideal = ideal(&flows);
        assert_eq!(ideal, [40 + ROUND_TRIP]);
        let careful = completions(&flows, Senders::Careful, &mut DropTail::default()).unwrap();
        assert!(careful[0] >= ideal[0], "{careful:?}");
        for size in [1, 2, 12, 13, 14, 500] {
            let flows = [Flow { start: 5, size }];
            let eager = completions(&flows, Senders::Eager, &mut DropTail::default()).unwrap();
            assert_eq!(eager, [size + ROUND_TRIP]);
        }
    }

    #[test]
    fn no_queue_completes_flows_in_less_time_than_the_ideal() {
        let loaded = compile("queue.np", QUEUE.to_owned(), None);
        let graph = &loaded.compiled.graph;
        for (load, seed) in [(0.2, 3), (0.8, 7)] {
            let flows = flows(400, load, seed);
            let sum = |times: &[u64]| times.iter().sum::<u64>();
            let bound = sum(&ideal(&flows));
            let machines = crate::sides::native(graph).unwrap();
            let mut queue = Priorities::new(graph, Run::new(graph, machines).unwrap());
            let fabric = completions(&flows, Senders::Eager, &mut queue).unwrap();
            let tail = completions(&flows, Senders::Careful, &mut DropTail::default()).unwrap();
            assert!(sum(&fabric) >= bound && sum(&tail) >= bound, "load {load}");
        }
    }

    #[test]
    fn the_ideal_serves_short_flows_first() {
        let flows = [Flow { start: 0, size: 100 }, Flow { start: 10, size: 5 }];
        assert_eq!(ideal(&flows), [105 + ROUND_TRIP, 5 + ROUND_TRIP]);
    }

    #[test]
    fn pfabric_s_short_flows_are_near_the_ideal_and_drop_tail_s_are_not() {
        let loaded = compile("queue.np", QUEUE.to_owned(), None);
        let graph = &loaded.compiled.graph;
        let flows = flows(1_500, 0.8, 7);
        let ideal = slowdown(&flows, &ideal(&flows), 7);
        let machines = crate::sides::native(graph).unwrap();
        let mut queue = Priorities::new(graph, Run::new(graph, machines).unwrap());
        let fabric = completions(&flows, Senders::Eager, &mut queue).unwrap();
        let fabric = slowdown(&flows, &fabric, 7);
        let tail = completions(&flows, Senders::Careful, &mut DropTail::default()).unwrap();
        let tail = slowdown(&flows, &tail, 7);
        assert!(ideal >= 1.0 && fabric < ideal * 1.5, "ideal {ideal}, pFabric {fabric}");
        assert!(tail > fabric * 2.0, "drop-tail {tail}, pFabric {fabric}");
    }
}
