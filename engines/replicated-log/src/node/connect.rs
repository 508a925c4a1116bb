//! Connections to the other members: dialling, and being dialled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, RemoteKey, Role};
use beeline_paxos::{Change, ClusterId, NodeId};

use super::Node;
use crate::contact::Contact;
use crate::error::LogError;
use crate::handle::Request;
use crate::hello::{Hello, HelloError, NO_LINE};
use crate::home::HomeError;
use crate::line::{Lines, Route};
use crate::machine::StateMachine;
use crate::member::Endpoint;
use crate::peers::{Dial, Outcome, Peers};
use crate::transport::TransportError;

/// A dial that waited for so long for a thread is not made.
const PATIENCE: Duration = Duration::from_secs(2);

/// A line that is being made gives way to another after this, nanoseconds.
const LINE_NS: u64 = 4_000_000_000;

/// The line that a greeting on its way named.
#[derive(Debug)]
pub(super) struct DialledLine {
    id: u64,
    is_new: bool,
    address: String,
}

impl DialledLine {
    /// The greeting was in vain: others that dial there make another line.
    fn give_up(&self, lines: &Lines, cluster: ClusterId) {
        if self.is_new {
            lines.remove(self.id);
        }
        lines.given_up(&self.address, cluster.0);
    }
}

impl<S: StateMachine> Node<S> {
    /// Over line `line`; 0: over a queue pair of its own.
    fn hello(&self, to: NodeId, attempt: u64, status: u64, line: u64) -> Vec<u8> {
        let layout = self.home.layout();
        let hello = Hello {
            cluster: self.home.cluster(),
            from: self.home.id(),
            to,
            expects: self.peers.instance(to),
            instance: self.home.instance(),
            incarnation: self.home.incarnation(),
            attempt,
            slots: layout.slots(),
            slot_bytes: layout.slot_bytes(),
            status,
            beat: self.seat.as_ref().map(|seat| seat.shared.beat()),
            line,
            threads: self.seat.as_ref().map_or(0, |seat| seat.threads),
            contact: self.contact.clone(),
        };
        hello.encode()
    }

    /// Keeps note of the members that were met. A member that has noted none does so before it goes on
    /// with the first: its next run takes it for one that is alone, and has promised nothing to others.
    ///
    /// Errors: [`HomeError`]; a later call tries again.
    pub(super) fn acquaint(&mut self) -> Result<(), HomeError> {
        let (known, peers) = (&mut self.known, &self.peers);
        known.learn(&self.membership, |id| peers.instance(id));
        known.save()
    }

    /// Servers that greeted once and are no part of the cluster cost nothing for long.
    pub(super) fn let_strangers_go(&mut self, now_ns: u64) {
        let learner = self.learner().map(|(id, _)| id);
        let (member, known, membership) = (&self.member, &self.known, &self.membership);
        let stays = |peers: &Peers, id: NodeId| {
            let configuration = member.replica().configuration();
            let belongs = configuration.contains(id) || membership.contains(id);
            belongs
                || known.contains(id)
                || learner == Some(id)
                || member.is_connected(id)
                || peers.is_awaited(id, now_ns)
        };
        let strangers = member.peers().filter(|id| !stays(&self.peers, *id));
        let strangers: Vec<_> = strangers.collect();
        for id in strangers {
            self.member.let_go(id);
            self.peers.forget(id);
        }
    }

    /// The server that shall become a member, and where it answers.
    fn learner(&self) -> Option<(NodeId, Contact)> {
        let configuration = self.member.replica().configuration();
        let front = self.changes.front().filter(|front| front.proposed)?;
        match front.change {
            Change::Join(id) if !configuration.contains(id) => {
                Some((id, Contact::decode(&front.contact)))
            }
            _ => None,
        }
    }

    pub(super) fn greeted(
        &mut self,
        bytes: &[u8],
        dialled: bool,
        now_ns: u64,
    ) -> Result<Hello, HelloError> {
        let hello = Hello::decode(bytes)?;
        let own = (self.home.id(), self.home.instance());
        let checked = hello.check(own, self.home.cluster(), &self.home.layout());
        let greeted = checked.and_then(|()| self.peers.greet(&hello, dialled, now_ns));
        if let Err(error @ HelloError::DuplicateId { .. }) = &greeted {
            self.peers.note(hello.from, error.to_string());
        }
        greeted?;
        if !self.known.names_some() {
            let failed = |error: HomeError| HelloError::Fabric { reason: error.to_string() };
            self.acquaint().map_err(failed)?;
        }
        Ok(hello)
    }

    pub(super) fn accept(
        &mut self,
        info: &ConnectInfo,
        bytes: &[u8],
        now_ns: u64,
    ) -> Result<(ConnectInfo, Vec<u8>), HelloError> {
        let hello = self.greeted(bytes, false, now_ns)?;
        let peer = hello.from;
        let failed = |error: LogError| HelloError::Fabric { reason: error.to_string() };
        let status = RemoteKey(hello.status);
        let theirs = Endpoint { id: peer, info: info.clone(), status };
        let (own_info, own_status, line) = match (self.member.lines().cloned(), hello.beat) {
            (Some(lines), Some(beat)) if hello.line != 0 => {
                let own_info = if info.0.is_empty() {
                    if !lines.leads_to(hello.line, beat.host) {
                        return Err(HelloError::NoLine);
                    }
                    ConnectInfo(Vec::new())
                } else {
                    let made = self.member.make_line(hello.line).map_err(failed)?;
                    let connected = lines.connect(hello.line, beat.host, info, Role::Passive);
                    connected.map_err(failed)?;
                    // The same line the other way.
                    let address = Contact::decode(&hello.contact).address;
                    let (cluster, threads) = (hello.cluster.0, u64::from(hello.threads));
                    lines.made(hello.line, &address, cluster, threads);
                    made
                };
                (own_info, self.member.listen_on(peer, hello.line), hello.line)
            }
            _ => {
                let own = self.member.listen(peer).map_err(failed)?;
                (own.info, own.status, 0)
            }
        };
        self.member.connect(peer, &theirs, Role::Passive).map_err(failed)?;
        self.member.watch(peer, hello.beat);
        self.wake(now_ns).map_err(failed)?;
        self.counters.connections += 1;
        let attempt = self.peers.next_attempt();
        Ok((own_info, self.hello(peer, attempt, own_status.0, line)))
    }

    pub(super) fn dialled(&mut self, peer: NodeId, attempt: u64, outcome: Outcome, now_ns: u64) {
        let outcome = outcome.map_err(|error| error.to_string());
        let dialled = self.dialling.remove(&(peer, attempt));
        if !self.peers.is_current(peer, attempt) {
            if let (Some(lines), Some(line)) = (self.member.lines(), &dialled)
                && line.is_new
            {
                line.give_up(lines, self.home.cluster());
            }
            return;
        }
        let connected = outcome.and_then(|(info, bytes)| {
            let hello = self.greeted(&bytes, true, now_ns).map_err(|error| error.to_string())?;
            let connected = self.connect_dialled(&hello, info, dialled.as_ref());
            let connected = connected.and_then(|()| self.wake(now_ns));
            connected.map_err(|error| error.to_string())
        });
        match connected {
            Ok(()) => self.counters.connections += 1,
            Err(problem) => {
                tracing::debug!(%peer, problem, "a peer could not be connected");
                let lines = self.member.lines();
                if let (Some(lines), Some(line)) = (lines, &dialled)
                    && (line.is_new || problem.contains(NO_LINE))
                {
                    line.give_up(lines, self.home.cluster());
                }
                self.counters.failed_connections += 1;
                self.peers.failed(peer, now_ns, problem);
            }
        }
    }

    /// The peer took the greeting.
    fn connect_dialled(
        &mut self,
        hello: &Hello,
        info: ConnectInfo,
        dialled: Option<&DialledLine>,
    ) -> Result<(), LogError> {
        let (peer, status) = (hello.from, RemoteKey(hello.status));
        if let (Some(lines), Some(line)) = (self.member.lines().cloned(), dialled) {
            let cluster = self.home.cluster().0;
            if line.is_new {
                let host = hello.beat.map_or(0, |beat| beat.host);
                lines.connect(line.id, host, &info, Role::Active)?;
                if hello.line == line.id {
                    lines.made(line.id, &line.address, cluster, u64::from(hello.threads));
                } else {
                    // The peer has a thread of its own: no other member is reached there.
                    lines.given_up(&line.address, cluster);
                }
            }
            self.member.listen_on(peer, line.id);
        }
        let theirs = Endpoint { id: peer, info, status };
        let connected = self.member.connect(peer, &theirs, Role::Active);
        self.member.watch(peer, hello.beat);
        connected
    }

    /// What is said to the peer at `address`: own connection data and status, and the line. `None`: another
    /// member is making a line to it.
    ///
    /// Errors: as [`crate::Member::listen`].
    fn offer(
        &mut self,
        peer: NodeId,
        address: &str,
        attempt: u64,
        now_ns: u64,
    ) -> Result<Option<(ConnectInfo, RemoteKey, u64)>, LogError> {
        let Some(lines) = self.member.lines().cloned() else {
            let Endpoint { info, status, .. } = self.member.listen(peer)?;
            return Ok(Some((info, status, 0)));
        };
        let cluster = self.home.cluster().0;
        let until_ns = now_ns.saturating_add(LINE_NS);
        let (id, is_new) = match lines.to(address, cluster, now_ns, until_ns) {
            Route::Wait => return Ok(None),
            Route::Line(id) => (id, false),
            Route::New => (lines.draw(), true),
        };
        let line = DialledLine { id, is_new, address: address.to_owned() };
        let info = if is_new {
            let made = self.member.make_line(id);
            made.inspect_err(|_| line.give_up(&lines, self.home.cluster()))?
        } else {
            ConnectInfo(Vec::new())
        };
        // What came of an attempt before does not count any more.
        for (_, stale) in self.dialling.extract_if(|(of, _), _| *of == peer) {
            if stale.is_new {
                lines.remove(stale.id);
            }
        }
        self.dialling.insert((peer, attempt), line);
        Ok(Some((info, self.member.status_key(), id)))
    }

    pub(super) fn dial(&mut self, now_ns: u64) {
        let learner = self.learner();
        let learner = learner.as_ref().map(|(id, contact)| (*id, contact));
        let (member, peers) = (&self.member, &mut self.peers);
        let configuration = member.replica().configuration();
        for dial in peers.due(now_ns, configuration, learner, |id| member.is_connected(id)) {
            let Dial { peer, address, attempt } = dial;
            let (info, status, line) = match self.offer(peer, &address, attempt, now_ns) {
                Ok(Some(offer)) => offer,
                Ok(None) => {
                    self.peers.later(peer, now_ns);
                    continue;
                }
                Err(error) => {
                    let advice = error.advice();
                    self.peers.failed(peer, now_ns, format!("{error}{advice}"));
                    continue;
                }
            };
            let hello = self.hello(peer, attempt, status.0, line);
            let (transport, mailbox) = (Arc::clone(&self.transport), self.mailbox.clone());
            let asked = Instant::now();
            let dialling = move || {
                // Where dials wait for each other, those that are given up by now must not be made.
                let outcome = if asked.elapsed() < PATIENCE {
                    transport.exchange(&address, &info, &hello)
                } else {
                    let reason = "too many others were dialled before".to_owned();
                    Err(TransportError::Unreachable { address, reason })
                };
                // The node may have ended meanwhile.
                mailbox.send(Request::Dialled { peer, attempt, outcome });
            };
            // By peer: one that does not answer holds up no other.
            let name = format!("log-dial-{}", peer.0);
            if let Err(error) = self.jobs.run(&name, Box::new(dialling)) {
                self.peers.failed(peer, now_ns, error.to_string());
            }
        }
    }
}
