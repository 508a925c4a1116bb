//! One-sided operations in virtual time: post, arrive, place, flush.

use beeline_paxos::{AccessKey, NodeId, Position, layout};

use crate::invariants::Violation;
use crate::network::{Connection, Cpu, Happening, Operation};
use crate::world::{MS, PlantedBug, US, World};

impl World {
    pub(crate) fn post(&mut self, from: usize, peer: NodeId, key: AccessKey, operation: Operation) {
        let limit_ns = if self.random.chance(1, 30) { 3 * MS } else { 5 * US };
        let arrival_ns = self.now_ns + US + self.below(limit_ns);
        let from_run = self.servers[from].run;
        let to = usize::from(peer.0);
        let to_run = self.servers[to].run;
        let connection = self.network.connections.entry(key.0).or_insert(Connection {
            from,
            from_run,
            to,
            to_run,
            alive: true,
            last_arrival_ns: 0,
            last_place_ns: 0,
        });
        if connection.alive {
            connection.last_arrival_ns = arrival_ns.max(connection.last_arrival_ns + 1);
            let delay_ns = connection.last_arrival_ns - self.now_ns;
            self.after(delay_ns, Happening::Arrive { key, operation });
        } else {
            self.break_connection(key, US);
        }
    }

    pub(crate) fn break_connection(&mut self, key: AccessKey, limit_ns: u64) {
        let Some(connection) = self.network.connections.get_mut(&key.0) else { return };
        connection.alive = false;
        let (node, run, to) = (connection.from, connection.from_run, connection.to);
        let peer = self.servers[to].id;
        let delay_ns = US + self.below(limit_ns);
        let cpu = Cpu::AccessLost { peer, key };
        self.after(delay_ns, Happening::Cpu { node, run, cpu });
    }

    /// With the planted bug: the operation runs on memory that its owner has left, succeeds, and
    /// counts.
    fn counts_in_orphan(&self, key: AccessKey) -> bool {
        let Some(connection) = self.network.connections.get(&key.0) else { return false };
        let target = &self.servers[connection.to];
        self.settings.bug == Some(PlantedBug::CountOrphans)
            && self.servers[connection.from].stalls
            && connection.alive
            && target.replica.is_some()
            && target.run != connection.to_run
    }

    /// Whether an operation stops here: its initiator's processor does, or the target is not
    /// reached, or has taken the key back.
    fn is_stopped(&mut self, key: AccessKey, happening: impl FnOnce() -> Happening) -> bool {
        let Some(connection) = self.network.connections.get(&key.0) else { return true };
        let (from, to) = (connection.from, connection.to);
        let initiator = &mut self.servers[from];
        if initiator.stalls && initiator.paused && initiator.run == connection.from_run {
            initiator.stalled.push(happening());
            return true;
        }
        if initiator.stalls && initiator.run != connection.from_run {
            return true;
        }
        if self.counts_in_orphan(key) {
            return false;
        }
        if !self.network.connects(from, to) || self.servers[to].replica.is_none() {
            self.break_connection(key, 50 * MS);
            return true;
        }
        if !self.servers[to].memory.borrow().admits(key, self.now_ns) {
            self.report.refused += 1;
            self.break_connection(key, MS);
            return true;
        }
        false
    }

    pub(crate) fn on_arrive(&mut self, key: AccessKey, operation: Operation) {
        let again = || Happening::Arrive { key, operation: operation.clone() };
        if self.is_stopped(key, again) {
            return;
        }
        let Some(connection) = self.network.connections.get(&key.0) else { return };
        let (from, run, to) = (connection.from, connection.from_run, connection.to);
        let mut place_ns = connection.last_place_ns.max(self.now_ns);
        let peer = self.servers[to].id;
        match operation {
            Operation::Write { writes, flush } => {
                let target_run = connection.to_run;
                let slow = self.now_ns < self.servers[to].slow_until_ns;
                let ranges = writes.iter().map(|(offset, bytes)| (*offset, bytes.len())).collect();
                for (offset, bytes) in writes {
                    place_ns += self.placement(slow);
                    let cut = if bytes.len() > 8 && self.random.chance(1, 6) {
                        8 * self.random.below(bytes.len() as u64 / 8) as usize
                    } else {
                        0
                    };
                    let (head, tail) = bytes.split_at(cut);
                    let now_ns = self.now_ns;
                    let place = |world: &mut Self, at_ns: u64, offset, bytes: &[u8]| {
                        let bytes = bytes.to_vec();
                        let happening = Happening::Place { key, run: target_run, offset, bytes };
                        world.after(at_ns - now_ns, happening);
                    };
                    place(self, place_ns, offset, head);
                    if cut > 0 {
                        place_ns += self.placement(slow);
                    }
                    place(self, place_ns, offset + cut as u64, tail);
                }
                if let Some(last) = flush {
                    let answers = self.settings.bug != Some(PlantedBug::CountAcknowledgement);
                    if !answers {
                        let cpu = Cpu::Flushed { peer, key, last };
                        self.after(2 * US, Happening::Cpu { node: from, run, cpu });
                    }
                    place_ns += self.below(100 * US);
                    let happening =
                        Happening::Flush { key, run: target_run, ranges, last, answers };
                    self.after(place_ns - self.now_ns, happening);
                }
                if let Some(connection) = self.network.connections.get_mut(&key.0) {
                    connection.last_place_ns = place_ns;
                }
            }
            _ if place_ns > self.now_ns => {
                // Behind the writes of the same connection.
                self.after(place_ns - self.now_ns, Happening::Arrive { key, operation });
            }
            Operation::Read { first, count } => {
                let server = &self.servers[to];
                let memory = server.memory.borrow();
                let length = server.layout.slot_bytes() as usize;
                let mut bytes = Vec::new();
                for position in first.0..first.0 + count {
                    let offset = server.layout.slot_offset(Position(position));
                    bytes.extend_from_slice(memory.load(offset, length));
                }
                drop(memory);
                let cpu = Cpu::SlotsRead { peer, key, first, bytes };
                self.after(2 * US, Happening::Cpu { node: from, run, cpu });
            }
            Operation::Confirm { round } => {
                let cpu = Cpu::Confirmed { peer, key, round };
                self.after(2 * US, Happening::Cpu { node: from, run, cpu });
            }
        }
    }

    fn placement(&mut self, slow: bool) -> u64 {
        if slow { self.below(20 * MS) } else { self.below(2 * US) }
    }

    pub(crate) fn on_place(
        &mut self,
        key: AccessKey,
        run: u64,
        offset: u64,
        bytes: Vec<u8>,
    ) -> Result<(), Violation> {
        let again = || Happening::Place { key, run, offset, bytes: bytes.clone() };
        if self.is_stopped(key, again) {
            return Ok(());
        }
        let Some(connection) = self.network.connections.get(&key.0) else { return Ok(()) };
        let server = &self.servers[connection.to];
        if server.run == run {
            let promised = layout::vote(server.vote_word).unwrap_or_default().0;
            if self.settings.witnesses {
                self.fences.check(server.id, key, promised)?;
            }
            server.memory.borrow_mut().store(offset, &bytes);
        }
        Ok(())
    }

    pub(crate) fn on_flush(
        &mut self,
        key: AccessKey,
        run: u64,
        ranges: Vec<(u64, usize)>,
        last: Position,
        answers: bool,
    ) {
        let again = || Happening::Flush { key, run, ranges: ranges.clone(), last, answers };
        if self.is_stopped(key, again) {
            return;
        }
        let Some(connection) = self.network.connections.get(&key.0) else { return };
        let (from, from_run, alive) = (connection.from, connection.from_run, connection.alive);
        let server = &self.servers[connection.to];
        if server.run != run && !self.counts_in_orphan(key) {
            return;
        }
        let peer = server.id;
        let ranges = if server.run == run { ranges } else { Vec::new() };
        for (offset, length) in ranges {
            server.memory.borrow_mut().persist(offset, length);
        }
        if alive && answers {
            let cpu = Cpu::Flushed { peer, key, last };
            self.after(2 * US, Happening::Cpu { node: from, run: from_run, cpu });
        }
    }
}
