//! Servers that rest, and what watches over their machines meanwhile.
//!
//! A server that rests gets no ticks. Its machine goes on: it looks whether the machine of the leader is
//! there, as a host of many groups does for all of them at once.

use beeline_paxos::{Event, NodeId, RoleName};

use crate::invariants::Violation;
use crate::network::Cpu;
use crate::world::{MS, World};

/// A leader that was asked for nothing for so long may rest.
const QUIET_NS: u64 = 15 * MS;
/// Without a sign of life for so long a machine is taken for dead.
const PATIENCE_NS: u64 = 70 * MS;

impl World {
    fn rests(&self, node: usize) -> bool {
        self.servers[node].replica.as_ref().is_some_and(|replica| replica.is_resting())
    }

    /// A server that rests, and is about to hear of something, is told the time before.
    pub(crate) fn tell_the_time(&mut self, node: usize, cpu: &Cpu) -> Result<(), Violation> {
        if !matches!(cpu, Cpu::Tick | Cpu::StatusRead { .. } | Cpu::Confirmed { .. }) {
            self.servers[node].busy_ns = self.now_ns;
            if self.rests(node) {
                self.step(node, self.tick_of(node))?;
            }
        }
        Ok(())
    }

    /// Whether `from`'s machine sees that of `to` at work.
    fn sees(&self, from: usize, to: usize) -> bool {
        let server = &self.servers[to];
        server.replica.is_some() && !server.paused && self.network.connects(from, to)
    }

    /// What a machine does in the place of a tick; false: the server needs its tick.
    pub(crate) fn rests_on(&mut self, node: usize) -> Result<bool, Violation> {
        if self.settings.rests_ns.is_none() {
            return Ok(false);
        }
        let server = &self.servers[node];
        let Some(replica) = &server.replica else { return Ok(false) };
        let own = server.id;
        if !replica.is_resting() {
            self.servers[node].heard_ns = self.now_ns;
            self.try_to_rest(node);
            return Ok(false);
        }
        let Some(leader) = replica.leader() else { return Ok(false) };
        if leader != own {
            let sees = self.sees(node, usize::from(leader.0));
            if sees {
                self.servers[node].heard_ns = self.now_ns;
            } else if self.now_ns - self.servers[node].heard_ns > PATIENCE_NS {
                self.report.silences += 1;
                self.step(node, self.tick_of(node))?;
                self.step(node, Event::Silent { peer: leader })?;
            }
            return Ok(true);
        }
        let members = replica.configuration().members().to_vec();
        let is_back = |world: &Self, id: NodeId| {
            let reached = world.servers[node].replica.as_ref().and_then(|own| own.confirmed_by(id));
            id != own && reached.is_none() && world.sees(node, usize::from(id.0))
        };
        if members.iter().any(|id| is_back(self, *id)) {
            self.servers[node].busy_ns = self.now_ns;
            self.step(node, self.tick_of(node))?;
            self.step(node, Event::Wake)?;
        }
        Ok(true)
    }

    fn try_to_rest(&mut self, node: usize) {
        let server = &self.servers[node];
        let is_quiet = self.now_ns.saturating_sub(server.busy_ns) > QUIET_NS;
        let away: Vec<_> =
            self.servers.iter().map(|other| !self.sees(node, usize::from(other.id.0))).collect();
        let Some(replica) = &mut self.servers[node].replica else { return };
        if is_quiet && replica.role() == RoleName::Leader {
            let is_away = |id: NodeId| away.get(usize::from(id.0)).copied().unwrap_or(true);
            self.report.rests += u64::from(replica.rest(is_away));
        }
    }
}
