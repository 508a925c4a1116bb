//! What a link posts: entries, requests, reads, receives.

use beeline_fabric::{
    LocalData, Operation, PostError, ReceiveRequest, RemoteAddress, RemoteKey, ScatterGatherEntry,
    WorkRequest,
};
use beeline_kv::entry::{self, slot_bytes_for};
use beeline_kv::wire::{Announcement, Place, Request, RequestKind};

use super::{Held, Link, RECEIVE_BYTES, RECEIVES_BATCH};
use crate::client::{Core, Token};
use crate::slot::Work;

impl Link {
    /// Posts what the slot has staged. `body` saves reading key and value back from staging.
    pub(super) fn post(
        &mut self,
        core: &mut Core,
        index: u16,
        body: Option<(&[u8], &[u8])>,
    ) -> Result<(), Held> {
        match self.slots[usize::from(index)].work {
            Work::Free => {}
            Work::Entry => self.post_entry(core, index, body)?,
            Work::Request(kind) => self.post_request(core, index, kind)?,
            Work::EntryAt { place, grant } => self.post_entry_at(core, index, place, grant)?,
            Work::ReadAt(place, length) => {
                self.post_read(core, index, place, length)?;
                return Ok(());
            }
        }
        self.order.push_back(index);
        self.undated += 1;
        core.counters.round_trips += 1;
        Ok(())
    }

    /// Every so often a request must be signalled, so that its predecessors' queue entries are
    /// given back.
    pub(super) fn is_signalled(&mut self) -> bool {
        self.unsignalled += 1;
        let due = self.unsignalled >= self.slots.len().div_ceil(2) as u16;
        if due {
            self.unsignalled = 0;
        }
        due
    }

    fn post_entry(
        &mut self,
        core: &mut Core,
        index: u16,
        body: Option<(&[u8], &[u8])>,
    ) -> Result<(), Held> {
        let slot = &self.slots[usize::from(index)];
        let digest = slot.digest;
        let key_length = usize::from(slot.header.key_length);
        let needed = slot_bytes_for(key_length, slot.header.value_length as usize) as u32;
        let Some(grant) = self.grant else { return Err(Held::NoGrant) };
        let found = self.table.refresh(slot.found, digest);
        let over = self.table.overwritable_at(found, needed);
        let (offset, slot_bytes) = match over {
            Some(stale) => (stale.offset, stale.slot_bytes),
            None if grant.tail.saturating_add(needed) <= grant.length => (grant.tail, needed),
            None => return Err(Held::NoGrant),
        };
        self.seal_header(core, index, slot_bytes, body);
        let announcement =
            Announcement { in_place: over.is_some(), grant: grant.number, offset }.encode();
        let place = Place {
            key: grant.place.key,
            offset: grant.place.offset.wrapping_add(u64::from(offset)),
        };
        self.post_write(core, index, place, announcement)?;
        let slot = &mut self.slots[usize::from(index)];
        slot.tag = Announcement::tag(announcement);
        slot.entry_offset = offset;
        slot.found = self.table.wrote_at(found, digest, offset, slot_bytes);
        if over.is_some() {
            core.counters.overwrites += 1;
        } else {
            core.counters.appends += 1;
            core.counters.appended_bytes += u64::from(needed);
            if let Some(grant) = self.grant.as_mut() {
                grant.tail += needed;
            }
        }
        Ok(())
    }

    /// Has the lines of the segment that an entry will be written to fetched while it is staged.
    pub(super) fn expect_entry(&mut self, index: u16, key_length: usize, value_length: usize) {
        let Some(grant) = self.grant else { return };
        let needed = slot_bytes_for(key_length, value_length);
        let Ok(needed) = u32::try_from(needed) else { return };
        let slot = &mut self.slots[usize::from(index)];
        slot.found = self.table.find(slot.digest);
        let over = self.table.overwritable_at(slot.found, needed);
        let at = over.map_or(grant.tail, |stale| stale.offset);
        let offset = grant.place.offset.wrapping_add(u64::from(at));
        let remote = RemoteAddress { key: RemoteKey(grant.place.key), offset };
        self.qp.expect_write(remote, u64::from(needed));
    }

    /// Stores the entry's header with slot length and checksum.
    fn seal_header(
        &mut self,
        core: &mut Core,
        index: u16,
        slot_bytes: u32,
        body: Option<(&[u8], &[u8])>,
    ) {
        let slot = &mut self.slots[usize::from(index)];
        slot.header.slot_bytes = slot_bytes;
        slot.header.checksum = 0;
        let mut bytes = slot.header.encode();
        slot.header.checksum = match body {
            Some((key, value)) => entry::checksum(&bytes, key, &[value]),
            None => slot.staging.checksum(&bytes, &mut core.scratch),
        };
        bytes[entry::CHECKSUM_AT].copy_from_slice(&slot.header.checksum.to_le_bytes());
        slot.staging.store(0, &bytes);
    }

    fn post_entry_at(
        &mut self,
        core: &mut Core,
        index: u16,
        place: Place,
        grant: u8,
    ) -> Result<(), Held> {
        let slot = &self.slots[usize::from(index)];
        let key_length = usize::from(slot.header.key_length);
        let needed = slot_bytes_for(key_length, slot.header.value_length as usize) as u32;
        let announcement =
            Announcement { in_place: false, grant, offset: slot.entry_offset }.encode();
        self.seal_header(core, index, needed, None);
        self.post_write(core, index, place, announcement)?;
        self.slots[usize::from(index)].tag = Announcement::tag(announcement);
        core.counters.appends += 1;
        core.counters.appended_bytes += u64::from(needed);
        Ok(())
    }

    fn post_write(
        &mut self,
        core: &mut Core,
        index: u16,
        place: Place,
        immediate: u32,
    ) -> Result<(), Held> {
        let wr_id = u64::from(index);
        let signalled = self.is_signalled();
        let slot = &self.slots[usize::from(index)];
        let length = u64::from(slot.staging.bytes);
        let range = [slot.staging.range()];
        let operation = Operation::WriteWithImmediate {
            local: slot.staging.local(&range),
            remote: RemoteAddress { key: RemoteKey(place.key), offset: place.offset },
            immediate,
        };
        self.qp.post_send(&[WorkRequest { wr_id, operation, signalled }])?;
        core.counters.writes += 1;
        core.counters.bytes_out += length;
        Ok(())
    }

    fn post_request(&mut self, core: &mut Core, index: u16, kind: RequestKind) -> Result<(), Held> {
        if self.welcome.protocol.uses_slots() {
            let place = Place {
                key: self.welcome.area_key,
                offset: u64::from(index) * u64::from(self.welcome.slot_bytes),
            };
            return self.post_write(core, index, place, u32::from(index));
        }
        let wr_id = u64::from(index);
        let signalled = self.is_signalled();
        let slot = &self.slots[usize::from(index)];
        let bare;
        let range;
        let local = match kind {
            RequestKind::Grant | RequestKind::Allocate => {
                let needed = slot_bytes_for(
                    usize::from(slot.header.key_length),
                    slot.header.value_length as usize,
                );
                let argument = if kind == RequestKind::Allocate { needed } else { 0 };
                let request =
                    Request { argument, released: self.released, ..Request::new(kind, slot.tag) };
                bare = request.encode();
                LocalData::Inline(&bare)
            }
            _ => {
                range = [slot.staging.range()];
                slot.staging.local(&range)
            }
        };
        let length = local.length();
        let operation = Operation::Send { local, immediate: None };
        self.qp.post_send(&[WorkRequest { wr_id, operation, signalled }])?;
        core.counters.sends += 1;
        core.counters.bytes_out += length;
        Ok(())
    }

    fn post_read(
        &mut self,
        core: &mut Core,
        index: u16,
        place: Place,
        length: u32,
    ) -> Result<(), Held> {
        let wr_id = u64::from(index);
        let slot = &self.slots[usize::from(index)];
        let local = ScatterGatherEntry {
            region: &slot.result.region,
            offset: slot.result.offset,
            length: u64::from(length),
        };
        let remote = RemoteAddress { key: RemoteKey(place.key), offset: place.offset };
        self.qp.post_send(&[WorkRequest::new(wr_id, Operation::Read { local, remote })])?;
        self.unsignalled = 0;
        self.reading += 1;
        core.counters.reads += 1;
        core.counters.round_trips += 1;
        Ok(())
    }

    pub(super) fn ask_for_grant(&mut self, core: &mut Core) {
        let Some(index) = self.grant_slot else { return };
        let tag = self.next_tag;
        let slot = &mut self.slots[usize::from(index)];
        slot.token = Token::NONE;
        slot.tag = tag;
        slot.deadline_ns = None;
        slot.work = Work::Request(RequestKind::Grant);
        // On failure the next settling asks again.
        if self.post(core, index, None).is_ok() {
            self.next_tag = tag.wrapping_add(1);
            self.grant_slot = None;
            core.counters.grants += 1;
        }
    }

    pub(super) fn post_receives(&mut self) -> Result<(), PostError> {
        while !self.consumed.is_empty() {
            let count = self.consumed.len().min(RECEIVES_BATCH);
            let start = self.consumed.len() - count;
            let requests: [ReceiveRequest<'_>; RECEIVES_BATCH] = std::array::from_fn(|i| {
                let index = self.consumed[start + i.min(count - 1)];
                let buffer = ScatterGatherEntry {
                    region: &self.receives,
                    offset: u64::from(index) * u64::from(RECEIVE_BYTES),
                    length: u64::from(RECEIVE_BYTES),
                };
                ReceiveRequest { wr_id: u64::from(index), buffer: Some(buffer) }
            });
            self.qp.post_receive(&requests[..count])?;
            self.consumed.truncate(start);
        }
        Ok(())
    }
}
