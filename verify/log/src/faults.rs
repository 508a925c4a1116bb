//! What goes wrong, and how it heals.

use beeline_env::Randomness;
use beeline_paxos::{Change, Configuration, NodeId};

use crate::invariants::{self, Violation};
use crate::network::{Cpu, Happening};
use crate::world::{MS, PlantedBug, World};

impl World {
    fn any_server(&mut self) -> usize {
        // Leaders draw trouble.
        match self.leader() {
            Some(leader) if self.random.chance(1, 3) => leader,
            _ => self.random.below(self.servers.len() as u64) as usize,
        }
    }

    /// A while that is short more often than long.
    fn a_while(&mut self, limit_ns: u64) -> u64 {
        let limit_ns = limit_ns >> self.random.below(6);
        MS + self.random.below(limit_ns)
    }

    pub(crate) fn on_fault(&mut self) -> Result<(), Violation> {
        if self.is_healed() {
            return Ok(());
        }
        self.report.faults += 1;
        let node = self.any_server();
        let turn = self.random.below(20);
        if self.settings.reboots && matches!(turn, 15 | 18..) {
            self.reboot(node)?;
            let next_ns = self.a_while(160 * MS);
            self.after(next_ns, Happening::Fault);
            return Ok(());
        }
        match turn {
            0..=2 => self.crash(node, false)?,
            3..=5 => self.crash(node, !self.settings.reboots)?,
            6..=9 => self.pause(node),
            10..=12 => self.cut_links(node),
            13 | 14 => {
                let while_ns = self.a_while(500 * MS);
                self.servers[node].slow_until_ns = self.now_ns + while_ns;
            }
            15 => self.lose_all_power()?,
            16 | 17 => self.hand_over(),
            _ => self.change_members(),
        }
        let next_ns = self.a_while(160 * MS);
        self.after(next_ns, Happening::Fault);
        Ok(())
    }

    /// The process dies; with `power`, memory that was not flushed is torn.
    pub(crate) fn crash(&mut self, node: usize, power: bool) -> Result<(), Violation> {
        if self.servers[node].replica.is_none() {
            return Ok(());
        }
        invariants::check_machine(self.servers[node].id, &self.servers[node].machine)?;
        let server = &mut self.servers[node];
        server.die();
        server.stalled.clear();
        if power {
            let mut random = Randomness::new(self.random.next_u64());
            server.memory.borrow_mut().lose_power(&mut random);
        }
        if !self.settings.calm {
            let while_ns = self.a_while(600 * MS);
            self.after(while_ns, Happening::Restart { node });
        }
        Ok(())
    }

    /// The machine of a server is started anew: of what the server had nothing is left. Once in a run:
    /// more than one of three is more than a cluster survives.
    fn reboot(&mut self, node: usize) -> Result<(), Violation> {
        let members = self.settings.nodes;
        if node >= members || self.servers.iter().any(|server| server.rebooted) {
            return Ok(());
        }
        self.crash(node, false)?;
        let ids: Vec<_> = (0..members).map(|node| NodeId(node as u16)).collect();
        self.servers[node].rebooted = true;
        self.servers[node].forget(Configuration::initial(&ids));
        Ok(())
    }

    /// What an operator does about a server that is not opened any more; true while it is not done.
    pub(crate) fn removes_and_adds(&mut self) -> Result<bool, Violation> {
        let waits = |server: &crate::server::Server| server.rebooted || server.rejoins;
        let Some(node) = self.servers.iter().position(waits) else { return Ok(false) };
        if self.settings.bug == Some(PlantedBug::VoteAfterReboot) {
            return Ok(false);
        }
        let id = self.servers[node].id;
        let Some(leader) = self.leader() else { return Ok(true) };
        let Some(replica) = &self.servers[leader].replica else { return Ok(true) };
        let is_member = replica.configuration().contains(id);
        if self.servers[node].rebooted {
            if is_member {
                self.cpu_after(0, leader, Cpu::Change(Change::Leave(id)));
                return Ok(true);
            }
            self.servers[node].forget(Configuration::default());
            (self.servers[node].rebooted, self.servers[node].rejoins) = (false, true);
            self.restart(node)?;
        }
        if is_member {
            self.servers[node].rejoins = false;
        } else {
            self.cpu_after(0, leader, Cpu::Change(Change::Join(id)));
        }
        Ok(!is_member)
    }

    fn lose_all_power(&mut self) -> Result<(), Violation> {
        for node in 0..self.servers.len() {
            self.crash(node, true)?;
        }
        Ok(())
    }

    pub(crate) fn pause(&mut self, node: usize) {
        if self.servers[node].replica.is_some() && !self.servers[node].paused {
            self.servers[node].paused = true;
            if !self.settings.calm {
                let while_ns = self.a_while(800 * MS);
                self.after(while_ns, Happening::Resume { node });
            }
        }
    }

    /// Cuts a server from some or all others, in one or both directions.
    fn cut_links(&mut self, node: usize) {
        let (all, both) = (self.random.chance(1, 2), self.random.chance(2, 3));
        let while_ns = self.a_while(600 * MS);
        for other in 0..self.servers.len() {
            if other == node || !all && self.random.chance(1, 2) {
                continue;
            }
            let links = [(node, other), (other, node)];
            for link in links.into_iter().take(if both { 2 } else { 1 }) {
                if self.network.cut.insert(link) {
                    self.after(while_ns, Happening::Mend { link });
                }
            }
        }
    }

    fn hand_over(&mut self) {
        let Some(leader) = self.leader() else { return };
        let to = NodeId(self.random.below(self.servers.len() as u64) as u16);
        self.cpu_after(0, leader, Cpu::Transfer { to });
    }

    fn change_members(&mut self) {
        let Some(leader) = self.leader() else { return };
        let id = NodeId(self.random.below(self.servers.len() as u64) as u16);
        let Some(replica) = &self.servers[leader].replica else { return };
        let configuration = replica.configuration();
        let change = if !configuration.contains(id) {
            Change::Join(id)
        } else if configuration.members().len() > 2 {
            Change::Leave(id)
        } else {
            return;
        };
        self.cpu_after(0, leader, Cpu::Change(change));
    }

    pub(crate) fn heal_all(&mut self) -> Result<(), Violation> {
        self.network.cut.clear();
        for node in 0..self.servers.len() {
            self.servers[node].slow_until_ns = 0;
            self.restart(node)?;
            self.resume(node)?;
        }
        Ok(())
    }
}
