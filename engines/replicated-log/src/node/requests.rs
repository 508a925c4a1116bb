//! What the rest of the program asks for.

use beeline_paxos::{ClientCommand, Event, ProposeError, RoleName, batch};

use super::{
    CHANGE_NS, FULL_NS, Node, NodeError, PendingChange, PendingTransfer, Queued, Read, Waiter,
};
use crate::contact::Contact;
use crate::handle::{Consistency, Refusal, Request};
use crate::machine::StateMachine;

impl<S: StateMachine> Node<S> {
    pub(super) fn take(&mut self, request: Request, now_ns: u64) -> Result<(), NodeError> {
        if request.is_work() {
            self.active_ns = now_ns;
        }
        match request {
            Request::Propose { session, sequence, bytes, done } => {
                let waiter = Waiter::Command(done);
                self.enqueue(Queued { session, sequence, bytes, waiter });
            }
            Request::OpenSession { done } => {
                let waiter = Waiter::Session(done);
                self.enqueue(Queued { session: 0, sequence: 0, bytes: Vec::new(), waiter });
            }
            Request::Barrier { done } => self.read(Read::Barrier(done))?,
            Request::Query { bytes, consistency: Consistency::Linearizable, done } => {
                self.read(Read::Query(bytes, done))?;
            }
            Request::Query { bytes, consistency: Consistency::Stale, done } => {
                done(self.query(&bytes));
            }
            Request::State { bytes, done } => {
                let reply = self.query(&bytes);
                done(reply.map(|reply| (self.applied, reply)));
            }
            Request::Follow(question) => self.follow(question),
            Request::Change { change, contact, done } => {
                let Some(contact) = contact.encode() else {
                    let reason = "a contact has at most 239 bytes";
                    done(Err(Refusal::Membership { reason }));
                    return Ok(());
                };
                let until_ns = now_ns + CHANGE_NS;
                let proposed = false;
                let pending = PendingChange { change, contact, proposed, until_ns, done };
                self.changes.push_back(pending);
                self.drive_changes(now_ns)?;
            }
            Request::Transfer { to, done } => {
                let until_ns = now_ns + CHANGE_NS / 3;
                self.transfers.push(PendingTransfer { to, begun: false, until_ns, done });
                self.drive_transfers(now_ns)?;
            }
            Request::Snapshot { done } => {
                self.snapshot_waiters.push(done);
                self.snapshot_due = true;
                self.take_snapshot(now_ns);
            }
            Request::Forward { to, command, limit, done } => {
                self.forward((to, command), limit, done, now_ns);
            }
            Request::Forwarded { to, epoch, item } => self.member.answer(to, epoch, item),
            Request::Accept { info, hello, reply } => {
                let answer = self.accept(&info, &hello, now_ns);
                if let Err(error) = &answer {
                    self.counters.refused_greetings += 1;
                    tracing::debug!(%error, "a greeting was refused");
                }
                reply(answer.map_err(|error| error.to_string()));
            }
            Request::Dialled { peer, attempt, outcome } => {
                self.dialled(peer, attempt, outcome, now_ns);
            }
            Request::SnapshotWritten { position, outcome } => {
                self.snapshot_written(position, outcome, now_ns)?;
            }
            Request::Installed { from } => self.installed(from, now_ns)?,
            Request::Stop => self.stopping = true,
        }
        Ok(())
    }

    pub(super) fn not_leader(&self) -> Refusal {
        let replica = self.member.replica();
        let own = replica.id();
        let leader = replica.leader().filter(|leader| *leader != own);
        let contact = |id| (id, Contact::decode(replica.configuration().contact(id)));
        Refusal::NotLeader { leader: leader.map(contact) }
    }

    pub(super) fn enqueue(&mut self, queued: Queued) {
        let Queued { session, sequence, bytes, .. } = &queued;
        let command = ClientCommand { session: *session, sequence: *sequence, bytes };
        let bytes = batch::encoded_bytes(&command);
        let limit = self.batch_limit;
        let leads = matches!(self.role(), RoleName::Leader | RoleName::Recovering);
        if bytes > limit {
            queued.waiter.refuse(Refusal::TooLarge { bytes, limit });
        } else if !leads {
            queued.waiter.refuse(self.not_leader());
        } else if self.queue.len() >= self.queue_limit {
            queued.waiter.refuse(Refusal::Full);
        } else {
            self.queue.push_back(queued);
        }
    }

    /// Fills entries with what waits, and proposes them while there is room. True if there was
    /// one.
    pub(super) fn propose_queued(&mut self, now_ns: u64) -> Result<bool, NodeError> {
        let mut proposed = false;
        loop {
            if self.pace.holds(now_ns) {
                return Ok(proposed);
            }
            while let Some(queued) = self.queue.pop_front() {
                let Queued { session, sequence, bytes, .. } = &queued;
                let command = ClientCommand { session: *session, sequence: *sequence, bytes };
                if self.batch.push(&command) {
                    self.batched.push(queued.waiter);
                } else {
                    self.queue.push_front(queued);
                    break;
                }
            }
            if self.batched.is_empty() {
                return Ok(proposed);
            }
            let mut upward = std::mem::take(&mut self.upward);
            let position = self.member.propose(self.batch.payload(), &mut upward)?;
            match position {
                Ok(position) => {
                    proposed = true;
                    self.full_ns = None;
                    self.pace.proposed(position, now_ns);
                    self.counters.proposed += self.batched.len() as u64;
                    self.counters.entries += 1;
                    self.batch.clear();
                    self.pending.push_back((position, std::mem::take(&mut self.batched)));
                    // A cluster of one has committed it by now.
                    self.upward = upward;
                }
                Err(error) => {
                    self.upward = upward;
                    match error {
                        ProposeError::Full => self.wait_for_room(now_ns),
                        ProposeError::NotNow => {}
                        _ => self.refuse_queued(),
                    }
                    return Ok(proposed);
                }
            }
        }
    }

    /// Nothing could be proposed. A window has room again with the next commits, a ring with the
    /// next snapshot; where snapshots fail, whoever waits hears of it.
    fn wait_for_room(&mut self, now_ns: u64) {
        let slots = self.home.layout().slots();
        let next = self.member.replica().last().next();
        let Some(reason) = &self.snapshot_problem else { return };
        if next.since(self.snapshot) <= slots {
            return;
        }
        let since_ns = *self.full_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(since_ns) >= FULL_NS {
            let refusal = Refusal::LogFull { reason: reason.clone() };
            self.refuse_all(&refusal);
        }
    }

    /// Whoever waits for an entry hears that somebody else leads.
    pub(super) fn refuse_queued(&mut self) {
        let refusal = self.not_leader();
        self.refuse_all(&refusal);
    }

    fn refuse_all(&mut self, refusal: &Refusal) {
        self.batch.clear();
        for waiter in self.batched.drain(..) {
            waiter.refuse(refusal.clone());
        }
        for queued in self.queue.drain(..) {
            queued.waiter.refuse(refusal.clone());
        }
    }

    pub(super) fn read(&mut self, read: Read) -> Result<(), NodeError> {
        let id = self.next_read;
        self.next_read += 1;
        self.reads.insert(id, read);
        let mut upward = std::mem::take(&mut self.upward);
        self.member.event(Event::Read { id }, &mut upward)?;
        self.upward = upward;
        Ok(())
    }
}
