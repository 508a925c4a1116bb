//! Access to logs: asking for it, giving it, and the queue pairs through which it is used.
//!
//! ```text
//!  asker                                    owner of the log
//!   offer a queue pair ── RequestVote, Follow ──▶ newest request of this peer
//!                                                 promise: fence, a queue pair of its own
//!   connect it         ◀── Vote, Following ─────  connect it to the offered one
//! ```
//!
//! A request comes again until it is answered, and an owner that stood still finds many of them. It answers
//! the newest one alone: each promise undoes the one before, and takes the log's memory to a new backing.
//! The asker offers the same queue pair again and again for as long as an answer may take, and longer each
//! time: where owners answer thousands of requests one after the other, one that were given up while its answer is
//! on its way would be answered in vain, and so would the next.

use std::collections::VecDeque;

use beeline_fabric::{Access, ConnectInfo, QueuePairState, Role};
use beeline_paxos::{AccessKey, Command, Event, Message, NodeId};

use super::Member;
use crate::error::{LogError, advice};
use crate::frame::Content;
use crate::link::{Answered, Data, Link, Offered};

/// An answer to a request for access is waited for so long at first, and at most, nanoseconds; then another
/// queue pair is offered.
const ANSWER_NS: u64 = 2_000_000_000;
const LONGEST_ANSWER_NS: u64 = 16_000_000_000;

impl Offered {
    /// Whether `message` asks for the same.
    fn asks_for(&self, message: &Message) -> bool {
        match (&self.request, message) {
            (Message::RequestVote { term, .. }, Message::RequestVote { term: again, .. })
            | (Message::Follow { term }, Message::Follow { term: again }) => term == again,
            _ => false,
        }
    }

    /// Whether `message` asks for the same, and an answer may still come.
    fn is_for(&self, message: &Message, now_ns: u64) -> bool {
        self.asks_for(message) && now_ns < self.until_ns && self.qp.state() != QueuePairState::Error
    }
}

impl Link {
    /// The peer gives access. The protocol is told once the queue pair is connected.
    pub(super) fn on_grant(
        &mut self,
        (attempt, info): (u32, Vec<u8>),
        (key, message): (AccessKey, Message),
        now_ns: u64,
    ) {
        let offered = self.offered.as_mut();
        let wanted = |offered: &&mut Offered| offered.attempt == attempt && offered.grant.is_none();
        let Some(offered) = offered.filter(wanted) else { return };
        if offered.qp.connect(&ConnectInfo(info), Role::Active).is_ok() {
            offered.grant = Some((key, Event::Message { from: self.peer, message }));
            offered.until_ns = now_ns.saturating_add(self.answer_ns);
        }
    }
}

impl Member {
    /// Messages may be lost, so one that cannot be sent is.
    pub(super) fn send(&mut self, to: NodeId, message: Message) {
        let (mut attempt, mut info) = (0, Vec::new());
        let mut told = None;
        match message {
            Message::RequestVote { .. } | Message::Follow { .. } => {
                let now_ns = self.ticked_ns.unwrap_or_default();
                let offered = self.link(to).offered.as_ref();
                if let Some(offered) = offered.filter(|offered| offered.is_for(&message, now_ns)) {
                    (attempt, info) = (offered.attempt, offered.qp.connect_info().0);
                } else {
                    let Some(qp) = self.data_queue_pair_or_none() else { return };
                    self.attempt = self.attempt.wrapping_add(1);
                    (attempt, info) = (self.attempt, qp.connect_info().0);
                    let link = self.link(to);
                    // The answer to one that is given up because its time is over may be on its way.
                    let is_late = |offered: Offered| {
                        offered.asks_for(&message) && offered.qp.state() != QueuePairState::Error
                    };
                    let late = link.offered.take().is_some_and(is_late);
                    let longer_ns = LONGEST_ANSWER_NS.min(2 * link.answer_ns);
                    link.answer_ns = if late { longer_ns } else { ANSWER_NS };
                    let until_ns = now_ns.saturating_add(link.answer_ns);
                    let (request, grant) = (message, None);
                    link.offered = Some(Offered { attempt, request, until_ns, qp, grant });
                }
            }
            Message::Vote { grant, .. } | Message::Following { grant, .. } => {
                told = Some(grant.key);
                let Some((asked, peer)) = self.link(to).asked.take() else { return };
                let Some(mut qp) = self.data_queue_pair_or_none() else { return };
                attempt = asked;
                info = qp.connect_info().0;
                if qp.connect(&ConnectInfo(peer), Role::Passive).is_err() {
                    return;
                }
                self.held = Some(qp);
            }
            _ => {}
        }
        self.send_frame(to, attempt, Content::Protocol(message), info);
        if let Some(key) = told {
            // What was sent last is what `send_frame` left.
            let frame = self.bytes.clone();
            self.link(to).answered = Some(Answered { attempt, key, frame });
        }
    }

    /// Has the protocol answer what peers asked for.
    pub(super) fn take_requests(&mut self, upward: &mut Vec<Command>) -> Result<(), LogError> {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            let Some((attempt, info, message)) = link.request.take() else { continue };
            let key = self.log_region.as_ref().map(|region| region.remote_key().0);
            let holds =
                |answered: &&Answered| answered.attempt == attempt && Some(answered.key.0) == key;
            let answered = link.answered.as_ref().filter(holds);
            if let (Some(answered), Some(control)) = (answered, &mut link.control) {
                // A new promise would undo the one that the asker is about to hear of.
                control.send(&answered.frame);
                continue;
            }
            link.asked = Some((attempt, info));
            let from = link.peer;
            self.event(Event::Message { from, message }, upward)?;
        }
        Ok(())
    }

    pub(super) fn look_at_offers(&mut self, upward: &mut Vec<Command>) -> Result<(), LogError> {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            let Some(offered) = &link.offered else { continue };
            let state = offered.qp.state();
            if offered.grant.is_none() || state == QueuePairState::Init {
                continue;
            }
            let Some(Offered { qp, grant: Some((key, event)), .. }) = link.offered.take() else {
                continue;
            };
            if state != QueuePairState::ReadyToSend {
                continue;
            }
            let slots = self.options.operation_slots * self.start.layout.slot_bytes();
            let memory = self.own_memory(slots as usize + 64);
            let scratch =
                memory.and_then(|memory| self.domain.register(memory, Access::LOCAL_WRITE));
            let scratch = match scratch {
                Ok(scratch) => scratch,
                Err(error) => {
                    // As a connection that broke: the protocol asks for another.
                    let advice = advice(&error);
                    tracing::warn!(%error, "no memory for a log that was given{advice}");
                    continue;
                }
            };
            let data = Data { key, qp, posted: VecDeque::new(), scratch };
            let link = &mut self.links[index];
            let (peer, old) = (link.peer, link.data.replace(data));
            if let Some(old) = old {
                self.event(Event::AccessLost { peer, key: old.key }, upward)?;
            }
            self.event(event, upward)?;
        }
        Ok(())
    }
}
