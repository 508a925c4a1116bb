//! A member that shares its thread with others: completions that are given to it, and the beats of the
//! threads that its peers run on.

use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{FabricError, QueuePair, QueuePairOptions, WorkCompletion};
use beeline_os::memory::{MemoryObject, load_u64};
use beeline_paxos::{Event, NodeId, Options, Start};

use super::{Durability, Member, MemberMemory};
use crate::error::LogError;
use crate::link::{Control, Link};
use crate::shared::{Beat, Shared};

impl Member {
    /// [`Member::open`] on a thread that others share; `name` is this member's among them.
    ///
    /// Errors: as [`Member::open`].
    pub(crate) fn open_on(
        start: Start,
        options: Options,
        durability: Durability,
        memory: MemberMemory,
        (shared, name): (Shared, u64),
    ) -> Result<Self, LogError> {
        let (domain, queue) = (Arc::clone(&shared.domain), Rc::clone(&shared.queue));
        let device = Arc::clone(&shared.device);
        let mut member =
            Self::open_with(start, options, durability, memory, (device, domain, queue))?;
        member.shared = Some((shared, name));
        Ok(member)
    }

    /// A queue pair whose completions come to this member.
    pub(super) fn create_queue_pair(
        &self,
        options: QueuePairOptions,
    ) -> Result<Box<dyn QueuePair>, LogError> {
        let qp = self.domain.create_queue_pair(&self.queue, &self.queue, None, options)?;
        if let Some((shared, name)) = &self.shared {
            shared.own(qp.as_ref(), *name);
        }
        Ok(qp)
    }

    /// Memory for what peers send, and for what is read from them.
    ///
    /// Errors: the fabric's.
    pub(super) fn own_memory(&self, length: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        match &self.shared {
            Some((shared, _)) => shared.own_memory(length),
            None => self.device.allocate_memory(length),
        }
    }

    /// A completion of one of its queue pairs; the next poll takes it.
    pub(crate) fn give(&mut self, completion: WorkCompletion) {
        self.given.push_back(completion);
    }

    /// Whether the queue pair is there still.
    pub(crate) fn has_queue_pair(&self, qp_num: u32) -> bool {
        let of = |qp: &dyn QueuePair| qp.qp_num() == qp_num;
        self.held.as_ref().is_some_and(|qp| of(qp.as_ref()))
            || self.incoming.as_ref().is_some_and(|incoming| of(incoming.qp.as_ref()))
            || self.links.iter().any(|link| {
                let Link { control, offered, data, outgoing, asking, answering, .. } = link;
                control.as_ref().is_some_and(|control| of(control.qp.as_ref()))
                    || data.as_ref().is_some_and(|data| of(data.qp.as_ref()))
                    || offered.as_ref().is_some_and(|offered| of(offered.qp.as_ref()))
                    || outgoing.as_ref().is_some_and(|out| of(out.qp.as_ref()))
                    || asking.as_ref().is_some_and(|asking| of(asking.channel.qp.as_ref()))
                    || answering.as_ref().is_some_and(|answers| of(answers.channel.qp.as_ref()))
            })
    }

    /// Tells the protocol the time, and nothing else: for a replica that rests.
    ///
    /// Errors: as [`Member::poll`].
    pub(crate) fn tell_the_time(&mut self, now_ns: u64) -> Result<(), LogError> {
        self.ticked_ns = Some(now_ns);
        self.event(Event::Tick { now_ns }, &mut Vec::new())
    }

    /// [`beeline_paxos::Replica::rest`]: members without a control connection are away.
    pub(crate) fn rest(&mut self) -> bool {
        let links = &self.links;
        let is_away = |id| {
            let control = links.iter().find(|link| link.peer == id);
            !control.and_then(|link| link.control.as_ref()).is_some_and(Control::is_ready)
        };
        self.replica.rest(is_away)
    }

    /// [`beeline_paxos::Replica::let_campaign`].
    pub(crate) fn let_campaign(&mut self, may: bool) {
        self.replica.let_campaign(may);
    }

    /// Which thread `peer` runs on, where it shares one, and how its beat is read.
    pub(crate) fn watch(&mut self, peer: NodeId, beat: Option<Beat>) {
        if let Some(control) = &mut self.link(peer).control {
            control.beat = beat;
        }
    }

    /// The thread that a connected peer runs on; `None` where that has no beat.
    pub(crate) fn beat_of(&self, peer: NodeId) -> Option<Beat> {
        let link = self.links.iter().find(|link| link.peer == peer)?;
        let control = link.control.as_ref().filter(|control| control.is_ready())?;
        control.beat
    }

    /// Reads the beat of the thread that `peer` runs on; false if that cannot be. What it says is
    /// told by [`Member::beats`].
    pub(crate) fn read_beat(&mut self, peer: NodeId) -> bool {
        let control = self.link(peer).control.as_mut();
        control.is_some_and(|control| control.is_ready() && control.read_beat().is_ok())
    }

    /// Beats that were read since the last call; nothing for one that could not be.
    pub(crate) fn beats(&mut self) -> impl Iterator<Item = (NodeId, Option<u64>)> {
        std::mem::take(&mut self.beats).into_iter()
    }

    pub(super) fn on_beat(&mut self, index: usize, succeeded: bool) {
        let link = &self.links[index];
        let Some(control) = &link.control else { return };
        let memory = control.region.memory().as_ref();
        let beats = succeeded.then(|| load_u64(memory, Control::beat_offset()));
        self.beats.push((link.peer, beats));
    }

    /// Whether something is under way that needs looking at now and then, though the protocol rests.
    pub(crate) fn has_errands(&self) -> bool {
        let now_ns = self.ticked_ns.unwrap_or_default();
        // What is on its way to or from a peer that is gone is none.
        let sends = |link: &Link| {
            link.outgoing.is_some() && link.control.as_ref().is_some_and(Control::is_ready)
        };
        let asks = |link: &Link| link.asking.is_some() || sends(link);
        self.fence_due_ns.is_some()
            || self.incoming.as_ref().is_some_and(|incoming| incoming.is_alive(now_ns))
            || self.received.is_some()
            || !self.given.is_empty()
            || self.links.iter().any(asks)
    }
}
