//! Commands and replies that travel between shards.
//!
//! ```text
//!   here                                       the owner of the key
//!   forward ── collecting ── backlog ──► take_parcels ── execute_parcel
//!   deliver_reply ◄──── mailbox ◄── backlog ◄── executed (once the commit is settled)
//! ```
//!
//! Invariants: what one turn collects for a peer travels in one mailbox slot; what a turn executed
//! for a peer goes back only after the commit that it rests on; a full mailbox loses nothing and blocks
//! nobody: the rest waits in the backlog.

use std::collections::VecDeque;

use beeline_kv::{KEYS_AHEAD, Keyspace, Shard};
use beeline_ring::{Receiver, Sender};

use super::ShardThread;
use crate::connection::{Connection, Hold};
use crate::parcel::{Commands, Heading, Hop, Origin, Parcel};
use crate::stats::count;
use crate::wire::Refusal;

/// Slots of a mailbox between two shards. One a turn is used; more wait in `Peer::backlog`.
pub(crate) const MAILBOX: usize = 256;
/// Returned parcels kept per peer.
const SPARE_HOPS: usize = 8;
/// Replies to another shard made in one turn, bytes; its further commands wait for the next.
const HOP_REPLY_BYTES: usize = 16 << 20;

/// The ways to and from another shard.
#[allow(clippy::vec_box, reason = "parcels travel boxed: a mailbox slot is a pointer")]
#[derive(Debug)]
pub(crate) struct Peer {
    pub sender: Sender<Parcel>,
    pub receiver: Receiver<Parcel>,
    /// Commands collected this turn.
    collecting: Box<Hop>,
    /// Parcels the mailbox had no room for.
    backlog: VecDeque<Parcel>,
    /// Returned parcels, for reuse.
    spare: Vec<Box<Hop>>,
    /// Executed, each with the commit that it waits for; 0: for that of its turn alone.
    pub(super) executed: Vec<(u64, Box<Hop>)>,
    /// Begun in an earlier turn, and the command to go on with.
    unfinished: Option<(Box<Hop>, usize)>,
}

impl Peer {
    pub(crate) fn new(sender: Sender<Parcel>, receiver: Receiver<Parcel>) -> Self {
        Self {
            sender,
            receiver,
            collecting: Box::default(),
            backlog: VecDeque::new(),
            spare: Vec::new(),
            executed: Vec::new(),
            unfinished: None,
        }
    }

    /// True when the next turn has something to send or to go on with.
    pub(super) fn has_work(&self) -> bool {
        !self.backlog.is_empty() || self.unfinished.is_some()
    }

    fn keep(&mut self, mut hop: Box<Hop>) {
        if self.spare.len() < SPARE_HOPS {
            hop.commands.clear();
            hop.replies.clear();
            self.spare.push(hop);
        }
    }

    /// Puts the commands collected so far in line.
    fn close_collection(&mut self) {
        if !self.collecting.commands.is_empty() {
            let next = self.spare.pop().unwrap_or_default();
            let full = std::mem::replace(&mut self.collecting, next);
            self.backlog.push_back(Parcel::Commands(full));
        }
    }

    /// What was executed is not durable: none of it is answered as if it were.
    pub(super) fn refuse_executed(&mut self) {
        for (commit, hop) in &mut self.executed {
            hop.replies.fail();
            *commit = 0;
        }
    }

    /// Sends what was collected, and the replies that wait for no commit after `settled_to`; `true`
    /// when anything went out.
    fn send_all(&mut self, settled_to: u64) -> bool {
        let due = self.executed.extract_if(.., |(commit, _)| *commit <= settled_to);
        self.backlog.extend(due.map(|(_, hop)| Parcel::Replies(hop)));
        self.close_collection();
        let mut sent = false;
        while let Some(parcel) = self.backlog.pop_front() {
            if let Err(parcel) = self.sender.send(parcel) {
                self.backlog.push_front(parcel);
                break;
            }
            sent = true;
        }
        sent
    }
}

impl ShardThread {
    /// Takes what other shards sent; whether any of it was executed.
    pub(super) fn take_parcels(&mut self, shard: &mut Shard) -> bool {
        let mut executed = false;
        for from in 0..self.peers.len() {
            let Some(mut peer) = self.peers[from].take() else { continue };
            // At most a mailbox a turn, so that a flood from one side does not starve sockets.
            for _ in 0..MAILBOX {
                let (mut hop, first) = match peer.unfinished.take() {
                    Some(unfinished) => unfinished,
                    None => match peer.receiver.receive() {
                        None => break,
                        Some(Parcel::Commands(hop)) => (hop, 0),
                        Some(Parcel::Replies(hop)) => {
                            for (origin, reply) in hop.replies.iter() {
                                match reply {
                                    Ok(reply) => self.deliver_reply(origin, reply),
                                    Err(refusal) => self.deliver_refusal(origin, &refusal),
                                }
                            }
                            peer.keep(hop);
                            continue;
                        }
                    },
                };
                executed = true;
                shard.take_rests();
                let next = self.execute_parcel(&mut hop, first, shard);
                let rests = shard.take_rests();
                let commit = if self.lane.is_none() { rests } else { 0 };
                match next {
                    None => peer.executed.push((commit, hop)),
                    Some(next) => {
                        let mut part: Box<Hop> = Box::default();
                        std::mem::swap(&mut part.replies, &mut hop.replies);
                        peer.executed.push((commit, part));
                        peer.unfinished = Some((hop, next));
                        break;
                    }
                }
            }
            self.peers[from] = Some(peer);
        }
        executed
    }

    /// Executes the commands of `hop` from `first` on; returns where to go on in the next turn
    /// when the replies became too large for one.
    pub(super) fn execute_parcel(
        &mut self,
        hop: &mut Hop,
        first: usize,
        shard: &mut Shard,
    ) -> Option<usize> {
        let Hop { commands, replies } = hop;
        let mut next = first;
        self.scratch.set_limit(self.output_limit_bytes);
        // In a member of a cluster only reads come this way. A snapshot says that it replaces the
        // keys before it takes a shard's lock, which is held here.
        let loading = self.shared.is_loading();
        while let Some((heading, args)) = commands.get(next) {
            if replies.bytes.len() >= HOP_REPLY_BYTES {
                break;
            }
            let worker = &mut self.workers[heading.wire];
            if (next - first).is_multiple_of(KEYS_AHEAD) {
                let mut ahead = (next..)
                    .map_while(|index| commands.get(index))
                    .take_while(|(other, _)| other.wire == heading.wire)
                    .map(|(heading, args)| (heading.head, args));
                worker.expect_carried(&mut ahead, &mut Keyspace::single(shard));
            }
            if loading {
                replies.refuse(heading.origin, Refusal::Loading);
                next += 1;
                continue;
            }
            let (keyspace, out) = (&mut Keyspace::single(shard), &mut self.scratch);
            worker.execute_carried(heading.head, args, keyspace, out);
            if self.scratch.is_over_limit() {
                self.scratch.truncate(0);
                replies.refuse(heading.origin, Refusal::ReplyTooLarge);
            } else {
                replies.bytes.extend_from_slice(self.scratch.as_bytes());
                replies.finish(heading.origin);
            }
            self.scratch.clear();
            next += 1;
        }
        count(&self.counters().forwarded_commands, (next - first) as u64);
        commands.get(next).is_some().then_some(next)
    }

    /// Delivers a refusal in the words of the connection's wire.
    pub(super) fn deliver_refusal(&mut self, origin: Origin, refusal: &Refusal<'_>) {
        let mut words = std::mem::take(&mut self.scratch);
        if let Some(connection) = self.connection(origin.slot)
            && connection.generation == origin.generation
        {
            connection.session.refuse(refusal, &mut words);
            self.deliver_reply(origin, words.as_bytes());
        }
        words.clear();
        self.scratch = words;
    }

    pub(super) fn deliver_reply(&mut self, origin: Origin, reply: &[u8]) {
        let pause_bytes = self.output_pause_bytes();
        let Some(connection) = self.connection(origin.slot) else { return };
        if connection.generation != origin.generation {
            return;
        }
        connection.fill(origin, reply, pause_bytes);
        if connection.hold == Hold::Order {
            if connection.is_in_order() {
                connection.hold = Hold::No;
                connection.again = true;
                connection.resume = true;
                self.resume.push_back(origin.slot);
            }
        } else if connection.needs_several {
            // Becomes true once, with the last reply awaited.
            if connection.is_in_order() {
                self.deferred.push_back(origin.slot);
            }
        } else if !connection.resume {
            connection.resume = true;
            self.resume.push_back(origin.slot);
        }
        self.touched.push(origin.slot);
    }

    /// Sends the connection's current request to the shard that owns its key.
    pub(super) fn forward(&mut self, connection: &mut Connection, owner: usize) {
        count(&self.counters().commands, 1);
        let origin = connection.keep_place_at(owner);
        let (head, request) = connection.session.carry();
        let heading = Heading { origin, wire: connection.wire, head };
        let taken = self.peers[owner].as_mut().is_some_and(|peer| {
            peer.collecting.commands.push(heading, request) || {
                // Four gigabytes were collected already.
                peer.close_collection();
                peer.collecting.commands.push(heading, request)
            }
        });
        if !taken {
            connection.session.refuse(&Refusal::TooLargeToCarry, &mut self.scratch);
            let pause_bytes = self.output_pause_bytes();
            connection.fill(origin, self.scratch.as_bytes(), pause_bytes);
            self.scratch.clear();
        }
    }

    /// A commit failed: commands that its connections sent on behind what failed must not take
    /// effect. Those of `failed` connections are taken back, unless they are on their way already.
    pub(super) fn recall(&mut self, failed: impl Fn(&Connection) -> bool) {
        for peer in self.peers.iter_mut().flatten() {
            let mut kept = Commands::default();
            let mut recalled = false;
            for index in 0.. {
                let Some((heading, args)) = peer.collecting.commands.get(index) else { break };
                let connection = self.connections.get(heading.origin.slot as usize);
                let connection = connection.and_then(Option::as_deref);
                let gone = connection.is_none_or(|connection| {
                    connection.generation != heading.origin.generation || failed(connection)
                });
                recalled |= gone;
                if !gone {
                    kept.push(heading, args);
                }
            }
            if recalled {
                peer.collecting.commands = kept;
            }
        }
    }

    pub(super) fn send_parcels(&mut self) {
        let settled_to = self.settled_to;
        for (index, peer) in self.peers.iter_mut().enumerate() {
            if peer.as_mut().is_some_and(|peer| peer.send_all(settled_to)) {
                self.shared.doors[index].nudge();
            }
        }
    }
}
