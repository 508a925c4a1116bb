//! Members that join, leave and take over.

use beeline_paxos::{Change, Event};

use super::{Node, NodeError, PendingChange};
use crate::contact::Contact;
use crate::handle::Refusal;
use crate::machine::StateMachine;

/// A server that shall join and is reached gets so much longer to take in the data.
const LEARNING_NS: u64 = 3_600_000_000_000;

impl<S: StateMachine> Node<S> {
    /// Whether the membership is already as the change wants it.
    pub(super) fn is_changed(&self, pending: &PendingChange) -> bool {
        let configuration = self.member.replica().configuration();
        match pending.change {
            Change::Join(id) => {
                configuration.contains(id) && configuration.contact(id) == pending.contact
            }
            Change::Leave(id) => !configuration.contains(id),
        }
    }

    /// Whether a server that shall join is being brought up to date, which may take its time.
    fn learns(&self, pending: &PendingChange, now_ns: u64) -> bool {
        let Change::Join(id) = pending.change else { return false };
        let waited_ns = now_ns.saturating_sub(pending.until_ns);
        pending.proposed && self.member.is_connected(id) && waited_ns < LEARNING_NS
    }

    /// A server that did not come is not replicated to any more, and forgotten: the next one of its
    /// name may come from another directory.
    fn give_up(&mut self, change: Change) -> Result<(), NodeError> {
        let Change::Join(id) = change else { return Ok(()) };
        let replica = self.member.replica();
        if replica.configuration().contains(id) {
            return Ok(());
        }
        if replica.leader() != Some(replica.id()) {
            // The next leader may let it join all the same: connected peers stay known.
            if !self.member.is_connected(id) {
                self.peers.forget(id);
            }
            return Ok(());
        }
        self.peers.forget(id);
        let mut upward = std::mem::take(&mut self.upward);
        let event = Event::ChangeMembers { change: Change::Leave(id), contact: &[] };
        self.member.event(event, &mut upward)?;
        self.upward = upward;
        Ok(())
    }

    /// A change that waits behind another for too long is told so, and one that takes back the join
    /// at the front ends it: a server that is reached and never up to date would hold everything
    /// behind it up for as long as it may learn.
    fn look_at_queued(&mut self, now_ns: u64) -> Result<(), NodeError> {
        let Some(front) = self.changes.front() else { return Ok(()) };
        let joins = match front.change {
            Change::Join(id) if !self.is_changed(front) => Some(id),
            _ => None,
        };
        let takes_back =
            |pending: &PendingChange| joins.is_some_and(|id| pending.change == Change::Leave(id));
        if self.changes.iter().skip(1).any(takes_back)
            && let Some(front) = self.changes.pop_front()
        {
            self.give_up(front.change)?;
            let reason = "the server that shall join was told to leave";
            (front.done)(Err(Refusal::Membership { reason }));
        }
        let is_late = |pending: &PendingChange| now_ns >= pending.until_ns && !pending.proposed;
        let mut index = 1;
        while index < self.changes.len() {
            if !self.changes.get(index).is_some_and(is_late) {
                index += 1;
            } else if let Some(late) = self.changes.remove(index) {
                (late.done)(Err(Refusal::TimedOut));
            }
        }
        Ok(())
    }

    pub(super) fn drive_changes(&mut self, now_ns: u64) -> Result<(), NodeError> {
        self.look_at_queued(now_ns)?;
        while let Some(front) = self.changes.front() {
            let replica = self.member.replica();
            let (leads, can) = (replica.leader() == Some(replica.id()), replica.can_change());
            let position = replica.configuration().position();
            let possible = replica.configuration().propose(front.change, &front.contact).is_some();
            let verdict = if self.is_changed(front) && !(leads && front.proposed && !can) {
                Some(Ok(position))
            } else if !leads && front.proposed {
                Some(Err(Refusal::Lost))
            } else if !leads {
                Some(Err(self.not_leader()))
            } else if now_ns >= front.until_ns && !self.learns(front, now_ns) {
                Some(Err(Refusal::TimedOut))
            } else if !front.proposed && can && !possible {
                let reason = "there would be nobody left, or more than eleven members";
                Some(Err(Refusal::Membership { reason }))
            } else {
                None
            };
            if let Some(verdict) = verdict {
                self.tell_status();
                if let Some(pending) = self.changes.pop_front() {
                    if matches!((pending.change, &verdict), (Change::Join(_), Err(_))) {
                        self.give_up(pending.change)?;
                    }
                    (pending.done)(verdict);
                }
                continue;
            }
            if can {
                let (change, contact) = (front.change, front.contact.clone());
                if let Some(front) = self.changes.front_mut() {
                    front.proposed = true;
                }
                let mut upward = std::mem::take(&mut self.upward);
                let event = Event::ChangeMembers { change, contact: &contact };
                self.member.event(event, &mut upward)?;
                self.upward = upward;
            }
            break;
        }
        Ok(())
    }

    pub(super) fn drive_transfers(&mut self, now_ns: u64) -> Result<(), NodeError> {
        if self.transfers.is_empty() {
            return Ok(());
        }
        self.tell_status();
        let replica = self.member.replica();
        let (leader, own) = (replica.leader(), replica.id());
        let mut begin = None;
        let mut waiting = Vec::new();
        for mut transfer in self.transfers.drain(..) {
            let to = transfer.to;
            let verdict = if leader == Some(to) {
                Some(Ok(()))
            } else if !replica.configuration().contains(to) {
                let reason = "the successor is no member";
                Some(Err(Refusal::Membership { reason }))
            } else if now_ns >= transfer.until_ns {
                Some(Err(Refusal::TimedOut))
            } else if transfer.begun && leader == Some(own) && !self.member.is_connected(to) {
                let reason = "the successor is no longer connected";
                Some(Err(Refusal::Membership { reason }))
            } else if leader != Some(own) && (!transfer.begun || leader.is_some()) {
                let contact = |id| (id, Contact::decode(replica.configuration().contact(id)));
                Some(Err(Refusal::NotLeader { leader: leader.map(contact) }))
            } else {
                None
            };
            match verdict {
                Some(verdict) => (transfer.done)(verdict),
                None => {
                    if replica.can_change() && begin.is_none() {
                        transfer.begun = true;
                        begin = Some(to);
                    }
                    waiting.push(transfer);
                }
            }
        }
        self.transfers = waiting;
        if let Some(to) = begin {
            let mut upward = std::mem::take(&mut self.upward);
            self.member.event(Event::Transfer { to }, &mut upward)?;
            self.upward = upward;
        }
        Ok(())
    }
}
