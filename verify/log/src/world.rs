//! The loop: virtual time, servers, clients, and the checks along the way.

use std::collections::BTreeMap;

use beeline_env::Randomness;
use beeline_paxos::{
    AccessKey, Batch, ClientCommand, Command, Configuration, Event, Kind, Layout, Message, NodeId,
    Options, Position, RoleName, layout,
};

use crate::client::{Client, Request, What};
use crate::invariants::{self, Fences, Values, Violation};
use crate::linear::Call;
use crate::machine::{Key, Reply, append};
use crate::network::{Cpu, Happening, Network, Operation};
use crate::server::{Server, Snapshot};

pub(crate) const US: u64 = 1_000;
pub(crate) const MS: u64 = 1_000_000;

/// A rule of the driver's contract that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedBug {
    /// Completions tell of the acknowledgement of the writes and not of the flush.
    CountAcknowledgement,
    /// The fence is reported done, and the vote given, before the old leader lost its access.
    VoteBeforeRevocation,
    /// A follower's commit word is set to what the leader committed, though the follower may have
    /// holes below that.
    HoleTakenForCommitted,
    /// Where the leader's own processor copies, as on shared memory, what it does to a follower's
    /// memory of before that follower's restart succeeds, and counts: nobody looks at the retired
    /// word.
    CountOrphans,
    /// A server whose machine was started anew takes part again, although its level does not survive
    /// that: the boot id is not looked at.
    VoteAfterReboot,
}

/// A run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Members at the start.
    pub nodes: usize,
    /// Decides everything.
    pub seed: u64,
    /// Faults come for so long.
    pub trouble_ns: u64,
    /// Clients.
    pub clients: usize,
    /// Of each client.
    pub operations: u64,
    /// What is broken on purpose.
    pub bug: Option<PlantedBug>,
    /// Whether `durable_commit` and `fenced`, which look into memories as no client can, are
    /// checked. Without them a planted bug has to show in what servers apply or clients see.
    pub witnesses: bool,
    /// No faults but those a scenario asks for, no lost messages, one more server that waits to
    /// join.
    pub calm: bool,
    /// Of every replica: [`quick`] unless a scenario says otherwise.
    pub options: Options,
    /// Level `process`: no power is lost but that of one server's machine, once, which takes all that
    /// the server had. At rest that server is removed and added.
    pub reboots: bool,
    /// A server's ticks come late by up to so much: its machine is busy with other things.
    pub late_ns: u64,
    /// Servers rest when they have nothing to do, and clients think for so long between two operations.
    pub rests_ns: Option<u64>,
}

impl Settings {
    /// The usual run.
    #[must_use]
    pub fn new(nodes: usize, seed: u64) -> Self {
        Self {
            nodes,
            seed,
            trouble_ns: 2_500 * MS,
            clients: 4,
            operations: 100,
            bug: None,
            witnesses: true,
            calm: false,
            options: quick(),
            reboots: false,
            late_ns: MS,
            rests_ns: None,
        }
    }
}

/// What a run did, so that an empty one is visible; and a hash of all that happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Log positions that were applied.
    pub positions: usize,
    /// Leaderships that became ready.
    pub leaderships: u64,
    /// Leaderships that ended, other than by a crash.
    pub step_downs: u64,
    /// Operations of clients that were answered.
    pub answered: u64,
    /// Faults of any kind.
    pub faults: u64,
    /// One-sided operations refused by memory that had been fenced.
    pub refused: u64,
    /// Snapshots sent to followers that lagged.
    pub snapshots_sent: u64,
    /// Rests of leaders.
    pub rests: u64,
    /// Leaders that rested, and were given up by a follower for their machine's silence.
    pub silences: u64,
    /// Of everything, in order.
    pub trace: u64,
    /// Virtual time.
    pub ended_ns: u64,
}

/// Runs a cluster from its seed.
///
/// Errors: the first [`Violation`].
pub fn run(settings: Settings) -> Result<Report, Violation> {
    let mut world = World::new(settings)?;
    world.run()?;
    Ok(world.report)
}

pub(crate) struct World {
    pub(crate) settings: Settings,
    pub(crate) random: Randomness,
    pub(crate) now_ns: u64,
    sequence: u64,
    happenings: BTreeMap<(u64, u64), Happening>,
    pub(crate) servers: Vec<Server>,
    pub(crate) network: Network,
    clients: Vec<Client>,
    attempts: Vec<u64>,
    next_key: u64,
    next_read: u64,
    values: Values,
    pub(crate) fences: Fences,
    pub(crate) report: Report,
    healed: bool,
    batch: Batch,
    payload: Vec<u8>,
}

/// Options with which much happens in little time.
#[must_use]
pub fn quick() -> Options {
    use std::time::Duration;
    Options {
        heartbeat: Duration::from_millis(20),
        patience: Duration::from_millis(70),
        spread: Duration::from_millis(30),
        campaign: Duration::from_millis(50),
        isolation: Duration::from_millis(120),
        transfer: Duration::from_millis(100),
        snapshot_retry: Duration::from_millis(100),
        pipeline_depth: 3,
        operation_slots: 4,
        window: 8,
    }
}

impl World {
    pub(crate) fn new(settings: Settings) -> Result<Self, Violation> {
        let mut random = Randomness::new(settings.seed);
        let layout =
            Layout::new(32, 192).map_err(|error| Violation::new("set-up", error.to_string()))?;
        let ids: Vec<_> = (0..settings.nodes).map(|node| NodeId(node as u16)).collect();
        let members = Configuration::initial(&ids);
        let mut servers: Vec<_> =
            ids.iter().map(|id| Server::new(*id, layout, members.clone())).collect();
        if settings.calm || random.chance(1, 3) {
            // One that waits to join.
            let id = NodeId(settings.nodes as u16);
            servers.push(Server::new(id, layout, Configuration::default()));
        }
        let clients: Vec<_> =
            (0..settings.clients).map(|id| Client::new(id, settings.operations)).collect();
        let losses: &[u64] = if settings.calm { &[0] } else { &[0, 10, 100] };
        let network =
            Network { loss: random.pick(losses).copied().unwrap_or(0), ..Network::default() };
        let mut world = Self {
            settings,
            random,
            now_ns: 0,
            sequence: 0,
            happenings: BTreeMap::new(),
            servers,
            network,
            attempts: vec![0; clients.len()],
            clients,
            next_key: 1,
            next_read: 0,
            values: Values::default(),
            fences: Fences::default(),
            report: Report::default(),
            healed: false,
            batch: Batch::new(layout.max_payload_bytes()),
            payload: Vec::new(),
        };
        for node in 0..world.servers.len() {
            world.servers[node].rate = world.random.between(800, 1250);
            world.servers[node].stalls = world.random.chance(1, 2);
            world.restart(node)?;
        }
        for client in 0..world.clients.len() {
            world.after(5 * MS, Happening::ClientTry { client, attempt: 0 });
        }
        if !settings.calm {
            world.after(20 * MS, Happening::Fault);
            world.after(settings.trouble_ns, Happening::HealAll);
        }
        Ok(world)
    }

    fn run(&mut self) -> Result<(), Violation> {
        let deadline_ns = self.settings.trouble_ns + 20_000 * MS;
        while let Some(((now_ns, _), happening)) = self.happenings.pop_first() {
            if now_ns > deadline_ns {
                let state: Vec<_> = self.servers.iter().map(describe).collect();
                let what = format!("no rest 20 s after the last fault: {state:#?}");
                return Err(Violation::new("liveness", what));
            }
            self.now_ns = now_ns;
            if matches!(happening, Happening::LookForRest) {
                if !self.removes_and_adds()? && self.is_at_rest() {
                    return self.finish();
                }
                self.after(50 * MS, Happening::LookForRest);
                continue;
            }
            self.happen(happening)?;
        }
        Ok(())
    }

    /// Whether this server's operations are on their way to others' memories.
    #[cfg(test)]
    pub(crate) fn is_writing(&self, node: usize) -> bool {
        self.happenings.values().any(|happening| {
            let Happening::Arrive { key, operation: Operation::Write { .. } } = happening else {
                return false;
            };
            let connection = self.network.connections.get(&key.0);
            connection.is_some_and(|connection| connection.from == node)
        })
    }

    /// Lets time pass.
    #[cfg(test)]
    pub(crate) fn pass(&mut self, span_ns: u64) -> Result<(), Violation> {
        let end_ns = self.now_ns + span_ns;
        while let Some(entry) = self.happenings.first_entry() {
            if entry.key().0 > end_ns {
                break;
            }
            let ((now_ns, _), happening) = entry.remove_entry();
            self.now_ns = now_ns;
            self.happen(happening)?;
        }
        self.now_ns = end_ns;
        Ok(())
    }

    pub(crate) fn after(&mut self, delay_ns: u64, happening: Happening) {
        self.sequence += 1;
        self.happenings.insert((self.now_ns + delay_ns, self.sequence), happening);
    }

    pub(crate) fn cpu_after(&mut self, delay_ns: u64, node: usize, cpu: Cpu) {
        let run = self.servers[node].run;
        self.after(delay_ns, Happening::Cpu { node, run, cpu });
    }

    pub(crate) fn below(&mut self, limit_ns: u64) -> u64 {
        self.random.below(limit_ns)
    }

    fn trace(&mut self, kind: u64, detail: u64) {
        let mixed = self.report.trace ^ kind << 56 ^ detail ^ self.now_ns.rotate_left(20);
        self.report.trace = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    pub(crate) fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        match happening {
            Happening::Cpu { node, run, cpu } => {
                if self.servers[node].run == run && self.servers[node].replica.is_some() {
                    if self.servers[node].paused {
                        self.servers[node].backlog.push(cpu);
                    } else {
                        self.on_cpu(node, cpu)?;
                    }
                }
            }
            Happening::Arrive { key, operation } => self.on_arrive(key, operation),
            Happening::Place { key, run, offset, bytes } => {
                self.on_place(key, run, offset, bytes)?;
            }
            Happening::Flush { key, run, ranges, last, answers } => {
                self.on_flush(key, run, ranges, last, answers);
            }
            Happening::ProbeStatus { from, run, to } => {
                let reached = self.servers[to].replica.is_some() && self.network.connects(from, to);
                let status = reached.then(|| self.servers[to].memory.borrow().status);
                let delay_ns = if reached { 2 * US } else { self.random.below(20 * MS) };
                let peer = self.servers[to].id;
                let cpu = Cpu::StatusRead { peer, status };
                self.after(delay_ns, Happening::Cpu { node: from, run, cpu });
            }
            Happening::ClientTry { client, attempt } => self.on_client_try(client, attempt),
            Happening::Reply { client, number, reply } => {
                if self.clients[client].answer(number, reply, self.now_ns) {
                    self.report.answered += 1;
                    let think_ns = self.settings.rests_ns.unwrap_or(10 * MS);
                    self.try_again(client, think_ns);
                }
            }
            Happening::Redirect { client, number, hint } => {
                if self.clients[client].waits_for(number) {
                    let any = self.random.below(self.servers.len() as u64) as usize;
                    self.clients[client].server = hint.unwrap_or(any);
                    self.try_again(client, 10 * MS);
                }
            }
            Happening::Fault => self.on_fault()?,
            Happening::Restart { node } => self.restart(node)?,
            Happening::Resume { node } => self.resume(node)?,
            Happening::Mend { link } => {
                self.network.cut.remove(&link);
            }
            Happening::HealAll => {
                self.healed = true;
                self.heal_all()?;
                self.after(50 * MS, Happening::LookForRest);
            }
            Happening::LookForRest => {}
        }
        Ok(())
    }

    pub(crate) fn is_healed(&self) -> bool {
        self.healed
    }

    pub(crate) fn restart(&mut self, node: usize) -> Result<(), Violation> {
        let refuses =
            self.servers[node].rebooted && self.settings.bug != Some(PlantedBug::VoteAfterReboot);
        if self.servers[node].replica.is_some() || refuses {
            return Ok(());
        }
        let seed = self.random.next_u64();
        self.servers[node]
            .start(self.settings.options, seed)
            .map_err(|what| Violation::new("restart", what))?;
        self.cpu_after(0, node, Cpu::Tick);
        Ok(())
    }

    pub(crate) fn resume(&mut self, node: usize) -> Result<(), Violation> {
        if !std::mem::take(&mut self.servers[node].paused) {
            return Ok(());
        }
        // First it finishes what it was in the middle of.
        for happening in std::mem::take(&mut self.servers[node].stalled) {
            self.happen(happening)?;
        }
        let run = self.servers[node].run;
        for cpu in std::mem::take(&mut self.servers[node].backlog) {
            self.happen(Happening::Cpu { node, run, cpu })?;
        }
        Ok(())
    }

    fn on_cpu(&mut self, node: usize, cpu: Cpu) -> Result<(), Violation> {
        let bytes;
        self.tell_the_time(node, &cpu)?;
        let event = match cpu {
            Cpu::Tick => {
                let delay_ns = 5 * MS + self.below(self.settings.late_ns);
                self.cpu_after(delay_ns, node, Cpu::Tick);
                if self.rests_on(node)? {
                    return Ok(());
                }
                self.tick_of(node)
            }
            Cpu::Message { from, message } => Event::Message { from, message },
            Cpu::Fence => {
                let key = AccessKey(self.next_key);
                self.next_key += 1;
                let until_ns = self.now_ns + self.random.below(300 * MS);
                let mut memory = self.servers[node].memory.borrow_mut();
                let old = memory.key.replace(key);
                if let (Some(PlantedBug::VoteBeforeRevocation), Some(old)) =
                    (self.settings.bug, old)
                {
                    memory.lingering.push((old, until_ns));
                }
                Event::Fenced { key }
            }
            Cpu::PersistVote { word } => {
                self.servers[node].vote_word = word;
                Event::VotePersisted
            }
            Cpu::PersistLog { term, first, last } => {
                let server = &self.servers[node];
                for position in first.0..=last.0 {
                    let offset = server.layout.slot_offset(Position(position));
                    let length = server.layout.slot_bytes() as usize;
                    server.memory.borrow_mut().persist(offset, length);
                }
                Event::LogPersisted { term, last }
            }
            Cpu::Flushed { peer, key, last } => Event::Flushed { peer, key, last },
            Cpu::SlotsRead { peer, key, first, bytes: read } => {
                bytes = read;
                Event::SlotsRead { peer, key, first, bytes: &bytes }
            }
            Cpu::Confirmed { peer, key, round } => Event::Confirmed { peer, key, round },
            Cpu::AccessLost { peer, key } => Event::AccessLost { peer, key },
            Cpu::StatusRead { peer, status } => Event::StatusRead { peer, status },
            Cpu::SnapshotDurable { snapshot } => {
                let position = snapshot.position;
                if position <= self.servers[node].snapshot.position {
                    return Ok(());
                }
                invariants::check_machine(self.servers[node].id, &snapshot.machine)?;
                self.servers[node].snapshot = *snapshot;
                Event::SnapshotTaken { position }
            }
            Cpu::SnapshotArrived { snapshot } => {
                let server = &mut self.servers[node];
                let committed = server.replica.as_ref().map(|replica| replica.committed());
                if committed.is_none_or(|committed| snapshot.position <= committed) {
                    return Ok(());
                }
                server.machine = snapshot.machine.clone();
                let (position, configuration) = (snapshot.position, snapshot.configuration.clone());
                server.snapshot = *snapshot;
                Event::SnapshotInstalled { position, configuration }
            }
            Cpu::Request(request) => return self.on_request(node, request),
            Cpu::Change(change) => Event::ChangeMembers { change, contact: b"" },
            Cpu::Transfer { to } => Event::Transfer { to },
        };
        self.step(node, event)
    }

    pub(crate) fn tick_of(&self, node: usize) -> Event<'static> {
        Event::Tick { now_ns: self.now_ns / 1000 * self.servers[node].rate }
    }

    pub(crate) fn step(&mut self, node: usize, event: Event<'_>) -> Result<(), Violation> {
        let mut commands = Vec::new();
        let Some(replica) = &mut self.servers[node].replica else { return Ok(()) };
        let mut before = replica.configuration().clone();
        replica.step(event, &mut commands);
        loop {
            for command in commands.drain(..) {
                self.execute(node, command, &before)?;
            }
            if !self.propose(node) {
                return Ok(());
            }
            let Some(replica) = &mut self.servers[node].replica else { return Ok(()) };
            before = replica.configuration().clone();
            replica.step(Event::Proposed, &mut commands);
        }
    }

    /// Moves what clients asked for into the log, several to an entry; true if there was room.
    fn propose(&mut self, node: usize) -> bool {
        let server = &mut self.servers[node];
        let Some(replica) = &mut server.replica else { return false };
        if server.queue.is_empty() || !replica.can_change() {
            return false;
        }
        self.batch.clear();
        let mut taken = 0;
        for request in &server.queue {
            let (session, sequence, bytes) = match request.what {
                What::Append { session, sequence, key, item } => {
                    (session, sequence, append(key, item))
                }
                _ => (0, 0, Vec::new()),
            };
            if !self.batch.push(&ClientCommand { session, sequence, bytes: &bytes }) {
                break;
            }
            taken += 1;
        }
        let Ok(position) = replica.propose(self.batch.payload()) else { return false };
        for (index, request) in (0..).zip(server.queue.drain(..taken)) {
            server.pending.insert((position, index), (request.client, request.number));
        }
        true
    }

    fn execute(
        &mut self,
        node: usize,
        command: Command,
        before: &Configuration,
    ) -> Result<(), Violation> {
        match command {
            Command::Send { to, message } => {
                if let Message::Vote { term, grant } | Message::Following { term, grant } = message
                {
                    self.fences.granted(grant.key, term);
                }
                self.send(node, usize::from(to.0), message);
            }
            Command::Fence => {
                let delay_ns = self.below(2 * MS);
                self.cpu_after(delay_ns, node, Cpu::Fence);
            }
            Command::PersistVote { term, voted_for } => {
                let word = layout::vote_word(term, voted_for);
                let delay_ns = self.below(2 * MS);
                self.cpu_after(delay_ns, node, Cpu::PersistVote { word });
            }
            Command::PersistLog { term, first, last } => {
                let slow = !self.settings.calm && self.random.chance(1, 20);
                let limit_ns = if slow { 200 * MS } else { 200 * US };
                let delay_ns = self.below(limit_ns);
                self.cpu_after(delay_ns, node, Cpu::PersistLog { term, first, last });
            }
            Command::WriteFlush { peer, key, first, last } => {
                let server = &self.servers[node];
                let memory = server.memory.borrow();
                let length = server.layout.slot_bytes() as usize;
                let writes = (first.0..=last.0)
                    .map(|position| server.layout.slot_offset(Position(position)))
                    .map(|offset| (offset, memory.load(offset, length).to_vec()))
                    .collect();
                drop(memory);
                self.post(node, peer, key, Operation::Write { writes, flush: Some(last) });
            }
            Command::WriteCommit { peer, key, position } => {
                let replica = self.servers[node].replica.as_ref();
                let position = match (self.settings.bug, replica) {
                    (Some(PlantedBug::HoleTakenForCommitted), Some(replica)) => replica.committed(),
                    _ => position,
                };
                let word = layout::commit_word(position).to_le_bytes().to_vec();
                let writes = vec![(self.servers[node].layout.commit_offset(), word)];
                self.post(node, peer, key, Operation::Write { writes, flush: None });
            }
            Command::ReadSlots { peer, key, first, count } => {
                self.post(node, peer, key, Operation::Read { first, count });
            }
            Command::Confirm { peer, key, round } => {
                self.post(node, peer, key, Operation::Confirm { round });
            }
            Command::Disconnect { peer: _, key } => self.break_connection(key, 100 * US),
            Command::ReadStatus { peer } => {
                let run = self.servers[node].run;
                let to = usize::from(peer.0);
                self.after(3 * US, Happening::ProbeStatus { from: node, run, to });
            }
            Command::Apply { first, last } => self.apply(node, first, last, before)?,
            Command::ReadReady { id } => {
                if let Some((client, number, key)) = self.servers[node].reads.remove(&id) {
                    let reply = Reply::List(self.servers[node].machine.read(key));
                    self.reply(client, number, reply);
                }
            }
            Command::ReadRefused { id } => {
                if let Some((client, number, _)) = self.servers[node].reads.remove(&id) {
                    self.redirect(client, number, None);
                }
            }
            Command::TakeSnapshot => {
                let server = &self.servers[node];
                let Some(replica) = &server.replica else { return Ok(()) };
                let snapshot = Box::new(Snapshot {
                    position: replica.committed(),
                    configuration: replica.configuration().clone(),
                    machine: server.machine.clone(),
                });
                let delay_ns = self.below(10 * MS);
                self.cpu_after(delay_ns, node, Cpu::SnapshotDurable { snapshot });
            }
            Command::SendSnapshot { to } => {
                let snapshot = Box::new(self.servers[node].snapshot.clone());
                let to = usize::from(to.0);
                self.report.snapshots_sent += 1;
                if self.network.passes(node, to) {
                    let delay_ns = MS + self.below(20 * MS);
                    self.cpu_after(delay_ns, to, Cpu::SnapshotArrived { snapshot });
                }
            }
            Command::Leading { term } => {
                self.report.leaderships += 1;
                self.trace(1, u64::from(term.0));
            }
            Command::SteppedDown { term } => {
                self.report.step_downs += 1;
                self.trace(2, u64::from(term.0));
                let server = &mut self.servers[node];
                server.queue.clear();
                let pending = std::mem::take(&mut server.pending);
                for (client, number) in pending.into_values() {
                    self.redirect(client, number, None);
                }
            }
            Command::Stop { damaged } => {
                let what = format!("{} found {damaged} damaged", self.servers[node].id);
                return Err(Violation::new("durable_commit", what));
            }
        }
        Ok(())
    }

    fn apply(
        &mut self,
        node: usize,
        first: Position,
        last: Position,
        before: &Configuration,
    ) -> Result<(), Violation> {
        let mut payload = std::mem::take(&mut self.payload);
        for position in (first.0..=last.0).map(Position) {
            let Some(replica) = &self.servers[node].replica else { break };
            let kind = replica.entry(position, &mut payload);
            let leads = matches!(replica.role(), RoleName::Leader | RoleName::Recovering);
            let id = self.servers[node].id;
            self.trace(3, position.0 << 16 | u64::from(id.0));
            self.values.check(id, position, kind, &payload)?;
            if leads && self.settings.witnesses {
                invariants::check_commit(position, kind, before, |member| {
                    let server = &self.servers[usize::from(member.0)];
                    server.holds_durably(position, kind, &payload)
                })?;
            }
            if kind == Kind::Commands {
                let mut replies = Vec::new();
                let server = &mut self.servers[node];
                server.machine.apply(position, &payload, |index, reply| {
                    if let Some((client, number)) = server.pending.remove(&(position, index)) {
                        replies.push((client, number, reply));
                    }
                });
                for (client, number, reply) in replies {
                    self.reply(client, number, reply);
                }
            }
        }
        self.payload = payload;
        Ok(())
    }

    fn reply(&mut self, client: usize, number: u64, reply: Reply) {
        if !self.random.chance(self.network.loss, 1000) {
            let delay_ns = 10 * US + self.below(500 * US);
            self.after(delay_ns, Happening::Reply { client, number, reply });
        }
    }

    fn redirect(&mut self, client: usize, number: u64, hint: Option<usize>) {
        let delay_ns = 10 * US + self.below(500 * US);
        self.after(delay_ns, Happening::Redirect { client, number, hint });
    }

    fn try_again(&mut self, client: usize, limit_ns: u64) {
        self.attempts[client] += 1;
        let attempt = self.attempts[client];
        let delay_ns = self.below(limit_ns);
        self.after(delay_ns, Happening::ClientTry { client, attempt });
    }

    fn on_client_try(&mut self, client: usize, attempt: u64) {
        if self.attempts[client] != attempt {
            return;
        }
        let Some(request) = self.clients[client].request(self.now_ns, &mut self.random) else {
            return;
        };
        let node = self.clients[client].server;
        if !self.random.chance(self.network.loss, 1000) {
            // Some are late enough to arrive after their successors.
            let slow = !self.settings.calm && self.random.chance(1, 20);
            let limit_ns = if slow { 300 * MS } else { MS };
            let delay_ns = 10 * US + self.below(limit_ns);
            self.cpu_after(delay_ns, node, Cpu::Request(request));
        }
        // If no answer comes: somebody else, some time later.
        self.clients[client].server = if self.random.chance(1, 2) {
            self.random.below(self.servers.len() as u64) as usize
        } else {
            node
        };
        self.attempts[client] += 1;
        let attempt = self.attempts[client];
        let delay_ns = 60 * MS + self.below(60 * MS);
        self.after(delay_ns, Happening::ClientTry { client, attempt });
    }

    fn on_request(&mut self, node: usize, request: Request) -> Result<(), Violation> {
        let server = &mut self.servers[node];
        let Some(replica) = &server.replica else { return Ok(()) };
        if replica.leader() != Some(server.id) {
            let hint = replica.leader().map(|id| usize::from(id.0));
            self.redirect(request.client, request.number, hint);
            return Ok(());
        }
        if let What::Read { key } = request.what {
            let id = self.next_read;
            self.next_read += 1;
            server.reads.insert(id, (request.client, request.number, key));
            return self.step(node, Event::Read { id });
        }
        server.queue.push_back(request);
        self.step(node, Event::Proposed)
    }

    fn send(&mut self, from: usize, to: usize, message: Message) {
        if to >= self.servers.len() || !self.network.passes(from, to) {
            return;
        }
        let copies = 1 + u64::from(self.random.chance(1, 20));
        for _ in 0..copies {
            if self.random.chance(self.network.loss, 1000) {
                continue;
            }
            let limit_ns = if self.random.chance(1, 15) { 60 * MS } else { MS };
            let delay_ns = 10 * US + self.below(limit_ns);
            let from = self.servers[from].id;
            self.cpu_after(delay_ns, to, Cpu::Message { from, message });
        }
    }

    pub(crate) fn is_at_rest(&self) -> bool {
        let Some(leader) = self.leader() else { return false };
        let Some(replica) = &self.servers[leader].replica else { return false };
        let members = replica.configuration().members();
        self.clients.iter().all(Client::is_done)
            && members.iter().all(|id| {
                let other = self.servers[usize::from(id.0)].replica.as_ref();
                other.is_some_and(|other| other.committed() == replica.committed())
            })
    }

    /// The node of a ready leader.
    pub(crate) fn leader(&self) -> Option<usize> {
        let leads = |server: &&Server| {
            let replica = server.replica.as_ref();
            replica.is_some_and(|replica| replica.role() == RoleName::Leader)
        };
        self.servers.iter().find(leads).map(|server| usize::from(server.id.0))
    }

    pub(crate) fn finish(&mut self) -> Result<(), Violation> {
        let Some(leader) = self.leader() else { return Ok(()) };
        let Some(replica) = &self.servers[leader].replica else { return Ok(()) };
        let mut acknowledged = Vec::new();
        let mut history: BTreeMap<Key, Vec<Call>> = BTreeMap::new();
        for client in &mut self.clients {
            client.give_up();
            acknowledged.extend_from_slice(&client.acknowledged);
            for (key, call) in &client.history {
                history.entry(*key).or_default().push(call.clone());
            }
        }
        for id in replica.configuration().members() {
            let server = &self.servers[usize::from(id.0)];
            invariants::check_end(*id, &server.machine, &acknowledged)?;
            invariants::check_machine(*id, &server.machine)?;
            if server.machine != self.servers[leader].machine {
                let what = format!("{id} and {} differ at rest", self.servers[leader].id);
                return Err(Violation::new("one_value", what));
            }
        }
        invariants::check_history(&history)?;
        self.report.positions = self.values.count();
        self.report.ended_ns = self.now_ns;
        Ok(())
    }
}

fn describe(server: &Server) -> String {
    let replica = server.replica.as_ref();
    let state = replica
        .map(|replica| (replica.role(), replica.term(), replica.leader(), replica.committed()));
    let members = replica.map(|replica| replica.configuration().members().to_vec());
    format!("{}: {state:?}, members {members:?}, {} waiting", server.id, server.queue.len())
}
