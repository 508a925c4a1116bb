//! A member that shares its thread with others: completions that are given to it, and the beats of the
//! threads that its peers run on.

use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{
    Access, ConnectInfo, FabricError, QueuePair, QueuePairOptions, RemoteKey, WorkCompletion,
};
use beeline_os::memory::{MemoryObject, load_u64};
use beeline_paxos::{Command, Event, NodeId, Options, Start, Status};

use super::{Durability, Member, MemberMemory, TRANSPORT_TIMEOUT};
use crate::error::LogError;
use crate::line::{LINE_BYTES, LINE_DEPTHS, LineNews, Lines, Reader, Sought};
use crate::link::{Control, Link, Way};
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

    /// Its thread's lines, where it shares one.
    pub(crate) fn lines(&self) -> Option<&Lines> {
        self.shared.as_ref().map(|(shared, _)| &shared.lines)
    }

    /// Makes a line, `id`, that is not connected.
    ///
    /// Errors: [`LogError::Fabric`], [`LogError::Post`].
    pub(crate) fn make_line(&self, id: u64) -> Result<ConnectInfo, LogError> {
        let memory = self.device.allocate_memory(LINE_BYTES)?;
        let region = self.domain.register(memory, Access::LOCAL_WRITE)?;
        let limit = self.device.attributes().max_queue_depth;
        let options = QueuePairOptions {
            send_depth: LINE_DEPTHS.0.min(limit),
            receive_depth: LINE_DEPTHS.1.min(limit),
            transport_timeout: TRANSPORT_TIMEOUT,
            ..QueuePairOptions::default()
        };
        let qp = self.domain.create_queue_pair(&self.queue, &self.queue, None, options)?;
        let Some(lines) = self.lines() else { return Ok(qp.connect_info()) };
        lines.add(id, qp, region)
    }

    /// The key of the own status words.
    pub(crate) fn status_key(&self) -> RemoteKey {
        self.status_region.remote_key()
    }

    /// Reaches `peer` through line `id` from now on. The key of the own status words.
    pub(crate) fn listen_on(&mut self, peer: NodeId, id: u64) -> RemoteKey {
        if let Some((shared, member)) = &self.shared {
            let (lines, member) = (shared.lines.clone(), *member);
            lines.use_line(id, member);
            self.replace_control(peer, Way::Line { lines, id, member });
        }
        self.status_region.remote_key()
    }

    /// What came over a line; the next poll takes it.
    pub(crate) fn give_line_news(&mut self, news: LineNews) {
        self.line_news.push_back(news);
    }

    /// Takes what came over lines; how much that was.
    pub(super) fn take_line_news(&mut self, upward: &mut Vec<Command>) -> Result<usize, LogError> {
        let count = self.line_news.len();
        for _ in 0..count {
            match self.line_news.pop_front() {
                Some(LineNews::Frame { line, frame }) => {
                    let is_of = |control: &Control| control.is_of_line(line);
                    let of = |link: &Link| {
                        link.peer == frame.from && link.control.as_ref().is_some_and(is_of)
                    };
                    if let Some(index) = self.links.iter().position(of) {
                        self.on_frame(index, frame, upward)?;
                    }
                }
                Some(LineNews::Read { reader: Reader { peer, sought, .. }, words }) => {
                    self.on_line_read(peer, sought, words, upward)?;
                }
                // It shows that it is not ready.
                Some(LineNews::Broken { .. }) | None => {}
            }
        }
        Ok(count)
    }

    fn on_line_read(
        &mut self,
        peer: NodeId,
        sought: Sought,
        words: Option<[u64; 2]>,
        upward: &mut Vec<Command>,
    ) -> Result<(), LogError> {
        if sought == Sought::Beat {
            self.beats.push((peer, words.map(|[beats, _]| beats)));
            return Ok(());
        }
        let control = self.link(peer).control.as_mut();
        // Else of a connection before: it was told then that no answer comes.
        if let Some(control) = control.filter(|control| control.reading > 0) {
            control.reading -= 1;
            let status = words.map(Status::from_words);
            self.event(Event::StatusRead { peer, status }, upward)?;
        }
        Ok(())
    }

    /// Whether the queue pair is there still.
    pub(crate) fn has_queue_pair(&self, qp_num: u32) -> bool {
        let of = |qp: &dyn QueuePair| qp.qp_num() == qp_num;
        self.held.as_ref().is_some_and(|qp| of(qp.as_ref()))
            || self.incoming.as_ref().is_some_and(|incoming| of(incoming.qp.as_ref()))
            || self.links.iter().any(|link| {
                let Link { control, offered, data, outgoing, asking, answering, .. } = link;
                control.as_ref().is_some_and(|control| control.has_queue_pair(qp_num))
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
        control.is_some_and(|control| control.is_ready() && control.read_beat())
    }

    /// Beats that were read since the last call; nothing for one that could not be.
    pub(crate) fn beats(&mut self) -> impl Iterator<Item = (NodeId, Option<u64>)> {
        std::mem::take(&mut self.beats).into_iter()
    }

    pub(super) fn on_beat(&mut self, index: usize, succeeded: bool) {
        let link = &mut self.links[index];
        let Some(own) = link.control.as_mut().and_then(Control::own) else { return };
        let memory = own.region.memory().as_ref();
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
            || self.uses_received
            || !self.given.is_empty()
            || !self.line_news.is_empty()
            || self.links.iter().any(asks)
    }
}
