//! One-sided operations on a follower's log region.
//!
//! What succeeds may have run on memory that its owner has left, where the initiator's processor
//! copies into pages it maps: the owner died, was started again, and moved to another backing. So
//! a READ of the owner's retired word goes behind every flush, and with every confirmation; where
//! the word is not 0 the access is lost ([`Layout::retired_offset`]). Slots that recovery reads need
//! no such look: they are as old as the vote, and what is proposed from them is flushed.

use beeline_fabric::{
    FlushKind, LocalData, MemoryRegion, Operation, PostError, QueuePairState, ScatterGatherEntry,
    WorkRequest,
};
use beeline_os::memory::{copy_out, load_u64};
use beeline_paxos::{AccessKey, Event, Layout, NodeId, Position, layout, slot};

use super::{Durability, Member};
use crate::error::LogError;
use crate::link::{Data, Posted};

impl Member {
    /// What a post came to: a broken connection is a lost access.
    pub(super) fn posted(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        posted: Result<(), PostError>,
    ) -> Result<(), LogError> {
        match posted {
            Ok(()) => Ok(()),
            Err(PostError::NotReady(_) | PostError::QueueFull) => {
                self.lose(peer, key);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Ends a data connection; its outstanding work ends with it.
    pub(super) fn lose(&mut self, peer: NodeId, key: AccessKey) {
        self.link(peer).data.take_if(|data| data.key == key);
        self.events.push_back(Event::AccessLost { peer, key });
    }

    pub(super) fn data(&mut self, peer: NodeId, key: AccessKey) -> Result<&mut Data, PostError> {
        let data = self.link(peer).data.as_mut().filter(|data| data.key == key);
        data.ok_or(PostError::NotReady(QueuePairState::Error))
    }

    pub(super) fn write_flush(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        first: Position,
        last: Position,
    ) -> Result<(), PostError> {
        // Taken and put back: a handle of its own would cost two locked instructions for each follower.
        let Some(region) = self.log_region.take() else {
            return Err(PostError::NotReady(QueuePairState::Error));
        };
        let posted = self.write_flush_from(&region, (peer, key), (first, last));
        self.log_region = Some(region);
        posted
    }

    /// [`Member::write_flush`] from the own log, which is `region`.
    fn write_flush_from(
        &mut self,
        region: &MemoryRegion,
        (peer, key): (NodeId, AccessKey),
        (first, last): (Position, Position),
    ) -> Result<(), PostError> {
        let layout = self.start.layout;
        let kind = match self.durability {
            Durability::Process => FlushKind::Visible,
            Durability::Power => FlushKind::Persistent,
        };
        let marks = self.marks_offset();
        let data = self.data(peer, key)?;
        let mut position = first;
        while position <= last {
            let offset = layout.slot_offset(position);
            let mut header = [0; slot::SLOT_HEADER_BYTES];
            copy_out(region.memory().as_ref(), offset as usize, &mut header);
            let length = slot::length(&header).min(layout.slot_bytes());
            let entries = [ScatterGatherEntry { region, offset, length }];
            let (local, remote) = (LocalData::Gather(&entries), data.remote(offset));
            let write = WorkRequest::unsignalled(0, Operation::Write { local, remote });
            data.qp.post_send(&[write])?;
            position = position.next();
        }
        let [before, after] = ranges(&layout, first, last);
        if before.1 > 0 {
            let (remote, length) = (data.remote(before.0), before.1);
            let flush = Operation::Flush { remote, length, kind };
            data.qp.post_send(&[WorkRequest::unsignalled(0, flush)])?;
        }
        let flush = Operation::Flush { remote: data.remote(after.0), length: after.1, kind };
        let remote = data.remote(layout.retired_offset());
        let local = ScatterGatherEntry { region: &data.scratch, offset: marks + 8, length: 8 };
        let look = Operation::Read { local, remote };
        data.qp.post_send(&[WorkRequest::unsignalled(0, flush), WorkRequest::new(0, look)])?;
        data.posted.push_back(Posted::Flush { last });
        Ok(())
    }

    pub(super) fn write_commit(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        position: Position,
    ) -> Result<(), PostError> {
        let offset = self.start.layout.commit_offset();
        let data = self.data(peer, key)?;
        let word = layout::commit_word(position).to_le_bytes();
        let (local, remote) = (LocalData::Inline(&word), data.remote(offset));
        data.qp.post_send(&[WorkRequest::unsignalled(0, Operation::Write { local, remote })])
    }

    pub(super) fn read_slots(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        first: Position,
        count: u64,
    ) -> Result<(), PostError> {
        let layout = self.start.layout;
        let data = self.data(peer, key)?;
        let last = first.plus(count.saturating_sub(1));
        let mut offset = 0;
        let pieces = ranges(&layout, first, last);
        for (index, (start, length)) in pieces.into_iter().enumerate() {
            if length == 0 {
                continue;
            }
            let local = ScatterGatherEntry { region: &data.scratch, offset, length };
            let read = Operation::Read { local, remote: data.remote(start) };
            let request = WorkRequest { wr_id: 0, operation: read, signalled: index == 1 };
            data.qp.post_send(&[request])?;
            offset += length;
        }
        data.posted.push_back(Posted::Slots { first, count });
        Ok(())
    }

    /// Where in the scratch memory of a connection its peer's commit and retired words arrive.
    fn marks_offset(&self) -> u64 {
        self.options.operation_slots * self.start.layout.slot_bytes()
    }

    /// Whether the owner of the memory behind this connection has left it, as read last.
    pub(super) fn is_retired(&self, data: &Data) -> bool {
        load_u64(data.scratch.memory().as_ref(), self.marks_offset() as usize + 8) != 0
    }

    pub(super) fn confirm(
        &mut self,
        peer: NodeId,
        key: AccessKey,
        round: u64,
    ) -> Result<(), PostError> {
        let offset = self.start.layout.commit_offset();
        let marks = self.marks_offset();
        let data = self.data(peer, key)?;
        // Commit word and retired word.
        let local = ScatterGatherEntry { region: &data.scratch, offset: marks, length: 16 };
        let read = Operation::Read { local, remote: data.remote(offset) };
        data.qp.post_send(&[WorkRequest::new(0, read)])?;
        data.posted.push_back(Posted::Confirm { round });
        Ok(())
    }
}

/// The bytes of the slots `first` to `last`: where the ring ends in between, two ranges; else the
/// first is empty.
pub(super) fn ranges(layout: &Layout, first: Position, last: Position) -> [(u64, u64); 2] {
    let (start, end) = (layout.slot_offset(first), layout.slot_offset(last));
    let past = end + layout.slot_bytes();
    if start <= end {
        [(start, 0), (start, past - start)]
    } else {
        let begin = layout.slot_offset(Position::NONE);
        [(start, layout.region_bytes() - start), (begin, past - begin)]
    }
}
