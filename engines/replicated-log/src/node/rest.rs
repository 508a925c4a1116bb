//! Resting on a thread that members share: when a leader does, what wakes it, and what it needs meanwhile.
//!
//! A leader that was asked for nothing for a while, and has no errand, rests; its followers see that and
//! rest as well ([`beeline_paxos::Replica::rest`]). From then on the thread turns neither for the time. It
//! does for requests, messages, and connections that break; and it watches over the thread that the
//! leader runs on ([`crate::host`]).
//!
//! Before it rests, a leader hands over to the member that its cluster's number names, so that the hosts of
//! many clusters lead equally many of them, whichever host was there first.

use beeline_fabric::WorkCompletion;
use beeline_paxos::{ClusterId, Event, NodeId, RoleName};

use super::{Node, NodeError};
use crate::error::LogError;
use crate::line::LineNews;
use crate::machine::StateMachine;
use crate::shared::Beat;

/// A member that is not connected for so long, while nothing else happens, is not waited for.
const AWAY_NS: u64 = 5_000_000_000;

/// The member that leads a cluster which rests: a third of a host's clusters each, where they have three. The
/// golden ratio spreads neighbouring numbers, and those of one thread, which are some numbers apart.
fn rightful(cluster: ClusterId, members: &[NodeId]) -> Option<NodeId> {
    let mixed = cluster.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let index = mixed.checked_rem(members.len() as u64)?;
    members.get(index as usize).copied()
}

impl<S: StateMachine> Node<S> {
    /// A replica that rests is told the time before anything else. True if it rests.
    pub(super) fn tell_the_time(&mut self, now_ns: u64) -> Result<bool, NodeError> {
        let rests = self.member.replica().is_resting();
        if rests {
            self.member.tell_the_time(now_ns)?;
        }
        Ok(rests)
    }

    /// A peer is connected anew.
    pub(super) fn wake(&mut self, now_ns: u64) -> Result<(), LogError> {
        self.active_ns = now_ns;
        let mut upward = std::mem::take(&mut self.upward);
        let woken = self.member.event(Event::Wake, &mut upward);
        self.upward = upward;
        woken
    }

    /// For a member that rested before this turn: a connection to its leader, or of a leader, that broke
    /// wakes it, and once it is awake that counts as activity. Any other connection that broke is made
    /// anew before the member rests on: the next election may need it. True if it woke.
    pub(super) fn look_at_connections(&mut self, now_ns: u64) -> Result<bool, NodeError> {
        let (member, replica) = (&self.member, self.member.replica());
        if replica.is_resting() {
            let is_there = |id: &NodeId| member.is_connected(*id);
            let follows = replica.leader().filter(|leader| *leader != replica.id());
            let broke = !self.connected.iter().all(is_there);
            if follows.map_or(!broke, |leader| is_there(&leader)) {
                if broke {
                    self.active_ns = now_ns;
                }
                return Ok(false);
            }
            self.wake(now_ns)?;
        }
        self.active_ns = now_ns;
        Ok(true)
    }

    /// Whether every other member is connected, or has been away for so long that it is not waited for.
    fn has_connections(&self, now_ns: u64) -> bool {
        let (member, replica) = (&self.member, self.member.replica());
        let mut members = replica.configuration().members().iter().copied();
        now_ns.saturating_sub(self.active_ns) >= AWAY_NS
            || members.all(|id| id == replica.id() || member.is_connected(id))
    }

    /// The member that this leader hands over to before it rests: once in a leadership, whatever comes of it.
    fn heir(&self) -> Option<NodeId> {
        let replica = self.member.replica();
        let heir = rightful(self.home.cluster(), replica.configuration().members())?;
        let is_new = self.handed_over != Some(replica.term());
        (is_new && heir != replica.id() && self.member.is_connected(heir)).then_some(heir)
    }

    /// Rests, if there is nothing to do.
    pub(super) fn try_to_rest(&mut self, now_ns: u64) -> Result<(), LogError> {
        let Some(seat) = &self.seat else { return Ok(()) };
        let quiet_ns = now_ns.saturating_sub(self.active_ns);
        let (member, replica) = (&self.member, self.member.replica());
        let own = replica.id();
        self.connected.clear();
        let others = replica.configuration().members().iter().filter(|id| **id != own);
        self.connected.extend(others.filter(|id| member.is_connected(**id)));
        let watched = self.connected.iter().all(|id| member.beat_of(*id).is_some());
        if replica.role() == RoleName::Leader
            && quiet_ns >= seat.rest_ns
            && self.has_connections(now_ns)
            && watched
            && !self.has_errands()
        {
            if let Some(to) = self.heir() {
                if !replica.may_campaign() {
                    return Ok(());
                }
                self.handed_over = Some(replica.term());
                tracing::debug!(id = %own, %to, "nothing to do: the leader hands over before it rests");
                let mut upward = std::mem::take(&mut self.upward);
                let begun = self.member.event(Event::Transfer { to }, &mut upward);
                self.upward = upward;
                return begun;
            }
            if self.member.rest() {
                tracing::debug!(id = %own, "nothing to do: the log rests");
            }
        }
        Ok(())
    }

    fn has_errands(&self) -> bool {
        !self.queue.is_empty()
            || !self.batched.is_empty()
            || !self.pending.is_empty()
            || !self.reads.is_empty()
            || !self.forwarded.is_empty()
            || !self.changes.is_empty()
            || !self.transfers.is_empty()
            || self.writing.is_some()
            || self.snapshot_due
            || !self.snapshot_waiters.is_empty()
            || !self.wanting.is_empty()
            || self.held.is_some()
            || self.member.has_errands()
    }

    /// When it is to be turned next, if nothing happens before: after `pause_ns` where nothing is to be done
    /// sooner. `None`: it rests.
    pub(crate) fn due_ns(&self, now_ns: u64, pause_ns: u64) -> Option<u64> {
        let rests = self.member.replica().is_resting();
        let rests = rests && !self.has_errands() && self.has_connections(now_ns);
        let pause_ns = self.paused_ns(now_ns).unwrap_or(pause_ns);
        (!rests).then(|| now_ns.saturating_add(pause_ns))
    }

    /// [`beeline_paxos::Replica::let_campaign`].
    pub(crate) fn let_campaign(&mut self, may: bool) {
        self.member.let_campaign(may);
    }

    /// [`beeline_paxos::Replica::is_campaigning`].
    pub(crate) fn is_campaigning(&self) -> bool {
        self.member.replica().is_campaigning()
    }

    /// Where it follows a leader that rests: the thread that one runs on, and that leader.
    pub(crate) fn relies_on(&self) -> Option<(Beat, NodeId)> {
        let replica = self.member.replica();
        let leader = replica.leader().filter(|leader| *leader != replica.id());
        let leader = leader.filter(|_| replica.is_resting())?;
        Some((self.member.beat_of(leader)?, leader))
    }

    /// The thread that `peer` runs on showed no sign of life.
    pub(crate) fn silent(&mut self, peer: NodeId, now_ns: u64) -> Result<(), NodeError> {
        self.tell_the_time(now_ns)?;
        self.active_ns = now_ns;
        let mut upward = std::mem::take(&mut self.upward);
        let told = self.member.event(Event::Silent { peer }, &mut upward);
        self.upward = upward;
        Ok(told?)
    }

    pub(crate) fn cluster(&self) -> ClusterId {
        self.home.cluster()
    }

    pub(crate) fn give_line_news(&mut self, news: LineNews) {
        self.member.give_line_news(news);
    }

    pub(crate) fn give(&mut self, completion: WorkCompletion) {
        self.member.give(completion);
    }

    pub(crate) fn has_queue_pair(&self, qp_num: u32) -> bool {
        self.member.has_queue_pair(qp_num)
    }

    pub(crate) fn read_beat(&mut self, peer: NodeId) -> bool {
        self.member.read_beat(peer)
    }

    pub(crate) fn beats(&mut self) -> Vec<(NodeId, Option<u64>)> {
        self.member.beats().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_members_of_many_clusters_lead_equally_many_of_them_on_every_thread() {
        let members = [1, 2, 3].map(NodeId);
        for threads in 1..=4 {
            for thread in 0..threads {
                let clusters = (0..300).map(|number| ClusterId(thread + threads * number));
                let mut led = [0; 3];
                clusters.filter_map(|cluster| rightful(cluster, &members)).for_each(|id| {
                    led[usize::from(id.0) - 1] += 1;
                });
                assert!(led.iter().all(|led| (80..=120).contains(led)), "{threads}: {led:?}");
            }
        }
        assert_eq!(rightful(ClusterId(7), &[]), None);
    }
}
