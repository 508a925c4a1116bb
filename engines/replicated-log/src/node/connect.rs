//! Connections to the other members: dialling, and being dialled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, RemoteKey, Role};
use beeline_paxos::{Change, NodeId};

use super::Node;
use crate::contact::Contact;
use crate::error::LogError;
use crate::handle::Request;
use crate::hello::{Hello, HelloError};
use crate::home::HomeError;
use crate::machine::StateMachine;
use crate::member::Endpoint;
use crate::peers::{Dial, Outcome, Peers};
use crate::transport::TransportError;

/// A dial that waited for so long for a thread is not made.
const PATIENCE: Duration = Duration::from_secs(2);

impl<S: StateMachine> Node<S> {
    pub(super) fn hello(&self, to: NodeId, attempt: u64, status: u64) -> Vec<u8> {
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
        let own = self.member.listen(peer).map_err(failed)?;
        let status = RemoteKey(hello.status);
        let theirs = Endpoint { id: peer, info: info.clone(), status };
        let role = Role::Passive;
        self.member.connect(peer, &theirs, role).map_err(failed)?;
        self.member.watch(peer, hello.beat);
        self.wake(now_ns).map_err(failed)?;
        self.counters.connections += 1;
        let attempt = self.peers.next_attempt();
        Ok((own.info, self.hello(peer, attempt, own.status.0)))
    }

    pub(super) fn dialled(&mut self, peer: NodeId, attempt: u64, outcome: Outcome, now_ns: u64) {
        if !self.peers.is_current(peer, attempt) {
            return;
        }
        let connected = outcome.map_err(|error| error.to_string()).and_then(|(info, bytes)| {
            let hello = self.greeted(&bytes, true, now_ns).map_err(|error| error.to_string())?;
            let status = RemoteKey(hello.status);
            let theirs = Endpoint { id: hello.from, info, status };
            let role = Role::Active;
            let connected = self.member.connect(peer, &theirs, role);
            self.member.watch(peer, hello.beat);
            connected.and_then(|()| self.wake(now_ns)).map_err(|error| error.to_string())
        });
        match connected {
            Ok(()) => self.counters.connections += 1,
            Err(problem) => {
                tracing::debug!(%peer, problem, "a peer could not be connected");
                self.counters.failed_connections += 1;
                self.peers.failed(peer, now_ns, problem);
            }
        }
    }

    pub(super) fn dial(&mut self, now_ns: u64) {
        let learner = self.learner();
        let learner = learner.as_ref().map(|(id, contact)| (*id, contact));
        let (member, peers) = (&self.member, &mut self.peers);
        let configuration = member.replica().configuration();
        for dial in peers.due(now_ns, configuration, learner, |id| member.is_connected(id)) {
            let Dial { peer, address, attempt } = dial;
            let endpoint = match self.member.listen(peer) {
                Ok(endpoint) => endpoint,
                Err(error) => {
                    self.peers.failed(peer, now_ns, error.to_string());
                    continue;
                }
            };
            let hello = self.hello(peer, attempt, endpoint.status.0);
            let (transport, mailbox) = (Arc::clone(&self.transport), self.mailbox.clone());
            let asked = Instant::now();
            let dialling = move || {
                // Where dials wait for each other, those that are given up by now must not be made.
                let outcome = if asked.elapsed() < PATIENCE {
                    transport.exchange(&address, &endpoint.info, &hello)
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
