//! Finding the other members: who dials whom, when, and who may connect.
//!
//! The member with the lower id dials at once, the other one a little later, in case it knows a
//! newer address. Attempts back off to one a second. A hello is checked before anything is made
//! for it; an old one, of an earlier process or an earlier attempt, is refused.

use std::collections::BTreeMap;

use beeline_fabric::ConnectInfo;
use beeline_paxos::{Configuration, NodeId};

use crate::contact::Contact;
use crate::hello::{Hello, HelloError};

/// First pause between attempts, nanoseconds; doubled up to [`LONGEST_NS`].
const SHORTEST_NS: u64 = 20_000_000;
const LONGEST_NS: u64 = 1_000_000_000;
/// The higher id lets the lower one go first for so long.
const COURTESY_NS: u64 = 150_000_000;
/// A connection that does not come about in this time is given up.
const CONNECT_NS: u64 = 4_000_000_000;

#[derive(Debug, Default)]
pub(crate) struct Peer {
    /// As its own hello said, which may be newer than the membership.
    contact: Option<Contact>,
    instance: Option<u64>,
    /// The newest hello: incarnation and attempt.
    newest: (u64, u64),
    /// An attempt of ours that is under way, and its end.
    attempt: Option<(u64, u64)>,
    backoff_ns: u64,
    next_ns: u64,
    /// It dialled and was answered: until then it may connect.
    answered_until_ns: u64,
    pub(crate) problem: Option<String>,
}

/// The other members, as far as connecting goes.
#[derive(Debug)]
pub(crate) struct Peers {
    own: NodeId,
    peers: BTreeMap<NodeId, Peer>,
    attempts: u64,
}

/// Somebody to dial.
#[derive(Debug)]
pub(crate) struct Dial {
    pub(crate) peer: NodeId,
    pub(crate) address: String,
    pub(crate) attempt: u64,
}

impl Peers {
    /// `known`: instances of members that were met in earlier runs.
    pub(crate) fn new(own: NodeId, known: impl Iterator<Item = (NodeId, u64)>) -> Self {
        let met = |(id, instance)| (id, Peer { instance: Some(instance), ..Peer::default() });
        Self { own, peers: known.map(met).collect(), attempts: 0 }
    }

    /// Forgets which instance of a member there was.
    pub(crate) fn forget(&mut self, id: NodeId) {
        self.peers.remove(&id);
    }

    /// Whether a connection to it, or from it, is about to come.
    pub(crate) fn is_awaited(&self, id: NodeId, now_ns: u64) -> bool {
        let peer = self.peers.get(&id);
        peer.is_some_and(|peer| {
            peer.attempt.is_some() || now_ns < peer.next_ns.max(peer.answered_until_ns)
        })
    }

    pub(crate) fn get(&self, id: NodeId) -> Option<&Peer> {
        self.peers.get(&id)
    }

    /// Which instance of a member is known; 0 for none yet.
    pub(crate) fn instance(&self, id: NodeId) -> u64 {
        self.peers.get(&id).and_then(|peer| peer.instance).unwrap_or_default()
    }

    /// A peer's own attempt failed here.
    pub(crate) fn note(&mut self, id: NodeId, problem: String) {
        self.peers.entry(id).or_default().problem = Some(problem);
    }

    /// Where a member answers: by its hello, or else by the membership.
    fn address(&self, id: NodeId, configuration: &Configuration) -> String {
        let known = self.peers.get(&id).and_then(|peer| peer.contact.as_ref());
        let told = Contact::decode(configuration.contact(id)).address;
        known.map_or(told, |contact| contact.address.clone())
    }

    /// Whom to dial now: members, and the server at `learner` that shall become one.
    pub(crate) fn due(
        &mut self,
        now_ns: u64,
        configuration: &Configuration,
        learner: Option<(NodeId, &Contact)>,
        is_connected: impl Fn(NodeId) -> bool,
    ) -> Vec<Dial> {
        let mut dials = Vec::new();
        let members = configuration.members().iter().copied();
        let learner_id = learner.map(|(id, _)| id);
        for id in members.chain(learner_id).filter(|id| *id != self.own) {
            let address = match learner {
                Some((learner, contact)) if learner == id => contact.address.clone(),
                _ => self.address(id, configuration),
            };
            let courtesy_ns = if self.own < id { 0 } else { COURTESY_NS };
            let peer = self.peers.entry(id).or_default();
            if is_connected(id) {
                peer.attempt = None;
                peer.backoff_ns = 0;
                peer.problem = None;
                peer.next_ns = now_ns + courtesy_ns;
                continue;
            }
            peer.attempt.take_if(|(_, end_ns)| now_ns >= *end_ns);
            if peer.attempt.is_some() || now_ns < peer.next_ns || address.is_empty() {
                continue;
            }
            if peer.next_ns == 0 && courtesy_ns > 0 {
                peer.next_ns = now_ns + courtesy_ns;
                continue;
            }
            self.attempts += 1;
            let attempt = self.attempts;
            peer.backoff_ns = (peer.backoff_ns * 2).clamp(SHORTEST_NS, LONGEST_NS);
            peer.next_ns = now_ns + peer.backoff_ns + courtesy_ns;
            peer.attempt = Some((attempt, now_ns + CONNECT_NS));
            dials.push(Dial { peer: id, address, attempt });
        }
        dials
    }

    /// Numbers a hello of ours that answers another.
    pub(crate) fn next_attempt(&mut self) -> u64 {
        self.attempts += 1;
        self.attempts
    }

    pub(crate) fn is_current(&self, id: NodeId, attempt: u64) -> bool {
        let peer = self.peers.get(&id);
        peer.and_then(|peer| peer.attempt).is_some_and(|(current, _)| current == attempt)
    }

    /// It could not be dialled at this moment, for a reason of this host's.
    pub(crate) fn later(&mut self, id: NodeId, now_ns: u64) {
        let peer = self.peers.entry(id).or_default();
        (peer.attempt, peer.backoff_ns) = (None, 0);
        peer.next_ns = now_ns + SHORTEST_NS / 2;
    }

    pub(crate) fn failed(&mut self, id: NodeId, now_ns: u64, problem: String) {
        let own = self.own;
        let peer = self.peers.entry(id).or_default();
        let courtesy_ns = if own < id { 0 } else { COURTESY_NS };
        peer.attempt = None;
        peer.problem = Some(problem);
        peer.next_ns = now_ns + peer.backoff_ns.max(SHORTEST_NS) + courtesy_ns;
    }

    /// Takes note of a hello whose cluster and shape were checked. `dialled` is true for the answer
    /// to our own.
    ///
    /// Errors: [`HelloError::DuplicateId`], [`HelloError::Replayed`], [`HelloError::Busy`].
    pub(crate) fn greet(
        &mut self,
        hello: &Hello,
        dialled: bool,
        now_ns: u64,
    ) -> Result<(), HelloError> {
        let (own, id) = (self.own, hello.from);
        let peer = self.peers.entry(id).or_default();
        if peer.instance.is_some_and(|known| known != hello.instance) {
            return Err(HelloError::DuplicateId { id });
        }
        let age = (hello.incarnation, hello.attempt);
        if age <= peer.newest {
            return Err(HelloError::Replayed);
        }
        if !dialled && peer.attempt.is_some() && own < id {
            return Err(HelloError::Busy { id });
        }
        peer.instance = Some(hello.instance);
        peer.newest = age;
        let contact = Contact::decode(&hello.contact);
        peer.contact = Some(contact).filter(|contact| !contact.address.is_empty());
        if !dialled {
            peer.attempt = None;
            // Time for the peer to connect.
            peer.next_ns = now_ns + LONGEST_NS;
            peer.answered_until_ns = now_ns + CONNECT_NS;
        }
        peer.problem = None;
        Ok(())
    }
}

/// What came of dialling, on its way from the dialling thread.
pub(crate) type Outcome = Result<(ConnectInfo, Vec<u8>), crate::transport::TransportError>;

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_paxos::{ClusterId, Position};

    fn hello(from: u16, instance: u64, incarnation: u64, attempt: u64) -> Hello {
        Hello {
            cluster: ClusterId(1),
            from: NodeId(from),
            to: NodeId(2),
            expects: 0,
            instance,
            incarnation,
            attempt,
            slots: 8,
            slot_bytes: 128,
            status: 0,
            beat: None,
            line: 0,
            threads: 0,
            contact: Vec::new(),
        }
    }

    #[test]
    fn an_old_greeting_and_a_second_server_of_one_name_are_refused() {
        let mut peers = Peers::new(NodeId(2), std::iter::empty());
        peers.greet(&hello(1, 7, 10, 3), false, 0).unwrap();
        for (incarnation, attempt) in [(10, 3), (10, 2), (9, 50)] {
            let old = peers.greet(&hello(1, 7, incarnation, attempt), false, 0);
            assert_eq!(old, Err(HelloError::Replayed), "{incarnation}, {attempt}");
        }
        peers.greet(&hello(1, 7, 10, 4), false, 0).unwrap();
        peers.greet(&hello(1, 7, 11, 1), false, 0).unwrap();
        let second = peers.greet(&hello(1, 8, 12, 1), false, 0);
        assert_eq!(second, Err(HelloError::DuplicateId { id: NodeId(1) }));
        let mut later = Peers::new(NodeId(2), [(NodeId(1), 7)].into_iter());
        let second = later.greet(&hello(1, 8, 1, 1), false, 0);
        assert_eq!(second, Err(HelloError::DuplicateId { id: NodeId(1) }), "of an earlier run");
        later.greet(&hello(1, 7, 12, 1), false, 0).unwrap();
        later.forget(NodeId(1));
        later.greet(&hello(1, 8, 1, 1), false, 0).unwrap();
    }

    #[test]
    fn a_server_that_dialled_is_awaited_for_as_long_as_it_tries() {
        let mut peers = Peers::new(NodeId(2), std::iter::empty());
        assert!(!peers.is_awaited(NodeId(1), 7));
        peers.greet(&hello(1, 7, 10, 3), false, 7).unwrap();
        assert!(peers.is_awaited(NodeId(1), 6 + CONNECT_NS));
        assert!(
            !peers.is_awaited(NodeId(1), 7 + CONNECT_NS),
            "a stranger that never connects goes"
        );
    }

    #[test]
    fn attempts_back_off_and_the_lower_id_goes_first() {
        let contact = |at: &str| Contact { address: at.to_owned(), ..Contact::default() };
        let members = [1, 2, 3].map(|id| (NodeId(id), contact("here").encode().unwrap()));
        let configuration = Configuration::at(Position::NONE, members.to_vec());
        let mut peers = Peers::new(NodeId(2), std::iter::empty());
        let first: Vec<_> =
            peers.due(1, &configuration, None, |_| false).iter().map(|dial| dial.peer.0).collect();
        assert_eq!(first, [3], "the first one waits for member 1 to dial");
        let later = peers.due(COURTESY_NS + 1, &configuration, None, |_| false);
        assert_eq!(later.iter().map(|dial| dial.peer.0).collect::<Vec<_>>(), [1]);
        let mut pauses = Vec::new();
        let (mut now_ns, mut last_ns) = (COURTESY_NS + 1, 0);
        while pauses.len() < 8 {
            now_ns += 1_000_000;
            peers.failed(NodeId(3), now_ns, "no".to_owned());
            while peers.due(now_ns, &configuration, None, |id| id == NodeId(1)).is_empty() {
                now_ns += 1_000_000;
            }
            pauses.push(now_ns - last_ns);
            last_ns = now_ns;
        }
        assert!(pauses[1..].is_sorted() && pauses[7] >= LONGEST_NS, "{pauses:?}");
        // Nobody is dialled who is connected.
        assert!(peers.due(now_ns * 2, &configuration, None, |_| true).is_empty());
    }
}
